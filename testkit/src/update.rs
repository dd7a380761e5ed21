//! Updates calc when a cluster changes to another one.

use std::collections::BTreeMap;

use serde_json::Value;
use tortie_api::Key;
use tortie_calc::Calc;
use tortie_dataplane::Delta;

/// Updates calc from the old objects to the new ones, and returns the deltas for its node.
pub(crate) fn update_calc(
    calc: &mut Calc,
    old: &BTreeMap<Key, Value>,
    new: &BTreeMap<Key, Value>,
) -> Vec<Delta> {
    for key in old.keys().filter(|key| !new.contains_key(key)) {
        calc.update(key, None);
    }
    for (key, value) in new.iter().filter(|(key, value)| old.get(key) != Some(value)) {
        calc.update(key, Some(value));
    }
    calc.flush()
}
