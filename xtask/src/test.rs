//! `cargo xtask test`: every test of the workspace.

use anyhow::Result;
use setup::command::{cargo_program, prepare};
use setup::{packages, run as run_command};
use test_programs::SKIPPED_FILE;

use crate::binaries::{self, Binary};
use crate::scheduler::{self, Times};

/// Runs every test, or with arguments those of `cargo test` with them. Tests create network namespaces, and some switch to an
/// ordinary user, so they need root.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    packages::require_root("the tests")?;
    if !arguments.is_empty() {
        return some(arguments);
    }
    if let Err(error) = packages::for_tests()? {
        eprintln!("warning: tests of datastores will be skipped: {error:#}");
    }
    let mut times = Times::default();
    let skipped = tempfile::NamedTempFile::new()?;
    let file = skipped.path().display().to_string();
    let binaries = times.step("building the tests", build)?;
    let jobs: Vec<_> =
        binaries.iter().map(|binary| binary.jobs(&[(SKIPPED_FILE, &file)])).collect::<Result<_>>()?;
    let result = scheduler::run(jobs.into_iter().flatten().collect(), &mut times);
    times.print();
    print_skipped(&std::fs::read_to_string(skipped.path())?);
    result
}

/// Builds all programs and tests of the workspace at once, so that libraries are built once, with the same features for all.
fn build() -> Result<Vec<Binary>> {
    let mut cargo = cargo_program();
    binaries::build(prepare(cargo.args(["build", "--workspace", "--bins", "--tests"]))?)
}

/// Runs `cargo test` with these arguments. Who runs some tests only may not need the servers, whose build takes long.
fn some(arguments: &[&str]) -> Result<()> {
    packages::install(&packages::OF_TESTS.concat())?;
    let skipped = tempfile::NamedTempFile::new()?;
    let mut cargo = cargo_program();
    cargo.arg("test").env(SKIPPED_FILE, skipped.path());
    // A package replaces the workspace.
    cargo.args((!arguments.iter().any(|argument| is_package(argument))).then_some("--workspace"));
    let result = run_command(cargo.args(arguments));
    print_skipped(&std::fs::read_to_string(skipped.path())?);
    result
}

/// True if this argument of `cargo test` selects a package.
fn is_package(argument: &str) -> bool {
    argument.starts_with("-p") || argument.starts_with("--package")
}

fn print_skipped(tests: &str) {
    if !tests.is_empty() {
        let red = anstyle::AnsiColor::Red.on_default();
        anstream::println!("{red}==> SKIPPED, as servers are missing:\n{}{red:#}", tests.trim_end());
    }
}
