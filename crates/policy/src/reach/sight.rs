//! What one cluster's policies see of each end: signatures, equal for ends that no policy can tell apart.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tortie_api::calico::PolicySpec;
use tortie_api::kubernetes::{ClusterPeer, LabelSelector};
use tortie_api::net::Direction;
use tortie_api::{Kind, Resource};
use tortie_selector::Selector;

use super::atoms::{Atom, Uses, Vocabulary};
use super::nets::NetIndex;
use crate::oracle::{Oracle, SeenPod, SeenProfile, Subject};

/// The questions that hold, by number, ascending.
pub(super) type Holding = Vec<u32>;

/// An address, as rules see it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct AddressSight {
    /// What holds of the address itself.
    pub(super) holding: Holding,
    /// What holds of each pod and network set there.
    pub(super) present: BTreeSet<Holding>,
}

/// Somebody, as policies see them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct EndSight {
    /// Whose say counts; `None` where nobody is judged.
    pub(super) judged: Option<Judged>,
    pub(super) v4: Option<AddressSight>,
    pub(super) v6: Option<AddressSight>,
    /// A node's second address, from which it reaches pods by VXLAN.
    pub(super) tunnel: Option<AddressSight>,
    /// Whether nodes reach it from that address.
    pub(super) overlaid: bool,
}

/// The policies and profiles that have a say about a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct Judged {
    pub(super) ingress: Vec<usize>,
    pub(super) egress: Vec<usize>,
    pub(super) profiles: Vec<Profile>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Profile {
    Stored(String),
    /// That of a namespace that exists.
    AllowsAll,
}

/// One cluster, with what makes looking at it fast.
pub(super) struct Sight<'a> {
    oracle: &'a Oracle<'a>,
    vocabulary: &'a Vocabulary,
    enforced: Vec<bool>,
    mentioned: Mentioned,
    nets: NetIndex<u32>,
    backends: BTreeMap<IpAddr, Vec<u32>>,
    sets: NetIndex<usize>,
    set_sights: Vec<Holding>,
    /// What pods and host endpoints with the address are.
    pods_at: HashMap<IpAddr, Vec<Holding>>,
    seen: HashMap<Appearance, Seen>,
}

/// Everything that may matter of a pod but its addresses and profiles.
type Appearance = (String, String, Vec<(String, String)>, Vec<(String, String)>, Vec<(String, u8, u16)>);

#[derive(Clone)]
struct Seen {
    holding: Holding,
    ingress: Vec<usize>,
    egress: Vec<usize>,
}

impl<'a> Sight<'a> {
    pub(super) fn new(oracle: &'a Oracle<'a>, vocabulary: &'a Vocabulary) -> Self {
        let numbered = || vocabulary.atoms.iter().zip(0u32..);
        let nets = numbered().filter_map(|(atom, number)| match atom {
            Atom::Net(net) => Some((*net, number)),
            _ => None,
        });
        let sets = oracle.network_sets().enumerate();
        let sets = sets.flat_map(|(index, (_, nets))| nets.iter().map(move |net| (*net, index)));
        let mut sight = Self {
            oracle,
            vocabulary,
            enforced: oracle.policies().map(|policy| !policy.staged).collect(),
            mentioned: Mentioned::new(oracle, vocabulary),
            nets: NetIndex::new(nets),
            backends: backends(oracle, vocabulary),
            sets: NetIndex::new(sets),
            set_sights: oracle.network_sets().map(|(set, _)| holding(vocabulary, set)).collect(),
            pods_at: HashMap::new(),
            seen: HashMap::new(),
        };
        for pod in oracle.pods() {
            let seen = sight.look(&pod).holding;
            for address in pod.addresses() {
                sight.pods_at.entry(*address).or_default().push(seen.clone());
            }
        }
        for (host, addresses) in oracle.hosts() {
            for address in addresses {
                sight.pods_at.entry(*address).or_default().push(holding(vocabulary, host));
            }
        }
        sight
    }

    pub(super) fn pod(&mut self, pod: &SeenPod<'_>) -> EndSight {
        let seen = self.look(pod);
        // Of several addresses of a family the lowest is asked about.
        let lowest = |v4: bool| pod.addresses().iter().filter(|address| address.is_ipv4() == v4).min();
        EndSight {
            judged: Some(Judged {
                ingress: seen.ingress,
                egress: seen.egress,
                profiles: profiles(self.oracle, pod.profiles()),
            }),
            v4: lowest(true).map(|address| self.address(*address)),
            v6: lowest(false).map(|address| self.address(*address)),
            tunnel: None,
            overlaid: pod.addresses().iter().any(|address| self.oracle.is_overlaid(*address)),
        }
    }

    pub(super) fn node(&self, own: &[IpAddr], tunnel: Option<IpAddr>) -> EndSight {
        let lowest = |v4: bool| own.iter().filter(|address| address.is_ipv4() == v4).min();
        EndSight {
            v4: lowest(true).map(|address| self.address(*address)),
            v6: lowest(false).map(|address| self.address(*address)),
            tunnel: tunnel.map(|address| self.address(address)),
            ..EndSight::default()
        }
    }

    pub(super) fn outside(&self, address: IpAddr) -> EndSight {
        let sight = Some(self.address(address));
        match address.is_ipv4() {
            true => EndSight { v4: sight, ..EndSight::default() },
            false => EndSight { v6: sight, ..EndSight::default() },
        }
    }

