//! YAML to JSON values with line numbers. Duplicate keys are rejected, and so are documents that are built to exhaust
//! memory: depth and size are limited, and aliases count each time they are used.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};
use serde_json::{Map, Number, Value};

const MAX_DEPTH: usize = 64;
/// The maximum number of values from aliases, each with up to 64 bytes of text. Without aliases a document is as
/// large as its file.
const MAX_ALIASED: usize = 1_000_000;
/// The key that merges the fields of other mappings.
const MERGE: &str = "<<";

/// One document of a stream.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) value: Value,
    pub(crate) lines: Lines,
}

/// The lines of a document's fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lines {
    /// The line on which the document's content begins; the first is 1.
    pub first: usize,
    /// The line of each field, by its path (`spec.ingress[0].action`).
    fields: BTreeMap<String, usize>,
}

/// A problem and its position.
#[derive(Debug)]
pub(crate) struct YamlError {
    pub(crate) line: usize,
    /// The path of the field, if known.
    pub(crate) path: String,
    pub(crate) problem: String,
}

impl Lines {
    /// The line of a field, or of the nearest enclosing one.
    #[must_use]
    pub fn of(&self, path: &str) -> usize {
        let mut path = path;
        loop {
            if let Some(line) = self.fields.get(path) {
                return *line;
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return self.first,
            }
        }
    }

    /// The lines below one field, as those of a separate document in which that field is called `name`.
    pub(crate) fn below(&self, path: &str, name: &str) -> Self {
        let inner = self.fields.range(path.to_owned()..).take_while(|(field, _)| field.starts_with(path));
        let fields = inner.filter_map(|(field, line)| {
            let rest = &field[path.len()..];
            let rest = if name.is_empty() { rest.trim_start_matches('.') } else { rest };
            (rest.is_empty() || name.is_empty() || rest.starts_with(['.', '[']))
                .then(|| (format!("{name}{rest}"), *line))
        });
        Self { first: self.of(path), fields: fields.collect() }
    }

    /// Adds the lines of another document's fields.
    pub(crate) fn extend(&mut self, other: Self) {
        self.fields.extend(other.fields);
    }

    /// Records the line of a field.
    pub(crate) fn set(&mut self, path: &str, line: usize) {
        self.fields.insert(path.to_owned(), line);
    }

    /// Records that the value at `path` was written as the field `written`.
    pub(crate) fn alias(&mut self, written: &str, path: &str) {
        self.set(path, self.of(written));
    }
}

