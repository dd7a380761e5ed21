//! The suites that run on the cluster.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tortie_servers::programs::{E2E, Program};

use super::{Folder, connections, finish, kubectl, not_applicable, tortie_command};
use setup::go;

/// How many specs run at a time.
const PROCESSES: &str = "4";
/// The module of the conformance suite of ClusterNetworkPolicy, and its definition of the kind.
const POLICY_API: &str = "sigs.k8s.io/network-policy-api";
const POLICY_DEFINITION: &str =
    "config/crd/experimental/policy.networking.k8s.io_clusternetworkpolicies.yaml";
/// A policy of that kind, which selects no pod, and an object that concerns each node.
const OF_A_NEW_KIND: &str = "apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: until-agents-know-the-kind}
spec:
  tier: Admin
  priority: 999
  subject: {namespaces: {matchLabels: {kubernetes.io/metadata.name: nothing-has-this-name}}}
  ingress: [{action: Pass, from: [{namespaces: {}}]}]
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkSet
metadata: {name: until-agents-know-the-kind}
spec: {nets: [192.0.2.0/24]}
";
/// The option of the suite that also runs its experimental tests.
const EXPERIMENTAL: &str = "-all-features";

/// What became of the specs of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// Those that began, and skipped themselves.
    pub(super) skipped: usize,
}

impl Counts {
    /// The counts, if specs ran and none failed or skipped itself.
    pub(super) fn demand_success(&self) -> Result<String> {
        let Self { passed, failed, skipped } = self;
        let counts = format!("{passed} passed, {failed} failed, {skipped} skipped themselves");
        ensure!(*passed > 0 && *failed == 0, "{counts}");
        Ok(counts)
    }
}

/// Runs Kubernetes' suite of network tests, without what is not applicable. Flags of ginkgo begin with `-ginkgo.`, as in the
/// suite's own documentation.
pub(super) fn network(folder: &Folder, arguments: &[&str]) -> Result<()> {
    let running = folder.running()?;
    not_applicable::print();
    let report = report();
    let mut command = folder.command()?;
    command.arg(Program::Ginkgo.find()?).args(["run", "--no-color", "--timeout=6h"]);
    command.arg(format!("--procs={PROCESSES}"));
    command.arg(format!("--output-dir={}", E2E.target().display()));
    command.arg(format!("--json-report={}", report.file_name().unwrap_or_default().display()));
    command.args(not_applicable::patterns().map(|pattern| format!("--skip={pattern}")));
    let (of_ginkgo, of_suite): (Vec<&str>, Vec<&str>) =
        arguments.iter().partition(|argument| argument.starts_with("-ginkgo."));
    command.args(of_ginkgo.iter().map(|argument| argument.replacen("-ginkgo.", "--", 1)));
    command.arg(Program::Suite.find()?).arg("--").args(["-provider=local", "-num-nodes=2"]);
    command.arg(format!("-kubeconfig={}", running.kubeconfig.display()));
    // What an earlier run has left says nothing about this one.
    let _ = std::fs::remove_file(&report);
    let result = finish(command.args(of_suite));
    println!("report: {}", report.display());
    result?;
    counts_of_network()?.demand_success().map(|counts| println!("{counts}"))
}

/// The report of the last run. The cluster's folder is removed; this file is not.
fn report() -> PathBuf {
    E2E.target().join("report.json")
}

/// What the last run of Kubernetes' suite reported.
pub(super) fn counts_of_network() -> Result<Counts> {
    let report = report();
    let text = std::fs::read_to_string(&report).with_context(|| report.display().to_string())?;
    Ok(counts_of_report(&serde_json::from_str(&text)?))
}

/// The counts of a report of ginkgo.
fn counts_of_report(report: &Value) -> Counts {
    let mut counts = Counts::default();
    let suites = report.as_array().into_iter().flatten();
    for spec in suites.flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten()) {
        // Specs that were not selected are skipped, too, but without a message.
        let has_message = !spec["Failure"].is_null();
        match (spec["LeafNodeType"].as_str(), spec["State"].as_str()) {
            (Some("It"), Some("passed")) => counts.passed += 1,
            (Some("It"), Some("skipped")) if has_message => counts.skipped += 1,
            (Some("It"), Some("skipped" | "pending")) | (_, Some("passed" | "skipped" | "pending")) => {}
            // Other nodes fail for all specs.
            _ => counts.failed += 1,
        }
    }
    counts
}

