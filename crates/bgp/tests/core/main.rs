//! Sessions and routing tables in virtual time.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod convergence;
mod decisions;
mod filters;
mod network;
mod oracle;
mod refreshes;
mod restarts;
mod sessions;
mod tables;
