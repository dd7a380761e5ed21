//! The network configuration of a node whose pods have addresses of flannel's networks, while pools come and go.

use std::fs;

use serde_json::{Value, json};
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};

use crate::node::{Node, Sandbox, until};

fn put_pool(node: &Node, name: &str, cidr: &str) {
    let spec = json!({"cidr": cidr, "vxlanMode": "Always", "ipipMode": "Never", "assignmentMode": "Manual"});
    node.put(&Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}));
}

/// The section `ipam` of the file, if there is one.
fn ipam(node: &Node) -> Option<Value> {
    node.configuration_file().exists().then(|| node.configuration()["plugins"][0]["ipam"].take())
}

/// A call with the file as it is, but with files of host-local in the node's folder.
fn call(node: &Node, command: &str, sandbox: &Sandbox) -> Result<Value, Value> {
    let mut ipam = ipam(node).unwrap();
    ipam["dataDir"] = json!(node.path("networks"));
    node.call(command, sandbox, json!({"ipam": ipam}))
}

/// The addresses of a new pod.
fn add(node: &Node, sandbox: &Sandbox) -> Vec<String> {
    let result = call(node, "ADD", sandbox).unwrap();
    let ips = result["ips"].as_array().unwrap().iter();
    ips.map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect()
}

/// The message of the condition about the file.
fn condition(node: &Node) -> Option<String> {
    let report = node.stored(&Key::global(Kind::NodeReport, "one"))?;
    let mut conditions = report["status"]["conditions"].as_array()?.iter();
    let condition = conditions.find(|condition| condition["reason"] == "CniConfigNotWritten")?;
    condition["message"].as_str().map(ToOwned::to_owned)
}

#[test]
fn pools_that_come_and_go_change_the_configuration_of_a_running_agent() {
    let of_v4 = json!({"type": "host-local"});
    let both =
        json!({"type": "host-local", "ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]});
    // Even root cannot write a file there.
    let occupied = |node: &Node| node.path("net.d/.00-tortie.conflist.unfinished");
    let node = Node::with_options(&json!([]), &["--flannel"], |node| {
        put_pool(node, "flannel", "10.77.0.0/16");
        // Without an IPv6 address of the node, its pods get none.
        let key = Key::global(Kind::Node, "one");
        let mut one = node.stored(&key).unwrap();
        node.delete(&key);
        let overwrite = tortie_api::kubernetes::Node::FLANNEL_OVERWRITE.of(IpVersion::V6);
        one["metadata"] = json!({"name": "one", "annotations": {overwrite: "fd00:1::1"}});
        node.put(&key, one);
        fs::create_dir_all(occupied(node)).unwrap();
    });
    until("a condition", || condition(&node).is_some_and(|message| message.contains("starts no pods")));
    fs::remove_dir(occupied(&node)).unwrap();
    until("the configuration", || ipam(&node) == Some(of_v4.clone()));
    until("the end of the condition", || condition(&node).is_none());
    let [a, b, c] = ["a", "b", "c"].map(|name| node.pod(name, json!({})));
    assert_eq!(add(&node, &a), ["10.77.3.2"]);

    put_pool(&node, "flannel-v6", "fd00:77::/32");
    until("both families", || ipam(&node) == Some(both.clone()));
    assert_eq!(add(&node, &b), ["10.77.3.3", "fd00:77:3::2"]);
    // The disk fails when the pool goes.
    fs::create_dir(occupied(&node)).unwrap();
    node.delete(&Key::global(Kind::IpPool, "flannel-v6"));
    until("a condition", || condition(&node).is_some_and(|message| message.contains("uses the former one")));
    assert_eq!(ipam(&node), Some(both));
    fs::remove_dir(occupied(&node)).unwrap();
    until("IPv4 only", || ipam(&node) == Some(of_v4.clone()));
    until("the end of the condition", || condition(&node).is_none());
    assert_eq!(add(&node, &c), ["10.77.3.4"]);
    let log = fs::read_to_string(node.path("agent.log")).unwrap();
    assert_eq!(log.matches("has rewritten the CNI configuration").count(), 2, "{log}");
    // A pod has what it got, and gives back all of it.
    for sandbox in [&a, &b, &c] {
        call(&node, "DEL", sandbox).unwrap();
    }
    let left = fs::read_dir(node.path("networks/k8s-pod-network")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.contains("77:3") || name.starts_with("10.")), "{left:?}");
}
