//! Go templates of `get`, with the functions that kubectl adds (`k8s.io/cli-runtime/pkg/printers/template.go`).

use anyhow::{Context, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gotmpl::{Template, TemplateError, Value as GoValue};
use serde_json::Value;

/// A template without mistakes in its syntax.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GoTemplate(String);

impl GoTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// Its syntax is not correct.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let parsed = parsed(text).map(drop).map_err(|error| error.to_string());
        parsed
            .and_then(|()| check_ends(text))
            .map_err(|error| format!("the go-template is not correct: {error}"))?;
        Ok(Self(text.to_owned()))
    }

    /// The text for a document. Absent fields are `<no value>`, as in kubectl.
    ///
    /// # Errors
    /// A function cannot have a value of the document as an argument.
    pub(crate) fn render(&self, document: &Value) -> anyhow::Result<String> {
        let template = parsed(&self.0).map_err(|error| anyhow!("{error}"));
        let rendered = template?.execute_to_string(&go_value(document)).map_err(|error| anyhow!("{error}"));
        rendered.context("the go-template")
    }
}

fn parsed(text: &str) -> gotmpl::Result<Template> {
    Template::new("output").func("exists", exists).func("base64decode", base64decode).parse(text)
}

/// Checks that each block has its end: `gotmpl` 0.6 ignores what follows an `{{end}}` too many, and takes a missing one for
/// granted.
fn check_ends(text: &str) -> Result<(), String> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some((_, action)) = rest.split_once("{{") {
        let (action, after) = match action.trim_start_matches(['-', ' ']).starts_with("/*") {
            true => action.split_once("*/").unwrap_or((action, "")),
            false => action.split_at(length(action)),
        };
        rest = after;
        let word = action.trim_start_matches('-').trim_start();
        let word = word.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        match word {
            "if" | "range" | "with" | "define" | "block" => open.push(word),
            "end" if open.pop().is_none() => return Err("{{end}} closes nothing".to_owned()),
            _ => {}
        }
    }
    match open.last() {
        None => Ok(()),
        Some(word) => Err(format!("{{{{{word}}}}} has no {{{{end}}}}")),
    }
}

/// The length of an action, up to its closing braces. Braces in a text are part of the text.
fn length(action: &str) -> usize {
    let (mut quote, mut escaped, mut last) = (None, false, ' ');
    for (at, character) in action.char_indices() {
        match (quote, character) {
            _ if escaped => escaped = false,
            (Some('"' | '\''), '\\') => escaped = true,
            (Some(open), _) if open == character => quote = None,
            (None, '"' | '`' | '\'') => quote = Some(character),
            (None, '}') if last == '}' => return at + 1,
            _ => {}
        }
        last = character;
    }
    action.len()
}

fn go_value(value: &Value) -> GoValue {
    match value {
        Value::Null => GoValue::Nil,
        Value::Bool(flag) => GoValue::Bool(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => GoValue::Int(signed),
            (None, Some(unsigned)) => GoValue::Uint(unsigned),
            (None, None) => GoValue::Float(number.as_f64().unwrap_or_default()),
        },
        Value::String(text) => GoValue::String(text.as_str().into()),
        Value::Array(items) => GoValue::List(items.iter().map(go_value).collect()),
        Value::Object(fields) => GoValue::Map(std::sync::Arc::new(
            fields.iter().map(|(name, value)| (name.as_str().into(), go_value(value))).collect(),
        )),
    }
}

/// Whether a value has an entry: `exists .metadata "labels" "app"`.
fn exists(arguments: &[GoValue]) -> gotmpl::Result<GoValue> {
    let mut found = arguments.first();
    for index in arguments.iter().skip(1) {
        found = match (found, index) {
            (Some(GoValue::Map(fields)), GoValue::String(name)) => fields.get(name),
            (Some(GoValue::List(items)), GoValue::Int(number)) => {
                usize::try_from(*number).ok().and_then(|number| items.get(number))
            }
            _ => None,
        };
    }
    Ok(GoValue::Bool(found.is_some()))
}

fn base64decode(arguments: &[GoValue]) -> gotmpl::Result<GoValue> {
    let problem = |problem: String| TemplateError::Exec(format!("base64decode: {problem}"));
    let [GoValue::String(text)] = arguments else {
        return Err(problem("one text is expected".to_owned()));
    };
    let bytes = STANDARD.decode(text.as_bytes()).map_err(|error| problem(error.to_string()))?;
    let decoded = String::from_utf8(bytes).map_err(|error| problem(error.to_string()))?;
    Ok(GoValue::String(decoded.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_are_those_of_kubectl() {
        let list = json!({"kind": "List", "items": [
            {"metadata": {"name": "a", "labels": {"app": "web", "a/b": "c"}}, "spec": {"order": 10, "nets": ["x", "y"]}},
            {"metadata": {"name": "b"}, "spec": {"order": 20.5, "on": true, "big": 5_000_000_000_u64}, "data": "aGVsbG8="},
        ]});
        for (template, expected) in [
            ("{{.kind}}", "List"),
            ("{{range .items}}{{.metadata.name}};{{end}}", "a;b;"),
            (r#"{{range .items}}{{.metadata.name}}{{"\n"}}{{end}}"#, "a\nb\n"),
            ("{{range $i, $o := .items}}{{if $i}},{{end}}{{$o.spec.order}}{{end}}", "10,20.5"),
            ("{{(index .items 1).spec.big}}", "5000000000"),
            (r#"{{with index .items 0}}{{index .metadata.labels "a/b"}}{{end}}"#, "c"),
            (r#"{{range .items}}{{if exists . "data"}}{{.data | base64decode}}{{end}}{{end}}"#, "hello"),
            (r#"{{range .items}}{{exists . "spec" "nets" 1}} {{end}}"#, "true false "),
            ("{{range .items}}{{.absent}};{{end}}", "<no value>;<no value>;"),
            (r#"{{printf "%s-%d" .kind (len .items)}}"#, "List-2"),
            ("{{range .items}}{{- with .metadata.labels}}{{.app}}{{else}}none{{end}} {{end}}", "web none "),
            ("{{(index .items 0).spec.nets}}", "[x y]"),
            (r#"{{/* {{end}} */}}{{if "}}\"{{end}}"}}{{`{{end}}`}}{{end}}"#, "{{end}}"),
            ("{{(index .items 0).metadata.labels}}", "map[a/b:c app:web]"),
        ] {
            let parsed = GoTemplate::parse(template).unwrap_or_else(|error| panic!("{template}: {error}"));
            assert_eq!(parsed.render(&list).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for template in [
            "{{.a",
            "{{end}}",
            "a{{end}}b",
            "{{range .items}}x",
            "{{if .a}}{{else}}{{end}}{{- end -}}",
            "{{if}}{{end}}",
        ] {
            let error = GoTemplate::parse(template).unwrap_err();
            assert!(error.starts_with("the go-template is not correct: "), "{template}: {error}");
        }
        for (template, expected) in [
            ("{{index .items 9}}", "index"),
            ("{{base64decode .kind}}", "base64decode"),
            ("{{.kind.deeper}}", "deeper"),
            ("{{nosuch .kind}}", "nosuch"),
        ] {
            let error = GoTemplate::parse(template).unwrap().render(&json!({"kind": "?", "items": []}));
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains(expected), "{template}: {error}");
        }
    }
}
