//! Runs the program on manifests in a separate folder.
#![allow(dead_code)]

use std::process::Command;

/// The exit code, standard output and standard error of `tortie` with these files.
pub(crate) fn tortie(files: &[(&str, &str)], arguments: &[&str]) -> (i32, String, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
        .current_dir(dir.path())
        .env_remove("TORTIE_STORE")
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A shop: three front ends that reach the back end, a job in another namespace, a partner's network, two nodes.
pub(crate) const CLUSTER: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {team: a}}
---
apiVersion: v1
kind: Namespace
metadata: {name: jobs}
---
apiVersion: v1
kind: Pod
metadata: {name: front-5d8f6c7b9-x2x4k, namespace: shop, labels: {app: front, pod-template-hash: 5d8f6c7b9}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {podIP: 10.0.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: front-5d8f6c7b9-q7w2z, namespace: shop, labels: {app: front, pod-template-hash: 5d8f6c7b9}}
spec: {nodeName: n2, containers: [{name: c}]}
status: {podIP: 10.0.0.2}
---
apiVersion: v1
kind: Pod
metadata: {name: front-5d8f6c7b9-m4m4m, namespace: shop, labels: {app: front, pod-template-hash: 5d8f6c7b9}}
spec: {nodeName: n2, containers: [{name: c}]}
status: {podIP: 10.0.0.3}
---
apiVersion: v1
kind: Pod
metadata: {name: back-0, namespace: shop, labels: {app: back}}
spec: {nodeName: n2, containers: [{name: c, ports: [{containerPort: 8443, name: api}]}]}
status: {podIP: 10.0.0.4}
---
apiVersion: v1
kind: Pod
metadata: {name: nightly-x9s2b, namespace: jobs, labels: {job: nightly}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {podIP: 10.0.1.1}
---
apiVersion: v1
kind: Node
metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.168.0.1/24}}
---
apiVersion: v1
kind: Node
metadata: {name: n2, annotations: {projectcalico.org/IPv4Address: 192.168.0.2/24}}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkSet
metadata: {name: partner, labels: {zone: partner}}
spec: {nets: [203.0.113.0/24]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: back, namespace: shop}
spec:
  podSelector: {matchLabels: {app: back}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: front}}}]
    ports: [{port: api}]
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: front, namespace: shop}
spec:
  selector: app == 'front'
  ingress:
  - action: Allow
    protocol: TCP
    source: {namespaceSelector: global(), selector: zone == 'partner'}
    destination: {ports: [443, '8000:8999']}
---
apiVersion: projectcalico.org/v3
kind: StagedNetworkPolicy
metadata: {name: front, namespace: shop}
spec:
  selector: app == 'front'
  ingress:
  - action: Allow
    protocol: TCP
    destination: {ports: [443]}
---
apiVersion: projectcalico.org/v3
kind: StagedNetworkPolicy
metadata: {name: back, namespace: shop}
spec: {stagedAction: Ignore, selector: app == 'back', ingress: [{action: Allow}]}
";
