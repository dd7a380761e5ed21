//! A datastore that somebody locks.

use std::time::Duration;

use serde_json::json;
use tortie_api::Kind;
use tortie_store::Store;

use crate::common::{global, memory, put, start, until, value};

/// What the controllers write to a datastore that is migrated may be lost, and what they read there may not be all.
#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_wait_while_the_datastore_is_locked() {
    let store = memory();
    let lock = async |is_locked: bool| {
        let value = json!({"metadata": {"name": "default"}, "spec": {"datastoreReady": !is_locked}});
        put(&*store, &global(Kind::ClusterInformation, "default"), value).await;
    };
    let node = async |name: &str| {
        put(&*store, &global(Kind::Node, name), json!({"metadata": {"name": name}})).await;
    };
    let exists = async |name: &str| {
        let endpoint = global(Kind::HostEndpoint, &format!("{name}-auto-hep"));
        !value(&*store, &endpoint).await.is_null()
    };
    let spec = json!({"controllers": {"node": {"hostEndpoint": {"autoCreate": "Enabled"}}}});
    let settings = json!({"metadata": {"name": "default"}, "spec": spec});
    put(&*store, &global(Kind::KubeControllersConfiguration, "default"), settings).await;
    lock(true).await;
    node("one").await;
    let _controllers = start(store.clone(), None, "a");
    let lease = tortie_api::Key::namespaced(Kind::Lease, "tortie-system", tortie_controllers::LEASE_NAME);
    until("the controllers lead", async || !value(&*store, &lease).await.is_null()).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!exists("one").await, "nothing is written to a locked datastore");
    lock(false).await;
    until("the host endpoint of the first node", async || exists("one").await).await;
    lock(true).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    node("two").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!exists("two").await, "nothing is written to a datastore that was locked later");
    store.delete(&global(Kind::ClusterInformation, "default"), None).await.unwrap();
    until("the host endpoint of the second node", async || exists("two").await).await;
}
