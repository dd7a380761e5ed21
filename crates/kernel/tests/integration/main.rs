//! The interfaces of the real kernel.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod namespaces;
mod nftables;
mod random_tables;
mod routes;
