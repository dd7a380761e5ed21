//! Links, addresses, routes, neighbours: what is written to the real kernel is what is listed.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;

use tortie_api::net::MacAddress;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::netlink::{Family, Socket};
use tortie_kernel::route::*;

const MAC: MacAddress = MacAddress([0x66, 1, 2, 3, 4, 5]);

/// Runs a test in its own namespace.
fn in_namespace(test: impl FnOnce(&mut RouteSocket) + Send) {
    NetNs::create().unwrap().run(|| test(&mut RouteSocket::open().unwrap())).unwrap();
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A VXLAN link that is up, and its index.
fn vxlan(socket: &mut RouteSocket) -> u32 {
    let settings = Vxlan { vni: 4096, port: 4789, local: Some(Ipv4Addr::LOCALHOST.into()), learning: false };
    let kind = NewLinkKind::Vxlan(settings);
    let link = NewLink { mac: Some(MAC), mtu: Some(1450), up: true, ..NewLink::new("vxlan.calico", kind) };
    socket.create(&link).unwrap();
    let link = socket.link("vxlan.calico").unwrap().unwrap();
    assert_eq!(link.vxlan, Some(settings));
    assert_eq!((link.kind.as_str(), link.mac, link.mtu, link.up), ("vxlan", Some(MAC), 1450, true));
    link.index
}

#[test]
fn a_veth_pair_connects_two_namespaces() {
    let pod = NetNs::create().unwrap();
    in_namespace(|host| {
        let peer = Peer { name: "eth0", mac: Some(MAC), mtu: Some(1400), namespace: Some(pod.as_fd()) };
        let link = NewLink { mtu: Some(1400), up: true, ..NewLink::new("cali0", NewLinkKind::Veth(peer)) };
        host.create(&link).unwrap();
        let near = host.link("cali0").unwrap().unwrap();
        assert_eq!((near.kind.as_str(), near.mtu, near.up), ("veth", 1400, true));
        assert_eq!(host.link("eth0").unwrap(), None, "the peer is in the other namespace from the start");

        let far = pod.run(|| RouteSocket::open().unwrap().link("eth0").unwrap().unwrap()).unwrap();
        assert_eq!((far.mac, far.mtu, far.up, far.peer), (Some(MAC), 1400, false, Some(near.index)));

        let error = host.create(&link).unwrap_err();
        assert_eq!(error.errno(), Some(17), "it exists");
        assert!(error.to_string().contains("cali0"), "{error}");
        host.change(&Change::DeleteLink(near.index)).unwrap();
        assert_eq!(host.link("cali0").unwrap(), None);
    });
}

#[test]
fn links_change_and_move() {
    let other = NetNs::create().unwrap();
    in_namespace(|socket| {
        socket.create(&NewLink::new("br0", NewLinkKind::Bridge)).unwrap();
        let bridge = socket.link("br0").unwrap().unwrap();
        let peer = Peer { name: "b", mac: None, mtu: None, namespace: None };
        socket.create(&NewLink::new("a", NewLinkKind::Veth(peer))).unwrap();
        let link = socket.link("a").unwrap().unwrap();
        assert!(!link.up);
        let settings = vec![
            LinkSetting::Name("c".to_owned()),
            LinkSetting::Mac(MAC),
            LinkSetting::Mtu(1300),
            LinkSetting::Controller(Some(bridge.index)),
            LinkSetting::Up(true),
        ];
        socket.change(&Change::SetLink(link.index, settings)).unwrap();
        let link = socket.link("c").unwrap().unwrap();
        assert_eq!(
            (link.mac, link.mtu, link.controller, link.up),
            (Some(MAC), 1300, Some(bridge.index), true)
        );
        let settings = vec![LinkSetting::Controller(None), LinkSetting::Up(false)];
        socket.change(&Change::SetLink(link.index, settings)).unwrap();
        let link = socket.link("c").unwrap().unwrap();
        assert_eq!((link.controller, link.up), (None, false));
        socket.move_link(link.index, &other).unwrap();
        assert_eq!(socket.link("c").unwrap(), None);
        let moved = other.run(|| RouteSocket::open().unwrap().link("c").unwrap()).unwrap();
        assert!(moved.is_some());
    });
}

#[test]
fn addresses_and_routes_are_listed_as_created() {
    in_namespace(|socket| {
        let link = vxlan(socket);
        let addresses = [("10.0.0.1", 32), ("192.168.7.1", 24), ("fd00::1", 128)];
        let addresses =
            addresses.map(|(address, prefix_length)| Address { link, address: ip(address), prefix_length });
        for address in addresses {
            socket.change(&Change::AddAddress(address)).unwrap();
            socket.change(&Change::AddAddress(address)).expect("adding it again changes nothing");
        }
        let listed = socket.addresses().unwrap();
        for address in addresses {
            assert!(listed.contains(&address), "{address:?} in {listed:?}");
        }

        let way = |gateway: &str| NextHop { link, gateway: Some(ip(gateway)), onlink: true };
        let routes = [
            Route::on_link("10.1.0.5/32".parse().unwrap(), link, 80),
            Route::via("10.2.0.0/26".parse().unwrap(), ip("10.2.0.0"), link, 80),
            Route { source: Some(ip("10.0.0.1")), ..Route::on_link("10.3.0.0/16".parse().unwrap(), link, 3) },
            Route { mtu: Some(1300), ..Route::via("10.6.0.0/26".parse().unwrap(), ip("10.2.0.1"), link, 80) },
            Route { mtu: Some(1300), ..Route::on_link("fd06::/64".parse().unwrap(), link, 80) },
            Route { metric: 7, ..Route::on_link("0.0.0.0/0".parse().unwrap(), link, 4) },
            Route::blackhole("10.4.0.0/26".parse().unwrap(), 80),
            Route::on_link("fd01::5/128".parse().unwrap(), link, 80),
            Route::blackhole("fd04::/64".parse().unwrap(), 80),
            Route {
                others: vec![way("10.5.0.2"), way("10.5.0.3")],
                ..Route::via("10.5.0.0/26".parse().unwrap(), ip("10.5.0.1"), link, 80)
            },
            Route {
                others: vec![way("fd05::2"), way("fd05::3")],
                ..Route::via("fd05::/64".parse().unwrap(), ip("fd05::1"), link, 80)
            },
        ];
        for verdict in socket.change_all(&routes.clone().map(Change::AddRoute)).unwrap() {
            verdict.unwrap();
        }
        let listed = socket.routes().unwrap();
        for route in &routes {
            assert!(listed.contains(route), "{route:?} in {listed:#?}");
        }

        let taken = socket.change(&Change::AddRoute(routes[0].clone())).unwrap_err();
        assert_eq!(taken.errno(), Some(17), "{taken}");
        assert!(taken.to_string().contains("10.1.0.5/32"), "{taken}");
        let refusals = ["10.6.0.0/16", "fd06::/32"].map(|net| net.parse().unwrap());
        for destination in refusals {
            for kind in [RouteKind::Unreachable, RouteKind::Prohibit, RouteKind::Throw] {
                let route = Route { kind, ..Route::blackhole(destination, 80) };
                socket.change(&Change::AddRoute(route.clone())).unwrap();
                assert!(socket.routes().unwrap().contains(&route), "{route}");
                socket.change(&Change::DeleteRoute(route)).unwrap();
            }
        }
        let instead = Route::blackhole("10.1.0.5/32".parse().unwrap(), 80);
        socket.change(&Change::ReplaceRoute(instead.clone())).unwrap();
        let listed = socket.routes().unwrap();
        assert!(listed.contains(&instead) && !listed.contains(&routes[0]));

        for route in routes[1..].iter().chain([&instead]) {
            socket.change(&Change::DeleteRoute(route.clone())).unwrap();
        }
        assert!(
            socket.routes().unwrap().iter().all(|route| route.protocol == 2),
            "only the kernel's are left"
        );
        for address in addresses {
            socket.change(&Change::DeleteAddress(address)).unwrap();
        }
        assert!(socket.addresses().unwrap().iter().all(|address| !addresses.contains(address)));
    });
}

#[test]
fn neighbours_and_forwarding_entries_are_listed_as_created() {
    in_namespace(|socket| {
        let link = vxlan(socket);
        let mac = |number: u16| MacAddress([2, 0, 0, 0, (number >> 8) as u8, number as u8]);
        let address = |number: u16| Ipv4Addr::new(10, 9, (number >> 8) as u8, number as u8);
        // More than gc_thresh3, the kernel's limit for neighbours that are not permanent.
        let numbers = 0..2000u16;
        let neighbours: Vec<_> =
            numbers.clone().map(|n| Neighbour { link, address: address(n).into(), mac: mac(n) }).collect();
        let entries: Vec<_> =
            numbers.map(|n| FdbEntry { link, mac: mac(n), destination: address(n).into() }).collect();
        let mut changes: Vec<_> = neighbours.iter().copied().map(Change::SetNeighbour).collect();
        changes.extend(entries.iter().copied().map(Change::SetFdb));
        for verdict in socket.change_all(&changes).unwrap() {
            verdict.unwrap();
        }
        let (mut listed, mut fdb) = (socket.neighbours().unwrap(), socket.fdb(link).unwrap());
        listed.retain(|neighbour| neighbour.address.is_ipv4());
        listed.sort();
        fdb.sort();
        assert_eq!(listed, neighbours);
        assert_eq!(fdb, entries);

        let moved = FdbEntry { destination: Ipv4Addr::new(1, 2, 3, 4).into(), ..entries[0] };
        socket.change(&Change::SetFdb(moved)).unwrap();
        let fdb = socket.fdb(link).unwrap();
        assert!(fdb.contains(&moved) && !fdb.contains(&entries[0]) && fdb.len() == entries.len());
        socket.change(&Change::DeleteFdb(moved)).unwrap();
        socket.change(&Change::DeleteNeighbour(neighbours[0])).unwrap();
        assert_eq!(socket.fdb(link).unwrap().len(), entries.len() - 1);
        assert!(!socket.neighbours().unwrap().contains(&neighbours[0]));
    });
}

#[test]
fn one_error_in_a_batch_is_reported_and_stops_nothing() {
    in_namespace(|socket| {
        let link = vxlan(socket);
        let route =
            |n: u8, link| Change::AddRoute(Route::on_link(ip(&format!("10.7.0.{n}")).into(), link, 80));
        let changes: Vec<_> = (0..50).map(|n| route(n, if n % 10 == 3 { 999 } else { link })).collect();
        let verdicts = socket.change_all(&changes).unwrap();
        for (n, verdict) in verdicts.iter().enumerate() {
            assert_eq!(verdict.is_err(), n % 10 == 3, "{n}: {verdict:?}");
        }
        let error = verdicts[3].as_ref().unwrap_err().to_string();
        assert!(error.contains("10.7.0.3/32") && error.contains("link 999"), "{error}");
        assert_eq!(socket.routes().unwrap().iter().filter(|route| route.protocol == 80).count(), 45);
    });
}

#[test]
fn errors_contain_the_kernels_message() {
    in_namespace(|socket| {
        let settings = Vxlan { vni: 1 << 24, port: 4789, local: None, learning: false };
        let error = socket.create(&NewLink::new("vx", NewLinkKind::Vxlan(settings))).unwrap_err().to_string();
        assert!(error.contains("vx: the kernel refused") && error.contains("VXLAN ID"), "{error}");
    });
}

#[test]
fn a_subscriber_receives_changes() {
    const LINKS: u32 = 1; // RTNLGRP_LINK
    in_namespace(|socket| {
        let mut subscriber = Socket::open(Family::Route).unwrap();
        subscriber.subscribe(&[LINKS]).unwrap();
        assert!(subscriber.notifications().unwrap().is_empty());
        vxlan(socket);
        assert!(!subscriber.notifications().unwrap().is_empty());
    });
}
