//! How changes get into the kernel: in one transaction, or, where they do not fit in one, in stages.
//!
//! Packets meet what is between two transactions, and that must let nothing through that neither the state before nor
//! the state after does. So first the interfaces of the pods that a change is about are led to no program any more, which
//! closes them; then all that they need is changed, in whatever order; and at last they are led to their programs again.
//! At any moment each pod is as before, closed, or as after, and none is as before while another is as after.

use super::change::Change;
use super::dirty::Dirty;
use super::frame::{FROM_PROGRAM, TO_PROGRAM, is_of_frame};
use super::literals;
use super::table::PolicyTable;
use crate::Result;
use crate::nftables::{Element, Key, Op, Set, Table, Transaction, changeable, changes, created, diff};

const MAPS: [&str; 2] = [FROM_PROGRAM, TO_PROGRAM];

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
                let frame = without_pods(new);
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

    /// Makes a part of the table, and takes it into `kernel`.
    pub fn put_part(&mut self, kernel: &mut Table, mut change: Change, dirty: &Dirty) -> Result<()> {
        let at_once = Transaction { table: self.config.table.clone(), ops: change.ops(kernel) };
        if self.nft.fits(&at_once) {
            at_once.ops.iter().for_each(|op| kernel.apply(op));
            return self.commit(at_once.ops);
        }
        let interfaces = self.wanted.concerned(dirty, &change);
        let keys: Vec<_> = interfaces.iter().map(|interface| Key::interface(interface)).collect();
        let is_closing = |key: &Key| keys.contains(key);
        let closing =
            MAPS.iter().filter_map(|map| removal(map, kernel.sets.get(*map)?, is_closing)).collect();
        self.put_in_order(kernel, closing)?;
        self.wanted.open(&interfaces, &self.config, &mut change);
        let transactions = self.put_in_order(kernel, change.ops(kernel))?;
        tracing::warn!(
            transactions,
            pods = interfaces.len(),
            "the change did not fit in one nftables transaction; the pods that it is about were closed until it was \
             complete. Root, or a larger net.core.wmem_max, makes room for more"
        );
        Ok(())
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

/// The base chains and what they lead to at once, for no pod.
fn without_pods(table: &Table) -> Table {
    let mut frame = table.clone();
    frame.chains.retain(|name, _| is_of_frame(name));
    let spelled_out: Vec<_> = frame.chains.values().flat_map(literals::names).collect();
    frame.sets.retain(|name, _| is_of_frame(name) || spelled_out.contains(name));
    for (_, set) in frame.sets.iter_mut().filter(|(name, _)| is_of_frame(name)) {
        set.elements.clear();
    }
    frame
}
