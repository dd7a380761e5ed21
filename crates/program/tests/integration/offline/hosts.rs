//! Host endpoints and both families in `tortie matrix`, `preview` and `policy lint`, on manifests.

use crate::offline::support::{CLUSTER, tortie};
use serde_json::Value;

/// A host endpoint for each node, which admits DNS.
const HOSTS: &str = "\
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: n1-eth0, labels: {role: worker}}
spec: {node: n1, interfaceName: eth0, expectedIPs: [192.168.0.1]}
---
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: n2-eth0, labels: {role: worker}}
spec: {node: n2, interfaceName: eth0, expectedIPs: [192.168.0.2]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: workers}
spec:
  selector: role == 'worker'
  order: 1
  ingress:
  - {action: Allow, protocol: UDP, destination: {ports: [53]}}
  egress:
  - {action: Allow}
---
apiVersion: projectcalico.org/v3
kind: FelixConfiguration
metadata: {name: default}
spec: {failsafeInboundHostPorts: [{protocol: TCP, port: 22}], failsafeOutboundHostPorts: []}
";

fn global(spec: &str) -> String {
    format!(
        "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {{name: p}}\nspec:\n{spec}"
    )
}

fn with_hosts(arguments: &[&str], change: &str) -> (i32, String) {
    let files = [("c.yml", CLUSTER), ("hosts.yml", HOSTS), ("change.yml", change)];
    let (code, out, err) = tortie(&files, arguments);
    assert_eq!(err, "");
    (code, out)
}

fn preview(change: &str) -> String {
    let (code, out) =
        with_hosts(&["preview", "--in", "c.yml", "--in", "hosts.yml", "-f", "change.yml"], change);
    assert_eq!(code, 1, "{out}");
    out
}

/// Nodes are ends of flows: for everybody else, and for pods on the same node or on another one.
#[test]
fn nodes_in_the_matrix() {
    let (_, out) =
        with_hosts(&["matrix", "-f", "c.yml", "-f", "hosts.yml", "--port", "tcp/80", "--port", "udp/53"], "");
    for row in [
        "all pods (5)              all                  none         <A>         all\n",
        "nodes (2)                 all                  none         udp/53      all\n",
        "203.0.113.0/24, outside   all                  none         udp/53      -\n",
        "  <A>: between nodes: udp/53; on one node: all\n",
    ] {
        assert!(out.contains(row), "{row}\nis missing in\n{out}");
    }
    assert!(
        out.contains("Host endpoints are included; the report of a node shows whether it enforces them."),
        "{out}"
    );
    let (_, out) = with_hosts(&["matrix", "-f", "c.yml", "-f", "hosts.yml", "-o", "json"], "");
    let document: Value = serde_json::from_str(&out).unwrap();
    let because = document.pointer("/tables/0/cells").unwrap().to_string();
    assert!(
        because.contains("\"hostIngress\":\"GlobalNetworkPolicy workers, rule 1 (hosts.yml:18)\""),
        "{because}"
    );
    assert!(because.contains("\"hostIngress\":\"a failsafe port\""), "{because}");
}

