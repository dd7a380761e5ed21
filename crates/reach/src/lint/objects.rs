//! Problems of whole objects, or of fields that only their text shows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::calico::WELL_KNOWN_TIERS;
use tortie_api::{Cidr, Key, Kind, Resource, spelling, stand_in};

use super::{Code, FindingText, Findings, Level, policies};
use tortie_oracle::{Oracle, Snapshot, Stored};

pub(super) fn check(snapshot: &Snapshot, found: &mut Findings) {
    not_understood(snapshot, found);
    unknown_tiers(snapshot, found);
    equal_priorities(snapshot, found);
    empty_accounts(snapshot, found);
    cluster_ips(snapshot, found);
    spelling(snapshot, found);
}

/// Agents read such words as Calico's do, and Calico's API would not take the policy.
fn spelling(snapshot: &Snapshot, found: &mut Findings) {
    for (key, stored) in snapshot.iter() {
        for error in spelling::check(key.kind, &stored.value) {
            let text = FindingText::new(
                error.problem,
                "it counts as that word, on Calico's agents, too, and Calico's API refuses it",
                "write it so",
            );
            found.add((key, stored), &error.path, (Level::Warning, Code::Spelling), text);
        }
    }
}

fn not_understood(snapshot: &Snapshot, found: &mut Findings) {
    for (key, stored) in snapshot.iter() {
        let matters = key.kind.is_policy() || matches!(key.kind, Kind::Tier | Kind::Profile);
        if let (Err(problem), true) = (&stored.resource, matters) {
            let text = FindingText::new(
                format!("it cannot be understood: {problem}"),
                "until then it denies where it stands",
                "correct the field; tortie apply reports what is wrong",
            );
            found.add((key, stored), "", (Level::Error, Code::NotUnderstood), text);
        }
    }
}

fn unknown_tiers(snapshot: &Snapshot, found: &mut Findings) {
    let oracle = Oracle::new(snapshot);
    let there = |tier: &str| {
        WELL_KNOWN_TIERS.iter().any(|(known, ..)| *known == tier)
            || snapshot.get(&Key::global(Kind::Tier, tier)).is_some()
    };
    for policy in oracle.policies().filter(|policy| !policy.tier.is_empty() && !there(policy.tier)) {
        let name = policy.name;
        let key = Kind::all().find(|kind| kind.to_string() == name.kind);
        let key = key.map(|kind| Key { kind, namespace: name.namespace.clone(), name: name.name.clone() });
        if let Some((key, stored)) = key.and_then(|key| Some((key.clone(), snapshot.get(&key)?))) {
            let text = FindingText::new(
                format!("tier {} does not exist", policy.tier),
                "such policies stand after all tiers, and what they do not allow is denied",
                "create the tier, or name one that is there",
            );
            found.add((&key, stored), "spec.tier", (Level::Error, Code::UnknownTier), text);
        }
    }
}

/// Only the names then determine the order (policy decision 9).
fn equal_priorities(snapshot: &Snapshot, found: &mut Findings) {
    let mut at: BTreeMap<(&str, u16), Vec<(&Key, &Stored)>> = BTreeMap::new();
    for (key, stored, resource) in policies(snapshot) {
        if let Resource::ClusterPolicy(policy) = resource
            && let Some(priority) = policy.priority
        {
            at.entry((policy.tier.name(), priority)).or_default().push((key, stored));
        }
    }
    for ((tier, priority), policies) in at.into_iter().filter(|(_, policies)| policies.len() > 1) {
        let Some((first, _)) = policies.first() else { continue };
        for (key, stored) in policies.iter().skip(1) {
            let text = FindingText::new(
                format!("{first} has priority {priority} in tier {tier}, too"),
                format!("by name {first} comes first; other implementations may choose another order"),
                "give them different priorities",
            );
            found.add((key, stored), "spec.priority", (Level::Warning, Code::EqualPriorities), text);
        }
    }
}

