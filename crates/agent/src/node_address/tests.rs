//! Tests of how a node's address is found.

use super::*;

fn machine() -> Vec<Interface> {
    let all: [(&str, &[&str]); 7] = [
        ("lo", &["127.0.0.1/8", "::1/128"]),
        ("eth0", &["169.254.1.1/16", "192.0.2.10/24", "192.0.2.11/24", "fe80::1/64", "2001:db8::10/64"]),
        ("eth1", &["198.51.100.10/25"]),
        ("docker0", &["172.17.0.1/16"]),
        ("vxlan.calico", &["10.244.0.0/32", "fd00::/128"]),
        ("bond0.7", &["203.0.113.10/24", "2001:db8:7::10/64"]),
        ("cali123", &["10.0.0.1/32"]),
    ];
    let one = |(name, addresses): (&str, &[&str])| Interface {
        name: name.to_owned(),
        addresses: addresses.iter().map(|net| net.parse().unwrap()).collect(),
    };
    all.map(one).to_vec()
}

#[test]
fn each_method_chooses_as_calico_does() {
    let machine = machine();
    for (method, local, ipv4, ipv6) in [
        ("first-found", "", "203.0.113.10/24", "2001:db8:7::10/64"),
        ("skip-interface=^bond", "", "198.51.100.10/25", "2001:db8::10/64"),
        ("skip-interface=bond.*, eth1", "", "192.0.2.10/24", "2001:db8::10/64"),
        ("skip-interface=.*", "", "", ""),
        ("interface=eth.*", "", "198.51.100.10/25", "2001:db8::10/64"),
        ("interface=eth0", "", "192.0.2.10/24", "2001:db8::10/64"),
        // A name that the user gives may be a virtual interface's.
        ("interface=docker0", "", "172.17.0.1/16", ""),
        ("interface=lo", "", "", ""),
        ("interface=eno.*,bond0", "", "203.0.113.10/24", "2001:db8:7::10/64"),
        ("cidr=192.0.2.11/32,2001:db8::/64", "", "192.0.2.11/24", "2001:db8::10/64"),
        ("cidr=192.0.0.0/16", "", "192.0.2.10/24", ""),
        ("cidr=10.99.0.0/16", "", "", ""),
        ("can-reach=192.0.2.1", "192.0.2.11", "192.0.2.11/24", ""),
        ("can-reach=host.example", "", "", ""),
        ("can-reach=127.0.0.1", "127.0.0.1", "", ""),
    ] {
        let parsed: AddressMethod = method.parse().unwrap();
        let local = local.parse().ok();
        for (version, expected) in [(IpVersion::V4, ipv4), (IpVersion::V6, ipv6)] {
            let chosen =
                parsed.choose(version, &machine, |name| Machine::Linux.is_virtual(name), local, None);
            match expected {
                "" => {
                    let problem = chosen.unwrap_err();
                    assert!(problem.contains(method.split('=').next().unwrap()), "{problem}");
                    assert!(problem.contains("eth0 (") && problem.contains("autodetection"), "{problem}");
                }
                expected => {
                    assert_eq!(chosen.unwrap().unwrap().to_string(), expected, "{method} {version}");
                }
            }
        }
    }
    let by_kubelet = AddressMethod::InternalIp.choose(IpVersion::V4, &machine, |_| false, None, None);
    assert_eq!(by_kubelet, Ok(None));
}

