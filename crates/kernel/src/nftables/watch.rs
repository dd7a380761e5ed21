//! Detects changes of Tortie's table by others.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::{decode, encode};
use crate::Result;
use crate::netlink::{Family, Reply, Socket};

/// `NFNLGRP_NFTABLES` (`linux/netfilter/nfnetlink.h`).
const GROUP: u32 = 7;

/// How soon the thread notices that nobody listens any more.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The callback for changes of the table by others.
pub struct ChangeCallback(pub Box<dyn Fn() + Send>);

impl fmt::Debug for ChangeCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChangeCallback")
    }
}

/// A thread that reports changes of a table by others while this value lives.
#[derive(Debug)]
pub struct Watch {
    _alive: Arc<()>,
}

impl Watch {
    /// Watches a table in the network namespace of the calling thread. `own` is the port id of the connection whose
    /// changes are Tortie's own. Calls `on_change` for each burst of changes by others, and if the kernel had to drop
    /// notifications, because then the changes are unknown.
    ///
    /// # Errors
    /// The connection or thread that could not be created.
    pub fn start(table: &str, own: u32, on_change: ChangeCallback) -> Result<Self> {
        Self::on(subscribed()?, table, own, on_change)
    }

    /// The same with an existing connection.
    fn on(mut socket: Socket, table: &str, own: u32, on_change: ChangeCallback) -> Result<Self> {
        let alive = Arc::new(());
        let (weak, table) = (Arc::downgrade(&alive), table.to_owned());
        let watch = move || watch(&mut socket, &table, own, &on_change, &weak);
        let failed = crate::Error::system("start it", "the thread that watches the nftables table");
        thread::Builder::new().name("nftables-watch".to_owned()).spawn(watch).map_err(failed)?;
        Ok(Self { _alive: alive })
    }
}

/// A connection that receives changes of nftables.
fn subscribed() -> Result<Socket> {
    let socket = Socket::open(Family::Netfilter)?;
    socket.subscribe(&[GROUP])?;
    Ok(socket)
}

fn watch(socket: &mut Socket, table: &str, own: u32, on_change: &ChangeCallback, alive: &Weak<()>) {
    while alive.strong_count() > 0 {
        match socket.next_notifications(TIMEOUT) {
            Ok(changes) if changes.iter().any(|change| is_foreign(change, table, own)) => {
                tracing::warn!(table, "another program has changed the table; Tortie repairs it");
                (on_change.0)();
            }
            Ok(_) => {}
            // Some were dropped, possibly of Tortie's own changes.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => (on_change.0)(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(table, %error, "cannot watch the table; Tortie notices changes by others at the next resync");
                return;
            }
        }
    }
}

/// Whether somebody else has changed the table or its content.
fn is_foreign(change: &Reply, table: &str, own: u32) -> bool {
    let name = || decode::attributes(change).text(encode::NFTA_TABLE);
    change.port != own
        && i32::from(change.kind & 0xff) != libc::NFT_MSG_NEWGEN
        && name().as_deref() == Some(table)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc;

    use super::*;
    use crate::namespace::NetNs;
    use crate::nftables::{Nft, Op, Transaction};

    /// Others change tables until a small buffer is full, so notifications about Tortie's table may be lost.
    #[test]
    fn lost_notifications_are_reported() {
        let overrun = || {
            let socket = subscribed().unwrap();
            crate::sys::set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 1).unwrap();
            let mut nft = Nft::open().unwrap();
            for _ in 0..100 {
                for op in [Op::AddTable(0), Op::DeleteTable] {
                    nft.commit(&Transaction { table: "theirs".to_owned(), ops: vec![op] }).unwrap();
                }
            }
            socket
        };
        let socket = NetNs::create().unwrap().run(overrun).unwrap();
        let (disturb, disturbed) = mpsc::channel();
        let on_change = ChangeCallback(Box::new(move || disturb.send(()).unwrap_or_default()));
        let _watch = Watch::on(socket, "ours", 0, on_change).unwrap();
        disturbed.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(disturbed.recv_timeout(2 * TIMEOUT).is_err(), "once");
    }
}
