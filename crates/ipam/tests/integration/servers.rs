//! Allocators on real etcd and on a real Kubernetes API, with connections that break, hang and are slow.
//!
//! `PROPTEST_CASES` sets the number of operations.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{ipam, request};
use serde_json::json;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position};
use tortie_ipam::{IpamError, Records, Snapshot, check};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as EtcdServers, KubeApi, KubeOptions, Proxy};
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Store, Stored, Version};

const NODES: [(&str, &str); 4] = [("a", "linux"), ("b", "linux"), ("c", "linux"), ("w", "windows")];
/// How long an allocator may take.
const PATIENCE: Duration = Duration::from_secs(180);
/// After this time without enough answers, connections are disturbed all the same.
const LONGEST_CALM: Duration = Duration::from_secs(5);
/// The number of handles of each allocator.
const HANDLES: u64 = 8;

/// The addresses that somebody has been given and nobody has begun to release.
#[derive(Default)]
struct Held(Mutex<BTreeMap<IpAddr, String>>);

impl Held {
    fn take(&self, address: IpAddr, handle: &str) {
        let other = self.0.lock().unwrap().insert(address, handle.to_owned());
        assert!(other.as_deref().is_none_or(|other| other == handle), "{address}: {other:?} and {handle}");
    }

    fn give_back(&self, handle: &str) {
        self.0.lock().unwrap().retain(|_, holder| holder != handle);
    }
}

/// How many operations there are, if there are usually so many.
fn operations(usual: usize) -> usize {
    let wanted = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    wanted.unwrap_or(usual)
}

async fn fill(store: &dyn Store) {
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/25", "blockSize": 29, "vxlanMode": "Always"}});
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpPool, "default"), pool).await.unwrap();
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
}

/// A sequence that looks random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// How often each allocator must get an address, of this many operations. Most operations get none: their handle has one, or their address
/// is another's. An allocator that has got fewer when the operations are done goes on, without disturbances.
fn least(enough: usize) -> usize {
    enough / (2 * NODES.len()) / 10 + 1
}

/// An allocator that executes random operations on handles of its own. Returns how often it got an address.
async fn allocate(
    store: Arc<dyn Store>,
    (number, node): (u64, (&str, &str)),
    held: &Held,
    (answered, enough): (&AtomicUsize, usize),
) -> usize {
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15 ^ (number + 1));
    let mut allocator = ipam(store.clone(), node);
    let (mut given, deadline) = (0, Instant::now() + PATIENCE);
    while answered.load(Ordering::Relaxed) < enough || given < least(enough) && Instant::now() < deadline {
        if dice.below(50) == 0 {
            allocator = ipam(store.clone(), node);
        }
        let handle = format!("net.{}{number}-{}", node.0, dice.below(HANDLES));
        let request = request(node.0, &handle);
        let assigned = match dice.below(6) {
            0 => {
                let last = u8::try_from(dice.below(128)).unwrap();
                allocator.assign_address(&request, Ipv4Addr::new(10, 0, 0, last).into()).await
            }
            1..4 => allocator.assign(&request).await,
            _ => {
                held.give_back(&handle);
                // A release that fails is continued by the next one, or by a repair.
                match allocator.release(&handle).await {
                    Ok(_) => _ = answered.fetch_add(1, Ordering::Relaxed),
                    Err(IpamError::Store(_)) => lost_connection().await,
                    Err(error) => panic!("{handle}: {error}"),
                }
                continue;
            }
        };
        match assigned {
            Ok(assigned) => {
                given += 1;
                held.take(assigned.address, &handle);
            }
            Err(IpamError::Store(_)) => {
                lost_connection().await;
                continue;
            }
            Err(
                IpamError::Exhausted { .. }
                | IpamError::Taken { .. }
                | IpamError::OfAnother { .. }
                | IpamError::HasAnother { .. },
            ) => {}
            Err(error) => panic!("{handle}: {error}"),
        }
        answered.fetch_add(1, Ordering::Relaxed);
    }
    given
}

/// Waits a moment. An operation without an answer does not count.
async fn lost_connection() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

