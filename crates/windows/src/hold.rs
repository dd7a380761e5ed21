//! Closes pods before the node's state is known, if their endpoints have no ACL of Tortie: HNS may have lost them in a restart, or
//! somebody may have removed them while no agent ran.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_dataplane::{Endpoint, EndpointId, HoldError, NodeState, SavedState};
use tortie_hcn::{Hcn, schema};
use tracing::warn;

use crate::endpoint::{ensure_closed, find, has_acls};
use crate::recognition::{PolicyOnly, Recognition};
use crate::{Error, NETWORK};

/// The interval of looks at HNS, each of which calls it for every pod with policy.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Closes the endpoints of saved pods with policy that have no ACL of Tortie, in both directions. Others stay as they are: they may be
/// the node's own.
pub struct WindowsHold {
    hcn: Arc<dyn Hcn>,
    policy_only: Option<PolicyOnly>,
    looked: Option<Instant>,
}

impl WindowsHold {
    /// Opens nothing.
    pub fn new(hcn: Arc<dyn Hcn>) -> Self {
        Self { hcn, policy_only: None, looked: None }
    }

    /// For pods that another CNI plugin connects.
    #[must_use]
    pub fn with_policy_only(self, policy_only: Option<PolicyOnly>) -> Self {
        Self { policy_only, ..self }
    }

    /// Closes the pod's endpoint, if it must be. Returns whether it did.
    fn hold_pod(
        &self,
        recognition: Option<&Recognition<'_>>,
        id: &EndpointId,
        pod: &Endpoint,
    ) -> Result<bool, Error> {
        let endpoint: schema::Endpoint = match recognition {
            Some(recognition) => recognition.find(id, &pod.addresses)?,
            None => {
                let container_id = pod.container_id.to_string();
                find(&*self.hcn, &container_id, NETWORK)?.ok_or(Error::NoEndpoint { container_id })?
            }
        };
        if has_acls(&endpoint) {
            return Ok(false);
        }
        ensure_closed(&*self.hcn, &endpoint)?;
        warn!(endpoint = endpoint.name, pod = %id, "closed until the datastore answers: its policy was gone");
        Ok(true)
    }
}

impl tortie_dataplane::Hold for WindowsHold {
    fn hold(&mut self, saved: &NodeState) -> Result<bool, HoldError> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(false);
        }
        self.looked = Some(Instant::now());
        let recognition = self.policy_only.as_ref().map(|config| Recognition::new(&*self.hcn, config));
        let (mut held, mut failed) = (false, None);
        for (id, pod) in saved.endpoints.iter().filter(|(_, pod)| SavedState::closes(pod)) {
            match self.hold_pod(recognition.as_ref(), id, pod) {
                Ok(closed) => held |= closed,
                // The pod has ended.
                Err(Error::NoEndpoint { .. } | Error::Unrecognised(_)) => {}
                Err(error) if error.is_unavailable() => return Err(HoldError(error.to_string())),
                Err(error) => failed = Some(format!("pod {id}: {error}")),
            }
        }
        failed.map_or(Ok(held), |problem| Err(HoldError(problem)))
    }
}
