//! The reachability matrix: verdicts between classes, with equal rows and columns merged.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::class::{Class, ClassKind, PodName};
use super::classes::Classes;
use super::judge::{Flow, Judge};
use super::names;
use super::path::{ByPath, Path, Scope, scopes};
use tortie_oracle::Verdict;

/// The reachability matrix. Rows are senders, columns are receivers.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// The classes of ports in the matrix.
    pub ports: Vec<usize>,
    /// The senders.
    pub rows: Vec<Group>,
    /// The receivers.
    pub columns: Vec<Group>,
    /// By row, then column.
    pub cells: Vec<Vec<Content>>,
}

/// Classes with the same row or column.
#[derive(Debug, Clone)]
pub struct Group {
    /// Its members for readers.
    pub name: String,
    /// The classes.
    pub classes: Vec<usize>,
}

/// The packets that pass from one group to another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// The classes of ports that pass, on each path. Empty if there are no such flows: from a pod to itself, between
    /// ends to which no policy applies, or without a common address family.
    by_path: ByPath<Rc<[usize]>>,
    /// Whether only some packets pass, and others do not: see [`Matrix::by_namespace`].
    pub partly: bool,
}

impl Content {
    /// Whether there are no such flows.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.by_path.iter().all(Option::is_none)
    }

    /// The classes of ports that pass, and the ways on which they do.
    #[must_use]
    pub fn passing(&self) -> Vec<(Scope, &[usize])> {
        let there_are = || {
            Path::ALL
                .into_iter()
                .zip(&self.by_path)
                .filter_map(|(path, ports)| Some((path, ports.as_deref()?)))
        };
        let all: Vec<Path> = there_are().map(|(path, _)| path).collect();
        let mut by_ports: Vec<(&[usize], Vec<Path>)> = Vec::new();
        for (path, ports) in there_are() {
            match by_ports.iter_mut().find(|(known, _)| *known == ports) {
                Some((_, paths)) => paths.push(path),
                None => by_ports.push((ports, vec![path])),
            }
        }
        let of_ports = |(ports, paths): (_, Vec<Path>)| {
            scopes(&paths, &all).into_iter().map(move |scope| (scope, ports))
        };
        by_ports.into_iter().flat_map(of_ports).collect()
    }

    /// Whether both are equal on the ways that both have; `None` if they have none in common.
    fn agrees(&self, other: &Self) -> Option<bool> {
        let mut agrees = None;
        for (one, other) in self.by_path.iter().zip(&other.by_path) {
            if let (Some(one), Some(other)) = (one, other) {
                agrees = Some(agrees != Some(false) && (Rc::ptr_eq(one, other) || one == other));
            }
        }
        agrees
    }

    fn add(&mut self, other: Self) {
        for (known, more) in self.by_path.iter_mut().zip(other.by_path) {
            *known = known.take().or(more);
        }
    }
}

impl Matrix {
    /// Evaluates every class of `rows` as sender to every class of `columns`.
    pub fn of(
        classes: &Classes,
        judge: &mut Judge<'_>,
        ports: &[usize],
        rows: &[usize],
        columns: &[usize],
    ) -> Self {
        let mut known = HashMap::new();
        let mut content = |row: &usize, column: &usize| {
            let flows = judge.flows(*row, *column);
            let mut passing = |flow: Flow| {
                let passing: &mut Rc<[usize]> =
                    known.entry(flow).or_insert_with(|| passing(judge, flow, ports));
                passing.clone()
            };
            Content {
                by_path: flows.map(|flow| flow.filter(|flow| flow.meets_policy()).map(&mut passing)),
                partly: false,
            }
        };
        let contents: Vec<Vec<Content>> =
            rows.iter().map(|row| columns.iter().map(|column| content(row, column)).collect()).collect();
        let kind = |of: &[usize]| -> Vec<Option<ClassKind>> {
            of.iter().map(|class| classes.all().get(*class).map(|class| class.kind)).collect()
        };
        let (row_groups, merged) = merge(contents, &kind(rows));
        let (column_groups, merged) = merge(transposed(&merged, columns.len()), &kind(columns));
        let cells = transposed(&merged, row_groups.len());
        let group = |members: &Vec<usize>, of: &[usize]| {
            let members: Vec<usize> = members.iter().filter_map(|member| of.get(*member).copied()).collect();
            Group { name: group_name(classes, &members), classes: members }
        };
        Self {
            ports: ports.to_vec(),
            rows: row_groups.iter().map(|members| group(members, rows)).collect(),
            columns: column_groups.iter().map(|members| group(members, columns)).collect(),
            cells,
        }
    }
}

