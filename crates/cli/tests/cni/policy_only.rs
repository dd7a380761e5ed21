//! A node whose pods another plugin connects: Debian's `ptp` and `bridge` with `host-local`, called by the driver of the CNI
//! specification, which keeps results as container runtimes do. Tortie's agent enforces policy and nothing else, on a real
//! Kubernetes API.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

use crate::node::{OTHER_PLUGINS, address, output_of, until};

const PORT: u16 = 8080;
/// Long enough for many packets, each of which must not arrive.
const BLOCKED: Duration = Duration::from_millis(700);

struct Node {
    api: KubeApi,
    folder: TempDir,
    host: NetNs,
    /// A machine behind the node.
    outside: NetNs,
    agent: Option<Child>,
}

/// A sandbox as the runtime has it.
struct Sandbox {
    netns: NetNs,
    path: String,
    network: &'static str,
    arguments: String,
    address: Ipv4Addr,
    /// The interface on the host.
    link: String,
}

impl Node {
    fn new() -> Option<Self> {
        let programs = [Program::Etcd, Program::Kube, Program::Cnitool, Program::CniPlugins];
        if !can_run(&programs) {
            return None;
        }
        let api = KubeApi::start(&KubeOptions::default()).unwrap();
        api.create_definitions().unwrap();
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

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn agent_command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("kubernetes:{}", self.api.kubeconfig().display());
        command.args(["agent", "--node", "one", "--policy-only", "--store", &store]);
        command.args(["--cni-results", &self.path("cni/results")]);
        for (flag, file) in [
            ("--cni-socket", "agent.sock"),
            ("--control-socket", "control.sock"),
            ("--deletion-queue", "queue"),
        ] {
            command.arg(flag).arg(self.path(file));
        }
        command.args(more);
        command
    }

    fn start_agent(&mut self, more: &[&str]) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("agent.log")).unwrap();
        let mut command = self.agent_command(more);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.agent = Some(self.host.run(|| command.spawn().unwrap()).unwrap());
        let table = || output_of(&self.host, "nft", &["list", "tables"]);
        until("the table of policy", || table().contains("inet tortie"));
    }

    fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Creates the Pod object.
    fn create(&self, name: &str, labels: &Value) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"nodeName": "one", "containers": [{"name": "c", "image": "i"}]},
        });
        self.api.apply(&pod.to_string()).unwrap();
    }

    /// Connects a sandbox, as the runtime does before the kubelet reports its address.
    fn attach(&self, name: &str, network: &'static str) -> Sandbox {
        let (netns, path) = (NetNs::create().unwrap(), self.path(&format!("ns-{name}-{network}")));
        netns.bind_to(std::path::Path::new(&path)).unwrap();
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name}");
        let mut sandbox =
            Sandbox { netns, path, network, arguments, address: Ipv4Addr::UNSPECIFIED, link: String::new() };
        let result: Value = serde_json::from_str(&self.tool("add", &sandbox)).unwrap();
        sandbox.address = address(&result);
        let links = result["interfaces"].as_array().unwrap().iter();
        let names = links.filter(|it| it["sandbox"].is_null()).filter_map(|it| it["name"].as_str());
        sandbox.link = names.last().unwrap().to_owned();
        sandbox
    }

    /// Ends a sandbox.
    fn detach(&self, sandbox: Sandbox) {
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
    fn report(&self, name: &str, address: Ipv4Addr) {
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}})
            .to_string();
        self.api
            .kubectl(&["patch", "pod", name, "--subresource=status", "--type=merge", "-p", &status])
            .unwrap();
    }

    /// A pod that runs.
    fn pod(&self, name: &str, network: &'static str, labels: &Value) -> Sandbox {
        self.create(name, labels);
        let sandbox = self.attach(name, network);
        self.report(name, sandbox.address);
        sandbox
    }

    fn delete(&self, name: &str) {
        self.api.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).unwrap();
    }

    /// Denies all packets to pods with the label `app: closed`, except from those with `role: ok`.
    fn close(&self) {
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
    fn all_conditions(&self) -> String {
        self.api
            .kubectl(&["get", "nodereports.tortie.io", "one", "-o", "jsonpath={.status.conditions}"])
            .unwrap_or_default()
    }

    /// The conditions of a pod in the node's report: reasons and messages.
    fn conditions(&self, pod: &str) -> String {
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
    }
}

