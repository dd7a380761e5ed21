//! Services with addresses of their own, for clusters with pods; and a separate, simple reading of where those
//! addresses lead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use serde_json::{Value, json};
use tortie_api::kubernetes::EndpointSlice;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_policy::program::Flow;

use super::policies::maybe;
use super::{ADDRESSES, NAMESPACES, Objects, PORTS};

/// The names of Services. Policies name the first two, which may have other backends in addition to those created
/// here.
const NAMES: [&str; 4] = ["s", "t", "u", "v"];
/// Addresses that no pod, node or peer has, one for each Service. Rules match them only by networks with all
/// addresses.
const CLUSTER_IPS: [&str; 4] = ["172.30.0.1", "172.30.0.2", "172.30.0.3", "172.30.0.4"];
/// External addresses. Networks in rules contain some of them.
const EXTERNAL_IPS: [&str; 4] = ["203.0.113.80", "203.0.113.81", "198.51.100.1", "203.0.113.82"];
const INGRESS_IPS: [&str; 4] = ["203.0.113.90", "198.51.100.9", "203.0.113.91", "203.0.113.92"];
/// Backends of connections: mostly pods, otherwise a node or an external address.
const BACKENDS: [&str; 8] = [
    ADDRESSES[0],
    ADDRESSES[1],
    ADDRESSES[2],
    ADDRESSES[3],
    ADDRESSES[4],
    ADDRESSES[5],
    ADDRESSES[7],
    ADDRESSES[8],
];

/// Up to four Services, slices of their backends, and up to two policies of their clients.
pub fn services() -> impl Strategy<Value = Objects> {
    let all =
        NAMES.iter().zip(0..).map(|(name, number)| weighted(0.7, service(name, number))).collect::<Vec<_>>();
    (all, prop::collection::vec(policy(), 0..3)).prop_map(|(services, policies)| {
        let named = |(index, spec): (usize, Value)| {
            let name = format!("clients-{index}");
            let value = json!({"metadata": {"name": name}, "spec": spec});
            (Key::global(Kind::GlobalNetworkPolicy, name), value)
        };
        let policies = policies.into_iter().enumerate().map(named);
        services.into_iter().flatten().flatten().chain(policies).collect()
    })
}

/// A policy that distinguishes backends, or that matches addresses of Services. It precedes the other policies, which
/// know nothing about Services and rarely let a client reach some of the backends but not all.
fn policy() -> impl Strategy<Value = Value> {
    let nets = vec![
        "10.0.0.0/30",
        "10.0.0.2/31",
        "10.0.0.4/31",
        "10.0.0.1/32",
        "10.0.0.0/24",
        "192.0.2.0/24",
        "203.0.113.0/24",
        "172.30.0.0/31",
        "172.30.0.0/16",
        "0.0.0.0/0",
    ];
    let side =
        (of(subsequence(nets, 1..4)), prop_oneof![2 => Just(None), 1 => select(&PORTS[..4]).prop_map(Some)]);
    let action = select(vec!["Allow", "Allow", "Allow", "Deny", "Pass"]);
    let own = weighted(0.05, select(vec!["0:1023", "1024:65535"]));
    let rule = (action, of(select(vec!["TCP", "TCP", "UDP", "SCTP"])), side, own);
    let rule = rule.prop_map(|(action, protocol, (nets, port), own)| {
        let ports = |ports: Option<Value>| protocol.and(ports).map(|port| json!([port]));
        maybe(vec![
            ("action", Some(json!(action))),
            ("protocol", protocol.map(Value::from)),
            ("source", Some(maybe(vec![("ports", ports(own.map(Value::from)))]))),
            (
                "destination",
                Some(maybe(vec![("nets", nets.map(Value::from)), ("ports", ports(port.map(Value::from)))])),
            ),
        ])
    });
    let clients = select(vec!["all()", "all()", "has(a)", "b == 'x'"]);
    (select(vec![0, 1]), clients, prop::collection::vec(rule, 1..5)).prop_map(|(order, clients, egress)| {
        json!({"order": order, "selector": clients, "types": ["Egress"], "egress": egress})
    })
}

