//! Calico's label selector language (`libcalico-go/lib/selector`): `app == 'web' && has(tier)`.
//!
//! [`Selector::parse`] parses it. [`Selector::canonical`] writes the canonical form that all spellings share.
//! [`Selector::id`] is a hash of that form, equal to Calico's, because sets are named by it. [`Selector::matches`]
//! evaluates it. [`Selector::restrictions`] tells an index which labels can match at all.

mod conjunction;
mod parse;
mod print;
mod restrict;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha224};

pub use conjunction::LabelTest;
pub use parse::SelectorError;
pub use restrict::{Restriction, Restrictions};

/// The label with the namespace's name on every namespaced endpoint and network set.
pub const NAMESPACE_LABEL: &str = "projectcalico.org/namespace";

/// A parsed selector. Clones share names and values, because clusters have many selectors over few labels.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selector {
    node: Node,
}

/// The syntax tree. Chains of one operator are one node; explicit parentheses stay nested.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Node {
    All,
    Global,
    Has(Arc<str>),
    Compare(Arc<str>, Comparison, Arc<str>),
    In(Arc<str>, BTreeSet<String>),
    NotIn(Arc<str>, BTreeSet<String>),
    Not(Box<Node>),
    And(Vec<Node>),
    Or(Vec<Node>),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Contains,
    StartsWith,
    EndsWith,
}

/// Something that has labels.
pub trait Labels {
    /// The value of a label, if it exists.
    fn label(&self, name: &str) -> Option<&str>;
}

impl Labels for BTreeMap<String, String> {
    fn label(&self, name: &str) -> Option<&str> {
        self.get(name).map(String::as_str)
    }
}

impl Selector {
    /// Parses a selector; blank text is `all()`.
    ///
    /// # Errors
    /// The position where the text is invalid, and what was expected there.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        parse::parse(text).map(|node| Self { node })
    }

    /// `all()`.
    #[must_use]
    pub fn all() -> Self {
        Self { node: Node::All }
    }

    /// `has(label)`.
    #[must_use]
    pub fn has(label: &str) -> Self {
        Self { node: Node::Has(label.into()) }
    }

    /// `label == "value"`.
    #[must_use]
    pub fn equal(label: impl Into<Arc<str>>, value: impl Into<Arc<str>>) -> Self {
        Self { node: Node::Compare(label.into(), Comparison::Equal, value.into()) }
    }

    /// `label in {…}`.
    #[must_use]
    pub fn one_of<S: Into<String>>(label: &str, values: impl IntoIterator<Item = S>) -> Self {
        Self { node: Node::In(label.into(), values.into_iter().map(Into::into).collect()) }
    }

    /// `label not in {…}`.
    #[must_use]
    pub fn none_of<S: Into<String>>(label: &str, values: impl IntoIterator<Item = S>) -> Self {
        Self { node: Node::NotIn(label.into(), values.into_iter().map(Into::into).collect()) }
    }

    /// `!(self)`.
    #[must_use]
    pub fn negated(self) -> Self {
        Self { node: Node::Not(Box::new(self.node)) }
    }

    /// The conjunction `a && b && c`; of one selector itself, of none `all()`.
    #[must_use]
    pub fn all_of(selectors: impl IntoIterator<Item = Self>) -> Self {
        let mut nodes: Vec<Node> = selectors.into_iter().map(|selector| selector.node).collect();
        match nodes.len() {
            0 => Self::all(),
            1 => Self { node: nodes.remove(0) },
            _ => {
                nodes.shrink_to_fit();
                Self { node: Node::And(nodes) }
            }
        }
    }

    /// Whether the labels match. For an absent label, `!=` and `not in` are true, and the other comparisons are
    /// false.
    #[must_use]
    pub fn matches(&self, labels: &(impl Labels + ?Sized)) -> bool {
        self.node.matches(labels)
    }

    /// The canonical text that all spellings of this selector share.
    #[must_use]
    pub fn canonical(&self) -> String {
        self.to_string()
    }

    /// Calico's unique id: `s:` and the base64url SHA-224 of `s:` and the canonical form; 40 characters.
    #[must_use]
    pub fn id(&self) -> String {
        unique_id("s", &self.to_string())
    }

    /// The same selector over labels whose names begin with `prefix` (`pcns.` for a namespace's, `pcsa.` for a service
    /// account's), with every `all()` replaced by `has(presence)`.
    #[must_use]
    pub fn over_prefixed(&self, prefix: &str, presence: &str) -> Self {
        Self { node: self.node.over_prefixed(prefix, Some(presence)) }
    }

    /// The same selector over labels whose names begin with `prefix`; `all()` stays `all()`.
    #[must_use]
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { node: self.node.over_prefixed(prefix, None) }
    }

    /// The same selector with every `all()` replaced by `has(presence)`.
    #[must_use]
    pub fn all_means_has(&self, presence: &str) -> Self {
        self.over_prefixed("", presence)
    }

    /// Whether it contains `global()` anywhere.
    #[must_use]
    pub fn mentions_global(&self) -> bool {
        self.node.any(&|node| matches!(node, Node::Global))
    }

    /// Whether it is exactly `all()`.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.node == Node::All
    }

    /// Whether it is exactly `global()`.
    #[must_use]
    pub fn is_global(&self) -> bool {
        self.node == Node::Global
    }

    /// The names of all labels that it refers to.
    #[must_use]
    pub fn labels(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        self.node.labels(&mut names);
        names
    }

    /// The restrictions on single labels that every match satisfies; labels without restrictions are omitted. An
    /// index can find candidates by them.
    #[must_use]
    pub fn restrictions(&self) -> Restrictions<'_> {
        let mut demands = Restrictions::new();
        restrict::restrict(&self.node, &mut demands);
        demands
    }
}

