//! The room that a store uses: its objects up to a quota, and its log up to a number of bytes.

use redb::{ReadTransaction, ReadableTable};

use super::layout::{LOG, OBJECTS};
use super::records::Path;
use crate::StoreError;
use crate::file::failed;

/// The quota of a store, if nobody gives another one: that of etcd.
pub(super) const DEFAULT_QUOTA: u64 = 2 << 30;

/// Updates that need at most so many bytes more may use more than the share of their client.
const SMALL: u64 = 1 << 10;

/// How much a store may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// The maximum of all objects, in bytes.
    pub(super) quota: u64,
    /// The maximum of the log, in bytes. The latest write is kept, however large it is.
    pub(super) log: u64,
}

impl Default for Room {
    fn default() -> Self {
        Self { quota: DEFAULT_QUOTA, log: 256 << 20 }
    }
}

/// The bytes of all keys and records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) objects: u64,
    pub(super) log: u64,
}

impl Usage {
    /// Reads every record.
    pub(super) fn read(transaction: &ReadTransaction) -> Result<Self, StoreError> {
        let mut usage = Self::default();
        for entry in transaction.open_table(OBJECTS).map_err(failed)?.iter().map_err(failed)? {
            let (path, record) = entry.map_err(failed)?;
            usage.objects += bytes(path.value(), record.value());
        }
        for entry in transaction.open_table(LOG).map_err(failed)?.iter().map_err(failed)? {
            let (_, entry) = entry.map_err(failed)?;
            let (plural, namespace, name, record) = entry.value();
            usage.log += bytes((plural, namespace, name), record);
        }
        Ok(usage)
    }

    /// Why a record may not replace another one, if the objects may have so many bytes in all. What takes no more room than before is
    /// never refused, and a little more seldom, so that a full store can be mended: blocks of addresses are marked before they are
    /// given up, leases change their holder, and reports get conditions.
    pub(super) fn refusal(&self, old: u64, new: u64, limit: u64, quota: u64) -> Option<String> {
        let needed = (self.objects + new).saturating_sub(old);
        let is_small = old > 0 && new <= old + SMALL;
        // Not the whole quota, because small steps can be many.
        let limit = match (is_small, limit < quota) {
            (false, _) => limit,
            (true, true) => limit + (quota - limit) / 4 * 3,
            (true, false) => quota + quota / 20,
        };
        (new > old && needed > limit).then(|| {
            format!(
                "the store is full: its objects have {} KiB, and this client may fill it up to {} KiB; delete what nobody needs, or serve \
                 it with a larger --quota",
                self.objects >> 10,
                limit >> 10
            )
        })
    }
}

/// The bytes of a record and its key.
pub(super) fn bytes((plural, namespace, name): Path<'_>, record: &[u8]) -> u64 {
    (plural.len() + namespace.len() + name.len() + record.len()) as u64
}
