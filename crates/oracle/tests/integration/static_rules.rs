//! Static rules in the reports of Windows nodes precede policy (policy decision 26).

use serde_json::{Value, json};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_oracle::{Answer, DecidedBy, Oracle, Peer, Question, Snapshot, Verdict};

/// One pod on each of two nodes. The first node has static rules. A policy allows both pods only TCP 80.
fn cluster() -> Snapshot {
    let pod = |name: &str, node: &str, address: &str| {
        let value = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "web", "labels": {}},
            "spec": {"nodeName": node, "containers": [{"name": "c"}]}, "status": {"podIP": address}});
        (Key::namespaced(Kind::Pod, "web", name), value)
    };
    let side = |nets: &[&str], ports: &[(u16, u16)]| {
        let ports: Vec<Value> =
            ports.iter().map(|(first, last)| json!({"first": first, "last": last})).collect();
        json!({"nets": nets, "ports": ports})
    };
    let rules = json!([
        {"name": "no-metadata", "allow": false, "direction": "Egress", "protocol": 6,
            "remote": side(&["169.254.169.254/32"], &[(80, 80)])},
        {"name": "monitoring", "allow": true, "direction": "Ingress", "local": side(&[], &[(9000, 9100)]),
            "remote": side(&["203.0.113.0/24"], &[])},
        {"name": "no-probes", "allow": false, "direction": "Ingress", "local": side(&[], &[(81, 82)]),
            "protocol": 17, "remote": side(&["172.16.0.0/24"], &[])},
        {"name": "after-probes", "allow": false, "afterOwnNode": true, "direction": "Ingress", "protocol": 6,
            "remote": side(&["172.16.0.0/24"], &[])},
        {"name": "probe-firewall", "ruleType": "Host", "allow": false, "direction": "Ingress", "protocol": 132,
            "remote": side(&["172.16.0.3/32"], &[])},
        {"name": "ssh", "ruleType": "Switch", "allow": true, "direction": "Ingress", "protocol": 6,
            "local": side(&[], &[(22, 22)])},
        {"name": "firewall", "ruleType": "Host", "allow": false, "direction": "Ingress",
            "remote": side(&["192.0.2.0/25"], &[])},
        {"name": "no-firewall", "ruleType": "Host", "allow": true, "direction": "Ingress",
            "remote": side(&["192.0.2.0/24"], &[])},
        {"name": "not-these", "allow": false, "direction": "Ingress", "remote": side(&["203.0.113.7/32"], &[])},
    ]);
    let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "windows"},
        "status": {"os": "windows", "revision": 1, "endpoints": 1, "staticRules": rules}});
    let policy = json!({"apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": {"name": "web"},
        "spec": {"types": ["Ingress"], "ingress": [
            {"action": "Allow", "protocol": "TCP", "destination": {"ports": [80]}}]}});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "web"}});
    let node = json!({"apiVersion": "v1", "kind": "Node", 
        "metadata": {"name": "windows", "annotations": {"projectcalico.org/IPv4Address": "172.16.0.3/24"}}});
    let objects = [
        (Key::global(Kind::Namespace, "web"), namespace),
        pod("a", "windows", "10.0.1.1"),
        pod("b", "linux", "10.0.2.1"),
        (Key::global(Kind::Node, "windows"), node),
        (Key::global(Kind::NodeReport, "windows"), report),
        (Key::global(Kind::GlobalNetworkPolicy, "web"), policy),
    ];
    let mut snapshot = Snapshot::new();
    objects.into_iter().for_each(|(key, value)| snapshot.insert(key, value, None));
    snapshot
}

fn ask(from: &str, to: &str, protocol: Protocol, port: u16) -> Answer {
    let peer = |text: &str| match text.parse() {
        Ok(address) => Peer::Address(address),
        Err(_) => Peer::Pod { namespace: "web".into(), name: text.into() },
    };
    let (from, to) = (peer(from), peer(to));
    let question = Question {
        from,
        to,
        protocol,
        source_port: 40_000,
        destination_port: port,
        icmp: None,
        via: None,
        by_node: None,
    };
    Oracle::new(&cluster()).evaluate(&question).unwrap()
}

