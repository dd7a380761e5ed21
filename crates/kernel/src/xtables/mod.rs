//! The legacy tables of `iptables` and `ip6tables`, which are not part of nftables (`linux/netfilter/x_tables.h`,
//! `linux/netfilter_ipv4/ip_tables.h`, `linux/netfilter_ipv6/ip6_tables.h`).
//!
//! The kernel gives and takes a table as a whole. [`layout`] reads and changes such a table as plain data.

mod layout;

use std::fs::{OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::nftables::leftovers::Marks;
use crate::sys;
use crate::{Error, Result};

pub use layout::{Legacy, LegacyRule, Marked, Then};

/// The two kinds of legacy tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LegacyFamily {
    /// Those of `iptables`.
    V4,
    /// Those of `ip6tables`.
    V6,
}

/// The file that all programs lock that change legacy tables (`iptables/xshared.h`).
pub const LOCK: &str = "/run/xtables.lock";

/// The most bytes of a table, all of which are in memory at once. kube-proxy has some megabytes for ten thousand Services.
const MAX_BYTES: usize = 64 << 20;
/// How often a table is read or changed again if somebody changes it meanwhile.
const ATTEMPTS: usize = 5;

/// How long to wait for a program that holds the lock, and how often to look.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The requests of both families: `IPT_SO_GET_INFO`, `IPT_SO_GET_ENTRIES`, `IPT_SO_SET_REPLACE`.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
const SET_REPLACE: libc::c_int = 64;
/// `XT_TABLE_MAXNAMELEN`
const NAME: usize = 32;

impl LegacyFamily {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The program of its tables.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }

    /// The names of the tables that exist in the calling thread's network namespace; none if the kernel has no such tables.
    ///
    /// # Errors
    /// The names cannot be read.
    pub fn tables(self) -> Result<Vec<String>> {
        let file = match self {
            Self::V4 => "/proc/thread-self/net/ip_tables_names",
            Self::V6 => "/proc/thread-self/net/ip6_tables_names",
        };
        match std::fs::read_to_string(file) {
            Ok(names) => {
                let mut names: Vec<_> = names.split_whitespace().map(str::to_owned).collect();
                names.sort();
                Ok(names)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Error::system("read the names of legacy tables", file)(error)),
        }
    }

    fn domain_and_level(self) -> (libc::c_int, libc::c_int) {
        match self {
            Self::V4 => (libc::AF_INET, libc::IPPROTO_IP),
            Self::V6 => (libc::AF_INET6, libc::IPPROTO_IPV6),
        }
    }
}

impl Legacy {
    /// Reads a table of the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel's refusal, or a table that is too large or cannot be understood.
    pub fn read(family: LegacyFamily, table: &str) -> Result<Self> {
        Self::read_at_most(family, table, MAX_BYTES)
    }

    pub(super) fn read_at_most(family: LegacyFamily, table: &str, most: usize) -> Result<Self> {
        let failed = || Error::system("read the legacy table", shown(family, table));
        let (domain, level) = family.domain_and_level();
        let socket = sys::socket(domain, libc::SOCK_RAW, libc::IPPROTO_RAW).map_err(failed())?;
        let name = name(table).map_err(failed())?;
        for _ in 0..ATTEMPTS {
            let mut info = [0; layout::INFO];
            info[..NAME].copy_from_slice(&name);
            sys::get_bytes(socket.as_fd(), level, GET_INFO, &mut info).map_err(failed())?;
            let size = layout::size_of_entries(&info);
            if size > most {
                let problem = format!("it has {size} bytes, and at most {most} are read");
                return Err(failed()(io::Error::new(io::ErrorKind::FileTooLarge, problem)));
            }
            let mut entries = vec![0; layout::ENTRIES + size];
            entries[..NAME].copy_from_slice(&name);
            entries[NAME..NAME + 4].copy_from_slice(&(size as u32).to_ne_bytes());
            match sys::get_bytes(socket.as_fd(), level, GET_ENTRIES, &mut entries) {
                Ok(()) => {}
                // Somebody has replaced the table in between.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => continue,
                Err(error) => return Err(failed()(error)),
            }
            let read = Self::parse(family, &info, &entries[layout::ENTRIES..]);
            return read.map_err(|problem| failed()(io::Error::new(io::ErrorKind::InvalidData, problem)));
        }
        Err(failed()(io::Error::from_raw_os_error(libc::EAGAIN)))
    }

    /// Puts this content in place of a table that had `before` entries. The counters of rules start again.
    fn replace(&self, before: u32) -> Result<()> {
        let failed = || Error::system("replace the legacy table", shown(self.family, &self.name));
        let (domain, level) = self.family.domain_and_level();
        let socket = sys::socket(domain, libc::SOCK_RAW, libc::IPPROTO_RAW).map_err(failed())?;
        // `struct xt_counters` of each old entry, which the kernel returns.
        let mut counters = vec![[0_u64; 2]; before as usize];
        let name = name(&self.name).map_err(failed())?;
        let message = self.encode(&name, before, counters.as_mut_ptr().expose_provenance());
        let length = libc::socklen_t::try_from(message.len()).map_err(io::Error::other).map_err(failed())?;
        let bytes = message.as_ptr().cast();
        // SAFETY: the message lives across the call, and `length` is its length. The kernel writes as many counters as
        // the message says to the address in it, which has room for them and lives across the call, too.
        sys::check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, SET_REPLACE, bytes, length) })
            .map_err(failed())?;
        drop(counters);
        Ok(())
    }
}

/// Removes what carries these marks from a legacy table: chains, the rules that lead to them, and rules with their comments.
/// Everything else stays, except for packet counters. All or nothing is changed.
///
/// # Errors
/// Another program changes legacy tables for a long time; the kernel's refusal.
pub fn remove_marked(family: LegacyFamily, table: &str, marks: Marks<'_>, lock: &Path) -> Result<()> {
    let locked = || Error::system("lock the legacy tables", lock.display().to_string());
    let file = OpenOptions::new().create(true).append(true).open(lock).map_err(locked())?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    while let Err(error) = file.try_lock() {
        match error {
            TryLockError::WouldBlock if Instant::now() < deadline => thread::sleep(LOCK_INTERVAL),
            TryLockError::WouldBlock => return Err(locked()(io::Error::from(io::ErrorKind::TimedOut))),
            TryLockError::Error(error) => return Err(locked()(error)),
        }
    }
    for _ in 0..ATTEMPTS {
        let read = Legacy::read(family, table)?;
        let changed = read.without(marks);
        let changed = changed.map_err(|problem| {
            let problem = io::Error::new(io::ErrorKind::InvalidData, problem);
            Error::system("change the legacy table", shown(family, table))(problem)
        })?;
        let Some(changed) = changed else { return Ok(()) };
        match changed.replace(read.entries()) {
            // A program that does not use the lock has changed the table.
            Err(error) if error.errno() == Some(libc::EAGAIN) => {}
            result => return result,
        }
    }
    let changing = io::Error::from_raw_os_error(libc::EAGAIN);
    Err(Error::system("replace the legacy table", shown(family, table))(changing))
}

fn name(table: &str) -> io::Result<[u8; NAME]> {
    let mut name = [0; NAME];
    let room = name.get_mut(..table.len()).filter(|room| room.len() < NAME);
    room.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(table.as_bytes());
    Ok(name)
}

fn shown(family: LegacyFamily, table: &str) -> String {
    format!("legacy {} table {table}", family.program())
}
