//! Random clusters. They are deliberately small: few labels, addresses and ports, so that rules match packets often.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a generator of tests: its own tables can be read"
)]

pub mod hosts;
mod nodes;
pub mod pods;
mod policies;
pub mod services;

use std::net::IpAddr;

use ipnet::IpNet;
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Map, Value, json};
use tortie_api::calico::{FelixConfiguration, WorkloadEndpoint};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_oracle::Snapshot;

use nodes::{far_nodes, listed};
use policies::{maybe, policy, rules};

/// The nodes of the pods.
pub const NODES: [&str; 2] = ["n1", "n2"];
const NAMESPACES: [&str; 6] = ["red", "blue", "red", "blue", "red", "unknown"];
const ACCOUNTS: [&str; 3] = ["default", "runner", ""];
const TIERS: [&str; 5] = ["default", "first", "second", "kube-baseline", "undescribed"];
const PORT_NAMES: [&str; 3] = ["web", "dns", "none"];
const PORTS: [u16; 5] = [53, 80, 81, 443, 65535];
const ADDRESSES: [&str; 14] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "10.0.0.4",
    "10.0.0.5",
    "10.0.0.8",
    "10.0.1.0",
    "203.0.113.9",
    "192.0.2.1",
    "192.0.2.2",
    "fd00::1",
    "fd00::2",
    "fd00::9",
    "2001:db8::1",
];
const NETS_V4: [&str; 8] = [
    "10.0.0.0/29",
    "10.0.0.0/30",
    "10.0.0.1/32",
    "10.0.0.4/31",
    "10.0.0.0/8",
    "0.0.0.0/0",
    "203.0.113.0/24",
    "10.0.0.254/31",
];
const NETS_V6: [&str; 4] = ["fd00::/126", "fd00::1/128", "::/0", "2001:db8::/32"];

/// All objects that policy depends on.
pub type Objects = Vec<(Key, Value)>;

/// A packet to judge.
#[derive(Debug, Clone)]
pub struct Sent {
    /// The sender's address.
    pub source: IpAddr,
    /// The receiver's address.
    pub destination: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The sender's port; 0 if the protocol has no ports.
    pub source_port: u16,
    /// The receiver's port; 0 if the protocol has no ports.
    pub destination_port: u16,
    /// Type and code of ICMP.
    pub icmp: Option<(u8, u8)>,
}

/// Clusters of pods, two of which may share an address for a moment.
pub fn clusters() -> impl Strategy<Value = Objects> {
    clusters_of(prop::collection::vec(pod(), 1..6))
}

/// Clusters whose pods all have different addresses, as a kernel requires.
pub fn clusters_of_distinct_pods() -> impl Strategy<Value = Objects> {
    let clusters = clusters_of(prop::collection::vec(pod(), 1..6).prop_map(|mut pods| {
        let mut taken = Vec::new();
        for pod in &mut pods {
            for address in &mut pod.addresses {
                let all = if address.contains(':') { &ADDRESSES[10..12] } else { &ADDRESSES[..5] };
                let free = |address: &&&str| !taken.contains(*address);
                *address = std::iter::once(&*address).chain(all).find(free).copied().unwrap_or_default();
                taken.push(*address);
            }
            pod.addresses.retain(|address| !address.is_empty());
        }
        pods
    }));
    // Rules may count packets or not.
    (clusters, of(select(vec!["Enabled", "Disabled"]))).prop_map(|(mut objects, counters)| {
        objects.extend(counters.map(|counters| {
            let annotations = json!({FelixConfiguration::POLICY_COUNTERS: counters});
            let value = json!({"metadata": {"name": "default", "annotations": annotations}, "spec": {}});
            (Key::global(Kind::FelixConfiguration, "default"), value)
        }));
        objects
    })
}

