//! The Linux dataplane: node state as nftables rules, routes, VXLAN and kernel parameters.

mod change;
mod counting;
mod cut;
mod desired_table;
mod dirty;
mod entries;
mod fold;
mod foreign_tables;
mod forget;
mod from_outside;
mod held_mark;
mod hold;
mod host_ports;
mod host_skeleton;
mod ipip;
mod ipv6;
mod literals;
mod lookups;
mod matches;
mod missing_modules;
pub(crate) mod nat;
mod network;
mod overlay;
mod packet_kinds;
pub(crate) mod packet_test;
mod peers;
mod policies;
mod programs;
mod reach;
mod recognition;
pub(crate) mod sets;
mod show;
mod skeleton;
mod slots;
mod staged;
mod table;
mod tracking;
mod untracked_overlay;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_dataplane::{
    Condition, Delta, Endpoint, EndpointId, LocalNode, NodeState, Reason, Report, RouteTarget, ShowError,
    Shown,
};

pub(crate) use self::ipv6::{enable_in_pod, is_on as is_ipv6_on, link_parameters as ipv6_link_parameters};
pub(crate) use self::network::link_parameters;

use self::cut::Cut;
use self::dirty::Dirty;
pub(crate) use self::entries::PROTOCOL as ROUTE_PROTOCOL;
use self::foreign_tables::ForeignTables;
use self::forget::Forgetter;
pub(crate) use self::held_mark::is_held;
pub use self::hold::HeldTable;
pub(crate) use self::ipip::remove as remove_ipip;
use self::network::Network;
pub(crate) use self::overlay::MARK as OVERLAY_MARK;
use self::peers::{NetworkChange, Peers};
use self::recognition::Observer;
use self::table::PolicyTable;
use self::tracking::Tracking;
use crate::{Error, Result};

/// The interval of full comparisons with the kernel while single pods are pending. Pending pods are checked at each
/// call.
const FULL_RESYNC: Duration = Duration::from_secs(10);

/// The interval at which the kernel's table is read even if nobody else can have changed it.
const READ_INTERVAL: Duration = Duration::from_secs(600);

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The name of the nftables table, which belongs to Tortie alone.
    pub table: String,
    /// Whether nobody else may change the table, if the kernel supports that (Linux 6.9). Then nobody can open the
    /// pods by `nft flush ruleset`. Otherwise everybody can, and the table is repaired after a report of the
    /// [watch](tortie_dataplane::Dataplane::watch), or at the next resync.
    pub guard_table: bool,
    /// The maximum size of an nftables transaction in bytes. Larger changes are split, and the pods concerned are
    /// closed meanwhile. The socket's buffer (32 MB if it can be raised) is a limit in any case.
    pub transaction_bytes: usize,
    /// The prefix of the names of pods' interfaces on the host. An interface with the prefix that belongs to no pod
    /// is closed.
    pub workload_prefix: String,
    /// The name of the VXLAN link.
    pub vxlan_device: String,
    /// The name of the VXLAN link for IPv6.
    pub vxlan_v6_device: String,
    /// The name of the IPIP link: that which the kernel's module creates.
    pub ipip_device: String,
    /// The maximum number of rules of a tier that are evaluated one after another. In a tier with more, rules with
    /// addresses, protocols and ports become lookups in sets.
    pub rules_in_a_row: usize,
    /// The maximum number of members of a set. A policy that names a larger one denies everything in its place: to write the set again
    /// takes time for which other pods wait.
    pub most_members: usize,
    /// The number of connections at which connection tracking counts as full; none for the kernel's limit.
    pub most_connections: Option<usize>,
    /// If another CNI plugin connects the pods: how their interfaces are recognised. The dataplane then enforces policy,
    /// and leaves routes, links and kernel parameters alone.
    pub policy_only: Option<PolicyOnly>,
}

