//! Network namespaces around an emulated HNS with a switch: the node's, and those of pods. They need root.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tortie_hcn::{Guid, Hcn};
use tortie_hns_emulator::bind_compartment;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, LinkSetting, RouteSocket};

/// How long a packet may take.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;

/// The node, and its pods by their addresses.
pub(crate) struct Frames {
    node: NetNs,
    pods: RefCell<BTreeMap<Ipv4Addr, NetNs>>,
}

impl Frames {
    /// A node with this address, from which no network is reached.
    pub(crate) fn new(address: Ipv4Addr) -> Result<Self> {
        let node = NetNs::create().context("a network namespace, which needs root")?;
        node.run(|| -> Result<()> {
            let link = tortie_kernel::interface_index("lo")?;
            let address = Address { link, address: address.into(), prefix_length: 32 };
            let changes = [Change::AddAddress(address), Change::SetLink(link, vec![LinkSetting::Up(true)])];
            for changed in RouteSocket::open()?.change_all(&changes)? {
                changed?;
            }
            Ok(())
        })??;
        Ok(Self { node, pods: RefCell::default() })
    }

    /// The node's namespace, for the switch.
    pub(crate) fn node(&self) -> Result<NetNs> {
        Ok(NetNs::open(&path_of(&self.node))?)
    }

    /// Connects a namespace of HNS, which has a pod's endpoint.
    pub(crate) fn connect(&self, hns: &dyn Hcn, namespace: Guid, pod: Ipv4Addr) -> Result<()> {
        let container = NetNs::create()?;
        bind_compartment(hns, namespace, Some(&path_of(&container)))?;
        self.pods.borrow_mut().insert(pod, container);
        Ok(())
    }

    /// Each of two pods connects to the other, and the node to both.
    pub(crate) fn exchange(&self, [one, other]: [Ipv4Addr; 2]) -> Result<()> {
        let pods = self.pods.borrow();
        let place = |address| pods.get(&address).with_context(|| format!("there is no pod {address}"));
        for (from, to, source) in [
            (place(one)?, other, Some(one)),
            (place(other)?, one, Some(other)),
            (&self.node, one, None),
            (&self.node, other, None),
        ] {
            send(from, (place(to)?, to), source)?;
        }
        Ok(())
    }
}

/// Connects to a server, which must see the client's address, and sends it more than a packet.
pub(crate) fn send(from: &NetNs, (server, to): (&NetNs, Ipv4Addr), source: Option<Ipv4Addr>) -> Result<()> {
    let listener = server.run(|| TcpListener::bind((to, PORT)))??;
    let address = (IpAddr::from(to), PORT).into();
    let client = from.run(|| TcpStream::connect_timeout(&address, PATIENCE))?;
    let mut client = client.with_context(|| format!("{source:?} to {to}"))?;
    let (mut accepted, peer) = listener.accept()?;
    ensure!(source.is_none_or(|source| peer.ip() == source), "{to} sees {peer}, not {source:?}");
    accepted.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let sent = vec![7; 100_000];
    let mut heard = vec![0; sent.len()];
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| client.write_all(&sent));
        accepted.read_exact(&mut heard)?;
        writing.join().unwrap_or_else(|_| Err(std::io::Error::other("the writer panicked")))
    })?;
    ensure!(heard == sent, "{to} hears something else");
    Ok(())
}

/// A path by which this process's namespace can be opened.
pub(crate) fn path_of(namespace: &NetNs) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_fd().as_raw_fd()).into()
}
