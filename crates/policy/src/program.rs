//! Programs: policies compiled to criteria that a packet can be compared with: addresses, ports, protocols, sets.
//!
//! A program contains no labels and no names, and nothing that is specific to nftables or HNS. Both dataplanes render
//! the same programs, and [`evaluate`] defines their meaning.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
pub use tortie_api::net::Flow;
use tortie_api::net::{Action, Direction, IpVersion, PortRange, Protocol};
use tortie_api::report::ObjectRef;
use tortie_api::{Key, Kind};

/// The kinds of objects that contain rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PolicyKind {
    /// `policy.networking.k8s.io/v1alpha1` AdminNetworkPolicy.
    AdminNetworkPolicy,
    /// `policy.networking.k8s.io/v1alpha1` BaselineAdminNetworkPolicy.
    BaselineAdminNetworkPolicy,
    /// `policy.networking.k8s.io/v1alpha2` ClusterNetworkPolicy.
    ClusterNetworkPolicy,
    /// `projectcalico.org/v3` GlobalNetworkPolicy.
    GlobalNetworkPolicy,
    /// `networking.k8s.io/v1` NetworkPolicy.
    KubernetesNetworkPolicy,
    /// `projectcalico.org/v3` NetworkPolicy.
    NetworkPolicy,
    /// `projectcalico.org/v3` Profile, and the implicit profiles of namespaces and service accounts.
    Profile,
}

impl PolicyKind {
    /// The kind of its objects.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::AdminNetworkPolicy => Kind::AdminNetworkPolicy,
            Self::BaselineAdminNetworkPolicy => Kind::BaselineAdminNetworkPolicy,
            Self::ClusterNetworkPolicy => Kind::ClusterNetworkPolicy,
            Self::GlobalNetworkPolicy => Kind::GlobalNetworkPolicy,
            Self::KubernetesNetworkPolicy => Kind::KubernetesNetworkPolicy,
            Self::NetworkPolicy => Kind::NetworkPolicy,
            Self::Profile => Kind::Profile,
        }
    }
}

/// The id of a policy. It is never a name alone, because two namespaces may use the same name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PolicyId {
    /// Its kind.
    pub kind: PolicyKind,
    /// Its namespace; empty for cluster-wide kinds. Shared, because programs repeat the names of policies often.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

impl PolicyId {
    /// The id of a profile.
    #[must_use]
    pub fn profile(name: impl Into<Arc<str>>) -> Self {
        Self { kind: PolicyKind::Profile, namespace: Arc::default(), name: name.into() }
    }
}

impl From<&PolicyId> for ObjectRef {
    fn from(id: &PolicyId) -> Self {
        Key { kind: id.kind.kind(), namespace: id.namespace.to_string(), name: id.name.to_string() }.into()
    }
}

impl fmt::Display for PolicyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{:?} {}", self.kind, self.name)
        } else {
            write!(f, "{:?} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// The id of a set. For a selector it is the selector's unique id (as in `libcalico-go/lib/selector`, 38 characters),
/// so equal selectors share one set. Clones share it, because rules, calc and both dataplanes repeat the names of
/// sets often.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SetId(pub Arc<str>);

impl SetId {
    /// The set with this name.
    #[must_use]
    pub fn new(id: impl Into<Arc<str>>) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for SetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The kind of members of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SetKind {
    /// Addresses (as networks of full length) and networks.
    Nets,
    /// Addresses together with a protocol and a port.
    AddressPorts,
}

/// One member of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Member {
    /// A network, or one address as a network of full length. Host bits are zero.
    Net(IpNet),
    /// A port of an address.
    AddressPort {
        /// The address.
        address: IpAddr,
        /// The protocol.
        protocol: Protocol,
        /// The port.
        port: u16,
    },
}

/// A criterion for ICMP messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct IcmpMatch {
    /// The ICMP type; `None` matches every type.
    pub icmp_type: Option<u8>,
    /// The ICMP code; `None` matches every code.
    pub icmp_code: Option<u8>,
}

/// The criteria for one side of a packet. Every non-empty criterion must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntityMatch {
    /// The address is in one of these networks, if there are any.
    pub nets: Vec<IpNet>,
    /// The address is in none of these networks.
    pub not_nets: Vec<IpNet>,
    /// The address is in every one of these sets (kind [`SetKind::Nets`]).
    pub sets: Vec<SetId>,
    /// The address is in none of these sets (kind [`SetKind::Nets`]).
    pub not_sets: Vec<SetId>,
    /// The port is in one of these ranges, or (address, protocol, port) is in one of `port_sets`, if either has any.
    pub ports: Vec<PortRange>,
    /// Alternatives to `ports` (kind [`SetKind::AddressPorts`]).
    pub port_sets: Vec<SetId>,
    /// The port is in none of these ranges.
    pub not_ports: Vec<PortRange>,
    /// (address, protocol, port) is in none of these sets (kind [`SetKind::AddressPorts`]).
    pub not_port_sets: Vec<SetId>,
}

