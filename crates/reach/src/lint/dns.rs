//! Pods that may reach others, and not the cluster's DNS: their programs find nobody by name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::net::{Action, Protocol};
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{DecidedBy, Oracle, Peer, PolicyName, Question, Snapshot, Stored, Trace, Verdict};

use super::{Code, FindingText, Findings, Level};
use crate::CLIENT_PORT;

/// The port of DNS.
const DNS: u16 = 53;
/// The namespace and the names of the Service that the kubelet gives to pods (`clusterDNS`), as distributions name it.
const SERVICES: (&str, [&str; 2]) = ("kube-system", ["kube-dns", "coredns"]);
/// The maximum number of named pods.
const MAX_PODS: usize = 3;

pub(super) fn check(snapshot: &Snapshot, found: &mut Findings) {
    let Some((service, backends)) = dns(snapshot) else { return };
    let oracle = Oracle::new(snapshot);
    let mut cut: BTreeMap<PolicyName, BTreeSet<String>> = BTreeMap::new();
    for pod in unlike(&oracle) {
        let Some(trace) = refused(&oracle, &pod, &backends) else { continue };
        for policy in deciding(&trace) {
            cut.entry(policy).or_default().insert(pod.to_string());
        }
    }
    for (policy, pods) in cut {
        let Some((key, stored)) = object(snapshot, &policy) else { continue };
        let mut shown = pods.iter().take(MAX_PODS).cloned().collect::<Vec<_>>().join(", ");
        if pods.len() > MAX_PODS {
            shown += &format!(" and {} more", pods.len() - MAX_PODS);
        }
        let text = FindingText::new(
            format!("{shown} may reach others, and not {service} (udp/{DNS}), so they find nobody by name"),
            "no rule allows packets to the backends of that Service",
            format!(
                "allow egress to udp/{DNS} and tcp/{DNS} of {service}, unless the pods use addresses only"
            ),
        );
        found.add((&key, stored), "", (Level::Warning, Code::NoDns), text);
    }
}

/// The Service of the cluster's DNS, and its backends for UDP, if both are given.
fn dns(snapshot: &Snapshot) -> Option<(String, Vec<(IpAddr, u16)>)> {
    let (namespace, names) = SERVICES;
    let name = names
        .into_iter()
        .find(|name| snapshot.get(&Key::namespaced(Kind::Service, namespace, *name)).is_some())?;
    let slices = snapshot.iter().filter_map(|(key, stored)| match &stored.resource {
        Ok(Resource::EndpointSlice(slice)) if key.namespace == namespace => Some(slice),
        _ => None,
    });
    let of_service = slices.filter(|slice| slice.service() == Some(name));
    let backends: Vec<(IpAddr, u16)> = of_service
        .flat_map(|slice| slice.backends())
        .filter(|(_, protocol, _)| *protocol == Protocol::UDP)
        .map(|(address, _, port)| (address, port))
        .collect();
    (!backends.is_empty()).then(|| (format!("Service {namespace}/{name}"), backends))
}

/// One pod of each kind that selectors can tell apart.
fn unlike(oracle: &Oracle<'_>) -> Vec<Peer> {
    let mut pods = BTreeMap::new();
    for pod in oracle.pods() {
        let subject = pod.subject();
        let (namespace, name) = (subject.namespace().to_owned(), subject.name().to_owned());
        let kind = (namespace.clone(), subject.account().to_owned(), subject.labels().clone());
        pods.entry(kind).or_insert(Peer::Pod { namespace, name });
    }
    pods.into_values().collect()
}

/// The evaluation that denies the pod's questions to all backends.
fn refused(oracle: &Oracle<'_>, pod: &Peer, backends: &[(IpAddr, u16)]) -> Option<Trace> {
    let mut refused = None;
    for (address, port) in backends {
        let question = Question {
            from: pod.clone(),
            to: Peer::Address(*address),
            protocol: Protocol::UDP,
            source_port: CLIENT_PORT,
            destination_port: *port,
            icmp: None,
            via: None,
            by_node: None,
        };
        // A pod without an address of the backend's family asks another one.
        let Ok(answer) = oracle.evaluate(&question) else { continue };
        if answer.verdict == Verdict::Allow {
            return None;
        }
        // A policy of the DNS servers that admits some pods only is meant so.
        let trace = answer.egress.filter(|trace| trace.verdict == Verdict::Deny)?;
        refused = refused.or(Some(trace));
    }
    refused
}

/// The policies of the tier at whose end the packet is denied, if one of them allows anything. A rule that denies, and a pod that may reach
/// nobody, are meant so.
fn deciding(trace: &Trace) -> Vec<PolicyName> {
    let DecidedBy::EndOfTier { tier: name } = &trace.decided_by else { return Vec::new() };
    let policies = trace.tiers.iter().filter(|tier| tier.name == *name).flat_map(|tier| &tier.policies);
    let allowing = policies
        .filter(|policy| !policy.staged && policy.rules.iter().any(|rule| rule.action == Action::Allow));
    allowing.map(|policy| policy.policy.clone()).collect()
}

fn object<'a>(snapshot: &'a Snapshot, name: &PolicyName) -> Option<(Key, &'a Stored)> {
    let kind = Kind::all().find(|kind| kind.to_string() == name.kind)?;
    let key = Key { kind, namespace: name.namespace.clone(), name: name.name.clone() };
    let stored = snapshot.get(&key)?;
    Some((key, stored))
}
