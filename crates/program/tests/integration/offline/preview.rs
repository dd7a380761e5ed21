//! `tortie preview` on manifests: what changes, by which rule, and what does not change.

use crate::offline::support::{CLUSTER, tortie};
use serde_json::Value;

/// Admits the jobs to the back end, on one more port.
const CHANGE: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: back, namespace: shop}
spec:
  podSelector: {matchLabels: {app: back}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: front}}}]
    ports: [{port: api}]
  - from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: jobs}}}]
    ports: [{port: api}, {port: 9090}]
";

fn preview(files: &[(&str, &str)], arguments: &[&str]) -> (i32, String, String) {
    let files = [&[("c.yml", CLUSTER)], files].concat();
    tortie(&files, &[&["preview", "--in", "c.yml"], arguments].concat())
}

#[test]
fn a_change_with_its_rule() {
    let expected = "\
jobs/nightly-x9s2b → shop/back-0: tcp/8443,9090
  denied → allowed, 1 pair
    now:    in: KubernetesNetworkPolicy shop/back, rule 2 (change.yml:9)
    before: in: the end of tier default: no rule matches
1 change: 1 to allowed, 0 to denied
";
    assert_eq!(
        preview(&[("change.yml", CHANGE)], &["-f", "change.yml"]),
        (1, expected.to_owned(), String::new())
    );
}

/// Pods' tunnels are dropped before policy, which the verdicts of policy do not show.
#[test]
fn changes_for_tunnels_from_pods_are_marked() {
    let open = |ports: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: open, namespace: shop}}\n\
             spec: {{order: 1, ingress: [{{action: Allow{ports}}}]}}\n"
        )
    };
    for (ports, expected) in [
        ("", true),
        (", protocol: UDP, destination: {ports: [4789]}", true),
        (", protocol: 4", true),
        (", protocol: UDP, destination: {ports: [53]}", false),
        (", protocol: TCP", false),
    ] {
        let (code, out, err) = preview(&[("open.yml", &open(ports))], &["-f", "open.yml"]);
        assert!(code == 1 && err.is_empty(), "{out}{err}");
        assert_eq!(out.contains("VXLAN (udp/4789) and IPIP (proto/4) from pods"), expected, "{ports}: {out}");
    }
    // Another port of VXLAN.
    let felix = "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {name: default}\nspec: {vxlanPort: 8472}\n";
    let files = [("open.yml", &*open(", protocol: UDP, destination: {ports: [8472]}")), ("felix.yml", felix)];
    let (_, out, err) = preview(&files, &["-f", "open.yml", "-f", "felix.yml"]);
    assert!(out.contains("VXLAN (udp/4789, udp/8472) and IPIP (proto/4) from pods"), "{out}{err}");
}

#[test]
fn unchanged_objects_change_nothing() {
    let expected = "nothing changes: every flow keeps its verdict\n".to_owned();
    assert_eq!(preview(&[], &["-f", "c.yml"]), (0, expected, String::new()));
}

#[test]
fn staged_policies_are_previewed_as_enforced() {
    let expected = "\
all nodes (2), outside → shop/front-* (3): tcp/443
  denied → allowed, 6 pairs
    now:    in: NetworkPolicy shop/front, rule 1 (c.yml:78)
    before: in: the end of tier default: no rule matches
all pods (5) → shop/front-* (3): tcp/443
  denied → allowed, 12 pairs
    now:    in: NetworkPolicy shop/front, rule 1 (c.yml:78)
    before: in: the end of tier default: no rule matches
203.0.113.0/24 → shop/front-* (3): tcp/8000-8999
  allowed → denied, 3 pairs
    now:    in: the end of tier default: no rule matches
    before: in: NetworkPolicy shop/front, rule 1 (c.yml:67)
3 changes: 2 to allowed, 1 to denied
";
    let (code, out, err) = preview(&[], &["--staged"]);
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!((code, sorted(&out), err), (1, sorted(expected), String::new()), "{out}");
    // Delete removes the enforced policy of that name.
    let deleting = CLUSTER.replace(
        "{stagedAction: Ignore, selector: app == 'back', ingress: [{action: Allow}]}",
        "{stagedAction: Delete}",
    );
    let deleting = deleting.replace(
        "metadata: {name: back, namespace: shop}\nspec: {staged",
        "metadata: {name: front, namespace: shop}\nspec: {staged",
    );
    let deleting = deleting.split("---\napiVersion: projectcalico.org/v3\nkind: StagedNetworkPolicy\nmetadata: {name: front, namespace: shop}\nspec:\n").next().unwrap().to_owned()
        + "---\napiVersion: projectcalico.org/v3\nkind: StagedNetworkPolicy\nmetadata: {name: front, namespace: shop}\nspec: {stagedAction: Delete}\n";
    let (code, out, _) = tortie(&[("d.yml", &deleting)], &["preview", "--in", "d.yml", "--staged"]);
    assert_eq!(code, 1);
    assert!(out.contains("shop/front-* (3): all\n") && out.contains("0 to denied"), "{out}");
}

