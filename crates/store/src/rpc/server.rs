//! The server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tortie_api::{Kind, Position};

use super::client_identity::{Client, Role};
use super::generated::store_server::Store as Service;
use super::known_store::Told;
use super::limited::Limited;
use super::listener::{Limits, TlsListener};
use super::message::{
    self, BackupReply, BackupRequest, BarrierReply, BarrierRequest, EncodedEvent, GetReply, GetRequest,
    ListReply, ListRequest, Refusal, WatchRequest, WriteReply, WriteRequest,
};
use super::revocation::Revocations;
use super::tls::{Reloaded, ServerIdentity, for_server};
use crate::{PageToken, Source, Stopped, StoreError, Write, Written};

/// The maximum size of an object as JSON text: about what etcd takes in a request, so that objects fit into other datastores, too.
const MAX_OBJECT_BYTES: usize = 3 << 19;

/// Serves the store to operators on a Unix socket until the future is dropped. An abandoned socket is replaced.
///
/// # Errors
/// The socket cannot be created.
#[cfg(unix)]
pub async fn serve_unix(store: Arc<dyn Source>, path: &std::path::Path) -> Result<(), StoreError> {
    use std::os::unix::fs::PermissionsExt;
    let unusable =
        |error: &dyn std::fmt::Display| StoreError::Unavailable(format!("{}: {error}", path.display()));
    // The socket gets its name when only its owner may connect.
    let unnamed = path.with_extension("new");
    match std::fs::remove_file(&unnamed) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(unusable(&error)),
        _ => {}
    }
    let listener = tokio::net::UnixListener::bind(&unnamed).map_err(|error| unusable(&error))?;
    let owner_only = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&unnamed, owner_only).map_err(|error| unusable(&error))?;
    std::fs::rename(&unnamed, path).map_err(|error| unusable(&error))?;
    let incoming = super::listener::operators(listener, Limits::default().write_timeout);
    let server = Server::builder().add_service(service(store));
    server.serve_with_incoming(incoming).await.map_err(|error| unusable(&error))
}

/// Serves the store on TCP, to clients with a certificate of the authority, until the future is dropped.
///
/// # Errors
/// The address cannot be listened on, or the certificates or the list of revoked ones are invalid.
pub async fn serve_tls(
    store: Arc<dyn Source>,
    address: SocketAddr,
    identity: ServerIdentity,
    limits: Limits,
) -> Result<(), StoreError> {
    let unusable = |error: &dyn std::fmt::Display| StoreError::Unavailable(format!("{address}: {error}"));
    let ServerIdentity { certificates, revoked } = identity;
    let tls = Reloaded::new(certificates, for_server)?;
    let revocations = Revocations::new(revoked, &tls.authorities())?;
    let listener = TcpListener::bind(address).await.map_err(|error| unusable(&error))?;
    Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .add_service(service(store))
        .serve_with_incoming(TlsListener::new(listener, tls, revocations, limits).incoming())
        .await
        .map_err(|error| unusable(&error))
}

fn service(store: Arc<dyn Source>) -> Limited<Offered> {
    let told = Told(store.id());
    Limited::new(Offered(store), told)
}

struct Offered(Arc<dyn Source>);

/// The role of the client of a request.
fn role<T>(request: &Request<T>) -> Result<Role, Status> {
    let client = request.extensions().get::<Arc<Client>>();
    client.map(|client| client.role.clone()).ok_or_else(|| Status::unauthenticated("the client is unknown"))
}

