//! Policy in the rendering of Calico for Windows, for comparison.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use tortie_api::net::{Action, Direction, IpVersion, Protocol};
use tortie_dataplane::Endpoint;
use tortie_hcn::schema::{Acl, AclAction, AclDirection};
use tortie_policy::program::{EndOfTier, EntityMatch, Lookup, Member, PolicyId, Rule, SetId};

use crate::acl::{ANY_PROTOCOL, CHUNK, Ports, any, host_rules, node_to_pod, port_lists, text};

/// The maximum number of ACLs of one direction.
const MAX_RULES: usize = 50_000;

/// Renders as Calico for Windows does. Each policy is expanded once for all endpoints, as there.
pub(super) struct Naive<'a, L> {
    lookup: &'a L,
    sets: RefCell<HashMap<SetId, Arc<Nets>>>,
    policies: RefCell<HashMap<(PolicyId, Direction), Arc<Rendered>>>,
}

/// An endpoint's ACLs.
#[derive(Debug, Default)]
pub(super) struct Expanded {
    /// All of them.
    pub acls: Vec<Acl>,
    /// The number of rules left out because they cannot be expressed.
    pub left_out: usize,
    /// Whether the expansion was aborted.
    pub cut: bool,
}

/// Networks as given: neighbours are not merged.
type Nets = BTreeSet<Ipv4Net>;

/// The expansion of a policy in one direction.
#[derive(Debug, Default)]
struct Rendered {
    rules: Vec<Expansion>,
    left_out: usize,
}

/// A rule with expanded sets.
#[derive(Debug, Clone)]
struct Expansion {
    /// Allow, Deny or Pass.
    action: Action,
    origin: Arc<str>,
    /// `None` means any.
    protocol: Option<Protocol>,
    local: NaiveSide,
    remote: NaiveSide,
}

#[derive(Debug, Clone)]
struct NaiveSide {
    /// `None` means everybody.
    nets: Option<Arc<Nets>>,
    ports: Ports,
}

impl<'a, L: Lookup> Naive<'a, L> {
    pub(super) fn new(lookup: &'a L) -> Self {
        Self { lookup, sets: RefCell::default(), policies: RefCell::default() }
    }

    /// The ACLs that Calico for Windows would give the endpoint. **This is a model** of the source of Felix 3.32
    /// (`felix/dataplane/windows/policysets`), not a measurement:
    ///
    /// - Every rule of every policy that selects the endpoint becomes an ACL, with the members of its selectors as
    ///   lists of local and remote addresses, whether or not the endpoint itself is among the local ones.
    ///   Neighbouring addresses are not merged. A Service's backends become an ACL for each port.
    /// - A Pass rule is replaced by its intersections with all rules of the next tier, and each tier ends with a rule
    ///   about everything.
    /// - Lists longer than 4,000 are cut, and all pieces of one are combined with all pieces of the other.
    /// - In addition to policy there is the node's ACL, and one for the host's firewall in each direction.
    ///
    /// Where Calico does less than the policy says, the model does more, so that both sides of the comparison
    /// implement the same policy: a named port is expanded like a Service's backends (Calico leaves the rule out),
    /// Pass in the last tier leads to the profiles (in Calico, to Deny), and several sets on one side are intersected
    /// (in Calico, united). The model is cheaper than Calico where lists are cut, because it cuts after tiers are
    /// combined. Rules with negations, ICMP types, or ports without a protocol that has ports are left out and
    /// counted.
    pub(super) fn acls(&self, endpoint: &Endpoint, node: &BTreeSet<IpAddr>) -> Expanded {
        let mut expanded = Expanded {
            acls: node_to_pod(node, IpVersion::V4).into_iter().chain(host_rules()).collect(),
            ..Expanded::default()
        };
        if !endpoint.addresses.iter().any(IpAddr::is_ipv4) {
            return Expanded::default();
        }
        for direction in [Direction::Ingress, Direction::Egress] {
            let profiles = self.tier(&endpoint.program.profiles, EndOfTier::Deny, direction, &mut expanded);
            let deny_pass = |rule: Expansion| match rule.action {
                Action::Pass => Expansion { action: Action::Deny, ..rule },
                _ => rule,
            };
            let mut list: Vec<Expansion> = profiles.into_iter().map(deny_pass).collect();
            for tier in endpoint.program.tiers(direction).iter().rev() {
                let rules = self.tier(&tier.policies, tier.end, direction, &mut expanded);
                list = flattened(rules, &list);
                expanded.cut |= list.len() > MAX_RULES;
                list.truncate(MAX_RULES);
            }
            expanded.acls.extend(list.iter().flat_map(|rule| spelled(rule, direction)));
        }
        expanded
    }

