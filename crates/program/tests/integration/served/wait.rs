//! `tortie apply --wait` and node reports, with a test in the role of the nodes.

use crate::served::support::{Cluster, LONG, SHORT, text_of};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::Store;

const POLICY: &str = "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: deny}\n\
                      spec: {selector: all(), types: [Ingress]}\n";

#[tokio::test(flavor = "multi_thread")]
async fn node_reports_about_applied_objects_decide_the_exit_code() {
    let cluster = Cluster::new().await;
    cluster.put_endpoint("n", "one").await;
    let file = cluster.file(POLICY);
    let pod = json!({"kind": "Pod", "namespace": "n", "name": "p"});
    let policy = |name: &str| json!({"kind": "GlobalNetworkPolicy", "name": name, "rule": {"direction": "Ingress", "number": 2}});
    let condition = |object: &Value, about: &[Value], reason: &str, message: &str| json!([{"object": object, "about": about, "reason": reason, "message": message}]);
    let named = json!({"kind": "GlobalNetworkPolicy", "name": "deny"});
    let table = [
        (json!([]), 0, true, "policy in force on 1 node\n"),
        // The node reaches no other one: policy is in force, and the command fails.
        (
            condition(&Value::Null, &[], "ForeignVxlanLink", "not ours"),
            0,
            false,
            "policy in force on 1 node\n",
        ),
        (
            condition(&Value::Null, &[], "ForeignVxlanLink", "not ours"),
            0,
            false,
            "may not reach each other: one (ForeignVxlanLink)\n",
        ),
        (condition(&Value::Null, &[], "CalicoLeftover", "a chain"), 0, true, "policy in force on 1 node\n"),
        (condition(&pod, &[policy("other")], "RuleNotExpressible", "no"), 3, false, "and 3 conditions more"),
        (condition(&pod, &[policy("other")], "RuleNotExpressible", "no"), 3, false, "is unknown on one"),
        (
            condition(&pod, &[policy("deny")], "RuleNotExpressible", "no"),
            0,
            false,
            "1 of these conditions is about",
        ),
        (
            condition(&pod, &[policy("deny")], "RuleNotExpressible", "no"),
            0,
            false,
            "node one: Pod n/p: RuleNotExpressible: GlobalNetworkPolicy deny, Ingress rule 2: no\n",
        ),
        (
            condition(&pod, &[policy("deny-two")], "RuleNotExpressible", "as GlobalNetworkPolicy deny"),
            0,
            true,
            "in force on 1 node\n",
        ),
        (
            condition(&named, &[], "NotUnderstood", "spec.types"),
            0,
            false,
            "node one: GlobalNetworkPolicy deny: NotUnderstood",
        ),
        (
            condition(&named, &[], "FieldNotSupported", "spec.x: no"),
            0,
            false,
            "error: not all that was applied is in force",
        ),
        (condition(&pod, &[], "InterfaceMissing", "not there"), 0, false, "not in force on one"),
    ];
    for (conditions, more, good, expected) in table {
        cluster.report_everything(conditions, more).await;
        let output = cluster.apply(&file, if good { LONG } else { SHORT }).await;
        assert_eq!(output.status.success(), good, "{}", text_of(&output));
        assert!(text_of(&output).contains(expected), "{expected:?} is not in {}", text_of(&output));
    }
    cluster.report(1, json!([]), 7).await;
    let output = cluster.apply(&file, SHORT).await;
    assert!(
        !output.status.success() && text_of(&output).contains("not in force on one"),
        "{}",
        text_of(&output)
    );
    let got = cluster.tortie(&["get", "nodereports"]).output().await.unwrap();
    assert!(text_of(&got).contains("and 7 more"), "{}", text_of(&got));
}

