//! Copies between two stores in memory.

use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::{COPIED_FROM, Embedded, Store};

use crate::common::{Disturbed, everything, global, memory, namespaced, pod, put, start, until, value};

/// A Namespace that stays.
const SYSTEM: &str = "kube-system";

/// A small cluster, as in the Kubernetes API.
pub(crate) async fn fill(kubernetes: &dyn Store) {
    let metadata = |name: &str, more: Value| {
        let mut metadata = json!({"name": name, "uid": format!("uid-{name}"), "labels": {"a": "b"}});
        metadata.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"metadata": metadata})
    };
    put(kubernetes, &global(Kind::Namespace, "n"), metadata("n", json!({}))).await;
    put(kubernetes, &namespaced(Kind::ServiceAccount, "s"), metadata("s", json!({"namespace": "n"}))).await;
    let mut node = metadata("one", json!({}));
    node["status"] = json!({"addresses": [
        {"type": "InternalIP", "address": "192.0.2.1"}, {"type": "ExternalIP", "address": "2001:db8::1"},
        {"type": "Hostname", "address": "one"}, {"type": "InternalDNS", "address": "192.0.2.2"},
    ]});
    put(kubernetes, &global(Kind::Node, "one"), node).await;
    let mut policy = metadata("p", json!({"namespace": "n"}));
    policy["spec"] = json!({"podSelector": {"matchLabels": {"app": "x"}}, "ingress": [{}]});
    put(kubernetes, &namespaced(Kind::KubernetesNetworkPolicy, "p"), policy).await;
    let mut policy = metadata("cnp", json!({}));
    policy["spec"] = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}});
    put(kubernetes, &global(Kind::ClusterNetworkPolicy, "cnp"), policy).await;
    put(kubernetes, &namespaced(Kind::Pod, "w"), pod("w", "u1", &json!({"app": "x"}))).await;
}

