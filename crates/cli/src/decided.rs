//! What decided, in words, with the place that it was written at.

use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_policy::oracle::{DecidedBy, PolicyName, Snapshot, Stored};

/// `NetworkPolicy web/back, rule 1 (web.yml:29)`.
pub(crate) fn by(snapshot: &Snapshot, direction: Direction, decided: &DecidedBy) -> String {
    match decided {
        DecidedBy::Rule { policy, .. } if policy.kind == "Profile" && stored(snapshot, policy).is_none() => {
            "no policy: the namespace's profile allows".to_owned()
        }
        DecidedBy::Rule { policy, number } => {
            format!("{policy}, rule {number}{}", rule_place(snapshot, policy, direction, *number))
        }
        DecidedBy::NotUnderstood { policy } => {
            format!("{policy}, which cannot be understood{}", place(snapshot, policy, ""))
        }
        DecidedBy::EndOfTier { tier } => format!("the end of tier {tier}: no rule matches"),
        DecidedBy::NoProfile => "no policy and no profile".to_owned(),
        // Of host endpoints and nodes.
        DecidedBy::Nobody | DecidedBy::EndpointToHost { .. } => "no policy".to_owned(),
    }
}

/// Where a rule was written, in parentheses; empty where that is not known.
pub(crate) fn rule_place(
    snapshot: &Snapshot,
    policy: &PolicyName,
    direction: Direction,
    number: usize,
) -> String {
    let side = if direction == Direction::Ingress { "ingress" } else { "egress" };
    place(snapshot, policy, &format!("spec.{side}[{}]", number.saturating_sub(1)))
}

fn place(snapshot: &Snapshot, policy: &PolicyName, field: &str) -> String {
    let place = stored(snapshot, policy).and_then(|stored| stored.place(field));
    place.map_or_else(String::new, |place| format!(" ({place})"))
}

fn stored<'a>(snapshot: &'a Snapshot, policy: &PolicyName) -> Option<&'a Stored> {
    let kind = Kind::all().find(|kind| kind.to_string() == policy.kind)?;
    snapshot.get(&Key { kind, namespace: policy.namespace.clone(), name: policy.name.clone() })
}
