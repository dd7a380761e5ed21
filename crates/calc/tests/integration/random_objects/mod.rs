//! Random objects of every kind that calc reads. They are deliberately few and small, so that they often refer to
//! each other. Some cannot be read, or only in part.

use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Map, Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};

type Object = (Key, Value);

/// One object; sometimes a damaged one.
pub(crate) fn object() -> impl Strategy<Value = Object> {
    let whole = prop_oneof![
        3 => namespace(),
        1 => account(),
        6 => endpoint(),
        4 => policy(),
        2 => kubernetes_policy(),
        2 => cluster_policy(),
        1 => tier(),
        2 => profile(),
        2 => network_set(),
        2 => host_endpoint(),
        3 => slice(),
        2 => service(),
        2 => node(),
        2 => block(),
        1 => pool(),
        1 => felix(),
        1 => bgp(),
    ];
    (whole, weighted(0.1, 0..6_u8)).prop_map(|((key, value), damage)| {
        let of_the_overlay = matches!(key.kind, Kind::Node | Kind::IpamBlock | Kind::IpPool);
        let damage = damage.filter(|_| !of_the_overlay);
        let value = damage.map_or(value.clone(), |damage| damaged(value, damage));
        (key, value)
    })
}

fn damaged(mut value: Value, damage: u8) -> Value {
    match damage {
        0 => value["metadata"]["labels"] = json!({"a": 5, "b": "x"}),
        1 => value["metadata"]["labels"] = json!("none"),
        2 => value["spec"] = json!(["none"]),
        3 => return json!("nothing"),
        4 => {
            for (field, wrong) in [("selector", json!("a ==")), ("order", json!("first")), ("tier", json!(7))]
            {
                value["spec"][field] = wrong;
            }
        }
        _ => {
            value["spec"] =
                json!({"nets": ["10.0.0.0/30", "ten"], "ipNetworks": ["10.0.0.1/32", 5], "node": "n0"})
        }
    }
    value
}

fn name(prefix: &'static str, count: u8) -> impl Strategy<Value = String> {
    (0..count).prop_map(move |number| format!("{prefix}{number}"))
}

fn labels() -> impl Strategy<Value = Value> {
    prop::collection::btree_map(select(vec!["a", "b"]), select(vec!["x", "y"]), 0..3)
        .prop_map(|labels| json!(labels))
}

/// Some have restrictions on labels, of every type that an index may use; some have none, or impossible ones.
fn selector() -> impl Strategy<Value = &'static str> {
    select(vec![
        "all()",
        "a == 'x'",
        "a != 'x'",
        "has(b)",
        "!has(b)",
        "a in {'x','y'} && b == 'y'",
        "a == 'x' || a == 'y'",
        "a == 'x' || has(b)",
        "a == 'x' || !has(a)",
        "a == 'x' && a == 'y'",
        "a == 'x' && !has(a)",
        "!(a == 'x' && b == 'y')",
        "has(a) && a != 'x'",
        "a not in {'x'}",
        "a contains 'x'",
        "b in {}",
        "pcns.a == 'x'",
        "has(pcns.b)",
        "pcsa.a == 'x'",
        "pcns.projectcalico.org/name == 'ns0'",
        "pcns.kubernetes.io/metadata.name in {'ns0', 'ns1'}",
        "projectcalico.org/namespace == 'ns0'",
        "projectcalico.org/serviceaccount == 's0'",
        "global()",
    ])
}

