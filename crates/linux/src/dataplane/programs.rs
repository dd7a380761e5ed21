//! Renders programs as chains: the rules for packets into, or out of, pods with the same policies.
//!
//! A tier with few rules jumps to the chains of its policies, which all programs share. A tier with many rules would
//! need many tests for each new flow, so the rules of all its policies become combined lookups ([`Lookup`]). A policy
//! with Pass rules is rendered into its tier's chain, because the target of Pass belongs to the program.
//!
//! Allowing a packet accepts it, which ends its evaluation in the base chain of this side. So chains end in a
//! verdict, or return to where policy continues.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::net::{Action, Direction};
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Chain, Expr, Rule, Table, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, PolicyId, TierProgram};

use super::change::Change;
use super::lookups::{Lookup, Sources, address_sets, look_up};
use super::policies::{Line, Lines, Problem, chain_name};
use super::sets::digest;
use super::slots::{Slot, Stage};

/// The maximum depth of jumps from the base chain (`NFT_JUMP_STACK_SIZE`). Two levels are before a program, and one
/// after it for a policy's chain.
const MAX_CHAINS: usize = 12;

/// The number of networks from which the rules of a policy are never joined with those of others.
const MANY_NETWORKS: usize = 1_000;

/// The content of a program in one direction. Pods with equal content share their program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProgramSpec {
    pub direction: Direction,
    pub stage: Stage,
    pub tiers: Vec<TierProgram>,
    pub profiles: Vec<PolicyId>,
}

impl ProgramSpec {
    pub(super) fn new(program: &EndpointProgram, slot: Slot) -> Self {
        let direction = slot.direction();
        let (tiers, profiles) = (program.tiers(direction).to_vec(), program.profiles.clone());
        Self { direction, stage: slot.stage(), tiers, profiles }
    }

    /// The policies and profiles that it names.
    pub(super) fn policies(&self) -> impl Iterator<Item = &PolicyId> {
        self.tiers.iter().flat_map(|tier| &tier.policies).chain(&self.profiles)
    }
}

/// The prefix of the chain names of one direction of a program, which is equal for all endpoints with the same
/// policies.
pub(super) fn program_name(program: &EndpointProgram, slot: Slot) -> String {
    let (stage, direction) = (slot.stage().letter(), slot.direction());
    let prefix = match direction {
        Direction::Ingress => "i",
        Direction::Egress => "e",
    };
    let content = format!("{:?} {:?}", program.tiers(direction), program.profiles);
    format!("{stage}{prefix}-{}", digest(content.as_bytes()))
}

/// The name of the first chain of a program.
pub(super) fn first_chain(program: &str) -> String {
    format!("{program}-0")
}

/// A rendered program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RenderedProgram {
    /// The chains by name, the first chain first.
    pub chains: Vec<(String, Chain)>,
    /// Its own sets, by name.
    pub lookups: BTreeMap<String, Lookup>,
    /// The policies to whose chains it jumps.
    pub jumps: BTreeSet<PolicyId>,
    /// Why it cannot be rendered; it then drops everything.
    pub problem: Option<Problem>,
}

impl RenderedProgram {
    /// The number of keys when its sets were created.
    pub(super) fn keys(&self) -> usize {
        self.lookups.values().map(|lookup| lookup.keys).sum()
    }

    /// Replaces an older form of it in the table.
    pub(super) fn put(&self, old: &Self, state: &NodeState, kernel: &Table, change: &mut Change) {
        for (name, _) in &old.chains {
            change.chain(kernel, name, None);
        }
        for name in old.lookups.keys() {
            change.set(kernel, name, None);
        }
        for (name, chain) in &self.chains {
            change.chain(kernel, name, Some(chain.clone()));
        }
        for (name, lookup) in &self.lookups {
            change.set(kernel, name, Some(lookup.set(state)));
        }
    }
}

/// A program that drops everything because of a problem.
pub(super) fn closed(name: &str, message: String) -> RenderedProgram {
    let rules = vec![Rule::new(vec![Expr::Verdict(Verdict::Drop)], "closed: the policy cannot be enforced")];
    let chains = vec![(first_chain(name), Chain { base: None, rules })];
    let problem = Some(Problem { object: None, message });
    RenderedProgram { chains, problem, ..RenderedProgram::default() }
}

/// Renders a program.
pub(super) fn write(name: &str, spec: &ProgramSpec, sources: &Sources<'_>) -> RenderedProgram {
    let chains = vec![Vec::new()];
    let mut writer = Writer { name, spec, sources, chains, written: RenderedProgram::default() };
    writer.program();
    if writer.chains.len() > MAX_CHAINS {
        let problem =
            format!("{} tiers with Pass rules are more than the kernel's limit", writer.chains.len());
        return closed(name, problem);
    }
    let named = |(index, rules)| (format!("{name}-{index}"), Chain { base: None, rules });
    let chains = writer.chains.into_iter().enumerate().map(named).collect();
    RenderedProgram { chains, ..writer.written }
}

