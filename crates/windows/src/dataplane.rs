//! Applies the node state.

mod network;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use tortie_api::calico::{BgpFromPods, FelixConfiguration, WindowsPolicySets};
use tortie_api::net::IpVersion;
use tortie_dataplane::{
    Condition, Dataplane, Delta, Endpoint, EndpointId, LocalNode, NodeState, Reason, Report, Settings,
    ShowError, Shown, not_enforced,
};
use tortie_hcn::{Class, Feature, Guid, Hcn, HcnExt, Version};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{PolicyId, SetId};
use tracing::{info, warn};

use crate::acl_reconciler::{AclReconciler, Node};
use crate::backoff::Backoff;
use crate::bridge::end_v6;
use crate::endpoint::find;
use crate::firewall_opening::FirewallOpenings;
use crate::host::Host;
use crate::load_balancers::LoadBalancers;
use crate::network_spec::NetworkSpec;
use crate::outbound::{CurrentNetworks, Networks, untranslated};
use crate::pod_network::{CurrentPodNetwork, PodNetwork};
use crate::recognition::{PolicyOnly, Recognition};
use crate::results_watch::ResultsWatch;
use crate::saved_report::{SetProof, name_sets};
use crate::static_rules::StaticRules;
use crate::{Error, NETWORK, VXLAN_PORT, show};
use network::own_ipv6_block;

/// The interval of full checks while something has failed.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Makes a Windows node match its state: the network of its pods, routes to other nodes, and the ACLs of its pods.
///
/// It tracks which parts of the state are not in force yet. It reads HNS before it sends anything, and
/// does not send what exists already: HNS may reset the connections of an endpoint whose ACLs are written
/// (docs/hns.md, ACLs).
pub struct WindowsDataplane {
    hcn: Arc<dyn Hcn>,
    host: Host,
    /// The machine's addresses when last read.
    host_addresses: Option<BTreeSet<Ipv4Net>>,
    host_due: bool,
    pod_network: Option<PodNetwork>,
    current_network: CurrentPodNetwork,
    /// Why the requested network does not exist, and when it is retried.
    network_refused: Option<(NetworkSpec, Error)>,
    network_backoff: Backoff<()>,
    routes_due: bool,
    /// The routes that HNS refused, and when they are retried.
    routes_refused: Vec<Condition>,
    routes_backoff: Backoff<()>,
    acl_reconciler: AclReconciler,
    static_rules: StaticRules,
    load_balancers: LoadBalancers,
    /// Whether the node's network is of type L2Bridge.
    is_bridge: bool,
    /// The addresses of Services.
    services: Vec<Ipv4Net>,
    networks: CurrentNetworks,
    /// The network's identifier when last seen.
    network: Option<Guid>,
    /// The node's IPv6 address in the network when last seen, also while something is wrong with the network.
    node_end_v6: Option<Ipv6Addr>,
    /// Whether pods may have IPv6, when last read.
    has_ipv6: bool,
    /// The version of HNS when last read.
    version: Option<Version>,
    version_due: bool,
    /// What the report of a selftest says about sets in ACLs, for this version.
    set_proof: SetProof,
    clock: Clock,
    /// Whether the last call asked to be called again soon.
    in_trouble: bool,
    /// The time of the last full check.
    looked: Option<Instant>,
    /// Whether HNS has notified of a change since.
    notified: Arc<AtomicBool>,
    /// Whether the machine has.
    host_notified: Arc<AtomicBool>,
    /// If another CNI plugin connects the pods: how their endpoints are recognised.
    policy_only: Option<PolicyOnly>,
    /// Whether results of plugins have changed since.
    results_notified: Arc<AtomicBool>,
    results_watch: Option<ResultsWatch>,
    /// Whether to look for endpoints of unknown pods, which must be closed.
    unclaimed_due: bool,
    /// The conditions about these endpoints, and the backoff of attempts to close them.
    unclaimed: Vec<Condition>,
    unclaimed_backoff: Backoff<()>,
}

/// Records that HNS or the machine has changed, and calls the subscriber.
struct ChangeNotifier {
    notified: Arc<AtomicBool>,
    notify: Arc<Mutex<Box<dyn Fn() + Send>>>,
}

impl ChangeNotifier {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.notify.lock().unwrap_or_else(PoisonError::into_inner)();
    }
}

/// Returns the current time, so that a test can decide when something is due.
pub type Clock = Box<dyn Fn() -> Instant + Send>;

