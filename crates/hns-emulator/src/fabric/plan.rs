//! Derives ports, routes and addresses from the documents of a network.
//!
//! An overlay network has tunnels to other nodes, and connects the node itself by a policy (HostRoute). An L2Bridge network has neither: an
//! endpoint in the node's own compartment connects the node, and packets to other nodes leave by the node's own stack, without
//! encapsulation and with the MAC address of its adapter (docs/hns.md, L2Bridge).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use tortie_hcn::Guid;
use tortie_hcn::schema::{
    DrMacAddress, Endpoint, HostRoute, InterfaceParameters, Network, NetworkMode, PolicySettings,
    ProviderAddress, RemoteSubnetRoute, Vsid,
};
use tracing::error;

use super::balance::{self, Fronts, StandIn};
use super::frame::Mac;
use super::host_ports::{HostPort, HostPorts, host_ports};
use super::outbound::{OutboundNat, OutboundNats, encapsulated};
use crate::acl::AccessControl;
use crate::addresses::{addresses, ipv4, mac};
use crate::config::{Config, EgressSees};
use crate::state::{Guard, State};

/// The MTU of a container's interface, unless the endpoint says otherwise (docs/hns.md, Networks).
pub(crate) const MTU: u32 = 1450;

/// One network of a node.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The identifier of the overlay. An L2Bridge network has none.
    pub(crate) vni: Option<u32>,
    pub(crate) provider: Ipv4Addr,
    /// The MAC address of the pods' next hop. On an overlay, it is that of the node's end of the tunnel.
    pub(crate) router_mac: Mac,
    /// The subnets with their gateways.
    pub(crate) subnets: Vec<(IpNet, IpAddr)>,
    /// The node's own end, if the node is connected.
    pub(crate) node: Option<NodeEnd>,
    /// Whether the inner sources of tunnel packets are checked.
    check_tunnel_sources: bool,
    /// Sorted by prefix length, the longest first.
    pub(crate) remotes: Vec<Remote>,
    /// The load balancers.
    pub(crate) fronts: Fronts,
    /// The same as packets of the node's stack name them.
    pub(crate) node_fronts: Fronts,
    /// The addresses of Services that the node's own packets reach, too.
    behind_switch: Vec<Ipv4Addr>,
    /// The address that stands for the node's own in connections to Services, if there are any.
    stand_in: Option<Ipv4Addr>,
    /// Which destination of a packet to a load balancer the ACLs of a pod see.
    pub(crate) egress_sees: EgressSees,
    /// The ports of the node that lead to pods.
    pub(crate) host_ports: HostPorts,
    /// The attached endpoints.
    pub(crate) pods: BTreeMap<Guid, Arc<PodPort>>,
    /// The same by address.
    by_address: BTreeMap<IpAddr, Arc<PodPort>>,
}

/// The node's own end of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeEnd {
    /// One of each family at most.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) mac: Mac,
}

/// A subnet on another node.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) prefix: Ipv4Net,
    pub(crate) provider: Ipv4Addr,
    pub(crate) router_mac: Mac,
    pub(crate) vni: u32,
}

/// An attached endpoint.
#[derive(Debug, Clone)]
pub(crate) struct PodPort {
    pub(crate) endpoint: Guid,
    pub(crate) namespace: Guid,
    /// One of each family at most.
    pub(crate) addresses: Vec<PodAddress>,
    pub(crate) mac: Mac,
    pub(crate) mtu: u32,
    pub(crate) acl: Arc<AccessControl>,
    /// Which of its packets get the node's address.
    pub(crate) outbound: OutboundNat,
    /// The destinations that its packets reach by the switch only.
    encapsulated: Vec<Ipv4Net>,
    /// The number of resets of its flows.
    pub(crate) resets: u64,
    /// The document that this is derived from.
    document: Arc<Endpoint>,
}

/// An address of an attached endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PodAddress {
    /// With the length of its subnet's prefix.
    pub(crate) address: IpNet,
    pub(crate) gateway: Option<IpAddr>,
}

