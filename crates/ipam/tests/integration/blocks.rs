//! Which blocks a node uses: damaged blocks, blocks of other pools, and pools for certain namespaces.

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, IpamError, Request};
use tortie_store::{Embedded, Store};

async fn cluster(pools: &[(&str, &str, Value)]) -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    for (name, cidr, spec) in pools {
        let mut value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name},
            "spec": {"cidr": cidr, "blockSize": 29, "vxlanMode": "Always"},
        });
        value["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        store.create(&Key::global(Kind::IpPool, *name), value).await.unwrap();
    }
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    store
}

fn ipam(store: &Arc<Embedded>, os: &str) -> Ipam {
    Ipam::new(store.clone(), "node", BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]))
}

fn request(handle: &str, team: &str) -> Request {
    Request {
        handle: handle.to_owned(),
        owner: BTreeMap::new(),
        namespace_labels: BTreeMap::from([("team".to_owned(), team.to_owned())]),
        ..Request::default()
    }
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn damaged_block() -> Value {
    json!({
        "cidr": "10.0.0.0/29", "affinity": "host:node", "allocations": [0, null, null, null, null, null, null, null],
        "unallocated": [0, 1, 2, 3, 4, 5, 6, 7], "attributes": [{"handle_id": "x"}], "sequenceNumber": 1,
    })
}

#[tokio::test]
async fn what_is_damaged_is_not_touched_and_the_node_goes_on_with_another_block() {
    let block = Key::global(Kind::IpamBlock, "10.0.0.0/29");
    let affinity = Key::global(Kind::BlockAffinity, "node/10.0.0.0/29");
    let strange = Key::global(Kind::BlockAffinity, "node/strange");
    let confirmed = json!({"state": "confirmed"});
    for objects in [
        vec![(&block, damaged_block()), (&affinity, confirmed.clone())],
        vec![(&affinity, json!({"state": ["no", "state"]}))],
        vec![(&affinity, json!("no object"))],
        vec![(&strange, confirmed.clone())],
        vec![(&block, json!({"cidr": "10.0.0.0/29"})), (&affinity, confirmed.clone())],
    ] {
        let store = cluster(&[("pool", "10.0.0.0/26", json!({}))]).await;
        for (key, value) in &objects {
            store.create(key, value.clone()).await.unwrap();
        }
        let node = ipam(&store, "linux");
        let first = node.assign(&request("h0", "any")).await.unwrap();
        assert_eq!(node.assign(&request("h1", "any")).await.unwrap().block, first.block);
        let whole_block_is_damaged = objects.iter().any(|(key, _)| *key == &block);
        assert!(first.block != net("10.0.0.0/29") || !whole_block_is_damaged);
        for (key, value) in &objects {
            assert_eq!(store.get(key).await.unwrap().unwrap().value, *value, "{key}");
        }
    }
}

#[tokio::test]
async fn what_is_damaged_is_named_where_it_is_in_the_way() {
    let store = cluster(&[("pool", "10.0.0.0/29", json!({}))]).await;
    let (block, affinity) = ("10.0.0.0/29", "node/10.0.0.0/29");
    store.create(&Key::global(Kind::IpamBlock, block), damaged_block()).await.unwrap();
    let confirmed = json!({"state": "confirmed"});
    store.create(&Key::global(Kind::BlockAffinity, affinity), confirmed).await.unwrap();
    for os in ["linux", "windows"] {
        let error = ipam(&store, os).assign(&request("h", "any")).await.unwrap_err().to_string();
        assert!(
            error.contains("damaged: IPAMBlock 10.0.0.0/29: the offset 0 is both free and allocated"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_windows_node_has_one_block_whatever_its_pool() {
    let for_team = |team: &str| json!({"namespaceSelector": format!("team == '{team}'")});
    let store =
        cluster(&[("red", "10.1.0.0/28", for_team("red")), ("blue", "10.2.0.0/28", for_team("blue"))]).await;
    let node = ipam(&store, "windows");
    assert!(net("10.1.0.0/28").contains(&node.assign(&request("r", "red")).await.unwrap().address));
    let error = node.assign(&request("b", "blue")).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, limit: 1, .. }), "{error}");
    assert_eq!(store.list(Kind::IpamBlock).await.unwrap().items.len(), 1);
    assert!(node.assign(&request("r2", "red")).await.is_ok());
}

#[tokio::test]
async fn a_node_gets_its_first_block_also_of_a_pool_for_some_namespaces() {
    let for_red = json!({"namespaceSelector": "team == 'red'"});
    let store = cluster(&[("a-red", "10.1.0.0/28", for_red.clone())]).await;
    let block = ipam(&store, "windows").ensure_blocks().await.unwrap()[0];
    assert!(net("10.1.0.0/28").contains(&IpNet::V4(block)));
    assert_eq!(ipam(&store, "windows").assign(&request("r", "red")).await.unwrap().block, IpNet::V4(block));

    let store = cluster(&[("a-red", "10.1.0.0/28", for_red), ("b-all", "10.2.0.0/28", json!({}))]).await;
    assert!(
        net("10.2.0.0/28").contains(&IpNet::V4(ipam(&store, "windows").ensure_blocks().await.unwrap()[0]))
    );
}
