//! Tests of the servers for tests.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod etcd;
mod kube;
mod missing;
mod nothing_remains;
mod proxy;
