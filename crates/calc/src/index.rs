//! Indexes by label: the selectors that may match given labels, and the subjects that a selector may match. They
//! return candidates, always including every match; the caller evaluates the selector.

use std::collections::BTreeSet;

use tortie_policy::SubjectLabels;
use tortie_selector::{Restriction, Restrictions};

use crate::keys::Map;
use crate::slab::{No, Numbers};

/// Selectors, each filed under one restriction that every match satisfies.
#[derive(Default)]
pub(crate) struct SelectorIndex {
    /// Those that require one of some values of a label, under each value.
    by_value: Map<String, Map<String, Vec<No>>>,
    /// Those that require a label.
    by_presence: Map<String, Vec<No>>,
    /// Those without such restrictions.
    others: BTreeSet<No>,
}

/// The restriction under which a selector is filed.
enum Slot<'a> {
    Values(&'a str, &'a BTreeSet<&'a str>),
    Presence(&'a str),
    Others,
    /// It cannot match anything.
    Nowhere,
}

impl SelectorIndex {
    /// Files a selector with these restrictions.
    pub(crate) fn insert(&mut self, no: No, demands: &Restrictions<'_>) {
        match self.slot(demands) {
            Slot::Values(label, values) => {
                let by_value = self.by_value.entry_ref(label).or_default();
                values.iter().for_each(|value| by_value.entry_ref(*value).or_default().push(no));
            }
            Slot::Presence(label) => self.by_presence.entry_ref(label).or_default().push(no),
            Slot::Others => drop(self.others.insert(no)),
            Slot::Nowhere => {}
        }
    }

    /// Removes a selector with these restrictions.
    pub(crate) fn remove(&mut self, no: No, demands: &Restrictions<'_>) {
        self.others.remove(&no);
        for (label, demand) in demands {
            if let Some(filed) = self.by_presence.get_mut(*label) {
                filed.retain(|other| *other != no);
                if filed.is_empty() {
                    self.by_presence.remove(*label);
                }
            }
            let Some(by_value) = self.by_value.get_mut(*label) else { continue };
            for value in demand.values.iter().flatten() {
                let Some(filed) = by_value.get_mut(*value) else { continue };
                filed.retain(|other| *other != no);
                if filed.is_empty() {
                    by_value.remove(*value);
                }
            }
            if by_value.is_empty() {
                self.by_value.remove(*label);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_value.is_empty() && self.by_presence.is_empty() && self.others.is_empty()
    }

    /// Every selector that may match these labels.
    pub(crate) fn candidates(&self, labels: &SubjectLabels) -> Vec<No> {
        let mut found: Vec<No> = self.others.iter().copied().collect();
        if self.by_presence.is_empty() && self.by_value.is_empty() {
            return found;
        }
        labels.each(|name, value| {
            found.extend(self.by_presence.get(name).into_iter().flatten());
            found.extend(
                self.by_value.get(name).and_then(|by_value| by_value.get(value)).into_iter().flatten(),
            );
        });
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The restriction with the fewest selectors: every namespace has its own policies, but all pods share some
    /// labels.
    fn slot<'a>(&self, demands: &'a Restrictions<'a>) -> Slot<'a> {
        let contradicts = |demand: &Restriction<'_>| {
            let none = demand.values.as_ref().is_some_and(BTreeSet::is_empty);
            none || (demand.absent && demand.present)
        };
        if demands.values().any(contradicts) {
            return Slot::Nowhere;
        }
        let valued = demands.iter().filter_map(|(label, demand)| Some((*label, demand.values.as_ref()?)));
        if let Some((label, values)) = valued.min_by_key(|(label, values)| self.filed_under(label, values)) {
            return Slot::Values(label, values);
        }
        let present = demands.iter().filter(|(_, demand)| demand.present).map(|(label, _)| *label);
        match present.min_by_key(|label| self.by_presence.get(*label).map_or(0, Vec::len)) {
            Some(label) => Slot::Presence(label),
            None => Slot::Others,
        }
    }

    /// The maximum number of selectors filed under one of these values.
    fn filed_under(&self, label: &str, values: &BTreeSet<&str>) -> usize {
        let Some(by_value) = self.by_value.get(label) else { return 0 };
        values.iter().filter_map(|value| by_value.get(*value)).map(Vec::len).max().unwrap_or(0)
    }
}

/// The subjects with each label, by name and value.
#[derive(Default)]
pub(crate) struct LabelIndex(Map<String, Map<String, Numbers>>);

impl LabelIndex {
    pub(crate) fn insert(&mut self, no: No, labels: &SubjectLabels) {
        labels.each(|name, value| {
            self.0.entry_ref(name).or_default().entry_ref(value).or_default().insert(no);
        });
    }

    pub(crate) fn remove(&mut self, no: No, labels: &SubjectLabels) {
        labels.each(|name, value| {
            let Some(by_value) = self.0.get_mut(name) else { return };
            if let Some(bearers) = by_value.get_mut(value) {
                bearers.remove(no);
                if bearers.is_empty() {
                    by_value.remove(value);
                }
            }
            if by_value.is_empty() {
                self.0.remove(name);
            }
        });
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The subjects that have the label with one of these values, or with any value if none are given.
    pub(crate) fn find(&self, label: &str, values: Option<&BTreeSet<&str>>) -> Vec<&Numbers> {
        let Some(by_value) = self.0.get(label) else { return Vec::new() };
        match values {
            None => by_value.values().collect(),
            Some(values) => values.iter().filter_map(|value| by_value.get(*value)).collect(),
        }
    }
}
