//! Reading and writing IPAM's records.

use std::sync::Arc;

use ipnet::IpNet;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError, Stored, Version};

use crate::error::{IpamError, RETRIES};
use crate::records::Record;

/// IPAM's records in a store, whichever node they belong to.
#[derive(Clone)]
pub struct Records {
    pub(crate) store: Arc<dyn Store>,
}

impl Records {
    /// The records of this store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Reads a record. One that somebody is deleting counts as deleted, and is deleted.
    pub(crate) async fn read<T: Record>(&self, key: &Key) -> Result<Option<(Version, T)>, IpamError> {
        for _ in 0..RETRIES {
            let Some(Stored { value, version, .. }) = self.store.get(key).await? else { return Ok(None) };
            let record: T = from_value(key, value)?;
            if !record.is_deleted() {
                return Ok(Some((version, record)));
            }
            match self.store.delete(key, Some(&version)).await {
                Ok(_) | Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key.clone()))
    }

    pub(crate) async fn read_block(&self, key: &Key) -> Result<Option<(Version, Block)>, IpamError> {
        let found: Option<(Version, Block)> = self.read(key).await?;
        if let Some((_, block)) = &found {
            block.check().map_err(|error| IpamError::from((key.clone(), error)))?;
            if block.cidr.to_string() != key.name {
                let problem = format!("it contains the addresses of {}", block.cidr);
                return Err(IpamError::Damaged { key: key.clone(), problem });
            }
        }
        Ok(found)
    }

    /// The names of all blocks of the cluster that are networks, and perhaps of some that are being deleted. They cost less
    /// than [`Self::blocks`].
    pub(crate) async fn block_names(&self) -> Result<Vec<IpNet>, IpamError> {
        let keys = self.store.keys(Kind::IpamBlock).await?;
        Ok(keys.iter().filter_map(|key| key.name.parse().ok()).collect())
    }

    /// The names of all blocks of the cluster that are networks.
    pub(crate) async fn blocks(&self) -> Result<Vec<IpNet>, IpamError> {
        let listing = self.store.list(Kind::IpamBlock).await?;
        Ok(listing.items.iter().filter_map(|stored| stored.key.name.parse().ok()).collect())
    }
}

pub(crate) fn from_value<T: DeserializeOwned>(key: &Key, value: Value) -> Result<T, IpamError> {
    T::deserialize(value).map_err(|error| IpamError::Damaged { key: key.clone(), problem: error.to_string() })
}

pub(crate) fn to_value(key: &Key, record: &impl Serialize) -> Result<Value, IpamError> {
    serde_json::to_value(record)
        .map_err(|error| IpamError::Damaged { key: key.clone(), problem: error.to_string() })
}
