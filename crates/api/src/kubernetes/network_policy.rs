//! `networking.k8s.io/v1` NetworkPolicy. An unknown field is rejected, as in Calico's policies.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use crate::calico::PolicyType;
use crate::fields::{Cidr, is_label_name, is_label_value, is_port_name, list};
use crate::resource::typed;
use crate::{FieldError, Metadata};

/// A policy for the pods of one namespace.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct KubernetesNetworkPolicy {
    /// Its name and namespace.
    pub metadata: Metadata,
    /// Its content.
    #[serde(default)]
    pub spec: NetworkPolicySpec,
}

/// The content of a policy.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkPolicySpec {
    /// The pods that it isolates; empty means all pods of the namespace.
    #[serde(default)]
    pub pod_selector: LabelSelector,
    /// The allowed incoming traffic.
    #[serde(default, deserialize_with = "ingress_rules")]
    pub ingress: Vec<NetworkPolicyRule>,
    /// The allowed outgoing traffic.
    #[serde(default, deserialize_with = "egress_rules")]
    pub egress: Vec<NetworkPolicyRule>,
    /// The directions in which it isolates.
    #[serde(default, deserialize_with = "list")]
    pub policy_types: Vec<PolicyType>,
}

/// One rule: peers and ports, both of which must match.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkPolicyRule {
    /// The peers (`from` of an ingress rule, `to` of an egress rule); none means everyone.
    pub peers: Vec<NetworkPolicyPeer>,
    /// The ports; none means all.
    pub ports: Vec<NetworkPolicyPort>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IngressRule {
    #[serde(default, deserialize_with = "list")]
    from: Vec<NetworkPolicyPeer>,
    #[serde(default, deserialize_with = "list")]
    ports: Vec<NetworkPolicyPort>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EgressRule {
    #[serde(default, deserialize_with = "list")]
    to: Vec<NetworkPolicyPeer>,
    #[serde(default, deserialize_with = "list")]
    ports: Vec<NetworkPolicyPort>,
}

fn ingress_rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NetworkPolicyRule>, D::Error> {
    let rules: Vec<IngressRule> = list(deserializer)?;
    Ok(rules
        .into_iter()
        .map(|IngressRule { from, ports }| NetworkPolicyRule { peers: from, ports })
        .collect())
}

fn egress_rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NetworkPolicyRule>, D::Error> {
    let rules: Vec<EgressRule> = list(deserializer)?;
    Ok(rules.into_iter().map(|EgressRule { to, ports }| NetworkPolicyRule { peers: to, ports }).collect())
}

/// A peer: addresses, or pods and namespaces.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkPolicyPeer {
    /// Addresses.
    #[serde(default)]
    pub ip_block: Option<IpBlock>,
    /// Namespaces by label.
    #[serde(default)]
    pub namespace_selector: Option<LabelSelector>,
    /// Pods by label.
    #[serde(default)]
    pub pod_selector: Option<LabelSelector>,
}

/// A network without some parts of it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IpBlock {
    /// The network.
    pub cidr: Cidr,
    /// The excluded parts; each lies inside the network.
    #[serde(default, deserialize_with = "list")]
    pub except: Vec<Cidr>,
}

/// A port or a range of ports.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkPolicyPort {
    /// TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// A number or a name; absent means every port of the protocol.
    #[serde(default)]
    pub port: Option<IntOrString>,
    /// The end of a range that begins with `port`.
    #[serde(default)]
    pub end_port: Option<u16>,
}

/// A number or a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IntOrString {
    /// A number.
    Number(u16),
    /// A name.
    Name(String),
}

impl<'de> Deserialize<'de> for IntOrString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wrong = |given: &serde_json::Value| {
            serde::de::Error::custom(format!("{given} is no port: a number from 1 to 65535, or a name"))
        };
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(name) => Ok(Self::Name(name)),
            given => match given.as_u64().map(u16::try_from) {
                Some(Ok(number)) => Ok(Self::Number(number)),
                _ => Err(wrong(&given)),
            },
        }
    }
}

/// A label selector of Kubernetes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelSelector {
    /// Labels and their required values.
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
    /// Further requirements.
    #[serde(default, deserialize_with = "list")]
    pub match_expressions: Vec<Requirement>,
}

/// One requirement on a label.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// The label.
    pub key: String,
    /// `In`, `NotIn`, `Exists`, `DoesNotExist`.
    pub operator: String,
    /// The values, for `In` and `NotIn`.
    #[serde(default, deserialize_with = "list")]
    pub values: Vec<String>,
}

impl LabelSelector {
    /// The selector, if the API server would accept it. For a policy that is not understood as a whole, it decides which pods
    /// are closed. One with an invalid label would select none of them, because no pod can have such a label.
    #[must_use]
    pub fn readable(value: &serde_json::Value) -> Option<Self> {
        let selector: Self = typed(value).ok()?;
        let mut problems = Vec::new();
        selector.validate("", &mut problems);
        problems.is_empty().then_some(selector)
    }
}

