//! Objects of the Kubernetes API, and the same objects in Tortie. The version is not part of a value here.

use serde_json::{Map, Value, json};
use tortie_api::calico::without_fields_of_etcd;
use tortie_api::{Key, Kind, Position};

use super::endpoints::Derived;
use super::group::CalicoGroup;
use super::{endpoints, envelope, ipam, resources};
use crate::follow::Event;
use crate::{StoreError, Stored, Version, Written};

/// An object of the API in Tortie.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decoded {
    Object(Stored),
    /// The object gives nothing now, and may have given this one.
    Without(Key, Position),
    /// The object never gives anything.
    Nothing(Position),
}

impl Decoded {
    pub(crate) fn object(self) -> Option<Stored> {
        match self {
            Decoded::Object(stored) => Some(stored),
            Decoded::Without(..) | Decoded::Nothing(_) => None,
        }
    }

    /// The event of a change to this object.
    pub(crate) fn event(self) -> Event {
        match self {
            Decoded::Object(stored) => Event::Put(stored),
            Decoded::Without(key, position) => Event::Deleted { key, position },
            Decoded::Nothing(position) => Event::Progress(position),
        }
    }

    /// The event of its deletion.
    pub(crate) fn deleted(self) -> Event {
        match self {
            Decoded::Object(Stored { key, position, .. }) | Decoded::Without(key, position) => {
                Event::Deleted { key, position }
            }
            Decoded::Nothing(position) => Event::Progress(position),
        }
    }
}

/// The object to send for a value, with the version that is expected in the store.
pub(crate) fn encode(
    group: CalicoGroup,
    key: &Key,
    value: Value,
    expected: Option<&Version>,
) -> Result<Value, StoreError> {
    let invalid = |problem: String| StoreError::Invalid { key: key.clone(), problem };
    let Value::Object(mut fields) = value else { return Err(invalid("it must be an object".to_owned())) };
    let api_version = resources::api_version(group, key.kind).ok_or(StoreError::KindAbsent(key.kind))?;
    check_name(group, key, &fields).map_err(invalid)?;
    let encoded = match key.kind {
        kind if ipam::is_ipam(kind) => ipam::encode(group, key, fields),
        kind if has_envelope(group, kind) => envelope::encode(key, fields),
        Kind::Node => {
            without_fields_of_etcd(&mut fields);
            Ok(fields)
        }
        _ => Ok(fields),
    };
    let mut fields = encoded.map_err(invalid)?;
    let mut metadata = envelope::take_object(&mut fields, "metadata", "metadata").map_err(invalid)?;
    metadata.remove("resourceVersion");
    metadata.insert("name".to_owned(), json!(resources::name(key)));
    if key.kind.namespaced() {
        metadata.insert("namespace".to_owned(), json!(key.namespace));
    }
    if let Some(expected) = expected {
        metadata.insert("resourceVersion".to_owned(), json!(expected.as_str()));
    }
    fields.insert("metadata".to_owned(), Value::Object(metadata));
    fields.insert("apiVersion".to_owned(), json!(api_version));
    fields.insert("kind".to_owned(), json!(resources::name_of_kind(group, key.kind)));
    Ok(Value::Object(fields))
}

