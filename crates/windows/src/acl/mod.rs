//! ACLs from an endpoint's program.
//!
//! The list of an endpoint is total in both directions: it says explicitly what becomes of every packet, because what
//! HNS does with a packet that no ACL matches differs between builds (docs/hns.md, ACLs). Its order is made by
//! priorities only, and what overlaps at one priority has one action. [`transition`] rests on both.
//!
//! A program is [rendered](render) into rows, which name peers as rules do, by sets. For HNS the rows are
//! [listed](Rows::list): with the identifiers of sets where HNS has such, and else with the addresses that are in the
//! sets at the time.

mod flatten;
mod numbers;
mod peers;
mod priorities;
mod region;
mod rows;
mod services;
mod shape;
mod spell;
mod transition;

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tortie_api::net::{Direction, Protocol};
use tortie_dataplane::{Condition, Endpoint, Reason, Settings};
use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType, Extra, Policy};
use tortie_policy::program::Lookup;

use flatten::flatten;
pub use flatten::{NO_PROFILE, end_of_tier};
use numbers::Addresses;
pub use numbers::Ports;
use priorities::priorities;
use region::View;
use rows::{Row, rows};
use spell::Speller;

pub use peers::OUR_SETS;
pub use rows::ANY_PROTOCOL;
pub use services::{Frontends, Judged, SERVICE, Services};
pub use shape::{Shape, shape};
pub use spell::{CHUNK, Set, Sets, port_lists, text};
pub use transition::{Transition, anonymous, transition};

/// Traffic of the node itself to its own pods, before policy.
pub const NODE_PRIORITY: u16 = 900;
/// Tunnels from pods, before policy.
const TUNNEL_PRIORITY: u16 = 950;
/// The first priority of policy.
pub const FIRST_PRIORITY: u16 = 1000;
/// The lowest that works: the endpoint's closure, which holds whatever else is there.
pub const LAST_PRIORITY: u16 = 65_500;

/// Where the endpoint's closure comes from.
pub const CLOSED: &str = "closed";

/// What all our ACLs' identifiers begin with. ACLs of others on the same endpoint are left alone.
const OURS: &str = "tortie/";

/// Whether the ACL is one of ours.
pub fn is_ours(acl: &Acl) -> bool {
    acl.id.starts_with(OURS)
}

/// Whether the ACL is about what packets meet before policy: the node's own firewall, and the node itself.
pub fn is_before_policy(acl: &Acl) -> bool {
    acl.rule_type != AclRuleType::Switch || (is_ours(acl) && acl.priority < FIRST_PRIORITY)
}

/// Whether the ACL is one of ours that comes from there.
pub fn comes_from(acl: &Acl, origin: &str) -> bool {
    acl.id == id(origin)
}

/// The identifier of ACLs from there. A space in one is nowhere said to be allowed.
fn id(origin: &str) -> String {
    format!("{OURS}{}", origin.replace(' ', "/"))
}

/// Whether an ACL that cannot be read is one of ours.
pub fn has_our_mark(policy: &Policy) -> bool {
    let id = policy.settings.get("Id").and_then(serde_json::Value::as_str);
    id.is_some_and(|id| id.starts_with(OURS))
}

/// What closes an endpoint both ways. It is in the document that creates the endpoint, and stays for good behind policy.
pub fn closed() -> Vec<Acl> {
    [AclDirection::In, AclDirection::Out]
        .map(|direction| any(AclAction::Block, direction, LAST_PRIORITY, CLOSED))
        .to_vec()
}

/// What an endpoint is to have, before it is known which sets can be named.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The ACLs whose priorities are given.
    fixed: Vec<Acl>,
    /// The endpoint's own addresses.
    own: Addresses,
    /// What policy decides about packets to the endpoint, and from it.
    policy: [(AclDirection, Vec<Row>); 2],
    /// What Services have added to it.
    services: Option<Arc<Judged>>,
}

