//! The subjects of selectors: pods' interfaces, host endpoints and network sets, with their labels and the sources of
//! these labels.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::calico::{EndpointPort, HostEndpointSpec, WorkloadEndpointSpec};
use tortie_api::kubernetes::EndpointSlice;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_policy::{OwnLabels, SubjectLabels};
use tortie_selector::Restrictions;

use crate::index::LabelIndex;
use crate::keys::{ByKey, KeyRef, SharedKey};
use crate::local::{LocalEndpoint, LocalId};
use crate::slab::{No, Numbers, Slab};

/// A pod's interface, a host endpoint or a network set.
pub(crate) struct Subject {
    key: SharedKey,
    pub(crate) labels: SubjectLabels,
    pub(crate) what: What,
    /// The sources of its labels: its namespace, its service account, then its profiles in order.
    groups: Box<[No]>,
    /// The active sets that it contributes to.
    pub(crate) in_sets: Numbers,
    /// The properties that only the endpoint's own node needs.
    pub(crate) local: Option<Box<LocalEndpoint>>,
}

/// The contribution of a subject to sets.
#[derive(PartialEq)]
pub(crate) enum What {
    Endpoint { addresses: Box<[IpAddr]>, ports: Box<[NamedPort]> },
    NetworkSet(Box<[IpNet]>),
}

impl Subject {
    /// Whether another version of the same object is the same subject. What it inherits from its groups is not compared.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let Self { key: _, labels, what, groups, in_sets: _, local } = self;
        let local = local.as_ref().map(|local| (&local.id, &local.kind));
        let others = other.local.as_ref().map(|local| (&local.id, &local.kind));
        labels.own == other.labels.own && *what == other.what && *groups == other.groups && local == others
    }

    /// The sources of its labels; for a pod, also the sources of its profiles.
    pub(crate) fn groups(&self) -> &[No] {
        &self.groups
    }

    /// Its properties as an endpoint of this node, and its addresses.
    pub(crate) fn local_endpoint(&self) -> Option<(&LocalEndpoint, &[IpAddr])> {
        match (&self.local, &self.what) {
            (Some(local), What::Endpoint { addresses, .. }) => Some((local, addresses)),
            _ => None,
        }
    }
}

impl What {
    fn endpoint<'a>(
        addresses: impl Iterator<Item = IpAddr>,
        ports: impl Iterator<Item = &'a EndpointPort>,
    ) -> Self {
        let mut addresses: Vec<IpAddr> = addresses.collect();
        addresses.sort_unstable();
        addresses.dedup();
        let named = ports.filter(|port| !port.name.is_empty()).filter_map(|port| {
            let protocol = Protocol::from_name(&port.protocol)?;
            Some(NamedPort { name: port.name.clone(), protocol, port: port.port })
        });
        Self::Endpoint { addresses: addresses.into(), ports: named.collect() }
    }
}

/// A port that an endpoint declares by name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedPort {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

/// Some of the backends of a Service.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Backends {
    /// Namespace and name.
    pub(crate) service: (String, String),
    pub(crate) addresses: Box<[IpAddr]>,
    pub(crate) backends: Box<[(IpAddr, Protocol, u16)]>,
}

impl Backends {
    pub(crate) fn new(namespace: &str, slice: &EndpointSlice) -> Self {
        Self {
            service: (namespace.to_owned(), slice.service().unwrap_or_default().to_owned()),
            addresses: slice.addresses().collect(),
            backends: slice.backends().collect(),
        }
    }
}

/// A namespace, service account or profile that is known or has members.
struct Group {
    key: SharedKey,
    /// Its labels; `None` if it does not exist.
    labels: Option<OwnLabels>,
    members: Numbers,
}

#[derive(Default)]
pub(crate) struct Subjects {
    numbers: ByKey,
    table: Slab<Subject>,
    /// The subjects by their own labels.
    by_own: LabelIndex,
    group_numbers: ByKey,
    groups: Slab<Group>,
    /// The groups by their labels.
    by_group: LabelIndex,
    /// The subjects' own labels.
    labels: SharedLabels,
    /// The subjects that are endpoints of this node. Two can have one id only if an object has another's name.
    local: ByKey,
}

