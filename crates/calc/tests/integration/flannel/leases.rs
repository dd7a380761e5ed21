//! flannel's leases in etcd mean the same as annotations of Nodes, whatever the order of updates.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::random::Random;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::kubernetes::{FlannelBackend, FlannelLease};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::RouteTarget;
use tortie_policy::program::Member;

use super::{LOCAL, mac};

/// A lease: the third byte of the subnet, the last byte of the node's address, and whether it has VXLAN.
type Lease = (u8, u8, bool);

/// The last bytes of a Node's own address, and of another one that it may have.
type Addresses = (u8, Option<u8>);

#[derive(Debug, Clone)]
enum Step {
    /// A Node with its addresses, or none.
    Node(u8, Option<Addresses>),
    /// The leases of all others.
    Leases(Vec<Lease>),
    /// The subnet of this node.
    Own(u8),
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lease = (1..8_u8, 1..6_u8, prop::bool::weighted(0.8));
    let addresses = (1..6_u8, prop::option::of(1..6_u8));
    let step = prop_oneof![
        4 => (0..4_u8, prop::option::weighted(0.8, addresses)).prop_map(|(number, addresses)| Step::Node(number, addresses)),
        4 => prop::collection::vec(lease, 0..5).prop_map(Step::Leases),
        1 => (0..8_u8).prop_map(Step::Own),
        1 => Just(Step::Flush),
    ];
    prop::collection::vec(step, 0..20)
}

fn address(number: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, number])
}

fn key_name(subnet: u8) -> String {
    format!("/coreos.com/network/subnets/10.244.{subnet}.0-24")
}

fn lease((subnet, number, is_vxlan): Lease) -> FlannelLease {
    let vxlan = FlannelBackend::Vxlan { vni: 4096, mac: mac(number).parse().unwrap() };
    let backend = if is_vxlan { vxlan } else { FlannelBackend::HostGw };
    FlannelLease {
        subnet: format!("10.244.{subnet}.0/24").parse().unwrap(),
        public_ip: address(number),
        backend,
    }
}

/// The Node of this number, as it is stored. It also says what must have no effect.
fn node(number: u8, (address, second): Addresses) -> Value {
    let name = format!("n{number}");
    let annotations = json!({
        "projectcalico.org/IPv4Address": format!("192.0.2.{address}/24"),
        "projectcalico.org/IPv4VXLANTunnelAddr": "10.244.99.0",
        "flannel.alpha.coreos.com/kube-subnet-manager": "true", "flannel.alpha.coreos.com/backend-type": "host-gw",
        "flannel.alpha.coreos.com/public-ip": "192.0.2.77",
    });
    let spec = json!({"podCIDR": format!("10.244.{}.0/24", number + 100)});
    json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec, "status": status(second)})
}

fn status(second: Option<u8>) -> Value {
    let listed = |number| json!({"type": "InternalIP", "address": format!("192.0.2.{number}")});
    json!({"addresses": second.map(listed).into_iter().collect::<Vec<Value>>()})
}

/// The Node as if it had announced the lease by annotations.
fn announced(name: &str, (address, second): Addresses, lease: Option<Lease>) -> Value {
    let mut annotations = json!({"projectcalico.org/IPv4Address": format!("192.0.2.{address}/24")});
    let mut spec = json!({});
    if let Some((subnet, number, is_vxlan)) = lease {
        let data = if is_vxlan { json!({"VNI": 4096, "VtepMAC": mac(number)}) } else { Value::Null };
        for (annotation, value) in [
            ("kube-subnet-manager", "true".to_owned()),
            ("backend-type", if is_vxlan { "vxlan" } else { "host-gw" }.to_owned()),
            ("backend-data", data.to_string()),
            ("public-ip", format!("192.0.2.{number}")),
        ] {
            annotations[format!("flannel.alpha.coreos.com/{annotation}")] = json!(value);
        }
        spec = json!({"podCIDR": format!("10.244.{subnet}.0/24")});
    }
    json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec, "status": status(second)})
}

