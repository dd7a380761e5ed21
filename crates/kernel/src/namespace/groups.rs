//! Programs that drop privileges in a user namespace without other groups.
//!
//! An ordinary user's namespace maps one user and one group, and the kernel requires that it forbids `setgroups`
//! (`user_namespaces(7)`). Programs that start as root, such as tcpdump, first set their groups, even to the current
//! ones, and exit if this is refused.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// `AUDIT_ARCH_…` (`linux/audit.h`): identifies system calls of another architecture, which have other numbers.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Whether the calling process's user namespace forbids `setgroups`.
#[must_use]
pub fn are_fixed() -> bool {
    std::fs::read_to_string("/proc/self/setgroups").is_ok_and(|text| text.trim() == "deny")
}

/// Makes `setgroups` do nothing, successfully, in the command and its children (seccomp). They keep their groups, and
/// get no privileges from set-user-ID files.
pub fn pretend_to_set(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec there are two system calls and no allocation.
    unsafe { command.pre_exec(install) }
}

fn install() -> io::Result<()> {
    let code = |parts: [u32; 3]| parts.iter().sum::<u32>() as u16;
    let (load, jump, end) = (
        code([libc::BPF_LD, libc::BPF_W, libc::BPF_ABS]),
        code([libc::BPF_JMP, libc::BPF_JEQ, libc::BPF_K]),
        code([libc::BPF_RET, libc::BPF_K, 0]),
    );
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // `struct seccomp_data`: the number of the call, followed by the architecture.
    let mut program = [
        step(load, 0, 0, 4),
        step(jump, 0, 3, ARCHITECTURE),
        step(load, 0, 0, 0),
        step(jump, 0, 1, libc::SYS_setgroups as u32),
        step(end, 0, 0, libc::SECCOMP_RET_ERRNO), // with no error: it went well
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: prctl with these options reads integers only.
    let private = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the kernel reads the filter and its program, which live until the call returns.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    if private < 0 || set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
