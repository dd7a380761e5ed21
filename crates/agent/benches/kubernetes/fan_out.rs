//! A policy is applied; when is it in force on 100 nodes? Their agents are real, their dataplanes only note the time.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_agent::Platform;
use tortie_api::{Key, Kind};
use tortie_dataplane::{
    Dataplane, Delta, EndpointId, MacAddress, NodeState, PodAttachment, PodInterface, PodWiring, Report,
    ShowError, Shown, WiringError,
};
use tortie_store::{Change, Interest, Store, wait_in_force};

use crate::cluster::{Cluster, client, config, namespace, pod};
use crate::percentile;

const NODES: usize = 100;
const CHANGES: usize = 60;
/// The wanted rate of other changes, in updates per second. All nodes read each of them, on the cores of one machine.
const LOAD: u32 = 100;

/// Notes when a node gets changes.
struct Recorder {
    node: usize,
    applied: Sender<(usize, Instant)>,
}

impl Dataplane for Recorder {
    fn apply(&mut self, _: &NodeState, deltas: &[Delta]) -> Report {
        if deltas.iter().any(|delta| matches!(delta, Delta::Policy(..))) {
            let _ = self.applied.send((self.node, Instant::now()));
        }
        Report::default()
    }

    fn resync(&mut self, _: &NodeState) -> Report {
        Report::default()
    }

    fn show(&mut self, _: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        Err(ShowError::NoEndpoint(endpoint.to_string()))
    }
}

struct NoWiring;

impl PodWiring for NoWiring {
    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        let host_interface = self.host_interface(&pod.endpoint, &pod.container_id);
        Ok(PodInterface {
            host_interface,
            host_mac: None,
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            addresses: Vec::new(),
        })
    }

    fn disconnect(&self, _: &EndpointId, _: &str) -> Result<(), WiringError> {
        Ok(())
    }

    fn host_interface(&self, endpoint: &EndpointId, _: &str) -> String {
        format!("cali-{}", endpoint.pod)
    }

    fn wait_until_live(&self, _: &PodInterface, _: Duration) -> bool {
        true
    }

    fn check(&self, _: &PodAttachment) -> Result<(), WiringError> {
        Ok(())
    }
}

pub(crate) fn run() {
    let cluster = Cluster::start(NODES);
    cluster.create(vec![namespace(0)]);
    cluster.create((0..NODES * 10).map(|number| pod(number, 0, number % NODES)).collect());
    let key = Key::global(Kind::GlobalNetworkPolicy, "measured");
    cluster.create(vec![(key.clone(), policy(0))]);

    let (receiver, _folders) = start_agents(&cluster, NODES);
    println!("a policy on {NODES} nodes, {CHANGES} changes");
    let events = bare_watch(&cluster);
    let before = requests(&cluster);
    let idle = changes(&cluster, &key, &receiver, &events, 1, NODES);
    let after = requests(&cluster);
    idle.print("idle cluster");
    println!(
        "  requests for {CHANGES} changes, with those of the change itself: {}",
        after
            .iter()
            .filter_map(|(verb, count)| difference(verb, *count, &before))
            .collect::<Vec<_>>()
            .join(", ")
    );
    let load = Load::start(&cluster, LOAD, NODES);
    let busy = changes(&cluster, &key, &receiver, &events, 1 + CHANGES, NODES);
    let rate = load.stop();
    busy.print(&format!("with {rate:.0} other updates a second ({LOAD} wanted)"));
    println!("  goal (F12): p99 at most 250 ms");
    waiting(&cluster, &key);
}

