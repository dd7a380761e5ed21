//! Renders policies as lines. Each line becomes one nftables rule once its position and the target of Pass are known.

use std::collections::BTreeSet;

use tortie_api::calico::FilterDenyAction;
use tortie_api::net::{Action, Direction};
use tortie_api::report::ObjectRef;
use tortie_kernel::nftables::{Expr, Reject, Rule, Verdict, rule_length};
use tortie_policy::program::{PolicyId, PolicyRules, Rule as PolicyRule, SetId};

use super::fold::fold;
use super::matches::conjunctions;
use super::packet_test::{Conjunction, Test, exprs};
use super::sets::digest;
use super::slots::Stage;

/// The nflog groups of Log rules, as in Calico (`felix/rules/rule_defs.go`).
const LOG_GROUP_INGRESS: u16 = 1;
const LOG_GROUP_EGRESS: u16 = 2;

/// `NF_LOG_PREFIXLEN` without its NUL.
const MAX_PREFIX_LENGTH: usize = 127;

/// The maximum number of nftables rules of one direction of a policy. Evaluating that many takes milliseconds for
/// each new flow.
const MAX_RULES: usize = 20_000;
/// The maximum size of the messages of one direction of a policy, in bytes.
const MAX_BYTES: usize = 8 << 20;

/// The rendered rules of one direction of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Lines {
    /// The lines, in order.
    pub lines: Vec<Line>,
    /// The sets that the rules name.
    pub sets: BTreeSet<SetId>,
    /// The number of networks in the lines.
    pub networks: usize,
    /// Why the rules cannot be expressed; the policy then denies everything.
    pub problem: Option<Problem>,
}

/// Why something cannot be expressed as nftables rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Problem {
    /// The policy, and the rule if it is one; absent if it is the whole program.
    pub object: Option<ObjectRef>,
    pub message: String,
}

/// One future nftables rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub action: Action,
    pub tests: Conjunction,
    /// Its origin, as in `NetworkPolicy demo/web Ingress rule 1, 2`.
    pub comment: String,
    /// The log expression, if it is a Log rule.
    pub log: Option<Expr>,
}

/// The limits of a policy.
pub(super) struct Limits<'a> {
    /// The number of bytes that fit in one transaction.
    pub room: usize,
    /// Whether a set has more members than the kernel gets.
    pub is_too_large: &'a dyn Fn(&SetId) -> bool,
}

impl Lines {
    /// The lines of a policy's rules. `exists` says whether an nftables set exists.
    pub(super) fn new(
        id: &PolicyId,
        rules: Option<&PolicyRules>,
        direction: Direction,
        exists: &dyn Fn(&str) -> bool,
        limits: &Limits<'_>,
    ) -> Self {
        let Some(rules) = rules else { return Self::deny(problem(id, "it is not known")) };
        let rules = rules.direction(direction);
        let sets = rules.iter().flat_map(PolicyRule::set_ids).cloned().collect();
        let names_too_large = |rule: &PolicyRule| rule.set_ids().any(limits.is_too_large);
        if let Some(index) = rules.iter().position(names_too_large) {
            let object = Some(ObjectRef::from(id).rule(direction, index));
            let message =
                "its selector has more networks or addresses than a set may have: let it select fewer"
                    .to_owned();
            return Self { sets, ..Self::deny(Problem { object, message }) };
        }
        match lines(id, rules, direction, exists).and_then(|lines| fitting(id, lines, limits.room)) {
            Ok(lines) => {
                let tests = lines.iter().flat_map(|line| &line.tests);
                let networks = tests.map(Test::networks).sum();
                Self { lines, sets, networks, problem: None }
            }
            Err(problem) => Self { sets, ..Self::deny(problem) },
        }
    }

    /// A policy that denies everything, because of a problem.
    pub(super) fn deny(problem: Problem) -> Self {
        let line = Line::all(Action::Deny, "closed: the policy cannot be enforced");
        Self { lines: vec![line], sets: BTreeSet::new(), networks: 0, problem: Some(problem) }
    }

    /// Whether one of the lines is a Pass.
    pub(super) fn passes(&self) -> bool {
        self.lines.iter().any(|line| line.action == Action::Pass)
    }
}

impl Line {
    /// A line that matches every packet.
    pub(super) fn all(action: Action, comment: &str) -> Self {
        Self { action, tests: Vec::new(), comment: comment.to_owned(), log: None }
    }

