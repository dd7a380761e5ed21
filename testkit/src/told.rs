//! What calc is told when a cluster becomes another one.

use std::collections::BTreeMap;

use serde_json::Value;
use tortie_api::Key;
use tortie_calc::Calc;
use tortie_dataplane::Delta;

/// Tells calc, which knows the old objects, of the new ones, and gives what follows for its node.
pub(crate) fn tell(calc: &mut Calc, old: &BTreeMap<Key, Value>, new: &BTreeMap<Key, Value>) -> Vec<Delta> {
    for key in old.keys().filter(|key| !new.contains_key(key)) {
        calc.update(key, None);
    }
    for (key, value) in new.iter().filter(|(key, value)| old.get(key) != Some(value)) {
        calc.update(key, Some(value));
    }
    calc.flush()
}
