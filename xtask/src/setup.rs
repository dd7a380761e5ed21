//! The requirements of tests, checks and benchmarks. Tortie itself needs none of them.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::{cargo, run};

/// A program and its Debian package.
type Package = (&'static str, &'static str);

/// For tests: packet captures, an independent reader of the kernel's tables, and a tool that adds foreign tables.
pub(crate) const TEST_PACKAGES: [Package; 3] =
    [("/usr/bin/tcpdump", "tcpdump"), ("/usr/sbin/nft", "nftables"), ("/usr/sbin/iptables-nft", "iptables")];
/// For benchmarks: the peers, and a tool that creates network namespaces for them.
pub(crate) const BENCH_PACKAGES: [Package; 2] =
    [("/usr/lib/cni/ptp", "containernetworking-plugins"), ("/bin/ip", "iproute2")];

/// Installs everything.
pub(crate) fn everything() -> Result<()> {
    packages(&TEST_PACKAGES)?;
    packages(&BENCH_PACKAGES)?;
    let has_deny = Command::new("cargo")
        .args(["deny", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_deny {
        cargo(&["install", "cargo-deny", "--locked"])?;
    }
    Ok(())
}

/// Installs the packages whose programs are missing.
pub(crate) fn packages(wanted: &[Package]) -> Result<()> {
    let missing: Vec<&str> = wanted
        .iter()
        .filter(|(program, _)| !Path::new(program).exists())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !rustix::process::getuid().is_root() || !Path::new("/usr/bin/apt-get").exists() {
        bail!("these packages are missing; install them as root: {names} (Debian: apt-get install {names})");
    }
    println!("==> installing {names}");
    run(Command::new("apt-get").args(["-q", "update"]))?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    run(install.args(["-q", "-y", "--no-install-recommends", "install"]).args(missing))
}

/// Fails with a reason if the user is not root.
pub(crate) fn require_root(what: &str) -> Result<()> {
    if rustix::process::getuid().is_root() {
        return Ok(());
    }
    bail!(
        "{what} must run as root: they make network namespaces, and switch to an ordinary user to test as one"
    )
}
