//! What is known of Services, their addresses, pools and settings, and which Services to look at. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::calico::{AssignIps, IpPool, KubeControllersConfiguration};
use tortie_api::{Key, Kind, Resource};
use tortie_ipam::{Assignment, Release, service_handle};
use tortie_store::{Change, Stored};

use super::status::has_condition;
use super::steps::{Rules, Step, next};
use super::wanted::Service;
use crate::reconciler::Side;
use crate::synced::Synced;

pub(crate) const SOURCES: [Kind; 2] = [Kind::Service, Kind::Namespace];
pub(crate) const SETTINGS: [Kind; 2] = [Kind::IpPool, Kind::KubeControllersConfiguration];

/// The addresses of a handle, and how to release them.
pub(crate) type Held = Vec<(IpNet, Release)>;

/// What is known.
pub(crate) struct State {
    sources: Synced,
    settings: Synced,
    /// The Services that have such addresses, could have some, or say that they lack one; and those of held addresses.
    services: BTreeMap<Key, Stored>,
    /// The labels of each Namespace.
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// The pools for load balancers, by name.
    pools: Vec<(String, IpPool)>,
    /// `None` if the setting is invalid: nothing changes then.
    assign_ips: Option<AssignIps>,
    /// The addresses in IPAM, by Service and handle.
    held: BTreeMap<Key, BTreeMap<String, Held>>,
    due: BTreeSet<Key>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            sources: Synced::new(&SOURCES),
            settings: Synced::new(&SETTINGS),
            services: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            pools: Vec::new(),
            assign_ips: Some(AssignIps::default()),
            held: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }
}

/// The addresses without what is needed to release them. The one that was assigned or shown last comes first.
pub(crate) fn assignments(held: &Held) -> Vec<Assignment> {
    let mut held: Vec<_> = held.iter().collect();
    held.sort_by_key(|(_, one)| std::cmp::Reverse(one.sequence_number));
    held.into_iter().map(|(block, one)| Assignment { address: one.address, block: *block }).collect()
}

/// The handle of a Service's addresses.
pub(crate) fn handle_of(key: &Key, service: &Service) -> String {
    service_handle(&key.namespace, &key.name, service.uid())
}

impl State {
    /// Takes note of a change.
    pub(crate) fn note(&mut self, side: Side, change: Change) {
        match side {
            Side::Source => self.sources.note(&change),
            Side::Target => self.settings.note(&change),
        }
        match change {
            Change::Put(stored) => self.put(stored),
            Change::Gone { key, .. } => self.gone(key),
            Change::InSync(..) | Change::Restarted(_) | Change::Progress(..) | Change::Unavailable(..) => {}
        }
    }

    fn put(&mut self, stored: Stored) {
        let key = stored.key.clone();
        match key.kind {
            Kind::Service => {
                let is_balanced = stored.value["spec"]["type"] == "LoadBalancer";
                if is_balanced || has_condition(&stored.value) || self.held.contains_key(&key) {
                    self.services.insert(key.clone(), stored);
                    self.due.insert(key);
                } else {
                    self.services.remove(&key);
                }
            }
            Kind::Namespace => {
                let labels = stored.value.pointer("/metadata/labels").and_then(|labels| labels.as_object());
                let labels = labels.into_iter().flatten();
                let text =
                    labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
                let labels: BTreeMap<String, String> = text.collect();
                if self.namespaces.insert(key.name.clone(), labels.clone()) != Some(labels) {
                    self.look_at(|service| service.namespace == key.name);
                }
            }
            Kind::IpPool => match Resource::read(&key, &stored.value) {
                Ok(Resource::IpPool(pool)) if pool.is_for_load_balancers() => {
                    self.set_pool(&key.name, Some(pool));
                }
                // IPAM does not use an invalid one either.
                _ => self.set_pool(&key.name, None),
            },
            Kind::KubeControllersConfiguration if key.name == KubeControllersConfiguration::NAME => {
                self.assign_ips = match Resource::read(&key, &stored.value) {
                    Ok(Resource::KubeControllersConfiguration(settings)) => Some(settings.assign_ips()),
                    _ => {
                        tracing::error!("{key} is invalid; the addresses of Services stay as they are");
                        None
                    }
                };
                self.look_at(|_| true);
            }
            _ => {}
        }
    }

