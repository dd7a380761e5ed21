//! Applies manifests: what a user wrote becomes a stored object.

use serde_json::{Map, Value, json};
use tortie_api::manifest::{LAST_APPLIED, Object, Preconditions};
use tortie_api::support;
use tortie_api::{Kind, Position};

use crate::{Store, StoreError, Stored};

/// The maximum length of a recorded manifest, in bytes. The Kubernetes API accepts 256 KiB of annotations, in which Calico's
/// old group escapes the text once more.
const MAX_RECORD: usize = 96 * 1024;

/// The result of applying an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// It is new.
    Created(Position),
    /// It existed and has changed.
    Configured(Position),
    /// It existed, and no more than the record of its manifest has changed.
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

/// Stores an object of a manifest, whether or not it exists; see [`applied`].
pub(crate) async fn apply(store: &(impl Store + ?Sized), object: &Object) -> Result<Applied, StoreError> {
    write(store, object, applied).await
}

/// Stores an object of a manifest in place of the stored one; see [`replaced`].
///
/// # Errors
/// The manifest means another object, or the store failed.
pub async fn replace(store: &dyn Store, object: &Object) -> Result<Applied, StoreError> {
    write(store, object, replaced).await
}

async fn write(
    store: &(impl Store + ?Sized),
    object: &Object,
    value_over: fn(&Value, Option<&Value>, Kind) -> Value,
) -> Result<Applied, StoreError> {
    loop {
        let current = store.get(&object.key).await?;
        let mut value =
            value_over(&object.value, current.as_ref().map(|stored| &stored.value), object.key.kind);
        let result = match current {
            None => {
                identify(&mut value);
                store.create(&object.key, value).await.map(|stored| Applied::Created(stored.position))
            }
            Some(current) => {
                check_preconditions(object, &current)?;
                let form = store.storage_form();
                form.fill(object.key.kind, &mut value);
                if value == current.value && !form.misses_identity(object.key.kind, &value) {
                    return Ok(Applied::Unchanged(current.position));
                }
                let differs = without_record(value.clone()) != without_record(current.value);
                let updated = store.update(&object.key, value, &current.version).await;
                updated.map(|stored| match differs {
                    true => Applied::Configured(stored.position),
                    false => Applied::Unchanged(stored.position),
                })
            }
        };
        match result {
            // Another writer was faster: read it again.
            Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
            result => return result,
        }
    }
}

/// Checks that the stored object is the one that the manifest means. A manifest that was exported and edited must not
/// undo what others have changed since.
///
/// # Errors
/// [`StoreError::Outdated`].
pub fn check_preconditions(object: &Object, current: &Stored) -> Result<(), StoreError> {
    let Preconditions { uid, resource_version } = &object.preconditions;
    let known_uid = current.value.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let fields = [("uid", uid, known_uid), ("resourceVersion", resource_version, current.version.as_str())];
    for (field, given, known) in fields {
        if let Some(given) = given.as_deref().filter(|given| *given != known) {
            return Err(StoreError::Outdated { key: object.key.clone(), field, given: given.to_owned() });
        }
    }
    Ok(())
}

/// Adds to a new object what the API server would: an identity and a creation timestamp.
pub fn identify(value: &mut Value) {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.entry("uid").or_insert_with(|| json!(uuid::Uuid::new_v4().to_string()));
        metadata.entry("creationTimestamp").or_insert_with(|| json!(now));
    }
}

/// The stored form of a manifest that is applied over the stored object, as kubectl's client-side `apply` has it. An annotation
/// records the manifest. A field of the last manifest that `new` does not have goes; other fields that `new` does not have
/// stay, because somebody else has set them. Lists are replaced as a whole. Without a record, `new` replaces everything but
/// the metadata, as calicoctl's `apply` does.
#[must_use]
pub fn applied(new: &Value, current: Option<&Value>, kind: Kind) -> Value {
    if new.get("metadata").is_none() {
        return replaced(new, current, kind);
    }
    let mut value = new.clone();
    if let Some(current) = current {
        let last = last_applied(current);
        if last.is_some() {
            value = current.clone();
        } else {
            value = replaced(new, Some(current), kind);
            value["metadata"] = current["metadata"].clone();
        }
        merge(&last.unwrap_or_default(), new, &mut value);
        keep_additions(&mut value, current, kind);
    }
    set_record(&mut value, record(new));
    value
}

