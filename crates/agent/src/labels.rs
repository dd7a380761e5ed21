//! Copies a pod's labels to its WorkloadEndpoints when they change, also during CNI ADD.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::{Event, Store, StoreError, Stored, pod_of};

use crate::backoff::{Backoff, random_seed};

/// Follows the pods of one node until the future is dropped.
pub(crate) async fn run(store: Arc<dyn Store>, node: String) {
    let mut backoff = Backoff::new(random_seed());
    loop {
        if let Err(error) = follow(&*store, &node, &mut backoff).await {
            tracing::debug!(%error, "listing the endpoints again");
            backoff.wait().await;
        }
    }
}

/// Checks an endpoint whenever it or its pod was written. Whichever was written last, both are then current.
async fn follow(store: &dyn Store, node: &str, backoff: &mut Backoff) -> Result<(), StoreError> {
    let listing = store.list(Kind::WorkloadEndpoint).await?;
    // The pod and the endpoint.
    let mut ours = BTreeSet::new();
    let is_ours = |endpoint: &Stored| endpoint.value["spec"]["node"] == node;
    for endpoint in listing.items.into_iter().filter(is_ours) {
        copy_labels(store, &endpoint.key).await?;
        ours.insert((pod_of(&endpoint), endpoint.key));
    }
    let mut events = store.watch(&[Kind::Pod, Kind::WorkloadEndpoint], listing.revision).await?;
    while let Some(event) = events.next().await {
        let event = event?;
        backoff.succeeded();
        match event {
            Event::Put(pod) if pod.key.kind == Kind::Pod => {
                for (_, endpoint) in ours.iter().filter(|(of, _)| *of == pod.key) {
                    copy_labels(store, endpoint).await?;
                }
            }
            Event::Put(endpoint) if is_ours(&endpoint) => {
                copy_labels(store, &endpoint.key).await?;
                ours.insert((pod_of(&endpoint), endpoint.key));
            }
            Event::Put(_) => {}
            Event::Deleted { key, .. } => ours.retain(|(_, endpoint)| *endpoint != key),
        }
    }
    Ok(())
}

/// Copies the pod's labels to an endpoint, unless another pod has that name now.
async fn copy_labels(store: &dyn Store, key: &Key) -> Result<(), StoreError> {
    loop {
        let Some(mut endpoint) = store.get(key).await? else { return Ok(()) };
        let Some(pod) = store.get(&pod_of(&endpoint)).await? else { return Ok(()) };
        let labels = |stored: &Stored| match &stored.value["metadata"]["labels"] {
            Value::Null => json!({}),
            labels => labels.clone(),
        };
        if !tortie_store::is_of(&endpoint, &pod) || labels(&endpoint) == labels(&pod) {
            return Ok(());
        }
        endpoint.value["metadata"]["labels"] = labels(&pod);
        match store.update(key, endpoint.value, endpoint.revision).await {
            Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
            Err(StoreError::Conflict(_)) => {}
            Err(error) => return Err(error),
        }
    }
}
