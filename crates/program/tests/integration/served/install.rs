//! `tortie install`, `status` and `uninstall` on a real API server with controllers and scheduler. A thread does what
//! kubelets do: it reports pods as ready, and removes those that are being deleted.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints, Store, StoreError};

use crate::served::support::text_of;

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

pub(super) const NODE: &str = "
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
pub(super) fn with_kubelet(servers: &KubeApi, arguments: &[&str]) -> Output {
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
    assert!(code == Some(2) && text.contains("--pool is missing"), "{text}");
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

    let metadata = json!({"name": "p", "finalizers": ["projectcalico.org/ippool-finalizer"]});
    let pool = json!({"metadata": metadata, "spec": {"cidr": "10.1.0.0/16", "vxlanMode": "Always", "blockSize": 26}});
    let pool = format!(
        "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {}\nspec: {}\n",
        pool["metadata"], pool["spec"]
    );
    servers.apply(&pool).unwrap();
    let (code, text) = run(&["install", "--pool", "10.244.0.0/16"]);
    assert!(code == Some(2) && text.contains("would have no effect"), "{text}");
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
    // Nobody would remove it when the pool is deleted.
    let finalizers = ["get", "ippool", "p", "-o", "jsonpath={.metadata.finalizers}"];
    assert_eq!(servers.kubectl(&finalizers).unwrap(), "");
    let held = r#"{"metadata": {"finalizers": ["projectcalico.org/ippool-finalizer"]}}"#;
    servers.kubectl(&["patch", "ippool", "p", "--type=merge", "-p", held]).unwrap();

    // A definition is there as long as one of its objects is.
    let kept = "apiVersion: crd.projectcalico.org/v1\nkind: GlobalNetworkPolicy\n\
                metadata: {name: kept, finalizers: [example.com/kept]}\nspec: {}\n";
    servers.apply(kept).unwrap();
    let output = with_kubelet(&servers, &["uninstall", "--data", "--timeout", "2"]);
    let text = text_of(&output);
    assert!(output.status.code() == Some(1) && text.contains("is still being deleted after 2 s"), "{text}");
    assert!(!text.contains("nothing of Tortie is left"), "{text}");
    let policy = ["globalnetworkpolicies.crd.projectcalico.org", "kept"];
    let release = ["--type=merge", "-p", r#"{"metadata": {"finalizers": null}}"#];
    servers.kubectl(&[&["patch"][..], &policy, &release].concat()).unwrap();

    let output = with_kubelet(&servers, &["uninstall", "--data", "--timeout", "120"]);
    assert!(output.status.success(), "{}", text_of(&output));
    let left = servers.kubectl(&["get", "crds", "-o", "name"]).unwrap();
    assert_eq!(left.trim(), "");
}

/// flannel as its manifest has it, without what kubelets need.
const FLANNEL: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: kube-flannel}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-flannel-cfg, namespace: kube-flannel}
data: {net-conf.json: '{"Network": "10.244.0.0/16", "EnableNFTables": false, "Backend": {"Type": "vxlan"}}'}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-flannel-ds, namespace: kube-flannel}
spec:
  selector: {matchLabels: {app: flannel}}
  template:
    metadata: {labels: {app: flannel}}
    spec:
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/os, operator: In, values: [linux]}]}]
      hostNetwork: true
      tolerations: [{operator: Exists}]
      containers: [{name: kube-flannel, image: flannel}]
      volumes: [{name: flannel-cfg, configMap: {name: kube-flannel-cfg}}]
---
apiVersion: v1
kind: Node
metadata: {name: two, labels: {kubernetes.io/os: linux, kubernetes.io/hostname: two}}
status: {capacity: {cpu: 4, memory: 8Gi, pods: 110}, allocatable: {cpu: 4, memory: 8Gi, pods: 110}}
"#;

