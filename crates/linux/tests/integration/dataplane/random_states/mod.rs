//! Random node states with one pod under random policy, and random flows that often just match.
#![allow(dead_code)] // each test uses a part

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use proptest::collection::{btree_set, vec};
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::select;
use tortie_api::calico::PolicyCounters;
use tortie_api::net::{Action, IpVersion, PortRange, Protocol};
use tortie_dataplane::{Endpoint, EndpointId, HostPort, NodeState};
use tortie_policy::program::*;

/// The tested pod, and one that lets everything through.
pub(crate) const POD: [&str; 2] = ["10.65.0.2", "fd65::2"];
pub(crate) const SENTINEL: [&str; 2] = ["10.65.0.3", "fd65::3"];
/// The host's ends of their cables.
pub(crate) const POD_LINK: &str = "cali-pod";
pub(crate) const SENTINEL_LINK: &str = "cali-sentinel";

/// Few external addresses, so that rules match them often.
pub(crate) const OUTSIDE: [&str; 8] = [
    "10.1.0.1",
    "10.1.0.2",
    "10.1.1.1",
    "192.168.7.9",
    "223.255.255.255",
    "fd01::1",
    "fd01::2",
    "fd02::ffff",
];
pub(crate) const NETS: [&str; 12] = [
    "0.0.0.0/0",
    "10.1.0.0/24",
    "10.1.0.0/16",
    "10.1.0.128/25",
    "192.168.7.9/32",
    "223.0.0.0/8",
    "128.0.0.0/1",
    "10.65.0.0/16",
    "::/0",
    "fd01::/64",
    "fd01::2/128",
    "fd65::/16",
];
pub(crate) const PORTS: [u16; 5] = [0, 80, 81, 443, 65535];

pub(crate) fn parse<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

pub(crate) fn id(name: &str) -> EndpointId {
    EndpointId { namespace: "demo".into(), pod: name.into(), interface: "eth0".into() }
}

/// A state with some sets, some policies, the tested pod and the sentinel.
pub(crate) fn state() -> impl Strategy<Value = NodeState> {
    let sets = vec(of(set()), 5);
    let policies = vec(weighted(0.95, (vec(rule(), 0..4), vec(rule(), 0..4))), 4);
    let profiles = vec(prop_oneof![3 => Just(99u8), 1 => 0u8..4], 0..4);
    let host_ports = vec((prop_oneof![Just(None), Just(Some([127, 0, 0, 1].into()))], 0u16..4), 0..3);
    (sets, policies, tiers(), tiers(), profiles, prop::bool::weighted(0.3), host_ports).prop_map(
        |(sets, policies, ingress, egress, profiles, counts, host_ports)| {
            let mut state = NodeState::default();
            if counts {
                Arc::make_mut(&mut state.settings).policy_counters = PolicyCounters::Enabled;
            }
            for (n, set) in sets.into_iter().enumerate() {
                state.sets.extend(set.map(|(kind, members)| (set_id(n as u8), (kind, members.into()))));
            }
            for (n, rules) in policies.into_iter().enumerate() {
                let rules = rules.map(|(ingress, egress)| Arc::new(PolicyRules { ingress, egress }));
                state.policies.extend(rules.map(|rules| (policy_id(n as u8), rules)));
            }
            let everything = PolicyRules {
                ingress: vec![Rule::all(Action::Allow)],
                egress: vec![Rule::all(Action::Allow)],
            };
            state.policies.insert(policy_id(99), Arc::new(everything));
            let profiles = profiles.into_iter().map(policy_id).collect();
            let program = EndpointProgram { ingress, egress, profiles };
            let pod = Arc::unwrap_or_clone(endpoint(POD_LINK, POD, program));
            let host_port = |(address, port)| HostPort {
                protocol: Protocol::UDP,
                address,
                port: 8_000 + port,
                pod_port: 80 + port,
            };
            let host_ports = host_ports.into_iter().map(host_port).collect();
            state.endpoints.insert(id("pod"), Arc::new(Endpoint { host_ports, ..pod }));
            let open = EndpointProgram { profiles: vec![policy_id(99)], ..EndpointProgram::default() };
            state.endpoints.insert(id("sentinel"), endpoint(SENTINEL_LINK, SENTINEL, open));
            state
        },
    )
}

fn endpoint(link: &str, addresses: [&str; 2], program: EndpointProgram) -> Arc<Endpoint> {
    Arc::new(Endpoint {
        container_id: link.into(),
        host_interface: link.into(),
        addresses: addresses.map(parse).to_vec(),
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(program),
    })
}

fn set_id(n: u8) -> SetId {
    SetId::new(format!("s:{n}"))
}

pub(crate) fn policy_id(n: u8) -> PolicyId {
    PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "demo".into(), name: format!("policy-{n}").into() }
}

