//! Connecting and disconnecting pods, on the real kernel.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::cluster::*;
use tortie_dataplane::*;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::*;
use tortie_linux::dataplane::Config;
use tortie_linux::wire::Wiring;

/// Runs a test with a wiring in its own namespace.
fn in_node(test: impl FnOnce(Wiring) + Send) {
    NetNs::create().unwrap().run(|| test(Wiring::open(&Config::default()).unwrap())).unwrap();
}

/// The names of the links with the prefix.
fn links() -> Vec<String> {
    let links = RouteSocket::open().unwrap().links().unwrap();
    links.into_iter().map(|link| link.name).filter(|name| name.starts_with("cali")).collect()
}

fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// What is known of a pod before it has an address.
fn link_of(pod: &PodAttachment) -> PodLink {
    let PodAttachment { endpoint, container_id, netns, addresses: _, mtu, mac: _, limits: _, dns: _ } =
        pod.clone();
    PodLink { endpoint, container_id, netns, mtu }
}

#[test]
fn a_pod_is_connected_once_and_disconnected_once() {
    connect_and_disconnect(|wiring, pod| wiring.connect(pod).unwrap());
}

#[test]
fn a_link_that_was_made_before_the_address_is_known_is_as_any_other() {
    connect_and_disconnect(|wiring, pod| {
        let prepared = wiring.prepare(&link_of(pod)).unwrap().unwrap();
        let namespace = NetNs::open(Path::new(&pod.netns)).unwrap();
        let inside = || {
            let mut socket = RouteSocket::open().unwrap();
            let link = socket.link(&pod.endpoint.interface).unwrap().unwrap();
            let addresses = socket.addresses().unwrap().into_iter();
            (link.up, addresses.filter(|address| address.link == link.index).count())
        };
        assert_eq!(namespace.run(inside).unwrap(), (false, 0), "it is down and has no address");
        assert_eq!(wiring.prepare(&link_of(pod)).unwrap(), None, "it is there already");
        wiring.finish(prepared, pod).unwrap()
    });
}

fn connect_and_disconnect(connect: impl FnOnce(&Wiring, &PodAttachment) -> PodInterface + Send) {
    in_node(|wiring| {
        let pod = Pod::new("pod", 1, 2);
        let attachment = pod.attachment();
        let problem = wiring.check(&attachment).unwrap_err().to_string();
        assert!(problem.contains("it is not there"), "{problem}");

        let interface = connect(&wiring, &attachment);
        assert_eq!(interface.host_interface, wiring.host_interface(&pod.id(), &pod.container_id));
        let (mac, mtu, addresses, routes) = pod
            .namespace
            .run(|| {
                let mut socket = RouteSocket::open().unwrap();
                let link = socket.link("eth0").unwrap().unwrap();
                (link.mac, link.mtu, socket.addresses().unwrap(), socket.routes().unwrap())
            })
            .unwrap();
        assert_eq!((mac, mtu), (Some(interface.mac), 1450));
        assert!(addresses.iter().any(|it| it.address == pod.address && it.prefix_length == 32));
        let gateway = std::net::IpAddr::from([169, 254, 1, 1]);
        assert!(routes.iter().any(|it| it.destination.prefix_len() == 0 && it.gateway == Some(gateway)));
        wiring.check(&attachment).unwrap();

        let before = RouteSocket::open().unwrap().links().unwrap();
        assert_eq!(wiring.connect(&attachment).unwrap(), interface, "doing it again changes nothing");
        assert_eq!(RouteSocket::open().unwrap().links().unwrap(), before);

        wiring.disconnect(&pod.id(), &pod.container_id).unwrap();
        assert!(!links().contains(&interface.host_interface), "the name is free at once");
        wiring.disconnect(&pod.id(), &pod.container_id).expect("that nothing is there is no error");
        wait_for("the link is deleted in the background", || links().is_empty());
    });
}

