//! A node whose pods another plugin connects: Debian's `ptp` and `bridge` with `host-local`, called by the driver of the CNI
//! specification, which keeps results as container runtimes do. Tortie's agent enforces policy and nothing else, on a real
//! Kubernetes API.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_kernel::namespace::NetNs;

use crate::foreign_plugin::{BLOCKED, Node, PORT, Sandbox, connect, connects, ip, reaches, until_reaches};
use crate::node::{output_of, until};

#[test]
fn policy_takes_effect_follows_labels_and_ends() {
    let Some(node) = Node::new() else { return };
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    let client = node.pod("client", "many", &json!({"app": "client"}));
    assert!(server.link.starts_with("veth"), "{}", server.link);
    until_reaches("without policy, everything passes", &client.netns, &server, true);
    until_reaches("also from outside", &node.outside, &server, true);
    node.close();
    until_reaches("policy denies", &client.netns, &server, false);
    assert!(!reaches(&node.outside, &server));
    assert!(reaches(&server.netns, &client), "the other direction has no policy");
    assert!(reaches(&node.host, &server), "the node itself, as for probes");
    let own = Ipv4Addr::new(172, 31, 0, 1);
    assert!(connects(&client.netns, &node.host, own), "pods reach their node");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("a label allows", &client.netns, &server, true);
    assert!(!reaches(&node.outside, &server));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("without the label", &client.netns, &server, false);
    node.api.kubectl(&["delete", "networkpolicy", "closed"]).unwrap();
    until_reaches("the policy ends", &client.netns, &server, true);
    assert_eq!(node.conditions("server"), "");
    // A pod cannot send with the address of another one.
    ip(&client.netns, &format!("address add {}/32 dev lo", server.address));
    let at = SocketAddr::from((Ipv4Addr::new(172, 31, 0, 2), PORT));
    let listener = node.outside.run(|| UdpSocket::bind(at).unwrap()).unwrap();
    listener.set_read_timeout(Some(BLOCKED)).unwrap();
    for (source, arrives) in [(client.address, true), (server.address, false)] {
        client.netns.run(|| UdpSocket::bind((source, 0)).unwrap().send_to(b"x", at).unwrap()).unwrap();
        assert_eq!(listener.recv_from(&mut [0; 8]).is_ok(), arrives, "from {source}");
    }
    leaves_nothing_but_policy(&node);
}

/// There is no route, no link, no address, no object of IPAM and no annotation of Tortie, and no CNI configuration.
fn leaves_nothing_but_policy(node: &Node) {
    let routes = output_of(&node.host, "ip", &["-d", "route", "show", "table", "all", "proto", "84"]);
    assert_eq!(routes, "");
    assert_eq!(output_of(&node.host, "ip", &["link", "show", "type", "vxlan"]), "");
    let links = output_of(&node.host, "ip", &["-o", "link"]);
    assert!(!links.contains("cali") && !links.contains("tortie"), "{links}");
    for kind in ["ippools", "ipamblocks", "ipamhandles", "blockaffinities"] {
        let kind = format!("{kind}.crd.projectcalico.org");
        let items = node.api.kubectl(&["get", &kind, "-A", "-o", "name"]).unwrap();
        assert_eq!(items.trim(), "", "{kind}");
    }
    let annotations =
        node.api.kubectl(&["get", "node", "one", "-o", "jsonpath={.metadata.annotations}"]).unwrap();
    assert!(!annotations.contains("projectcalico") && !annotations.contains("tortie"), "{annotations}");
    for pod in ["server", "client"] {
        let pod = node.api.kubectl(&["get", "pod", pod, "-o", "jsonpath={.metadata.annotations}"]).unwrap();
        assert!(!pod.contains("projectcalico"), "{pod}");
    }
    let files = std::fs::read_dir(node.path("net.d")).unwrap().count();
    assert_eq!(files, 4, "only those of the other plugins");
    assert!(!std::path::Path::new(&node.path("agent.sock")).exists(), "nobody calls Tortie's plugin");
    let log = std::fs::read_to_string(node.path("agent.log")).unwrap();
    assert!(!log.to_lowercase().contains("forbidden"), "{log}");
    let table = output_of(&node.host, "nft", &["list", "table", "inet", "tortie"]);
    assert!(!table.contains("masquerade") && !table.contains("dnat"), "{table}");
}

