//! Releasing single addresses, blocks, and everything of a node.

use std::net::IpAddr;

use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_ipam::{Count, Given, IpamError, Records, Release, Request};
use tortie_store::Store;

use crate::features::support::{
    allocated, block, cluster, configure, linux, names, put, request, value, windows,
};

fn release(address: IpAddr, handle: Option<&str>, sequence_number: Option<u64>) -> Release {
    Release { address, handle: handle.map(str::to_owned), sequence_number }
}

#[tokio::test]
async fn an_address_is_released_only_if_it_is_what_was_seen() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29))]).await;
    let records = Records::new(store.clone());
    let mine = linux(&store, "mine");
    let one = mine.assign(&request("a")).await.unwrap();
    let two = mine.assign(&request("b")).await.unwrap();
    let number = block(&store, "10.0.0.0/29").await.unwrap().sequence_of(one.address);
    let before = value(&store, Kind::IpamBlock, "10.0.0.0/29").await;
    // It was given again meanwhile, or the caller knows what is not written yet.
    let [before_it, after_it] = [number.map(|it| it - 1), number.map(|it| it + 1)];
    for wrong in [
        release(one.address, Some("b"), number),
        release(one.address, Some("a"), before_it),
        release(one.address, Some("a"), after_it),
    ] {
        // Nothing of the call is done.
        let error = records.release_addresses(one.block, &[release(two.address, None, None), wrong]).await;
        assert!(matches!(error, Err(IpamError::Changed { .. })), "{error:?}");
        assert_eq!(value(&store, Kind::IpamBlock, "10.0.0.0/29").await, before);
    }
    let released =
        records.release_addresses(one.block, &[release(one.address, Some("a"), number)]).await.unwrap();
    assert_eq!(released, [one.address]);
    assert_eq!(names(&store, Kind::IpamHandle).await, ["b"]);
    // Again, and what nobody has.
    for address in [one.address, "10.0.0.7".parse().unwrap(), "10.9.0.7".parse().unwrap()] {
        let released =
            records.release_addresses(one.block, &[release(address, Some("a"), number)]).await.unwrap();
        assert_eq!(released, [] as [IpAddr; 0]);
    }
    // The node's own allocator has the old cached block.
    mine.assign(&request("c")).await.unwrap();
    assert_eq!(allocated(&store).await.len(), 2);
}

/// The record of a handle names a block until the last address of it is released.
#[tokio::test]
async fn a_handle_is_forgotten_block_by_block() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29)), ("six", "fd00::/125", Some(125))]).await;
    let records = Records::new(store.clone());
    let assigned = linux(&store, "mine").assign_all(&request("a"), Count { ipv4: 2, ipv6: 1 }).await.unwrap();
    let expected = [vec!["10.0.0.0/29", "fd00::/125"], vec!["fd00::/125"], vec![]];
    for (assignment, blocks) in assigned.iter().zip(expected) {
        let one = [release(assignment.address, Some("a"), None)];
        records.release_addresses(assignment.block, &one).await.unwrap();
        let record = value(&store, Kind::IpamHandle, "a").await;
        let named: Vec<String> =
            record.iter().flat_map(|record| record["block"].as_object().unwrap().keys().cloned()).collect();
        assert_eq!(named, blocks);
    }
    assert_eq!(names(&store, Kind::IpamHandle).await, [""; 0]);
}

#[tokio::test]
async fn a_block_is_given_up_empty_or_as_it_is() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    let records = Records::new(store.clone());
    let mine = linux(&store, "mine");
    let assigned = mine.assign(&request("a")).await.unwrap();
    let cidr = assigned.block.to_string();
    let affinity = format!("mine/{cidr}");
    let number = block(&store, &cidr).await.unwrap().sequence_number;
    assert_eq!(records.give_up_block("mine", assigned.block, true, None).await.unwrap(), Given::InUse);
    assert_eq!(
        records.give_up_block("mine", assigned.block, false, Some(number - 1)).await.unwrap(),
        Given::Changed
    );
    assert_eq!(value(&store, Kind::BlockAffinity, &affinity).await.unwrap()["state"], "confirmed");
    // A crash of an earlier attempt.
    put(&store, &Key::global(Kind::BlockAffinity, &affinity), json!({"state": "pendingDeletion"})).await;
    assert_eq!(records.give_up_block("mine", assigned.block, true, None).await.unwrap(), Given::InUse);
    assert_eq!(value(&store, Kind::BlockAffinity, &affinity).await.unwrap()["state"], "confirmed");

    assert_eq!(records.give_up_block("mine", assigned.block, false, Some(number)).await.unwrap(), Given::Up);
    let left = value(&store, Kind::IpamBlock, &cidr).await.unwrap();
    assert_eq!((&left["affinity"], &left["affinity_claim_time"]), (&json!(null), &json!(null)));
    assert_eq!(names(&store, Kind::BlockAffinity).await, [""; 0]);
    assert_eq!(allocated(&store).await.len(), 1);
    assert_ne!(mine.assign(&request("b")).await.unwrap().block, assigned.block);

    windows(&store, "w").ensure_blocks().await.unwrap_err();
    let of_mine = mine.find("b").await.unwrap()[0].block;
    mine.release("b").await.unwrap();
    assert_eq!(records.give_up_block("mine", of_mine, true, None).await.unwrap(), Given::Up);
    assert_eq!(names(&store, Kind::IpamBlock).await, [cidr]);
    // What Windows reserves does not count.
    windows(&store, "w").ensure_blocks().await.unwrap();
    assert_eq!(records.give_up_block("w", of_mine, true, None).await.unwrap(), Given::Up);
}

