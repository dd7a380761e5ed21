//! Criteria that exclude each other in every cluster.

use tortie_api::calico::{EntityRule, Icmp, PolicyType, Rule};
use tortie_api::kubernetes::{
    ClusterPeer, ClusterPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicySpec,
};
use tortie_api::net::{PortRange, Protocol};
use tortie_api::{Cidr, Key, Port, ProtocolName, Resource};
use tortie_selector::Selector;

use super::{Code, FindingText, Findings, Level};
use tortie_oracle::Stored;

type Contradiction = (String, String);

pub(super) fn check(key: &Key, stored: &Stored, resource: &Resource, found: &mut Findings) {
    for (field, problem) in of_policy(resource) {
        let witness = "this holds whatever the cluster".to_owned();
        let advice = "remove one of the criteria, or the rule";
        found.add(
            (key, stored),
            &field,
            (Level::Error, Code::NeverMatches),
            FindingText::new(problem, witness, advice),
        );
    }
}

fn of_policy(resource: &Resource) -> Vec<Contradiction> {
    let mut all = Vec::new();
    match resource {
        Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
            calico(&policy.spec.ingress, &policy.spec.egress, &mut all);
            spoken(&policy.spec, &mut all);
        }
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            calico(&policy.spec.ingress, &policy.spec.egress, &mut all);
            spoken(&policy.spec, &mut all);
        }
        Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
            kubernetes(&policy.spec, &mut all);
            let types = policy.effective_types();
            let counts = [!policy.spec.ingress.is_empty(), !policy.spec.egress.is_empty()];
            all.extend(left_out(&types, counts, "policyTypes"));
        }
        Resource::ClusterPolicy(policy) => cluster(policy, &mut all),
        _ => {}
    }
    all
}

/// Finds rules of a direction that is missing in the policy's `types`.
fn spoken(spec: &tortie_api::calico::PolicySpec, all: &mut Vec<Contradiction>) {
    let counts = [!spec.ingress.is_empty(), !spec.egress.is_empty()];
    all.extend(left_out(&spec.effective_types(), counts, "types"));
    for (selector, field) in [
        (&spec.selector, "spec.selector"),
        (&spec.namespace_selector, "spec.namespaceSelector"),
        (&spec.service_account_selector, "spec.serviceAccountSelector"),
    ] {
        all.extend(selector.as_ref().and_then(|selector| Some((field.to_owned(), of_selector(selector)?))));
    }
}

/// The directions (ingress and egress) with rules that the policy's types leave out.
fn left_out<'a>(
    types: &'a [PolicyType],
    has_rules: [bool; 2],
    field: &'a str,
) -> impl Iterator<Item = Contradiction> {
    let directions = [(PolicyType::Ingress, "ingress"), (PolicyType::Egress, "egress")];
    let with_rules = directions.into_iter().zip(has_rules).filter(|(_, has_rules)| *has_rules);
    with_rules.filter(|((direction, _), _)| !types.contains(direction)).map(move |((direction, name), _)| {
        (
            format!("spec.{name}"),
            format!("{field} leaves {direction:?} out, so these rules are never evaluated"),
        )
    })
}

fn calico(ingress: &[Rule], egress: &[Rule], all: &mut Vec<Contradiction>) {
    for (rules, direction) in [(ingress, "ingress"), (egress, "egress")] {
        for (index, rule) in rules.iter().enumerate() {
            of_rule(rule, &format!("spec.{direction}[{index}]"), all);
        }
    }
}

