//! What a node says of itself (semantics 29): policies have no status field that Tortie may use.

use serde::{Deserialize, Serialize};

use crate::Metadata;

/// The report of one node, under the node's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// `tortie.io/v1`.
    pub api_version: String,
    /// `NodeReport`.
    pub kind: String,
    /// Its name is the node's.
    pub metadata: Metadata,
    /// What the node says.
    pub status: NodeStatus,
}

/// What a node says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// `linux` or `windows`.
    pub os: String,
    /// Everything in the store up to this revision is in force on the node, but for what `conditions` names.
    pub revision: u64,
    /// How many pods the node has.
    pub endpoints: usize,
    /// What the operator should know, bounded in number; `more` counts what was left out.
    #[serde(default)]
    pub conditions: Vec<ReportedCondition>,
    /// How many conditions there are beyond those listed.
    #[serde(default)]
    pub more: usize,
}

/// One condition of a node or of one of its endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportedCondition {
    /// The endpoint (`namespace/pod`), policy or other object; empty for the node itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub object: String,
    /// A short, stable name in CamelCase.
    pub reason: String,
    /// One sentence: what, and what Tortie does about it.
    pub message: String,
}
