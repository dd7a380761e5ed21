//! Routes, the VXLAN link and what it knows of other nodes, and kernel parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{
    Condition, Endpoint, EndpointId, LocalNode, NodeState, Reason, Report, RouteTarget, Vtep,
};

use super::Config;
use crate::route::{
    Address, Change, FdbEntry, Link, LinkSetting, Neighbour, NewLink, NewLinkKind, Route, RouteKind,
    RouteSocket, Vxlan,
};
use crate::sys::InterfaceIndex;
use crate::{Error, Result, ethtool, interface_index, sysctl};

/// The protocol number of our routes. It is nobody else's in `rtnetlink.h` and iproute2's `rt_protos`; Calico's is 80
/// (`felix/dataplane/linux/route_mgr.go`), and those routes are not ours to delete.
pub const PROTOCOL: u8 = 84;

/// What is noted (`ifalias`) at the VXLAN link that we make.
const MARK: &str = "tortie overlay";

/// The routes and links of the node, and what of them is known to be there.
#[derive(Debug)]
pub struct Network {
    socket: RouteSocket,
    config: Config,
    /// What the kernel has, as far as we know; `None` if we do not, and then it is read before it is changed.
    kernel: Option<Tables>,
    /// The VXLAN link that we made or took over, and what for.
    vxlan: Option<(LocalNode, u32)>,
    /// That somebody else's VXLAN link is where ours has to be, or competes with it.
    foreign: Option<Condition>,
    /// The index of each pod's link whose parameters are set.
    prepared: BTreeMap<String, u32>,
    endpoints: BTreeMap<EndpointId, Condition>,
    node: Vec<Condition>,
    retry: bool,
}

/// The tables that this module writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Tables {
    /// By destination and metric. Of the kernel's also those of others, which we leave alone.
    routes: BTreeMap<(IpNet, u32), Route>,
    /// On the VXLAN link only, as are the next two.
    addresses: BTreeSet<Address>,
    neighbours: BTreeSet<Neighbour>,
    fdb: BTreeSet<FdbEntry>,
}

impl Network {
    pub fn open(config: Config) -> Result<Self> {
        let (vxlan, foreign, prepared, endpoints, node) = Default::default();
        let socket = RouteSocket::open()?;
        Ok(Self { socket, config, kernel: None, vxlan, foreign, prepared, endpoints, node, retry: false })
    }

    /// Makes true what has changed, if anything has, or what could not be made true the last time.
    pub fn apply(&mut self, state: &NodeState, changed: bool) -> Result<()> {
        if !changed && !self.retry && self.kernel.is_some() {
            return Ok(());
        }
        self.reconcile(state).inspect_err(|_| self.kernel = None)
    }

    /// Reads everything back and mends what differs.
    pub fn resync(&mut self, state: &NodeState) -> Result<()> {
        self.kernel = None;
        self.prepared.clear();
        self.reconcile(state).inspect_err(|_| self.kernel = None)
    }

    /// The interfaces that have the node's own addresses.
    pub fn own_addresses(&mut self) -> Result<BTreeMap<IpAddr, String>> {
        let names: BTreeMap<_, _> =
            self.socket.links()?.into_iter().map(|link| (link.index, link.name)).collect();
        let addresses = self.socket.addresses()?;
        Ok(addresses.into_iter().filter_map(|at| Some((at.address, names.get(&at.link)?.clone()))).collect())
    }

    /// Adds what is wrong to a report.
    pub fn report(&self, report: &mut Report) {
        for (id, condition) in &self.endpoints {
            report.endpoints.entry(id.clone()).or_default().push(condition.clone());
        }
        report.node.extend(self.node.iter().cloned());
        report.retry |= self.retry;
    }

    fn reconcile(&mut self, state: &NodeState) -> Result<()> {
        (self.endpoints, self.node, self.retry) = Default::default();
        if self.kernel.is_none() {
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
        }
        let vxlan = self.vxlan_link(state)?;
        self.node.extend(self.foreign.clone());
        let links = self.endpoint_links(state)?;
        let desired = desired(state, vxlan, &links);
        let mut kernel = match self.kernel.take() {
            Some(kernel) => kernel,
            None => self.read(vxlan)?,
        };
        let changes = self.plan(&desired, &kernel);
        let verdicts = self.socket.change_all(&changes)?;
        let mut certain = true;
        for (change, verdict) in changes.iter().zip(verdicts) {
            match verdict {
                Err(error) if !is_gone(change, &error) => {
                    // A pod's route that was refused is not there; of the rest nothing new is known.
                    let waits = self.refused(state, change, &error);
                    certain &= waits && error.errno() != Some(libc::EEXIST);
                }
                _ => kernel.apply(change),
            }
        }
        self.kernel = certain.then_some(kernel);
        Ok(())
    }

