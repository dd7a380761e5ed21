//! The desired table: the Services of the node in memory, and the elements that a change of them adds and removes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use tortie_kernel::nftables::{Key, Value};
use tortie_services::{
    Backend, Frontend, FrontendAddress, FrontendKey, NodePortPlace, PoolChange, ServicePortId, ServicesDelta,
};

use super::affinity::{self, Tokens, Unit, token_entries};
use super::edits::Edits;
use super::frontends::{Pool, TableEntry, entries, lists};
use super::layout::{Kind, List, SetId, SlotClass, family, frontend_key, place};
use super::ranges::RangeLists;
use super::slots::Slots;
use crate::dataplane::sets::{Family, ranges};

/// The Services of the node.
#[derive(Debug, Default)]
pub(super) struct Desired {
    pub(super) ports: BTreeMap<Arc<ServicePortId>, Port>,
    pub(super) frontends: BTreeMap<FrontendKey, Frontend>,
    frontends_of: BTreeMap<Arc<ServicePortId>, BTreeSet<FrontendKey>>,
    /// The elements that several objects share: their numbers of owners, and their values.
    shared: BTreeMap<(SetId, Key), (usize, Value)>,
    range_lists: RangeLists,
    cluster_ips: BTreeSet<IpAddr>,
    service_cidrs: BTreeSet<IpNet>,
    pub(super) node_ports: BTreeMap<Family, NodePortPlace>,
    pods: BTreeSet<IpNet>,
    /// The classes that have a chain. They stay.
    pub(super) classes: BTreeSet<SlotClass>,
    /// The units of session affinity by number, with the number of lists of frontends that use them.
    units: BTreeMap<u32, (usize, Unit)>,
    /// The pool of each number of a unit.
    unit_pools: BTreeMap<u32, (Arc<ServicePortId>, Pool)>,
    tokens: Tokens,
    /// The elements of tokens.
    token_elements: BTreeMap<(SetId, Key), Value>,
    /// The units whose pools have lost backends since their clients were looked at.
    pub(super) left: BTreeSet<u32>,
}

/// A port of a Service.
#[derive(Debug, Default)]
pub(super) struct Port {
    has_endpoints: bool,
    pub(super) affinity: Option<u32>,
    /// See `tortie_services::ServicePort::serving`.
    pub(super) serving: BTreeSet<SocketAddr>,
    /// The numbers of the units of its pools, if it has or had session affinity.
    units: Option<[u32; 2]>,
    cluster: Slots,
    local: Slots,
}

impl Port {
    /// The unit of a pool, if the port has session affinity.
    fn unit(&self, id: &ServicePortId, pool: Pool) -> Option<Unit> {
        let (seconds, [cluster, local]) = (self.affinity?, self.units?);
        let number = match pool {
            Pool::Cluster => cluster,
            Pool::Local => local,
        };
        Some(Unit { number, family: family(id.family), protocol: id.protocol, seconds })
    }

    pub(super) fn slots(&self, pool: Pool) -> &Slots {
        match pool {
            Pool::Cluster => &self.cluster,
            Pool::Local => &self.local,
        }
    }

    fn slots_mut(&mut self, pool: Pool) -> &mut Slots {
        match pool {
            Pool::Cluster => &mut self.cluster,
            Pool::Local => &mut self.local,
        }
    }
}

/// A list of a frontend as it is shown in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shown {
    port: Arc<ServicePortId>,
    pool: Pool,
    length: usize,
}

/// A frontend as it is in the table.
#[derive(Debug, Default)]
struct View {
    entries: Vec<TableEntry>,
    lists: BTreeMap<List, Shown>,
    units: Vec<(List, Unit)>,
}

/// The slots of pools that a change touches; none for a pool that is made anew.
type Touched = BTreeMap<(Arc<ServicePortId>, Pool), Option<BTreeSet<usize>>>;

