//! The ports of the switch: virtual cables into pods' network namespaces and into the node's.
//!
//! The far end of a cable sends everything to one next hop, whose hardware address is a permanent entry in its
//! neighbour table. The switch forwards by IP address, so nothing else needs to be resolved. Linux keeps one
//! neighbour table for all network namespaces of a machine, with room for 1,024 entries that are not permanent
//! (`gc_thresh3`). Pods that resolve each other would fill it, and packets of all namespaces would be lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tortie_api::net::MacAddress;
use tortie_hcn::Guid;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{
    Address, Change, LinkSetting, Neighbour, NewLink, NewLinkKind, Peer, Route, RouteSocket,
};
use tortie_kernel::{ethtool, sysctl};
use tracing::{debug, info, warn};

use super::run::Engine;
use super::translations::{self, Translations};
use crate::error::Error;
use crate::fabric::{NodeLeg, Plan, PodAddress, PodPort, Port};

/// The name of a pod's interface.
const POD_INTERFACE: &str = "eth0";
/// The next hops of the node's interface, unused addresses.
const NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0x101);
/// The protocol of the routes: "boot", as for interfaces that are configured by hand.
const PROTOCOL: u8 = 3;
/// How long a new cable may need until it forwards frames: normally a few milliseconds.
const LIVE: Duration = Duration::from_secs(1);
/// Room for a burst of frames, in bytes.
const BUFFER: i32 = 4 << 20;

/// The switch's ends of all cables, with the configuration of the far ends.
pub(super) struct Ports {
    engine: Arc<Engine>,
    node: Arc<NetNs>,
    vswitch: NetNs,
    links: RouteSocket,
    made: BTreeMap<Port, Made>,
    wanted: Vec<Port>,
    next: u32,
    /// What the node's own stack translates.
    translations: Translations,
}

/// A cable.
struct Made {
    link: u32,
    spec: Spec,
}

/// The kind of the far end of a cable.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Spec {
    Pod { path: PathBuf, interface: Interface },
    Node { leg: NodeLeg },
}

/// The configuration of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    /// With the next hop for all packets; without one, the subnet is on the link itself.
    addresses: Vec<PodAddress>,
    mac: MacAddress,
    mtu: u32,
    /// The MAC address of next hops.
    gateway_mac: MacAddress,
    /// Whether there are also default routes to them.
    default_routes: bool,
}

