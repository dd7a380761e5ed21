//! The state of one node, and its changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tortie_api::calico::FelixConfigurationSpec;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_api::report::ObjectRef;
use tortie_api::{Key, Kind};
use tortie_policy::program::{
    EndpointProgram, HostEndpointProgram, Lookup, Member, PolicyId, PolicyRules, SetId, SetKind,
};

use crate::{HostPort, Members, Service, ServiceId, Settings};

/// The identity of a workload endpoint of this node. Clones share the names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EndpointId {
    /// The pod's namespace.
    pub namespace: Arc<str>,
    /// The pod's name.
    pub pod: Arc<str>,
    /// The interface inside the pod, such as `eth0`.
    pub interface: Arc<str>,
}

impl From<&EndpointId> for ObjectRef {
    fn from(id: &EndpointId) -> Self {
        Key::namespaced(Kind::Pod, &*id.namespace, &*id.pod).into()
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.pod, self.interface)
    }
}

/// A pod's interface on this node, with its policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// The sandbox of the runtime (`CNI_CONTAINERID`), which identifies the HNS endpoint.
    pub container_id: Arc<str>,
    /// The host end of the pod's link on Linux (`cali…`); on Windows, the name of the HNS endpoint.
    pub host_interface: Arc<str>,
    /// The pod's addresses; packets from other addresses are dropped.
    pub addresses: Vec<IpAddr>,
    /// The pod's MAC address, if known.
    pub mac: Option<MacAddress>,
    /// The ports of the node that lead to the pod.
    pub host_ports: Arc<[HostPort]>,
    /// The program for its packets. Pods with the same policies and profiles share it.
    pub program: Arc<EndpointProgram>,
}

/// Interfaces of this node with policy of their own (policy decision 16).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEndpoint {
    /// The interface's name; `*` means every interface that does not belong to a pod and has no host endpoint of its
    /// own. Absent if the addresses identify the interface.
    pub interface: Option<String>,
    /// Addresses that the interface is expected to have.
    pub addresses: Vec<IpAddr>,
    /// The programs for its packets.
    pub program: HostEndpointProgram,
}

/// A node's tunnel end in the VXLAN overlay of one address family. Both addresses are of that family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vtep {
    /// The node's name.
    pub node: String,
    /// The address of the VXLAN device (the tunnel address), inside the overlay.
    pub address: IpAddr,
    /// The MAC address of the VXLAN device; on Windows the network's DrMacAddress.
    pub mac: MacAddress,
    /// The node's own address, the destination of its VXLAN packets.
    pub parent: IpAddr,
    /// The longest packet that its pods can receive, in bytes, if that is known.
    #[serde(default)]
    pub mtu: Option<u32>,
}

impl Vtep {
    /// The key in [`NodeState::vteps`].
    #[must_use]
    pub fn key(&self) -> (String, IpVersion) {
        (self.node.clone(), self.version())
    }

    /// The family of its overlay.
    #[must_use]
    pub fn version(&self) -> IpVersion {
        IpVersion::of(&self.address)
    }
}

/// The location of a destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteTarget {
    /// Pods of this node: one of its own blocks. Packets to unused addresses are dropped, not sent elsewhere.
    Local,
    /// Pods of another node, by VXLAN to its [`Vtep`] of the destination's family.
    Vxlan {
        /// That node's name.
        node: String,
    },
    /// Pods of another node, by IPIP (RFC 2003). Both nodes run Linux.
    Ipip {
        /// That node's own address.
        router: Ipv4Addr,
    },
    /// Pods of another node in the same network of the underlay, without encapsulation.
    Direct {
        /// That node's own address.
        router: IpAddr,
    },
}

/// A destination of the overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The addresses.
    pub destination: IpNet,
    /// Their location.
    pub target: RouteTarget,
}

/// The properties of the overlay that are common to the whole cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterNetwork {
    /// The VXLAN network identifier; at least 4096 on Windows nodes.
    pub vni: u32,
    /// The UDP port of VXLAN. Windows nodes have 4789 only.
    pub port: u16,
    /// The MTU of pods and of the VXLAN device, in bytes, where no setting and no interface tells it.
    pub mtu: u32,
}

impl ClusterNetwork {
    /// The properties that the operator has set, and the defaults.
    #[must_use]
    pub fn new(felix: &FelixConfigurationSpec) -> Self {
        let usual = Self::default();
        Self { vni: felix.vxlan_vni.unwrap_or(usual.vni), port: felix.vxlan_port(), ..usual }
    }
}

