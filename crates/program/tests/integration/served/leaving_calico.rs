//! `tortie calico` on a real API server with the objects of Calico's operator: what stops, what starts again, what is removed, and that policies
//! survive.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

use crate::served::install::{NODE, with_kubelet};
use crate::served::support::text_of;

/// The objects of an installation of Calico by its operator, without what kubelets need.
const CALICO: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: calico-op}
---
apiVersion: v1
kind: Namespace
metadata: {name: calico-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: tigera-operator, namespace: calico-op}
spec:
  replicas: 1
  selector: {matchLabels: {k8s-app: tigera-operator}}
  template: {metadata: {labels: {k8s-app: tigera-operator}}, spec: {containers: [{name: c, image: i}], nodeSelector: {absent: node}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: calico-typha, namespace: calico-system}
spec:
  replicas: 3
  selector: {matchLabels: {k8s-app: calico-typha}}
  template: {metadata: {labels: {k8s-app: calico-typha}}, spec: {containers: [{name: c, image: i}], nodeSelector: {absent: node}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: calico-apiserver, namespace: calico-system}
spec:
  replicas: 2
  selector: {matchLabels: {k8s-app: calico-apiserver}}
  template: {metadata: {labels: {k8s-app: calico-apiserver}}, spec: {containers: [{name: c, image: i}], nodeSelector: {absent: node}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: calico-node, namespace: calico-system}
spec:
  selector: {matchLabels: {k8s-app: calico-node}}
  template: {metadata: {labels: {k8s-app: calico-node}}, spec: {containers: [{name: c, image: i}], nodeSelector: {absent: node}}}
---
apiVersion: v1
kind: Service
metadata: {name: calico-api, namespace: calico-system}
spec: {ports: [{port: 443, targetPort: 5443}], selector: {k8s-app: calico-apiserver}}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v3.projectcalico.org, labels: {of: calico}}
spec:
  group: projectcalico.org
  version: v3
  groupPriorityMinimum: 1500
  versionPriority: 200
  insecureSkipTLSVerify: true
  service: {name: calico-api, namespace: calico-system, port: 443}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: tigera-operator}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tigera-operator}
subjects: [{kind: ServiceAccount, name: tigera-operator, namespace: calico-op}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: calico-node, namespace: calico-system, finalizers: [tigera.io/cni-protector]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: calico-cni-plugin, finalizers: [tigera.io/cni-protector, example.com/other]}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: installations.operator.tigera.io}
spec:
  group: operator.tigera.io
  names: {kind: Installation, listKind: InstallationList, plural: installations, singular: installation}
  scope: Cluster
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"#;

const INSTALLATION: &str = "
apiVersion: operator.tigera.io/v1
kind: Installation
metadata: {name: default, finalizers: [tigera.io/operator-cleanup]}
spec: {}
";

const POLICY: &str = "
apiVersion: crd.projectcalico.org/v1
kind: GlobalNetworkPolicy
metadata: {name: kept}
spec: {selector: all()}
";

fn tortie(kubeconfig: &Path, line: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    let output: Output = command.args(line.split(' ')).env("KUBECONFIG", kubeconfig).output().unwrap();
    (output.status.code(), text_of(&output))
}

/// What the components have, as far as Tortie changes it.
fn components(servers: &KubeApi) -> Value {
    let get = |arguments: &[&str]| -> Value {
        let text =
            servers.kubectl(&[&["get", "-o", "json", "--ignore-not-found"], arguments].concat()).unwrap();
        serde_json::from_str(&text).unwrap_or_default()
    };
    let mut found = json!({});
    for (namespace, name) in [
        ("calico-op", "tigera-operator"),
        ("calico-system", "calico-typha"),
        ("calico-system", "calico-apiserver"),
    ] {
        found[name] = get(&["deployment", "-n", namespace, name])["spec"]["replicas"].clone();
    }
    let agents = get(&["daemonset", "-n", "calico-system", "calico-node"]);
    found["calico-node"] = agents["spec"]["template"]["spec"]["nodeSelector"].clone();
    let service = get(&["apiservice", "v3.projectcalico.org"]);
    found["registration"] = json!([service["spec"]["service"]["name"], service["metadata"]["labels"]["of"]]);
    found
}