fn ip(namespace: &NetNs, command: &str) {
    let arguments: Vec<&str> = command.split(' ').collect();
    assert_eq!(output_of(namespace, "ip", &arguments), "", "{command}");
}

/// A cable between two namespaces.
fn connect(from: &NetNs, near: &str, to: &NetNs, far: &str) {
    let create = || {
        let peer = Peer { name: far, mac: None, mtu: None, namespace: Some(to.as_fd()) };
        let link = NewLink { up: true, ..NewLink::new(near, NewLinkKind::Veth(peer)) };
        RouteSocket::open().unwrap().create(&link).unwrap();
    };
    from.run(create).unwrap();
    ip(to, &format!("link set {far} up"));
}

/// Makes a server on the loopback interface of the test reachable under the same address in a namespace.
fn relay(namespace: &NetNs, port: u16) {
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
fn reaches(from: &NetNs, to: &Sandbox) -> bool {
    connects(from, &to.netns, to.address)
}

fn connects(from: &NetNs, to: &NetNs, address: impl Into<IpAddr>) -> bool {
    let at = SocketAddr::new(address.into(), PORT);
    let listener = to.run(|| TcpListener::bind(at).unwrap()).unwrap();
    let Ok(mut client) = from.run(|| TcpStream::connect_timeout(&at, BLOCKED)).unwrap() else { return false };
    let (mut server, _) = listener.accept().unwrap();
    client.write_all(b"data").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    server.read_to_end(&mut received).is_ok() && received == b"data"
}

fn until_reaches(what: &str, from: &NetNs, to: &Sandbox, expected: bool) {
    until(what, || reaches(from, to) == expected);
}

#[test]
fn policy_takes_effect_follows_labels_and_ends() {
    let Some(node) = Node::new() else { return };
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    let client = node.pod("client", "many", &json!({"app": "client"}));
    assert!(server.link.starts_with("veth"), "{}", server.link);
    until_reaches("without policy, everything passes", &client.netns, &server, true);
    until_reaches("also from outside", &node.outside, &server, true);
    node.close();
    until_reaches("policy denies", &client.netns, &server, false);
    assert!(!reaches(&node.outside, &server));
    assert!(reaches(&server.netns, &client), "the other direction has no policy");
    assert!(reaches(&node.host, &server), "the node itself, as for probes");
    let own = Ipv4Addr::new(172, 31, 0, 1);
    assert!(connects(&client.netns, &node.host, own), "pods reach their node");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("a label allows", &client.netns, &server, true);
    assert!(!reaches(&node.outside, &server));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("without the label", &client.netns, &server, false);
    node.api.kubectl(&["delete", "networkpolicy", "closed"]).unwrap();
    until_reaches("the policy ends", &client.netns, &server, true);
    assert_eq!(node.conditions("server"), "");
    // A pod cannot send with the address of another one.
    ip(&client.netns, &format!("address add {}/32 dev lo", server.address));
    let at = SocketAddr::from((Ipv4Addr::new(172, 31, 0, 2), PORT));
    let listener = node.outside.run(|| UdpSocket::bind(at).unwrap()).unwrap();
    listener.set_read_timeout(Some(BLOCKED)).unwrap();
    for (source, arrives) in [(client.address, true), (server.address, false)] {
        client.netns.run(|| UdpSocket::bind((source, 0)).unwrap().send_to(b"x", at).unwrap()).unwrap();
        assert_eq!(listener.recv_from(&mut [0; 8]).is_ok(), arrives, "from {source}");
    }
    leaves_nothing_but_policy(&node);
}

/// There is no route, no link, no address, no object of IPAM and no annotation of Tortie, and no CNI configuration.
fn leaves_nothing_but_policy(node: &Node) {
    let routes = output_of(&node.host, "ip", &["-d", "route", "show", "table", "all", "proto", "84"]);
    assert_eq!(routes, "");
    assert_eq!(output_of(&node.host, "ip", &["link", "show", "type", "vxlan"]), "");
    let links = output_of(&node.host, "ip", &["-o", "link"]);
    assert!(!links.contains("cali") && !links.contains("tortie"), "{links}");
    for kind in ["ippools", "ipamblocks", "ipamhandles", "blockaffinities"] {
        let kind = format!("{kind}.crd.projectcalico.org");
        let items = node.api.kubectl(&["get", &kind, "-A", "-o", "name"]).unwrap();
        assert_eq!(items.trim(), "", "{kind}");
    }
    let annotations =
        node.api.kubectl(&["get", "node", "one", "-o", "jsonpath={.metadata.annotations}"]).unwrap();
    assert!(!annotations.contains("projectcalico") && !annotations.contains("tortie"), "{annotations}");
    for pod in ["server", "client"] {
        let pod = node.api.kubectl(&["get", "pod", pod, "-o", "jsonpath={.metadata.annotations}"]).unwrap();
        assert!(!pod.contains("projectcalico"), "{pod}");
    }
    let files = std::fs::read_dir(node.path("net.d")).unwrap().count();
    assert_eq!(files, 4, "only those of the other plugins");
    assert!(!std::path::Path::new(&node.path("agent.sock")).exists(), "nobody calls Tortie's plugin");
    let table = output_of(&node.host, "nft", &["list", "table", "inet", "tortie"]);
    assert!(!table.contains("masquerade") && !table.contains("dnat"), "{table}");
}

/// Policy on IPv6 packets, and what operators see.
#[test]
fn pods_of_two_families_have_policy_on_both() {
    let Some(node) = Node::new() else { return };
    node.host.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap().unwrap();
    let pod = |name: &str, labels: Value| {
        node.create(name, &labels);
        let sandbox = node.attach(name, "dual");
        let found = output_of(
            &sandbox.netns,
            "ip",
            &["-6", "-o", "address", "show", "dev", "eth0", "scope", "global"],
        );
        let ipv6 = found.split_whitespace().find_map(|word| word.strip_suffix("/64")).unwrap().to_owned();
        let status = json!({"status": {"phase": "Running", "podIP": sandbox.address,
            "podIPs": [{"ip": sandbox.address}, {"ip": ipv6}]}});
        node.api
            .kubectl(&[
                "patch",
                "pod",
                name,
                "--subresource=status",
                "--type=merge",
                "-p",
                &status.to_string(),
            ])
            .unwrap();
        (sandbox, ipv6.parse::<Ipv6Addr>().unwrap())
    };
    let (server, server_6) = pod("server", json!({"app": "closed"}));
    let (client, _) = pod("client", json!({}));
    let passes_6 = || connects(&client.netns, &server.netns, server_6);
    until_reaches("without policy, IPv4 passes", &client.netns, &server, true);
    until("and IPv6", passes_6);
    node.close();
    until_reaches("policy denies IPv4", &client.netns, &server, false);
    assert!(!passes_6(), "and IPv6");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("policy allows IPv4", &client.netns, &server, true);
    assert!(passes_6(), "and IPv6");
    let store = format!("kubernetes:{}", node.api.kubeconfig().display());
    let mut shown = Command::new(env!("CARGO_BIN_EXE_tortie"));
    shown.args([
        "policy",
        "show",
        "server",
        "-n",
        "default",
        "--agent-socket",
        &node.path("control.sock"),
        "--store",
        &store,
    ]);
    let shown = node.host.run(|| shown.output().unwrap()).unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    assert!(shown.contains(&format!("interface {}", server.link)), "{shown}");
}

/// The API says for a while that the address belongs to the pod before. The order of the two policies does not matter.
#[test]
fn the_next_pod_with_an_address_never_gets_the_policy_of_the_one_before() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let open = node.pod("first", "one", &json!({"app": "open"}));
    let address = open.address;
    until_reaches("the first pod is open", &client.netns, &open, true);
    // The runtime ends it, and the next one gets the address. Neither is in the API.
    node.detach(open);
    node.create("second", &json!({"app": "closed"}));
    let closed = node.attach("second", "one");
    assert_eq!(closed.address, address);
    let since = Instant::now();
    let mut arrived = 0;
    while since.elapsed() < Duration::from_secs(2) {
        arrived +=
            usize::from(since.elapsed() > Duration::from_millis(900) && reaches(&client.netns, &closed));
    }
    assert_eq!(arrived, 0, "the interface of a pod that is not known yet is closed");
    // Now the API says that both have it.
    node.report("second", address);
    until("the pod before is reported", || {
        let conditions = node.conditions("first");
        conditions.contains("InterfaceUnproven") && conditions.contains("default/second")
    });
    assert!(!reaches(&client.netns, &closed), "its own policy denies");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("its own policy allows", &client.netns, &closed, true);
    node.delete("first");
    until("the report about the pod before ends", || node.conditions("first").is_empty());
    assert!(reaches(&client.netns, &closed));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("it denies again", &client.netns, &closed, false);
    // The other way round: an open pod after a closed one, which remains in the API.
    node.detach(closed);
    let third = node.pod("third", "one", &json!({"app": "open"}));
    assert_eq!(third.address, address);
    until_reaches("the third pod is open", &client.netns, &third, true);
    // A restart in this state.
    let mut node = node;
    node.kill_agent();
    node.start_agent(&[]);
    until("the agent reports", || node.conditions("second").contains("InterfaceUnproven"));
    assert!(reaches(&client.netns, &third));
}

