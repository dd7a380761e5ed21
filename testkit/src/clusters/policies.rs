//! Policies of every API: most are valid, some cannot be understood.

use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use super::{ACCOUNTS, NAMESPACES, NETS_V4, NETS_V6, PORT_NAMES, PORTS, TIERS};

pub(super) fn selector() -> impl Strategy<Value = String> {
    let label = || {
        select(vec!["a", "b", "pcns.a", "projectcalico.org/namespace", "projectcalico.org/serviceaccount"])
    };
    let value = || select(vec!["x", "y", "x", "red", "runner"]);
    let comparison = || select(vec!["==", "!=", "contains", "starts with", "ends with"]);
    let leaf = prop_oneof![
        4 => (label(), comparison(), value()).prop_map(|(label, comparison, value)| format!("{label} {comparison} '{value}'")),
        2 => (label(), select(vec!["in", "not in"]), value(), value())
            .prop_map(|(label, operator, one, other)| format!("{label} {operator} {{'{one}', '{other}'}}")),
        1 => label().prop_map(|label| format!("has({label})")),
        1 => Just("all()".to_owned()),
    ];
    let nested = leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|inner| format!("!({inner})")),
            (inner.clone(), select(vec!["&&", "||"]), inner)
                .prop_map(|(a, operator, b)| format!("({a} {operator} {b})")),
        ]
    });
    // Blanks alone mean `all()`, which differs from an absent selector.
    prop_oneof![19 => nested, 1 => Just(" ".to_owned())].boxed()
}

pub(super) fn maybe(fields: Vec<(&'static str, Option<Value>)>) -> Value {
    let given = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(given.collect())
}

fn ports(numbers: bool) -> impl Strategy<Value = Vec<Value>> {
    let named = select(&PORT_NAMES[..]).prop_map(|name| json!(name)).boxed();
    let range = (select(&PORTS[..]), select(&PORTS[..]))
        .prop_map(|(a, b)| json!(format!("{}:{}", a.min(b), a.max(b))));
    let one = match numbers {
        true => prop_oneof![named, select(&PORTS[..]).prop_map(|port| json!(port)), range].boxed(),
        false => named,
    };
    prop::collection::vec(one, 1..3)
}

/// Networks, including those that contain all addresses, where they are allowed.
fn nets(v4: bool, whole: bool) -> impl Strategy<Value = Value> {
    let nets: &'static [&'static str] = if v4 { &NETS_V4 } else { &NETS_V6 };
    let nets: Vec<&str> = nets.iter().copied().filter(|net| whole || !net.ends_with("/0")).collect();
    subsequence(nets, 1..3).prop_map(|nets| json!(nets))
}

/// One side of a rule. `whole` is true for policies of the whole cluster.
fn entity(v4: bool, ported: bool, whole: bool, backends: bool) -> impl Strategy<Value = Value> {
    let namespaces = prop_oneof![4 => selector(), 1 => Just("global()".to_owned())];
    let accounts = (subsequence(&ACCOUNTS[..2], 0..2), of(selector())).prop_map(|(names, selector)| {
        maybe(vec![("names", Some(json!(names))), ("selector", selector.map(Value::from))])
    });
    let rare = |strategy: BoxedStrategy<Value>| prop_oneof![6 => Just(None), 1 => strategy.prop_map(Some)];
    let text = |strategy: BoxedStrategy<String>| strategy.prop_map(Value::from).boxed();
    let fields = (
        rare(nets(v4, true).boxed()),
        rare(nets(v4, false).boxed()),
        rare(text(selector().boxed())),
        rare(text(selector().boxed())),
        rare(text(namespaces.boxed())),
        rare(accounts.boxed()),
        rare(ports(ported).prop_map(Value::from).boxed()),
        rare(ports(ported).prop_map(Value::from).boxed()),
    )
        .prop_map(|(nets, not_nets, selector, not_selector, namespaces, accounts, ports, not_ports)| {
            maybe(vec![
                ("nets", nets),
                ("notNets", not_nets),
                ("selector", selector),
                ("notSelector", not_selector),
                ("namespaceSelector", namespaces),
                ("serviceAccounts", accounts),
                ("ports", ports),
                ("notPorts", not_ports),
            ])
        });
    let service = (select(vec!["s", "s", "t"]), of(select(&NAMESPACES[..2]))).prop_map(move |(name, namespace)| {
        let namespace = namespace.or(whole.then_some("red"));
        json!({"services": maybe(vec![("name", Some(json!(name))), ("namespace", namespace.map(Value::from))])})
    });
    if backends { prop_oneof![2 => fields, 1 => service].boxed() } else { fields.boxed() }
}

