//! Routes, the entries of the VXLAN links for other nodes, and kernel parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_dataplane::{
    Condition, Endpoint, EndpointId, HostPort, LocalNode, NodeState, Reason, Report, RouteTarget,
};
use tortie_kernel::InterfaceIndex;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_kernel::sysctl;
use tortie_kernel::{Error, Result};

use super::Config;
use super::entries::{Keys, PROTOCOL, Tables, route_to};
use super::host_ports;
use super::ipip::{self, IpipLink};
use super::ipv6;
use super::overlay::{Overlay, OverlayLinks, Underlay, VxlanLink};
use super::peers::{Around, NetworkChange, PeerEntries};
use super::reach;
use crate::pod_mtu::PodMtu;

/// The routes and links of the node, and the known state of the kernel.
#[derive(Debug)]
pub(super) struct Network {
    socket: RouteSocket,
    config: Config,
    /// The known state of the kernel; `None` if it is unknown and must be read before it is changed.
    kernel: Option<Tables>,
    /// The VXLAN link of each family.
    overlays: [Overlay; 2],
    ipip: IpipLink,
    /// The index of each pod's link with its parameters set.
    prepared: BTreeMap<String, u32>,
    endpoints: BTreeMap<EndpointId, Condition>,
    node: Vec<Condition>,
    retry: bool,
    /// The interfaces that have the node's addresses.
    underlay: Underlay,
    /// The links of the overlays, as of the last time that everything was looked at.
    links: OverlayLinks,
    /// The families whose packets the node forwarded then.
    forwarded: BTreeSet<IpVersion>,
    /// The MTU of new pods, if no overlay has a link.
    pub(super) pod_mtu: PodMtu,
}

impl Network {
    pub(super) fn open(config: Config) -> Result<Self> {
        let (prepared, endpoints, node, underlay) = Default::default();
        let (links, forwarded) = Default::default();
        let overlays = [
            Overlay::new(IpVersion::V4, &config.vxlan_device),
            Overlay::new(IpVersion::V6, &config.vxlan_v6_device),
        ];
        let ipip = IpipLink::new(&config.ipip_device);
        let socket = RouteSocket::open()?;
        Ok(Self {
            socket,
            config,
            kernel: None,
            overlays,
            ipip,
            prepared,
            endpoints,
            node,
            retry: false,
            underlay,
            links,
            forwarded,
            pod_mtu: PodMtu::default(),
        })
    }

    /// Applies changes, if there are any, and what failed the last time.
    pub(super) fn apply(&mut self, state: &NodeState, change: &NetworkChange) -> Result<()> {
        // With a condition, everything is looked at: it may be over.
        let is_calm =
            !self.retry && self.kernel.is_some() && self.node.is_empty() && self.endpoints.is_empty();
        let part = match change {
            NetworkChange::Nothing if !self.retry && self.kernel.is_some() => return Ok(()),
            NetworkChange::Peers(peers) if is_calm => {
                let around =
                    Around { links: &self.links, underlay: &self.underlay, forwarded: &self.forwarded };
                peers.entries(state, &around)
            }
            _ => None,
        };
        let done = match (part, self.kernel.take()) {
            (Some(PeerEntries { mut desired, keys }), Some(kernel)) => {
                desired.addresses.clone_from(&kernel.addresses);
                let changes = self.plan(state, &desired, &kernel, Some(&keys));
                let done = self.carry_out(state, &changes, kernel);
                self.look_for_routes(state);
                done
            }
            (_, kernel) => {
                self.kernel = kernel;
                self.reconcile(state)
            }
        };
        done.inspect_err(|_| self.kernel = None)
    }

    /// Reads everything back and repairs differences.
    pub(super) fn resync(&mut self, state: &NodeState) -> Result<()> {
        self.kernel = None;
        self.prepared.clear();
        self.reconcile(state).inspect_err(|_| self.kernel = None)
    }

