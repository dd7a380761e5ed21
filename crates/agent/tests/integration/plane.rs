//! From the store to the dataplane and back: the input of the dataplane, and the use of its reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{Bed, FakeOs, NODE, cluster, condition, endpoint_id, endpoint_key, put, until};
use async_trait::async_trait;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::watch;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_cni::{Code, Command};
use tortie_dataplane::{Delta, NodeState, Reason, Report};
use tortie_store::{
    Embedded, Endpoints, Follow, Interest, Page, PageToken, Source, Store, StoreError, Stored, Version,
    Watch, follow,
};

fn namespace(number: usize) -> (Key, Value) {
    let name = format!("ns{number}");
    (Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name}}))
}

/// A cluster with constant changes must still get resyncs.
#[tokio::test(flavor = "multi_thread")]
async fn a_steady_stream_of_changes_does_not_delay_the_resync() {
    let bed = Bed::new().await;
    bed.os.lock().report.retry = true;
    let resynced = bed.os.lock().resyncs;
    let mut number = 0;
    until("it resyncs", || {
        number += 1;
        let (key, value) = namespace(number);
        let bed = &bed;
        async move {
            bed.store.create(&key, value).await.unwrap();
            bed.os.lock().resyncs > resynced + 1
        }
    })
    .await;
}

