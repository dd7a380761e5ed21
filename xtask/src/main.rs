//! `cargo xtask`: all development tasks.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod arm;
mod bench;
mod e2e;
mod go;
mod image;
mod kube;
mod lanes;
mod manifests;
mod mutations;
mod setup;
mod usage;
mod vectors;
mod windows;
mod wine;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tortie_servers::programs::SKIPPED_FILE;

/// The published verdicts, relative to the workspace. They are not part of the project.
const PUBLISHED: &str = "../shared/vectors/cyclonus-even.jsonl.gz";
/// The verdicts of Calico's own code: the names of the files beside [`PUBLISHED`].
const OF_CALICO: [&str; 3] =
    ["calico-selectors-even.jsonl.gz", "calico-validation-even.jsonl.gz", "calico-verdicts-even.jsonl.gz"];

/// The seed of proptest's random cases, and its value in the gate.
const SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["setup"] => setup::everything(),
        ["test", rest @ ..] => test(rest, Missing::IsListed),
        ["kube", rest @ ..] => kube::run(rest),
        ["e2e", rest @ ..] => e2e::run(rest),
        ["soak"] => soak(),
        ["ci"] => ci(),
        ["image", rest @ ..] => image::build(rest),
        ["arm64"] => arm::run(),
        ["windows", rest @ ..] => windows::run_with(rest),
        ["wine", rest @ ..] => wine::run(rest),
        ["manifests"] => manifests::write(),
        ["mutations", rest @ ..] => mutations::run(rest),
        ["bench", rest @ ..] => bench::run(rest),
        ["vectors", rest @ ..] => vectors::run(rest),
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

/// What becomes of tests whose server (etcd, Kubernetes) is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// They are skipped, and listed at the end.
    IsListed,
    /// They fail.
    Fails,
}

/// Runs every test. Tests create network namespaces, and some switch to an ordinary user, so they need root.
fn test(arguments: &[&str], missing: Missing) -> Result<()> {
    setup::require_root("the tests")?;
    setup::packages(&setup::TEST_PACKAGES)?;
    setup::packages(&setup::BGP_PACKAGES)?;
    // Whoever runs some tests only may not need the servers, whose build takes long.
    if arguments.is_empty()
        && let Err(error) = setup::servers()
    {
        if missing == Missing::Fails {
            return Err(error);
        }
        eprintln!("warning: tests of datastores will be skipped: {error:#}");
    }
    let mut all = vec!["test"];
    // A package replaces the workspace.
    all.extend((!arguments.iter().any(|argument| is_package(argument))).then_some("--workspace"));
    all.extend(arguments);
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(all).env_remove(SKIPPED_FILE);
    if missing == Missing::Fails && std::env::var_os(SEED.0).is_none() {
        // A change fails in the gate for its own faults only. Other runs, and `soak`, look for new cases.
        println!("the random tests of the gate have the same cases each time: {}={}", SEED.0, SEED.1);
        command.env(SEED.0, SEED.1);
    }
    let skipped = tempfile::NamedTempFile::new()?;
    if missing == Missing::IsListed {
        command.env(SKIPPED_FILE, skipped.path());
    }
    // A run of everything reports every failure, not only the first.
    let result = if arguments.is_empty() { lanes::run(prepare(&mut command)?) } else { run(&mut command) };
    let skipped = std::fs::read_to_string(skipped.path())?;
    if !skipped.is_empty() {
        let red = anstyle::AnsiColor::Red.on_default();
        anstream::println!("{red}==> SKIPPED, as servers are missing:\n{}{red:#}", skipped.trim_end());
    }
    result
}

/// Whether this argument of `cargo test` selects a package.
fn is_package(argument: &str) -> bool {
    argument.starts_with("-p") || argument.starts_with("--package")
}