pub(crate) fn endpoint(uid: Option<&str>) -> Value {
    let annotations = uid.map_or(json!({}), |uid| json!({"tortie.io/pod-uid": uid}));
    json!({"metadata": {"name": "e", "namespace": "n", "labels": {"app": "x"}, "annotations": annotations},
        "spec": {"orchestrator": "k8s", "node": "one", "pod": "w", "ipNetworks": ["10.0.0.5/32"]}})
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_the_kubernetes_api_are_copied_as_calico_does() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    let (ours, calicos, stale) = (
        namespaced(Kind::WorkloadEndpoint, "ours"),
        namespaced(Kind::WorkloadEndpoint, "calicos"),
        namespaced(Kind::WorkloadEndpoint, "stale"),
    );
    put(&*store, &ours, endpoint(Some("u1"))).await;
    put(&*store, &calicos, endpoint(None)).await;
    put(&*store, &stale, endpoint(Some("u0"))).await;
    let running = start(store.clone(), Some(kubernetes.clone()), "me");
    until("the pod is copied", async || store.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some())
        .await;

    let from = |text: &str| json!({COPIED_FROM: text});
    let allow = json!([{"action": "Allow"}]);
    let expected = [
        (
            global(Kind::Profile, "kns.n"),
            json!({"apiVersion": "projectcalico.org/v3", "kind": "Profile",
                "metadata": {"name": "kns.n"},
                "spec": {"ingress": allow, "egress": allow, "labelsToApply": {"pcns.a": "b", "pcns.projectcalico.org/name": "n"}}}),
        ),
        (
            global(Kind::Profile, "ksa.n.s"),
            json!({"apiVersion": "projectcalico.org/v3", "kind": "Profile",
                "metadata": {"name": "ksa.n.s"},
                "spec": {"labelsToApply": {"pcsa.a": "b", "pcsa.projectcalico.org/name": "s"}}}),
        ),
        (
            namespaced(Kind::NetworkPolicy, "knp.default.p"),
            json!({"apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy",
                "metadata": {"name": "knp.default.p", "namespace": "n"},
                "spec": {"tier": "default", "order": 1000.0, "types": ["Ingress"],
                    "selector": "projectcalico.org/orchestrator == 'k8s' && app == 'x'",
                    "ingress": [{"action": "Allow", "source": {}, "destination": {}}]}}),
        ),
        (
            global(Kind::Namespace, "n"),
            json!({"apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": "n", "uid": "uid-n", "labels": {"a": "b"}, "annotations": from("namespaces/n")}}),
        ),
        (
            namespaced(Kind::ServiceAccount, "s"),
            json!({"apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {"name": "s", "namespace": "n", "uid": "uid-s", "labels": {"a": "b"}, "annotations": from("serviceaccounts/n/s")}}),
        ),
        (
            global(Kind::ClusterNetworkPolicy, "cnp"),
            json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
                "metadata": {"name": "cnp", "uid": "uid-cnp", "labels": {"a": "b"}, "annotations": from("clusternetworkpolicies/cnp")},
                "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}}}),
        ),
        (
            namespaced(Kind::Pod, "w"),
            json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "w", "namespace": "n", "uid": "u1", "labels": {"app": "x"}, "annotations": from("pods/n/w")},
                "spec": {"nodeName": "one", "serviceAccountName": "s", "containers":
                    [{"name": "c", "ports": [{"containerPort": 80, "name": "http"}]}]},
                "status": {"phase": "Running", "podIP": "10.0.0.5"}}),
        ),
        (
            global(Kind::Node, "one"),
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one", "labels": {"a": "b"}, "annotations": {
                    COPIED_FROM: "nodes/one", "projectcalico.org/kube-labels": r#"{"a":"b"}"#,
                    "projectcalico.org/IPv4Address": "192.0.2.1", "tortie.io/announced-address": "192.0.2.1"}},
                "spec": {"orchRefs": [{"nodeName": "one", "orchestrator": "k8s"}], "addresses": [
                    {"address": "192.0.2.1", "type": "InternalIP"}, {"address": "2001:db8::1", "type": "ExternalIP"},
                    {"address": "192.0.2.2", "type": "InternalDNS"}]}}),
        ),
    ];
    for (key, expected) in &expected {
        assert_eq!(value(&*store, key).await, *expected, "{key}");
    }
    let labels = async |key: &Key| value(&*store, key).await["metadata"]["labels"].clone();
    let with = |app: &str| {
        json!({"app": app, "projectcalico.org/namespace": "n", "projectcalico.org/orchestrator": "k8s",
            "projectcalico.org/serviceaccount": "s"})
    };
    for key in [&ours, &calicos] {
        until("the endpoint has its labels", async || labels(key).await == with("x")).await;
    }
    put(&*kubernetes, &namespaced(Kind::Pod, "w"), pod("w", "u1", &json!({"app": "y"}))).await;
    for key in [&ours, &calicos] {
        until("the endpoint has its new labels", async || labels(key).await == with("y")).await;
    }
    assert_eq!(labels(&stale).await, json!({"app": "x"}), "an endpoint of an earlier pod of this name");

    // Objects that go. A Kubernetes API always has a Namespace.
    let is_gone = |key: &Key| key.kind != Kind::Node;
    let all: Vec<Key> = everything(&*kubernetes).await.into_keys().filter(is_gone).collect();
    put(&*kubernetes, &global(Kind::Namespace, SYSTEM), json!({"metadata": {"name": SYSTEM}})).await;
    for key in all {
        kubernetes.delete(&key, None).await.unwrap();
    }
    for (key, _) in expected.iter().filter(|(key, _)| key.kind != Kind::Node) {
        until("the copy is gone", async || store.get(key).await.unwrap().is_none()).await;
    }
    drop(running);
}

/// The addresses of a node that came from Kubernetes change, also if its labels are not copied; others stay.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_nodes_are_copied() {
    let (kubernetes, store) = (memory(), memory());
    let key = global(Kind::Node, "one");
    let listed = |kind: &str, addresses: &[&str]| -> Vec<Value> {
        addresses.iter().map(|address| json!({"address": address, "type": kind})).collect()
    };
    let node = |addresses: &[&str]| json!({"metadata": {"name": "one"}, "status": {"addresses": listed("InternalIP", addresses)}});
    put(&*kubernetes, &key, node(&["192.0.2.1"])).await;
    let calicos = listed("CalicoNodeIP", &["192.0.2.9"]);
    let spec = json!({"orchRefs": [{"nodeName": "one", "orchestrator": "k8s"}], "addresses": calicos});
    put(&*store, &key, json!({"metadata": {"name": "one", "labels": {"own": "x"}}, "spec": spec})).await;
    let settings = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"node": {"syncLabels": "Disabled"}}}});
    put(&*store, &global(Kind::KubeControllersConfiguration, "default"), settings).await;
    let _running = start(store.clone(), Some(kubernetes.clone()), "me");
    let now = async || value(&*store, &key).await["spec"]["addresses"].clone();
    let with = |addresses: &[&str]| json!([listed("InternalIP", addresses), calicos.clone()].concat());
    until("an address is added", async || now().await == with(&["192.0.2.1"])).await;
    put(&*kubernetes, &key, node(&["192.0.2.2", "2001:db8::2"])).await;
    until("addresses change", async || now().await == with(&["192.0.2.2", "2001:db8::2"])).await;
    put(&*kubernetes, &key, node(&[])).await;
    until("addresses go", async || now().await == with(&[])).await;
    assert_eq!(value(&*store, &key).await["metadata"]["labels"], json!({"own": "x"}));
}

