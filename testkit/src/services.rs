//! Random objects of Services, and packets to them. There are few addresses, ports and names, so that they often meet.
#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "its constants are as they should be")]

use std::net::IpAddr;

use ipnet::IpNet;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{Key, Kind};
use tortie_oracle::{ServiceClient, ServicePacket};
use tortie_services::{FrontendAddress, FrontendKey};

/// The name of the node.
pub const NODE: &str = "n1";
/// The addresses of the node. The last ones are those of a load balancer that is on an interface.
pub const OF_NODE: [&str; 7] =
    ["192.0.2.1", "192.0.2.9", "127.0.0.1", "2001:db8::1", "::1", "198.51.100.8", "2001:db8:e::8"];
const CLUSTER_IPS: [[&str; 3]; 2] =
    [["10.96.0.1", "10.96.0.2", "010.096.000.003"], ["fd96::1", "fd96::2", "FD96:0:0::0003"]];
const EXTERNAL: [[&str; 4]; 2] = [
    ["198.51.100.7", "198.51.100.8", "192.0.2.1", "10.96.0.2"],
    ["2001:db8:e::7", "2001:db8:e::8", "2001:db8::1", "fd96::2"],
];
const PODS: [[&str; 5]; 2] = [
    ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "010.0.00.5"],
    ["fd00::1", "fd00::2", "fd00::3", "fd00::4", "fd00:0::05"],
];
const OTHERS: [[&str; 2]; 2] = [["203.0.113.5", "203.0.113.200"], ["2001:db8:f::5", "2001:db8:f::c8"]];
const RANGES: [&str; 9] = [
    "203.0.113.0/25",
    " 203.0.113.0/25 ",
    "2001:db8:f::/121",
    "0.0.0.0/0",
    "::/0",
    "192.0.2.1/32",
    "2001:db8::/64",
    "10.0.0.0/29",
    "wrong",
];
/// Name, protocol, port, node port, and the number at backends.
const PORTS: [(&str, &str, u16, u16, u16); 4] = [
    ("http", "TCP", 80, 30_080, 8080),
    ("", "UDP", 53, 30_053, 5353),
    ("s", "SCTP", 80, 30_080, 8080),
    ("http", "TCP", 81, 0, 8081),
];
const PROTOCOLS: [&str; 4] = ["TCP", "UDP", "SCTP", "ICMP"];

/// An object comes, changes, or goes.
#[derive(Debug, Clone)]
pub struct Event {
    /// The object.
    pub key: Key,
    /// Its value; absent if it goes.
    pub value: Option<Value>,
}

/// The operator's settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The networks whose addresses accept node ports; absent for the node's first address of each family.
    pub node_port_addresses: Option<Vec<IpNet>>,
    /// Packets to clusterIPs always get the node's address as their source.
    pub masquerade_all: bool,
    /// The node can tell pods from others.
    pub knows_pods: bool,
}

/// Random settings.
pub fn settings() -> impl Strategy<Value = Settings> {
    let networks: Vec<Option<Vec<IpNet>>> = vec![
        None,
        Some(vec!["192.0.2.0/29".parse().unwrap()]),
        Some(vec!["2001:db8::/64".parse().unwrap()]),
        Some(vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]),
    ];
    (select(networks), prop::bool::weighted(0.1), prop::bool::weighted(0.85)).prop_map(
        |(node_port_addresses, masquerade_all, knows_pods)| Settings {
            node_port_addresses,
            masquerade_all,
            knows_pods,
        },
    )
}

/// An event. Every object is deleted sometimes.
pub fn event() -> impl Strategy<Value = Event> {
    let object = prop_oneof![
        4 => service(),
        5 => slice(),
        1 => node(),
        1 => service_cidr(),
    ];
    (object, prop::bool::weighted(0.15))
        .prop_map(|((key, value), is_gone)| Event { key, value: (!is_gone).then_some(value) })
}

/// A field that is set to one of these or absent.
fn maybe(values: &'static [Value]) -> impl Strategy<Value = Value> {
    select(values.iter().cloned().chain([Value::Null]).collect::<Vec<_>>())
}