/// Two Pods claim an address that a third one has, or that nobody has.
#[test]
fn false_addresses_in_the_api_open_nothing() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy denies", &client.netns, &server, false);
    for liar in ["liar-a", "liar-b"] {
        node.create(liar, &json!({"app": "open"}));
        node.report(liar, server.address);
    }
    for liar in ["liar-a", "liar-b"] {
        until("the liars are reported", || node.conditions(liar).contains("default/server"));
    }
    assert!(!reaches(&client.netns, &server));
    // The address of the node's own adapter, and of a machine behind it, to which a host route leads.
    ip(&node.host, "route add 172.31.0.2/32 dev eth0");
    for (liar, address) in [("liar-a", "172.31.0.1"), ("liar-b", "172.31.0.2")] {
        node.report(liar, address.parse().unwrap());
        until("they have no interface", || node.conditions(liar).contains("InterfaceMissing"));
    }
    assert!(reaches(&node.host, &client), "the adapter is not a pod's");
    until_reaches("traffic from outside passes", &node.outside, &client, true);
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("its own policy allows", &client.netns, &server, true);
}

#[test]
fn policy_stays_in_force_while_the_agent_is_killed_and_starts_again() {
    let Some(mut node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({"role": "ok"}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy allows", &client.netns, &server, true);
    until_reaches("policy denies", &node.outside, &server, false);
    let at = SocketAddr::from((server.address, PORT));
    let receiver = server.netns.run(|| UdpSocket::bind(at).unwrap()).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let (from_client, from_outside, ends) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let senders = [(&client.netns, b'c'), (&node.outside, b'o')].map(|(namespace, sign)| {
        let ends = ends.clone();
        // A new socket each time, so that no packet belongs to an established flow.
        let namespace =
            namespace.run(|| NetNs::open(std::path::Path::new("/proc/thread-self/ns/net"))).unwrap().unwrap();
        std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let send = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap().send_to(&[sign], at);
                let _ = namespace.run(send);
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    });
    let counts = {
        let (from_client, from_outside, ends) = (from_client.clone(), from_outside.clone(), ends.clone());
        std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let mut byte = [0];
                match receiver.recv_from(&mut byte) {
                    Ok(_) if byte == [b'c'] => drop(from_client.fetch_add(1, Ordering::SeqCst)),
                    Ok(_) => drop(from_outside.fetch_add(1, Ordering::SeqCst)),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
        })
    };
    for round in 2..5 {
        let before = from_client.load(Ordering::SeqCst);
        node.kill_agent();
        until("packets that policy allows", || from_client.load(Ordering::SeqCst) > before + 20);
        node.start_agent(&[]);
        let starts = || {
            let log = std::fs::read_to_string(node.path("agent.log")).unwrap();
            log.matches("another CNI plugin connects the pods").count()
        };
        until("the agent is ready", || starts() == round);
        let before = from_client.load(Ordering::SeqCst);
        until("packets that policy allows", || from_client.load(Ordering::SeqCst) > before + 20);
    }
    ends.store(true, Ordering::SeqCst);
    for thread in senders {
        thread.join().unwrap();
    }
    counts.join().unwrap();
    assert_eq!(from_outside.load(Ordering::SeqCst), 0, "policy denies all the time");
    // The agent still follows changes.
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("the label ends", &client.netns, &server, false);
}

/// An agent that cannot see whose the interfaces are keeps what the one before has put in force.
#[test]
fn an_agent_that_cannot_read_results_opens_nothing() {
    let Some(mut node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({"role": "ok"}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy allows", &client.netns, &server, true);
    until_reaches("policy denies", &node.outside, &server, false);
    let content = |node: &Node| {
        let table = output_of(&node.host, "nft", &["list", "table", "inet", "tortie"]);
        // The first lines name the owner.
        table.split_once("map").unwrap().1.to_owned()
    };
    let before = content(&node);
    node.kill_agent();
    let results = node.path("cni/results");
    std::fs::rename(&results, node.path("kept")).unwrap();
    std::fs::write(&results, "no folder").unwrap();
    node.start_agent(&[]);
    until("the node is reported", || node.all_conditions().contains("CNI results of the container runtime"));
    assert!(node.all_conditions().contains("PolicyNotInForce"));
    assert!(!reaches(&node.outside, &server));
    assert!(reaches(&client.netns, &server));
    assert_eq!(content(&node), before);
    std::fs::remove_file(&results).unwrap();
    std::fs::rename(node.path("kept"), &results).unwrap();
    until("the report ends", || !node.all_conditions().contains("PolicyNotInForce"));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("changes are in force again", &client.netns, &server, false);
}

#[test]
fn a_pod_without_interface_is_reported_until_it_has_one() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    node.create("late", &json!({"app": "closed"}));
    node.report("late", Ipv4Addr::new(10, 22, 2, 7));
    until("the pod is reported", || {
        let conditions = node.conditions("late");
        conditions.contains("InterfaceMissing")
            && conditions.contains("no host route leads to its address 10.22.2.7")
    });
    let late = node.attach("late", "one");
    until("its condition ends", || node.conditions("late").is_empty());
    assert!(!reaches(&client.netns, &late), "policy is in force");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("policy allows", &client.netns, &late, true);
    // A pod of a bridge has no policy, and the report says so.
    let bridged = node.pod("bridged", "bridged", &json!({"app": "closed"}));
    until("the pod of the bridge is reported", || {
        let conditions = node.conditions("bridged");
        conditions.contains("is a port of the bridge cni0") && conditions.contains(&bridged.link)
    });
    node.detach(bridged);
    node.delete("bridged");
    until("the report ends", || node.conditions("bridged").is_empty());
}

/// AWS VPC CNI, GKE's plugin and Azure CNI name the interface by a hash, and some runtimes keep no results.
#[test]
fn an_interface_with_the_hash_of_the_pod_is_recognised_and_others_are_closed() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let cable = |link: &'static str, address: Ipv4Addr| {
        let netns = NetNs::create().unwrap();
        connect(&node.host, link, &netns, "eth0");
        ip(&netns, &format!("address add {address}/32 dev eth0"));
        ip(&netns, "route add 169.254.1.1 dev eth0");
        ip(&netns, "route add default via 169.254.1.1");
        node.host
            .run(|| std::fs::write(format!("/proc/sys/net/ipv4/conf/{link}/proxy_arp"), "1"))
            .unwrap()
            .unwrap();
        node.host
            .run(|| std::fs::write(format!("/proc/sys/net/ipv4/neigh/{link}/proxy_delay"), "0"))
            .unwrap()
            .unwrap();
        ip(&node.host, &format!("route add {address}/32 dev {link}"));
        Sandbox {
            netns,
            path: String::new(),
            network: "",
            arguments: String::new(),
            address,
            link: link.to_owned(),
        }
    };
    // printf default.hashed | sha1sum
    let hashed = cable(HASHED, Ipv4Addr::new(10, 22, 4, 1));
    assert!(!reaches(&client.netns, &hashed), "an interface with the prefix is closed from the beginning");
    node.create("hashed", &json!({"app": "open"}));
    node.report("hashed", hashed.address);
    until_reaches("the pod is recognised", &client.netns, &hashed, true);
    node.api.kubectl(&["label", "pod", "hashed", "app=closed", "--overwrite"]).unwrap();
    until_reaches("its policy denies", &client.netns, &hashed, false);
    // The interface of another pod, or of none.
    let other = cable("eni0123456789a", Ipv4Addr::new(10, 22, 4, 2));
    let unknown = cable("veth7", Ipv4Addr::new(10, 22, 4, 3));
    for (pod, sandbox, part) in [
        ("other", &other, "leads to eni0123456789a, which belongs to another pod"),
        ("unknown", &unknown, "leads to veth7, but nothing proves that it is this pod's"),
    ] {
        node.create(pod, &json!({"app": "open"}));
        node.report(pod, sandbox.address);
        until("the pod is reported", || {
            let conditions = node.conditions(pod);
            conditions.contains("InterfaceUnproven") && conditions.contains(part)
        });
        assert!(!reaches(&client.netns, sandbox), "{pod}");
    }
}

