//! The whole table, and the comparison with the kernel's.

use std::collections::BTreeMap;
use std::time::Instant;

use tortie_kernel::nftables::{
    Data, Element, Field, Key, Op, Set, SetSpec, Table, Value, Verdict, additions, alterations, changeable,
    changes, created, removals,
};

use super::affinity;
use super::chains;
use super::desired::Desired;
use super::layout::{CLASSES, Kind, List, PROTOCOLS, Place, SetId, SlotClass};
use super::words::WITH_PORTS;
use super::{ServiceTable, ServicesConfig};
use crate::dataplane::sets::Family;
use crate::quiescence::wait_for_packets;

/// The desired table.
pub(super) fn whole(desired: &Desired, config: &ServicesConfig) -> Table {
    let empty = |spec| Set { spec, elements: BTreeMap::new() };
    let mut sets: BTreeMap<SetId, Set> = SetId::all().map(|id| (id, empty(id.spec()))).collect();
    for ((id, key), value) in desired.all_entries() {
        sets.entry(id).or_insert_with(|| empty(id.spec())).elements.insert(key, value);
    }
    for ((id, key), backend) in desired.all_slots() {
        let element = Element::socket(key, backend.socket());
        sets.entry(id).or_insert_with(|| empty(id.spec())).elements.insert(element.key, element.value);
    }
    let mut table = Table {
        sets: sets.into_iter().map(|(id, set)| (id.name(), set)).collect(),
        chains: chains::fixed(config.masquerading, &desired.node_ports),
        ..Table::default()
    };
    let protocols = WITH_PORTS.map(|protocol| (Key::byte(protocol.0), Value::default()));
    let spec = SetSpec::hash(&[Field::Protocol]);
    table.sets.insert(PROTOCOLS.to_owned(), Set { spec, elements: protocols.into() });
    let mut classes = empty(classes_spec());
    for class in &desired.classes {
        let Element { key, value } = class_element(*class);
        classes.elements.insert(key, value);
        table.chains.insert(class.chain(), chains::of_class(*class));
    }
    table.sets.insert(CLASSES.to_owned(), classes);
    affinity::add_to(&mut table, desired.units());
    table
}

/// The changes that make a new class.
pub(super) fn class_ops(class: SlotClass) -> [Op; 3] {
    [
        Op::AddChain(class.chain(), None),
        Op::SetRules(class.chain(), chains::of_class(class).rules),
        Op::AddElements(CLASSES.to_owned(), classes_spec(), vec![class_element(class)]),
    ]
}

fn classes_spec() -> SetSpec {
    SetSpec::verdict_map(&[Field::Priority])
}

fn class_element(class: SlotClass) -> Element {
    Element::verdict(Key::number(class.number()), Verdict::Goto(class.chain()))
}

/// The classes of a table.
fn classes(table: &Table) -> impl Iterator<Item = SlotClass> {
    let elements = table.sets.get(CLASSES).into_iter().flat_map(|set| set.elements.keys());
    elements.filter_map(|key| {
        let number = u32::from_ne_bytes(key.bytes().try_into().ok()?);
        SlotClass::from_number(number)
    })
}

/// The backends of a frontend in a table.
fn backends(table: &Table, set: SetId, frontend: &Key) -> Vec<std::net::SocketAddr> {
    let Some(set) = table.sets.get(&set.name()) else { return Vec::new() };
    let backend = |slot: u32| match set.elements.get(&frontend.and(&slot.to_ne_bytes())?)?.data()? {
        Data::Socket(socket) => Some(*socket),
        _ => None,
    };
    (0..).map_while(backend).collect()
}

/// The sets of slots.
fn slots() -> impl Iterator<Item = SetId> {
    let kinds = Place::ALL.into_iter().flat_map(|place| List::ALL.map(|list| Kind::Slots(place, list)));
    kinds.flat_map(|kind| Family::ALL.map(|family| SetId::new(kind, family)))
}

/// The changes that add new slots to those of a table.
fn slot_additions(new: &Table, actual: &Table) -> Vec<Op> {
    let of =
        |table: &Table, name: &str| table.sets.get(name).map(|set| set.elements.clone()).unwrap_or_default();
    let ops = slots().filter_map(|id| {
        let name = id.name();
        let there = of(actual, &name);
        let come = of(new, &name).into_iter().filter(|(key, _)| !there.contains_key(key));
        let come: Vec<_> = come.map(|(key, value)| Element { key, value }).collect();
        (!come.is_empty()).then(|| Op::AddElements(name, id.spec(), come))
    });
    ops.collect()
}

impl ServiceTable {
    /// The table that the Services require.
    #[must_use]
    pub fn desired(&self) -> Table {
        whole(&self.desired, &self.config)
    }

    /// Compares the whole table with the kernel's, and makes the differences in the order of a change.
    pub(super) fn compare(&mut self) -> tortie_kernel::Result<()> {
        self.garbage.clear();
        self.nft.check_owner(&self.config.table)?;
        let actual = self.nft.list(&self.config.table)?;
        if let Some(actual) = &actual {
            // A chain of a class that no frontend has any more would only be made again.
            self.desired.classes.extend(classes(actual));
            if !self.has_adopted {
                self.desired.adopt_slots(|set, frontend| backends(actual, set, frontend));
            }
        }
        // Numbers that were given in another order may stand for others in the maps of clients.
        let is_ambiguous = !self.has_adopted && self.desired.is_ambiguous();
        if !self.has_adopted {
            // An earlier process may have left clients of former backends.
            let all: Vec<u32> = self.desired.units().map(|unit| unit.number).collect();
            self.desired.left.extend(all);
        }
        self.has_adopted = true;
        let new = whole(&self.desired, &self.config);
        if actual.as_ref() != Some(&new) {
            self.stale.note_all(&self.desired);
        }
        match actual {
            Some(actual) if changeable(&new, &actual) && !is_ambiguous => self.mend(&new, actual),
            actual => {
                let deletion = actual.map(|_| Op::DeleteTable);
                self.commit(deletion.into_iter().chain(created(&new)).collect())?;
                self.switched = Instant::now();
                Ok(())
            }
        }
    }

    fn mend(&mut self, new: &Table, mut kernel: Table) -> tortie_kernel::Result<()> {
        let prepare = [additions(new, &kernel), slot_additions(new, &kernel)].concat();
        prepare.iter().for_each(|op| kernel.apply(op));
        // The slots that go stay for the packets that have read their class.
        let mut switched = new.clone();
        for name in slots().map(|id| id.name()) {
            let (Some(set), Some(there)) = (switched.sets.get_mut(&name), kernel.sets.get(&name)) else {
                continue;
            };
            for (key, value) in &there.elements {
                set.elements.entry(*key).or_insert_with(|| value.clone());
            }
        }
        let switch = alterations(&switched, &kernel);
        // Kernels before 6.2 refuse to remove a chain in the transaction that removes what leads to it.
        let clear = [removals(&switched, &kernel), changes(new, &switched)].concat();
        self.commit(prepare)?;
        self.commit(switch)?;
        self.switched = Instant::now();
        if !clear.is_empty() {
            wait_for_packets(self.switched);
        }
        self.commit(clear)
    }
}
