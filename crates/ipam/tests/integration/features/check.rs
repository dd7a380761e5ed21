//! Findings of a check, and their repairs.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_ipam::{Count, Finding, Fix, Problem, Records, Request, Snapshot, check};
use tortie_store::{Embedded, Store};

use crate::features::support::{allocated, block, cluster, linux, names, put, request, value};

const GIVEN: &str = "2026-05-01 10:00:00.123456 +0000 UTC";
const GRACE: i64 = 900;

pub(crate) async fn snapshot(store: &Embedded) -> Snapshot {
    let list = async |kind| store.list(kind).await.unwrap().items;
    Snapshot {
        blocks: list(Kind::IpamBlock).await,
        handles: list(Kind::IpamHandle).await,
        affinities: list(Kind::BlockAffinity).await,
        pools: list(Kind::IpPool).await,
        endpoints: list(Kind::WorkloadEndpoint).await,
        pods: list(Kind::Pod).await,
        nodes: list(Kind::Node).await,
        services: list(Kind::Service).await,
    }
}

/// A quarter of an hour and a second after the addresses were given.
async fn findings(store: &Embedded) -> Vec<Finding> {
    let now: Timestamp = "2026-05-01T10:15:01Z".parse().unwrap();
    check(&snapshot(store).await, now, GRACE)
}

async fn kinds(store: &Embedded) -> Vec<(Problem, bool)> {
    findings(store).await.into_iter().map(|finding| (finding.kind, finding.fix.is_some())).collect()
}

async fn repair(store: &Arc<Embedded>) {
    let records = Records::new(store.clone());
    for fix in findings(store).await.into_iter().filter_map(|finding| finding.fix) {
        records.repair(&fix).await.unwrap();
    }
}

fn of_pod(node: &str, pod: &str, at: Option<&str>) -> Request {
    let mut owner: BTreeMap<String, String> =
        [("node", node), ("namespace", "n"), ("pod", pod)].map(|(a, b)| (a.to_owned(), b.to_owned())).into();
    owner.extend(at.map(|at| ("timestamp".to_owned(), at.to_owned())));
    Request { owner, ..request(&format!("net.{pod}")) }
}

async fn endpoint(store: &Embedded, pod: &str, networks: Value) {
    let value = json!({"spec": {"pod": pod, "ipNetworks": networks}});
    put(store, &Key::namespaced(Kind::WorkloadEndpoint, "n", format!("a-k8s-{pod}-eth0")), value).await;
}

async fn sound() -> Arc<Embedded> {
    let store = cluster(&[("four", "10.0.0.0/28", Some(29))]).await;
    put(&store, &Key::global(Kind::Node, "a"), json!({"metadata": {"name": "a"}})).await;
    let assigned = linux(&store, "a").assign(&of_pod("a", "sound", Some(GIVEN))).await.unwrap();
    endpoint(&store, "sound", json!([format!("{}/32", assigned.address)])).await;
    store
}

#[tokio::test]
async fn a_sound_cluster_has_no_findings() {
    let store = sound().await;
    let tunnel = [("node", "a"), ("type", "vxlanTunnelAddress")];
    let owner = tunnel.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
    linux(&store, "a").assign(&Request { owner, ..request("vxlan-tunnel-addr-a") }).await.unwrap();
    // Nobody knows whose it is, so it counts as used.
    linux(&store, "a").assign(&request("of-somebody")).await.unwrap();
    assert_eq!(findings(&store).await, []);
}

#[tokio::test]
async fn an_address_without_its_pod_is_a_leak_after_the_grace_period() {
    for (at, pod_status, expected) in [
        (Some(GIVEN), None, Some(true)),
        // A second too young.
        (Some("2026-05-01 10:00:02 +0000 UTC"), None, None),
        // Since when is unknown.
        (None, None, Some(false)),
        (Some("yesterday"), None, Some(false)),
        // The pod is about to be connected, has another address, or is done.
        (Some(GIVEN), Some(json!({})), None),
        (Some(GIVEN), Some(json!({"podIPs": [{"ip": "10.9.9.9"}]})), Some(true)),
        (Some(GIVEN), Some(json!({"phase": "Failed"})), Some(true)),
    ] {
        let store = sound().await;
        let lost = linux(&store, "a").assign(&of_pod("a", "lost", at)).await.unwrap();
        if let Some(status) = &pod_status {
            let pod = json!({"spec": {}, "status": status});
            put(&store, &Key::namespaced(Kind::Pod, "n", "lost"), pod).await;
        }
        let expected: Vec<_> = expected.into_iter().map(|fixed| (Problem::Leak, fixed)).collect();
        assert_eq!(kinds(&store).await, expected, "{at:?} {pod_status:?}");
        repair(&store).await;
        let is_released = expected == [(Problem::Leak, true)];
        assert_eq!(!allocated(&store).await.contains_key(&lost.address), is_released);
        assert_eq!(allocated(&store).await.len(), if is_released { 1 } else { 2 });
        if is_released {
            assert_eq!(findings(&store).await, []);
            assert_eq!(names(&store, Kind::IpamHandle).await, ["net.sound"]);
        }
    }
}

