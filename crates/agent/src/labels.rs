//! A pod's labels may change while it runs: its WorkloadEndpoint follows.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_store::{Event, Store, StoreError, Stored};

/// How long to wait before the store is asked again after it failed.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Follows the pods of one node until the future is dropped.
pub(crate) async fn run(store: Arc<dyn Store>, node: String) {
    loop {
        if let Err(error) = follow(&*store, &node).await {
            tracing::debug!(%error, "the pods are listed again");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

async fn follow(store: &dyn Store, node: &str) -> Result<(), StoreError> {
    let listing = store.list(Kind::Pod).await?;
    for pod in listing.items {
        take_over(store, node, &pod).await?;
    }
    let mut events = store.watch(&[Kind::Pod], listing.revision).await?;
    while let Some(event) = events.next().await {
        if let Event::Put(pod) = event? {
            take_over(store, node, &pod).await?;
        }
    }
    Ok(())
}

async fn take_over(store: &dyn Store, node: &str, pod: &Stored) -> Result<(), StoreError> {
    if pod.value["spec"]["nodeName"] != node {
        return Ok(());
    }
    let labels = pod.value["metadata"].get("labels").cloned().unwrap_or_else(|| json!({}));
    let name = WorkloadEndpoint::name_for(node, &pod.key.name, "eth0");
    let key = Key::namespaced(Kind::WorkloadEndpoint, &pod.key.namespace, name);
    loop {
        let Some(mut endpoint) = store.get(&key).await? else { return Ok(()) };
        let has = endpoint.value["metadata"].get("labels").cloned().unwrap_or_else(|| json!({}));
        if has == labels || !endpoint.value["metadata"].is_object() {
            return Ok(());
        }
        endpoint.value["metadata"]["labels"] = Value::clone(&labels);
        match store.update(&key, endpoint.value, endpoint.revision).await {
            Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
            Err(StoreError::Conflict(_)) => {}
            Err(error) => return Err(error),
        }
    }
}
