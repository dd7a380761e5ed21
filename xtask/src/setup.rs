//! The requirements of tests, checks and benchmarks. Tortie itself needs none of them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cargo, go, run};

/// A program and its Debian package.
type Package = (&'static str, &'static str);

/// For tests: packet captures, an independent reader of the kernel's tables, a tool that adds foreign tables, and CNI
/// plugins to chain.
pub(crate) const TEST_PACKAGES: [Package; 4] = [
    ("/usr/bin/tcpdump", "tcpdump"),
    ("/usr/sbin/nft", "nftables"),
    ("/usr/sbin/iptables-nft", "iptables"),
    ("/usr/lib/cni/bandwidth", "containernetworking-plugins"),
];
/// For tests of BGP: the peers. Debian starts BIRD, FRR and ExaBGP as services where systemd runs; nobody here uses these.
pub(crate) const BGP_PACKAGES: [Package; 4] = [
    ("/usr/sbin/bird", "bird2"),
    ("/usr/lib/frr/bgpd", "frr"),
    ("/usr/bin/gobgpd", "gobgpd"),
    ("/usr/sbin/exabgp", "exabgp"),
];
/// For tests of datastores. Debian's etcd-server also starts an etcd of its own where systemd runs; nobody here uses it.
pub(crate) const SERVER_PACKAGES: [Package; 2] =
    [("/usr/bin/etcd", "etcd-server"), ("/usr/bin/etcdctl", "etcd-client")];
/// For the Kubernetes binary, where Go is not installed in another way.
pub(crate) const GO_PACKAGES: [Package; 1] = [("/usr/lib/go/bin/go", "golang-go")];
/// For clusters with real nodes: the container runtime, the plugin that it uses for loopback, and a shell and
/// clients for images.
pub(crate) const NODE_PACKAGES: [Package; 10] = [
    ("/usr/bin/containerd", "containerd"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/loopback", "containernetworking-plugins"),
    ("/bin/busybox", "busybox-static"),
    ("/usr/bin/curl", "curl"),
    ("/usr/bin/wget", "wget"),
    ("/bin/nc.openbsd", "netcat-openbsd"),
    ("/usr/sbin/nft", "nftables"),
    ("/bin/ip", "iproute2"),
    ("/usr/bin/nsenter", "util-linux"),
];
/// For clusters with real nodes: programs that change the kernel's tables of a node. Debian starts firewalld and Docker as services
/// where systemd runs; nobody here uses these.
pub(crate) const COEXIST_PACKAGES: [Package; 5] = [
    ("/usr/sbin/iptables-legacy", "iptables"),
    ("/usr/sbin/ipset", "ipset"),
    ("/usr/bin/dbus-daemon", "dbus-daemon"),
    ("/usr/sbin/firewalld", "firewalld"),
    ("/usr/sbin/dockerd", "docker.io"),
];
/// For the image: compilers of C for static programs; Rust brings the rest.
pub(crate) const IMAGE_PACKAGES: [Package; 3] = [
    ("/usr/bin/musl-gcc", "musl-tools"),
    ("/usr/bin/aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
];
/// For programs of another architecture: an emulator of its processors.
pub(crate) const ARM_PACKAGES: [Package; 1] = [("/usr/bin/qemu-aarch64-static", "qemu-user-static")];
/// For Windows programs: the C compiler that links them, and Wine, which runs them.
pub(crate) const WINDOWS_PACKAGES: [Package; 2] =
    [("/usr/bin/x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64-win32"), ("/usr/lib/wine/wine64", "wine64")];
/// For Windows programs where Rust's library for Windows cannot be had: Debian's compiler, which builds it.
pub(crate) const WINDOWS_LIBRARY_PACKAGES: [Package; 3] = [
    ("/usr/bin/rustc", "rustc-web"),
    ("/usr/bin/cargo", "cargo-web"),
    ("/usr/lib/rustlib/src/rust/library/std", "rust-web-src"),
];
/// For benchmarks: the peers, and a tool that creates network namespaces for them.
pub(crate) const BENCH_PACKAGES: [Package; 2] =
    [("/usr/lib/cni/ptp", "containernetworking-plugins"), ("/bin/ip", "iproute2")];

/// Installs everything.
pub(crate) fn everything() -> Result<()> {
    packages(&TEST_PACKAGES)?;
    packages(&BGP_PACKAGES)?;
    packages(&BENCH_PACKAGES)?;
    packages(&NODE_PACKAGES)?;
    packages(&IMAGE_PACKAGES)?;
    packages(&ARM_PACKAGES)?;
    packages(&WINDOWS_PACKAGES)?;
    servers()?;
    let has_deny = Command::new("cargo")
        .args(["deny", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_deny {
        // It runs for two seconds. Optimized, it takes minutes more to build.
        cargo(&["install", "cargo-deny", "--locked", "--debug"])?;
    }
    Ok(())
}

/// Installs Rust's library for a target, if it is missing.
pub(crate) fn target(target: &str) -> Result<()> {
    let ask = Command::new("rustc").args(["--print", "target-libdir", "--target", target]).output()?;
    if Path::new(String::from_utf8_lossy(&ask.stdout).trim()).exists() {
        return Ok(());
    }
    run(Command::new("rustup").args(["target", "add", target]))
        .with_context(|| format!("Rust's library for {target} is missing; install it as you installed Rust"))
}

/// Installs and builds the servers that tests of datastores run against.
pub(crate) fn servers() -> Result<()> {
    packages(&SERVER_PACKAGES)?;
    go::build_kube()?;
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
