//! A program as one list of decisions, of which the first that matches holds.

use std::collections::HashSet;
use std::sync::Arc;

use tortie_api::net::{Action, Direction};
use tortie_dataplane::Condition;
use tortie_policy::program::{EndOfTier, EndpointProgram, Lookup, PolicyId, Rule, TierProgram};

use super::numbers::Addresses;
use super::region::{Matched, Region, matched};

/// What becomes of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// What the program comes to for one direction. The last decision is about all packets. Where an ACL cannot say what a
/// rule means, less is allowed, and a condition tells it (semantics 19).
pub fn flatten(
    program: &EndpointProgram,
    direction: Direction,
    own: &Addresses,
    lookup: &impl Lookup,
) -> (Vec<Decision>, Vec<Condition>) {
    let mut flattener = Flattener { direction, own, lookup, conditions: Vec::new() };
    let list = flattener.program(program);
    (list, flattener.conditions)
}

struct Flattener<'a, L> {
    direction: Direction,
    own: &'a Addresses,
    lookup: &'a L,
    conditions: Vec<Condition>,
}

impl<L: Lookup> Flattener<'_, L> {
    /// From the end to the beginning: what comes after a tier is known when its Pass rules are met.
    fn program(&mut self, program: &EndpointProgram) -> Vec<Decision> {
        let nothing_matched = vec![everything("no profile allows it")];
        let mut list = self.policies(&program.profiles, None, nothing_matched);
        for tier in program.tiers(self.direction).iter().rev() {
            list = self.tier(tier, list);
        }
        list
    }

    fn tier(&mut self, tier: &TierProgram, next: Vec<Decision>) -> Vec<Decision> {
        let end = match tier.end {
            EndOfTier::Deny => vec![everything(&format!("end of tier {}", tier.name))],
            EndOfTier::Pass => next.clone(),
        };
        self.policies(&tier.policies, Some(&next), end)
    }

    /// The policies' rules before `list`. `next` is what Pass leads to; in profiles it leads nowhere.
    fn policies(
        &mut self,
        policies: &[PolicyId],
        next: Option<&[Decision]>,
        mut list: Vec<Decision>,
    ) -> Vec<Decision> {
        for id in policies.iter().rev() {
            let Some(policy) = self.lookup.policy(id) else {
                list = vec![everything(&id.to_string())];
                continue;
            };
            for (index, rule) in policy.direction(self.direction).iter().enumerate().rev() {
                list = self.rule(id, index, rule, next, list);
            }
        }
        reachable(list)
    }

    /// The rule before `list`.
    fn rule(
        &mut self,
        id: &PolicyId,
        index: usize,
        rule: &Rule,
        next: Option<&[Decision]>,
        list: Vec<Decision>,
    ) -> Vec<Decision> {
        if rule.action == Action::Log {
            return list;
        }
        let Matched { exact, vague } = matched(rule, self.direction, self.own, self.lookup);
        if !vague.is_empty() {
            self.conditions.push(self.not_expressible(id, index, rule.action));
        }
        let decide = |verdict, regions: Vec<Region>| {
            let origin: Arc<str> = id.to_string().into();
            let decision = |region| Decision { verdict, region, origin: Arc::clone(&origin) };
            regions.into_iter().map(decision).collect::<Vec<_>>()
        };
        let mut decisions = match (rule.action, next) {
            (Action::Allow, _) => decide(Verdict::Allow, exact),
            (Action::Pass, Some(next)) => {
                let surely = within(next, &exact);
                let perhaps = if vague.is_empty() { vec![] } else { within(&both(next, &list), &vague) };
                [surely, perhaps].concat()
            }
            _ => decide(Verdict::Deny, [exact, vague].concat()),
        };
        decisions.extend(list);
        decisions
    }

    fn not_expressible(&self, id: &PolicyId, index: usize, action: Action) -> Condition {
        let consequence = match action {
            Action::Allow => "it allows nothing here",
            Action::Deny => "it denies all ICMP that its other criteria match",
            _ => {
                "of the ICMP that its other criteria match, only what later rules and the next tier both allow passes"
            }
        };
        let direction = self.direction;
        Condition {
            reason: "RuleNotExpressible",
            message: format!(
                "{id}: {direction:?} rule {index} ({action:?}) matches ICMP types, which HNS cannot: {consequence}"
            ),
        }
    }
}

fn everything(origin: &str) -> Decision {
    Decision { verdict: Verdict::Deny, region: Region::all(), origin: origin.into() }
}

/// Without decisions that are never reached: about the same packets as an earlier one, or within an earlier one about all
/// peers. To compare each with each would find more, and take too long for thousands.
fn reachable(list: Vec<Decision>) -> Vec<Decision> {
    let mut wide: Vec<Region> = Vec::new();
    let mut seen: HashSet<Region> = HashSet::new();
    let mut is_reached = |region: &Region| {
        if wide.iter().any(|earlier| region.is_within(earlier)) || !seen.insert(region.clone()) {
            return false;
        }
        if region.remote.addresses.is_all() {
            wide.push(region.clone());
        }
        true
    };
    list.into_iter().filter(|decision| is_reached(&decision.region)).collect()
}

/// The list for the packets of these regions only.
fn within(list: &[Decision], regions: &[Region]) -> Vec<Decision> {
    let cut = |region: &Region| {
        let cut =
            |decision: &Decision| Some(Decision { region: decision.region.and(region)?, ..decision.clone() });
        list.iter().filter_map(cut).collect::<Vec<_>>()
    };
    regions.iter().flat_map(cut).collect()
}

/// The list that allows what both lists allow. Both decide about every packet: its first pair, in the order of the first
/// list and then of the second, is its first decision in each.
fn both(one: &[Decision], other: &[Decision]) -> Vec<Decision> {
    let pair = |a: &Decision, b: &Decision| {
        let stricter = if a.verdict == Verdict::Deny { a } else { b };
        Some(Decision { region: a.region.and(&b.region)?, ..stricter.clone() })
    };
    one.iter().flat_map(|a| other.iter().filter_map(move |b| pair(a, b))).collect()
}
