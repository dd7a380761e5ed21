//! Services of the cluster in, frontends and backends of one node out.
//!
//! [`Services::update`] ingests one object. [`Services::flush`] returns the changes since the last flush. The result depends on
//! the objects, never on the order or the batching of updates. The work of an event is proportional to the endpoints of that Service.
//! The meaning is that of kube-proxy 1.36 in nftables mode (`pkg/proxy` of Kubernetes); where that is undefined, it is defined here.
//! No clock, no I/O, no threads.

mod address;
mod affinity;
mod claims;
mod endpoints;
mod evaluate;
mod frontends;
mod node;
mod pools;
mod problem;
mod service;
mod state;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::kubernetes::ServiceCidr;
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{FieldError, Key, Kind, Resource};

pub use affinity::Affinities;
use claims::{Claim, Claims};
use endpoints::Slice;
pub use evaluate::{Masquerading, Outcome, Packet, Sender, Translation};
pub use node::NodePortAddresses;
use node::OwnNode;
pub use problem::{FrontendPlace, Problem};
use service::Translated;
pub use state::{
    Backend, Frontend, FrontendAddress, FrontendKey, FrontendKind, HealthCheck, NodePortPlace, NodeServices,
    PoolChange, ServiceName, ServicePort, ServicePortId, ServicesDelta, TrafficPolicy,
};

/// The kinds of objects that must be completely known before anything is translated: half a list of endpoints would send connections to
/// wrong backends, and half a list of Services would reject them.
pub const KINDS: [Kind; 4] = [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr];

/// The computation for one node.
#[derive(Debug)]
pub struct Services {
    node: String,
    node_port_addresses: NodePortAddresses,
    own: OwnNode,
    services: BTreeMap<ServiceName, Known>,
    /// The Service of each slice, by the slice's key.
    owners: BTreeMap<Key, ServiceName>,
    /// The networks of each ServiceCIDR.
    cidrs: BTreeMap<String, Vec<IpNet>>,
    claims: Claims,
    /// The number of Services with each clusterIP.
    cluster_ips: BTreeMap<IpAddr, usize>,
    /// The problems of each object.
    problems: BTreeMap<Key, Vec<Problem>>,
    listed: BTreeSet<Kind>,
    /// Services that may have changed since the last flush.
    touched: BTreeSet<ServiceName>,
    /// The published state.
    state: NodeServices,
}

/// The objects of a Service, and what has been published of it.
#[derive(Debug, Default)]
struct Known {
    service: Option<Translated>,
    slices: BTreeMap<String, Slice>,
    /// Its keys in [`NodeServices::ports`].
    ports: Vec<Arc<ServicePortId>>,
    claims: Vec<(FrontendKey, Claim)>,
    cluster_ips: Vec<IpAddr>,
}

/// The result for a Service.
#[derive(Debug, Default)]
struct Computed {
    ports: BTreeMap<Arc<ServicePortId>, ServicePort>,
    claims: BTreeMap<(FrontendKey, Claim), Frontend>,
    cluster_ips: Vec<IpAddr>,
    health_checks: BTreeMap<IpVersion, HealthCheck>,
}

impl Services {
    /// For the node of this name, without objects.
    #[must_use]
    pub fn new(node: impl Into<String>, node_port_addresses: NodePortAddresses) -> Self {
        Self {
            node: node.into(),
            node_port_addresses,
            own: OwnNode::default(),
            services: BTreeMap::new(),
            owners: BTreeMap::new(),
            cidrs: BTreeMap::new(),
            claims: Claims::default(),
            cluster_ips: BTreeMap::new(),
            problems: BTreeMap::new(),
            listed: BTreeSet::new(),
            touched: BTreeSet::new(),
            state: NodeServices::default(),
        }
    }

    /// Ingests an object, or its deletion. Objects of kinds other than [`KINDS`] and Nodes of other names have no effect. What cannot be
    /// read counts as absent, and is in [`problems`](Self::problems).
    pub fn update(&mut self, key: &Key, value: Option<&Value>) {
        if !KINDS.contains(&key.kind) || key.kind == Kind::Node && key.name != self.node {
            return;
        }
        self.problems.remove(key);
        let (resource, wrong) =
            value.map_or((None, Vec::new()), |value| Resource::read_what_can_be(key, value));
        let mut problems: Vec<Problem> =
            wrong.into_iter().map(|error| Problem::new(key.clone(), error)).collect();
        match key.kind {
            Kind::Node => self.update_node(resource),
            Kind::EndpointSlice => problems.extend(self.update_slice(key, resource)),
            Kind::ServiceCidr => problems.extend(self.update_service_cidr(key, resource)),
            _ => problems.extend(self.update_service(key, resource, value)),
        }
        if !problems.is_empty() {
            self.problems.insert(key.clone(), problems);
        }
    }

    /// All objects of a kind have been ingested for the first time.
    pub fn listed(&mut self, kind: Kind) {
        self.listed.insert(kind);
    }

