//! `tortie preview`: which verdicts a change alters.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tortie_api::net::IpVersion;
use tortie_oracle::{Answer, DecidedBy, Oracle, Peer, Question, QuestionError, Snapshot, Verdict};
use tortie_reach::{CLIENT_PORT, Change, Difference, Reason, Scope, Why, group_name, summary};

use crate::doubts::{Doubts, NOT_CERTAIN};
use crate::explain::{self, ALLOWED, DENIED, FAINT, coloured};
use crate::filenames::{self, Filenames};
use crate::output::Format;
use crate::port::PortSpec;
use crate::service::{Services, Translation};
use crate::snapshot::{Read, Strictness};
use crate::store::StoreArguments;
use crate::{decided, manifests, output, planned, snapshot, vxlan_ports};

#[derive(clap::Args)]
#[command(mut_arg("files", |files| {
    files
        .help("The change: manifests as for apply, files, folders of them, or - for standard input")
        .required_unless_present_any(["delete", "staged", "kustomize"])
}))]
pub(crate) struct Preview {
    #[command(flatten)]
    change: Filenames,
    /// The cluster before the change: manifests, or the word cluster for a datastore, which is the default
    #[arg(long = "in", value_name = "DIR")]
    within: Vec<PathBuf>,
    /// An object to delete: KIND/NAMESPACE/NAME, or KIND/NAME for kinds without namespaces
    #[arg(long, value_name = "OBJECT")]
    delete: Vec<String>,
    /// Enforce every staged policy
    #[arg(long)]
    staged: bool,
    /// Only these flows: one JSON object per line, as {"from": "web/a", "to": "10.0.0.7", "port": "tcp/80", "count":
    /// 3}
    #[arg(long, value_name = "FILE")]
    flows: Option<PathBuf>,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    strictness: Strictness,
    #[command(flatten)]
    store: StoreArguments,
}

/// What a preview says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Previewed {
    /// No verdict changes.
    Same,
    /// Whether one changes is not certain.
    Uncertain,
    /// One certainly changes.
    Changes,
}

impl Preview {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let wrong = Ok(ExitCode::from(2));
        let Some(read) = self.before()? else { return wrong };
        let before = &read.snapshot;
        let objects = match self.change.is_empty() {
            true => Vec::new(),
            false => match manifests::read_all(&self.change, None)? {
                Some(objects) => objects,
                None => return wrong,
            },
        };
        let after = planned::after(before, objects, &self.delete, self.staged, self.is_within_manifests())?;
        let outcome = match &self.flows {
            Some(file) => self.flows(file, &read, &after)?,
            None => everything(&read, &after, self.output)?,
        };
        // Like diff: 0 if nothing changes, 1 if something does, 2 if there is no answer; and 3 if the answer is not certain.
        Ok(match outcome {
            Previewed::Same => ExitCode::SUCCESS,
            Previewed::Changes => ExitCode::from(1),
            Previewed::Uncertain => ExitCode::from(NOT_CERTAIN),
        })
    }

    fn is_within_manifests(&self) -> bool {
        self.within.iter().any(|path| path != Path::new("cluster"))
    }

    fn before(&self) -> anyhow::Result<Option<Read>> {
        match self.within.as_slice() {
            [] => snapshot::of_store(&self.store).map(Some),
            [only] if only == Path::new("cluster") => snapshot::of_store(&self.store).map(Some),
            files => snapshot::of_files(&Filenames::new(files), &self.strictness),
        }
    }

    fn flows(&self, file: &Path, read: &Read, after: &Snapshot) -> anyhow::Result<Previewed> {
        let before = &read.snapshot;
        let (flows, mut left_out) = read_flows(file, before, after)?;
        let (was, is) = (Oracle::new(before), Oracle::new(after));
        let doubts = Doubts::new(&read.doubts, &[before, after]);
        let mut outcome = Previewed::Same;
        let mut documents = Vec::new();
        let (mut changed, mut count) = (0, 0);
        for (questions, flow) in &flows {
            count += flow.count;
            let changes = questions.iter().map(|question| of_question((&was, &is), question));
            let changes = changes.collect::<anyhow::Result<Option<Vec<_>>>>()?;
            left_out += if changes.is_none() { flow.count } else { 0 };
            let changes = changes.unwrap_or_default().concat();
            let because = of_questions(&doubts, questions);
            outcome = outcome.max(match (because.is_empty(), changes.is_empty()) {
                (true, true) => Previewed::Same,
                (true, false) => Previewed::Changes,
                (false, _) => Previewed::Uncertain,
            });
            let certainty = if because.is_empty() { "" } else { ", not certain" };
            changed += if changes.is_empty() { 0 } else { flow.count };
            for (scope, one, other) in changes {
                match self.output {
                    Format::Json => documents.push(json!({
                        "from": flow.from, "to": flow.to, "port": flow.port, "count": flow.count,
                        "ways": scope.to_string(),
                        "certain": because.is_empty(), "notCertainBecause": doubts.places(&because),
                        "before": of_why(&one, before), "after": of_why(&other, after),
                    })),
                    Format::Text => {
                        let Flow { from, to, port, .. } = flow;
                        let flows = output::count(flow.count, "flow");
                        let verdicts = format!("{} → {}", word(one.verdict), word(other.verdict));
                        output::line(&format!(
                            "{from} → {to}{} {port}: {verdicts}, {flows}{certainty}",
                            shown(scope)
                        ));
                        show_why(&[one], &other, before, after);
                    }
                }
            }
        }
        match self.output {
            Format::Json => {
                let mut document =
                    json!({"flows": count, "changed": changed, "leftOut": left_out, "changes": documents});
                read.add_to(&mut document);
                output::line(&serde_json::to_string_pretty(&document)?);
            }
            Format::Text => {
                output::line(&format!("{changed} of {} meet another verdict", output::count(count, "flow")));
                if left_out > 0 {
                    output::line(&format!(
                        "left out, as an end is not there both before and after: {}",
                        output::count(left_out, "flow")
                    ));
                }
            }
        }
        Ok(outcome)
    }
}

