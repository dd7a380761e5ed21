//! The subnets of the overlay network, one for each of the node's blocks.

use std::net::Ipv4Addr;

use crate::dataplane::network::{local, route, routes, subnets, vtep};
use crate::dataplane::node::*;
use serde_json::json;
use tortie_dataplane::{Delta, Reason};
use tortie_hcn::schema::{self, IpConfig};
use tortie_hcn::{Call, Failure, HResult, HcnExt};
use tortie_windows::{NETWORK, NetworkSpec, ensure_network_with};

/// The first subnet, which has the node's end of the tunnel, stays, whichever block has the lowest address.
#[test]
fn each_block_has_a_subnet() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block()]);
    let id = node.hns.network_by_name(NETWORK).unwrap().unwrap().id;
    node.hns.take();
    for block in ["10.244.2.0/26", "10.244.9.0/26"] {
        assert_eq!(node.apply(&[local(block)]), Default::default());
    }
    let changes = node.hns.take_changes();
    assert_eq!(changes.len(), 2, "{changes:?}");
    let Call::Modify { settings, .. } = &changes[0] else { panic!("{changes:?}") };
    let expected = json!({"ResourceType": "Subnet", "RequestType": "Add", "Settings": {"Subnets": [{
        "IpAddressPrefix": "10.244.2.0/26",
        "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 4096}}],
        "Routes": [{"NextHop": "10.244.2.1", "DestinationPrefix": "0.0.0.0/0"}]}]}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(settings).unwrap(), expected);
    assert_eq!(subnets(&node), ["10.244.3.0/26", "10.244.2.0/26", "10.244.9.0/26"]);
    // The agent starts again, or HNS has lost the network.
    let blocks = ["10.244.3.0/26", "10.244.9.0/26"].map(|block| block.parse().unwrap());
    let low = NetworkSpec { block: "10.244.2.0/26".parse().unwrap(), ..spec() };
    let overlay = ensure_network_with(&*node.hns, &low, &blocks).unwrap();
    assert_eq!((overlay.id, overlay.gateway), (id, TUNNEL));
    assert_eq!(node.hns.take_changes(), []);
    node.hns.delete_network(id).unwrap();
    let overlay = ensure_network_with(&*node.hns, &low, &blocks).unwrap();
    assert_eq!(overlay.gateway, Ipv4Addr::new(10, 244, 2, 1));
    assert_eq!(subnets(&node).len(), 3);
}

/// Its subnet would take the packets to the other node.
#[test]
fn the_subnet_of_a_block_that_another_node_has_goes() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), local("10.244.4.0/26"), vtep("primary", 1)]);
    assert_eq!(subnets(&node).len(), 2);
    assert_eq!(node.apply(&[route("10.244.4.0/26", "primary")]), Default::default());
    assert_eq!((subnets(&node), routes(&node).len()), (vec!["10.244.3.0/26".to_owned()], 1));
}

/// An endpoint that nobody removed has an address of a block that another node has now.
#[test]
fn a_subnet_that_stays_costs_its_own_route_only() {
    let mut node = Node::usual();
    let blocks = [local("10.244.4.0/26"), local("10.244.5.0/26"), local("10.244.6.0/26")];
    node.apply(&[local_node(), own_block(), vtep("primary", 1)]);
    node.apply(&blocks);
    let network = node.hns.network_by_name(NETWORK).unwrap().unwrap().id;
    let leaked = IpConfig { ip_address: "10.244.4.9".to_owned(), ..Default::default() };
    let leaked = schema::Endpoint {
        host_compute_network: network,
        ip_configurations: vec![leaked],
        ..Default::default()
    };
    let leaked = node.hns.create_endpoint(&leaked).unwrap();
    // The other node has blocks of another size.
    node.apply(&[Delta::RouteRemoved("10.244.5.0/26".parse().unwrap())]);
    let moved = [route("10.244.4.0/26", "primary"), route("10.244.5.0/27", "primary")];
    let report = node.apply(&[&moved[..], &[route("10.244.9.0/26", "primary")]].concat());
    let [stays] = &report.node[..] else { panic!("{report:?}") };
    assert_eq!(stays.reason, Reason::RouteRefused);
    assert!(stays.message.contains("keeps its subnet 10.244.4.0/26"), "{}", stays.message);
    assert!(!stays.reason.is_failure() && report.retry, "{report:?}");
    assert_eq!(subnets(&node), ["10.244.3.0/26", "10.244.4.0/26", "10.244.6.0/26"]);
    let prefixes = || routes(&node).into_iter().map(|(prefix, ..)| prefix).collect::<Vec<_>>();
    assert_eq!(prefixes(), ["10.244.5.0/27", "10.244.9.0/26"]);
    // A node that gets another MAC address is followed meanwhile.
    node.apply(&[vtep("primary", 7)]);
    assert_eq!(routes(&node)[1].1, "172.16.0.7");
    node.hns.delete_endpoint(leaked).unwrap();
    node.wait(60);
    assert_eq!(node.apply(&[]), Default::default());
    assert_eq!(routes(&node).len(), 3);
    assert_eq!(subnets(&node), ["10.244.3.0/26", "10.244.6.0/26"]);
}

#[test]
fn a_refused_subnet_is_reported_until_it_is_there() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block()]);
    node.hns.set_fault(|call| {
        let bad = matches!(call, Call::Modify { settings, .. } if settings.contains("10.244.4.0/26"));
        bad.then(|| Err(Failure::new(HResult::HCN_E_INVALID_SUBNET, "not this one")))
    });
    let report = node.apply(&[local("10.244.4.0/26")]);
    assert_eq!(report.node[0].reason, Reason::MoreThanOneBlock);
    assert!(report.node[0].message.contains("not this one"), "{report:?}");
    node.hns.clear_fault();
    node.wait(11);
    assert_eq!(node.dataplane.resync(), Default::default());
    assert_eq!(subnets(&node).len(), 2);
}
