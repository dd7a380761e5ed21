//! Objects under small numbers, so that indexes need not hold names.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

/// The number of an object; it is reused after the object is removed.
pub(crate) type No = u32;

/// Objects under numbers.
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<No>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, thing: T) -> No {
        match self.free.pop() {
            Some(no) => {
                self.slots[no as usize] = Some(thing);
                no
            }
            None => {
                self.slots.push(Some(thing));
                // Four thousand million objects do not fit into memory.
                (self.slots.len() - 1) as No
            }
        }
    }

    pub(crate) fn get(&self, no: No) -> Option<&T> {
        self.slots.get(no as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, no: No) -> Option<&mut T> {
        self.slots.get_mut(no as usize)?.as_mut()
    }

    pub(crate) fn remove(&mut self, no: No) -> Option<T> {
        let thing = self.slots.get_mut(no as usize)?.take()?;
        self.free.push(no);
        Some(thing)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.numbers().next().is_none()
    }

    /// All numbers in use.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = No> {
        let given = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        given.map(|(index, _)| index as No)
    }
}

/// A set of numbers.
pub(crate) enum Numbers {
    /// Most sets are small: a sorted list.
    Few(Vec<No>),
    /// In a long list, each change would move all that follows.
    Many(BTreeSet<No>),
}

/// The number of elements from which a set is not a list.
const MANY: usize = 1024;

impl Default for Numbers {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Numbers {
    pub(crate) fn insert(&mut self, no: No) {
        match self {
            // Numbers mostly arrive in order.
            Self::Few(list) if list.last().is_none_or(|last| *last < no) => list.push(no),
            Self::Few(list) => {
                if let Err(index) = list.binary_search(&no) {
                    list.insert(index, no);
                }
            }
            Self::Many(tree) => drop(tree.insert(no)),
        }
        if let Self::Few(list) = self
            && list.len() >= MANY
        {
            *self = Self::Many(list.drain(..).collect());
        }
    }

    pub(crate) fn remove(&mut self, no: No) {
        match self {
            Self::Few(list) => {
                if let Ok(index) = list.binary_search(&no) {
                    list.remove(index);
                }
            }
            Self::Many(tree) => {
                tree.remove(&no);
                // Far below the limit, so that a set near it does not change its form all the time.
                if tree.len() < MANY / 4 {
                    *self = Self::Few(tree.iter().copied().collect());
                }
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Few(list) => list.len(),
            Self::Many(tree) => tree.len(),
        }
    }

    /// The numbers in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = No> {
        let (list, tree) = match self {
            Self::Few(list) => (Some(list), None),
            Self::Many(tree) => (None, Some(tree)),
        };
        list.into_iter().flatten().chain(tree.into_iter().flatten()).copied()
    }
}

impl PartialEq for Numbers {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Numbers {}

impl Hash for Numbers {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.iter().for_each(|no| no.hash(state));
    }
}

impl FromIterator<No> for Numbers {
    fn from_iter<T: IntoIterator<Item = No>>(numbers: T) -> Self {
        let mut numbers: Vec<No> = numbers.into_iter().collect();
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.len() < MANY { Self::Few(numbers) } else { Self::Many(numbers.into_iter().collect()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Runs of numbers that come and go, so that the set changes its form in both directions.
        #[test]
        fn a_set_of_numbers_equals_a_tree(runs in prop::collection::vec((0..4000u32, 0..2500u32, 1..4usize, any::<bool>()), 1..8)) {
            let (mut numbers, mut tree) = (Numbers::default(), BTreeSet::new());
            for (start, length, step, comes) in runs {
                for no in (start..start + length).step_by(step) {
                    if comes {
                        numbers.insert(no);
                        tree.insert(no);
                    } else {
                        numbers.remove(no);
                        tree.remove(&no);
                    }
                }
                prop_assert!(numbers.iter().eq(tree.iter().copied()));
                prop_assert_eq!((numbers.len(), numbers.is_empty()), (tree.len(), tree.is_empty()));
                let collected: Numbers = numbers.iter().collect();
                prop_assert!(collected.iter().eq(tree.iter().copied()));
            }
        }
    }
}
