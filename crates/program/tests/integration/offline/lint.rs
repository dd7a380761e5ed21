//! `tortie policy lint` on manifests: each kind of finding, with its position and its witness, and clean manifests.

use crate::offline::support::{CLUSTER, tortie};
use serde_json::Value;

fn lint(policy: &str, arguments: &[&str]) -> (i32, String, String) {
    let files = [("c.yml", CLUSTER), ("p.yml", policy)];
    tortie(&files, &[&["policy", "lint", "-f", "c.yml", "-f", "p.yml"], arguments].concat())
}

/// A Calico policy for the front ends of the shop whose rules begin on line 8.
fn policy(rules: &str) -> String {
    format!(
        "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: p, namespace: shop}}\nspec:\n  order: 1\n  \
         selector: app == 'front'\n  ingress:\n{rules}"
    )
}

fn findings(policy: &str) -> (i32, Vec<String>) {
    let (code, out, err) = lint(policy, &["-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
    let shown = |finding: &Value| {
        let text = |field: &str| finding[field].as_str().unwrap_or_default().to_owned();
        assert!(!text("witness").is_empty() && !text("advice").is_empty(), "{finding}");
        format!("{} {} {}", text("place"), text("code"), text("field"))
    };
    (code, document["findings"].as_array().unwrap().iter().map(shown).collect())
}

#[test]
fn as_text() {
    let rules = "  - action: Deny\n    source: {selector: ap == 'front'}\n  - action: Allow\n    protocol: TCP\n  - action: Deny\n    protocol: TCP\n    source: {selector: app == 'back'}\n    destination: {ports: [443]}\n";
    let expected = "\
p.yml:9: warning[unknown-label]: NetworkPolicy shop/p: spec.ingress[0].source.selector: ap == \"front\" asks for label ap, which no pod or network set has
    because: no pod or network set of this cluster bears it
    to do:   is app meant?
p.yml:12: warning[shadowed]: NetworkPolicy shop/p: spec.ingress[2]: it never decides: everything that it matches is decided before, by NetworkPolicy shop/p, rule 2 (p.yml:10)
    because: shop/back-0 → shop/front-5d8f6c7b9-m4m4m tcp/443: NetworkPolicy shop/p, rule 2 (p.yml:10)
    to do:   move it before that, narrow that, or take it out
";
    let (code, out, err) = lint(&policy(rules), &[]);
    assert!(out.starts_with("c.yml:59: note[elsewhere]") && out.contains(expected), "{out}{err}");
    // The existing policy now comes too late for TCP.
    assert!(out.contains("c.yml:67: warning[shadowed]: NetworkPolicy shop/front: spec.ingress[0]"), "{out}");
    // And before the one that is staged with its name.
    let staged =
        "c.yml:78: warning[shadowed]: StagedNetworkPolicy shop/front: spec.ingress[0]: it would never decide";
    assert!(out.contains(staged), "{out}");
    assert!(out.ends_with("\n0 errors, 4 warnings, 1 note\n"), "{out}");
    assert_eq!(code, 1);
}

#[test]
fn a_cluster_without_faults_is_clean() {
    let (code, out, _) = tortie(&[("c.yml", CLUSTER)], &["policy", "lint", "-f", "c.yml"]);
    let expected = "\
c.yml:59: note[elsewhere]: KubernetesNetworkPolicy shop/back: spec.ingress[0].ports[0].port: a named port does not work on Calico for Windows
    because: there the rule is left out: packets that it allows are denied
    to do:   nothing here: it works on Linux and Windows nodes alike
0 errors, 0 warnings, 1 note
";
    // Notes are not mistakes.
    assert_eq!((code, out.as_str()), (0, expected));
}

#[test]
fn every_kind_of_finding() {
    for (rule, expected) in [
        (
            "{action: Allow, source: {selector: \"app == 'a' && app == 'b'\"}}",
            "never-matches spec.ingress[0].source.selector",
        ),
        (
            "{action: Allow, source: {selector: \"app == 'back'\", notSelector: \"app == 'back'\"}}",
            "never-matches spec.ingress[0].source.notSelector",
        ),
        (
            "{action: Deny, source: {nets: [10.0.0.0/30], notNets: [10.0.0.0/8]}}",
            "never-matches spec.ingress[0].source.notNets",
        ),
        (
            "{action: Deny, protocol: TCP, destination: {ports: ['1:9', 80], notPorts: ['1:5', '6:80']}}",
            "never-matches spec.ingress[0].destination.notPorts",
        ),
        ("{action: Deny, protocol: TCP, notProtocol: TCP}", "never-matches spec.ingress[0].notProtocol"),
        (
            "{action: Deny, protocol: ICMP, icmp: {type: 8, code: 0}, notICMP: {type: 8}}",
            "never-matches spec.ingress[0].notICMP",
        ),
        (
            "{action: Allow, source: {namespaceSelector: global(), serviceAccounts: {names: [a]}}}",
            "never-matches spec.ingress[0].source.serviceAccounts",
        ),
        ("{action: Allow, http: {methods: [GET]}}", "never-matches spec.ingress[0].http"),
        (
            "{action: Allow, source: {selector: app == 'nobody'}}",
            "matches-nothing spec.ingress[0].source.selector",
        ),
        (
            "{action: Allow, source: {selector: app == 'back', namespaceSelector: projectcalico.org/name == 'jobs'}}",
            "matches-nothing spec.ingress[0]",
        ),
        ("{action: Allow, destination: {ports: [nowhere]}}", "matches-nothing spec.ingress[0]"),
        ("{action: Allow, source: {selector: has(colour)}}", "unknown-label spec.ingress[0].source.selector"),
        (
            "{action: Allow, source: {namespaceSelector: has(colour)}}",
            "unknown-label spec.ingress[0].source.namespaceSelector",
        ),
        (
            "{action: Allow, source: {serviceAccounts: {}, nets: [10.0.0.0/8]}}",
            "empty-service-accounts spec.ingress[0].source.serviceAccounts",
        ),
        ("{action: Allow, source: {nets: [10.96.0.0/16]}}", "cluster-ip spec.ingress[0].source.nets[0]"),
        ("{action: Allow, source: {notNets: [10.0.0.0/30]}}", "elsewhere spec.ingress[0].source.notNets"),
        (
            "{action: Allow, source: {notSelector: app == 'back'}}",
            "elsewhere spec.ingress[0].source.notSelector",
        ),
        ("{action: Allow, protocol: ICMP, icmp: {type: 8}}", "elsewhere spec.ingress[0].icmp"),
        ("{action: Pass}", "elsewhere spec.ingress[0].action"),
    ] {
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: s, namespace: shop}\nspec: {clusterIP: 10.96.0.7, ports: [{port: 80}]}\n---\n";
        let text = format!("{service}{}", policy(&format!("  - {rule}\n")));
        let (code, found) = findings(&text);
        assert!(found.contains(&format!("p.yml:13 {expected}")), "{rule}: {found:#?}");
        let only_notes = found.iter().all(|finding| finding.contains("elsewhere"));
        assert_eq!(code, i32::from(!only_notes), "{rule}: {found:#?}");
    }
}

#[test]
fn correct_manifests_have_no_findings() {
    for rule in [
        "{action: Allow, source: {selector: app == 'back', notSelector: app == 'front'}}",
        "{action: Allow, source: {nets: [10.0.0.0/8], notNets: [10.0.1.0/24]}}",
        "{action: Allow, source: {nets: [0.0.0.0/0]}}",
        "{action: Allow, protocol: TCP, destination: {ports: ['1:9', 80], notPorts: ['1:5', '7:80']}}",
        "{action: Allow, source: {serviceAccounts: {selector: all()}}}",
        "{action: Log}",
    ] {
        let (_, found) = findings(&policy(&format!("  - {rule}\n")));
        let found: Vec<_> = found
            .iter()
            .filter(|finding| finding.starts_with("p.yml") && !finding.contains("elsewhere"))
            .collect();
        assert!(found.is_empty(), "{rule}: {found:#?}");
    }
}

#[test]
fn whole_policies() {
    let cluster = |name: &str, rest: &str| {
        format!(
            "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: {name}}}\nspec: {{tier: Admin, {rest}}}\n"
        )
    };
    let pass = "subject: {namespaces: {}}, ingress: [{action: Pass, from: [{namespaces: {}}]}]";
    let equal = cluster("a", &format!("priority: 5, {pass}"))
        + "---\n"
        + &cluster("b", &format!("priority: 5, {pass}"));
    let (code, found) = findings(&equal);
    assert_eq!(
        (code, found.iter().filter(|finding| finding.contains("equal-priorities")).count()),
        (1, 1),
        "{found:#?}"
    );
    assert!(found.iter().any(|finding| finding == "p.yml:9 shadowed spec.ingress[0]"), "{found:#?}");

    let nobody = policy("  - {action: Allow}\n").replace("app == 'front'", "app == 'nobody'");
    assert_eq!(
        findings(&nobody).1,
        ["c.yml:59 elsewhere spec.ingress[0].ports[0].port", "p.yml:6 selects-nothing spec.selector"]
    );

    let unspoken = policy("  - {action: Allow}\n").replace("  order: 1\n", "  types: [Egress]\n");
    assert!(findings(&unspoken).1.contains(&"p.yml:7 never-matches spec.ingress".to_owned()));

    let tier = policy("  - {action: Allow}\n").replace("  order: 1\n", "  tier: gone\n");
    assert!(findings(&tier).1.contains(&"p.yml:5 unknown-tier spec.tier".to_owned()));
}

#[test]
fn peers_that_are_nodes() {
    let of = |nodes: &str| {
        format!(
            "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: p}}\nspec:\n  tier: Admin\n  \
             priority: 1\n  subject: {{namespaces: {{}}}}\n  egress:\n  - {{action: Deny, to: [{{nodes: {nodes}}}]}}\n---\n\
             apiVersion: v1\nkind: Node\nmetadata: {{name: n3, labels: {{role: db}}}}\n\
             status: {{addresses: [{{type: InternalIP, address: 192.168.0.3}}]}}\n"
        )
    };
    let field = "spec.egress[0].to[0].nodes";
    for (nodes, expected) in [
        ("{matchLabels: {role: db}}", vec![]),
        ("{}", vec![]),
        ("{matchLabels: {role: web}}", vec!["matches-nothing"]),
        ("{matchLabels: {rol: db}}", vec!["unknown-label"]),
        (
            "{matchExpressions: [{key: role, operator: Exists}, {key: role, operator: DoesNotExist}]}",
            vec!["never-matches"],
        ),
    ] {
        let (_, found) = findings(&of(nodes));
        let about = |finding: &&String| finding.ends_with(field) && !finding.contains("elsewhere");
        let found: Vec<&String> = found.iter().filter(about).collect();
        let expected: Vec<String> = expected.iter().map(|code| format!("p.yml:9 {code} {field}")).collect();
        assert_eq!(found, expected.iter().collect::<Vec<_>>(), "{nodes}");
    }
    // The address that a node without one gets for other questions does not count.
    let (_, found) =
        findings(&of("{matchLabels: {role: db}}").replace("{type: InternalIP, address: 192.168.0.3}", ""));
    assert!(found.contains(&format!("p.yml:9 matches-nothing {field}")), "{found:?}");
    let (_, out, _) = lint(&of("{}"), &[]);
    let note = "a peer by nodes does not work on Calico\n    because: there the rule denies everything";
    assert!(out.contains(note), "{out}");
}

#[test]
fn a_rule_of_a_later_tier_is_shadowed_by_an_earlier_tier() {
    let baseline = "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: late}\nspec:\n  tier: Baseline\n  priority: 1\n  \
                    subject: {pods: {podSelector: {matchLabels: {app: back}}}}\n  ingress:\n  - {action: Deny, from: [{namespaces: {}}]}\n";
    let (code, out, _) = lint(baseline, &[]);
    assert_eq!(code, 1);
    let said = "p.yml:9: warning[shadowed]: ClusterNetworkPolicy late: spec.ingress[0]: it never decides: everything that it matches is decided before, by \
                KubernetesNetworkPolicy shop/back, rule 1 (c.yml:58); the end of tier default";
    assert!(out.contains(said), "{out}");
}

#[test]
fn invalid_manifests_make_findings_uncertain() {
    let (code, out, err) = lint(&policy("  - {action: Forbid}\n"), &[]);
    assert!(code == 3 && !out.is_empty(), "{code} {out}{err}");
    let (code, out, err) = lint(&policy("  - {action: Forbid}\n"), &["--strict"]);
    assert_eq!((code, out.as_str()), (2, ""), "{err}");
    assert!(err.contains("p.yml:8: NetworkPolicy shop/p: spec.ingress[0].action"), "{err}");
}

#[test]
fn policies_without_pods_are_checked_alone() {
    let (code, out, _) =
        tortie(&[("p.yml", &policy("  - {action: Allow}\n"))], &["policy", "lint", "-f", "p.yml"]);
    assert_eq!(
        (code, out.as_str()),
        (0, "nothing found\nThere are no pods, so only findings that do not depend on pods are shown.\n")
    );
}

/// Findings of operators: what `policyTypes` leaves out, failsafe ports and pods, pods that have ended or use their node's network.
#[test]
fn findings_name_the_reason_of_their_kind() {
    let pod = |name: &str, app: &str, spec: &str, status: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: shop, labels: {{app: {app}}}}}, spec: {{nodeName: n1, {spec}containers: [{{name: c}}]}}, status: {{{status}}}}}\n"
        )
    };
    let cluster = [
        "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}\n",
        "---\n{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}}\n",
        "---\n{apiVersion: projectcalico.org/v3, kind: HostEndpoint, metadata: {name: n1, labels: {'on': n1}}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}}\n",
        &pod("web", "web", "", "phase: Running, podIP: 10.0.0.5"),
        &pod("proxy", "proxy", "hostNetwork: true, ", "phase: Running"),
        &pod("backup-1", "backup", "", "phase: Succeeded, podIP: 10.0.0.5"),
    ]
    .concat();
    let kubernetes = |spec: &str| {
        format!(
            "---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: p, namespace: shop}}, spec: {{{spec}}}}}\n"
        )
    };
    let global = |name: &str, spec: &str| {
        format!(
            "---\n{{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {{name: {name}}}, spec: {{{spec}}}}}\n"
        )
    };
    let port_22 = "ingress: [{action: Deny, protocol: TCP, destination: {ports: [22]}}]";
    let shadowed = global("a", &format!("order: 1, selector: app == 'web', {port_22}"))
        + &global("b", &format!("order: 2, selector: app == 'web', {port_22}"));
    for (policies, expected) in [
        (
            kubernetes(
                "podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], ingress: [{}], egress: [{}]",
            ),
            "error[never-matches]: KubernetesNetworkPolicy shop/p: spec.ingress: policyTypes leaves Ingress out",
        ),
        (
            kubernetes(
                "podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress], ingress: [{}], egress: [{}]",
            ),
            "error[never-matches]: KubernetesNetworkPolicy shop/p: spec.egress: policyTypes leaves Egress out",
        ),
        (shadowed, "warning[shadowed]: GlobalNetworkPolicy b"),
        (
            global("c", &format!("selector: on == 'n1', {port_22}")),
            "warning[failsafe]: GlobalNetworkPolicy c",
        ),
        (
            kubernetes("podSelector: {matchLabels: {app: backup}}, policyTypes: [Ingress, Egress]"),
            "shop/backup-1 has ended, and has no network any more",
        ),
        (
            kubernetes("podSelector: {matchLabels: {app: proxy}}"),
            "shop/proxy uses its node's network, and is under no policy of pods",
        ),
        (
            kubernetes(
                "podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: proxy}}}]}]",
            ),
            "name the addresses of their nodes: no selector matches such pods",
        ),
        (
            kubernetes(
                "podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: backup}}}]}]",
            ),
            "nothing, if such pods come again",
        ),
    ] {
        let text = cluster.clone() + &policies;
        let (_, out, err) = tortie(&[("c.yml", &text)], &["policy", "lint", "-f", "c.yml"]);
        assert!(out.contains(expected), "{expected}\n{policies}\n{out}{err}");
    }
    // Of policies that let nobody resolve names, those that allow something.
    let dns = "---\n{apiVersion: v1, kind: Service, metadata: {name: kube-dns, namespace: kube-system}, spec: {selector: {k8s-app: kube-dns}, ports: [{name: dns, port: 53, protocol: UDP}]}}\n\
               ---\n{apiVersion: v1, kind: Pod, metadata: {name: coredns, namespace: kube-system, labels: {k8s-app: kube-dns}}, spec: {containers: [{name: c}]}, status: {podIP: 10.0.0.53}}\n";
    let to_web =
        "podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{to: [{podSelector: {}}]}";
    for (spec, expected) in [
        (format!("{to_web}]"), true),
        (format!("{to_web}, {{ports: [{{port: 53, protocol: UDP}}]}}]"), false),
        ("podSelector: {matchLabels: {app: web}}, policyTypes: [Egress]".to_owned(), false),
    ] {
        let text = [cluster.as_str(), dns, &kubernetes(&spec)].concat();
        let (_, out, err) = tortie(&[("c.yml", &text)], &["policy", "lint", "-f", "c.yml"]);
        let finding = "warning[no-dns]: KubernetesNetworkPolicy shop/p: shop/web may reach others, and not Service kube-system/kube-dns (udp/53)";
        assert_eq!(out.contains(finding), expected, "{spec}\n{out}{err}");
        assert_eq!(out.contains("no-dns"), expected, "{spec}\n{out}{err}");
    }
    let (code, out, err) =
        tortie(&[("c.yml", &cluster)], &["explain", "-f", "c.yml", "shop/web", "shop/backup-1"]);
    assert!(code == 2 && err.contains("pod shop/backup-1 has ended (Succeeded)"), "{out}{err}");
}

