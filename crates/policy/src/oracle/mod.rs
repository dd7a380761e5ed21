//! The oracle: whether a packet may pass, and why, straight from the resources.
//!
//! [`evaluate`] is what compiled programs are tested against, and what `tortie explain` prints. It is naive on purpose:
//! no index, no set, no conversion of one kind of policy into another, and nothing shared with the compiled path but
//! the reading of resources and the selector evaluator.

mod ask;
mod calico;
mod cluster;
mod kubernetes;
mod order;
mod packet;
mod peers;
mod snapshot;
mod trace;
mod world;

use serde::{Deserialize, Serialize};
use tortie_api::calico::Rule;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::{Key, Kind, Resource};

pub(crate) use ask::{SeenPod, SeenProfile, Subject, shown_labels};
use order::{Policy, Rules, Tier};
use packet::Packet;
pub use peers::{Peer, QuestionError};
pub use snapshot::{Snapshot, Stored};
pub use trace::{
    Answer, DecidedBy, Mismatch, PolicyName, PolicyTrace, RuleTrace, TierOutcome, TierTrace, Trace, Verdict,
};
use world::{Workload, World};

/// A packet that begins a flow: may it pass?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
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
    snapshot: &'a Snapshot,
    world: World,
    tiers: Vec<Tier<'a>>,
}

impl<'a> Oracle<'a> {
    /// Over these resources.
    #[must_use]
    pub fn new(snapshot: &'a Snapshot) -> Self {
        Self { snapshot, world: World::new(snapshot), tiers: order::tiers(snapshot) }
    }

    /// Judges one packet.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn evaluate(&self, question: &Question) -> Result<Answer, QuestionError> {
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
        for tier in &self.tiers {
            let mut said = TierTrace::begin(&tier.name);
            for policy in tier.policies.iter().filter(|policy| policy.applies(pod, direction)) {
                let policy = visit(policy, direction, packet);
                let decided = policy.decision.is_some() && !policy.staged;
                said.policies.push(policy);
                if decided {
                    break;
                }
            }
            // A tier counts only where a policy of it applies.
            if said.policies.is_empty() {
                continue;
            }
            if let Some(decided) = trace.close_tier(said, tier.end) {
                return decided;
            }
        }
        for profile in &pod.profiles {
            trace.profiles.push(self.profile(profile, direction, packet));
            if let Some(decided) = trace.decided_by_profile() {
                return decided;
            }
        }
        trace.decided(Verdict::Deny, DecidedBy::NoProfile)
    }

    /// What is stored says its rules, and where it cannot be understood, no. The profile of a namespace that exists
    /// allows everything; any other has no rules.
    fn profile(&self, name: &str, direction: Direction, packet: &Packet<'_>) -> PolicyTrace {
        let stored = self.snapshot.get(&Key::global(Kind::Profile, name));
        let origin = stored.and_then(|stored| stored.place(""));
        let mut trace = PolicyTrace::begin(PolicyName::profile(name), origin);
        match stored.map(|stored| (&stored.resource, stored)) {
            Some((Ok(Resource::Profile(profile)), stored)) => {
                let rules = match direction {
                    Direction::Ingress => &profile.spec.ingress,
                    Direction::Egress => &profile.spec.egress,
                };
                visit_rules("", rules, direction, packet, stored, &mut trace);
            }
            Some((Ok(_), _)) => trace.not_understood("it is no profile".to_owned()),
            Some((Err(problem), _)) => trace.not_understood(problem.clone()),
            None => {
                let namespace = name.strip_prefix("kns.");
                if namespace.is_some_and(|namespace| self.world.namespace_exists(namespace)) {
                    trace.visit(Action::Allow, Ok(()), None);
                }
            }
        }
        trace
    }
}

/// Asks one policy: its rules in order, until one decides.
fn visit(policy: &Policy<'_>, direction: Direction, packet: &Packet<'_>) -> PolicyTrace {
    let mut trace = PolicyTrace::begin(policy.name.clone(), policy.stored.place(""));
    trace.staged = policy.staged;
    match &policy.rules {
        // It denies where it stands, to what it selects (semantics 18).
        Rules::NotUnderstood(problem) => trace.not_understood(problem.clone()),
        Rules::Calico(spec) => {
            let rules = calico::rules(spec, direction);
            visit_rules(&policy.name.namespace, rules, direction, packet, policy.stored, &mut trace);
        }
        Rules::Cluster(spec) => {
            for (index, rule) in cluster::rules(spec, direction).iter().enumerate() {
                let outcome = cluster::matches(spec, rule, direction, packet);
                if trace.visit(cluster::action(rule), outcome, place(policy.stored, direction, index)) {
                    break;
                }
            }
        }
        Rules::Kubernetes(spec) => {
            for (index, rule) in kubernetes::rules(spec, direction).iter().enumerate() {
                let outcome = kubernetes::matches(&policy.name.namespace, spec, rule, direction, packet);
                if trace.visit(Action::Allow, outcome, place(policy.stored, direction, index)) {
                    break;
                }
            }
        }
    }
    trace
}

/// Asks Calico's rules in order, until one decides.
fn visit_rules(
    namespace: &str,
    rules: &[Rule],
    direction: Direction,
    packet: &Packet<'_>,
    stored: &Stored,
    trace: &mut PolicyTrace,
) {
    for (index, rule) in rules.iter().enumerate() {
        let outcome = calico::matches(namespace, rule, packet);
        if trace.visit(rule.action, outcome, place(stored, direction, index)) {
            break;
        }
    }
}

/// Where a rule was written.
fn place(stored: &Stored, direction: Direction, index: usize) -> Option<String> {
    let direction = match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    };
    stored.place(&format!("spec.{direction}[{index}]"))
}
