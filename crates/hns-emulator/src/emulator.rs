//! The emulated HNS: handles calls and keeps objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};
use tortie_hcn::schema::NetAdapterName;
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, Kind};

use crate::acl::{Packet, PacketDirection, Verdict};
use crate::check::fail;
use crate::config::{Config, EgressSees};
use crate::containers;
use crate::counters::{AboutEndpoint, ENDPOINT_ADDRESSES, ENDPOINT_STATS, EndpointCounters, EndpointStats};
use crate::flows::{Flows, Key};
use crate::host::EmulatedHost;
use crate::reply::{Filter, properties};
use crate::restart::Survives;
use crate::state::State;

/// An HNS inside this process.
pub struct Emulator {
    config: Config,
    state: Mutex<State>,
    /// The flows of each endpoint that [`Emulator::open`] created. The switch has its own.
    flows: Mutex<HashMap<Guid, Flows>>,
    host: Option<Arc<EmulatedHost>>,
    #[cfg(target_os = "linux")]
    switch: Option<crate::switch::Switch>,
}

impl Emulator {
    /// An HNS without objects and without a switch: it creates no interfaces and forwards no frames.
    pub fn new(config: Config) -> Emulator {
        Emulator {
            config,
            state: Mutex::default(),
            flows: Mutex::default(),
            host: None,
            #[cfg(target_os = "linux")]
            switch: None,
        }
    }

    /// An HNS without objects on the node of that network namespace.
    ///
    /// # Errors
    /// The switch cannot start; see [`run_service`](crate::run_service).
    #[cfg(target_os = "linux")]
    pub fn with_switch(
        config: Config,
        node: tortie_kernel::namespace::NetNs,
    ) -> Result<Emulator, crate::Error> {
        let switch = crate::switch::Switch::start(node, config.provider_address)?;
        Ok(Emulator { switch: Some(switch), ..Emulator::new(config) })
    }

    /// On this machine, whose adapters its networks take over.
    #[must_use]
    pub fn on_host(self, host: Arc<EmulatedHost>) -> Emulator {
        Emulator { host: Some(host), ..self }
    }