/// Policy on IPv6 packets, and what operators see.
#[test]
fn pods_of_two_families_have_policy_on_both() {
    let Some(node) = Node::new() else { return };
    node.host.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")).unwrap().unwrap();
    let pod = |name: &str, labels: Value| {
        node.create(name, &labels);
        let sandbox = node.attach(name, "dual");
        let found = output_of(
            &sandbox.netns,
            "ip",
            &["-6", "-o", "address", "show", "dev", "eth0", "scope", "global"],
        );
        let ipv6 = found.split_whitespace().find_map(|word| word.strip_suffix("/64")).unwrap().to_owned();
        let status = json!({"status": {"phase": "Running", "podIP": sandbox.address,
            "podIPs": [{"ip": sandbox.address}, {"ip": ipv6}]}});
        node.api
            .kubectl(&[
                "patch",
                "pod",
                name,
                "--subresource=status",
                "--type=merge",
                "-p",
                &status.to_string(),
            ])
            .unwrap();
        (sandbox, ipv6.parse::<Ipv6Addr>().unwrap())
    };
    let (server, server_6) = pod("server", json!({"app": "closed"}));
    let (client, _) = pod("client", json!({}));
    let passes_6 = || connects(&client.netns, &server.netns, server_6);
    until_reaches("without policy, IPv4 passes", &client.netns, &server, true);
    until("and IPv6", passes_6);
    node.close();
    until_reaches("policy denies IPv4", &client.netns, &server, false);
    assert!(!passes_6(), "and IPv6");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("policy allows IPv4", &client.netns, &server, true);
    assert!(passes_6(), "and IPv6");
    let store = format!("kubernetes:{}", node.api.kubeconfig().display());
    let mut shown = Command::new(env!("CARGO_BIN_EXE_tortie"));
    shown.args([
        "policy",
        "show",
        "server",
        "-n",
        "default",
        "--agent-socket",
        &node.path("control.sock"),
        "--store",
        &store,
    ]);
    let shown = node.host.run(|| shown.output().unwrap()).unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    assert!(shown.contains(&format!("interface {}", server.link)), "{shown}");
}

/// The API says for a while that the address belongs to the pod before. The order of the two policies does not matter.
#[test]
fn the_next_pod_with_an_address_never_gets_the_policy_of_the_one_before() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let open = node.pod("first", "one", &json!({"app": "open"}));
    let address = open.address;
    until_reaches("the first pod is open", &client.netns, &open, true);
    // The runtime ends it, and the next one gets the address. Neither is in the API.
    node.detach(open);
    node.create("second", &json!({"app": "closed"}));
    let closed = node.attach("second", "one");
    assert_eq!(closed.address, address);
    let since = Instant::now();
    let mut arrived = 0;
    while since.elapsed() < Duration::from_secs(2) {
        arrived +=
            usize::from(since.elapsed() > Duration::from_millis(900) && reaches(&client.netns, &closed));
    }
    assert_eq!(arrived, 0, "the interface of a pod that is not known yet is closed");
    // Now the API says that both have it.
    node.report("second", address);
    until("the pod before is reported", || {
        let conditions = node.conditions("first");
        conditions.contains("InterfaceUnproven") && conditions.contains("default/second")
    });
    assert!(!reaches(&client.netns, &closed), "its own policy denies");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("its own policy allows", &client.netns, &closed, true);
    node.delete("first");
    until("the report about the pod before ends", || node.conditions("first").is_empty());
    assert!(reaches(&client.netns, &closed));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("it denies again", &client.netns, &closed, false);
    // The other way round: an open pod after a closed one, which remains in the API.
    node.detach(closed);
    let third = node.pod("third", "one", &json!({"app": "open"}));
    assert_eq!(third.address, address);
    until_reaches("the third pod is open", &client.netns, &third, true);
    // A restart in this state.
    let mut node = node;
    node.kill_agent();
    node.start_agent(&[]);
    until("the agent reports", || node.conditions("second").contains("InterfaceUnproven"));
    assert!(reaches(&client.netns, &third));
}