impl WindowsDataplane {
    /// A dataplane without desired state, on a machine of which nothing is known.
    pub fn new(hcn: Arc<dyn Hcn>) -> WindowsDataplane {
        WindowsDataplane::with_clock(hcn, Box::new(Instant::now))
    }

    /// As [`new`](Self::new), with another clock, which determines retries.
    pub fn with_clock(hcn: Arc<dyn Hcn>, clock: Clock) -> WindowsDataplane {
        WindowsDataplane {
            hcn,
            host: Host::unknown(),
            host_addresses: None,
            host_due: true,
            pod_network: None,
            current_network: CurrentPodNetwork::default(),
            network_refused: None,
            network_backoff: Backoff::default(),
            routes_due: false,
            routes_refused: Vec::new(),
            routes_backoff: Backoff::default(),
            acl_reconciler: AclReconciler::default(),
            static_rules: StaticRules::default(),
            load_balancers: LoadBalancers::default(),
            is_bridge: false,
            services: Vec::new(),
            networks: CurrentNetworks::default(),
            network: None,
            node_end_v6: None,
            has_ipv6: false,
            version: None,
            version_due: true,
            set_proof: SetProof::Absent,
            clock,
            in_trouble: false,
            looked: None,
            notified: Arc::default(),
            host_notified: Arc::default(),
            policy_only: None,
            results_notified: Arc::default(),
            results_watch: None,
            unclaimed_due: true,
            unclaimed: Vec::new(),
            unclaimed_backoff: Backoff::default(),
        }
    }

    /// Adds rules that every pod has before policy (policy decision 26).
    #[must_use]
    pub fn with_static_rules(self, static_rules: StaticRules) -> Self {
        Self { static_rules, ..self }
    }

    /// Enforces policy on pods that another CNI plugin connects, and nothing else: no network, no routes, no rule of the firewall.
    #[must_use]
    pub fn with_policy_only(self, policy_only: PolicyOnly) -> Self {
        Self { policy_only: Some(policy_only), ..self }
    }

    /// Sets the machine under HNS.
    #[must_use]
    pub fn with_host(self, host: Host) -> Self {
        Self { host, ..self }
    }

    /// Makes the node's network one of type L2Bridge instead of an overlay: packets to other nodes leave as they are, by routes of
    /// the node.
    #[must_use]
    pub fn with_bridge(self, is_bridge: bool) -> Self {
        Self { is_bridge, ..self }
    }

    /// Names the networks of the addresses of Services.
    #[must_use]
    pub fn with_services(self, services: Vec<Ipv4Net>) -> Self {
        Self { services, ..self }
    }

    /// The cluster's networks when last known, for [`WindowsWiring`](crate::WindowsWiring).
    pub fn networks(&self) -> CurrentNetworks {
        self.networks.clone()
    }

    /// The network when last seen; can be used after the dataplane has been moved.
    pub fn current_network(&self) -> CurrentPodNetwork {
        self.current_network.clone()
    }

