//! Sockets with the options that a peer's configuration asks for.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::config::{Password, Transport};
use super::error::Error;

/// The time to live of all packets: a peer with TTL security expects the highest.
const TTL: u8 = 255;
const BACKLOG: u32 = 1024;

/// A socket that listens at the address.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // On Windows, two processes could then listen at the address.
        #[cfg(not(windows))]
        socket.set_reuseaddr(true)?;
        options::only_own_family(&socket, address.is_ipv6())?;
        options::set_ttl(&socket, address.is_ipv6(), TTL)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|source| match is_absent(&source) {
        true => Error::NoAddress { address, source },
        false => Error::Listen { address, source },
    })
}

/// Whether the system lacks the address, or its whole family.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(options::NO_FAMILY)
}

/// Sets the password for connections of a peer, or none.
pub(super) fn set_password(
    listener: &TcpListener,
    peer: IpAddr,
    password: Option<&Password>,
) -> Result<(), Error> {
    let is_same_family = listener.local_addr().is_ok_and(|address| address.is_ipv4() == peer.is_ipv4());
    if !is_same_family {
        return Ok(());
    }
    let key = password.map_or("", |password| &password.0);
    options::set_md5_key(listener, peer, key).map_err(|error| protect(peer, &error))
}

/// Applies the options to a connection that a peer opened. It may be older than the password of its listener: with the
/// password of its own, nothing that is not signed is read from it.
pub(super) fn accepted(stream: &TcpStream, peer: IpAddr, transport: &Transport) -> Result<(), Error> {
    stream.set_nodelay(true).map_err(|error| protect(peer, &error))?;
    if let Some(Password(key)) = &transport.password {
        options::set_md5_key(stream, peer, key).map_err(|error| protect(peer, &error))?;
    }
    match transport.ttl_security {
        Some(hops) => {
            options::set_min_ttl(stream, peer.is_ipv6(), lowest(hops)).map_err(|error| protect(peer, &error))
        }
        None => Ok(()),
    }
}

/// Connects to a peer.
pub(super) async fn connect(
    peer: SocketAddr,
    transport: &Transport,
    limit: Duration,
) -> io::Result<TcpStream> {
    let socket = if peer.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    options::set_ttl(&socket, peer.is_ipv6(), TTL)?;
    if let Some(source) = transport.source {
        socket.set_reuseaddr(true)?;
        socket.bind(SocketAddr::new(source, 0))?;
    }
    if let Some(password) = &transport.password {
        options::set_md5_key(&socket, peer.ip(), &password.0)?;
    }
    if let Some(hops) = transport.ttl_security {
        options::set_min_ttl(&socket, peer.is_ipv6(), lowest(hops))?;
    }
    let stream = tokio::time::timeout(limit, socket.connect(peer)).await??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Whether the peer's system has acknowledged nothing for this long, and should have. Only Linux tells it: elsewhere, a peer that lost the
/// connection has to reset it.
pub(super) fn is_unacknowledged(stream: &TcpStream, limit: Duration) -> io::Result<bool> {
    options::is_unacknowledged(stream, limit)
}

/// The lowest time to live of packets that passed fewer routers than `hops`.
fn lowest(hops: u8) -> u8 {
    TTL - hops.saturating_sub(1)
}

fn protect(peer: IpAddr, error: &io::Error) -> Error {
    Error::Protect { peer, problem: error.to_string() }
}

#[cfg(target_os = "linux")]
mod options {
    use std::io;
    use std::net::IpAddr;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use tortie_kernel::tcp;

    /// EAFNOSUPPORT.
    pub(super) const NO_FAMILY: i32 = 97;

    pub(super) fn only_own_family(socket: &impl AsFd, is_ipv6: bool) -> io::Result<()> {
        if is_ipv6 { tcp::set_only_ipv6(socket.as_fd()).map_err(io::Error::other) } else { Ok(()) }
    }

    pub(super) fn set_md5_key(socket: &impl AsFd, peer: IpAddr, key: &str) -> io::Result<()> {
        tcp::set_md5_key(socket.as_fd(), peer, key.as_bytes()).map_err(io::Error::other)
    }

    pub(super) fn set_ttl(socket: &impl AsFd, is_ipv6: bool, ttl: u8) -> io::Result<()> {
        tcp::set_ttl(socket.as_fd(), is_ipv6, ttl).map_err(io::Error::other)
    }

    pub(super) fn set_min_ttl(socket: &impl AsFd, is_ipv6: bool, ttl: u8) -> io::Result<()> {
        tcp::set_min_ttl(socket.as_fd(), is_ipv6, ttl).map_err(io::Error::other)
    }

    pub(super) fn is_unacknowledged(socket: &impl AsFd, limit: Duration) -> io::Result<bool> {
        let seen = tcp::acknowledgements(socket.as_fd()).map_err(io::Error::other)?;
        Ok(seen.outstanding > 0 && seen.last >= limit)
    }
}

/// What other systems lack is refused, and not left out.
#[cfg(not(target_os = "linux"))]
mod options {
    use std::io;
    use std::net::IpAddr;
    use std::time::Duration;

    /// WSAEAFNOSUPPORT.
    pub(super) const NO_FAMILY: i32 = 10047;

    pub(super) fn only_own_family<S>(_: &S, _: bool) -> io::Result<()> {
        // Windows separates the families unless asked otherwise.
        Ok(())
    }

    pub(super) fn set_md5_key<S>(_: &S, _: IpAddr, key: &str) -> io::Result<()> {
        if key.is_empty() { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    pub(super) fn set_ttl<S>(_: &S, _: bool, _: u8) -> io::Result<()> {
        // Without TTL security on this end, that of the peer finds the system's own value, and refuses it.
        Ok(())
    }

    pub(super) fn set_min_ttl<S>(_: &S, _: bool, _: u8) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn is_unacknowledged<S>(_: &S, _: Duration) -> io::Result<bool> {
        Ok(false)
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A connection that was opened before the password was known must not become a session without one.
    #[tokio::test]
    async fn nothing_is_read_from_a_connection_without_its_password() {
        for password in [None, Some(Password("secret".to_owned()))] {
            let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut stream, from) = listener.accept().await.unwrap();
            let is_protected = password.is_some();
            accepted(&stream, from.ip(), &Transport { password, ..Transport::default() }).unwrap();
            peer.write_all(b"x").await.unwrap();
            let read = tokio::time::timeout(Duration::from_secs(1), stream.read_u8()).await;
            assert_eq!(read.is_err(), is_protected, "{read:?}");
        }
    }
}