/// Runs the conformance suite of ClusterNetworkPolicy, after it has defined the kind. Arguments go to the test binary.
pub(super) fn cluster_policy(folder: &Folder, arguments: &[&str]) -> Result<Counts> {
    let running = folder.running()?;
    let definition = go::module_folder(&E2E, POLICY_API)?.join(POLICY_DEFINITION);
    kubectl(&["apply", "--server-side", "--filename", &definition.display().to_string()])?;
    kubectl(&["wait", "crd/clusternetworkpolicies.policy.networking.k8s.io", "--for=condition=Established"])?;
    wait_for_agents()?;
    let mut command = folder.command()?;
    command.arg("env").arg(format!("KUBECONFIG={}", running.kubeconfig.display()));
    command.arg(Program::PolicySuite.find()?).args(["-test.v", EXPERIMENTAL]).args(arguments);
    let mut child =
        command.stdout(Stdio::piped()).spawn().context("starting the suite of ClusterNetworkPolicy")?;
    let mut counts = Counts::default();
    for line in BufReader::new(child.stdout.take().context("the suite has no output")?).lines() {
        let line = line?;
        println!("{line}");
        count(&line, &mut counts);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("the suite of ClusterNetworkPolicy: {status}: {counts:?}");
    }
    Ok(counts)
}

/// Waits until each agent reads the kind, for which agents look every 30 seconds. The suite waits ten seconds for a verdict.
fn wait_for_agents() -> Result<()> {
    connections::with_file(OF_A_NEW_KIND, |file| {
        // The set of addresses concerns all nodes, of which the command asks each.
        finish(&mut tortie_command(&["apply", "--wait", "--filename", file])?)?;
        finish(&mut tortie_command(&["delete", "--filename", file])?)
    })
}

/// Counts a line of `go test`. A test of the suite is the first level below the function; its steps are below it.
fn count(line: &str, counts: &mut Counts) {
    match line.strip_prefix("    --- ").and_then(|rest| rest.split_once(": ")) {
        Some(("PASS", _)) => counts.passed += 1,
        Some(("FAIL", _)) => counts.failed += 1,
        Some(("SKIP", _)) => counts.skipped += 1,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_of_ginkgo_is_counted() {
        let spec = |kind: &str, state: &str, failure: Value| json!({"LeafNodeType": kind, "State": state, "Failure": failure});
        let report = |specs: Vec<Value>| counts_of_report(&json!([{"SpecReports": specs}]));
        let well = vec![
            spec("It", "passed", Value::Null),
            spec("It", "passed", Value::Null),
            spec("It", "skipped", Value::Null),
            spec("It", "skipped", Value::Null),
            spec("It", "skipped", json!({"Message": "no IPv6"})),
            spec("SynchronizedBeforeSuite", "passed", Value::Null),
        ];
        let counts = report(well.clone());
        assert_eq!(counts, Counts { passed: 2, failed: 0, skipped: 1 });
        assert_eq!(counts.demand_success().unwrap(), "2 passed, 0 failed, 1 skipped themselves");
        for (kind, state) in [
            ("It", "failed"),
            ("It", "panicked"),
            ("It", "timedout"),
            ("It", "interrupted"),
            ("AfterSuite", "failed"),
        ] {
            let counts = report([well.clone(), vec![spec(kind, state, json!({}))]].concat());
            assert_eq!(counts.failed, 1, "{kind} {state}");
            assert!(counts.demand_success().is_err());
        }
        assert!(report(Vec::new()).demand_success().is_err(), "nothing ran");
    }

    #[test]
    fn tests_of_go_are_counted_without_their_steps() {
        let mut counts = Counts::default();
        for line in [
            "=== RUN   TestConformance/A",
            "--- FAIL: TestConformance (1.00s)",
            "    --- PASS: TestConformance/A (1.00s)",
            "        --- PASS: TestConformance/A/step (1.00s)",
            "    --- FAIL: TestConformance/B (1.00s)",
            "    --- SKIP: TestConformance/C (1.00s)",
        ] {
            count(line, &mut counts);
        }
        assert_eq!(counts, Counts { passed: 1, failed: 1, skipped: 1 });
    }
}
