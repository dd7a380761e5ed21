//! A restart of HNS (docs/hns.md, Networks and Changes).

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tortie_hcn::schema::{Acl, Policy, SetPolicy};
use tortie_hcn::{Call, Failure, HResult, Hcn};

use crate::config::Config;
use crate::endpoints::AclChange;
use crate::sets::Sets;
use crate::state::{Guard, State};

/// The name of the call by [`restart`].
pub(crate) const RESTART: &str = "restart";

/// Stops and starts an emulated HNS that another process serves.
///
/// # Errors
/// It does not answer, or it is no emulator; or nothing is to survive, for which the process can be ended instead.
pub fn restart(hcn: &dyn Hcn, survives: Survives) -> Result<(), Failure> {
    let settings = serde_json::to_string(&survives).unwrap_or_default();
    hcn.call(&Call::Emulator { name: RESTART.to_owned(), settings }).map(drop)
}

/// Which objects survive a restart of HNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Survives {
    /// All of it.
    Everything,
    /// All but the ACLs of endpoints.
    AllButAcls,
    /// All but the ACLs of endpoints and the sets of networks.
    AllButAclsAndSets,
    /// Nothing, as after a reboot of networks that do not persist.
    Nothing,
}

impl State {
    /// Carries out [`restart`].
    pub(crate) fn restart_by_call(&mut self, settings: &str, config: &Config) -> Result<(), Failure> {
        let survives = serde_json::from_str(settings)
            .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))?;
        if survives == Survives::Nothing {
            return Err(Failure::new(HResult::E_NOTIMPL, "end the process, and start another one"));
        }
        self.restart(survives, config)
    }

    /// Lost ACLs reset flows in the same way as removed ACLs.
    pub(crate) fn restart(&mut self, survives: Survives, config: &Config) -> Result<(), Failure> {
        match survives {
            Survives::Everything => {}
            Survives::AllButAcls => self.lose_acls(config)?,
            Survives::AllButAclsAndSets => {
                self.lose_acls(config)?;
                self.networks.values_mut().map(Arc::make_mut).for_each(|network| {
                    network.policies.retain(|policy| !policy.is::<SetPolicy>());
                });
                self.sets.values_mut().for_each(|sets| *sets = Arc::new(Sets::default()));
            }
            Survives::Nothing => *self = State::default(),
        }
        Ok(())
    }

    fn lose_acls(&mut self, config: &Config) -> Result<(), Failure> {
        for id in self.endpoints.keys().copied().collect::<Vec<_>>() {
            let endpoint = self.endpoint_mut(id)?;
            let had = endpoint.policies.iter().any(Policy::is::<Acl>);
            if !had {
                continue;
            }
            endpoint.policies.retain(|policy| !policy.is::<Acl>());
            let control = self.control(self.endpoint(id)?, config)?.into();
            let resets = self.guard(id)?.resets + u64::from(AclChange::Replaced.resets(config.on_rewrite));
            self.guards.insert(id, Guard { control, resets });
        }
        Ok(())
    }
}
