//! Tests of what a look at the node's own addresses finds.

use serde_json::json;

use super::*;
use crate::node_address::{AddressMethod, AddressMethods, Machine};

fn finder() -> AddressFinder {
    AddressFinder { methods: AddressMethods::default(), machine: Machine::Linux }
}

fn annotated(name: &str, text: Option<&str>, reported: &[&str]) -> Value {
    let reported = reported.iter().map(|address| json!({"type": "InternalIP", "address": address}));
    let addresses: Vec<Value> = reported.collect();
    json!({"metadata": {"annotations": {name: text}}, "status": {"addresses": addresses}})
}

/// CrossSubnet pools need it. Earlier agents wrote the address alone, and networks are divided.
#[cfg(target_os = "linux")]
#[test]
fn the_address_has_the_prefix_length_of_its_interface() {
    let [v4, v6] = IpVersion::ALL;
    let write = |text: &str| Decision::Write(text.to_owned());
    let correct = |text: &str| Decision::Correct(text.to_owned());
    for (version, current, reported, expected) in [
        (v4, None, &["127.0.0.1"][..], write("127.0.0.1/8")),
        (v4, Some("127.0.0.1"), &["127.0.0.1"], correct("127.0.0.1/8")),
        (v4, Some("127.0.0.1/8"), &["127.0.0.1"], Decision::Keep),
        (v4, Some("127.0.0.1/16"), &["127.0.0.1"], correct("127.0.0.1/8")),
        (v4, Some("127.0.0.1/32"), &["127.0.0.1"], Decision::Keep),
        (v4, Some("::1/128"), &["127.0.0.1"], Decision::Keep),
        (v4, Some("none"), &["127.0.0.1"], Decision::Keep),
        // The address of another interface, or of a family that the kubelet does not report.
        (v4, Some("127.0.0.1/8"), &["192.0.2.9"], Decision::Keep),
        (v4, Some("127.0.0.1/16"), &["192.0.2.9"], correct("127.0.0.1/8")),
        (v4, Some("127.0.0.1/16"), &[], correct("127.0.0.1/8")),
        (v4, Some("192.0.2.9/24"), &["192.0.2.9"], Decision::Keep),
        (v4, Some("192.0.2.9/24"), &["192.0.2.10"], Decision::Keep),
        // The machine has another address in the same network.
        (v4, Some("127.0.0.9/8"), &["127.0.0.1"], write("127.0.0.1/8")),
        (v6, None, &["127.0.0.1"], Decision::Keep),
        (v6, Some("2001:db8::1/64"), &[], Decision::Keep),
    ] {
        let node = annotated(own(version), current, reported);
        assert_eq!(decide(&node, version, &finder(), false), expected, "{current:?} {reported:?}");
    }
}

/// A machine that starts has its addresses later than its agent, and nobody would restore an annotation.
#[cfg(target_os = "linux")]
#[test]
fn an_address_that_no_interface_has_is_kept_for_some_minutes() {
    let [v4, v6] = IpVersion::ALL;
    let flannel = Node::FLANNEL_ADDRESS.of(v6);
    let (start, minute) = (Instant::now(), Duration::from_secs(60));
    for (version, name, text, reported, replaced) in [
        (v4, Node::ADDRESS, "192.0.2.9/24", "127.0.0.1", Some("127.0.0.1/8")),
        // The kubelet knows no other one.
        (v6, Node::ADDRESS_V6, "2001:db8::1/64", "127.0.0.1", None),
        (v6, flannel, "2001:db8::1", "127.0.0.1", None),
    ] {
        let node = annotated(name, Some(text), &[reported]);
        let mut missing = MissingAddresses::default();
        let mut look = |node: &Value, minutes: u32| {
            let mut look = OwnAddresses::default();
            let decision = decide(node, version, &finder(), true);
            let now = start + minute * minutes;
            look.take(version, decision, &mut missing, now);
            // Pods get no addresses of a family in which nobody reaches the node.
            let is_given_up = minutes == 5 && replaced.is_none();
            assert_eq!(missing.given_up().contains(&version), is_given_up, "{text} {minutes}");
            assert_eq!(missing.need_looks(), !missing.since.is_empty() && !is_given_up);
            (look, missing.conditions())
        };
        for minutes in [0, 4] {
            let (OwnAddresses { annotations, of_flannel }, conditions) = look(&node, minutes);
            assert_eq!(annotations, BTreeMap::new(), "{text}");
            assert_eq!(of_flannel.contains(&version), name == flannel, "{text}");
            let [condition] = &conditions[..] else { panic!("{conditions:?}") };
            let address = text.split('/').next().unwrap();
            assert!(condition.message.contains(address) && condition.message.contains(name));
            assert_eq!(condition.reason, Reason::RouteRefused);
        }
        let (OwnAddresses { annotations, of_flannel }, _) = look(&node, 5);
        let names = [own(version), record(version)];
        let expected = replaced.into_iter().flat_map(|text| names.map(|name| (name, Some(text.to_owned()))));
        assert_eq!(annotations, expected.collect(), "{text}");
        assert!(of_flannel.is_empty());

        // It is back, and goes again.
        let back = annotated(own(version), Some(if version == v4 { "127.0.0.1/8" } else { "::1/128" }), &[]);
        assert_eq!(look(&back, 6).1, []);
        assert_eq!(look(&node, 7).0.annotations, BTreeMap::new(), "{text}");
    }
}

