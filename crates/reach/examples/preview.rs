//! Measures questions about a whole cluster: 5,000 pods of 500 workloads in 50 namespaces, 552 policies; then with
//! 300 nodes that have host endpoints, and policies for these.
//!
//!     cargo run --release -p tortie-reach --example preview
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Instant;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Peer, Question, Snapshot};
use tortie_reach::{Change, Classes, Judge, Matrix};

const NAMESPACES: usize = 50;
const WORKLOADS: usize = 10;
const PODS: usize = 10;
const NODES: usize = 300;

fn main() {
    let begin = Instant::now();
    let cluster = cluster();
    println!("{:9.1?} reading {} objects", begin.elapsed(), cluster.iter().count());
    let calico = |namespace: &str, spec: Value| {
        let kind = if namespace.is_empty() { Kind::GlobalNetworkPolicy } else { Kind::NetworkPolicy };
        let key = Key { kind, namespace: namespace.to_owned(), name: "new".to_owned() };
        (key, json!({"metadata": {"name": "new", "namespace": namespace}, "spec": spec}))
    };
    let one = json!({"selector": "app == 'app3'", "order": 1, "ingress": [
        {"action": "Allow", "protocol": "TCP", "source": {"selector": "app in {'app7', 'app8'}"},
         "destination": {"ports": [8443]}}]});
    let all = json!({"order": 1, "types": ["Ingress"], "ingress": [
        {"action": "Deny", "protocol": "TCP", "destination": {"ports": [22]}}, {"action": "Pass"}]});
    let two_ways = json!({"order": 1, "types": ["Ingress", "Egress"],
        "ingress": [{"action": "Deny", "protocol": "TCP", "destination": {"ports": [22]}}, {"action": "Pass"}],
        "egress": [{"action": "Deny", "destination": {"nets": ["203.0.113.0/24"]}}, {"action": "Pass"}]});
    measure("a policy for one workload", &cluster, calico("ns3", one));
    measure("a policy for all pods, into them", &cluster, calico("", all));
    measure("a policy for all pods, both ways", &cluster, calico("", two_ways));
    let labels = json!({"metadata": {"name": "ns3", "labels": {"team": "t1", "zone": "inner"}}});
    measure("labels of a namespace", &cluster, (Key::global(Kind::Namespace, "ns3"), labels));
    matrix(&cluster);
    explain(&cluster);
    lint(&cluster);
    with_hosts(cluster);
}

fn lint(cluster: &Snapshot) {
    let begin = Instant::now();
    let findings = tortie_reach::lint::lint(cluster).len();
    println!("{:9.1?} lint: {findings} findings", begin.elapsed());
}

fn with_hosts(mut cluster: Snapshot) {
    add_hosts(&mut cluster);
    println!("with {NODES} nodes and host endpoints:");
    let calico = |spec: Value| {
        (Key::global(Kind::GlobalNetworkPolicy, "new"), json!({"metadata": {"name": "new"}, "spec": spec}))
    };
    let one = json!({"selector": "app == 'app3'", "order": 1, "ingress": [
        {"action": "Allow", "source": {"selector": "app in {'app7', 'app8'}"}}]});
    let forwarded = json!({"selector": "role == 'edge'", "order": 1, "applyOnForward": true, "ingress": [
        {"action": "Deny", "protocol": "TCP", "destination": {"ports": [22]}}, {"action": "Allow"}]});
    let untracked = json!({"selector": "has(role)", "doNotTrack": true, "applyOnForward": true,
        "ingress": [{"action": "Deny", "source": {"nets": ["203.0.113.0/24"]}}]});
    measure("a policy for one workload", &cluster, calico(one));
    measure("applyOnForward", &cluster, calico(forwarded));
    measure("doNotTrack", &cluster, calico(untracked));
    measure("a host endpoint", &cluster, host(7, json!({"role": "other"})));
    let spec = json!({"failsafeInboundHostPorts": []});
    let settings = json!({"metadata": {"name": "default"}, "spec": spec});
    measure("failsafe ports", &cluster, (Key::global(Kind::FelixConfiguration, "default"), settings));
    matrix(&cluster);
    lint(&cluster);
}