/// The doubts about the questions of one flow.
fn of_questions(doubts: &Doubts<'_>, questions: &[Question]) -> BTreeSet<usize> {
    let mut because = BTreeSet::new();
    for question in questions {
        because.extend(doubts.of_flow(&question.from, &question.to));
        // A packet that no Service translates could be translated by one that was not read.
        let asked = question.via.map(|(address, _)| Peer::Address(address));
        because.extend(doubts.of_translation(Some(asked.as_ref().unwrap_or(&question.to)), None));
    }
    because
}

/// Prints every change.
fn everything(read: &Read, after: &Snapshot, format: Format) -> anyhow::Result<Previewed> {
    match format {
        Format::Text => Ok(print_changes(read, after)),
        Format::Json => {
            let document = changes_document(read, after);
            output::line(&serde_json::to_string_pretty(&document)?);
            let changes = document["changes"].as_array().into_iter().flatten();
            let certain = changes.map(|change| change["certain"] == true);
            Ok(outcome(certain, &Doubts::new(&read.doubts, &[&read.snapshot, after])))
        }
    }
}

/// The outcome of these changes, each of which is certain or not.
fn outcome(mut certain: impl Iterator<Item = bool>, doubts: &Doubts<'_>) -> Previewed {
    match (certain.any(|is_certain| is_certain), doubts.all().is_empty()) {
        (true, _) => Previewed::Changes,
        (false, true) => Previewed::Same,
        (false, false) => Previewed::Uncertain,
    }
}

/// Prints which verdicts change, by groups of pods.
pub(crate) fn print_changes(read: &Read, after: &Snapshot) -> Previewed {
    let before = &read.snapshot;
    let change = Change::new(before, after);
    let differences = change.differences();
    let doubts = Doubts::new(&read.doubts, &[before, after]);
    show(&change, &differences, before, after, &doubts);
    outcome(differences.iter().map(|difference| of_change(&change, difference, &doubts).is_empty()), &doubts)
}

/// The doubts about a change.
fn of_change(change: &Change<'_>, difference: &Difference, doubts: &Doubts<'_>) -> BTreeSet<usize> {
    let ends = difference.from.iter().chain(&difference.to);
    ends.filter_map(|class| change.classes.all().get(*class))
        .flat_map(|class| doubts.of_class(class))
        .collect()
}

/// Which verdicts change, in JSON.
pub(crate) fn changes_document(read: &Read, after: &Snapshot) -> Value {
    let before = &read.snapshot;
    let change = Change::new(before, after);
    let differences = change.differences();
    let doubts = Doubts::new(&read.doubts, &[before, after]);
    let one = |difference| of_difference(&change, difference, (before, after), &doubts);
    let mut document = json!({"changes": differences.iter().map(one).collect::<Vec<_>>()});
    read.add_to(&mut document);
    document
}

/// One line of a file of flows.
#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
struct Flow {
    from: String,
    to: String,
    port: String,
    #[serde(default = "once")]
    count: u64,
}

fn once() -> u64 {
    1
}

/// Flows, each with its question, or with one for each backend of its Service.
type Flows = Vec<(Vec<Question>, Flow)>;

