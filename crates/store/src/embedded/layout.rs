//! What is in a file of the embedded store, and how files of earlier versions become it.

use redb::{
    ReadTransaction, ReadableTable, ReadableTableMetadata, Table, TableDefinition, TableError,
    WriteTransaction,
};

use super::{LOG_LENGTH, Revision, damaged, epochs, records};
use crate::file::failed;
use crate::{StoreError, StoreId};

/// Objects: `(plural, namespace, name)` → the record of an object.
pub(super) const OBJECTS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new("objects");
/// The log: revision → `(plural, namespace, name)` and a record of the log.
pub(super) const LOG: TableDefinition<Revision, (&str, &str, &str, &[u8])> = TableDefinition::new("log");
/// The latest revision, under the only key.
pub(super) const LATEST: TableDefinition<(), Revision> = TableDefinition::new("revision");
/// Where earlier layouts had the latest revision.
const FORMER_LATEST: TableDefinition<(), Revision> = TableDefinition::new("latest");
/// In its place, a table of another type: versions without layouts open that name before they write, and fail. They would take the
/// checksums of records for revisions, and would replace records by some without checksums.
const BARRED: TableDefinition<(), &str> = TableDefinition::new("latest");
/// The epochs: the first revision → the last one. That of the current epoch is in `latest`.
pub(super) const EPOCHS: TableDefinition<Revision, Revision> = TableDefinition::new("epochs");
/// Facts about the file, by name.
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");

/// The identity of the store: the 16 bytes of a UUID.
const IDENTITY: &str = "identity";
/// The last revision that was removed from the log (8 bytes, big-endian). Positions before it are lost.
const REMOVED: &str = "removed";
/// The layout of the file: one byte. Files from before it have no table of facts. Layout 1 had the latest revision elsewhere. Up to
/// layout 2, the length of the log told whether something was removed from it.
const LAYOUT: &str = "layout";
const CURRENT_LAYOUT: u8 = 3;

/// What a process knows of the file that it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) id: StoreId,
    /// The begin of the current epoch.
    pub(super) begin: Revision,
}

/// Makes an empty database a store.
pub(super) fn make(transaction: &WriteTransaction, id: StoreId) -> Result<(), StoreError> {
    transaction.open_table(OBJECTS).map_err(failed)?;
    transaction.open_table(LOG).map_err(failed)?;
    transaction.open_table(LATEST).map_err(failed)?;
    transaction.open_table(EPOCHS).map_err(failed)?;
    mark(transaction)?;
    set_identity(&mut transaction.open_table(META).map_err(failed)?, id)
}

/// Tells the present layout to versions that know of layouts, and bars the others.
fn mark(transaction: &WriteTransaction) -> Result<(), StoreError> {
    transaction.open_table(BARRED).map_err(failed)?.insert((), "a later version").map_err(failed)?;
    let mut meta = transaction.open_table(META).map_err(failed)?;
    meta.insert(LAYOUT, &[CURRENT_LAYOUT][..]).map_err(failed)?;
    Ok(())
}

/// Begins an epoch. A file of an earlier version gets its present form first.
pub(super) fn begin(
    transaction: &WriteTransaction,
    next: impl FnOnce(Revision) -> Revision,
) -> Result<Begun, StoreError> {
    upgrade(transaction)?;
    let id = identity(&transaction.open_table(META).map_err(failed)?)?;
    let mut epochs = transaction.open_table(EPOCHS).map_err(failed)?;
    let mut latest = transaction.open_table(LATEST).map_err(failed)?;
    Ok(Begun { id, begin: epochs::begin(&mut epochs, &mut latest, next)? })
}

/// Nobody can resume at a position of a file without epochs, so its log goes.
fn upgrade(transaction: &WriteTransaction) -> Result<(), StoreError> {
    let layout = layout(&transaction.open_table(META).map_err(failed)?)?;
    match layout {
        Some(CURRENT_LAYOUT) => Ok(()),
        Some(2) => {
            count_removed(transaction)?;
            mark(transaction)
        }
        Some(1) => {
            move_latest(transaction)?;
            count_removed(transaction)?;
            mark(transaction)
        }
        Some(layout) => Err(newer(layout)),
        None => {
            transaction.delete_table(LOG).map_err(failed)?;
            add_checksums(transaction)?;
            move_latest(transaction)?;
            make(transaction, StoreId::random())
        }
    }
}

fn move_latest(transaction: &WriteTransaction) -> Result<(), StoreError> {
    let latest = super::latest(&transaction.open_table(FORMER_LATEST).map_err(failed)?)?;
    transaction.delete_table(FORMER_LATEST).map_err(failed)?;
    transaction.open_table(LATEST).map_err(failed)?.insert((), latest).map_err(failed)?;
    Ok(())
}

