//! The client.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
#[cfg(unix)]
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};
use tortie_api::{Key, Kind, Position, Positions};
use tower::BoxError;

use super::generated::store_client::StoreClient;
use super::known_store::{Checked, KnownStore, refused};
use super::limited::MAX_MESSAGE_BYTES;
use super::message::{
    self, BackupRequest, BarrierReply, BarrierRequest, GetRequest, ListRequest, Refusal, WatchRequest,
    WriteRequest,
};
use super::tls::{Certificates, Reloaded, for_client};
use crate::embedded::{BackupPart, TakePart, write_backup};
use crate::follow::{Follow, Source, Watch, follow};
use crate::{
    Endpoints, Epoch, FileCheck, Interest, Page, PageToken, Stopped, Store, StoreError, Stored, Version,
    Write, Written,
};

/// The name in the certificate of the service.
const SERVICE_NAME: &str = "tortie-store";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for the beginning of an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// The interval and timeout of keepalive messages: a silent watch must not be mistaken for a quiet cluster.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));

/// A store in another process. It connects on first use, and reconnects after a loss.
#[derive(Clone)]
pub struct Remote {
    client: StoreClient<Checked>,
    channel: Checked,
    /// Whether the service has no order of events across kinds.
    watches_by_kind: bool,
}

impl Remote {
    /// The store behind a Unix socket.
    #[cfg(unix)]
    #[must_use]
    pub fn unix(path: &Path) -> Self {
        let path = path.to_owned();
        // The address is not used, because the connector knows the socket.
        let channel = bounded(Endpoint::from_static("http://tortie-store")).connect_with_connector_lazy(
            tower::service_fn(move |_| {
                let path = path.clone();
                async move {
                    let stream = tokio::net::UnixStream::connect(&path).await;
                    stream.map(TokioIo::new).map_err(|error| {
                        std::io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                    })
                }
            }),
        );
        Self::over(channel)
    }

    /// The store at `host:port`, with mutual TLS. Each new connection uses the current certificates.
    ///
    /// # Errors
    /// The address or the certificates are invalid.
    pub fn tls(address: &str, certificates: impl Into<Certificates>) -> Result<Self, StoreError> {
        let unusable = |problem: &str| StoreError::Unavailable(format!("{address}: {problem}"));
        let authority = authority(address).ok_or_else(|| unusable("it is not HOST:PORT"))?;
        let tls =
            Reloaded::new(certificates.into(), for_client).map_err(|error| unusable(&error.to_string()))?;
        let name = ServerName::try_from(SERVICE_NAME).map_err(|error| unusable(&error.to_string()))?;
        let uri: Result<Uri, _> = format!("https://{authority}").parse();
        let uri = uri.map_err(|error| unusable(&error.to_string()))?;
        let tls = Arc::new(tls);
        let channel = bounded(Endpoint::from_static("http://tortie-store")).connect_with_connector_lazy(
            tower::service_fn(move |_| {
                let (uri, name, tls, authority) = (uri.clone(), name.clone(), tls.clone(), authority.clone());
                async move {
                    let connected = tls.connect(uri, name).await;
                    connected.map_err(|error| BoxError::from(with_causes(authority, Some(&*error))))
                }
            }),
        );
        Ok(Self::over(channel))
    }

    fn over(channel: Channel) -> Self {
        let channel = Checked::new(channel);
        Self { client: client(&channel), channel, watches_by_kind: false }
    }