/// How the interfaces of pods are recognised that another CNI plugin has connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyOnly {
    /// The prefixes of the names of pods' interfaces. Interfaces with such a name that belong to no pod are closed. The rest
    /// of a name may be the hash of the pod, as AWS VPC CNI, GKE's plugin and Azure CNI make it.
    pub prefixes: Vec<String>,
    /// The folder where the container runtime keeps the results of CNI plugins (`results` in libcni's cache).
    pub results: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            table: "tortie".to_owned(),
            guard_table: true,
            transaction_bytes: usize::MAX,
            workload_prefix: "cali".to_owned(),
            vxlan_device: "vxlan.calico".to_owned(),
            vxlan_v6_device: "vxlan-v6.calico".to_owned(),
            ipip_device: "tunl0".to_owned(),
            rules_in_a_row: 32,
            most_members: 500_000,
            most_connections: None,
            policy_only: None,
        }
    }
}

impl Config {
    /// The prefixes of the names of interfaces that are always pods'.
    fn pod_prefixes(&self) -> &[String] {
        match &self.policy_only {
            Some(policy_only) => &policy_only.prefixes,
            None => std::slice::from_ref(&self.workload_prefix),
        }
    }

    fn has_pod_prefix(&self, interface: &str) -> bool {
        self.pod_prefixes().iter().any(|prefix| interface.starts_with(prefix.as_str()))
    }
}

/// Makes the network namespace in which it was opened match the node state. Call it from threads in that namespace.
pub struct Dataplane {
    /// The endpoints as of the last call: a change of one releases the addresses that it had.
    endpoints: BTreeMap<EndpointId, Arc<Endpoint>>,
    /// The other nodes as of the last call.
    peers: Peers,
    policy: PolicyTable,
    network: Network,
    forgetter: Forgetter,
    foreign_tables: ForeignTables,
    tracking: Tracking,
    /// Time of the last full resync, while only individual pods are pending, for instance for their links.
    waiting: Option<Instant>,
    /// The number of pods with ports of the node.
    host_port_pods: usize,
    clock: Clock,
    /// Whether routes and links are waiting for policy.
    network_behind: bool,
    /// Released addresses whose connections may still be tracked, with the pod and the container.
    released: BTreeSet<(IpAddr, EndpointId, String)>,
    /// Whether a state has been applied.
    started: bool,
    /// Whether policy may have changed without a judgement of the established flows since: at the start, and while no policy could be
    /// put in force.
    uncut: bool,
    /// Recognises the pods' interfaces, if another plugin has connected them.
    observer: Option<Observer>,
    /// Why the last look at the pods' interfaces failed.
    unseen: Option<Error>,
    /// The addresses whose interfaces have changed or are closed now. Their connections are removed when the new policy is in force.
    moved: BTreeSet<IpAddr>,
    /// Whether somebody else has changed the table.
    disturbed: Arc<AtomicBool>,
    /// Time of the last comparison with the kernel.
    compared: Option<Instant>,
    /// Time of the last reading of the whole table.
    read: Option<Instant>,
}

/// Returns the current time, so that a test can decide when something is due.
pub type Clock = Box<dyn Fn() -> Instant + Send>;

impl Dataplane {
    /// Opens netlink connections in the calling thread's network namespace. Nothing is changed before the first
    /// [`apply`](tortie_dataplane::Dataplane::apply), which keeps everything that fits.
    ///
    /// # Errors
    /// A connection could not be opened; it needs CAP_NET_ADMIN in the namespace.
    pub fn open(config: Config) -> Result<Self> {
        let policy = PolicyTable::open(config.clone())?;
        let tracking = Tracking::new(config.most_connections);
        let observer = config.policy_only.clone().map(Observer::open).transpose()?;
        let (network, forgetter) = (Network::open(config)?, Forgetter::open()?);
        let (endpoints, released, foreign_tables) = Default::default();
        let (started, network_behind, uncut) = (false, false, true);
        Ok(Self {
            endpoints,
            peers: Peers::default(),
            policy,
            network,
            forgetter,
            foreign_tables,
            tracking,
            waiting: None,
            host_port_pods: 0,
            clock: Box::new(Instant::now),
            network_behind,
            released,
            started,
            uncut,
            observer,
            unseen: None,
            moved: BTreeSet::new(),
            disturbed: Arc::default(),
            compared: None,
            read: None,
        })
    }