    /// Marks what a change concerns. `state` already contains the change.
    fn ingest(&mut self, state: &NodeState, delta: &Delta) {
        match delta {
            Delta::Node(_) => {
                // Its addresses are in every endpoint's list, its VNI in every route.
                (self.pod_network, self.routes_due) = (None, true);
                state.endpoints.keys().for_each(|id| self.acl_reconciler.mark_due(id.clone()));
            }
            Delta::Route(_) | Delta::RouteRemoved(_) => {
                (self.pod_network, self.routes_due) = (None, true);
                // A Service's address may belong to a pod now.
                self.acl_reconciler.services_changed();
            }
            Delta::Service(..) | Delta::ServiceRemoved(_) => self.acl_reconciler.services_changed(),
            Delta::Vtep(_) | Delta::VtepRemoved(..) => self.routes_due = true,
            Delta::SetCreated(id, ..) | Delta::SetChanged { id, .. } | Delta::SetRemoved(id) => {
                self.mark_users_of_set(state, id);
            }
            Delta::Policy(id, _) | Delta::PolicyRemoved(id) => {
                self.mark_users_of_policies(state, &BTreeSet::from([id]))
            }
            // Whether ACLs name sets, what pods never send, and the pools.
            Delta::Settings(_) => {
                state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at_now(id.clone()))
            }
            Delta::HostEndpoint(..) | Delta::HostEndpointRemoved(_) => {}
            // The HNS endpoint may be another one than before.
            Delta::Endpoint(id, _) => self.acl_reconciler.look_at_now(id.clone()),
            Delta::EndpointRemoved(id) => {
                self.unclaimed_due = true;
                self.acl_reconciler.forget(id);
                self.acl_reconciler.look_at_host_ports();
            }
        }
    }

    fn mark_users_of_set(&mut self, state: &NodeState, set: &SetId) {
        if *set == *ALL_NODES && state.settings.bgp_from_pods == BgpFromPods::Drop {
            // Every endpoint's list names it.
            return state.endpoints.keys().for_each(|id| self.acl_reconciler.mark_due(id.clone()));
        }
        let naming = state.policies.iter().filter(|(_, rules)| rules.set_ids().any(|id| id == set));
        self.mark_users_of_policies(state, &naming.map(|(id, _)| id).collect());
    }

    fn mark_users_of_policies(&mut self, state: &NodeState, policies: &BTreeSet<&PolicyId>) {
        let uses = |endpoint: &Endpoint| endpoint.program.policy_ids().any(|id| policies.contains(id));
        let users = state.endpoints.iter().filter(|(_, endpoint)| uses(endpoint));
        users.for_each(|(id, _)| self.acl_reconciler.mark_due(id.clone()));
    }

    fn reconcile(&mut self, state: &NodeState) -> Report {
        let (mut report, now) = (Report::default(), (self.clock)());
        report.node.extend(not_enforced(state));
        self.routes_due |= self.routes_backoff.due(now).next().is_some();
        self.read_addresses(state);
        report.retry |= self.host_due;
        let mut away = None;
        let networked = match self.policy_only {
            Some(_) => Ok(()),
            None => self.sync_network(state, &mut report),
        };
        if let Err(error) = networked {
            note(&mut report.node, &error);
            report.retry |= error.is_passing();
            away = error.is_unavailable().then_some(error);
        }
        let sets = match away {
            None => {
                let sets = self.policy_sets(state, &mut report.node);
                sets.inspect_err(|error| away = Some(error.clone())).unwrap_or_default()
            }
            Some(_) => None,
        };
        report.node.extend(self.host.routes().condition());
        report.node.extend(self.open_firewall(state));
        let networks = Networks::new(&state.settings, self.services.clone());
        let provider = self.pod_network.as_ref().map(|network| network.provider_address);
        let networks = Networks { provider, is_bridge: self.is_bridge, ..networks };
        report.node.extend(networks.condition());
        self.networks.set(networks.clone());
        report.node.extend(
            own_ipv6_block(state)
                .filter(|_| self.has_ipv6)
                .and_then(|block| untranslated(&state.settings, block)),
        );
        let recognition = self.policy_only.as_ref().map(|config| Recognition::new(&*self.hcn, config));
        let node = Node {
            networks,
            hcn: &*self.hcn,
            state,
            sets,
            addresses: self.node_addresses(state),
            has_ipv6: self.has_ipv6,
            underlay: state.node.as_ref().and_then(own_address),
            static_rules: &self.static_rules.0,
            recognition: recognition.as_ref(),
            now,
        };
        let away = away.or_else(|| self.acl_reconciler.reconcile(&node).err());
        let away = away.or_else(|| {
            let recognition = recognition.as_ref()?;
            let is_due = self.unclaimed_due || self.unclaimed_backoff.due(now).next().is_some();
            if !is_due && !recognition.has_looked() {
                return None;
            }
            let (failures, further) = match recognition.close_unclaimed(state) {
                Err(error) if error.is_unavailable() => return Some(error),
                Err(error) => (vec![error], Vec::new()),
                Ok(closing) => (closing.failures, closing.further),
            };
            self.unclaimed_due = false;
            match failures.as_slice() {
                [] => self.unclaimed_backoff.forget(&()),
                _ => self.unclaimed_backoff.failed((), now),
            }
            self.unclaimed = further;
            failures.iter().for_each(|error| note(&mut self.unclaimed, error));
            None
        });
        report.node.extend(self.unclaimed.iter().cloned());
        report.retry |= !self.unclaimed_backoff.is_empty();
        if let Some(error) = away {
            // After HNS was unavailable, the network is read first.
            self.pod_network = None;
            report.retry = true;
            self.acl_reconciler.put_off(&error);
        } else {
            self.load_balancers.look(&*self.hcn);
        }
        let node = self.node_addresses(state);
        report.node.extend(self.load_balancers.condition(state, &node, self.version));
        // An endpoint that failed may have an older and wider list, so it does not count as in force.
        report.retry |= self.acl_reconciler.is_in_trouble();
        report.node.extend(self.acl_reconciler.conditions_of_sets());
        report.endpoints = self.acl_reconciler.conditions();
        self.in_trouble = report.retry;
        report
    }

    /// Tells the firewall's opening for VXLAN the addresses from which it comes. Returns what is wrong with all openings.
    fn open_firewall(&self, state: &NodeState) -> Vec<Condition> {
        let Some(FirewallOpenings { vxlan, bgp }) = self.host.firewall() else { return Vec::new() };
        // An L2Bridge network takes no VXLAN, and a network of another plugin is not the agent's.
        let takes_vxlan = !self.is_bridge && self.policy_only.is_none();
        let tunnels = state.vteps.values().filter(|_| takes_vxlan);
        let parents = tunnels.map(|vtep| vtep.parent).filter(IpAddr::is_ipv4);
        vxlan.admit(VXLAN_PORT, parents.collect());
        let now = (self.clock)();
        [vxlan, bgp].into_iter().filter_map(|opening| opening.condition(now)).collect()
    }

    /// Reads the machine's addresses, if they may have changed. All of them may reach the pods, so every list has them.
    fn read_addresses(&mut self, state: &NodeState) {
        if !self.host_due {
            return;
        }
        let Some(addresses) = self.host.addresses() else { return };
        self.host_due = false;
        if self.host_addresses.as_ref() != Some(&addresses) {
            info!(?addresses, "the machine's addresses");
            self.host_addresses = Some(addresses);
            // Its address on the underlay may be another one.
            self.pod_network = None;
            state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at_now(id.clone()));
        }
    }

    /// The machine's own addresses towards its pods: all of IPv4, and of IPv6 the one that its Node has. Others of IPv6 may be temporary,
    /// or another machine's (duplicate address detection).
    fn node_addresses(&self, state: &NodeState) -> BTreeSet<IpAddr> {
        let of_machine = self.host_addresses.iter().flatten().map(|net| net.addr().into());
        let end = self.node_end_v6.map(IpAddr::V6);
        node_addresses(state).into_iter().chain(of_machine).chain(end).collect()
    }

    /// Whether pods may have IPv6: those of another plugin, whose endpoints then have it, too, and the agent's own in a network with it.
    /// All lists depend on it.
    fn read_ipv6(&mut self, state: &NodeState) {
        if let Some(network) = &self.pod_network {
            self.node_end_v6 = network.gateway_v6;
        }
        let has_it = self.version.is_some_and(|version| version.supports(Feature::Ipv6DualStack));
        let has_it = has_it && (self.policy_only.is_some() || self.node_end_v6.is_some());
        if has_it != self.has_ipv6 {
            self.has_ipv6 = has_it;
            state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at_now(id.clone()));
        }
    }

    /// The network whose sets ACLs may name, if HNS supports sets, and whether they should.
    fn policy_sets(
        &mut self,
        state: &NodeState,
        conditions: &mut Vec<Condition>,
    ) -> Result<Option<(Guid, bool)>, Error> {
        if self.network.is_none() && self.policy_only.is_none() {
            // Whatever is wrong with it, its endpoints may have ACLs that name sets, and IPv6.
            let found = self.hcn.network_by_name(NETWORK)?;
            self.network = found.as_ref().map(|network| network.id);
            self.node_end_v6 = found.as_ref().and_then(end_v6);
        }
        if self.version_due {
            match self.hcn.version() {
                Ok(version) => {
                    (self.version, self.version_due) = (Some(version), false);
                    self.read_selftest(version);
                }
                Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
                Err(error) => {
                    warn!(%error, "HNS does not answer the version request; Tortie uses the last known version")
                }
            }
        }
        self.read_ipv6(state);
        if self.policy_only.is_some() {
            let why = "which would be put into the network of another CNI plugin";
            conditions.extend(without_sets(&state.settings, why));
            return Ok(None);
        }
        let (Some(network), Some(version)) = (self.network, self.version) else { return Ok(None) };
        if !version.supports(Feature::SetPolicy) {
            return Ok(None);
        }
        if self.has_ipv6 {
            let why = "and nothing shows what HNS does with those of IPv6";
            conditions.extend(without_sets(&state.settings, why));
            return Ok(Some((network, false)));
        }
        let (wanted, condition) = name_sets(&state.settings, version, &self.set_proof);
        conditions.extend(condition);
        Ok(Some((network, wanted)))
    }

    /// Reads what a selftest has found out about sets.
    fn read_selftest(&mut self, version: Version) {
        let proof = self.host.selftest().map_or(SetProof::Absent, |report| report.proof(version));
        if proof != self.set_proof {
            info!(?proof, %version, "the report of the selftest, on sets in ACLs");
            self.set_proof = proof;
        }
    }
}

