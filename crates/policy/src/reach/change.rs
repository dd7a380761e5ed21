//! What a change changes: which classes of pairs and ports meet another verdict.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tortie_api::Key;
use tortie_api::net::Direction;

use super::classes::{ClassKind, Classes};
use super::judge::{Cell, Flow, Judge, Said};
use super::sight::is_policy;
use crate::oracle::{DecidedBy, Oracle, PolicyName, Snapshot, Verdict};

/// A cluster before and after a change.
pub struct Change<'a> {
    before: &'a Snapshot,
    after: &'a Snapshot,
    /// Made of both: world 0 is before, world 1 is after.
    pub classes: Classes,
}

/// Some flows whose verdict changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The verdict before; by several rules, where these say the same of parts of the flows.
    pub before: Vec<Why>,
    /// The verdict after.
    pub after: Why,
    /// The classes of ports.
    pub ports: Vec<usize>,
    /// Who sends.
    pub from: Vec<usize>,
    /// To whom.
    pub to: Vec<usize>,
    /// How many pairs of one sender and one receiver that is; the outsiders of a class count as one.
    pub pairs: usize,
    /// How many differences this stands for; where it is more than one, not every sender, receiver and port of it changes.
    pub parts: usize,
}

/// The same differences by what decides afterwards only, for a reader who would not read hundreds.
#[must_use]
pub fn summary(differences: &[Difference]) -> Vec<Difference> {
    let mut by_rule: BTreeMap<&Why, Vec<&Difference>> = BTreeMap::new();
    for difference in differences {
        by_rule.entry(&difference.after).or_default().push(difference);
    }
    let joined = |parts: &[&Difference], of: fn(&Difference) -> &Vec<usize>| -> Vec<usize> {
        parts.iter().flat_map(|part| of(part)).copied().collect::<BTreeSet<_>>().into_iter().collect()
    };
    let one = |(after, parts): (&Why, Vec<&Difference>)| Difference {
        before: parts
            .iter()
            .flat_map(|part| part.before.clone())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
        after: after.clone(),
        ports: joined(&parts, |part| &part.ports),
        from: joined(&parts, |part| &part.from),
        to: joined(&parts, |part| &part.to),
        pairs: pairs_of(&parts),
        parts: parts.len(),
    };
    by_rule.into_iter().map(one).collect()
}

/// Parts with the same ends and other ports are the same pairs; counting each part's pairs is an upper bound, so only
/// the largest part of each rectangle counts.
fn pairs_of(parts: &[&Difference]) -> usize {
    let mut most: BTreeMap<(&Vec<usize>, &Vec<usize>), usize> = BTreeMap::new();
    for part in parts {
        most.insert((&part.from, &part.to), part.pairs);
    }
    most.values().sum()
}

/// A verdict, and what decided.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    /// Whether packets pass.
    pub verdict: Verdict,
    /// What decided: one of the ends where they are dropped, both where they pass.
    pub by: Vec<(Direction, DecidedBy)>,
}

impl<'a> Change<'a> {
    /// Between these two.
    #[must_use]
    pub fn new(before: &'a Snapshot, after: &'a Snapshot) -> Self {
        Self { before, after, classes: Classes::of(&[before, after]) }
    }

    /// Every flow whose verdict changes, in as few words as possible. Pods that come or go change nothing by that alone.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let (before, after) = (self.classes.reduced(self.before), self.classes.reduced(self.after));
        let mut was = Judge::new(&self.classes, &before, 0);
        let mut is = Judge::new(&self.classes, &after, 1);
        let mut shapes = Shapes::default();
        let mut known: HashMap<(Flow, Flow), Vec<(Plain, usize)>> = HashMap::new();
        let mut found: BTreeMap<Plain, Pairs> = BTreeMap::new();
        for (from, to) in self.concerned() {
            let (Some(one), Some(other)) = (was.flow(from, to), is.flow(from, to)) else { continue };
            let changes = known.entry((one, other)).or_insert_with(|| {
                let ports = 0..self.classes.ports().len();
                shapes.of(ports.map(|port| (port, was.cell(one, port), is.cell(other, port))))
            });
            for (after, shape) in changes {
                found.entry(*after).or_default().push((from, to, *shape));
            }
        }
        let mut all = Vec::new();
        for (after, pairs) in found {
            let shape_of: HashMap<(usize, usize), usize> =
                pairs.iter().map(|(from, to, shape)| ((*from, *to), *shape)).collect();
            for (ports, from, to) in rectangles(&pairs, &shapes) {
                let both = || from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
                let inside: BTreeSet<usize> =
                    both().filter_map(|pair| shape_of.get(&pair)).copied().collect();
                let before: BTreeSet<&Plain> =
                    inside.iter().flat_map(|shape| shapes.before(*shape)).collect();
                let before = before.into_iter().map(|one| why(&was, one)).collect();
                let count = both().map(|(from, to)| self.classes.pairs(from, to)).sum();
                let (ports, after) = (shapes.ports(ports).to_vec(), why(&is, &after));
                all.push(Difference { before, after, ports, from, to, pairs: count, parts: 1 });
            }
        }
        all.sort_by(|a, b| {
            (&a.after, b.pairs, &a.from, &a.ports).cmp(&(&b.after, a.pairs, &b.from, &b.ports))
        });
        all
    }

    /// The pairs whose verdict can have changed. Where only policies changed: those at one end of which a policy that
    /// changed has, or had, a say in that direction; else all.
    fn concerned(&self) -> BTreeSet<(usize, usize)> {
        let changed = changed(self.before, self.after);
        let count = self.classes.all().len();
        let all = || (0..count).collect::<Vec<_>>();
        let everything = !changed.iter().all(|key| is_policy(key.kind));
        let numbers = [self.before, self.after].map(|snapshot| numbers(snapshot, &changed));
        let mut pairs = BTreeSet::new();
        for (index, class) in self.classes.all().iter().enumerate().filter(|(_, c)| c.kind == ClassKind::Pods)
        {
            for direction in [Direction::Ingress, Direction::Egress] {
                let has_say = |world| self.classes.has_say(class, world, &numbers, direction);
                if everything || has_say(0) || has_say(1) {
                    pairs.extend(all().into_iter().map(|peer| match direction {
                        Direction::Ingress => (peer, index),
                        Direction::Egress => (index, peer),
                    }));
                }
            }
        }
        pairs
    }
}

