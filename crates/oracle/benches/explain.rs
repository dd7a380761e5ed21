//! Measures `explain` in a large cluster, after loading of the objects (goal: 50 ms): 25,000 namespaces, 100,000
//! pods, 75,000 policies.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::Instant;

use serde_json::json;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Verdict};

const NAMESPACES: u32 = 25_000;

fn cluster() -> Snapshot {
    let mut snapshot = Snapshot::new();
    for number in 0..NAMESPACES {
        let namespace = format!("n{number}");
        let labels = json!({"team": format!("t{}", number % 100)});
        snapshot.insert(
            Key::global(Kind::Namespace, &namespace),
            json!({"metadata": {"name": namespace, "labels": labels}}),
            None,
        );
        for pod in 0..4u32 {
            let name = format!("p{pod}");
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + number * 4 + pod).to_string();
            let value = json!({
                "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
                "spec": {"nodeName": format!("node{}", number % 1000), "containers": []},
                "status": {"podIP": address},
            });
            snapshot.insert(Key::namespaced(Kind::Pod, &namespace, name), value, None);
        }
        for policy in 0..3u32 {
            let name = format!("k{policy}");
            let peer = json!({
                "namespaceSelector": {"matchLabels": {"team": format!("t{}", (number + policy) % 100)}},
                "podSelector": {"matchLabels": {"app": "p1"}},
            });
            let value = json!({
                "metadata": {"name": name, "namespace": namespace},
                "spec": {
                    "podSelector": {"matchLabels": {"app": format!("p{policy}")}}, "policyTypes": ["Ingress"],
                    "ingress": [{"from": [peer], "ports": [{"port": 80}]}],
                },
            });
            snapshot.insert(Key::namespaced(Kind::KubernetesNetworkPolicy, &namespace, name), value, None);
        }
    }
    snapshot
}

/// The median of several runs, in milliseconds.
fn median<T>(runs: usize, mut work: impl FnMut() -> T) -> f64 {
    let mut taken: Vec<f64> = (0..runs)
        .map(|_| {
            let begin = Instant::now();
            drop(black_box(work()));
            begin.elapsed().as_secs_f64() * 1000.0
        })
        .collect();
    taken.sort_by(f64::total_cmp);
    taken[runs / 2]
}

fn main() {
    let snapshot = cluster();
    println!("100,000 pods, 75,000 policies (goal: a question in 50 ms once the objects are loaded)");
    println!("  reading what every question needs: {:.1} ms", median(5, || Oracle::new(&snapshot)));
    let oracle = Oracle::new(&snapshot);
    let pod = |namespace: &str, name: &str| Peer::Pod { namespace: namespace.into(), name: name.into() };
    let question = Question {
        from: pod("n12400", "p1"),
        to: pod("n12400", "p0"),
        protocol: Protocol::TCP,
        source_port: 40_000,
        destination_port: 80,
        icmp: None,
        via: None,
        by_node: None,
    };
    assert_eq!(oracle.evaluate(&question).unwrap().verdict, Verdict::Allow);
    println!("  one question: {:.1} ms", median(20, || oracle.evaluate(&question)));
}