    /// For a client that must not follow another store, such as an agent: accepts the first store that it reaches, which this
    /// file remembers, and refuses other ones ([`StoreError::OtherStore`]) until somebody removes the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn remembering(self, file: &Path) -> Result<Self, StoreError> {
        let channel = self.channel.with(KnownStore::read(file)?);
        Ok(Self { client: client(&channel), channel, ..self })
    }

    /// For a service in front of a datastore without an order of events across kinds, such as etcd: a watch for each kind.
    #[must_use]
    pub fn with_watches_by_kind(self) -> Self {
        Self { watches_by_kind: true, ..self }
    }

    /// Writes a backup of the embedded store behind the service to a new file, which is a store, too.
    ///
    /// # Errors
    /// The service has no backups, or the client is no operator; the file exists already, or cannot be written.
    pub async fn backup(&self, to: &Path) -> Result<FileCheck, StoreError> {
        let reply = self.client.clone().backup(BackupRequest {}).await;
        let mut parts = reply.map_err(|status| error(status, None))?.into_inner();
        let (sender, receiver) = mpsc::channel::<Result<BackupPart, StoreError>>(2);
        let to = to.to_owned();
        let written = tokio::task::spawn_blocking(move || {
            let mut receiver = receiver;
            write_backup(&to, |take: &mut TakePart<'_>| {
                while let Some(part) = receiver.blocking_recv() {
                    take(part?)?;
                }
                Ok(())
            })
        });
        while let Some(part) = parts.message().await.transpose() {
            let part = part.map_err(|status| error(status, None)).and_then(message::backup_part);
            // Whoever takes no more says why in its result.
            if sender.send(part).await.is_err() {
                break;
            }
        }
        drop(sender);
        written.await.unwrap_or_else(|panic| Err(StoreError::Unavailable(panic.to_string())))
    }

    async fn write(&self, write: Write) -> Result<Written, StoreError> {
        let written = self.write_all(vec![write]).await.map_err(|stopped| stopped.error)?;
        written.into_iter().next().ok_or_else(unanswered)
    }
}

