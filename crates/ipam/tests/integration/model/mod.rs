//! Many allocators on one store: nodes of both systems, two allocators on each node, every order of their requests, crashes
//! between any two writes, broken connections, nodes that vanish, repairs. The rules are checked with every single write.
//!
//! `PROPTEST_CASES` sets the number of runs, of a thousand operations each.

mod calico;
mod client;
mod memory;
mod operations;
mod repairs;

use std::sync::Arc;

use crate::common::{ipam, request};
use client::Client;
use memory::{Dice, Memory};
use operations::{Model, Options};
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_store::Store;

/// The nodes that exist. Another one, [`GONE`], has allocators but no Node.
const NODES: [(&str, &str); 4] = [("a", "linux"), ("b", "linux"), ("c", "linux"), ("w", "windows")];
const GONE: (&str, &str) = ("g", "linux");

async fn cluster(memory: &Memory, pools: &[(&str, &str, u8)], strict: bool, cooldown: u32) {
    for (name, cidr, block_size) in pools {
        let pool = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name},
            "spec": {"cidr": cidr, "blockSize": block_size, "vxlanMode": "Never"},
        });
        memory.create(&Key::global(Kind::IpPool, *name), pool).await.unwrap();
    }
    for (name, _) in NODES {
        let node = json!({"metadata": {"name": name}});
        memory.create(&Key::global(Kind::Node, name), node).await.unwrap();
    }
    let config =
        json!({"strict_affinity": strict, "auto_allocate_blocks": true, "ipCooldownSeconds": cooldown});
    memory.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
}

/// How many runs there are, if there are usually so many.
fn runs(usual: u64) -> u64 {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse::<u64>().ok());
    cases.map_or(usual, |cases| usual * cases / 100)
}

fn run(seed: u64, operations: usize, options: Options) -> std::rc::Rc<Model> {
    let memory = Arc::new(Memory::default());
    let model = Model::new(memory.clone(), Arc::new(Dice::new(seed)), options);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let pools = match options.strict {
            true => [("default", "10.0.0.0/26", 29), ("six", "fd00::/122", 125)],
            // A block for each node, which is not enough.
            false => [("default", "10.0.0.0/27", 29), ("six", "fd00::/123", 125)],
        };
        cluster(&memory, &pools, options.strict, options.cooldown).await;
        // Windows nodes need strict affinity.
        let mut nodes = if options.strict { NODES[..].to_vec() } else { NODES[..3].to_vec() };
        nodes.push(GONE);
        let allocators = nodes.iter().chain(&nodes).map(|node| model.clone().allocator(*node, operations));
        let controllers = (0..2).map(|_| model.clone().controller(operations));
        tokio::join!(futures::future::join_all(allocators), futures::future::join_all(controllers));
        model.nothing_is_lost(seed).await;
    });
    model
}

#[test]
fn no_address_is_given_twice_and_none_is_lost() {
    let mut counts = operations::Counts::default();
    for seed in 0..runs(100) {
        counts.add(&run(seed, 1_000, Options::of(seed, true)).counts.borrow());
    }
    println!("{counts:?}");
    let enough = |count: usize, least: u64| u64::try_from(count).unwrap() * 100 > least * runs(100);
    assert!(enough(counts.assigned, 15_000) && enough(counts.of_ipv6, 2_000), "{counts:?}");
    assert!(enough(counts.followed, 500), "{counts:?}");
    assert!(enough(counts.crashes, 1_000) && enough(counts.fixed, 500), "{counts:?}");
    assert!(enough(counts.repaired, 300) && enough(counts.cleared, 200), "{counts:?}");
    assert!(enough(counts.released_by_address, 200), "{counts:?}");
}

/// The same where nodes borrow addresses, and take over empty blocks at once.
#[test]
fn borrowed_addresses_are_given_once_and_not_lost() {
    let mut counts = operations::Counts::default();
    for seed in 0..runs(40) {
        counts.add(&run(seed, 400, Options::of(seed, false)).counts.borrow());
    }
    println!("{counts:?}");
    let enough = |count: usize, least: u64| u64::try_from(count).unwrap() * 40 > least * runs(40);
    assert!(enough(counts.assigned, 2_000) && enough(counts.borrowed, 200), "{counts:?}");
}

/// Pools that overlap, with blocks of different sizes: whatever order two nodes claim in, no address is in two blocks
/// from which addresses are taken.
#[test]
fn blocks_of_overlapping_pools_do_not_share_addresses() {
    for seed in 0..300 {
        let memory = Arc::new(Memory::default());
        let dice = Arc::new(Dice::new(seed));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            cluster(&memory, &[("large", "10.0.0.0/27", 28), ("small", "10.0.0.0/28", 30)], true, 0).await;
            let nodes = NODES[..3].iter().chain(&NODES[..3]).enumerate().map(|(number, node)| {
                let client = Client::new(memory.clone(), dice.clone(), u64::MAX, false);
                let (allocator, memory) = (ipam(Arc::new(client), *node), memory.clone());
                async move {
                    for pod in 0..6 {
                        let handle = format!("{}.{number}.{pod}", node.0);
                        // Where the pools overlap, a node may find no block; it may not get an address twice.
                        if let Ok(assignment) = allocator.assign(&request(node.0, &handle)).await {
                            memory.take(assignment.address, &handle);
                        }
                    }
                }
            });
            futures::future::join_all(nodes).await;
        });
        // Fails if an address is allocated in two blocks.
        assert!(!memory.allocated().is_empty());
        let blocks = memory.blocks();
        for block in &blocks {
            let others = blocks.iter().filter(|other| *other != block);
            let overlapping: Vec<_> = others.filter(|other| block.contains(*other)).collect();
            assert!(overlapping.is_empty(), "seed {seed}: {block} and {overlapping:?} are left");
        }
    }
}
