//! What the controllers write to a real etcd, by the rules of Calico's client.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::calico_client;
use tortie_api::{Key, Kind};
use tortie_servers::Etcd as EtcdServers;
use tortie_servers::programs::{Program, can_run};
use tortie_store::Store;
use tortie_store::etcd::{Etcd, EtcdConfig};

use crate::common::{global, memory, namespaced, put, start, until, value};
use crate::copies::{endpoint, fill};

const RESOURCES: &str = "/calico/resources/v3/projectcalico.org/";

/// Everything of Calico's resources in etcd, by key.
fn resources(servers: &EtcdServers) -> Vec<(String, Value)> {
    let text = servers.etcdctl(&["get", "--prefix", RESOURCES]).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    lines.chunks(2).map(|pair| (pair[0].to_owned(), serde_json::from_str(pair[1]).unwrap())).collect()
}

/// The problems of all objects.
fn problems(servers: &EtcdServers) -> Vec<String> {
    resources(servers).iter().flat_map(|(key, value)| calico_client::problems(key, value)).collect()
}

/// The position of the last write.
async fn revision(servers: &EtcdServers) -> u64 {
    let text = servers.etcdctl(&["get", "x", "-w", "json"]).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["header"]["revision"].as_u64().unwrap()
}

/// Waits until nothing has been written for a second, and returns the revision.
async fn at_rest(servers: &EtcdServers) -> u64 {
    let mut last = revision(servers).await;
    until("the controllers come to rest", async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = std::mem::replace(&mut last, revision(servers).await);
        before == last
    })
    .await;
    last
}

/// Objects of earlier versions of Tortie, which had no identity, and copies of Calico's kube-controllers.
fn left_by_others() -> Vec<(String, Value)> {
    let key = |rest: &str| format!("{RESOURCES}{rest}");
    let object = |kind: &str, metadata: Value, spec: Value| json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": metadata, "spec": spec});
    let mut pod = endpoint(Some("u1"));
    pod["apiVersion"] = json!("projectcalico.org/v3");
    pod["kind"] = json!("WorkloadEndpoint");
    vec![
        (
            key("nodes/one"),
            object(
                "Node",
                json!({"name": "one", "labels": {"own": "x"}}),
                json!({"bgp": {"asNumber": 64_601}, "orchRefs": [{"nodeName": "one", "orchestrator": "k8s"}]}),
            ),
        ),
        (key("ippools/p"), object("IPPool", json!({"name": "p"}), json!({"cidr": "10.0.0.0/16"}))),
        (key("workloadendpoints/n/e"), pod),
        (
            key("networkpolicies/n/knp.default.p"),
            object(
                "NetworkPolicy",
                json!({"name": "knp.default.p", "namespace": "n", "uid": "9d6ba87f-0000-4000-8000-000000000000",
                    "creationTimestamp": "2026-11-01T00:00:00Z"}),
                json!({"order": 1, "selector": "all()"}),
            ),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn calicos_client_can_update_what_the_controllers_write_and_repair() {
    if !can_run(&[Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let servers = EtcdServers::start().unwrap();
    let config = EtcdConfig { endpoints: servers.endpoints(), tls: None, login: None };
    let store = Arc::new(Etcd::new(config).unwrap());
    for (key, value) in left_by_others() {
        servers.etcdctl(&["put", &key, &value.to_string()]).unwrap();
    }
    assert_ne!(problems(&servers), [""; 0]);
    let kubernetes = memory();
    fill(&*kubernetes).await;
    let running = start(store.clone(), Some(kubernetes.clone()), "me");
    let information = global(Kind::ClusterInformation, "default");
    until("the default objects exist", async || store.get(&information).await.unwrap().is_some()).await;
    until("Calico's client can update everything", async || problems(&servers).is_empty()).await;
    let rest = at_rest(&servers).await;

    let node = value(&*store, &global(Kind::Node, "one")).await;
    assert_eq!(
        node["metadata"]["labels"],
        json!({"own": "x", "a": "b"}),
        "a repaired object keeps what it has"
    );
    let policy = namespaced(Kind::NetworkPolicy, "knp.default.p");
    let copied = value(&*store, &policy).await;
    assert_eq!(copied["metadata"]["uid"], "9d6ba87f-0000-4000-8000-000000000000", "an identity stays");
    assert_eq!(copied["spec"]["selector"], "projectcalico.org/orchestrator == 'k8s' && app == 'x'");
    let kinds = [Kind::FelixConfiguration, Kind::KubeControllersConfiguration, Kind::IpamConfig];
    for key in kinds.map(|kind| Key::global(kind, "default")) {
        assert!(store.get(&key).await.unwrap().is_some(), "{key}");
    }

    // Controllers that start again find nothing to do.
    drop(running);
    let running = start(store.clone(), Some(kubernetes.clone()), "me");
    put(&*kubernetes, &global(Kind::Namespace, "sign"), json!({"metadata": {"name": "sign"}})).await;
    let sign = global(Kind::Profile, "kns.sign");
    until("what is new is copied", async || store.get(&sign).await.unwrap().is_some()).await;
    // The Namespace, and its profile.
    assert_eq!(at_rest(&servers).await, rest + 2);
    assert_eq!(problems(&servers), [""; 0]);
    drop(running);
}
