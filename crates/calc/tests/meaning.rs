//! What policies come to, from their manifests to a verdict. Numbers in brackets are the points of the project's
//! semantics that a case belongs to.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_api::net::{Direction, Protocol};
use tortie_api::{Key, Kind, manifest};
use tortie_calc::Calc;
use tortie_dataplane::EndpointId;
use tortie_policy::oracle::{Peer, Question, Snapshot, Verdict};
use tortie_policy::program::{Flow, evaluate};

/// Pods of namespace `web` (label `team=a`) and `db` (label `team=b`), all on one node; `namespace/name` → address.
const PODS: [(&str, &str, &str, &str); 5] = [
    ("web/front", "10.0.0.1", "app=front", "default"),
    ("web/back", "10.0.0.2", "app=back", "runner"),
    ("db/main", "10.0.0.3", "app=db,tier=main", "default"),
    ("db/copy", "10.0.0.4", "app=db", "default"),
    ("lost/pod", "10.0.0.5", "app=front", "default"),
];
const OUTSIDE: &str = "203.0.113.9";

/// The cluster with these policies, as objects.
fn objects(policies: &str) -> Vec<(Key, Value)> {
    let mut objects = Vec::new();
    for (name, team) in [("web", "a"), ("db", "b")] {
        let value = json!({"metadata": {"name": name, "labels": {"team": team}}});
        objects.push((Key::global(Kind::Namespace, name), value));
    }
    let account = json!({"metadata": {"name": "runner", "namespace": "web", "labels": {"trusted": "yes"}}});
    objects.push((Key::namespaced(Kind::ServiceAccount, "web", "runner"), account));
    for (pod, address, labels, account) in PODS {
        let (namespace, name) = pod.split_once('/').unwrap();
        let labels: Value = labels
            .split(',')
            .map(|label| label.split_once('=').unwrap())
            .map(|(k, v)| (k.to_owned(), json!(v)))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint", "metadata": {"name": name, "labels": labels},
            "spec": {
                "node": "n", "pod": name, "endpoint": "eth0", "serviceAccountName": account, "ipNetworks": [format!("{address}/32")],
                "profiles": [format!("kns.{namespace}")],
                "ports": [{"name": "sql", "protocol": "TCP", "port": if name == "copy" { 5433 } else { 5432 }}],
            },
        });
        let key = tortie_api::calico::WorkloadEndpoint::name_for("n", name, "eth0");
        objects.push((Key::namespaced(Kind::WorkloadEndpoint, namespace, key), value));
    }
    // Stored by somebody who is not held to our validation: labels that it may not give, and parts that cannot be read.
    let value = json!({
        "metadata": {"name": "impostor", "namespace": "lost", "labels": {
            "pcns.team": "a", "projectcalico.org/serviceaccount": "runner", "pcsa.trusted": "yes",
        }},
        "spec": {"nets": [format!("{OUTSIDE}/32"), "fast", "10.0.0.300/8"], "colour": "blue"},
    });
    objects.push((Key::namespaced(Kind::NetworkSet, "lost", "impostor"), value));
    for object in manifest::read("policies.yml", policies).unwrap_or_else(|problems| panic!("{problems:?}")) {
        objects.push((object.key, object.value));
    }
    objects
}

fn calc_of(policies: &str) -> Calc {
    let mut calc = Calc::new("n");
    for (key, value) in objects(policies) {
        calc.update(&key, Some(&value));
    }
    calc.flush();
    calc
}

fn address(name: &str) -> IpAddr {
    PODS.iter().find(|(pod, ..)| *pod == name).map_or(OUTSIDE, |(_, address, ..)| address).parse().unwrap()
}

