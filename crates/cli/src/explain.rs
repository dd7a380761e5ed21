//! `tortie explain`: whether a packet would pass, and why.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use serde_json::json;
use tortie_api::kubernetes::EndpointSlice;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::report::ReportedCondition;
use tortie_api::{Key, Kind, Resource};
use tortie_policy::oracle::{
    Answer, DecidedBy, Oracle, Peer, PolicyTrace, Question, Snapshot, Table, TierOutcome, TierTrace, Trace,
    Verdict,
};

use crate::output::{self, Format};
use crate::snapshot::{self, Source};

#[derive(clap::Args)]
pub(crate) struct Explain {
    /// Who sends: NAMESPACE/POD, node/NAME, an address, networkset/NAMESPACE/NAME, globalnetworkset/NAME
    from: String,
    /// To whom
    #[arg(required_unless_present = "service")]
    to: Option<String>,
    /// The protocol and port: tcp/80, udp/53, sctp/9, icmp/8 (its type), or a protocol's number
    #[arg(long, default_value = "tcp/80")]
    port: String,
    /// To the backends of this Service instead: NAMESPACE/NAME; the port is the Service's
    #[arg(long, value_name = "SERVICE", conflicts_with = "to")]
    service: Option<String>,
    /// The source port, where it matters
    #[arg(long, default_value_t = 40_000)]
    source_port: u16,
    /// How to show it
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    source: Source,
}

