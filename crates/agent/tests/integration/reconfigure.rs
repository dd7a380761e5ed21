//! The network of a Windows node is replaced: the VNI changes while the node has pods, and whoever does it is killed after each step
//! and after each call of HNS.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::{Value, json};
use tortie_agent::Reconfiguring;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_cni::{Code, Command};
use tortie_hcn::schema::{Endpoint, LoadBalancer, Vsid, lenient};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator};
use tortie_store::{Endpoints, Follow, Interest, Page, PageToken, Store, StoreError, Stored, Version};
use tortie_windows::{
    Drain, NETWORK, NetworkKind, NetworkSpec, RECONFIGURATION, ReconfigureStep, ensure_network, source_vip,
};

use crate::common::{Bed, NODE, cluster, pod_key, put, until};
use crate::kubernetes::api_server;
use crate::windows::{add, agent_on, call, node_of};

/// The agent tries again at most ten seconds after the last endpoint has gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// An HNS that carries out one change, and nothing afterwards: its client has been killed.
struct OneChange {
    inner: Arc<Emulator>,
    changes: AtomicUsize,
}

impl Hcn for OneChange {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        if !call.is_read() && self.changes.fetch_add(1, Ordering::Relaxed) > 0 {
            return Err(Failure::new(HResult::ERROR_TIMEOUT, "killed"));
        }
        self.inner.call(call)
    }
}

/// One step of somebody who knows nothing of those before, and is killed by its second call of HNS. `None` if it was killed.
async fn step(bed: &Bed, hns: &Arc<Emulator>, drain: Drain) -> Option<ReconfigureStep> {
    let hcn = Arc::new(OneChange { inner: hns.clone(), changes: AtomicUsize::new(0) });
    let store = bed.store.clone();
    let one = Reconfiguring { store, hcn, node: NODE.to_owned(), drain };
    one.step(Duration::ZERO, PATIENCE).await.ok()
}

async fn node_object(bed: &Bed) -> Value {
    bed.store.get(&Key::global(Kind::Node, NODE)).await.unwrap().unwrap().value
}

/// What kube-proxy has: the endpoint of the source VIP, one of another node's pod, and a load balancer.
fn kube_proxy(hns: &Emulator) {
    let network = hns.network_by_name(NETWORK).unwrap().unwrap();
    let create = |address: &str, flags: u32| -> Guid {
        let document = json!({"HostComputeNetwork": network.id, "Flags": flags, "MacAddress": "02-11-0a-00-00-01",
            "IpConfigurations": [{"IpAddress": address}]});
        hns.create_endpoint(&lenient::<Endpoint>(&document.to_string()).unwrap()).unwrap()
    };
    create(&source_vip(&network).unwrap().to_string(), 0);
    let backend = create("10.9.9.9", 1);
    let port = json!({"Protocol": 6, "InternalPort": 80, "ExternalPort": 80});
    let balancer =
        json!({"HostComputeEndpoints": [backend], "FrontendVIPs": ["10.96.0.7"], "PortMappings": [port]});
    hns.create_load_balancer(&lenient::<LoadBalancer>(&balancer.to_string()).unwrap()).unwrap();
}

fn vni(hns: &Emulator) -> u32 {
    let network = hns.network_by_name(NETWORK).unwrap().unwrap();
    let policies = network.subnets().flat_map(|subnet| &subnet.policies);
    policies.filter_map(|policy| policy.settings::<Vsid>().unwrap()).next().unwrap().isolation_id
}

/// What controller and kubelet write about a pod: who made it, and its address.
async fn runs(store: &dyn Store, pod: &str, owner: &str) {
    let mut value = store.get(&pod_key(pod)).await.unwrap().unwrap().value;
    value["status"] = json!({"podIP": "10.0.0.3"});
    if !owner.is_empty() {
        value["metadata"]["ownerReferences"] = json!([{"kind": owner, "name": "o", "controller": true}]);
    }
    put(store, &pod_key(pod), value).await;
}