impl Subjects {
    pub(crate) fn get(&self, no: No) -> Option<&Subject> {
        self.table.get(no)
    }

    pub(crate) fn get_mut(&mut self, no: No) -> Option<&mut Subject> {
        self.table.get_mut(no)
    }

    pub(crate) fn number(&self, key: &Key) -> Option<No> {
        let key = KeyRef::from(key);
        self.numbers.get(key, |no| self.get(no).is_some_and(|subject| subject.key.borrowed() == key))
    }

    /// The addresses of a known endpoint.
    pub(crate) fn addresses_of(&self, key: &Key) -> Vec<IpAddr> {
        match self.number(key).and_then(|no| self.get(no)).map(|subject| &subject.what) {
            Some(What::Endpoint { addresses, .. }) => addresses.to_vec(),
            _ => Vec::new(),
        }
    }

    /// The addresses of all endpoints, of pods and of hosts.
    pub(crate) fn addresses_of_endpoints(&self) -> impl Iterator<Item = (&SharedKey, IpAddr)> {
        let all = self.table.numbers().filter_map(|no| self.get(no));
        all.flat_map(|Subject { key, what, .. }| {
            let addresses = match what {
                What::Endpoint { addresses, .. } => &addresses[..],
                What::NetworkSet(_) => &[],
            };
            addresses.iter().map(move |address| (key, *address))
        })
    }

    /// Reads an endpoint as a subject, which is not in the indexes yet.
    pub(crate) fn endpoint(
        &mut self,
        key: &Key,
        own: OwnLabels,
        spec: WorkloadEndpointSpec,
        node: &str,
    ) -> Subject {
        let (namespace, key) = self.namespace(key);
        let name = &spec.service_account_name;
        let account = self.group(KeyRef { kind: Kind::ServiceAccount, namespace: &key.namespace, name });
        let mut groups = Vec::with_capacity(2 + spec.profiles.len());
        groups.extend([namespace, account]);
        groups.extend(spec.profiles.iter().map(|profile| self.group(KeyRef::global(Kind::Profile, profile))));
        let labels = SubjectLabels {
            is_pod: true,
            own,
            namespace: key.namespace.clone(),
            service_account: self.name(account),
            ..SubjectLabels::default()
        };
        let what = What::endpoint(
            spec.ip_networks.iter().map(IpNet::addr),
            spec.ports.iter().map(|port| &port.port),
        );
        let local = (spec.node == node).then(|| Box::new(LocalEndpoint::pod(&key, spec)));
        Subject { key, labels, what, groups: groups.into(), in_sets: Numbers::default(), local }
    }

    /// Reads a host endpoint as a subject, which is not in the indexes yet.
    pub(crate) fn host(&mut self, key: &Key, own: OwnLabels, spec: HostEndpointSpec, node: &str) -> Subject {
        let namespace = key.namespace.as_str().into();
        let key = SharedKey { kind: key.kind, namespace, name: key.name.as_str().into() };
        let profiles = spec.profiles.iter();
        let groups = profiles.map(|profile| self.group(KeyRef::global(Kind::Profile, profile))).collect();
        let labels = SubjectLabels { own, ..SubjectLabels::default() };
        let what = What::endpoint(spec.expected_ips.iter().copied(), spec.ports.iter());
        let local = (spec.node == node).then(|| Box::new(LocalEndpoint::host(&key, spec)));
        Subject { key, labels, what, groups, in_sets: Numbers::default(), local }
    }

    /// Reads a network set as a subject, which is not in the indexes yet.
    pub(crate) fn network_set(&mut self, key: &Key, own: OwnLabels, nets: Box<[IpNet]>) -> Subject {
        let (namespace, key) = self.namespace(key);
        let labels = SubjectLabels { own, namespace: key.namespace.clone(), ..SubjectLabels::default() };
        let (groups, in_sets) = ([namespace].into(), Numbers::default());
        Subject { key, labels, what: What::NetworkSet(nets), groups, in_sets, local: None }
    }