impl Desired {
    /// Makes the changes. The work is proportional to them, and to the frontends of the ports that they concern.
    pub(super) fn ingest(&mut self, deltas: &[ServicesDelta]) -> Edits {
        let mut edits = Edits::default();
        let concerned: BTreeSet<FrontendKey> =
            deltas.iter().flat_map(|delta| self.concerned(delta)).collect();
        let before: BTreeMap<FrontendKey, View> =
            concerned.iter().map(|key| (*key, self.view(key))).collect();
        let mut touched = Touched::new();
        for delta in deltas {
            self.apply(delta, &mut touched, &mut edits);
        }
        let mut units: BTreeMap<u32, Option<Unit>> = BTreeMap::new();
        for (key, old) in before {
            let new = self.view(&key);
            self.count_units(&old, &new, &mut units);
            old.entries.iter().for_each(|(at, value)| edits.remove(*at, value));
            new.entries.iter().for_each(|(at, value)| edits.add(*at, value));
            for list in List::ALL {
                self.edit_slots(&key, list, &old, &new, &touched, &mut edits);
            }
        }
        let now = |number: &u32| self.units.get(number).map(|(_, unit)| *unit);
        edits.units = units.iter().map(|(number, old)| (*old, now(number))).collect();
        let new = edits.classes().filter(|class| !self.classes.contains(class));
        let new: BTreeSet<SlotClass> = new.collect();
        self.classes.extend(&new);
        edits.new_classes = new;
        edits
    }

    /// The networks of this node's pods.
    pub(super) fn set_pods(&mut self, pods: &BTreeSet<IpNet>, edits: &mut Edits) {
        if self.pods == *pods {
            return;
        }
        networks_of(Kind::Pods, &self.pods).for_each(|(at, value)| edits.remove(at, &value));
        networks_of(Kind::Pods, pods).for_each(|(at, value)| edits.add(at, &value));
        self.pods.clone_from(pods);
    }

    /// The chosen frontends of a delta.
    pub(super) fn concerned(&self, delta: &ServicesDelta) -> Vec<FrontendKey> {
        match delta {
            ServicesDelta::Port { id, .. } | ServicesDelta::PortRemoved(id) => {
                self.frontends_of.get(id).into_iter().flatten().copied().collect()
            }
            ServicesDelta::Frontend(key, _) | ServicesDelta::FrontendRemoved(key) => vec![*key],
            _ => Vec::new(),
        }
    }

    fn view(&self, key: &FrontendKey) -> View {
        let Some(frontend) = self.frontends.get(key) else { return View::default() };
        let port = self.ports.get(&frontend.service_port);
        let has_endpoints = port.is_some_and(|port| port.has_endpoints);
        let (_, lists) = lists(key, frontend);
        let shown = lists.into_iter().filter_map(|(list, pool)| {
            let length = port.filter(|_| has_endpoints)?.slots(pool).len();
            Some((list, Shown { port: frontend.service_port.clone(), pool, length }))
        });
        let lists: BTreeMap<List, Shown> = shown.collect();
        let units: Vec<(List, Unit)> = port
            .into_iter()
            .flat_map(|port| {
                let (_, lists) = self::lists(key, frontend);
                lists
                    .into_iter()
                    .filter_map(|(list, pool)| Some((list, port.unit(&frontend.service_port, pool)?)))
            })
            .collect();
        let numbers: Vec<_> = units.iter().map(|(list, unit)| (*list, unit.number)).collect();
        let lengths: Vec<_> = lists.iter().map(|(list, shown)| (*list, shown.length)).collect();
        let ranges = frontend.source_ranges.as_ref().and_then(|ranges| self.range_lists.number(ranges));
        View { entries: entries(key, frontend, has_endpoints, &lengths, &numbers, ranges), lists, units }
    }

    /// Counts the units of a frontend before and after a change. Notes those before all changes.
    fn count_units(&mut self, old: &View, new: &View, before: &mut BTreeMap<u32, Option<Unit>>) {
        for (_, unit) in old.units.iter().chain(&new.units) {
            before.entry(unit.number).or_insert_with(|| self.units.get(&unit.number).map(|(_, unit)| *unit));
        }
        for (_, unit) in &new.units {
            let (owners, known) = self.units.entry(unit.number).or_insert((0, *unit));
            *owners += 1;
            *known = *unit;
        }
        for (_, unit) in &old.units {
            if let Some((owners, _)) = self.units.get_mut(&unit.number) {
                *owners -= 1;
                if *owners == 0 {
                    self.units.remove(&unit.number);
                }
            }
        }
    }

