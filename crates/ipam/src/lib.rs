//! Addresses for pods, in Calico's data model (`libcalico-go/lib/ipam`): pools are divided into blocks, a block
//! belongs to a node, and a handle records the addresses of a container.
//!
//! [`Block`] is the pure part: which address is next, and which are free. [`Ipam`] performs the operations on a store
//! with compare-and-swap. Its order of writes makes every crash recoverable: a block is claimed `pending` before it
//! exists, and a handle is counted before the address is allocated.

mod access;
mod affinities;
mod block_cache;
mod borrow;
mod check;
mod claim;
mod criteria;
mod driver;
mod error;
mod fixed;
mod in_use;
mod pools;
mod records;
mod release;
mod repair;
mod request;
mod services;
mod settings;
mod shared_writes;
mod waiting;

pub use access::Records;
pub use affinities::Given;
pub use block_cache::POOLS_FRESH;
pub use check::{Finding, Fix, Problem, Snapshot, check};
pub use claim::DEFAULT_MAX_BLOCKS;
pub use driver::Ipam;
pub use error::{Holder, IpamError};
pub use in_use::{InUse, in_use};
pub use records::{Affinity, AffinityState, Config, Handle};
pub use release::{Cleared, Release};
pub use request::{Assignment, Count, Family, FollowUp, Request, Use};
pub use services::{service_handle, service_owner};
