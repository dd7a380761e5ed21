//! Policies in forms that clusters export and users mistype: they are read or rejected, never dropped.

use crate::offline::support::tortie;
use serde_json::Value;

const PODS: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop, labels: {app: a}}
spec: {containers: [{name: c}]}
status: {podIP: 10.0.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: shop, labels: {app: b}}
spec: {containers: [{name: c, ports: [{containerPort: 80}]}]}
status: {podIP: 10.0.0.2}
---
apiVersion: v1
kind: Node
metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.1/24}}
---
";

/// Policies that deny everything into shop/b, in every form in which a cluster exports them.
const DENYING: [(&str, &str); 9] = [
    (
        "a list of one kind",
        "{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicyList, items: [{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: default.deny}, spec: {selector: all(), types: [Ingress]}}]}",
    ),
    (
        "a list of one kind whose items do not repeat it",
        "{apiVersion: projectcalico.org/v3, kind: NetworkPolicyList, items: [{metadata: {name: deny, namespace: shop}, spec: {types: [Ingress]}}]}",
    ),
    (
        "a list of Kubernetes policies",
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicyList, items: [{metadata: {name: deny, namespace: shop}, spec: {podSelector: {}}}]}",
    ),
    (
        "Calico's old group",
        "{apiVersion: crd.projectcalico.org/v1, kind: GlobalNetworkPolicy, metadata: {name: default.deny}, spec: {tier: default, selector: all(), types: [Ingress]}}",
    ),
    (
        "Calico's old group in a list",
        "{apiVersion: v1, kind: List, items: [{apiVersion: crd.projectcalico.org/v1, kind: NetworkPolicy, metadata: {name: default.deny, namespace: shop, uid: x, resourceVersion: '3', annotations: {projectcalico.org/metadata: '{}'}}, spec: {tier: default, types: [Ingress]}}]}",
    ),
    (
        "a tier and its policy, in the old group",
        "{apiVersion: v1, kind: List, items: [{apiVersion: crd.projectcalico.org/v1, kind: GlobalNetworkPolicy, metadata: {name: ops.deny}, spec: {tier: ops, selector: all(), types: [Ingress]}}, {apiVersion: crd.projectcalico.org/v1, kind: Tier, metadata: {name: ops}, spec: {order: 5}}]}",
    ),
    (
        "a list in a list",
        "{apiVersion: v1, kind: List, items: [{apiVersion: networking.k8s.io/v1, kind: NetworkPolicyList, items: [{metadata: {name: deny, namespace: shop}, spec: {podSelector: {}}}]}]}",
    ),
    (
        "Kubernetes' old group",
        "{apiVersion: extensions/v1beta1, kind: NetworkPolicy, metadata: {name: deny, namespace: shop}, spec: {podSelector: {}}}",
    ),
    (
        "exported metadata",
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny, namespace: shop, uid: x, resourceVersion: '3', generation: 1, selfLink: /x, creationTimestamp: null, managedFields: [{manager: m}], ownerReferences: [{name: x}]}, spec: {podSelector: {}}, status: {}}",
    ),
];

