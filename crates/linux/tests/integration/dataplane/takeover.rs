//! From Calico to Tortie and back, on a node as Calico leaves it, while pods talk.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::cluster::*;
use crate::dataplane::foreign_tables::run;
use tortie_dataplane::*;
use tortie_kernel::ipset;
use tortie_kernel::route::{LinkSetting, Route, RouteSocket};
use tortie_linux::calico::Found;
use tortie_linux::dataplane::Config;
use tortie_linux::{hand_over_to_calico, remove_all};
use tortie_policy::program::EndOfTier;

/// A packet that TCP sends again costs at least 0.2 s. A connection that waits longer than this has lost several.
const MAX_GAP: Duration = Duration::from_secs(2);

/// Chains of Felix in the tables of iptables, with those of others.
const CHAINS: &str = "
    iptables-nft -N cali-FORWARD; iptables-nft -N cali-tw-1; iptables-nft -N california; iptables-nft -A FORWARD -j california
    iptables-nft -I FORWARD -m comment --comment cali:wUHhoiAYhphO9Mso -j cali-FORWARD
    iptables-nft -A FORWARD -m comment --comment cali:S93hcgKJrXEqnTfs -m mark --mark 0x10000/0x10000 -j ACCEPT
    iptables-nft -A FORWARD -m comment --comment 'cali: a note of mine' -p udp --dport 9 -j ACCEPT
    iptables-nft -A cali-FORWARD -j cali-tw-1; iptables-nft -A cali-tw-1 -m set --match-set cali40s:empty src -j DROP
    iptables-nft -A cali-tw-1 -j MARK --set-mark 0x10000/0x10000
    iptables-nft -t nat -N cali-POSTROUTING; iptables-nft -t nat -A POSTROUTING -j cali-POSTROUTING
    iptables-nft -t nat -A cali-POSTROUTING -d 192.0.2.0/24 -j MASQUERADE
    iptables-legacy -N cali-INPUT; iptables-legacy -A INPUT -m comment --comment cali:wUHhoiAYhphO9Mso -j cali-INPUT
    iptables-legacy -A cali-INPUT -m set --match-set cali40this-host src -j RETURN; iptables-legacy -A INPUT -i eth7 -j ACCEPT
    ip6tables-nft -t raw -N cali-PREROUTING; ip6tables-nft -t raw -A PREROUTING -j cali-PREROUTING
    nft 'table ip6 calico { map m { type ifname : verdict; }; chain c { type filter hook forward priority 0; iifname vmap @m; }; }'
    nft 'table inet calico { chain mine { drop; }; }'";

/// What must be left of the tables.
const LEFT: &str = "
    iptables-nft -S FORWARD | grep -q -- '-j california'; iptables-nft -S FORWARD | grep -q 'a note of mine'
    ! iptables-legacy-save | grep -q cali; iptables-legacy-save | grep -q eth7; ! nft list ruleset | grep -q 'cali-'; ! iptables-nft -S FORWARD | grep -q 0x10000
    nft list table inet calico | grep -q mine; ! nft list table ip6 calico 2>/dev/null";

/// Wires a pod and a node as Calico does: `cni-plugin/internal/pkg/dataplane/linux`, `felix/dataplane/linux`.
fn prepare(node: &Node, pod: &Pod) -> String {
    let name = node.wiring.host_interface(&pod.id(), &pod.container_id);
    ["cali40s:empty", "cali40this-host", "mine"].iter().for_each(|set| {
        node.namespace.run(|| ipset::create(set).unwrap()).unwrap();
    });
    let pod_namespace = pod.namespace.as_fd().as_raw_fd();
    let wire = format!(
        "ip route add default via 172.31.0.254 # a proxy answers for the pod's gateway only if it has a route
         ip link add {name} type veth peer name eth0 netns /proc/{pid}/fd/{pod_namespace}
         ip link set {name} address ee:ee:ee:ee:ee:ee up
         echo 1 > /proc/sys/net/ipv4/conf/{name}/proxy_arp; echo 0 > /proc/sys/net/ipv4/neigh/{name}/proxy_delay
         echo 1 > /proc/sys/net/ipv4/conf/{name}/forwarding; echo 1 > /proc/sys/net/ipv4/ip_forward
         ip route add {address} dev {name} scope link
         ip link add vxlan.calico address 66:00:00:00:00:01 mtu 1450 type vxlan id 4096 dstport 4789 local 172.31.0.1 nolearning
         ip address add 10.65.1.0/32 dev vxlan.calico; ip link set vxlan.calico up
         bridge fdb add 66:00:00:00:00:02 dev vxlan.calico dst 172.31.0.2
         ip neigh add 10.65.2.0 lladdr 66:00:00:00:00:02 dev vxlan.calico nud permanent
         ip route add 10.65.2.0/26 via 10.65.2.0 dev vxlan.calico onlink proto 80
         ip route add blackhole 10.65.1.0/26 proto 80; ip route add blackhole 10.65.7.0/26 proto 80",
        pid = std::process::id(),
        address = pod.address,
    );
    run(&node.namespace, &wire);
    run(
        &pod.namespace,
        &format!(
            "ip link set lo up; ip link set eth0 up; ip address add {}/32 dev eth0
             ip route add 169.254.1.1 dev eth0 scope link; ip route add default via 169.254.1.1 dev eth0",
            pod.address
        ),
    );
    run(&node.namespace, CHAINS);
    name
}

