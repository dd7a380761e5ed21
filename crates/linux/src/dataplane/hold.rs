//! Closes pods before the node's state is known, if the kernel has no table: somebody may have removed it while no agent
//! ran, or the machine has started.

use std::time::Instant;

use tortie_dataplane::{HoldError, NodeState};

use super::Config;
use super::recognition::Observer;
use super::skeleton::{FROM_WORKLOAD, TO_WORKLOAD};
use super::table::PolicyTable;
use crate::Result;

/// Holds the table of policy until the dataplane takes it over, which it can when this has been dropped: a table that the
/// kernel guards has one owner.
pub struct Hold {
    policy: PolicyTable,
    observer: Option<Observer>,
}

impl Hold {
    /// Opens netlink connections in the calling thread's network namespace. Nothing is changed.
    ///
    /// # Errors
    /// As for [`Dataplane::open`](super::Dataplane::open).
    pub fn open(config: Config) -> Result<Self> {
        let observer = config.policy_only.clone().map(Observer::open).transpose()?;
        Ok(Self { policy: PolicyTable::open(config)?, observer })
    }

    /// Whether the kernel's table judges packets of pods. A table whose chains were flushed is none.
    fn is_in_force(&mut self) -> Result<bool> {
        for chain in [FROM_WORKLOAD, TO_WORKLOAD] {
            if self.policy.nft.counted_rules(&self.policy.config.table, chain)?.is_empty() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn put_in_force(&mut self, saved: &NodeState) -> Result<bool> {
        if self.is_in_force()? {
            return Ok(false);
        }
        if let Some(observer) = &mut self.observer {
            // Without a look, all interfaces with the prefixes are closed.
            match observer.look(saved, true, false, Instant::now()) {
                Ok(_) => self.policy.recognised = Some(observer.recognised().clone()),
                Err(error) => {
                    tracing::warn!(%error, "cannot see whose the interfaces are; Tortie closes those of all pods")
                }
            }
        }
        self.policy.resync(saved)?;
        Ok(true)
    }
}

impl tortie_dataplane::Hold for Hold {
    fn hold(&mut self, saved: &NodeState) -> std::result::Result<bool, HoldError> {
        self.put_in_force(saved).map_err(|error| HoldError(error.to_string()))
    }
}
