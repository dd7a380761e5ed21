//! The overlay network and the routes to other nodes.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use crate::dataplane::node::*;
use serde_json::json;
use testkit::Stateful;
use tortie_dataplane::PodWiring;
use tortie_dataplane::{
    ClusterNetwork, Dataplane, Delta, LocalNode, MacAddress, Reason, Report, Route, RouteTarget, Settings,
    Vtep,
};
use tortie_hcn::schema::{HostRoute, Modify, Network, Policy, RemoteSubnetRoute, RequestType, lenient};
use tortie_hcn::{Call, Failure, HResult, Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator};
use tortie_windows::{
    Error, Host, HostRoutes, NETWORK, NetworkKind, NetworkSpec, WindowsDataplane, WindowsWiring,
    ensure_network,
};

pub(crate) fn vtep(name: &str, last: u8) -> Delta {
    Delta::Vtep(Vtep {
        node: name.into(),
        address: [10, 244, last, 0].into(),
        mac: MacAddress([0x66, 0, 0, 0, 0, last]),
        parent: [172, 16, 0, last].into(),
        mtu: None,
    })
}

pub(crate) fn route(destination: &str, node: &str) -> Delta {
    let target = RouteTarget::Vxlan { node: node.into() };
    Delta::Route(Route { destination: destination.parse().unwrap(), target })
}

pub(crate) fn routes(node: &Node) -> Vec<(String, String, String)> {
    let network = node.hns.inner().network_by_name(NETWORK).unwrap().unwrap();
    let read = |policy: &Policy| policy.settings::<RemoteSubnetRoute>().unwrap();
    let mut routes: Vec<_> = network
        .policies
        .iter()
        .filter_map(read)
        .map(|r| (r.destination_prefix, r.provider_address, r.distributed_router_mac_address))
        .collect();
    routes.sort();
    routes
}

