//! The programs that the servers consist of, and what a test does without them.
//!
//! etcd and etcdctl are Debian packages. The Kubernetes components are one binary that `cargo xtask kube build` makes from
//! the Go module in `tests/kube`. Its folder is named after the hash of its sources, so another version is another binary.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::Error;
use crate::error::io;

/// The files that decide what the Kubernetes binary is.
const SOURCES: [&str; 3] = ["go.mod", "go.sum", "main.go"];
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
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 3] = [Self::Etcd, Self::Etcdctl, Self::Kube];

    /// Finds the program.
    ///
    /// # Errors
    ///
    /// It is not installed or not built.
    pub fn find(self) -> Result<PathBuf, Error> {
        let missing = |program: &str, remedy: &str| Error::Missing {
            program: program.to_owned(),
            remedy: remedy.to_owned(),
        };
        match self {
            Self::Etcd => in_path("etcd").ok_or_else(|| {
                missing("etcd", "install it with `cargo xtask setup` (Debian: apt-get install etcd-server)")
            }),
            Self::Etcdctl => in_path("etcdctl").ok_or_else(|| {
                missing(
                    "etcdctl",
                    "install it with `cargo xtask setup` (Debian: apt-get install etcd-client)",
                )
            }),
            Self::Kube => {
                let binary = kube_binary()?;
                let remedy = "build it with `cargo xtask kube build`, which needs Go";
                binary.exists().then_some(binary).ok_or_else(|| missing("the Kubernetes binary", remedy))
            }
        }
    }
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

/// The folder of the Go module.
#[must_use]
pub fn kube_sources() -> PathBuf {
    workspace().join("tests/kube")
}

/// Where the Kubernetes binary is or will be: `target/kube/HASH/kube`.
///
/// # Errors
///
/// The sources cannot be read.
pub fn kube_binary() -> Result<PathBuf, Error> {
    let folder = kube_sources();
    let mut contents = Vec::new();
    for name in SOURCES {
        let path = folder.join(name);
        contents.push(std::fs::read(&path).map_err(io(format!("reading {}", path.display())))?);
    }
    Ok(kube_target().join(digest(&contents)).join("kube"))
}

/// The folder of all Kubernetes binaries.
#[must_use]
pub fn kube_target() -> PathBuf {
    // A relative folder is relative to the workspace, where `cargo xtask` runs cargo.
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    workspace().join(target).join("kube")
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
