//! The addresses of single Services that a node advertises, as Calico's confd decides it
//! (`confd/pkg/backends/calico/routes.go`, and the networks in `client.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{BgpConfigurationSpec, ServiceBlock, Switch};
use tortie_api::kubernetes::{EndpointSlice, Service};

use crate::codec::Family;

/// What BGPConfiguration `default` says about Services.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceSettings {
    cluster: Vec<IpNet>,
    external: Vec<IpNet>,
    load_balancers: Vec<IpNet>,
    /// Whether load balancers' addresses are advertised one by one (`serviceLoadBalancerAggregation: Disabled`).
    one_by_one: bool,
}

impl ServiceSettings {
    /// Reads the settings.
    #[must_use]
    pub fn new(all: &BgpConfigurationSpec) -> Self {
        Self {
            cluster: networks(&all.service_cluster_ips),
            external: networks(&all.service_external_ips),
            load_balancers: networks(&all.service_load_balancer_ips),
            one_by_one: all.service_load_balancer_aggregation == Some(Switch::Disabled),
        }
    }

    /// Whether the node must know Services: it advertises addresses of some.
    #[must_use]
    pub fn need_services(&self) -> bool {
        self.all().next().is_some()
    }

    /// The networks that every node advertises. An external address or one of a load balancer that stands alone needs a
    /// Service.
    #[must_use]
    pub fn advertised_networks(&self) -> BTreeSet<IpNet> {
        let load_balancers = self.load_balancers.iter().filter(|_| !self.one_by_one);
        let shared = self.external.iter().chain(load_balancers).filter(|network| !is_single(network));
        self.cluster.iter().chain(shared).copied().collect()
    }

    /// All networks of Services.
    pub fn all(&self) -> impl Iterator<Item = &IpNet> {
        self.cluster.iter().chain(&self.external).chain(&self.load_balancers)
    }
}

fn networks(blocks: &[ServiceBlock]) -> Vec<IpNet> {
    blocks.iter().filter_map(|block| block.cidr.as_deref()?.parse().ok()).collect()
}

fn is_single(network: &IpNet) -> bool {
    network.prefix_len() == network.max_prefix_len()
}

fn is_in(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

fn is_alone_in(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| is_single(network) && network.addr() == address)
}

/// A Service or an EndpointSlice: namespace and name.
pub type Name = (String, String);

/// What counts of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ServiceFacts {
    is_local: bool,
    families: Vec<Family>,
    cluster: Vec<IpAddr>,
    external: Vec<IpAddr>,
    /// The addresses of its load balancer that nodes accept.
    ingress: Vec<IpAddr>,
    is_load_balancer: bool,
}

impl ServiceFacts {
    /// `None` if nodes have nothing to do with it.
    fn new(service: &Service) -> Option<Self> {
        let spec = &service.spec;
        let cluster = service.cluster_ips();
        if cluster.is_empty() {
            return None;
        }
        // A datastore without defaults has no families.
        let families = match spec.ip_families.as_slice() {
            [] => cluster.iter().map(|address| Family::of_address(*address)).collect(),
            given => given.iter().filter_map(|name| family(name)).collect(),
        };
        Some(Self {
            is_local: spec.external_traffic_policy.as_deref() == Some("Local"),
            families,
            external: spec.external_ips.iter().filter_map(|address| address.parse().ok()).collect(),
            ingress: service.ingress_ips().collect(),
            is_load_balancer: spec.service_type.as_deref() == Some("LoadBalancer"),
            cluster,
        })
    }

    /// The addresses that the node advertises, given the Service's slices.
    fn advertised(&self, slices: &[&SliceFacts], settings: &ServiceSettings) -> BTreeSet<IpNet> {
        if !self.is_advertised(slices, settings) {
            return BTreeSet::new();
        }
        let cluster = self.cluster.iter().filter(|_| !settings.cluster.is_empty());
        let external = self.external.iter().filter(|address| is_in(&settings.external, **address));
        let ingress = self.ingress.iter().filter(|address| is_in(&settings.load_balancers, **address));
        cluster.chain(external).chain(ingress).map(|address| IpNet::from(*address)).collect()
    }

    fn is_advertised(&self, slices: &[&SliceFacts], settings: &ServiceSettings) -> bool {
        if !self.is_local && !slices.is_empty() && self.has_lone_address(settings) {
            return true;
        }
        let mut slices =
            slices.iter().filter(|slice| slice.family.is_some_and(|it| self.families.contains(&it)));
        match self.is_local {
            true => slices.any(|slice| slice.is_ready_here),
            false => settings.one_by_one && slices.any(|slice| slice.is_ready),
        }
    }

