//! `tortie apply --wait` and what nodes report, with a test in the place of the nodes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tortie_api::{Key, Kind};
use tortie_store::rpc::serve_unix;
use tortie_store::{Embedded, Store};

struct Cluster {
    store: Arc<Embedded>,
    dir: TempDir,
}

impl Cluster {
    async fn new() -> Self {
        let (store, dir) = (Arc::new(Embedded::in_memory().unwrap()), tempfile::tempdir().unwrap());
        let socket = dir.path().join("store.sock");
        tokio::spawn(serve(store.clone(), socket.clone()));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            assert!(Instant::now() < deadline);
            tokio::task::yield_now().await;
        }
        let cluster = Self { store, dir };
        cluster.put(&Key::global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
        cluster
    }

    async fn put(&self, key: &Key, value: Value) -> u64 {
        let written = match self.store.get(key).await.unwrap() {
            None => self.store.create(key, value).await,
            Some(there) => self.store.update(key, value, there.revision).await,
        };
        written.unwrap().revision
    }

    async fn report(&self, revision: u64, conditions: Value, more: usize) {
        let status = json!({"os": "linux", "revision": revision, "endpoints": 0, "conditions": conditions, "more": more});
        let report = json!({
            "apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "one"}, "status": status,
        });
        self.put(&Key::global(Kind::NodeReport, "one"), report).await;
    }

    fn file(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("m.yml");
        std::fs::write(&path, text).unwrap();
        path
    }

    fn tortie(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("unix:{}", self.dir.path().join("store.sock").display());
        command.args(arguments).env("TORTIE_STORE", store);
        command
    }

    /// Waits for so many seconds at most.
    async fn apply(&self, file: &Path, timeout: &str) -> Output {
        self.tortie(&["apply", "--wait", "--timeout", timeout, "-f", file.to_str().unwrap()])
            .output()
            .await
            .unwrap()
    }
}

/// The seconds to wait for what does not come, and for what does.
const SHORT: &str = "2";
const LONG: &str = "60";

async fn serve(store: Arc<Embedded>, socket: PathBuf) {
    serve_unix(store, &socket).await.unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

const POLICY: &str = "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: deny}\n\
                      spec: {selector: all(), types: [Ingress]}\n";

#[tokio::test(flavor = "multi_thread")]
async fn what_nodes_say_of_the_applied_decides() {
    let cluster = Cluster::new().await;
    let file = cluster.file(POLICY);
    let condition = |object: &str, reason: &str, message: &str| json!([{"object": object, "reason": reason, "message": message}]);
    let named = "GlobalNetworkPolicy deny";
    let table = [
        (json!([]), 0, true, "in force on 1 nodes"),
        (
            condition("n/p", "RuleNotExpressible", "GlobalNetworkPolicy other: no"),
            3,
            true,
            "and 3 conditions more",
        ),
        (
            condition("n/p", "RuleNotExpressible", "GlobalNetworkPolicy deny: no"),
            0,
            false,
            "1 of these conditions",
        ),
        (
            condition(named, "NotUnderstood", "spec.types"),
            0,
            false,
            "node one: GlobalNetworkPolicy deny: NotUnderstood",
        ),
        (condition("n/p", "InterfaceMissing", "n/p: not there"), 0, false, "not in force on one"),
    ];
    for (conditions, more, good, expected) in table {
        cluster.report(1_000, conditions, more).await;
        let output = cluster.apply(&file, if good { LONG } else { SHORT }).await;
        assert_eq!(output.status.success(), good, "{}", said(&output));
        assert!(said(&output).contains(expected), "{expected:?} is not in {}", said(&output));
    }
    cluster.report(1, json!([]), 7).await;
    let output = cluster.apply(&file, SHORT).await;
    assert!(!output.status.success() && said(&output).contains("not in force on one"), "{}", said(&output));
    let got = cluster.tortie(&["get", "nodereports"]).output().await.unwrap();
    assert!(said(&got).contains("and 7 more"), "{}", said(&got));
}

/// A pod's labels count when its endpoint has them, which is a later write.
#[tokio::test(flavor = "multi_thread")]
async fn a_relabelled_pod_counts_when_its_endpoint_follows() {
    let cluster = Cluster::new().await;
    let key = Key::namespaced(Kind::Pod, "default", "p");
    let pod = |label: &str| {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "default", "uid": "u", "labels": {"app": label}},
            "spec": {"nodeName": "one", "containers": [{"name": "c"}]}})
    };
    cluster.put(&key, pod("old")).await;
    let endpoint = |uid: &str, label: &str| {
        json!({"metadata": {"annotations": {"tortie.io/pod-uid": uid}, "labels": {"app": label}},
            "spec": {"pod": "p", "node": "one"}})
    };
    let ours = Key::namespaced(Kind::WorkloadEndpoint, "default", "one-k8s-p-eth0");
    let stale = Key::namespaced(Kind::WorkloadEndpoint, "default", "two-k8s-p-eth0");
    cluster.put(&ours, endpoint("u", "old")).await;
    cluster.put(&stale, endpoint("another", "old")).await;
    cluster.report(1_000, json!([]), 0).await;
    let file = cluster.file(&pod("new").to_string());
    let output = cluster.apply(&file, SHORT).await;
    assert!(!output.status.success(), "its endpoint has the old label: {}", said(&output));

    let revision = cluster.put(&ours, endpoint("u", "new")).await;
    cluster.report(revision - 1, json!([]), 0).await;
    assert!(!cluster.apply(&file, SHORT).await.status.success(), "it is not in force yet");
    cluster.report(revision, json!([]), 0).await;
    let output = cluster.apply(&file, LONG).await;
    assert!(output.status.success(), "{}", said(&output));
}
