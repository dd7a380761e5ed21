//! `tortie install`, `status` and `uninstall` on a real API server with controllers and scheduler. A thread does what
//! kubelets do: it reports pods as ready, and removes those that are being deleted.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints, Store, StoreError};

use crate::support::text_of;

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

const NODE: &str = "
apiVersion: v1
kind: Node
metadata: {name: one, labels: {kubernetes.io/os: linux, kubernetes.io/hostname: one}}
status: {capacity: {cpu: 4, memory: 8Gi, pods: 110}, allocatable: {cpu: 4, memory: 8Gi, pods: 110}}
";

fn tortie(kubeconfig: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args(arguments).env("KUBECONFIG", kubeconfig).output().unwrap()
}

/// What the kubelet of node `one` does for Tortie's pods.
fn kubelet(servers: &KubeApi) {
    let Ok(pods) = servers.kubectl(&["get", "pods", "-n", "tortie-system", "-o", "json"]) else { return };
    let pods: Value = serde_json::from_str(&pods).unwrap_or_default();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().unwrap();
        // Either may be too late.
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            let _ = servers.kubectl(&[
                "delete",
                "pod",
                "-n",
                "tortie-system",
                name,
                "--force",
                "--grace-period=0",
            ]);
        } else if pod["spec"]["nodeName"] == "one" && pod["status"]["phase"] != "Running" {
            let status =
                json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
            let patch =
                ["--subresource=status", "--type=merge", "-p", &status.to_string()].map(str::to_owned);
            let mut arguments = vec!["patch", "pod", "-n", "tortie-system", name];
            arguments.extend(patch.iter().map(String::as_str));
            let _ = servers.kubectl(&arguments);
        }
    }
}

/// Runs a command while a kubelet works.
fn with_kubelet(servers: &KubeApi, arguments: &[&str]) -> Output {
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                kubelet(servers);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let output = tortie(&servers.kubeconfig(), arguments);
        has_ended.store(true, Ordering::Relaxed);
        output
    })
}

#[test]
fn an_installation_comes_and_goes() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers =
        KubeApi::start(&KubeOptions { controllers: true, scheduler: true, ..KubeOptions::default() })
            .unwrap();
    let kubeconfig = servers.kubeconfig();
    let run = |arguments: &[&str]| {
        let output = tortie(&kubeconfig, arguments);
        (output.status.code(), text_of(&output))
    };
    let (code, text) = run(&["install"]);
    assert!(code == Some(1) && text.contains("--pool is missing"), "{text}");
    let (code, text) = run(&["status"]);
    assert!(code == Some(1) && text.contains("not installed"), "{text}");

    servers.apply(NODE).unwrap();
    let (code, text) = run(&["install", "--pool", "10.244.0.0/16", "--timeout", "10"]);
    assert!(code == Some(1) && text.contains("daemonset/tortie-node created"), "{text}");
    assert!(text.contains("this is missing") && text.contains("pod tortie-node-"), "{text}");

    let output = with_kubelet(&servers, &["install", "--pool", "10.244.0.0/16", "--timeout", "120"]);
    let text = text_of(&output);
    assert!(output.status.success() && text.contains("Tortie is ready"), "{text}");
    assert!(text.contains("daemonset/tortie-node unchanged") && !text.contains("created"), "{text}");

    let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.1.0.0/16", "vxlanMode": "Always", "blockSize": 26}});
    let pool = format!(
        "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {}\nspec: {}\n",
        pool["metadata"], pool["spec"]
    );
    servers.apply(&pool).unwrap();
    let (code, text) = run(&["install", "--pool", "10.244.0.0/16"]);
    assert!(code == Some(1) && text.contains("would have no effect"), "{text}");
    let (code, text) = run(&["status"]);
    assert!(code == Some(1) && text.contains("1 of 1 nodes ready") && text.contains("10.1.0.0/16"), "{text}");
    let row = text.lines().find(|line| line.starts_with("one ")).unwrap();
    assert!(row.contains("ready") && row.contains("unknown"), "{text}");

    let output = with_kubelet(&servers, &["uninstall", "--timeout", "120"]);
    let text = text_of(&output);
    assert!(output.status.success() && text.contains("cleaning nodes: 1 of 1 nodes ready"), "{text}");
    let all = ["get", "clusterroles,clusterrolebindings,namespaces,crds", "-o", "name"];
    let left = servers.kubectl(&all).unwrap();
    let left: Vec<&str> = left.lines().filter(|name| name.contains("tortie")).collect();
    assert_eq!(left, Vec::<&str>::new());
    assert!(servers.kubectl(&["get", "ippools.crd.projectcalico.org", "p"]).is_ok(), "the data is kept");

    let output = with_kubelet(&servers, &["uninstall", "--data", "--timeout", "120"]);
    assert!(output.status.success(), "{}", text_of(&output));
    let left = servers.kubectl(&["get", "crds", "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
}

#[test]
fn the_generated_files_are_accepted_by_the_api_server() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions {
        users: vec![("agent".to_owned(), Vec::new())],
        ..KubeOptions::default()
    })
    .unwrap();
    let manifest = std::fs::read_to_string(Path::new(DEPLOY).join("tortie.yaml")).unwrap();
    let output = tortie(Path::new("/nonexistent"), &["install", "--dry-run"]);
    assert!(
        manifest.ends_with(&String::from_utf8(output.stdout).unwrap()),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    servers.apply(&manifest).unwrap();
    let again = servers.kubectl(&["apply", "-k", DEPLOY]).unwrap();
    assert!(again.lines().all(|line| line.ends_with(" unchanged")), "the kustomization differs: {again}");
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();

    // The agents' role for the default pool allows that name only.
    let binding = |role: &str| {
        format!(
            "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: test-{role}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {role}}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: agent}}]
---
"
        )
    };
    servers.apply(&["tortie-node", "tortie-node-setup"].map(binding).concat()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store =
            Kubernetes::new(&KubernetesConfig::Kubeconfig(servers.kubeconfig_of("agent"))).await.unwrap();
        let provide = async |name: &str| {
            let pool =
                json!({"metadata": {"name": name}, "spec": {"cidr": "10.1.0.0/16", "vxlanMode": "Always"}});
            store.provide(&Key::global(Kind::IpPool, name), pool).await
        };
        assert!(matches!(provide("other").await, Err(StoreError::Forbidden(_))));
        provide(tortie_deploy::POOL_NAME).await.unwrap();
        provide(tortie_deploy::POOL_NAME).await.unwrap();
        assert_eq!(store.list(Kind::IpPool).await.unwrap().items.len(), 1);
    });
}
