//! The program without a lab: what it says of manifests, and of a datastore.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod examples;
#[path = "../examples_support/mod.rs"]
mod examples_support;
mod offline;
mod served;
