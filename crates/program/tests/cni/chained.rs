//! Debian's plugins after and before Tortie's.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tortie_servers::programs::{Program, can_run};

use crate::node::{Node, Sandbox, address, output_of, until};

/// Limits of bandwidth, and a kernel parameter in the pod.
#[test]
fn bandwidth_and_tuning_follow_tortie() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([
        {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        {"type": "tuning", "sysctl": {"net.ipv4.tcp_fin_timeout": "17"}},
    ]));
    let pod = node.pod("limited", json!({"kubernetes.io/ingress-bandwidth": "1M"}));
    let rates =
        json!({"ingressRate": 1_000_000, "ingressBurst": 1_000_000, "egressRate": 0, "egressBurst": 0});
    let asked = Map::from_iter([("bandwidth".to_owned(), rates)]);
    let result = node.call_list("ADD", &pod, &asked, &Value::Null).unwrap();
    let (host_end, in_pod) = (&result["interfaces"][0], &result["interfaces"][1]);
    assert_eq!((&in_pod["name"], &result["ips"][0]["interface"]), (&json!("eth0"), &json!(1)));
    assert_eq!(host_end["sandbox"], Value::Null, "{result}");
    let shaped = output_of(
        &node.namespace,
        "/usr/sbin/tc",
        &["qdisc", "show", "dev", host_end["name"].as_str().unwrap()],
    );
    assert!(shaped.contains("tbf") && shaped.contains("rate 1Mbit"), "{shaped}");
    assert_eq!(output_of(&pod.netns, "/bin/cat", &["/proc/sys/net/ipv4/tcp_fin_timeout"]).trim(), "17");
    assert!(output_of(&pod.netns, "/bin/ip", &["address"]).contains(&address(&result).to_string()));

    node.call_list("CHECK", &pod, &asked, &result).unwrap();
    for _ in 0..2 {
        node.call_list("DEL", &pod, &asked, &result).unwrap();
    }
    until("the interface goes", || !pod.has_interface("eth0"));
    assert_eq!(node.addresses_in_use(), 0);
}

/// A runtime may ask Tortie's plugin for a MAC address, and pass the Pod's own ports.
#[test]
fn what_a_runtime_asks_is_served() {
    let node = Node::new(&json!([]));
    let pod = node.pod("asking", json!({}));
    let asked = |port: u16| {
        let mapping = json!({"hostPort": port, "containerPort": 80, "protocol": "tcp"});
        json!({"runtimeConfig": {"mac": "02:42:00:00:00:07", "portMappings": [mapping]}})
    };
    let error = node.call("ADD", &pod, asked(8080)).unwrap_err().to_string();
    assert!(error.contains("maps port 8080/tcp to 80") && error.contains("write it into"), "{error}");
    assert!(!pod.has_interface("eth0") && node.addresses_in_use() == 0);
    // Port 0 is none of the node.
    let result = node.call("ADD", &pod, asked(0)).unwrap();
    assert_eq!(result["interfaces"][1]["mac"], json!("02:42:00:00:00:07"));
    let shown = output_of(&pod.netns, "/bin/ip", &["link", "show", "eth0"]);
    assert!(shown.contains("link/ether 02:42:00:00:00:07"), "{shown}");
    let mut again = asked(0);
    again["prevResult"] = result.clone();
    node.call("CHECK", &pod, again.clone()).unwrap();
    again["runtimeConfig"]["mac"] = json!("02:42:00:00:00:08");
    let error = node.call("CHECK", &pod, again).unwrap_err().to_string();
    assert!(error.contains("has not the MAC address 02:42:00:00:00:08"), "{error}");
    node.call("DEL", &pod, asked(0)).unwrap();

    let pod = node.pod("annotated", json!({"cni.projectcalico.org/hwAddr": "02:42:00:00:00:09"}));
    node.call("ADD", &pod, json!({})).unwrap();
    let shown = output_of(&pod.netns, "/bin/ip", &["link", "show", "eth0"]);
    assert!(shown.contains("link/ether 02:42:00:00:00:09"), "{shown}");
}

