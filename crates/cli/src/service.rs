//! Services and ports of nodes as ends of flows: a packet to one of them arrives at a backend.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{anyhow, bail};
use tortie_api::kubernetes::{EndpointSlice, Pod, Service};
use tortie_api::manifest::first_pod;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Resource, stand_in};
use tortie_oracle::{Peer, Snapshot};

use crate::port::PortSpec;

/// The targets of packets that nodes translate.
pub(crate) struct Translated {
    /// The Service, or the pod with the host port.
    pub(crate) service: Key,
    /// The address that the sender used, if the Service has one.
    pub(crate) address: Option<IpAddr>,
    /// The backends, each with its port.
    pub(crate) backends: Vec<(Peer, PortSpec)>,
    /// The node that translates its own port, and puts its own address in place of the sender's if the backend is elsewhere.
    pub(crate) by_node: Option<String>,
}

impl Translated {
    /// The address that the sender used, if the files or the datastore have it.
    pub(crate) fn given_address(&self) -> Option<IpAddr> {
        self.address.filter(|address| !stand_in::is_of_service(address))
    }
}

/// The end of a packet's way to an address or a node.
pub(crate) enum Translation {
    /// Nobody translates the packet.
    No,
    /// It goes to one of these.
    To(Translated),
    /// A Service takes it, and has no backend for it. The text says why.
    Dropped(String),
}

/// The addresses and ports that nodes translate.
pub(crate) struct Services<'a> {
    snapshot: &'a Snapshot,
    /// The Services by their own and external addresses.
    by_address: BTreeMap<IpAddr, &'a Key>,
    /// The Services by node port, with the port of the Service that it stands for.
    by_node_port: BTreeMap<(Protocol, u16), (&'a Key, u16)>,
    /// The nodes by each of their addresses.
    nodes: BTreeMap<IpAddr, &'a str>,
    /// The address by which a node is known.
    address_of: BTreeMap<&'a str, IpAddr>,
    /// The pods that run and have a network of their own, by address.
    pods: BTreeMap<IpAddr, (&'a Key, &'a Pod)>,
}

impl<'a> Services<'a> {
    pub(crate) fn of(snapshot: &'a Snapshot) -> Self {
        let mut all = Self {
            snapshot,
            by_address: BTreeMap::new(),
            by_node_port: BTreeMap::new(),
            nodes: BTreeMap::new(),
            address_of: BTreeMap::new(),
            pods: BTreeMap::new(),
        };
        for (key, stored) in snapshot.iter() {
            match &stored.resource {
                Ok(Resource::Service(service)) => {
                    let addresses = service.cluster_ips().into_iter().chain(service.external_ips());
                    all.by_address.extend(addresses.map(|address| (address, key)));
                    let ports = stored.value["spec"]["ports"].as_array().into_iter().flatten();
                    all.by_node_port.extend(ports.filter_map(|port| {
                        let number = |field: &str| u16::try_from(port[field].as_u64()?).ok();
                        let protocol = Protocol::from_name(port["protocol"].as_str().unwrap_or("TCP"))?;
                        Some(((protocol, number("nodePort")?), (key, number("port")?)))
                    }));
                }
                Ok(Resource::Node(node)) => {
                    let known = [node.address().map(IpAddr::V4), node.address_v6().map(IpAddr::V6)];
                    let known: Vec<IpAddr> = known.into_iter().flatten().collect();
                    all.address_of.extend(known.first().map(|address| (key.name.as_str(), *address)));
                    let every = known.into_iter().chain(node.addresses());
                    all.nodes.extend(every.map(|address| (address, key.name.as_str())));
                }
                Ok(Resource::Pod(pod)) if !pod.has_ended() && !pod.spec.host_network => {
                    all.pods.extend(pod.status.addresses().into_iter().map(|address| (address, (key, pod))));
                }
                _ => {}
            }
        }
        all
    }

    /// The targets of a packet to an address or a node, if somebody translates it.
    pub(crate) fn translate(&self, from: &Peer, to: &Peer, packet: PortSpec) -> Translation {
        let found = match (self.node_at(to), to) {
            (Some((node, address)), _) => self.at_node(from, (node, address), packet),
            (None, Peer::Address(address)) => self.at(*address, packet),
            (None, _) => Ok(None),
        };
        match found {
            Ok(None) => Translation::No,
            Ok(Some(translated)) => Translation::To(translated),
            Err(reason) => Translation::Dropped(reason),
        }
    }

