//! Closes pods before the node's state is known, if their endpoints have no ACL of Tortie: HNS may have lost them in a restart, or
//! somebody may have removed them while no agent ran.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_dataplane::{Endpoint, Hold, HoldError, NodeState, SavedState};
use tortie_hcn::schema::{self, Query};
use tortie_hcn::{Guid, Hcn, HcnExt, Kind};
use tracing::warn;

use crate::endpoint::{endpoint_id, endpoint_name, ensure_closed, has_acls};
use crate::recognition::{PolicyOnly, Recognition};
use crate::{Error, NETWORK};

/// The interval of looks at HNS, each of which reads every endpoint.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Closes endpoints without an ACL of Tortie, in both directions: those of saved pods with policy, and those that Tortie has made for
/// pods that are not saved. Others stay as they are: they may be the node's own.
pub struct HeldEndpoints {
    hcn: Arc<dyn Hcn>,
    policy_only: Option<PolicyOnly>,
    looked: Option<Instant>,
}

impl HeldEndpoints {
    /// Opens nothing.
    pub fn new(hcn: Arc<dyn Hcn>) -> Self {
        Self { hcn, policy_only: None, looked: None }
    }

    /// For pods that another CNI plugin connects.
    #[must_use]
    pub fn with_policy_only(self, policy_only: Option<PolicyOnly>) -> Self {
        Self { policy_only, ..self }
    }

    /// The endpoints that must be closed, if they have no ACL of Tortie.
    fn to_close(&self, saved: &NodeState) -> Result<Vec<schema::Endpoint>, Error> {
        match &self.policy_only {
            Some(config) => self.of_other_plugin(saved, config),
            None => self.of_network(saved),
        }
    }

    fn of_network(&self, saved: &NodeState) -> Result<Vec<schema::Endpoint>, Error> {
        let Some(network) = self.hcn.network_by_name(NETWORK)? else { return Ok(Vec::new()) };
        let pods: BTreeMap<Guid, &Endpoint> =
            saved.endpoints.values().map(|pod| (endpoint_id(&pod.container_id), &**pod)).collect();
        let by_name = |name: &str| {
            let has_name =
                |pod: &&&Endpoint| name.eq_ignore_ascii_case(&endpoint_name(&pod.container_id, NETWORK));
            pods.values().find(has_name).copied()
        };
        let is_unknown_pod = |endpoint: &schema::Endpoint| {
            let container = endpoint.name.strip_suffix(NETWORK).and_then(|rest| rest.strip_suffix('_'));
            container.is_some_and(|container| endpoint_id(container) == endpoint.id)
        };
        let mut found = Vec::new();
        for id in self.hcn.enumerate(Kind::Endpoint, &Query::all())? {
            let endpoint = match self.hcn.endpoint(id) {
                Ok(endpoint) if endpoint.host_compute_network == network.id && !endpoint.is_remote() => {
                    endpoint
                }
                Ok(_) => continue,
                Err(error) if error.is_not_found() => continue,
                Err(error) => return Err(error.into()),
            };
            let is_closed = match pods.get(&id).copied().or_else(|| by_name(&endpoint.name)) {
                Some(pod) => SavedState::closes(pod),
                None => is_unknown_pod(&endpoint),
            };
            found.extend(is_closed.then_some(endpoint));
        }
        Ok(found)
    }

    fn of_other_plugin(
        &self,
        saved: &NodeState,
        config: &PolicyOnly,
    ) -> Result<Vec<schema::Endpoint>, Error> {
        let recognition = Recognition::new(&*self.hcn, config);
        let mut found = Vec::new();
        for (id, pod) in saved.endpoints.iter().filter(|(_, pod)| SavedState::closes(pod)) {
            match recognition.find(id, &pod.addresses) {
                Ok(endpoint) => found.push(endpoint),
                // The pod has ended.
                Err(Error::Unrecognised(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Closes what must be closed. Returns whether something was open.
    fn close(&self, saved: &NodeState) -> Result<bool, Error> {
        let (mut has_closed, mut failed) = (false, None);
        for endpoint in self.to_close(saved)?.iter().filter(|endpoint| !has_acls(endpoint)) {
            match ensure_closed(&*self.hcn, endpoint) {
                Ok(()) => {
                    warn!(
                        endpoint = endpoint.name,
                        "closed until the agent knows the cluster: its policy was gone"
                    );
                    has_closed = true;
                }
                Err(error) if error.is_unavailable() => return Err(error),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(has_closed), Err)
    }
}

impl Hold for HeldEndpoints {
    fn hold(&mut self, saved: &NodeState) -> Result<bool, HoldError> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(false);
        }
        self.looked = Some(Instant::now());
        self.close(saved).map_err(HoldError::new)
    }
}