/// Without another plugin for it, Tortie limits bandwidth itself.
#[test]
fn limits_of_annotations_and_of_the_runtime_are_set() {
    let node = Node::new(&json!([]));
    let limits = |pod: &Sandbox, result: &Value| {
        let host_end = result["interfaces"][0]["name"].as_str().unwrap();
        let shown = |namespace, link| output_of(namespace, "/usr/sbin/tc", &["qdisc", "show", "dev", link]);
        let rate = |shown: String| {
            Some(shown.split_once("tbf ")?.1.split_once("rate ")?.1.split(' ').next()?.to_owned())
        };
        [rate(shown(&node.namespace, host_end)), rate(shown(&pod.netns, "eth0"))]
    };
    let rates =
        |ingress: Option<&str>, egress: Option<&str>| [ingress, egress].map(|rate| rate.map(str::to_owned));
    let (ingress, egress) = ("kubernetes.io/ingress-bandwidth", "kubernetes.io/egress-bandwidth");
    let asked =
        json!({"runtimeConfig": {"bandwidth": {"ingressRate": 3_000_000, "ingressBurst": 3_000_000}}});
    for (name, annotations, more, expected) in [
        ("in", json!({ingress: "1M"}), json!({}), rates(Some("1Mbit"), None)),
        ("out", json!({egress: "20G"}), json!({}), rates(None, Some("20Gbit"))),
        ("both", json!({ingress: "1M", egress: "2M"}), json!({}), rates(Some("1Mbit"), Some("2Mbit"))),
        ("runtime", json!({ingress: "1M", egress: "2M"}), asked.clone(), rates(Some("3Mbit"), Some("2Mbit"))),
    ] {
        let pod = node.pod(name, annotations);
        let result = node.call("ADD", &pod, more.clone()).unwrap();
        assert_eq!(limits(&pod, &result), expected, "{name}");
        let mut check = more;
        check["prevResult"] = result;
        node.call("CHECK", &pod, check).unwrap();
    }
    let pod = node.pod("wrong", json!({egress: "fast"}));
    let error = node.call("ADD", &pod, json!({})).unwrap_err();
    let text = error.to_string();
    assert!(error["code"] == 103 && text.contains(egress) && text.contains("no rate such as 10M"), "{text}");
    assert!(!pod.has_interface("eth0"));
}

/// A configuration written by hand, with `portmap`: the port of the node leads to the pod until DEL. Tortie's agent and
/// `tortie install` do not write such a one.
#[test]
fn portmap_of_a_configuration_by_hand_serves_a_port_until_del() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([]));
    let pod = node.pod("mapped", json!({}));
    let result = node.call("ADD", &pod, json!({})).unwrap();
    let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
    let mut portmap = json!({
        "cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "portmap",
        "capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": [mapping]}, "prevResult": result,
    });
    portmap["prevResult"]["cniVersion"] = json!("1.0.0");
    let outside = node.outside(Ipv4Addr::new(172, 31, 0, 9));
    let listener = pod.netns.run(|| TcpListener::bind((address(&result), 80)).unwrap()).unwrap();
    let connects = || {
        let target = SocketAddr::from((Ipv4Addr::new(172, 31, 0, 1), 8080));
        outside.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(5)).is_ok()).unwrap()
    };
    assert!(!connects());
    let after = node.execute(&pod.environment("ADD"), &portmap).unwrap();
    assert_eq!(address(&after), address(&result));
    assert!(connects());
    assert_eq!(listener.accept().unwrap().1.ip(), Ipv4Addr::new(172, 31, 0, 9), "the pod sees the client");
    for _ in 0..2 {
        node.execute(&pod.environment("DEL"), &portmap).unwrap();
    }
    assert!(!connects());
    node.call("DEL", &pod, json!({})).unwrap();
}

/// Debian's plugins before Tortie's. One that makes the pod's interface is in the way; one that changes something else is not.
#[test]
fn earlier_plugins_may_do_anything_but_make_the_interface() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([]));
    let pod = node.pod("wired", json!({}));
    let ipam = json!({"type": "host-local", "subnet": "10.99.0.0/24", "dataDir": node.path("networks")});
    let ptp = json!({"cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "ptp", "ipam": ipam});
    let wired = node.execute(&pod.environment("ADD"), &ptp).unwrap();
    let error = node.call("ADD", &pod, json!({"prevResult": wired})).unwrap_err();
    let text = error.to_string();
    assert!(error["code"] == 103 && text.contains("let tortie-cni be the first plugin"), "{text}");
    assert_eq!(node.addresses_in_use(), 0);
    // The runtime takes everything back.
    node.call("DEL", &pod, json!({"prevResult": wired})).unwrap();
    node.execute(&pod.environment("DEL"), &ptp).unwrap();
    assert!(!pod.has_interface("eth0"));

    let pod = node.pod("tuned", json!({}));
    let nothing = json!({"cniVersion": "1.0.0", "interfaces": [], "ips": [], "dns": {}});
    let tuning = json!({
        "cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "tuning", "prevResult": nothing,
        "sysctl": {"net.ipv4.tcp_fin_timeout": "18"},
    });
    let tuned = node.execute(&pod.environment("ADD"), &tuning).unwrap();
    let result = node.call("ADD", &pod, json!({"prevResult": tuned})).unwrap();
    assert_eq!(output_of(&pod.netns, "/bin/cat", &["/proc/sys/net/ipv4/tcp_fin_timeout"]).trim(), "18");
    node.call("CHECK", &pod, json!({"prevResult": result})).unwrap();
    node.call("DEL", &pod, json!({"prevResult": result})).unwrap();
    until("the interface goes", || !pod.has_interface("eth0"));
    assert_eq!(node.addresses_in_use(), 0);
}
