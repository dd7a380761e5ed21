//! The sets that policies in use name, and their members.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::Key;
use tortie_api::kubernetes::Node;
use tortie_dataplane::{Delta, NodeState};
use tortie_policy::program::{Lookup, Member, SetId};
use tortie_policy::{ALL_NODES, SetSource, SubjectLabels};
use tortie_selector::Selector;

use crate::index::SelectorIndex;
use crate::keys::ByKey;
use crate::network::FlannelLeases;
use crate::nodes::{NodeSets, problem};
use crate::slab::{No, Slab};
use crate::subjects::{Backends, NamedPort, Subject, Subjects, What};

#[derive(Default)]
pub(crate) struct Sets {
    numbers: ByKey,
    table: Slab<ActiveSet>,
    by_selector: SelectorIndex,
    by_nodes: NodeSets,
    /// The set of all nodes, which is there without a policy.
    all_nodes: Option<No>,
    by_service: BTreeMap<(String, String), BTreeSet<No>>,
    slices: BTreeMap<Key, Backends>,
    slices_of_service: BTreeMap<(String, String), BTreeSet<Key>>,
    /// Sets that were added, or may have changed or been removed, since the last flush.
    dirty: BTreeSet<No>,
}

struct ActiveSet {
    id: SetId,
    source: Arc<SetSource>,
    /// The number of used policies that name it.
    references: usize,
    /// Possible differences from the published members: whether each is a member now.
    changes: BTreeMap<Member, bool>,
    /// The number of subjects that contribute a member besides the first: two pods may share an address for a moment.
    more: BTreeMap<Member, u32>,
}

/// The published members of a set, if it has been published.
type GivenOut<'a> = Option<&'a BTreeSet<Member>>;

impl Sets {
    /// With the set of all nodes ([`ALL_NODES`]), for ever.
    pub(crate) fn with_all_nodes(subjects: &mut Subjects) -> Self {
        let mut sets = Self::default();
        let all = [(ALL_NODES.clone(), Arc::new(SetSource::Nodes(Selector::all())))];
        sets.acquire(&all, subjects, &BTreeMap::new());
        sets.all_nodes = sets.number(&ALL_NODES);
        sets
    }

    /// Ingests a new subject, or a subject with new labels.
    pub(crate) fn enter(&mut self, subject: &mut Subject, state: &NodeState) {
        for no in self.by_selector.candidates(&subject.labels) {
            let Some(set) = self.table.get_mut(no).filter(|set| set.selects(&subject.labels)) else {
                continue;
            };
            set.ingest(subject, no, state.set(&set.id));
            self.dirty.insert(no);
        }
    }

    /// Removes the contributions of a subject before it is deleted or gets new labels.
    pub(crate) fn leave(&mut self, subject: &mut Subject) {
        for no in std::mem::take(&mut subject.in_sets).iter() {
            let Some(set) = self.table.get_mut(no) else { continue };
            contributed(&set.source.clone(), &subject.what, |member| set.discount(member));
            self.dirty.insert(no);
        }
    }

    /// Replaces a node, whose addresses rules may select by its labels.
    pub(crate) fn update_node(&mut self, former: Option<&Node>, node: Option<&Node>, state: &NodeState) {
        if former == node {
            return;
        }
        if let Some(former) = former {
            for no in self.by_nodes.of(former) {
                let Some(set) = self.table.get_mut(no) else { continue };
                addresses(former).for_each(|member| set.discount(member));
                self.dirty.insert(no);
            }
        }
        if let Some(node) = node {
            for no in self.by_nodes.of(node) {
                let Some(set) = self.table.get_mut(no) else { continue };
                let given = state.set(&set.id);
                addresses(node).for_each(|member| set.count(member, given));
                self.dirty.insert(no);
            }
        }
    }

    /// What is wrong with the addresses of a node that a policy selects.
    pub(crate) fn problem_of_node(&self, node: &Node) -> Option<String> {
        let own = |no| usize::from(self.all_nodes == Some(no));
        let is_named = |no: &No| self.table.get(*no).is_some_and(|set| set.references > own(*no));
        self.by_nodes.of(node).iter().any(is_named).then(|| problem(node)).flatten()
    }

    /// Ingests a slice of backends of a Service.
    pub(crate) fn update_backends(&mut self, key: &Key, backends: Option<Backends>, state: &NodeState) {
        let old = match backends.clone() {
            Some(backends) => self.slices.insert(key.clone(), backends),
            None => self.slices.remove(key),
        };
        if let Some(old) = old {
            for no in self.by_service.get(&old.service).into_iter().flatten() {
                let Some(set) = self.table.get_mut(*no) else { continue };
                backends_for(&set.source.clone(), &old, |member| set.discount(member));
                self.dirty.insert(*no);
            }
            if let Some(keys) = self.slices_of_service.get_mut(&old.service) {
                keys.remove(key);
                if keys.is_empty() {
                    self.slices_of_service.remove(&old.service);
                }
            }
        }
        let Some(new) = backends else { return };
        for no in self.by_service.get(&new.service).into_iter().flatten() {
            let Some(set) = self.table.get_mut(*no) else { continue };
            let given = state.set(&set.id);
            backends_for(&set.source.clone(), &new, |member| set.count(member, given));
            self.dirty.insert(*no);
        }
        self.slices_of_service.entry(new.service).or_default().insert(key.clone());
    }

