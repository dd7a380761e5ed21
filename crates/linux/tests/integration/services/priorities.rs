//! Marks and priorities of other programs.

use std::process::Command;

use tortie_api::net::Protocol;
use tortie_services::*;

use super::node::{Begin, Fate, Node};
use super::setting::{USUAL, add_port, at, everything, frontend, open, pods, port};

pub(super) fn nft(node: &Node, text: &str) {
    let mut command = Command::new("nft");
    let output = node.namespace.enter_on_spawn(command.arg(text)).unwrap().output();
    let output = output.expect("this test needs the program nft: apt-get install nftables");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn to(address: &str, port: u16) -> Begin {
    Begin {
        sender: Sender::Pod,
        source: "10.0.0.3".parse().unwrap(),
        destination: address.parse().unwrap(),
        protocol: Protocol::UDP,
        port,
    }
}

#[test]
fn what_others_write_on_packets_is_not_taken_for_a_class() {
    let mut node = Node::new();
    let mut table = node.namespace.run(|| open(USUAL)).unwrap();
    let mut services = NodeServices::default();
    let (full, empty) = (port("full", Protocol::UDP), port("empty", Protocol::UDP));
    add_port(&mut services, &full, &["10.0.0.4"]);
    add_port(&mut services, &empty, &[]);
    for (id, address) in [(&full, "10.96.0.1"), (&empty, "10.96.0.2")] {
        let key = at(address, Protocol::UDP, 53);
        services.frontends.insert(key, frontend(id, FrontendKind::ClusterIp, TrafficPolicy::Cluster));
        services.cluster_ips.insert(address.parse().unwrap());
    }
    let key = FrontendKey {
        address: FrontendAddress::NodePort(tortie_api::net::IpVersion::V4),
        protocol: Protocol::UDP,
        port: 30_053,
    };
    services.frontends.insert(key, frontend(&full, FrontendKind::NodePort, TrafficPolicy::Cluster));
    // Its backend is elsewhere, so only pods and the node reach it.
    let local = frontend(&full, FrontendKind::NodePort, TrafficPolicy::Local);
    services.frontends.insert(FrontendKey { port: 30_054, ..key }, local);
    services.node_ports.insert(tortie_api::net::IpVersion::V4, NodePortPlace::AllLocal);
    node.namespace.run(|| table.apply(&everything(&services), &pods())).unwrap().unwrap();
    // 1:1 is the class of IPv4 frontends with one backend, 3:1 that of node ports.
    for class in ["1:1", "3:1"] {
        nft(&node, "add table inet others; delete table inet others");
        nft(
            &node,
            &format!(
                "table inet others {{
                    chain before {{ type filter hook prerouting priority -150; meta mark set 0x5eed0001; meta priority set \"{class}\"; }}
                    chain between {{ type filter hook prerouting priority 10;
                        ip daddr 203.0.113.99 meta priority != \"{class}\" drop
                        ip daddr 10.0.0.4 meta priority != none drop
                    }}
                    chain after {{ type filter hook postrouting priority 90;
                        ip daddr {{ 10.0.0.4, 203.0.113.99 }} meta mark != 0x5eed0001 drop
                    }}
                }}"
            ),
        );
        let source = "203.0.113.5".parse().unwrap();
        let begins = [
            to("10.96.0.1", 53),
            to("10.96.0.2", 53),
            to("203.0.113.99", 53),
            to("192.0.2.1", 30_053),
            Begin { sender: Sender::Other, source, ..to("192.0.2.1", 30_054) },
        ];
        let fates = node.fates(&begins);
        let arrived = |number: usize, at: &str| {
            let to: std::net::IpAddr = at.parse().unwrap();
            assert!(
                matches!(fates[number], Some(Fate::Arrived { destination, .. }) if destination == to),
                "{class}: {fates:?}"
            );
        };
        arrived(0, "10.0.0.4");
        assert_eq!(fates[1], Some(Fate::Refused), "{class}: {fates:?}");
        arrived(2, "203.0.113.99");
        arrived(3, "10.0.0.4");
        assert_eq!(fates[4], None, "{class}: {fates:?}");
    }
}