    /// True if all of [`KINDS`] are listed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        KINDS.iter().all(|kind| self.listed.contains(kind))
    }

    /// True if a Service has this clusterIP, also before the first flush.
    #[must_use]
    pub fn has_cluster_ip(&self, address: IpAddr) -> bool {
        let services = self.services.values().filter_map(|known| known.service.as_ref());
        services.flat_map(|service| &service.families).any(|family| family.cluster_ip == address)
    }

    /// The changes of the state since the last flush; none before all of [`KINDS`] are listed.
    pub fn flush(&mut self) -> Option<Vec<ServicesDelta>> {
        if !self.is_complete() {
            return None;
        }
        let mut deltas = self.settings();
        let mut removed = Vec::new();
        let mut keys = BTreeSet::new();
        let mut addresses = BTreeSet::new();
        for name in std::mem::take(&mut self.touched) {
            self.recompute(&name, &mut deltas, &mut removed, &mut keys, &mut addresses);
        }
        deltas.extend(keys.into_iter().filter_map(|key| self.frontend(key)));
        deltas.extend(addresses.into_iter().filter_map(|address| self.cluster_ip(address)));
        deltas.extend(removed.into_iter().map(ServicesDelta::PortRemoved));
        for delta in &deltas {
            self.state.apply(delta);
        }
        Some(deltas)
    }

    /// The state as of the last flush.
    #[must_use]
    pub fn state(&self) -> &NodeServices {
        &self.state
    }

    /// The parts of objects that have no effect. Claims to addresses are as of the last flush.
    #[must_use]
    pub fn problems(&self) -> BTreeSet<Problem> {
        let known = self.problems.values().flatten().cloned();
        known.chain(self.claims.problems()).collect()
    }

    fn update_node(&mut self, resource: Option<Resource>) {
        let own = match resource {
            Some(Resource::Node(node)) => OwnNode::new(&node),
            _ => OwnNode::default(),
        };
        if self.own != own {
            self.own = own;
            self.touched.extend(self.services.keys().cloned());
        }
    }

    fn update_slice(&mut self, key: &Key, resource: Option<Resource>) -> Vec<Problem> {
        if let Some(owner) = self.owners.remove(key) {
            self.services.entry(owner.clone()).or_default().slices.remove(&key.name);
            self.touched.insert(owner);
        }
        let Some(Resource::EndpointSlice(slice)) = resource else { return Vec::new() };
        let Some(mut slice) = Slice::new(key, &slice, &self.node) else { return Vec::new() };
        let (owner, problems) = (slice.service.clone(), std::mem::take(&mut slice.problems));
        self.services.entry(owner.clone()).or_default().slices.insert(key.name.clone(), slice);
        self.owners.insert(key.clone(), owner.clone());
        self.touched.insert(owner);
        problems
    }

    fn update_service_cidr(&mut self, key: &Key, resource: Option<Resource>) -> Vec<Problem> {
        self.cidrs.remove(&key.name);
        let Some(Resource::ServiceCidr(ServiceCidr { spec })) = resource else { return Vec::new() };
        let (mut networks, mut problems) = (Vec::new(), Vec::new());
        for (index, text) in spec.cidrs.iter().enumerate() {
            match address::network(text) {
                Some(network) => networks.push(network),
                None => problems.push(Problem::new(
                    key.clone(),
                    FieldError::new(
                        format!("spec.cidrs[{index}]"),
                        format!("{text:?} is no network, so its unused addresses are not dropped; write it as 10.96.0.0/12"),
                    ),
                )),
            }
        }
        self.cidrs.insert(key.name.clone(), networks);
        problems
    }

    fn update_service(
        &mut self,
        key: &Key,
        resource: Option<Resource>,
        value: Option<&Value>,
    ) -> Vec<Problem> {
        let name = ServiceName { namespace: key.namespace.clone(), name: key.name.clone() };
        let (service, problems) = match (resource, value) {
            (Some(Resource::Service(service)), Some(value)) => service::read(key, &service, value),
            _ => (None, Vec::new()),
        };
        self.services.entry(name.clone()).or_default().service = service;
        self.touched.insert(name);
        problems
    }

    /// The settings of the node that differ from the published state.
    fn settings(&self) -> Vec<ServicesDelta> {
        let mut deltas = Vec::new();
        let cidrs: BTreeSet<IpNet> = self.cidrs.values().flatten().copied().collect();
        if cidrs != self.state.service_cidrs {
            deltas.push(ServicesDelta::ServiceCidrs(cidrs));
        }
        for family in IpVersion::ALL {
            let place = self.own.node_ports(&self.node_port_addresses, family);
            if self.state.node_ports.get(&family) != Some(&place) {
                deltas.push(ServicesDelta::NodePorts(family, place));
            }
        }
        deltas
    }

    /// Computes a Service, and notes the differences from what has been published of it.
    fn recompute(
        &mut self,
        name: &ServiceName,
        deltas: &mut Vec<ServicesDelta>,
        removed: &mut Vec<Arc<ServicePortId>>,
        keys: &mut BTreeSet<FrontendKey>,
        addresses: &mut BTreeSet<IpAddr>,
    ) {
        let Some(known) = self.services.get_mut(name) else { return };
        let next = Computed::of(name, known, &self.own);
        for (id, port) in &next.ports {
            deltas.extend(changed_port(id, self.state.ports.get(id), port));
        }
        removed.extend(known.ports.iter().filter(|id| !next.ports.contains_key(*id)).cloned());
        for (key, claim) in known.claims.iter().filter(|claim| !next.claims.contains_key(*claim)) {
            self.claims.remove(*key, claim);
            keys.insert(*key);
        }
        for ((key, claim), frontend) in &next.claims {
            if self.claims.get(key, claim) != Some(frontend) {
                self.claims.insert(*key, claim.clone(), frontend.clone());
                keys.insert(*key);
            }
        }
        for address in &next.cluster_ips {
            *self.cluster_ips.entry(*address).or_default() += 1;
        }
        for address in &known.cluster_ips {
            if let Some(count) = self.cluster_ips.get_mut(address) {
                *count -= 1;
            }
        }
        addresses.extend(known.cluster_ips.iter().chain(&next.cluster_ips));
        for family in IpVersion::ALL {
            let last = self.state.health_checks.get(&(name.clone(), family));
            deltas.extend(changed_check(name, family, last, next.health_checks.get(&family)));
        }
        known.ports = next.ports.into_keys().collect();
        known.claims = next.claims.into_keys().collect();
        known.cluster_ips = next.cluster_ips;
        if known.service.is_none() && known.slices.is_empty() {
            self.services.remove(name);
        }
    }

    fn frontend(&self, key: FrontendKey) -> Option<ServicesDelta> {
        match (self.claims.winner(&key), self.state.frontends.get(&key)) {
            (now, before) if now == before => None,
            (Some(now), _) => Some(ServicesDelta::Frontend(key, now.clone())),
            (None, _) => Some(ServicesDelta::FrontendRemoved(key)),
        }
    }

    fn cluster_ip(&mut self, address: IpAddr) -> Option<ServicesDelta> {
        let is_used = self.cluster_ips.get(&address).is_some_and(|count| *count > 0);
        if !is_used {
            self.cluster_ips.remove(&address);
        }
        match (is_used, self.state.cluster_ips.contains(&address)) {
            (true, false) => Some(ServicesDelta::ClusterIp(address)),
            (false, true) => Some(ServicesDelta::ClusterIpRemoved(address)),
            _ => None,
        }
    }
}