impl Matrix {
    /// Merges the matrix by namespace, for clusters with many workloads.
    #[must_use]
    pub fn by_namespace(&self, classes: &Classes) -> Self {
        let key = |group: &Group| {
            let chosen = group.classes.iter().filter_map(|index| classes.all().get(*index));
            chosen.flat_map(|class| class.groups()).collect::<BTreeSet<String>>()
        };
        let grouped = |groups: &[Group]| {
            let mut by_key: BTreeMap<BTreeSet<String>, Vec<usize>> = BTreeMap::new();
            for (index, group) in groups.iter().enumerate() {
                by_key.entry(key(group)).or_default().push(index);
            }
            by_key.into_values().collect::<Vec<_>>()
        };
        let (rows, columns) = (grouped(&self.rows), grouped(&self.columns));
        let name = |members: &Vec<usize>, of: &[Group]| {
            let members = members.iter().filter_map(|index| of.get(*index));
            let members: Vec<usize> = members.flat_map(|group| group.classes.clone()).collect();
            Group { name: group_name(classes, &members), classes: members }
        };
        let cell = |rows: &Vec<usize>, columns: &Vec<usize>| {
            let inside = rows.iter().filter_map(|row| self.cells.get(*row));
            together(inside.flat_map(|row| columns.iter().filter_map(|column| row.get(*column))))
        };
        let row = |row: &Vec<usize>| columns.iter().map(|column| cell(row, column)).collect();
        Self {
            ports: self.ports.clone(),
            cells: rows.iter().map(row).collect(),
            rows: rows.iter().map(|members| name(members, &self.rows)).collect(),
            columns: columns.iter().map(|members| name(members, &self.columns)).collect(),
        }
    }
}

fn passing(judge: &Judge<'_>, flow: Flow, ports: &[usize]) -> Rc<[usize]> {
    let passes = |port: &&usize| judge.cell(flow, **port).verdict == Verdict::Allow;
    ports.iter().filter(passes).copied().collect()
}

/// The union of the contents; it is marked as partly if they differ.
fn together<'a>(contents: impl Iterator<Item = &'a Content>) -> Content {
    let mut all = Content::default();
    for content in contents {
        all.partly |= all.agrees(content) == Some(false);
        for (known, more) in all.by_path.iter_mut().zip(&content.by_path) {
            *known = match (known.take(), more) {
                (Some(known), Some(more)) if known != *more => Some(
                    known.iter().chain(more.iter()).copied().collect::<BTreeSet<_>>().into_iter().collect(),
                ),
                (known, more) => known.or_else(|| more.clone()),
            };
        }
    }
    all
}

