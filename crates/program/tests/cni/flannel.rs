//! A node with Tortie's agent and a node with flannel's own daemon, on a real Kubernetes API. Tortie's runs Linux, or is a Windows node
//! with an emulated HNS.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_hcn::{HcnExt, RemoteHcn};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd, KubeApi, KubeOptions};

use crate::node::{output_of, unbind_namespaces, until};

/// The nodes: `ours` with Tortie, `theirs` with flanneld.
pub(crate) const OURS: &str = "172.31.0.1";
pub(crate) const THEIRS: &str = "172.31.0.2";
/// A pod of the other node, as flannel's plugin connects it.
pub(crate) const THEIR_POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 2, 5));
pub(crate) const THEIR_POD_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x244, 0, 2, 0, 0, 0, 5));

/// The system of Tortie's node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Os {
    Linux,
    Windows,
}

/// What a cluster is configured with.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) os: Os,
    /// Whether pods have IPv6 addresses, too.
    pub(crate) is_dual: bool,
    /// Whether the leases are in an etcd of flannel's own. `theirs` is no Node then.
    pub(crate) is_in_etcd: bool,
    pub(crate) vxlan_mode: &'a str,
    /// `Backend` of flannel's `net-conf.json`.
    pub(crate) backend: &'a Value,
    /// The `spec` of FelixConfiguration.
    pub(crate) felix: &'a Value,
}

impl<'a> Setup<'a> {
    pub(crate) fn of(os: Os, vxlan_mode: &'a str, backend: &'a Value) -> Self {
        Self { os, is_dual: false, is_in_etcd: false, vxlan_mode, backend, felix: &Value::Null }
    }

    pub(crate) fn dual(vxlan_mode: &'a str, backend: &'a Value) -> Self {
        Self { is_dual: true, ..Self::of(Os::Linux, vxlan_mode, backend) }
    }
}

