//! The underlay of the nodes: a bridge, and a cable from it to each node.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, Peer, RouteSocket};

use crate::links::{node_parameters, wait_for};

const BRIDGE: &str = "br0";
const UPLINK: &str = "eth0";

/// A namespace with a bridge.
pub(super) fn bridge() -> Result<NetNs> {
    let underlay = NetNs::create()?;
    let link = NewLink { up: true, ..NewLink::new(BRIDGE, NewLinkKind::Bridge) };
    underlay.run(|| RouteSocket::open()?.create(&link))??;
    Ok(underlay)
}

/// The address of the node with this number.
pub(super) fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 16, 0, number)
}

/// A namespace for the node with this number, connected to the bridge.
pub(super) fn join(underlay: &NetNs, number: u8) -> Result<NetNs> {
    let node = NetNs::create()?;
    node.run(node_parameters)??;
    let name = format!("node{number}");
    underlay.run(|| -> Result<()> {
        let mut links = RouteSocket::open()?;
        let bridge = links.link(BRIDGE)?.context("there is no bridge")?.index;
        let peer = Peer { name: UPLINK, mac: None, mtu: None, namespace: Some(node.as_fd()) };
        let cable = NewLink::new(&name, NewLinkKind::Veth(peer));
        Ok(links.create(&NewLink { up: true, controller: Some(bridge), ..cable })?)
    })??;
    node.run(|| -> Result<()> {
        let (link, mut links) = (interface_index(UPLINK)?, RouteSocket::open()?);
        let address = Address { link, address: address(number).into(), prefix_length: 24 };
        links.change(&Change::AddAddress(address))?;
        Ok(links.change(&Change::SetLink(link, vec![LinkSetting::Up(true)]))?)
    })??;
    wait_for(&node, UPLINK)?;
    wait_for(underlay, &name)?;
    Ok(node)
}
