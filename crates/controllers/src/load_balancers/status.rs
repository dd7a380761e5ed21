//! What the status of a Service says about its addresses. Pure.

use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// The condition of a Service that lacks an address that it asks for. A Service with its addresses has no such condition.
const CONDITION: &str = "tortie.io/LoadBalancerAddress";

/// The addresses of a Service and what is said about them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report<'a> {
    /// All of them if the Service is Tortie's; otherwise, only the `removed` ones are changed.
    pub(crate) addresses: Option<&'a [IpAddr]>,
    /// Those that the Service has no more.
    pub(crate) removed: &'a [IpAddr],
    /// Why it lacks an address.
    pub(crate) problem: Option<&'a str>,
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

impl Report<'_> {
    /// The new status of the Service; `None` if it does not change.
    pub(crate) fn status(&self, service: &Value, now: Timestamp) -> Option<Value> {
        let before = service["status"].as_object().cloned().unwrap_or_default();
        let mut after = before.clone();
        let ingress = self.ingress(service);
        if ingress != entries(service) {
            after.insert("loadBalancer".to_owned(), json!({ "ingress": ingress }));
        }
        if let Some(conditions) = self.conditions(&before, service, now) {
            after.insert("conditions".to_owned(), Value::Array(conditions));
        }
        (after != before).then_some(Value::Object(after))
    }

    /// Entries that stay keep their other fields, which the API server adds.
    fn ingress(&self, service: &Value) -> Vec<Value> {
        let mut entries = entries(service);
        entries.retain(|entry| match (self.addresses, address(entry)) {
            (Some(all), Some(address)) => all.contains(&address),
            (Some(_), None) => false,
            (None, Some(address)) => !self.removed.contains(&address),
            (None, None) => true,
        });
        let known: Vec<IpAddr> = entries.iter().filter_map(address).collect();
        let new = self.addresses.unwrap_or_default().iter().filter(|one| !known.contains(one));
        entries.extend(new.map(|address| json!({"ip": address.to_string()})));
        entries
    }

    /// The new conditions; `None` if they stay.
    fn conditions(&self, status: &Map<String, Value>, service: &Value, now: Timestamp) -> Option<Vec<Value>> {
        let mut conditions = status.get("conditions").and_then(Value::as_array).cloned().unwrap_or_default();
        let before = conditions.clone();
        let position = conditions.iter().position(|condition| condition["type"] == CONDITION);
        let known = position.map(|position| conditions.remove(position));
        if let Some(problem) = self.problem {
            let is_known = known.as_ref().filter(|known| known["status"] == "False");
            let since = is_known.and_then(|known| known["lastTransitionTime"].as_str());
            let condition = json!({
                "type": CONDITION, "status": "False", "reason": "NotAssigned", "message": problem,
                "lastTransitionTime": since.map_or_else(|| in_seconds(now), str::to_owned),
                "observedGeneration": service.pointer("/metadata/generation").and_then(Value::as_u64).unwrap_or(0),
            });
            conditions.insert(position.unwrap_or(conditions.len()), condition);
        }
        (conditions != before).then_some(conditions)
    }
}

/// RFC 3339 without fractions, as Kubernetes has it.
fn in_seconds(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
