//! The parts of the table that do not depend on programs: the skeleton and sets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Key, SetSpec, Table, Value};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{Member, SetId};

use crate::dataplane::Config;
use crate::dataplane::change::Change;
use crate::dataplane::dirty::{ChangedSet, Dirty};
use crate::dataplane::packet_kinds::{IPIP_PEERS, VXLAN_PEERS, VXLAN_PEERS_6, has_ipip, vxlan_peers_of};
use crate::dataplane::sets::{Family, Part, changes, kernel_sets};
use crate::dataplane::skeleton::{self, NODES_4, NODES_6};

/// Applies the skeleton; the elements of its sets that belong to pods stay.
pub(super) fn update_skeleton(config: &Config, state: &NodeState, kernel: &Table, change: &mut Change) {
    let skeleton = skeleton::skeleton(config, state);
    for name in kernel.chains.keys().filter(|name| skeleton::is_of_skeleton(name)) {
        change.chain(kernel, name, None);
    }
    for (name, chain) in skeleton.chains {
        change.chain(kernel, &name, Some(chain));
    }
    for name in
        kernel.sets.keys().filter(|name| skeleton::is_of_skeleton(name) && !skeleton.sets.contains_key(*name))
    {
        change.set(kernel, name, None);
    }
    for (name, set) in skeleton.sets {
        if [VXLAN_PEERS, VXLAN_PEERS_6, IPIP_PEERS, NODES_4, NODES_6].contains(&name.as_str())
            || !kernel.sets.contains_key(&name)
        {
            change.set(kernel, &name, Some(set));
        }
    }
}

/// Applies the own addresses of other nodes that have changed: single elements of the sets of
/// [`VXLAN_PEERS`] and [`IPIP_PEERS`].
pub(super) fn update_peers(state: &NodeState, peers: &BTreeSet<IpAddr>, change: &mut Change) {
    if peers.is_empty() {
        return;
    }
    let parents = state.vteps.values().map(|vtep| vtep.parent);
    let there: BTreeSet<IpAddr> = parents.filter(|parent| peers.contains(parent)).collect();
    for parent in peers {
        let family = Family::of(*parent);
        let spec = || SetSpec::hash(&[family.field()]);
        let wanted = there.contains(parent).then(Value::default);
        change.element(vxlan_peers_of(family), spec, Key::address(*parent), wanted);
    }
    if !has_ipip(state) {
        return;
    }
    let there: BTreeSet<IpAddr> =
        state.ipip_peers().map(IpAddr::V4).filter(|peer| peers.contains(peer)).collect();
    for peer in peers.iter().filter(|peer| peer.is_ipv4()) {
        let spec = || SetSpec::hash(&[Family::V4.field()]);
        let wanted = there.contains(peer).then(Value::default);
        change.element(IPIP_PEERS, spec, Key::address(*peer), wanted);
    }
}

/// Applies the addresses of nodes that have changed: single elements of the sets of [`NODES_4`] and [`NODES_6`].
pub(super) fn update_nodes(state: &NodeState, dirty: &Dirty, change: &mut Change) {
    let (Some(ChangedSet::Members(changed)), Some((_, members))) =
        (dirty.sets.get(&*ALL_NODES), state.sets.get(&*ALL_NODES))
    else {
        return;
    };
    for member in changed {
        let Some(address) = skeleton::address(member) else { continue };
        let family = Family::of(address);
        let spec = || SetSpec::hash(&[family.field()]);
        let wanted = members.contains(member).then(Value::default);
        change.element(skeleton::nodes_of(family), spec, Key::address(address), wanted);
    }
}