#[test]
fn every_form_of_a_policy_is_in_force_offline() {
    for (what, policy) in DENYING {
        let cluster = format!("{PODS}{policy}\n");
        let files = [("c.yml", cluster.as_str()), ("pods.yml", PODS), ("policy.yml", policy)];
        let (code, out, err) = tortie(&files, &["explain", "-f", "c.yml", "shop/a", "shop/b"]);
        assert_eq!(code, 1, "{what}: {out}{err}");
        assert!(out.contains("denied") && err.is_empty(), "{what}: {out}{err}");
        let (code, out, err) = tortie(&files, &["matrix", "-f", "c.yml", "--port", "tcp/80"]);
        assert!(code == 0 && out.contains("none"), "{what}: {out}{err}");
        let (code, out, err) = tortie(&files, &["policy", "lint", "-f", "c.yml", "-o", "json"]);
        assert!(code != 2, "{what}: {out}{err}");
        let (code, out, err) = tortie(&files, &["policy", "cost", "-f", "c.yml", "-o", "json"]);
        let cost: Value = serde_json::from_str(&out).unwrap();
        assert!(code == 0 && !cost["policies"].as_array().unwrap().is_empty(), "{what}: {out}{err}");
        let (code, out, err) = tortie(&files, &["preview", "--in", "pods.yml", "-f", "policy.yml"]);
        assert!(code == 1 && out.contains("allowed → denied"), "{what}: {out}{err}");
        let (code, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", "policy.yml"]);
        assert!(code == 0 && out.contains("nothing changes"), "{what}: {out}{err}");
    }
}

/// Without an answer that is certain, `apply` and `policy test` stop, and questions say so.
#[test]
fn unreadable_policies_leave_no_certain_answer() {
    for (policy, printed) in [
        (
            "apiVersion: networking.k8s.io\nkind: NetworkPolicy\nmetadata: {name: p}\nspec: {podSelector: {}}\n",
            "c.yml:21: NetworkPolicy p: apiVersion: \"networking.k8s.io\" is not a version of NetworkPolicy; write networking.k8s.io/v1",
        ),
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolcy\nmetadata: {name: p}\nspec: {podSelector: {}}\n",
            "c.yml:22: NetworkPolcy p: kind: networking.k8s.io/v1 NetworkPolcy is not known; did you mean networking.k8s.io/v1 NetworkPolicy?",
        ),
        (
            "apiVersion: projectcalico.org/v1\nkind: NetworkPolicy\nmetadata: {name: p}\n",
            "c.yml:21: NetworkPolicy p: apiVersion: projectcalico.org/v1 NetworkPolicy is not known; write projectcalico.org/v3 NetworkPolicy",
        ),
        (
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}\n",
            "c.yml:22: CiliumNetworkPolicy p: kind: cilium.io/v2 CiliumNetworkPolicy looks like policy",
        ),
        (
            "apiVersion: v1\nkind: Namspace\nmetadata: {name: p}\n",
            "c.yml:22: Namspace p: kind: v1 Namspace is not known; did you mean v1 Namespace?",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: projectcalico.org/v3\n  kind: GlobalNetworkPolicys\n  metadata: {name: p}\n",
            "c.yml:25: GlobalNetworkPolicys p: kind: projectcalico.org/v3 GlobalNetworkPolicys is not known; did you mean projectcalico.org/v3 GlobalNetworkPolicy?",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d, namespace: shop}\nspec:\n  template:\n    metadata: {labels: {app: d}}\n    spec:\n      contaners: []\n      containers: [{name: c}]\n",
            "c.yml:28: Deployment shop/d: spec.template.spec.contaners: unknown field; did you mean \"containers\"?",
        ),
    ] {
        let cluster = format!("{PODS}{policy}");
        let files = [("c.yml", cluster.as_str()), ("pods.yml", PODS), ("policy.yml", policy)];
        for arguments in [
            &["explain", "-f", "c.yml", "shop/a", "shop/b"][..],
            &["matrix", "-f", "c.yml"],
            &["policy", "lint", "-f", "c.yml"],
            &["policy", "cost", "-f", "c.yml"],
            &["preview", "--in", "c.yml", "-f", "pods.yml"],
        ] {
            let (code, out, err) = tortie(&files, arguments);
            let certain = code != 3 || out.is_empty() || !err.contains(printed);
            assert!(!certain, "{arguments:?}: {code}\n{out}{err}");
            let strict = [arguments, &["--strict"]].concat();
            let (code, out, err) = tortie(&files, &strict);
            assert!(code == 2 && out.is_empty() && err.contains(printed), "{strict:?}: {code}\n{out}{err}");
        }
        let expectations = ("e.yml", "expectations:\n- shop/a reaches shop/b\n");
        let files = [&files[..], &[expectations]].concat();
        let (code, out, err) = tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"]);
        assert!(code == 2 && out.is_empty() && err.contains(printed), "{code}\n{out}{err}");
        let (code, out, err) = tortie(&files, &["preview", "--in", "pods.yml", "-f", "policy.yml"]);
        assert!(code == 2 && out.is_empty(), "{code} {out}{err}");
    }
}

#[test]
fn objects_without_influence_on_verdicts_are_skipped_and_reported() {
    let others = "\
{apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: shop}, data: {}}
---
{apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {name: i, namespace: shop}}
---
{apiVersion: v1, kind: SecretList, items: [{metadata: {name: s1}}, {metadata: {name: s2}}]}
---
{apiVersion: projectcalico.org/v3, kind: IPAMBlock, metadata: {name: 10.0.0.0/26}}
---
{apiVersion: crd.projectcalico.org/v1, kind: BlockAffinity, metadata: {name: n1-10-0-0-0-26}}
---
{apiVersion: monitoring.coreos.com/v1, kind: ServiceMonitor, metadata: {name: m}}
";
    let cluster = format!("{PODS}{others}");
    let files = [("c.yml", cluster.as_str())];
    let (code, out, err) = tortie(&files, &["explain", "-f", "c.yml", "shop/a", "shop/b", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        err,
        "note: skipped, as no verdict depends on it: 1 BlockAffinity, 1 ConfigMap, 1 IPAMBlock, 1 Ingress, 2 Secret, 1 ServiceMonitor\n"
    );
    let document: Value = serde_json::from_str(&out).unwrap();
    let skipped = document["skipped"].as_array().unwrap();
    assert_eq!(skipped.len(), 7, "{out}");
    assert_eq!(
        skipped[0],
        serde_json::json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "place": "c.yml:21"})
    );
    for arguments in [
        &["matrix", "-f", "c.yml", "-o", "json"][..],
        &["policy", "lint", "-f", "c.yml", "-o", "json"],
        &["policy", "cost", "-f", "c.yml", "-o", "json"],
    ] {
        let (_, out, err) = tortie(&files, arguments);
        let document: Value =
            serde_json::from_str(&out).unwrap_or_else(|_| panic!("{arguments:?} {out}{err}"));
        assert_eq!(document["skipped"].as_array().unwrap().len(), 7, "{arguments:?}: {out}");
    }
}