    /// Registers one more use of these sets by a policy.
    pub(crate) fn acquire(
        &mut self,
        sets: &[(SetId, Arc<SetSource>)],
        subjects: &mut Subjects,
        nodes: &BTreeMap<String, Node>,
    ) {
        for (id, source) in sets {
            let no = self.number(id).unwrap_or_else(|| self.activate(id, source, subjects, nodes));
            if let Some(set) = self.table.get_mut(no) {
                set.references += 1;
            }
        }
    }

    /// Releases one use of these sets by a policy.
    pub(crate) fn release(&mut self, sets: &[(SetId, Arc<SetSource>)]) {
        for (id, _) in sets {
            let Some(no) = self.number(id) else { continue };
            let Some(set) = self.table.get_mut(no) else { continue };
            set.references -= 1;
            if set.references == 0 {
                self.dirty.insert(no);
            }
        }
    }

    fn number(&self, id: &SetId) -> Option<No> {
        self.numbers.get(id, |no| self.table.get(no).is_some_and(|set| set.id == *id))
    }

    /// The changes since the last flush, by id: sets that are new or have other members, then removed sets.
    pub(crate) fn flush(&mut self, subjects: &mut Subjects, state: &NodeState) -> (Vec<Delta>, Vec<Delta>) {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        let mut dirty: Vec<(SetId, No)> =
            dirty.filter_map(|no| Some((self.table.get(no)?.id.clone(), no))).collect();
        dirty.sort_unstable();
        let (mut changed, mut gone) = (Vec::new(), Vec::new());
        for (_, no) in dirty {
            let Some(set) = self.table.get_mut(no) else { continue };
            if set.references > 0 {
                changed.extend(set.delta(state));
            } else {
                let id = self.deactivate(no, subjects).filter(|id| state.sets.contains_key(id));
                gone.extend(id.map(Delta::SetRemoved));
            }
        }
        (changed, gone)
    }

    /// Whether nothing is there but the set of all nodes.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let only_nodes = |numbers: &mut dyn Iterator<Item = No>| numbers.eq(self.all_nodes);
        let kept = only_nodes(&mut self.numbers.numbers()) && only_nodes(&mut self.table.numbers());
        let backends = self.slices.is_empty() && self.slices_of_service.is_empty();
        kept && self.dirty.is_empty()
            && only_nodes(&mut self.by_nodes.numbers())
            && self.by_selector.is_empty()
            && self.by_service.is_empty()
            && backends
    }

    /// The number of sets that are evaluated for a subject with these labels.
    #[cfg(test)]
    pub(crate) fn candidates(&self, labels: &SubjectLabels) -> usize {
        self.by_selector.candidates(labels).len()
    }

    #[cfg(test)]
    pub(crate) fn knows(&self, no: No) -> bool {
        self.table.get(no).is_some()
    }

    /// Fills a set, and registers it in the indexes.
    fn activate(
        &mut self,
        id: &SetId,
        source: &Arc<SetSource>,
        subjects: &mut Subjects,
        nodes: &BTreeMap<String, Node>,
    ) -> No {
        let no = self.table.insert(ActiveSet::new(id.clone(), source.clone()));
        self.numbers.insert(id, no);
        self.dirty.insert(no);
        let Some(set) = self.table.get_mut(no) else { return no };
        match source.as_ref() {
            SetSource::Selector(selector) | SetSource::NamedPort { selector, .. } => {
                let demands = selector.restrictions();
                self.by_selector.insert(no, &demands);
                for number in subjects.candidates(&demands) {
                    if let Some(subject) = subjects.get_mut(number).filter(|it| selector.matches(&it.labels))
                    {
                        set.ingest(subject, no, None);
                    }
                }
            }
            SetSource::Nodes(selector) => {
                self.by_nodes.insert(no, selector.clone());
                let nodes = nodes.iter().filter(|(name, _)| !FlannelLeases::is_machine(name));
                let selected =
                    nodes.map(|(_, node)| node).filter(|node| selector.matches(&node.metadata.labels));
                selected.flat_map(addresses).for_each(|member| set.count(member, None));
            }
            SetSource::Service { namespace, name, .. } => {
                let service = (namespace.clone(), name.clone());
                let keys = self.slices_of_service.get(&service).into_iter().flatten();
                for slice in keys.filter_map(|key| self.slices.get(key)) {
                    backends_for(source, slice, |member| set.count(member, None));
                }
                self.by_service.entry(service).or_default().insert(no);
            }
        }
        no
    }

    /// Removes an unused set; returns its id.
    fn deactivate(&mut self, no: No, subjects: &mut Subjects) -> Option<SetId> {
        let set = self.table.remove(no)?;
        self.numbers.remove(&set.id, no);
        match set.source.as_ref() {
            SetSource::Selector(selector) | SetSource::NamedPort { selector, .. } => {
                let demands = selector.restrictions();
                self.by_selector.remove(no, &demands);
                for number in subjects.candidates(&demands) {
                    if let Some(subject) = subjects.get_mut(number) {
                        subject.in_sets.remove(no);
                    }
                }
            }
            SetSource::Nodes(_) => self.by_nodes.remove(no),
            SetSource::Service { namespace, name, .. } => {
                let service = (namespace.clone(), name.clone());
                if let Some(sets) = self.by_service.get_mut(&service) {
                    sets.remove(&no);
                    if sets.is_empty() {
                        self.by_service.remove(&service);
                    }
                }
            }
        }
        Some(set.id)
    }
}