/// Applies the dirty sets, and returns those whose nftables sets are now others than before. `most` is the maximum number of members.
pub(super) fn update_sets(
    state: &NodeState,
    dirty: &Dirty,
    most: usize,
    kernel: &Table,
    change: &mut Change,
) -> BTreeSet<SetId> {
    let mut reshaped = BTreeSet::new();
    for (id, affected) in &dirty.sets {
        if let ChangedSet::Members(members) = affected
            && state.sets.get(id).is_some_and(|(_, members)| members.len() <= most)
            && let Some(parts) = single_elements(state, id, members, kernel)
        {
            for PartChanges { part, name, changes } in parts {
                for (key, wanted) in changes {
                    change.element(&name, || part.spec(), key, wanted);
                }
            }
            continue;
        }
        let mut wanted = kernel_sets(state, id, most);
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

/// The number of changed networks of a set that are always applied one by one. Each costs some microseconds.
const FEW_NETWORKS: usize = 1_000;
/// If more change, they are applied one by one where they are at most this part of the set. Otherwise recomputing all
/// ranges is faster. A small change of a large set must not cost as much as the set.
const SHARE_OF_SET: usize = 32;

/// Changes of elements of one nftables set.
struct PartChanges {
    part: Part,
    name: String,
    changes: BTreeMap<Key, Option<Value>>,
}

/// The elements to add and remove with members, if that is sufficient: no nftables set is added or removed, and not
/// too many networks change.
fn single_elements(
    state: &NodeState,
    id: &SetId,
    affected: &BTreeSet<Member>,
    kernel: &Table,
) -> Option<Vec<PartChanges>> {
    let (kind, desired) = state.sets.get(id)?;
    let mut by_part: BTreeMap<Part, Vec<&Member>> = BTreeMap::new();
    for member in affected {
        by_part.entry(Part::of(member)).or_default().push(member);
    }
    let parts = by_part.into_iter().map(|(part, affected)| {
        let few = FEW_NETWORKS.max(desired.len() / SHARE_OF_SET);
        if matches!(part, Part::Nets(_)) && affected.len() > few {
            return None;
        }
        let name = part.name(id);
        let there = &kernel.sets.get(&name)?.elements;
        let changes = changes(part, &affected, desired, there);
        let is_there = |(key, _): &(&Key, &Option<Value>)| there.contains_key(key);
        let replaced = changes.iter().filter(is_there).count();
        let left = there.len() - replaced + changes.values().flatten().count();
        (left > 0 || part.always(*kind)).then_some(PartChanges { part, name, changes })
    });
    parts.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::RefCell;
    use std::net::IpAddr;

    use ipnet::IpNet;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use proptest::sample::Index;
    use proptest::test_runner::{Config, TestRunner};
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::nftables::{Nft, Op, Transaction, diff};
    use tortie_policy::program::SetKind;

    use super::*;
    use crate::dataplane::change::Steps;

    /// Networks that often contain each other or are adjacent, also at both ends of the address space.
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

    fn id() -> SetId {
        SetId::new("s")
    }

    /// The operations for a change of the set, and whether it led to other nftables sets.
    fn operations(state: &NodeState, kernel: &Table, affected: ChangedSet) -> (Vec<Op>, bool) {
        let dirty = Dirty { sets: [(id(), affected)].into(), ..Dirty::default() };
        let mut change = Change::default();
        let reshaped = update_sets(state, &dirty, usize::MAX, kernel, &mut change);
        let Steps { prepare, switch, clear } = change.steps(kernel);
        ([prepare, switch, clear].concat(), !reshaped.is_empty())
    }

    /// Removes each of these members if it exists, and adds it otherwise: one by one, and compares with the whole
    /// set.
    fn turn(
        affected: &BTreeSet<Member>,
        state: &mut NodeState,
        table: &mut Table,
        nft: &mut Nft,
    ) -> Result<(), TestCaseError> {
        let members = &mut state.sets.get_mut(&id()).unwrap().1;
        *members = (&**members ^ affected).into();
        let (ops, reshaped) = operations(state, table, ChangedSet::Whole);
        prop_assert_eq!(single_elements(state, &id(), affected, table).is_none(), reshaped);
        prop_assert_eq!(
            &operations(state, table, ChangedSet::Members(affected.clone())),
            &(ops.clone(), reshaped)
        );
        ops.iter().for_each(|op| table.apply(op));
        prop_assert_eq!(&table.sets, &kernel_sets(state, &id(), usize::MAX));
        let transaction = Transaction { table: "t".to_owned(), ops };
        prop_assert!(transaction.ops.is_empty() || nft.commit(&transaction).is_ok(), "{:?}", transaction);
        let listed = nft.list("t").unwrap();
        prop_assert_eq!(listed.as_ref(), Some(&*table));
        Ok(())
    }

    /// To write all of a large set again takes seconds, for which other pods wait.
    #[test]
    fn a_small_part_of_a_large_set_is_applied_one_by_one() {
        let member = |n: u32| {
            let first = IpAddr::from((0x0b00_0000 + n * 4).to_be_bytes());
            Member::Net(IpNet::new(first, 31).unwrap())
        };
        for (size, changed, expected) in [
            (100, 50, true),
            (10_000, 1_000, true),
            (10_000, 1_001, false),
            (50_000, 1_500, true),
            (50_000, 1_600, false),
        ] {
            let mut state = NodeState::default();
            let members: BTreeSet<Member> = (0..size).map(member).collect();
            state.sets.insert(id(), (SetKind::Nets, members.into()));
            let table = Table { sets: kernel_sets(&state, &id(), usize::MAX), ..Table::default() };
            let affected: BTreeSet<Member> = (0..changed).map(member).collect();
            let is_single = single_elements(&state, &id(), &affected, &table).is_some();
            assert_eq!(is_single, expected, "{changed} of {size}");
        }
    }

    #[test]
    fn single_networks_give_the_same_elements_as_the_whole_set() {
        let test = |nft: &RefCell<Nft>, before: BTreeSet<Member>, turns: Vec<(BTreeSet<Member>, Index)>| {
            let mut state = NodeState::default();
            state.sets.insert(id(), (SetKind::Nets, before.into()));
            let mut table = Table { sets: kernel_sets(&state, &id(), usize::MAX), ..Table::default() };
            let nft = &mut *nft.borrow_mut();
            let old = nft.list("t").unwrap();
            nft.commit(&diff("t", &table, old.as_ref())).unwrap();
            for (mut affected, again) in turns {
                // A member that certainly exists.
                let there = &state.sets[&id()].1;
                affected.extend(there.iter().nth(again.index(there.len().max(1))));
                turn(&affected, &mut state, &mut table, nft)?;
            }
            Ok(())
        };
        let config = Config { cases: 1_000, failure_persistence: None, ..Config::default() };
        let strategy = (btree_set(network(), 0..12), vec((btree_set(network(), 1..5), any::<Index>()), 1..5));
        let run = move || {
            let nft = RefCell::new(Nft::open().unwrap());
            TestRunner::new(config).run(&strategy, |(before, turns)| test(&nft, before, turns)).unwrap();
        };
        NetNs::create().unwrap().run(run).unwrap();
    }
}
