//! Host endpoints on the nodes of whole clusters, with their policies and settings.

use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use super::policies::{maybe, rules, selector};
use super::{Objects, PORT_NAMES, PORTS, labels, renamed};

/// The nodes of whole clusters, with their addresses.
pub const NODES: [(&str, &str); 3] = [("n1", "10.0.0.8"), ("n2", "203.0.113.9"), ("n3", "203.0.113.10")];

/// Up to four host endpoints, four policies for them, settings of nodes, and a pool with or without address
/// translation.
pub fn hosts() -> impl Strategy<Value = Objects> {
    let hosts = prop::collection::vec(host(), 1..5);
    let policies = prop::collection::vec(policy(), 0..5);
    (hosts, policies, settings(), any::<bool>()).prop_map(|(hosts, policies, settings, translated)| {
        let numbered = |(index, (key, value)): (usize, (Key, Value))| renamed(key, value, index);
        let mut all: Objects = hosts.into_iter().enumerate().map(numbered).collect();
        all.extend(policies.into_iter().enumerate().map(|(index, policy)| numbered((index + 10, policy))));
        all.extend(settings);
        if translated {
            let spec = json!({"cidr": "10.0.0.0/24", "natOutgoing": true, "vxlanMode": "Always", "ipipMode": "Never"});
            let pool = json!({"metadata": {"name": "pool"}, "spec": spec});
            all.push((Key::global(Kind::IpPool, "pool"), pool));
        }
        all
    })
}

fn host() -> impl Strategy<Value = (Key, Value)> {
    let interface = select(vec![None, Some("eth0"), Some("*"), Some("*")]);
    let profiles =
        subsequence(vec!["missing", "projectcalico-default-allow", "kns.red", "ksa.red.runner"], 0..3);
    let port = (select(&PORT_NAMES[..2]), select(vec!["TCP", "UDP"]), select(&PORTS[..]));
    (select(&NODES[..]), interface, any::<bool>(), profiles, labels(), of(port)).prop_map(
        |((node, address), interface, addressed, profiles, labels, port)| {
            let named = |(name, protocol, port)| json!([{"name": name, "protocol": protocol, "port": port}]);
            let spec = maybe(vec![
                ("node", Some(json!(node))),
                ("interfaceName", interface.map(Value::from)),
                ("expectedIPs", (addressed || interface.is_none()).then(|| json!([address]))),
                ("profiles", Some(json!(profiles))),
                ("ports", port.map(named)),
            ]);
            (Key::global(Kind::HostEndpoint, ""), json!({"metadata": {"labels": labels}, "spec": spec}))
        },
    )
}

fn policy() -> impl Strategy<Value = (Key, Value)> {
    let hook = select(vec!["", "applyOnForward", "applyOnForward", "doNotTrack", "doNotTrack", "preDNAT"]);
    let selector = prop_oneof![2 => Just("all()".to_owned()), 1 => selector()];
    let rules = (rules("ingress", true, 3), rules("egress", true, 3), of(select(&PORTS[..4])));
    (hook, selector, of(select(vec![1, 2])), rules).prop_map(
        |(hook, selector, order, (mut ingress, mut egress, reply))| {
            // Allow rules without connection tracking, and replies of some ports only; otherwise both are rare.
            if let Some(port) = reply.filter(|_| hook == "doNotTrack") {
                ingress.push(json!({"action": "Allow"}));
                egress.insert(
                    0,
                    json!({"action": "Allow", "protocol": "TCP", "destination": {"ports": [port]}}),
                );
            }
            let set = |of: &str| (hook == of).then_some(json!(true));
            let spec = maybe(vec![
                ("selector", Some(json!(selector))),
                ("order", order.map(Value::from)),
                ("ingress", Some(json!(ingress))),
                // preDNAT policies have no egress.
                ("egress", (hook != "preDNAT").then(|| json!(egress))),
                ("applyOnForward", (!hook.is_empty()).then_some(json!(true))),
                ("doNotTrack", set("doNotTrack")),
                ("preDNAT", set("preDNAT")),
            ]);
            (Key::global(Kind::GlobalNetworkPolicy, ""), json!({"metadata": {}, "spec": spec}))
        },
    )
}

/// FelixConfiguration for all nodes and for one node.
fn settings() -> impl Strategy<Value = Objects> {
    let port =
        (select(vec!["TCP", "UDP"]), select(&PORTS[..4]), of(select(vec!["10.0.0.0/29", "0.0.0.0/0"])));
    let port = port.prop_map(|(protocol, port, net)| {
        maybe(vec![
            ("protocol", Some(json!(protocol))),
            ("port", Some(json!(port))),
            ("net", net.map(Value::from)),
        ])
    });
    let ports = move || of(prop::collection::vec(port.clone(), 0..3));
    let action = of(select(vec!["Drop", "Accept", "Return"]));
    let settings = (ports(), ports(), action).prop_map(|(inbound, outbound, action)| {
        maybe(vec![
            ("failsafeInboundHostPorts", inbound.map(Value::from)),
            ("failsafeOutboundHostPorts", outbound.map(Value::from)),
            ("defaultEndpointToHostAction", action.map(Value::from)),
        ])
    });
    let of_name = |name: &'static str| {
        settings.clone().prop_map(move |spec| {
            let value = json!({"metadata": {"name": name}, "spec": spec});
            (Key::global(Kind::FelixConfiguration, name), value)
        })
    };
    (of(of_name("default")), of(of_name("node.n2")))
        .prop_map(|(all, one)| all.into_iter().chain(one).collect())
}
