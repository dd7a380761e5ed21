//! A program as one list of decisions, of which the first that matches holds.

use std::collections::HashSet;
use std::sync::Arc;

use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::report::ObjectRef;
use tortie_dataplane::{Condition, Reason};
use tortie_policy::program::{EndOfTier, EndpointProgram, Lookup, PolicyId, Rule, TierProgram};

use super::region::{Matched, Region, View, matched};

/// What becomes of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// They pass.
    Allow,
    /// They are dropped.
    Deny,
}

/// One entry of the list.
#[derive(Debug, Clone)]
pub struct Decision {
    /// What becomes of the packets.
    pub verdict: Verdict,
    /// Which packets.
    pub region: Region,
    /// The policy that says so, or what else does.
    pub origin: Arc<str>,
}

/// The most decisions that a list may have.
const MOST_DECISIONS: usize = 20_000;
/// The most decisions that may be looked at to make it: a bound on the time that a program can cost.
const MOST_STEPS: usize = 10_000_000;
/// How many regions about all peers are remembered, to find what lies behind them.
const MOST_WIDE: usize = 256;

/// Where what nothing allows is denied.
pub const NO_PROFILE: &str = "no profile allows it";

/// Where a tier denies what none of its rules decides.
pub fn end_of_tier(name: &str) -> String {
    format!("end of tier {name}")
}

/// The policy at which the list got too long.
struct TooMany(PolicyId);

/// What the program comes to for one direction. The last decision is about all packets. Where an ACL cannot say what a
/// rule means, less is allowed, and a condition tells it (policy decision 19).
pub fn flatten(
    program: &EndpointProgram,
    direction: Direction,
    view: View<'_, impl Lookup>,
) -> (Vec<Decision>, Vec<Condition>) {
    let mut flattener = Flattener { direction, view, conditions: Vec::new(), steps: 0 };
    let list = flattener.program(program).unwrap_or_else(|TooMany(policy)| {
        flattener.conditions.push(too_many_rules(direction, &policy));
        vec![everything("too many rules")]
    });
    (list, flattener.conditions)
}

struct Flattener<'a, L> {
    direction: Direction,
    view: View<'a, L>,
    conditions: Vec<Condition>,
    /// How many decisions were looked at.
    steps: usize,
}