/// Changes by somebody else are repaired long before the next resync, but not continuously, however often they are
/// reported.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_change_triggers_a_resync() {
    let bed = Bed::new().await;
    let resynced = bed.os.lock().resyncs;
    for _ in 0..100 {
        (bed.os.lock().disturbed.as_ref().expect("the agent wants to know"))();
    }
    let mended = until("it resyncs", || async { bed.os.lock().resyncs > resynced });
    tokio::time::timeout(Duration::from_secs(5), mended).await.expect("at once, and not after ten seconds");
    assert!(bed.os.lock().resyncs < resynced + 10, "one resync mends what many have told of");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_ends_with_its_dataplane() {
    let mut bed = Bed::new().await;
    bed.os.lock().dies = true;
    let (key, value) = namespace(0);
    bed.store.create(&key, value).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), &mut bed.agent).await;
    let error = ended.expect("it ends").unwrap().expect_err("and not as if all were well").to_string();
    assert!(error.contains("dataplane"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn conditions_that_are_no_failures_of_the_node_block_nothing() {
    let bed = Bed::new().await;
    bed.os.lock().report = Report {
        node: [Reason::PolicySetRefused, Reason::RouteTaken, Reason::ForeignVxlanLink].map(condition).into(),
        endpoints: [(endpoint_id("other"), vec![condition(Reason::InterfaceMissing)])].into(),
        retry: true,
    };
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    let Stored { key, position, .. } = bed.store.get(&endpoint_key("p", "eth0")).await.unwrap().unwrap();
    until("the report passes the pod", || async { bed.reported(key.kind, position).await >= Some(position) })
        .await;
    let reported: Vec<Value> =
        bed.report().await["conditions"].as_array().unwrap().iter().map(|c| c["reason"].clone()).collect();
    assert_eq!(
        reported,
        ["InterfaceMissing", "RouteTaken", "ForeignVxlanLink", "PolicySetRefused"],
        "failures first, then what is out of reach"
    );
}

/// A Windows node has a block of a pool with IPIP, which it does not have. Its pods are out of reach, and this node's pods are added.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_without_a_route_is_reported_and_blocks_nothing() {
    let bed = Bed::new().await;
    let metadata = json!({"name": "other", "labels": {"kubernetes.io/os": "windows"},
        "annotations": {"projectcalico.org/IPv4Address": "192.0.2.99/24"}});
    let block = json!({"cidr": "10.77.0.0/30", "affinity": "host:other", "allocations": [null, null, null, null],
        "unallocated": [0, 1, 2, 3], "attributes": []});
    for (kind, name, value) in [
        (Kind::Node, "other", json!({"metadata": metadata})),
        (
            Kind::IpPool,
            "ipip",
            json!({"metadata": {"name": "ipip"}, "spec": {"cidr": "10.77.0.0/16", "ipipMode": "Always"}}),
        ),
        (Kind::IpamBlock, "10.77.0.0/30", block),
    ] {
        bed.store.create(&Key::global(kind, name), value).await.unwrap();
    }
    let found = || async {
        let report = bed.report().await;
        let conditions = report["conditions"].as_array().cloned().unwrap_or_default();
        let is_it = |it: &Value| it["reason"] == "BlockUnreachable" && it["object"]["name"] == "other";
        conditions.into_iter().find(is_it)
    };
    until("it is reported", || async { found().await.is_some() }).await;
    let message = found().await.unwrap()["message"].to_string();
    assert!(message.contains("(10.77.0.0/30)") && message.contains("runs Windows"), "{message}");
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    let Stored { key, position, .. } = bed.store.get(&endpoint_key("p", "eth0")).await.unwrap().unwrap();
    until("the report passes the pod", || async { bed.reported(key.kind, position).await >= Some(position) })
        .await;
    assert!(found().await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_changes_are_not_in_force() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.os.lock().report = Report {
        endpoints: [(endpoint_id("p"), vec![condition(Reason::InterfaceMissing)])].into(),
        retry: true,
        ..Report::default()
    };
    let added = bed.call(bed.invocation(Command::Add, "c1", "p"));
    tokio::pin!(added);
    let early = tokio::time::timeout(Duration::from_millis(1_500), &mut added).await;
    assert!(early.is_err(), "ADD waits for what failed: {early:?}");
    bed.os.lock().report = Report::default();
    added.await.unwrap();

    bed.os.lock().report =
        Report { node: vec![condition(Reason::PolicyNotInForce)], retry: true, ..Report::default() };
    let (key, value) = namespace(1);
    let position = bed.store.create(&key, value).await.unwrap().position;
    until("it is told", || async { bed.report().await["conditions"][0]["reason"] == "PolicyNotInForce" })
        .await;
    assert!(bed.reported(Kind::Namespace, position).await < Some(position));
    bed.os.lock().report = Report::default();
    until("it is mended", || async { bed.reported(Kind::Namespace, position).await >= Some(position) }).await;
}

/// A store with awkward moments.
#[derive(Clone)]
struct Awkward {
    store: Arc<Embedded>,
    /// After the policies have been listed and before the endpoints are, a policy is created and then a pod that it
    /// selects, unless this is true.
    is_written: Arc<AtomicBool>,
    /// While this is false, followers receive no policies.
    policies_arrive: watch::Receiver<bool>,
}

#[async_trait]
impl Store for Awkward {
    fn follow(&self, interests: Vec<Interest>) -> Follow {
        let is_policy = |interest: &Interest| interest.kind == Kind::GlobalNetworkPolicy;
        let (policies, others): (Vec<_>, Vec<_>) = interests.into_iter().partition(is_policy);
        let this = Arc::new(self.clone());
        let policies_arrive = self.policies_arrive.clone();
        let late = follow(&this, policies).then(move |change| {
            let mut policies_arrive = policies_arrive.clone();
            async move {
                policies_arrive.wait_for(|arrive| *arrive).await.unwrap();
                change
            }
        });
        futures::stream::select(late, follow(&this, others)).boxed()
    }
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.store.barrier(kinds).await
    }
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        let page = self.store.list_page(interest, after).await;
        // Only the feed lists these.
        if interest.kind == Kind::GlobalNetworkPolicy && !self.is_written.swap(true, Ordering::Relaxed) {
            let policy =
                json!({"metadata": {"name": "deny"}, "spec": {"selector": "all()", "types": ["Ingress"]}});
            let endpoint = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
                "metadata": {"name": endpoint_key("p", "eth0").name, "namespace": "n"},
                "spec": {
                    "orchestrator": "k8s", "node": NODE, "containerID": "c", "pod": "p", "endpoint": "eth0",
                    "ipNetworks": ["10.0.0.9/32"], "profiles": ["kns.n"], "interfaceName": "cali1",
                },
            });
            for (key, value) in [
                (Key::global(Kind::GlobalNetworkPolicy, "deny"), policy),
                (endpoint_key("p", "eth0"), endpoint),
                (Key::global(Kind::NodeReport, "other"), json!({"metadata": {"name": "other"}})),
            ] {
                put(&*self.store, &key, value).await;
            }
        }
        page
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.store.get(key).await
    }
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.store.create(key, value).await
    }
    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.store.update(key, value, expected).await
    }
    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.store.delete(key, expected).await
    }
}

impl Endpoints for Awkward {}