#[test]
fn deleting() {
    for (object, code, printed) in [
        ("knp/shop/back", 1, "→ shop/back-0: all"),
        ("namespace/jobs", 0, "nothing changes"),
        ("pod/shop/back-0", 0, "nothing changes"),
        ("gns/partner", 1, "203.0.113.0/24 → shop/front-* (3): tcp/443,8000-8999\n  allowed → denied"),
        ("np/shop/gone", 2, "NetworkPolicy shop/gone does not exist (a Kubernetes policy is a knp)"),
        ("np/front", 2, "a NetworkPolicy is named as np/NAMESPACE/NAME"),
        ("gnp/a/b", 2, "it is named as gnp/NAME"),
        ("teapot/x", 2, "is no kind of object"),
        ("wep/shop/x", 2, "is written by the node's agent"),
    ] {
        let (got, out, err) = preview(&[], &["--delete", object]);
        assert_eq!(got, code, "{object}: {out}{err}");
        assert!(format!("{out}{err}").contains(printed), "{object}: {out}{err}");
    }
}

#[test]
fn preview_reads_changes_as_apply_does() {
    let unknown = CHANGE.replace("podSelector: {matchLabels: {app: back}}", "podSelektor: {}");
    let tier = "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: a}\nspec: {tier: gone}\n";
    for (text, printed) in [
        (unknown.as_str(), "change.yml:5: KubernetesNetworkPolicy shop/back: spec.podSelektor"),
        (tier, "spec.tier: tier gone does not exist"),
    ] {
        let (code, out, err) = preview(&[("change.yml", text)], &["-f", "change.yml"]);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(printed), "{err}");
    }
}

#[test]
fn a_pod_keeps_its_address_from_the_cluster() {
    // Without status and node, as users write it; with the label of a front end.
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: nightly-x9s2b, namespace: shop, labels: {app: front}}\nspec: {containers: [{name: c}]}\n";
    let pod = pod.replace("nightly-x9s2b", "front-5d8f6c7b9-q7w2z").replace("app: front", "app: other");
    let (code, out, _) = preview(&[("change.yml", &pod)], &["-f", "change.yml"]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("shop/front-5d8f6c7b9-q7w2z → shop/back-0: tcp/8443\n  allowed → denied"), "{out}");
}

#[test]
fn only_recorded_flows_are_shown() {
    let flows = "\
{\"from\": \"jobs/nightly-x9s2b\", \"to\": \"shop/back-0\", \"port\": \"tcp/9090\", \"count\": 7}

{\"from\": \"jobs/nightly-x9s2b\", \"to\": \"shop/back-0\", \"port\": \"tcp/9090\"}
{\"from\": \"203.0.113.7\", \"to\": \"shop/back-0\", \"port\": \"tcp/9090\"}
{\"from\": \"shop/long-gone\", \"to\": \"shop/back-0\", \"port\": \"tcp/9090\", \"count\": 2}
";
    let arguments = ["-f", "change.yml", "--flows", "flows.jsonl"];
    let expected = "\
jobs/nightly-x9s2b → shop/back-0 tcp/9090: denied → allowed, 8 flows
    now:    in: KubernetesNetworkPolicy shop/back, rule 2 (change.yml:9)
    before: in: the end of tier default: no rule matches
8 of 11 flows meet another verdict
left out, as an end is not there both before and after: 2 flows
";
    let files = [("change.yml", CHANGE), ("flows.jsonl", flows)];
    assert_eq!(preview(&files, &arguments), (1, expected.to_owned(), String::new()));
    let (code, out, _) = preview(&files, &[&arguments[..], &["-o", "json"]].concat());
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, document["changed"].as_u64(), document["leftOut"].as_u64()),
        (1, Some(8), Some(2)),
        "{out}"
    );
    let quiet = flows.lines().nth(3).unwrap();
    let (code, out, _) = preview(&[("change.yml", CHANGE), ("flows.jsonl", quiet)], &arguments);
    assert_eq!((code, out.as_str()), (0, "0 of 1 flow meet another verdict\n"));
    for (line, printed) in [
        ("{\"from\": 3}", "flows.jsonl:7: "),
        ("{\"from\": \"a/b/c/d\", \"to\": \"shop/back-0\", \"port\": \"tcp/1\"}", "flows.jsonl:7"),
        ("{\"from\": \"10.0.0.1\", \"to\": \"shop/back-0\", \"port\": \"tcq/1\"}", "flows.jsonl:7"),
    ] {
        let flows = format!("{flows}\n{line}\n");
        let (code, out, err) = preview(&[("change.yml", CHANGE), ("flows.jsonl", &flows)], &arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(printed), "{err}");
    }
}

#[test]
fn as_json() {
    let (code, out, _) = preview(&[("change.yml", CHANGE)], &["-f", "change.yml", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap();
    let change = &document["changes"][0];
    assert_eq!((code, change["pairs"].as_u64()), (1, Some(1)));
    assert_eq!(change["ports"], "tcp/8443,9090");
    assert_eq!(change["after"]["ingress"], "KubernetesNetworkPolicy shop/back, rule 2 (change.yml:9)");
    assert_eq!(change["before"][0]["verdict"], "Deny");
}