    /// Inserts a new subject into all indexes.
    pub(crate) fn insert(&mut self, mut subject: Subject) -> No {
        subject.labels.own = self.labels.share(subject.labels.own);
        let (key, own) = (subject.key.clone(), own_labels(&subject.labels));
        let no = self.table.insert(subject);
        for group in self.table.get(no).into_iter().flat_map(Subject::groups) {
            if let Some(group) = self.groups.get_mut(*group) {
                group.members.insert(no);
            }
        }
        self.numbers.insert(key.borrowed(), no);
        self.by_own.insert(no, &own);
        self.register_local(no);
        self.inherit(no);
        no
    }

    /// Replaces a subject without remaining links; indexes change only where it differs. Returns its former id if it
    /// was an endpoint of this node and is not that endpoint any more.
    pub(crate) fn replace(&mut self, no: No, mut subject: Subject) -> Option<LocalId> {
        subject.labels.own = self.labels.share(subject.labels.own);
        let known = self.table.get_mut(no)?;
        let former = std::mem::replace(known, subject);
        let subject = &*known;
        if former.labels.own != subject.labels.own {
            let own = own_labels(&subject.labels);
            self.by_own.remove(no, &own_labels(&former.labels));
            self.by_own.insert(no, &own);
        }
        for group in subject.groups.iter().filter(|group| !former.groups.contains(group)) {
            if let Some(group) = self.groups.get_mut(*group) {
                group.members.insert(no);
            }
        }
        let left = former.groups.iter().filter(|group| !subject.groups.contains(group));
        for number in left.copied().collect::<BTreeSet<_>>() {
            if let Some(group) = self.groups.get_mut(number) {
                group.members.remove(no);
            }
            self.forget_if_empty(number);
        }
        let gone = self.replace_local(no, former.local);
        self.inherit(no);
        gone
    }

    /// Files the new version of a subject as an endpoint of this node, if it is one. Returns the former id if no
    /// longer in use.
    fn replace_local(&mut self, no: No, former: Option<Box<LocalEndpoint>>) -> Option<LocalId> {
        let local = self.table.get_mut(no).and_then(|subject| subject.local.as_mut());
        match (former, local) {
            (Some(former), Some(local)) if former.id == local.id => {
                local.is_alone = former.is_alone;
                None
            }
            (former, _) => {
                if let Some(former) = &former {
                    self.local.remove(&former.id, no);
                }
                self.register_local(no);
                former.map(|former| former.id)
            }
        }
    }

    /// Files a subject as an endpoint of this node, if it is one.
    fn register_local(&mut self, no: No) {
        let local = self.table.get(no).and_then(|subject| subject.local.as_ref());
        let Some(id) = local.map(|local| local.id.clone()) else { return };
        let others: Vec<No> = self.local_bearers(&id).collect();
        self.local.insert(&id, no);
        for bearer in others.iter().chain(others.first().map(|_| &no)) {
            if let Some(local) = self.table.get_mut(*bearer).and_then(|subject| subject.local.as_mut()) {
                local.is_alone = false;
            }
        }
    }