/// The object of this kind that an object of the API gives.
pub(crate) fn decode(group: CalicoGroup, kind: Kind, object: Value) -> Result<Decoded, StoreError> {
    let Value::Object(mut fields) = object else {
        return Err(StoreError::Damaged(format!(
            "the API server answers with {} that are no objects",
            kind.plural()
        )));
    };
    let position = position(fields.get("metadata"))?;
    let name = fields.get("metadata").and_then(|metadata| metadata["name"].as_str());
    let name = name.unwrap_or_default().to_owned();
    if ipam::is_ipam(kind) {
        let Some((key, value)) = ipam::decode(group, kind, fields) else {
            tracing::debug!(kind = kind.name(), name, "the object has no key, or its owner is no node");
            return Ok(Decoded::Nothing(position));
        };
        if ipam::is_deleted(&value) {
            return Ok(Decoded::Without(key, position));
        }
        return Ok(Decoded::Object(Stored::new(key, value, Written::at(position.0))));
    }
    if kind == Kind::WorkloadEndpoint {
        return Ok(match endpoints::derive(&fields) {
            Derived::Endpoint(key, value) => {
                Decoded::Object(Stored::new(key, value, Written::at(position.0)))
            }
            Derived::Without(key) => Decoded::Without(key, position),
            Derived::Never => Decoded::Nothing(position),
        });
    }
    let mut namespace = String::new();
    if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
        metadata.remove("managedFields");
        namespace = metadata.get("namespace").and_then(Value::as_str).unwrap_or_default().to_owned();
    }
    if has_envelope(group, kind) {
        envelope::decode(kind, &mut fields);
    }
    // Items of lists do not have them.
    fields.insert("apiVersion".to_owned(), json!(kind.api_version()));
    fields.insert("kind".to_owned(), json!(kind.name()));
    let key = Key::namespaced(kind, namespace, name);
    Ok(Decoded::Object(Stored::new(key, Value::Object(fields), Written::at(position.0))))
}

/// Whether most of the metadata of the kind's objects is in an annotation.
fn has_envelope(group: CalicoGroup, kind: Kind) -> bool {
    group == CalicoGroup::Crd && resources::is_calico(kind)
}

/// Adds the uid of the current object, unless there is one.
pub(crate) fn set_uid(fields: &mut Map<String, Value>, current: &Value) {
    let metadata = fields.entry("metadata").or_insert_with(|| json!({}));
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.entry("uid").or_insert_with(|| current["metadata"]["uid"].clone());
    }
}

/// The position of metadata: since Kubernetes 1.35, resourceVersions are numbers with an order (KEP-5504).
pub(crate) fn position(metadata: Option<&Value>) -> Result<Position, StoreError> {
    let text = metadata.and_then(|metadata| metadata.get("resourceVersion")).and_then(Value::as_str);
    parse_position(text.unwrap_or_default())
}

/// The position of a resourceVersion.
pub(crate) fn parse_position(text: &str) -> Result<Position, StoreError> {
    let damaged = |_| {
        StoreError::Damaged(format!(
            "the API server answers with the resourceVersion {text:?}, which is no number"
        ))
    };
    text.parse().map(Position).map_err(damaged)
}