/// Tortie's controllers lead.
fn lead(servers: &KubeApi) {
    let time = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
    let metadata = json!({"name": "tortie-controllers", "namespace": "tortie-system"});
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {"renewTime": time}});
    servers.apply(&lease.to_string()).unwrap();
}

/// The condition of the node about its network: what Calico's agent has written when it ended, and what holds now.
fn network(servers: &KubeApi, status: Option<&str>) -> String {
    if let Some(status) = status {
        let condition =
            json!({"type": "NetworkUnavailable", "status": status, "reason": "CalicoIsDown", "message": "m"});
        let patch = json!({"status": {"conditions": [condition]}}).to_string();
        servers.kubectl(&["patch", "node", "one", "--subresource=status", "-p", &patch]).unwrap();
    }
    let path = r#"jsonpath={.status.conditions[?(@.type=="NetworkUnavailable")].status}"#;
    servers.kubectl(&["get", "node", "one", "-o", path]).unwrap()
}

/// The node's agent says that policy is in force.
fn report(servers: &KubeApi) {
    let time = jiff::Timestamp::now();
    let status = json!({"os": "linux", "time": time.to_string(), "heartbeatSeconds": 600, "endpoints": 0, "positions": {}, "conditions": []});
    let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "one"}, "status": status});
    servers.apply(&report.to_string()).unwrap();
}

