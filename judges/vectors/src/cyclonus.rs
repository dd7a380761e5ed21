//! Kubernetes policies: each line is a cluster with its policies and the verdict on each pair of pods, protocol and port
//! (`rows`: from, to, `TCP/80`, ingress, egress, combined).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use testkit::emulator;
use testkit::exceptions::Exception;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::net::{Direction, Protocol};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::{EndpointId, Report};
use tortie_linux::dataplane::Config;
use tortie_oracle::{Peer, Question, Snapshot, Verdict};
use tortie_policy::program::{Flow, evaluate};

use super::{On, Tally, hns};
use setup::packages::require_root;

const NODE: &str = "node";
/// With two nodes, some pairs of pods share a node and others do not.
const TWO_NODES: [&str; 2] = ["n1", "n2"];

type Objects = Vec<(Key, Value)>;
/// The address of each pod, by `namespace/name`.
type Addresses = BTreeMap<String, IpAddr>;

/// Returns the number of verdicts that differ.
pub(super) fn replay(file: &str, lines: &[Value], on: On) -> Result<usize> {
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut judge = Judge::new(on)?;
    for (number, step) in lines.iter().enumerate() {
        replay_step(step, &mut judge, &mut tally)
            .with_context(|| format!("{file}:{}: {}", number + 1, step["desc"]))?;
    }
    tally.close(file, &on, begun)
}

/// A row of a step: a flow and its expected verdict.
struct Row<'a> {
    from: &'a str,
    to: &'a str,
    port: &'a str,
    flow: Flow,
    expected: Verdicts,
}

/// Whether a packet may pass by the policy of its destination, by that of its source, and by both.
#[derive(Clone, Copy)]
struct Verdicts {
    /// `None` if only the combination is visible.
    single: Option<(bool, bool)>,
    combined: bool,
    /// The exceptions by which ingress and egress may be closed although policy is not.
    narrower: (Option<Exception>, Option<Exception>),
}

fn replay_step(step: &Value, judge: &mut Judge, tally: &mut Tally) -> Result<()> {
    let (objects, addresses) = cluster(step, judge.nodes())?;
    let all = step["rows"].as_array().context("there are no rows")?;
    let rows: Vec<Row> =
        all.iter().filter_map(|row| read_row(row, &addresses).transpose()).collect::<Result<_>>()?;
    tally.cases += rows.len();
    tally.leave_out("a pod to itself never leaves the pod", all.len() - rows.len());
    for (row, ours) in rows.iter().zip(judge.verdicts(&objects, &rows)?) {
        let Row { from, to, port, expected, .. } = row;
        let (of_ingress, of_egress) = ours.narrower;
        let mut compare = |name, ours: bool, expected: bool, exception: Option<Exception>| {
            if let Some(exception) = exception.filter(|_| expected && !ours) {
                tally.except(exception.name());
            } else if ours != expected {
                let word = if ours { "allowed" } else { "blocked" };
                let difference = format!("{}: {from} -> {to} {port}: {name} is {word} here", step["desc"]);
                tally.differences.push(difference);
            }
        };
        if let (Some((ingress, egress)), Some(single)) = (ours.single, expected.single) {
            compare("ingress", ingress, single.0, of_ingress);
            compare("egress", egress, single.1, of_egress);
        }
        compare("combined", ours.combined, expected.combined, of_ingress.or(of_egress));
    }
    Ok(())
}

/// `None` for a pod to itself.
fn read_row<'a>(row: &'a Value, addresses: &Addresses) -> Result<Option<Row<'a>>> {
    let cell = |index: usize| row[index].as_str().with_context(|| format!("row {row}"));
    let (from, to, port) = (cell(0)?, cell(1)?, cell(2)?);
    if from == to {
        return Ok(None);
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
    let verdict = |index| match cell(index)? {
        "allowed" => Ok(true),
        "blocked" => Ok(false),
        other => bail!("the verdict {other:?} is not known"),
    };
    let single = Some((verdict(3)?, verdict(4)?));
    let expected = Verdicts { single, combined: verdict(5)?, narrower: (None, None) };
    Ok(Some(Row { from, to, port, flow, expected }))
}

/// The judge, with its state between steps.
enum Judge {
    Program,
    Oracle,
    Kernel(Box<testkit::kernel::KernelCluster>),
    Emulator(Box<emulator::EmulatedCluster>),
}

impl Judge {
    fn new(on: On) -> Result<Self> {
        Ok(match on {
            On::Program => Self::Program,
            On::Oracle => Self::Oracle,
            On::Kernel => {
                require_root("verdicts of the kernel")?;
                Self::Kernel(Box::new(testkit::kernel::KernelCluster::new(TWO_NODES, &Config::default())?))
            }
            On::Emulator(version, rendering) => Self::Emulator(Box::new(emulator::EmulatedCluster::new(
                &TWO_NODES,
                &hns(version),
                rendering,
            )?)),
        })
    }

    /// The nodes of the pods.
    fn nodes(&self) -> &'static [&'static str] {
        match self {
            Self::Kernel(_) | Self::Emulator(_) => &TWO_NODES,
            _ => &[NODE],
        }
    }

    /// The verdict on the packet of each row.
    fn verdicts(&mut self, objects: &Objects, rows: &[Row<'_>]) -> Result<Vec<Verdicts>> {
        let both = |(ingress, egress)| Verdicts {
            single: Some((ingress, egress)),
            combined: ingress && egress,
            narrower: (None, None),
        };
        match self {
            Self::Program => {
                let calc = calc(objects)?;
                rows.iter().map(|row| Ok(both(by_program(&calc, row)?))).collect()
            }
            Self::Oracle => {
                calc(objects)?;
                let mut snapshot = Snapshot::new();
                for (key, value) in objects {
                    snapshot.insert(key.clone(), value.clone(), None);
                }
                rows.iter().map(|row| Ok(both(by_oracle(&snapshot, row)?))).collect()
            }
            Self::Kernel(cluster) => by_kernel(cluster, objects, rows),
            Self::Emulator(cluster) => by_emulator(cluster, objects, rows),
        }
    }
}

