//! A lab with nodes in two networks, and a router between them.

use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use tortie_kernel::namespace::NetNs;
use tortie_kernel::sysctl;

use super::probe::Pod;
use crate::support::{Lab, Running, User, pod};

/// Nodes of the lab in the order of their ports. Those with a 3 in their names are in a network of their own.
pub(crate) const NODES: [&str; 6] = ["primary", "linux-2", "linux-3", "minion", "windows-2", "windows-3"];
const IS_FAR: [bool; 6] = [false, false, true, false, false, true];
const IS_LINUX: [bool; 6] = [true, true, true, false, false, false];

/// The nodes' addresses of a family. The router's ends with 1.
fn address(node: usize, is_ipv6: bool) -> String {
    if is_ipv6 { format!("2001:db8:0:2::{:x}", 11 + node) } else { format!("192.0.2.{}", 11 + node) }
}

const ROUTER: [&str; 2] = ["192.0.2.1", "2001:db8:0:2::1"];

/// A lab with a pod on each node.
pub(crate) struct Cluster {
    lab: Lab,
    running: Running,
    router: NetNs,
    pub(crate) nodes: Vec<NetNs>,
    pub(crate) pods: Vec<Pod>,
    /// Whether networks of Windows nodes take packets without encapsulation.
    has_bridges: bool,
}

impl Cluster {
    pub(crate) fn up(options: &[&str]) -> Self {
        let lab = Lab::new(User::Root);
        let running = lab.up(&[&["--linux", "3", "--windows", "3", "--ipv6"], options].concat());
        let namespaces = lab.namespaces();
        let nodes: Vec<NetNs> = NODES.map(|node| namespaces.of_node(node)).into();
        let has_bridges = options.contains(&"--l2bridge");
        if has_bridges {
            // Windows nodes have IPv6 of a pool without VXLAN, and make their networks anew for it.
            set_vxlan_mode(&lab, "Never", has_bridges);
            for node in nodes.iter().skip(3) {
                wait_for_ipv6(node);
            }
        }
        let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
        let pods = NODES.map(|node| pod(&format!("on-{node}"), node, "a"));
        let manifests = [vec![namespace], pods.to_vec()].concat().join("---\n");
        lab.ok(&["apply", "-f", &lab.file("pods.yml", &manifests)]);
        lab.wait_for_pods();

        let router = namespaces.between_nodes();
        let pods = NODES.map(|node| inspect(namespaces.of_pod(&format!("on-{node}")))).into();
        let cluster = Self { lab, running, router, nodes, pods, has_bridges };
        cluster.separate();
        cluster
    }

    pub(crate) fn down(mut self) {
        self.lab.ok(&["lab", "down"]);
        self.running.wait();
    }