/// The name and the namespace in a value are those of its key. IPAM's records have neither.
fn check_name(group: CalicoGroup, key: &Key, fields: &Map<String, Value>) -> Result<(), String> {
    let Some(metadata) = fields.get("metadata").filter(|_| !ipam::is_ipam(key.kind)) else { return Ok(()) };
    let differs = |field: &str, expected: &str| match metadata.get(field).and_then(Value::as_str) {
        Some(text) if text != expected => {
            Some(format!("metadata.{field} is {text:?}, and {expected:?} is expected"))
        }
        _ => None,
    };
    let problem = differs("namespace", &key.namespace).or_else(|| {
        let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default();
        let has_prefix = has_envelope(group, key.kind)
            && envelope::has_own_name(key.kind)
            && key.name.strip_suffix(name).is_some_and(|prefix| prefix.ends_with('.'));
        differs("name", &key.name).filter(|_| !has_prefix)
    });
    problem.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRD: CalicoGroup = CalicoGroup::Crd;

    #[test]
    fn a_value_goes_and_comes_back() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"big": u64::MAX}});
        let key = Key::namespaced(Kind::Pod, "n", "p");
        let mut sent = encode(CRD, &key, pod.clone(), Some(&Version::new("7"))).unwrap_or_default();
        assert_eq!(sent["metadata"]["resourceVersion"], "7");
        sent["metadata"]["managedFields"] = json!([1]);
        let read = decode(CRD, Kind::Pod, sent);
        assert_eq!(read, Ok(Decoded::Object(Stored::new(key, pod, Written::at(7)))));
    }

    /// The API server refuses fields that its Nodes do not have.
    #[test]
    fn a_node_of_calico_is_sent_without_the_fields_of_etcd() {
        let key = Key::global(Kind::Node, "n");
        let node = json!({"metadata": {"name": "n"}, "spec": {
            "addresses": [], "interfaces": [], "orchRefs": [{"nodeName": "n", "orchestrator": "k8s"}], "unschedulable": true}});
        let sent = encode(CRD, &key, node, None).unwrap_or_default();
        assert_eq!(sent["spec"], json!({"unschedulable": true}));
    }

    #[test]
    fn an_update_has_the_uid_of_the_current_object_or_its_own() {
        let current = json!({"metadata": {"uid": "u"}});
        let table = [
            (json!({}), json!({"metadata": {"uid": "u"}})),
            (json!({"metadata": {"uid": "other"}}), json!({"metadata": {"uid": "other"}})),
            (json!({"metadata": 1}), json!({"metadata": 1})),
        ];
        for (mut value, expected) in table {
            if let Some(fields) = value.as_object_mut() {
                set_uid(fields, &current);
            }
            assert_eq!(value, expected);
        }
    }

    #[test]
    fn an_invalid_value_is_rejected_with_its_field() {
        let tier = Key::global(Kind::Tier, "t");
        let policy = Key::namespaced(Kind::NetworkPolicy, "n", "default.p");
        let table = [
            (&tier, json!(1), "must be an object"),
            (&tier, json!({"metadata": 1}), "metadata must be an object"),
            (&tier, json!({"metadata": {"name": "u"}}), "metadata.name is \"u\""),
            (&tier, json!({"metadata": {"uid": "u"}}), "metadata.uid"),
            (&policy, json!({"metadata": {"name": "p", "namespace": "m"}}), "metadata.namespace is \"m\""),
            (&policy, json!({"metadata": {"name": "ault.p"}}), "metadata.name"),
        ];
        for (key, value, expected) in table {
            let result = encode(CRD, key, value.clone(), None);
            let Err(StoreError::Invalid { problem, .. }) = &result else { panic!("{value}: {result:?}") };
            assert!(problem.contains(expected), "{problem}");
        }
        assert!(encode(CRD, &policy, json!({"metadata": {"name": "p", "namespace": "n"}}), None).is_ok());
        let profile = Key::global(Kind::Profile, "p");
        assert_eq!(encode(CRD, &profile, json!({}), None), Err(StoreError::KindAbsent(Kind::Profile)));
    }

    #[test]
    fn a_version_must_be_a_number() {
        for metadata in [json!({}), json!({"resourceVersion": "x"}), json!({"resourceVersion": 1})] {
            let read = decode(CRD, Kind::Pod, json!({"metadata": metadata}));
            assert!(matches!(read, Err(StoreError::Damaged(_))), "{metadata}: {read:?}");
        }
    }

    /// In the group for users, nothing is moved or transformed.
    #[test]
    fn an_object_of_the_native_group_is_as_users_write_it() {
        let policy = json!({"apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy", "metadata": {
            "name": "p", "namespace": "n", "labels": {"a": "b"}, "annotations": {"note": "x"}, "finalizers": ["f"],
            "uid": "00000000-0000-4000-8000-000000000001", "creationTimestamp": "2024-05-06T07:08:09Z",
            "ownerReferences": [{"apiVersion": "projectcalico.org/v3", "uid": "00000000-0000-4000-8000-000000000001"}]},
            "spec": {"order": 1}});
        let key = Key::namespaced(Kind::NetworkPolicy, "n", "p");
        let native = CalicoGroup::Native;
        let mut sent = encode(native, &key, policy.clone(), None).unwrap_or_default();
        assert_eq!(sent, policy);
        sent["metadata"]["resourceVersion"] = json!("7");
        let read = decode(native, Kind::NetworkPolicy, sent);
        assert_eq!(read, Ok(Decoded::Object(Stored::new(key, policy.clone(), Written::at(7)))));
        let other = Key::namespaced(Kind::NetworkPolicy, "n", "default.p");
        assert!(encode(native, &other, policy, None).is_err(), "the name in the value is the object's name");
    }
}
