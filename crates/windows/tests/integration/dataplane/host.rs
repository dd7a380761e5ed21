//! The machine under HNS: which adapter a network gets, which addresses reach pods, and routes that a switch loses.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::dataplane::node::*;
use serde_json::json;
use testkit::Stateful;
use tortie_api::calico::FelixConfigurationSpec;
use tortie_api::net::{Direction, Protocol};
use tortie_dataplane::{Dataplane, Delta, Reason, Report, Settings};
use tortie_hcn::schema::{NetAdapterName, OutBoundNat};
use tortie_hcn::{Adapter, Call, Failure, HResult, Hcn, HcnExt, IpHelper, IpRoute, Kind};
use tortie_hns_emulator::{Config, EmulatedHost, Emulator, Recorder};
use tortie_policy::program::{EndpointProgram, Flow};
use tortie_windows::{
    Host, HostRoutes, NETWORK, NetworkKind, NetworkSpec, WindowsDataplane, adapter_of, ensure_network,
    ensure_network_on, remove_anchor,
};

pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 254);

pub(crate) fn adapter(index: u32, name: &str, addresses: &[&str]) -> Adapter {
    let mac = Some([0, 0x15, 0x5d, 0, 0, u8::try_from(index % 100).unwrap()]);
    let addresses = addresses.iter().map(|net| net.parse().unwrap()).collect();
    Adapter { index, name: name.to_owned(), mac, mtu: 1500, is_up: true, addresses }
}

pub(crate) fn route(interface: u32, destination: &str, next_hop: Ipv4Addr) -> IpRoute {
    let destination = destination.parse().unwrap();
    IpRoute { interface, destination, next_hop: next_hop.into(), metric: 10, is_own: false }
}

/// What the system makes for an address.
pub(crate) fn own(interface: u32, destination: &str) -> IpRoute {
    IpRoute { is_own: true, ..route(interface, destination, Ipv4Addr::UNSPECIFIED) }
}

