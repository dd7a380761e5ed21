//! The agent over an in-memory datastore and a fake operating system.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;
mod control;
mod plane;
mod pods;
mod unsupported;
