//! Nodes and routes come, go and change one after another: the kernel has the same entries as after a look at everything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use proptest::prelude::*;
use testkit::Stateful;
use testkit::random::Random;
use tortie_api::net::IpVersion;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Key, Nft};
use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_kernel::sysctl;
use tortie_kernel::tun::Tun;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::EndpointProgram;

const VERSIONS: [IpVersion; 2] = IpVersion::ALL;

/// An address of a network that numbers choose: nodes and pods often want the same.
fn address(version: IpVersion, net: u8, number: u8) -> IpAddr {
    match version {
        IpVersion::V4 => Ipv4Addr::new(10, 77, net, number).into(),
        IpVersion::V6 => Ipv6Addr::new(0xfd77, 0, 0, net.into(), 0, 0, 0, number.into()).into(),
    }
}

fn vtep(node: u8, version: IpVersion, [tunnel, mac, parent]: [u8; 3]) -> Vtep {
    Vtep {
        node: format!("node-{node}"),
        address: address(version, 0, tunnel),
        mac: MacAddress([0x66, 0, 0, 0, 0, mac]),
        parent: address(version, 9, 100 + parent),
        mtu: None,
    }
}

/// A destination: a block, or one address, which a node's tunnel end or a pod may have, too.
fn destination(version: IpVersion, number: u8, is_block: bool) -> IpNet {
    let longest = if version == IpVersion::V4 { 32 } else { 128 };
    match is_block {
        true => IpNet::new(address(version, 1 + number, 0), longest - 6).unwrap(),
        false => IpNet::from(address(version, 0, number)),
    }
}

fn change() -> impl Strategy<Value = Delta> {
    let version = || prop_oneof![3 => Just(VERSIONS[0]), 1 => Just(VERSIONS[1])];
    // Mostly different for each node.
    let parts = |node: u8| {
        let one = move || prop_oneof![4 => Just(node), 1 => 1..6_u8];
        (Just(node), [one(), one(), one()])
    };
    let target = prop_oneof![
        4 => (1..6_u8).prop_map(|node| RouteTarget::Vxlan { node: format!("node-{node}") }),
        1 => Just(RouteTarget::Local),
        1 => Just(RouteTarget::Direct { router: address(VERSIONS[0], 9, 101) }),
        2 => (1..4_u8).prop_map(|node| RouteTarget::Ipip { router: Ipv4Addr::new(10, 77, 9, 100 + node) }),
    ];
    let destinations =
        || (version(), 0..6_u8, any::<bool>()).prop_map(|(v, n, block)| destination(v, n, block));
    prop_oneof![
        4 => (version(), (1..6_u8).prop_flat_map(parts)).prop_map(|(v, (node, parts))| Delta::Vtep(vtep(node, v, parts))),
        1 => (version(), 1..6_u8).prop_map(|(v, node)| Delta::VtepRemoved(format!("node-{node}"), v)),
        4 => (destinations(), target).prop_map(|(destination, target)| {
            let target = match target {
                RouteTarget::Direct { .. } | RouteTarget::Ipip { .. } if destination.addr().is_ipv6() => RouteTarget::Local,
                target => target,
            };
            Delta::Route(Route { destination, target })
        }),
        1 => destinations().prop_map(Delta::RouteRemoved),
    ]
}

