//! Addresses and pools that a pod requests.

use std::net::IpAddr;
use std::sync::Arc;

use crate::features::support::{
    allocated, block, cluster, configure, linux, names, put_pool, request, windows,
};
use serde_json::json;
use tortie_api::Kind;
use tortie_ipam::{Family, IpamError, Request};
use tortie_store::Embedded;

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

async fn borrowing() -> Arc<Embedded> {
    let store = cluster(&[("default", "10.0.0.0/24", Some(28))]).await;
    configure(&store, json!({"strict_affinity": false, "auto_allocate_blocks": true})).await;
    store
}

#[tokio::test]
async fn a_requested_address_claims_its_block_and_is_given_once() {
    let store = cluster(&[("default", "10.0.0.0/24", Some(28)), ("six", "fd00::/112", None)]).await;
    let one = linux(&store, "one");
    for (handle, wanted, cidr) in [
        ("a", "10.0.0.37", "10.0.0.32/28"),
        ("b", "10.0.0.32", "10.0.0.32/28"),
        ("a", "fd00::5", "fd00::/122"),
    ] {
        let given = one.assign_address(&request(handle), address(wanted)).await.unwrap();
        assert_eq!((given.address, given.block.to_string()), (address(wanted), cidr.to_owned()));
        let again = linux(&store, "one").assign_address(&request(handle), address(wanted)).await.unwrap();
        assert_eq!(again, given, "asked again, the same");
        assert!(block(&store, cidr).await.unwrap().belongs_to("one"));
    }
    assert_eq!(names(&store, Kind::BlockAffinity).await, ["one/10.0.0.32/28", "one/fd00::/122"]);
    assert_eq!(allocated(&store).await.len(), 3);
    // The block serves others, too.
    let next = one.assign(&request("c")).await.unwrap();
    assert_eq!(next.block.to_string(), "10.0.0.32/28");
    let error = one.assign_address(&request("a"), address("10.0.0.40")).await.unwrap_err();
    assert!(matches!(error, IpamError::HasAnother { .. }), "{error}");
    let mut released = one.release("a").await.unwrap();
    released.sort();
    assert_eq!(released, [address("10.0.0.37"), address("fd00::5")]);
    one.assign_address(&request("d"), address("10.0.0.37")).await.unwrap();
}

#[tokio::test]
async fn a_taken_address_names_who_has_it() {
    let store = borrowing().await;
    let owner = [("namespace", "shop"), ("pod", "till"), ("node", "one")];
    let owner = owner.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let till = Request { owner, ..request("net.c1") };
    linux(&store, "one").assign_address(&till, address("10.0.0.5")).await.unwrap();
    let tunnel = [("type", "vxlanTunnelAddress"), ("node", "one")];
    let owner = tunnel.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let tunnel = Request { owner, ..request("vxlan-tunnel-addr-one") };
    linux(&store, "one").assign_address(&tunnel, address("10.0.0.6")).await.unwrap();
    for (wanted, holder) in [
        ("10.0.0.5", "pod shop/till has it on node one (handle net.c1)"),
        ("10.0.0.6", "it is a vxlanTunnelAddress on node one (handle vxlan-tunnel-addr-one)"),
    ] {
        for node in ["one", "two"] {
            let error =
                linux(&store, node).assign_address(&request("other"), address(wanted)).await.unwrap_err();
            assert!(error.to_string().contains(holder), "{error}");
        }
    }
    assert_eq!(names(&store, Kind::IpamHandle).await, ["net.c1", "vxlan-tunnel-addr-one"]);
}

#[tokio::test]
async fn a_released_address_rests_for_whoever_requests_it() {
    let store = cluster(&[("default", "10.0.0.0/28", Some(28))]).await;
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true, "ipCooldownSeconds": 600});
    configure(&store, config).await;
    let one = linux(&store, "one");
    one.assign_address(&request("a"), address("10.0.0.5")).await.unwrap();
    one.release("a").await.unwrap();
    let error = one.assign_address(&request("b"), address("10.0.0.5")).await.unwrap_err();
    assert!(error.to_string().contains("and cools down"), "{error}");
}

#[tokio::test]
async fn addresses_of_other_nodes_are_borrowed_unless_affinity_is_strict() {
    for strict in [false, true] {
        let store = borrowing().await;
        configure(&store, json!({"strict_affinity": strict, "auto_allocate_blocks": true})).await;
        linux(&store, "one").assign_address(&request("a"), address("10.0.0.5")).await.unwrap();
        let borrowed = linux(&store, "two").assign_address(&request("b"), address("10.0.0.6")).await;
        match borrowed {
            Ok(_) => assert!(!strict),
            Err(error) => {
                assert!(strict && matches!(error, IpamError::OfAnother { .. }), "{error}");
                assert!(error.to_string().contains("in block 10.0.0.0/28 of one: with strict"), "{error}");
            }
        }
        assert!(block(&store, "10.0.0.0/28").await.unwrap().belongs_to("one"));
    }
}

