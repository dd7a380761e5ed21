//! Runs the program on manifests and on datastores, without a lab.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod examples;
#[path = "../examples_support/mod.rs"]
mod examples_support;
mod offline;
mod served;
