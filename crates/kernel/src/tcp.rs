//! Options of TCP sockets that routing protocols need (`tcp(7)`, `ip(7)`).

use std::io;
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::sys::{check, get_bytes, set_option};
use crate::{Error, Result};

/// The longest key of an MD5 signature (`TCP_MD5SIG_MAXKEYLEN`).
pub const MAX_MD5_KEY: usize = 80;

/// `struct tcp_md5sig` of `linux/tcp.h`.
#[repr(C)]
struct Md5Signature {
    address: libc::sockaddr_storage,
    flags: u8,
    prefix_length: u8,
    key_length: u16,
    interface: u32,
    key: [u8; MAX_MD5_KEY],
}

/// Makes a socket sign what it sends to an address, and drop what is not signed in the same way (RFC 2385). An empty key
/// ends that. On a socket that listens, it holds for connections from that address. The socket must be of the address's
/// family.
///
/// # Errors
/// The key is too long, or the kernel does not know such signatures.
pub fn set_md5_key(socket: BorrowedFd<'_>, peer: IpAddr, key: &[u8]) -> Result<()> {
    let failed = Error::system("set the key for MD5 signatures", peer.to_string());
    if key.len() > MAX_MD5_KEY {
        let problem = format!("a key has at most {MAX_MD5_KEY} bytes");
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)));
    }
    let mut option = Md5Signature {
        address: storage(peer),
        flags: 0,
        prefix_length: 0,
        key_length: key.len() as u16,
        interface: 0,
        key: [0; MAX_MD5_KEY],
    };
    option.key[..key.len()].copy_from_slice(key);
    let length = size_of::<Md5Signature>() as libc::socklen_t;
    // SAFETY: the kernel reads one `tcp_md5sig`, which lives across the call, and the length is its length.
    let result = check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MD5SIG,
            (&raw const option).cast(),
            length,
        )
    });
    match result {
        // There was no key to end.
        Err(error) if key.is_empty() && error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.map(|_| ()).map_err(failed),
    }
}

fn storage(address: IpAddr) -> libc::sockaddr_storage {
    // SAFETY: all zeroes is a valid sockaddr_storage, made of integers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = (&raw mut storage).cast::<u8>();
    match address {
        IpAddr::V4(address) => {
            let address = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: 0,
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage has room for, and the alignment of, every address; nothing overlaps.
            unsafe { at.cast::<libc::sockaddr_in>().write(address) };
        }
        IpAddr::V6(address) => {
            let address = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.octets() },
                sin6_scope_id: 0,
            };
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(address) };
        }
    }
    storage
}

/// What the peer's system acknowledges on a connection (`TCP_INFO`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledgements {
    /// The number of segments that were sent and not acknowledged.
    pub outstanding: u32,
    /// The time since an acknowledgement arrived.
    pub last: Duration,
}

/// Reads what the peer's system acknowledges.
///
/// # Errors
/// The kernel's refusal.
pub fn acknowledgements(socket: BorrowedFd<'_>) -> Result<Acknowledgements> {
    /// The places in `struct tcp_info` of `linux/tcp.h`, of 32 bits each.
    const UNACKED: usize = 24;
    const LAST_ACK_RECV: usize = 56;
    let mut info = [0; LAST_ACK_RECV + 4];
    get_bytes(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)
        .map_err(Error::system("read the state", "a TCP socket"))?;
    let number = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    let last = Duration::from_millis(number(LAST_ACK_RECV).into());
    Ok(Acknowledgements { outstanding: number(UNACKED), last })
}

/// Sends packets with this time to live (or hop limit).
///
/// # Errors
/// The kernel's refusal.
pub fn set_ttl(socket: BorrowedFd<'_>, is_ipv6: bool, ttl: u8) -> Result<()> {
    let (level, option) = if is_ipv6 {
        (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS)
    } else {
        (libc::IPPROTO_IP, libc::IP_TTL)
    };
    set_option(socket, level, option, ttl.into())
        .map_err(Error::system("set the time to live", "a TCP socket"))
}

/// Drops packets that arrive with less than this time to live (or hop limit) (RFC 5082).
///
/// # Errors
/// The kernel's refusal.
pub fn set_min_ttl(socket: BorrowedFd<'_>, is_ipv6: bool, ttl: u8) -> Result<()> {
    /// `IPV6_MINHOPCOUNT` of `linux/in6.h`.
    const IPV6_MINHOPCOUNT: libc::c_int = 73;
    /// `IP_MINTTL` of `linux/in.h`.
    const IP_MINTTL: libc::c_int = 21;
    let (level, option) =
        if is_ipv6 { (libc::IPPROTO_IPV6, IPV6_MINHOPCOUNT) } else { (libc::IPPROTO_IP, IP_MINTTL) };
    set_option(socket, level, option, ttl.into())
        .map_err(Error::system("set the lowest time to live", "a TCP socket"))
}

/// Leaves IPv4 to other sockets.
///
/// # Errors
/// The kernel's refusal.
pub fn set_only_ipv6(socket: BorrowedFd<'_>) -> Result<()> {
    set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)
        .map_err(Error::system("leave IPv4 out", "a TCP socket"))
}
