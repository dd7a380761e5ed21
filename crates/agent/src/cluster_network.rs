//! The properties of the overlay network.

use tortie_api::{Kind, Resource};
use tortie_dataplane::ClusterNetwork;
use tortie_store::{Store, StoreError};

use crate::AgentError;

/// The properties of the overlay, as FelixConfiguration has them now. calc gives later changes to the dataplane.
pub(crate) async fn cluster_network(store: &dyn Store, node: &str) -> Result<ClusterNetwork, AgentError> {
    let stored = match store.list(Kind::FelixConfiguration).await {
        Ok(listing) => listing.items,
        // The report names these, and nothing of the kind is in force.
        Err(StoreError::KindAbsent(_) | StoreError::Forbidden(_)) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let spec = |name: &str| {
        let stored = stored.iter().find(|stored| stored.key.name == name)?;
        match Resource::read_what_can_be(&stored.key, &stored.value).0 {
            Some(Resource::FelixConfiguration(felix)) => Some(felix.spec),
            _ => None,
        }
    };
    let (own, all) = (spec(&format!("node.{node}")), spec("default"));
    Ok(ClusterNetwork::new(&own.unwrap_or_default().or(&all.unwrap_or_default())))
}
