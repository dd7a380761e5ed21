//! A node whose pods another plugin connects, on a real Kubernetes API, with what a runtime and a kubelet do for its pods.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_api::to_yaml;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

use crate::node::{OTHER_PLUGINS, address, output_of, unbind_namespaces, until};

pub(crate) const PORT: u16 = 8080;
/// The agent's user.
pub(crate) const AGENT: &str = "agent";
/// Long enough for many packets, each of which must not arrive.
pub(crate) const BLOCKED: Duration = Duration::from_millis(700);

pub(crate) struct Node {
    pub(crate) api: KubeApi,
    folder: TempDir,
    pub(crate) host: NetNs,
    /// A machine behind the node.
    pub(crate) outside: NetNs,
    agent: Option<Child>,
}

/// A sandbox as the runtime has it.
pub(crate) struct Sandbox {
    pub(crate) netns: NetNs,
    pub(crate) path: String,
    pub(crate) network: &'static str,
    pub(crate) arguments: String,
    pub(crate) address: Ipv4Addr,
    /// The interface on the host.
    pub(crate) link: String,
}

impl Node {
    pub(crate) fn new() -> Option<Self> {
        let programs = [Program::Etcd, Program::Kube, Program::Cnitool, Program::CniPlugins];
        if !can_run(&programs) {
            return None;
        }
        let users = vec![(AGENT.to_owned(), Vec::new())];
        let api =
            KubeApi::start(&KubeOptions { users, definitions: true, ..KubeOptions::default() }).unwrap();
        // The agent has the permissions that `tortie install --policy-only` gives it.
        let permissions: Vec<String> = tortie_deploy::permissions(true).iter().map(to_yaml).collect();
        api.apply(&permissions.join("---\n")).unwrap();
        api.bind(AGENT, tortie_deploy::DAEMON_SET).unwrap();
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"}});
        api.apply(&node.to_string()).unwrap();
        let [host, outside] = std::array::from_fn(|_| NetNs::create().unwrap());
        connect(&host, "eth0", &outside, "eth0");
        ip(&host, "address add 172.31.0.1/24 dev eth0");
        ip(&outside, "address add 172.31.0.2/24 dev eth0");
        ip(&host, "route add default via 172.31.0.2");
        ip(&outside, "route add 10.22.0.0/16 via 172.31.0.1");
        relay(&host, api.port());
        let folder = tempfile::tempdir().unwrap();
        let mut node = Self { api, folder, host, outside, agent: None };
        std::fs::create_dir(node.path("net.d")).unwrap();
        std::fs::create_dir(node.path("cni")).unwrap();
        // `one` has a single address, so that the next pod gets it at once.
        node.write_network("many", "ptp", "10.22.1.0/24", None);
        node.write_network("one", "ptp", "10.22.2.0/24", Some("10.22.2.7"));
        node.write_network("bridged", "bridge", "10.22.3.0/24", None);
        node.write_network("dual", "ptp", "10.22.5.0/24", None);
        node.start_agent(&[]);
        Some(node)
    }

    fn write_network(&self, name: &str, kind: &str, subnet: &str, only: Option<&str>) {
        let mut range = json!({"subnet": subnet});
        let ipv6 = (name == "dual").then(|| json!([{"subnet": "fd00:22::/64"}]));
        if let Some(only) = only {
            range["rangeStart"] = json!(only);
            range["rangeEnd"] = json!(only);
        }
        let ranges: Vec<Value> = std::iter::once(json!([range])).chain(ipv6).collect();
        let ipam = json!({
            "type": "host-local", "ranges": ranges, "dataDir": self.path("addresses"),
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        });
        let plugin = json!({"type": kind, "bridge": "cni0", "isGateway": true, "ipam": ipam});
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": [plugin]});
        std::fs::write(self.path(&format!("net.d/{name}.conflist")), list.to_string()).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub(crate) fn agent_command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("kubernetes:{}", self.api.kubeconfig_of(AGENT).display());
        command.args(["agent", "--node", "one", "--policy-only", "--store", &store]);
        command.args(["--cni-results", &self.path("cni/results")]);
        for (flag, file) in [
            ("--cni-socket", "agent.sock"),
            ("--control-socket", "control.sock"),
            ("--deletion-queue", "queue"),
            ("--saved-state", "saved-state.json"),
        ] {
            command.arg(flag).arg(self.path(file));
        }
        command.args(more);
        command
    }