/// Policies of each table, host endpoints and failsafe ports: the change, and the rule.
#[test]
fn previews_show_changes_at_hosts() {
    let cases = [
        (
            "forwarded",
            global("  selector: role == 'worker'\n  order: 0\n  applyOnForward: true\n  ingress:\n  - {action: Deny, protocol: UDP, source: {selector: app == 'front'}, destination: {ports: [53]}}\n  - {action: Allow, protocol: UDP}\n"),
            &[
                "shop/front-* (3) → nodes (2), between nodes: udp/53\n  allowed → denied, 3 pairs\n    now:    into the node: GlobalNetworkPolicy p, rule 1 (change.yml:9)\n    before: into the node: GlobalNetworkPolicy workers, rule 1 (hosts.yml:18)\n",
                "shop/front-* (3) → jobs/nightly-x9s2b, between nodes: udp/53\n  allowed → denied, 2 pairs\n    now:    into the node: GlobalNetworkPolicy p, rule 1 (change.yml:9), forwarded\n",
            ][..],
        ),
        (
            "untracked: the reply needs a rule, too",
            global("  selector: has(role)\n  doNotTrack: true\n  applyOnForward: true\n  ingress:\n  - {action: Allow, protocol: UDP, destination: {ports: [53]}}\n"),
            &["all nodes (2), 203.0.113.0/24, outside → jobs/nightly-x9s2b, all nodes (2): udp/53\n  allowed → denied, 9 pairs", "into the node: no rule allows it, untracked, the reply"],
        ),
        (
            "before DNAT: from outside also to pods, whatever they say",
            global("  selector: has(role)\n  preDNAT: true\n  applyOnForward: true\n  ingress:\n  - {action: Deny, source: {nets: [203.0.113.0/24]}}\n"),
            &["203.0.113.0/24 → nodes (2): udp/53\n  allowed → denied", "203.0.113.0/24 → shop/front-* (3): tcp/443,8000-8999\n", "into the node: GlobalNetworkPolicy p, rule 1 (change.yml:9), before DNAT"],
        ),
        (
            "a host endpoint",
            HOSTS.split("---").next().unwrap().replace("role: worker", "role: edge"),
            &["node/n2, 203.0.113.0/24, outside → node/n1: udp/53\n  allowed → denied, 6 pairs", "now:    into the node: no policy and no profile\n"],
        ),
        (
            "failsafe ports, and what pods send to their own node",
            "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {name: default}\nspec: {failsafeInboundHostPorts: [], defaultEndpointToHostAction: Drop}\n".to_owned(),
            &[
                "all nodes (2), 203.0.113.0/24, outside → nodes (2): tcp/22\n  allowed → denied, 6 pairs\n    now:    into the node: the end of tier default: no rule matches\n    before: into the node: a failsafe port\n",
                "all pods (5) → nodes (2), on one node: all\n  allowed → denied, 5 pairs\n    now:    into the node: defaultEndpointToHostAction is Drop\n",
            ],
        ),
    ];
    for (what, change, expected) in cases {
        let out = preview(&change);
        for expected in expected {
            assert!(out.contains(expected), "{what}: {expected}\nis missing in\n{out}");
        }
        assert!(
            out.contains("Host endpoints are included; the report of a node shows whether it enforces them."),
            "{what}: {out}"
        );
    }
}

/// Without host endpoints, the output does not mention them.
#[test]
fn output_omits_hosts_without_host_endpoints() {
    let policy = global("  selector: has(role)\n  applyOnForward: true\n  ingress:\n  - {action: Deny}\n");
    let files = [("c.yml", CLUSTER), ("change.yml", policy.as_str())];
    let (code, out, _) = tortie(&files, &["preview", "--in", "c.yml", "-f", "change.yml"]);
    assert_eq!((code, out.as_str()), (0, "nothing changes: every flow keeps its verdict\n"));
}

/// Findings as `code object field`, without notes.
fn findings(change: &str, hosts: &str) -> Vec<String> {
    let files = [("c.yml", CLUSTER), ("hosts.yml", hosts), ("p.yml", change)];
    let arguments = ["policy", "lint", "-f", "c.yml", "-f", "hosts.yml", "-f", "p.yml", "-o", "json"];
    let (_, out, err) = tortie(&files, &arguments);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
    let text = |finding: &Value, field: &str| finding[field].as_str().unwrap_or_default().to_owned();
    let shown = |finding: &Value| {
        ["code", "object", "field"].map(|field| text(finding, field)).join(" ").trim().to_owned()
    };
    let all = document["findings"].as_array().unwrap();
    all.iter().filter(|finding| finding["level"] != "note").map(shown).collect()
}

