//! Tests of the speaker: its parts, and the whole next to others.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod calico;
mod codec;
mod core;
#[cfg(target_os = "linux")]
mod interop;