    pub(crate) fn start_agent(&mut self, more: &[&str]) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("agent.log")).unwrap();
        let mut command = self.agent_command(more);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.agent = Some(self.host.run(|| command.spawn().unwrap()).unwrap());
        let table = || output_of(&self.host, "nft", &["list", "tables"]);
        until("the table of policy", || table().contains("inet tortie"));
    }

    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Stops the agent for a while (`STOP`), or lets it go on (`CONT`).
    pub(crate) fn signal_agent(&self, signal: &str) {
        let agent = self.agent.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &agent]).status().unwrap().success());
    }

    /// Creates the Pod object.
    pub(crate) fn create(&self, name: &str, labels: &Value) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"nodeName": "one", "containers": [{"name": "c", "image": "i"}]},
        });
        self.api.apply(&pod.to_string()).unwrap();
    }

    /// Connects a sandbox, as the runtime does before the kubelet reports its address.
    pub(crate) fn attach(&self, name: &str, network: &'static str) -> Sandbox {
        let (netns, path) = (NetNs::create().unwrap(), self.path(&format!("ns-{name}-{network}")));
        netns.bind_to(std::path::Path::new(&path)).unwrap();
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name}");
        let mut sandbox =
            Sandbox { netns, path, network, arguments, address: Ipv4Addr::UNSPECIFIED, link: String::new() };
        let result: Value = serde_json::from_str(&self.tool("add", &sandbox)).unwrap();
        sandbox.address = address(&result);
        let links = result["interfaces"].as_array().unwrap().iter();
        let mut names = links.filter(|it| it["sandbox"].is_null()).filter_map(|it| it["name"].as_str());
        sandbox.link = names.next_back().unwrap().to_owned();
        sandbox
    }

    /// Ends a sandbox.
    pub(crate) fn detach(&self, sandbox: Sandbox) {
        self.tool("del", &sandbox);
    }

    /// Calls the driver with a folder of this node for what it keeps.
    fn tool(&self, command: &str, sandbox: &Sandbox) -> String {
        let mut program = Command::new("unshare");
        program.args(["--mount", "sh", "-ec", "mount --bind \"$1\" /var/lib/cni; shift; exec \"$@\"", "sh"]);
        program.arg(self.path("cni")).arg(Program::Cnitool.find().unwrap());
        program.args([command, sandbox.network, &sandbox.path]);
        program.env("NETCONFPATH", self.path("net.d")).env("CNI_PATH", OTHER_PLUGINS);
        program.env("CNI_ARGS", &sandbox.arguments).env("CNI_IFNAME", "eth0");
        std::fs::create_dir_all("/var/lib/cni").unwrap();
        let output = self.host.run(|| program.output().unwrap()).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{command}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Reports the address, as the kubelet does.
    pub(crate) fn report(&self, name: &str, address: Ipv4Addr) {
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}})
            .to_string();
        self.api
            .kubectl(&["patch", "pod", name, "--subresource=status", "--type=merge", "-p", &status])
            .unwrap();
    }

    /// A pod that runs.
    pub(crate) fn pod(&self, name: &str, network: &'static str, labels: &Value) -> Sandbox {
        self.create(name, labels);
        let sandbox = self.attach(name, network);
        self.report(name, sandbox.address);
        sandbox
    }

    pub(crate) fn delete(&self, name: &str) {
        self.api.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).unwrap();
    }

    /// Denies all packets to pods with the label `app: closed`, except from those with `role: ok`.
    pub(crate) fn close(&self) {
        let policy = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "closed", "namespace": "default"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "closed"}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "ok"}}}]}],
            },
        });
        self.api.apply(&policy.to_string()).unwrap();
    }

    /// The conditions of the node's report.
    pub(crate) fn all_conditions(&self) -> String {
        self.api
            .kubectl(&["get", "nodereports.tortie.io", "one", "-o", "jsonpath={.status.conditions}"])
            .unwrap_or_default()
    }

    /// The conditions of a pod in the node's report: reasons and messages.
    pub(crate) fn conditions(&self, pod: &str) -> String {
        let report =
            self.api.kubectl(&["get", "nodereports.tortie.io", "one", "-o", "json"]).unwrap_or_default();
        let report: Value = serde_json::from_str(&report).unwrap_or_default();
        let all = report["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let of_pod = all.iter().map(Value::to_string).filter(|text| {
            text.contains(&format!("\"{pod}/"))
                || text.contains(&format!("\"{pod}\""))
                || text.contains(&format!("/{pod}"))
        });
        of_pod.collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path("agent.log")).unwrap_or_default();
            let shown = output_of(&self.host, "ip", &["route"])
                + &output_of(&self.host, "nft", &["list", "table", "inet", "tortie"]);
            let report =
                self.api.kubectl(&["get", "nodereports.tortie.io", "one", "-o", "json"]).unwrap_or_default();
            let _ = std::io::stderr().write_all((log + &shown + &report).as_bytes());
        }
        unbind_namespaces(&self.folder);
    }
}

