//! Selectors that are a conjunction of tests of single labels, as Kubernetes' label selectors are.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::{Comparison, Node, Selector};

/// A test of one label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LabelTest {
    /// It exists.
    Has,
    /// It does not exist.
    HasNot,
    /// It has one of these values.
    In(BTreeSet<String>),
    /// It has none of these values, or does not exist.
    NotIn(BTreeSet<String>),
}

impl Selector {
    /// The tests of labels that must all hold; none for `all()`. `None` if the selector is something else.
    #[must_use]
    pub fn conjunction(&self) -> Option<Vec<(String, LabelTest)>> {
        let mut tests = Vec::new();
        collect(&self.node, &mut tests)?;
        Some(tests)
    }
}

fn collect(node: &Node, tests: &mut Vec<(String, LabelTest)>) -> Option<()> {
    let one = |value: &Arc<str>| BTreeSet::from([value.to_string()]);
    let mut add = |label: &Arc<str>, test| tests.push((label.to_string(), test));
    match node {
        Node::All => {}
        Node::Has(label) => add(label, LabelTest::Has),
        Node::Compare(label, Comparison::Equal, value) => add(label, LabelTest::In(one(value))),
        Node::Compare(label, Comparison::NotEqual, value) => add(label, LabelTest::NotIn(one(value))),
        Node::In(label, values) => add(label, LabelTest::In(values.clone())),
        Node::NotIn(label, values) => add(label, LabelTest::NotIn(values.clone())),
        Node::Not(inner) => match &**inner {
            Node::Has(label) => add(label, LabelTest::HasNot),
            // Absent labels are not equal, and not in a list.
            Node::Compare(label, Comparison::Equal, value) => add(label, LabelTest::NotIn(one(value))),
            Node::In(label, values) => add(label, LabelTest::NotIn(values.clone())),
            _ => return None,
        },
        Node::And(nodes) => nodes.iter().try_for_each(|node| collect(node, tests))?,
        Node::Global | Node::Or(_) | Node::Compare(..) => return None,
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn conjunctions_are_tests_of_single_labels() {
        let set = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect::<BTreeSet<_>>();
        let a = |test| vec![("a".to_owned(), test)];
        for (text, expected) in [
            ("all()", Some(vec![])),
            ("", Some(vec![])),
            ("has(a)", Some(a(LabelTest::Has))),
            ("!has(a)", Some(a(LabelTest::HasNot))),
            ("a == 'x'", Some(a(LabelTest::In(set(&["x"]))))),
            ("a != 'x'", Some(a(LabelTest::NotIn(set(&["x"]))))),
            ("!(a == 'x')", Some(a(LabelTest::NotIn(set(&["x"]))))),
            ("a in {'x', 'y'}", Some(a(LabelTest::In(set(&["x", "y"]))))),
            ("a not in {'x'}", Some(a(LabelTest::NotIn(set(&["x"]))))),
            ("!(a != 'x')", None),
            ("a starts with 'x'", None),
            ("has(a) || has(b)", None),
            ("global()", None),
            (
                "has(a) && (a == 'x' && !has(b))",
                Some(vec![
                    ("a".to_owned(), LabelTest::Has),
                    ("a".to_owned(), LabelTest::In(set(&["x"]))),
                    ("b".to_owned(), LabelTest::HasNot),
                ]),
            ),
        ] {
            assert_eq!(Selector::parse(text).unwrap().conjunction(), expected, "{text}");
        }
    }
}
