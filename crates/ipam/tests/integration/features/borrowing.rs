//! Addresses of other nodes' blocks.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, IpamError, Request};
use tortie_store::Store;

use crate::features::support::{
    allocated, block, cluster, configure, linux, names, put, request, value, windows,
};

const OPEN: fn() -> Value = || json!({"strict_affinity": false, "auto_allocate_blocks": true});

async fn fill(ipam: &Ipam, node: &str, count: usize) {
    for number in 0..count {
        let owner = [("node".to_owned(), node.to_owned())].into();
        ipam.assign(&Request { owner, ..request(&format!("{node}.{number}")) }).await.unwrap();
    }
}

#[tokio::test]
async fn a_node_borrows_when_no_block_is_left() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    configure(&store, OPEN()).await;
    let (a, b) = (linux(&store, "a"), linux(&store, "b"));
    fill(&a, "a", 8).await;
    fill(&b, "b", 5).await;
    let before = allocated(&store).await;
    for number in 8..11 {
        let owner = [("node".to_owned(), "a".to_owned())].into();
        let borrowed = a.assign(&Request { owner, ..request(&format!("a.{number}")) }).await.unwrap();
        assert!(block(&store, &borrowed.block.to_string()).await.unwrap().belongs_to("b"));
        assert!(!before.contains_key(&borrowed.address));
    }
    for node in [&a, &b] {
        assert!(matches!(node.assign(&request("full")).await, Err(IpamError::Exhausted { .. })));
    }
    assert_eq!(names(&store, Kind::BlockAffinity).await.len(), 2, "nobody has claimed anything");
    // GC of one node must not release what another one has borrowed.
    assert!(b.handles().await.unwrap().keys().all(|handle| handle.starts_with("b.")));
    assert_eq!(a.handles().await.unwrap().len(), 11);
    assert_eq!(a.release("a.10").await.unwrap().len(), 1);
    assert_eq!(b.assign(&request("again")).await.unwrap().block, b.find("b.0").await.unwrap()[0].block);
}

/// A node uses its own block again as soon as an address of it is free.
#[tokio::test]
async fn a_borrowed_block_is_not_kept_at_hand() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    configure(&store, OPEN()).await;
    let (a, b) = (linux(&store, "a"), linux(&store, "b"));
    fill(&a, "a", 8).await;
    fill(&b, "b", 1).await;
    a.assign(&request("borrowed")).await.unwrap();
    let released = a.release("a.3").await.unwrap();
    assert_eq!(a.assign(&request("next")).await.unwrap().address, released[0]);
}

#[tokio::test]
async fn nobody_borrows_from_or_for_a_windows_node_or_from_load_balancers() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    windows(&store, "w").ensure_blocks().await.unwrap();
    let linux_node = linux(&store, "a");
    fill(&linux_node, "a", 8).await;
    configure(&store, OPEN()).await;
    let error = linux(&store, "a").assign(&request("more")).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, limit: 20, .. }), "{error}");
    assert!(matches!(windows(&store, "w").assign(&request("p")).await, Err(IpamError::StrictAffinityNeeded)));

    let of_windows = names(&store, Kind::IpamBlock).await;
    for name in of_windows {
        let mut stored = value(&store, Kind::IpamBlock, &name).await.unwrap();
        if stored["affinity"] == "host:w" {
            stored["affinity"] = json!("virtual:load-balancer");
            stored["allocations"] = json!([null, null, null, null, null, null, null, null]);
            (stored["attributes"], stored["unallocated"]) = (json!([]), json!([0, 1, 2, 3, 4, 5, 6, 7]));
            put(&store, &Key::global(Kind::IpamBlock, &name), stored).await;
        }
    }
    let error = linux(&store, "a").assign(&request("more")).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { .. }), "{error}");
}

#[tokio::test]
async fn nobody_borrows_where_affinity_is_strict_or_the_limit_is_reached() {
    for config in [
        json!({"strict_affinity": true, "auto_allocate_blocks": true}),
        json!({"strict_affinity": false, "auto_allocate_blocks": true, "maxBlocksPerHost": 1}),
    ] {
        let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
        configure(&store, config).await;
        let (a, b) = (linux(&store, "a"), linux(&store, "b"));
        fill(&a, "a", 8).await;
        fill(&b, "b", 1).await;
        assert!(matches!(a.assign(&request("more")).await, Err(IpamError::Exhausted { .. })));
    }
}

