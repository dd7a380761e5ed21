//! Services whose backends come and go, and workloads whose pods are replaced.

use std::net::TcpStream;
use std::time::Duration;

use rustix::process::Signal;
use tortie_kernel::namespace::NetNs;

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

/// A server with a port of its node, its Service, and a client on the other node.
const WEB: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: calico-demo}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: calico-demo, labels: {app: web}}
spec:
  nodeSelector: {kubernetes.io/hostname: linux-2}
  containers: [{name: c, ports: [{containerPort: 80, hostPort: 8088}]}]
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: calico-demo, labels: {app: client}}
spec:
  nodeSelector: {kubernetes.io/hostname: primary}
  containers: [{name: c, ports: [{containerPort: 80}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: calico-demo}
spec: {clusterIP: 10.96.0.77, type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30080}]}
"#;

/// The answers of `explain` about packets that somebody translates are those of the packets.
#[test]
fn explain_agrees_with_packets_to_services_and_ports_of_nodes() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2"]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("web.yml", WEB)]);
    lab.wait_for_pods();
    let policy = |spec: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: p, namespace: calico-demo}}\nspec: {{selector: app == 'web', {spec}}}\n"
        )
    };
    let namespaces = lab.namespaces();
    let senders = [
        ("192.0.2.1", namespaces.between_nodes()),
        ("calico-demo/web", namespaces.of_pod("web")),
        ("calico-demo/client", namespaces.of_pod("client")),
    ];
    // The Service, the port of the pod's node, that of the other node, the pod's own port of its node.
    let targets = ["10.96.0.77:80", "192.0.2.12:30080", "192.0.2.11:30080", "192.0.2.12:8088"];
    let is_asked = |from: &str, to: &str| match from {
        // Strangers have no way to a Service's own address.
        "192.0.2.1" => !to.starts_with("10."),
        // Of packets to the ports of another node, `explain` says that its answer is about the node.
        "calico-demo/web" => to != "192.0.2.11:30080",
        _ => !to.starts_with("192.0.2.12"),
    };
    let mut seen = std::collections::BTreeSet::new();
    for spec in [
        "types: [Egress], egress: [{action: Allow, destination: {selector: app == 'other'}}]",
        "types: [Egress], egress: [{action: Allow, destination: {selector: app == 'web'}}]",
        "types: [Ingress], ingress: [{action: Allow, source: {selector: app == 'client'}}]",
        "types: [Ingress], ingress: [{action: Allow, source: {selector: app == 'web'}}]",
        "types: [Ingress], ingress: [{action: Allow, source: {nets: [192.0.2.1/32]}}]",
        "types: [Ingress], ingress: [{action: Deny, source: {nets: [192.0.2.1/32]}}, {action: Allow}]",
    ] {
        lab.ok(&["apply", "--wait", "-f", &lab.file("policy.yml", &policy(spec))]);
        for (from, namespace) in &senders {
            for to in targets.iter().filter(|to| is_asked(from, to)) {
                let connect = || TcpStream::connect_timeout(&to.parse().unwrap(), Duration::from_secs(2));
                let reached = namespace.run(connect).unwrap().is_ok();
                let (address, port) = to.split_once(':').unwrap();
                let explained = lab.tortie(&["explain", from, address, "--port", port]).output().unwrap();
                let code = explained.status.code();
                let text = String::from_utf8_lossy(&explained.stdout);
                assert_eq!(code, Some(i32::from(!reached)), "{spec}: {from} → {to}: {text}");
                seen.insert((from.to_owned(), to.to_owned(), reached));
            }
        }
    }
    for (from, to, _) in &seen {
        let both = [true, false].map(|reached| seen.contains(&(*from, *to, reached)));
        assert!(both == [true, true] || *to == "192.0.2.11:30080", "{from} → {to}: {both:?}");
    }
    running.signal(Signal::TERM);
    running.wait();
}

