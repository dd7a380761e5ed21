//! The cost (goal F9) of policy computation in a cluster of 25,000 namespaces, 100,000 pods and 75,000 policies.
//!
//! The cluster has the shape of Antrea's published benchmark (`TestInitXLargeScaleWithSmallNamespaces`): each
//! namespace has a label of its own, four pods of two apps, one policy that selects all of them and allows nothing,
//! and one policy for each app that admits pods of the same app in the namespace. Here the second of these also
//! admits every pod of the neighbouring namespace. The pods are distributed over 1,000 nodes.
//!
//! Each scenario is a separate process, so that its peak memory is separate. `BENCH_NAMESPACES` sets a smaller cluster.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::{Key, Kind, Resource};
use tortie_calc::Calc;

const NODES: usize = 1_000;
const PODS: usize = 4;
/// How often each small change is made.
const CHANGES: usize = 1_000;
const SCENARIOS: [(&str, &str); 4] = [
    ("all", "every pod is on one node: all endpoints' programs"),
    ("all-by-one", "the same, each object made when it is taken in"),
    ("node", "the pods are on 1,000 nodes, and one of these is computed"),
    ("node-by-one", "the same, each object made when it is taken in"),
];

fn main() {
    let scenario = std::env::args().find_map(|given| SCENARIOS.iter().find(|(name, _)| *name == given));
    let Some((name, what)) = scenario else {
        for (name, _) in SCENARIOS {
            let status = Command::new(std::env::current_exe().unwrap()).arg(name).status().unwrap();
            assert!(status.success(), "{name} failed");
        }
        return;
    };
    let cluster = Cluster { namespaces: namespaces(), everything_here: name.starts_with("all") };
    println!(
        "{what}; {} namespaces, {} pods, {} policies",
        cluster.namespaces,
        cluster.namespaces * PODS,
        cluster.namespaces * 3
    );
    if name.ends_with("by-one") {
        load_by_one(&cluster);
    } else {
        changes(&cluster, &mut load(&cluster));
    }
}

fn namespaces() -> usize {
    std::env::var("BENCH_NAMESPACES").map_or(25_000, |count| count.parse().unwrap())
}

/// Ingests everything, and flushes for the first time. The objects exist beforehand, and each is moved in.
fn load(cluster: &Cluster) -> Calc {
    let objects: Vec<(Key, Resource)> = cluster.objects().map(|(key, value)| typed(key, &value)).collect();
    println!("  the typed objects: {} MB", memory("VmRSS"));
    let begun = Instant::now();
    let mut calc = Calc::new("n0");
    for (key, resource) in objects {
        calc.update_typed(&key, Some(resource));
    }
    let taken_in = begun.elapsed();
    let deltas = calc.flush();
    let took = begun.elapsed();
    println!(
        "  computed in {:.2} s ({:.2} s to take the objects in, {:.2} s to flush {} changes); {} endpoints, {} policies, {} sets",
        took.as_secs_f64(),
        taken_in.as_secs_f64(),
        (took - taken_in).as_secs_f64(),
        deltas.len(),
        calc.state().endpoints.len(),
        calc.state().policies.len(),
        calc.state().sets.len(),
    );
    println!("  peak of memory, with the objects: {} MB", memory("VmHWM"));
    drop(deltas);
    println!("  memory afterwards: {} MB", memory("VmRSS"));
    calc
}

/// The same, if only calc keeps the objects, so that the remaining memory is calc's own.
fn load_by_one(cluster: &Cluster) {
    let mut calc = Calc::new("n0");
    for (key, value) in cluster.objects() {
        let (key, resource) = typed(key, &value);
        calc.update_typed(&key, Some(resource));
    }
    println!("  memory with what calc keeps of the objects: {} MB", memory("VmRSS"));
    drop(calc.flush());
    println!("  peak of memory, after the flush: {} MB", memory("VmHWM"));
}

fn typed(key: Key, value: &Value) -> (Key, Resource) {
    let resource = Resource::read(&key, value).unwrap();
    (key, resource)
}