/// A peer goes on sending in a flow that the pod before has allowed: while the API is late, and across a restart of the agent.
#[test]
fn the_next_pod_with_an_address_inherits_no_flow() {
    let Some(mut node) = Node::new() else { return };
    node.close();
    // An answer that the next pod sends after its policy is in force would begin a flow of its own.
    let mute = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "mute", "namespace": "default"},
        "spec": {"podSelector": {"matchLabels": {"app": "closed"}}, "policyTypes": ["Egress"]},
    });
    node.api.apply(&mute.to_string()).unwrap();
    for (round, agent_runs) in [(0, true), (1, false)] {
        let (open_name, closed_name) = (format!("open-{round}"), format!("closed-{round}"));
        let open = node.pod(&open_name, "one", &json!({"app": "open"}));
        let at = SocketAddr::from((open.address, PORT));
        let peer = node.outside.run(|| UdpSocket::bind((Ipv4Addr::new(172, 31, 0, 2), 0)).unwrap()).unwrap();
        peer.set_read_timeout(Some(BLOCKED)).unwrap();
        let before = open.netns.run(|| UdpSocket::bind(at).unwrap()).unwrap();
        before.set_read_timeout(Some(BLOCKED)).unwrap();
        until("the pod before has a flow in both directions", || {
            peer.send_to(b"x", at).unwrap();
            let Ok((_, from)) = before.recv_from(&mut [0; 8]) else { return false };
            before.send_to(b"y", from).unwrap();
            peer.recv_from(&mut [0; 8]).is_ok()
        });
        drop(before);
        if !agent_runs {
            node.kill_agent();
        }
        node.detach(open);
        node.create(&closed_name, &json!({"app": "closed"}));
        let closed = node.attach(&closed_name, "one");
        assert_eq!(closed.address, at.ip());
        let after = closed.netns.run(|| UdpSocket::bind(at).unwrap()).unwrap();
        after.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        // The answers let the kernel take the flow for one that goes in both directions, as soon as nothing forbids it.
        let passes = || {
            peer.send_to(b"x", at).unwrap();
            let Ok((_, from)) = after.recv_from(&mut [0; 8]) else { return false };
            after.send_to(b"y", from).is_ok()
        };
        if !agent_runs {
            until("without an agent, the flow goes on", passes);
            node.report(&closed_name, closed.address);
            let has_started = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !has_started.load(Ordering::SeqCst) {
                        passes();
                    }
                });
                node.start_agent(&[]);
                std::thread::sleep(Duration::from_secs(2));
                has_started.store(true, Ordering::SeqCst);
            });
        }
        until(&format!("the flow ends in round {round}"), || (0..50).all(|_| !passes()));
        node.report(&closed_name, closed.address);
        node.delete(&open_name);
        let client = format!("client-{round}");
        let client = node.pod(&client, "many", &json!({"role": "ok"}));
        until_reaches("the next pod has its own policy", &client.netns, &closed, true);
        assert!((0..50).all(|_| !passes()), "which denies the flow");
        node.detach(closed);
        node.delete(&closed_name);
    }
}

/// The plugin connects a pod while the agent does not look, so its interface is open for a while, and a flow begins.
#[test]
fn a_flow_that_began_before_the_interface_was_closed_ends() {
    let Some(node) = Node::new() else { return };
    node.close();
    // The API still says that the pod before has the address, so nothing proves whose the next interface is.
    let open = node.pod("open", "one", &json!({"app": "open"}));
    let at = SocketAddr::from((open.address, PORT));
    until_reaches("the pod before is open", &node.outside, &open, true);
    node.detach(open);
    until("the agent knows that it has ended", || {
        !output_of(&node.host, "nft", &["list", "table", "inet", "tortie"]).contains(&at.ip().to_string())
    });
    node.signal_agent("STOP");
    node.create("closed", &json!({"app": "closed"}));
    let closed = node.attach("closed", "one");
    assert_eq!(closed.address, at.ip());
    let peer = node.outside.run(|| UdpSocket::bind((Ipv4Addr::new(172, 31, 0, 2), 0)).unwrap()).unwrap();
    let after = closed.netns.run(|| UdpSocket::bind(at).unwrap()).unwrap();
    peer.set_read_timeout(Some(BLOCKED)).unwrap();
    after.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let passes = || {
        peer.send_to(b"x", at).unwrap();
        let Ok((_, from)) = after.recv_from(&mut [0; 8]) else { return false };
        after.send_to(b"y", from).is_ok()
    };
    until("there is a flow in both directions", || passes() && peer.recv_from(&mut [0; 8]).is_ok());
    node.signal_agent("CONT");
    until("the flow ends", || (0..50).all(|_| !passes()));
}

