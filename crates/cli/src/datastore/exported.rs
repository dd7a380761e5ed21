//! An object of an export.

use serde_json::Value;
use tortie_api::support::set_protected;
use tortie_api::{Key, Kind};

use crate::manifests::tier_of;

/// An exported object.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Exported {
    pub(super) key: Key,
    pub(super) value: Value,
}

impl Exported {
    /// Why the object cannot be stored under its key, whatever its fields mean.
    pub(super) fn problem(&self) -> Option<String> {
        let Self { key, value } = self;
        let Some(fields) = value.as_object() else { return Some("its value is no mapping".to_owned()) };
        if key.name.is_empty() || key.kind.namespaced() == key.namespace.is_empty() {
            return Some("its name or namespace is missing, or it must not have a namespace".to_owned());
        }
        if matches!(key.kind, Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle | Kind::IpamConfig) {
            return None;
        }
        if key.name.contains('/') {
            return Some("its name has a slash".to_owned());
        }
        let wrong = ["metadata", "spec"]
            .into_iter()
            .find(|field| fields.get(*field).is_some_and(|part| !part.is_object()));
        if let Some(field) = wrong {
            return Some(format!("{field} is no mapping"));
        }
        let is_named = |field: &str, expected: &str| {
            fields
                .get("metadata")
                .and_then(|metadata| metadata.get(field))
                .and_then(Value::as_str)
                .unwrap_or_default()
                == expected
        };
        // Versions of Calico before 3.32 stored a policy under the name of its tier and its own.
        let own_name =
            tier_of(key.kind, value).and_then(|tier| key.name.strip_prefix(tier)?.strip_prefix('.'));
        let has_name = is_named("name", &key.name) || own_name.is_some_and(|name| is_named("name", name));
        (!has_name || !is_named("namespace", &key.namespace))
            .then(|| "metadata has another name or namespace".to_owned())
    }
}

/// Without what only the exporting datastore can use.
pub(super) fn without_identity(kind: Kind, mut value: Value) -> Value {
    // It says that Calico's kube-controllers run on this datastore.
    if let Some(fields) = value.as_object_mut().filter(|_| kind == Kind::KubeControllersConfiguration) {
        fields.remove("status");
    }
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in [
            "resourceVersion",
            "generation",
            "managedFields",
            "selfLink",
            "ownerReferences",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ] {
            metadata.remove(field);
        }
    }
    set_protected(&mut value, false);
    value
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_policy_may_have_the_name_of_its_tier_before_its_own() {
        let named = |kind: Kind, key: &str, name: &str, tier: &str| {
            let value = json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"tier": tier}});
            Exported { key: Key::namespaced(kind, "n", key), value }.problem().is_none()
        };
        for (kind, key, name, tier, expected) in [
            (Kind::NetworkPolicy, "default.p", "p", "default", true),
            (Kind::NetworkPolicy, "default.p", "default.p", "default", true),
            (Kind::NetworkPolicy, "team.p", "p", "team", true),
            (Kind::NetworkPolicy, "team.p", "p", "default", false),
            (Kind::NetworkPolicy, "p", "q", "default", false),
            (Kind::NetworkSet, "default.p", "p", "default", false),
        ] {
            assert_eq!(named(kind, key, name, tier), expected, "{kind} {key} {name} {tier}");
        }
    }
}
