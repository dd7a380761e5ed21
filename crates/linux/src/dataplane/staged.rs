//! Commits changes to the kernel: in one transaction or, if they do not fit in one, in stages.
//!
//! Packets meet the state between two transactions, which must let nothing through that neither the state before nor
//! the state after lets through. So a change in stages first closes the interfaces concerned: those of pods lead to
//! no program any more, and those of host endpoints lead to a program that denies (failsafe ports and established
//! flows come before it). Then it changes everything that they need, in any order. Finally it leads the interfaces to
//! their programs again, in the order of [`Slot`]s. At any moment each endpoint is in its state before, closed, or in
//! its state after, and no endpoint is in its state before while another is in its state after. Only established
//! flows that untracked policies deny, before and after, may continue meanwhile.
//!
//! A transaction is not one instant for packets: its rules count before its ranges do. So new chains and new sets of ranges come in an
//! earlier transaction than what leads to them.

use std::collections::BTreeSet;
use std::time::Instant;

use tortie_kernel::Result;
use tortie_kernel::nftables::{
    Element, Encoded, Key, Op, SetSpec, Table, Transaction, additions, alterations, changeable, changes,
    created, diff, removals,
};

use super::change::{Change, Steps};
use super::dirty::Dirty;
use super::literals;
use super::skeleton::{CLOSED, is_of_skeleton, program_key};
use super::slots::Slot;
use super::table::PolicyTable;
use crate::quiescence::wait_for_packets;

impl PolicyTable {
    /// Writes the whole table.
    pub(super) fn put_whole(&mut self, new: &Table, actual: Option<Table>) -> Result<()> {
        if let Some(actual) = actual.as_ref().filter(|actual| changeable(new, actual)) {
            let adoption = (new.flags != actual.flags).then_some(Op::AddTable(new.flags));
            let prepare = adoption.into_iter().chain(additions(new, actual)).collect();
            let steps = Steps { prepare, switch: alterations(new, actual), clear: removals(new, actual) };
            if let Some(steps) = self.encode_if_fitting(steps) {
                return self.put_steps(&mut actual.clone(), steps);
            }
        } else if actual.is_none() {
            // Nothing was in force, so a packet that meets a rule without its ranges passes no earlier rule.
            let at_once = self.nft.encode(diff(&self.config.table, new, None));
            if self.nft.fits(&at_once) {
                return self.commit(at_once);
            }
        }
        let replaced = actual.as_ref().is_some_and(|actual| !changeable(new, actual));
        let mut kernel = match actual {
            Some(actual) if changeable(new, &actual) => {
                let mut kernel = actual;
                let adoption = (new.flags != kernel.flags).then_some(Op::AddTable(new.flags));
                let ops = adoption.into_iter().chain(closing(&kernel, |_| true, &host_interfaces(new)));
                self.put_in_order(&mut kernel, ops.collect())?;
                kernel
            }
            // The frame alone closes every pod. Hosts without policy stay without policy. After another table, which
            // may have had policy for them, they are closed, too.
            actual => {
                let closed_hosts = if actual.is_some() { host_interfaces(new) } else { BTreeSet::new() };
                let skeleton = without_endpoints(new, &closed_hosts);
                let deletion = actual.map(|_| Op::DeleteTable);
                self.commit(self.encode(deletion.into_iter().chain(created(&skeleton)).collect()))?;
                skeleton
            }
        };
        let stages = by_slot(changes(new, &kernel), |map| new.sets.contains_key(map));
        let transactions = self.put_stages(&mut kernel, stages)?;
        if replaced {
            tracing::warn!(
                transactions,
                "a table of another form was replaced; all pods were closed until the new one was complete"
            );
            return Ok(());
        }
        tracing::warn!(
            transactions,
            "the table did not fit in one nftables transaction; all pods were closed until it was complete. Root, or \
             a larger net.core.wmem_max, makes room for more"
        );
        Ok(())
    }

