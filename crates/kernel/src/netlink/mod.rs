//! Netlink: messages to the kernel and its answers (`netlink(7)`, `linux/netlink.h`).

pub mod attribute;

mod message;
mod socket;

pub(crate) use message::objects;
pub use message::{Refusal, Reply, Request};
pub use socket::{Family, Socket};
