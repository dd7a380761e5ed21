//! Objects under small numbers, so that indexes need not hold names.

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

/// A set of numbers. Most sets are small, so it is a sorted list.
#[derive(Default)]
pub(crate) struct Numbers(Vec<No>);

impl Numbers {
    pub(crate) fn insert(&mut self, no: No) {
        // Numbers mostly arrive in order.
        if self.0.last().is_none_or(|last| *last < no) {
            self.0.push(no);
        } else if let Err(place) = self.0.binary_search(&no) {
            self.0.insert(place, no);
        }
    }

    pub(crate) fn remove(&mut self, no: No) {
        if let Ok(place) = self.0.binary_search(&no) {
            self.0.remove(place);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn as_slice(&self) -> &[No] {
        &self.0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = No> {
        self.0.iter().copied()
    }
}

impl FromIterator<No> for Numbers {
    fn from_iter<T: IntoIterator<Item = No>>(numbers: T) -> Self {
        let mut numbers: Vec<No> = numbers.into_iter().collect();
        numbers.sort_unstable();
        numbers.dedup();
        Self(numbers)
    }
}

impl IntoIterator for Numbers {
    type Item = No;
    type IntoIter = std::vec::IntoIter<No>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
