//! Renders an endpoint's program as ACLs.
//!
//! The list of an endpoint is complete in both directions: it decides about every packet explicitly, because builds
//! of HNS differ in what they do with a packet that no ACL matches (docs/hns.md, ACLs). Only priorities define the
//! order, and overlapping ACLs with equal priority have the same action. [`transition`] relies on both.
//!
//! A program is [rendered](render) into rows, which name peers by sets, as rules do. The rows are
//! [listed](Rows::list) for HNS: with the identifiers of sets if HNS supports sets, otherwise with the current
//! addresses of the sets.

mod decision_rows;
mod flatten;
mod peers;
mod priorities;
mod ranges;
mod region;
mod render;
mod rule_size;
mod services;
mod transition;

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use tortie_api::net::{Direction, IpVersion, Protocol};
use tortie_dataplane::{Condition, Endpoint, Reason, Settings};
use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType, Extra, Policy};
use tortie_policy::program::Lookup;

use decision_rows::{Row, rows};
pub(crate) use flatten::{NO_PROFILE, end_of_tier};
use flatten::{bgp_to_nodes, flatten};
use priorities::priorities;
use ranges::Addresses;
pub(crate) use ranges::Ports;
use region::View;
use render::AclRenderer;

pub(crate) use decision_rows::ANY_PROTOCOL;
pub(crate) use peers::OUR_SETS;
pub(crate) use render::{CHUNK, Set, Sets, port_lists, text};
pub(crate) use rule_size::{RuleSize, shape};
pub(crate) use services::{Frontends, Judged, SERVICE, Services};
pub(crate) use transition::{Transition, anonymous, canonical_address, transition};

/// The priority of traffic from the node itself to its own pods, before policy.
pub(crate) const NODE_PRIORITY: u16 = 900;
/// The priority of the denial of tunnels from pods, before policy.
const TUNNEL_PRIORITY: u16 = 950;
/// The first priority of policy.
pub(crate) const FIRST_PRIORITY: u16 = 1000;
/// The last priority that works: the closing ACLs of the endpoint, which always exist.
pub(crate) const LAST_PRIORITY: u16 = 65_500;

/// The origin of the endpoint's closing ACLs.
pub(crate) const CLOSED: &str = "closed";

/// The prefix of the identifiers of Tortie's ACLs. Other ACLs on the same endpoint are left alone.
const OURS: &str = "tortie/";

/// Whether the ACL is one of Tortie's.
pub(crate) fn is_ours(acl: &Acl) -> bool {
    acl.id.starts_with(OURS)
}

/// Whether the ACL comes before policy: the node's own firewall, and the node itself.
pub(crate) fn is_before_policy(acl: &Acl) -> bool {
    acl.rule_type != AclRuleType::Switch || (is_ours(acl) && acl.priority < FIRST_PRIORITY)
}

/// Whether the ACL is one of Tortie's with this origin.
pub(crate) fn comes_from(acl: &Acl, origin: &str) -> bool {
    acl.id == id(origin)
}

/// The identifier of ACLs with this origin, without spaces, because no source says that they are allowed.
fn id(origin: &str) -> String {
    format!("{OURS}{}", origin.replace(' ', "/"))
}

/// Whether an ACL that cannot be parsed is one of Tortie's.
pub(crate) fn has_our_mark(policy: &Policy) -> bool {
    let id = policy.settings.get("Id").and_then(serde_json::Value::as_str);
    id.is_some_and(|id| id.starts_with(OURS))
}

/// The ACLs that close an endpoint in both directions. They are in the document that creates the endpoint, and stay
/// after policy permanently.
pub(crate) fn closed() -> Vec<Acl> {
    [AclDirection::In, AclDirection::Out]
        .map(|direction| any(AclAction::Block, direction, LAST_PRIORITY, CLOSED))
        .to_vec()
}

/// What the ACLs of a node's endpoints depend on, besides their policies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    /// The node's own addresses.
    pub node: &'a BTreeSet<IpAddr>,
    /// Whether peers may be named by sets.
    pub by_name: bool,
    /// Whether pods may have IPv6.
    pub has_ipv6: bool,
    /// The settings of the node.
    pub settings: &'a Settings,
}

/// The desired ACLs of an endpoint, before it is known which sets can be named.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    /// The ACLs with fixed priorities.
    fixed: Vec<Acl>,
    /// The rows of policy. Those of IPv4 come before those of IPv6.
    policy: Vec<PolicyRows>,
    /// Whether packets of the other family may reach the endpoint, so that rows about everyone must name theirs.
    names_family: bool,
    /// The rows that Services add.
    services: Option<Arc<Judged>>,
}

/// The rows of policy for packets of one family and direction.
#[derive(Debug, Clone)]
struct PolicyRows {
    direction: AclDirection,
    family: IpVersion,
    /// The endpoint's own addresses of the family.
    own: Addresses,
    rows: Vec<Row>,
}

