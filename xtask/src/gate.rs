//! `cargo xtask ci`: what must hold before a change lands.

use std::process::Command;

use anyhow::Result;
use setup::command::{cargo_program, linting, prepare};
use setup::{cargo, go, packages, target_folder, workspace};

use crate::binaries::Binary;
use crate::scheduler::{self, Job, Times};
use crate::{binaries, licences};

/// The published verdicts, relative to the workspace. They are not part of the project.
const PUBLISHED: &str = "../shared/vectors/cyclonus-even.jsonl.gz";
/// The verdicts of Calico's own code.
pub(crate) const OF_CALICO: [&str; 4] = [
    "../shared/vectors/calico-selectors-even.jsonl.gz",
    "../shared/vectors/calico-validation-even.jsonl.gz",
    "../shared/vectors/calico-verdicts-even.jsonl.gz",
    "../shared/vectors/calicoctl-stored-even.jsonl.gz",
];

/// The seed of proptest's random cases in the gate: a change fails there for its own faults only. Other runs look for new cases.
const SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

/// The job that builds and checks the programs for Windows.
const WINDOWS: &str = "the programs for Windows";

/// Runs everything.
pub(crate) fn run() -> Result<()> {
    let mut times = Times::default();
    let result = all(&mut times);
    times.print();
    let replayed = result?;
    if std::env::var_os("CI").is_some() {
        // Several gigabytes that nothing needs again. A failed gate keeps them for the next one.
        go::clean_cache()?;
    }
    println!("{}", closing_line(replayed));
    Ok(())
}

/// Runs everything, and returns whether the published verdicts were there.
fn all(times: &mut Times) -> Result<bool> {
    times.step("setup", packages::everything)?;
    times.step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
    times.step("licences and sources", licences::check)?;
    let binaries = times.step("building programs and tests, with lints", build)?;
    println!("the random tests of the gate have the same cases each time: {}={}", SEED.0, SEED.1);
    let mut jobs = vec![windows()?];
    for binary in &binaries {
        jobs.extend(binary.jobs(&[SEED])?);
    }
    jobs.extend(wine()?);
    let replayed = workspace()?.join(PUBLISHED).exists();
    if replayed {
        jobs.extend(verdicts()?);
    }
    scheduler::run(jobs, times)?;
    Ok(replayed)
}

/// Builds everything once, with lints. Benchmarks are built for those only.
fn build() -> Result<Vec<Binary>> {
    let mut cargo = cargo_program();
    cargo.args(["build", "--workspace", "--all-targets"]).envs(linting()?);
    binaries::build(prepare(&mut cargo)?)
}

fn windows() -> Result<Job> {
    // The build of the workspace has replaced this program's file.
    Ok(Job::new(WINDOWS, built("xtask", &["windows"])?))
}

/// Programs for Windows under Wine.
fn wine() -> Result<Vec<Job>> {
    let job =
        |name: &str, arguments: &[&str]| Ok(Job::new(name, built("judge-wine", arguments)?).after(WINDOWS));
    [
        job("the programs for Windows, under Wine", &[]),
        job("programs of others for Windows, some of them", &["clients", "--short"]),
    ]
    .into_iter()
    .collect()
}

/// The verdicts of others, by each judge.
fn verdicts() -> Result<Vec<Job>> {
    let [selectors, validation, verdicts, stored] = OF_CALICO;
    let job = |name: &str, arguments: &[&str]| Ok(Job::new(name, built("judge-vectors", arguments)?));
    [
        job("published verdicts, by the programs", &[PUBLISHED, "--on", "program"]),
        job("published verdicts, by the oracle", &[PUBLISHED, "--on", "oracle"]),
        job("published verdicts, by Windows nodes", &[PUBLISHED, "--on", "emulator"]),
        job("published verdicts, by this kernel", &[PUBLISHED, "--on", "kernel"]),
        job("Calico's selectors, validation and stored form", &[selectors, validation, stored]),
        job("Calico's stored form, by etcd", &[stored, "--on", "etcd"]),
        job("objects that Calico accepts, by the API server", &[validation, "--on", "server"]),
        job("Calico's verdicts, by the programs", &[verdicts, "--on", "program"]),
        job("Calico's verdicts, by the oracle", &[verdicts, "--on", "oracle"]),
        job("Calico's verdicts, by this kernel", &[verdicts, "--on", "kernel"]),
    ]
    .into_iter()
    .collect()
}

/// A program of the workspace, which is built already.
fn built(name: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(target_folder()?.join("debug").join(name));
    // With the same environment as the build, what the program builds exists already.
    prepare(command.args(arguments))?.envs(linting()?);
    Ok(command)
}

/// The last line of a passed gate. It names skipped parts, so that nobody mistakes a part for the whole.
fn closing_line(replayed: bool) -> String {
    if replayed {
        "==> everything holds".to_owned()
    } else {
        format!(
            "==> everything holds that was asked; NOT asked: the published verdicts, as {PUBLISHED} is not there"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_reports_skipped_steps() {
        assert!(!closing_line(true).contains("NOT"));
        assert!(closing_line(false).contains(PUBLISHED));
    }
}
