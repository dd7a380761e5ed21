//! From the resources of Calico's API v1 (`apiVersion: v1`, `kind: policy`) to those of v3, as `calicoctl convert` does
//! (`libcalico-go/lib/upgrade/converters`).

use serde_json::{Map, Value, json};

use crate::FieldError;

/// The `apiVersion` of the results.
const V3: &str = "projectcalico.org/v3";
/// The criteria that v1 has and v3 has, by their names in both.
const ENTITY: [(&str, &str); 6] = [
    ("selector", "selector"),
    ("notSelector", "notSelector"),
    ("nets", "nets"),
    ("notNets", "notNets"),
    ("ports", "ports"),
    ("notPorts", "notPorts"),
];

/// The resource of API v3 that means the same as this one of API v1; `None` if it is none of API v1.
///
/// # Errors
/// Every field that v3 does not have.
pub fn from_v1(value: &Value) -> Option<Result<Value, Vec<FieldError>>> {
    let text = |name: &str| value[name].as_str().unwrap_or_default();
    if text("apiVersion") != "v1" {
        return None;
    }
    let mut source = Source { problems: Vec::new() };
    let converted = match text("kind") {
        "policy" => source.policy(value),
        "profile" => source.profile(value),
        "hostEndpoint" => source.host_endpoint(value),
        "ipPool" => source.pool(value),
        "bgpPeer" => source.peer(value),
        "node" | "workloadEndpoint" => {
            source.problem("kind", "Calico writes these itself; start its new version instead");
            Value::Null
        }
        _ => return None,
    };
    Some(if source.problems.is_empty() { Ok(converted) } else { Err(source.problems) })
}

struct Source {
    problems: Vec<FieldError>,
}

impl Source {
    fn problem(&mut self, path: impl Into<String>, problem: &str) {
        self.problems.push(FieldError::new(path, problem));
    }

    /// Reports the fields of a mapping that are not among these.
    fn only(&mut self, value: &Value, path: &str, known: &[&str]) {
        for field in
            value.as_object().into_iter().flat_map(Map::keys).filter(|field| !known.contains(&field.as_str()))
        {
            self.problem(format!("{path}.{field}"), "is not known in Calico's API v1");
        }
    }

    fn policy(&mut self, value: &Value) -> Value {
        let spec = &value["spec"];
        self.only(&value["metadata"], "metadata", &["name", "annotations"]);
        self.only(
            spec,
            "spec",
            &["order", "selector", "types", "ingress", "egress", "doNotTrack", "preDNAT"],
        );
        let mut types: Vec<&str> = Vec::new();
        for of in spec["types"].as_array().into_iter().flatten() {
            match of.as_str().map(str::to_lowercase).as_deref() {
                Some("ingress") => types.push("Ingress"),
                Some("egress") => types.push("Egress"),
                _ => self.problem("spec.types", "knows ingress and egress only"),
            }
        }
        if types.is_empty() {
            // In v1, a policy applies to both directions; v3 would derive them from the rules.
            types = if spec["preDNAT"] == true { vec!["Ingress"] } else { vec!["Ingress", "Egress"] };
        }
        let mut converted = json!({
            "selector": spec["selector"], "order": spec["order"], "types": types,
            "ingress": self.rules(spec, "ingress"), "egress": self.rules(spec, "egress"),
            "doNotTrack": spec["doNotTrack"], "preDNAT": spec["preDNAT"],
        });
        if spec["doNotTrack"] == true || spec["preDNAT"] == true {
            converted["applyOnForward"] = json!(true);
        }
        object("GlobalNetworkPolicy", &value["metadata"], converted)
    }

    fn profile(&mut self, value: &Value) -> Value {
        self.only(&value["metadata"], "metadata", &["name", "tags", "labels"]);
        self.only(&value["spec"], "spec", &["ingress", "egress"]);
        let mut labels = value["metadata"]["labels"].as_object().cloned().unwrap_or_default();
        for tag in value["metadata"]["tags"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if labels.insert(tag.to_owned(), json!("")).is_some() {
                self.problem("metadata.tags", &format!("{tag} is a label, too"));
            }
        }
        let spec = json!({
            "labelsToApply": labels, "ingress": self.rules(&value["spec"], "ingress"),
            "egress": self.rules(&value["spec"], "egress"),
        });
        object("Profile", &value["metadata"], spec)
    }

    fn rules(&mut self, spec: &Value, direction: &str) -> Value {
        let rules = spec[direction].as_array().into_iter().flatten().enumerate();
        rules.map(|(number, rule)| self.rule(rule, &format!("spec.{direction}[{number}]"))).collect()
    }

