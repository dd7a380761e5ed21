//! Verdicts of the oracle for host endpoints and nodes. Numbers in parentheses are decisions of docs/policy.md.

use serde_json::json;
use tortie_api::manifest;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Verdict};

/// Two nodes with one pod each, in an overlay; `outside` is 203.0.113.9.
const CLUSTER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: web}
---
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: pool}
spec: {cidr: 10.0.0.0/16, vxlanMode: Always}
---
apiVersion: v1
kind: Node
metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.1/24, projectcalico.org/IPv4VXLANTunnelAddr: 10.0.1.0}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, annotations: {projectcalico.org/IPv4Address: 192.0.2.2/24, projectcalico.org/IPv4VXLANTunnelAddr: 10.0.2.0}}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: web, labels: {app: a}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {podIP: 10.0.1.1}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: web, labels: {app: b}}
spec: {nodeName: n2, containers: [{name: c}]}
status: {podIP: 10.0.2.1}
---
apiVersion: v1
kind: Pod
metadata: {name: host, namespace: web, labels: {app: b}}
spec: {nodeName: n2, hostNetwork: true, containers: [{name: c}]}
status: {podIP: 192.0.2.2}
";

fn policy(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {{name: '{name}'}}\nspec: {spec}\n"
    )
}

/// A host endpoint of n2 with label `on=n2`.
fn host(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: projectcalico.org/v3\nkind: HostEndpoint\nmetadata: {{name: {name}, labels: {{'on': n2}}}}\nspec: {{node: n2, {spec}}}\n"
    )
}

fn felix(spec: &str) -> String {
    format!(
        "---\napiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {{name: default}}\nspec: {spec}\n"
    )
}

fn peer(name: &str) -> Peer {
    match name.split_once('/') {
        Some(("node", name)) => Peer::Node(name.into()),
        Some((namespace, name)) => Peer::Pod { namespace: namespace.into(), name: name.into() },
        None => Peer::Address(if name == "outside" { "203.0.113.9" } else { name }.parse().unwrap()),
    }
}

fn passes(objects: &str, flow: &str) -> bool {
    let snapshot = snapshot(objects);
    verdict(&snapshot, flow)
}

fn snapshot(objects: &str) -> Snapshot {
    let mut snapshot = Snapshot::new();
    let read = manifest::read("m.yml", &format!("{CLUSTER}{objects}"));
    for object in read.unwrap_or_else(|problems| panic!("{problems:?}")) {
        snapshot.insert(object.key, object.value, None);
    }
    snapshot
}

fn verdict(snapshot: &Snapshot, flow: &str) -> bool {
    let (from, rest) = flow.split_once(" > ").unwrap();
    let (to, port) = rest.split_once(' ').unwrap();
    let (port, via) = match port.split_once(" via ") {
        Some((port, via)) => (port, Some(via.parse::<std::net::SocketAddr>().unwrap())),
        None => (port, None),
    };
    let (protocol, number) = port.split_once('/').unwrap();
    let protocol = Protocol::from_name(protocol).unwrap();
    let icmp = (protocol == Protocol::ICMPV6).then(|| (number.parse().unwrap(), 0));
    let question = Question {
        from: peer(from),
        to: peer(to),
        protocol,
        source_port: 40_000,
        destination_port: if icmp.is_some() { 0 } else { number.parse().unwrap() },
        icmp,
        via: via.map(|via| (via.ip(), via.port())),
        by_node: None,
    };
    Oracle::new(snapshot).evaluate(&question).unwrap().verdict == Verdict::Allow
}

struct Case {
    what: &'static str,
    objects: String,
    allowed: &'static [&'static str],
    denied: &'static [&'static str],
}

