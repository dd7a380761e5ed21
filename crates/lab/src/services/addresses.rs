//! Replaces what an API server does with Services: gives them addresses, and ports of the nodes.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::{Value, json};
use tortie_api::Kind;
use tortie_store::{Stored, Write};

/// The addresses of Services, as kubeadm chooses them.
pub(crate) const SERVICES: &str = "10.96.0.0/12";
/// Those that are given to Services. The first of the network are for fixed addresses.
const FIRST: u32 = u32::from_be_bytes([10, 96, 1, 0]);
const LAST: u32 = u32::from_be_bytes([10, 111, 255, 254]);
/// The ports of nodes.
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30_000..=32_767;

/// What has addresses.
pub(crate) const KINDS: [Kind; 1] = [Kind::Service];

/// The writes after which each Service has the address and the ports that its type demands.
pub(crate) fn missing_writes(objects: &[&Stored]) -> Vec<Write> {
    let text = |value: &Value| value.as_str().and_then(|text| text.parse::<Ipv4Addr>().ok()).map(u32::from);
    let mut addresses: BTreeSet<u32> =
        objects.iter().filter_map(|stored| text(&stored.value["spec"]["clusterIP"])).collect();
    let ports = objects.iter().flat_map(|stored| ports(&stored.value));
    let mut ports: BTreeSet<u64> = ports.filter_map(|port| port["nodePort"].as_u64()).collect();
    let mut writes = Vec::new();
    for stored in objects {
        let mut value = stored.value.clone();
        complete(&mut value, &mut addresses, &mut ports);
        if value != stored.value {
            writes.push(Write::Update(stored.key.clone(), value, stored.version.clone()));
        }
    }
    writes
}

fn ports(service: &Value) -> impl Iterator<Item = &Value> {
    service["spec"]["ports"].as_array().into_iter().flatten()
}

fn complete(service: &mut Value, addresses: &mut BTreeSet<u32>, node_ports: &mut BTreeSet<u64>) {
    let spec = &mut service["spec"];
    let kind = spec["type"].as_str().unwrap_or("ClusterIP").to_owned();
    let has_node_ports = ["NodePort", "LoadBalancer"].contains(&&*kind);
    // A Service that changed its type gives back what only the former one has.
    if !has_node_ports && let Some(ports) = spec.get_mut("ports").and_then(Value::as_array_mut) {
        ports.iter_mut().filter_map(Value::as_object_mut).for_each(|port| drop(port.remove("nodePort")));
    }
    let Some(fields) = spec.as_object_mut() else { return };
    if kind == "ExternalName" {
        fields.retain(|name, _| !["clusterIP", "clusterIPs"].contains(&&**name));
        return;
    }
    let given = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    if !given(&spec["clusterIP"]) {
        let chosen = match spec["clusterIPs"].get(0).filter(|first| given(first)) {
            Some(first) => Some(first.clone()),
            None => (FIRST..=LAST)
                .find(|address| addresses.insert(*address))
                .map(|free| json!(Ipv4Addr::from(free))),
        };
        let Some(chosen) = chosen else {
            return tracing::error!("there are no more addresses for Services");
        };
        spec["clusterIP"] = chosen;
    }
    if spec["clusterIPs"].get(0).is_none() {
        spec["clusterIPs"] = json!([spec["clusterIP"]]);
    }
    if !has_node_ports {
        return;
    }
    for port in spec["ports"].as_array_mut().into_iter().flatten() {
        if port["nodePort"].as_u64().is_none_or(|number| number == 0)
            && let Some(free) = NODE_PORTS.map(u64::from).find(|number| node_ports.insert(*number))
        {
            port["nodePort"] = json!(free);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_api::Key;
    use tortie_store::Written;

    use super::*;

    fn completed(specs: &[Value]) -> Vec<Value> {
        let mut services: Vec<Stored> = Vec::new();
        for (number, spec) in specs.iter().enumerate() {
            let key = Key::namespaced(Kind::Service, "n", format!("s{number}"));
            services.push(Stored::new(key, json!({"spec": spec}), Written::at(1)));
        }
        for write in missing_writes(&services.iter().collect::<Vec<_>>()) {
            let Write::Update(key, value, _) = write else { panic!("{write:?}") };
            services.iter_mut().find(|service| service.key == key).unwrap().value = value;
        }
        assert_eq!(missing_writes(&services.iter().collect::<Vec<_>>()).len(), 0);
        services.into_iter().map(|service| service.value["spec"].clone()).collect()
    }

    #[test]
    fn services_get_what_their_type_demands() {
        let port = |more: Value| json!([{"port": 80, "nodePort": more}]);
        let specs = completed(&[
            json!({"clusterIP": "10.96.1.0", "ports": [{"port": 80}]}),
            json!({"ports": [{"port": 80}]}),
            json!({"clusterIP": "None"}),
            json!({"type": "ExternalName", "externalName": "x.example"}),
            json!({"type": "NodePort", "ports": port(json!(30_000))}),
            json!({"type": "LoadBalancer", "ports": [{"port": 80}, {"port": 81}]}),
            json!({"type": "ClusterIP", "clusterIP": "10.96.1.9", "ports": port(json!(30_009))}),
            json!({"type": "ExternalName", "externalName": "x", "clusterIP": "10.96.1.8", "clusterIPs": ["10.96.1.8"]}),
        ]);
        assert_eq!(specs[6]["ports"], json!([{"port": 80}]), "a former NodePort is given back");
        assert_eq!(specs[7], json!({"type": "ExternalName", "externalName": "x"}));
        let addresses: Vec<&Value> = specs.iter().map(|spec| &spec["clusterIP"]).collect();
        let none = Value::Null;
        let of = ["10.96.1.0", "10.96.1.1", "None", "", "10.96.1.2", "10.96.1.3", "10.96.1.9", ""]
            .map(|text| json!(text));
        let expected: Vec<&Value> = of.iter().map(|text| if text == "" { &none } else { text }).collect();
        assert_eq!(addresses, expected);
        assert_eq!(specs[1]["clusterIPs"], json!(["10.96.1.1"]));
        assert_eq!(specs[1]["ports"], json!([{"port": 80}]));
        assert_eq!(
            specs[5]["ports"],
            json!([{"port": 80, "nodePort": 30_001}, {"port": 81, "nodePort": 30_002}])
        );
    }
}