/// Calico's unique ids: a prefix, and the base64url SHA-224 of prefix and text.
#[must_use]
pub fn unique_id(prefix: &str, text: &str) -> String {
    let hash = Sha224::digest(format!("{prefix}:{text}").as_bytes());
    format!("{prefix}:{}", URL_SAFE_NO_PAD.encode(hash))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.node.fmt(f)
    }
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Selector({self})")
    }
}

impl FromStr for Selector {
    type Err = SelectorError;
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        Self::parse(text)
    }
}

impl Node {
    fn matches(&self, labels: &(impl Labels + ?Sized)) -> bool {
        match self {
            Node::All | Node::Global => true,
            Node::Has(label) => labels.label(label).is_some(),
            Node::Compare(label, comparison, wanted) => comparison.holds(labels.label(label), wanted),
            Node::In(label, values) => labels.label(label).is_some_and(|value| values.contains(value)),
            Node::NotIn(label, values) => labels.label(label).is_none_or(|value| !values.contains(value)),
            Node::Not(inner) => !inner.matches(labels),
            Node::And(parts) => parts.iter().all(|part| part.matches(labels)),
            Node::Or(parts) => parts.iter().any(|part| part.matches(labels)),
        }
    }

    fn over_prefixed(&self, prefix: &str, presence: Option<&str>) -> Self {
        let prefixed = |label: &Arc<str>| match prefix {
            "" => label.clone(),
            prefix => [prefix, &**label].concat().into(),
        };
        let each = |parts: &[Node]| parts.iter().map(|part| part.over_prefixed(prefix, presence)).collect();
        match self {
            Node::All => presence.map_or(Node::All, |presence| Node::Has(presence.into())),
            Node::Global => Node::Global,
            Node::Has(label) => Node::Has(prefixed(label)),
            Node::Compare(label, comparison, value) => {
                Node::Compare(prefixed(label), *comparison, value.clone())
            }
            Node::In(label, values) => Node::In(prefixed(label), values.clone()),
            Node::NotIn(label, values) => Node::NotIn(prefixed(label), values.clone()),
            Node::Not(inner) => Node::Not(Box::new(inner.over_prefixed(prefix, presence))),
            Node::And(parts) => Node::And(each(parts)),
            Node::Or(parts) => Node::Or(each(parts)),
        }
    }

    fn labels<'a>(&'a self, names: &mut BTreeSet<&'a str>) {
        match self {
            Node::All | Node::Global => {}
            Node::Has(label) | Node::Compare(label, ..) | Node::In(label, _) | Node::NotIn(label, _) => {
                names.insert(label);
            }
            Node::Not(inner) => inner.labels(names),
            Node::And(parts) | Node::Or(parts) => parts.iter().for_each(|part| part.labels(names)),
        }
    }

    fn any(&self, holds: &impl Fn(&Node) -> bool) -> bool {
        holds(self)
            || match self {
                Node::Not(inner) => inner.any(holds),
                Node::And(parts) | Node::Or(parts) => parts.iter().any(|part| part.any(holds)),
                _ => false,
            }
    }
}

impl Comparison {
    fn holds(self, value: Option<&str>, wanted: &str) -> bool {
        match (self, value) {
            (Comparison::NotEqual, value) => value != Some(wanted),
            (_, None) => false,
            (Comparison::Equal, Some(value)) => value == wanted,
            (Comparison::Contains, Some(value)) => value.contains(wanted),
            (Comparison::StartsWith, Some(value)) => value.starts_with(wanted),
            (Comparison::EndsWith, Some(value)) => value.ends_with(wanted),
        }
    }
}
