//! A node with Tortie's agent and a machine with flannel's own daemon, whose leases are in etcd.

use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_kernel::namespace::NetNs;
use tortie_servers::programs::{Program, can_run};

use crate::flannel::{Nodes, OURS, Os, Setup, THEIR_POD, THEIR_POD_V6, THEIRS, reaches};
use crate::node::{output_of, until};

const SUBNETS: &str = "/coreos.com/network/subnets/";

fn vxlan() -> Value {
    json!({"Type": "vxlan", "VNI": 4096, "Port": 4789})
}

fn can_start() -> bool {
    can_run(&[Program::Etcd, Program::Etcdctl, Program::Kube, Program::Flanneld])
}

/// The value of a key, if there is one.
fn stored(nodes: &Nodes, name: &str) -> Option<Value> {
    let etcd = nodes.etcd.as_ref().unwrap();
    let text = etcd.etcdctl(&["get", "--print-value-only", &format!("{SUBNETS}{name}")]).unwrap();
    serde_json::from_str(&text).ok()
}

/// The key of Tortie's node, which remembers its subnets.
fn own_key(nodes: &Nodes) -> String {
    let annotations = nodes.annotations("ours");
    let subnets = annotations["tortie.io/flannel-subnets"].as_str().unwrap_or_default();
    let subnets = subnets.split(' ').next().unwrap_or_default();
    subnets.replace('/', "-").replace(',', "&")
}

/// Pods of both nodes reach each other, with their own addresses, in the subnets that the nodes have leased.
fn pods_reach_each_other(nodes: &Nodes, backend: &Value, is_dual: bool) -> (NetNs, Vec<IpAddr>) {
    let (pod, own) = nodes.add_pod("p");
    assert_eq!(own.len(), if is_dual { 2 } else { 1 });
    for (own, their_pod) in own.iter().zip([THEIR_POD, THEIR_POD_V6]) {
        until("a connection to flannel's pod", || reaches(&pod, &nodes.their_pod, their_pod) == Some(*own));
        until("a connection from flannel's pod", || reaches(&nodes.their_pod, &pod, *own) == Some(their_pod));
    }
    let theirs = if is_dual { "10.244.2.0-24&fd00:244:0:2::-64" } else { "10.244.2.0-24" };
    for (key, address, number) in [(own_key(nodes).as_str(), OURS, 1), (theirs, THEIRS, 2)] {
        let value = stored(nodes, key).unwrap();
        assert_eq!(
            (&value["PublicIP"], &value["BackendType"]),
            (&json!(address), &backend["Type"]),
            "{key}: {value}"
        );
        let address_v6 = if is_dual { json!(format!("2001:db8:31::{number}")) } else { Value::Null };
        assert_eq!(value["PublicIPv6"], address_v6, "{key}: {value}");
    }
    let first = own_key(nodes).split('-').next().unwrap().trim_end_matches(".0").to_owned();
    assert!(
        first != "10.244.2" && own[0].to_string().starts_with(&format!("{first}.")),
        "{own:?} of {first}"
    );
    (pod, own)
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_by_vxlan_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = vxlan();
    let mut nodes = Nodes::new(Setup { is_in_etcd: true, ..Setup::of(Os::Linux, "Always", &backend) });
    let (pod, own) = pods_reach_each_other(&nodes, &backend, false);
    let key = own_key(&nodes);
    let routes = |nodes: &Nodes| output_of(&nodes.ours, "ip", &["route"]);
    assert!(routes(&nodes).contains("10.244.2.0/24 via 10.244.2.0 dev vxlan.calico"), "{}", routes(&nodes));
    // The agent starts again: the node has the same subnet, and its pod stays.
    nodes.kill("agent");
    nodes.start_agent("Always");
    until("the agent", || {
        std::fs::read_to_string(nodes.path("agent")).unwrap().contains("ready to add pods")
    });
    let (_second, addresses) = nodes.add_pod("q");
    assert_eq!((own_key(&nodes), reaches(&pod, &nodes.their_pod, THEIR_POD)), (key.clone(), Some(own[0])));
    assert_ne!(addresses, own);
    // Without etcd, what was known stays in force.
    let member = &nodes.etcd.as_ref().unwrap().members()[0];
    let report =
        || nodes.api.kubectl(&["get", "nodereports.tortie.io", "ours", "-o", "json"]).unwrap_or_default();
    member.kill().unwrap();
    until("a condition", || report().contains("flannel's leases cannot be read"));
    assert_eq!(reaches(&nodes.their_pod, &pod, own[0]), Some(THEIR_POD));
    member.start_again().unwrap();
    until("the end of the condition", || !report().contains("flannel's leases cannot be read"));
    // Somebody else has the subnet: no pod gets an address.
    let etcd = nodes.etcd.as_ref().unwrap();
    let other = json!({"PublicIP": "172.31.0.9", "BackendType": "udp"}).to_string();
    etcd.etcdctl(&["put", &format!("{SUBNETS}{key}"), &other]).unwrap();
    until("a condition", || report().contains("SubnetLost"));
    let refused = nodes.try_to_add_pod("r").err().unwrap();
    assert!(refused.contains("172.31.0.9 has it") && refused.contains("drain the node"), "{refused}");
    etcd.etcdctl(&["del", &format!("{SUBNETS}{key}")]).unwrap();
    until("the end of the condition", || !report().contains("SubnetLost"));
    let (third, addresses) = nodes.add_pod("s");
    assert_eq!(reaches(&third, &nodes.their_pod, THEIR_POD), Some(addresses[0]));
    // flanneld has gone, and its lease ends.
    nodes.kill("flanneld");
    nodes.etcd.as_ref().unwrap().etcdctl(&["del", &format!("{SUBNETS}10.244.2.0-24")]).unwrap();
    until("the route is gone", || !routes(&nodes).contains("10.244.2.0/24"));
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_in_both_families_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = vxlan();
    let nodes = Nodes::new(Setup { is_in_etcd: true, ..Setup::dual("Always", &backend) });
    pods_reach_each_other(&nodes, &backend, true);
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_tortie_and_flannel_reach_each_other_by_way_of_the_nodes_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = json!({"Type": "host-gw"});
    let nodes = Nodes::new(Setup { is_in_etcd: true, ..Setup::of(Os::Linux, "Never", &backend) });
    pods_reach_each_other(&nodes, &backend, false);
    let routes = output_of(&nodes.ours, "ip", &["route"]);
    assert!(routes.contains(&format!("10.244.2.0/24 via {THEIRS} dev eth0")), "{routes}");
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_a_windows_node_and_flannel_reach_each_other_by_vxlan_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = vxlan();
    let mut nodes = Nodes::new(Setup { is_in_etcd: true, ..Setup::of(Os::Windows, "Always", &backend) });
    let (pod, own) = pods_reach_each_other(&nodes, &backend, false);
    let key = own_key(&nodes);
    let written = stored(&nodes, &key).unwrap();
    let mac = written["BackendData"]["VtepMAC"].as_str().unwrap();
    assert!(mac.to_lowercase().starts_with("00:15:5d:"), "that of the network: {mac}");
    // The agent starts again: the node has the same subnet, and its pod stays.
    nodes.kill("agent");
    nodes.start_agent("Always");
    until("the agent", || {
        std::fs::read_to_string(nodes.path("agent")).unwrap().contains("ready to add pods")
    });
    assert_eq!(stored(&nodes, &key), Some(written));
    assert_eq!(reaches(&pod, &nodes.their_pod, THEIR_POD), Some(own[0]));
    let (_second, addresses) = nodes.add_pod("q");
    assert_ne!(addresses, own);
}

