//! Tests of classes from outside of the crate.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod classes;
mod previews;
