//! Manifests: files of YAML or JSON documents, each of which is an object. All problems are reported at once, with
//! file, line, object and field. If there are any, nothing may be applied.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use serde_json::{Map, Value};

pub use crate::yaml::Lines;
use crate::yaml::{self, Document, YamlError};
use crate::{FieldError, Key, Resource, defaults, spelling, strict};

mod converted;
mod differing;
mod endpoints;
mod exported;
mod foreign;
mod kustomization;
mod meaning;
mod offline;
mod unread;

pub use converted::{ConvertedFile, PolicyForm, convert};
pub use differing::Differing;
pub use endpoints::Skipped;
pub use exported::{LAST_APPLIED, take_metadata_of_the_cluster};
use meaning::Meaning;
pub use offline::{Offline, Settled, first_pod, second_pod};
pub use unread::{CouldChange, Unread};

/// The bytes of the longest description of an object: its kind, its namespace (63) and its name (253), with some room.
const LONGEST_DESCRIPTION: usize = 400;

/// A valid object of a manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Its key.
    pub key: Key,
    /// The complete object as written, without what only the exporting cluster can use. IPAMConfigs have their stored
    /// form.
    pub value: Value,
    /// Its typed view.
    pub resource: Resource,
    /// Which stored object the manifest means, if it says so.
    pub preconditions: Preconditions,
    /// Where it is in the file.
    pub origin: Origin,
    /// The lines of its fields.
    pub lines: Lines,
}

/// What a manifest says about the stored object that it changes. Exported manifests have both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preconditions {
    /// `metadata.uid`.
    pub uid: Option<String>,
    /// `metadata.resourceVersion`.
    pub resource_version: Option<String>,
}

/// A position in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file's name as given by the user.
    pub file: String,
    /// The line; the first is 1.
    pub line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A problem in a manifest: `file:line: object: field: problem`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The position.
    pub origin: Origin,
    /// The object, as far as it is known.
    pub object: String,
    /// The field, as `spec.ingress[0].action`; empty for the object as a whole.
    pub field: String,
    /// The problem and the remedy.
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

/// Reads the documents of one file; a list contains several objects. A namespaced object without a namespace belongs
/// to `default`. Removes what only the exporting cluster can use.
///
/// # Errors
/// Every problem of the file, including unknown kinds.
pub fn read(file: &str, text: &str) -> Result<Vec<Object>, Vec<Problem>> {
    let mut problems = Vec::new();
    let documents = documents(file, text, &mut problems);
    of_documents(file, documents, problems)
}

/// Reads the documents of one file as [`read`] does, but leaves out objects of kinds that Tortie does not keep and no
/// verdict depends on. Objects without a namespace belong to this one, if it is given, and none may belong to another one.
///
/// # Errors
/// Every problem of the file.
pub fn read_kept(
    file: &str,
    text: &str,
    namespace: Option<&str>,
) -> Result<(Vec<Object>, Vec<Skipped>), Vec<Problem>> {
    let (mut skipped, mut problems) = (Vec::new(), Vec::new());
    let mut documents = documents(file, text, &mut problems);
    documents.retain(|document| {
        let is_left_out = meaning::is_left_out(&document.value);
        if is_left_out {
            skipped.push(Skipped::new(file, document));
        }
        !is_left_out
    });
    if let Some(namespace) = namespace {
        documents.retain_mut(|document| match give_namespace(&mut document.value, namespace) {
            Ok(()) => true,
            Err(error) => {
                problems.push(problem(file, document, &describe(&document.value), error));
                false
            }
        });
    }
    Ok((of_documents(file, documents, problems)?, skipped))
}

