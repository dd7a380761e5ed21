//! Children that end with their parent, or that see their own processes.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::UnshareFlags;

use super::enter::unshare;

/// Makes the kernel kill the command's process when the **thread** that spawned it ends, so spawn it from a thread
/// that lives long enough (`PR_SET_PDEATHSIG`).
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = getpid();
    // SAFETY: between fork and exec only two system calls are made, and nothing is allocated on success.
    unsafe { command.pre_exec(move || watch(parent)) }
}

fn watch(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before the request. A child in a new PID namespace sees no parent at all (None).
    match getppid() {
        Some(now) if now != parent => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

/// Resets the signals that end programs to their default actions for the command. A program that was started in the
/// background may have them ignored; the command would inherit that, and would ignore signals that are passed on to
/// it.
pub fn with_default_signals(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only system calls are made; `signal(2)` with SIG_DFL installs no handler.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                if libc::signal(signal, libc::SIG_DFL) == libc::SIG_ERR {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        })
    }
}

/// Gives the command a `/proc` of its PID namespace, which differs from the caller's, in a separate mount namespace:
/// programs such as `ps` look for their own process there. With `resolver`, that file is its `/etc/resolv.conf`. What the
/// kernel refuses stays as the caller has it.
pub fn with_own_mounts<'a>(command: &'a mut Command, resolver: Option<&Path>) -> &'a mut Command {
    let resolver = resolver.and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
    // SAFETY: between fork and exec there are four system calls and no allocation.
    unsafe {
        command.pre_exec(move || {
            // Both are conveniences.
            let _ = mount_own_proc();
            if let Some(resolver) = &resolver {
                let _ = mount_bind(resolver.as_c_str(), c"/etc/resolv.conf");
            }
            Ok(())
        })
    }
}

fn mount_own_proc() -> rustix::io::Result<()> {
    unshare(UnshareFlags::NEWNS)?;
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount(c"proc", c"/proc", c"proc", flags, None::<&CStr>)
}
