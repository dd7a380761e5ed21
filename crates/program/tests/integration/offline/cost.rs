//! `tortie policy cost` on manifests: for everything, for a policy, for a pod, and the message if there is nothing to
//! report.

use crate::offline::support::{CLUSTER, tortie};
use serde_json::{Value, json};

fn cost(more: &str, arguments: &[&str]) -> (i32, String, String) {
    let files = [("c.yml", CLUSTER), ("p.yml", more)];
    tortie(&files, &[&["policy", "cost", "-f", "c.yml", "-f", "p.yml"], arguments].concat())
}

fn document(more: &str, arguments: &[&str]) -> Value {
    let (code, out, err) = cost(more, &[arguments, &["-o", "json"]].concat());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

/// A Windows node with two pods. The rules of `all` select on both sides.
const MORE: &str = "\
apiVersion: v1
kind: Node
metadata: {name: w1, labels: {kubernetes.io/os: windows}, annotations: {projectcalico.org/IPv4Address: 192.0.2.7/24}}
---
apiVersion: v1
kind: Pod
metadata: {name: win-0, namespace: shop, labels: {app: front}}
spec: {nodeName: w1, containers: [{name: c}]}
status: {podIP: 10.0.2.1}
---
apiVersion: v1
kind: Pod
metadata: {name: win-1, namespace: jobs}
spec: {nodeName: w1, containers: [{name: c}]}
status: {podIP: 10.0.2.2}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: all, namespace: shop}
spec:
  order: 1
  selector: all()
  ingress:
  - action: Allow
    protocol: TCP
    source: {selector: app == 'front'}
    destination: {selector: app == 'back'}
  - action: Deny
    notProtocol: UDP
    source: {nets: [198.51.100.0/24, 203.0.113.7/32]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: peers, namespace: shop}
spec:
  podSelector: {matchLabels: {app: front}}
  policyTypes: [Ingress]
  ingress:
  - from: [{ipBlock: {cidr: 10.9.0.0/16}}, {ipBlock: {cidr: 10.11.0.0/16}}]
    ports: [{port: 80}, {port: 53, protocol: UDP}]
  - from: [{ipBlock: {cidr: 10.13.0.0/16}}]
";

#[test]
fn a_pod_by_policy_and_rule() {
    let found = document(MORE, &["shop/win-0"]);
    let rules: Vec<Value> = found["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| {
            json!([rule["policy"], rule["rule"], rule["place"], rule["saves"]["withoutSets"]["addresses"]])
        })
        .collect();
    // Kubernetes' rules are reported as written, although the first is four for calc.
    assert!(rules.contains(&json!(["KubernetesNetworkPolicy shop/peers", 1, "p.yml:39", 4])), "{rules:?}");
    assert!(rules.contains(&json!(["KubernetesNetworkPolicy shop/peers", 2, "p.yml:41", 2])), "{rules:?}");
    // A rule about other pods only is not rendered here.
    assert!(rules.contains(&json!(["NetworkPolicy shop/all", 1, "p.yml:24", 0])), "{rules:?}");
    let because = |number: u64| {
        let is = |rule: &&Value| rule["policy"] == "NetworkPolicy shop/all" && rule["rule"] == number;
        found["rules"].as_array().unwrap().iter().find(is).unwrap()["because"].as_str().unwrap().to_owned()
    };
    assert_eq!(because(1), "it matches nothing here");
    assert!(because(2).starts_with("it is about all protocols but one"), "{}", because(2));
    let (code, out, err) = cost(MORE, &["shop/win-0"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("Pod shop/win-0, on a Windows node:\n"), "{out}");
    assert!(out.contains("To save most, change what costs most (HNS before 13):\n  rule 1 (ingress) of KubernetesNetworkPolicy shop/peers costs 4 of 17 ACLs and 4 of 10 addresses: it is 4 rules, one for each of its peers and protocols (p.yml:39)\n  rule 2 (ingress) of NetworkPolicy shop/all costs 3 of 17 ACLs"), "{out}");
    assert!(out.contains("The naive expansion leaves out 1 rule"), "{out}");
}

#[test]
fn everything_on_windows_nodes() {
    let found = document(MORE, &[]);
    assert_eq!((&found["windowsNodes"], &found["asIfOnWindows"]), (&json!(1), &json!(false)));
    let mut pods: Vec<&str> =
        found["pods"].as_array().unwrap().iter().map(|pod| pod["pod"].as_str().unwrap()).collect();
    pods.sort_unstable();
    assert_eq!(pods, ["jobs/win-1", "shop/win-0"], "the others are on Linux nodes");
    let sum = |variant: &str| -> u64 {
        found["pods"].as_array().unwrap().iter().map(|pod| pod[variant]["acls"].as_u64().unwrap()).sum()
    };
    for variant in ["withoutSets", "withSets", "naive"] {
        assert_eq!(found["total"][variant]["acls"], sum(variant), "{variant}");
    }
}

#[test]
fn a_policy_by_rule() {
    let (code, out, _) = cost("", &["networkpolicy/shop/front"]);
    assert_eq!(code, 0);
    assert!(out.starts_with("3 pods as if on Windows nodes that NetworkPolicy shop/front selects, with all of their policies:\n"), "{out}");
    assert!(
        out.contains("  rule 1 (ingress) of NetworkPolicy shop/front costs 3 of 27 ACLs and 3 of 6 addresses of the 3 pods: it is one ACL about one address or network (c.yml:67)\n"),
        "{out}"
    );
    assert!(
        out.contains("There is no Windows node, so all pods are treated as if they were on Windows nodes.\n"),
        "{out}"
    );
}

#[test]
fn unanswerable_queries_name_the_reason() {
    for (argument, expected) in [
        ("shop/nobody", "Pod shop/nobody does not exist"),
        ("shop/back/np", "is none of"),
        ("networkpolicy/shop/back", "NetworkPolicy shop/back does not exist (a Kubernetes policy is a knp)"),
        ("knp/shop/back", "KubernetesNetworkPolicy shop/back selects no pod on a Windows node"),
        ("stagednetworkpolicy/shop/back", "StagedNetworkPolicy shop/back is no policy that is in force"),
        ("a/b/c/d", "\"a/b/c/d\" is none of"),
    ] {
        let (code, out, err) = cost(MORE, &[argument]);
        assert_eq!((code, out.as_str()), (2, ""), "{argument}");
        assert!(err.contains(expected), "{argument}: {err}");
    }
}