/// The stored form of a manifest that replaces the stored object, except for what the cluster added to that: status, a pod's
/// node, identity.
#[must_use]
pub fn replaced(new: &Value, current: Option<&Value>, kind: Kind) -> Value {
    let mut value = new.clone();
    let Some(current) = current else { return value };
    if kind == Kind::IpamConfig {
        // It has no metadata, and its other fields belong to Calico.
        for (name, kept) in current.as_object().into_iter().flatten() {
            if let Some(fields) = value.as_object_mut() {
                fields.entry(name.as_str()).or_insert_with(|| kept.clone());
            }
        }
        return value;
    }
    keep_additions(&mut value, current, kind);
    if matches!(kind, Kind::Node | Kind::Pod) {
        // Nodes publish data of theirs and of their pods in annotations.
        keep(&mut value, current, &["metadata", "annotations"]);
        let annotations = current.pointer("/metadata/annotations").and_then(Value::as_object);
        for name in annotations.into_iter().flat_map(Map::keys).filter(|name| *name != LAST_APPLIED) {
            keep(&mut value, current, &["metadata", "annotations", name]);
        }
    }
    value
}

/// Merges a manifest into the stored object: removes what the last manifest had and the new one has not.
fn merge(last: &Value, new: &Value, value: &mut Value) {
    let (Value::Object(new), Value::Object(fields)) = (new, &mut *value) else {
        *value = new.clone();
        return;
    };
    let last_fields = last.as_object();
    for name in last_fields.into_iter().flat_map(Map::keys).filter(|name| !new.contains_key(*name)) {
        fields.remove(name);
    }
    for (name, new) in new {
        let last = last_fields.and_then(|last| last.get(name)).unwrap_or(&Value::Null);
        merge(last, new, fields.entry(name.clone()).or_insert(Value::Null));
    }
}

/// The manifest of the last `apply`, if it is recorded.
fn last_applied(value: &Value) -> Option<Value> {
    let text = value.pointer("/metadata/annotations")?.get(LAST_APPLIED)?.as_str()?;
    serde_json::from_str(text).ok().filter(Value::is_object)
}

/// The text that records a manifest, unless it is too long for an annotation.
fn record(new: &Value) -> Option<String> {
    let text = new.to_string();
    (text.len() <= MAX_RECORD).then_some(text)
}

/// An object without the record of its manifest, to see what else differs.
#[must_use]
pub fn without_record(mut value: Value) -> Value {
    set_record(&mut value, None);
    value
}

fn set_record(value: &mut Value, record: Option<String>) {
    let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if annotations.is_null() {
        *annotations = json!({});
    }
    let Some(annotations) = annotations.as_object_mut() else { return };
    match record {
        Some(text) => drop(annotations.insert(LAST_APPLIED.to_owned(), Value::String(text))),
        None => drop(annotations.remove(LAST_APPLIED)),
    }
    if annotations.is_empty() {
        metadata.remove("annotations");
    }
}

