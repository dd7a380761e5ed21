//! Links whose packets a program sends and receives (`Documentation/networking/tuntap.rst`). Tests use them in place of tunnels that
//! their kernel does not have.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::sys::{check, interface_request};
use crate::{Error, Result};

const DEVICE: &str = "/dev/net/tun";
/// `ARPHRD_TUNNEL`: the type of links of IPIP.
const IPV4_TUNNEL: libc::c_ulong = 768;

/// A link without Ethernet headers. It exists until this value is dropped.
#[derive(Debug)]
pub struct Tun(File);

impl Tun {
    /// Creates the link in the calling thread's network namespace, with the type of an IPIP link. It is down.
    ///
    /// # Errors
    /// The failed call.
    pub fn create_ipv4_tunnel(name: &str) -> Result<Self> {
        let failed = || Error::system("create the TUN link", name);
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let file = opened.map_err(Error::system("open it", DEVICE))?;
        let mut request = interface_request(name)?;
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the first call reads and writes one ifreq; the second one takes a number.
        unsafe {
            check(libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as libc::Ioctl, &raw mut request))
                .map_err(failed())?;
            check(libc::ioctl(file.as_raw_fd(), libc::TUNSETLINK as libc::Ioctl, IPV4_TUNNEL))
                .map_err(failed())?;
        }
        Ok(Self(file))
    }

    /// Receives the next packet that the kernel sends on the link; `None` if none waits.
    ///
    /// # Errors
    /// The link is gone.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.0).read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            received => received.map(Some),
        }
    }

    /// Hands a packet to the kernel, as if it had arrived on the link.
    ///
    /// # Errors
    /// The link is down or gone.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        (&self.0).write_all(packet)
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
