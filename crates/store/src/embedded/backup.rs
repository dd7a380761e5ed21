//! Copies of stores: backups of a served or a closed file, a restored file, and what can be saved of a damaged one.

use std::collections::BTreeMap;
use std::path::Path;

use redb::{ReadOnlyTable, ReadTransaction, ReadableDatabase, ReadableTableMetadata};
use tortie_api::Kind;

use super::check::{self, FileCheck};
use super::layout::{self, EPOCHS, LATEST, OBJECTS};
use super::{Revision, damaged, files, records};
use crate::file::failed;
use crate::{StoreError, StoreId};

/// The size of the records in a part of a backup, in bytes.
const PART_BYTES: usize = 1 << 20;

/// The number of objects that a damaged file may claim to have.
const MAX_OBJECTS: u64 = 100_000_000;

/// The key of an object and its record, with its checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackupRecord {
    pub(crate) path: [String; 3],
    pub(crate) record: Vec<u8>,
}

/// A part of a backup. All parts are from one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackupPart {
    pub(crate) id: StoreId,
    pub(crate) latest: u64,
    pub(crate) records: Vec<BackupRecord>,
    /// Whether it is the last one.
    pub(crate) is_last: bool,
}

/// Takes the parts of a backup.
pub(crate) type TakePart<'a> = dyn FnMut(BackupPart) -> Result<(), StoreError> + 'a;

/// What could be saved of a damaged file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Salvaged {
    /// The identity of the store.
    pub id: StoreId,
    /// The number of objects that were saved.
    pub objects: u64,
    /// The objects whose records are damaged.
    pub lost: Vec<String>,
    /// The number of further objects that are lost, without known names.
    pub lost_without_names: u64,
}

/// Reads everything in a transaction.
pub(super) fn read(transaction: &ReadTransaction, take: &mut TakePart<'_>) -> Result<(), StoreError> {
    let id = layout::identity_of(transaction)?.ok_or_else(earlier_version)?;
    let latest = layout::latest(transaction)?;
    let objects = transaction.open_table(OBJECTS).map_err(failed)?;
    let new = || BackupPart { id, latest, records: Vec::new(), is_last: false };
    let (mut part, mut bytes) = (new(), 0);
    for entry in redb::ReadableTable::iter(&objects).map_err(failed)? {
        let (key, record) = entry.map_err(failed)?;
        let (plural, namespace, name) = key.value();
        let path = [plural, namespace, name].map(str::to_owned);
        bytes += record.value().len();
        part.records.push(BackupRecord { path, record: record.value().to_owned() });
        if bytes >= PART_BYTES {
            take(std::mem::replace(&mut part, new()))?;
            bytes = 0;
        }
    }
    part.is_last = true;
    take(part)
}

fn earlier_version() -> StoreError {
    let problem = "an earlier version wrote it; serve it once, which upgrades it";
    StoreError::Unavailable(problem.to_owned())
}

