//! What the ACLs of an endpoint do with a packet (hns.md 4.1).

use std::net::Ipv4Addr;

use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType};
use tracing::warn;

use crate::addresses::{NotUnderstood, Ranges, addresses, ports};
use crate::config::{Config, DefaultAction};

/// The way of a packet, seen from the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// To the endpoint.
    In,
    /// From the endpoint.
    Out,
}

/// What an ACL can see of a packet. Local is the endpoint, remote its peer, whatever the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packet {
    /// To or from the endpoint.
    pub way: Way,
    /// The IP protocol number.
    pub protocol: u8,
    /// The endpoint's address.
    pub local: Ipv4Addr,
    /// The peer's address.
    pub remote: Ipv4Addr,
    /// The endpoint's port; 0 where the protocol has none.
    pub local_port: u16,
    /// The peer's port; 0 where the protocol has none.
    pub remote_port: u16,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Allow,
    /// It is dropped.
    Block,
}

/// The ACLs of one endpoint, ready to be asked.
#[derive(Debug, Clone)]
pub(crate) struct AccessControl {
    /// Sorted by priority.
    switch: Vec<Rule>,
    host: Vec<Rule>,
    switch_default: DefaultAction,
    host_default: Option<DefaultAction>,
}

impl AccessControl {
    /// `set` gives the values of a SetPolicy of the endpoint's network.
    pub(crate) fn new<'a>(
        acls: impl IntoIterator<Item = Acl>,
        set: &dyn Fn(&str) -> Option<&'a str>,
        config: &Config,
    ) -> Result<AccessControl, NotUnderstood> {
        let (mut switch, mut host) = (Vec::new(), Vec::new());
        for acl in acls {
            let list = if acl.rule_type == AclRuleType::Switch { &mut switch } else { &mut host };
            list.push(Rule::new(&acl, set)?);
        }
        switch.sort_by_key(|rule: &Rule| rule.priority);
        let Config { switch_default, host_default, .. } = *config;
        Ok(AccessControl { switch, host, switch_default, host_default })
    }

    /// A packet has to pass the switch's port and, if it takes part, the node's firewall.
    pub(crate) fn judge(&self, packet: &Packet) -> Verdict {
        let switch = first_match(&self.switch, packet)
            .unwrap_or_else(|| by_default(&self.switch, self.switch_default, packet));
        let host = match self.host_default {
            None => Verdict::Allow,
            Some(default) => {
                // Host rules have no order: a block wins.
                let matching: Vec<&Rule> = self.host.iter().filter(|rule| rule.matches(packet)).collect();
                block_wins(&matching).unwrap_or_else(|| by_default(&self.host, default, packet))
            }
        };
        if switch == Verdict::Allow { host } else { Verdict::Block }
    }
}

/// The action of the matching rules of the lowest priority number. Which of two actions of equal priority HNS takes is
/// not documented, so a client that depends on it is told.
fn first_match(rules: &[Rule], packet: &Packet) -> Option<Verdict> {
    let first = rules.iter().position(|rule| rule.matches(packet))?;
    let equals = rules[first..].iter().take_while(|rule| rule.priority == rules[first].priority);
    let matching: Vec<&Rule> = equals.filter(|rule| rule.matches(packet)).collect();
    if let Some(other) = matching.iter().find(|rule| rule.verdict != matching[0].verdict) {
        let (priority, a, b) = (other.priority, &matching[0].id, &other.id);
        warn!(
            ?packet,
            priority, a, b, "ACLs of equal priority disagree; Block is taken, HNS may do otherwise"
        );
    }
    block_wins(&matching)
}

fn block_wins(matching: &[&Rule]) -> Option<Verdict> {
    match matching {
        [] => None,
        _ if matching.iter().any(|rule| rule.verdict == Verdict::Block) => Some(Verdict::Block),
        _ => Some(Verdict::Allow),
    }
}

fn by_default(rules: &[Rule], default: DefaultAction, packet: &Packet) -> Verdict {
    let closed = match default {
        DefaultAction::DenyBoth => !rules.is_empty(),
        DefaultAction::DenySameDirection => rules.iter().any(|rule| rule.way == packet.way),
        DefaultAction::Allow => false,
    };
    // Without ACLs, everything goes out, and ICMP, IGMP, TCP and UDP come in.
    if !closed && (packet.way == Way::Out || matches!(packet.protocol, 1 | 2 | 6 | 17)) {
        Verdict::Allow
    } else {
        Verdict::Block
    }
}

