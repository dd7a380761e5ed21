//! Affinities, handles and settings, as they are stored (`libcalico-go/lib/backend/model`). Fields that are not known
//! are kept.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// That a node has, or is about to have, a block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Affinity {
    /// How far the claim has come.
    #[serde(default)]
    pub state: AffinityState,
    /// Whether it is being deleted.
    #[serde(default)]
    pub deleted: bool,
    /// What we do not know.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// How far a claim has come. Only a confirmed block may be used or advertised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AffinityState {
    /// The node has the block; also what no state means, in old data.
    #[default]
    #[serde(alias = "")]
    Confirmed,
    /// The node wants the block.
    Pending,
    /// The node gives the block up.
    PendingDeletion,
}

/// How many addresses of which blocks a handle has. It may count too many (a crash between two writes), never too few.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Handle {
    /// Addresses by block CIDR.
    #[serde(default)]
    pub block: BTreeMap<String, u64>,
    /// Whether it is being deleted.
    #[serde(default)]
    pub deleted: bool,
    /// What we do not know.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The cluster's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Whether addresses of a block are only for its node. Windows needs it.
    #[serde(default)]
    pub strict_affinity: bool,
    /// Whether nodes claim new blocks by themselves.
    #[serde(default)]
    pub auto_allocate_blocks: bool,
    /// How many blocks a node may have; 0 is the default of 20.
    #[serde(default, rename = "maxBlocksPerHost")]
    pub max_blocks_per_host: u32,
    /// What we do not know.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Default for Config {
    /// What holds where nothing is stored (`libcalico-go/lib/ipam/ipam.go`).
    fn default() -> Self {
        Self { strict_affinity: false, auto_allocate_blocks: true, max_blocks_per_host: 0, extra: Map::new() }
    }
}
