//! Policies of cluster administrators: `policy.networking.k8s.io` ClusterNetworkPolicy (v1alpha2), and its
//! predecessors AdminNetworkPolicy and BaselineAdminNetworkPolicy (v1alpha1), in one type (policy decision 9).
//!
//! An unknown field is rejected, except for kinds of peers: a rule with an unknown peer fails closed (policy decision
//! 9), as the API's text requires of older implementations.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{LabelSelector, NetworkPolicyPeer};
use crate::fields::{Cidr, list};
use crate::net::{Action, PortRange, Protocol};
use crate::resource::typed;
use crate::{FieldError, Kind, Metadata};

/// A policy of the cluster's administrators.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterPolicy {
    /// Its name.
    pub metadata: Metadata,
    /// Before or after the namespaces' own policies.
    pub tier: ClusterTier,
    /// A lower number comes first; absent if there is only one such policy.
    pub priority: Option<u16>,
    /// The pods that it applies to.
    pub subject: ClusterPeer,
    /// The rules for packets into them. A policy without ingress rules does not apply to this direction.
    pub ingress: Vec<ClusterRule>,
    /// The rules for packets out of them.
    pub egress: Vec<ClusterRule>,
}

/// The position of an administrators' policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum ClusterTier {
    /// Before all others: tier `kube-admin`.
    Admin,
    /// After all others: tier `kube-baseline`.
    Baseline,
}

impl ClusterTier {
    /// The name of the tier.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "kube-admin",
            Self::Baseline => "kube-baseline",
        }
    }
}

/// A rule of an administrators' policy: one of the peers must match, and one of the ports if there are any.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterRule {
    /// The action; never Log.
    pub action: Action,
    /// The peers at the other end.
    pub peers: Vec<ClusterPeer>,
    /// The ports; none means every packet.
    pub ports: Vec<ClusterPort>,
}

impl ClusterRule {
    /// The part of the rule that is not understood, if any: the whole rule then fails closed (policy decision 9).
    #[must_use]
    pub fn not_understood(&self) -> Option<&str> {
        let peers = self.peers.iter().map(|peer| match peer {
            ClusterPeer::Unknown(what) => Some(what.as_str()),
            _ => None,
        });
        let ports = self.ports.iter().map(|port| match port {
            ClusterPort::Unknown(what) => Some(what.as_str()),
            _ => None,
        });
        let none = self.peers.is_empty().then_some("it has no peers");
        peers.chain(ports).flatten().next().or(none)
    }
}

/// A peer of a rule, or the subject of a policy.
#[derive(Debug, Clone, PartialEq)]
pub enum ClusterPeer {
    /// The pods in these namespaces.
    Namespaces(LabelSelector),
    /// These pods in these namespaces.
    Pods {
        /// The namespaces.
        namespaces: LabelSelector,
        /// The pods.
        pods: LabelSelector,
    },
    /// The addresses of these nodes ([`Node::addresses`](super::Node::addresses)).
    Nodes(LabelSelector),
    /// These addresses.
    Networks(Vec<Cidr>),
    /// An unknown kind.
    Unknown(String),
}

impl ClusterPeer {
    /// The subject of a policy that is not understood as a whole, if the subject can be evaluated.
    #[must_use]
    pub fn readable(value: &Value) -> Option<Self> {
        let fields = value.as_object().filter(|fields| fields.len() == 1)?;
        if let Some(namespaces) = fields.get("namespaces") {
            return LabelSelector::readable(namespaces).map(Self::Namespaces);
        }
        let fields = fields.get("pods")?.as_object()?;
        let known = ["namespaceSelector", "podSelector"];
        if fields.keys().any(|name| !known.contains(&name.as_str())) {
            return None;
        }
        let namespaces = match fields.get("namespaceSelector") {
            None => LabelSelector::default(),
            Some(namespaces) => LabelSelector::readable(namespaces)?,
        };
        let pods = LabelSelector::readable(fields.get("podSelector")?)?;
        Some(Self::Pods { namespaces, pods })
    }
}

