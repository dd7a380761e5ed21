//! Backends and other programs at the addresses and ports of Services.

use std::collections::BTreeSet;

use tortie_api::net::{IpVersion, Protocol};
use tortie_services::*;

use super::node::{Begin, Fate, Node};
use super::priorities::nft;
use super::setting::{USUAL, add_port, at, everything, frontend, open, pods, port};

const NODE: &str = "192.0.2.1";

fn from_outside(destination: &str, port: u16) -> Begin {
    Begin {
        sender: Sender::Other,
        source: "203.0.113.5".parse().unwrap(),
        destination: destination.parse().unwrap(),
        protocol: Protocol::UDP,
        port,
    }
}

/// A pod on the node's network may listen at the node's address that is also an external address of its Service.
#[test]
fn a_backend_may_have_the_address_and_port_of_its_frontend() {
    let mut node = Node::new();
    let mut table = node.namespace.run(|| open(USUAL)).unwrap();
    let mut services = NodeServices::default();
    for (name, address, is_local) in [("own", NODE, true), ("other", "203.0.113.99", false)] {
        let id = port(name, Protocol::UDP);
        let backend = Backend { address: address.parse().unwrap(), port: 8080, is_local };
        let cluster = BTreeSet::from([backend]);
        let local = cluster.iter().filter(|backend| backend.is_local).copied().collect();
        services.ports.insert(
            id.clone(),
            ServicePort { has_endpoints: true, cluster, local, ..ServicePort::default() },
        );
        let external = frontend(&id, FrontendKind::ExternalIp, TrafficPolicy::Cluster);
        services.frontends.insert(at(address, Protocol::UDP, 8080), external);
        if is_local {
            let key = FrontendKey {
                address: FrontendAddress::NodePort(IpVersion::V4),
                protocol: Protocol::UDP,
                port: 8081,
            };
            services.frontends.insert(key, frontend(&id, FrontendKind::NodePort, TrafficPolicy::Local));
        }
    }
    services.node_ports.insert(IpVersion::V4, NodePortPlace::AllLocal);
    node.namespace.run(|| table.apply(&everything(&services), &pods())).unwrap().unwrap();
    let fates =
        node.fates(&[from_outside(NODE, 8080), from_outside(NODE, 8081), from_outside("203.0.113.99", 8080)]);
    // Nobody listens, which the node says: nothing was dropped before.
    assert_eq!(fates[..2], [Some(Fate::Refused); 2], "{fates:?}");
    let destination: std::net::IpAddr = "203.0.113.99".parse().unwrap();
    assert!(
        matches!(fates[2], Some(Fate::Arrived { destination: to, port: 8080, .. }) if to == destination),
        "{fates:?}"
    );
}

/// As Docker and ports of pods at the node's address do it.
#[test]
fn other_programs_translate_nothing_that_a_service_takes() {
    let mut node = Node::new();
    let mut table = node.namespace.run(|| open(USUAL)).unwrap();
    let mut services = NodeServices::default();
    let (elsewhere, empty) = (port("elsewhere", Protocol::UDP), port("empty", Protocol::UDP));
    add_port(&mut services, &elsewhere, &["10.0.0.4"]);
    add_port(&mut services, &empty, &[]);
    for (number, id, policy) in
        [(30_000, &elsewhere, TrafficPolicy::Local), (30_001, &empty, TrafficPolicy::Cluster)]
    {
        let address = FrontendAddress::NodePort(IpVersion::V4);
        let key = FrontendKey { address, protocol: Protocol::UDP, port: number };
        services.frontends.insert(key, frontend(id, FrontendKind::NodePort, policy));
        let external = frontend(id, FrontendKind::ExternalIp, policy);
        services.frontends.insert(at("203.0.113.98", Protocol::UDP, number), external);
    }
    services.node_ports.insert(IpVersion::V4, NodePortPlace::AllLocal);
    node.namespace.run(|| table.apply(&everything(&services), &pods())).unwrap().unwrap();
    nft(
        &node,
        "table inet others {
            chain translate { type nat hook prerouting priority -99;
            ip daddr { 192.0.2.1, 203.0.113.98 } udp dport 30000-30002 dnat ip to 10.0.0.5:53
            }
        }",
    );
    for address in [NODE, "203.0.113.98"] {
        let fates = node.fates(&[30_000, 30_001, 30_002].map(|port| from_outside(address, port)));
        assert_eq!(fates[..2], [None, Some(Fate::Refused)], "{address}: {fates:?}");
        let to: std::net::IpAddr = "10.0.0.5".parse().unwrap();
        assert!(
            matches!(fates[2], Some(Fate::Arrived { destination, port: 53, .. }) if destination == to),
            "{address}: {fates:?}"
        );
    }
}
