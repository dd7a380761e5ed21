//! Selectors: whether each is valid, its canonical form, its unique id, and which labels it matches.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;
use tortie_selector::Selector;

use super::Tally;

#[derive(Deserialize)]
struct Case {
    selector: String,
    valid: bool,
    canonical: Option<String>,
    uid: Option<String>,
    cases: Vec<(BTreeMap<String, String>, bool)>,
}

/// Returns the number of selectors that differ.
pub(super) fn replay(file: &str, lines: &[Value]) -> Result<usize> {
    let begun = Instant::now();
    let mut tally = Tally::default();
    for (number, line) in lines.iter().enumerate() {
        let case = Case::deserialize(line).with_context(|| format!("{file}:{}", number + 1))?;
        tally.cases += 1;
        let difference = difference(&case);
        tally.differences.extend(difference.map(|found| format!("{:?}: {found}", case.selector)));
    }
    tally.close(file, &"the selector parser", begun)
}

fn difference(case: &Case) -> Option<String> {
    let selector = match (Selector::parse(&case.selector), case.valid) {
        (Ok(selector), true) => selector,
        (Err(_), false) => return None,
        (Ok(_), false) => return Some("valid here, invalid there".to_owned()),
        (Err(error), true) => return Some(format!("invalid here: {error}")),
    };
    let (canonical, id) = (selector.canonical(), selector.id());
    if case.canonical.as_ref().is_some_and(|wanted| *wanted != canonical) {
        return Some(format!("canonical form {canonical:?}, not {:?}", case.canonical));
    }
    if case.uid.as_ref().is_some_and(|wanted| *wanted != id) {
        return Some(format!("id {id}, not {:?}", case.uid));
    }
    let wrong = case.cases.iter().find(|(labels, matches)| selector.matches(labels) != *matches)?;
    Some(format!("{:?} should match: {}", wrong.0, wrong.1))
}