/// The numbers of these policies in the order in which all are asked.
fn numbers(snapshot: &Snapshot, policies: &BTreeSet<Key>) -> BTreeSet<usize> {
    let oracle = Oracle::new(snapshot);
    let of = |name: &PolicyName| {
        let is = |key: &Key| {
            key.name == name.name && key.namespace == name.namespace && key.kind.to_string() == name.kind
        };
        policies.iter().any(is)
    };
    let numbered = oracle.policies().enumerate();
    numbered.filter(|(_, policy)| of(policy.name)).map(|(number, _)| number).collect()
}

/// The objects that differ.
#[must_use]
pub fn changed(before: &Snapshot, after: &Snapshot) -> BTreeSet<Key> {
    let differs = |one: &Snapshot, other: &Snapshot| -> Vec<Key> {
        let differs = one.iter().filter(|(key, stored)| match other.get(key) {
            Some(known) => !std::ptr::eq(*stored, known) && stored.value != known.value,
            None => true,
        });
        differs.map(|(key, _)| key.clone()).collect()
    };
    differs(before, after).into_iter().chain(differs(after, before)).collect()
}

/// A cell without what does not matter: where it drops, the end that lets through.
type Plain = (Verdict, [Option<usize>; 2]);

/// Sender, receiver, and which of the [`Shapes`] their change has.
type Pairs = Vec<(usize, usize, usize)>;

/// The ports that change together, and what was before; each once.
#[derive(Default)]
struct Shapes {
    ports: Vec<Vec<usize>>,
    /// The number of the ports, and what was before.
    shapes: Vec<(usize, Vec<Plain>)>,
}

impl Shapes {
    /// What changes, by what comes after.
    fn of(&mut self, cells: impl Iterator<Item = (usize, Cell, Cell)>) -> Vec<(Plain, usize)> {
        let mut changes: BTreeMap<Plain, (Vec<usize>, Vec<Plain>)> = BTreeMap::new();
        for (port, one, other) in cells.filter(|(_, one, other)| one.verdict != other.verdict) {
            let (ports, before) = changes.entry(plain(&other)).or_default();
            ports.push(port);
            if !before.contains(&plain(&one)) {
                before.push(plain(&one));
            }
        }
        let mut shape = |(ports, before): (Vec<usize>, Vec<Plain>)| {
            let known = self.ports.iter().position(|known| *known == ports);
            let number = known.unwrap_or(self.ports.len());
            if known.is_none() {
                self.ports.push(ports);
            }
            self.shapes.push((number, before));
            self.shapes.len() - 1
        };
        changes.into_iter().map(|(after, change)| (after, shape(change))).collect()
    }

    fn ports(&self, number: usize) -> &[usize] {
        self.ports.get(number).map_or(&[], Vec::as_slice)
    }

    fn ports_of(&self, shape: usize) -> usize {
        self.shapes.get(shape).map_or(0, |(ports, _)| *ports)
    }

    fn before(&self, shape: usize) -> &[Plain] {
        self.shapes.get(shape).map_or(&[], |(_, before)| before)
    }
}

fn plain(cell: &Cell) -> Plain {
    let counts = |said: Option<Said>| said.filter(|said| said.verdict == cell.verdict).map(|said| said.by);
    (cell.verdict, [counts(cell.egress), counts(cell.ingress)])
}

fn why(judge: &Judge<'_>, (verdict, [egress, ingress]): &Plain) -> Why {
    let ends = [(Direction::Egress, egress), (Direction::Ingress, ingress)];
    let by = ends.into_iter().filter_map(|(direction, by)| Some((direction, judge.decider((*by)?).clone())));
    Why { verdict: *verdict, by: by.collect() }
}

/// The number of the ports, who sends, to whom.
type Rectangle = (usize, Vec<usize>, Vec<usize>);

/// Pairs as rectangles: senders that have the same receivers on the same ports stand together, or receivers that have
/// the same senders, whichever is less to read.
fn rectangles(pairs: &Pairs, shapes: &Shapes) -> Vec<Rectangle> {
    let ports = |shape: &usize| shapes.ports_of(*shape);
    let by_sender = together(pairs.iter().map(|(from, to, shape)| (ports(shape), *from, *to)));
    let by_receiver = together(pairs.iter().map(|(from, to, shape)| (ports(shape), *to, *from)));
    match by_receiver.len() < by_sender.len() {
        true => by_receiver.into_iter().map(|(ports, to, from)| (ports, from, to)).collect(),
        false => by_sender,
    }
}

/// Those with the same others.
fn together(pairs: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Rectangle> {
    let mut others: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (ports, one, other) in pairs {
        others.entry((ports, one)).or_default().push(other);
    }
    let mut alike: BTreeMap<(usize, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for ((ports, one), others) in others {
        alike.entry((ports, others)).or_default().push(one);
    }
    alike.into_iter().map(|((ports, others), ones)| (ports, ones, others)).collect()
}
