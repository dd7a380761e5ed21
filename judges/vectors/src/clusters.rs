//! Clusters of manifests with flows, and the verdict on each flow with the decision of each side.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use testkit::programs::{Programs, Sides};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{Key, Kind, Resource, manifest};
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Trace, Verdict};
use tortie_policy::program::Flow;

use super::rendered::{Outcome, Rendered};
use super::{On, Tally};

pub(super) type Objects = Vec<(Key, Value)>;

/// A line of the file.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) objects: Objects,
    pub(super) flows: Vec<ExpectedFlow>,
}

/// A flow, and the verdict on it.
#[derive(Clone)]
pub(super) struct ExpectedFlow {
    pub(super) from: Peer,
    pub(super) to: Peer,
    pub(super) flow: Flow,
    pub(super) expected: Sides,
    shown: String,
}

/// Returns the number of flows that differ.
pub(super) fn replay(file: &str, lines: &[Value], on: On) -> Result<usize> {
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut rendered = match on {
        On::Kernel => Some(Rendered::kernel()?),
        On::Emulator(version, rendering) => Some(Rendered::emulator(version, rendering)?),
        On::Program | On::Oracle => None,
    };
    let (mut agree, mut disagree) = (0, 0);
    for (number, line) in lines.iter().enumerate() {
        let case = match read_case(line).with_context(|| format!("{file}:{}", number + 1))? {
            Ok(case) => case,
            Err(problem) => {
                disagree += 1;
                tally.differences.push(problem);
                continue;
            }
        };
        let before = tally.differences.len();
        if let Some(rendered) = &mut rendered {
            if compare_rendered(&case, rendered, &mut tally).with_context(|| case.name.clone())? {
                agree += 1;
            } else {
                disagree += 1;
            }
            continue;
        }
        let verdicts = judge(&case, on)?;
        let kept = without_dropped(&case);
        let otherwise = kept.as_ref().map(|kept| judge(kept, on)).transpose()?;
        for (index, (flow, ours)) in case.flows.iter().zip(&verdicts).enumerate() {
            tally.cases += 1;
            let without = otherwise.as_ref().and_then(|verdicts| verdicts.get(index));
            if agrees(flow, ours) {
                continue;
            }
            if without.is_some_and(|without| agrees(flow, without)) {
                tally.except(BLANK_SELECTOR);
            } else {
                tally.differences.push(format!("{}: {}: here {ours:?}", case.name, flow.shown));
            }
        }
        if tally.differences.len() == before { agree += 1 } else { disagree += 1 }
    }
    println!("{file} on {on}: {agree} clusters agree, {disagree} do not");
    tally.close(file, &on, begun)
}

/// The inner error is a cluster that the manifest reader rejects, which is a difference.
fn read_case(line: &Value) -> Result<Result<Case, String>> {
    let name = format!("{} {}", line["id"], line["tags"]);
    let list = json!({"apiVersion": "v1", "kind": "List", "items": line["objects"]});
    let objects = match manifest::read("cluster", &list.to_string()) {
        Ok(objects) => objects,
        Err(problems) => return Ok(Err(format!("{name}: rejected: {problems:?}"))),
    };
    let objects: Objects = objects.into_iter().map(|object| (object.key, object.value)).collect();
    let addresses = addresses(&objects)?;
    let flows = line["flows"].as_array().context("no flows")?;
    let flows = flows.iter().map(|flow| read_flow(flow, &addresses)).collect::<Result<_>>()?;
    Ok(Ok(Case { name, objects, flows }))
}

/// The addresses of pods (`pod:`) and nodes (`node:`) of both families (`pod6:`, `node6:`).
fn addresses(objects: &Objects) -> Result<BTreeMap<String, IpAddr>> {
    let mut addresses = BTreeMap::new();
    for (key, value) in objects {
        let (what, name, own): (_, _, Vec<IpAddr>) = match Resource::read(key, value) {
            Ok(Resource::Pod(pod)) => {
                ("pod", format!("{}/{}", key.namespace, key.name), pod.status.addresses())
            }
            Ok(Resource::Node(node)) => {
                let v4 = node.address().map(IpAddr::V4);
                ("node", key.name.clone(), v4.into_iter().chain(node.address_v6().map(IpAddr::V6)).collect())
            }
            _ => continue,
        };
        for address in own {
            let family = if address.is_ipv4() { "" } else { "6" };
            addresses.insert(format!("{what}{family}:{name}"), address);
        }
    }
    Ok(addresses)
}

