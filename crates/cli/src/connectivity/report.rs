//! The table of results.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::plan::{About, From, Node, Os, PlannedCheck, To, server, service};
use crate::output;

/// The maximum number of reasons below the table; there are more in JSON.
const MAX_REASONS: usize = 20;

/// A check, and why it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckOutcome {
    pub(super) check: PlannedCheck,
    /// `None` if everything is as it should be.
    pub(super) failed: Option<String>,
}

/// The rows of the table: the checks of the same kind between the same systems.
type Row = (About, Os, Option<Os>);
/// The places of the receiver, each with a column.
const PLACES: [&str; 2] = ["same node", "other node"];

fn row(nodes: &[Node], check: &PlannedCheck) -> (Row, &'static str) {
    let os = |node: usize| nodes.get(node).map_or(Os::Linux, |node| node.os);
    let from = os(check.from.node());
    let (to, place) = match check.to {
        To::Server(node) => (Some(os(node)), PLACES[usize::from(node != check.from.node())]),
        To::Service(_) if check.about == About::Dns => (None, ANYWHERE),
        To::Service(of) => (Some(of), ANYWHERE),
    };
    ((check.about, from, to), place)
}

/// The place of what has no place: a Service.
const ANYWHERE: &str = "anywhere";

/// Prints the table and the reasons.
pub(super) fn print(nodes: &[Node], outcomes: &[CheckOutcome], skipped: &[String]) {
    let mut rows: BTreeMap<Row, BTreeMap<&str, (usize, usize)>> = BTreeMap::new();
    for outcome in outcomes {
        let (row, place) = row(nodes, &outcome.check);
        let (all, failed) = rows.entry(row).or_default().entry(place).or_default();
        *all += 1;
        *failed += usize::from(outcome.failed.is_some());
    }
    let mut lines = vec![["CHECK", "FROM", "TO", "SAME NODE", "OTHER NODE"].map(str::to_owned).to_vec()];
    for ((about, from, to), places) in rows {
        let to = to.map(|to| to.to_string()).unwrap_or_default();
        let mut line = vec![about.to_string(), from.to_string(), to];
        let result = |counts: Option<&(usize, usize)>| match counts {
            None => "-".to_owned(),
            Some((all, 0)) => format!("ok ({all})"),
            Some((all, failed)) => format!("FAILED ({failed} of {all})"),
        };
        match places.get(ANYWHERE) {
            Some(counts) => line.push(result(Some(counts))),
            None => line.extend(PLACES.map(|place| result(places.get(place)))),
        }
        lines.push(line);
    }
    output::columns(&lines);
    for skipped in skipped {
        output::line(&format!("not tested: {skipped}"));
    }
    // One cause often has many effects.
    let mut reasons: BTreeMap<(About, &str), Vec<String>> = BTreeMap::new();
    for CheckOutcome { check, failed } in outcomes {
        if let Some(why) = failed {
            let between = format!("{} → {}", named_from(nodes, check.from), named_to(nodes, check.to));
            reasons.entry((check.about, why)).or_default().push(between);
        }
    }
    for ((about, why), between) in reasons.iter().take(MAX_REASONS) {
        output::line(&format!("\n{about}, {}:\n  {why}", output::first_of(between, 3)));
    }
    if reasons.len() > MAX_REASONS {
        output::line(&format!("\nand {} more: -o json shows all", reasons.len() - MAX_REASONS));
    }
    let failed = outcomes.iter().filter(|outcome| outcome.failed.is_some()).count();
    let all = output::count(outcomes.len() as u64, "check");
    output::line(&match failed {
        0 => format!("\n{all} on {}: all is well", output::count(nodes.len() as u64, "node")),
        failed => format!("\n{failed} of {all} failed"),
    });
}

fn named_from(nodes: &[Node], from: From) -> String {
    let name = nodes.get(from.node()).map_or("?", |node| &node.name);
    match from {
        From::Pod(_) => format!("{} on {name}", from.pod()),
        From::Node(_) => format!("node {name}"),
    }
}

fn named_to(nodes: &[Node], to: To) -> String {
    match to {
        To::Server(node) => format!("{} on {}", server(node), nodes.get(node).map_or("?", |node| &node.name)),
        To::Service(os) => service(os),
    }
}

/// The results as a document: the nodes, each check, and what was not tested.
pub(super) fn document(nodes: &[Node], outcomes: &[CheckOutcome], skipped: &[String]) -> Value {
    let checks: Vec<Value> = outcomes
        .iter()
        .map(|CheckOutcome { check, failed }| {
            let ((about, from, to), place) = row(nodes, check);
            json!({
                "check": about.to_string(), "port": about.port(), "where": place,
                "fromSystem": from.to_string(), "toSystem": to.map(|to| to.to_string()),
                "from": named_from(nodes, check.from), "to": named_to(nodes, check.to),
                "ok": failed.is_none(), "reason": failed,
            })
        })
        .collect();
    let nodes: Vec<Value> =
        nodes.iter().map(|node| json!({"name": node.name, "system": node.os.to_string()})).collect();
    json!({"nodes": nodes, "checks": checks, "notTested": skipped})
}
