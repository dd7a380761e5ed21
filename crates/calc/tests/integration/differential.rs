//! Two ways to a verdict: the oracle, straight from the resources, and the programs that calc compiles. Random
//! clusters, random packets; every disagreement shrinks to a manifest and a command that shows it.
//!
//! `PROPTEST_CASES` sets the number of clusters. Each gets several hundred packets. The test prints which features
//! decided packets, and fails if one decided (almost) none.
#![allow(clippy::print_stdout)]

mod conversions;

use std::collections::BTreeMap;
use std::fmt::Write;

use proptest::prelude::*;
use serde_json::Value;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::EndpointId;
use tortie_oracle::{
    DecidedBy, Oracle, Peer, PolicyName, PolicyTrace, Question, Snapshot, Stored, Table, Trace, Verdict,
};
use tortie_policy::program::{Flow, evaluate, evaluate_tiers};

use testkit::clusters::pods::{as_pods, published};
use testkit::clusters::{NODES, Objects, Sent, clusters_with_hosts, manifest, packets, snapshot};
use testkit::random::Random;

const CLUSTERS: u32 = 500;
const PACKETS: usize = 200;

#[test]
fn oracle_and_programs_agree() {
    let random = Random::cases(CLUSTERS).shrinking(20_000);
    let seen = std::cell::RefCell::new(Coverage::default());
    let strategy = (clusters_with_hosts(), prop::collection::vec(packets(), PACKETS));
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        compare(&objects, &packets, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    };
    let result = random.prove(&strategy, test, || seen.borrow().lacking(random.count()));
    println!("{}", seen.borrow().table());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Compares both for every packet, at both of its ends.
fn compare(objects: &Objects, packets: &[Sent], coverage: &mut Coverage) -> Result<(), String> {
    // The oracle reads pods itself; the programs know them by what nodes publish.
    let objects = &as_pods(objects);
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    let endpoints = published(objects);
    let nodes: Vec<Calc> = NODES.iter().map(|node| calc(node, &endpoints)).collect();
    for packet in packets {
        let question = Question {
            from: Peer::Address(packet.source),
            to: Peer::Address(packet.destination),
            protocol: packet.protocol,
            source_port: packet.source_port,
            destination_port: packet.destination_port,
            icmp: packet.icmp,
            via: None,
            by_node: None,
        };
        let answer = oracle.evaluate(&question).map_err(|error| error.to_string())?;
        let flow = Flow {
            source: answer.source,
            destination: answer.destination,
            protocol: packet.protocol,
            source_port: packet.source_port,
            destination_port: packet.destination_port,
            icmp: packet.icmp,
        };
        let traces = answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress);
        let by_policy = |trace: &&Trace| {
            !matches!(
                trace.decided_by,
                DecidedBy::EndpointToHost { .. } | DecidedBy::Failsafe | DecidedBy::BuiltIn { .. }
            )
        };
        for trace in traces.filter(by_policy) {
            let (program, oracle) = (program_says(&nodes, trace, &flow), oracle_says(trace));
            if program != oracle {
                return Err(format!(
                    "the oracle says {oracle:?}, the program {program:?}\n{trace:#?}\ncluster.yml:\n{}\ntortie explain -f cluster.yml {} {} --port {}",
                    manifest(objects),
                    packet.source,
                    packet.destination,
                    shown_port(packet),
                ));
            }
            coverage.note(&snapshot, trace, &flow);
        }
    }
    Ok(())
}

/// Whether the packet passes; `None` if the table does not decide.
fn oracle_says(trace: &Trace) -> Option<bool> {
    (trace.decided_by != DecidedBy::Nobody).then_some(trace.verdict == Verdict::Allow)
}

