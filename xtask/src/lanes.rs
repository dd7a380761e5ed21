//! Runs the test binaries of the workspace side by side. `cargo test` runs one after the other, and many of them mostly wait.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// How many test binaries run at once. Each runs as many tests at once as there are processors.
const LANES: usize = 2;

/// The binaries that take longest. They begin first, so that none of them is left alone at the end.
const LONGEST: [&str; 8] = [
    "tortie-windows/dataplane",
    "lab",
    "services",
    "controllers",
    "cni",
    "dataplane",
    "previews",
    "differential",
];

/// A test binary.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Binary {
    /// Its package.
    package: String,
    /// Its name.
    name: String,
    file: PathBuf,
    /// The folder of its package, in which it runs.
    folder: PathBuf,
}

/// How a binary ended.
struct Ended {
    binary: Binary,
    status: ExitStatus,
    took: Duration,
    output: String,
}

/// Builds all test binaries with `cargo test --no-run`, and runs them in the environment of `cargo`. Fails if one of them does.
pub(crate) fn run(cargo: &mut Command) -> Result<()> {
    let binaries = built(cargo)?;
    let cargo = &*cargo;
    let number = binaries.len();
    let waiting = Mutex::new(VecDeque::from(longest_first(binaries)));
    let failed = Mutex::new(Vec::new());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane = || -> Result<()> {
        while let Some(binary) = next() {
            let ended = execute(cargo, binary)?;
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            // The lock also keeps outputs apart.
            print(&ended);
            if !ended.status.success() {
                failed.push(format!("{}: {}", label(&ended.binary), ended.status));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes
            .into_iter()
            .try_for_each(|lane| lane.join().map_err(|_| anyhow::anyhow!("a lane of tests panicked"))?)
    })?;
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(failed.is_empty(), "{} of {number} test binaries failed:\n{}", failed.len(), failed.join("\n"));
    println!("==> {number} test binaries passed");
    Ok(())
}

/// Builds the binaries, and reads cargo's messages about them.
fn built(cargo: &mut Command) -> Result<Vec<Binary>> {
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]).stderr(Stdio::inherit());
    let output = cargo.output().context("building the tests")?;
    if !output.status.success() {
        bail!("building the tests failed: {}", output.status);
    }
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let binaries = messages.lines().map(binary).collect::<Result<Vec<_>>>()?;
    let binaries: Vec<Binary> = binaries.into_iter().flatten().collect();
    ensure!(!binaries.is_empty(), "cargo built no tests");
    Ok(binaries)
}

/// The test binary that a message is about (`cargo build --message-format`, `compiler-artifact`).
fn binary(message: &str) -> Result<Option<Binary>> {
    let message: Value = serde_json::from_str(message).with_context(|| message.to_owned())?;
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let (true, Some(file)) = (is_test, message["executable"].as_str()) else { return Ok(None) };
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a message of cargo lacks a name");
    let manifest = PathBuf::from(text(&message["manifest_path"])?);
    let folder = manifest.parent().unwrap_or(Path::new("/")).to_owned();
    let package = fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    let package = package.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let package = package.with_context(|| format!("{}: no name", manifest.display()))?.to_owned();
    Ok(Some(Binary { package, name: text(&message["target"]["name"])?, file: file.into(), folder }))
}

fn longest_first(mut binaries: Vec<Binary>) -> Vec<Binary> {
    let rank = |binary: &Binary| {
        let is = |long: &&str| *long == binary.name || *long == label(binary);
        LONGEST.iter().position(is).unwrap_or(LONGEST.len())
    };
    binaries.sort_by_key(rank);
    binaries
}

/// The package and the name.
fn label(binary: &Binary) -> String {
    format!("{}/{}", binary.package, binary.name)
}

/// Runs a binary with cargo's environment.
fn execute(cargo: &Command, binary: Binary) -> Result<Ended> {
    let output = tempfile::NamedTempFile::new()?;
    let mut command = Command::new(&binary.file);
    command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder).stdin(Stdio::null());
    for (name, value) in cargo.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdout(output.as_file().try_clone()?).stderr(output.as_file().try_clone()?);
    let start = Instant::now();
    let status = command.status().with_context(|| binary.file.display().to_string())?;
    let took = start.elapsed();
    let output = String::from_utf8_lossy(&fs::read(output.path())?).into_owned();
    Ok(Ended { binary, status, took, output })
}

fn print(ended: &Ended) {
    println!("==> tests of {}, {} s: {}", label(&ended.binary), ended.took.as_secs(), ended.status);
    println!("{}", ended.output.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(package: &str, name: &str) -> Binary {
        Binary { package: package.into(), name: name.into(), file: "f".into(), folder: "/".into() }
    }

    #[test]
    fn the_longest_binaries_begin_first_and_the_others_keep_their_order() {
        let all = vec![
            of("a", "x"),
            of("tortie-linux", "dataplane"),
            of("b", "w"),
            of("tortie-windows", "dataplane"),
        ];
        let sorted: Vec<String> = longest_first(all).iter().map(label).collect();
        assert_eq!(sorted, ["tortie-windows/dataplane", "tortie-linux/dataplane", "a/x", "b/w"]);
    }

    #[test]
    fn messages_of_cargo_name_test_binaries() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let message = |reason: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason": "{reason}", "manifest_path": "{manifest}", "target": {{"name": "tidy"}}, "profile": {{"test": {test}}},
                "executable": {executable}}}"#
            )
        };
        let found = binary(&message("compiler-artifact", true, "\"/t/tidy-1\"")).unwrap().unwrap();
        assert_eq!((label(&found), found.file), ("xtask/tidy".to_owned(), "/t/tidy-1".into()));
        assert_eq!(found.folder, Path::new(env!("CARGO_MANIFEST_DIR")));
        for (reason, test, executable) in [
            ("compiler-artifact", false, "\"/t/x\""),
            ("compiler-artifact", true, "null"),
            ("build-finished", true, "\"/t/x\""),
        ] {
            assert_eq!(binary(&message(reason, test, executable)).unwrap(), None);
        }
        assert!(binary("warning: no JSON").is_err());
    }
}
