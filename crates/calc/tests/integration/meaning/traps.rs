//! Mistakes of other implementations (Calico, for instance): objects stored without validation, judged by both ways.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use crate::meaning::support::{both_say, objects};

struct Trap {
    what: &'static str,
    stored: Vec<(Key, Value)>,
    allowed: &'static [&'static str],
    denied: &'static [&'static str],
}

fn calico(namespace: &str, name: &str, spec: Value) -> (Key, Value) {
    let kind = if namespace.is_empty() { Kind::GlobalNetworkPolicy } else { Kind::NetworkPolicy };
    (
        Key { kind, namespace: namespace.into(), name: name.into() },
        json!({"metadata": {"name": name}, "spec": spec}),
    )
}

fn kubernetes(spec: Value) -> (Key, Value) {
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "db", "k");
    (key, json!({"metadata": {"name": "k", "namespace": "db"}, "spec": spec}))
}

fn tier(name: &str, spec: Value) -> (Key, Value) {
    (Key::global(Kind::Tier, name), json!({"metadata": {"name": name}, "spec": spec}))
}

fn traps() -> Vec<Trap> {
    vec![
        Trap {
            what: "an ipBlock that cannot be read would become everybody (18)",
            stored: vec![kubernetes(
                json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}]}),
            )],
            allowed: &["db/main > web/front tcp/1"],
            denied: &["web/front > db/main tcp/1", "outside > db/main tcp/1"],
        },
        Trap {
            what: "an exception that cannot be read would lose those after it (18)",
            stored: vec![kubernetes(
                json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.x", "10.0.0.1/32"]}}]}]}),
            )],
            allowed: &["db/main > outside tcp/1"],
            denied: &["web/front > db/main tcp/1", "web/back > db/main tcp/1"],
        },
        Trap {
            what: "a namespaceSelector that cannot be read would be dropped, and the policy select everything or its rule match \
                   everybody (18)",
            stored: vec![calico(
                "",
                "g",
                json!({"order": 1, "namespaceSelector": "team = 'a'", "types": ["Ingress"], "ingress": [{"action": "Allow"}]}),
            )],
            allowed: &[],
            denied: &["web/front > db/main tcp/1", "outside > web/front tcp/1"],
        },
        Trap {
            what: "networks that cannot be read would be skipped (13)",
            stored: vec![calico(
                "db",
                "p",
                json!({"types": ["Ingress"], "ingress": [{"action": "Deny", "source": {"nets": ["10.0.0.0/8", "10.0.0.500/32"]}}, {"action": "Allow"}]}),
            )],
            allowed: &["db/main > outside tcp/1"],
            denied: &["web/front > db/main tcp/1", "outside > db/main tcp/1"],
        },
        Trap {
            what: "a protocol that is not known would be any",
            stored: vec![calico(
                "db",
                "p",
                json!({"ingress": [{"action": "Allow", "protocol": "TCQ"}], "types": ["Ingress"]}),
            )],
            allowed: &[],
            denied: &["web/front > db/main tcp/1", "web/front > db/main icmp/8"],
        },
        Trap {
            what: "ports of two tiers meet only where both have them; lists that do not meet allow nothing",
            stored: vec![
                tier("first", json!({"order": 1, "defaultAction": "Deny"})),
                calico(
                    "db",
                    "first.a",
                    json!({"tier": "first", "selector": "tier == 'main'", "ingress": [{"action": "Pass", "protocol": "TCP", "destination": {"ports": [80, "90:100"]}}]}),
                ),
                calico(
                    "db",
                    "b",
                    json!({"selector": "tier == 'main'", "ingress": [{"action": "Allow", "protocol": "TCP", "destination": {"ports": ["95:110", 443]}}]}),
                ),
            ],
            allowed: &["web/front > db/main tcp/95", "web/front > db/main tcp/100"],
            denied: &[
                "web/front > db/main tcp/80",
                "web/front > db/main tcp/94",
                "web/front > db/main tcp/101",
                "web/front > db/main tcp/443",
            ],
        },
        Trap {
            what: "criteria of one side are an intersection, not a union: selector and nets, account and namespace (14)",
            stored: vec![calico(
                "db",
                "p",
                json!({"ingress": [{"action": "Allow", "source": {"nets": ["10.0.0.2/31"], "namespaceSelector": "all()", "selector": "app == 'db' || app == 'back'", "serviceAccounts": {"names": ["runner"]}}}]}),
            )],
            allowed: &["web/back > db/main tcp/1"],
            denied: &["db/copy > db/main tcp/1", "web/front > db/main tcp/1", "outside > db/main tcp/1"],
        },
        Trap {
            what: "a set without members is nobody, and not everybody (14)",
            stored: vec![calico(
                "db",
                "p",
                json!({"ingress": [{"action": "Allow", "source": {"selector": "app == 'nobody'"}}, {"action": "Allow", "protocol": "TCP", "destination": {"ports": ["nothing"]}}]}),
            )],
            allowed: &[],
            denied: &["web/front > db/main tcp/5432", "db/copy > db/main tcp/1"],
        },
        Trap {
            what: "a label that is not there: != and not in hold, the other comparisons do not",
            stored: vec![
                calico(
                    "db",
                    "p",
                    json!({"selector": "tier == 'main'", "ingress": [{"action": "Allow", "protocol": "TCP", "source": {"selector": "tier != 'main'"}}, {"action": "Allow", "protocol": "UDP", "source": {"selector": "tier not in {'x'}"}}]}),
                ),
                calico(
                    "db",
                    "q",
                    json!({"selector": "!has(tier)", "ingress": [{"action": "Allow", "source": {"namespaceSelector": "all()", "selector": "tier contains 'ma' || tier in {'main'}"}}]}),
                ),
            ],
            allowed: &["db/copy > db/main tcp/1", "db/copy > db/main udp/1", "db/main > db/copy tcp/1"],
            denied: &["web/front > db/main tcp/1", "web/front > db/copy tcp/1"],
        },
        Trap {
            what: "Pass in the last tier reaches the profiles",
            stored: vec![calico("db", "p", json!({"ingress": [{"action": "Pass"}]}))],
            allowed: &["outside > db/main tcp/1"],
            denied: &[],
        },
        Trap {
            what: "a list where a mapping belongs would be a mapping of defaults: everybody",
            stored: vec![
                calico(
                    "db",
                    "p",
                    json!({"order": 1, "types": ["Ingress"], "ingress": [{"action": "Allow", "source": []}]}),
                ),
                kubernetes(
                    json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"namespaceSelector": []}]}]}),
                ),
            ],
            allowed: &["web/front > outside tcp/1"],
            denied: &["web/front > db/main tcp/1", "db/main > web/front tcp/1"],
        },
        Trap {
            what: "fields of the other API do not say in which directions a policy that is not understood denies (18)",
            stored: vec![calico(
                "db",
                "p",
                json!({"policyTypes": ["Egress"], "ingress": [{"action": "Deny"}]}),
            )],
            allowed: &[],
            denied: &["web/front > db/main tcp/1", "db/main > web/front tcp/1"],
        },
        Trap {
            what: "blank selectors are none, also in a policy that is not understood (18)",
            stored: vec![calico(
                "",
                "g",
                json!({"types": ["Ingress"], "selector": " ", "namespaceSelector": "", "serviceAccountSelector": "", "colour": "blue"}),
            )],
            allowed: &[],
            denied: &["web/front > db/main tcp/1", "db/main > web/back tcp/1"],
        },
        Trap {
            what: "a label name that is none could pass for two criteria, and one set for another",
            stored: vec![kubernetes(
                json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": {"matchExpressions": [{"key": "a) && has(pod:b", "operator": "DoesNotExist"}]}}]}]}),
            )],
            allowed: &["db/main > outside tcp/1"],
            denied: &["db/copy > db/main tcp/1"],
        },
        Trap {
            what: "where the tiers that every cluster has stand is not for anybody to say (7)",
            stored: vec![
                tier("default", json!({"order": 1e9})),
                (
                    Key::global(Kind::ClusterNetworkPolicy, "c"),
                    json!({"metadata": {"name": "c"}, "spec": {"tier": "Baseline", "priority": 1, "subject": {"namespaces": {}}, "ingress": [{"action": "Accept", "from": [{"namespaces": {}}]}]}}),
                ),
                calico("db", "p", json!({"ingress": [{"action": "Deny"}]})),
            ],
            allowed: &["db/main > web/front tcp/1"],
            denied: &["web/front > db/main tcp/1"],
        },
        Trap {
            what: "no networks are nobody, and not everybody",
            stored: vec![
                (
                    Key::global(Kind::ClusterNetworkPolicy, "c"),
                    json!({"metadata": {"name": "c"}, "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [{"action": "Accept", "to": [{"networks": []}]}]}}),
                ),
                calico("web", "p", json!({"egress": [{"action": "Deny"}]})),
            ],
            allowed: &["db/main > outside tcp/1"],
            denied: &["web/front > outside tcp/1"],
        },
        Trap {
            what: "a Service without ports has backends all the same; an empty namespace is the policy's",
            stored: vec![
                (
                    Key::namespaced(Kind::EndpointSlice, "db", "s1"),
                    json!({"metadata": {"name": "s1", "labels": {"kubernetes.io/service-name": "s"}}, "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": []}),
                ),
                calico(
                    "db",
                    "p",
                    json!({"ingress": [{"action": "Deny", "source": {"services": {"name": "s", "namespace": ""}}}, {"action": "Allow"}]}),
                ),
            ],
            allowed: &["web/back > db/main tcp/1"],
            denied: &["web/front > db/main tcp/1"],
        },
        Trap {
            what: "an ICMP criterion without a type is none",
            stored: vec![calico(
                "db",
                "p",
                json!({"ingress": [{"action": "Deny", "protocol": "ICMP", "notICMP": {}}, {"action": "Allow"}]}),
            )],
            allowed: &["web/front > db/main tcp/1"],
            denied: &["web/front > db/main icmp/8"],
        },
        Trap {
            what: "a Deny stays where the rest of its policy cannot be enforced",
            stored: vec![calico(
                "db",
                "p",
                json!({"ingress": [{"action": "Deny", "protocol": "ICMP", "icmp": {"type": 8, "code": 0}}, {"action": "Deny", "notProtocol": "TCP"}, {"action": "Allow", "http": {"methods": ["GET"]}}, {"action": "Allow", "destination": {"notPorts": [22]}, "protocol": "TCP"}]}),
            )],
            allowed: &["web/front > db/main tcp/80"],
            denied: &[
                "web/front > db/main icmp/8",
                "web/front > db/main icmp/3",
                "web/front > db/main udp/1",
                "web/front > db/main tcp/22",
            ],
        },
    ]
}

#[test]
fn known_traps_are_avoided() {
    for trap in traps() {
        let mut all = objects("");
        all.extend(trap.stored);
        for (flows, expected) in [(trap.allowed, true), (trap.denied, false)] {
            for flow in flows {
                assert_eq!(both_say(&all, flow), expected, "{}: {flow}", trap.what);
            }
        }
    }
}