#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_a_windows_node_and_flannel_reach_each_other_by_way_of_the_nodes_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = json!({"Type": "host-gw"});
    let nodes = Nodes::new(Setup { is_in_etcd: true, ..Setup::of(Os::Windows, "Never", &backend) });
    pods_reach_each_other(&nodes, &backend, false);
}

/// Pods of the Windows node have IPv4 addresses only.
#[test]
#[ignore = "flanneld takes minutes to build: cargo xtask e2e flannel"]
fn pods_of_a_windows_node_and_flannel_with_both_families_reach_each_other_with_leases_in_etcd() {
    if !can_start() {
        return;
    }
    let backend = vxlan();
    let mut nodes =
        Nodes::new(Setup { is_in_etcd: true, os: Os::Windows, ..Setup::dual("Always", &backend) });
    let (pod, own) = nodes.add_pod("p");
    assert_eq!(own.len(), 1);
    until("a connection to flannel's pod", || reaches(&pod, &nodes.their_pod, THEIR_POD) == Some(own[0]));
    until("a connection from flannel's pod", || reaches(&nodes.their_pod, &pod, own[0]) == Some(THEIR_POD));
    // A daemon that chooses a subnet compares it with that of the Windows node.
    nodes.kill("flanneld");
    let theirs = "10.244.2.0-24&fd00:244:0:2::-64";
    nodes.etcd.as_ref().unwrap().etcdctl(&["del", &format!("{SUBNETS}{theirs}")]).unwrap();
    std::fs::remove_file(nodes.path("subnet.env")).unwrap();
    nodes.start_flanneld();
    until("a subnet of flanneld", || std::path::Path::new(&nodes.path("subnet.env")).exists());
}
