//! Raw Ethernet frames of one interface (`packet(7)`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::sys::{bind, check, set_option, socket};
use crate::{Error, Result};

/// A socket that receives the frames arriving at an interface, and sends frames out of it. It never blocks, and does
/// not see its own frames.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket on the interface with this index in the calling thread's network namespace. Afterwards, any
    /// thread may use the socket.
    ///
    /// # Errors
    /// The failed call. It needs CAP_NET_RAW in that namespace.
    pub fn open(interface_index: u32) -> Result<Self> {
        let object = || format!("interface with index {interface_index}");
        let failed = |operation| Error::system(operation, object());
        // Protocol 0 until the socket is bound, so that no frame of another interface arrives.
        let socket = socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK, 0)
            .map_err(failed("open a packet socket"))?;
        set_option(socket.as_fd(), libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)
            .map_err(failed("leave outgoing frames out"))?;
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: i32::try_from(interface_index)
                .map_err(|_| failed("use that index")(io::Error::from_raw_os_error(libc::ENODEV)))?,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        bind(socket.as_fd(), &address).map_err(failed("bind a packet socket"))?;
        Ok(Self { socket })
    }

    /// Receives the next frame into `buffer` and returns its length, or `None` if no frame waits.
    ///
    /// # Errors
    /// `ENETDOWN` if the interface went down or disappeared; `EMSGSIZE` for a frame longer than the buffer, which is
    /// then lost.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        // SAFETY: the kernel writes at most `buffer.len()` bytes into the buffer.
        let length = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_TRUNC | libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(length) {
            Ok(length) if length > buffer.len() => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
            Ok(length) => Ok(Some(length)),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            },
        }
    }

    /// Sends one frame, starting with the Ethernet header, and returns whether there was room for it.
    ///
    /// # Errors
    /// `ENETDOWN` if the interface is down; `EMSGSIZE` for a frame over its MTU.
    pub fn send(&self, frame: &[u8]) -> io::Result<bool> {
        // SAFETY: the kernel reads `frame.len()` bytes of the frame.
        let sent = unsafe {
            libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), libc::MSG_DONTWAIT)
        };
        match check(if sent < 0 { -1 } else { 0 }) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Requests a receive buffer of this many bytes, beyond the system's limit if that is allowed.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn set_receive_buffer(&self, bytes: i32) -> io::Result<()> {
        let set = |option| set_option(self.as_fd(), libc::SOL_SOCKET, option, bytes);
        set(libc::SO_RCVBUFFORCE).or_else(|_| set(libc::SO_RCVBUF))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
