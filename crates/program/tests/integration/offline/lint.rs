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
fn invalid_manifests_are_rejected() {
    let (code, out, err) = lint(&policy("  - {action: Forbid}\n"), &[]);
    assert_eq!((code, out.as_str()), (2, ""));
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