/// A rule; sometimes one that cannot be understood.
fn rule(direction: &'static str, whole: bool) -> impl Strategy<Value = Value> {
    let action = prop_oneof![
        8 => select(vec!["Allow", "Allow", "Deny", "Pass", "Log"]),
        1 => Just("Allow")
    ];
    let protocol = select(vec!["TCP", "TCP", "UDP", "SCTP", "ICMP", "ICMP", "ICMPv6", "47", "", "", "", ""]);
    let icmp = (select(vec![0u8, 3, 8, 128]), of(0..2u8)).prop_map(|(icmp_type, code)| {
        maybe(vec![("type", Some(json!(icmp_type))), ("code", code.map(Value::from))])
    });
    (prop::bool::weighted(0.7), protocol).prop_flat_map(move |(v4, protocol)| {
        let ported = ["TCP", "UDP", "SCTP"].contains(&protocol);
        let v4 = v4 && protocol != "ICMPv6" || protocol == "ICMP";
        let is_icmp = protocol.starts_with("ICMP");
        (
            (
                action.clone(),
                prop::option::weighted(0.1, Just(if v4 { 4 } else { 6 })),
                prop::option::weighted(0.15, select(vec!["TCP", "17", "ICMP"])),
            ),
            (of(icmp.clone()), of(icmp.clone())),
            entity(v4, ported, whole, direction == "ingress"),
            entity(v4, ported, whole, direction == "egress"),
            prop::bool::weighted(0.01),
        )
            .prop_map(move |((action, version, not), (icmp, not_icmp), source, destination, odd)| {
                maybe(vec![
                    ("action", Some(json!(action))),
                    ("ipVersion", version.map(Value::from)),
                    ("protocol", (!protocol.is_empty()).then(|| json!(protocol))),
                    ("notProtocol", not.map(Value::from)),
                    ("icmp", icmp.filter(|_| is_icmp)),
                    ("notICMP", not_icmp.filter(|_| is_icmp)),
                    ("source", Some(source)),
                    ("destination", Some(destination)),
                    (
                        "http",
                        (action == "Allow" && odd && direction == "ingress")
                            .then(|| json!({"methods": ["GET"]})),
                    ),
                    ("colour", (action == "Deny" && odd).then(|| json!("blue"))),
                ])
            })
    })
}

pub(super) fn rules(direction: &'static str, whole: bool, most: usize) -> impl Strategy<Value = Vec<Value>> {
    prop_oneof![1 => Just(0..=0), 5 => Just(1..=most)]
        .prop_flat_map(move |count| prop::collection::vec(rule(direction, whole), count))
}

pub(super) fn policy() -> impl Strategy<Value = (Key, Value)> {
    prop_oneof![6 => calico_policy(), 2 => kubernetes_policy(), 2 => cluster_policy()]
}