fn clusters_of(pods: impl Strategy<Value = Vec<Pod>>) -> impl Strategy<Value = Objects> {
    let sets = prop::collection::vec(network_set(), 0..4);
    let policies = prop::collection::vec(policy(), 0..6);
    (namespaces(), tiers(), profiles(), slices(), far_nodes(), pods, sets, policies).prop_map(
        |(namespaces, tiers, profiles, slices, nodes, pods, sets, policies)| {
            let numbered = |objects: Vec<(Key, Value)>| {
                objects.into_iter().enumerate().map(|(index, (key, value))| renamed(key, value, index))
            };
            let mut all: Objects = [namespaces, tiers, profiles, slices, nodes].concat();
            all.extend(pods.into_iter().enumerate().map(|(index, pod)| endpoint(pod, index)));
            all.extend(numbered(sets));
            // Few names, so that policies of several namespaces and kinds share a name.
            all.extend(
                policies.into_iter().enumerate().map(|(index, (key, value))| renamed(key, value, index % 3)),
            );
            all
        },
    )
}

/// The same, with nodes that have addresses and host endpoints.
pub fn clusters_with_hosts() -> impl Strategy<Value = Objects> {
    let interface = select(vec![None, Some("eth0"), Some("*")]);
    // In any order: what comes after a profile that is missing, passes or has no rule that matches matters.
    let profiles = vec!["missing", "projectcalico-default-allow", "kns.red", "ksa.red.runner"];
    let profiles = subsequence(profiles, 0..4).prop_shuffle();
    let port = (select(&PORT_NAMES[..2]), select(vec!["TCP", "UDP"]), select(&PORTS[..]));
    let host = (select(&NODES[..]), interface, any::<bool>(), profiles, labels(), of(port));
    let more = prop::collection::vec((labels(), listed()), 2).boxed();
    (clusters(), prop::collection::vec(host, 0..4), more).prop_map(|(mut objects, hosts, more)| {
        let nodes = NODES.iter().zip(["192.0.2.1", "192.0.2.2"]).zip(more);
        for ((node, address), (labels, listed)) in nodes {
            let annotations = json!({"projectcalico.org/IPv4Address": format!("{address}/24")});
            let metadata = json!({"name": node, "labels": labels, "annotations": annotations});
            let value = json!({"metadata": metadata, "status": {"addresses": listed}});
            objects.push((Key::global(Kind::Node, *node), value));
        }
        for (index, (node, interface, addressed, profiles, labels, port)) in hosts.into_iter().enumerate() {
            let address = if node == NODES[0] { "192.0.2.1" } else { "192.0.2.2" };
            let addressed = addressed || interface.is_none();
            let spec = maybe(vec![
                ("node", Some(json!(node))),
                ("interfaceName", interface.map(Value::from)),
                ("expectedIPs", addressed.then(|| json!([address]))),
                ("profiles", Some(json!(profiles))),
                (
                    "ports",
                    port.map(
                        |(name, protocol, port)| json!([{"name": name, "protocol": protocol, "port": port}]),
                    ),
                ),
            ]);
            let value = json!({"metadata": {"labels": labels}, "spec": spec});
            objects.push(renamed(Key::global(Kind::HostEndpoint, ""), value, index));
        }
        objects
    })
}

/// Packets between addresses that occur in the cluster or almost do, to ports that occur or almost do.
pub fn packets() -> impl Strategy<Value = Sent> {
    let of_family = |first: usize, pods: usize, all: usize| {
        let address = move || prop_oneof![3 => first..pods, 2 => first..all];
        let parsed = |index: usize| ADDRESSES[index].parse::<IpAddr>().unwrap();
        (address(), address()).prop_map(move |(source, destination)| (parsed(source), parsed(destination)))
    };
    let pair = prop_oneof![4 => of_family(0, 5, 10), 1 => of_family(10, 12, 14)];
    let port = || prop_oneof![4 => select(&PORTS[..]), 1 => select(vec![0, 52, 82, 8080, 40_000])];
    let protocol = select(vec![6, 6, 6, 6, 17, 17, 132, 1, 1, 58, 47]).prop_map(Protocol);
    (pair, protocol, port(), port(), select(vec![0u8, 3, 8, 13, 128]), 0..2u8).prop_map(
        |((source, destination), protocol, source_port, destination_port, icmp_type, icmp_code)| {
            let ported = protocol.has_ports();
            let is_icmp = [Protocol::ICMP, Protocol::ICMPV6].contains(&protocol);
            Sent {
                source,
                destination,
                protocol,
                source_port: if ported { source_port } else { 0 },
                destination_port: if ported { destination_port } else { 0 },
                icmp: is_icmp.then_some((icmp_type, icmp_code)),
            }
        },
    )
}

