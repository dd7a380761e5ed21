//! A mixed cluster on one machine.
//!
//! [`supervise`] is what a person starts: it moves into user, network and PID namespaces of its own and runs the
//! cluster in a child, which is the first process of the PID namespace. Whatever ends that child, the kernel ends all
//! that it started, and every interface, namespace and mount goes with the last process. What is left to remove is one
//! folder ([`LabDir`]); after a SIGKILL the next start removes it.
//!
//! Inside, [`Cluster`] lays the underlay, serves the datastore, starts an agent for each node (and an emulated HNS for
//! each Windows node), and stands in for scheduler and kubelet: it executes the CNI plugin as
//! a container runtime does. [`matrix`] probes who reaches whom with real connections.

mod cluster;
pub mod demo;
mod dir;
mod error;
pub mod join;
pub mod matrix;
mod node;
mod pki;
mod pod_process;
mod probe;
mod process;
mod progress;
mod runtime;
mod sandbox;
mod slices;
mod supervise;
mod underlay;

pub use cluster::{Cluster, Size};
pub use dir::LabDir;
pub use error::LabError;
pub use pod_process::serve as run_pod_process;
pub use progress::Progress;
pub use supervise::{Outcome, enter_inside, signal_end, supervise};
