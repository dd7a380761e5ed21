//! Pods of a pool with IPIP, in a cluster without Windows nodes. A stand-in has the link where the kernel has no IPIP
//! ([`testkit::ipip`]).

use testkit::ipip::IpipStandIn;

use super::support::{Lab, User, three_pods};

const POOL: &str = "default-ipv4-ippool";
const NODES: [&str; 3] = ["primary", "linux-2", "linux-3"];

#[test]
fn pods_of_linux_nodes_use_ipip() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "3", "--windows", "0"]);
    let namespaces = lab.namespaces();
    let links = NODES.map(|node| IpipStandIn::start(&namespaces.of_node(node)));
    let set_mode = |ipip: &str, vxlan: &str| {
        let patch = format!(r#"{{"spec": {{"ipipMode": "{ipip}", "vxlanMode": "{vxlan}"}}}}"#);
        lab.ok(&["patch", "ippool", POOL, "--type", "merge", "-p", &patch]);
    };
    three_pods(&lab);
    let routes = || lab.ok(&["lab", "capture", "primary", "--", "ip", "-4", "route", "show", "proto", "84"]);
    let leads = |number: u8, device: &str| {
        let way = format!("via 192.0.2.{number} dev {device}");
        routes().lines().any(|route| route.contains(&way) && route.contains("/26"))
    };
    let reached = || {
        let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/80");
        let to_pod = cells.iter().filter(|((_, to), _)| to.starts_with("calico-demo/"));
        to_pod.filter(|(_, cell)| *cell == "reached").count()
    };
    let with_vxlan = reached();

    set_mode("Always", "Never");
    lab.wait_until("routes by IPIP", || leads(12, "tunl0") && leads(13, "tunl0"));
    // Pods and nodes reach the pods of all nodes.
    lab.wait_until("packets by IPIP", || reached() == with_vxlan);
    // Pods need no such address, so their packets may be there first.
    let announced = || {
        let node = lab.json(&["get", "node", "primary", "-o", "json"]);
        node["metadata"]["annotations"]["projectcalico.org/IPv4IPIPTunnelAddr"].as_str().map(str::to_owned)
    };
    lab.wait_until("an address for IPIP", || announced().is_some());
    let tunnel = announced().unwrap();
    let tunnel = tunnel.as_str();
    let addresses = || lab.ok(&["lab", "capture", "primary", "--", "ip", "address", "show", "tunl0"]);
    lab.wait_until("the address on the link", || addresses().contains(tunnel));
    let explained = lab.ok(&["explain", "node/primary", "calico-demo/two", "--port", "80"]);
    assert!(explained.contains(tunnel), "{explained}");

    // The other nodes are its neighbours.
    set_mode("CrossSubnet", "Never");
    lab.wait_until("direct routes", || leads(12, "eth0") && leads(13, "eth0"));
    assert_eq!(reached(), with_vxlan);
    // The address says that the node is alone in its network.
    lab.ok(&["annotate", "node", "linux-3", "--overwrite", "projectcalico.org/IPv4Address=192.0.2.13/32"]);
    lab.wait_until("IPIP to the far node", || leads(12, "eth0") && leads(13, "tunl0"));
    lab.wait_until("packets by IPIP and without", || reached() == with_vxlan);

    // Felix has no link for it then. A pool that asks for it is reported, and with VXLAN the setting has no effect.
    let felix = "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {name: default}\nspec: {ipipEnabled: false}\n";
    lab.ok(&["apply", "-f", &lab.file("felix.yml", felix)]);
    lab.wait_until("no IPIP", || leads(12, "eth0") && !routes().contains("tunl0"));
    let reports = || lab.ok(&["get", "nodereports"]);
    lab.wait_until("the condition", || {
        reports().contains("FelixConfiguration default has ipipEnabled false")
    });

    set_mode("Never", "Always");
    lab.wait_until("no condition", || !reports().contains("ipipEnabled"));
    lab.wait_until("VXLAN again", || !routes().contains("tunl0"));
    lab.wait_until("packets by VXLAN", || reached() == with_vxlan);
    lab.wait_until("no address for IPIP", || {
        let node = lab.ok(&["get", "node", "primary", "-o", "json"]);
        let shown = lab.tortie(&["ipam", "show", "--ip", tunnel]).output().unwrap().stdout;
        !node.contains("IPv4IPIPTunnelAddr") && String::from_utf8_lossy(&shown).contains("belongs to nobody")
    });
    drop(links);
    lab.ok(&["lab", "down"]);
    running.wait();
}
