//! A library that looks like `computenetwork.dll` and `vmcompute.dll` to a Windows program, and sends each call to an emulated
//! HNS by TCP. It is for Wine, which has neither library.
//!
//! The address is in the environment variable `TORTIE_HNS_ADDRESS`. The same file is installed under both names.
//! docs/windows.md says how the tests use it.

#[cfg(windows)]
mod callbacks;
#[cfg(windows)]
mod client;
#[cfg(windows)]
mod exports;
#[cfg(any(windows, test))]
mod guid;
#[cfg(windows)]
mod hcs;
#[cfg(windows)]
mod memory;
#[cfg(any(windows, test))]
mod notifications;
#[cfg(any(windows, test))]
mod ports;
