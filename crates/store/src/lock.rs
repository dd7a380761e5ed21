//! The lock of a datastore: `datastoreReady` of the object ClusterInformation `default`. Calico's components wait while it
//! is false, because somebody copies the datastore.

use tortie_api::calico::ClusterInformation;
use tortie_api::{Key, Kind};

use crate::{Store, StoreError};

/// Whether somebody has locked the datastore. One without the object is not locked.
///
/// # Errors
/// The datastore cannot be read.
pub async fn is_locked(store: &dyn Store) -> Result<bool, StoreError> {
    let key = Key::global(Kind::ClusterInformation, ClusterInformation::NAME);
    // Agents may only list the kind.
    let listing = match store.list(Kind::ClusterInformation).await {
        Err(StoreError::KindAbsent(_)) => return Ok(false),
        listing => listing?,
    };
    Ok(listing.items.iter().any(|one| one.key == key && ClusterInformation::is_locked(&one.value)))
}