    /// The rules of a tier's policies, and its end.
    fn tier(
        &self,
        policies: &[PolicyId],
        end: EndOfTier,
        direction: Direction,
        expanded: &mut Expanded,
    ) -> Vec<Expansion> {
        let mut rules = Vec::new();
        let mut end = if end == EndOfTier::Pass { Action::Pass } else { Action::Deny };
        for id in policies {
            let Some(policy) = self.policy(id, direction) else {
                end = Action::Deny;
                break;
            };
            expanded.left_out += policy.left_out;
            rules.extend(policy.rules.iter().cloned());
        }
        let all = || NaiveSide { nets: None, ports: Ports::all() };
        rules.push(Expansion {
            action: end,
            origin: "end".into(),
            protocol: None,
            local: all(),
            remote: all(),
        });
        rules
    }

    fn policy(&self, id: &PolicyId, direction: Direction) -> Option<Arc<Rendered>> {
        let key = (id.clone(), direction);
        if let Some(rendered) = self.policies.borrow().get(&key) {
            return Some(Arc::clone(rendered));
        }
        let origin: Arc<str> = id.to_string().into();
        let mut rendered = Rendered::default();
        for rule in self.lookup.policy(id)?.direction(direction) {
            match is_expressible(rule) {
                true => rendered.rules.extend(self.expansions(rule, direction, &origin)),
                false => rendered.left_out += 1,
            }
        }
        let rendered = Arc::new(rendered);
        self.policies.borrow_mut().insert(key, Arc::clone(&rendered));
        Some(rendered)
    }

    /// The rule, once for each combination of its sides.
    fn expansions(&self, rule: &Rule, direction: Direction, origin: &Arc<str>) -> Vec<Expansion> {
        if rule.action == Action::Log || rule.ip_version == Some(IpVersion::V6) {
            return Vec::new();
        }
        let (local, remote) = match direction {
            Direction::Ingress => (&rule.destination, &rule.source),
            Direction::Egress => (&rule.source, &rule.destination),
        };
        let (local, remote) = (self.sides(local), self.sides(remote));
        let pairs = local.iter().flat_map(|local| remote.iter().map(move |remote| (local, remote)));
        let expansion = |((one, local), (other, remote)): (&(_, NaiveSide), &(_, NaiveSide))| {
            let protocols: BTreeSet<Protocol> = [rule.protocol, *one, *other].into_iter().flatten().collect();
            let (local, remote) = (local.clone(), remote.clone());
            (protocols.len() <= 1).then(|| Expansion {
                action: rule.action,
                origin: Arc::clone(origin),
                protocol: protocols.into_iter().next(),
                local,
                remote,
            })
        };
        pairs.filter_map(expansion).collect()
    }

    /// The expansions of one side of a rule: one list of addresses, or one for each port with separate addresses.
    fn sides(&self, entity: &EntityMatch) -> Vec<(Option<Protocol>, NaiveSide)> {
        let literal =
            (!entity.nets.is_empty()).then(|| Arc::new(entity.nets.iter().filter_map(v4).collect::<Nets>()));
        let sets = entity.sets.iter().map(|id| self.members(id));
        let nets = literal.into_iter().chain(sets).reduce(|one, other| Arc::new(intersection(&one, &other)));
        if nets.as_ref().is_some_and(|nets| nets.is_empty()) {
            return Vec::new();
        }
        let mut sides = Vec::new();
        if !entity.ports.is_empty() || entity.port_sets.is_empty() {
            let given = entity.ports.iter().map(|range| (range.first, range.last)).collect();
            let ports = if entity.ports.is_empty() { Ports::all() } else { Ports::from_ranges(given) };
            sides.push((None, NaiveSide { nets: nets.clone(), ports }));
        }
        let mut by_port: BTreeMap<(Protocol, u16), Nets> = BTreeMap::new();
        for member in entity.port_sets.iter().flat_map(|id| self.lookup.set(id).into_iter().flatten()) {
            if let Member::AddressPort { address: IpAddr::V4(address), protocol, port } = *member {
                by_port.entry((protocol, port)).or_default().insert(address.into());
            }
        }
        for ((protocol, port), addresses) in by_port {
            let addresses = match &nets {
                Some(nets) => intersection(nets, &addresses),
                None => addresses,
            };
            if !addresses.is_empty() {
                let ports = match protocol.has_ports() {
                    true => Ports::from_ranges(vec![(port, port)]),
                    false => Ports::all(),
                };
                sides.push((Some(protocol), NaiveSide { nets: Some(Arc::new(addresses)), ports }));
            }
        }
        sides
    }

    fn members(&self, id: &SetId) -> Arc<Nets> {
        let members = || {
            let nets = self.lookup.set(id).into_iter().flatten().filter_map(|member| match member {
                Member::Net(net) => v4(net),
                Member::AddressPort { .. } => None,
            });
            Arc::new(nets.collect())
        };
        Arc::clone(self.sets.borrow_mut().entry(id.clone()).or_insert_with(members))
    }
}