/// As `kubectl get all` exports it: a Deployment, its ReplicaSets, and the pods of one of them.
#[test]
fn a_workload_adds_no_pods_if_its_pods_are_given() {
    let workload = |kind: &str, name: &str, owner: &str| {
        format!(
            "---\napiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop{owner}}}\nspec: {{template: {{metadata: {{labels: {{app: w}}}}, spec: {{containers: [{{name: c}}]}}}}}}\n"
        )
    };
    let owned_by = |kind: &str, name: &str| format!(", ownerReferences: [{{kind: {kind}, name: {name}}}]");
    let pod = format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: web-1-x, namespace: shop{}}}\nspec: {{containers: [{{name: c}}]}}\nstatus: {{podIP: 10.0.0.9}}\n",
        owned_by("ReplicaSet", "web-1")
    );
    let text = [
        PODS.trim_end_matches("---\n"),
        &workload("Deployment", "web", ""),
        &workload("ReplicaSet", "web-0", &owned_by("Deployment", "web")),
        &workload("ReplicaSet", "web-1", &owned_by("Deployment", "web")),
        &pod,
        &workload("Deployment", "idle", ""),
        &workload("ReplicaSet", "idle-0", &owned_by("Deployment", "idle")),
        &workload("ReplicaSet", "lone", &owned_by("Deployment", "elsewhere")),
    ]
    .concat();
    let (_, out, err) = tortie(&[("c.yml", &text)], &["matrix", "-f", "c.yml", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    let classes = document["classes"].as_array().unwrap();
    let mut members: Vec<&str> = classes
        .iter()
        .filter(|class| class["kind"] == "pods")
        .flat_map(|class| class["members"].as_array().unwrap())
        .filter_map(Value::as_str)
        .collect();
    members.sort_unstable();
    assert_eq!(members, ["shop/a", "shop/b", "shop/idle", "shop/lone", "shop/web-1-x"], "{out}");
}

/// Pools from which Tortie cannot assign addresses stop `apply`, but no command that only computes verdicts.
#[test]
fn a_pool_that_is_not_supported_stops_only_apply() {
    for (spec, printed) in [
        (
            "{cidr: 10.0.0.0/16, ipipMode: Always, vxlanMode: Always, natOutgoing: true}",
            "IPPool p: spec.ipipMode: a pool has IPIP or VXLAN",
        ),
        (
            "{cidr: 10.0.0.0/28, blockSize: 30, allowedUses: [LoadBalancer, Tunnel]}",
            "IPPool p: spec.allowedUses",
        ),
    ] {
        let pool = format!(
            "{{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {{name: p}}, spec: {spec}}}\n"
        );
        let cluster = format!("{PODS}{pool}");
        let files = [("c.yml", cluster.as_str()), ("pool.yml", pool.as_str()), ("pods.yml", PODS)];
        for arguments in [
            &["explain", "-f", "c.yml", "shop/a", "shop/b"][..],
            &["matrix", "-f", "c.yml"],
            &["policy", "lint", "-f", "c.yml"],
            &["policy", "cost", "-f", "c.yml"],
            &["preview", "--in", "c.yml", "-f", "pods.yml"],
        ] {
            let (code, out, err) = tortie(&files, arguments);
            assert!(
                code == 0 && err.contains("note: c.yml:21: ") && err.contains(printed),
                "{arguments:?}: {code} {out}{err}"
            );
        }
        let (code, _, err) = tortie(&files, &["apply", "--store", "unix:/nowhere", "-f", "pool.yml"]);
        assert!(code == 2 && err.contains("pool.yml:1: IPPool p: spec."), "{err}");
    }
    let damaged = format!(
        "{PODS}{{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {{name: p}}, spec: {{cidr: x}}}}\n"
    );
    let (code, out, err) = tortie(&[("c.yml", &damaged)], &["explain", "-f", "c.yml", "shop/a", "shop/b"]);
    assert!(
        code == 3 && out.contains("not certain") && err.contains("c.yml:21: IPPool p: spec.cidr"),
        "{err}"
    );
}

/// Calico stores a policy `x` of tier default as `default.x`: a change of `x` changes the exported policy.
#[test]
fn exported_and_written_policies_have_one_name() {
    let policy = |version: &str, name: &str, action: &str| {
        format!(
            "{{apiVersion: {version}, kind: NetworkPolicy, metadata: {{name: {name}, namespace: shop}}, spec: {{types: [Ingress], ingress: [{{action: {action}}}]}}}}\n"
        )
    };
    let exported = format!("{PODS}{}", policy("crd.projectcalico.org/v1", "default.p", "Deny"));
    let kept = policy("projectcalico.org/v3", "p", "Allow");
    let both = format!("{exported}---\n{kept}");
    let files = [("c.yml", exported.as_str()), ("p.yml", kept.as_str()), ("both.yml", both.as_str())];
    let (code, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", "p.yml"]);
    assert!(code == 1 && out.contains("denied → allowed"), "{out}{err}");
    let (_, _, err) = tortie(&files, &["explain", "-f", "both.yml", "shop/a", "shop/b"]);
    assert!(
        err.contains("NetworkPolicy shop/p and default.p are one policy in Calico's datastore, and two here"),
        "{err}"
    );
}
