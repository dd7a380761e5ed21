//! Checks of an object's text: fields that its kind does not have although another kind of the same shape does, and
//! fields that are present but empty.

use serde_json::{Map, Value};

use crate::{FieldError, Kind};

/// Checks an object of Calico's policy kinds before it is parsed.
pub(crate) fn check_as_written(kind: Kind, value: &Value) -> Result<(), Vec<FieldError>> {
    let mut problems = Vec::new();
    let Some(spec) = value.get("spec").and_then(Value::as_object) else { return Ok(()) };
    let staged = match kind {
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => false,
        Kind::StagedNetworkPolicy | Kind::StagedGlobalNetworkPolicy | Kind::StagedKubernetesNetworkPolicy => {
            true
        }
        _ => return Ok(()),
    };
    let mut foreign = if staged { vec![] } else { vec!["stagedAction"] };
    if matches!(kind, Kind::NetworkPolicy | Kind::StagedNetworkPolicy) {
        foreign.extend(["namespaceSelector", "doNotTrack", "preDNAT", "applyOnForward"]);
    }
    for field in foreign.into_iter().filter(|field| spec.contains_key(*field)) {
        let problem = match field {
            "stagedAction" => "is for staged policies only",
            _ => "is for policies of the whole cluster only",
        };
        problems.push(FieldError::new(format!("spec.{field}"), problem));
    }
    if staged && spec.get("stagedAction").and_then(Value::as_str) == Some("Delete") {
        problems.extend(beside_delete(spec));
    }
    for direction in ["ingress", "egress"] {
        let rules = spec.get(direction).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, rule) in rules.iter().enumerate() {
            if rule["icmp"].is_object() && rule["protocol"].is_null() {
                let path = format!("spec.{direction}[{index}].icmp");
                let problem = "needs protocol: ICMP or protocol: ICMPv6 in the same rule";
                problems.push(FieldError::new(path, problem));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// A staged deletion may have no field besides its tier.
fn beside_delete(spec: &Map<String, Value>) -> Option<FieldError> {
    let says_something = |(name, value): &(&String, &Value)| match (name.as_str(), value) {
        ("stagedAction" | "tier", _) | (_, Value::Null) => false,
        ("podSelector", Value::Object(fields)) => !fields.is_empty(),
        (_, Value::String(text)) => !text.is_empty(),
        _ => true,
    };
    let (name, _) = spec.iter().find(says_something)?;
    Some(FieldError::new(format!("spec.{name}"), "may not stand beside stagedAction: Delete"))
}
