//! What the status of a Service says about its addresses. Pure.

use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::{Value, json};

/// The condition of a Service that lacks an address that it asks for. A Service with its addresses has no such condition.
const CONDITION: &str = "tortie.io/LoadBalancerAddress";

/// Whether the Service says that it lacks an address.
pub(crate) fn has_condition(service: &Value) -> bool {
    let conditions = service.pointer("/status/conditions").and_then(Value::as_array);
    conditions.is_some_and(|conditions| conditions.iter().any(|condition| condition["type"] == CONDITION))
}

/// The addresses in the status of a Service.
pub(crate) fn shown(service: &Value) -> Vec<IpAddr> {
    entries(service).iter().filter_map(address).collect()
}

fn entries(service: &Value) -> Vec<Value> {
    let entries = service.pointer("/status/loadBalancer/ingress").and_then(Value::as_array);
    entries.cloned().unwrap_or_default()
}

fn address(entry: &Value) -> Option<IpAddr> {
    entry["ip"].as_str()?.parse().ok()
}

/// The status without these addresses; `None` if it shows none of them.
pub(crate) fn without(service: &Value, gone: &[IpAddr]) -> Option<Value> {
    let stays = |entry: &Value| !address(entry).is_some_and(|address| gone.contains(&address));
    let after: Vec<Value> = entries(service).into_iter().filter(stays).collect();
    (after != entries(service)).then(|| with_ingress(service, after))
}

/// The status with these addresses and no others; `None` if that is what it shows. Entries that stay keep the other fields,
/// which the API server adds.
pub(crate) fn with(service: &Value, addresses: &[IpAddr]) -> Option<Value> {
    let mut after = entries(service);
    after.retain(|entry| address(entry).is_some_and(|address| addresses.contains(&address)));
    let known: Vec<IpAddr> = after.iter().filter_map(address).collect();
    let new = addresses.iter().filter(|one| !known.contains(one));
    after.extend(new.map(|address| json!({"ip": address.to_string()})));
    (after != entries(service)).then(|| with_ingress(service, after))
}

fn with_ingress(service: &Value, ingress: Vec<Value>) -> Value {
    let mut status = service["status"].as_object().cloned().unwrap_or_default();
    status.insert("loadBalancer".to_owned(), json!({ "ingress": ingress }));
    Value::Object(status)
}

/// This status, or the Service's own one, with the condition for this problem, or without it; `None` if nothing changes.
pub(crate) fn with_problem(
    service: &Value,
    status: Option<Value>,
    problem: Option<&str>,
    now: Timestamp,
) -> Option<Value> {
    let before = service["status"].as_object().cloned().unwrap_or_default();
    let mut conditions = before.get("conditions").and_then(Value::as_array).cloned().unwrap_or_default();
    let known_conditions = conditions.clone();
    let position = conditions.iter().position(|condition| condition["type"] == CONDITION);
    let known = position.map(|position| conditions.remove(position));
    if let Some(problem) = problem {
        let is_known = known.as_ref().filter(|known| known["status"] == "False");
        let since = is_known.and_then(|known| known["lastTransitionTime"].as_str());
        let mut condition = json!({
            "type": CONDITION, "status": "False", "reason": "NotAssigned", "message": problem,
            "lastTransitionTime": since.map_or_else(|| in_seconds(now), str::to_owned),
        });
        // Services of a Kubernetes API have none.
        if let Some(generation) = service.pointer("/metadata/generation").filter(|number| number.is_u64()) {
            condition["observedGeneration"] = generation.clone();
        }
        conditions.insert(position.unwrap_or(conditions.len()), condition);
    }
    if conditions == known_conditions {
        return status;
    }
    let mut status = status.unwrap_or(Value::Object(before));
    status["conditions"] = Value::Array(conditions);
    Some(status)
}

/// RFC 3339 without fractions, as Kubernetes has it.
fn in_seconds(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
