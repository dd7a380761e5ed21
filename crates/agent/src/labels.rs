//! Copies a pod's labels to its WorkloadEndpoints when they change, also during CNI ADD. The controllers do this for the
//! pods that they copy from the Kubernetes API.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::watch;
use tortie_api::{Key, Kind};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{COPIED_FROM, Change, Interest, Store, StoreError, Stored, pod_of};

use crate::plane::InForce;

/// Follows the pods and endpoints of one node until the future is dropped. Checks an endpoint whenever it or its pod
/// was written: whichever was written last, both are then current.
pub(crate) async fn run(store: Arc<dyn Store>, node: String, mut in_force: watch::Receiver<Arc<InForce>>) {
    let kinds = [Kind::Pod, Kind::WorkloadEndpoint];
    let mut changes = store.follow(kinds.map(|kind| Interest::of_node(kind, &node)).to_vec());
    let mut backoff = Backoff::new(random_seed());
    // The pod and the endpoint.
    let mut endpoints = BTreeSet::new();
    while let Some(change) = changes.next().await {
        let due: Vec<Key> = match change {
            Change::Put(pod) if pod.key.kind == Kind::Pod => {
                let of_pod = endpoints.iter().filter(|(of, _)| *of == pod.key);
                of_pod.map(|(_, endpoint): &(Key, Key)| endpoint.clone()).collect()
            }
            Change::Put(endpoint) => {
                endpoints.insert((pod_of(&endpoint), endpoint.key.clone()));
                vec![endpoint.key]
            }
            Change::Gone { key, .. } => {
                endpoints.retain(|(_, endpoint)| *endpoint != key);
                continue;
            }
            _ => continue,
        };
        // Nothing is written to a locked datastore. Without the dataplane, the agent ends.
        let _ = in_force.wait_for(|now| now.lock.is_none()).await;
        for endpoint in due {
            while let Err(error) = copy_labels(&*store, &endpoint).await {
                tracing::debug!(%error, %endpoint, "cannot update the endpoint's labels; Tortie retries");
                backoff.wait().await;
            }
            backoff.succeeded();
        }
    }
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
        let is_copy = pod.value["metadata"]["annotations"].get(COPIED_FROM).is_some();
        if is_copy || !tortie_store::is_of(&endpoint, &pod) || labels(&endpoint) == labels(&pod) {
            return Ok(());
        }
        endpoint.value["metadata"]["labels"] = labels(&pod);
        match store.update(key, endpoint.value, &endpoint.version).await {
            Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
            Err(StoreError::Conflict(_)) => {}
            Err(error) => return Err(error),
        }
    }
}
