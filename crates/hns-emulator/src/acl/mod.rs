//! Evaluates the ACLs of an endpoint for a packet (docs/hns.md, ACLs).

mod rule;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use tortie_hcn::schema::{Acl, AclRuleType};
use tracing::warn;

use crate::config::{Config, DefaultAction, EqualPriority};
use crate::sets::{Sets, values};
pub(crate) use rule::NotUnderstood;
use rule::Rule;

/// The direction of a packet, seen from the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PacketDirection {
    /// To the endpoint.
    In,
    /// From the endpoint.
    Out,
}

/// The properties of a packet that ACLs match on. Local is the endpoint and remote its peer, in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packet {
    /// To or from the endpoint.
    pub direction: PacketDirection,
    /// The IP protocol number.
    pub protocol: u8,
    /// The endpoint's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The endpoint's port; 0 if the protocol has no ports.
    pub local_port: u16,
    /// The peer's port; 0 if the protocol has no ports.
    pub remote_port: u16,
}

/// The verdict on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Allow,
    /// It is dropped.
    Block,
}

/// The parsed ACLs of one endpoint.
#[derive(Debug, Clone)]
pub(crate) struct AccessControl {
    /// Sorted by priority.
    switch: Vec<Rule>,
    host: Vec<Rule>,
    switch_default: DefaultAction,
    host_default: Option<DefaultAction>,
    equal_priority: EqualPriority,
    /// Whether an ICMP error that belongs to an established flow passes without evaluation of the ACLs.
    pub(crate) related_icmp_passes: bool,
    /// The sets that the ACLs name.
    sets: Vec<String>,
}

impl AccessControl {
    /// `sets` are the sets of the endpoint's network.
    pub(crate) fn new(
        acls: impl IntoIterator<Item = Acl>,
        sets: &Sets,
        config: &Config,
    ) -> Result<AccessControl, NotUnderstood> {
        let (mut switch, mut host, mut named) = (Vec::new(), Vec::new(), Vec::new());
        for acl in acls {
            let list = if acl.rule_type == AclRuleType::Switch { &mut switch } else { &mut host };
            list.push(Rule::new(&acl, sets, config)?);
            let sides =
                [&acl.local_addresses, &acl.remote_addresses].into_iter().flat_map(|list| values(list));
            named.extend(sides.filter(|value| sets.members(value).is_some()).map(str::to_owned));
        }
        switch.sort_by_key(|rule: &Rule| rule.priority);
        let Config { switch_default, host_default, equal_priority, related_icmp_passes, .. } = *config;
        Ok(AccessControl {
            switch,
            host,
            switch_default,
            host_default,
            equal_priority,
            related_icmp_passes,
            sets: named,
        })
    }

    /// The sets that the ACLs name.
    pub(crate) fn sets(&self) -> &[String] {
        &self.sets
    }

    /// A packet must pass the switch port and, if it is involved, the node's firewall.
    pub(crate) fn judge(&self, packet: &Packet) -> Verdict {
        let switch = self.first_match(packet);
        let switch = switch.unwrap_or_else(|| by_default(&self.switch, self.switch_default, packet));
        let host = match self.host_default {
            None => Verdict::Allow,
            Some(default) => {
                // Host rules have no order: Block wins.
                let matching = self.host.iter().filter(|rule| rule.matches(packet)).map(|rule| rule.verdict);
                let decided = matching.reduce(|a, b| if a == Verdict::Block { a } else { b });
                decided.unwrap_or_else(|| by_default(&self.host, default, packet))
            }
        };
        if switch == Verdict::Allow { host } else { Verdict::Block }
    }

    /// The action of the matching rules with the lowest priority number. It is not documented which of two different
    /// actions with equal priority HNS takes, so such a conflict is logged.
    fn first_match(&self, packet: &Packet) -> Option<Verdict> {
        let mut matching = self.switch.iter().filter(|rule| rule.matches(packet));
        let first = matching.next()?;
        let mut equals = matching.take_while(|rule| rule.priority == first.priority);
        let Some(other) = equals.find(|rule| rule.verdict != first.verdict) else {
            return Some(first.verdict);
        };
        let (priority, a, b) = (other.priority, &first.id, &other.id);
        warn!(?packet, priority, a, b, "ACLs of equal priority disagree; HNS may take either");
        Some(match self.equal_priority {
            EqualPriority::BlockWins => Verdict::Block,
            EqualPriority::AllowWins => Verdict::Allow,
        })
    }
}

fn by_default(rules: &[Rule], default: DefaultAction, packet: &Packet) -> Verdict {
    let closed = match default {
        DefaultAction::DenyBoth => !rules.is_empty(),
        DefaultAction::DenySameDirection => rules.iter().any(|rule| rule.direction == packet.direction),
        DefaultAction::Allow => false,
    };
    // Without ACLs, all outgoing packets pass, and incoming ICMP of both families, IGMP, TCP and UDP.
    if !closed && (packet.direction == PacketDirection::Out || matches!(packet.protocol, 1 | 2 | 6 | 17 | 58))
    {
        Verdict::Allow
    } else {
        Verdict::Block
    }
}