/// One node's calc with the objects, which must all be valid.
fn calc(objects: &Objects) -> Result<Calc> {
    let mut calc = Calc::new(NODE);
    for (key, value) in objects {
        calc.update(key, Some(value));
    }
    calc.flush();
    if let Some(finding) = calc.findings().first() {
        bail!("{}: {}", finding.key, finding.problem);
    }
    Ok(calc)
}

/// The verdicts of the destination's ingress and the source's egress.
fn by_program(calc: &Calc, row: &Row<'_>) -> Result<(bool, bool)> {
    let judge = |pod: &str, direction| -> Result<bool> {
        let (namespace, pod) = pod.split_once('/').context("a pod without namespace")?;
        let id = EndpointId { namespace: namespace.into(), pod: pod.into(), interface: "eth0".into() };
        let endpoint = calc.state().endpoints.get(&id).with_context(|| format!("{id} has no program"))?;
        Ok(evaluate(&endpoint.program, direction, &row.flow, calc.state()))
    };
    Ok((judge(row.to, Direction::Ingress)?, judge(row.from, Direction::Egress)?))
}

fn by_oracle(snapshot: &Snapshot, row: &Row<'_>) -> Result<(bool, bool)> {
    let peer = |pod: &str| -> Result<Peer> {
        let (namespace, name) = pod.split_once('/').context("a pod without namespace")?;
        Ok(Peer::Pod { namespace: namespace.into(), name: name.into() })
    };
    let question = Question {
        from: peer(row.from)?,
        to: peer(row.to)?,
        protocol: row.flow.protocol,
        source_port: row.flow.source_port,
        destination_port: row.flow.destination_port,
        icmp: row.flow.icmp,
        via: None,
        by_node: None,
    };
    let answer = tortie_oracle::evaluate(snapshot, &question)?;
    let allows =
        |trace: Option<tortie_oracle::Trace>| trace.is_none_or(|trace| trace.verdict == Verdict::Allow);
    Ok((allows(answer.ingress), allows(answer.egress)))
}

/// Changes the cluster from the last step to this one, and sends a packet for each row.
fn by_kernel(
    cluster: &mut testkit::kernel::KernelCluster,
    objects: &Objects,
    rows: &[Row<'_>],
) -> Result<Vec<Verdicts>> {
    for report in cluster.change(objects)? {
        if report != Report::default() {
            bail!("a node says of this cluster: {report:?}");
        }
    }
    let flows: Vec<Flow> = rows.iter().map(|row| row.flow).collect();
    let passed = cluster.passed(&flows)?;
    let verdicts = |row| Verdicts { single: None, combined: passed.contains(&row), narrower: (None, None) };
    Ok((0..rows.len()).map(verdicts).collect())
}

/// Changes the cluster from the last step to this one, and evaluates the ACLs of both ends. ACLs can express
/// everything except SCTP ports, so any other condition is a failure.
fn by_emulator(
    cluster: &mut emulator::EmulatedCluster,
    objects: &Objects,
    rows: &[Row<'_>],
) -> Result<Vec<Verdicts>> {
    let reports = cluster.change(&emulator::on_windows(objects, &TWO_NODES))?;
    let sctp = Exception::SctpPorts;
    for report in &reports {
        let known = report.conditions().all(|reported| sctp.is_reported_by(reported));
        if report.retry || !report.node.is_empty() || !known {
            bail!("a node says of this cluster: {report:?}");
        }
    }
    let exception = |flow: &Flow, end| {
        let reported = cluster.location(end).and_then(|end| reports[end.node].endpoints.get(&end.endpoint));
        let is_reported = reported.into_iter().flatten().any(|reported| sctp.is_reported_by(reported));
        Exception::of(flow.protocol).filter(|exception| *exception == sctp && is_reported)
    };
    let judge = |row: &Row<'_>| {
        let ends = cluster.judge(&row.flow)?;
        let both = ends.ingress.zip(ends.egress).with_context(|| format!("{} -> {}", row.from, row.to))?;
        let narrower = (exception(&row.flow, row.flow.destination), exception(&row.flow, row.flow.source));
        Ok(Verdicts { single: Some(both), combined: both.0 && both.1, narrower })
    };
    rows.iter().map(judge).collect()
}

/// The step after its own actions on namespaces and pods: the file has them as they were before, but policies as they
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

/// The step's cluster, with its pods distributed over these nodes.
fn cluster(step: &Value, nodes: &[&str]) -> Result<(Objects, Addresses)> {
    let step = &after_actions(step);
    let mut objects = Vec::new();
    for (name, labels) in step["namespaces"].as_object().context("there are no namespaces")? {
        objects.push((
            Key::global(Kind::Namespace, name),
            json!({"metadata": {"name": name, "labels": labels}}),
        ));
    }
    let mut addresses = BTreeMap::new();
    let pods = step["pods"].as_array().context("there are no pods")?;
    for (pod, node) in pods.iter().zip(nodes.iter().cycle()) {
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
                "node": node, "pod": name, "endpoint": "eth0", "ipNetworks": [format!("{address}/32")],
                "profiles": [format!("kns.{namespace}")], "ports": ports, "serviceAccountName": "default",
                "interfaceName": format!("cali-{namespace}-{name}"),
            },
        });
        let key = WorkloadEndpoint::name_for(node, name, "eth0");
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