/// The ACLs of an endpoint, but for the priorities of those that policy is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    fixed: Vec<Acl>,
    policy: [Vec<Acl>; 2],
}

/// What the endpoint is to have, and what the operator should know. `node` are the node's own addresses. Where `by_name`,
/// peers may be named by sets.
/// Before what policy says of packets from the endpoint comes what Services add.
pub fn render<L: Lookup>(
    endpoint: &Endpoint,
    node: &BTreeSet<Ipv4Addr>,
    by_name: bool,
    services: &Services<'_, L>,
    settings: &Settings,
    lookup: &L,
) -> (Rows, Vec<Condition>) {
    let own: BTreeSet<Ipv4Addr> = endpoint.addresses.iter().filter_map(v4).collect();
    let own_addresses = Addresses::of_nets(own.iter().copied().map(Into::into));
    let mut rendered = Rows {
        fixed: closed(),
        own: own_addresses.clone(),
        policy: [(AclDirection::In, vec![]), (AclDirection::Out, vec![])],
        services: None,
    };
    let mut conditions = unserved_addresses(endpoint);
    if own.is_empty() {
        return (rendered, conditions);
    }
    rendered.fixed.extend(before_policy(node));
    rendered.fixed.extend(never_sent(settings));
    let view = View { own: &own_addresses, by_name, lookup };
    for (direction, (_, policy)) in
        [Direction::Ingress, Direction::Egress].into_iter().zip(&mut rendered.policy)
    {
        let (list, told) = flatten(&endpoint.program, direction, view);
        conditions.extend(told);
        *policy = rows(&list);
        if direction == Direction::Egress {
            let judged = services.judge(list);
            policy.splice(..0, judged.judgement.rows.iter().cloned());
            conditions.extend_from_slice(&judged.judgement.conditions);
            rendered.services = Some(judged);
        }
        if runs(policy.iter().map(|row| &row.action)) > usize::from(LAST_PRIORITY - FIRST_PRIORITY) {
            policy.clear();
            let message = format!(
                "the {direction:?} policy needs more than the {} priorities that HNS has: all {direction:?} traffic is denied",
                LAST_PRIORITY - FIRST_PRIORITY
            );
            conditions.push(Condition::new(Reason::TooManyRules, message));
        }
    }
    conditions.sort();
    conditions.dedup();
    (rendered, conditions)
}

impl Rows {
    /// What Services have added to the endpoint's egress.
    pub fn services(&self) -> Option<&Arc<Judged>> {
        self.services.as_ref()
    }

    /// The same with ACLs of the operator's before policy.
    pub fn with_static_rules(mut self, acls: &[Acl]) -> Self {
        self.fixed.extend_from_slice(acls);
        self
    }

    /// The ACLs. Of those that would name sets, `spell_out` is asked whether they must not.
    pub fn list<L: Lookup>(&self, sets: &Sets<'_, L>, spell_out: &dyn Fn(&[Acl]) -> bool) -> List {
        let policy = self.policy.each_ref().map(|(direction, rows)| {
            let speller = Speller { direction: direction.clone(), own: &self.own, sets };
            let acls: Vec<Acl> = rows.iter().flat_map(|row| speller.acls(row, spell_out)).collect();
            // What comes a second time decides nothing.
            let mut seen = HashSet::with_capacity(acls.len());
            let first: Vec<bool> = acls.iter().map(|acl| seen.insert(acl)).collect();
            acls.into_iter().zip(first).filter_map(|(acl, first)| first.then_some(acl)).collect()
        });
        List { fixed: self.fixed.clone(), policy }
    }
}

impl List {
    /// The ACLs with their priorities, which those that are there already keep where that can be.
    pub fn numbered(&self, actual: &[Acl]) -> Vec<Acl> {
        let numbered = |policy: &Vec<Acl>| {
            // There is room for all runs, or they would not have been rendered.
            let priorities = priorities(policy, actual, FIRST_PRIORITY..LAST_PRIORITY).unwrap_or_default();
            let acls = policy.iter().zip(priorities);
            acls.map(|(acl, priority)| Acl { priority, ..acl.clone() }).collect::<Vec<_>>()
        };
        self.fixed.iter().cloned().chain(self.policy.iter().flat_map(numbered)).collect()
    }

