//! Objects, and whether a real API server with the definitions of deploy/crds takes those that Calico accepts.
//!
//! The definitions need not reject what Calico rejects: most of its rules are beyond a schema.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tortie_servers::{KubeApi, KubeOptions};

use super::Tally;
use setup::{go, packages};

const GROUP: &str = "crd.projectcalico.org";
/// Derived from Namespaces and ServiceAccounts, so there is no definition.
const DERIVED: &str = "Profile";

/// Returns the number of objects that Calico accepts and the API server rejects.
pub(super) fn replay(file: &str, lines: &[Value]) -> Result<usize> {
    let begun = Instant::now();
    packages::install(&packages::SERVER_PACKAGES)?;
    go::build_kube()?;
    let kube = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() })?;

    let mut tally = Tally::default();
    let mut items = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let kind =
            line["object"]["kind"].as_str().with_context(|| format!("{file}:{}: no kind", number + 1))?;
        if line["accepted"] != true {
            tally.leave_out("that Calico rejects", 1);
        } else if kind == DERIVED || super::validation::NOT_KEPT.contains(&kind) {
            tally.leave_out("of kinds without a definition", 1);
        } else {
            items.push((number, as_stored(&line["object"], number)));
        }
    }
    tally.cases = items.len();
    let taken = taken(&kube, items.iter().map(|(_, object)| object.clone()).collect())?;
    for (number, object) in items {
        if taken.contains(&name(number)) {
            continue;
        }
        match exception(&object) {
            Some(exception) => tally.except(exception),
            None => tally.differences.push(format!("{}: rejected: {object}", number + 1)),
        }
    }
    tally.close(file, &"the API server", begun)
}

/// The object as Calico keeps it in the Kubernetes API, under a name of its own.
fn as_stored(object: &Value, number: usize) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/v1"),
        "kind": object["kind"],
        "metadata": {"name": name(number), "namespace": "default"},
        "spec": object["spec"],
    })
}

fn name(number: usize) -> String {
    format!("object-{number}")
}

/// The names of the objects that the API server would create.
fn taken(kube: &KubeApi, items: Vec<Value>) -> Result<BTreeSet<String>> {
    let list = tempfile::Builder::new().suffix(".json").tempfile()?;
    std::fs::write(list.path(), json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    let path = list.path().display().to_string();
    let output = match kube.kubectl(&["create", "--dry-run=server", "-f", &path]) {
        Ok(output) => output,
        // One rejected object is enough for this.
        Err(tortie_servers::Error::Command { output, .. }) => output,
        Err(error) => return Err(error.into()),
    };
    let created = output.lines().filter_map(|line| line.strip_suffix(" created (server dry run)"));
    Ok(created.filter_map(|line| Some(line.split_once('/')?.1.to_owned())).collect())
}

/// Why Tortie's definition rejects what Calico's code accepts, if that is intended.
fn exception(object: &Value) -> Option<&'static str> {
    if lacks_key_or_operator(&object["spec"]) {
        return Some("an expression without key or operator, which Calico's definition rejects, too");
    }
    for (field, end) in [("vxlanVNI", 1 << 24), ("vxlanPort", 1 << 16)] {
        if object["spec"][field].as_i64().is_some_and(|number| !(1..end).contains(&number)) {
            return Some("an identifier or a port that no VXLAN packet can have");
        }
    }
    (object["spec"]["ipipMode"] == "").then_some("an empty mode, which Calico's definition rejects, too")
}

/// Whether an expression of a label selector in this value is incomplete.
fn lacks_key_or_operator(value: &Value) -> bool {
    let expressions = value["matchExpressions"].as_array().into_iter().flatten();
    let mut incomplete = expressions.filter(|each| each["key"].is_null() || each["operator"].is_null());
    incomplete.next().is_some()
        || match value {
            Value::Object(fields) => fields.values().any(lacks_key_or_operator),
            Value::Array(items) => items.iter().any(lacks_key_or_operator),
            _ => false,
        }
}
