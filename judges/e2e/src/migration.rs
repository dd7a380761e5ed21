//! `tortie pool migrate` with real kubelets: a Deployment with a budget serves while all pods get addresses of another pool.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{
    NODES, connections, connectivity, finish, kubectl, kubectl_command, node_command, tortie_command,
};

const MANIFEST: &str = include_str!("migration.yaml");
const NAMESPACE: &str = "--namespace=migrated";
/// The pools between which the cluster moves, each with its network. The first one is that of the installation.
const POOLS: [(&str, &str); 2] = [("default-ipv4-ippool", super::PODS), ("moved", "10.245.0.0/16")];
/// What the budget of the Deployment demands.
const LEAST_READY: u64 = 3;
/// The pause between two requests.
const INTERVAL: Duration = Duration::from_millis(200);

/// Moves all pods to another pool, and back.
pub(super) fn run() -> Result<()> {
    remove()?;
    connections::apply(MANIFEST)?;
    wait_for_pods()?;
    let [first, second] = POOLS;
    migrate(first, second)?;
    migrate(second, first)?;
    connectivity::run()?;
    remove()
}

fn wait_for_pods() -> Result<()> {
    for set in ["deployment/web", "daemonset/everywhere"] {
        kubectl(&["rollout", "status", NAMESPACE, set, "--timeout=120s"])?;
    }
    Ok(())
}

fn remove() -> Result<()> {
    kubectl(&["delete", "namespace", "migrated", "--ignore-not-found", "--timeout=120s"])
}

fn migrate((old, old_net): (&str, &str), (new, new_net): (&str, &str)) -> Result<()> {
    println!("==> from {old} ({old_net}) to {new} ({new_net})");
    let started = Instant::now();
    let ends = AtomicBool::new(false);
    let watched = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch(&ends));
        let migrated = tortie_command(&["pool", "migrate", old, new, "--cidr", new_net])
            .and_then(|mut it| finish(&mut it));
        ends.store(true, Ordering::Relaxed);
        let watched = watching.join().map_err(|_| anyhow::anyhow!("watching the Deployment failed"))?;
        migrated.and(watched)
    })?;
    let Watched { requests, slowest, least_ready } = watched;
    println!(
        "    after {:.0} s; {requests} requests were answered, the slowest in {slowest:.1?}, and at least {least_ready} of 4 servers were \
         ready",
        started.elapsed().as_secs_f64()
    );
    wait_for_pods()?;
    let prefix = |net: &str| net.split('.').take(2).collect::<Vec<_>>().join(".") + ".";
    let pods = printed(&mut kubectl_command(&["get", "pods", "--all-namespaces", "-o", "json"])?)?;
    let pods: Value = serde_json::from_str(&pods)?;
    let pods = pods["items"].as_array().context("no pods")?.iter();
    let addresses: Vec<&str> = pods.filter_map(|pod| pod["status"]["podIP"].as_str()).collect();
    let left = addresses.iter().filter(|address| address.starts_with(&prefix(old_net))).count();
    let moved = addresses.iter().filter(|address| address.starts_with(&prefix(new_net))).count();
    ensure!(
        left == 0 && moved >= 6,
        "{left} pods have addresses of {old}, and {moved} of {new}: {addresses:?}"
    );
    let pools = printed(&mut tortie_command(&["get", "ippools", "-o", "name"])?)?;
    ensure!(!pools.contains(old) && pools.contains(new), "the pools are {pools:?}");
    let blocks = printed(&mut kubectl_command(&["get", "ipamblocks.crd.projectcalico.org", "-o", "name"])?)?;
    ensure!(!blocks.contains(&prefix(old_net).replace('.', "-")), "blocks of {old} are left: {blocks}");
    let nodes = printed(&mut kubectl_command(&["get", "nodes", "-o", "json"])?)?;
    ensure!(
        !nodes.contains("\"unschedulable\"") && !nodes.contains("tortie.io/pool-migration"),
        "a node stays cordoned"
    );
    finish(&mut tortie_command(&["ipam", "check"])?)
}

/// What was seen of the Deployment.
struct Watched {
    /// The requests to its Service, all of which were answered.
    requests: usize,
    slowest: Duration,
    least_ready: u64,
}

/// Sends requests to the Service from a node, and looks how many servers are ready.
fn watch(ends: &AtomicBool) -> Result<Watched> {
    let service = connections::table("migrated", "services", "{.metadata.name} {.spec.clusterIP}")?;
    let url = format!("http://{}/", service[0][1]);
    let mut watched = Watched { requests: 0, slowest: Duration::ZERO, least_ready: u64::MAX };
    while !ends.load(Ordering::Relaxed) {
        let mut request =
            node_command(NODES[0], &["curl", "--silent", "--show-error", "--max-time", "5", &url])?;
        let asked = Instant::now();
        printed(&mut request).with_context(|| format!("request {} to the Service", watched.requests + 1))?;
        watched.requests += 1;
        watched.slowest = watched.slowest.max(asked.elapsed());
        let ready = "jsonpath={.status.readyReplicas}";
        let ready = printed(&mut kubectl_command(&["get", "deployment", "web", NAMESPACE, "-o", ready])?)?;
        watched.least_ready = watched.least_ready.min(ready.trim().parse().unwrap_or(0));
        ensure!(watched.least_ready >= LEAST_READY, "only {ready:?} servers are ready");
        std::thread::sleep(INTERVAL);
    }
    Ok(watched)
}

fn printed(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
