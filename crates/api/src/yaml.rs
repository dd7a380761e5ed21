//! YAML to JSON values with line numbers. Duplicate keys are rejected, and so are documents that are built to exhaust
//! memory: depth and size are limited, and aliases count each time they are used.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};
use serde_json::{Map, Number, Value};

const MAX_DEPTH: usize = 64;
/// The number of values from aliases that any file may have, each with up to 64 bytes of text. A larger file may have one more for each
/// four bytes. Without aliases a document is as large as its file.
const MAX_ALIASED: usize = 4_096;
/// The bytes that the paths of fields may take, beside eight times the file. Where names of fields are very long, or deeply nested, paths
/// would take the square of the file's size.
const MAX_PATHS: usize = 64 << 10;
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
    /// The line of each field, by its path (`spec.ingress[0].action`). Where paths are very long, some are missing.
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
        path: String::new(),
        paths_left: text.len() * 8 + MAX_PATHS,
        aliased: 0,
        most_aliased: text.len() / 4 + MAX_ALIASED,
    };
    let mut documents = Vec::new();
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::DocumentStart(_) => {
                reader.lines.clear();
                reader.anchors.clear();
                let (event, span) = reader.next()?;
                let first = span.start.line();
                let value = reader.node(event, span, 0)?;
                if !value.is_null() {
                    let fields = std::mem::take(&mut reader.lines);
                    documents.push(Document { value, lines: Lines { first, fields } });
                }
            }
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            _ => return Err(reader.error(span, "the document does not begin with a value")),
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, Value>,
    lines: BTreeMap<String, usize>,
    /// The path of the value that is being read.
    path: String,
    /// The bytes that paths in `lines` may still take.
    paths_left: usize,
    /// The values that anchors and aliases have copied, and may copy.
    aliased: usize,
    most_aliased: usize,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Span), YamlError> {
        let path = &self.path;
        let ended =
            || YamlError { line: 1, path: path.clone(), problem: "the text ends in the middle".to_owned() };
        let wrong = |error: ScanError| YamlError {
            line: error.marker().line(),
            path: path.clone(),
            problem: format!("this is not YAML: {}", error.info()),
        };
        self.parser.next_event().ok_or_else(ended)?.map_err(wrong)
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Value, YamlError> {
        if depth > MAX_DEPTH {
            return Err(self.error(span, &format!("values are nested more than {MAX_DEPTH} deep")));
        }
        if !self.lines.contains_key(&self.path) {
            self.record(span);
        }
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain && tag.is_none();
                (anchor, if plain { plain_scalar(text) } else { Value::String(text.into_owned()) })
            }
            Event::SequenceStart(anchor, _) => (anchor, Value::Array(self.sequence(depth)?)),
            Event::MappingStart(anchor, _) => (anchor, Value::Object(self.mapping(depth)?)),
            Event::Alias(anchor) => {
                let Some(size) = self.anchors.get(&anchor).map(size) else {
                    return Err(self.error(span, "the alias names an anchor that is not there"));
                };
                self.count(size, span)?;
                (0, self.anchors.get(&anchor).cloned().unwrap_or_default())
            }
            _ => return Err(self.error(span, "a value is missing")),
        };
        if anchor > 0 {
            self.count(size(&value), span)?;
            self.anchors.insert(anchor, value.clone());
        }
        Ok(value)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Value>, YamlError> {
        let mut items = Vec::new();
        let length = self.path.len();
        loop {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(items);
            }
            let _ = write!(self.path, "[{}]", items.len());
            let item = self.node(event, span, depth + 1)?;
            self.path.truncate(length);
            items.push(item);
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<Map<String, Value>, YamlError> {
        let mut fields = Map::new();
        let mut merged = None;
        let length = self.path.len();
        loop {
            let (event, span) = self.next()?;
            let (name, merges) = match event {
                Event::MappingEnd => break,
                Event::Scalar(name, style, ..) => {
                    let merges = name == MERGE && style == ScalarStyle::Plain;
                    (name.into_owned(), merges)
                }
                _ => return Err(self.error(span, "a field's name must be plain text")),
            };
            self.enter(&name);
            if fields.contains_key(&name) || (merges && merged.is_some()) {
                return Err(self.error(span, "the field is given twice"));
            }
            self.record(span);
            let (event, value_span) = self.next()?;
            let value = self.node(event, value_span, depth + 1)?;
            self.path.truncate(length);
            match merges {
                true => merged = Some((value, span)),
                false => drop(fields.insert(name, value)),
            }
        }
        if let Some((value, span)) = merged {
            self.merge(&mut fields, value, span)?;
        }
        Ok(fields)
    }

    /// Merges the fields of other mappings (the merge key of YAML 1.1). The mapping's own fields take precedence,
    /// then those of earlier mappings.
    fn merge(&mut self, fields: &mut Map<String, Value>, value: Value, span: Span) -> Result<(), YamlError> {
        let sources = match value {
            Value::Array(sources) => sources,
            source => vec![source],
        };
        let length = self.path.len();
        for source in sources {
            let Value::Object(source) = source else {
                return Err(self.error(span, "<< needs a mapping, or a list of mappings"));
            };
            for (name, value) in source {
                if !fields.contains_key(&name) {
                    self.enter(&name);
                    self.record(span);
                    self.path.truncate(length);
                    fields.insert(name, value);
                }
            }
        }
        Ok(())
    }

    /// Goes on to a field of the value that is being read.
    fn enter(&mut self, name: &str) {
        if !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
    }

    /// Records the line of the value that is being read. If there is no room, its line is that of what contains it.
    fn record(&mut self, span: Span) {
        if let Some(left) = self.paths_left.checked_sub(self.path.len()) {
            self.paths_left = left;
            self.lines.insert(self.path.clone(), span.start.line());
        }
    }

    fn count(&mut self, nodes: usize, span: Span) -> Result<(), YamlError> {
        self.aliased += nodes;
        if self.aliased > self.most_aliased {
            let most = self.most_aliased;
            return Err(
                self.error(span, &format!("there are more than {most} values behind anchors and aliases"))
            );
        }
        Ok(())
    }

    fn error(&self, span: Span, problem: &str) -> YamlError {
        YamlError { line: span.start.line(), path: self.path.clone(), problem: problem.to_owned() }
    }
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
