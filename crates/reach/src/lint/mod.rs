//! What is probably not meant: rules that never match or never decide, policies about nobody, selectors on labels that
//! nobody has; each with a witness and what to do.
//!
//! That a rule never decides is not guessed: every flow between [classes](crate) is asked of the
//! [oracle](tortie_oracle), and so is which flows the rule would match if it stood alone.

mod contradictions;
mod elsewhere;
mod idle;
mod objects;
mod selectors;
mod subjects;

use std::fmt;

use serde::Serialize;
use tortie_api::{Key, Resource};

use crate::is_policy;
use tortie_oracle::{Snapshot, Stored};

/// Something that is probably not meant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Where it was written, as file and line, if that is known.
    pub place: Option<(String, usize)>,
    /// The object.
    pub object: Key,
    /// The field, as `spec.ingress[0].source.selector`; empty for the object as a whole.
    pub field: String,
    /// How bad it is.
    pub level: Level,
    /// What kind of finding, for those who filter.
    pub code: Code,
    /// What is wrong.
    pub problem: String,
    /// What shows it.
    pub witness: String,
    /// What to do.
    pub advice: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Level {
    /// Cannot be meant in any cluster.
    Error,
    /// Is probably not meant in this cluster.
    Warning,
    /// Worth knowing: it works here and would not elsewhere, or has no effect that could be missed.
    Note,
}

/// The kinds of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// A policy or tier that cannot be understood, and denies.
    NotUnderstood,
    /// A rule or selector that contradicts itself.
    NeverMatches,
    /// A rule or selector that matches nothing in this cluster.
    MatchesNothing,
    /// A policy that is about no pod and no host endpoint of this cluster.
    SelectsNothing,
    /// A host endpoint about which no policy and no profile says anything.
    NoPolicy,
    /// A rule all of whose flows are decided before it is asked.
    Shadowed,
    /// A rule for failsafe ports only, which pass before policy is asked.
    Failsafe,
    /// A host endpoint of a Windows node, where host endpoints are not enforced.
    NotEnforced,
    /// A selector on a label that nothing has.
    UnknownLabel,
    /// A Service's own address in a rule, where packets bear the backend's.
    ClusterIp,
    /// Policies of administrators whose order nothing but their names decides.
    EqualPriorities,
    /// A policy of a tier that does not exist.
    UnknownTier,
    /// `serviceAccounts: {}`, which says nothing.
    EmptyServiceAccounts,
    /// Would be left out, or mean something else, on Calico for Windows.
    Elsewhere,
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
        })
    }
}

/// Everything that is found, by place.
#[must_use]
pub fn lint(snapshot: &Snapshot) -> Vec<Finding> {
    let mut found = Findings::default();
    objects::check(snapshot, &mut found);
    for (key, stored, resource) in policies(snapshot) {
        contradictions::check(key, stored, resource, &mut found);
        elsewhere::check(key, stored, resource, &mut found);
    }
    selectors::check(snapshot, &mut found);
    subjects::check(snapshot, &mut found);
    idle::check(snapshot, &mut found);
    found.all.sort();
    found.all
}

/// Every policy that is understood.
fn policies(snapshot: &Snapshot) -> impl Iterator<Item = (&Key, &Stored, &Resource)> {
    let policies = snapshot.iter().filter(|(key, _)| is_policy(key.kind));
    policies.filter_map(|(key, stored)| Some((key, stored, stored.resource.as_ref().ok()?)))
}

/// What has been found so far.
#[derive(Default)]
struct Findings {
    all: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, (key, stored): (&Key, &Stored), field: &str, (level, code): (Level, Code), said: Said) {
        let place = stored.written.as_ref().map(|(origin, lines)| (origin.file.clone(), lines.of(field)));
        let Said { problem, witness, advice } = said;
        let (object, field) = (key.clone(), field.to_owned());
        self.all.push(Finding { place, object, field, level, code, problem, witness, advice });
    }

    /// Whether this has been found of just this field.
    fn is_known(&self, key: &Key, field: &str, code: Code) -> bool {
        self.all.iter().any(|found| found.object == *key && found.field == field && found.code == code)
    }

    /// Whether something with one of these codes has been found in or below this field.
    fn has(&self, key: &Key, field: &str, codes: &[Code]) -> bool {
        let below = |of: &str| {
            of.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.all
            .iter()
            .any(|found| found.object == *key && codes.contains(&found.code) && below(&found.field))
    }
}

/// The words of a finding.
struct Said {
    problem: String,
    witness: String,
    advice: String,
}

impl Said {
    fn new(problem: impl Into<String>, witness: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), witness: witness.into(), advice: advice.into() }
    }
}
