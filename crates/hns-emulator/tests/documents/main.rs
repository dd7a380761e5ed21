//! Documents and calls of the emulated HNS.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod dual_stack;
mod knobs;
mod npm;
mod objects;
mod others;
mod psm1;
mod sets;
mod support;
