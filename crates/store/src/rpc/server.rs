//! The server.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::net::UnixListener;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::TlsIdentity;
use super::generated::store_server::{Store as Service, StoreServer};
use super::message::{
    self, GetReply, GetRequest, ListReply, ListRequest, Refusal, WatchEvent, WatchRequest, WriteReply,
    WriteRequest,
};
use crate::{Stopped, Store, StoreError};

/// The maximum size of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Serves the store on a Unix socket until the future is dropped. An abandoned socket is replaced.
///
/// # Errors
/// The socket cannot be created.
pub async fn serve_unix(store: Arc<dyn Store>, path: &Path) -> Result<(), StoreError> {
    let unusable =
        |error: &dyn std::fmt::Display| StoreError::Unavailable(format!("{}: {error}", path.display()));
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(unusable(&error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(|error| unusable(&error))?;
    let server = Server::builder().add_service(service(store));
    server.serve_with_incoming(UnixListenerStream::new(listener)).await.map_err(|error| unusable(&error))
}

/// Serves the store on TCP, to clients with a certificate of the authority.
///
/// # Errors
/// The address cannot be listened on, or the certificates are invalid.
pub async fn serve_tls(
    store: Arc<dyn Store>,
    address: SocketAddr,
    tls: &TlsIdentity,
) -> Result<(), StoreError> {
    let unusable = |error: &dyn std::fmt::Display| StoreError::Unavailable(format!("{address}: {error}"));
    let config = ServerTlsConfig::new()
        .identity(Identity::from_pem(&tls.certificate, &tls.key))
        .client_ca_root(Certificate::from_pem(&tls.authority));
    let listener = tokio::net::TcpListener::bind(address).await.map_err(|error| unusable(&error))?;
    Server::builder()
        .tls_config(config)
        .map_err(|error| unusable(&error))?
        .tcp_nodelay(true)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .add_service(service(store))
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
        .map_err(|error| unusable(&error))
}

fn service(store: Arc<dyn Store>) -> StoreServer<Offered> {
    StoreServer::new(Offered(store))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

struct Offered(Arc<dyn Store>);

#[tonic::async_trait]
impl Service for Offered {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let key = message::key(request.into_inner().key).map_err(status)?;
        let object = self.0.get(&key).await.map_err(status)?.map(Into::into);
        Ok(Response::new(GetReply { object }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let kind = message::kind(&request.into_inner().kind).map_err(status)?;
        let listing = self.0.list(kind).await.map_err(status)?;
        let objects = listing.items.into_iter().map(Into::into).collect();
        Ok(Response::new(ListReply { objects, revision: listing.revision }))
    }

    async fn write(&self, request: Request<WriteRequest>) -> Result<Response<WriteReply>, Status> {
        let writes: Result<Vec<_>, _> = request.into_inner().writes.into_iter().map(message::write).collect();
        let writes = writes.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (revisions, refusal) = match self.0.write_all(writes).await {
            Ok(revisions) => (revisions, Refusal::None),
            Err(Stopped { done, error }) => match error {
                StoreError::NotFound(_) => (done, Refusal::NotFound),
                StoreError::AlreadyExists(_) => (done, Refusal::AlreadyExists),
                StoreError::Conflict(_) => (done, Refusal::Conflict),
                error => return Err(status(error)),
            },
        };
        Ok(Response::new(WriteReply { revisions, refusal: i32::from(refusal) }))
    }

    type WatchStream = BoxStream<'static, Result<WatchEvent, Status>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest { kinds, after } = request.into_inner();
        let kinds: Result<Vec<_>, _> = kinds.iter().map(|kind| message::kind(kind)).collect();
        let events = self.0.watch(&kinds.map_err(status)?, after).await.map_err(status)?;
        let established = WatchEvent { object: None, deleted: false, established: true };
        let events = events.map(|event| event.map(WatchEvent::from).map_err(status));
        Ok(Response::new(futures::stream::iter([Ok(established)]).chain(events).boxed()))
    }
}

fn status(error: StoreError) -> Status {
    match error {
        StoreError::Compacted(_) => Status::out_of_range(error.to_string()),
        StoreError::FellBehind => Status::resource_exhausted(error.to_string()),
        StoreError::Damaged(text) => Status::data_loss(text),
        StoreError::Unavailable(text) => Status::unavailable(text),
        StoreError::NotFound(_) => Status::not_found(error.to_string()),
        StoreError::AlreadyExists(_) => Status::already_exists(error.to_string()),
        StoreError::Conflict(_) => Status::aborted(error.to_string()),
    }
}
