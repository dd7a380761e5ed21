//! Another UDP port of VXLAN: Linux nodes use it, and a Windows node says that it is cut off.

use serde_json::Value;

use crate::support::{Lab, User, pod};

/// Whether each of the two pods reaches the other one. The command fails while links change: some connections end.
fn connect(lab: &Lab, one: &str, other: &str) -> [bool; 2] {
    let matrix = lab.tortie(&["lab", "matrix", "-o", "json"]).output().unwrap();
    let matrix: Value = serde_json::from_slice(&matrix.stdout).unwrap();
    let connections = matrix["connections"].as_array().unwrap();
    [(one, other), (other, one)].map(|(from, to)| {
        let [from, to] = [from, to].map(|pod| format!("calico-demo/{pod}"));
        let is_it = |it: &&Value| it["from"] == *from && it["to"] == *to && it["port"] == "tcp/80";
        connections.iter().find(is_it).expect("a verdict")["verdict"] == "reached"
    })
}

/// What the Windows node reports about the port.
fn problem(lab: &Lab) -> String {
    let report = lab.json(&["get", "nodereport", "minion", "-o", "json"]);
    let conditions = report["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|it| it["reason"] == "VxlanPortNotSupported");
    found.map_or_else(String::new, |it| it["message"].as_str().unwrap().to_owned())
}

fn port_of_link(lab: &Lab, node: &str) -> bool {
    let link = lab.ok(&["lab", "capture", node, "--", "ip", "-d", "link", "show", "vxlan.calico"]);
    link.contains("dstport 8472")
}

#[test]
fn linux_nodes_use_another_port_and_a_windows_node_says_that_it_cannot() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "1"]);
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
    let pods =
        [namespace, pod("one", "primary", "a"), pod("two", "linux-2", "a"), pod("three", "minion", "a")];
    lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
    lab.wait_for_pods();
    lab.wait_until("all pods connect", || {
        connect(&lab, "one", "two") == [true; 2] && connect(&lab, "one", "three") == [true; 2]
    });
    assert_eq!(problem(&lab), "");

    let felix = "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {name: default}\nspec: {vxlanPort: 8472}\n";
    // Policy is in force, and the command tells that a node is cut off.
    let applied = lab.tortie(&["apply", "--wait", "-f", &lab.file("felix.yml", felix)]).output().unwrap();
    let printed = [applied.stdout, applied.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(printed.contains("policy in force on 3 nodes\n"), "{printed}");
    let cut_off = "may not reach each other: minion (VxlanPortNotSupported)\n";
    assert!(!applied.status.success() && printed.contains(cut_off), "{printed}");
    lab.wait_until("the links have the port", || {
        ["primary", "linux-2"].iter().all(|node| port_of_link(&lab, node))
    });
    lab.wait_until("Linux nodes connect by it", || connect(&lab, "one", "two") == [true; 2]);
    assert_eq!(connect(&lab, "one", "three"), [false; 2]);
    lab.wait_until("the node says so", || problem(&lab).contains("is 8472"));
    assert!(problem(&lab).contains("remove vxlanPort"), "{}", problem(&lab));

    lab.ok(&["delete", "felixconfiguration", "default"]);
    lab.wait_until("all pods connect again", || {
        connect(&lab, "one", "two") == [true; 2] && connect(&lab, "one", "three") == [true; 2]
    });
    lab.wait_until("nothing is wrong", || problem(&lab).is_empty());
    lab.ok(&["lab", "down"]);
    running.wait();
}
