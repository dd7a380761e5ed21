//! Addresses for pods, by Calico's data (`calico.md` 5): pools are cut into blocks, a block belongs to a node, a handle
//! says which addresses a container has.
//!
//! [`Block`](tortie_api::ipam::Block) is the pure part: which address comes next, what is free. [`Ipam`] carries it out over a store with
//! compare-and-swap, in an order of writes after which a crash leaves nothing that the next start cannot use: a block
//! is claimed `pending` before it exists, a handle is counted before the address is taken.

mod claim;
mod driver;
mod error;
mod pools;
mod records;
mod request;
mod waiting;

pub use driver::Ipam;
pub use error::IpamError;
pub use records::{Affinity, AffinityState, Config, Handle};
pub use request::{Assignment, Request, Use};
