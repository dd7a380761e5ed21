//! Tests of IPAM over stores in memory and real servers.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod blocks;
mod claims;
mod common;
mod features;
mod ipam;
mod kubernetes;
mod model;
mod servers;