#[test]
fn the_document_that_creates_the_network() {
    let hns = tortie_hns_emulator::Recorder::new(Emulator::new(Config::new(Config::SERVER_2022, NODE)));
    let adapter = Some("Ethernet".to_owned());
    let overlay = ensure_network(&hns, &NetworkSpec { adapter, ..spec() }).unwrap();
    let made = hns.take_changes();
    let [Call::Create { settings, .. }] = &made[..] else { panic!("{made:?}") };
    let expected = json!({"Name": "Calico", "Type": "Overlay", "Flags": 8,
        "Policies": [{"Type": "HostRoute", "Settings": {}},
            {"Type": "NetAdapterName", "Settings": {"NetworkAdapterName": "Ethernet"}}],
        "Ipams": [{"Type": "Static", "Subnets": [{"IpAddressPrefix": "10.244.3.0/26",
            "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 4096}}],
            "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]}]}],
        "SchemaVersion": {"Major": 2, "Minor": 0}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(settings).unwrap(), expected);
    assert_eq!(overlay.gateway, TUNNEL);
    assert_eq!(overlay.provider_address, NODE);
    assert_eq!(overlay.router_mac.unwrap().0[..3], [0x00, 0x15, 0x5d]);

    assert_eq!(ensure_network(&hns, &spec()).unwrap(), overlay, "again");
    assert_eq!(hns.take_changes(), []);
}

/// While the switch takes over the adapter, its address may be one of its own choice. Other nodes cannot reach it.
#[test]
fn an_address_that_the_adapter_chose_is_not_that_of_the_node() {
    for address in [Ipv4Addr::new(169, 254, 7, 9), Ipv4Addr::UNSPECIFIED] {
        let hns = std::sync::Arc::new(Emulator::new(Config::new(Config::SERVER_2022, address)));
        let error = ensure_network(&*hns, &spec()).unwrap_err();
        assert!(matches!(error, Error::NetworkNotReady { missing: "ProviderAddress", .. }), "{error}");
        assert!(error.is_passing());
        let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
        WindowsWiring::new(hns.clone()).connect(&pod).unwrap_err();
        let network = hns.network_by_name(NETWORK).unwrap().unwrap();
        assert_eq!(hns.endpoints_of_network(network.id).unwrap(), [], "a pod would keep the address");
    }
}

#[test]
fn a_network_without_host_route_gets_it() {
    let hns = Emulator::new(Config::new(Config::SERVER_2022, NODE));
    let overlay = ensure_network(&hns, &spec()).unwrap();
    let host_route = vec![Policy::of(&HostRoute::default())];
    hns.modify_network(overlay.id, &Modify::policies(RequestType::Remove, host_route)).unwrap();
    ensure_network(&hns, &spec()).unwrap();
    assert!(hns.network(overlay.id).unwrap().policies.iter().any(Policy::is::<HostRoute>));
}

#[test]
fn a_different_network_is_recreated_only_if_unused() {
    let others = [
        NetworkSpec { block: "10.244.7.0/26".parse().unwrap(), ..spec() },
        NetworkSpec { kind: NetworkKind::Overlay { vni: 5000 }, ..spec() },
    ];
    for other in others {
        let node = Node::usual();
        let old = node.hns.network_by_name(NETWORK).unwrap().unwrap().id;
        let new = ensure_network(&*node.hns, &other).unwrap();
        assert_ne!(new.id, old);
        ensure_network(&*node.hns, &spec()).unwrap();

        let pod = node.connect();
        node.hns.take();
        let error = ensure_network(&*node.hns, &other).unwrap_err();
        assert!(matches!(error, Error::NetworkDiffers { endpoints: 1, .. }), "{error}");
        assert_eq!(node.hns.take_changes(), []);
        tortie_dataplane::PodWiring::check(&node.wiring, &pod).unwrap();
    }
}

#[test]
fn a_network_on_another_adapter_is_used_and_never_recreated() {
    let hns = Emulator::new(Config::new(Config::SERVER_2022, NODE));
    let on = |name: &str| NetworkSpec { adapter: Some(name.to_owned()), ..spec() };
    let overlay = ensure_network(&hns, &on("Ethernet")).unwrap();
    for same in [on("ETHERNET"), spec()] {
        assert_eq!(ensure_network(&hns, &same).unwrap(), overlay);
    }
    let other = ensure_network(&hns, &on("Ethernet 2")).unwrap();
    assert_eq!(other.other_adapter.as_deref(), Some("Ethernet"));
    assert_eq!(tortie_windows::PodNetwork { other_adapter: None, ..other }, overlay);
    assert_eq!(ensure_network(&hns, &spec()).unwrap(), overlay);
    // If something else differs, too, it is not recreated on a guess.
    let error =
        ensure_network(&hns, &NetworkSpec { kind: NetworkKind::Overlay { vni: 4097 }, ..on("Ethernet 2") })
            .unwrap_err();
    assert!(matches!(error, Error::AdapterDiffers { .. }), "{error}");

    let selector = Some("Ethernet 2".parse().unwrap());
    let ip: Arc<dyn tortie_hcn::IpHelper> = Arc::new(tortie_hcn::NoIpHelper);
    let host = Host::new(ip.clone(), selector, Arc::new(HostRoutes::new(ip, None)));
    let dataplane = WindowsDataplane::new(Arc::new(hns)).with_host(host);
    let report = Stateful::new(dataplane).apply(&[local_node(), own_block()]);
    let conditions: Vec<_> = report.node.iter().filter(|one| one.reason == Reason::AdapterDiffers).collect();
    assert_eq!(conditions.len(), 1, "{report:?}");
    let message = &conditions[0].message;
    let names = "is on adapter Ethernet, and --adapter or the node's address names Ethernet 2";
    assert!(message.contains(names), "{message}");
}

#[test]
fn a_network_of_another_type_or_shape_differs() {
    let hns = Emulator::new(Config::new(Config::SERVER_2022, NODE));
    let bridge = json!({"Name": "Calico", "Type": "L2Bridge", "Ipams": [{"Subnets": [{
        "IpAddressPrefix": "10.244.3.0/26",
        "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    let bridge: Network = lenient(&bridge.to_string()).unwrap();
    let id = hns.create_network(&bridge).unwrap();
    assert_ne!(ensure_network(&hns, &spec()).unwrap().id, id);
}

#[test]
fn routes_follow_the_state_with_minimal_changes() {
    let mut node = Node::usual();
    node.apply(&[
        local_node(),
        own_block(),
        route("10.244.1.0/26", "primary"),
        route("10.244.2.0/26", "second"),
    ]);
    assert_eq!(routes(&node), [], "no end of the tunnel is known yet");
    node.apply(&[vtep("primary", 1)]);
    let one = |block: u8, last: u8| {
        (format!("10.244.{block}.0/26"), format!("172.16.0.{last}"), format!("66-00-00-00-00-0{last}"))
    };
    assert_eq!(routes(&node), [one(1, 1)]);
    node.hns.take();
    node.apply(&[vtep("second", 2)]);
    let sent = node.hns.take_changes();
    assert_eq!(sent.len(), 1, "only the new one: {sent:?}");
    assert_eq!(routes(&node), [one(1, 1), one(2, 2)]);

    // A prefix moves to another node: the old route must be removed first, or HNS refuses the new one.
    node.apply(&[route("10.244.2.0/26", "primary")]);
    assert_eq!(routes(&node), [one(1, 1), ("10.244.2.0/26".into(), one(1, 1).1, one(1, 1).2)]);
    // A recreated node has another MAC address.
    node.apply(&[vtep("primary", 3)]);
    assert_eq!(routes(&node), [one(1, 3), one(2, 3)]);
    node.apply(&[Delta::RouteRemoved("10.244.1.0/26".parse().unwrap())]);
    assert_eq!(routes(&node), [one(2, 3)]);
    node.apply(&[Delta::VtepRemoved("primary".into(), tortie_api::net::IpVersion::V4)]);
    assert_eq!(routes(&node), []);
}

/// The node as it is with this VNI.
fn with_vni(vni: u32) -> Delta {
    let Delta::Node(local) = local_node() else { unreachable!() };
    Delta::Node(LocalNode { network: ClusterNetwork { vni, ..ClusterNetwork::default() }, ..local })
}

fn vnis(node: &Node) -> Vec<u32> {
    let network = node.hns.inner().network_by_name(NETWORK).unwrap().unwrap();
    let routes = network.policies.iter().filter_map(|policy| policy.settings::<RemoteSubnetRoute>().unwrap());
    routes.map(|route| route.isolation_id).collect()
}

fn differs(report: &Report) -> &str {
    let found = report.node.iter().find(|condition| condition.reason == Reason::NetworkDiffers);
    &found.unwrap_or_else(|| panic!("{report:?}")).message
}

/// Its pods may use it for days. It keeps its VNI, and the new network has the new one.
#[test]
fn the_routes_of_a_network_with_another_vni_follow_the_other_nodes() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), route("10.244.1.0/26", "primary"), vtep("primary", 1)]);
    let pod = node.connect();
    let report = node.apply(&[with_vni(5000)]);
    let message = differs(&report);
    assert!(message.contains("its pods and nodes with the other VNI do not reach each other"), "{message}");
    let second = [route("10.244.2.0/26", "second"), vtep("second", 2), vtep("primary", 3)];
    let report = node.apply(&second);
    differs(&report);
    assert!(!report.retry, "{report:?}");
    let shown = || routes(&node).into_iter().map(|(prefix, provider, _)| (prefix, provider));
    let expected = [("10.244.1.0/26", "172.16.0.3"), ("10.244.2.0/26", "172.16.0.2")];
    let expected = expected.map(|(prefix, provider)| (prefix.to_owned(), provider.to_owned()));
    assert_eq!(shown().collect::<Vec<_>>(), expected);
    assert_eq!(vnis(&node), [4096, 4096]);

    node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    node.wait(60);
    node.apply(&[]);
    assert_eq!(vnis(&node), [5000, 5000], "the new network");
}

/// Another node has the block of the network's subnet, in which pods of this node still are.
#[test]
fn no_route_of_a_network_that_differs_leads_to_its_own_subnet() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), vtep("primary", 1)]);
    node.connect();
    let moved = route("10.244.3.0/26", "primary");
    let report = node.apply(&[local("10.244.9.0/26"), moved, route("10.244.1.0/26", "primary")]);
    assert!(!differs(&report).contains("until then"), "{report:?}");
    assert_eq!(report.node.len(), 1, "{report:?}");
    assert_eq!(routes(&node).into_iter().map(|(prefix, ..)| prefix).collect::<Vec<_>>(), ["10.244.1.0/26"]);
}

/// Its failure is no failure of the node besides the network: otherwise the network could not be made anew.
#[test]
fn a_refused_route_of_a_network_that_differs_is_reported_as_one() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), vtep("primary", 1)]);
    node.connect();
    node.apply(&[with_vni(5000)]);
    node.hns.set_fault(|call| {
        let bad = matches!(call, Call::Modify { settings, .. } if settings.contains("10.244.1.0/26"));
        bad.then(|| Err(Failure::new(HResult::HCN_E_INVALID_POLICY, "not this one")))
    });
    let report = node.apply(&[route("10.244.1.0/26", "primary")]);
    let mut reasons: Vec<Reason> = report.node.iter().map(|condition| condition.reason).collect();
    reasons.sort_by_key(|reason| reason.to_string());
    assert_eq!(reasons, [Reason::NetworkDiffers, Reason::RouteRefused]);
    assert!(report.retry);
}