/// Whether an ACL can express it, with each field as a list (`policysets.go`).
fn is_expressible(rule: &Rule) -> bool {
    let Rule { action: _, ip_version: _, protocol, not_protocol, icmp, not_icmp, source, destination } = rule;
    let sides = [source, destination];
    let negates = |side: &&EntityMatch| {
        let EntityMatch {
            nets: _,
            not_nets,
            sets: _,
            not_sets,
            ports: _,
            port_sets: _,
            not_ports,
            not_port_sets,
        } = side;
        !(not_nets.is_empty() && not_sets.is_empty() && not_ports.is_empty() && not_port_sets.is_empty())
    };
    let has_ports = sides.iter().any(|side| !side.ports.is_empty());
    not_protocol.is_none()
        && icmp.is_none()
        && not_icmp.is_none()
        && !sides.iter().any(negates)
        && (!has_ports || protocol.is_some_and(Protocol::has_ports))
}

/// The tier, with each Pass rule replaced by what it lets through of the next tier.
fn flattened(tier: Vec<Expansion>, next: &[Expansion]) -> Vec<Expansion> {
    let mut list = Vec::new();
    for rule in tier {
        match rule.action {
            Action::Pass => list.extend(next.iter().filter_map(|then| rule.and(then)).take(MAX_RULES)),
            _ => list.push(rule),
        }
        if list.len() > MAX_RULES {
            break;
        }
    }
    list
}

impl Expansion {
    fn and(&self, then: &Expansion) -> Option<Expansion> {
        let protocol = match (self.protocol, then.protocol) {
            (Some(one), Some(other)) if one != other => return None,
            (one, other) => one.or(other),
        };
        let (local, remote) = (self.local.and(&then.local)?, self.remote.and(&then.remote)?);
        Some(Expansion { protocol, local, remote, ..then.clone() })
    }
}

impl NaiveSide {
    fn and(&self, other: &NaiveSide) -> Option<NaiveSide> {
        let nets = match (&self.nets, &other.nets) {
            (Some(one), Some(other)) => {
                Some(Arc::new(intersection(one, other))).filter(|nets| !nets.is_empty()).map(Some)?
            }
            (one, other) => one.clone().or_else(|| other.clone()),
        };
        let ports = self.ports.and(&other.ports);
        (!ports.is_empty()).then_some(NaiveSide { nets, ports })
    }
}

/// The narrower one of each pair in which one contains the other.
fn intersection(one: &Nets, other: &Nets) -> Nets {
    let inside = |net: &Ipv4Net, nets: &Nets| {
        (0..=net.prefix_len())
            .any(|length| Ipv4Net::new(net.addr(), length).is_ok_and(|up| nets.contains(&up.trunc())))
    };
    let narrower =
        one.iter().filter(|net| inside(net, other)).chain(other.iter().filter(|net| inside(net, one)));
    narrower.copied().collect()
}

fn v4(net: &IpNet) -> Option<Ipv4Net> {
    match net {
        IpNet::V4(net) => Some(net.trunc()),
        IpNet::V6(_) => None,
    }
}

fn spelled(rule: &Expansion, direction: Direction) -> Vec<Acl> {
    let addresses = |side: &NaiveSide| match &side.nets {
        None => vec![String::new()],
        Some(nets) => {
            let nets: Vec<String> = nets.iter().map(|net| text(&IpNet::V4(*net))).collect();
            nets.chunks(CHUNK).map(|chunk| chunk.join(",")).collect()
        }
    };
    let action = if rule.action == Action::Allow { AclAction::Allow } else { AclAction::Block };
    let direction_of_acl = if direction == Direction::Ingress { AclDirection::In } else { AclDirection::Out };
    let (local_ports, remote_ports) = (port_lists(&rule.local.ports), port_lists(&rule.remote.ports));
    let mut acls = Vec::new();
    let remote = addresses(&rule.remote);
    for local_addresses in &addresses(&rule.local) {
        for remote_addresses in &remote {
            for local_ports in &local_ports {
                for remote_ports in &remote_ports {
                    acls.push(Acl {
                        protocols: rule
                            .protocol
                            .map_or(ANY_PROTOCOL, |Protocol(number)| number.into())
                            .to_string(),
                        local_addresses: local_addresses.clone(),
                        remote_addresses: remote_addresses.clone(),
                        local_ports: local_ports.clone(),
                        remote_ports: remote_ports.clone(),
                        ..any(action.clone(), direction_of_acl.clone(), 0, &rule.origin)
                    });
                }
            }
        }
    }
    acls
}
