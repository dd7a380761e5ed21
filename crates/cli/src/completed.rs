//! Completes manifests to the objects of a cluster: namespaces and service accounts exist, nodes, pods and Services have
//! addresses, Services have backends. Additions are noted, except for the addresses of Services.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::kubernetes::{Node, Pod, implied_slices, is_implied};
use tortie_api::manifest::first_pod;
use tortie_api::{Key, Kind, Resource, stand_in};
use tortie_oracle::{Snapshot, Stored};

use crate::manifests;

/// The annotations in which Calico's CNI plugin records a pod's addresses, before the kubelet does.
const NOTED_ADDRESSES: [&str; 2] = ["cni.projectcalico.org/podIPs", "cni.projectcalico.org/podIP"];
/// The maximum number of names in a note.
const MAX_NAMES: usize = 5;

/// Completes the objects of manifests; returns notes for the user.
pub(crate) fn complete(snapshot: &mut Snapshot) -> Vec<String> {
    let mut notes = Vec::new();
    two_names(snapshot, &mut notes);
    add_namespaces(snapshot, &mut notes);
    add_accounts(snapshot, &mut notes);
    add_nodes(snapshot, &mut notes);
    add_addresses(snapshot, &mut notes);
    of_hosts(snapshot);
    imply_slices(snapshot);
    add_service_addresses(snapshot);
    notes
}

/// Notes policies that are given under both names that Calico's datastore has for one.
fn two_names(snapshot: &Snapshot, notes: &mut Vec<String>) {
    for (key, stored) in snapshot.iter().filter(|(key, _)| !key.name.starts_with("default.")) {
        let of_default = |stored: &Stored| manifests::is_of_default_tier(&stored.value);
        let other = manifests::other_name(key).filter(|_| of_default(stored));
        if let Some(other) = other.filter(|other| snapshot.get(other).is_some_and(of_default)) {
            notes.push(format!(
                "{key} and {} are one policy in Calico's datastore, and two here: one of them is probably old",
                other.name
            ));
        }
    }
}

/// Gives Services the addresses that the API server would assign, from 248.0.0.0/5, which nobody uses. Without one, a Service is
/// headless, and nodes translate none of its addresses.
fn add_service_addresses(snapshot: &mut Snapshot) {
    let lacks = |spec: &Value| {
        let is_empty = |field: &str| match &spec[field] {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(all) => all.is_empty(),
            _ => false,
        };
        is_empty("clusterIP") && is_empty("clusterIPs") && spec["type"] != "ExternalName"
    };
    let services = snapshot.iter().filter(|(key, stored)| {
        key.kind == Kind::Service && stored.resource.is_ok() && lacks(&stored.value["spec"])
    });
    let services: Vec<Key> = services.map(|(key, _)| key.clone()).collect();
    for (key, number) in services.iter().zip(1u32..) {
        let address = stand_in::of_service(number);
        change(snapshot, key, |value| {
            let spec = mapping(value, "spec");
            spec.map(|spec| spec.insert("clusterIP".to_owned(), json!(address)));
        });
    }
}

/// Recreates the slices that Kubernetes would create from Services and pods.
pub(crate) fn imply_slices(snapshot: &mut Snapshot) {
    let implied = implied_slices(snapshot.iter().map(|(key, stored)| (key, &stored.value)));
    let ours =
        snapshot.iter().filter(|(key, stored)| key.kind == Kind::EndpointSlice && is_implied(&stored.value));
    for key in ours.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
        snapshot.remove(&key);
    }
    for (key, value) in implied {
        snapshot.insert(key, value, None);
    }
}

/// Whether the slices of a cluster were created by [`imply_slices`].
pub(crate) fn has_implied_slices(snapshot: &Snapshot) -> bool {
    snapshot.iter().any(|(key, stored)| key.kind == Kind::EndpointSlice && is_implied(&stored.value))
}

/// Adds namespaces that objects name and that are not given.
fn add_namespaces(snapshot: &mut Snapshot, notes: &mut Vec<String>) {
    let used =
        snapshot.iter().map(|(key, _)| key.namespace.clone()).filter(|namespace| !namespace.is_empty());
    for name in used.collect::<BTreeSet<String>>() {
        let key = Key::global(Kind::Namespace, &name);
        if snapshot.get(&key).is_none() {
            if name != "default" {
                notes.push(format!("namespace {name} is not given: assumed to have no labels"));
            }
            snapshot.insert(key, json!({"metadata": {"name": name}}), None);
        }
    }
}