    /// The node's own addresses with their interfaces.
    pub(super) fn own_addresses(&mut self) -> Result<BTreeMap<IpAddr, String>> {
        let names: BTreeMap<_, _> =
            self.socket.links()?.into_iter().map(|link| (link.index, link.name)).collect();
        let addresses = self.socket.addresses()?;
        Ok(addresses.into_iter().filter_map(|at| Some((at.address, names.get(&at.link)?.clone()))).collect())
    }

    /// Adds the conditions to a report.
    pub(super) fn report(&self, report: &mut Report) {
        for (id, condition) in &self.endpoints {
            report.endpoints.entry(id.clone()).or_default().push(condition.clone());
        }
        report.node.extend(self.node.iter().cloned());
        report.retry |= self.retry;
    }

    fn reconcile(&mut self, state: &NodeState) -> Result<()> {
        // With the last address of a link, the kernel removes its routes. If the address cannot be deleted, this happens once.
        if self.reconcile_once(state)? {
            self.kernel = None;
            self.reconcile_once(state)?;
        }
        Ok(())
    }

    /// Returns whether the IPIP link has lost its last address.
    fn reconcile_once(&mut self, state: &NodeState) -> Result<bool> {
        (self.endpoints, self.node, self.retry) = Default::default();
        if self.kernel.is_none() {
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
        }
        if self.kernel.is_none() || !self.underlay.is_of(state) {
            self.underlay = Underlay::read(&mut self.socket, state)?;
        }
        self.pod_mtu.set(self.pod_mtu_now(state));
        let overlays = self.overlay_links(state)?;
        let links = self.endpoint_links(state)?;
        self.forward_ipv6(state);
        self.node.extend(IpVersion::ALL.into_iter().filter_map(|version| without_tunnel(state, version)));
        self.node.extend(without_address(state));
        self.node.extend(self.without_link(state));
        let desired = desired(state, &overlays, &links, &self.underlay);
        let kernel = match self.kernel.take() {
            Some(kernel) => kernel,
            None => self.read(state, &overlays)?,
        };
        let changes = self.plan(state, &desired, &kernel, None);
        self.carry_out(state, &changes, kernel)?;
        self.look_for_routes(state);
        let loses_last = |change: &Change| match change {
            Change::DeleteAddress(address) => {
                overlays.ipip == Some(address.link)
                    && !desired.addresses.iter().any(|at| at.link == address.link)
            }
            _ => false,
        };
        let has_lost_last = changes.iter().any(loses_last);
        // Its routes lead elsewhere now.
        match self.ipip.end(state, &mut self.socket) {
            Ok(false) => {}
            Ok(true) => self.kernel = None,
            Err(error) => {
                self.retry = true;
                let message = format!("{error}; the link is not needed any more, and Tortie retries");
                self.node.push(Condition::new(Reason::NetworkPartNotInForce, message));
            }
        }
        self.forwarded = [IpVersion::V4].into();
        let has_end = state.node.as_ref().is_some_and(|node| node.vtep(IpVersion::V6).is_some());
        self.forwarded.extend((needs_ipv6(state) && has_end).then_some(IpVersion::V6));
        self.links = overlays;
        Ok(has_lost_last)
    }

    /// Reports routes to other nodes that the kernel lacks.
    fn look_for_routes(&mut self, state: &NodeState) {
        let kernel = self.kernel.as_ref();
        let condition = kernel.and_then(|kernel| reach::without_route(state, kernel, &self.node));
        self.node.extend(condition);
    }

    /// Makes changes, and keeps what the kernel then has.
    fn carry_out(&mut self, state: &NodeState, changes: &[Change], mut kernel: Tables) -> Result<()> {
        let verdicts = self.socket.change_all(changes)?;
        let mut certain = true;
        for (change, verdict) in changes.iter().zip(verdicts) {
            match verdict {
                Err(error) if !is_gone(change, &error) => {
                    // A pod's route that was refused does not exist; the rest is unchanged.
                    let waits = self.refused(state, change, &error);
                    certain &= waits && error.errno() != Some(libc::EEXIST);
                }
                _ => kernel.apply(change),
            }
        }
        self.kernel = certain.then_some(kernel);
        Ok(())
    }

