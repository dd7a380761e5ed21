//! A Linux node.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::Stateful;
use anyhow::Result;
use tortie_dataplane::{Delta, MacAddress, Report};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Change, Neighbour, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;

use super::services::{Balanced, unbalanced};
use super::{End, Host, Location};
use crate::links::{OTHERS, cable};

/// The hardware address of the node's ends of its pods' cables.
const ROUTER: MacAddress = MacAddress([2, 0, 0, 0, 1, 1]);

pub(super) struct Node {
    namespace: NetNs,
    dataplane: Stateful<Dataplane>,
    routes: RouteSocket,
}

impl Node {
    pub(super) fn new(namespace: &NetNs) -> Result<Self> {
        let namespace = super::again(namespace)?;
        let (dataplane, routes) = namespace.run(|| -> Result<_> {
            Ok((Stateful::new(Dataplane::open(Config::default())?), RouteSocket::open()?))
        })??;
        Ok(Self { namespace, dataplane, routes })
    }
}

impl Host for Node {
    fn connect(&mut self, at: &Location, address: Ipv4Addr) -> Result<End> {
        let outside = NetNs::create()?;
        outside.run(|| sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1"))??;
        let near = (at.host_interface.as_str(), ROUTER);
        cable(&self.namespace, near, &outside, ("eth0", OTHERS))?;
        let socket = outside.run(|| PacketSocket::open(interface_index("eth0")?))??;
        socket.set_receive_buffer(8 << 20)?;
        let link = self.namespace.run(|| interface_index(&at.host_interface))??;
        let neighbour = Neighbour { link, address: address.into(), mac: OTHERS };
        self.routes.change(&Change::SetNeighbour(neighbour))?;
        Ok(End { socket, mac: OTHERS, router: ROUTER, _namespace: outside })
    }

    fn disconnect(&mut self, at: &Location) -> Result<()> {
        let link = self.namespace.run(|| interface_index(&at.host_interface))??;
        Ok(self.routes.change(&Change::DeleteLink(link))?)
    }

    fn apply(&mut self, deltas: &[Delta]) -> Result<Report> {
        Ok(self.namespace.run(|| self.dataplane.apply(deltas))?)
    }

    fn balance(&mut self, _: &[Balanced], _: &BTreeMap<Ipv4Addr, Ipv4Addr>) -> Result<()> {
        unbalanced()
    }

    fn rules_that_name_sets(&self) -> Result<usize> {
        Ok(0)
    }
}