#[async_trait]
impl Source for Awkward {
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        self.store.groups(interests)
    }
    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        self.store.watch(interests, after).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_batch_has_everything_from_before_its_objects() {
    let (_arrive, policies_arrive) = watch::channel(true);
    let store = Awkward { store: cluster().await, is_written: Arc::default(), policies_arrive };
    let bed = Bed::starting(Arc::new(store));
    until("the first batch is given", || async { !bed.os.lock().batches.is_empty() }).await;
    let first = bed.os.lock().batches[0].clone();
    let pod = first.iter().any(|delta| matches!(delta, Delta::Endpoint(id, _) if *id == endpoint_id("p")));
    let policy = first.iter().any(|delta| matches!(delta, Delta::Policy(id, _) if *id.name == *"deny"));
    assert!(pod && policy, "the pod comes with the policy that was there before it: {first:?}");
}

/// The watch of policies lags behind that of pods. A pod must not be connected before the policies are in force that
/// were stored before it.
#[tokio::test(flavor = "multi_thread")]
async fn add_waits_for_policies_that_are_stored() {
    let (arrive, policies_arrive) = watch::channel(true);
    let store = Awkward { store: cluster().await, is_written: Arc::new(true.into()), policies_arrive };
    let bed = Bed::on(Arc::new(store.clone()), FakeOs::default());
    let socket = bed.dir.path().join("agent.sock");
    until("the agent serves", || async { std::os::unix::net::UnixStream::connect(&socket).is_ok() }).await;

    arrive.send_replace(false);
    let policy = json!({"metadata": {"name": "deny"}, "spec": {"selector": "all()", "types": ["Ingress"]}});
    put(&*store.store, &Key::global(Kind::GlobalNetworkPolicy, "deny"), policy).await;
    bed.pod("p", "u", json!({})).await;
    let add = bed.call(bed.invocation(Command::Add, "c1", "p"));
    tokio::pin!(add);
    let has_policy = |state: &NodeState| state.policies.keys().any(|id| *id.name == *"deny");
    let is_known = || bed.os.lock().state.endpoints.contains_key(&endpoint_id("p"));
    tokio::select! {
        early = &mut add => panic!("{early:?}"),
        () = until("the endpoint is known", || async { is_known() }) => {}
    }
    let early = tokio::time::timeout(Duration::from_millis(300), &mut add).await;
    assert!(early.is_err() && !has_policy(&bed.os.lock().state), "{early:?}");
    arrive.send_replace(true);
    add.await.unwrap();
    assert!(has_policy(&bed.os.lock().state));
}

#[tokio::test(flavor = "multi_thread")]
async fn status_reports_whether_pods_can_be_added() {
    let os = FakeOs::default();
    os.lock().report =
        Report { node: vec![condition(Reason::PolicyNotInForce)], retry: true, ..Report::default() };
    let bed = Bed::on(cluster().await, os.clone());
    let socket = bed.dir.path().join("agent.sock");
    until("the agent serves", || async { std::os::unix::net::UnixStream::connect(&socket).is_ok() }).await;
    let status = bed.invocation(Command::Status, "", "");
    assert_eq!(bed.call(status.clone()).await.unwrap_err().code, Code::NOT_AVAILABLE);
    os.lock().report = Report::default();
    until("the agent is ready", || async { bed.call(status.clone()).await.is_ok() }).await;
}

/// If Services are not needed, they are not even read; otherwise existing ones count, too.
#[tokio::test(flavor = "multi_thread")]
async fn services_reach_only_dataplanes_that_request_them() {
    let service = |name: &str, address: &str| {
        let spec = json!({"clusterIPs": [address], "ports": [{"port": 80}]});
        let metadata = json!({"name": name, "namespace": "n"});
        (Key::namespaced(Kind::Service, "n", name), json!({"metadata": metadata, "spec": spec}))
    };
    for asks in [false, true] {
        let (store, os) = (cluster().await, FakeOs::default());
        let (key, value) = service("before", "10.96.0.1");
        store.create(&key, value).await.unwrap();
        os.lock().asks_for_services = asks;
        let bed = Bed::on(store, os);
        until("the first state", || async { !bed.os.lock().batches.is_empty() }).await;
        let (key, value) = service("after", "10.96.0.2");
        bed.store.create(&key, value).await.unwrap();
        let annotations = json!({
            "projectcalico.org/IPv4Address": "192.0.2.2/24", "projectcalico.org/IPv4VXLANTunnelAddr": "10.0.0.65",
        });
        let node = json!({"metadata": {"name": "node-2", "annotations": annotations}});
        bed.store.create(&Key::global(Kind::Node, "node-2"), node).await.unwrap();
        until("what came later", || async { !bed.os.lock().state.vteps.is_empty() }).await;
        let known = bed.os.lock().state.services.keys().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(known, if asks { vec!["n/after", "n/before"] } else { vec![] });
    }
}
