//! A mixed cluster on one machine.
//!
//! [`supervise`] is the entry point: it enters its own user, network and PID namespaces and runs the cluster in a
//! child, which is the first process of the PID namespace. When that child ends for any reason, the kernel ends all
//! of its processes, and every interface, namespace and mount disappears with the last process. One folder
//! ([`LabDir`]) remains to be removed; after a SIGKILL the next start removes it.
//!
//! Inside, [`Cluster`] creates the underlay, serves the datastore, and starts an agent for each node (and an emulated
//! HNS for each Windows node). It replaces the kubelets, and the scheduler unless the datastore is a Kubernetes API: it
//! executes the CNI plugin as a container runtime does. A [`JoinedNode`] is one emulated Windows node beside nodes that others run. [`matrix`] probes who reaches whom with real connections.

mod cluster;
mod controller;
mod datastore;
pub mod demo;
mod dir;
mod error;
pub mod join;
mod joined;
mod kubelet;
pub mod matrix;
mod node;
mod pki;
mod pod_process;
mod pod_status;
mod probe;
mod process;
mod program;
mod progress;
mod runtime;
mod sandbox;
mod services;
mod slices;
mod supervise;
mod underlay;
mod wine;
mod workloads;

pub use cluster::{Cluster, Shape};
pub use datastore::{Datastore, client};
pub use dir::LabDir;
pub use error::LabError;
pub use joined::{JoinedNode, Joining};
pub use pod_process::serve as run_pod_process;
pub use program::IMAGE as PROGRAM_IMAGE;
pub use progress::Progress;
pub use services::dns::serve as run_dns;
pub use supervise::{Outcome, enter_inside, signal_end, supervise};
pub use tortie_servers::wine::{WindowsPrograms, home as windows_programs};
