//! Assigns priorities to the ACLs of a list, so that existing ACLs keep theirs and new ones find room in between.

use std::collections::HashMap;
use std::ops::Range;

use tortie_hcn::schema::Acl;

use super::transition::unnumbered;

/// The distance between ACLs, if there is room.
const STEP: u32 = 64;

/// The priorities of a list in which the first match decides. Consecutive ACLs with the same action are a run, within
/// which the order does not matter, and which may share a priority. As many ACLs as possible in `actual` keep their
/// priorities, so that one ACL more or less changes no other, as long as there is room. `None` if `room` is not
/// sufficient for all runs.
pub(super) fn priorities(list: &[Acl], actual: &[Acl], room: Range<u16>) -> Option<Vec<u16>> {
    let mut there: HashMap<Acl, u16> = HashMap::new();
    for acl in actual.iter().filter(|acl| room.contains(&acl.priority)) {
        there.entry(unnumbered(acl)).or_insert(acl.priority);
    }
    let mut slots = Vec::with_capacity(list.len());
    let mut run = 0;
    for (index, acl) in list.iter().enumerate() {
        run += usize::from(index > 0 && list[index - 1].action != acl.action);
        // Normalising long lists takes long.
        let kept = if there.is_empty() { None } else { there.get(&unnumbered(acl)).copied() };
        slots.push(AclSlot { index, run, kept });
    }
    // Within a run, the ACLs that may keep their priorities come in the order of those.
    slots.sort_by_key(|slot| (slot.run, slot.kept));
    keep_most(&mut slots);
    let mut given = vec![0; slots.len()];
    let mut moved = 1;
    while let Err(tight) = fill(&slots, &room, &mut given) {
        // There is no room where it is needed, so the neighbours move, too.
        let around = tight.start.saturating_sub(moved)..(tight.end + moved).min(slots.len());
        if around == tight {
            return None;
        }
        slots[around].iter_mut().for_each(|slot| slot.kept = None);
        moved *= 2;
    }
    let mut priorities = vec![0; slots.len()];
    slots.iter().zip(given).for_each(|(slot, given)| priorities[slot.index] = given);
    Some(priorities)
}

/// One ACL of a list.
#[derive(Debug, Clone, Copy)]
struct AclSlot {
    index: usize,
    /// The number of its run.
    run: usize,
    /// Its existing priority.
    kept: Option<u16>,
}

/// Keeps as many priorities as possible: the longest sequence that increases where runs change.
fn keep_most(slots: &mut [AclSlot]) {
    // For each length, the last place of a sequence; for each place, its predecessor.
    let mut ends: Vec<usize> = Vec::new();
    let mut before: Vec<Option<usize>> = vec![None; slots.len()];
    // Within a run, a priority may occur repeatedly; in a later run it must be higher.
    let key = |slot: &AclSlot| slot.kept.map(|kept| (kept, std::cmp::Reverse(slot.run)));
    for (at, slot) in slots.iter().enumerate() {
        let Some(own) = key(slot) else { continue };
        let length = ends.partition_point(|end| key(&slots[*end]).is_some_and(|last| last <= own));
        before[at] = length.checked_sub(1).map(|last| ends[last]);
        if length == ends.len() { ends.push(at) } else { ends[length] = at }
    }
    let mut keep = vec![false; slots.len()];
    let mut next = ends.last().copied();
    while let Some(at) = next {
        keep[at] = true;
        next = before[at];
    }
    for (slot, keep) in slots.iter_mut().zip(keep) {
        slot.kept = slot.kept.filter(|_| keep);
    }
}