struct Writer<'a, 's> {
    name: &'a str,
    spec: &'a ProgramSpec,
    sources: &'a Sources<'s>,
    chains: Vec<Vec<Rule>>,
    written: RenderedProgram,
}

impl Writer<'_, '_> {
    /// A tier has a chain of its own only if a Pass rule must reach it.
    fn program(&mut self) {
        for tier in &self.spec.tiers {
            let next = Verdict::Goto(format!("{}-{}", self.name, self.chains.len()));
            let passes = tier.policies.iter().any(|id| (self.sources.lines)(id).passes());
            self.policies(&tier.policies, Some(&next));
            let end = format!("end of tier {}", tier.name);
            match tier.end {
                EndOfTier::Deny => self.deny(&end),
                EndOfTier::Pass if passes => self.rules([Rule::new(vec![Expr::Verdict(next)], &end)]),
                EndOfTier::Pass => {}
            }
            if passes {
                self.chains.push(Vec::new());
            } else if tier.end == EndOfTier::Deny {
                return; // nothing comes further
            }
        }
        if !self.spec.stage.denies_at_end() {
            return self.rules([Rule::new(vec![Expr::Verdict(Verdict::Accept)], "no tier decides")]);
        }
        // A profile with Pass leaves the decision to the next one, which then needs a chain of its own.
        let passes = |id: &PolicyId| (self.sources.lines)(id).passes();
        for profiles in self.spec.profiles.split_inclusive(passes) {
            let next = Verdict::Goto(format!("{}-{}", self.name, self.chains.len()));
            self.policies(profiles, Some(&next));
            if profiles.last().is_some_and(passes) {
                self.rules([Rule::new(vec![Expr::Verdict(next)], "next profile")]);
                self.chains.push(Vec::new());
            }
        }
        self.deny("no profile allows it");
    }

    /// Renders policies one after another. Those with many networks stay in chains of their own, so that a change of
    /// one of them does not write the networks of the others again.
    fn policies(&mut self, ids: &[PolicyId], pass: Option<&Verdict>) {
        let all: Vec<_> = ids.iter().map(|id| (id, (self.sources.lines)(id))).collect();
        // Where its rules are many, a packet would need many tests.
        let most = self.sources.in_a_row;
        let stays_apart =
            |lines: &Lines| lines.networks > MANY_NETWORKS && lines.lines.len() <= most && !lines.passes();
        for run in all.chunk_by(|(_, one), (_, next)| !stays_apart(one) && !stays_apart(next)) {
            match run {
                [(_, lines)] if stays_apart(lines) => self.in_a_row(run, pass),
                _ => self.run(run, pass),
            }
        }
    }

    /// Renders policies together.
    fn run(&mut self, all: &[(&PolicyId, &Lines)], pass: Option<&Verdict>) {
        if all.iter().map(|(_, lines)| lines.lines.len()).sum::<usize>() > self.sources.in_a_row {
            let lines: Vec<_> = all.iter().flat_map(|(_, lines)| &lines.lines).cloned().collect();
            return self.many(lines, all, pass);
        }
        self.in_a_row(all, pass);
    }

    fn in_a_row(&mut self, all: &[(&PolicyId, &Lines)], pass: Option<&Verdict>) {
        for (id, lines) in all {
            if lines.passes() {
                self.lines(&lines.lines, pass);
            } else if !lines.lines.is_empty() {
                let jump = Expr::Verdict(Verdict::Jump(chain_name(id, self.spec.direction, self.spec.stage)));
                self.rules([Rule::new(vec![jump], &id.to_string())]);
                self.written.jumps.insert((*id).clone());
            }
        }
    }

    /// Renders many lines so that a packet needs few tests.
    fn many(&mut self, lines: Vec<Line>, policies: &[(&PolicyId, &Lines)], pass: Option<&Verdict>) {
        let sets = address_sets(policies.iter().flat_map(|(_, lines)| &lines.sets));
        let runs = lines.chunk_by(|one, next| one.action == next.action && one.action != Action::Log);
        for run in runs {
            let most_keys = self.sources.most_keys.saturating_sub(self.written.keys());
            let prefix = format!("{}-{}-{}", self.name, self.chains.len(), self.written.lookups.len());
            let (lookups, lines) = look_up(run, &sets, &prefix, self.sources, most_keys);
            self.written.lookups.extend(lookups);
            self.lines(&lines, pass);
        }
    }

    fn lines(&mut self, lines: &[Line], pass: Option<&Verdict>) {
        let (stage, deny) = (self.spec.stage, self.sources.deny);
        self.rules(lines.iter().flat_map(|line| line.rules(stage, deny, pass)));
    }

    fn deny(&mut self, comment: &str) {
        self.rules(Line::all(Action::Deny, comment).rules(self.spec.stage, self.sources.deny, None));
    }

    fn rules(&mut self, rules: impl IntoIterator<Item = Rule>) {
        if let Some(chain) = self.chains.last_mut() {
            chain.extend(rules);
        }
    }
}