/// Every tenth node is an edge node. Edge nodes admit partners; all nodes admit each other.
fn add_hosts(cluster: &mut Snapshot) {
    for number in 0..NODES {
        let name = format!("node{number}");
        let annotations = json!({"projectcalico.org/IPv4Address": format!("{}/16", address(number))});
        let node = json!({"metadata": {"name": name, "annotations": annotations}});
        cluster.insert(Key::global(Kind::Node, name), node, None);
        let (key, value) = host(number, json!({"role": if number % 10 == 0 { "edge" } else { "worker" }}));
        cluster.insert(key, value, None);
    }
    let nets = json!({"nets": ["172.16.0.0/16"]});
    let policies = [
        (
            "hosts",
            json!({"selector": "has(role)", "order": 5, "types": ["Ingress", "Egress"],
            "ingress": [{"action": "Allow", "source": nets}, {"action": "Deny", "protocol": "TCP", "destination": {"ports": [10250]}}],
            "egress": [{"action": "Allow"}]}),
        ),
        (
            "edge",
            json!({"selector": "role == 'edge'", "order": 4, "applyOnForward": true, "types": ["Ingress"],
            "ingress": [{"action": "Allow", "source": {"selector": "zone == 'partner'"}},
                        {"action": "Allow", "source": nets}, {"action": "Allow", "source": {"nets": ["10.0.0.0/8"]}}]}),
        ),
        (
            "early",
            json!({"selector": "role == 'edge'", "preDNAT": true, "applyOnForward": true,
            "ingress": [{"action": "Deny", "protocol": "TCP", "destination": {"ports": ["30000:32767"]}}]}),
        ),
    ];
    for (name, spec) in policies {
        let policy = json!({"metadata": {"name": name}, "spec": spec});
        cluster.insert(Key::global(Kind::GlobalNetworkPolicy, name), policy, None);
    }
}

fn host(number: usize, labels: Value) -> (Key, Value) {
    let name = format!("node{number}-auto");
    let spec =
        json!({"node": format!("node{number}"), "interfaceName": "*", "expectedIPs": [address(number)]});
    let value = json!({"metadata": {"name": name, "labels": labels}, "spec": spec});
    (Key::global(Kind::HostEndpoint, name), value)
}

fn address(node: usize) -> String {
    format!("172.16.{}.{}", node / 200, node % 200 + 1)
}

fn measure(what: &str, before: &Snapshot, (key, value): (Key, Value)) {
    let begin = Instant::now();
    let mut after = before.clone();
    after.insert(key, value, None);
    let change = Change::new(before, &after);
    let classes = begin.elapsed();
    let differences = change.differences();
    let pairs: usize = differences.iter().map(|difference| difference.pairs).sum();
    let count = change.classes.all().len();
    println!(
        "{:9.1?} preview: {what}; {classes:.1?} of it for {count} classes and {} of ports; {} changes, {pairs} pairs",
        begin.elapsed(),
        change.classes.ports().len(),
        differences.len()
    );
}

fn matrix(cluster: &Snapshot) {
    let begin = Instant::now();
    let classes = Classes::of(&[cluster]);
    let reduced = classes.reduced(cluster);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let all: Vec<usize> = (0..classes.all().len()).collect();
    let matrix = Matrix::of(&classes, &mut judge, &classes.ports().of_clients(), &all, &all);
    println!("{:9.1?} matrix: {} × {}", begin.elapsed(), matrix.rows.len(), matrix.columns.len());
}

fn explain(cluster: &Snapshot) {
    let begin = Instant::now();
    let oracle = Oracle::new(cluster);
    let loaded = begin.elapsed();
    let peer = |name: &str| Peer::Pod { namespace: "ns3".to_owned(), name: name.to_owned() };
    let question = Question {
        from: peer("app7-6d4cf56db6-bcd27"),
        to: peer("app3-6d4cf56db6-bcd25"),
        protocol: tortie_api::net::Protocol::TCP,
        source_port: 40_000,
        destination_port: 8080,
        icmp: None,
        via: None,
        by_node: None,
    };
    let answer = oracle.evaluate(&question).unwrap();
    println!("{:9.1?} explain, {loaded:.1?} of it for who is there: {:?}", begin.elapsed(), answer.verdict);
}

