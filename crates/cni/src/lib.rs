//! The Container Network Interface (CNI specification 1.1.0): what a runtime says ([`Invocation`]), what it is answered
//! ([`Success`], [`Failure`]), and the plugin ([`plugin`]), which the runtime executes for each pod. It is small: it
//! hands the call to the agent over a socket ([`transport`]) and prints the answer.

pub mod plugin;
pub mod transport;
mod types;

pub use types::{
    Address, Code, Command, Failure, Interface, Invocation, NetworkConfig, Route, SUPPORTED_VERSIONS, Success,
};
