//! Namespaces, and processes and threads in them (`namespaces(7)`).

pub mod groups;
pub mod mount;

mod enter;
mod netns;
mod process;

pub use enter::{Namespaces, enter};
pub use netns::{NetNs, NetNsId};
pub use process::{die_with_parent, with_default_signals, with_own_mounts};
