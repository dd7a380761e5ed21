//! Features of IPAM beyond one IPv4 address for a pod.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod borrowing;
mod check;
mod families;
mod fixed;
mod load_balancers;
mod releases;
mod settings;
mod support;
