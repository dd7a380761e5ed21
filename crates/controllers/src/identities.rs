//! Objects in etcd that lack a uid or a time of creation, without which Calico's programs refuse to update them. Earlier
//! versions of Tortie stored such objects. A write is enough: the datastore adds both, and what else belongs to Calico's form.

use std::sync::Arc;
use std::time::Instant;

use tortie_api::{Key, Kind};
use tortie_ipam::IpamError;
use tortie_store::{Endpoints, StoreError, Stored};

/// The number of objects that a message names.
const MOST_NAMES: usize = 5;

/// Looks for such objects.
pub(crate) struct Identities {
    store: Arc<dyn Endpoints>,
}

impl Identities {
    pub(crate) fn new(store: Arc<dyn Endpoints>) -> Self {
        Self { store }
    }

    /// Gives them an identity. One that somebody else writes or deletes meanwhile is left to the next round.
    pub(crate) async fn round(&mut self, _: Instant) -> Result<(), IpamError> {
        for kind in Kind::all() {
            let mut repaired = Vec::new();
            for Stored { key, value, version, .. } in self.missing(kind).await? {
                match self.store.update(&key, value, &version).await {
                    Ok(_) => repaired.push(key),
                    Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                    Err(error @ StoreError::Invalid { .. }) => {
                        tracing::error!(%error, "the object gets no uid, so Calico's programs cannot update it");
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            report(kind, &repaired);
        }
        Ok(())
    }

    /// The objects of a kind without identity.
    async fn missing(&self, kind: Kind) -> Result<Vec<Stored>, StoreError> {
        let form = self.store.storage_form();
        if !form.has_identities(kind) {
            return Ok(Vec::new());
        }
        let items = self.store.list(kind).await?.items;
        Ok(items.into_iter().filter(|stored| form.misses_identity(kind, &stored.value)).collect())
    }
}

fn report(kind: Kind, repaired: &[Key]) {
    if repaired.is_empty() {
        return;
    }
    let names: Vec<String> = repaired.iter().take(MOST_NAMES).map(ToString::to_string).collect();
    let (count, names) = (repaired.len(), names.join(", "));
    tracing::info!(
        count,
        kind = kind.name(),
        names,
        "gave objects the uid and the time of creation that Calico's programs require"
    );
}
