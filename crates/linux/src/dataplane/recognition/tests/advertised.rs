//! Routes by router advertisements: a pod may send them, and so may the router of the node.

use ipnet::IpNet;

use super::*;

const POD: &str = "10.0.0.1";

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// The default route by way of the sender.
fn default_by_sender() -> Route {
    Route::via(net("::/0"), "fe80::1".parse().unwrap(), 2, ADVERTISED)
}

/// A network of the advertisement, for which the kernel makes the same route as for an address of the node.
fn on_link(network: &str) -> Route {
    Route::on_link(net(network), 2, KERNEL)
}

fn by_router(network: &str, router: &str) -> Route {
    Route::via(net(network), router.parse().unwrap(), 2, 3)
}

/// A pod that calls itself a router gets no other verdict about its interface than that it is closed, whatever else is known of it.
#[test]
fn a_pod_that_advertises_itself_is_closed() {
    let hashed = format!("eni{}", digits("n", "a"));
    let bits_of_everything = || vec![on_link("::/1"), on_link("8000::/1")];
    for (what, advertised) in [
        ("a router", vec![default_by_sender()]),
        ("a network", vec![on_link("2001:db8::/64")]),
        ("everything as a network", vec![on_link("::/0")]),
        ("everything as two networks", bits_of_everything()),
    ] {
        let routes = [vec![to("10.0.0.1/32", 2)], advertised].concat();
        for (name, results) in [
            (hashed.as_str(), vec![]),
            ("veth1", vec![]),
            ("veth1", vec![result("a", "veth1", &[POD])]),
            ("veth1", vec![result("a", "veth1", &["10.0.0.2"])]),
        ] {
            let found = Observed::new(vec![link(2, name)], &routes, results)
                .recognise(&pods(&[("a", &[POD])]), &config());
            let problem = Problem::WithNetworks { address: POD.parse().unwrap(), interface: name.to_owned() };
            assert_eq!(found.problems, BTreeMap::from([(id("a"), problem)]), "{what}, {name}");
            assert_eq!(found.unclaimed, BTreeSet::from([name.to_owned()]), "{what}, {name}");
        }
    }
}

/// In nested nodes the adapter is a veth. Its only IPv6 router may be an advertised one.
#[test]
fn an_adapter_with_an_advertised_router_is_never_closed() {
    let advertised = || vec![default_by_sender(), on_link("2001:db8::/64")];
    // Somebody has made a host route to a pod there, as plugins do for pods.
    let and_led = |other: Route| [advertised(), vec![to("10.0.0.1/32", 2), other]].concat();
    for (what, routes, adapters) in [
        ("nothing else", advertised(), BTreeSet::new()),
        ("an IPv4 network", and_led(on_link("192.0.2.0/24")), BTreeSet::new()),
        ("an IPv4 router", and_led(by_router("0.0.0.0/0", "192.0.2.1")), BTreeSet::new()),
        ("another IPv6 router", and_led(by_router("::/0", "fe80::2")), BTreeSet::new()),
        ("the node's address", and_led(to("10.0.0.2/32", 2)), BTreeSet::from([2])),
    ] {
        // A plugin names it, too.
        let results = vec![result("a", "eth1", &["10.0.0.9"])];
        let observed = Observed { adapters, ..Observed::new(vec![link(2, "eth1")], &routes, results) };
        let found = observed.recognise(&pods(&[("a", &[POD])]), &config());
        assert_eq!(found.unclaimed, BTreeSet::new(), "{what}");
        assert!(found.interfaces.is_empty(), "{what}: {found:?}");
    }
}

/// The prefix of an adapter is refused, that of a pod's interface is not.
#[test]
fn only_the_router_of_the_node_makes_an_interface_the_nodes_own() {
    let to_pod = || to("10.0.0.1/32", 2);
    for (what, routes, is_of_node) in [
        ("a pod's router", vec![default_by_sender(), to_pod()], false),
        ("everything is on a pod's link", vec![on_link("::/0"), to_pod()], false),
        ("the node's router", vec![default_by_sender()], true),
        ("everything is on the node's link", vec![on_link("::/0")], true),
        ("with an IPv4 network", vec![default_by_sender(), to_pod(), on_link("192.0.2.0/24")], true),
        ("of an administrator", vec![by_router("::/0", "fe80::1"), to_pod()], true),
    ] {
        let expected = is_of_node.then(|| ("eni".to_owned(), "eni1".to_owned()));
        assert_eq!(prefix_of_node(&["eni".to_owned()], vec![link(2, "eni1")], &routes), expected, "{what}");
    }
}