#[test]
fn a_recreated_pod_does_not_wait_for_the_old_one() {
    in_node(|wiring| {
        let (old, mut new) = (Pod::new("pod", 1, 2), Pod::new("pod", 1, 2));
        new.container_id = "newer".to_owned();
        wiring.connect(&old.attachment()).unwrap();
        // The new sandbox comes before the old one was disconnected.
        let interface = wiring.connect(&new.attachment()).unwrap();
        wiring.check(&new.attachment()).unwrap();
        let problem = wiring.check(&old.attachment()).unwrap_err().to_string();
        assert!(problem.contains("eth0"), "{problem}");
        // The disconnect of the old one comes late.
        wiring.disconnect(&old.id(), &old.container_id).unwrap();
        wiring.check(&new.attachment()).unwrap();
        wait_for("only the new link is left", || links() == [interface.host_interface.clone()]);
        wiring.disconnect(&new.id(), &new.container_id).unwrap();
    });
}

#[test]
fn differences_are_reported_and_repaired_by_connecting_again() {
    in_node(|wiring| {
        let pod = Pod::new("pod", 1, 2);
        let attachment = pod.attachment();
        let interface = wiring.connect(&attachment).unwrap();
        let inside = |change: &(dyn Fn(u32) -> Change + Sync)| {
            pod.namespace
                .run(|| {
                    let index = tortie_kernel::interface_index("eth0").unwrap();
                    RouteSocket::open().unwrap().change(&change(index)).unwrap();
                })
                .unwrap();
        };
        let address = |link| Address { link, address: pod.address.into(), prefix_length: 32 };
        let broken: [(&(dyn Fn(u32) -> Change + Sync), &str); 3] = [
            (&|link| Change::DeleteAddress(address(link)), "has not the address 10.65.1.2"),
            (&|link| Change::SetLink(link, vec![LinkSetting::Up(false)]), "is down"),
            (&Change::DeleteLink, "it is not there"),
        ];
        for (breaks, expected) in broken {
            inside(breaks);
            let problem = wiring.check(&attachment).unwrap_err().to_string();
            assert!(problem.contains(expected) && problem.contains(&interface.host_interface), "{problem}");
            assert_eq!(wiring.connect(&attachment).unwrap(), interface);
            wiring.check(&attachment).unwrap();
        }
    });
}

#[test]
fn a_requested_mac_address_is_set_on_both_sides_of_the_link() {
    in_node(|wiring| {
        let pod = Pod::new("pod", 1, 2);
        let with =
            |last| PodAttachment { mac: Some(MacAddress([0x02, 0x42, 0, 0, 0, last])), ..pod.attachment() };
        let prepared = wiring.prepare(&link_of(&with(1))).unwrap().unwrap();
        let interface = wiring.finish(prepared, &with(1)).unwrap();
        assert_eq!(Some(interface.mac), with(1).mac);
        wiring.check(&with(1)).unwrap();
        let problem = wiring.check(&with(2)).unwrap_err().to_string();
        assert!(problem.contains("has not the MAC address 02:42:00:00:00:02"), "{problem}");
        // The address of a link that is there already is another one.
        assert_eq!(Some(wiring.connect(&with(2)).unwrap().mac), with(2).mac);
        wiring.check(&with(2)).unwrap();
        let own = || RouteSocket::open().unwrap().link("eth0").unwrap().unwrap().mac;
        assert_eq!(pod.namespace.run(own).unwrap(), with(2).mac);
        let neighbours = RouteSocket::open().unwrap().neighbours().unwrap();
        let known = neighbours.iter().find(|entry| entry.address == IpAddr::from(pod.address));
        assert_eq!(known.map(|entry| entry.mac), with(2).mac, "{neighbours:?}");
    });
}

