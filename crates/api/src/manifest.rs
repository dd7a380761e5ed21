//! Manifests: files of YAML or JSON documents, each an object. Everything that is wrong is said at once, with file,
//! line, object and field; where anything is wrong, nothing may be applied.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use serde_json::{Map, Value};

pub use crate::yaml::Lines;
use crate::yaml::{self, Document};
use crate::{FieldError, Key, Kind, Resource, defaults, strict};

/// An object of a manifest, valid.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Its key.
    pub key: Key,
    /// All of it, as it was written.
    pub value: Value,
    /// Its typed view.
    pub resource: Resource,
    /// Where it was written.
    pub origin: Origin,
    /// Where its fields were written.
    pub lines: Lines,
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file's name as the user gave it.
    pub file: String,
    /// The line; the first is 1.
    pub line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Something wrong in a manifest: `file:line: object: field: what is wrong`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub origin: Origin,
    /// The object, as far as it can be told.
    pub object: String,
    /// The field, as `spec.ingress[0].action`; empty for the object as a whole.
    pub field: String,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        for part in [&self.object, &self.field] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(&self.problem)
    }
}

/// A document of a kind that Tortie does not keep, as it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Foreign {
    /// All of it.
    pub value: Value,
    /// Where it was written.
    pub origin: Origin,
    /// Where its fields were written.
    pub lines: Lines,
}

/// Reads the documents of one file; those of `kind: List` hold several objects. A namespaced object without a namespace
/// belongs to `default`.
///
/// # Errors
/// Every problem of the file; a kind that is not known is one.
pub fn read(file: &str, text: &str) -> Result<Vec<Object>, Vec<Problem>> {
    let mut objects = Read::default();
    for document in documents(file, text)? {
        objects.add(file, document);
    }
    objects.finish().map(|(objects, _)| objects)
}

/// As [`read`], of files that hold more than Tortie keeps: documents of other kinds are given back beside the objects.
///
/// # Errors
/// Every problem of the file.
pub fn read_among_others(file: &str, text: &str) -> Result<(Vec<Object>, Vec<Foreign>), Vec<Problem>> {
    let mut read = Read::default();
    for document in documents(file, text)? {
        let text = |name: &str| document.value[name].as_str().filter(|text| !text.is_empty());
        match (text("apiVersion"), text("kind")) {
            (Some(api_version), Some(kind)) if is_foreign(api_version, kind) => read.foreign.push(Foreign {
                origin: Origin { file: file.to_owned(), line: document.lines.first },
                value: document.value,
                lines: document.lines,
            }),
            _ => read.add(file, document),
        }
    }
    read.finish()
}

/// Whether Tortie has nothing to do with a kind. One of a group of Tortie's kinds that only has another version is not
/// foreign: somebody means it.
fn is_foreign(api_version: &str, name: &str) -> bool {
    let group = |version: &str| version.split_once('/').map_or("", |(group, _)| group).to_owned();
    let meant = |kind: Kind| {
        group(kind.api_version()) == group(api_version) && kind.name().eq_ignore_ascii_case(name)
    };
    !Kind::all().any(meant)
}

fn documents(file: &str, text: &str) -> Result<impl Iterator<Item = Document>, Vec<Problem>> {
    let documents = yaml::read(text).map_err(|error| {
        let origin = Origin { file: file.to_owned(), line: error.line };
        vec![Problem { origin, object: String::new(), field: error.path, problem: error.problem }]
    })?;
    Ok(documents.into_iter().flat_map(Document::items))
}

#[derive(Default)]
struct Read {
    objects: Vec<Object>,
    seen: BTreeMap<Key, Origin>,
    foreign: Vec<Foreign>,
    problems: Vec<Problem>,
}

impl Read {
    fn add(&mut self, file: &str, document: Document) {
        match object(file, document) {
            Ok(object) => match self.seen.entry(object.key.clone()) {
                Entry::Vacant(first) => {
                    first.insert(object.origin.clone());
                    self.objects.push(object);
                }
                Entry::Occupied(earlier) => self.problems.push(Problem {
                    problem: format!("the object was given before, at {}", earlier.get()),
                    object: object.key.to_string(),
                    field: String::new(),
                    origin: object.origin,
                }),
            },
            Err(more) => self.problems.extend(more),
        }
    }

