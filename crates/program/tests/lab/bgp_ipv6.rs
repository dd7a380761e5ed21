//! Pods with addresses of both families in pools without encapsulation: routes learned from other nodes and from BIRD, Services, and
//! restarts. `modes` has the matrix of packets.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::sysctl;
use tortie_servers::programs::{Program, can_run};

use crate::bgp::peers;
use crate::modes::probe::{Pod, ping, reaches};
use crate::modes::topology::{inspect, ip, output};
use crate::support::{Lab, Namespaces, Running, User, pod};

const NODES: [&str; 2] = ["primary", "linux-2"];
/// The addresses of `linux-2`, and of the machine between the nodes.
const LINUX_2: [&str; 2] = ["192.0.2.12", "2001:db8:0:2::c"];
const ROUTER: [&str; 2] = ["192.0.2.1", "2001:db8:0:2::1"];
const FAMILIES: [&str; 2] = ["-4", "-6"];
const PATIENCE: Duration = Duration::from_secs(10);

/// A lab whose pools have no encapsulation, with the pod `one` on `primary` and `two` on `linux-2`.
struct Cluster {
    lab: Lab,
    running: Running,
    namespaces: Namespaces,
    nodes: [NetNs; 2],
    one: Pod,
    two: Pod,
}

impl Cluster {
    fn up() -> Self {
        let lab = Lab::new(User::Root);
        let running = lab.up(&["--linux", "2", "--windows", "0", "--bgp", "--ipv6"]);
        for pool in ["default-ipv4-ippool", "default-ipv6-ippool"] {
            lab.ok(&[
                "patch",
                "ippool",
                pool,
                "--type",
                "merge",
                "-p",
                r#"{"spec": {"vxlanMode": "Never"}}"#,
            ]);
        }
        let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
        let pods = [namespace, pod("one", NODES[0], "near"), pod("two", NODES[1], "far")];
        lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
        lab.wait_for_pods();
        let namespaces = lab.namespaces();
        let nodes = NODES.map(|node| namespaces.of_node(node));
        let [one, two] = ["one", "two"].map(|pod| inspect(namespaces.of_pod(pod)));
        Self { lab, running, namespaces, nodes, one, two }
    }

    fn apply(&self, manifest: &str) {
        self.lab.ok(&["apply", "-f", &self.lab.file("manifest.yml", manifest)]);
    }

    /// Starts a pod, and waits for it.
    fn start(&self, name: &str, manifest: &str) -> Pod {
        self.apply(manifest);
        self.lab.wait_for_pods();
        inspect(self.namespaces.of_pod(name))
    }

    fn delete_pod(&self, name: &str) {
        self.lab.ok(&["delete", "pod", name, "-n", "calico-demo"]);
    }

    /// The routes that BGP has put into a node's table, of both families. 85 is Tortie's number for them.
    fn learned(&self, node: usize) -> [String; 2] {
        FAMILIES.map(|family| output(&self.nodes[node], &format!("{family} route show proto 85")))
    }

    fn wait_until(&self, what: &str, holds: impl FnMut() -> bool) {
        self.lab.wait_until(what, holds);
    }

    /// Whether all sessions of a node, of both families, are established and have sent so many routes each.
    fn has_sessions(&self, node: usize, received: u64) -> bool {
        let peers = peers(&self.lab, NODES[node]);
        let is_complete = |peer: &serde_json::Value| {
            peer["state"] == "Established" && peer["received"].as_u64() >= Some(received)
        };
        peers.len() == 2 && peers.iter().all(is_complete)
    }

    /// Both pods reach each other by ping, TCP and UDP over both families.
    fn connects(&self, one: &Pod, two: &Pod) {
        for is_ipv6 in [false, true] {
            for (from, to) in [(one, two), (two, one)] {
                let address = to.address(is_ipv6).unwrap();
                self.wait_until("the pods reach each other", || reaches(from, to, address).is_ok());
            }
        }
    }