/// Two routes that a switch loses: that of the metadata service, and one of an administrator.
pub(crate) fn lost() -> [(&'static str, Ipv4Addr); 2] {
    [("169.254.169.254/32", Ipv4Addr::UNSPECIFIED), ("192.168.0.0/16", Ipv4Addr::new(172, 16, 0, 253))]
}

pub(crate) fn machine() -> Arc<EmulatedHost> {
    let adapters = vec![
        adapter(4, "Ethernet", &["172.16.0.3/24", "fe80::3/64"]),
        adapter(5, "Ethernet 2", &["198.51.100.3/24", "198.51.100.4/24"]),
        adapter(6, "Ethernet 3", &["169.254.3.3/16"]),
        adapter(7, "vEthernet (nat)", &["172.20.0.1/20"]),
        Adapter { is_up: false, ..adapter(8, "Wi-Fi", &["203.0.113.8/24"]) },
        adapter(1, "Loopback Pseudo-Interface 1", &["127.0.0.1/8"]),
    ];
    let mut routes = vec![
        own(4, "172.16.0.0/24"),
        own(4, "172.16.0.3/32"),
        own(4, "224.0.0.0/4"),
        route(4, "0.0.0.0/0", GATEWAY),
        own(5, "198.51.100.0/24"),
        route(5, "10.99.0.0/16", Ipv4Addr::new(198, 51, 100, 1)),
    ];
    routes.extend(lost().map(|(net, next_hop)| route(4, net, next_hop)));
    Arc::new(EmulatedHost::new(adapters, routes))
}

pub(crate) fn host(
    machine: &Arc<EmulatedHost>,
    selector: Option<&str>,
    file: Option<std::path::PathBuf>,
) -> Host {
    let ip: Arc<dyn IpHelper> = machine.clone();
    let routes = Arc::new(HostRoutes::new(ip.clone(), file));
    Host::new(ip, selector.map(|text| text.parse().unwrap()), routes)
}

pub(crate) fn hns(machine: &Arc<EmulatedHost>) -> Emulator {
    Emulator::new(Config::new(Config::SERVER_2022, NODE)).on_host(machine.clone())
}

fn name_of(hns: &Emulator) -> Option<String> {
    let network = hns.network_by_name(NETWORK).unwrap().unwrap();
    let mut named = network.policies.iter().filter_map(|policy| policy.settings::<NetAdapterName>().unwrap());
    named.next().map(|named| named.network_adapter_name)
}

#[test]
fn the_adapter_is_chosen_or_refused_before_anything_happens_to_it() {
    for (selector, node, expected) in [
        (None, NODE, Ok("Ethernet")),
        (None, [198, 51, 100, 4].into(), Ok("Ethernet 2")),
        (Some("ethernet 2"), NODE, Ok("ethernet 2")),
        (Some("198.51.100.4"), NODE, Ok("Ethernet 2")),
        (Some("00-15-5D-00-00-04"), NODE, Ok("Ethernet")),
        (Some("00:15:5d:00:00:05"), NODE, Ok("Ethernet 2")),
        (
            Some("Ethernet 9"),
            NODE,
            Err("no adapter has the name Ethernet 9; the adapters are Ethernet, Ethernet 2"),
        ),
        (Some("192.0.2.9"), NODE, Err("no adapter has the address 192.0.2.9")),
        (None, [192, 0, 2, 9].into(), Err("no adapter has the node's address 192.0.2.9")),
        (Some("Ethernet 3"), NODE, Err("Ethernet 3 has no IPv4 address of its network")),
        (Some("Wi-Fi"), NODE, Err("Wi-Fi is down")),
        (None, [172, 20, 0, 1].into(), Err("on vEthernet (nat), an adapter of another virtual switch")),
        (Some("172.20.0.1"), NODE, Err("on vEthernet (nat)")),
    ] {
        let machine = machine();
        let (hns, host) = (hns(&machine), host(&machine, selector, None));
        let before = machine.adapters().unwrap();
        let made = ensure_network_on(&hns, &spec(), &[], (&host, Some(node)));
        match expected {
            Ok(name) => {
                made.unwrap();
                let found = name_of(&hns).unwrap();
                assert!(found.eq_ignore_ascii_case(name), "{selector:?} {node}: {found}");
                let again = ensure_network_on(&hns, &spec(), &[], (&host, Some(node))).unwrap();
                assert_eq!(again.other_adapter, None, "{selector:?}: the switch has its address now");
            }
            Err(why) => {
                let error = made.unwrap_err().to_string();
                assert!(error.contains(why) && error.contains("--adapter"), "{selector:?} {node}: {error}");
                assert_eq!(machine.adapters().unwrap(), before);
                assert!(hns.network_by_name(NETWORK).unwrap().is_none());
            }
        }
    }
}

/// An anchor network, that of Docker, or a left-over one. The overlay network goes with each restart of the machine, and the others
/// need not.
#[test]
fn the_physical_adapter_of_an_existing_switch_can_be_used() {
    let anchor = NetworkSpec {
        name: "External".into(),
        block: "10.99.0.0/26".parse().unwrap(),
        ipv6: None,
        kind: NetworkKind::Overlay { vni: 9_999 },
        adapter: Some("Ethernet".into()),
    };
    for (is_listed, selector, expected) in [
        (true, None, Ok("Ethernet")),
        (true, Some("172.16.0.3"), Ok("Ethernet")),
        (true, Some("ethernet"), Ok("ethernet")),
        (true, Some("00:15:5d:00:00:04"), Ok("Ethernet")),
        (false, Some("Ethernet"), Ok("Ethernet")),
        (false, Some("00:15:5d:00:00:04"), Ok("Ethernet")),
        (false, None, Err(r#"name it (--adapter "Ethernet")"#)),
        (false, Some("172.16.0.3"), Err(r#"name it (--adapter "Ethernet")"#)),
    ] {
        let machine = machine();
        let hns = hns(&machine);
        ensure_network(&hns, &anchor).unwrap();
        if !is_listed {
            machine.change(|state| state.adapters.retain(|adapter| adapter.name != "Ethernet"));
        }
        let host = host(&machine, selector, None);
        let made = ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE)));
        match expected {
            Ok(name) => {
                made.unwrap_or_else(|error| panic!("{is_listed} {selector:?}: {error}"));
                assert_eq!(name_of(&hns).unwrap(), name);
            }
            Err(why) => {
                let error = made.unwrap_err().to_string();
                assert!(error.contains(why), "{error}");
            }
        }
    }
}

#[test]
fn what_selects_no_physical_adapter_is_refused() {
    use tortie_windows::AdapterSelector;
    for text in
        ["", " ", "vEthernet (Ethernet)", "VETHERNET", "169.254.1.1", "127.0.0.1", "0.0.0.0", "fe80::1"]
    {
        assert!(text.parse::<AdapterSelector>().is_err(), "{text:?}");
    }
    assert_eq!("Ethernet 2 ".parse(), Ok(AdapterSelector::Name("Ethernet 2".to_owned())));
    assert_eq!("10.0.0.1".parse(), Ok(AdapterSelector::Address([10, 0, 0, 1].into())));
}

/// The selftest makes a network on the same switch.
#[test]
fn a_network_without_the_name_of_its_adapter_is_no_place_for_a_test() {
    let hns = hns(&machine());
    for (adapter, expected) in [(Some("Ethernet"), Ok("Ethernet")), (Some(""), Err(())), (None, Err(()))] {
        let spec = NetworkSpec { adapter: adapter.map(str::to_owned), ..spec() };
        let mut network = hns.network(ensure_network(&hns, &spec).unwrap().id).unwrap();
        network.policies.retain(|policy| adapter.is_some() || !policy.is::<NetAdapterName>());
        match (adapter_of(&network), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(error), Err(())) => assert!(error.to_string().contains("--adapter"), "{error}"),
            (found, _) => panic!("{adapter:?}: {found:?}"),
        }
        hns.delete_network(network.id).unwrap();
    }
}

/// A node on this machine whose network exists.
pub(crate) fn node_on(machine: &Arc<EmulatedHost>) -> Node {
    let hns = Arc::new(Recorder::new(hns(machine)));
    let host = host(machine, None, None);
    ensure_network_on(&*hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    let mut node = Node::over(hns.clone());
    let hcn: Arc<dyn Hcn> = hns;
    let services = vec!["10.96.0.0/12".parse().unwrap()];
    let dataplane = WindowsDataplane::new(hcn).with_host(host).with_services(services);
    node.wiring = node.wiring.with_networks(dataplane.networks());
    node.dataplane = Stateful::new(dataplane);
    node
}

fn from(source: [u8; 4]) -> Flow {
    Flow {
        protocol: Protocol::TCP,
        source: source.into(),
        source_port: 40_000,
        destination: POD.into(),
        destination_port: 80,
        icmp: None,
    }
}

#[test]
fn every_address_of_the_machine_reaches_its_pods() {
    let machine = machine();
    let mut node = node_on(&machine);
    assert_eq!(node.apply(&[local_node(), own_block(), endpoint(EndpointProgram::default())]).node, []);
    node.connect();
    assert_eq!(node.dataplane.resync(), Report::default());
    let reach = |node: &Node, all: &[[u8; 4]]| -> BTreeSet<[u8; 4]> {
        all.iter().copied().filter(|source| node.passes(Direction::Ingress, &from(*source))).collect()
    };
    let usual = [
        [172, 16, 0, 3],
        [10, 244, 3, 1],
        [198, 51, 100, 3],
        [198, 51, 100, 4],
        [172, 20, 0, 1],
        [203, 0, 113, 8],
    ];
    let never = [[198, 51, 100, 5], [169, 254, 3, 3], [169, 254, 77, 1], [127, 0, 0, 1], [10, 9, 9, 9]];
    let all = [&usual[..], &never].concat();
    assert_eq!(reach(&node, &all), usual.into());
    // An event announces a new address.
    machine.change(|state| state.adapters[1].addresses = vec!["10.9.9.9/24".parse().unwrap()]);
    assert_eq!(node.dataplane.resync(), Report::default());
    let now = [[172, 16, 0, 3], [10, 244, 3, 1], [10, 9, 9, 9], [172, 20, 0, 1], [203, 0, 113, 8]];
    assert_eq!(reach(&node, &all), now.into());
    // What cannot be read changes nothing.
    machine.change(|state| state.fails = true);
    node.dataplane.resync();
    assert_eq!(reach(&node, &all), now.into());
}

fn nat_of(node: &Node) -> Vec<OutBoundNat> {
    node.endpoint().policies.iter().filter_map(|policy| policy.settings().unwrap()).collect()
}

/// A database or a domain controller beside the node answers only to an address of its network. So it is no exception, whatever the adapters
/// have, as in Calico since 2020 (projectcalico/cni-plugin#925).
#[test]
fn the_network_of_the_node_is_no_exception_of_nat() {
    let machine = machine();
    let mut node = node_on(&machine);
    let pools = [("10.244.0.0/16".parse().unwrap(), true)].into();
    let pools = Delta::Settings(Arc::new(Settings::new(&FelixConfigurationSpec::default(), pools)));
    node.apply(&[local_node(), own_block(), allow_all(), pools]);
    node.connect();
    node.apply(&[endpoint(open_program())]);
    let expected = json!([{"Exceptions": ["10.96.0.0/12", "10.244.0.0/16"]}]);
    assert_eq!(json!(nat_of(&node)), expected);
    node.hns.take();
    let addresses = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|net| net.parse().unwrap()).collect();
        let is_carrier = |adapter: &&mut Adapter| adapter.name == "vEthernet (Ethernet)";
        machine.change(|state| state.adapters.iter_mut().find(is_carrier).unwrap().addresses = addresses);
    };
    // A lease is renewed, or the link comes back. Each change of OutBoundNAT would end connections of pods.
    for moment in [&["169.254.3.3/16"][..], &[], &["172.16.0.3/24"]] {
        addresses(moment);
        node.wait(11);
        node.dataplane.resync();
        let changes = format!("{:?}", node.hns.take_changes());
        assert!(!changes.contains("OutBoundNAT"), "{moment:?}: {changes}");
        assert_eq!(json!(nat_of(&node)), expected, "{moment:?}");
    }
}

