//! Children that end with their parent, or that see their own processes.

use std::ffi::CStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
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
/// programs such as `ps` look for their own process there. If the kernel refuses, the command has the caller's
/// `/proc`.
pub fn with_own_proc(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec there are three system calls and no allocation.
    unsafe {
        command.pre_exec(|| {
            let _ = mount_own_proc(); // it is a convenience
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