/// While the log had room, nothing was removed from it.
fn count_removed(transaction: &WriteTransaction) -> Result<(), StoreError> {
    let log = transaction.open_table(LOG).map_err(failed)?;
    if log.len().map_err(failed)? < LOG_LENGTH {
        return Ok(());
    }
    let oldest = log.first().map_err(failed)?.map_or(0, |(revision, _)| revision.value());
    set_removed(transaction, oldest.saturating_sub(1))
}

/// Notes that the log begins after a revision.
pub(super) fn set_removed(transaction: &WriteTransaction, revision: Revision) -> Result<(), StoreError> {
    let mut meta = transaction.open_table(META).map_err(failed)?;
    meta.insert(REMOVED, &revision.to_be_bytes()[..]).map_err(failed)?;
    Ok(())
}

/// The last revision that was removed from the log; 0 if none was.
pub(super) fn removed(transaction: &ReadTransaction) -> Result<Revision, StoreError> {
    let meta = transaction.open_table(META).map_err(failed)?;
    let Some(bytes) = meta.get(REMOVED).map_err(failed)? else { return Ok(0) };
    let bytes = bytes.value().try_into().map_err(|_| damaged("it does not tell where its log begins"))?;
    Ok(Revision::from_be_bytes(bytes))
}

/// The records of files without a layout had no checksums. One that is cut off gets none that fits.
fn add_checksums(transaction: &WriteTransaction) -> Result<(), StoreError> {
    let mut objects = transaction.open_table(OBJECTS).map_err(failed)?;
    let mut records = Vec::new();
    for entry in objects.iter().map_err(failed)? {
        let (key, record) = entry.map_err(failed)?;
        let path = key.value();
        if let Some((revision, json)) = record.value().split_first_chunk() {
            let record = records::object(path, Revision::from_be_bytes(*revision), json);
            let (plural, namespace, name) = path;
            records.push(([plural, namespace, name].map(str::to_owned), record));
        }
    }
    for ([plural, namespace, name], record) in records {
        let path = (plural.as_str(), namespace.as_str(), name.as_str());
        objects.insert(path, record.as_slice()).map_err(failed)?;
    }
    Ok(())
}

fn newer(layout: u8) -> StoreError {
    let problem = format!("it has layout {layout}, and this version reads up to {CURRENT_LAYOUT}");
    StoreError::Unavailable(format!("{problem}; use the version that wrote it, or a later one"))
}

/// Fails unless the database is a store of this version or an earlier one.
pub(super) fn check(transaction: &ReadTransaction) -> Result<(), StoreError> {
    latest(transaction)?;
    transaction.open_table(OBJECTS).map(drop).map_err(|error| match error {
        TableError::TableDoesNotExist(_) => no_store(),
        error => failed(error),
    })
}

/// The latest revision in a file of any layout.
pub(super) fn latest(transaction: &ReadTransaction) -> Result<Revision, StoreError> {
    for table in [LATEST, FORMER_LATEST] {
        match transaction.open_table(table) {
            Ok(latest) => return super::latest(&latest),
            Err(TableError::TableDoesNotExist(_)) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(no_store())
}

fn no_store() -> StoreError {
    StoreError::Unavailable("it is no store of Tortie; `tortie store init` makes one".to_owned())
}

/// What a process that served the file knows of it.
pub(super) fn begun(transaction: &ReadTransaction) -> Result<(Begun, Revision), StoreError> {
    let id = identity(&transaction.open_table(META).map_err(failed)?)?;
    let epochs = epochs::read(&transaction.open_table(EPOCHS).map_err(failed)?)?;
    let latest = latest(transaction)?;
    // A file that nobody has opened yet has no epoch.
    let begin = epochs.last().map_or(0, |(begin, _)| *begin);
    Ok((Begun { id, begin }, latest))
}

/// The identity of a closed file; `None` before the upgrade of a file of an earlier version.
pub(super) fn identity_of(transaction: &ReadTransaction) -> Result<Option<StoreId>, StoreError> {
    check(transaction)?;
    match transaction.open_table(META) {
        Ok(meta) => identity(&meta).map(Some),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Gives a closed file another identity.
pub(super) fn replace_identity(transaction: &WriteTransaction, id: StoreId) -> Result<(), StoreError> {
    upgrade(transaction)?;
    set_identity(&mut transaction.open_table(META).map_err(failed)?, id)
}

fn set_identity(meta: &mut Table<'_, &str, &[u8]>, id: StoreId) -> Result<(), StoreError> {
    meta.insert(IDENTITY, &id.bytes()[..]).map_err(failed)?;
    Ok(())
}

fn identity(meta: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<StoreId, StoreError> {
    let found = meta.get(IDENTITY).map_err(failed)?.and_then(|bytes| StoreId::of_bytes(bytes.value()));
    found.ok_or_else(|| damaged("it has no identity"))
}

fn layout(meta: &impl ReadableTable<&'static str, &'static [u8]>) -> Result<Option<u8>, StoreError> {
    let found = meta.get(LAYOUT).map_err(failed)?;
    found.map(|bytes| bytes.value().first().copied().ok_or_else(|| damaged("it has no layout"))).transpose()
}
