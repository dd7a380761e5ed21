//! The signature of each end for the policies of one cluster. Signatures are equal for ends that no policy can
//! distinguish.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tortie_api::Resource;
use tortie_api::calico::{EncapsulationMode, PolicySpec};
use tortie_api::kubernetes::{ClusterPeer, LabelSelector};
use tortie_api::net::{Direction, IpVersion};
use tortie_selector::Selector;

use super::applying::{PodPolicies, Policies, profiles};
use super::atoms::{Atom, Vocabulary};
use super::hosts::{HostSignature, Hosts, Interfaces};
use super::nets::NetIndex;
use super::path::{FAMILIES, family_number};
use tortie_oracle::{Oracle, SeenNode, SeenPod, Subject, Subnet, family_of};

/// The numbers of the criteria that match, ascending.
pub(super) type Holding = Vec<u32>;

/// An address, as rules see it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct AddressSignature {
    /// The criteria that match the address itself.
    pub(super) holding: Holding,
    /// The criteria that match each pod and network set there.
    pub(super) present: BTreeSet<Holding>,
}

/// The signature of an end.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct EndSignature {
    /// The policies and profiles of a pod; `None` if the end is not a pod.
    pub(super) pod_policies: Option<PodPolicies>,
    /// Its address of each family.
    pub(super) addresses: [Option<Routed>; 2],
    /// A node's tunnel address of each family, from which it reaches pods by VXLAN.
    pub(super) tunnels: [Option<AddressSignature>; 2],
    /// A node's tunnel address from which it reaches pods by IPIP.
    pub(super) ipip: Option<AddressSignature>,
    /// The subnet of its node; the same for all if encapsulation, or what depends on it, does not depend on subnets.
    pub(super) subnet: Subnet,
    /// Whether it is a node, or on one; only set if there are host endpoints.
    pub(super) anchored: bool,
    /// The host endpoints of its node.
    pub(super) interfaces: Interfaces,
    /// Whether it is a node that drops packets from its own pods to itself.
    pub(super) closed: bool,
}

/// An address, with the properties that determine the interface of packets to it and from it, and their addresses
/// there. The properties are only set if there are host endpoints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct Routed {
    pub(super) address: AddressSignature,
    /// When packets to it pass the overlay; for pods always set, because a node's packets then come from its tunnel.
    pub(super) overlaid: Overlaid,
    /// Whether packets to it keep their source.
    pub(super) pooled: bool,
    /// The source of packets from it otherwise.
    pub(super) translated: Option<AddressSignature>,
}

/// When packets to an address are encapsulated between nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Overlaid {
    #[default]
    Never,
    Always(Encapsulation),
    /// Between nodes that are not near each other.
    CrossSubnet(Encapsulation),
}

/// The form of encapsulated packets, which decides about the source of a node's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Encapsulation {
    Vxlan,
    Ipip,
}

impl EndSignature {
    /// Its address of this family.
    pub(super) fn by(&self, family: IpVersion) -> Option<&Routed> {
        self.addresses.get(family_number(family))?.as_ref()
    }

    /// Whether packets of this family can go from this end to the other.
    pub(super) fn reaches(&self, other: &Self, family: IpVersion) -> bool {
        self.by(family).is_some() && other.by(family).is_some()
    }

    /// Its node's tunnel address of this family.
    pub(super) fn tunnel(&self, family: IpVersion) -> Option<&AddressSignature> {
        self.tunnels.get(family_number(family))?.as_ref()
    }
}

/// One cluster, with indices for fast evaluation.
pub(super) struct SignatureIndex<'a> {
    oracle: &'a Oracle<'a>,
    vocabulary: &'a Vocabulary,
    counts: Vec<bool>,
    hosts: Hosts,
    mentioned: Mentioned,
    nets: NetIndex<u32>,
    /// The criteria that match single addresses: those of backends and of nodes.
    single: BTreeMap<IpAddr, Vec<u32>>,
    sets: NetIndex<usize>,
    set_signatures: Vec<Holding>,
    /// The signatures of the pods and host endpoints with the address.
    pods_at: HashMap<IpAddr, Vec<Holding>>,
    evaluated: HashMap<Appearance, EvaluatedSelectors>,
    /// Whether it makes a difference which nodes are in one subnet.
    by_subnet: bool,
}

