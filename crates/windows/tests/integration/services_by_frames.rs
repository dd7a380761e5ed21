//! Pods of a Windows node connect to Services with real frames: HNS and its switch forward them to backends on Linux
//! and on Windows, and what arrives is what the oracle lets through, whichever address the client's ACLs see.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use serde_json::{Value, json};
use testkit::clusters::{Objects, snapshot};
use testkit::emulator::RENDERINGS;
use testkit::flows::judged;
use testkit::mixed::{Balanced, MixedCluster, NODES, Step};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_dataplane::Reason;
use tortie_hns_emulator::{Config, EgressSees};
use tortie_oracle::{Oracle, Trace, Verdict};
use tortie_policy::program::Flow;

const VIP: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
/// The source that backends see without direct server return: an address of the client's node that no pod has.
const SOURCE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 30);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 20);
const CLIENTS_NODE: usize = 1;
/// On Linux, on the client's own node, and on another Windows node.
const BACKENDS: [(&str, usize, Ipv4Addr); 3] = [
    ("l1", 0, Ipv4Addr::new(10, 0, 0, 4)),
    ("w1", 1, Ipv4Addr::new(10, 0, 0, 21)),
    ("w2", 3, Ipv4Addr::new(10, 0, 0, 52)),
];
const PORT: u16 = 80;
const TARGET: u16 = 8080;
/// The source ports of the connections in each case.
const OWN_PORTS: std::ops::Range<u16> = 40_000..40_012;

/// A pod of the open namespace `demo`.
fn pod(name: &str, node: usize, address: Ipv4Addr, labels: Value) -> (Key, Value) {
    let node = NODES[node].0;
    let endpoint = WorkloadEndpoint::name_for(node, name, "eth0");
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": endpoint, "namespace": "demo", "labels": labels},
        "spec": {
            "node": node, "pod": name, "endpoint": "eth0", "serviceAccountName": "default",
            "ipNetworks": [format!("{address}/32")], "profiles": WorkloadEndpoint::profiles_for("demo", "default"),
            "interfaceName": format!("cali{name}"),
        },
    });
    (Key::namespaced(Kind::WorkloadEndpoint, "demo", endpoint), value)
}