/// The objects in the form that the oracle reads.
#[must_use]
pub fn snapshot(objects: &Objects) -> Snapshot {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    snapshot
}

/// The objects as a manifest for `tortie explain -f`.
#[must_use]
pub fn manifest(objects: &Objects) -> String {
    let one = |(key, value): &(Key, Value)| {
        let mut value = value.clone();
        value["apiVersion"] = json!(key.kind.api_version());
        value["kind"] = json!(key.kind.name());
        format!("---\n{value}\n")
    };
    objects.iter().map(one).collect()
}

fn renamed(mut key: Key, mut value: Value, index: usize) -> (Key, Value) {
    // Names whose order differs from that of the numbers.
    key.name = format!("{}{}", ["m", "b", "z", "a", "q", "c", "x"][index % 7], index);
    value["metadata"]["name"] = json!(key.name);
    (key, value)
}

fn labels() -> impl Strategy<Value = Map<String, Value>> {
    let value = || of(select(vec!["x", "y", "xy"]));
    (value(), value(), of(Just("x"))).prop_map(|(a, b, claimed)| {
        let all = [("a", a), ("b", b), ("pcns.a", claimed)];
        all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), json!(value?)))).collect()
    })
}

fn namespaces() -> impl Strategy<Value = Objects> {
    (labels(), labels(), labels(), any::<bool>()).prop_map(|(red, blue, account, has_account)| {
        let named = |kind, name: &str, namespace: &str, labels: Map<String, Value>| {
            let key = Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
            (key, json!({"metadata": {"name": name, "labels": labels}}))
        };
        let mut all = vec![named(Kind::Namespace, "red", "", red), named(Kind::Namespace, "blue", "", blue)];
        if has_account {
            all.push(named(Kind::ServiceAccount, "runner", "red", account));
        }
        all
    })
}

fn tiers() -> impl Strategy<Value = Objects> {
    let tier = |name: &'static str| {
        let order = of(select(vec![1.0, 2.0, 500_000.0, 2_000_000.0]));
        (order, of(select(vec!["Deny", "Pass", "Perhaps"]))).prop_map(move |(order, end)| {
            let mut spec = Map::new();
            spec.extend(order.map(|order| ("order".to_owned(), json!(order))));
            spec.extend(end.map(|end| ("defaultAction".to_owned(), json!(end))));
            (Key::global(Kind::Tier, name), json!({"metadata": {"name": name}, "spec": spec}))
        })
    };
    // Also tiers that every cluster has, whose order and default action nobody can change.
    let known = (select(vec!["default", "kube-baseline"]), tier("")).prop_map(|(name, (_, mut value))| {
        value["metadata"]["name"] = json!(name);
        (Key::global(Kind::Tier, name), value)
    });
    (of(tier("first")), of(tier("second")), prop::option::weighted(0.2, known))
        .prop_map(|(a, b, c)| a.into_iter().chain(b).chain(c).collect())
}

fn profiles() -> impl Strategy<Value = Objects> {
    let profile = |name: &'static str| {
        (labels(), rules("ingress", true, 2), rules("egress", true, 2)).prop_map(
            move |(labels, ingress, egress)| {
                let spec = json!({"labelsToApply": labels, "ingress": ingress, "egress": egress});
                (Key::global(Kind::Profile, name), json!({"metadata": {"name": name}, "spec": spec}))
            },
        )
    };
    (of(profile("kns.red")), of(profile("ksa.red.runner")))
        .prop_map(|(a, b)| a.into_iter().chain(b).collect())
}

