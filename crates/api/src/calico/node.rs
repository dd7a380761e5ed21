//! Calico's Node. In etcd, it is an object of its own; in a Kubernetes API, its fields are annotations of the Kubernetes Node
//! (`libcalico-go/lib/backend/k8s/resources/node.go`). Tortie has the latter form everywhere, so it is translated where Calico's form is
//! read and written.

use serde_json::{Map, Value, json};

use crate::Kind;
use crate::kubernetes::Node;

const CALICO: &str = "projectcalico.org/v3";

/// Fields of `spec` that are annotations of the Kubernetes Node: the annotation, the parent below `spec`, and the name there.
const ANNOTATED: [(&str, Option<&str>, &str); 11] = [
    (Node::ADDRESS, Some("bgp"), "ipv4Address"),
    (Node::ADDRESS_V6, Some("bgp"), "ipv6Address"),
    (Node::IPIP_ADDRESS, Some("bgp"), "ipv4IPIPTunnelAddr"),
    (Node::AS_NUMBER, Some("bgp"), "asNumber"),
    ("projectcalico.org/RouteReflectorClusterID", Some("bgp"), "routeReflectorClusterID"),
    (Node::VXLAN_ADDRESS, None, "ipv4VXLANTunnelAddr"),
    (Node::VXLAN_MAC, None, "vxlanTunnelMACAddr"),
    (Node::VXLAN_ADDRESS_V6, None, "ipv6VXLANTunnelAddr"),
    (Node::VXLAN_MAC_V6, None, "vxlanTunnelMACAddrV6"),
    ("projectcalico.org/IPv4WireguardInterfaceAddr", Some("wireguard"), "interfaceIPv4Address"),
    ("projectcalico.org/IPv6WireguardInterfaceAddr", Some("wireguard"), "interfaceIPv6Address"),
];

/// Fields of `spec` of a Node of Calico that the Node of Kubernetes keeps elsewhere or not at all. Tortie keeps them as they are, because
/// etcd has them.
pub(crate) const KEPT: [&str; 3] = ["addresses", "interfaces", "orchRefs"];

/// Removes from a Node what only etcd has: an API server refuses fields that its Nodes do not have, and reports addresses in the status.
pub fn without_fields_of_etcd(node: &mut Map<String, Value>) {
    if let Some(spec) = node.get_mut("spec").and_then(Value::as_object_mut) {
        spec.retain(|field, _| !KEPT.contains(&field.as_str()));
    }
}

/// Translates a Node into Calico's form.
pub fn to_calico_node(value: &mut Value) {
    let Some(fields) = value.as_object_mut() else { return };
    if fields.get("apiVersion").is_some_and(|version| version == Kind::Node.api_version()) {
        fields.insert("apiVersion".to_owned(), json!(CALICO));
    }
    // What cannot be moved stays: a damaged `spec`, or one of its parts, has no room for fields.
    let has_room = |parent: Option<&str>| {
        let spec = fields.get("spec").unwrap_or(&Value::Null);
        let part = parent.map_or(&Value::Null, |parent| spec.get(parent).unwrap_or(&Value::Null));
        [spec, part].iter().all(|value| value.is_null() || value.is_object())
    };
    let movable: Vec<_> = ANNOTATED.into_iter().filter(|(_, parent, _)| has_room(*parent)).collect();
    let annotations = fields.get_mut("metadata").and_then(|metadata| metadata.get_mut("annotations"));
    let Some(annotations) = annotations.and_then(Value::as_object_mut) else { return };
    let mut moved = Vec::new();
    for (annotation, parent, field) in movable {
        let Some(text) = annotations.get(annotation) else { continue };
        let value = match annotation {
            Node::AS_NUMBER => as_number(text),
            _ => Some(text.clone()),
        };
        // Calico's client could not read a Node with another number, so the annotation stays.
        if let Some(value) = value {
            annotations.remove(annotation);
            moved.push((parent, field, value));
        }
    }
    if moved.is_empty() {
        return;
    }
    if annotations.is_empty()
        && let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut)
    {
        metadata.remove("annotations");
    }
    let Some(spec) = object_at(fields, "spec") else { return };
    for (parent, field, value) in moved {
        let section = match parent {
            Some(parent) => object_at(spec, parent),
            None => Some(&mut *spec),
        };
        if let Some(section) = section {
            section.insert(field.to_owned(), value);
        }
    }
}

/// The AS number in Calico's Node: a number, or two of 16 bits with a dot between them.
fn as_number(text: &Value) -> Option<Value> {
    let text = text.as_str()?;
    let is_dotted = || {
        text.split_once('.').is_some_and(|(high, low)| [high, low].iter().all(|it| it.parse::<u16>().is_ok()))
    };
    text.parse::<u32>().map_or_else(|_| is_dotted().then(|| json!(text)), |number| Some(json!(number)))
}

/// Translates a Node of Calico's form. Returns the fields that have become annotations, each with its annotation.
pub fn from_calico_node(value: &mut Value) -> Vec<(String, &'static str)> {
    let Some(fields) = value.as_object_mut() else { return Vec::new() };
    if fields.get("apiVersion").is_some_and(|version| version == CALICO) {
        fields.insert("apiVersion".to_owned(), json!(Kind::Node.api_version()));
    }
    let Some(spec) = fields.get_mut("spec").and_then(Value::as_object_mut) else { return Vec::new() };
    let mut found = Vec::new();
    for (annotation, parent, field) in ANNOTATED {
        let section = match parent {
            Some(parent) => spec.get_mut(parent).and_then(Value::as_object_mut),
            None => Some(&mut *spec),
        };
        let text = section.and_then(|section| section.remove(field)).filter(|value| !value.is_null());
        // Annotations are text.
        let text = text.map(|value| match value.as_f64() {
            Some(number) if number.fract() == 0.0 => json!(format!("{number:.0}")),
            _ => value,
        });
        found.extend(text.map(|text| (annotation, parent, field, text)));
        // An empty section would be invalid when it is written back.
        if let Some(parent) = parent
            && spec.get(parent).and_then(Value::as_object).is_some_and(Map::is_empty)
        {
            spec.remove(parent);
        }
    }
    if spec.is_empty() {
        fields.remove("spec");
    }
    if found.is_empty() {
        return Vec::new();
    }
    let Some(metadata) = object_at(fields, "metadata") else { return Vec::new() };
    let Some(annotations) = object_at(metadata, "annotations") else { return Vec::new() };
    let written = found.into_iter().map(|(annotation, parent, field, text)| {
        annotations.insert(annotation.to_owned(), text);
        let parent = parent.map(|parent| format!("{parent}.")).unwrap_or_default();
        (format!("spec.{parent}{field}"), annotation)
    });
    written.collect()
}

/// The object of a field, which is created if it is absent or null; `None` if the field has another type.
fn object_at<'a>(fields: &'a mut Map<String, Value>, field: &str) -> Option<&'a mut Map<String, Value>> {
    let value = fields.entry(field).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}