impl Ports {
    pub(super) fn new(node: NetNs, engine: Arc<Engine>) -> Result<Ports, Error> {
        let vswitch = NetNs::create()?;
        let links = vswitch.run(|| {
            // The frames are for the switch alone, so the kernel's own stack must stay silent.
            if let Err(error) = sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1") {
                debug!(%error, "the vSwitch keeps IPv6; its frames are not forwarded");
            }
            RouteSocket::open()
        })??;
        let node = Arc::new(node);
        Ok(Ports {
            engine,
            node,
            vswitch,
            links,
            made: BTreeMap::new(),
            wanted: vec![],
            next: 0,
            translations: Translations::default(),
        })
    }

    /// Creates the missing ports of the plans.
    pub(super) fn make(
        &mut self,
        plans: &BTreeMap<Guid, Arc<Plan>>,
        compartments: &BTreeMap<Guid, PathBuf>,
    ) -> Result<(), Error> {
        self.wanted.clear();
        let mut result = Ok(());
        for (network, plan) in plans {
            let legs = plan.node_leg().map(|leg| (Port::Node(*network), Spec::Node { leg }));
            let pods = plan.pods.values().filter_map(|pod| {
                let path = compartments.get(&pod.namespace)?.clone();
                Some((Port::Pod(pod.endpoint), Spec::Pod { path, interface: Interface::of_pod(pod, plan) }))
            });
            for (port, spec) in legs.into_iter().chain(pods) {
                self.wanted.push(port);
                result = result.and(self.ensure(port, spec));
            }
        }
        result
    }

    /// Removes the ports that the last [`make`](Self::make) did not need.
    pub(super) fn remove_the_rest(&mut self) -> Result<(), Error> {
        let rest: Vec<Port> = self.made.keys().filter(|port| !self.wanted.contains(port)).copied().collect();
        let mut result = Ok(());
        for port in rest {
            result = result.and(self.remove(port));
        }
        result
    }

    /// Makes the node's own stack translate what the plans say.
    pub(super) fn set_translations(&mut self, plans: &BTreeMap<Guid, Arc<Plan>>) -> Result<(), Error> {
        let wanted = Translations {
            ports: plans
                .values()
                .flat_map(|plan| [plan.node_ports(), plan.host_ports.clone()])
                .flatten()
                .collect(),
            outbound: plans.values().flat_map(|plan| plan.outbound()).collect(),
        };
        if wanted != self.translations {
            translations::set(&self.node, &wanted)?;
            self.translations = wanted;
        }
        Ok(())
    }

    fn ensure(&mut self, port: Port, spec: Spec) -> Result<(), Error> {
        if let Some(made) = self.made.get_mut(&port) {
            if made.spec == spec {
                return Ok(());
            }
            if let (Spec::Node { leg: old }, Spec::Node { leg: new }) = (&made.spec, &spec) {
                let only_routes_differ = NodeLeg { routes: new.routes.clone(), ..old.clone() } == *new;
                if only_routes_differ {
                    change_routes(&self.node, &leg_name(port), Some(old), new)?;
                    made.spec = spec;
                    return Ok(());
                }
            }
            self.remove(port)?;
        }
        let link = match &spec {
            Spec::Pod { path, interface } => {
                let namespace = NetNs::open(path)?;
                self.connect(port, &namespace, interface)?
            }
            Spec::Node { leg } => {
                let interface = Interface::of_leg(leg, leg_name(port));
                let node = Arc::clone(&self.node);
                let link = self.connect(port, &node, &interface)?;
                change_routes(&node, &interface.name, None, leg)
                    .inspect_err(|_| drop(self.disconnect(port, link)))?;
                link
            }
        };
        info!(?port, ?spec, "plugged in");
        self.made.insert(port, Made { link, spec });
        Ok(())
    }

    fn remove(&mut self, port: Port) -> Result<(), Error> {
        let Some(made) = self.made.remove(&port) else { return Ok(()) };
        info!(?port, spec = ?made.spec, "unplugged");
        self.disconnect(port, made.link)
    }

    /// Connects a cable from the vSwitch into a namespace, and returns the index of the vSwitch's end.
    fn connect(&mut self, port: Port, namespace: &NetNs, interface: &Interface) -> Result<u32, Error> {
        self.next += 1;
        let name = format!("port{}", self.next);
        let peer = Peer {
            name: &interface.name,
            mac: Some(interface.mac),
            mtu: Some(interface.mtu),
            namespace: Some(namespace.as_fd()),
        };
        let mut cable = NewLink::new(&name, NewLinkKind::Veth(peer));
        (cable.up, cable.mtu) = (true, Some(interface.mtu));
        self.links.create(&cable)?;
        let link = self.vswitch.run(|| tortie_kernel::interface_index(&name))??;
        let finished = self.open(port, &name, link).and_then(|()| namespace.run(|| interface.set_up())?);
        finished.inspect_err(|_| drop(self.disconnect(port, link)))?;
        let mut both_ends_pass = || -> Result<bool, Error> {
            let near = self.links.wait_until_operating(&name, LIVE)?;
            Ok(near
                && namespace.run(|| RouteSocket::open()?.wait_until_operating(&interface.name, LIVE))??)
        };
        if !both_ends_pass().inspect_err(|_| drop(self.disconnect(port, link)))? {
            warn!(?port, "the cable does not pass frames yet; they are lost until it does");
        }
        Ok(link)
    }

    fn open(&self, port: Port, name: &str, link: u32) -> Result<(), Error> {
        let socket = self.vswitch.run(|| -> Result<PacketSocket, Error> {
            ethtool::disable_offloads(name)?;
            Ok(PacketSocket::open(link)?)
        })??;
        socket.set_receive_buffer(BUFFER).map_err(Error::system("enlarge a port's buffer"))?;
        self.engine.add_port(port, socket)
    }

    fn disconnect(&mut self, port: Port, link: u32) -> Result<(), Error> {
        self.engine.remove_port(port);
        match self.links.change(&Change::DeleteLink(link)) {
            // The pod's namespace disappeared first, and the cable with it.
            Err(error) if error.errno() == Some(NO_SUCH_DEVICE) => {
                debug!(?port, "the port was gone already");
                Ok(())
            }
            result => result.map_err(Error::from),
        }
    }
}

const NO_SUCH_DEVICE: i32 = rustix::io::Errno::NODEV.raw_os_error();

/// The name of the node's interface on a network: stable, and within 15 characters.
fn leg_name(port: Port) -> String {
    let (Port::Node(id) | Port::Pod(id)) = port;
    let [a, b, c, d, ..] = id.as_bytes();
    format!("hns-{a:02x}{b:02x}{c:02x}{d:02x}")
}

impl Interface {
    fn of_pod(pod: &PodPort, plan: &Plan) -> Interface {
        Interface {
            name: POD_INTERFACE.to_owned(),
            addresses: pod.addresses.clone(),
            mac: MacAddress(pod.mac),
            mtu: pod.mtu,
            gateway_mac: MacAddress(plan.router_mac),
            default_routes: true,
        }
    }

