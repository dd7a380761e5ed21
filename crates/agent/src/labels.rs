//! Copies a pod's labels to its WorkloadEndpoints when they change, also during CNI ADD. The controllers do this for the
//! pods that they copy from the Kubernetes API.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tortie_api::{Key, Kind};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{COPIED_FROM, Change, Interest, Store, StoreError, endpoint_labels_of, pod_of};

use crate::plane::InForce;

/// Follows the pods and endpoints of one node until the future is dropped. Checks an endpoint whenever it or its pod
/// was written: whichever was written last, both are then current.
pub(crate) async fn run(store: Arc<dyn Store>, node: String, mut in_force: watch::Receiver<Arc<InForce>>) {
    let kinds = [Kind::Pod, Kind::WorkloadEndpoint];
    let mut changes = store.follow(kinds.map(|kind| Interest::of_node(kind, &node)).to_vec());
    let mut backoff = Backoff::new(random_seed());
    // The pod and the endpoint.
    let mut endpoints = BTreeSet::new();
    // One endpoint that the datastore refuses holds no other one up.
    let (mut failed, mut retry_at) = (BTreeSet::new(), None);
    loop {
        let due: BTreeSet<Key> = tokio::select! {
            change = changes.next() => match change {
                Some(change) => concerned(change, &mut endpoints),
                None => return,
            },
            () = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {
                retry_at = None;
                std::mem::take(&mut failed)
            }
        };
        if due.is_empty() {
            continue;
        }
        // Nothing is written to a locked datastore. Without the dataplane, the agent ends.
        let _ = in_force.wait_for(|now| now.lock.is_none()).await;
        copy_all(&*store, due, &mut failed).await;
        match failed.is_empty() {
            true => {
                backoff.succeeded();
                retry_at = None;
            }
            false => {
                let mut next = || backoff.failed(Instant::now().into_std()).into();
                retry_at = retry_at.or_else(|| Some(next()));
            }
        }
    }
}

/// The endpoints that a change concerns. `endpoints` are the known ones, each with its pod.
fn concerned(change: Change, endpoints: &mut BTreeSet<(Key, Key)>) -> BTreeSet<Key> {
    match change {
        Change::Put(pod) if pod.key.kind == Kind::Pod => {
            let of_pod = endpoints.iter().filter(|(of, _)| *of == pod.key);
            of_pod.map(|(_, endpoint)| endpoint.clone()).collect()
        }
        Change::Put(endpoint) => {
            endpoints.insert((pod_of(&endpoint), endpoint.key.clone()));
            [endpoint.key].into()
        }
        Change::Gone { key, .. } => {
            endpoints.retain(|(_, endpoint)| *endpoint != key);
            BTreeSet::new()
        }
        _ => BTreeSet::new(),
    }
}

/// Copies the labels to these endpoints. Those that could not be written are among the `failed` ones afterwards.
async fn copy_all(store: &dyn Store, due: BTreeSet<Key>, failed: &mut BTreeSet<Key>) {
    let mut first = None;
    for endpoint in due {
        match copy_labels(store, &endpoint).await {
            Ok(()) => drop(failed.remove(&endpoint)),
            Err(error) => {
                tracing::debug!(%error, %endpoint, "cannot update the endpoint's labels");
                failed.insert(endpoint);
                first = first.or(Some(error));
            }
        }
    }
    if let Some(error) = first {
        let endpoints = failed.len();
        tracing::warn!(%error, endpoints, "cannot update the labels of endpoints; Tortie retries");
    }
}

/// Copies the pod's labels to an endpoint, unless another pod has that name now.
async fn copy_labels(store: &dyn Store, key: &Key) -> Result<(), StoreError> {
    loop {
        let Some(mut endpoint) = store.get(key).await? else { return Ok(()) };
        let Some(pod) = store.get(&pod_of(&endpoint)).await? else { return Ok(()) };
        let is_copy = pod.value["metadata"]["annotations"].get(COPIED_FROM).is_some();
        let wanted = json!(endpoint_labels_of(&pod.value, &key.namespace));
        if is_copy || !tortie_store::is_of(&endpoint, &pod) || endpoint.value["metadata"]["labels"] == wanted
        {
            return Ok(());
        }
        endpoint.value["metadata"]["labels"] = wanted;
        match store.update(key, endpoint.value, &endpoint.version).await {
            Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
            Err(StoreError::Conflict(_)) => {}
            Err(error) => return Err(error),
        }
    }
}
