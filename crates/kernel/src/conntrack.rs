//! The kernel's connection tracking table (`linux/netfilter/nfnetlink_conntrack.h`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use tortie_api::net::{Flow, Protocol};

use crate::netlink::attribute::{Attributes, put, put_nest};
use crate::netlink::{Family, Reply, Request, Socket};
use crate::{Error, Result};

/// A netlink connection to the table of one network namespace: that of the thread that opened it.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

impl Conntrack {
    /// Opens a connection.
    ///
    /// # Errors
    /// The call that failed.
    pub fn open() -> Result<Self> {
        Ok(Self { socket: Socket::open(Family::Netfilter)? })
    }

    /// Removes all connections.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn flush(&mut self) -> Result<()> {
        self.socket.request(&message(DELETE, |_| ())).map_err(refused("forget all connections"))
    }

    /// The addresses from, to or with which connections are, before and after translation.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn addresses(&mut self) -> Result<BTreeSet<IpAddr>> {
        let connections = self.socket.dump(&message(GET, |_| ())).map_err(refused("list connections"))?;
        Ok(connections.iter().flat_map(addresses_of).collect())
    }

    /// The number of connections by the address that began them.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn by_source(&mut self) -> Result<BTreeMap<IpAddr, usize>> {
        let connections = self.socket.dump(&message(GET, |_| ())).map_err(refused("list connections"))?;
        let mut counts = BTreeMap::new();
        for flow in connections.iter().filter_map(flow_of) {
            *counts.entry(flow.source).or_default() += 1;
        }
        Ok(counts)
    }

    /// Removes the connections from, to or translated with one of these addresses, and returns their number.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn forget(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<usize> {
        if addresses.is_empty() {
            return Ok(0);
        }
        self.forget_if(|connection| addresses_of(connection).any(|address| addresses.contains(&address)))
    }

    /// Removes the connections for which the condition holds, and returns their number. A connection is represented
    /// by its first packet at the time of forwarding: its destination is already translated, its source is not.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn forget_flows(&mut self, is_gone: impl Fn(&Flow) -> bool) -> Result<usize> {
        self.forget_if(|connection| flow_of(connection).is_some_and(|flow| is_gone(&flow)))
    }

    /// Removes the connections for which the condition holds, and returns their number.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn forget_connections(&mut self, is_gone: impl Fn(&Connection) -> bool) -> Result<usize> {
        self.forget_if(|reply| connection_of(reply).is_some_and(|connection| is_gone(&connection)))
    }

    fn forget_if(&mut self, is_gone: impl Fn(&Reply) -> bool) -> Result<usize> {
        let connections = self.socket.dump(&message(GET, |_| ())).map_err(refused("list connections"))?;
        let deletions: Vec<_> =
            connections.iter().filter(|connection| is_gone(connection)).map(deletion).collect();
        let verdicts = self.socket.batch(&deletions).map_err(refused("forget connections"))?;
        for verdict in verdicts {
            match verdict {
                // It has ended by itself in the meantime.
                Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENOENT) => {}
                verdict => verdict.map_err(refused("forget a connection"))?,
            }
        }
        Ok(deletions.len())
    }
}

/// Who answers a client, and where the client sent its first packet. They differ if the destination was translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination of the first packet before translation.
    pub requested: SocketAddr,
    /// The source of replies.
    pub replier: SocketAddr,
}

// `IPCTNL_MSG_CT_…`, in the subsystem `NFNL_SUBSYS_CTNETLINK`.
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;

// `CTA_…`
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
// `CTA_IP_…` of IPv4 and of IPv6; `CTA_PROTO_…`, of ICMP and of ICMPv6.
const SOURCE: [u16; 2] = [1, 3];
const DESTINATION: [u16; 2] = [2, 4];
const PROTOCOL: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;
const ICMP_TYPE: [u16; 2] = [5, 8];
const ICMP_CODE: [u16; 2] = [6, 9];

/// The length of `struct nfgenmsg`, whose first byte is the family.
const HEADER: usize = 4;

