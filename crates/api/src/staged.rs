//! Staged policies, and what would be in force in their place.

use serde_json::{Value, json};

use crate::{Key, Kind};

/// What a staged policy is staged for.
#[derive(Debug, Clone, PartialEq)]
pub enum Staged {
    /// To be in force, as this.
    Set(Value),
    /// To take out the policy of its name.
    Delete,
    /// For nothing yet.
    Nothing,
}

/// The policy that a staged one is staged for; `None` where the key is no staged policy's.
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

/// What the text of a staged policy asks for, where `kind` is [`enforced`]'s.
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
