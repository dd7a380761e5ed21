//! Things under small numbers, so that an index need not hold names.

/// The number of a thing; it is given to another once the thing is gone.
pub(crate) type No = u32;

/// Things under numbers.
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
                // Four thousand million things do not fit into memory.
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

    /// All numbers that are given.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = No> {
        let given = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        given.map(|(index, _)| index as No)
    }
}