/// An HNS that notifies of changes.
struct Notifying {
    hns: Emulator,
    notify: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Hcn for Notifying {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        self.hns.call(call)
    }

    fn watch(&self, notify: Box<dyn Fn() + Send>) {
        *self.notify.lock().unwrap() = Some(notify);
    }
}

/// While something fails, everything else is checked at intervals, and at once when HNS notifies of a change.
#[test]
fn a_notification_leads_to_a_full_check_also_in_trouble() {
    let hns = Emulator::new(Config::new(Config::SERVER_2022, NODE));
    let network = ensure_network(&hns, &spec()).unwrap().id;
    let hns = Arc::new(Notifying { hns, notify: Mutex::default() });
    let mut dataplane = WindowsDataplane::new(hns.clone());
    let told = Arc::new(Mutex::new(0));
    let count = told.clone();
    dataplane.watch(Box::new(move || *count.lock().unwrap() += 1));
    let mut dataplane = Stateful::new(dataplane);
    // The pod has no endpoint in HNS.
    let trouble = endpoint(open_program());
    let deltas = [local_node(), own_block(), vtep("primary", 1), route("10.244.1.0/26", "primary"), trouble];
    assert!(dataplane.apply(&deltas).retry);
    assert!(dataplane.resync().retry, "this was a full check");
    let has_route = || hns.hns.network(network).unwrap().policies.iter().any(Policy::is::<RemoteSubnetRoute>);
    let routes =
        hns.hns.network(network).unwrap().policies.into_iter().filter(Policy::is::<RemoteSubnetRoute>);
    hns.hns.modify_network(network, &Modify::policies(RequestType::Remove, routes.collect())).unwrap();
    dataplane.resync();
    assert!(!has_route(), "not yet");
    hns.notify.lock().unwrap().as_ref().unwrap()();
    assert_eq!(*told.lock().unwrap(), 1);
    dataplane.resync();
    assert!(has_route());
}