fn cluster() -> Objects {
    let allow = json!([{"action": "Allow"}]);
    let profile = json!({"metadata": {"name": "kns.demo"}, "spec": {"ingress": allow, "egress": allow}});
    let namespace = json!({"metadata": {"name": "demo", "labels": {}}});
    let ports = |number: &str, port: u16| json!([{"name": "t", "protocol": "TCP", number: port}, {"name": "u", "protocol": "UDP", number: port}]);
    let service = json!({"metadata": {"name": "web", "namespace": "demo"},
        "spec": {"clusterIP": VIP, "ports": ports("port", PORT)}});
    let slice = json!({
        "metadata": {"name": "web-1", "namespace": "demo", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": ports("port", TARGET),
        "endpoints": [{"addresses": BACKENDS.map(|(.., address)| address)}],
    });
    let mut all = vec![
        (Key::global(Kind::Profile, "kns.demo"), profile),
        (Key::global(Kind::Namespace, "demo"), namespace),
        (Key::namespaced(Kind::Service, "demo", "web"), service),
        (Key::namespaced(Kind::EndpointSlice, "demo", "web-1"), slice),
        pod("client", CLIENTS_NODE, CLIENT, json!({"role": "client"})),
    ];
    let backend = |(name, node, address): (&str, usize, Ipv4Addr)| {
        pod(name, node, address, json!({"role": "server", "at": name}))
    };
    all.extend(BACKENDS.map(backend));
    all
}

/// Policies by what they concern.
fn policies() -> Vec<(&'static str, Value)> {
    let out = |rules: Value| json!({"selector": "role == 'client'", "types": ["Egress"], "egress": rules});
    let to = |selector: &str| out(json!([{"action": "Allow", "destination": {"selector": selector}}]));
    let into = |selector: &str, from: &str| {
        let rules = json!([{"action": "Allow", "source": {"selector": from}}]);
        json!({"selector": selector, "types": ["Ingress"], "ingress": rules})
    };
    let tcp =
        json!([{"action": "Allow", "protocol": "TCP", "destination": {"selector": "role == 'server'"}}]);
    vec![
        ("nobody is selected", into("role == 'nobody'", "all()")),
        ("to all backends", to("role == 'server'")),
        ("to all backends by TCP", out(tcp)),
        ("to the Linux backend", to("at == 'l1'")),
        ("to the Windows backends", to("at in {'w1', 'w2'}")),
        (
            "to none, but to the VIP",
            out(json!([{"action": "Allow", "destination": {"nets": ["172.30.0.0/16"]}}])),
        ),
        (
            "not to the VIP",
            out(json!([{"action": "Deny", "destination": {"nets": ["172.30.0.0/16"]}}, {"action": "Allow"}])),
        ),
        ("from the client", into("role == 'server'", "role == 'client'")),
        ("from nobody, into two backends", into("at in {'l1', 'w2'}", "role == 'nobody'")),
        ("from nobody, into the client", into("role == 'client'", "role == 'nobody'")),
    ]
}

fn services(source: Option<Ipv4Addr>) -> Vec<Balanced> {
    let backends = BACKENDS.map(|(.., address)| address).to_vec();
    let service = |protocol| Balanced {
        vip: VIP,
        protocol,
        port: PORT,
        backends: backends.clone(),
        target: TARGET,
        source,
    };
    [Protocol::TCP, Protocol::UDP].map(service).to_vec()
}

fn flow(protocol: Protocol, (source, source_port): (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Flow {
    let (source, destination, destination_port) = (source.into(), to.0.into(), to.1);
    Flow { source, destination, protocol, source_port, destination_port, icmp: None }
}

fn back(flow: &Flow) -> Flow {
    let Flow { source, destination, source_port, destination_port, .. } = *flow;
    Flow {
        source: destination,
        destination: source,
        source_port: destination_port,
        destination_port: source_port,
        ..*flow
    }
}

fn is_allowed(trace: &Option<Trace>) -> bool {
    trace.as_ref().is_none_or(|trace| trace.verdict == Verdict::Allow)
}

/// The oracle's verdict on a connection to that backend.
fn allowed(
    oracle: &Oracle<'_>,
    first: &Flow,
    to: Ipv4Addr,
    source: Option<Ipv4Addr>,
    sees: EgressSees,
) -> bool {
    let target = |backend| flow(first.protocol, (CLIENT, first.source_port), (backend, TARGET));
    let leaves = |backend| is_allowed(&judged(oracle, &target(backend)).egress);
    let leaves = match sees {
        EgressSees::Backend => leaves(to),
        EgressSees::Vip => BACKENDS.iter().all(|(.., backend)| leaves(*backend)),
    };
    let comes = Flow { source: source.unwrap_or(CLIENT).into(), ..target(to) };
    leaves && is_allowed(&judged(oracle, &comes).ingress)
}

#[test]
fn frames_to_backends_agree_with_the_oracle() {
    let (mut passed, mut closed) = (0, 0);
    for sees in [EgressSees::Backend, EgressSees::Vip] {
        let config = Config { egress_sees: sees, ..Config::new(Config::SERVER_2022, Ipv4Addr::UNSPECIFIED) };
        let mut nodes = MixedCluster::new(&config).unwrap();
        // The backend of a connection does not depend on policy.
        let mut chosen = BTreeMap::new();
        for (turn, (name, policy)) in policies().into_iter().enumerate() {
            for (source, turn) in [(None, turn), (Some(SOURCE), turn + 1)] {
                let rendering = RENDERINGS[turn % RENDERINGS.len()];
                let mut objects = cluster();
                let policy = json!({"metadata": {"name": "policy"}, "spec": policy});
                objects.push((Key::global(Kind::GlobalNetworkPolicy, "policy"), policy));
                let reports = nodes.change(&objects, rendering).unwrap();
                nodes.balance(CLIENTS_NODE, &services(source)).unwrap();
                let case = format!("{name}, {sees:?} seen, source {source:?}, {}", rendering.name);
                let reported: BTreeSet<_> =
                    reports.iter().flat_map(|report| report.conditions()).map(|it| it.reason).collect();
                let partly = ["to the Linux backend", "to the Windows backends"].contains(&name);
                assert_eq!(
                    reported,
                    BTreeSet::from_iter(partly.then_some(Reason::ServicePartlyAllowed)),
                    "{case}"
                );
                for protocol in [Protocol::TCP, Protocol::UDP] {
                    let all: Objects = nodes.node_objects().chain(&objects).cloned().collect();
                    let snapshot = snapshot(&all);
                    let case =
                        Case { nodes: &nodes, oracle: &Oracle::new(&snapshot), name: &case, source, sees };
                    let (through, not) = case.connect(protocol, &mut chosen);
                    (passed, closed) = (passed + through, closed + not);
                }
            }
        }
        let targets: BTreeSet<_> = chosen.values().collect();
        assert_eq!((chosen.len(), targets.len()), (2 * OWN_PORTS.len(), BACKENDS.len()), "{chosen:?}");
    }
    assert!(passed > 300 && closed > 300, "{passed} passed, {closed} did not");
}

struct Case<'a> {
    nodes: &'a MixedCluster,
    oracle: &'a Oracle<'a>,
    name: &'a str,
    source: Option<Ipv4Addr>,
    sees: EgressSees,
}

impl Case<'_> {
    /// Opens connections, answers those that arrive, and continues them. Returns how many arrived, and how many did
    /// not.
    fn connect(
        &self,
        protocol: Protocol,
        chosen: &mut BTreeMap<(Protocol, u16), Ipv4Addr>,
    ) -> (usize, usize) {
        let Case { nodes, oracle, name, source, sees } = *self;
        let sent: Vec<Flow> = OWN_PORTS.map(|own| flow(protocol, (CLIENT, own), (VIP, PORT))).collect();
        let arrived = nodes.arrivals(&sent, Step::Begins).unwrap();
        for (index, first) in sent.iter().enumerate() {
            let key = (protocol, first.source_port);
            if let Some(arrival) = arrived.get(&index) {
                let std::net::IpAddr::V4(at) = arrival.at else { panic!("{arrival:?}") };
                assert_eq!(*chosen.entry(key).or_insert(at), at, "{name}: {first:?}");
                let own = if source.is_none() { first.source_port } else { arrival.flow.source_port };
                let wanted = flow(protocol, (source.unwrap_or(CLIENT), own), (at, TARGET));
                assert_eq!(arrival.flow, wanted, "{name}");
            }
            // The first case admits everything.
            let to = chosen.get(&key).copied().unwrap_or_else(|| panic!("{name}: {first:?} did not arrive"));
            let wanted = allowed(oracle, first, to, source, sees);
            assert_eq!(arrived.contains_key(&index), wanted, "{name}: {first:?} to {to}");
        }
        let answers: Vec<Flow> = arrived.values().map(|arrival| back(&arrival.flow)).collect();
        let answered = nodes.arrivals(&answers, Step::Answers).unwrap();
        let of_open: Vec<Flow> = arrived.keys().map(|index| sent[*index]).collect();
        for (index, first) in of_open.iter().enumerate() {
            let answer = answered.get(&index).unwrap_or_else(|| panic!("{name}: no answer to {first:?}"));
            assert_eq!((answer.at, answer.flow), (CLIENT.into(), back(first)), "{name}");
        }
        let gone_on = nodes.arrivals(&of_open, Step::GoesOn).unwrap();
        let places = |arrivals: &BTreeMap<usize, _>| arrivals.values().copied().collect::<Vec<_>>();
        assert_eq!(places(&gone_on), places(&arrived), "{name}");
        (arrived.len(), sent.len() - arrived.len())
    }
}
