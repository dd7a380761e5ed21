//! The emulated HNS: takes calls, keeps objects.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, Kind};

use crate::acl::{Packet, Verdict};
use crate::check::{access_control, fail};
use crate::config::Config;
use crate::reply::{Filter, properties};
use crate::state::{State, sets};

/// An HNS that lives in this process.
pub struct Emulator {
    config: Config,
    state: Mutex<State>,
}

impl Emulator {
    /// An HNS without objects.
    pub fn new(config: Config) -> Emulator {
        Emulator { config, state: Mutex::default() }
    }

    /// What the ACLs of an endpoint do with the first packet of a flow.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn judge(&self, endpoint: Guid, packet: &Packet) -> Result<Verdict, Failure> {
        let state = self.state();
        let endpoint = state.endpoint(endpoint)?;
        let sets = sets(state.network(endpoint.host_compute_network)?);
        let set = |id: &str| sets.get(id).map(String::as_str);
        access_control(&endpoint.policies, &set, &self.config).map(|control| control.judge(packet))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is made on a copy or in one step, so the objects are whole also after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hcn for Emulator {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        let mut state = self.state();
        let config = &self.config;
        match call {
            Call::Enumerate { kind, query } => {
                let filter = Filter::new(query, config.strict)?;
                let matching =
                    objects(&state, *kind).into_iter().filter(|(_, object)| filter.matches(object));
                Ok(json!(matching.map(|(id, _)| id).collect::<Vec<_>>()).to_string())
            }
            Call::Create { kind, network, id, settings } => {
                let id = match kind {
                    Kind::Network => state.create_network(*id, settings, config),
                    Kind::Endpoint => state.create_endpoint(*network, *id, settings, config),
                    Kind::Namespace => state.create_namespace(*id, settings, config),
                }?;
                Ok(json!(id).to_string())
            }
            Call::Query { kind, id, query } => {
                Filter::new(query, config.strict)?;
                let object = match kind {
                    Kind::Network => properties(state.network(*id)?),
                    Kind::Endpoint => properties(state.endpoint(*id)?),
                    Kind::Namespace => properties(state.namespace(*id)?),
                };
                Ok(object.to_string())
            }
            Call::Modify { kind, id, settings } => match kind {
                Kind::Network => state.modify_network(*id, settings, config),
                Kind::Endpoint => state.modify_endpoint(*id, settings, config),
                Kind::Namespace => state.modify_namespace(*id, settings, config),
            }
            .map(|()| String::new()),
            Call::Delete { kind, id } => match kind {
                Kind::Network => state.delete_network(*id),
                Kind::Endpoint => state.delete_endpoint(*id),
                Kind::Namespace => state.delete_namespace(*id),
            }
            .map(|()| String::new()),
            Call::Version => Ok(json!(config.version).to_string()),
            Call::Emulator { name, .. } => fail(HResult::E_NOTIMPL, format!("no emulator call {name}")),
        }
    }
}

fn objects(state: &State, kind: Kind) -> Vec<(Guid, Value)> {
    match kind {
        Kind::Network => state.networks.iter().map(|(id, object)| (*id, properties(object))).collect(),
        Kind::Endpoint => state.endpoints.iter().map(|(id, object)| (*id, properties(object))).collect(),
        Kind::Namespace => state.namespaces.iter().map(|(id, object)| (*id, properties(object))).collect(),
    }
}
