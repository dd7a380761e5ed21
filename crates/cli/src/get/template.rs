//! kubectl's JSONPath templates: text with expressions in braces, and `{range …}…{end}`
//! (`k8s.io/client-go/util/jsonpath`). RFC 9535 evaluates the expressions.

use jsonpath_rust::JsonPath;
use serde_json::Value;

/// A parsed template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Values(Path),
    Range(Path, Vec<Part>),
}

/// An expression, in the syntax of RFC 9535.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path(String);

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// Braces, ranges or an expression are not correct.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut rest = text;
        let parts = parts(&mut rest, false)?;
        Ok(Self(parts))
    }

    /// The text for a document. Absent fields have no text.
    pub(crate) fn render(&self, document: &Value) -> String {
        let mut text = String::new();
        render(&self.0, document, &mut text);
        text
    }
}

impl Path {
    /// Parses an expression such as `.metadata.name`, `{.spec.order}` or `.metadata.labels.app\.kubernetes\.io/name`.
    ///
    /// # Errors
    /// The expression is not correct.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let inner = text.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')).unwrap_or(text);
        let path = Self(translated(inner.trim())?);
        match Value::Null.query(&path.0) {
            Ok(_) => Ok(path),
            Err(error) => Err(format!("{text:?} is no JSONPath expression: {error}")),
        }
    }

    /// The values at this path.
    pub(crate) fn values<'a>(&self, document: &'a Value) -> Vec<&'a Value> {
        document.query(&self.0).unwrap_or_default()
    }

    /// The values as one text, separated by this.
    pub(crate) fn text(&self, document: &Value, separator: &str) -> String {
        let texts: Vec<String> = self.values(document).into_iter().map(text_of).collect();
        texts.join(separator)
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn render(parts: &[Part], document: &Value, text: &mut String) {
    for part in parts {
        match part {
            Part::Text(literal) => text.push_str(literal),
            Part::Values(path) => text.push_str(&path.text(document, " ")),
            Part::Range(path, body) => {
                path.values(document).into_iter().for_each(|value| render(body, value, text));
            }
        }
    }
}

/// The parts up to the end of the text or, in a range, up to its end.
fn parts(rest: &mut &str, in_range: bool) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let Some(open) = rest.find('{') else {
            parts.push(Part::Text(std::mem::take(rest).to_owned()));
            break;
        };
        let (literal, braces) = rest.split_at(open);
        if !literal.is_empty() {
            parts.push(Part::Text(literal.to_owned()));
        }
        let (expression, after) = in_braces(braces)?;
        *rest = after;
        match expression.split_once(char::is_whitespace) {
            _ if expression == "end" && in_range => return Ok(parts),
            _ if expression == "end" => return Err("{end} has no {range}".to_owned()),
            Some(("range", path)) => {
                let path = Path::parse(path)?;
                parts.push(Part::Range(path, self::parts(rest, true)?));
            }
            _ => match literal_of(expression) {
                Some(text) => parts.push(Part::Text(text)),
                None => parts.push(Part::Values(Path::parse(expression)?)),
            },
        }
    }
    if in_range { Err("{range} has no {end}".to_owned()) } else { Ok(parts) }
}

/// The expression in the braces at the beginning, and what follows them.
fn in_braces(text: &str) -> Result<(&str, &str), String> {
    let mut quote = None;
    for (at, character) in text.char_indices().skip(1) {
        match (quote, character) {
            (None, '\'' | '"') => quote = Some(character),
            (Some(open), _) if open == character => quote = None,
            (None, '}') => {
                let (inner, after) = (text.get(1..at), text.get(at + 1..));
                return Ok((inner.unwrap_or_default().trim(), after.unwrap_or_default()));
            }
            _ => {}
        }
    }
    Err(format!("{text:?}: a brace is not closed"))
}

/// The text of a quoted expression, such as `"\n"`.
fn literal_of(expression: &str) -> Option<String> {
    let quote = expression.chars().next().filter(|first| matches!(first, '"' | '\''))?;
    let inner = expression.strip_prefix(quote)?.strip_suffix(quote)?;
    let mut text = String::new();
    let mut characters = inner.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                other => text.push(other),
            },
            other => text.push(other),
        }
    }
    Some(text)
}

