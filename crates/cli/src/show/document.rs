//! What is in force for a pod as a JSON document.

use serde_json::{Value, json};
use tortie_agent::control::ShownEndpoint;
use tortie_api::net::Direction;

use super::ShownPod;
use crate::words::{self, Meanings};

pub(super) fn of(found: &ShownPod, sets: &Meanings) -> Value {
    let endpoints: Vec<Value> = found.endpoints.iter().map(|shown| of_endpoint(shown, sets)).collect();
    json!({
        "namespace": found.namespace, "pod": found.pod, "node": found.node, "endpoints": endpoints,
    })
}

fn of_endpoint(shown: &ShownEndpoint, sets: &Meanings) -> Value {
    let desired = &shown.asked;
    let policies = desired.policies.iter().map(|(id, rules)| {
        let rules = |direction: Direction| -> Vec<Value> {
            let rules = rules.direction(direction).iter();
            let rule =
                |(index, rule)| json!({"number": index + 1, "words": words::rule(rule, sets), "rule": rule});
            rules.enumerate().map(rule).collect()
        };
        json!({
            "policy": id, "ingress": rules(Direction::Ingress), "egress": rules(Direction::Egress),
        })
    });
    let described = desired
        .sets
        .iter()
        .map(|(id, members)| (id.to_string(), json!({"members": members, "words": words::set(id, sets)})));
    let mut document = json!({
        "interface": shown.id.interface,
        "containerId": desired.endpoint.container_id,
        "hostInterface": desired.endpoint.host_interface,
        "addresses": desired.endpoint.addresses,
        "program": desired.endpoint.program,
        "policies": policies.collect::<Vec<_>>(),
        "sets": described.collect::<serde_json::Map<_, _>>(),
        "conditions": shown.conditions,
    });
    match &shown.system {
        Ok(system) => document["inForce"] = json!(system),
        Err(error) => document["problem"] = json!(error.to_string()),
    }
    document
}