/// The address of an endpoint that cannot be read may be any.
#[tokio::test]
async fn nothing_counts_as_leaked_while_an_endpoint_cannot_be_read() {
    for networks in [json!(["10.0.0.x/32"]), json!("10.0.0.1/32"), json!([7])] {
        let store = sound().await;
        linux(&store, "a").assign(&of_pod("a", "lost", Some(GIVEN))).await.unwrap();
        endpoint(&store, "lost", networks).await;
        assert_eq!(kinds(&store).await, [(Problem::Damaged, false), (Problem::Leak, false)]);
    }
}

/// Between the check and its repair, another pod gets the address.
#[tokio::test]
async fn a_repair_leaves_an_address_that_has_changed() {
    let store = sound().await;
    let a = linux(&store, "a");
    for _ in 0..7 {
        a.assign(&of_pod("a", "lost", Some(GIVEN))).await.unwrap();
    }
    let Some(fix @ Fix::Release(..)) = findings(&store).await[0].fix.clone() else { panic!("no repair") };
    a.release("net.lost").await.unwrap();
    for number in 0..7 {
        a.assign(&of_pod("a", &format!("new{number}"), Some(GIVEN))).await.unwrap();
    }
    let before = allocated(&store).await;
    let error = Records::new(store.clone()).repair(&fix).await.unwrap_err();
    assert!(matches!(error, tortie_ipam::IpamError::Changed { .. }), "{error}");
    assert_eq!(allocated(&store).await, before);
}

#[tokio::test]
async fn what_a_missing_node_has_is_found_and_released() {
    let store = sound().await;
    let gone = linux(&store, "gone");
    gone.assign(&of_pod("gone", "p", Some("2026-05-01 10:15:00 +0000 UTC"))).await.unwrap();
    let tunnel = [("node", "gone"), ("type", "vxlanTunnelAddress")];
    let owner = tunnel.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
    gone.assign(&Request { owner, ..request("vxlan-tunnel-addr-gone") }).await.unwrap();
    assert_eq!(
        kinds(&store).await,
        [(Problem::Leak, true), (Problem::Leak, true), (Problem::Affinity, true)]
    );
    repair(&store).await;
    assert_eq!(findings(&store).await, []);
    assert_eq!(names(&store, Kind::BlockAffinity).await.len(), 1);
    assert_eq!(names(&store, Kind::IpamBlock).await.len(), 1);
    assert_eq!(names(&store, Kind::IpamHandle).await, ["net.sound"]);
}

/// Between the check and its repair, the missing node is created.
#[tokio::test]
async fn a_repair_leaves_the_block_in_use_of_a_node_that_exists_by_now() {
    for (exists, expected) in [(true, false), (false, true)] {
        let store = sound().await;
        linux(&store, "late").assign(&of_pod("late", "p", Some(GIVEN))).await.unwrap();
        let mut fixes = findings(&store).await.into_iter().filter_map(|finding| finding.fix);
        let give_up = fixes.rfind(|fix| matches!(fix, Fix::GiveUp(..))).expect("an affinity of no node");
        if exists {
            put(&store, &Key::global(Kind::Node, "late"), json!({"metadata": {"name": "late"}})).await;
        }
        assert_eq!(Records::new(store.clone()).repair(&give_up).await.unwrap(), expected);
        assert_eq!(names(&store, Kind::BlockAffinity).await.len(), if exists { 2 } else { 1 });
    }
}