/// All properties of a pod that may matter, except its addresses and profiles.
type Appearance = (String, String, Vec<(String, String)>, Vec<(String, String)>, Vec<(String, u8, u16)>);

#[derive(Clone)]
struct EvaluatedSelectors {
    holding: Holding,
    ingress: Vec<usize>,
    egress: Vec<usize>,
}

impl<'a> SignatureIndex<'a> {
    pub(super) fn new(oracle: &'a Oracle<'a>, vocabulary: &'a Vocabulary, policies: Policies) -> Self {
        let counts: Vec<bool> = oracle.policies().map(|policy| policies.count(&policy)).collect();
        let numbered = || vocabulary.atoms.iter().zip(0u32..);
        let nets = numbered().filter_map(|(atom, number)| match atom {
            Atom::Net(net) => Some((*net, number)),
            _ => None,
        });
        let sets = oracle.network_sets().enumerate();
        let sets = sets.flat_map(|(index, (_, nets))| nets.iter().map(move |net| (*net, index)));
        let mut signature = Self {
            oracle,
            vocabulary,
            hosts: Hosts::new(oracle, &counts),
            counts,
            mentioned: Mentioned::new(oracle, vocabulary),
            nets: NetIndex::new(nets),
            single: of_single_addresses(oracle, vocabulary),
            sets: NetIndex::new(sets),
            set_signatures: oracle.network_sets().map(|(set, _)| holding(vocabulary, set)).collect(),
            pods_at: HashMap::new(),
            evaluated: HashMap::new(),
            by_subnet: false,
        };
        for pod in oracle.pods() {
            let evaluated = signature.evaluate(&pod).holding;
            for address in pod.addresses() {
                signature.pods_at.entry(*address).or_default().push(evaluated.clone());
            }
        }
        for host in oracle.hosts() {
            for address in host.addresses() {
                signature.pods_at.entry(*address).or_default().push(holding(vocabulary, host.subject()));
            }
        }
        signature.by_subnet = oracle.has_pools_by_subnet()
            && (!signature.hosts.signatures.is_empty() || signature.has_distinct_tunnels());
        signature
    }

    /// Whether rules distinguish a node's tunnel address from its own address.
    fn has_distinct_tunnels(&self) -> bool {
        self.oracle.nodes().any(|node| {
            node.own.iter().any(|own| {
                let mut tunnels = node.vxlan.iter().copied().chain(node.ipip);
                let is_other = |tunnel: IpAddr| {
                    family_of(tunnel) == family_of(*own) && self.address(*own) != self.address(tunnel)
                };
                tunnels.any(is_other)
            })
        })
    }

    pub(super) fn pod(&mut self, pod: &SeenPod<'_>) -> EndSignature {
        let evaluated = self.evaluate(pod);
        let translated = |address| self.oracle.translated(pod.node(), address).map(|node| self.address(node));
        EndSignature {
            pod_policies: Some(PodPolicies {
                ingress: evaluated.ingress,
                egress: evaluated.egress,
                profiles: profiles(self.oracle, pod.profiles()),
            }),
            addresses: self.addresses(pod.addresses(), (pod.node(), true), translated),
            ..self.on_node(pod.node())
        }
    }

    pub(super) fn node(&self, node: SeenNode<'_>) -> EndSignature {
        let SeenNode { name, own, vxlan, ipip } = node;
        let tunnel = |family| vxlan.iter().find(|tunnel| family_of(**tunnel) == family);
        EndSignature {
            addresses: self.addresses(own, (name, false), |_| None),
            tunnels: FAMILIES.map(|family| tunnel(family).map(|address| self.address(*address))),
            ipip: ipip.map(|address| self.address(address)),
            closed: self.oracle.is_closed_to_its_pods(name),
            ..self.on_node(name)
        }
    }