fn of_rule(rule: &Rule, path: &str, all: &mut Vec<Contradiction>) {
    let mut wrong = |field: &str, problem: String| all.push((format!("{path}.{field}"), problem));
    let protocol = rule.protocol.map(|ProtocolName(protocol)| protocol);
    if rule.protocol.is_some() && rule.protocol == rule.not_protocol {
        wrong("notProtocol", "protocol and notProtocol are the same".to_owned());
    }
    if let (Some(icmp), Some(not)) = (rule.icmp, rule.not_icmp)
        && covers(not, icmp)
    {
        wrong("notICMP", "notICMP excludes everything that icmp matches".to_owned());
    }
    if rule.http.is_some() {
        let problem =
            "nothing looks into requests yet, so a rule with http matches no packet (policy decision 15)";
        wrong("http", problem.to_owned());
    }
    let family = |nets: &[Cidr]| nets.first().map(|Cidr(net)| if net.addr().is_ipv4() { 4u8 } else { 6 });
    let by_protocol = match protocol {
        Some(Protocol::ICMP) => Some(4),
        Some(Protocol::ICMPV6) => Some(6),
        _ => None,
    };
    let versions = [
        ("ipVersion", rule.ip_version),
        ("protocol", by_protocol),
        ("source.nets", family(&rule.source.nets)),
        ("destination.nets", family(&rule.destination.nets)),
    ];
    let versions: Vec<(&str, u8)> =
        versions.iter().filter_map(|(field, version)| Some((*field, (*version)?))).collect();
    if let Some((first, version)) = versions.first()
        && let Some((field, other)) = versions.iter().find(|(_, other)| other != version)
    {
        wrong(field, format!("{first} matches IPv{version}, {field} matches IPv{other}"));
    }
    for (side, name) in [(&rule.source, "source"), (&rule.destination, "destination")] {
        of_side(side, protocol, &format!("{path}.{name}"), all);
    }
}

fn covers(not: Icmp, icmp: Icmp) -> bool {
    let covered = |not: Option<u8>, wanted: Option<u8>| not.is_none() || not == wanted;
    covered(not.icmp_type, icmp.icmp_type) && covered(not.code, icmp.code)
}

fn of_side(side: &EntityRule, protocol: Option<Protocol>, path: &str, all: &mut Vec<Contradiction>) {
    let mut wrong = |field: &str, problem: String| all.push((format!("{path}.{field}"), problem));
    let excluded = |Cidr(net): &Cidr| side.not_nets.iter().any(|Cidr(not)| not.contains(net));
    if !side.nets.is_empty() && side.nets.iter().all(excluded) {
        wrong("notNets", "notNets holds every network of nets".to_owned());
    }
    if !side.ports.is_empty() && side.ports.iter().all(|port| excludes(&side.not_ports, port)) {
        wrong("notPorts", "notPorts holds every port of ports".to_owned());
    }
    if let Some(protocol) = protocol.filter(|protocol| !protocol.has_ports() && !side.ports.is_empty()) {
        wrong("ports", format!("{protocol} has no ports"));
    }
    for (selector, field) in [
        (&side.selector, "selector"),
        (&side.namespace_selector, "namespaceSelector"),
        (
            &side.service_accounts.as_ref().and_then(|accounts| accounts.selector.clone()),
            "serviceAccounts.selector",
        ),
    ] {
        if let Some(problem) = selector.as_ref().and_then(of_selector) {
            wrong(field, problem);
        }
    }
    if let Some(not) = &side.not_selector
        && (not.is_all()
            || side.selector.as_ref().is_some_and(|selector| selector.canonical() == not.canonical()))
    {
        let problem = match &side.selector {
            Some(selector) => format!("notSelector excludes everything that selector ({selector}) means"),
            None => "notSelector excludes every pod and network set".to_owned(),
        };
        // Without a selector in a cluster-wide policy, the rule still matches addresses that belong to no pod or
        // network set.
        if side.selector.is_some() {
            wrong("notSelector", problem);
        }
    }
    let global = side.namespace_selector.as_ref().is_some_and(Selector::is_global);
    if global && side.service_accounts.as_ref().is_some_and(|accounts| !accounts.names.is_empty()) {
        wrong("serviceAccounts", "what has no namespace (global()) has no service account".to_owned());
    }
}

/// Whether the ports include all of this port.
fn excludes(ports: &[Port], port: &Port) -> bool {
    match port {
        Port::Named(name) => ports.iter().any(|not| matches!(not, Port::Named(other) if other == name)),
        Port::Range(range) => {
            let mut ranges: Vec<PortRange> = ports
                .iter()
                .filter_map(|not| match not {
                    Port::Range(range) => Some(*range),
                    Port::Named(_) => None,
                })
                .collect();
            ranges.sort();
            let mut next = u32::from(range.first);
            for not in ranges {
                if u32::from(not.first) <= next {
                    next = next.max(u32::from(not.last) + 1);
                }
            }
            next > u32::from(range.last)
        }
    }
}

