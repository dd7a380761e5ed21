//! IPv6 and dual stack.

use std::net::Ipv6Addr;

use ipnet::IpNet;
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_ipam::{Count, Family, IpamError, Request};
use tortie_store::Store;

use crate::features::support::{allocated, block, cluster, linux, names, put, request, value, windows};

/// As Calico writes it for a pod with addresses of both families.
#[tokio::test]
async fn a_handle_with_an_ipv6_block_is_released() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    let mine = linux(&store, "mine");
    mine.assign(&request("pod")).await.unwrap();
    let six = "fd80:24e2:f998:72d6::/122";
    let mut allocations = vec![json!(null); 64];
    allocations[5] = json!(0);
    let unallocated: Vec<usize> = (0..64).filter(|offset| *offset != 5).collect();
    let stored = json!({
        "cidr": six, "affinity": "host:mine", "allocations": allocations, "unallocated": unallocated,
        "attributes": [{"handle_id": "pod", "secondary": {"pod": "p", "namespace": "n", "node": "mine"}}],
        "sequenceNumber": 7, "sequenceNumberForAllocation": {"5": 6}, "deleted": false, "strictAffinity": false,
    });
    put(&store, &Key::global(Kind::IpamBlock, six), stored).await;
    let handle = Key::global(Kind::IpamHandle, "pod");
    let mut record = store.get(&handle).await.unwrap().unwrap().value;
    record["block"][six] = json!(1);
    put(&store, &handle, record).await;

    let found = mine.find("pod").await.unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(found[1].address.to_string(), "fd80:24e2:f998:72d6::5");
    assert_eq!(mine.handles().await.unwrap().len(), 1);
    let mut released = mine.release("pod").await.unwrap();
    released.sort();
    assert_eq!(released, found.iter().map(|one| one.address).collect::<Vec<_>>());
    assert_eq!(names(&store, Kind::IpamHandle).await, [""; 0]);
    let block = block(&store, six).await.unwrap();
    assert_eq!(block.allocated().count(), 0);
    assert_eq!(block.unallocated.last(), Some(&5));
    assert_eq!(block.sequence_number, 8);
    assert_eq!(value(&store, Kind::IpamBlock, six).await.unwrap()["strictAffinity"], false);
}

#[tokio::test]
async fn an_ipv6_block_has_64_addresses_by_default() {
    let store = cluster(&[("six", "fd00:10::/48", None)]).await;
    let mine = linux(&store, "mine");
    let of_ipv6 = |handle: &str| Request { family: Family::V6, ..request(handle) };
    let first = mine.assign(&of_ipv6("h0")).await.unwrap();
    assert_eq!((first.block.prefix_len(), first.address), (122, first.block.network()));
    for number in 1..64 {
        assert_eq!(mine.assign(&of_ipv6(&format!("h{number}"))).await.unwrap().block, first.block);
    }
    assert_ne!(mine.assign(&of_ipv6("h64")).await.unwrap().block, first.block);
    let blocks = names(&store, Kind::IpamBlock).await;
    let affinities = names(&store, Kind::BlockAffinity).await;
    assert_eq!(affinities, blocks.iter().map(|block| format!("mine/{block}")).collect::<Vec<_>>());
    assert!(matches!(mine.assign(&request("four")).await, Err(IpamError::NoPool(_))));
}

/// A handle gets what is missing, and nothing more.
#[tokio::test]
async fn a_handle_gets_as_many_addresses_of_each_family_as_it_needs() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29)), ("six", "fd00::/120", Some(125))]).await;
    let mine = linux(&store, "mine");
    for (ipv4, ipv6) in [(1, 0), (1, 1), (0, 1), (3, 1), (3, 9), (2, 2)] {
        let count = Count { ipv4, ipv6 };
        let assigned = mine.assign_all(&request("pod"), count).await.unwrap();
        assert_eq!(
            mine.assign_all(&request("pod"), count).await.unwrap(),
            assigned,
            "{count:?}, asked again"
        );
        let of_ipv4 = assigned.iter().filter(|one| one.address.is_ipv4()).count();
        assert!(of_ipv4 >= ipv4 && assigned.len() - of_ipv4 >= ipv6, "{count:?}: {assigned:?}");
    }
    assert_eq!(allocated(&store).await.len(), 12, "three of IPv4 and nine of IPv6");
    assert_eq!(names(&store, Kind::IpamBlock).await.len(), 3);
    assert_eq!(mine.release("pod").await.unwrap().len(), 12);
    assert_eq!(allocated(&store).await.len(), 0);
    assert_eq!(names(&store, Kind::IpamHandle).await, [""; 0]);
}