    /// Writes a part of the table, and applies it to `kernel`.
    pub(super) fn put_part(&mut self, kernel: &mut Table, mut change: Change, dirty: &Dirty) -> Result<()> {
        if let Some(steps) = self.encode_if_fitting(change.steps(kernel)) {
            return self.put_steps(kernel, steps);
        }
        let interfaces = self.desired_table.concerned(dirty, &change);
        let keys =
            |of: &BTreeSet<String>| of.iter().map(|name| Key::interface(name)).collect::<BTreeSet<_>>();
        let (pods, hosts) = (keys(&interfaces.of_pods), keys(&interfaces.of_hosts));
        self.put_in_order(kernel, closing(kernel, |key| pods.contains(key), &hosts))?;
        self.desired_table.open(&interfaces, &self.config, &mut change);
        let Steps { prepare, switch, clear } = change.steps(kernel);
        let stages = by_slot([prepare, switch, clear].concat(), |map| change.has_set(kernel, map));
        let transactions = self.put_stages(kernel, stages)?;
        tracing::warn!(
            transactions,
            pods = pods.len(),
            "the change did not fit in one nftables transaction; the pods that it is about were closed until it was \
             complete. Root, or a larger net.core.wmem_max, makes room for more"
        );
        Ok(())
    }

    /// Encodes the steps, if each of them fits in one transaction.
    fn encode_if_fitting(&self, steps: Steps) -> Option<EncodedSteps> {
        let Steps { prepare, switch, clear } = steps;
        let comes_first = prepare.iter().any(is_late);
        let boundary = prepare.len();
        // Encoded together, so that the ids of anonymous sets are unique if both are sent in one transaction.
        let both = self.encode([prepare, switch].concat());
        let first = if comes_first || !self.nft.fits(&both) {
            let (prepare, switch) = both.split_at(boundary);
            vec![prepare, switch]
        } else {
            vec![both]
        };
        let clear = self.encode(clear);
        let fit = first.iter().chain([&clear]).all(|part| self.nft.fits(part));
        fit.then_some(EncodedSteps { first, clear })
    }

    /// Commits the first two steps, and keeps the third one for later.
    fn put_steps(&mut self, kernel: &mut Table, steps: EncodedSteps) -> Result<()> {
        for part in steps.first {
            self.put(kernel, part)?;
        }
        self.garbage = steps.clear;
        self.switched = Instant::now();
        Ok(())
    }

    /// Removes what nothing has led to since the last change.
    pub(super) fn clear_garbage(&mut self) -> Result<()> {
        let Some(mut kernel) = self.kernel.take() else { return Ok(()) };
        let garbage = std::mem::take(&mut self.garbage);
        if garbage.ops().iter().any(|op| matches!(op, Op::DeleteChain(_))) {
            wait_for_packets(self.switched);
        }
        self.put(&mut kernel, garbage)?;
        self.kernel = Some(kernel);
        Ok(())
    }

    fn encode(&self, ops: Vec<Op>) -> Encoded {
        self.nft.encode(Transaction { table: self.config.table.clone(), ops })
    }

    fn put(&mut self, kernel: &mut Table, changes: Encoded) -> Result<()> {
        changes.ops().iter().for_each(|op| kernel.apply(op));
        self.commit(changes)
    }