/// Assigns each place a priority between those that stay. If there is no room, returns the places concerned.
fn fill(slots: &[AclSlot], room: &Range<u16>, given: &mut [u16]) -> Result<(), Range<usize>> {
    let mut begin = 0;
    while begin < slots.len() {
        if let Some(kept) = slots[begin].kept {
            given[begin] = kept;
            begin += 1;
            continue;
        }
        let length = slots[begin..].iter().take_while(|slot| slot.kept.is_none()).count();
        let end = begin + length;
        let (before, after) = (begin.checked_sub(1).map(|at| &slots[at]), slots.get(end));
        let low = before.and_then(|slot| slot.kept).map_or(u32::from(room.start) - 1, u32::from);
        let high: u32 = after.and_then(|slot| slot.kept).unwrap_or(room.end).into();
        // Each place gets its own priority, so that others find room in between; otherwise each run does.
        let shared = |run: usize| {
            let has_it =
                |slot: Option<&AclSlot>| slot.filter(|slot| slot.run == run).and_then(|slot| slot.kept);
            has_it(before).or_else(|| has_it(after))
        };
        let apart = high - low > u32::try_from(length).unwrap_or(u32::MAX);
        let mut groups: Vec<Range<usize>> = Vec::new();
        for at in begin..end {
            let same = at > begin && slots[at - 1].run == slots[at].run;
            match groups.last_mut() {
                Some(group) if same && !apart => group.end = at + 1,
                _ => groups.push(at..at + 1),
            }
        }
        if !apart {
            groups.retain(|group| match shared(slots[group.start].run) {
                Some(priority) => {
                    given[group.clone()].fill(priority);
                    false
                }
                None => true,
            });
        }
        let parts = u32::try_from(groups.len()).unwrap_or(u32::MAX).saturating_add(1);
        let step = if after.is_some() { (high - low) / parts } else { ((high - low) / parts).min(STEP) };
        if step == 0 && !groups.is_empty() {
            return Err(begin..end);
        }
        for (group, priority) in groups.into_iter().zip((low + step..).step_by(step.max(1) as usize)) {
            given[group].fill(u16::try_from(priority).unwrap_or(room.end));
        }
        begin = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tortie_hcn::schema::{AclAction, AclDirection};

    use super::super::any as about_all;
    use super::*;

    /// A list by its actions and the properties that distinguish its ACLs.
    fn list(entries: &[(bool, u16)]) -> Vec<Acl> {
        let acl = |(allow, number): &(bool, u16)| Acl {
            local_ports: number.to_string(),
            ..about_all(if *allow { AclAction::Allow } else { AclAction::Block }, AclDirection::In, 0, "test")
        };
        entries.iter().map(acl).collect()
    }

    fn entries() -> impl Strategy<Value = Vec<(bool, u16)>> {
        let numbers = prop::collection::btree_set(0_u16..60, 0..40);
        (numbers, prop::collection::vec(proptest::bool::ANY, 40), proptest::num::u64::ANY).prop_map(
            |(numbers, actions, seed)| {
                let mut entries: Vec<_> =
                    numbers.into_iter().zip(actions).map(|(number, allow)| (allow, number)).collect();
                entries.sort_by_key(|(_, number)| (u64::from(*number) + 1).wrapping_mul(seed | 1));
                entries
            },
        )
    }

    fn numbered(list: &[Acl], priorities: &[u16]) -> Vec<Acl> {
        list.iter()
            .zip(priorities)
            .map(|(acl, priority)| Acl { priority: *priority, ..acl.clone() })
            .collect()
    }

    fn runs(list: &[Acl]) -> usize {
        list.chunk_by(|one, next| one.action == next.action).count()
    }

    proptest! {
        /// Whatever exists, and however little room there is, the first match is that of the list.
        #[test]
        fn priorities_keep_the_order_of_the_list(
            old in entries(), new in entries(), end in 1005_u16..1100, mixed in prop::collection::vec(1000_u16..1110, 40),
        ) {
            let (old, new) = (list(&old), list(&new));
            let actual = numbered(&old, &mixed);
            let Some(given) = priorities(&new, &actual, 1000..end) else {
                prop_assert!(runs(&new) > usize::from(end - 1000));
                return Ok(());
            };
            prop_assert!(given.iter().all(|priority| (1000..end).contains(priority)), "{given:?}");
            let with = numbered(&new, &given);
            for (at, acl) in with.iter().enumerate() {
                let later = with[at + 1..].iter().filter(|later| later.action != acl.action);
                prop_assert!(later.clone().all(|later| later.priority > acl.priority), "{given:?}");
            }
            // What is right already stays.
            prop_assert_eq!(priorities(&new, &with, 1000..end), Some(given));
        }

        /// One ACL more or less moves no other, as long as there is room.
        #[test]
        fn one_changed_acl_is_one_operation(old in entries(), at in 0_usize..40, allow in proptest::bool::ANY) {
            let room = 1000..LAST;
            let mut entries = old;
            let first = list(&entries);
            let before = numbered(&first, &priorities(&first, &[], room.clone()).unwrap());
            entries.insert(at.min(entries.len()), (allow, 1000));
            let more = list(&entries);
            let after = numbered(&more, &priorities(&more, &before, room.clone()).unwrap());
            prop_assert!(before.iter().all(|acl| after.contains(acl)), "{before:#?} {after:#?}");
            let again = numbered(&first, &priorities(&first, &after, room).unwrap());
            prop_assert_eq!(again, before);
        }
    }

    const LAST: u16 = 65_500;

    #[test]
    fn runs_use_all_available_priorities() {
        let entries: Vec<_> = (0..64_500_u32).map(|at| (at % 2 == 0, (at / 2) as u16)).collect();
        let full = list(&entries);
        let given = priorities(&full, &[], 1000..LAST).unwrap();
        assert!(given.iter().copied().eq(1000..LAST));
        let more = list(&[entries, vec![(true, 65_535)]].concat());
        assert_eq!(priorities(&more, &[], 1000..LAST), None);
    }
}
