//! Clusters and requests.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Request};
use tortie_store::{Embedded, Store};

/// Pools, those of IPv4 with VXLAN: name, cidr, blockSize.
pub(crate) async fn cluster(pools: &[(&str, &str, Option<u8>)]) -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    for (name, cidr, block_size) in pools {
        // Windows nodes have no IPv6 in VXLAN.
        let mode = if cidr.contains(':') { "Never" } else { "Always" };
        put_pool(&store, name, json!({"cidr": cidr, "blockSize": block_size, "vxlanMode": mode})).await;
    }
    configure(&store, json!({"strict_affinity": true, "auto_allocate_blocks": true})).await;
    store
}

pub(crate) async fn put_pool(store: &Embedded, name: &str, spec: Value) {
    let pool = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name}, "spec": spec,
    });
    put(store, &Key::global(Kind::IpPool, name), pool).await;
}

pub(crate) async fn configure(store: &Embedded, config: Value) {
    put(store, &Key::global(Kind::IpamConfig, "default"), config).await;
}

pub(crate) async fn put(store: &Embedded, key: &Key, value: Value) {
    match store.get(key).await.unwrap() {
        Some(stored) => store.update(key, value, &stored.version).await.unwrap(),
        None => store.create(key, value).await.unwrap(),
    };
}

pub(crate) fn linux(store: &Arc<Embedded>, node: &str) -> Ipam {
    Ipam::new(store.clone(), node, BTreeMap::new())
}

pub(crate) fn windows(store: &Arc<Embedded>, node: &str) -> Ipam {
    let labels = BTreeMap::from([("kubernetes.io/os".to_owned(), "windows".to_owned())]);
    Ipam::new(store.clone(), node, labels)
}

pub(crate) fn request(handle: &str) -> Request {
    Request { handle: handle.to_owned(), ..Request::default() }
}

pub(crate) async fn value(store: &Embedded, kind: Kind, name: &str) -> Option<Value> {
    Some(store.get(&Key::global(kind, name)).await.unwrap()?.value)
}

pub(crate) async fn block(store: &Embedded, cidr: &str) -> Option<Block> {
    let block: Block = serde_json::from_value(value(store, Kind::IpamBlock, cidr).await?).unwrap();
    block.check().unwrap();
    Some(block)
}

pub(crate) async fn names(store: &Embedded, kind: Kind) -> Vec<String> {
    store.list(kind).await.unwrap().items.into_iter().map(|stored| stored.key.name).collect()
}

/// Every allocated address, with its handle.
pub(crate) async fn allocated(store: &Embedded) -> BTreeMap<IpAddr, String> {
    let mut all = BTreeMap::new();
    for name in names(store, Kind::IpamBlock).await {
        for (address, attribute) in block(store, &name).await.unwrap().allocated() {
            let handle = attribute.handle_id.clone().unwrap();
            assert_eq!(all.insert(address, handle), None, "{address} is in two blocks");
        }
    }
    all
}
