//! Children that do not outlive their parent.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// Has the kernel kill the command's process when the **thread** that spawned it ends: spawn it from a thread that
/// lives as long as the child should (`PR_SET_PDEATHSIG`).
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