#[tonic::async_trait]
impl Service for Offered {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let role = role(&request)?;
        let key = message::key(request.into_inner().key).map_err(status)?;
        role.may_get(&key).map_err(status)?;
        let object = self.0.get(&key).await.map_err(status)?.map(Into::into);
        Ok(Response::new(GetReply { object }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let role = role(&request)?;
        let ListRequest { interest, after } = request.into_inner();
        let interest = interest.ok_or_else(|| Status::invalid_argument("no interest"))?;
        let plural = interest.kind.clone();
        let absent = || Status::unimplemented(format!("{plural:?} is no kind that this service knows"));
        let interest = message::interest(interest).ok_or_else(absent)?;
        role.may_list(&interest).map_err(status)?;
        let page = self.0.list_page(&interest, after.map(PageToken)).await.map_err(status)?;
        let objects = page.items.into_iter().map(Into::into).collect();
        let next = page.next.map(|token| token.0);
        Ok(Response::new(ListReply { objects, position: page.position.0, next }))
    }

    async fn write(&self, request: Request<WriteRequest>) -> Result<Response<WriteReply>, Status> {
        let role = role(&request)?;
        let mut writes = request.into_inner().writes;
        // The writes before one that is too large are executed.
        let too_large = writes.iter().position(|write| write.json_bytes() > MAX_OBJECT_BYTES);
        let problem = too_large.map(|index| too_large_problem(writes[index].json_bytes()));
        writes.truncate(too_large.unwrap_or(usize::MAX));
        let writes: Result<Vec<_>, _> = writes.into_iter().map(message::write).collect();
        let writes = writes.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (written, refusal, problem) = match (self.write_as(&role, writes).await, problem) {
            (Ok(written), Some(problem)) => (written, Refusal::Invalid, problem),
            (Ok(written), None) => (written, Refusal::None, String::new()),
            (Err(Stopped { done, error }), _) => match error {
                StoreError::NotFound(_) => (done, Refusal::NotFound, String::new()),
                StoreError::AlreadyExists(_) => (done, Refusal::AlreadyExists, String::new()),
                StoreError::Conflict(_) => (done, Refusal::Conflict, String::new()),
                StoreError::Invalid { problem, .. } => (done, Refusal::Invalid, problem),
                StoreError::Full { problem, .. } => (done, Refusal::Full, problem),
                StoreError::Forbidden(problem) => (done, Refusal::Forbidden, problem),
                error => return Err(status(error)),
            },
        };
        let written = written.into_iter().map(Into::into).collect();
        Ok(Response::new(WriteReply { written, refusal: i32::from(refusal), problem }))
    }

    async fn barrier(&self, request: Request<BarrierRequest>) -> Result<Response<BarrierReply>, Status> {
        let role = role(&request)?;
        let kinds = request.into_inner().kinds;
        let mut kinds: Vec<Kind> = kinds.iter().filter_map(|plural| message::known_kind(plural)).collect();
        let refused = kinds.iter().find_map(|kind| role.may_wait_for(*kind).err());
        kinds.retain(|kind| role.may_wait_for(*kind).is_ok());
        if let Some(error) = refused.filter(|_| kinds.is_empty()) {
            return Err(status(error));
        }
        let positions = self.0.barrier(&kinds).await.map_err(status)?;
        let positions = kinds
            .iter()
            .filter_map(|kind| Some((kind.plural().to_owned(), positions.of(*kind)?.0)))
            .collect();
        let epoch = self.0.epoch().await.map_err(status)?;
        let (begin, latest) = (epoch.map(|epoch| epoch.begin.0), epoch.map(|epoch| epoch.latest.0));
        Ok(Response::new(BarrierReply { positions, begin, latest }))
    }

    type BackupStream = BoxStream<'static, Result<BackupReply, Status>>;

    async fn backup(&self, request: Request<BackupRequest>) -> Result<Response<Self::BackupStream>, Status> {
        role(&request)?.may_back_up().map_err(status)?;
        let store = self.0.embedded();
        let store = store.ok_or_else(|| Status::unimplemented("only an embedded store has backups"))?;
        let parts = store.backup().map(|part| part.map(BackupReply::from).map_err(status));
        Ok(Response::new(parts.boxed()))
    }

    type WatchStream = BoxStream<'static, Result<EncodedEvent, Status>>;

    /// Kinds that this service does not know were reported when they were listed.
    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let role = role(&request)?;
        let WatchRequest { interests, after } = request.into_inner();
        let interests: Vec<_> = interests.into_iter().filter_map(message::interest).collect();
        interests.iter().try_for_each(|interest| role.may_watch(interest)).map_err(status)?;
        if self.0.groups(interests.clone()).len() > 1 {
            return Err(Status::invalid_argument(
                "the datastore has no order across kinds: use a watch for each kind",
            ));
        }
        let events = self.0.watch_shared(&interests, Position(after)).await.map_err(status)?;
        let events = events.map(|event| event.map(|event| event.encoded()).map_err(status));
        let established = stream::iter([Ok(EncodedEvent::default())]);
        Ok(Response::new(established.chain(events).boxed()))
    }
}

fn too_large_problem(bytes: usize) -> String {
    format!(
        "it has {bytes} bytes as JSON, and an object may have {MAX_OBJECT_BYTES}; divide it, or leave out what nobody reads"
    )
}

impl Offered {
    /// Executes the writes before the first one that the client may not do.
    async fn write_as(&self, role: &Role, mut writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        if writes.is_empty() {
            return Ok(Vec::new());
        }
        let refused = writes.iter().map(|write| role.may_write(write).err()).enumerate();
        let Some((index, error)) = refused.into_iter().find_map(|(index, error)| Some((index, error?)))
        else {
            return self.write_within_share(role, writes).await;
        };
        writes.truncate(index);
        let done = if writes.is_empty() { Vec::new() } else { self.write_within_share(role, writes).await? };
        Err(Stopped { done, error })
    }

    async fn write_within_share(&self, role: &Role, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        match self.0.embedded() {
            Some(store) => store.write_within(writes, role.share()).await,
            None => self.0.write_all(writes).await,
        }
    }
}

fn status(error: StoreError) -> Status {
    let text = error.to_string();
    match error {
        StoreError::Compacted(_) | StoreError::OtherHistory => Status::out_of_range(text),
        StoreError::FellBehind => Status::resource_exhausted(text),
        StoreError::Damaged(text) => Status::data_loss(text),
        StoreError::Unavailable(text) => Status::unavailable(text),
        StoreError::NotFound(_) => Status::not_found(text),
        StoreError::AlreadyExists(_) => Status::already_exists(text),
        StoreError::Conflict(_) | StoreError::Outdated { .. } => Status::aborted(text),
        StoreError::Invalid { .. } => Status::invalid_argument(text),
        StoreError::Forbidden(text) => Status::permission_denied(text),
        StoreError::KindAbsent(_) => Status::unimplemented(text),
        StoreError::Throttled(_) | StoreError::Full { .. } => Status::unavailable(text),
        StoreError::OtherStore { .. } => Status::failed_precondition(text),
    }
}
