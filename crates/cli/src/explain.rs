//! `tortie explain`: whether a packet would pass, and why.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::bail;
use serde_json::{Value, json};
use tortie_api::manifest::second_pod;
use tortie_api::net::{Action, Direction, IpVersion, Protocol};
use tortie_api::report::{ObjectRef, ReportedCondition};
use tortie_api::{Key, Kind};
use tortie_oracle::enforced::not_enforced;
use tortie_oracle::{
    Answer, DecidedBy, Oracle, Peer, PolicyTrace, Question, QuestionError, Snapshot, Table, TierOutcome,
    TierTrace, Trace, Verdict,
};
use tortie_reach::{CLIENT_PORT, Ports, Sample};

use crate::doubts::{Doubts, NOT_CERTAIN};
use crate::output::{self, Format};
use crate::port::PortSpec;
use crate::service::{Services, Translated, Translation};
use crate::snapshot::{self, Source};

#[derive(clap::Args)]
pub(crate) struct Explain {
    /// The sender: NAMESPACE/POD, node/NAME, an address, networkset/NAMESPACE/NAME, globalnetworkset/NAME
    from: String,
    /// The receiver
    #[arg(required_unless_present = "service")]
    to: Option<String>,
    /// The protocol and port: 80 (which is tcp/80), udp/53, icmp/8 or icmp/8/0 (type and code),
    /// icmpv6/128, proto/47
    #[arg(long, default_value = "tcp/80")]
    port: String,
    /// Ask about the backends of this Service instead: NAMESPACE/NAME; the port is the Service's
    #[arg(long, value_name = "SERVICE", conflicts_with = "to")]
    service: Option<String>,
    /// The namespace of pods and of a Service that are given by their name alone
    #[arg(short, long, default_value = "default")]
    namespace: String,
    /// The source port, if rules depend on it
    #[arg(long, default_value_t = 40_000)]
    source_port: u16,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    source: Source,
}

impl Explain {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        let port = PortSpec::read(&self.port)?;
        let to =
            self.to.as_ref().map(|to| snapshot::peer(&read.snapshot, to, &self.namespace)).transpose()?;
        let from = snapshot::peer(&read.snapshot, &self.from, &self.namespace)?;
        let sibling = to.as_ref().filter(|to| **to == from).and_then(|to| sibling(&read.snapshot, to));
        if let Some(sibling) = &sibling {
            read.note(format!(
                "{from} stands for a workload that may have several pods: this answer is about another one, {sibling}; \
                 what a pod sends to its own address never leaves it"
            ));
        }
        let to = sibling.or(to);
        let asked = to.clone();
        let services = Services::of(&read.snapshot);
        let translated = match (&to, &self.service) {
            (Some(to), _) => match services.translate(&from, to, port) {
                Translation::No => None,
                Translation::To(translated) => Some(translated),
                Translation::Dropped(reason) => bail!(reason),
            },
            (None, Some(service)) => Some(services.named(service, &self.namespace, port)?),
            (None, None) => None,
        };
        let untranslated = to.as_ref().filter(|_| translated.is_none());
        let note = untranslated.and_then(|to| services.node_port_note(to, port));
        note.into_iter().for_each(|note| read.note(note));
        let snapshot = &read.snapshot;
        let questions = match (&translated, to) {
            (Some(translated), _) => questions(&from, translated, port, self.source_port),
            (None, Some(to)) => vec![question(from, to, port, self.source_port)],
            (None, None) => bail!("say to whom"),
        };
        if let (Some(translated), Format::Text) = (&translated, self.output)
            && let Some(address) = translated.given_address()
        {
            let Translated { service, backends, by_node, .. } = translated;
            let count = output::count(backends.len() as u64, "backend");
            let what = match by_node {
                Some(node) => format!("port {} of node {node} is a port of {service}", self.port),
                None => format!("{address} is an address of {service}"),
            };
            output::line(&format!("{what}: packets to it go to one of {count}\n"));
        }
        let oracle = Oracle::new(snapshot);
        let reports = snapshot::reports(snapshot);
        let not_enforced = not_enforced(snapshot);
        let doubts = Doubts::new(&read.doubts, &[snapshot]);
        let of_way = doubts.of_translation(asked.as_ref(), translated.as_ref().map(|of| &of.service));
        let (mut denied, mut uncertain) = (false, false);
        let mut documents = Vec::new();
        for question in questions {
            let answer = evaluate(&oracle, &question)?;
            let mut because = doubts.of_flow(&question.from, &question.to);
            because.extend(&of_way);
            denied |= answer.verdict == Verdict::Deny && because.is_empty();
            uncertain |= !because.is_empty();
            match self.output {
                Format::Text => {
                    show(&question, &answer, &doubts.lines(&because));
                    for (name, node) in not_enforced_in(&answer, &not_enforced) {
                        let now = verdict(without(snapshot, &not_enforced, &question)?);
                        output::line(&format!(
                            "\nhost endpoint {name} is not enforced, as node {node} is a Windows node: as things are, the packet is {now}"
                        ));
                    }
                    about(&answer, &reports).for_each(|(node, condition)| show_condition(node, condition));
                }
                Format::Json => {
                    let mut document = document_of(&question, &answer, &reports, &not_enforced);
                    document["certain"] = json!(because.is_empty());
                    document["notCertainBecause"] = doubts.places(&because);
                    if document["notEnforced"].as_array().is_some_and(|hosts| !hosts.is_empty()) {
                        document["verdictAsEnforced"] = json!(without(snapshot, &not_enforced, &question)?);
                    }
                    documents.push(document);
                }
            }
        }
        if self.output == Format::Json {
            let mut document = match <[Value; 1]>::try_from(documents) {
                Ok([document]) if translated.is_none() => document,
                Ok(documents) => json!({"backends": documents}),
                Err(documents) => json!({"backends": documents}),
            };
            if let Some(translated) = &translated {
                let field = if translated.service.kind == Kind::Pod { "pod" } else { "service" };
                document[field] = json!(translated.service.to_string());
                document["address"] = json!(translated.given_address());
            }
            read.add_to(&mut document);
            output::line(&serde_json::to_string_pretty(&document)?);
        }
        // Like grep: 0 if it passes, 1 if it does not, 2 if there is no answer; and 3 if the answer is not certain.
        Ok(match (denied, uncertain) {
            (true, _) => ExitCode::from(1),
            (false, true) => ExitCode::from(NOT_CERTAIN),
            (false, false) => ExitCode::SUCCESS,
        })
    }
}

