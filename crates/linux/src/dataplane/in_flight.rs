//! Packets that are in the middle of the chains while a transaction comes in force.
//!
//! The kernel has such a packet go on by the rules of the moment at which it entered the base chain, but look maps and
//! sets up as they are now. If a map led it to a chain that came by the same transaction, the chain would have no rules
//! for it; and if the number of its program went by it, there would be no chain at all. So what nothing leads to yet comes
//! one transaction earlier, and what nothing leads to any more goes one later.
//!
//! What is left: a policy's chain whose rules change in the same transaction as a program that jumps to it, and sets that
//! change together with the rules that name them. There a packet may meet a mixture, in that instant.

use std::collections::BTreeSet;

use crate::nftables::{DataKind, Key, Op, SetSpec, Table};

/// The changes as transactions, in order: one, or three where programs come or go while packets are led to others.
pub fn transactions(ops: Vec<Op>, kernel: &Table) -> Vec<Vec<Op>> {
    let is_new = *kernel == Table::default() || ops.iter().any(|op| matches!(op, Op::DeleteTable));
    if is_new || !ops.iter().any(is_of_programs) {
        return vec![ops];
    }
    let named = Named::new(&ops, kernel);
    let [mut before, mut switch, mut after] = <[Vec<Op>; 3]>::default();
    for op in ops.into_iter().flat_map(one_by_one) {
        match named.when(&op) {
            When::Before => before.push(op),
            When::Switch => switch.push(op),
            When::After => after.push(op),
        }
    }
    if switch.is_empty() { vec![[before, after].concat()] } else { vec![before, switch, after] }
}

enum When {
    Before,
    Switch,
    After,
}

/// What the changes make and take away.
struct Named<'a> {
    kernel: &'a Table,
    /// The chains that come and are not entered by themselves, and those that go.
    new_chains: BTreeSet<String>,
    old_chains: BTreeSet<String>,
    old_sets: BTreeSet<String>,
    /// The keys of maps to chains that are there afterwards.
    keys: BTreeSet<(String, Key)>,
}

impl<'a> Named<'a> {
    fn new(ops: &[Op], kernel: &'a Table) -> Self {
        let [new_chains, old_chains, old_sets] = <[BTreeSet<String>; 3]>::default();
        let mut named = Self { kernel, new_chains, old_chains, old_sets, keys: BTreeSet::new() };
        for op in ops {
            match op {
                Op::AddChain(name, None) => drop(named.new_chains.insert(name.clone())),
                Op::DeleteChain(name) => drop(named.old_chains.insert(name.clone())),
                Op::DeleteSet(name) => drop(named.old_sets.insert(name.clone())),
                Op::AddElements(name, spec, elements) if leads_to_chains(spec) => {
                    named.keys.extend(elements.iter().map(|element| (name.clone(), element.key)));
                }
                _ => {}
            }
        }
        named
    }

    fn when(&self, op: &Op) -> When {
        let is_there = |name: &String, key: &Key| {
            self.kernel.sets.get(name).is_some_and(|set| set.elements.contains_key(key))
        };
        match op {
            Op::AddTable(_) | Op::AddSet(..) => When::Before,
            Op::AddChain(name, _) | Op::SetRules(name, _) if self.new_chains.contains(name) => When::Before,
            Op::AddElements(name, ..) if !self.kernel.sets.contains_key(name) => When::Before,
            Op::AddElements(name, spec, elements)
                if leads_to_chains(spec) && !elements.iter().any(|it| is_there(name, &it.key)) =>
            {
                When::Before
            }
            Op::DeleteChain(_) | Op::DeleteSet(_) => When::After,
            Op::SetRules(name, _) if self.old_chains.contains(name) => When::After,
            Op::DeleteElements(name, ..) if self.old_sets.contains(name) => When::After,
            Op::DeleteElements(name, spec, elements)
                if leads_to_chains(spec)
                    && !elements.iter().any(|it| self.keys.contains(&(name.clone(), it.key))) =>
            {
                When::After
            }
            _ => When::Switch,
        }
    }
}

/// Whether a program's chain comes, or its number goes.
fn is_of_programs(op: &Op) -> bool {
    match op {
        Op::AddChain(_, base) => base.is_none(),
        Op::DeleteElements(_, spec, _) => leads_to_chains(spec),
        _ => false,
    }
}

fn leads_to_chains(spec: &SetSpec) -> bool {
    spec.data == Some(DataKind::Verdict)
}

/// A change of a map to chains as changes of single elements: some come or go, others lead elsewhere.
fn one_by_one(op: Op) -> Vec<Op> {
    match op {
        Op::AddElements(name, spec, elements) if leads_to_chains(&spec) => {
            let add = |element| Op::AddElements(name.clone(), spec.clone(), vec![element]);
            elements.into_iter().map(add).collect()
        }
        Op::DeleteElements(name, spec, elements) if leads_to_chains(&spec) => {
            let delete = |element| Op::DeleteElements(name.clone(), spec.clone(), vec![element]);
            elements.into_iter().map(delete).collect()
        }
        op => vec![op],
    }
}
