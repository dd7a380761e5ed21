//! The objects of the cluster that packets and rules refer to: pods, network sets, nodes, namespaces, service
//! accounts, backends of Services, pools.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{
    BgpConfigurationSpec, EncapsulationMode, EndpointToHostAction, FelixConfigurationSpec, HostEndpoint,
    NatOutgoingExclusions, NetworkSet, WorkloadEndpoint,
};
use tortie_api::kubernetes::{EndpointSlice, Node, Pod};
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{Key, Kind, Network, Resource};
use tortie_selector::NAMESPACE_LABEL;

use super::snapshot::Snapshot;
use super::subnet::{Subnet, subnets};

pub(super) type Labels = BTreeMap<String, String>;

/// The kind of an identity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum What {
    Pod,
    #[default]
    NetworkSet,
    HostEndpoint,
}

/// A pod, network set or host endpoint as selectors see it.
#[derive(Debug, Clone, Default)]
pub(super) struct Identity {
    pub(super) what: What,
    /// Empty for a global network set.
    pub(super) namespace: String,
    pub(super) name: String,
    /// Its own labels, which Kubernetes' selectors see.
    pub(super) own_labels: Labels,
    /// The labels of its namespace.
    pub(super) namespace_labels: Labels,
    /// Its service account; may be empty.
    pub(super) account: String,
    /// The labels of its service account.
    pub(super) account_labels: Labels,
    /// The labels that Calico's selectors see: see [`Identity::see`].
    pub(super) labels: Labels,
    pub(super) ports: Vec<NamedPort>,
}

/// A pod with a network of its own.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub(super) identity: Identity,
    pub(super) node: String,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) profiles: Vec<String>,
}

/// A network set.
#[derive(Debug, Clone)]
pub(super) struct Networks {
    pub(super) identity: Identity,
    pub(super) nets: Vec<IpNet>,
}

/// An interface of a node, or all of a node's interfaces that have no host endpoint of their own.
#[derive(Debug, Clone)]
pub(super) struct HostInterface {
    pub(super) identity: Identity,
    pub(super) node: String,
    pub(super) all_interfaces: bool,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) profiles: Vec<String>,
}

/// The backends of a Service.
#[derive(Debug, Clone, Default)]
pub(super) struct Backends {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ports: Vec<(IpAddr, Protocol, u16)>,
}

/// A named port.
#[derive(Debug, Clone)]
pub(super) struct NamedPort {
    pub(super) name: String,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

/// The addresses of a node as a sender of packets.
#[derive(Debug, Clone)]
pub(super) struct NodeAddresses {
    /// Its own addresses, of each family.
    pub(super) own: Vec<IpAddr>,
    /// The addresses of its VXLAN tunnels: at most one of a family, and only with an own address of that family.
    pub(super) vxlan: Vec<IpAddr>,
    /// The address of its IPIP tunnel.
    pub(super) ipip: Option<IpAddr>,
    pub(super) subnet: Subnet,
    pub(super) is_windows: bool,
}

impl NodeAddresses {
    /// The addresses of all its tunnels.
    pub(super) fn tunnels(&self) -> impl Iterator<Item = IpAddr> {
        self.vxlan.iter().copied().chain(self.ipip)
    }