impl EntityMatch {
    /// Every set that the match names.
    pub fn set_ids(&self) -> impl Iterator<Item = &SetId> {
        let Self { nets: _, not_nets: _, sets, not_sets, ports: _, port_sets, not_ports: _, not_port_sets } =
            self;
        sets.iter().chain(not_sets).chain(port_sets).chain(not_port_sets)
    }
}

/// One rule: if every criterion matches, `action` is taken.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rule {
    /// The action for a packet that matches.
    pub action: Action,
    /// The required address family of the packet.
    pub ip_version: Option<IpVersion>,
    /// The required protocol of the packet.
    pub protocol: Option<Protocol>,
    /// A protocol that the packet must not have.
    pub not_protocol: Option<Protocol>,
    /// The ICMP message that the packet must be.
    pub icmp: Option<IcmpMatch>,
    /// The ICMP message that the packet must not be.
    pub not_icmp: Option<IcmpMatch>,
    /// The criteria for the source.
    pub source: EntityMatch,
    /// The criteria for the destination.
    pub destination: EntityMatch,
}

impl Rule {
    /// The rule that takes `action` for every packet.
    #[must_use]
    pub fn all(action: Action) -> Self {
        Self {
            action,
            ip_version: None,
            protocol: None,
            not_protocol: None,
            icmp: None,
            not_icmp: None,
            source: EntityMatch::default(),
            destination: EntityMatch::default(),
        }
    }

    /// Every set that the rule names.
    pub fn set_ids(&self) -> impl Iterator<Item = &SetId> {
        self.source.set_ids().chain(self.destination.set_ids())
    }
}

/// The rules of one policy or profile, in order. The first rule that matches and is not Log decides.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PolicyRules {
    /// For packets into the endpoint.
    pub ingress: Vec<Rule>,
    /// For packets out of the endpoint.
    pub egress: Vec<Rule>,
}

impl PolicyRules {
    /// The rules of one direction.
    #[must_use]
    pub fn direction(&self, direction: Direction) -> &[Rule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// Every set that a rule of either direction names.
    pub fn set_ids(&self) -> impl Iterator<Item = &SetId> {
        self.ingress.iter().chain(&self.egress).flat_map(Rule::set_ids)
    }
}

/// The action at the end of a tier, if no rule of it decided (`Tier.spec.defaultAction`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum EndOfTier {
    /// The packet is dropped.
    Deny,
    /// The next tier is evaluated.
    Pass,
}

/// The policies of one tier that apply to an endpoint in one direction (at least one), in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TierProgram {
    /// The tier's name.
    pub name: Arc<str>,
    /// Its policies for this endpoint and direction, in order of evaluation.
    pub policies: Vec<PolicyId>,
    /// The action if none of their rules decides.
    pub end: EndOfTier,
}

