//! ACLs from an endpoint's program.
//!
//! The list of an endpoint is total in both directions: it says explicitly what becomes of every packet, because what
//! HNS does with a packet that no ACL matches differs between builds (hns.md 4.1). Its order is made by priorities only,
//! and rules of equal priority have the same action. [`transition`] rests on both.

mod flatten;
mod numbers;
mod region;
mod rows;
mod transition;

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use tortie_api::net::Direction;
use tortie_dataplane::{Condition, Endpoint};
use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType, Extra, Policy};
use tortie_policy::program::Lookup;

use flatten::flatten;
pub use flatten::{NO_PROFILE, end_of_tier};
use numbers::Addresses;
pub use rows::ANY_PROTOCOL;
use rows::{Row, rows};
pub use transition::{Transition, anonymous, transition};

/// Traffic of the node itself to its own pods, before policy.
const NODE_PRIORITY: u16 = 900;
/// The first priority of policy.
const FIRST_PRIORITY: u16 = 1000;
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

/// The ACLs that the endpoint is to have, and what the operator should know. `node` are the node's own addresses.
pub fn render(
    endpoint: &Endpoint,
    node: &BTreeSet<Ipv4Addr>,
    lookup: &impl Lookup,
) -> (Vec<Acl>, Vec<Condition>) {
    let own: BTreeSet<Ipv4Addr> = endpoint.addresses.iter().filter_map(v4).collect();
    let mut acls = closed();
    let mut conditions = unserved_addresses(endpoint);
    if own.is_empty() {
        return (acls, conditions);
    }
    acls.extend(node_to_pod(node));
    // The node's own firewall, which a packet has to pass as well, leaves the decision to the switch.
    acls.extend([AclDirection::In, AclDirection::Out].map(|direction| Acl {
        rule_type: AclRuleType::Host,
        ..any(AclAction::Allow, direction, 0, "host")
    }));
    let own = Addresses::of_nets(own.into_iter().map(Into::into));
    for direction in [Direction::Ingress, Direction::Egress] {
        let (list, told) = flatten(&endpoint.program, direction, &own, lookup);
        conditions.extend(told);
        match numbered(rows(&list), direction) {
            Some(policy) => acls.extend(policy),
            None => conditions.push(Condition {
                reason: "TooManyRules",
                message: format!(
                    "{direction:?} policy needs more than the {} priorities that HNS has: all of it is denied",
                    LAST_PRIORITY - FIRST_PRIORITY
                ),
            }),
        }
    }
    conditions.sort();
    conditions.dedup();
    let mut seen = HashSet::new();
    acls.retain(|acl| seen.insert(acl.clone()));
    (acls, conditions)
}

fn v4(address: &IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    }
}

fn unserved_addresses(endpoint: &Endpoint) -> Vec<Condition> {
    let six = endpoint.addresses.iter().filter(|address| address.is_ipv6());
    let condition = |address: &IpAddr| Condition {
        reason: "AddressNotServed",
        message: format!("{address}: Windows has no IPv6 on VXLAN; the address is closed"),
    };
    six.map(condition).collect()
}

/// Probes come from the node itself, and always get through (semantics 2).
fn node_to_pod(node: &BTreeSet<Ipv4Addr>) -> Option<Acl> {
    let addresses: Vec<String> = node.iter().map(Ipv4Addr::to_string).collect();
    // An empty list would mean everybody.
    (!addresses.is_empty()).then(|| Acl {
        remote_addresses: addresses.join(","),
        ..any(AclAction::Allow, AclDirection::In, NODE_PRIORITY, "node")
    })
}

/// The rows as ACLs: the priority rises where the action changes, so that rules may come and go within a run without
/// moving others. `None` if there are not enough priorities.
fn numbered(rows: Vec<Row>, direction: Direction) -> Option<Vec<Acl>> {
    let direction = match direction {
        Direction::Ingress => AclDirection::In,
        Direction::Egress => AclDirection::Out,
    };
    let mut acls: Vec<Acl> = Vec::with_capacity(rows.len());
    for row in rows {
        let priority = match acls.last() {
            None => FIRST_PRIORITY,
            Some(last) if last.action == row.action => last.priority,
            Some(last) => last.priority + 1,
        };
        if priority >= LAST_PRIORITY {
            return None;
        }
        acls.push(Acl {
            protocols: row.protocol.to_string(),
            local_addresses: row.local_addresses,
            remote_addresses: row.remote_addresses,
            local_ports: row.local_ports,
            remote_ports: row.remote_ports,
            ..any(row.action, direction.clone(), priority, &row.origin)
        });
    }
    Some(acls)
}

/// The ACL about all packets of one direction.
fn any(action: AclAction, direction: AclDirection, priority: u16, origin: &str) -> Acl {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn in_turn(count: usize) -> Vec<Row> {
        let row = |index: usize| Row {
            action: if index.is_multiple_of(2) { AclAction::Allow } else { AclAction::Block },
            protocol: rows::ANY_PROTOCOL,
            local_addresses: String::new(),
            remote_addresses: String::new(),
            local_ports: String::new(),
            remote_ports: String::new(),
            origin: "test".into(),
        };
        (0..count).map(row).collect()
    }

    #[test]
    fn priorities_rise_where_the_action_changes_and_end_before_the_closure() {
        let mut rows = in_turn(4);
        rows.swap(1, 2);
        let priorities = |acls: Vec<Acl>| acls.iter().map(|acl| acl.priority).collect::<Vec<_>>();
        assert_eq!(numbered(rows, Direction::Ingress).map(priorities), Some(vec![1000, 1000, 1001, 1001]));
        let full = numbered(in_turn(64_500), Direction::Egress).map(priorities);
        assert_eq!(full.and_then(|all| all.last().copied()), Some(65_499));
        assert_eq!(numbered(in_turn(64_501), Direction::Egress), None);
    }
}
