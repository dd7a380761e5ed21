//! The controllers between a real Kubernetes API server and a real etcd.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as EtcdServers, KubeApi, KubeOptions};
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints, Store};

use crate::common::{everything, global, start, until, value};

pub(crate) const CLUSTER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: tortie-system}
---
apiVersion: v1
kind: Namespace
metadata: {name: 'n', labels: {team: red}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: s, namespace: 'n', labels: {role: web}}
---
apiVersion: v1
kind: Node
metadata: {name: one, labels: {zone: a}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: 'n'}
spec: {selector: {app: x}, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: 'n', labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.5]}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p, namespace: 'n'}
spec: {podSelector: {matchLabels: {app: x}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: red}}}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: w, namespace: 'n', labels: {app: x}}
spec: {nodeName: one, serviceAccountName: s, terminationGracePeriodSeconds: 0, containers: [{name: c, image: i}]}
";

pub(crate) async fn open(kubeconfig: std::path::PathBuf) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(kubeconfig)).await.unwrap()
}

/// What Calico's tools find in etcd.
fn in_etcd(servers: &EtcdServers, key: &str) -> Value {
    let text = servers.etcdctl(&["get", "--print-value-only", key]).unwrap();
    serde_json::from_str(&text).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_copied_to_etcd_and_survives_faults_of_the_api_server() {
    if !can_run(&[Program::Kube, Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions::default()).unwrap();
    let etcd = EtcdServers::start().unwrap();
    servers.apply(CLUSTER).unwrap();
    let kubernetes: Arc<dyn Endpoints> = Arc::new(open(servers.kubeconfig()).await);
    let config = EtcdConfig { endpoints: etcd.endpoints(), tls: None, login: None };
    let store = Arc::new(Etcd::new(config).unwrap());
    // Two at once: one leads.
    let first = start(store.clone(), Some(kubernetes.clone()), "first");
    let pod = Key::namespaced(Kind::Pod, "n", "w");
    until("the pod is copied", async || store.get(&pod).await.unwrap().is_some()).await;
    let second = start(store.clone(), Some(kubernetes.clone()), "second");

    let resources = "/calico/resources/v3/projectcalico.org";
    let profile = in_etcd(&etcd, &format!("{resources}/profiles/kns.n"));
    let labels = &profile["spec"]["labelsToApply"];
    assert_eq!(labels["pcns.team"], "red");
    assert_eq!(labels["pcns.kubernetes.io/metadata.name"], "n");
    let account = in_etcd(&etcd, &format!("{resources}/profiles/ksa.n.s"));
    assert_eq!(
        account["spec"]["labelsToApply"],
        json!({"pcsa.role": "web", "pcsa.projectcalico.org/name": "s"})
    );
    let policy = in_etcd(&etcd, &format!("{resources}/networkpolicies/n/knp.default.p"));
    assert_eq!(policy["apiVersion"], "projectcalico.org/v3");
    assert_eq!(policy["spec"]["ingress"][0]["source"]["namespaceSelector"], "team == 'red'");
    let node = in_etcd(&etcd, &format!("{resources}/nodes/one"));
    assert_eq!(node["metadata"]["labels"]["zone"], "a");
    assert_eq!(node["spec"]["orchRefs"], json!([{"nodeName": "one", "orchestrator": "k8s"}]));
    assert_eq!(
        in_etcd(&etcd, "/tortie/v1/endpointslices/n/web-1")["endpoints"][0]["addresses"][0],
        "10.0.0.5"
    );
    assert_eq!(in_etcd(&etcd, "/tortie/v1/services/n/web")["spec"]["ports"][0]["port"], 80);
    assert_eq!(in_etcd(&etcd, "/tortie/v1/pods/n/w")["spec"]["nodeName"], "one");

    let before = everything(&*store).await;
    // A paused server, then one that is killed and comes back: nothing changes in etcd.
    servers.api().pause().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(everything(&*store).await, before);
    servers.api().kill().unwrap();
    assert_eq!(everything(&*store).await, before);
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    servers.kubectl(&["label", "pod", "w", "-n", "n", "--overwrite", "app=y"]).unwrap();
    let label = async || value(&*store, &pod).await["metadata"]["labels"]["app"].clone();
    until("the label is copied", async || label().await == "y").await;
    assert_eq!(everything(&*store).await.len(), before.len());

    // The leader ends; the other one continues.
    drop(first);
    servers.kubectl(&["delete", "networkpolicy", "p", "-n", "n"]).unwrap();
    let policy = Key::namespaced(Kind::NetworkPolicy, "n", "knp.default.p");
    until("the policy is deleted", async || store.get(&policy).await.unwrap().is_none()).await;
    servers.kubectl(&["delete", "pod", "w", "-n", "n"]).unwrap();
    until("the pod is deleted", async || store.get(&pod).await.unwrap().is_none()).await;

    // etcd is away for a while.
    etcd.members()[0].kill().unwrap();
    servers.kubectl(&["label", "namespace", "n", "--overwrite", "team=blue"]).unwrap();
    etcd.members()[0].restart().unwrap();
    etcd.members()[0].wait_until_ready().unwrap();
    let profile = async || value(&*store, &global(Kind::Profile, "kns.n")).await;
    until("the label is copied", async || profile().await["spec"]["labelsToApply"]["pcns.team"] == "blue")
        .await;
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn automatic_host_endpoints_come_and_go_on_a_kubernetes_api() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(CLUSTER).unwrap();
    let store = Arc::new(open(servers.kubeconfig()).await);
    let _running = start(store.clone(), None, "me");
    let settings = |switch: &str| {
        format!(
            "apiVersion: crd.projectcalico.org/v1\nkind: KubeControllersConfiguration\nmetadata: {{name: default}}\n\
             spec: {{controllers: {{node: {{hostEndpoint: {{autoCreate: {switch}}}}}}}}}\n"
        )
    };
    let endpoint = global(Kind::HostEndpoint, "one-auto-hep");
    let exists = async || store.get(&endpoint).await.unwrap().is_some();
    // kubectl looks, and then creates. In between, the controllers may create the default object.
    let default = global(Kind::KubeControllersConfiguration, "default");
    until("the default object exists", async || store.get(&default).await.unwrap().is_some()).await;
    servers.apply(&settings("Enabled")).unwrap();
    until("it is created", exists).await;
    servers.kubectl(&["label", "node", "one", "zone=b", "--overwrite"]).unwrap();
    let label = async || value(&*store, &endpoint).await["metadata"]["labels"]["zone"].clone();
    until("it has the label", async || label().await == "b").await;
    let (before, spec) = (
        store.get(&endpoint).await.unwrap().unwrap(),
        json!({"node": "one", "interfaceName": "*",
        "expectedIPs": [], "profiles": ["projectcalico-default-allow"]}),
    );
    assert_eq!(before.value["spec"], spec);
    // Somebody changes it.
    let mut changed = before.value.clone();
    changed["spec"]["profiles"] = json!([]);
    store.update(&endpoint, changed, &before.version).await.unwrap();
    until("it is repaired", async || value(&*store, &endpoint).await["spec"] == spec).await;
    servers.apply(&settings("Disabled")).unwrap();
    until("it is deleted", async || !exists().await).await;
}
