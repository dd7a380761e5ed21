//! Links, addresses, routes and neighbours of one network namespace (`rtnetlink(7)`).

mod codec;
mod rate_limit;
mod types;
mod watch;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

pub use types::{
    Address, Change, FdbEntry, Link, LinkSetting, Neighbour, NewLink, NewLinkKind, NextHop, Peer, RateLimit,
    Route, RouteKind, Vxlan,
};
pub use watch::RouteWatch;

use crate::netlink::{Family, Refusal, Reply, Request, Socket};
use crate::{Error, Result};

/// Reads an object in each way in which an answer is read.
pub(crate) fn read_any(reply: &Reply) {
    let _ = (codec::link(reply), codec::is_operating(reply), codec::address(reply));
    let _ = (codec::neighbour(reply), codec::fdb_entry(reply), rate_limit::rate(reply, 1));
    if let Some((route, _)) = codec::route_and_dead_links(reply) {
        // It may be changed or removed.
        let _ = codec::change(&Change::DeleteRoute(route));
    }
}

/// A netlink connection to the tables of one network namespace: that of the thread that opened it.
#[derive(Debug)]
pub struct RouteSocket {
    socket: Socket,
}

impl RouteSocket {
    /// Opens a connection.
    ///
    /// # Errors
    /// The call that failed.
    pub fn open() -> Result<Self> {
        Ok(Self { socket: Socket::open(Family::Route)? })
    }

    /// Creates a link. It is an error if one of that name exists.
    ///
    /// # Errors
    /// The link and the kernel's refusal.
    pub fn create(&mut self, link: &NewLink<'_>) -> Result<()> {
        self.socket.request(&codec::create(link)).map_err(Error::refused("make the link", link.name))
    }

    /// Moves a link to another network namespace, where it is down and has no addresses and routes.
    ///
    /// # Errors
    /// The link and the kernel's refusal.
    pub fn move_link(&mut self, index: u32, namespace: &impl AsFd) -> Result<()> {
        let request = codec::move_link(index, namespace.as_fd());
        self.socket.request(&request).map_err(Error::refused("move the link", format!("link {index}")))
    }

    /// Makes one change.
    ///
    /// # Errors
    /// The object, and the kernel's refusal.
    pub fn change(&mut self, change: &Change) -> Result<()> {
        let refused = |refusal: Refusal| Error::refused(change.operation(), change.to_string())(refusal);
        self.socket.request(&codec::change(change)).map_err(refused)
    }

    /// Makes many changes, in order, with few system calls, and returns the kernel's result for each. A refusal does
    /// not prevent the next change from being tried.
    ///
    /// # Errors
    /// The connection failed, and it is unknown which changes were made.
    pub fn change_all(&mut self, changes: &[Change]) -> Result<Vec<Result<()>>> {
        let requests: Vec<_> = changes.iter().map(codec::change).collect();
        let verdicts = self.socket.batch(&requests);
        let verdicts = verdicts.map_err(Error::system("talk to the kernel", "route netlink socket"))?;
        let named = |(verdict, change): (Result<(), Refusal>, &Change)| {
            verdict.map_err(Error::refused(change.operation(), change.to_string()))
        };
        Ok(verdicts.into_iter().zip(changes).map(named).collect())
    }

    /// All links.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        self.dump("list links", &codec::list_links(), codec::link)
    }

    /// The link of this name, if there is one.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>> {
        match self.socket.get(&codec::get_link(name)) {
            Ok(replies) => Ok(replies.iter().find_map(codec::link)),
            Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(refusal) => Err(Error::refused("show the link", name)(refusal)),
        }
    }

    /// Whether the link of this name exists and is operating: both ends are up, and its queue is active.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn is_operating(&mut self, name: &str) -> Result<bool> {
        match self.socket.get(&codec::get_link(name)) {
            Ok(replies) => Ok(replies.iter().any(codec::is_operating)),
            Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENODEV) => Ok(false),
            Err(refusal) => Err(Error::refused("show the link", name)(refusal)),
        }
    }

    /// Waits until a link is operating, at most this long; returns whether it is. A worker of the kernel activates
    /// the queue of a new link some milliseconds after both of its ends are up; packets sent before are dropped.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn wait_until_operating(&mut self, name: &str, patience: Duration) -> Result<bool> {
        /// The interval between checks.
        const PAUSE: Duration = Duration::from_micros(200);
        let started = Instant::now();
        while !self.is_operating(name)? {
            if started.elapsed() >= patience {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(true)
    }

    /// All addresses.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn addresses(&mut self) -> Result<Vec<Address>> {
        self.dump("list addresses", &codec::list_addresses(), codec::address)
    }

    /// The unicast and blackhole routes of the main table, of both families.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn routes(&mut self) -> Result<Vec<Route>> {
        let mut routes = self.dump("list IPv4 routes", &codec::list_routes(false), codec::route)?;
        routes.extend(self.dump("list IPv6 routes", &codec::list_routes(true), codec::route)?);
        Ok(routes)
    }

    /// The routes as [`routes`](Self::routes) lists them, and the links of their next hops that the kernel does not use, because they
    /// are down.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn routes_and_dead_links(&mut self) -> Result<(Vec<Route>, BTreeSet<u32>)> {
        let (v4, v6) = (codec::list_routes(false), codec::list_routes(true));
        let mut found = self.dump("list IPv4 routes", &v4, codec::route_and_dead_links)?;
        found.extend(self.dump("list IPv6 routes", &v6, codec::route_and_dead_links)?);
        let dead = found.iter().flat_map(|(_, dead)| dead).copied().collect();
        Ok((found.into_iter().map(|(route, _)| route).collect(), dead))
    }

    /// The permanent neighbours (static ARP and neighbour discovery entries).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn neighbours(&mut self) -> Result<Vec<Neighbour>> {
        self.dump("list neighbours", &codec::list_neighbours(), codec::neighbour)
    }

    /// The forwarding entries of a VXLAN link.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn fdb(&mut self, link: u32) -> Result<Vec<FdbEntry>> {
        self.dump("list forwarding entries", &codec::list_fdb(link), codec::fdb_entry)
    }

    /// The rate that limits what a link sends, in bytes a second; `None` if its root discipline is no token bucket.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn sending_rate(&mut self, link: u32) -> Result<Option<u64>> {
        let read = |reply: &crate::netlink::Reply| rate_limit::rate(reply, link);
        Ok(self.dump("list queueing disciplines", &rate_limit::list(), read)?.into_iter().next())
    }

    /// The decoded objects of a dump, without those of unknown kinds.
    fn dump<T>(
        &mut self,
        operation: &'static str,
        request: &Request,
        read: impl Fn(&crate::netlink::Reply) -> Option<T>,
    ) -> Result<Vec<T>> {
        let replies =
            self.socket.dump(request).map_err(Error::refused(operation, "this network namespace"))?;
        Ok(replies.iter().filter_map(read).collect())
    }
}
