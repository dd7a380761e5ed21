//! Affinities, handles and settings as they are stored (`libcalico-go/lib/backend/model`). Unknown fields are kept.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tortie_api::ipam::Block;

/// A record that is deleted in two steps: Calico first marks it, with compare-and-swap, and then deletes it.
pub(crate) trait Record: DeserializeOwned {
    fn is_deleted(&self) -> bool;
}

impl Record for Block {
    fn is_deleted(&self) -> bool {
        self.deleted
    }
}

impl Record for Affinity {
    fn is_deleted(&self) -> bool {
        self.deleted
    }
}

impl Record for Handle {
    fn is_deleted(&self) -> bool {
        self.deleted
    }
}

impl Record for Config {
    fn is_deleted(&self) -> bool {
        false
    }
}

/// The record that a node owns, or is claiming, a block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Affinity {
    /// The state of the claim.
    #[serde(default)]
    pub state: AffinityState,
    /// Whether it is being deleted.
    #[serde(default)]
    pub deleted: bool,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The state of a claim. Only a confirmed block may be used or advertised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AffinityState {
    /// The node owns the block; old data without a state means the same.
    #[default]
    #[serde(alias = "")]
    Confirmed,
    /// The node is claiming the block.
    Pending,
    /// The node is giving up the block.
    PendingDeletion,
}

/// The number of addresses of a handle in each block. After a crash between two writes it may be too high, never too
/// low.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Handle {
    /// Addresses by block CIDR.
    #[serde(default)]
    pub block: BTreeMap<String, u64>,
    /// Whether it is being deleted.
    #[serde(default)]
    pub deleted: bool,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The cluster's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Whether the addresses of a block are only for its node. Windows needs this.
    #[serde(default)]
    pub strict_affinity: bool,
    /// Whether nodes claim new blocks automatically.
    #[serde(default)]
    pub auto_allocate_blocks: bool,
    /// The maximum number of blocks of a node; 0 means the default of 20.
    #[serde(default, rename = "maxBlocksPerHost")]
    pub max_blocks_per_host: u32,
    /// For how many seconds nobody gets an address after its release.
    #[serde(default, rename = "ipCooldownSeconds")]
    pub ip_cooldown_seconds: i64,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Config {
    /// What Calico rejects (`libcalico-go/lib/ipam`, `SetIPAMConfig`), with the remedy.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !self.strict_affinity && !self.auto_allocate_blocks {
            return Some("autoAllocateBlocks is false, which needs strict affinity");
        }
        if !self.strict_affinity && self.max_blocks_per_host > 0 {
            return Some(
                "a maximum number of blocks needs strict affinity: otherwise nodes borrow addresses",
            );
        }
        None
    }
}

impl Default for Config {
    /// The defaults if nothing is stored (`libcalico-go/lib/ipam/ipam.go`).
    fn default() -> Self {
        Self {
            strict_affinity: false,
            auto_allocate_blocks: true,
            max_blocks_per_host: 0,
            ip_cooldown_seconds: 0,
            extra: Map::new(),
        }
    }
}