/// Traffic between the replicas of a workload is traffic: rules for it decide.
#[test]
fn rules_for_replicas_decide() {
    let redis = |ingress: &str| {
        format!(
            "{{apiVersion: apps/v1, kind: StatefulSet, metadata: {{name: redis, namespace: data}}, spec: {{replicas: 3, serviceName: redis, selector: {{matchLabels: {{app: redis}}}}, template: {{metadata: {{labels: {{app: redis}}}}, spec: {{containers: [{{name: c}}]}}}}}}}}\n---\n\
             {{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: redis, namespace: data}}, spec: {{podSelector: {{matchLabels: {{app: redis}}}}, policyTypes: [Ingress, Egress], ingress: [{ingress}], egress: [{{to: [{{podSelector: {{matchLabels: {{app: redis}}}}}}], ports: [{{port: 6379}}]}}]}}}}\n"
        )
    };
    let among = redis("{from: [{podSelector: {matchLabels: {app: redis}}}], ports: [{port: 6379}]}");
    let (code, out, err) = tortie(&[("c.yml", &among)], &["policy", "lint", "-f", "c.yml"]);
    assert!(code == 0 && out.contains("nothing found"), "{out}{err}");
    let closed = redis("");
    let files = [("c.yml", among.as_str()), ("d.yml", closed.as_str())];
    let (code, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", "d.yml"]);
    assert!(
        code == 1 && out.contains("data/redis → data/redis") && out.contains("allowed → denied"),
        "{out}{err}"
    );
    let expectations = "expectations:\n- data/redis reaches data/redis on tcp/6379\n- data/redis* reaches data/redis* on tcp/6379\n";
    let files = [("c.yml", among.as_str()), ("d.yml", closed.as_str()), ("e.yml", expectations)];
    for (file, expected) in [("c.yml", 0), ("d.yml", 1)] {
        let (code, out, err) = tortie(&files, &["policy", "test", "e.yml", "-f", file]);
        assert_eq!(code, expected, "{file}: {out}{err}");
    }
    let (_, out, err) = tortie(&files, &["policy", "test", "--record", "-f", "c.yml"]);
    assert!(out.contains("data/redis reaches data/redis on tcp/6379") && !out.contains('~'), "{out}{err}");
    let (_, out, err) = tortie(&files, &["matrix", "-f", "c.yml"]);
    assert!(out.contains("data/redis") && !out.contains('~') && !out.contains("(2)"), "{out}{err}");
}
