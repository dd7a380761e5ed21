//! Secrets that an agent knows appear nowhere: neither in its log at any level, nor in its report, nor in archives for bug reports.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command};

use serde_json::{Value, json};
use tortie_api::to_yaml;
use tortie_kernel::namespace::NetNs;
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

use crate::foreign_plugin::{AGENT, connect, ip, relay};
use crate::node::until;

const PASSWORD: &str = "meow-3f9c1d77";
/// The password in base64, as the API has it.
const ENCODED: &str = "bWVvdy0zZjljMWQ3Nw";

const OBJECTS: &str = "apiVersion: v1
kind: Secret
metadata: {name: bgp, namespace: default}
stringData: {password: meow-3f9c1d77}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: secrets, namespace: default}
rules: [{apiGroups: [''], resources: [secrets], resourceNames: [bgp, absent], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: secrets, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: secrets}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: agent}]
---
apiVersion: v1
kind: Node
metadata: {name: one, annotations: {projectcalico.org/IPv4Address: 172.31.0.1/24}}
---
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: pool}
spec: {cidr: 10.65.0.0/16, vxlanMode: Never, ipipMode: Never}
---
apiVersion: crd.projectcalico.org/v1
kind: BGPPeer
metadata: {name: router}
spec:
  peerIP: 172.31.0.2
  asNumber: 64600
  password: {secretKeyRef: {name: bgp, key: password}}
---
apiVersion: crd.projectcalico.org/v1
kind: BGPPeer
metadata: {name: other}
spec:
  peerIP: 172.31.0.3
  asNumber: 64600
  password: {secretKeyRef: {name: absent, key: password}}
";

struct Running(Child, PathBuf);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.1).unwrap_or_default();
            let shown = log.lines().filter(|line| !line.contains("TRACE"));
            let shown: String = shown.flat_map(|line| [line, "\n"]).collect();
            let _ = std::io::stderr().write_all(shown.as_bytes());
        }
    }
}

fn start_agent(api: &KubeApi, host: &NetNs, folder: &std::path::Path) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    let store = format!("kubernetes:{}", api.kubeconfig_of(AGENT).display());
    command.args(["agent", "--node", "one", "--bgp", "--store", &store]);
    for (flag, file) in [
        ("--cni-socket", "agent.sock"),
        ("--control-socket", "control.sock"),
        ("--deletion-queue", "queue"),
        ("--saved-state", "saved-state.json"),
        ("--cni-conf-dir", "net.d"),
    ] {
        command.arg(flag).arg(folder.join(file));
    }
    let path = folder.join("agent.log");
    let log = std::fs::File::create(&path).unwrap();
    command.env("RUST_LOG", "trace,h2=trace").stdout(log.try_clone().unwrap()).stderr(log);
    Running(host.run(|| command.spawn().unwrap()).unwrap(), path)
}

/// The content of all files of an archive that a command of `tortie` makes.
fn archived(api: &KubeApi, host: &NetNs, folder: &std::path::Path, arguments: &[&str]) -> String {
    let archive = folder.join(format!("{}.tar.gz", arguments.join("-")));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args(arguments).arg("--output").arg(&archive);
    if arguments == ["cluster", "diags"] {
        command.arg("--store").arg(format!("kubernetes:{}", api.kubeconfig().display()));
    } else {
        command.arg("--agent-socket").arg(folder.join("control.sock"));
        command.arg("--cni-conf-dir").arg(folder.join("net.d"));
        command.arg("--deletion-queue").arg(folder.join("queue"));
    }
    let output = host.run(|| command.output().unwrap()).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut all = String::new();
    let mut files = tar::Archive::new(flate2::read::GzDecoder::new(std::fs::File::open(archive).unwrap()));
    for file in files.entries().unwrap() {
        let mut bytes = Vec::new();
        file.unwrap().read_to_end(&mut bytes).unwrap();
        all.push_str(&String::from_utf8_lossy(&bytes));
    }
    all
}

#[test]
fn no_log_report_or_archive_has_a_secret() {
    if !can_run(&[Program::Etcd, Program::Kube]) {
        return;
    }
    let users = vec![(AGENT.to_owned(), Vec::new())];
    let api = KubeApi::start(&KubeOptions { users, definitions: true, ..KubeOptions::default() }).unwrap();
    let permissions: Vec<String> = tortie_deploy::permissions(false).iter().map(to_yaml).collect();
    api.apply(&permissions.join("---\n")).unwrap();
    api.bind(AGENT, tortie_deploy::DAEMON_SET).unwrap();
    api.apply(OBJECTS).unwrap();
    let [host, outside] = std::array::from_fn(|_| NetNs::create().unwrap());
    connect(&host, "eth0", &outside, "eth0");
    ip(&host, "address add 172.31.0.1/24 dev eth0");
    ip(&outside, "address add 172.31.0.2/24 dev eth0");
    relay(&host, api.port());
    let folder = tempfile::tempdir().unwrap();
    let _agent = start_agent(&api, &host, folder.path());

    let report = || api.kubectl(&["get", "nodereports.tortie.io", "one", "-o", "json"]).unwrap_or_default();
    until("the report names the missing Secret", || report().contains("default/absent"));
    // Without its password, the peer would not be among them.
    let log = || std::fs::read_to_string(folder.path().join("agent.log")).unwrap();
    until("the speaker has the router as a peer", || {
        log().contains("the BGP speaker runs") && log().contains("peers=1")
    });
    let parsed: Value = serde_json::from_str(&report()).unwrap();
    assert_eq!(parsed["metadata"]["name"], json!("one"));
    let texts = [
        ("log", log()),
        ("report", report()),
        ("archive of the node", archived(&api, &host, folder.path(), &["node", "diags"])),
        ("archive of the cluster", archived(&api, &host, folder.path(), &["cluster", "diags"])),
    ];
    let token = api.token(AGENT);
    for (what, text) in &texts {
        assert!(text.len() > 500, "{what} is empty: {text}");
        for secret in [PASSWORD, ENCODED, &token, &api.token("admin")] {
            let at = text
                .find(secret)
                .map(|at| text[at.saturating_sub(300)..].chars().take(400).collect::<String>());
            assert_eq!(at, None, "{what} has a secret");
        }
    }
    assert!(texts[0].1.contains("TRACE") && texts[0].1.contains("DEBUG"), "the log has all levels");
}
