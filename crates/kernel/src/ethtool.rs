//! Offloads of network interfaces (`SIOCETHTOOL`, `linux/ethtool.h`).
//!
//! A user-space switch must see packets as they are on a wire. A kernel that relies on hardware passes TCP with
//! unfinished checksums, in segments far over the MTU.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::sys::{check, interface_request, socket};
use crate::{Error, Result};

/// Turns off checksum and segmentation offloads, scatter-gather and receive aggregation on an interface of the
/// calling thread's network namespace. Offloads that are off already, or do not exist on this kind of interface, are
/// left alone.
///
/// # Errors
/// The interface, and the offload that could not be turned off.
pub fn disable_offloads(interface: &str) -> Result<()> {
    let control = socket(libc::AF_INET, libc::SOCK_DGRAM, 0)
        .map_err(Error::system("open a socket to turn offloads off", interface))?;
    for offload in OFFLOADS {
        let failed = || Error::system(offload.operation, interface);
        if !is_on(&control, interface, offload).map_err(failed())? {
            continue;
        }
        command(&control, interface, offload.set, 0).map_err(failed())?;
        if is_on(&control, interface, offload).map_err(failed())? {
            return Err(failed()(io::Error::other("it stays on")));
        }
    }
    Ok(())
}

/// Whether an interface leaves transport checksums to the hardware or the receiver.
///
/// # Errors
/// The interface.
pub fn transmit_checksum_offload(interface: &str) -> Result<bool> {
    let failed = || Error::system("read transmit checksum offload", interface);
    let control = socket(libc::AF_INET, libc::SOCK_DGRAM, 0).map_err(failed())?;
    is_on(&control, interface, &TRANSMIT_CHECKSUM).map_err(failed())
}

/// Lets an interface leave transport checksums to the hardware or the receiver, or computes them in the kernel (`ethtool -K NAME tx on|off`).
///
/// # Errors
/// The interface, or it does not have the offload that is to be on.
pub fn set_transmit_checksum_offload(interface: &str, on: bool) -> Result<()> {
    let operation = if on { "turn on transmit checksum offload" } else { TRANSMIT_CHECKSUM.operation };
    let failed = || Error::system(operation, interface);
    let control = socket(libc::AF_INET, libc::SOCK_DGRAM, 0).map_err(failed())?;
    if is_on(&control, interface, &TRANSMIT_CHECKSUM).map_err(failed())? == on {
        return Ok(());
    }
    command(&control, interface, TRANSMIT_CHECKSUM.set, on.into()).map_err(failed())?;
    match is_on(&control, interface, &TRANSMIT_CHECKSUM).map_err(failed())? == on {
        true => Ok(()),
        false => Err(failed()(io::Error::other("it stays as it was"))),
    }
}

struct Offload {
    /// `ETHTOOL_G…` and `ETHTOOL_S…`.
    get: u32,
    set: u32,
    operation: &'static str,
}

const TRANSMIT_CHECKSUM: Offload =
    Offload { get: 0x16, set: 0x17, operation: "turn off transmit checksum offload" };

/// From `linux/ethtool.h`. Segmentation comes before the offloads that it needs, so that nothing is switched twice.
const OFFLOADS: &[Offload] = &[
    Offload { get: 0x2b, set: 0x2c, operation: "turn off generic receive offload" },
    Offload { get: 0x1e, set: 0x1f, operation: "turn off TCP segmentation offload" },
    Offload { get: 0x23, set: 0x24, operation: "turn off generic segmentation offload" },
    Offload { get: 0x18, set: 0x19, operation: "turn off scatter-gather" },
    TRANSMIT_CHECKSUM,
    Offload { get: 0x14, set: 0x15, operation: "turn off receive checksum offload" },
];

fn is_on(control: &OwnedFd, interface: &str, offload: &Offload) -> io::Result<bool> {
    match command(control, interface, offload.get, 0) {
        Ok(value) => Ok(value != 0),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Runs one command with one number, and returns the number that the kernel left there.
fn command(control: &OwnedFd, interface: &str, command: u32, value: u32) -> io::Result<u32> {
    /// `struct ethtool_value`.
    #[repr(C)]
    struct EthtoolValue {
        command: u32,
        data: u32,
    }
    let mut value = EthtoolValue { command, data: value };
    let mut request = interface_request(interface).map_err(io::Error::other)?;
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request and the value that it points to live across the call, and every command of an Offload
    // reads and writes an ethtool_value and no more.
    check(unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request) })?;
    Ok(value.data)
}
