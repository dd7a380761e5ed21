//! What vanished nodes leave behind, in a store in memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_controllers::Nodes;
use tortie_ipam::{Ipam, Request, Use};
use tortie_store::{Embedded, Endpoints, Store};

use crate::common::{Disturbed, everything, global, memory, put, start, until, value};

const GRACE: Duration = Duration::from_secs(300);

fn pod(name: &str, node: &str) -> (Key, Value) {
    let value =
        json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"nodeName": node}});
    (Key::namespaced(Kind::Pod, "n", name), value)
}

/// Allocates an address, as an agent does.
async fn assign(store: &Arc<Embedded>, node: &str, handle: &str, owner: &[(&str, &str)]) -> String {
    let os = if node.starts_with("win") { "windows" } else { "linux" };
    let labels = BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]);
    let own = [("node", node)];
    let owner = owner.iter().chain(&own);
    let owner = owner.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let intended_use = if handle.contains("tunnel") { Use::Tunnel } else { Use::Workload };
    let request = Request { handle: handle.to_owned(), owner, intended_use, ..Request::default() };
    Ipam::new(store.clone(), node, labels).assign(&request).await.unwrap().address.to_string()
}

async fn add_pod(store: &Arc<Embedded>, name: &str, node: &str) {
    let address = assign(store, node, &format!("net.{name}"), &[("namespace", "n"), ("pod", name)]).await;
    let endpoint =
        Key::namespaced(Kind::WorkloadEndpoint, "n", WorkloadEndpoint::name_for(node, name, "eth0"));
    let spec =
        json!({"orchestrator": "k8s", "node": node, "pod": name, "ipNetworks": [format!("{address}/32")]});
    put(&**store, &endpoint, json!({"metadata": {"name": endpoint.name}, "spec": spec})).await;
    let (key, value) = pod(name, node);
    put(&**store, &key, value).await;
}

/// A node with two pods.
async fn add_node(store: &Arc<Embedded>, node: &str) {
    put(&**store, &global(Kind::Node, node), json!({"metadata": {"name": node}})).await;
    if !node.starts_with("win") {
        let tunnel = format!("vxlan-tunnel-addr-{node}");
        assign(store, node, &tunnel, &[("type", "vxlanTunnelAddress")]).await;
    }
    for name in ["a", "b"] {
        add_pod(store, &format!("{name}-{node}"), node).await;
    }
    let created_by = json!({"projectcalico.org/created-by": "calico-kube-controllers"});
    for (name, labels) in [(format!("{node}-auto-hep"), created_by), (format!("{node}-users"), json!({}))] {
        let endpoint = json!({"metadata": {"name": name, "labels": labels}, "spec": {"node": node}});
        put(&**store, &global(Kind::HostEndpoint, &name), endpoint).await;
    }
    put(&**store, &global(Kind::NodeReport, node), json!({"metadata": {"name": node}})).await;
}

/// Two nodes that stay, and two whose Nodes and Pods are gone.
async fn cluster() -> Arc<Embedded> {
    let store = memory();
    let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.0.0.0/16", "blockSize": 28, "vxlanMode": "Always"}});
    put(&*store, &global(Kind::IpPool, "p"), pool).await;
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    put(&*store, &global(Kind::IpamConfig, "default"), config).await;
    for node in ["stays", "gone"] {
        add_node(&store, node).await;
        add_node(&store, &format!("win-{node}")).await;
    }
    for node in ["gone", "win-gone"] {
        store.delete(&global(Kind::Node, node), None).await.unwrap();
        for name in ["a", "b"] {
            store.delete(&pod(&format!("{name}-{node}"), node).0, None).await.unwrap();
        }
    }
    store
}

fn nodes(store: Arc<dyn Endpoints>) -> Nodes {
    let truth: Arc<dyn Store> = store.clone();
    Nodes::new(store, truth, GRACE)
}

/// Whether an object belongs to a vanished node and is not the user's.
fn is_left_over(key: &Key, value: &Value) -> bool {
    let text = format!("{key} {value}");
    text.contains("gone") && !key.name.ends_with("-users")
}

#[tokio::test]
async fn what_a_vanished_node_leaves_behind_is_removed_after_the_grace_period() {
    let store = cluster().await;
    let before = everything(&*store).await;
    let mut nodes = nodes(store.clone());
    let start = Instant::now();
    for since in [Duration::ZERO, GRACE / 2, GRACE - Duration::from_secs(1)] {
        nodes.round(start + since).await.unwrap();
        assert_eq!(everything(&*store).await, before);
    }
    nodes.round(start + GRACE).await.unwrap();
    let after = everything(&*store).await;
    let left: Vec<&Key> =
        after.iter().filter(|(key, value)| is_left_over(key, value)).map(|(key, _)| key).collect();
    assert_eq!(left, Vec::<&Key>::new());
    let expected = before.into_iter().filter(|(key, value)| {
        let handle_of_pod = key.kind == Kind::IpamHandle && key.name.contains("gone");
        !is_left_over(key, value) && !handle_of_pod
    });
    assert_eq!(after, expected.collect::<BTreeMap<_, _>>(), "everything else is as it was");
}

