//! Tests of the plugin's program.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod plugin;