    /// Records a refusal, with the endpoint that the change concerns, and returns whether there is one.
    fn refused(&mut self, state: &NodeState, change: &Change, error: &Error) -> bool {
        self.retry = true;
        let (reason, message) = (Reason::NetworkNotInForce, error.to_string());
        let is_of = |route: &Route, endpoint: &Endpoint| {
            endpoint.addresses.iter().any(|address| IpNet::from(*address) == route.destination)
        };
        let endpoint = match change {
            Change::AddRoute(route) | Change::ReplaceRoute(route) => {
                state.endpoints.iter().find(|(_, endpoint)| is_of(route, endpoint))
            }
            _ => None,
        };
        match endpoint {
            Some((id, _)) => {
                let message = format!("no route leads to the pod: {message}");
                self.endpoints.insert(id.clone(), Condition::new(reason, message));
            }
            // The pods of other nodes are concerned; this node's own pods are not.
            None => self.node.push(Condition::new(Reason::RouteRefused, message)),
        }
        endpoint.is_some()
    }

    /// The necessary changes, of these entries or of all. Only Tortie's routes are changed or deleted. A foreign route in the same place stays,
    /// and is reported if it leads elsewhere.
    fn plan(
        &mut self,
        state: &NodeState,
        desired: &Tables,
        kernel: &Tables,
        only: Option<&Keys>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        // Nobody has more than one on purpose, and to delete one that is wanted as well would delete it too late.
        changes.extend(kernel.surplus_fdb.iter().copied().map(Change::DeleteFdb));
        // What packets need exists before what they needed goes. The kernel replaces a neighbour of the same address, and an
        // entry of the same hardware address; to delete the old one afterwards would delete the new one.
        changes.extend(desired.addresses.difference(&kernel.addresses).copied().map(Change::AddAddress));
        let new = desired.fdb.iter().filter(|(key, entry)| kernel.fdb.get(key) != Some(entry));
        changes.extend(new.map(|(_, entry)| Change::SetFdb(*entry)));
        let new = desired.neighbours.iter().filter(|(key, it)| kernel.neighbours.get(key) != Some(it));
        changes.extend(new.map(|(_, neighbour)| Change::SetNeighbour(*neighbour)));
        let old = kernel.neighbours_of(only);
        let old = old.filter(|it| !desired.neighbours.contains_key(&(it.link, it.address)));
        changes.extend(old.copied().map(Change::DeleteNeighbour));
        let old = kernel.fdb_of(only).filter(|it| !desired.fdb.contains_key(&(it.link, it.mac)));
        changes.extend(old.copied().map(Change::DeleteFdb));
        changes.extend(kernel.addresses.difference(&desired.addresses).copied().map(Change::DeleteAddress));
        for (key, route) in &desired.routes {
            match kernel.routes.get(key) {
                None => changes.push(Change::AddRoute(route.clone())),
                Some(there) if there.protocol == PROTOCOL => {
                    let is_same = there.leads_like(route) && there.mtu == route.mtu;
                    changes.extend((!is_same).then(|| Change::ReplaceRoute(route.clone())));
                }
                Some(there) if there.leads_like(route) => {}
                Some(there) => {
                    let message = format!(
                        "the foreign route {there} occupies the place of {route}; Tortie leaves it alone"
                    );
                    self.node.push(Condition::new(Reason::RouteTaken, message));
                }
            }
        }
        // A Node without an address says nothing about the ways to other nodes: the routes of an earlier process stay.
        let is_kept = |route: &Route| state.node.is_none() && route.gateway.is_some();
        for route in kernel.routes_of(only) {
            let is_desired = desired.routes.contains_key(&(route.destination, route.metric));
            if !is_desired && route.protocol == PROTOCOL && !is_kept(route) {
                changes.push(Change::DeleteRoute(route.clone()));
            }
        }
        changes
    }