/// Keeps what the cluster added to an object and no manifest removes.
fn keep_additions(value: &mut Value, current: &Value, kind: Kind) {
    keep(value, current, &["status"]);
    for field in ["uid", "creationTimestamp"] {
        keep(value, current, &["metadata", field]);
    }
    if kind == Kind::IpPool && support::is_protected(current) {
        support::set_protected(value, true);
    }
    if kind == Kind::Pod {
        keep(value, current, &["spec", "nodeName"]);
        keep(value, current, &["metadata", "ownerReferences"]);
    }
    if kind == Kind::Service {
        let has_address = value["spec"]["type"] != "ExternalName";
        // Its controller gave it an address and ports.
        for field in ["clusterIP", "clusterIPs"] {
            match value.get_mut("spec").and_then(Value::as_object_mut) {
                Some(spec) if !has_address => drop(spec.remove(field)),
                _ => keep(value, current, &["spec", field]),
            }
        }
        keep_node_ports(value, current);
    }
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

#[cfg(test)]
mod tests {
    use tortie_api::calico::IpPool;

    use super::*;

    const KIND: Kind = Kind::NetworkPolicy;

    /// A policy with these labels and this spec.
    fn policy(labels: Value, spec: Value) -> Value {
        json!({"metadata": {"name": "p", "labels": labels}, "spec": spec})
    }

    /// The labels and the spec after the manifests were applied, with a change of somebody else before the last one.
    fn after(first: Option<Value>, changed: impl Fn(&mut Value), last: &Value) -> (Value, Value) {
        let mut stored = match first {
            Some(first) => applied(&first, None, KIND),
            None => json!({"metadata": {"name": "p"}}),
        };
        changed(&mut stored);
        let stored = applied(last, Some(&stored), KIND);
        assert_eq!(applied(last, Some(&stored), KIND), stored, "applying it again changes nothing");
        (stored["metadata"]["labels"].clone(), stored["spec"].clone())
    }

    /// Without it, the API server would delete a pool in use at once.
    #[test]
    fn no_manifest_removes_what_holds_a_deleted_pool() {
        let finalizers = json!([IpPool::FINALIZER]);
        let pool = |spec: Value| json!({"metadata": {"name": "p"}, "spec": spec});
        let mut stored = pool(json!({"cidr": "10.0.0.0/16"}));
        stored["metadata"]["finalizers"] = finalizers.clone();
        let new = pool(json!({"cidr": "10.0.0.0/16", "disabled": true}));
        for written in
            [replaced(&new, Some(&stored), Kind::IpPool), applied(&new, Some(&stored), Kind::IpPool)]
        {
            assert_eq!(written["metadata"]["finalizers"], finalizers, "{written}");
            assert_eq!(written["spec"]["disabled"], true);
        }
    }

    #[test]
    fn what_a_manifest_no_longer_has_goes_and_what_others_set_stays() {
        let first = || {
            policy(
                json!({"app": "a", "team": "x"}),
                json!({"order": 1, "types": ["Ingress"], "deep": {"a": 1}}),
            )
        };
        let by_others = |stored: &mut Value| {
            stored["metadata"]["labels"]["cost"] = json!("7");
            stored["spec"]["doNotTrack"] = json!(true);
            stored["spec"]["deep"]["b"] = json!(2);
            stored["spec"]["types"] = json!(["Egress", "Ingress"]);
        };
        let last = policy(json!({"app": "b"}), json!({"types": ["Ingress"], "deep": {"c": 3}}));
        let (labels, spec) = after(Some(first()), by_others, &last);
        assert_eq!(labels, json!({"app": "b", "cost": "7"}));
        assert_eq!(spec, json!({"types": ["Ingress"], "deep": {"b": 2, "c": 3}, "doNotTrack": true}));

        // A mapping that goes, goes with what others put into it.
        let (_, spec) = after(Some(first()), by_others, &policy(json!({}), json!({"types": ["Ingress"]})));
        assert_eq!(spec, json!({"types": ["Ingress"], "doNotTrack": true}));

        // Of an object that was never applied, labels stay, and the spec is replaced.
        let (labels, spec) = after(
            None,
            |stored| {
                stored["spec"] = json!({"order": 1});
                by_others(stored);
            },
            &last,
        );
        assert_eq!(labels, json!({"app": "b", "cost": "7"}));
        assert_eq!(spec, json!({"types": ["Ingress"], "deep": {"c": 3}}));
    }

    #[test]
    fn the_record_is_the_last_manifest_unless_it_is_too_long() {
        let short = policy(json!({}), json!({"order": 1}));
        let stored = applied(&short, None, KIND);
        assert_eq!(last_applied(&stored), Some(short.clone()));
        assert_eq!(without_record(stored.clone()), short);
        let long = policy(json!({}), json!({"nets": vec!["10.0.0.0/8"; MAX_RECORD / 10]}));
        let stored = applied(&long, Some(&stored), KIND);
        assert_eq!(stored, long, "without a record, the spec is replaced");
    }

    #[test]
    fn what_the_cluster_added_stays() {
        let current = |spec: Value| {
            let metadata = json!({"name": "x", "uid": "u", "annotations": {"agent": "1"}});
            json!({"metadata": metadata, "spec": spec, "status": {"phase": "Running"}})
        };
        let port = |node_port: Value| json!([{"port": 80, "nodePort": node_port}]);
        let table = [
            (
                Kind::Pod,
                json!({"nodeName": "n", "old": 1}),
                json!({"new": 1}),
                json!({"nodeName": "n", "new": 1}),
            ),
            (
                Kind::Service,
                json!({"clusterIP": "1.2.3.4", "ports": port(json!(30_000)), "type": "NodePort"}),
                json!({"ports": [{"port": 80}], "type": "NodePort"}),
                json!({"clusterIP": "1.2.3.4", "ports": port(json!(30_000)), "type": "NodePort"}),
            ),
            (
                Kind::Service,
                json!({"clusterIP": "1.2.3.4", "ports": port(json!(30_000)), "type": "NodePort"}),
                json!({"ports": [{"port": 80}], "type": "ClusterIP"}),
                json!({"clusterIP": "1.2.3.4", "ports": [{"port": 80}], "type": "ClusterIP"}),
            ),
            (
                Kind::Service,
                json!({"clusterIP": "1.2.3.4", "clusterIPs": ["1.2.3.4"]}),
                json!({"type": "ExternalName"}),
                json!({"type": "ExternalName"}),
            ),
        ];
        for (kind, stored, manifest, expected) in table {
            let manifest = json!({"metadata": {"name": "x"}, "spec": manifest});
            for value_over in [applied, replaced] {
                let after = value_over(&manifest, Some(&current(stored.clone())), kind);
                assert_eq!(after["spec"], expected, "{kind}");
                assert_eq!(after["status"]["phase"], "Running");
                assert_eq!(after["metadata"]["uid"], "u");
            }
            let after = applied(&manifest, Some(&current(stored)), kind);
            assert_eq!(after["metadata"]["annotations"]["agent"], "1");
        }
    }
}
