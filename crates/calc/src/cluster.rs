//! What the cluster says, as far as a node's state depends on it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use serde::Deserialize;
use serde_json::Value;
use tortie_api::calico::{IpPool, WorkloadEndpointSpec};
use tortie_api::kubernetes::Node;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Network, Resource};
use tortie_ipam::Block;
use tortie_policy::{OwnLabels, SubjectLabels};

use crate::Finding;

/// A pod's interface, with the labels that selectors see.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KnownEndpoint {
    pub(crate) spec: WorkloadEndpointSpec,
    pub(crate) labels: SubjectLabels,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ports: Vec<NamedPort>,
}

/// A network set, with the labels that selectors see.
#[derive(Debug, Clone, PartialEq)]
struct KnownNetworkSet {
    labels: SubjectLabels,
    nets: Vec<IpNet>,
}

impl KnownNetworkSet {
    fn as_subject(&self) -> Subject<'_> {
        Subject::NetworkSet { labels: &self.labels, nets: &self.nets }
    }
}

/// Some of the backends of a Service.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Backends {
    pub(crate) namespace: String,
    pub(crate) service: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) backends: Vec<(IpAddr, Protocol, u16)>,
}

/// Whatever may contribute to a set.
#[derive(Clone, Copy)]
pub(crate) enum Subject<'a> {
    Endpoint(&'a KnownEndpoint),
    NetworkSet { labels: &'a SubjectLabels, nets: &'a [IpNet] },
    Backends(&'a Backends),
}

/// A port that an endpoint declares by name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedPort {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

#[derive(Default)]
pub(crate) struct Cluster {
    namespaces: BTreeMap<String, Arc<OwnLabels>>,
    service_accounts: BTreeMap<(String, String), Arc<OwnLabels>>,
    /// The labels that each profile gives its endpoints.
    profile_labels: BTreeMap<String, Arc<OwnLabels>>,
    endpoints: BTreeMap<Key, KnownEndpoint>,
    network_sets: BTreeMap<Key, KnownNetworkSet>,
    backends: BTreeMap<Key, Backends>,
    /// Endpoints that are gone, until the next flush has said so.
    departed: BTreeMap<Key, KnownEndpoint>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) pools: BTreeMap<String, IpPool>,
    /// The node of each block.
    pub(crate) blocks: BTreeMap<Ipv4Net, String>,
    problems: BTreeMap<Key, String>,
}

