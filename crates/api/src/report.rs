//! The report of a node (policy decision 29). Policies have no status field that Tortie may use.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::Metadata;
use crate::net::{Direction, PortRange, Protocol};

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

/// The content of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// `linux` or `windows`.
    pub os: String,
    /// Everything in the store up to this revision is in force on the node, except for what `conditions` names.
    pub revision: u64,
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

/// One condition of a node or of one of its endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportedCondition {
    /// The endpoint (`namespace/pod`), policy or other object; empty for the node itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub object: String,
    /// A short, stable name in CamelCase.
    pub reason: String,
    /// One sentence: the problem, and what Tortie does about it.
    pub message: String,
}
