//! Closes pods before the node's state is known, if the kernel has no table: somebody may have removed it while no agent
//! ran, or the machine has started.

use std::time::Instant;

use tortie_dataplane::{Hold, HoldError, NodeState};
use tortie_kernel::nftables::{Op, Table, Transaction};

use super::Config;
use super::dirty::Dirty;
use super::held_mark::is_held;
use super::recognition::Observer;
use super::skeleton::JUDGING_CHAINS;
use super::table::PolicyTable;
use crate::Result;

/// Holds a table until the dataplane takes it over, which it can when this has been dropped: a table that the kernel guards has
/// one owner.
pub struct HeldTable {
    policy: PolicyTable,
    observer: Option<Observer>,
    /// Why the last look at the pods' interfaces failed.
    unseen: Option<String>,
}

/// The kernel's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FoundTable {
    /// None, or one without rules.
    Nothing,
    /// That of a process that held.
    Held,
    /// That of a process that knew the node's state.
    InForce,
}

impl HeldTable {
    /// Opens netlink connections in the calling thread's network namespace. Nothing is changed.
    ///
    /// # Errors
    /// As for [`Dataplane::open`](super::Dataplane::open).
    pub fn open(config: Config) -> Result<Self> {
        let observer = config.policy_only.clone().map(Observer::open).transpose()?;
        let policy = PolicyTable::open(config)?.with_mark();
        Ok(Self { policy, observer, unseen: None })
    }

    fn find(&mut self) -> Result<FoundTable> {
        let (nft, table) = (&mut self.policy.nft, &self.policy.config.table);
        for chain in JUDGING_CHAINS {
            if nft.counted_rules(table, chain)?.is_empty() {
                return Ok(FoundTable::Nothing);
            }
        }
        Ok(if is_held(nft, table)? { FoundTable::Held } else { FoundTable::InForce })
    }

    fn put_in_force(&mut self, saved: &NodeState) -> Result<bool> {
        let found = self.find()?;
        if found == FoundTable::InForce {
            self.guard()?;
            return Ok(false);
        }
        let has_changed = self.look(saved);
        let is_known = found == FoundTable::Held && self.policy.is_in_kernel();
        if !is_known {
            self.policy.resync(saved)?;
        } else if has_changed {
            self.policy.apply(saved, &Dirty::everything(saved))?;
        }
        Ok(!is_known)
    }

    /// Owns the table of an earlier process, so that nobody else removes it.
    fn guard(&mut self) -> Result<()> {
        let table = self.policy.config.table.clone();
        if self.policy.config.guard_table && self.policy.nft.flags(&table)? == Some(Table::PERSIST) {
            let ops = vec![Op::AddTable(Table::GUARDED)];
            self.policy.nft.commit(&Transaction { table, ops })?;
        }
        Ok(())
    }

    /// Looks which interfaces are whose. Returns whether something has changed. Other plugins may connect pods at any time.
    fn look(&mut self, saved: &NodeState) -> bool {
        let Some(observer) = &mut self.observer else { return false };
        let looked = observer.look(saved, true, false, Instant::now());
        let unseen = looked.as_ref().err().map(ToString::to_string);
        if let Some(error) = unseen.as_ref().filter(|_| self.unseen.is_none()) {
            tracing::warn!(
                error,
                "cannot see whose the interfaces are; those without a known prefix may be open, and Tortie retries"
            );
        }
        self.unseen = unseen;
        let has_changed = matches!(looked, Ok(Some(_)));
        if has_changed {
            self.policy.recognised = Some(observer.recognised().clone());
        }
        has_changed
    }
}

impl Hold for HeldTable {
    fn hold(&mut self, saved: &NodeState) -> std::result::Result<bool, HoldError> {
        self.put_in_force(saved).map_err(HoldError::new)
    }
}
