//! Network namespaces around a Windows node: a Linux node, with VXLAN or routes, and a machine outside of the cluster. They need root.

use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;

use anyhow::{Context, Result};
use ipnet::{IpNet, Ipv4Net};
use tortie_api::net::MacAddress;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{
    Address, Change, FdbEntry, LinkSetting, Neighbour, NewLink, NewLinkKind, Peer, Route, RouteSocket, Vxlan,
};
use tortie_kernel::{interface_index, sysctl};

const BRIDGE: &str = "br0";
pub(super) const UPLINK: &str = "eth0";
const OVERLAY: &str = "vxlan.calico";
/// The identifier of the overlay.
pub(super) const VNI: u32 = 4096;
/// The Linux node's end of its tunnel.
pub(super) const LINUX_MAC: MacAddress = MacAddress([0x66, 0, 0, 0, 0, 1]);

/// The machines, on one bridge.
pub(super) struct Underlay {
    /// The Windows node.
    pub(super) windows: NetNs,
    /// The Linux node.
    pub(super) linux: NetNs,
    /// A machine without an overlay.
    pub(super) outside: NetNs,
    _bridge: NetNs,
}

impl Underlay {
    /// Machines with these addresses: the Windows node, the Linux node, and the one outside.
    pub(super) fn new([windows, linux, outside]: [Ipv4Addr; 3]) -> Result<Self> {
        let bridge = NetNs::create().context("a network namespace, which needs root")?;
        let link = NewLink { up: true, ..NewLink::new(BRIDGE, NewLinkKind::Bridge) };
        bridge.run(|| RouteSocket::open()?.create(&link))??;
        let join = |address| join(&bridge, address);
        Ok(Self { windows: join(windows)?, linux: join(linux)?, outside: join(outside)?, _bridge: bridge })
    }

    /// Gives the Linux node an overlay with this pod, and a route to the block of the Windows node.
    pub(super) fn overlay(&self, pod: Ipv4Addr, windows: &WindowsTunnel) -> Result<()> {
        self.linux.run(|| -> Result<()> {
            let mut links = RouteSocket::open()?;
            let vxlan = Vxlan { vni: VNI, port: 4789, local: None, learning: false };
            let link = NewLink::new(OVERLAY, NewLinkKind::Vxlan(vxlan));
            links.create(&NewLink { up: true, mac: Some(LINUX_MAC), mtu: Some(1450), ..link })?;
            let link = interface_index(OVERLAY)?;
            let WindowsTunnel { block, gateway, mac, node } = *windows;
            let changes = [
                Change::AddAddress(Address { link, address: pod.into(), prefix_length: 32 }),
                Change::SetNeighbour(Neighbour { link, address: gateway.into(), mac }),
                Change::SetFdb(FdbEntry { link, mac, destination: node.into() }),
                Change::AddRoute(Route::via(IpNet::V4(block), gateway.into(), link, 80)),
            ];
            for changed in links.change_all(&changes)? {
                changed?;
            }
            Ok(())
        })?
    }
}

impl Underlay {
    /// Gives the Linux node this pod, and both nodes routes to each other's blocks. The Windows node forwards.
    pub(super) fn routes(
        &self,
        windows: (Ipv4Net, Ipv4Addr),
        linux: (Ipv4Net, Ipv4Addr),
        pod: Ipv4Addr,
    ) -> Result<()> {
        let route = |(block, node): (Ipv4Net, Ipv4Addr), source: Option<Ipv4Addr>| -> Result<()> {
            let route = Route::via(IpNet::V4(block), node.into(), interface_index(UPLINK)?, 80);
            Ok(RouteSocket::open()?
                .change(&Change::AddRoute(Route { source: source.map(Into::into), ..route }))?)
        };
        self.windows.run(|| -> Result<()> {
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
            route(linux, None)
        })??;
        self.linux.run(|| -> Result<()> {
            let address = Address { link: interface_index(UPLINK)?, address: pod.into(), prefix_length: 32 };
            RouteSocket::open()?.change(&Change::AddAddress(address))?;
            route(windows, Some(pod))
        })?
    }
}

/// The Windows node's end of the overlay.
pub(super) struct WindowsTunnel {
    pub(super) block: Ipv4Net,
    pub(super) gateway: Ipv4Addr,
    pub(super) mac: MacAddress,
    /// Its address on the bridge.
    pub(super) node: Ipv4Addr,
}

/// A machine on the bridge.
fn join(bridge: &NetNs, address: Ipv4Addr) -> Result<NetNs> {
    let machine = NetNs::create()?;
    let name = format!("port{}", address.octets()[3]);
    bridge.run(|| -> Result<()> {
        let mut links = RouteSocket::open()?;
        let controller = Some(interface_index(BRIDGE)?);
        let peer = Peer { name: UPLINK, mac: None, mtu: None, namespace: Some(machine.as_fd()) };
        let cable = NewLink::new(&name, NewLinkKind::Veth(peer));
        Ok(links.create(&NewLink { up: true, controller, ..cable })?)
    })??;
    machine.run(|| -> Result<()> {
        let (link, mut links) = (interface_index(UPLINK)?, RouteSocket::open()?);
        links.change(&Change::AddAddress(Address { link, address: address.into(), prefix_length: 24 }))?;
        Ok(links.change(&Change::SetLink(link, vec![LinkSetting::Up(true)]))?)
    })??;
    testkit::links::wait_for(&machine, UPLINK)?;
    testkit::links::wait_for(bridge, &name)?;
    Ok(machine)
}