/// The ACLs of an endpoint, where those of policy have no priorities yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct List {
    fixed: Vec<Acl>,
    policy: [Vec<Acl>; 2],
}

/// The desired ACLs of an endpoint, and its conditions. The rows of Services come before policy for packets from the endpoint.
pub(crate) fn render<L: Lookup>(
    endpoint: &Endpoint,
    surroundings: Surroundings<'_>,
    services: &Services<'_, L>,
    lookup: &L,
) -> (Rows, Vec<Condition>) {
    let Surroundings { node, by_name, has_ipv6, settings } = surroundings;
    let addresses_of = |family| Addresses::of(family, endpoint.addresses.iter().copied());
    let own = IpVersion::ALL.map(|family| (family, addresses_of(family)));
    let mut rendered = Rows {
        fixed: closed(),
        policy: Vec::new(),
        names_family: has_ipv6 || own.iter().all(|(_, own)| !own.is_empty()),
        services: None,
    };
    let mut conditions = if has_ipv6 { Vec::new() } else { unserved_addresses(endpoint) };
    // A network without IPv6 may refuse ACLs about it, those about the node's IPv6 address, too.
    let is_served =
        |family: IpVersion, own: &Addresses| !own.is_empty() && (family == IpVersion::V4 || has_ipv6);
    for (family, own) in own.into_iter().filter(|(family, own)| is_served(*family, own)) {
        rendered.fixed.extend(node_to_pod(node, family));
        if rendered.policy.is_empty() {
            rendered.fixed.extend(host_rules());
            rendered.fixed.extend(never_sent(settings));
        }
        for direction in [Direction::Ingress, Direction::Egress] {
            let view = View { family, own: &own, by_name, lookup };
            let (mut list, problems) = flatten(&endpoint.program, direction, view);
            conditions.extend(problems);
            if direction == Direction::Egress {
                list.splice(..0, bgp_to_nodes(settings, view));
            }
            let mut rows = rows(&list);
            if (direction, family) == (Direction::Egress, IpVersion::V4) {
                let judged = services.judge(list);
                rows.splice(..0, judged.judgement.rows.iter().cloned());
                conditions.extend_from_slice(&judged.judgement.conditions);
                rendered.services = Some(judged);
            }
            let direction = match direction {
                Direction::Ingress => AclDirection::In,
                Direction::Egress => AclDirection::Out,
            };
            rendered.policy.push(PolicyRows { direction, family, own: own.clone(), rows });
        }
    }
    conditions.extend(
        [AclDirection::In, AclDirection::Out].into_iter().filter_map(|direction| rendered.limit(&direction)),
    );
    conditions.sort();
    conditions.dedup();
    (rendered, conditions)
}

impl Rows {
    /// The rows that Services add to the endpoint's egress.
    pub(crate) fn services(&self) -> Option<&Arc<Judged>> {
        self.services.as_ref()
    }

    /// Adds the operator's ACLs before policy.
    pub(crate) fn with_static_rules(mut self, acls: &[Acl]) -> Self {
        self.fixed.extend_from_slice(acls);
        self
    }

    /// Denies all packets of a direction that needs more priorities than there are.
    fn limit(&mut self, direction: &AclDirection) -> Option<Condition> {
        const PRIORITIES: u16 = LAST_PRIORITY - FIRST_PRIORITY;
        let of_direction = |policy: &&mut PolicyRows| policy.direction == *direction;
        let rows = self
            .policy
            .iter()
            .filter(|policy| policy.direction == *direction)
            .flat_map(|policy| &policy.rows);
        if runs(rows.map(|row| &row.action)) <= usize::from(PRIORITIES) {
            return None;
        }
        self.policy.iter_mut().filter(of_direction).for_each(|policy| policy.rows.clear());
        let name = if *direction == AclDirection::In { Direction::Ingress } else { Direction::Egress };
        let message = format!(
            "the {name:?} policy needs more than the {PRIORITIES} priorities that HNS has: all {name:?} traffic is denied"
        );
        Some(Condition::new(Reason::TooManyRules, message))
    }

    /// The list of ACLs. For ACLs that would name sets, `spell_out` returns whether they must list addresses instead.
    pub(crate) fn list<L: Lookup>(&self, sets: &Sets<'_, L>, spell_out: &dyn Fn(&[Acl]) -> bool) -> List {
        let policy = [AclDirection::In, AclDirection::Out].map(|direction| {
            let of_direction = self.policy.iter().filter(|policy| policy.direction == direction);
            let acls = |PolicyRows { direction, family, own, rows }: &PolicyRows| {
                let names_family = self.names_family;
                let renderer =
                    AclRenderer { direction: direction.clone(), family: *family, own, names_family, sets };
                rows.iter().flat_map(|row| renderer.acls(row, spell_out)).collect::<Vec<Acl>>()
            };
            let acls: Vec<Acl> = of_direction.flat_map(acls).collect();
            // A duplicate decides nothing.
            let mut seen = HashSet::with_capacity(acls.len());
            let first: Vec<bool> = acls.iter().map(|acl| seen.insert(acl)).collect();
            acls.into_iter().zip(first).filter_map(|(acl, first)| first.then_some(acl)).collect()
        });
        List { fixed: self.fixed.clone(), policy }
    }
}

