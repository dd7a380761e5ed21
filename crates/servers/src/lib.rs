//! Real servers on loopback, for tests: etcd, and the Kubernetes API with its controllers.
//!
//! [`Etcd`] and [`KubeApi`] start servers with free ports and a temporary folder. A test can kill, pause, stop and restart
//! each server ([`Server`]), and place a [`Proxy`] before it that delays, holds or cuts connections. When the value is
//! dropped, or the test process ends for any reason, a guard process kills the servers and removes the folder.
//!
//! [`cluster`] has nodes that run pods. [`permissions`] compares what a user requests with what a role allows.
//!
//! [`wine`] has Windows machines.
//!
//! The servers are other programs: [`programs`] finds them, and decides what a test does without them.

mod authority;
pub mod cluster;
mod error;
mod etcd;
mod guard;
mod kube;
mod native;
pub mod permissions;
mod ports;
mod prepared;
pub mod programs;
mod proxy;
mod server;
pub mod wine;

pub use authority::{Authority, Identity};
pub use error::Error;
pub use etcd::{Etcd, EtcdOptions, EtcdVersion};
pub use kube::{KubeApi, KubeOptions};
pub use ports::free_port;
pub use proxy::{Fault, Proxy};
pub use server::Server;