/// The node's own interface on a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeLeg {
    /// Its addresses with the lengths of their subnets' prefixes.
    pub(crate) addresses: Vec<IpNet>,
    pub(crate) mac: Mac,
    pub(crate) mtu: u32,
    /// The networks behind it, besides the subnets of its addresses.
    pub(crate) routes: Vec<IpNet>,
    /// The address of the node's IPv4 packets to them.
    pub(crate) source: Ipv4Addr,
}

impl Plan {
    /// The overlay and L2Bridge networks among the objects. Parts that have not changed since `before` are reused. A document that
    /// passed the checks and cannot be parsed is an error of the emulator: it is logged, and the object is ignored.
    pub(crate) fn of(
        state: &State,
        config: &Config,
        before: &BTreeMap<Guid, Arc<Plan>>,
    ) -> BTreeMap<Guid, Arc<Plan>> {
        let forwarded =
            |network: &&Arc<Network>| matches!(network.r#type, NetworkMode::Overlay | NetworkMode::L2Bridge);
        let networks = state.networks.values().filter(forwarded);
        networks
            .filter_map(|network| {
                let before = before.get(&network.id).map(Arc::as_ref);
                let plan = Plan::of_network(network, state, config, before);
                if plan.is_none() {
                    error!(network = %network.id, "a network that cannot be understood is not forwarded");
                }
                Some((network.id, Arc::new(plan?)))
            })
            .collect()
    }

    fn of_network(network: &Network, state: &State, config: &Config, before: Option<&Plan>) -> Option<Plan> {
        let pods = pods(network, state, before);
        let provider = first::<ProviderAddress>(network)?.provider_address.parse().ok()?;
        let subnets = network.subnets().map(|subnet| {
            let gateway = subnet.routes.first()?.next_hop.parse().ok()?;
            Some((subnet.ip_address_prefix.parse().ok()?, gateway))
        });
        let subnets: Vec<(IpNet, IpAddr)> = subnets.collect::<Option<_>>()?;
        let overlay = network.r#type == NetworkMode::Overlay;
        let Links { vni, router_mac, node, remotes } =
            if overlay { Links::of_overlay(network, &subnets)? } else { Links::of_bridge(network, state) };
        let stand_in = node.as_ref().filter(|_| !overlay).map(|node| StandIn {
            own: node.ipv4().chain([provider]).collect(),
            address: balance::stand_in(network.id),
        });
        let fronts = balance::fronts(network.id, state, provider, stand_in.as_ref());
        let behind_switch = if overlay {
            behind_switch(network, state, provider, &fronts)
        } else {
            fronts.keys().map(|(_, vip, _)| *vip).filter(|vip| *vip != provider).collect()
        };
        Some(Plan {
            vni,
            provider,
            router_mac,
            subnets,
            node,
            check_tunnel_sources: config.check_tunnel_sources,
            remotes,
            node_fronts: balance::of_node(&fronts, network.id, provider),
            behind_switch,
            stand_in: stand_in.map(|it| it.address).filter(|_| !fronts.is_empty()),
            fronts,
            egress_sees: config.egress_sees,
            host_ports: host_ports(ipv4_of(&pods).map(|(address, pod)| (address, &*pod.document)), provider),
            by_address: by_address(&pods),
            pods,
        })
    }

    /// The node's own subnet that has this address.
    pub(crate) fn subnet(&self, address: IpAddr) -> Option<IpNet> {
        self.subnets.iter().map(|(net, _)| *net).find(|net| net.contains(&address))
    }

    /// The attached endpoint that has this address.
    pub(crate) fn pod(&self, address: IpAddr) -> Option<&Arc<PodPort>> {
        self.by_address.get(&address)
    }

    /// Whether the address is the gateway of a subnet.
    pub(crate) fn is_gateway(&self, address: IpAddr) -> bool {
        self.subnets.iter().any(|(_, gateway)| *gateway == address)
    }

    /// Whether the address is the node's own. On an overlay, the gateways are.
    pub(crate) fn is_node(&self, address: IpAddr) -> bool {
        let is_end = self.node.as_ref().is_some_and(|node| node.addresses.contains(&address));
        address == self.provider || is_end || self.vni.is_some() && self.is_gateway(address)
    }

    /// Whether packets to this address leave by the node's adapter without encapsulation, whoever sends them.
    pub(crate) fn is_behind_adapter(&self, address: IpAddr) -> bool {
        let leads_there = self.vni.is_none() && self.connects_node(address);
        leads_there && self.subnet(address).is_none() && !self.is_node(address)
    }

    /// Whether the node has an end of this address's family.
    pub(crate) fn connects_node(&self, address: IpAddr) -> bool {
        let is_same_family = |own: &IpAddr| own.is_ipv6() == address.is_ipv6();
        self.node.as_ref().is_some_and(|node| node.addresses.iter().any(is_same_family))
    }

    /// The MAC address of the node's own end.
    pub(crate) fn node_mac(&self) -> Mac {
        self.node.as_ref().map_or(self.router_mac, |node| node.mac)
    }

    /// The other node that has this address. An address in the node's own subnet needs a route with a longer prefix.
    pub(crate) fn remote(&self, address: IpAddr) -> Option<&Remote> {
        let own = self.subnet(address).map(|net| net.prefix_len());
        let covers = |remote: &&Remote| {
            IpNet::V4(remote.prefix).contains(&address)
                && own.is_none_or(|length| remote.prefix.prefix_len() > length)
        };
        self.remotes.iter().find(covers).filter(|_| address != self.provider)
    }

    /// The pods whose packets the node translates, and the address that stands for the node's.
    pub(crate) fn outbound(&self) -> OutboundNats {
        let translated = ipv4_of(&self.pods).filter(|(_, pod)| pod.outbound != OutboundNat::default());
        let pods = translated.map(|(address, pod)| (address, pod.outbound.clone()));
        let stand_in = self.stand_in.map(|address| (address, OutboundNat::of_everything()));
        pods.chain(stand_in).collect()
    }

    /// Whether a packet of this pod leaves by the node's own stack.
    pub(crate) fn leaves(&self, pod: &PodPort, to: IpAddr) -> bool {
        let is_service = self.fronts.keys().any(|(_, address, _)| *address == to);
        let for_switch = is_service || pod.encapsulated.iter().any(|net| IpNet::V4(*net).contains(&to));
        let is_broadcast = matches!(to, IpAddr::V4(to) if to.is_broadcast());
        let nowhere = is_broadcast || is_of_link(to) || to.is_multicast() || to.is_unspecified();
        if !self.connects_node(to) || self.is_node(to) || for_switch || nowhere {
            return false;
        }
        let inside = self.subnet(to).is_some() || self.remote(to).is_some();
        !inside || matches!(to, IpAddr::V4(to) if pod.outbound.translates(to))
    }

    /// The ports of the node that lead to load balancers: its stack sends their packets to the switch.
    pub(crate) fn node_ports(&self) -> HostPorts {
        let named = |((protocol, address, port), _): (&(u8, Ipv4Addr, u16), _)| {
            let to = HostPort { pod: *address, port: *port, from_node: true };
            let is_own = !self.fronts.contains_key(&(*protocol, *address, *port));
            is_own.then_some(((*protocol, self.provider, *port), to))
        };
        self.node_fronts.iter().filter_map(named).collect()
    }

    /// Whether a load balancer replaces clients' addresses by this address.
    pub(crate) fn hides_behind(&self, address: IpAddr) -> bool {
        self.fronts.values().any(|front| front.hides_behind(address))
    }

    /// Whether a packet with this source may come from another node.
    pub(crate) fn may_come_by_tunnel(&self, source: Ipv4Addr) -> bool {
        let source = IpAddr::V4(source);
        let own = source == self.provider || self.subnet(source).is_some() && self.remote(source).is_none();
        !(self.check_tunnel_sources && own)
    }

    /// The node's own interface.
    pub(crate) fn node_leg(&self) -> Option<NodeLeg> {
        let NodeEnd { addresses, mac } = self.node.as_ref()?;
        let with_subnet = |address: &IpAddr| IpNet::new(*address, self.subnet(*address)?.prefix_len()).ok();
        let addresses = addresses.iter().map(with_subnet).collect::<Option<Vec<_>>>()?;
        let others = self.subnets.iter().map(|(net, _)| *net).filter(|net| {
            self.connects_node(net.addr()) && !addresses.iter().any(|address| address.trunc() == *net)
        });
        let known = |address: &Ipv4Addr| {
            let address = IpAddr::V4(*address);
            self.subnet(address).is_some() || self.remote(address).is_some()
        };
        let own = self.behind_switch.iter().copied().filter(|address| !known(address));
        let node_ports = self.node_ports();
        let handed_over = node_ports.values().map(|to| to.pod).chain(self.stand_in);
        let single = own.chain(handed_over).map(|address| IpNet::from(IpAddr::V4(address)));
        let remotes = self.remotes.iter().map(|remote| IpNet::V4(remote.prefix));
        let mut routes: Vec<_> = remotes.chain(others).chain(single).collect();
        routes.sort();
        routes.dedup();
        let source = self.node.as_ref()?.ipv4().next().filter(|_| self.vni.is_some());
        let source = source.unwrap_or(self.provider);
        Some(NodeLeg { addresses, mac: *mac, mtu: MTU, routes, source })
    }
}

/// Whether this is an address of one link (RFC 4291 2.5.6), which means something else on every other one.
pub(super) fn is_of_link(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn first<T: PolicySettings>(network: &Network) -> Option<T> {
    network.policies.iter().find_map(|policy| policy.settings().ok().flatten())
}

/// The addresses of remote endpoints whose node is this one. kube-proxy makes one for each Service, so that the node's own
/// packets to it enter the switch.
fn behind_switch(network: &Network, state: &State, provider: Ipv4Addr, fronts: &Fronts) -> Vec<Ipv4Addr> {
    let on_this_node = |endpoint: &&Arc<Endpoint>| {
        let settings =
            endpoint.policies.iter().filter_map(|it| it.settings::<ProviderAddress>().ok().flatten());
        endpoint.is_remote()
            && settings.into_iter().any(|settings| settings.provider_address.parse() == Ok(provider))
    };
    let endpoints = state.endpoints_of(network.id).filter(on_this_node);
    let addresses = endpoints.filter_map(|it| Some(ipv4(it)?.0));
    // Those of backends outside of the cluster look the same. The node reaches them without the switch.
    addresses.filter(|address| fronts.keys().any(|(_, vip, _)| vip == address)).collect()
}

fn remotes(network: &Network) -> Vec<Remote> {
    let routes = network.policies.iter().filter_map(|p| p.settings::<RemoteSubnetRoute>().ok().flatten());
    let mut remotes: Vec<Remote> = routes
        .filter_map(|route| {
            Some(Remote {
                prefix: route.destination_prefix.parse().ok()?,
                provider: route.provider_address.parse().ok()?,
                router_mac: mac(&route.distributed_router_mac_address)?,
                vni: route.isolation_id,
            })
        })
        .collect();
    remotes.sort_by_key(|remote| std::cmp::Reverse(remote.prefix.prefix_len()));
    remotes
}

/// The attached endpoints of a network, without those of the node itself and those without an address.
fn pods(network: &Network, state: &State, before: Option<&Plan>) -> BTreeMap<Guid, Arc<PodPort>> {
    let attached =
        |endpoint: &&Arc<Endpoint>| !endpoint.host_compute_namespace.is_zero() && !state.is_of_node(endpoint);
    let pods = state.endpoints_of(network.id).filter(attached).filter_map(|endpoint| {
        addresses(endpoint).next()?;
        let known = before.and_then(|before| before.pods.get(&endpoint.id));
        let guard = state.guard(endpoint.id).ok();
        let is_same = |pod: &&Arc<PodPort>| {
            Arc::ptr_eq(&pod.document, endpoint)
                && guard.is_some_and(|guard| Arc::ptr_eq(&pod.acl, &guard.control))
        };
        if let Some(known) = known.filter(is_same) {
            return Some((endpoint.id, Arc::clone(known)));
        }
        let port = guard.and_then(|guard| PodPort::of(endpoint, guard));
        if port.is_none() {
            error!(endpoint = %endpoint.id, "an endpoint that cannot be understood is not forwarded");
        }
        Some((endpoint.id, Arc::new(port?)))
    });
    pods.collect()
}

fn by_address(pods: &BTreeMap<Guid, Arc<PodPort>>) -> BTreeMap<IpAddr, Arc<PodPort>> {
    let of_pod = |pod: &Arc<PodPort>| {
        let pod = Arc::clone(pod);
        let addresses: Vec<IpAddr> = pod.addresses.iter().map(|it| it.address.addr()).collect();
        addresses.into_iter().map(move |address| (address, Arc::clone(&pod)))
    };
    pods.values().flat_map(of_pod).collect()
}

/// The pods that have an IPv4 address.
fn ipv4_of(pods: &BTreeMap<Guid, Arc<PodPort>>) -> impl Iterator<Item = (Ipv4Addr, &PodPort)> {
    pods.values().filter_map(|pod| Some((ipv4(&pod.document)?.0, &**pod)))
}

/// How a network is linked to its node and to others.
struct Links {
    vni: Option<u32>,
    router_mac: Mac,
    node: Option<NodeEnd>,
    remotes: Vec<Remote>,
}

impl Links {
    fn of_overlay(network: &Network, subnets: &[(IpNet, IpAddr)]) -> Option<Links> {
        let policies = &network.subnets().next()?.policies;
        let vsid = policies.iter().find_map(|policy| policy.settings::<Vsid>().ok().flatten())?;
        let router_mac = mac(&first::<DrMacAddress>(network)?.address)?;
        let connected = network.policies.iter().any(|policy| policy.is::<HostRoute>());
        let gateway = subnets.first().filter(|_| connected);
        let node = gateway.map(|(_, address)| NodeEnd { addresses: vec![*address], mac: router_mac });
        Some(Links { vni: Some(vsid.isolation_id), router_mac, node, remotes: remotes(network) })
    }

    fn of_bridge(network: &Network, state: &State) -> Links {
        let end = state.endpoints_of(network.id).find(|endpoint| state.is_of_node(endpoint));
        let node = end.and_then(|endpoint| NodeEnd::of(endpoint));
        Links { vni: None, router_mac: bridge_mac(network.id), node, remotes: vec![] }
    }
}

/// The MAC address of the pods' next hop in an L2Bridge network.
fn bridge_mac(network: Guid) -> Mac {
    let [a, b, c, ..] = *network.as_bytes();
    // 00-15-5D is Microsoft's prefix for virtual adapters.
    [0x00, 0x15, 0x5d, a, b, c]
}

impl NodeEnd {
    /// That of an endpoint in the node's own compartment.
    fn of(endpoint: &Endpoint) -> Option<NodeEnd> {
        let addresses: Vec<IpAddr> = addresses(endpoint).map(|address| address.addr()).collect();
        let mac = mac(&endpoint.mac_address)?;
        (!addresses.is_empty()).then_some(NodeEnd { addresses, mac })
    }

    /// Its IPv4 address.
    fn ipv4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.addresses.iter().filter_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        })
    }
}

