//! The database of the embedded store. It is reopened after an I/O error, because until then redb refuses everything,
//! even if a full disk has room again.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use redb::{
    CommitError, Database, DatabaseError, ReadTransaction, ReadableDatabase, StorageError, TableError,
    TransactionError, WriteTransaction,
};

use crate::StoreError;

type Open = dyn Fn() -> Result<Database, StoreError> + Send + Sync;

/// A database that can be reopened.
pub(crate) struct File {
    open: Box<Open>,
    /// `None` while it cannot be opened.
    database: RwLock<Option<Database>>,
    /// Fields are dropped in their order: whoever sees that it is gone knows that the database is closed.
    is_open: Arc<()>,
}

/// The end of a file's use.
#[derive(Debug)]
pub struct Closing(Weak<()>);

impl Closing {
    /// Waits until nobody uses the file any more, so that it is closed and its next start has nothing to repair; returns whether it
    /// was in time.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.0.strong_count() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

impl File {
    /// Opens the database. `open` is called again after a failure, when nobody uses the old database any more.
    pub(crate) fn new(
        open: impl Fn() -> Result<Database, StoreError> + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let database = RwLock::new(Some(open()?));
        Ok(Self { open: Box::new(open), database, is_open: Arc::default() })
    }

    pub(crate) fn closing(&self) -> Closing {
        Closing(Arc::downgrade(&self.is_open))
    }

    /// Reads in a transaction, which must not outlive the call.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.with(|database| read(&database.begin_read().map_err(failed)?))
    }

    /// Begins a transaction that reads. When the file is opened again, what it has not read yet is an error.
    pub(crate) fn begin_read(&self) -> Result<ReadTransaction, StoreError> {
        self.with(|database| database.begin_read().map_err(failed))
    }

    /// Writes in a transaction. After an error it is unknown whether it was committed.
    pub(crate) fn write<T>(
        &self,
        write: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.with(|database| {
            let transaction = database.begin_write().map_err(failed)?;
            let written = write(&transaction)?;
            transaction.commit().map_err(failed)?;
            Ok(written)
        })
    }

    /// Closes and reopens the database, which repairs the effects of a failed write.
    pub(crate) fn reopen(&self) -> Result<(), StoreError> {
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        // The file is locked until the old database is closed.
        *database = None;
        *database = Some((self.open)()?);
        Ok(())
    }

    fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut database = self.shared();
        if database.is_none() {
            drop(database);
            self.reopen()?;
            database = self.shared();
        }
        let closed = || StoreError::Unavailable("its file is being opened again".to_owned());
        work(database.as_ref().ok_or_else(closed)?)
    }

    fn shared(&self) -> RwLockReadGuard<'_, Option<Database>> {
        self.database.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Converts an error of redb.
pub(crate) fn failed(error: impl Into<FileError>) -> StoreError {
    StoreError::Unavailable(error.into().0)
}

/// Any of redb's errors, as text.
pub(crate) struct FileError(String);

macro_rules! file_error {
    ($($error:ty),*) => {
        $(impl From<$error> for FileError {
            fn from(error: $error) -> Self {
                Self(error.to_string())
            }
        })*
    };
}
file_error!(DatabaseError, TableError, TransactionError, StorageError, CommitError);
