//! Calico's resources as CustomResourceDefinitions (`libcalico-go/lib/backend/k8s/resources/resources.go`): most of
//! their metadata is in an annotation, and their uids are transformed.

use serde_json::{Map, Value, json};
use tortie_api::calico::IpPool;
use tortie_api::{Key, Kind};

use super::group::CalicoGroup;

/// The annotation with the metadata.
const METADATA: &str = "projectcalico.org/metadata";
const CALICO: &str = "projectcalico.org/v3";
/// The order in which Go writes the fields of metadata, so that a value that nobody changed is written as it was.
const FIELD_ORDER: [&str; 15] = [
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
];

/// The object as it is stored. Its name, namespace and version are not part of this.
pub(crate) fn encode(key: &Key, mut object: Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut metadata = take_object(&mut object, "metadata", "metadata")?;
    if let Some(annotations) = metadata.get("annotations")
        && annotations.get(METADATA).is_some()
    {
        return Err(format!("metadata.annotations: {METADATA} is Calico's own; remove it"));
    }
    let mut stored = Map::new();
    if take_finalizer(&mut metadata) {
        stored.insert("finalizers".to_owned(), json!([IpPool::FINALIZER]));
    }
    if let Some(uid) = metadata.remove("uid") {
        stored
            .insert("uid".to_owned(), transform_uid(&uid).map_err(|error| format!("metadata.uid: {error}"))?);
    }
    let of_the_server = ["namespace", "resourceVersion", "selfLink", "managedFields", "deletionTimestamp"];
    for field in of_the_server {
        metadata.remove(field);
    }
    if has_own_name(key.kind) {
        metadata.entry("name").or_insert_with(|| json!(key.name));
    } else {
        metadata.remove("name");
    }
    rewrite_owners(&mut metadata, CALICO, CalicoGroup::Crd.api_version())?;
    let own = |field: &str| {
        let pairs = metadata.get(field).and_then(Value::as_object).into_iter().flatten();
        pairs.filter(|(name, _)| is_own(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let labels: Map<String, Value> = own("labels");
    let mut annotations: Map<String, Value> = own("annotations");
    annotations.insert(METADATA.to_owned(), Value::String(in_go_order(metadata)));
    if !labels.is_empty() {
        stored.insert("labels".to_owned(), Value::Object(labels));
    }
    stored.insert("annotations".to_owned(), Value::Object(annotations));
    object.insert("metadata".to_owned(), Value::Object(stored));
    Ok(object)
}

/// The object as Calico's API has it. If its annotation is damaged, it stays where it is, and writing the object is an
/// error that names it.
pub(crate) fn decode(kind: Kind, object: &mut Map<String, Value>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    if let Some(uid) = metadata.get_mut("uid")
        && let Ok(transformed) = transform_uid(uid)
    {
        *uid = transformed;
    }
    let Some(text) = metadata.get("annotations").and_then(|all| all.get(METADATA)).and_then(Value::as_str)
    else {
        return;
    };
    let mut kept = match parse(text) {
        Ok(kept) => kept,
        Err(error) => {
            let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default();
            tracing::warn!(kind = kind.name(), name, error, "the annotation {METADATA} is damaged");
            return;
        }
    };
    kept.retain(|_, value| !value.is_null());
    for field in ["labels", "annotations"] {
        let mut all = match metadata.remove(field) {
            Some(Value::Object(all)) => all,
            _ => Map::new(),
        };
        all.remove(METADATA);
        if let Some(Value::Object(more)) = kept.remove(field) {
            all.extend(more);
        }
        if !all.is_empty() {
            kept.insert(field.to_owned(), Value::Object(all));
        }
    }
    let has_name =
        has_own_name(kind) && kept.get("name").and_then(Value::as_str).is_some_and(|it| !it.is_empty());
    for field in ["namespace", "uid"].into_iter().chain((!has_name).then_some("name")) {
        match metadata.remove(field) {
            Some(value) => drop(kept.insert(field.to_owned(), value)),
            None => drop(kept.remove(field)),
        }
    }
    if let Some(created) = metadata.remove("creationTimestamp") {
        kept.entry("creationTimestamp").or_insert(created);
    }
    // Only the API server deletes.
    match metadata.remove("deletionTimestamp") {
        Some(deleted) => drop(kept.insert("deletionTimestamp".to_owned(), deleted)),
        None => drop(kept.remove("deletionTimestamp")),
    }
    take_finalizer(&mut kept);
    if take_finalizer(metadata) {
        let finalizers = kept.entry("finalizers").or_insert_with(|| json!([]));
        finalizers.as_array_mut().into_iter().for_each(|all| all.push(json!(IpPool::FINALIZER)));
    }
    *metadata = kept;
}

/// The metadata of an annotation.
fn parse(text: &str) -> Result<Map<String, Value>, String> {
    let mut metadata: Map<String, Value> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    rewrite_owners(&mut metadata, CalicoGroup::Crd.api_version(), CALICO)?;
    Ok(metadata)
}

/// Removes the finalizer of pools, which the API server must see. Returns whether it was there. The other finalizers of Calico's
/// objects are in the annotation, and hold nothing.
fn take_finalizer(metadata: &mut Map<String, Value>) -> bool {
    let Some(all) = metadata.get_mut("finalizers").and_then(Value::as_array_mut) else { return false };
    let before = all.len();
    all.retain(|each| each != IpPool::FINALIZER);
    let (had, is_empty) = (all.len() < before, all.is_empty());
    if had && is_empty {
        metadata.remove("finalizers");
    }
    had
}

/// Policies have the name that the user gave them in the annotation, because old versions of Calico stored
/// `default.p` for `p`.
pub(crate) fn has_own_name(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::NetworkPolicy
            | Kind::GlobalNetworkPolicy
            | Kind::StagedNetworkPolicy
            | Kind::StagedGlobalNetworkPolicy
    )
}

/// Labels and annotations with such a name stay visible in the API.
fn is_own(name: &str) -> bool {
    name.contains("projectcalico.org/") || name.contains("operator.tigera.io/")
}

/// Reverses the bits of each byte except those of the version and the variant. Twice, it changes nothing.
pub(crate) fn transform_uid(uid: &Value) -> Result<Value, String> {
    let text = uid.as_str().unwrap_or_default();
    if text.is_empty() {
        return Ok(uid.clone());
    }
    let uid = uuid::Uuid::parse_str(text).map_err(|error| format!("{text:?} is no UUID: {error}"))?;
    let mut bytes = *uid.as_bytes();
    for (index, byte) in bytes.iter_mut().enumerate() {
        if index != 6 && index != 8 {
            *byte = byte.reverse_bits();
        }
    }
    Ok(json!(uuid::Uuid::from_bytes(bytes).to_string()))
}

/// Rewrites owners in one group of Calico as owners in the other one.
fn rewrite_owners(metadata: &mut Map<String, Value>, from: &str, to: &str) -> Result<(), String> {
    let owners = metadata.get_mut("ownerReferences").and_then(Value::as_array_mut).into_iter().flatten();
    for (index, owner) in owners.enumerate() {
        let Some(owner) = owner.as_object_mut() else { continue };
        if owner.get("apiVersion").is_some_and(|version| version == from) {
            owner.insert("apiVersion".to_owned(), json!(to));
            if let Some(uid) = owner.get_mut("uid") {
                *uid = transform_uid(uid)
                    .map_err(|error| format!("metadata.ownerReferences[{index}].uid: {error}"))?;
            }
        }
    }
    Ok(())
}

fn in_go_order(mut metadata: Map<String, Value>) -> String {
    let mut fields: Vec<String> = Vec::with_capacity(metadata.len());
    let mut add = |name: &str, value: &Value| fields.push(format!("{}:{value}", json!(name)));
    for name in FIELD_ORDER {
        if let Some(value) = metadata.remove(name) {
            add(name, &value);
        }
    }
    metadata.iter().for_each(|(name, value)| add(name, value));
    format!("{{{}}}", fields.join(","))
}

/// Removes and returns the object of a field; an empty one if it is absent.
pub(crate) fn take_object(
    fields: &mut Map<String, Value>,
    field: &str,
    path: &str,
) -> Result<Map<String, Value>, String> {
    match fields.remove(field) {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(object)) => Ok(object),
        Some(_) => Err(format!("{path} must be an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(object) => object,
            _ => Map::new(),
        }
    }

    #[test]
    fn uids_are_transformed_as_in_calico() {
        let table = [
            ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000080"),
            ("01020304-0506-4708-890a-0b0c0d0e0f10", "8040c020-a060-4710-8950-d030b070f008"),
        ];
        for (one, other) in table {
            assert_eq!(transform_uid(&json!(one)), Ok(json!(other)));
            assert_eq!(transform_uid(&json!(other)), Ok(json!(one)), "it is its own inverse");
        }
        assert!(transform_uid(&json!("x")).is_err());
    }

    /// What Calico wrote, what its API shows, and what Tortie writes if nobody changes it.
    #[test]
    fn metadata_is_in_an_annotation() {
        let annotation = r#"{"name":"p","creationTimestamp":"2024-05-06T07:08:09Z","labels":{"a":"b"},"annotations":{"note":"x"},"ownerReferences":[{"apiVersion":"crd.projectcalico.org/v1","uid":"00000000-0000-4000-8000-000000000001"}],"finalizers":["f"]}"#;
        let stored = json!({
            "metadata": {"name": "default.p", "namespace": "n", "uid": "00000000-0000-4000-8000-000000000080",
                "creationTimestamp": "2024-05-06T07:08:10Z",
                "labels": {"projectcalico.org/x": "y"}, "annotations": {METADATA: annotation}},
            "spec": {"order": 1},
        });
        let mut value = object(stored.clone());
        decode(Kind::NetworkPolicy, &mut value);
        let expected = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "00000000-0000-4000-8000-000000000001",
                "creationTimestamp": "2024-05-06T07:08:09Z",
                "labels": {"a": "b", "projectcalico.org/x": "y"}, "annotations": {"note": "x"},
                "ownerReferences": [{"apiVersion": CALICO, "uid": "00000000-0000-4000-8000-000000000080"}],
                "finalizers": ["f"]},
            "spec": {"order": 1},
        });
        assert_eq!(Value::Object(value.clone()), expected);
        let key = Key::namespaced(Kind::NetworkPolicy, "n", "default.p");
        let written = encode(&key, value).unwrap_or_default();
        let kept = r#"{"a":"b","projectcalico.org/x":"y"}"#;
        let expected = json!({
            "metadata": {"uid": "00000000-0000-4000-8000-000000000080", "labels": {"projectcalico.org/x": "y"},
                "annotations": {METADATA: annotation.replace(r#"{"a":"b"}"#, kept)}},
            "spec": {"order": 1},
        });
        assert_eq!(Value::Object(written), expected);
    }

    #[test]
    fn the_name_is_in_the_annotation_of_policies_only() {
        for (kind, text) in [(Kind::GlobalNetworkPolicy, r#"{"name":"x"}"#), (Kind::Tier, "{}")] {
            let value = object(json!({"metadata": {"name": "x", "managedFields": [1]}}));
            let written = encode(&Key::global(kind, "x"), value).unwrap_or_default();
            assert_eq!(Value::Object(written), json!({"metadata": {"annotations": {METADATA: text}}}));
        }
    }

    #[test]
    fn a_damaged_annotation_is_kept_and_cannot_be_overwritten() {
        for text in
            ["{", "[]", r#"{"ownerReferences":[{"apiVersion":"crd.projectcalico.org/v1","uid":"x"}]}"#]
        {
            let stored = json!({"metadata": {"name": "x", "annotations": {METADATA: text}}});
            let mut value = object(stored.clone());
            decode(Kind::Tier, &mut value);
            assert_eq!(Value::Object(value.clone()), stored);
            let error = encode(&Key::global(Kind::Tier, "x"), value).unwrap_err();
            assert!(error.contains(METADATA), "{error}");
        }
    }

    #[test]
    fn the_finalizer_of_pools_is_seen_by_the_api_server() {
        let key = Key::global(Kind::IpPool, "p");
        for (others, kept) in [(json!([]), "{}"), (json!(["f"]), r#"{"finalizers":["f"]}"#)] {
            let mut finalizers = others.as_array().cloned().unwrap_or_default();
            finalizers.push(json!(IpPool::FINALIZER));
            let value = json!({"metadata": {"name": "p", "finalizers": finalizers}});
            let written = encode(&key, object(value.clone())).unwrap_or_default();
            let metadata = json!({"finalizers": [IpPool::FINALIZER], "annotations": {METADATA: kept}});
            assert_eq!(Value::Object(written.clone()), json!({"metadata": metadata}));
            let mut read = written;
            read["metadata"]["name"] = json!("p");
            read["metadata"]["deletionTimestamp"] = json!("2026-11-27T00:00:00Z");
            decode(Kind::IpPool, &mut read);
            let mut expected = value;
            expected["metadata"]["deletionTimestamp"] = json!("2026-11-27T00:00:00Z");
            assert_eq!(Value::Object(read), expected);
        }
        // One in the annotation holds nothing.
        let annotation = format!(r#"{{"finalizers":["{}"],"deletionTimestamp":"x"}}"#, IpPool::FINALIZER);
        let mut read = object(json!({"metadata": {"name": "p", "annotations": {METADATA: annotation}}}));
        decode(Kind::IpPool, &mut read);
        assert_eq!(Value::Object(read), json!({"metadata": {"name": "p"}}));
    }

    #[test]
    fn an_object_without_the_annotation_is_read_as_it_is() {
        let metadata = json!({"name": "x", "labels": {"a": "b"}, "annotations": {"c": "d"}});
        let mut value = object(json!({"metadata": metadata}));
        decode(Kind::Tier, &mut value);
        assert_eq!(Value::Object(value), json!({"metadata": metadata}));
    }
}