    /// Notes a refusal, with the endpoint that the change is about, and says whether there is one.
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
                let message = format!("{id}: no route leads to the pod: {message}");
                self.endpoints.insert(id.clone(), Condition { reason, message });
            }
            // The others' pods are further away; this node's own are as they should be.
            None => self.node.push(Condition { reason: Reason::RouteRefused, message }),
        }
        endpoint.is_some()
    }

    /// The changes that are needed. Of routes only ours are changed or deleted; one of somebody else in the place of
    /// ours stays, and is told of if it leads elsewhere.
    fn plan(&mut self, desired: &Tables, kernel: &Tables) -> Vec<Change> {
        let mut changes = Vec::new();
        let gone = |key: &&(IpNet, u32)| !desired.routes.contains_key(key);
        for key in kernel.routes.keys().filter(gone) {
            changes.extend(
                kernel
                    .routes
                    .get(key)
                    .filter(|route| route.protocol == PROTOCOL)
                    .map(|r| Change::DeleteRoute(*r)),
            );
        }
        changes.extend(kernel.fdb.difference(&desired.fdb).copied().map(Change::DeleteFdb));
        changes
            .extend(kernel.neighbours.difference(&desired.neighbours).copied().map(Change::DeleteNeighbour));
        changes.extend(kernel.addresses.difference(&desired.addresses).copied().map(Change::DeleteAddress));
        changes.extend(desired.addresses.difference(&kernel.addresses).copied().map(Change::AddAddress));
        changes.extend(desired.fdb.difference(&kernel.fdb).copied().map(Change::SetFdb));
        changes.extend(desired.neighbours.difference(&kernel.neighbours).copied().map(Change::SetNeighbour));
        for (key, route) in &desired.routes {
            match kernel.routes.get(key) {
                None => changes.push(Change::AddRoute(*route)),
                Some(there) if leads_alike(there, route) => {}
                Some(there) if there.protocol == PROTOCOL => changes.push(Change::ReplaceRoute(*route)),
                Some(there) => self.node.push(Condition {
                    reason: Reason::RouteTaken,
                    message: format!("{there} of somebody else is in the place of {route}; it stays"),
                }),
            }
        }
        changes
    }

    fn read(&mut self, vxlan: Option<u32>) -> Result<Tables> {
        let mut tables = Tables::default();
        for route in self.socket.routes()? {
            tables.routes.insert((route.destination, route.metric), route);
        }
        let Some(link) = vxlan else { return Ok(tables) };
        let addresses = self.socket.addresses()?.into_iter();
        tables.addresses =
            addresses.filter(|address| address.link == link && address.address.is_ipv4()).collect();
        let neighbours = self.socket.neighbours()?.into_iter();
        tables.neighbours = neighbours.filter(|it| it.link == link && it.address.is_ipv4()).collect();
        tables.fdb = self.socket.fdb(link)?.into_iter().collect();
        Ok(tables)
    }

    /// Makes the VXLAN link as it should be and gives its index; without an overlay it takes away the one that we had.
    /// A link from before this process stays as long as the overlay is not known yet.
    fn vxlan_link(&mut self, state: &NodeState) -> Result<Option<u32>> {
        let wanted = state.node.as_ref().and_then(|node| Some((node, node.vtep.as_ref()?)));
        let Some((node, vtep)) = wanted else {
            self.foreign = None;
            if let Some((_, index)) = self.vxlan.take() {
                tracing::info!(
                    link = self.config.vxlan_device,
                    "deletes the VXLAN link, as there is no overlay any more"
                );
                self.socket.change(&Change::DeleteLink(index))?;
                self.kernel = None;
            }
            return Ok(None);
        };
        if let Some((_, index)) =
            self.vxlan.as_ref().filter(|(made, _)| self.kernel.is_some() && made == node)
        {
            return Ok(Some(*index));
        }
        self.vxlan = None;
        let name = self.config.vxlan_device.clone();
        let wanted = settings(node);
        let concerns = |link: &Link| {
            link.name == name || link.vxlan.is_some_and(|it| (it.vni, it.port) == (wanted.vni, wanted.port))
        };
        let links = self.socket.links()?.into_iter().filter(concerns);
        let (mut ours, foreign): (Vec<_>, Vec<_>) =
            links.partition(|link| link.name == name && is_ours(link, wanted));
        self.foreign = foreign.first().map(foreign_link);
        let mut link = ours.pop();
        if link.is_none() && self.foreign.is_some() {
            return Ok(None);
        }
        if let Some(other) = link.take_if(|link| link.vxlan != Some(wanted)) {
            tracing::warn!(link = name, found = ?other.vxlan, "makes the VXLAN link anew, with other settings");
            self.socket.change(&Change::DeleteLink(other.index))?;
            self.kernel = None;
        }
        let index = match link {
            Some(link) => self.adjust(link, node, vtep)?,
            None => self.create(&name, node, vtep)?,
        };
        self.vxlan = Some((node.clone(), index));
        Ok(Some(index))
    }

    fn create(&mut self, name: &str, node: &LocalNode, vtep: &Vtep) -> Result<u32> {
        let kind = NewLinkKind::Vxlan(settings(node));
        let new = NewLink { mac: Some(vtep.mac), mtu: Some(node.network.mtu), ..NewLink::new(name, kind) };
        self.kernel = None;
        self.socket.create(&new)?;
        let index = interface_index(name)?;
        // The kernel takes no note with a link's creation; until it has one the link stays down.
        let marked = vec![LinkSetting::Alias(MARK.to_owned()), LinkSetting::Up(true)];
        self.socket.change(&Change::SetLink(index, marked))?;
        if !self.config.vxlan_offloads {
            ethtool::disable_offloads(name)?;
        }
        Ok(index)
    }

    fn adjust(&mut self, link: Link, node: &LocalNode, vtep: &Vtep) -> Result<u32> {
        let mut settings = Vec::new();
        if link.alias != MARK {
            settings.push(LinkSetting::Alias(MARK.to_owned()));
        }
        if link.mac != Some(vtep.mac) {
            settings.push(LinkSetting::Mac(vtep.mac));
        }
        if link.mtu != node.network.mtu {
            settings.push(LinkSetting::Mtu(node.network.mtu));
        }
        if !link.up {
            settings.push(LinkSetting::Up(true));
        }
        if !settings.is_empty() {
            self.socket.change(&Change::SetLink(link.index, settings))?;
            self.kernel = None; // a link that was down has lost its routes
        }
        if self.kernel.is_none() && !self.config.vxlan_offloads {
            ethtool::disable_offloads(&link.name)?;
        }
        Ok(link.index)
    }

    /// The indices of the pods' links that are there, with their kernel parameters set.
    fn endpoint_links(&mut self, state: &NodeState) -> Result<BTreeMap<String, u32>> {
        let mut links = BTreeMap::new();
        let indices = InterfaceIndex::open()?;
        for (id, endpoint) in &state.endpoints {
            let name = &endpoint.host_interface;
            match indices.of(name).and_then(|index| self.prepare(name, index)) {
                Ok(index) => drop(links.insert(name.to_string(), index)),
                Err(error) => {
                    self.retry = true;
                    let message = format!("{id}: {error}; no route leads to the pod");
                    self.endpoints
                        .insert(id.clone(), Condition { reason: Reason::InterfaceMissing, message });
                }
            }
        }
        self.prepared.retain(|name, _| links.contains_key(name));
        Ok(links)
    }

    fn prepare(&mut self, name: &str, index: u32) -> Result<u32> {
        if self.prepared.get(name) != Some(&index) {
            link_parameters(name)?;
            self.prepared.insert(name.to_owned(), index);
        }
        Ok(index)
    }
}