/// Whether a flow gets through: the source's egress and the destination's ingress both allow (5).
fn passes(calc: &Calc, from: &str, to: &str, port: &str) -> bool {
    let (protocol, number) = port.split_once('/').unwrap();
    let protocol = Protocol::from_name(protocol).unwrap();
    let number: u16 = number.parse().unwrap();
    let icmp = (protocol == Protocol::ICMP).then(|| (u8::try_from(number).unwrap(), 0));
    let destination_port = if icmp.is_some() { 0 } else { number };
    let flow = Flow {
        source: address(from),
        destination: address(to),
        protocol,
        source_port: 40_000,
        destination_port,
        icmp,
    };
    let judge = |pod: &str, direction| {
        let Some((namespace, name)) = pod.split_once('/') else { return true };
        let id = EndpointId { namespace: namespace.into(), pod: name.into(), interface: "eth0".into() };
        let endpoint = &calc.state().endpoints[&id];
        evaluate(&endpoint.program, direction, &flow, calc.state())
    };
    judge(from, Direction::Egress) && judge(to, Direction::Ingress)
}

/// The same from the resources themselves.
fn oracle_says(objects: &[(Key, Value)], from: &str, to: &str, port: &str) -> bool {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let (protocol, number) = port.split_once('/').unwrap();
    let (protocol, number) = (Protocol::from_name(protocol).unwrap(), number.parse::<u16>().unwrap());
    let icmp = (protocol == Protocol::ICMP).then(|| (u8::try_from(number).unwrap(), 0));
    let peer = |name: &str| match name.split_once('/') {
        Some((namespace, name)) => Peer::Pod { namespace: namespace.into(), name: name.into() },
        None => Peer::Address(address(name)),
    };
    let destination_port = if icmp.is_some() { 0 } else { number };
    let question =
        Question { from: peer(from), to: peer(to), protocol, source_port: 40_000, destination_port, icmp };
    tortie_policy::oracle::evaluate(&snapshot, &question).unwrap().verdict == Verdict::Allow
}

struct Case {
    what: &'static str,
    policies: String,
    /// `from > to port` of what passes, and of what does not.
    allowed: &'static [&'static str],
    denied: &'static [&'static str],
}

fn calico(namespace: &str, name: &str, spec: &str) -> String {
    let kind = if namespace.is_empty() { "GlobalNetworkPolicy" } else { "NetworkPolicy" };
    let namespace = if namespace.is_empty() { String::new() } else { format!(", namespace: {namespace}") };
    format!(
        "---\napiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: {name}{namespace}}}\nspec: {spec}\n"
    )
}

fn tier(name: &str, spec: &str) -> String {
    format!("---\napiVersion: projectcalico.org/v3\nkind: Tier\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

fn cluster(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: {name}}}\nspec: {spec}\n"
    )
}

fn kubernetes(namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: k, namespace: {namespace}}}\nspec: {spec}\n"
    )
}