fn set() -> impl Strategy<Value = (SetKind, std::collections::BTreeSet<Member>)> {
    let address = || select(OUTSIDE.to_vec()).prop_map(parse::<IpAddr>);
    let net = prop_oneof![3 => address().prop_map(IpNet::from), 1 => select(NETS.to_vec()).prop_map(parse)];
    let port = (address(), select(vec![6u8, 17]), select(PORTS.to_vec()));
    let port = port.prop_map(|(address, protocol, port)| Member::AddressPort {
        address,
        protocol: Protocol(protocol),
        port,
    });
    prop_oneof![
        2 => btree_set(net.prop_map(Member::Net), 0..6).prop_map(|members| (SetKind::Nets, members)),
        1 => btree_set(port, 0..12).prop_map(|members| (SetKind::AddressPorts, members)),
    ]
}

pub(crate) fn tiers() -> impl Strategy<Value = Vec<TierProgram>> {
    let tier = (vec(prop_oneof![20 => 0u8..4, 1 => Just(4)], 1..3), prop::bool::weighted(0.8));
    vec(tier, 0..3).prop_map(|tiers| {
        let tier = |(n, (policies, pass)): (usize, (Vec<u8>, bool))| TierProgram {
            name: format!("tier-{n}").into(),
            policies: policies.into_iter().map(policy_id).collect(),
            end: if pass { EndOfTier::Pass } else { EndOfTier::Deny },
        };
        tiers.into_iter().enumerate().map(tier).collect()
    })
}

fn rule() -> impl Strategy<Value = Rule> {
    let action = select(vec![Action::Allow, Action::Allow, Action::Deny, Action::Pass, Action::Log]);
    let version = weighted(0.1, select(vec![IpVersion::V4, IpVersion::V6]));
    let protocol = || select(vec![1u8, 6, 17, 58, 89]).prop_map(Protocol);
    let icmp = || (of(select(vec![8u8, 13, 128])), of(select(vec![0u8, 5])));
    let icmp = move || icmp().prop_map(|(icmp_type, icmp_code)| IcmpMatch { icmp_type, icmp_code });
    let protocols = (weighted(0.4, protocol()), weighted(0.15, protocol()));
    let icmps = (weighted(0.1, icmp()), weighted(0.15, icmp()));
    (action, version, protocols, icmps, entity(), entity()).prop_map(
        |(action, ip_version, (protocol, not_protocol), (icmp, not_icmp), source, destination)| Rule {
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

fn entity() -> impl Strategy<Value = EntityMatch> {
    let nets = || vec(select(NETS.to_vec()).prop_map(parse::<IpNet>), 1..3);
    let sets = || vec((0u8..6).prop_map(set_id), 1..3);
    let range = (select(PORTS.to_vec()), select(PORTS.to_vec()))
        .prop_map(|(a, b)| PortRange { first: a.min(b), last: a.max(b) });
    let ports = move || vec(range.clone(), 1..3);
    let positive = (maybe(0.2, nets()), maybe(0.25, sets()), maybe(0.2, ports()), maybe(0.1, sets()));
    let negative = (maybe(0.1, nets()), maybe(0.15, sets()), maybe(0.1, ports()), maybe(0.1, sets()));
    (positive, negative).prop_map(
        |((nets, sets, ports, port_sets), (not_nets, not_sets, not_ports, not_port_sets))| EntityMatch {
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

/// A criterion that most rules lack.
fn maybe<T: std::fmt::Debug>(
    chance: f64,
    criterion: impl Strategy<Value = Vec<T>>,
) -> impl Strategy<Value = Vec<T>> {
    weighted(chance, criterion).prop_map(Option::unwrap_or_default)
}

/// Flows from outside into the pod, or from the pod to outside.
pub(crate) fn flow(into_pod: bool) -> impl Strategy<Value = Flow> {
    let protocol = select(vec![1u8, 6, 6, 6, 17, 17, 89]);
    let ports = (select(PORTS.to_vec()), select(PORTS.to_vec()));
    let icmp = (any::<bool>(), select(vec![0u8, 5]));
    (select(OUTSIDE.to_vec()), protocol, ports, icmp).prop_map(
        move |(outside, protocol, ports, (first, code))| {
            let outside: IpAddr = parse(outside);
            let v6 = outside.is_ipv6();
            let pod: IpAddr = parse(POD[usize::from(v6)]);
            let protocol = if v6 && protocol == 1 { 58 } else { protocol };
            let (source, destination) = if into_pod { (outside, pod) } else { (pod, outside) };
            let has_ports = matches!(protocol, 6 | 17);
            let icmp_type = match (v6, first) {
                (true, _) => 128,
                (false, true) => 8,
                (false, false) => 13,
            };
            Flow {
                source,
                destination,
                protocol: Protocol(protocol),
                source_port: if has_ports { ports.0 } else { 0 },
                destination_port: if has_ports { ports.1 } else { 0 },
                icmp: matches!(protocol, 1 | 58).then_some((icmp_type, code)),
            }
        },
    )
}

/// A short description of a state, for messages.
pub(crate) fn shown(state: &NodeState) -> String {
    let policies: BTreeMap<_, _> = state.policies.iter().map(|(id, rules)| (id.to_string(), rules)).collect();
    format!("{:#?}\n{:#?}\n{:#?}", state.endpoints.get(&id("pod")), policies, state.sets)
}