/// A port of a Service: protocol, number, and its target in each slice, if any.
type Port = (&'static str, u16, Vec<Option<u16>>);

/// A Service and its slices. Each slice has its own target ports, as if pods gave one name to several numbers.
fn service(name: &'static str, number: usize) -> impl Strategy<Value = Objects> {
    let protocol = select(vec!["TCP", "TCP", "TCP", "UDP", "SCTP"]);
    let targets = prop::collection::vec(weighted(0.9, select(&PORTS[..4])), 2);
    let ports = prop::collection::vec((protocol, select(vec![53, 80, 8080]), targets), 1..4);
    let ready = prop_oneof![8 => Just(json!({})), 1 => Just(json!({"ready": false})),
        1 => Just(json!({"ready": false, "serving": true, "terminating": true}))];
    let backends = (subsequence(&BACKENDS[..], 1..4), prop::collection::vec(ready, 3));
    let slices = prop_oneof![1 => Just(0..=0), 5 => Just(1..=2)]
        .prop_flat_map(move |count| prop::collection::vec(backends.clone(), count));
    (select(&NAMESPACES[..2]), addresses(number), ports, slices).prop_map(
        move |(namespace, (spec, status), mut ports, slices)| {
            let mut taken = BTreeSet::new();
            ports.retain(|(protocol, port, _)| taken.insert((*protocol, *port)));
            let mut spec = spec;
            spec["ports"] = ports.iter().enumerate().map(|(number, port)| front_port(number, port)).collect();
            let key = Key::namespaced(Kind::Service, namespace, name);
            let metadata = json!({"namespace": namespace, "name": name});
            let service = (key, json!({"metadata": metadata, "spec": spec, "status": status}));
            let slices = slices.into_iter().enumerate().map(|(index, (addresses, conditions))| {
                let own = format!("{name}-{index}");
                let ports: Vec<Value> =
                    ports.iter().enumerate().filter_map(|(number, port)| slice_port(number, port, index)).collect();
                let backend = |(address, conditions): (&&str, &Value)| json!({"addresses": [address], "conditions": conditions});
                let value = json!({
                    "metadata": {"namespace": namespace, "name": own, "labels": {EndpointSlice::SERVICE: name}},
                    "addressType": "IPv4", "ports": ports,
                    "endpoints": addresses.iter().zip(&conditions).map(backend).collect::<Vec<_>>(),
                });
                (Key::namespaced(Kind::EndpointSlice, namespace, own), value)
            });
            std::iter::once(service).chain(slices).collect()
        },
    )
}

/// The fields of a Service's spec and status that concern its addresses. Rarely it has none, or shares one.
fn addresses(number: usize) -> impl Strategy<Value = (Value, Value)> {
    let cluster_ip =
        prop_oneof![20 => Just(CLUSTER_IPS[number]), 1 => Just(CLUSTER_IPS[0]), 1 => Just("None")];
    let external = prop_oneof![3 => Just(EXTERNAL_IPS[number]), 1 => Just(ADDRESSES[2])];
    let mode = weighted(0.3, select(vec!["Proxy", "VIP"]));
    (cluster_ip, weighted(0.3, external), weighted(0.3, mode)).prop_map(
        move |(cluster_ip, external, ingress)| {
            let spec = json!({"clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "externalIPs": Vec::from_iter(external)});
            let ingress = ingress.map(|mode| {
                maybe(vec![("ip", Some(json!(INGRESS_IPS[number]))), ("ipMode", mode.map(Value::from))])
            });
            (spec, json!({"loadBalancer": {"ingress": Vec::from_iter(ingress)}}))
        },
    )
}

/// The first port has no name, because the only port of a Service needs none.
fn port_name(number: usize) -> Option<Value> {
    (number > 0).then(|| json!(format!("port-{number}")))
}

fn front_port(number: usize, (protocol, port, _): &Port) -> Value {
    let protocol = (*protocol != "TCP").then(|| json!(protocol));
    maybe(vec![("name", port_name(number)), ("protocol", protocol), ("port", Some(json!(port)))])
}

fn slice_port(number: usize, (protocol, _, targets): &Port, slice: usize) -> Option<Value> {
    let (name, port) = (port_name(number), targets[slice]?);
    Some(maybe(vec![("name", name), ("protocol", Some(json!(protocol))), ("port", Some(json!(port)))]))
}

/// An address and port of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Front {
    /// The owners, as `namespace/name`. Several Services may have the same address and port.
    pub services: BTreeSet<String>,
    /// The Service's address (VIP).
    pub address: Ipv4Addr,
    /// The protocol of the port.
    pub protocol: Protocol,
    /// The port at the Service's address.
    pub port: u16,
    /// The targets of connections.
    pub backends: BTreeSet<(Ipv4Addr, u16)>,
}

impl Front {
    /// Whether a packet is addressed to it.
    #[must_use]
    pub fn takes(&self, flow: &Flow) -> bool {
        flow.destination == self.address
            && (flow.protocol, flow.destination_port) == (self.protocol, self.port)
    }

    /// The flow from a client, with this source port, to this address and port.
    #[must_use]
    pub fn flow(&self, client: Ipv4Addr, source_port: u16, (to, destination_port): (Ipv4Addr, u16)) -> Flow {
        let (source, destination, protocol) = (client.into(), to.into(), self.protocol);
        Flow { source, destination, protocol, source_port, destination_port, icmp: None }
    }
}

/// The addresses of Services according to the objects, without the code under test.
#[must_use]
pub fn fronts(objects: &Objects) -> Vec<Front> {
    let mut fronts = BTreeMap::new();
    for (key, service) in objects.iter().filter(|(key, _)| key.kind == Kind::Service) {
        for address in front_addresses(service) {
            for port in list(&service["spec"]["ports"]) {
                let (protocol, number) = (protocol(port), number(&port["port"]).unwrap());
                let new = || Front {
                    services: BTreeSet::new(),
                    address,
                    protocol,
                    port: number,
                    backends: BTreeSet::new(),
                };
                let front = fronts.entry((address, protocol, number)).or_insert_with(new);
                front.services.insert(format!("{}/{}", key.namespace, key.name));
                front.backends.extend(backends(objects, key, port));
            }
        }
    }
    fronts.into_values().collect()
}

fn front_addresses(service: &Value) -> Vec<Ipv4Addr> {
    let spec = &service["spec"];
    let Some(own) = address(&spec["clusterIP"]) else { return vec![] };
    let ingress = list(&service["status"]["loadBalancer"]["ingress"]).iter();
    let ingress = ingress.filter(|ingress| ingress["ipMode"] != "Proxy").map(|ingress| &ingress["ip"]);
    std::iter::once(own).chain(list(&spec["externalIPs"]).iter().chain(ingress).filter_map(address)).collect()
}

/// The ready backends; if none is ready, those that terminate and still serve.
fn backends(objects: &Objects, service: &Key, port: &Value) -> Vec<(Ipv4Addr, u16)> {
    let of_service = |(key, slice): &&(Key, Value)| {
        key.kind == Kind::EndpointSlice
            && key.namespace == service.namespace
            && slice["metadata"]["labels"][EndpointSlice::SERVICE] == service.name
    };
    let name = |port: &Value| port["name"].as_str().unwrap_or_default().to_owned();
    let same = |its: &&Value| (name(its), protocol(its)) == (name(port), protocol(port));
    let with = |usable: fn(&Value) -> bool| {
        let mut all = Vec::new();
        for (_, slice) in objects.iter().filter(of_service) {
            for target in list(&slice["ports"]).iter().filter(same).filter_map(|port| number(&port["port"])) {
                let usable =
                    list(&slice["endpoints"]).iter().filter(|endpoint| usable(&endpoint["conditions"]));
                let addresses = usable.flat_map(|endpoint| list(&endpoint["addresses"])).filter_map(address);
                all.extend(addresses.map(|address| (address, target)));
            }
        }
        all
    };
    let ready = with(|conditions| conditions["ready"] != false);
    if !ready.is_empty() {
        return ready;
    }
    with(|conditions| conditions["terminating"] == true && conditions["serving"] == true)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn address(value: &Value) -> Option<Ipv4Addr> {
    value.as_str()?.parse().ok()
}

fn number(value: &Value) -> Option<u16> {
    value.as_u64()?.try_into().ok()
}

fn protocol(port: &Value) -> Protocol {
    Protocol::from_name(port["protocol"].as_str().unwrap_or("TCP")).unwrap()
}

/// A pod's connection to a Service; client and backend are chosen from the existing ones.
#[derive(Debug, Clone)]
pub struct Call {
    client: Index,
    source_port: u16,
    front: Index,
    backend: Index,
}

/// Connections of pods.
pub fn calls() -> impl Strategy<Value = Call> {
    let port = prop_oneof![1 => select(&PORTS[..]), 2 => Just(40_000)];
    let others = (any::<Index>(), any::<Index>(), any::<Index>());
    (port, others).prop_map(|(source_port, (client, front, backend))| Call {
        client,
        source_port,
        front,
        backend,
    })
}

impl Call {
    /// The Service, and the flow to the backend. Without a backend, the flow goes to the Service's address itself.
    #[must_use]
    pub fn resolve<'a>(&self, clients: &[Ipv4Addr], fronts: &'a [Front]) -> Option<(&'a Front, Flow)> {
        if clients.is_empty() || fronts.is_empty() {
            return None;
        }
        let front = self.front.get(fronts);
        let backends: Vec<_> = front.backends.iter().copied().collect();
        let nobody = (front.address, front.port);
        let to = if backends.is_empty() { nobody } else { *self.backend.get(&backends) };
        Some((front, front.flow(*self.client.get(clients), self.source_port, to)))
    }
}