/// ClusterNetworkPolicy and its predecessors; sometimes with an unknown peer or field.
fn cluster_policy() -> impl Strategy<Value = (Key, Value)> {
    let pods = || {
        (kubernetes_selector(), kubernetes_selector(), any::<bool>()).prop_map(|(namespaces, pods, whole)| {
            match whole {
                true => json!({"namespaces": namespaces}),
                false => json!({"pods": {"namespaceSelector": namespaces, "podSelector": pods}}),
            }
        })
    };
    let kinds = vec![
        Kind::ClusterNetworkPolicy,
        Kind::ClusterNetworkPolicy,
        Kind::AdminNetworkPolicy,
        Kind::BaselineAdminNetworkPolicy,
    ];
    // A subject that cannot be evaluated, either.
    let subject = prop_oneof![30 => pods(), 1 => Just(json!({"bogus": {}}))];
    (select(kinds), subject, 0..4u16, select(vec!["Admin", "Baseline"]), prop::bool::weighted(0.05))
        .prop_flat_map(move |(kind, subject, priority, tier, odd)| {
            let newest = kind == Kind::ClusterNetworkPolicy;
            let protocol = (
                select(vec!["tcp", "tcp", "udp", "sctp"]),
                0..4usize,
                select(&PORTS[..4]),
                select(&PORT_NAMES[..]),
            )
                .prop_map(move |(protocol, shape, number, name)| {
                    let range = json!({"start": number, "end": number + 20});
                    match (newest, shape) {
                        (true, 0) => json!({"destinationNamedPort": name}),
                        (false, 0) => json!({"namedPort": name}),
                        (true, _) => {
                            let port = match shape {
                                1 => json!({}),
                                2 => json!({"destinationPort": {"number": number}}),
                                _ => json!({"destinationPort": {"range": range}}),
                            };
                            json!({protocol: port})
                        }
                        (false, 1) => {
                            json!({"portNumber": {"protocol": protocol.to_uppercase(), "port": number}})
                        }
                        (false, _) => json!({"portRange": range}),
                    }
                });
            let rules = |direction: &'static str| {
                let side = if direction == "ingress" { "from" } else { "to" };
                let networks = prop::sample::select(vec!["10.0.0.0/29", "0.0.0.0/0", "fd00::/64", ""])
                    .prop_map(move |net| {
                        if side == "to" {
                            json!({"networks": if net.is_empty() { vec![] } else { vec![net] }})
                        } else {
                            json!({"namespaces": {}})
                        }
                    });
                let nodes = kubernetes_selector().prop_map(|nodes| json!({"nodes": nodes}));
                // In a rule for packets into pods, such a peer is unknown.
                let share = if side == "to" { 4 } else { 1 };
                let unknown = Just(json!({"domainNames": ["example.org"]}));
                let peer = prop_oneof![12 => pods(), 3 => networks, share => nodes, 1 => unknown];
                let action =
                    select(if newest { vec!["Accept", "Deny", "Pass"] } else { vec!["Allow", "Deny"] });
                let rule = (
                    action,
                    prop::collection::vec(peer, 1..3),
                    prop::collection::vec(protocol.clone(), 0..3),
                );
                let rule = rule.prop_map(move |(action, peers, mut ports): (_, Vec<Value>, Vec<Value>)| {
                    if peers.iter().any(|peer| peer.get("networks").or(peer.get("nodes")).is_some()) {
                        ports.retain(|port| {
                            port.get("destinationNamedPort").or(port.get("namedPort")).is_none()
                        });
                    }
                    let ports_name = if newest { "protocols" } else { "ports" };
                    maybe(vec![
                        ("action", Some(json!(action))),
                        (side, Some(json!(peers))),
                        (ports_name, Some(json!(ports))),
                    ])
                });
                prop::collection::vec(rule, 0..4)
            };
            (rules("ingress"), rules("egress")).prop_map(move |(ingress, egress)| {
                let spec = maybe(vec![
                    ("tier", newest.then(|| json!(tier))),
                    ("priority", (kind != Kind::BaselineAdminNetworkPolicy).then(|| json!(priority))),
                    ("subject", Some(subject.clone())),
                    ("ingress", Some(json!(ingress))),
                    ("egress", Some(json!(egress))),
                    ("colour", odd.then(|| json!("blue"))),
                ]);
                (Key::global(kind, ""), json!({"metadata": {}, "spec": spec}))
            })
        })
}

fn calico_policy() -> impl Strategy<Value = (Key, Value)> {
    of(select(&NAMESPACES[..])).prop_flat_map(|namespace| {
        let whole = namespace.is_none();
        let staged = prop::bool::weighted(0.05);
        let order =
            of(prop_oneof![8 => select(vec![json!(1), json!(2.5), json!(1000)]), 1 => Just(json!("soon"))]);
        let tier = prop_oneof![2 => Just(None), 3 => select(&TIERS[..]).prop_map(Some)];
        (
            (tier, order, staged),
            (
                of(selector()),
                prop::option::weighted(0.2, selector()),
                prop::option::weighted(0.2, selector()),
            ),
            of(subsequence(vec!["Ingress", "Egress"], 1..=2)),
            rules("ingress", whole, 3),
            rules("egress", whole, 3),
            select(vec!["", "", "", "", "", "", "applyOnForward", "doNotTrack", "preDNAT"]),
        )
            .prop_map(move |((tier, order, staged), selectors, types, ingress, egress, hook)| {
                let (selector, namespaces, accounts) = selectors;
                let hook = if whole { hook } else { "" };
                // preDNAT policies have no egress.
                let (types, egress) = if hook == "preDNAT" { (None, vec![]) } else { (types, egress) };
                let spec = maybe(vec![
                    ("tier", tier.map(Value::from)),
                    ("order", order),
                    ("selector", selector.map(Value::from)),
                    ("namespaceSelector", namespaces.filter(|_| whole).map(Value::from)),
                    ("serviceAccountSelector", accounts.map(Value::from)),
                    ("types", types.map(Value::from)),
                    ("ingress", Some(json!(ingress))),
                    ("egress", Some(json!(egress))),
                    ("applyOnForward", (!hook.is_empty()).then_some(json!(true))),
                    ("doNotTrack", (hook == "doNotTrack").then_some(json!(true))),
                    ("preDNAT", (hook == "preDNAT").then_some(json!(true))),
                ]);
                let kind = match (whole, staged) {
                    (true, false) => Kind::GlobalNetworkPolicy,
                    (true, true) => Kind::StagedGlobalNetworkPolicy,
                    (false, false) => Kind::NetworkPolicy,
                    (false, true) => Kind::StagedNetworkPolicy,
                };
                let key =
                    Key { kind, namespace: namespace.unwrap_or_default().to_owned(), name: String::new() };
                (
                    key,
                    json!({"metadata": maybe(vec![("namespace", namespace.map(Value::from))]), "spec": spec}),
                )
            })
    })
}

