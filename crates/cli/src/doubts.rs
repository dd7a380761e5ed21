//! What was not read of manifests, or had to be assumed, and which answers it could change. All other answers are certain.
//!
//! Each doubt concerns ends of flows: it could change the verdict on a packet if it concerns the sender or the receiver. Only
//! translations depend on the question itself ([`Doubts::of_translation`]).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_api::manifest::{CouldChange, Differing, Object, Unread};
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Peer, Snapshot};
use tortie_reach::{Class, ClassKind};

use crate::output;

/// The exit code of an answer that a doubt could change.
pub(crate) const NOT_CERTAIN: u8 = 3;
/// The number of doubts that are printed.
const SHOWN: usize = 8;
/// The number of doubts that are printed for one answer.
const SHOWN_FOR_ONE: usize = 3;

/// Something that was not read, or that had to be assumed.
#[derive(Debug, Clone)]
pub(crate) struct Doubt {
    /// `file:line`.
    place: String,
    /// Kind, namespace and name, as far as they are known.
    object: String,
    /// The problem and the remedy, with the field.
    reason: String,
    could_change: CouldChange,
    /// It was not read. Otherwise something of it is assumed, and a note says so.
    is_unread: bool,
    /// `policy test`, `validate` and `apply` refuse it.
    pub(crate) is_refused: bool,
}

impl Doubt {
    pub(crate) fn of_unread(unread: &Unread) -> Self {
        let Unread { problem, more, api_version: _, kind, namespace, name, could_change, is_foreign } =
            unread;
        let own = match namespace.as_str() {
            "" => format!("{kind} {name}"),
            namespace => format!("{kind} {namespace}/{name}"),
        };
        let field = if problem.field.is_empty() { String::new() } else { format!("{}: ", problem.field) };
        let more = match more {
            0 => String::new(),
            more => format!(" (and {})", output::count(*more as u64, "further problem")),
        };
        Self {
            place: problem.origin.to_string(),
            object: if problem.object.is_empty() { own.trim().to_owned() } else { problem.object.clone() },
            reason: format!("{field}{}{more}", problem.problem),
            could_change: could_change.clone(),
            is_unread: true,
            is_refused: !is_foreign,
        }
    }

    /// An object that is given in two forms.
    pub(crate) fn of_differing(two: Differing) -> Self {
        let Differing { object, origin, problem, could_change } = two;
        Self {
            place: origin.to_string(),
            object,
            reason: format!("{problem}; remove one of them"),
            could_change,
            is_unread: false,
            is_refused: false,
        }
    }

    /// A policy of a tier that is not given.
    pub(crate) fn of_tier(policy: &Object, tier: &str) -> Self {
        let could_change = match policy.key.namespace.as_str() {
            "" => CouldChange::Everything,
            namespace => CouldChange::AtPods { namespace: namespace.to_owned() },
        };
        let reason =
            format!("spec.tier: tier {tier} is not in the files, so its position is assumed; add the tier");
        Self {
            place: policy.origin.to_string(),
            object: policy.key.to_string(),
            reason,
            could_change,
            is_unread: false,
            is_refused: false,
        }
    }

    /// Whether it could change anything.
    pub(crate) fn matters(&self) -> bool {
        self.could_change != CouldChange::Nothing
    }

    /// `file:line: object: field: problem`.
    pub(crate) fn text(&self) -> String {
        let parts = [&self.place, &self.object, &self.reason].into_iter().filter(|part| !part.is_empty());
        output::shown(&parts.map(String::as_str).collect::<Vec<_>>().join(": "))
    }

    pub(crate) fn document(&self) -> Value {
        json!({
            "place": self.place, "object": self.object, "reason": self.reason,
            "couldChange": self.could_change.word(), "concerns": self.could_change.to_string(),
        })
    }
}

/// Prints what was not read, at most some of it.
pub(crate) fn tell(doubts: &[Doubt]) {
    let unread: Vec<&Doubt> = doubts.iter().filter(|doubt| doubt.is_unread).collect();
    for doubt in unread.iter().take(SHOWN) {
        output::error_line(&format!("not read, could change {}: {}", doubt.could_change, doubt.text()));
    }
    if unread.len() > SHOWN {
        let more = output::count((unread.len() - SHOWN) as u64, "document");
        output::error_line(&format!(
            "and {more} more; -o json names each, --skip-kind and --ignore leave some out"
        ));
    }
}

/// The ends that a doubt concerns in a cluster.
#[derive(Debug)]
enum Concern {
    Nobody,
    /// Pods of these namespaces; and packets to a Service: its namespace and name.
    Pods {
        namespaces: BTreeSet<String>,
        service: Option<(String, String)>,
    },
    /// Pods of this namespace, and ends with these addresses.
    Ends {
        namespace: String,
        addresses: BTreeSet<IpAddr>,
    },
    Everybody,
}

