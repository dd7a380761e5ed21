//! NetworkSet and GlobalNetworkSet: networks that selectors find by label (`api/pkg/apis/projectcalico/v3` of Calico).

use serde::Deserialize;

use crate::Metadata;
use crate::fields::{Network, list};

/// Networks with labels. A NetworkSet belongs to a namespace and inherits its labels; a GlobalNetworkSet belongs to
/// none.
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
    pub nets: Vec<Network>,
}
