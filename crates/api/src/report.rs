//! The report of a node (policy decision 29). Policies have no status field that Tortie may use.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::net::{Direction, PortRange, Protocol};
use crate::{Key, Metadata, Positions};

/// The report of one node, under the node's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// `tortie.io/v1`.
    pub api_version: String,
    /// `NodeReport`.
    pub kind: String,
    /// Its name is the node's.
    pub metadata: Metadata,
    /// The content of the report.
    pub status: NodeStatus,
}

impl NodeReport {
    /// The annotation by which somebody who waits asks for a report: the positions (as JSON) that the next report must
    /// reach.
    pub const REQUESTED: &str = "tortie.io/requested-positions";

    /// The positions that somebody waits for. A damaged annotation asks for nothing.
    #[must_use]
    pub fn requested(&self) -> Positions {
        let annotation = self.metadata.annotations.get(Self::REQUESTED);
        annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

/// The content of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// `linux` or `windows`.
    pub os: String,
    /// The version of the agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// When the report was written (RFC 3339).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time: String,
    /// The interval at which the node writes reports at least, in seconds. A report that is older than three intervals is
    /// stale.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub heartbeat_seconds: u64,
    /// The node's start that the report belongs to, as in `status.nodeInfo.bootID` of the Node; empty if the node does not
    /// know it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// The kinds that the node follows. Everything up to these positions is in force on the node, except for what
    /// `conditions` names.
    #[serde(default)]
    pub positions: Positions,
    /// The number of pods on the node.
    pub endpoints: usize,
    /// The operator's own rules that come before policy for the node's pods, in order; rules of the firewall have no
    /// order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub static_rules: Vec<StaticRule>,
    /// What the operator should know, limited in number; `more` counts the rest.
    #[serde(default)]
    pub conditions: Vec<ReportedCondition>,
    /// The number of conditions beyond those listed.
    #[serde(default)]
    pub more: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A rule for every pod of a node before policy: a static rule of Windows (policy decision 26).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StaticRule {
    /// Its name.
    pub name: String,
    /// Where it is evaluated.
    #[serde(default, skip_serializing_if = "StaticRuleType::is_switch")]
    pub rule_type: StaticRuleType,
    /// Whether matching packets pass.
    pub allow: bool,
    /// Whether it comes after the rule by which the node reaches its own pods (policy decision 2), so that it does
    /// not apply to such packets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub after_own_node: bool,
    /// Packets to the pod, or from it.
    pub direction: Direction,
    /// The IP protocol number; absent means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// The pod's addresses and ports.
    #[serde(default)]
    pub local: StaticSide,
    /// The peer's addresses and ports.
    #[serde(default)]
    pub remote: StaticSide,
}

/// Where a static rule is evaluated: the RuleType of its ACL (docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StaticRuleType {
    /// The switch: the first matching rule decides, and policy comes after the last one.
    #[default]
    Switch,
    /// The node's firewall, which a packet must pass as well: a rule that does not allow denies, whatever other rules
    /// say; a rule that allows decides nothing.
    Host,
}

impl StaticRuleType {
    fn is_switch(&self) -> bool {
        *self == Self::Switch
    }
}

/// One side of a packet in a static rule. Empty means any.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StaticSide {
    /// Networks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<IpNet>,
    /// Ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortRange>,
}

impl StaticRule {
    /// The rule that decides among those that `matches` selects: a denying rule of the firewall, otherwise the first
    /// rule of the switch.
    pub fn decisive(rules: &[Self], matches: impl Fn(&Self) -> bool) -> Option<&Self> {
        let of = |rule_type| rules.iter().filter(move |rule| rule.rule_type == rule_type);
        let denies = of(StaticRuleType::Host).find(|rule| !rule.allow && matches(rule));
        denies.or_else(|| of(StaticRuleType::Switch).find(|rule| matches(rule)))
    }

    /// Whether it matches a packet of this protocol and direction between these ends, each an address and a port.
    #[must_use]
    pub fn matches(
        &self,
        direction: Direction,
        protocol: Protocol,
        source: (IpAddr, u16),
        destination: (IpAddr, u16),
    ) -> bool {
        let (local, remote) = match direction {
            Direction::Ingress => (destination, source),
            Direction::Egress => (source, destination),
        };
        self.direction == direction
            && self.protocol.is_none_or(|number| number == protocol.0)
            && self.local.has(protocol, local)
            && self.remote.has(protocol, remote)
    }
}

impl StaticSide {
    fn has(&self, protocol: Protocol, (address, port): (IpAddr, u16)) -> bool {
        let has_port = || protocol.has_ports() && self.ports.iter().any(|range| range.contains(port));
        (self.nets.is_empty() || self.nets.iter().any(|net| net.contains(&address)))
            && (self.ports.is_empty() || has_port())
    }
}

/// One condition of a node or of one of its pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportedCondition {
    /// The pod or other object that is affected; absent for the node itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectRef>,
    /// The objects that cause it, such as a policy and its rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub about: Vec<ObjectRef>,
    /// A short, stable name in CamelCase. Newer nodes may report reasons that are not known here.
    pub reason: String,
    /// One sentence: the problem, and what Tortie does about it. It does not repeat the objects.
    pub message: String,
}

impl ReportedCondition {
    /// Whether it concerns the object, as the affected object or as a cause.
    #[must_use]
    pub fn concerns(&self, key: &Key) -> bool {
        self.object.iter().chain(&self.about).any(|object| object.is(key))
    }

    /// The causes and the message, as one line.
    #[must_use]
    pub fn text(&self) -> String {
        with_objects(&self.about, &self.message)
    }
}

/// A message with the objects that it is about before it: `NetworkPolicy a/b, Ingress rule 1: …`.
#[must_use]
pub fn with_objects(about: &[ObjectRef], message: &str) -> String {
    if about.is_empty() {
        return message.to_owned();
    }
    let objects: Vec<String> = about.iter().map(ObjectRef::to_string).collect();
    format!("{}: {message}", objects.join("; "))
}

/// An object that a condition is about, and one of its rules if that matters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// The kind's name as [`Kind`](crate::Kind) displays it. It is a string because newer nodes may know more kinds.
    pub kind: String,
    /// Empty for kinds without namespaces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// One of its rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<RuleRef>,
}

/// A rule of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleRef {
    /// The list that the rule is in.
    pub direction: Direction,
    /// Its number in the list, counted from one.
    pub number: usize,
}

impl ObjectRef {
    /// The same object, with one of its rules. `index` counts from zero.
    #[must_use]
    pub fn rule(self, direction: Direction, index: usize) -> Self {
        Self { rule: Some(RuleRef { direction, number: index + 1 }), ..self }
    }

    /// Whether this is the object with the key.
    #[must_use]
    pub fn is(&self, key: &Key) -> bool {
        self.name == key.name && self.namespace == key.namespace && self.kind == key.kind.to_string()
    }
}

impl From<&Key> for ObjectRef {
    fn from(key: &Key) -> Self {
        let Key { kind, namespace, name } = key;
        Self { kind: kind.to_string(), namespace: namespace.clone(), name: name.clone(), rule: None }
    }
}

impl From<Key> for ObjectRef {
    fn from(key: Key) -> Self {
        Self::from(&key)
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, rule } = self;
        match namespace.is_empty() {
            true => write!(f, "{kind} {name}")?,
            false => write!(f, "{kind} {namespace}/{name}")?,
        }
        match rule {
            Some(RuleRef { direction, number }) => write!(f, ", {direction:?} rule {number}"),
            None => Ok(()),
        }
    }
}