fn fields(given: Vec<(&'static str, Option<Value>)>) -> Value {
    let given = given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(given.collect::<Map<_, _>>())
}

/// One side of a Calico rule.
fn entity() -> impl Strategy<Value = Value> {
    let part = || weighted(0.3, selector().prop_map(Value::from));
    let accounts = weighted(0.2, Just(json!({"names": ["s0"]})));
    (part(), part(), part(), accounts).prop_map(|(selector, not, namespaces, accounts)| {
        fields(vec![
            ("selector", selector),
            ("notSelector", not),
            ("namespaceSelector", namespaces),
            ("serviceAccounts", accounts),
        ])
    })
}

/// A Calico rule: with named ports, with a protocol or without, or with a Service.
fn rule(egress: bool) -> impl Strategy<Value = Value> {
    let port = weighted(0.3, select(vec!["web", "dns"]));
    let service = weighted(0.2, (select(vec!["s", "t"]), name("ns", 2)));
    let action = select(vec!["Allow", "Deny", "Pass", "Bogus"]);
    (action, entity(), entity(), port, any::<bool>(), service).prop_map(
        move |(action, source, destination, port, protocol, service)| {
            let mut rule = json!({"action": action, "source": source, "destination": destination});
            if let Some(port) = port {
                rule["destination"]["ports"] = json!([port]);
                rule["protocol"] = if protocol { json!("TCP") } else { Value::Null };
            }
            if let Some((name, namespace)) = service {
                let side = if egress { "destination" } else { "source" };
                rule[side] = json!({"services": {"name": name, "namespace": namespace}});
            }
            rule
        },
    )
}

fn rules() -> impl Strategy<Value = (&'static str, Vec<Value>)> {
    any::<bool>().prop_flat_map(|egress| {
        let direction = if egress { "egress" } else { "ingress" };
        prop::collection::vec(rule(egress), 0..3).prop_map(move |rules| (direction, rules))
    })
}

pub(crate) fn namespace() -> impl Strategy<Value = Object> {
    (name("ns", 2), labels()).prop_map(|(name, labels)| {
        (Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name, "labels": labels}}))
    })
}

fn account() -> impl Strategy<Value = Object> {
    (name("ns", 2), name("s", 2), labels()).prop_map(|(ns, name, labels)| {
        let value = json!({"metadata": {"name": name, "namespace": ns, "labels": labels}});
        (Key::namespaced(Kind::ServiceAccount, ns, name), value)
    })
}

/// Sometimes one whose name contains another node.
pub(crate) fn endpoint() -> impl Strategy<Value = Object> {
    let place = (name("ns", 2), name("p", 3), name("n", 2), weighted(0.1, name("n", 2)));
    let others = weighted(0.3, select(vec!["kns.ns0", "prof1", "never-stored"]));
    let addresses = (1..6_u8, weighted(0.3, 1..6_u8));
    (place, name("s", 2), labels(), addresses, others).prop_map(
        |((ns, pod, node, named), account, labels, (address, second), other)| {
            let name = WorkloadEndpoint::name_for(named.as_ref().unwrap_or(&node), &pod, "eth0");
            let nets: Vec<String> =
                [Some(address), second].into_iter().flatten().map(|it| format!("10.0.0.{it}/32")).collect();
            let mut profiles = vec![format!("kns.{ns}"), format!("ksa.{ns}.{account}"), "prof0".to_owned()];
            profiles.extend(other.map(str::to_owned));
            let ports = json!([
                {"name": "web", "protocol": "TCP", "port": 80 + u16::from(address)},
                {"name": "dns", "protocol": "UDP", "port": 53}, {"name": "dns", "protocol": "TCP", "port": 53},
                {"protocol": "TCP", "port": 1},
            ]);
            let value = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
                "metadata": {"name": name, "namespace": ns, "labels": labels},
                "spec": {
                    "node": node, "pod": pod, "endpoint": "eth0", "containerID": format!("c{address}"),
                    "serviceAccountName": account, "interfaceName": format!("cali{pod}"), "ports": ports,
                    "ipNetworks": nets, "profiles": profiles,
                },
            });
            (Key::namespaced(Kind::WorkloadEndpoint, ns, name), value)
        },
    )
}

/// An endpoint whose addresses the kubelet has reported, or only an annotation names.
pub(crate) fn claim() -> impl Strategy<Value = Object> {
    (endpoint(), any::<bool>()).prop_map(|((key, mut value), unreported)| {
        if unreported {
            value["metadata"]["annotations"] = json!({(WorkloadEndpoint::UNREPORTED): "true"});
        }
        (key, value)
    })
}

/// A block that names pods.
pub(crate) fn block_of_pods() -> impl Strategy<Value = Object> {
    let pods = prop::collection::vec((name("ns", 2), name("p", 3)), 2);
    (block(), pods).prop_map(|((key, mut value), pods)| {
        let attributes = value["attributes"].as_array_mut().into_iter().flatten();
        for (attribute, (namespace, pod)) in attributes.zip(pods) {
            attribute["secondary"]["namespace"] = json!(namespace);
            attribute["secondary"]["pod"] = json!(pod);
        }
        (key, value)
    })
}

