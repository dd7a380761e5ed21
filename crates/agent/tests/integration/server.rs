//! The agent's socket and the deletions on disk: a second agent, a stolen socket, clients and deletions that wait.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::common::{Bed, FakeOs, TIMEOUT, endpoint_id, until};
use serde_json::json;
use tortie_cni::Command;
use tortie_cni::transport::ask;

/// A DaemonSet that is updated may start the new agent before the old one has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_waits_until_the_first_has_ended() {
    let bed = Bed::new().await;
    let lock = bed.dir.path().join("agent.sock.lock");
    assert_eq!(fs::metadata(&lock).unwrap().permissions().mode() & 0o777, 0o600);
    let os = FakeOs::default();
    let second = bed.another(&os);
    bed.pod("p", "u", json!({})).await;
    for container in ["c1", "c2", "c3"] {
        bed.call(bed.invocation(Command::Add, container, "p")).await.unwrap();
        bed.call(bed.invocation(Command::Del, container, "p")).await.unwrap();
    }
    assert!(os.lock().batches.is_empty(), "the second agent does nothing");
    bed.agent.abort();
    until("the second agent serves", || async { !os.lock().batches.is_empty() && !second.is_finished() })
        .await;
    // It has policy in force before it listens, so the first calls may find the socket of the first agent.
    until("it adds pods", || async {
        let (socket, add) = (bed.dir.path().join("agent.sock"), bed.invocation(Command::Add, "c4", "p"));
        let answer = tokio::task::spawn_blocking(move || ask(&socket, &add, TIMEOUT)).await.unwrap();
        answer.is_ok_and(|answer| answer.is_ok())
    })
    .await;
    assert_eq!(os.lock().connected, BTreeMap::from([(endpoint_id("p"), "c4".to_owned())]));
    second.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_is_removed_or_replaced_is_created_again() {
    let bed = Bed::new().await;
    let socket = bed.dir.path().join("agent.sock");
    let status = || bed.invocation(Command::Status, "", "");
    fs::remove_file(&socket).unwrap();
    until("the socket is there", || async { UnixStream::connect(&socket).is_ok() }).await;
    bed.call(status()).await.unwrap();
    fs::remove_file(&socket).unwrap();
    let thief = UnixListener::bind(&socket).unwrap();
    drop(thief);
    until("the socket is the agent's", || async { UnixStream::connect(&socket).is_ok() }).await;
    bed.call(status()).await.unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_call_is_disconnected() {
    let bed = Bed::new().await;
    let mut silent = UnixStream::connect(bed.dir.path().join("agent.sock")).unwrap();
    let read = tokio::task::spawn_blocking(move || silent.read(&mut [0]).unwrap());
    let read = tokio::time::timeout(std::time::Duration::from_secs(60), read).await;
    assert_eq!(read.expect("the agent waits for ever").unwrap(), 0);
}

/// One deletion has no pod's name, and another one waits for an ADD.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_on_disk_does_not_hold_up_others() {
    let bed = Bed::new().await;
    for (pod, container) in [("slow", "c1"), ("p", "c2")] {
        bed.pod(pod, pod, json!({})).await;
        bed.call(bed.invocation(Command::Add, container, pod)).await.unwrap();
    }
    let gate = bed.os.hold("c3");
    let blocked = bed.call(bed.invocation(Command::Add, "c3", "slow"));
    let queue = bed.dir.path().join("queue");
    let store = |name: &str, container: &str, pod: &str| {
        let mut call = bed.invocation(Command::Del, container, pod);
        if pod.is_empty() {
            call.args.clear();
        }
        fs::write(queue.join(name), serde_json::to_vec(&call).unwrap()).unwrap();
    };
    let check = async {
        until("the ADD is held", || async { bed.os.is_held("c3") }).await;
        fs::create_dir_all(&queue).unwrap();
        store("c1+eth0.json", "c1", "slow");
        store("c0+eth0.json", "c0", "");
        store("c2+eth0.json", "c2", "p");
        until("the other deletion is executed", || async { bed.endpoint("p", "eth0").await.is_none() }).await;
        until("the hopeless one is moved aside", || async { queue.join("c0+eth0.rejected").exists() }).await;
        assert!(queue.join("c1+eth0.json").exists());
        drop(gate);
    };
    let _ = tokio::join!(blocked, check);
    until("the slow one is executed", || async { !queue.join("c1+eth0.json").exists() }).await;
}
