//! A connection of a client that has proved who it is. It ends when its client takes nothing for too long, and when the
//! client's certificate expires or is revoked.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

use super::client_identity::Client;

/// The right to a connection: one of all, and one of those of its client.
pub(crate) struct Permit {
    pub(crate) _of_all: OwnedSemaphorePermit,
    pub(crate) _of_client: OwnedSemaphorePermit,
}

/// A connection.
pub(crate) struct Connection<S> {
    stream: S,
    client: Arc<Client>,
    write_timeout: Duration,
    /// The end of the time that the client may take nothing.
    stalled: Option<Pin<Box<Sleep>>>,
    /// The end of the client's certificate.
    expires: Option<Pin<Box<Sleep>>>,
    /// The revocation of the client's certificate.
    revoked: Option<BoxFuture<'static, ()>>,
    /// Why the client may not go on, since it may not.
    ended: Option<&'static str>,
    /// Counts the connection, as long as it exists.
    _permit: Option<Permit>,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S, client: Client, write_timeout: Duration, permit: Option<Permit>) -> Self {
        let left = client.expires.map(|end| end.duration_since(SystemTime::now()).unwrap_or_default());
        let expires = left.map(|left| Box::pin(sleep(left)));
        let client = Arc::new(client);
        let (stalled, revoked, ended) = Default::default();
        Self { stream, client, write_timeout, stalled, expires, revoked, ended, _permit: permit }
    }

    /// Ends the connection when its client's certificate is revoked.
    pub(crate) fn until(self, revoked: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { revoked: Some(Box::pin(revoked)), ..self }
    }

    /// Why the client may not go on.
    fn has_ended(&mut self, context: &mut Context<'_>) -> Option<&'static str> {
        if self.ended.is_none() {
            self.ended = self.ends(context);
        }
        self.ended
    }

    fn ends(&mut self, context: &mut Context<'_>) -> Option<&'static str> {
        if let Some(expires) = &mut self.expires
            && expires.as_mut().poll(context).is_ready()
        {
            return Some("the client's certificate has expired");
        }
        let revoked = self.revoked.as_mut()?;
        revoked.as_mut().poll(context).is_ready().then_some("the client's certificate is revoked")
    }

    /// Fails if the client has taken nothing for too long.
    fn timed<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let timeout = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(stalled.as_mut().poll(context));
        tracing::warn!(client = %self.client.role, "the client takes nothing; its connection is closed");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: Unpin> Connected for Connection<S> {
    type ConnectInfo = Arc<Client>;

    fn connect_info(&self) -> Arc<Client> {
        self.client.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(why) = self.has_ended(context) {
            tracing::info!(client = %self.client.role, "{why}; its connection is closed");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // A client that takes little by little would keep the connection from reading.
        if let Some(why) = self.has_ended(context) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.timed(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(why) = self.has_ended(context) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.timed(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.timed(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.stream).poll_shutdown(context);
        self.timed(context, shut_down)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::Instant;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Time, not the number of messages, decides: a client that takes one byte in each interval stays connected.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_disconnected() {
        for (interval, survives) in [(TIMEOUT / 2, true), (TIMEOUT * 2, false)] {
            let (near, mut far) = tokio::io::duplex(1);
            let mut connection = Connection::new(near, Client::on_socket(), TIMEOUT, None);
            let reader = tokio::spawn(async move {
                let mut taken = 0;
                while taken < 10 {
                    tokio::time::sleep(interval).await;
                    match far.read_u8().await {
                        Ok(_) => taken += 1,
                        Err(_) => break,
                    }
                }
                taken
            });
            let start = Instant::now();
            let written = connection.write_all(&[0; 10]).await;
            assert_eq!(written.is_ok(), survives, "{interval:?}: {written:?}");
            if !survives {
                assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
                assert_eq!(start.elapsed(), TIMEOUT);
            }
            drop(connection);
            assert_eq!(reader.await.unwrap() == 10, survives, "{interval:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_with_the_certificate_of_its_client() {
        let (near, far) = tokio::io::duplex(1);
        let client = Client { expires: Some(SystemTime::now() + TIMEOUT), ..Client::on_socket() };
        let mut connection = Connection::new(near, client, TIMEOUT, None);
        let ended = connection.read_u8().await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(far);
    }
}