/// A Windows node with two pods, whose VNI has changed.
async fn changed(unschedulable: bool) -> (Bed, Arc<Emulator>) {
    let store = cluster().await;
    let key = Key::global(Kind::Node, NODE);
    let mut node = store.get(&key).await.unwrap().unwrap().value;
    node["metadata"]["labels"] = json!({"kubernetes.io/os": "windows"});
    node["spec"] = json!({"unschedulable": unschedulable, "podCIDR": "10.0.0.0/29"});
    put(&*store, &key, node).await;
    let (bed, hns) = node_of(store, Config::SERVER_2022).await;
    for pod in ["a", "b"] {
        add(&bed, &hns, pod).await.unwrap();
        runs(&*bed.store, pod, "ReplicaSet").await;
    }
    // This one waits for an address, and uses nothing.
    let waits = json!({"metadata": {"name": "waits", "namespace": "n"}, "spec": {"nodeName": NODE, "containers": [{"name": "c"}]}});
    put(&*bed.store, &pod_key("waits"), waits).await;
    // One of the node's own network has nothing to do with it.
    let of_host = json!({"metadata": {"name": "host", "namespace": "n"},
        "spec": {"nodeName": NODE, "hostNetwork": true, "containers": [{"name": "c"}]}});
    put(&*bed.store, &pod_key("host"), of_host).await;
    kube_proxy(&hns);
    bed.current_report().await;
    assert_eq!(step(&bed, &hns, Drain::OfControllers).await, Some(ReconfigureStep::NothingToDo));
    let felix = json!({"metadata": {"name": "default"}, "spec": {"vxlanVNI": 5000}});
    put(&*bed.store, &Key::global(Kind::FelixConfiguration, "default"), felix).await;
    until("the agent reports the difference", || async {
        bed.report().await["conditions"].to_string().contains("NetworkDiffers")
    })
    .await;
    (bed, hns)
}

/// What kubelet does for a pod that is deleted.
async fn disconnect(bed: &Bed, hns: &Emulator, pod: &str) {
    let del = call(bed, hns, Command::Del, pod).await;
    bed.call(del).await.unwrap();
    bed.store.delete(&pod_key(pod), None).await.unwrap();
}

