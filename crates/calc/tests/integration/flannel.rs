//! Nodes that flannel's annotations describe. Whatever the order of updates, VTEPs and routes are those that a separate, simple
//! computation gets from the objects.

mod leases;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::random::Random;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::RouteTarget;

const LOCAL: &str = "n0";
/// The MAC addresses of all nodes begin with these.
const MAC: &str = "12:c6:65:89:b4:";
const MAC_V6: &str = "12:c6:65:89:b6:";

/// That of a node.
fn mac(number: u8) -> String {
    format!("{MAC}{number:02x}")
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Backend {
    Absent,
    HostGw,
    Vxlan(u32),
    Udp,
}

/// What a node has of IPv6.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ipv6 {
    Nothing,
    /// A network for its pods, which flannel does not use.
    Network,
    Lease,
}

/// A node, or none.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Node {
    backend: Backend,
    is_near: bool,
    /// The third byte of the network of its pods.
    subnet: Option<u8>,
    /// The last byte of its address.
    number: u8,
    ipv6: Ipv6,
    /// Whether its data of VXLAN has no MAC address.
    is_damaged: bool,
}

impl Node {
    fn address(&self, version: IpVersion) -> String {
        let net = if self.is_near { 2 } else { 3 };
        match version {
            IpVersion::V4 => format!("192.0.{net}.{}", self.number),
            IpVersion::V6 => format!("2001:db8:{net}::{}", self.number),
        }
    }

    /// The network of its pods of a family, without the length of its prefix.
    fn net(&self, version: IpVersion) -> Option<String> {
        let subnet = self.subnet?;
        match version {
            IpVersion::V4 => Some(format!("10.244.{subnet}.0")),
            IpVersion::V6 => (self.ipv6 != Ipv6::Nothing).then(|| format!("fd00:244:0:{}::", subnet + 1)),
        }
    }

    fn cidr(&self, version: IpVersion) -> Option<String> {
        let length = if version == IpVersion::V4 { 24 } else { 64 };
        self.net(version).map(|net| format!("{net}/{length}"))
    }

    /// Whether its daemon announces a family.
    fn has_lease(&self, version: IpVersion) -> bool {
        let has_family = version == IpVersion::V4 || self.ipv6 == Ipv6::Lease;
        self.backend != Backend::Absent && self.subnet.is_some() && has_family
    }

    /// Of the other nodes, some run Windows.
    fn is_windows(&self) -> bool {
        self.number.is_multiple_of(3)
    }