    fn edit_slots(
        &self,
        key: &FrontendKey,
        list: List,
        old: &View,
        new: &View,
        touched: &Touched,
        edits: &mut Edits,
    ) {
        let (old, new) = (old.lists.get(&list), new.lists.get(&list));
        let length = |shown: Option<&Shown>| shown.map_or(0, |shown| shown.length);
        let (before, after) = (length(old), length(new));
        let (place, family) = place(key);
        let set = SetId::new(Kind::Slots(place, list), family);
        let at = |slot: usize| frontend_key(key).and(&(slot as u32).to_ne_bytes()).map(|key| (set, key));
        if let Some(new) = new {
            let is_same = old.is_some_and(|old| (&old.port, old.pool) == (&new.port, new.pool));
            let known = touched.get(&(new.port.clone(), new.pool));
            let slots: Vec<usize> = match (is_same, known) {
                (true, None) => Vec::new(),
                (true, Some(Some(slots))) => slots.iter().copied().filter(|slot| *slot < after).collect(),
                (true, Some(None)) | (false, _) => (0..after).collect(),
            };
            let backends = self.ports.get(&new.port).map(|port| port.slots(new.pool));
            for slot in slots {
                let backend = backends.and_then(|backends| backends.get(slot));
                if let (Some(at), Some(backend)) = (at(slot), backend) {
                    edits.slot(at, backend.socket(), slot < before);
                }
            }
        }
        (after..before).filter_map(at).for_each(|at| edits.clear(at));
    }

    fn apply(&mut self, delta: &ServicesDelta, touched: &mut Touched, edits: &mut Edits) {
        match delta {
            ServicesDelta::Port { id, has_endpoints, affinity, serving, cluster, local } => {
                self.number_units(id, *affinity);
                let former = self.of_units(id);
                let port = self.ports.entry(id.clone()).or_default();
                port.serving.clone_from(serving);
                (port.has_endpoints, port.affinity) = (*has_endpoints, *affinity);
                for (pool, change) in [(Pool::Cluster, cluster), (Pool::Local, local)] {
                    self.change_pool(id, pool, change, touched, edits);
                }
                self.change_tokens(id, &former, edits);
            }
            ServicesDelta::PortRemoved(id) => {
                let former = self.of_units(id);
                for pool in [Pool::Cluster, Pool::Local] {
                    let slots = self.ports.get(id).map(|port| port.slots(pool));
                    let removed = slots.into_iter().flat_map(Slots::iter).copied().collect();
                    self.change_pool(id, pool, &PoolChange { added: Vec::new(), removed }, touched, edits);
                    touched.insert((id.clone(), pool), None);
                }
                let port = self.ports.remove(id);
                self.change_tokens(id, &former, edits);
                let numbers = port.and_then(|port| port.units).into_iter().flatten();
                numbers.for_each(|number| drop(self.unit_pools.remove(&number)));
            }
            ServicesDelta::Frontend(key, frontend) => {
                self.remove_frontend(key, edits);
                self.add_frontend(*key, frontend, edits);
            }
            ServicesDelta::FrontendRemoved(key) => self.remove_frontend(key, edits),
            ServicesDelta::ClusterIp(address) => {
                self.cluster_ips.insert(*address);
                edits.add(cluster_ip(address), &Value::default());
            }
            ServicesDelta::ClusterIpRemoved(address) => {
                self.cluster_ips.remove(address);
                edits.remove(cluster_ip(address), &Value::default());
            }
            ServicesDelta::ServiceCidrs(networks) => {
                networks_of(Kind::ServiceCidrs, &self.service_cidrs)
                    .for_each(|(at, value)| edits.remove(at, &value));
                networks_of(Kind::ServiceCidrs, networks).for_each(|(at, value)| edits.add(at, &value));
                self.service_cidrs.clone_from(networks);
            }
            ServicesDelta::NodePorts(version, place) => {
                let networks = |place: Option<&NodePortPlace>| match place {
                    Some(NodePortPlace::LocalIn(networks)) => networks.iter().copied().collect(),
                    _ => BTreeSet::new(),
                };
                let before = self.node_ports.insert(family(*version), place.clone());
                networks_of(Kind::NodeAddresses, &networks(before.as_ref()))
                    .for_each(|(at, value)| edits.remove(at, &value));
                networks_of(Kind::NodeAddresses, &networks(Some(place)))
                    .for_each(|(at, value)| edits.add(at, &value));
                edits.rules = true;
            }
            ServicesDelta::HealthCheck(..) | ServicesDelta::HealthCheckRemoved(..) => {}
        }
    }

    fn change_pool(
        &mut self,
        id: &Arc<ServicePortId>,
        pool: Pool,
        change: &PoolChange,
        touched: &mut Touched,
        edits: &mut Edits,
    ) {
        let Some(port) = self.ports.get_mut(id) else { return };
        let slots = port.slots_mut(pool).change(change);
        let known = touched.entry((id.clone(), pool)).or_insert_with(|| Some(BTreeSet::new()));
        if let Some(known) = known {
            known.extend(slots);
        }
        if let Some(unit) = port.unit(id, pool).filter(|_| !change.removed.is_empty()) {
            self.left.insert(unit.number);
        }
        let is_local = |backend: &&Backend| backend.is_local;
        for gone in change.removed.iter().filter(is_local) {
            self.unshare(itself(gone), edits);
        }
        for new in change.added.iter().filter(is_local) {
            self.share(itself(new), Value::default(), edits);
        }
    }