fn policy() -> impl Strategy<Value = Object> {
    let tier = select(vec!["default", "t0", "t1", "never-stored"]);
    let hook = weighted(0.2, select(vec!["applyOnForward", "preDNAT", "doNotTrack"]));
    let subject = (of(selector()), weighted(0.2, selector()), weighted(0.2, selector()));
    (name("ns", 2), name("p", 2), any::<bool>(), (tier, hook), subject, of(0..3_u8), rules()).prop_map(
        |(ns, name, global, (tier, hook), (selector, namespaces, accounts), order, (direction, rules))| {
            let mut spec = fields(vec![
                ("tier", Some(json!(tier))),
                ("selector", selector.map(Value::from)),
                ("namespaceSelector", namespaces.filter(|_| global).map(Value::from)),
                ("serviceAccountSelector", accounts.map(Value::from)),
                ("order", Some(json!(order))),
                (direction, Some(json!(rules))),
            ]);
            // Only the first is evaluated for packets of pods.
            for field in hook.filter(|_| global).into_iter().flat_map(|hook| [hook, "applyOnForward"]) {
                spec[field] = json!(true);
            }
            let key = match global {
                true => Key::global(Kind::GlobalNetworkPolicy, &name),
                false => Key::namespaced(Kind::NetworkPolicy, ns, &name),
            };
            (key, json!({"metadata": {"name": name}, "spec": spec}))
        },
    )
}

fn kubernetes_policy() -> impl Strategy<Value = Object> {
    (name("ns", 2), labels(), labels(), any::<bool>(), of(select(vec!["web", "dns"]))).prop_map(
        |(ns, pods, peers, other_namespaces, port)| {
            let peer = if other_namespaces { "namespaceSelector" } else { "podSelector" };
            let ports: Vec<Value> = port.into_iter().map(|port| json!({"port": port})).collect();
            let rule = json!({"from": [{peer: {"matchLabels": peers}}], "ports": ports});
            let spec = json!({"podSelector": {"matchLabels": pods}, "ingress": [rule]});
            (
                Key::namespaced(Kind::KubernetesNetworkPolicy, ns, "k"),
                json!({"metadata": {"name": "k"}, "spec": spec}),
            )
        },
    )
}

/// A policy with a peer `nodes`, for all pods.
#[allow(dead_code, reason = "the unit tests do not need it")]
pub(crate) fn policy_of_nodes() -> impl Strategy<Value = Object> {
    let operators = select(vec!["In", "NotIn", "Exists", "DoesNotExist"]);
    (select(vec!["x", "y"]), labels(), operators).prop_map(|(name, labels, operator)| {
        let values = if operator.ends_with("In") { vec!["x"] } else { vec![] };
        let expressions = json!([{"key": "b", "operator": operator, "values": values}]);
        let nodes = json!({"matchLabels": labels, "matchExpressions": expressions});
        let rule = json!({"action": "Deny", "to": [{"nodes": nodes}]});
        let spec = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]});
        (Key::global(Kind::ClusterNetworkPolicy, name), json!({"metadata": {"name": name}, "spec": spec}))
    })
}

/// Some have rules with peers `nodes`.
fn cluster_policy() -> impl Strategy<Value = Object> {
    let kinds = vec![Kind::ClusterNetworkPolicy, Kind::AdminNetworkPolicy, Kind::BaselineAdminNetworkPolicy];
    let action = select(vec!["Accept", "Allow", "Deny", "Pass"]);
    (select(kinds), labels(), labels(), any::<bool>(), 0..3_u8, action, 0..3_u8).prop_map(
        |(kind, subject, peer, admin, priority, action, rules)| {
            let mut spec = json!({"subject": {"namespaces": {"matchLabels": subject}}});
            let peer = json!({"matchLabels": peer});
            match rules {
                0 => {}
                1 => spec["ingress"] = json!([{"action": action, "from": [{"namespaces": peer}]}]),
                _ => spec["egress"] = json!([{"action": action, "to": [{"nodes": peer}]}]),
            }
            if kind != Kind::BaselineAdminNetworkPolicy {
                spec["priority"] = json!(priority);
            }
            if kind == Kind::ClusterNetworkPolicy {
                spec["tier"] = json!(if admin { "Admin" } else { "Baseline" });
            }
            (Key::global(kind, "default"), json!({"metadata": {"name": "default"}, "spec": spec}))
        },
    )
}