/// One end of flows, as far as doubts concern it.
#[derive(Default)]
struct FlowEnd {
    /// The namespaces of the pods that it may be.
    namespaces: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    /// It stands for more addresses than it has.
    is_more: bool,
}

/// Doubts about the answers from one cluster.
pub(crate) struct Doubts<'a> {
    all: &'a [Doubt],
    concerns: Vec<Concern>,
    pods: BTreeMap<(String, String), BTreeSet<IpAddr>>,
    /// The namespaces of the pods with an address.
    namespaces: BTreeMap<IpAddr, BTreeSet<String>>,
    nodes: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl<'a> Doubts<'a> {
    /// These doubts, in a cluster at one or several times.
    pub(crate) fn new(all: &'a [Doubt], snapshots: &[&Snapshot]) -> Self {
        let mut doubts = Self {
            all,
            concerns: Vec::new(),
            pods: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            nodes: BTreeMap::new(),
        };
        if all.is_empty() {
            return doubts;
        }
        for snapshot in snapshots {
            doubts.add_ends(snapshot);
        }
        doubts.concerns = all.iter().map(|doubt| concern(&doubt.could_change, snapshots)).collect();
        doubts
    }

    fn add_ends(&mut self, snapshot: &Snapshot) {
        for (key, stored) in snapshot.iter() {
            match &stored.resource {
                Ok(Resource::Pod(pod)) => {
                    let own = self.pods.entry((key.namespace.clone(), key.name.clone())).or_default();
                    for address in pod.status.addresses() {
                        own.insert(address);
                        self.namespaces.entry(address).or_default().insert(key.namespace.clone());
                    }
                }
                Ok(Resource::Node(node)) => {
                    let known = [node.address().map(IpAddr::V4), node.address_v6().map(IpAddr::V6)];
                    let every = known.into_iter().flatten().chain(node.addresses());
                    self.nodes.entry(key.name.clone()).or_default().extend(every);
                }
                _ => {}
            }
        }
    }

    /// The doubts that could change the verdict on packets between these ends.
    pub(crate) fn of_flow(&self, from: &Peer, to: &Peer) -> BTreeSet<usize> {
        let (from, to) = (self.end(from), self.end(to));
        self.concerning(|concern| is_concerned(concern, &from) || is_concerned(concern, &to))
    }

    /// The doubts that could change who receives packets to an end or a Service.
    pub(crate) fn of_translation(&self, to: Option<&Peer>, service: Option<&Key>) -> BTreeSet<usize> {
        let is_node = |peer: &Peer| match peer {
            Peer::Node(_) => true,
            Peer::Address(address) => self.nodes.values().any(|of| of.contains(address)),
            Peer::Pod { .. } => false,
        };
        let is_pod = |peer: &Peer| match peer {
            // A pod in the network of its node has the node's ports.
            Peer::Pod { namespace, name } => {
                let own = self.pods.get(&(namespace.clone(), name.clone())).into_iter().flatten();
                !own.into_iter().any(|address| is_node(&Peer::Address(*address)))
            }
            Peer::Address(address) => self.namespaces.contains_key(address) && !is_node(peer),
            Peer::Node(_) => false,
        };
        self.concerning(|concern| match concern {
            Concern::Nobody | Concern::Pods { service: None, .. } => false,
            Concern::Pods { service: Some((namespace, name)), .. } => {
                to.is_some_and(|to| !is_pod(to))
                    || service.is_some_and(|key| key.namespace == *namespace && key.name == *name)
            }
            // A pod may be a backend, or have a port of its node.
            Concern::Ends { namespace, .. } => {
                to.is_some_and(is_node) || service.is_some_and(|key| key.namespace == *namespace)
            }
            Concern::Everybody => true,
        })
    }

    /// The doubts that could change verdicts with a member of a class at either end.
    pub(crate) fn of_class(&self, class: &Class) -> BTreeSet<usize> {
        if self.all.is_empty() {
            return BTreeSet::new();
        }
        let mut end = FlowEnd { is_more: class.kind == ClassKind::Outside, ..FlowEnd::default() };
        for member in &class.members {
            let FlowEnd { namespaces, addresses, .. } = self.end(member);
            end.namespaces.extend(namespaces);
            end.addresses.extend(addresses);
        }
        self.concerning(|concern| is_concerned(concern, &end))
    }

    /// The doubts that could change what is said of an object.
    pub(crate) fn of_object(&self, object: &Key) -> BTreeSet<usize> {
        self.concerning(|concern| match concern {
            Concern::Nobody => false,
            Concern::Pods { namespaces, .. } => {
                object.namespace.is_empty() || namespaces.contains(&object.namespace)
            }
            // Rules of any policy may be about these ends.
            Concern::Ends { .. } | Concern::Everybody => true,
        })
    }

    /// Whether there may be pods besides those that were read.
    pub(crate) fn may_lack_pods(&self) -> bool {
        self.concerns.iter().any(|concern| matches!(concern, Concern::Ends { .. } | Concern::Everybody))
    }

    /// All doubts that could change something.
    pub(crate) fn all(&self) -> BTreeSet<usize> {
        self.concerning(|concern| !matches!(concern, Concern::Nobody))
    }

    /// The places of doubts, for programs.
    pub(crate) fn places(&self, which: &BTreeSet<usize>) -> Value {
        self.of(which).map(|doubt| doubt.place.as_str()).collect()
    }

    /// Why an answer is not certain, for people.
    pub(crate) fn lines(&self, which: &BTreeSet<usize>) -> Vec<String> {
        let mut lines: Vec<String> = self.of(which).take(SHOWN_FOR_ONE).map(Doubt::text).collect();
        if which.len() > SHOWN_FOR_ONE {
            lines.push(format!("and {} more", which.len() - SHOWN_FOR_ONE));
        }
        lines
    }

    fn of(&self, which: &BTreeSet<usize>) -> impl Iterator<Item = &'a Doubt> {
        which.iter().filter_map(|index| self.all.get(*index))
    }

    fn concerning(&self, is: impl Fn(&Concern) -> bool) -> BTreeSet<usize> {
        self.concerns.iter().enumerate().filter(|(_, concern)| is(concern)).map(|(index, _)| index).collect()
    }

    fn end(&self, peer: &Peer) -> FlowEnd {
        match peer {
            Peer::Pod { namespace, name } => {
                let own = self.pods.get(&(namespace.clone(), name.clone())).cloned().unwrap_or_default();
                let sharing =
                    own.iter().filter_map(|address| self.namespaces.get(address)).flatten().cloned();
                FlowEnd {
                    namespaces: sharing.chain([namespace.clone()]).collect(),
                    addresses: own,
                    is_more: false,
                }
            }
            Peer::Node(name) => {
                FlowEnd { addresses: self.nodes.get(name).cloned().unwrap_or_default(), ..FlowEnd::default() }
            }
            Peer::Address(address) => FlowEnd {
                namespaces: self.namespaces.get(address).cloned().unwrap_or_default(),
                addresses: BTreeSet::from([*address]),
                is_more: false,
            },
        }
    }
}

