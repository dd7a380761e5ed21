//! The programs that the servers consist of, and what a test does without them.
//!
//! etcd and etcdctl are Debian packages. The Kubernetes components, the programs of nodes and Kubernetes' own suite are binaries of Go
//! modules, which `setup/programs` lists.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use test_programs::{CNI, COREDNS, E2E, FLANNEL, GoModule, HELM, KUBE, SKIPPED_FILE};

use crate::Error;
use crate::error::io;

/// A program that is not part of this repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// The etcd server.
    Etcd,
    /// The etcd client.
    Etcdctl,
    /// The Kubernetes components in one binary.
    Kube,
    /// The container runtime of nodes.
    Containerd,
    /// A shell and its companions without libraries, for images.
    Busybox,
    /// An HTTP client, for images.
    Curl,
    /// An HTTP client that the suites call by its name, for images.
    Wget,
    /// A client of any port, for images.
    Netcat,
    /// kubelet and kube-proxy in one binary.
    Node,
    /// The program of the image that Kubernetes' suites run in pods.
    Agnhost,
    /// Kubernetes' own suite of network tests.
    Suite,
    /// The program that runs the suite in several processes.
    Ginkgo,
    /// The conformance suite of ClusterNetworkPolicy.
    PolicySuite,
    /// The tests of the stand-in for SCTP, which pods of tests use.
    SctpTests,
    /// The DNS of clusters.
    CoreDns,
    /// The daemon of flannel.
    Flanneld,
    /// The driver of CNI plugins.
    Cnitool,
    /// The program that renders charts.
    Helm,
    /// CNI plugins to chain; the path is their folder.
    CniPlugins,
    /// The BGP speaker BIRD.
    Bird,
    /// The client of BIRD.
    Birdc,
    /// The BGP speaker of FRR.
    FrrBgpd,
    /// The BGP speaker GoBGP.
    Gobgpd,
    /// The client of GoBGP.
    Gobgp,
    /// The BGP speaker ExaBGP.
    Exabgp,
}

impl Program {
    /// The programs that tests of datastores need.
    pub const ALL: [Self; 3] = [Self::Etcd, Self::Etcdctl, Self::Kube];

    /// Finds the program.
    ///
    /// # Errors
    ///
    /// It is not installed or not built.
    pub fn find(self) -> Result<PathBuf, Error> {
        match self {
            Self::Etcd => installed("etcd", "etcd-server"),
            Self::Etcdctl => installed("etcdctl", "etcd-client"),
            Self::Containerd => installed("containerd", "containerd"),
            Self::Busybox => installed("busybox", "busybox-static"),
            Self::Curl => installed("curl", "curl"),
            Self::Wget => installed("wget", "wget"),
            Self::Netcat => installed("nc.openbsd", "netcat-openbsd"),
            Self::Kube => built(&KUBE, "kube"),
            Self::Node => built(&E2E, "node"),
            Self::Agnhost => built(&E2E, "agnhost"),
            Self::Suite => built(&E2E, "suite.test"),
            Self::Ginkgo => built(&E2E, "ginkgo"),
            Self::PolicySuite => built(&E2E, "policy.test"),
            Self::SctpTests => built(&E2E, "sctp.test"),
            Self::CoreDns => built(&COREDNS, "coredns"),
            Self::Flanneld => built(&FLANNEL, "flanneld"),
            Self::Cnitool => built(&CNI, "cnitool"),
            Self::Helm => built(&HELM, "helm"),
            Self::Bird => installed("bird", "bird2"),
            Self::Birdc => installed("birdc", "bird2"),
            Self::Gobgpd => installed("gobgpd", "gobgpd"),
            Self::Gobgp => installed("gobgp", "gobgpd"),
            Self::Exabgp => installed("exabgp", "exabgp"),
            Self::FrrBgpd => {
                // Debian keeps FRR's programs out of the path.
                let program = PathBuf::from("/usr/lib/frr/bgpd");
                let missing = || not_installed("FRR's bgpd", "frr");
                program.exists().then_some(program).ok_or_else(missing)
            }
            Self::CniPlugins => {
                let folder = PathBuf::from("/usr/lib/cni");
                let missing =
                    || not_installed("the CNI plugins in /usr/lib/cni", "containernetworking-plugins");
                folder.join("bandwidth").exists().then_some(folder).ok_or_else(missing)
            }
        }
    }
}

/// Finds a binary of a Go module.
fn built(module: &GoModule, name: &str) -> Result<PathBuf, Error> {
    let binary = module.binary(name).map_err(io(format!("looking for {name}")))?;
    let missing = || Error::Missing {
        program: format!("the binary {name} of tests/{}", module.name),
        remedy: format!("build it with `cargo xtask {}`, which needs Go", module.task),
    };
    binary.exists().then_some(binary).ok_or_else(missing)
}

/// Finds the program of a Debian package.
fn installed(program: &str, package: &str) -> Result<PathBuf, Error> {
    in_path(program).ok_or_else(|| not_installed(program, package))
}

fn not_installed(program: &str, package: &str) -> Error {
    let remedy = format!("install it with `cargo xtask setup` (Debian: apt-get install {package})");
    Error::Missing { program: program.to_owned(), remedy }
}

/// Decides whether a test that needs these programs runs. If one is missing and [`SKIPPED_FILE`] is set, the test is
/// recorded there as skipped, and must return.
///
/// # Panics
///
/// A program is missing, and the variable is not set: a test is never skipped silently.
#[must_use]
pub fn can_run(needed: &[Program]) -> bool {
    let Some(problem) = needed.iter().find_map(|program| program.find().err()) else { return true };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let Some(file) = std::env::var_os(SKIPPED_FILE) else { panic!("{test} cannot run: {problem}") };
    let binary = std::env::current_exe().unwrap_or_default();
    let binary = binary.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    // Cargo appends a hash.
    let binary = binary.rsplit_once('-').map_or(binary.as_str(), |(name, _)| name);
    let recorded = std::fs::OpenOptions::new().create(true).append(true).open(&file).and_then(|mut file| {
        // One write, so that lines of concurrent tests do not mix.
        file.write_all(format!("{binary}: {test}: {problem}\n").as_bytes())
    });
    if let Err(error) = recorded {
        panic!("{test} cannot run: {problem}; recording this in {} failed: {error}", file.display());
    }
    false
}

/// The workspace's folder.
pub(crate) fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// Runs a command to its end and returns what it printed to standard output.
pub(crate) fn run(mut command: Command) -> Result<String, Error> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(io(shown.clone()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let output = [text(&output.stdout), text(&output.stderr), output.status.to_string()];
    Err(Error::Command { command: shown, output: output.join("\n").trim().to_owned() })
}
