//! From the store to the dataplane and back: the input of the dataplane, and the use of its reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{Bed, FakeOs, NODE, cluster, condition, endpoint_id, endpoint_key, put, until};
use async_trait::async_trait;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_cni::{Code, Command};
use tortie_dataplane::{Delta, Reason, Report};
use tortie_store::{Embedded, Listing, Revision, Store, StoreError, Stored, Watch};

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
async fn informational_conditions_block_nothing() {
    let bed = Bed::new().await;
    bed.os.lock().report = Report {
        node: [Reason::RouteTaken, Reason::PolicySetRefused, Reason::PolicySetHeld].map(condition).into(),
        endpoints: [(endpoint_id("other"), vec![condition(Reason::InterfaceMissing)])].into(),
        retry: true,
    };
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    let revision = bed.store.get(&endpoint_key("p", "eth0")).await.unwrap().unwrap().revision;
    until("the report passes the pod", || async {
        bed.report().await["revision"].as_u64() >= Some(revision)
    })
    .await;
    let reported: Vec<Value> =
        bed.report().await["conditions"].as_array().unwrap().iter().map(|c| c["reason"].clone()).collect();
    assert_eq!(
        reported,
        ["InterfaceMissing", "RouteTaken", "PolicySetRefused", "PolicySetHeld"],
        "failures first"
    );
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
    let revision = bed.store.create(&key, value).await.unwrap().revision;
    until("it is told", || async { bed.report().await["conditions"][0]["reason"] == "PolicyNotInForce" })
        .await;
    assert!(bed.report().await["revision"].as_u64() < Some(revision));
    bed.os.lock().report = Report::default();
    until("it is mended", || async { bed.report().await["revision"].as_u64() >= Some(revision) }).await;
}

/// Somebody who waits for a write of a kind that nodes ignore must not wait forever.
#[tokio::test(flavor = "multi_thread")]
async fn reports_pass_every_revision() {
    let bed = Bed::new().await;
    let revision = bed.pod("elsewhere", "u", json!({})).await.revision;
    until("the report passes it", || async { bed.report().await["revision"].as_u64() >= Some(revision) })
        .await;
}

/// A store in which, after the policies have been listed and before the endpoints are, a policy is created and then a
/// pod that it selects.
struct Busy(Arc<Embedded>, AtomicBool);

#[async_trait]
impl Store for Busy {
    async fn list(&self, kind: Kind) -> Result<Listing, StoreError> {
        let listing = self.0.list(kind).await;
        // Only the feed lists these.
        if kind == Kind::GlobalNetworkPolicy && !self.1.swap(true, Ordering::Relaxed) {
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
                put(&*self.0, &key, value).await;
            }
        }
        listing
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.0.get(key).await
    }
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.0.create(key, value).await
    }
    async fn update(&self, key: &Key, value: Value, expected: Revision) -> Result<Stored, StoreError> {
        self.0.update(key, value, expected).await
    }
    async fn delete(&self, key: &Key, expected: Option<Revision>) -> Result<Revision, StoreError> {
        self.0.delete(key, expected).await
    }
    async fn watch(&self, kinds: &[Kind], after: Revision) -> Result<Watch, StoreError> {
        self.0.watch(kinds, after).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_batch_is_one_moment_of_the_cluster() {
    let bed = Bed::starting(Arc::new(Busy(cluster().await, AtomicBool::new(false))));
    until("the first batch is given", || async { !bed.os.lock().batches.is_empty() }).await;
    let first = bed.os.lock().batches[0].clone();
    let pod = first.iter().any(|delta| matches!(delta, Delta::Endpoint(id, _) if *id == endpoint_id("p")));
    let policy = first.iter().any(|delta| matches!(delta, Delta::Policy(id, _) if *id.name == *"deny"));
    assert!(pod && policy, "the pod comes with the policy that was there before it: {first:?}");
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
