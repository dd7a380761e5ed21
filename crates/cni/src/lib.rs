//! The Container Network Interface (CNI specification 1.1.0): the call of a runtime ([`Invocation`]), its result
//! ([`Success`], [`Failure`]), and the plugin ([`plugin`]) that the runtime executes for each pod. The plugin is
//! small: it passes the call to the agent over a socket ([`transport`]) and prints the answer.

mod ipam;
pub mod local;
#[doc(hidden)]
pub mod parsers;
pub mod plugin;
mod prev_result;
pub mod results;
pub mod transport;
mod types;

pub use ipam::AddressSource;
pub use prev_result::PrevResult;
pub use types::{
    Address, Attachment, Code, Command, Dns, Failure, Interface, Invocation, NetworkConfig, Route,
    SUPPORTED_VERSIONS, Success,
};