#[test]
fn the_link_of_another_pod_is_not_changed() {
    in_node(|wiring| {
        let (first, mut second) = (Pod::new("first", 1, 2), Pod::new("second", 1, 3));
        second.name = "n".repeat(253);
        let interface = wiring.connect(&first.attachment()).unwrap();
        // As if both names had equal digests.
        let mut socket = RouteSocket::open().unwrap();
        let rename = |socket: &mut RouteSocket, from: &str, to: &str| {
            let index = tortie_kernel::interface_index(from).unwrap();
            let settings = vec![LinkSetting::Up(false), LinkSetting::Name(to.to_owned())];
            socket.change(&Change::SetLink(index, settings)).unwrap();
        };
        let taken = wiring.host_interface(&second.id(), &second.container_id);
        rename(&mut socket, &interface.host_interface, &taken);
        let before = socket.link(&taken).unwrap();
        for error in [
            wiring.connect(&second.attachment()).unwrap_err(),
            wiring.check(&second.attachment()).unwrap_err(),
        ] {
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.contains("demo/first/eth0") && source.contains(&taken), "{source}");
        }
        wiring.disconnect(&second.id(), &second.container_id).unwrap();
        assert_eq!(socket.link(&taken).unwrap(), before);

        // Without it, the long name and its sandbox are recorded and recognised.
        rename(&mut socket, &taken, &interface.host_interface);
        wiring.connect(&second.attachment()).unwrap();
        wiring.connect(&second.attachment()).unwrap();
        wiring.disconnect(&second.id(), "an older sandbox").unwrap();
        wiring.check(&second.attachment()).unwrap();
        wiring.disconnect(&second.id(), &second.container_id).unwrap();
    });
}

#[test]
fn connecting_waits_until_the_link_passes_packets() {
    in_node(|wiring| {
        let pod = Pod::new("pod", 1, 2);
        let interface = wiring.connect(&pod.attachment()).unwrap();
        let name = interface.host_interface.clone();
        let own = interface.addresses[0];
        assert_eq!((own.address.prefix_len(), own.gateway), (32, std::net::IpAddr::from([169, 254, 1, 1])));
        let none = PodInterface { host_interface: "cali-none".to_owned(), ..interface.clone() };
        assert!(!wiring.wait_until_live(&none, Duration::from_millis(5)));
        assert!(wiring.wait_until_live(&interface, Duration::from_secs(10)));
        assert!(RouteSocket::open().unwrap().is_operating(&name).unwrap());
        let index = tortie_kernel::interface_index(&name).unwrap();
        let down = Change::SetLink(index, vec![LinkSetting::Up(false)]);
        RouteSocket::open().unwrap().change(&down).unwrap();
        assert!(!wiring.wait_until_live(&interface, Duration::from_millis(5)));
    });
}