fn cases() -> Vec<Case> {
    vec![
        Case {
            what: "no policy: the namespace's profile allows; a pod whose namespace is not known is closed (8)",
            policies: String::new(),
            allowed: &[
                "web/front > db/main tcp/1",
                "outside > web/front udp/1",
                "web/front > outside icmp/8",
            ],
            denied: &["web/front > lost/pod tcp/1", "lost/pod > web/front tcp/1"],
        },
        Case {
            what: "a policy isolates only what it selects, only in its direction (8)",
            policies: calico(
                "db",
                "p",
                "{selector: tier == 'main', ingress: [{action: Allow, source: {selector: app == 'db'}}]}",
            ),
            allowed: &["db/copy > db/main tcp/1", "web/front > db/copy tcp/1", "db/main > web/front tcp/1"],
            denied: &["web/front > db/main tcp/1", "outside > db/main tcp/1"],
        },
        Case {
            what: "a selector in a namespaced policy means that namespace's endpoints (13)",
            policies: calico("db", "p", "{ingress: [{action: Allow, source: {selector: app == 'front'}}]}"),
            allowed: &[],
            denied: &["web/front > db/main tcp/1", "db/copy > db/main tcp/1"],
        },
        Case {
            what: "namespaceSelector opens it to others, by their labels (13)",
            policies: calico(
                "db",
                "p",
                "{ingress: [{action: Allow, source: {namespaceSelector: team == 'a', selector: app == 'front'}}]}",
            ),
            allowed: &["web/front > db/main tcp/1"],
            denied: &["web/back > db/main tcp/1", "db/copy > db/main tcp/1", "lost/pod > db/main tcp/1"],
        },
        Case {
            what: "a rule with only nets or ports is not bound to the namespace (13, 6)",
            policies: calico(
                "db",
                "p",
                "{ingress: [{action: Allow, protocol: TCP, source: {nets: [10.0.0.0/30]}, destination: {ports: [80, '90:95']}}]}",
            ),
            allowed: &["web/front > db/main tcp/80", "web/back > db/main tcp/95"],
            denied: &[
                "web/front > db/main tcp/81",
                "web/front > db/main udp/80",
                "db/copy > db/main tcp/80",
                "outside > db/main tcp/80",
            ],
        },
        Case {
            what: "order decides, absent is last, ties go by name (7)",
            policies: calico("db", "b", "{order: 2, ingress: [{action: Deny, protocol: TCP}]}")
                + &calico(
                    "db",
                    "a",
                    "{order: 1, ingress: [{action: Allow, protocol: TCP, destination: {ports: [1]}}]}",
                )
                + &calico("db", "last", "{ingress: [{action: Allow}]}")
                + &calico(
                    "db",
                    "z",
                    "{order: 0, selector: tier == 'main', ingress: [{action: Deny, protocol: UDP, destination: {ports: [7]}}]}",
                )
                + &calico(
                    "db",
                    "y",
                    "{order: 0, selector: tier == 'main', ingress: [{action: Allow, protocol: UDP, destination: {ports: [7]}}]}",
                ),
            allowed: &["web/front > db/main tcp/1", "web/front > db/main udp/2", "web/front > db/main udp/7"],
            denied: &["web/front > db/main tcp/2"],
        },
        Case {
            what: "Pass in the last tier reaches the profiles (8), Log goes on",
            policies: calico("db", "p", "{ingress: [{action: Log}, {action: Pass, protocol: TCP}]}"),
            allowed: &["web/front > db/main tcp/1"],
            denied: &["web/front > db/main udp/1"],
        },
        Case {
            what: "negations: notSelector alone, beside a selector; notNets, notPorts, notProtocol (14)",
            policies: calico(
                "",
                "g",
                "{selector: app == 'db', ingress: [{action: Allow, notProtocol: UDP, source: {notSelector: app == 'front'}}, {action: Allow, protocol: UDP, source: {notNets: [10.0.0.0/8]}, destination: {notPorts: [53]}}]}",
            ),
            allowed: &["web/back > db/main tcp/1", "outside > db/main tcp/1", "outside > db/main udp/54"],
            denied: &["web/front > db/main tcp/1", "outside > db/main udp/53", "web/back > db/main udp/54"],
        },
        Case {
            what: "a selector that matches nobody matches nothing, its negation everybody (14)",
            policies: calico(
                "db",
                "p",
                "{selector: tier == 'main', ingress: [{action: Allow, source: {selector: has(nothing)}}]}",
            ) + &calico(
                "",
                "g",
                "{selector: app == 'db' && !has(tier), ingress: [{action: Allow, source: {notSelector: has(nothing)}}]}",
            ),
            allowed: &["web/front > db/copy tcp/1", "outside > db/copy tcp/1"],
            denied: &["web/front > db/main tcp/1", "db/copy > db/main tcp/1"],
        },
        Case {
            what: "service accounts, by name and by label",
            policies: calico(
                "",
                "g",
                "{selector: app == 'db', ingress: [{action: Allow, protocol: TCP, source: {serviceAccounts: {names: [runner]}}}, {action: Allow, protocol: UDP, source: {serviceAccounts: {selector: trusted == 'yes'}}}]}",
            ),
            allowed: &["web/back > db/main tcp/1", "web/back > db/main udp/1"],
            denied: &["web/front > db/main tcp/1", "web/front > db/main udp/1", "web/back > db/main icmp/8"],
        },
        Case {
            what: "icmp by type; notICMP by type",
            policies: calico(
                "db",
                "p",
                "{ingress: [{action: Allow, protocol: ICMP, icmp: {type: 8}}, {action: Allow, protocol: ICMP, notICMP: {type: 13}}]}",
            ),
            allowed: &["web/front > db/main icmp/8", "web/front > db/main icmp/3"],
            denied: &["web/front > db/main icmp/13", "web/front > db/main tcp/8"],
        },
        Case {
            what: "types without rules close a direction; egress alone leaves ingress open",
            policies: calico("web", "p", "{selector: app == 'front', types: [Egress]}"),
            allowed: &["db/main > web/front tcp/1"],
            denied: &["web/front > db/main tcp/1", "web/front > outside tcp/1"],
        },
        Case {
            what: "tiers by order; Pass goes on to the next; the end of a tier denies or passes; profiles last (7, 8)",
            policies: tier("first", "{order: 1, defaultAction: Pass}")
                + &tier("second", "{order: 2}")
                + &calico("db", "second.p", "{tier: second, selector: app == 'db', ingress: [{action: Allow, protocol: TCP, destination: {ports: [2]}}, {action: Pass, protocol: TCP, destination: {ports: [3]}}]}")
                + &calico("db", "first.p", "{tier: first, order: 9, selector: app == 'db', ingress: [{action: Deny, protocol: TCP, destination: {ports: [1]}}, {action: Allow, protocol: TCP, destination: {ports: [4]}}]}")
                + &calico("db", "last", "{selector: tier == 'main', ingress: [{action: Deny, source: {selector: app == 'db'}}, {action: Pass}]}"),
            allowed: &["web/front > db/main tcp/2", "web/front > db/main tcp/3", "web/front > db/main tcp/4", "web/front > db/copy tcp/3"],
            denied: &["web/front > db/main tcp/1", "web/front > db/main tcp/5", "db/copy > db/main tcp/3", "web/front > db/copy udp/3"],
        },
        Case {
            what: "a tier that nobody described comes last and ends with Deny; a policy of a tier counts only where it applies (8)",
            policies: calico("db", "p", "{selector: tier == 'main', ingress: [{action: Pass, protocol: TCP}]}")
                + &calico("db", "x.p", "{tier: x, ingress: [{action: Allow, protocol: TCP, destination: {ports: [1]}}]}"),
            allowed: &["web/front > db/main tcp/1", "web/front > db/copy tcp/1"],
            denied: &["web/front > db/main tcp/2", "web/front > db/main udp/1", "web/front > db/copy tcp/2"],
        },
        Case {
            what: "network sets by label, of a namespace and of none; global() (13)",
            policies: "---\napiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {name: g, labels: {zone: partner}}\nspec: {nets: [203.0.113.0/24]}\n".to_owned()
                + "---\napiVersion: projectcalico.org/v3\nkind: NetworkSet\nmetadata: {name: n, namespace: web, labels: {zone: office}}\nspec: {nets: [10.0.0.1/32]}\n"
                + &calico("db", "p", "{selector: tier == 'main', ingress: [{action: Allow, protocol: TCP, source: {namespaceSelector: global(), selector: zone == 'partner'}}, {action: Allow, protocol: UDP, source: {namespaceSelector: team == 'a', selector: zone == 'office'}}]}")
                + &calico("", "q", "{selector: app == 'db' && !has(tier), ingress: [{action: Allow, source: {selector: has(zone)}}]}"),
            allowed: &["outside > db/main tcp/1", "web/front > db/main udp/1", "outside > db/copy tcp/1", "web/front > db/copy tcp/1"],
            denied: &["outside > db/main udp/1", "web/front > db/main tcp/1", "web/back > db/copy tcp/1"],
        },
        Case {
            what: "labels that only the cluster gives cannot be claimed by a network set or a profile (calico.md 1.5)",
            policies: calico("db", "p", "{selector: tier == 'main', ingress: [{action: Allow, source: {namespaceSelector: team == 'a'}}]}")
                + &calico("db", "q", "{selector: app == 'db' && !has(tier), ingress: [{action: Allow, source: {namespaceSelector: all(), serviceAccounts: {names: [runner]}}}]}"),
            allowed: &["web/front > db/main tcp/1", "web/back > db/copy tcp/1"],
            denied: &["outside > db/main tcp/1", "outside > db/copy tcp/1"],
        },
        Case {
            what: "named ports are the destination's, with its protocol; numbers beside them are alternatives (12)",
            policies: calico("db", "p", "{ingress: [{action: Allow, protocol: TCP, destination: {ports: [sql, 81]}}, {action: Allow, protocol: UDP, destination: {ports: [sql]}}]}")
                + &kubernetes("web", "{podSelector: {}, ingress: [{ports: [{port: sql}, {port: none}]}]}"),
            allowed: &["web/front > db/main tcp/5432", "web/front > db/copy tcp/5433", "web/front > db/main tcp/81", "db/main > web/front tcp/5432"],
            denied: &["web/front > db/main tcp/5433", "web/front > db/main udp/5432", "web/front > db/main tcp/82", "db/main > web/front tcp/1"],
        },
        Case {
            what: "a Service's backends: with their ports at the destination, by address at the source (6)",
            policies: "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s-1, namespace: db, labels: {kubernetes.io/service-name: s}}\naddressType: IPv4\nendpoints: [{addresses: [10.0.0.3], conditions: {ready: false}}]\nports: [{name: sql, port: 5432, protocol: TCP}, {port: 53, protocol: UDP}]\n".to_owned()
                + "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: other, namespace: web, labels: {kubernetes.io/service-name: s}}\naddressType: IPv4\nendpoints: [{addresses: [10.0.0.4]}]\nports: [{port: 5433}]\n"
                + &calico("web", "p", "{selector: app == 'front', egress: [{action: Allow, destination: {services: {name: s, namespace: db}}}]}")
                + &calico("", "g", "{selector: app == 'back', ingress: [{action: Allow, source: {services: {name: s, namespace: db}}}], types: [Ingress]}"),
            allowed: &["web/front > db/main tcp/5432", "web/front > db/main udp/53", "db/main > web/back tcp/7", "db/main > web/back icmp/8"],
            denied: &["web/front > db/main tcp/53", "web/front > db/copy tcp/5433", "db/copy > web/back tcp/5432"],
        },
        Case {
            what: "cluster policies: Admin before namespaces' own, Baseline after, by priority; both yield to what is said earlier (8, 9)",
            policies: cluster("first", "{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {matchLabels: {team: b}}, podSelector: {matchLabels: {tier: main}}}}, ingress: [{action: Accept, from: [{namespaces: {matchLabels: {team: a}}}], protocols: [{tcp: {destinationPort: {number: 1}}}, {destinationNamedPort: sql}]}, {action: Pass, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 2, end: 5}}}}]}]}")
                + &cluster("later", "{tier: Admin, priority: 2, subject: {namespaces: {matchLabels: {team: b}}}, ingress: [{action: Deny, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 1, end: 3}}}}, {udp: {}}]}]}")
                + &cluster("base", "{tier: Baseline, priority: 0, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: back}}}}]}], egress: [{action: Deny, to: [{networks: [203.0.113.0/24]}]}]}")
                + &kubernetes("db", "{podSelector: {matchLabels: {tier: main}}, ingress: [{from: [{namespaceSelector: {}}], ports: [{port: 2}]}]}"),
            allowed: &["web/front > db/main tcp/1", "web/back > db/main tcp/5432", "web/back > db/main tcp/2", "web/front > db/copy tcp/4", "outside > db/copy tcp/1"],
            denied: &["db/copy > db/main tcp/1", "web/front > db/main tcp/3", "web/front > db/main udp/1", "web/front > db/copy tcp/1", "web/back > db/copy tcp/4", "web/back > web/front tcp/4", "web/front > outside tcp/1", "outside > db/main tcp/1"],
        },
        Case {
            what: "AdminNetworkPolicy and BaselineAdminNetworkPolicy are read the same way (9)",
            policies: "---\napiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: a}\nspec: {priority: 5, subject: {namespaces: {matchLabels: {team: b}}}, ingress: [{action: Allow, from: [{namespaces: {matchLabels: {team: a}}}], ports: [{portNumber: {protocol: TCP, port: 1}}, {portRange: {protocol: UDP, start: 1, end: 3}}, {namedPort: sql}]}, {action: Deny, from: [{namespaces: {matchLabels: {team: a}}}]}]}\n".to_owned()
                + "---\napiVersion: policy.networking.k8s.io/v1alpha1\nkind: BaselineAdminNetworkPolicy\nmetadata: {name: default}\nspec: {subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}\n",
            allowed: &["web/front > db/main tcp/1", "web/front > db/main udp/3", "web/front > db/copy tcp/5433", "outside > web/front tcp/1"],
            denied: &["web/front > db/main tcp/2", "web/front > db/copy tcp/5432", "db/copy > db/main tcp/1", "db/main > web/front tcp/1"],
        },
        Case {
            what: "staged policies have no effect",
            policies: "---\napiVersion: projectcalico.org/v3\nkind: StagedNetworkPolicy\nmetadata: {name: s, namespace: db}\nspec: {stagedAction: Set, ingress: [{action: Deny}]}\n".to_owned()
                + "---\napiVersion: projectcalico.org/v3\nkind: StagedGlobalNetworkPolicy\nmetadata: {name: s}\nspec: {types: [Ingress, Egress]}\n"
                + "---\napiVersion: projectcalico.org/v3\nkind: StagedKubernetesNetworkPolicy\nmetadata: {name: s, namespace: db}\nspec: {stagedAction: Set, podSelector: {}}\n",
            allowed: &["web/front > db/main tcp/1"],
            denied: &[],
        },
        Case {
            what: "Kubernetes: empty selectors and peers (10, 11)",
            policies: kubernetes(
                "db",
                "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}, {from: [{namespaceSelector: {matchLabels: {team: a}}, podSelector: {matchExpressions: [{key: app, operator: In, values: [front]}]}}]}]}",
            ),
            allowed: &["db/copy > db/main icmp/8", "web/front > db/main udp/1", "db/main > outside tcp/1"],
            denied: &["web/back > db/main tcp/1", "outside > db/main tcp/1"],
        },
        Case {
            what: "Kubernetes: ports without peers are for everyone, and no ICMP; endPort (11)",
            policies: kubernetes(
                "db",
                "{podSelector: {matchLabels: {tier: main}}, ingress: [{ports: [{port: 80}, {port: 90, endPort: 92}, {protocol: UDP}]}]}",
            ),
            allowed: &[
                "outside > db/main tcp/80",
                "web/front > db/main tcp/92",
                "web/front > db/main udp/1234",
            ],
            denied: &["web/front > db/main tcp/93", "web/front > db/main icmp/8"],
        },
        Case {
            what: "Kubernetes: ipBlock less its exceptions, egress isolates only with egress rules or the type (10)",
            policies: kubernetes(
                "web",
                "{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.4/32]}}]}], policyTypes: [Egress]}",
            ),
            allowed: &["web/front > db/main tcp/1", "db/main > web/front tcp/1"],
            denied: &["web/front > db/copy tcp/1", "web/front > outside tcp/1"],
        },
        Case {
            what: "Kubernetes: the name that the API server gives every namespace as a label",
            policies: kubernetes(
                "db",
                "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: web}}}]}]}",
            ),
            allowed: &["web/front > db/main tcp/1"],
            denied: &["db/copy > db/main tcp/1"],
        },
    ]
}