/// The answer to one question, for programs.
fn document_of(
    question: &Question,
    answer: &Answer,
    reports: &[(String, ReportedCondition)],
    not_enforced: &BTreeMap<String, String>,
) -> Value {
    let reported =
        about(answer, reports).map(|(node, condition)| json!({"node": node, "condition": condition}));
    let hosts =
        not_enforced_in(answer, not_enforced).map(|(name, node)| json!({"hostEndpoint": name, "node": node}));
    json!({
        "question": question, "answer": answer,
        "reported": reported.collect::<Vec<_>>(), "notEnforced": hosts.collect::<Vec<_>>(),
    })
}

/// The second pod of the workload for which this pod stands in manifests, if it may have two.
fn sibling(snapshot: &Snapshot, pod: &Peer) -> Option<Peer> {
    let Peer::Pod { namespace, name } = pod else { return None };
    let key = Key::namespaced(Kind::Pod, namespace, second_pod(name));
    snapshot.get(&key)?;
    Some(Peer::Pod { namespace: key.namespace, name: key.name })
}

/// The answer about a packet of the family that its protocol belongs to.
fn evaluate(oracle: &Oracle<'_>, question: &Question) -> anyhow::Result<Answer> {
    let (family, other) = match question.protocol {
        Protocol::ICMP => (IpVersion::V4, "icmpv6/128"),
        Protocol::ICMPV6 => (IpVersion::V6, "icmp/8"),
        _ => return Ok(oracle.evaluate(question)?),
    };
    match oracle.evaluate_by(question, family) {
        Err(QuestionError::NoCommonFamily { from, to }) if oracle.evaluate(question).is_ok() => bail!(
            "{} does not belong to the family of the addresses of {from} and {to}; ask with --port {other}",
            question.protocol
        ),
        answer => Ok(answer?),
    }
}

pub(crate) fn question(from: Peer, to: Peer, packet: PortSpec, source_port: u16) -> Question {
    let PortSpec { protocol, port, icmp } = packet;
    let source_port = if protocol.has_ports() { source_port } else { 0 };
    Question { from, to, protocol, source_port, destination_port: port, via: None, by_node: None, icmp }
}

/// The questions about a packet to a Service: one for each of its backends.
pub(crate) fn questions(from: &Peer, to: &Translated, packet: PortSpec, source_port: u16) -> Vec<Question> {
    let question = |(backend, port): &(Peer, PortSpec)| Question {
        via: to.address.map(|address| (address, packet.port)),
        by_node: to.by_node.clone(),
        ..question(from.clone(), backend.clone(), *port, source_port)
    };
    to.backends.iter().map(question).collect()
}

