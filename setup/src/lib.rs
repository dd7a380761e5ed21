//! Installs and builds what tests, checks and benchmarks need. `xtask` and the judges share it. It knows nothing of Tortie's own
//! crates, so that it builds in seconds.
#![allow(clippy::print_stdout, reason = "its callers are programs for the terminal of whoever builds")]

pub mod advisories;
pub mod command;
pub mod go;
pub mod image;
pub mod packages;
pub mod windows;

pub use command::{cargo, program, run, step, target_folder, workspace};
