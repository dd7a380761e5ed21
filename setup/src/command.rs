//! Commands in the workspace's folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

/// The body of `main` of the programs in `judges/`: gives them their arguments, and prints the error.
#[expect(clippy::print_stderr, reason = "for the terminal of whoever builds")]
pub fn main(run: impl FnOnce(&[&str]) -> Result<()>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's folder.
///
/// # Errors
/// This crate is not in a folder of the workspace.
pub fn workspace() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("the crate has no parent folder")?.to_owned())
}

/// The folder into which cargo builds.
///
/// # Errors
/// See [`workspace`].
pub fn target_folder() -> Result<PathBuf> {
    // A relative folder is relative to the workspace, where cargo runs.
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    Ok(workspace()?.join(target))
}

/// Cargo, by the path that it gives to the programs that it starts.
#[must_use]
pub fn cargo_program() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs cargo in the workspace's folder.
///
/// # Errors
/// It fails.
pub fn cargo(arguments: &[&str]) -> Result<()> {
    run(cargo_program().args(arguments))
}

/// Builds a program of the workspace without optimization, and returns its path. All of the workspace decides about the features of
/// libraries, as when tests are built, so that nothing is built twice.
///
/// # Errors
/// Cargo fails.
pub fn program(name: &str) -> Result<PathBuf> {
    cargo(&["build", "--quiet", "--workspace", "--bin", name])?;
    Ok(target_folder()?.join("debug").join(name))
}

/// The environment in which cargo lints the workspace's own crates while it builds them. `cargo clippy` would compile all libraries a
/// second time. Warnings are errors. Clippy's driver is a compiler that reads its arguments from a variable, as `cargo clippy` gives
/// them (clippy, `src/main.rs`).
///
/// # Errors
/// The compiler does not say where it is installed, or clippy is not installed there.
pub fn linting() -> Result<[(&'static str, OsString); 2]> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().context("rustc")?;
    let driver = Path::new(String::from_utf8(output.stdout)?.trim()).join("bin/clippy-driver");
    ensure!(driver.exists(), "clippy is not installed: rustup component add clippy");
    let arguments = ["-Dwarnings", ""].join("__CLIPPY_HACKERY__");
    Ok([("RUSTC_WORKSPACE_WRAPPER", driver.into()), ("CLIPPY_ARGS", arguments.into())])
}

/// Runs a command in the workspace's folder, or in its own.
///
/// # Errors
/// It fails.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = prepare(command)?.status().with_context(|| shown.clone())?;
    if !status.success() {
        bail!("{shown} failed: {status}");
    }
    Ok(())
}

/// Gives a command the workspace's folder and environment.
///
/// # Errors
/// See [`workspace`].
pub fn prepare(command: &mut Command) -> Result<&mut Command> {
    if command.get_current_dir().is_none() {
        command.current_dir(workspace()?);
    }
    // Cargo has set these for this program. Build scripts that look at them would build everything anew.
    let is_own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_own)) {
        command.env_remove(name);
    }
    Ok(command)
}

/// Does the work, and prints its name and its time.
///
/// # Errors
/// The work's, with its name.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("==> {name}");
    let start = Instant::now();
    let result = work().with_context(|| name.to_owned())?;
    println!("==> {name}: done in {} s", start.elapsed().as_secs());
    Ok(result)
}
