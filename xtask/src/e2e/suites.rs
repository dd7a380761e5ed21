//! The suites that run on the cluster.

use anyhow::Result;
use tortie_servers::programs::{E2E, Program};

use super::{Folder, finish, kubectl};
use crate::go;

/// How many specs run at a time.
const PROCESSES: &str = "4";
/// The module of the conformance suite of ClusterNetworkPolicy, and its definition of the kind.
const POLICY_API: &str = "sigs.k8s.io/network-policy-api";
const POLICY_DEFINITION: &str =
    "config/crd/experimental/policy.networking.k8s.io_clusternetworkpolicies.yaml";

/// Runs Kubernetes' suite of network tests. Flags of ginkgo begin with `-ginkgo.`, as in the suite's own documentation.
pub(super) fn network(folder: &Folder, arguments: &[&str]) -> Result<()> {
    let running = folder.running()?;
    // The cluster's folder is removed; this one is not.
    let report = E2E.target().join("report.json");
    let mut command = folder.command()?;
    command.arg(Program::Ginkgo.find()?).args(["run", "--no-color", "--timeout=6h"]);
    command.arg(format!("--procs={PROCESSES}"));
    command.arg(format!("--output-dir={}", E2E.target().display()));
    command.arg(format!("--json-report={}", report.file_name().unwrap_or_default().display()));
    let (of_ginkgo, of_suite): (Vec<&str>, Vec<&str>) =
        arguments.iter().partition(|argument| argument.starts_with("-ginkgo."));
    command.args(of_ginkgo.iter().map(|argument| argument.replacen("-ginkgo.", "--", 1)));
    command.arg(Program::Suite.find()?).arg("--").args(["-provider=local", "-num-nodes=2"]);
    command.arg(format!("-kubeconfig={}", running.kubeconfig.display()));
    let result = finish(command.args(of_suite));
    println!("report: {}", report.display());
    result
}

/// Runs the conformance suite of ClusterNetworkPolicy, after it has defined the kind. Arguments go to the test binary.
pub(super) fn cluster_policy(folder: &Folder, arguments: &[&str]) -> Result<()> {
    let running = folder.running()?;
    let definition = go::module_folder(&E2E, POLICY_API)?.join(POLICY_DEFINITION);
    kubectl(&["apply", "--server-side", "--filename", &definition.display().to_string()])?;
    kubectl(&["wait", "crd/clusternetworkpolicies.policy.networking.k8s.io", "--for=condition=Established"])?;
    let mut command = folder.command()?;
    command.arg("env").arg(format!("KUBECONFIG={}", running.kubeconfig.display()));
    finish(command.arg(Program::PolicySuite.find()?).arg("-test.v").args(arguments))
}
