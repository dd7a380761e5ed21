//! Classes: pods, nodes and outsiders that no policy can tell apart.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;
use tortie_api::net::Direction;
use tortie_api::{Kind, Resource};

use super::atoms::{Atom, Vocabulary};
use super::names::{self, PodName};
use super::nets::{self, regions};
use super::ports::Ports;
use super::sight::{Asked, EndSight, Sight, is_policy};
use crate::oracle::{Oracle, Peer, Snapshot};

/// Ends of flows that no policy of the clusters can tell apart.
#[derive(Debug, Clone)]
pub struct Class {
    /// Who is in it, for a reader: `web/front-* (37)`.
    pub name: String,
    /// What they are.
    pub kind: ClassKind,
    /// The pods or nodes, or one address for all outsiders.
    pub members: Vec<Peer>,
    /// The names of those that are pods, with the workload that they belong to.
    pub(super) pods: Vec<PodName>,
    /// The node of each member; empty for outsiders.
    pub(super) nodes: Vec<String>,
    /// Those that stand for the others: two where there are two, on different nodes where there are such.
    pub(super) samples: Vec<Sample>,
    /// What each cluster sees of them; `None` where they are not in it.
    pub(super) sights: Vec<Option<EndSight>>,
}

/// What the members of a class are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ClassKind {
    /// Pods with a network of their own.
    Pods,
    /// Nodes, with the pods that use their network.
    Nodes,
    /// Addresses that no pod and no node has.
    Outside,
}

/// One that stands for its class.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) peer: Peer,
    pub(super) node: String,
}

/// The classes of one cluster, or of one before and after a change.
pub struct Classes {
    classes: Vec<Class>,
    ports: Ports,
    pub(super) asked: Vec<Asked>,
    vocabulary: Vocabulary,
    left_out: usize,
    with_hosts: bool,
}

impl Class {
    /// How many pods or nodes it has; one for outsiders.
    #[must_use]
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The namespaces of its pods; for others what they are.
    pub(super) fn place(&self) -> BTreeSet<String> {
        match self.kind {
            ClassKind::Pods => self.pods.iter().map(|(namespace, ..)| namespace.clone()).collect(),
            // Neither can be a namespace's name.
            ClassKind::Nodes => BTreeSet::from(["~nodes".to_owned()]),
            ClassKind::Outside => BTreeSet::from([format!("~{}", self.name)]),
        }
    }

    /// Whether a pod of the namespace is in it.
    #[must_use]
    pub fn is_in(&self, namespace: &str) -> bool {
        self.pods.iter().any(|(of, ..)| of == namespace)
    }
}

impl Classes {
    /// The classes of ends that no policy in any of the snapshots tells apart. Several snapshots are one cluster at
    /// several times.
    #[must_use]
    pub fn of(snapshots: &[&Snapshot]) -> Self {
        let oracles: Vec<Oracle<'_>> = snapshots.iter().map(|snapshot| Oracle::new(snapshot)).collect();
        Self::seen_by(&oracles)
    }