/// Merges rows of one kind that are equal wherever both have flows; returns the members and the merged contents of
/// each.
fn merge(rows: Vec<Vec<Content>>, kinds: &[Option<ClassKind>]) -> (Vec<Vec<usize>>, Vec<Vec<Content>>) {
    let mut groups: Vec<(Vec<usize>, Vec<Content>)> = Vec::new();
    for (index, row) in rows.into_iter().enumerate() {
        let of_kind =
            |members: &[usize]| members.first().is_some_and(|first| kinds.get(*first) == kinds.get(index));
        let alike = |known: &[Content]| {
            let mut compared = false;
            let same = known.iter().zip(&row).all(|(known, content)| {
                let agrees = known.agrees(content);
                compared |= agrees.is_some();
                agrees != Some(false)
            });
            let nowhere = |row: &[Content]| row.iter().all(Content::is_nothing);
            same && (compared || (nowhere(known) && nowhere(&row)))
        };
        match groups.iter_mut().find(|(members, known)| of_kind(members) && alike(known)) {
            None => groups.push((vec![index], row)),
            Some((members, known)) => {
                members.push(index);
                for (known, more) in known.iter_mut().zip(row) {
                    known.add(more);
                }
            }
        }
    }
    groups.into_iter().unzip()
}

fn transposed(rows: &[Vec<Content>], width: usize) -> Vec<Vec<Content>> {
    let column = |index: usize| rows.iter().map(|row| row.get(index).cloned().unwrap_or_default()).collect();
    (0..width).map(column).collect()
}

/// Names several classes at once.
#[must_use]
pub fn group_name(classes: &Classes, members: &[usize]) -> String {
    let all = classes.all();
    let chosen: Vec<&Class> = members.iter().filter_map(|index| all.get(*index)).collect();
    if let [only] = chosen.as_slice() {
        return only.name.clone();
    }
    let count = |classes: &[&Class], kind| {
        classes.iter().filter(|class| class.kind == kind).map(|class| class.count()).sum::<usize>()
    };
    let every: Vec<&Class> = all.iter().collect();
    let mut words = Vec::new();
    let pods = count(&chosen, ClassKind::Pods);
    if pods > 0 && pods == count(&every, ClassKind::Pods) {
        words.push(format!("all pods ({pods})"));
    } else if pods > 0 {
        words.push(of_pods(&every, &chosen, pods));
    }
    let nodes = count(&chosen, ClassKind::Nodes);
    if nodes > 0 && nodes == count(&every, ClassKind::Nodes) {
        words.push(format!("all nodes ({nodes})"));
    } else {
        words.extend(named(&chosen, ClassKind::Nodes));
    }
    words.extend(named(&chosen, ClassKind::Outside));
    words.join(", ")
}

/// Names pods by workload; if the workload alone is ambiguous, by the names of their classes.
fn of_pods(every: &[&Class], chosen: &[&Class], count: usize) -> String {
    let mut sizes = BTreeMap::new();
    for (namespace, ..) in every.iter().flat_map(|class| &class.pods) {
        *sizes.entry(namespace.clone()).or_insert(0) += 1;
    }
    let of_pods = || chosen.iter().filter(|class| class.kind == ClassKind::Pods);
    let inside: Vec<PodName> = of_pods().flat_map(|class| class.pods.clone()).collect();
    let workload = |(namespace, workload, _): &PodName| (namespace.clone(), workload.clone());
    let workloads: BTreeSet<(String, String)> = inside.iter().map(workload).collect();
    let split = every.iter().filter(|class| !chosen.iter().any(|of| of.name == class.name));
    let ambiguous = split.flat_map(|class| &class.pods).any(|pod| workloads.contains(&workload(pod)));
    let classes: Vec<&str> = of_pods().map(|class| class.name.as_str()).collect();
    match (classes.as_slice(), ambiguous) {
        ([only], _) => (*only).to_owned(),
        (few, true) if few.len() <= 3 => few.join(", "),
        _ => format!("{} ({count})", names::of_workloads(&inside, &sizes)),
    }
}

fn named(chosen: &[&Class], kind: ClassKind) -> Vec<String> {
    let of_kind: Vec<&str> =
        chosen.iter().filter(|class| class.kind == kind).map(|class| class.name.as_str()).collect();
    match of_kind.len() {
        0..=3 => of_kind.iter().map(|name| (*name).to_owned()).collect(),
        count => vec![format!("{} and {} more networks", of_kind.first().unwrap_or(&""), count - 1)],
    }
}
