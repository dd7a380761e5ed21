//! From Calico's NetworkPolicies to Kubernetes'. Whatever would change a verdict is an error with its field.

use std::collections::BTreeMap;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_selector::{LabelTest, Selector};

use crate::calico::{EntityRule, NetworkPolicy, PolicySpec, PolicyType, Rule};
use crate::fields::{Cidr, Port, ProtocolName};
use crate::net::{Action, Protocol};
use crate::{FieldError, Kind};

/// A converted policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// The policy.
    pub value: Value,
    /// What is different and may change verdicts: an order matters beside policies that deny, and network sets exist in some
    /// clusters only.
    pub losses: Vec<FieldError>,
    /// What is different, without effect on the verdicts between pods that this policy gives.
    pub notes: Vec<FieldError>,
}

/// The label that Calico gives namespaces with their own name, and Kubernetes' label.
const NAMESPACE_NAMES: (&str, &str) = ("projectcalico.org/name", "kubernetes.io/metadata.name");
/// Prefixes of labels that only Calico knows.
const OF_CALICO: [&str; 3] = ["projectcalico.org/", "pcns.", "pcsa."];

/// A Kubernetes policy that means the same as this Calico policy.
///
/// # Errors
/// Every field that no Kubernetes policy can express.
pub fn kubernetes_policy(policy: &NetworkPolicy) -> Result<Converted, Vec<FieldError>> {
    let mut conversion = Conversion::default();
    let spec = conversion.spec(&policy.spec);
    if !conversion.problems.is_empty() {
        return Err(conversion.problems);
    }
    let metadata = &policy.metadata;
    let name = ["default.", "knp.default."].iter().fold(&*metadata.name, |name, prefix| {
        // `knp.default.` begins the names of copies of Kubernetes' policies.
        name.strip_prefix(prefix).unwrap_or(name)
    });
    let mut value = json!({
        "apiVersion": Kind::KubernetesNetworkPolicy.api_version(), "kind": Kind::KubernetesNetworkPolicy.name(),
        "metadata": {"name": name, "namespace": metadata.namespace}, "spec": spec,
    });
    for (field, map) in [("labels", &metadata.labels), ("annotations", &metadata.annotations)] {
        if !map.is_empty() {
            value["metadata"][field] = json!(map);
        }
    }
    Ok(Converted { value, losses: conversion.losses, notes: conversion.notes })
}

#[derive(Default)]
struct Conversion {
    problems: Vec<FieldError>,
    losses: Vec<FieldError>,
    notes: Vec<FieldError>,
}

impl Conversion {
    fn problem(&mut self, path: impl Into<String>, problem: impl Into<String>) {
        self.problems.push(FieldError::new(path, problem));
    }

    fn spec(&mut self, spec: &PolicySpec) -> Value {
        // A new field must be looked at here.
        let PolicySpec {
            tier: _,
            order,
            ingress,
            egress,
            selector,
            types: _,
            service_account_selector,
            performance_hints,
            namespace_selector,
            do_not_track,
            pre_dnat,
            apply_on_forward,
            staged_action,
        } = spec;
        if spec.tier_name() != "default" {
            self.problem("spec.tier", "Kubernetes policies are in tier default");
        }
        if order.is_none_or(|order| (order - 1000.0).abs() > f64::EPSILON) {
            let loss = "is lost: Kubernetes policies have order 1000. It matters beside policies that deny";
            self.losses.push(FieldError::new("spec.order", loss));
        }
        if !performance_hints.is_empty() {
            self.notes.push(FieldError::new("spec.performanceHints", "is lost; no verdict depends on it"));
        }
        if service_account_selector.is_some() {
            self.problem(
                "spec.serviceAccountSelector",
                "Kubernetes policies select pods by their own labels only",
            );
        }
        if namespace_selector.is_some() {
            self.problem("spec.namespaceSelector", "Kubernetes policies belong to one namespace");
        }
        if *do_not_track || *pre_dnat || *apply_on_forward || staged_action.is_some() {
            self.problem("spec", "is for host endpoints, or staged");
        }
        let pods = match selector {
            Some(selector) => self.labels("spec.selector", selector).0,
            None => json!({}),
        };
        let types = spec.effective_types();
        let mut converted = json!({"podSelector": pods});
        for (of, field, peers, rules) in
            [(PolicyType::Ingress, "ingress", "from", ingress), (PolicyType::Egress, "egress", "to", egress)]
        {
            if types.contains(&of) && !rules.is_empty() {
                let rules = rules.iter().enumerate();
                let rules = rules.filter_map(|(number, rule)| {
                    self.rule(&format!("spec.{field}[{number}]"), rule, of, peers)
                });
                converted[field] = rules.collect();
            }
        }
        converted["policyTypes"] = types.iter().map(|of| json!(format!("{of:?}"))).collect();
        converted
    }

