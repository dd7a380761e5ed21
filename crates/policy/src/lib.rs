//! What policy *means*: in which order policies are asked ([`Order`]), which endpoints they are about, and what their
//! rules come to as a [`program`].
//!
//! [`compile`] turns one policy, of whatever kind, into a [`Compiled`] one: selectors become sets with ids. A policy
//! that cannot be understood whole becomes one that denies, where it stands in the order (policy decision 18).
//! [`oracle`] says the same without compiling anything, and why; [`reach`] asks it about whole clusters.

mod calico;
mod cluster;
mod compile;
mod kubernetes;
mod labels;
pub mod program;

pub use compile::{
    Compiled, Hook, Order, SetSource, compile, compile_profile, compile_read, policy_id, readable_order,
};
pub use labels::{OwnLabels, SubjectLabels, namespace_profile};