fn slices() -> impl Strategy<Value = Objects> {
    let port = (select(vec!["TCP", "UDP"]), prop::option::weighted(0.9, select(&PORTS[..4])))
        .prop_map(|(protocol, port)| json!({"protocol": protocol, "port": port}));
    let slice = (
        select(&NAMESPACES[..2]),
        select(vec!["s", "s", "t"]),
        subsequence(&ADDRESSES[..], 1..8),
        prop::collection::vec(port, 1..5),
    );
    let object = slice.prop_map(|(namespace, service, addresses, ports)| {
        let value = json!({
            "metadata": {"namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "endpoints": [{"addresses": addresses}], "ports": ports,
        });
        (Key::namespaced(Kind::EndpointSlice, namespace, ""), value)
    });
    let numbered = |(index, (key, value))| renamed(key, value, index);
    prop::collection::vec(object, 1..4)
        .prop_map(move |slices| slices.into_iter().enumerate().map(numbered).collect())
}

fn network_set() -> impl Strategy<Value = (Key, Value)> {
    let nets = (subsequence(&NETS_V4[..], 0..3), subsequence(&NETS_V6[..], 0..2));
    (of(select(&NAMESPACES[..])), labels(), nets).prop_map(|(namespace, labels, (v4, v6))| {
        let nets = [v4, v6].concat();
        let spec = json!({"nets": nets});
        match namespace {
            Some(namespace) => (
                Key::namespaced(Kind::NetworkSet, namespace, ""),
                json!({"metadata": {"namespace": namespace, "labels": labels}, "spec": spec}),
            ),
            None => (
                Key::global(Kind::GlobalNetworkSet, ""),
                json!({"metadata": {"labels": labels}, "spec": spec}),
            ),
        }
    })
}

#[derive(Debug, Clone)]
struct Pod {
    node: &'static str,
    namespace: &'static str,
    account: &'static str,
    labels: Map<String, Value>,
    addresses: Vec<&'static str>,
    ports: Vec<(&'static str, &'static str, u16)>,
}

fn pod() -> impl Strategy<Value = Pod> {
    let port = (select(&PORT_NAMES[..2]), select(vec!["TCP", "UDP", "SCTP"]), select(&PORTS[..]));
    (
        (select(&NODES[..]), select(&NAMESPACES[..]), select(&ACCOUNTS[..])),
        labels(),
        (select(&ADDRESSES[..5]), of(select(&ADDRESSES[10..12]))),
        prop::collection::vec(port, 0..3),
    )
        .prop_map(|((node, namespace, account), labels, (v4, v6), ports)| {
            let addresses = std::iter::once(v4).chain(v6).collect();
            Pod { node, namespace, account, labels, addresses, ports }
        })
}

fn endpoint(pod: Pod, index: usize) -> (Key, Value) {
    let pod_name = format!("p{index}");
    let name = WorkloadEndpoint::name_for(pod.node, &pod_name, "eth0");
    let nets: Vec<String> = pod
        .addresses
        .iter()
        .map(|address| IpNet::from(address.parse::<IpAddr>().unwrap()).to_string())
        .collect();
    let port = |(name, protocol, port): &(&str, &str, u16)| json!({"name": name, "protocol": protocol, "port": port});
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": name, "namespace": pod.namespace, "labels": pod.labels},
        "spec": {
            "node": pod.node, "pod": pod_name, "endpoint": "eth0", "serviceAccountName": pod.account,
            "ipNetworks": nets, "profiles": WorkloadEndpoint::profiles_for(pod.namespace, pod.account),
            "ports": pod.ports.iter().map(port).collect::<Vec<_>>(),
            "interfaceName": format!("cali-{}-{pod_name}", pod.namespace),
        },
    });
    (Key::namespaced(Kind::WorkloadEndpoint, pod.namespace, name), value)
}