    /// The nftables rules: one, or two if a rejection depends on the protocol.
    pub(super) fn rules(&self, stage: Stage, deny: FilterDenyAction, pass: Option<&Verdict>) -> Vec<Rule> {
        let rule = |last: &[Expr]| Rule::new([&exprs(&self.tests), last].concat(), &self.comment);
        let verdict = |verdict: Verdict| vec![rule(&[Expr::Verdict(verdict)])];
        match (self.action, pass) {
            (Action::Allow, _) => vec![rule(&stage.allow())],
            (Action::Pass, Some(pass)) => verdict(pass.clone()),
            (Action::Log, _) => self.log.iter().map(|log| rule(std::slice::from_ref(log))).collect(),
            // Pass always has a target here; without one, closing is right.
            (Action::Deny | Action::Pass, _) => match deny {
                FilterDenyAction::Reject if stage.can_reject() => rejections().map(|last| rule(&last)).into(),
                FilterDenyAction::Drop | FilterDenyAction::Reject => verdict(Verdict::Drop),
            },
        }
    }
}

/// The chain of one direction of a policy. Packets that it neither allows nor denies return from it.
pub(super) fn chain_name(id: &PolicyId, direction: Direction, stage: Stage) -> String {
    let direction = match direction {
        Direction::Ingress => "i",
        Direction::Egress => "e",
    };
    format!("p{}{direction}-{}", stage.of_policies().letter(), digest(id.to_string().as_bytes()))
}

/// A problem of a policy as a whole.
pub(super) fn problem(id: &PolicyId, message: impl Into<String>) -> Problem {
    Problem { object: Some(id.into()), message: message.into() }
}

/// A reset for TCP, and the message "prohibited" for what is left.
fn rejections() -> [Vec<Expr>; 2] {
    let tcp = Test::Protocol { numbers: vec![6], invert: false };
    [[tcp.exprs(), vec![Expr::Reject(Reject::TcpReset)]].concat(), vec![Expr::Reject(Reject::Prohibited)]]
}

/// Consecutive rules with the same action are merged; Log rules keep their position.
fn lines(
    id: &PolicyId,
    rules: &[PolicyRule],
    direction: Direction,
    exists: &dyn Fn(&str) -> bool,
) -> Result<Vec<Line>, Problem> {
    let name = format!("{id} {direction:?} rule");
    let mut lines = Vec::new();
    let numbered: Vec<_> = rules.iter().enumerate().collect();
    for run in numbered.chunk_by(|(_, one), (_, next)| one.action == next.action && one.action != Action::Log)
    {
        let mut all = Vec::new();
        for (index, rule) in run {
            let number = index + 1;
            let tests = conjunctions(rule, exists).map_err(|_| Problem {
                object: Some(ObjectRef::from(id).rule(direction, *index)),
                message: "it has more alternatives than can be written as nftables rules".to_owned(),
            })?;
            all.extend(tests.into_iter().map(|tests| (tests, vec![number])));
        }
        let Some(action) = run.first().map(|(_, rule)| rule.action) else { continue };
        let log = (action == Action::Log).then(|| log_expr(id, direction));
        lines.extend(fold(all).into_iter().map(|(tests, numbers)| Line {
            action,
            tests,
            comment: format!("{name} {}", listed(numbers)),
            log: log.clone(),
        }));
    }
    Ok(lines)
}

fn log_expr(id: &PolicyId, direction: Direction) -> Expr {
    let group = match direction {
        Direction::Ingress => LOG_GROUP_INGRESS,
        Direction::Egress => LOG_GROUP_EGRESS,
    };
    let text = id.to_string();
    Expr::Log { group, prefix: text[..text.floor_char_boundary(MAX_PREFIX_LENGTH)].to_owned() }
}

/// Numbers in the form `1, 3-5`.
fn listed(mut numbers: Vec<usize>) -> String {
    numbers.sort_unstable();
    numbers.dedup();
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let run = |run: &[usize]| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(", ")
}

/// The lines, if they are neither too many nor too large; otherwise the problem.
fn fitting(id: &PolicyId, lines: Vec<Line>, room: usize) -> Result<Vec<Line>, Problem> {
    let most = MAX_BYTES.min(room);
    // An estimate: the transaction rejects a chain that turns out slightly too large.
    let length = |line: &Line| -> usize {
        let rules = line.rules(Stage::Normal, FilterDenyAction::Drop, None);
        rules.iter().map(|rule| rule_length("tortie", "pi-0123456789abcdef", rule)).sum()
    };
    if lines.len() <= MAX_RULES && lines.iter().map(length).sum::<usize>() <= most {
        return Ok(lines);
    }
    let message = format!(
        "it needs more than {MAX_RULES} nftables rules or {} kB: put its addresses into a network set, or join rules",
        most / 1000
    );
    Err(problem(id, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_listed_as_ranges() {
        assert_eq!(listed(vec![5, 3, 4, 1, 3, 9]), "1, 3-5, 9");
        assert_eq!(listed(vec![]), "");
    }
}