impl Explain {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        let snapshot = &read.snapshot;
        let from = snapshot::peer(snapshot, &self.from)?;
        let asked = port(&self.port)?;
        let asked_port = asked.1;
        let questions = match (&self.to, &self.service) {
            (Some(to), _) => vec![question(from, snapshot::peer(snapshot, to)?, asked, self.source_port)],
            (None, Some(service)) => {
                let (via, backends) = backends(snapshot, service, asked)?;
                let question = |(address, asked)| Question {
                    via: via.map(|via| (via, asked_port)),
                    ..question(from.clone(), Peer::Address(address), asked, self.source_port)
                };
                backends.into_iter().map(question).collect()
            }
            (None, None) => bail!("say to whom"),
        };
        let oracle = Oracle::new(snapshot);
        let reports = snapshot::reports(snapshot);
        let mut denied = false;
        let mut documents = Vec::new();
        for question in questions {
            let answer = oracle.evaluate(&question)?;
            denied |= answer.verdict == Verdict::Deny;
            match self.output {
                Format::Text => {
                    show(&question, &answer);
                    about(&answer, &reports).for_each(|(node, told)| show_condition(node, told));
                }
                Format::Json => {
                    let told = about(&answer, &reports);
                    let reported: Vec<_> =
                        told.map(|(node, told)| json!({"node": node, "condition": told})).collect();
                    documents.push(json!({"question": question, "answer": answer, "reported": reported}));
                }
            }
        }
        if self.output == Format::Json {
            let mut document = match <[serde_json::Value; 1]>::try_from(documents) {
                Ok([document]) if self.to.is_some() => document,
                Ok(documents) => json!({"backends": documents}),
                Err(documents) => json!({"backends": documents}),
            };
            read.add_to(&mut document);
            output::line(&serde_json::to_string_pretty(&document)?);
        }
        // Like grep: 0 where it passes, 1 where it does not, 2 where that cannot be said.
        Ok(if denied { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }
}

/// A protocol, and its port or ICMP type.
type Asked = (Protocol, u16);

/// Reads `tcp/80`, `icmp/8`, `47`.
pub(crate) fn port(text: &str) -> anyhow::Result<Asked> {
    let (name, number) = text.split_once('/').map_or((text, None), |(name, number)| (name, Some(number)));
    let protocol = Protocol::from_name(name).or_else(|| name.parse().ok().map(Protocol));
    let protocol = protocol.with_context(|| format!("--port {text:?}: {name:?} is no protocol"))?;
    let number = match number {
        None if protocol.has_ports() => bail!("--port {text:?}: a port is missing, as in {name}/80"),
        // An echo request.
        None if protocol == Protocol::ICMP => 8,
        None if protocol == Protocol::ICMPV6 => 128,
        None => 0,
        Some(number) => {
            number.parse().with_context(|| format!("--port {text:?}: {number:?} is no number"))?
        }
    };
    if is_icmp(protocol) && number > 255 {
        bail!("--port {text:?}: an ICMP type is at most 255");
    }
    Ok((protocol, number))
}

fn is_icmp(protocol: Protocol) -> bool {
    [Protocol::ICMP, Protocol::ICMPV6].contains(&protocol)
}

pub(crate) fn question(from: Peer, to: Peer, (protocol, number): Asked, source_port: u16) -> Question {
    let ported = protocol.has_ports();
    Question {
        from,
        to,
        protocol,
        source_port: if ported { source_port } else { 0 },
        destination_port: if ported { number } else { 0 },
        via: None,
        icmp: is_icmp(protocol).then(|| (u8::try_from(number).unwrap_or(u8::MAX), 0)),
    }
}

/// The backends that the Service's port leads to, each with its own port.
type Backends = Vec<(IpAddr, Asked)>;

/// The Service's own address, if it has one, and its backends.
fn backends(
    snapshot: &Snapshot,
    service: &str,
    (protocol, number): Asked,
) -> anyhow::Result<(Option<IpAddr>, Backends)> {
    let (namespace, name) = service.split_once('/').unwrap_or(("default", service));
    let key = Key::namespaced(Kind::Service, namespace, name);
    let Some(Ok(Resource::Service(found))) = snapshot.get(&key).map(|stored| &stored.resource) else {
        bail!("{key} does not exist");
    };
    let is = |of: &Option<String>| Protocol::from_name(of.as_deref().unwrap_or("TCP")) == Some(protocol);
    let port = found.spec.ports.iter().find(|port| is(&port.protocol) && port.port == number);
    let port =
        port.with_context(|| format!("{key} has no port {}/{number}", protocol.to_string().to_lowercase()))?;
    let wanted = port.name.clone().unwrap_or_default();
    let mut backends = Vec::new();
    for (slice_key, stored) in snapshot.iter().filter(|(key, _)| key.kind == Kind::EndpointSlice) {
        let Ok(Resource::EndpointSlice(slice)) = &stored.resource else { continue };
        if slice_key.namespace == namespace && slice.service() == Some(name) {
            backends.extend(of_port(slice, &wanted, protocol));
        }
    }
    if backends.is_empty() {
        bail!("{key} has no backends for port {number}");
    }
    Ok((found.cluster_ips().first().copied(), backends))
}

fn of_port(slice: &EndpointSlice, name: &str, protocol: Protocol) -> Vec<(IpAddr, Asked)> {
    let mut slice = slice.clone();
    slice.ports.retain(|port| port.name.as_deref().unwrap_or_default() == name);
    let backends = slice.backends().filter(|(_, of, _)| *of == protocol);
    backends.map(|(address, protocol, port)| (address, (protocol, port))).collect()
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

/// The question, the answer, and what led to it, for a reader.
fn show(question: &Question, answer: &Answer) {
    let named = |peer: &Peer, address: IpAddr| match peer {
        Peer::Address(_) => address.to_string(),
        peer => format!("{peer} ({address})"),
    };
    let (from, to) = (named(&question.from, answer.source), named(&question.to, answer.destination));
    output::line(&format!("{from} → {to} {}: {}", shown_port(question), verdict(answer.verdict)));
    for note in &answer.notes {
        output::line(&format!("  {note}"));
    }
    for trace in answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress) {
        show_trace(trace);
    }
}

/// What nodes report of the pods and policies that the answer names: there a node does otherwise than is said here, or
/// knows more (semantics 29).
fn about<'a>(
    answer: &Answer,
    reports: &'a [(String, ReportedCondition)],
) -> impl Iterator<Item = (&'a str, &'a ReportedCondition)> {
    let mut named = BTreeSet::new();
    for trace in answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress) {
        named.insert(trace.endpoint.clone());
        let asked = trace.tiers.iter().flat_map(|tier| &tier.policies).chain(&trace.profiles);
        named.extend(asked.map(|policy| policy.policy.to_string()));
    }
    let told = reports.iter().filter(move |(_, condition)| named.contains(&condition.object));
    told.map(|(node, condition)| (node.as_str(), condition))
}

fn show_condition(node: &str, condition: &ReportedCondition) {
    let ReportedCondition { object, reason, message } = condition;
    output::line(&format!("\nnode {node} reports of {object}: {reason}: {message}"));
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

fn show_trace(trace: &Trace) {
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
    let verdict = verdict(trace.verdict);
    output::line(&format!("\n{direction} {}{table}{reply}: {verdict} {by}", trace.endpoint));
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
    let place = |origin: &Option<String>| match origin {
        Some(origin) => coloured(FAINT, &format!(" ({origin})")),
        None => String::new(),
    };
    let staged = if policy.staged { ", staged: has no effect" } else { "" };
    output::line(&format!("{indent}{}{}{staged}", policy.policy, place(&policy.origin)));
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
            place(&rule.origin)
        ));
    }
}
