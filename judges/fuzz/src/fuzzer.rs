//! Builds libFuzzer's program, and runs it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use judge_fuzz::Target;
use setup::command::{cargo_program, prepare};
use setup::{run, step, target_folder, workspace};

use crate::summary::{Summary, words};

/// What cargo-fuzz gives to the compiler, too: each branch counts how often it was taken, and comparisons tell libFuzzer their operands.
/// These options are not tied to a nightly toolchain.
const INSTRUMENTATION: [&str; 8] = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "-Ccodegen-units=1",
];
/// An input that takes longer is a failure, in seconds.
const TIMEOUT: u64 = 10;
/// The stack of tokio's threads, in which most parsers run, in KiB.
const STACK: u64 = 2048;
/// The lines of libFuzzer's output that are shown of a failure.
const SHOWN: usize = 25;

/// The built program.
pub(crate) struct Fuzzer {
    program: PathBuf,
    /// Everything that is not part of the repository.
    folder: PathBuf,
}

/// What a search has found.
pub(crate) struct Outcome {
    pub(crate) target: &'static str,
    pub(crate) summary: Summary,
    pub(crate) seconds: u64,
    /// The failure, with the command that repeats it.
    pub(crate) failure: Option<String>,
}

impl Fuzzer {
    /// Builds the program, in a folder of its own: the other builds are not instrumented.
    pub(crate) fn build() -> Result<Self> {
        let (folder, host) = (target_folder()?.join("fuzz"), host()?);
        step("building the parsers with instrumentation", || {
            let (own, fuzz) = (workspace()?.join("Cargo.lock"), workspace()?.join("fuzz"));
            // The versions are those of the tests; cargo adds libFuzzer.
            fs::copy(own, fuzz.join("Cargo.lock"))?;
            let mut cargo = cargo_program();
            cargo.args(["build", "--release", "--target", &host]).current_dir(fuzz);
            // With a target, flags do not apply to build scripts and macros.
            run(cargo.env("CARGO_TARGET_DIR", &folder).env("RUSTFLAGS", INSTRUMENTATION.join(" ")))
        })?;
        Ok(Self { program: folder.join(host).join("release/fuzz"), folder })
    }

    /// The inputs that the repository has for a target.
    pub(crate) fn committed(target: &Target) -> Result<PathBuf> {
        Ok(workspace()?.join("judges/fuzz/corpus").join(target.name))
    }

    /// The inputs that searches on this machine have found for a target.
    pub(crate) fn found(&self, target: &Target) -> Result<PathBuf> {
        self.made("found", target.name)
    }

    /// A folder below that of the fuzzer.
    pub(crate) fn made(&self, purpose: &str, name: &str) -> Result<PathBuf> {
        let folder = self.folder.join(purpose).join(name);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    }

    /// Runs libFuzzer's program for a target, with the stack that its parser has in the product. Variables of the environment that
    /// change a panic's output are left as they are.
    pub(crate) fn command(&self, target: &Target) -> Result<Command> {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("ulimit -s {STACK} && exec \"$0\" \"$@\"")).arg(&self.program);
        command.env("TORTIE_FUZZ_TARGET", target.name);
        command.args([
            format!("-timeout={TIMEOUT}"),
            format!("-max_len={}", target.largest_input),
            "-rss_limit_mb=4096".to_owned(),
        ]);
        prepare(&mut command)?;
        Ok(command)
    }

    /// Searches for an input that fails.
    pub(crate) fn search(
        &self,
        target: &'static Target,
        seconds: u64,
        cases: Option<u64>,
        seed: u32,
    ) -> Result<Outcome> {
        println!("==> {}, {seconds} s", target.name);
        let failures = self.made("failures", target.name)?;
        let dictionary = self.dictionary(target)?;
        let mut command = self.command(target)?;
        command.args([
            format!("-max_total_time={seconds}"),
            format!("-runs={}", cases.map_or("-1".to_owned(), |cases| cases.to_string())),
            format!("-seed={seed}"),
            format!("-artifact_prefix={}/", failures.display()),
            "-print_final_stats=1".to_owned(),
        ]);
        command.args(dictionary.map(|file| format!("-dict={}", file.display())));
        command.arg(self.found(target)?).arg(Self::committed(target)?);
        let log = self.folder.join("logs").join(format!("{}.log", target.name));
        let start = Instant::now();
        let (success, text) = logged(&mut command, &log)?;
        let summary = Summary::of(&text);
        let seconds = start.elapsed().as_secs();
        println!("==> {}: {} cases, {} edges", target.name, summary.cases, summary.edges);
        let failure = (!success).then(|| failure(target, &text, &log));
        if let Some(failure) = &failure {
            println!("{failure}");
        }
        Ok(Outcome { target: target.name, summary, seconds, failure })
    }

    /// Runs one input.
    pub(crate) fn repeat(&self, target: &Target, input: &Path) -> Result<()> {
        ensure!(input.exists(), "{} does not exist", input.display());
        run(self.command(target)?.arg(input))
    }

    /// The words of the committed inputs, which libFuzzer puts into others. It refuses a file without any.
    fn dictionary(&self, target: &Target) -> Result<Option<PathBuf>> {
        let mut all = BTreeSet::new();
        for entry in fs::read_dir(Self::committed(target)?)? {
            all.extend(words(&fs::read(entry?.path())?));
        }
        let lines: Vec<String> = all.iter().map(|word| format!("\"{word}\"\n")).collect();
        let file = self.made("dictionaries", "")?.join(target.name);
        fs::write(&file, lines.concat())?;
        Ok((!lines.is_empty()).then_some(file))
    }
}

/// Runs the command, and returns whether it succeeds, and what it prints.
fn logged(command: &mut Command, log: &Path) -> Result<(bool, String)> {
    fs::create_dir_all(log.parent().context("no folder")?)?;
    let file = File::create(log).with_context(|| log.display().to_string())?;
    let status = command.stdout(file.try_clone()?).stderr(file).status().context("sh")?;
    // Panics may print bytes of the input.
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    Ok((status.success(), text))
}

/// What has failed, and how to repeat it.
fn failure(target: &Target, text: &str, log: &Path) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let shown = lines[lines.len().saturating_sub(SHOWN)..].join("\n");
    let written = "Test unit written to ";
    let input = lines.iter().find_map(|line| line.split_once(written).map(|(_, input)| input));
    let repeat = match input {
        Some(input) => format!("repeat it: cargo xtask soak fuzz {} --input {input}", target.name),
        None => "libFuzzer has left no input".to_owned(),
    };
    format!("{}: FAILED\n{shown}\nall of it: {}\n{repeat}", target.name, log.display())
}

/// The name of the target that the compiler runs on.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("rustc")?;
    let text = String::from_utf8(output.stdout)?;
    let Some(host) = text.lines().find_map(|line| line.strip_prefix("host: ")) else {
        bail!("rustc -vV names no host");
    };
    Ok(host.to_owned())
}