fn policy(local: u32) -> impl Strategy<Value = Value> {
    prop_oneof![local => Just(json!("Local")), 1 => Just(json!("Cluster")), 1 => Just(Value::Null)]
}

fn service() -> impl Strategy<Value = (Key, Value)> {
    let addresses = (
        (0..3_usize, 0..3_usize, select(vec!["both", "both", "v4", "v6", "none"])),
        subsequence([EXTERNAL[0], EXTERNAL[1]].concat(), 0..3),
        subsequence([EXTERNAL[0], EXTERNAL[1]].concat(), 0..3),
        select(vec![Value::Null, Value::Null, json!("VIP"), json!("Proxy")]),
        prop_oneof![2 => Just(Vec::new()), 3 => subsequence(RANGES.to_vec(), 0..3)],
    );
    let settings = (
        policy(1),
        policy(2),
        prop::bool::weighted(0.4),
        select(vec![
            Value::Null,
            json!({"clientIP": {"timeoutSeconds": 3}}),
            json!({"clientIP": {"timeoutSeconds": 60}}),
        ]),
        subsequence(vec![0_usize, 1, 2], 1..3),
        select(vec!["ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer", "ExternalName"]),
    );
    let names = (select(vec!["x", "y"]), select(vec!["s", "t"]), 0..4_u8, prop::bool::weighted(0.05));
    (addresses, settings, names).prop_map(|(addresses, settings, names)| {
        let ((v4, v6, families), external, balancer, mode, ranges) = addresses;
        let (internal, external_policy, has_affinity, affinity, ports, kind) = settings;
        let (namespace, name, day, is_of_another) = names;
        let own = match families {
            "both" => vec![CLUSTER_IPS[0][v4], CLUSTER_IPS[1][v6]],
            "v4" => vec![CLUSTER_IPS[0][v4]],
            "v6" => vec![CLUSTER_IPS[1][v6]],
            _ => vec!["None"],
        };
        let ports: Vec<Value> = ports.into_iter().map(|port| service_port(port, kind)).collect();
        let created = if day == 0 { Value::Null } else { json!(format!("2026-01-0{day}T00:00:00Z")) };
        let labels = if is_of_another { json!({"service.kubernetes.io/service-proxy-name": ""}) } else { json!({}) };
        let ingress: Vec<Value> = balancer.iter().map(|ip| json!({"ip": ip, "ipMode": mode})).collect();
        let value = json!({
            "kind": "Service",
            "metadata": {"namespace": namespace, "name": name, "creationTimestamp": created, "labels": labels},
            "spec": {
                "type": kind, "clusterIP": own[0], "clusterIPs": own, "externalIPs": external,
                "internalTrafficPolicy": internal, "externalTrafficPolicy": external_policy,
                "sessionAffinity": if has_affinity { json!("ClientIP") } else { Value::Null },
                "sessionAffinityConfig": affinity, "healthCheckNodePort": (if day == 3 { 0 } else { 32_000 }), "loadBalancerSourceRanges": ranges, "ports": ports,
            },
            "status": {"loadBalancer": {"ingress": ingress}},
        });
        (Key::namespaced(Kind::Service, namespace, name), value)
    })
}

fn service_port(index: usize, kind: &str) -> Value {
    let (name, protocol, port, node_port, _) = PORTS[index];
    let mut value = json!({"name": name, "port": port});
    if protocol != "TCP" {
        value["protocol"] = json!(protocol);
    }
    if kind != "ClusterIP" {
        value["nodePort"] = json!(node_port);
    }
    value
}

