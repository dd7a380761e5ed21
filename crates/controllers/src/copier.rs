//! Copies from the Kubernetes API to etcd: what is known of both sides, and which objects differ. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tortie_api::calico::KubeControllersConfiguration;
use tortie_api::{Key, Kind, Position, Resource};
use tortie_store::{Change, StorageForm, Stored};

use crate::calico_controllers::CalicoControllers;
use crate::copies::{self, SOURCES, TARGETS};
use crate::decision::Decision;
use crate::reconciler::{Reconciler, Side};
use crate::synced::Synced;

/// Both sides.
pub(crate) struct Copier {
    /// The content that each copy should have.
    desired: BTreeMap<Key, Value>,
    /// The copies of each object.
    copies_of: BTreeMap<Key, Vec<Key>>,
    actual: BTreeMap<Key, Stored>,
    /// The endpoints of each pod.
    endpoints_of: BTreeMap<Key, BTreeSet<Key>>,
    sources: Synced,
    targets: Synced,
    /// Objects that may differ.
    dirty: BTreeSet<Key>,
    copies_node_labels: bool,
    /// The form of the copies.
    form: StorageForm,
    /// Calico's kube-controllers, if they run.
    calico: Option<CalicoControllers>,
}

/// The kinds that the copier follows in the datastore.
pub(crate) fn followed() -> Vec<Kind> {
    TARGETS.into_iter().chain([Kind::KubeControllersConfiguration]).collect()
}

impl Copier {
    /// For a datastore with objects in this form, on which these kube-controllers of Calico run.
    pub(crate) fn new(form: StorageForm, calico: Option<CalicoControllers>) -> Self {
        Self {
            desired: BTreeMap::new(),
            copies_of: BTreeMap::new(),
            actual: BTreeMap::new(),
            endpoints_of: BTreeMap::new(),
            sources: Synced::new(&SOURCES),
            targets: Synced::new(&followed()),
            dirty: BTreeSet::new(),
            copies_node_labels: true,
            form,
            calico,
        }
    }

    fn put_source(&mut self, source: &Stored) {
        let copies = copies::copies(source);
        let keys = copies.iter().map(|(key, _)| key.clone()).collect();
        let before = self.copies_of.insert(source.key.clone(), keys).unwrap_or_default();
        for key in before.into_iter().filter(|key| !copies.iter().any(|(other, _)| other == key)) {
            self.set_desired(key, None);
        }
        for (key, mut value) in copies {
            self.form.fill(key.kind, &mut value);
            self.set_desired(key, Some(value));
        }
    }

    fn set_desired(&mut self, key: Key, value: Option<Value>) {
        let before = match &value {
            Some(value) => self.desired.insert(key.clone(), value.clone()),
            None => self.desired.remove(&key),
        };
        if before != value {
            if key == identity() {
                self.dirty.extend(self.actual.keys().cloned());
            }
            self.dirty.extend(self.endpoints_of.get(&key).into_iter().flatten().cloned());
            self.dirty.insert(key);
        }
    }

    fn put_target(&mut self, stored: Stored) {
        let key = stored.key.clone();
        if key.kind == Kind::KubeControllersConfiguration {
            if key.name == KubeControllersConfiguration::NAME {
                self.set_configuration(Some(&stored));
            }
            return;
        }
        // A write of this process may be known already.
        let is_old = |known: &Stored| known.position > stored.position;
        if !copies::concerns(&key) || self.actual.get(&key).is_some_and(is_old) {
            return;
        }
        if key.kind == Kind::WorkloadEndpoint {
            self.unlink(&key);
            if let Some(pod) = copies::pod_of_endpoint(&stored) {
                self.endpoints_of.entry(pod).or_default().insert(key.clone());
            }
        }
        self.actual.insert(key.clone(), stored);
        self.dirty.insert(key);
    }

    fn remove_target(&mut self, key: Key) {
        if key.kind == Kind::KubeControllersConfiguration {
            if key.name == KubeControllersConfiguration::NAME {
                self.set_configuration(None);
            }
            return;
        }
        self.unlink(&key);
        if self.actual.remove(&key).is_some() {
            if key == identity() {
                self.dirty.extend(self.actual.keys().cloned());
            }
            self.dirty.insert(key);
        }
    }

    /// Forgets the pod of an endpoint.
    fn unlink(&mut self, endpoint: &Key) {
        let Some(pod) = self.actual.get(endpoint).and_then(copies::pod_of_endpoint) else { return };
        if let Some(endpoints) = self.endpoints_of.get_mut(&pod) {
            endpoints.remove(endpoint);
            if endpoints.is_empty() {
                self.endpoints_of.remove(&pod);
            }
        }
    }

