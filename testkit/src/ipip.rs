//! A stand-in for the kernel's IPIP (RFC 2003), for kernels without its module.
//!
//! It has the link `tunl0`. A packet that leaves there is sent in another one to the router of its route, and what arrives in an IPIP
//! packet comes out of the link. The outer packets are real: raw sockets send and receive them, so routes and packet filters of both
//! nodes see what they would see. It does not show what the module itself does, for instance with MTU and fragments.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto,
    socket_with,
};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::RouteSocket;
use tortie_kernel::tun::Tun;

const NAME: &str = "tunl0";
const LONGEST: usize = 65_535;
const PAUSE: Duration = Duration::from_millis(100);
/// The protocol number of IPv4 in IPv4.
const IPIP: Protocol = ipproto::IPIP;

/// A node's IPIP, until it is dropped.
#[derive(Debug)]
pub struct IpipStandIn {
    ends: Arc<AtomicBool>,
    relay: Option<JoinHandle<()>>,
}

impl IpipStandIn {
    /// Gives a network namespace IPIP.
    ///
    /// # Panics
    /// The kernel refuses the link or the socket.
    #[must_use]
    #[allow(clippy::unwrap_used, reason = "a test that cannot begin fails")]
    pub fn start(namespace: &NetNs) -> Self {
        let open = || {
            let tun = Tun::create_ipv4_tunnel(NAME).unwrap();
            let raw =
                socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::NONBLOCK, Some(IPIP)).unwrap();
            Relay { tun, raw, routes: RouteSocket::open().unwrap() }
        };
        let mut relay = namespace.run(open).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ending = ends.clone();
        let relay = std::thread::spawn(move || {
            while !ending.load(Ordering::Relaxed) {
                relay.turn();
            }
        });
        Self { ends, relay: Some(relay) }
    }
}

impl Drop for IpipStandIn {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(relay) = self.relay.take() {
            let _ = relay.join();
        }
    }
}

struct Relay {
    tun: Tun,
    raw: OwnedFd,
    routes: RouteSocket,
}

impl Relay {
    /// Waits for packets, and passes them on.
    fn turn(&mut self) {
        let mut waits = [PollFd::new(&self.tun, PollFlags::IN), PollFd::new(&self.raw, PollFlags::IN)];
        let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
        if poll(&mut waits, Some(&pause)).is_err() {
            return;
        }
        let mut buffer = vec![0; LONGEST];
        // A link that is down refuses packets, as that of the kernel does.
        while let Ok(Some(length)) = self.tun.receive(&mut buffer) {
            if let Some(router) = buffer.get(16..20).and_then(|to| self.router(to)) {
                let _ =
                    sendto(&self.raw, &buffer[..length], SendFlags::empty(), &SocketAddrV4::new(router, 0));
            }
        }
        while let Ok((length, _)) = recv(&self.raw, &mut *buffer, RecvFlags::empty()).map_err(io::Error::from)
        {
            let outer = usize::from(buffer[0] & 0xf) * 4;
            match self.tun.send(&buffer[outer..length]) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return,
                _ => {}
            }
        }
    }

    /// The router of the route to an address that the link has.
    fn router(&mut self, to: &[u8]) -> Option<Ipv4Addr> {
        let to = IpAddr::from(<[u8; 4]>::try_from(to).ok()?);
        let link = self.routes.link(NAME).ok()??.index;
        let routes = self.routes.routes().ok()?.into_iter();
        let routes = routes.filter(|route| route.link == Some(link) && route.destination.contains(&to));
        match routes.max_by_key(|route| route.destination.prefix_len())?.gateway? {
            IpAddr::V4(router) => Some(router),
            IpAddr::V6(_) => None,
        }
    }
}
