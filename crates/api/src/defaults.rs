//! Defaults of the API server for absent fields (`api/pkg/defaults` of Calico; policy decisions 7, 10). The stored
//! object is explicit, so that even a reader that does not understand all of it knows its meaning.

use serde_json::{Map, Value, json};

use crate::calico::{PolicyType, TierDefault, WELL_KNOWN_TIERS};
use crate::{Key, Resource};

/// Writes the defaults into a valid object.
pub(crate) fn fill(key: &Key, value: &mut Value, resource: &Resource) {
    let (field, types) = match resource {
        // Calico stores a staged one as it is given.
        Resource::KubernetesNetworkPolicy(policy) => ("policyTypes", policy.effective_types()),
        Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
            ("types", policy.spec.effective_types())
        }
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            ("types", policy.spec.effective_types())
        }
        Resource::Tier(_) => {
            let known = WELL_KNOWN_TIERS.iter().find(|(name, ..)| *name == key.name);
            let (order, end) =
                known.map_or((1_000_000.0, TierDefault::Deny), |(_, order, end)| (*order, *end));
            if let Some(spec) = spec(value) {
                or_write(spec, "order", json!(order));
                or_write(spec, "defaultAction", json!(format!("{end:?}")));
            }
            return;
        }
        _ => return,
    };
    let named = |of: &PolicyType| match of {
        PolicyType::Ingress => "Ingress",
        PolicyType::Egress => "Egress",
    };
    if let Some(spec) = spec(value) {
        or_write(spec, field, types.iter().map(named).collect());
    }
}

fn spec(value: &mut Value) -> Option<&mut Map<String, Value>> {
    let spec = value.as_object_mut()?.entry("spec").or_insert_with(|| json!({}));
    if spec.is_null() {
        *spec = json!({});
    }
    spec.as_object_mut()
}

/// Writes the field where it is absent, null or an empty list.
fn or_write(fields: &mut Map<String, Value>, name: &str, value: Value) {
    let is_set = fields
        .get(name)
        .is_some_and(|given| !given.is_null() && given.as_array().is_none_or(|list| !list.is_empty()));
    if !is_set {
        fields.insert(name.to_owned(), value);
    }
}