    fn seen_by(oracles: &[Oracle<'_>]) -> Self {
        let mut vocabulary = Vocabulary::new(oracles);
        let asked = oracles.iter().map(|oracle| Asked::new(oracle, oracles, &mut vocabulary)).collect();
        let (mut classes, left_out) = {
            let sight = |oracle| Sight::new(oracle, &vocabulary);
            let mut sights: Vec<Sight<'_>> = oracles.iter().map(sight).collect();
            let (mut classes, left_out) = of_pods(oracles, &mut sights);
            classes.extend(of_nodes(oracles, &sights));
            classes.extend(of_outsiders(oracles, &vocabulary, &sights));
            (classes, left_out)
        };
        names::give(&mut classes);
        classes.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        let ports = Ports::new(vocabulary.matchers.clone());
        let with_hosts = oracles.iter().any(|oracle| oracle.hosts().next().is_some());
        Self { classes, ports, asked, vocabulary, left_out, with_hosts }
    }

    /// The class of outsiders that an address belongs to, if no pod and no node has it; `snapshots` are those that the
    /// classes were made of.
    #[must_use]
    pub fn class_of_outsider(&self, snapshots: &[&Snapshot], address: IpAddr) -> Option<usize> {
        let oracles: Vec<Oracle<'_>> = snapshots.iter().map(|snapshot| Oracle::new(snapshot)).collect();
        if taken(&oracles).contains(&address) {
            return None;
        }
        let sight = |oracle| Some(Sight::new(oracle, &self.vocabulary).outside(address));
        let seen: Vec<Option<EndSight>> = oracles.iter().map(sight).collect();
        self.classes.iter().position(|class| class.kind == ClassKind::Outside && class.sights == seen)
    }

    /// The classes: pods by name, then nodes, then outsiders.
    #[must_use]
    pub fn all(&self) -> &[Class] {
        &self.classes
    }

    /// The classes of protocols and ports.
    #[must_use]
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Whether there are host endpoints. What they say on the way of a packet is not part of verdicts between classes.
    #[must_use]
    pub fn with_hosts(&self) -> bool {
        self.with_hosts
    }

    /// Whether some pods have addresses of both families; between such pods IPv4 is asked about.
    #[must_use]
    pub fn dual_stack(&self) -> bool {
        let sights = self.classes.iter().flat_map(|class| &class.sights).flatten();
        sights.into_iter().any(|sight| sight.v4.is_some() && sight.v6.is_some())
    }

    /// How many pairs there are of one of the first class and another of the second; a node and a pod of its own are
    /// none where the node sends.
    pub(super) fn pairs(&self, from: usize, to: usize) -> usize {
        let (Some(sender), Some(receiver)) = (self.classes.get(from), self.classes.get(to)) else { return 0 };
        let all = sender.count() * receiver.count();
        match (sender.kind, receiver.kind) {
            _ if from == to => all - sender.count(),
            (ClassKind::Nodes, ClassKind::Pods) => {
                all - receiver.nodes.iter().filter(|node| sender.nodes.contains(node)).count()
            }
            _ => all,
        }
    }

    /// How many pods have no address yet, and are in no class.
    #[must_use]
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// The class that an end of a flow belongs to.
    #[must_use]
    pub fn class_of(&self, peer: &Peer) -> Option<usize> {
        self.classes.iter().position(|class| class.members.contains(peer))
    }

    /// Whether one of these policies has a say about the class in the world of that number.
    pub(crate) fn has_say(
        &self,
        class: &Class,
        world: usize,
        policies: &[BTreeSet<usize>],
        direction: Direction,
    ) -> bool {
        let judged = class.sights.get(world).and_then(Option::as_ref).and_then(|sight| sight.judged.as_ref());
        let Some((judged, policies)) = judged.zip(policies.get(world)) else { return false };
        let applying = if direction == Direction::Ingress { &judged.ingress } else { &judged.egress };
        applying.iter().any(|index| policies.contains(index))
    }

    /// The same cluster with those only that stand for their class, and whoever shares an address with them. Verdicts
    /// on them are the verdicts on all.
    #[must_use]
    pub fn reduced(&self, snapshot: &Snapshot) -> Snapshot {
        let samples = self.classes.iter().flat_map(|class| &class.samples);
        let mut pods: BTreeSet<(String, String)> = BTreeSet::new();
        for sample in samples {
            if let Peer::Pod { namespace, name } = &sample.peer {
                pods.insert((namespace.clone(), name.clone()));
            }
        }
        pods.extend(sharing(snapshot, &pods));
        snapshot.only(|key, stored| match key.kind {
            Kind::Pod => pods.contains(&(key.namespace.clone(), key.name.clone())),
            Kind::WorkloadEndpoint => match &stored.resource {
                Ok(Resource::WorkloadEndpoint(endpoint)) => {
                    pods.contains(&(key.namespace.clone(), endpoint.spec.pod.clone()))
                }
                _ => false,
            },
            kind => is_policy(kind) || !matches!(kind, Kind::NodeReport | Kind::IpamBlock | Kind::IpamHandle),
        })
    }
}

/// The pods that share an address with one of these.
fn sharing(snapshot: &Snapshot, pods: &BTreeSet<(String, String)>) -> BTreeSet<(String, String)> {
    let mut at: BTreeMap<IpAddr, BTreeSet<(String, String)>> = BTreeMap::new();
    for (key, stored) in snapshot.iter() {
        match &stored.resource {
            Ok(Resource::WorkloadEndpoint(endpoint)) => {
                for net in &endpoint.spec.ip_networks {
                    let pod = (key.namespace.clone(), endpoint.spec.pod.clone());
                    at.entry(net.addr()).or_default().insert(pod);
                }
            }
            Ok(Resource::Pod(pod)) => {
                if let Some(address) = pod.status.pod_ip {
                    at.entry(address).or_default().insert((key.namespace.clone(), key.name.clone()));
                }
            }
            _ => {}
        }
    }
    at.into_values()
        .filter(|there| there.len() > 1 && there.iter().any(|pod| pods.contains(pod)))
        .flatten()
        .collect()
}

/// A pod's namespace and name, and its node.
type Found = ((String, String), String);

/// The classes of pods, and how many pods have no address.
fn of_pods(oracles: &[Oracle<'_>], sights: &mut [Sight<'_>]) -> (Vec<Class>, usize) {
    type Place = (Vec<Option<EndSight>>, String);
    let mut pods: BTreeMap<(String, String), Place> = BTreeMap::new();
    let mut labels = HashMap::new();
    for (world, (oracle, sight)) in oracles.iter().zip(sights).enumerate() {
        let mut seen = BTreeSet::new();
        for pod in oracle.pods() {
            let subject = pod.subject();
            let name = (subject.namespace().to_owned(), subject.name().to_owned());
            // Of several interfaces the oracle asks about the first.
            if !seen.insert(name.clone()) {
                continue;
            }
            labels.entry(name.clone()).or_insert_with(|| subject.own_labels().clone());
            let place = pods.entry(name).or_insert_with(|| (vec![None; oracles.len()], String::new()));
            place.1 = pod.node().to_owned();
            if let Some(slot) = place.0.get_mut(world).filter(|_| !pod.addresses().is_empty()) {
                *slot = Some(sight.pod(&pod));
            }
        }
    }
    let mut by_sight: HashMap<Vec<Option<EndSight>>, Vec<Found>> = HashMap::new();
    let mut left_out = 0;
    for (pod, (sights, node)) in pods {
        match sights.iter().all(Option::is_none) {
            true => left_out += 1,
            false => by_sight.entry(sights).or_default().push((pod, node)),
        }
    }
    let mut classes: Vec<Class> = Vec::new();
    #[expect(clippy::iter_over_hash_type, reason = "they are put in order right after")]
    for (sights, pods) in by_sight {
        classes.push(class_of_pods(sights, pods, &labels));
    }
    classes.sort_by(|a, b| a.pods.cmp(&b.pods));
    (classes, left_out)
}

fn class_of_pods(
    sights: Vec<Option<EndSight>>,
    pods: Vec<Found>,
    labels: &HashMap<(String, String), BTreeMap<String, String>>,
) -> Class {
    let peer =
        |(namespace, name): &(String, String)| Peer::Pod { namespace: namespace.clone(), name: name.clone() };
    let sample = |(pod, node): &Found| Sample { peer: peer(pod), node: node.clone() };
    let first = pods.first();
    let other = pods.iter().skip(1).find(|(_, node)| first.is_some_and(|(_, known)| known != node));
    let samples = first.into_iter().chain(other.or(pods.get(1))).map(sample).collect();
    let name = |(pod, _): &Found| (pod.0.clone(), names::workload(&pod.1, labels.get(pod)), pod.1.clone());
    Class {
        name: names::such_as(&pods.iter().map(|(pod, _)| labels.get(pod)).collect::<Vec<_>>()),
        kind: ClassKind::Pods,
        pods: pods.iter().map(name).collect(),
        nodes: pods.iter().map(|(_, node)| node.clone()).collect(),
        members: pods.iter().map(|(pod, _)| peer(pod)).collect(),
        samples,
        sights,
    }
}

fn of_nodes(oracles: &[Oracle<'_>], sights: &[Sight<'_>]) -> Vec<Class> {
    let mut nodes: BTreeMap<&str, Vec<Option<EndSight>>> = BTreeMap::new();
    for (world, (oracle, sight)) in oracles.iter().zip(sights).enumerate() {
        for (name, own, tunnel) in oracle.nodes().filter(|(_, own, _)| !own.is_empty()) {
            let slots = nodes.entry(name).or_insert_with(|| vec![None; oracles.len()]);
            if let Some(slot) = slots.get_mut(world) {
                *slot = Some(sight.node(own, tunnel));
            }
        }
    }
    let mut by_sight: BTreeMap<Vec<Option<EndSight>>, Vec<&str>> = BTreeMap::new();
    for (name, sights) in nodes {
        by_sight.entry(sights).or_default().push(name);
    }
    let class = |(sights, names): (_, Vec<&str>)| {
        let peer = |name: &&str| Peer::Node((*name).to_owned());
        let sample = |name: &&str| Sample { peer: peer(name), node: (*name).to_owned() };
        Class {
            name: String::new(),
            kind: ClassKind::Nodes,
            pods: Vec::new(),
            nodes: names.iter().map(|name| (*name).to_owned()).collect(),
            members: names.iter().map(peer).collect(),
            samples: names.iter().take(2).map(sample).collect(),
            sights,
        }
    };
    by_sight.into_iter().map(class).collect()
}

/// One class for each region of the address space that rules and network sets tell from others.
fn of_outsiders(oracles: &[Oracle<'_>], vocabulary: &Vocabulary, sights: &[Sight<'_>]) -> Vec<Class> {
    let mut found: BTreeMap<Vec<Option<EndSight>>, (IpAddr, Vec<IpNet>)> = BTreeMap::new();
    for (address, net) in regions(&cuts(oracles, vocabulary), &taken(oracles)) {
        let seen = sights.iter().map(|sight| Some(sight.outside(address))).collect();
        found.entry(seen).or_insert_with(|| (address, Vec::new())).1.push(net);
    }
    let class = |(sights, (address, nets)): (_, (IpAddr, Vec<IpNet>))| Class {
        name: names::of_nets(&nets),
        kind: ClassKind::Outside,
        pods: Vec::new(),
        nodes: Vec::new(),
        members: vec![Peer::Address(address)],
        samples: vec![Sample { peer: Peer::Address(address), node: String::new() }],
        sights,
    };
    found.into_iter().map(class).collect()
}

/// Every network that may matter, and the whole.
fn cuts(oracles: &[Oracle<'_>], vocabulary: &Vocabulary) -> BTreeSet<IpNet> {
    let mut cuts: BTreeSet<IpNet> = vocabulary
        .atoms
        .iter()
        .filter_map(|atom| match atom {
            Atom::Net(net) => Some(*net),
            _ => None,
        })
        .collect();
    let mut v6 = false;
    for oracle in oracles {
        cuts.extend(oracle.network_sets().flat_map(|(_, nets)| nets));
        for (namespace, name) in vocabulary.services() {
            cuts.extend(oracle.backends(namespace, name).0.iter().copied().map(IpNet::from));
        }
        v6 |= oracle.pods().any(|pod| pod.addresses().iter().any(IpAddr::is_ipv6));
    }
    v6 |= cuts.iter().any(|net| net.addr().is_ipv6());
    cuts.extend(nets::everything(v6));
    cuts
}

/// The addresses of pods and nodes.
fn taken(oracles: &[Oracle<'_>]) -> BTreeSet<IpAddr> {
    let mut taken = BTreeSet::new();
    for oracle in oracles {
        taken.extend(oracle.pods().flat_map(|pod| pod.addresses().to_vec()));
        taken.extend(oracle.hosts().flat_map(|(_, addresses)| addresses.to_vec()));
        taken.extend(oracle.nodes().flat_map(|(_, own, tunnel)| own.iter().copied().chain(tunnel)));
    }
    taken
}