fn client(channel: &Checked) -> StoreClient<Checked> {
    StoreClient::new(channel.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

#[async_trait]
impl Store for Remote {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let reply = self.client.clone().get(GetRequest { key: Some(key.into()) }).await;
        let reply = reply.map_err(|status| error(status, Some(key.kind)))?;
        reply.into_inner().object.map(message::stored).transpose()
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        let request = ListRequest { interest: Some(interest.into()), after: after.map(|token| token.0) };
        let reply = self.client.clone().list(request).await;
        let reply = reply.map_err(|status| error(status, Some(interest.kind)))?.into_inner();
        let items: Result<Vec<_>, _> = reply.objects.into_iter().map(message::stored).collect();
        Ok(Page { items: items?, position: Position(reply.position), next: reply.next.map(PageToken) })
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        let written = self.write(Write::Create(key.clone(), value.clone())).await?;
        Ok(Stored::new(key.clone(), value, written))
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        let written = self.write(Write::Update(key.clone(), value.clone(), expected.clone())).await?;
        Ok(Stored::new(key.clone(), value, written))
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        Ok(self.write(Write::Delete(key.clone(), expected.cloned())).await?.position)
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        let keys: Vec<Key> = writes.iter().map(|write| write.key().clone()).collect();
        let request = WriteRequest { writes: writes.into_iter().map(Into::into).collect() };
        let reply = self.client.clone().write(request).await;
        let reply = reply.map_err(|status| error(status, None))?.into_inner();
        let (refusal, problem) = (reply.refusal(), reply.problem);
        let done: Vec<Written> = reply.written.into_iter().map(Into::into).collect();
        let next = keys.get(done.len()).cloned();
        let error = match (refusal, next) {
            (Refusal::None, None) => return Ok(done),
            (Refusal::NotFound, Some(key)) => StoreError::NotFound(key),
            (Refusal::AlreadyExists, Some(key)) => StoreError::AlreadyExists(key),
            (Refusal::Conflict, Some(key)) => StoreError::Conflict(key),
            (Refusal::Invalid, Some(key)) => StoreError::Invalid { key, problem },
            (Refusal::Full, Some(key)) => StoreError::Full { key, problem },
            (Refusal::Forbidden, Some(_)) => StoreError::Forbidden(problem),
            (Refusal::None, Some(_)) | (_, None) => unanswered(),
        };
        Err(Stopped { done, error })
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        follow(&Arc::new(self.clone()), interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        let kinds = kinds.iter().map(|kind| kind.plural().to_owned()).collect();
        let reply = self.client.clone().barrier(BarrierRequest { kinds }).await;
        let positions = reply.map_err(|status| error(status, None))?.into_inner().positions.into_iter();
        Ok(positions
            .filter_map(|(plural, position)| Some((message::known_kind(&plural)?, Position(position))))
            .collect())
    }

    /// Services of earlier versions tell no epoch.
    async fn epoch(&self) -> Result<Option<Epoch>, StoreError> {
        let reply = self.client.clone().barrier(BarrierRequest { kinds: Vec::new() }).await;
        let BarrierReply { begin, latest, .. } = reply.map_err(|status| error(status, None))?.into_inner();
        let epoch = begin.zip(latest);
        Ok(epoch.map(|(begin, latest)| Epoch { begin: Position(begin), latest: Position(latest) }))
    }
}

impl Endpoints for Remote {}

#[async_trait]
impl Source for Remote {
    /// As in the service. It rejects watches of more kinds than it can order.
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        match self.watches_by_kind {
            true => interests.into_iter().map(|interest| vec![interest]).collect(),
            false => vec![interests],
        }
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        let request = WatchRequest { interests: interests.iter().map(Into::into).collect(), after: after.0 };
        let compacted = move |status: Status| match status.code() {
            Code::OutOfRange => StoreError::Compacted(after),
            _ => error(status, None),
        };
        let reply = self.client.clone().watch(request).await.map_err(compacted)?;
        let mut events = reply.into_inner();
        // The watch is established once its first message arrives: it delivers everything written from now on.
        if events.message().await.map_err(compacted)?.is_none() {
            return Err(StoreError::Unavailable("the watch ended before it began".to_owned()));
        }
        let ended = StoreError::Unavailable("the service ended the watch".to_owned());
        let events = events.map(|event| message::event(event.map_err(|status| error(status, None))?));
        Ok(events.chain(futures::stream::iter([Err(ended)])).boxed())
    }
}

/// `HOST:PORT` as a URI has it: an IPv6 address may lack its brackets.
fn authority(address: &str) -> Option<String> {
    let (host, port) = address.rsplit_once(':').filter(|(host, _)| !host.is_empty())?;
    let port: u16 = port.parse().ok()?;
    let is_bare = host.parse::<std::net::Ipv6Addr>().is_ok();
    Some(if is_bare { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
}

/// No call may wait forever for a service that hangs.
fn bounded(endpoint: Endpoint) -> Endpoint {
    let (interval, patience) = KEEPALIVE;
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(CALL_TIMEOUT)
        .http2_keep_alive_interval(interval)
        .keep_alive_timeout(patience)
        .keep_alive_while_idle(true)
}

fn unanswered() -> StoreError {
    StoreError::Damaged("the answer has not as many results as there were writes".to_owned())
}

/// The error of a call that concerns this kind, if it concerns one.
fn error(status: Status, kind: Option<Kind>) -> StoreError {
    if let Some(other) = refused(&status) {
        return other;
    }
    match (status.code(), kind) {
        (Code::Unimplemented, Some(kind)) => return StoreError::KindAbsent(kind),
        (Code::PermissionDenied, _) => return StoreError::Forbidden(status.message().to_owned()),
        _ => {}
    }
    match status.code() {
        Code::ResourceExhausted => StoreError::FellBehind,
        Code::DataLoss => StoreError::Damaged(status.message().to_owned()),
        _ => StoreError::Unavailable(describe(&status)),
    }
}

/// The message of tonic for each failed connection. Its cause says more.
const TRANSPORT_ERROR: &str = "transport error";

/// The message and its causes, each once.
pub(crate) fn describe(status: &Status) -> String {
    with_causes(status.message().to_owned(), status.source())
}

fn with_causes(mut text: String, mut cause: Option<&(dyn Error + 'static)>) -> String {
    while let Some(error) = cause {
        let more = error.to_string();
        if more != TRANSPORT_ERROR && !text.contains(&more) {
            text = if text == TRANSPORT_ERROR { more } else { format!("{text}: {more}") };
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_named_once_and_without_the_word_of_tonic() {
        let cause = std::io::Error::other("/s.sock: No such file");
        let wrapped = std::io::Error::other(std::io::Error::other(cause));
        for text in [TRANSPORT_ERROR, "/s.sock: No such file"] {
            assert_eq!(with_causes(text.to_owned(), Some(&wrapped)), "/s.sock: No such file");
        }
        assert_eq!(
            with_causes("the call failed".to_owned(), Some(&wrapped)),
            "the call failed: /s.sock: No such file"
        );
        assert_eq!(with_causes(TRANSPORT_ERROR.to_owned(), None), TRANSPORT_ERROR);
    }

    #[test]
    fn addresses_of_services_may_be_bare_ipv6_addresses() {
        for (address, expected) in [
            ("store.example:7777", Some("store.example:7777")),
            ("192.0.2.1:7777", Some("192.0.2.1:7777")),
            ("[fd00::1]:7777", Some("[fd00::1]:7777")),
            ("fd00::1:7777", Some("[fd00::1]:7777")),
            (":7777", None),
            ("store.example", None),
            ("store.example:x", None),
        ] {
            assert_eq!(authority(address).as_deref(), expected, "{address}");
        }
    }
}
