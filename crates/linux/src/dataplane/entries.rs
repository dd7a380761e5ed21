//! Routes, neighbours and forwarding entries, as they are in the kernel or should be.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_dataplane::{NodeState, RouteTarget, Vtep};
use tortie_kernel::route::{Address, Change, FdbEntry, Neighbour, Route};

use super::overlay::{OverlayLinks, Underlay, VxlanLink};

/// The protocol number of Tortie's routes. Nobody else has it in `rtnetlink.h` and iproute2's `rt_protos`. Calico's
/// is 80 (`felix/dataplane/linux/route_mgr.go`), and Tortie must not delete Calico's routes.
pub(crate) const PROTOCOL: u8 = 84;

/// The kernel's tables that the dataplane writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tables {
    /// By destination and metric. The kernel's tables include routes of others, which are left alone.
    pub(super) routes: BTreeMap<(IpNet, u32), Route>,
    /// Only on the VXLAN links, as the next two.
    pub(super) addresses: BTreeSet<Address>,
    /// By link and address.
    pub(super) neighbours: BTreeMap<(u32, IpAddr), Neighbour>,
    /// By link and hardware address.
    pub(super) fdb: BTreeMap<(u32, MacAddress), FdbEntry>,
    /// Forwarding entries of which several have the same hardware address, which only others make (for the address zero, which
    /// is all that is unknown, and for multicast).
    pub(super) surplus_fdb: Vec<FdbEntry>,
}

/// The entries that a change may concern.
#[derive(Debug, Default)]
pub(super) struct Keys {
    pub(super) routes: BTreeSet<IpNet>,
    pub(super) neighbours: BTreeSet<(u32, IpAddr)>,
    pub(super) fdb: BTreeSet<(u32, MacAddress)>,
}

impl Tables {
    pub(super) fn routes_of<'a>(
        &'a self,
        only: Option<&'a Keys>,
    ) -> Box<dyn Iterator<Item = &'a Route> + 'a> {
        match only {
            None => Box::new(self.routes.values()),
            Some(keys) => Box::new(keys.routes.iter().filter_map(|net| self.routes.get(&(*net, 0)))),
        }
    }

    pub(super) fn neighbours_of<'a>(
        &'a self,
        only: Option<&'a Keys>,
    ) -> Box<dyn Iterator<Item = &'a Neighbour> + 'a> {
        match only {
            None => Box::new(self.neighbours.values()),
            Some(keys) => Box::new(keys.neighbours.iter().filter_map(|key| self.neighbours.get(key))),
        }
    }

    pub(super) fn fdb_of<'a>(
        &'a self,
        only: Option<&'a Keys>,
    ) -> Box<dyn Iterator<Item = &'a FdbEntry> + 'a> {
        match only {
            None => Box::new(self.fdb.values()),
            Some(keys) => Box::new(keys.fdb.iter().filter_map(|key| self.fdb.get(key))),
        }
    }

    /// The entries for another node's tunnel end.
    pub(super) fn add_vtep(&mut self, vtep: &Vtep, overlay: &VxlanLink) {
        let (link, mtu) = (overlay.index, overlay.mtu_to(vtep));
        self.add_route(Route { mtu, ..Route::on_link(IpNet::from(vtep.address), link, PROTOCOL) });
        self.add_neighbour(Neighbour { link, address: vtep.address, mac: vtep.mac });
        self.add_fdb(FdbEntry { link, mac: vtep.mac, destination: vtep.parent });
    }

    pub(super) fn add_route(&mut self, route: Route) {
        self.routes.insert((route.destination, route.metric), route);
    }

    pub(super) fn add_neighbour(&mut self, neighbour: Neighbour) {
        self.neighbours.insert((neighbour.link, neighbour.address), neighbour);
    }

    pub(super) fn add_fdb(&mut self, entry: FdbEntry) {
        self.fdb.insert((entry.link, entry.mac), entry);
    }

    /// Adds the entries of a link as they are in the kernel.
    pub(super) fn read_fdb(&mut self, entries: Vec<FdbEntry>) {
        for entry in entries {
            let key = (entry.link, entry.mac);
            let is_repeated = self.surplus_fdb.iter().any(|other| (other.link, other.mac) == key);
            match self.fdb.remove(&key) {
                Some(other) => self.surplus_fdb.extend([other, entry]),
                None if is_repeated => self.surplus_fdb.push(entry),
                None => self.add_fdb(entry),
            }
        }
    }

    /// The tables after a change.
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::AddRoute(route) | Change::ReplaceRoute(route) => {
                self.add_route(route.clone());
            }
            Change::DeleteRoute(route) => drop(self.routes.remove(&(route.destination, route.metric))),
            Change::AddAddress(address) => drop(self.addresses.insert(*address)),
            Change::DeleteAddress(address) => drop(self.addresses.remove(address)),
            Change::SetNeighbour(neighbour) => self.add_neighbour(*neighbour),
            Change::DeleteNeighbour(it) => drop(self.neighbours.remove(&(it.link, it.address))),
            Change::SetFdb(entry) => self.add_fdb(*entry),
            Change::DeleteFdb(entry) => {
                self.surplus_fdb.retain(|other| other != entry);
                if self.fdb.get(&(entry.link, entry.mac)) == Some(entry) {
                    self.fdb.remove(&(entry.link, entry.mac));
                }
            }
            Change::SetLink(..)
            | Change::DeleteLink(_)
            | Change::DeleteGroup(_)
            | Change::SetRateLimit(..) => {}
        }
    }
}

/// The route to a destination of the overlay; `None` if there is none, or not yet.
pub(super) fn route_to(
    destination: IpNet,
    target: &RouteTarget,
    state: &NodeState,
    links: &OverlayLinks,
    underlay: &Underlay,
) -> Option<Route> {
    let of = destination.addr();
    match target {
        // A block of one address is the pod's own route.
        RouteTarget::Local => (destination.prefix_len() < destination.max_prefix_len())
            .then(|| Route::blackhole(destination, PROTOCOL)),
        RouteTarget::Vxlan { node } => {
            let (overlay, vtep) = links.vxlan.get(&IpVersion::of(&of)).zip(state.vtep(node, &of))?;
            let mtu = overlay.mtu_to(vtep);
            Some(Route { mtu, ..Route::via(destination, vtep.address, overlay.index, PROTOCOL) })
        }
        RouteTarget::Ipip { router } => {
            links.ipip.map(|link| Route::via(destination, (*router).into(), link, PROTOCOL))
        }
        RouteTarget::Direct { router } => {
            let link = underlay.link(IpVersion::of(router))?;
            Some(Route::via(destination, *router, link, PROTOCOL))
        }
    }
}