/// `eni` and the first digits of `printf default.hashed | sha1sum`.
const HASHED: &str = "eni3e865294672";

#[test]
fn what_has_no_meaning_with_another_plugin_is_refused() {
    let Some(mut node) = Node::new() else { return };
    node.kill_agent();
    let other = crate::node::Node::new(&json!([]));
    let with_store = other.path("store.sock");
    let folder = format!("--cni-conf-dir={}", node.path("net.d"));
    for (arguments, parts) in [
        (vec!["--bgp"], vec!["--policy-only", "--bgp"]),
        (vec!["--direct-routes"], vec!["--policy-only", "--direct-routes"]),
        (vec!["--flannel"], vec!["--policy-only", "--flannel"]),
        (vec!["--default-pool", "10.0.0.0/16"], vec!["--policy-only", "--default-pool"]),
        (vec!["--default-pool-v6", "fd00::/48"], vec!["--policy-only", "--default-pool-v6"]),
        (vec![folder.as_str()], vec!["--policy-only", "--cni-conf-dir"]),
        (
            vec![r#"--cni-plugins=[{"type":"bandwidth","capabilities":{"bandwidth":true}}]"#],
            vec!["--policy-only", "--cni-plugins"],
        ),
        (vec![r#"--cni-ipam={"type":"host-local"}"#], vec!["--policy-only", "--cni-ipam"]),
        (vec!["--ip-autodetection-method=first-found"], vec!["--policy-only", "--ip-autodetection-method"]),
        (vec!["--pod-interface-prefix=a/b"], vec!["\"a/b\"", "--pod-interface-prefix"]),
        (vec!["--pod-interface-prefix=eni,"], vec!["\"\"", "--pod-interface-prefix"]),
    ] {
        refused(&node, node.agent_command(&arguments), &parts);
    }
    // Only the Kubernetes API has pods with addresses that others have given them.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args([
        "agent",
        "--node",
        "one",
        "--policy-only",
        "--store",
        &format!("unix:{}", with_store.display()),
    ]);
    command.args(["--cni-socket", &node.path("second.sock")]);
    refused(&node, command, &["--policy-only", "--store kubernetes:"]);
}

fn refused(node: &Node, mut command: Command, parts: &[&str]) {
    let output = node.host.run(|| command.output().unwrap()).unwrap();
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?}: {text}");
}
