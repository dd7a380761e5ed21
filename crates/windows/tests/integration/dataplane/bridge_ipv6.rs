//! A network of type L2Bridge with both families.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::dataplane::bridge::*;
use crate::dataplane::node::*;
use ipnet::Ipv6Net;
use serde_json::json;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, IpVersion, Protocol};
use tortie_dataplane::{
    Delta, Endpoint, LocalEnd, LocalNode, PodAddress, PodAttachment, PodWiring, Reason, Report, Route,
    RouteTarget, Settings,
};
use tortie_hcn::schema::{self, Modify, RequestType};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind};
use tortie_hns_emulator::{Config, Emulator, Recorder, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Flow, Member, Rule, SetId, SetKind};
use tortie_windows::{
    Host, NetworkSpec, PodNetwork, WindowsWiring, endpoint_id, ensure_network, ensure_network_on,
};

const BLOCK: &str = "fd00:10:244::40/122";
const GATEWAY_V6: &str = "fd00:10:244::42";
const POD_V6: &str = "fd00:10:244::45";
const NODE_V6: &str = "2001:db8::3";

fn both() -> NetworkSpec {
    NetworkSpec { ipv6: Some(BLOCK.parse().unwrap()), ..bridge() }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn with_ipv6(pod: PodAttachment) -> PodAttachment {
    let six = PodAddress { address: ip(POD_V6), block: BLOCK.parse().unwrap() };
    PodAttachment { addresses: [pod.addresses.clone(), vec![six]].concat(), ..pod }
}

/// The subnets of the network.
fn subnets(hns: &dyn Hcn) -> Vec<String> {
    network(hns).subnets().map(|subnet| subnet.ip_address_prefix.clone()).collect()
}

fn addresses_of_node(hns: &dyn Hcn) -> Vec<String> {
    let [own] = &node_endpoints(hns)[..] else { panic!("one endpoint of the node") };
    own.ip_configurations.iter().map(|config| config.ip_address.clone()).collect()
}

#[test]
fn the_documents_name_both_families() {
    let hns = hns();
    let made = ensure_network(&*hns, &both()).unwrap();
    assert_eq!((made.gateway, made.gateway_v6), (GATEWAY, Some(GATEWAY_V6.parse().unwrap())));
    assert_eq!(made.without_ipv6, None);
    let wiring = WindowsWiring::new(hns.clone());
    assert!(wiring.has_ipv6().unwrap());
    let pod = with_ipv6(attachment(hns.create_namespace(&Default::default()).unwrap()));
    let interface = wiring.connect(&pod).unwrap();
    let shown = interface.addresses.iter().map(|own| format!("{} {}", own.address, own.gateway));
    assert_eq!(
        shown.collect::<Vec<_>>(),
        ["10.244.3.5/26 10.244.3.2", "fd00:10:244::45/122 fd00:10:244::42"]
    );
    let created = hns.take_changes().into_iter().filter_map(|call| match call {
        Call::Create { kind: Kind::Network | Kind::Endpoint, settings, .. } => Some(document(&settings)),
        _ => None,
    });
    let [of_network, of_node, of_pod] = &created.collect::<Vec<_>>()[..] else { panic!("three documents") };
    let route = |next_hop: &str, to: &str| json!([{"NextHop": next_hop, "DestinationPrefix": to}]);
    assert_eq!(
        of_network["Ipams"][0]["Subnets"],
        json!([
            {"IpAddressPrefix": "10.244.3.0/26", "Routes": route("10.244.3.1", "0.0.0.0/0")},
            {"IpAddressPrefix": BLOCK, "Routes": route("fd00:10:244::41", "::/0")},
        ])
    );
    assert_eq!(
        of_node["IpConfigurations"],
        json!([
            {"IpAddress": "10.244.3.2", "PrefixLength": 26},
            {"IpAddress": GATEWAY_V6, "PrefixLength": 122},
        ])
    );
    assert_eq!(of_pod["IpConfigurations"], json!([{"IpAddress": "10.244.3.5"}, {"IpAddress": POD_V6}]));
    assert_eq!(of_pod["Routes"], json!([route("10.244.3.2", "0.0.0.0/0")[0], route(GATEWAY_V6, "::/0")[0]]));
    ensure_network(&*hns, &both()).unwrap();
    wiring.connect(&pod).unwrap();
    assert_eq!(hns.take_changes(), [], "again");
    wiring.check(&pod).unwrap();
    let error = wiring.check(&attachment(pod.netns.parse().unwrap())).unwrap_err().to_string();
    assert!(error.contains(r#"the addresses ["10.244.3.5", "fd00:10:244::45"], not 10.244.3.5"#), "{error}");
}

#[test]
fn only_a_network_with_ipv6_gives_it_to_pods() {
    for spec in [spec(), bridge()] {
        let hns = hns();
        ensure_network(
            &*hns,
            &NetworkSpec { ipv6: both().ipv6.filter(|_| spec == crate::dataplane::node::spec()), ..spec },
        )
        .unwrap();
        let wiring = WindowsWiring::new(hns.clone());
        assert!(!wiring.has_ipv6().unwrap());
        let pod = with_ipv6(attachment(hns.create_namespace(&Default::default()).unwrap()));
        let error = wiring.connect(&pod).unwrap_err().to_string();
        assert!(error.contains("no subnet of it has the address fd00:10:244::45"), "{error}");
    }
}

/// Windows has no pods with IPv6 only, and HNS one address of each family.
#[test]
fn other_combinations_of_addresses_are_refused() {
    let hns = hns();
    ensure_network(&*hns, &both()).unwrap();
    let wiring = WindowsWiring::new(hns.clone());
    let pod = with_ipv6(attachment(hns.create_namespace(&Default::default()).unwrap()));
    let [four, six] = &pod.addresses[..] else { panic!("{pod:?}") };
    for addresses in [vec![*six], vec![*four; 2], vec![*six; 2], vec![]] {
        let error = wiring.connect(&PodAttachment { addresses, ..pod.clone() }).unwrap_err().to_string();
        assert!(error.contains("exactly one IPv4 address, and one IPv6 address at most"), "{error}");
    }
    // The order does not matter.
    let addresses = vec![*six, *four];
    wiring.connect(&PodAttachment { addresses, ..pod }).unwrap();
}

/// HNS of Windows Server 2019. What it says about IPv6 is an assumption; that IPv4 does not depend on it is the point.
#[test]
fn a_network_that_is_refused_with_ipv6_has_none() {
    let hns = Recorder::new(Emulator::new(Config::new(Config::SERVER_2019, NODE)));
    let host = Host::unknown();
    let ensure = || ensure_network_on(&hns, &both(), &[], (&host, None)).unwrap();
    let made = ensure();
    let why = made.without_ipv6.clone().unwrap();
    assert!(why.starts_with("HNS refuses the network with it: "), "{why}");
    assert_eq!((made.gateway_v6, subnets(&hns)), (None, vec!["10.244.3.0/26".to_owned()]));
    assert_eq!(addresses_of_node(&hns), ["10.244.3.2"]);
    hns.take();
    assert_eq!(ensure(), made);
    assert_eq!(hns.take_changes(), [], "it is not made anew at each check");
    // The node has given its IPv6 block up, so what HNS refuses says nothing to it.
    assert_eq!(ensure_network_on(&hns, &bridge(), &[], (&host, None)).unwrap().without_ipv6, None);
}

/// Without IPv6 a moment later, it would succeed, and IPv6 would be lost until the agent starts again.
#[test]
fn a_passing_error_says_nothing_about_ipv6() {
    for (kind, code) in [
        (Kind::Network, HResult::HCN_E_SWITCH_NOT_FOUND),
        (Kind::Network, HResult::HCN_E_NETWORK_ALREADY_EXISTS),
        (Kind::Endpoint, HResult::HCN_E_PORT_NOT_FOUND),
        (Kind::Endpoint, HResult::ERROR_ALREADY_EXISTS),
    ] {
        let (hns, host) = (hns(), Host::unknown());
        let mut left = 1;
        hns.set_fault(move |call| {
            let is_it = matches!(call, Call::Create { kind: made, .. } if *made == kind) && left > 0;
            is_it.then(|| {
                left -= 1;
                Err(Failure::new(code, "not yet"))
            })
        });
        ensure_network_on(&*hns, &both(), &[], (&host, None)).unwrap_err();
        let made = remade(&*hns, &host);
        assert_eq!((made.without_ipv6, made.gateway_v6), (None, Some(GATEWAY_V6.parse().unwrap())), "{code}");
        assert_eq!(addresses_of_node(&*hns), ["10.244.3.2", GATEWAY_V6]);
    }
}

fn remade(hns: &dyn Hcn, host: &Host) -> PodNetwork {
    ensure_network_on(hns, &both(), &[], (host, None)).unwrap()
}

/// The IPv6 pool came after the network.
#[test]
fn a_network_without_ipv6_is_made_anew_when_no_pod_uses_it() {
    let (hns, host) = (hns(), Host::unknown());
    let before = ensure_network(&*hns, &bridge()).unwrap();
    let wiring = WindowsWiring::new(hns.clone());
    let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
    wiring.connect(&pod).unwrap();
    hns.take();
    let used = remade(&*hns, &host);
    assert_eq!((used.id, used.gateway_v6, hns.take_changes()), (before.id, None, vec![]));
    let why = used.without_ipv6.unwrap();
    assert!(
        why.contains("was made without a subnet for fd00:10:244::40/122, and is used by 1 endpoints"),
        "{why}"
    );
    wiring.check(&pod).unwrap();

    wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    let made = remade(&*hns, &host);
    assert_ne!(made.id, before.id);
    assert_eq!((made.without_ipv6, made.gateway_v6), (None, Some(GATEWAY_V6.parse().unwrap())));
    assert_eq!(addresses_of_node(&*hns), ["10.244.3.2", GATEWAY_V6]);
    // Without IPv6 block, the network stays as it is.
    let kept = ensure_network(&*hns, &bridge()).unwrap();
    assert_eq!((kept.id, kept.gateway_v6), (made.id, made.gateway_v6));
}

/// The node has another block than when the network was made.
#[test]
fn pods_get_no_addresses_of_a_block_without_subnet() {
    let (hns, host) = (hns(), Host::unknown());
    let other: Ipv6Net = "fd00:10:244::80/122".parse().unwrap();
    ensure_network(&*hns, &NetworkSpec { ipv6: Some(other), ..bridge() }).unwrap();
    let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
    WindowsWiring::new(hns.clone()).connect(&pod).unwrap();
    let used = remade(&*hns, &host);
    // Its pods may have addresses of the former one.
    let gateway = Some("fd00:10:244::82".parse().unwrap());
    assert!(used.without_ipv6.is_some() && used.gateway_v6 == gateway, "{used:?}");
    assert_eq!(subnets(&*hns), ["10.244.3.0/26".to_owned(), other.to_string()]);
}

/// New pods get IPv4 only, because no address of the node's block fits.
#[test]
fn a_network_with_the_subnet_of_another_block_gives_no_ipv6() {
    let mut node = on_both();
    node.connect_node();
    let wiring = WindowsWiring::new(node.hns.clone()).with_pod_network(node.dataplane.current_network());
    node.dataplane.apply(&[local(), own_block(), own_ipv6_block()]);
    assert!(wiring.has_ipv6().unwrap());
    let pod = attachment(node.hns.create_namespace(&Default::default()).unwrap());
    wiring.connect(&pod).unwrap();
    let other = Delta::Route(Route {
        destination: "fd00:10:244::80/122".parse().unwrap(),
        target: RouteTarget::Local,
    });
    let report = node.dataplane.apply(&[Delta::RouteRemoved(BLOCK.parse().unwrap()), other]);
    assert_eq!(of(Reason::NetworkWithoutIpv6, &report).len(), 1, "{report:?}");
    assert!(!wiring.has_ipv6().unwrap());
    wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    node.dataplane.resync();
    assert!(wiring.has_ipv6().unwrap(), "the network was made anew");
    assert_eq!(subnets(&*node.hns), ["10.244.3.0/26", "fd00:10:244::80/122"]);
}

/// Another program, or an agent that knew no IPv6.
#[test]
fn an_endpoint_of_the_node_without_ipv6_is_replaced() {
    let hns = hns();
    let made = ensure_network(&*hns, &both()).unwrap();
    let own = node_endpoints(&*hns).remove(0);
    let detach = Modify::namespace_endpoint(RequestType::Remove, own.id);
    hns.modify_namespace(own.host_compute_namespace, &detach).unwrap();
    hns.delete_endpoint(own.id).unwrap();
    let ipv4 = own.ip_configurations[..1].to_vec();
    let host_compute_namespace = Guid::ZERO;
    hns.create_endpoint(&schema::Endpoint { ip_configurations: ipv4, host_compute_namespace, ..own })
        .unwrap();
    assert!(!WindowsWiring::new(hns.clone()).has_ipv6().unwrap());
    assert_eq!(ensure_network(&*hns, &both()).unwrap(), made);
    assert_eq!(addresses_of_node(&*hns), ["10.244.3.2", GATEWAY_V6]);
}

/// The node in both families.
fn local() -> Delta {
    let ends = [(IpVersion::V4, NODE.into()), (IpVersion::V6, ip(NODE_V6))];
    let ends = ends.map(|(version, address)| (version, LocalEnd { address, vtep: None }));
    Delta::Node(LocalNode { ends: BTreeMap::from(ends), ..LocalNode::ipv4("minion", NODE, None) })
}

fn own_ipv6_block() -> Delta {
    Delta::Route(Route { destination: BLOCK.parse().unwrap(), target: RouteTarget::Local })
}

fn on_both() -> Bridged {
    let mut adapter = adapter(4, "Ethernet", "172.16.0.3/24");
    adapter.addresses.push("2001:db8::3/64".parse().unwrap());
    Bridged::on(adapter)
}

fn of(reason: Reason, report: &Report) -> Vec<&str> {
    let found = report.node.iter().filter(|condition| condition.reason == reason);
    found.map(|condition| condition.message.as_str()).collect()
}

#[test]
fn the_node_forwards_both_families_and_has_routes_of_both() {
    let mut node = on_both();
    let of_other = [direct("10.244.1.0/26", "172.16.0.1"), direct("fd00:10:244::/122", "2001:db8::1")];
    let target = RouteTarget::Vxlan { node: "linux-1".into() };
    let by_vxlan = Delta::Route(Route { destination: "fd00:10:244::c0/122".parse().unwrap(), target });
    node.dataplane.apply(&[local(), own_block(), own_ipv6_block()]);
    let report = node.dataplane.apply(&[of_other.to_vec(), vec![by_vxlan]].concat());
    let problems = refused(&report);
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[0].contains("no route leads to fd00:10:244::c0/122 of node linux-1"), "{problems:?}");
    assert_eq!(problems[2], "no adapter of the node has the address fd00:10:244::42 yet");
    let mut connected = adapter(9, "vEthernet (Calico_ep)", "10.244.3.2/26");
    connected.addresses.push(format!("{GATEWAY_V6}/122").parse().unwrap());
    node.machine.change(|state| state.adapters.push(connected));
    let gone = Delta::RouteRemoved("fd00:10:244::c0/122".parse().unwrap());
    let report = node.dataplane.apply(&[gone]);
    assert_eq!(refused(&report), [""; 0]);
    assert_eq!(
        node.routes(),
        [
            ("10.244.1.0/26".to_owned(), "172.16.0.1".to_owned(), 104),
            ("fd00:10:244::/122".to_owned(), "2001:db8::1".to_owned(), 104),
        ]
    );
    let forwarding = node.machine.change(|state| state.forwarding.clone());
    assert_eq!(forwarding, [(9, false), (9, true), (104, false), (104, true)].into());
}

/// An IPv6 pool elsewhere in the cluster is no problem of a node whose pods have none of its addresses.
#[test]
fn a_node_without_ipv6_pods_has_no_routes_of_ipv6() {
    let mut node = on_both();
    node.connect_node();
    let of_other = direct("fd00:10:244::/122", "2001:db8::1");
    let report = node.dataplane.apply(&[local(), own_block(), of_other]);
    assert_eq!((refused(&report), node.routes()), (vec![], vec![]));
    assert_eq!(node.machine.change(|state| state.forwarding.clone()), [(9, false), (104, false)].into());
}

#[test]
fn what_ipv6_lacks_is_reported() {
    let mut node = on_both();
    let pools = [("10.244.0.0/16", false), ("fd00:10:244::/56", true), ("fd00:99::/56", true)];
    let pools = pools.map(|(pool, nat)| (pool.parse().unwrap(), nat)).into();
    let windows_policy_sets = WindowsPolicySets::Enabled;
    let settings = Settings { pools, windows_policy_sets, ..Settings::default() };
    let settings = Delta::Settings(Arc::new(settings));
    let report = node.dataplane.apply(&[local(), own_block(), own_ipv6_block(), settings]);
    let [nat] = &of(Reason::OutboundNatDiffers, &report)[..] else { panic!("{report:?}") };
    assert!(nat.starts_with("natOutgoing of fd00:10:244::/56 has no effect on this node"), "{nat}");
    let [sets] = &of(Reason::FieldNotSupported, &report)[..] else { panic!("{report:?}") };
    assert!(sets.contains("nothing shows what HNS does with those of IPv6"), "{sets}");
    assert_eq!(of(Reason::NetworkWithoutIpv6, &report), [""; 0]);
}

#[test]
fn a_network_in_use_without_ipv6_is_reported() {
    let mut node = on_both();
    node.connect_node();
    node.dataplane.apply(&[local(), own_block()]);
    let pod = attachment(node.hns.create_namespace(&Default::default()).unwrap());
    WindowsWiring::new(node.hns.clone()).connect(&pod).unwrap();
    let report = node.dataplane.apply(&[own_ipv6_block()]);
    let [why] = &of(Reason::NetworkWithoutIpv6, &report)[..] else { panic!("{report:?}") };
    assert!(why.starts_with("pods of this node have IPv4 addresses only: network Calico was made"), "{why}");
    assert!(!report.retry, "{report:?}");
    assert_eq!(refused(&report), [""; 0]);
}

/// The IPv6 pool goes, or is not for this node any more. The node still has its block.
#[test]
fn a_node_that_wants_no_ipv6_misses_none() {
    let mut node = on_both();
    node.connect_node();
    node.dataplane.apply(&[local(), own_block()]);
    let pod = attachment(node.hns.create_namespace(&Default::default()).unwrap());
    WindowsWiring::new(node.hns.clone()).connect(&pod).unwrap();
    node.dataplane.apply(&[own_ipv6_block()]);
    for (wanted, expected) in [(false, 0), (true, 1)] {
        node.host.set_ipv6_wanted(wanted);
        let report = node.dataplane.resync();
        assert_eq!(of(Reason::NetworkWithoutIpv6, &report).len(), expected, "{report:?}");
    }
}

/// A pod with both families, which accepts packets of one other pod only.
fn isolated_pod(node: &mut Bridged) -> Report {
    let pod = with_ipv6(attachment(node.hns.create_namespace(&Default::default()).unwrap()));
    WindowsWiring::new(node.hns.clone()).connect(&pod).unwrap();
    node.dataplane.apply(&isolation())
}

fn isolation() -> [Delta; 3] {
    let set = SetId::new("allowed");
    let members = ["10.244.1.7/32", "fd00:10:244::7/128"].map(|net| Member::Net(net.parse().unwrap()));
    let source = EntityMatch { sets: vec![set.clone()], ..EntityMatch::default() };
    let rule = Rule { source, ..Rule::all(Action::Allow) };
    let program = EndpointProgram {
        ingress: vec![tier("default", &["in"], EndOfTier::Deny)],
        ..EndpointProgram::default()
    };
    let Delta::Endpoint(id, known) = endpoint(program) else { unreachable!() };
    let addresses = vec![POD.into(), ip(POD_V6)];
    let endpoint = Delta::Endpoint(id, Arc::new(Endpoint { addresses, ..(*known).clone() }));
    [Delta::SetCreated(set, SetKind::Nets, members.into()), policy("in", vec![rule], vec![]), endpoint]
}

/// The pod accepts what it should, and nothing else, of both families. The node always reaches its pod.
fn is_isolated(hns: &Recorder<Emulator>) {
    let passes = |source: &str, destination: IpAddr| {
        let flow = Flow {
            source: ip(source),
            destination,
            source_port: 40_000,
            destination_port: 80,
            protocol: Protocol::TCP,
            icmp: None,
        };
        let verdict = hns.inner().judge(endpoint_id(CONTAINER), &packet(Direction::Ingress, &flow));
        verdict.unwrap() == Verdict::Allow
    };
    let (four, six) = (POD.into(), ip(POD_V6));
    assert!(passes("10.244.1.7", four) && passes("fd00:10:244::7", six), "allowed");
    assert!(!passes("10.244.1.8", four) && !passes("fd00:10:244::8", six), "not allowed");
    assert!(passes("10.244.3.2", four) && passes(GATEWAY_V6, six) && passes(NODE_V6, six), "the node");
}

/// No ACL names a set, also if that is asked for.
#[test]
fn policy_holds_for_both_families() {
    for windows_policy_sets in [WindowsPolicySets::Disabled, WindowsPolicySets::Enabled] {
        let mut node = on_both();
        node.connect_node();
        let settings = Delta::Settings(Arc::new(Settings { windows_policy_sets, ..Settings::default() }));
        node.dataplane.apply(&[local(), own_block(), own_ipv6_block(), settings]);
        let report = isolated_pod(&mut node);
        assert!(report.endpoints.is_empty(), "{report:?}");
        is_isolated(&node.hns);
        assert!(network(&*node.hns).policies.iter().all(|policy| policy.r#type != "SetPolicy"));
    }
}

/// The node has another block now, and the network is in use. Its pods keep both families, also when the agent starts again.
#[test]
fn policy_of_both_families_stays_while_the_network_differs() {
    let mut node = on_both();
    node.connect_node();
    node.dataplane.apply(&[local(), own_block(), own_ipv6_block()]);
    isolated_pod(&mut node);
    node.hns.take();
    let other =
        Delta::Route(Route { destination: "10.244.9.0/26".parse().unwrap(), target: RouteTarget::Local });
    let gone = Delta::RouteRemoved(spec().block.into());
    let report = node.dataplane.apply(&[gone, other.clone()]);
    assert_eq!(of(Reason::NetworkDiffers, &report).len(), 1, "{report:?}");
    let changed = node.dataplane.apply(&isolation());
    assert!(changed.endpoints.is_empty(), "{changed:?}");
    is_isolated(&node.hns);
    assert_eq!(node.hns.take_changes(), [], "nothing has changed for the pod");

    let mut again = node.restarted();
    let report =
        again.dataplane.apply(&[vec![local(), other, own_ipv6_block()], isolation().to_vec()].concat());
    assert_eq!(of(Reason::NetworkDiffers, &report).len(), 1, "{report:?}");
    is_isolated(&again.hns);
    assert_eq!(again.hns.take_changes(), [], "also not for a new agent");
}
