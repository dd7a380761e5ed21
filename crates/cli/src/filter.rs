//! Selects objects by labels (`-l`) and fields (`--field-selector`), in kubectl's syntax.

use std::str::FromStr;

use serde_json::Value;

/// A label selector in the form of a text: `app=web,env!=test,tier in (a,b),!old`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LabelFilter(Vec<Requirement>);

/// A field selector: `metadata.name=a,spec.nodeName!=b`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldFilter(Vec<FieldRequirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    Exists(String),
    DoesNotExist(String),
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FieldRequirement {
    /// The names of the fields on the way.
    path: Vec<String>,
    value: String,
    /// Whether the field must differ.
    negated: bool,
}

impl LabelFilter {
    /// Whether the labels of an object fulfil all requirements.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let label = |name: &String| object.pointer("/metadata/labels")?.get(name)?.as_str();
        let is_in =
            |name, values: &[String]| label(name).is_some_and(|value| values.iter().any(|one| one == value));
        self.0.iter().all(|requirement| match requirement {
            Requirement::Exists(name) => label(name).is_some(),
            Requirement::DoesNotExist(name) => label(name).is_none(),
            Requirement::In(name, values) => is_in(name, values),
            Requirement::NotIn(name, values) => !is_in(name, values),
        })
    }
}

impl FieldFilter {
    /// Whether the fields of an object fulfil all requirements. An absent field is empty.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|requirement| {
            let field = requirement.path.iter().try_fold(object, |value, name| value.get(name));
            let text = match field {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
            };
            (text == requirement.value) != requirement.negated
        })
    }
}

impl FromStr for LabelFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parts(text)?.into_iter().map(requirement).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for FieldFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let one = |part: &str| {
            let (field, value, negated) =
                comparison(part).ok_or_else(|| format!("{part:?} is not of the form FIELD=VALUE"))?;
            let path = field_path(field)?;
            Ok(FieldRequirement { path, value: value.to_owned(), negated })
        };
        parts(text)?.into_iter().map(one).collect::<Result<_, String>>().map(Self)
    }
}

/// The parts of a selector; commas within parentheses do not separate.
fn parts(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut depth, mut begin) = (Vec::new(), 0_u32, 0);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => {
                depth =
                    depth.checked_sub(1).ok_or_else(|| format!("{text:?}: a parenthesis is not opened"))?
            }
            ',' if depth == 0 => {
                parts.extend(text.get(begin..at));
                begin = at + 1;
            }
            _ => {}
        }
    }
    if depth > 0 {
        return Err(format!("{text:?}: a parenthesis is not closed"));
    }
    parts.extend(text.get(begin..));
    let parts: Vec<&str> = parts.into_iter().map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(format!("{text:?}: a requirement is empty"));
    }
    Ok(parts)
}

/// The two sides of `a=b`, `a==b` or `a!=b`, and whether they must differ.
fn comparison(part: &str) -> Option<(&str, &str, bool)> {
    for (operator, negated) in [("!=", true), ("==", false), ("=", false)] {
        if let Some((name, value)) = part.split_once(operator) {
            return Some((name.trim(), value.trim(), negated)).filter(|(name, ..)| !name.is_empty());
        }
    }
    None
}

fn requirement(part: &str) -> Result<Requirement, String> {
    if let Some(open) = part.find('(') {
        let values = part.get(open + 1..).and_then(|rest| rest.strip_suffix(')'));
        let mut words = part.get(..open).unwrap_or_default().split_whitespace();
        let values = values.map(|values| values.split(',').map(|value| label_value(value.trim())).collect());
        let values: Option<Vec<String>> = values.transpose()?;
        return match (words.next(), words.next(), words.next(), values) {
            (Some(name), Some("in"), None, Some(values)) => Ok(Requirement::In(label_name(name)?, values)),
            (Some(name), Some("notin"), None, Some(values)) => {
                Ok(Requirement::NotIn(label_name(name)?, values))
            }
            _ => Err(format!("{part:?} is not of the form LABEL in (VALUE, …)")),
        };
    }
    if let Some((name, value, negated)) = comparison(part) {
        let (name, values) = (label_name(name)?, vec![label_value(value)?]);
        return Ok(if negated { Requirement::NotIn(name, values) } else { Requirement::In(name, values) });
    }
    match part.strip_prefix('!') {
        Some(name) => Ok(Requirement::DoesNotExist(label_name(name.trim())?)),
        None => Ok(Requirement::Exists(label_name(part)?)),
    }
}