    /// Kills the agent of `linux-2`. The lab starts it again.
    fn kill_agent(&self) {
        let agent = self.lab.processes().into_iter().find(|it| it.command.contains("agent --node linux-2"));
        kill_process(Pid::from_raw(agent.unwrap().pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    }

    fn down(mut self) {
        self.lab.ok(&["lab", "down"]);
        self.running.wait();
    }
}

/// A connection between two pods.
struct Connection([TcpStream; 2]);

impl Connection {
    fn open(from: &Pod, to: &Pod, is_ipv6: bool) -> Self {
        let address = to.address(is_ipv6).unwrap();
        let listener = to.netns.run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
        let at = listener.local_addr().unwrap();
        let client = from.netns.run(|| TcpStream::connect_timeout(&at, PATIENCE).unwrap()).unwrap();
        let ends = [client, listener.accept().unwrap().0];
        ends.iter().for_each(|end| end.set_read_timeout(Some(PATIENCE)).unwrap());
        Self(ends)
    }

    /// Sends a byte in each direction.
    fn lives(&self) -> bool {
        let [client, server] = &self.0;
        let passes = |mut from: &TcpStream, mut to: &TcpStream| {
            from.write_all(b"x").is_ok() && to.read_exact(&mut [0; 1]).is_ok()
        };
        passes(client, server) && passes(server, client)
    }
}

/// Routes of blocks and of a borrowed address, a killed agent, and what is left when a pod and a node's address go.
#[test]
fn nodes_learn_ipv6_routes_of_each_other() {
    let cluster = Cluster::up();
    let Cluster { lab, one, two, .. } = &cluster;
    cluster.wait_until("all sessions", || (0..2).all(|node| cluster.has_sessions(node, 1)));
    cluster.connects(one, two);
    // A pool of one block, which is that of `primary`: the other node borrows an address.
    lab.ok(&["ipam", "configure", "--strictaffinity=false"]);
    let pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: small}\nspec: {cidr: 'fd55::/122', blockSize: 122, vxlanMode: Never}\n";
    let of_pool = |name: &str, node: &str| {
        let pools = r#"annotations: {cni.projectcalico.org/ipv6pools: '["small"]'}, labels"#;
        pod(name, node, "near").replace("labels", pools)
    };
    let three = cluster.start("three", &format!("{pool}---\n{}", of_pool("three", NODES[0])));
    let four = cluster.start("four", &of_pool("four", NODES[1]));
    let borrowed = format!("{} via {}", four.address(true).unwrap(), LINUX_2[1]);
    assert!(borrowed.starts_with("fd55::"), "{borrowed}");
    cluster.wait_until("the borrowed address is learned", || cluster.learned(0)[1].contains(&borrowed));
    cluster.connects(&three, &four);

    let before = [0, 1].map(|node| cluster.learned(node));
    let connections = [false, true].map(|is_ipv6| Connection::open(one, two, is_ipv6));
    cluster.kill_agent();
    cluster.wait_until("the agent has started again", || {
        assert_eq!([0, 1].map(|node| cluster.learned(node)), before);
        assert!(connections.iter().all(Connection::lives));
        cluster.has_sessions(1, 1)
    });
    cluster.wait_until("its peer has its routes", || cluster.has_sessions(0, 1));
    assert_eq!([0, 1].map(|node| cluster.learned(node)), before);
    assert!(connections.iter().all(Connection::lives));

    cluster.delete_pod("four");
    cluster.wait_until("the borrowed address is withdrawn", || !cluster.learned(0)[1].contains("fd55:"));
    // The other node loses its IPv6 address, and with it the session that had the routes of this family.
    lab.ok(&["annotate", "node", NODES[1], "projectcalico.org/IPv6Address-"]);
    cluster.wait_until("IPv6 routes are gone", || (0..2).all(|node| cluster.learned(node)[1].is_empty()));
    for (node, router) in [(0, LINUX_2[0]), (1, "192.0.2.11")] {
        assert!(cluster.learned(node)[0].contains(router), "{:?}", cluster.learned(node));
    }
    cluster.down();
}

/// BIRD on the machine between the nodes, as a route reflector that puts itself in the way of all packets.
struct Bird<'a> {
    router: &'a NetNs,
    file: String,
    process: Child,
}