impl Default for ClusterNetwork {
    /// Calico's defaults (`felix/config/config_params.go`) and an underlay of 1,500 bytes less VXLAN's 50.
    fn default() -> Self {
        Self { vni: 4096, port: FelixConfigurationSpec::VXLAN_PORT, mtu: 1450 }
    }
}

/// This node itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalNode {
    /// Its name.
    pub name: String,
    /// Its ends of the overlays: at most one of each family, and at least one.
    pub ends: BTreeMap<IpVersion, LocalEnd>,
    /// Its IPIP link, if a pool has IPIP.
    pub ipip: Option<LocalIpip>,
    /// The common properties of the overlay.
    pub network: ClusterNetwork,
}

/// This node in one address family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalEnd {
    /// Its own address on the underlay.
    pub address: IpAddr,
    /// Its tunnel end, once known.
    pub vtep: Option<Vtep>,
}

/// The IPIP link of this node. It works without an address, except for what the node itself sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalIpip {
    /// Its address, once known.
    pub address: Option<Ipv4Addr>,
}

impl LocalNode {
    /// A node with an IPv4 address.
    #[must_use]
    pub fn ipv4(name: &str, address: Ipv4Addr, vtep: Option<Vtep>) -> Self {
        let end = LocalEnd { address: address.into(), vtep };
        let ends = BTreeMap::from([(IpVersion::V4, end)]);
        Self { name: name.to_owned(), ends, ipip: None, network: ClusterNetwork::default() }
    }

    /// The address of its IPIP link.
    #[must_use]
    pub fn ipip_address(&self) -> Option<Ipv4Addr> {
        self.ipip?.address
    }

    /// Its own address of a family.
    #[must_use]
    pub fn address(&self, version: IpVersion) -> Option<IpAddr> {
        self.ends.get(&version).map(|end| end.address)
    }

    /// Its tunnel end of a family.
    #[must_use]
    pub fn vtep(&self, version: IpVersion) -> Option<&Vtep> {
        self.ends.get(&version)?.vtep.as_ref()
    }

    /// Its tunnel ends.
    pub fn vteps(&self) -> impl Iterator<Item = &Vtep> {
        self.ends.values().filter_map(|end| end.vtep.as_ref())
    }
}

/// The desired state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// This node; `None` until it is known, so that there is no overlay.
    pub node: Option<LocalNode>,
    /// The operator's settings.
    pub settings: Arc<Settings>,
    /// The sets that policies name.
    pub sets: BTreeMap<SetId, (SetKind, Members)>,
    /// The policies and profiles that endpoints name.
    pub policies: BTreeMap<PolicyId, Arc<PolicyRules>>,
    /// The pods of this node.
    pub endpoints: BTreeMap<EndpointId, Arc<Endpoint>>,
    /// The host endpoints of this node, by name.
    pub host_endpoints: BTreeMap<String, Arc<HostEndpoint>>,
    /// The other nodes' tunnel ends, by node name and family.
    pub vteps: BTreeMap<(String, IpVersion), Vtep>,
    /// The destinations of the overlay.
    pub routes: BTreeMap<IpNet, RouteTarget>,
    /// The cluster's Services, if the dataplane needs them.
    pub services: BTreeMap<ServiceId, Arc<Service>>,
}

/// One change of a [`NodeState`]. `calc` returns changes in an order in which every named object exists: sets before
/// the policies that name them, policies before endpoints; removals in the opposite order (policy decision 23).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// The node itself became known or changed.
    Node(LocalNode),
    /// The operator's settings have changed.
    Settings(Arc<Settings>),
    /// A new set with all its members. The state shares them until the set changes.
    SetCreated(SetId, SetKind, Members),
    /// Changed members of an existing set.
    SetChanged {
        /// The set.
        id: SetId,
        /// Added members.
        added: Vec<Member>,
        /// Removed members.
        removed: Vec<Member>,
    },
    /// A set that nothing names any more.
    SetRemoved(SetId),
    /// A policy that is new or has changed.
    Policy(PolicyId, Arc<PolicyRules>),
    /// A policy that no endpoint names any more.
    PolicyRemoved(PolicyId),
    /// A pod that is new or has changed.
    Endpoint(EndpointId, Arc<Endpoint>),
    /// A deleted pod.
    EndpointRemoved(EndpointId),
    /// A host endpoint that is new or has changed.
    HostEndpoint(String, Arc<HostEndpoint>),
    /// A deleted host endpoint, by name.
    HostEndpointRemoved(String),
    /// Another node's tunnel end, new or changed.
    Vtep(Vtep),
    /// A node without a tunnel end in a family, by name.
    VtepRemoved(String, IpVersion),
    /// A destination that is new or has changed.
    Route(Route),
    /// A removed destination.
    RouteRemoved(IpNet),
    /// A Service that is new or has changed, or whose backends have.
    Service(ServiceId, Arc<Service>),
    /// A Service that was deleted, or has no address any more.
    ServiceRemoved(ServiceId),
}