/// Interfaces that cannot be read say nothing about an address: it may still be missing, and what flannel has announced stays.
#[cfg(target_os = "linux")]
#[test]
fn interfaces_that_cannot_be_read_change_nothing() {
    let [v4, _] = IpVersion::ALL;
    let (start, minute) = (Instant::now(), Duration::from_secs(60));
    let missing = Missing {
        address: "192.0.2.9".parse().unwrap(),
        name: own(v4),
        instead: Some("127.0.0.1/8".to_owned()),
        patience: PATIENCE,
    };
    let mut known = MissingAddresses::default();
    let mut take = |decision: Decision, minutes: u32| {
        let mut look = OwnAddresses::default();
        look.take(v4, decision, &mut known, start + minute * minutes);
        (look.annotations.len(), look.of_flannel.len())
    };
    assert_eq!(take(Decision::Missing(missing.clone()), 0), (0, 0));
    assert_eq!(take(Decision::Unknown, 1), (0, 1));
    assert_eq!(take(Decision::Missing(missing), 5), (2, 0), "the time goes on");
}

/// An address that no interface has is that of a router before the node, or an old one.
#[test]
fn the_address_that_flanneld_has_found_counts_if_an_interface_has_it() {
    let finder = finder();
    let name = Node::FLANNEL_ADDRESS.of(IpVersion::V4);
    for (annotation, expected) in [
        (json!("127.0.0.1"), Some("127.0.0.1/8")),
        (json!("192.0.2.9"), None),
        (json!("none"), None),
        (json!(null), None),
    ] {
        let annotations = json!({name: annotation});
        let found = match left_by_flannel(&annotations, IpVersion::V4, &finder) {
            Decision::Write(found) => Some(found),
            _ => None,
        };
        assert_eq!(found.as_deref(), expected, "{annotation}");
        assert_eq!(left_by_flannel(&annotations, IpVersion::V6, &finder), Decision::Keep);
    }
}

