//! The oracle: whether a packet may pass, and why, straight from the resources.
//!
//! [`evaluate`] is what compiled programs are tested against, and what `tortie explain` prints. It is naive on purpose:
//! no index, no set, no conversion of one kind of policy into another, and nothing shared with the compiled path but
//! the reading of resources and the selector evaluator.
//!
//! It knows the tier `default` only, and no stored profiles or network sets yet: where a resource of those is there, it
//! refuses to judge.

mod calico;
mod kubernetes;
mod order;
mod packet;
mod peers;
mod snapshot;
mod trace;
mod world;

use serde::{Deserialize, Serialize};
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::{Key, Kind};

use order::{Policy, Rules};
use packet::Packet;
pub use peers::{Peer, QuestionError};
pub use snapshot::{Snapshot, Stored};
pub use trace::{
    Answer, DecidedBy, Mismatch, PolicyName, PolicyTrace, RuleTrace, TierOutcome, TierTrace, Trace, Verdict,
};
use world::{Workload, World};

/// A packet that begins a flow: may it pass?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Who sends it.
    pub from: Peer,
    /// To whom.
    pub to: Peer,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its source port; 0 where the protocol has none.
    pub source_port: u16,
    /// Its destination port; 0 where the protocol has none.
    pub destination_port: u16,
    /// Its ICMP type and code, where it is ICMP or ICMPv6.
    pub icmp: Option<(u8, u8)>,
}

/// Judges one packet. For many packets over the same resources make one [`Oracle`].
///
/// # Errors
/// Where the question names what is not there, or what has no address that a packet could bear.
pub fn evaluate(snapshot: &Snapshot, question: &Question) -> Result<Answer, QuestionError> {
    Oracle::new(snapshot).evaluate(question)
}

/// The resources, with what is looked at for every packet read once.
pub struct Oracle<'a> {
    world: World,
    policies: Vec<Policy<'a>>,
    not_judged: Option<Key>,
}

impl<'a> Oracle<'a> {
    /// Over these resources.
    #[must_use]
    pub fn new(snapshot: &'a Snapshot) -> Self {
        let not_judged =
            snapshot.iter().find(|(key, stored)| !is_judged(key, stored)).map(|(key, _)| key.clone());
        Self { world: World::new(snapshot), policies: order::in_order(snapshot), not_judged }
    }

    /// Judges one packet.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn evaluate(&self, question: &Question) -> Result<Answer, QuestionError> {
        if let Some(key) = &self.not_judged {
            return Err(QuestionError::NotJudgedYet(key.clone()));
        }
        let way = peers::resolve(&self.world, question)?;
        let packet = Packet::new(&self.world, way.source, way.destination, question);
        let trace = |pod: Option<&Workload>, direction| pod.map(|pod| self.judge(pod, direction, &packet));
        let egress = trace(way.judged_egress, Direction::Egress);
        let ingress = trace(way.judged_ingress, Direction::Ingress);
        let allows = |trace: &Option<Trace>| trace.as_ref().is_none_or(|t| t.verdict == Verdict::Allow);
        // The source's egress and the destination's ingress must both allow (semantics 5).
        let verdict = Verdict::from(allows(&egress) && allows(&ingress));
        Ok(Answer {
            verdict,
            source: way.source,
            destination: way.destination,
            notes: way.notes,
            egress,
            ingress,
        })
    }

    /// What the policies of one pod say: tiers, then profiles, then no (semantics 7, 8).
    fn judge(&self, pod: &Workload, direction: Direction, packet: &Packet<'_>) -> Trace {
        let mut trace = Trace::begin(pod.to_string(), direction);
        let applying: Vec<&Policy<'_>> =
            self.policies.iter().filter(|policy| policy.applies(pod, direction)).collect();
        // A tier counts only where a policy of it applies; there is one tier, and its end denies.
        if !applying.is_empty() {
            let mut tier = TierTrace::begin("default");
            for policy in applying {
                let policy = visit(policy, direction, packet);
                tier.policies.push(policy);
                if tier.decision().is_some() {
                    break;
                }
            }
            if let Some(decided) = trace.close_tier(tier) {
                return decided;
            }
        }
        for profile in &pod.profiles {
            trace.profiles.push(self.profile(profile));
            if let Some(decided) = trace.decided_by_profile() {
                return decided;
            }
        }
        trace.decided(Verdict::Deny, DecidedBy::NoProfile)
    }

    /// The profile of a namespace that exists allows everything; that of a service account has no rules.
    fn profile(&self, name: &str) -> PolicyTrace {
        let known = name.strip_prefix("kns.").is_some_and(|namespace| self.world.namespace_exists(namespace));
        let mut trace = PolicyTrace::begin(PolicyName::profile(name), None);
        if known {
            trace.visit(1, Action::Allow, Ok(()));
        }
        trace
    }
}

/// Whether the oracle knows what the resource means.
fn is_judged(key: &Key, stored: &Stored) -> bool {
    let tier = stored.value.pointer("/spec/tier").and_then(|tier| tier.as_str()).unwrap_or("default");
    match key.kind {
        Kind::Tier | Kind::Profile | Kind::NetworkSet | Kind::GlobalNetworkSet => false,
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => matches!(tier, "" | "default"),
        _ => true,
    }
}

/// Asks one policy: its rules in order, until one decides.
fn visit(policy: &Policy<'_>, direction: Direction, packet: &Packet<'_>) -> PolicyTrace {
    let mut trace = PolicyTrace::begin(policy.name.clone(), policy.origin.clone());
    match &policy.rules {
        // It denies where it stands, to what it selects (semantics 18).
        Rules::NotUnderstood(problem) => trace.not_understood(problem.clone()),
        Rules::Calico(spec) => {
            for (index, rule) in calico::rules(spec, direction).iter().enumerate() {
                let outcome = calico::matches(&policy.name.namespace, rule, packet);
                if trace.visit(index + 1, rule.action, outcome) {
                    break;
                }
            }
        }
        Rules::Kubernetes(spec) => {
            for (index, rule) in kubernetes::rules(spec, direction).iter().enumerate() {
                let outcome = kubernetes::matches(&policy.name.namespace, rule, direction, packet);
                if trace.visit(index + 1, Action::Allow, outcome) {
                    break;
                }
            }
        }
    }
    trace
}