#[test]
fn policies_come_to_what_they_say() {
    for case in cases() {
        let objects = objects(&case.policies);
        let calc = calc_of(&case.policies);
        let unexpected = calc.findings().into_iter().filter(|finding| finding.key.name != "impostor");
        let unexpected: Vec<_> = unexpected.filter(|finding| !finding.problem.contains("tier x ")).collect();
        assert_eq!(unexpected, vec![], "{}", case.what);
        let flows =
            case.allowed.iter().map(|flow| (flow, true)).chain(case.denied.iter().map(|flow| (flow, false)));
        for (flow, expected) in flows {
            let (from, rest) = flow.split_once(" > ").unwrap();
            let (to, port) = rest.split_once(' ').unwrap();
            assert_eq!(passes(&calc, from, to, port), expected, "{}: {flow}", case.what);
            assert_eq!(
                oracle_says(&objects, from, to, port),
                expected,
                "the oracle on {}: {flow}",
                case.what
            );
        }
    }
}

/// A policy that is stored and cannot be understood denies, in the directions that it names, where it stands in the
/// order, to what it selects (18).
#[test]
fn what_cannot_be_understood_denies() {
    let policy = |spec: Value| json!({"metadata": {"name": "p", "namespace": "db"}, "spec": spec});
    let allow_first = json!({"order": 1, "ingress": [{"action": "Allow", "protocol": "TCP", "destination": {"ports": [1]}}]});
    for (spec, allowed, denied) in [
        // An unknown field; the selector is readable.
        (
            json!({"selector": "tier == 'main'", "ingress": [{"action": "Allow", "notSelektor": "x"}], "types": ["Ingress"]}),
            vec!["web/front > db/copy tcp/2", "db/main > web/front tcp/2"],
            vec!["web/front > db/main tcp/2"],
        ),
        // An unknown action, directions not named: both.
        (
            json!({"selector": "tier == 'main'", "ingress": [{"action": "Permit"}]}),
            vec!["web/front > db/copy tcp/2"],
            vec!["web/front > db/main tcp/2", "db/main > web/front tcp/2"],
        ),
        // An unreadable selector: the whole namespace, and no other.
        (
            json!({"selector": "tier = 'main'", "types": ["Ingress"]}),
            vec!["db/main > web/front tcp/2"],
            vec!["web/front > db/main tcp/2", "web/front > db/copy tcp/2"],
        ),
        // An Allow by HTTP request allows nothing, as nothing looks into packets (15); a policy before it keeps its say.
        (
            json!({"order": 2, "selector": "tier == 'main'", "ingress": [{"action": "Allow", "http": {"methods": ["GET"]}}], "types": ["Ingress"]}),
            vec!["web/front > db/main tcp/1", "web/front > db/copy tcp/1"],
            vec!["web/front > db/main tcp/2"],
        ),
    ] {
        let mut calc = calc_of("");
        calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&policy(spec.clone())));
        if spec.get("order").is_some() {
            calc.update(
                &Key::namespaced(Kind::NetworkPolicy, "db", "first"),
                Some(&policy(allow_first.clone())),
            );
        }
        calc.flush();
        let findings = calc.findings();
        let names: Vec<&str> = findings.iter().map(|finding| finding.key.name.as_str()).collect();
        assert_eq!(names, ["impostor", "p"], "{spec}: {findings:?}");
        for (flows, expected) in [(&allowed, true), (&denied, false)] {
            for flow in flows {
                let (from, rest) = flow.split_once(" > ").unwrap();
                let (to, port) = rest.split_once(' ').unwrap();
                assert_eq!(passes(&calc, from, to, port), expected, "{spec}: {flow}");
            }
        }
    }
}