    /// Lets the node forward IPv6 packets if there are IPv6 blocks or pods. What prevents that concerns IPv6 only.
    fn forward_ipv6(&mut self, state: &NodeState) {
        if !needs_ipv6(state) {
            return;
        }
        let is_other = |name: &str| {
            let Config { vxlan_device, vxlan_v6_device, ipip_device, .. } = &self.config;
            let overlays = [vxlan_device, vxlan_v6_device, ipip_device];
            !name.starts_with(&self.config.workload_prefix) && !overlays.iter().any(|known| *known == name)
        };
        match ipv6::forward(&mut self.socket, is_other) {
            Ok(condition) => self.node.extend(condition),
            Err(error) => {
                let message = format!("the node does not forward IPv6 packets: {error}; Tortie retries");
                self.node.push(Condition::new(Reason::RouteRefused, message));
                self.retry = true;
            }
        }
    }

    /// The links of the overlays. Without VXLAN of a family, everything else goes on: pods of this node, and packets that need none.
    fn overlay_links(&mut self, state: &NodeState) -> Result<OverlayLinks> {
        let mut links = OverlayLinks::default();
        for overlay in &mut self.overlays {
            let is_known = self.kernel.is_some();
            let applied = overlay.apply(state, &self.underlay, &mut self.socket, is_known);
            let applied = match applied {
                Err(error) => {
                    self.node.push(without_vxlan(state, overlay.version, &error));
                    self.retry = true;
                    // The link may be another one now.
                    self.kernel = None;
                    let usable = overlay.usable(&mut self.socket)?;
                    links.vxlan.extend(usable.map(|link| (overlay.version, link)));
                    continue;
                }
                Ok(applied) => applied,
            };
            links.vxlan.extend(applied.link.map(|link| (overlay.version, link)));
            if applied.is_changed {
                self.kernel = None;
            }
            self.node.extend(applied.foreign);
        }
        let ipip = self.ipip.apply(state, &self.underlay, &mut self.socket, self.kernel.is_some());
        links.ipip = ipip.index;
        if ipip.is_changed {
            self.kernel = None;
        }
        self.node.extend(ipip.condition);
        Ok(links)
    }

    /// The MTU of new pods: that of the overlays that the node should have. Without any, that of the interfaces with its addresses.
    fn pod_mtu_now(&self, state: &NodeState) -> Option<u32> {
        let node = state.node.as_ref()?;
        let overlays = self.overlays.iter().filter_map(|overlay| overlay.mtu(node, state, &self.underlay));
        let is_overlaid =
            |target: &RouteTarget| matches!(target, RouteTarget::Vxlan { .. } | RouteTarget::Ipip { .. });
        match overlays.min() {
            None if node.ipip.is_some() || state.routes.values().any(is_overlaid) => None,
            None => node.ends.keys().filter_map(|version| self.underlay.mtu(*version)).min(),
            mtu => mtu,
        }
    }

    fn read(&mut self, state: &NodeState, links: &OverlayLinks) -> Result<Tables> {
        let mut tables = Tables::default();
        for route in self.socket.routes()? {
            tables.routes.insert((route.destination, route.metric), route);
        }
        if links.vxlan.is_empty() && links.ipip.is_none() {
            return Ok(tables);
        }
        let is_overlay = |link: u32, address: &IpAddr| {
            links.vxlan.get(&IpVersion::of(address)).is_some_and(|overlay| overlay.index == link)
        };
        // Each link has a link-local address of its own, which is the kernel's.
        let is_ours = |at: &Address| match links.ipip {
            Some(index) if index == at.link => ipip::is_managed(at, state),
            _ => is_overlay(at.link, &at.address) && !is_link_local(&at.address),
        };
        tables.addresses = self.socket.addresses()?.into_iter().filter(is_ours).collect();
        let neighbours = self.socket.neighbours()?.into_iter();
        neighbours
            .filter(|it| is_overlay(it.link, &it.address))
            .for_each(|neighbour| tables.add_neighbour(neighbour));
        for link in links.vxlan.values() {
            let entries = self.socket.fdb(link.index)?;
            tables.read_fdb(entries);
        }
        Ok(tables)
    }