    fn new(node: &Node) -> Self {
        let of_families = |of: &dyn Fn(IpVersion) -> Option<IpAddr>| -> Vec<IpAddr> {
            IpVersion::ALL.into_iter().filter_map(of).collect()
        };
        let tunnel = |version| node.own_address(version).and(node.vxlan_address(version));
        Self {
            own: of_families(&|version| node.own_address(version)),
            vxlan: of_families(&tunnel),
            ipip: node.ipip_address().filter(|_| node.address().is_some()).map(IpAddr::V4),
            subnet: Subnet::default(),
            is_windows: node.metadata.labels.get(Node::OS).is_some_and(|os| os == "windows"),
        }
    }
}

/// A node as peers `nodes` see it.
#[derive(Debug, Clone)]
pub(super) struct LabelledNode {
    pub(super) name: String,
    pub(super) labels: Labels,
    /// The addresses by which rules find it.
    pub(super) addresses: Vec<IpAddr>,
}

struct Pool {
    cidr: IpNet,
    encapsulation: EncapsulationMode,
    /// Whether that is IPIP, and not VXLAN.
    has_ipip: bool,
    nat_outgoing: bool,
}

pub(super) struct World {
    pub(super) workloads: Vec<Workload>,
    /// Indices of the workloads by address, and by namespace and name, because queries cover whole clusters.
    addressed: HashMap<IpAddr, Vec<usize>>,
    named: HashMap<(String, String), usize>,
    pub(super) network_sets: Vec<Networks>,
    pub(super) hosts: Vec<HostInterface>,
    /// Indices of the host endpoints by node, and by the addresses by which rules find them.
    hosts_of: HashMap<String, Vec<usize>>,
    hosts_at: HashMap<IpAddr, Vec<usize>>,
    /// The settings of each node that has its own.
    felix: BTreeMap<String, FelixConfigurationSpec>,
    /// The settings of all other nodes.
    felix_of_all: FelixConfigurationSpec,
    /// The UDP ports on which some node listens for VXLAN.
    vxlan_ports: BTreeSet<u16>,
    /// The TCP ports on which the BGP speaker of some node listens.
    bgp_ports: BTreeSet<u16>,
    /// The backends of each Service, by namespace and name.
    pub(super) backends: BTreeMap<(String, String), Backends>,
    /// The nodes of pods that use their node's network, by namespace and name.
    pub(super) on_the_host: BTreeMap<(String, String), String>,
    /// The phases of pods that have ended.
    pub(super) ended: BTreeMap<(String, String), String>,
    pub(super) nodes: BTreeMap<String, NodeAddresses>,
    pub(super) labelled_nodes: Vec<LabelledNode>,
    /// Indices of the nodes by the addresses by which rules find them.
    nodes_at: HashMap<IpAddr, Vec<usize>>,
    namespaces: BTreeMap<String, Labels>,
    pools: Vec<Pool>,
}

impl World {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let mut world = Self {
            workloads: Vec::new(),
            addressed: HashMap::new(),
            named: HashMap::new(),
            network_sets: Vec::new(),
            hosts: Vec::new(),
            hosts_of: HashMap::new(),
            hosts_at: HashMap::new(),
            felix: BTreeMap::new(),
            felix_of_all: felix(snapshot, "default").unwrap_or_default(),
            vxlan_ports: vxlan_ports(snapshot),
            bgp_ports: bgp_ports(snapshot),
            backends: BTreeMap::new(),
            on_the_host: BTreeMap::new(),
            ended: BTreeMap::new(),
            nodes: BTreeMap::new(),
            labelled_nodes: Vec::new(),
            nodes_at: HashMap::new(),
            namespaces: BTreeMap::new(),
            pools: Vec::new(),
        };
        for (key, resource) in snapshot.resources() {
            match resource {
                Resource::Namespace(namespace) => {
                    let mut labels = namespace.metadata.labels.clone();
                    // The label that the API server gives every namespace, and that of Calico.
                    labels.entry("kubernetes.io/metadata.name".into()).or_insert_with(|| key.name.clone());
                    labels.insert("projectcalico.org/name".into(), key.name.clone());
                    world.namespaces.insert(key.name.clone(), labels);
                }
                Resource::Node(node) => {
                    world.nodes.insert(key.name.clone(), NodeAddresses::new(node));
                    world.add_labelled(&key.name, node);
                }
                Resource::IpPool(pool) => world.pools.push(Pool {
                    cidr: pool.spec.cidr,
                    encapsulation: pool.encapsulation(),
                    has_ipip: pool.has_ipip(),
                    nat_outgoing: pool.spec.nat_outgoing,
                }),
                _ => {}
            }
        }
        let nodes = snapshot.resources().filter_map(|(key, resource)| match resource {
            Resource::Node(node) => Some((key.name.as_str(), node)),
            _ => None,
        });
        for (name, subnet) in subnets(nodes) {
            world.nodes.entry(name).and_modify(|node| node.subnet = subnet);
        }
        for (key, resource) in snapshot.resources() {
            match resource {
                Resource::NetworkSet(set) | Resource::GlobalNetworkSet(set) => {
                    world.network_sets.push(world.of_network_set(key, set));
                }
                Resource::Node(_) => {
                    if let Some(own) = felix(snapshot, &format!("node.{}", key.name)) {
                        let settings = own.or(&world.felix_of_all);
                        world.felix.insert(key.name.clone(), settings);
                    }
                }
                Resource::HostEndpoint(host) => world.add_host(of_host(snapshot, key, host)),
                Resource::EndpointSlice(slice) => world.add_backends(key, slice),
                _ => {}
            }
        }
        // The CNI plugin's record of a pod has precedence over the pod object.
        let reported = reported_addresses(snapshot);
        for (key, resource) in snapshot.resources() {
            if let Resource::WorkloadEndpoint(endpoint) = resource {
                let mut workload = world.of_endpoint(snapshot, key, endpoint);
                if endpoint.is_unreported() {
                    // The address of a Node or of a reported pod is not its own, whatever an annotation says (policy decision 50).
                    let is_taken =
                        |address: &IpAddr| reported.contains(address) || world.nodes_at.contains_key(address);
                    workload.addresses.retain(|address| !is_taken(address));
                    if workload.addresses.is_empty() {
                        continue;
                    }
                }
                world.workloads.push(workload);
            }
        }
        let noted = |pod: &Workload| (pod.identity.namespace.clone(), pod.identity.name.clone());
        let noted: BTreeSet<(String, String)> = world.workloads.iter().map(noted).collect();
        for (key, resource) in snapshot.resources() {
            if let Resource::Pod(pod) = resource
                && !noted.contains(&(key.namespace.clone(), key.name.clone()))
            {
                world.add_pod(snapshot, key, pod);
            }
        }
        for (number, pod) in world.workloads.iter().enumerate() {
            let name = (pod.identity.namespace.clone(), pod.identity.name.clone());
            world.named.entry(name).or_insert(number);
            for address in &pod.addresses {
                let numbers = world.addressed.entry(*address).or_default();
                if numbers.last() != Some(&number) {
                    numbers.push(number);
                }
            }
        }
        world
    }

