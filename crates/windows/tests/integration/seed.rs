//! The two policies of the page that warns of selectors on both sides (goal F11): 500 workloads on 10 Windows nodes,
//! 5 of them servers, 50 clients. They pass through calc and the dataplane of each node, to what HNS has and what is
//! sent.
//!
//! `docs/windows-policy.md` has the numbers as a table, which must equal the measurement; TORTIE_BLESS=1 rewrites it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use testkit::Stateful;
use tortie_api::calico::{FelixConfiguration, WindowsPolicySets, WorkloadEndpoint};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::{Delta, EndpointId, NodeState, PodAddress, PodAttachment, PodWiring};
use tortie_hcn::schema::{Acl, Namespace};
use tortie_hcn::{Call, Guid, Hcn, HcnExt, Kind as HcnKind};
use tortie_hns_emulator::{Config, Emulator, Recorder};
use tortie_windows::{
    Cost, CostModel, Costing, NETWORK, NetworkKind, NetworkSpec, Tally, WindowsDataplane, WindowsWiring,
    endpoint_id, ensure_network,
};

const NODES: usize = 10;
const WORKLOADS: usize = 500;
const SERVERS: usize = 5;
const CLIENTS: usize = 50;

/// The policies of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    /// It selects everything, and its rule has selectors on both sides.
    Inefficient,
    /// It selects the servers.
    Efficient,
}

impl Policy {
    fn object(self) -> (Key, Value) {
        let (selector, destination) = match self {
            Policy::Inefficient => ("all()", json!({"selector": "role == \"webserver\""})),
            Policy::Efficient => ("role == \"webserver\"", json!({})),
        };
        let rule = json!({"action": "Allow", "source": {"selector": "role == \"client\""}, "destination": destination});
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": {"name": "calico-dest-selector"},
            "spec": {"selector": selector, "order": 500, "ingress": [rule]},
        });
        (Key::global(Kind::GlobalNetworkPolicy, "calico-dest-selector"), value)
    }
}

/// The role of the nth workload: the order of creation is independent of the role.
fn role(number: usize) -> &'static str {
    match number * 7_919 % WORKLOADS {
        drawn if drawn < SERVERS => "webserver",
        drawn if drawn < SERVERS + CLIENTS => "client",
        _ => "other",
    }
}

/// The objects of a workload; workloads are distributed over the nodes, and each node assigns its addresses in order.
fn workload(number: usize, role: &str) -> (Key, Value) {
    let (node, name) = (format!("win{}", number % NODES), format!("w{number}"));
    let object = WorkloadEndpoint::name_for(&node, &name, "eth0");
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": object, "namespace": "default", "labels": {"role": role}},
        "spec": {"node": node, "pod": name, "endpoint": "eth0", "containerID": name,
            "ipNetworks": [format!("{}/32", address(number))], "profiles": ["kns.default"]},
    });
    (Key::namespaced(Kind::WorkloadEndpoint, "default", object), value)
}

fn block(node: usize) -> ipnet::Ipv4Net {
    format!("10.244.{node}.0/24").parse().unwrap()
}

fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, u8::try_from(number % NODES).unwrap(), u8::try_from(4 + number / NODES).unwrap())
}

struct Node {
    hns: Arc<Recorder<Emulator>>,
    calc: Calc,
    dataplane: Stateful<WindowsDataplane>,
    wiring: WindowsWiring,
    connected: BTreeSet<EndpointId>,
}

struct Cluster(Vec<Node>);

impl Cluster {
    fn new(policy: Policy, sets: WindowsPolicySets) -> Cluster {
        let node = |number: usize| {
            let own = Ipv4Addr::new(172, 16, 0, u8::try_from(number + 1).unwrap());
            let hns = Arc::new(Recorder::new(Emulator::new(Config::new(Config::SERVER_2022, own))));
            let spec = NetworkSpec {
                name: NETWORK.into(),
                block: block(number),
                ipv6: None,
                kind: NetworkKind::Overlay { vni: 4096 },
                adapter: None,
            };
            ensure_network(&*hns, &spec).unwrap();
            let hcn: Arc<dyn Hcn> = hns.clone();
            let wiring = WindowsWiring::new(hcn.clone());
            let dataplane = Stateful::new(WindowsDataplane::new(hcn));
            Node {
                hns,
                calc: Calc::new(format!("win{number}")),
                dataplane,
                wiring,
                connected: BTreeSet::new(),
            }
        };
        let mut cluster = Cluster((0..NODES).map(node).collect());
        let mut objects =
            vec![(Key::global(Kind::Namespace, "default"), json!({"metadata": {"name": "default"}}))];
        for number in 0..NODES {
            let name = format!("win{number}");
            let annotations = json!({"projectcalico.org/IPv4Address": format!("172.16.0.{}/24", number + 1)});
            objects.push((
                Key::global(Kind::Node, &name),
                json!({"metadata": {"name": name, "annotations": annotations}}),
            ));
        }
        objects.extend((0..WORKLOADS).map(|number| workload(number, role(number))));
        objects.push(policy.object());
        let annotations = json!({FelixConfiguration::WINDOWS_POLICY_SETS: format!("{sets:?}")});
        let felix = json!({"metadata": {"name": "default", "annotations": annotations}, "spec": {}});
        objects.push((Key::global(Kind::FelixConfiguration, "default"), felix));
        cluster.update(&objects);
        cluster
    }