    fn gone(&mut self, key: Key) {
        match key.kind {
            Kind::Service => {
                self.services.remove(&key);
                self.due.insert(key);
            }
            Kind::Namespace => drop(self.namespaces.remove(&key.name)),
            Kind::IpPool => self.set_pool(&key.name, None),
            Kind::KubeControllersConfiguration if key.name == KubeControllersConfiguration::NAME => {
                self.assign_ips = Some(AssignIps::default());
                self.look_at(|_| true);
            }
            _ => {}
        }
    }

    fn set_pool(&mut self, name: &str, pool: Option<IpPool>) {
        let before = self.pools.clone();
        self.pools.retain(|(known, _)| known != name);
        self.pools.extend(pool.map(|pool| (name.to_owned(), pool)));
        self.pools.sort_by(|one, other| one.0.cmp(&other.0));
        if self.pools != before {
            self.look_at(|_| true);
        }
    }

    fn look_at(&mut self, which: impl Fn(&Key) -> bool) {
        self.due.extend(self.services.keys().filter(|key| which(key)).cloned());
    }

    /// Whether everything is known that decides about addresses.
    pub(crate) fn is_known(&self) -> bool {
        SOURCES.iter().all(|kind| self.sources.is_complete(*kind)) && self.settings.is_settled()
    }

    /// Replaces what is known of addresses, and looks at all Services.
    pub(crate) fn set_held(&mut self, held: BTreeMap<Key, BTreeMap<String, Held>>) {
        self.due.extend(held.keys().cloned());
        self.held = held;
        self.look_at(|_| true);
    }

    /// Takes note of the addresses of a handle, which were read or changed just now.
    pub(crate) fn hold(&mut self, key: &Key, handle: &str, held: Held) {
        let handles = self.held.entry(key.clone()).or_default();
        if held.is_empty() {
            handles.remove(handle);
        } else {
            handles.insert(handle.to_owned(), held);
        }
        if handles.is_empty() {
            self.held.remove(key);
        }
    }

    /// The handle of a Service, as far as it is known.
    pub(crate) fn handle(&self, key: &Key) -> Option<String> {
        let service = Service::of(&self.services.get(key)?.value).ok()?;
        Some(handle_of(key, &service))
    }

    /// The addresses of former Services of this name, by handle. `current` is the handle of the one that exists.
    pub(crate) fn former(&self, key: &Key, current: Option<&str>) -> Vec<(String, Held)> {
        let held = self.held.get(key).into_iter().flatten();
        let former = held.filter(|(handle, _)| Some(handle.as_str()) != current);
        former.map(|(handle, held)| (handle.clone(), held.clone())).collect()
    }

    /// Looks at the Services that say that they lack an address.
    pub(crate) fn look_at_waiting(&mut self) {
        let waiting = self.services.iter().filter(|(_, stored)| has_condition(&stored.value));
        self.due.extend(waiting.map(|(key, _)| key.clone()));
    }

    /// Whether there is something to do about a Service, as far as is known without reading anything.
    pub(crate) fn needs_a_look(&self, key: &Key, now: Timestamp) -> bool {
        let held = self.held.get(key);
        let Some(stored) = self.services.get(key) else { return held.is_some() };
        let Ok(service) = Service::of(&stored.value) else { return true };
        let handle = handle_of(key, &service);
        if held.is_some_and(|handles| handles.keys().any(|other| *other != handle)) {
            return true;
        }
        let has = held.and_then(|handles| handles.get(&handle)).map(assignments).unwrap_or_default();
        next(&stored.value, &service, &has, self.rules(key, now), None) != Step::Nothing
    }

    /// What decides about the addresses of a Service.
    pub(crate) fn rules(&self, key: &Key, now: Timestamp) -> Rules<'_> {
        let knows_namespace = self.namespaces.contains_key(&key.namespace);
        Rules { assign_ips: self.assign_ips, pools: &self.pools, knows_namespace, now }
    }

    /// The labels of a Namespace.
    pub(crate) fn namespace(&self, name: &str) -> BTreeMap<String, String> {
        self.namespaces.get(name).cloned().unwrap_or_default()
    }

    /// The Services to look at, which are forgotten: those behind the last one first.
    pub(crate) fn take_due(&mut self, last: Option<&Key>) -> Vec<Key> {
        let mut all: Vec<Key> = std::mem::take(&mut self.due).into_iter().collect();
        let first = last.map_or(0, |last| all.partition_point(|key| key <= last));
        all.rotate_left(first);
        all
    }

    /// Whether there are Services to look at.
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Takes Services back that could not be looked at.
    pub(crate) fn retry(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.due.extend(keys);
    }
}