/// The labels of a node that came from Kubernetes change; others stay.
#[tokio::test(flavor = "multi_thread")]
async fn labels_of_nodes_are_copied_unless_the_settings_say_otherwise() {
    let (kubernetes, store) = (memory(), memory());
    let node = global(Kind::Node, "one");
    let labels = |labels: Value| json!({"metadata": {"name": "one", "labels": labels}});
    put(&*kubernetes, &node, labels(json!({"a": "1", "b": "1"}))).await;
    let calicos = json!({"metadata": {"name": "one", "labels": {"own": "x", "a": "0"}, "annotations": {"projectcalico.org/IPv4VXLANTunnelAddr": "10.0.0.1"}},
        "spec": {"orchRefs": [{"nodeName": "one", "orchestrator": "k8s"}], "other": 1}});
    put(&*store, &node, calicos).await;
    put(&*store, &global(Kind::Node, "foreign"), labels(json!({"own": "x"}))).await;
    put(&*kubernetes, &global(Kind::Node, "foreign"), labels(json!({"a": "1"}))).await;
    let _running = start(store.clone(), Some(kubernetes.clone()), "me");
    let now = async || value(&*store, &node).await["metadata"]["labels"].clone();
    until("labels are added", async || now().await == json!({"own": "x", "a": "1", "b": "1"})).await;
    put(&*kubernetes, &node, labels(json!({"a": "2"}))).await;
    until("labels change and go", async || now().await == json!({"own": "x", "a": "2"})).await;
    let after = value(&*store, &node).await;
    assert_eq!(after["spec"]["other"], 1);
    assert_eq!(after["metadata"]["annotations"]["projectcalico.org/IPv4VXLANTunnelAddr"], "10.0.0.1");
    assert_eq!(
        value(&*store, &global(Kind::Node, "foreign")).await,
        labels(json!({"own": "x"})),
        "a node of no orchestrator"
    );

    let settings = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"node": {"syncLabels": "Disabled"}}}});
    put(&*store, &global(Kind::KubeControllersConfiguration, "default"), settings).await;
    // The settings come before what is stored after them, of whatever kind.
    put(&*kubernetes, &global(Kind::Node, "two"), labels(json!({}))).await;
    until("a new node is copied", async || store.get(&global(Kind::Node, "two")).await.unwrap().is_some())
        .await;
    put(&*kubernetes, &node, labels(json!({"a": "3"}))).await;
    put(&*kubernetes, &global(Kind::Node, "three"), labels(json!({}))).await;
    until("the next one, too", async || store.get(&global(Kind::Node, "three")).await.unwrap().is_some())
        .await;
    assert_eq!(now().await, json!({"own": "x", "a": "2"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_else_created_is_never_touched() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    let foreign = [
        (global(Kind::Profile, "mine"), json!({"metadata": {"name": "mine"}, "spec": {}})),
        (namespaced(Kind::NetworkPolicy, "q"), json!({"metadata": {}, "spec": {}})),
        (global(Kind::GlobalNetworkPolicy, "knp.default.p"), json!({"metadata": {}, "spec": {}})),
        (namespaced(Kind::Pod, "w"), json!({"metadata": {"name": "w", "labels": {}}, "spec": {}})),
        (namespaced(Kind::Pod, "v"), json!({"metadata": {"name": "v"}, "spec": {}})),
        (global(Kind::Namespace, "damaged"), json!("damaged")),
        (
            global(Kind::HostEndpoint, "one-auto-hep"),
            json!({"metadata": {"labels": {}}, "spec": {"node": "one"}}),
        ),
    ];
    for (key, value) in &foreign {
        put(&*store, key, value.clone()).await;
    }
    let running = start(store.clone(), Some(kubernetes.clone()), "me");
    until("others are copied", async || store.get(&global(Kind::Node, "one")).await.unwrap().is_some()).await;
    let all = everything(&*kubernetes).await;
    put(&*kubernetes, &global(Kind::Namespace, SYSTEM), json!({"metadata": {"name": SYSTEM}})).await;
    for key in all.into_keys() {
        kubernetes.delete(&key, None).await.unwrap();
    }
    let copies = async || {
        let mut all = everything(&*store).await;
        all.retain(|key, _| !key.name.ends_with(SYSTEM) && key.namespace != SYSTEM);
        all.values().filter(|value| value["metadata"]["annotations"][COPIED_FROM].is_string()).count()
    };
    // The Node stays for the grace period, and for ever if there is no other.
    until("the copies are gone", async || copies().await == 1).await;
    for key in [global(Kind::Profile, "kns.n"), namespaced(Kind::NetworkPolicy, "knp.default.p")] {
        until("copies of Calico's kinds, too", async || store.get(&key).await.unwrap().is_none()).await;
    }
    for (key, expected) in &foreign {
        assert_eq!(value(&*store, key).await, *expected, "{key}");
    }
    drop(running);
}

/// Names that Calico's kube-controllers reserve, with what these wrote before they were stopped: a policy that has changed since, and objects
/// whose sources are gone.
#[tokio::test(flavor = "multi_thread")]
async fn the_copies_of_calicos_controllers_are_continued() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    let fresh = memory();
    let first = start(fresh.clone(), Some(kubernetes.clone()), "other");
    until("the pod is copied", async || fresh.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some())
        .await;
    drop(first);
    let of_calico = |name: &str| {
        json!({"metadata": {"name": name, "uid": format!("of-calico-{name}"), "labels": {"projectcalico.org/tier": "default"}},
            "spec": {"order": 1, "selector": "all()"}})
    };
    let kept = [
        global(Kind::Profile, "kns.n"),
        global(Kind::Profile, "ksa.n.s"),
        namespaced(Kind::NetworkPolicy, "knp.default.p"),
    ];
    let gone = [
        global(Kind::Profile, "kns.gone"),
        global(Kind::Profile, "ksa.n.gone"),
        namespaced(Kind::NetworkPolicy, "knp.default.gone"),
    ];
    for key in kept.iter().chain(&gone) {
        put(&*store, key, of_calico(&key.name)).await;
    }
    let _running = start(store.clone(), Some(kubernetes.clone()), "me");
    for key in &gone {
        until("what has no source is gone", async || store.get(key).await.unwrap().is_none()).await;
    }
    for key in &kept {
        let expected = value(&*fresh, key).await;
        until("a copy has the content of its source", async || {
            value(&*store, key).await["spec"] == expected["spec"]
        })
        .await;
        let metadata = value(&*store, key).await["metadata"].clone();
        assert_eq!(metadata["uid"], format!("of-calico-{}", key.name), "Calico's client refuses another one");
        assert_eq!(metadata.get("annotations"), None, "Calico's controllers write none, and would remove it");
    }
    kubernetes.delete(&namespaced(Kind::KubernetesNetworkPolicy, "p"), None).await.unwrap();
    until("a continued copy goes with its source", async || store.get(&kept[2]).await.unwrap().is_none())
        .await;
}

/// A list that lacks objects deletes nothing, because each object is looked up first.
/// The policies of pods that run must not go.
#[tokio::test(flavor = "multi_thread")]
async fn a_kubernetes_api_that_has_lost_its_data_deletes_nothing() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    let _running = start(store.clone(), Some(kubernetes.clone()), "me");
    until("the pod is copied", async || store.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some())
        .await;
    let all = everything(&*kubernetes).await;
    let (namespaces, others): (Vec<Key>, Vec<Key>) =
        all.into_keys().partition(|key| key.kind == Kind::Namespace);
    for key in namespaces.iter().chain(&others) {
        kubernetes.delete(key, None).await.unwrap();
    }
    let before = everything(&*store).await;
    assert!(before.contains_key(&namespaced(Kind::NetworkPolicy, "knp.default.p")));
    // As soon as there is a Namespace again, the others go.
    put(&*kubernetes, &global(Kind::Namespace, SYSTEM), json!({"metadata": {"name": SYSTEM}})).await;
    let gone = namespaced(Kind::NetworkPolicy, "knp.default.p");
    until("the policy is gone", async || store.get(&gone).await.unwrap().is_none()).await;
}