/// The reason why the selector can match nothing, if there is one.
pub(super) fn of_selector(selector: &Selector) -> Option<String> {
    let restrictions = selector.restrictions();
    let mut impossible = restrictions.iter().filter(|(_, restriction)| {
        restriction.values.as_ref().is_some_and(std::collections::BTreeSet::is_empty)
            || (restriction.present && restriction.absent)
    });
    let (label, _) = impossible.next()?;
    Some(format!("{selector} asks label {label} for several things at once"))
}

fn kubernetes(spec: &NetworkPolicySpec, all: &mut Vec<Contradiction>) {
    all.extend(of_labels(&spec.pod_selector).map(|problem| ("spec.podSelector".to_owned(), problem)));
    for (rules, direction, side) in [(&spec.ingress, "ingress", "from"), (&spec.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            for (number, peer) in rule.peers.iter().enumerate() {
                of_peer(peer, &format!("spec.{direction}[{index}].{side}[{number}]"), all);
            }
        }
    }
}

fn of_peer(peer: &NetworkPolicyPeer, path: &str, all: &mut Vec<Contradiction>) {
    if let Some(block) = &peer.ip_block
        && block.except.iter().any(|Cidr(except)| except.contains(&block.cidr.0))
    {
        all.push((format!("{path}.ipBlock.except"), "except holds all of cidr".to_owned()));
    }
    for (selector, field) in
        [(&peer.namespace_selector, "namespaceSelector"), (&peer.pod_selector, "podSelector")]
    {
        let problem = selector.as_ref().and_then(of_labels);
        all.extend(problem.map(|problem| (format!("{path}.{field}"), problem)));
    }
}

fn cluster(policy: &ClusterPolicy, all: &mut Vec<Contradiction>) {
    let mut of = |peer: &ClusterPeer, path: String| match peer {
        ClusterPeer::Namespaces(selector) => {
            all.extend(of_labels(selector).map(|problem| (format!("{path}.namespaces"), problem)));
        }
        ClusterPeer::Pods { namespaces, pods } => {
            for (selector, field) in [(namespaces, "namespaceSelector"), (pods, "podSelector")] {
                all.extend(of_labels(selector).map(|problem| (format!("{path}.pods.{field}"), problem)));
            }
        }
        ClusterPeer::Nodes(selector) => {
            all.extend(of_labels(selector).map(|problem| (format!("{path}.nodes"), problem)));
        }
        ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => {}
    };
    of(&policy.subject, "spec.subject".to_owned());
    for (rules, direction, side) in [(&policy.ingress, "ingress", "from"), (&policy.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            for (number, peer) in rule.peers.iter().enumerate() {
                of(peer, format!("spec.{direction}[{index}].{side}[{number}]"));
            }
        }
    }
}

/// The reason why a Kubernetes selector can match nothing, if there is one.
pub(super) fn of_labels(selector: &LabelSelector) -> Option<String> {
    let contradicts = |key: &String| {
        let mut present = selector.match_labels.contains_key(key);
        let mut absent = false;
        let mut values: Option<Vec<&String>> = selector.match_labels.get(key).map(|value| vec![value]);
        for requirement in selector.match_expressions.iter().filter(|requirement| requirement.key == *key) {
            match requirement.operator.as_str() {
                "DoesNotExist" => absent = true,
                "Exists" => present = true,
                "In" => {
                    present = true;
                    let known = values.take().unwrap_or_else(|| requirement.values.iter().collect());
                    values =
                        Some(known.into_iter().filter(|value| requirement.values.contains(value)).collect());
                }
                "NotIn" => {
                    if let Some(known) = &mut values {
                        known.retain(|value| !requirement.values.contains(value));
                    }
                }
                _ => {}
            }
        }
        (present && absent) || values.is_some_and(|values| values.is_empty())
    };
    let keys = selector.match_labels.keys().chain(selector.match_expressions.iter().map(|one| &one.key));
    let label = keys.into_iter().find(|key| contradicts(key))?;
    Some(format!("it asks label {label} for several things at once"))
}