fn read_flow(value: &Value, addresses: &BTreeMap<String, IpAddr>) -> Result<ExpectedFlow> {
    let shown = value.to_string();
    let text = |index: usize| value[index].as_str().with_context(|| format!("flow {shown}"));
    let address = |name: &str| match name.strip_prefix("ip:") {
        Some(address) => address.parse().with_context(|| name.to_owned()),
        None => addresses.get(name).copied().with_context(|| format!("{name} has no address")),
    };
    let (source, destination) = (address(text(0)?)?, address(text(1)?)?);
    let number = |index: usize| -> Result<u16> {
        match &value[index] {
            Value::Number(_) => Ok(u16::try_from(value[index].as_u64().context("port")?)?),
            _ => Ok(0),
        }
    };
    let icmp = match value[3].as_str() {
        Some(text) => {
            let (kind, code) = text.split_once('/').context("type/code")?;
            Some((kind.parse()?, code.parse()?))
        }
        None => None,
    };
    let protocol = Protocol(u8::try_from(value[2].as_u64().context("protocol")?)?);
    let flow =
        Flow { source, destination, protocol, source_port: number(4)?, destination_port: number(3)?, icmp };
    let sides = text(6)?;
    let side = |letter: char| sides.find(letter).map(|at| sides[at + 1..].starts_with('+'));
    let expected = Sides { egress: side('e'), hosts: side('h'), ingress: side('i') };
    if expected.passes() != (text(5)? == "allow") {
        bail!("flow {shown} contradicts itself");
    }
    Ok(ExpectedFlow { from: peer(text(0)?)?, to: peer(text(1)?)?, flow, expected, shown })
}

fn peer(name: &str) -> Result<Peer> {
    let (what, name) = name.split_once(':').with_context(|| name.to_owned())?;
    Ok(match what {
        "pod" | "pod6" => {
            let (namespace, name) = name.split_once('/').with_context(|| name.to_owned())?;
            Peer::Pod { namespace: namespace.to_owned(), name: name.to_owned() }
        }
        "node" | "node6" => Peer::Node(name.to_owned()),
        _ => Peer::Address(name.parse().with_context(|| name.to_owned())?),
    })
}

/// Compares the enforcing system with the combined verdict on each flow. It does not get the policies that Calico
/// drops.
fn compare_rendered(case: &Case, rendered: &mut Rendered, tally: &mut Tally) -> Result<bool> {
    let kept = without_dropped(case);
    let case = kept.as_ref().unwrap_or(case);
    let before = tally.differences.len();
    for (flow, outcome) in case.flows.iter().zip(rendered.judge(case)?) {
        let (passes, expected, exception) = match outcome {
            Outcome::LeftOut(reason) => {
                tally.leave_out(reason, 1);
                continue;
            }
            Outcome::Judged { passes, expected, exception } => (passes, expected, exception),
        };
        tally.cases += 1;
        match exception {
            Some(exception) if expected && !passes => tally.except(exception.name()),
            _ if passes != expected => {
                let verdict = if passes { "passes" } else { "does not pass" };
                tally.differences.push(format!("{}: {}: it {verdict}", case.name, flow.shown));
            }
            _ => {}
        }
    }
    Ok(tally.differences.len() == before)
}

/// A side that is not involved lets the flow pass.
fn agrees(flow: &ExpectedFlow, ours: &Verdicts) -> bool {
    let verdicts = |sides: Sides| [sides.egress, sides.hosts, sides.ingress].map(|side| side != Some(false));
    verdicts(ours.sides) == verdicts(flow.expected)
}

/// The verdicts on one flow, and who decided, if known.
#[derive(Debug, Default)]
struct Verdicts {
    sides: Sides,
    #[allow(dead_code, reason = "printed with the others")]
    decided_by: Vec<String>,
}

fn judge(case: &Case, on: On) -> Result<Vec<Verdicts>> {
    match on {
        On::Oracle => by_oracle(case),
        On::Program => by_program(case),
        On::Kernel | On::Emulator(..) => bail!("{on} renders policy"),
    }
}

