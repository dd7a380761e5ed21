//! WorkloadEndpoints and Profiles on the real API server: derived from other objects, and published as annotations.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Positions, Resource};
use tortie_servers::programs::can_run;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::conformance::{Mirror, sample};
use tortie_store::kubernetes::Kubernetes;
use tortie_store::{Endpoints, Interest, POD_UID, Scope, Store, StoreError, Version, wait_for_labels};

use crate::kubernetes::{NEEDED, client, namespace, pod, put, start};

fn endpoint(namespace: &str, pod: &str) -> Key {
    Key::namespaced(Kind::WorkloadEndpoint, namespace, WorkloadEndpoint::name_for("one", pod, "eth0"))
}

/// Patches the status of a pod in `n` as its kubelet does.
fn set_status(servers: &KubeApi, pod: &str, status: &Value) {
    let patch = json!({ "status": status }).to_string();
    servers
        .kubectl(&["patch", "pod", pod, "-n", "n", "--subresource=status", "--type=merge", "-p", &patch])
        .unwrap();
}

fn pod_as_json(servers: &KubeApi, pod: &str) -> Value {
    serde_json::from_str(&servers.kubectl(&["get", "pod", pod, "-n", "n", "-o", "json"]).unwrap()).unwrap()
}

/// The endpoint that an agent publishes for a pod of node `one`.
fn published(pod: &str, uid: &str, container: &str, address: &str) -> WorkloadEndpoint {
    let key = endpoint("n", pod);
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": key.name, "namespace": "n", "annotations": {POD_UID: uid}},
        "spec": {"orchestrator": "k8s", "node": "one", "containerID": container, "pod": pod, "endpoint": "eth0",
            "ipNetworks": [format!("{address}/32")], "profiles": ["kns.n"], "interfaceName": "cali1"},
    });
    match Resource::read(&key, &value) {
        Ok(Resource::WorkloadEndpoint(endpoint)) => endpoint,
        other => panic!("{other:?}"),
    }
}