/// Runs with these addresses on the interface `eth0`, in a network namespace.
#[cfg(target_os = "linux")]
fn on_machine(addresses: &[&str], test: impl AsyncFnOnce() + Send) {
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, RouteSocket};

    let run = || {
        let mut routes = RouteSocket::open().unwrap();
        let lo = tortie_kernel::interface_index("lo").unwrap();
        routes.change(&Change::SetLink(lo, vec![LinkSetting::Up(true)])).unwrap();
        let (name, kind) = ("eth0", NewLinkKind::Bridge);
        routes.create(&NewLink { name, kind, mac: None, mtu: None, up: true, controller: None }).unwrap();
        let link = routes.link(name).unwrap().unwrap().index;
        for net in addresses.iter().map(|net| net.parse::<IpNet>().unwrap()) {
            let address = Address { link, address: net.addr(), prefix_length: net.prefix_len() };
            routes.change(&Change::AddAddress(address)).unwrap();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    NetNs::create().unwrap().run(run).unwrap();
}

/// A kubelet reports another address when its `--node-ip` changes. What an administrator or Calico has written stays.
#[cfg(target_os = "linux")]
#[test]
fn what_the_agent_has_written_follows_the_kubelet() {
    let (old, new, away) = ("192.0.2.11/24", "198.51.100.11/24", "203.0.113.1");
    let reported = "198.51.100.11";
    let write = || Decision::Write(new.to_owned());
    let differs = || Decision::Differs { announced: old.to_owned(), reported: new.to_owned() };
    let instead = |address: &str| {
        let address = address.parse().unwrap();
        let (name, instead, patience) = (Node::ADDRESS, Some(new.to_owned()), PATIENCE);
        Decision::Missing(Missing { address, name, instead, patience })
    };
    let gone = "192.0.2.99/24";
    let nowhere = || {
        let address = "192.0.2.99".parse().unwrap();
        Decision::Missing(Missing { address, name: Node::ADDRESS, instead: None, patience: PATIENCE })
    };
    let table = [
        (old, Some(old), &[reported][..], write()),
        (old, None, &[reported], differs()),
        (old, Some("192.0.2.12/24"), &[reported], differs()),
        // The agent has written it without the length of the prefix, or the length has changed.
        ("192.0.2.11", Some("192.0.2.11"), &[reported], write()),
        ("192.0.2.11/16", Some("192.0.2.11/16"), &["192.0.2.11"], Decision::Write(old.to_owned())),
        ("192.0.2.11/16", None, &["192.0.2.11"], Decision::Correct(old.to_owned())),
        // Both count as the node's.
        (old, Some(old), &[reported, "192.0.2.11"], Decision::Keep),
        // That of a router in front of the node.
        (old, Some(old), &[away], Decision::Keep),
        (old, None, &[away], Decision::Keep),
        (old, Some(old), &[away, reported], write()),
        (old, Some(old), &[], Decision::Keep),
        // No interface has the old one: what the agent has written changes at once.
        (gone, Some(gone), &[reported], write()),
        (gone, None, &[reported], instead("192.0.2.99")),
        (gone, Some(gone), &[away], nowhere()),
        (gone, None, &[away], Decision::Keep),
        // The address of a service that moves between machines does not replace one that is there.
        (old, Some(old), &["192.0.2.50"], Decision::Keep),
        (gone, Some(gone), &["192.0.2.50"], Decision::Write("192.0.2.50/32".to_owned())),
    ];
    on_machine(&[old, new, "192.0.2.50/32"], async move || {
        for (text, written, reported, expected) in table {
            let mut node = annotated(Node::ADDRESS, Some(text), reported);
            node["metadata"]["annotations"][Node::ANNOUNCED] = json!(written);
            let found = decide(&node, IpVersion::V4, &finder(), false);
            assert_eq!(found, expected, "{text} {written:?} {reported:?}");
            // In etcd, controllers copy what the kubelet reports.
            node["spec"] = node["status"].take();
            assert_eq!(decide(&node, IpVersion::V4, &finder(), false), expected, "in spec: {reported:?}");
        }
    });
}

/// The operator learns which source decides, and of each change for some minutes.
#[cfg(target_os = "linux")]
#[test]
fn changes_and_differences_of_the_address_are_conditions() {
    let (old, new) = ("192.0.2.11/24", "198.51.100.11/24");
    on_machine(&[old, new], async move || {
        let start = Instant::now();
        let mut missing = MissingAddresses::default();
        let mut node = annotated(Node::ADDRESS, Some(old), &["198.51.100.11"]);
        let found = look(&node, &finder(), false, &mut missing, start).await;
        assert_eq!(found.annotations, BTreeMap::new());
        let [condition] = &missing.conditions()[..] else { panic!("{:?}", missing.conditions()) };
        assert_eq!(condition.reason, Reason::NodeAddressDiffers);
        for part in [old, new, "projectcalico.org/IPv4Address-", "the kubelet reports", "decides"] {
            assert!(condition.message.contains(part), "{part}: {}", condition.message);
        }
        assert!(!missing.need_looks(), "only a change of the Node or of the machine can end it");

        // The remedy of the condition.
        node["metadata"]["annotations"][Node::ADDRESS] = json!(null);
        let found = look(&node, &finder(), false, &mut missing, start).await;
        assert_eq!(found.annotations, both_of(new));
        assert_eq!(missing.conditions(), [], "a first address is no change");

        node["metadata"]["annotations"] = json!({Node::ADDRESS: old, Node::ANNOUNCED: old});
        for _ in 0..2 {
            // The first attempt to write it fails.
            let found = look(&node, &finder(), false, &mut missing, start).await;
            assert_eq!(found.annotations, both_of(new));
            let [condition] = &missing.conditions()[..] else { panic!("{:?}", missing.conditions()) };
            assert_eq!(condition.reason, Reason::NodeAddressChanged);
            for part in [old, new, "the kubelet reports it"] {
                assert!(condition.message.contains(part), "{part}: {}", condition.message);
            }
        }
        node["metadata"]["annotations"] = json!({Node::ADDRESS: new, Node::ANNOUNCED: new});
        let second = Duration::from_secs(1);
        for (at, count) in [(NEWS - second, 1), (NEWS, 0)] {
            look(&node, &finder(), false, &mut missing, start + at).await;
            assert_eq!((missing.conditions().len(), missing.need_looks()), (count, count > 0), "{at:?}");
        }
        // Somebody has written another one, and later removes it.
        node["metadata"]["annotations"] = json!({Node::ADDRESS: old, Node::ANNOUNCED: new});
        let found = look(&node, &finder(), false, &mut missing, start).await;
        assert_eq!(found.annotations, [(Node::ANNOUNCED, None)].into());
    });
}

#[cfg(target_os = "linux")]
fn both_of(text: &str) -> BTreeMap<&'static str, Option<String>> {
    [Node::ADDRESS, Node::ANNOUNCED].map(|name| (name, Some(text.to_owned()))).into()
}