    pub(super) fn namespace_exists(&self, name: &str) -> bool {
        self.namespaces.contains_key(name)
    }

    /// The pods that have the address.
    pub(super) fn at(&self, address: IpAddr) -> impl Iterator<Item = &Workload> {
        let numbers = self.addressed.get(&address).into_iter().flatten();
        numbers.filter_map(|number| self.workloads.get(*number))
    }

    /// The pod of this name.
    pub(super) fn pod(&self, namespace: &str, name: &str) -> Option<&Workload> {
        let number = self.named.get(&(namespace.to_owned(), name.to_owned()))?;
        self.workloads.get(*number)
    }

    /// The UDP ports on which some node listens for VXLAN.
    pub(super) fn vxlan_ports(&self) -> &BTreeSet<u16> {
        &self.vxlan_ports
    }

    /// Whether a TCP packet to this address and port reaches the BGP speaker of a node.
    pub(super) fn is_bgp_of_a_node(&self, address: IpAddr, port: u16) -> bool {
        self.bgp_ports.contains(&port) && self.nodes_at.contains_key(&address)
    }

    /// The settings of a node.
    pub(super) fn felix(&self, node: &str) -> &FelixConfigurationSpec {
        self.felix.get(node).unwrap_or(&self.felix_of_all)
    }

