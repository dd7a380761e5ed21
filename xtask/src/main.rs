//! `cargo xtask`: all development tasks.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod arm;
mod binaries;
mod gate;
mod licences;
mod mutations;
mod scheduler;
mod soak;
mod test;
mod usage;

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};
use setup::command::cargo_program;
use setup::{go, image, packages, program, run, windows};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["setup"] => packages::everything(),
        ["test", rest @ ..] => test::run(rest),
        ["ci"] => gate::run(),
        ["soak", rest @ ..] => soak::run(rest),
        ["mutations", rest @ ..] => mutations::run(rest),
        ["kube", "build"] => go::build_kube().map(|binary| println!("{}", binary.display())),
        ["kube", ..] => judge("judge-e2e", &words),
        ["e2e", ..] => judge("judge-e2e", &words),
        ["image", rest @ ..] => image::build(rest),
        ["arm64"] => arm::run(),
        ["windows", rest @ ..] => windows::run_with(rest),
        ["wine", rest @ ..] => judge("judge-wine", rest),
        ["manifests"] => manifests(),
        ["bench", rest @ ..] => judge("judge-bench", rest),
        ["vectors", rest @ ..] => judge("judge-vectors", rest),
        _ => {
            eprintln!("{}", usage::USAGE);
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Builds and runs a program of `judges/`. Its messages tell what failed.
fn judge(name: &str, arguments: &[&str]) -> Result<()> {
    let status = Command::new(program(name)?).args(arguments).status()?;
    if !status.success() {
        bail!("{name} {}: {status}", arguments.join(" "));
    }
    Ok(())
}

/// Writes the generated files in `deploy/`, by the test that compares them.
fn manifests() -> Result<()> {
    let test = ["test", "--quiet", "--package", "tortie-deploy", "--lib", "generated_files"];
    run(cargo_program().args(test).env("UPDATE_MANIFESTS", "1"))
}
