//! Changes of a table, and the smallest set of changes between two tables.

use std::fmt;

use super::set::{DataKind, Element, Set, SetSpec};
use super::table::{BaseChain, Chain, Rule, Table};

/// Changes that the kernel makes all at once or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// The name of the table.
    pub table: String,
    /// The changes, in order.
    pub ops: Vec<Op>,
}

/// One change of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Creates the table with these flags.
    AddTable(u32),
    /// Deletes the table with its content.
    DeleteTable,
    /// Creates a chain without rules.
    AddChain(String, Option<BaseChain>),
    /// Deletes a chain that nothing leads to.
    DeleteChain(String),
    /// Replaces all rules of the chain.
    SetRules(String, Vec<Rule>),
    /// Creates a set without elements.
    AddSet(String, SetSpec),
    /// Deletes a set that no rule uses.
    DeleteSet(String),
    /// Adds elements to a set.
    AddElements(String, SetSpec, Vec<Element>),
    /// Removes elements from a set.
    DeleteElements(String, SetSpec, Vec<Element>),
}

impl Op {
    /// The operation, as in "refused to …".
    pub fn operation(&self) -> &'static str {
        match self {
            Self::AddTable(_) => "make the table",
            Self::DeleteTable => "delete the table",
            Self::AddChain(..) => "make the chain",
            Self::DeleteChain(_) => "delete the chain",
            Self::SetRules(..) => "set the rules of the chain",
            Self::AddSet(..) => "make the set",
            Self::DeleteSet(_) => "delete the set",
            Self::AddElements(..) => "add elements to the set",
            Self::DeleteElements(..) => "take elements out of the set",
        }
    }
}

/// The object of the change.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddTable(_) | Self::DeleteTable => write!(f, "the table itself"),
            Self::AddChain(name, _) | Self::DeleteChain(name) => write!(f, "chain {name}"),
            Self::SetRules(name, rules) => write!(f, "chain {name} ({} rules)", rules.len()),
            Self::AddSet(name, _) | Self::DeleteSet(name) => write!(f, "set {name}"),
            Self::AddElements(name, _, elements) | Self::DeleteElements(name, _, elements) => {
                write!(f, "set {name} ({} elements, the first {:?})", elements.len(), elements.first())
            }
        }
    }
}

/// The changes that make `actual` equal to `desired`; only differences are touched. If something differs that the
/// kernel cannot change in place (a hook, the type of a set), the whole table is recreated in the same transaction.
#[must_use]
pub fn diff(table: &str, desired: &Table, actual: Option<&Table>) -> Transaction {
    let ops = match actual {
        Some(actual) if changeable(desired, actual) => {
            // Setting its flags again adopts the table of an ended process.
            let adoption = (desired.flags != actual.flags).then_some(Op::AddTable(desired.flags));
            adoption.into_iter().chain(changes(desired, actual)).collect()
        }
        Some(_) => [vec![Op::DeleteTable], created(desired)].concat(),
        None => created(desired),
    };
    Transaction { table: table.to_owned(), ops }
}

/// Whether one can be changed into the other without recreating the table.
pub fn changeable(desired: &Table, actual: &Table) -> bool {
    let same_set =
        |(name, set): (&String, &Set)| actual.sets.get(name).is_none_or(|other| other.spec == set.spec);
    let same_chain = |(name, chain): (&String, &Chain)| {
        actual.chains.get(name).is_none_or(|other| other.base == chain.base)
    };
    let orphan = desired.flags == Table::GUARDED && actual.flags == Table::PERSIST;
    // In the transaction that adopts a table, the kernel neither adds hooks nor removes any (EINVAL).
    let has_same_hooks = || hooks(desired).eq(hooks(actual));
    (desired.flags == actual.flags || (orphan && has_same_hooks()))
        && desired.sets.iter().all(same_set)
        && desired.chains.iter().all(same_chain)
}

/// The names of the chains that the kernel calls itself.
fn hooks(table: &Table) -> impl Iterator<Item = &String> {
    table.chains.iter().filter(|(_, chain)| chain.base.is_some()).map(|(name, _)| name)
}