    /// Commits both stages in transactions of their own, because of [`is_late`].
    fn put_stages(&mut self, kernel: &mut Table, [first, leading]: [Vec<Op>; 2]) -> Result<usize> {
        Ok(self.put_in_order(kernel, first)? + self.put_in_order(kernel, leading)?)
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

    fn commit(&mut self, changes: Encoded) -> Result<()> {
        let count = changes.ops().len();
        if count == 0 {
            return Ok(());
        }
        let started = Instant::now();
        self.nft.commit_encoded(changes)?;
        tracing::debug!(changes = count, took = ?started.elapsed(), "nftables changed");
        Ok(())
    }
}

/// The encoded steps of a change.
struct EncodedSteps {
    /// The preparation and the switch: one transaction if packets cannot notice the difference, otherwise two.
    first: Vec<Encoded>,
    clear: Encoded,
}

/// Whether a packet may meet the rules of the same transaction and not this addition. The kernel makes the rules of a transaction current
/// first, and then replaces the ranges of its sets (`set->ops->commit` in `nf_tables_commit`): those of concatenations in all versions,
/// and those of single fields in newer ones (`nft_set_rbtree.c` of Linux 6.18.44). A packet in between finds no range of a new set.
fn is_late(op: &Op) -> bool {
    match op {
        Op::AddChain(..) => true,
        Op::AddElements(_, spec, _) => spec.interval,
        _ => false,
    }
}

/// The changes that close interfaces: the selected ones of pods, and these of host endpoints, including those that
/// the host endpoint for all other interfaces covered.
fn closing(kernel: &Table, pods: impl Fn(&Key) -> bool, hosts: &BTreeSet<Key>) -> Vec<Op> {
    let mut ops = Vec::new();
    for slot in Slot::OF_PODS {
        let Some((map, spec, there)) = led(kernel, slot, &pods) else { continue };
        ops.push(Op::DeleteElements(map, spec, there));
    }
    for slot in Slot::OF_HOSTS {
        let Some((map, spec, there)) = led(kernel, slot, &|key| hosts.contains(key)) else { continue };
        let denied = hosts.iter().map(|key| Element::number(*key, CLOSED)).collect();
        ops.push(Op::DeleteElements(map.clone(), spec.clone(), there));
        ops.push(Op::AddElements(map, spec, denied));
    }
    ops.retain(
        |op| !matches!(op, Op::DeleteElements(_, _, none) | Op::AddElements(_, _, none) if none.is_empty()),
    );
    ops
}

/// The selected interfaces that lead to programs, if any: the name of the map, its type, and its elements.
fn led(
    kernel: &Table,
    slot: Slot,
    chosen: &impl Fn(&Key) -> bool,
) -> Option<(String, SetSpec, Vec<Element>)> {
    let name = slot.maps().0;
    let map = kernel.sets.get(name)?;
    let elements = map.elements.iter().filter(|(key, _)| chosen(key));
    let elements = elements.map(|(key, value)| Element { key: *key, value: value.clone() }).collect();
    Some((name.to_owned(), map.spec.clone(), elements))
}

/// The interfaces with programs of host endpoints.
fn host_interfaces(table: &Table) -> BTreeSet<Key> {
    let maps = Slot::OF_HOSTS.into_iter().filter_map(|slot| table.sets.get(slot.maps().0));
    maps.flat_map(|map| map.elements.keys()).copied().collect()
}

/// The changes in two stages: those that lead interfaces to programs come last, in the order of slots. `stays` says
/// whether a map exists afterwards.
fn by_slot(ops: Vec<Op>, stays: impl Fn(&str) -> bool) -> [Vec<Op>; 2] {
    let slot = |op: &Op| match op {
        Op::AddElements(map, ..) | Op::DeleteElements(map, ..) if stays(map) => Slot::of_programs(map),
        _ => None,
    };
    let (mut leading, first): (Vec<_>, Vec<_>) = ops.into_iter().partition(|op| slot(op).is_some());
    leading.sort_by_key(slot);
    [first, leading]
}

/// The base chains and the chains that they jump to directly, without endpoints, with these interfaces of hosts
/// closed.
fn without_endpoints(table: &Table, closed_hosts: &BTreeSet<Key>) -> Table {
    let mut skeleton = table.clone();
    skeleton.chains.retain(|name, _| is_of_skeleton(name));
    let spelled_out: Vec<_> = skeleton.chains.values().flat_map(literals::names).collect();
    skeleton.sets.retain(|name, _| is_of_skeleton(name) || spelled_out.contains(name));
    for (_, set) in skeleton.sets.iter_mut().filter(|(name, _)| is_of_skeleton(name)) {
        set.elements.retain(|key, _| *key == program_key(CLOSED));
    }
    for slot in Slot::OF_HOSTS {
        let Some(map) = skeleton.sets.get_mut(slot.maps().0) else { continue };
        let closed = closed_hosts.iter().map(|key| Element::number(*key, CLOSED));
        map.elements.extend(closed.map(|element| (element.key, element.value)));
    }
    skeleton
}
