//! Tortie's speaker next to others, in network namespaces.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod bird;
mod exabgp;
mod lab;
mod mesh;
mod others;
mod restart;
mod scripted;