/// Two Pods claim an address that a third one has, or that nobody has.
#[test]
fn false_addresses_in_the_api_open_nothing() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy denies", &client.netns, &server, false);
    for liar in ["liar-a", "liar-b"] {
        node.create(liar, &json!({"app": "open"}));
        node.report(liar, server.address);
    }
    for liar in ["liar-a", "liar-b"] {
        until("the liars are reported", || node.conditions(liar).contains("default/server"));
    }
    assert!(!reaches(&client.netns, &server));
    // The address of the node's own adapter, and of a machine behind it, to which a host route leads.
    ip(&node.host, "route add 172.31.0.2/32 dev eth0");
    for (liar, address) in [("liar-a", "172.31.0.1"), ("liar-b", "172.31.0.2")] {
        node.report(liar, address.parse().unwrap());
        until("they have no interface", || node.conditions(liar).contains("InterfaceMissing"));
    }
    assert!(reaches(&node.host, &client), "the adapter is not a pod's");
    until_reaches("traffic from outside passes", &node.outside, &client, true);
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("its own policy allows", &client.netns, &server, true);
}

#[test]
fn policy_stays_in_force_while_the_agent_is_killed_and_starts_again() {
    let Some(mut node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({"role": "ok"}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy allows", &client.netns, &server, true);
    until_reaches("policy denies", &node.outside, &server, false);
    let at = SocketAddr::from((server.address, PORT));
    let receiver = server.netns.run(|| UdpSocket::bind(at).unwrap()).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let (from_client, from_outside, ends) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let senders = [(&client.netns, b'c'), (&node.outside, b'o')].map(|(namespace, sign)| {
        let ends = ends.clone();
        // A new socket each time, so that no packet belongs to an established flow.
        let namespace =
            namespace.run(|| NetNs::open(std::path::Path::new("/proc/thread-self/ns/net"))).unwrap().unwrap();
        std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let send = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap().send_to(&[sign], at);
                let _ = namespace.run(send);
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    });
    let counts = {
        let (from_client, from_outside, ends) = (from_client.clone(), from_outside.clone(), ends.clone());
        std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let mut byte = [0];
                match receiver.recv_from(&mut byte) {
                    Ok(_) if byte == [b'c'] => drop(from_client.fetch_add(1, Ordering::SeqCst)),
                    Ok(_) => drop(from_outside.fetch_add(1, Ordering::SeqCst)),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
        })
    };
    for round in 2..5 {
        let before = from_client.load(Ordering::SeqCst);
        node.kill_agent();
        until("packets that policy allows", || from_client.load(Ordering::SeqCst) > before + 20);
        node.start_agent(&[]);
        let starts = || {
            let log = std::fs::read_to_string(node.path("agent.log")).unwrap();
            log.matches("another CNI plugin connects the pods").count()
        };
        until("the agent is ready", || starts() == round);
        let before = from_client.load(Ordering::SeqCst);
        until("packets that policy allows", || from_client.load(Ordering::SeqCst) > before + 20);
    }
    ends.store(true, Ordering::SeqCst);
    for thread in senders {
        thread.join().unwrap();
    }
    counts.join().unwrap();
    assert_eq!(from_outside.load(Ordering::SeqCst), 0, "policy denies all the time");
    // The agent still follows changes.
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("the label ends", &client.netns, &server, false);
}

/// An agent that cannot see whose the interfaces are keeps what the one before has put in force.
#[test]
fn an_agent_that_cannot_read_results_opens_nothing() {
    let Some(mut node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({"role": "ok"}));
    let server = node.pod("server", "many", &json!({"app": "closed"}));
    until_reaches("policy allows", &client.netns, &server, true);
    until_reaches("policy denies", &node.outside, &server, false);
    let content = |node: &Node| {
        let table = output_of(&node.host, "nft", &["list", "table", "inet", "tortie"]);
        // The first lines name the owner.
        table.split_once("map").unwrap().1.to_owned()
    };
    let before = content(&node);
    node.kill_agent();
    let results = node.path("cni/results");
    std::fs::rename(&results, node.path("kept")).unwrap();
    std::fs::write(&results, "no folder").unwrap();
    node.start_agent(&[]);
    until("the node is reported", || node.all_conditions().contains("CNI results of the container runtime"));
    assert!(node.all_conditions().contains("PolicyNotInForce"));
    assert!(!reaches(&node.outside, &server));
    assert!(reaches(&client.netns, &server));
    assert_eq!(content(&node), before);
    std::fs::remove_file(&results).unwrap();
    std::fs::rename(node.path("kept"), &results).unwrap();
    until("the report ends", || !node.all_conditions().contains("PolicyNotInForce"));
    node.api.kubectl(&["label", "pod", "client", "role-"]).unwrap();
    until_reaches("changes are in force again", &client.netns, &server, false);
}

/// Without a table of an earlier agent, nothing would be closed at all. A table that only holds is none.
#[test]
fn a_fresh_node_whose_results_cannot_be_read_is_closed() {
    let Some(mut node) = Node::new() else { return };
    let pod = node.pod("pod", "many", &json!({}));
    until_reaches("without policy, everything passes", &node.outside, &pod, true);
    node.kill_agent();
    output_of(&node.host, "nft", &["delete", "table", "inet", "tortie"]);
    let results = node.path("cni/results");
    std::fs::rename(&results, node.path("kept")).unwrap();
    std::fs::write(&results, "no folder").unwrap();
    node.start_agent(&[]);
    until("the pod is reported", || node.conditions("pod").contains("InterfaceUnproven"));
    assert!(node.all_conditions().contains("CNI results of the container runtime"));
    assert!(!reaches(&node.outside, &pod));
    std::fs::remove_file(&results).unwrap();
    std::fs::rename(node.path("kept"), &results).unwrap();
    until_reaches("the pod is known again", &node.outside, &pod, true);
    until("the report ends", || !node.all_conditions().contains("PolicyNotInForce"));
}

#[test]
fn a_pod_without_interface_is_reported_until_it_has_one() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    node.create("late", &json!({"app": "closed"}));
    node.report("late", Ipv4Addr::new(10, 22, 2, 7));
    until("the pod is reported", || {
        let conditions = node.conditions("late");
        conditions.contains("InterfaceMissing")
            && conditions.contains("no host route leads to its address 10.22.2.7")
    });
    let late = node.attach("late", "one");
    until("its condition ends", || node.conditions("late").is_empty());
    assert!(!reaches(&client.netns, &late), "policy is in force");
    node.api.kubectl(&["label", "pod", "client", "role=ok"]).unwrap();
    until_reaches("policy allows", &client.netns, &late, true);
    // A pod of a bridge has no policy, and the report says so.
    let bridged = node.pod("bridged", "bridged", &json!({"app": "closed"}));
    until("the pod of the bridge is reported", || {
        let conditions = node.conditions("bridged");
        conditions.contains("is a port of the bridge cni0") && conditions.contains(&bridged.link)
    });
    node.detach(bridged);
    node.delete("bridged");
    until("the report ends", || node.conditions("bridged").is_empty());
}

