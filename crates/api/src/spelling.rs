//! Words of policies whose case is not that of Calico's API.
//!
//! Calico's API rejects them. Its definitions of the group `crd.projectcalico.org/v1` have no lists of words up to v3.31, so kubectl stores
//! them there, and Calico's agents read them in lower case (`libcalico-go/lib/backend/syncersv1/updateprocessors`: `rules.go`,
//! `networkpolicyprocessor.go`). So stored policies are read in any case, and manifests of Calico's API are not.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{EnumAccess, IntoDeserializer, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::calico::PolicyType;
use crate::fields::list;
use crate::net::{Action, Protocol};
use crate::{FieldError, Kind};

const ACTIONS: &[&str] = &["Allow", "Deny", "Log", "Pass"];
const TYPES: &[&str] = &["Ingress", "Egress"];

/// The words of a policy or profile that Calico's API would reject only for their case.
#[must_use]
pub fn check(kind: Kind, value: &Value) -> Vec<FieldError> {
    if !matches!(
        kind,
        Kind::NetworkPolicy
            | Kind::GlobalNetworkPolicy
            | Kind::StagedNetworkPolicy
            | Kind::StagedGlobalNetworkPolicy
            | Kind::Profile
    ) {
        return Vec::new();
    }
    let mut found = Vec::new();
    let types = value["spec"]["types"].as_array().into_iter().flatten();
    for (index, word) in types.enumerate() {
        found.extend(problem(&format!("spec.types[{index}]"), word, |text| canonical(TYPES, text)));
    }
    for direction in ["ingress", "egress"] {
        let rules = value["spec"][direction].as_array().into_iter().flatten();
        for (index, rule) in rules.enumerate() {
            let path = |field: &str| format!("spec.{direction}[{index}].{field}");
            found.extend(problem(&path("action"), &rule["action"], |text| canonical(ACTIONS, text)));
            for field in ["protocol", "notProtocol"] {
                let name = |text: &str| Protocol::from_name(text).map(|protocol| protocol.to_string());
                found.extend(problem(&path(field), &rule[field], name));
            }
        }
    }
    found
}

/// Writes the words of a policy or profile as Calico's API has them. Its meaning stays.
pub fn correct(kind: Kind, value: &mut Value) {
    correct_each(kind, value, |_, _| true);
}

/// Writes as Calico's API does the words that an older value of the object has in the same field, of any rule.
pub fn correct_known(kind: Kind, value: &mut Value, old: &Value) {
    let field = |path: &str| path.replace(|c: char| c.is_ascii_digit(), "");
    let word = |path: &str| old.pointer(&pointer(path)).and_then(Value::as_str).map(str::to_owned);
    let known: BTreeSet<(String, String)> = check(kind, old)
        .into_iter()
        .filter_map(|error| Some((field(&error.path), word(&error.path)?)))
        .collect();
    correct_each(kind, value, |path, word| known.contains(&(field(path), word.to_owned())));
}

/// The JSON pointer of a path.
fn pointer(path: &str) -> String {
    format!("/{}", path.replace('[', "/").replace(']', "").replace('.', "/"))
}

fn correct_each(kind: Kind, value: &mut Value, is_meant: impl Fn(&str, &str) -> bool) {
    for FieldError { path, .. } in check(kind, value) {
        let Some(word) = value.pointer_mut(&pointer(&path)) else { continue };
        let written = word.as_str().unwrap_or_default().to_owned();
        if !is_meant(&path, &written) {
            continue;
        }
        let name = Protocol::from_name(&written).map(|protocol| protocol.to_string());
        if let Some(right) = canonical(TYPES, &written).or_else(|| canonical(ACTIONS, &written)).or(name) {
            *word = Value::String(right);
        }
    }
}

fn problem(path: &str, word: &Value, canonical: impl Fn(&str) -> Option<String>) -> Option<FieldError> {
    let written = word.as_str()?;
    let right = canonical(written).filter(|right| right != written)?;
    Some(FieldError::new(path, format!("{written:?} must be written {right}")))
}

fn canonical(words: &[&str], text: &str) -> Option<String> {
    words.iter().find(|word| word.eq_ignore_ascii_case(text)).map(|word| (*word).to_owned())
}

/// A word of an enum, in any case. Any other text reaches the type as it is, so that its error names it.
struct WordVisitor<T> {
    words: &'static [&'static str],
    of: PhantomData<T>,
}

impl<T> WordVisitor<T> {
    /// Reads as the derived implementation does, so that the kinds of fields stay known.
    fn read<'de, D: Deserializer<'de>>(
        deserializer: D,
        name: &'static str,
        words: &'static [&'static str],
    ) -> Result<T, D::Error>
    where
        T: Deserialize<'de>,
    {
        deserializer.deserialize_enum(name, words, Self { words, of: PhantomData })
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for WordVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one of {}", self.words.join(", "))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<T, A::Error> {
        let (text, variant) = data.variant::<String>()?;
        variant.unit_variant()?;
        T::deserialize(canonical(self.words, &text).unwrap_or(text).into_deserializer())
    }
}

/// Reads an action in any case.
pub(crate) fn action<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Action, D::Error> {
    WordVisitor::read(deserializer, "Action", ACTIONS)
}

fn direction<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PolicyType, D::Error> {
    WordVisitor::read(deserializer, "PolicyType", TYPES)
}

/// Reads a list of directions in any case.
pub(crate) fn types<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PolicyType>, D::Error> {
    #[derive(Deserialize)]
    #[serde(transparent)]
    struct AnyDirection(#[serde(deserialize_with = "direction")] PolicyType);
    Ok(list::<D, AnyDirection>(deserializer)?.into_iter().map(|AnyDirection(direction)| direction).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_words_that_the_object_has_had_may_have_another_case() {
        let policy = |ingress: &[Value]| json!({"spec": {"types": ["ingress"], "ingress": ingress}});
        let old = policy(&[json!({"action": "allow", "protocol": "TCP"})]);
        for (new, wrong) in [
            (policy(&[json!({"action": "allow"})]), vec![]),
            (policy(&[json!({"action": "Deny"}), json!({"action": "allow"})]), vec![]),
            (policy(&[json!({"action": "deny"})]), vec!["spec.ingress[0].action"]),
            (policy(&[json!({"action": "allow", "protocol": "tcp"})]), vec!["spec.ingress[0].protocol"]),
            (
                json!({"spec": {"types": ["egress"], "egress": [{"action": "allow"}]}}),
                vec!["spec.types[0]", "spec.egress[0].action"],
            ),
        ] {
            let mut judged = new.clone();
            correct_known(Kind::NetworkPolicy, &mut judged, &old);
            let left: Vec<String> =
                check(Kind::NetworkPolicy, &judged).into_iter().map(|error| error.path).collect();
            assert_eq!(left, wrong, "{new}");
        }
    }
}