fn of_documents(
    file: &str,
    documents: Vec<Document>,
    mut problems: Vec<Problem>,
) -> Result<Vec<Object>, Vec<Problem>> {
    let mut objects = Vec::new();
    let mut seen = Seen::default();
    for document in documents {
        match object(file, document) {
            Ok(object) => match seen.twice(&object) {
                None => objects.push(object),
                Some(problem) => problems.push(problem),
            },
            Err(more) => problems.extend(more),
        }
    }
    if problems.is_empty() { Ok(objects) } else { Err(problems) }
}

/// The documents of a file, including the items of lists, translated to the API groups that Tortie knows.
fn documents(file: &str, text: &str, problems: &mut Vec<Problem>) -> Vec<Document> {
    let read = match yaml::read(text) {
        Ok(read) => read,
        Err(error) => {
            problems.push(not_yaml(file, text, error));
            return Vec::new();
        }
    };
    let mut understood = Vec::new();
    for document in read.into_iter().flat_map(understand) {
        match document {
            Ok(document) => understood.push(document),
            Err((document, error)) => {
                problems.push(problem(file, &document, &describe(&document.value), error));
            }
        }
    }
    understood
}

/// The problem of a text that is no YAML.
fn not_yaml(file: &str, text: &str, error: YamlError) -> Problem {
    let origin = Origin { file: file.to_owned(), line: error.line };
    // Its braces are flow mappings to YAML, or nothing.
    let hint = match text.contains("{{") {
        true => {
            "; if this is a template of Helm or Go, render it first, for instance by helm template, and give the output as -f -"
        }
        false => "",
    };
    Problem { origin, object: String::new(), field: error.path, problem: error.problem + hint }
}

/// A document, or the items of a list, in API groups that Tortie knows; each with the reason if it cannot be.
fn understand(document: Document) -> Vec<Result<Document, (Document, FieldError)>> {
    let items = match exported::items(document) {
        Ok(items) => items,
        Err(failed) => return vec![Err(failed)],
    };
    let translated = |mut document: Document| match exported::translate(&mut document) {
        Ok(()) => Ok(document),
        Err(error) => Err((document, error)),
    };
    items.into_iter().map(translated).collect()
}

/// The first position of each object.
#[derive(Default)]
struct Seen(BTreeMap<Key, Origin>);

impl Seen {
    /// The problem, if the object was given before.
    fn twice(&mut self, object: &Object) -> Option<Problem> {
        match self.0.entry(object.key.clone()) {
            Entry::Vacant(first) => {
                first.insert(object.origin.clone());
                None
            }
            Entry::Occupied(earlier) => Some(Problem {
                problem: format!("the object was given before, at {}", earlier.get()),
                object: shortened(&object.key.to_string()),
                field: String::new(),
                origin: object.origin.clone(),
            }),
        }
    }
}

fn object(file: &str, document: Document) -> Result<Object, Vec<Problem>> {
    let Outcome { object, problems, .. } = outcome(file, document);
    match object {
        Some(object) if problems.is_empty() => Ok(object),
        _ => Err(problems),
    }
}

/// What became of a document: an object, problems, or both.
struct Outcome {
    /// The object, if its typed view can be read, whatever else is wrong with it.
    object: Option<Object>,
    /// A policy that cannot be read, and closes what it selects.
    closed: Option<ClosedPolicy>,
    problems: Vec<Problem>,
}

/// A policy that cannot be read completely. It acts as policy decision 18 says of a stored one.
#[derive(Debug, Clone, PartialEq)]
pub struct ClosedPolicy {
    /// Its key.
    pub key: Key,
    /// The object as written.
    pub value: Value,
    /// Where it is in the file.
    pub origin: Origin,
    /// The lines of its fields.
    pub lines: Lines,
}