    fn address(&self, address: IpAddr) -> AddressSight {
        let mut holding: Holding = self.nets.holding(address).collect();
        holding.extend(self.backends.get(&address).into_iter().flatten());
        holding.sort_unstable();
        let pods = self.pods_at.get(&address).into_iter().flatten();
        let sets = self.sets.holding(address).filter_map(|index| self.set_sights.get(index));
        AddressSight { holding, present: pods.chain(sets).cloned().collect() }
    }

    /// What selectors say of a pod. Pods that look alike are looked at once.
    fn look(&mut self, pod: &SeenPod<'_>) -> Seen {
        let subject = pod.subject();
        let appearance = self.mentioned.appearance(subject);
        if let Some(seen) = self.seen.get(&appearance) {
            return seen.clone();
        }
        let enforced = |direction| {
            let applying = self.oracle.applying(pod, direction).into_iter();
            applying.filter(|index| self.enforced.get(*index) == Some(&true)).collect()
        };
        let seen = Seen {
            holding: holding(self.vocabulary, subject),
            ingress: enforced(Direction::Ingress),
            egress: enforced(Direction::Egress),
        };
        self.seen.insert(appearance, seen.clone());
        seen
    }
}

fn holding(vocabulary: &Vocabulary, subject: Subject<'_>) -> Holding {
    let numbered = vocabulary.atoms.iter().zip(0u32..);
    numbered.filter(|(atom, _)| atom.holds(subject) == Some(true)).map(|(_, number)| number).collect()
}

fn backends(oracle: &Oracle<'_>, vocabulary: &Vocabulary) -> BTreeMap<IpAddr, Vec<u32>> {
    let mut at: BTreeMap<IpAddr, Vec<u32>> = BTreeMap::new();
    for (atom, number) in vocabulary.atoms.iter().zip(0u32..) {
        let found: Vec<IpAddr> = match atom {
            Atom::BackendAddress { namespace, name } => oracle.backends(namespace, name).0.to_vec(),
            Atom::Backend { namespace, name, protocol, port } => {
                let ports = oracle.backends(namespace, name).1.iter();
                ports.filter(|(_, p, n)| (p, n) == (protocol, port)).map(|(address, ..)| *address).collect()
            }
            _ => continue,
        };
        for address in found {
            at.entry(address).or_default().push(number);
        }
    }
    at.values_mut().for_each(|numbers| numbers.dedup());
    at
}

fn profiles(oracle: &Oracle<'_>, names: &[String]) -> Vec<Profile> {
    let mut all = Vec::new();
    for name in names {
        match oracle.profile_of(name) {
            SeenProfile::Stored(_) => all.push(Profile::Stored(name.clone())),
            SeenProfile::Nothing => {}
            SeenProfile::AllowsAll => {
                all.push(Profile::AllowsAll);
                break;
            }
        }
    }
    all
}

/// The labels that anybody asks for: pods that differ in others only look alike.
#[derive(Default)]
struct Mentioned {
    calico: BTreeSet<String>,
    own: BTreeSet<String>,
    ports: BTreeSet<String>,
    /// A policy is not understood: what of it can be read may ask for any label.
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
                ClusterPeer::Namespaces(_) | ClusterPeer::Networks(_) => {}
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

/// What each policy and each stored profile asks, for [`Sight`]s of one vocabulary.
pub(super) struct Asked {
    /// By the policy's index; ingress, then egress.
    policies: Vec<[Uses; 2]>,
    profiles: BTreeMap<String, [Uses; 2]>,
}

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

impl Asked {
    pub(super) fn new(oracle: &Oracle<'_>, all: &[Oracle<'_>], vocabulary: &mut Vocabulary) -> Self {
        let mut of = |namespace: &str, resource: Option<&Resource>| {
            DIRECTIONS.map(|direction| match resource {
                Some(resource) => vocabulary.policy(all, namespace, resource, direction),
                None => Uses::default(),
            })
        };
        let resource = |stored: &'_ crate::oracle::Stored| stored.resource.as_ref().ok().cloned();
        let policies = oracle.policies().map(|policy| {
            of(&policy.name.namespace, resource(policy.stored).filter(|_| !policy.staged).as_ref())
        });
        let policies = policies.collect();
        let mut profiles = BTreeMap::new();
        let stored = oracle.pods().flat_map(|pod| pod.profiles().iter().cloned()).collect::<BTreeSet<_>>();
        for name in stored {
            if let SeenProfile::Stored(stored) = oracle.profile_of(&name) {
                profiles.insert(name, of("", resource(stored).as_ref()));
            }
        }
        Self { policies, profiles }
    }

    /// What all policies and profiles that have a say ask.
    pub(super) fn of(&self, judged: &Judged, direction: Direction) -> Uses {
        let (side, policies) = match direction {
            Direction::Ingress => (0, &judged.ingress),
            Direction::Egress => (1, &judged.egress),
        };
        let mut uses = Uses::default();
        let policies = policies.iter().filter_map(|index| self.policies.get(*index));
        let profiles = judged.profiles.iter().filter_map(|profile| match profile {
            Profile::Stored(name) => self.profiles.get(name),
            Profile::AllowsAll => None,
        });
        for asked in policies.chain(profiles).filter_map(|both| both.get(side)) {
            uses.add(asked);
        }
        uses
    }
}

/// Whether objects of this kind are policies.
pub(crate) fn is_policy(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::NetworkPolicy
            | Kind::GlobalNetworkPolicy
            | Kind::StagedNetworkPolicy
            | Kind::StagedGlobalNetworkPolicy
            | Kind::KubernetesNetworkPolicy
            | Kind::StagedKubernetesNetworkPolicy
            | Kind::ClusterNetworkPolicy
            | Kind::AdminNetworkPolicy
            | Kind::BaselineAdminNetworkPolicy
    )
}
