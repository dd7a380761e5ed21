//! Mounts of the calling process's mount namespace.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
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

/// Mounts at `target` what is in the folder `lower`, which stays as it is: changes are kept in `upper`. `work` is an empty folder
/// beside it, for the kernel.
///
/// # Errors
/// The target and the error of the kernel. In a user namespace it needs Linux 5.11.
pub fn overlay(lower: &Path, upper: &Path, work: &Path, target: &Path) -> Result<()> {
    // Without `userxattr`, the kernel refuses what it needs in a user namespace.
    let mut options = b"userxattr".to_vec();
    for (name, path) in [("lowerdir", lower), ("upperdir", upper), ("workdir", work)] {
        options.extend_from_slice(format!(",{name}=").as_bytes());
        // These separate options and folders.
        let escaped = |byte: &u8| match byte {
            b',' | b':' | b'\\' => vec![b'\\', *byte],
            _ => vec![*byte],
        };
        options.extend(path.as_os_str().as_bytes().iter().flat_map(escaped));
    }
    let failed = |error: io::Error| failed("lay a folder over another one", target)(error);
    let options = CString::new(options).map_err(|error| failed(error.into()))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("overlay", target, "overlay", flags, options.as_c_str())
        .map_err(|error| failed(error.into()))
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

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::thread::UnshareFlags;

    use super::super::enter::unshare;
    use super::*;

    #[test]
    fn an_overlay_keeps_changes_apart_whatever_the_names_of_its_folders() {
        // The mounts end with the thread, whose mount namespace is its own.
        let laid = std::thread::spawn(|| {
            unshare(UnshareFlags::NEWNS).unwrap();
            make_private(Path::new("/")).unwrap();
            let all = tempfile::TempDir::with_prefix("a,b:c\\d").unwrap();
            let [lower, upper, work, target] = ["lower", "upper", "work", "target"].map(|name| {
                let folder = all.path().join(name);
                fs::create_dir(&folder).unwrap();
                folder
            });
            fs::write(lower.join("file"), "before").unwrap();
            overlay(&lower, &upper, &work, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "before");
            fs::write(target.join("file"), "after").unwrap();
            assert_eq!(fs::read_to_string(lower.join("file")).unwrap(), "before");
            assert_eq!(fs::read_to_string(upper.join("file")).unwrap(), "after");
            unmount(&target).unwrap();
        });
        laid.join().unwrap();
    }
}