    pub(super) fn outside(&self, address: IpAddr) -> EndSignature {
        EndSignature {
            addresses: self.addresses(&[address], ("", false), |_| None),
            ..EndSignature::default()
        }
    }

    /// The common part of all ends on a node.
    fn on_node(&self, node: &str) -> EndSignature {
        EndSignature {
            anchored: self.is_anchored(node),
            interfaces: self.hosts.of_node(node),
            subnet: self.oracle.subnet(node).filter(|_| self.by_subnet).cloned().unwrap_or_default(),
            ..EndSignature::default()
        }
    }

    /// If an end has several addresses of a family, the lowest is evaluated.
    fn addresses(
        &self,
        addresses: &[IpAddr],
        (node, is_pod): (&str, bool),
        translated: impl Fn(IpAddr) -> Option<AddressSignature>,
    ) -> [Option<Routed>; 2] {
        FAMILIES.map(|family| {
            let address = *addresses.iter().filter(|address| family_of(**address) == family).min()?;
            let anchored = self.is_anchored(node);
            let form = if self.oracle.has_ipip(address) { Encapsulation::Ipip } else { Encapsulation::Vxlan };
            let overlaid = match self.oracle.encapsulation(address) {
                EncapsulationMode::Never => Overlaid::Never,
                _ if !is_pod && !anchored => Overlaid::Never,
                EncapsulationMode::CrossSubnet if self.by_subnet => Overlaid::CrossSubnet(form),
                EncapsulationMode::CrossSubnet | EncapsulationMode::Always => Overlaid::Always(form),
            };
            let routed = Routed { address: self.address(address), overlaid, ..Routed::default() };
            Some(match anchored {
                false => routed,
                true => Routed {
                    pooled: self.oracle.is_pooled(address),
                    translated: translated(address),
                    ..routed
                },
            })
        })
    }

    fn is_anchored(&self, node: &str) -> bool {
        !self.hosts.signatures.is_empty() && !node.is_empty()
    }

    /// The host endpoints of the cluster, without duplicates.
    pub(super) fn into_hosts(self) -> Vec<HostSignature> {
        self.hosts.signatures
    }

    fn address(&self, address: IpAddr) -> AddressSignature {
        let mut holding: Holding = self.nets.holding(address).collect();
        holding.extend(self.single.get(&address).into_iter().flatten());
        holding.sort_unstable();
        let pods = self.pods_at.get(&address).into_iter().flatten();
        let sets = self.sets.holding(address).filter_map(|index| self.set_signatures.get(index));
        AddressSignature { holding, present: pods.chain(sets).cloned().collect() }
    }

    /// Evaluates the selectors for a pod. Pods with equal appearance are evaluated once.
    fn evaluate(&mut self, pod: &SeenPod<'_>) -> EvaluatedSelectors {
        let subject = pod.subject();
        let appearance = self.mentioned.appearance(subject);
        if let Some(evaluated) = self.evaluated.get(&appearance) {
            return evaluated.clone();
        }
        let counting = |direction| {
            let applying = self.oracle.applying(pod, direction).into_iter();
            applying.filter(|index| self.counts.get(*index) == Some(&true)).collect()
        };
        let evaluated = EvaluatedSelectors {
            holding: holding(self.vocabulary, subject),
            ingress: counting(Direction::Ingress),
            egress: counting(Direction::Egress),
        };
        self.evaluated.insert(appearance, evaluated.clone());
        evaluated
    }
}

fn holding(vocabulary: &Vocabulary, subject: Subject<'_>) -> Holding {
    let numbered = vocabulary.atoms.iter().zip(0u32..);
    numbered.filter(|(atom, _)| atom.holds(subject) == Some(true)).map(|(_, number)| number).collect()
}

