//! Tests of the gRPC service beyond the conformance suite: who may do what, and limits.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod authorization;
mod limits;
