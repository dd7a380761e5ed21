//! `tortie diff`: what apply would change.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::served::support::{Cluster, text_of};

const POLICY: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec: {selector: app == 'web', types: [Ingress], order: 10}
";

const PODS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {nodeName: one, containers: [{name: c}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop, labels: {app: client}}
spec: {nodeName: one, containers: [{name: c}]}
";

/// The exit code and standard output.
async fn diff(cluster: &Cluster, manifest: &str, more: &[&str]) -> (i32, String) {
    let file = cluster.file(manifest).display().to_string();
    let arguments = [&["diff", "-f", &file], more].concat();
    let output = cluster.tortie(&arguments).output().await.unwrap();
    (output.status.code().unwrap(), text_of(&output))
}

async fn put_endpoint(cluster: &Cluster, pod: &str, address: &str) {
    let name = format!("one-k8s-{pod}-eth0");
    let spec = json!({"orchestrator": "k8s", "node": "one", "pod": pod, "endpoint": "eth0",
        "ipNetworks": [format!("{address}/32")], "profiles": ["kns.shop"]});
    let labels =
        json!({"app": pod, "projectcalico.org/namespace": "shop", "projectcalico.org/orchestrator": "k8s"});
    let value = json!({"apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": name, "namespace": "shop", "labels": labels}, "spec": spec});
    cluster.put(&Key::namespaced(Kind::WorkloadEndpoint, "shop", name), value).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_objects_and_verdicts_are_shown() {
    let cluster = Cluster::new().await;
    let file = cluster.file(PODS).display().to_string();
    let applied = cluster.tortie(&["apply", "-f", &file]).output().await.unwrap();
    assert!(applied.status.success(), "{}", text_of(&applied));
    put_endpoint(&cluster, "web", "10.0.0.1").await;
    put_endpoint(&cluster, "client", "10.0.0.2").await;

    let (code, out) = diff(&cluster, POLICY, &[]).await;
    assert_eq!(code, 1, "{out}");
    for expected in [
        "--- NetworkPolicy shop/web (does not exist)\n+++ NetworkPolicy shop/web (",
        "+  order: 10\n",
        "verdicts:\n",
        "allowed → denied",
    ] {
        assert!(out.contains(expected), "{expected:?} is missing in\n{out}");
    }
    let key = Key::namespaced(Kind::NetworkPolicy, "shop", "web");
    assert!(cluster.store.get(&key).await.unwrap().is_none(), "nothing is stored");

    let file = cluster.file(POLICY).display().to_string();
    cluster.tortie(&["apply", "-f", &file]).output().await.unwrap();
    assert_eq!(diff(&cluster, POLICY, &[]).await, (0, String::new()));

    let (code, out) = diff(&cluster, &POLICY.replace("order: 10", "order: 20"), &[]).await;
    assert!(code == 1 && out.contains("-  order: 10\n+  order: 20\n"), "{out}");
    assert!(out.contains("verdicts:\nnothing changes: every flow keeps its verdict\n"), "{out}");

    let open = POLICY.replace("order: 10", "order: 10, ingress: [{action: Allow}]");
    let (code, out) = diff(&cluster, &open, &["--no-verdicts"]).await;
    assert!(code == 1 && !out.contains("verdicts"), "{out}");
    let (code, out) = diff(&cluster, &open, &["-o", "json"]).await;
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &document["objects"][0]["object"]), (1, &json!("NetworkPolicy shop/web")));
    assert_eq!(document["verdicts"]["changes"].as_array().unwrap().len(), 2, "{out}");
    assert_eq!(document["objects"][0]["after"]["spec"]["ingress"], json!([{"action": "Allow"}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_apply_refuses_has_no_difference() {
    let cluster = Cluster::new().await;
    for (manifest, expected) in [
        (POLICY.replace("order: 10", "tier: nosuch"), "tier nosuch does not exist"),
        (POLICY.replace("order: 10", "oder: 10"), "unknown field `oder`"),
        ("apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: p}\nspec: {cidr: 10.0.0.0/16, ipipMode: Always, vxlanMode: Always}\n".to_owned(), "spec.ipipMode"),
    ] {
        let (code, out) = diff(&cluster, &manifest, &[]).await;
        assert!(code == 2 && out.contains(expected), "{code} {out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_has_a_man_page() {
    let cluster = Cluster::new().await;
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let output = cluster.tortie(&["man", pages.to_str().unwrap()]).output().await.unwrap();
    assert!(output.status.success(), "{}", text_of(&output));
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    assert!(page("tortie.1").contains("tortie\\-diff(1)"), "{}", page("tortie.1"));
    assert!(page("tortie-diff.1").contains("\\-\\-no\\-verdicts"));
}
