//! Tier and Profile (`api/pkg/apis/projectcalico/v3` of Calico).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Rule;
use crate::fields::{is_label_name, is_label_value, is_object_name, list};
use crate::{FieldError, Metadata};

/// A tier.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Tier {
    /// Its name.
    pub metadata: Metadata,
    /// Its order and default action.
    #[serde(default)]
    pub spec: TierSpec,
}

/// The order and the default action of a tier.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TierSpec {
    /// A lower number comes first; absent comes last.
    #[serde(default)]
    pub order: Option<f64>,
    /// What happens to a packet that no rule of the tier decides; Deny if absent.
    #[serde(default)]
    pub default_action: Option<TierDefault>,
}

/// What happens at the end of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum TierDefault {
    /// The packet is dropped.
    #[default]
    Deny,
    /// The next tier is evaluated.
    Pass,
}

/// The tiers of every cluster: name, order, default action.
pub const WELL_KNOWN_TIERS: [(&str, f64, TierDefault); 3] = [
    ("kube-admin", 1_000.0, TierDefault::Pass),
    ("default", 1_000_000.0, TierDefault::Deny),
    ("kube-baseline", 10_000_000.0, TierDefault::Pass),
];

impl Tier {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        let name = &self.metadata.name;
        if name.contains('.') || name.len() > 63 || !is_object_name(name) {
            problems.push(FieldError::new(
                "metadata.name",
                "a tier's name has at most 63 lower-case letters, digits and dashes",
            ));
        }
        if let Some((_, order, action)) = WELL_KNOWN_TIERS.iter().find(|(known, ..)| known == name) {
            if self.spec.order.is_some_and(|given| (given - order).abs() > f64::EPSILON) {
                problems.push(FieldError::new("spec.order", format!("the order of tier {name} is {order}")));
            }
            if self.spec.default_action.unwrap_or_default() != *action {
                problems.push(FieldError::new(
                    "spec.defaultAction",
                    format!("that of tier {name} is {action:?}"),
                ));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// A profile.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Profile {
    /// Its name.
    pub metadata: Metadata,
    /// Its rules and labels.
    #[serde(default)]
    pub spec: ProfileSpec,
}

/// The rules and labels of a profile.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProfileSpec {
    /// The rules for packets into endpoints with this profile.
    #[serde(default, deserialize_with = "list")]
    pub ingress: Vec<Rule>,
    /// The rules for packets out of them.
    #[serde(default, deserialize_with = "list")]
    pub egress: Vec<Rule>,
    /// Labels that the endpoints inherit; their own labels take precedence.
    #[serde(default)]
    pub labels_to_apply: BTreeMap<String, String>,
}

impl Profile {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        for (name, value) in &self.spec.labels_to_apply {
            // The labels of namespaces and service accounts may be as long as others.
            let bare = name.strip_prefix("pcns.").or_else(|| name.strip_prefix("pcsa.")).unwrap_or(name);
            if !is_label_name(bare) || !is_label_value(value) {
                let problem = format!("{name:?}: {value:?} is no label");
                problems.push(FieldError::new("spec.labelsToApply", problem));
            }
        }
        for (rules, direction) in [(&self.spec.ingress, "ingress"), (&self.spec.egress, "egress")] {
            for (index, rule) in rules.iter().enumerate() {
                let path = format!("spec.{direction}[{index}]");
                rule.validate(&path, &mut problems);
                for (service, side) in
                    [(&rule.source.services, "source"), (&rule.destination.services, "destination")]
                {
                    if service.as_ref().is_some_and(|service| service.namespace.is_none()) {
                        let problem = "is missing: a profile has no namespace of its own";
                        problems.push(FieldError::new(format!("{path}.{side}.services.namespace"), problem));
                    }
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}