/// AWS VPC CNI, GKE's plugin and Azure CNI name the interface by a hash, and some runtimes keep no results.
#[test]
fn an_interface_with_the_hash_of_the_pod_is_recognised_and_others_are_closed() {
    let Some(node) = Node::new() else { return };
    node.close();
    let client = node.pod("client", "many", &json!({}));
    let cable = |link: &'static str, address: Ipv4Addr| {
        let netns = NetNs::create().unwrap();
        connect(&node.host, link, &netns, "eth0");
        ip(&netns, &format!("address add {address}/32 dev eth0"));
        ip(&netns, "route add 169.254.1.1 dev eth0");
        ip(&netns, "route add default via 169.254.1.1");
        node.host
            .run(|| std::fs::write(format!("/proc/sys/net/ipv4/conf/{link}/proxy_arp"), "1"))
            .unwrap()
            .unwrap();
        node.host
            .run(|| std::fs::write(format!("/proc/sys/net/ipv4/neigh/{link}/proxy_delay"), "0"))
            .unwrap()
            .unwrap();
        ip(&node.host, &format!("route add {address}/32 dev {link}"));
        Sandbox {
            netns,
            path: String::new(),
            network: "",
            arguments: String::new(),
            address,
            link: link.to_owned(),
        }
    };
    // printf default.hashed | sha1sum
    let hashed = cable(HASHED, Ipv4Addr::new(10, 22, 4, 1));
    assert!(!reaches(&client.netns, &hashed), "an interface with the prefix is closed from the beginning");
    node.create("hashed", &json!({"app": "open"}));
    node.report("hashed", hashed.address);
    until_reaches("the pod is recognised", &client.netns, &hashed, true);
    node.api.kubectl(&["label", "pod", "hashed", "app=closed", "--overwrite"]).unwrap();
    until_reaches("its policy denies", &client.netns, &hashed, false);
    // The interface of another pod, or of none.
    let other = cable("eni0123456789a", Ipv4Addr::new(10, 22, 4, 2));
    let unknown = cable("veth7", Ipv4Addr::new(10, 22, 4, 3));
    for (pod, sandbox, part) in [
        ("other", &other, "leads to eni0123456789a, which belongs to another pod"),
        ("unknown", &unknown, "leads to veth7, but nothing proves that it is this pod's"),
    ] {
        node.create(pod, &json!({"app": "open"}));
        node.report(pod, sandbox.address);
        until("the pod is reported", || {
            let conditions = node.conditions(pod);
            conditions.contains("InterfaceUnproven") && conditions.contains(part)
        });
        assert!(!reaches(&client.netns, sandbox), "{pod}");
    }
}