/// The members that a node contributes.
fn addresses(node: &Node) -> impl Iterator<Item = Member> {
    node.addresses().into_iter().map(|address| Member::Net(address.into()))
}

impl ActiveSet {
    fn new(id: SetId, source: Arc<SetSource>) -> Self {
        Self { id, source, references: 0, changes: BTreeMap::new(), more: BTreeMap::new() }
    }

    /// Whether the set selects subjects with these labels.
    fn selects(&self, labels: &SubjectLabels) -> bool {
        match self.source.as_ref() {
            SetSource::Selector(selector) | SetSource::NamedPort { selector, .. } => selector.matches(labels),
            SetSource::Nodes(_) | SetSource::Service { .. } => false,
        }
    }

    /// Adds the contribution of a subject that the set selects.
    fn ingest(&mut self, subject: &mut Subject, no: No, given: GivenOut<'_>) {
        contributed(&self.source.clone(), &subject.what, |member| self.count(member, given));
        subject.in_sets.insert(no);
    }

    fn count(&mut self, member: Member, given: GivenOut<'_>) {
        let known = self.changes.get(&member).copied();
        if known.unwrap_or_else(|| given.is_some_and(|given| given.contains(&member))) {
            *self.more.entry(member).or_default() += 1;
        } else {
            self.changes.insert(member, true);
        }
    }

    fn discount(&mut self, member: Member) {
        match self.more.get_mut(&member) {
            None => drop(self.changes.insert(member, false)),
            Some(1) => drop(self.more.remove(&member)),
            Some(more) => *more -= 1,
        }
    }

    fn delta(&mut self, state: &NodeState) -> Option<Delta> {
        let changes = std::mem::take(&mut self.changes);
        let Some(given) = state.set(&self.id) else {
            let members = changes.into_iter().filter_map(|(member, is_one)| is_one.then_some(member));
            return Some(Delta::SetCreated(self.id.clone(), self.source.kind(), members.collect()));
        };
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        for (member, is_one) in changes {
            match (is_one, given.contains(&member)) {
                (true, false) => added.push(member),
                (false, true) => removed.push(member),
                _ => {}
            }
        }
        let changed = !added.is_empty() || !removed.is_empty();
        changed.then(|| Delta::SetChanged { id: self.id.clone(), added, removed })
    }
}

/// Calls `show` with each member that a selected subject contributes.
fn contributed(source: &SetSource, what: &What, mut show: impl FnMut(Member)) {
    match (source, what) {
        (SetSource::Selector(_), What::Endpoint { addresses, .. }) => {
            addresses.iter().for_each(|address| show(Member::Net(IpNet::from(*address))));
        }
        (SetSource::Selector(_), What::NetworkSet(nets)) => {
            nets.iter().for_each(|net| show(Member::Net(*net)))
        }
        (SetSource::NamedPort { protocol, name, .. }, What::Endpoint { addresses, ports }) => {
            let meant = |port: &&NamedPort| {
                port.name == *name && protocol.is_none_or(|protocol| protocol == port.protocol)
            };
            for NamedPort { protocol, port, .. } in ports.iter().filter(meant) {
                let member = |address: &IpAddr| Member::AddressPort {
                    address: *address,
                    protocol: *protocol,
                    port: *port,
                };
                addresses.iter().for_each(|address| show(member(address)));
            }
        }
        // A network declares no ports, Services consist of backends only, and nodes are no subjects.
        (SetSource::NamedPort { .. }, What::NetworkSet(_))
        | (SetSource::Service { .. } | SetSource::Nodes(_), _) => {}
    }
}

/// Calls `show` with each member that backends of the source's Service contribute.
fn backends_for(source: &SetSource, backends: &Backends, mut show: impl FnMut(Member)) {
    if matches!(source, SetSource::Service { with_ports: true, .. }) {
        for &(address, protocol, port) in &backends.backends {
            show(Member::AddressPort { address, protocol, port });
        }
    } else {
        backends.addresses.iter().for_each(|address| show(Member::Net((*address).into())));
    }
}