/// `serviceAccounts: {}` has no effect, but readers may think that it matches nothing or everything.
fn empty_accounts(snapshot: &Snapshot, found: &mut Findings) {
    for (key, stored, _) in policies(snapshot) {
        for direction in ["ingress", "egress"] {
            let rules = stored.value["spec"][direction].as_array();
            for (index, rule) in rules.into_iter().flatten().enumerate() {
                for side in ["source", "destination"] {
                    if !is_empty(&rule[side]["serviceAccounts"]) {
                        continue;
                    }
                    let text = FindingText::new(
                        "it names no service account and selects none, so it has no effect",
                        "the rule also matches what is no pod",
                        "name accounts, select them (selector: all() is any pod's), or leave it out",
                    );
                    let field = format!("spec.{direction}[{index}].{side}.serviceAccounts");
                    found.add((key, stored), &field, (Level::Warning, Code::EmptyServiceAccounts), text);
                }
            }
        }
    }
}

fn is_empty(accounts: &Value) -> bool {
    let nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Array(names) => names.is_empty(),
        Value::String(selector) => selector.trim().is_empty(),
        _ => false,
    };
    accounts.as_object().is_some_and(|fields| fields.values().all(nothing))
}

/// Packets to a Service have a backend's address when policy sees them (policy decision 6).
fn cluster_ips(snapshot: &Snapshot, found: &mut Findings) {
    let mut services: BTreeMap<IpAddr, &Key> = BTreeMap::new();
    for (key, stored) in snapshot.iter() {
        if let Ok(Resource::Service(service)) = &stored.resource {
            let given = |address: &IpAddr| !stand_in::is_stand_in(address);
            services.extend(service.cluster_ips().into_iter().filter(given).map(|address| (address, key)));
        }
    }
    let oracle = Oracle::new(snapshot);
    let mut taken: BTreeSet<IpAddr> = oracle.pods().flat_map(|pod| pod.addresses().to_vec()).collect();
    taken.extend(oracle.nodes().flat_map(|node| node.all().collect::<Vec<_>>()));
    for (key, stored, resource) in policies(snapshot) {
        for (field, net) in nets(resource) {
            let held = |(address, _): &(&IpAddr, &&Key)| net.contains(*address);
            let Some((address, service)) = services.iter().find(held) else { continue };
            if net.prefix_len() == 0 || taken.iter().any(|address| net.contains(address)) {
                continue;
            }
            let text = FindingText::new(
                format!(
                    "{net} holds {address}, which is {service}'s own address: packets never have it when policy is evaluated"
                ),
                format!("policy sees the backends of {service}; no pod and no node lies in {net}"),
                "name the Service (services) or select its pods",
            );
            found.add((key, stored), &field, (Level::Warning, Code::ClusterIp), text);
        }
    }
}

/// The networks in a policy's rules.
fn nets(resource: &Resource) -> Vec<(String, IpNet)> {
    use tortie_api::calico::Rule;
    let mut all = Vec::new();
    let mut calico = |rules: &[Rule], direction: &str| {
        for (index, rule) in rules.iter().enumerate() {
            for (side, name) in [(&rule.source, "source"), (&rule.destination, "destination")] {
                for (number, Cidr(net)) in side.nets.iter().enumerate() {
                    all.push((format!("spec.{direction}[{index}].{name}.nets[{number}]"), *net));
                }
            }
        }
    };
    match resource {
        Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
            calico(&policy.spec.ingress, "ingress");
            calico(&policy.spec.egress, "egress");
        }
        // Before DNAT, packets do have it.
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy)
            if !policy.spec.pre_dnat =>
        {
            calico(&policy.spec.ingress, "ingress");
            calico(&policy.spec.egress, "egress");
        }
        Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
            let sides = [(&policy.spec.ingress, "ingress", "from"), (&policy.spec.egress, "egress", "to")];
            for (rules, direction, side) in sides {
                for (index, rule) in rules.iter().enumerate() {
                    for (number, peer) in rule.peers.iter().enumerate() {
                        let field = format!("spec.{direction}[{index}].{side}[{number}].ipBlock.cidr");
                        all.extend(peer.ip_block.as_ref().map(|block| (field, block.cidr.0)));
                    }
                }
            }
        }
        _ => {}
    }
    all
}
