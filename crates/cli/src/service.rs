//! Services as ends of flows: a packet to one of their addresses arrives at one of their backends.

use std::net::IpAddr;

use anyhow::{Context, bail};
use serde_json::Value;
use tortie_api::kubernetes::{EndpointSlice, Service};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Peer, Snapshot};

use crate::port::PortSpec;

/// The targets of packets to a Service.
pub(crate) struct Translated {
    /// The Service.
    pub(crate) service: Key,
    /// The address that the sender used, if the Service has one.
    pub(crate) address: Option<IpAddr>,
    /// The backends, each with its port.
    pub(crate) backends: Vec<(Peer, PortSpec)>,
}

/// The targets of packets to this Service (`NAMESPACE/NAME`).
pub(crate) fn named(snapshot: &Snapshot, service: &str, packet: PortSpec) -> anyhow::Result<Translated> {
    let (namespace, name) = service.split_once('/').unwrap_or(("default", service));
    let key = Key::namespaced(Kind::Service, namespace, name);
    let Some(Ok(Resource::Service(found))) = snapshot.get(&key).map(|stored| &stored.resource) else {
        bail!("{key} does not exist");
    };
    let address = found.cluster_ips().first().copied();
    let backends = backends(snapshot, &key, found, packet)?;
    Ok(Translated { service: key, address, backends })
}

/// The targets of packets to this address, if it belongs to a Service.
pub(crate) fn at(
    snapshot: &Snapshot,
    address: IpAddr,
    packet: PortSpec,
) -> anyhow::Result<Option<Translated>> {
    for (key, stored) in snapshot.iter() {
        let Ok(Resource::Service(service)) = &stored.resource else { continue };
        if service.cluster_ips().contains(&address) || service.external_ips().contains(&address) {
            let mut backends = backends(snapshot, key, service, packet)?;
            backends.retain(|(peer, _)| match peer {
                Peer::Address(backend) => backend.is_ipv4() == address.is_ipv4(),
                _ => true,
            });
            return Ok(Some(Translated { service: key.clone(), address: Some(address), backends }));
        }
    }
    Ok(None)
}

/// What a reader has to know of packets to a node, if they are to the node port of a Service: they go to its backends.
pub(crate) fn node_port_note(snapshot: &Snapshot, to: &Peer, packet: PortSpec) -> Option<String> {
    let is_node = |address: &IpAddr| {
        snapshot.iter().any(|(_, stored)| match (&stored.resource, address) {
            (Ok(Resource::Node(node)), IpAddr::V4(address)) => node.address() == Some(*address),
            (Ok(Resource::Node(node)), IpAddr::V6(address)) => node.address_v6() == Some(*address),
            _ => false,
        })
    };
    match to {
        Peer::Node(_) => {}
        Peer::Address(address) if is_node(address) => {}
        _ => return None,
    }
    let is_it = |port: &Value| {
        let protocol = Protocol::from_name(port["protocol"].as_str().unwrap_or("TCP"));
        protocol == Some(packet.protocol) && port["nodePort"].as_u64() == Some(packet.port.into())
    };
    let (key, _) = snapshot.iter().filter(|(key, _)| key.kind == Kind::Service).find(|(_, stored)| {
        stored.value["spec"]["ports"].as_array().is_some_and(|ports| ports.iter().any(is_it))
    })?;
    Some(format!(
        "{}/{} is a node port of {key}: nodes send such packets to its backends, and this answer is about the node itself; \
         ask with --service {}/{}",
        packet.protocol.to_string().to_lowercase(),
        packet.port,
        key.namespace,
        key.name
    ))
}

fn backends(
    snapshot: &Snapshot,
    key: &Key,
    service: &Service,
    PortSpec { protocol, port: number, .. }: PortSpec,
) -> anyhow::Result<Vec<(Peer, PortSpec)>> {
    let is = |of: &Option<String>| Protocol::from_name(of.as_deref().unwrap_or("TCP")) == Some(protocol);
    let port = service.spec.ports.iter().find(|port| is(&port.protocol) && port.port == number);
    let shown = format!("{}/{number}", protocol.to_string().to_lowercase());
    let port = port.with_context(|| format!("{key} has no port {shown}: nobody takes such packets"))?;
    let wanted = port.name.clone().unwrap_or_default();
    let mut backends = Vec::new();
    for (slice_key, stored) in snapshot.iter().filter(|(key, _)| key.kind == Kind::EndpointSlice) {
        let Ok(Resource::EndpointSlice(slice)) = &stored.resource else { continue };
        if slice_key.namespace == key.namespace && slice.service() == Some(key.name.as_str()) {
            backends.extend(of_port(slice, &wanted, protocol));
        }
    }
    if backends.is_empty() {
        bail!("{key} has no backends for port {number}");
    }
    Ok(backends)
}

fn of_port(slice: &EndpointSlice, name: &str, protocol: Protocol) -> Vec<(Peer, PortSpec)> {
    let mut slice = slice.clone();
    slice.ports.retain(|port| port.name.as_deref().unwrap_or_default() == name);
    let backends = slice.backends().filter(|(_, of, _)| *of == protocol);
    backends
        .map(|(address, protocol, port)| (Peer::Address(address), PortSpec { protocol, port, icmp: None }))
        .collect()
}