/// Traffic on one connection; `end` returns the longest wait for an answer.
struct Traffic {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Option<Duration>>,
}

impl Traffic {
    fn on(stream: TcpStream) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let end = ends.clone();
        let talk = move || {
            let mut longest = Duration::ZERO;
            while !end.load(Ordering::Relaxed) {
                let asked = Instant::now();
                if !answers(&stream) {
                    return None;
                }
                longest = longest.max(asked.elapsed());
                std::thread::sleep(Duration::from_millis(1));
            }
            Some(longest)
        };
        Self { ends, thread: std::thread::spawn(talk) }
    }

    fn end(self) -> Option<Duration> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn routes(node: &Node, protocol: u8) -> Vec<Route> {
    let routes = node.namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
    routes.into_iter().filter(|route| route.protocol == protocol).collect()
}

fn find(node: &Node) -> Found {
    node.namespace.run(|| Found::find(&Config::default()).unwrap()).unwrap()
}

fn remove(node: &Node) -> tortie_linux::Result<()> {
    let remove = || Found::find(&Config::default()).unwrap().remove(&Config::default());
    node.namespace.run(remove).unwrap()
}

fn link(node: &Node, name: &str) -> Option<tortie_kernel::route::Link> {
    node.namespace.run(|| RouteSocket::open().unwrap().link(name).unwrap()).unwrap()
}

fn reasons(report: &Report) -> Vec<Reason> {
    report.node.iter().map(|condition| condition.reason).collect()
}

/// The state that the cluster gives a node whose pod Calico has wired.
fn take_over(node: &mut Node, pod: &Pod, name: &str) -> Report {
    node.change(|state| {
        open_profile(state);
        state.node = Some(local_node(1));
        state.vteps.insert(vtep(2).key(), vtep(2));
        state.routes.insert(block(1).into(), RouteTarget::Local);
        state.routes.insert(block(2).into(), RouteTarget::Vxlan { node: "node-2".to_owned() });
        let endpoint = Endpoint {
            container_id: pod.container_id.as_str().into(),
            host_interface: name.into(),
            addresses: vec![pod.address.into()],
            mac: None,
            host_ports: [].into(),
            program: Arc::new(open()),
        };
        state.endpoints.insert(pod.id(), Arc::new(endpoint));
    })
}