/// The evaluation order for a packet into or out of an endpoint: tiers, then profiles, then the packet is dropped. A
/// profile that passes, or has no matching rule, leaves the decision to the next profile
/// (`felix/rules/endpoints.go`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EndpointProgram {
    /// The tiers that apply to packets into the endpoint.
    pub ingress: Vec<TierProgram>,
    /// The tiers that apply to packets out of the endpoint.
    pub egress: Vec<TierProgram>,
    /// The profiles, evaluated in both directions after the last tier, in order. The list ends before the first
    /// profile that does not exist, because such a profile denies.
    pub profiles: Vec<PolicyId>,
}

impl EndpointProgram {
    /// The tiers of one direction.
    #[must_use]
    pub fn tiers(&self, direction: Direction) -> &[TierProgram] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// Every policy and profile that the program names.
    pub fn policy_ids(&self) -> impl Iterator<Item = &PolicyId> {
        self.ingress.iter().chain(&self.egress).flat_map(|tier| &tier.policies).chain(&self.profiles)
    }
}

/// The programs of a host endpoint: a table for each hook on a packet's way (policy decision 16).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostEndpointProgram {
    /// Before connection tracking: packets that the host sends, receives and, on the way in, forwards. No profiles;
    /// if no rule decides, the packet continues.
    pub untracked: EndpointProgram,
    /// On the way in, before the translation of Services' addresses. Otherwise as `untracked`.
    pub pre_dnat: EndpointProgram,
    /// Packets that the host forwards. No profiles; if no rule decides, the packet continues.
    pub forward: EndpointProgram,
    /// Packets that the host itself sends and receives; evaluated like a pod's.
    pub normal: EndpointProgram,
}

impl HostEndpointProgram {
    /// Its tables, in the order in which a packet meets them.
    pub fn tables(&self) -> impl Iterator<Item = &EndpointProgram> {
        [&self.untracked, &self.pre_dnat, &self.forward, &self.normal].into_iter()
    }

    /// Every policy and profile that the program names.
    pub fn policy_ids(&self) -> impl Iterator<Item = &PolicyId> {
        self.tables().flat_map(EndpointProgram::policy_ids)
    }
}

/// Provides the objects that an [`EndpointProgram`] names to [`evaluate`].
pub trait Lookup {
    /// The rules of a policy. If it is `None`, the policy is unknown and everything is dropped.
    fn policy(&self, id: &PolicyId) -> Option<&PolicyRules>;
    /// The members of a set. If it is `None`, the set is unknown and counts as empty.
    fn set(&self, id: &SetId) -> Option<&BTreeSet<Member>>;
}

/// Whether the program allows the packet. This function defines the meaning of a program; every rendering is tested
/// against it.
#[must_use]
pub fn evaluate(program: &EndpointProgram, direction: Direction, flow: &Flow, lookup: &impl Lookup) -> bool {
    let profiles = || {
        let mut decisions = program
            .profiles
            .iter()
            .filter_map(|profile| first_match(std::slice::from_ref(profile), direction, flow, lookup));
        decisions.find(|action| *action != Action::Pass) == Some(Action::Allow)
    };
    evaluate_tiers(program, direction, flow, lookup).unwrap_or_else(profiles)
}

/// Whether the program's tiers allow the packet; `None` if none of them decides. For the tables of host endpoints,
/// which end with their tiers.
#[must_use]
pub fn evaluate_tiers(
    program: &EndpointProgram,
    direction: Direction,
    flow: &Flow,
    lookup: &impl Lookup,
) -> Option<bool> {
    for tier in program.tiers(direction) {
        match first_match(&tier.policies, direction, flow, lookup) {
            Some(Action::Allow) => return Some(true),
            Some(Action::Deny | Action::Log) => return Some(false),
            Some(Action::Pass) => {}
            None if tier.end == EndOfTier::Deny => return Some(false),
            None => {}
        }
    }
    None
}

/// The action of the first rule that decides; an unknown policy denies.
fn first_match(ids: &[PolicyId], direction: Direction, flow: &Flow, lookup: &impl Lookup) -> Option<Action> {
    for id in ids {
        let Some(policy) = lookup.policy(id) else { return Some(Action::Deny) };
        let decided = policy
            .direction(direction)
            .iter()
            .find(|rule| rule.action != Action::Log && rule_matches(rule, flow, lookup))
            .map(|rule| rule.action);
        if decided.is_some() {
            return decided;
        }
    }
    None
}