impl<'a> Bird<'a> {
    fn start(lab: &Lab, router: &'a NetNs) -> Self {
        let mut config = format!(
            "router id {};\nprotocol device {{}}\nprotocol direct {{ ipv4; ipv6; }}
protocol kernel {{ ipv4 {{ export where source = RTS_BGP; }}; }}
protocol kernel {{ ipv6 {{ export where source = RTS_BGP; }}; }}\n",
            ROUTER[0]
        );
        for (family, nodes) in
            [["192.0.2.11", "192.0.2.12"], ["2001:db8:0:2::b", "2001:db8:0:2::c"]].into_iter().enumerate()
        {
            for node in nodes {
                let (own, channel) = (ROUTER[family], ["ipv4", "ipv6"][family]);
                config += &format!(
                    "protocol bgp {{ local {own} as 64512; neighbor {node} as 64512; passive; rr client; graceful restart on;
    {channel} {{ import all; export where source = RTS_BGP; next hop self; }}; }}\n"
                );
            }
        }
        let file = lab.file("bird.conf", &config);
        let process = Self::run(router, &file, &[]);
        Self { router, file, process }
    }

    fn run(router: &NetNs, file: &str, more: &[&str]) -> Child {
        let mut command = Command::new(Program::Bird.find().unwrap());
        command.args(["-f", "-c", file, "-s", &format!("{file}.ctl")]).args(more).stderr(Stdio::null());
        router.enter_on_spawn(&mut command).unwrap().spawn().unwrap()
    }

    /// Ends without a word to the nodes, and starts again.
    fn restart(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process = Self::run(self.router, &self.file, &["-R"]);
    }

    fn ask(&self, question: &str) -> String {
        let mut command = Command::new(Program::Birdc.find().unwrap());
        command.args(["-s", &format!("{}.ctl", self.file)]).args(question.split(' '));
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    /// The next hops of the routes to a network.
    fn next_hops(&self, network: &str) -> Vec<String> {
        let shown = self.ask(&format!("show route {network} all"));
        let next_hops = shown.lines().filter_map(|line| line.trim().strip_prefix("BGP.next_hop: "));
        let mut next_hops: Vec<String> =
            next_hops.map(|hop| hop.split_whitespace().next().unwrap().to_owned()).collect();
        next_hops.sort();
        next_hops
    }
}

impl Drop for Bird<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The router's settings and routes, and peers of all nodes, without the mesh.
fn prepare_router(cluster: &Cluster, router: &NetNs) {
    let forward = || {
        ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"].map(|file| sysctl::ensure(file, "1").unwrap())
    };
    router.run(forward).unwrap();
    ip(router, &format!("-6 addr add {}/64 dev underlay nodad", ROUTER[1]));
    // A packet that a node does not want goes back.
    for node in &cluster.nodes {
        ip(node, &format!("-6 route add default via {} dev eth0", ROUTER[1]));
    }
}

/// The settings of BGP, with networks of Services.
const SETTINGS: &str = "apiVersion: projectcalico.org/v3
kind: BGPConfiguration
metadata: {name: default}
spec:
  nodeToNodeMeshEnabled: false
  serviceClusterIPs: [{cidr: 10.96.0.0/12}, {cidr: 'fd00:10:96::/112'}]
  serviceExternalIPs: [{cidr: 198.51.100.0/24}, {cidr: '2001:db8:5::/64'}]
---
apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: router-v4}
spec: {peerIP: 192.0.2.1, asNumber: 64512}
---
apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: router-v6}
spec: {peerIP: '2001:db8:0:2::1', asNumber: 64512}
";

/// A Service whose only backend is the pod `two`.
const SERVICE: &str = "apiVersion: v1
kind: Service
metadata: {name: shop, namespace: calico-demo}
spec:
  type: LoadBalancer
  selector: {app: far}
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv6, IPv4]
  clusterIP: 'fd00:10:96::7'
  clusterIPs: ['fd00:10:96::7', 10.96.0.7]
  externalTrafficPolicy: Local
  externalIPs: ['2001:db8:5::7', 198.51.100.7]
  ports: [{port: 80}]
";

/// The addresses of the Service.
const OF_SERVICE: [&str; 4] = ["fd00:10:96::7/128", "2001:db8:5::7/128", "10.96.0.7/32", "198.51.100.7/32"];