/// The flows, with equal ones counted together, and how many have a missing end.
fn read_flows(file: &Path, before: &Snapshot, after: &Snapshot) -> anyhow::Result<(Flows, u64)> {
    let text = filenames::read(file)?;
    let mut flows: BTreeMap<(String, String, String), u64> = BTreeMap::new();
    let (mut read, mut left_out) = (Vec::new(), 0);
    let services = Services::of(after);
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let location = || format!("{}:{number}", file.display());
        let flow: Flow = serde_json::from_str(line).with_context(|| format!("{}: {line}", location()))?;
        let port = PortSpec::read(&flow.port).with_context(location)?;
        let peer = |text: &str| {
            let found = snapshot::peer(before, text, "default");
            found.or_else(|_| snapshot::peer(after, text, "default")).with_context(location)
        };
        let (from, to) = (peer(&flow.from)?, peer(&flow.to)?);
        let questions = match services.translate(&from, &to, port) {
            Translation::To(translated) => explain::questions(&from, &translated, port, CLIENT_PORT),
            Translation::No => vec![explain::question(from, to, port, CLIENT_PORT)],
            // No policy decides about it.
            Translation::Dropped(_) => {
                left_out += flow.count;
                continue;
            }
        };
        let key = (flow.from.clone(), flow.to.clone(), flow.port.clone());
        match flows.get_mut(&key) {
            Some(count) => *count += flow.count,
            None => {
                flows.insert(key, flow.count);
                read.push((questions, flow));
            }
        }
    }
    if read.is_empty() && left_out == 0 {
        bail!("{}: there are no flows", file.display());
    }
    for (_, flow) in &mut read {
        let key = (flow.from.clone(), flow.to.clone(), flow.port.clone());
        flow.count = flows.get(&key).copied().unwrap_or(flow.count);
    }
    Ok((read, left_out))
}

/// The changes of a flow, for one family or both; `None` if an end does not exist both before and after.
fn of_question(
    (was, is): (&Oracle<'_>, &Oracle<'_>),
    question: &Question,
) -> anyhow::Result<Option<Vec<(Scope, Why, Why)>>> {
    let mut answers = Vec::new();
    for family in [IpVersion::V4, IpVersion::V6] {
        if let (Ok(one), Ok(other)) = (was.evaluate_by(question, family), is.evaluate_by(question, family)) {
            answers.push((family, Why::of(&one), Why::of(&other)));
        }
    }
    if answers.is_empty() {
        // If the ends have no common family, check that they exist.
        return Ok(judged(was, question)?.and(judged(is, question)?).map(|_| Vec::new()));
    }
    let alike =
        answers.iter().all(|(_, one, other)| Some((one, other)) == answers.first().map(|(_, a, b)| (a, b)));
    let of = |(family, one, other): (IpVersion, Why, Why)| {
        (Scope { family: Some(family).filter(|_| !alike), placement: None }, one, other)
    };
    let kept = if alike { 1 } else { answers.len() };
    let changes = answers.into_iter().take(kept).map(of);
    Ok(Some(changes.filter(|(_, one, other)| one.verdict != other.verdict).collect()))
}

