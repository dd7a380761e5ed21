//! NetworkPolicy and GlobalNetworkPolicy (`api/pkg/apis/projectcalico/v3` of Calico). An unknown field is rejected:
//! an ignored `notSelector` would turn an Allow into allow-all.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use tortie_selector::Selector;

use crate::fields::{
    Cidr, Port, ProtocolName, is_object_name, list, masked, optional_protocol_in_any_case, selector,
};
use crate::net::{Action, Protocol};
use crate::{FieldError, Kind, Metadata, spelling};

/// A policy for the pods of one namespace.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct NetworkPolicy {
    /// Its name and namespace.
    pub metadata: Metadata,
    /// Its content.
    pub spec: PolicySpec,
}

/// A policy for the whole cluster.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct GlobalNetworkPolicy {
    /// Its name.
    pub metadata: Metadata,
    /// Its content.
    pub spec: PolicySpec,
}

/// A direction of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
pub enum PolicyType {
    /// Packets into the endpoints.
    Ingress,
    /// Packets out of the endpoints.
    Egress,
}

/// The content of a policy. The last four fields exist only in a GlobalNetworkPolicy.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicySpec {
    /// The tier; `default` if absent.
    #[serde(default)]
    pub tier: Option<String>,
    /// A lower number comes first; absent comes last.
    #[serde(default)]
    pub order: Option<f64>,
    /// The rules for packets into the endpoints.
    #[serde(default, deserialize_with = "list")]
    pub ingress: Vec<Rule>,
    /// The rules for packets out of the endpoints.
    #[serde(default, deserialize_with = "list")]
    pub egress: Vec<Rule>,
    /// The endpoints that it applies to; absent means all.
    #[serde(default, deserialize_with = "selector")]
    pub selector: Option<Selector>,
    /// The directions that it applies to; if absent, the rules decide.
    #[serde(default, deserialize_with = "spelling::types")]
    pub types: Vec<PolicyType>,
    /// Restricts the endpoints by the labels of their service accounts.
    #[serde(default, deserialize_with = "selector")]
    pub service_account_selector: Option<Selector>,
    /// Hints without effect on the meaning.
    #[serde(default, deserialize_with = "list")]
    pub performance_hints: Vec<String>,
    /// Restricts the endpoints by the labels of their namespaces.
    #[serde(default, deserialize_with = "selector")]
    pub namespace_selector: Option<Selector>,
    /// For host endpoints.
    #[serde(default)]
    pub do_not_track: bool,
    /// For host endpoints.
    #[serde(default, rename = "preDNAT")]
    pub pre_dnat: bool,
    /// For host endpoints.
    #[serde(default)]
    pub apply_on_forward: bool,
    /// Only for staged policies: `Set`, `Delete`, `Learn`, `Ignore`.
    #[serde(default)]
    pub staged_action: Option<StagedAction>,
}

/// What a staged policy would do when enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "Calico's own words")]
pub enum StagedAction {
    Set,
    Delete,
    Learn,
    Ignore,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rule {
    /// What happens to matching packets.
    #[serde(deserialize_with = "spelling::action")]
    pub action: Action,
    /// 4 or 6.
    #[serde(default)]
    pub ip_version: Option<u8>,
    /// The protocol to match.
    #[serde(default, deserialize_with = "optional_protocol_in_any_case")]
    pub protocol: Option<ProtocolName>,
    /// The protocol to exclude.
    #[serde(default, deserialize_with = "optional_protocol_in_any_case")]
    pub not_protocol: Option<ProtocolName>,
    /// The ICMP message to match.
    #[serde(default, deserialize_with = "icmp")]
    pub icmp: Option<Icmp>,
    /// The ICMP message to exclude.
    #[serde(default, rename = "notICMP", deserialize_with = "icmp")]
    pub not_icmp: Option<Icmp>,
    /// The criteria for the source.
    #[serde(default, deserialize_with = "or_default")]
    pub source: EntityRule,
    /// The criteria for the destination.
    #[serde(default, deserialize_with = "or_default")]
    pub destination: EntityRule,
    /// Application-layer criteria.
    #[serde(default)]
    pub http: Option<Http>,
    /// Annotations of the rule, without effect on the meaning.
    #[serde(default)]
    pub metadata: Option<RuleMetadata>,
}

/// Annotations of a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleMetadata {
    /// The annotations.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// Criteria for an HTTP request. They are validated, but nothing inspects requests yet (policy decision 15).
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// One of these methods.
    #[serde(default, deserialize_with = "list")]
    pub methods: Vec<String>,
    /// One of these paths.
    #[serde(default, deserialize_with = "list")]
    pub paths: Vec<HttpPath>,
}

