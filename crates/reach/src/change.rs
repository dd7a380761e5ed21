//! The effect of a change: the classes of pairs and ports whose verdicts differ.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use tortie_api::net::IpVersion;

use super::classes::Classes;
use super::concern::Concern;
use super::judge::{Flow, Judge, Row, flow_of};
use super::path::{ByPath, FAMILIES, Path, Scope, Stop, scopes};
use super::rectangles::{Pairs, Plain, Shapes, rectangles};
use super::why::Why;
use tortie_oracle::Snapshot;

/// A cluster before and after a change.
pub struct Change<'a> {
    before: &'a Snapshot,
    after: &'a Snapshot,
    /// The classes of both: world 0 is before, world 1 is after.
    pub classes: Classes,
}

/// A group of flows whose verdict changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The verdict before; several entries if different rules decided parts of the flows.
    pub before: Vec<Why>,
    /// The verdict after.
    pub after: Why,
    /// The classes of ports.
    pub ports: Vec<usize>,
    /// The senders.
    pub from: Vec<usize>,
    /// The receivers.
    pub to: Vec<usize>,
    /// Limits the ways between them, if not all are affected.
    pub scope: Scope,
    /// The number of pairs of one sender and one receiver; the outsiders of a class count as one.
    pub pairs: usize,
    /// The number of differences that this one summarizes; if it is more than one, not every combination of sender,
    /// receiver and port changes.
    pub parts: usize,
}

/// Groups the differences only by their decider after the change, for readers of hundreds of differences.
#[must_use]
pub fn summary(differences: &[Difference]) -> Vec<Difference> {
    let mut by_rule: BTreeMap<(&Why, Scope), Vec<&Difference>> = BTreeMap::new();
    for difference in differences {
        by_rule.entry((&difference.after, difference.scope)).or_default().push(difference);
    }
    let joined = |parts: &[&Difference], of: fn(&Difference) -> &Vec<usize>| -> Vec<usize> {
        parts.iter().flat_map(|part| of(part)).copied().collect::<BTreeSet<_>>().into_iter().collect()
    };
    let one = |((after, scope), parts): ((&Why, Scope), Vec<&Difference>)| Difference {
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
        scope,
        pairs: pairs_of(&parts),
        parts: parts.len(),
    };
    by_rule.into_iter().map(one).collect()
}

/// Parts with the same ends and different ports consist of the same pairs. The sum of all parts would count them
/// several times, so each rectangle counts once.
fn pairs_of(parts: &[&Difference]) -> usize {
    let mut most: BTreeMap<(&Vec<usize>, &Vec<usize>), usize> = BTreeMap::new();
    for part in parts {
        most.insert((&part.from, &part.to), part.pairs);
    }
    most.values().sum()
}

impl<'a> Change<'a> {
    /// Creates a change between these two snapshots.
    #[must_use]
    pub fn new(before: &'a Snapshot, after: &'a Snapshot) -> Self {
        Self { before, after, classes: Classes::of(&[before, after]) }
    }

    /// Every flow whose verdict changes, in as few groups as possible. Pods that are created or deleted do not count
    /// as changes by themselves.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let (before, after) = (self.classes.reduced(self.before), self.classes.reduced(self.after));
        let mut comparison = Comparison {
            classes: &self.classes,
            was: Judge::new(&self.classes, &before, 0),
            is: Judge::new(&self.classes, &after, 1),
            shapes: Shapes::default(),
            rows_differ: HashMap::new(),
            known: HashMap::new(),
            found: Vec::new(),
        };
        let concern = Concern::new(&self.classes, self.before, self.after);
        let classes = 0..self.classes.all().len();
        for (from, to) in classes.clone().flat_map(|from| classes.clone().map(move |to| (from, to))) {
            let concerned = |stop: &Stop| concern.concerns(from, to, *stop);
            if Stop::ALL.iter().filter(|stop| concerned(stop)).any(|stop| comparison.differs(from, to, *stop))
            {
                comparison.look_at(from, to);
            }
        }
        let Comparison { found, .. } = &comparison;
        let mut all: Vec<Difference> =
            found.iter().flat_map(|(what, pairs)| comparison.differences(*what, pairs)).collect();
        all.sort_by(|a, b| {
            (&a.after, b.pairs, &a.from, &a.ports, a.scope)
                .cmp(&(&b.after, a.pairs, &b.from, &b.ports, b.scope))
        });
        all
    }
}