    fn value(&self, name: &str) -> Value {
        let mut annotations = BTreeMap::new();
        let mut put = |name: &str, value: String| drop(annotations.insert(name.to_owned(), value));
        let (backend, data) = match self.backend {
            Backend::Absent => ("", String::new()),
            Backend::HostGw => ("host-gw", "null".to_owned()),
            Backend::Vxlan(vni) if self.is_damaged => ("vxlan", format!(r#"{{"VNI":{vni},"VtepMAC":""}}"#)),
            Backend::Vxlan(vni) => ("vxlan", format!(r#"{{"VNI":{vni},"VtepMAC":"{}"}}"#, mac(self.number))),
            Backend::Udp => ("udp", "null".to_owned()),
        };
        if self.backend != Backend::Absent {
            put("flannel.alpha.coreos.com/kube-subnet-manager", "true".to_owned());
            put("flannel.alpha.coreos.com/backend-type", backend.to_owned());
            if self.ipv6 == Ipv6::Lease {
                put("flannel.alpha.coreos.com/backend-v6-data", data.replace(MAC, MAC_V6));
                put("flannel.alpha.coreos.com/public-ipv6", self.address(IpVersion::V6));
            }
            put("flannel.alpha.coreos.com/backend-data", data);
            put("flannel.alpha.coreos.com/public-ip", self.address(IpVersion::V4));
        }
        if name == LOCAL {
            put("projectcalico.org/IPv4Address", format!("{}/24", self.address(IpVersion::V4)));
            put("projectcalico.org/IPv6Address", format!("{}/64", self.address(IpVersion::V6)));
        }
        let cidrs: Vec<String> =
            IpVersion::ALL.into_iter().filter_map(|version| self.cidr(version)).collect();
        let spec = json!({"podCIDR": cidrs.first(), "podCIDRs": cidrs});
        let os = if name != LOCAL && self.is_windows() { "windows" } else { "linux" };
        let labels = json!({"kubernetes.io/os": os});
        json!({"metadata": {"name": name, "labels": labels, "annotations": annotations}, "spec": spec})
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Pool {
    Absent,
    Vxlan,
    /// Which flanneld does not know: as `Vxlan`, and reported.
    CrossSubnet,
    Plain,
}

/// What is to be announced to the dataplane: VTEPs (address, parent) of nodes, routes, and the nodes with problems.
type Expected = (BTreeMap<(String, IpVersion), (IpAddr, IpAddr)>, BTreeMap<String, String>, BTreeSet<String>);

/// The nodes, with the VXLAN network identifiers that are in force of each family.
type Nodes = BTreeMap<String, (Node, [Option<u32>; 2])>;

/// Ingests a node. Damaged data leaves the identifier in force that its network had before.
fn put(nodes: &mut Nodes, name: String, node: Node) {
    let former = nodes.get(&name).copied();
    let in_force = [0, 1].map(|index| {
        let version = IpVersion::ALL[index];
        let (Backend::Vxlan(vni), true) = (node.backend, node.has_lease(version)) else { return None };
        match former {
            _ if !node.is_damaged => Some(vni),
            Some((former, known)) if former.net(version) == node.net(version) => known[index],
            _ => None,
        }
    });
    nodes.insert(name, (node, in_force));
}

fn expected(nodes: &Nodes, pool: Pool, direct: bool) -> Expected {
    let mut expected: Expected = Expected::default();
    let local = nodes.get(LOCAL).map(|(local, _)| local.is_near);
    for (name, (node, in_force)) in nodes {
        let damaged = node.is_damaged && in_force.iter().any(Option::is_some);
        if damaged {
            expected.2.insert(name.clone());
        }
        for (version, vni) in IpVersion::ALL.into_iter().zip(in_force) {
            let Some(net) = node.cidr(version) else { continue };
            let is_fine = if !node.has_lease(version) {
                // Pods of Windows nodes have no IPv6.
                version == IpVersion::V6 && (pool == Pool::Absent || name != LOCAL && node.is_windows())
            } else if name == LOCAL {
                expected.1.insert(net, "local".to_owned());
                matches!(pool, Pool::Vxlan | Pool::Plain)
            } else {
                let parent: IpAddr = node.address(version).parse().unwrap();
                if vni.is_some() {
                    let address = node.net(version).unwrap().parse().unwrap();
                    expected.0.insert((name.clone(), version), (address, parent));
                }
                let is_near = local == Some(node.is_near);
                let (target, is_fine) = of_other(name, node, pool, *vni, is_near, parent);
                let is_used = direct || !target.starts_with("direct");
                expected.1.extend((is_used && !target.is_empty()).then_some((net, target)));
                is_fine
            };
            if !is_fine {
                expected.2.insert(name.clone());
            }
        }
    }
    expected
}

/// The target of the route to the pods of another node, if any, and whether it is as it should be.
fn of_other(
    name: &str,
    node: &Node,
    pool: Pool,
    vni: Option<u32>,
    is_near: bool,
    parent: IpAddr,
) -> (String, bool) {
    let direct = |is_possible: bool| if is_possible { format!("direct {parent}") } else { String::new() };
    match (pool, node.backend, vni) {
        (Pool::Vxlan, Backend::Vxlan(_), Some(vni)) => (format!("vxlan {name}"), vni == 4096),
        (Pool::CrossSubnet, Backend::Vxlan(_), Some(_)) => (format!("vxlan {name}"), false),
        (Pool::Plain, Backend::HostGw, _) => (direct(is_near), is_near),
        // Only flanneld's host-gw makes a network that takes such packets on a Windows node.
        (Pool::Plain, Backend::Vxlan(_) | Backend::Udp, _) => (direct(is_near && !node.is_windows()), false),
        _ => (String::new(), false),
    }
}

fn actual(calc: &Calc) -> Expected {
    let state = calc.state();
    let vteps = state.vteps.iter().map(|((name, version), vtep)| {
        assert!(vtep.mac.to_string().starts_with(if *version == IpVersion::V4 { MAC } else { MAC_V6 }));
        ((name.clone(), *version), (vtep.address, vtep.parent))
    });
    let routes = state.routes.iter().map(|(net, target)| {
        let target = match target {
            RouteTarget::Local => "local".to_owned(),
            RouteTarget::Vxlan { node } => format!("vxlan {node}"),
            RouteTarget::Ipip { router } => format!("IPIP {router}"),
            RouteTarget::Direct { router } => format!("direct {router}"),
        };
        (net.to_string(), target)
    });
    let problems = calc.flannel_problems().into_keys().map(str::to_owned);
    (vteps.collect(), routes.collect(), problems.collect())
}

/// The node of this number, with VXLAN of both families.
fn node_of(number: u8) -> Node {
    let backend = Backend::Vxlan(4096);
    let subnet = Some(number);
    Node { backend, is_near: true, subnet, number: number + 1, ipv6: Ipv6::Lease, is_damaged: false }
}

fn key_of(name: &str) -> Key {
    Key::global(Kind::Node, name)
}

#[derive(Debug, Clone)]
enum Step {
    Put(usize, Node),
    Delete(usize),
    Pool(Pool),
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let backend = prop_oneof![
        Just(Backend::Absent),
        Just(Backend::HostGw),
        Just(Backend::Vxlan(4096)),
        Just(Backend::Vxlan(1)),
        Just(Backend::Udp)
    ];
    // A controller gives each network to one node; a node may have another one when it was recreated.
    let ipv6 = prop_oneof![1 => Just(Ipv6::Nothing), 1 => Just(Ipv6::Network), 3 => Just(Ipv6::Lease)];
    let subnet = prop::option::weighted(0.8, any::<bool>());
    let node = (0..4_u8, backend, prop::bool::weighted(0.8), subnet, ipv6, prop::bool::weighted(0.3));
    let node = node.prop_map(|(number, backend, is_near, subnet, ipv6, is_damaged)| {
        let subnet = subnet.map(|second| number + 4 * u8::from(second));
        Step::Put(number.into(), Node { backend, is_near, subnet, number: number + 1, ipv6, is_damaged })
    });
    let pool = prop_oneof![
        1 => Just(Pool::Absent),
        3 => Just(Pool::Vxlan),
        1 => Just(Pool::CrossSubnet),
        3 => Just(Pool::Plain)
    ];
    let step = prop_oneof![
        6 => node,
        1 => (0..4_usize).prop_map(Step::Delete),
        1 => pool.prop_map(Step::Pool),
        1 => Just(Step::Flush),
    ];
    prop::collection::vec(step, 0..25)
}

/// Makes the steps, and compares the state. Returns it.
fn make(steps: Vec<Step>, direct: bool) -> Expected {
    let new = || Calc::new(LOCAL).with_flannel();
    let mut calc = if direct { new().with_direct_routes() } else { new() };
    let (mut nodes, mut pool) = (Nodes::new(), Pool::Absent);
    for step in steps {
        match step {
            Step::Put(number, node) => {
                let name = format!("n{number}");
                calc.update(&key_of(&name), Some(&node.value(&name)));
                put(&mut nodes, name, node);
            }
            Step::Delete(number) => {
                let name = format!("n{number}");
                calc.update(&key_of(&name), None);
                nodes.remove(&name);
            }
            Step::Pool(new) => {
                pool = new;
                let mode = match pool {
                    Pool::Vxlan => "Always",
                    Pool::CrossSubnet => "CrossSubnet",
                    Pool::Absent | Pool::Plain => "Never",
                };
                for (name, cidr) in [("flannel", "10.244.0.0/16"), ("flannel-v6", "fd00:244::/48")] {
                    let spec = json!({"cidr": cidr, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
                    let value = json!({"metadata": {"name": name}, "spec": spec});
                    let key = Key::global(Kind::IpPool, name);
                    calc.update(&key, Some(&value).filter(|_| pool != Pool::Absent));
                }
            }
            Step::Flush => drop(calc.flush()),
        }
    }
    calc.flush();
    let expected = expected(&nodes, pool, direct);
    assert_eq!(actual(&calc), expected, "{nodes:?}, {pool:?}, direct {direct}");
    expected
}

#[test]
fn vteps_and_routes_follow_the_annotations() {
    let seen = RefCell::new(BTreeSet::new());
    let test = |(steps, direct): (Vec<Step>, bool)| {
        let (_, routes, problems) = make(steps, direct);
        let families = routes.keys().map(|net| if net.contains(':') { "IPv6" } else { "IPv4" }.to_owned());
        seen.borrow_mut().extend(families);
        let ways = routes.into_values().map(|target| target.split(' ').next().unwrap().to_owned());
        seen.borrow_mut().extend(ways.chain((!problems.is_empty()).then(|| "problem".to_owned())));
        Ok(())
    };
    let lacking = || {
        let all = ["direct", "local", "problem", "vxlan", "IPv4", "IPv6"];
        all.into_iter().find(|way| !seen.borrow().contains(*way)).map(str::to_owned)
    };
    Random::cases(1_000).shrinking(1_000).prove(&(steps(), any::<bool>()), test, lacking).unwrap();
}

/// Networks that overlap are reported for both nodes, and pools that do not fit for all.
#[test]
fn what_does_not_fit_is_reported() {
    let pool = |name: &str, cidr: &str, mode: &str, assignment: &str| {
        let spec =
            json!({"cidr": cidr, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": assignment});
        (Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}))
    };
    let node = |number: u8, cidr: &str| {
        let name = format!("n{number}");
        let mut value = node_of(number).value(&name);
        value["spec"] = json!({"podCIDR": cidr});
        (key_of(&name), value)
    };
    let flannel = || pool("flannel", "10.244.0.0/16", "Always", "Manual");
    let three = |cidr: &str| [node(0, "10.244.0.0/24"), node(1, "10.244.1.0/24"), node(2, cidr)];
    for (pools, nodes, expected) in [
        (vec![flannel()], three("10.244.2.0/24"), vec![]),
        (vec![flannel()], three("10.244.1.0/24"), vec![("n1", "node n2 overlap"), ("n2", "node n1 overlap")]),
        (
            vec![flannel()],
            three("10.244.1.128/25"),
            vec![("n1", "node n2 overlap"), ("n2", "node n1 overlap")],
        ),
        (vec![flannel()], three("10.245.1.0/24"), vec![("n2", "no IPPool contains")]),
        // The smallest pool counts.
        (vec![flannel(), pool("all", "10.0.0.0/8", "Never", "Automatic")], three("10.244.2.0/24"), vec![]),
        (
            vec![pool("flannel", "10.244.0.0/16", "Always", "Automatic")],
            three("10.244.2.0/24"),
            vec![
                ("n0", "assignmentMode Manual"),
                ("n1", "assignmentMode Manual"),
                ("n2", "assignmentMode Manual"),
            ],
        ),
    ] {
        let mut calc = Calc::new(LOCAL).with_flannel();
        for (key, value) in pools.iter().chain(&nodes) {
            calc.update(key, Some(value));
        }
        calc.flush();
        let problems = calc.flannel_problems();
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        for (node, problem) in expected {
            assert!(problems[node].contains(problem), "{node}: {problems:?}");
        }
    }
}

/// flanneld on Windows writes an empty MAC address when it starts. Nothing changes until the right one comes, and the node is named.
#[test]
fn data_that_cannot_be_read_leaves_the_last_valid_data_in_force() {
    let pool = json!({"metadata": {"name": "flannel"}, "spec":
        {"cidr": "10.244.0.0/16", "vxlanMode": "Always", "ipipMode": "Never", "assignmentMode": "Manual"}});
    let mut calc = Calc::new(LOCAL).with_flannel();
    calc.update(&Key::global(Kind::IpPool, "flannel"), Some(&pool));
    let without_v6 = |number: u8| Node { ipv6: Ipv6::Nothing, ..node_of(number) };
    let of = |name: &str, node: Node| (key_of(name), node.value(name));
    for (key, value) in [of("n0", without_v6(0)), of("n1", without_v6(1))] {
        calc.update(&key, Some(&value));
    }
    calc.flush();
    let before = actual(&calc);
    assert_eq!(before.2, BTreeSet::new());
    let (key, damaged) = of("n1", Node { is_damaged: true, ..without_v6(1) });
    for _ in 0..2 {
        calc.update(&key, Some(&damaged));
        assert_eq!(calc.flush(), vec![]);
        assert_eq!(actual(&calc), (before.0.clone(), before.1.clone(), BTreeSet::from(["n1".to_owned()])));
        assert!(calc.flannel_problems()["n1"].contains("packets go by what it had before"));
    }
    let other_mac = mac(0xe4);
    let text = of("n1", without_v6(1)).1.to_string().replace(&mac(without_v6(1).number), &other_mac);
    calc.update(&key, Some(&serde_json::from_str(&text).unwrap()));
    calc.flush();
    let state = calc.state();
    assert_eq!(state.vteps[&("n1".to_owned(), IpVersion::V4)].mac.to_string(), other_mac);
    assert!(calc.flannel_problems().is_empty());
    // Another network of its pods has had no data yet.
    calc.update(&key, Some(&of("n1", Node { is_damaged: true, ..without_v6(7) }).1));
    calc.flush();
    assert!(actual(&calc).0.is_empty() && calc.flannel_problems()["n1"].contains("cannot be read; see"));
}

/// Without flannel, its annotations mean nothing.
#[test]
fn annotations_of_flannel_mean_nothing_by_default() {
    let mut calc = Calc::new(LOCAL);
    calc.update(&key_of("n1"), Some(&node_of(1).value("n1")));
    calc.flush();
    assert_eq!(actual(&calc), Expected::default());
}