    /// The identifiers of the sets that it names.
    pub fn set_ids(&self) -> BTreeSet<String> {
        self.policy.iter().flatten().flat_map(named_sets).map(str::to_owned).collect()
    }
}

/// The identifiers of our sets that an ACL names.
pub fn named_sets(acl: &Acl) -> impl Iterator<Item = &str> {
    let parts = [&acl.local_addresses, &acl.remote_addresses].into_iter().flat_map(|list| list.split(','));
    parts.filter(|part| part.starts_with(OUR_SETS))
}

/// How often the action changes, and one.
fn runs<'a>(actions: impl Iterator<Item = &'a AclAction>) -> usize {
    let mut last = None;
    actions.filter(|action| last.replace(*action) != Some(*action)).count()
}

fn v4(address: &IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    }
}

fn unserved_addresses(endpoint: &Endpoint) -> Vec<Condition> {
    let six = endpoint.addresses.iter().filter(|address| address.is_ipv6());
    let message =
        |address: &IpAddr| format!("{address}: Windows has no IPv6 on VXLAN; the address is closed");
    six.map(|address| Condition::new(Reason::AddressNotServed, message(address))).collect()
}

/// What every endpoint has for what packets meet before policy.
pub fn before_policy(node: &BTreeSet<Ipv4Addr>) -> Vec<Acl> {
    // The node's own firewall, which a packet has to pass as well, leaves the decision to the switch.
    let host = [AclDirection::In, AclDirection::Out]
        .map(|direction| Acl { rule_type: AclRuleType::Host, ..any(AclAction::Allow, direction, 0, "host") });
    node_to_pod(node).into_iter().chain(host).collect()
}

/// Probes come from the node itself, and always get through (policy decision 2).
fn node_to_pod(node: &BTreeSet<Ipv4Addr>) -> Option<Acl> {
    let addresses: Vec<String> = node.iter().map(Ipv4Addr::to_string).collect();
    // An empty list would mean everybody.
    (!addresses.is_empty()).then(|| Acl {
        remote_addresses: addresses.join(","),
        ..any(AclAction::Allow, AclDirection::In, NODE_PRIORITY, "node")
    })
}

/// What no pod sends, whatever its policy: tunnels, unless the operator allows them, as another node would take what is
/// in them for packets of its own (policy decision 38).
fn never_sent(settings: &Settings) -> Vec<Acl> {
    let block = |protocol: Protocol, remote_ports: &str, origin: &str| Acl {
        protocols: protocol.0.to_string(),
        remote_ports: remote_ports.to_owned(),
        ..any(AclAction::Block, AclDirection::Out, TUNNEL_PRIORITY, origin)
    };
    let vxlan = (!settings.vxlan_from_workloads).then(|| block(Protocol::UDP, "4789", "no VXLAN from pods"));
    let ipip = (!settings.ipip_from_workloads).then(|| block(Protocol::IPIP, "", "no IPIP from pods"));
    vxlan.into_iter().chain(ipip).collect()
}

/// The ACL about all packets of one direction that a static rule begins with.
pub fn of_static_rule(action: AclAction, direction: AclDirection, name: &str) -> Acl {
    any(action, direction, 0, &format!("static {name}"))
}

/// The ACL about all packets of one direction.
pub fn any(action: AclAction, direction: AclDirection, priority: u16, origin: &str) -> Acl {
    Acl {
        id: id(origin),
        protocols: rows::ANY_PROTOCOL.to_string(),
        action,
        direction,
        local_addresses: String::new(),
        remote_addresses: String::new(),
        local_ports: String::new(),
        remote_ports: String::new(),
        rule_type: AclRuleType::Switch,
        priority,
        extra: Extra::new(),
    }
}