    /// The targets of packets to this Service (`NAMESPACE/NAME`, or `NAME` in this namespace).
    pub(crate) fn named(
        &self,
        service: &str,
        namespace: &str,
        packet: PortSpec,
    ) -> anyhow::Result<Translated> {
        let (namespace, name) = service.split_once('/').unwrap_or((namespace, service));
        let key = Key::namespaced(Kind::Service, namespace, name);
        let Some(found) = self.service(&key) else { bail!("{key} does not exist") };
        let address = found.cluster_ips().first().copied();
        let backends = self.backends(&key, found, packet).map_err(|reason| anyhow!(reason))?;
        Ok(Translated { service: key, address, backends, by_node: None })
    }

    /// The targets of packets to this address, if it belongs to a Service.
    fn at(&self, address: IpAddr, packet: PortSpec) -> Result<Option<Translated>, String> {
        let Some(key) = self.by_address.get(&address).copied() else { return Ok(None) };
        let Some(service) = self.service(key) else { return Ok(None) };
        let mut backends = self.backends(key, service, packet)?;
        backends.retain(|(backend, _)| is_of_family(backend, address));
        let (service, address) = (key.clone(), Some(address));
        Ok(Some(Translated { service, address, backends, by_node: None }))
    }

    /// The targets of packets to a port of a node: the backends of a Service with that node port, or else the pod of this node with that
    /// host port. `None` if the node itself takes them, or if the sender is another node or its pod: such a packet is judged twice on its
    /// way, and [`Self::node_port_note`] says so.
    fn at_node(
        &self,
        from: &Peer,
        (name, address): (&str, IpAddr),
        packet: PortSpec,
    ) -> Result<Option<Translated>, String> {
        let sender = self.sender(from, name);
        if sender == Sender::OfAnotherNode {
            return Ok(None);
        }
        if let Some((key, port)) = self.by_node_port.get(&(packet.protocol, packet.port)).copied()
            && let Some(service) = self.service(key)
        {
            let mut backends = self.backends(key, service, PortSpec { port, ..packet })?;
            backends.retain(|(backend, _)| is_of_family(backend, address));
            let is_local = service.spec.external_traffic_policy.as_deref() == Some("Local");
            // The node's own pods reach all backends, and keep their addresses then (kube-proxy, KUBE-EXT).
            if is_local && sender == Sender::Outside {
                backends.retain(|(backend, _)| self.is_on(backend, name));
            }
            if backends.is_empty() {
                let port = packet.port;
                return Err(format!(
                    "{key} has no backend for port {port} of node {name}, so the node drops such packets"
                ));
            }
            let by_node = Some(name.to_owned()).filter(|_| !(is_local && sender == Sender::OwnPod));
            return Ok(Some(Translated { service: key.clone(), address: Some(address), backends, by_node }));
        }
        Ok(self.with_host_port((name, address), packet))
    }

    /// The pod of this node with this host port.
    fn with_host_port(&self, (node, address): (&str, IpAddr), packet: PortSpec) -> Option<Translated> {
        self.pods.iter().find_map(|(own, (key, pod))| {
            let is_here = pod.spec.node_name.as_deref() == Some(node) && own.is_ipv4() == address.is_ipv4();
            let mut ports = pod.lasting_host_ports().into_iter().filter(|_| is_here);
            let port = ports.find(|port| {
                let of_address = port.host_ip.as_ref().and_then(|own| own.parse::<IpAddr>().ok());
                Protocol::from_name(&port.port.protocol) == Some(packet.protocol)
                    && port.host_port == Some(packet.port)
                    && of_address.is_none_or(|own| own.is_unspecified() || own == address)
            })?;
            let backend = (Peer::Address(*own), PortSpec { port: port.port.port, ..packet });
            Some(Translated {
                service: (*key).clone(),
                address: Some(address),
                backends: vec![backend],
                by_node: Some(node.to_owned()),
            })
        })
    }

    /// A note for readers about packets from other nodes, or from their pods, to the node port of a Service.
    pub(crate) fn node_port_note(&self, to: &Peer, packet: PortSpec) -> Option<String> {
        self.node_at(to)?;
        let (key, _) = self.by_node_port.get(&(packet.protocol, packet.port))?;
        Some(format!(
            "{}/{} is a node port of {key}: nodes send such packets to its backends, and this answer is about the node itself; \
             ask with --service {}/{}",
            packet.protocol.to_string().to_lowercase(),
            packet.port,
            key.namespace,
            key.name
        ))
    }

