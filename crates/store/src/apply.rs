//! Applies manifests: what a user wrote becomes a stored object.

use serde_json::{Map, Value, json};
use tortie_api::manifest::Object;
use tortie_api::{Kind, Position};

use crate::{Store, StoreError};

/// The result of applying an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// It is new.
    Created(Position),
    /// It existed and has changed.
    Configured(Position),
    /// It existed unchanged.
    Unchanged(Position),
}

impl Applied {
    /// The position of the object's last write.
    #[must_use]
    pub fn position(self) -> Position {
        match self {
            Self::Created(position) | Self::Configured(position) | Self::Unchanged(position) => position,
        }
    }
}

/// Stores an object of a manifest that must not exist.
///
/// # Errors
/// It exists, or the store failed.
pub async fn create(store: &dyn Store, object: &Object) -> Result<Applied, StoreError> {
    let mut value = object.value.clone();
    identify(&mut value);
    store.create(&object.key, value).await.map(|stored| Applied::Created(stored.position))
}

/// Replaces the stored object, if it exists. Keeps what the cluster added to it: status, a pod's node, identity.
pub(crate) async fn replace(store: &(impl Store + ?Sized), object: &Object) -> Result<Applied, StoreError> {
    loop {
        let result = match store.get(&object.key).await? {
            None => {
                let mut value = object.value.clone();
                identify(&mut value);
                store.create(&object.key, value).await.map(|stored| Applied::Created(stored.position))
            }
            Some(current) => {
                let value = merged(&object.value, &current.value, object.key.kind);
                if value == current.value {
                    return Ok(Applied::Unchanged(current.position));
                }
                let updated = store.update(&object.key, value, &current.version).await;
                updated.map(|stored| Applied::Configured(stored.position))
            }
        };
        match result {
            // Another writer was faster: read it again.
            Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
            result => return result,
        }
    }
}

/// Adds to a new object what the API server would: an identity and a creation timestamp.
pub fn identify(value: &mut Value) {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.entry("uid").or_insert_with(|| json!(uuid::Uuid::new_v4().to_string()));
        metadata.entry("creationTimestamp").or_insert_with(|| json!(now));
    }
}

/// The stored form of `new` applied over `current`, including what the cluster added.
#[must_use]
pub fn merged(new: &Value, current: &Value, kind: Kind) -> Value {
    let mut value = new.clone();
    if kind == Kind::IpamConfig {
        // It has no metadata, and its other fields belong to Calico.
        for (name, kept) in current.as_object().into_iter().flatten() {
            if let Some(fields) = value.as_object_mut() {
                fields.entry(name.as_str()).or_insert_with(|| kept.clone());
            }
        }
        return value;
    }
    keep(&mut value, current, &["status"]);
    for field in ["uid", "creationTimestamp"] {
        keep(&mut value, current, &["metadata", field]);
    }
    if kind == Kind::Pod {
        keep(&mut value, current, &["spec", "nodeName"]);
        keep(&mut value, current, &["metadata", "ownerReferences"]);
    }
    if kind == Kind::Service && value["spec"]["type"] != "ExternalName" {
        // Its controller gave it an address and ports.
        for field in ["clusterIP", "clusterIPs"] {
            keep(&mut value, current, &["spec", field]);
        }
        keep_node_ports(&mut value, current);
    }
    if matches!(kind, Kind::Node | Kind::Pod) {
        // Nodes publish data of theirs and of their pods in annotations.
        keep(&mut value, current, &["metadata", "annotations"]);
        let annotations = current.pointer("/metadata/annotations").and_then(Value::as_object);
        for name in annotations.into_iter().flat_map(Map::keys) {
            keep(&mut value, current, &["metadata", "annotations", name]);
        }
    }
    value
}

/// Copies the nodePorts that a Service was given, if its ports may still have some.
fn keep_node_ports(value: &mut Value, current: &Value) {
    if !matches!(value["spec"]["type"].as_str(), Some("NodePort" | "LoadBalancer")) {
        return;
    }
    let same = |one: &Value, other: &Value| {
        let protocol = |port: &Value| port["protocol"].as_str().unwrap_or("TCP").to_owned();
        one["port"] == other["port"] && protocol(one) == protocol(other)
    };
    let known = current["spec"]["ports"].as_array().cloned().unwrap_or_default();
    for port in value["spec"]["ports"].as_array_mut().into_iter().flatten() {
        if let Some(known) = known.iter().find(|known| same(known, port)) {
            keep(port, known, &["nodePort"]);
        }
    }
}

/// Copies the field from `current` if `value` does not have it.
fn keep(value: &mut Value, current: &Value, path: &[&str]) {
    let (Some((field, parents)), Value::Object(mut fields)) = (path.split_last(), value.take()) else {
        return;
    };
    let mut current = Some(current);
    {
        let mut inner: Option<&mut Map<String, Value>> = Some(&mut fields);
        for parent in parents {
            current = current.and_then(|current| current.get(parent));
            inner = inner.and_then(|fields| fields.get_mut(*parent)).and_then(Value::as_object_mut);
        }
        if let (Some(fields), Some(kept)) = (inner, current.and_then(|current| current.get(field))) {
            fields.entry((*field).to_owned()).or_insert_with(|| kept.clone());
        }
    }
    *value = Value::Object(fields);
}
