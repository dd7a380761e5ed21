//! The evaluated policies and rules with their results, and the decision: plain data, rendered elsewhere.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tortie_api::calico::TierDefault;
use tortie_api::net::{Action, Direction};

/// Whether a packet passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Verdict {
    /// It passes.
    Allow,
    /// It is dropped.
    Deny,
}

impl Verdict {
    /// `Allow` if both are `Allow`.
    pub(super) fn and(self, other: Self) -> Self {
        if self == Self::Allow { other } else { self }
    }
}

impl From<bool> for Verdict {
    fn from(passes: bool) -> Self {
        if passes { Self::Allow } else { Self::Deny }
    }
}

/// The verdict on a packet, and its explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// Whether it passes.
    pub verdict: Verdict,
    /// The source address that policy sees.
    pub source: IpAddr,
    /// The destination address that policy sees.
    pub destination: IpAddr,
    /// Remarks besides policy: why a side was not judged, which address a node uses.
    pub notes: Vec<String>,
    /// The sender's policies for packets out of it; absent if none apply to the sender.
    pub egress: Option<Trace>,
    /// The receiver's policies for packets into it; absent if none apply to the receiver.
    pub ingress: Option<Trace>,
    /// The host endpoints at nodes' interfaces on the way, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Trace>,
}

/// A set of an endpoint's policies that are evaluated together (policy decision 16).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Table {
    /// All policies that are in none of the other tables: at a pod, or at a host endpoint for packets from and to the
    /// host itself.
    #[default]
    Normal,
    /// Policies with doNotTrack, before connection tracking.
    Untracked,
    /// Policies with preDNAT, before the translation of Services' addresses.
    PreDnat,
    /// Policies with applyOnForward, for packets that the host forwards.
    Forward,
}

impl Table {
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// The evaluation of one endpoint's policies in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// The endpoint, as `namespace/pod`.
    pub endpoint: String,
    /// The direction.
    pub direction: Direction,
    /// The table of policies.
    #[serde(default, skip_serializing_if = "Table::is_normal")]
    pub table: Table,
    /// Whether this is the evaluation of the reply to an untracked packet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reply: bool,
    /// Whether this is the interface between a pod and its node, which a host endpoint of all interfaces covers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_pod: bool,
    /// The resulting verdict.
    pub verdict: Verdict,
    /// The decider.
    pub decided_by: DecidedBy,
    /// The evaluated tiers, in order.
    pub tiers: Vec<TierTrace>,
    /// The evaluated profiles, in order.
    pub profiles: Vec<PolicyTrace>,
}

/// The object that decided.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DecidedBy {
    /// A rule of a policy or profile.
    Rule {
        /// The policy.
        policy: PolicyName,
        /// The rule's number; the first is 1.
        number: usize,
    },
    /// A policy that was not understood, and denies (policy decision 18).
    NotUnderstood {
        /// The policy.
        policy: PolicyName,
    },
    /// No rule of the tier decided, and its end denies.
    EndOfTier {
        /// The tier.
        tier: String,
    },
    /// A static rule of the pod's node, before policy (policy decision 26).
    StaticRule {
        /// The node.
        node: String,
        /// The rule.
        name: String,
    },
    /// A fixed rule for every pod's packets, before policy: tunnels from pods, and IPv6 neighbour discovery (policy
    /// decisions 22, 38).
    BuiltIn {
        /// The rule, in words.
        rule: String,
    },
    /// No tier decided, and no profile allows.
    NoProfile,
    /// No rule of the table decided: the next table is evaluated, and after the last one the packet passes.
    Nobody,
    /// A failsafe port, which policies of host endpoints do not close (policy decision 16).
    Failsafe,
    /// FelixConfiguration's setting for packets from pods to their own node (policy decision 3).
    EndpointToHost {
        /// `Accept`, `Drop` or `Return`.
        action: String,
    },
}

/// A policy or profile, by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PolicyName {
    /// Its kind; Kubernetes' NetworkPolicy is `KubernetesNetworkPolicy`.
    pub kind: String,
    /// Its namespace; empty for kinds without namespaces.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl PolicyName {
    pub(super) fn profile(name: &str) -> Self {
        Self { kind: "Profile".to_owned(), namespace: String::new(), name: name.to_owned() }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{} {}", self.kind, self.name),
            namespace => write!(f, "{} {namespace}/{}", self.kind, self.name),
        }
    }
}

/// The evaluation of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierTrace {
    /// Its name.
    pub name: String,
    /// The policies that apply and were evaluated, in order.
    pub policies: Vec<PolicyTrace>,
    /// The outcome.
    pub outcome: TierOutcome,
}

/// The outcome of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TierOutcome {
    /// A rule allowed.
    Allowed,
    /// A rule denied.
    Denied,
    /// A rule passed to the next tier, or to the profiles.
    Passed,
    /// No rule decided, and the tier's default action is Deny.
    DeniedAtEnd,
    /// No rule decided, and the tier's default action is Pass.
    PassedAtEnd,
    /// Only staged policies apply, so the tier does not count.
    OnlyStaged,
}