impl<L: Lookup> Flattener<'_, L> {
    /// From the end to the beginning: what comes after a tier is known when its Pass rules are met.
    fn program(&mut self, program: &EndpointProgram) -> Result<Vec<Decision>, TooMany> {
        let mut list = vec![everything(NO_PROFILE)];
        // A profile that passes leaves the decision to the next one.
        for profile in program.profiles.iter().rev() {
            let next = list.clone();
            list = self.policies(std::slice::from_ref(profile), &next, list)?;
        }
        for tier in program.tiers(self.direction).iter().rev() {
            list = self.tier(tier, list)?;
        }
        Ok(list)
    }

    fn tier(&mut self, tier: &TierProgram, next: Vec<Decision>) -> Result<Vec<Decision>, TooMany> {
        let end = match tier.end {
            EndOfTier::Deny => vec![everything(&end_of_tier(&tier.name))],
            EndOfTier::Pass => next.clone(),
        };
        self.policies(&tier.policies, &next, end)
    }

    /// The policies' rules before `list`. `next` is what Pass leads to.
    fn policies(
        &mut self,
        policies: &[PolicyId],
        next: &[Decision],
        mut list: Vec<Decision>,
    ) -> Result<Vec<Decision>, TooMany> {
        // To prune after each of thousands of rules would take too long: it is done whenever the list has doubled.
        let mut enough = 2 * list.len();
        for id in policies.iter().rev() {
            let Some(policy) = self.view.lookup.policy(id) else {
                list = vec![everything(&id.to_string())];
                continue;
            };
            for (index, rule) in policy.direction(self.direction).iter().enumerate().rev() {
                list = self.rule(id, index, rule, next, list)?;
                if list.len() > enough {
                    list = self.reachable(id, list.into_iter().map(Some))?;
                    enough = 2 * list.len();
                }
            }
        }
        match policies.first() {
            Some(id) => self.reachable(id, list.into_iter().map(Some)),
            None => Ok(list),
        }
    }

    /// The rule before `list`.
    fn rule(
        &mut self,
        id: &PolicyId,
        index: usize,
        rule: &Rule,
        next: &[Decision],
        list: Vec<Decision>,
    ) -> Result<Vec<Decision>, TooMany> {
        if rule.action == Action::Log {
            return Ok(list);
        }
        let Matched { exact, vague } = matched(rule, self.direction, &self.view);
        if !vague.is_empty() {
            self.note_not_expressible(id, index, rule.action, &vague);
        }
        let decide = |verdict, regions: Vec<Region>| {
            let origin: Arc<str> = id.to_string().into();
            let decision = |region| Decision { verdict, region, origin: Arc::clone(&origin) };
            regions.into_iter().map(decision).collect::<Vec<_>>()
        };
        let mut decisions = match rule.action {
            Action::Allow => decide(Verdict::Allow, exact),
            Action::Pass => {
                let surely = self.reachable(id, within(next, &exact))?;
                let next = self.reachable(id, within(next, &vague))?;
                let perhaps = self.reachable(id, both(&next, &list))?;
                [surely, perhaps].concat()
            }
            Action::Deny | Action::Log => decide(Verdict::Deny, [exact, vague].concat()),
        };
        decisions.extend(list);
        Ok(decisions)
    }

    /// Without decisions that are never reached: about the same packets as an earlier one, or within an earlier one about
    /// all peers. To compare each with each would find more, and take too long for thousands.
    fn reachable(
        &mut self,
        id: &PolicyId,
        list: impl Iterator<Item = Option<Decision>>,
    ) -> Result<Vec<Decision>, TooMany> {
        let mut wide: Vec<Region> = Vec::new();
        let mut seen: HashSet<Region> = HashSet::new();
        let mut reached = Vec::new();
        for decision in list {
            self.steps += 1;
            if self.steps > MOST_STEPS || reached.len() > MOST_DECISIONS {
                return Err(TooMany(id.clone()));
            }
            let Some(decision) = decision else { continue };
            let region = &decision.region;
            if wide.iter().any(|earlier| region.is_within(earlier)) || !seen.insert(region.clone()) {
                continue;
            }
            if region.remote.addresses.is_all() && wide.len() < MOST_WIDE {
                wide.push(region.clone());
            }
            reached.push(decision);
        }
        if reached.len() > MOST_DECISIONS { Err(TooMany(id.clone())) } else { Ok(reached) }
    }

    /// A rule that matches ICMP types or ports of SCTP, which no ACL can.
    fn note_not_expressible(&mut self, id: &PolicyId, index: usize, action: Action, vague: &[Region]) {
        let is_sctp = |region: &Region| region.protocols.contains(Protocol::SCTP);
        let kinds = [
            (
                vague.iter().any(|region| !is_sctp(region)),
                Reason::IcmpTypeNotExpressible,
                "ICMP types",
                "ICMP",
            ),
            (vague.iter().any(is_sctp), Reason::SctpPortNotExpressible, "ports of SCTP", "SCTP"),
        ];
        for (_, reason, what, protocol) in kinds.into_iter().filter(|(occurs, ..)| *occurs) {
            let consequence = match action {
                Action::Allow => format!("it allows no {protocol} here"),
                Action::Deny => format!("it denies all {protocol} that its other criteria match"),
                _ => format!(
                    "of the {protocol} that its other criteria match, only what later rules and the next tier both allow \
                     passes"
                ),
            };
            let message = format!("the rule ({action:?}) matches {what}, which HNS cannot: {consequence}");
            let rule = ObjectRef::from(id).rule(self.direction, index);
            self.conditions.push(Condition::new(reason, message).about(rule));
        }
    }
}

fn everything(origin: &str) -> Decision {
    Decision { verdict: Verdict::Deny, region: Region::all(), origin: origin.into() }
}

fn too_many_rules(direction: Direction, policy: &PolicyId) -> Condition {
    let message = format!(
        "with it the {direction:?} policy needs more than {MOST_DECISIONS} decisions, or takes too long to compute: all \
             {direction:?} traffic is denied; Pass rules that match ICMP types or ports of SCTP cost most"
    );
    Condition::new(Reason::TooManyRules, message).about(policy)
}

/// The list for the packets of these regions only; `None` where nothing is left of a decision.
fn within<'a>(list: &'a [Decision], regions: &'a [Region]) -> impl Iterator<Item = Option<Decision>> + 'a {
    let cut = |decision: &Decision, region| {
        Some(Decision { region: decision.region.and(region)?, ..decision.clone() })
    };
    regions.iter().flat_map(move |region| list.iter().map(move |decision| cut(decision, region)))
}

/// The list that allows what both lists allow, of the packets that the first decides about. The second decides about
/// every packet: the first pair, in the order of the first list and then of the second, is its first decision in each.
fn both<'a>(one: &'a [Decision], other: &'a [Decision]) -> impl Iterator<Item = Option<Decision>> + 'a {
    let pair = |a: &Decision, b: &Decision| {
        let stricter = if a.verdict == Verdict::Deny { a } else { b };
        Some(Decision { region: a.region.and(&b.region)?, ..stricter.clone() })
    };
    one.iter().flat_map(move |a| other.iter().map(move |b| pair(a, b)))
}