impl Dataplane for WindowsDataplane {
    fn watch(&mut self, notify: Box<dyn Fn() + Send>) {
        let notify = Arc::new(Mutex::new(notify));
        let of_hns = ChangeNotifier { notified: self.notified.clone(), notify: Arc::clone(&notify) };
        let of_host = ChangeNotifier { notified: self.host_notified.clone(), notify: Arc::clone(&notify) };
        if let Some(PolicyOnly { results }) = &self.policy_only {
            let of_results =
                ChangeNotifier { notified: self.results_notified.clone(), notify: notify.clone() };
            let watch = ResultsWatch::start(results.clone(), move || of_results.notify());
            self.results_watch = watch
                .inspect_err(|error| warn!(%error, "cannot watch the results of CNI plugins; Tortie notices changes at the next resync"))
                .ok();
        }
        self.hcn.watch(Box::new(move || of_hns.notify()));
        self.host.watch(Box::new(move || of_host.notify()));
    }

    fn asks_for_services(&self) -> bool {
        true
    }

    fn show(&mut self, state: &NodeState, id: &EndpointId) -> Result<Shown, ShowError> {
        let endpoint = state.endpoints.get(id).ok_or_else(|| ShowError::NoEndpoint(id.to_string()))?;
        let failed = |error: Error| ShowError::System { object: id.to_string(), problem: error.to_string() };
        let found = match &self.policy_only {
            Some(config) => {
                Recognition::new(&*self.hcn, config).find(id, &endpoint.addresses).map_err(failed)?
            }
            None => {
                let container_id = endpoint.container_id.to_string();
                let found = find(&*self.hcn, &container_id, NETWORK).map_err(failed)?;
                found.ok_or_else(|| failed(Error::NoEndpoint { container_id }))?
            }
        };
        Ok(show::shown(endpoint, &found, self.acl_reconciler.list_of(id)))
    }

