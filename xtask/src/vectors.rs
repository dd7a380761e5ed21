//! Replays files of published verdicts: one JSON object a line is a cluster with its policies, and what becomes of each
//! pair of pods, protocol and port (`rows`: from, to, `TCP/80`, ingress, egress, combined).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::net::{Direction, Protocol};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::EndpointId;
use tortie_policy::oracle::{self, Peer, Question, Snapshot, Verdict};
use tortie_policy::program::{Flow, evaluate};

/// How many differences are printed.
const SHOWN: usize = 20;
const NODE: &str = "node";

type Objects = Vec<(Key, Value)>;
/// Of each pod, by `namespace/name`.
type Addresses = BTreeMap<String, IpAddr>;

/// Who judges.
#[derive(Debug, Clone, Copy)]
enum On {
    /// The programs that calc compiles, evaluated in memory.
    Program,
    /// The evaluator that reads the resources themselves.
    Oracle,
}

/// What came of a file.
#[derive(Default)]
struct Tally {
    cells: usize,
    to_itself: usize,
    differences: Vec<String>,
}

/// `cargo xtask vectors FILE… [--on program]`.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let (files, on) = match arguments {
        [files @ .., "--on", on] => (files, *on),
        files => (files, "program"),
    };
    let on = match on {
        "program" => On::Program,
        "oracle" => On::Oracle,
        other => bail!("--on {other:?} is not there yet; there are program and oracle"),
    };
    if files.is_empty() {
        bail!("which files?");
    }
    let mut different = 0;
    for file in files {
        let begun = Instant::now();
        let text = read(file)?;
        let mut tally = Tally::default();
        for (number, line) in text.lines().enumerate() {
            let step: Value = serde_json::from_str(line).with_context(|| format!("{file}:{}", number + 1))?;
            replay(&step, on, &mut tally)
                .with_context(|| format!("{file}:{}: {}", number + 1, step["desc"]))?;
        }
        for difference in tally.differences.iter().take(SHOWN) {
            println!("  {difference}");
        }
        println!(
            "{file} on {on:?}: {} cells, {} of them a pod to itself (never leaves the pod, not judged), {} differences, {:.2} s",
            tally.cells,
            tally.to_itself,
            tally.differences.len(),
            begun.elapsed().as_secs_f64(),
        );
        if tally.cells == tally.to_itself {
            bail!("{file} holds nothing that can be judged");
        }
        different += tally.differences.len();
    }
    if different > 0 {
        bail!("{different} verdicts differ");
    }
    Ok(())
}

