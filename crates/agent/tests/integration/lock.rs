//! A datastore that somebody locks, as `calicoctl datastore migrate` does, and one of an unknown version of Calico.

use std::os::unix::net::UnixStream;

use crate::common::{Bed, FakeOs, cluster, put, until};
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_cni::{Code, Command};
use tortie_store::Store;

fn information() -> Key {
    Key::global(Kind::ClusterInformation, "default")
}

async fn lock(store: &dyn Store, is_locked: bool) {
    let spec = json!({"datastoreReady": !is_locked, "calicoVersion": "v3.32.0"});
    put(store, &information(), json!({"metadata": {"name": "default"}, "spec": spec})).await;
}

async fn reasons(bed: &Bed) -> Vec<String> {
    let conditions = bed.report().await["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().map(|one| one["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_datastore_is_not_applied_and_not_written() {
    let bed = Bed::new().await;
    for name in ["p", "q"] {
        bed.pod(name, "u", json!({})).await;
    }
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    lock(&*bed.store, true).await;
    until("the node reports the lock", || async { reasons(&bed).await == ["DatastoreLocked"] }).await;
    let batches = bed.os.lock().batches.len();
    let before = bed.os.lock().state.clone();

    let deny = Key::namespaced(Kind::NetworkPolicy, "n", "deny");
    let policy = json!({"metadata": {"name": "deny", "namespace": "n"}, "spec": {"selector": "all()", "types": ["Ingress"]}});
    put(&*bed.store, &deny, policy).await;
    let blocks = async || bed.store.list(Kind::IpamBlock).await.unwrap().items;
    let written = blocks().await;
    for (command, container, pod) in [(Command::Add, "c2", "q"), (Command::Del, "c1", "p")] {
        let failure = bed.call(bed.invocation(command, container, pod)).await.unwrap_err();
        assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
        assert!(failure.details.contains("datastoreReady is false"), "{failure:?}");
    }
    assert_eq!(blocks().await, written, "no address is taken or released");
    bed.call(bed.invocation(Command::Check, "c1", "p")).await.unwrap();
    bed.call(bed.invocation(Command::Status, "", "")).await.expect("the pods of the node continue to work");
    assert_eq!(bed.os.lock().batches.len(), batches, "nothing is applied");
    assert_eq!(bed.os.lock().state, before);

    lock(&*bed.store, false).await;
    until("the policy is in force", || async { bed.os.lock().state != before }).await;
    until("the node reports no lock", || async { reasons(&bed).await.is_empty() }).await;
    bed.call(bed.invocation(Command::Add, "c2", "q")).await.unwrap();
    bed.call(bed.invocation(Command::Del, "c1", "p")).await.unwrap();
    bed.agent.abort();
}

/// An ADD that is under way when the datastore is locked fails at once, and leaves nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_add_under_way_fails_when_the_datastore_is_locked() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let open = bed.os.hold("c1");
    let add = bed.call(bed.invocation(Command::Add, "c1", "p"));
    let lock_meanwhile = async {
        until("the pod is being connected", || async { bed.os.is_held("c1") }).await;
        lock(&*bed.store, true).await;
        until("the node reports the lock", || async { reasons(&bed).await == ["DatastoreLocked"] }).await;
        drop(open);
    };
    let (added, ()) = tokio::join!(add, lock_meanwhile);
    let failure = added.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    assert!(failure.details.contains("datastoreReady is false"), "{failure:?}");
    assert!(bed.store.list(Kind::WorkloadEndpoint).await.unwrap().items.is_empty());
    assert!(bed.store.list(Kind::IpamHandle).await.unwrap().items.is_empty(), "the address is free again");
    bed.agent.abort();
}

/// A datastore that is filled at the moment may lack half of the policies.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_waits_for_a_locked_datastore() {
    let store = cluster().await;
    lock(&*store, true).await;
    let bed = Bed::on(store.clone(), FakeOs::default());
    let socket = bed.dir.path().join("agent.sock");
    let applied_or_written = async || {
        let blocks = store.list(Kind::IpamBlock).await.unwrap().items.len();
        (bed.os.lock().batches.len(), blocks, UnixStream::connect(&socket).is_ok())
    };
    for _ in 0..10 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(applied_or_written().await, (0, 0, false));
    }
    lock(&*store, false).await;
    until("the agent serves", || async { UnixStream::connect(&socket).is_ok() }).await;
    bed.agent.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_version_of_calico_is_a_condition_and_nothing_else() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let spec = json!({"datastoreReady": true, "calicoVersion": "v3.29.1"});
    put(&*bed.store, &information(), json!({"metadata": {"name": "default"}, "spec": spec})).await;
    until("the node reports the version", || async { reasons(&bed).await == ["CalicoVersionUnknown"] }).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    bed.store.delete(&information(), None).await.unwrap();
    until("the condition ends", || async { reasons(&bed).await.is_empty() }).await;
    bed.agent.abort();
}
