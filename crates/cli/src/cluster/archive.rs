//! The archive of `tortie cluster diags`.

use std::io;
use std::path::Path;

use serde_json::{Value, json};
use tortie_api::Kind;
use tortie_api::manifest::LAST_APPLIED;

use super::{Content, Summary};
use crate::archive::Archive;

/// The folder in the archive.
const FOLDER: &str = "tortie-diags";
/// The fields of containers that a network depends on. Others, such as `env`, `args` and probes, may have passwords.
const OF_CONTAINERS: [&str; 4] = ["name", "image", "ports", "resources"];
/// Fields that may have passwords, wherever they are in a workload: attributes of volumes, messages of containers.
const DROPPED: [&str; 3] = ["volumes", "message", "volumeClaimTemplates"];
/// The lists of containers.
const CONTAINERS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];
/// Whose annotations matter.
const OWNERS: [&str; 4] = ["projectcalico.org/", "tortie.io/", "kubernetes.io/", "k8s.v1.cni.cncf.io/"];

/// Writes the archive.
pub(super) fn write(path: &Path, content: &Content, summary: &Summary) -> io::Result<()> {
    let mut archive = Archive::create(path, FOLDER)?;
    archive.add_json("info.json", &serde_json::to_value(summary)?)?;
    for (kind, items) in content.objects.iter().filter(|(_, items)| !items.is_empty()) {
        let items: Vec<Value> = items.iter().map(|stored| shareable(*kind, stored.value.clone())).collect();
        let name = format!("objects/{}.json", kind.plural());
        archive.add_json(&name, &json!({"apiVersion": "v1", "kind": "List", "items": items}))?;
    }
    archive.finish()
}

/// The object without what others should not see.
fn shareable(kind: Kind, mut value: Value) -> Value {
    if let Some(annotations) = value.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) {
        // Others may have anything, and the record of `apply` has everything that is removed here.
        annotations.retain(|name, _| name != LAST_APPLIED && OWNERS.iter().any(|owner| name.contains(owner)));
    }
    if kind == Kind::Pod || kind.is_workload() {
        keep_what_matters(&mut value);
    }
    value
}

/// Removes what may have passwords, wherever it is in the object.
fn keep_what_matters(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for list in CONTAINERS {
                for container in fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                    if let Some(container) = container.as_object_mut() {
                        container.retain(|field, _| OF_CONTAINERS.contains(&field.as_str()));
                    }
                }
            }
            fields.retain(|field, _| !DROPPED.contains(&field.as_str()));
            fields.values_mut().for_each(keep_what_matters);
        }
        Value::Array(items) => items.iter_mut().for_each(keep_what_matters),
        _ => {}
    }
}
