//! Routes, the VXLAN link with its entries for other nodes, and kernel parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{
    Condition, Endpoint, EndpointId, LocalNode, NodeState, Reason, Report, RouteTarget, Vtep,
};
use tortie_kernel::InterfaceIndex;
use tortie_kernel::route::{
    Address, Change, FdbEntry, Link, LinkSetting, Neighbour, NewLink, NewLinkKind, Route, RouteKind,
    RouteSocket, Vxlan,
};
use tortie_kernel::{Error, Result};
use tortie_kernel::{ethtool, interface_index, sysctl};

use super::Config;

/// The protocol number of Tortie's routes. Nobody else has it in `rtnetlink.h` and iproute2's `rt_protos`. Calico's
/// is 80 (`felix/dataplane/linux/route_mgr.go`), and Tortie must not delete Calico's routes.
pub(crate) const PROTOCOL: u8 = 84;

/// The mark (`ifalias`) of the VXLAN link that Tortie creates.
pub(crate) const MARK: &str = "tortie overlay";

/// The routes and links of the node, and the known state of the kernel.
#[derive(Debug)]
pub(super) struct Network {
    socket: RouteSocket,
    config: Config,
    /// The known state of the kernel; `None` if it is unknown and must be read before it is changed.
    kernel: Option<Tables>,
    /// The VXLAN link that Tortie created or adopted, with its purpose.
    vxlan: Option<(LocalNode, u32)>,
    /// The condition if somebody else's VXLAN link is in the way.
    foreign: Option<Condition>,
    /// The index of each pod's link with its parameters set.
    prepared: BTreeMap<String, u32>,
    endpoints: BTreeMap<EndpointId, Condition>,
    node: Vec<Condition>,
    retry: bool,
    /// The MTU of the interface that has the node's address.
    underlay_mtu: Option<u32>,
}

/// What VXLAN adds to a packet: Ethernet, IPv4, UDP and its own header (RFC 7348).
const VXLAN_OVERHEAD: u32 = 50;

/// The tables that this module writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Tables {
    /// By destination and metric. The kernel's tables include routes of others, which are left alone.
    routes: BTreeMap<(IpNet, u32), Route>,
    /// Only on the VXLAN link, as the next two.
    addresses: BTreeSet<Address>,
    neighbours: BTreeSet<Neighbour>,
    fdb: BTreeSet<FdbEntry>,
}

impl Network {
    pub(super) fn open(config: Config) -> Result<Self> {
        let (vxlan, foreign, prepared, endpoints, node) = Default::default();
        let socket = RouteSocket::open()?;
        Ok(Self {
            socket,
            config,
            kernel: None,
            vxlan,
            foreign,
            prepared,
            endpoints,
            node,
            retry: false,
            underlay_mtu: None,
        })
    }

