//! Copies of stores: backups of a served or a closed file, a restored file, and what can be saved of a damaged one.

use std::collections::{BTreeMap, BTreeSet};
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

/// The least number of bytes that an object takes in a file: the checksum and the revision of its record.
const MIN_OBJECT: u64 = 12;

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
    /// Whether every search came to the end of its kind, and the file tells a number of objects that can be true. Otherwise more
    /// may be lost.
    pub is_complete: bool,
}

/// Reads everything in a transaction.
pub(super) fn read(transaction: &ReadTransaction, take: &mut TakePart<'_>) -> Result<(), StoreError> {
    let id = layout::identity_of(transaction)?.ok_or_else(earlier_version)?;
    let latest = layout::latest(transaction)?;
    let objects = transaction.open_table(OBJECTS).map_err(failed)?;
    let new = || BackupPart { id, latest, records: Vec::new(), is_last: false };
    let (mut part, mut bytes, mut count) = (new(), 0, 0);
    for entry in redb::ReadableTable::iter(&objects).map_err(failed)? {
        let (key, record) = entry.map_err(failed)?;
        let (plural, namespace, name) = key.value();
        let path = [plural, namespace, name].map(str::to_owned);
        bytes += record.value().len();
        count += 1;
        part.records.push(BackupRecord { path, record: record.value().to_owned() });
        if bytes >= PART_BYTES {
            take(std::mem::replace(&mut part, new()))?;
            bytes = 0;
        }
    }
    // A page that was damaged while the file was in use can hide objects.
    if objects.len().map_err(failed)? != count {
        return Err(damaged("objects are missing"));
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
    let bytes = from.metadata().map_err(|error| of_source(StoreError::Unavailable(error.to_string())))?.len();
    let found = Found::of(&transaction, bytes / MIN_OBJECT).map_err(of_source)?;
    // What closes a damaged database may panic, too.
    check::guarded(|| drop((transaction, source)));
    let whole: BTreeSet<String> = found.whole.keys().map(|path| check::name(as_path(path))).collect();
    let lost: Vec<String> = found.damaged.difference(&whole).cloned().collect();
    let objects = found.whole.len() as u64;
    let (lost_without_names, is_counted) =
        uncounted(found.expected, objects + lost.len() as u64, found.limit);
    let is_complete = is_counted && found.is_complete;
    let newest = found.whole.values().map(|(revision, _)| *revision).max().unwrap_or(0);
    let records = found.whole.into_iter().map(|(path, (_, record))| BackupRecord { path, record }).collect();
    // What is lost, followers may have.
    write_with(to, false, |take| take(BackupPart { id, latest: newest, records, is_last: true }))?;
    Ok(Salvaged { id, objects, lost, lost_without_names, is_complete })
}

/// The number of objects that were not found, by the number that a damaged file tells, and whether that number can be true.
fn uncounted(expected: Option<u64>, found: u64, limit: u64) -> (u64, bool) {
    match expected {
        Some(expected) if (found..=limit).contains(&expected) => (expected - found, true),
        _ => (0, false),
    }
}

fn as_path(path: &[String; 3]) -> records::Path<'_> {
    (&path[0], &path[1], &path[2])
}

/// What is readable in a damaged file.
struct Found {
    /// The number of objects that the file says it has.
    expected: Option<u64>,
    /// The number of objects that a file of this size can have.
    limit: u64,
    /// The newest whole record of each object: a damaged page may lead to an earlier one, too.
    whole: BTreeMap<[String; 3], (Revision, Vec<u8>)>,
    damaged: BTreeSet<String>,
    /// Whether every search came to the end of its kind.
    is_complete: bool,
}

type Objects = ReadOnlyTable<(&'static str, &'static str, &'static str), &'static [u8]>;

impl Found {
    fn of(transaction: &ReadTransaction, limit: u64) -> Result<Self, StoreError> {
        let open = || transaction.open_table(OBJECTS).map_err(failed);
        let table = check::guarded(open).ok_or_else(|| damaged("its table of objects cannot be read"))??;
        let expected = check::guarded(|| table.len()).and_then(Result::ok);
        let (whole, damaged) = Default::default();
        let mut found = Self { expected, limit, whole, damaged, is_complete: true };
        // From both ends of each kind, so that a page that cannot be read hides little more than itself.
        for kind in Kind::all() {
            for backwards in [false, true] {
                let ended = check::guarded(|| found.read(&table, kind.plural(), backwards));
                found.is_complete &= ended == Some(true);
            }
        }
        Ok(found)
    }

    /// Returns whether it came to the end.
    fn read(&mut self, table: &Objects, plural: &str, backwards: bool) -> bool {
        let after = format!("{plural}\0");
        let Ok(mut range) = table.range((plural, "", "")..(after.as_str(), "", "")) else { return false };
        // Damaged pages can lead in a circle. The number of objects in the file can be damaged, too, so it is no limit.
        for _ in 0..=self.limit {
            let next = if backwards { range.next_back() } else { range.next() };
            match next {
                None => return true,
                Some(Err(_)) => return false,
                Some(Ok((key, record))) => self.add(key.value(), record.value()),
            }
        }
        false
    }

    fn add(&mut self, path: records::Path<'_>, record: &[u8]) {
        let Some((revision, _)) = records::read_object(path, record) else {
            self.damaged.insert(check::name(path));
            return;
        };
        let (plural, namespace, name) = path;
        let known = self.whole.entry([plural, namespace, name].map(str::to_owned)).or_default();
        if known.1.is_empty() || known.0 < revision {
            *known = (revision, record.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_objects_counts_if_it_can_be_true() {
        for (expected, found, result) in [
            (Some(7), 7, (0, true)),
            (Some(9), 7, (2, true)),
            (Some(100), 7, (93, true)),
            (Some(101), 7, (0, false)),
            (Some(u64::MAX), 7, (0, false)),
            (Some(6), 7, (0, false)),
            (None, 7, (0, false)),
        ] {
            assert_eq!(uncounted(expected, found, 100), result, "{expected:?}");
        }
    }
}