fn slice() -> impl Strategy<Value = (Key, Value)> {
    let names = (select(vec!["x", "y"]), select(vec!["s", "t"]), 0..3_u8, prop::bool::weighted(0.05));
    let content = (
        select(vec![0_usize, 0, 1]),
        prop::collection::vec(endpoint(), 0..4),
        prop::bool::weighted(0.15),
        select(vec!["both", "zones", "nodes", "none"]),
    );
    (names, content).prop_map(|(names, content)| {
        let (namespace, service, number, is_headless) = names;
        let (family, endpoints, has_other_numbers, hints) = content;
        let endpoints: Vec<Value> =
            endpoints.into_iter().map(|endpoint| slice_endpoint(endpoint, family, hints)).collect();
        let ports: Vec<Value> = PORTS[..3]
            .iter()
            .map(|(name, protocol, _, _, number)| {
                json!({"name": name, "protocol": protocol, "port": number + u16::from(has_other_numbers)})
            })
            .chain([json!({"port": 1}), json!({"name": "http"}), json!({"name": "http", "port": 0})])
            .collect();
        let mut labels = json!({"kubernetes.io/service-name": service});
        if is_headless {
            labels["service.kubernetes.io/headless"] = json!("");
        }
        let name = format!("slice-{number}");
        let value = json!({
            "kind": "EndpointSlice",
            "metadata": {"namespace": namespace, "name": name, "labels": labels},
            "addressType": (["IPv4", "IPv6"][family]), "endpoints": endpoints, "ports": ports,
        });
        (Key::namespaced(Kind::EndpointSlice, namespace, name), value)
    })
}

type Endpoint = (usize, Value, Value, Vec<&'static str>, Vec<&'static str>);

fn endpoint() -> impl Strategy<Value = Endpoint> {
    static NODES: std::sync::LazyLock<Vec<Value>> =
        std::sync::LazyLock::new(|| vec![json!(NODE), json!("n2")]);
    let states = prop_oneof![
        4 => Just(json!({"ready": true})),
        1 => Just(Value::Null),
        1 => Just(json!({"ready": false})),
        3 => Just(json!({"ready": false, "serving": true, "terminating": true})),
        1 => Just(json!({"ready": false, "terminating": true})),
        1 => Just(json!({"ready": false, "serving": false, "terminating": true})),
        1 => Just(json!({"ready": true, "serving": true, "terminating": true})),
    ];
    let names = |names: Vec<&'static str>| {
        prop_oneof![
            8 => subsequence(names, 1..3),
            1 => Just(Vec::new()),
        ]
    };
    (0..5_usize, states, maybe(&NODES), names(vec!["a", "b"]), names(vec!["n1", "n2"]))
}

fn slice_endpoint(endpoint: Endpoint, family: usize, hints: &str) -> Value {
    let (pod, conditions, node, zones, nodes) = endpoint;
    let named = |names: Vec<&str>| names.into_iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
    let hints = match hints {
        "both" => json!({"forZones": named(zones), "forNodes": named(nodes)}),
        "zones" => json!({"forZones": named(zones)}),
        "nodes" => json!({"forNodes": named(nodes)}),
        _ => Value::Null,
    };
    json!({"addresses": [PODS[family][pod], "10.9.9.9"], "conditions": conditions, "nodeName": node, "hints": hints})
}

/// The own Node, another one, or one without what Services depend on.
fn node() -> impl Strategy<Value = (Key, Value)> {
    let label = select(vec![json!("a"), json!("b"), json!("")]);
    (select(vec![NODE, NODE, "n2"]), label, 0..3_u8).prop_map(|(name, zone, addresses)| {
        let of = |kind: &str, address: &str| json!({"type": kind, "address": address});
        let both = [of("InternalIP", "192.0.2.1"), of("InternalIP", "2001:db8::1"), of("Hostname", name)];
        let addresses = match addresses {
            0 => json!([of("ExternalIP", "192.0.2.9")]),
            1 => json!(both),
            _ => json!([of("ExternalIP", "192.0.2.9"), both[0], both[1]]),
        };
        let labels = json!({"topology.kubernetes.io/zone": zone});
        let value = json!({"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": {"addresses": addresses}});
        (Key::global(Kind::Node, name), value)
    })
}

fn service_cidr() -> impl Strategy<Value = (Key, Value)> {
    let cidrs = select(vec![
        json!(["10.96.0.0/16", "fd96::/112"]),
        json!(["10.96.0.0/30"]),
        json!(["192.0.2.8/29"]),
        json!(["wrong"]),
    ]);
    (select(vec!["kubernetes", "more"]), cidrs).prop_map(|(name, cidrs)| {
        let value = json!({"kind": "ServiceCIDR", "metadata": {"name": name}, "spec": {"cidrs": cidrs}});
        (Key::global(Kind::ServiceCidr, name), value)
    })
}

