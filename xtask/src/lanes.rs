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

/// Binaries of which one runs at a time: `lab` compares the mounts of the machine before and after, and `cni` makes some.
const ONE_AT_A_TIME: [&str; 2] = ["tortie-program/lab", "tortie-program/cni"];

/// The time after which a binary is killed.
const DEADLINE: Duration = Duration::from_secs(30 * 60);

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

/// The binaries that wait, and the labels of those that run.
struct Queue {
    waiting: VecDeque<Binary>,
    running: Vec<String>,
}

impl Queue {
    /// The next binary that may run. None is left for this lane if the only ones must not run beside what runs now: that lane takes
    /// them.
    fn next(&mut self) -> Option<Binary> {
        let is_single = |label: &String| ONE_AT_A_TIME.contains(&label.as_str());
        let is_busy = self.running.iter().any(is_single);
        let may_run = |binary: &Binary| !is_busy || !is_single(&label(binary));
        let position = self.waiting.iter().position(may_run)?;
        let binary = self.waiting.remove(position)?;
        self.running.push(label(&binary));
        Some(binary)
    }

    fn ended(&mut self, label: &String) {
        self.running.retain(|running| running != label);
    }
}

/// How a binary ended.
struct Ended {
    binary: Binary,
    result: Result<ExitStatus>,
    took: Duration,
    output: String,
}

/// Builds all test binaries with `cargo test --no-run`, and runs them. Fails if one of them does.
pub(crate) fn run(cargo: &mut Command) -> Result<()> {
    let binaries = built(cargo)?;
    let cargo = &*cargo;
    let number = binaries.len();
    let queue = Mutex::new(Queue { waiting: longest_first(binaries).into(), running: Vec::new() });
    let failed = Mutex::new(Vec::new());
    let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || queue().next();
    let lane = || {
        while let Some(binary) = next() {
            let ended = execute(cargo, binary);
            let label = label(&ended.binary);
            queue().ended(&label);
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            // The lock also keeps outputs apart.
            let shown = print(&ended);
            if !ended.result.is_ok_and(|status| status.success()) {
                failed.push(format!("{label}: {shown}"));
            }
        }
    };
    std::thread::scope(|scope| (0..LANES).for_each(|_| drop(scope.spawn(lane))));
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

/// Runs a binary in its folder, with the environment of the command `cargo`.
fn execute(cargo: &Command, binary: Binary) -> Ended {
    let start = Instant::now();
    let (mut output, mut text) = (None, String::new());
    let result = tempfile::NamedTempFile::new().map_err(Into::into).and_then(|file| {
        println!("==> tests of {} begin; their output is in {}", label(&binary), file.path().display());
        wait(&mut command(cargo, &binary), output.insert(file).as_file())
    });
    if let Some(output) = output {
        let read = fs::read(output.path());
        text =
            read.map_or_else(|error| error.to_string(), |text| String::from_utf8_lossy(&text).into_owned());
    }
    Ended { binary, result, took: start.elapsed(), output: text }
}

fn command(cargo: &Command, binary: &Binary) -> Command {
    let mut command = Command::new(&binary.file);
    command.current_dir(&binary.folder).stdin(Stdio::null());
    for (name, value) in cargo.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // `cargo` lacks the variable, because it would be that of this program.
    command.env("CARGO_MANIFEST_DIR", &binary.folder);
    command
}

/// Waits for the end of a program, and kills it after the deadline.
fn wait(command: &mut Command, output: &fs::File) -> Result<ExitStatus> {
    let mut child = command.stdout(output.try_clone()?).stderr(output.try_clone()?).spawn()?;
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if start.elapsed() >= DEADLINE {
            child.kill()?;
            child.wait()?;
            bail!("killed, because it ran for {} minutes", DEADLINE.as_secs() / 60);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Prints the output, and returns how the binary ended.
fn print(ended: &Ended) -> String {
    let how = match &ended.result {
        Ok(status) => status.to_string(),
        Err(error) => format!("{error:#}"),
    };
    println!("==> tests of {}, {} s: {how}", label(&ended.binary), ended.took.as_secs());
    println!("{}", ended.output.trim_end());
    how
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
    fn binaries_that_disturb_each_other_do_not_run_side_by_side() {
        let all = vec![of("tortie-program", "lab"), of("tortie-program", "cni"), of("a", "x")];
        let mut queue = Queue { waiting: all.into(), running: Vec::new() };
        let next = |queue: &mut Queue| queue.next().map(|binary| label(&binary));
        assert_eq!(next(&mut queue).as_deref(), Some("tortie-program/lab"));
        assert_eq!(next(&mut queue).as_deref(), Some("a/x"));
        assert_eq!(next(&mut queue), None);
        queue.ended(&"tortie-program/lab".to_owned());
        assert_eq!(next(&mut queue).as_deref(), Some("tortie-program/cni"));
        assert_eq!(next(&mut queue), None);
    }

    #[test]
    fn binaries_run_in_their_folder_and_a_failure_is_reported() {
        let cargo = &mut Command::new("cargo");
        cargo.env("OF_CARGO", "yes").env_remove("CARGO_MANIFEST_DIR");
        let run = |file: &str| execute(cargo, Binary { file: file.into(), ..of("a", "x") });
        let ended = run("/usr/bin/env");
        assert!(ended.result.unwrap().success());
        let has = |line: &str| ended.output.lines().any(|found| found == line);
        assert!(has("OF_CARGO=yes") && has("CARGO_MANIFEST_DIR=/"), "{}", ended.output);
        assert!(!run("/usr/bin/false").result.unwrap().success());
        assert!(run("/nothing").result.is_err());
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
