//! Applies the node state.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net};
use tortie_api::calico::{FelixConfiguration, WindowsPolicySets};
use tortie_api::net::IpVersion;
use tortie_dataplane::{
    Condition, Dataplane, Delta, Endpoint, EndpointId, LocalNode, NodeState, Reason, Report, RouteTarget,
    Settings, ShowError, Shown, not_enforced,
};
use tortie_hcn::{Class, Feature, Guid, Hcn, HcnExt, Version};
use tortie_policy::program::{PolicyId, SetId};
use tracing::{info, warn};

use crate::acl_reconciler::{AclReconciler, Node};
use crate::backoff::Backoff;
use crate::endpoint::find;
use crate::firewall_opening::FirewallOpenings;
use crate::host::Host;
use crate::load_balancers::LoadBalancers;
use crate::network_spec::{NetworkKind, NetworkSpec};
use crate::outbound::{CurrentNetworks, Networks};
use crate::pod_network::{CurrentPodNetwork, PodNetwork, ensure_network_on, remove_subnets};
use crate::recognition::{PolicyOnly, Recognition};
use crate::results_watch::ResultsWatch;
use crate::saved_report::{SetProof, name_sets};
use crate::static_rules::StaticRules;
use crate::wiring::USUAL_MTU;
use crate::{Error, NETWORK, VXLAN_PORT, node_routes, routes, show};

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
        let networks = Networks::new(&state.settings, self.services.clone(), self.networks_of(state));
        let provider = self.pod_network.as_ref().map(|network| network.provider_address);
        let networks = Networks { provider, is_bridge: self.is_bridge, ..networks };
        report.node.extend(networks.condition());
        self.networks.set(networks.clone());
        let has_ipv6 = self.read_ipv6(state);
        let recognition = self.policy_only.as_ref().map(|config| Recognition::new(&*self.hcn, config));
        let node = Node {
            networks,
            hcn: &*self.hcn,
            state,
            sets,
            addresses: self.node_addresses(state),
            has_ipv6,
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

    /// Applies the network and its routes.
    fn sync_network(&mut self, state: &NodeState, report: &mut Report) -> Result<(), Error> {
        let Some(node) = state.node.clone() else { return Ok(()) };
        if node.network.port != VXLAN_PORT && !self.is_bridge {
            let port = node.network.port;
            report.node.push(Condition::new(
                Reason::VxlanPortNotSupported,
                format!(
                    "vxlanPort of FelixConfiguration is {port}, and Windows has {VXLAN_PORT} only, which is used here: the pods of this \
                     node and those of nodes with the other port do not reach each other; remove vxlanPort, or move the pods of Windows \
                     nodes to another cluster"
                ),
            ));
        }
        if let Some(mtu) = state.settings.vxlan_mtu.filter(|mtu| *mtu != USUAL_MTU) {
            report.node.push(Condition::new(
                Reason::FieldNotSupported,
                format!(
                    "FelixConfiguration.spec.vxlanMTU is {mtu}, and pods of a Windows node have an MTU of {USUAL_MTU}; set it for \
                     Linux nodes only, in FelixConfiguration node.NAME"
                ),
            ));
        }
        let blocks: Vec<Ipv4Net> = own_blocks(state).collect();
        let Some((block, others)) = blocks.split_first() else { return Ok(()) };
        let kind = match self.is_bridge {
            true => NetworkKind::L2Bridge,
            false => NetworkKind::Overlay { vni: node.network.vni },
        };
        let spec = NetworkSpec { name: NETWORK.into(), block: *block, kind, adapter: None };
        if self.pod_network.is_none() {
            let found = self.ensure_network(spec, others, own_address(&node))?;
            self.current_network.set(&found);
            self.network = Some(found.id);
            self.pod_network = Some(found);
        }
        let Some(network) = &self.pod_network else { return Ok(()) };
        report.node.extend(network.without_subnet.iter().map(|(block, why)| {
            let message = format!("pods with addresses of the block {block} are not connected: {why}");
            Condition::new(Reason::MoreThanOneBlock, message)
        }));
        report.node.extend(remade(&node, network));
        report.node.extend(network.other_adapter.as_ref().map(|found| {
            let wanted = self.host.choose(own_address(&node)).name.unwrap_or_default();
            let message = format!(
                "network {NETWORK} is on adapter {found}, and --adapter or the node's address names {wanted}: it is used as it is; \
                 drain the node, remove the network and restart the agent, or correct --adapter"
            );
            Condition::new(Reason::AdapterDiffers, message)
        }));
        if let Some(address) = own_address(&node).filter(|address| *address != network.provider_address) {
            report.node.push(Condition::new(
                Reason::ProviderAddressDiffers,
                format!(
                    "network {NETWORK} is bound to {}, but the node's address is {address}: name the right adapter",
                    network.provider_address
                ),
            ));
        }
        if self.routes_due {
            let (id, gateway) = (network.id, network.gateway);
            let synced = match self.is_bridge {
                true => self.sync_node_routes(state, gateway),
                false => self.sync_overlay_routes(state, id),
            };
            self.routes_refused = synced.inspect_err(|_| self.pod_network = None)?;
            self.routes_due = false;
            if self.routes_refused.is_empty() {
                self.routes_backoff.forget(&());
            } else {
                self.routes_backoff.failed((), (self.clock)());
            }
        }
        report.retry |= !self.routes_refused.is_empty();
        report.node.extend_from_slice(&self.routes_refused);
        Ok(())
    }

    /// Applies the routes of the overlay network. Returns what is not in force.
    fn sync_overlay_routes(&self, state: &NodeState, network: Guid) -> Result<Vec<Condition>, Error> {
        let is_of_another = |net: &Ipv4Net| {
            let mut routes = state.routes.iter();
            routes.any(|(route, target)| *route == IpNet::V4(*net) && *target != RouteTarget::Local)
        };
        remove_subnets(&*self.hcn, network, is_of_another)?;
        routes::sync(&*self.hcn, network, state)
    }

    /// Applies the routes of the node, which forwards between its adapter and the pods' gateway. Returns what is not in force.
    fn sync_node_routes(&self, state: &NodeState, gateway: Ipv4Addr) -> Result<Vec<Condition>, Error> {
        let (direct, mut conditions) = node_routes::direct(state);
        let ends: Vec<Ipv4Addr> =
            state.node.as_ref().and_then(own_address).into_iter().chain([gateway]).collect();
        let synced = self.host.sync_routes(&ends, node_routes::DIRECT, &direct);
        let problems = synced.unwrap_or_else(|error| vec![error.to_string()]);
        conditions.extend(problems.into_iter().map(|problem| Condition::new(Reason::RouteRefused, problem)));
        Ok(conditions)
    }

    /// The network. If HNS refused it or is not ready, requests become less and less frequent. Whether HNS
    /// answers at all is checked each time.
    fn ensure_network(
        &mut self,
        spec: NetworkSpec,
        others: &[Ipv4Net],
        node: Option<Ipv4Addr>,
    ) -> Result<PodNetwork, Error> {
        let now = (self.clock)();
        match &self.network_refused {
            Some((refused, error)) if *refused == spec && self.network_backoff.has_to_wait(&(), now) => {
                return Err(error.clone());
            }
            Some((refused, _)) if *refused != spec => self.network_backoff.forget(&()),
            _ => {}
        }
        let ensured = ensure_network_on(&*self.hcn, &spec, others, (&self.host, node));
        match &ensured {
            Ok(_) => {
                self.network_refused = None;
                self.network_backoff.forget(&());
            }
            Err(error) if error.is_unavailable() => {}
            Err(error) => {
                self.network_refused = Some((spec, error.clone()));
                self.network_backoff.failed((), now);
            }
        }
        ensured
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

    /// The network of the node's own address, if the machine's addresses are known.
    fn networks_of(&self, state: &NodeState) -> Option<Vec<Ipv4Net>> {
        let own = state.node.as_ref().and_then(own_address);
        let nets = self.host_addresses.as_ref()?.iter().filter(|net| Some(net.addr()) == own);
        Some(nets.map(Ipv4Net::trunc).collect())
    }

    /// The machine's own addresses towards its pods: all of IPv4, and of IPv6 the one that its Node has. Others of IPv6 may be temporary,
    /// or another machine's (duplicate address detection).
    fn node_addresses(&self, state: &NodeState) -> BTreeSet<IpAddr> {
        let of_machine = self.host_addresses.iter().flatten().map(|net| net.addr().into());
        node_addresses(state).into_iter().chain(of_machine).collect()
    }

    /// Whether pods may have IPv6: those of another plugin, whose endpoints then have it, too. All lists depend on it.
    fn read_ipv6(&mut self, state: &NodeState) -> bool {
        let has_it = self.version.is_some_and(|version| version.supports(Feature::Ipv6DualStack));
        let has_it = has_it && self.policy_only.is_some();
        if has_it != self.has_ipv6 {
            self.has_ipv6 = has_it;
            state.endpoints.keys().for_each(|id| self.acl_reconciler.look_at_now(id.clone()));
        }
        has_it
    }

    /// The network whose sets ACLs may name, if HNS supports sets, and whether they should.
    fn policy_sets(
        &mut self,
        state: &NodeState,
        conditions: &mut Vec<Condition>,
    ) -> Result<Option<(Guid, bool)>, Error> {
        if self.network.is_none() {
            // Whatever is wrong with it, its endpoints may have ACLs that name sets.
            self.network = self.hcn.network_by_name(NETWORK)?.map(|network| network.id);
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
        if self.policy_only.is_some() {
            conditions.extend(sets_of_others(&state.settings));
            return Ok(None);
        }
        let (Some(network), Some(version)) = (self.network, self.version) else { return Ok(None) };
        if !version.supports(Feature::SetPolicy) {
            return Ok(None);
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

/// Sets belong to a network, and the network is another plugin's.
fn sets_of_others(settings: &Settings) -> Option<Condition> {
    (settings.windows_policy_sets == WindowsPolicySets::Enabled).then(|| {
        let message = format!(
            "the annotation {} of FelixConfiguration asks for sets, which would be put into the network of another CNI plugin: addresses \
             are listed instead",
            FelixConfiguration::WINDOWS_POLICY_SETS
        );
        Condition::new(Reason::FieldNotSupported, message)
    })
}

fn own_blocks(state: &NodeState) -> impl Iterator<Item = Ipv4Net> {
    let own = state.routes.iter().filter(|(_, target)| **target == RouteTarget::Local);
    own.filter_map(|(block, _)| match block {
        IpNet::V4(block) => Some(*block),
        // Pods of Windows nodes have IPv4 addresses only.
        IpNet::V6(_) => None,
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

/// Other nodes address this node by the MAC address that it has published. HNS assigns a new one whenever it creates
/// the network. Until the node publishes that, no tunnel packets arrive.
fn remade(node: &LocalNode, network: &PodNetwork) -> Option<Condition> {
    let (published, now) = (node.vtep(IpVersion::V4)?.mac, network.router_mac?);
    (published != now).then(|| Condition::new(Reason::OverlayRemade, format!(
            "network {NETWORK} has the MAC address {now}, but the other nodes send to {published}: the network was made anew, \
             and the Node's annotation has to follow"
        )))
}

/// Converts an error to a condition. The object is retried.
fn note(conditions: &mut Vec<Condition>, error: &Error) {
    warn!(%error, "HNS differs from the desired state; Tortie retries");
    conditions.push(Condition::new(error.reason(), error.to_string()));
}