    /// Gives the units of a port their numbers when it gets session affinity.
    fn number_units(&mut self, id: &Arc<ServicePortId>, affinity: Option<u32>) {
        let port = self.ports.get(id);
        if affinity.is_none() || port.is_some_and(|port| port.units.is_some()) {
            return;
        }
        let numbers = [Pool::Cluster, Pool::Local].map(|pool| {
            let taken = |number| self.unit_pools.contains_key(&number);
            let (number, is_ambiguous) = affinity::number(id, pool, taken);
            self.tokens.is_ambiguous |= is_ambiguous;
            self.unit_pools.insert(number, (id.clone(), pool));
            number
        });
        self.ports.entry(id.clone()).or_default().units = Some(numbers);
    }

    /// The backends of the units of a port.
    fn of_units(&self, id: &Arc<ServicePortId>) -> Vec<(u32, Backend)> {
        let Some(port) = self.ports.get(id) else { return Vec::new() };
        let pools = [Pool::Cluster, Pool::Local].into_iter();
        let units = pools.filter_map(|pool| Some((port.unit(id, pool)?.number, port.slots(pool))));
        units.flat_map(|(unit, slots)| slots.iter().map(move |backend| (unit, *backend))).collect()
    }

    /// Gives the backends of the units of a port their tokens, and takes those of backends that have left. `former` are those before.
    fn change_tokens(&mut self, id: &Arc<ServicePortId>, former: &[(u32, Backend)], edits: &mut Edits) {
        let current = self.of_units(id);
        let sockets = |of: &[(u32, Backend)]| -> BTreeMap<(u32, SocketAddr), Backend> {
            of.iter().map(|(unit, backend)| ((*unit, backend.socket()), *backend)).collect()
        };
        let (former, current) = (sockets(former), sockets(&current));
        for ((unit, socket), backend) in former.iter().filter(|(key, _)| !current.contains_key(key)) {
            let token = self.tokens.known(*unit, *socket);
            let entries = token.and_then(|token| token_entries(*unit, backend, id.protocol, token));
            for (at, value) in entries.into_iter().flatten() {
                self.token_elements.remove(&at);
                edits.remove(at, &value);
            }
            self.tokens.remove(*unit, *socket);
        }
        for ((unit, socket), backend) in current.iter().filter(|(key, _)| !former.contains_key(key)) {
            let token = self.tokens.of(*unit, *socket);
            for (at, value) in token_entries(*unit, backend, id.protocol, token).into_iter().flatten() {
                edits.add(at, &value);
                self.token_elements.insert(at, value);
            }
        }
    }