    /// The verdict of an endpoint's ACLs on the first packet of a flow.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn judge(&self, endpoint: Guid, packet: &Packet) -> Result<Verdict, Failure> {
        self.judge_to_service(endpoint, packet, None)
    }

    /// The same for a packet to a Service: `packet` has the backend's address and port, and `vip` the original
    /// destination. An option decides which of them the sender's ACLs see.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn judge_to_service(
        &self,
        endpoint: Guid,
        packet: &Packet,
        vip: Option<(IpAddr, u16)>,
    ) -> Result<Verdict, Failure> {
        Ok(self.state().guard(endpoint)?.control.judge(&self.seen(packet, vip)))
    }

    /// Evaluates the endpoint's ACLs for the first packet of a flow, and keeps the flow if it passes. The switch is
    /// not involved.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn open(
        &self,
        endpoint: Guid,
        packet: &Packet,
        vip: Option<(IpAddr, u16)>,
    ) -> Result<Verdict, Failure> {
        let state = self.state();
        let guard = state.guard(endpoint)?;
        let mut flows = self.flows();
        let flows = flows.entry(endpoint).or_insert_with(|| Flows::new(guard.resets));
        flows.follow(guard.resets);
        Ok(flows.begin(Key::of(packet), &self.seen(packet, vip), &guard.control, Instant::now()))
    }

    /// Whether a flow that [`open`](Self::open) admitted is still established: it was not reset since, and its
    /// packets pass in both directions without evaluation of the ACLs.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn is_open(&self, endpoint: Guid, packet: &Packet) -> Result<bool, Failure> {
        let state = self.state();
        let guard = state.guard(endpoint)?;
        let mut flows = self.flows();
        let Some(flows) = flows.get_mut(&endpoint) else { return Ok(false) };
        flows.follow(guard.resets);
        Ok(flows.is_known(&Key::of(packet), Instant::now()))
    }

    /// Stops and starts HNS. A [`Recorder`](crate::Recorder) can simulate unanswered calls in between. The switch of a lost network
    /// goes, and the machine gets the adapter back.
    ///
    /// # Errors
    /// The switch cannot apply the new state.
    pub fn restart(&self, survives: Survives) -> Result<(), Failure> {
        let mut state = self.state();
        let before = state.clone();
        state.restart(survives, &self.config)?;
        self.flows().retain(|endpoint, _| state.endpoints.contains_key(endpoint));
        let adapters: BTreeSet<String> =
            before.networks.values().filter_map(|network| adapter(network)).collect();
        self.follow(&mut state, before)?;
        if let Some(host) = &self.host {
            let gone: Vec<String> =
                adapters.into_iter().filter(|name| !is_on_network(&state, name)).collect();
            drop(state);
            gone.iter().for_each(|name| host.give_back(name));
        }
        Ok(())
    }

    /// The packet as the ACLs of the endpoint see it.
    fn seen(&self, packet: &Packet, vip: Option<(IpAddr, u16)>) -> Packet {
        match (vip, self.config.egress_sees) {
            (Some((remote, remote_port)), EgressSees::Vip) if packet.direction == PacketDirection::Out => {
                Packet { remote, remote_port, ..*packet }
            }
            _ => *packet,
        }
    }

    fn flows(&self) -> MutexGuard<'_, HashMap<Guid, Flows>> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is made on a copy or in one step, so the objects are consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, state: &mut State, call: &Call) -> Result<String, Failure> {
        let config = &self.config;
        match call {
            Call::Create { kind, network, id, settings } => match kind {
                Kind::Network => state.create_network(*id, settings, config),
                Kind::Endpoint => state.create_endpoint(*network, *id, settings, config),
                Kind::Namespace => state.create_namespace(*id, settings, config),
                Kind::LoadBalancer => state.create_load_balancer(*id, settings, config),
                Kind::SdnRoute => state.create_route(*id, settings, config),
                Kind::GuestNetworkService => state.create_guest_network_service(*id, settings, config),
            }
            .map(|id| json!(id).to_string()),
            Call::Modify { kind, id, settings } => match kind {
                Kind::Network => state.modify_network(*id, settings, config),
                Kind::Endpoint => state.modify_endpoint(*id, settings, config),
                Kind::Namespace => state.modify_namespace(*id, settings, config),
                Kind::LoadBalancer => state.modify_load_balancer(*id, settings, config),
                Kind::SdnRoute => fail(HResult::E_NOTIMPL, "routes are deleted and made anew"),
                Kind::GuestNetworkService => state.modify_guest_network_service(*id, settings, config),
            }
            .map(|()| String::new()),
            Call::Delete { kind, id } => match kind {
                Kind::Network => state.delete_network(*id, config),
                Kind::Endpoint => state.delete_endpoint(*id).inspect(|()| drop(self.flows().remove(id))),
                Kind::Namespace => state.delete_namespace(*id),
                Kind::LoadBalancer => state.delete_load_balancer(*id),
                Kind::SdnRoute => state.delete_route(*id),
                Kind::GuestNetworkService => state.delete_guest_network_service(*id),
            }
            .map(|()| String::new()),
            Call::Emulator { name, settings } => self.emulator_call(state, name, settings),
            // It consists of other calls.
            Call::AttachToHost { .. } => fail(HResult::E_NOTIMPL, "an attachment is no single change"),
            Call::Enumerate { .. } | Call::Query { .. } | Call::Version => read(state, call, config),
        }
    }

    /// The answer to a question about an endpoint for which the API has a function of its own.
    fn about_endpoint(&self, state: &State, name: &str, settings: &str) -> Option<Result<String, Failure>> {
        if ![ENDPOINT_STATS, ENDPOINT_ADDRESSES].contains(&name) {
            return None;
        }
        let answer = || {
            let AboutEndpoint { id } = serde_json::from_str(settings)
                .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))?;
            let endpoint = state.endpoint(id)?;
            Ok(match name {
                ENDPOINT_ADDRESSES => json!(endpoint.ip_configurations).to_string(),
                _ => json!(EndpointStats {
                    endpoint_id: id,
                    instance_id: Guid::ZERO,
                    counters: self.counters(id)
                })
                .to_string(),
            })
        };
        Some(answer())
    }

    #[cfg(target_os = "linux")]
    fn counters(&self, endpoint: Guid) -> EndpointCounters {
        self.switch.as_ref().map(|switch| switch.counters(endpoint)).unwrap_or_default()
    }

    #[cfg(not(target_os = "linux"))]
    fn counters(&self, _: Guid) -> EndpointCounters {
        EndpointCounters::default()
    }

    #[cfg(target_os = "linux")]
    fn emulator_call(&self, state: &mut State, name: &str, settings: &str) -> Result<String, Failure> {
        use crate::compartments::{BIND_COMPARTMENT, BindCompartment};
        if name == crate::restart::RESTART {
            state.restart_by_call(settings, &self.config)?;
            return Ok(String::new());
        }
        if name != BIND_COMPARTMENT || self.switch.is_none() {
            return fail(HResult::E_NOTIMPL, format!("no emulator call {name}"));
        }
        let BindCompartment { namespace, path } = serde_json::from_str(settings)
            .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))?;
        state.namespace(namespace)?;
        match path {
            Some(path) => state.compartments.insert(namespace, path),
            None => state.compartments.remove(&namespace),
        };
        Ok(String::new())
    }

    #[cfg(not(target_os = "linux"))]
    fn emulator_call(&self, _: &mut State, name: &str, _: &str) -> Result<String, Failure> {
        fail(HResult::E_NOTIMPL, format!("no emulator call {name}"))
    }

    /// Applies the objects to the switch. If that fails, restores the objects and applies them again.
    #[cfg(target_os = "linux")]
    fn follow(&self, state: &mut State, before: State) -> Result<(), Failure> {
        use crate::fabric::Plan;
        let Some(switch) = &self.switch else { return Ok(()) };
        state.plans = Plan::of(state, &self.config, &state.plans);
        let Err(error) = switch.apply(state.plans.clone(), &state.compartments) else { return Ok(()) };
        *state = before;
        if let Err(error) = switch.apply(state.plans.clone(), &state.compartments) {
            tracing::error!(%error, "the switch could not be put back");
        }
        fail(HResult::HCN_E_NAMESPACE_ATTACH_FAILED, error.to_string())
    }

    #[cfg(not(target_os = "linux"))]
    fn follow(&self, _: &mut State, _: State) -> Result<(), Failure> {
        Ok(())
    }
}