/// Adds service accounts of pods that are not given. Every namespace of a cluster has one called `default`.
fn add_accounts(snapshot: &mut Snapshot, notes: &mut Vec<String>) {
    let used = pods(snapshot).map(|(key, pod)| (key.namespace.clone(), pod.service_account().to_owned()));
    let used: BTreeSet<(String, String)> = used.collect();
    let mut added = Vec::new();
    for (namespace, name) in used {
        let key = Key::namespaced(Kind::ServiceAccount, &namespace, &name);
        if snapshot.get(&key).is_none() {
            snapshot.insert(key, json!({"metadata": {"name": name, "namespace": namespace}}), None);
            added.push(format!("{namespace}/{name}"));
        }
    }
    let needs_accounts = snapshot.iter().any(|(_, stored)| names_accounts(&stored.value["spec"]));
    if needs_accounts && !added.is_empty() {
        notes.push(format!(
            "service accounts that are not given are assumed to have no labels: {}",
            listed(&added)
        ));
    }
}

/// Whether a policy refers to service accounts.
fn names_accounts(spec: &Value) -> bool {
    let in_rule =
        |rule: &Value| ["source", "destination"].iter().any(|side| !rule[*side]["serviceAccounts"].is_null());
    let in_rules = |side: &str| spec[side].as_array().into_iter().flatten().any(in_rule);
    !spec["serviceAccountSelector"].is_null() || in_rules("ingress") || in_rules("egress")
}

/// Adds the nodes of pods that use their node's network.
fn add_nodes(snapshot: &mut Snapshot, notes: &mut Vec<String>) {
    let on_hosts = pods(snapshot).filter(|(_, pod)| pod.spec.host_network);
    let on_hosts: Vec<(Key, Pod)> = on_hosts.map(|(key, pod)| (key.clone(), pod.clone())).collect();
    for (key, pod) in on_hosts {
        let node = match pod.spec.node_name.as_deref().filter(|name| !name.is_empty()) {
            Some(name) => name.to_owned(),
            None => format!("{}-{}-node", key.namespace, key.name),
        };
        let node_key = Key::global(Kind::Node, &node);
        if snapshot.get(&node_key).is_none() {
            let addresses = addresses_of(&pod)
                .into_iter()
                .map(|address| json!({"type": "InternalIP", "address": address}));
            let value =
                json!({"metadata": {"name": node}, "status": {"addresses": addresses.collect::<Vec<_>>()}});
            snapshot.insert(node_key, value, None);
            let (namespace, name) = (&key.namespace, &key.name);
            notes.push(format!(
                "pod {namespace}/{name} uses the network of its node, which is not given: assumed to be node {node}"
            ));
        }
        if pod.spec.node_name.as_deref() != Some(node.as_str()) {
            change(snapshot, &key, |value| {
                let spec = mapping(value, "spec");
                spec.map(|spec| spec.insert("nodeName".to_owned(), json!(node)));
            });
        }
    }
}

/// Adds addresses of pods and nodes without one: from other fields in which Calico or the kubelet records them,
/// otherwise from 240.0.0.0/4, which nobody uses. Rules by network do not match those, except 0.0.0.0/0 and networks
/// that nobody should have.
fn add_addresses(snapshot: &mut Snapshot, notes: &mut Vec<String>) {
    let noted = |(key, stored): (&Key, &Stored)| match &stored.resource {
        Ok(Resource::Pod(pod)) if pod.status.addresses().is_empty() => Some((key.clone(), addresses_of(pod))),
        Ok(Resource::Node(node)) if node.address().is_none() => Some((key.clone(), internal(&stored.value))),
        _ => None,
    };
    let host = |key: &Key| matches!(snapshot.get(key).map(|stored| &stored.resource), Some(Ok(Resource::Pod(pod))) if pod.spec.host_network);
    let without: Vec<(Key, Vec<IpAddr>)> = snapshot.iter().filter_map(noted).collect();
    let without: Vec<(Key, Vec<IpAddr>)> =
        without.into_iter().filter(|(key, addresses)| !(addresses.is_empty() && host(key))).collect();
    // So that the second pods of workloads change no address of others.
    let (others, seconds): (Vec<_>, Vec<_>) =
        without.into_iter().partition(|(key, _)| key.kind != Kind::Pod || first_pod(&key.name).is_none());
    let (mut last, mut made) = (0u32, 0);
    for (key, mut addresses) in others.into_iter().chain(seconds) {
        let has_v4 = addresses.iter().any(IpAddr::is_ipv4);
        if addresses.is_empty() || (key.kind == Kind::Node && !has_v4) {
            last += 1;
            made += usize::from(first_pod(&key.name).is_none());
            addresses.insert(0, stand_in::of_end(last).into());
        }
        change(snapshot, &key, |value| match key.kind {
            Kind::Pod => set_addresses(value, &addresses),
            _ => annotate(value, &addresses),
        });
    }
    match made {
        0 => {}
        1 => notes.push("1 pod or node has no address yet: an address from 240.0.0.0/4 is used".to_owned()),
        count => notes
            .push(format!("{count} pods and nodes have no address yet: addresses from 240.0.0.0/4 are used")),
    }
}