    /// Applies the objects; new pods are connected before, as CNI does.
    fn update(&mut self, objects: &[(Key, Value)]) {
        for (number, node) in self.0.iter_mut().enumerate() {
            objects.iter().for_each(|(key, value)| node.calc.update(key, Some(value)));
            let mut deltas = node.calc.flush();
            for (id, endpoint) in &node.calc.state().endpoints {
                if node.connected.insert(id.clone()) {
                    let std::net::IpAddr::V4(address) = endpoint.addresses[0] else { panic!("{id}") };
                    let namespace = node.hns.create_namespace(&Namespace::default()).unwrap();
                    let pod = PodAttachment {
                        endpoint: id.clone(),
                        container_id: endpoint.container_id.to_string(),
                        netns: namespace.to_string(),
                        addresses: vec![PodAddress::ipv4(address, block(number))],
                        mtu: None,
                        mac: None,
                        limits: Default::default(),
                        dns: Default::default(),
                    };
                    node.wiring.connect(&pod).unwrap();
                }
            }
            let route = tortie_dataplane::Route {
                destination: block(number).into(),
                target: tortie_dataplane::RouteTarget::Local,
            };
            deltas.insert(0, Delta::Route(route));
            let report = node.dataplane.apply(&deltas);
            assert!(report.endpoints.is_empty(), "{report:?}");
        }
    }

    /// The ACLs of each workload in HNS, by name.
    fn acls(&self) -> BTreeMap<String, Vec<Acl>> {
        let of = |node: &Node, id: &EndpointId| -> Vec<Acl> {
            let endpoint = node.hns.inner().endpoint(endpoint_id(&id.pod)).unwrap();
            endpoint.policies.iter().filter_map(|policy| policy.settings().unwrap()).collect()
        };
        let all = self
            .0
            .iter()
            .flat_map(|node| node.connected.iter().map(move |id| (id.pod.to_string(), of(node, id))));
        all.collect()
    }

    /// The cost of policy on each node, by calc's state.
    fn costings(&self) -> impl Iterator<Item = (&NodeState, Costing<'_, NodeState>)> {
        self.0.iter().zip(1..).map(|(node, number)| {
            let state = node.calc.state();
            (state, Costing::new(state, [Ipv4Addr::new(172, 16, 0, number).into()].into()))
        })
    }

    /// The computed cost of each workload, by calc's state.
    fn costs(&self) -> BTreeMap<String, Cost> {
        let mut costs = BTreeMap::new();
        for (state, costing) in self.costings() {
            costs.extend(
                state.endpoints.iter().map(|(id, endpoint)| (id.pod.to_string(), costing.cost(endpoint))),
            );
        }
        costs
    }

    /// The ACLs that Calico gives each workload.
    fn naive(&self) -> BTreeMap<String, Vec<Acl>> {
        let mut lists = BTreeMap::new();
        for (state, costing) in self.costings() {
            let list = |(id, endpoint): (&EndpointId, &Arc<_>)| {
                (id.pod.to_string(), costing.acls(endpoint, CostModel::Naive))
            };
            lists.extend(state.endpoints.iter().map(list));
        }
        lists
    }

    /// The endpoints that were modified since the last call.
    fn modified(&self) -> BTreeSet<Guid> {
        let mut modified = BTreeSet::new();
        for call in self.0.iter().flat_map(|node| node.hns.take_changes()) {
            if let Call::Modify { kind: HcnKind::Endpoint, id, .. } = call {
                modified.insert(id);
            }
        }
        modified
    }
}

/// The measurements of one policy with one rendering.
#[derive(Debug, Default)]
struct Measured {
    /// For all workloads together, without the ACLs of a workload without policy.
    policy: Tally,
    on_server: usize,
    on_other: usize,
    /// The number of workloads whose lists change when a client is added.
    touched: usize,
}

/// The policy's ACLs in a list.
fn of_policy(acls: &[Acl]) -> Tally {
    acls.iter().filter(|acl| acl.id.contains("calico-dest-selector")).collect()
}

const NEW: usize = WORKLOADS;