fn cases() -> Vec<Case> {
    vec![
        Case {
            what: "a pod that uses its node's network is that node (1); a node reaches its own pods whatever they say, other \
                   nodes are policed by the address that they come from (2)",
            objects: policy(
                "p",
                "{selector: app == 'b', ingress: [{action: Allow, protocol: TCP, source: {nets: [10.0.1.0/32]}}], types: [Ingress]}",
            ),
            allowed: &[
                "node/n2 > web/b udp/1",
                "node/n1 > web/b tcp/1",
                "web/a > web/host tcp/1",
                "web/host > web/b udp/1",
                // By the tunnel, the packet has its address, also if a program is bound to another one.
                "192.0.2.1 > web/b tcp/1",
            ],
            denied: &[
                "node/n1 > web/b udp/1",
                "192.0.2.1 > web/b udp/1",
                "web/a > web/b tcp/1",
                "outside > web/b tcp/1",
            ],
        },
        Case {
            what: "a program on a Windows node that is bound to the node's address sends with that address (2)",
            objects: "---\napiVersion: v1\nkind: Node\nmetadata: {name: n3, labels: {kubernetes.io/os: windows}, annotations: {projectcalico.org/IPv4Address: 192.0.2.3/24, projectcalico.org/IPv4VXLANTunnelAddr: 10.0.3.0}}\n".to_owned()
                + &policy("p", "{selector: app == 'b', ingress: [{action: Allow, source: {nets: [192.0.2.3/32]}}], types: [Ingress]}"),
            allowed: &["192.0.2.3 > web/b tcp/1"],
            denied: &["192.0.2.1 > web/b tcp/1", "node/n3 > web/b tcp/1"],
        },
        Case {
            what: "neighbour discovery is exempt from host endpoints, and nothing else of ICMPv6 is (16)",
            objects: "---\napiVersion: v1\nkind: Node\nmetadata: {name: n6, annotations: {projectcalico.org/IPv6Address: fd00::6/64}}\n".to_owned()
                + "---\napiVersion: projectcalico.org/v3\nkind: HostEndpoint\nmetadata: {name: h6}\nspec: {node: n6, interfaceName: eth0}\n",
            allowed: &["fd00::9 > node/n6 ICMPv6/133", "fd00::9 > node/n6 ICMPv6/135", "node/n6 > fd00::9 ICMPv6/136"],
            denied: &["fd00::9 > node/n6 ICMPv6/128", "fd00::9 > node/n6 ICMPv6/137", "node/n6 > fd00::9 ICMPv6/128"],
        },
        Case {
            what: "without connection tracking, a pod's answers of TCP are dropped, and no port of a node leads to a pod (17)",
            objects: host("h", "interfaceName: eth0, profiles: [projectcalico-default-allow]")
                + &policy(
                    "g",
                    "{selector: on == 'n2', doNotTrack: true, applyOnForward: true, ingress: [{action: Allow}], egress: [{action: Allow}]}",
                ),
            allowed: &["outside > node/n2 tcp/1", "outside > web/b udp/1", "web/b > outside tcp/1"],
            denied: &[
                "outside > web/b tcp/1",
                "outside > web/b tcp/1 via 192.0.2.2:30001",
                "outside > web/b udp/1 via 192.0.2.2:30001",
            ],
        },
        Case {
            what: "the same in IPv6 (2)",
            objects: "---\napiVersion: v1\nkind: Node\nmetadata: {name: n6, annotations: {projectcalico.org/IPv6Address: fd00::6/64}}\n".to_owned()
                + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: d, namespace: web, labels: {app: d}}\nspec: {nodeName: n6, containers: [{name: c}]}\nstatus: {podIP: 10.7.0.1, podIPs: [{ip: 10.7.0.1}, {ip: 'fd00:7::1'}]}\n"
                + &policy("p", "{selector: app == 'd', ingress: [{action: Allow, protocol: UDP, source: {nets: ['fd00::/16']}}]}"),
            allowed: &["node/n6 > web/d tcp/1", "fd00::6 > fd00:7::1 tcp/1", "fd00::5 > web/d udp/1"],
            denied: &["fd00::5 > web/d tcp/1", "2001:db8::1 > web/d udp/1", "node/n1 > web/d udp/1"],
        },
        Case {
            what: "from a pod to its own node: the pod's egress, then Accept (3)",
            objects: policy("p", "{selector: app == 'b', egress: [{action: Allow, protocol: TCP}]}"),
            allowed: &["web/b > node/n2 tcp/1", "web/a > node/n1 udp/1"],
            denied: &["web/b > node/n2 udp/1"],
        },
        Case {
            what: "or what FelixConfiguration says (3)",
            objects: felix("{defaultEndpointToHostAction: Drop}"),
            allowed: &["web/b > node/n1 tcp/1", "web/b > web/a tcp/1"],
            denied: &["web/b > node/n2 tcp/1", "web/b > web/host tcp/1"],
        },
        Case {
            what: "and of one node what is said of it alone (3)",
            objects: felix("{defaultEndpointToHostAction: Drop}").replace("name: default", "name: node.n2"),
            allowed: &["web/a > node/n1 tcp/1", "web/b > node/n1 tcp/1"],
            denied: &["web/b > node/n2 tcp/1"],
        },
        Case {
            what: "a pod reaches itself (4)",
            objects: policy("deny", "{selector: all(), types: [Ingress, Egress]}"),
            allowed: &["web/b > web/b tcp/1", "node/n2 > web/b tcp/1"],
            denied: &["web/a > web/b tcp/1", "web/b > outside tcp/1"],
        },
        Case {
            what: "by a Service, a pod reaches itself as its own policies say (4)",
            objects: policy(
                "own",
                "{selector: app == 'b', types: [Ingress, Egress], \
                 ingress: [{action: Allow, protocol: TCP, source: {selector: app == 'b'}, destination: {ports: [1]}}], \
                 egress: [{action: Allow, protocol: TCP, destination: {ports: [1, 2]}}]}",
            ),
            allowed: &["web/b > web/b tcp/1 via 10.96.0.9:80", "web/b > web/b tcp/3"],
            denied: &["web/b > web/b tcp/2 via 10.96.0.9:80", "web/b > web/b tcp/3 via 10.96.0.9:80"],
        },
        Case {
            what: "a host endpoint without policy and profile is closed but for failsafe ports, and lets forwarded packets pass (16)",
            objects: host("h", "interfaceName: eth0"),
            allowed: &[
                "outside > node/n2 tcp/22",
                "node/n2 > outside udp/53",
                "outside > web/b tcp/1",
                "web/b > outside tcp/1",
                "outside > node/n1 tcp/1",
                "web/a > web/b tcp/1",
            ],
            denied: &[
                "outside > node/n2 tcp/80",
                "node/n2 > outside tcp/80",
                "outside > node/n2 udp/22",
                "web/a > node/n2 tcp/80",
            ],
        },
        Case {
            what: "a packet to another address of a node meets the host endpoint that has it (16)",
            objects: host("other", "interfaceName: eth1, expectedIPs: [198.51.100.2]")
                + &host("own", "interfaceName: eth0, expectedIPs: [192.0.2.2], profiles: [projectcalico-default-allow]"),
            allowed: &["outside > node/n2 tcp/80", "outside > 192.0.2.2 tcp/80", "outside > 198.51.100.3 tcp/80"],
            denied: &["outside > 198.51.100.2 tcp/80", "node/n1 > 198.51.100.2 tcp/80"],
        },
        Case {
            what: "the profile of automatic host endpoints allows everything (16)",
            objects: host("h", "interfaceName: '*', profiles: [projectcalico-default-allow]"),
            allowed: &["outside > node/n2 tcp/80", "node/n2 > outside tcp/80", "node/n1 > node/n2 tcp/1"],
            denied: &[],
        },
        Case {
            what: "failsafe ports as FelixConfiguration says, from where it says (16)",
            objects: host("h", "interfaceName: eth0")
                + &felix(
                    "{failsafeInboundHostPorts: [{protocol: UDP, port: 7, net: 203.0.113.0/24}], failsafeOutboundHostPorts: []}",
                ),
            allowed: &["outside > node/n2 udp/7"],
            denied: &["outside > node/n2 tcp/22", "198.51.100.1 > node/n2 udp/7", "node/n2 > outside udp/53"],
        },
        Case {
            what: "policy of the host itself says nothing of what it forwards; applyOnForward does (16)",
            objects: host("h", "interfaceName: eth0")
                + &policy(
                    "local",
                    "{selector: on == 'n2', ingress: [{action: Allow, protocol: TCP, destination: {ports: [80]}}], types: [Ingress, Egress]}",
                )
                + &policy(
                    "also",
                    "{selector: on == 'n2', order: 1, applyOnForward: true, ingress: [{action: Allow, protocol: TCP, destination: {ports: [81]}}]}",
                ),
            allowed: &[
                "outside > node/n2 tcp/80",
                "outside > node/n2 tcp/81",
                "outside > web/b tcp/81",
                "web/b > outside tcp/5",
            ],
            denied: &["outside > web/b tcp/80", "outside > node/n2 tcp/82", "node/n2 > outside tcp/80"],
        },
        Case {
            what: "a named interface before *; in the overlay packets come by the VXLAN device, which only * covers (16)",
            objects: host("eth", "interfaceName: eth0, expectedIPs: [192.0.2.2]")
                + &host("rest", "interfaceName: '*'").replace("'on': n2", "'on': rest")
                + &policy(
                    "e",
                    "{selector: on == 'n2', applyOnForward: true, ingress: [{action: Allow, protocol: UDP}], egress: [{action: Allow}]}",
                )
                + &policy(
                    "r",
                    "{selector: on == 'rest', applyOnForward: true, ingress: [{action: Allow, protocol: TCP}], egress: [{action: Allow}]}",
                ),
            allowed: &[
                "outside > web/b udp/1",
                "web/a > web/b tcp/1",
                "outside > node/n2 udp/1",
                "node/n1 > node/n2 udp/1",
            ],
            denied: &[
                "outside > web/b tcp/1",
                "web/a > web/b udp/1",
                "outside > node/n2 tcp/1",
                "node/n1 > web/b udp/1",
            ],
        },
        Case {
            what: "preDNAT comes first and settles the incoming interface, but not the pod (16, 17); without a rule it says nothing",
            objects: host("h", "interfaceName: eth0")
                + &policy(
                    "pre",
                    "{selector: on == 'n2', preDNAT: true, applyOnForward: true, ingress: [{action: Allow, protocol: TCP, destination: {ports: [80]}}, {action: Deny, protocol: TCP, destination: {ports: [81]}}]}",
                )
                + &policy(
                    "fwd",
                    "{selector: on == 'n2', applyOnForward: true, ingress: [{action: Allow, protocol: TCP, destination: {ports: [81, 82]}}]}",
                )
                + &policy(
                    "pod",
                    "{selector: app == 'b', ingress: [{action: Deny, source: {nets: [198.51.100.0/24]}}, {action: Allow}]}",
                ),
            allowed: &[
                "outside > node/n2 tcp/80",
                "outside > web/b tcp/80",
                "outside > node/n2 tcp/82",
                "outside > web/b tcp/82",
            ],
            denied: &[
                "outside > node/n2 tcp/81",
                "outside > web/b tcp/81",
                "outside > web/b tcp/83",
                "198.51.100.1 > web/b tcp/80",
            ],
        },
        Case {
            what: "doNotTrack: both directions need a rule; failsafe ports do not (16, 17)",
            objects: host("h", "interfaceName: eth0")
                + &policy(
                    "in",
                    "{selector: on == 'n2', doNotTrack: true, applyOnForward: true, ingress: [{action: Allow, protocol: UDP, destination: {ports: [7, 8, 68]}}]}",
                )
                + &policy(
                    "out",
                    "{selector: on == 'n2', doNotTrack: true, applyOnForward: true, egress: [{action: Allow, protocol: UDP, source: {ports: [7]}}]}",
                ),
            allowed: &["outside > node/n2 udp/7", "outside > node/n2 udp/68"],
            denied: &["outside > node/n2 udp/8", "outside > node/n2 udp/9"],
        },
        Case {
            what: "policies with doNotTrack and preDNAT are nothing to pods; one without namespaceSelector is about host endpoints too (13, 16)",
            objects: host("h", "interfaceName: eth0, expectedIPs: [192.0.2.2, 10.0.2.0]")
                + &policy(
                    "u",
                    "{selector: all(), doNotTrack: true, applyOnForward: true, ingress: [{action: Deny, protocol: TCP, destination: {ports: [9]}}]}",
                )
                + &policy(
                    "g",
                    "{selector: all(), ingress: [{action: Allow, source: {selector: on == 'n2'}}, {action: Allow, protocol: UDP}]}",
                )
                + &policy(
                    "n",
                    "{namespaceSelector: all(), order: 1, ingress: [{action: Allow, protocol: TCP, destination: {ports: [9, 10]}}]}",
                ),
            allowed: &["web/b > web/a tcp/9", "outside > node/n2 udp/1", "192.0.2.2 > web/a tcp/3"],
            denied: &["outside > node/n2 tcp/9", "outside > node/n2 tcp/10", "web/b > web/a tcp/11"],
        },
        Case {
            what: "before DNAT the destination is the Service's, afterwards the backend's (5, 16)",
            objects: host("h", "interfaceName: eth0")
                + &policy(
                    "pre",
                    "{selector: on == 'n2', preDNAT: true, applyOnForward: true, ingress: [{action: Deny, protocol: TCP, destination: {ports: [30080]}}, {action: Deny, protocol: UDP, destination: {ports: [53]}}]}",
                )
                + &policy(
                    "fwd",
                    "{selector: on == 'n2', applyOnForward: true, ingress: [{action: Allow, destination: {nets: [10.0.2.1/32]}}]}",
                ),
            allowed: &[
                "outside > web/b tcp/30080 via 192.0.2.2:80",
                "outside > web/b udp/53 via 192.0.2.2:30053",
                // The sender's node has already translated the address.
                "web/a > web/b tcp/80 via 10.96.0.1:30080",
            ],
            denied: &["outside > web/b tcp/80 via 192.0.2.2:30080", "outside > web/b tcp/30080"],
        },
        Case {
            what: "natOutgoing: outside of all pools the packet has its node's address, at the receiver's interface too (5)",
            objects: host("h", "interfaceName: eth0")
                + "---\napiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: nat}\nspec: {cidr: 10.9.0.0/16, natOutgoing: true}\n"
                + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: c, namespace: web}\nspec: {nodeName: n1, containers: [{name: c}]}\nstatus: {podIP: 10.9.0.1}\n"
                + &policy(
                    "local",
                    "{selector: on == 'n2', ingress: [{action: Allow, protocol: TCP, source: {nets: [192.0.2.1/32]}}, {action: Allow, protocol: UDP, source: {nets: [10.9.0.1/32, 10.0.1.1/32]}}]}",
                )
                + &policy(
                    "pod",
                    "{selector: app == 'b', ingress: [{action: Allow, source: {nets: [10.9.0.1/32]}}], types: [Ingress]}",
                ),
            allowed: &["web/c > node/n2 tcp/1", "web/a > node/n2 udp/1", "web/c > web/b tcp/1"],
            denied: &["web/c > node/n2 udp/1", "web/a > node/n2 tcp/1", "node/n1 > web/b tcp/1"],
        },
        Case {
            what: "with natOutgoingExclusions, a packet to a node keeps its source (5)",
            objects: host("h", "interfaceName: eth0")
                + &felix("{natOutgoingExclusions: IPPoolsAndHostIPs}")
                + "---\napiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: nat}\nspec: {cidr: 10.9.0.0/16, natOutgoing: true}\n"
                + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: c, namespace: web}\nspec: {nodeName: n1, containers: [{name: c}]}\nstatus: {podIP: 10.9.0.1}\n"
                + &policy(
                    "local",
                    "{selector: on == 'n2', ingress: [{action: Allow, protocol: UDP, source: {nets: [10.9.0.1/32]}}]}",
                ),
            allowed: &["web/c > node/n2 udp/1"],
            denied: &["web/c > node/n2 tcp/1"],
        },
        Case {
            what: "beside a choice of namespaces, all() means all that have one, and a host endpoint has none (13)",
            objects: host("h", "interfaceName: eth0, profiles: [projectcalico-default-allow]")
                + &policy(
                    "g",
                    "{selector: all(), namespaceSelector: '!has(team)', ingress: [{action: Deny}]}",
                ),
            allowed: &["outside > node/n2 tcp/1"],
            denied: &["outside > web/b tcp/1"],
        },
        Case {
            what: "policies of Kubernetes and of administrators are about pods only (9, 13)",
            objects: host("h", "interfaceName: eth0, profiles: [projectcalico-default-allow]")
                + "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: c}\nspec: {tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}], egress: [{action: Deny, to: [{networks: [0.0.0.0/0]}]}]}\n",
            allowed: &["outside > node/n2 tcp/1", "node/n2 > outside tcp/1", "node/n1 > node/n2 tcp/1"],
            denied: &["web/a > web/b tcp/1", "web/b > outside tcp/1"],
        },
    ]
}

