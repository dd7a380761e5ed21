//! A change of the table: the parts that it is about, as they are and as they should be.

use std::collections::{BTreeMap, BTreeSet};

use tortie_policy::program::PolicyId;

use tortie_kernel::nftables::{
    Chain, DataKind, Element, Key, Op, Set, SetSpec, Table, Value, additions, alterations, removals,
};

/// What must change.
#[derive(Debug, Default)]
pub struct Change {
    /// Whole objects as they are.
    old: Table,
    /// The same objects as they should be.
    new: Table,
    /// Single elements of sets that stay.
    elements: BTreeMap<String, Elements>,
    /// The interfaces of host endpoints that are led elsewhere.
    pub host_interfaces: BTreeSet<String>,
    /// The programs that it is about.
    pub programs: BTreeSet<String>,
    /// The policies that it is about.
    pub policies: BTreeSet<PolicyId>,
}

/// The changes of a table in three steps, each of which leaves what is asked about packets as it is, but for the second.
///
/// A packet may be on its way through the chains while a transaction becomes true. It goes on by the rules that it began
/// with, but each set is looked up as it is by then (`nft_do_chain` and `nft_lookup_eval` of Linux 6.18): it could come to
/// a chain that has no rules yet for it, or with the number of a program that is not there any more. So what is new is there
/// one transaction before anything leads to it, and what is old one longer.
#[derive(Debug, Default)]
pub struct Steps {
    /// What nothing leads to yet.
    pub prepare: Vec<Op>,
    /// What packets notice.
    pub switch: Vec<Op>,
    /// What nothing leads to any more.
    pub clear: Vec<Op>,
}

/// What becomes of single keys of a set.
#[derive(Debug)]
struct Elements {
    spec: SetSpec,
    keys: BTreeMap<Key, Option<Value>>,
}

impl Change {
    /// Has a set be that, or not be there.
    pub fn set(&mut self, kernel: &Table, name: &str, new: Option<Set>) {
        if let Some(old) = kernel.sets.get(name) {
            self.old.sets.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.sets.insert(name.to_owned(), new);
        }
    }

    /// Has a chain be that, or not be there.
    pub fn chain(&mut self, kernel: &Table, name: &str, new: Option<Chain>) {
        if let Some(old) = kernel.chains.get(name) {
            self.old.chains.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.chains.insert(name.to_owned(), new);
        }
    }

    /// The chains as they should be.
    pub fn new_chains(&mut self) -> impl Iterator<Item = &mut Chain> {
        self.new.chains.values_mut()
    }

    /// The chains as they should be, with their names.
    pub fn new_chains_by_name(&mut self) -> impl Iterator<Item = (&String, &mut Chain)> {
        self.new.chains.iter_mut()
    }

    /// Leaves out chains as they should be: they are not to be there.
    pub fn retain_new_chains(&mut self, stays: impl Fn(&Chain) -> bool) {
        self.new.chains.retain(|_, chain| stays(chain));
    }

    /// The same chains as they are, and those that go.
    pub fn old_chains(&self) -> impl Iterator<Item = &Chain> {
        self.old.chains.values()
    }

    /// Has a set have a key with this value, or not have it.
    pub fn element(&mut self, set: &str, spec: impl FnOnce() -> SetSpec, key: Key, value: Option<Value>) {
        if let Some(elements) = self.elements.get_mut(set) {
            elements.keys.insert(key, value);
            return;
        }
        let elements = Elements { spec: spec(), keys: [(key, value)].into() };
        self.elements.insert(set.to_owned(), elements);
    }

    /// Whether there is a set of this name after the change.
    pub fn has_set(&self, kernel: &Table, name: &str) -> bool {
        let untouched = kernel.sets.contains_key(name) && !self.old.sets.contains_key(name);
        untouched || self.new.sets.contains_key(name)
    }

    /// The whole table, where the change begins with none.
    pub fn into_table(self, flags: u32) -> Table {
        let mut table = self.new;
        table.flags = flags;
        for (name, elements) in self.elements {
            let set = table.sets.entry(name);
            let set = set.or_insert_with(|| Set { spec: elements.spec, elements: BTreeMap::new() });
            let wanted = elements.keys.into_iter().filter_map(|(key, value)| Some((key, value?)));
            set.elements.extend(wanted);
        }
        table
    }

    /// The changes of the table.
    pub fn steps(&self, kernel: &Table) -> Steps {
        let (verdict, number) = (Some(DataKind::Verdict), Some(DataKind::Number));
        let mut prepare = additions(&self.new, &self.old);
        prepare.extend(self.element_ops(kernel, verdict, Option::is_some));
        let mut switch = self.element_ops(kernel, None, |_| true);
        switch.extend(self.element_ops(kernel, number, Option::is_none));
        switch.extend(alterations(&self.new, &self.old));
        switch.extend(self.element_ops(kernel, number, Option::is_some));
        let mut clear = self.element_ops(kernel, verdict, Option::is_none);
        clear.extend(removals(&self.new, &self.old));
        Steps { prepare, switch, clear }
    }

    /// The changes of single elements of sets of one kind that come, or go.
    fn element_ops(
        &self,
        kernel: &Table,
        data: Option<DataKind>,
        chosen: impl Fn(&Option<Value>) -> bool,
    ) -> Vec<Op> {
        let mut ops = Vec::new();
        // What goes as a whole is emptied then.
        let stays = |name: &String| self.new.sets.contains_key(name) || !self.old.sets.contains_key(name);
        let chosen_sets =
            self.elements.iter().filter(|(name, elements)| elements.spec.data == data && stays(name));
        for (name, elements) in chosen_sets {
            // A set that is put there as a whole has its elements already, but for what has been added since.
            let there = self.new.sets.get(name).or_else(|| kernel.sets.get(name));
            let (mut removed, mut added) = (Vec::new(), Vec::new());
            for (key, wanted) in elements.keys.iter().filter(|(_, wanted)| chosen(wanted)) {
                let actual = there.and_then(|set| set.elements.get(key));
                if actual == wanted.as_ref() {
                    continue;
                }
                removed.extend(actual.map(|value| Element { key: *key, value: value.clone() }));
                added.extend(wanted.iter().map(|value| Element { key: *key, value: value.clone() }));
            }
            let spec = &elements.spec;
            ops.extend(
                (!removed.is_empty()).then(|| Op::DeleteElements(name.clone(), spec.clone(), removed)),
            );
            ops.extend((!added.is_empty()).then(|| Op::AddElements(name.clone(), spec.clone(), added)));
        }
        ops
    }
}
