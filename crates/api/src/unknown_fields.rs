//! Reports unknown fields, with the known field that was probably meant.

use serde_json::Value;

use crate::FieldError;

/// Reports the fields of a mapping that are not among these.
pub(crate) fn only(value: &Value, path: &str, known: &[&str], problems: &mut Vec<FieldError>) {
    let Value::Object(fields) = value else {
        if !value.is_null() {
            problems.push(FieldError::new(path, "must be a mapping of fields"));
        }
        return;
    };
    for field in fields.keys().filter(|field| !known.contains(&field.as_str())) {
        let path = if path.is_empty() { field.clone() } else { format!("{path}.{field}") };
        problems.push(FieldError::new(path, unknown(field, known)));
    }
}

/// The message for an unknown field, with the known field that was probably meant.
fn unknown(field: &str, known: &[&str]) -> String {
    let close =
        known.iter().min_by_key(|name| distance(field, name)).filter(|name| distance(field, name) <= 2);
    match close {
        Some(meant) => format!("unknown field; did you mean {meant:?}?"),
        None => "unknown field".to_owned(),
    }
}

/// The Levenshtein distance.
pub(crate) fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, l) in left.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, r) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(l != *r);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}
