//! Looks for damage in the file of a store that no process serves.

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use redb::backends::FileBackend;
use redb::{Database, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata};

use super::layout::{self, OBJECTS};
use super::overlay::Overlay;
use super::{already_open, damaged, records};
use crate::file::failed;
use crate::{StoreError, StoreId};

/// What is in the file of a store whose pages are whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileCheck {
    /// The identity of the store. Files of earlier versions have none.
    pub id: Option<StoreId>,
    /// The number of objects.
    pub objects: u64,
    /// The objects whose records are damaged, as `PLURAL NAME` or `PLURAL NAMESPACE/NAME`. They are served as objects that cannot
    /// be read, and close what they concern.
    pub damaged: Vec<String>,
}

/// Opens a file whose pages are whole, and leaves it as it is. redb compares the checksums of pages only here.
///
/// # Errors
/// The file is damaged, is no store, or is in use by another process.
pub(super) fn open(path: &Path) -> Result<Database, StoreError> {
    let mut database = open_damaged(path)?;
    match guarded(|| database.check_integrity().map_err(failed)) {
        Some(Ok(true)) => {}
        // redb would go on with an earlier state, or with what is left.
        other => {
            guarded(|| drop(database));
            let problem = "the checksums of its pages do not fit".to_owned();
            return Err(of_pages(&match other {
                Some(Err(error)) => error.to_string(),
                _ => problem,
            }));
        }
    }
    layout::check(&database.begin_read().map_err(failed)?)?;
    Ok(database)
}

/// Opens a file that may be damaged, and leaves it as it is.
pub(super) fn open_damaged(path: &Path) -> Result<Database, StoreError> {
    let io = |error: std::io::Error| StoreError::Unavailable(error.to_string());
    // redb's lock needs the right to write.
    let file = fs::File::options().read(true).write(true).open(path).map_err(io)?;
    let backend = FileBackend::new(file).map_err(already_open)?;
    let overlay = Overlay::new(backend).map_err(io)?;
    match guarded(|| Database::builder().create_with_backend(overlay)) {
        Some(Ok(database)) => Ok(database),
        Some(Err(error)) => Err(match already_open(error) {
            StoreError::Unavailable(problem) if problem.contains("served by a process") => {
                StoreError::Unavailable(problem)
            }
            error => of_pages(&error.to_string()),
        }),
        None => Err(of_pages("redb cannot read it")),
    }
}

/// redb panics on some damaged pages. `None` then.
pub(super) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).ok()
}

fn of_pages(problem: &str) -> StoreError {
    StoreError::Damaged(format!(
        "the store's file is damaged ({problem}), so it is not served, and agents keep what is in force; restore a backup (`tortie \
         store restore`), or save what can be read (`tortie store repair`)"
    ))
}

/// The objects, and those with damaged records.
pub(super) fn objects(transaction: &ReadTransaction) -> Result<(u64, Vec<String>), StoreError> {
    let objects = transaction.open_table(OBJECTS).map_err(failed)?;
    let (mut count, mut damaged_ones) = (0, Vec::new());
    for entry in objects.iter().map_err(failed)? {
        let (key, record) = entry.map_err(failed)?;
        count += 1;
        if records::read_object(key.value(), record.value()).is_none() {
            damaged_ones.push(name(key.value()));
        }
    }
    match objects.len().map_err(failed)? == count {
        true => Ok((count, damaged_ones)),
        false => Err(damaged("objects are missing")),
    }
}

/// The key of a record for messages.
pub(super) fn name((plural, namespace, name): records::Path<'_>) -> String {
    match namespace {
        "" => format!("{plural} {name}"),
        namespace => format!("{plural} {namespace}/{name}"),
    }
}

/// Looks at the pages and at each object of a file.
pub(super) fn check(path: &Path) -> Result<FileCheck, StoreError> {
    // A transaction ends with its database.
    let database = open(path)?;
    inspect(&database.begin_read().map_err(failed)?)
}

fn inspect(transaction: &ReadTransaction) -> Result<FileCheck, StoreError> {
    let id = layout::identity_of(transaction)?;
    // The records of earlier versions have no checksums.
    let (objects, damaged) = match id {
        Some(_) => objects(transaction)?,
        None => (transaction.open_table(OBJECTS).map_err(failed)?.len().map_err(failed)?, Vec::new()),
    };
    Ok(FileCheck { id, objects, damaged })
}
