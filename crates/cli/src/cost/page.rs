//! Costs as text.

use tortie_windows::Tally;

use super::{CostReport, DEAREST, RuleTotal, Subject, direction_name, entries};
use crate::output;

/// The maximum number of rules in the advice.
const MAX_RULES: usize = 3;

pub(super) fn print(found: &CostReport) {
    output::line(&format!("{}:", title(found)));
    variants(found);
    match &found.subject {
        Subject::Pod { .. } => {
            output::line("\nby policy, in evaluation order:");
            policies(found, usize::MAX);
            output::line("\nby rule, as what would go away without it:");
            rules(found);
        }
        Subject::Policy(_) => {
            output::line("\nby rule, as what would go away without it:");
            rules(found);
            output::line("\nthe pods that it selects, the dearest first:");
            pods(found);
        }
        Subject::Everything => {
            output::line("\nthe dearest pods:");
            pods(found);
            output::line("\nthe dearest policies:");
            policies(found, DEAREST);
        }
    }
    output::line("");
    advice(found);
    notes(found);
}

fn title(found: &CostReport) -> String {
    let pods = output::count(found.pods.len() as u64, "pod");
    let scope = match found.windows {
        0 => "as if on Windows nodes".to_owned(),
        nodes => format!("on {}", output::count(nodes as u64, "Windows node")),
    };
    match &found.subject {
        Subject::Everything => format!("{pods} {scope}"),
        Subject::Policy(policy) => {
            format!("{pods} {scope} that {policy} selects, with all of their policies")
        }
        Subject::Pod { namespace, name } => format!("Pod {namespace}/{name}, on a Windows node"),
    }
}

fn variants(found: &CostReport) {
    let total = &found.total;
    let least = if total.cut { "at least " } else { "" };
    let row = |name: &str, tally: &Tally, sets: String, least: &str| {
        let mut row = vec![name.to_owned(), format!("{least}{}", tally.acls)];
        row.extend([tally.addresses, tally.ports].map(|count| format!("{least}{count}")));
        row.extend([format!("{least}{}", tally.pairs), sets]);
        row
    };
    let sets = match total.set_count {
        0 => "-".to_owned(),
        count => format!("{count}, of {}", output::count(total.members as u64, "member")),
    };
    output::columns(&[
        ["  ", "ACLs", "addresses in them", "ports", "pairs", "sets"].map(str::to_owned).to_vec(),
        row("  HNS before 13 (Windows Server 2019)", &total.lists, "-".to_owned(), ""),
        row("  HNS 13 and later (Windows Server 2022), with sets", &total.sets, sets, ""),
        row("  a naive expansion (a model of Calico's)", &total.naive, "-".to_owned(), least),
    ]);
}

const HEADER: [&str; 5] = ["ACLs", "addresses", "ACLs with sets", "naive: ACLs", "addresses"];

fn tallies(lists: &Tally, sets: &Tally, naive: &Tally) -> [String; 5] {
    [lists.acls, lists.addresses, sets.acls, naive.acls, naive.addresses].map(|count| count.to_string())
}

fn pods(found: &CostReport) {
    let header = ["  pod", "node"].into_iter().chain(HEADER).map(str::to_owned).collect();
    let rows = found.pods.iter().take(DEAREST).map(|pod| {
        let name = format!("  {}/{}", pod.id.namespace, pod.id.pod);
        let node = if pod.node.is_empty() { "-".to_owned() } else { pod.node.clone() };
        let counts = tallies(&pod.cost.lists, &pod.cost.sets, &pod.cost.naive);
        [name, node].into_iter().chain(counts).collect()
    });
    output::columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>());
    rest(found.pods.len(), DEAREST);
}

fn policies(found: &CostReport, most: usize) {
    let header = ["  policy", "pods"].into_iter().chain(HEADER).map(str::to_owned).collect();
    let rows = found.policies.iter().take(most).map(|total| {
        let counts = tallies(&total.lists, &total.sets, &total.naive);
        [format!("  {}", total.policy), total.pods.to_string()].into_iter().chain(counts).collect()
    });
    output::columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>());
    rest(found.policies.len(), most);
}

fn rest(all: usize, most: usize) {
    if all > most {
        output::line(&format!("  and {} more; -o json has them all", all - most));
    }
}

fn rules(found: &CostReport) {
    let header = ["  rule", "ACLs", "addresses", "ACLs with sets", "because"].map(str::to_owned).to_vec();
    let rows = found.rules.iter().map(|rule| {
        let counts = [rule.lists.acls, rule.lists.addresses, rule.sets.acls].map(|count| count.to_string());
        [format!("  {}{}", named(rule), rule.location)]
            .into_iter()
            .chain(counts)
            .chain([rule.because.to_string()])
            .collect()
    });
    output::columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>());
}

/// `rule 2 (ingress) of NetworkPolicy shop/web`.
fn named(rule: &RuleTotal) -> String {
    format!("rule {} ({}) of {}", rule.number, direction_name(rule.direction), rule.policy)
}

/// Which rules to change to save most.
fn advice(found: &CostReport) {
    let (pods, all) = &found.looked_at;
    let worth = found.rules.iter().filter(|rule| entries(rule.lists) > 0).take(MAX_RULES);
    let mut worth = worth.peekable();
    if worth.peek().is_none() {
        output::line("There is no rule to change: none costs anything by itself.");
        return;
    }
    let where_ = match (&found.subject, pods) {
        (Subject::Pod { .. }, _) => String::new(),
        (Subject::Everything, pods) if *pods < found.pods.len() => format!(" of the {pods} dearest pods"),
        (_, 1) => " of the pod".to_owned(),
        (_, pods) => format!(" of the {pods} pods"),
    };
    output::line("To save most, change what costs most (HNS before 13):");
    for rule in worth {
        let mut parts = Vec::new();
        if rule.lists.acls > 0 {
            parts.push(format!("{} of {} ACLs", rule.lists.acls, all.acls));
        }
        if rule.lists.addresses > 0 {
            parts.push(format!("{} of {} addresses", rule.lists.addresses, all.addresses));
        }
        output::line(&format!(
            "  {} costs {}{where_}: {}{}",
            named(rule),
            parts.join(" and "),
            rule.because,
            rule.location
        ));
    }
}

fn notes(found: &CostReport) {
    output::line("");
    if found.windows == 0 {
        output::line("There is no Windows node, so all pods are treated as if they were on Windows nodes.");
    }
    if matches!(found.subject, Subject::Everything) && found.looked_at.0 < found.pods.len() {
        output::line(
            "Rules were analysed only for the most expensive pods: name a policy or a pod to see its rules.",
        );
    }
    output::line(
        "pairs: what the lists mean where each pair of addresses and ports is a rule of its own. The naive expansion is \
         computed, not measured: docs/windows-policy.md says how.",
    );
    if found.total.left_out > 0 {
        let rules = output::count(found.total.left_out as u64, "rule");
        output::line(&format!(
            "The naive expansion leaves out {rules} (counted once for each pod) that it cannot say: negations, types of ICMP."
        ));
    }
    let mut messages: Vec<String> =
        found.pods.iter().flat_map(|pod| &pod.cost.conditions).map(ToString::to_string).collect();
    messages.sort_unstable();
    messages.dedup();
    messages.iter().take(DEAREST).for_each(|message| output::line(&format!("note: {message}")));
}