/// The changes that create a table.
pub fn created(desired: &Table) -> Vec<Op> {
    let empty = Table { flags: desired.flags, ..Table::default() };
    let mut ops = vec![Op::AddTable(desired.flags)];
    ops.extend(changes(desired, &empty));
    ops
}

/// The changes that make `actual` equal to `desired`, if no hook and no type of a set differs; also for a part of a
/// table.
///
/// Everything exists before it is named. The order is: sets and chains, then rules, then the elements of maps: first
/// those that name chains, then those whose numbers lead to them. Removals happen in the opposite order.
pub fn changes(desired: &Table, actual: &Table) -> Vec<Op> {
    [additions(desired, actual), alterations(desired, actual), removals(desired, actual)].concat()
}

/// The additions: sets with their elements, chains with their rules, and keys that lead to chains.
pub fn additions(desired: &Table, actual: &Table) -> Vec<Op> {
    let mut ops = Vec::new();
    let sets = || desired.sets.iter().filter(|(name, _)| !actual.sets.contains_key(*name));
    ops.extend(sets().map(|(name, set)| Op::AddSet(name.clone(), set.spec.clone())));
    let filled = sets().filter(|(_, set)| set.spec.data.is_none());
    ops.extend(filled.flat_map(|(name, set)| diff_elements(name, set, None)));
    let chains = || desired.chains.iter().filter(|(name, _)| !actual.chains.contains_key(*name));
    ops.extend(chains().map(|(name, chain)| Op::AddChain(name.clone(), chain.base)));
    let with_rules = chains().filter(|(_, chain)| !chain.rules.is_empty());
    ops.extend(with_rules.map(|(name, chain)| Op::SetRules(name.clone(), chain.rules.clone())));
    ops.extend(verdict_maps(desired).filter_map(|(name, set)| {
        let come = elements_not_in(set, actual.sets.get(name));
        (!come.is_empty()).then(|| Op::AddElements(name.clone(), set.spec.clone(), come))
    }));
    ops
}

fn verdict_maps(table: &Table) -> impl Iterator<Item = (&String, &Set)> {
    table.sets.iter().filter(|(_, set)| set.spec.data == Some(DataKind::Verdict))
}

/// The elements whose keys another set does not have.
fn elements_not_in(set: &Set, other: Option<&Set>) -> Vec<Element> {
    let mut elements = elements(set);
    elements.retain(|element| other.is_none_or(|other| !other.elements.contains_key(&element.key)));
    elements
}

/// The changes in sets and chains that stay, and in the targets of numbers.
pub fn alterations(desired: &Table, actual: &Table) -> Vec<Op> {
    let set_changes = |data: Option<DataKind>| {
        let stays = move |name: &String| data.is_some() || actual.sets.contains_key(name);
        let chosen = desired.sets.iter().filter(move |(name, set)| set.spec.data == data && stays(name));
        chosen.flat_map(|(name, set)| diff_elements(name, set, actual.sets.get(name)))
    };
    let mut ops: Vec<_> = set_changes(None).collect();
    // For maps to verdicts, only the keys that both have: others are added or removed.
    let verdicts = verdict_maps(desired).filter_map(|(name, set)| Some((name, set, actual.sets.get(name)?)));
    let replaced: Vec<_> = verdicts
        .flat_map(|(name, set, there)| {
            let both = |set: &Set, other: &Set| {
                let kept = set.elements.iter().filter(|(key, _)| other.elements.contains_key(key));
                Set {
                    spec: set.spec.clone(),
                    elements: kept.map(|(key, value)| (*key, value.clone())).collect(),
                }
            };
            diff_elements(name, &both(set, there), Some(&both(there, set)))
        })
        .collect();
    // Packets enter base chains through their hooks, so removed ones have no rules from now on.
    let base = actual.chains.iter().filter(|(_, chain)| chain.base.is_some() && !chain.rules.is_empty());
    let entered = base.filter(|(name, _)| !desired.chains.contains_key(*name));
    ops.extend(entered.map(|(name, _)| Op::SetRules(name.clone(), Vec::new())));
    for (name, chain) in &desired.chains {
        if actual.chains.get(name).is_some_and(|there| there.rules != chain.rules) {
            ops.push(Op::SetRules(name.clone(), chain.rules.clone()));
        }
    }
    ops.extend(replaced);
    ops.extend(DataKind::LOADED.into_iter().flat_map(|kind| set_changes(Some(kind))));
    ops
}

