//! Sets of values inside rules, such as the ports of a rule, as named sets that rules share.
//!
//! The kernel chooses a name for each anonymous set by comparing the names of all sets, and every set slows down the
//! search for the others. The same few lists of ports occur again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use tortie_kernel::nftables::{Chain, Expr, Set, SetRef, Table};

use super::change::Change;
use super::counting;
use super::sets::digest;

/// How often the chains in the table name each of these sets.
#[derive(Debug, Default)]
pub(super) struct Literals {
    users: BTreeMap<String, usize>,
}

impl Literals {
    /// Replaces sets inside the rules of a change by named sets, and creates and removes those sets together with the
    /// chains.
    pub(super) fn update(&mut self, kernel: &Table, change: &mut Change) {
        let mut sets = BTreeMap::new();
        change.new_chains_by_name().for_each(|(name, chain)| lift(name, chain, &mut sets));
        let mut affected = BTreeSet::new();
        for name in change.new_chains().flat_map(|chain| names(chain)) {
            *self.users.entry(name.clone()).or_default() += 1;
            affected.insert(name);
        }
        for name in change.old_chains().flat_map(names) {
            if let Some(users) = self.users.get_mut(&name) {
                *users -= 1;
                if *users == 0 {
                    self.users.remove(&name);
                }
            }
            affected.insert(name);
        }
        for name in affected {
            if !self.users.contains_key(&name) {
                change.set(kernel, &name, None);
            } else if !kernel.sets.contains_key(&name) {
                change.set(kernel, &name, sets.remove(&name));
            }
        }
    }
}

/// Names the sets inside a chain's rules.
fn lift(of: &str, chain: &mut Chain, sets: &mut BTreeMap<String, Set>) {
    for rule in &mut chain.rules {
        let counting = rule.exprs.iter().any(counting::is_counting).then(|| rule.clone());
        for (index, expr) in rule.exprs.iter_mut().enumerate() {
            if let Expr::Lookup { set, .. } = expr
                && let SetRef::Inline(spelled) = set
            {
                let name = match &counting {
                    // It is not shared, because it would count for other rules, too.
                    Some(rule) if spelled.spec.counts => {
                        format!("{PREFIX}{}", counting::name(of, rule, index, spelled))
                    }
                    _ => name(spelled),
                };
                sets.entry(name.clone()).or_insert_with(|| (**spelled).clone());
                *set = SetRef::Named(name);
            }
        }
    }
}

/// The prefix of the names of these sets.
pub(super) const PREFIX: &str = "l-";

/// The name; sets with the same elements have the same name.
fn name(set: &Set) -> String {
    let mut content = format!("{:?}", set.spec);
    for (key, value) in &set.elements {
        // Writing to a string does not fail.
        let _ = write!(content, " {:?} {:?}", key.bytes(), value.end().map(|end| end.bytes()));
    }
    format!("{PREFIX}{}", digest(content.as_bytes()))
}

/// The names of such sets in a chain.
pub(super) fn names(chain: &Chain) -> Vec<String> {
    let exprs = chain.rules.iter().flat_map(|rule| &rule.exprs);
    let named = exprs.filter_map(|expr| match expr {
        Expr::Lookup { set: SetRef::Named(name), .. } if name.starts_with(PREFIX) => Some(name.clone()),
        _ => None,
    });
    named.collect()
}