pub(crate) struct Nodes {
    os: Os,
    /// Whether pods have IPv6 addresses, too.
    is_dual: bool,
    pub(crate) api: KubeApi,
    /// flannel's own, if the leases are there.
    pub(crate) etcd: Option<Etcd>,
    folder: TempDir,
    pub(crate) ours: NetNs,
    theirs: NetNs,
    pub(crate) their_pod: NetNs,
    children: Vec<(&'static str, Child)>,
}

impl Nodes {
    pub(crate) fn new(Setup { os, is_dual, is_in_etcd, vxlan_mode, backend, felix }: Setup<'_>) -> Self {
        let api = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
        if !felix.is_null() {
            let felix = json!({
                "apiVersion": "crd.projectcalico.org/v1", "kind": "FelixConfiguration", "metadata": {"name": "default"},
                "spec": felix,
            });
            api.apply(&felix.to_string()).unwrap();
        }
        let families = if is_dual { 2 } else { 1 };
        for (name, cidr) in
            [("flannel", "10.244.0.0/16"), ("flannel-v6", "fd00:244::/48")].into_iter().take(families)
        {
            let spec = json!({
                "cidr": cidr, "vxlanMode": vxlan_mode, "ipipMode": "Never", "assignmentMode": "Manual",
            });
            let pool = json!({
                "apiVersion": "crd.projectcalico.org/v1", "kind": "IPPool", "metadata": {"name": name}, "spec": spec,
            });
            api.apply(&pool.to_string()).unwrap();
        }
        for (node, number) in [("ours", 1), ("theirs", 2)] {
            let cidrs = [format!("10.244.{number}.0/24"), format!("fd00:244:0:{number}::/64")];
            let spec = json!({"podCIDR": cidrs[0], "podCIDRs": cidrs[..families]});
            let metadata = match (os, node) {
                (Os::Windows, "ours") => json!({"name": node, "labels": {"kubernetes.io/os": "windows"},
                    "annotations": {"projectcalico.org/IPv4Address": format!("{OURS}/24"),
                        "projectcalico.org/IPv6Address": "2001:db8:31::1/64"}}),
                _ => json!({"name": node}),
            };
            let spec = if is_in_etcd { json!({}) } else { spec };
            let value = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec});
            if !is_in_etcd || node == "ours" {
                api.apply(&value.to_string()).unwrap();
            }
        }
        let [ours, theirs, their_pod] = std::array::from_fn(|_| NetNs::create().unwrap());
        connect(&ours, "eth0", &theirs, "eth0");
        connect(&theirs, "pod0", &their_pod, "eth0");
        for (namespace, commands) in [
            (&ours, vec![format!("address add {OURS}/24 dev eth0")]),
            (
                &theirs,
                vec![
                    format!("address add {THEIRS}/24 dev eth0"),
                    "address add 10.244.2.1/32 dev pod0".to_owned(),
                    format!("route add {THEIR_POD}/32 dev pod0"),
                ],
            ),
            (
                &their_pod,
                vec![
                    format!("address add {THEIR_POD}/24 dev eth0"),
                    "route add default via 10.244.2.1".to_owned(),
                ],
            ),
        ] {
            for command in commands {
                ip(namespace, &command);
            }
        }
        theirs.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap().unwrap();
        if is_dual {
            add_ipv6(&ours, &theirs, &their_pod);
        }
        let etcd = is_in_etcd.then(|| Etcd::start().unwrap());
        for namespace in [&ours, &theirs] {
            relay(namespace, api.port());
            etcd.iter().for_each(|etcd| relay(namespace, etcd.addresses()[0].port()));
        }
        let folder = tempfile::tempdir().unwrap();
        let mut net_conf = json!({"Network": "10.244.0.0/16", "Backend": backend});
        if is_dual {
            net_conf["EnableIPv6"] = json!(true);
            net_conf["IPv6Network"] = json!("fd00:244::/48");
        }
        std::fs::write(folder.path().join("net-conf.json"), net_conf.to_string()).unwrap();
        if let Some(etcd) = &etcd {
            etcd.etcdctl(&["put", "/coreos.com/network/config", &net_conf.to_string()]).unwrap();
            // flanneld takes the subnets that it had.
            let mut had = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.2.1/24\n".to_owned();
            if is_dual {
                had.push_str("FLANNEL_IPV6_NETWORK=fd00:244::/48\nFLANNEL_IPV6_SUBNET=fd00:244:0:2::1/64\n");
            }
            std::fs::write(
                folder.path().join("subnet.env"),
                had + "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n",
            )
            .unwrap();
        }
        let mut nodes =
            Self { os, is_dual, api, etcd, folder, ours, theirs, their_pod, children: Vec::new() };
        nodes.start_flanneld();
        if os == Os::Windows {
            nodes.start_hns();
        }
        nodes.start_agent(vxlan_mode);
        nodes
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub(crate) fn start_flanneld(&mut self) {
        let mut command = Command::new(Program::Flanneld.find().unwrap());
        command.args(["--iface=eth0", "--iptables-forward-rules=false"]);
        match &self.etcd {
            Some(etcd) => drop(command.arg(format!("--etcd-endpoints={}", etcd.endpoints().join(",")))),
            None => {
                command.arg("--kube-subnet-mgr");
                command.arg(format!("--kubeconfig-file={}", self.api.kubeconfig().display()));
                command.arg(format!("--net-config-path={}", self.path("net-conf.json")));
            }
        }
        command.arg(format!("--subnet-file={}", self.path("subnet.env"))).env("NODE_NAME", "theirs");
        self.start("flanneld", command);
    }

    fn start_hns(&mut self) {
        let program = self.path("tortie-hns");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tortie"), &program).unwrap();
        let mut command = Command::new(program);
        command.arg(self.path("hns.sock")).arg(OURS);
        self.start("hns", command);
        until("the emulated HNS", || Path::new(&self.path("hns.sock")).exists());
    }

    pub(crate) fn start_agent(&mut self, vxlan_mode: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("kubernetes:{}", self.api.kubeconfig().display());
        command.args(["agent", "--node", "ours", "--flannel", "--store", &store]);
        if let Some(etcd) = &self.etcd {
            command.args(["--flannel-etcd", &etcd.endpoints().join(",")]);
        }
        match self.os {
            Os::Linux => {
                command.args(["--ip-autodetection-method", "interface=eth0"]);
                if self.is_dual {
                    command.args(["--ip6-autodetection-method", "interface=eth0"]);
                }
            }
            Os::Windows => {
                let network = if vxlan_mode == "Never" { "l2bridge" } else { "overlay" };
                command.args(["--hcn-socket", &self.path("hns.sock"), "--windows-network", network]);
            }
        }
        for (flag, file) in [
            ("--cni-socket", "agent.sock"),
            ("--control-socket", "control.sock"),
            ("--deletion-queue", "queue"),
            ("--saved-state", "saved-state.json"),
            ("--cni-conf-dir", "net.d"),
        ] {
            command.arg(flag).arg(self.path(file));
        }
        self.start("agent", command);
    }

