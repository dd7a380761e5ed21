//! Cables between network namespaces whose other ends a test reads and writes.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use tortie_dataplane::MacAddress;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Change, LinkSetting, NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_kernel::{interface_index, sysctl};

use crate::frames;

/// The hardware address of everything behind a link.
pub const OTHERS: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

/// The kernel parameters of nodes that forward for pods of both families, without ICMP redirects, because redirects
/// repeat the packet with its tag.
///
/// # Errors
/// An error of the kernel.
pub fn node_parameters() -> Result<()> {
    for (name, value) in [
        ("net/ipv6/conf/all/forwarding", "1"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/conf/default/rp_filter", "0"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/default/send_redirects", "0"),
    ] {
        sysctl::ensure(name, value)?;
    }
    Ok(())
}

/// Restricts the calling thread, and the threads that it starts from then on, to one processor, so that all of their
/// packets go through one queue and keep their order.
///
/// # Errors
/// An error of the kernel.
pub fn keep_to_one_processor() -> Result<()> {
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    Ok(rustix::thread::sched_setaffinity(None, &one)?)
}

/// A cable whose other end the test reads and writes.
///
/// # Errors
/// An error of the kernel.
pub fn end(node: &NetNs, near: (&str, MacAddress), outside: &NetNs, name: &str) -> Result<Arc<PacketSocket>> {
    cable(node, near, outside, (name, OTHERS))?;
    let socket = outside.run(|| PacketSocket::open(interface_index(name)?))??;
    socket.set_receive_buffer(8 << 20)?;
    Ok(Arc::new(socket))
}

/// A cable between two namespaces. Both ends are up, and no packet is lost.
pub fn cable(from: &NetNs, near: (&str, MacAddress), to: &NetNs, far: (&str, MacAddress)) -> Result<()> {
    from.run(|| -> Result<()> {
        let peer = Peer { name: far.0, mac: Some(far.1), mtu: None, namespace: Some(to.as_fd()) };
        let link = NewLink { up: true, mac: Some(near.1), ..NewLink::new(near.0, NewLinkKind::Veth(peer)) };
        Ok(RouteSocket::open()?.create(&link)?)
    })??;
    to.run(|| -> Result<()> {
        let up = Change::SetLink(interface_index(far.0)?, vec![LinkSetting::Up(true)]);
        Ok(RouteSocket::open()?.change(&up)?)
    })??;
    wait_for(from, near.0)?;
    wait_for(to, far.0)
}

/// Waits until the link's queue is active: a worker of the kernel activates it some time after both ends are up.
///
/// # Errors
/// An error of the kernel, or the queue does not become active.
pub fn wait_for(namespace: &NetNs, link: &str) -> Result<()> {
    let operating =
        namespace.run(|| RouteSocket::open()?.wait_until_operating(link, Duration::from_secs(10)))??;
    ensure!(operating, "the link {link} does not come up");
    Ok(())
}

/// The tags of the packets that have arrived.
pub(crate) fn tags(socket: &PacketSocket) -> Result<BTreeSet<u32>> {
    let mut buffer = [0; 2048];
    let mut tags = BTreeSet::new();
    while let Some(length) = socket.receive(&mut buffer)? {
        tags.insert(frames::tag(&buffer[..length]));
    }
    Ok(tags)
}
