//! The cluster's Services, for a dataplane that needs them: the addresses that pods may connect to, and their
//! backends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tortie_api::Key;
use tortie_api::kubernetes::{self, EndpointSlice};
use tortie_api::net::Protocol;
use tortie_dataplane::{Delta, NodeState, Service, ServiceId, ServicePort};

#[derive(Default)]
pub(crate) struct Services {
    fronts: BTreeMap<ServiceId, Front>,
    slices: BTreeMap<Key, Slice>,
    slices_of: BTreeMap<ServiceId, BTreeSet<Key>>,
    /// Services that may have changed since the last flush.
    touched: BTreeSet<ServiceId>,
}

/// The content of a Service itself.
struct Front {
    cluster_ips: Vec<Ipv4Addr>,
    external_ips: Vec<Ipv4Addr>,
    ports: Vec<SlicePort>,
}

/// Some of a Service's backends.
struct Slice {
    service: ServiceId,
    backends: Vec<(Ipv4Addr, Readiness)>,
    ports: Vec<SlicePort>,
}

/// A port with its name, which connects the ports of a Service and of its slices.
struct SlicePort {
    name: String,
    protocol: Protocol,
    number: u16,
}

#[derive(Clone, Copy, PartialEq)]
enum Readiness {
    Ready,
    /// It is terminating and still serves.
    Ending,
}

impl Services {
    /// Ingests a Service or its deletion.
    pub(crate) fn update_service(&mut self, key: &Key, service: Option<&kubernetes::Service>) {
        let id = id(&key.namespace, &key.name);
        self.touched.insert(id.clone());
        match service {
            Some(service) => drop(self.fronts.insert(id, Front::new(service))),
            None => drop(self.fronts.remove(&id)),
        }
    }

    /// Ingests a slice of a Service or its deletion.
    pub(crate) fn update_slice(&mut self, key: &Key, slice: Option<&EndpointSlice>) {
        if let Some(old) = self.slices.remove(key) {
            if let Some(keys) = self.slices_of.get_mut(&old.service) {
                keys.remove(key);
                if keys.is_empty() {
                    self.slices_of.remove(&old.service);
                }
            }
            self.touched.insert(old.service);
        }
        let Some((slice, service)) = slice.and_then(|slice| Some((slice, slice.service()?))) else { return };
        let service = id(&key.namespace, service);
        self.touched.insert(service.clone());
        self.slices_of.entry(service.clone()).or_default().insert(key.clone());
        self.slices.insert(key.clone(), Slice::new(service, slice));
    }

    /// The Services that differ from the published state, by id.
    pub(crate) fn flush(&mut self, state: &NodeState) -> Vec<Delta> {
        let touched = std::mem::take(&mut self.touched).into_iter();
        let delta = |id: ServiceId| match (self.service(&id), state.services.get(&id)) {
            (Some(now), Some(given)) if now == **given => None,
            (Some(now), _) => Some(Delta::Service(id, Arc::new(now))),
            (None, Some(_)) => Some(Delta::ServiceRemoved(id)),
            (None, None) => None,
        };
        touched.filter_map(delta).collect()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let objects = self.fronts.is_empty() && self.slices.is_empty();
        objects && self.slices_of.is_empty() && self.touched.is_empty()
    }

    /// The Service, if it has an IPv4 address.
    fn service(&self, id: &ServiceId) -> Option<Service> {
        let front = self.fronts.get(id).filter(|front| !front.cluster_ips.is_empty())?;
        let keys = self.slices_of.get(id).into_iter().flatten();
        let slices: Vec<&Slice> = keys.filter_map(|key| self.slices.get(key)).collect();
        let port = |port: &SlicePort| ServicePort {
            protocol: port.protocol,
            port: port.number,
            backends: backends(&slices, port),
        };
        Some(Service {
            cluster_ips: front.cluster_ips.clone(),
            external_ips: front.external_ips.clone(),
            ports: front.ports.iter().map(port).collect(),
        })
    }
}

impl Front {
    fn new(service: &kubernetes::Service) -> Self {
        let ports = service.spec.ports.iter();
        Self {
            cluster_ips: sorted(service.cluster_ips().into_iter().filter_map(v4).collect()),
            external_ips: sorted(service.external_ips().into_iter().filter_map(v4).collect()),
            ports: ports.filter_map(|port| named(&port.name, &port.protocol, port.port)).collect(),
        }
    }
}

impl Slice {
    fn new(service: ServiceId, slice: &EndpointSlice) -> Self {
        let usable = slice.endpoints.iter().filter_map(|endpoint| {
            let readiness = match (endpoint.is_ready(), endpoint.serves_while_it_ends()) {
                (true, _) => Readiness::Ready,
                (false, true) => Readiness::Ending,
                (false, false) => return None,
            };
            Some((endpoint, readiness))
        });
        let backends = usable.flat_map(|(endpoint, readiness)| {
            let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
            addresses.map(move |address| (address, readiness))
        });
        let ports = slice.ports.iter();
        Self {
            service,
            backends: backends.collect(),
            ports: ports.filter_map(|port| named(&port.name, &port.protocol, port.port?)).collect(),
        }
    }
}

/// The backends for connections to a Service's port: the ready ones; if none is ready, those that terminate and still
/// serve, as in kube-proxy.
fn backends(slices: &[&Slice], port: &SlicePort) -> Vec<(Ipv4Addr, u16)> {
    let meant = |its: &&SlicePort| its.name == port.name && its.protocol == port.protocol;
    let with = |readiness: Readiness| {
        let of_slice = |slice: &&Slice| {
            let targets: Vec<u16> = slice.ports.iter().filter(meant).map(|port| port.number).collect();
            let backends = slice.backends.iter().filter(|(_, its)| *its == readiness);
            let to = |(address, _): &(Ipv4Addr, _)| {
                let address = *address;
                targets.iter().map(move |target| (address, *target))
            };
            backends.flat_map(to).collect::<Vec<_>>()
        };
        sorted(slices.iter().flat_map(of_slice).collect())
    };
    let ready = with(Readiness::Ready);
    if ready.is_empty() { with(Readiness::Ending) } else { ready }
}

fn id(namespace: &str, name: &str) -> ServiceId {
    ServiceId { namespace: namespace.into(), name: name.into() }
}

fn named(name: &Option<String>, protocol: &Option<String>, number: u16) -> Option<SlicePort> {
    let protocol = Protocol::from_name(protocol.as_deref().unwrap_or("TCP"))?;
    Some(SlicePort { name: name.clone().unwrap_or_default(), protocol, number })
}

fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

fn sorted<T: Ord>(mut items: Vec<T>) -> Vec<T> {
    items.sort_unstable();
    items.dedup();
    items
}
