//! Staged policies, and the objects that would be enforced in their place.

use serde_json::{Value, json};

use crate::{Key, Kind};

/// The effect that a staged policy is meant to have.
#[derive(Debug, Clone, PartialEq)]
pub enum Staged {
    /// To enforce this object.
    Set(Value),
    /// To delete the policy of the same name.
    Delete,
    /// None yet.
    Nothing,
}

/// The key of the policy that a staged one stands for; `None` if the key is not that of a staged policy.
#[must_use]
pub fn enforced(key: &Key) -> Option<Key> {
    let kind = match key.kind {
        Kind::StagedNetworkPolicy => Kind::NetworkPolicy,
        Kind::StagedGlobalNetworkPolicy => Kind::GlobalNetworkPolicy,
        Kind::StagedKubernetesNetworkPolicy => Kind::KubernetesNetworkPolicy,
        _ => return None,
    };
    Some(Key { kind, ..key.clone() })
}

/// The effect that the text of a staged policy requests; `kind` is that of [`enforced`].
#[must_use]
pub fn staged(value: &Value, kind: Kind) -> Staged {
    let mut value = value.clone();
    let spec = value.get_mut("spec").and_then(Value::as_object_mut);
    let action = spec.and_then(|spec| spec.remove("stagedAction"));
    match action.as_ref().and_then(Value::as_str) {
        None | Some("Set") => {
            value["kind"] = json!(kind.name());
            value["apiVersion"] = json!(kind.api_version());
            Staged::Set(value)
        }
        Some("Delete") => Staged::Delete,
        Some(_) => Staged::Nothing,
    }
}