#[test]
fn static_rules_come_before_policy_on_their_node() {
    const METADATA: &str = "169.254.169.254";
    // From, to, protocol and port; whether it passes, and the static rule that decides.
    let cases = [
        ("a", METADATA, Protocol::TCP, 80, false, Some("no-metadata")),
        ("a", METADATA, Protocol::TCP, 81, true, None),
        ("a", METADATA, Protocol::UDP, 80, true, None),
        ("a", "169.254.169.253", Protocol::TCP, 80, true, None),
        ("b", METADATA, Protocol::TCP, 80, true, None),
        ("203.0.113.9", "a", Protocol::TCP, 9050, true, Some("monitoring")),
        ("203.0.113.9", "a", Protocol::UDP, 9100, true, Some("monitoring")),
        ("203.0.113.9", "a", Protocol::TCP, 9101, false, None),
        ("203.0.113.9", "a", Protocol::TCP, 80, true, None),
        ("203.0.113.9", "b", Protocol::TCP, 9050, false, None),
        ("198.51.100.1", "a", Protocol::TCP, 9050, false, None),
        // The first matching rule decides.
        ("203.0.113.7", "a", Protocol::TCP, 9050, true, Some("monitoring")),
        ("203.0.113.7", "a", Protocol::TCP, 80, false, Some("not-these")),
        // A Deny of the firewall has precedence over every Allow; an Allow of the firewall does not decide.
        ("192.0.2.1", "a", Protocol::TCP, 22, false, Some("firewall")),
        ("192.0.2.1", "a", Protocol::TCP, 80, false, Some("firewall")),
        ("192.0.2.1", "a", Protocol::TCP, 81, false, Some("firewall")),
        ("192.0.2.129", "a", Protocol::TCP, 22, true, Some("ssh")),
        ("192.0.2.129", "a", Protocol::TCP, 80, true, None),
        ("192.0.2.129", "a", Protocol::TCP, 81, false, None),
        ("192.0.2.1", "b", Protocol::TCP, 80, true, None),
        // The pod's own node reaches it before policy, and before some of these rules.
        ("172.16.0.3", "a", Protocol::TCP, 81, true, None),
        ("172.16.0.3", "a", Protocol::UDP, 80, true, None),
        ("172.16.0.3", "a", Protocol::UDP, 81, false, Some("no-probes")),
        ("172.16.0.3", "a", Protocol::SCTP, 80, false, Some("probe-firewall")),
        ("172.16.0.4", "a", Protocol::TCP, 80, false, Some("after-probes")),
        ("172.16.0.4", "a", Protocol::SCTP, 80, false, None),
    ];
    for (from, to, protocol, port, passes, by) in cases {
        let answer = ask(from, to, protocol, port);
        let shown = format!("{from} to {to} {protocol} {port}");
        assert_eq!(answer.verdict == Verdict::Allow, passes, "{shown}: {answer:?}");
        let traces = [&answer.egress, &answer.ingress];
        let named = traces.into_iter().flatten().find_map(|trace| match &trace.decided_by {
            DecidedBy::StaticRule { node, name } => Some((node.as_str(), name.as_str())),
            _ => None,
        });
        assert_eq!(named, by.map(|name| ("windows", name)), "{shown}: {answer:?}");
    }
}

/// A report that somebody damaged, or that a newer agent wrote.
#[test]
fn unreadable_static_rules_are_reported() {
    let mut snapshot = cluster();
    let key = Key::global(Kind::NodeReport, "windows");
    let mut report = snapshot.get(&key).unwrap().value.clone();
    report["status"]["staticRules"][0]["ruleType"] = json!("Other");
    snapshot.insert(key, report, None);
    let question = |from: &str| Question {
        from: Peer::Address(from.parse().unwrap()),
        to: Peer::Pod { namespace: "web".into(), name: "a".into() },
        protocol: Protocol::TCP,
        source_port: 40_000,
        destination_port: 80,
        icmp: None,
        via: None,
        by_node: None,
    };
    // From elsewhere, and from the pod's own node.
    for from in ["203.0.113.9", "172.16.0.3"] {
        let answer = Oracle::new(&snapshot).evaluate(&question(from)).unwrap();
        let notes = answer.notes.join("\n");
        assert!(notes.contains("the report of node windows cannot be read"), "{from}: {notes}");
        assert!(notes.contains("Other"), "{from}: {notes}");
    }
}