    /// Moves the far nodes to a network of their own: another switch, with the router between both.
    fn separate(&self) {
        let router = |line: &str| ip(&self.router, line);
        let on = |file: &str, value: &str| self.router.run(|| sysctl::ensure(file, value).unwrap()).unwrap();
        for file in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            on(file, "1");
        }
        on("net/ipv4/conf/all/rp_filter", "0");
        router("link add other address 02:00:c0:00:02:01 type bridge");
        router("link set other up");
        router("-6 addr add 2001:db8:0:2::1/64 dev underlay nodad");
        // IPv6 answers on an interface for the addresses of that interface only.
        router("-6 addr add 2001:db8:0:2::1/128 dev other nodad");
        for node in (0..NODES.len()).filter(|node| IS_FAR[*node]) {
            router(&format!("link set node{node} master other"));
            let own = &self.nodes[node];
            let families: &[bool] = if self.has_ipv6(node) { &[false, true] } else { &[false] };
            for is_ipv6 in families.iter().copied() {
                let (family, host, near) = if is_ipv6 { ("-6", 128, 64) } else { ("-4", 32, 24) };
                let (address, gateway) = (address(node, is_ipv6), ROUTER[usize::from(is_ipv6)]);
                let duplicates = if is_ipv6 { " nodad" } else { "" };
                ip(own, &format!("{family} addr del {address}/{near} dev eth0"));
                ip(own, &format!("{family} addr add {address}/{host} dev eth0{duplicates}"));
                ip(own, &format!("{family} route replace {gateway} dev eth0"));
                ip(own, &format!("{family} route replace default via {gateway} dev eth0"));
                router(&format!("{family} route replace {address}/{host} dev other"));
                for other in
                    (0..NODES.len()).filter(|other| !IS_FAR[*other] && (!is_ipv6 || self.has_ipv6(*other)))
                {
                    ip(
                        &self.nodes[other],
                        &format!("{family} route replace {address}/{host} via {gateway} dev eth0"),
                    );
                }
                let key =
                    if is_ipv6 { "projectcalico.org/IPv6Address" } else { "projectcalico.org/IPv4Address" };
                self.lab.ok(&[
                    "annotate",
                    "node",
                    NODES[node],
                    "--overwrite",
                    &format!("{key}={address}/{host}"),
                ]);
            }
        }
        for node in (0..NODES.len()).filter(|node| self.has_ipv6(*node) && !IS_FAR[*node]) {
            ip(&self.nodes[node], &format!("-6 route replace default via {} dev eth0", ROUTER[1]));
        }
    }

    /// Sets the MTU of the router's link to the far nodes. Nobody remembers what an earlier one made of paths.
    pub(crate) fn set_mtu_behind_router(&self, mtu: usize) {
        ip(&self.router, &format!("link set other mtu {mtu}"));
        for netns in self.nodes.iter().chain(self.pods.iter().map(|pod| &pod.netns)) {
            ip(netns, "-4 route flush cache");
            ip(netns, "-6 route flush cache");
        }
    }

    /// Sets `vxlanMode` of both pools.
    pub(crate) fn set_vxlan_mode(&self, mode: &str) {
        set_vxlan_mode(&self.lab, mode, self.has_bridges);
    }

    /// Applies a manifest.
    pub(crate) fn apply(&self, file: &str, manifest: &str) {
        self.lab.ok(&["apply", "-f", &self.lab.file(file, manifest)]);
    }

    /// A node as a client of pods.
    pub(crate) fn node(&self, node: usize) -> Pod {
        let netns = self.nodes[node].run(NetNs::current).unwrap().unwrap();
        Pod {
            netns,
            addresses: [false, true].map(|is_ipv6| address(node, is_ipv6).parse().unwrap()).into(),
            mtu: 1500,
        }
    }

    fn takes_plain_packets(&self, node: usize) -> bool {
        IS_LINUX[node] || self.has_bridges
    }

    /// An overlay network of a Windows node has no IPv6.
    fn has_ipv6(&self, node: usize) -> bool {
        self.takes_plain_packets(node)
    }

    /// Adds what `tortie routes` prints: to each node the routes to others of its network, and to the router all.
    pub(crate) fn add_routes(&self, [to_nodes, to_router]: [bool; 2]) {
        let routes = self.lab.ok(&["routes", "--for", "linux"]);
        for line in routes.lines().filter(|line| line.starts_with("ip ")) {
            let (command, name) = line.split_once(" # ").unwrap();
            let words: Vec<&str> = command.split(" || ").next().unwrap().split_whitespace().collect();
            let ["ip", family, "route", "replace", destination, "via", next_hop] = words[..] else {
                panic!("{line}");
            };
            let node = NODES.iter().position(|node| *node == name).unwrap();
            assert!(self.takes_plain_packets(node), "{line}");
            let route = format!("{family} route replace {destination} via {next_hop}");
            if to_router {
                ip(&self.router, &route);
            }
            let others = (0..NODES.len()).filter(|other| self.takes_plain_packets(*other) && *other != node);
            // Far nodes send to the router.
            let near = others.filter(|other| !IS_FAR[*other]);
            near.filter(|_| to_nodes && !IS_FAR[node]).for_each(|other| ip(&self.nodes[other], &route));
        }
    }

    /// The interface by which a Linux node sends packets to an address.
    pub(crate) fn device(&self, node: usize, to: IpAddr) -> Option<String> {
        if !IS_LINUX[node] {
            return None;
        }
        let shown = output(&self.nodes[node], &format!("route get {to}"));
        let mut words = shown.split_whitespace().skip_while(|word| *word != "dev");
        words.nth(1).map(str::to_owned)
    }
}

/// `tortie patch` refuses pools without encapsulation beside Windows nodes with overlays, unless they give no addresses.
fn set_vxlan_mode(lab: &Lab, mode: &str, has_bridges: bool) {
    let disabled = mode == "Never" && !has_bridges;
    for pool in ["default-ipv4-ippool", "default-ipv6-ippool"] {
        let patch = format!(r#"{{"spec": {{"vxlanMode": "{mode}", "disabled": {disabled}}}}}"#);
        lab.ok(&["patch", "ippool", pool, "--type", "merge", "-p", &patch]);
    }
}

/// Waits until the node is connected to pods by IPv6.
fn wait_for_ipv6(node: &NetNs) {
    let begin = Instant::now();
    while !output(node, "-6 -o addr show scope global").contains("fd00:10:244:") {
        assert!(begin.elapsed() < Duration::from_secs(60), "the node's network has no IPv6");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Reads the addresses and the MTU of a pod from its only interface.
pub(crate) fn inspect(netns: NetNs) -> Pod {
    let links = output(&netns, "-o link show");
    let link = links.lines().find(|line| !line.contains("LOOPBACK")).unwrap();
    let mtu = link.split_whitespace().skip_while(|word| *word != "mtu").nth(1).unwrap().parse().unwrap();
    let shown = output(&netns, "-o addr show scope global");
    let is_address = |word: &&str| word.starts_with("inet");
    let networks =
        shown.lines().filter_map(|line| line.split_whitespace().skip_while(|word| !is_address(word)).nth(1));
    let addresses = networks.map(|net| net.split('/').next().unwrap().parse().unwrap()).collect();
    Pod { netns, addresses, mtu }
}

pub(crate) fn ip(netns: &NetNs, arguments: &str) {
    output(netns, arguments);
}

/// Runs `ip` in a namespace, and returns what it printed.
pub(crate) fn output(netns: &NetNs, arguments: &str) -> String {
    let mut command = Command::new("ip");
    command.args(arguments.split(' '));
    let output = netns.enter_on_spawn(&mut command).unwrap().output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
