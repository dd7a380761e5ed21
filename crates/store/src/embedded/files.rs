//! The files of stores, while no process serves them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use redb::{Database, ReadableDatabase};

use super::layout::{self, Begun};
use super::usage::Usage;
use super::{already_open, check};
use crate::file::{File, failed};
use crate::{StoreError, StoreId};

/// What the process that serves a file knows of it, to recognise the file when it is opened again.
#[derive(Debug, Default)]
pub(super) struct ServedFile {
    pub(super) begun: OnceLock<Begun>,
    /// The latest revision that somebody has learned of.
    pub(super) told: AtomicU64,
}

impl ServedFile {
    /// Fails if the database is not the one that was served.
    pub(super) fn check(&self, database: &Database) -> Result<(), StoreError> {
        let Some(served) = self.begun.get() else { return Ok(()) };
        let (begun, latest) = layout::begun(&database.begin_read().map_err(failed)?)?;
        if begun != *served || latest < self.told.load(std::sync::atomic::Ordering::SeqCst) {
            let problem = "its file was replaced while it was served; restart the service if the new file is the right one";
            return Err(StoreError::Unavailable(problem.to_owned()));
        }
        Ok(())
    }
}

/// Makes a store in a new file.
pub(super) fn init(path: &Path, id: StoreId) -> Result<(), StoreError> {
    create(path, |database| {
        let transaction = database.begin_write().map_err(failed)?;
        layout::make(&transaction, id)?;
        transaction.commit().map_err(failed)
    })
}

/// Writes a database to a new file. Nobody sees the file before it is complete and on disk.
pub(super) fn create(
    path: &Path,
    write: impl FnOnce(&Database) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let unfinished = unfinished(path);
    let made = new_file(path, &unfinished, write);
    let _ = fs::remove_file(&unfinished);
    made.map_err(|error| of_file(path, error))
}

fn unfinished(path: &Path) -> PathBuf {
    path.with_added_extension("unfinished")
}

/// Writes a database to a temporary file, and gives it its name, unless a file has it already.
fn new_file(
    path: &Path,
    unfinished: &Path,
    write: impl FnOnce(&Database) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    refuse_existing(path)?;
    let io = |error: io::Error| StoreError::Unavailable(error.to_string());
    match fs::remove_file(unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create_new(true);
    // Secrets may be in objects, so the file is the owner's only, whatever the umask.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(unfinished).map_err(io)?;
    let database = Database::builder().create_file(file).map_err(failed)?;
    write(&database)?;
    // This closes it cleanly.
    drop(database);
    fs::File::open(unfinished).and_then(|file| file.sync_all()).map_err(io)?;
    // Unlike a rename, a link replaces nothing.
    match fs::hard_link(unfinished, path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(exists()),
        // Some file systems have no links.
        Err(_) => {
            refuse_existing(path)?;
            fs::rename(unfinished, path).map_err(io)?;
        }
    }
    sync_folder(path).map_err(io)
}

fn refuse_existing(path: &Path) -> Result<(), StoreError> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(StoreError::Unavailable(error.to_string())),
        Ok(_) => Err(exists()),
    }
}

fn exists() -> StoreError {
    StoreError::Unavailable("the file exists already, and is not replaced; name another one".to_owned())
}

/// Makes the name of a file durable.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    // Windows has no such call.
    if cfg!(unix) {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}

/// Opens the database of an existing store, if its pages are whole: redb itself would serve damaged pages, and an earlier state
/// after its repair.
pub(super) fn open(path: &Path) -> Result<Database, StoreError> {
    refuse_missing(path)?;
    drop(check::open(path)?);
    open_again(path)
}

/// The room that a file may have beyond twice its content.
const SPARE: u64 = 32 << 20;

/// Opens the database of an existing store, and makes its file smaller if it has much more room than content: files only grow while
/// they are used.
fn open_compact(path: &Path) -> Result<Database, StoreError> {
    let mut database = open(path)?;
    let before = path.metadata().map_or(0, |metadata| metadata.len());
    // Files of earlier versions may lack a table.
    let usage = database.begin_read().map_err(failed).and_then(|transaction| Usage::read(&transaction));
    let content = usage.map_or(before, |usage| usage.objects + usage.log);
    if before <= 2 * content + SPARE {
        return Ok(database);
    }
    let compacted = database.compact();
    let after = path.metadata().map_or(0, |metadata| metadata.len());
    match compacted {
        Ok(_) => tracing::info!(file = %path.display(), before, after, "the store's file is smaller now"),
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "cannot make the store's file smaller; it is served as it is");
            drop(database);
            return open_again(path);
        }
    }
    Ok(database)
}

/// Opens the database of a store whose pages were whole when this process opened it before.
fn open_again(path: &Path) -> Result<Database, StoreError> {
    refuse_missing(path)?;
    let database = Database::open(path).map_err(already_open)?;
    layout::check(&database.begin_read().map_err(failed)?)?;
    Ok(database)
}

fn refuse_missing(path: &Path) -> Result<(), StoreError> {
    match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let problem = "the file does not exist; `tortie store init` makes a store, once. If it existed before, restore \
                           it from a backup, or give the new store the identity of the lost one";
            Err(StoreError::Unavailable(problem.to_owned()))
        }
        Err(error) => Err(StoreError::Unavailable(error.to_string())),
        Ok(metadata) if metadata.len() == 0 => {
            let problem = "the file is empty, so it is no store; restore it from a backup, or remove it and run \
                           `tortie store init`";
            Err(StoreError::Unavailable(problem.to_owned()))
        }
        Ok(_) => Ok(()),
    }
}

/// The file of a store that is going to be served, and what its process knows of it.
pub(super) fn served(path: &Path) -> Result<(File, Arc<ServedFile>), StoreError> {
    let served = Arc::new(ServedFile::default());
    let own = path.to_owned();
    let again = served.clone();
    let file = File::new(move || {
        let is_known = again.begun.get().is_some();
        let database = if is_known { open_again(&own) } else { open_compact(&own) };
        let database = database.map_err(|error| of_file(&own, error))?;
        again.check(&database).map_err(|error| of_file(&own, error))?;
        Ok(database)
    })?;
    Ok((file, served))
}

/// The identity of a closed file.
pub(super) fn identity(path: &Path) -> Result<Option<StoreId>, StoreError> {
    let read = || {
        let database = open(path)?;
        layout::identity_of(&database.begin_read().map_err(failed)?)
    };
    read().map_err(|error| of_file(path, error))
}

/// Gives a closed file another identity.
pub(super) fn replace_identity(path: &Path, id: StoreId) -> Result<(), StoreError> {
    let write = || {
        let database = open(path)?;
        let transaction = database.begin_write().map_err(failed)?;
        layout::replace_identity(&transaction, id)?;
        transaction.commit().map_err(failed)
    };
    write().map_err(|error| of_file(path, error))
}

/// Names the file in an error.
pub(super) fn of_file(path: &Path, error: StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(problem) => StoreError::Unavailable(format!("{}: {problem}", path.display())),
        StoreError::Damaged(problem) => StoreError::Damaged(format!("{}: {problem}", path.display())),
        other => other,
    }
}
