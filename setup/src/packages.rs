//! Debian packages and targets of Rust that tests, checks and benchmarks need. Tortie itself needs none of them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use test_programs::{CNI, HCSSHIM, HELM, KUBE};

use crate::{go, run};

/// A program and its Debian package.
pub type Package = (&'static str, &'static str);

/// For tests: packet captures, an independent reader of the kernel's tables, a tool that adds foreign tables, and CNI
/// plugins to chain.
pub const TEST_PACKAGES: [Package; 4] = [
    ("/usr/bin/tcpdump", "tcpdump"),
    ("/usr/sbin/nft", "nftables"),
    ("/usr/sbin/iptables-nft", "iptables"),
    ("/usr/lib/cni/bandwidth", "containernetworking-plugins"),
];
/// For tests of BGP: the peers. Debian starts BIRD, FRR and ExaBGP as services where systemd runs; nobody here uses these.
pub const BGP_PACKAGES: [Package; 4] = [
    ("/usr/sbin/bird", "bird2"),
    ("/usr/lib/frr/bgpd", "frr"),
    ("/usr/bin/gobgpd", "gobgpd"),
    ("/usr/sbin/exabgp", "exabgp"),
];
/// For tests of datastores. Debian's etcd-server also starts an etcd of its own where systemd runs; nobody here uses it.
pub const SERVER_PACKAGES: [Package; 2] =
    [("/usr/bin/etcd", "etcd-server"), ("/usr/bin/etcdctl", "etcd-client")];
/// For the Kubernetes binary, where Go is not installed in another way.
pub const GO_PACKAGES: [Package; 1] = [("/usr/lib/go/bin/go", "golang-go")];
/// For clusters with real nodes: the container runtime, the plugin that it uses for loopback, and a shell and
/// clients for images.
pub const NODE_PACKAGES: [Package; 10] = [
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
pub const COEXIST_PACKAGES: [Package; 5] = [
    ("/usr/sbin/iptables-legacy", "iptables"),
    ("/usr/sbin/ipset", "ipset"),
    ("/usr/bin/dbus-daemon", "dbus-daemon"),
    ("/usr/sbin/firewalld", "firewalld"),
    ("/usr/sbin/dockerd", "docker.io"),
];
/// For the image: compilers of C for static programs; Rust brings the rest.
pub const IMAGE_PACKAGES: [Package; 3] = [
    ("/usr/bin/musl-gcc", "musl-tools"),
    ("/usr/bin/aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
];
/// For programs of another architecture: an emulator of its processors.
pub const ARM_PACKAGES: [Package; 1] = [("/usr/bin/qemu-aarch64-static", "qemu-user-static")];
/// For Windows programs: the C compiler that links them, and Wine, which runs them.
pub const WINDOWS_PACKAGES: [Package; 2] =
    [("/usr/bin/x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64-win32"), ("/usr/lib/wine/wine64", "wine64")];
/// For Windows programs where Rust's library for Windows cannot be had: Debian's compiler, which builds it.
pub const WINDOWS_LIBRARY_PACKAGES: [Package; 3] = [
    ("/usr/bin/rustc", "rustc-web"),
    ("/usr/bin/cargo", "cargo-web"),
    ("/usr/lib/rustlib/src/rust/library/std", "rust-web-src"),
];
/// For benchmarks: the peers, and a tool that creates network namespaces for them.
pub const BENCH_PACKAGES: [Package; 2] =
    [("/usr/lib/cni/ptp", "containernetworking-plugins"), ("/bin/ip", "iproute2")];

/// All packages but those that only some tasks need.
const ALL: [&[Package]; 8] = [
    &TEST_PACKAGES,
    &BGP_PACKAGES,
    &SERVER_PACKAGES,
    &BENCH_PACKAGES,
    &NODE_PACKAGES,
    &IMAGE_PACKAGES,
    &ARM_PACKAGES,
    &WINDOWS_PACKAGES,
];
/// The packages of tests.
pub const OF_TESTS: [&[Package]; 3] = [&TEST_PACKAGES, &BGP_PACKAGES, &SERVER_PACKAGES];

/// Installs and builds everything.
///
/// # Errors
/// A package cannot be installed, or a Go module cannot be built.
pub fn everything() -> Result<()> {
    announce(&ALL)?;
    install(&ALL.concat())?;
    servers()?;
    go::build(&HCSSHIM)
}

/// Installs and builds what tests need. Without servers, the tests of datastores can be skipped: the second result tells why.
///
/// # Errors
/// A package cannot be installed.
pub fn for_tests() -> Result<Result<()>> {
    announce(&OF_TESTS)?;
    install(&OF_TESTS.concat())?;
    Ok(servers())
}

/// Prints what is about to be installed and built, and how long that takes.
fn announce(wanted: &[&[Package]]) -> Result<()> {
    let packages = missing(&wanted.concat());
    let programs = go::missing(&[CNI, HELM, KUBE])?;
    if packages.is_empty() && programs.is_empty() {
        return Ok(());
    }
    println!("==> this machine lacks what tests need. Times are for two cores:");
    if !packages.is_empty() {
        println!("    one to two minutes: Debian packages are installed: {}", packages.join(" "));
    }
    if !programs.is_empty() {
        println!(
            "    six to twelve minutes: Go programs are built, once for this user, and take 8 GB of Go's caches: {}",
            programs.join(" ")
        );
    }
    Ok(())
}

/// Installs Rust's library for a target, if it is missing.
///
/// # Errors
/// It cannot be installed.
pub fn target(target: &str) -> Result<()> {
    let ask = Command::new("rustc").args(["--print", "target-libdir", "--target", target]).output()?;
    if Path::new(String::from_utf8_lossy(&ask.stdout).trim()).exists() {
        return Ok(());
    }
    run(Command::new("rustup").args(["target", "add", target]))
        .with_context(|| format!("Rust's library for {target} is missing; install it as you installed Rust"))
}

/// Installs and builds the servers that tests of datastores run against.
///
/// # Errors
/// A package cannot be installed, or a Go module cannot be built.
pub fn servers() -> Result<()> {
    install(&SERVER_PACKAGES)?;
    go::build_kube()?;
    Ok(())
}

/// Installs the packages whose programs are missing.
///
/// # Errors
/// The user is not root, or the packages cannot be installed.
pub fn install(wanted: &[Package]) -> Result<()> {
    let missing = missing(wanted);
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !rustix::process::getuid().is_root() || !Path::new("/usr/bin/apt-get").exists() {
        bail!("these packages are missing; install them as root: {names} (Debian: apt-get install {names})");
    }
    println!("==> installing {names}");
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-o", "Acquire::Retries=3"]);
        apt
    };
    run(apt().arg("update"))?;
    run(apt().args(["-y", "--no-install-recommends", "install"]).args(missing))
}

/// The packages whose programs are missing.
fn missing(wanted: &[Package]) -> Vec<&'static str> {
    let missing = wanted.iter().filter(|(program, _)| !Path::new(program).exists());
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Makes sure that the user is root.
///
/// # Errors
/// The user is not root; the error names the reason.
pub fn require_root(what: &str) -> Result<()> {
    if rustix::process::getuid().is_root() {
        return Ok(());
    }
    bail!(
        "{what} must run as root: they make network namespaces, and switch to an ordinary user to test as one"
    )
}