/// One part of an object that cannot be read does not hide the rest of it from a Deny rule.
#[test]
fn damaged_objects_count_as_far_as_they_can_be_read() {
    let mut calc = calc_of(
        &(calico(
            "db",
            "p",
            "{order: 1, ingress: [{action: Deny, source: {namespaceSelector: all(), selector: bad == 'yes'}}]}",
        ) + &calico(
            "db",
            "q",
            "{order: 2, ingress: [{action: Deny, source: {namespaceSelector: team == 'c'}}, {action: Allow}]}",
        )),
    );
    for (key, value) in [
        (
            Key::namespaced(Kind::NetworkSet, "web", "s"),
            json!({"metadata": {"name": "s", "namespace": "web", "labels": {"bad": "yes", "n": 5}}, "spec": {"nets": ["x", OUTSIDE]}}),
        ),
        (
            Key::global(Kind::Namespace, "lost"),
            json!({"metadata": {"name": "lost", "labels": {"team": "c", "projectcalico.org/odd.name": []}}}),
        ),
    ] {
        assert!(passes(&calc, "outside", "db/main", "tcp/1") || key.kind == Kind::Namespace);
        calc.update(&key, Some(&value));
        calc.flush();
    }
    assert!(!passes(&calc, "outside", "db/main", "tcp/1"));
    assert!(!passes(&calc, "lost/pod", "db/main", "tcp/1"));
    let findings: Vec<String> = calc.findings().into_iter().map(|finding| finding.problem).collect();
    for said in ["spec.nets[0]", "metadata.labels.n", "metadata.labels.projectcalico.org/odd.name"] {
        assert!(findings.iter().any(|finding| finding.contains(said)), "{said}: {findings:?}");
    }
}

