//! The programs that the servers consist of, and what a test does without them.
//!
//! etcd and etcdctl are Debian packages. The Kubernetes components are one binary that `cargo xtask kube build` makes from
//! the Go module in `tests/kube`. Its folder is named after the hash of its sources, so another version is another binary.
//! The programs of nodes, and Kubernetes' own suite, are binaries of `tests/e2e`, which `cargo xtask e2e build` makes. They
//! take twice as long to build, and the gate does not need them: that is why they are another module.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::Error;
use crate::error::io;

/// A Go module with programs for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoModule {
    /// Its name: that of its folder in `tests/`, and of the folder in `target/` for its binaries.
    pub name: &'static str,
    /// The task of `cargo xtask` that builds it.
    task: &'static str,
    /// The files that decide what its binaries are.
    sources: &'static [&'static str],
    /// Its binaries: their names, and the packages that they are built from.
    pub binaries: &'static [(&'static str, &'static str)],
    /// Whether they contain C.
    pub cgo: bool,
}

/// The specification's own driver of plugins.
pub const CNI: GoModule = GoModule {
    name: "cni",
    task: "kube build",
    sources: &["go.mod", "go.sum"],
    binaries: &[("cnitool", "github.com/containernetworking/cni/cnitool")],
    cgo: false,
};
/// Helm, which renders charts.
pub const HELM: GoModule = GoModule {
    name: "helm",
    task: "kube build",
    sources: &["go.mod", "go.sum"],
    binaries: &[("helm", "helm.sh/helm/v3/cmd/helm")],
    cgo: false,
};
/// The Kubernetes API and its controllers.
pub const KUBE: GoModule = GoModule {
    name: "kube",
    task: "kube build",
    sources: &["go.mod", "go.sum", "main.go"],
    binaries: &[("kube", ".")],
    cgo: false,
};
/// The programs of nodes, images of pods, Kubernetes' suite of network tests, and the program that runs it in parallel.
pub const E2E: GoModule = GoModule {
    name: "e2e",
    task: "e2e build",
    sources: &[
        "go.mod",
        "go.sum",
        "agnhost/main.go",
        "node/main.go",
        "policy/policy_test.go",
        "sctp/association.go",
        "sctp/go.mod",
        "sctp/packet.go",
        "sctp/sctp.go",
        "sctp/sctp_test.go",
        "suite/suite_test.go",
    ],
    binaries: &[
        ("agnhost", "./agnhost"),
        ("node", "./node"),
        // ginkgo accepts no other ending.
        ("suite.test", "./suite"),
        ("policy.test", "./policy"),
        ("sctp.test", "github.com/ishidawataru/sctp"),
        ("ginkgo", "github.com/onsi/ginkgo/v2/ginkgo"),
    ],
    cgo: false,
};

/// The DNS of clusters. It needs newer versions of the libraries that it shares with Kubernetes.
pub const COREDNS: GoModule = GoModule {
    name: "coredns",
    task: "e2e build",
    sources: &["go.mod", "go.sum", "main.go"],
    binaries: &[("coredns", ".")],
    cgo: false,
};

/// The daemon of flannel. It has a backend in C, which tests do not use.
pub const FLANNEL: GoModule = GoModule {
    name: "flannel",
    task: "e2e flannel",
    sources: &["go.mod", "go.sum"],
    binaries: &[("flanneld", "github.com/flannel-io/flannel")],
    cgo: true,
};

impl GoModule {
    /// The folder of its sources.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        workspace().join("tests").join(self.name)
    }

    /// The folder of all its binaries, of any version.
    #[must_use]
    pub fn target(&self) -> PathBuf {
        // A relative folder is relative to the workspace, where `cargo xtask` runs cargo.
        let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
        workspace().join(target).join(self.name)
    }

    /// Where a binary is or will be: `target/kube/HASH/kube`.
    ///
    /// # Errors
    ///
    /// The sources cannot be read.
    pub fn binary(&self, name: &str) -> Result<PathBuf, Error> {
        let folder = self.folder();
        let mut contents = Vec::new();
        for source in self.sources {
            let path = folder.join(source);
            contents.push(std::fs::read(&path).map_err(io(format!("reading {}", path.display())))?);
        }
        Ok(self.target().join(digest(&contents)).join(name))
    }

    fn find(&self, name: &str) -> Result<PathBuf, Error> {
        let binary = self.binary(name)?;
        let missing = || Error::Missing {
            program: format!("the binary {name} of tests/{}", self.name),
            remedy: format!("build it with `cargo xtask {}`, which needs Go", self.task),
        };
        binary.exists().then_some(binary).ok_or_else(missing)
    }
}

/// A test that misses a program writes a line to this file and succeeds. Without the variable, the test fails.
/// `cargo xtask test` sets it, and prints the file at its end.
pub const SKIPPED_FILE: &str = "TORTIE_SKIPPED_TESTS";

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
            Self::Kube => KUBE.find("kube"),
            Self::Node => E2E.find("node"),
            Self::Agnhost => E2E.find("agnhost"),
            Self::Suite => E2E.find("suite.test"),
            Self::Ginkgo => E2E.find("ginkgo"),
            Self::PolicySuite => E2E.find("policy.test"),
            Self::SctpTests => E2E.find("sctp.test"),
            Self::CoreDns => COREDNS.find("coredns"),
            Self::Flanneld => FLANNEL.find("flanneld"),
            Self::Cnitool => CNI.find("cnitool"),
            Self::Helm => HELM.find("helm"),
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

/// The hash of files, as the name of a folder.
fn digest(files: &[Vec<u8>]) -> String {
    let mut hash = Sha256::new();
    for file in files {
        // The length separates the files from each other.
        hash.update((file.len() as u64).to_be_bytes());
        hash.update(file);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_go_file_decides_what_the_binaries_are() {
        for module in [CNI, HELM, KUBE, E2E, COREDNS, FLANNEL] {
            let mut folders = vec![module.folder()];
            let mut found = 0;
            while let Some(folder) = folders.pop() {
                for entry in std::fs::read_dir(folder).unwrap().flatten() {
                    let path = entry.path();
                    if path.is_dir() {
                        folders.push(path);
                        continue;
                    }
                    if path.extension().is_some_and(|extension| extension == "yaml") {
                        continue;
                    }
                    let relative = path.strip_prefix(module.folder()).unwrap().display().to_string();
                    assert!(module.sources.contains(&relative.as_str()), "{relative} is not in the hash");
                    found += 1;
                }
            }
            assert_eq!(found, module.sources.len());
        }
    }

    #[test]
    fn a_change_of_any_source_is_another_binary() {
        let files = |texts: [&str; 3]| texts.map(|text| text.as_bytes().to_vec()).to_vec();
        let first = digest(&files(["a", "b", "c"]));
        assert_eq!(first.len(), 16);
        assert_eq!(first, digest(&files(["a", "b", "c"])));
        for other in [["a", "b", "d"], ["a", "d", "c"], ["d", "b", "c"], ["ab", "", "c"]] {
            assert_ne!(first, digest(&files(other)), "{other:?}");
        }
    }
}