/// One family may be full; the handle's record then frees what the other one gave.
#[tokio::test]
async fn a_family_that_is_full_gives_an_error_and_nothing_leaks() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29)), ("six", "fd00::/125", Some(125))]).await;
    let mine = linux(&store, "mine");
    let error = mine.assign_all(&request("pod"), Count { ipv4: 2, ipv6: 9 }).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, .. }), "{error}");
    assert_eq!(mine.release("pod").await.unwrap().len(), 10);
    assert_eq!(allocated(&store).await.len(), 0);
}

/// The network of a Windows node needs the same addresses of both families.
#[tokio::test]
async fn a_windows_node_reserves_ipv6_addresses_too() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    for (name, cidr, size) in [("a-six-small", "fd01::/120", 126), ("six", "fd00::/120", 125)] {
        let spec = json!({"cidr": cidr, "blockSize": size, "vxlanMode": "Never"});
        put(&store, &Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}))
            .await;
    }
    let node = windows(&store, "w");
    let block = node.ensure_ipv6_block().await.unwrap().unwrap();
    assert!("fd00::/120".parse::<IpNet>().unwrap().contains(&IpNet::V6(block)), "{block} is large enough");
    assert_eq!(node.ensure_ipv6_block().await.unwrap(), Some(block), "asked again, the same");
    let assigned = node.assign_all(&request("p"), Count { ipv4: 1, ipv6: 4 }).await.unwrap();
    let [first, last] = [3, 6].map(|offset| Ipv6Addr::from(u128::from(block.network()) + offset));
    assert_eq!((assigned[1].address, assigned[4].address), (first.into(), last.into()));
    let error = node.assign_all(&request("q"), Count { ipv4: 0, ipv6: 1 }).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, .. }), "{error}");
}

/// Nobody would reach addresses of a pool with VXLAN.
#[tokio::test]
async fn a_windows_node_needs_an_ipv6_pool_without_vxlan() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    let node = windows(&store, "w");
    assert_eq!((node.has_ipv6_pool().await.unwrap(), node.ensure_ipv6_block().await.unwrap()), (false, None));
    let key = Key::global(Kind::IpPool, "six");
    let pool =
        |mode: &str| json!({"metadata": {"name": "six"}, "spec": {"cidr": "fd00::/120", "vxlanMode": mode}});
    put(&store, &key, pool("Always")).await;
    assert_eq!((node.has_ipv6_pool().await.unwrap(), node.ensure_ipv6_block().await.unwrap()), (false, None));
    let chosen = Request { family: Family::V6, pools: vec!["six".to_owned()], ..request("p") };
    let error = node.assign(&chosen).await.unwrap_err();
    assert!(
        error.to_string().contains("the IPPool has IPv6 in VXLAN, and Windows nodes have none"),
        "{error}"
    );
    assert!(linux(&store, "l").assign(&chosen).await.is_ok());
    put(&store, &key, pool("CrossSubnet")).await;
    assert!(node.has_ipv6_pool().await.unwrap() && node.ensure_ipv6_block().await.unwrap().is_some());
}

/// Nobody can read such a block; its claim must not take gigabytes.
#[tokio::test]
async fn an_ipv6_affinity_of_another_size_is_left_alone() {
    let store = cluster(&[("six", "fd00::/64", None)]).await;
    put(&store, &Key::global(Kind::BlockAffinity, "mine/fd00::/70"), json!({"state": "pending"})).await;
    let assigned = linux(&store, "mine").assign_all(&request("p"), Count { ipv4: 0, ipv6: 1 }).await.unwrap();
    assert_eq!(assigned[0].block.prefix_len(), 122);
    assert_eq!(value(&store, Kind::BlockAffinity, "mine/fd00::/70").await.unwrap()["state"], "pending");
}