pub(crate) const ALLOWED: Style = AnsiColor::Green.on_default();
pub(crate) const DENIED: Style = AnsiColor::Red.on_default().bold();
pub(crate) const FAINT: Style = Style::new().dimmed();

pub(crate) fn coloured(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

fn verdict(verdict: Verdict) -> String {
    match verdict {
        Verdict::Allow => coloured(ALLOWED, "allowed"),
        Verdict::Deny => coloured(DENIED, "denied"),
    }
}

/// Prints the question, the answer, why it is not certain, and the trace.
fn show(question: &Question, answer: &Answer, doubts: &[String]) {
    let named = |peer: &Peer, address: IpAddr| match peer {
        Peer::Address(own) => own.to_string(),
        peer => format!("{peer} ({address})"),
    };
    let (from, to) = (named(&question.from, answer.source), named(&question.to, answer.destination));
    let certainty = if doubts.is_empty() { "" } else { ", not certain" };
    output::line(&format!("{from} → {to} {}: {}{certainty}", shown_port(question), verdict(answer.verdict)));
    for doubt in doubts {
        output::line(&format!("  not certain, because of {doubt}"));
    }
    for note in &answer.notes {
        output::line(&format!("  {note}"));
    }
    for trace in answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress) {
        show_trace(trace);
    }
}

/// The verdict without these host endpoints.
fn without(
    snapshot: &Snapshot,
    hosts: &BTreeMap<String, String>,
    question: &Question,
) -> anyhow::Result<Verdict> {
    let left = snapshot.only(|key, _| key.kind != Kind::HostEndpoint || !hosts.contains_key(&key.name));
    Ok(evaluate(&Oracle::new(&left), question)?.verdict)
}

/// The host endpoints that decide in an answer and are not enforced, each with its node.
fn not_enforced_in<'a>(
    answer: &Answer,
    not_enforced: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    let passed: BTreeSet<String> = answer.hosts.iter().map(|trace| trace.endpoint.clone()).collect();
    not_enforced.iter().filter(move |(name, _)| passed.contains(&format!("host endpoint {name}")))
}

/// What a reader of many verdicts has to know of tunnels from pods, where these classes of ports hold such packets.
pub(crate) fn tunnels_note(
    ports: &Ports,
    classes: &[usize],
    closed_to_pods: &BTreeSet<u16>,
) -> Option<String> {
    let of = |protocol, destination_port| Sample {
        protocol,
        source_port: CLIENT_PORT,
        destination_port,
        icmp: None,
    };
    let vxlan = closed_to_pods.iter().map(|port| of(Protocol::UDP, *port));
    let ipip = Sample { source_port: 0, ..of(Protocol::IPIP, 0) };
    let is_included = |sample: Sample| !ports.is_empty() && classes.contains(&ports.class_of(&sample));
    vxlan.chain([ipip]).any(is_included).then(|| {
        let named: Vec<String> = closed_to_pods.iter().map(|port| format!("udp/{port}")).collect();
        format!(
            "VXLAN ({}) and IPIP (proto/4) from pods are dropped before policy, unless FelixConfiguration allows them; \
             that is not shown here.",
            named.join(", ")
        )
    })
}

/// A note about host endpoints that are not enforced.
pub(crate) fn not_enforced_note(snapshot: &Snapshot) -> Option<String> {
    let hosts = not_enforced(snapshot).into_iter();
    let hosts: Vec<String> = hosts.map(|(name, node)| format!("{name} (node {node})")).collect();
    (!hosts.is_empty()).then(|| {
        format!(
            "Host endpoints of Windows nodes are not enforced, though they have their say here: {}.",
            hosts.join(", ")
        )
    })
}

/// The conditions in node reports about the pods and policies in the answer: a node may deviate from the answer
/// there, or have further information (policy decision 29).
fn about<'a>(
    answer: &Answer,
    reports: &'a [(String, ReportedCondition)],
) -> impl Iterator<Item = (&'a str, &'a ReportedCondition)> {
    let mut named = BTreeSet::new();
    for trace in answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress) {
        named.insert(trace.endpoint.clone());
        let evaluated = trace.tiers.iter().flat_map(|tier| &tier.policies).chain(&trace.profiles);
        named.extend(evaluated.map(|policy| policy.policy.to_string()));
    }
    // A trace names pods without their kind.
    let name = |object: &ObjectRef| match object.kind.as_str() {
        "Pod" => format!("{}/{}", object.namespace, object.name),
        _ => object.to_string(),
    };
    let conditions = reports.iter().filter(move |(_, condition)| {
        condition.object.as_ref().is_some_and(|object| named.contains(&name(object)))
    });
    conditions.map(|(node, condition)| (node.as_str(), condition))
}