#[test]
fn lint_of_hosts() {
    let tables = |field: &str| {
        global(&format!(
            "  selector: app == 'front'\n  {field}: true\n  applyOnForward: true\n  ingress:\n  - {{action: Allow}}\n"
        ))
    };
    let rules = |rules: &str| global(&format!("  selector: has(role)\n  order: 0\n  ingress:\n{rules}"));
    let lonely = "---\napiVersion: projectcalico.org/v3\nkind: HostEndpoint\nmetadata: {name: lonely, labels: {role: edge}}\nspec: {node: n3, interfaceName: eth0}\n";
    let ingress_only = global("  selector: role == 'edge'\n  ingress:\n  - {action: Allow}\n");
    for (what, change, hosts, expected) in [
        ("nothing", String::new(), HOSTS.to_owned(), vec![]),
        (
            "of pods only",
            tables("doNotTrack"),
            HOSTS.to_owned(),
            vec!["selects-nothing GlobalNetworkPolicy p spec.selector"],
        ),
        (
            "of pods only",
            tables("preDNAT"),
            HOSTS.to_owned(),
            vec!["selects-nothing GlobalNetworkPolicy p spec.selector"],
        ),
        (
            "shadowed, and shadowing",
            rules(
                "  - {action: Allow, protocol: UDP}\n  - {action: Deny, protocol: UDP, destination: {ports: [53]}}\n",
            ),
            HOSTS.to_owned(),
            vec![
                "shadowed GlobalNetworkPolicy workers spec.ingress[0]",
                "shadowed GlobalNetworkPolicy p spec.ingress[1]",
            ],
        ),
        (
            "a failsafe port is never asked about",
            rules("  - {action: Deny, protocol: TCP, destination: {ports: [22]}}\n  - {action: Pass}\n"),
            HOSTS.replace("order: 1", "order: 1\n  tier: kube-admin"),
            vec!["failsafe GlobalNetworkPolicy p spec.ingress[0]"],
        ),
        (
            "nobody speaks of it",
            String::new(),
            format!("{HOSTS}{lonely}"),
            vec!["no-policy HostEndpoint lonely"],
        ),
        (
            "nobody speaks of what it sends",
            ingress_only,
            format!("{HOSTS}{lonely}"),
            vec!["no-policy HostEndpoint lonely"],
        ),
        (
            "its profile does",
            String::new(),
            format!("{HOSTS}{}", lonely.replace("eth0}", "eth0, profiles: [projectcalico-default-allow]}")),
            vec![],
        ),
    ] {
        assert_eq!(findings(&change, &hosts), expected, "{what}");
    }
}

#[test]
fn lint_of_staged_policies_and_profiles() {
    let staged = |order: &str, action: &str, rules: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: StagedNetworkPolicy\nmetadata: {{name: new, namespace: shop}}\nspec:\n  selector: app == 'front'\n  order: {order}\n  stagedAction: {action}\n  ingress:\n{rules}"
        )
    };
    let twice = "  - {action: Allow, protocol: TCP}\n  - {action: Deny, protocol: TCP, destination: {ports: [443]}}\n";
    let once = "  - {action: Allow, protocol: TCP}\n";
    let all = "---\napiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: all, namespace: shop}\nspec: {selector: app == 'front', order: 3, ingress: [{action: Allow, protocol: TCP}]}\n";
    let profile = "apiVersion: projectcalico.org/v3\nkind: Profile\nmetadata: {name: kns.shop}\nspec:\n  ingress:\n  - {action: Allow, protocol: TCP}\n  - {action: Deny, protocol: TCP, destination: {ports: [443]}}\n  egress:\n  - {action: Allow}\n";
    // The enforced policy with the staged one's name would be replaced, however much it matches.
    let enforced = "---\napiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: new, namespace: shop}\nspec: {selector: app == 'front', order: 3, ingress: [{action: Allow}]}\n";
    for (what, change, expected) in [
        (
            "within itself",
            staged("4", "Set", twice),
            vec!["shadowed StagedNetworkPolicy shop/new spec.ingress[1]"],
        ),
        ("staged for nothing", staged("4", "Ignore", twice), vec![]),
        ("by its own older self", format!("{}{enforced}", staged("4", "Set", once)), vec![]),
        (
            "by one before it",
            format!("{}{enforced}{all}", staged("4", "Set", once)),
            vec!["shadowed StagedNetworkPolicy shop/new spec.ingress[0]"],
        ),
        (
            "not by one after it",
            format!("{}{enforced}{}", staged("4", "Set", once), all.replace("order: 3", "order: 5")),
            vec![],
        ),
        ("a profile", profile.to_owned(), vec!["shadowed Profile kns.shop spec.ingress[1]"]),
    ] {
        let mut found = findings(&change, "");
        found.retain(|finding| {
            finding.starts_with("shadowed StagedNetworkPolicy shop/new")
                || finding.starts_with("shadowed Profile")
        });
        assert_eq!(found, expected, "{what}");
    }
}

