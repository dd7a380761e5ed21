//! The parts of the table that are there whatever programs there are: the frame, and sets.

use std::collections::{BTreeMap, BTreeSet};

use tortie_dataplane::NodeState;
use tortie_policy::program::{Member, SetId};

use crate::dataplane::Config;
use crate::dataplane::change::Change;
use crate::dataplane::dirty::{Dirty, Touched};
use crate::dataplane::frame;
use crate::dataplane::sets::{Part, kernel_sets, single};
use crate::nftables::{Key, Table, Value};

/// Takes the frame in; what is in its sets because of pods stays.
pub fn take_frame(config: &Config, state: &NodeState, kernel: &Table, change: &mut Change) {
    let frame = frame::frame(config, state);
    for name in kernel.chains.keys().filter(|name| frame::is_of_frame(name)) {
        change.chain(kernel, name, None);
    }
    for (name, chain) in frame.chains {
        change.chain(kernel, &name, Some(chain));
    }
    for name in kernel.sets.keys().filter(|name| frame::is_of_frame(name) && !frame.sets.contains_key(*name))
    {
        change.set(kernel, name, None);
    }
    for (name, set) in frame.sets {
        if name == frame::VXLAN_PEERS || !kernel.sets.contains_key(&name) {
            change.set(kernel, &name, Some(set));
        }
    }
}

/// Takes the dirty sets in, and gives those of which other nftables sets exist now than before.
pub fn take_sets(state: &NodeState, dirty: &Dirty, kernel: &Table, change: &mut Change) -> BTreeSet<SetId> {
    let mut reshaped = BTreeSet::new();
    for (id, touched) in &dirty.sets {
        if let Touched::Members(members) = touched
            && let Some(members) = single_members(state, id, members, kernel)
        {
            for (part, key, wanted) in members {
                change.element(&part.name(id), || part.spec(), key, wanted.then(Value::default));
            }
            continue;
        }
        let mut wanted = kernel_sets(state, id);
        for name in Part::ALL.map(|part| part.name(id)) {
            let new = wanted.remove(&name);
            if new.is_some() != kernel.sets.contains_key(&name) {
                reshaped.insert(id.clone());
            }
            change.set(kernel, &name, new);
        }
    }
    reshaped
}

/// Members that come and go one by one, if that is all there is to do: no networks, and no nftables set that comes or
/// goes.
fn single_members(
    state: &NodeState,
    id: &SetId,
    touched: &BTreeSet<Member>,
    kernel: &Table,
) -> Option<Vec<(Part, Key, bool)>> {
    let (kind, desired) = state.sets.get(id)?;
    let mut members = Vec::new();
    let mut left: BTreeMap<Part, usize> = BTreeMap::new();
    for member in touched {
        let (part, key) = single(member)?;
        let there = &kernel.sets.get(&part.name(id))?.elements;
        let (is_there, wanted) = (there.contains_key(&key), desired.contains(member));
        let left = left.entry(part).or_insert(there.len());
        *left = *left + usize::from(wanted && !is_there) - usize::from(is_there && !wanted);
        members.push((part, key, wanted));
    }
    let stays = |(part, left): (&Part, &usize)| *left > 0 || part.always(*kind);
    left.iter().all(stays).then_some(members)
}
