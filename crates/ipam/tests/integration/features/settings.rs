//! Reservations, limits and cool-down.

use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_ipam::{Count, Ipam, IpamError};
use tortie_store::{Embedded, Store};

use crate::features::support::{allocated, block, cluster, configure, linux, names, put, request, value};

async fn reserve(store: &Embedded, cidrs: serde_json::Value) {
    let reservation = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPReservation", "metadata": {"name": "r"},
        "spec": {"reservedCIDRs": cidrs},
    });
    put(store, &Key::global(Kind::IpReservation, "r"), reservation).await;
}

async fn fill(ipam: &Ipam) -> (Vec<String>, IpamError) {
    let mut addresses = Vec::new();
    loop {
        match ipam.assign(&request(&format!("h{}", addresses.len()))).await {
            Ok(assigned) => addresses.push(assigned.address.to_string()),
            Err(error) => {
                addresses.sort();
                return (addresses, error);
            }
        }
    }
}

#[tokio::test]
async fn reserved_addresses_are_not_given() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(30))]).await;
    // A whole block, a block in two parts, an address, and what is elsewhere.
    reserve(
        &store,
        json!(["10.0.0.0/30", "10.0.0.4/31", "10.0.0.6/31", "10.0.0.9", "192.0.2.0/24", "fd00::/8"]),
    )
    .await;
    let (given, error) = fill(&linux(&store, "mine")).await;
    assert_eq!(
        given,
        ["10.0.0.10", "10.0.0.11", "10.0.0.12", "10.0.0.13", "10.0.0.14", "10.0.0.15", "10.0.0.8"]
    );
    assert!(matches!(error, IpamError::Exhausted { blocks: 2, .. }), "{error}");
    assert_eq!(names(&store, Kind::IpamBlock).await, ["10.0.0.12/30", "10.0.0.8/30"]);
    // The reserved one stays where it is in the queue.
    assert_eq!(block(&store, "10.0.0.8/30").await.unwrap().unallocated, [1]);
}

/// What is allocated stays so.
#[tokio::test]
async fn a_reservation_leaves_addresses_in_use_alone() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29))]).await;
    let mine = linux(&store, "mine");
    let assigned = mine.assign(&request("a")).await.unwrap();
    reserve(&store, json!(["10.0.0.0/29"])).await;
    assert_eq!(linux(&store, "mine").assign(&request("a")).await.unwrap(), assigned);
    assert!(linux(&store, "mine").assign(&request("b")).await.is_err());
    // Nothing is given while a reservation cannot be read, but what is in use can be released.
    reserve(&store, json!(["10.0.0.5-10.0.0.9"])).await;
    assert!(matches!(linux(&store, "mine").assign(&request("b")).await, Err(IpamError::Damaged { .. })));
    assert_eq!(linux(&store, "mine").release("a").await.unwrap(), [assigned.address]);
}

/// An IPv6 reservation has more blocks than anybody can count.
#[tokio::test]
async fn a_reservation_of_half_of_a_large_pool_is_passed_at_once() {
    for half in ["fd00::/49", "fd00:0:0:8000::/49"] {
        let store = cluster(&[("six", "fd00::/48", None)]).await;
        reserve(&store, json!([half])).await;
        for node in ["a", "b", "c", "d"] {
            let assigned =
                linux(&store, node).assign_all(&request(node), Count { ipv4: 0, ipv6: 1 }).await.unwrap();
            let half: ipnet::IpNet = half.parse().unwrap();
            assert!(!half.contains(&assigned[0].address), "{assigned:?}");
        }
    }
}

/// Otherwise somebody else may have the addresses that a reservation was to keep.
#[tokio::test]
async fn a_reservation_that_cannot_be_read_stops_the_allocation() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(30))]).await;
    reserve(&store, json!(["10.0.0.0/33"])).await;
    let error = linux(&store, "mine").assign(&request("a")).await.unwrap_err().to_string();
    assert!(error.contains("IPReservation r") && error.contains("10.0.0.0/33"), "{error}");
}