/// Gives pods that use their node's network the node's addresses.
fn of_hosts(snapshot: &mut Snapshot) {
    let node_of = |pod: &Pod| {
        let node = snapshot.get(&Key::global(Kind::Node, pod.spec.node_name.as_deref()?))?;
        match &node.resource {
            Ok(Resource::Node(node)) => Some(node),
            _ => None,
        }
    };
    let of_pod = |(key, pod): (&Key, &Pod)| {
        let node = node_of(pod).filter(|_| pod.spec.host_network && pod.status.addresses().is_empty())?;
        let own = node.address().map(IpAddr::V4).into_iter().chain(node.address_v6().map(IpAddr::V6));
        Some((key.clone(), own.collect::<Vec<_>>()))
    };
    for (key, addresses) in pods(snapshot).filter_map(of_pod).collect::<Vec<_>>() {
        change(snapshot, &key, |value| set_addresses(value, &addresses));
    }
}

fn pods(snapshot: &Snapshot) -> impl Iterator<Item = (&Key, &Pod)> {
    snapshot.iter().filter_map(|(key, stored)| match &stored.resource {
        Ok(Resource::Pod(pod)) => Some((key, pod)),
        _ => None,
    })
}

/// A pod's addresses, from its status or from Calico's annotations.
fn addresses_of(pod: &Pod) -> Vec<IpAddr> {
    let known = pod.status.addresses();
    if !known.is_empty() {
        return known;
    }
    let noted = NOTED_ADDRESSES.iter().filter_map(|name| pod.metadata.annotations.get(*name));
    let noted = noted.map(|text| text.split(',').filter_map(|one| address(one.trim())).collect::<Vec<_>>());
    noted.into_iter().find(|addresses| !addresses.is_empty()).unwrap_or_default()
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse().ok().or_else(|| text.parse::<IpNet>().ok().map(|net| net.addr()))
}

/// The addresses that the kubelet reports for its node.
fn internal(node: &Value) -> Vec<IpAddr> {
    let reported = node.pointer("/status/addresses").and_then(Value::as_array).into_iter().flatten();
    let internal = reported.filter(|address| address["type"] == "InternalIP");
    internal.filter_map(|address| address["address"].as_str()?.parse().ok()).collect()
}

fn set_addresses(pod: &mut Value, addresses: &[IpAddr]) {
    if let Some(status) = mapping(pod, "status") {
        status.insert("podIP".to_owned(), json!(addresses.first()));
        let all: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
        status.insert("podIPs".to_owned(), json!(all));
    }
}

fn annotate(node: &mut Value, addresses: &[IpAddr]) {
    let Some(metadata) = node.get_mut("metadata") else { return };
    let Some(annotations) = mapping(metadata, "annotations") else { return };
    for address in addresses {
        let name = if address.is_ipv4() { Node::ADDRESS } else { Node::ADDRESS_V6 };
        annotations.entry(name).or_insert_with(|| json!(address));
    }
}

/// The mapping of this name in an object; created if it does not exist.
fn mapping<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut serde_json::Map<String, Value>> {
    value.as_object_mut()?.entry(name).or_insert_with(|| json!({})).as_object_mut()
}

fn change(snapshot: &mut Snapshot, key: &Key, change: impl FnOnce(&mut Value)) {
    let Some(Stored { mut value, written, .. }) = snapshot.get(key).cloned() else { return };
    change(&mut value);
    snapshot.insert(key.clone(), value, written);
}

/// Some names, and the number of the others.
fn listed(names: &[String]) -> String {
    let mut shown = names.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > MAX_NAMES {
        shown += &format!(" and {} more", names.len() - MAX_NAMES);
    }
    shown
}