    /// The node that is meant, and its address that is: the one by which it is known, if the question names none.
    fn node_at(&self, peer: &Peer) -> Option<(&'a str, IpAddr)> {
        match peer {
            Peer::Node(name) => {
                let (name, address) = self.address_of.get_key_value(name.as_str())?;
                Some((name, *address))
            }
            Peer::Address(address) => self.nodes.get(address).map(|name| (*name, *address)),
            Peer::Pod { .. } => None,
        }
    }

    fn sender(&self, from: &Peer, node: &str) -> Sender {
        let pod = match from {
            Peer::Pod { namespace, name } => {
                let stored = self.snapshot.get(&Key::namespaced(Kind::Pod, namespace, name));
                match stored.map(|stored| &stored.resource) {
                    Some(Ok(Resource::Pod(pod))) if !pod.spec.host_network => pod,
                    _ => return Sender::OfAnotherNode,
                }
            }
            Peer::Node(_) => return Sender::OfAnotherNode,
            Peer::Address(address) => match self.pods.get(address) {
                Some((_, pod)) => pod,
                None if self.nodes.contains_key(address) => return Sender::OfAnotherNode,
                None => return Sender::Outside,
            },
        };
        match pod.spec.node_name.as_deref() == Some(node) {
            true => Sender::OwnPod,
            false => Sender::OfAnotherNode,
        }
    }

    /// Returns whether a backend is on this node: a pod of it, or the node itself.
    fn is_on(&self, backend: &Peer, node: &str) -> bool {
        let Peer::Address(address) = backend else { return false };
        match self.pods.get(address) {
            Some((_, pod)) => pod.spec.node_name.as_deref() == Some(node),
            None => self.nodes.get(address) == Some(&node),
        }
    }

    fn service(&self, key: &Key) -> Option<&'a Service> {
        match self.snapshot.get(key).map(|stored| &stored.resource) {
            Some(Ok(Resource::Service(service))) => Some(service),
            _ => None,
        }
    }

    /// The backends for a port of the Service; the reason if there are none. The second pod of a workload is none besides the first.
    fn backends(
        &self,
        key: &Key,
        service: &Service,
        PortSpec { protocol, port: number, .. }: PortSpec,
    ) -> Result<Vec<(Peer, PortSpec)>, String> {
        let is = |of: &Option<String>| Protocol::from_name(of.as_deref().unwrap_or("TCP")) == Some(protocol);
        let port = service.spec.ports.iter().find(|port| is(&port.protocol) && port.port == number);
        let shown = format!("{}/{number}", protocol.to_string().to_lowercase());
        let port = port.ok_or_else(|| format!("{key} has no port {shown}: nobody takes such packets"))?;
        let wanted = port.name.clone().unwrap_or_default();
        let mut backends = Vec::new();
        for (slice_key, stored) in self.snapshot.iter().filter(|(key, _)| key.kind == Kind::EndpointSlice) {
            let Ok(Resource::EndpointSlice(slice)) = &stored.resource else { continue };
            if slice_key.namespace == key.namespace && slice.service() == Some(key.name.as_str()) {
                backends.extend(of_port(slice, &wanted, protocol));
            }
        }
        let is_second =
            |address: &IpAddr| self.pods.get(address).is_some_and(|(key, _)| first_pod(&key.name).is_some());
        backends.retain(|(backend, _)| !matches!(backend, Peer::Address(address) if is_second(address)));
        if backends.is_empty() {
            return Err(format!("{key} has no backends for port {number}"));
        }
        Ok(backends)
    }
}

/// The sender of a packet to a port of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// No pod and no node.
    Outside,
    /// A pod of that node.
    OwnPod,
    /// A node, or a pod of another one.
    OfAnotherNode,
}

fn is_of_family(backend: &Peer, address: IpAddr) -> bool {
    match backend {
        Peer::Address(backend) => backend.is_ipv4() == address.is_ipv4(),
        Peer::Pod { .. } | Peer::Node(_) => true,
    }
}

fn of_port(slice: &EndpointSlice, name: &str, protocol: Protocol) -> Vec<(Peer, PortSpec)> {
    let mut slice = slice.clone();
    slice.ports.retain(|port| port.name.as_deref().unwrap_or_default() == name);
    let backends = slice.backends().filter(|(_, of, _)| *of == protocol);
    backends
        .map(|(address, protocol, port)| (Peer::Address(address), PortSpec { protocol, port, icmp: None }))
        .collect()
}