    /// Whether BGPConfiguration names one of its addresses alone.
    fn has_lone_address(&self, settings: &ServiceSettings) -> bool {
        let of_balancer = self.ingress.iter().any(|address| is_alone_in(&settings.load_balancers, *address));
        self.is_load_balancer && of_balancer
            || self.external.iter().any(|address| is_alone_in(&settings.external, *address))
    }
}

/// What counts of an EndpointSlice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SliceFacts {
    /// `None` if its addresses are names.
    family: Option<Family>,
    is_ready: bool,
    /// Whether a backend on this node is ready.
    is_ready_here: bool,
}

impl SliceFacts {
    fn new(slice: &EndpointSlice, node: &str) -> Self {
        let mut ready = slice.endpoints.iter().filter(|endpoint| endpoint.is_ready()).peekable();
        Self {
            family: slice.address_type.as_deref().and_then(family),
            is_ready: ready.peek().is_some(),
            is_ready_here: ready.any(|endpoint| endpoint.node_name.as_deref() == Some(node)),
        }
    }
}

fn family(name: &str) -> Option<Family> {
    match name {
        "IPv4" => Some(Family::Ipv4),
        "IPv6" => Some(Family::Ipv6),
        _ => None,
    }
}

/// The addresses of Services that a node advertises. A change of an object costs as much as its Service is large.
#[derive(Debug, Default)]
pub struct ServiceRoutes {
    node: String,
    settings: ServiceSettings,
    services: BTreeMap<Name, ServiceFacts>,
    slices: BTreeMap<Name, (Name, SliceFacts)>,
    /// The slices of each Service.
    slices_of: BTreeMap<Name, BTreeSet<Name>>,
    /// What is advertised for each Service.
    advertised: BTreeMap<Name, BTreeSet<IpNet>>,
}

impl ServiceRoutes {
    /// Those of the node with this name.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self { node: node.to_owned(), ..Self::default() }
    }

    /// Takes other settings. Returns whether the addresses differ.
    pub fn set_settings(&mut self, settings: ServiceSettings) -> bool {
        self.settings = settings;
        let names: Vec<Name> = self.services.keys().cloned().collect();
        names.iter().fold(false, |differs, name| self.update(name) | differs)
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &ServiceSettings {
        &self.settings
    }

    /// Takes a Service; `None` if it is gone. Returns whether the addresses differ.
    pub fn set_service(&mut self, name: &Name, service: Option<&Service>) -> bool {
        match service.and_then(ServiceFacts::new) {
            Some(facts) => drop(self.services.insert(name.clone(), facts)),
            None => drop(self.services.remove(name)),
        }
        self.update(name)
    }

    /// Takes an EndpointSlice; `None` if it is gone. Returns whether the addresses differ.
    pub fn set_slice(&mut self, name: &Name, slice: Option<&EndpointSlice>) -> bool {
        let of_slice = slice.and_then(|slice| Some(((name.0.clone(), slice.service()?.to_owned()), slice)));
        let mut concerned = BTreeSet::new();
        if let Some((service, _)) = self.slices.remove(name) {
            if let Some(slices) = self.slices_of.get_mut(&service) {
                slices.remove(name);
                if slices.is_empty() {
                    self.slices_of.remove(&service);
                }
            }
            concerned.insert(service);
        }
        if let Some((service, slice)) = of_slice {
            self.slices.insert(name.clone(), (service.clone(), SliceFacts::new(slice, &self.node)));
            self.slices_of.entry(service.clone()).or_default().insert(name.clone());
            concerned.insert(service);
        }
        concerned.iter().fold(false, |differs, service| self.update(service) | differs)
    }

    /// Forgets all Services and EndpointSlices.
    pub fn clear(&mut self) {
        *self = Self { settings: std::mem::take(&mut self.settings), ..Self::new(&self.node) };
    }

    /// The addresses. Several Services may have the same one.
    #[must_use]
    pub fn addresses(&self) -> BTreeSet<IpNet> {
        self.advertised.values().flatten().copied().collect()
    }

    /// Decides about a Service again. Returns whether its addresses differ.
    fn update(&mut self, name: &Name) -> bool {
        let slices = self.slices_of.get(name).into_iter().flatten();
        let slices: Vec<&SliceFacts> = slices.filter_map(|slice| Some(&self.slices.get(slice)?.1)).collect();
        let service = self.services.get(name);
        let now = service.map(|service| service.advertised(&slices, &self.settings)).unwrap_or_default();
        let before = match now.is_empty() {
            true => self.advertised.remove(name),
            false => self.advertised.insert(name.clone(), now.clone()),
        };
        before.unwrap_or_default() != now
    }
}