    /// The host endpoint of the interface through which the node exchanges packets with others: for overlaid packets
    /// that of the VXLAN device, otherwise that of the interface with the node's address, as far as known.
    pub(super) fn interface(&self, node: &str, overlaid: bool) -> Option<&HostInterface> {
        let own = self.nodes.get(node).map_or(&[][..], |node| &node.own);
        let of_node = || {
            let numbers = self.hosts_of.get(node).into_iter().flatten();
            numbers.filter_map(|number| self.hosts.get(*number))
        };
        let is_it = |host: &&HostInterface| {
            host.addresses.is_empty() || own.is_empty() || own.iter().any(|own| host.addresses.contains(own))
        };
        let named = of_node().filter(|host| !host.all_interfaces && !overlaid).find(is_it);
        named.or_else(|| of_node().find(|host| host.all_interfaces))
    }

    /// The host endpoint of the interface that has this address of the node; that of [`Self::interface`] if none is known to have it.
    pub(super) fn interface_with(&self, node: &str, address: IpAddr) -> Option<&HostInterface> {
        let named = self.hosts_at(address).find(|host| host.node == node && !host.all_interfaces);
        named.or_else(|| self.interface(node, false))
    }

    /// The host endpoints of single interfaces of the node.
    pub(super) fn single_interfaces(&self, node: &str) -> impl Iterator<Item = &HostInterface> {
        let numbers = self.hosts_of.get(node).into_iter().flatten();
        numbers.filter_map(|number| self.hosts.get(*number)).filter(|host| !host.all_interfaces)
    }

    /// The node whose host endpoints have this address, if they are of one node only.
    /// Further addresses in a Node's status belong to hosts outside of the cluster here, as in the tables of `tortie matrix`.
    pub(super) fn node_with(&self, address: IpAddr) -> Option<&str> {
        let mut nodes = self.hosts_at(address).map(|host| host.node.as_str());
        let first = nodes.next()?;
        nodes.all(|other| other == first).then_some(first)
    }

    /// The host endpoint of all of the node's interfaces.
    pub(super) fn all_interfaces(&self, node: &str) -> Option<&HostInterface> {
        let numbers = self.hosts_of.get(node).into_iter().flatten();
        numbers.filter_map(|number| self.hosts.get(*number)).find(|host| host.all_interfaces)
    }

    /// The host endpoints that rules find by the address.
    pub(super) fn hosts_at(&self, address: IpAddr) -> impl Iterator<Item = &HostInterface> {
        let numbers = self.hosts_at.get(&address).into_iter().flatten();
        numbers.filter_map(|number| self.hosts.get(*number))
    }

    /// The nodes that rules find by the address.
    pub(super) fn nodes_at(&self, address: IpAddr) -> impl Iterator<Item = &LabelledNode> {
        let numbers = self.nodes_at.get(&address).into_iter().flatten();
        numbers.filter_map(|number| self.labelled_nodes.get(*number))
    }

    fn add_labelled(&mut self, name: &str, node: &Node) {
        let number = self.labelled_nodes.len();
        let addresses = node.addresses();
        for address in &addresses {
            self.nodes_at.entry(*address).or_default().push(number);
        }
        let labels = node.metadata.labels.clone();
        self.labelled_nodes.push(LabelledNode { name: name.to_owned(), labels, addresses });
    }

    fn add_host(&mut self, host: HostInterface) {
        let number = self.hosts.len();
        self.hosts_of.entry(host.node.clone()).or_default().push(number);
        for address in &host.addresses {
            let numbers = self.hosts_at.entry(*address).or_default();
            if numbers.last() != Some(&number) {
                numbers.push(number);
            }
        }
        self.hosts.push(host);
    }

    /// Whether, and when, packets to the address are encapsulated between nodes.
    pub(super) fn encapsulation(&self, address: IpAddr) -> EncapsulationMode {
        let overlays = self.pools.iter().filter(|pool| pool.encapsulation != EncapsulationMode::Never);
        let mut of_address = overlays.filter(|pool| pool.cidr.contains(&address));
        of_address.next().map_or(EncapsulationMode::Never, |pool| pool.encapsulation)
    }

