//! Values as YAML.

use std::fmt::Write as _;

use serde_json::Value;

/// The longest name, in bytes, that may stand before a colon (YAML 1.2.2, section 7.4.2: 1,024 characters). Longer ones need a question mark.
const LONGEST_KEY: usize = 1000;

/// A mapping as a YAML document. What YAML could read as another type is in quotes.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, value, 0);
    text
}

fn write(text: &mut String, value: &Value, depth: usize) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = scalar(&Value::from(name.as_str()));
                let _ = match name.len() > LONGEST_KEY {
                    true => write!(text, "{indent}? {name}\n{indent}:"),
                    false => write!(text, "{indent}{name}:"),
                };
                below(text, value, depth + 1);
            }
        }
        Value::Array(items) => {
            for item in items {
                if is_scalar(item) {
                    let _ = writeln!(text, "{indent}- {}", scalar(item));
                } else {
                    // The first line of the item stands behind the dash.
                    let mut inner = String::new();
                    write(&mut inner, item, depth + 1);
                    let _ = write!(text, "{indent}- {}", inner.trim_start());
                }
            }
        }
        value => {
            let _ = writeln!(text, "{indent}{}", scalar(value));
        }
    }
}

/// Writes a value behind `name:`.
fn below(text: &mut String, value: &Value, depth: usize) {
    if is_scalar(value) {
        let _ = writeln!(text, " {}", scalar(value));
    } else {
        text.push('\n');
        write(text, value, depth);
    }
}

/// Whether the value stands in one line.
fn is_scalar(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => true,
    }
}

/// A value in one line. A text that YAML could read as something else is in quotes, as in JSON.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        value => value.to_string(),
    }
}

fn is_plain(text: &str) -> bool {
    let words = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let is_good = |c: char| c.is_ascii_alphanumeric() || " -_./,".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(is_good)
        && !text.ends_with(' ')
        && !words.contains(&text.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_back_unchanged() {
        let document = serde_json::json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy",
            "metadata": {"name": "a", "namespace": "b", "annotations": {
                "No": "no", "text": "it: #1 'x' \"y\"", "number": "12", "empty": "", "pattern": "^(?i)(A|B)?$", "end": "a ",
            }},
            "spec": {
                "order": -1.5, "types": ["Ingress"], "egress": [], "selector": "a == 'b'",
                "ingress": [
                    {"action": "Allow", "protocol": 6, "destination": {"nets": ["10.0.0.0/8"], "ports": [1, "http"]}},
                    {"metadata": {"annotations": {}}, "action": "Deny"},
                ],
            },
        });
        let read = crate::manifest::read("f.yml", &to_yaml(&document)).unwrap();
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].value, document);
    }
}