fn servers() -> BTreeSet<String> {
    (0..WORKLOADS).filter(|number| role(*number) == "webserver").map(|number| format!("w{number}")).collect()
}

fn measured(lists: &BTreeMap<String, Vec<Acl>>, touched: usize) -> Measured {
    let servers = servers();
    let server = servers.first().unwrap();
    let other = lists.keys().find(|name| !servers.contains(*name)).unwrap();
    Measured {
        policy: lists.values().map(|acls| of_policy(acls)).sum(),
        on_server: lists[server].len(),
        on_other: lists[other].len(),
        touched,
    }
}

/// Both renderings of Tortie, measured in HNS; a client is added, and the calls for its own endpoint do not count.
fn ours(policy: Policy, sets: WindowsPolicySets) -> (Measured, BTreeMap<String, Vec<Acl>>) {
    let mut cluster = Cluster::new(policy, sets);
    let lists = cluster.acls();
    // The computed cost is what HNS has.
    for (name, cost) in cluster.costs() {
        let tally: Tally = lists[&name].iter().collect();
        let tallied = if sets == WindowsPolicySets::Enabled { cost.sets } else { cost.lists };
        assert_eq!((tallied.acls, tallied.names), (tally.acls, tally.names), "{name}");
    }
    cluster.modified();
    cluster.update(&[workload(NEW, "client")]);
    let mut modified = cluster.modified();
    modified.remove(&endpoint_id(&format!("w{NEW}")));
    let concerned: BTreeSet<Guid> = match sets {
        WindowsPolicySets::Enabled => BTreeSet::new(),
        _ => servers().iter().map(|name| endpoint_id(name)).collect(),
    };
    assert_eq!(modified, concerned, "{policy:?}: exactly those that the client concerns");
    (measured(&lists, modified.len()), lists)
}

fn naive(policy: Policy) -> Measured {
    let mut cluster = Cluster::new(policy, WindowsPolicySets::Disabled);
    let before = cluster.naive();
    cluster.update(&[workload(NEW, "client")]);
    let after = cluster.naive();
    let touched = before.iter().filter(|(name, acls)| after[*name] != **acls).count();
    measured(&before, touched)
}

#[test]
fn selectors_on_both_sides_cost_as_much_as_the_rewritten_policy() {
    assert_eq!(servers().len(), SERVERS);
    assert_eq!((0..WORKLOADS).filter(|number| role(*number) == "client").count(), CLIENTS);
    let mut rows = Vec::new();
    let mut of_policies = Vec::new();
    for policy in [Policy::Inefficient, Policy::Efficient] {
        let (lists, spelled_out) = ours(policy, WindowsPolicySets::Disabled);
        let (sets, by_name) = ours(policy, WindowsPolicySets::Enabled);
        let naive = naive(policy);
        assert!(lists.policy.acls <= naive.policy.acls && lists.policy.pairs <= naive.policy.pairs);
        rows.extend([
            (policy, "Calico's way", naive),
            (policy, "without sets", lists),
            (policy, "with sets", sets),
        ]);
        of_policies.push([spelled_out, by_name]);
    }
    let [inefficient, efficient] = &of_policies[..] else { panic!() };
    for (inefficient, efficient) in inefficient.iter().zip(efficient) {
        for server in servers() {
            assert_eq!(inefficient[&server].len(), efficient[&server].len(), "{server}");
            assert_eq!(of_policy(&inefficient[&server]), of_policy(&efficient[&server]), "{server}");
        }
    }
    in_docs(&table(&rows));
}

fn table(rows: &[(Policy, &str, Measured)]) -> String {
    let mut table = String::from(
        "| policy | rendered | ACLs of it, all workloads | addresses in them | pairs | ACLs of a server | of another workload | endpoints changed by a new client |\n|---|---|---|---|---|---|---|---|\n",
    );
    for (policy, variant, Measured { policy: tally, on_server, on_other, touched }) in rows {
        let name = if *policy == Policy::Inefficient { "inefficient" } else { "much more efficient" };
        let (acls, addresses, pairs) = (tally.acls, tally.addresses, tally.pairs);
        writeln!(
            table,
            "| {name} | {variant} | {acls} | {addresses} | {pairs} | {on_server} | {on_other} | {touched} |"
        )
        .unwrap();
    }
    table
}

/// Compares the table between the marks, or rewrites it.
fn in_docs(table: &str) {
    const BEGIN: &str = "<!-- measured by crates/windows/tests/integration/seed.rs -->\n";
    const END: &str = "<!-- end -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/windows-policy.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (documented, after) = rest.split_once(END).unwrap();
    if std::env::var_os("TORTIE_BLESS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
    } else {
        assert_eq!(
            documented,
            table,
            "{} is not what was measured; TORTIE_BLESS=1 writes it",
            path.display()
        );
    }
}