fn kubernetes_selector() -> impl Strategy<Value = Value> {
    // No label has the last value. The API server rejects it, but a stored policy with it can be understood.
    let value = prop_oneof![30 => select(vec!["x", "y", "red"]), 1 => Just("-bad-")];
    let requirement = (select(vec!["a", "b", "kubernetes.io/metadata.name"]), 0..4usize, value).prop_map(
        |(key, operator, value)| match operator {
            0 => json!({"key": key, "operator": "In", "values": [value, "y"]}),
            1 => json!({"key": key, "operator": "NotIn", "values": [value]}),
            2 => json!({"key": key, "operator": "Exists"}),
            _ => json!({"key": key, "operator": "DoesNotExist"}),
        },
    );
    let expressions = prop::collection::vec(requirement, 0..2);
    let selector = (of(select(vec!["x", "y"])), expressions).prop_map(|(a, expressions)| {
        maybe(vec![
            ("matchLabels", a.map(|a| json!({"a": a}))),
            ("matchExpressions", Some(json!(expressions))),
        ])
    });
    // Boxed: as nested values, generators of whole clusters would be too large for a test's stack.
    selector.boxed()
}

fn kubernetes_policy() -> impl Strategy<Value = (Key, Value)> {
    let block = (any::<bool>(), any::<bool>()).prop_map(|(v4, except)| {
        let (cidr, inner) = if v4 { ("10.0.0.0/29", "10.0.0.4/31") } else { ("fd00::/64", "fd00::1/128") };
        json!({"ipBlock": {"cidr": cidr, "except": if except { vec![inner] } else { vec![] }}})
    });
    let pods = (of(kubernetes_selector()), kubernetes_selector(), any::<bool>()).prop_map(
        |(namespaces, pods, with_pods)| {
            let with_pods = with_pods || namespaces.is_none();
            maybe(vec![("namespaceSelector", namespaces), ("podSelector", with_pods.then_some(pods))])
        },
    );
    let peer = prop_oneof![1 => block, 3 => pods];
    let port =
        (of(select(vec!["TCP", "UDP", "SCTP"])), 0..4usize, select(&PORTS[..4]), select(&PORT_NAMES[..]))
            .prop_map(|(protocol, shape, number, name)| {
                let (port, end) = match shape {
                    0 => (None, None),
                    1 => (Some(json!(name)), None),
                    2 => (Some(json!(number)), None),
                    _ => (Some(json!(number)), Some(json!(number + 20))),
                };
                maybe(vec![("protocol", protocol.map(Value::from)), ("port", port), ("endPort", end)])
            });
    let rules = |side: &'static str| {
        let rule = (prop::collection::vec(peer.clone(), 0..3), prop::collection::vec(port.clone(), 0..3));
        prop::collection::vec(
            rule.prop_map(move |(peers, ports)| {
                maybe(vec![(side, Some(json!(peers))), ("ports", Some(json!(ports)))])
            }),
            0..3,
        )
    };
    let types = of(subsequence(vec!["Ingress", "Egress"], 1..=2));
    let odd = select(vec!["", "", "", "", "", "", "", "", "", "", "colour", "types", "podSelector"]);
    (select(&NAMESPACES[..]), kubernetes_selector(), rules("from"), rules("to"), types, odd).prop_map(
        |(namespace, selector, ingress, egress, types, odd)| {
            let spec = maybe(vec![
                ("colour", (odd == "colour").then_some(json!("blue"))),
                ("types", (odd == "types").then_some(json!(["Egress"]))),
                ("podSelector", Some(if odd == "podSelector" { json!([]) } else { selector })),
                ("ingress", Some(json!(ingress))),
                ("egress", Some(json!(egress))),
                ("policyTypes", types.map(Value::from)),
            ]);
            let key = Key::namespaced(Kind::KubernetesNetworkPolicy, namespace, "");
            (key, json!({"metadata": {"namespace": namespace}, "spec": spec}))
        },
    )
}
