//! Calico's kube-controllers run beside Tortie's: what both do is left to them, and nothing is stale when they stop.

use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::{Embedded, Store};

use crate::common::{global, memory, namespaced, pod, put, start, until, value};
use crate::copies::{endpoint, fill};

async fn deploy(kubernetes: &dyn Store, namespace: &str, replicas: u64, ready: u64) {
    let name = "calico-kube-controllers";
    let env = json!([{"name": "DATASTORE_TYPE", "value": "etcdv3"}]);
    let deployment = json!({
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"name": name, "env": env}]}}},
        "status": {"readyReplicas": ready},
    });
    put(kubernetes, &Key::namespaced(Kind::Deployment, namespace, name), deployment).await;
}

/// What Calico's kube-controllers write before they begin.
async fn state(store: &dyn Store, sections: &[&str]) {
    let sections: Value = sections.iter().map(|section| ((*section).to_owned(), json!({}))).collect();
    let enabled = json!({"controllers": {"node": {"hostEndpoint": {"autoCreate": "Enabled"}}}});
    let configuration = json!({
        "metadata": {"name": "default"}, "spec": enabled, "status": {"runningConfig": {"controllers": sections}},
    });
    put(store, &global(Kind::KubeControllersConfiguration, "default"), configuration).await;
}

async fn exists(store: &Arc<Embedded>, key: &Key) -> bool {
    store.get(key).await.unwrap().is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_calicos_controllers_copy_is_left_to_them_and_is_not_stale_when_they_stop() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    deploy(&*kubernetes, "kube-system", 1, 1).await;
    state(&*store, &["namespace", "node", "policy", "serviceAccount", "workloadEndpoint"]).await;
    let (policy, copy) =
        (namespaced(Kind::KubernetesNetworkPolicy, "p"), namespaced(Kind::NetworkPolicy, "knp.default.p"));
    let (gone, new) = (
        namespaced(Kind::NetworkPolicy, "knp.default.gone"),
        namespaced(Kind::NetworkPolicy, "knp.default.new"),
    );
    let (old_space, space) = (global(Kind::Profile, "kns.old"), global(Kind::Profile, "kns.n"));
    let workload = namespaced(Kind::WorkloadEndpoint, "ours");
    // The work of Calico's controllers, as it was when they stopped in the middle of it.
    for (key, spec) in [
        (&copy, json!({"tier": "default", "selector": "app == 'stale'", "types": ["Ingress"]})),
        (&gone, json!({"tier": "default", "selector": "all()", "types": ["Ingress"]})),
        (&old_space, json!({"labelsToApply": {"pcns.projectcalico.org/name": "old"}})),
    ] {
        put(&*store, key, json!({"metadata": {"name": key.name, "namespace": key.namespace}, "spec": spec}))
            .await;
    }
    put(&*store, &workload, endpoint(Some("u1"))).await;
    let labels = async |key: &Key| value(&*store, key).await["metadata"]["labels"].clone();
    let before = labels(&workload).await;

    let _controllers = start(store.clone(), Some(kubernetes.clone()), "me");
    until("what only Tortie copies is there", async || exists(&store, &namespaced(Kind::Pod, "w")).await)
        .await;
    // Objects that change meanwhile.
    let mut changed = value(&*kubernetes, &policy).await;
    changed["spec"]["podSelector"] = json!({"matchLabels": {"app": "y"}});
    put(&*kubernetes, &policy, changed.clone()).await;
    changed["metadata"] = json!({"name": "new", "namespace": "n"});
    put(&*kubernetes, &namespaced(Kind::KubernetesNetworkPolicy, "new"), changed).await;
    put(&*kubernetes, &namespaced(Kind::Pod, "v"), pod("v", "u2", &json!({}))).await;
    until("the new pod is copied", async || exists(&store, &namespaced(Kind::Pod, "v")).await).await;
    assert_eq!(value(&*store, &copy).await["spec"]["selector"], "app == 'stale'", "Calico writes the copy");
    assert!(exists(&store, &gone).await && exists(&store, &old_space).await, "Calico deletes copies");
    // Only Tortie knows reports of nodes; what else a vanished node has left is Calico's work.
    let (report, left) = (global(Kind::NodeReport, "gone"), global(Kind::HostEndpoint, "gone-auto-hep"));
    let created_by = json!({"projectcalico.org/created-by": "calico-kube-controllers"});
    let metadata = json!({"name": left.name, "labels": created_by});
    put(&*store, &left, json!({"metadata": metadata, "spec": {"node": "gone", "interfaceName": "*"}})).await;
    let content = json!({"metadata": {"name": "gone"}, "status": {"os": "linux", "endpoints": 0}});
    put(&*store, &report, content).await;
    until("the report of a vanished node is gone", async || !exists(&store, &report).await).await;
    assert!(exists(&store, &left).await, "Calico removes host endpoints of vanished nodes");
    assert!(!exists(&store, &new).await && !exists(&store, &space).await, "Calico creates copies");
    assert_eq!(labels(&workload).await, before, "Calico writes labels of endpoints");
    assert!(
        !exists(&store, &global(Kind::HostEndpoint, "one-auto-hep")).await,
        "Calico creates host endpoints"
    );

    deploy(&*kubernetes, "kube-system", 0, 0).await;
    until("the changed policy is copied", async || {
        let selector = value(&*store, &copy).await["spec"]["selector"].clone();
        selector == "projectcalico.org/orchestrator == 'k8s' && app == 'y'"
    })
    .await;
    until("copies without source are gone", async || {
        !exists(&store, &gone).await && !exists(&store, &old_space).await
    })
    .await;
    until("new copies are there", async || exists(&store, &new).await && exists(&store, &space).await).await;
    until("the endpoint has its labels", async || labels(&workload).await != before).await;
    until("the host endpoint of the vanished node is gone", async || !exists(&store, &left).await).await;
    let host = global(Kind::HostEndpoint, "one-auto-hep");
    until("the host endpoint is there", async || exists(&store, &host).await).await;

    // Calico's controllers are back, and one of them is disabled.
    state(&*store, &["namespace", "node", "serviceAccount", "workloadEndpoint"]).await;
    deploy(&*kubernetes, "kube-system", 1, 1).await;
    tokio::time::sleep(std::time::Duration::from_secs(4)).await;
    store.delete(&space, None).await.unwrap();
    kubernetes.delete(&policy, None).await.unwrap();
    until("the policy's copy is deleted", async || !exists(&store, &copy).await).await;
    assert!(!exists(&store, &space).await, "Calico copies namespaces");
}

#[tokio::test(flavor = "multi_thread")]
async fn controllers_of_calico_that_use_another_datastore_hold_up_nothing() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    // Nothing in this datastore says that they run.
    deploy(&*kubernetes, "calico-system", 1, 1).await;
    let _controllers = start(store.clone(), Some(kubernetes.clone()), "me");
    let copy = namespaced(Kind::NetworkPolicy, "knp.default.p");
    until("the policy is copied", async || exists(&store, &copy).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_of_this_name_in_another_namespace_holds_up_nothing() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    deploy(&*kubernetes, "n", 1, 1).await;
    state(&*store, &["policy"]).await;
    let _controllers = start(store.clone(), Some(kubernetes.clone()), "me");
    let copy = namespaced(Kind::NetworkPolicy, "knp.default.p");
    until("the policy is copied", async || exists(&store, &copy).await).await;
}