/// The evaluation of one policy or profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyTrace {
    /// Its name.
    pub policy: PolicyName,
    /// Its source location, as `file:line`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Whether it is staged: evaluated, but its decision has no effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub staged: bool,
    /// The problem, if it was not understood; it then denies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_understood: Option<String>,
    /// The evaluated rules, in order; the last one may have decided.
    pub rules: Vec<RuleTrace>,
    /// Its decision, if there is one.
    pub decision: Option<Action>,
}

/// The evaluation of one rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleTrace {
    /// Its number in its direction; the first is 1.
    pub number: usize,
    /// Its source location, as `file:line`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Its action for packets that match.
    pub action: Action,
    /// The first criterion that does not match; absent if the rule matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<Mismatch>,
}

/// A criterion that does not match.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// The field of the rule, such as `source.selector`.
    pub field: String,
    /// The value that it requires.
    pub wanted: String,
    /// The value of the packet.
    pub found: String,
}

impl Mismatch {
    pub(super) fn new(field: impl Into<String>, wanted: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self { field: field.into(), wanted: wanted.to_string(), found: found.to_string() }
    }
}

impl Trace {
    pub(super) fn begin(endpoint: String, direction: Direction, table: Table) -> Self {
        Self {
            endpoint,
            direction,
            table,
            reply: false,
            at_pod: false,
            verdict: Verdict::Deny,
            decided_by: DecidedBy::NoProfile,
            tiers: Vec::new(),
            profiles: Vec::new(),
        }
    }

    pub(super) fn decided(&mut self, verdict: Verdict, decided_by: DecidedBy) -> Self {
        Self { verdict, decided_by, ..self.clone() }
    }

    /// Ends a tier; returns the complete trace if the evaluation ends there.
    pub(super) fn close_tier(&mut self, mut tier: TierTrace, end: TierDefault) -> Option<Self> {
        let mut enforced = tier.policies.iter().filter(|policy| !policy.staged).peekable();
        let applies = enforced.peek().is_some();
        let (outcome, decided_by) = match enforced.find(|policy| policy.decision.is_some()) {
            None if !applies => (TierOutcome::OnlyStaged, DecidedBy::NoProfile),
            None => {
                let outcome = match end {
                    TierDefault::Deny => TierOutcome::DeniedAtEnd,
                    TierDefault::Pass => TierOutcome::PassedAtEnd,
                };
                (outcome, DecidedBy::EndOfTier { tier: tier.name.clone() })
            }
            Some(policy) => {
                let outcome = match policy.decision {
                    Some(Action::Allow) => TierOutcome::Allowed,
                    Some(Action::Pass) => TierOutcome::Passed,
                    _ => TierOutcome::Denied,
                };
                (outcome, policy.decided_by())
            }
        };
        tier.outcome = outcome;
        self.tiers.push(tier);
        match outcome {
            TierOutcome::Passed | TierOutcome::PassedAtEnd | TierOutcome::OnlyStaged => None,
            TierOutcome::Allowed => Some(self.decided(Verdict::Allow, decided_by)),
            TierOutcome::Denied | TierOutcome::DeniedAtEnd => Some(self.decided(Verdict::Deny, decided_by)),
        }
    }

    /// The complete trace, if the last profile decided. A profile that passes leaves the decision to the next one.
    pub(super) fn decided_by_profile(&mut self) -> Option<Self> {
        let profile = self.profiles.last()?;
        let decision = profile.decision.filter(|decision| *decision != Action::Pass)?;
        let verdict = Verdict::from(decision == Action::Allow);
        let decided_by = profile.decided_by();
        Some(self.decided(verdict, decided_by))
    }
}

impl TierTrace {
    pub(super) fn begin(name: &str) -> Self {
        Self { name: name.to_owned(), policies: Vec::new(), outcome: TierOutcome::DeniedAtEnd }
    }
}

impl PolicyTrace {
    pub(super) fn begin(policy: PolicyName, origin: Option<String>) -> Self {
        Self { policy, origin, staged: false, not_understood: None, rules: Vec::new(), decision: None }
    }

    /// Records the evaluation of a rule; returns whether it decided. Log does not decide.
    pub(super) fn visit(
        &mut self,
        action: Action,
        outcome: Result<(), Mismatch>,
        origin: Option<String>,
    ) -> bool {
        let number = self.rules.len() + 1;
        let mismatch = outcome.err();
        if mismatch.is_none() && action != Action::Log {
            self.decision = Some(action);
        }
        self.rules.push(RuleTrace { number, origin, action, mismatch });
        self.decision.is_some()
    }

    pub(super) fn not_understood(&mut self, problem: String) {
        self.not_understood = Some(problem);
        self.decision = Some(Action::Deny);
    }

    fn decided_by(&self) -> DecidedBy {
        let policy = self.policy.clone();
        match self.rules.last() {
            Some(rule) if self.not_understood.is_none() => DecidedBy::Rule { policy, number: rule.number },
            _ => DecidedBy::NotUnderstood { policy },
        }
    }
}