    /// Invalid settings change nothing.
    fn set_configuration(&mut self, stored: Option<&Stored>) {
        self.copies_node_labels = match stored.map(|stored| Resource::read(&stored.key, &stored.value)) {
            Some(Ok(Resource::KubeControllersConfiguration(settings))) => settings.copies_node_labels(),
            Some(_) => return,
            None => true,
        };
        self.dirty.extend(self.desired.keys().filter(|key| key.kind == Kind::Node).cloned());
    }

    /// Whether the Kubernetes API is not the one from which the datastore has its copies: with a kubeconfig of another cluster, or after the
    /// control plane was made anew, the policies of pods that run must not go.
    fn sees_another_cluster(&self) -> bool {
        let uid = |value: &Value| value["metadata"]["uid"].as_str().map(str::to_owned);
        let desired = self.desired.get(&identity()).and_then(uid);
        let actual = self.actual.get(&identity()).and_then(|stored| uid(&stored.value));
        desired.zip(actual).is_some_and(|(desired, actual)| desired != actual)
    }

    /// Returns whether Calico's kube-controllers write this object.
    fn is_calicos(&self, key: &Key) -> bool {
        let controller = copies::calico_controller(key);
        controller.is_some_and(|controller| CalicoControllers::run(self.calico.as_ref(), controller))
    }

    /// The pod's copy, for its endpoint.
    fn pod_of(&self, endpoint: &Stored) -> Option<&Value> {
        self.desired.get(&copies::pod_of_endpoint(endpoint)?)
    }
}

impl Reconciler for Copier {
    fn note(&mut self, side: Side, change: Change) {
        match side {
            Side::Source => self.sources.note(&change),
            Side::Target => self.targets.note(&change),
        }
        match (side, change) {
            (Side::Source, Change::Put(stored)) => self.put_source(&stored),
            (Side::Source, Change::Gone { key, .. }) => {
                for copy in self.copies_of.remove(&key).unwrap_or_default() {
                    self.set_desired(copy, None);
                }
            }
            // Copies whose source was not there, and which nobody has decided about.
            (Side::Source, Change::InSync(..)) => {
                let without = self.actual.keys().filter(|key| !self.desired.contains_key(key));
                self.dirty.extend(without.cloned());
            }
            // The history may begin again at an older position, as that of a restored datastore.
            (Side::Target, Change::Restarted(kind)) => {
                let of_kind = self.actual.iter_mut().filter(|(key, _)| key.kind == kind);
                of_kind.for_each(|(_, stored)| stored.position = Position::default());
            }
            (Side::Target, Change::Put(stored)) => self.put_target(stored),
            (Side::Target, Change::Gone { key, .. }) => self.remove_target(key),
            _ => {}
        }
    }

    /// Nothing is written before both sides are known: a pod must not be there before the policies that select it.
    fn take_due(&mut self) -> Vec<Key> {
        if !self.sources.is_settled() || !self.targets.is_settled() {
            return Vec::new();
        }
        std::mem::take(&mut self.dirty).into_iter().collect()
    }

    fn retry(&mut self, key: Key) {
        self.dirty.insert(key);
    }

    fn decide(&self, key: &Key) -> Decision {
        if self.is_calicos(key) {
            return Decision::Nothing;
        }
        let (desired, actual) = (self.desired.get(key), self.actual.get(key));
        let decision = match key.kind {
            Kind::WorkloadEndpoint => {
                actual.map_or(Decision::Nothing, |actual| copies::endpoint(actual, self.pod_of(actual)))
            }
            Kind::Node => copies::node(desired, actual, self.copies_node_labels),
            _ => copies::copy(desired, actual),
        };
        match decision {
            // What is not in an incomplete list may exist.
            Decision::Delete(_, Some(source)) if !self.sources.is_complete(source.kind) => Decision::Nothing,
            Decision::Delete(..) if self.sees_another_cluster() => Decision::Nothing,
            // It stays what tells the clusters apart.
            Decision::Update(..) if *key == identity() && self.sees_another_cluster() => Decision::Foreign(
                "takes the Kubernetes API that the controllers see for the one of this datastore, and deletes what it lacks",
            ),
            decision => decision,
        }
    }
}

/// The Namespace whose uid tells clusters apart. Each has it, and nobody creates it again.
fn identity() -> Key {
    Key::global(Kind::Namespace, "kube-system")
}