    /// Whether that is IPIP, and not VXLAN.
    pub(super) fn has_ipip(&self, address: IpAddr) -> bool {
        let overlays = self.pools.iter().filter(|pool| pool.encapsulation != EncapsulationMode::Never);
        overlays.into_iter().find(|pool| pool.cidr.contains(&address)).is_some_and(|pool| pool.has_ipip)
    }

    pub(super) fn has_pools_by_subnet(&self) -> bool {
        self.pools.iter().any(|pool| pool.encapsulation == EncapsulationMode::CrossSubnet)
    }

    /// Whether packets from one node to an address at another are encapsulated.
    pub(super) fn encapsulates(&self, from: &str, to: &str, address: IpAddr) -> bool {
        let family = if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
        let subnet = |node: &str| self.nodes.get(node).map(|node| &node.subnet);
        match self.encapsulation(address) {
            EncapsulationMode::Never => false,
            EncapsulationMode::Always => true,
            EncapsulationMode::CrossSubnet => {
                !subnet(from).zip(subnet(to)).is_some_and(|(from, to)| from.is_near(to, family))
            }
        }
    }

    /// The address of its node that replaces this source address outside of the pools, if natOutgoing applies.
    pub(super) fn translated(&self, node: &str, address: IpAddr) -> Option<IpAddr> {
        let leaves = self.pools.iter().any(|pool| pool.nat_outgoing && pool.cidr.contains(&address));
        let own = self.nodes.get(node).filter(|_| leaves)?.own.iter().copied();
        own.into_iter().find(|own| own.is_ipv4() == address.is_ipv4())
    }

    /// Returns whether packets to this address keep their source where natOutgoing applies: to pools, and to the addresses of nodes if the
    /// FelixConfiguration of the sender's node says so.
    pub(super) fn is_excluded(&self, node: &str, address: IpAddr) -> bool {
        let with_nodes =
            self.felix(node).nat_outgoing_exclusions == Some(NatOutgoingExclusions::PoolsAndNodes);
        let is_of_node = || self.nodes.values().any(|node| node.own.contains(&address));
        self.is_pooled(address) || (with_nodes && is_of_node())
    }

    /// Whether the address is in any pool.
    pub(super) fn is_pooled(&self, address: IpAddr) -> bool {
        self.pools.iter().any(|pool| pool.cidr.contains(&address))
    }

    fn of_network_set(&self, key: &Key, set: &NetworkSet) -> Networks {
        let mut identity = Identity {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            own_labels: set.metadata.labels.clone(),
            namespace_labels: self.namespaces.get(&key.namespace).cloned().unwrap_or_default(),
            ..Identity::default()
        };
        identity.see(&[]);
        Networks { identity, nets: set.spec.nets.iter().map(|Network(net)| *net).collect() }
    }

    fn add_backends(&mut self, key: &Key, slice: &EndpointSlice) {
        let Some(service) = slice.service() else { return };
        let service = (key.namespace.clone(), service.to_owned());
        let backends = self.backends.entry(service).or_default();
        backends.addresses.extend(slice.addresses());
        backends.ports.extend(slice.backends());
    }

    fn of_endpoint(&self, snapshot: &Snapshot, key: &Key, endpoint: &WorkloadEndpoint) -> Workload {
        let spec = &endpoint.spec;
        let named = spec.ports.iter().map(|port| &port.port).filter(|port| !port.name.is_empty());
        let ports = named.filter_map(|port| {
            let protocol = Protocol::from_name(&port.protocol)?;
            Some(NamedPort { name: port.name.clone(), protocol, port: port.port })
        });
        let identity = Identity {
            what: What::Pod,
            namespace: key.namespace.clone(),
            name: spec.pod.clone(),
            own_labels: endpoint.metadata.labels.clone(),
            account: spec.service_account_name.clone(),
            ports: ports.collect(),
            ..Identity::default()
        };
        Workload {
            identity: self.labelled(snapshot, identity, &spec.profiles),
            node: spec.node.clone(),
            addresses: spec.ip_networks.iter().map(IpNet::addr).collect(),
            profiles: spec.profiles.clone(),
        }
    }