#[test]
fn a_router_between_nodes_learns_blocks_and_services_of_both_families() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let cluster = Cluster::up();
    let router = cluster.namespaces.between_nodes();
    prepare_router(&cluster, &router);
    let mut bird = Bird::start(&cluster.lab, &router);
    cluster.apply(&format!("{SETTINGS}---\n{SERVICE}"));
    let Cluster { one, two, .. } = &cluster;
    let ways = || {
        let by_router = |node| (0..2).all(|family| cluster.learned(node)[family].contains(ROUTER[family]));
        by_router(0) && by_router(1)
    };
    cluster.wait_until("both nodes have routes by way of the router", ways);
    cluster.connects(one, two);
    let networks = ["fd00:10:96::/112", "2001:db8:5::/64"].map(|network| bird.next_hops(network));
    assert_eq!(networks, [["2001:db8:0:2::b", LINUX_2[1]]; 2]);
    let is_advertised = |bird: &Bird<'_>| {
        let of_family = |address: &str| LINUX_2[usize::from(address.contains(':'))];
        OF_SERVICE.into_iter().all(|address| bird.next_hops(address) == [of_family(address)])
    };
    cluster.wait_until("the Service's addresses", || is_advertised(&bird));
    check_unused_addresses(&cluster, &router);

    // The agent is killed, and then the router.
    let before = [0, 1].map(|node| cluster.learned(node));
    let connections = [false, true].map(|is_ipv6| Connection::open(one, two, is_ipv6));
    let nothing_changes = || {
        assert_eq!([0, 1].map(|node| cluster.learned(node)), before);
        assert!(connections.iter().all(Connection::lives));
    };
    cluster.kill_agent();
    cluster.wait_until("the agent has started again", || {
        nothing_changes();
        assert!(is_advertised(&bird));
        cluster.has_sessions(1, 1)
    });
    bird.restart();
    cluster.wait_until("the router has started again", || {
        nothing_changes();
        (0..2).all(|node| cluster.has_sessions(node, 1)) && is_advertised(&bird)
    });
    nothing_changes();

    cluster.delete_pod("two");
    let is_withdrawn = || OF_SERVICE.into_iter().all(|address| bird.next_hops(address).is_empty());
    cluster.wait_until("a Service without backends is withdrawn", is_withdrawn);
    assert_eq!(bird.next_hops("2001:db8:5::/64"), ["2001:db8:0:2::b", LINUX_2[1]]);
    bird.ask("down");
    cluster
        .wait_until("the router's routes are gone", || (0..2).all(|node| cluster.learned(node) == ["", ""]));
    cluster.down();
}

/// An address of a node's block that no pod has: packets to it end at the node, instead of going back to the router.
fn check_unused_addresses(cluster: &Cluster, router: &NetNs) {
    for (route, counter) in cluster.learned(0).iter().zip(["Ip", "Ip6"]) {
        let block: ipnet::IpNet = route.split_whitespace().next().unwrap().parse().unwrap();
        // The first addresses are those of pods.
        let unused = block.hosts().nth(50).unwrap();
        assert!(!cluster.two.addresses.contains(&unused));
        let before = forwarded(router, counter);
        assert!(cluster.one.netns.run(|| ping(unused)).unwrap().is_err());
        let after = forwarded(router, counter);
        assert!(
            (1..10).contains(&(after - before)),
            "the router forwarded {} packets to {unused}",
            after - before
        );
    }
}

/// How many packets of a family the router has forwarded: the counter `ForwDatagrams` or `OutForwDatagrams`.
fn forwarded(router: &NetNs, family: &str) -> u64 {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    let (snmp, snmp6) = router.run(|| (read("snmp"), read("snmp6"))).unwrap();
    let value = match family {
        "Ip" => {
            let mut lines = snmp.lines().filter(|line| line.starts_with("Ip:")).map(str::split_whitespace);
            let (names, mut values) = (lines.next().unwrap(), lines.next().unwrap());
            values
                .nth(names.into_iter().position(|name| name == "ForwDatagrams").unwrap())
                .unwrap()
                .to_owned()
        }
        _ => {
            let line = snmp6.lines().find(|line| line.starts_with("Ip6OutForwDatagrams")).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        }
    };
    value.parse().unwrap()
}
