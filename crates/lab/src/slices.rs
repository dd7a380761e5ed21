//! Replaces Kubernetes' EndpointSlice controller: Services with a selector get slices of the pods that it selects.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use tokio::task::JoinHandle;
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::{Key, Kind};
use tortie_store::{Event, Store, StoreError, Stored};

use crate::LabError;

/// The inputs of slices, and slices themselves.
const KINDS: [Kind; 3] = [Kind::Service, Kind::Pod, Kind::EndpointSlice];

/// Starts the controller.
pub(crate) async fn start(store: Arc<dyn Store>) -> Result<JoinHandle<()>, LabError> {
    let mut controller = Controller { store, objects: BTreeMap::new() };
    let mut from = None;
    for kind in KINDS {
        let listing = controller.store.list(kind).await?;
        // The watch repeats what changed between two of the lists.
        from = from.or(Some(listing.revision));
        controller.objects.extend(listing.items.into_iter().map(|stored| (stored.key.clone(), stored)));
    }
    let mut events = controller.store.watch(&KINDS, from.unwrap_or_default()).await?;
    Ok(tokio::spawn(async move {
        controller.reconcile().await;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Put(stored)) => drop(controller.objects.insert(stored.key.clone(), stored)),
                Ok(Event::Deleted { key, .. }) => drop(controller.objects.remove(&key)),
                Err(error) => {
                    tracing::error!(%error, "the lab's EndpointSlice controller has lost the datastore and misses changes of backends");
                    return;
                }
            }
            controller.reconcile().await;
        }
    }))
}

struct Controller {
    store: Arc<dyn Store>,
    objects: BTreeMap<Key, Stored>,
}

impl Controller {
    /// Makes the slices in the store match those that Services and pods imply. After a conflict, the watch delivers
    /// the change, and this runs again.
    async fn reconcile(&mut self) {
        let wanted = implied_slices(self.objects.iter().map(|(key, stored)| (key, &stored.value)));
        let ours = self.objects.values().filter(|stored| {
            stored.key.kind == Kind::EndpointSlice
                && is_implied(&stored.value)
                && !wanted.contains_key(&stored.key)
        });
        for stored in ours.cloned().collect::<Vec<_>>() {
            let deleted = self.store.delete(&stored.key, Some(stored.revision)).await.map(drop);
            self.log_result(&stored.key, deleted);
        }
        for (key, value) in wanted {
            let written = match self.objects.get(&key) {
                Some(stored) if stored.value == value => continue,
                Some(stored) => self.store.update(&key, value, stored.revision).await,
                None => self.store.create(&key, value).await,
            };
            let result = written.map(|stored| drop(self.objects.insert(key.clone(), stored)));
            self.log_result(&key, result);
        }
    }

    fn log_result(&self, key: &Key, result: Result<(), StoreError>) {
        match result {
            Ok(())
            | Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
            Err(error) => tracing::error!(slice = %key, %error, "cannot write the EndpointSlice"),
        }
    }
}
