//! What Tortie does with each field of the kinds that are Calico's: one table, which apply, agents and docs/fields.md read.
//! Nothing may be accepted and then ignored: a field is implemented, rejected, or reported where it is set.

mod felix;
mod pools;
mod takes;

use std::collections::BTreeMap;

use serde_json::Value;

pub use self::pools::{Pool, conflicts, node_network, overlapping_nodes};
pub use self::takes::Takes;
use crate::calico::FelixConfiguration;
use crate::{FieldError, Key, Kind};

/// What Tortie does with a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// What it says.
    Implemented,
    /// Nothing: `tortie apply` refuses it, and agents report it. The reason names the remedy.
    Rejected(&'static str),
    /// Nothing, which does no harm: `tortie apply` warns, and agents report it. The reason says what holds instead.
    Reported(&'static str),
}

/// A field of `spec`.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// The values that it takes.
    pub takes: Takes,
    /// What Tortie does with it.
    pub state: State,
    /// The values that ask for what Tortie does anyway; they give no finding.
    pub usual: &'static [&'static str],
}

const fn field(name: &'static str, takes: Takes, state: State, usual: &'static [&'static str]) -> Field {
    Field { name, takes, state, usual }
}

impl Field {
    /// Whether the value asks for what Tortie does in any case.
    fn is_usual(&self, value: &Value) -> bool {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let alike = |usual: &&&str| match self.takes {
            Takes::AnyCase(_) => usual.eq_ignore_ascii_case(&text),
            _ => **usual == text,
        };
        self.usual.iter().find(alike).is_some()
    }
}

/// The fields of `spec` of a kind that has a table; the other kinds are read whole, or refused by the field.
#[must_use]
pub fn fields(kind: Kind) -> Option<&'static [Field]> {
    match kind {
        Kind::FelixConfiguration => Some(felix::FIELDS),
        Kind::IpPool => Some(pools::FIELDS),
        _ => None,
    }
}

/// Every value of another type than its field has, every field that nobody knows, and a name that nobody reads.
pub(crate) fn check(key: &Key, value: &Value) -> Vec<FieldError> {
    let mut problems = Vec::new();
    if key.kind != Kind::FelixConfiguration {
        return problems;
    }
    let of_one_node = key.name.strip_prefix("node.").is_some_and(|node| !node.is_empty());
    if key.name != "default" && !of_one_node {
        let problem =
            format!("no node reads {:?}; it is default for all nodes, or node.NAME for one", key.name);
        problems.push(FieldError::new("metadata.name", problem));
    }
    for (name, value) in given(value) {
        let path = format!("spec.{name}");
        match felix::FIELDS.iter().find(|field| field.name == name) {
            None => problems.push(FieldError::new(path, format!("unknown field `{name}`"))),
            Some(field) => problems.extend(field.takes.problem(value).map(|it| FieldError::new(path, it))),
        }
    }
    let known = [
        FelixConfiguration::ESTABLISHED_FLOWS,
        FelixConfiguration::POLICY_COUNTERS,
        FelixConfiguration::WINDOWS_POLICY_SETS,
        FelixConfiguration::PROVEN_POLICY_SETS,
    ];
    let annotations = value.pointer("/metadata/annotations").and_then(Value::as_object);
    for (name, _) in annotations.into_iter().flatten() {
        if name.starts_with("tortie.io/") && !known.contains(&name.as_str()) {
            let problem = format!("is not known; Tortie's are {}", known.join(", "));
            problems.push(FieldError::new(format!("metadata.annotations.{name}"), problem));
        }
    }
    problems
}

/// The fields that are set and rejected: what `tortie apply` refuses.
#[must_use]
pub fn rejected(kind: Kind, value: &Value) -> Vec<FieldError> {
    unsupported(kind, value, |state| match state {
        State::Rejected(why) => Some(why),
        State::Implemented | State::Reported(_) => None,
    })
}