fn label_name(name: &str) -> Result<String, String> {
    let is_valid = !name.is_empty()
        && name.chars().all(|character| character.is_ascii_alphanumeric() || "-_./".contains(character));
    if is_valid { Ok(name.to_owned()) } else { Err(format!("{name:?} is no name of a label")) }
}

/// A value that no label can have would select nothing, or with != everything.
fn label_value(value: &str) -> Result<String, String> {
    let is_valid = value.len() <= 63
        && value.chars().all(|character| character.is_ascii_alphanumeric() || "-_.".contains(character));
    if is_valid { Ok(value.to_owned()) } else { Err(format!("{value:?} is no value of a label")) }
}

/// The names of the fields on the way: `metadata.labels.kubernetes\\.io/os` has three.
fn field_path(field: &str) -> Result<Vec<String>, String> {
    let (mut path, mut name, mut escaped) = (Vec::new(), String::new(), false);
    for character in field.trim_start_matches('.').chars() {
        match character {
            '\\' if !escaped => escaped = true,
            '.' if !escaped => path.push(std::mem::take(&mut name)),
            '[' | ']' | '{' | '}' if !escaped => {
                return Err(format!(
                    "{field:?}: elements of lists cannot be selected; name a field, such as spec.nodeName"
                ));
            }
            other => {
                name.push(other);
                escaped = false;
            }
        }
    }
    path.push(name);
    match path.iter().any(String::is_empty) {
        true => Err(format!("{field:?} has a field without a name")),
        false => Ok(path),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn label_selectors_are_those_of_kubectl() {
        let object =
            json!({"metadata": {"labels": {"app": "web", "env": "test", "app.kubernetes.io/name": "x"}}});
        for (text, expected) in [
            ("app=web", true),
            ("app==web", true),
            ("app = web , env=test", true),
            ("app=db", false),
            ("app!=db", true),
            ("absent!=db", true),
            ("app in (db, web)", true),
            ("app notin (db,web)", false),
            ("absent notin (a)", true),
            ("app", true),
            ("!app", false),
            ("!absent,env in (test),app.kubernetes.io/name=x", true),
            ("app=", false),
        ] {
            assert_eq!(text.parse::<LabelFilter>().unwrap().matches(&object), expected, "{text}");
        }
        for text in [
            "",
            "a,,b",
            "a in b",
            "a in (b",
            "a) in (b",
            "a within (b)",
            "!",
            "a b",
            "(a)",
            "a in (b) c",
            "app!='web'",
            "app=web db",
            "app=we*",
            "app in ('a')",
        ] {
            assert!(text.parse::<LabelFilter>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn field_selectors_compare_texts() {
        let object = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n", "order": 10}});
        for (text, expected) in [
            ("metadata.name=a", true),
            ("metadata.name=b", false),
            ("metadata.name!=b,spec.nodeName==n", true),
            ("spec.order=10", true),
            (".status.phase=", true),
            ("status.phase!=Running", true),
        ] {
            assert_eq!(text.parse::<FieldFilter>().unwrap().matches(&object), expected, "{text}");
        }
        let labelled = json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}}});
        let filter: FieldFilter = r"metadata.labels.kubernetes\.io/os=linux".parse().unwrap();
        assert!(filter.matches(&labelled) && !filter.matches(&object));
        for text in ["metadata.name", "spec.containers[0].image!=x", "{.spec}=x", "a..b=c", "a.=b"] {
            assert!(text.parse::<FieldFilter>().is_err(), "{text}");
        }
    }
}
