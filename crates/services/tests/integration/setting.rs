//! A node, and Services and slices in short.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_services::{KINDS, Masquerading, NodePortAddresses, Outcome, Packet, Sender, Services};

pub(crate) const NODE: &str = "n1";

pub(crate) fn services() -> Services {
    let mut services = Services::new(NODE, NodePortAddresses::Primary);
    KINDS.into_iter().for_each(|kind| services.listed(kind));
    let addresses = json!([
        {"type": "InternalIP", "address": "192.0.2.1"}, {"type": "InternalIP", "address": "2001:db8::1"}]);
    put_node(&mut services, json!({"topology.kubernetes.io/zone": "a"}), addresses);
    services
}

pub(crate) fn put_node(services: &mut Services, labels: Value, addresses: Value) {
    let node = json!({"metadata": {"name": NODE, "labels": labels}, "status": {"addresses": addresses}});
    services.update(&Key::global(Kind::Node, NODE), Some(&node));
}

/// Puts the Service `ns/NAME`.
pub(crate) fn put(services: &mut Services, name: &str, service: &Value) {
    let mut value = service.clone();
    value["metadata"]["name"] = json!(name);
    services.update(&Key::namespaced(Kind::Service, "ns", name), Some(&value));
}

/// Puts a slice of the Service `ns/s`.
pub(crate) fn put_slice(services: &mut Services, name: &str, slice: &Value) {
    let mut value = slice.clone();
    value["metadata"]["name"] = json!(name);
    if value["metadata"]["labels"].is_null() {
        value["metadata"]["labels"] = json!({"kubernetes.io/service-name": "s"});
    }
    services.update(&Key::namespaced(Kind::EndpointSlice, "ns", name), Some(&value));
}

pub(crate) fn slice(endpoints: Value) -> Value {
    json!({"addressType": "IPv4", "endpoints": endpoints, "ports": [{"name": "", "port": 8080}]})
}

pub(crate) fn service(spec: Value) -> Value {
    let mut value = json!({"spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.1", "ports": [{"port": 80, "nodePort": 30080}]}});
    for (field, of_case) in spec.as_object().unwrap() {
        value["spec"][field] = of_case.clone();
    }
    value
}

/// An endpoint: its address, the node `n1` or another, and letters for ready, serving, terminating.
pub(crate) fn endpoint(address: &str, node: &str, state: &str) -> Value {
    let has = |letter| state.contains(letter);
    let conditions = json!({"ready": has('r'), "serving": has('s'), "terminating": has('t')});
    json!({"addresses": [address], "nodeName": node, "conditions": conditions})
}

/// The destinations of a packet of TCP in words: backends, with `!` where the source becomes the node's.
pub(crate) fn sent(services: &mut Services, from: (Sender, &str), to: &str, port: u16) -> String {
    sent_by(services, from, to, (Protocol::TCP, port))
}

pub(crate) fn sent_by(
    services: &mut Services,
    (sender, source): (Sender, &str),
    to: &str,
    (protocol, port): (Protocol, u16),
) -> String {
    services.flush().unwrap();
    let destination = to.parse().unwrap();
    let packet = Packet {
        source: source.parse().unwrap(),
        sender,
        destination,
        is_to_node: ["192.0.2.1", "192.0.2.9", "2001:db8::1", "127.0.0.1"].contains(&to),
        protocol,
        port,
    };
    let masquerading = Masquerading { all: false, knows_pods: true };
    match services.state().evaluate(&packet, masquerading, &BTreeSet::new()) {
        Outcome::Untouched => "untouched".to_owned(),
        Outcome::Dropped => "dropped".to_owned(),
        Outcome::Rejected => "rejected".to_owned(),
        Outcome::Translated(all) => {
            let words = all.iter().map(|one| {
                let mark = if one.masquerade { "!" } else { "" };
                format!("{}:{}{mark}", one.backend.address, one.backend.port)
            });
            words.collect::<Vec<_>>().join(" ")
        }
    }
}

pub(crate) const POD: (Sender, &str) = (Sender::Pod, "10.0.0.99");
pub(crate) const NODE_ITSELF: (Sender, &str) = (Sender::Node, "192.0.2.1");
pub(crate) const OTHER: (Sender, &str) = (Sender::Other, "203.0.113.5");

pub(crate) fn problems(services: &Services) -> Vec<String> {
    services.problems().iter().map(ToString::to_string).collect()
}