    /// The same dataplane with another clock, which determines the time of full comparisons with the kernel. Waiting
    /// for the kernel itself takes real time.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// The MTU of new pods where no overlay has a link, for [`Wiring`](crate::wire::Wiring).
    #[must_use]
    pub fn pod_mtu(&self) -> crate::PodMtu {
        self.network.pod_mtu.clone()
    }

    /// Host endpoints may be identified by the node's own addresses. Returns whether these have changed.
    fn find_own_addresses(&mut self) -> Result<bool> {
        Ok(self.policy.own_addresses(self.network.own_addresses()?))
    }

    /// Compares policy with the kernel's, reads the kernel's table if somebody may have changed it, and applies what has changed beside the
    /// state.
    fn verify_policy(&mut self, state: &NodeState, dirty: &mut Dirty, may_differ: bool) -> Result<()> {
        if !state.host_endpoints.is_empty() {
            let found = self.find_own_addresses();
            if found.is_err() {
                self.policy.forget_kernel();
            }
            if found? {
                dirty.hosts.extend(state.host_endpoints.keys().cloned());
                dirty.skeleton = true;
            }
        }
        if may_differ { self.policy.resync(state) } else { self.policy.verify(state, dirty) }
    }

    /// Collects the objects that the deltas concern, and the addresses that endpoints had before them.
    fn ingest(&mut self, deltas: &[Delta]) -> Dirty {
        let mut dirty = Dirty::default();
        let had_host_ports = self.host_port_pods > 0;
        for delta in deltas {
            let replaced = match delta {
                Delta::Endpoint(id, endpoint) => {
                    Some((id, self.endpoints.insert(id.clone(), endpoint.clone())))
                }
                Delta::EndpointRemoved(id) => Some((id, self.endpoints.remove(id))),
                _ => None,
            };
            let wants_one = |endpoint: &Endpoint| usize::from(!endpoint.host_ports.is_empty());
            if let Delta::Endpoint(_, endpoint) = delta {
                self.host_port_pods += wants_one(endpoint);
            }
            if let Some((id, Some(old))) = replaced {
                self.host_port_pods -= wants_one(&old);
                if self.has_interface(id) {
                    let held = |address: &IpAddr| (*address, id.clone(), old.container_id.to_string());
                    self.released.extend(old.addresses.iter().map(held));
                }
            }
            dirty.note(delta);
        }
        dirty.skeleton |= had_host_ports != (self.host_port_pods > 0);
        dirty
    }

    /// Whether the pod has an interface. Whoever makes pods could invent the addresses of others, and end their connections.
    fn has_interface(&self, id: &EndpointId) -> bool {
        self.observer.as_ref().is_none_or(|observer| observer.recognised().interfaces.contains_key(id))
    }

    /// Schedules the removal of connections of addresses that their sandboxes no longer have: the next owner of an
    /// address must not inherit them. Waits for addresses that have a new owner by the same change.
    fn forget_released(&mut self, state: &NodeState) -> Result<()> {
        let keeps = |(address, id, container): &(IpAddr, EndpointId, String)| {
            let now = state.endpoints.get(id);
            now.is_some_and(|now| *now.container_id == **container && now.addresses.contains(address))
        };
        let mut gone: BTreeSet<IpAddr> =
            self.released.iter().filter(|held| !keeps(held)).map(|(address, ..)| *address).collect();
        if !self.started {
            let has_block = state.routes.values().any(|target| matches!(target, RouteTarget::Local));
            let tracked = if has_block { self.forgetter.addresses()? } else { BTreeSet::new() };
            gone.extend(free_addresses(state, tracked));
            self.started = true;
        }
        self.released.clear();
        if gone.is_empty() {
            return Ok(());
        }
        let held = state.endpoints.values().flat_map(|endpoint| &endpoint.addresses);
        let given_again: Vec<_> = held.filter(|address| gone.contains(address)).copied().collect();
        self.forgetter.ask(gone);
        Ok(self.forgetter.wait_for(&given_again)?)
    }

