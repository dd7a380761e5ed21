//! The Windows dataplane with an emulated HNS.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod clusters;
mod dataplane;
mod faults;
#[cfg(target_os = "linux")]
mod mixed;
mod seed;
#[cfg(target_os = "linux")]
mod services_by_frames;
mod switch;