/// Receives everything that is stored now.
async fn catch_up(mirror: &mut Mirror, store: &Kubernetes) {
    mirror.reach(&store.barrier(&[Kind::WorkloadEndpoint]).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_are_derived_from_pods() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    namespace(&store, "n").await;
    namespace(&store, "m").await;
    let kind = Kind::WorkloadEndpoint;
    let mut mirror = Mirror::in_sync(&store, &[kind]).await;

    let created = put(&store, &pod("n", "p-1"), 1).await;
    let mut unscheduled = sample(&pod("n", "q"), 1);
    unscheduled["spec"]["nodeName"] = Value::Null;
    store.create(&pod("n", "q"), unscheduled).await.unwrap();
    let mut of_node = sample(&pod("n", "h"), 1);
    of_node["spec"]["hostNetwork"] = json!(true);
    store.create(&pod("n", "h"), of_node).await.unwrap();
    catch_up(&mut mirror, &store).await;
    assert!(mirror.objects.is_empty(), "a pod without an address has no endpoint");

    for name in ["p-1", "h"] {
        set_status(
            &servers,
            name,
            &json!({"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}),
        );
    }
    catch_up(&mut mirror, &store).await;
    let key = endpoint("n", "p-1");
    assert_eq!(key.name, "one-k8s-p--1-eth0");
    let stored = store.get(&key).await.unwrap().unwrap();
    assert_eq!(mirror.objects, [(key.clone(), stored.value.clone())].into());
    assert_eq!(store.list(kind).await.unwrap().items, std::slice::from_ref(&stored));
    assert_eq!(stored.value["metadata"]["uid"], created.value["metadata"]["uid"]);
    assert_eq!(stored.value["metadata"]["labels"]["number"], "1");
    assert_eq!(stored.value["spec"]["ipNetworks"], json!(["10.0.0.1/32"]));
    let pod_now = store.get(&pod("n", "p-1")).await.unwrap().unwrap();
    assert_eq!((&stored.version, stored.position), (&pod_now.version, pod_now.position));

    let elsewhere = Key::namespaced(kind, "n", WorkloadEndpoint::name_for("two", "p-1", "eth0"));
    for missing in [elsewhere, endpoint("m", "p-1"), endpoint("n", "h"), Key::namespaced(kind, "n", "p-1")] {
        assert_eq!(store.get(&missing).await, Ok(None), "{missing}");
        let mut mirror = Mirror::new(&store, vec![Interest::in_object(&missing)]);
        mirror.until(|mirror| mirror.in_sync.contains(&kind)).await;
        assert!(mirror.objects.is_empty(), "{missing}");
    }
    for (scope, count) in [
        (Scope::Node("one".to_owned()), 1),
        (Scope::Node("two".to_owned()), 0),
        (Scope::Namespace("n".to_owned()), 1),
        (Scope::Namespace("m".to_owned()), 0),
        (Scope::Name("n".to_owned(), key.name.clone()), 1),
    ] {
        let interest = Interest { kind, scope };
        assert_eq!(store.list_page(&interest, None).await.unwrap().items.len(), count, "{interest:?}");
        let mut mirror = Mirror::new(&store, vec![interest.clone()]);
        mirror.until(|mirror| mirror.in_sync.contains(&kind)).await;
        assert_eq!(mirror.objects.len(), count, "{interest:?}");
    }
    let relabelled =
        store.update(&pod("n", "p-1"), with_number(pod_now.value, 2), &pod_now.version).await.unwrap();
    let waited =
        wait_for_labels(&store, &pod("n", "p-1"), std::time::Duration::from_secs(100)).await.unwrap();
    assert_eq!(waited, Some(relabelled.position));

    for (result, expected) in [
        (store.create(&endpoint("n", "new"), json!({})).await.map(drop), "from its Pod"),
        (store.update(&key, json!({}), &Version::new("1")).await.map(drop), "from its Pod"),
        (store.delete(&key, None).await.map(drop), "from its Pod"),
    ] {
        let Err(StoreError::Invalid { problem, .. }) = &result else { panic!("{result:?}") };
        assert!(problem.contains(expected), "{problem}");
    }

    set_status(&servers, "p-1", &json!({"phase": "Succeeded"}));
    catch_up(&mut mirror, &store).await;
    assert!(mirror.objects.is_empty(), "a pod that has ended has no endpoint");
    assert_eq!(store.get(&key).await, Ok(None));

    put(&store, &pod("n", "r"), 1).await;
    set_status(&servers, "r", &json!({"podIPs": [{"ip": "10.0.0.2"}]}));
    catch_up(&mut mirror, &store).await;
    assert!(mirror.objects.contains_key(&endpoint("n", "r")));
    let deleted = store.delete(&pod("n", "r"), None).await.unwrap();
    mirror.reach(&[(kind, deleted)].into_iter().collect::<Positions>()).await;
    assert!(mirror.objects.is_empty());
}

fn with_number(mut pod: Value, number: u64) -> Value {
    pod["metadata"]["labels"] = json!({"number": number.to_string()});
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_are_published_as_annotations() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    namespace(&store, "n").await;
    let kind = Kind::WorkloadEndpoint;
    let mut mirror = Mirror::in_sync(&store, &[kind]).await;
    let (key, of_pod) = (endpoint("n", "p"), pod("n", "p"));
    let created = put(&store, &of_pod, 1).await;
    let uid = created.value["metadata"]["uid"].as_str().unwrap().to_owned();

    let position = store.publish(&published("p", &uid, "c1", "10.0.0.1")).await.unwrap();
    assert!(position > created.position);
    mirror.reach(&[(kind, position)].into_iter().collect()).await;
    assert_eq!(mirror.objects[&key]["spec"]["ipNetworks"], json!(["10.0.0.1/32"]));
    assert_eq!(mirror.objects[&key]["spec"]["containerID"], "c1");
    let annotations = |pod: &str| pod_as_json(&servers, pod)["metadata"]["annotations"].clone();
    let expected = |address: &str, container: &str| {
        json!({"cni.projectcalico.org/podIP": address, "cni.projectcalico.org/podIPs": address,
            "cni.projectcalico.org/containerID": container})
    };
    assert_eq!(annotations("p"), expected("10.0.0.1/32", "c1"), "as Calico's CNI plugin writes them");
    assert_eq!(
        store.publish(&published("p", &uid, "c1", "10.0.0.1")).await,
        Ok(position),
        "nothing to change"
    );

    let other = put(&store, &pod("n", "other"), 1).await;
    let again = store.publish(&published("p", &uid, "c1", "10.0.0.1")).await.unwrap();
    assert!(again >= other.position, "the position covers everything before the call");

    // An endpoint of another container stays. One that has changed since it was read is read again.
    let old = store.get(&key).await.unwrap();
    store.withdraw(old.clone(), "other").await.unwrap();
    assert_eq!(annotations("p"), expected("10.0.0.1/32", "c1"));
    store.publish(&published("p", &uid, "c2", "10.0.0.2")).await.unwrap();
    store.withdraw(old.clone(), "c1").await.unwrap();
    assert_eq!(annotations("p"), expected("10.0.0.2/32", "c2"));
    let stale = store.remove(&old.unwrap()).await;
    assert_eq!(stale, Err(StoreError::Conflict(of_pod.clone())));
    let current = store.get(&key).await.unwrap();
    let labelled = store.get(&of_pod).await.unwrap().unwrap();
    store.update(&of_pod, with_number(labelled.value, 2), &labelled.version).await.unwrap();
    for read in [current, None, store.get(&key).await.unwrap()] {
        store.withdraw(read, "c2").await.unwrap();
    }
    assert_eq!(annotations("p"), expected("", "c2"));
    catch_up(&mut mirror, &store).await;
    assert!(mirror.objects.is_empty());

    // A pod of the same name is another pod.
    store.delete(&of_pod, None).await.unwrap();
    let gone = store.publish(&published("p", &uid, "c3", "10.0.0.3")).await;
    assert_eq!(gone, Err(StoreError::NotFound(of_pod.clone())));
    let again = put(&store, &of_pod, 1).await;
    let refused = store.publish(&published("p", &uid, "c3", "10.0.0.3")).await;
    assert_eq!(refused, Err(StoreError::Conflict(of_pod.clone())));
    assert_eq!(annotations("p"), Value::Null);
    mirror.reach(&[(kind, again.position)].into_iter().collect()).await;
    assert!(mirror.objects.is_empty());

    let mut second = published("p", &uid, "c3", "10.0.0.3");
    second.spec.endpoint = "net1".to_owned();
    let mut unknown = published("p", &uid, "c3", "10.0.0.3");
    unknown.metadata.annotations.clear();
    for (endpoint, expected) in [(second, "net1"), (unknown, POD_UID)] {
        let result = store.publish(&endpoint).await;
        let Err(StoreError::Invalid { problem, .. }) = &result else { panic!("{result:?}") };
        assert!(problem.contains(expected), "{problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn profiles_are_derived_from_namespaces_and_service_accounts() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    let profile = |name: &str| Key::global(Kind::Profile, name);
    let mut mirror = Mirror::in_sync(&store, &[Kind::Profile]).await;
    let account = Key::namespaced(Kind::ServiceAccount, "n", "s");
    namespace(&store, "n").await;
    // The name of a label may have 63 characters, without the prefix of the profile.
    let labels = json!({"number": "1", "l".repeat(63): "x"});
    store.create(&account, json!({"metadata": {"labels": labels}})).await.unwrap();
    let names = ["kns.n", "ksa.n.s"];
    mirror.until(|mirror| names.iter().all(|name| mirror.objects.contains_key(&profile(name)))).await;
    let listed = store.list(Kind::Profile).await.unwrap().items;
    let listed: BTreeMap<Key, Value> = listed.into_iter().map(|stored| (stored.key, stored.value)).collect();
    assert_eq!(mirror.objects, listed);
    assert!(listed.contains_key(&profile("kns.default")));
    for name in names {
        let key = profile(name);
        let stored = store.get(&key).await.unwrap().unwrap();
        assert_eq!(stored.value, listed[&key]);
        let prefix = if name.starts_with("kns") { "pcns" } else { "pcsa" };
        let number = if prefix == "pcns" { "0" } else { "1" };
        assert_eq!(stored.value["spec"]["labelsToApply"][format!("{prefix}.number")], number);
        assert!(matches!(Resource::read(&key, &stored.value), Ok(Resource::Profile(_))));
        let refused = store.update(&key, json!({}), &stored.version).await.map(drop);
        let Err(StoreError::Invalid { problem, .. }) = &refused else { panic!("{refused:?}") };
        assert!(problem.contains("Namespace or ServiceAccount"), "{problem}");
        let mut one = Mirror::new(&store, vec![Interest::in_object(&key)]);
        one.until(|mirror| mirror.in_sync.contains(&Kind::Profile)).await;
        assert_eq!(one.objects, [(key, stored.value)].into());
    }
    assert_eq!(store.get(&profile("kns.nowhere")).await, Ok(None));
    assert_eq!(store.get(&profile("other")).await, Ok(None));

    // More than one page of each kind.
    for number in 0..501 {
        put(&store, &Key::namespaced(Kind::ServiceAccount, "n", format!("s{number}")), number).await;
    }
    assert_eq!(store.list(Kind::Profile).await.unwrap().items.len(), listed.len() + 501);
    store.delete(&account, None).await.unwrap();
    mirror.until(|mirror| !mirror.objects.contains_key(&profile("ksa.n.s"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_annotated() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    let key = Key::global(Kind::Node, "one");
    let missing = store.annotate_node("one", &BTreeMap::from([("a", None)])).await;
    assert_eq!(missing, Err(StoreError::NotFound(key.clone())));
    let created = json!({"metadata": {"annotations": {"a": "1", "b": "2"}}, "spec": {"unschedulable": true}});
    store.create(&key, created).await.unwrap();
    let changes = BTreeMap::from([("a", None), ("b", Some("3".to_owned())), ("c", Some("4".to_owned()))]);
    store.annotate_node("one", &changes).await.unwrap();
    let node = store.get(&key).await.unwrap().unwrap().value;
    assert_eq!(node["metadata"]["annotations"], json!({"b": "3", "c": "4"}));
    assert_eq!(node["spec"]["unschedulable"], true);
}