pub(crate) fn ip(namespace: &NetNs, command: &str) {
    let arguments: Vec<&str> = command.split(' ').collect();
    assert_eq!(output_of(namespace, "ip", &arguments), "", "{command}");
}

/// A cable between two namespaces.
pub(crate) fn connect(from: &NetNs, near: &str, to: &NetNs, far: &str) {
    let create = || {
        let peer = Peer { name: far, mac: None, mtu: None, namespace: Some(to.as_fd()) };
        let link = NewLink { up: true, ..NewLink::new(near, NewLinkKind::Veth(peer)) };
        RouteSocket::open().unwrap().create(&link).unwrap();
    };
    from.run(create).unwrap();
    ip(to, &format!("link set {far} up"));
}

/// Makes a server on the loopback interface of the test reachable under the same address in a namespace.
pub(crate) fn relay(namespace: &NetNs, port: u16) {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = namespace.run(|| TcpListener::bind(address).unwrap()).unwrap();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(address) else { continue };
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
}

/// Whether a connection to a pod carries data.
pub(crate) fn reaches(from: &NetNs, to: &Sandbox) -> bool {
    connects(from, &to.netns, to.address)
}

/// Listens. A process that another test starts has the last listener of this address, until it runs its program.
pub(crate) fn listen(on: &NetNs, at: SocketAddr) -> TcpListener {
    let mut listener = None;
    until("the address is free", || {
        listener = on.run(|| TcpListener::bind(at)).unwrap().ok();
        listener.is_some()
    });
    listener.unwrap()
}

pub(crate) fn connects(from: &NetNs, to: &NetNs, address: impl Into<IpAddr>) -> bool {
    let at = SocketAddr::new(address.into(), PORT);
    let listener = listen(to, at);
    let Ok(mut client) = from.run(|| TcpStream::connect_timeout(&at, BLOCKED)).unwrap() else { return false };
    let (mut server, _) = listener.accept().unwrap();
    client.write_all(b"data").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    server.read_to_end(&mut received).is_ok() && received == b"data"
}

pub(crate) fn until_reaches(what: &str, from: &NetNs, to: &Sandbox, expected: bool) {
    until(what, || reaches(from, to) == expected);
}
