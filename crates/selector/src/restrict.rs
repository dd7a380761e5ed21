//! What a selector demands of single labels, for an index.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Comparison, Node};

/// What must hold of one label for a selector to match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restriction {
    /// The label must be there.
    pub present: bool,
    /// The label must not be there.
    pub absent: bool,
    /// The label must have one of these values; an empty set can never match.
    pub values: Option<BTreeSet<String>>,
}

type Restrictions = BTreeMap<String, Restriction>;

pub(crate) fn restrictions(node: &Node) -> Restrictions {
    let present = |label: &String, values: Option<BTreeSet<String>>| {
        BTreeMap::from([(label.clone(), Restriction { present: true, absent: false, values })])
    };
    match node {
        Node::Has(label) => present(label, None),
        Node::Compare(label, Comparison::Equal, value) => {
            present(label, Some(BTreeSet::from([value.clone()])))
        }
        Node::Compare(_, Comparison::NotEqual, _) => Restrictions::new(),
        Node::Compare(label, _, _) => present(label, None),
        Node::In(label, values) => present(label, Some(values.clone())),
        Node::Not(inner) => match inner.as_ref() {
            Node::Has(label) => {
                BTreeMap::from([(label.clone(), Restriction { absent: true, ..Default::default() })])
            }
            _ => Restrictions::new(),
        },
        Node::And(parts) => parts.iter().map(restrictions).reduce(both).unwrap_or_default(),
        Node::Or(parts) => parts.iter().map(restrictions).reduce(either).unwrap_or_default(),
        Node::All | Node::Global | Node::NotIn(..) => Restrictions::new(),
    }
}

fn both(mut left: Restrictions, right: Restrictions) -> Restrictions {
    for (label, more) in right {
        let restriction = left.entry(label).or_default();
        restriction.present |= more.present;
        restriction.absent |= more.absent;
        restriction.values = match (restriction.values.take(), more.values) {
            (Some(a), Some(b)) => Some(&a & &b),
            (a, b) => a.or(b),
        };
    }
    left
}

/// What holds whichever of the two holds. The sets of values grow in place: a chain of `||` may be long.
fn either(mut left: Restrictions, mut right: Restrictions) -> Restrictions {
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