/// Starts agents, and waits until they serve.
fn start_agents(cluster: &Cluster, nodes: usize) -> (Receiver<(usize, Instant)>, Vec<TempDir>) {
    let (applied, receiver) = channel();
    let folders: Vec<TempDir> = (0..nodes).map(|_| tempfile::tempdir().unwrap()).collect();
    for (node, folder) in folders.iter().enumerate() {
        let recorder = Recorder { node, applied: applied.clone() };
        let platform = Platform::Other { dataplane: Box::new(recorder), wiring: Arc::new(NoWiring) };
        let store = Arc::new(cluster.runtime.block_on(client(&cluster.servers.kubeconfig())));
        cluster.runtime.spawn(tortie_agent::run(config(node, store, folder.path(), platform)));
    }
    for folder in &folders {
        while !folder.path().join("agent.sock").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // Reports of the start are written.
    std::thread::sleep(Duration::from_secs(3));
    (receiver, folders)
}

/// 1,000 updates a second for 50 agents: how many the API server takes, and when policy is in force meanwhile.
pub(crate) fn run_load() {
    const NODES: usize = 50;
    const RATE: u32 = 1_000;
    let cluster = Cluster::start(NODES);
    cluster.create(vec![namespace(0)]);
    cluster.create((0..NODES * 20).map(|number| pod(number, 0, number % NODES)).collect());
    let key = Key::global(Kind::GlobalNetworkPolicy, "measured");
    cluster.create(vec![(key.clone(), policy(0))]);
    // How many updates the API server takes without agents.
    let alone = Load::start(&cluster, RATE, NODES);
    std::thread::sleep(Duration::from_secs(10));
    let alone = alone.stop();
    let (receiver, _folders) = start_agents(&cluster, NODES);
    println!("{RATE} updates of pods a second (wanted), {NODES} agents");
    println!("  without agents: {alone:.0} updates a second");
    let events = bare_watch(&cluster);
    let memory = resident();
    let before = requests(&cluster);
    let load = Load::start(&cluster, RATE, NODES);
    let busy = changes(&cluster, &key, &receiver, &events, 1, NODES);
    std::thread::sleep(Duration::from_secs(10));
    let rate = load.stop();
    let after = requests(&cluster);
    busy.print(&format!("with {rate:.0} updates a second"));
    // Who keeps up has nothing left to do.
    let rest = changes(&cluster, &key, &receiver, &events, 1 + CHANGES, NODES);
    rest.print("right after it");
    let lists: Vec<String> = after
        .iter()
        .filter(|(verb, _)| verb.starts_with("LIST") || verb.starts_with("WATCH"))
        .filter_map(|(verb, count)| difference(verb, *count, &before))
        .collect();
    println!("  lists and watches opened meanwhile: {}", lists.join(", "));
    println!("  memory of this process with all agents: {memory} MB before, {} MB after", resident());
}

/// The resident memory of this process in MB.
fn resident() -> u64 {
    crate::start::memory(std::process::id(), "VmRSS")
}

fn policy(change: usize) -> Value {
    let rule = json!({"action": "Allow", "protocol": "TCP", "destination": {"ports": [1_000 + change]}});
    json!({"metadata": {"name": "measured"}, "spec": {"selector": "app == 'web'", "types": ["Ingress"], "ingress": [rule]}})
}

struct Times {
    /// From the request until each node has applied the change.
    nodes: Vec<Duration>,
    /// Until the last node has.
    last: Vec<Duration>,
    /// Until a client with nothing but a watch has the event.
    watch: Vec<Duration>,
}

impl Times {
    fn print(&self, what: &str) {
        for (whose, times) in
            [("each node", &self.nodes), ("the last node", &self.last), ("peer: one bare watch", &self.watch)]
        {
            println!(
                "  {what}, {whose}: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
                percentile(times, 0.5),
                percentile(times, 0.99),
                percentile(times, 1.0)
            );
        }
    }
}

fn changes(
    cluster: &Cluster,
    key: &Key,
    applied: &Receiver<(usize, Instant)>,
    events: &Receiver<Instant>,
    first: usize,
    nodes: usize,
) -> Times {
    let mut times = Times { nodes: Vec::new(), last: Vec::new(), watch: Vec::new() };
    applied.try_iter().count();
    events.try_iter().count();
    for change in first..first + CHANGES {
        let begun = Instant::now();
        update(cluster, key, policy(change));
        let mut missing: Vec<bool> = vec![true; nodes];
        let mut last = Duration::ZERO;
        while missing.iter().any(|missing| *missing) {
            let (node, at) = applied.recv_timeout(Duration::from_secs(30)).unwrap();
            if std::mem::take(&mut missing[node]) {
                times.nodes.push(at - begun);
                last = last.max(at - begun);
            }
        }
        times.last.push(last);
        times.watch.push(events.recv_timeout(Duration::from_secs(30)).unwrap() - begun);
        std::thread::sleep(Duration::from_millis(50));
    }
    [&mut times.nodes, &mut times.last, &mut times.watch].into_iter().for_each(|times| times.sort());
    times
}

fn update(cluster: &Cluster, key: &Key, value: Value) {
    cluster.runtime.block_on(async {
        let stored = cluster.store.get(key).await.unwrap().unwrap();
        cluster.store.update(key, value, &stored.version).await.unwrap();
    });
}

/// The arrival of each event of the policy at a client of the same library that does nothing else.
fn bare_watch(cluster: &Cluster) -> Receiver<Instant> {
    let (send, events) = channel();
    let (ready, is_ready) = channel();
    let kubeconfig = cluster.servers.kubeconfig();
    cluster.runtime.spawn(async move {
        let store = client(&kubeconfig).await;
        let mut changes = store.follow(vec![Interest::all(Kind::GlobalNetworkPolicy)]);
        while let Some(change) = changes.next().await {
            match change {
                Change::Put(_) => drop(send.send(Instant::now())),
                Change::InSync(..) => drop(ready.send(())),
                _ => {}
            }
        }
    });
    is_ready.recv().unwrap();
    events
}

/// The requests that the API server has answered, by verb and resource.
fn requests(cluster: &Cluster) -> std::collections::BTreeMap<String, u64> {
    let text = cluster.servers.kubectl(&["get", "--raw=/metrics"]).unwrap();
    let mut requests = std::collections::BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let label = |name: &str| line.split(&format!("{name}=\"")).nth(1)?.split('"').next();
        let count: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        let name = format!("{} {}", label("verb").unwrap(), label("resource").unwrap());
        *requests.entry(name).or_default() += count as u64;
    }
    requests
}

