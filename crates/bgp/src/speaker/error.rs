//! Errors of the shell.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use thiserror::Error;

/// Why a speaker could not do something.
#[derive(Debug, Error)]
pub enum Error {
    /// It cannot listen.
    #[error("{address}: cannot listen: {source}; another BGP speaker may use the port")]
    Listen {
        /// The address and port.
        address: SocketAddr,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The system does not have the address, so nothing is there to listen at.
    #[error(
        "{address}: cannot listen, so no peer can connect there: {source}; give an interface this address"
    )]
    NoAddress {
        /// The address and port.
        address: SocketAddr,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// An option of a socket was refused.
    #[error(
        "peer {peer}: cannot protect the connection: {problem}; remove password and ttlSecurity, or use a kernel with TCP_MD5SIG and IP_MINTTL"
    )]
    Protect {
        /// The peer.
        peer: IpAddr,
        /// What went wrong.
        problem: String,
    },
    /// The identifier would change.
    #[error("the BGP identifier cannot change from {from} to {to} while the speaker runs; start a new one")]
    Identifier {
        /// The identifier now.
        from: Ipv4Addr,
        /// The identifier of the new configuration.
        to: Ipv4Addr,
    },
    /// The speaker has ended.
    #[error("the BGP speaker has ended")]
    Ended,
}