/// Other programs may change routes all the time.
#[test]
fn a_change_of_a_route_asks_hns_nothing() {
    let machine = machine();
    let mut node = node_on(&machine);
    let notices = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&notices);
    let notify = Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    node.connect();
    node.dataplane.watch(notify);
    assert_eq!(node.dataplane.resync(), Report::default());
    node.hns.take();
    for last in 1..10 {
        let route = route(5, &format!("10.99.{last}.0/24"), Ipv4Addr::new(198, 51, 100, 1));
        machine.change(|state| state.routes.push(route));
        assert_eq!(node.dataplane.resync(), Report::default());
        assert_eq!(node.hns.take(), [], "{last}");
    }
    assert!(notices.load(Ordering::Relaxed) >= 9);
    // An address concerns every pod.
    machine.change(|state| state.adapters[1].addresses = vec!["10.9.9.9/24".parse().unwrap()]);
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_ne!(node.hns.take_changes(), []);
    assert!(node.passes(Direction::Ingress, &from([10, 9, 9, 9])));
    // The usual check comes all the same.
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_ne!(node.hns.take(), []);
}

/// The routes that a switch loses, and that are there.
pub(crate) fn there(machine: &EmulatedHost) -> Vec<String> {
    let routes = machine.routes().unwrap();
    let is_there = |(net, next_hop): &(&str, Ipv4Addr)| {
        routes
            .iter()
            .any(|it| it.destination.to_string() == *net && it.next_hop == *next_hop && it.interface == 104)
    };
    lost().iter().filter(|route| is_there(route)).map(|(net, _)| (*net).to_owned()).collect()
}