    fn of_leg(leg: &NodeLeg, name: String) -> Interface {
        let address = |address: &IpNet| PodAddress { address: *address, gateway: Some(next_hop(*address)) };
        Interface {
            name,
            addresses: leg.addresses.iter().map(address).collect(),
            mac: MacAddress(leg.mac),
            mtu: leg.mtu,
            gateway_mac: MacAddress(leg.mac),
            default_routes: false,
        }
    }

    /// Configures the interface, in the calling thread's network namespace.
    fn set_up(&self) -> Result<(), Error> {
        self.set_ipv6()?;
        ethtool::disable_offloads(&self.name)?;
        let link = tortie_kernel::interface_index(&self.name)?;
        let address = |PodAddress { address, gateway }: &PodAddress| {
            let prefix_length = gateway.map_or(address.prefix_len(), |_| address.max_prefix_len());
            Change::AddAddress(Address { link, address: address.addr(), prefix_length })
        };
        let mut changes: Vec<Change> = self.addresses.iter().map(address).collect();
        changes.push(Change::SetLink(link, vec![LinkSetting::Up(true)]));
        for gateway in self.addresses.iter().filter_map(|it| it.gateway) {
            changes.push(Change::SetNeighbour(Neighbour { link, address: gateway, mac: self.gateway_mac }));
            if self.default_routes {
                changes.push(Change::AddRoute(Route::via(everything(gateway), gateway, link, PROTOCOL)));
            }
        }
        apply(&changes)
    }

    /// Enables IPv6 if the interface has an address of it. HNS has none on overlays.
    fn set_ipv6(&self) -> Result<(), Error> {
        let set = |name: &str, value: &str| {
            sysctl::ensure(&format!("net/ipv6/conf/{}/{name}", self.name), value).map(drop)
        };
        if self.addresses.iter().any(|it| it.address.addr().is_ipv6()) {
            set("disable_ipv6", "0")?;
            // The switch passes no router advertisements.
            return Ok(set("accept_ra", "0")?);
        }
        if let Err(error) = set("disable_ipv6", "1") {
            debug!(%error, "the interface keeps IPv6; this only causes some unnecessary frames");
        }
        Ok(())
    }
}

/// The next hop of the node's interface in the family of an address.
fn next_hop(of: IpNet) -> IpAddr {
    match of {
        IpNet::V4(_) => NEXT_HOP.into(),
        IpNet::V6(_) => NEXT_HOP_V6.into(),
    }
}

/// The destination of a default route.
fn everything(gateway: IpAddr) -> IpNet {
    match gateway {
        IpAddr::V4(_) => Ipv4Net::default().into(),
        IpAddr::V6(_) => Ipv6Net::default().into(),
    }
}

/// The networks behind the node's interface: its own subnets and those of other nodes.
fn behind(leg: &NodeLeg) -> impl Iterator<Item = IpNet> {
    leg.addresses.iter().map(IpNet::trunc).chain(leg.routes.iter().copied())
}

/// The address of the node's packets to a network.
fn source(leg: &NodeLeg, to: IpNet) -> Option<IpAddr> {
    let is_same_family = |own: &&IpNet| own.addr().is_ipv6() == to.addr().is_ipv6();
    let own = leg.addresses.iter().find(is_same_family).map(IpNet::addr);
    match to {
        IpNet::V4(_) if !own.is_some_and(|own| to.contains(&own)) => Some(leg.source.into()),
        IpNet::V4(_) | IpNet::V6(_) => own,
    }
}

/// Adds and removes routes of the node's interface.
fn change_routes(node: &NetNs, interface: &str, old: Option<&NodeLeg>, new: &NodeLeg) -> Result<(), Error> {
    node.run(|| {
        let link = tortie_kernel::interface_index(interface)?;
        let route = |prefix: IpNet| {
            let route = Route::via(prefix, next_hop(prefix), link, PROTOCOL);
            Route { source: source(new, prefix), ..route }
        };
        let old: BTreeSet<IpNet> = old.into_iter().flat_map(behind).collect();
        let new: BTreeSet<IpNet> = behind(new).collect();
        let gone = old.difference(&new).map(|prefix| Change::DeleteRoute(route(*prefix)));
        let come = new.difference(&old).map(|prefix| Change::AddRoute(route(*prefix)));
        apply(&gone.chain(come).collect::<Vec<_>>())
    })?
}

/// Applies changes in the calling thread's network namespace, and returns the first error.
fn apply(changes: &[Change]) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    let verdicts = RouteSocket::open()?.change_all(changes)?;
    Ok(verdicts.into_iter().collect::<Result<(), _>>()?)
}

impl Drop for Ports {
    fn drop(&mut self) {
        for port in self.made.keys().copied().collect::<Vec<_>>() {
            if let Err(error) = self.remove(port) {
                warn!(?port, %error, "a port stays behind");
            }
        }
    }
}
