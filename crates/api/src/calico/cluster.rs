//! ClusterInformation and CalicoNodeStatus (`api/pkg/apis/projectcalico/v3/clusterinfo.go`, `caliconodestatus.go`).

use std::ops::RangeInclusive;

use serde::Deserialize;
use serde_json::Value;

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

/// The versions of Calico 3 whose objects Tortie reads.
const KNOWN_MINORS: RangeInclusive<u32> = 30..=32;

impl ClusterInformation {
    /// The only object that is read.
    pub const NAME: &str = "default";

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        if self.metadata.name == Self::NAME {
            return Ok(());
        }
        let problem = format!("{:?} is not read; name it default", self.metadata.name);
        Err(vec![FieldError::new("metadata.name", problem)])
    }

    /// Whether a stored object locks the datastore, as `calicoctl datastore migrate` does: components then wait. The rest
    /// of the object may be of a newer Calico.
    #[must_use]
    pub fn is_locked(value: &Value) -> bool {
        value["spec"]["datastoreReady"] == Value::Bool(false)
    }

    /// The version of Calico that used the datastore last, if Tortie may not understand its objects.
    #[must_use]
    pub fn unknown_version(value: &Value) -> Option<&str> {
        let version = value["spec"]["calicoVersion"].as_str()?;
        let mut numbers = version.trim_start_matches('v').split('.').map(|number| number.parse::<u32>().ok());
        let known = match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(3), Some(minor)) => KNOWN_MINORS.contains(&minor),
            _ => version.is_empty(),
        };
        (!known).then_some(version)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn versions_outside_of_the_known_ones_are_named() {
        for (version, unknown) in [
            (json!("v3.30.0"), false),
            (json!("3.31.2"), false),
            (json!("v3.32.0-0.dev-12-gabc"), false),
            (json!("v3.29.9"), true),
            (json!("v3.33.0"), true),
            (json!("v3.3.0"), true),
            (json!("v4.30.0"), true),
            (json!("v2.31"), true),
            (json!("v3"), true),
            (json!("master"), true),
            (json!(""), false),
            (json!(null), false),
        ] {
            let value = json!({"spec": {"calicoVersion": version}});
            assert_eq!(ClusterInformation::unknown_version(&value), version.as_str().filter(|_| unknown));
        }
        assert_eq!(ClusterInformation::unknown_version(&json!({})), None);
    }

    #[test]
    fn only_false_locks() {
        for (spec, expected) in [
            (json!({"datastoreReady": false, "new": 1}), true),
            (json!({"datastoreReady": true}), false),
            (json!({"datastoreReady": null}), false),
            (json!({}), false),
        ] {
            assert_eq!(ClusterInformation::is_locked(&json!({"spec": spec})), expected, "{spec}");
        }
    }
}