/// Controllers with the kubeconfig of another cluster.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_of_another_cluster_deletes_nothing() {
    let (kubernetes, other, store) = (memory(), memory(), memory());
    fill(&*kubernetes).await;
    let system = global(Kind::Namespace, SYSTEM);
    let of = |uid: &str| json!({"metadata": {"name": SYSTEM, "uid": uid}});
    put(&*kubernetes, &system, of("one")).await;
    put(&*other, &system, of("other")).await;
    let first = start(store.clone(), Some(kubernetes.clone()), "me");
    until("the pod is copied", async || store.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some())
        .await;
    until("the namespace is copied", async || store.get(&system).await.unwrap().is_some()).await;
    drop(first);
    // It has no mark of Tortie's, as those of Calico's controllers.
    let policy = namespaced(Kind::NetworkPolicy, "knp.default.p");
    let before = value(&*store, &policy).await;
    let wrong = start(store.clone(), Some(other.clone()), "me");
    put(&*other, &global(Kind::Namespace, "sign"), json!({"metadata": {"name": "sign"}})).await;
    let sign = global(Kind::Profile, "kns.sign");
    until("what is new is copied", async || store.get(&sign).await.unwrap().is_some()).await;
    // A second one comes after a round in which deletions were due.
    put(&*other, &global(Kind::Namespace, "sign2"), json!({"metadata": {"name": "sign2"}})).await;
    let sign = global(Kind::Profile, "kns.sign2");
    until("the next one, too", async || store.get(&sign).await.unwrap().is_some()).await;
    assert_eq!(value(&*store, &policy).await, before);
    assert_eq!(
        value(&*store, &system).await["metadata"]["uid"],
        "one",
        "it stays what tells the clusters apart"
    );
    // The operator says that this is the cluster now.
    store.delete(&system, None).await.unwrap();
    until("what the API lacks is gone", async || store.get(&policy).await.unwrap().is_none()).await;
    drop(wrong);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_lacks_an_object_deletes_nothing() {
    let (kubernetes, store) = (memory(), memory());
    fill(&*kubernetes).await;
    let first = start(store.clone(), Some(kubernetes.clone()), "me");
    until("the pod is copied", async || store.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some())
        .await;
    drop(first);
    let before = everything(&*store).await;
    let lying = Arc::new(Disturbed::new(kubernetes.clone()));
    let all: Vec<Key> = everything(&*kubernetes).await.into_keys().collect();
    all.into_iter().for_each(|key| lying.hide(key));
    put(&*kubernetes, &global(Kind::Namespace, "sign"), json!({"metadata": {"name": "sign"}})).await;
    kubernetes.delete(&namespaced(Kind::KubernetesNetworkPolicy, "p"), None).await.unwrap();
    // The same process again, so that it need not wait for the Lease.
    let _second = start(store.clone(), Some(lying), "me");
    let gone = namespaced(Kind::NetworkPolicy, "knp.default.p");
    until("what is gone is deleted", async || store.get(&gone).await.unwrap().is_none()).await;
    until("what is new is copied", async || {
        store.get(&global(Kind::Profile, "kns.sign")).await.unwrap().is_some()
    })
    .await;
    let after = everything(&*store).await;
    for (key, value) in before.iter().filter(|(key, _)| **key != gone) {
        assert_eq!(after.get(key), Some(value), "{key}");
    }
}