fn program_says(nodes: &[Calc], trace: &Trace, flow: &Flow) -> Option<bool> {
    let flow = if trace.reply { reply(flow) } else { *flow };
    if let Some(name) = trace.endpoint.strip_prefix("host endpoint ") {
        let found =
            nodes.iter().find_map(|calc| Some((calc.state().host_endpoints.get(name)?, calc.state())));
        let (endpoint, state) = found.expect("the host endpoint has a program");
        let program = &endpoint.program;
        return match trace.table {
            Table::Untracked => evaluate_tiers(&program.untracked, trace.direction, &flow, state),
            Table::PreDnat => evaluate_tiers(&program.pre_dnat, trace.direction, &flow, state),
            Table::Forward => evaluate_tiers(&program.forward, trace.direction, &flow, state),
            Table::Normal => Some(evaluate(&program.normal, trace.direction, &flow, state)),
        };
    }
    let (namespace, pod) = trace.endpoint.split_once('/').unwrap();
    let id = EndpointId { namespace: namespace.into(), pod: pod.into(), interface: "eth0".into() };
    let found = nodes.iter().find_map(|calc| Some((calc.state().endpoints.get(&id)?, calc.state())));
    let (endpoint, state) = found.expect("the pod has a program");
    Some(evaluate(&endpoint.program, trace.direction, &flow, state))
}

fn reply(flow: &Flow) -> Flow {
    let icmp = flow.icmp.map(|(icmp_type, code)| match icmp_type {
        8 if flow.protocol == Protocol::ICMP => (0, code),
        128 if flow.protocol == Protocol::ICMPV6 => (129, code),
        other => (other, code),
    });
    Flow {
        source: flow.destination,
        destination: flow.source,
        source_port: flow.destination_port,
        destination_port: flow.source_port,
        icmp,
        ..*flow
    }
}

fn calc(node: &str, objects: &Objects) -> Calc {
    let mut calc = Calc::new(node);
    for (key, value) in objects {
        calc.update(key, Some(value));
    }
    calc.flush();
    calc
}

fn shown_port(packet: &Sent) -> String {
    match packet.icmp {
        Some((icmp_type, _)) => format!("icmp/{icmp_type}"),
        None => format!("{}/{}", packet.protocol.to_string().to_lowercase(), packet.destination_port),
    }
}

/// How often each feature decided, and how often it was the first mismatch of a rule.
#[derive(Default)]
struct Coverage {
    judged: usize,
    features: BTreeMap<String, (usize, usize)>,
}

impl Coverage {
    fn note(&mut self, snapshot: &Snapshot, trace: &Trace, flow: &Flow) {
        self.judged += 1;
        let mut decided = |feature: String| self.features.entry(feature).or_default().0 += 1;
        match &trace.decided_by {
            DecidedBy::Rule { policy, number } => {
                decided(format!("rule of a {}", policy.kind));
                for field in fields(snapshot, policy, trace.direction, *number) {
                    decided(field);
                }
                if let Some((_, stored)) = object_of(snapshot, policy) {
                    of_policy(stored).into_iter().for_each(&mut decided);
                    let rule = rule(stored, trace.direction, *number);
                    if is_about_nodes(rule) {
                        let family = if flow.destination.is_ipv4() { "IPv4" } else { "IPv6" };
                        decided(format!("an {family} address of a node"));
                    }
                    if is_port_of_sidecar(snapshot, flow, rule) {
                        decided("a sidecar's named port".into());
                    }
                }
                let passed = |policy: &PolicyTrace| {
                    let mut rules = policy.rules.iter().filter(|rule| rule.mismatch.is_none());
                    rules.next_back().is_some_and(|rule| rule.action == Action::Pass)
                };
                if trace.profiles.iter().any(passed) {
                    decided("a profile after one that passes".into());
                }
            }
            DecidedBy::NotUnderstood { policy } => {
                decided(format!("{} not understood", policy.kind));
                match object_of(snapshot, policy) {
                    Some((_, stored)) => of_policy(stored).into_iter().for_each(&mut decided),
                    None => decided("a profile that does not exist".into()),
                }
            }
            DecidedBy::EndOfTier { .. } => decided("end of tier".into()),
            DecidedBy::NoProfile => decided("no profile".into()),
            DecidedBy::Nobody => decided(format!("nobody in table {:?}", trace.table)),
            DecidedBy::EndpointToHost { .. }
            | DecidedBy::Failsafe
            | DecidedBy::StaticRule { .. }
            | DecidedBy::BuiltIn { .. } => {}
        }
        if trace.endpoint.starts_with("host endpoint") {
            let reply = if trace.reply { " (reply)" } else { "" };
            decided(format!("host endpoint: {:?}{reply}", trace.table));
        }
        for tier in &trace.tiers {
            decided(format!("tier: {:?}", tier.outcome));
        }
        let evaluated = trace.tiers.iter().flat_map(|tier| &tier.policies).chain(&trace.profiles);
        for mismatch in evaluated.flat_map(|policy| &policy.rules).filter_map(|rule| rule.mismatch.as_ref()) {
            self.features.entry(mismatch.field.clone()).or_default().1 += 1;
            if mismatch.wanted.contains("a packet of the family") {
                let feature = format!("{} of the other family", mismatch.field);
                self.features.entry(feature).or_default().0 += 1;
            }
        }
    }

