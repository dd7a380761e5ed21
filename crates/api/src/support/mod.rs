//! What Tortie does with each field of Calico's kinds: one table, which apply, agents and docs/fields.md use. Nothing
//! may be accepted and then ignored: a field is implemented, rejected, or reported when it is set.

mod annotations;
mod bgp;
mod controllers;
mod felix;
mod pools;
mod takes;

use serde_json::Value;

pub use self::annotations::{
    ANNOTATIONS, REQUESTS, Requested, refused_annotation, requested, unsupported_annotation,
};
pub use self::pools::{
    Pool, WINDOWS_BLOCK_BITS, WindowsNetwork, WindowsNode, conflicts, ipip_beside_windows,
    is_for_load_balancers, is_protected, is_terminating, is_windows, low_vni_beside_windows, node_networks,
    overlapping_nodes, plain_beside_overlays, set_finalizer, set_protected, unfit_for_windows,
    without_encapsulation,
};
pub use self::takes::Takes;
use crate::calico::FelixConfiguration;
use crate::{FieldError, Key, Kind};

/// What Tortie does with a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Tortie implements the field.
    Implemented,
    /// Tortie does not implement it: `tortie apply` rejects it, and agents report it. The text has the reason and the
    /// remedy.
    Rejected(&'static str),
    /// It has no effect, which is harmless: `tortie apply` warns, and agents report it. The text says what applies
    /// instead.
    Reported(&'static str),
}

/// A field of `spec`.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name; with dots, the path below `spec`.
    pub name: &'static str,
    /// The values that it takes.
    pub takes: Takes,
    /// What Tortie does with it.
    pub state: State,
    /// The values that request what Tortie does anyway; they give no finding.
    pub usual: &'static [&'static str],
}

const fn field(name: &'static str, takes: Takes, state: State, usual: &'static [&'static str]) -> Field {
    Field { name, takes, state, usual }
}

impl Field {
    /// The value of the field in an object, if it is set.
    fn in_object<'a>(&self, object: &'a Value) -> Option<&'a Value> {
        let path = self.name.split('.').try_fold(object.get("spec")?, |value, name| value.get(name));
        path.filter(|value| !value.is_null())
    }

    /// Whether the value requests what Tortie does anyway.
    fn is_usual(&self, value: &Value) -> bool {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let alike = |usual: &&&str| match self.takes {
            Takes::AnyCase(_) => usual.eq_ignore_ascii_case(&text),
            _ => **usual == text,
        };
        self.usual.iter().find(alike).is_some()
    }
}

/// The fields of `spec` of a kind with a table. Other kinds have none: their types reject unknown fields.
#[must_use]
pub fn fields(kind: Kind) -> Option<&'static [Field]> {
    match kind {
        Kind::FelixConfiguration => Some(felix::FIELDS),
        Kind::IpPool => Some(pools::FIELDS),
        Kind::KubeControllersConfiguration => Some(controllers::FIELDS),
        Kind::BgpPeer => Some(bgp::PEER),
        Kind::BgpConfiguration => Some(bgp::CONFIGURATION),
        Kind::BgpFilter => Some(bgp::FILTER),
        Kind::ClusterInformation => Some(bgp::CLUSTER),
        Kind::CalicoNodeStatus => Some(bgp::STATUS),
        _ => None,
    }
}

/// Reports every value of a wrong type, every unknown field, and a name that is never read.
pub(crate) fn check(key: &Key, value: &Value) -> Vec<FieldError> {
    let mut problems = Vec::new();
    if !matches!(key.kind, Kind::FelixConfiguration | Kind::IpPool) {
        let fields = fields(key.kind).unwrap_or_default();
        let given = fields.iter().filter_map(|field| Some((field, field.in_object(value)?)));
        let wrong = given.filter_map(|(field, value)| Some((field, field.takes.problem(value)?)));
        problems
            .extend(wrong.map(|(field, problem)| FieldError::new(format!("spec.{}", field.name), problem)));
    }
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
        FelixConfiguration::BGP_FROM_PODS,
        FelixConfiguration::POD_SOURCES_FROM_OUTSIDE,
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

/// The fields that are set and rejected, for `tortie apply`.
#[must_use]
pub fn rejected(kind: Kind, value: &Value) -> Vec<FieldError> {
    unsupported(kind, value, |state| match state {
        State::Rejected(why) => Some(why),
        State::Implemented | State::Reported(_) => None,
    })
}

/// The fields that are set and have no effect, harmlessly: `tortie apply` warns of them.
#[must_use]
pub fn reported(kind: Kind, value: &Value) -> Vec<FieldError> {
    let mut found = without_effect(kind, value);
    if kind == Kind::IpPool {
        found.extend(without_encapsulation(value));
    }
    if kind == Kind::FelixConfiguration && value["spec"]["ipipEnabled"] == false {
        let problem = "nodes have no IPIP then, so pods of pools with ipipMode on different nodes cannot reach each other";
        found.push(FieldError::new("spec.ipipEnabled", problem));
    }
    found
}

/// The parts of a stored object that are not in force, whoever stored it. For a pool,
/// [`without_encapsulation`] comes on top of it.
#[must_use]
pub fn not_in_force(key: &Key, value: &Value) -> Vec<FieldError> {
    [check(key, value), rejected(key.kind, value), without_effect(key.kind, value)].concat()
}

fn without_effect(kind: Kind, value: &Value) -> Vec<FieldError> {
    let mut found = unsupported(kind, value, |state| match state {
        State::Reported(why) => Some(why),
        State::Implemented | State::Rejected(_) => None,
    });
    if kind == Kind::FelixConfiguration {
        found.extend(felix::other_features(&value["spec"]));
    }
    found
}

fn unsupported(kind: Kind, value: &Value, why: impl Fn(State) -> Option<&'static str>) -> Vec<FieldError> {
    let set = fields(kind).unwrap_or_default().iter().filter_map(|field| {
        let value = field.in_object(value)?;
        let why = why(field.state).filter(|_| !field.is_usual(value))?;
        Some(FieldError::new(format!("spec.{}", field.name), format!("it has no effect: {why}")))
    });
    set.collect()
}

fn given(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let spec = value.get("spec").and_then(Value::as_object).into_iter().flatten();
    spec.filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.as_str(), value))
}
