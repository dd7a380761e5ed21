//! Derives ports, routes and addresses from the documents of an overlay network.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use ipnet::Ipv4Net;
use tortie_hcn::Guid;
use tortie_hcn::schema::{
    DrMacAddress, Endpoint, HostRoute, InterfaceParameters, Network, NetworkMode, PolicySettings,
    ProviderAddress, RemoteSubnetRoute, Vsid,
};
use tracing::error;

use super::balance::{self, Fronts};
use super::frame::Mac;
use super::host_ports::{HostPort, HostPorts, host_ports};
use super::outbound::{OutboundNat, OutboundNats, encapsulated};
use crate::acl::AccessControl;
use crate::addresses::mac;
use crate::config::{Config, EgressSees};
use crate::state::{Guard, State};

/// The MTU of a container's interface, unless the endpoint says otherwise (docs/hns.md, Networks).
pub(crate) const MTU: u32 = 1450;

/// One overlay network of a node.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) vni: u32,
    pub(crate) provider: Ipv4Addr,
    /// The MAC address of the node's end of the tunnel.
    pub(crate) router_mac: Mac,
    /// The subnets with their gateways. The first gateway is the node's own end.
    pub(crate) subnets: Vec<(Ipv4Net, Ipv4Addr)>,
    /// Whether the node itself is connected (policy HostRoute).
    pub(crate) host_route: bool,
    /// Whether the inner sources of tunnel packets are checked.
    check_tunnel_sources: bool,
    /// Sorted by prefix length, the longest first.
    pub(crate) remotes: Vec<Remote>,
    /// The load balancers.
    pub(crate) fronts: Fronts,
    /// The same as packets of the node's stack name them.
    pub(crate) node_fronts: Fronts,
    /// The addresses of Services that the node's own packets reach, too: they have a remote endpoint on this node.
    behind_switch: Vec<Ipv4Addr>,
    /// Which destination of a packet to a load balancer the ACLs of a pod see.
    pub(crate) egress_sees: EgressSees,
    /// The ports of the node that lead to pods.
    pub(crate) host_ports: HostPorts,
    /// The attached endpoints by address.
    pub(crate) pods: BTreeMap<Ipv4Addr, Arc<PodPort>>,
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
    pub(crate) address: Ipv4Addr,
    pub(crate) prefix_length: u8,
    pub(crate) gateway: Option<Ipv4Addr>,
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

/// The node's own interface on the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeLeg {
    pub(crate) address: Ipv4Addr,
    pub(crate) prefix_length: u8,
    pub(crate) mac: Mac,
    pub(crate) mtu: u32,
    /// The networks behind it, besides the subnet of its address.
    pub(crate) routes: Vec<Ipv4Net>,
}