fn tier() -> impl Strategy<Value = Object> {
    let name = select(vec!["t0", "t1", "t0", "t1", "default"]);
    (name, of(0..3_u8), any::<bool>()).prop_map(|(name, order, pass)| {
        let action = if pass { "Pass" } else { "Deny" };
        let value = json!({"metadata": {"name": name}, "spec": {"order": order, "defaultAction": action}});
        (Key::global(Kind::Tier, name), value)
    })
}

/// Some replace that of a namespace.
fn profile() -> impl Strategy<Value = Object> {
    let name = select(vec!["prof0", "prof1", "kns.ns0", "ksa.ns0.s0"]);
    (name, labels(), prop::collection::vec(rule(false), 0..2)).prop_map(|(name, labels, rules)| {
        let spec = json!({"labelsToApply": labels, "ingress": rules});
        (Key::global(Kind::Profile, name), json!({"metadata": {"name": name}, "spec": spec}))
    })
}

fn network_set() -> impl Strategy<Value = Object> {
    let nets = subsequence(vec!["10.0.0.0/30", "10.0.0.1/32", "10.0.0.2/32", "fd00::/64"], 0..4);
    (name("ns", 2), name("set", 2), labels(), any::<bool>(), nets).prop_map(
        |(ns, name, labels, global, nets)| {
            let value = json!({"metadata": {"name": name, "labels": labels}, "spec": {"nets": nets}});
            let key = match global {
                true => Key::global(Kind::GlobalNetworkSet, name),
                false => Key::namespaced(Kind::NetworkSet, ns, name),
            };
            (key, value)
        },
    )
}

fn host_endpoint() -> impl Strategy<Value = Object> {
    let profiles = subsequence(vec!["projectcalico-default-allow", "prof0", "kns.ns0"], 0..3);
    let addresses = subsequence(vec!["192.0.2.1", "192.0.2.2", "10.0.0.1"], 0..3);
    let port = of(select(vec!["http", "dns"]));
    (name("n", 2), name("host", 2), labels(), profiles, addresses, port).prop_map(
        |(node, name, labels, profiles, addresses, port)| {
            let ports: Vec<Value> =
                port.iter().map(|port| json!({"name": port, "protocol": "TCP", "port": 80})).collect();
            let spec = json!({
                "node": node, "interfaceName": "eth0", "expectedIPs": addresses, "profiles": profiles, "ports": ports,
            });
            let value = json!({"metadata": {"name": name, "labels": labels}, "spec": spec});
            (Key::global(Kind::HostEndpoint, name), value)
        },
    )
}

