//! The parsers of what runtimes and other plugins send, for `judges/fuzz`: in the product, they are behind the environment, standard input and
//! sockets.

use std::ffi::OsString;
use std::io;
use std::net::IpAddr;

use serde_json::Value;

use crate::ipam::{IpamResult, host_local_candidates};
use crate::transport::Answer;
use crate::{Failure, Invocation, plugin, transport};

/// Reads a call: the variables of the environment, and the configuration on standard input.
///
/// # Errors
/// What the runtime gets instead.
pub fn invocation(
    environment: &dyn Fn(&str) -> Option<OsString>,
    config: &[u8],
) -> Result<Invocation, Failure> {
    plugin::read_invocation(environment, config)
}

/// The first addresses that host-local may give for a call, without its files.
///
/// # Errors
/// The section `ipam` is invalid.
pub fn candidates(call: &Invocation) -> Result<Vec<IpAddr>, Failure> {
    host_local_candidates(call)
}

/// Reads the result of another IPAM plugin, and adds its settings of DNS to a document.
///
/// # Errors
/// What the runtime gets instead.
pub fn ipam_result(printed: &Value, document: &mut Value) -> Result<(), Failure> {
    IpamResult::read(printed, "other").map(|result| result.add_dns(document))
}

/// Reads an answer of the agent.
///
/// # Errors
/// It is none.
pub fn answer(message: &[u8]) -> io::Result<Answer> {
    transport::read_answer(message)
}

/// Whether this is a whole message, or can never become one.
#[must_use]
pub fn is_complete(message: &[u8]) -> bool {
    transport::is_complete(message)
}
