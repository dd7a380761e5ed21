//! Closes pods before the node's state is known, if the kernel has no table: somebody may have removed it while no agent
//! ran, or the machine has started.

use std::time::Instant;

use tortie_dataplane::{Hold, HoldError, NodeState};
use tortie_kernel::nftables::{Field, Nft, Op, Set, SetSpec, Table, Transaction};

use super::Config;
use super::dirty::Dirty;
use super::recognition::Observer;
use super::sets::set;
use super::skeleton::JUDGING_CHAINS;
use super::table::PolicyTable;
use crate::Result;

/// An empty set that tells a held table from one that has policy in force.
const HELD: &str = "held-until-the-datastore-answers";

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
enum Found {
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
        let policy = PolicyTable::open(config)?.with_mark(HELD);
        Ok(Self { policy, observer, unseen: None })
    }

    fn find(&mut self) -> Result<Found> {
        let (nft, table) = (&mut self.policy.nft, &self.policy.config.table);
        for chain in JUDGING_CHAINS {
            if nft.counted_rules(table, chain)?.is_empty() {
                return Ok(Found::Nothing);
            }
        }
        Ok(if nft.set_specs(table)?.contains_key(HELD) { Found::Held } else { Found::InForce })
    }

    fn put_in_force(&mut self, saved: &NodeState) -> Result<bool> {
        let found = self.find()?;
        if found == Found::InForce {
            self.guard()?;
            return Ok(false);
        }
        let has_changed = self.look(saved);
        let is_known = found == Found::Held && self.policy.is_in_kernel();
        if !is_known {
            self.policy.resync(saved)?;
        } else if has_changed {
            self.policy.apply(saved, &Dirty::everything(saved))?;
        }
        Ok(found == Found::Nothing)
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

/// The set that marks a table.
pub(super) fn mark() -> Set {
    set(SetSpec::hash(&[Field::Interface]), [])
}

/// Whether the kernel's table only holds: policy is not in force.
///
/// # Errors
/// The kernel's refusal.
pub(crate) fn is_held(nft: &mut Nft, table: &str) -> tortie_kernel::Result<bool> {
    Ok(nft.set_specs(table)?.contains_key(HELD))
}
