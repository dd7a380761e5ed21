//! A lab whose datastore is a real Kubernetes API, with its controllers and scheduler.

use serde_json::Value;
use tortie_servers::programs::{Program, can_run};

use crate::demo_as;
use crate::support::{Lab, User};

const MANIFEST: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: web, ports: [{containerPort: 80}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: default}
spec:
  nodeSelector: {kubernetes.io/os: windows}
  containers: [{name: client, image: client}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: default}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress: [{from: [{podSelector: {matchLabels: {role: client}}}]}]
"#;

#[test]
fn the_demo_on_a_kubernetes_api() {
    if can_run(&[Program::Kube]) {
        demo_as(User::Root, "kubernetes");
    }
}

/// How many of the web pods the client reaches, and how many there are.
fn reached(lab: &Lab) -> (usize, usize) {
    let document: Value =
        serde_json::from_str(&lab.ok(&["lab", "matrix", "--port", "80", "-o", "json"])).unwrap();
    let connections = document["connections"].as_array().unwrap().iter();
    let to_web = connections.filter(|it| it["from"] == "default/client");
    let verdicts: Vec<&Value> = to_web.map(|it| &it["verdict"]).collect();
    (verdicts.iter().filter(|verdict| **verdict == "reached").count(), verdicts.len())
}

/// The pods of a Deployment run on nodes of both systems, policy follows a label that kubectl sets, and nothing remains of
/// deleted pods.
#[test]
fn kubectl_creates_labels_and_deletes_pods() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let lab = Lab::new(User::Root);
    let _running = lab.up(&["--datastore", "kubernetes"]);
    let file = lab.dir().with_file_name("manifest.yaml");
    std::fs::write(&file, MANIFEST).unwrap();
    let kubectl = |arguments: &str| {
        let words: Vec<&str> = ["lab", "kubectl"].into_iter().chain(arguments.split(' ')).collect();
        lab.ok(&words)
    };
    kubectl(&format!("apply -f {}", file.display()));
    kubectl("rollout status deployment/web --timeout=60s");
    kubectl("wait --for=condition=Ready pod --all --timeout=60s");
    let pods: Value = serde_json::from_str(&kubectl("get pods -o json")).unwrap();
    let pods = pods["items"].as_array().unwrap();
    let on = |node: &str| pods.iter().filter(|pod| pod["spec"]["nodeName"] == node).count();
    assert!(on("primary") > 0 && on("minion") > 0 && on("primary") + on("minion") == 5, "{pods:#?}");
    lab.wait_until("nobody reaches the web pods", || reached(&lab) == (0, 4));
    kubectl("label pod client role=client");
    lab.wait_until("the client reaches the web pods", || reached(&lab) == (4, 4));
    let service: Value =
        serde_json::from_str(&kubectl("get endpointslices -l kubernetes.io/service-name=web -o json"))
            .unwrap();
    assert_eq!(service["items"][0]["endpoints"].as_array().map(Vec::len), Some(4), "{service}");

    let address = kubectl("get service web -o jsonpath={.spec.clusterIP}");
    lab.wait_until("the client reaches the Service by its address", || {
        crate::workloads::get(&lab, &["exec", "default/client"], &format!("{address}/80")).is_some()
    });

    shows_its_state(&lab);

    // A deleted pod is replaced; a deleted Deployment leaves nothing.
    let name = pods.iter().find_map(|pod| pod["metadata"]["name"].as_str().filter(|name| *name != "client"));
    kubectl(&format!("delete pod {}", name.unwrap()));
    kubectl("rollout status deployment/web --timeout=60s");
    lab.wait_until("the client reaches the new pod, too", || reached(&lab) == (4, 4));
    kubectl("delete deployment web");
    kubectl("delete pod client");
    lab.wait_until("the pods are gone", || kubectl("get pods -o name").trim().is_empty());
    for kind in ["workloadendpoints", "ipamhandles"] {
        lab.wait_until("endpoints and their addresses are gone", || {
            let listed: Value = serde_json::from_str(&lab.ok(&["get", kind, "-A", "-o", "json"])).unwrap();
            let items = listed["items"].as_array().unwrap();
            // The nodes keep the addresses of their tunnels.
            items.iter().all(|item| {
                item["metadata"]["name"].as_str().is_some_and(|name| name.starts_with("vxlan-tunnel"))
            })
        });
    }
    lab.ok(&["lab", "down"]);
}

/// `tortie status` shows the nodes of a lab, which takes no installation.
fn shows_its_state(lab: &Lab) {
    let row = |screen: &str, node: &str| -> Vec<String> {
        let line = screen.lines().find(|line| line.starts_with(node)).unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect()
    };
    lab.wait_until("both nodes report that policy is in force", || {
        let output = lab.tortie(&["status"]).output().unwrap();
        let screen = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_shown = |node: &str, os: &str| {
            let row = row(&screen, node);
            row.len() == 9 && row[2] == "reports" && row[3] == os && row[6..8] == ["yes", "yes"]
        };
        let is_well = output.status.success() && screen.contains("agents: 2 of 2 nodes have reported");
        is_well && is_shown("primary", "linux") && is_shown("minion", "windows")
    });
    for command in ["install", "uninstall"] {
        let output = lab.tortie(&[command]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && errors.contains("has its own agents"), "{errors}");
    }
    // A user may have meant the cluster of kubectl.
    let output = lab.tortie(&["get", "nodes"]).env("KUBECONFIG", "/k").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let expected = format!(
        "datastore: the lab in {}; there is also --store kubernetes (KUBECONFIG=/k)\n",
        lab.dir().display()
    );
    assert!(output.status.success() && errors == expected, "{errors}");
}

#[test]
fn kubectl_needs_a_kubernetes_api() {
    let lab = Lab::new(User::Root);
    let _running = lab.up(&[]);
    shows_its_state(&lab);
    let output = lab.tortie(&["lab", "kubectl", "get", "pods"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("--datastore kubernetes"), "{errors}");
}
