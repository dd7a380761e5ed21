//! The identity of the store in requests and answers. Each answer of a service tells the identity of its store. A client that
//! has accepted a store names it in its requests: the service of another store refuses them, and the client refuses the
//! answers of services that ignore that.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Error};
use tower::Service;

use crate::embedded::sync_folder;
use crate::{StoreError, StoreId};

/// In answers: the identity of the store.
const STORE: &str = "tortie-store";
/// In requests, and in answers that refuse them: the identity of the accepted store.
const EXPECTED: &str = "tortie-store-expected";

/// The store that a client has accepted: the first one that it reaches, unless a file names one.
#[derive(Debug)]
pub(super) struct KnownStore {
    file: PathBuf,
    accepted: Mutex<Option<StoreId>>,
}

impl KnownStore {
    /// Reads the file, if it exists.
    ///
    /// # Errors
    /// It cannot be read, or has no identity.
    pub(super) fn read(file: &Path) -> Result<Self, StoreError> {
        let accepted = match fs::read_to_string(file) {
            Ok(text) => Some(text.parse().map_err(|error: StoreError| unusable(file, &error))?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(unusable(file, &error)),
        };
        Ok(Self { file: file.to_owned(), accepted: Mutex::new(accepted) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<StoreId>> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares the identity in an answer with the accepted one. The first identity is accepted, and is on disk before anything
    /// that the store says has an effect.
    fn judge(&self, found: Option<StoreId>) -> Result<(), StoreError> {
        let mut accepted = self.lock();
        match (*accepted, found) {
            (None, None) => Ok(()),
            (None, Some(found)) => {
                write(&self.file, found).map_err(|error| unusable(&self.file, &error))?;
                tracing::info!(store = %found, file = %self.file.display(), "the store is accepted; another one will be refused");
                *accepted = Some(found);
                Ok(())
            }
            (Some(expected), found) if found == Some(expected) => Ok(()),
            (Some(expected), found) => Err(StoreError::OtherStore { expected, found }),
        }
    }
}

fn unusable(file: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Unavailable(format!("the identity of the accepted store, {}: {error}", file.display()))
}

/// A crash leaves the old content or the new one; after a success, the new one.
fn write(file: &Path, id: StoreId) -> io::Result<()> {
    let unfinished = file.with_added_extension("unfinished");
    let mut new = fs::File::create(&unfinished)?;
    writeln!(new, "{id}")?;
    new.sync_all()?;
    drop(new);
    fs::rename(unfinished, file)?;
    sync_folder(file)
}

/// The identity of the store in the headers of an answer.
fn found(headers: &HeaderMap) -> Option<StoreId> {
    headers.get(STORE)?.to_str().ok()?.parse().ok()
}

/// A channel that compares the identity of the store. Without a known store, everything passes.
#[derive(Clone)]
pub(super) struct Checked {
    channel: Channel,
    known: Option<Arc<KnownStore>>,
}

impl Checked {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, known: None }
    }

    pub(super) fn with(self, known: KnownStore) -> Self {
        Self { known: Some(Arc::new(known)), ..self }
    }
}

impl Service<Request<Body>> for Checked {
    type Response = Response<Body>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Response<Body>, Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let known = self.known.clone();
        if let Some(known) = &known
            && let Some(expected) = known.lock().and_then(header)
        {
            request.headers_mut().insert(EXPECTED, expected);
        }
        let answer = self.channel.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let Some(known) = known else { return Ok(answer) };
            Ok(match known.judge(found(answer.headers())) {
                Ok(()) => answer,
                Err(error) => refusal(&error).into_http(),
            })
        })
    }
}

fn header(id: StoreId) -> Option<HeaderValue> {
    HeaderValue::from_str(&id.to_string()).ok()
}