impl Tables {
    fn apply(&mut self, change: &Change) {
        match *change {
            Change::AddRoute(route) | Change::ReplaceRoute(route) => {
                self.routes.insert((route.destination, route.metric), route);
            }
            Change::DeleteRoute(route) => drop(self.routes.remove(&(route.destination, route.metric))),
            Change::AddAddress(address) => drop(self.addresses.insert(address)),
            Change::DeleteAddress(address) => drop(self.addresses.remove(&address)),
            Change::SetNeighbour(neighbour) => {
                self.neighbours.retain(|other| other.address != neighbour.address);
                self.neighbours.insert(neighbour);
            }
            Change::DeleteNeighbour(neighbour) => drop(self.neighbours.remove(&neighbour)),
            Change::SetFdb(entry) => {
                self.fdb.retain(|other| other.mac != entry.mac);
                self.fdb.insert(entry);
            }
            Change::DeleteFdb(entry) => drop(self.fdb.remove(&entry)),
            Change::SetLink(..) | Change::DeleteLink(_) | Change::DeleteGroup(_) => {}
        }
    }
}

/// What should be in the tables.
fn desired(state: &NodeState, vxlan: Option<u32>, links: &BTreeMap<String, u32>) -> Tables {
    let mut tables = Tables::default();
    let mut add = |route: Route| {
        tables.routes.insert((route.destination, route.metric), route);
    };
    for (destination, target) in &state.routes {
        let destination = IpNet::V4(*destination);
        match target {
            // A block of one address is the pod's own route.
            RouteTarget::Local if destination.prefix_len() < 32 => {
                add(Route::blackhole(destination, PROTOCOL))
            }
            RouteTarget::Local => {}
            RouteTarget::Vxlan { node } => {
                if let Some((link, vtep)) = vxlan.zip(state.vteps.get(node)) {
                    add(Route::via(destination, vtep.address.into(), link, PROTOCOL));
                }
            }
        }
    }
    if let Some(link) = vxlan {
        for vtep in state.vteps.values() {
            add(Route::on_link(IpNet::from(IpAddr::V4(vtep.address)), link, PROTOCOL));
        }
    }
    for endpoint in state.endpoints.values() {
        let Some(link) = links.get(&*endpoint.host_interface) else { continue };
        endpoint
            .addresses
            .iter()
            .for_each(|address| add(Route::on_link(IpNet::from(*address), *link, PROTOCOL)));
    }
    let Some(link) = vxlan else { return tables };
    let own = state.node.as_ref().and_then(|node| node.vtep.as_ref());
    tables.addresses.extend(own.map(|own| Address { link, address: own.address.into(), prefix_length: 32 }));
    for vtep in state.vteps.values() {
        tables.neighbours.insert(Neighbour { link, address: vtep.address.into(), mac: vtep.mac });
        tables.fdb.insert(FdbEntry { link, mac: vtep.mac, destination: vtep.parent });
    }
    tables
}

