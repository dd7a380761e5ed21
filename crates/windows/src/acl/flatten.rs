//! Flattens a program into one list of decisions, of which the first match counts.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tortie_api::calico::BgpFromPods;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_api::report::ObjectRef;
use tortie_dataplane::{Condition, Reason, Settings};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Lookup, PolicyId, Rule, TierProgram};

use super::region::{Matched, Region, View, matched};

/// The verdict on packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// They pass.
    Allow,
    /// They are dropped.
    Deny,
}

/// One decision of the list.
#[derive(Debug, Clone)]
pub(crate) struct Decision {
    /// The verdict.
    pub verdict: Verdict,
    /// The packets that it concerns.
    pub region: Region,
    /// The policy, or other source, of the decision.
    pub origin: Arc<str>,
}

/// The maximum number of decisions in a list.
const MAX_DECISIONS: usize = 20_000;
/// The maximum number of decisions to process, which limits the time for one program.
const MAX_STEPS: usize = 10_000_000;
/// How many regions with all peers are remembered, to find decisions hidden by them.
const MAX_WIDE: usize = 256;

/// The origin of the final denial if no profile allows a packet.
pub(crate) const NO_PROFILE: &str = "no profile allows it";

/// The origin of a denial at the end of a tier.
pub(crate) fn end_of_tier(name: &str) -> String {
    format!("end of tier {name}")
}

/// The policy at which the list became too long.
struct TooMany(PolicyId);

/// The decisions of the program for one direction. The last decision covers all packets. Rules that an ACL cannot
/// express are narrowed (Allow) or widened (Deny), and reported (policy decision 19).
pub(super) fn flatten(
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

/// The decisions that no pod connects to the nodes' ports of BGP, whatever its policy (policy decision 48). They are part of the list, and not
/// ACLs of their own, because the same must hold for Services whose backends are nodes.
pub(super) fn bgp_to_nodes(settings: &Settings, view: View<'_, impl Lookup>) -> Vec<Decision> {
    let is_empty = view.lookup.set(&ALL_NODES).is_none_or(BTreeSet::is_empty);
    if is_empty || settings.bgp_from_pods == BgpFromPods::Allow {
        return Vec::new();
    }
    let ports = settings.bgp_ports.iter().map(|port| PortRange { first: *port, last: *port });
    let nodes =
        EntityMatch { sets: vec![ALL_NODES.clone()], ports: ports.collect(), ..EntityMatch::default() };
    let rule = Rule { protocol: Some(Protocol::TCP), destination: nodes, ..Rule::all(Action::Deny) };
    let origin: Arc<str> = "no BGP from pods to nodes".into();
    let Matched { exact, vague } = matched(&rule, Direction::Egress, &view);
    let regions = exact.into_iter().chain(vague);
    regions.map(|region| Decision { verdict: Verdict::Deny, region, origin: Arc::clone(&origin) }).collect()
}

struct Flattener<'a, L> {
    direction: Direction,
    view: View<'a, L>,
    conditions: Vec<Condition>,
    /// The number of processed decisions.
    steps: usize,
}

impl<L: Lookup> Flattener<'_, L> {
    /// Processes the program from its end to its beginning, because Pass rules need the decisions after their tier.
    fn program(&mut self, program: &EndpointProgram) -> Result<Vec<Decision>, TooMany> {
        let mut list = vec![everything(NO_PROFILE)];
        // A profile with Pass leaves the decision to the next one.
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

    /// Prepends the policies' rules to `list`. `next` is the target of Pass.
    fn policies(
        &mut self,
        policies: &[PolicyId],
        next: &[Decision],
        mut list: Vec<Decision>,
    ) -> Result<Vec<Decision>, TooMany> {
        // Pruning after each of thousands of rules would take too long, so it happens whenever the list has doubled.
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

    /// Prepends the rule to `list`.
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

    /// Removes decisions that are never reached: those about the same packets as an earlier one, or within an earlier
    /// one about all peers. Comparing each pair would find more, but would take too long for thousands.
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
            if self.steps > MAX_STEPS || reached.len() > MAX_DECISIONS {
                return Err(TooMany(id.clone()));
            }
            let Some(decision) = decision else { continue };
            let region = &decision.region;
            if wide.iter().any(|earlier| region.is_within(earlier)) || !seen.insert(region.clone()) {
                continue;
            }
            if region.remote.addresses.is_all() && wide.len() < MAX_WIDE {
                wide.push(region.clone());
            }
            reached.push(decision);
        }
        if reached.len() > MAX_DECISIONS { Err(TooMany(id.clone())) } else { Ok(reached) }
    }

    /// Reports a rule that matches ICMP types or ports of SCTP, which no ACL can match.
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
        "with it the {direction:?} policy needs more than {MAX_DECISIONS} decisions, or takes too long to compute: all \
             {direction:?} traffic is denied; Pass rules that match ICMP types or ports of SCTP cost most"
    );
    Condition::new(Reason::TooManyRules, message).about(policy)
}

/// The part of the list for the packets of these regions; `None` if nothing of a decision is left.
fn within<'a>(list: &'a [Decision], regions: &'a [Region]) -> impl Iterator<Item = Option<Decision>> + 'a {
    let cut = |decision: &Decision, region| {
        Some(Decision { region: decision.region.and(region)?, ..decision.clone() })
    };
    regions.iter().flat_map(move |region| list.iter().map(move |decision| cut(decision, region)))
}

/// The list that allows what both lists allow, for the packets of the first list. The second list covers every
/// packet. The first pair, in the order of the first list and then of the second, is the packet's first decision in
/// each.
fn both<'a>(one: &'a [Decision], other: &'a [Decision]) -> impl Iterator<Item = Option<Decision>> + 'a {
    let pair = |a: &Decision, b: &Decision| {
        let stricter = if a.verdict == Verdict::Deny { a } else { b };
        Some(Decision { region: a.region.and(&b.region)?, ..stricter.clone() })
    };
    one.iter().flat_map(move |a| other.iter().map(move |b| pair(a, b)))
}