    /// True if numbers or tokens depend on the order in which they were given.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.tokens.is_ambiguous
    }

    /// The units of session affinity.
    pub(super) fn units(&self) -> impl Iterator<Item = &Unit> {
        self.units.values().map(|(_, unit)| unit)
    }

    /// A unit, with the tokens of its pool.
    pub(super) fn unit(&self, number: u32) -> Option<(Unit, BTreeSet<u32>)> {
        let (_, unit) = self.units.get(&number)?;
        let (id, pool) = self.unit_pools.get(&number)?;
        let backends = self.ports.get(id)?.slots(*pool).iter();
        let tokens = backends.filter_map(|backend| self.tokens.known(number, backend.socket()));
        Some((*unit, tokens.collect()))
    }

    fn add_frontend(&mut self, key: FrontendKey, frontend: &Frontend, edits: &mut Edits) {
        self.frontends_of.entry(frontend.service_port.clone()).or_default().insert(key);
        if let FrontendAddress::Address(address) = key.address {
            self.share(frontend_address(address), Value::default(), edits);
            for (at, value) in self.range_lists.add(frontend.source_ranges.as_deref(), Family::of(address)) {
                self.share(at, value, edits);
            }
        }
        self.frontends.insert(key, frontend.clone());
    }

    fn remove_frontend(&mut self, key: &FrontendKey, edits: &mut Edits) {
        let Some(frontend) = self.frontends.remove(key) else { return };
        if let Some(keys) = self.frontends_of.get_mut(&frontend.service_port) {
            keys.remove(key);
            if keys.is_empty() {
                self.frontends_of.remove(&frontend.service_port);
            }
        }
        if let FrontendAddress::Address(address) = key.address {
            self.unshare(frontend_address(address), edits);
            let ranges = frontend.source_ranges.as_deref();
            for (at, _) in self.range_lists.remove(ranges, Family::of(address)) {
                self.unshare(at, edits);
            }
        }
    }

    fn share(&mut self, at: (SetId, Key), value: Value, edits: &mut Edits) {
        let (owners, _) = self.shared.entry(at).or_insert_with(|| {
            edits.add(at, &value);
            (0, value)
        });
        *owners += 1;
    }

    fn unshare(&mut self, at: (SetId, Key), edits: &mut Edits) {
        let Some((owners, value)) = self.shared.get_mut(&at) else { return };
        *owners -= 1;
        if *owners == 0 {
            edits.remove(at, value);
            self.shared.remove(&at);
        }
    }

    /// All elements but those of slots.
    pub(super) fn all_entries(&self) -> Vec<TableEntry> {
        let mut all: Vec<TableEntry> = self.frontends.keys().flat_map(|key| self.view(key).entries).collect();
        all.extend(self.shared.iter().map(|(at, (_, value))| (*at, value.clone())));
        all.extend(self.cluster_ips.iter().map(|address| (cluster_ip(address), Value::default())));
        all.extend(networks_of(Kind::ServiceCidrs, &self.service_cidrs));
        for place in self.node_ports.values() {
            if let NodePortPlace::LocalIn(networks) = place {
                all.extend(networks_of(Kind::NodeAddresses, &networks.iter().copied().collect()));
            }
        }
        all.extend(networks_of(Kind::Pods, &self.pods));
        all.extend(self.token_elements.iter().map(|(at, value)| (*at, value.clone())));
        all
    }

    /// The backends in the slots of each frontend.
    pub(super) fn all_slots(&self) -> impl Iterator<Item = ((SetId, Key), Backend)> {
        self.frontends.keys().flat_map(move |key| {
            let (place, family) = place(key);
            self.view(key).lists.into_iter().flat_map(move |(list, shown)| {
                let set = SetId::new(Kind::Slots(place, list), family);
                let backends: Vec<Backend> = self
                    .ports
                    .get(&shown.port)
                    .map(|port| port.slots(shown.pool).iter().copied().collect())
                    .unwrap_or_default();
                let slots = (0u32..).zip(backends);
                slots.filter_map(move |(slot, backend)| {
                    Some(((set, frontend_key(key).and(&slot.to_ne_bytes())?), backend))
                })
            })
        })
    }

    /// Gives backends the slots that they have in the kernel's table, as far as possible.
    pub(super) fn adopt_slots(&mut self, earlier: impl Fn(SetId, &Key) -> Vec<SocketAddr>) {
        let mut done = BTreeSet::new();
        for (key, frontend) in &self.frontends {
            let (place, family) = place(key);
            for (list, pool) in lists(key, frontend).1 {
                let is_first = done.insert((frontend.service_port.clone(), pool));
                if let Some(port) = self.ports.get_mut(&frontend.service_port).filter(|_| is_first) {
                    let set = SetId::new(Kind::Slots(place, list), family);
                    port.slots_mut(pool).adopt(&earlier(set, &frontend_key(key)));
                }
            }
        }
    }
}

fn cluster_ip(address: &IpAddr) -> (SetId, Key) {
    (SetId::new(Kind::ClusterIps, Family::of(*address)), Key::address(*address))
}

fn frontend_address(address: IpAddr) -> (SetId, Key) {
    (SetId::new(Kind::Addresses, Family::of(address)), Key::address(address))
}

/// The source and the destination of a pod that reaches itself.
fn itself(backend: &Backend) -> (SetId, Key) {
    let key = Key::addresses(backend.address, backend.address);
    (SetId::new(Kind::Itself, Family::of(backend.address)), key)
}

/// Networks of both families as ranges.
fn networks_of(kind: Kind, networks: &BTreeSet<IpNet>) -> impl Iterator<Item = TableEntry> {
    let entries = Family::ALL.into_iter().flat_map(move |family| {
        let own = networks.iter().copied().filter(|network| Family::of(network.addr()) == family);
        let own: Vec<(Key, Key)> = ranges(own).iter().copied().collect();
        own.into_iter()
            .map(move |(first, last)| ((SetId::new(kind, family), first), Value::new(Some(last), None)))
    });
    entries.collect::<Vec<_>>().into_iter()
}