    fn finish(self) -> Result<(Vec<Object>, Vec<Foreign>), Vec<Problem>> {
        if self.problems.is_empty() { Ok((self.objects, self.foreign)) } else { Err(self.problems) }
    }
}

fn object(file: &str, mut document: Document) -> Result<Object, Vec<Problem>> {
    let origin = Origin { file: file.to_owned(), line: document.lines.first };
    drop_nulls(&mut document.value);
    let key = key(&mut document.value)
        .map_err(|error| vec![problem(file, &document, &describe(&document.value), error)])?;
    let mut errors = strict::check(&key, &document.value);
    let resource = match Resource::read(&key, &document.value) {
        Ok(resource) => Some(resource),
        Err(more) => {
            for error in more {
                if !errors.iter().any(|known| known.path == error.path) {
                    errors.push(error);
                }
            }
            None
        }
    };
    match resource {
        Some(resource) if errors.is_empty() => {
            defaults::fill(&key, &mut document.value, &resource);
            Ok(Object { key, value: document.value, resource, origin, lines: document.lines })
        }
        _ => {
            let name = key.to_string();
            Err(errors.into_iter().map(|error| problem(file, &document, &name, error)).collect())
        }
    }
}

fn problem(file: &str, document: &Document, object: &str, error: FieldError) -> Problem {
    let origin = Origin { file: file.to_owned(), line: document.lines.of(&error.path) };
    Problem { origin, object: object.to_owned(), field: error.path, problem: error.problem }
}

/// Takes out fields without a value, which are as good as absent. Not in maps of labels, where `app:` is a mistake.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            let maps = ["labels", "annotations", "matchLabels", "labelsToApply", "nodeSelector"];
            fields
                .iter_mut()
                .filter(|(name, _)| !maps.contains(&name.as_str()))
                .for_each(|(_, value)| drop_nulls(value));
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// The object's key; a missing namespace becomes `default`, in the value too.
fn key(value: &mut Value) -> Result<Key, FieldError> {
    let Value::Object(fields) = value else {
        return Err(FieldError::new("", "a manifest must be a mapping with apiVersion, kind and metadata"));
    };
    let text = |fields: &Map<String, Value>, name: &str| {
        let value =
            fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned);
        value.ok_or_else(|| FieldError::new(name, "is missing"))
    };
    let api_version = text(fields, "apiVersion")?;
    let name = text(fields, "kind")?;
    let Some(kind) = Kind::of(&api_version, &name) else {
        return Err(FieldError::new("kind", unknown_kind(&api_version, &name)));
    };
    let Some(Value::Object(metadata)) = fields.get_mut("metadata") else {
        return Err(FieldError::new("metadata", "is missing"));
    };
    let within = |error: FieldError| FieldError::new(format!("metadata.{}", error.path), error.problem);
    let name = text(metadata, "name").map_err(within)?;
    if !kind.namespaced() {
        return match metadata.get("namespace").and_then(Value::as_str) {
            None | Some("") => Ok(Key::global(kind, name)),
            Some(_) => {
                Err(FieldError::new("metadata.namespace", format!("a {kind} belongs to no namespace")))
            }
        };
    }
    let namespace = match metadata.get("namespace") {
        None => "default".to_owned(),
        Some(_) => text(metadata, "namespace").map_err(within)?,
    };
    metadata.insert("namespace".to_owned(), Value::String(namespace.clone()));
    Ok(Key::namespaced(kind, namespace, name))
}

fn unknown_kind(api_version: &str, name: &str) -> String {
    let others: Vec<_> = Kind::all().filter(|kind| kind.name().eq_ignore_ascii_case(name)).collect();
    match others.first() {
        Some(kind) => {
            format!("{api_version} {name} is not known; write {} {}", kind.api_version(), kind.name())
        }
        None => format!("{api_version} {name} is not known"),
    }
}

/// What can be told of an object whose key is wrong.
fn describe(value: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = value.get("kind").map(text).unwrap_or_default();
    let name = value.get("metadata").and_then(|metadata| metadata.get("name")).map(text).unwrap_or_default();
    format!("{kind} {name}").trim().to_owned()
}