    fn rule(&mut self, rule: &Value, path: &str) -> Value {
        const KNOWN: [&str; 8] =
            ["action", "ipVersion", "protocol", "notProtocol", "icmp", "notICMP", "source", "destination"];
        self.only(rule, path, &KNOWN);
        let action = match rule["action"].as_str().unwrap_or("allow").to_lowercase().as_str() {
            "allow" | "" => "Allow",
            "deny" => "Deny",
            "log" => "Log",
            "pass" | "next-tier" => "Pass",
            _ => {
                self.problem(format!("{path}.action"), "knows allow, deny, log and pass only");
                ""
            }
        };
        let protocol = |name: &str| match rule[name].as_str() {
            Some(text) if text.eq_ignore_ascii_case("icmpv6") => json!("ICMPv6"),
            Some(text) if text.eq_ignore_ascii_case("udplite") => json!("UDPLite"),
            Some(text) => json!(text.to_uppercase()),
            None => rule[name].clone(),
        };
        json!({
            "action": action, "ipVersion": rule["ipVersion"], "protocol": protocol("protocol"),
            "notProtocol": protocol("notProtocol"), "icmp": rule["icmp"], "notICMP": rule["notICMP"],
            "source": self.entity(&rule["source"], &format!("{path}.source")),
            "destination": self.entity(&rule["destination"], &format!("{path}.destination")),
        })
    }

    fn entity(&mut self, entity: &Value, path: &str) -> Value {
        let known: Vec<&str> =
            ENTITY.iter().map(|(name, _)| *name).chain(["net", "notNet", "tag", "notTag"]).collect();
        self.only(entity, path, &known);
        let mut converted: Map<String, Value> =
            ENTITY.iter().map(|(old, new)| ((*new).to_owned(), entity[old].clone())).collect();
        for (one, many) in [("net", "nets"), ("notNet", "notNets")] {
            if let Some(net) = entity[one].as_str() {
                let list = converted.entry(many).or_insert(Value::Null);
                match list.as_array_mut() {
                    Some(list) => list.push(json!(net)),
                    None => *list = json!([net]),
                }
            }
        }
        for (tag, selector, joint) in [("tag", "selector", "&&"), ("notTag", "notSelector", "||")] {
            let Some(tag) = entity[tag].as_str() else { continue };
            // A tag is a label without a value. Both criteria must hold, and neither of both negated ones.
            let by_tag = format!("{tag} == ''");
            let known = converted.entry(selector).or_insert(Value::Null);
            *known = match known.as_str().filter(|text| !text.is_empty()) {
                Some(other) => json!(format!("({other}) {joint} {by_tag}")),
                None => json!(by_tag),
            };
        }
        Value::Object(converted)
    }

    fn host_endpoint(&mut self, value: &Value) -> Value {
        let (metadata, spec) = (&value["metadata"], &value["spec"]);
        self.only(metadata, "metadata", &["name", "node", "labels"]);
        self.only(spec, "spec", &["interfaceName", "expectedIPs", "profiles", "ports"]);
        let mut spec = spec.clone();
        spec["node"] = metadata["node"].clone();
        let name = [&metadata["node"], &metadata["name"]].map(|part| part.as_str().unwrap_or_default());
        let metadata = json!({"name": name.join("-"), "labels": metadata["labels"]});
        object("HostEndpoint", &metadata, spec)
    }

    fn pool(&mut self, value: &Value) -> Value {
        let (metadata, spec) = (&value["metadata"], &value["spec"]);
        self.only(metadata, "metadata", &["cidr"]);
        self.only(spec, "spec", &["ipip", "nat-outgoing", "disabled"]);
        self.only(&spec["ipip"], "spec.ipip", &["enabled", "mode"]);
        let cidr = metadata["cidr"].as_str().unwrap_or_default();
        let mode = match (spec["ipip"]["enabled"] == true, spec["ipip"]["mode"].as_str()) {
            (false, _) => "Never",
            (true, Some("cross-subnet")) => "CrossSubnet",
            (true, _) => "Always",
        };
        let spec = json!({
            "cidr": cidr, "ipipMode": mode, "natOutgoing": spec["nat-outgoing"] == true, "disabled": spec["disabled"],
        });
        object("IPPool", &json!({"name": cidr}), spec)
    }

    fn peer(&mut self, value: &Value) -> Value {
        let (metadata, spec) = (&value["metadata"], &value["spec"]);
        self.only(metadata, "metadata", &["scope", "node", "peerIP"]);
        self.only(spec, "spec", &["asNumber"]);
        let address = metadata["peerIP"].as_str().unwrap_or_default();
        let node = metadata["node"].as_str().filter(|_| metadata["scope"] == "node");
        let name = format!("{}.peer.{address}", node.unwrap_or("global"));
        let spec = json!({"peerIP": address, "node": node, "asNumber": spec["asNumber"]});
        object("BGPPeer", &json!({"name": name}), spec)
    }
}

/// An object with this name, and with what else is in `metadata` and v3 has there.
fn object(kind: &str, metadata: &Value, spec: Value) -> Value {
    let name = normalized(metadata["name"].as_str().unwrap_or_default());
    let mut value = json!({"apiVersion": V3, "kind": kind, "metadata": {"name": name}, "spec": spec});
    let maps: &[&str] = if kind == "Profile" { &[] } else { &["labels", "annotations"] };
    for field in maps {
        if metadata[field].is_object() {
            value["metadata"][field] = metadata[field].clone();
        }
    }
    drop_empty(&mut value["spec"]);
    value
}