#[tokio::test]
async fn a_node_that_comes_back_keeps_everything() {
    let start = Instant::now();
    // The Node returns between two rounds, or only while the last round works on another node.
    for returns_early in [true, false] {
        let store = cluster().await;
        let mut nodes = nodes(store.clone());
        nodes.round(start).await.unwrap();
        let (early, late) = (global(Kind::Node, "gone"), global(Kind::Node, "win-gone"));
        put(&*store, if returns_early { &early } else { &late }, json!({"metadata": {}})).await;
        nodes.round(start + GRACE / 2).await.unwrap();
        store.delete(if returns_early { &early } else { &late }, None).await.unwrap();
        let report = async |node: &str| store.get(&global(Kind::NodeReport, node)).await.unwrap().is_some();
        nodes.round(start + GRACE).await.unwrap();
        assert_eq!((report("gone").await, report("win-gone").await), (returns_early, !returns_early));
        nodes.round(start + GRACE * 2).await.unwrap();
        assert!(!report("gone").await && !report("win-gone").await);
    }
}

#[tokio::test]
async fn an_incomplete_list_removes_nothing() {
    let start = Instant::now();
    let store = cluster().await;
    put(&*store, &global(Kind::Node, "gone"), json!({"metadata": {}})).await;
    let before = everything(&*store).await;
    // The list lacks a Node that exists; then all of them.
    let lying = Arc::new(Disturbed::new(store.clone()));
    lying.hide(global(Kind::Node, "gone"));
    let mut nodes = nodes(lying.clone());
    nodes.round(start).await.unwrap();
    lying.hide(global(Kind::Node, "stays"));
    lying.hide(global(Kind::Node, "win-stays"));
    for rounds in 1..4 {
        nodes.round(start + GRACE * rounds).await.unwrap();
    }
    assert_eq!(everything(&*store).await, before, "an empty list proves nothing");
    // A list that fails.
    let failing = Arc::new(Disturbed::crashing_after(store.clone(), 0));
    failing.create(&global(Kind::Tier, "x"), json!({})).await.unwrap_err();
    let mut failed = super::nodes::nodes(failing);
    for rounds in 0..4 {
        failed.round(start + GRACE * rounds).await.unwrap_err();
    }
    assert_eq!(everything(&*store).await, before);
}

/// One Node is missing in the list and exists; it is looked up before each removal.
#[tokio::test]
async fn a_node_is_looked_up_before_its_objects_are_removed() {
    let start = Instant::now();
    let store = cluster().await;
    for node in ["gone", "win-gone"] {
        put(&*store, &global(Kind::Node, node), json!({"metadata": {}})).await;
    }
    let before = everything(&*store).await;
    let lying = Arc::new(Disturbed::new(store.clone()));
    lying.hide(global(Kind::Node, "gone"));
    let mut nodes = nodes(lying);
    for rounds in 0..3 {
        nodes.round(start + GRACE * rounds).await.unwrap();
    }
    assert_eq!(everything(&*store).await, before);
}

/// Pods of a vanished node may exist for a while: their addresses, and the node's blocks, stay until they are deleted.
#[tokio::test]
async fn addresses_of_pods_that_exist_stay() {
    let start = Instant::now();
    let store = cluster().await;
    let (key, there) = pod("a-gone", "gone");
    put(&*store, &key, there).await;
    // A pod of the same name on another node is another pod.
    let (other, there) = pod("b-gone", "stays");
    put(&*store, &other, there).await;
    let mut nodes = nodes(store.clone());
    nodes.round(start).await.unwrap();
    nodes.round(start + GRACE).await.unwrap();
    let handles: Vec<String> =
        store.list(Kind::IpamHandle).await.unwrap().items.into_iter().map(|it| it.key.name).collect();
    let of_gone: Vec<&String> = handles.iter().filter(|name| name.contains("gone")).collect();
    assert_eq!(of_gone, ["net.a-gone"]);
    let affinities = async || {
        let all = store.list(Kind::BlockAffinity).await.unwrap().items;
        all.into_iter().filter(|it| it.key.name.contains("gone")).count()
    };
    assert_eq!(affinities().await, 1, "the block with the address of the pod");
    store.delete(&key, None).await.unwrap();
    nodes.round(start + GRACE * 2).await.unwrap();
    assert_eq!(affinities().await, 0);
}

