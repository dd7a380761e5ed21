//! Describes what decided, with its position in a file.

use serde_json::{Value, json};
use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_oracle::{DecidedBy, PolicyName, Snapshot, Stored, Table};
use tortie_reach::{Decider, Reason, Stop};

/// `NetworkPolicy web/back, rule 1 (web.yml:29)`; for host endpoints with the table.
pub(crate) fn by(snapshot: &Snapshot, reason: &Reason) -> String {
    let Decider { by, table, reply } = &reason.decider;
    // The reply has the opposite direction.
    let direction = match (reason.stop.direction(), reply) {
        (Direction::Ingress, false) | (Direction::Egress, true) => Direction::Ingress,
        _ => Direction::Egress,
    };
    let table = match table {
        Table::Normal => "",
        Table::Untracked => ", untracked",
        Table::PreDnat => ", before DNAT",
        Table::Forward => ", forwarded",
    };
    let reply = if *reply { ", the reply" } else { "" };
    format!("{}{table}{reply}", decision(snapshot, reason.stop, direction, by))
}

/// Where the decision was made: at the receiver, at the sender's node.
pub(crate) fn stop_name(stop: Stop) -> &'static str {
    match stop {
        Stop::Sender => "out",
        Stop::SenderNode => "out of the node",
        Stop::ReceiverNode => "into the node",
        Stop::Receiver => "in",
    }
}

/// By stop; `null` where nothing applies.
pub(crate) fn by_stop(reasons: impl Iterator<Item = (Stop, String)>) -> Value {
    let mut document = json!({"egress": null, "ingress": null});
    for (stop, by) in reasons {
        let field = match stop {
            Stop::Sender => "egress",
            Stop::SenderNode => "hostEgress",
            Stop::ReceiverNode => "hostIngress",
            Stop::Receiver => "ingress",
        };
        document[field] = json!(by);
    }
    document
}

fn decision(snapshot: &Snapshot, stop: Stop, direction: Direction, decided: &DecidedBy) -> String {
    match decided {
        DecidedBy::Rule { policy, .. } if policy.kind == "Profile" && stored(snapshot, policy).is_none() => {
            let whose = if stop.is_host() { "host endpoint" } else { "namespace" };
            format!("no policy: the {whose}'s profile allows")
        }
        DecidedBy::Rule { policy, number } => {
            format!("{policy}, rule {number}{}", rule_location(snapshot, policy, direction, *number))
        }
        DecidedBy::NotUnderstood { policy } => {
            format!("{policy}, which cannot be understood{}", written(snapshot, policy, ""))
        }
        DecidedBy::EndOfTier { tier } => format!("the end of tier {tier}: no rule matches"),
        DecidedBy::NoProfile => "no policy and no profile".to_owned(),
        DecidedBy::Nobody => "no rule allows it".to_owned(),
        DecidedBy::Failsafe => "a failsafe port".to_owned(),
        DecidedBy::StaticRule { node, name } => format!("the static rule {name} of node {node}"),
        DecidedBy::BuiltIn { rule } => rule.clone(),
        DecidedBy::EndpointToHost { action } => format!("defaultEndpointToHostAction is {action}"),
    }
}

/// The position of a rule, in parentheses; empty if unknown.
pub(crate) fn rule_location(
    snapshot: &Snapshot,
    policy: &PolicyName,
    direction: Direction,
    number: usize,
) -> String {
    let side = if direction == Direction::Ingress { "ingress" } else { "egress" };
    written(snapshot, policy, &format!("spec.{side}[{}]", number.saturating_sub(1)))
}

fn written(snapshot: &Snapshot, policy: &PolicyName, field: &str) -> String {
    let location = stored(snapshot, policy).and_then(|stored| stored.location(field));
    location.map_or_else(String::new, |location| format!(" ({location})"))
}

fn stored<'a>(snapshot: &'a Snapshot, policy: &PolicyName) -> Option<&'a Stored> {
    let kind = Kind::all().find(|kind| kind.to_string() == policy.kind)?;
    snapshot.get(&Key { kind, namespace: policy.namespace.clone(), name: policy.name.clone() })
}