    /// Removes a subject without remaining links; returns its id if it was an endpoint of this node.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<LocalId> {
        let no = self.number(key)?;
        self.numbers.remove(KeyRef::from(key), no);
        let subject = self.table.remove(no)?;
        self.by_own.remove(no, &own_labels(&subject.labels));
        for number in subject.groups {
            if let Some(group) = self.groups.get_mut(number) {
                group.members.remove(no);
            }
            self.forget_if_empty(number);
        }
        let local = subject.local?;
        self.local.remove(&local.id, no);
        Some(local.id)
    }

    /// The endpoint of this node with this id; of two objects, the one with the last name.
    pub(crate) fn local_endpoint(&self, id: &LocalId) -> Option<No> {
        self.local_bearers(id).max_by_key(|no| self.get(*no).map(|subject| &subject.key.name))
    }

    /// All endpoints of this node with this id.
    fn local_bearers(&self, id: &LocalId) -> impl Iterator<Item = No> {
        let local = |no: No| self.get(no).and_then(|subject| subject.local.as_ref());
        self.local.candidates(id).filter(move |no| local(*no).is_some_and(|local| local.id == *id))
    }

    /// Ingests the labels of a namespace, service account or profile. Returns whether they have changed.
    pub(crate) fn set_labels(&mut self, key: &Key, labels: Option<OwnLabels>) -> bool {
        if labels.is_none() && self.group_number(key.into()).is_none() {
            return false;
        }
        let no = self.group(key.into());
        let Some(group) = self.groups.get_mut(no).filter(|group| group.labels != labels) else {
            return false;
        };
        let before = given_labels(group);
        group.labels = labels;
        self.by_group.remove(no, &before);
        self.by_group.insert(no, &given_labels(group));
        self.forget_if_empty(no);
        true
    }

    /// Whether the namespace, service account or profile exists.
    pub(crate) fn exists(&self, key: KeyRef<'_>) -> bool {
        let group = self.group_number(key).and_then(|no| self.groups.get(no));
        group.is_some_and(|group| group.labels.is_some())
    }

    /// The subjects of a namespace, service account or profile.
    pub(crate) fn members(&self, key: KeyRef<'_>) -> Vec<No> {
        let group = self.group_number(key).and_then(|no| self.groups.get(no));
        group.map_or_else(Vec::new, |group| group.members.iter().collect())
    }

    /// Updates a subject's labels from its groups.
    pub(crate) fn inherit(&mut self, no: No) {
        let Some(subject) = self.table.get_mut(no) else { return };
        subject.labels.profiles.clear();
        for group in subject.groups.iter().filter_map(|group| self.groups.get(*group)) {
            let labels = group.labels.clone();
            match group.key.kind {
                Kind::Namespace => subject.labels.namespace_labels = labels,
                Kind::ServiceAccount => subject.labels.service_account_labels = labels,
                _ => subject.labels.profiles.extend(labels),
            }
        }
    }

    /// The profiles of an endpoint, by name.
    pub(crate) fn profiles<'a>(&'a self, subject: &'a Subject) -> impl Iterator<Item = &'a Arc<str>> {
        let groups = subject.groups.iter().filter_map(|group| self.groups.get(*group));
        groups.filter(|group| group.key.kind == Kind::Profile).map(|group| &group.key.name)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let subjects = self.numbers.is_empty() && self.table.is_empty() && self.local.is_empty();
        let groups = self.group_numbers.is_empty() && self.groups.is_empty();
        subjects && groups && self.by_own.is_empty() && self.by_group.is_empty()
    }

    /// The number of label sets kept for subjects.
    #[cfg(test)]
    pub(crate) fn labels_kept(&self) -> usize {
        self.labels.known.len()
    }

    /// The sets that a subject is linked to.
    #[cfg(test)]
    pub(crate) fn memberships(&self) -> impl Iterator<Item = No> {
        let subjects = self.table.numbers().filter_map(|no| self.table.get(no));
        subjects.flat_map(|subject| subject.in_sets.iter())
    }

    /// Every subject that a selector with these restrictions may match.
    pub(crate) fn candidates(&self, demands: &Restrictions<'_>) -> Vec<No> {
        match self.narrowest(demands) {
            Some(bearers) => united(&bearers),
            None => self.table.numbers().collect(),
        }
    }

    /// Every endpoint of this node that a selector with these restrictions may match.
    pub(crate) fn local_candidates(&self, demands: &Restrictions<'_>) -> Vec<No> {
        if self.local.is_empty() {
            return Vec::new();
        }
        match self.narrowest(demands) {
            Some(bearers) if size(&bearers) < self.local.len() => united(&bearers),
            _ => self.local.numbers().collect(),
        }
    }

    /// The subjects with the restricted label that has the fewest; `None` without restrictions.
    fn narrowest(&self, demands: &Restrictions<'_>) -> Option<Vec<&Numbers>> {
        let demanded = demands.iter().filter(|(_, demand)| demand.present || demand.values.is_some());
        let bearers = demanded.map(|(label, demand)| self.bearers(label, demand.values.as_ref()));
        bearers.min_by_key(|bearers| size(bearers))
    }

    /// The subjects that have the label with one of these values, of their own or from a group.
    fn bearers(&self, label: &str, values: Option<&BTreeSet<&str>>) -> Vec<&Numbers> {
        let mut bearers = self.by_own.find(label, values);
        let groups = self.by_group.find(label, values).into_iter().flat_map(Numbers::iter);
        bearers.extend(groups.filter_map(|group| self.groups.get(group)).map(|group| &group.members));
        bearers
    }

    /// The number of an object's namespace, and the object's key, which shares the namespace's name.
    fn namespace(&mut self, key: &Key) -> (No, SharedKey) {
        let no = self.group(KeyRef::global(Kind::Namespace, &key.namespace));
        (no, SharedKey { kind: key.kind, namespace: self.name(no), name: key.name.as_str().into() })
    }

    fn name(&self, group: No) -> Arc<str> {
        self.groups.get(group).map(|group| group.key.name.clone()).unwrap_or_default()
    }

    fn group_number(&self, key: KeyRef<'_>) -> Option<No> {
        self.group_numbers.get(key, |no| self.groups.get(no).is_some_and(|group| group.key.borrowed() == key))
    }

    fn group(&mut self, key: KeyRef<'_>) -> No {
        if let Some(no) = self.group_number(key) {
            return no;
        }
        let key = SharedKey { kind: key.kind, namespace: key.namespace.into(), name: key.name.into() };
        let hashed = key.clone();
        let group = Group { key, labels: None, members: Numbers::default() };
        let given = given_labels(&group);
        let no = self.groups.insert(group);
        self.by_group.insert(no, &given);
        self.group_numbers.insert(hashed.borrowed(), no);
        no
    }

    fn forget_if_empty(&mut self, no: No) {
        let empty = |group: &&Group| group.labels.is_none() && group.members.is_empty();
        let Some(group) = self.groups.get(no).filter(empty) else { return };
        self.by_group.remove(no, &given_labels(group));
        self.group_numbers.remove(group.key.borrowed(), no);
        self.groups.remove(no);
    }
}

