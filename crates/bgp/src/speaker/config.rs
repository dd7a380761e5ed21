//! The configuration of a speaker.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::fsm::SessionSettings;
use crate::rib::PeerRules;

/// The configuration of a speaker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The BGP identifier. A change needs a new speaker.
    pub identifier: Ipv4Addr,
    /// The addresses and ports to listen on.
    pub listen: Vec<SocketAddr>,
    /// The peers, by address and port. A port is needed only to connect.
    pub peers: BTreeMap<SocketAddr, PeerConfig>,
}

/// The configuration of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerConfig {
    /// The settings of the session.
    pub session: SessionSettings,
    /// The settings for routes.
    pub rules: PeerRules,
    /// The settings of the connection.
    pub transport: Transport,
}

/// The settings of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Transport {
    /// The own address to connect from.
    pub source: Option<IpAddr>,
    /// The password of both ends (RFC 2385).
    pub password: Option<Password>,
    /// The most routers between the ends, plus one (RFC 5082); packets from further away are dropped.
    pub ttl_security: Option<u8>,
}

/// A password. It does not appear in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(pub String);

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(password)")
    }
}
