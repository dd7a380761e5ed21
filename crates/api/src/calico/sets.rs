//! NetworkSet and GlobalNetworkSet: networks that selectors find by label (`calico.md` 2.2).

use serde::Deserialize;

use crate::fields::{Cidr, list};
use crate::{FieldError, Metadata};

/// Networks with labels. A NetworkSet belongs to a namespace and inherits its labels, a GlobalNetworkSet to none.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct NetworkSet {
    /// Its name, namespace and labels.
    pub metadata: Metadata,
    /// The networks.
    #[serde(default)]
    pub spec: NetworkSetSpec,
}

/// The networks of a set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSetSpec {
    /// The networks; an address is a network of full length.
    #[serde(default, deserialize_with = "list")]
    pub nets: Vec<Cidr>,
}

impl NetworkSet {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let reserved = tortie_selector::NAMESPACE_LABEL;
        if self.metadata.labels.contains_key(reserved) {
            let path = format!("metadata.labels.{reserved}");
            return Err(vec![FieldError::new(path, "is set by the cluster; leave it out")]);
        }
        Ok(())
    }
}
