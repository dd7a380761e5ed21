//! Real frames: two emulated Windows nodes and a Linux node with a kernel's VXLAN, on one underlay.

use std::time::Duration;

use crate::cluster::{Cluster, Connection, Location, acl_block_in, connects, is_cut_off, transfer};
use serde_json::json;
use tortie_hcn::schema::{Modify, Policy, RequestType};
use tortie_hcn::{Hcn, HcnExt};
use tortie_hns_emulator::OnRewrite;

/// Enough for many super-segments and for a large window.
const MANY: usize = 8 << 20;

#[test]
fn tcp_streams_pass_complete_in_both_directions() {
    let cluster = Cluster::new();
    let places = [
        cluster.windows[0].pod(0),
        cluster.windows[0].pod(1),
        cluster.windows[1].pod(0),
        cluster.windows[0].node(),
        cluster.linux(),
    ];
    for from in &places {
        for to in &places {
            if from.address != to.address {
                // Both directions of each connection transfer it.
                transfer(from, to, MANY / 4);
            }
        }
    }
    transfer(&cluster.windows[0].pod(0), &cluster.linux(), MANY);
    transfer(&cluster.linux(), &cluster.windows[0].pod(0), MANY);
}

/// Established flows continue when a policy changes (policy decision 20).
#[test]
fn acls_deny_and_allow_and_established_flows_continue() {
    let cluster = Cluster::new();
    let node = &cluster.windows[0];
    let (pod, neighbour, linux) = (node.pod(0), node.pod(1), cluster.linux());
    let kept = Connection::open(&linux, &pod);
    let blocked = vec![Policy::of(&acl_block_in(1000, &linux.address.to_string()))];
    node.hns.modify_endpoint(pod.endpoint, &Modify::policies(RequestType::Add, blocked.clone())).unwrap();
    assert!(is_cut_off(&linux, &pod), "blocked");
    assert!(is_cut_off(&neighbour, &pod), "a lone block closes the rest");
    assert!(is_cut_off(&node.node(), &pod), "the node too");
    kept.exchange();
    node.hns.modify_endpoint(pod.endpoint, &Modify::policies(RequestType::Remove, blocked)).unwrap();
    for from in [&linux, &neighbour, &node.node()] {
        assert!(connects(from, &pod));
    }
}

/// Writing an endpoint's ACLs resets its connections with any peer; connections of other endpoints continue.
#[test]
fn a_write_of_acls_resets_connections_at_both_ends() {
    use RequestType::{Add, Remove, Update};
    let cases = [
        (OnRewrite::Keep, [(Add, false), (Update, false), (Remove, false)]),
        (OnRewrite::ResetOnAnyChange, [(Add, true), (Update, true), (Remove, true)]),
        (OnRewrite::ResetOnRemoveOrUpdate, [(Add, false), (Update, true), (Remove, true)]),
    ];
    for (on_rewrite, requests) in cases {
        let cluster = Cluster::with(on_rewrite);
        let node = &cluster.windows[0];
        let (pod, neighbour, far, linux) =
            (node.pod(0), node.pod(1), cluster.windows[1].pod(0), cluster.linux());
        let others = [Connection::open(&linux, &neighbour), Connection::open(&far, &linux)];
        for (request, breaks) in requests {
            let of_pod = [(&linux, &pod), (&pod, &neighbour), (&pod, &far)];
            let of_pod = of_pod.map(|(from, to)| Connection::open(from, to));
            of_pod.iter().for_each(Connection::exchange);
            let acls = ["In", "Out"].map(allow).to_vec();
            node.hns.modify_endpoint(pod.endpoint, &Modify::policies(request.clone(), acls)).unwrap();
            for connection in &of_pod {
                if breaks {
                    assert!(connection.is_reset(), "{on_rewrite:?} {request}");
                } else {
                    connection.exchange();
                }
            }
            others.iter().for_each(Connection::exchange);
        }
    }
}