    /// Waits for the removal of connections that newly assigned addresses must not inherit.
    fn settle_given(&self, deltas: &[Delta]) -> Result<()> {
        let given = deltas.iter().filter_map(|delta| match delta {
            Delta::Endpoint(_, endpoint) => Some(&endpoint.addresses),
            _ => None,
        });
        Ok(self.forgetter.wait_for(given.flatten())?)
    }

    /// Schedules the removal of established flows that policy denies now, if this is configured and policy is in
    /// force.
    fn cut_denied(&mut self, state: &NodeState, mut dirty: Dirty, policy: Result<()>) -> Result<()> {
        if !cut::is_enabled(state) {
            return policy;
        }
        dirty.settings |= std::mem::replace(&mut self.uncut, true);
        policy?;
        if !dirty.is_empty() {
            let own_addresses = self.network.own_addresses()?.into_keys().collect();
            self.forgetter.ask_to_cut(Cut::new(state, &dirty, own_addresses));
        }
        self.uncut = false;
        Ok(())
    }

    /// Applies forwarding, routes and links, unless the table may be missing from the kernel: then the existing state
    /// stays, and nothing new is opened.
    fn network_if_policed(
        &mut self,
        state: &NodeState,
        change: NetworkChange,
        work: impl FnOnce(&mut Network, &NetworkChange) -> tortie_kernel::Result<()>,
    ) -> Result<()> {
        if self.observer.is_some() {
            return self.forget_released(state);
        }
        let change = if self.network_behind { NetworkChange::Everything } else { change };
        self.network_behind = !self.policy.is_in_kernel() && !matches!(change, NetworkChange::Nothing);
        let done = match self.policy.is_in_kernel() {
            true => work(&mut self.network, &change).map_err(Error::from),
            false => Ok(()), // the report has a condition that says why
        };
        done.and(self.forget_released(state))
    }

    /// Looks which interfaces are whose, if something has changed or `is_due`.
    fn recognise(&mut self, state: &NodeState, dirty: &mut Dirty, is_due: bool) {
        let now = (self.clock)();
        let Some(observer) = &mut self.observer else { return };
        let is_first = !observer.has_looked();
        let has_table = !is_first || self.policy.may_have_earlier_table();
        match observer.look(state, is_due, has_table, now) {
            Ok(Some(before)) => {
                let after = observer.recognised();
                let mut moved = before.moved(after);
                dirty.endpoints.extend(moved.iter().cloned());
                dirty.unclaimed |= before.unclaimed != after.unclaimed;
                self.moved.extend(before.newly_closed(after));
                self.policy.recognised = Some(after.clone());
                if is_first {
                    moved = self.policy.without_entries(state, &moved).unwrap_or(moved);
                }
                let moved = moved.iter().filter_map(|id| state.endpoints.get(id));
                self.moved.extend(moved.flat_map(|pod| pod.addresses.iter().copied()));
                self.unseen = self.forget_moved().err();
            }
            Ok(None) => self.unseen = None,
            // What was recognised stays. The interfaces of other pods are unknown.
            Err(error) => self.unseen = Some(error),
        }
    }

    /// Removes the connections of the addresses whose interface is another one now, or is closed now. The next pod with the address
    /// must not inherit them.
    fn forget_moved(&self) -> Result<()> {
        self.forgetter.ask(self.moved.clone());
        Ok(self.forgetter.wait_for(&self.moved)?)
    }