/// The status of an error, with the identities that it names.
fn refusal(error: &StoreError) -> Status {
    let StoreError::OtherStore { expected, found } = error else {
        return Status::unavailable(error.to_string());
    };
    let mut status = Status::failed_precondition(error.to_string());
    for (name, id) in [(EXPECTED, Some(*expected)), (STORE, *found)] {
        if let Some(value) = id.and_then(|id| id.to_string().parse().ok()) {
            status.metadata_mut().insert(name, value);
        }
    }
    status
}

/// The error of a refusal.
pub(super) fn refused(status: &Status) -> Option<StoreError> {
    let id = |name| status.metadata().get(name)?.to_str().ok()?.parse().ok();
    Some(StoreError::OtherStore { expected: id(EXPECTED)?, found: id(STORE) })
}

/// The part of a service that compares the identity in requests, and adds that of the store to answers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told(pub(super) Option<StoreId>);

impl Told {
    /// Why a request is refused.
    pub(super) fn refusal(self, request: &HeaderMap) -> Option<Status> {
        let expected = request.get(EXPECTED)?.to_str().ok().and_then(|text| text.parse().ok());
        let Some(expected) = expected else {
            return Some(Status::invalid_argument(format!("{EXPECTED} is no identity of a store")));
        };
        // A service of a store without an identity cannot be the expected one.
        (self.0 != Some(expected)).then(|| refusal(&StoreError::OtherStore { expected, found: self.0 }))
    }

    pub(super) fn add(self, answer: &mut HeaderMap) {
        if let Some(value) = self.0.and_then(header) {
            answer.insert(STORE, value);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_first_store_is_accepted_and_no_other_one_later() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("store-identity");
        let (first, other) = (StoreId::random(), StoreId::random());
        let known = KnownStore::read(&file).unwrap();
        assert_eq!(known.judge(None), Ok(()), "an older service");
        assert!(!file.exists());
        assert_eq!(known.judge(Some(first)), Ok(()));
        for known in [known, KnownStore::read(&file).unwrap()] {
            assert_eq!(known.judge(Some(first)), Ok(()));
            for found in [Some(other), None] {
                assert_eq!(known.judge(found), Err(StoreError::OtherStore { expected: first, found }));
            }
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("{first}\n"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file remains");
    }

    #[test]
    fn without_a_durable_record_nothing_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("absent").join("store-identity");
        let known = KnownStore::read(&file).unwrap();
        for _ in 0..2 {
            let error = known.judge(Some(StoreId::random())).unwrap_err();
            assert!(error.to_string().contains(&file.display().to_string()), "{error}");
        }
        fs::write(folder.path().join("empty"), "").unwrap();
        let error = KnownStore::read(&folder.path().join("empty")).unwrap_err().to_string();
        assert!(error.contains("no identity of a store"), "{error}");
    }

    #[test]
    fn a_refusal_names_both_stores() {
        let (expected, found) = (StoreId::random(), StoreId::random());
        for found in [Some(found), None] {
            let error = StoreError::OtherStore { expected, found };
            assert_eq!(refused(&refusal(&error)), Some(error));
        }
        assert_eq!(refused(&Status::failed_precondition("no")), None);
    }
    /// A service refuses requests for another store itself, so that they have no effect.
    #[test]
    fn a_service_refuses_requests_for_another_store() {
        let (own, other) = (StoreId::random(), StoreId::random());
        let request =
            |expected: &str| [(EXPECTED.parse().unwrap(), expected.parse().unwrap())].into_iter().collect();
        for (store, expected, is_refused) in [
            (Some(own), own.to_string(), false),
            (Some(own), other.to_string(), true),
            (None, other.to_string(), true),
            (Some(own), "not an identity".to_owned(), true),
        ] {
            let request: HeaderMap = request(&expected);
            assert_eq!(Told(store).refusal(&request).is_some(), is_refused, "{store:?} {expected}");
        }
        assert!(Told(Some(own)).refusal(&HeaderMap::new()).is_none(), "an operator");
        let mut answer = HeaderMap::new();
        Told(Some(own)).add(&mut answer);
        assert_eq!(found(&answer), Some(own));
    }
}
