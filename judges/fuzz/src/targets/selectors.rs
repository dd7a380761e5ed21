//! Label selectors.

use std::collections::BTreeMap;

use tortie_selector::Selector;

/// A selector. Its canonical form is a selector with the same meaning, and it can be evaluated.
pub fn selector(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(selector) = Selector::parse(text) else { return };
    let canonical = selector.canonical();
    let again = Selector::parse(&canonical).unwrap_or_else(|error| panic!("{canonical}: {error}"));
    // `!(!a)` is written `!!a`, as Calico does, and that is read as `a`.
    if !canonical.contains("!!") {
        assert_eq!(again.canonical(), canonical);
        assert_eq!(again.id(), selector.id());
    }
    let (absent, mut present) = (BTreeMap::new(), BTreeMap::new());
    for label in selector.labels() {
        present.insert(label.to_owned(), "x".to_owned());
    }
    for labels in [&absent, &present] {
        assert_eq!(again.matches(labels), selector.matches(labels));
        assert_eq!(selector.clone().negated().matches(labels), !selector.matches(labels));
    }
    let _ = (selector.restrictions(), selector.over_prefixed("a.", "b"), selector.mentions_global());
}
