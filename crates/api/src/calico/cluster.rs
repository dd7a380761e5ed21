//! ClusterInformation and CalicoNodeStatus (`api/pkg/apis/projectcalico/v3/clusterinfo.go`, `caliconodestatus.go`).

use serde::Deserialize;

use crate::fields::list;
use crate::{FieldError, Metadata};

/// What Calico's components know of the cluster. Only the object `default` is read.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ClusterInformation {
    /// Its name.
    pub metadata: Metadata,
    /// The information.
    #[serde(default)]
    pub spec: ClusterInformationSpec,
}

/// The information about the cluster.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ClusterInformationSpec {
    /// The cluster's identity.
    #[serde(rename = "clusterGUID")]
    pub cluster_guid: Option<String>,
    /// Words about the installation.
    pub cluster_type: Option<String>,
    /// The version of Calico, which calicoctl compares with its own.
    pub calico_version: Option<String>,
    /// Whether Calico's components may use the datastore.
    pub datastore_ready: Option<bool>,
    /// The product.
    pub variant: Option<String>,
}

impl ClusterInformation {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        if self.metadata.name == "default" {
            return Ok(());
        }
        let problem = format!("{:?} is not read; name it default", self.metadata.name);
        Err(vec![FieldError::new("metadata.name", problem)])
    }
}

/// A request for the BGP state of a node of Calico, which answers in `status`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CalicoNodeStatus {
    /// Its name.
    pub metadata: Metadata,
    /// The request.
    #[serde(default)]
    pub spec: CalicoNodeStatusSpec,
}

/// What is requested.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct CalicoNodeStatusSpec {
    /// The node.
    pub node: Option<String>,
    /// `Agent`, `BGP`, `Routes`.
    #[serde(deserialize_with = "list")]
    pub classes: Vec<StatusClass>,
    /// The seconds between two answers; 0 means one answer.
    pub update_period_seconds: Option<u32>,
}

/// A part of a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum StatusClass {
    /// The BGP daemon.
    Agent,
    /// The peers.
    #[serde(rename = "BGP")]
    Bgp,
    /// The routes.
    Routes,
}
