//! `cargo xtask soak`: what takes too long for every change.

use anyhow::{Result, bail};
use setup::command::cargo_program;
use setup::{advisories, packages, step, workspace};

use crate::gate::OF_CALICO;
use crate::judge;

/// Runs the random tests with many more cases, or one of the steps: `advisories`, `attack`, `chaos` or `fuzz`, with its options.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        [] => everything(),
        ["advisories"] => advisories::check(),
        ["attack", options @ ..] => judge("judge-attack", options),
        ["chaos", options @ ..] => judge("judge-chaos", options),
        ["fuzz", options @ ..] => judge("judge-fuzz", options),
        other => bail!("soak {}: the steps that run alone are advisories, attack, chaos and fuzz", other.join(" ")),
    }
}

fn everything() -> Result<()> {
    packages::require_root("the random clusters on the kernel")?;
    step("advisories about libraries", advisories::check)?;
    step("oracle and programs, a million verdicts", || random("tortie-calc", "differential", 10_000))?;
    step("Windows nodes and oracle, a million verdicts", || random("tortie-windows", "clusters", 10))?;
    step("kernel, programs and oracle, 200,000 flows", || random("tortie-linux", "clusters", 2_000))?;
    step("mixed clusters and oracle, 100,000 frames", || random("tortie-windows", "mixed", 2_200))?;
    step("faults of HNS, 500 clusters for each, and 500 days", || random("tortie-windows", "faults", 500))?;
    step("classes of packets, 3,000 clusters", || random("tortie-calc", "classes", 3_000))?;
    step("previews, 1,500 changes", || random("tortie-calc", "previews", 1_500))?;
    let verdicts = workspace()?.join(OF_CALICO[2]);
    if verdicts.exists() {
        let judged = || judge("judge-vectors", &[&verdicts.display().to_string(), "--on", "emulator"]);
        step("Calico's verdicts, by Windows nodes", judged)?;
    }
    for (name, package, test) in [
        ("ten million calls of the CNI plugin", "tortie-cni", "any_call"),
        ("ten million damaged calls of it, and messages of its socket", "tortie-cni", "no_damage"),
        ("ten million damaged configurations, as agents read them", "tortie-agent", "no_damage"),
    ] {
        let arguments = ["test", "--release", "--package", package, "--lib", test];
        step(name, || setup::run(cargo_program().args(arguments).env("PROPTEST_CASES", "10000000")))?;
    }
    step("a million operations of address allocators", || random("tortie-ipam", "model", 1_000))?;
    step("10,000 of them on etcd and on Kubernetes, with faults", || {
        packages::servers()?;
        random("tortie-ipam", "servers", 10_000)
    })?;
    step("ten million damaged BGP messages", || one_random("tortie-bgp", "no_bytes_panic", 10_000_000))?;
    step("5,000 networks of BGP speakers", || one_random("tortie-bgp", "random_networks", 5_000))?;
    step("5,000 changes under traffic, twice", || random("tortie-linux", "transitions", 5_000))?;
    step("attacks", || judge("judge-attack", &[]))?;
    step("60 s of fuzzing for each parser", || judge("judge-fuzz", &[]))?;
    let test = ["test", "--release", "--package", "tortie-linux", "--test", "killed"];
    step("a thousand kills under traffic", || {
        setup::run(cargo_program().args(test).env("TORTIE_KILLS", "1000"))
    })?;
    step("an hour of faults in a lab of ten nodes", || judge("judge-chaos", &[]))
}

/// Runs the random tests of a module with that many cases.
fn random(package: &str, module: &str, cases: u32) -> Result<()> {
    let module = &format!("{module}::");
    let arguments =
        ["test", "--release", "--package", package, "--test", "integration", module, "--", "--nocapture"];
    setup::run(cargo_program().args(arguments).env("PROPTEST_CASES", cases.to_string()))
}

/// Runs one random test of a module, whose other tests would take too long with that many cases.
fn one_random(package: &str, name: &str, cases: u32) -> Result<()> {
    let arguments = ["test", "--release", "--package", package, "--test", "integration", name];
    setup::run(cargo_program().args(arguments).env("PROPTEST_CASES", cases.to_string()))
}