/// Pods with addresses of both families are asked with both; the family is named only if it makes a difference.
#[test]
fn both_families() {
    let mut pod = 0;
    let mut dual = String::new();
    for line in CLUSTER.lines() {
        match line.strip_prefix("status: {podIP: ").and_then(|rest| rest.strip_suffix('}')) {
            Some(address) => {
                pod += 1;
                dual += &format!(
                    "status: {{podIP: {address}, podIPs: [{{ip: {address}}}, {{ip: 'fd00::{pod}'}}]}}\n"
                );
            }
            None => dual += &format!("{line}\n"),
        }
    }
    let (_, out, _) = tortie(&[("c.yml", &dual)], &["matrix", "-f", "c.yml"]);
    assert!(out.contains("  shop/front-* (3)\n") && out.contains("    tcp/8443 → shop/back-0\n"), "{out}");
    assert!(!out.contains("IPv4") && !out.contains("IPv6:"), "{out}");
    let change = "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: v6, namespace: shop}\nspec:\n  selector: app == 'back'\n  order: 1\n  ingress:\n  - {action: Allow, protocol: TCP, source: {nets: ['fd00::/64']}, destination: {ports: [80]}}\n";
    let flows = "{\"from\": \"jobs/nightly-x9s2b\", \"to\": \"shop/back-0\", \"port\": \"tcp/80\"}\n";
    let files = [("c.yml", dual.as_str()), ("v6.yml", change), ("flows.jsonl", flows)];
    let (_, out, _) = tortie(&files, &["matrix", "-f", "c.yml", "-f", "v6.yml"]);
    assert!(out.contains("    IPv4: tcp/8443; IPv6: tcp/80,8443 → shop/back-0\n"), "{out}");
    let (_, out, _) = tortie(&files, &["preview", "--in", "c.yml", "-f", "v6.yml"]);
    assert!(
        out.contains(
            "jobs/nightly-x9s2b, shop/front-* (4) → shop/back-0, IPv6: tcp/80\n  denied → allowed, 4 pairs\n"
        ),
        "{out}"
    );
    assert!(out.contains("fd00::/64 → shop/back-0: tcp/80\n"), "{out}");
    let (_, out, _) = tortie(&files, &["preview", "--in", "c.yml", "-f", "v6.yml", "--flows", "flows.jsonl"]);
    assert!(
        out.starts_with("jobs/nightly-x9s2b → shop/back-0, IPv6 tcp/80: denied → allowed, 1 flow\n"),
        "{out}"
    );
    assert!(out.ends_with("1 of 1 flow meet another verdict\n"), "{out}");
}

/// Host endpoints are enforced on Linux nodes only, and commands say so for Windows nodes.
#[test]
fn host_endpoints_of_windows_nodes_are_not_enforced() {
    let windows = "\
{apiVersion: v1, kind: Node, metadata: {name: w1, labels: {kubernetes.io/os: windows}, annotations: {projectcalico.org/IPv4Address: 192.168.0.9/24}}}
---
{apiVersion: projectcalico.org/v3, kind: HostEndpoint, metadata: {name: w1-all, labels: {role: worker}}, spec: {node: w1, interfaceName: '*'}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: dns}, spec: {selector: role == 'worker', doNotTrack: true, applyOnForward: true, ingress: [{action: Allow, protocol: UDP, destination: {ports: [53]}}]}}
";
    let files = [("c.yml", CLUSTER), ("hosts.yml", HOSTS), ("windows.yml", windows)];
    let all = ["-f", "c.yml", "-f", "hosts.yml", "-f", "windows.yml"];
    let (code, out, _) = tortie(&files, &[&["explain", "node/n1", "node/w1"][..], &all].concat());
    let note = "host endpoint w1-all is not enforced, as node w1 is a Windows node: as things are, the packet is allowed";
    assert!(code == 1 && out.contains(note), "{out}");
    let (_, out, _) = tortie(&files, &[&["explain", "node/n1", "node/w1", "-o", "json"][..], &all].concat());
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&document["answer"]["verdict"], &document["verdictAsEnforced"]),
        (&"Deny".into(), &"Allow".into())
    );
    assert_eq!(document["notEnforced"], serde_json::json!([{"hostEndpoint": "w1-all", "node": "w1"}]));
    let (_, out, _) = tortie(&files, &[&["explain", "node/w1", "node/n1"][..], &all[..4]].concat());
    assert!(!out.contains("not enforced"), "{out}");
    let (_, out, _) = tortie(&files, &[&["matrix"][..], &all].concat());
    assert!(out.contains("Host endpoints of Windows nodes are not enforced, though they have their say here: w1-all (node w1)."), "{out}");
    let (_, out, _) = tortie(&files, &[&["policy", "lint"][..], &all].concat());
    assert!(out.contains("warning[not-enforced]: HostEndpoint w1-all: spec.node: it is not enforced: node w1 is a Windows node"), "{out}");
    assert!(
        out.contains("nothing for Linux nodes; host endpoints of Windows nodes are not enforced here either"),
        "{out}"
    );
    let arguments = ["preview", "--in", "c.yml", "--in", "hosts.yml", "-f", "windows.yml"];
    let (_, out, _) = tortie(&files, &arguments);
    assert!(out.contains("Host endpoints of Windows nodes are not enforced"), "{out}");
}