/// A path of a request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HttpPath {
    /// The whole path.
    Exact(String),
    /// The beginning of the path.
    Prefix(String),
}

/// An ICMP type, optionally with a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Icmp {
    /// The type.
    #[serde(rename = "type", default)]
    pub icmp_type: Option<u8>,
    /// The code; requires a type.
    #[serde(default)]
    pub code: Option<u8>,
}

/// The criteria for one side of a packet.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EntityRule {
    /// Networks; one of them must contain the address.
    #[serde(default, deserialize_with = "masked")]
    pub nets: Vec<Cidr>,
    /// Networks; none of them may contain the address.
    #[serde(default, deserialize_with = "masked")]
    pub not_nets: Vec<Cidr>,
    /// The endpoints to match.
    #[serde(default, deserialize_with = "selector")]
    pub selector: Option<Selector>,
    /// The endpoints to exclude.
    #[serde(default, deserialize_with = "selector")]
    pub not_selector: Option<Selector>,
    /// The namespaces of the endpoints.
    #[serde(default, deserialize_with = "selector")]
    pub namespace_selector: Option<Selector>,
    /// The backends of a Service.
    #[serde(default)]
    pub services: Option<ServiceMatch>,
    /// Ports; the packet's port must be one of them.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<Port>,
    /// Ports; the packet's port must not be one of them.
    #[serde(default, deserialize_with = "list")]
    pub not_ports: Vec<Port>,
    /// The endpoints' service accounts. A value without names and selector has no effect
    /// (`libcalico-go/lib/backend/syncersv1/updateprocessors`).
    #[serde(default, deserialize_with = "accounts")]
    pub service_accounts: Option<ServiceAccountMatch>,
}

/// A Service by name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceMatch {
    /// Its name.
    pub name: String,
    /// Its namespace; absent means the policy's.
    #[serde(default, deserialize_with = "filled")]
    pub namespace: Option<String>,
}

/// Service accounts by name and by label; both must match.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceAccountMatch {
    /// One of these names.
    #[serde(default, deserialize_with = "list")]
    pub names: Vec<String>,
    /// Labels of the service account.
    #[serde(default, deserialize_with = "selector")]
    pub selector: Option<Selector>,
}

/// Text that may be absent, null or empty.
fn filled<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.filter(|text| !text.is_empty()))
}

/// An ICMP criterion. One without type and code is ignored; a code without a type stays, so that validation rejects
/// it.
fn icmp<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Icmp>, D::Error> {
    let icmp = Option::<Icmp>::deserialize(deserializer)?;
    Ok(icmp.filter(|icmp| icmp.icmp_type.is_some() || icmp.code.is_some()))
}

fn accounts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ServiceAccountMatch>, D::Error> {
    let accounts = Option::<ServiceAccountMatch>::deserialize(deserializer)?;
    Ok(accounts.filter(|accounts| !accounts.names.is_empty() || accounts.selector.is_some()))
}

fn or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EntityRule, D::Error> {
    Ok(Option::<EntityRule>::deserialize(deserializer)?.unwrap_or_default())
}

impl PolicySpec {
    /// The directions that the policy applies to, with Calico's defaults: without types and egress rules, it is
    /// Ingress.
    #[must_use]
    pub fn effective_types(&self) -> Vec<PolicyType> {
        match (self.types.is_empty(), self.ingress.is_empty(), self.egress.is_empty()) {
            (false, ..) => self.types.clone(),
            (true, _, true) => vec![PolicyType::Ingress],
            (true, true, false) => vec![PolicyType::Egress],
            (true, false, false) => vec![PolicyType::Ingress, PolicyType::Egress],
        }
    }

    /// The policy's tier.
    #[must_use]
    pub fn tier_name(&self) -> &str {
        self.tier.as_deref().filter(|tier| !tier.is_empty()).unwrap_or("default")
    }