/// `eni` and the first digits of `printf default.hashed | sha1sum`.
const HASHED: &str = "eni3e865294672";

#[test]
fn what_has_no_meaning_with_another_plugin_is_refused() {
    let Some(mut node) = Node::new() else { return };
    node.kill_agent();
    let other = crate::node::Node::new(&json!([]));
    let with_store = other.path("store.sock");
    let folder = format!("--cni-conf-dir={}", node.path("net.d"));
    for (arguments, parts) in [
        (vec!["--bgp"], vec!["--policy-only", "--bgp"]),
        (vec!["--direct-routes"], vec!["--policy-only", "--direct-routes"]),
        (vec!["--flannel"], vec!["--policy-only", "--flannel"]),
        (vec!["--default-pool", "10.0.0.0/16"], vec!["--policy-only", "--default-pool"]),
        (vec!["--default-pool-v6", "fd00::/48"], vec!["--policy-only", "--default-pool-v6"]),
        (vec![folder.as_str()], vec!["--policy-only", "--cni-conf-dir"]),
        (
            vec![r#"--cni-plugins=[{"type":"bandwidth","capabilities":{"bandwidth":true}}]"#],
            vec!["--policy-only", "--cni-plugins"],
        ),
        (vec![r#"--cni-ipam={"type":"host-local"}"#], vec!["--policy-only", "--cni-ipam"]),
        (vec!["--ip-autodetection-method=first-found"], vec!["--policy-only", "--ip-autodetection-method"]),
        (vec!["--pod-interface-prefix=a/b"], vec!["\"a/b\"", "--pod-interface-prefix"]),
        (vec!["--pod-interface-prefix=eni,"], vec!["\"\"", "--pod-interface-prefix"]),
    ] {
        refused(&node, node.agent_command(&arguments), &parts);
    }
    // Only the Kubernetes API has pods with addresses that others have given them.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args([
        "agent",
        "--node",
        "one",
        "--policy-only",
        "--store",
        &format!("unix:{}", with_store.display()),
    ]);
    for (flag, file) in [
        ("--cni-socket", "second.sock"),
        ("--deletion-queue", "second/queue"),
        ("--saved-state", "second/saved-state.json"),
    ] {
        command.args([flag, &node.path(file)]);
    }
    refused(&node, command, &["--policy-only", "--store kubernetes:"]);
}

fn refused(node: &Node, mut command: Command, parts: &[&str]) {
    let output = node.host.run(|| command.output().unwrap()).unwrap();
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?}: {text}");
}