    /// Does so once more when policy is in force: until then, packets may have made new entries for connections that began
    /// without policy.
    fn judge_moved(&mut self, policy: &Result<()>) {
        if policy.is_err() || self.moved.is_empty() {
            return;
        }
        match self.forget_moved() {
            Ok(()) => self.moved.clear(),
            Err(error) => self.unseen = Some(error),
        }
    }

    /// Whether no look at the pods' interfaces has succeeded. Then the table of an earlier process stays: a table without the pods'
    /// interfaces would open them.
    fn is_blind(&self) -> bool {
        self.observer.as_ref().is_some_and(|observer| !observer.has_looked())
    }

    /// Reports the pods whose interfaces are not known.
    fn report_unrecognised(&self, report: &mut Report) {
        let Some(observer) = &self.observer else { return };
        for (id, condition) in observer.conditions((self.clock)()) {
            report.endpoints.entry(id).or_default().push(condition);
        }
        for error in self.unseen.iter().chain(observer.unreadable()) {
            report.retry = true;
            report.node.push(failure(Reason::PolicyNotInForce, error));
        }
    }

    /// The report on the results of policy and routes.
    fn report(&self, state: &NodeState, policy: Result<()>, network: Result<()>) -> Report {
        let mut report = Report { endpoints: self.policy.conditions(), ..Report::default() };
        self.network.report(&mut report);
        self.report_unrecognised(&mut report);
        report.node.extend(self.policy.host_conditions());
        if self.policy.is_in_kernel() {
            report.node.extend(self.policy.missing_modules.conditions());
            report.node.extend(self.policy.from_outside.condition());
        }
        report.node.extend(self.foreign_tables.conditions());
        report.node.extend(self.tracking.condition());
        if let Err(error) = policy {
            let reason = Reason::PolicyNotInForce;
            report.retry = true;
            report.node.push(failure(reason, &error));
            if self.network_behind {
                let message =
                    "forwarding, routes and links stay as they are until policy is in force".to_owned();
                report.node.push(Condition::new(Reason::NetworkNotInForce, message));
            }
            // It is unknown which endpoints are affected.
            for id in state.endpoints.keys() {
                let condition = Condition::new(reason, format!("its policy may not be in force: {error}"));
                report.endpoints.entry(id.clone()).or_default().push(condition);
            }
        }
        if let Err(error) = network {
            report.retry = true;
            report.node.push(failure(Reason::NetworkNotInForce, &error));
        }
        report
    }
}

impl tortie_dataplane::Dataplane for Dataplane {
    fn apply(&mut self, state: &NodeState, deltas: &[Delta]) -> Report {
        let (change, peers) = self.peers.note(deltas);
        let mut dirty = Dirty { peers, ..self.ingest(deltas) };
        let is_due = !dirty.endpoints.is_empty() || self.unseen.is_some();
        self.recognise(state, &mut dirty, is_due);
        if self.is_blind() {
            return self.report(state, Ok(()), Ok(()));
        }
        let settled = self.settle_given(deltas);
        // Policy first: no route leads to a pod before its policy exists.
        let policy = match dirty.hosts.is_empty() {
            true => Ok(()),
            false => self.find_own_addresses().map(drop),
        };
        if policy.is_err() {
            // These changes are not applied, so the next call compares everything.
            self.policy.forget_kernel();
        }
        let policy = policy.and_then(|()| self.policy.apply(state, &dirty));
        self.judge_moved(&policy);
        let policy = self.cut_denied(state, dirty, policy);
        let network = self.network_if_policed(state, change, |network, change| network.apply(state, change));
        self.foreign_tables.look_once(&self.policy.config.table, self.policy.nft.commits(), (self.clock)());
        let report = self.report(state, policy, settled.and(network));
        if !report.retry || report.node_failures().next().is_some() {
            self.waiting = None;
        }
        report
    }

