//! `tortie connectivity test` on the cluster: it finds nothing wrong, names the policy that breaks something, and leaves nothing.

use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{NODES, finish, kubectl_command, tortie_command};

const NAMESPACE: &str = "tortie-connectivity-test";
/// It comes before the policy of the test, which has order 1000 and allows datagrams.
const DENIED: &str = "apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: no-datagrams}
spec:
  order: 1
  namespaceSelector: kubernetes.io/metadata.name == 'tortie-connectivity-test'
  selector: has(tortie.io/serves)
  types: [Ingress]
  ingress: [{action: Deny, protocol: UDP}]
";
/// What denies datagrams, as a reason says it.
const REASON: &str = "denied by GlobalNetworkPolicy no-datagrams, rule 1";

pub(super) fn run() -> Result<()> {
    println!("==> the test finds nothing wrong");
    // The output is for people.
    finish(&mut tortie_command(&["connectivity", "test"])?)?;
    nothing_is_left()?;
    println!("==> it names the policy that denies datagrams");
    tortie_with_input(&["apply", "-f", "-"], DENIED)?;
    let found = failed_checks();
    finish(&mut tortie_command(&["delete", "globalnetworkpolicy", "no-datagrams"])?)?;
    let found = found?;
    let reasons: Vec<&str> = found.iter().map(|check| check["reason"].as_str().unwrap_or_default()).collect();
    // Each pod sends to the server of its own node and to the other one.
    ensure!(found.len() == NODES.len() * NODES.len(), "{} checks failed: {reasons:?}", found.len());
    ensure!(reasons.iter().all(|reason| reason.contains(REASON)), "other reasons: {reasons:?}");
    nothing_is_left()
}

/// The checks that failed.
fn failed_checks() -> Result<Vec<Value>> {
    let output = tortie_command(&["connectivity", "test", "-o", "json"])?.output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{}, expected 1: {errors}", output.status);
    let document: Value = serde_json::from_slice(&output.stdout).context("the results")?;
    let checks = document["checks"].as_array().context("no checks")?;
    Ok(checks.iter().filter(|check| check["ok"] == false).cloned().collect())
}

fn tortie_with_input(arguments: &[&str], input: &str) -> Result<()> {
    let (reader, mut writer) = std::io::pipe()?;
    let mut child = tortie_command(arguments)?.stdin(reader).spawn()?;
    std::io::Write::write_all(&mut writer, input.as_bytes())?;
    drop(writer);
    ensure!(child.wait()?.success(), "tortie {arguments:?} failed");
    Ok(())
}

fn nothing_is_left() -> Result<()> {
    let mut command: Command =
        kubectl_command(&["get", "namespace", NAMESPACE, "--ignore-not-found", "-o", "name"])?;
    let output = command.output()?;
    if !output.stdout.is_empty() {
        bail!("namespace {NAMESPACE} is left");
    }
    Ok(())
}