/// The answer; `None` if an end does not exist.
fn judged(oracle: &Oracle<'_>, question: &Question) -> anyhow::Result<Option<Answer>> {
    match oracle.evaluate(question) {
        Ok(answer) => Ok(Some(answer)),
        Err(
            QuestionError::UnknownPod { .. }
            | QuestionError::EndedPod { .. }
            | QuestionError::UnknownNode(_)
            | QuestionError::NoAddress(_),
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn word(verdict: Verdict) -> String {
    match verdict {
        Verdict::Allow => coloured(ALLOWED, "allowed"),
        Verdict::Deny => coloured(DENIED, "denied"),
    }
}

/// More changes are printed by rule only.
const MAX_CHANGES: usize = 40;
/// The maximum number of printed reasons.
const MAX_REASONS: usize = 3;

fn show(
    change: &Change<'_>,
    differences: &[Difference],
    before: &Snapshot,
    after: &Snapshot,
    doubts: &Doubts<'_>,
) {
    let every: Vec<usize> = (0..change.classes.ports().len()).collect();
    let short = if differences.len() > MAX_CHANGES { summary(differences) } else { differences.to_vec() };
    for difference in &short {
        let one = difference.before.first().map_or(Verdict::Deny, |why| why.verdict);
        output::line(&format!(
            "{} → {}{}: {}",
            group_name(&change.classes, &difference.from),
            group_name(&change.classes, &difference.to),
            shown(difference.scope),
            change.classes.ports().named(&difference.ports, &every),
        ));
        let pairs = match (difference.pairs, difference.parts) {
            (1, 1) => "1 pair".to_owned(),
            (pairs, 1) => format!("{pairs} pairs"),
            (pairs, parts) => {
                format!("in {parts} parts, {pairs} pairs; not all of these ends on all of these ports")
            }
        };
        let because = of_change(change, difference, doubts);
        let certainty = if because.is_empty() { "" } else { ", not certain" };
        output::line(&format!("  {} → {}, {pairs}{certainty}", word(one), word(difference.after.verdict)));
        show_why(&difference.before, &difference.after, before, after);
    }
    match differences {
        [] if !doubts.all().is_empty() => {
            output::line("nothing changes in what was read; what was not read (above) could change that");
        }
        [] => output::line("nothing changes: every flow keeps its verdict"),
        _ => {
            let of = |verdict| {
                let of = differences.iter().filter(|difference| difference.after.verdict == verdict);
                of.count()
            };
            let changed_ports: Vec<usize> =
                differences.iter().flat_map(|difference| difference.ports.iter().copied()).collect();
            let mut closed = vxlan_ports::closed_to_pods(before);
            closed.extend(vxlan_ports::closed_to_pods(after));
            explain::tunnels_note(change.classes.ports(), &changed_ports, &closed)
                .iter()
                .for_each(|note| output::line(note));
            if differences.iter().any(by_hosts) {
                output::line(
                    "Host endpoints are included; the report of a node shows whether it enforces them.",
                );
                explain::not_enforced_note(after).iter().for_each(|note| output::line(note));
            }
            output::line(&format!(
                "{}: {} to allowed, {} to denied",
                output::count(differences.len() as u64, "change"),
                of(Verdict::Allow),
                of(Verdict::Deny)
            ));
            if short.len() < differences.len() {
                output::line("They are too many to list, so they are grouped by rule; -o json lists each.");
            }
        }
    }
}

/// `, IPv6 between nodes`; nothing if it applies to all scopes.
fn shown(scope: Scope) -> String {
    if scope == Scope::default() { String::new() } else { format!(", {scope}") }
}

fn by_hosts(difference: &Difference) -> bool {
    let by_host = |Reason { stop, decider }: &Reason| {
        stop.is_host() && !matches!(decider.by, DecidedBy::EndpointToHost { .. })
    };
    difference.before.iter().chain([&difference.after]).flat_map(|why| &why.by).any(by_host)
}

fn show_why(one: &[Why], other: &Why, before: &Snapshot, after: &Snapshot) {
    output::line(&format!("    {} {}", coloured(FAINT, "now:   "), reason(other, after)));
    let mut reasons: Vec<String> = Vec::new();
    for reason in one.iter().map(|why| reason(why, before)) {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    for reason in reasons.iter().take(MAX_REASONS) {
        output::line(&format!("    {} {reason}", coloured(FAINT, "before:")));
    }
    if reasons.len() > MAX_REASONS {
        let more = output::count((reasons.len() - MAX_REASONS) as u64, "other reason");
        output::line(&format!("    {} and {more}", coloured(FAINT, "before:")));
    }
}

/// What decided, and at which end.
fn reason(why: &Why, snapshot: &Snapshot) -> String {
    // Next to a rule, it is not worth saying that no policy at the other end denied.
    let by_policy = |reason: &Reason| {
        let of_profile =
            matches!(&reason.decider.by, DecidedBy::Rule { policy, .. } if policy.kind == "Profile");
        reason.stop.is_host() || !of_profile
    };
    let any = why.by.iter().any(by_policy);
    if !any && why.verdict == Verdict::Allow && !why.by.is_empty() {
        return "no policy: the profiles of the namespaces allow".to_owned();
    }
    let ends: Vec<String> = why
        .by
        .iter()
        .filter(|reason| !any || by_policy(reason))
        .map(|reason| format!("{}: {}", decided::stop_name(reason.stop), decided::by(snapshot, reason)))
        .collect();
    if ends.is_empty() { "no policy is asked".to_owned() } else { ends.join("; ") }
}

fn of_difference(
    change: &Change<'_>,
    difference: &Difference,
    (before, after): (&Snapshot, &Snapshot),
    doubts: &Doubts<'_>,
) -> Value {
    let because = of_change(change, difference, doubts);
    let every: Vec<usize> = (0..change.classes.ports().len()).collect();
    let names = |of: &[usize]| -> Vec<String> {
        of.iter()
            .filter_map(|class| change.classes.all().get(*class))
            .map(|class| class.name.clone())
            .collect()
    };
    json!({
        "from": names(&difference.from), "to": names(&difference.to), "pairs": difference.pairs,
        "ways": difference.scope.to_string(),
        "certain": because.is_empty(), "notCertainBecause": doubts.places(&because),
        "ports": change.classes.ports().named(&difference.ports, &every),
        "before": difference.before.iter().map(|why| of_why(why, before)).collect::<Vec<_>>(),
        "after": of_why(&difference.after, after),
    })
}

fn of_why(why: &Why, snapshot: &Snapshot) -> Value {
    let by = why.by.iter().map(|reason| (reason.stop, decided::by(snapshot, reason)));
    let mut document = decided::by_stop(by);
    document["verdict"] = json!(why.verdict);
    document
}
