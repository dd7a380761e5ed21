//! Test support for several crates and for `cargo xtask`. The program does not depend on it.

pub mod calico_client;
pub mod clusters;
pub mod emulator;
pub mod exceptions;
pub mod executables;
pub mod flows;
pub mod frames;
#[cfg(target_os = "linux")]
pub mod hosts;
#[cfg(target_os = "linux")]
pub mod ipip;
#[cfg(target_os = "linux")]
pub mod kernel;
#[cfg(target_os = "linux")]
pub mod links;
#[cfg(target_os = "linux")]
pub mod mixed;
pub mod programs;
pub mod random;
mod repeat;
pub mod services;
mod stateful;
mod update;
pub mod warnings;

pub use stateful::Stateful;
