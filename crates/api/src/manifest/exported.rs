//! Exported objects: in lists, in API groups that Tortie knows by another name, and with metadata that only the
//! exporting cluster can use.

use serde_json::{Map, Value, json};

use super::Preconditions;
use super::meaning::{self, Meaning};
use crate::calico::from_calico_node;
use crate::support::set_protected;
use crate::yaml::{Document, Lines};
use crate::{FieldError, Kind};

/// The annotation in which Calico keeps the metadata of a custom resource of its old group
/// (`libcalico-go/lib/backend/k8s/resources`).
const CALICO_METADATA: &str = "projectcalico.org/metadata";
const CALICO_CRD: &str = "crd.projectcalico.org/v1";
const CALICO: &str = "projectcalico.org/v3";

/// Metadata that a cluster adds to its objects, without meaning elsewhere.
const OF_THE_CLUSTER: [&str; 9] = [
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "managedFields",
    "ownerReferences",
    "selfLink",
];
/// The annotation in which `apply` records what it was given, as kubectl does.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The objects of a list (`kind: List`, `PodList`, …), each as a separate document; any other document unchanged.
/// Items of a typed list may omit their kind.
pub(super) fn items(mut document: Document) -> Result<Vec<Document>, (Document, FieldError)> {
    let text = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let (api_version, kind) = (text(&document.value, "apiVersion"), text(&document.value, "kind"));
    let Some(of) = kind.strip_suffix("List") else { return Ok(vec![document]) };
    let is_known = of.is_empty() || Kind::all().any(|kind| kind.name() == of);
    if !is_known && document.value.get("items").is_none() {
        return Ok(vec![document]);
    }
    if of.is_empty() && api_version != "v1" {
        let problem = format!("{api_version:?} is not the version of a List; write v1");
        return Err((document, FieldError::new("apiVersion", problem)));
    }
    let items = match document.value.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items,
        Some(Value::Null) => Vec::new(),
        None => return Err((document, FieldError::new("items", "is missing"))),
        Some(_) => return Err((document, FieldError::new("items", "must be a list of objects"))),
    };
    if !of.is_empty() {
        // The version of the list applies to its kind, also if the items have their own.
        let value = json!({"apiVersion": api_version, "kind": of, "metadata": {}});
        let mut one = Document { value, ..Document::default() };
        let understood = translate(&mut one).and_then(|()| {
            let version = one.value["apiVersion"].as_str().unwrap_or_default();
            match meaning::meaning(version, of) {
                Meaning::Mistake(error) => Err(error),
                Meaning::Kept(_) | Meaning::Unrelated => Ok(()),
            }
        });
        if let Err(error) = understood {
            return Err((document, error));
        }
    }
    let mut all = Vec::new();
    for (index, mut value) in items.into_iter().enumerate() {
        let mut lines = document.lines.below(&format!("items[{index}]"), "");
        if let Some(fields) = value.as_object_mut().filter(|_| !of.is_empty()) {
            for (field, own) in [("apiVersion", api_version.as_str()), ("kind", of)] {
                if !fields.contains_key(field) {
                    fields.insert(field.to_owned(), json!(own));
                    lines.set(field, document.lines.of(field));
                }
            }
        }
        all.extend(self::items(Document { value, lines, ..Document::default() })?);
    }
    Ok(all)
}

/// Translates an object of a group that Tortie knows by another name.
pub(super) fn translate(document: &mut Document) -> Result<(), FieldError> {
    let Document { value, lines, is_of_definitions } = document;
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    match (api_version.as_str(), kind.as_str()) {
        ("extensions/v1beta1", "NetworkPolicy") => {
            value["apiVersion"] = json!(Kind::KubernetesNetworkPolicy.api_version());
        }
        (CALICO_CRD, kind) if Kind::of(CALICO, kind).is_some() => {
            unpack_metadata(value)?;
            *is_of_definitions = true;
            value["apiVersion"] = json!(CALICO);
        }
        // The name since Calico 3.32.
        (CALICO, "IPAMConfiguration") => value["kind"] = json!(Kind::IpamConfig.name()),
        (CALICO, "Node") => of_calico_node(value, lines),
        _ => {}
    }
    Ok(())
}

/// Restores the metadata that Calico keeps in an annotation. The annotation takes precedence, as in Calico.
fn unpack_metadata(value: &mut Value) -> Result<(), FieldError> {
    let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) else { return Ok(()) };
    // In that group, objects have other uids than in Calico's API.
    metadata.remove("uid");
    let packed = metadata.get_mut("annotations").and_then(Value::as_object_mut);
    let Some(packed) = packed.and_then(|annotations| annotations.remove(CALICO_METADATA)) else {
        return Ok(());
    };
    let read = packed.as_str().and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
    let Some(read) = read else {
        let field = format!("metadata.annotations.{CALICO_METADATA}");
        return Err(FieldError::new(field, "must be the metadata of the object, as JSON"));
    };
    for (field, packed) in read {
        match (metadata.get_mut(&field), packed) {
            (_, Value::Null) => {}
            (_, Value::String(text)) if text.is_empty() => {}
            (Some(Value::Object(known)), Value::Object(more)) => known.extend(more),
            (_, packed) => drop(metadata.insert(field, packed)),
        }
    }
    Ok(())
}

/// Converts a node of `calicoctl get nodes` to the Kubernetes node from which Calico derives it. Fields that no Calico node has stay, so that
/// validation rejects them.
fn of_calico_node(value: &mut Value, lines: &mut Lines) {
    for (field, annotation) in from_calico_node(value) {
        lines.alias(&field, &format!("metadata.annotations.{annotation}"));
    }
}

/// Removes what only the exporting cluster can use; returns what tells which stored object is meant.
pub fn take_metadata_of_the_cluster(value: &mut Value) -> Preconditions {
    let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) else {
        return Preconditions::default();
    };
    let text = |field: &str| metadata.get(field).and_then(Value::as_str).map(str::to_owned);
    let given = |text: &String| !text.is_empty();
    let preconditions = Preconditions {
        uid: text("uid").filter(given),
        resource_version: text("resourceVersion").filter(given),
    };
    metadata.retain(|field, _| !OF_THE_CLUSTER.contains(&field.as_str()));
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.remove(LAST_APPLIED);
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
    set_protected(value, false);
    preconditions
}
