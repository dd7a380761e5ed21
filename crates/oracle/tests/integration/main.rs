//! Verdicts of the oracle.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod hosts;
mod static_rules;