/// A pod's labels count once its endpoint has them, which is a later write.
#[tokio::test(flavor = "multi_thread")]
async fn a_relabelled_pod_is_in_force_when_its_endpoint_has_the_labels() {
    let cluster = Cluster::new().await;
    let key = Key::namespaced(Kind::Pod, "default", "p");
    let pod = |label: &str| {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "default", "uid": "u", "labels": {"app": label}},
            "spec": {"nodeName": "one", "containers": [{"name": "c"}]}, "status": {"phase": "Running"}})
    };
    cluster.put(&key, pod("old")).await;
    let endpoint = |uid: &str, label: &str| {
        json!({"metadata": {"annotations": {"tortie.io/pod-uid": uid}, "labels": {"app": label}},
            "spec": {"pod": "p", "node": "one"}})
    };
    let ours = Key::namespaced(Kind::WorkloadEndpoint, "default", "one-k8s-p-eth0");
    let stale = Key::namespaced(Kind::WorkloadEndpoint, "default", "two-k8s-p-eth0");
    cluster.put(&ours, endpoint("u", "old")).await;
    cluster.put(&stale, endpoint("another", "old")).await;
    cluster.report_everything(json!([]), 0).await;
    let file = cluster.file(&pod("new").to_string());
    let output = cluster.apply(&file, SHORT).await;
    assert!(!output.status.success(), "its endpoint has the old label: {}", text_of(&output));

    let position = cluster.put(&ours, endpoint("u", "new")).await;
    cluster.report(position - 1, json!([]), 0).await;
    assert!(!cluster.apply(&file, SHORT).await.status.success(), "it is not in force yet");
    cluster.report(position, json!([]), 0).await;
    let output = cluster.apply(&file, LONG).await;
    assert!(output.status.success(), "{}", text_of(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_waits_until_pods_run() {
    let cluster = Cluster::new().await;
    cluster.report_everything(json!([]), 0).await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"},
        "spec": {"nodeName": "one", "containers": [{"name": "c"}]}});
    let file = cluster.file(&pod.to_string());
    let output = cluster.apply(&file, SHORT).await;
    let told = "after 2 seconds Pod default/p does not run: no node has started it yet";
    assert!(!output.status.success() && text_of(&output).contains(told), "{}", text_of(&output));
    assert!(!text_of(&output).contains("in force on"), "{}", text_of(&output));

    let key = Key::namespaced(Kind::Pod, "default", "p");
    for (phase, good) in [("Pending", false), ("Running", true), ("Succeeded", true)] {
        let mut value = cluster.store.get(&key).await.unwrap().unwrap().value;
        value["status"] = json!({"phase": phase, "message": "no address is left"});
        cluster.put(&key, value).await;
        let output = cluster.apply(&file, if good { LONG } else { SHORT }).await;
        assert_eq!(output.status.success(), good, "{phase}: {}", text_of(&output));
        assert_eq!(text_of(&output).contains("does not run: no address is left"), !good, "{phase}");
    }
}

/// A policy concerns the nodes with endpoints that it selects, or selected before; the others are neither waited for nor
/// asked. Anything else may concern every node.
#[tokio::test(flavor = "multi_thread")]
async fn policies_are_waited_for_on_the_nodes_of_endpoints_that_they_select() {
    let cluster = Cluster::new().await;
    for name in ["two", "three", "four"] {
        cluster.put(&Key::global(Kind::Node, name), json!({"metadata": {"name": name}})).await;
    }
    for (name, team) in [("a", "x"), ("b", "y")] {
        let namespace = json!({"metadata": {"name": name, "labels": {"team": team}}});
        cluster.put(&Key::global(Kind::Namespace, name), namespace).await;
    }
    for (namespace, node) in [("a", "one"), ("b", "two")] {
        cluster.put_endpoint(namespace, node).await;
    }
    let host = json!({"metadata": {"name": "h", "labels": {"role": "host"}}, "spec": {"node": "three", "interfaceName": "*"}});
    cluster.put(&Key::global(Kind::HostEndpoint, "h"), host).await;

    let calico = |kind: &str, namespace: &str, spec: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: p, namespace: {namespace}}}\nspec: {{{spec}}}\n"
        )
    };
    let global = |spec: &str| calico("GlobalNetworkPolicy", "''", spec);
    let kubernetes = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: b}\n\
                      spec: {podSelector: {matchLabels: {app: b}}}\n";
    let set = calico("GlobalNetworkSet", "''", "nets: [10.9.0.0/16]");
    let table = [
        (calico("NetworkPolicy", "a", "selector: app == 'a'"), "on one"),
        (calico("NetworkPolicy", "a", "selector: app == 'b'"), "on one"),
        (calico("NetworkPolicy", "a", "selector: app == 'c'"), "no pod and no host endpoint is selected"),
        (kubernetes.to_owned(), "on two"),
        (global("selector: has(nothing)"), "no pod and no host endpoint is selected"),
        (global("selector: app == 'b'"), "on two"),
        (global("selector: app == 'a'"), "on one, two"),
        (global("selector: app == 'a', types: [Egress]"), "on one"),
        (global("namespaceSelector: team == 'y'"), "on one, two"),
        (global("selector: has(role), applyOnForward: true"), "on three, two"),
        (global("selector: has(role), preDNAT: true, applyOnForward: true, types: [Ingress]"), "on three"),
        (global("selector: all()"), "on one, three, two"),
        (global("selector: has(nothing)") + "---\n" + &set, "on four, one, three, two"),
    ];
    for (manifest, expected) in table {
        let output = cluster.apply(&cluster.file(&manifest), "0").await;
        let printed = text_of(&output);
        let expected = match expected.starts_with("on ") {
            true => format!("it is not in force {expected}\n"),
            false => expected.to_owned(),
        };
        assert!(printed.contains(&expected), "{expected}:\n{manifest}\n{printed}");
    }

    let damaged = Key::namespaced(Kind::WorkloadEndpoint, "a", "damaged");
    cluster.put(&damaged, json!({"metadata": {"name": "damaged", "namespace": "a"}, "spec": 1})).await;
    let output = cluster.apply(&cluster.file(kubernetes), "0").await;
    assert!(text_of(&output).contains("on four, one, three, two"), "{}", text_of(&output));
}