/// The label decides whether flannel or Tortie runs on a node, and never both.
#[test]
fn nodes_move_from_flannel_one_by_one() {
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
    let (code, text) = run(&["install", "--flannel"]);
    assert!(code == Some(2) && text.contains("no DaemonSet kube-flannel-ds"), "{text}");
    servers.apply(NODE).unwrap();
    servers.apply(FLANNEL).unwrap();
    let (code, text) = run(&["install", "--pool", "10.244.0.0/16"]);
    assert!(code == Some(2) && text.contains("kube-flannel/kube-flannel-ds provides"), "{text}");
    let (code, text) = run(&["install", "--flannel"]);
    assert!(code == Some(2) && text.contains("would run beside Tortie's agents"), "{text}");
    // The message has the command as a shell takes it.
    let command = text.lines().find(|line| line.starts_with("kubectl ")).unwrap();
    let (words, patch) = command.split_once(" '").unwrap();
    let words = words.split(' ').skip(1).chain([patch.trim_end_matches('\'')]).collect::<Vec<_>>();
    servers.kubectl(&words).unwrap();

    let (code, text) = run(&["install", "--flannel"]);
    assert!(code == Some(0) && text.contains("kubectl label node NODE tortie.io/network=tortie"), "{text}");
    assert!(text.contains("in flannel's network (10.244.0.0/16)"), "{text}");
    let get = |what: &[&str]| servers.kubectl(&[&["get", "-o", "json"], what].concat()).unwrap();
    let get = |what: &[&str]| serde_json::from_str::<Value>(&get(what)).unwrap();
    let pool = get(&["ippools.crd.projectcalico.org", "flannel"]);
    let expected = json!({"cidr": "10.244.0.0/16", "vxlanMode": "Always", "ipipMode": "Never", "natOutgoing": true,
        "assignmentMode": "Manual"});
    assert_eq!(pool["spec"], expected);
    let felix = get(&["felixconfigurations.crd.projectcalico.org", "default"]);
    assert_eq!((&felix["spec"]["vxlanVNI"], &felix["spec"]["vxlanPort"]), (&json!(1), &json!(8472)));
    // The nodes that each DaemonSet wants.
    let nodes = || {
        ["kube-flannel/kube-flannel-ds", "tortie-system/tortie-node"].map(|set| {
            let (namespace, name) = set.split_once('/').unwrap();
            get(&["daemonset", "-n", namespace, name])["status"]["desiredNumberScheduled"].as_u64()
        })
    };
    let until = |expected: [Option<u64>; 2]| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while nodes() != expected {
            assert!(Instant::now() < deadline, "{:?} instead of {expected:?}", nodes());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    until([Some(2), Some(0)]);
    servers.kubectl(&["label", "node", "one", "tortie.io/network=tortie"]).unwrap();
    until([Some(1), Some(1)]);
    let output = with_kubelet(&servers, &["install", "--flannel", "--timeout", "120"]);
    let text = text_of(&output);
    assert!(output.status.success() && text.contains("ippool/flannel unchanged"), "{text}");
    assert!(text.contains("Tortie is ready"), "{text}");
    let (code, text) = run(&["status"]);
    assert!(text.contains("1 of 1 nodes ready"), "{code:?} {text}");
    // Once flannel is gone, the installation can be repeated, and only as what it is.
    servers.kubectl(&["delete", "namespace", "kube-flannel", "--wait=false"]).unwrap();
    servers.kubectl(&["delete", "-n", "kube-flannel", "daemonset", "kube-flannel-ds"]).unwrap();
    let (code, text) = run(&["install"]);
    assert!(code == Some(2) && text.contains("use --flannel again"), "{text}");
    let (code, text) = run(&["install", "--flannel", "--no-wait"]);
    assert!(
        code == Some(0) && text.contains("stay as they are") && text.contains("(10.244.0.0/16)"),
        "{text}"
    );
    // Another pool that has these addresses, too.
    let other = "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {name: other}\n\
                 spec: {cidr: 10.244.0.0/17, vxlanMode: Always}\n";
    servers.apply(other).unwrap();
    let file = std::env::temp_dir().join(format!("net-conf-{}.json", std::process::id()));
    std::fs::write(&file, r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}"#).unwrap();
    let (code, text) = run(&["install", "--flannel", "--flannel-config", file.to_str().unwrap()]);
    std::fs::remove_file(file).unwrap();
    assert!(code == Some(2) && text.contains("IPPool other (10.244.0.0/17) overlaps"), "{text}");
}

/// Calico 3.32 may keep its kinds in `projectcalico.org/v3`. Tortie then works on these, creates no definitions of the
/// other group, and leaves Calico's definitions when it goes.
#[test]
fn an_installation_works_on_the_group_that_calico_uses() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers =
        KubeApi::start(&KubeOptions { controllers: true, scheduler: true, ..KubeOptions::default() })
            .unwrap();
    servers.create_native_definitions().unwrap();
    servers.apply(NODE).unwrap();
    let definitions = || servers.kubectl(&["get", "crds", "-o", "name"]).unwrap();
    let pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: of-calico}\n\
                spec: {cidr: 10.1.0.0/16, vxlanMode: Always}\n";
    servers.apply(pool).unwrap();

    let output = with_kubelet(&servers, &["install", "--timeout", "120"]);
    let text = text_of(&output);
    assert!(output.status.success() && text.contains("Tortie is ready"), "{text}");
    assert!(text.contains("skipped: Calico uses projectcalico.org/v3"), "{text}");
    assert!(!definitions().contains(".crd.projectcalico.org"), "{}", definitions());

    let kubeconfig = servers.kubeconfig();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yml").display().to_string();
    let policy = "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: p, namespace: default}\n\
                  spec: {selector: all()}\n";
    std::fs::write(&file, policy).unwrap();
    let store = format!("kubernetes:{}", kubeconfig.display());
    let run = |arguments: &[&str]| {
        let output = tortie(&kubeconfig, &[arguments, &["--store", &store]].concat());
        (output.status.success(), text_of(&output))
    };
    assert_eq!(run(&["apply", "-f", &file]), (true, "NetworkPolicy default/p created\n".to_owned()));
    let stored = servers.kubectl(&["get", "networkpolicies.projectcalico.org", "-o", "name"]).unwrap();
    assert!(stored.contains("networkpolicy.projectcalico.org/"), "{stored}");
    for (arguments, expected) in [
        (vec!["get", "ippools"], "of-calico"),
        (vec!["get", "networkpolicies", "--namespace", "default"], "p"),
        (vec!["delete", "-f", &file], "NetworkPolicy default/p deleted"),
    ] {
        let (is_good, text) = run(&arguments);
        assert!(is_good && text.contains(expected), "{arguments:?}: {text}");
    }
    let text = text_of(&tortie(&kubeconfig, &["status"]));
    assert!(text.contains("1 of 1 nodes ready"), "{text}");

    let output = with_kubelet(&servers, &["uninstall", "--data", "--timeout", "120"]);
    let text = text_of(&output);
    assert!(!output.status.success() && text.contains("projectcalico.org/v3"), "{text}");
    assert!(definitions().contains("ippools.projectcalico.org"), "{text}");
    let output = with_kubelet(&servers, &["uninstall", "--timeout", "120"]);
    assert!(output.status.success(), "{}", text_of(&output));
    assert!(!definitions().contains("tortie"), "{}", definitions());
    assert!(servers.kubectl(&["get", "ippools.projectcalico.org", "of-calico"]).is_ok());
}