impl Hcn for Emulator {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        if let Call::AttachToHost { endpoint } = call {
            return containers::attach_to_node(self, *endpoint).map(|()| String::new());
        }
        let mut state = self.state();
        if let Call::Emulator { name, settings } = call
            && let Some(answer) = self.about_endpoint(&state, name, settings)
        {
            return answer;
        }
        if call.is_read() {
            return read(&state, call, &self.config);
        }
        let before = state.clone();
        // A rejected change has no effect, however far it got.
        let answer = match self.change(&mut state, call) {
            Ok(answer) => answer,
            Err(failure) => {
                *state = before;
                return Err(failure);
            }
        };
        let gone = gone_adapter(&before, &state, call);
        self.follow(&mut state, before)?;
        if let (Some(host), Some(name)) = (&self.host, gone) {
            drop(state);
            host.give_back(&name);
            return Ok(answer);
        }
        if let (Some(host), Call::Create { kind: Kind::Network, .. }) = (&self.host, call) {
            let created = serde_json::from_str(&answer).ok().and_then(|id: Guid| state.networks.get(&id));
            let name = created.and_then(|network| adapter(network));
            drop(state);
            host.take_over(name.as_deref(), self.config.provider_address);
        }
        Ok(answer)
    }
}

/// The adapter of a network that the call has deleted, if no other network is on it.
fn gone_adapter(before: &State, now: &State, call: &Call) -> Option<String> {
    let Call::Delete { kind: Kind::Network, id } = call else { return None };
    let adapter = adapter(before.networks.get(id)?)?;
    (!is_on_network(now, &adapter)).then_some(adapter)
}

/// Whether a network is on the adapter of this name.
fn is_on_network(state: &State, name: &str) -> bool {
    let mut adapters = state.networks.values().filter_map(|network| adapter(network));
    adapters.any(|other| other.eq_ignore_ascii_case(name))
}

/// The name of a network's adapter.
fn adapter(network: &tortie_hcn::schema::Network) -> Option<String> {
    let mut named =
        network.policies.iter().filter_map(|policy| policy.settings::<NetAdapterName>().ok().flatten());
    named.next().map(|named| named.network_adapter_name)
}

fn read(state: &State, call: &Call, config: &Config) -> Result<String, Failure> {
    match call {
        Call::Enumerate { kind, query } => {
            let filter = Filter::new(query, config.strict)?;
            let matching =
                objects(state, *kind, config).into_iter().filter(|(_, object)| filter.matches(object));
            Ok(json!(matching.map(|(id, _)| id).collect::<Vec<_>>()).to_string())
        }
        Call::Query { kind, id, query } => {
            Filter::new(query, config.strict)?;
            let object = match kind {
                Kind::Network => properties(state.network(*id)?, config),
                Kind::Endpoint => properties(state.endpoint(*id)?, config),
                Kind::Namespace => properties(state.namespace(*id)?, config),
                Kind::LoadBalancer => properties(state.load_balancer(*id)?, config),
                Kind::SdnRoute => properties(state.route(*id)?, config),
                Kind::GuestNetworkService => properties(state.guest_network_service(*id)?, config),
            };
            Ok(object.to_string())
        }
        Call::Version => Ok(json!(config.version).to_string()),
        Call::Create { .. }
        | Call::Modify { .. }
        | Call::Delete { .. }
        | Call::AttachToHost { .. }
        | Call::Emulator { .. } => fail(HResult::E_NOTIMPL, format!("{} does not read", call.name())),
    }
}

fn objects(state: &State, kind: Kind, config: &Config) -> Vec<(Guid, Value)> {
    fn shown<T: Serialize>(objects: &BTreeMap<Guid, Arc<T>>, config: &Config) -> Vec<(Guid, Value)> {
        objects.iter().map(|(id, object)| (*id, properties(&**object, config))).collect()
    }
    match kind {
        Kind::Network => shown(&state.networks, config),
        Kind::Endpoint => shown(&state.endpoints, config),
        Kind::Namespace => shown(&state.namespaces, config),
        Kind::LoadBalancer => shown(&state.load_balancers, config),
        Kind::SdnRoute => shown(&state.routes, config),
        Kind::GuestNetworkService => shown(&state.guest_network_services, config),
    }
}