/// Label sets without duplicates: pods of one workload have the same.
#[derive(Default)]
struct SharedLabels {
    known: HashSet<OwnLabels>,
    /// The number at which unused label sets are removed.
    enough: usize,
}

impl SharedLabels {
    fn share(&mut self, labels: OwnLabels) -> OwnLabels {
        if self.known.len() > self.enough {
            self.known.retain(|labels| labels.is_shared());
            self.enough = 2 * self.known.len();
        }
        if let Some(known) = self.known.get(&labels) {
            return known.clone();
        }
        self.known.insert(labels.clone());
        labels
    }
}

fn size(bearers: &[&Numbers]) -> usize {
    bearers.iter().map(|bearers| bearers.len()).sum()
}

fn united(bearers: &[&Numbers]) -> Vec<No> {
    let mut all: Vec<No> = bearers.iter().flat_map(|bearers| bearers.iter()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The part of a subject's labels that is its own.
fn own_labels(labels: &SubjectLabels) -> SubjectLabels {
    SubjectLabels { is_pod: labels.is_pod, own: labels.own.clone(), ..SubjectLabels::default() }
}

/// The labels that a group gives its members. The name of a namespace is known even if the namespace is not.
fn given_labels(group: &Group) -> SubjectLabels {
    let (name, labels) = (group.key.name.clone(), group.labels.clone());
    match group.key.kind {
        Kind::Namespace => {
            SubjectLabels { namespace: name, namespace_labels: labels, ..SubjectLabels::default() }
        }
        Kind::ServiceAccount => SubjectLabels {
            service_account: name,
            service_account_labels: labels,
            ..SubjectLabels::default()
        },
        _ => SubjectLabels { profiles: labels.into_iter().collect(), ..SubjectLabels::default() },
    }
}
