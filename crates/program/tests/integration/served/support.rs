//! A datastore that a test serves, with the test in the role of the nodes.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tortie_api::{Key, Kind};
use tortie_store::rpc::serve_unix;
use tortie_store::{Embedded, Store, StoreError};

pub(crate) struct Cluster {
    pub store: Arc<Embedded>,
    dir: TempDir,
    /// Writes reports again and again.
    reporting: Mutex<Option<JoinHandle<()>>>,
}

async fn put(store: &Embedded, key: &Key, value: Value) -> Result<u64, StoreError> {
    let written = match store.get(key).await? {
        None => store.create(key, value).await,
        Some(there) => store.update(key, value, &there.version).await,
    };
    Ok(written?.position.0)
}

fn report(position: u64, conditions: &Value, more: usize) -> Value {
    let positions: BTreeMap<&str, u64> = Kind::all().map(|kind| (kind.plural(), position)).collect();
    let time = jiff::Timestamp::now().to_string();
    let status = json!({"os": "linux", "time": time, "heartbeatSeconds": 60, "positions": positions, "endpoints": 0, "conditions": conditions, "more": more});
    json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "one"}, "status": status})
}

impl Cluster {
    pub(crate) async fn new() -> Self {
        let (store, dir) = (Arc::new(Embedded::in_memory().unwrap()), tempfile::tempdir().unwrap());
        let socket = dir.path().join("store.sock");
        tokio::spawn(serve(store.clone(), socket.clone()));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            assert!(Instant::now() < deadline);
            tokio::task::yield_now().await;
        }
        let cluster = Self { store, dir, reporting: Mutex::default() };
        cluster.put(&Key::global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
        cluster
    }

    pub(crate) async fn put(&self, key: &Key, value: Value) -> u64 {
        loop {
            match put(&self.store, key, value.clone()).await {
                Err(StoreError::Conflict(_)) => {}
                written => return written.unwrap(),
            }
        }
    }

    /// Stores the endpoint of pod `p` on a node, with the label `app: <namespace>`.
    pub(crate) async fn put_endpoint(&self, namespace: &str, node: &str) {
        let key = Key::namespaced(Kind::WorkloadEndpoint, namespace, format!("{node}-k8s-p-eth0"));
        let metadata = json!({"name": key.name, "namespace": namespace, "labels": {"app": namespace}});
        let spec = json!({"node": node, "orchestrator": "k8s", "pod": "p", "endpoint": "eth0",
            "ipNetworks": ["10.0.0.1/32"], "profiles": [format!("kns.{namespace}")]});
        let endpoint = json!({"apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": metadata, "spec": spec});
        self.put(&key, endpoint).await;
    }

    /// Reports that everything up to this position of every kind is in force.
    pub(crate) async fn report(&self, position: u64, conditions: Value, more: usize) {
        self.stop_reporting().await;
        self.put(&Key::global(Kind::NodeReport, "one"), report(position, &conditions, more)).await;
    }

    /// Reports until the next report that everything is in force which is stored by then.
    pub(crate) async fn report_everything(&self, conditions: Value, more: usize) {
        self.report(1, conditions.clone(), more).await;
        let store = self.store.clone();
        let reporting = tokio::spawn(async move {
            let key = Key::global(Kind::NodeReport, "one");
            loop {
                let latest = store.epoch().await.unwrap().unwrap().latest.0;
                // Somebody may ask for a report at the same time.
                let _ = put(&store, &key, report(latest, &conditions, more)).await;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        *self.reporting.lock().unwrap() = Some(reporting);
    }

    async fn stop_reporting(&self) {
        let reporting = self.reporting.lock().unwrap().take();
        if let Some(reporting) = reporting {
            reporting.abort();
            let _ = reporting.await;
        }
    }

    pub(crate) fn file(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("m.yml");
        std::fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn tortie(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("unix:{}", self.dir.path().join("store.sock").display());
        command.args(arguments).env("TORTIE_STORE", store);
        command
    }

    /// The folder of its files.
    pub(crate) fn folder(&self) -> String {
        self.dir.path().display().to_string()
    }

    /// Waits for that many seconds at most.
    pub(crate) async fn apply(&self, file: &Path, timeout: &str) -> Output {
        self.tortie(&["apply", "--wait", "--timeout", timeout, "-f", file.to_str().unwrap()])
            .output()
            .await
            .unwrap()
    }
}

/// The seconds to wait for what does not happen, and for what does.
pub(crate) const SHORT: &str = "2";
pub(crate) const LONG: &str = "60";

async fn serve(store: Arc<Embedded>, socket: PathBuf) {
    serve_unix(store, &socket).await.unwrap();
}

pub(crate) fn text_of(output: &Output) -> String {
    // Each change names its datastore, which `offline::which_datastore` tests.
    let errors = String::from_utf8_lossy(&output.stderr);
    let errors = errors.split_inclusive('\n').filter(|line| !line.starts_with("datastore: "));
    String::from_utf8_lossy(&output.stdout).into_owned() + &errors.collect::<String>()
}