#[test]
fn calico_stops_and_starts_as_it_was_and_its_policies_survive() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    // The definitions are Calico's.
    let options =
        KubeOptions { controllers: true, scheduler: true, definitions: true, ..KubeOptions::default() };
    let servers = KubeApi::start(&options).unwrap();
    let kubeconfig = servers.kubeconfig();
    servers.apply(NODE).unwrap();
    servers.apply(CALICO).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    servers.apply(INSTALLATION).unwrap();
    // Calico's API server does not answer. The API server needs a moment to notice that.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let (code, text) = tortie(&kubeconfig, "get tiers --store kubernetes");
        if code == Some(0) {
            break;
        }
        assert!(text.contains("503") && Instant::now() < deadline, "{text}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let output =
        with_kubelet(&servers, &["install", "--force", "--pool", "10.244.0.0/16", "--timeout", "120"]);
    assert!(output.status.success(), "{}", text_of(&output));
    servers.apply(POLICY).unwrap();
    let run = |line: &str| tortie(&kubeconfig, line);
    let before = components(&servers);

    // No agent of Tortie has reported.
    let (code, text) = run("calico stop");
    assert!(
        code == Some(2) && text.contains("node one: not all policy is known to be in force"),
        "{code:?} {text}"
    );
    let (code, text) = run("calico stop --dry-run");
    assert!(code == Some(2) && text.matches("would stop").count() == 5, "what is in the way, too: {text}");
    let (code, text) = run("calico start");
    assert!(code == Some(2) && text.contains("has changed nothing"), "{text}");
    report(&servers);
    let (code, text) = run("calico stop");
    assert!(code == Some(2) && text.contains("no Tortie controllers lead"), "{code:?} {text}");
    lead(&servers);
    let (code, text) = run("calico remove");
    assert!(code == Some(2) && text.contains("run tortie calico stop first"), "{text}");
    let (code, text) = run("calico stop --dry-run");
    assert!(code == Some(0) && text.matches("would stop").count() == 5, "{text}");
    assert_eq!(components(&servers), before, "nothing was changed until now");

    assert_eq!(network(&servers, Some("True")), "True", "Calico's agent says so when it ends");
    let (code, text) = run("calico stop --timeout 120");
    assert!(code == Some(0) && text.contains("the components above have stopped"), "{text}");
    assert_eq!(network(&servers, None), "False", "pods can be scheduled");
    let stopped = json!({
        "tigera-operator": 0, "calico-typha": 0, "calico-apiserver": 0, "registration": [null, null],
        "calico-node": {"absent": "node", "tortie.io/calico": "stopped"},
    });
    assert_eq!(components(&servers), stopped);
    let (code, text) = run("calico stop");
    assert!(code == Some(0) && text.contains("none of Calico's components"), "{text}");

    let (code, text) = run("uninstall");
    assert!(code == Some(2) && text.contains("run tortie calico start first"), "{text}");

    // What somebody else writes into the record is not carried out, and what is missing is not forgotten.
    let record = ["configmap", "tortie-calico", "-n", "tortie-system"];
    let patch = |fields: Value| {
        let patch = json!({"data": {"calico-system.daemonsets.calico-node": fields.to_string()}}).to_string();
        servers.kubectl(&[&["patch"][..], &record, &["--type=merge", "-p", &patch]].concat()).unwrap();
    };
    let path = "/apis/apps/v1/namespaces/calico-system/daemonsets/calico-node";
    patch(json!({"path": path, "merge": {"spec": {"template": {"spec": {"hostPID": true}}}}}));
    let (code, text) = run("calico start");
    assert!(code == Some(2) && text.contains("is none of tortie calico stop"), "{text}");
    assert_eq!(components(&servers), stopped);
    patch(
        json!({"path": path, "merge": {"spec": {"template": {"spec": {"nodeSelector": {"tortie.io/calico": null}}}}}}),
    );

    let (code, text) = run("calico start");
    assert!(code == Some(0) && text.contains("started"), "{text}");
    assert_eq!(components(&servers), before);
    let (code, text) = run("calico start");
    assert!(code == Some(2) && text.contains("taken back already"), "{text}");

    // For good: what the operator would have to release goes without it.
    report(&servers);
    lead(&servers);
    let (code, text) = run("calico stop --timeout 120");
    assert!(code == Some(0), "{text}");
    let (code, text) = run("calico remove --dry-run");
    assert!(code == Some(0) && text.matches("would ").count() == 3, "{text}");
    let (code, text) = run("calico remove");
    assert!(code == Some(0) && text.matches("tigera.io/cni-protector").count() == 2, "{text}");
    assert_eq!(servers.kubectl(&["get", "installations", "-o", "name"]).unwrap(), "");
    let role = ["get", "clusterrole", "calico-cni-plugin", "-o", "jsonpath={.metadata.finalizers}"];
    assert_eq!(servers.kubectl(&role).unwrap(), r#"["example.com/other"]"#);
    servers.kubectl(&["delete", "namespace", "calico-system", "calico-op", "--timeout=120s"]).unwrap();
    let (code, text) = run("calico remove");
    assert!(code == Some(0) && text.contains("has left nothing"), "{text}");
    let (code, text) = run("calico start");
    assert!(code == Some(2) && text.contains("taken back already"), "{text}");

    // As `helm uninstall` of Calico's chart does it.
    let definition = "globalnetworkpolicies.crd.projectcalico.org";
    let refused = servers.kubectl(&["delete", "crd", definition]).unwrap_err().to_string();
    assert!(refused.contains("tortie.io/deletion-allowed=true"), "{refused}");
    assert!(servers.kubectl(&["get", definition, "kept"]).is_ok(), "the policy is there");
    servers.kubectl(&["annotate", "crd", definition, "tortie.io/deletion-allowed=false"]).unwrap();
    assert!(servers.kubectl(&["delete", "crd", definition]).is_err());
    servers
        .kubectl(&["annotate", "--overwrite", "crd", definition, "tortie.io/deletion-allowed=true"])
        .unwrap();
    servers.kubectl(&["delete", "crd", definition]).unwrap();
    servers.kubectl(&["delete", "crd", "installations.operator.tigera.io"]).unwrap();
}
