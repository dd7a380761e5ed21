//! How changes get into the kernel: in one transaction, or, where they do not fit in one, in stages.
//!
//! Packets meet what is between two transactions, and that must let nothing through that neither the state before nor
//! the state after does. So first the pods that a change is about are taken out of the maps of interfaces, which closes
//! them; then all that they need is changed, in whatever order; and at last they come back, each to its new chains. At
//! any moment each pod is as before, closed, or as after, and none is as before while another is as after.

use std::collections::{BTreeMap, BTreeSet};

use tortie_policy::program::SetId;

use super::chains::{FORWARD, FROM_MAP, FROM_WORKLOAD, INPUT, TO_MAP, TO_WORKLOAD, VXLAN_PEERS};
use super::policy::{Change, Dirty, PolicyTable, Touched};
use crate::Result;
use crate::nftables::{Element, Key, Op, Set, Table, Transaction, changeable, changes, created, diff};

const MAPS: [&str; 2] = [FROM_MAP, TO_MAP];

impl PolicyTable {
    /// Makes the whole table.
    pub fn put_whole(&mut self, new: &Table, actual: Option<Table>) -> Result<()> {
        let at_once = diff(&self.config.table, new, actual.as_ref());
        if self.nft.fits(&at_once) {
            return self.commit(at_once.ops);
        }
        let mut kernel = match actual {
            Some(actual) if changeable(new, &actual) => {
                let mut kernel = actual;
                let adoption = (new.flags != kernel.flags).then_some(Op::AddTable(new.flags));
                let closing = MAPS.iter().filter_map(|map| removal(map, kernel.sets.get(*map)?, |_| true));
                let ops: Vec<_> = adoption.into_iter().chain(closing).collect();
                self.put_in_order(&mut kernel, ops)?;
                kernel
            }
            // The frame alone closes every pod.
            actual => {
                let frame = frame(new);
                let deletion = actual.map(|_| Op::DeleteTable);
                self.commit(deletion.into_iter().chain(created(&frame)).collect())?;
                frame
            }
        };
        let ops = changes(new, &kernel);
        let transactions = self.put_in_order(&mut kernel, ops)?;
        tracing::warn!(
            transactions,
            "the table did not fit in one nftables transaction; all pods were closed until it was complete. Root, or \
             a larger net.core.wmem_max, makes room for more"
        );
        Ok(())
    }

    /// Makes a part of the table: single members, then the rest. `closing` are the interfaces that it is about.
    pub fn put_part(
        &mut self,
        kernel: &mut Table,
        change: &Change,
        members: Vec<Op>,
        closing: &BTreeSet<Key>,
    ) -> Result<()> {
        let ops = [members.clone(), changes(&change.new, &change.old)].concat();
        let at_once = Transaction { table: self.config.table.clone(), ops };
        if self.nft.fits(&at_once) {
            at_once.ops.iter().for_each(|op| kernel.apply(op));
            return self.commit(at_once.ops);
        }
        let (mut old, mut new) = (change.old.clone(), change.new.clone());
        for map in MAPS {
            if let (false, Some(there)) = (new.sets.contains_key(map), kernel.sets.get(map)) {
                new.sets.insert(map.to_owned(), there.clone());
            }
        }
        let is_closing = |key: &Key| closing.contains(key);
        let ops = MAPS.iter().filter_map(|map| removal(map, kernel.sets.get(*map)?, is_closing)).collect();
        self.put_in_order(kernel, ops)?;
        for map in MAPS {
            old.sets.extend(kernel.sets.get(map).map(|closed| (map.to_owned(), closed.clone())));
        }
        let ops = [members, changes(&new, &old)].concat();
        let transactions = self.put_in_order(kernel, ops)?;
        tracing::warn!(
            transactions,
            pods = closing.len(),
            "the change did not fit in one nftables transaction; the pods that it is about were closed until it was \
             complete. Root, or a larger net.core.wmem_max, makes room for more"
        );
        Ok(())
    }

    /// The interfaces of the pods that a change is about: their place, their programs, or sets of these change.
    pub fn concerned(
        &self,
        sets: &BTreeMap<SetId, Touched>,
        dirty: &Dirty,
        change: &Change,
    ) -> BTreeSet<Key> {
        let changes = |program: &String| {
            let rendered = self.programs.get(program);
            change.programs.contains_key(program)
                || rendered.is_none_or(|rendered| rendered.sets.iter().any(|set| sets.contains_key(set)))
        };
        let concerned = self.endpoints.iter().filter(|(id, placed)| {
            dirty.endpoints.contains(*id) || changes(&placed.ingress) || changes(&placed.egress)
        });
        concerned.map(|(_, placed)| Key::interface(&placed.interface)).collect()
    }

    fn put_in_order(&mut self, kernel: &mut Table, ops: Vec<Op>) -> Result<usize> {
        if ops.is_empty() {
            return Ok(0);
        }
        let transaction = Transaction { table: self.config.table.clone(), ops };
        let transactions = self.nft.commit_in_order(&transaction)?;
        transaction.ops.iter().for_each(|op| kernel.apply(op));
        Ok(transactions)
    }

    fn commit(&mut self, ops: Vec<Op>) -> Result<()> {
        if ops.is_empty() {
            return Ok(());
        }
        let started = std::time::Instant::now();
        let transaction = Transaction { table: self.config.table.clone(), ops };
        self.nft.commit(&transaction)?;
        tracing::debug!(changes = transaction.ops.len(), took = ?started.elapsed(), "nftables changed");
        Ok(())
    }
}

/// The change that takes chosen elements out of a map, if there are any.
fn removal(name: &str, map: &Set, chosen: impl Fn(&Key) -> bool) -> Option<Op> {
    let elements = map.elements.iter().filter(|(key, _)| chosen(key));
    let elements: Vec<_> = elements.map(|(key, value)| Element { key: *key, value: value.clone() }).collect();
    (!elements.is_empty()).then(|| Op::DeleteElements(name.to_owned(), map.spec.clone(), elements))
}

/// The base chains and what they lead to at once, for no pod and no other node.
fn frame(table: &Table) -> Table {
    let chains = [FORWARD, INPUT, FROM_WORKLOAD, TO_WORKLOAD];
    let chains = chains.iter().filter_map(|name| table.chains.get_key_value(*name));
    let sets = [FROM_MAP, TO_MAP, VXLAN_PEERS].into_iter().filter_map(|name| {
        let spec = table.sets.get(name)?.spec.clone();
        Some((name.to_owned(), Set { spec, elements: BTreeMap::new() }))
    });
    Table {
        flags: table.flags,
        chains: chains.map(|(name, chain)| (name.clone(), chain.clone())).collect(),
        sets: sets.collect(),
    }
}