#[test]
fn routes_are_repaired_and_adopted() {
    let deltas = [local_node(), own_block(), route("10.244.1.0/26", "primary"), vtep("primary", 1)];
    let mut node = Node::usual();
    node.apply(&deltas);
    let before = routes(&node);
    let mut restarted = Node::over(node.hns.clone());
    node.hns.take();
    assert_eq!(restarted.apply(&deltas), Default::default());
    assert_eq!(node.hns.take_changes(), []);

    // Somebody changes the network.
    let network = node.hns.network_by_name(NETWORK).unwrap().unwrap();
    let (route_policies, _): (Vec<Policy>, Vec<Policy>) =
        network.policies.into_iter().partition(Policy::is::<RemoteSubnetRoute>);
    let remove = Modify::policies(RequestType::Remove, route_policies);
    node.hns.modify_network(network.id, &remove).unwrap();
    assert_eq!(restarted.dataplane.resync(), Default::default());
    assert_eq!(routes(&node), before);

    // HNS loses everything.
    node.hns.delete_network(network.id).unwrap();
    let current = restarted.dataplane.current_network();
    let old = current.get().unwrap();
    let report = restarted.dataplane.resync();
    assert_eq!(routes(&node), before);
    // The other nodes must learn the new MAC address.
    let new = current.get().unwrap();
    assert!(new.id != old.id && new.router_mac != old.router_mac);
    let [reported] = &report.node[..] else { panic!("{report:?}") };
    assert_eq!(reported.reason, Reason::OverlayRemade);
    assert!(reported.message.contains(&new.router_mac.unwrap().to_string()), "{}", reported.message);
    restarted.announced = new.router_mac.unwrap();
    assert_eq!(restarted.apply(&[local_node()]), Default::default());
}

