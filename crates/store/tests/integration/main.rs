//! Tests of the backends, of the service, and of what follows them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod backends;
#[path = "../common/mod.rs"]
mod common;
mod damage;
mod etcd;
mod faults;
mod follow;
mod history;
mod kubernetes;
mod rpc;