/// A network service takes the addresses of an interface away and gives them back, and a daemon may be faster with that of its service.
#[cfg(target_os = "linux")]
#[test]
fn the_only_address_of_a_moment_is_not_announced_at_once() {
    let vip = "192.0.2.50/32";
    let methods = AddressMethods { ipv4: AddressMethod::FirstFound, ..AddressMethods::default() };
    let finder = AddressFinder { methods, machine: Machine::Linux };
    on_machine(&[vip], async move || {
        let start = Instant::now();
        for (text, waits) in [
            (Some("192.0.2.11/24"), true),
            (None, false),
            // Clouds give addresses this length.
            (Some("192.0.2.7/32"), true),
            (Some("127.0.0.1/8"), false),
        ] {
            let mut missing = MissingAddresses::default();
            let node = annotated(Node::ADDRESS, text, &[]);
            let found = look(&node, &finder, false, &mut missing, start).await;
            let expected = if waits { BTreeMap::new() } else { both_of(vip) };
            assert_eq!(found.annotations, expected, "{text:?}");
            assert_eq!(missing.need_looks(), text.is_some());
            let found = look(&node, &finder, false, &mut missing, start + PATIENCE).await;
            assert_eq!(found.annotations, both_of(vip), "{text:?}");
        }
    });
}

/// An address of the same network replaces the former one at once. Otherwise the interface of the former one may be configured just now, or
/// a switch of Windows takes its address over.
#[cfg(target_os = "linux")]
#[test]
fn an_address_in_another_network_is_announced_a_little_later() {
    let new = "192.0.2.20/24";
    let methods = AddressMethods { ipv4: AddressMethod::FirstFound, ..AddressMethods::default() };
    let finder = AddressFinder { methods, machine: Machine::Linux };
    on_machine(&[new, "192.0.2.50/32"], async move || {
        let start = Instant::now();
        for (text, seconds) in [("192.0.2.11/24", 0), ("192.0.2.50/32", 0), ("198.51.100.11/24", 30)] {
            let mut missing = MissingAddresses::default();
            let node = annotated(Node::ADDRESS, Some(text), &[]);
            for after in [0, 29, 30] {
                let now = start + Duration::from_secs(after);
                let found = look(&node, &finder, false, &mut missing, now).await;
                let is_due = after >= seconds;
                assert_eq!(found.annotations.is_empty(), !is_due, "{text} {after}");
                let conditions = missing.conditions();
                let is_told = conditions.iter().any(|it| it.reason == Reason::NodeAddressChanged);
                assert_eq!(is_told, is_due, "{text} {after}: {conditions:?}");
                assert!(!conditions.is_empty(), "{text} {after}");
            }
            let found = look(&node, &finder, false, &mut missing, start + SHORT_PATIENCE).await;
            assert_eq!(found.annotations, both_of(new));
        }
    });
}

/// Calico's agent would write its own again.
#[cfg(target_os = "linux")]
#[test]
fn beside_calicos_agent_no_address_is_written() {
    let (old, new) = ("192.0.2.11/24", "198.51.100.11/24");
    on_machine(&[old, new], async move || {
        let mut node = annotated(Node::ADDRESS, Some(old), &["198.51.100.11"]);
        node["metadata"]["annotations"][Node::ANNOUNCED] = json!(old);
        let mut missing = MissingAddresses::default();
        let felix = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 9099)).unwrap();
        let found = look(&node, &finder(), false, &mut missing, Instant::now()).await;
        assert_eq!(found.annotations, BTreeMap::new());
        let [condition] = &missing.conditions()[..] else { panic!("{:?}", missing.conditions()) };
        assert_eq!(condition.reason, Reason::NodeAddressDiffers);
        assert!(
            condition.message.contains("9099") && condition.message.contains(new),
            "{}",
            condition.message
        );
        drop(felix);
        let found = look(&node, &finder(), false, &mut missing, Instant::now()).await;
        assert_eq!(found.annotations, both_of(new));
    });
}
