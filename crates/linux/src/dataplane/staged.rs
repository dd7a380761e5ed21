//! How changes get into the kernel: at once (see [`in_flight`]), or, where they do not fit in one transaction, in stages.
//!
//! Packets meet what is between two transactions, and that must let nothing through that neither the state before nor
//! the state after does. So first the interfaces of the pods that a change is about are led to no program any more, which
//! closes them, and those of host endpoints to one that denies (failsafe ports and established flows go before); then all
//! that they need is changed, in whatever order; and at last they are led to their programs again. At any moment each
//! endpoint is as before, closed, or as after, and none is as before while another is as after. Host endpoints' untracked
//! policies are the exception: they stay where they are, as without them established flows would be cut, too.

use std::collections::BTreeSet;

use super::change::Change;
use super::dirty::Dirty;
use super::frame::{CLOSED, is_of_frame, program_key};
use super::in_flight;
use super::literals;
use super::slots::{Slot, Stage};
use super::table::PolicyTable;
use crate::Result;
use crate::nftables::{Element, Key, Op, SetSpec, Table, Transaction, changeable, changes, created, diff};

impl PolicyTable {
    /// Makes the whole table.
    pub fn put_whole(&mut self, new: &Table, actual: Option<Table>) -> Result<()> {
        let at_once = diff(&self.config.table, new, actual.as_ref());
        if self.nft.fits(&at_once) {
            let nothing = Table::default();
            return self.commit_around_packets(at_once.ops, actual.as_ref().unwrap_or(&nothing));
        }
        let mut kernel = match actual {
            Some(actual) if changeable(new, &actual) => {
                let mut kernel = actual;
                let adoption = (new.flags != kernel.flags).then_some(Op::AddTable(new.flags));
                let ops: Vec<_> = adoption.into_iter().chain(closing(&kernel, |_| true, |_| true)).collect();
                self.put_in_order(&mut kernel, ops)?;
                kernel
            }
            // The frame alone closes every pod, and leaves hosts as they were: without policy.
            actual => {
                let frame = without_endpoints(new);
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
            let after = at_once.ops.clone();
            self.commit_around_packets(at_once.ops, kernel)?;
            after.iter().for_each(|op| kernel.apply(op));
            return Ok(());
        }
        let interfaces = self.wanted.concerned(dirty, &change);
        let keys =
            |of: &BTreeSet<String>| of.iter().map(|name| Key::interface(name)).collect::<BTreeSet<_>>();
        let (pods, hosts) = (keys(&interfaces.of_pods), keys(&interfaces.of_hosts));
        let closing = closing(kernel, |key| pods.contains(key), |key| hosts.contains(key));
        self.put_in_order(kernel, closing)?;
        self.wanted.open(&interfaces, &self.config, &mut change);
        let transactions = self.put_in_order(kernel, change.ops(kernel))?;
        tracing::warn!(
            transactions,
            pods = pods.len(),
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

    /// Commits changes so that packets on their way through the chains are not led astray.
    fn commit_around_packets(&mut self, ops: Vec<Op>, kernel: &Table) -> Result<()> {
        in_flight::transactions(ops, kernel).into_iter().try_for_each(|ops| self.commit(ops))
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

/// The changes that close interfaces of pods and of host endpoints.
fn closing(kernel: &Table, pods: impl Fn(&Key) -> bool, hosts: impl Fn(&Key) -> bool) -> Vec<Op> {
    let mut ops = Vec::new();
    for slot in Slot::OF_PODS {
        ops.extend(led(kernel, slot, &pods).map(|(map, spec, there)| Op::DeleteElements(map, spec, there)));
    }
    for slot in Slot::OF_HOSTS.into_iter().filter(|slot| slot.stage() != Stage::Untracked) {
        let Some((map, spec, there)) = led(kernel, slot, &hosts) else { continue };
        let denied = there.iter().map(|element| Element::number(element.key, CLOSED)).collect();
        ops.extend([
            Op::DeleteElements(map.clone(), spec.clone(), there),
            Op::AddElements(map, spec, denied),
        ]);
    }
    ops
}

/// The chosen interfaces that are led to programs, if there are any: the name of the map, what it is, and its elements.
fn led(
    kernel: &Table,
    slot: Slot,
    chosen: &impl Fn(&Key) -> bool,
) -> Option<(String, SetSpec, Vec<Element>)> {
    let name = slot.maps().0;
    let map = kernel.sets.get(name)?;
    let elements = map.elements.iter().filter(|(key, _)| chosen(key));
    let elements: Vec<_> = elements.map(|(key, value)| Element { key: *key, value: value.clone() }).collect();
    (!elements.is_empty()).then(|| (name.to_owned(), map.spec.clone(), elements))
}

/// The base chains and what they lead to at once, for no endpoint.
fn without_endpoints(table: &Table) -> Table {
    let mut frame = table.clone();
    frame.chains.retain(|name, _| is_of_frame(name));
    let spelled_out: Vec<_> = frame.chains.values().flat_map(literals::names).collect();
    frame.sets.retain(|name, _| is_of_frame(name) || spelled_out.contains(name));
    for (_, set) in frame.sets.iter_mut().filter(|(name, _)| is_of_frame(name)) {
        set.elements.retain(|key, _| *key == program_key(CLOSED));
    }
    frame
}