    fn table(&self) -> String {
        let mut table =
            format!("{} verdicts\n{:45} {:>8} {:>8}\n", self.judged, "feature", "decided", "kept out");
        for (feature, (decided, kept_out)) in &self.features {
            writeln!(table, "{feature:45} {decided:>8} {kept_out:>8}").unwrap();
        }
        table
    }

    /// Every feature must have decided, in proportion to the number of clusters.
    fn lacking(&self, clusters: usize) -> Option<String> {
        let sides = ["source", "destination"];
        let of_sides = [
            "nets",
            "notNets",
            "selector",
            "notSelector",
            "namespaceSelector",
            "serviceAccounts",
            "ports",
            "notPorts",
        ];
        let mut wanted: Vec<String> = sides
            .iter()
            .flat_map(|side| of_sides.iter().map(move |field| format!("{side}.{field}")))
            .collect();
        wanted.extend(
            [
                "source.services",
                "destination.services",
                "ipVersion",
                "protocol",
                "notProtocol",
                "icmp",
                "notICMP",
                "from",
                "to",
                "ports",
                "end of tier",
                "no profile",
                "tier: Passed",
                "tier: PassedAtEnd",
                "tier: DeniedAtEnd",
                "rule of a Profile",
                "rule of a GlobalNetworkPolicy",
                "rule of a NetworkPolicy",
                "rule of a KubernetesNetworkPolicy",
                "rule of a ClusterNetworkPolicy",
                "rule of a AdminNetworkPolicy",
                "rule of a BaselineAdminNetworkPolicy",
                // Each of them alone is rare.
                "AdminNetworkPolicy not understood or BaselineAdminNetworkPolicy not understood or \
                 ClusterNetworkPolicy not understood",
                "KubernetesNetworkPolicy not understood",
                "protocols",
                "host endpoint: Normal",
                "host endpoint: Untracked",
                "host endpoint: Untracked (reply)",
                "host endpoint: PreDnat",
                "host endpoint: Forward",
                "NetworkPolicy not understood",
                "GlobalNetworkPolicy not understood",
                "source.nets of the other family",
                "source.notNets of the other family",
                "destination.nets of the other family",
                "destination.notNets of the other family",
                "source.serviceAccounts.selector",
                "destination.serviceAccounts.selector",
                "a blank namespaceSelector of a policy",
                "a blank serviceAccountSelector of a policy",
                "a blank selector of a rule",
                "a sidecar's named port",
                "a profile that does not exist",
                "a profile after one that passes",
                "an IPv4 address of a node",
                "an IPv6 address of a node",
                "a damaged subject",
                "an unreadable subject",
            ]
            .map(str::to_owned),
        );
        let fewest = (clusters / 100).max(1);
        let few = wanted.into_iter().find_map(|feature| {
            let of_one = |feature| self.features.get(feature).map_or(0, |(decided, _)| *decided);
            let decided: usize = feature.split(" or ").map(of_one).sum();
            (decided < fewest).then(|| format!("{feature} decided {decided} verdicts, of {fewest} at least"))
        });
        few.or_else(|| (self.judged < 100 * clusters).then(|| format!("only {} verdicts", self.judged)))
    }
}

