//! Services whose backends come and go, and workloads whose pods are replaced.

use rustix::process::Signal;

use crate::support::{Lab, User, leftovers};

/// A server that echoes datagrams on one node, a client on the other one, and a Service that selects nothing.
const ECHO: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      nodeSelector: {kubernetes.io/hostname: linux-2}
      containers: [{name: echo, image: tortie.io/lab-program, args: [connectivity, serve, echo]}]
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec: {clusterIP: 10.96.0.20, selector: {app: echo}, ports: [{port: 7, protocol: UDP, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: empty}
spec: {clusterIP: 10.96.0.21, type: NodePort, selector: {app: nobody}, ports: [{port: 80, nodePort: 30021}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  nodeSelector: {kubernetes.io/hostname: primary}
  containers: [{name: client, image: client}]
"#;

/// Sends datagrams from one socket, and says when the first echo arrives, and the first one after some were lost.
const DATAGRAMS: &str = r#"
exec 3<>/dev/udp/10.96.0.20/7
lost=
while :; do
  printf x >&3
  if read -r -N1 -t 0.2 reply <&3; then
    [ -z "$lost" ] && echo answered || { echo answered again; exit; }
  else
    lost=1
  fi
done
"#;

const SETS: &str = r#"
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 3
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db, version: one}}
    spec: {containers: [{name: c, ports: [{containerPort: 80}]}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent, version: one}}
    spec: {containers: [{name: c, ports: [{containerPort: 80}]}]}
"#;

#[test]
fn services_follow_their_backends_and_apply_waits_for_new_pods() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2"]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("echo.yml", ECHO)]);

    // No agent takes the refusal for somebody else's policy.
    let reports = lab.json(&["get", "nodereports", "-o", "json"])["items"].clone();
    for report in reports.as_array().unwrap() {
        assert_eq!(report["status"]["conditions"], serde_json::json!([]), "{report:#}");
    }

    // A socket whose backend goes gets another one.
    let client = lab.start(&["lab", "exec", "default/client", "--", "bash", "-c", DATAGRAMS]);
    client.wait_for_line("answered");
    let pods = || lab.json(&["get", "pods", "-l", "app=echo", "-o", "json"])["items"].clone();
    let first = pods()[0].clone();
    lab.ok(&["delete", "pod", first["metadata"]["name"].as_str().unwrap()]);
    lab.wait_until("another pod runs", || {
        let pod = pods()[0].clone();
        pod["metadata"]["uid"] != first["metadata"]["uid"] && pod["status"]["phase"] == "Running"
    });
    assert_ne!(pods()[0]["status"]["podIP"], first["status"]["podIP"], "the test needs another address");
    client.wait_for_line("answered again");

    // Without backends, a Service refuses, by its address and by the port of a node.
    let refused = |from: &[&str], to: &str| {
        let connect = format!("exec 3<>/dev/tcp/{to}");
        let command = [&["lab"], from, &["--", "timeout", "5", "bash", "-c", &connect]].concat();
        let output = lab.tortie(&command).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains("Connection refused"), "{from:?} {to}: {errors}");
    };
    for from in [&["exec", "default/client"][..], &["capture", "primary"]] {
        refused(from, "10.96.0.21/80");
        refused(from, "192.0.2.12/30021");
    }

    // When `apply --wait` returns, all pods are of the new template.
    lab.ok(&["apply", "--wait", "-f", &lab.file("sets.yml", SETS)]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("sets.yml", &SETS.replace("version: one", "version: two"))]);
    let pods = lab.json(&["get", "pods", "-l", "app in (db,agent)", "-o", "json"])["items"].clone();
    let pods = pods.as_array().unwrap();
    let is_new = |pod: &&serde_json::Value| {
        pod["metadata"]["labels"]["version"] == "two" && pod["status"]["phase"] == "Running"
    };
    assert_eq!(pods.iter().filter(is_new).count(), 6, "{pods:#?}");
    assert_eq!(pods.len(), 6);

    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}
