//! Empty blocks of nodes that have others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tortie_api::Kind;
use tortie_controllers::Blocks;
use tortie_ipam::{Family, Ipam, Request};
use tortie_store::{Embedded, Store};

use crate::common::{Disturbed, global, memory, put};

const GRACE: Duration = Duration::from_secs(900);

async fn cluster() -> Arc<Embedded> {
    let store = memory();
    for (name, cidr, block_size) in [("four", "10.0.0.0/24", 30), ("six", "fd00::/120", 126)] {
        let spec = json!({"cidr": cidr, "blockSize": block_size, "vxlanMode": "Always"});
        put(&*store, &global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec})).await;
    }
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    put(&*store, &global(Kind::IpamConfig, "default"), config).await;
    store
}

fn ipam(store: &Arc<Embedded>, node: &str) -> Ipam {
    Ipam::new(store.clone(), node, BTreeMap::new())
}

async fn assign(ipam: &Ipam, family: Family, handles: std::ops::Range<u32>) -> Vec<IpAddr> {
    let mut all = Vec::new();
    for number in handles {
        let request = Request { handle: format!("{family:?}.{number}"), family, ..Request::default() };
        all.push(ipam.assign(&request).await.unwrap().address);
    }
    all
}

async fn release(ipam: &Ipam, family: Family, handles: std::ops::Range<u32>) {
    for number in handles {
        ipam.release(&format!("{family:?}.{number}")).await.unwrap();
    }
}

async fn blocks(store: &Arc<Embedded>) -> Vec<String> {
    let affinities = store.list(Kind::BlockAffinity).await.unwrap().items;
    let blocks = store.list(Kind::IpamBlock).await.unwrap().items;
    assert_eq!(affinities.len(), blocks.len());
    blocks.into_iter().map(|block| block.key.name).collect()
}

#[tokio::test]
async fn a_node_gives_up_empty_blocks_after_a_grace_period_and_keeps_one() {
    let store = cluster().await;
    let one = ipam(&store, "one");
    for family in [Family::V4, Family::V6] {
        assign(&one, family, 0..12).await;
    }
    assert_eq!(blocks(&store).await.len(), 6);
    release(&one, Family::V4, 0..8).await;
    release(&one, Family::V6, 0..12).await;
    let before = blocks(&store).await;
    let start = Instant::now();
    let mut controller = Blocks::new(store.clone(), GRACE);
    for since in [Duration::ZERO, GRACE / 2, GRACE - Duration::from_secs(1)] {
        controller.round(start + since).await.unwrap();
        assert_eq!(blocks(&store).await, before);
    }
    controller.round(start + GRACE).await.unwrap();
    let of_four = blocks(&store).await.into_iter().filter(|name| name.contains('.')).count();
    assert_eq!((of_four, blocks(&store).await.len()), (1, 2), "the one with addresses, and one of IPv6");
    // The allocator that had them in memory continues.
    assert_eq!(assign(&one, Family::V4, 20..30).await.len(), 10);
    assert_eq!(assign(&one, Family::V6, 20..30).await.len(), 10);
}

#[tokio::test]
async fn a_block_that_was_used_meanwhile_stays() {
    let store = cluster().await;
    let one = ipam(&store, "one");
    assign(&one, Family::V4, 0..8).await;
    release(&one, Family::V4, 0..8).await;
    let start = Instant::now();
    let mut controller = Blocks::new(store.clone(), GRACE);
    controller.round(start).await.unwrap();
    // Taken and given back between two rounds, in both blocks.
    assign(&one, Family::V4, 10..18).await;
    release(&one, Family::V4, 10..18).await;
    controller.round(start + GRACE).await.unwrap();
    assert_eq!(blocks(&store).await.len(), 2);
    controller.round(start + GRACE * 2).await.unwrap();
    assert_eq!(blocks(&store).await.len(), 1);
}

/// The addresses rest first, and other nodes and Windows nodes are not concerned.
#[tokio::test]
async fn resting_addresses_and_windows_nodes_keep_their_blocks() {
    let store = cluster().await;
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true, "ipCooldownSeconds": 6000});
    put(&*store, &global(Kind::IpamConfig, "default"), config).await;
    let pool = json!({"metadata": {"name": "large"}, "spec": {"cidr": "10.1.0.0/24", "blockSize": 29, "vxlanMode": "Always"}});
    put(&*store, &global(Kind::IpPool, "large"), pool).await;
    let labels = BTreeMap::from([("kubernetes.io/os".to_owned(), "windows".to_owned())]);
    let minion = Ipam::new(store.clone(), "minion", labels).with_most_blocks(2);
    assign(&minion, Family::V4, 100..108).await;
    let one = ipam(&store, "one");
    assign(&one, Family::V4, 0..8).await;
    release(&one, Family::V4, 0..8).await;
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    let start = Instant::now();
    let mut controller = Blocks::new(store.clone(), GRACE);
    let before = blocks(&store).await;
    for round in 0..3 {
        controller.round(start + GRACE * round).await.unwrap();
    }
    assert_eq!(blocks(&store).await, before);
    put(&*store, &global(Kind::IpamConfig, "default"), config).await;
    release(&minion, Family::V4, 100..108).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    for round in 3..6 {
        controller.round(start + GRACE * round).await.unwrap();
    }
    assert_eq!(blocks(&store).await.len(), before.len() - 1, "one of the Linux node");
}

#[tokio::test]
async fn a_list_that_fails_gives_nothing_up() {
    let store = cluster().await;
    let one = ipam(&store, "one");
    assign(&one, Family::V4, 0..8).await;
    release(&one, Family::V4, 0..8).await;
    let failing = Arc::new(Disturbed::crashing_after(store.clone(), 0));
    failing.create(&global(Kind::Tier, "x"), json!({})).await.unwrap_err();
    let mut controller = Blocks::new(failing, GRACE);
    for round in 0..3 {
        controller.round(Instant::now() + GRACE * round).await.unwrap_err();
    }
    assert_eq!(blocks(&store).await.len(), 2);
}