fn outcome(file: &str, mut document: Document) -> Outcome {
    let origin = Origin { file: file.to_owned(), line: document.lines.first };
    drop_nulls(&mut document.value);
    let key = match key(&mut document.value) {
        Ok(key) => key,
        Err(error) => {
            let problems = vec![problem(file, &document, &describe(&document.value), error)];
            return Outcome { object: None, closed: None, problems };
        }
    };
    let mut errors = strict::check(&key, &document.value);
    if !document.is_of_definitions {
        errors.extend(spelling::check(key.kind, &document.value));
    }
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
    let name = key.to_string();
    let problems = errors.into_iter().map(|error| problem(file, &document, &name, error)).collect();
    let Document { mut value, lines, .. } = document;
    let Some(resource) = resource else {
        let is_policy = key.kind.is_policy();
        let closed = is_policy.then_some(ClosedPolicy { key, value, origin, lines });
        return Outcome { object: None, closed, problems };
    };
    defaults::fill(&key, &mut value, &resource);
    if let Resource::IpamConfig(config) = &resource {
        value = config.stored();
    }
    let preconditions = exported::take_metadata_of_the_cluster(&mut value);
    let object = Object { key, value, resource, preconditions, origin, lines };
    Outcome { object: Some(object), closed: None, problems }
}

fn problem(file: &str, document: &Document, object: &str, error: FieldError) -> Problem {
    let origin = Origin { file: file.to_owned(), line: document.lines.of(&error.path) };
    Problem { origin, object: shortened(object), field: error.path, problem: error.problem }
}

/// The description of an object, for each of its problems. No valid one is longer.
fn shortened(object: &str) -> String {
    match object.split_at_checked(object.floor_char_boundary(LONGEST_DESCRIPTION)) {
        Some((begin, rest)) if !rest.is_empty() => format!("{begin}…"),
        _ => object.to_owned(),
    }
}

/// Removes fields without a value, which count as absent. In maps of labels they stay, because `app:` is a mistake
/// there.
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

/// The object's key. A missing namespace becomes `default`, in the value too.
fn key(value: &mut Value) -> Result<Key, FieldError> {
    let Value::Object(fields) = value else {
        return Err(FieldError::new("", "a manifest must be a mapping with apiVersion, kind and metadata"));
    };
    let text = |fields: &Map<String, Value>, name: &str| match fields.get(name) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
        None | Some(Value::String(_)) => Err(FieldError::new(name, "is missing")),
        Some(_) => Err(FieldError::new(name, "must be text")),
    };
    let api_version = text(fields, "apiVersion")?;
    let name = text(fields, "kind")?;
    let kind = match meaning::meaning(&api_version, &name) {
        Meaning::Kept(kind) => kind,
        Meaning::Mistake(error) => return Err(error),
        Meaning::Unrelated => return Err(meaning::mistake(&api_version, "", &name)),
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

/// Puts an object into a namespace, if its kind has namespaces.
fn give_namespace(value: &mut Value, namespace: &str) -> Result<(), FieldError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let Meaning::Kept(kind) = meaning::meaning(&text(&value["apiVersion"]), &text(&value["kind"])) else {
        return Ok(());
    };
    let metadata = value.get_mut("metadata").and_then(Value::as_object_mut).filter(|_| kind.namespaced());
    let Some(metadata) = metadata else { return Ok(()) };
    match metadata.get("namespace") {
        None | Some(Value::Null) => {
            metadata.insert("namespace".to_owned(), Value::String(namespace.to_owned()));
        }
        Some(Value::String(given)) if given.is_empty() => {
            metadata.insert("namespace".to_owned(), Value::String(namespace.to_owned()));
        }
        Some(Value::String(given)) if given == namespace => {}
        // It is refused later.
        Some(given) if !given.is_string() => {}
        Some(given) => {
            return Err(FieldError::new(
                "metadata.namespace",
                format!("is {given}, but namespace {namespace} is wanted"),
            ));
        }
    }
    Ok(())
}

/// A description of an object whose key is invalid.
fn describe(value: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = value.get("kind").map(text).unwrap_or_default();
    let name = value.get("metadata").and_then(|metadata| metadata.get("name")).map(text).unwrap_or_default();
    format!("{kind} {name}").trim().to_owned()
}
