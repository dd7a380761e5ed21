//! Network namespaces as values.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::enter::unshare;
use super::mount;
use crate::sys::set_interface_flags;
use crate::{Error, Result};

/// A network namespace. It lives at least as long as the value.
#[derive(Debug)]
pub struct NetNs {
    fd: OwnedFd,
}

/// The identity of a network namespace while it exists: device and inode of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetNsId(u64, u64);

impl NetNs {
    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// The namespace that is bound to a file, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// The path and why it could not be opened. Whether it is a network namespace is checked only on entering.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::system("open the network namespace", shown(path)))?;
        Ok(Self { fd: file.into() })
    }

    /// A new, empty namespace with its loopback interface up. It ends with the value, unless a process is in it or
    /// [`bind_to`](Self::bind_to) gave it a path.
    ///
    /// # Errors
    /// An error of the kernel; it needs CAP_SYS_ADMIN.
    pub fn create() -> Result<Self> {
        in_thread(|| {
            unshare(UnshareFlags::NEWNET)
                .map_err(Error::system("make a network namespace", "this thread"))?;
            set_interface_flags("lo", libc::IFF_UP)?;
            Self::current()
        })?
    }

    /// Gives the namespace a path, at which it stays until [`unbind`](Self::unbind). The file is created.
    ///
    /// # Errors
    /// The path and the error of the kernel.
    pub fn bind_to(&self, path: &Path) -> Result<()> {
        File::create_new(path).map_err(Error::system("make a file for a network namespace", shown(path)))?;
        let own = format!("/proc/thread-self/fd/{}", self.fd.as_raw_fd());
        mount::bind(Path::new(&own), path).inspect_err(|_| drop(fs::remove_file(path)))
    }

    /// Removes the path of a bound namespace. The namespace ends when nobody else holds it.
    ///
    /// # Errors
    /// The path and the error of the kernel.
    pub fn unbind(path: &Path) -> Result<()> {
        mount::unmount(path)?;
        fs::remove_file(path).map_err(Error::system("remove the file of a network namespace", shown(path)))
    }

    /// The identity of the namespace.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn id(&self) -> Result<NetNsId> {
        let stat = rustix::fs::fstat(&self.fd);
        let stat = stat.map_err(Error::system("look at the network namespace", self.shown()))?;
        Ok(NetNsId(stat.st_dev, stat.st_ino))
    }

    /// Runs `work` in the namespace, in a separate thread, and waits for it. Sockets that it opens stay in the
    /// namespace, whoever uses them later.
    ///
    /// # Errors
    /// The namespace could not be entered (it needs CAP_SYS_ADMIN), or no thread could be started.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R> {
        in_thread(|| {
            self.enter().map_err(Error::system("enter the network namespace", self.shown()))?;
            Ok(work())
        })?
    }

    /// Makes the command run in the namespace. The caller may close the namespace before it spawns the command.
    pub fn enter_on_spawn<'a>(&self, command: &'a mut Command) -> Result<&'a mut Command> {
        let own =
            self.fd.try_clone().map_err(Error::system("duplicate the network namespace", self.shown()))?;
        let namespace = Self { fd: own };
        // SAFETY: between fork and exec there is one system call and no allocation.
        Ok(unsafe { command.pre_exec(move || namespace.enter()) })
    }

    /// Moves the calling thread. Private, because a thread that stays in a foreign namespace is a trap for its next
    /// task.
    fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    fn shown(&self) -> String {
        let link = fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        link.map_or_else(|_| "network namespace".to_owned(), |path| path.display().to_string())
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Runs `work` in a new thread. A panic in it continues in the caller.
fn in_thread<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    thread::scope(|scope| {
        let spawned = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, work);
        let thread = spawned.map_err(Error::system("start a thread", "network namespace"))?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