fn settings(node: &LocalNode) -> Vxlan {
    Vxlan { vni: node.network.vni, port: node.network.port, local: Some(node.address), learning: false }
}

/// Whether a VXLAN link of our name was made by us: it has our mark, or it is as we make it and nobody has set it up yet,
/// as a process leaves it that ended between the two.
fn is_ours(link: &Link, wanted: Vxlan) -> bool {
    link.vxlan.is_some()
        && (link.alias == MARK || (link.alias.is_empty() && !link.up && link.vxlan == Some(wanted)))
}

fn foreign_link(link: &Link) -> Condition {
    let what = match link.vxlan {
        Some(it) => format!("VXLAN link (VNI {}, port {})", it.vni, it.port),
        None => format!("link of kind {:?}", link.kind),
    };
    let message = format!(
        "the {what} {} is not ours and stays; while it is there this node may have no overlay. If nobody needs it any \
         more, Calico for instance, delete it",
        link.name
    );
    Condition { reason: Reason::ForeignVxlanLink, message }
}

/// Whether a route does what another one does, whoever made it.
fn leads_alike(one: &Route, other: &Route) -> bool {
    let way = |route: &Route| match route.kind {
        RouteKind::Blackhole => (route.kind, None, None),
        RouteKind::Unicast => (route.kind, route.link, route.gateway),
    };
    way(one) == way(other)
}

/// Whether a refusal to delete says that it was gone already: with its link, for instance.
fn is_gone(change: &Change, error: &Error) -> bool {
    use Change::{DeleteAddress, DeleteFdb, DeleteNeighbour, DeleteRoute};
    let deletes = matches!(change, DeleteRoute(_) | DeleteAddress(_) | DeleteNeighbour(_) | DeleteFdb(_));
    let gone = [libc::ESRCH, libc::ENOENT, libc::ENODEV, libc::EADDRNOTAVAIL];
    deletes && error.errno().is_some_and(|errno| gone.contains(&errno))
}

/// What the host's end of a pod's link needs: the host answers for the pod's gateway, which nobody has (169.254.1.1),
/// and takes packets only from where it would send the answers.
pub fn link_parameters(name: &str) -> Result<()> {
    for (parameter, value) in [("proxy_arp", "1"), ("rp_filter", "1"), ("forwarding", "1")] {
        sysctl::ensure(&format!("net/ipv4/conf/{name}/{parameter}"), value)?;
    }
    // An answer for the gateway must not wait, as the kernel has proxies do by default.
    sysctl::ensure(&format!("net/ipv4/neigh/{name}/proxy_delay"), "0")?;
    Ok(())
}