/// A daemon (keepalived, kube-vip) puts its address beside or before that of the node, and the network service may restore its own one later.
#[test]
fn what_is_announced_stays_and_networks_precede_single_addresses() {
    let with = |eth0: &[&str], others: &[(&str, &[&str])]| -> Vec<Interface> {
        let all = [("lo", &["127.0.0.1/8"][..]), ("eth0", eth0)];
        let one = |(name, addresses): &(&str, &[&str])| Interface {
            name: (*name).to_owned(),
            addresses: addresses.iter().map(|net| net.parse().unwrap()).collect(),
        };
        all.iter().chain(others).map(one).collect()
    };
    let (vip, own) = ("192.0.2.50/32", "192.0.2.11/24");
    let methods = [
        "first-found",
        "interface=eth.*",
        "skip-interface=wlan.*",
        "cidr=192.0.2.0/24",
        "can-reach=192.0.2.1",
    ];
    for (machine, announced, expected) in [
        (with(&[vip, own], &[]), None, own),
        (with(&[own, vip], &[]), None, own),
        (with(&[vip, own], &[]), Some("192.0.2.11"), own),
        // Announced while the network service had not restored the other one.
        (with(&[vip, own], &[]), Some("192.0.2.50"), own),
        // A cloud gives the node's own address this length.
        (with(&[vip], &[]), None, vip),
        (with(&[vip, "192.0.2.51/32"], &[]), Some("192.0.2.51"), "192.0.2.51/32"),
        // A second one of the network, with which the first is no less right.
        (with(&["192.0.2.50/24", own], &[]), None, "192.0.2.50/24"),
        (with(&["192.0.2.50/24", own], &[]), Some("192.0.2.11"), own),
        (with(&["192.0.2.50/24", own], &[]), Some("192.0.2.9"), "192.0.2.50/24"),
    ] {
        for method in methods {
            let parsed: AddressMethod = method.parse().unwrap();
            let local = machine[1].addresses[0].addr();
            let chosen = parsed.choose(
                IpVersion::V4,
                &machine,
                |name| Machine::Linux.is_virtual(name),
                Some(local),
                announced.map(|it| it.parse().unwrap()),
            );
            assert_eq!(chosen.unwrap().unwrap().to_string(), expected, "{method} {announced:?} {machine:?}");
        }
    }
    // An interface that was made later has what the method prefers, but the other nodes know the first.
    let two = with(&[own], &[("eth1", &["198.51.100.10/25"]), ("kube-ipvs0", &["198.51.100.200/24"])]);
    for (method, announced, expected) in [
        ("first-found", None, "198.51.100.10/25"),
        ("first-found", Some("192.0.2.11"), own),
        ("first-found", Some("198.51.100.200"), "198.51.100.10/25"),
        ("interface=eth1", Some("192.0.2.11"), "198.51.100.10/25"),
        ("skip-interface=eth0", Some("192.0.2.11"), "198.51.100.10/25"),
        ("cidr=198.51.100.0/25", Some("192.0.2.11"), "198.51.100.10/25"),
        ("can-reach=192.0.2.1", Some("198.51.100.10"), own),
    ] {
        let parsed: AddressMethod = method.parse().unwrap();
        let (local, announced) =
            (own.parse::<IpNet>().unwrap().addr(), announced.map(|it| it.parse().unwrap()));
        let chosen = parsed.choose(
            IpVersion::V4,
            &two,
            |name| Machine::Linux.is_virtual(name),
            Some(local),
            announced,
        );
        assert_eq!(chosen.unwrap().unwrap().to_string(), expected, "{method} {announced:?}");
    }
    let six = with(&["2001:db8::50/128", "2001:db8::11/64"], &[]);
    let chosen = AddressMethod::FirstFound.choose(IpVersion::V6, &six, |_| false, None, None);
    assert_eq!(chosen.unwrap().unwrap().to_string(), "2001:db8::11/64");
}

#[test]
fn an_expression_that_would_take_megabytes_is_refused() {
    let error = "interface=\\w{500}".parse::<AddressMethod>().unwrap_err();
    assert!(error.contains("size limit"), "{error}");
    assert!("interface=(?i)^(eth|en|wl)[a-z0-9]+$".parse::<AddressMethod>().is_ok());
}

#[test]
fn methods_are_written_as_they_are_read() {
    for text in [
        "kubernetes-internal-ip",
        "first-found",
        "can-reach=2001:db8::1",
        "interface=eth.*,^en[0-9]$",
        "skip-interface=bond0",
        "cidr=192.0.2.0/24,2001:db8::/64",
    ] {
        assert_eq!(text.parse::<AddressMethod>().unwrap().to_string(), text);
    }
    for (text, problem) in [
        ("", "is none of"),
        ("first", "is none of"),
        ("first-found=eth0", "is none of"),
        ("interface", "is none of"),
        ("interface=", "an empty part"),
        ("interface=eth0,,eth1", "an empty part"),
        ("interface=eth(", "eth("),
        ("cidr=192.0.2.0", "is no network"),
        ("can-reach= ", "is none of"),
    ] {
        let error = text.parse::<AddressMethod>().unwrap_err();
        assert!(error.contains(problem), "{text}: {error}");
    }
}