/// The removals.
pub fn removals(desired: &Table, actual: &Table) -> Vec<Op> {
    let chains: Vec<_> =
        actual.chains.iter().filter(|(name, _)| !desired.chains.contains_key(*name)).collect();
    let sets: Vec<_> = actual.sets.iter().filter(|(name, _)| !desired.sets.contains_key(*name)).collect();
    let mut ops = Vec::new();
    ops.extend(verdict_maps(desired).filter_map(|(name, set)| {
        let go = elements_not_in(actual.sets.get(name)?, Some(set));
        (!go.is_empty()).then(|| Op::DeleteElements(name.clone(), set.spec.clone(), go))
    }));
    // Removed chains may lead to one another, and removed maps to them, so all are emptied first.
    for (name, set) in &sets {
        let is_map = set.spec.data.is_some();
        ops.extend(is_map.then(|| Op::DeleteElements((*name).clone(), set.spec.clone(), elements(set))));
    }
    for (name, chain) in &chains {
        let has_rules = chain.base.is_none() && !chain.rules.is_empty();
        ops.extend(has_rules.then(|| Op::SetRules((*name).clone(), Vec::new())));
    }
    ops.extend(chains.iter().map(|(name, _)| Op::DeleteChain((*name).clone())));
    ops.extend(sets.iter().map(|(name, _)| Op::DeleteSet((*name).clone())));
    ops
}

/// The changes that make the elements of a set those of `desired`. Removals come before additions, because ranges of
/// one set may never overlap.
#[must_use]
pub fn diff_elements(name: &str, desired: &Set, actual: Option<&Set>) -> Vec<Op> {
    let other = |set: Option<&Set>, element: &Element| {
        set.and_then(|set| set.elements.get(&element.key)).is_none_or(|value| *value != element.value)
    };
    let mut removed = actual.map(elements).unwrap_or_default();
    removed.retain(|element| other(Some(desired), element));
    let mut added = elements(desired);
    added.retain(|element| other(actual, element));
    let spec = &desired.spec;
    let removal = (!removed.is_empty()).then(|| Op::DeleteElements(name.to_owned(), spec.clone(), removed));
    let addition = (!added.is_empty()).then(|| Op::AddElements(name.to_owned(), spec.clone(), added));
    removal.into_iter().chain(addition).collect()
}

fn elements(set: &Set) -> Vec<Element> {
    set.elements.iter().map(|(key, value)| Element { key: *key, value: value.clone() }).collect()
}

impl Table {
    /// Applies a change as the kernel does when it accepts it.
    pub fn apply(&mut self, op: &Op) {
        match op.clone() {
            Op::AddTable(flags) => self.flags = flags,
            Op::DeleteTable => *self = Self::default(),
            Op::AddChain(name, base) => self.chains.entry(name).or_default().base = base,
            Op::DeleteChain(name) => drop(self.chains.remove(&name)),
            Op::SetRules(name, rules) => self.chains.entry(name).or_default().rules = rules,
            Op::AddSet(name, spec) => {
                self.sets.entry(name).or_insert_with(|| Set { spec, elements: Default::default() });
            }
            Op::DeleteSet(name) => drop(self.sets.remove(&name)),
            Op::AddElements(name, _, elements) => {
                if let Some(set) = self.sets.get_mut(&name) {
                    set.elements.extend(elements.into_iter().map(|element| (element.key, element.value)));
                }
            }
            Op::DeleteElements(name, _, elements) => {
                if let Some(set) = self.sets.get_mut(&name) {
                    elements.iter().for_each(|element| drop(set.elements.remove(&element.key)));
                }
            }
        }
    }
}
