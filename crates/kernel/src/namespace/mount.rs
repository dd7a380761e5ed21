//! Mounts of the calling process's mount namespace.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use crate::{Error, Result};

/// Separates the mount at `path`, and everything below it, from other mount namespaces, so that later mounts are not
/// visible there. Do this with `/` first in a new mount namespace.
///
/// # Errors
/// The path and the error of the kernel.
pub fn make_private(path: &Path) -> Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change(path, flags).map_err(failed("make the mount private", path))
}

/// Mounts an empty file system in memory at an existing folder.
///
/// # Errors
/// The path and the error of the kernel.
pub fn tmpfs(path: &Path) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", path, "tmpfs", flags, None::<&CStr>)
        .map_err(failed("mount a file system in memory", path))
}

/// Mounts a new `/proc` at an existing folder; it shows the PID namespace of the caller.
///
/// # Errors
/// The path and the error of the kernel. In a user namespace it needs a `/proc` without other mounts on it.
pub fn proc(path: &Path) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("proc", path, "proc", flags, None::<&CStr>).map_err(failed("mount /proc", path))
}

/// Makes `source` also appear at the existing path `target`.
///
/// # Errors
/// The target and the error of the kernel.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    rustix::mount::mount_bind(source, target).map_err(failed("bind a mount", target))
}

/// Unmounts `path`; current users may continue to use it.
///
/// # Errors
/// The path and the error of the kernel.
pub fn unmount(path: &Path) -> Result<()> {
    rustix::mount::unmount(path, UnmountFlags::DETACH).map_err(failed("unmount", path))
}

fn failed<E: Into<io::Error>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
    Error::system(operation, path.display().to_string())
}