    /// Applies changes, if there are any, and what failed the last time.
    pub(super) fn apply(&mut self, state: &NodeState, changed: bool) -> Result<()> {
        if !changed && !self.retry && self.kernel.is_some() {
            return Ok(());
        }
        self.reconcile(state).inspect_err(|_| self.kernel = None)
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

    /// The necessary changes. Only Tortie's routes are changed or deleted. A foreign route in the same place stays,
    /// and is reported if it leads elsewhere.
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
        // What packets need exists before what they needed goes. The kernel replaces a neighbour of the same address, and an
        // entry of the same hardware address; to delete the old one afterwards would delete the new one.
        changes.extend(desired.addresses.difference(&kernel.addresses).copied().map(Change::AddAddress));
        changes.extend(desired.fdb.difference(&kernel.fdb).copied().map(Change::SetFdb));
        changes.extend(desired.neighbours.difference(&kernel.neighbours).copied().map(Change::SetNeighbour));
        let addresses: BTreeSet<IpAddr> =
            desired.neighbours.iter().map(|neighbour| neighbour.address).collect();
        let neighbours = kernel.neighbours.iter().filter(|old| !addresses.contains(&old.address));
        changes.extend(neighbours.copied().map(Change::DeleteNeighbour));
        let macs: BTreeSet<_> = desired.fdb.iter().map(|entry| entry.mac).collect();
        changes
            .extend(kernel.fdb.iter().filter(|old| !macs.contains(&old.mac)).copied().map(Change::DeleteFdb));
        changes.extend(kernel.addresses.difference(&desired.addresses).copied().map(Change::DeleteAddress));
        for (key, route) in &desired.routes {
            match kernel.routes.get(key) {
                None => changes.push(Change::AddRoute(*route)),
                Some(there) if leads_alike(there, route) => {}
                Some(there) if there.protocol == PROTOCOL => changes.push(Change::ReplaceRoute(*route)),
                Some(there) => {
                    let message = format!(
                        "the foreign route {there} occupies the place of {route}; Tortie leaves it alone"
                    );
                    self.node.push(Condition::new(Reason::RouteTaken, message));
                }
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

    /// Creates or changes the VXLAN link, and returns its index. Without an overlay, removes Tortie's link. A link
    /// from before this process stays until the overlay is known.
    fn vxlan_link(&mut self, state: &NodeState) -> Result<Option<u32>> {
        let local = self.local_node(state)?;
        let wanted = local.as_ref().and_then(|node| Some((node, node.vtep.as_ref()?)));
        let Some((node, vtep)) = wanted else {
            self.foreign = None;
            if let Some((_, index)) = self.vxlan.take() {
                tracing::info!(
                    link = self.config.vxlan_device,
                    "deleting the VXLAN link, because there is no overlay any more"
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
            tracing::warn!(link = name, found = ?other.vxlan, "recreating the VXLAN link with other settings");
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

    /// This node with the MTU that its overlay must have: as configured, or as its interface permits.
    fn local_node(&mut self, state: &NodeState) -> Result<Option<LocalNode>> {
        let Some(mut node) = state.node.clone() else { return Ok(None) };
        if self.kernel.is_none() {
            let addresses = self.socket.addresses()?.into_iter();
            let own =
                addresses.filter(|own| own.address == IpAddr::V4(node.address)).map(|own| own.link).next();
            // A node's address may be on the loopback interface; packets leave by another one.
            let links = self.socket.links()?.into_iter();
            let link = links.filter(|link| link.name != "lo").find(|link| Some(link.index) == own);
            self.underlay_mtu = link.map(|link| link.mtu);
        }
        let detected = self.underlay_mtu.map(|mtu| mtu.saturating_sub(VXLAN_OVERHEAD));
        node.network.mtu = state.settings.vxlan_mtu.or(detected).unwrap_or(node.network.mtu);
        Ok(Some(node))
    }

    fn create(&mut self, name: &str, node: &LocalNode, vtep: &Vtep) -> Result<u32> {
        let kind = NewLinkKind::Vxlan(settings(node));
        let new = NewLink { mac: Some(vtep.mac), mtu: Some(node.network.mtu), ..NewLink::new(name, kind) };
        self.kernel = None;
        self.socket.create(&new)?;
        let index = interface_index(name)?;
        // The kernel does not accept a mark on creation. Until the link has its mark, it stays down.
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

    /// The indices of the existing links of pods, with their kernel parameters set.
    fn endpoint_links(&mut self, state: &NodeState) -> Result<BTreeMap<String, u32>> {
        let mut links = BTreeMap::new();
        let indices = InterfaceIndex::open()?;
        for (id, endpoint) in &state.endpoints {
            let name = &endpoint.host_interface;
            match indices.of(name).and_then(|index| self.prepare(name, index)) {
                Ok(index) => drop(links.insert(name.to_string(), index)),
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

/// The desired tables.
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

/// Whether Tortie created a VXLAN link with its name: it has the mark, or it has the right form and is not up yet, as
/// after a process that ended between the two steps.
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
        "the {what} {} is not ours and stays; while it is there this node may have no overlay. If it is of a Calico that \
         no longer runs: tortie node cleanup --calico. If nobody else needs it, delete it",
        link.name
    );
    Condition::new(Reason::ForeignVxlanLink, message)
}

/// Whether two routes do the same, whoever created them.
fn leads_alike(one: &Route, other: &Route) -> bool {
    let target = |route: &Route| match route.kind {
        RouteKind::Blackhole => (route.kind, None, None),
        RouteKind::Unicast => (route.kind, route.link, route.gateway),
    };
    target(one) == target(other)
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
