//! Connections to Services, packet by packet.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, bail};
use tortie_api::net::Protocol;
use tortie_hcn::schema::{Endpoint, EndpointFlags, IpConfig, LoadBalancer, LoadBalancerFlags};
use tortie_hcn::schema::{LoadBalancerPortMapping, Policy, ProviderAddress};
use tortie_hcn::{Guid, Hcn, HcnExt};
use tortie_policy::program::Flow;

use super::{MixedCluster, underlay};
use crate::frames;

/// A load balancer as created by kube-proxy for a Service.
#[derive(Debug, Clone)]
pub struct Balanced {
    /// The Service's address.
    pub vip: Ipv4Addr,
    /// The port's protocol.
    pub protocol: Protocol,
    /// The port at the Service's address.
    pub port: u16,
    /// Its backends.
    pub backends: Vec<Ipv4Addr>,
    /// Their port.
    pub target: u16,
    /// The source that backends see; `None` with direct server return.
    pub source: Option<Ipv4Addr>,
}

/// The position of a packet in a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The client's first.
    Begins,
    /// The server's first.
    Answers,
    /// One of the client's later ones.
    GoesOn,
}

/// A packet that arrived at a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The pod.
    pub at: IpAddr,
    /// The flow in the packet's headers.
    pub flow: Flow,
}

impl MixedCluster {
    /// Makes a Windows node balance connections of its pods to exactly these Services.
    ///
    /// # Errors
    /// An error of HNS.
    pub fn balance(&mut self, node: usize, services: &[Balanced]) -> Result<()> {
        let provider = |backend: &Ipv4Addr| -> Result<_> {
            let node = self.pods.get(&IpAddr::from(*backend)).context("a backend is no pod")?.at.node;
            Ok((*backend, underlay::address(node as u8 + 1)))
        };
        let backends = services.iter().flat_map(|service| &service.backends);
        let providers = backends.map(provider).collect::<Result<_>>()?;
        self.nodes[node].host.balance(services, &providers)
    }

    /// Sends these packets. Returns, by index, which of them arrived at a pod, and with which headers.
    ///
    /// # Errors
    /// A packet could not be sent, or a packet that is not subject to policy did not arrive.
    pub fn arrivals(&self, packets: &[Flow], step: Step) -> Result<BTreeMap<usize, Arrival>> {
        self.send(packets, step)
    }
}

/// The frame of a packet in the middle of a connection, with the tag at its end. Both ends start at number 0 and send
/// as many bytes as a tag has, also together with SYN.
pub(super) fn frame(flow: &Flow, step: Step, to: [u8; 6], tag: u32) -> Vec<u8> {
    const TCP: usize = 14 + 20;
    const SYN: u8 = 0x02;
    const ACK: u8 = 0x10;
    let mut frame = frames::frame(flow, to, tag);
    let (sequence, acknowledged, flags) = match step {
        Step::Begins => return frame,
        Step::Answers => (0_u32, 5_u32, SYN | ACK),
        Step::GoesOn => (5, 5, ACK),
    };
    if flow.protocol != Protocol::TCP {
        return frame;
    }
    frame[TCP + 4..TCP + 8].copy_from_slice(&sequence.to_be_bytes());
    frame[TCP + 8..TCP + 12].copy_from_slice(&acknowledged.to_be_bytes());
    frame[TCP + 13] = flags;
    frame[TCP + 16..TCP + 18].fill(0);
    let length = ((frame.len() - TCP) as u16).to_be_bytes();
    let pseudo = [&frame[26..34], &[0, 6], &length].concat();
    let sum = frames::checksum(&[&pseudo, &frame[TCP..]].concat());
    frame[TCP + 16..TCP + 18].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The flow of an IPv4 frame without options.
pub(super) fn flow_of(frame: &[u8]) -> Option<Flow> {
    let is_ipv4 = frame.get(12..15) == Some(&[0x08, 0, 0x45]);
    let packet = frame.get(14..).filter(|_| is_ipv4)?;
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?).into());
    let port = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
    let protocol = Protocol(packet[9]);
    let ports = if protocol.has_ports() { (port(20)?, port(22)?) } else { (0, 0) };
    Some(Flow {
        source: address(12)?,
        destination: address(16)?,
        protocol,
        source_port: ports.0,
        destination_port: ports.1,
        icmp: None,
    })
}