fn is_concerned(concern: &Concern, end: &FlowEnd) -> bool {
    match concern {
        Concern::Nobody => false,
        Concern::Pods { namespaces, .. } => !end.namespaces.is_disjoint(namespaces),
        Concern::Ends { namespace, addresses } => {
            end.namespaces.contains(namespace)
                || !end.addresses.is_disjoint(addresses)
                || end.is_more && !addresses.is_empty()
        }
        Concern::Everybody => true,
    }
}

/// The ends that a document concerns in this cluster.
fn concern(could_change: &CouldChange, snapshots: &[&Snapshot]) -> Concern {
    let objects = || snapshots.iter().flat_map(|snapshot| snapshot.iter());
    match could_change {
        CouldChange::Nothing => Concern::Nobody,
        CouldChange::Everything => Concern::Everybody,
        CouldChange::AtPods { namespace } => {
            Concern::Pods { namespaces: BTreeSet::from([namespace.clone()]), service: None }
        }
        CouldChange::Service { namespace, name } => {
            let naming =
                objects().filter(|(key, stored)| key.kind.is_policy() && names(&stored.value["spec"], name));
            let namespaces: BTreeSet<String> = naming.map(|(key, _)| key.namespace.clone()).collect();
            match namespaces.contains("") {
                true => Concern::Everybody,
                false => Concern::Pods { namespaces, service: Some((namespace.clone(), name.clone())) },
            }
        }
        CouldChange::Ends { namespace, addresses } => {
            // The first two may have the labels of any namespace, and networks of the third those of its own.
            let spreads = |key: &Key| match key.kind {
                Kind::HostEndpoint | Kind::WorkloadEndpoint => true,
                Kind::NetworkSet => key.namespace == *namespace,
                _ => false,
            };
            match objects().any(|(key, _)| spreads(key)) {
                true => Concern::Everybody,
                false => Concern::Ends {
                    namespace: namespace.clone(),
                    addresses: addresses.iter().copied().collect(),
                },
            }
        }
    }
}

/// Whether a rule names a Service of this name, in whatever namespace.
fn names(value: &Value, service: &str) -> bool {
    match value {
        Value::Object(fields) => fields
            .iter()
            .any(|(field, value)| (field == "services" && value["name"] == service) || names(value, service)),
        Value::Array(items) => items.iter().any(|item| names(item, service)),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
