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
#[derive(Debug, Default)]
pub(crate) struct Document {
    pub(crate) value: Value,
    pub(crate) lines: Lines,
    /// The object was written for Calico's definitions of the group `crd.projectcalico.org/v1`.
    pub(crate) is_of_definitions: bool,
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

    /// Moves all lines down.
    fn shift(&mut self, by: usize) {
        self.first += by;
        self.fields.values_mut().for_each(|line| *line += by);
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
                    documents.push(Document {
                        value,
                        lines: Lines { first, fields },
                        is_of_definitions: false,
                    });
                }
            }
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            _ => return Err(reader.error(span, "the document does not begin with a value")),
        }
    }
}

/// Parses each document of a stream on its own, so that a document that is no YAML leaves the others. A line that begins with `---`
/// begins a document, whatever comes before it (YAML 1.2, 9.1.2).
pub(crate) fn read_each(text: &str) -> Vec<Result<Vec<Document>, YamlError>> {
    let is_begin = |line: &str| {
        line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
    };
    let (mut parts, mut at, mut lines) = (vec![(0, 0)], 0, 0);
    for line in text.split_inclusive('\n') {
        if is_begin(line) && at > 0 {
            parts.push((at, lines));
        }
        (at, lines) = (at + line.len(), lines + 1);
    }
    let ends = parts.iter().skip(1).map(|(begin, _)| *begin).chain([text.len()]);
    let each =
        parts.iter().zip(ends).filter_map(|((begin, above), end)| Some((text.get(*begin..end)?, *above)));
    each.map(|(part, above)| match read(part) {
        Ok(mut documents) => {
            documents.iter_mut().for_each(|document| document.lines.shift(above));
            Ok(documents)
        }
        Err(error) => Err(YamlError { line: error.line + above, ..error }),
    })
    .collect()
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
                Event::Scalar(..) | Event::Alias(_) => self.field_name(event, span, depth)?,
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

    /// Reads the name of a field, and returns whether it is the merge key.
    fn field_name(
        &mut self,
        event: Event<'a>,
        span: Span,
        depth: usize,
    ) -> Result<(String, bool), YamlError> {
        let merges = matches!(&event, Event::Scalar(name, ScalarStyle::Plain, ..) if name == MERGE);
        let name = field_name(self.node(event, span, depth)?);
        let name = name.ok_or_else(|| self.error(span, "a field's name must be text; put it in quotes"))?;
        Ok((name, merges))
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

/// The value of plain text, by the rules of YAML 1.1 as kubectl and calicoctl apply them (`go.yaml.in/yaml/v2`, `resolve.go`): `yes` and
/// `on` are true, and `0100` is 64. Whatever else it looks like, text that is neither is text.
fn plain_scalar(text: Cow<'_, str>) -> Value {
    match text.as_ref() {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" | "true" | "True" | "TRUE" => {
            return Value::Bool(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" | "false" | "False" | "FALSE" => {
            return Value::Bool(false);
        }
        _ => {}
    }
    number(&text).map_or_else(|| Value::String(text.into_owned()), Value::Number)
}

/// Decimal, hexadecimal (`0x`), octal (`0` or `0o`) and binary (`0b`) integers, and decimal fractions. Underscores do not count.
fn number(text: &str) -> Option<Number> {
    if !text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) {
        return None;
    }
    // A fraction without a digit before its point keeps underscores, and is text then.
    let plain = if text.starts_with('.') { text.to_owned() } else { text.replace('_', "") };
    let (is_negative, digits) = match plain.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, plain.strip_prefix('+').unwrap_or(&plain)),
    };
    integer(digits).and_then(|number| signed(number, is_negative)).or_else(|| fraction(&plain, digits))
}

fn integer(digits: &str) -> Option<u64> {
    let with_prefix = |radix, prefixes: [&str; 2]| {
        prefixes.iter().find_map(|prefix| Some((radix, digits.strip_prefix(prefix)?)))
    };
    let (radix, digits) = with_prefix(16, ["0x", "0X"])
        .or_else(|| with_prefix(8, ["0o", "0O"]))
        .or_else(|| with_prefix(2, ["0b", "0B"]))
        .or_else(|| Some((8, digits.strip_prefix('0').filter(|rest| !rest.is_empty())?)))
        .unwrap_or((10, digits));
    // The standard library accepts another sign here.
    let is_digit = |digit: char| digit.is_digit(radix);
    digits.chars().all(is_digit).then(|| u64::from_str_radix(digits, radix).ok())?
}

fn signed(number: u64, is_negative: bool) -> Option<Number> {
    if !is_negative {
        return Some(number.into());
    }
    0i64.checked_sub_unsigned(number).map(Number::from)
}

/// A decimal fraction. One without a part behind its point is an integer in JSON, as Go writes it.
fn fraction(plain: &str, digits: &str) -> Option<Number> {
    let has_digits_only = digits.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte));
    let begins = digits.strip_prefix('.').unwrap_or(digits).starts_with(|first: char| first.is_ascii_digit());
    if !has_digits_only || !begins {
        return None;
    }
    let number: f64 = plain.parse().ok()?;
    let is_whole = number.fract() == 0.0 && number.abs() < 9e15;
    // A whole number below nine quadrillions is exact in both types.
    let whole = is_whole.then(|| Number::from(number as i64));
    whole.or_else(|| Number::from_f64(number))
}

/// The name of a field. Plain text that is a number or a truth value counts as its text in JSON, as in Go.
fn field_name(value: Value) -> Option<String> {
    match value {
        Value::String(name) => Some(name),
        Value::Bool(value) => Some(value.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}