fn read(file: &str) -> Result<String> {
    if !file.ends_with(".gz") {
        return std::fs::read_to_string(file).with_context(|| file.to_owned());
    }
    let output = Command::new("gzip").args(["-dc", file]).output().context("gzip")?;
    if !output.status.success() {
        bail!("{file}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| file.to_owned())
}

fn replay(step: &Value, on: On, tally: &mut Tally) -> Result<()> {
    let (objects, addresses) = cluster(step)?;
    let judge = Judge::new(&objects)?;
    let rows = step["rows"].as_array().context("there are no rows")?;
    for row in rows {
        let cell = |index: usize| row[index].as_str().with_context(|| format!("row {row}"));
        let (from, to, port) = (cell(0)?, cell(1)?, cell(2)?);
        tally.cells += 1;
        if from == to {
            tally.to_itself += 1;
            continue;
        }
        let (protocol, number) = port.split_once('/').with_context(|| format!("row {row}"))?;
        let flow = Flow {
            source: *addresses.get(from).with_context(|| format!("pod {from}"))?,
            destination: *addresses.get(to).with_context(|| format!("pod {to}"))?,
            protocol: Protocol::from_name(protocol).with_context(|| format!("protocol {protocol}"))?,
            source_port: 40_000,
            destination_port: number.parse()?,
            icmp: None,
        };
        let (ingress, egress) = match on {
            On::Program => judge.by_program(from, to, &flow)?,
            On::Oracle => judge.by_oracle(from, to, &flow)?,
        };
        for (index, name, ours) in
            [(3, "ingress", ingress), (4, "egress", egress), (5, "combined", ingress && egress)]
        {
            let expected = match cell(index)? {
                "allowed" => true,
                "blocked" => false,
                other => bail!("the verdict {other:?} is not known"),
            };
            if ours != expected {
                let word = if ours { "allowed" } else { "blocked" };
                tally
                    .differences
                    .push(format!("{}: {from} -> {to} {port}: {name} is {word} here", step["desc"]));
            }
        }
    }
    Ok(())
}

/// One cluster, for both judges.
struct Judge {
    calc: Calc,
    snapshot: Snapshot,
}

impl Judge {
    fn new(objects: &[(Key, Value)]) -> Result<Self> {
        let (mut calc, mut snapshot) = (Calc::new(NODE), Snapshot::new());
        for (key, value) in objects {
            calc.update(key, Some(value));
            snapshot.insert(key.clone(), value.clone(), None);
        }
        calc.flush();
        if let Some(finding) = calc.findings().first() {
            bail!("{}: {}", finding.key, finding.problem);
        }
        Ok(Self { calc, snapshot })
    }

    /// What the destination's ingress and the source's egress say.
    fn by_program(&self, from: &str, to: &str, flow: &Flow) -> Result<(bool, bool)> {
        let judge = |pod: &str, direction| -> Result<bool> {
            let (namespace, pod) = pod.split_once('/').context("a pod without namespace")?;
            let id = EndpointId { namespace: namespace.into(), pod: pod.into(), interface: "eth0".into() };
            let endpoint =
                self.calc.state().endpoints.get(&id).with_context(|| format!("{id} has no program"))?;
            Ok(evaluate(&endpoint.program, direction, flow, self.calc.state()))
        };
        Ok((judge(to, Direction::Ingress)?, judge(from, Direction::Egress)?))
    }

    fn by_oracle(&self, from: &str, to: &str, flow: &Flow) -> Result<(bool, bool)> {
        let peer = |pod: &str| -> Result<Peer> {
            let (namespace, name) = pod.split_once('/').context("a pod without namespace")?;
            Ok(Peer::Pod { namespace: namespace.into(), name: name.into() })
        };
        let question = Question {
            from: peer(from)?,
            to: peer(to)?,
            protocol: flow.protocol,
            source_port: flow.source_port,
            destination_port: flow.destination_port,
            icmp: flow.icmp,
            via: None,
        };
        let answer = oracle::evaluate(&self.snapshot, &question)?;
        let allows = |trace: Option<oracle::Trace>| trace.is_none_or(|trace| trace.verdict == Verdict::Allow);
        Ok((allows(answer.ingress), allows(answer.egress)))
    }
}

/// The step after its own actions on namespaces and pods: the file shows them as they were before, but policies as they
/// are afterwards.
fn after_actions(step: &Value) -> Value {
    let mut step = step.clone();
    let actions = step["actions"].take();
    for action in actions.as_array().map_or(&[][..], Vec::as_slice) {
        for labelled in ["CreateNamespace", "SetNamespaceLabels"] {
            if let Some(name) = action[labelled]["Namespace"].as_str() {
                step["namespaces"][name] = action[labelled]["Labels"].clone();
            }
        }
        let Some(pods) = step["pods"].as_array_mut() else { continue };
        let (new, relabelled, gone) = (&action["CreatePod"], &action["SetPodLabels"], &action["DeletePod"]);
        let is = |known: &Value, pod: &Value| {
            known["Name"] == pod["Pod"] && known["Namespace"] == pod["Namespace"]
        };
        pods.retain(|known| !is(known, gone));
        for known in pods.iter_mut().filter(|known| is(known, relabelled)) {
            known["Labels"] = relabelled["Labels"].clone();
        }
        if new.is_object() && !pods.iter().any(|known| is(known, new)) {
            // All pods of these files serve the same ports.
            let containers = pods.first().map(|first| first["Containers"].clone()).unwrap_or_default();
            pods.push(json!({
                "Name": new["Pod"], "Namespace": new["Namespace"], "Labels": new["Labels"], "Containers": containers,
                "IP": format!("192.168.200.{}", pods.len()),
            }));
        }
    }
    step
}

/// The step's cluster on one node.
fn cluster(step: &Value) -> Result<(Objects, Addresses)> {
    let step = &after_actions(step);
    let mut objects = Vec::new();
    for (name, labels) in step["namespaces"].as_object().context("there are no namespaces")? {
        objects.push((
            Key::global(Kind::Namespace, name),
            json!({"metadata": {"name": name, "labels": labels}}),
        ));
    }
    let mut addresses = BTreeMap::new();
    for pod in step["pods"].as_array().context("there are no pods")? {
        let text = |field: &str| pod[field].as_str().with_context(|| format!("pod {pod} has no {field}"));
        let (namespace, name, address) = (text("Namespace")?, text("Name")?, text("IP")?);
        addresses.insert(format!("{namespace}/{name}"), address.parse()?);
        let containers = pod["Containers"].as_array().map_or(&[][..], Vec::as_slice).iter();
        let ports: Vec<Value> = containers
            .map(|container| json!({"name": container["PortName"], "protocol": container["Protocol"], "port": container["Port"]}))
            .collect();
        let endpoint = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": namespace, "labels": pod["Labels"]},
            "spec": {
                "node": NODE, "pod": name, "endpoint": "eth0", "ipNetworks": [format!("{address}/32")],
                "profiles": [format!("kns.{namespace}")], "ports": ports, "serviceAccountName": "default",
            },
        });
        let key = WorkloadEndpoint::name_for(NODE, name, "eth0");
        objects.push((Key::namespaced(Kind::WorkloadEndpoint, namespace, key), endpoint));
    }
    for policy in step["policies"].as_array().map_or(&[][..], Vec::as_slice) {
        let text = |field: &str| {
            policy["metadata"][field].as_str().with_context(|| format!("policy {policy} has no {field}"))
        };
        let key = Key::namespaced(Kind::KubernetesNetworkPolicy, text("namespace")?, text("name")?);
        objects.push((key, policy.clone()));
    }
    Ok((objects, addresses))
}