/// A name of v3: lower case, with dashes instead of what is not allowed.
fn normalized(name: &str) -> String {
    let is_allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '.';
    let letters = name.to_lowercase();
    let dashed: String =
        letters.chars().map(|letter| if is_allowed(letter) { letter } else { '-' }).collect();
    dashed.trim_matches(['-', '.']).to_owned()
}

/// Removes fields without content, which count as absent.
fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(drop_empty);
            let is_empty = |value: &Value| {
                value.is_null()
                    || value.as_array().is_some_and(Vec::is_empty)
                    || value.as_object().is_some_and(Map::is_empty)
            };
            fields.retain(|_, value| !is_empty(value));
        }
        Value::Array(items) => items.iter_mut().for_each(drop_empty),
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::manifest;

    #[test]
    fn resources_of_v1_become_valid_ones_of_v3() {
        let rule = json!({
            "action": "deny", "protocol": "tcp", "source": {"tag": "web", "selector": "a == 'b' || has(c)", "net": "10.0.0.0/8"},
            "destination": {"notTag": "db", "ports": [80, "90:95"]},
        });
        for (old, new) in [
            (
                json!({"apiVersion": "v1", "kind": "policy", "metadata": {"name": "Deny_All"},
                    "spec": {"order": 5, "selector": "all()", "ingress": [rule], "egress": [{"action": "allow"}]}}),
                json!({"apiVersion": V3, "kind": "GlobalNetworkPolicy", "metadata": {"name": "deny-all"}, "spec": {
                    "order": 5, "selector": "all()", "types": ["Ingress", "Egress"], "egress": [{"action": "Allow"}],
                    "ingress": [{"action": "Deny", "protocol": "TCP",
                        "source": {"selector": "(a == 'b' || has(c)) && web == ''", "nets": ["10.0.0.0/8"]},
                        "destination": {"notSelector": "db == ''", "ports": [80, "90:95"]}}]}}),
            ),
            (
                json!({"apiVersion": "v1", "kind": "profile", "metadata": {"name": "p1", "tags": ["web"], "labels": {"x": "y"}},
                    "spec": {"ingress": [{}]}}),
                json!({"apiVersion": V3, "kind": "Profile", "metadata": {"name": "p1"}, "spec": {
                    "labelsToApply": {"web": "", "x": "y"}, "ingress": [{"action": "Allow"}]}}),
            ),
            (
                json!({"apiVersion": "v1", "kind": "hostEndpoint", "metadata": {"name": "eth0", "node": "n1", "labels": {"a": "b"}},
                    "spec": {"interfaceName": "eth0", "expectedIPs": ["192.0.2.1"]}}),
                json!({"apiVersion": V3, "kind": "HostEndpoint", "metadata": {"name": "n1-eth0", "labels": {"a": "b"}},
                    "spec": {"node": "n1", "interfaceName": "eth0", "expectedIPs": ["192.0.2.1"]}}),
            ),
            (
                json!({"apiVersion": "v1", "kind": "ipPool", "metadata": {"cidr": "10.1.0.0/16"}, "spec": {"nat-outgoing": true}}),
                json!({"apiVersion": V3, "kind": "IPPool", "metadata": {"name": "10.1.0.0-16"},
                    "spec": {"cidr": "10.1.0.0/16", "ipipMode": "Never", "natOutgoing": true}}),
            ),
            (
                json!({"apiVersion": "v1", "kind": "bgpPeer", "metadata": {"scope": "node", "node": "n1", "peerIP": "192.0.2.9"},
                    "spec": {"asNumber": 64512}}),
                json!({"apiVersion": V3, "kind": "BGPPeer", "metadata": {"name": "n1.peer.192.0.2.9"},
                    "spec": {"node": "n1", "peerIP": "192.0.2.9", "asNumber": 64512}}),
            ),
        ] {
            let converted = from_v1(&old).unwrap().unwrap();
            assert_eq!(converted, new);
            let read = manifest::read("m.yml", &converted.to_string());
            assert!(read.is_ok(), "{converted}: {read:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        for (value, field) in [
            (
                json!({"apiVersion": "v1", "kind": "policy", "metadata": {"name": "p"}, "spec": {"tier": "x"}}),
                "spec.tier",
            ),
            (
                json!({"apiVersion": "v1", "kind": "policy", "metadata": {"name": "p"}, "spec": {"ingress": [{"action": "drop"}]}}),
                "spec.ingress[0].action",
            ),
            (
                json!({"apiVersion": "v1", "kind": "policy", "metadata": {"name": "p"},
                    "spec": {"ingress": [{"source": {"labels": {}}}]}}),
                "spec.ingress[0].source.labels",
            ),
            (json!({"apiVersion": "v1", "kind": "node", "metadata": {"name": "n"}}), "kind"),
        ] {
            let problems = from_v1(&value).unwrap().unwrap_err();
            assert_eq!(problems[0].path, field, "{problems:?}");
        }
        assert_eq!(from_v1(&json!({"apiVersion": "v1", "kind": "Pod"})), None);
    }
}