#[derive(Debug, Clone)]
struct Rule {
    id: String,
    way: Way,
    verdict: Verdict,
    priority: u16,
    protocols: Vec<u16>,
    local: Ranges,
    remote: Ranges,
    local_ports: Ranges,
    remote_ports: Ranges,
}

/// "Any protocol", as HNS writes it.
const ANY_PROTOCOL: u16 = 256;

impl Rule {
    fn new<'a>(acl: &Acl, set: &dyn Fn(&str) -> Option<&'a str>) -> Result<Rule, NotUnderstood> {
        let protocols = acl.protocols.split(',').filter(|part| !part.is_empty());
        let protocols = protocols.map(|part| {
            part.parse().ok().filter(|p| *p <= ANY_PROTOCOL).ok_or_else(|| NotUnderstood(part.to_owned()))
        });
        Ok(Rule {
            id: acl.id.clone(),
            way: match acl.direction {
                AclDirection::In => Way::In,
                AclDirection::Out => Way::Out,
                AclDirection::Unknown(ref text) => return Err(NotUnderstood(text.clone())),
            },
            verdict: match acl.action {
                AclAction::Allow => Verdict::Allow,
                AclAction::Block => Verdict::Block,
                // Pass belongs into a TierAcl.
                ref other => return Err(NotUnderstood(other.to_string())),
            },
            priority: acl.priority,
            protocols: protocols.collect::<Result<_, _>>()?,
            local: addresses(&acl.local_addresses, set)?,
            remote: addresses(&acl.remote_addresses, set)?,
            local_ports: ports(&acl.local_ports)?,
            remote_ports: ports(&acl.remote_ports)?,
        })
    }

    fn matches(&self, packet: &Packet) -> bool {
        let protocol = u16::from(packet.protocol);
        let has_ports = matches!(packet.protocol, 6 | 17 | 132);
        let port = |list: &Ranges, port: u16| match list {
            Ranges::Any => true,
            some => has_ports && some.contains(port.into()),
        };
        self.way == packet.way
            && (self.protocols.is_empty()
                || self.protocols.iter().any(|p| *p == protocol || *p == ANY_PROTOCOL))
            && self.local.contains(packet.local.into())
            && self.remote.contains(packet.remote.into())
            && port(&self.local_ports, packet.local_port)
            && port(&self.remote_ports, packet.remote_port)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_hcn::Version;
    use tortie_hcn::schema::lenient;

    use super::*;

    fn config(switch_default: DefaultAction) -> Config {
        let config = Config::new(Version::new(13, 2), Ipv4Addr::LOCALHOST);
        Config { switch_default, host_default: None, ..config }
    }

    fn acl(priority: u16, action: &str, direction: &str, more: serde_json::Value) -> Acl {
        let mut acl =
            json!({"Action": action, "Direction": direction, "RuleType": "Switch", "Priority": priority});
        acl.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        lenient(&acl.to_string()).unwrap()
    }

    fn judge(acls: &[Acl], default: DefaultAction, packet: Packet) -> bool {
        let control = AccessControl::new(acls.to_vec(), &|_| None, &config(default)).unwrap();
        control.judge(&packet) == Verdict::Allow
    }

    fn tcp_in(remote: &str, local_port: u16) -> Packet {
        Packet {
            way: Way::In,
            protocol: 6,
            local: Ipv4Addr::new(10, 0, 0, 5),
            remote: remote.parse().unwrap(),
            local_port,
            remote_port: 40000,
        }
    }

    #[test]
    fn lower_priority_number_first_whatever_the_order() {
        let allow = acl(1000, "Allow", "In", json!({"RemoteAddresses": "10.1.0.0/16"}));
        let block = acl(1001, "Block", "In", json!({}));
        for acls in [[allow.clone(), block.clone()], [block, allow]] {
            assert!(judge(&acls, DefaultAction::DenyBoth, tcp_in("10.1.2.3", 80)));
            assert!(!judge(&acls, DefaultAction::DenyBoth, tcp_in("10.2.2.3", 80)));
        }
    }

    #[test]
    fn equal_priority_block_wins() {
        let acls = [acl(1000, "Allow", "In", json!({})), acl(1000, "Block", "In", json!({"Protocols": "6"}))];
        assert!(!judge(&acls, DefaultAction::Allow, tcp_in("10.1.2.3", 80)));
        assert!(judge(&acls, DefaultAction::Allow, Packet { protocol: 17, ..tcp_in("10.1.2.3", 80) }));
    }

    #[test]
    fn local_is_the_endpoint_and_remote_the_peer_both_ways() {
        let criteria = json!({"LocalAddresses": "10.0.0.5", "RemoteAddresses": "10.1.2.3", "LocalPorts": "80",
            "RemotePorts": "40000-40001", "Protocols": "6"});
        for (direction, way) in [("In", Way::In), ("Out", Way::Out)] {
            let acls = [acl(1000, "Allow", direction, criteria.clone())];
            let packet = Packet { way, ..tcp_in("10.1.2.3", 80) };
            assert!(judge(&acls, DefaultAction::DenyBoth, packet));
            for wrong in [
                Packet { local: Ipv4Addr::new(10, 0, 0, 6), ..packet },
                Packet { remote: Ipv4Addr::new(10, 1, 2, 4), ..packet },
                Packet { local_port: 81, ..packet },
                Packet { remote_port: 40002, ..packet },
                Packet { protocol: 17, ..packet },
            ] {
                assert!(!judge(&acls, DefaultAction::DenyBoth, wrong), "{wrong:?}");
            }
        }
    }

    #[test]
    fn defaults() {
        use DefaultAction::*;
        let (tcp, gre) = (tcp_in("10.1.2.3", 80), Packet { protocol: 47, ..tcp_in("10.1.2.3", 80) });
        let out = Packet { way: Way::Out, ..gre };
        let none: [Acl; 0] = [];
        let lone = [acl(1000, "Block", "In", json!({"Protocols": "17"}))];
        for default in [DenyBoth, DenySameDirection, Allow] {
            assert!(judge(&none, default, tcp));
            assert!(!judge(&none, default, gre), "not TCP, UDP, ICMP, IGMP");
            assert!(judge(&none, default, out));
            assert_eq!(judge(&lone, default, tcp), default == Allow, "{default:?}");
            assert_eq!(judge(&lone, default, out), default != DenyBoth, "{default:?}");
        }
    }

    #[test]
    fn ports_do_not_match_a_protocol_without_ports() {
        let acls = [acl(1000, "Allow", "In", json!({"LocalPorts": "0-65535"}))];
        let icmp = Packet { protocol: 1, local_port: 0, remote_port: 0, ..tcp_in("10.1.2.3", 0) };
        assert!(!judge(&acls, DefaultAction::DenyBoth, icmp));
        assert!(judge(&acls, DefaultAction::DenyBoth, tcp_in("10.1.2.3", 0)));
    }

    #[test]
    fn the_firewall_is_asked_too() {
        let switch = acl(1000, "Allow", "In", json!({}));
        let mut host = acl(0, "Allow", "In", json!({"Protocols": "256"}));
        host.rule_type = AclRuleType::Host;
        let mut closed = host.clone();
        (closed.action, closed.remote_addresses) = (AclAction::Block, "10.1.2.3".into());
        let config =
            Config { host_default: Some(DefaultAction::DenyBoth), ..config(DefaultAction::DenyBoth) };
        let judge = |acls: Vec<Acl>, remote| {
            AccessControl::new(acls, &|_| None, &config).unwrap().judge(&tcp_in(remote, 80)) == Verdict::Allow
        };
        assert!(judge(vec![switch.clone(), host.clone()], "10.1.2.3"));
        assert!(!judge(vec![switch.clone(), host.clone(), closed.clone()], "10.1.2.3"));
        assert!(judge(vec![switch.clone(), host, closed.clone()], "10.1.2.4"));
        assert!(!judge(vec![switch, closed], "10.1.2.4"), "a host rule closes the rest");
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for more in [
            json!({"Action": "Pass"}),
            json!({"Direction": "Up"}),
            json!({"Protocols": "tcp"}),
            json!({"Protocols": "257"}),
            json!({"RemoteAddresses": "Any"}),
            json!({"LocalPorts": "http"}),
        ] {
            let rule = acl(1000, "Allow", "In", more.clone());
            let control = AccessControl::new([rule], &|_| None, &config(DefaultAction::Allow));
            assert!(control.is_err(), "{more}");
        }
    }
}