pub(crate) fn all() -> Vec<String> {
    lost().map(|(net, _)| net.to_owned()).into()
}

/// A build that refuses the network which keeps the switch.
pub(crate) fn refuse_second_network(call: &Call) -> Option<Result<String, Failure>> {
    let Call::Create { kind: Kind::Network, settings, .. } = call else { return None };
    settings.contains("Tortie-anchor").then(|| Err(Failure::new(HResult::E_FAIL, "no")))
}

/// HNS removes the switch with the last network on it.
#[test]
fn a_second_network_keeps_the_switch_while_the_network_is_made_anew() {
    let machine = machine();
    let hns = Recorder::new(hns(&machine));
    let host = host(&machine, None, None);
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    assert_eq!(host.routes().restore(Instant::now()), None);
    let (before, routes) = (machine.adapters().unwrap(), machine.routes().unwrap());
    let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 4_097 }, ..spec() };
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap();
    assert_eq!((machine.adapters().unwrap(), machine.routes().unwrap()), (before.clone(), routes));
    let names = || hns.networks().unwrap().into_iter().map(|network| network.name).collect::<Vec<_>>();
    assert_eq!(names(), [NETWORK]);

    // A build that refuses the second network: the adapter comes back, and is taken over again.
    hns.set_fault(refuse_second_network);
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    assert_eq!(names(), [NETWORK]);
    assert_eq!(there(&machine), [""; 0], "the switch was removed");
    assert_eq!(host.routes().restore(Instant::now()), None);
    assert_eq!(there(&machine), all());
    assert_eq!(machine.adapters().unwrap().len(), before.len());
}