/// Repeats steps to the end, and returns their names without repetitions.
async fn to_the_end(bed: &Bed, hns: &Arc<Emulator>) -> Vec<&'static str> {
    let (end, mut names) = (Instant::now() + PATIENCE, Vec::new());
    loop {
        let step = step(bed, hns, Drain::OfControllers).await;
        let name = match &step {
            Some(ReconfigureStep::Cordon(_)) => "cordon",
            Some(ReconfigureStep::DeletePods(pods)) => {
                assert_eq!(pods, &["n/a", "n/b"]);
                for pod in ["a", "b"] {
                    disconnect(bed, hns, pod).await;
                }
                "drain"
            }
            Some(ReconfigureStep::RemoveOthers { .. }) => "rebuild",
            Some(ReconfigureStep::Restore { .. }) => "restore",
            Some(ReconfigureStep::Wait(_)) => "wait",
            None => "killed",
            other => panic!("{other:?}"),
        };
        if names.last() != Some(&name) {
            names.push(name);
        }
        if name == "restore" {
            return names;
        }
        let node = node_object(bed).await;
        assert_eq!(node["spec"]["unschedulable"], true, "from the first step to the last one: {names:?}");
        assert!(Instant::now() < end, "{names:?}: {}", bed.report().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_is_replaced_by_somebody_who_is_killed_all_the_time() {
    for unschedulable in [false, true] {
        let (bed, hns) = changed(unschedulable).await;
        let (old, before) = (hns.network_by_name(NETWORK).unwrap().unwrap().id, node_object(&bed).await);
        let names = to_the_end(&bed, &hns).await;
        // A load balancer and two endpoints are three changes; each time the next one kills.
        assert!(names.contains(&"killed"), "{names:?}");
        // On a busy machine, a step is killed once more after the agent has built the network.
        let mut steps: Vec<_> = names.into_iter().filter(|name| !["wait", "killed"].contains(name)).collect();
        steps.dedup();
        assert_eq!(steps, ["cordon", "drain", "rebuild", "restore"]);
        let network = hns.network_by_name(NETWORK).unwrap().unwrap();
        assert!(network.id != old && vni(&hns) == 5000);
        assert_eq!(hns.endpoints_of_network(network.id).unwrap(), []);
        let node = node_object(&bed).await;
        assert!(node["metadata"]["annotations"].get(RECONFIGURATION).is_none(), "{node}");
        let is_closed = |node: &Value| node["spec"]["unschedulable"] == true;
        assert_eq!((is_closed(&node), is_closed(&before)), (unschedulable, unschedulable));
        assert_eq!(node["spec"]["podCIDR"], before["spec"]["podCIDR"], "the rest stays");
        assert!(bed.store.get(&pod_key("host")).await.unwrap().is_some());
        assert_eq!(step(&bed, &hns, Drain::OfControllers).await, Some(ReconfigureStep::NothingToDo));
        add(&bed, &hns, "c").await.unwrap();
    }
}

/// An agent that exited would leave the pods without anybody who ends them, and the network would never be replaced.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_starts_while_the_network_differs() {
    let (bed, hns) = changed(false).await;
    let old = hns.network_by_name(NETWORK).unwrap().unwrap().id;
    bed.agent.abort();
    let bed = agent_on(bed.store.clone(), &hns, "Ethernet 2").await;
    until("it reports the difference", || async {
        bed.current_report().await["conditions"].to_string().contains("NetworkDiffers")
    })
    .await;
    // An attempt would keep the network in use for as long as it waits for policy.
    let (started, failure) = (Instant::now(), add(&bed, &hns, "c").await.unwrap_err());
    assert!(failure.code == Code::TRY_AGAIN_LATER && failure.details.contains("VNI 5000"), "{failure:?}");
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(hns.endpoints_of_network(old).unwrap().len(), 4, "of two pods, and of kube-proxy");
    bed.store.delete(&pod_key("c"), None).await.unwrap();
    to_the_end(&bed, &hns).await;
    assert_eq!(vni(&hns), 5000);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_somebody_else_deletes_are_waited_for() {
    let (bed, hns) = changed(false).await;
    assert!(matches!(step(&bed, &hns, Drain::ByOthers).await, Some(ReconfigureStep::Cordon(_))));
    let waits = step(&bed, &hns, Drain::ByOthers).await;
    let Some(ReconfigureStep::Wait(what)) = waits else { panic!("{waits:?}") };
    assert!(what.contains("n/a, n/b"), "{what}");
    disconnect(&bed, &hns, "a").await;
    assert_eq!(vni(&hns), 4096, "a pod still uses the network");
    disconnect(&bed, &hns, "b").await;
    to_the_end(&bed, &hns).await;
    assert_eq!(vni(&hns), 5000);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_nodes_and_damaged_records_are_refused() {
    let (bed, hns) = changed(false).await;
    let of = |node: &str| Reconfiguring {
        store: bed.store.clone(),
        hcn: hns.clone(),
        node: node.to_owned(),
        drain: Drain::OfControllers,
    };
    let refused = async |node: &str| of(node).step(Duration::ZERO, PATIENCE).await.unwrap_err().to_string();
    // Nobody would start it again.
    runs(&*bed.store, "waits", "").await;
    let step = of(NODE).step(Duration::ZERO, PATIENCE).await.unwrap();
    assert!(matches!(&step, ReconfigureStep::Refuse(why) if why.contains("n/waits")), "{step:?}");
    // A deletion in the API ends no static pod.
    let mut fixed = bed.store.get(&pod_key("waits")).await.unwrap().unwrap().value;
    fixed["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "hash"});
    put(&*bed.store, &pod_key("waits"), fixed).await;
    let step = Reconfiguring { drain: Drain::All, ..of(NODE) }.step(Duration::ZERO, PATIENCE).await.unwrap();
    assert!(matches!(&step, ReconfigureStep::Refuse(why) if why.contains("static pods")), "{step:?}");
    assert!(node_object(&bed).await["metadata"]["annotations"].get(RECONFIGURATION).is_none());
    assert!(refused("nobody").await.contains("does not exist"));
    put(&*bed.store, &Key::global(Kind::Node, "linux"), json!({"metadata": {"name": "linux"}})).await;
    assert!(refused("linux").await.contains("kubernetes.io/os is not windows"));
    let mut node = node_object(&bed).await;
    node["metadata"]["annotations"][RECONFIGURATION] = json!("yes");
    put(&*bed.store, &Key::global(Kind::Node, NODE), node).await;
    assert!(refused(NODE).await.contains("cannot be read"));
}

/// The Node and the pods of a real API server; the agent is played by its report.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_a_kubernetes_api_is_cordoned_drained_and_restored() {
    let Some((servers, store)) = api_server().await else { return };
    servers.kubectl(&["label", "node", NODE, "kubernetes.io/os=windows"]).unwrap();
    servers.kubectl(&["taint", "node", NODE, "os=windows:NoSchedule"]).unwrap();
    let hns = Arc::new(Emulator::new(Config::new(Config::SERVER_2022, [192, 0, 2, 1].into())));
    let spec = |vni| NetworkSpec {
        name: NETWORK.into(),
        block: "10.0.0.0/26".parse().unwrap(),
        ipv6: None,
        kind: NetworkKind::Overlay { vni },
        adapter: None,
    };
    let old = ensure_network(&*hns, &spec(4096)).unwrap().id;
    let report = async |conditions: Value| {
        let key = Key::global(Kind::NodeReport, NODE);
        let status = json!({"os": "windows", "endpoints": 0, "time": jiff::Timestamp::now().to_string(),
            "heartbeatSeconds": 60, "conditions": conditions});
        let value = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": NODE}, "status": status});
        put(&*store, &key, value).await;
    };
    let step = async || {
        let one = Reconfiguring {
            store: store.clone(),
            hcn: hns.clone(),
            node: NODE.to_owned(),
            drain: Drain::OfControllers,
        };
        one.step(Duration::ZERO, PATIENCE).await.unwrap()
    };
    report(json!([])).await;
    assert_eq!(step().await, ReconfigureStep::NothingToDo);
    for (name, seconds) in [("slow", 30), ("gone", 0)] {
        let spec = json!({"nodeName": NODE, "terminationGracePeriodSeconds": seconds, "containers": [{"name": "c", "image": "i"}]});
        let owner = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "o", "uid": "o", "controller": true}]);
        let metadata = json!({"name": name, "namespace": "n", "ownerReferences": owner,
            "annotations": {"cni.projectcalico.org/podIP": "10.0.0.3/32"}});
        store.create(&pod_key(name), json!({"metadata": metadata, "spec": spec})).await.unwrap();
    }
    report(json!([{"reason": "NetworkDiffers", "message": "VNI 4096"}])).await;
    assert!(matches!(step().await, ReconfigureStep::Cordon(_)));
    let node = store.get(&Key::global(Kind::Node, NODE)).await.unwrap().unwrap().value;
    assert_eq!(node["spec"]["unschedulable"], true);
    assert_eq!(
        node["metadata"]["annotations"][RECONFIGURATION],
        format!(r#"{{"wasSchedulable":true,"network":"{old}"}}"#)
    );
    let ReconfigureStep::DeletePods(mut pods) = step().await else { panic!("no drain") };
    pods.sort();
    assert_eq!(pods, ["n/gone", "n/slow"]);
    // No kubelet ends the other one.
    assert_eq!(step().await, ReconfigureStep::Wait("these pods use the network: n/slow".to_owned()));
    servers.kubectl(&["delete", "pod", "slow", "-n", "n", "--grace-period=0", "--force"]).unwrap();
    assert_eq!(step().await, ReconfigureStep::Wait("the agent makes the network anew: VNI 4096".to_owned()));
    ensure_network(&*hns, &spec(5000)).unwrap();
    report(json!([])).await;
    assert_eq!(step().await, ReconfigureStep::Restore { schedulable: true });
    let node = store.get(&Key::global(Kind::Node, NODE)).await.unwrap().unwrap().value;
    assert!(
        node["spec"].get("unschedulable").is_none() && node["spec"]["taints"][0]["key"] == "os",
        "{node}"
    );
    assert!(node["metadata"]["annotations"].get(RECONFIGURATION).is_none());
    assert_eq!(step().await, ReconfigureStep::NothingToDo);
}

/// A datastore that is away at first, and whose pods are changed before each deletion. It lists no other node's pods.
struct Unsteady {
    inner: Arc<dyn Endpoints>,
    failures: AtomicUsize,
    deletions: AtomicUsize,
}

#[async_trait]
impl Store for Unsteady {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let left =
            self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        match left {
            Ok(_) => Err(StoreError::Unavailable("not yet".to_owned())),
            Err(_) => self.inner.get(key).await,
        }
    }
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        assert_eq!(*interest, Interest::of_node(Kind::Pod, NODE));
        self.inner.list_page(interest, after).await
    }
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.inner.create(key, value).await
    }
    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.inner.update(key, value, expected).await
    }
    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        if self.deletions.fetch_add(1, Ordering::Relaxed) == 0 {
            // Somebody else was faster, and the pod of this name is another one.
            let value = self.inner.get(key).await.unwrap().unwrap().value;
            self.inner.delete(key, None).await.unwrap();
            self.inner.create(key, value).await.unwrap();
        }
        self.inner.delete(key, expected).await
    }
    fn follow(&self, interests: Vec<Interest>) -> Follow {
        self.inner.follow(interests)
    }
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.inner.barrier(kinds).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_datastore_end_nothing_and_pods_are_deleted_as_they_were_seen() {
    let (bed, hns) = changed(false).await;
    let store = Arc::new(Unsteady {
        inner: bed.store.clone(),
        failures: AtomicUsize::new(3),
        deletions: AtomicUsize::new(0),
    });
    let one = Reconfiguring {
        store: store.clone(),
        hcn: hns.clone(),
        node: NODE.to_owned(),
        drain: Drain::OfControllers,
    };
    let (mut errors, mut said) = (0, Vec::new());
    let pause = Duration::from_millis(10);
    let ended = one.run(Duration::from_secs(2), pause, |step| match step {
        Ok(step) => said.push(step.clone()),
        Err(_) => errors += 1,
    });
    let ended = ended.await.unwrap();
    // HNS still has the endpoints of the pods.
    assert!(matches!(ended, ReconfigureStep::GiveUp { cordoned: true, .. }), "{ended:?}");
    assert_eq!(errors, 3);
    let deleted: Vec<_> = said.iter().filter(|step| matches!(step, ReconfigureStep::DeletePods(_))).collect();
    let of = |names: &[&str]| ReconfigureStep::DeletePods(names.iter().map(|it| (*it).to_owned()).collect());
    assert_eq!(deleted, [&of(&["n/a", "n/b"]), &of(&["n/a"])], "the new pod is looked at first");
    // For ever, it ends with the error.
    store.failures.store(usize::MAX, Ordering::Relaxed);
    one.run(Duration::from_millis(50), pause, |_| {}).await.unwrap_err();
}