impl KubernetesNetworkPolicy {
    /// The directions in which it isolates, with the API server's defaults (policy decision 10).
    #[must_use]
    pub fn effective_types(&self) -> Vec<PolicyType> {
        match (self.spec.policy_types.is_empty(), self.spec.egress.is_empty()) {
            (false, _) => self.spec.policy_types.clone(),
            (true, true) => vec![PolicyType::Ingress],
            (true, false) => vec![PolicyType::Ingress, PolicyType::Egress],
        }
    }

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        self.spec.pod_selector.validate("spec.podSelector", &mut problems);
        for (rules, direction, side) in
            [(&self.spec.ingress, "ingress", "from"), (&self.spec.egress, "egress", "to")]
        {
            for (index, rule) in rules.iter().enumerate() {
                let path = format!("spec.{direction}[{index}]");
                for (number, peer) in rule.peers.iter().enumerate() {
                    peer.validate(&format!("{path}.{side}[{number}]"), &mut problems);
                }
                for (number, port) in rule.ports.iter().enumerate() {
                    port.validate(&format!("{path}.ports[{number}]"), &mut problems);
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

impl NetworkPolicyPeer {
    pub(super) fn validate(&self, path: &str, problems: &mut Vec<FieldError>) {
        let selects = self.namespace_selector.is_some() || self.pod_selector.is_some();
        match &self.ip_block {
            Some(_) if selects => {
                problems.push(FieldError::new(path, "ipBlock may not stand beside selectors"))
            }
            Some(block) => {
                for (index, Cidr(except)) in block.except.iter().enumerate() {
                    if !block.cidr.0.contains(except) || block.cidr.0 == *except {
                        let problem =
                            format!("{except} does not lie inside {}, as a part of it", block.cidr.0);
                        problems.push(FieldError::new(format!("{path}.ipBlock.except[{index}]"), problem));
                    }
                }
            }
            None if !selects => {
                problems.push(FieldError::new(path, "needs ipBlock, namespaceSelector or podSelector"))
            }
            None => {}
        }
        for (selector, field) in
            [(&self.namespace_selector, "namespaceSelector"), (&self.pod_selector, "podSelector")]
        {
            if let Some(selector) = selector {
                selector.validate(&format!("{path}.{field}"), problems);
            }
        }
    }
}

impl NetworkPolicyPort {
    fn validate(&self, path: &str, problems: &mut Vec<FieldError>) {
        let mut wrong =
            |field: &str, problem: String| problems.push(FieldError::new(format!("{path}.{field}"), problem));
        if let Some(protocol) = self.protocol.as_deref().filter(|name| !["TCP", "UDP", "SCTP"].contains(name))
        {
            wrong("protocol", format!("{protocol:?} is none of TCP, UDP, SCTP"));
        }
        match (&self.port, self.end_port) {
            (Some(IntOrString::Name(name)), None) if is_port_name(name) => {}
            (Some(IntOrString::Name(name)), None) => wrong("port", format!("{name:?} is no name of a port")),
            (Some(IntOrString::Name(_)), Some(_)) => wrong("endPort", "needs a port that is a number".into()),
            (Some(IntOrString::Number(0)), _) => wrong("port", "0 is no port".into()),
            (Some(IntOrString::Number(first)), Some(last)) if last < *first => {
                wrong("endPort", format!("{last} lies before port {first}"));
            }
            (None, Some(_)) => wrong("endPort", "needs port".into()),
            _ => {}
        }
    }
}

impl LabelSelector {
    pub(super) fn validate(&self, path: &str, problems: &mut Vec<FieldError>) {
        for (name, value) in &self.match_labels {
            let path = format!("{path}.matchLabels.{name}");
            if !is_label_name(name) {
                problems.push(FieldError::new(&path, format!("{name:?} is no label name")));
            }
            if !is_label_value(value) {
                problems.push(FieldError::new(&path, format!("{value:?} is no label value")));
            }
        }
        for (index, requirement) in self.match_expressions.iter().enumerate() {
            let path = format!("{path}.matchExpressions[{index}]");
            if !is_label_name(&requirement.key) {
                problems.push(FieldError::new(
                    format!("{path}.key"),
                    format!("{:?} is no label name", requirement.key),
                ));
            }
            if let Some(value) = requirement.values.iter().find(|value| !is_label_value(value)) {
                problems
                    .push(FieldError::new(format!("{path}.values"), format!("{value:?} is no label value")));
            }
            match (requirement.operator.as_str(), requirement.values.is_empty()) {
                ("In" | "NotIn", true) => {
                    problems.push(FieldError::new(format!("{path}.values"), "needs at least one value"));
                }
                ("Exists" | "DoesNotExist", false) => {
                    problems.push(FieldError::new(format!("{path}.values"), "takes no values"));
                }
                ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
                (other, _) => {
                    let problem = format!("{other:?} is none of In, NotIn, Exists, DoesNotExist");
                    problems.push(FieldError::new(format!("{path}.operator"), problem));
                }
            }
        }
    }
}
