//! A library that looks like `computenetwork.dll` and `vmcompute.dll` to a Windows program, and sends each call to an emulated
//! HNS by TCP. It is for Wine, which has neither library.
//!
//! The address is in the environment variable `TORTIE_HNS_ADDRESS`. The same file is installed under both names. What the
//! emulator cannot do returns `E_NOTIMPL`: `exports` lists it. docs/windows.md says how the tests use it.
#![cfg(windows)]

mod callbacks;
mod client;
mod exports;
mod hcs;
mod memory;