/// Breaks, holds and delays connections until so many operations have been answered. A disturbance comes after a random time and a random
/// number of answers, so that a machine of any speed completes operations between two of them.
async fn disturb(proxy: &Proxy, answered: &AtomicUsize, enough: usize) -> usize {
    let (mut dice, mut cut) = (Dice(4711), 0);
    while answered.load(Ordering::Relaxed) < enough {
        let next = answered.load(Ordering::Relaxed) + usize::try_from(dice.below(6)).unwrap();
        tokio::time::sleep(Duration::from_millis(20 + dice.below(120))).await;
        let waits = Instant::now();
        while answered.load(Ordering::Relaxed) < next && waits.elapsed() < LONGEST_CALM {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match dice.below(4) {
            0 | 1 => cut += proxy.cut(),
            2 => {
                proxy.pause();
                tokio::time::sleep(Duration::from_millis(dice.below(60))).await;
                // Some requests are carried out, and their answers are lost.
                cut += proxy.cut();
                proxy.resume();
            }
            _ => proxy.delay(Duration::from_millis(dice.below(4))),
        }
    }
    proxy.delay(Duration::ZERO);
    cut
}

/// Two allocators on each node, through the proxy; then everything is compared, by a client without a proxy.
async fn run(direct: Arc<dyn Store>, disturbed: Arc<dyn Store>, proxy: &Proxy, enough: usize) {
    fill(&*direct).await;
    let (held, answered) = (Held::default(), AtomicUsize::new(0));
    let allocators = NODES
        .iter()
        .chain(&NODES)
        .zip(0..)
        .map(|(node, number)| allocate(disturbed.clone(), (number, *node), &held, (&answered, enough)));
    let (given, cut) = tokio::join!(futures::future::join_all(allocators), disturb(proxy, &answered, enough));
    assert!(cut > 0, "no connection was disturbed");
    assert!(given.iter().sum::<usize>() > enough / 10, "too few addresses were given: {given:?}");
    // Nobody may be starved by the others, or by an error that does not end.
    assert!(
        given.iter().all(|given| *given >= least(enough)),
        "an allocator got too few addresses: {given:?}"
    );
    // The server may still carry out what it received before a connection was cut.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let held = held.0.into_inner().unwrap();
    assert_eq!(repaired(direct.clone(), &held).await, held, "after a repair, each address has its holder");
    for handle in held.values() {
        assert_eq!(ipam(direct.clone(), NODES[0]).release(handle).await.unwrap().len(), 1);
    }
    assert_eq!(direct.list(Kind::IpamHandle).await.unwrap().items, []);
}

/// The allocated addresses after everything has been repaired.
async fn repaired(store: Arc<dyn Store>, held: &BTreeMap<IpAddr, String>) -> BTreeMap<IpAddr, String> {
    for (address, handle) in held {
        let known = ipam(store.clone(), NODES[0]).find(handle).await.unwrap();
        assert!(known.iter().any(|known| known.address == *address), "{handle} has lost {address}");
    }
    let endpoint = |(address, handle): (&IpAddr, &String)| Stored {
        key: Key::namespaced(Kind::WorkloadEndpoint, "n", handle),
        value: json!({"spec": {"pod": handle, "ipNetworks": [address.to_string()]}}),
        version: Version::new("1"),
        position: Position(1),
    };
    let node = |(name, _): (&str, &str)| Stored {
        key: Key::global(Kind::Node, name),
        value: json!({}),
        version: Version::new("1"),
        position: Position(1),
    };
    for _ in 0..2 {
        let snapshot = Snapshot {
            blocks: store.list(Kind::IpamBlock).await.unwrap().items,
            handles: store.list(Kind::IpamHandle).await.unwrap().items,
            affinities: store.list(Kind::BlockAffinity).await.unwrap().items,
            pools: store.list(Kind::IpPool).await.unwrap().items,
            endpoints: held.iter().map(endpoint).collect(),
            nodes: NODES.map(node).to_vec(),
            ..Snapshot::default()
        };
        for finding in check(&snapshot, jiff::Timestamp::now(), 0) {
            let fix = finding.fix.as_ref().unwrap_or_else(|| panic!("{finding}"));
            Records::new(store.clone()).repair(fix).await.unwrap();
        }
    }
    let mut allocated = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        let block: Block = serde_json::from_value(stored.value).unwrap();
        block.check().unwrap();
        for (address, attribute) in block.allocated() {
            let other = allocated.insert(address, attribute.handle_id.clone().unwrap());
            assert_eq!(other, None, "{address} is in two blocks");
        }
    }
    allocated
}

#[tokio::test(flavor = "multi_thread")]
async fn no_address_is_lost_or_given_twice_on_etcd() {
    if !can_run(&[Program::Etcd]) {
        return;
    }
    let servers = EtcdServers::start().unwrap();
    let proxy = Proxy::start(servers.addresses()[0]).unwrap();
    let client = |address: SocketAddr| {
        let endpoints = vec![format!("http://{address}")];
        Arc::new(Etcd::new(EtcdConfig { endpoints, ..EtcdConfig::default() }).unwrap())
    };
    run(client(servers.addresses()[0]), client(proxy.address()), &proxy, operations(1_000)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_address_is_lost_or_given_twice_on_kubernetes() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let proxy = Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, servers.port()))).unwrap();
    let disturbed = servers.kubeconfig_at("admin", proxy.address().port()).unwrap();
    let open = async |path| {
        Arc::new(Kubernetes::new(&KubernetesConfig::Kubeconfig(path)).await.unwrap()) as Arc<dyn Store>
    };
    run(open(servers.kubeconfig()).await, open(disturbed).await, &proxy, operations(400)).await;
}
