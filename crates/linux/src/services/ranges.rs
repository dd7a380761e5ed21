//! Lists of networks from which frontends may be used. Each has a number, which frontends with equal lists share.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_kernel::nftables::{Key, Value};

use super::frontends::TableEntry;
use super::layout::{Kind, SetId};
use crate::dataplane::sets::{Family, digest_number, ranges};

/// The lists in use.
#[derive(Debug, Default)]
pub(super) struct RangeLists {
    /// The number of each list, and of the frontends with it.
    lists: BTreeMap<Vec<IpNet>, (u32, usize)>,
    /// The list of each number.
    numbers: BTreeMap<u32, Vec<IpNet>>,
}

impl RangeLists {
    /// The number of a list that is in use.
    pub(super) fn number(&self, list: &[IpNet]) -> Option<u32> {
        self.lists.get(&sorted(list)).map(|(number, _)| *number)
    }

    /// Counts a frontend with this list, if it has one. Returns the elements that the frontend needs.
    pub(super) fn add(&mut self, list: Option<&[IpNet]>, family: Family) -> Vec<TableEntry> {
        let Some(list) = list.map(sorted) else { return Vec::new() };
        let numbers = &mut self.numbers;
        let (number, frontends) = self.lists.entry(list.clone()).or_insert_with(|| {
            // A number depends on the list alone, so that the table of an earlier process has the right ones; unless two lists have
            // one digest.
            let mut number = digest_number(&format!("{list:?}")).max(1);
            while numbers.contains_key(&number) {
                number = number.wrapping_add(1).max(1);
            }
            numbers.insert(number, list.clone());
            (number, 0)
        });
        *frontends += 1;
        entries(*number, &list, family)
    }

    /// Counts off a frontend with this list, if it has one. Returns the elements that the frontend needed.
    pub(super) fn remove(&mut self, list: Option<&[IpNet]>, family: Family) -> Vec<TableEntry> {
        let Some(list) = list.map(sorted) else { return Vec::new() };
        let Some((number, frontends)) = self.lists.get_mut(&list) else { return Vec::new() };
        *frontends -= 1;
        let (number, is_last) = (*number, *frontends == 0);
        if is_last {
            self.lists.remove(&list);
            self.numbers.remove(&number);
        }
        entries(number, &list, family)
    }
}

fn sorted(list: &[IpNet]) -> Vec<IpNet> {
    let mut list = list.to_vec();
    list.sort();
    list.dedup();
    list
}

fn entries(number: u32, list: &[IpNet], family: Family) -> Vec<TableEntry> {
    let own = list.iter().copied().filter(|network| Family::of(network.addr()) == family);
    let set = SetId::new(Kind::Allowed, family);
    // In network byte order, in which `nft` compares the fields of ranges.
    let behind_number = |address: &Key| Key::new(&number.to_be_bytes())?.and(address.bytes());
    let ranges = ranges(own);
    let entry = |(first, last): &(Key, Key)| {
        Some(((set, behind_number(first)?), Value::new(behind_number(last), None)))
    };
    ranges.iter().filter_map(entry).collect()
}