    fn apply(&mut self, state: &NodeState, deltas: &[Delta]) -> Report {
        for delta in deltas {
            self.ingest(state, delta);
        }
        self.reconcile(state)
    }

    fn resync(&mut self, state: &NodeState) -> Report {
        let now = (self.clock)();
        // After a failure this is called every second, for what failed, and after each change of a route of the machine, which
        // may be many. The rest is checked at the usual interval, and when HNS has notified of a change.
        let of_host = self.host_notified.swap(false, Ordering::AcqRel);
        self.host_due |= of_host;
        // Somebody may have changed the node's routes.
        self.routes_due |= of_host && self.is_bridge;
        if self.results_notified.swap(false, Ordering::AcqRel) {
            self.unclaimed_due = true;
            self.acl_reconciler.retry_failed();
            state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at(id.clone(), now));
        }
        let just_looked = self.looked.is_some_and(|looked| now < looked + LOOK_EVERY);
        let notified = self.notified.swap(false, Ordering::AcqRel);
        if notified || !(just_looked && (self.in_trouble || of_host)) {
            self.looked = Some(now);
            // HNS may have been updated since.
            (self.pod_network, self.version_due, self.host_due) = (None, true, true);
            self.routes_due |= !self.routes_backoff.has_to_wait(&(), now);
            self.acl_reconciler.look_at_sets(now);
            self.load_balancers.look_at();
            self.unclaimed_due = true;
            state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at(id.clone(), now));
        }
        self.reconcile(state)
    }
}

/// Reports that the node has no sets although they are asked for.
fn without_sets(settings: &Settings, why: &str) -> Option<Condition> {
    (settings.windows_policy_sets == WindowsPolicySets::Enabled).then(|| {
        let message = format!(
            "the annotation {} of FelixConfiguration asks for sets, {why}: addresses are listed instead",
            FelixConfiguration::WINDOWS_POLICY_SETS
        );
        Condition::new(Reason::FieldNotSupported, message)
    })
}

fn own_address(node: &LocalNode) -> Option<Ipv4Addr> {
    ipv4(node.address(IpVersion::V4)?)
}

fn ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

/// The node's addresses in the datastore.
fn node_addresses(state: &NodeState) -> BTreeSet<IpAddr> {
    let Some(node) = &state.node else { return BTreeSet::new() };
    let tunnel = node.vtep(IpVersion::V4).map(|vtep| vtep.address);
    IpVersion::ALL.into_iter().filter_map(|family| node.address(family)).chain(tunnel).collect()
}

/// Converts an error to a condition. The object is retried.
fn note(conditions: &mut Vec<Condition>, error: &Error) {
    warn!(%error, "HNS differs from the desired state; Tortie retries");
    conditions.push(Condition::new(error.reason(), error.to_string()));
}