#[tokio::test]
async fn duplicates_and_orphans_are_explained_and_not_repaired() {
    let store = sound().await;
    let (address, _) = allocated(&store).await.pop_first().unwrap();
    endpoint(&store, "twin", json!([format!("{address}/32")])).await;
    endpoint(&store, "orphan", json!(["10.0.0.9/32"])).await;
    // Outside the pools is not IPAM's business.
    endpoint(&store, "other", json!(["192.0.2.1/32"])).await;
    let found = findings(&store).await;
    let kinds: Vec<_> = found.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [Problem::Duplicate, Problem::Orphan], "{found:?}");
    assert!(found[0].why.contains("pods n/sound and n/twin"), "{}", found[0]);
    assert!(found[1].to_string().starts_with("orphan: 10.0.0.9: pod n/orphan"), "{}", found[1]);
    assert!(found.iter().all(|finding| finding.fix.is_none()));

    // An address that IPAM gave to somebody else.
    store.delete(&Key::namespaced(Kind::WorkloadEndpoint, "n", "a-k8s-sound-eth0"), None).await.unwrap();
    let found = findings(&store).await;
    assert!(found[0].why.contains("pod n/twin has it, and IPAM gave it to n/sound"), "{found:?}");

    let store = sound().await;
    let own = names(&store, Kind::IpamBlock).await[0].replace("/29", "/30");
    let part = tortie_api::ipam::Block::new(own.parse().unwrap(), "a", false, 1, String::new());
    put(&store, &Key::global(Kind::IpamBlock, &own), serde_json::to_value(part).unwrap()).await;
    let found = findings(&store).await;
    assert_eq!(found[0].kind, Problem::Duplicate, "{found:?}");
    assert!(found[0].why.contains(&own));
}

#[tokio::test]
async fn handles_affinities_and_blocks_that_do_not_fit_are_found() {
    let store = sound().await;
    let own = names(&store, Kind::IpamBlock).await[0].clone();
    let other = if own == "10.0.0.0/29" { "10.0.0.8/29" } else { "10.0.0.0/29" };
    // A handle of a crash, with a block that has no address of it and one that is missing.
    let record = json!({"block": {own.as_str(): 1, other: 2}, "deleted": false});
    put(&store, &Key::global(Kind::IpamHandle, "crashed"), record).await;
    // A claim that was withdrawn too late.
    put(&store, &Key::global(Kind::BlockAffinity, format!("a/{other}")), json!({"state": "confirmed"})).await;
    // A claim that is in progress.
    put(&store, &Key::global(Kind::BlockAffinity, "a/10.0.0.8/30"), json!({"state": "pending"})).await;
    let expected = [(Problem::Handle, true), (Problem::Handle, true), (Problem::Affinity, true)];
    assert_eq!(kinds(&store).await, expected);
    repair(&store).await;
    assert_eq!(findings(&store).await, []);
    assert_eq!(names(&store, Kind::IpamHandle).await, ["net.sound"]);
    assert_eq!(allocated(&store).await.len(), 1);

    // A block outside all pools, and without its affinity; an address without its record.
    store.delete(&Key::global(Kind::IpPool, "four"), None).await.unwrap();
    store.delete(&Key::global(Kind::BlockAffinity, format!("a/{own}")), None).await.unwrap();
    store.delete(&Key::global(Kind::IpamHandle, "net.sound"), None).await.unwrap();
    let expected = [(Problem::Handle, false), (Problem::Block, false), (Problem::Block, false)];
    assert_eq!(kinds(&store).await, expected);
}

/// What cannot be read may be what is missing, so it prevents repairs.
#[tokio::test]
async fn a_damaged_record_is_found_and_prevents_repairs() {
    let store = sound().await;
    put(&store, &Key::global(Kind::IpamHandle, "crashed"), json!({"block": {"10.0.0.0/29": 1}})).await;
    let own = names(&store, Kind::IpamBlock).await[0].clone();
    let mut stored = value(&store, Kind::IpamBlock, &own).await.unwrap();
    stored["unallocated"] = json!([0, 0]);
    put(&store, &Key::global(Kind::IpamBlock, &own), stored).await;
    let found = kinds(&store).await;
    assert!(found.contains(&(Problem::Damaged, false)), "{found:?}");
    assert!(found.iter().all(|(_, can_fix)| !can_fix), "{found:?}");
    assert!(store.get(&Key::global(Kind::IpamBlock, &own)).await.unwrap().is_some());
}

/// A dual-stack pod has one handle for two addresses.
#[tokio::test]
async fn a_leak_of_both_families_is_released_with_its_record() {
    let store = cluster(&[("four", "10.0.0.0/29", Some(29)), ("six", "fd00::/125", Some(125))]).await;
    put(&store, &Key::global(Kind::Node, "a"), json!({})).await;
    let lost = of_pod("a", "lost", Some(GIVEN));
    linux(&store, "a").assign_all(&lost, Count { ipv4: 2, ipv6: 1 }).await.unwrap();
    assert_eq!(kinds(&store).await, [(Problem::Leak, true); 3]);
    repair(&store).await;
    assert_eq!(allocated(&store).await.len(), 0);
    assert_eq!(names(&store, Kind::IpamHandle).await, [""; 0]);
    assert_eq!(findings(&store).await, []);
    assert!(block(&store, "fd00::/125").await.unwrap().is_empty());
}
