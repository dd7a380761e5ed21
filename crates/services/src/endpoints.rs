//! The endpoints of a Service: reads its EndpointSlices, and merges them for each port.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tortie_api::kubernetes::{EndpointSlice, SliceEndpoint};
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{FieldError, Key};

use crate::address::{address, is_usable};
use crate::problem::Problem;
use crate::state::{Backend, ServiceName};

/// An EndpointSlice, as far as this node needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) service: ServiceName,
    pub(crate) problems: Vec<Problem>,
    family: Option<IpVersion>,
    endpoints: Vec<Endpoint>,
    ports: Vec<SlicePortNumber>,
}

/// A port of a slice. Slices of one Service may have different numbers under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SlicePortNumber {
    name: String,
    protocol: Protocol,
    number: u16,
}

/// An endpoint of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    address: IpAddr,
    pub(crate) is_local: bool,
    pub(crate) is_ready: bool,
    pub(crate) is_serving: bool,
    is_terminating: bool,
    pub(crate) hints: Hints,
}

/// The clients that should use an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hints {
    pub(crate) zones: Vec<String>,
    pub(crate) has_nodes: bool,
    pub(crate) names_node: bool,
}

impl Slice {
    /// The slice, unless it belongs to no Service or to a headless one.
    pub(crate) fn new(key: &Key, slice: &EndpointSlice, node: &str) -> Option<Self> {
        if slice.metadata.labels.contains_key(EndpointSlice::HEADLESS) {
            return None;
        }
        let service = ServiceName { namespace: key.namespace.clone(), name: slice.service()?.to_owned() };
        let family = match slice.address_type.as_deref() {
            Some("IPv4") => Some(IpVersion::V4),
            Some("IPv6") => Some(IpVersion::V6),
            _ => None,
        };
        let mut wrong = Vec::new();
        let mut read =
            Self { service, problems: Vec::new(), family, endpoints: Vec::new(), ports: Vec::new() };
        if let Some(family) = family {
            let endpoints = slice.endpoints.iter().enumerate();
            read.endpoints = endpoints
                .filter_map(|(index, endpoint)| {
                    let read = Endpoint::new(endpoint, family, node);
                    read.map_err(|problem| wrong.extend(problem.map(|problem| at(index, problem)))).ok()
                })
                .collect();
            read.ports = ports(slice, &mut wrong);
        } else if slice.address_type.as_deref() != Some("FQDN") {
            wrong.push(FieldError::new("addressType", "is neither IPv4 nor IPv6; write one of them"));
        }
        read.problems = wrong.into_iter().map(|error| Problem::new(key.clone(), error)).collect();
        Some(read)
    }
}

fn at(index: usize, problem: String) -> FieldError {
    FieldError::new(format!("endpoints[{index}].addresses[0]"), problem)
}

/// Ports without a name or a number serve no port of a Service. A name may be empty.
fn ports(slice: &EndpointSlice, wrong: &mut Vec<FieldError>) -> Vec<SlicePortNumber> {
    let mut ports = Vec::new();
    for (index, port) in slice.ports.iter().enumerate() {
        let (Some(name), Some(number @ 1..)) = (&port.name, port.port) else { continue };
        let text = port.protocol.as_deref().unwrap_or("TCP");
        match served_protocol(text) {
            Some(protocol) => ports.push(SlicePortNumber { name: name.clone(), protocol, number }),
            None => wrong.push(FieldError::new(format!("ports[{index}].protocol"), not_served(text))),
        }
    }
    ports
}

/// The protocol of a port of a Service.
pub(crate) fn served_protocol(text: &str) -> Option<Protocol> {
    match text {
        "TCP" => Some(Protocol::TCP),
        "UDP" => Some(Protocol::UDP),
        "SCTP" => Some(Protocol::SCTP),
        _ => None,
    }
}

/// The problem of a protocol that ports of Services do not have.
pub(crate) fn not_served(text: &str) -> String {
    format!("{text:?} is not served; write TCP, UDP or SCTP")
}

impl Endpoint {
    /// The endpoint. Only its first address counts, as in kube-proxy.
    ///
    /// # Errors
    /// The problem of that address; none if there is no address.
    fn new(endpoint: &SliceEndpoint, family: IpVersion, node: &str) -> Result<Self, Option<String>> {
        let text = endpoint.addresses.first().ok_or(None)?;
        let read = address(text).filter(|address| IpVersion::of(address) == family);
        let address = read.ok_or_else(|| Some(format!("{text:?} is no {family} address; write one")))?;
        if !is_usable(address) {
            return Err(Some(format!("{address} is no address that another machine has; remove it")));
        }
        let conditions = endpoint.conditions.unwrap_or_default();
        let hints = endpoint.hints.clone().unwrap_or_default();
        Ok(Self {
            address,
            is_local: endpoint.node_name.as_deref() == Some(node),
            is_ready: conditions.ready.unwrap_or(true),
            is_serving: conditions.serving.unwrap_or(true),
            is_terminating: conditions.terminating.unwrap_or(false),
            hints: Hints {
                zones: hints.for_zones.into_iter().map(|zone| zone.name).collect(),
                has_nodes: !hints.for_nodes.is_empty(),
                names_node: hints.for_nodes.iter().any(|hint| hint.name == node),
            },
        })
    }

    /// True if it gets connections where no endpoint is ready.
    pub(crate) fn serves_while_it_ends(&self) -> bool {
        self.is_serving && self.is_terminating
    }

    /// The order in which entries of one address and port count: a pod that got the address of one that ends comes first.
    fn rank(&self) -> (bool, bool) {
        (self.is_terminating, !self.is_ready)
    }

    /// The endpoint as a backend at a port.
    pub(crate) fn backend(&self, port: u16) -> Backend {
        Backend { address: self.address, port, is_local: self.is_local }
    }
}

impl Hints {
    /// True if clients of the zone should use the endpoint.
    pub(crate) fn names_zone(&self, zone: &str) -> bool {
        self.zones.iter().any(|named| named == zone)
    }
}

/// The endpoints of a port of a Service by address and port. Of several entries, the first by [`Endpoint::rank`] counts, then that of the
/// first slice by name.
pub(crate) fn of_port<'a>(
    slices: &'a BTreeMap<String, Slice>,
    family: IpVersion,
    name: &str,
    protocol: Protocol,
) -> BTreeMap<(IpAddr, u16), &'a Endpoint> {
    let mut merged: BTreeMap<(IpAddr, u16), &Endpoint> = BTreeMap::new();
    for slice in slices.values().filter(|slice| slice.family == Some(family)) {
        for port in slice.ports.iter().filter(|port| port.name == name && port.protocol == protocol) {
            for endpoint in &slice.endpoints {
                let entry = merged.entry((endpoint.address, port.number)).or_insert(endpoint);
                if endpoint.rank() < entry.rank() {
                    *entry = endpoint;
                }
            }
        }
    }
    merged
}
