//! The members of each class: pods, nodes and outsiders of one cluster, or of one cluster at several times, by their
//! signatures.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;

use super::atoms::{Atom, Vocabulary};
use super::class::{Class, ClassKind, Representative};
use super::names;
use super::nets::{self, regions};
use super::signature::{EndSignature, SignatureIndex};
use tortie_oracle::{Oracle, Peer};

/// A pod's namespace and name, and its node.
type Found = ((String, String), String);

/// The classes of pods, and the number of pods without an address.
pub(super) fn of_pods(oracles: &[Oracle<'_>], signatures: &mut [SignatureIndex<'_>]) -> (Vec<Class>, usize) {
    type PodOnNode = (Vec<Option<EndSignature>>, String);
    let mut pods: BTreeMap<(String, String), PodOnNode> = BTreeMap::new();
    let mut labels = HashMap::new();
    for (world, (oracle, signature)) in oracles.iter().zip(signatures).enumerate() {
        let mut seen = BTreeSet::new();
        for pod in oracle.pods() {
            let subject = pod.subject();
            let name = (subject.namespace().to_owned(), subject.name().to_owned());
            // If a pod has several interfaces, the oracle evaluates the first one.
            if !seen.insert(name.clone()) {
                continue;
            }
            labels.entry(name.clone()).or_insert_with(|| subject.own_labels().clone());
            let entry = pods.entry(name).or_insert_with(|| (vec![None; oracles.len()], String::new()));
            entry.1 = pod.node().to_owned();
            if let Some(slot) = entry.0.get_mut(world).filter(|_| !pod.addresses().is_empty()) {
                *slot = Some(signature.pod(&pod));
            }
        }
    }
    let mut by_signature: HashMap<Vec<Option<EndSignature>>, Vec<Found>> = HashMap::new();
    let mut left_out = 0;
    for (pod, (signatures, node)) in pods {
        match signatures.iter().all(Option::is_none) {
            true => left_out += 1,
            false => by_signature.entry(signatures).or_default().push((pod, node)),
        }
    }
    let mut classes: Vec<Class> = Vec::new();
    #[expect(clippy::iter_over_hash_type, reason = "they are put in order right after")]
    for (signatures, pods) in by_signature {
        classes.push(class_of_pods(signatures, pods, &labels));
    }
    classes.sort_by(|a, b| a.pods.cmp(&b.pods));
    (classes, left_out)
}

fn class_of_pods(
    signatures: Vec<Option<EndSignature>>,
    pods: Vec<Found>,
    labels: &HashMap<(String, String), BTreeMap<String, String>>,
) -> Class {
    let peer =
        |(namespace, name): &(String, String)| Peer::Pod { namespace: namespace.clone(), name: name.clone() };
    let sample = |(pod, node): &Found| Representative { peer: peer(pod), node: node.clone() };
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
        signatures,
    }
}

pub(super) fn of_nodes(oracles: &[Oracle<'_>], signatures: &[SignatureIndex<'_>]) -> Vec<Class> {
    let mut nodes: BTreeMap<&str, Vec<Option<EndSignature>>> = BTreeMap::new();
    for (world, (oracle, signature)) in oracles.iter().zip(signatures).enumerate() {
        for node in oracle.nodes().filter(|node| !node.own.is_empty()) {
            let slots = nodes.entry(node.name).or_insert_with(|| vec![None; oracles.len()]);
            if let Some(slot) = slots.get_mut(world) {
                *slot = Some(signature.node(node));
            }
        }
    }
    let mut by_signature: BTreeMap<Vec<Option<EndSignature>>, Vec<&str>> = BTreeMap::new();
    for (name, signatures) in nodes {
        by_signature.entry(signatures).or_default().push(name);
    }
    let labels = labels_of_hosts(oracles);
    let class = |(signatures, names): (_, Vec<&str>)| {
        let peer = |name: &&str| Peer::Node((*name).to_owned());
        let sample = |name: &&str| Representative { peer: peer(name), node: (*name).to_owned() };
        Class {
            name: names::such_as(&names.iter().map(|name| labels.get(name).copied()).collect::<Vec<_>>()),
            kind: ClassKind::Nodes,
            pods: Vec::new(),
            nodes: names.iter().map(|name| (*name).to_owned()).collect(),
            members: names.iter().map(peer).collect(),
            samples: names.iter().take(2).map(sample).collect(),
            signatures,
        }
    };
    by_signature.into_iter().map(class).collect()
}

/// The labels of a host endpoint of each node that has one, because readers know nodes by them.
fn labels_of_hosts<'a>(oracles: &'a [Oracle<'_>]) -> HashMap<&'a str, &'a BTreeMap<String, String>> {
    let hosts = oracles.iter().flat_map(|oracle| oracle.hosts());
    hosts.map(|host| (host.node(), host.subject().own_labels())).collect()
}

/// One class for each region of the address space that rules and network sets distinguish.
pub(super) fn of_outsiders(
    oracles: &[Oracle<'_>],
    vocabulary: &Vocabulary,
    signatures: &[SignatureIndex<'_>],
) -> Vec<Class> {
    let mut found: BTreeMap<Vec<Option<EndSignature>>, (IpAddr, Vec<IpNet>)> = BTreeMap::new();
    for (address, net) in regions(&cuts(oracles, vocabulary), &addresses_in_use(oracles)) {
        let seen = signatures.iter().map(|signature| Some(signature.outside(address))).collect();
        found.entry(seen).or_insert_with(|| (address, Vec::new())).1.push(net);
    }
    let class = |(signatures, (address, nets)): (_, (IpAddr, Vec<IpNet>))| Class {
        name: names::of_nets(&nets),
        kind: ClassKind::Outside,
        pods: Vec::new(),
        nodes: Vec::new(),
        members: vec![Peer::Address(address)],
        samples: vec![Representative { peer: Peer::Address(address), node: String::new() }],
        signatures,
    };
    found.into_iter().map(class).collect()
}

/// Every network that may matter, and the whole address space.
fn cuts(oracles: &[Oracle<'_>], vocabulary: &Vocabulary) -> BTreeSet<IpNet> {
    let mut cuts: BTreeSet<IpNet> = vocabulary
        .atoms
        .iter()
        .filter_map(|atom| match atom {
            Atom::Net(net) => Some(*net),
            _ => None,
        })
        .collect();
    for oracle in oracles {
        cuts.extend(oracle.network_sets().flat_map(|(_, nets)| nets));
        for (namespace, name) in vocabulary.services() {
            cuts.extend(oracle.backends(namespace, name).0.iter().copied().map(IpNet::from));
        }
        for atom in &vocabulary.atoms {
            if let Atom::Nodes(nodes) = atom {
                cuts.extend(oracle.addresses_of_nodes(nodes).map(IpNet::from));
            }
        }
    }
    // Pods may have one family, and nodes both.
    let v6 =
        addresses_in_use(oracles).iter().any(IpAddr::is_ipv6) || cuts.iter().any(|net| net.addr().is_ipv6());
    cuts.extend(nets::everything(v6));
    cuts
}

/// The addresses of pods and nodes.
pub(super) fn addresses_in_use(oracles: &[Oracle<'_>]) -> BTreeSet<IpAddr> {
    let mut taken = BTreeSet::new();
    for oracle in oracles {
        taken.extend(oracle.pods().flat_map(|pod| pod.addresses().to_vec()));
        taken.extend(oracle.hosts().flat_map(|host| host.addresses().to_vec()));
        taken.extend(oracle.nodes().flat_map(|node| node.all().collect::<Vec<_>>()));
    }
    taken
}