impl Plan {
    /// The overlay networks among the objects. Parts that have not changed since `before` are reused. A document that
    /// passed the checks and cannot be parsed is an error of the emulator: it is logged, and the object is ignored.
    pub(crate) fn of(
        state: &State,
        config: &Config,
        before: &BTreeMap<Guid, Arc<Plan>>,
    ) -> BTreeMap<Guid, Arc<Plan>> {
        let overlays = state.networks.values().filter(|network| network.r#type == NetworkMode::Overlay);
        overlays
            .filter_map(|network| {
                let before = before.get(&network.id).map(Arc::as_ref);
                let plan = Plan::of_network(network, state, config, before);
                if plan.is_none() {
                    error!(network = %network.id, "an overlay network that cannot be understood is not forwarded");
                }
                Some((network.id, Arc::new(plan?)))
            })
            .collect()
    }

    fn of_network(network: &Network, state: &State, config: &Config, before: Option<&Plan>) -> Option<Plan> {
        let subnet = network.subnets().next()?;
        let vsid = subnet.policies.iter().find_map(|policy| policy.settings::<Vsid>().ok().flatten())?;
        let attached =
            state.endpoints_of(network.id).filter(|endpoint| !endpoint.host_compute_namespace.is_zero());
        let pods = attached.filter_map(|endpoint| {
            let address: Ipv4Addr = endpoint.ip_configurations.first()?.ip_address.parse().ok()?;
            let known = before.and_then(|before| before.pods.get(&address));
            let guard = state.guard(endpoint.id).ok();
            let is_same = |pod: &&Arc<PodPort>| {
                Arc::ptr_eq(&pod.document, endpoint)
                    && guard.is_some_and(|guard| Arc::ptr_eq(&pod.acl, &guard.control))
            };
            if let Some(known) = known.filter(is_same) {
                return Some((address, Arc::clone(known)));
            }
            let port = guard.and_then(|guard| PodPort::of(endpoint, address, guard));
            if port.is_none() {
                error!(endpoint = %endpoint.id, "an endpoint that cannot be understood is not forwarded");
            }
            Some((address, Arc::new(port?)))
        });
        let pods: BTreeMap<_, _> = pods.collect();
        let provider = first::<ProviderAddress>(network)?.provider_address.parse().ok()?;
        let fronts = balance::fronts(network.id, state, provider);
        Some(Plan {
            vni: vsid.isolation_id,
            provider,
            router_mac: mac(&first::<DrMacAddress>(network)?.address)?,
            subnets: network
                .subnets()
                .map(|subnet| {
                    let gateway = subnet.routes.first()?.next_hop.parse().ok()?;
                    Some((subnet.ip_address_prefix.parse().ok()?, gateway))
                })
                .collect::<Option<_>>()?,
            host_route: network.policies.iter().any(|policy| policy.is::<HostRoute>()),
            check_tunnel_sources: config.check_tunnel_sources,
            remotes: remotes(network),
            node_fronts: balance::of_node(&fronts, network.id, provider),
            behind_switch: behind_switch(network, state, provider, &fronts),
            fronts,
            egress_sees: config.egress_sees,
            host_ports: host_ports(pods.iter().map(|(pod, port)| (*pod, &*port.document)), provider),
            pods,
        })
    }

    /// The node's own subnet that has this address.
    pub(crate) fn subnet(&self, address: Ipv4Addr) -> Option<Ipv4Net> {
        self.subnets.iter().map(|(net, _)| *net).find(|net| net.contains(&address))
    }

    /// Whether the address is the gateway of a subnet.
    pub(crate) fn is_gateway(&self, address: Ipv4Addr) -> bool {
        self.subnets.iter().any(|(_, gateway)| *gateway == address)
    }

    /// The other node that has this address. An address in the node's own subnet needs a route with a longer prefix.
    pub(crate) fn remote(&self, address: Ipv4Addr) -> Option<&Remote> {
        let own = self.subnet(address).map(|net| net.prefix_len());
        let covers = |remote: &&Remote| {
            remote.prefix.contains(&address) && own.is_none_or(|length| remote.prefix.prefix_len() > length)
        };
        self.remotes.iter().find(covers).filter(|_| address != self.provider)
    }

    /// The pods whose packets the node translates.
    pub(crate) fn outbound(&self) -> OutboundNats {
        let translated = self.pods.iter().filter(|(_, pod)| pod.outbound != OutboundNat::default());
        translated.map(|(address, pod)| (*address, pod.outbound.clone())).collect()
    }

    /// Whether a packet of this pod leaves by the node's own stack.
    pub(crate) fn leaves(&self, pod: &PodPort, to: Ipv4Addr) -> bool {
        let is_node = self.is_gateway(to) || to == self.provider;
        let is_service = self.fronts.keys().any(|(_, address, _)| *address == to);
        let for_switch = is_service || pod.encapsulated.iter().any(|net| net.contains(&to));
        let nowhere = to.is_multicast() || to.is_broadcast() || to.is_unspecified();
        if !self.host_route || is_node || for_switch || nowhere {
            return false;
        }
        let inside = self.subnet(to).is_some() || self.remote(to).is_some();
        !inside || pod.outbound.translates(to)
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
    pub(crate) fn hides_behind(&self, address: Ipv4Addr) -> bool {
        self.fronts.values().any(|front| front.hides_behind(address))
    }

    /// Whether a packet with this source may come from another node.
    pub(crate) fn may_come_by_tunnel(&self, source: Ipv4Addr) -> bool {
        let own = source == self.provider || self.subnet(source).is_some() && self.remote(source).is_none();
        !(self.check_tunnel_sources && own)
    }

    /// The node's own interface: the network's gateway, with the MAC address that other nodes send to.
    pub(crate) fn node_leg(&self) -> Option<NodeLeg> {
        let ((subnet, gateway), others) = self.subnets.split_first().filter(|_| self.host_route)?;
        let others = others.iter().map(|(net, _)| *net);
        let known = |address: &Ipv4Addr| self.subnet(*address).is_some() || self.remote(*address).is_some();
        let own = self.behind_switch.iter().copied().filter(|address| !known(address));
        let node_ports = self.node_ports();
        let single = own.chain(node_ports.values().map(|to| to.pod)).map(Ipv4Net::from);
        let mut routes: Vec<_> =
            self.remotes.iter().map(|remote| remote.prefix).chain(others).chain(single).collect();
        routes.sort();
        routes.dedup();
        Some(NodeLeg {
            address: *gateway,
            prefix_length: subnet.prefix_len(),
            mac: self.router_mac,
            mtu: MTU,
            routes,
        })
    }
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
    let addresses = endpoints.filter_map(|it| it.ip_configurations.first()?.ip_address.parse().ok());
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

impl PodPort {
    fn of(endpoint: &Arc<Endpoint>, address: Ipv4Addr, guard: &Guard) -> Option<PodPort> {
        let default = endpoint.routes.iter().find(|route| route.destination_prefix == "0.0.0.0/0");
        let parameters =
            endpoint.policies.iter().find_map(|p| p.settings::<InterfaceParameters>().ok().flatten());
        Some(PodPort {
            endpoint: endpoint.id,
            namespace: endpoint.host_compute_namespace,
            address,
            prefix_length: endpoint.ip_configurations.first()?.prefix_length,
            gateway: default.and_then(|route| route.next_hop.parse().ok()),
            mac: mac(&endpoint.mac_address)?,
            mtu: parameters.map_or(MTU, |parameters| parameters.mtu),
            acl: Arc::clone(&guard.control),
            outbound: OutboundNat::of(endpoint),
            encapsulated: encapsulated(endpoint),
            resets: guard.resets,
            document: Arc::clone(endpoint),
        })
    }
}
