//! A real API server with a cluster in it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tortie_agent::{Config, Platform};
use tortie_api::{Key, Kind};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

/// How many objects are created at once.
const WRITERS: usize = 32;

pub(crate) struct Cluster {
    pub(crate) servers: KubeApi,
    pub(crate) store: Arc<Kubernetes>,
    pub(crate) runtime: Runtime,
}

impl Cluster {
    /// An API server with a pool of addresses and these nodes.
    pub(crate) fn start(nodes: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let options = KubeOptions {
            // The load of the benchmark would be held back by the limit on concurrent requests.
            api_flags: vec![
                "--max-requests-inflight=2000".into(),
                "--max-mutating-requests-inflight=1000".into(),
            ],
            ..KubeOptions::default()
        };
        let servers = KubeApi::start(&options).unwrap();
        servers.create_definitions().unwrap();
        let store = Arc::new(runtime.block_on(client(&servers.kubeconfig())));
        let cluster = Self { servers, store, runtime };
        let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/8", "blockSize": 26, "vxlanMode": "Always"}});
        let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
        cluster.create(vec![
            (Key::global(Kind::IpPool, "default"), pool),
            (Key::global(Kind::IpamConfig, "default"), config),
        ]);
        cluster.create((0..nodes).map(node).collect());
        cluster
    }

    pub(crate) fn create(&self, objects: Vec<(Key, Value)>) {
        let (next, objects) = (Arc::new(AtomicUsize::new(0)), Arc::new(objects));
        self.runtime.block_on(async {
            let writers = (0..WRITERS).map(|_| {
                let (next, objects, store) = (next.clone(), objects.clone(), self.store.clone());
                tokio::spawn(async move {
                    while let Some((key, value)) = objects.get(next.fetch_add(1, Ordering::Relaxed)) {
                        store.create(key, value.clone()).await.unwrap();
                    }
                })
            });
            for writer in writers.collect::<Vec<_>>() {
                writer.await.unwrap();
            }
        });
    }
}

pub(crate) async fn client(kubeconfig: &Path) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(kubeconfig.to_owned())).await.unwrap()
}

pub(crate) fn node_name(number: usize) -> String {
    format!("node-{number}")
}

fn node(number: usize) -> (Key, Value) {
    let name = node_name(number);
    let address = format!("192.168.{}.{}/16", number / 250, number % 250 + 1);
    let annotations = json!({"projectcalico.org/IPv4Address": address});
    (Key::global(Kind::Node, &name), json!({"metadata": {"name": name, "annotations": annotations}}))
}

pub(crate) fn namespace(number: usize) -> (Key, Value) {
    let name = format!("ns-{number}");
    let labels = json!({"team": format!("team-{number}"), "environment": "production"});
    (Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name, "labels": labels}}))
}

/// A pod of the size that Deployments have, with an address.
pub(crate) fn pod(number: usize, namespace: usize, node: usize) -> (Key, Value) {
    let (name, namespace) = (format!("web-5d8f7c9b6d-{number:06}"), format!("ns-{namespace}"));
    let variable =
        |number: usize| json!({"name": format!("SETTING_{number}"), "value": "some value of this setting"});
    let container = json!({
        "name": "web", "image": "registry.example/team/web:1.2.3",
        "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
        "env": (0..12).map(variable).collect::<Vec<_>>(),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10},
    });
    let address = format!("10.{}.{}.{}", 128 + number / 65_536, number / 256 % 256, number % 256);
    let metadata = json!({
        "name": name, "namespace": namespace,
        "labels": {"app": "web", "tier": "front", "pod-template-hash": "5d8f7c9b6d", "app.kubernetes.io/name": "web"},
        "annotations": {"cni.projectcalico.org/podIP": format!("{address}/32"), "cni.projectcalico.org/podIPs": format!("{address}/32")},
    });
    let spec = json!({"nodeName": node_name(node), "containers": [container]});
    (Key::namespaced(Kind::Pod, &namespace, &name), json!({"metadata": metadata, "spec": spec}))
}

pub(crate) fn config(node: usize, store: Arc<Kubernetes>, folder: &Path, platform: Platform) -> Config {
    Config {
        node: node_name(node),
        store,
        platform,
        cni_socket: folder.join("agent.sock"),
        control_socket: folder.join("control.sock"),
        deletion_queue: folder.join("queue"),
    }
}