fn of_single_addresses(oracle: &Oracle<'_>, vocabulary: &Vocabulary) -> BTreeMap<IpAddr, Vec<u32>> {
    let mut at: BTreeMap<IpAddr, Vec<u32>> = BTreeMap::new();
    for (atom, number) in vocabulary.atoms.iter().zip(0u32..) {
        let found: Vec<IpAddr> = match atom {
            Atom::BackendAddress { namespace, name } => oracle.backends(namespace, name).0.to_vec(),
            Atom::Backend { namespace, name, protocol, port } => {
                let ports = oracle.backends(namespace, name).1.iter();
                ports.filter(|(_, p, n)| (p, n) == (protocol, port)).map(|(address, ..)| *address).collect()
            }
            Atom::Nodes(nodes) => oracle.addresses_of_nodes(nodes).collect(),
            _ => continue,
        };
        for address in found {
            at.entry(address).or_default().push(number);
        }
    }
    at.values_mut().for_each(|numbers| numbers.dedup());
    at
}

/// The labels that selectors mention: pods that differ only in other labels have the same appearance.
#[derive(Default)]
struct Mentioned {
    calico: BTreeSet<String>,
    own: BTreeSet<String>,
    ports: BTreeSet<String>,
    /// A policy was not understood, so its readable part may mention any label.
    any: bool,
}

impl Mentioned {
    fn new(oracle: &Oracle<'_>, vocabulary: &Vocabulary) -> Self {
        let mut mentioned = Self::default();
        for atom in &vocabulary.atoms {
            match atom {
                Atom::Labels(selector) => mentioned.selector(Some(selector)),
                Atom::OwnLabels(selector) => mentioned.own(selector),
                Atom::Declares(name, ..) => drop(mentioned.ports.insert(name.clone())),
                _ => {}
            }
        }
        for policy in oracle.policies() {
            match &policy.stored.resource {
                Ok(resource) => mentioned.subject(resource),
                Err(_) => mentioned.any = true,
            }
        }
        mentioned
    }

    fn subject(&mut self, resource: &Resource) {
        match resource {
            Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
                self.calico_subject(&policy.spec);
            }
            Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
                self.calico_subject(&policy.spec);
            }
            Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
                self.own(&policy.spec.pod_selector);
            }
            Resource::ClusterPolicy(policy) => match &policy.subject {
                ClusterPeer::Pods { pods, .. } => self.own(pods),
                ClusterPeer::Namespaces(_) | ClusterPeer::Nodes(_) | ClusterPeer::Networks(_) => {}
                ClusterPeer::Unknown(_) => self.any = true,
            },
            _ => {}
        }
    }

    fn calico_subject(&mut self, spec: &PolicySpec) {
        self.selector(spec.selector.as_ref());
    }

    fn selector(&mut self, selector: Option<&Selector>) {
        self.calico.extend(selector.into_iter().flat_map(Selector::labels).map(str::to_owned));
    }

    fn own(&mut self, selector: &LabelSelector) {
        self.own.extend(selector.match_labels.keys().cloned());
        self.own.extend(selector.match_expressions.iter().map(|requirement| requirement.key.clone()));
    }

    fn appearance(&self, subject: Subject<'_>) -> Appearance {
        let of = |labels: &BTreeMap<String, String>, wanted: &BTreeSet<String>| {
            let kept = labels.iter().filter(|(name, _)| self.any || wanted.contains(*name));
            kept.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        let ports = subject.ports().filter(|(name, ..)| self.ports.contains(*name));
        let mut ports: Vec<_> =
            ports.map(|(name, protocol, port)| (name.to_owned(), protocol.0, port)).collect();
        ports.sort();
        (
            subject.namespace().to_owned(),
            subject.account().to_owned(),
            of(subject.labels(), &self.calico),
            of(subject.own_labels(), &self.own),
            ports,
        )
    }
}
