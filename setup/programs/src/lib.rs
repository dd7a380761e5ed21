//! The programs that the project builds for its tests: the Go modules in `tests/`, and the programs for Windows. Their names, and the
//! places where they are built and found.
//!
//! The folder of a Go binary is named after the hash of its sources, so another version is another binary. `setup` builds them, and
//! keeps them in the user's cache for other clones. The programs of nodes are another module than the Kubernetes API, because they take
//! twice as long to build, and the gate does not need them.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// The variable with the name of a file. A test that misses a program writes a line there and succeeds; without the variable, it fails.
/// `cargo xtask test` sets it, and prints the file at its end.
pub const SKIPPED_FILE: &str = "TORTIE_SKIPPED_TESTS";

/// A Go module with programs for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoModule {
    /// Its name: that of its folder in `tests/`, and of the folder in `target/` for its binaries.
    pub name: &'static str,
    /// The task of `cargo xtask` that builds it.
    pub task: &'static str,
    /// The files that decide what its binaries are.
    sources: &'static [&'static str],
    /// Its binaries: their names, and the packages that they are built from.
    pub binaries: &'static [(&'static str, &'static str)],
    /// True if they contain C.
    pub cgo: bool,
    /// The system that they run on.
    pub system: System,
    /// Build tags, with commas between them.
    pub tags: &'static str,
}

/// A system of programs, by Go's name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// This machine's.
    Linux,
    /// Windows, which Wine stands in for.
    Windows,
}

/// The specification's own driver of plugins.
pub const CNI: GoModule = GoModule {
    name: "cni",
    task: "kube build",
    sources: &["go.mod", "go.sum"],
    binaries: &[("cnitool", "github.com/containernetworking/cni/cnitool")],
    cgo: false,
    system: System::Linux,
    tags: "",
};
/// Helm, which renders charts.
pub const HELM: GoModule = GoModule {
    name: "helm",
    task: "kube build",
    sources: &["go.mod", "go.sum"],
    binaries: &[("helm", "helm.sh/helm/v3/cmd/helm")],
    cgo: false,
    system: System::Linux,
    tags: "",
};
/// The Kubernetes API and its controllers.
pub const KUBE: GoModule = GoModule {
    name: "kube",
    task: "kube build",
    sources: &["go.mod", "go.sum", "main.go"],
    binaries: &[("kube", ".")],
    cgo: false,
    system: System::Linux,
    tags: "",
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
    system: System::Linux,
    tags: "",
};

/// The DNS of clusters. It needs newer versions of the libraries that it shares with Kubernetes.
pub const COREDNS: GoModule = GoModule {
    name: "coredns",
    task: "e2e build",
    sources: &["go.mod", "go.sum", "main.go"],
    binaries: &[("coredns", ".")],
    cgo: false,
    system: System::Linux,
    tags: "",
};

/// The daemon of flannel. It has a backend in C, which tests do not use.
pub const FLANNEL: GoModule = GoModule {
    name: "flannel",
    task: "e2e flannel",
    sources: &["go.mod", "go.sum"],
    binaries: &[("flanneld", "github.com/flannel-io/flannel")],
    cgo: true,
    system: System::Linux,
    tags: "",
};

/// The tests of hcsshim, and a program for the functions that it does not use. Both call an emulated HNS under Wine.
pub const HCSSHIM: GoModule = GoModule {
    name: "hcsshim",
    task: "setup",
    sources: &["functions/main.go", "go.mod", "go.sum", "hcn.go"],
    binaries: &[("hcn.test.exe", "github.com/Microsoft/hcsshim/hcn"), ("functions.exe", "./functions")],
    cgo: false,
    system: System::Windows,
    tags: "integration",
};

/// The libraries that Wine lacks, or whose place an emulated HNS takes.
pub const WINDOWS_LIBRARIES: [&str; 3] = ["computenetwork.dll", "vmcompute.dll", "bcryptprimitives.dll"];
/// The programs for Windows.
pub const WINDOWS_PROGRAMS: [&str; 2] = ["tortie.exe", "tortie-cni.exe"];

/// The folder of what `cargo xtask windows` has built.
#[must_use]
pub fn windows_folder() -> PathBuf {
    target_folder().join("wine")
}

impl GoModule {
    /// The folder of its sources.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        workspace().join("tests").join(self.name)
    }

    /// The folder of all its binaries, of any version.
    #[must_use]
    pub fn target(&self) -> PathBuf {
        target_folder().join(self.name)
    }

    /// The path at which tests find a binary: `target/kube/HASH/kube`.
    ///
    /// # Errors
    /// The sources cannot be read.
    pub fn binary(&self, name: &str) -> io::Result<PathBuf> {
        Ok(self.target().join(self.digest()?).join(name))
    }

    /// The path at which the user's other clones find it, too: `~/.cache/tortie/programs/kube/HASH/kube`. None if the user has no
    /// home.
    ///
    /// # Errors
    /// The sources cannot be read.
    pub fn cached(&self, name: &str) -> io::Result<Option<PathBuf>> {
        let digest = self.digest()?;
        Ok(cache().map(|cache| cache.join("programs").join(self.name).join(digest).join(name)))
    }

    /// The hash of its sources.
    fn digest(&self) -> io::Result<String> {
        let folder = self.folder();
        let mut contents = Vec::new();
        for source in self.sources {
            let path = folder.join(source);
            let read = std::fs::read(&path);
            contents.push(read.map_err(|error| {
                io::Error::new(error.kind(), format!("reading {}: {error}", path.display()))
            })?);
        }
        Ok(digest(&contents))
    }
}

/// The folder of this project in the user's cache.
#[must_use]
pub fn cache() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("tortie"))
}

/// The folder into which cargo builds.
fn target_folder() -> PathBuf {
    // A relative folder is relative to the workspace, where `cargo xtask` runs cargo.
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    workspace().join(target)
}

/// The workspace's folder.
fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_go_file_decides_what_the_binaries_are() {
        for module in [CNI, HELM, KUBE, E2E, COREDNS, FLANNEL, HCSSHIM] {
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