#[tokio::test]
async fn everything_of_a_node_is_released() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29)), ("six", "fd00::/120", Some(125))]).await;
    configure(&store, json!({"strict_affinity": false, "auto_allocate_blocks": true})).await;
    let (gone, stays) = (linux(&store, "gone"), linux(&store, "stays"));
    let of = |node: &str, handle: String| Request {
        owner: [("node".to_owned(), node.to_owned())].into(),
        ..request(&handle)
    };
    for number in 0..9 {
        stays.assign_all(&of("stays", format!("s{number}")), Count { ipv4: 1, ipv6: 1 }).await.unwrap();
        if number < 7 {
            gone.assign_all(&of("gone", format!("g{number}")), Count { ipv4: 1, ipv6: 1 })
                .await
                .unwrap_or_default();
        }
    }
    let before = allocated(&store).await;
    let of_stays = before.values().filter(|handle| handle.starts_with('s')).count();
    let cleared = Records::new(store.clone()).release_node("gone").await.unwrap();
    assert_eq!(cleared.addresses.len(), before.len() - of_stays);
    assert!(cleared.blocks.len() >= 2, "{cleared:?}");
    let after = allocated(&store).await;
    assert_eq!(after.len(), of_stays);
    assert!(after.values().all(|handle| handle.starts_with('s')));
    assert!(names(&store, Kind::BlockAffinity).await.iter().all(|name| name.starts_with("stays/")));
    assert!(names(&store, Kind::IpamHandle).await.iter().all(|name| name.starts_with('s')));
    for name in names(&store, Kind::IpamBlock).await {
        let block = block(&store, &name).await.unwrap();
        assert!(block.belongs_to("stays") || (block.affinity.is_none() && !block.is_empty()), "{block:?}");
    }
    let again = Records::new(store.clone()).release_node("gone").await.unwrap();
    assert_eq!(again, tortie_ipam::Cleared::default());
    // The other node goes on.
    for number in 0..9 {
        stays.release(&format!("s{number}")).await.unwrap();
    }
    assert_eq!(allocated(&store).await.len(), 0);
}

/// What cannot be read may belong to the node; the rest is released all the same.
#[tokio::test]
async fn a_damaged_block_of_a_node_is_an_error_after_the_rest() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    let gone = linux(&store, "gone");
    gone.assign(&request("a")).await.unwrap();
    let other = names(&store, Kind::IpamBlock).await[0].clone();
    let damaged = if other == "10.0.0.0/29" { "10.0.0.8/29" } else { "10.0.0.0/29" };
    store.create(&Key::global(Kind::IpamBlock, damaged), json!({"affinity": "host:gone"})).await.unwrap();
    let error = Records::new(store.clone()).release_node("gone").await.unwrap_err();
    assert!(error.to_string().contains(damaged), "{error}");
    assert_eq!(names(&store, Kind::IpamBlock).await, [damaged]);
}

/// A crash may have left a claim of a block that another node has won.
#[tokio::test]
async fn a_claim_of_another_nodes_block_is_given_up_whatever_the_block_has() {
    let store = cluster(&[("one", "10.0.0.0/29", Some(29))]).await;
    linux(&store, "a").assign(&request("p")).await.unwrap();
    let claim = Key::global(Kind::BlockAffinity, "b/10.0.0.0/29");
    let before = block(&store, "10.0.0.0/29").await;
    for number in [None, Some(1)] {
        put(&store, &claim, json!({"state": "pending"})).await;
        let cidr = "10.0.0.0/29".parse().unwrap();
        let given = Records::new(store.clone()).give_up_block("b", cidr, true, number).await;
        assert_eq!(given.unwrap(), Given::Up);
        assert_eq!(names(&store, Kind::BlockAffinity).await, ["a/10.0.0.0/29"]);
        assert_eq!(block(&store, "10.0.0.0/29").await, before, "the owner keeps it");
    }
}