    fn add_pod(&mut self, snapshot: &Snapshot, key: &Key, pod: &Pod) {
        if let Some(phase) = pod.status.phase.as_ref().filter(|_| pod.has_ended()) {
            self.ended.insert((key.namespace.clone(), key.name.clone()), phase.clone());
            return;
        }
        let node = pod.spec.node_name.clone().unwrap_or_default();
        if pod.spec.host_network {
            self.on_the_host.insert((key.namespace.clone(), key.name.clone()), node);
            return;
        }
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        let declared = containers.flat_map(|container| &container.ports);
        let ports = declared.filter_map(|port| {
            let protocol = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP"))?;
            Some(NamedPort { name: port.name.clone()?, protocol, port: port.container_port })
        });
        let identity = Identity {
            what: What::Pod,
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            own_labels: pod.metadata.labels.clone(),
            account: pod.service_account().to_owned(),
            ports: ports.collect(),
            ..Identity::default()
        };
        let profiles = WorkloadEndpoint::profiles_for(&key.namespace, pod.service_account());
        self.workloads.push(Workload {
            identity: self.labelled(snapshot, identity, &profiles),
            node,
            addresses: pod.status.addresses(),
            profiles,
        });
    }

    /// Adds the labels of its namespace, service account and profiles, as far as those exist.
    fn labelled(&self, snapshot: &Snapshot, mut identity: Identity, profiles: &[String]) -> Identity {
        identity.namespace_labels = self.namespaces.get(&identity.namespace).cloned().unwrap_or_default();
        let account = Key::namespaced(Kind::ServiceAccount, &identity.namespace, &identity.account);
        if let Some(Ok(Resource::ServiceAccount(account))) = snapshot.get(&account).map(|s| &s.resource) {
            identity.account_labels = account.metadata.labels.clone();
            identity.account_labels.insert("projectcalico.org/name".into(), identity.account.clone());
        }
        identity.see(&given_by(snapshot, profiles));
        identity
    }
}

/// The labels that profiles give, in their order.
fn given_by<'a>(snapshot: &'a Snapshot, profiles: &[String]) -> Vec<&'a Labels> {
    let profile = |name: &String| match snapshot.get(&Key::global(Kind::Profile, name))?.resource.as_ref() {
        Ok(Resource::Profile(profile)) => Some(&profile.spec.labels_to_apply),
        _ => None,
    };
    profiles.iter().filter_map(profile).collect()
}

/// The addresses of pods whose kubelet has reported them, if there are others.
fn reported_addresses(snapshot: &Snapshot) -> BTreeSet<IpAddr> {
    let endpoints = || {
        snapshot.resources().filter_map(|(_, resource)| match resource {
            Resource::WorkloadEndpoint(endpoint) => Some(endpoint),
            _ => None,
        })
    };
    if !endpoints().any(WorkloadEndpoint::is_unreported) {
        return BTreeSet::new();
    }
    let reported = endpoints().filter(|endpoint| !endpoint.is_unreported());
    reported.flat_map(|endpoint| endpoint.spec.ip_networks.iter().map(IpNet::addr)).collect()
}

fn of_host(snapshot: &Snapshot, key: &Key, host: &HostEndpoint) -> HostInterface {
    let named = host.spec.ports.iter().filter(|port| !port.name.is_empty());
    let ports = named.filter_map(|port| {
        let protocol = Protocol::from_name(&port.protocol)?;
        Some(NamedPort { name: port.name.clone(), protocol, port: port.port })
    });
    let mut identity = Identity {
        what: What::HostEndpoint,
        name: key.name.clone(),
        own_labels: host.metadata.labels.clone(),
        ports: ports.collect(),
        ..Identity::default()
    };
    identity.see(&given_by(snapshot, &host.spec.profiles));
    HostInterface {
        identity,
        node: host.spec.node.clone(),
        all_interfaces: host.is_for_all_interfaces(),
        addresses: host.spec.expected_ips.clone(),
        profiles: host.spec.profiles.clone(),
    }
}

