//! The properties that distinguish two pods: every property in a criterion of a rule, and no others.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_oracle::{Peer, Snapshot};
use tortie_reach::Classes;

/// Two pods that differ in everything, and one that the rules select.
fn cluster(policy: Option<(Kind, Value)>) -> Snapshot {
    let mut snapshot = Snapshot::new();
    let mut add = |kind, namespace: &str, name: &str, mut value: Value| {
        value["metadata"]["name"] = json!(name);
        if !namespace.is_empty() {
            value["metadata"]["namespace"] = json!(namespace);
        }
        snapshot.insert(Key { kind, namespace: namespace.to_owned(), name: name.to_owned() }, value, None);
    };
    add(Kind::Namespace, "", "a", json!({"metadata": {"labels": {"team": "a"}}}));
    add(Kind::Namespace, "", "b", json!({"metadata": {"labels": {"team": "b"}}}));
    add(Kind::ServiceAccount, "a", "one", json!({"metadata": {"labels": {"may": "much"}}}));
    let pod = |labels: Value, account: &str, port: &str, address: &str| {
        json!({
            "metadata": {"labels": labels},
            "spec": {"nodeName": "n", "serviceAccountName": account,
                "containers": [{"ports": [{"name": port, "containerPort": 80}]}]},
            "status": {"podIP": address},
        })
    };
    add(Kind::Pod, "a", "one", pod(json!({"app": "one", "run": "1"}), "one", "web", "10.0.0.1"));
    add(Kind::Pod, "b", "two", pod(json!({"app": "two", "run": "2"}), "two", "other", "10.0.1.1"));
    add(Kind::Pod, "a", "back", pod(json!({"app": "back"}), "back", "none", "10.0.2.1"));
    let slice = json!({
        "metadata": {"labels": {"kubernetes.io/service-name": "s"}},
        "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"protocol": "TCP", "port": 80}],
    });
    add(Kind::EndpointSlice, "a", "s-1", slice);
    if let Some((kind, spec)) = policy {
        let namespace = if kind.namespaced() { "a" } else { "" };
        add(kind, namespace, "p", json!({"metadata": {}, "spec": spec}));
    }
    snapshot
}

fn are_separated(policy: Option<(Kind, Value)>) -> bool {
    let snapshot = cluster(policy);
    for (key, stored) in snapshot.iter() {
        assert!(stored.resource.is_ok(), "{key}: {:?}", stored.resource);
    }
    let classes = Classes::of(&[&snapshot]);
    let class = |namespace: &str, name: &str| {
        classes.class_of(&Peer::Pod { namespace: namespace.to_owned(), name: name.to_owned() }).unwrap()
    };
    class("a", "one") != class("b", "two")
}

/// A policy for the pod `back`, which is neither of the two.
fn calico(kind: Kind, ingress: Value, egress: Value) -> Option<(Kind, Value)> {
    let types = json!(["Ingress", "Egress"]);
    Some((kind, json!({"selector": "app == 'back'", "types": types, "ingress": ingress, "egress": egress})))
}

#[test]
fn every_field_of_a_rule_separates_classes() {
    for source in [
        json!({"selector": "app == 'one'"}),
        json!({"notSelector": "app == 'one'"}),
        json!({"namespaceSelector": "team == 'a'"}),
        json!({"serviceAccounts": {"names": ["one"]}}),
        json!({"serviceAccounts": {"selector": "has(may)"}}),
        json!({"nets": ["10.0.0.0/24"]}),
        json!({"notNets": ["10.0.0.0/24"]}),
        json!({"services": {"name": "s", "namespace": "a"}}),
        json!({"ports": ["web"]}),
        json!({"notPorts": ["web"]}),
    ] {
        let rule = json!([{"action": "Allow", "source": source}]);
        assert!(are_separated(calico(Kind::GlobalNetworkPolicy, rule, json!([]))), "{source}");
        let rule = json!([{"action": "Allow", "destination": source}]);
        assert!(are_separated(calico(Kind::GlobalNetworkPolicy, json!([]), rule)), "{source}");
    }
    // A policy of a namespace refers to its own pods.
    let rule = json!([{"action": "Allow", "source": {"selector": "all()"}}]);
    assert!(are_separated(calico(Kind::NetworkPolicy, rule, json!([]))));
}

#[test]
fn policies_of_other_kinds_separate_classes() {
    let back = json!({"matchLabels": {"app": "back"}});
    for peer in [
        json!({"podSelector": {}}),
        json!({"podSelector": {"matchLabels": {"app": "one"}}, "namespaceSelector": {}}),
        json!({"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}}),
        json!({"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.1.0/24"]}}),
    ] {
        let spec = json!({"podSelector": back, "ingress": [{"from": [peer]}]});
        assert!(are_separated(Some((Kind::KubernetesNetworkPolicy, spec))), "{peer}");
    }
    let egress =
        json!({"podSelector": back, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "web"}]}]});
    assert!(are_separated(Some((Kind::KubernetesNetworkPolicy, egress))));
    for rule in [
        json!({"action": "Deny", "to": [{"namespaces": {"matchLabels": {"team": "a"}}}]}),
        json!({"action": "Deny", "to": [{"pods": {"podSelector": {"matchLabels": {"app": "one"}}}}]}),
        json!({"action": "Deny", "to": [{"networks": ["10.0.0.0/24"]}]}),
        json!({"action": "Deny", "to": [{"namespaces": {}}], "protocols": [{"destinationNamedPort": "web"}]}),
    ] {
        let subject = json!({"pods": {"podSelector": back}});
        let spec = json!({"tier": "Admin", "priority": 1, "subject": subject, "egress": [rule]});
        assert!(are_separated(Some((Kind::ClusterNetworkPolicy, spec))), "{rule}");
    }
}