fn slice() -> impl Strategy<Value = Object> {
    let ports = subsequence(
        vec![
            json!({"protocol": "TCP", "port": 80}),
            json!({"protocol": "UDP", "port": 53}),
            json!({"name": "web", "port": 8080}),
            json!({"name": "web", "port": null}),
        ],
        0..4,
    );
    let condition = || of(any::<bool>());
    let conditions = (condition(), condition(), condition()).prop_map(|(ready, serving, terminating)| {
        json!({"ready": ready, "serving": serving, "terminating": terminating})
    });
    let addresses = subsequence(vec!["10.0.0.1", "10.0.0.2", "fd00::1"], 0..3);
    let endpoint = (addresses, of(conditions));
    let endpoints = prop::collection::vec(endpoint, 0..3).prop_map(|endpoints| {
        let endpoint = |(addresses, conditions)| json!({"addresses": addresses, "conditions": conditions});
        endpoints.into_iter().map(endpoint).collect::<Vec<Value>>()
    });
    (name("ns", 2), name("slice", 3), select(vec!["s", "t"]), endpoints, ports).prop_map(
        |(ns, name, service, endpoints, ports)| {
            let value = json!({
                "metadata": {"name": name, "namespace": ns, "labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4", "endpoints": endpoints, "ports": ports,
            });
            (Key::namespaced(Kind::EndpointSlice, ns, name), value)
        },
    )
}

fn service() -> impl Strategy<Value = Object> {
    let addresses = subsequence(vec!["10.96.0.1", "fd00::96", "None", "10.96.0.2"], 0..3);
    let outer = subsequence(vec!["192.0.2.7", "fd00::7", "nowhere"], 0..3);
    let ingress = subsequence(
        vec![
            json!({"ip": "192.0.2.8"}),
            json!({"hostname": "lb.example"}),
            json!({"ip": "192.0.2.9", "ipMode": "Proxy"}),
            json!({"ip": "192.0.2.10", "ipMode": "VIP"}),
        ],
        0..4,
    );
    let ports = subsequence(
        vec![
            json!({"port": 80}),
            json!({"port": 53, "protocol": "UDP"}),
            json!({"name": "web", "port": 443, "targetPort": "http"}),
            json!({"name": "odd", "port": 1, "protocol": "ODD"}),
        ],
        0..4,
    );
    let own =
        (addresses, of(select(vec!["10.96.0.3", "None", ""])), of(select(vec!["ClusterIP", "ExternalName"])));
    (name("ns", 2), select(vec!["s", "t"]), own, outer, ingress, ports).prop_map(
        |(ns, name, (addresses, address, kind), outer, ingress, ports)| {
            let spec = fields(vec![
                ("clusterIPs", (!addresses.is_empty()).then(|| json!(addresses))),
                ("clusterIP", address.map(Value::from)),
                ("type", kind.map(Value::from)),
                ("externalIPs", Some(json!(outer))),
                ("ports", Some(json!(ports))),
            ]);
            let value = json!({
                "metadata": {"name": name, "namespace": ns},
                "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
            });
            (Key::namespaced(Kind::Service, ns, name), value)
        },
    )
}

/// A node of one of two networks, in each family that it has.
pub(crate) fn node() -> impl Strategy<Value = Object> {
    let networks = select(vec!["192.0.2.{}/24", "192.0.2.{}", "198.51.100.{}/24"]);
    let networks_v6 = of(select(vec!["2001:db8::{}/64", "2001:db8:1::{}/64"]));
    let tunnels = (of(1..9_u8), of(1..9_u8), of(1..9_u8));
    let rest = (any::<[bool; 2]>(), weighted(0.2, any::<()>()));
    // Nodes may share an address for a moment, and change labels and addresses.
    let listed = subsequence(vec!["192.0.2.48", "192.0.2.49", "203.0.113.1", "2001:db8::7", "odd"], 0..4);
    let selected = (labels(), listed, select(vec!["InternalIP", "ExternalIP", "Hostname"]));
    (name("n", 3), weighted(0.9, networks), networks_v6, tunnels, rest, selected).prop_map(
        |(
            name,
            network,
            network_v6,
            (tunnel, tunnel_v6, ipip),
            (macs, windows),
            (mut labels, listed, kind),
        )| {
            let number = name.bytes().last().unwrap();
            let own = |network: &str| network.replace("{}", &number.to_string());
            let annotations = fields(vec![
                ("projectcalico.org/IPv4Address", network.map(|network| json!(own(network)))),
                ("projectcalico.org/IPv6Address", network_v6.map(|network| json!(own(network)))),
                (
                    "projectcalico.org/IPv4VXLANTunnelAddr",
                    tunnel.map(|tunnel| json!(format!("10.0.{tunnel}.1"))),
                ),
                ("projectcalico.org/IPv4IPIPTunnelAddr", ipip.map(|ipip| json!(format!("10.0.{ipip}.2")))),
                (
                    "projectcalico.org/IPv6VXLANTunnelAddr",
                    tunnel_v6.map(|tunnel| json!(format!("fd00:0:0:{tunnel}::1"))),
                ),
                ("projectcalico.org/VXLANTunnelMACAddr", macs[0].then(|| json!("00-15-5D-00-00-01"))),
                ("projectcalico.org/VXLANTunnelMACAddrV6", macs[1].then(|| json!("00-15-5D-00-00-02"))),
            ]);
            let os = if windows.is_some() { "windows" } else { "linux" };
            labels["kubernetes.io/os"] = json!(os);
            let metadata = json!({"name": name, "annotations": annotations, "labels": labels});
            let listed = listed.iter().map(|address| json!({"type": kind, "address": address}));
            let status = json!({"addresses": listed.collect::<Vec<_>>()});
            (Key::global(Kind::Node, &name), json!({"metadata": metadata, "status": status}))
        },
    )
}

pub(crate) fn block() -> impl Strategy<Value = Object> {
    let address = || of((0..2_usize, name("n", 3)));
    (0..4_u8, any::<bool>(), of(name("n", 3)), address(), address()).prop_map(
        |(number, is_ipv6, node, one, other)| {
            let cidr = match is_ipv6 {
                false => format!("10.0.{number}.0/30"),
                true if number == 0 => "fd00::/126".to_owned(),
                true => format!("fd00:0:0:{number}::/126"),
            };
            let (mut allocations, mut attributes) = (vec![json!(null); 4], Vec::new());
            for (offset, (shift, pod_node)) in
                [one, other].into_iter().enumerate().filter_map(|(n, it)| Some((n, it?)))
            {
                allocations[2 * offset + shift] = json!(attributes.len());
                attributes.push(json!({"handle_id": format!("h{offset}"), "secondary": {"node": pod_node}}));
            }
            let unallocated: Vec<usize> = (0..4).filter(|offset| allocations[*offset].is_null()).collect();
            let value = json!({
                "cidr": cidr, "affinity": node.map(|node| format!("host:{node}")),
                "allocations": allocations, "unallocated": unallocated, "attributes": attributes,
            });
            (Key::global(Kind::IpamBlock, cidr), value)
        },
    )
}

pub(crate) fn pool() -> impl Strategy<Value = Object> {
    let modes = select(vec!["Always", "Always", "CrossSubnet", "CrossSubnet", "Never"]);
    let ipip = weighted(0.3, any::<()>());
    (any::<bool>(), any::<bool>(), modes, ipip).prop_map(|(nat, is_ipv6, mode, ipip)| {
        let (name, cidr) = if is_ipv6 { ("pool6", "fd00::/32") } else { ("pool", "10.0.0.0/16") };
        let (vxlan, ipip) = if ipip.is_some() && !is_ipv6 { ("Never", mode) } else { (mode, "Never") };
        let spec = json!({"cidr": cidr, "vxlanMode": vxlan, "ipipMode": ipip, "natOutgoing": nat});
        (Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}))
    })
}