#[test]
fn pods_keep_their_connections_from_calico_to_tortie_and_back() {
    let underlay = Underlay::new();
    let (mut node, mut other) = (Node::new(&underlay, 1), Node::new(&underlay, 2));
    let (pod, remote) = (Pod::new("one", 1, 2), Pod::new("two", 2, 2));
    let report = other.change(|state| {
        open_profile(state);
        state.node = Some(local_node(2));
        state.vteps.insert(vtep(1).key(), vtep(1));
        state.routes.insert(block(2).into(), RouteTarget::Local);
        state.routes.insert(block(1).into(), RouteTarget::Vxlan { node: "node-1".to_owned() });
    });
    assert_eq!(report, Report::default());
    other.add(&remote, open());
    remote.serve(80);
    let name = prepare(&node, &pod);
    [80, 81].into_iter().for_each(|port| pod.serve(port));
    let (out, into) = (pod.connect(remote.address, 80).unwrap(), remote.connect(pod.address, 80).unwrap());
    let traffic = [out, into].map(Traffic::on);

    // Nothing is removed while Calico's policy is the only one, or Calico runs.
    let error = remove(&node).unwrap_err().to_string();
    assert!(error.contains("start Tortie's agent first"), "{error}");
    let report = take_over(&mut node, &pod, &name);
    assert!(reasons(&report).contains(&Reason::CalicoLeftover), "{report:?}");
    assert!(report.endpoints.is_empty() && report.node_failures().next().is_none(), "{report:?}");
    let adopted = link(&node, &name).unwrap();
    let felix = node.namespace.run(|| {
        run_loopback();
        TcpListener::bind((Ipv4Addr::LOCALHOST, 9099)).unwrap()
    });
    let error = remove(&node).unwrap_err().to_string();
    assert!(error.contains("port 9099") && error.contains("Stop it first"), "{error}");
    drop(felix);

    // Tortie's policy counts on the interface that Calico made.
    assert!(remote.reaches(&pod, 81));
    node.change(|state| {
        let endpoint = state.endpoints.get_mut(&pod.id()).unwrap();
        Arc::make_mut(endpoint).program = Arc::new(ingress(&[], EndOfTier::Deny));
    });
    assert!(remote.is_cut_off(pod.address, 81), "policy is in force on the adopted interface");
    node.namespace.run(|| node.wiring.check(&pod.attachment()).unwrap()).unwrap();

    let found = find(&node);
    let told = found.to_string();
    for part in [
        "rule of chain FORWARD in nftables table ip filter",
        "chain cali-FORWARD in nftables table ip filter",
        "chain cali-POSTROUTING in nftables table ip nat",
        "chain cali-PREROUTING in nftables table ip6 raw",
        "nftables table ip6 calico",
        "rule of chain INPUT in legacy iptables table filter",
        "chain cali-INPUT in legacy iptables table filter",
        "IP set cali40s:empty",
        "IP set cali40this-host",
        "blackhole route to 10.65.7.0/26",
        "link vxlan.calico, which Tortie's agent takes over",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(
        !told.contains("california") && !told.contains("mine") && !told.contains("inet calico"),
        "{told}"
    );
    assert_eq!(find(&node).to_string(), told, "looking changes nothing");
    remove(&node).unwrap();
    assert!(find(&node).is_empty(), "{}", find(&node));
    remove(&node).expect("it can be repeated");
    run(&node.namespace, LEFT);
    assert_eq!(node.namespace.run(|| ipset::names().unwrap()).unwrap(), ["mine"]);
    assert_eq!(reasons(&node.resync()), [], "nothing of Calico is reported any more");
    assert_eq!(routes(&node, 80), []);
    let destinations: Vec<_> = routes(&node, 84).iter().map(|route| route.destination.to_string()).collect();
    assert!(destinations.contains(&"10.65.2.0/26".to_owned()), "{destinations:?}");
    assert!(!destinations.contains(&"10.65.7.0/26".to_owned()), "a route that nobody needs is removed");
    assert_eq!(link(&node, &name), Some(adopted));
    assert!(remote.is_cut_off(pod.address, 81));

    // The way back.
    let Node { namespace, dataplane, wiring, .. } = node;
    drop((dataplane, wiring));
    let hand_over = || namespace.run(|| hand_over_to_calico(&Config::default())).unwrap();
    let error = hand_over().unwrap_err().to_string();
    assert!(error.contains("start Calico first"), "{error}");
    let _felix = namespace.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 9099)).unwrap()).unwrap();
    let done = hand_over().unwrap();
    assert!(done.iter().any(|line| line == "nftables table inet tortie"), "{done:?}");
    assert_eq!(hand_over().unwrap(), Vec::<String>::new(), "it can be repeated");
    assert!(remote.reaches(&pod, 81));
    let state = || {
        let mut socket = RouteSocket::open().unwrap();
        let links = socket.links().unwrap().into_iter().map(|link| (link.name, link.alias));
        let links: Vec<_> = links.filter(|(name, _)| name.contains("cali")).collect();
        (links, socket.routes().unwrap().into_iter().any(|route| route.protocol == 84))
    };
    let (mut links, has_own) = namespace.run(state).unwrap();
    links.sort();
    assert_eq!(links, [(name, String::new()), ("vxlan.calico".to_owned(), String::new())]);
    assert!(!has_own);
    assert_eq!(namespace.run(|| remove_all(&Config::default())).unwrap().unwrap(), Vec::<String>::new());
    for traffic in traffic {
        let longest = traffic.end().expect("the connection stays");
        assert!(longest < MAX_GAP, "{longest:?}");
    }
}

fn run_loopback() {
    let index = tortie_kernel::interface_index("lo").unwrap();
    let up = tortie_kernel::route::Change::SetLink(index, vec![LinkSetting::Up(true)]);
    RouteSocket::open().unwrap().change(&up).unwrap();
}
