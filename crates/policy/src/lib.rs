//! The meaning of policy: the order in which policies are evaluated ([`Order`]), the endpoints to which they apply,
//! and the rules as a [`program`].
//!
//! [`compile`] turns one policy of any kind into a [`Compiled`] one, whose selectors are sets with ids. A policy that
//! was not understood completely becomes one that denies at its position in the order (policy decision 18).
//!
//! The crate `tortie-oracle` judges packets without compilation and explains its verdicts; `tortie-reach` applies it
//! to whole clusters.

mod calico;
mod cluster;
mod compile;
mod compiled;
mod kubernetes;
mod labels;
pub mod program;

pub use cluster::ALL_NODES;
pub use compile::{compile, compile_profile, compile_read, policy_id, readable_order};
pub use compiled::{Compiled, Hook, Order, SetSource};
pub use labels::{OwnLabels, SubjectLabels, namespace_profile};