/// Writes the parts of a backup to a new file, which is a store. Followers of the original go on only if they have reached
/// exactly this state; others list again.
pub(crate) fn write(
    path: &Path,
    parts: impl FnOnce(&mut TakePart<'_>) -> Result<(), StoreError>,
) -> Result<FileCheck, StoreError> {
    write_with(path, true, parts)
}

/// Without `goes_on`, all followers list again.
fn write_with(
    path: &Path,
    goes_on: bool,
    parts: impl FnOnce(&mut TakePart<'_>) -> Result<(), StoreError>,
) -> Result<FileCheck, StoreError> {
    let mut written = FileCheck { id: None, objects: 0, damaged: Vec::new() };
    files::create(path, |database| {
        let transaction = database.begin_write().map_err(failed)?;
        let mut is_complete = false;
        parts(&mut |part| {
            is_complete = part.is_last;
            add(&transaction, part, goes_on, &mut written)
        })?;
        if !is_complete {
            return Err(StoreError::Unavailable("the backup ended before it was complete".to_owned()));
        }
        transaction.commit().map_err(failed)
    })?;
    Ok(written)
}

fn add(
    transaction: &redb::WriteTransaction,
    part: BackupPart,
    goes_on: bool,
    written: &mut FileCheck,
) -> Result<(), StoreError> {
    let BackupPart { id, latest, records, .. } = part;
    if written.id.is_none() {
        layout::make(transaction, id)?;
        transaction.open_table(LATEST).map_err(failed)?.insert((), latest).map_err(failed)?;
        if goes_on {
            transaction.open_table(EPOCHS).map_err(failed)?.insert(latest, latest).map_err(failed)?;
        }
    }
    written.id = Some(id);
    let mut objects = transaction.open_table(OBJECTS).map_err(failed)?;
    for BackupRecord { path: [plural, namespace, name], record } in records {
        let path = (plural.as_str(), namespace.as_str(), name.as_str());
        objects.insert(path, record.as_slice()).map_err(failed)?;
        written.objects += 1;
        if records::read_object(path, &record).is_none() {
            written.damaged.push(check::name(path));
        }
    }
    Ok(())
}

/// Copies a closed file that is whole.
pub(super) fn copy(from: &Path, to: &Path) -> Result<FileCheck, StoreError> {
    let source = check::open(from).map_err(|error| files::of_file(from, error))?;
    let transaction = source.begin_read().map_err(failed)?;
    write(to, |take| read(&transaction, take).map_err(|error| files::of_file(from, error)))
}

/// Writes the whole records of a damaged file to a new one. They are in a new epoch.
pub(super) fn repair(from: &Path, to: &Path) -> Result<Salvaged, StoreError> {
    let of_source = |error| files::of_file(from, error);
    let source = check::open_damaged(from).map_err(of_source)?;
    let transaction = source.begin_read().map_err(failed)?;
    let id = check::guarded(|| layout::identity_of(&transaction));
    // Without its identity, agents refuse the new store until an operator gives it the former one.
    let id = id.and_then(Result::ok).flatten().unwrap_or_else(StoreId::random);
    let found = Found::of(&transaction).map_err(of_source)?;
    // What closes a damaged database may panic, too.
    check::guarded(|| drop((transaction, source)));
    let mut lost: Vec<String> = found.damaged;
    lost.retain(|name| !found.whole.keys().any(|path| check::name(as_path(path)) == *name));
    lost.sort();
    lost.dedup();
    let objects = found.whole.len() as u64;
    let lost_without_names = found.expected.saturating_sub(objects + lost.len() as u64);
    let newest = found.whole.values().map(|(revision, _)| *revision).max().unwrap_or(0);
    let records = found.whole.into_iter().map(|(path, (_, record))| BackupRecord { path, record }).collect();
    // What is lost, followers may have.
    write_with(to, false, |take| take(BackupPart { id, latest: newest, records, is_last: true }))?;
    Ok(Salvaged { id, objects, lost, lost_without_names })
}

fn as_path(path: &[String; 3]) -> records::Path<'_> {
    (&path[0], &path[1], &path[2])
}

/// What is readable in a damaged file.
#[derive(Default)]
struct Found {
    /// The number of objects that the file says it has.
    expected: u64,
    /// The newest whole record of each object: a damaged page may lead to an earlier one, too.
    whole: BTreeMap<[String; 3], (Revision, Vec<u8>)>,
    damaged: Vec<String>,
}

type Objects = ReadOnlyTable<(&'static str, &'static str, &'static str), &'static [u8]>;

impl Found {
    fn of(transaction: &ReadTransaction) -> Result<Self, StoreError> {
        let open = || transaction.open_table(OBJECTS).map_err(failed);
        let table = check::guarded(open).ok_or_else(|| damaged("its table of objects cannot be read"))??;
        let mut found = Self { expected: table.len().map_err(failed)?, ..Self::default() };
        // From both ends of each kind, so that a page that cannot be read hides little more than itself.
        for kind in Kind::all() {
            for backwards in [false, true] {
                check::guarded(|| found.read(&table, kind.plural(), backwards));
            }
        }
        Ok(found)
    }

    fn read(&mut self, table: &Objects, plural: &str, backwards: bool) {
        let after = format!("{plural}\0");
        let Ok(mut range) = table.range((plural, "", "")..(after.as_str(), "", "")) else { return };
        // Damaged pages can lead in a circle.
        for _ in 0..=self.expected.min(MAX_OBJECTS) {
            let next = if backwards { range.next_back() } else { range.next() };
            let Some(Ok((key, record))) = next else { return };
            let (plural, namespace, name) = key.value();
            match records::read_object(key.value(), record.value()) {
                None => self.damaged.push(check::name(key.value())),
                Some((revision, _)) => {
                    let path = [plural, namespace, name].map(str::to_owned);
                    let known = self.whole.entry(path).or_default();
                    if known.1.is_empty() || known.0 < revision {
                        *known = (revision, record.value().to_owned());
                    }
                }
            }
        }
    }
}