impl Cluster {
    /// Takes in a namespace, service account, profile, network set, endpoint or slice of a Service's backends; says which
    /// subjects may have changed by it.
    pub(crate) fn update_labels(&mut self, key: &Key, value: Option<&Value>) -> Vec<Key> {
        let resource = self.read(key, value);
        match key.kind {
            Kind::Namespace => {
                match resource {
                    Some(Resource::Namespace(namespace)) => {
                        self.namespaces.insert(key.name.clone(), namespace.metadata.labels.into());
                    }
                    _ => drop(self.namespaces.remove(&key.name)),
                }
                let mut changed = self.relabel(|endpoint_key, _| endpoint_key.namespace == key.name);
                changed.extend(self.relabel_network_sets(&key.name));
                changed
            }
            Kind::Profile => {
                match resource {
                    Some(Resource::Profile(profile)) => {
                        self.profile_labels.insert(key.name.clone(), profile.spec.labels_to_apply.into());
                    }
                    _ => drop(self.profile_labels.remove(&key.name)),
                }
                self.relabel(|_, endpoint| endpoint.spec.profiles.contains(&key.name))
            }
            Kind::NetworkSet | Kind::GlobalNetworkSet => {
                match resource {
                    Some(Resource::NetworkSet(set) | Resource::GlobalNetworkSet(set)) => {
                        let mut nets: Vec<IpNet> = set.spec.nets.iter().map(|Network(net)| *net).collect();
                        nets.sort_unstable();
                        nets.dedup();
                        let labels = SubjectLabels {
                            own: set.metadata.labels.into(),
                            namespace: key.namespace.clone(),
                            namespace_labels: self.namespaces.get(&key.namespace).cloned(),
                            ..SubjectLabels::default()
                        };
                        self.network_sets.insert(key.clone(), KnownNetworkSet { labels, nets });
                    }
                    _ => drop(self.network_sets.remove(key)),
                }
                vec![key.clone()]
            }
            Kind::EndpointSlice => {
                match resource {
                    Some(Resource::EndpointSlice(slice)) => {
                        let backends = Backends {
                            namespace: key.namespace.clone(),
                            service: slice.service().unwrap_or_default().to_owned(),
                            addresses: slice.addresses().collect(),
                            backends: slice.backends().collect(),
                        };
                        self.backends.insert(key.clone(), backends);
                    }
                    _ => drop(self.backends.remove(key)),
                }
                vec![key.clone()]
            }
            Kind::ServiceAccount => {
                let id = (key.namespace.clone(), key.name.clone());
                match resource {
                    Some(Resource::ServiceAccount(account)) => {
                        self.service_accounts.insert(id, account.metadata.labels.into());
                    }
                    _ => drop(self.service_accounts.remove(&id)),
                }
                self.relabel(|endpoint_key, endpoint| {
                    endpoint_key.namespace == key.namespace && endpoint.spec.service_account_name == key.name
                })
            }
            _ => {
                match resource {
                    Some(Resource::WorkloadEndpoint(endpoint)) => {
                        let own = endpoint.metadata.labels.into();
                        let known = self.known(&key.namespace, endpoint.spec, own);
                        self.departed.remove(key);
                        self.endpoints.insert(key.clone(), known);
                    }
                    _ => {
                        if let Some(gone) = self.endpoints.remove(key) {
                            self.departed.insert(key.clone(), gone);
                        }
                    }
                }
                vec![key.clone()]
            }
        }
    }

    /// Takes in a node, pool or block.
    pub(crate) fn update_network(&mut self, key: &Key, value: Option<&Value>) {
        if key.kind == Kind::IpamBlock {
            return self.update_block(key, value);
        }
        match (key.kind, self.read(key, value)) {
            (Kind::Node, Some(Resource::Node(node))) => drop(self.nodes.insert(key.name.clone(), node)),
            (Kind::Node, _) => drop(self.nodes.remove(&key.name)),
            (_, Some(Resource::IpPool(pool))) => drop(self.pools.insert(key.name.clone(), pool)),
            (_, _) => drop(self.pools.remove(&key.name)),
        }
    }

    fn update_block(&mut self, key: &Key, value: Option<&Value>) {
        self.problems.remove(key);
        let Ok(cidr) = key.name.parse::<Ipv4Net>() else {
            if value.is_some() {
                self.problems.insert(key.clone(), "its name is no IPv4 network; it has no route".to_owned());
            }
            return;
        };
        match value.map(Block::deserialize) {
            Some(Ok(block)) if !block.deleted => match block.node() {
                Some(node) => drop(self.blocks.insert(cidr, node.to_owned())),
                None => drop(self.blocks.remove(&cidr)),
            },
            Some(Err(error)) => {
                self.problems.insert(key.clone(), format!("{error}; it has no route"));
                self.blocks.remove(&cidr);
            }
            _ => drop(self.blocks.remove(&cidr)),
        }
    }