/// Whatever write is the last one, the next controllers complete the work.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_any_two_writes_loses_nothing() {
    let kubernetes = memory();
    fill(&*kubernetes).await;
    let prepare = async || -> Arc<Embedded> {
        let store = memory();
        put(&*store, &namespaced(Kind::WorkloadEndpoint, "e"), endpoint(Some("u1"))).await;
        let left = json!({"metadata": {"name": "kns.old", "annotations": {COPIED_FROM: "namespaces/old"}}, "spec": {}});
        put(&*store, &global(Kind::Profile, "kns.old"), left).await;
        store
    };
    let is_complete = async |store: &Embedded| {
        let endpoint = value(store, &namespaced(Kind::WorkloadEndpoint, "e")).await;
        let gone = store.get(&global(Kind::Profile, "kns.old")).await.unwrap().is_none();
        store.get(&namespaced(Kind::Pod, "w")).await.unwrap().is_some()
            && endpoint["metadata"]["labels"]["projectcalico.org/namespace"] == "n"
            && gone
    };
    let whole = prepare().await;
    let running = start(whole.clone(), Some(kubernetes.clone()), "me");
    until("all is copied", async || is_complete(&whole).await).await;
    drop(running);
    let expected = everything(&*whole).await;
    let mut writes = 0;
    loop {
        let store = prepare().await;
        let crashing = Arc::new(Disturbed::crashing_after(store.clone(), writes));
        let running = start(crashing.clone(), Some(kubernetes.clone()), "me");
        until("it crashes or completes", async || crashing.has_crashed() || is_complete(&store).await).await;
        drop(running);
        let _running = start(store.clone(), Some(kubernetes.clone()), "me");
        until("all is copied", async || everything(&*store).await == expected).await;
        if !crashing.has_crashed() {
            break;
        }
        writes += 1;
    }
    assert!(writes >= 10, "{writes}");
}
