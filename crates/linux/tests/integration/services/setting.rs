//! Services of a test, and the changes that make them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::net::{IpVersion, Protocol};
use tortie_linux::{ServiceTable, ServicesConfig};
use tortie_services::*;

use super::node::PODS;

pub(super) const TABLE: &str = "tortie-services";

/// The changes from nothing to these Services.
pub(super) fn everything(services: &NodeServices) -> Vec<ServicesDelta> {
    let all =
        |pool: &BTreeSet<Backend>| PoolChange { added: pool.iter().copied().collect(), removed: Vec::new() };
    let ports = services.ports.iter().map(|(id, port)| ServicesDelta::Port {
        id: id.clone(),
        has_endpoints: port.has_endpoints,
        affinity: port.affinity,
        serving: port.serving.clone(),
        cluster: all(&port.cluster),
        local: all(&port.local),
    });
    let frontends =
        services.frontends.iter().map(|(key, frontend)| ServicesDelta::Frontend(*key, frontend.clone()));
    let places =
        services.node_ports.iter().map(|(family, place)| ServicesDelta::NodePorts(*family, place.clone()));
    let cidrs = ServicesDelta::ServiceCidrs(services.service_cidrs.clone());
    let addresses = services.cluster_ips.iter().map(|address| ServicesDelta::ClusterIp(*address));
    places.chain([cidrs]).chain(ports).chain(frontends).chain(addresses).collect()
}

pub(super) fn pods() -> BTreeSet<IpNet> {
    PODS.iter().map(|pod| pod.parse::<IpAddr>().unwrap().into()).collect()
}

pub(super) fn is_local(address: IpAddr) -> bool {
    pods().contains(&address.into())
}

/// A dataplane of the calling thread's namespace.
pub(super) fn open(masquerading: Masquerading) -> ServiceTable {
    ServiceTable::open(ServicesConfig { masquerading, ..ServicesConfig::default() }).unwrap()
}

pub(super) const USUAL: Masquerading = Masquerading { all: false, knows_pods: true };

/// A port of a Service `ns/s`, as `http/TCP`.
pub(super) fn port(name: &str, protocol: Protocol) -> Arc<ServicePortId> {
    let service = ServiceName { namespace: "ns".to_owned(), name: "s".to_owned() };
    Arc::new(ServicePortId { service, port: name.to_owned(), protocol, family: IpVersion::V4 })
}

pub(super) fn at(address: &str, protocol: Protocol, port: u16) -> FrontendKey {
    FrontendKey { address: FrontendAddress::Address(address.parse().unwrap()), protocol, port }
}

pub(super) fn backend(address: &str) -> Backend {
    let address = address.parse().unwrap();
    Backend { address, port: 8080, is_local: is_local(address) }
}

pub(super) fn frontend(id: &Arc<ServicePortId>, kind: FrontendKind, policy: TrafficPolicy) -> Frontend {
    Frontend { service_port: id.clone(), kind, policy, source_ranges: None }
}

/// Adds a port with these backends, of which the local ones are in the local pool, too.
pub(super) fn add_port(services: &mut NodeServices, id: &Arc<ServicePortId>, backends: &[&str]) {
    let cluster: BTreeSet<Backend> = backends.iter().map(|address| backend(address)).collect();
    let local = cluster.iter().filter(|backend| backend.is_local).copied().collect();
    let port = ServicePort { has_endpoints: !backends.is_empty(), cluster, local, ..ServicePort::default() };
    services.ports.insert(id.clone(), port);
}

/// Makes changes, and ends what the former state has left, as agents do.
pub(super) fn apply(table: &mut ServiceTable, deltas: &[ServicesDelta]) -> tortie_linux::Result<()> {
    table.apply(deltas, &pods())?;
    table.clean_up()
}
