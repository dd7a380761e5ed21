//! Some manifests of `examples/` in a lab: real connections have the expected verdicts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::examples_support::{Example, examples};
use crate::support::{Lab, User, leftovers};
use rustix::process::Signal;

/// Some of those that a lab can run, from every folder and with every kind of policy.
const CHOSEN: [&str; 19] = [
    "administrators/01-admin-deny",
    "administrators/03-baseline",
    "boutique/01-deployments",
    "boutique/02-pods",
    "calico/06-tiers-and-pass",
    "calico/07-tier-that-passes",
    "calico/08-end-of-a-tier-denies",
    "calico/14-service-accounts",
    "calico/18-selector-language",
    "calico/20-services-in-rules",
    "calico/21-staged",
    "kubernetes/02-default-deny-egress",
    "kubernetes/09-namespace-and-pods",
    "kubernetes/14-named-ports",
    "kubernetes/18-both-ends",
    "workloads/01-deployments",
    "workloads/05-mixed-systems",
    "workloads/06-stars",
    "workloads/07-advanced-policy",
];
/// How long to wait until the Services' slices are in force.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The workload of each pod that has one, as the expectations name them.
fn workloads(lab: &Lab) -> BTreeMap<String, String> {
    let pods = lab.json(&["get", "pods", "-o", "json"]);
    let workload = |pod: &serde_json::Value| {
        let metadata = &pod["metadata"];
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let (namespace, name) = (text(&metadata["namespace"])?, text(&metadata["name"])?);
        let mut owner = text(&metadata["ownerReferences"][0]["name"])?;
        if let Some(version) = text(&metadata["labels"]["pod-template-hash"]) {
            owner = owner.trim_end_matches(&format!("-{version}")).to_owned();
        }
        Some((format!("{namespace}/{name}"), format!("{namespace}/{owner}")))
    };
    pods["items"].as_array().unwrap().iter().filter_map(workload).collect()
}

/// The expectations that connections do not meet; ports that no pod serves are not tested.
fn unmet(lab: &Lab, example: &Example) -> Vec<String> {
    let step = lab.json(&["lab", "matrix", "-o", "json"]);
    let connections = step["connections"].as_array().unwrap();
    let workloads = workloads(lab);
    let named = |value: &serde_json::Value| {
        let name = value.as_str().unwrap().to_owned();
        workloads.get(&name).cloned().unwrap_or(name)
    };
    let (mut unmet, mut met) = (Vec::new(), 0);
    for expected in &example.expected {
        let is_it = |each: &&serde_json::Value| {
            named(&each["from"]) == expected.from
                && named(&each["to"]) == expected.to
                && each["port"] == expected.port.as_str()
        };
        for found in connections.iter().filter(is_it) {
            match (found["verdict"].as_str().unwrap(), expected.allowed) {
                ("reached" | "refused", true) | ("cut", false) => met += 1,
                (verdict, _) => unmet.push(format!(
                    "{}: {} -> {} {}: {verdict}",
                    example.name, found["from"], found["to"], expected.port
                )),
            }
        }
    }
    assert!(met + unmet.len() > 1, "{}: the lab tries next to nothing of it", example.name);
    unmet
}

#[test]
fn examples_meet_their_expectations_in_a_lab() {
    let all = examples();
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    for name in CHOSEN {
        let example = all.iter().find(|example| example.name == name).unwrap();
        assert!(example.in_lab, "{name} says that a lab cannot run it");
        let manifest = std::fs::read_to_string(&example.file).unwrap();
        let file = lab.file("example.yml", &manifest);
        lab.ok(&["apply", "--wait", "-f", &file]);
        lab.wait_for_pods();
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let unmet = unmet(&lab, example);
            if unmet.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{}", unmet.join("\n"));
        }
        lab.ok(&["delete", "-f", &file]);
    }
    running.signal(Signal::INT);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}
