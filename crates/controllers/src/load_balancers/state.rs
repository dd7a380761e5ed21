//! What is known of Services, pools and settings, and which Services to look at. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::calico::{AssignIps, IpPool, KubeControllersConfiguration};
use tortie_api::{Key, Kind, Resource};
use tortie_store::{Change, Stored};

use crate::reconciler::Side;
use crate::synced::Synced;

pub(crate) const SOURCES: [Kind; 2] = [Kind::Service, Kind::Namespace];
pub(crate) const SETTINGS: [Kind; 2] = [Kind::IpPool, Kind::KubeControllersConfiguration];

/// What is known.
pub(crate) struct State {
    sources: Synced,
    settings: Synced,
    services: BTreeSet<Key>,
    /// The labels of each Namespace.
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// The pools for load balancers, by name.
    pools: Vec<(String, IpPool)>,
    /// `None` if the setting is invalid: nothing changes then.
    assign_ips: Option<AssignIps>,
    /// The Service of each handle with addresses; `None` before addresses were listed.
    held: Option<BTreeMap<String, Key>>,
    due: BTreeSet<Key>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            sources: Synced::new(&SOURCES),
            settings: Synced::new(&SETTINGS),
            services: BTreeSet::new(),
            namespaces: BTreeMap::new(),
            pools: Vec::new(),
            assign_ips: Some(AssignIps::default()),
            held: None,
            due: BTreeSet::new(),
        }
    }
}

impl State {
    /// Takes note of a change.
    pub(crate) fn note(&mut self, side: Side, change: Change) {
        match side {
            Side::Source => self.sources.note(&change),
            Side::Target => self.settings.note(&change),
        }
        match change {
            Change::Put(stored) => self.put(&stored),
            Change::Gone { key, .. } => self.gone(key),
            Change::InSync(..) | Change::Restarted(_) | Change::Progress(..) | Change::Unavailable(..) => {}
        }
    }

    fn put(&mut self, stored: &Stored) {
        let key = &stored.key;
        match key.kind {
            Kind::Service => {
                self.services.insert(key.clone());
                self.due.insert(key.clone());
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
            Kind::IpPool => match Resource::read(key, &stored.value) {
                Ok(Resource::IpPool(pool)) if pool.is_for_load_balancers() => {
                    self.set_pool(&key.name, Some(pool));
                }
                Ok(_) => self.set_pool(&key.name, None),
                // IPAM does not use it either. What it gave before stays.
                Err(_) => {}
            },
            Kind::KubeControllersConfiguration if key.name == KubeControllersConfiguration::NAME => {
                self.assign_ips = match Resource::read(key, &stored.value) {
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
        self.due.extend(self.services.iter().filter(|key| which(key)).cloned());
    }

    /// Whether everything is known that decides about addresses.
    pub(crate) fn is_known(&self) -> bool {
        SOURCES.iter().all(|kind| self.sources.is_complete(*kind)) && self.settings.is_settled()
    }

    /// Whether the handles with addresses were listed.
    pub(crate) fn has_listed(&self) -> bool {
        self.held.is_some()
    }

    /// Replaces the handles with addresses, and looks at all Services.
    pub(crate) fn set_held(&mut self, held: Vec<(String, Key)>) {
        self.due.extend(held.iter().map(|(_, key)| key.clone()));
        self.held = Some(held.into_iter().collect());
        self.look_at(|_| true);
    }

    pub(crate) fn hold(&mut self, handle: &str, key: &Key) {
        self.held.get_or_insert_default().insert(handle.to_owned(), key.clone());
    }

    pub(crate) fn forget(&mut self, handle: &str) {
        if let Some(held) = &mut self.held {
            held.remove(handle);
        }
    }

    pub(crate) fn is_held(&self, handle: &str) -> bool {
        self.held.as_ref().is_some_and(|held| held.contains_key(handle))
    }

    /// The handles of a Service, and of former ones of its name.
    pub(crate) fn held_by(&self, key: &Key) -> Vec<String> {
        let held = self.held.iter().flatten().filter(|(_, service)| *service == key);
        held.map(|(handle, _)| handle.clone()).collect()
    }

    /// The labels of a Namespace, if it is known.
    pub(crate) fn namespace(&self, name: &str) -> Option<BTreeMap<String, String>> {
        self.namespaces.get(name).cloned()
    }

    /// The pools for load balancers.
    pub(crate) fn pools(&self) -> &[(String, IpPool)] {
        &self.pools
    }

    pub(crate) fn assign_ips(&self) -> Option<AssignIps> {
        self.assign_ips
    }

    /// The Services to look at, which are forgotten.
    pub(crate) fn take_due(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.due).into_iter().collect()
    }

    pub(crate) fn retry(&mut self, key: Key) {
        self.due.insert(key);
    }
}