/// Parses every document of a stream, without empty ones.
pub(crate) fn read(text: &str) -> Result<Vec<Document>, YamlError> {
    let mut reader = Reader {
        parser: Parser::new_from_str(text),
        anchors: HashMap::new(),
        lines: BTreeMap::new(),
        aliased: 0,
    };
    let mut documents = Vec::new();
    loop {
        let (event, span) = reader.next("")?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::DocumentStart(_) => {
                reader.lines.clear();
                reader.anchors.clear();
                let (event, span) = reader.next("")?;
                let first = span.start.line();
                let value = reader.node(event, span, "", 0)?;
                if !value.is_null() {
                    let fields = std::mem::take(&mut reader.lines);
                    documents.push(Document { value, lines: Lines { first, fields } });
                }
            }
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            _ => return Err(error_at(span, "", "the document does not begin with a value")),
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, Value>,
    lines: BTreeMap<String, usize>,
    aliased: usize,
}

impl<'a> Reader<'a> {
    fn next(&mut self, path: &str) -> Result<(Event<'a>, Span), YamlError> {
        let ended = || YamlError {
            line: 1,
            path: path.to_owned(),
            problem: "the text ends in the middle".to_owned(),
        };
        let wrong = |error: ScanError| YamlError {
            line: error.marker().line(),
            path: path.to_owned(),
            problem: format!("this is not YAML: {}", error.info()),
        };
        self.parser.next_event().ok_or_else(ended)?.map_err(wrong)
    }

    fn node(&mut self, event: Event<'a>, span: Span, path: &str, depth: usize) -> Result<Value, YamlError> {
        if depth > MAX_DEPTH {
            return Err(error_at(span, path, &format!("values are nested more than {MAX_DEPTH} deep")));
        }
        self.lines.entry(path.to_owned()).or_insert(span.start.line());
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain && tag.is_none();
                (anchor, if plain { plain_scalar(text) } else { Value::String(text.into_owned()) })
            }
            Event::SequenceStart(anchor, _) => (anchor, Value::Array(self.sequence(path, depth)?)),
            Event::MappingStart(anchor, _) => (anchor, Value::Object(self.mapping(path, depth)?)),
            Event::Alias(anchor) => {
                let Some(value) = self.anchors.get(&anchor).cloned() else {
                    return Err(error_at(span, path, "the alias names an anchor that is not there"));
                };
                self.count(size(&value), span, path)?;
                (0, value)
            }
            _ => return Err(error_at(span, path, "a value is missing")),
        };
        if anchor > 0 {
            self.anchors.insert(anchor, value.clone());
        }
        Ok(value)
    }

    fn sequence(&mut self, path: &str, depth: usize) -> Result<Vec<Value>, YamlError> {
        let mut items = Vec::new();
        loop {
            let (event, span) = self.next(path)?;
            if event == Event::SequenceEnd {
                return Ok(items);
            }
            let item = self.node(event, span, &format!("{path}[{}]", items.len()), depth + 1)?;
            items.push(item);
        }
    }

    fn mapping(&mut self, path: &str, depth: usize) -> Result<Map<String, Value>, YamlError> {
        let mut fields = Map::new();
        let mut merged = None;
        loop {
            let (event, span) = self.next(path)?;
            let (name, merges) = match event {
                Event::MappingEnd => break,
                Event::Scalar(name, style, ..) => {
                    let merges = name == MERGE && style == ScalarStyle::Plain;
                    (name.into_owned(), merges)
                }
                _ => return Err(error_at(span, path, "a field's name must be plain text")),
            };
            let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            if fields.contains_key(&name) || (merges && merged.is_some()) {
                return Err(error_at(span, &field, "the field is given twice"));
            }
            self.lines.insert(field.clone(), span.start.line());
            let (event, value_span) = self.next(&field)?;
            let value = self.node(event, value_span, &field, depth + 1)?;
            match merges {
                true => merged = Some((value, span)),
                false => drop(fields.insert(name, value)),
            }
        }
        if let Some((value, span)) = merged {
            self.merge(&mut fields, value, span, path)?;
        }
        Ok(fields)
    }

    /// Merges the fields of other mappings (the merge key of YAML 1.1). The mapping's own fields take precedence,
    /// then those of earlier mappings.
    fn merge(
        &mut self,
        fields: &mut Map<String, Value>,
        value: Value,
        span: Span,
        path: &str,
    ) -> Result<(), YamlError> {
        let sources = match value {
            Value::Array(sources) => sources,
            source => vec![source],
        };
        for source in sources {
            let Value::Object(source) = source else {
                return Err(error_at(span, path, "<< needs a mapping, or a list of mappings"));
            };
            for (name, value) in source {
                if !fields.contains_key(&name) {
                    let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    self.lines.insert(field, span.start.line());
                    fields.insert(name, value);
                }
            }
        }
        Ok(())
    }

    fn count(&mut self, nodes: usize, span: Span, path: &str) -> Result<(), YamlError> {
        self.aliased += nodes;
        if self.aliased > MAX_ALIASED {
            return Err(error_at(
                span,
                path,
                &format!("there are more than {MAX_ALIASED} values behind aliases"),
            ));
        }
        Ok(())
    }
}

fn error_at(span: Span, path: &str, problem: &str) -> YamlError {
    YamlError { line: span.start.line(), path: path.to_owned(), problem: problem.to_owned() }
}

fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() / 64 + size(value)).sum(),
        Value::String(text) => text.len() / 64,
        _ => 0,
    }
}

/// The core schema of YAML 1.2 (section 10.3.2), which JSON needs; `yes` and `no` are text.
fn plain_scalar(text: Cow<'_, str>) -> Value {
    match text.as_ref() {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(&text);
    if digits.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        if let Ok(number) = text.parse::<u64>() {
            return Value::Number(number.into());
        }
        if let Ok(number) = text.parse::<i64>() {
            return Value::Number(number.into());
        }
        let float = text.parse::<f64>().ok().and_then(Number::from_f64);
        if let Some(number) = float {
            return Value::Number(number);
        }
    }
    Value::String(text.into_owned())
}