/// Runs the random tests with many more cases.
fn soak() -> Result<()> {
    setup::require_root("the random clusters on the kernel")?;
    step("oracle and programs, a million verdicts", || random("tortie-calc", "differential", 10_000))?;
    step("Windows nodes and oracle, a million verdicts", || random("tortie-windows", "clusters", 10))?;
    step("kernel, programs and oracle, 200,000 flows", || random("tortie-linux", "clusters", 2_000))?;
    step("mixed clusters and oracle, 100,000 frames", || random("tortie-windows", "mixed", 2_200))?;
    step("faults of HNS, 500 clusters for each", || random("tortie-windows", "faults", 500))?;
    step("classes of packets, 3,000 clusters", || random("tortie-calc", "classes", 3_000))?;
    step("previews, 1,500 changes", || random("tortie-calc", "previews", 1_500))?;
    let verdicts = workspace()?.join(PUBLISHED).with_file_name(OF_CALICO[2]);
    if verdicts.exists() {
        let verdicts = verdicts.display().to_string();
        step("Calico's verdicts, by Windows nodes", || vectors::run(&[&verdicts, "--on", "emulator"]))?;
    }
    step("ten million calls of the CNI plugin", || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = ["test", "--release", "--package", "tortie-cni", "--lib", "any_call"];
        run(Command::new(cargo).args(arguments).env("PROPTEST_CASES", "10000000"))
    })?;
    step("ten million damaged calls of the CNI plugin, and messages of its socket", || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = ["test", "--release", "--package", "tortie-cni", "--lib", "no_damage"];
        run(Command::new(cargo).args(arguments).env("PROPTEST_CASES", "10000000"))
    })?;
    step("ten million damaged configurations, as agents read them", || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = ["test", "--release", "--package", "tortie-agent", "--lib", "no_damage"];
        run(Command::new(cargo).args(arguments).env("PROPTEST_CASES", "10000000"))
    })?;
    step("a million operations of address allocators", || random("tortie-ipam", "model", 1_000))?;
    step("10,000 of them on etcd and on Kubernetes, with faults", || {
        setup::servers()?;
        random("tortie-ipam", "servers", 10_000)
    })?;
    step("ten million damaged BGP messages", || {
        one_random("tortie-bgp", "codec", "no_bytes_panic", 10_000_000)
    })?;
    step("5,000 networks of BGP speakers", || one_random("tortie-bgp", "core", "random_networks", 5_000))?;
    step("5,000 changes under traffic, twice", || random("tortie-linux", "transitions", 5_000))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let test = ["test", "--release", "--package", "tortie-linux", "--test", "killed"];
    step("a thousand kills under traffic", || run(Command::new(cargo).args(test).env("TORTIE_KILLS", "1000")))
}

/// Runs a random test with that many cases.
fn random(package: &str, test: &str, cases: u32) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["test", "--release", "--package", package, "--test", test, "--", "--nocapture"];
    run(Command::new(cargo).args(arguments).env("PROPTEST_CASES", cases.to_string()))
}

/// Runs one random test of a binary, whose other tests would take too long with that many cases.
fn one_random(package: &str, test: &str, name: &str, cases: u32) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["test", "--release", "--package", package, "--test", test, name];
    run(Command::new(cargo).args(arguments).env("PROPTEST_CASES", cases.to_string()))
}

fn ci() -> Result<()> {
    setup::everything()?;
    if std::env::var_os("CI").is_some() {
        // Several gigabytes that nothing needs again.
        go::clean_cache()?;
    }
    step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
    step("lints", || cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    step("lints of the packaged program", || {
        cargo(&["clippy", "--package", "tortie-cli", "--no-default-features", "--", "-D", "warnings"])
    })?;
    // The advisory database is not used: it is remote, and its content changes without a change of the project.
    step("licences and sources", || {
        cargo(&["deny", "--log-level", "warn", "check", "licenses", "bans", "sources"])
    })?;
    step("tests", || test(&[], Missing::Fails))?;
    let published = workspace()?.join(PUBLISHED);
    let replayed = published.exists();
    if replayed {
        let published = published.display().to_string();
        step("published verdicts, by the programs", || vectors::run(&[&published, "--on", "program"]))?;
        step("published verdicts, by the oracle", || vectors::run(&[&published, "--on", "oracle"]))?;
        step("published verdicts, by Windows nodes", || vectors::run(&[&published, "--on", "emulator"]))?;
        step("published verdicts, by this kernel", || vectors::run(&[&published, "--on", "kernel"]))?;
        let [selectors, validation, verdicts] =
            OF_CALICO.map(|name| Path::new(&published).with_file_name(name).display().to_string());
        step("Calico's selectors and validation", || vectors::run(&[&selectors, &validation]))?;
        step("objects that Calico accepts, by the API server", || {
            vectors::run(&[&validation, "--on", "server"])
        })?;
        step("Calico's verdicts, by the programs", || vectors::run(&[&verdicts, "--on", "program"]))?;
        step("Calico's verdicts, by the oracle", || vectors::run(&[&verdicts, "--on", "oracle"]))?;
        step("Calico's verdicts, by this kernel", || vectors::run(&[&verdicts, "--on", "kernel"]))?;
    }
    step("the programs for Windows, under Wine", || wine::run(&[]))?;
    step("programs of others for Windows, some of them", || wine::run(&["clients", "--short"]))?;
    println!("{}", closing_line(replayed));
    Ok(())
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

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("==> {name}");
    let start = Instant::now();
    work().with_context(|| name.to_owned())?;
    println!("==> {name}: done in {} s", start.elapsed().as_secs());
    Ok(())
}

/// Runs cargo in the workspace's folder.
fn cargo(arguments: &[&str]) -> Result<()> {
    run(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).args(arguments))
}

fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = prepare(command)?.status().with_context(|| shown.clone())?;
    if !status.success() {
        bail!("{shown} failed: {status}");
    }
    Ok(())
}

/// Gives a command the workspace's folder and environment.
fn prepare(command: &mut Command) -> Result<&mut Command> {
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

/// The workspace's folder.
fn workspace() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("xtask has no parent folder")?.to_owned())
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
