//! Linux nodes of a lab with BGP speakers: pods of a pool without encapsulation reach each other by learned routes.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Lab, User, pod};

fn learned(lab: &Lab, node: &str) -> String {
    lab.ok(&["lab", "capture", node, "--", "ip", "-4", "route", "show", "proto", "85"])
}

fn peers(lab: &Lab, node: &str) -> Vec<Value> {
    let peers = lab.tortie(&["bgp", "peers", "--node", node, "-o", "json"]).output().unwrap();
    serde_json::from_slice(&peers.stdout).unwrap_or_default()
}

#[test]
fn pods_of_a_pool_without_encapsulation_use_routes_of_bgp() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "0", "--bgp"]);
    let pool = r#"{"spec": {"vxlanMode": "Never"}}"#;
    lab.ok(&["patch", "ippool", "default-ipv4-ippool", "--type", "merge", "-p", pool]);
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
    let pods = [namespace, pod("one", "primary", "a"), pod("two", "linux-2", "a")];
    lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
    lab.wait_for_pods();
    let nodes = ["primary", "linux-2"];
    lab.wait_until("both nodes have a route", || nodes.iter().all(|node| !learned(&lab, node).is_empty()));
    assert!(learned(&lab, "primary").contains("via 192.0.2.12"), "{}", learned(&lab, "primary"));
    for node in nodes {
        let peers = peers(&lab, node);
        assert_eq!((peers.len(), &peers[0]["state"]), (1, &"Established".into()), "{peers:?}");
    }
    let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/80");
    let cell =
        |from: &str, to: &str| cells[&(format!("calico-demo/{from}"), format!("calico-demo/{to}"))].clone();
    assert_eq!((cell("one", "two").as_str(), cell("two", "one").as_str()), ("reached", "reached"));
    let shown = lab.ok(&["bgp", "routes", "--node", "primary"]);
    assert!(shown.contains("192.0.2.12") && shown.contains("this node"), "{shown}");

    // A killed agent costs no route, neither here nor at its peer.
    let before = nodes.map(|node| learned(&lab, node));
    let agent = lab.processes().into_iter().find(|it| it.command.contains("agent --node linux-2")).unwrap();
    kill_process(Pid::from_raw(agent.pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    lab.wait_until("the session is back", || {
        assert_eq!(nodes.map(|node| learned(&lab, node)), before);
        let peers = peers(&lab, "linux-2");
        peers.first().is_some_and(|peer| peer["state"] == "Established" && peer["received"] == 1)
    });
    assert_eq!(nodes.map(|node| learned(&lab, node)), before);

    // Without the mesh, nobody has routes of others.
    let off = "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {nodeToNodeMeshEnabled: false}\n";
    lab.ok(&["apply", "-f", &lab.file("off.yml", off)]);
    lab.wait_until("the routes are gone", || nodes.iter().all(|node| learned(&lab, node).is_empty()));
    lab.ok(&["lab", "down"]);
    running.wait();
}
