//! A change of the table as three steps, each of which packets may meet.
//!
//! First come slots that no class counts yet, and chains of classes that no frontend has yet. Then everything changes at once. Slots
//! that no class counts any more go last, when no packet that read the old class can be on the way.
//!
//! The kernel replaces ranges some time after the other elements of a transaction. A packet in between to a frontend with new source ranges
//! is dropped, as if from another source, and one to an unused address of a new ServiceCIDR leaves the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tortie_kernel::nftables::{Data, Element, Key, Op, Value};

use super::affinity::Unit;
use super::layout::{Kind, SetId, SlotClass};

/// The elements that come, change, and go.
#[derive(Debug, Default)]
pub(super) struct Edits {
    /// Slots that no class counts yet.
    new_slots: BTreeMap<(SetId, Key), SocketAddr>,
    /// Slots that get another backend.
    changed_slots: BTreeMap<(SetId, Key), SocketAddr>,
    /// Slots that no class will count.
    old_slots: BTreeSet<(SetId, Key)>,
    /// Other elements: the values before and after.
    entries: BTreeMap<(SetId, Key), (Option<Value>, Option<Value>)>,
    pub(super) new_classes: BTreeSet<SlotClass>,
    /// Units of session affinity: those before and after.
    pub(super) units: Vec<(Option<Unit>, Option<Unit>)>,
    /// True if the rules change.
    pub(super) rules: bool,
}

/// The operations of the steps.
#[derive(Debug, Default)]
pub(super) struct ServiceSteps {
    pub(super) prepare: Vec<Op>,
    pub(super) switch: Vec<Op>,
    pub(super) clear: Vec<Op>,
}

impl Edits {
    pub(super) fn add(&mut self, at: (SetId, Key), value: &Value) {
        self.entries.entry(at).or_insert((None, None)).1 = Some(value.clone());
    }

    pub(super) fn remove(&mut self, at: (SetId, Key), value: &Value) {
        self.entries.entry(at).or_insert_with(|| (Some(value.clone()), None)).1 = None;
    }

    pub(super) fn slot(&mut self, at: (SetId, Key), backend: SocketAddr, is_counted: bool) {
        let slots = if is_counted { &mut self.changed_slots } else { &mut self.new_slots };
        slots.insert(at, backend);
    }

    pub(super) fn clear(&mut self, at: (SetId, Key)) {
        self.old_slots.insert(at);
    }

    /// The classes that frontends get.
    pub(super) fn classes(&self) -> impl Iterator<Item = SlotClass> {
        self.entries.iter().filter_map(|((set, _), (_, after))| {
            let (Kind::Class(_) | Kind::ClassInside(_) | Kind::ClassOutside(_)) = set.kind else {
                return None;
            };
            match after.as_ref()?.data()? {
                Data::Number(number) => SlotClass::from_number(*number),
                _ => None,
            }
        })
    }

    /// The steps without those for rules and for chains of classes.
    pub(super) fn steps(self) -> ServiceSteps {
        let socket =
            |((set, key), backend): (&(SetId, Key), &SocketAddr)| (*set, Element::socket(*key, *backend));
        let keys = |at: &(SetId, Key)| (at.0, Element::key(at.1));
        let changes = || self.entries.iter().filter(|(_, (before, after))| before != after);
        let element = |(set, key): &(SetId, Key), value: &Option<Value>| {
            let value = value.clone()?;
            Some((*set, Element { key: *key, value }))
        };
        let gone = changes().filter_map(|(at, (before, _))| element(at, before));
        let come = changes().filter_map(|(at, (_, after))| element(at, after));
        let replaced = by_set(self.changed_slots.keys().map(keys));
        let replacing = by_set(self.changed_slots.iter().map(socket));
        let mut steps = ServiceSteps {
            prepare: additions(by_set(self.new_slots.iter().map(socket))),
            switch: [replacements(replaced, replacing), replacements(by_set(gone), by_set(come))].concat(),
            clear: removals(by_set(self.old_slots.iter().map(keys))),
        };
        for change in &self.units {
            match change {
                (None, Some(new)) => steps.prepare.extend(new.creation()),
                (Some(old), None) => {
                    steps.switch.extend(old.detachment());
                    steps.clear.extend(old.removal());
                }
                (Some(old), Some(new)) if old != new => steps.switch.extend(new.alteration(old)),
                _ => {}
            }
        }
        steps
    }
}

/// Elements by set.
type BySet = BTreeMap<SetId, Vec<Element>>;

fn by_set(elements: impl Iterator<Item = (SetId, Element)>) -> BySet {
    let mut sets = BySet::new();
    for (set, element) in elements {
        sets.entry(set).or_default().push(element);
    }
    sets
}

fn additions(sets: BySet) -> Vec<Op> {
    let add = |(set, elements): (SetId, Vec<Element>)| Op::AddElements(set.name(), set.spec(), elements);
    sets.into_iter().map(add).collect()
}

fn removals(sets: BySet) -> Vec<Op> {
    let remove =
        |(set, elements): (SetId, Vec<Element>)| Op::DeleteElements(set.name(), set.spec(), elements);
    sets.into_iter().map(remove).collect()
}

/// In each set, removals come before additions: an element has one value, and ranges may not overlap.
fn replacements(mut gone: BySet, mut come: BySet) -> Vec<Op> {
    let sets: BTreeSet<SetId> = gone.keys().chain(come.keys()).copied().collect();
    let mut ops = Vec::new();
    for set in sets {
        let of = |sets: &mut BySet| sets.remove_entry(&set).into_iter().collect::<BySet>();
        ops.extend(removals(of(&mut gone)));
        ops.extend(additions(of(&mut come)));
    }
    ops
}