impl List {
    /// The ACLs with priorities; existing ACLs keep theirs if possible.
    pub(crate) fn numbered(&self, actual: &[Acl]) -> Vec<Acl> {
        let numbered = |policy: &Vec<Acl>| {
            // There is room for all runs; otherwise they would not have been rendered.
            let priorities = priorities(policy, actual, FIRST_PRIORITY..LAST_PRIORITY).unwrap_or_default();
            let acls = policy.iter().zip(priorities);
            acls.map(|(acl, priority)| Acl { priority, ..acl.clone() }).collect::<Vec<_>>()
        };
        self.fixed.iter().cloned().chain(self.policy.iter().flat_map(numbered)).collect()
    }

    /// The identifiers of the sets that it names.
    pub(crate) fn set_ids(&self) -> BTreeSet<String> {
        self.policy.iter().flatten().flat_map(named_sets).map(str::to_owned).collect()
    }
}

/// The identifiers of Tortie's sets that an ACL names.
pub(crate) fn named_sets(acl: &Acl) -> impl Iterator<Item = &str> {
    let parts = [&acl.local_addresses, &acl.remote_addresses].into_iter().flat_map(|list| list.split(','));
    parts.filter(|part| part.starts_with(OUR_SETS))
}

/// The number of changes of the action, plus one.
fn runs<'a>(actions: impl Iterator<Item = &'a AclAction>) -> usize {
    let mut last = None;
    actions.filter(|action| last.replace(*action) != Some(*action)).count()
}

fn unserved_addresses(endpoint: &Endpoint) -> Vec<Condition> {
    let six = endpoint.addresses.iter().filter(|address| address.is_ipv6());
    let message = |address: &IpAddr| {
        format!(
            "{address}: the HNS network of the pod has no IPv6; packets to and from the address are dropped"
        )
    };
    six.map(|address| Condition::new(Reason::AddressNotServed, message(address))).collect()
}

/// A packet must also pass the node's own firewall, which leaves the decision to the switch.
pub(crate) fn host_rules() -> [Acl; 2] {
    [AclDirection::In, AclDirection::Out]
        .map(|direction| Acl { rule_type: AclRuleType::Host, ..any(AclAction::Allow, direction, 0, "host") })
}

/// Probes come from the node itself, and always pass (policy decision 2). A list has addresses of one family.
pub(crate) fn node_to_pod(node: &BTreeSet<IpAddr>, family: IpVersion) -> Option<Acl> {
    let of_family = node.iter().filter(|address| IpVersion::of(address) == family);
    let addresses: Vec<String> = of_family.map(IpAddr::to_string).collect();
    // An empty list would mean everybody.
    (!addresses.is_empty()).then(|| Acl {
        remote_addresses: addresses.join(","),
        ..any(AclAction::Allow, AclDirection::In, NODE_PRIORITY, "node")
    })
}

/// What no pod may send, whatever its policy: tunnels, unless the operator allows them, because another node would
/// treat their content as packets of its own pods (policy decision 38).
fn never_sent(settings: &Settings) -> Vec<Acl> {
    let block = |protocol: Protocol, remote_ports: &str, origin: &str| Acl {
        protocols: protocol.0.to_string(),
        remote_ports: remote_ports.to_owned(),
        ..any(AclAction::Block, AclDirection::Out, TUNNEL_PRIORITY, origin)
    };
    let ports: Vec<String> = settings.vxlan_ports.iter().map(u16::to_string).collect();
    let vxlan = (!settings.vxlan_from_workloads)
        .then(|| block(Protocol::UDP, &ports.join(","), "no VXLAN from pods"));
    let ipip = (!settings.ipip_from_workloads).then(|| block(Protocol::IPIP, "", "no IPIP from pods"));
    vxlan.into_iter().chain(ipip).collect()
}

/// The ACL for all packets of one direction from which a static rule is built.
pub(crate) fn of_static_rule(action: AclAction, direction: AclDirection, name: &str) -> Acl {
    any(action, direction, 0, &format!("static {name}"))
}

/// The ACL for all packets of one direction.
pub(crate) fn any(action: AclAction, direction: AclDirection, priority: u16, origin: &str) -> Acl {
    Acl {
        id: id(origin),
        protocols: decision_rows::ANY_PROTOCOL.to_string(),
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