fn cluster() -> Snapshot {
    let mut snapshot = Snapshot::new();
    let mut add = |kind: Kind, namespace: &str, name: String, value: Value| {
        let mut value = value;
        value["metadata"]["name"] = json!(name);
        if !namespace.is_empty() {
            value["metadata"]["namespace"] = json!(namespace);
        }
        snapshot.insert(Key { kind, namespace: namespace.to_owned(), name }, value, None);
    };
    for n in 0..NAMESPACES {
        let namespace = format!("ns{n}");
        let labels = json!({"team": format!("t{}", n % 7)});
        add(Kind::Namespace, "", namespace.clone(), json!({"metadata": {"labels": labels}}));
        add(
            Kind::KubernetesNetworkPolicy,
            &namespace,
            "deny".to_owned(),
            json!({"metadata": {}, "spec": {}}),
        );
        for w in 0..WORKLOADS {
            add(Kind::KubernetesNetworkPolicy, &namespace, format!("app{w}"), policy(w, n));
            for p in 0..PODS {
                let address = format!("10.{n}.{w}.{}", p + 1);
                let node = (n * WORKLOADS + w) * PODS + p;
                add(
                    Kind::Pod,
                    &namespace,
                    format!("app{w}-6d4cf56db6-bcd2{p}"),
                    pod(w, node % NODES, &address),
                );
            }
        }
    }
    let partner = json!({"metadata": {"labels": {"zone": "partner"}}, "spec": {"nets": ["203.0.113.0/24"]}});
    add(Kind::GlobalNetworkSet, "", "partner".to_owned(), partner);
    let dns = json!({"metadata": {}, "spec": {"order": 10, "types": ["Egress"], "tier": "default", "egress": [
        {"action": "Allow", "protocol": "UDP", "destination": {"ports": [53]}}, {"action": "Pass"}]}});
    add(Kind::GlobalNetworkPolicy, "", "dns".to_owned(), dns);
    snapshot
}

/// Admits the previous workload, a workload of another namespace, and a network.
fn policy(w: usize, n: usize) -> Value {
    let before = json!({"podSelector": {"matchLabels": {"app": format!("app{}", (w + 9) % 10)}}});
    let team = json!({
        "namespaceSelector": {"matchLabels": {"team": format!("t{}", (n + w) % 7)}},
        "podSelector": {"matchLabels": {"app": format!("app{w}")}},
    });
    let block = json!({"ipBlock": {"cidr": "10.0.0.0/8", "except": [format!("10.{n}.0.0/16")]}});
    json!({"metadata": {}, "spec": {
        "podSelector": {"matchLabels": {"app": format!("app{w}")}},
        "ingress": [
            {"from": [before, team], "ports": [{"port": 8080 + w}, {"port": "metrics"}]},
            {"from": [block], "ports": [{"port": 443}]},
        ],
    }})
}

fn pod(w: usize, node: usize, address: &str) -> Value {
    let env: Vec<Value> =
        (0..12).map(|e| json!({"name": format!("VAR_{e}"), "value": "something to carry"})).collect();
    json!({
        "metadata": {
            "labels": {"app": format!("app{w}"), "pod-template-hash": "6d4cf56db6", "tier": format!("tier{}", w % 3)},
            "annotations": {"checksum/config": "0123456789abcdef0123456789abcdef"},
        },
        "spec": {
            "nodeName": format!("node{node}"), "serviceAccountName": "default",
            "containers": [{"name": "main", "image": "registry.example/app:1", "env": env,
                "ports": [{"name": "metrics", "containerPort": 9090}, {"name": "http", "containerPort": 8080 + w}]}],
        },
        "status": {"phase": "Running", "podIP": address},
    })
}
