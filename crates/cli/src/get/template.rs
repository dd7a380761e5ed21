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

/// An expression, as paths in the syntax of RFC 9535. A union (`['metadata.name','spec.order']`) gives several: kubectl prints
/// all values of the first one before those of the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path(Vec<String>);

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
        let paths = translated(inner.trim())?;
        for path in &paths {
            Value::Null
                .query(path)
                .map_err(|error| format!("{text:?} is no JSONPath expression: {error}"))?;
        }
        Ok(Self(paths))
    }

    /// The values at this path.
    pub(crate) fn values<'a>(&self, document: &'a Value) -> Vec<&'a Value> {
        self.0.iter().flat_map(|path| document.query(path).unwrap_or_default()).collect()
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
fn translated(expression: &str) -> Result<Vec<String>, String> {
    let mut rest = expression.trim_start_matches(['$', '@']);
    let mut paths = vec!["$".to_owned()];
    if !rest.is_empty() && !rest.starts_with(['.', '[']) {
        append(&mut paths, &[name(&mut rest)]);
    }
    while let Some(first) = rest.chars().next() {
        match first {
            '.' => {
                let is_first = rest.len() == expression.trim_start_matches(['$', '@']).len();
                rest = rest.get(1..).unwrap_or_default();
                if let Some(deeper) = rest.strip_prefix('.') {
                    append(&mut paths, &["..".to_owned()]);
                    rest = deeper;
                }
                match rest.chars().next() {
                    Some('[') => {}
                    Some('*') => {
                        append(&mut paths, &["[*]".to_owned()]);
                        rest = rest.get(1..).unwrap_or_default();
                    }
                    Some(_) => append(&mut paths, &[name(&mut rest)]),
                    None if is_first => {}
                    None => return Err(format!("{expression:?} ends with a dot")),
                }
            }
            '[' => {
                let end =
                    end_of_bracket(rest).ok_or_else(|| format!("{expression:?}: a bracket is not closed"))?;
                let inner = rest.get(1..end - 1).unwrap_or_default();
                append(&mut paths, &in_brackets(inner));
                rest = rest.get(end..).unwrap_or_default();
            }
            _ => return Err(format!("{expression:?}: a dot or a bracket is expected before {rest:?}")),
        }
    }
    Ok(paths)
}

/// Continues each path with each of these parts.
fn append(paths: &mut Vec<String>, parts: &[String]) {
    *paths = parts.iter().flat_map(|part| paths.iter().map(move |path| format!("{path}{part}"))).collect();
}

/// Takes a name from the expression. A backslash makes a dot part of the name.
fn name(rest: &mut &str) -> String {
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
    format!("[{}]", Value::String(name))
}

/// What stands in brackets: a filter, or a union of numbers, slices and quoted names. For kubectl, a dot in a quoted name
/// leads to a field of a field; here, the name with the dot is found, too.
fn in_brackets(inner: &str) -> Vec<String> {
    if inner.trim_start().starts_with('?') {
        return vec![format!("[{inner}]")];
    }
    let mut parts = Vec::new();
    for part in split_at_commas(inner) {
        let quote = part.chars().next().filter(|first| matches!(first, '"' | '\''));
        let quoted = quote.and_then(|quote| part.strip_prefix(quote)?.strip_suffix(quote));
        let Some(mut rest) = quoted else {
            parts.push(format!("[{part}]"));
            continue;
        };
        let (whole, mut path) = (format!("[{}]", Value::String(rest.to_owned())), name(&mut rest));
        while let Some(next) = rest.strip_prefix('.') {
            rest = next;
            path.push_str(&name(&mut rest));
        }
        if path != whole && !whole.contains('\\') {
            parts.push(whole);
        }
        parts.push(path);
    }
    parts
}

/// The parts of a text, which commas outside of quotes separate.
fn split_at_commas(text: &str) -> Vec<&str> {
    let mut quote = None;
    let parts = text.split(|character| {
        match (quote, character) {
            (None, '\'' | '"') => quote = Some(character),
            (Some(open), _) if open == character => quote = None,
            _ => {}
        }
        character == ',' && quote.is_none()
    });
    parts.map(str::trim).collect()
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
            ("{.items[*]['metadata.name', 'spec.order']}", "a b 10 20.5"),
            (r"{.items[*].metadata['name','labels.app\.kubernetes\.io/name']}", "a b x"),
            ("{.items[1,0].metadata.name}", "b a"),
            ("{.items[*].metadata.labels[\"a,b\", 'app.kubernetes.io/name']}", "x"),
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