/// An ACL that allows everything in a direction.
fn allow(direction: &str) -> Policy {
    let settings = json!({"Action": "Allow", "Direction": direction, "RuleType": "Switch", "Priority": 100});
    Policy { r#type: "ACL".into(), settings, extra: Default::default() }
}

#[test]
fn udp_and_large_datagrams() {
    let cluster = Cluster::new();
    let pairs = [
        (cluster.windows[0].pod(0), cluster.linux()),
        (cluster.linux(), cluster.windows[0].pod(0)),
        (cluster.windows[0].pod(0), cluster.windows[1].pod(0)),
    ];
    for (from, to) in pairs {
        // The second one needs fragments.
        for size in [600, 5000] {
            let server = to.run(|| std::net::UdpSocket::bind((to.address, 7000)).unwrap());
            let client = from.run(|| std::net::UdpSocket::bind((from.address, 0)).unwrap());
            server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let sent: Vec<u8> = (0..size).map(|i| i as u8).collect();
            client.send_to(&sent, (to.address, 7000)).unwrap();
            let mut buffer = vec![0; 1 << 16];
            let (length, sender) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(buffer[..length], sent);
            assert_eq!(sender.ip(), from.address, "the source address stays");
            server.send_to(&sent, sender).unwrap();
            assert_eq!(client.recv(&mut buffer).unwrap(), size);
        }
    }
}

#[test]
fn interfaces_exist_as_long_as_their_endpoints() {
    let cluster = Cluster::new();
    let node = &cluster.windows[0];
    let pod = node.pod(0);
    let has_interface =
        |place: &Location, name: &str| place.run(|| tortie_kernel::interface_index(name).is_ok());
    assert!(has_interface(&pod, "eth0"));
    let namespace = node.hns.endpoint(pod.endpoint).unwrap().host_compute_namespace;
    let detach = Modify::namespace_endpoint(RequestType::Remove, pod.endpoint);
    node.hns.modify_namespace(namespace, &detach).unwrap();
    assert!(!has_interface(&pod, "eth0"));
    assert!(is_cut_off(&node.pod(1), &pod));
    let attach = Modify::namespace_endpoint(RequestType::Add, pod.endpoint);
    node.hns.modify_namespace(namespace, &attach).unwrap();
    assert!(connects(&node.pod(1), &pod));
    node.hns.delete_endpoint(pod.endpoint).unwrap();
    assert!(!has_interface(&pod, "eth0"));

    let other = node.pod(1);
    node.hns.delete_endpoint(other.endpoint).unwrap();
    let leg = crate::cluster::node_leg(&node.node());
    assert!(leg.is_some());
    node.hns.delete_network(node.network).unwrap();
    assert_eq!(crate::cluster::node_leg(&node.node()), None);
}

#[test]
fn a_failed_attach_leaves_nothing() {
    let cluster = Cluster::new();
    let node = &cluster.windows[0];
    let pod = node.pod(0);
    let namespace = node.hns.endpoint(pod.endpoint).unwrap().host_compute_namespace;
    let detach = Modify::namespace_endpoint(RequestType::Remove, pod.endpoint);
    node.hns.modify_namespace(namespace, &detach).unwrap();
    // A foreign `eth0` is in the way.
    pod.run(|| crate::cluster::make_dummy_pair("eth0"));
    let attach = Modify::namespace_endpoint(RequestType::Add, pod.endpoint);
    let error = node.hns.modify_namespace(namespace, &attach).unwrap_err();
    assert!(error.to_string().contains("HCN_E_NAMESPACE_ATTACH_FAILED"), "{error}");
    assert!(node.hns.endpoint(pod.endpoint).unwrap().host_compute_namespace.is_zero());
    transfer(&node.pod(1), &cluster.windows[1].pod(0), 100_000);
}

/// The counters of an endpoint: its own packets both ways, and what its ACLs drop.
#[test]
fn endpoints_count_their_packets() {
    let cluster = Cluster::new();
    let node = &cluster.windows[0];
    let (pod, neighbour) = (node.pod(0), node.pod(1));
    let stats = |endpoint| -> serde_json::Value {
        let settings = json!({ "Id": endpoint }).to_string();
        let call = tortie_hcn::Call::Emulator { name: "endpoint-stats".to_owned(), settings };
        serde_json::from_str(&node.hns.call(&call).unwrap()).unwrap()
    };
    let counted = |endpoint, name: &str| stats(endpoint)[name].as_u64().unwrap();
    let block = vec![Policy::of(&acl_block_in(1000, &pod.address.to_string()))];
    let send = |count: u64| {
        let client = pod.run(|| std::net::UdpSocket::bind((pod.address, 0)).unwrap());
        (0..count).for_each(|_| {
            client.send_to(&[7; 100], (neighbour.address, 7001)).unwrap();
        });
    };
    let wait = |endpoint, name: &str, value: u64| {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while counted(endpoint, name) != value {
            assert!(std::time::Instant::now() < end, "{name} is not {value}: {}", stats(endpoint));
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let server = neighbour.run(|| std::net::UdpSocket::bind((neighbour.address, 7001)).unwrap());
    let before = (counted(pod.endpoint, "PacketsSent"), counted(neighbour.endpoint, "PacketsReceived"));
    let bytes = (counted(pod.endpoint, "BytesSent"), counted(neighbour.endpoint, "BytesReceived"));
    send(3);
    wait(pod.endpoint, "PacketsSent", before.0 + 3);
    wait(neighbour.endpoint, "PacketsReceived", before.1 + 3);
    // The headers of Ethernet, IPv4 and UDP count.
    let length = 3 * (14 + 20 + 8 + 100);
    assert_eq!(counted(pod.endpoint, "BytesSent"), bytes.0 + length);
    assert_eq!(counted(neighbour.endpoint, "BytesReceived"), bytes.1 + length);
    drop(server);
    node.hns.modify_endpoint(neighbour.endpoint, &Modify::policies(RequestType::Add, block)).unwrap();
    let dropped = counted(neighbour.endpoint, "DroppedPacketsIncoming");
    send(2);
    wait(neighbour.endpoint, "DroppedPacketsIncoming", dropped + 2);
    assert_eq!(counted(neighbour.endpoint, "PacketsReceived"), before.1 + 3);
    assert_eq!(counted(pod.endpoint, "DroppedPacketsOutgoing"), 0);
}