impl NodeState {
    /// The state from deltas that only add objects. A map that is built in one step needs half the memory of one that
    /// grows.
    #[must_use]
    pub fn from_nothing(deltas: &[Delta]) -> Self {
        let sets = deltas.iter().filter_map(|delta| match delta {
            Delta::SetCreated(id, kind, members) => Some((id.clone(), (*kind, members.clone()))),
            _ => None,
        });
        let policies = deltas.iter().filter_map(|delta| match delta {
            Delta::Policy(id, rules) => Some((id.clone(), rules.clone())),
            _ => None,
        });
        let endpoints = deltas.iter().filter_map(|delta| match delta {
            Delta::Endpoint(id, endpoint) => Some((id.clone(), endpoint.clone())),
            _ => None,
        });
        let mut state = Self {
            sets: sets.collect(),
            policies: policies.collect(),
            endpoints: endpoints.collect(),
            ..Self::default()
        };
        let bulk =
            |delta: &&Delta| matches!(delta, Delta::SetCreated(..) | Delta::Policy(..) | Delta::Endpoint(..));
        deltas.iter().filter(|delta| !bulk(delta)).for_each(|delta| state.apply(delta));
        state
    }

    /// Another node's tunnel end in the family of an address.
    #[must_use]
    pub fn vtep(&self, node: &str, of: &IpAddr) -> Option<&Vtep> {
        self.vteps.get(&(node.to_owned(), IpVersion::of(of)))
    }

    /// The own addresses of the nodes that may send IPIP packets: those with a tunnel end, whether a route leads to it by IPIP or not,
    /// because the nodes may differ for a moment about the mode; and those to which a route leads by IPIP.
    pub fn ipip_peers(&self) -> impl Iterator<Item = Ipv4Addr> {
        let of_routes = self.routes.values().filter_map(|target| match target {
            RouteTarget::Ipip { router } => Some(*router),
            RouteTarget::Local | RouteTarget::Vxlan { .. } | RouteTarget::Direct { .. } => None,
        });
        let of_vteps = self.vteps.values().filter_map(|vtep| match vtep.parent {
            IpAddr::V4(parent) => Some(parent),
            IpAddr::V6(_) => None,
        });
        of_vteps.chain(of_routes)
    }

    /// Applies one change.
    pub fn apply(&mut self, delta: &Delta) {
        match delta.clone() {
            Delta::Node(node) => self.node = Some(node),
            Delta::Settings(settings) => self.settings = settings,
            Delta::SetCreated(id, kind, members) => drop(self.sets.insert(id, (kind, members))),
            Delta::SetChanged { id, added, removed } => {
                if let Some((_, members)) = self.sets.get_mut(&id) {
                    let members = members.make_mut();
                    for member in &removed {
                        members.remove(member);
                    }
                    members.extend(added);
                }
            }
            Delta::SetRemoved(id) => drop(self.sets.remove(&id)),
            Delta::Policy(id, rules) => drop(self.policies.insert(id, rules)),
            Delta::PolicyRemoved(id) => drop(self.policies.remove(&id)),
            Delta::Endpoint(id, endpoint) => drop(self.endpoints.insert(id, endpoint)),
            Delta::EndpointRemoved(id) => drop(self.endpoints.remove(&id)),
            Delta::HostEndpoint(name, endpoint) => drop(self.host_endpoints.insert(name, endpoint)),
            Delta::HostEndpointRemoved(name) => drop(self.host_endpoints.remove(&name)),
            Delta::Vtep(vtep) => drop(self.vteps.insert(vtep.key(), vtep)),
            Delta::VtepRemoved(node, version) => drop(self.vteps.remove(&(node, version))),
            Delta::Route(Route { destination, target }) => drop(self.routes.insert(destination, target)),
            Delta::RouteRemoved(destination) => drop(self.routes.remove(&destination)),
            Delta::Service(id, service) => drop(self.services.insert(id, service)),
            Delta::ServiceRemoved(id) => drop(self.services.remove(&id)),
        }
    }
}

impl Lookup for NodeState {
    fn policy(&self, id: &PolicyId) -> Option<&PolicyRules> {
        self.policies.get(id).map(AsRef::as_ref)
    }

    fn set(&self, id: &SetId) -> Option<&BTreeSet<Member>> {
        self.sets.get(id).map(|(_, members)| &**members)
    }
}