/// The node with its addresses, and a pod.
fn first() -> Vec<Delta> {
    let mut routes = RouteSocket::open().unwrap();
    routes.create(&NewLink { up: true, ..NewLink::new("eth0", NewLinkKind::Bridge) }).unwrap();
    let peer = Peer { name: "pod", mac: None, mtu: None, namespace: None };
    routes.create(&NewLink { up: true, ..NewLink::new("cali0", NewLinkKind::Veth(peer)) }).unwrap();
    sysctl::ensure("net/ipv6/conf/all/disable_ipv6", "0").unwrap();
    let link = interface_index("eth0").unwrap();
    let mut node = LocalNode::ipv4("node-0", Ipv4Addr::new(10, 77, 9, 100), None);
    node.ipip = Some(LocalIpip { address: Some(Ipv4Addr::new(10, 77, 0, 201)) });
    for (version, prefix_length) in [(VERSIONS[0], 24), (VERSIONS[1], 64)] {
        let own = address(version, 9, 100);
        routes.change(&Change::AddAddress(Address { link, address: own, prefix_length })).unwrap();
        let vtep = Some(vtep(0, version, [200, 200, 0]));
        node.ends.insert(version, LocalEnd { address: own, vtep });
    }
    let endpoint = Endpoint {
        container_id: "c".into(),
        host_interface: "cali0".into(),
        addresses: vec![address(VERSIONS[0], 0, 3)],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(EndpointProgram::default()),
    };
    let id = EndpointId { namespace: "n".into(), pod: "p".into(), interface: "eth0".into() };
    vec![Delta::Node(node), Delta::Endpoint(id, Arc::new(endpoint))]
}

/// Everything that peers lead to in the kernel.
fn entries() -> (Vec<String>, Vec<Key>) {
    let mut socket = RouteSocket::open().unwrap();
    let routes = socket.routes().unwrap().into_iter().filter(|route| route.protocol == 84);
    let mut found: Vec<String> = routes.map(|route| route.to_string()).collect();
    found.extend(socket.neighbours().unwrap().into_iter().map(|it| format!("{it:?}")));
    for link in ["vxlan.calico", "vxlan-v6.calico"] {
        if let Ok(link) = interface_index(link) {
            found.extend(socket.fdb(link).unwrap().into_iter().map(|it| format!("{it:?}")));
        }
    }
    found.sort();
    let table = Nft::open().unwrap().list("tortie").unwrap().unwrap();
    let peers =
        ["vxlan-peers", "vxlan-peers6", "ipip-peers"].map(|name| table.sets[name].elements.keys().cloned());
    (found, peers.into_iter().flatten().collect())
}

#[test]
fn single_changes_of_peers_lead_to_what_a_look_at_everything_leads_to() {
    // Several single changes may come before the next look at everything.
    let batch = (prop::collection::vec(change(), 1..4), prop::bool::weighted(0.4));
    let changes = prop::collection::vec(batch, 1..25);
    let test = |mut changes: Vec<(Vec<Delta>, bool)>| {
        if let Some((_, looks)) = changes.last_mut() {
            *looks = true;
        }
        let run = move || {
            let config = Config { guard_table: false, ..Config::default() };
            let mut dataplane = Stateful::new(Dataplane::open(config).unwrap());
            // In place of that of the kernel.
            let _ipip = Tun::create_ipv4_tunnel("tunl0").unwrap();
            dataplane.apply(&first());
            for (deltas, looks) in changes {
                let report = dataplane.apply(&deltas);
                if !looks {
                    continue;
                }
                let found = entries();
                let again = dataplane.resync();
                prop_assert_eq!(&found, &entries(), "after {:?}", deltas);
                prop_assert_eq!(report, again, "after {:?}", deltas);
            }
            Ok(())
        };
        NetNs::create().unwrap().run(run).unwrap()
    };
    Random::cases(40).shrinking(200).run(&changes, test).unwrap();
}

/// The kernel takes several entries for packets to unknown addresses. All that somebody else adds are deleted at once.
#[test]
fn foreign_entries_for_unknown_addresses_are_deleted() {
    let run = || {
        let config = Config { guard_table: false, ..Config::default() };
        let mut dataplane = Stateful::new(Dataplane::open(config).unwrap());
        dataplane.apply(&first());
        dataplane.apply(&[Delta::Vtep(vtep(1, VERSIONS[0], [1, 1, 1]))]);
        let expected = entries();
        for number in 150..153 {
            let to = format!("10.77.9.{number}");
            let arguments = ["fdb", "append", "00:00:00:00:00:00", "dev", "vxlan.calico", "dst", &to];
            let output = std::process::Command::new("bridge").args(arguments).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        assert_ne!(entries(), expected);
        dataplane.resync();
        assert_eq!(entries(), expected);
    };
    NetNs::create().unwrap().run(run).unwrap();
}
