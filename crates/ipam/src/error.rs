//! Errors of address allocation.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;
use tortie_api::Key;
use tortie_api::ipam::{Attribute, BlockError};
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
    /// A pool that a request names cannot give it an address.
    #[error("the requested pool {pool} gives no address: {problem}")]
    ChosenPool {
        /// Its name or network, as requested.
        pool: String,
        /// The problem.
        problem: String,
    },
    /// A requested address is not IPAM's.
    #[error("the requested address {0} is in no enabled IPPool; request one of a pool, or add a pool")]
    InNoPool(IpAddr),
    /// Somebody else has the requested address.
    #[error("the requested address {address} is taken: {holder}")]
    Taken {
        /// The address.
        address: IpAddr,
        /// Who has it.
        holder: Box<Holder>,
    },
    /// The node may not use the block of a requested address.
    #[error("the requested address {address} is in block {block} of {owner}: {problem}; request another one")]
    OfAnother {
        /// The address.
        address: IpAddr,
        /// Its block.
        block: IpNet,
        /// The owner of the block.
        owner: String,
        /// Why the node may not use the block.
        problem: &'static str,
    },
    /// The container has another address than the requested one.
    #[error("handle {handle} has {has} and requests {address}; release the handle first")]
    HasAnother {
        /// The handle.
        handle: String,
        /// Its address.
        has: IpAddr,
        /// The requested address.
        address: IpAddr,
    },
    /// Every address that this node, or the load balancers, may use is allocated.
    #[error(
        "no free address for {owner}: none of its blocks ({blocks}, of at most {limit}) has room for this; \
         {hint}{damaged}"
    )]
    Exhausted {
        /// Who asks, in words: `node a`.
        owner: String,
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

/// Who has an address: its attributes in the block.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder(pub Attribute);

impl Holder {
    /// An attribute of the owner, such as `pod`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.owner.as_ref()?.get(name).map(String::as_str)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_windows() {
            return f.write_str("a Windows node needs it itself");
        }
        if let Some(released) = &self.0.released_at {
            return write!(f, "it was released at {released} and cools down");
        }
        match (self.get("namespace"), self.get("pod"), self.get("type")) {
            (Some(namespace), Some(pod), _) => write!(f, "pod {namespace}/{pod} has it")?,
            (Some(namespace), None, Some(_)) if self.get("service").is_some() => {
                write!(f, "Service {namespace}/{} has it", self.get("service").unwrap_or_default())?;
            }
            (.., Some(kind)) => write!(f, "it is a {kind}")?,
            _ => f.write_str("its owner is unknown")?,
        }
        if let Some(node) = self.get("node") {
            write!(f, " on node {node}")?;
        }
        write!(f, " (handle {})", self.0.handle_id.as_deref().unwrap_or("none"))
    }
}

impl From<(Key, BlockError)> for IpamError {
    fn from((key, error): (Key, BlockError)) -> Self {
        Self::Damaged { key, problem: error.problem }
    }
}