/// The object of a policy.
fn object_of<'a>(snapshot: &'a Snapshot, policy: &PolicyName) -> Option<(&'a Key, &'a Stored)> {
    snapshot.iter().find(|(key, _)| {
        key.kind.to_string() == policy.kind && key.namespace == policy.namespace && key.name == policy.name
    })
}

/// The rule of this number, from 1.
fn rule(stored: &Stored, direction: Direction, number: usize) -> &Value {
    let direction = if direction == Direction::Ingress { "ingress" } else { "egress" };
    &stored.value["spec"][direction][number - 1]
}

/// Whether the addresses of nodes are the only peers of the rule.
fn is_about_nodes(rule: &Value) -> bool {
    let peers = rule["to"].as_array().filter(|peers| !peers.is_empty());
    peers.is_some_and(|peers| peers.iter().all(|peer| peer.get("nodes").is_some()))
}

/// What is seldom in a policy itself.
fn of_policy(stored: &Stored) -> Vec<String> {
    let spec = &stored.value["spec"];
    let blank =
        ["namespaceSelector", "serviceAccountSelector"].into_iter().filter(|field| spec[*field] == " ");
    let mut seen: Vec<String> = blank.map(|field| format!("a blank {field} of a policy")).collect();
    if spec["subject"].get("bogus").is_some() {
        seen.push("an unreadable subject".into());
    }
    if spec["subject"].to_string().contains("-bad-") {
        seen.push("a damaged subject".into());
    }
    seen
}

/// Whether the packet goes to a port of an init container that the rule names.
fn is_port_of_sidecar(snapshot: &Snapshot, flow: &Flow, rule: &Value) -> bool {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let of_kubernetes = list(&rule["ports"]).into_iter().chain(list(&rule["protocols"]));
    let named = of_kubernetes
        .flat_map(|port| ["port", "namedPort", "destinationNamedPort"].map(|field| port[field].clone()));
    let names: Vec<Value> = list(&rule["destination"]["ports"]).into_iter().chain(named).collect();
    let is_named = |port: &Value| {
        names.contains(&port["name"])
            && port["containerPort"] == flow.destination_port
            && port["protocol"] == flow.protocol.to_string()
    };
    let address = flow.destination.to_string();
    let pods = snapshot.iter().filter(|(key, _)| key.kind == Kind::Pod).map(|(_, stored)| &stored.value);
    let mut there =
        pods.filter(|pod| list(&pod["status"]["podIPs"]).iter().any(|it| it["ip"] == address.as_str()));
    there.any(|pod| list(&pod["spec"]["initContainers"][0]["ports"]).iter().any(is_named))
}

/// The fields of the rule that decided.
fn fields(snapshot: &Snapshot, policy: &PolicyName, direction: Direction, number: usize) -> Vec<String> {
    let Some((_, stored)) = object_of(snapshot, policy) else { return vec![] };
    let rule = rule(stored, direction, number);
    let given = |value: &Value| {
        let fields = value.as_object().into_iter().flatten();
        let given = fields.filter(|(_, value)| !matches!(value.as_array(), Some(list) if list.is_empty()));
        given.map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    let sides = ["source", "destination"];
    let inner = sides
        .iter()
        .flat_map(|side| given(&rule[side]).into_iter().map(move |field| format!("{side}.{field}")));
    let accounts = sides.iter().filter(|side| rule[**side]["serviceAccounts"]["selector"].is_string());
    let accounts = accounts.map(|side| format!("{side}.serviceAccounts.selector"));
    let is_blank = |side: &&str| {
        ["selector", "notSelector", "namespaceSelector"].iter().any(|field| rule[*side][field] == " ")
    };
    let blank = sides.iter().any(is_blank).then(|| "a blank selector of a rule".to_owned());
    let inner = inner.chain(accounts).chain(blank);
    given(rule).into_iter().filter(|field| !sides.contains(&field.as_str())).chain(inner).collect()
}
