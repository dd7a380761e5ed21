//! Random programs and the objects that they name.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use tortie_api::net::{Action, IpVersion, PortRange, Protocol};
use tortie_dataplane::Delta;
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, IcmpMatch, Member, PolicyRules, Rule, SetId, SetKind,
    TierProgram,
};

use crate::dataplane::node::*;

pub(crate) const NET_SETS: [&str; 3] = ["s:a", "s:b", "s:unknown"];
pub(crate) const PORT_SETS: [&str; 2] = ["p:a", "p:unknown"];
pub(crate) const POLICIES: [&str; 5] = ["one", "two", "three", "four", "unknown"];

pub(crate) fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        6 => (0_u8..8).prop_map(|last| IpAddr::from([10, 0, 0, last])),
        1 => select(vec!["10.244.3.6", "192.168.0.1", "255.255.255.255", "0.0.0.0"])
            .prop_map(|text| text.parse().unwrap()),
    ]
}

pub(crate) fn net() -> impl Strategy<Value = IpNet> {
    let fixed =
        ["0.0.0.0/0", "10.0.0.0/30", "10.0.0.4/30", "10.0.0.0/8", "10.244.3.5/32", "::/0", "10.0.0.2/31"];
    prop_oneof![
        select(fixed.to_vec()).prop_map(|text| text.parse().unwrap()),
        address().prop_map(IpNet::from)
    ]
}

pub(crate) fn protocol() -> impl Strategy<Value = Protocol> {
    select([6, 17, 132, 1, 47, 0, 255].map(Protocol).to_vec())
}

pub(crate) fn port() -> impl Strategy<Value = u16> {
    select(vec![0, 1, 2, 3, 4, 5, 65_535])
}

pub(crate) fn ports() -> impl Strategy<Value = PortRange> {
    (port(), port()).prop_map(|(a, b)| PortRange { first: a.min(b), last: a.max(b) })
}

/// Mostly empty, as in practice, so that rules match something.
pub(crate) fn seldom<T: Clone + std::fmt::Debug + 'static>(
    some: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Vec<T>> {
    prop_oneof![4 => Just(vec![]), 1 => vec(some, 1..3)].boxed()
}

pub(crate) fn ids(names: &'static [&'static str]) -> BoxedStrategy<Vec<SetId>> {
    seldom(select(names.to_vec()).prop_map(SetId::new))
}

pub(crate) fn entity() -> impl Strategy<Value = EntityMatch> {
    let addresses = (seldom(net()), seldom(net()), ids(&NET_SETS), ids(&NET_SETS));
    let ports = (seldom(ports()), ids(&PORT_SETS), seldom(ports()), ids(&PORT_SETS));
    (addresses, ports).prop_map(
        |((nets, not_nets, sets, not_sets), (ports, port_sets, not_ports, not_port_sets))| EntityMatch {
            nets,
            not_nets,
            sets,
            not_sets,
            ports,
            port_sets,
            not_ports,
            not_port_sets,
        },
    )
}

pub(crate) fn icmp() -> impl Strategy<Value = IcmpMatch> {
    (prop::option::of(0_u8..3), prop::option::of(0_u8..2))
        .prop_map(|(icmp_type, icmp_code)| IcmpMatch { icmp_type, icmp_code })
}

pub(crate) fn few<T: std::fmt::Debug + Clone + 'static>(
    s: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Option<T>> {
    prop::option::weighted(0.25, s).boxed()
}

pub(crate) fn rule(with_icmp: bool) -> impl Strategy<Value = Rule> {
    let icmp_or_not = move || if with_icmp { few(icmp()) } else { Just(None).boxed() };
    let action =
        select(vec![Action::Allow, Action::Deny, Action::Pass, Action::Log, Action::Allow, Action::Deny]);
    let protocols = (few(select(vec![IpVersion::V4, IpVersion::V6])), few(protocol()), few(protocol()));
    (action, protocols, icmp_or_not(), icmp_or_not(), entity(), entity()).prop_map(
        |(action, (ip_version, protocol, not_protocol), icmp, not_icmp, source, destination)| Rule {
            action,
            ip_version,
            protocol,
            not_protocol,
            icmp,
            not_icmp,
            source,
            destination,
        },
    )
}

pub(crate) fn tiers() -> impl Strategy<Value = Vec<TierProgram>> {
    let tier = (subsequence(POLICIES.to_vec(), 1..3), select(vec![EndOfTier::Deny, EndOfTier::Pass]));
    vec(tier.prop_map(|(policies, end)| tier_of(&policies, end)), 0..3)
}

pub(crate) fn tier_of(policies: &[&str], end: EndOfTier) -> TierProgram {
    tier("tier", policies, end)
}

/// A cluster, as far as it concerns one pod.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub program: EndpointProgram,
    pub policies: Vec<PolicyRules>,
    pub nets: BTreeSet<IpNet>,
    pub others: BTreeSet<IpNet>,
    pub address_ports: BTreeSet<(IpAddr, Protocol, u16)>,
}

pub(crate) fn scenarios(with_icmp: bool) -> impl Strategy<Value = Scenario> {
    let rules = (vec(rule(with_icmp), 0..4), vec(rule(with_icmp), 0..4));
    let policies = vec(rules.prop_map(|(ingress, egress)| PolicyRules { ingress, egress }), 4);
    let profiles = subsequence(POLICIES.to_vec(), 0..3);
    let sets = (btree_set(net(), 0..4), btree_set(net(), 0..4));
    let address_ports = btree_set((address(), protocol(), port()), 0..6);
    (tiers(), tiers(), profiles, policies, sets, address_ports).prop_map(
        |(ingress, egress, profiles, policies, (nets, others), address_ports)| Scenario {
            program: EndpointProgram {
                ingress,
                egress,
                profiles: profiles.iter().map(|name| policy_id(name)).collect(),
            },
            policies,
            nets,
            others,
            address_ports,
        },
    )
}

impl Scenario {
    pub(crate) fn deltas(&self) -> Vec<Delta> {
        let set = |name: &str, kind, members| Delta::SetCreated(SetId::new(name), kind, members);
        let nets = |nets: &BTreeSet<IpNet>| nets.iter().map(|net| Member::Net(net.trunc())).collect();
        let address_port = |(address, protocol, port): &(IpAddr, Protocol, u16)| Member::AddressPort {
            address: *address,
            protocol: *protocol,
            port: *port,
        };
        let mut deltas = vec![
            local_node(),
            own_block(),
            set("s:a", SetKind::Nets, nets(&self.nets)),
            set("s:b", SetKind::Nets, nets(&self.others)),
            set("p:a", SetKind::AddressPorts, self.address_ports.iter().map(address_port).collect()),
        ];
        let policies = POLICIES.iter().zip(&self.policies);
        deltas.extend(policies.map(|(name, rules)| Delta::Policy(policy_id(name), Arc::new(rules.clone()))));
        deltas.push(endpoint(self.program.clone()));
        deltas
    }
}