fn show_condition(node: &str, condition: &ReportedCondition) {
    output::line(&format!("\nnode {node} reports: {}", output::condition(condition)));
}

fn shown_port(question: &Question) -> String {
    match question.icmp {
        Some((icmp_type, _)) => format!("{} type {icmp_type}", question.protocol),
        None if question.protocol.has_ports() => {
            format!("{} {}", question.protocol, question.destination_port)
        }
        None => format!("protocol {}", question.protocol),
    }
}

/// The endpoint with the direction, and what decided there.
pub(crate) fn decision(trace: &Trace) -> (String, String) {
    let direction = match trace.direction {
        Direction::Egress => "out of",
        Direction::Ingress => "into",
    };
    let by = match &trace.decided_by {
        DecidedBy::Rule { policy, number } => format!("by {policy}, rule {number}"),
        DecidedBy::NotUnderstood { policy } => format!("by {policy}, which cannot be understood"),
        DecidedBy::EndOfTier { tier } => format!("at the end of tier {tier}: no rule matches"),
        DecidedBy::NoProfile => "as no policy decides and no profile allows".to_owned(),
        DecidedBy::StaticRule { node, name } => {
            format!("by the static rule {name} of node {node}, before policy")
        }
        DecidedBy::BuiltIn { rule } => format!("before policy: {rule}"),
        DecidedBy::Failsafe => "as a failsafe port, which its policies do not close".to_owned(),
        DecidedBy::Nobody if trace.reply => "as no rule allows it".to_owned(),
        DecidedBy::Nobody => "as no rule decides".to_owned(),
        DecidedBy::EndpointToHost { action } => format!("as defaultEndpointToHostAction is {action}"),
    };
    let table = match trace.table {
        Table::Normal => "",
        Table::Untracked => ", untracked",
        Table::PreDnat => ", before DNAT",
        Table::Forward => ", forwarded",
    };
    let reply = if trace.reply { ", the reply" } else { "" };
    let at_pod = if trace.at_pod { ", at the pod's interface" } else { "" };
    (format!("{direction} {}{at_pod}{table}{reply}", trace.endpoint), by)
}

fn show_trace(trace: &Trace) {
    let (place, by) = decision(trace);
    output::line(&format!("\n{place}: {} {by}", verdict(trace.verdict)));
    for tier in &trace.tiers {
        show_tier(tier);
    }
    for profile in &trace.profiles {
        show_policy(profile, "  ");
    }
}

fn show_tier(tier: &TierTrace) {
    let outcome = match tier.outcome {
        TierOutcome::Allowed => "allows",
        TierOutcome::Denied => "denies",
        TierOutcome::Passed => "passes on",
        TierOutcome::DeniedAtEnd => "no rule matches, and its end denies",
        TierOutcome::PassedAtEnd => "no rule matches, and its end passes on",
        TierOutcome::OnlyStaged => "does not count: only staged policies apply",
    };
    output::line(&format!("  tier {}: {outcome}", tier.name));
    for policy in &tier.policies {
        show_policy(policy, "    ");
    }
}

fn show_policy(policy: &PolicyTrace, indent: &str) {
    let location = |origin: &Option<String>| match origin {
        Some(origin) => coloured(FAINT, &format!(" ({origin})")),
        None => String::new(),
    };
    let staged = if policy.staged { ", staged: has no effect" } else { "" };
    output::line(&format!("{indent}{}{}{staged}", policy.policy, location(&policy.origin)));
    if let Some(problem) = &policy.not_understood {
        output::line(&format!("{indent}  cannot be understood, and denies: {problem}"));
    }
    for rule in &policy.rules {
        let outcome = match (&rule.mismatch, rule.action) {
            (None, Action::Allow) => coloured(ALLOWED, "matches"),
            (None, Action::Deny) => coloured(DENIED, "matches"),
            (None, Action::Pass | Action::Log) => "matches".to_owned(),
            (Some(mismatch), _) => {
                format!("no: {} wants {}, but {}", mismatch.field, mismatch.wanted, mismatch.found)
            }
        };
        output::line(&format!(
            "{indent}  {} {:?}: {outcome}{}",
            rule.number,
            rule.action,
            location(&rule.origin)
        ));
    }
}
