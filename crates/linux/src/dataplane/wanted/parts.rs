//! The parts of the table that are there whatever programs there are: the frame, and sets.

use std::collections::{BTreeMap, BTreeSet};

use tortie_dataplane::NodeState;
use tortie_policy::program::{Member, SetId};

use crate::dataplane::Config;
use crate::dataplane::change::Change;
use crate::dataplane::dirty::{Dirty, Touched};
use crate::dataplane::frame;
use crate::dataplane::sets::{Part, changes, kernel_sets};
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
            && let Some(parts) = single_elements(state, id, members, kernel)
        {
            for Elements { part, name, changes } in parts {
                for (key, wanted) in changes {
                    change.element(&name, || part.spec(), key, wanted);
                }
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

/// What becomes of elements of one nftables set.
struct Elements {
    part: Part,
    name: String,
    changes: BTreeMap<Key, Option<Value>>,
}

/// The elements that come and go with members, if that is all there is to do: no nftables set comes or goes.
fn single_elements(
    state: &NodeState,
    id: &SetId,
    touched: &BTreeSet<Member>,
    kernel: &Table,
) -> Option<Vec<Elements>> {
    let (kind, desired) = state.sets.get(id)?;
    let mut by_part: BTreeMap<Part, Vec<&Member>> = BTreeMap::new();
    for member in touched {
        by_part.entry(Part::of(member)).or_default().push(member);
    }
    let parts = by_part.into_iter().map(|(part, touched)| {
        let name = part.name(id);
        let there = &kernel.sets.get(&name)?.elements;
        let changes = changes(part, &touched, desired, there);
        let is_there = |(key, _): &(&Key, &Option<Value>)| there.contains_key(key);
        let replaced = changes.iter().filter(is_there).count();
        let left = there.len() - replaced + changes.values().flatten().count();
        (left > 0 || part.always(*kind)).then_some(Elements { part, name, changes })
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use ipnet::IpNet;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use tortie_policy::program::SetKind;

    use super::*;

    /// Networks that often are in one another or side by side, also at both ends of all addresses.
    fn network() -> impl Strategy<Value = Member> {
        let near = prop_oneof![8 => 0u8..48, 1 => Just(u8::MAX - 3), 1 => Just(u8::MAX)];
        let bits = prop_oneof![6 => 0u8..6, 1 => 0u8..=128];
        (any::<bool>(), any::<bool>(), near, bits).prop_map(|(v4, high, near, bits)| {
            let fill = if high { u8::MAX } else { 0 };
            let ends = |length: usize| [vec![fill; length - 1], vec![near]].concat();
            let address: IpAddr = match v4 {
                true => <[u8; 4]>::try_from(ends(4)).unwrap().into(),
                false => <[u8; 16]>::try_from(ends(16)).unwrap().into(),
            };
            let longest = if v4 { 32 } else { 128 };
            Member::Net(IpNet::new(address, longest - bits.min(longest)).unwrap().trunc())
        })
    }

    /// What a change of a set comes to, and which sets come or go.
    fn taken(
        state: &NodeState,
        kernel: &Table,
        touched: Touched,
    ) -> (Vec<crate::nftables::Op>, BTreeSet<SetId>) {
        let dirty = Dirty { sets: [(id(), touched)].into(), ..Dirty::default() };
        let mut change = Change::default();
        let reshaped = take_sets(state, &dirty, kernel, &mut change);
        let steps = change.steps(kernel);
        ([steps.prepare, steps.switch, steps.clear].concat(), reshaped)
    }

    fn id() -> SetId {
        SetId::new("s")
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn members_one_by_one_come_to_what_the_whole_set_comes_to(
            before in btree_set(network(), 0..12),
            turns in vec(btree_set(network(), 1..5), 1..5),
            again in any::<prop::sample::Index>(),
        ) {
            let mut state = NodeState::default();
            state.sets.insert(id(), (SetKind::Nets, before.clone()));
            let mut kernel = Table { sets: kernel_sets(&state, &id()), ..Table::default() };
            for mut touched in turns {
                // One that is there goes, too; of the others each that is there goes, and each that is not comes.
                let members = &mut state.sets.get_mut(&id()).unwrap().1;
                touched.extend(members.iter().nth(again.index(members.len().max(1))).copied());
                for member in &touched {
                    if !members.remove(member) {
                        members.insert(*member);
                    }
                }
                let wanted = kernel_sets(&state, &id());
                let whole = taken(&state, &kernel, Touched::Whole);
                prop_assert_eq!(&taken(&state, &kernel, Touched::Members(touched.clone())), &whole);
                let one_by_one = single_elements(&state, &id(), &touched, &kernel);
                prop_assert_eq!(one_by_one.is_some(), whole.1.is_empty(), "{:?}", whole);
                whole.0.iter().for_each(|op| kernel.apply(op));
                prop_assert_eq!(&kernel.sets, &wanted);
            }
        }
    }
}