fn difference(verb: &str, after: u64, before: &std::collections::BTreeMap<String, u64>) -> Option<String> {
    let count = after - before.get(verb).copied().unwrap_or_default();
    (count > 0 && !verb.trim_end().ends_with("metrics") && verb.trim().contains(' '))
        .then(|| format!("{count} {verb}"))
}

/// Changes of pods elsewhere in the cluster.
struct Load {
    stop: Arc<Mutex<bool>>,
    writers: Vec<tokio::task::JoinHandle<u32>>,
    begun: Instant,
    runtime: tokio::runtime::Handle,
}

impl Load {
    fn start(cluster: &Cluster, rate: u32, nodes: usize) -> Self {
        const WRITERS: u32 = 32;
        let stop = Arc::new(Mutex::new(false));
        let writers = (0..WRITERS).map(|writer| {
            let (stop, store) = (stop.clone(), cluster.store.clone());
            cluster.runtime.spawn(async move {
                let (key, _) = pod(writer as usize, 0, writer as usize % nodes);
                let mut stored = store.get(&key).await.unwrap().unwrap();
                let mut interval = tokio::time::interval(Duration::from_secs(1) * WRITERS / rate);
                interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                let mut count = 0;
                while !*stop.lock().unwrap() {
                    interval.tick().await;
                    let mut changed = stored.value.clone();
                    changed["metadata"]["labels"]["round"] = json!(format!("{count}"));
                    // A server under load may not answer.
                    match store.update(&key, changed, &stored.version).await {
                        Ok(updated) => (stored, count) = (updated, count + 1),
                        Err(_) => stored = store.get(&key).await.ok().flatten().unwrap_or(stored),
                    }
                }
                count
            })
        });
        let writers = writers.collect();
        Self { stop, writers, begun: Instant::now(), runtime: cluster.runtime.handle().clone() }
    }

    /// Returns the updates per second.
    fn stop(self) -> f64 {
        *self.stop.lock().unwrap() = true;
        let counts = self.runtime.block_on(futures::future::join_all(self.writers));
        let count: u32 = counts.into_iter().map(|count| count.unwrap()).sum();
        f64::from(count) / self.begun.elapsed().as_secs_f64()
    }
}

/// What `apply --wait` takes, which reads the reports of all nodes.
fn waiting(cluster: &Cluster, key: &Key) {
    let mut times = Vec::new();
    for change in 0..10 {
        let begun = Instant::now();
        update(cluster, key, policy(1_000 + change));
        cluster.runtime.block_on(async {
            let position = cluster.store.get(key).await.unwrap().unwrap().position;
            let positions = [(key.kind, position)].into_iter().collect();
            wait_in_force(&*cluster.store, &positions, Duration::from_secs(60)).await.unwrap();
        });
        times.push(begun.elapsed());
    }
    times.sort();
    println!(
        "  `apply --wait` of it, which asks all nodes: p50 {:.0} ms, max {:.0} ms",
        percentile(&times, 0.5),
        percentile(&times, 1.0)
    );
}