#[test]
fn a_failed_attempt_leaves_nothing() {
    in_node(|wiring| {
        let pod = Pod::new("pod", 1, 2);
        let taken = || {
            let peer = Peer { name: "other", mac: None, mtu: None, namespace: None };
            RouteSocket::open().unwrap().create(&NewLink::new("eth0", NewLinkKind::Veth(peer))).unwrap();
        };
        pod.namespace.run(taken).unwrap();
        let error = wiring.connect(&pod.attachment()).unwrap_err();
        assert!(error.to_string().contains("lay the pod's cable"), "{error}");
        assert_eq!(wiring.prepare(&link_of(&pod.attachment())).unwrap(), None);
        assert_eq!(links(), Vec::<String>::new());

        let other = Pod::new("other", 1, 3);
        let prepared = wiring.prepare(&link_of(&other.attachment())).unwrap().unwrap();
        let disturb = || {
            let link = tortie_kernel::interface_index("eth0").unwrap();
            let renamed = Change::SetLink(link, vec![LinkSetting::Name("eth1".to_owned())]);
            RouteSocket::open().unwrap().change(&renamed).unwrap();
        };
        other.namespace.run(disturb).unwrap();
        wiring.finish(prepared, &other.attachment()).unwrap_err();
        assert_eq!(links(), Vec::<String>::new());

        // The path of the namespace leads to another one since, which has an interface of that name.
        let (third, stranger) = (Pod::new("third", 1, 5), Pod::new("stranger", 1, 6));
        stranger.namespace.run(taken).unwrap();
        let addresses = || RouteSocket::open().unwrap().addresses().unwrap();
        let before = stranger.namespace.run(addresses).unwrap();
        let prepared = wiring.prepare(&link_of(&third.attachment())).unwrap().unwrap();
        let swapped = PodAttachment { netns: stranger.attachment().netns, ..third.attachment() };
        let error = wiring.finish(prepared, &swapped).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("find the cable's other end"), "{source}");
        assert_eq!(stranger.namespace.run(addresses).unwrap(), before);
        assert_eq!(links(), Vec::<String>::new());

        // A link that is not needed goes at once, so that the next attempt finds its name free.
        for _ in 0..3 {
            let prepared = wiring.prepare(&link_of(&third.attachment())).unwrap().unwrap();
            wiring.abandon(prepared).unwrap();
            assert_eq!(links(), Vec::<String>::new());
        }

        let abandoned = Pod::new("abandoned", 1, 4);
        wiring.prepare(&link_of(&abandoned.attachment())).unwrap().unwrap();
        wiring.disconnect(&abandoned.id(), &abandoned.container_id).unwrap();
        wait_for("the link is deleted in the background", || links().is_empty());

        let mut nowhere = pod.attachment();
        nowhere.netns = "/nowhere/netns".to_owned();
        let error = wiring.connect(&nowhere).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("/nowhere/netns"), "{source}");
    });
}

#[test]
fn leftovers_of_a_dead_process_are_deleted() {
    in_node(|wiring| {
        let pods = [Pod::new("left", 1, 2), Pod::new("kept", 1, 3)];
        let interfaces = pods.each_ref().map(|pod| wiring.connect(&pod.attachment()).unwrap().host_interface);
        // A process that ends between disconnecting a pod and deleting its cable.
        let index = tortie_kernel::interface_index(&interfaces[0]).unwrap();
        let settings = vec![LinkSetting::Group(0x746f_7274), LinkSetting::Up(false)];
        RouteSocket::open().unwrap().change(&Change::SetLink(index, settings)).unwrap();
        drop(wiring);
        let _wiring = Wiring::open(&Config::default()).unwrap();
        wait_for("the left link is deleted, and no other", || links() == [interfaces[1].clone()]);
    });
}

#[test]
fn many_pods_at_once() {
    in_node(|wiring| {
        let here = NetNs::current().unwrap();
        let pods: Vec<_> = (0..32).map(|number| Pod::new(&format!("pod-{number}"), 1, number)).collect();
        std::thread::scope(|scope| {
            for pods in pods.chunks(8) {
                let (wiring, here) = (&wiring, &here);
                scope.spawn(move || {
                    let connect =
                        || pods.iter().for_each(|pod| drop(wiring.connect(&pod.attachment()).unwrap()));
                    here.run(connect).unwrap();
                });
            }
        });
        for pod in &pods {
            wiring.check(&pod.attachment()).unwrap();
            wiring.disconnect(&pod.id(), &pod.container_id).unwrap();
        }
        drop(wiring);
        assert_eq!(links(), Vec::<String>::new(), "a wiring that ends has deleted all");
    });
}

#[test]
fn interface_names_equal_calicos() {
    in_node(|wiring| {
        let id = |interface: &str| EndpointId {
            namespace: "default".into(),
            pod: "nginx".into(),
            interface: interface.into(),
        };
        // The first eleven digits of `echo -n default.nginx | sha1sum`.
        let name = wiring.host_interface(&id("eth0"), "any");
        assert_eq!(name, "calic440f455693");
        assert_ne!(name, wiring.host_interface(&id("eth1"), "any"));
    });
}