#[test]
fn subjects_of_policies_separate_classes() {
    for subject in [
        json!({"selector": "app == 'one'"}),
        json!({"namespaceSelector": "team == 'a'"}),
        json!({"serviceAccountSelector": "has(may)"}),
    ] {
        assert!(are_separated(Some((Kind::GlobalNetworkPolicy, subject.clone()))), "{subject}");
    }
    assert!(are_separated(Some((Kind::NetworkPolicy, json!({})))));
    // A policy that was not understood denies in its namespace.
    let snapshot = {
        let mut snapshot = cluster(None);
        let odd = json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {"colour": "blue", "selector": "run == '1'"}});
        snapshot.insert(Key::namespaced(Kind::NetworkPolicy, "a", "p"), odd, None);
        snapshot
    };
    let classes = Classes::of(&[&snapshot]);
    let class =
        |name: &str| classes.class_of(&Peer::Pod { namespace: "a".to_owned(), name: name.to_owned() });
    assert_ne!(class("one"), class("back"));
}

#[test]
fn labels_that_no_policy_uses_separate_no_classes() {
    assert!(!are_separated(None));
    let whole = json!([{"action": "Allow", "protocol": "TCP", "destination": {"ports": [80]}}]);
    assert!(!are_separated(calico(Kind::GlobalNetworkPolicy, whole, json!([]))));
    let both = json!([{"action": "Allow", "source": {"selector": "has(app)", "nets": ["10.0.0.0/8"]}}]);
    assert!(!are_separated(calico(Kind::GlobalNetworkPolicy, both, json!([]))));
    // A staged policy has no effect yet.
    let staged = json!({"selector": "app == 'one'", "ingress": [{"action": "Deny"}]});
    assert!(!are_separated(Some((Kind::StagedGlobalNetworkPolicy, staged))));
}

/// Nodes reach pods of an overlay from their tunnel addresses, which are all that distinguishes these nodes.
#[test]
fn tunnel_addresses_of_both_families_separate_nodes() {
    let snapshot = |annotation: &str, addresses: [&str; 2], pool: &str, pod: &str, net: &str| {
        let mut snapshot = Snapshot::new();
        let mut add = |kind, namespace: &str, name: &str, mut value: Value| {
            value["metadata"]["name"] = json!(name);
            snapshot.insert(
                Key { kind, namespace: namespace.to_owned(), name: name.to_owned() },
                value,
                None,
            );
        };
        add(Kind::Namespace, "", "a", json!({}));
        let spec = json!({"nodeName": "n", "containers": []});
        let status = json!({"podIPs": [{"ip": pod}]});
        add(Kind::Pod, "a", "pod", json!({"metadata": {"namespace": "a"}, "spec": spec, "status": status}));
        for (number, tunnel) in addresses.into_iter().enumerate() {
            let annotations = json!({
                "projectcalico.org/IPv4Address": format!("203.0.113.{}/24", number + 1),
                "projectcalico.org/IPv6Address": format!("2001:db8::{}/64", number + 1),
                annotation: tunnel,
            });
            add(Kind::Node, "", &format!("n{number}"), json!({"metadata": {"annotations": annotations}}));
        }
        add(Kind::IpPool, "", "pool", json!({"spec": {"cidr": pool, "vxlanMode": "Always"}}));
        let spec = json!({"ingress": [{"action": "Allow", "source": {"nets": [net]}}]});
        add(Kind::NetworkPolicy, "a", "p", json!({"metadata": {"namespace": "a"}, "spec": spec}));
        snapshot
    };
    let v4 = |addresses| {
        snapshot(
            "projectcalico.org/IPv4VXLANTunnelAddr",
            addresses,
            "10.0.0.0/24",
            "10.0.0.1",
            "172.16.0.0/24",
        )
    };
    let v6 = |addresses| {
        snapshot("projectcalico.org/IPv6VXLANTunnelAddr", addresses, "fd00::/64", "fd00::1", "fd16::/64")
    };
    for (addresses, separated) in [
        (["172.16.0.1", "172.17.0.1"], true),
        (["172.16.0.1", "172.16.0.2"], false),
        (["fd16::1", "fd17::1"], true),
        (["fd16::1", "fd16::2"], false),
    ] {
        let snapshot = if addresses[0].contains(':') { v6(addresses) } else { v4(addresses) };
        for (key, stored) in snapshot.iter() {
            assert!(stored.resource.is_ok(), "{key}: {:?}", stored.resource);
        }
        let classes = Classes::of(&[&snapshot]);
        let class = |name: &str| classes.class_of(&Peer::Node(name.to_owned())).unwrap();
        assert_eq!(class("n0") != class("n1"), separated, "{addresses:?}");
    }
}