impl PodPort {
    fn of(endpoint: &Arc<Endpoint>, guard: &Guard) -> Option<PodPort> {
        let addresses = addresses(endpoint).map(|address| PodAddress {
            address,
            gateway: default_gateway(endpoint, address.addr().is_ipv6()),
        });
        let parameters =
            endpoint.policies.iter().find_map(|p| p.settings::<InterfaceParameters>().ok().flatten());
        Some(PodPort {
            endpoint: endpoint.id,
            namespace: endpoint.host_compute_namespace,
            addresses: addresses.collect(),
            mac: mac(&endpoint.mac_address)?,
            mtu: parameters.map_or(MTU, |parameters| parameters.mtu),
            acl: Arc::clone(&guard.control),
            outbound: OutboundNat::of(endpoint),
            encapsulated: encapsulated(endpoint),
            resets: guard.resets,
            document: Arc::clone(endpoint),
        })
    }

    /// Whether an address is its own.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.address.addr() == address)
    }
}

/// The next hop of the default route of a family.
fn default_gateway(endpoint: &Endpoint, of_ipv6: bool) -> Option<IpAddr> {
    let destination = if of_ipv6 { "::/0" } else { "0.0.0.0/0" };
    let default = endpoint.routes.iter().find(|route| route.destination_prefix == destination)?;
    default.next_hop.parse().ok()
}