/// A report that is older than three heartbeats, or of an earlier start of the node, neither begins nor ends anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_report_does_not_count() {
    let (bed, hns) = changed(false).await;
    bed.agent.abort();
    let key = Key::global(Kind::NodeReport, NODE);
    let fresh = bed.store.get(&key).await.unwrap().unwrap().value;
    let with = async |time: Value, conditions: Value| {
        let mut report = fresh.clone();
        (report["status"]["time"], report["status"]["conditions"]) = (time, conditions);
        put(&*bed.store, &key, report).await;
    };
    let now = || json!(jiff::Timestamp::now().to_string());
    let differs = json!([{"reason": "NetworkDiffers", "message": "VNI 4096"}]);
    let waits = async |text: &str| {
        let waits = step(&bed, &hns, Drain::OfControllers).await;
        assert!(matches!(&waits, Some(ReconfigureStep::Wait(what)) if what.contains(text)), "{waits:?}");
    };
    with(json!("2020-01-01T00:00:00Z"), differs.clone()).await;
    waits("seconds old").await;
    with(now(), differs).await;
    let begun = step(&bed, &hns, Drain::OfControllers).await;
    assert!(matches!(begun, Some(ReconfigureStep::Cordon(_))), "{begun:?}");
    let network = hns.network_by_name(NETWORK).unwrap().unwrap().id;
    for endpoint in hns.endpoints_of_network(network).unwrap() {
        hns.delete_endpoint(endpoint.id).unwrap();
    }
    with(now(), json!([])).await;
    waits("still the old one").await;
    let block = "10.0.0.0/29".parse().unwrap();
    ensure_network(
        &*hns,
        &NetworkSpec {
            name: NETWORK.into(),
            block,
            ipv6: None,
            kind: NetworkKind::Overlay { vni: 5000 },
            adapter: None,
        },
    )
    .unwrap();
    with(json!("2020-01-01T00:00:00Z"), json!([])).await;
    waits("seconds old").await;
    // Any failure of the node as a whole leaves open whether the network is as it should be.
    for reason in ["PolicyNotInForce", "OfSomethingNew"] {
        with(now(), json!([{"reason": reason, "message": reason}])).await;
        waits(reason).await;
    }
    with(now(), json!([{"reason": "OverlayRemade", "message": "it says so"}])).await;
    let ended = step(&bed, &hns, Drain::OfControllers).await;
    assert_eq!(ended, Some(ReconfigureStep::Restore { schedulable: true }));
}