#[test]
fn host_endpoints_have_their_documented_verdicts() {
    for case in cases() {
        for (flows, expected) in [(case.allowed, true), (case.denied, false)] {
            for flow in flows {
                assert_eq!(passes(&case.objects, flow), expected, "{}: {flow}", case.what);
            }
        }
    }
}

/// A policy that was not understood denies at its hook, or at every hook if its hook is unreadable (18).
#[test]
fn invalid_host_policies_deny_in_their_own_table() {
    let host = host("h", "interfaceName: eth0, profiles: [projectcalico-default-allow]");
    let later = policy(
        "z",
        "{selector: on == 'n2', order: 5, doNotTrack: true, applyOnForward: true, ingress: [{action: Allow}], egress: [{action: Allow}]}",
    );
    for (hook, forwarded, own) in [
        (json!({}), true, false),
        (json!({"applyOnForward": true}), false, false),
        (json!({"doNotTrack": true, "applyOnForward": true}), false, false),
        (json!({"preDNAT": true, "applyOnForward": true}), false, false),
        (json!({"doNotTrack": "perhaps"}), false, false),
    ] {
        let mut spec = json!({"selector": "on == 'n2'", "order": 1, "types": ["Ingress"], "colour": "blue"});
        spec.as_object_mut().unwrap().extend(hook.as_object().unwrap().clone());
        let later = if hook.get("doNotTrack").is_some() { later.as_str() } else { "" };
        let mut snapshot = snapshot(&format!("{host}{later}"));
        let value = json!({"metadata": {"name": "p"}, "spec": spec});
        snapshot.insert(Key::global(Kind::GlobalNetworkPolicy, "p"), value, None);
        assert_eq!(verdict(&snapshot, "outside > web/b tcp/1"), forwarded, "{hook}");
        assert_eq!(verdict(&snapshot, "outside > node/n2 tcp/1"), own, "{hook}");
    }
}
