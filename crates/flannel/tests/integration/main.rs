//! Tests with a real etcd.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod leases;