    fn start(&mut self, name: &'static str, mut command: Command) {
        let log = std::fs::File::create(self.path(name)).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let namespace = if name == "flanneld" { &self.theirs } else { &self.ours };
        self.children.push((name, namespace.run(|| command.spawn().unwrap()).unwrap()));
    }

    /// Ends a program.
    pub(crate) fn kill(&mut self, name: &str) {
        let (ended, others) =
            std::mem::take(&mut self.children).into_iter().partition(|(one, _)| *one == name);
        self.children = others;
        let ended: Vec<(&str, Child)> = ended;
        for (_, mut child) in ended {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Adds a pod of this node, as its runtime does.
    pub(crate) fn add_pod(&self, name: &str) -> (NetNs, Vec<IpAddr>) {
        self.try_to_add_pod(name).unwrap()
    }

    /// The same; or what the plugin says.
    pub(crate) fn try_to_add_pod(&self, name: &str) -> Result<(NetNs, Vec<IpAddr>), String> {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
            "spec": {"nodeName": "ours", "containers": [{"name": "c", "image": "i"}]},
        });
        self.api.apply(&pod.to_string()).unwrap();
        let file = self.path("net.d/00-tortie.conflist");
        until("the network configuration", || Path::new(&file).exists());
        let list: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let ipam = match self.os {
            Os::Linux if self.is_dual => json!({"type": "host-local",
                "ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]}),
            Os::Linux => json!({"type": "host-local"}),
            Os::Windows => {
                let subnet = self.windows_subnet();
                let start = subnet.replace(".0/24", ".3");
                json!({"type": "host-local", "ranges": [[{"subnet": subnet, "rangeStart": start}]]})
            }
        };
        assert_eq!(list["plugins"][0]["ipam"], ipam);
        let mut config = list["plugins"][0].clone();
        config["cniVersion"] = list["cniVersion"].clone();
        config["name"] = list["name"].clone();
        config["agentSocket"] = json!(self.path("agent.sock"));
        config["ipam"]["dataDir"] = json!(self.path("addresses"));
        let (netns, path, bin) = (NetNs::create().unwrap(), self.path(name), self.path("tortie-cni"));
        netns.bind_to(Path::new(&path)).unwrap();
        let compartment = (self.os == Os::Windows).then(|| self.compartment(&path));
        let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tortie"), &bin);
        let mut command = Command::new(&bin);
        command.env_clear().env("CNI_PATH", "/usr/lib/cni").envs([
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", name),
            ("CNI_NETNS", compartment.as_deref().unwrap_or(&path)),
            ("CNI_IFNAME", "eth0"),
        ]);
        command.env("CNI_ARGS", format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = self.ours.run(|| command.spawn().unwrap()).unwrap();
        child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(text.into_owned());
        }
        let result: Value = serde_json::from_str(&text).unwrap();
        let texts = result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap());
        Ok((netns, texts.map(|text| text.split('/').next().unwrap().parse().unwrap()).collect()))
    }

    /// The network of a Windows node's pods. With leases in etcd, its Node remembers it.
    fn windows_subnet(&self) -> String {
        if self.etcd.is_none() {
            return "10.244.1.0/24".to_owned();
        }
        let annotations = self.annotations("ours");
        let subnets = annotations["tortie.io/flannel-subnets"].as_str().unwrap();
        subnets.split([' ', ',']).next().unwrap().to_owned()
    }

    /// An HCN namespace whose container is in the network namespace.
    fn compartment(&self, path: &str) -> String {
        let address = tortie_hcn::Address::Unix(self.path("hns.sock").into());
        let hns = RemoteHcn::new(address, Duration::from_secs(30));
        let namespace = hns.create_namespace(&Default::default()).unwrap();
        tortie_hns_emulator::bind_compartment(&hns, namespace, Some(Path::new(path))).unwrap();
        namespace.to_string()
    }

    pub(crate) fn annotations(&self, node: &str) -> Value {
        let text = self.api.kubectl(&["get", "node", node, "-o", "json"]).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["metadata"]["annotations"].take()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for name in ["agent", "flanneld", "hns"] {
                let log = std::fs::read_to_string(self.path(name)).unwrap_or_default();
                let _ = std::io::stderr().write_all(log.as_bytes());
            }
            for namespace in [&self.ours, &self.theirs] {
                let shown =
                    output_of(namespace, "ip", &["route"]) + &output_of(namespace, "ip", &["neighbour"]);
                let _ = std::io::stderr().write_all(shown.as_bytes());
            }
        }
        unbind_namespaces(&self.folder);
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

/// The IPv6 addresses and routes that a node with flannel's plugin has, and the addresses of the nodes.
fn add_ipv6(ours: &NetNs, theirs: &NetNs, their_pod: &NetNs) {
    ip(ours, "address add 2001:db8:31::1/64 dev eth0 nodad");
    for command in [
        "address add 2001:db8:31::2/64 dev eth0 nodad".to_owned(),
        "address add fd00:244:0:2::1/128 dev pod0 nodad".to_owned(),
        format!("route add {THEIR_POD_V6}/128 dev pod0"),
    ] {
        ip(theirs, &command);
    }
    theirs.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap().unwrap();
    ip(their_pod, &format!("address add {THEIR_POD_V6}/64 dev eth0 nodad"));
    ip(their_pod, "-6 route add default via fd00:244:0:2::1");
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

/// Whether a connection from one pod to the other carries data, and from which address it comes.
pub(crate) fn reaches(from: &NetNs, to: &NetNs, address: IpAddr) -> Option<IpAddr> {
    let at = SocketAddr::from((address, 8080));
    let listener = to.run(|| TcpListener::bind(at).unwrap()).unwrap();
    let connecting = from.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(2))).unwrap();
    let mut client = connecting.ok()?;
    let (mut server, source) = listener.accept().unwrap();
    // More than a packet, which a wrong MTU would lose.
    let sent = vec![7; 100_000];
    let receiving = std::thread::spawn(move || {
        let mut received = Vec::new();
        server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        server.read_to_end(&mut received).map(|_| received.len())
    });
    client.write_all(&sent).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    (receiving.join().unwrap().ok()? == sent.len()).then_some(source.ip())
}

/// Pods of both nodes reach each other, with their own addresses.
fn pods_reach_each_other(setup: Setup<'_>) -> Option<Nodes> {
    if !can_run(&[Program::Etcd, Program::Kube, Program::Flanneld]) {
        return None;
    }
    let (nodes, Setup { is_dual, backend, .. }) = (Nodes::new(setup), setup);
    let (pod, own) = nodes.add_pod("p");
    let theirs = [(THEIR_POD, "10.244.1."), (THEIR_POD_V6, "fd00:244:0:1:")];
    assert_eq!(own.len(), if is_dual { 2 } else { 1 });
    for (own, (their_pod, prefix)) in own.into_iter().zip(theirs) {
        assert!(own.to_string().starts_with(prefix), "{own}");
        until("a connection to flannel's pod", || reaches(&pod, &nodes.their_pod, their_pod) == Some(own));
        until("a connection from flannel's pod", || reaches(&nodes.their_pod, &pod, own) == Some(their_pod));
    }
    for (node, number, address) in [("ours", 1, OURS), ("theirs", 2, THEIRS)] {
        let annotations = nodes.annotations(node);
        assert_eq!(annotations["flannel.alpha.coreos.com/backend-type"], backend["Type"], "{annotations}");
        assert_eq!(annotations["flannel.alpha.coreos.com/public-ip"], address, "{annotations}");
        let address_v6 = if is_dual { json!(format!("2001:db8:31::{number}")) } else { Value::Null };
        assert_eq!(annotations["flannel.alpha.coreos.com/public-ipv6"], address_v6, "{annotations}");
    }
    Some(nodes)
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_by_vxlan() {
    let backend = json!({"Type": "vxlan", "VNI": 4096, "Port": 4789});
    let Some(nodes) = pods_reach_each_other(Setup::of(Os::Linux, "Always", &backend)) else { return };
    let routes = output_of(&nodes.ours, "ip", &["route"]);
    assert!(routes.contains("10.244.2.0/24 via 10.244.2.0 dev vxlan.calico"), "{routes}");
    // The node itself uses the address of its tunnel.
    let from_node = reaches(&nodes.ours, &nodes.their_pod, THEIR_POD);
    assert_eq!(from_node, Some(Ipv4Addr::new(10, 244, 1, 0).into()));
    nodes.api.kubectl(&["delete", "node", "theirs"]).unwrap();
    until("the route to a deleted node is gone", || {
        !output_of(&nodes.ours, "ip", &["route"]).contains("10.244.2.0/24")
    });
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_in_both_families_by_vxlan() {
    let backend = json!({"Type": "vxlan", "VNI": 4096, "Port": 4789});
    let Some(nodes) = pods_reach_each_other(Setup::dual("Always", &backend)) else { return };
    let routes = output_of(&nodes.ours, "ip", &["-6", "route"]);
    assert!(routes.contains("fd00:244:0:2::/64 via fd00:244:0:2:: dev vxlan-v6.calico"), "{routes}");
    let from_node = reaches(&nodes.ours, &nodes.their_pod, THEIR_POD_V6);
    assert_eq!(from_node, Some("fd00:244:0:1::".parse().unwrap()));
    nodes.api.kubectl(&["delete", "node", "theirs"]).unwrap();
    until("the routes to a deleted node are gone", || {
        let routes =
            output_of(&nodes.ours, "ip", &["route"]) + &output_of(&nodes.ours, "ip", &["-6", "route"]);
        !routes.contains("10.244.2.0/24") && !routes.contains("fd00:244:0:2::/64")
    });
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_in_both_families_by_way_of_the_nodes() {
    let backend = json!({"Type": "host-gw"});
    let Some(nodes) = pods_reach_each_other(Setup::dual("Never", &backend)) else { return };
    let routes = output_of(&nodes.ours, "ip", &["-6", "route"]);
    assert!(routes.contains("fd00:244:0:2::/64 via 2001:db8:31::2 dev eth0"), "{routes}");
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_by_way_of_the_nodes() {
    let backend = json!({"Type": "host-gw"});
    let Some(nodes) = pods_reach_each_other(Setup::of(Os::Linux, "Never", &backend)) else { return };
    let routes = output_of(&nodes.ours, "ip", &["route"]);
    assert!(routes.contains(&format!("10.244.2.0/24 via {THEIRS} dev eth0")), "{routes}");
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_a_windows_node_and_flannel_reach_each_other_by_vxlan() {
    let backend = json!({"Type": "vxlan", "VNI": 4096, "Port": 4789});
    let Some(nodes) = pods_reach_each_other(Setup::of(Os::Windows, "Always", &backend)) else { return };
    let annotations = nodes.annotations("ours");
    let data: Value =
        serde_json::from_str(annotations["flannel.alpha.coreos.com/backend-data"].as_str().unwrap()).unwrap();
    let mac = data["VtepMAC"].as_str().unwrap();
    assert!(mac.to_lowercase().starts_with("00:15:5d:"), "that of the network: {mac}");
    assert_eq!(annotations["projectcalico.org/VXLANTunnelMACAddr"], mac);
    nodes.api.kubectl(&["delete", "node", "theirs"]).unwrap();
    let (pod, _) = nodes.add_pod("q");
    until("flannel's pod is out of reach", || reaches(&pod, &nodes.their_pod, THEIR_POD).is_none());
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_a_windows_node_and_flannel_reach_each_other_by_way_of_the_nodes() {
    let backend = json!({"Type": "host-gw"});
    let Some(nodes) = pods_reach_each_other(Setup::of(Os::Windows, "Never", &backend)) else { return };
    let routes = output_of(&nodes.ours, "ip", &["route"]);
    assert!(routes.contains(&format!("10.244.2.0/24 via {THEIRS} dev eth0")), "{routes}");
    nodes.api.kubectl(&["delete", "node", "theirs"]).unwrap();
    until("the route to a deleted node is gone", || {
        !output_of(&nodes.ours, "ip", &["route"]).contains("10.244.2.0/24")
    });
}

/// Without more in `net-conf.json`, flanneld on Linux has the VNI 1 and the kernel's port 8472.
#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_with_the_defaults_of_flannel() {
    let (backend, felix) = (json!({"Type": "vxlan"}), json!({"vxlanVNI": 1, "vxlanPort": 8472}));
    let setup = Setup { felix: &felix, ..Setup::of(Os::Linux, "Always", &backend) };
    let Some(nodes) = pods_reach_each_other(setup) else { return };
    let link = output_of(&nodes.ours, "ip", &["-details", "link", "show", "vxlan.calico"]);
    assert!(link.contains("vxlan id 1 ") && link.contains("dstport 8472"), "{link}");
}

/// The usual VNI of flannel on Linux is 1, and Windows nodes need at least 4096.
#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn another_vni_is_reported() {
    if !can_run(&[Program::Etcd, Program::Kube, Program::Flanneld]) {
        return;
    }
    let backend = json!({"Type": "vxlan", "Port": 4789});
    let nodes = Nodes::new(Setup::of(Os::Linux, "Always", &backend));
    let report =
        || nodes.api.kubectl(&["get", "nodereports.tortie.io", "ours", "-o", "json"]).unwrap_or_default();
    until("a condition that names both identifiers", || {
        let report = report();
        report.contains("has the VNI 1, and this node 4096") && report.contains("RouteRefused")
    });
}