/// The process ends between two calls.
#[test]
fn a_second_network_of_an_earlier_process_is_used_and_removed() {
    let machine = machine();
    let hns = Recorder::new(hns(&machine));
    let host = host(&machine, None, None);
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    hns.set_fault(|call| {
        matches!(call, Call::Delete { kind: Kind::Network, .. })
            .then(|| Err(Failure::new(HResult::E_FAIL, "no")))
    });
    let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 4_097 }, ..spec() };
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap_err();
    assert_eq!(hns.networks().unwrap().len(), 2);
    // The pods' network cannot be made at first, and then the second one stays for a while.
    let fails = |kind: &'static str, text: &'static str| {
        move |call: &Call| {
            let is_meant = match call {
                Call::Create { kind: Kind::Network, settings, .. } => {
                    kind == "create" && settings.contains(text)
                }
                Call::Delete { kind: Kind::Network, .. } => kind == "delete",
                _ => false,
            };
            is_meant.then(|| Err(Failure::new(HResult::E_FAIL, "no")))
        }
    };
    hns.set_fault(fails("create", "\"Calico\""));
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap_err();
    hns.set_fault(fails("delete", ""));
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap();
    assert_eq!(hns.networks().unwrap().len(), 2);
    hns.set_fault(|_| None);
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap();
    assert_eq!(hns.networks().unwrap()[0].name, NETWORK);
    assert!(hns.networks().unwrap().len() == 1 && !remove_anchor(&hns).unwrap());
}

/// Windows need not list the physical adapter of a switch. Without the second network's word, nobody could name it.
#[test]
fn a_network_is_made_anew_on_a_switch_whose_adapter_is_not_listed() {
    let machine = machine();
    let hns = Recorder::new(hns(&machine));
    let host = host(&machine, None, None);
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    machine.change(|state| state.adapters.retain(|adapter| adapter.name != "Ethernet"));
    let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 4_097 }, ..spec() };
    hns.set_fault(|call| {
        let Call::Create { kind: Kind::Network, settings, .. } = call else { return None };
        settings.contains("\"Calico\"").then(|| Err(Failure::new(HResult::E_FAIL, "no")))
    });
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap_err();
    hns.set_fault(|_| None);
    // Another process goes on.
    let host = self::host(&machine, None, None);
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap();
    assert_eq!(name_of(hns.inner()).as_deref(), Some("Ethernet"));
    assert_eq!(hns.networks().unwrap().len(), 1);
}

#[test]
fn no_network_is_made_while_the_routes_cannot_be_kept() {
    let machine = machine();
    let nowhere = Some("/nowhere/routes.json".into());
    let (hns, host) = (hns(&machine), host(&machine, None, nowhere));
    let error = ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap_err().to_string();
    assert!(error.contains("the routes of Ethernet cannot be kept in /nowhere/routes.json"), "{error}");
    machine.change(|state| state.fails = true);
    let error = ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap_err().to_string();
    assert!(error.contains("cannot read"), "{error}");
    assert!(hns.network_by_name(NETWORK).unwrap().is_none());
}

#[test]
fn missing_routes_are_in_the_report() {
    let machine = machine();
    machine.change(|state| state.is_slow = true);
    let mut node = node_on(&machine);
    let host = host(&machine, None, None);
    node.dataplane = Stateful::new(WindowsDataplane::new(node.hns.clone()).with_host(host.clone()));
    node.hns.delete_network(node.hns.network_by_name(NETWORK).unwrap().unwrap().id).unwrap();
    machine.change(|state| *state = super::host::machine().change(|fresh| fresh.clone()));
    machine.change(|state| state.is_slow = true);
    let made = node.apply(&[local_node(), own_block()]);
    assert_eq!(host.routes().restore(Instant::now()).unwrap().reason, Reason::HostRouteMissing, "{made:?}");
    let report = node.dataplane.resync();
    assert!(report.node.iter().any(|condition| condition.reason == Reason::HostRouteMissing), "{report:?}");
    assert!(!report.node.iter().any(|condition| condition.reason == Reason::AdapterNotUsable), "{report:?}");
    machine.settle();
    host.routes().restore(Instant::now());
    let report = node.dataplane.resync();
    assert!(!report.node.iter().any(|condition| condition.reason == Reason::HostRouteMissing), "{report:?}");
}