    /// The converted rule; `None` if it matches nothing.
    fn rule(&mut self, path: &str, rule: &Rule, of: PolicyType, peers: &str) -> Option<Value> {
        let Rule {
            action,
            ip_version,
            protocol,
            not_protocol,
            icmp,
            not_icmp,
            source,
            destination,
            http,
            metadata,
        } = rule;
        match action {
            Action::Allow => {}
            Action::Log => {
                let note = "logging rules are left out; no verdict depends on them";
                self.notes.push(FieldError::new(format!("{path}.action"), note));
                return None;
            }
            Action::Deny | Action::Pass => {
                self.problem(
                    format!("{path}.action"),
                    format!("{action:?}: rules of Kubernetes policies only allow"),
                );
            }
        }
        if metadata.is_some() {
            let note = "is lost; no verdict depends on it";
            self.notes.push(FieldError::new(format!("{path}.metadata"), note));
        }
        let one = |is_there: bool, field: &str| is_there.then(|| format!("{path}.{field}"));
        let extra = [
            one(ip_version.is_some(), "ipVersion"),
            one(not_protocol.is_some(), "notProtocol"),
            one(icmp.is_some(), "icmp"),
            one(not_icmp.is_some(), "notICMP"),
            one(http.is_some(), "http"),
        ];
        for field in extra.into_iter().flatten() {
            self.problem(field, "Kubernetes policies have nothing like it");
        }
        let (peer, peer_path, own, own_path) = match of {
            PolicyType::Ingress => (source, "source", destination, "destination"),
            PolicyType::Egress => (destination, "destination", source, "source"),
        };
        self.own_side(&format!("{path}.{own_path}"), own, of);
        let converted_peers = self.peers(&format!("{path}.{peer_path}"), peer, of)?;
        let mut converted = json!({});
        if !converted_peers.is_empty() {
            converted[peers] = json!(converted_peers);
        }
        let ports = self.ports(path, *protocol, &destination.ports);
        if !ports.is_empty() {
            converted["ports"] = json!(ports);
        }
        Some(converted)
    }

    /// The side of the policy's own pods may have ports, if it is the destination.
    fn own_side(&mut self, path: &str, entity: &EntityRule, of: PolicyType) {
        let EntityRule {
            nets,
            not_nets,
            selector,
            not_selector,
            namespace_selector,
            services,
            ports,
            not_ports,
            service_accounts,
        } = entity;
        let criteria = [
            (!nets.is_empty(), "nets"),
            (!not_nets.is_empty(), "notNets"),
            (selector.is_some(), "selector"),
            (not_selector.is_some(), "notSelector"),
            (namespace_selector.is_some(), "namespaceSelector"),
            (services.is_some(), "services"),
            (!ports.is_empty() && of == PolicyType::Egress, "ports"),
            (!not_ports.is_empty(), "notPorts"),
            (service_accounts.is_some(), "serviceAccounts"),
        ];
        for (_, field) in criteria.into_iter().filter(|(is_there, _)| *is_there) {
            self.problem(
                format!("{path}.{field}"),
                "Kubernetes policies restrict the other side of a packet only",
            );
        }
    }

    /// The peers; none stands for everybody. `None` if the criteria match nobody.
    fn peers(&mut self, path: &str, entity: &EntityRule, of: PolicyType) -> Option<Vec<Value>> {
        let EntityRule {
            nets,
            not_nets,
            selector,
            not_selector,
            namespace_selector,
            services,
            ports,
            not_ports,
            service_accounts,
        } = entity;
        let unknown = [
            (not_selector.is_some(), "notSelector"),
            (services.is_some(), "services"),
            (service_accounts.is_some(), "serviceAccounts"),
            (!not_ports.is_empty(), "notPorts"),
            (!ports.is_empty() && of == PolicyType::Ingress, "ports"),
            (!not_nets.is_empty() && nets.is_empty(), "notNets"),
        ];
        for (_, field) in unknown.into_iter().filter(|(is_there, _)| *is_there) {
            self.problem(format!("{path}.{field}"), "Kubernetes policies have nothing like it");
        }
        let has_selectors = selector.is_some() || namespace_selector.is_some();
        if !nets.is_empty() {
            if has_selectors {
                self.problem(
                    format!("{path}.nets"),
                    "a peer of a Kubernetes policy has either networks or selectors",
                );
            }
            let blocks: Vec<Value> = nets.iter().filter_map(|Cidr(net)| block(*net, not_nets)).collect();
            return (!blocks.is_empty()).then_some(blocks);
        }
        if !has_selectors {
            return Some(Vec::new());
        }
        let mut peer = json!({});
        let mut is_of_pods = false;
        if let Some(selector) = selector {
            let (labels, of_pods) = self.labels(&format!("{path}.selector"), selector);
            (peer["podSelector"], is_of_pods) = (labels, of_pods);
        }
        if let Some(namespaces) = namespace_selector {
            peer["namespaceSelector"] =
                self.namespace_labels(&format!("{path}.namespaceSelector"), namespaces);
        }
        if !is_of_pods {
            let loss = "also selects network sets, and Kubernetes policies do not";
            self.losses.push(FieldError::new(format!("{path}.selector"), loss));
        }
        Some(vec![peer])
    }