    pub(crate) fn validate(&self, kind: Kind) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        for (index, of) in self.types.iter().enumerate() {
            if self.types[..index].contains(of) {
                problems
                    .push(FieldError::new(format!("spec.types[{index}]"), format!("{of:?} is given twice")));
            }
        }
        for (index, hint) in self.performance_hints.iter().enumerate() {
            if self.performance_hints[..index].contains(hint) {
                let problem = format!("{hint:?} is given twice");
                problems.push(FieldError::new(format!("spec.performanceHints[{index}]"), problem));
            }
        }
        if !is_object_name(self.tier_name()) || self.tier_name().contains('.') {
            let problem = format!(
                "{:?} is no name of a tier: use lower-case letters, digits and dashes",
                self.tier_name()
            );
            problems.push(FieldError::new("spec.tier", problem));
        }
        for (selector, field) in [
            (&self.selector, "spec.selector"),
            (&self.namespace_selector, "spec.namespaceSelector"),
            (&self.service_account_selector, "spec.serviceAccountSelector"),
        ] {
            if selector.as_ref().is_some_and(Selector::mentions_global) {
                problems
                    .push(FieldError::new(field, "global() may stand only in a rule's namespaceSelector"));
            }
        }
        if let Some(hint) = self.performance_hints.iter().find(|hint| *hint != "AssumeNeededOnEveryNode") {
            problems.push(FieldError::new(
                "spec.performanceHints",
                format!("{hint:?} is not AssumeNeededOnEveryNode"),
            ));
        }
        if !kind.namespaced() {
            let services = |rule: &Rule| [rule.source.services.clone(), rule.destination.services.clone()];
            let named = self.ingress.iter().chain(&self.egress).flat_map(services).flatten();
            if named.into_iter().any(|service| service.namespace.is_none()) {
                let problem =
                    "services.namespace is missing: a policy of the whole cluster has none of its own";
                problems.push(FieldError::new("spec", problem));
            }
        }
        if self.do_not_track && self.pre_dnat {
            problems.push(FieldError::new("spec.preDNAT", "may not stand beside doNotTrack"));
        }
        if (self.do_not_track || self.pre_dnat) && !self.apply_on_forward {
            problems.push(FieldError::new("spec.applyOnForward", "must be true with doNotTrack or preDNAT"));
        }
        if self.pre_dnat && (!self.egress.is_empty() || self.types.contains(&PolicyType::Egress)) {
            problems.push(FieldError::new("spec.egress", "a preDNAT policy speaks of ingress only"));
        }
        for (rules, direction) in [(&self.ingress, "ingress"), (&self.egress, "egress")] {
            for (index, rule) in rules.iter().enumerate() {
                rule.validate(&format!("spec.{direction}[{index}]"), &mut problems);
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

impl Rule {
    pub(super) fn validate(&self, path: &str, problems: &mut Vec<FieldError>) {
        let mut wrong =
            |field: &str, problem: &str| problems.push(FieldError::new(format!("{path}.{field}"), problem));
        if self.ip_version.is_some_and(|version| version != 4 && version != 6) {
            wrong("ipVersion", "must be 4 or 6");
        }
        for (icmp, field) in [(&self.icmp, "icmp"), (&self.not_icmp, "notICMP")] {
            let Some(icmp) = icmp else { continue };
            // Calico requires the protocol only together with `icmp`.
            if field == "icmp"
                && !self.protocol.is_some_and(|ProtocolName(protocol)| [1, 58].contains(&protocol.0))
            {
                wrong(field, "needs protocol: ICMP or protocol: ICMPv6 in the same rule");
            }
            if icmp.code.is_some() && icmp.icmp_type.is_none() {
                wrong(field, "a code needs a type");
            }
            if icmp.icmp_type == Some(255) {
                wrong(field, "the type must be between 0 and 254");
            }
        }
        let is = |version: u8| {
            let protocol =
                |ProtocolName(protocol): ProtocolName| protocol.0 == if version == 4 { 58 } else { 1 };
            self.ip_version == Some(version) && self.protocol.is_some_and(protocol)
        };
        let is_not = |version: u8| {
            let protocol =
                |ProtocolName(protocol): ProtocolName| protocol.0 == if version == 4 { 58 } else { 1 };
            self.ip_version == Some(version) && self.not_protocol.is_some_and(protocol)
        };
        if is(4) || is(6) || is_not(4) || is_not(6) {
            wrong("ipVersion", "ICMP is IPv4's, ICMPv6 is IPv6's");
        }
        if let Some(http) = &self.http {
            if self.action != Action::Allow {
                wrong("http", "is for Allow rules only");
            }
            if self.protocol.is_some_and(|ProtocolName(protocol)| protocol != Protocol::TCP) {
                wrong("http", "needs protocol TCP, or none");
            }
            if path.starts_with("spec.egress") {
                wrong("http", "is for ingress rules only");
            }
            http.validate(&format!("{path}.http"), problems);
        }
        for (entity, side) in [(&self.source, "source"), (&self.destination, "destination")] {
            entity.validate(&format!("{path}.{side}"), self.protocol, problems);
        }
        self.validate_families(path, problems);
        let (other, field) = match path.starts_with("spec.egress") {
            true => (&self.source, "source.services"),
            false => (&self.destination, "destination.services"),
        };
        if other.services.is_some() {
            let problem = "a Service may be an egress rule's destination or an ingress rule's source only";
            problems.push(FieldError::new(format!("{path}.{field}"), problem));
        }
    }
}

impl Rule {
    /// A rule concerns one address family, which must be that of its `ipVersion`.
    fn validate_families(&self, path: &str, problems: &mut Vec<FieldError>) {
        let mut wrong =
            |field: &str, problem: &str| problems.push(FieldError::new(format!("{path}.{field}"), problem));
        let mut first = None;
        for (entity, side) in [(&self.source, "source.nets"), (&self.destination, "destination.nets")] {
            for Cidr(net) in entity.nets.iter().chain(&entity.not_nets) {
                let version = if net.addr().is_ipv4() { 4 } else { 6 };
                if *first.get_or_insert(version) != version {
                    return wrong(side, "one rule cannot mix IPv4 and IPv6 networks");
                }
                if self.ip_version.is_some_and(|wanted| wanted != version) {
                    return wrong(side, "the networks are not of the rule's ipVersion");
                }
            }
        }
    }
}

impl Http {
    fn validate(&self, path: &str, problems: &mut Vec<FieldError>) {
        for (index, method) in self.methods.iter().enumerate() {
            if self.methods[..index].contains(method) {
                problems
                    .push(FieldError::new(format!("{path}.methods[{index}]"), "the method was given before"));
            }
        }
        for (index, given) in self.paths.iter().enumerate() {
            let (HttpPath::Exact(text) | HttpPath::Prefix(text)) = given;
            if !text.starts_with('/') || text.contains(['?', '#', ' ']) {
                let problem = format!("{text:?} must begin with / and hold no ?, # or space");
                problems.push(FieldError::new(format!("{path}.paths[{index}]"), problem));
            }
        }
    }
}

impl EntityRule {
    fn validate(&self, path: &str, protocol: Option<ProtocolName>, problems: &mut Vec<FieldError>) {
        let mut wrong =
            |field: &str, problem: String| problems.push(FieldError::new(format!("{path}.{field}"), problem));
        for (ports, field) in [(&self.ports, "ports"), (&self.not_ports, "notPorts")] {
            if ports.is_empty() {
                continue;
            }
            // A named port implies its protocol.
            let numbers = ports.iter().any(|port| matches!(port, Port::Range(_)));
            let fits = match protocol {
                Some(ProtocolName(protocol)) => protocol.has_ports(),
                None => !numbers,
            };
            if !fits {
                wrong(field, "needs protocol: TCP, UDP or SCTP in the same rule".into());
            }
        }
        if let Some(service) = &self.services {
            if service.name.is_empty() {
                wrong("services.name", "is missing".into());
            }
            let beside = [
                (self.selector.is_some(), "selector"),
                (self.not_selector.is_some(), "notSelector"),
                (self.namespace_selector.is_some(), "namespaceSelector"),
                (self.service_accounts.is_some(), "serviceAccounts"),
                (!self.nets.is_empty(), "nets"),
                (!self.not_nets.is_empty(), "notNets"),
                // A Service at the source matches its backends' addresses; the port is the client's.
                (path.ends_with("destination") && !self.ports.is_empty(), "ports"),
                (path.ends_with("destination") && !self.not_ports.is_empty(), "notPorts"),
            ];
            for (_, field) in beside.iter().filter(|(given, _)| *given) {
                wrong("services", format!("may not stand beside {field}"));
            }
        }
        let accounts = self.service_accounts.as_ref().and_then(|accounts| accounts.selector.as_ref());
        if accounts.is_some_and(Selector::mentions_global) {
            wrong("serviceAccounts.selector", "global() may stand only in namespaceSelector".into());
        }
        if self.not_nets.iter().any(|Cidr(net)| net.prefix_len() == 0) {
            wrong("notNets", "a network that holds every address would match nothing".into());
        }
        let global_beside_others = |selector: &Option<Selector>| {
            selector.as_ref().is_some_and(|selector| selector.mentions_global() && !selector.is_global())
        };
        if global_beside_others(&self.namespace_selector) {
            wrong("namespaceSelector", "global() must stand alone".into());
        }
        if self.selector.as_ref().is_some_and(Selector::mentions_global) {
            wrong("selector", "global() may stand only in namespaceSelector".into());
        }
    }
}
