//! The few system calls that have no safe wrapper elsewhere.

use std::io;
use std::mem::{size_of, size_of_val};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Error, Result};

/// The longest interface name, without the final NUL (`IFNAMSIZ` in `linux/if.h`).
pub const MAX_INTERFACE_NAME: usize = libc::IFNAMSIZ - 1;

/// Converts the result of a call that returns -1 on failure.
pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A new socket, closed on exec.
pub(crate) fn socket(domain: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed, and a descriptor that the call returns is ours alone.
    unsafe { Ok(OwnedFd::from_raw_fd(check(libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol))?)) }
}

/// Sets an integer socket option.
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value lives across the call, and the length is its length.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) })?;
    Ok(())
}

/// Reads a socket option that is a structure. Its bytes are also the request.
pub(crate) fn get_bytes(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    bytes: &mut [u8],
) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(bytes.len()).map_err(io::Error::other)?;
    let place = bytes.as_mut_ptr().cast();
    // SAFETY: the bytes live across the call, and the kernel writes at most `length` of them.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, place, &raw mut length) })?;
    Ok(())
}

/// Binds a socket to an address. `T` is one of libc's `sockaddr_*` types.
pub(crate) fn bind<T: SocketAddress>(socket: BorrowedFd<'_>, address: &T) -> io::Result<()> {
    let length = size_of_val(address) as libc::socklen_t;
    // SAFETY: `address` is a whole socket address of that length, as the trait promises.
    check(unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), length) })?;
    Ok(())
}

/// The port id that the kernel gave a bound netlink socket.
pub(crate) fn netlink_port(socket: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: all zeroes is a valid sockaddr_nl, made of integers.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: both places live across the call, and the length is that of the address.
    check(unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length) })?;
    Ok(address.nl_pid)
}

/// The socket address types of libc that this crate binds to.
///
/// # Safety
/// The type is a `sockaddr_*` of the kernel.
pub(crate) unsafe trait SocketAddress {}
// SAFETY: they are addresses of the families AF_PACKET and AF_NETLINK.
unsafe impl SocketAddress for libc::sockaddr_ll {}
// SAFETY: as above.
unsafe impl SocketAddress for libc::sockaddr_nl {}

/// An `ifreq` that names an interface, everything else zero.
pub(crate) fn interface_request(name: &str) -> Result<libc::ifreq> {
    if name.is_empty() || name.len() > MAX_INTERFACE_NAME || name.contains(['/', '\0']) {
        let source =
            io::Error::new(io::ErrorKind::InvalidInput, "an interface name has 1 to 15 bytes, no '/'");
        return Err(Error::system("use it as an interface name", name)(source));
    }
    // SAFETY: all zeroes is a valid ifreq: it is made of integers and pointers that nobody follows.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Sets interface flags (`IFF_*`) on an interface of the calling thread's network namespace.
pub(crate) fn set_interface_flags(name: &str, flags: libc::c_int) -> Result<()> {
    let mut request = interface_request(name)?;
    let failed = "set the interface's flags";
    let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0).map_err(Error::system(failed, name))?;
    // SAFETY: both calls read and write one ifreq, and `ifru_flags` is the member that they are about.
    unsafe {
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as libc::Ioctl, &raw mut request))
            .map_err(Error::system(failed, name))?;
        request.ifr_ifru.ifru_flags |= flags as libc::c_short;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as libc::Ioctl, &raw const request))
            .map_err(Error::system(failed, name))?;
    }
    Ok(())
}

/// The index of an interface of the calling thread's network namespace.
///
/// # Errors
/// The interface and the error of the kernel.
pub fn interface_index(name: &str) -> Result<u32> {
    InterfaceIndex::open()?.of(name)
}

/// Finds the indices of many interfaces of one network namespace: that of the thread that opened it.
pub struct InterfaceIndex {
    socket: OwnedFd,
}

impl InterfaceIndex {
    /// Opens the socket for the requests.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn open() -> Result<Self> {
        let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        Ok(Self { socket: socket.map_err(Error::system("find interfaces", "this network namespace"))? })
    }

    /// The index of an interface.
    ///
    /// # Errors
    /// The interface and the error of the kernel.
    pub fn of(&self, name: &str) -> Result<u32> {
        let mut request = interface_request(name)?;
        // SAFETY: the call reads the name and writes the index of one ifreq.
        let index = unsafe {
            check(libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFINDEX as libc::Ioctl, &raw mut request))
                .map_err(Error::system("find the interface", name))?;
            request.ifr_ifru.ifru_ifindex
        };
        Ok(index.unsigned_abs())
    }
}
