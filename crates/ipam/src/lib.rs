//! Addresses for pods, in Calico's data model (`libcalico-go/lib/ipam`): pools are divided into blocks, a block
//! belongs to a node, and a handle records the addresses of a container.
//!
//! [`Block`] is the pure part: which address is next, and which are free. [`Ipam`] performs the operations on a store
//! with compare-and-swap. Its order of writes makes every crash recoverable: a block is claimed `pending` before it
//! exists, and a handle is counted before the address is allocated.

mod block;
mod claim;
mod driver;
mod pools;
mod records;
mod waiting;

pub use block::{Attribute, Block, BlockError};
pub use driver::{Assignment, Ipam, IpamError, Request, Use};
pub use records::{Affinity, AffinityState, Config, Handle};
