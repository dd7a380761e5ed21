//! Problems of objects, for the conditions of the node.

use std::net::IpAddr;

use thiserror::Error;
use tortie_api::net::Protocol;
use tortie_api::{FieldError, Key};

use crate::state::ServiceName;

/// A part of an object that has no effect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Problem {
    /// A field cannot be used.
    #[error("{object}: {field}: {problem}")]
    Field {
        /// The object.
        object: Key,
        /// The field, as `spec.externalIPs[0]`.
        field: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// Another Service has the address and port.
    #[error(
        "Service {service}: {address} port {port} of {protocol} leads to Service {winner}, which has it, too; remove it from one of them"
    )]
    Taken {
        /// The Service that does not get it.
        service: ServiceName,
        /// The address; absent for a node port.
        address: FrontendPlace,
        /// The protocol.
        protocol: Protocol,
        /// The port.
        port: u16,
        /// The Service that gets it.
        winner: ServiceName,
    },
}

/// Where a frontend is, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendPlace {
    /// At an address.
    Address(IpAddr),
    /// At the node's addresses.
    Node,
}

impl std::fmt::Display for FrontendPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address) => write!(f, "address {address}"),
            Self::Node => f.write_str("the node"),
        }
    }
}

impl Problem {
    pub(crate) fn new(object: Key, error: FieldError) -> Self {
        Self::Field { object, field: error.path, problem: error.problem }
    }
}