/// Single changes as the agent makes them: one stored object, then a flush.
fn changes(cluster: &Cluster, calc: &mut Calc) {
    let nth = |change: usize| change * 7_919 % cluster.namespaces;
    let here = |change: usize| change * NODES % cluster.namespaces;
    type Change<'a> = (&'a str, Box<dyn Fn(usize) -> (Key, Value) + 'a>);
    let app = |change: usize| 1 + (change / 2) % 2;
    let kinds: [Change<'_>; 7] = [
        ("a label of a pod here", Box::new(|n| cluster.pod(here(n / 2), 0, n % 2 + 1))),
        ("a label of any pod", Box::new(|n| cluster.pod(nth(n / 2), 0, n % 2 + 1))),
        ("a label of a namespace with pods here", Box::new(|n| cluster.namespace(here(n / 2), n % 2 == 0))),
        ("a label of any namespace", Box::new(|n| cluster.namespace(nth(n / 2), n % 2 == 0))),
        ("a policy that selects pods here", Box::new(|n| cluster.policy(here(n / 4), app(n), n % 2 == 0))),
        ("any policy", Box::new(|n| cluster.policy(nth(n / 4), app(n), n % 2 == 0))),
        ("a pod that comes", Box::new(|n| cluster.pod(here(n), NODES * (n + 1), 1))),
    ];
    for (what, change) in kinds {
        let mut took = Vec::new();
        let mut deltas = 0;
        for number in 0..CHANGES {
            let (key, value) = change(number);
            let begun = Instant::now();
            calc.update(&key, Some(&value));
            deltas += calc.flush().len();
            took.push(begun.elapsed());
        }
        took.sort();
        let at = |hundredths: usize| micros(took[took.len() * hundredths / 100]);
        println!(
            "  {what}: p50 {:.0} µs, p99 {:.0} µs ({deltas} deltas of {CHANGES} changes)",
            at(50),
            at(99)
        );
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The memory of this process, in megabytes.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

struct Cluster {
    namespaces: usize,
    /// Whether all pods are on the computed node.
    everything_here: bool,
}

impl Cluster {
    /// In the order in which an agent lists them: by kind.
    fn objects(&self) -> impl Iterator<Item = (Key, Value)> {
        let namespaces = (0..self.namespaces).map(|number| self.namespace(number, false));
        let policies = (0..self.namespaces * 3).map(|number| self.policy(number / 3, number % 3, false));
        let pods = (0..self.namespaces * PODS)
            .map(|number| self.pod(number / PODS, number % PODS, number % PODS / 2 + 1));
        namespaces.chain(policies).chain(pods)
    }

    fn namespace(&self, number: usize, changed: bool) -> (Key, Value) {
        let name = name(number);
        let labels = if changed { json!({"app": "other"}) } else { json!({"app": name}) };
        (Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name, "labels": labels}}))
    }

    /// The policy for no app, or for one app.
    fn policy(&self, namespace: usize, app: usize, changed: bool) -> (Key, Value) {
        let (neighbour, namespace) = (name((namespace + 1) % self.namespaces), name(namespace));
        let policy = if app == 0 { "default-deny-all".to_owned() } else { format!("np-{app}") };
        let mut spec = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
        if app > 0 {
            let labels = json!({"matchLabels": {format!("app-{app}"): format!("scale-{app}")}});
            let mut from = vec![json!({"podSelector": labels})];
            if app == 2 {
                from.push(json!({"namespaceSelector": {"matchLabels": {"app": neighbour}}}));
            }
            spec["podSelector"] = labels;
            spec["ingress"] = json!([{"from": from}]);
            if changed {
                spec["ingress"][0]["ports"] = json!([{"port": 80}]);
            }
        }
        let value = json!({"metadata": {"name": policy, "namespace": namespace}, "spec": spec});
        (Key::namespaced(Kind::KubernetesNetworkPolicy, namespace, policy), value)
    }

    fn pod(&self, namespace: usize, number: usize, app: usize) -> (Key, Value) {
        let pod = format!("pod{number}");
        // The pods of a namespace are on consecutive nodes.
        let node = if self.everything_here { 0 } else { (namespace + number) % NODES };
        let node = format!("n{node}");
        let [_, b, c, d] = u32::try_from(namespace * PODS + number + 1).unwrap().to_be_bytes();
        let namespace = name(namespace);
        let name = tortie_api::calico::WorkloadEndpoint::name_for(&node, &pod, "eth0");
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": namespace, "labels": {format!("app-{app}"): format!("scale-{app}")}},
            "spec": {
                "orchestrator": "k8s", "node": node, "containerID": format!("{number:032x}{d:032x}"), "pod": pod,
                "endpoint": "eth0", "serviceAccountName": "default", "ipNetworks": [format!("10.{b}.{c}.{d}/32")],
                "profiles": tortie_api::calico::WorkloadEndpoint::profiles_for(&namespace, "default"),
                "interfaceName": format!("cali{:011x}", number), "mac": "ee:ee:ee:ee:ee:ee",
            },
        });
        (Key::namespaced(Kind::WorkloadEndpoint, namespace, name), value)
    }
}

/// Eight letters that look random.
fn name(number: usize) -> String {
    let mut left = (number as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut letter = || {
        let letter = char::from(b'a' + u8::try_from(left % 26).unwrap());
        left /= 26;
        letter
    };
    (0..8).map(|_| letter()).collect()
}
