//! Notices when somebody else changes our table.

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

/// How soon the thread notices that nobody wants to know any more.
const PATIENCE: Duration = Duration::from_millis(500);

/// What is called when others have changed the table.
pub struct Told(pub Box<dyn Fn() + Send>);

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}

/// A thread that tells of changes of a table by others, for as long as this lives.
#[derive(Debug)]
pub struct Watch {
    _alive: Arc<()>,
}

impl Watch {
    /// Watches a table in the network namespace of the calling thread. `own` is the port id of the connection whose changes
    /// are our own. `told` is called for each burst of changes that others made, and where the kernel had to leave
    /// some out, as then nobody knows.
    ///
    /// # Errors
    /// The connection or thread that could not be made.
    pub fn start(table: &str, own: u32, told: Told) -> Result<Self> {
        let mut socket = Socket::open(Family::Netfilter)?;
        socket.subscribe(&[GROUP])?;
        let alive = Arc::new(());
        let (weak, table) = (Arc::downgrade(&alive), table.to_owned());
        let watch = move || watch(&mut socket, &table, own, &told, &weak);
        let failed = crate::Error::system("start it", "the thread that watches the nftables table");
        thread::Builder::new().name("nftables-watch".to_owned()).spawn(watch).map_err(failed)?;
        Ok(Self { _alive: alive })
    }
}

fn watch(socket: &mut Socket, table: &str, own: u32, told: &Told, alive: &Weak<()>) {
    while alive.strong_count() > 0 {
        match socket.next_notifications(PATIENCE) {
            Ok(changes) if changes.iter().any(|change| is_foreign(change, table, own)) => {
                tracing::warn!(table, "somebody else has changed the table; it is read and mended");
                (told.0)();
            }
            Ok(_) => {}
            // Some were left out: perhaps of our own changes, perhaps not.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => (told.0)(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(table, %error, "changes of the table by others are noticed at the next resync only");
                return;
            }
        }
    }
}

/// Whether somebody else has changed something in the table, or the table itself.
fn is_foreign(change: &Reply, table: &str, own: u32) -> bool {
    let name = || decode::attributes(change).text(encode::NFTA_TABLE);
    change.port != own
        && i32::from(change.kind & 0xff) != libc::NFT_MSG_NEWGEN
        && name().as_deref() == Some(table)
}