#[test]
fn the_next_call_completes_after_a_failure() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), route("10.244.1.0/26", "primary"), vtep("primary", 1)]);
    for refused in ["Remove", "Add"] {
        let needle = format!(r#""RequestType":"{refused}""#);
        node.hns.set_fault(move |call| {
            let hit = matches!(call, Call::Modify { settings, .. } if settings.contains(&needle));
            hit.then(|| Err(Failure::new(HResult::ERROR_TIMEOUT, "late")))
        });
        let last = if refused == "Remove" { 4 } else { 5 };
        let report = node.apply(&[vtep("primary", last)]);
        assert!(report.retry);
        assert_eq!(report.node[0].reason, Reason::HnsUnavailable);
        node.hns.clear_fault();
        assert_eq!(node.apply(&[]), Default::default());
        assert_eq!(routes(&node)[0].1, format!("172.16.0.{last}"));
    }
}

#[test]
fn an_existing_host_route_is_accepted() {
    let node = Node::usual();
    // A build that does not list it.
    let inner = node.hns.clone();
    node.hns.set_fault(move |call| {
        let Call::Query { .. } = call else { return None };
        let mut shown: serde_json::Value = serde_json::from_str(&inner.inner().call(call).ok()?).unwrap();
        shown["Policies"].as_array_mut()?.retain(|policy| policy["Type"] != "HostRoute");
        Some(Ok(shown.to_string()))
    });
    node.hns.take();
    ensure_network(&*node.hns, &spec()).unwrap();
    assert_eq!(node.hns.take_changes().len(), 1, "it was asked for");
}