fn by_oracle(case: &Case) -> Result<Vec<Verdicts>> {
    let mut snapshot = Snapshot::new();
    for (key, value) in &case.objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let oracle = Oracle::new(&snapshot);
    let judge = |expected: &ExpectedFlow| {
        let ExpectedFlow { from, to, flow, .. } = expected;
        let question = Question {
            from: from.clone(),
            to: to.clone(),
            protocol: flow.protocol,
            source_port: flow.source_port,
            destination_port: flow.destination_port,
            icmp: flow.icmp,
            via: None,
            by_node: None,
        };
        let family = if flow.source.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
        let answer = oracle.evaluate_by(&question, family).with_context(|| expected.shown.clone())?;
        let allows = |trace: &Trace| trace.verdict == Verdict::Allow;
        let sides = Sides {
            egress: answer.egress.as_ref().map(allows),
            hosts: answer.hosts.iter().map(allows).reduce(|a, b| a && b),
            ingress: answer.ingress.as_ref().map(allows),
        };
        let traces = answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress);
        let decided_by = traces.map(|trace| format!("{}: {:?}", trace.endpoint, trace.decided_by));
        Ok(Verdicts { sides, decided_by: decided_by.collect() })
    };
    case.flows.iter().map(judge).collect()
}

fn by_program(case: &Case) -> Result<Vec<Verdicts>> {
    let programs = Programs::new(&with_endpoints(&case.objects)?);
    let judge =
        |expected: &ExpectedFlow| Verdicts { sides: programs.judge(&expected.flow), ..Verdicts::default() };
    Ok(case.flows.iter().map(judge).collect())
}

/// Policies with a blank selector beside another criterion. Calico joins the two as `(…) && ( )`, fails to parse that,
/// and drops the whole policy, which opens what it closes. Tortie keeps the policy, and reads the blank as `all()`
/// (policy decision 33).
const BLANK_SELECTOR: &str = "Calico drops a policy with a blank selector beside another criterion";

/// The case without the policies that Calico drops; `None` where there are none.
fn without_dropped(case: &Case) -> Option<Case> {
    let is_dropped = |(key, value): &&(Key, Value)| {
        let namespaced = key.kind == Kind::NetworkPolicy;
        if !namespaced && ![Kind::GlobalNetworkPolicy, Kind::Profile].contains(&key.kind) {
            return false;
        }
        let blank =
            |text: &Value| text.as_str().is_some_and(|text| !text.is_empty() && text.trim().is_empty());
        let given = |text: &Value| text.as_str().is_some_and(|text| !text.is_empty());
        let spec = &value["spec"];
        let joined_in = |side: &Value| {
            let accounts = &side["serviceAccounts"];
            let accounts = given(&accounts["selector"])
                || accounts["names"].as_array().is_some_and(|names| !names.is_empty());
            blank(&side["selector"]) && (namespaced || given(&side["namespaceSelector"]) || accounts)
        };
        let rules =
            ["ingress", "egress"].into_iter().filter_map(|direction| spec[direction].as_array()).flatten();
        let mut sides = rules.flat_map(|rule| [&rule["source"], &rule["destination"]]);
        let beside =
            namespaced || given(&spec["namespaceSelector"]) || given(&spec["serviceAccountSelector"]);
        sides.any(joined_in) || blank(&spec["selector"]) && beside
    };
    case.objects.iter().any(|object| is_dropped(&object)).then(|| Case {
        name: case.name.clone(),
        objects: case.objects.iter().filter(|object| !is_dropped(object)).cloned().collect(),
        flows: case.flows.clone(),
    })
}

/// The objects, with the WorkloadEndpoints that CNI writes for the pods.
pub(super) fn with_endpoints(objects: &Objects) -> Result<Objects> {
    let mut all = objects.clone();
    for (index, (key, value)) in objects.iter().enumerate().filter(|(_, (key, _))| key.kind == Kind::Pod) {
        let Ok(Resource::Pod(pod)) = Resource::read(key, value) else { bail!("{key} cannot be read") };
        let node = pod.spec.node_name.as_deref().unwrap_or_default();
        let addresses =
            pod.status.addresses().into_iter().map(|address| ipnet::IpNet::from(address).to_string());
        let account = pod.service_account();
        let name = WorkloadEndpoint::name_for(node, &key.name, "eth0");
        let endpoint = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": key.namespace, "labels": pod.metadata.labels},
            "spec": {
                "node": node, "pod": key.name, "endpoint": "eth0", "serviceAccountName": account,
                "ipNetworks": addresses.collect::<Vec<_>>(),
                "profiles": WorkloadEndpoint::profiles_for(&key.namespace, account),
                "ports": pod.endpoint_ports(), "interfaceName": format!("cali{index}"),
            },
        });
        all.push((Key::namespaced(Kind::WorkloadEndpoint, &key.namespace, name), endpoint));
    }
    Ok(all)
}
