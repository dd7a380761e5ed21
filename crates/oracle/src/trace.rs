//! What was asked, what it said, and what decided: plain data, rendered elsewhere.

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
    /// Passes where both do.
    pub(super) fn and(self, other: Self) -> Self {
        if self == Self::Allow { other } else { self }
    }
}

impl From<bool> for Verdict {
    fn from(passes: bool) -> Self {
        if passes { Self::Allow } else { Self::Deny }
    }
}

/// The verdict on a packet, and how it came about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// Whether it passes.
    pub verdict: Verdict,
    /// The source address that policy sees.
    pub source: IpAddr,
    /// The destination address that policy sees.
    pub destination: IpAddr,
    /// What stands outside of policy: why a side was not judged, which address a node uses.
    pub notes: Vec<String>,
    /// What the sender's policies say of packets out of it; absent where the sender is under none.
    pub egress: Option<Trace>,
    /// What the receiver's policies say of packets into it; absent where the receiver is under none.
    pub ingress: Option<Trace>,
    /// What is said on the way at nodes' interfaces, by host endpoints; in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Trace>,
}

/// Which of an endpoint's policies are asked (policy decision 16).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Table {
    /// All but those of the others: at a pod, or at a host endpoint for packets from and to the host itself.
    #[default]
    Normal,
    /// Those with doNotTrack, before connections are tracked.
    Untracked,
    /// Those with preDNAT, before Services' addresses are translated.
    PreDnat,
    /// Those with applyOnForward, for packets that the host forwards.
    Forward,
}

impl Table {
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// What the policies of one endpoint say, in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// The endpoint, as `namespace/pod`.
    pub endpoint: String,
    /// Into it or out of it.
    pub direction: Direction,
    /// Which of its policies were asked.
    #[serde(default, skip_serializing_if = "Table::is_normal")]
    pub table: Table,
    /// Whether this is about the reply, of a packet that is not tracked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reply: bool,
    /// Whether this is about the interface between a pod and its node, which a host endpoint of all interfaces covers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_pod: bool,
    /// What comes of it.
    pub verdict: Verdict,
    /// What decided.
    pub decided_by: DecidedBy,
    /// The tiers that were asked, in order.
    pub tiers: Vec<TierTrace>,
    /// The profiles that were asked, in order.
    pub profiles: Vec<PolicyTrace>,
}

/// What decided.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DecidedBy {
    /// A rule of a policy or profile.
    Rule {
        /// The policy.
        policy: PolicyName,
        /// The rule; the first is 1.
        number: usize,
    },
    /// A policy that cannot be understood, and denies (policy decision 18).
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
    /// What holds for every pod's packets, before policy: tunnels from pods, and how IPv6 neighbours find each other
    /// (policy decisions 22, 38).
    BuiltIn {
        /// What holds, in words.
        rule: String,
    },
    /// No tier decided, and no profile allows.
    NoProfile,
    /// No rule of the table decided: the next one is asked, and after the last the packet passes.
    Nobody,
    /// A failsafe port, which policies of host endpoints do not close (policy decision 16).
    Failsafe,
    /// What FelixConfiguration says of packets from pods to their own node (policy decision 3).
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
    /// Its namespace; empty for kinds that have none.
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

/// What one tier said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierTrace {
    /// Its name.
    pub name: String,
    /// The policies that apply and were asked, in order.
    pub policies: Vec<PolicyTrace>,
    /// What came of it.
    pub outcome: TierOutcome,
}

/// How a tier ended.
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
    /// Only staged policies apply: the tier does not count.
    OnlyStaged,
}

/// What one policy or profile said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyTrace {
    /// Which one.
    pub policy: PolicyName,
    /// Where it was written, as `file:line`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Whether it is staged: asked, but its decision has no effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub staged: bool,
    /// Why it cannot be understood; it then denies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_understood: Option<String>,
    /// The rules that were visited, in order; the last one may have decided.
    pub rules: Vec<RuleTrace>,
    /// What it decided, if it did.
    pub decision: Option<Action>,
}

/// What became of one rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleTrace {
    /// Its number in its direction; the first is 1.
    pub number: usize,
    /// Where it was written, as `file:line`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// What it does with packets that it matches.
    pub action: Action,
    /// The first criterion that does not hold; absent where the rule matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<Mismatch>,
}

/// A criterion that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// The field of the rule, as `source.selector`.
    pub field: String,
    /// What it asks for.
    pub wanted: String,
    /// What the packet has.
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

    /// Ends a tier; gives the whole trace if that is where the packet's way ends.
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

    /// The whole trace, if the last profile decided. A profile that passes leaves the decision to the next one.
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

    /// Notes what became of a rule; says whether it decided. Log goes on.
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
