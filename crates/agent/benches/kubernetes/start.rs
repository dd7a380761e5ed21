//! The start of an agent in a large cluster: 1,000 pods are on its node, the others on 1,000 nodes elsewhere.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_agent::Platform;
use tortie_api::{Key, Kind};

use crate::cluster::{Cluster, client, config, namespace, pod};

/// The argument that makes this program an agent.
pub(crate) const AGENT: &str = "--as-agent";
const NAMESPACES: usize = 1_000;
const PODS_HERE: usize = 1_000;

pub(crate) fn run() {
    let pods: usize = std::env::var("BENCH_PODS").map_or(100_000, |count| count.parse().unwrap());
    let cluster = Cluster::start(1);
    let begun = Instant::now();
    cluster.create((0..NAMESPACES).map(namespace).collect());
    let node_of = |number: usize| {
        if number.is_multiple_of(pods / PODS_HERE.min(pods)) { 0 } else { 1 + number % 1_000 }
    };
    cluster.create((0..pods).map(|number| pod(number, number % NAMESPACES, node_of(number))).collect());
    cluster
        .create((0..NAMESPACES).flat_map(|number| [admits_namespace(number), admits_team(number)]).collect());
    println!(
        "start with {pods} pods on the API server, {PODS_HERE} here, {} policies (created in {:.0} s)",
        2 * NAMESPACES,
        begun.elapsed().as_secs_f64()
    );
    // The first one shows the API server's own warming, too.
    for round in 1..=2 {
        let folder = tempfile::tempdir().unwrap();
        let begun = Instant::now();
        let mut agent = Command::new(std::env::current_exe().unwrap())
            .arg(AGENT)
            .arg(cluster.servers.kubeconfig())
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while !folder.path().join("agent.sock").exists() {
            assert!(agent.try_wait().unwrap().is_none(), "the agent has ended");
            std::thread::sleep(Duration::from_millis(5));
        }
        let ready = begun.elapsed();
        let peak = memory(agent.id(), "VmHWM");
        std::thread::sleep(Duration::from_secs(25));
        println!(
            "  {round}: ready after {:.2} s, peak {peak} MB; after two full comparisons with the kernel: {} MB, peak {} MB",
            ready.as_secs_f64(),
            memory(agent.id(), "VmRSS"),
            memory(agent.id(), "VmHWM"),
        );
        agent.kill().unwrap();
        agent.wait().unwrap();
    }
    println!("  goal (F15): at most 150 MB afterwards; issue: peak at most 400 MB");
}

/// Runs an agent until it is killed.
pub(crate) fn run_agent(kubeconfig: &str, folder: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let ended = runtime.block_on(async {
        let store = Arc::new(client(Path::new(kubeconfig)).await);
        tortie_agent::run(config(0, store, Path::new(folder), Platform::Linux)).await
    });
    eprintln!("{ended:?}");
}

fn admits_namespace(number: usize) -> (Key, Value) {
    policy(number, "same-namespace", &json!({"podSelector": {"matchLabels": {"app": "web"}}}))
}

fn admits_team(number: usize) -> (Key, Value) {
    let team = format!("team-{}", (number + 1) % NAMESPACES);
    policy(number, "next-team", &json!({"namespaceSelector": {"matchLabels": {"team": team}}}))
}

fn policy(number: usize, name: &str, peer: &Value) -> (Key, Value) {
    let namespace = format!("ns-{number}");
    let ingress = json!([{"from": [peer], "ports": [{"port": 8080}]}]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": ingress});
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, &namespace, name);
    (key, json!({"metadata": {"name": name, "namespace": namespace}, "spec": spec}))
}

pub(crate) fn memory(process: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1_024
}