/// Reads an object in each way in which an answer is read.
pub(crate) fn read_any(reply: &Reply) {
    let _ = (flow_of(reply), connection_of(reply), addresses_of(reply).count(), deletion(reply));
}

fn message(kind: u16, fill: impl FnOnce(&mut Vec<u8>)) -> Request {
    let mut payload = vec![0; HEADER];
    fill(&mut payload);
    Request { kind, flags: 0, payload }
}

/// The message that deletes the connection of a dump: by its family, tuple, zone and id.
fn deletion(connection: &Reply) -> Request {
    let attributes = attributes(connection);
    let mut request = message(DELETE, |to| {
        put_nest(to, TUPLE_ORIG, |to| to.extend(attributes.nest(TUPLE_ORIG).0));
        for kind in [ZONE, ID] {
            if let Some(value) = attributes.get(kind) {
                put(to, kind, value);
            }
        }
    });
    if let (Some(to), Some(from)) = (request.payload.first_mut(), connection.payload.first()) {
        *to = *from;
    }
    request
}

fn addresses_of(connection: &Reply) -> impl Iterator<Item = IpAddr> {
    let tuples = [TUPLE_ORIG, TUPLE_REPLY].map(|tuple| attributes(connection).nest(tuple).nest(TUPLE_IP));
    tuples.into_iter().flatten().filter_map(|(_, bytes)| address(bytes))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

/// The flow with which the connection began. Its translated destination comes from the tuple of its replies.
fn flow_of(connection: &Reply) -> Option<Flow> {
    let [there, back] = [TUPLE_ORIG, TUPLE_REPLY].map(|tuple| attributes(connection).nest(tuple));
    let address_of = |tuple: Attributes<'_>, kinds: [u16; 2]| {
        kinds.into_iter().find_map(|kind| tuple.nest(TUPLE_IP).get(kind)).and_then(address)
    };
    let port = |tuple: Attributes<'_>, kind| {
        let bytes = tuple.nest(TUPLE_PROTO).get(kind).and_then(|bytes| <[u8; 2]>::try_from(bytes).ok());
        bytes.map_or(0, u16::from_be_bytes)
    };
    let byte = |kind| there.nest(TUPLE_PROTO).get(kind).and_then(|bytes| bytes.first().copied());
    let one_of = |kinds: [u16; 2]| kinds.into_iter().find_map(byte);
    Some(Flow {
        source: address_of(there, SOURCE)?,
        destination: address_of(back, SOURCE)?,
        protocol: Protocol(byte(PROTOCOL)?),
        source_port: port(there, SOURCE_PORT),
        destination_port: port(back, SOURCE_PORT),
        icmp: one_of(ICMP_TYPE).zip(one_of(ICMP_CODE)),
    })
}

/// The two ends of a connection at the server's side.
fn connection_of(connection: &Reply) -> Option<Connection> {
    let end = |tuple, addresses: [u16; 2], port| {
        let tuple = attributes(connection).nest(tuple);
        let address =
            addresses.into_iter().find_map(|kind| tuple.nest(TUPLE_IP).get(kind)).and_then(address)?;
        let bytes = tuple.nest(TUPLE_PROTO).get(port).and_then(|bytes| <[u8; 2]>::try_from(bytes).ok());
        Some(SocketAddr::new(address, bytes.map_or(0, u16::from_be_bytes)))
    };
    Some(Connection {
        protocol: flow_of(connection)?.protocol,
        requested: end(TUPLE_ORIG, DESTINATION, DESTINATION_PORT)?,
        replier: end(TUPLE_REPLY, SOURCE, SOURCE_PORT)?,
    })
}

fn attributes(reply: &Reply) -> Attributes<'_> {
    Attributes(reply.payload.get(HEADER..).unwrap_or_default())
}

fn refused<E: Into<crate::netlink::Refusal>>(operation: &'static str) -> impl FnOnce(E) -> Error {
    Error::refused(operation, "conntrack")
}
