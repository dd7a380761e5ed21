//! The test binaries of the workspace: cargo builds them, and their tests become jobs of the scheduler.
//!
//! A job is a process that runs all tests of a binary, or of one module of an integration test binary, whose modules have their own
//! servers and their own needs. A process per test would start each server once for each test.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use setup::command::prepare;
use test_programs::SKIPPED_FILE;

use crate::scheduler::Job;

/// The name of the one binary of integration tests that a crate has, besides exceptions.
const INTEGRATION: &str = "integration";

/// Binaries with a `main` of their own, which has no list of tests.
const WITHOUT_HARNESS: [&str; 2] = ["tortie-linux/enter", "tortie-linux/killed"];

/// A test binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Binary {
    /// Its package.
    package: String,
    /// Its name.
    name: String,
    /// True for tests of a program, false for those of a library or of its interface.
    is_program: bool,
    file: PathBuf,
    /// The folder of its package, in which it runs.
    folder: PathBuf,
}

impl Binary {
    /// The package and the name.
    fn label(&self) -> String {
        format!("{}/{}", self.package, self.name)
    }

    /// The arguments with which `cargo test` runs it, for a person who repeats a failure.
    fn arguments(&self) -> String {
        let Self { package, name, is_program, .. } = self;
        let crate_name = package.replace('-', "_");
        match *name == crate_name {
            true if !is_program => format!("-p {package} --lib"),
            _ if *is_program => format!("-p {package} --bin {name}"),
            _ => format!("-p {package} --test {name}"),
        }
    }

    fn command(&self, environment: &[(&str, &str)]) -> Result<Command> {
        let mut command = Command::new(&self.file);
        // Without this variable, a missing server is a failure.
        prepare(command.current_dir(&self.folder).env_remove(SKIPPED_FILE))?
            .envs(environment.iter().copied());
        // As cargo sets it. The one of this program is another.
        command.env("CARGO_MANIFEST_DIR", &self.folder);
        Ok(command)
    }

    /// The names of its tests that are not ignored.
    fn tests(&self) -> Result<Vec<String>> {
        let list = |more: &[&str]| -> Result<Vec<String>> {
            let output = self.command(&[])?.args(["--list", "--format", "terse"]).args(more).output()?;
            let text = String::from_utf8(output.stdout)?;
            ensure!(output.status.success(), "{} lists no tests: {}", self.label(), output.status);
            Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
        };
        let ignored = list(&["--ignored"])?;
        Ok(list(&[])?.into_iter().filter(|test| !ignored.contains(test)).collect())
    }

    /// The jobs that run its tests, and the environment of those.
    pub(crate) fn jobs(&self, environment: &[(&str, &str)]) -> Result<Vec<Job>> {
        let shown: String = environment.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let repeat = format!("{shown}cargo test {}", self.arguments());
        if WITHOUT_HARNESS.contains(&self.label().as_str()) {
            return Ok(vec![Job::new(self.label(), self.command(environment)?).repeated_by(repeat)]);
        }
        let parts = parts(self.tests()?, self.name == INTEGRATION);
        let jobs = parts.into_iter().map(|(module, tests)| {
            let label = if module.is_empty() { self.label() } else { format!("{}/{module}", self.label()) };
            let mut command = self.command(environment)?;
            // The times of tests are an unstable feature of the harness.
            command.args(["-Z", "unstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1");
            if !module.is_empty() {
                command.arg("--exact").args(&tests);
            }
            Ok(Job::new(label, command).repeated_by(format!("{repeat} -- NAME")).expecting(tests.len()))
        });
        jobs.collect()
    }
}

/// The tests of each module, if the binary is divided. The module of what is not divided has no name.
fn parts(tests: Vec<String>, is_divided: bool) -> BTreeMap<String, Vec<String>> {
    let mut parts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in tests {
        let module = test.split_once("::").map_or("", |(module, _)| module);
        let part = if is_divided { module.to_owned() } else { String::new() };
        parts.entry(part).or_default().push(test);
    }
    parts
}

/// Builds all programs and test binaries with this command of cargo, and returns the test binaries.
pub(crate) fn build(cargo: &mut Command) -> Result<Vec<Binary>> {
    cargo.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
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
    let kind = &message["target"]["kind"][0];
    // Benchmarks are built like tests.
    let is_test =
        message["reason"] == "compiler-artifact" && message["profile"]["test"] == true && *kind != "bench";
    let (true, Some(file)) = (is_test, message["executable"].as_str()) else { return Ok(None) };
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a message of cargo lacks a name");
    let manifest = PathBuf::from(text(&message["manifest_path"])?);
    let folder = manifest.parent().unwrap_or(Path::new("/")).to_owned();
    let package = fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    let package = package.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let package = package.with_context(|| format!("{}: no name", manifest.display()))?.to_owned();
    let is_program = *kind == "bin";
    Ok(Some(Binary {
        package,
        name: text(&message["target"]["name"])?,
        is_program,
        file: file.into(),
        folder,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_cargo_name_test_binaries() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let message = |reason: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason": "{reason}", "manifest_path": "{manifest}", "target": {{"name": "tidy", "kind": ["test"]}},
                "profile": {{"test": {test}}}, "executable": {executable}}}"#
            )
        };
        let found = binary(&message("compiler-artifact", true, "\"/t/tidy-1\"")).unwrap().unwrap();
        assert_eq!((found.label(), &found.file), ("xtask/tidy".to_owned(), &"/t/tidy-1".into()));
        assert_eq!(found.folder, Path::new(env!("CARGO_MANIFEST_DIR")));
        assert_eq!(found.arguments(), "-p xtask --test tidy");
        for (reason, test, executable) in [
            ("compiler-artifact", false, "\"/t/x\""),
            ("compiler-artifact", true, "null"),
            ("build-finished", true, "\"/t/x\""),
        ] {
            assert_eq!(binary(&message(reason, test, executable)).unwrap(), None);
        }
        let benchmark = message("compiler-artifact", true, "\"/t/x\"").replace("[\"test\"]", "[\"bench\"]");
        assert_eq!(binary(&benchmark).unwrap(), None);
        assert!(binary("warning: no JSON").is_err());
    }

    #[test]
    fn only_integration_tests_are_divided_and_no_test_is_lost() {
        let tests = || ["a::x", "b::y", "a::c::z"].map(str::to_owned).to_vec();
        let divided = parts(tests(), true);
        assert_eq!(divided.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(divided["a"], ["a::x", "a::c::z"]);
        assert_eq!(parts(tests(), false), BTreeMap::from([(String::new(), tests())]));
    }

    #[test]
    fn a_failure_is_repeated_by_the_arguments_of_its_target() {
        let of = |package: &str, name: &str, is_program| Binary {
            package: package.into(),
            name: name.into(),
            is_program,
            file: "f".into(),
            folder: "/".into(),
        };
        assert_eq!(of("tortie-api", "tortie_api", false).arguments(), "-p tortie-api --lib");
        assert_eq!(of("tortie-api", "integration", false).arguments(), "-p tortie-api --test integration");
        assert_eq!(of("xtask", "xtask", true).arguments(), "-p xtask --bin xtask");
    }
}