/// The names are those of Windows; a switch has taken the address over.
#[test]
fn a_windows_machine_is_asked_too() {
    use std::sync::Arc;
    use tortie_hcn::{Adapter, IpHelper};
    use tortie_hns_emulator::EmulatedHost;
    use tortie_windows::HostRoutes;

    let adapters = [
        ("Loopback Pseudo-Interface 1", "127.0.0.1/8", true),
        ("vEthernet (Ethernet)", "192.0.2.14/24", true),
        ("vEthernet (nat)", "172.20.0.1/20", true),
        ("vEthernet (Calico_ep)", "10.244.3.2/26", true),
        ("Wi-Fi", "203.0.113.8/24", false),
    ];
    let adapter = |(name, address, is_up): (&str, &str, bool)| Adapter {
        index: 1,
        name: name.to_owned(),
        mac: None,
        mtu: 1500,
        is_up,
        addresses: vec![address.parse().unwrap()],
    };
    let ip: Arc<dyn IpHelper> = Arc::new(EmulatedHost::new(adapters.map(adapter).into(), vec![]));
    let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
    let machine = Machine::Windows(host);
    for (method, expected) in [
        ("first-found", Some("192.0.2.14/24")),
        ("interface=nat", Some("172.20.0.1/20")),
        ("interface=Wi-Fi", None),
        ("skip-interface=Ethernet", None),
        ("cidr=192.0.0.0/16", Some("192.0.2.14/24")),
    ] {
        let found = find_here(&method.parse().unwrap(), IpVersion::V4, &machine, None);
        assert_eq!(found.ok().flatten().map(|net| net.to_string()).as_deref(), expected, "{method}");
    }
    let finder = AddressFinder { methods: AddressMethods::default(), machine };
    assert_eq!(finder.prefix_length("192.0.2.14".parse().unwrap()), Some(24));
    for (address, lacks) in [("192.0.2.15", true), ("192.0.2.14", false)] {
        assert_eq!(finder.lacks(address.parse().unwrap()), Some(lacks), "{address}");
    }
    let unknown = AddressFinder { machine: Machine::Windows(Host::unknown()), ..finder };
    assert_eq!(unknown.prefix_length("192.0.2.14".parse().unwrap()), None);
    assert_eq!(unknown.lacks("192.0.2.15".parse().unwrap()), None, "a machine that cannot be read");
}

#[tokio::test]
async fn a_windows_machine_tells_of_new_addresses() {
    use tortie_hcn::Adapter;
    use tortie_hns_emulator::EmulatedHost;
    use tortie_windows::HostRoutes;

    let ip = Arc::new(EmulatedHost::new(vec![], vec![]));
    let machine = Machine::Windows(Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip.clone(), None))));
    let changed = Arc::new(Notify::new());
    let _watch = machine.watch(changed.clone()).unwrap();
    assert_eq!(machine.global_addresses(), BTreeSet::new());
    let nets = ["192.0.2.14/24", "169.254.3.3/16"].map(|net| net.parse().unwrap());
    let name = "Ethernet".to_owned();
    let adapter = Adapter { index: 1, name, mac: None, mtu: 1500, is_up: true, addresses: nets.into() };
    ip.change(|state| state.adapters.push(adapter));
    tokio::time::timeout(std::time::Duration::from_secs(30), changed.notified()).await.unwrap();
    let expected = ("Ethernet".to_owned(), "192.0.2.14/24".parse().unwrap());
    assert_eq!(machine.global_addresses(), BTreeSet::from([expected]));
}

/// Interfaces of the kernel, in a network namespace.
#[cfg(target_os = "linux")]
#[test]
fn methods_find_addresses_of_the_machine() {
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};

    let find_all = || {
        let mut routes = RouteSocket::open().unwrap();
        for (name, addresses) in
            [("eth0", &["192.0.2.10/24", "2001:db8::10/64"][..]), ("eth1", &["198.51.100.10/24"])]
        {
            let (kind, up) = (NewLinkKind::Bridge, true);
            let link = NewLink { name, kind, mac: None, mtu: None, up, controller: None };
            routes.create(&link).unwrap();
            let link = routes.link(name).unwrap().unwrap().index;
            for net in addresses.iter().map(|net| net.parse::<IpNet>().unwrap()) {
                let address = Address { link, address: net.addr(), prefix_length: net.prefix_len() };
                routes.change(&Change::AddAddress(address)).unwrap();
            }
        }
        for (method, version, expected) in [
            ("first-found", IpVersion::V4, "198.51.100.10/24"),
            ("first-found", IpVersion::V6, "2001:db8::10/64"),
            ("interface=eth0", IpVersion::V4, "192.0.2.10/24"),
            ("skip-interface=eth1", IpVersion::V4, "192.0.2.10/24"),
            ("cidr=192.0.2.0/24", IpVersion::V4, "192.0.2.10/24"),
            ("can-reach=192.0.2.77", IpVersion::V4, "192.0.2.10/24"),
            ("can-reach=198.51.100.77", IpVersion::V4, "198.51.100.10/24"),
            ("can-reach=203.0.113.1", IpVersion::V4, "No route of this family leads to 203.0.113.1"),
            ("can-reach=192.0.2.77", IpVersion::V6, "No route of this family"),
            ("interface=eth1", IpVersion::V6, "eth0 (2001:db8::10/64)"),
        ] {
            let found = find_here(&method.parse().unwrap(), version, &Machine::Linux, None);
            let shown = found.map_or_else(|problem| problem, |net| net.unwrap().to_string());
            assert!(shown.contains(expected), "{method} {version}: {shown}");
        }
    };
    NetNs::create().unwrap().run(find_all).unwrap();
}