fn with_pool(mut calc: Calc, mode: &str) -> Calc {
    let spec =
        json!({"cidr": "10.244.0.0/16", "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
    let pool = json!({"metadata": {"name": "flannel"}, "spec": spec});
    calc.update(&Key::global(Kind::IpPool, "flannel"), Some(&pool));
    calc
}

/// What a Node without a lease is shown as.
fn without_lease(node: &str) -> String {
    format!("{node} has no lease")
}

/// VTEPs, routes, and nodes with problems.
fn shown(calc: &Calc) -> BTreeSet<String> {
    let state = calc.state();
    let vteps = state.vteps.values().map(|vtep| format!("{} {} {}", vtep.node, vtep.address, vtep.parent));
    let routes = state.routes.iter().map(|(net, target)| format!("{net} {target:?}"));
    let problems = calc.flannel_problems().into_iter().map(|(node, problem)| format!("{node}: {problem}"));
    vteps.chain(routes).chain(problems).collect()
}

/// A separate, simple computation: which Node has which lease, given by annotations.
fn expected(
    nodes: &BTreeMap<u8, Addresses>,
    leases: &BTreeMap<String, Lease>,
    own: Option<u8>,
    mode: &str,
) -> BTreeSet<String> {
    let mut calc = with_pool(Calc::new(LOCAL).with_flannel().with_direct_routes(), mode);
    let (mut left, mut lacking) = (leases.clone(), Vec::new());
    let has = |(own, second): &Addresses, address: u8| *own == address || *second == Some(address);
    for (number, addresses) in nodes {
        let name = format!("n{number}");
        let is_first = |address: u8| {
            !nodes.iter().any(|(other, one)| *other != 0 && other < number && has(one, address))
        };
        let is_own = |owner: u8| *number != 0 && has(addresses, owner) && is_first(owner);
        let found = left.iter().find(|(_, (_, owner, _))| is_own(*owner));
        let found = found.map(|(key, lease)| (key.clone(), *lease));
        let mut lease = found.as_ref().map(|(_, lease)| *lease);
        lacking.extend((*number != 0 && lease.is_none()).then(|| without_lease(&name)));
        if *number == 0 {
            lease = own.map(|subnet| (subnet, addresses.0, true));
        }
        left.retain(|key, _| found.as_ref().is_none_or(|(taken, _)| key != taken));
        calc.update(&Key::global(Kind::Node, &name), Some(&announced(&name, *addresses, lease)));
    }
    for (key, lease) in left {
        let mut machine = announced(&key, (lease.1, None), Some(lease));
        machine["metadata"]["annotations"].as_object_mut().unwrap().remove("projectcalico.org/IPv4Address");
        calc.update(&Key::global(Kind::Node, &key), Some(&machine));
    }
    calc.flush();
    let mut shown = shown(&calc);
    shown.extend(lacking);
    shown
}

#[test]
fn leases_mean_what_annotations_mean() {
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let test = |(steps, is_vxlan): (Vec<Step>, bool)| {
        let mode = if is_vxlan { "Always" } else { "Never" };
        let mut calc = with_pool(Calc::new(LOCAL).with_flannel_leases().with_direct_routes(), mode);
        let (mut nodes, mut leases, mut own) = (BTreeMap::new(), BTreeMap::new(), None);
        for step in steps {
            match step {
                Step::Node(number, addresses) => {
                    let value = addresses.map(|addresses| node(number, addresses));
                    calc.update(&Key::global(Kind::Node, format!("n{number}")), value.as_ref());
                    match addresses {
                        Some(addresses) => drop(nodes.insert(number, addresses)),
                        None => drop(nodes.remove(&number)),
                    }
                }
                Step::Leases(new) => {
                    leases = new.into_iter().map(|lease| (key_name(lease.0), lease)).collect();
                }
                Step::Own(subnet) => own = Some(subnet),
                Step::Flush => drop(calc.flush()),
            }
            // The node's own address is part of its lease.
            let own = own.zip(nodes.get(&0)).map(|(subnet, addresses)| lease((subnet, addresses.0, true)));
            let others = leases.iter().map(|(key, one)| (key.clone(), vec![lease(*one)])).collect();
            calc.update_flannel_leases(own.into_iter().collect(), others);
        }
        calc.flush();
        let mut found = shown(&calc);
        found.extend(calc.without_flannel_lease().map(without_lease));
        assert_eq!(found, expected(&nodes, &leases, own, mode), "{nodes:?} {leases:?} {own:?} {mode}");
        let kinds = [
            "Vxlan { node: \"/",
            "Vxlan { node: \"n",
            "Direct",
            "Local",
            "overlap",
            "backend host-gw, and",
            "has no lease",
        ];
        let kinds = kinds.into_iter().filter(|kind| found.iter().any(|line| line.contains(kind)));
        seen.borrow_mut().extend(kinds);
        Ok(())
    };
    let lacking = || (seen.borrow().len() < 7).then(|| format!("{:?}", seen.borrow()));
    Random::cases(1_000).shrinking(1_000).prove(&(steps(), any::<bool>()), test, lacking).unwrap();
}

/// A virtual machine that is still without its kubelet, for instance.
#[test]
fn a_node_without_an_address_lacks_no_lease() {
    let mut calc = Calc::new(LOCAL).with_flannel_leases();
    let bare = json!({"metadata": {"name": "n1"}});
    for (name, value) in [(LOCAL, node(0, (1, None))), ("n1", bare), ("n2", node(2, (3, None)))] {
        calc.update(&Key::global(Kind::Node, name), Some(&value));
    }
    assert_eq!(calc.without_flannel_lease().collect::<Vec<_>>(), ["n2"]);
    calc.update(&Key::global(Kind::Node, "n1"), Some(&node(1, (2, None))));
    assert_eq!(calc.without_flannel_lease().collect::<Vec<_>>(), ["n1", "n2"]);
    let mut without = Calc::new(LOCAL).with_flannel();
    without.update(&Key::global(Kind::Node, "n2"), Some(&node(2, (3, None))));
    assert_eq!(without.without_flannel_lease().count(), 0);
}

/// Peers `nodes` mean Nodes, with the ends of their tunnels. A machine that is no Node is none of them.
#[test]
fn a_machine_is_no_peer_of_policies() {
    let mut calc = with_pool(Calc::new(LOCAL).with_flannel_leases(), "Always");
    let pod = WorkloadEndpoint::name_for(LOCAL, "p", "eth0");
    let rule = json!({"action": "Deny", "to": [{"nodes": {}}]});
    let spec = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]});
    for (key, value) in [
        (Key::global(Kind::Namespace, "red"), json!({"metadata": {"name": "red"}})),
        (
            Key::namespaced(Kind::WorkloadEndpoint, "red", &pod),
            json!({
                "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
                "metadata": {"name": pod, "namespace": "red"},
                "spec": {"node": LOCAL, "pod": "p", "endpoint": "eth0", "interfaceName": "cali1", "ipNetworks": ["10.244.0.5/32"]},
            }),
        ),
        (Key::global(Kind::ClusterNetworkPolicy, "x"), json!({"metadata": {"name": "x"}, "spec": spec})),
        (Key::global(Kind::Node, LOCAL), node(0, (1, None))),
        (Key::global(Kind::Node, "n1"), node(1, (2, None))),
    ] {
        calc.update(&key, Some(&value));
    }
    let others = |leases: &[Lease]| leases.iter().map(|one| (key_name(one.0), vec![lease(*one)])).collect();
    let members = |calc: &Calc| -> BTreeSet<String> {
        let members = calc.state().sets.values().flat_map(|(_, members)| members.iter());
        members
            .filter_map(|member| match member {
                Member::Net(net) => Some(net.addr().to_string()),
                _ => None,
            })
            .collect()
    };
    calc.update_flannel_leases(vec![lease((0, 1, true))], others(&[(1, 2, true), (2, 9, true)]));
    calc.flush();
    assert_eq!(calc.findings(), []);
    let is_routed = |calc: &Calc, node: &str| {
        calc.state().routes.values().any(|target| *target == RouteTarget::Vxlan { node: node.to_owned() })
    };
    assert!(is_routed(&calc, "n1") && is_routed(&calc, &key_name(2)));
    let of_nodes: BTreeSet<String> =
        ["192.0.2.1", "10.244.0.0", "192.0.2.2", "10.244.1.0"].map(str::to_owned).into();
    assert_eq!(members(&calc), of_nodes);
    // Another one comes, and goes, while the policy is in force.
    let own = || vec![lease((0, 1, true))];
    calc.update_flannel_leases(own(), others(&[(1, 2, true), (2, 9, true), (3, 8, true)]));
    calc.flush();
    assert!(is_routed(&calc, &key_name(3)));
    assert_eq!(members(&calc), of_nodes);
    calc.update_flannel_leases(own(), others(&[(1, 2, true), (2, 9, true)]));
    calc.flush();
    assert_eq!(members(&calc), of_nodes);
    // It becomes a Node.
    calc.update(&Key::global(Kind::Node, "n2"), Some(&node(2, (9, None))));
    calc.flush();
    assert!(is_routed(&calc, "n2") && !is_routed(&calc, &key_name(2)));
    assert_eq!(members(&calc), &of_nodes | &["192.0.2.9", "10.244.2.0"].map(str::to_owned).into());
    // flannel knows it by another address.
    let mut overwritten = node(2, (7, None));
    overwritten["metadata"]["annotations"]["flannel.alpha.coreos.com/public-ip-overwrite"] =
        json!("192.0.2.9");
    calc.update(&Key::global(Kind::Node, "n2"), Some(&overwritten));
    calc.flush();
    assert!(is_routed(&calc, "n2") && !is_routed(&calc, &key_name(2)));
    assert_eq!(members(&calc), &of_nodes | &["192.0.2.9", "10.244.2.0"].map(str::to_owned).into());
}
