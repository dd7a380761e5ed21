//! The policies of a run. Each pod has a color, and each color has at most one policy for each direction, of a kind of its own.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use crate::dice::Dice;

/// The namespace of all pods.
pub(crate) const NAMESPACE: &str = "chaos";
/// The label that has a pod's color.
pub(crate) const LABEL: &str = "color";
/// The port of all pods, for both protocols.
pub(crate) const PORT: u16 = 7000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Color {
    Red,
    Green,
    Blue,
}

impl Color {
    pub(crate) const ALL: [Self; 3] = [Self::Red, Self::Green, Self::Blue];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Red => "red",
            Self::Green => "green",
            Self::Blue => "blue",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    pub(crate) const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    fn type_name(self) -> &'static str {
        match self {
            Self::Ingress => "Ingress",
            Self::Egress => "Egress",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    pub(crate) const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

/// The colors that the pods of a policy's color may exchange packets with, in the policy's direction. All others are denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule(pub(crate) BTreeSet<(Color, Protocol)>);

/// The pods of a color, in a direction.
pub(crate) type Subject = (Direction, Color);

/// All subjects.
pub(crate) fn subjects() -> impl Iterator<Item = Subject> {
    Direction::ALL.into_iter().flat_map(|direction| Color::ALL.map(|color| (direction, color)))
}

/// True if the policy of a subject, if there is one, allows packets to or from a pod. `None` is a pod without a color, or one that is
/// not known yet: no rule selects it.
pub(crate) fn allows(policy: Option<&Rule>, other: Option<Color>, protocol: Protocol) -> bool {
    match (policy, other) {
        (None, _) => true,
        (Some(rule), Some(color)) => rule.0.contains(&(color, protocol)),
        (Some(_), None) => false,
    }
}

impl Rule {
    pub(crate) fn random(dice: &mut Dice) -> Self {
        let all = Color::ALL.into_iter().flat_map(|color| Protocol::ALL.map(|protocol| (color, protocol)));
        Self(all.filter(|_| dice.percent(50)).collect())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nobody");
        }
        let words: Vec<String> =
            self.0.iter().map(|(color, protocol)| format!("{}/{}", color.name(), protocol.name())).collect();
        f.write_str(&words.join(" "))
    }
}

/// A policy as text, for people.
pub(crate) fn shown(policy: Option<&Rule>) -> String {
    policy.map_or_else(|| "no policy".to_owned(), Rule::to_string)
}

/// The key of a subject's policy.
pub(crate) fn key((direction, color): Subject) -> Key {
    let name = format!("{}-{}", direction.name(), color.name());
    match color {
        Color::Red => Key::namespaced(Kind::KubernetesNetworkPolicy, NAMESPACE, name),
        Color::Green => Key::namespaced(Kind::NetworkPolicy, NAMESPACE, name),
        Color::Blue => Key::global(Kind::GlobalNetworkPolicy, name),
    }
}

/// The manifest of a subject's policy.
pub(crate) fn manifest(subject: Subject, rule: &Rule) -> Value {
    let (direction, color) = subject;
    let types = [direction.type_name()];
    let metadata = json!({"name": key(subject).name, "namespace": NAMESPACE});
    match color {
        Color::Red => {
            let rules: Vec<Value> = rule.0.iter().map(|allowed| of_kubernetes(direction, *allowed)).collect();
            json!({
                "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata,
                "spec": {
                    "podSelector": {"matchLabels": {LABEL: color.name()}},
                    "policyTypes": types, direction.name(): rules,
                },
            })
        }
        Color::Green => json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy", "metadata": metadata,
            "spec": of_calico(direction, color, rule),
        }),
        Color::Blue => json!({
            "apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": {"name": key(subject).name},
            "spec": of_calico(direction, color, rule),
        }),
    }
}

fn of_kubernetes(direction: Direction, (color, protocol): (Color, Protocol)) -> Value {
    let peers = match direction {
        Direction::Ingress => "from",
        Direction::Egress => "to",
    };
    json!({
        peers: [{"podSelector": {"matchLabels": {LABEL: color.name()}}}],
        "ports": [{"protocol": protocol.name(), "port": PORT}],
    })
}

fn of_calico(direction: Direction, color: Color, rule: &Rule) -> Value {
    let selects = |color: Color| format!("{LABEL} == '{}'", color.name());
    let rules = rule.0.iter().map(|(peer, protocol)| {
        let mut rule = json!({
            "action": "Allow", "protocol": protocol.name(), "source": {}, "destination": {"ports": [PORT]},
        });
        let side = match direction {
            Direction::Ingress => "source",
            Direction::Egress => "destination",
        };
        rule[side]["selector"] = json!(selects(*peer));
        rule
    });
    let rules: Vec<Value> = rules.collect();
    json!({"selector": selects(color), "types": [direction.type_name()], direction.name(): rules})
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_manifest_can_be_applied_and_has_its_key() {
        let mut dice = Dice::new(1);
        for subject in subjects() {
            for _ in 0..20 {
                let text = manifest(subject, &Rule::random(&mut dice)).to_string();
                let objects = tortie_api::manifest::read("policy", &text).unwrap();
                assert_eq!(objects.len(), 1);
                assert_eq!(objects[0].key, key(subject), "{text}");
            }
        }
    }

    #[test]
    fn a_policy_denies_what_it_does_not_name() {
        let rule = Rule([(Color::Red, Protocol::Tcp)].into());
        assert!(allows(Some(&rule), Some(Color::Red), Protocol::Tcp));
        assert!(!allows(Some(&rule), Some(Color::Red), Protocol::Udp));
        assert!(!allows(Some(&rule), Some(Color::Blue), Protocol::Tcp));
        assert!(!allows(Some(&rule), None, Protocol::Tcp));
        assert!(allows(None, None, Protocol::Udp));
        assert_eq!(rule.to_string(), "red/TCP");
    }
}
