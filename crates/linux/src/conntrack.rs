//! The kernel's table of connections (`linux/netfilter/nfnetlink_conntrack.h`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::netlink::attribute::{Attributes, put, put_nest};
use crate::netlink::{Family, Reply, Request, Socket};
use crate::{Error, Result};

/// A connection to the table of one network namespace: the one of the thread that opened it.
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

    /// Forgets all connections.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn flush(&mut self) -> Result<()> {
        self.socket.request(&message(DELETE, |_| ())).map_err(refused("forget all connections"))
    }

    /// Forgets the connections from, to or by way of translation with one of these addresses, and says how many.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn forget(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<usize> {
        if addresses.is_empty() {
            return Ok(0);
        }
        let connections = self.socket.dump(&message(GET, |_| ())).map_err(refused("list connections"))?;
        let theirs = connections
            .iter()
            .filter(|reply| addresses_of(reply).any(|address| addresses.contains(&address)));
        let deletions: Vec<_> = theirs.map(deletion).collect();
        let verdicts = self.socket.batch(&deletions).map_err(refused("forget connections"))?;
        for verdict in verdicts {
            match verdict {
                // It ended by itself meanwhile.
                Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENOENT) => {}
                verdict => verdict.map_err(refused("forget a connection"))?,
            }
        }
        Ok(deletions.len())
    }
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

/// The length of `struct nfgenmsg`, whose first byte is the family.
const HEADER: usize = 4;

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
    tuples.into_iter().flatten().filter_map(|(_, bytes)| match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    })
}

fn attributes(reply: &Reply) -> Attributes<'_> {
    Attributes(reply.payload.get(HEADER..).unwrap_or_default())
}

fn refused<E: Into<crate::netlink::Refusal>>(operation: &'static str) -> impl FnOnce(E) -> Error {
    Error::refused(operation, "conntrack")
}
