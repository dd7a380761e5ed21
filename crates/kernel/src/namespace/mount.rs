//! Mounts of the calling process's mount namespace.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use crate::{Error, Result};

/// Cuts the mount at `path`, and all below it, off from other mount namespaces, so that nothing mounted here shows
/// there. Do it with `/` first thing in a new mount namespace.
///
/// # Errors
/// What the kernel said of which path.
pub fn make_private(path: &Path) -> Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change(path, flags).map_err(failed("make the mount private", path))
}

/// Mounts an empty file system in memory at a folder that exists.
///
/// # Errors
/// What the kernel said of which path.
pub fn tmpfs(path: &Path) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", path, "tmpfs", flags, None::<&CStr>)
        .map_err(failed("mount a file system in memory", path))
}

/// Mounts a fresh `/proc` at a folder that exists; it shows the PID namespace of the caller.
///
/// # Errors
/// What the kernel said of which path. In a user namespace it needs a `/proc` that is nowhere covered.
pub fn proc(path: &Path) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("proc", path, "proc", flags, None::<&CStr>).map_err(failed("mount /proc", path))
}

/// Makes what is at `source` also appear at `target`, which exists.
///
/// # Errors
/// What the kernel said of the target.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    rustix::mount::mount_bind(source, target).map_err(failed("bind a mount", target))
}

/// Takes the mount at `path` away; who still uses it may go on doing so.
///
/// # Errors
/// What the kernel said of which path.
pub fn unmount(path: &Path) -> Result<()> {
    rustix::mount::unmount(path, UnmountFlags::DETACH).map_err(failed("unmount", path))
}

fn failed<E: Into<io::Error>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
    Error::system(operation, path.display().to_string())
}