/// Settings of BGP for all nodes, for one, or for nobody.
pub(crate) fn bgp() -> impl Strategy<Value = Object> {
    let name = select(vec!["default", "node.n0", "node.n1", "other"]);
    let port = weighted(0.7, select(vec![0_u16, 179, 1790, 1791]));
    (name, port).prop_map(|(name, port)| {
        let spec = fields(vec![("listenPort", port.map(Value::from))]);
        (Key::global(Kind::BgpConfiguration, name), json!({"metadata": {"name": name}, "spec": spec}))
    })
}

/// Settings for all nodes, for this one, or for another.
pub(crate) fn felix() -> impl Strategy<Value = Object> {
    let name = select(vec!["default", "node.n0", "node.n1"]);
    let action = || weighted(0.4, select(vec!["Accept", "Drop", "Return", "Bogus"]).prop_map(Value::from));
    let deny = || weighted(0.4, select(vec!["Drop", "Reject"]).prop_map(Value::from));
    let port = json!([{"protocol": "TCP", "port": 22, "net": "10.0.0.0/8"}]);
    let ports = || weighted(0.4, select(vec![json!([]), port.clone()]));
    let flows = weighted(0.3, select(vec!["Keep", "Cut", "Bogus"]));
    let counters = weighted(0.3, select(vec!["Enabled", "Disabled", "Bogus"]));
    let overlay =
        (weighted(0.2, 4096..4098_u32), weighted(0.2, 4789..4791_u32), weighted(0.2, proptest::bool::ANY));
    let exclusions = weighted(0.3, select(vec!["IPPoolsOnly", "IPPoolsAndHostIPs"]));
    (name, action(), (deny(), deny()), (ports(), ports()), flows, counters, (overlay, exclusions)).prop_map(
        |(name, action, (deny, old_deny), (inbound, outbound), flows, counters, (overlay, exclusions))| {
            let (vni, port, ipip) = overlay;
            let spec = fields(vec![
                ("defaultEndpointToHostAction", action),
                ("nftablesFilterDenyAction", deny),
                ("iptablesFilterDenyAction", old_deny),
                ("failsafeInboundHostPorts", inbound),
                ("failsafeOutboundHostPorts", outbound),
                ("vxlanVNI", vni.map(Value::from)),
                ("vxlanPort", port.map(Value::from)),
                ("ipipEnabled", ipip.map(Value::from)),
                ("natOutgoingExclusions", exclusions.map(Value::from)),
            ]);
            let mut value = json!({"metadata": {"name": name}, "spec": spec});
            if let Some(flows) = flows {
                value["metadata"]["annotations"]["tortie.io/establishedFlows"] = json!(flows);
            }
            if let Some(counters) = counters {
                value["metadata"]["annotations"]["tortie.io/policyCounters"] = json!(counters);
            }
            (Key::global(Kind::FelixConfiguration, name), value)
        },
    )
}