    fn look(&mut self, state: &NodeState) -> Option<Report> {
        let mut dirty = Dirty::default();
        self.recognise(state, &mut dirty, false);
        if dirty.is_empty() || !self.policy.is_in_kernel() {
            return None;
        }
        let policy = self.policy.apply(state, &dirty);
        self.judge_moved(&policy);
        let policy = self.cut_denied(state, dirty, policy);
        Some(self.report(state, policy, Ok(())))
    }

    fn watch(&mut self, on_change: Box<dyn Fn() + Send>) {
        // Both watches have threads of their own.
        let on_change = std::sync::Mutex::new(on_change);
        let on_change: Arc<dyn Fn() + Send + Sync> =
            Arc::new(move || on_change.lock().unwrap_or_else(std::sync::PoisonError::into_inner)());
        let (disturbed, of_table) = (self.disturbed.clone(), on_change.clone());
        self.policy.watch(Box::new(move || {
            disturbed.store(true, Ordering::SeqCst);
            of_table();
        }));
        if let Some(observer) = &mut self.observer {
            observer.watch(on_change);
        }
    }

    fn show(&mut self, state: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        self.policy.show(state, endpoint)
    }

    fn resync(&mut self, state: &NodeState) -> Report {
        let now = (self.clock)();
        let is_disturbed = self.disturbed.swap(false, Ordering::SeqCst);
        let is_recent = |at: Option<Instant>| at.is_some_and(|at| now < at + FULL_RESYNC);
        // Links, routes or results of plugins have changed, which concerns few pods.
        let is_of_few = self.observer.is_some() && is_recent(self.compared) && self.policy.is_in_kernel();
        if !is_disturbed && (is_recent(self.waiting) || is_of_few) {
            return self.apply(state, &[]);
        }
        self.compared = Some(now);
        let mut dirty = Dirty::default();
        self.recognise(state, &mut dirty, true);
        if self.is_blind() {
            return self.report(state, Ok(()), Ok(()));
        }
        let is_old = self.read.is_none_or(|at| now >= at + READ_INTERVAL);
        let policy = self.verify_policy(state, &mut dirty, is_disturbed || is_old);
        if is_disturbed || is_old {
            self.read = Some(now);
        }
        self.judge_moved(&policy);
        let policy = self.cut_denied(state, dirty, policy);
        let network =
            self.network_if_policed(state, NetworkChange::Everything, |network, _| network.resync(state));
        self.foreign_tables.look(&self.policy.config.table, self.policy.nft.commits(), now);
        self.tracking.look(state, &self.forgetter, now);
        let report = self.report(state, policy, network);
        self.waiting = (report.retry && report.node_failures().next().is_none()).then_some(now);
        report
    }
}

fn failure(reason: Reason, error: &Error) -> Condition {
    Condition::new(reason, format!("{error}; Tortie retries"))
}

/// Those of these addresses that are in the node's blocks, and that nobody has: no endpoint, no pod and no tunnel of another node that has
/// borrowed the address. An agent that was killed may not have forgotten their connections. A block may be too large to list its addresses, such as a network of flannel.
fn free_addresses(state: &NodeState, mut tracked: BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
    let local = state.routes.iter().filter(|(_, target)| matches!(target, RouteTarget::Local));
    let blocks: Vec<&IpNet> = local.map(|(block, _)| block).collect();
    tracked.retain(|address| blocks.iter().any(|block| block.contains(address)));
    for address in state.endpoints.values().flat_map(|endpoint| &endpoint.addresses) {
        tracked.remove(address);
    }
    for own in state.node.iter().flat_map(LocalNode::vteps) {
        tracked.remove(&own.address);
    }
    for (net, target) in &state.routes {
        if net.prefix_len() == net.max_prefix_len() && !matches!(target, RouteTarget::Local) {
            tracked.remove(&net.addr());
        }
    }
    for vtep in state.vteps.values() {
        tracked.remove(&vtep.address);
    }
    if let Some(own) = state.node.as_ref().and_then(LocalNode::ipip_address) {
        tracked.remove(&own.into());
    }
    tracked
}
