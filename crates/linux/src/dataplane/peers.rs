//! Changes of other nodes and of routes to their blocks, which concern few entries of the kernel. In a cluster of thousands of nodes, to
//! derive and compare all entries for each of them would take milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_dataplane::{Delta, NodeState, RouteTarget, Vtep};

use super::entries::{Keys, Tables, route_to};
use super::overlay::{OverlayLinks, Underlay};

/// What a change means for routes and links.
#[derive(Debug)]
pub(super) enum NetworkChange {
    /// Nothing.
    Nothing,
    /// Only other nodes, and destinations of the overlay.
    Peers(PeerChange),
    /// Anything.
    Everything,
}

/// Other nodes and destinations that are others now.
#[derive(Debug, Default)]
pub(super) struct PeerChange {
    /// The tunnel ends before the change, by node and family.
    vteps: BTreeMap<(String, IpVersion), Option<Vtep>>,
    destinations: BTreeSet<IpNet>,
}

/// The other nodes' ends of the overlays as of the last change.
#[derive(Debug, Default)]
pub(super) struct Peers {
    vteps: BTreeMap<(String, IpVersion), Vtep>,
    /// The own address of the node of each destination with IPIP.
    ipip: BTreeMap<IpNet, Ipv4Addr>,
}

/// What does not change with peers.
pub(super) struct Around<'a> {
    pub(super) links: &'a OverlayLinks,
    pub(super) underlay: &'a Underlay,
    pub(super) forwarded: &'a BTreeSet<IpVersion>,
}

/// The desired entries of some keys.
pub(super) struct PeerEntries {
    pub(super) desired: Tables,
    pub(super) keys: Keys,
}

impl Peers {
    /// Notes deltas: what they mean for routes and links, and the nodes' own addresses before and after them.
    pub(super) fn note(&mut self, deltas: &[Delta]) -> (NetworkChange, BTreeSet<IpAddr>) {
        let (mut change, mut parents, mut has_others) = (PeerChange::default(), BTreeSet::new(), false);
        for delta in deltas {
            let (key, old) = match delta {
                Delta::Vtep(vtep) => {
                    parents.insert(vtep.parent);
                    (vtep.key(), self.vteps.insert(vtep.key(), vtep.clone()))
                }
                Delta::VtepRemoved(node, version) => {
                    let key = (node.clone(), *version);
                    let old = self.vteps.remove(&key);
                    (key, old)
                }
                Delta::Route(route) => {
                    change.destinations.insert(route.destination);
                    parents
                        .extend(self.note_ipip(route.destination, Some(&route.target)).into_iter().flatten());
                    continue;
                }
                Delta::RouteRemoved(destination) => {
                    change.destinations.insert(*destination);
                    parents.extend(self.note_ipip(*destination, None).into_iter().flatten());
                    continue;
                }
                Delta::SetCreated(..)
                | Delta::SetChanged { .. }
                | Delta::SetRemoved(_)
                | Delta::Policy(..)
                | Delta::PolicyRemoved(_) => continue,
                Delta::Node(_)
                | Delta::Settings(_)
                | Delta::Endpoint(..)
                | Delta::EndpointRemoved(_)
                | Delta::HostEndpoint(..)
                | Delta::HostEndpointRemoved(_)
                | Delta::Service(..)
                | Delta::ServiceRemoved(_) => {
                    has_others = true;
                    continue;
                }
            };
            parents.extend(old.iter().map(|old| old.parent));
            change.vteps.entry(key).or_insert(old);
        }
        let change = match (has_others, change.vteps.is_empty() && change.destinations.is_empty()) {
            (true, _) => NetworkChange::Everything,
            (false, true) => NetworkChange::Nothing,
            (false, false) => NetworkChange::Peers(change),
        };
        (change, parents)
    }

    /// Notes the target of a destination; returns the nodes that its IPIP packets went to before, and that they go to now.
    fn note_ipip(&mut self, destination: IpNet, target: Option<&RouteTarget>) -> [Option<IpAddr>; 2] {
        let now = match target {
            Some(RouteTarget::Ipip { router }) => Some(*router),
            Some(RouteTarget::Local | RouteTarget::Vxlan { .. } | RouteTarget::Direct { .. }) | None => None,
        };
        let before = match now {
            Some(router) => self.ipip.insert(destination, router),
            None => self.ipip.remove(&destination),
        };
        [before, now].map(|router| router.map(IpAddr::V4))
    }
}