/// A packet. Most are aimed at a frontend that exists.
#[derive(Debug, Clone)]
pub struct Sent {
    /// The packet, if it is aimed at no frontend.
    pub packet: ServicePacket,
    /// The frontend at which it is aimed, modulo their number.
    pub aim: Option<usize>,
    /// The time in seconds since the last one.
    pub delay: u64,
}

impl Sent {
    /// The packet that is aimed at one of these frontends of its family.
    #[must_use]
    pub fn aimed(&self, frontends: &[FrontendKey]) -> ServicePacket {
        let mut packet = self.packet.clone();
        let family = IpVersion::of(&packet.source);
        let of_family = |key: &&FrontendKey| match key.address {
            FrontendAddress::Address(address) => IpVersion::of(&address) == family,
            FrontendAddress::NodePort(version) => version == family,
        };
        let own: Vec<&FrontendKey> = frontends.iter().filter(of_family).collect();
        let Some(key) = self.aim.filter(|_| !own.is_empty()).map(|aim| own[aim % own.len()]) else {
            return packet;
        };
        packet.destination = match (key.address, family) {
            (FrontendAddress::Address(address), _) => address,
            (FrontendAddress::NodePort(_), IpVersion::V4) => "192.0.2.1".parse().unwrap(),
            (FrontendAddress::NodePort(_), IpVersion::V6) => "2001:db8::1".parse().unwrap(),
        };
        packet.port = key.port;
        let named = PROTOCOLS.into_iter().find(|name| Protocol::from_name(name) == Some(key.protocol));
        packet.protocol = named.unwrap();
        packet.is_to_node = is_of_node(packet.destination);
        packet
    }
}

fn is_of_node(address: IpAddr) -> bool {
    OF_NODE.iter().any(|own| own.parse() == Ok(address))
}

/// A random packet.
pub fn packet() -> impl Strategy<Value = Sent> {
    let target = prop_oneof![
        4 => (0..3_usize).prop_map(|index| [CLUSTER_IPS[0][index], CLUSTER_IPS[1][index]]),
        4 => (0..4_usize).prop_map(|index| [EXTERNAL[0][index], EXTERNAL[1][index]]),
        2 => Just(["192.0.2.1", "2001:db8::1"]),
        1 => Just(["192.0.2.9", "2001:db8::9"]),
        1 => Just(["127.0.0.1", "::1"]),
        1 => Just(["10.96.0.77", "fd96::77"]),
        1 => Just(["203.0.113.99", "2001:db8:f::99"]),
    ];
    let ports = select(vec![80_u16, 80, 53, 81, 30_080, 30_080, 30_053]);
    let sender = (0..3_usize, 0..5_usize);
    let rest = (prop::option::weighted(0.75, 0..1000_usize), 0..3_u64);
    (select(vec![0_usize, 0, 1]), target, ports, 0..6_usize, sender, rest).prop_map(
        |(family, target, port, protocol, (sender, from), (aim, delay))| {
            // Texts with zeros are the spelling of objects, not of packets.
            let parse = |text: &str| -> IpAddr {
                let usual = text.replace("010.096.000.003", "10.96.0.3").replace("010.0.00.5", "10.0.0.5");
                usual.parse().unwrap()
            };
            let destination = parse(target[family]);
            let (sender, source) = match sender {
                0 => (ServiceClient::Pod, PODS[family][from]),
                1 => (
                    ServiceClient::Node,
                    [["192.0.2.1", "198.51.100.8"], ["2001:db8::1", "2001:db8:e::8"]][family][from % 2],
                ),
                _ => (ServiceClient::Other, OTHERS[family][from % 2]),
            };
            let expected = if port == 53 || port == 30_053 { "UDP" } else { "TCP" };
            let protocol = PROTOCOLS.get(protocol).copied().unwrap_or(expected);
            let packet = ServicePacket {
                source: parse(source),
                sender,
                destination,
                is_to_node: is_of_node(destination),
                protocol,
                port: if protocol == "ICMP" { 0 } else { port },
            };
            Sent { packet, aim, delay }
        },
    )
}
