//! Moves the calling process into new namespaces.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{getgid, getuid};
use rustix::thread::UnshareFlags;

use super::mount;
use crate::sys::set_interface_flags;
use crate::{Error, Result};

/// Which new namespaces to enter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// A user namespace in which the caller is root, and which owns the others. Not needed by root.
    pub user: bool,
    /// A mount namespace, separated from the old one, so that later mounts are not visible outside.
    pub mount: bool,
    /// A network namespace, with its loopback interface up.
    pub net: bool,
    /// A PID namespace. The caller stays outside and **cannot start threads any more** (`unshare(2)`). Its next child
    /// is the first process inside, and when that child ends, the kernel kills everything in the namespace. So enter
    /// it, spawn one child that does the work, and wait for the child.
    pub pid: bool,
}

/// Moves the calling process into new namespaces. Call it before any thread is started: the kernel refuses a user
/// namespace to a process with several threads, and other threads would stay in the old namespaces.
///
/// # Errors
/// The refusal of the kernel, with the remedy for the administrator if unprivileged user namespaces are off.
pub fn enter(new: Namespaces) -> Result<()> {
    let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
    if new.user {
        unshare(UnshareFlags::NEWUSER).map_err(refused("make a user namespace"))?;
        // setgroups must be denied first: only then does the kernel let an ordinary user map groups
        // (user_namespaces(7)).
        write_map("setgroups", "deny")?;
        write_map("uid_map", &format!("0 {uid} 1"))?;
        write_map("gid_map", &format!("0 {gid} 1"))?;
    }
    let mut flags = UnshareFlags::empty();
    flags.set(UnshareFlags::NEWNS, new.mount);
    flags.set(UnshareFlags::NEWNET, new.net);
    flags.set(UnshareFlags::NEWPID, new.pid);
    unshare(flags).map_err(refused("make mount, network and PID namespaces"))?;
    if new.mount {
        mount::make_private(Path::new("/"))?;
    }
    if new.net {
        set_interface_flags("lo", libc::IFF_UP)?;
    }
    Ok(())
}

pub(super) fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: the unsafe part of unshare is CLONE_FILES, which takes descriptors away from other threads; no caller
    // in this module passes it.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

fn write_map(file: &str, text: &str) -> Result<()> {
    fs::write(Path::new("/proc/self").join(file), text)
        .map_err(refused("map this user to root in a user namespace"))
}

fn refused<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Error {
    move |source| {
        let source = source.into();
        let advice = advice(&source, |name| fs::read_to_string(Path::new("/proc/sys").join(name)).ok());
        Error::Namespaces { operation, source, advice }
    }
}

/// The remedy for a refusal, by the switches that distributions have.
fn advice(source: &io::Error, sysctl: impl Fn(&str) -> Option<String>) -> String {
    let is = |name: &str, value: &str| sysctl(name).is_some_and(|text| text.trim() == value);
    let switches = [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ];
    let setting = switches.iter().find(|(name, value, _)| is(name, value)).map(|(_, _, setting)| setting);
    match (source.raw_os_error(), setting) {
        (Some(libc::EINVAL), _) => {
            "The process has several threads, or the kernel lacks these namespaces (CONFIG_USER_NS, CONFIG_NET_NS, \
             CONFIG_PID_NS)."
                .to_owned()
        }
        (_, Some(setting)) => {
            format!("Unprivileged user namespaces are off here. Run it as root, or have root do: sysctl -w {setting}")
        }
        (Some(libc::ENOSPC), None) => {
            "There are too many namespaces, or too deep ones. Raise the limits in /proc/sys/user, or run it as root."
                .to_owned()
        }
        (_, None) => "Run it as root; in a container, with the capability SYS_ADMIN and a seccomp profile that \
                      allows unshare."
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_switch_that_is_off() {
        let cases = [
            (libc::EPERM, ("kernel/unprivileged_userns_clone", "0\n"), "kernel.unprivileged_userns_clone=1"),
            (
                libc::EPERM,
                ("kernel/apparmor_restrict_unprivileged_userns", "1\n"),
                "kernel.apparmor_restrict_unprivileged_userns=0",
            ),
            (libc::ENOSPC, ("user/max_user_namespaces", "0\n"), "user.max_user_namespaces="),
            (libc::ENOSPC, ("user/max_user_namespaces", "100\n"), "/proc/sys/user"),
            (libc::EPERM, ("user/max_user_namespaces", "100\n"), "SYS_ADMIN"),
            (libc::EINVAL, ("user/max_user_namespaces", "100\n"), "several threads"),
        ];
        for (errno, (name, value), expected) in cases {
            let sysctl = |wanted: &str| (wanted == name).then(|| value.to_owned());
            let text = advice(&io::Error::from_raw_os_error(errno), sysctl);
            assert!(text.contains(expected), "{errno} with {name}={value}: {text}");
        }
    }
}