/// The load balancers that kube-proxy keeps in the HNS of a node.
#[derive(Debug, Default)]
pub struct Proxy {
    balancers: Vec<Guid>,
    remote: BTreeMap<Ipv4Addr, Guid>,
}

impl Proxy {
    /// Makes HNS balance connections to exactly these Services. Backends on other nodes have endpoints, too
    /// (docs/hns.md, Load balancers), with the address of their node from `providers`.
    ///
    /// # Errors
    /// An error of HNS, or a backend without a node.
    pub fn balance(
        &mut self,
        hns: &impl Hcn,
        network: Guid,
        services: &[Balanced],
        providers: &BTreeMap<Ipv4Addr, Ipv4Addr>,
    ) -> Result<()> {
        self.balancers.drain(..).try_for_each(|id| hns.delete_load_balancer(id))?;
        std::mem::take(&mut self.remote).into_values().try_for_each(|id| hns.delete_endpoint(id))?;
        let endpoints = hns.endpoints_of_network(network)?;
        let local = endpoints.iter().filter_map(|endpoint| {
            Some((endpoint.ip_configurations.first()?.ip_address.parse().ok()?, endpoint.id))
        });
        let local: BTreeMap<Ipv4Addr, Guid> = local.collect();
        for (address, provider) in providers.iter().filter(|(address, _)| !local.contains_key(address)) {
            self.remote.insert(*address, hns.create_endpoint(&remote(network, *address, *provider))?);
        }
        let id = |address: &Ipv4Addr| local.get(address).or_else(|| self.remote.get(address)).copied();
        for service in services {
            let backends = service.backends.iter().map(|address| id(address).context("no endpoint"));
            let balancer = balancer(service, backends.collect::<Result<_>>()?);
            self.balancers.push(hns.create_load_balancer(&balancer)?);
        }
        Ok(())
    }
}

fn remote(network: Guid, address: Ipv4Addr, provider: Ipv4Addr) -> Endpoint {
    let [a, b, c, d] = address.octets();
    let provider = ProviderAddress { provider_address: provider.to_string(), ..ProviderAddress::default() };
    Endpoint {
        host_compute_network: network,
        ip_configurations: vec![IpConfig { ip_address: address.to_string(), ..IpConfig::default() }],
        mac_address: format!("02-11-{a:02X}-{b:02X}-{c:02X}-{d:02X}"),
        policies: vec![Policy::of(&provider)],
        flags: EndpointFlags::REMOTE_ENDPOINT,
        ..Endpoint::default()
    }
}

fn balancer(service: &Balanced, backends: Vec<Guid>) -> LoadBalancer {
    let port = LoadBalancerPortMapping {
        protocol: service.protocol.0.into(),
        internal_port: service.target,
        external_port: service.port,
        ..LoadBalancerPortMapping::default()
    };
    let direct = LoadBalancerFlags::ENABLE_DIRECT_SERVER_RETURN;
    LoadBalancer {
        host_compute_endpoints: backends,
        source_vip: service.source.map(|source| source.to_string()).unwrap_or_default(),
        frontend_vips: vec![service.vip.to_string()],
        port_mappings: vec![port],
        flags: if service.source.is_none() { direct } else { 0 },
        ..LoadBalancer::default()
    }
}

/// The error on a node without HNS.
pub(super) fn unbalanced() -> Result<()> {
    bail!("a Linux node has no load balancers of HNS")
}
