//! Compares the selector language with golden values, tables, and a separate evaluator.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tortie_selector::{Restriction, Selector};

fn parse(text: &str) -> Selector {
    Selector::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Ids that Calico computes for the same selectors (`libcalico-go/lib/selector/parser`).
#[test]
fn ids_equal_calicos() {
    for (text, id) in [
        ("all()", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
        ("", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
        (" \t ", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
        ("!(has(b) || !has(a))", "s:Iss0uCleLYv1GSv_pNm7hAO58kE9jAx1NKyG3Q"),
        ("!(a == \"b\" && !c != \"d\")", "s:lh3haoY1ikTRkd4UZu0nWSaIBknYLPJLX16d-w"),
    ] {
        assert_eq!(parse(text).id(), id, "{text}");
    }
}

#[test]
fn canonical_forms() {
    for (text, canonical) in [
        ("a=='b'", "a == \"b\""),
        ("a == 'say \"hi\"'", "a == 'say \"hi\"'"),
        ("a in {'y','x','y'}", "a in {\"x\", \"y\"}"),
        ("a in {}", "a in {}"),
        ("a notin {'x',}", "a not in {\"x\"}"),
        ("a startswith 'x' && b ends \t with 'y'", "(a starts with \"x\" && b ends with \"y\")"),
        ("a contains'x'", "a contains \"x\""),
        ("!(a == 'b')", "!a == \"b\""),
        ("!!a == 'b'", "a == \"b\""),
        ("! ! ! has( a )", "!has(a)"),
        ("!(!has(a))", "!!has(a)"),
        ("!(!(a == 'b' && has(c)))", "!!(a == \"b\" && has(c))"),
        ("a == 'b' && c == 'd' && e == 'f'", "(a == \"b\" && c == \"d\" && e == \"f\")"),
        ("(a == 'b' && c == 'd') && e == 'f'", "((a == \"b\" && c == \"d\") && e == \"f\")"),
        ("((a == 'b'))", "a == \"b\""),
        ("has(a) || has(b) && has(c)", "(has(a) || (has(b) && has(c)))"),
        ("in in {'in'} && contains contains 'x'", "(in in {\"in\"} && contains contains \"x\")"),
        ("all == 'x' || has == 'y'", "(all == \"x\" || has == \"y\")"),
        ("global()", "global()"),
        ("projectcalico.org/namespace == 'a-b'", "projectcalico.org/namespace == \"a-b\""),
    ] {
        assert_eq!(parse(text).canonical(), canonical, "{text}");
    }
}

#[test]
fn invalid_selectors_are_rejected_with_their_position() {
    for (text, column) in [
        ("a", 2),
        ("a = 'b'", 3),
        ("a == b", 6),
        ("a == 'b", 7),
        ("a == 'b' & has(c)", 10),
        ("a == 'b' has(c)", 10),
        ("has (a)", 5),
        ("has(a", 6),
        ("a inx {'b'}", 3),
        ("a in 'b'", 6),
        ("a in {'b' 'c'}", 11),
        ("(has(a)", 8),
        ("has(a))", 7),
        ("has(a)\n&& has(b)", 7),
        ("&& has(a)", 1),
        ("!", 2),
        ("é == 'b'", 1),
        ("a == 'é' é", 10),
    ] {
        let error = Selector::parse(text).expect_err(text);
        assert_eq!(error.column, column, "{error}");
    }
    // Parentheses nest without limit, operators do not.
    let deep = 1_000_000;
    assert_eq!(parse(&format!("{}has(a){}", "(".repeat(deep), ")".repeat(deep))), parse("has(a)"));
    let nested = |levels| format!("{}has(a){}", "!(b == 'c' && ".repeat(levels), ")".repeat(levels));
    assert!(Selector::parse(&nested(400)).is_ok());
    assert!(Selector::parse(&nested(100_000)).is_err());
    assert!(Selector::parse(&format!("{} == 'b'", "a".repeat(513))).is_err());
    assert!(Selector::parse(&format!("{} == 'b'", "a".repeat(512))).is_ok());
}

#[test]
fn absent_labels() {
    let none = labels(&[]);
    for (text, matches) in [
        ("a == 'b'", false),
        ("a != 'b'", true),
        ("a in {'b'}", false),
        ("a not in {'b'}", true),
        ("a contains ''", false),
        ("a starts with ''", false),
        ("a ends with ''", false),
        ("has(a)", false),
        ("!has(a)", true),
        ("all()", true),
        ("global()", true),
    ] {
        assert_eq!(parse(text).matches(&none), matches, "{text}");
    }
}

#[test]
fn prefixing_renames_every_label_and_gives_all_a_meaning() {
    let selector = parse("all() || (has(a) && b not in {'c'} && !d == 'e')");
    assert_eq!(
        selector.over_prefixed("pcns.", "projectcalico.org/namespace").canonical(),
        "(has(projectcalico.org/namespace) || (has(pcns.a) && pcns.b not in {\"c\"} && !pcns.d == \"e\"))"
    );
}

/// A restriction that one side of `||` does not have is none of the whole: an index would miss what the other side matches.
#[test]
fn alternatives_have_the_restrictions_that_all_of_them_have() {
    let restriction = |present, absent, values: Option<&[&'static str]>| Restriction {
        present,
        absent,
        values: values.map(|values| values.iter().copied().collect()),
    };
    for (text, expected) in [
        ("has(a) || has(a)", Some(restriction(true, false, None))),
        ("!has(a) || !has(a)", Some(restriction(false, true, None))),
        ("a == 'v' || a in {'w'}", Some(restriction(true, false, Some(&["v", "w"])))),
        ("a == 'v' || has(a)", Some(restriction(true, false, None))),
        ("has(a) || !has(a)", None),
        ("!has(a) || has(a)", None),
        ("!has(a) || a == 'v'", None),
        ("has(a) || has(b)", None),
        ("has(a) || all()", None),
    ] {
        assert_eq!(parse(text).restrictions().get("a"), expected.as_ref(), "{text}");
    }
}

/// A selector for tests: its structure, its text and its meaning, each defined separately.
#[derive(Debug, Clone)]
enum Model {
    Has(u8),
    Equal(u8, u8),
    NotEqual(u8, u8),
    In(u8, Vec<u8>),
    NotIn(u8, Vec<u8>),
    Contains(u8, u8),
    Not(Box<Model>),
    And(Vec<Model>),
    Or(Vec<Model>),
}

const NAMES: [&str; 4] = ["a", "in", "x.io/b-c", "has"];
const VALUES: [&str; 4] = ["", "v", "vw", "it's"];

impl Model {
    fn text(&self) -> String {
        let name = |index: &u8| NAMES[usize::from(*index)];
        let value = |index: &u8| format!("\"{}\"", VALUES[usize::from(*index)]);
        let set = |values: &[u8]| values.iter().map(value).collect::<Vec<_>>().join(",");
        let each = |parts: &[Model], operator: &str| {
            format!("({})", parts.iter().map(Model::text).collect::<Vec<_>>().join(operator))
        };
        match self {
            Model::Has(n) => format!("has({})", name(n)),
            Model::Equal(n, v) => format!("{} == {}", name(n), value(v)),
            Model::NotEqual(n, v) => format!("{} != {}", name(n), value(v)),
            Model::In(n, vs) => format!("{} in {{{}}}", name(n), set(vs)),
            Model::NotIn(n, vs) => format!("{} not in {{{}}}", name(n), set(vs)),
            Model::Contains(n, v) => format!("{} contains {}", name(n), value(v)),
            Model::Not(inner) => format!("!({})", inner.text()),
            Model::And(parts) => each(parts, " && "),
            Model::Or(parts) => each(parts, "||"),
        }
    }

    fn holds(&self, labels: &[Option<u8>; 4]) -> bool {
        let of = |n: &u8| labels[usize::from(*n)];
        match self {
            Model::Has(n) => of(n).is_some(),
            Model::Equal(n, v) => of(n) == Some(*v),
            Model::NotEqual(n, v) => of(n) != Some(*v),
            Model::In(n, vs) => of(n).is_some_and(|v| vs.contains(&v)),
            Model::NotIn(n, vs) => !of(n).is_some_and(|v| vs.contains(&v)),
            Model::Contains(n, v) => {
                of(n).is_some_and(|has| VALUES[usize::from(has)].contains(VALUES[usize::from(*v)]))
            }
            Model::Not(inner) => !inner.holds(labels),
            Model::And(parts) => !parts.iter().any(|part| !part.holds(labels)),
            Model::Or(parts) => parts.iter().any(|part| part.holds(labels)),
        }
    }
}

fn model() -> impl Strategy<Value = Model> {
    let leaf = prop_oneof![
        (0..4u8).prop_map(Model::Has),
        (0..4u8, 0..4u8).prop_map(|(n, v)| Model::Equal(n, v)),
        (0..4u8, 0..4u8).prop_map(|(n, v)| Model::NotEqual(n, v)),
        (0..4u8, prop::collection::vec(0..4u8, 0..4)).prop_map(|(n, vs)| Model::In(n, vs)),
        (0..4u8, prop::collection::vec(0..4u8, 0..4)).prop_map(|(n, vs)| Model::NotIn(n, vs)),
        (0..4u8, 0..4u8).prop_map(|(n, v)| Model::Contains(n, v)),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(|part| Model::Not(Box::new(part))),
            prop::collection::vec(inner.clone(), 1..4).prop_map(Model::And),
            prop::collection::vec(inner, 1..4).prop_map(Model::Or),
        ]
    })
}

proptest! {
    #[test]
    fn parse_after_print_is_identity(model in model()) {
        let selector = parse(&model.text());
        let again = parse(&selector.canonical());
        // The canonical form of `!(!a)` is `!!a`, as in Calico, and that parses as `a`.
        if !selector.canonical().contains("!!") {
            prop_assert_eq!(&again, &selector);
            prop_assert_eq!(again.canonical(), selector.canonical());
            prop_assert_eq!(again.id(), selector.id());
        }
    }

    #[test]
    fn evaluation_agrees_with_the_model(model in model(), has in prop::array::uniform4(prop::option::of(0..4u8))) {
        let selector = parse(&model.text());
        let labels: BTreeMap<String, String> = NAMES.iter().zip(has)
            .filter_map(|(name, value)| value.map(|v| ((*name).to_owned(), VALUES[usize::from(v)].to_owned())))
            .collect();
        prop_assert_eq!(selector.matches(&labels), model.holds(&has));

        // A match satisfies the restrictions.
        if selector.matches(&labels) {
            for (label, restriction) in selector.restrictions() {
                let value = labels.get(label);
                prop_assert!(!restriction.present || value.is_some());
                prop_assert!(!restriction.absent || value.is_none());
                if let Some(values) = &restriction.values {
                    prop_assert!(value.is_some_and(|value| values.contains(value.as_str())));
                }
            }
        }
    }

    #[test]
    fn no_text_panics(text in "[ \ta-c!&|(){}'\"=,.é]{0,40}|.{0,40}") {
        if let Ok(selector) = Selector::parse(&text) {
            let canonical = selector.canonical();
            let again = parse(&canonical);
            prop_assert!(canonical.contains("!!") || again == selector);
        }
    }
}