/// Only the node's own way to its pods depends on it.
#[test]
fn a_refused_host_route_is_reported_and_sent_once() {
    let mut node = Node::usual();
    let network = node.hns.network_by_name(NETWORK).unwrap().unwrap().id;
    let host_route = vec![Policy::of(&HostRoute::default())];
    node.hns.modify_network(network, &Modify::policies(RequestType::Remove, host_route)).unwrap();
    node.hns.set_fault(|call| {
        let is_it = matches!(call, Call::Modify { settings, .. } if settings.contains("HostRoute"));
        is_it.then(|| Err(Failure::new(HResult::HCN_E_REQUEST_UNSUPPORTED, "not on this build")))
    });
    node.hns.take();
    let deltas = [local_node(), own_block(), local("10.244.4.0/26"), vtep("primary", 1)];
    let report = node.apply(&[&deltas[..], &[route("10.244.1.0/26", "primary")]].concat());
    let [refused] = &report.node[..] else { panic!("{report:?}") };
    assert_eq!(refused.reason, Reason::NetworkPartNotInForce);
    assert!(refused.message.contains("no HostRoute") && refused.message.contains("not on this build"));
    assert_eq!((subnets(&node).len(), routes(&node).len()), (2, 1), "the rest is in force");
    let sent = |node: &Node| {
        node.hns.take_changes().iter().filter(|call| format!("{call:?}").contains("HostRoute")).count()
    };
    assert_eq!(sent(&node), 1);
    for last in 2..5 {
        node.wait(11);
        assert_eq!(node.apply(&[route(&format!("10.244.{last}0.0/26"), "primary")]).node.len(), 1);
        node.dataplane.resync();
    }
    assert_eq!(sent(&node), 0);
    // Another network gets it from its creation.
    node.hns.clear_fault();
    node.hns.delete_network(network).unwrap();
    node.wait(11);
    let report = node.dataplane.resync();
    assert!(report.node.iter().all(|it| it.reason == Reason::OverlayRemade), "{report:?}");
}

#[test]
fn one_bad_route_does_not_block_the_others() {
    let mut node = Node::usual();
    node.hns.set_fault(|call| {
        let bad = matches!(call, Call::Modify { settings, .. } if settings.contains("10.244.66.0/26"));
        bad.then(|| Err(Failure::new(HResult::HCN_E_INVALID_POLICY, "not this one")))
    });
    let prefixes = ["10.244.1.0/26", "10.244.66.0/26", "10.244.80.0/26"];
    let mut deltas = vec![local_node(), own_block(), vtep("primary", 1)];
    deltas.extend(prefixes.map(|prefix| route(prefix, "primary")));
    let report = node.apply(&deltas);
    let there: Vec<String> = routes(&node).into_iter().map(|(prefix, ..)| prefix).collect();
    assert_eq!(there, ["10.244.1.0/26", "10.244.80.0/26"]);
    let [reported] = &report.node[..] else { panic!("{report:?}") };
    assert_eq!(reported.reason, Reason::RouteRefused);
    assert!(
        reported.message.contains("10.244.66.0/26") && reported.message.contains("not this one"),
        "{}",
        reported.message
    );
    assert!(report.retry);
    node.hns.clear_fault();
    assert_eq!(node.apply(&[]), Default::default());
    assert_eq!(routes(&node).len(), 3);
    // A route that cannot be removed does not prevent another one.
    node.hns.set_fault(|call| {
        let bad = matches!(call, Call::Modify { settings, .. } if settings.contains("10.244.66.0/26"));
        bad.then(|| Err(Failure::new(HResult::HCN_E_INVALID_POLICY, "not this one")))
    });
    let report = node.apply(&[Delta::VtepRemoved("primary".into(), tortie_api::net::IpVersion::V4)]);
    assert_eq!(routes(&node).len(), 1);
    assert!(report.node[0].message.contains("Remove of the route"), "{report:?}");
}

/// Each attempt would take the routes away for a moment.
#[test]
fn routes_that_hns_does_not_take_are_sent_less_and_less_often() {
    let mut node = Node::usual();
    node.hns.set_fault(|call| {
        let is_it = matches!(call, Call::Modify { settings, .. } if settings.contains("RemoteSubnetRoute"));
        is_it.then(|| Ok(String::new()))
    });
    let report =
        node.apply(&[local_node(), own_block(), route("10.244.1.0/26", "primary"), vtep("primary", 1)]);
    assert_eq!(report.node[0].reason, Reason::HnsDidNotTake, "{report:?}");
    node.hns.take();
    let mut attempts = 0;
    for _ in 0..100 {
        node.wait(1);
        let report = node.apply(&[]);
        assert_eq!(report.node[0].reason, Reason::HnsDidNotTake, "{report:?}");
        let changes = node.hns.take_changes();
        attempts += usize::from(!changes.is_empty());
    }
    assert!((2..10).contains(&attempts), "{attempts}");
    node.hns.clear_fault();
    node.wait(60);
    assert_eq!(node.apply(&[]), Default::default());
}

