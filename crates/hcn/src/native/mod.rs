//! HNS of this machine, by `computenetwork.dll` and `vmcompute.dll`; and what else of Windows needs `unsafe`: adapters
//! and routes, the firewall, access lists, the event log, and services.
//!
//! [`functions`] has the signatures, [`calls`] makes a [`Call`](crate::Call) of them, and [`deadline`] gives each call a
//! deadline. They are compiled for tests on every system.

#[cfg(any(windows, test))]
mod calls;
#[cfg(any(windows, test))]
mod deadline;
#[cfg(windows)]
mod event_log;
#[cfg(windows)]
mod firewall;
#[cfg(any(windows, test))]
mod functions;
#[cfg(any(windows, test))]
mod in_flight;
#[cfg(windows)]
mod ip_helper;
#[cfg(windows)]
mod library;
#[cfg(any(windows, test))]
mod notifications;
#[cfg(windows)]
mod security;
#[cfg(windows)]
mod service;
#[cfg(windows)]
mod system;
#[cfg(test)]
mod tests;

#[cfg(windows)]
pub use event_log::{EventKind, EventLog};
#[cfg(windows)]
pub use firewall::NativeFirewall;
#[cfg(windows)]
pub use ip_helper::NativeIpHelper;
#[cfg(windows)]
pub use library::{LibraryError, NativeHcn};
#[cfg(windows)]
pub use security::{check_pipe, private_folder, program_data, restrict_pipe};
#[cfg(windows)]
pub use service::run_service;
#[cfg(windows)]
pub use system::{boot_id, windows_build};