/// The expression in the syntax of RFC 9535: names become quoted, because kubectl allows any characters in them.
fn translated(expression: &str) -> Result<String, String> {
    let mut rest = expression.trim_start_matches(['$', '@']);
    let mut path = "$".to_owned();
    let needs_dot = !rest.is_empty() && !rest.starts_with(['.', '[']);
    if needs_dot {
        push_name(&mut rest, &mut path);
    }
    while let Some(first) = rest.chars().next() {
        match first {
            '.' => {
                rest = rest.get(1..).unwrap_or_default();
                if let Some(deeper) = rest.strip_prefix('.') {
                    path.push_str("..");
                    rest = deeper;
                }
                match rest.chars().next() {
                    Some('[') => {}
                    Some('*') => {
                        path.push_str("[*]");
                        rest = rest.get(1..).unwrap_or_default();
                    }
                    Some(_) => push_name(&mut rest, &mut path),
                    None if path == "$" => {}
                    None => return Err(format!("{expression:?} ends with a dot")),
                }
            }
            '[' => {
                let end =
                    end_of_bracket(rest).ok_or_else(|| format!("{expression:?}: a bracket is not closed"))?;
                path.push_str(rest.get(..end).unwrap_or_default());
                rest = rest.get(end..).unwrap_or_default();
            }
            _ => return Err(format!("{expression:?}: a dot or a bracket is expected before {rest:?}")),
        }
    }
    Ok(path)
}

/// Moves a name from the expression to the path. A backslash makes a dot part of the name.
fn push_name(rest: &mut &str, path: &mut String) {
    let (mut name, mut length, mut escaped) = (String::new(), 0, false);
    for character in rest.chars() {
        match character {
            '\\' if !escaped => escaped = true,
            '.' | '[' if !escaped => break,
            other => {
                name.push(other);
                escaped = false;
            }
        }
        length += character.len_utf8();
    }
    *rest = rest.get(length..).unwrap_or_default();
    path.push_str(&format!("[{}]", Value::String(name)));
}

/// The length of the brackets at the beginning.
fn end_of_bracket(text: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0_u32, None);
    for (at, character) in text.char_indices() {
        match (quote, character) {
            (None, '\'' | '"') => quote = Some(character),
            (Some(open), _) if open == character => quote = None,
            (None, '[') => depth += 1,
            (None, ']') if depth == 1 => return Some(at + 1),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list() -> Value {
        json!({"kind": "List", "items": [
            {"metadata": {"name": "a", "labels": {"app.kubernetes.io/name": "x"}}, "spec": {"order": 10}, "ports": [1, 2]},
            {"metadata": {"name": "b", "labels": {}}, "spec": {"order": 20.5, "on": true}, "ports": []},
        ]})
    }

    #[test]
    fn templates_are_those_of_kubectl() {
        for (template, expected) in [
            ("{.kind}", "List"),
            ("{.items[*].metadata.name}", "a b"),
            ("{.items[0].metadata.name}", "a"),
            ("{.items[-1:].metadata.name}", "b"),
            ("{$.items[*].spec.order}", "10 20.5"),
            ("{..name}", "a b"),
            ("{.items[*]['metadata','spec'].name}", "a b"),
            ("{.items[?(@.metadata.name==\"b\")].spec.order}", "20.5"),
            ("{.items[?(@.spec.order>15)].metadata.name}", "b"),
            (r"{.items[*].metadata.labels.app\.kubernetes\.io/name}", "x"),
            ("{.items[*].metadata.labels['app.kubernetes.io/name']}", "x"),
            ("{range .items[*]}{.metadata.name}{\"\\t\"}{.spec.order}{\"\\n\"}{end}", "a\t10\nb\t20.5\n"),
            ("{range .items[*]}{.metadata.name}:{range .ports[*]}<{@}>{end};{end}", "a:<1><2>;b:;"),
            ("names: {.items[*].metadata.name}.", "names: a b."),
            ("{.items[*].absent}", ""),
            ("{.items[1].spec.on}", "true"),
            ("{.items[0].ports}", "[1,2]"),
            ("plain", "plain"),
            ("{kind}", "List"),
            ("{'}'}", "}"),
        ] {
            let parsed = Template::parse(template).unwrap_or_else(|error| panic!("{template}: {error}"));
            assert_eq!(parsed.render(&list()), expected, "{template}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for (template, expected) in [
            ("{.a", "brace is not closed"),
            ("{range .items[*]}x", "{range} has no {end}"),
            ("{end}", "{end} has no {range}"),
            ("{.items[0}", "bracket is not closed"),
            ("{.a.}", "ends with a dot"),
            ("{.items[abc def]}", "no JSONPath expression"),
        ] {
            let error = Template::parse(template).unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        }
    }
}
