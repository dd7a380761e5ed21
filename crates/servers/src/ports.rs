//! Free ports on loopback.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;
use crate::error::io;

/// The ports to choose from. They lie below the ports that Linux gives to clients (32768 and up): the kernel must not
/// give the port of a killed server to a client before the server restarts.
const FIRST: u32 = 15_000;
const LAST: u32 = 31_999;

/// Finds a port on 127.0.0.1 that nobody listens on. Each call returns another one; processes begin at different ports.
///
/// # Errors
///
/// No port is free.
pub fn free_port() -> Result<u16, Error> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let count = LAST - FIRST + 1;
    // Neighbours in the list of processes begin far from each other.
    let offset = std::process::id().wrapping_mul(2_654_435_761) >> 8;
    for _ in 0..count {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + offset.wrapping_add(step) % count;
        let port = u16::try_from(port).unwrap_or_default();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io("finding a free port on 127.0.0.1")(std::io::ErrorKind::AddrInUse.into()))
}