/// Whether every criterion of the rule matches the packet.
#[must_use]
pub fn rule_matches(rule: &Rule, flow: &Flow, lookup: &impl Lookup) -> bool {
    let version = if flow.destination.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
    let icmp_matches = |wanted: &IcmpMatch| {
        flow.icmp.is_some_and(|(icmp_type, icmp_code)| {
            wanted.icmp_type.is_none_or(|t| t == icmp_type) && wanted.icmp_code.is_none_or(|c| c == icmp_code)
        })
    };
    // Exhaustive, here and below, because a forgotten criterion would open something.
    let Rule { action: _, ip_version, protocol, not_protocol, icmp, not_icmp, source, destination } = rule;
    ip_version.is_none_or(|wanted| wanted == version)
        && protocol.is_none_or(|wanted| wanted == flow.protocol)
        && not_protocol.is_none_or(|unwanted| unwanted != flow.protocol)
        && icmp.as_ref().is_none_or(icmp_matches)
        && !not_icmp.as_ref().is_some_and(icmp_matches)
        && entity_matches(source, flow.source, flow.protocol, flow.source_port, lookup)
        && entity_matches(destination, flow.destination, flow.protocol, flow.destination_port, lookup)
}

fn entity_matches(
    entity: &EntityMatch,
    address: IpAddr,
    protocol: Protocol,
    port: u16,
    lookup: &impl Lookup,
) -> bool {
    let in_set = |id: &SetId| {
        lookup.set(id).is_some_and(|members| {
            members.iter().any(|member| matches!(member, Member::Net(net) if net.contains(&address)))
        })
    };
    let in_port_set = |id: &SetId| {
        lookup
            .set(id)
            .is_some_and(|members| members.contains(&Member::AddressPort { address, protocol, port }))
    };
    let has_port = protocol.has_ports();
    let in_ports = |ranges: &[PortRange]| has_port && ranges.iter().any(|range| range.contains(port));
    let EntityMatch { nets, not_nets, sets, not_sets, ports, port_sets, not_ports, not_port_sets } = entity;
    let wants_port = !ports.is_empty() || !port_sets.is_empty();

    (nets.is_empty() || nets.iter().any(|net| net.contains(&address)))
        && !not_nets.iter().any(|net| net.contains(&address))
        && sets.iter().all(in_set)
        && !not_sets.iter().any(in_set)
        && (!wants_port || in_ports(ports) || port_sets.iter().any(in_port_set))
        && !in_ports(not_ports)
        && !not_port_sets.iter().any(in_port_set)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Lookup for Nothing {
        fn policy(&self, _: &PolicyId) -> Option<&PolicyRules> {
            None
        }

        fn set(&self, _: &SetId) -> Option<&BTreeSet<Member>> {
            None
        }
    }

    /// Policy says so of named ports only: numbers need a protocol. The dataplanes render both alike, and are compared with this.
    #[test]
    fn packets_without_ports_have_none_that_a_rule_excludes() {
        let ports = vec![PortRange { first: 0, last: u16::MAX }];
        let rule = |source: EntityMatch, destination: EntityMatch| Rule {
            source,
            destination,
            ..Rule::all(Action::Deny)
        };
        let unwanted = || EntityMatch { not_ports: ports.clone(), ..EntityMatch::default() };
        for (protocol, matches) in [(Protocol::ICMP, true), (Protocol(47), true), (Protocol::UDP, false)] {
            let address = IpAddr::from([10, 0, 0, 1]);
            let (source, destination) = (address, address);
            let flow =
                Flow { source, destination, protocol, source_port: 0, destination_port: 0, icmp: None };
            for rule in [rule(unwanted(), EntityMatch::default()), rule(EntityMatch::default(), unwanted())] {
                assert_eq!(rule_matches(&rule, &flow, &Nothing), matches, "{protocol:?}");
            }
        }
    }
}