/// Not in either direction, and not what Windows needs itself.
#[tokio::test]
async fn requested_addresses_are_not_borrowed_from_or_by_windows_nodes() {
    let store = cluster(&[("default", "10.0.0.0/24", Some(28))]).await;
    let minion = windows(&store, "minion");
    minion.assign_address(&request("a"), address("10.0.0.5")).await.unwrap();
    for reserved in ["10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.15"] {
        let error = minion.assign_address(&request("b"), address(reserved)).await.unwrap_err();
        assert!(error.to_string().contains("a Windows node needs it itself"), "{error}");
    }
    let error = minion.assign_address(&request("b"), address("10.0.0.20")).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, limit: 1, .. }), "{error}");
    linux(&store, "one").assign_address(&request("c"), address("10.0.0.20")).await.unwrap();
    let error = minion.assign_address(&request("b"), address("10.0.0.21")).await.unwrap_err();
    assert!(error.to_string().contains("a Windows node cannot use"), "{error}");
    configure(&store, json!({"strict_affinity": false, "auto_allocate_blocks": true})).await;
    let error = linux(&store, "one").assign_address(&request("d"), address("10.0.0.6")).await.unwrap_err();
    assert!(error.to_string().contains("are only for that node"), "{error}");
}

/// As in Calico: neither selectors, nor reservations, nor the limit of blocks.
#[tokio::test]
async fn only_the_pool_decides_whether_a_requested_address_can_be_given() {
    let store = cluster(&[]).await;
    put_pool(
        &store,
        "default",
        json!({"cidr": "10.0.0.0/24", "blockSize": 28, "vxlanMode": "Always",
        "nodeSelector": "has(nobody)", "assignmentMode": "Manual", "allowedUses": ["Workload"]}),
    )
    .await;
    put_pool(&store, "off", json!({"cidr": "10.1.0.0/24", "vxlanMode": "Always", "disabled": true})).await;
    put_pool(
        &store,
        "tunnels",
        json!({"cidr": "10.2.0.0/24", "vxlanMode": "Always", "allowedUses": ["Tunnel"]}),
    )
    .await;
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 1});
    configure(&store, config).await;
    let one = linux(&store, "one");
    assert!(matches!(one.assign(&request("x")).await, Err(IpamError::NoPool(_))));
    for (handle, wanted) in [("a", "10.0.0.5"), ("b", "10.0.0.20")] {
        one.assign_address(&request(handle), address(wanted)).await.unwrap();
    }
    for (wanted, problem) in [
        ("10.1.0.5", "is in no enabled IPPool"),
        ("10.9.0.5", "is in no enabled IPPool"),
        ("10.2.0.5", "allowedUses lack Workload"),
    ] {
        let error = one.assign_address(&request("c"), address(wanted)).await.unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
}

#[tokio::test]
async fn requested_pools_are_used_whatever_they_select() {
    let store = cluster(&[("default", "10.0.0.0/24", Some(28)), ("six", "fd00::/112", None)]).await;
    let own = json!({"cidr": "10.1.0.0/24", "blockSize": 28, "vxlanMode": "Always", "nodeSelector": "has(nobody)",
        "assignmentMode": "Manual"});
    put_pool(&store, "own", own).await;
    put_pool(&store, "off", json!({"cidr": "10.2.0.0/24", "vxlanMode": "Always", "disabled": true})).await;
    let one = linux(&store, "one");
    let wants = |handle: &str, pools: &[&str]| Request {
        pools: pools.iter().map(|pool| (*pool).to_owned()).collect(),
        ..request(handle)
    };
    assert_eq!(one.assign(&request("a")).await.unwrap().address.to_string()[..6], *"10.0.0");
    for (number, pools) in [&["own"][..], &["10.1.0.0/24"], &["own", "own"]].into_iter().enumerate() {
        let given = one.assign(&wants(&format!("b{number}"), pools)).await.unwrap();
        assert_eq!(given.address.to_string()[..6], *"10.1.0", "{pools:?}");
    }
    // What is cached for one kind of request is not given to another one.
    assert_eq!(one.assign(&request("c")).await.unwrap().address.to_string()[..6], *"10.0.0");
    let six = Request { family: Family::V6, ..wants("d", &["six"]) };
    assert!(one.assign(&six).await.unwrap().address.is_ipv6());
    for (pools, problem) in [
        (&["none"][..], "no IPPool has this name"),
        (&["10.1.0.0/25"], "no IPPool has this name or network"),
        (&["off"], "is disabled"),
        (&["own", "six"], "of the other family"),
    ] {
        let error = one.assign(&wants("e", pools)).await.unwrap_err();
        assert!(matches!(&error, IpamError::ChosenPool { .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
    }
    put_pool(&store, "tiny", json!({"cidr": "10.3.0.0/24", "blockSize": 30, "vxlanMode": "Always"})).await;
    let error = windows(&store, "minion").assign(&wants("f", &["tiny"])).await.unwrap_err();
    assert!(error.to_string().contains("too small for a Windows node"), "{error}");
}

/// Each family has a limit of its own.
#[tokio::test]
async fn a_windows_node_claims_the_block_of_a_request_beside_one_of_the_other_family() {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29)), ("six", "fd00::/124", Some(125))]).await;
    let minion = windows(&store, "minion");
    let of_six = Request { family: Family::V6, ..request("six") };
    minion.assign(&of_six).await.unwrap();
    let address = "10.0.0.5".parse().unwrap();
    assert_eq!(minion.assign_address(&request("four"), address).await.unwrap().address, address);
    // Now it has its one block.
    let error = minion.assign_address(&request("more"), "10.0.0.13".parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("none of the Windows node's blocks"), "{error}");
}
