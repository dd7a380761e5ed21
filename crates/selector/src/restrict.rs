//! Restrictions of a selector on single labels, for an index.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Comparison, Node};

/// The restriction on one label that a match requires.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restriction<'a> {
    /// The label must exist.
    pub present: bool,
    /// The label must not exist.
    pub absent: bool,
    /// The label must have one of these values; an empty set can never match.
    pub values: Option<BTreeSet<&'a str>>,
}

/// Restrictions by label name.
pub type Restrictions<'a> = BTreeMap<&'a str, Restriction<'a>>;

/// Adds the restrictions of the node to the existing ones.
pub(crate) fn restrict<'a>(node: &'a Node, demands: &mut Restrictions<'a>) {
    match node {
        Node::Has(label) => demands.entry(label).or_default().present = true,
        Node::Compare(_, Comparison::NotEqual, _) => {}
        Node::Compare(label, Comparison::Equal, value) => {
            demands.entry(label).or_default().be_one_of(BTreeSet::from([&**value]));
        }
        Node::Compare(label, _, _) => demands.entry(label).or_default().present = true,
        Node::In(label, values) => {
            demands.entry(label).or_default().be_one_of(values.iter().map(String::as_str).collect());
        }
        Node::Not(inner) => {
            if let Node::Has(label) = inner.as_ref() {
                demands.entry(label).or_default().absent = true;
            }
        }
        Node::And(parts) => parts.iter().for_each(|part| restrict(part, demands)),
        Node::Or(parts) => {
            for (label, common) in common(parts) {
                demands.entry(label).or_default().also(common);
            }
        }
        Node::All | Node::Global | Node::NotIn(..) => {}
    }
}

impl<'a> Restriction<'a> {
    fn be_one_of(&mut self, values: BTreeSet<&'a str>) {
        self.also(Self { present: true, absent: false, values: Some(values) });
    }

    fn also(&mut self, more: Self) {
        self.present |= more.present;
        self.absent |= more.absent;
        self.values = match (self.values.take(), more.values) {
            (Some(a), Some(b)) => Some(&a & &b),
            (a, b) => a.or(b),
        };
    }
}

/// The restrictions that all parts share.
fn common(parts: &[Node]) -> Restrictions<'_> {
    let demands = |part| {
        let mut demands = Restrictions::new();
        restrict(part, &mut demands);
        demands
    };
    parts.iter().map(demands).reduce(either).unwrap_or_default()
}

/// The restrictions that hold in both cases. The sets of values grow in place, because a chain of `||` may be long.
fn either<'a>(mut left: Restrictions<'a>, mut right: Restrictions<'a>) -> Restrictions<'a> {
    left.retain(|label, restriction| {
        let Some(other) = right.remove(label) else { return false };
        restriction.present &= other.present;
        restriction.absent &= other.absent;
        restriction.values = match (restriction.values.take(), other.values) {
            (Some(mut values), Some(more)) => {
                values.extend(more);
                Some(values)
            }
            _ => None,
        };
        *restriction != Restriction::default()
    });
    left
}