/// Somebody has deleted the Node, and its pods are not gone yet.
#[test]
fn routes_follow_the_other_nodes_while_the_node_has_no_block() {
    let mut node = Node::usual();
    node.apply(&[local_node(), own_block(), route("10.244.1.0/26", "primary"), vtep("primary", 1)]);
    node.connect();
    let report = node.apply(&[
        Delta::RouteRemoved(spec().block.into()),
        route("10.244.2.0/26", "primary"),
        route("10.244.3.0/26", "primary"),
    ]);
    let [condition] = &report.node[..] else { panic!("{report:?}") };
    assert!(condition.message.contains("the node has no IPAM block"), "{}", condition.message);
    assert!(!condition.reason.is_failure() && !report.retry, "{report:?}");
    let prefixes = || routes(&node).into_iter().map(|(prefix, ..)| prefix).collect::<Vec<_>>();
    assert_eq!(prefixes(), ["10.244.1.0/26", "10.244.2.0/26"]);
    assert_eq!(node.apply(&[Delta::RouteRemoved(spec().block.into()), own_block()]), Report::default());
}

#[test]
fn unsupported_node_settings_are_reported() {
    // Its networks have one subnet.
    let mut node = Node::new(Config::new(Config::SERVER_2019, NODE));
    let odd = LocalNode {
        network: ClusterNetwork { port: 8472, ..ClusterNetwork::default() },
        ..LocalNode::ipv4("minion", Ipv4Addr::new(172, 16, 0, 99), None)
    };
    let second =
        Delta::Route(Route { destination: "10.244.4.0/26".parse().unwrap(), target: RouteTarget::Local });
    let report = node.apply(&[Delta::Node(odd), own_block(), second]);
    let reasons: Vec<Reason> = report.node.iter().map(|condition| condition.reason).collect();
    assert_eq!(
        reasons,
        [Reason::VxlanPortNotSupported, Reason::MoreThanOneBlock, Reason::ProviderAddressDiffers]
    );
    let message = &report.node[0].message;
    assert!(message.contains("is 8472") && message.contains("remove vxlanPort"), "{message}");
    let message = &report.node[1].message;
    assert!(message.contains("10.244.4.0/26") && message.contains("HNS 9.3"), "{message}");
}

pub(crate) fn local(destination: &str) -> Delta {
    Delta::Route(Route { destination: destination.parse().unwrap(), target: RouteTarget::Local })
}

pub(crate) fn subnets(node: &Node) -> Vec<String> {
    let network = node.hns.inner().network_by_name(NETWORK).unwrap().unwrap();
    network.subnets().map(|subnet| subnet.ip_address_prefix.clone()).collect()
}

/// HNS gives pods their usual MTU, so another one in the settings is no setting of this node.
#[test]
fn another_mtu_of_the_overlay_is_reported() {
    for (vxlan_mtu, expected) in
        [(None, &[][..]), (Some(1450), &[]), (Some(1300), &[Reason::FieldNotSupported])]
    {
        let mut node = Node::usual();
        let settings = Settings { vxlan_mtu, ..Settings::default() };
        let report = node.apply(&[local_node(), own_block(), Delta::Settings(settings.into())]);
        let reasons: Vec<_> = report.node.iter().map(|condition| condition.reason).collect();
        assert_eq!(reasons, expected, "{vxlan_mtu:?}");
    }
}
