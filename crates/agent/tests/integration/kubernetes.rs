//! An agent whose datastore is a real Kubernetes API server.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::common::{Bed, FakeOs, NODE, endpoint_id, fill, invocation, pod_key, until};
use serde_json::{Value, json};
use tortie_api::{Key, Kind, Position};
use tortie_cni::{Code, Command, Invocation};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

/// An API server with the objects of the tests, and a store on it; `None` if its program is missing and may be.
pub(crate) async fn api_server() -> Option<(KubeApi, Arc<Kubernetes>)> {
    if !can_run(&[Program::Kube]) {
        return None;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let config = KubernetesConfig::Kubeconfig(servers.kubeconfig());
    let store = Arc::new(Kubernetes::new(&config).await.unwrap());
    fill(&*store).await;
    Some((servers, store))
}

pub(crate) async fn serving(store: Arc<Kubernetes>, os: FakeOs) -> Bed {
    let bed = Bed::on(store, os);
    let socket = bed.dir.path().join("agent.sock");
    until("the agent serves", || async { UnixStream::connect(&socket).is_ok() }).await;
    bed
}

/// Creates a pod of the node; returns its uid.
pub(crate) async fn create_pod(store: &Kubernetes, name: &str, labels: &Value) -> String {
    create_pod_on(store, NODE, name, labels).await
}

pub(crate) async fn create_pod_on(store: &Kubernetes, node: &str, name: &str, labels: &Value) -> String {
    let spec = json!({"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "i"}]});
    let value = json!({"metadata": {"name": name, "namespace": "n", "labels": labels}, "spec": spec});
    let created = store.create(&pod_key(name), value).await.unwrap();
    created.value["metadata"]["uid"].as_str().unwrap().to_owned()
}

pub(crate) fn call(bed: &Bed, command: Command, of: (&str, &str, &str)) -> Invocation {
    invocation(bed.dir.path(), command, of)
}

/// The policies of a pod in the dataplane; `None` without an endpoint.
fn policies(bed: &Bed, pod: &str) -> Option<Vec<String>> {
    let os = bed.os.lock();
    let endpoint = os.state.endpoints.get(&endpoint_id(pod))?;
    let tiers = endpoint.program.ingress.iter().flat_map(|tier| &tier.policies);
    Some(tiers.map(|policy| policy.name.to_string()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_serves_pods_of_a_kubernetes_api() {
    let Some((servers, store)) = api_server().await else { return };
    let bed = serving(store.clone(), FakeOs::default()).await;

    let deny = Key::global(Kind::GlobalNetworkPolicy, "deny");
    let spec = json!({"selector": "app == 'a'", "types": ["Ingress"]});
    store.create(&deny, json!({"metadata": {"name": "deny"}, "spec": spec})).await.unwrap();
    let uid = create_pod(&store, "p", &json!({"app": "a"})).await;
    let add = call(&bed, Command::Add, ("c1", "p", &uid));
    let success = bed.call(add.clone()).await.unwrap().unwrap();
    assert_eq!(policies(&bed, "p"), Some(vec!["deny".to_owned()]), "policy is in force before the answer");
    let address = success.ips[0].address.clone();
    let annotations = async || {
        let pod = store.get(&pod_key("p")).await.unwrap().unwrap();
        let all: BTreeMap<String, String> =
            serde_json::from_value(pod.value["metadata"]["annotations"].clone()).unwrap_or_default();
        ["podIP", "podIPs", "containerID"]
            .map(|name| all.get(&format!("cni.projectcalico.org/{name}")).cloned().unwrap_or_default())
    };
    assert_eq!(annotations().await, [address.as_str(), &address, "c1"]);
    let endpoint = bed.endpoint("p", "eth0").await.unwrap();
    assert_eq!(endpoint["spec"]["ipNetworks"], json!([address]));
    bed.call(call(&bed, Command::Check, ("c1", "p", &uid))).await.unwrap();

    // Nobody copies labels, and nobody has to.
    servers.kubectl(&["label", "pod", "p", "-n", "n", "--overwrite", "app=b"]).unwrap();
    until("the policy does not select it", || async { policies(&bed, "p") == Some(vec![]) }).await;
    servers.kubectl(&["label", "pod", "p", "-n", "n", "--overwrite", "app=a"]).unwrap();
    until("the policy selects it", || async { policies(&bed, "p") == Some(vec!["deny".to_owned()]) }).await;

    // The next agent knows what the first one did.
    bed.agent.abort();
    let os = FakeOs::default();
    os.lock().connected = bed.os.lock().connected.clone();
    let bed = serving(store.clone(), os).await;
    assert_eq!(policies(&bed, "p"), Some(vec!["deny".to_owned()]));
    assert_eq!(*bed.os.lock().state.endpoints[&endpoint_id("p")].container_id, *"c1");
    let again = bed.call(call(&bed, Command::Add, ("c1", "p", &uid))).await.unwrap().unwrap();
    assert_eq!(again.ips[0].address, address);

    for _ in 0..2 {
        bed.call(call(&bed, Command::Del, ("c1", "p", &uid))).await.unwrap();
        assert_eq!(annotations().await, ["", "", "c1"]);
        assert_eq!(bed.endpoint("p", "eth0").await, None);
        assert_eq!(store.list(Kind::IpamHandle).await.unwrap().items, []);
    }
    until("the dataplane has forgotten the pod", || async { policies(&bed, "p").is_none() }).await;

    // A pod of the same name is another pod.
    store.delete(&pod_key("p"), None).await.unwrap();
    let new = create_pod(&store, "p", &json!({})).await;
    let failure = bed.call(call(&bed, Command::Add, ("c2", "p", &uid))).await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    bed.call(call(&bed, Command::Add, ("c2", "p", &new))).await.unwrap();
    assert_eq!(policies(&bed, "p"), Some(vec![]));
    until("the node reports it", || async { bed.current_report().await["endpoints"] == 1 }).await;

    // Nobody may believe that a policy is in force whose kind the agent cannot read.
    let unread = [(Kind::ClusterNetworkPolicy, Position(1))].into_iter().collect();
    let waited = tortie_store::wait_in_force(&*store, &unread, std::time::Duration::from_millis(500)).await;
    assert!(waited.is_err(), "{waited:?}");
}

/// The API server is killed: what is in force stays, pods are added when it is back, and an agent that starts meanwhile
/// waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_outlives_the_api_server() {
    let Some((servers, store)) = api_server().await else { return };
    let spec = json!({"selector": "app == 'a'", "types": ["Ingress"]});
    let deny = |name: &str| {
        (Key::global(Kind::GlobalNetworkPolicy, name), json!({"metadata": {"name": name}, "spec": spec}))
    };
    let (key, value) = deny("deny");
    store.create(&key, value).await.unwrap();
    let bed = serving(store.clone(), FakeOs::default()).await;
    let first = create_pod(&store, "p", &json!({"app": "a"})).await;
    let second = create_pod(&store, "q", &json!({"app": "a"})).await;
    bed.call(call(&bed, Command::Add, ("c1", "p", &first))).await.unwrap();

    servers.api().kill().unwrap();
    let failure = bed.call(call(&bed, Command::Add, ("c2", "q", &second))).await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    assert!(failure.to_string().contains(&servers.url()), "{failure}");
    assert!(bed.call(call(&bed, Command::Del, ("c1", "p", &first))).await.is_err());
    assert_eq!(policies(&bed, "p"), Some(vec!["deny".to_owned()]), "what is in force stays");
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    until("a pod is added", || async {
        bed.call(call(&bed, Command::Add, ("c2", "q", &second))).await.is_ok()
    })
    .await;
    let (key, value) = deny("another");
    store.create(&key, value).await.unwrap();
    let both = |bed: &Bed, pod: &str| policies(bed, pod).is_some_and(|all| all.len() == 2);
    until("both policies are in force", || async { both(&bed, "p") && both(&bed, "q") }).await;

    servers.api().kill().unwrap();
    bed.agent.abort();
    let later = Bed::on(store.clone(), FakeOs::default());
    later.os.lock().connected = bed.os.lock().connected.clone();
    assert!(later.os.lock().batches.is_empty(), "the next agent knows nothing yet");
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    let socket = later.dir.path().join("agent.sock");
    until("the agent serves", || async { UnixStream::connect(&socket).is_ok() }).await;
    assert!(both(&later, "p") && both(&later, "q"));
    later.call(call(&later, Command::Del, ("c1", "p", &first))).await.unwrap();
    until("the pod is forgotten", || async { policies(&later, "p").is_none() }).await;
}

/// Whoever may annotate pods of a namespace names other addresses and sandboxes (policy decision 50).
#[tokio::test(flavor = "multi_thread")]
async fn annotations_of_a_tenant_move_no_addresses() {
    let Some((servers, store)) = api_server().await else { return };
    let bed = serving(store.clone(), FakeOs::default()).await;
    let uid = create_pod(&store, "victim", &json!({})).await;
    let add = bed.call(call(&bed, Command::Add, ("c1", "victim", &uid))).await.unwrap().unwrap();
    let victim = add.ips[0].address.clone();
    let addresses_of = |pod: &str| {
        let os = bed.os.lock();
        let endpoint = os.state.endpoints.get(&endpoint_id(pod));
        endpoint
            .map(|it| (it.container_id.to_string(), it.addresses.iter().map(ToString::to_string).collect()))
    };
    let of_victim: Option<(String, Vec<String>)> =
        Some(("c1".to_owned(), vec![victim.split('/').next().unwrap().to_owned()]));
    assert_eq!(addresses_of("victim"), of_victim);

    // A pod that nobody has connected claims the address; another one claims one that nobody has.
    create_pod(&store, "thief", &json!({})).await;
    create_pod(&store, "inventor", &json!({})).await;
    let annotate = |pod: &str, name: &str, value: &str| {
        let annotation = format!("cni.projectcalico.org/{name}={value}");
        servers.kubectl(&["annotate", "pod", pod, "-n", "n", "--overwrite", &annotation]).unwrap();
    };
    annotate("thief", "podIPs", &victim);
    annotate("inventor", "podIPs", "192.0.2.1/32");
    // The sandbox of the victim, and then a label, which shows that everything before has been read.
    annotate("victim", "containerID", "other");
    servers.kubectl(&["label", "pod", "inventor", "-n", "n", "app=a"]).unwrap();
    let report = async || bed.current_report().await.to_string();
    until("the node names the thief", async || report().await.contains("IPAM has given to another one"))
        .await;
    assert!(report().await.contains("pod n/thief names"), "{}", report().await);
    assert_eq!(addresses_of("victim"), of_victim);
    assert_eq!([addresses_of("thief"), addresses_of("inventor")], [None, None]);

    // Its address from IPAM counts, whatever stood there before.
    let pod = store.get(&pod_key("thief")).await.unwrap().unwrap();
    let uid = pod.value["metadata"]["uid"].as_str().unwrap().to_owned();
    let own = bed.call(call(&bed, Command::Add, ("c2", "thief", &uid))).await.unwrap().unwrap();
    assert_ne!(own.ips[0].address, victim);
    annotate("thief", "podIPs", &victim);
    until("the forged address does not count", async || addresses_of("thief").is_none()).await;
    assert_eq!(addresses_of("victim"), of_victim);
}
