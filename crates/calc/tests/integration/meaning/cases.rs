//! Policies and their verdicts. Numbers in brackets are decisions of docs/policy.md.

use crate::meaning::support::{calico, cluster, kubernetes, tier};

pub(crate) struct Case {
    pub what: &'static str,
    pub policies: String,
    /// `from > to port` of flows that pass, and of flows that do not.
    pub allowed: &'static [&'static str],
    pub denied: &'static [&'static str],
}

pub(crate) fn cases() -> Vec<Case> {
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
                + "---\napiVersion: projectcalico.org/v3\nkind: NetworkSet\nmetadata: {name: 'n', namespace: web, labels: {zone: office}}\nspec: {nets: [10.0.0.1/32]}\n"
                + &calico("db", "p", "{selector: tier == 'main', ingress: [{action: Allow, protocol: TCP, source: {namespaceSelector: global(), selector: zone == 'partner'}}, {action: Allow, protocol: UDP, source: {namespaceSelector: team == 'a', selector: zone == 'office'}}]}")
                + &calico("", "q", "{selector: app == 'db' && !has(tier), ingress: [{action: Allow, source: {selector: has(zone)}}]}"),
            allowed: &["outside > db/main tcp/1", "web/front > db/main udp/1", "outside > db/copy tcp/1", "web/front > db/copy tcp/1"],
            denied: &["outside > db/main udp/1", "web/front > db/main tcp/1", "web/back > db/copy tcp/1"],
        },
        Case {
            what: "labels that only the cluster gives cannot be claimed by a network set or a profile (13)",
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