/// A rule about failsafe ports has no effect; the finding names the ports and does not advise to remove the rule.
#[test]
fn lint_reports_rules_for_failsafe_ports() {
    let policy = global(
        "  selector: role == 'worker'\n  order: 0\n  ingress:\n  - {action: Allow, protocol: TCP, destination: {ports: [22]}}\n  - {action: Deny, protocol: TCP, destination: {ports: ['22:22']}}\n  - {action: Deny, protocol: TCP, destination: {ports: [22, 443]}}\n  - {action: Deny, protocol: UDP, destination: {ports: [22]}}\n",
    );
    let (code, out) =
        with_hosts(&["policy", "lint", "-f", "c.yml", "-f", "hosts.yml", "-f", "change.yml"], &policy);
    let found: Vec<&str> = out.lines().filter(|line| line.contains("failsafe]")).collect();
    assert_eq!(code, 1, "{out}");
    assert_eq!(
        found,
        [
            "change.yml:8: note[failsafe]: GlobalNetworkPolicy p: spec.ingress[0]: it never decides: tcp/22 are failsafe ports, which pass before policy is evaluated",
            "change.yml:9: warning[failsafe]: GlobalNetworkPolicy p: spec.ingress[1]: it never decides: tcp/22 are failsafe ports, which pass before policy is evaluated",
        ],
        "{out}"
    );
}

/// Nodes may have IPv6 addresses where no pod has one.
#[test]
fn ipv6_of_nodes_counts_without_ipv6_of_pods() {
    const CLUSTER: &str = "\
apiVersion: v1
kind: Node
metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.11/24, projectcalico.org/IPv6Address: 2001:db8::11/64}}
---
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: n1-eth0, labels: {role: worker}}
spec: {interfaceName: eth0, node: n1, expectedIPs: [192.0.2.11, '2001:db8::11']}
---
";
    let deny = "  - {action: Deny, protocol: TCP, ipVersion: 6, destination: {ports: [8181]}}\n";
    let allow = "  - {action: Allow, protocol: TCP, destination: {ports: [8181]}}\n";
    let policy =
        |rules: &str| global(&format!("  order: 0\n  selector: role == 'worker'\n  ingress:\n{rules}"));
    let both = format!("{CLUSTER}{}", policy(&format!("{deny}{allow}")));
    let (_, out, err) = tortie(&[("c.yml", &both)], &["policy", "lint", "-f", "c.yml"]);
    assert!(!out.contains("matches nothing"), "{out}{err}");
    let files = [("c.yml", both.as_str()), ("change.yml", &policy(allow))];
    let (code, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", "change.yml"]);
    assert!(code == 1 && out.contains("IPv6"), "{code} {out}{err}");
}

/// The log of Windows nodes has no packets, so `lint` does not say that the action works there.
#[test]
fn lint_does_not_promise_logs_of_windows_nodes() {
    let (_, out) = with_hosts(
        &["policy", "lint", "-f", "c.yml", "-f", "change.yml"],
        &global("  selector: app == 'front'\n  ingress: [{action: Log}, {action: Allow}]\n"),
    );
    assert!(out.contains("the action Log") && out.contains("Windows nodes log nothing here either"), "{out}");
}
