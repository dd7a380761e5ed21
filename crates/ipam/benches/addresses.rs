//! Addresses a second on real etcd and on a real Kubernetes API: one node, 16 nodes with the same pool, and 250 pods on one
//! node at once. Beside it, compare-and-swap of single keys on the same server: what each address would cost by itself.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a measurement for the terminal")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Request};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as EtcdServers, KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

/// How long each rate is measured.
const DURATION: Duration = Duration::from_secs(3);
/// The number of requests of a node that wait at the same time.
const AT_ONCE: usize = 32;
/// The number of nodes that contend.
const NODES: usize = 16;
/// The pods that one node starts at once.
const PODS: usize = 250;
/// How often that is measured.
const ROUNDS: usize = 5;

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        if can_run(&[Program::Etcd]) {
            let servers = EtcdServers::start().unwrap();
            let config = EtcdConfig { endpoints: servers.endpoints(), ..EtcdConfig::default() };
            measure("etcd", Arc::new(Etcd::new(config).unwrap())).await;
        }
        if can_run(&[Program::Kube]) {
            let servers =
                KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
            let config = KubernetesConfig::Kubeconfig(servers.kubeconfig());
            measure("API server", Arc::new(Kubernetes::new(&config).await.unwrap())).await;
        }
    });
    println!(
        "goal (F7): at least 1,000 addresses/s on etcd, by one node and by 16; none given twice, none lost"
    );
    println!("peer: Calico, published: 1,000 pods on 10 nodes in 322 s");
}

async fn measure(name: &str, store: Arc<dyn Store>) {
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/8", "blockSize": 26, "vxlanMode": "Always"}});
    store.create(&Key::global(Kind::IpPool, "default"), pool).await.unwrap();
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 100_000});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    let swaps = swaps(&store).await;
    println!("{name}: compare-and-swap of one key after another: {swaps:.0}/s");
    let creations = creations(&store).await;
    println!("{name}: {AT_ONCE} clients that each create one record after another: {creations:.0}/s");
    for nodes in [1, NODES] {
        let rate = rate(&store, nodes).await;
        println!(
            "{name}: {nodes} nodes, {AT_ONCE} requests of each at once: {rate:.0} addresses/s ({:.1} times compare-and-swap)",
            rate / swaps
        );
    }
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        times.push(burst(&store, round).await);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "{name}: {PODS} addresses on one new node at once, {ROUNDS} times: median {:.0} ms, max {:.0} ms ({:.0}/s)",
        times[ROUNDS / 2],
        times[ROUNDS - 1],
        PODS as f64 * 1e3 / times[ROUNDS / 2],
    );
}

fn request(handle: String, node: &str) -> Request {
    let owner = [("namespace", "n"), ("pod", handle.as_str()), ("node", node)];
    let owner = owner.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Request { handle, owner, ..Request::default() }
}

/// The peer: one client changes one key, again and again.
async fn swaps(store: &Arc<dyn Store>) -> f64 {
    let key = Key::global(Kind::IpamHandle, "peer");
    let mut stored = store.create(&key, json!({"block": {}, "deleted": false})).await.unwrap();
    let (begun, mut count) = (Instant::now(), 0_u32);
    while begun.elapsed() < DURATION {
        let value = json!({"block": {"10.0.0.0/26": count}, "deleted": false});
        stored = store.update(&key, value, &stored.version).await.unwrap();
        count += 1;
    }
    f64::from(count) / begun.elapsed().as_secs_f64()
}

/// What the server can do: many clients create records such as the one that each address needs.
async fn creations(store: &Arc<dyn Store>) -> f64 {
    let begun = Instant::now();
    let clients = (0..AT_ONCE).map(|client| async move {
        let mut count = 0_u32;
        while begun.elapsed() < DURATION {
            let key = Key::global(Kind::IpamHandle, format!("peer-{client}-{count}"));
            store.create(&key, json!({"block": {"10.0.0.0/26": 1}, "deleted": false})).await.unwrap();
            count += 1;
        }
        count
    });
    let count: u32 = join_all(clients).await.into_iter().sum();
    f64::from(count) / begun.elapsed().as_secs_f64()
}

/// The addresses a second that some nodes get together.
async fn rate(store: &Arc<dyn Store>, nodes: usize) -> f64 {
    let given = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    let tasks = (0..nodes).flat_map(|node| {
        let name = format!("node-{nodes}-{node}");
        let ipam = Arc::new(Ipam::new(store.clone(), &name, BTreeMap::new()));
        let given = given.clone();
        (0..AT_ONCE).map(move |slot| {
            let (ipam, given, name) = (ipam.clone(), given.clone(), name.clone());
            tokio::spawn(async move {
                for number in 0.. {
                    if begun.elapsed() >= DURATION {
                        break;
                    }
                    ipam.assign(&request(format!("net.{name}-{slot}-{number}"), &name)).await.unwrap();
                    given.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }
    let seconds = begun.elapsed().as_secs_f64();
    f64::from(u32::try_from(given.load(Ordering::Relaxed)).unwrap()) / seconds
}

/// Milliseconds until a new node has given an address to each of its pods.
async fn burst(store: &Arc<dyn Store>, round: usize) -> f64 {
    let name = format!("burst-{round}");
    let ipam = Ipam::new(store.clone(), &name, BTreeMap::new());
    let begun = Instant::now();
    let requests: Vec<Request> = (0..PODS).map(|pod| request(format!("net.{name}-{pod}"), &name)).collect();
    let answers = join_all(requests.iter().map(|request| ipam.assign(request))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    begun.elapsed().as_secs_f64() * 1e3
}
