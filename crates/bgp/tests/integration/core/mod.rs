//! Sessions and routing tables in virtual time.

mod convergence;
mod decisions;
mod filters;
mod network;
mod oracle;
mod refreshes;
mod restarts;
mod sessions;
mod tables;