/// The fields that are set and do nothing, without harm: what `tortie apply` warns of.
#[must_use]
pub fn reported(kind: Kind, value: &Value) -> Vec<FieldError> {
    let mut found = unsupported(kind, value, |state| match state {
        State::Reported(why) => Some(why),
        State::Implemented | State::Rejected(_) => None,
    });
    if kind == Kind::IpPool {
        found.extend(pools::not_carried(value));
    }
    found
}

/// What of a stored object is not in force, whoever stored it: all of the above.
#[must_use]
pub fn not_in_force(key: &Key, value: &Value) -> Vec<FieldError> {
    [check(key, value), rejected(key.kind, value), reported(key.kind, value)].concat()
}

fn unsupported(kind: Kind, value: &Value, why: impl Fn(State) -> Option<&'static str>) -> Vec<FieldError> {
    let table = fields(kind).unwrap_or_default();
    let set = given(value).filter_map(|(name, value)| {
        let field = table.iter().find(|field| field.name == name)?;
        let why = why(field.state).filter(|_| !field.is_usual(value))?;
        Some(FieldError::new(format!("spec.{name}"), format!("it has no effect: {why}")))
    });
    set.collect()
}

fn given(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let spec = value.get("spec").and_then(Value::as_object).into_iter().flatten();
    spec.filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.as_str(), value))
}

/// The first annotation of a pod or of its namespace that asks for what Tortie cannot do, with the reason and the remedy.
#[must_use]
pub fn refused_annotation(annotations: &BTreeMap<String, String>) -> Option<(&str, &'static str)> {
    annotations.keys().find_map(|name| Some((name.as_str(), annotation(name)?)))
}

/// The same of a pod or namespace as it is stored, as a problem with the annotation.
#[must_use]
pub fn unsupported_annotation(value: &Value) -> Option<FieldError> {
    let annotations = value.pointer("/metadata/annotations")?.as_object()?;
    let (name, why) = annotations.keys().find_map(|name| Some((name, annotation(name)?)))?;
    let problem = format!("it is not supported, and such pods are not connected: {why}");
    Some(FieldError::new(format!("metadata.annotations.{name}"), problem))
}

/// Why an annotation is refused, if it is.
fn annotation(name: &str) -> Option<&'static str> {
    if name.starts_with("qos.projectcalico.org/") {
        return Some("limits of bandwidth, packets and connections are not supported; take it out");
    }
    match name.strip_prefix("cni.projectcalico.org/")? {
        // What the CNI plugin itself writes.
        "podIP" | "podIPs" | "containerID" => None,
        "ipAddrs" | "ipAddrsNoIpam" => {
            Some("a pod cannot ask for an address yet; take it out, and the pod gets one of its pools")
        }
        "ipv4pools" | "ipv6pools" => Some(
            "pools cannot be chosen by annotation yet; use nodeSelector or namespaceSelector of the IPPool",
        ),
        "floatingIPs" => Some("floating addresses are not supported; use a Service"),
        "hwAddr" => Some("a pod cannot ask for a MAC address; take it out"),
        "allowedSourcePrefixes" => Some("a pod's packets always need its own address; take it out"),
        _ => Some("Tortie does not know it; take it out"),
    }
}

/// The annotations that are refused, for docs/fields.md.
pub const ANNOTATIONS: &[&str] = &[
    "cni.projectcalico.org/ipAddrs",
    "cni.projectcalico.org/ipAddrsNoIpam",
    "cni.projectcalico.org/ipv4pools",
    "cni.projectcalico.org/ipv6pools",
    "cni.projectcalico.org/floatingIPs",
    "cni.projectcalico.org/hwAddr",
    "cni.projectcalico.org/allowedSourcePrefixes",
    "qos.projectcalico.org/…",
];

/// Why one of [`ANNOTATIONS`] is refused.
#[must_use]
pub fn why_refused(annotation_name: &str) -> &'static str {
    annotation(annotation_name).unwrap_or_default()
}