impl PeerChange {
    /// The desired entries that the change may concern. `None` if they depend on more than these objects: then everything must be
    /// looked at.
    pub(super) fn entries(&self, state: &NodeState, around: &Around<'_>) -> Option<PeerEntries> {
        let nets = self.destinations.iter().map(|net| IpVersion::of(&net.addr()));
        let mut versions = nets.chain(self.vteps.keys().map(|(_, version)| *version));
        if !versions.all(|version| around.forwarded.contains(&version)) {
            return None;
        }
        let (mut addresses, mut macs) = (BTreeSet::new(), BTreeSet::new());
        let (mut moved, mut new) = (BTreeSet::new(), Vec::new());
        for (key, old) in &self.vteps {
            let now = state.vteps.get(key);
            addresses.extend(old.iter().chain(now).map(|vtep| vtep.address));
            macs.extend(old.iter().chain(now).map(|vtep| (key.1, vtep.mac)));
            let of_routes = |vtep: &Vtep| (vtep.address, vtep.mtu);
            if old.as_ref().map(of_routes) != now.map(of_routes) {
                moved.insert((key.0.as_str(), key.1));
            }
            new.extend(now);
        }
        let mut keys = Keys::default();
        keys.routes.extend(&self.destinations);
        keys.routes.extend(addresses.iter().map(|address| IpNet::from(*address)));
        if !moved.is_empty() {
            let of_moved = |(net, target): &(&IpNet, &RouteTarget)| match target {
                RouteTarget::Vxlan { node } => moved.contains(&(node.as_str(), IpVersion::of(&net.addr()))),
                RouteTarget::Local | RouteTarget::Direct { .. } | RouteTarget::Ipip { .. } => false,
            };
            keys.routes.extend(state.routes.iter().filter(of_moved).map(|(net, _)| *net));
        }
        if self.are_shared(state, &new, (&keys.routes, &macs)) {
            return None;
        }
        let is_of_pod = |address: &IpAddr| keys.routes.contains(&IpNet::from(*address));
        if state.endpoints.values().flat_map(|endpoint| &endpoint.addresses).any(is_of_pod) {
            return None;
        }
        let mut desired = Tables::default();
        for net in &keys.routes {
            let Some(target) = state.routes.get(net) else { continue };
            match route_to(*net, target, state, around.links, around.underlay) {
                Some(route) => desired.add_route(route),
                // The node has a condition for it.
                None if matches!(target, RouteTarget::Direct { .. } | RouteTarget::Ipip { .. }) => {
                    return None;
                }
                None => {}
            }
        }
        for (version, link) in &around.links.vxlan {
            let is_of = |address: &&IpAddr| IpVersion::of(address) == *version;
            keys.neighbours.extend(addresses.iter().filter(is_of).map(|address| (link.index, *address)));
            keys.fdb.extend(macs.iter().filter(|(of, _)| of == version).map(|(_, mac)| (link.index, *mac)));
            let of_version = new.iter().filter(|vtep| vtep.version() == *version);
            of_version.for_each(|vtep| desired.add_vtep(vtep, link));
        }
        Some(PeerEntries { desired, keys })
    }

    /// Whether two nodes have one of these addresses (networks of one address) or hardware addresses, or one that has not changed.
    fn are_shared(
        &self,
        state: &NodeState,
        new: &[&Vtep],
        (nets, macs): (&BTreeSet<IpNet>, &BTreeSet<(IpVersion, MacAddress)>),
    ) -> bool {
        let of_new: BTreeSet<IpAddr> = new.iter().map(|vtep| vtep.address).collect();
        let macs_of_new: BTreeSet<(IpVersion, MacAddress)> =
            new.iter().map(|vtep| (vtep.version(), vtep.mac)).collect();
        if of_new.len() < new.len() || macs_of_new.len() < new.len() {
            return true;
        }
        let has_one = |vtep: &Vtep| {
            nets.contains(&IpNet::from(vtep.address)) || macs.contains(&(vtep.version(), vtep.mac))
        };
        let is_single = |net: &IpNet| net.prefix_len() == net.max_prefix_len();
        let may_be = !macs.is_empty() || nets.iter().any(is_single);
        may_be && state.vteps.iter().any(|(key, vtep)| has_one(vtep) && !self.vteps.contains_key(key))
    }
}
