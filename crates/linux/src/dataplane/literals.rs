//! Sets of values that rules spell out, such as the ports of a rule, as named sets that rules share.
//!
//! For each anonymous set the kernel chooses a name, by going through the names of all sets; and every set makes every
//! other one slower to find. The same few lists of ports come again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use tortie_kernel::nftables::{Chain, Expr, Set, SetRef, Table};

use super::change::Change;
use super::counting;
use super::sets::digest;

/// How often each of these sets is named by the chains in the table.
#[derive(Debug, Default)]
pub struct Literals {
    users: BTreeMap<String, usize>,
}

impl Literals {
    /// Gives the chains of a change names in the place of sets that they spell out, and has the sets come and go with
    /// the chains.
    pub fn take(&mut self, kernel: &Table, change: &mut Change) {
        let mut sets = BTreeMap::new();
        change.new_chains_by_name().for_each(|(name, chain)| lift(name, chain, &mut sets));
        let mut touched = BTreeSet::new();
        for name in change.new_chains().flat_map(|chain| names(chain)) {
            *self.users.entry(name.clone()).or_default() += 1;
            touched.insert(name);
        }
        for name in change.old_chains().flat_map(names) {
            if let Some(users) = self.users.get_mut(&name) {
                *users -= 1;
                if *users == 0 {
                    self.users.remove(&name);
                }
            }
            touched.insert(name);
        }
        for name in touched {
            if !self.users.contains_key(&name) {
                change.set(kernel, &name, None);
            } else if !kernel.sets.contains_key(&name) {
                change.set(kernel, &name, sets.remove(&name));
            }
        }
    }
}

/// Names what a chain spells out.
fn lift(of: &str, chain: &mut Chain, sets: &mut BTreeMap<String, Set>) {
    for rule in &mut chain.rules {
        let counting = rule.exprs.iter().any(counting::is_counting).then(|| rule.clone());
        for (place, expr) in rule.exprs.iter_mut().enumerate() {
            if let Expr::Lookup { set, .. } = expr
                && let SetRef::Inline(spelled) = set
            {
                let name = match &counting {
                    // Nobody shares it: what it counts would be that of others, too.
                    Some(rule) if spelled.spec.counts => {
                        format!("{PREFIX}{}", counting::name(of, rule, place, spelled))
                    }
                    _ => name(spelled),
                };
                sets.entry(name.clone()).or_insert_with(|| (**spelled).clone());
                *set = SetRef::Named(name);
            }
        }
    }
}

/// How the names of these sets begin.
pub const PREFIX: &str = "l-";

/// The same for sets with the same elements.
fn name(set: &Set) -> String {
    let mut content = format!("{:?}", set.spec);
    for (key, value) in &set.elements {
        // Writing to a string does not fail.
        let _ = write!(content, " {:?} {:?}", key.bytes(), value.end.as_ref().map(|end| end.bytes()));
    }
    format!("{PREFIX}{}", digest(content.as_bytes()))
}

/// The names of such sets in a chain.
pub fn names(chain: &Chain) -> Vec<String> {
    let exprs = chain.rules.iter().flat_map(|rule| &rule.exprs);
    let named = exprs.filter_map(|expr| match expr {
        Expr::Lookup { set: SetRef::Named(name), .. } if name.starts_with(PREFIX) => Some(name.clone()),
        _ => None,
    });
    named.collect()
}
