//! A change of the table: its affected parts before and after.

use std::collections::{BTreeMap, BTreeSet};

use tortie_policy::program::PolicyId;

use tortie_kernel::nftables::{
    Chain, DataKind, Element, Key, Op, Set, SetSpec, Table, Value, additions, alterations, removals,
};

/// What must change.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Whole objects before the change.
    old: Table,
    /// The same objects after the change.
    new: Table,
    /// Single elements of sets that stay.
    elements: BTreeMap<String, Elements>,
    /// The interfaces of host endpoints that get another program.
    pub host_interfaces: BTreeSet<String>,
    /// The affected programs.
    pub programs: BTreeSet<String>,
    /// The affected policies.
    pub policies: BTreeSet<PolicyId>,
}

/// The changes of a table in three steps. Only the second step changes how packets are judged.
///
/// A packet may be on its way through the chains while a transaction takes effect. It continues with the rules that
/// it started with, but each set is looked up in its current state (`nft_do_chain` and `nft_lookup_eval` of Linux
/// 6.18). It could reach a chain without its new rules, or carry the number of a program that no longer exists.
/// Therefore new objects exist one transaction before anything leads to them, and old objects stay one transaction
/// longer.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// Objects that nothing leads to yet.
    pub prepare: Vec<Op>,
    /// Changes that packets notice.
    pub switch: Vec<Op>,
    /// Objects that nothing leads to any more.
    pub clear: Vec<Op>,
}

/// Changes of single keys of a set.
#[derive(Debug)]
struct Elements {
    spec: SetSpec,
    keys: BTreeMap<Key, Option<Value>>,
}

impl Change {
    /// Sets the desired state of a set; `None` removes it.
    pub(super) fn set(&mut self, kernel: &Table, name: &str, new: Option<Set>) {
        if let Some(old) = kernel.sets.get(name) {
            self.old.sets.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.sets.insert(name.to_owned(), new);
        }
    }

    /// Sets the desired state of a chain; `None` removes it.
    pub(super) fn chain(&mut self, kernel: &Table, name: &str, new: Option<Chain>) {
        if let Some(old) = kernel.chains.get(name) {
            self.old.chains.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.chains.insert(name.to_owned(), new);
        }
    }

    /// The desired chains.
    pub(super) fn new_chains(&mut self) -> impl Iterator<Item = &mut Chain> {
        self.new.chains.values_mut()
    }

    /// The desired chains with their names.
    pub(super) fn new_chains_by_name(&mut self) -> impl Iterator<Item = (&String, &mut Chain)> {
        self.new.chains.iter_mut()
    }

    /// Removes desired chains for which the condition does not hold.
    pub(super) fn retain_new_chains(&mut self, stays: impl Fn(&Chain) -> bool) {
        self.new.chains.retain(|_, chain| stays(chain));
    }

    /// The current state of these chains, including those to be removed.
    pub(super) fn old_chains(&self) -> impl Iterator<Item = &Chain> {
        self.old.chains.values()
    }

    /// Sets the value of a key in a set; `None` removes the key.
    pub(super) fn element(
        &mut self,
        set: &str,
        spec: impl FnOnce() -> SetSpec,
        key: Key,
        value: Option<Value>,
    ) {
        if let Some(elements) = self.elements.get_mut(set) {
            elements.keys.insert(key, value);
            return;
        }
        let elements = Elements { spec: spec(), keys: [(key, value)].into() };
        self.elements.insert(set.to_owned(), elements);
    }

    /// Whether a set of this name exists after the change.
    pub(super) fn has_set(&self, kernel: &Table, name: &str) -> bool {
        let unaffected = kernel.sets.contains_key(name) && !self.old.sets.contains_key(name);
        unaffected || self.new.sets.contains_key(name)
    }

    /// The whole table, if the change starts from none.
    pub(super) fn into_table(self, flags: u32) -> Table {
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

    /// The operations on the table.
    pub(super) fn steps(&self, kernel: &Table) -> Steps {
        let verdict = Some(DataKind::Verdict);
        let loaded = |chosen: fn(&Option<Value>) -> bool| {
            DataKind::LOADED.into_iter().flat_map(move |kind| self.element_ops(kernel, Some(kind), chosen))
        };
        let mut prepare = additions(&self.new, &self.old);
        prepare.extend(self.element_ops(kernel, verdict, Option::is_some));
        let mut switch = self.element_ops(kernel, None, |_| true);
        switch.extend(loaded(Option::is_none));
        switch.extend(alterations(&self.new, &self.old));
        switch.extend(loaded(Option::is_some));
        let mut clear = self.element_ops(kernel, verdict, Option::is_none);
        clear.extend(removals(&self.new, &self.old));
        Steps { prepare, switch, clear }
    }

    /// The operations that add, or remove, single elements of sets of one kind.
    fn element_ops(
        &self,
        kernel: &Table,
        data: Option<DataKind>,
        chosen: impl Fn(&Option<Value>) -> bool,
    ) -> Vec<Op> {
        let mut ops = Vec::new();
        // A set that is removed as a whole is emptied with it.
        let stays = |name: &String| self.new.sets.contains_key(name) || !self.old.sets.contains_key(name);
        let chosen_sets =
            self.elements.iter().filter(|(name, elements)| elements.spec.data == data && stays(name));
        for (name, elements) in chosen_sets {
            // A set that is created as a whole contains its elements already, except for those added since.
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

#[cfg(test)]
mod tests {
    use tortie_kernel::nftables::{Data, Field, Verdict};

    use super::*;

    /// A packet that has read the old number still finds its chain.
    #[test]
    fn what_nothing_leads_to_any_more_goes_in_a_transaction_of_its_own() {
        let (old, new) = (Key::byte(1), Key::byte(2));
        let spec = || SetSpec::verdict_map(&[Field::Protocol]);
        let jump = |chain: &str| Value::new(None, Some(Data::Verdict(Verdict::Jump(chain.to_owned()))));
        let set = |spec: SetSpec, elements: &[(Key, Value)]| Set {
            spec,
            elements: elements.iter().cloned().collect(),
        };
        let addresses = set(SetSpec::hash(&[Field::Ipv4]), &[]);
        let kernel = Table {
            flags: 0,
            chains: [("old-0".to_owned(), Chain::default())].into(),
            sets: [
                ("addresses".to_owned(), addresses.clone()),
                ("chains".to_owned(), set(spec(), &[(old, jump("old-0"))])),
            ]
            .into(),
        };
        let mut change = Change::default();
        change.chain(&kernel, "old-0", None);
        change.chain(&kernel, "new-0", Some(Chain::default()));
        change.set(&kernel, "addresses", None);
        change.element("chains", spec, old, None);
        change.element("chains", spec, new, Some(jump("new-0")));
        let element = |key, chain: &str| vec![Element { key, value: jump(chain) }];
        let Steps { prepare, switch, clear } = change.steps(&kernel);
        let expected = [
            Op::AddChain("new-0".into(), None),
            Op::AddElements("chains".into(), spec(), element(new, "new-0")),
        ];
        assert_eq!(prepare, expected);
        assert_eq!(switch, []);
        let expected = [
            Op::DeleteElements("chains".into(), spec(), element(old, "old-0")),
            Op::DeleteChain("old-0".into()),
            Op::DeleteSet("addresses".into()),
        ];
        assert_eq!(clear, expected);
    }
}
