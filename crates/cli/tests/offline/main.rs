//! Commands on manifests, without a cluster.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod completed;
mod cost;
mod dropped;
mod explain;
mod hosts;
mod lint;
mod matrix;
mod preview;
mod support;