/// A policy of a tier whose place cannot be read stands before all that could allow.
#[test]
fn an_unreadable_place_comes_first() {
    let allow = calico("db", "a", "{order: -5, ingress: [{action: Allow}]}");
    let policy =
        json!({"metadata": {"name": "p", "namespace": "db"}, "spec": {"tier": 5, "types": ["Ingress"]}});
    let mut calc = calc_of(&allow);
    calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&policy));
    calc.flush();
    assert!(!passes(&calc, "web/front", "db/main", "tcp/1"));

    let late = calico("db", "late.p", "{tier: late, selector: app == 'db', ingress: [{action: Deny}]}");
    let mut calc = calc_of(&(allow + &late));
    assert!(passes(&calc, "web/front", "db/main", "tcp/1"));
    let tier = json!({"metadata": {"name": "late"}, "spec": {"order": "last", "defaultAction": "Pass"}});
    calc.update(&Key::global(Kind::Tier, "late"), Some(&tier));
    calc.flush();
    assert!(!passes(&calc, "web/front", "db/main", "tcp/1"));
}

/// A peer of a kind that is not known closes its rule: an Accept matches nothing, a Deny and a Pass deny everything (9).
#[test]
fn rules_that_are_not_understood_close() {
    for (action, passes_it) in [("Accept", true), ("Deny", false), ("Pass", false)] {
        let mut calc = calc_of("");
        let rule = json!({"action": action, "from": [{"namespaces": {}}, {"galaxies": {}}]});
        let value = json!({"metadata": {"name": "c"}, "spec": {
            "tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": [rule, {"action": "Accept", "from": [{"namespaces": {}}]}],
        }});
        calc.update(&Key::global(Kind::ClusterNetworkPolicy, "c"), Some(&value));
        calc.flush();
        assert_eq!(passes(&calc, "web/front", "db/main", "tcp/1"), passes_it, "{action}");
        let said = calc.findings().into_iter().any(|finding| finding.problem.contains("galaxies"));
        assert!(said, "{action}: {:?}", calc.findings());
    }
}

/// A policy of any shape, even no policy at all, does not open anything or panic.
#[test]
fn garbage_is_closed() {
    for value in [
        json!(null),
        json!([]),
        json!("x"),
        json!({"spec": []}),
        json!({"spec": {"types": "all"}}),
        json!({"metadata": {}, "spec": {"order": "first"}}),
    ] {
        let mut calc = calc_of("");
        calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&value));
        calc.update(&Key::namespaced(Kind::KubernetesNetworkPolicy, "web", "p"), Some(&value));
        calc.flush();
        assert_eq!(calc.findings().len(), 3, "{value}");
        for flow in ["web/front", "web/back"] {
            assert!(!passes(&calc, flow, "db/main", "tcp/1"), "{value}");
            assert!(!passes(&calc, "db/main", flow, "tcp/1"), "{value}");
        }
    }
}