    /// The indices of the existing links of pods, with their kernel parameters set.
    fn endpoint_links(&mut self, state: &NodeState) -> Result<BTreeMap<String, u32>> {
        let mut links = BTreeMap::new();
        let indices = InterfaceIndex::open()?;
        let names_own = |port: &HostPort| port.address.is_some();
        let are_needed = state.endpoints.values().any(|endpoint| endpoint.host_ports.iter().any(names_own));
        let own = if are_needed { self.own_addresses()? } else { BTreeMap::new() };
        for (id, endpoint) in &state.endpoints {
            let name = &endpoint.host_interface;
            let has_ipv6 = endpoint.addresses.iter().any(IpAddr::is_ipv6);
            match indices.of(name).and_then(|index| self.prepare(name, index, has_ipv6)) {
                Ok(index) => {
                    links.insert(name.to_string(), index);
                    let condition = host_ports::not_served(endpoint, &state.settings, &own);
                    self.endpoints.extend(condition.map(|condition| (id.clone(), condition)));
                }
                Err(error) => {
                    self.retry = true;
                    let message = format!("{error}; no route leads to the pod");
                    self.endpoints.insert(id.clone(), Condition::new(Reason::InterfaceMissing, message));
                }
            }
        }
        self.prepared.retain(|name, _| links.contains_key(name));
        Ok(links)
    }

    /// The conditions of direct routes for which no interface has the node's address.
    fn without_link(&self, state: &NodeState) -> Vec<Condition> {
        let is_direct = |target: &RouteTarget, version| matches!(target, RouteTarget::Direct { router } if IpVersion::of(router) == version);
        let condition = |version: IpVersion| {
            let mut routes = state.routes.iter().filter(|(_, target)| is_direct(target, version));
            let own = state.node.as_ref().and_then(|node| node.address(version));
            let (destination, own) = (routes.next()?.0, own?);
            self.underlay.link(version).is_none().then(|| {
                let message = format!(
                    "no interface has the node's address {own}, so no route leads to {destination}; correct the address of the Node, \
                     or use vxlanMode: Always"
                );
                Condition::new(Reason::RouteRefused, message)
            })
        };
        IpVersion::ALL.into_iter().filter_map(condition).collect()
    }

    fn prepare(&mut self, name: &str, index: u32, has_ipv6: bool) -> Result<u32> {
        if self.prepared.get(name) != Some(&index) {
            link_parameters(name)?;
            if has_ipv6 {
                ipv6::link_parameters(name)?;
            }
            self.prepared.insert(name.to_owned(), index);
        }
        Ok(index)
    }
}

/// Whether packets of IPv6 pods pass the node.
fn needs_ipv6(state: &NodeState) -> bool {
    let pods = state.endpoints.values().flat_map(|endpoint| &endpoint.addresses);
    state.routes.keys().any(|net| net.addr().is_ipv6()) || pods.into_iter().any(IpAddr::is_ipv6)
}

/// The condition of a node that has no address for its end of an overlay.
fn without_tunnel(state: &NodeState, version: IpVersion) -> Option<Condition> {
    let is_overlaid = |(net, target): (&IpNet, &RouteTarget)| {
        IpVersion::of(&net.addr()) == version && matches!(target, RouteTarget::Vxlan { .. })
    };
    let node = state.node.as_ref().filter(|node| node.vtep(version).is_none())?;
    state.routes.iter().any(is_overlaid).then(|| {
        let (name, annotation) = match version {
            IpVersion::V4 => (&node.name, Node::ADDRESS),
            IpVersion::V6 => (&node.name, Node::ADDRESS_V6),
        };
        let message = format!(
            "Node {name} has no {version} address of its own or no {version} tunnel address, so pods of other nodes cannot be reached by \
             {version}; give the Node an InternalIP of {version} (kubelet --node-ip) or the annotation {annotation}, and let an IPPool with \
             allowedUses Tunnel be for it"
        );
        // A node without IPv6 in a cluster of both families serves IPv4.
        let reason = match version {
            IpVersion::V4 => Reason::RouteRefused,
            IpVersion::V6 => Reason::NetworkPartNotInForce,
        };
        Condition::new(reason, message)
    })
}