/// The UDP ports on which some node, known or not, listens for VXLAN.
fn vxlan_ports(snapshot: &Snapshot) -> BTreeSet<u16> {
    let felix = snapshot.resources().filter_map(|(key, resource)| match resource {
        Resource::FelixConfiguration(felix) => Some((key.name.as_str(), &felix.spec)),
        _ => None,
    });
    FelixConfigurationSpec::vxlan_ports(felix)
}

/// The TCP ports on which the BGP speaker of some node, known or not, listens.
fn bgp_ports(snapshot: &Snapshot) -> BTreeSet<u16> {
    let bgp = snapshot.resources().filter_map(|(key, resource)| match resource {
        Resource::BgpConfiguration(bgp) => Some((key.name.as_str(), &bgp.spec)),
        _ => None,
    });
    BgpConfigurationSpec::listen_ports(bgp)
}

/// The settings object of this name. If it is unreadable, the most restrictive settings.
fn felix(snapshot: &Snapshot, name: &str) -> Option<FelixConfigurationSpec> {
    match &snapshot.get(&Key::global(Kind::FelixConfiguration, name))?.resource {
        Ok(Resource::FelixConfiguration(felix)) => Some(felix.spec.clone()),
        _ => Some(FelixConfigurationSpec {
            default_endpoint_to_host_action: Some(EndpointToHostAction::Drop),
            ..FelixConfigurationSpec::default()
        }),
    }
}

impl Identity {
    pub(super) fn is_pod(&self) -> bool {
        self.what == What::Pod
    }

    /// Computes the labels that selectors see. Its own labels have precedence over those of its profiles, and earlier
    /// profiles over later ones. Labels that would claim another namespace or service account are left out. The
    /// labels of its namespace are added as `pcns.…`, those of its service account as `pcsa.…`, and Calico's own
    /// labels (`libcalico-go/lib/backend/syncersv1/updateprocessors`).
    fn see(&mut self, given: &[&Labels]) {
        let mut seen = Labels::new();
        for labels in std::iter::once(&self.own_labels).chain(given.iter().copied()) {
            for (name, value) in labels {
                let claims = name.starts_with("pcns.")
                    || name.starts_with("pcsa.")
                    || ["namespace", "serviceaccount", "orchestrator"]
                        .iter()
                        .any(|claimed| *name == format!("projectcalico.org/{claimed}"));
                if !claims && !seen.contains_key(name) {
                    seen.insert(name.clone(), value.clone());
                }
            }
        }
        for (name, value) in &self.namespace_labels {
            seen.insert(format!("pcns.{name}"), value.clone());
        }
        for (name, value) in &self.account_labels {
            seen.insert(format!("pcsa.{name}"), value.clone());
        }
        if !self.namespace.is_empty() {
            seen.insert(NAMESPACE_LABEL.into(), self.namespace.clone());
        }
        if self.is_pod() {
            seen.insert("projectcalico.org/orchestrator".into(), "k8s".into());
        }
        if !self.account.is_empty() {
            seen.insert("projectcalico.org/serviceaccount".into(), self.account.clone());
        }
        self.labels = seen;
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.what, self.namespace.as_str()) {
            (What::Pod, namespace) => write!(f, "{namespace}/{}", self.name),
            (What::HostEndpoint, _) => write!(f, "host endpoint {}", self.name),
            (What::NetworkSet, "") => write!(f, "network set {}", self.name),
            (What::NetworkSet, namespace) => write!(f, "network set {namespace}/{}", self.name),
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.identity.fmt(f)
    }
}
