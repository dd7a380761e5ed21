//! Services on an emulated Windows node: load balancers of HNS, as kube-proxy makes them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use tortie_hcn::schema::{
    Endpoint, EndpointFlags, IpConfig, LoadBalancer, LoadBalancerFlags, LoadBalancerPortMapping, Policy,
    ProviderAddress,
};
use tortie_hcn::{Guid, Hcn, HcnExt, RemoteHcn};

use super::{Backend, Front, Fronts, Hosts};
use crate::LabError;

/// The load balancers of a node.
pub(super) struct Balancers {
    hcn: Arc<RemoteHcn>,
    state: Arc<std::sync::Mutex<State>>,
}

/// What this proxy has made.
#[derive(Default)]
struct State {
    balancers: BTreeMap<(Front, u16), (Guid, BTreeMap<Ipv4Addr, Guid>)>,
    /// Endpoints for pods of other nodes, each with the address of its node.
    remote: BTreeMap<Ipv4Addr, (Guid, Ipv4Addr)>,
}

impl Balancers {
    pub(super) fn new(hcn: Arc<RemoteHcn>) -> Self {
        Self { hcn, state: Arc::default() }
    }

    /// Makes HNS balance connections to these Services. It makes no NodePorts, and the emulated HNS has no SCTP.
    pub(super) async fn set(&mut self, fronts: &Arc<Fronts>, hosts: &Arc<Hosts>) -> Result<(), LabError> {
        let (hcn, state) = (self.hcn.clone(), self.state.clone());
        let (fronts, hosts) = (fronts.clone(), hosts.clone());
        let change = move || {
            let mut state = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            state.set(&*hcn, &fronts, &hosts).map_err(|error| LabError::problem("its HNS", error.to_string()))
        };
        let changed = tokio::task::spawn_blocking(change).await;
        changed.map_err(|error| LabError::problem("its load balancers", error.to_string()))?
    }
}

impl State {
    fn set(&mut self, hcn: &dyn Hcn, fronts: &Fronts, hosts: &Hosts) -> Result<(), tortie_hcn::Error> {
        let wanted = wanted(fronts);
        // The overlay comes with the agent. Without pods of its own, a node needs no load balancers.
        let Some(network) = hcn.networks()?.into_iter().find(|network| network.name == NETWORK) else {
            return Ok(());
        };
        let all = hcn.endpoints_of_network(network.id)?;
        let local = all.iter().filter(|endpoint| endpoint.flags & EndpointFlags::REMOTE_ENDPOINT == 0);
        let address =
            |endpoint: &Endpoint| endpoint.ip_configurations.first()?.ip_address.parse::<Ipv4Addr>().ok();
        let local: BTreeMap<Ipv4Addr, Guid> =
            local.filter_map(|endpoint| Some((address(endpoint)?, endpoint.id))).collect();
        let used: BTreeSet<Ipv4Addr> = wanted.values().flatten().copied().collect();

        // Of what is left, load balancers go before the endpoints that they name.
        let is_current = |address: &Ipv4Addr, node: Ipv4Addr| {
            used.contains(address) && !local.contains_key(address) && hosts.get(address) == Some(&node)
        };
        let mut remote: BTreeMap<Ipv4Addr, Guid> = BTreeMap::new();
        for (address, (id, node)) in &self.remote {
            if is_current(address, *node) {
                remote.insert(*address, *id);
            }
        }
        let id = |address: &Ipv4Addr, remote: &BTreeMap<Ipv4Addr, Guid>| {
            local.get(address).or(remote.get(address)).copied()
        };
        let stale: Vec<(Front, u16)> = self
            .balancers
            .iter()
            .filter(|(front, (_, backends))| {
                let keeps = |(address, known): (&Ipv4Addr, &Guid)| id(address, &remote) == Some(*known);
                let addresses: BTreeSet<Ipv4Addr> = backends.keys().copied().collect();
                wanted.get(front) != Some(&addresses) || !backends.iter().all(keeps)
            })
            .map(|(front, _)| front.clone())
            .collect();
        for front in stale {
            if let Some((id, _)) = self.balancers.get(&front) {
                hcn.delete_load_balancer(*id)?;
            }
            self.balancers.remove(&front);
        }
        let gone: Vec<Ipv4Addr> =
            self.remote.keys().filter(|address| !remote.contains_key(address)).copied().collect();
        for address in gone {
            if let Some((id, _)) = self.remote.get(&address) {
                hcn.delete_endpoint(*id)?;
            }
            self.remote.remove(&address);
        }
        for address in
            used.iter().filter(|address| !local.contains_key(address) && !remote.contains_key(address))
        {
            // A backend outside of the cluster's pods has no node.
            let Some(node) = hosts.get(address) else { continue };
            let made = hcn.create_endpoint(&remote_endpoint(network.id, *address, *node))?;
            self.remote.insert(*address, (made, *node));
        }
        remote = self.remote.iter().map(|(address, (id, _))| (*address, *id)).collect();
        for (front, addresses) in wanted {
            let backends: BTreeMap<Ipv4Addr, Guid> =
                addresses.iter().filter_map(|address| Some((*address, id(address, &remote)?))).collect();
            if backends.is_empty() || self.balancers.contains_key(&front) {
                continue;
            }
            let made = hcn.create_load_balancer(&balancer(&front, backends.values().copied().collect()))?;
            self.balancers.insert(front, (made, backends));
        }
        Ok(())
    }
}

/// The name of the overlay, in which the agent connects pods.
const NETWORK: &str = "Calico";

/// The backends of each front with an address, by their port: a load balancer has one port for all of its backends.
fn wanted(fronts: &Fronts) -> BTreeMap<(Front, u16), BTreeSet<Ipv4Addr>> {
    let mut wanted = BTreeMap::new();
    for (front, backends) in fronts.iter().filter(|(front, _)| front.address.is_some()) {
        // Two load balancers cannot have the same front, so the port of most backends counts.
        let mut ports: BTreeMap<u16, BTreeSet<Ipv4Addr>> = BTreeMap::new();
        for (address, port) in backends as &BTreeSet<Backend> {
            ports.entry(*port).or_default().insert(*address);
        }
        if let Some((port, addresses)) = ports.into_iter().max_by_key(|(_, addresses)| addresses.len()) {
            wanted.insert((front.clone(), port), addresses);
        }
    }
    wanted
}

fn balancer((front, target): &(Front, u16), backends: Vec<Guid>) -> LoadBalancer {
    let port = LoadBalancerPortMapping {
        protocol: front.protocol.0.into(),
        internal_port: *target,
        external_port: front.port,
        ..LoadBalancerPortMapping::default()
    };
    LoadBalancer {
        host_compute_endpoints: backends,
        frontend_vips: front.address.iter().map(ToString::to_string).collect(),
        port_mappings: vec![port],
        flags: LoadBalancerFlags::ENABLE_DIRECT_SERVER_RETURN,
        ..LoadBalancer::default()
    }
}

fn remote_endpoint(network: Guid, address: Ipv4Addr, node: Ipv4Addr) -> Endpoint {
    let [a, b, c, d] = address.octets();
    let provider = ProviderAddress { provider_address: node.to_string(), ..ProviderAddress::default() };
    Endpoint {
        host_compute_network: network,
        ip_configurations: vec![IpConfig { ip_address: address.to_string(), ..IpConfig::default() }],
        mac_address: format!("02-11-{a:02X}-{b:02X}-{c:02X}-{d:02X}"),
        policies: vec![Policy::of(&provider)],
        flags: EndpointFlags::REMOTE_ENDPOINT,
        ..Endpoint::default()
    }
}