/// The state of a comparison.
struct Comparison<'a> {
    classes: &'a Classes,
    was: Judge<'a>,
    is: Judge<'a>,
    shapes: Shapes,
    /// Whether verdicts at one stop differ, by the rows before and after.
    rows_differ: HashMap<(Option<Row>, Option<Row>), bool>,
    /// The changes, by the flows before and after.
    known: HashMap<(ByPath<Flow>, ByPath<Flow>), Changes>,
    /// The results: decision after the change and scope, with the pairs that have it.
    found: Vec<((Plain, Scope), Pairs)>,
}

/// The index of the result, and that of the shape.
type Changes = Rc<[(usize, usize)]>;

impl Comparison<'_> {
    /// Whether the results at one stop differ for packets from one class to another; if so, their verdict may differ.
    fn differs(&mut self, from: usize, to: usize, stop: Stop) -> bool {
        let Self { classes, was, is, rows_differ, .. } = self;
        if stop == Stop::ReceiverNode && was.is_closed(to) != is.is_closed(to) {
            return true;
        }
        let differ = |family: &IpVersion| {
            let rows =
                was.rows_at(from, to, stop, *family).into_iter().zip(is.rows_at(from, to, stop, *family));
            let mut rows = rows.filter_map(|(was, is)| Some((was?, is?)));
            rows.any(|rows| {
                let compare = || {
                    let mut ports = 0..classes.ports().len();
                    ports.any(|port| was.allows(rows.0, port) != is.allows(rows.1, port))
                };
                *rows_differ.entry(rows).or_insert_with(compare)
            })
        };
        FAMILIES.iter().any(differ)
    }

    /// Determines the changes between two classes.
    fn look_at(&mut self, from: usize, to: usize) {
        let flows = (self.was.flows(from, to), self.is.flows(from, to));
        let changes = match self.known.get(&flows) {
            Some(known) => known.clone(),
            None => {
                let changes = self.of_flows(&flows.0, &flows.1);
                self.known.insert(flows, changes.clone());
                changes
            }
        };
        for (number, shape) in changes.iter() {
            if let Some((_, pairs)) = self.found.get_mut(*number) {
                pairs.push((from, to, *shape));
            }
        }
    }

    fn of_flows(&mut self, one: &ByPath<Flow>, other: &ByPath<Flow>) -> Changes {
        let there_is =
            |flows: &ByPath<Flow>, path: &Path| flows.get(path.number()).is_some_and(Option::is_some);
        let paths: Vec<Path> =
            Path::ALL.into_iter().filter(|path| there_is(one, path) || there_is(other, path)).collect();
        let mut changes: BTreeMap<(Plain, usize), (Vec<Path>, Vec<usize>)> = BTreeMap::new();
        for path in &paths {
            let (Some(one), Some(other)) = (flow_of(one, *path), flow_of(other, *path)) else { continue };
            let ports = 0..self.classes.ports().len();
            let cells = ports.map(|port| (port, self.was.cell(one, port), self.is.cell(other, port)));
            for (after, shape) in self.shapes.of(cells) {
                let (paths, shapes) = changes.entry((after, self.shapes.ports_of(shape))).or_default();
                paths.push(*path);
                shapes.push(shape);
            }
        }
        let mut all = Vec::new();
        for ((after, _), (changing, shapes)) in changes {
            let shape = self.shapes.joined(&shapes);
            for scope in scopes(&changing, &paths) {
                all.push((self.number((after, scope)), shape));
            }
        }
        all.into()
    }

    fn number(&mut self, what: (Plain, Scope)) -> usize {
        let known = self.found.iter().position(|(known, _)| *known == what);
        known.unwrap_or_else(|| {
            self.found.push((what, Pairs::new()));
            self.found.len() - 1
        })
    }

    /// The differences with one decision and scope.
    fn differences(&self, (after, scope): (Plain, Scope), pairs: &Pairs) -> Vec<Difference> {
        let shape_of: HashMap<(usize, usize), usize> =
            pairs.iter().map(|(from, to, shape)| ((*from, *to), *shape)).collect();
        let difference = |(ports, from, to): (usize, Vec<usize>, Vec<usize>)| {
            let both = || from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
            let inside: BTreeSet<usize> = both().filter_map(|pair| shape_of.get(&pair)).copied().collect();
            let before: BTreeSet<&Plain> =
                inside.iter().flat_map(|shape| self.shapes.before(*shape)).collect();
            let before = before.into_iter().map(|one| self.was.why_of(one.0, one.1)).collect();
            let count = both().map(|(from, to)| self.classes.pairs(from, to, scope)).sum();
            let (ports, after) = (self.shapes.ports(ports).to_vec(), self.is.why_of(after.0, after.1));
            Difference { before, after, ports, from, to, scope, pairs: count, parts: 1 }
        };
        rectangles(pairs, &self.shapes).into_iter().map(difference).collect()
    }
}