impl Computed {
    fn of(name: &ServiceName, known: &Known, node: &OwnNode) -> Self {
        let mut computed = Self::default();
        let Some(service) = &known.service else { return computed };
        for addresses in &service.families {
            computed.cluster_ips.push(addresses.cluster_ip);
            let mut local = BTreeSet::new();
            for port in &service.ports {
                let id = Arc::new(ServicePortId {
                    service: name.clone(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                    family: addresses.family,
                });
                let endpoints =
                    endpoints::of_port(&known.slices, addresses.family, &port.name, port.protocol);
                local.extend(pools::local_ready(&endpoints));
                let used = frontends::used_pools(service, addresses, port);
                let mut pools = pools::choose(&endpoints, node.zone.as_deref(), used, service.affinity);
                if port.protocol == Protocol::UDP {
                    pools.serving = pools::serving(&endpoints).collect();
                }
                for (key, frontend) in frontends::of_port(service, addresses, port, &id, node) {
                    let claim = Claim::new(&frontend, service.created.as_ref());
                    computed.claims.insert((key, claim), frontend);
                }
                computed.ports.insert(id, pools);
            }
            let check =
                service.health_check_port.map(|port| HealthCheck { port, local_endpoints: local.len() });
            computed.health_checks.extend(check.map(|check| (addresses.family, check)));
        }
        computed
    }
}

/// The change of a port, if it differs from what has been published.
fn changed_port(
    id: &Arc<ServicePortId>,
    before: Option<&ServicePort>,
    port: &ServicePort,
) -> Option<ServicesDelta> {
    if before == Some(port) {
        return None;
    }
    let empty = ServicePort::default();
    let from = before.unwrap_or(&empty);
    Some(ServicesDelta::Port {
        id: id.clone(),
        has_endpoints: port.has_endpoints,
        affinity: port.affinity,
        serving: port.serving.clone(),
        cluster: PoolChange::between(&from.cluster, &port.cluster),
        local: PoolChange::between(&from.local, &port.local),
    })
}

/// The change of a health check.
fn changed_check(
    name: &ServiceName,
    family: IpVersion,
    before: Option<&HealthCheck>,
    check: Option<&HealthCheck>,
) -> Option<ServicesDelta> {
    match (before, check) {
        (before, check) if before == check => None,
        (_, Some(check)) => Some(ServicesDelta::HealthCheck(name.clone(), family, *check)),
        (_, None) => Some(ServicesDelta::HealthCheckRemoved(name.clone(), family)),
    }
}