/// A port of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterPort {
    /// Ports of a protocol; without a range, all of them.
    Numbers(Protocol, Option<PortRange>),
    /// A named port of the destination, whatever its protocol.
    Named(String),
    /// An unknown kind.
    Unknown(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    #[serde(default)]
    tier: Option<ClusterTier>,
    #[serde(default)]
    priority: Option<u16>,
    subject: Subject,
    #[serde(default, deserialize_with = "list")]
    ingress: Vec<UncheckedRule>,
    #[serde(default, deserialize_with = "list")]
    egress: Vec<UncheckedRule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Subject {
    Namespaces(LabelSelector),
    Pods(NamespacedPods),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NamespacedPods {
    #[serde(default)]
    namespace_selector: LabelSelector,
    pod_selector: LabelSelector,
}

/// A rule of any of the three kinds. Which fields and actions belong to which kind is checked afterwards.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedRule {
    #[serde(default)]
    #[expect(dead_code, reason = "it changes no meaning; read so that it is known")]
    name: Option<String>,
    action: String,
    #[serde(default, deserialize_with = "list")]
    from: Vec<Map<String, Value>>,
    #[serde(default, deserialize_with = "list")]
    to: Vec<Map<String, Value>>,
    #[serde(default, deserialize_with = "list")]
    protocols: Vec<Map<String, Value>>,
    #[serde(default, deserialize_with = "list")]
    ports: Vec<Map<String, Value>>,
}

impl ClusterPolicy {
    /// Parses an object of one of the three kinds.
    pub(crate) fn read(kind: Kind, value: &Value) -> Result<Self, Vec<FieldError>> {
        #[derive(Deserialize)]
        struct UncheckedPolicy {
            metadata: Metadata,
            spec: Spec,
        }
        let UncheckedPolicy { metadata, spec } = typed(value).map_err(|error| vec![error])?;
        let mut problems = Vec::new();
        let mut wrong = |path: &str, problem: &str| problems.push(FieldError::new(path, problem));
        let tier = match (kind, spec.tier) {
            (Kind::ClusterNetworkPolicy, Some(tier)) => tier,
            (Kind::ClusterNetworkPolicy, None) => {
                wrong("spec.tier", "is missing: Admin or Baseline");
                ClusterTier::Admin
            }
            (Kind::BaselineAdminNetworkPolicy, None) => ClusterTier::Baseline,
            (_, None) => ClusterTier::Admin,
            (_, Some(_)) => {
                wrong("spec.tier", "is a ClusterNetworkPolicy's only");
                ClusterTier::Admin
            }
        };
        match (kind, spec.priority) {
            (Kind::BaselineAdminNetworkPolicy, Some(_)) => {
                wrong("spec.priority", "there is only one such policy")
            }
            (Kind::BaselineAdminNetworkPolicy, None) => {}
            (_, None) => wrong("spec.priority", "is missing: from 0 (first) to 1000"),
            (_, Some(priority)) if priority > 1000 => wrong("spec.priority", "is at most 1000"),
            (_, Some(_)) => {}
        }
        let subject = match spec.subject {
            Subject::Namespaces(namespaces) => ClusterPeer::Namespaces(namespaces),
            Subject::Pods(pods) => {
                ClusterPeer::Pods { namespaces: pods.namespace_selector, pods: pods.pod_selector }
            }
        };
        check_selectors(&subject, "spec.subject", &mut problems);
        let mut rules = |rules: Vec<UncheckedRule>, direction: &str| {
            let path = |index| format!("spec.{direction}[{index}]");
            let rules = rules.into_iter().enumerate();
            rules.filter_map(|(index, rule)| rule.read(kind, &path(index), &mut problems)).collect()
        };
        let (ingress, egress) = (rules(spec.ingress, "ingress"), rules(spec.egress, "egress"));
        match problems.is_empty() {
            true => Ok(Self { metadata, tier, priority: spec.priority, subject, ingress, egress }),
            false => Err(problems),
        }
    }
}

impl UncheckedRule {
    fn read(self, kind: Kind, path: &str, problems: &mut Vec<FieldError>) -> Option<ClusterRule> {
        let mut wrong =
            |field: &str, problem: String| problems.push(FieldError::new(format!("{path}.{field}"), problem));
        let newest = kind == Kind::ClusterNetworkPolicy;
        let action = match (self.action.as_str(), kind) {
            ("Accept", Kind::ClusterNetworkPolicy) => Action::Allow,
            ("Allow", Kind::AdminNetworkPolicy | Kind::BaselineAdminNetworkPolicy) => Action::Allow,
            ("Deny", _) => Action::Deny,
            ("Pass", Kind::ClusterNetworkPolicy | Kind::AdminNetworkPolicy) => Action::Pass,
            (other, _) => {
                wrong("action", format!("{other:?} is no action of a {kind}"));
                return None;
            }
        };
        let (peers, other, side, odd) = match path.starts_with("spec.egress") {
            true => (self.to, self.from, "to", "from"),
            false => (self.from, self.to, "from", "to"),
        };
        if !other.is_empty() {
            wrong(odd, format!("unknown field; the peers of this direction are its {side:?}"));
        }
        let (ports, other, known, odd) = match newest {
            true => (self.protocols, self.ports, "protocols", "ports"),
            false => (self.ports, self.protocols, "ports", "protocols"),
        };
        if !other.is_empty() {
            wrong(odd, format!("unknown field; a {kind} has {known:?}"));
        }
        let peers: Vec<ClusterPeer> = peers.iter().map(|given| peer(given, side == "to")).collect();
        for (index, peer) in peers.iter().enumerate() {
            check_selectors(peer, &format!("{path}.{side}[{index}]"), problems);
        }
        let ports: Vec<ClusterPort> = ports.iter().map(if newest { protocol } else { port }).collect();
        let outside =
            peers.iter().any(|peer| matches!(peer, ClusterPeer::Networks(_) | ClusterPeer::Nodes(_)));
        if outside && ports.iter().any(|port| matches!(port, ClusterPort::Named(_))) {
            let problem =
                "networks and nodes declare no ports by name, so they may not stand beside a named port";
            problems.push(FieldError::new(format!("{path}.{side}"), problem));
        }
        Some(ClusterRule { action, peers, ports })
    }
}

fn check_selectors(peer: &ClusterPeer, path: &str, problems: &mut Vec<FieldError>) {
    let (namespace_selector, pod_selector) = match peer {
        ClusterPeer::Namespaces(namespaces) => (Some(namespaces.clone()), None),
        ClusterPeer::Pods { namespaces, pods } => (Some(namespaces.clone()), Some(pods.clone())),
        ClusterPeer::Nodes(nodes) => return nodes.validate(&format!("{path}.nodes"), problems),
        ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => return,
    };
    NetworkPolicyPeer { ip_block: None, namespace_selector, pod_selector }.validate(path, problems);
}

/// The single field of a union; an error if there is not exactly one.
fn only(given: &Map<String, Value>) -> Result<(&str, &Value), String> {
    let mut fields = given.iter();
    match (fields.next(), fields.next()) {
        (Some((name, value)), None) => Ok((name, value)),
        (None, _) => Err("it has no known field".to_owned()),
        _ => {
            Err(format!("{} may not stand together", given.keys().cloned().collect::<Vec<_>>().join(" and ")))
        }
    }
}

fn part<T: DeserializeOwned>(name: &str, value: &Value) -> Result<T, String> {
    typed(value).map_err(|error| format!("{name}: {error}"))
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Nets(Vec<Cidr>);

/// A peer of a rule. Only peers of egress rules can be nodes or networks.
fn peer(given: &Map<String, Value>, egress: bool) -> ClusterPeer {
    let read = || match only(given)? {
        ("namespaces", value) => Ok(ClusterPeer::Namespaces(part("namespaces", value)?)),
        ("pods", value) => {
            let pods: NamespacedPods = part("pods", value)?;
            Ok(ClusterPeer::Pods { namespaces: pods.namespace_selector, pods: pods.pod_selector })
        }
        ("nodes", value) if egress => Ok(ClusterPeer::Nodes(part("nodes", value)?)),
        ("networks", value) if egress => match part("networks", value)? {
            Nets(nets) if nets.is_empty() => Err("networks: needs at least one".to_owned()),
            Nets(nets) => Ok(ClusterPeer::Networks(nets)),
        },
        (other, _) => Err(format!("a peer by {other:?} is not known")),
    };
    read().unwrap_or_else(ClusterPeer::Unknown)
}

/// An entry of `protocols` (v1alpha2).
fn protocol(given: &Map<String, Value>) -> ClusterPort {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Ported {
        #[serde(default)]
        destination_port: Option<Number>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    enum Number {
        Number(u16),
        #[serde(deserialize_with = "range")]
        Range(PortRange),
    }
    let read = || {
        let (name, value) = only(given)?;
        let number = match name {
            "destinationNamedPort" => return Ok(ClusterPort::Named(part(name, value)?)),
            "tcp" => Protocol::TCP,
            "udp" => Protocol::UDP,
            "sctp" => Protocol::SCTP,
            other => return Err(format!("protocol {other:?} is not known")),
        };
        let ported: Ported = part(name, value)?;
        let ports = ported.destination_port.map(|port| match port {
            Number::Number(number) => PortRange::single(number),
            Number::Range(range) => range,
        });
        Ok(ClusterPort::Numbers(number, ports))
    };
    read().unwrap_or_else(ClusterPort::Unknown)
}

/// An entry of `ports` (v1alpha1).
fn port(given: &Map<String, Value>) -> ClusterPort {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Number {
        #[serde(default)]
        protocol: Option<String>,
        port: u16,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Range {
        #[serde(default)]
        protocol: Option<String>,
        start: u16,
        end: u16,
    }
    let named = |protocol: Option<String>| {
        let name = protocol.unwrap_or_else(|| "TCP".to_owned());
        let known = Protocol::from_name(&name).filter(|protocol| protocol.has_ports());
        known.ok_or_else(|| format!("protocol {name:?} has no ports that are known"))
    };
    let read = || match only(given)? {
        ("namedPort", value) => Ok(ClusterPort::Named(part("namedPort", value)?)),
        ("portNumber", value) => {
            let Number { protocol, port } = part("portNumber", value)?;
            Ok(ClusterPort::Numbers(named(protocol)?, Some(PortRange::single(port))))
        }
        ("portRange", value) => {
            let Range { protocol, start, end } = part("portRange", value)?;
            if start > end {
                return Err(format!("the range of ports from {start} to {end} ends before it begins"));
            }
            Ok(ClusterPort::Numbers(named(protocol)?, Some(PortRange { first: start, last: end })))
        }
        (other, _) => Err(format!("a port by {other:?} is not known")),
    };
    read().unwrap_or_else(ClusterPort::Unknown)
}

fn range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PortRange, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Ends {
        start: u16,
        end: u16,
    }
    let Ends { start, end } = Ends::deserialize(deserializer)?;
    match start <= end {
        true => Ok(PortRange { first: start, last: end }),
        false => {
            Err(serde::de::Error::custom(format!("the range from {start} to {end} ends before it begins")))
        }
    }
}
