//! Why there is no address.

use thiserror::Error;
use tortie_api::Key;
use tortie_api::ipam::BlockError;
use tortie_store::StoreError;

/// How often a write is tried again because somebody else was faster (Calico's number).
pub(crate) const RETRIES: usize = 100;

/// Why there is no address.
#[derive(Debug, Clone, Error)]
pub enum IpamError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No pool may be used here.
    #[error(
        "no IPPool gives addresses to {0}: look at disabled, nodeSelector, namespaceSelector, allowedUses, blockSize"
    )]
    NoPool(String),
    /// Every address that this node may use is taken.
    #[error(
        "node {node} has no free address: none of its blocks ({blocks}, of at most {limit}) has room for this; \
         {hint}{damaged}"
    )]
    Exhausted {
        /// The node.
        node: String,
        /// How many blocks it has.
        blocks: usize,
        /// How many it may have.
        limit: u32,
        /// What to do.
        hint: &'static str,
        /// What of the node's blocks cannot be used, as what is stored makes no sense: empty, or a list.
        damaged: String,
    },
    /// A Windows node may not share blocks.
    #[error(
        "a Windows node needs strict affinity: set strict_affinity to true in the cluster's IPAM settings"
    )]
    StrictAffinityNeeded,
    /// What is stored makes no sense.
    #[error("{key}: {problem}")]
    Damaged {
        /// Which object.
        key: Key,
        /// What is wrong.
        problem: String,
    },
    /// Somebody else was faster, again and again.
    #[error("{0} was changed by others {RETRIES} times in a row; try again later")]
    Contended(Key),
}

impl From<(Key, BlockError)> for IpamError {
    fn from((key, error): (Key, BlockError)) -> Self {
        Self::Damaged { key, problem: error.problem }
    }
}