    /// Every endpoint of the cluster, with its key.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (&Key, &KnownEndpoint)> {
        self.endpoints.iter()
    }

    /// Whatever may contribute to a set, with its key.
    pub(crate) fn subjects(&self) -> impl Iterator<Item = (&Key, Subject<'_>)> {
        let endpoints = self.endpoints.iter().map(|(key, endpoint)| (key, Subject::Endpoint(endpoint)));
        let sets = self.network_sets.iter().map(|(key, set)| (key, set.as_subject()));
        let backends = self.backends.iter().map(|(key, backends)| (key, Subject::Backends(backends)));
        endpoints.chain(sets).chain(backends)
    }

    /// The subject, if it is there.
    pub(crate) fn subject(&self, key: &Key) -> Option<Subject<'_>> {
        match key.kind {
            Kind::EndpointSlice => self.backends.get(key).map(Subject::Backends),
            Kind::WorkloadEndpoint => self.endpoints.get(key).map(Subject::Endpoint),
            _ => self.network_sets.get(key).map(KnownNetworkSet::as_subject),
        }
    }

    /// The endpoint, if it is there.
    pub(crate) fn endpoint(&self, key: &Key) -> Option<&KnownEndpoint> {
        self.endpoints.get(key)
    }

    /// The endpoint as it was, if it has gone since the last flush.
    pub(crate) fn departed(&self, key: &Key) -> Option<&KnownEndpoint> {
        self.departed.get(key)
    }

    pub(crate) fn forget_departed(&mut self) {
        self.departed.clear();
    }

    pub(crate) fn namespace_exists(&self, name: &str) -> bool {
        self.namespaces.contains_key(name)
    }

    pub(crate) fn findings(&self) -> impl Iterator<Item = Finding> {
        self.problems.iter().map(|(key, problem)| Finding { key: key.clone(), problem: problem.clone() })
    }

    fn read(&mut self, key: &Key, value: Option<&Value>) -> Option<Resource> {
        self.problems.remove(key);
        let (resource, problems) = Resource::read_what_can_be(key, value?);
        if !problems.is_empty() {
            let instead = match &resource {
                Some(_) => "what cannot be read is left out",
                None => "it is treated as if it were not there",
            };
            self.problems.insert(key.clone(), format!("{}; {instead}", tortie_policy::in_words(&problems)));
        }
        resource
    }

    fn relabel(&mut self, concerned: impl Fn(&Key, &KnownEndpoint) -> bool) -> Vec<Key> {
        let keys: Vec<Key> = self
            .endpoints
            .iter()
            .filter(|(key, endpoint)| concerned(key, endpoint))
            .map(|(key, _)| key.clone())
            .collect();
        for key in &keys {
            if let Some(endpoint) = self.endpoints.remove(key) {
                let known = self.known(&key.namespace, endpoint.spec, endpoint.labels.own);
                self.endpoints.insert(key.clone(), known);
            }
        }
        keys
    }

    fn relabel_network_sets(&mut self, namespace: &str) -> Vec<Key> {
        let concerned =
            self.network_sets.keys().filter(|key| key.kind == Kind::NetworkSet && key.namespace == namespace);
        let keys: Vec<Key> = concerned.cloned().collect();
        let labels = self.namespaces.get(namespace).cloned();
        for key in &keys {
            if let Some(set) = self.network_sets.get_mut(key) {
                set.labels.namespace_labels.clone_from(&labels);
            }
        }
        keys
    }

    fn known(&self, namespace: &str, spec: WorkloadEndpointSpec, own: Arc<OwnLabels>) -> KnownEndpoint {
        let account = (namespace.to_owned(), spec.service_account_name.clone());
        let given = spec.profiles.iter().filter_map(|profile| self.profile_labels.get(profile).cloned());
        let labels = SubjectLabels {
            is_pod: true,
            own,
            namespace: namespace.to_owned(),
            namespace_labels: self.namespaces.get(namespace).cloned(),
            service_account_labels: self.service_accounts.get(&account).cloned(),
            service_account: account.1,
            profiles: given.collect(),
        };
        let mut addresses: Vec<IpAddr> = spec.ip_networks.iter().map(IpNet::addr).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let ports = spec.ports.iter().filter(|port| !port.name.is_empty()).filter_map(|port| {
            let protocol = Protocol::from_name(&port.protocol)?;
            Some(NamedPort { name: port.name.clone(), protocol, port: port.port })
        });
        KnownEndpoint { ports: ports.collect(), spec, labels, addresses }
    }
}