/// The pools of the request decide, not those of the block's owner.
#[tokio::test]
async fn a_node_borrows_only_from_its_pools() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29)), ("other", "10.1.0.0/29", Some(29))]).await;
    crate::features::support::put_pool(
        &store,
        "other",
        json!({"cidr": "10.1.0.0/29", "blockSize": 29, "allowedUses": ["Tunnel"]}),
    )
    .await;
    configure(&store, OPEN()).await;
    let tunnel = Request { intended_use: tortie_ipam::Use::Tunnel, ..request("t") };
    crate::features::support::put_pool(
        &store,
        "four",
        json!({"cidr": "10.0.0.0/29", "blockSize": 29, "allowedUses": ["Workload"]}),
    )
    .await;
    linux(&store, "b").assign(&tunnel).await.unwrap();
    let a = linux(&store, "a");
    fill(&a, "a", 8).await;
    assert!(matches!(a.assign(&request("more")).await, Err(IpamError::Exhausted { .. })));
}

async fn age(store: &tortie_store::Embedded, cidr: &str, time: &str) {
    let mut stored = value(store, Kind::IpamBlock, cidr).await.unwrap();
    stored["affinity_claim_time"] = json!(time);
    put(store, &Key::global(Kind::IpamBlock, cidr), stored).await;
}

#[tokio::test]
async fn an_empty_block_is_taken_over_unless_it_is_new_or_of_windows() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29))]).await;
    let idle = linux(&store, "idle");
    idle.assign(&request("p")).await.unwrap();
    idle.release("p").await.unwrap();
    let busy = linux(&store, "busy");
    assert!(busy.assign(&request("q")).await.is_err(), "the block was claimed a moment ago");
    age(&store, "10.0.0.0/29", "2026-01-01T00:00:00Z").await;
    busy.assign(&request("q")).await.unwrap();
    assert!(block(&store, "10.0.0.0/29").await.unwrap().belongs_to("busy"));
    assert_eq!(names(&store, Kind::BlockAffinity).await, ["busy/10.0.0.0/29"]);
    // The former owner has it in its cache.
    assert!(idle.assign(&request("p")).await.is_err());
    age(&store, "10.0.0.0/29", "2026-01-01T00:00:00Z").await;
    assert!(idle.assign(&request("p")).await.is_err(), "it is not empty");
    assert_eq!(value(&store, Kind::BlockAffinity, "busy/10.0.0.0/29").await.unwrap()["state"], "confirmed");

    let store = cluster(&[("four", "10.0.0.0/29", Some(29))]).await;
    windows(&store, "w").ensure_blocks().await.unwrap();
    age(&store, "10.0.0.0/29", "2026-01-01T00:00:00Z").await;
    assert!(linux(&store, "busy").assign(&request("q")).await.is_err());
}

/// A block without owner and addresses is in nobody's way.
#[tokio::test]
async fn a_block_without_owner_is_deleted_with_its_last_address() {
    for last_release in [false, true] {
        let store = cluster(&[("four", "10.0.0.0/29", Some(29))]).await;
        let a = linux(&store, "a");
        a.assign(&request("p")).await.unwrap();
        if !last_release {
            a.release("p").await.unwrap();
        }
        let mut stored = value(&store, Kind::IpamBlock, "10.0.0.0/29").await.unwrap();
        stored["affinity"] = Value::Null;
        put(&store, &Key::global(Kind::IpamBlock, "10.0.0.0/29"), stored).await;
        tortie_store::Store::delete(&*store, &Key::global(Kind::BlockAffinity, "a/10.0.0.0/29"), None)
            .await
            .unwrap();
        if last_release {
            assert_eq!(linux(&store, "x").release("p").await.unwrap().len(), 1);
            assert_eq!(names(&store, Kind::IpamBlock).await, [""; 0]);
        }
        linux(&store, "b").assign(&request("q")).await.unwrap();
    }
}

/// What a Windows node that has vanished leaves behind belongs to nobody.
#[tokio::test]
async fn a_block_that_a_windows_node_has_left_is_taken_over_when_it_is_empty() {
    let store = cluster(&[("one", "10.0.0.0/29", Some(29))]).await;
    let of_windows = windows(&store, "w");
    of_windows.assign(&request("w.0")).await.unwrap();
    let mut left = value(&store, Kind::IpamBlock, "10.0.0.0/29").await.unwrap();
    left["affinity"] = Value::Null;
    put(&store, &Key::global(Kind::IpamBlock, "10.0.0.0/29"), left.clone()).await;
    for affinity in names(&store, Kind::BlockAffinity).await {
        store.delete(&Key::global(Kind::BlockAffinity, affinity), None).await.unwrap();
    }
    assert!(linux(&store, "a").assign(&request("a.0")).await.is_err(), "it has an address");
    // Without owner, the release of the last address deletes the block. Calico leaves it if that release fails.
    linux(&store, "a").release("w.0").await.unwrap();
    let empty = tortie_api::ipam::Block::new("10.0.0.0/29".parse().unwrap(), "w", true, 1, String::new());
    let mut empty = serde_json::to_value(empty).unwrap();
    empty["affinity"] = Value::Null;
    put(&store, &Key::global(Kind::IpamBlock, "10.0.0.0/29"), empty).await;
    fill(&linux(&store, "a"), "a", 8).await;
}
