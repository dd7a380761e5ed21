//! Nodes that flannel's annotations describe. Whatever the order of updates, VTEPs and routes are those that a separate, simple
//! computation gets from the objects.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

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
const MAC: &str = "12:c6:65:89:b4:e3";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Backend {
    Absent,
    HostGw,
    Vxlan(u32),
    Udp,
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
}

impl Node {
    fn address(&self) -> String {
        format!("192.0.{}.{}", if self.is_near { 2 } else { 3 }, self.number)
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
            Backend::Vxlan(vni) => ("vxlan", format!(r#"{{"VNI":{vni},"VtepMAC":"{MAC}"}}"#)),
            Backend::Udp => ("udp", "null".to_owned()),
        };
        if self.backend != Backend::Absent {
            put("flannel.alpha.coreos.com/kube-subnet-manager", "true".to_owned());
            put("flannel.alpha.coreos.com/backend-type", backend.to_owned());
            put("flannel.alpha.coreos.com/backend-data", data);
            put("flannel.alpha.coreos.com/public-ip", self.address());
        }
        if name == LOCAL {
            put("projectcalico.org/IPv4Address", format!("{}/24", self.address()));
        }
        let spec = self
            .subnet
            .map_or_else(|| json!({}), |subnet| json!({"podCIDR": format!("10.244.{subnet}.0/24")}));
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
type Expected = (BTreeMap<String, (IpAddr, IpAddr)>, BTreeMap<String, String>, BTreeSet<String>);

fn expected(nodes: &BTreeMap<String, Node>, pool: Pool, direct: bool) -> Expected {
    let (mut vteps, mut routes, mut problems): Expected = Expected::default();
    for (name, node) in nodes {
        let Some(subnet) = node.subnet else { continue };
        let net = format!("10.244.{subnet}.0/24");
        if name == LOCAL {
            if node.backend != Backend::Absent {
                routes.insert(net, "local".to_owned());
            }
            if node.backend == Backend::Absent || matches!(pool, Pool::Absent | Pool::CrossSubnet) {
                problems.insert(name.clone());
            }
            continue;
        }
        let parent: IpAddr = node.address().parse().unwrap();
        let local_is_known = nodes.contains_key(LOCAL);
        if let Backend::Vxlan(_) = node.backend {
            vteps.insert(name.clone(), (format!("10.244.{subnet}.0").parse().unwrap(), parent));
        }
        let local_is_near = nodes.get(LOCAL).is_some_and(|local| local.is_near);
        let is_near = local_is_known && local_is_near == node.is_near;
        let is_fine = match (pool, node.backend) {
            (Pool::Vxlan, Backend::Vxlan(vni)) => {
                routes.insert(net, format!("vxlan {name}"));
                vni == 4096
            }
            (Pool::CrossSubnet, Backend::Vxlan(_)) => {
                routes.insert(net, format!("vxlan {name}"));
                false
            }
            (Pool::Plain, Backend::HostGw) => {
                if direct && is_near {
                    routes.insert(net, format!("direct {parent}"));
                }
                is_near
            }
            // Only flanneld's host-gw makes a network that takes such packets on a Windows node.
            (Pool::Plain, Backend::Vxlan(_) | Backend::Udp) => {
                if direct && is_near && !node.is_windows() {
                    routes.insert(net, format!("direct {parent}"));
                }
                false
            }
            _ => false,
        };
        if !is_fine {
            problems.insert(name.clone());
        }
    }
    (vteps, routes, problems)
}

fn actual(calc: &Calc) -> Expected {
    let state = calc.state();
    let vteps = state.vteps.iter().map(|((name, version), vtep)| {
        assert_eq!((*version, vtep.mac.to_string().as_str()), (IpVersion::V4, MAC));
        (name.clone(), (vtep.address, vtep.parent))
    });
    let routes = state.routes.iter().map(|(net, target)| {
        let target = match target {
            RouteTarget::Local => "local".to_owned(),
            RouteTarget::Vxlan { node } => format!("vxlan {node}"),
            RouteTarget::Direct { router } => format!("direct {router}"),
        };
        (net.to_string(), target)
    });
    let problems = calc.flannel_problems().into_keys().map(str::to_owned);
    (vteps.collect(), routes.collect(), problems.collect())
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
    let node = (0..4_u8, backend, prop::bool::weighted(0.8), prop::option::weighted(0.8, any::<bool>()));
    let node = node.prop_map(|(number, backend, is_near, subnet)| {
        let subnet = subnet.map(|second| number + 4 * u8::from(second));
        Step::Put(number.into(), Node { backend, is_near, subnet, number: number + 1 })
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
    let (mut nodes, mut pool): (BTreeMap<String, Node>, _) = (BTreeMap::new(), Pool::Absent);
    for step in steps {
        match step {
            Step::Put(number, node) => {
                let name = format!("n{number}");
                calc.update(&key_of(&name), Some(&node.value(&name)));
                nodes.insert(name, node);
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
                let spec = json!({"cidr": "10.244.0.0/16", "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
                let value = json!({"metadata": {"name": "flannel"}, "spec": spec});
                let key = Key::global(Kind::IpPool, "flannel");
                calc.update(&key, Some(&value).filter(|_| pool != Pool::Absent));
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
        let ways = routes.into_values().map(|target| target.split(' ').next().unwrap().to_owned());
        seen.borrow_mut().extend(ways.chain((!problems.is_empty()).then(|| "problem".to_owned())));
        Ok(())
    };
    let lacking = || {
        let all = ["direct", "local", "problem", "vxlan"];
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
        let mut value =
            Node { backend: Backend::Vxlan(4096), is_near: true, subnet: Some(0), number: number + 1 }
                .value(&name);
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

/// Without flannel, its annotations mean nothing.
#[test]
fn annotations_of_flannel_mean_nothing_by_default() {
    let mut calc = Calc::new(LOCAL);
    let node = Node { backend: Backend::Vxlan(4096), is_near: true, subnet: Some(1), number: 2 };
    calc.update(&key_of("n1"), Some(&node.value("n1")));
    calc.flush();
    assert_eq!(actual(&calc), Expected::default());
}
