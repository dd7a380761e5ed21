//! CustomResourceDefinitions from the types and tables of the program.
//!
//! A schema is strict about what it names: types, ranges, words. It keeps what it does not name (another version of
//! Calico, a field that Tortie has no type for): the agents report unknown fields, and policies with such close. It sets
//! no defaults, so that objects stay as they were written.

mod kinds;

use serde_json::{Map, Value, json};
use tortie_api::Kind;
use tortie_api::support::{self, Takes};

use crate::probe::Shape;

/// Calico's group in the Kubernetes API, for its own custom resources.
const CALICO_GROUP: &str = "crd.projectcalico.org";

/// The file and the text of every definition.
pub(crate) fn files() -> Vec<(String, String)> {
    kinds::all().into_iter().map(|definition| (definition.file_name(), definition.text())).collect()
}

/// The definition of one kind.
struct Definition {
    kind: Kind,
    /// What `kubectl explain` shows.
    description: &'static str,
    /// The schema of `spec`, or of `status` for a kind without `spec`.
    field: &'static str,
    schema: Value,
    /// Whether `status` is written separately, as in Calico's own definition.
    status: bool,
}

impl Definition {
    fn group(&self) -> &'static str {
        let group = self.kind.api_version().split('/').next().unwrap_or_default();
        if group == "projectcalico.org" { CALICO_GROUP } else { group }
    }

    fn file_name(&self) -> String {
        format!("{}_{}.yaml", self.group(), self.kind.plural())
    }

    fn text(&self) -> String {
        let head = "# Generated from the types in crates/api: UPDATE_CRDS=1 cargo test -p tortie-api --test integration crds::\n";
        format!("{head}{}", tortie_api::to_yaml(&self.value()))
    }

    fn value(&self) -> Value {
        let (kind, plural) = (self.kind.name(), self.kind.plural());
        let mut properties = json!({
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "status": open(json!({"type": "object"})),
        });
        properties[self.field] = self.schema.clone();
        let mut version = json!({
            "name": "v1",
            "served": true,
            "storage": true,
            "schema": {"openAPIV3Schema": {
                "description": self.description, "type": "object", "properties": properties,
            }},
        });
        if self.status {
            version["subresources"] = json!({"status": {}});
        }
        json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{}", self.group())},
            "spec": {
                "group": self.group(),
                "names": {
                    "kind": kind, "listKind": format!("{kind}List"), "plural": plural,
                    "singular": kind.to_lowercase(),
                },
                "scope": if self.kind.namespaced() { "Namespaced" } else { "Cluster" },
                "versions": [version],
            },
        })
    }
}

/// What a type does not tell: the schema of a field, by the end of its path.
type Known = [(&'static str, fn() -> Value)];

/// The fields that Calico requires, by the end of the path of their object.
type Required = [(&'static str, &'static [&'static str])];

/// The schema of a shape at a path.
fn of_shape(shape: &Shape, path: &str, known: &Known, required: &Required) -> Value {
    if let Some((_, schema)) = known.iter().find(|(end, _)| path.ends_with(end)) {
        return schema();
    }
    match shape {
        Shape::Bool => json!({"type": "boolean"}),
        Shape::Integer(least, most) => integer(*least, *most),
        Shape::Number => json!({"type": "number"}),
        Shape::Text => text(),
        Shape::Words(words) => json!({"type": "string", "enum": words}),
        Shape::List(item) => list(of_shape(item, &format!("{path}[]"), known, required)),
        Shape::Map(value) => {
            json!({"type": "object", "additionalProperties": of_shape(value, path, known, required)})
        }
        Shape::Struct(fields) => {
            let properties = fields.iter().map(|(name, shape)| {
                ((*name).to_owned(), of_shape(shape, &format!("{path}.{name}"), known, required))
            });
            let required = required.iter().find(|(end, _)| path.ends_with(end));
            object(properties.collect(), required.map_or(&[][..], |(_, fields)| fields))
        }
        Shape::Any => open(json!({})),
    }
}

/// The schema of the `spec` of a kind with a table of fields.
fn of_table(kind: Kind, known: &Known, required: &[&str]) -> Value {
    let fields = support::fields(kind).unwrap_or_default().iter().map(|field| {
        let known = known.iter().find(|(name, _)| *name == field.name);
        (field.name.to_owned(), known.map_or_else(|| of_takes(field.takes), |(_, schema)| schema()))
    });
    object(fields.collect(), required)
}

fn of_takes(takes: Takes) -> Value {
    let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
    match takes {
        Takes::Bool => json!({"type": "boolean"}),
        Takes::Integer(least, most) => integer(least, most),
        Takes::ZeroOr(_, most) => integer(0, most),
        Takes::Word(words) => json!({"type": "string", "enum": words}),
        Takes::AnyCase(words) => pattern(&format!("^(?i)({})?$", words.join("|"))),
        // Go's form, in any of its units.
        Takes::Duration => pattern(r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$"),
        // `Nothing` is a text that Tortie rejects and newer versions of Calico accept.
        Takes::Text | Takes::Pattern | Takes::Ipv4 | Takes::Ipv6 | Takes::Nothing => text(),
        Takes::Texts | Takes::Nets => list(text()),
        Takes::NumberOrText | Takes::Port => number_or_text(),
        Takes::Ports => list(number_or_text()),
        Takes::Interface => pattern("^[a-zA-Z0-9_.-]{0,15}$"),
        Takes::Rate => pattern("^[1-9][0-9]{0,3}/(second|minute|hour|day)$"),
        Takes::RouteTables => route_tables(),
        Takes::ListsOfRouteTables => list(route_tables()),
        Takes::Timeouts => {
            let fields = [("name".to_owned(), text()), ("timeout".to_owned(), of_takes(Takes::Duration))];
            list(object(fields.into_iter().collect(), &["name", "timeout"]))
        }
        Takes::Object => open(json!({"type": "object"})),
        Takes::Objects => list(open(json!({"type": "object"}))),
    }
}

fn route_tables() -> Value {
    let table = || integer(1, i64::from(u32::MAX));
    object([("min".to_owned(), table()), ("max".to_owned(), table())].into_iter().collect(), &["min", "max"])
}

fn integer(least: i64, most: i64) -> Value {
    let mut schema = json!({"type": "integer"});
    if most > i64::from(i32::MAX) {
        schema["format"] = json!("int64");
    }
    if least > i64::MIN {
        schema["minimum"] = json!(least);
    }
    if most < i64::MAX {
        schema["maximum"] = json!(most);
    }
    schema
}

fn text() -> Value {
    json!({"type": "string"})
}

fn number_or_text() -> Value {
    json!({"x-kubernetes-int-or-string": true})
}

fn list(item: Value) -> Value {
    json!({"type": "array", "items": item})
}

/// A mapping of known fields that keeps unknown ones.
fn object(properties: Map<String, Value>, required: &[&str]) -> Value {
    let mut schema = open(json!({"type": "object", "properties": properties}));
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// Lets the API server keep the fields that the schema does not name.
fn open(mut schema: Value) -> Value {
    schema["x-kubernetes-preserve-unknown-fields"] = json!(true);
    schema
}
