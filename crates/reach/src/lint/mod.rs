//! Probable mistakes: rules that never match or never decide, policies that select nothing, selectors on labels that
//! do not exist; each with a witness and advice.
//!
//! A rule that never decides is proven, not guessed: the [oracle](tortie_oracle) evaluates every flow between
//! [classes](crate), and also the flows that the rule alone would match.

mod absent;
mod contradictions;
mod dns;
mod elsewhere;
mod idle;
mod objects;
mod selectors;
mod subjects;

use std::fmt;

use serde::Serialize;
use tortie_api::{Key, Resource};

use absent::Absent;
use tortie_oracle::{Snapshot, Stored};

/// A probable mistake.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Its source location as file and line, if known.
    pub location: Option<(String, usize)>,
    /// The object.
    pub object: Key,
    /// The field, such as `spec.ingress[0].source.selector`; empty for the object as a whole.
    pub field: String,
    /// Its severity.
    pub level: Level,
    /// Its kind, for filters.
    pub code: Code,
    /// The problem.
    pub problem: String,
    /// The evidence.
    pub witness: String,
    /// The recommended action.
    pub advice: String,
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Level {
    /// A mistake in every cluster.
    Error,
    /// Probably a mistake in this cluster.
    Warning,
    /// For information: it works here but not elsewhere, or its missing effect does no harm.
    Note,
}

/// The kinds of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// A policy or tier that was not understood, and denies.
    NotUnderstood,
    /// A rule or selector that contradicts itself.
    NeverMatches,
    /// A rule or selector that matches nothing in this cluster.
    MatchesNothing,
    /// A policy that selects no pod and no host endpoint of this cluster.
    SelectsNothing,
    /// A host endpoint to which no policy and no profile applies.
    NoPolicy,
    /// A rule whose flows are all decided before it is evaluated.
    Shadowed,
    /// A rule for failsafe ports only, which pass before policy is evaluated.
    Failsafe,
    /// A host endpoint of a Windows node, where host endpoints are not enforced.
    NotEnforced,
    /// A selector on a label that no object has.
    UnknownLabel,
    /// The address of a Service in a rule, although packets have the backend's address.
    ClusterIp,
    /// Policies of administrators whose order depends only on their names.
    EqualPriorities,
    /// A policy of a tier that does not exist.
    UnknownTier,
    /// `serviceAccounts: {}`, which has no effect.
    EmptyServiceAccounts,
    /// A part that would be left out, or mean something else, on Calico for Windows.
    Elsewhere,
    /// A word in another case than Calico's API has it.
    Spelling,
    /// Pods that may reach others, and not the cluster's DNS.
    NoDns,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotUnderstood => "not-understood",
            Self::NeverMatches => "never-matches",
            Self::MatchesNothing => "matches-nothing",
            Self::SelectsNothing => "selects-nothing",
            Self::NoPolicy => "no-policy",
            Self::Shadowed => "shadowed",
            Self::Failsafe => "failsafe",
            Self::NotEnforced => "not-enforced",
            Self::UnknownLabel => "unknown-label",
            Self::ClusterIp => "cluster-ip",
            Self::EqualPriorities => "equal-priorities",
            Self::UnknownTier => "unknown-tier",
            Self::EmptyServiceAccounts => "empty-service-accounts",
            Self::Elsewhere => "elsewhere",
            Self::Spelling => "spelling",
            Self::NoDns => "no-dns",
        })
    }
}

/// All findings, by location.
#[must_use]
pub fn lint(snapshot: &Snapshot) -> Vec<Finding> {
    let mut found = Findings::default();
    objects::check(snapshot, &mut found);
    for (key, stored, resource) in policies(snapshot) {
        contradictions::check(key, stored, resource, &mut found);
        elsewhere::check(key, stored, resource, &mut found);
    }
    let absent = Absent::of(snapshot);
    selectors::check(snapshot, &absent, &mut found);
    subjects::check(snapshot, &absent, &mut found);
    dns::check(snapshot, &mut found);
    idle::check(snapshot, &mut found);
    found.all.sort();
    found.all
}

/// Every policy that was understood.
fn policies(snapshot: &Snapshot) -> impl Iterator<Item = (&Key, &Stored, &Resource)> {
    let policies = snapshot.iter().filter(|(key, _)| key.kind.is_policy());
    policies.filter_map(|(key, stored)| Some((key, stored, stored.resource.as_ref().ok()?)))
}

/// The findings so far.
#[derive(Default)]
struct Findings {
    all: Vec<Finding>,
}

impl Findings {
    fn add(
        &mut self,
        (key, stored): (&Key, &Stored),
        field: &str,
        (level, code): (Level, Code),
        text: FindingText,
    ) {
        let location = stored.written.as_ref().map(|(origin, lines)| (origin.file.clone(), lines.of(field)));
        let FindingText { problem, witness, advice } = text;
        let (object, field) = (key.clone(), field.to_owned());
        self.all.push(Finding { location, object, field, level, code, problem, witness, advice });
    }

    /// Whether there is a finding with this code for exactly this field.
    fn is_known(&self, key: &Key, field: &str, code: Code) -> bool {
        self.all.iter().any(|found| found.object == *key && found.field == field && found.code == code)
    }

    /// Whether there is a finding with one of these codes in or below this field.
    fn has(&self, key: &Key, field: &str, codes: &[Code]) -> bool {
        let below = |of: &str| {
            of.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.all
            .iter()
            .any(|found| found.object == *key && codes.contains(&found.code) && below(&found.field))
    }
}

/// The texts of a finding.
struct FindingText {
    problem: String,
    witness: String,
    advice: String,
}

impl FindingText {
    fn new(problem: impl Into<String>, witness: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), witness: witness.into(), advice: advice.into() }
    }
}
