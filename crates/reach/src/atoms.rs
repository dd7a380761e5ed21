//! The criteria that rules have for the two ends of a packet and for its ports, each numbered once, and the criteria
//! that each policy uses.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipnet::IpNet;
use tortie_api::calico::{EntityRule, FailsafePort, Rule};
use tortie_api::kubernetes::{
    ClusterPeer, ClusterPolicy, ClusterPort, IntOrString, LabelSelector, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use tortie_api::net::{Direction, PortRange, Protocol};
use tortie_api::{Cidr, Port, ProtocolName, Resource};
use tortie_selector::Selector;

use super::ports::Matcher;
use tortie_oracle::{Oracle, Subject};

/// One criterion for the objects at an end of a packet, or for its address.
#[derive(Debug, Clone)]
pub(super) enum Atom {
    IsPod,
    Labels(Selector),
    Namespaces(Selector),
    Accounts(Selector),
    Account(String),
    Namespace(String),
    OwnLabels(LabelSelector),
    NamespaceLabels(LabelSelector),
    Declares(String, Protocol, u16),
    Net(IpNet),
    /// The address of a node with these labels.
    Nodes(LabelSelector),
    Backend {
        namespace: String,
        name: String,
        protocol: Protocol,
        port: u16,
    },
    BackendAddress {
        namespace: String,
        name: String,
    },
}

/// All criteria, each with a number.
#[derive(Default)]
pub(super) struct Vocabulary {
    pub(super) atoms: Vec<Atom>,
    numbers: HashMap<String, u32>,
    pub(super) matchers: Vec<Matcher>,
    matcher_numbers: HashMap<Matcher, u32>,
    named: BTreeMap<String, BTreeSet<(Protocol, u16)>>,
    backends: BTreeMap<(String, String), BTreeSet<(Protocol, u16)>>,
}

/// The criteria of one policy, or of all policies of an endpoint, in one direction.
#[derive(Debug, Clone, Default)]
pub(super) struct Uses {
    pub(super) atoms: BTreeSet<u32>,
    pub(super) matchers: BTreeSet<u32>,
}

impl Uses {
    pub(super) fn add(&mut self, other: &Self) {
        self.atoms.extend(&other.atoms);
        self.matchers.extend(&other.matchers);
    }
}

impl Vocabulary {
    /// Creates a vocabulary with the named ports of pods and host endpoints in all of these clusters.
    pub(super) fn new(oracles: &[Oracle<'_>]) -> Self {
        let mut vocabulary = Self::default();
        for oracle in oracles {
            let pods = oracle.pods().map(|pod| pod.subject());
            for subject in pods.chain(oracle.hosts().map(|host| host.subject())) {
                for (name, protocol, port) in subject.ports() {
                    if !vocabulary.named.contains_key(name) {
                        vocabulary.named.insert(name.to_owned(), BTreeSet::new());
                    }
                    vocabulary.named.entry(name.to_owned()).or_default().insert((protocol, port));
                }
            }
        }
        vocabulary.atom("pod".to_owned(), || Atom::IsPod);
        vocabulary
    }

    /// The criteria of a policy in one direction.
    pub(super) fn policy(
        &mut self,
        oracles: &[Oracle<'_>],
        namespace: &str,
        resource: &Resource,
        direction: Direction,
    ) -> Uses {
        let mut uses = Uses::default();
        let ingress = direction == Direction::Ingress;
        match resource {
            Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
                let rules = if ingress { &policy.spec.ingress } else { &policy.spec.egress };
                self.calico(oracles, namespace, rules, &mut uses);
            }
            Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
                let rules = if ingress { &policy.spec.ingress } else { &policy.spec.egress };
                self.calico(oracles, namespace, rules, &mut uses);
            }
            Resource::Profile(profile) => {
                let rules = if ingress { &profile.spec.ingress } else { &profile.spec.egress };
                self.calico(oracles, "", rules, &mut uses);
            }
            Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
                self.kubernetes(namespace, &policy.spec, direction, &mut uses);
            }
            Resource::ClusterPolicy(policy) => self.cluster(policy, direction, &mut uses),
            _ => {}
        }
        uses
    }

    /// The criteria that decide whether a port is a failsafe port.
    pub(super) fn failsafe(&mut self, ports: &[FailsafePort]) -> Uses {
        let mut uses = Uses::default();
        for FailsafePort { protocol: ProtocolName(protocol), port, net } in ports {
            let (protocol, range) = (Some(*protocol), PortRange::single(*port));
            self.matcher(Matcher::Port { source: false, protocol, range }, &mut uses);
            if let Some(Cidr(net)) = net {
                self.net(*net, &mut uses);
            }
        }
        uses
    }

    /// The criterion that decides whether a packet is of a protocol.
    pub(super) fn protocol(&mut self, protocol: Protocol) -> Uses {
        let mut uses = Uses::default();
        self.matcher(Matcher::Protocol(protocol), &mut uses);
        uses
    }

    /// The criteria for a packet that distinguish what these criteria distinguish in its reply.
    pub(super) fn before_reply(&mut self, of_reply: &Uses) -> Uses {
        let mut uses = Uses { atoms: of_reply.atoms.clone(), matchers: BTreeSet::new() };
        for matcher in self.chosen(of_reply) {
            for before in matcher.before_reply() {
                self.matcher(before, &mut uses);
            }
        }
        uses
    }

    fn chosen(&self, uses: &Uses) -> Vec<Matcher> {
        let numbered = self.matchers.iter().zip(0u32..);
        numbered.filter(|(_, number)| uses.matchers.contains(number)).map(|(matcher, _)| *matcher).collect()
    }

    fn calico(&mut self, oracles: &[Oracle<'_>], namespace: &str, rules: &[Rule], uses: &mut Uses) {
        for rule in rules {
            // Exhaustive, here and below: packets that differ in a forgotten criterion would count as
            // equal. Families are always distinguished, and no packet matches `http`.
            let Rule {
                action: _,
                ip_version: _,
                protocol,
                not_protocol,
                icmp,
                not_icmp,
                source,
                destination,
                http: _,
                metadata: _,
            } = rule;
            for ProtocolName(protocol) in [protocol, not_protocol].into_iter().flatten() {
                self.matcher(Matcher::Protocol(*protocol), uses);
            }
            for icmp in [icmp, not_icmp].into_iter().flatten() {
                self.matcher(Matcher::Icmp(icmp.icmp_type, icmp.code), uses);
            }
            let protocol = protocol.map(|ProtocolName(protocol)| protocol);
            self.entity(oracles, namespace, source, protocol, true, uses);
            self.entity(oracles, namespace, destination, protocol, false, uses);
        }
    }

    fn entity(
        &mut self,
        oracles: &[Oracle<'_>],
        namespace: &str,
        rule: &EntityRule,
        protocol: Option<Protocol>,
        source: bool,
        uses: &mut Uses,
    ) {
        let EntityRule {
            nets,
            not_nets,
            selector,
            not_selector,
            namespace_selector,
            services,
            ports,
            not_ports,
            service_accounts,
        } = rule;
        for Cidr(net) in nets.iter().chain(not_nets) {
            self.net(*net, uses);
        }
        if let Some(service) = services {
            let of = service.namespace.as_deref().unwrap_or(namespace);
            self.service(oracles, of, &service.name, uses);
        }
        for selector in [selector, not_selector].into_iter().flatten() {
            self.use_atom(format!("labels {selector}"), || Atom::Labels(selector.clone()), uses);
        }
        match namespace_selector {
            Some(selector) => {
                let atom = || Atom::Namespaces(selector.clone());
                self.use_atom(format!("namespaces {selector}"), atom, uses);
            }
            None if !namespace.is_empty() => self.namespace(namespace, uses),
            None => {}
        }
        if let Some(accounts) = service_accounts {
            for name in &accounts.names {
                self.use_atom(format!("account {name}"), || Atom::Account(name.clone()), uses);
            }
            if let Some(selector) = &accounts.selector {
                let atom = || Atom::Accounts(selector.clone());
                self.use_atom(format!("accounts {selector}"), atom, uses);
            }
        }
        for port in ports.iter().chain(not_ports) {
            match port {
                Port::Range(range) => {
                    self.matcher(Matcher::Port { source, protocol, range: *range }, uses);
                }
                Port::Named(name) => self.named_port(name, source, uses),
            }
        }
    }

    fn kubernetes(
        &mut self,
        namespace: &str,
        spec: &NetworkPolicySpec,
        direction: Direction,
        uses: &mut Uses,
    ) {
        let rules = if direction == Direction::Ingress { &spec.ingress } else { &spec.egress };
        for rule in rules {
            for peer in &rule.peers {
                self.kubernetes_peer(namespace, peer, uses);
            }
            for port in &rule.ports {
                if self.kubernetes_port(port, uses) {
                    // A named port refers to the pods that the policy selects.
                    self.own_labels(&spec.pod_selector, uses);
                    self.namespace(namespace, uses);
                }
            }
        }
    }

    fn kubernetes_peer(&mut self, namespace: &str, peer: &NetworkPolicyPeer, uses: &mut Uses) {
        if let Some(block) = &peer.ip_block {
            for Cidr(net) in std::iter::once(&block.cidr).chain(&block.except) {
                self.net(*net, uses);
            }
            return;
        }
        match &peer.namespace_selector {
            Some(selector) => self.namespace_labels(selector, uses),
            None => self.namespace(namespace, uses),
        }
        if let Some(selector) = &peer.pod_selector {
            self.own_labels(selector, uses);
        }
    }

    /// Returns whether the port is a named port.
    fn kubernetes_port(&mut self, port: &NetworkPolicyPort, uses: &mut Uses) -> bool {
        let protocol = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP"));
        if let Some(protocol) = protocol {
            self.matcher(Matcher::Protocol(protocol), uses);
        }
        match &port.port {
            None => false,
            Some(IntOrString::Number(first)) => {
                let range = PortRange { first: *first, last: port.end_port.unwrap_or(*first) };
                self.matcher(Matcher::Port { source: false, protocol, range }, uses);
                false
            }
            Some(IntOrString::Name(name)) => {
                self.named_port(name, false, uses);
                true
            }
        }
    }

    fn cluster(&mut self, policy: &ClusterPolicy, direction: Direction, uses: &mut Uses) {
        let rules = if direction == Direction::Ingress { &policy.ingress } else { &policy.egress };
        for rule in rules {
            for peer in &rule.peers {
                self.cluster_peer(peer, uses);
            }
            for port in &rule.ports {
                match port {
                    ClusterPort::Numbers(protocol, range) => {
                        self.matcher(Matcher::Protocol(*protocol), uses);
                        if let Some(range) = range {
                            let protocol = Some(*protocol);
                            self.matcher(Matcher::Port { source: false, protocol, range: *range }, uses);
                        }
                    }
                    ClusterPort::Named(name) => {
                        self.named_port(name, false, uses);
                        self.cluster_peer(&policy.subject, uses);
                    }
                    ClusterPort::Unknown(_) => {}
                }
            }
        }
    }

    fn cluster_peer(&mut self, peer: &ClusterPeer, uses: &mut Uses) {
        match peer {
            ClusterPeer::Namespaces(namespaces) => self.namespace_labels(namespaces, uses),
            ClusterPeer::Pods { namespaces, pods } => {
                self.namespace_labels(namespaces, uses);
                self.own_labels(pods, uses);
            }
            ClusterPeer::Nodes(nodes) => {
                self.use_atom(format!("nodes {nodes:?}"), || Atom::Nodes(nodes.clone()), uses);
            }
            ClusterPeer::Networks(nets) => nets.iter().for_each(|Cidr(net)| self.net(*net, uses)),
            ClusterPeer::Unknown(_) => {}
        }
    }

    fn net(&mut self, net: IpNet, uses: &mut Uses) {
        self.use_atom(format!("net {net}"), || Atom::Net(net), uses);
    }

    fn namespace(&mut self, namespace: &str, uses: &mut Uses) {
        self.use_atom(format!("namespace {namespace}"), || Atom::Namespace(namespace.to_owned()), uses);
    }

    fn own_labels(&mut self, selector: &LabelSelector, uses: &mut Uses) {
        self.use_atom(format!("own {selector:?}"), || Atom::OwnLabels(selector.clone()), uses);
    }

    fn namespace_labels(&mut self, selector: &LabelSelector, uses: &mut Uses) {
        let atom = || Atom::NamespaceLabels(selector.clone());
        self.use_atom(format!("namespace's own {selector:?}"), atom, uses);
    }

    fn named_port(&mut self, name: &str, source: bool, uses: &mut Uses) {
        for (protocol, port) in self.named.get(name).cloned().unwrap_or_default() {
            let atom = || Atom::Declares(name.to_owned(), protocol, port);
            self.use_atom(format!("declares {name} {protocol} {port}"), atom, uses);
            let (protocol, range) = (Some(protocol), PortRange::single(port));
            self.matcher(Matcher::Port { source, protocol, range }, uses);
            uses.matchers.extend(self.matcher_numbers.get(&Matcher::Port { source, protocol, range }));
        }
    }

    fn service(&mut self, oracles: &[Oracle<'_>], namespace: &str, name: &str, uses: &mut Uses) {
        let key = (namespace.to_owned(), name.to_owned());
        if !self.backends.contains_key(&key) {
            let all = oracles.iter().flat_map(|oracle| oracle.backends(namespace, name).1);
            self.backends.insert(key.clone(), all.map(|(_, protocol, port)| (*protocol, *port)).collect());
        }
        let (namespace, name) = key.clone();
        self.use_atom(format!("backend {key:?}"), || Atom::BackendAddress { namespace, name }, uses);
        for (protocol, port) in self.backends.get(&key).cloned().unwrap_or_default() {
            let (namespace, name) = key.clone();
            let atom = || Atom::Backend { namespace, name, protocol, port };
            self.use_atom(format!("backend {key:?} {protocol} {port}"), atom, uses);
            let (protocol, range) = (Some(protocol), PortRange::single(port));
            self.matcher(Matcher::Port { source: false, protocol, range }, uses);
        }
    }

    fn use_atom(&mut self, key: String, atom: impl FnOnce() -> Atom, uses: &mut Uses) {
        let number = self.atom(key, atom);
        uses.atoms.insert(number);
        // Rules distinguish pods from network sets.
        uses.atoms.insert(0);
    }

    fn atom(&mut self, key: String, atom: impl FnOnce() -> Atom) -> u32 {
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let number = u32::try_from(self.atoms.len()).unwrap_or(u32::MAX);
        self.atoms.push(atom());
        self.numbers.insert(key, number);
        number
    }

    fn matcher(&mut self, matcher: Matcher, uses: &mut Uses) {
        let next = u32::try_from(self.matchers.len()).unwrap_or(u32::MAX);
        let number = *self.matcher_numbers.entry(matcher).or_insert_with(|| {
            self.matchers.push(matcher);
            next
        });
        uses.matchers.insert(number);
    }

    /// The services that rules name.
    pub(super) fn services(&self) -> impl Iterator<Item = &(String, String)> {
        self.backends.keys()
    }
}

impl Atom {
    /// Whether it matches a pod or a network set; `None` if it is a criterion for the address.
    pub(super) fn holds(&self, subject: Subject<'_>) -> Option<bool> {
        Some(match self {
            Self::IsPod => subject.is_pod(),
            Self::Labels(selector) => selector.matches(subject.labels()),
            Self::Namespaces(selector) => subject.is_in_namespaces(selector),
            Self::Accounts(selector) => subject.has_account(selector),
            Self::Account(name) => subject.account() == name,
            Self::Namespace(name) => subject.namespace() == name,
            Self::OwnLabels(selector) => subject.bears(selector),
            Self::NamespaceLabels(selector) => subject.namespace_bears(selector),
            Self::Declares(name, protocol, port) => {
                subject.ports().any(|declared| declared == (name, *protocol, *port))
            }
            Self::Net(_) | Self::Nodes(_) | Self::Backend { .. } | Self::BackendAddress { .. } => {
                return None;
            }
        })
    }
}
