//! Errors of address allocation.

use std::net::IpAddr;

use thiserror::Error;
use tortie_api::Key;
use tortie_api::ipam::BlockError;
use tortie_store::StoreError;

/// How often a write is retried after a conflict (Calico's number).
pub(crate) const RETRIES: usize = 100;

/// Why there is no address.
#[derive(Debug, Clone, Error)]
pub enum IpamError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No pool can be used here.
    #[error(
        "no IPPool gives addresses to {0}: look at disabled, nodeSelector, namespaceSelector, allowedUses, blockSize"
    )]
    NoPool(String),
    /// Every address that this node may use is allocated.
    #[error(
        "node {node} has no free address: none of its blocks ({blocks}, of at most {limit}) has room for this; \
         {hint}{damaged}"
    )]
    Exhausted {
        /// The node.
        node: String,
        /// The number of its blocks.
        blocks: usize,
        /// The maximum number of its blocks.
        limit: u32,
        /// The remedy.
        hint: &'static str,
        /// Which of the node's blocks are damaged and unusable: empty, or a list.
        damaged: String,
    },
    /// A Windows node may not share blocks.
    #[error(
        "a Windows node needs strict affinity: set strict_affinity to true in the cluster's IPAM settings"
    )]
    StrictAffinityNeeded,
    /// A stored object is invalid.
    #[error("{key}: {problem}")]
    Damaged {
        /// The object.
        key: Key,
        /// The problem.
        problem: String,
    },
    /// An address is not what the caller has seen.
    #[error("{address} has changed: {problem}; look at it again")]
    Changed {
        /// The address.
        address: IpAddr,
        /// The difference.
        problem: String,
    },
    /// Other writers were faster too many times in a row.
    #[error("{0} was changed by others {RETRIES} times in a row; try again later")]
    Contended(Key),
}

impl From<(Key, BlockError)> for IpamError {
    fn from((key, error): (Key, BlockError)) -> Self {
        Self::Damaged { key, problem: error.problem }
    }
}