#[tokio::test]
async fn a_node_has_at_most_as_many_blocks_of_each_family_as_configured() {
    let store = cluster(&[("four", "10.0.0.0/24", Some(30)), ("six", "fd00::/120", Some(126))]).await;
    configure(&store, json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 2}))
        .await;
    let mine = linux(&store, "mine");
    let (given, error) = fill(&mine).await;
    assert!(matches!(error, IpamError::Exhausted { blocks: 2, limit: 2, .. }), "{error}");
    assert_eq!(given.len(), 8);
    assert_eq!(mine.assign_all(&request("six"), Count { ipv4: 0, ipv6: 8 }).await.unwrap().len(), 8);
    assert!(mine.assign_all(&request("six"), Count { ipv4: 0, ipv6: 9 }).await.is_err());
}

/// As Calico writes it: the address stays allocated, to an attribute with the time of the release.
#[tokio::test]
async fn a_released_address_rests_for_the_time_of_the_cool_down() {
    let store = cluster(&[("four", "10.0.0.0/31", Some(31))]).await;
    configure(
        &store,
        json!({"strict_affinity": true, "auto_allocate_blocks": true, "ipCooldownSeconds": 3600}),
    )
    .await;
    let mine = linux(&store, "mine");
    let first = mine.assign(&request("a")).await.unwrap();
    mine.assign(&request("b")).await.unwrap();
    assert_eq!(mine.release("a").await.unwrap(), [first.address]);
    assert_eq!(mine.release("a").await.unwrap(), [] as [std::net::IpAddr; 0]);
    assert_eq!(names(&store, Kind::IpamHandle).await, ["b"]);
    assert_eq!(allocated(&store).await.len(), 1, "a resting address belongs to nobody");
    assert!(matches!(mine.assign(&request("c")).await, Err(IpamError::Exhausted { .. })));
    let mut stored = value(&store, Kind::IpamBlock, "10.0.0.0/31").await.unwrap();
    let resting = stored["allocations"][0].as_u64().unwrap();
    let attribute = &mut stored["attributes"][usize::try_from(resting).unwrap()];
    assert_eq!(attribute.as_object().unwrap().keys().collect::<Vec<_>>(), ["releasedAt"]);
    assert_eq!(
        (&stored["unallocated"], &stored["sequenceNumberForAllocation"]["0"]),
        (&json!([]), &stored["sequenceNumberForAllocation"]["0"])
    );

    // An hour later.
    let long_ago = "2026-01-01T00:00:00Z";
    stored["attributes"][usize::try_from(resting).unwrap()] = json!({"releasedAt": long_ago});
    put(&store, &Key::global(Kind::IpamBlock, "10.0.0.0/31"), stored).await;
    assert_eq!(linux(&store, "mine").assign(&request("c")).await.unwrap().address, first.address);
}

/// Calico may have stopped in the middle of a release, or its cool-down was switched off.
#[tokio::test]
async fn without_cool_down_a_resting_address_is_free() {
    let store = cluster(&[("four", "10.0.0.0/31", Some(31))]).await;
    let mine = linux(&store, "mine");
    let first = mine.assign(&request("a")).await.unwrap();
    let mut stored = value(&store, Kind::IpamBlock, "10.0.0.0/31").await.unwrap();
    stored["attributes"] = json!([{"releasedAt": "2026-01-01T00:00:00Z"}]);
    put(&store, &Key::global(Kind::IpamBlock, "10.0.0.0/31"), stored).await;
    store.delete(&Key::global(Kind::IpamHandle, "a"), None).await.unwrap();
    let other = linux(&store, "mine");
    let given = [other.assign(&request("b")).await.unwrap(), other.assign(&request("c")).await.unwrap()];
    assert!(given.contains(&first), "{given:?}");
}