    /// The label selector, and whether the Calico selector says that it is for pods only.
    fn labels(&mut self, path: &str, selector: &Selector) -> (Value, bool) {
        let Some(tests) = selector.conjunction() else {
            self.problem(
                path,
                format!(
                    "{selector}: no label selector says this; it must be tests of labels with && between"
                ),
            );
            return (json!({}), false);
        };
        let pods = Selector::parse(super::PODS).ok().and_then(|pods| pods.conjunction()).unwrap_or_default();
        let (of_pods, own): (Vec<_>, Vec<_>) = tests.into_iter().partition(|test| pods.contains(test));
        for (label, _) in
            own.iter().filter(|(label, _)| OF_CALICO.iter().any(|prefix| label.starts_with(prefix)))
        {
            self.problem(path, format!("{label}: only Calico gives pods this label"));
        }
        (label_selector(own), !of_pods.is_empty())
    }

    fn namespace_labels(&mut self, path: &str, selector: &Selector) -> Value {
        let tests = match selector.conjunction() {
            Some(tests) if !selector.mentions_global() => tests,
            _ => {
                self.problem(
                    path,
                    format!(
                        "{selector}: no label selector says this; it must be tests of labels with && between"
                    ),
                );
                return json!({});
            }
        };
        let renamed = tests.into_iter().map(|(label, test)| {
            let is_name = label == NAMESPACE_NAMES.0;
            (if is_name { NAMESPACE_NAMES.1.to_owned() } else { label }, test)
        });
        label_selector(renamed.collect())
    }

    fn ports(&mut self, path: &str, protocol: Option<ProtocolName>, ports: &[Port]) -> Vec<Value> {
        let Some(ProtocolName(protocol)) = protocol else {
            if !ports.is_empty() {
                self.problem(format!("{path}.destination.ports"), "need a protocol in a Kubernetes policy");
            }
            return Vec::new();
        };
        let names = [(Protocol::TCP, "TCP"), (Protocol::UDP, "UDP"), (Protocol::SCTP, "SCTP")];
        let Some((_, name)) = names.into_iter().find(|(known, _)| *known == protocol) else {
            self.problem(format!("{path}.protocol"), "Kubernetes policies know TCP, UDP and SCTP only");
            return Vec::new();
        };
        let one = |port: &Port| match port {
            Port::Named(port) => json!({"protocol": name, "port": port}),
            Port::Range(range) if range.first == range.last => json!({"protocol": name, "port": range.first}),
            Port::Range(range) => json!({"protocol": name, "port": range.first, "endPort": range.last}),
        };
        match ports {
            [] => vec![json!({"protocol": name})],
            ports => ports.iter().map(one).collect(),
        }
    }
}

/// A network without the parts that lie in it; `None` if nothing is left.
fn block(net: IpNet, not_nets: &[Cidr]) -> Option<Value> {
    let except: Vec<IpNet> = not_nets.iter().map(|Cidr(except)| *except).collect();
    if except.iter().any(|except| except.contains(&net)) {
        return None;
    }
    let except: Vec<String> =
        except.iter().filter(|except| net.contains(*except)).map(ToString::to_string).collect();
    let mut block = json!({"cidr": net.to_string()});
    if !except.is_empty() {
        block["except"] = json!(except);
    }
    Some(json!({"ipBlock": block}))
}

fn label_selector(tests: Vec<(String, LabelTest)>) -> Value {
    let (mut labels, mut expressions) = (BTreeMap::new(), Vec::new());
    for (key, test) in tests {
        let values = |values: &std::collections::BTreeSet<String>| values.iter().cloned().collect::<Vec<_>>();
        match &test {
            LabelTest::In(one) if one.len() == 1 && !labels.contains_key(&key) => {
                labels.insert(key, values(one).remove(0));
            }
            LabelTest::In(all) => {
                expressions.push(json!({"key": key, "operator": "In", "values": values(all)}))
            }
            LabelTest::NotIn(all) => {
                expressions.push(json!({"key": key, "operator": "NotIn", "values": values(all)}));
            }
            LabelTest::Has => expressions.push(json!({"key": key, "operator": "Exists"})),
            LabelTest::HasNot => expressions.push(json!({"key": key, "operator": "DoesNotExist"})),
        }
    }
    let mut selector = json!({});
    if !labels.is_empty() {
        selector["matchLabels"] = json!(labels);
    }
    if !expressions.is_empty() {
        selector["matchExpressions"] = json!(expressions);
    }
    selector
}