/// Addresses in the block of a vanished node that belong to other nodes stay allocated, and the block loses its owner.
#[tokio::test]
async fn a_block_with_addresses_of_other_nodes_loses_its_owner() {
    let start = Instant::now();
    let store = cluster().await;
    let blocks = store.list(Kind::IpamBlock).await.unwrap().items;
    let mut block = blocks.into_iter().find(|it| it.value["affinity"] == "host:gone").unwrap();
    let attributes = block.value["attributes"].as_array_mut().unwrap();
    let pods = attributes.iter_mut().find(|it| it["handle_id"] == "net.a-gone").unwrap();
    pods["secondary"]["node"] = json!("stays");
    pods["secondary"]["pod"] = json!("borrower");
    let block = store.update(&block.key, block.value.clone(), &block.version).await.unwrap();
    let mut nodes = nodes(store.clone());
    nodes.round(start).await.unwrap();
    nodes.round(start + GRACE).await.unwrap();
    let after = value(&*store, &block.key).await;
    assert_eq!(after["affinity"], Value::Null);
    assert_eq!(after["affinity_claim_time"], Value::Null);
    let kept: Vec<&Value> =
        after["attributes"].as_array().unwrap().iter().map(|it| &it["handle_id"]).collect();
    assert_eq!(kept, ["net.a-gone"]);
}

#[tokio::test]
async fn a_crash_between_any_two_writes_loses_nothing() {
    let time = Instant::now();
    let whole = cluster().await;
    let mut all = nodes(whole.clone());
    all.round(time).await.unwrap();
    all.round(time + GRACE).await.unwrap();
    let expected: Vec<Key> = everything(&*whole).await.into_keys().collect();
    let mut writes = 0;
    loop {
        let store = cluster().await;
        let crashing = Arc::new(Disturbed::crashing_after(store.clone(), writes));
        let mut first = nodes(crashing.clone());
        first.round(time).await.unwrap();
        let result = first.round(time + GRACE).await;
        assert_eq!(result.is_err(), crashing.has_crashed());
        let mut next = nodes(store.clone());
        next.round(time).await.unwrap();
        next.round(time + GRACE).await.unwrap();
        let found: Vec<Key> = everything(&*store).await.into_keys().collect();
        assert_eq!(found, expected, "after {writes} writes");
        if !crashing.has_crashed() {
            break;
        }
        writes += 1;
    }
    assert!(writes >= 15, "{writes}");
}

/// Two that both believe that they lead.
#[tokio::test(flavor = "multi_thread")]
async fn two_controllers_at_once_do_no_harm() {
    let time = Instant::now();
    let whole = cluster().await;
    let mut alone = nodes(whole.clone());
    alone.round(time).await.unwrap();
    alone.round(time + GRACE).await.unwrap();
    let expected: Vec<Key> = everything(&*whole).await.into_keys().collect();
    for _ in 0..5 {
        let store = cluster().await;
        let (mut one, mut other) = (nodes(store.clone()), nodes(store.clone()));
        one.round(time).await.unwrap();
        other.round(time).await.unwrap();
        // Conflicts are errors, and the next round continues.
        let rounds = async |nodes: &mut Nodes| {
            while nodes.round(time + GRACE).await.is_err() {}
        };
        tokio::join!(rounds(&mut one), rounds(&mut other));
        let found: Vec<Key> = everything(&*store).await.into_keys().collect();
        assert_eq!(found, expected);
    }
}

/// The copy of a Node goes with what the node leaves behind. A Node that somebody else created stays.
#[tokio::test(flavor = "multi_thread")]
async fn the_copies_of_vanished_nodes_are_removed() {
    let (kubernetes, store) = (memory(), memory());
    for node in ["one", "two", "three"] {
        put(&*kubernetes, &global(Kind::Node, node), json!({"metadata": {"name": node}})).await;
    }
    let foreign = json!({"metadata": {"name": "three"}, "spec": {"orchRefs": [{"orchestrator": "k8s", "nodeName": "three"}]}});
    put(&*store, &global(Kind::Node, "three"), foreign).await;
    let affinities = ["two/10.9.0.0/26", "three/10.9.0.64/26"].map(|name| global(Kind::BlockAffinity, name));
    for key in &affinities {
        put(&*store, key, json!({"state": "confirmed", "deleted": false})).await;
    }
    let _running = start(store.clone(), Some(kubernetes.clone()), "me");
    until("Nodes are copied", async || store.list(Kind::Node).await.unwrap().items.len() == 3).await;
    for node in ["two", "three"] {
        kubernetes.delete(&global(Kind::Node, node), None).await.unwrap();
    }
    until("the copy is removed", async || store.get(&global(Kind::Node, "two")).await.unwrap().is_none())
        .await;
    assert!(store.get(&global(Kind::Node, "three")).await.unwrap().is_some());
    assert!(store.get(&affinities[0]).await.unwrap().is_none());
    assert!(store.get(&affinities[1]).await.unwrap().is_some(), "the foreign node has what it had");
    assert!(store.get(&global(Kind::Node, "one")).await.unwrap().is_some());
}