/// Two servers on one node, a client on each node, and Services of all kinds in front of the servers.
const KINDS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: calico-demo}
---
apiVersion: v1
kind: Pod
metadata: {name: one, namespace: calico-demo, labels: {app: web}}
spec: {nodeSelector: {kubernetes.io/hostname: linux-2}, containers: [{name: c, ports: [{containerPort: 80}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: two, namespace: calico-demo, labels: {app: web}}
spec: {nodeSelector: {kubernetes.io/hostname: linux-2}, containers: [{name: c, ports: [{containerPort: 80}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, namespace: calico-demo}
spec: {nodeSelector: {kubernetes.io/hostname: primary}, containers: [{name: c}]}
---
apiVersion: v1
kind: Pod
metadata: {name: near, namespace: calico-demo}
spec: {nodeSelector: {kubernetes.io/hostname: linux-2}, containers: [{name: c}]}
---
apiVersion: v1
kind: Service
metadata: {name: plain, namespace: calico-demo}
spec: {clusterIP: 10.96.0.31, type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30031}]}
---
apiVersion: v1
kind: Service
metadata: {name: sticky, namespace: calico-demo}
spec:
  clusterIP: 10.96.0.32
  type: NodePort
  sessionAffinity: ClientIP
  selector: {app: web}
  ports: [{port: 80, nodePort: 30032}]
---
apiVersion: v1
kind: Service
metadata: {name: local, namespace: calico-demo}
spec:
  clusterIP: 10.96.0.33
  type: LoadBalancer
  internalTrafficPolicy: Local
  externalTrafficPolicy: Local
  healthCheckNodePort: 30100
  selector: {app: web}
  ports: [{port: 80, nodePort: 30033}]
"#;

/// The page that an HTTP server answers with its headers; none if it does not answer.
fn page(address: &str) -> Option<String> {
    use std::io::{Read, Write};
    let mut stream = TcpStream::connect_timeout(&address.parse().unwrap(), Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn services_of_all_kinds_are_served_by_the_agents_and_mended() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2"]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("kinds.yml", KINDS)]);
    lab.wait_for_pods();
    let namespaces = lab.namespaces();
    let (outside, far, near) =
        (namespaces.between_nodes(), namespaces.of_pod("far"), namespaces.of_pod("near"));
    let ask = |from: &NetNs, address: &str| from.run(|| page(address)).unwrap();
    let pages = |address: &str| -> std::collections::BTreeSet<String> {
        let answers = (0..20).map(|_| ask(&outside, address).unwrap_or_default());
        answers.map(|answer| answer.lines().last().unwrap_or_default().to_owned()).collect()
    };
    lab.wait_until("the ports of the node answer", || ask(&outside, "192.0.2.11:30031").is_some());
    assert_eq!(pages("192.0.2.11:30031").len(), 2, "connections spread");
    assert_eq!(pages("192.0.2.11:30032").len(), 1, "a client keeps its backend");

    // Backends are on the second node only. Pods and the node itself reach all of them by the port of the node.
    for (from, address, reached) in [
        (&outside, "192.0.2.12:30033", true),
        (&outside, "192.0.2.11:30033", false),
        (&far, "192.0.2.11:30033", true),
        (&far, "10.96.0.33:80", false),
        (&near, "10.96.0.33:80", true),
        (&far, "10.96.0.31:80", true),
    ] {
        assert_eq!(ask(from, address).is_some(), reached, "{address}");
    }
    for (address, status, body) in [
        ("192.0.2.12:30100", "200 OK", r#""localEndpoints":2,"#),
        ("192.0.2.11:30100", "503 Service Unavailable", r#""localEndpoints":0,"#),
        ("192.0.2.11:10256", "200 OK", r#""nodeEligible":true"#),
    ] {
        let answer = ask(&outside, address).unwrap_or_default();
        assert!(answer.contains(status) && answer.contains(body), "{address}: {answer}");
    }

    // Somebody removes the table.
    let primary = namespaces.of_node("primary");
    let delete = || {
        let mut command = std::process::Command::new("nft");
        assert!(command.args(["delete", "table", "inet", "tortie-services"]).status().unwrap().success());
    };
    primary.run(delete).unwrap();
    lab.wait_until("the table is there again", || ask(&far, "10.96.0.31:80").is_some());
    let reports = lab.json(&["get", "nodereports", "-o", "json"])["items"].clone();
    for report in reports.as_array().unwrap() {
        assert_eq!(report["status"]["conditions"], serde_json::json!([]), "{report:#}");
    }
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}