/// The condition of a node that is in no network.
fn without_address(state: &NodeState) -> Option<Condition> {
    let is_elsewhere = |target: &RouteTarget| !matches!(target, RouteTarget::Local);
    (state.node.is_none() && state.routes.values().any(is_elsewhere)).then(|| {
        let message = "the Node has no address of its own, so routes to other nodes stay as an earlier process of the agent has left them; give \
                       the Node an InternalIP (kubelet --node-ip, or the cloud's controller)";
        Condition::new(Reason::RouteRefused, message)
    })
}

/// The condition of a node whose VXLAN link cannot be as it should be.
fn without_vxlan(state: &NodeState, version: IpVersion, error: &Error) -> Condition {
    let setting = if version == IpVersion::V4 { "vxlanMTU" } else { "vxlanMTUV6" };
    let port = state.node.as_ref().map(|node| node.network.port).unwrap_or_default();
    let message = format!(
        "{version} packets to pods of other nodes may not arrive by VXLAN: {error}; check {setting} in FelixConfiguration, and that no other \
         link or program of the node has the UDP port {port}. Tortie retries"
    );
    Condition::new(Reason::RouteRefused, message)
}

/// The desired tables.
fn desired(
    state: &NodeState,
    overlays: &OverlayLinks,
    links: &BTreeMap<String, u32>,
    underlay: &Underlay,
) -> Tables {
    let mut tables = Tables::default();
    for (destination, target) in &state.routes {
        if let Some(route) = route_to(*destination, target, state, overlays, underlay) {
            tables.add_route(route);
        }
    }
    for endpoint in state.endpoints.values() {
        let Some(link) = links.get(&*endpoint.host_interface) else { continue };
        endpoint
            .addresses
            .iter()
            .for_each(|address| tables.add_route(Route::on_link(IpNet::from(*address), *link, PROTOCOL)));
    }
    for ((_, version), vtep) in &state.vteps {
        if let Some(link) = overlays.vxlan.get(version) {
            tables.add_vtep(vtep, link);
        }
    }
    for own in state.node.iter().flat_map(|node| node.vteps()) {
        let Some(&VxlanLink { index: link, .. }) = overlays.vxlan.get(&own.version()) else { continue };
        let prefix_length = IpNet::from(own.address).prefix_len();
        tables.addresses.insert(Address { link, address: own.address, prefix_length });
    }
    let own = state.node.as_ref().and_then(LocalNode::ipip_address);
    if let Some((link, own)) = overlays.ipip.zip(own) {
        tables.addresses.insert(Address { link, address: own.into(), prefix_length: 32 });
    }
    tables
}

fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Whether a failed deletion means that the object was already gone, for instance with its link.
fn is_gone(change: &Change, error: &Error) -> bool {
    use Change::{DeleteAddress, DeleteFdb, DeleteNeighbour, DeleteRoute};
    let deletes = matches!(change, DeleteRoute(_) | DeleteAddress(_) | DeleteNeighbour(_) | DeleteFdb(_));
    let gone = [libc::ESRCH, libc::ENOENT, libc::ENODEV, libc::EADDRNOTAVAIL];
    deletes && error.errno().is_some_and(|errno| gone.contains(&errno))
}

/// The parameters of the host end of a pod's link: the host answers ARP for the pod's gateway, which nobody has
/// (169.254.1.1), and accepts packets only from addresses to which it would route over this link.
pub(crate) fn link_parameters(name: &str) -> Result<()> {
    for (parameter, value) in [("proxy_arp", "1"), ("rp_filter", "1"), ("forwarding", "1")] {
        sysctl::ensure(&format!("net/ipv4/conf/{name}/{parameter}"), value)?;
    }
    // A proxy's answer must not be delayed, which is the kernel's default.
    sysctl::ensure(&format!("net/ipv4/neigh/{name}/proxy_delay"), "0")?;
    Ok(())
}
