//! Tests of the language from outside of the crate.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod selector;