#[test]
fn the_generated_files_are_accepted_by_the_api_server() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions {
        users: vec![("agent".to_owned(), Vec::new())],
        // They delete what owners leave behind.
        controllers: true,
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

    // Agents read the named Secrets, and no others.
    let options = ["install", "--dry-run", "--bgp", "--bgp-secret", "one", "--bgp-secret", "two"];
    let output = tortie(Path::new("/nonexistent"), &options);
    servers.apply(&String::from_utf8(output.stdout).unwrap()).unwrap();
    let may = |verb: &str, what: &str| {
        let account = "--as=system:serviceaccount:tortie-system:tortie-node";
        let answer = servers.kubectl(&["auth", "can-i", verb, what, "-n", "tortie-system", account]);
        answer.is_ok_and(|answer| answer.trim() == "yes")
    };
    for verb in ["get", "list", "watch"] {
        let found = ["secrets/one", "secrets/two", "secrets/three", "secrets"].map(|what| may(verb, what));
        assert_eq!(found, [true, true, false, false], "{verb}");
    }
    assert!(!may("update", "secrets/one"));
    // An empty name would allow all of them.
    let output = tortie(Path::new("/nonexistent"), &["install", "--dry-run", "--bgp", "--bgp-secret", ""]);
    assert!(!output.status.success() && text_of(&output).contains("--bgp-secret"), "{}", text_of(&output));
    // An installation without them takes the permission away.
    let kubeconfig = servers.kubeconfig();
    let output = tortie(&kubeconfig, &["install", "--pool", "10.244.0.0/16", "--no-wait"]);
    assert!(output.status.success(), "{}", text_of(&output));
    // The API server notices that a moment later.
    let deadline = Instant::now() + Duration::from_secs(20);
    while may("get", "secrets/one") || may("list", "secrets") {
        assert!(Instant::now() < deadline, "{}", text_of(&output));
        std::thread::sleep(Duration::from_millis(100));
    }

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
