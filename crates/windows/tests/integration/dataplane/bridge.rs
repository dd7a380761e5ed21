//! A network of type L2Bridge: packets of pods leave as they are, by routes of the node.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use crate::dataplane::node::*;
use serde_json::json;
use testkit::Stateful;
use tortie_dataplane::{Dataplane, Delta, PodWiring, Reason, Report, Route, RouteTarget, Settings};
use tortie_hcn::schema::{Endpoint, IpConfig, Modify, Network, RequestType, SchemaVersion, SdnRoute};
use tortie_hcn::{Adapter, Call, Guid, Hcn, HcnExt, IpHelper, IpRoute, Kind, Version};
use tortie_hns_emulator::{Config, EmulatedHost, Emulator, Recorder};
use tortie_windows::{
    Error, Host, HostRoutes, NETWORK, NetworkKind, NetworkSpec, WindowsDataplane, WindowsWiring, endpoint_id,
    ensure_network, ensure_network_with, kube_proxy_flags,
};

pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 2);
pub(crate) const NODE_ENDPOINT: &str = "Calico_ep";

pub(crate) fn bridge() -> NetworkSpec {
    NetworkSpec { kind: NetworkKind::L2Bridge, ..spec() }
}

pub(crate) fn hns() -> Arc<Recorder<Emulator>> {
    Arc::new(Recorder::new(Emulator::new(Config::new(Config::SERVER_2022, NODE))))
}

pub(crate) fn network(hns: &dyn Hcn) -> Network {
    hns.network_by_name(NETWORK).unwrap().unwrap()
}

pub(crate) fn node_endpoints(hns: &dyn Hcn) -> Vec<Endpoint> {
    let all = hns.endpoints_of_network(network(hns).id).unwrap();
    all.into_iter().filter(|endpoint| endpoint.name == NODE_ENDPOINT).collect()
}

pub(crate) fn document(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn the_documents_that_create_the_network_and_connect_the_node() {
    let hns = hns();
    let adapter = Some("Ethernet".to_owned());
    let made = ensure_network(&*hns, &NetworkSpec { adapter, ..bridge() }).unwrap();
    assert_eq!((made.gateway, made.router_mac, made.provider_address), (GATEWAY, None, NODE));
    let changes = hns.take_changes();
    let [
        Call::Create { kind: Kind::Network, settings: of_network, .. },
        Call::Create { kind: Kind::Endpoint, settings: of_endpoint, .. },
        Call::AttachToHost { endpoint },
    ] = &changes[..]
    else {
        panic!("{changes:?}")
    };
    let expected = json!({"Name": "Calico", "Type": "L2Bridge", "Flags": 8,
        "Policies": [{"Type": "NetAdapterName", "Settings": {"NetworkAdapterName": "Ethernet"}}],
        "Ipams": [{"Type": "Static", "Subnets": [{"IpAddressPrefix": "10.244.3.0/26",
            "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]}]}],
        "SchemaVersion": {"Major": 2, "Minor": 0}});
    assert_eq!(document(of_network), expected);
    let expected = json!({"ID": endpoint, "Name": NODE_ENDPOINT, "HostComputeNetwork": made.id,
        "IpConfigurations": [{"IpAddress": "10.244.3.2", "PrefixLength": 26}],
        "SchemaVersion": {"Major": 2, "Minor": 0}});
    assert_eq!(document(of_endpoint), expected);
    assert_eq!(node_endpoints(&*hns)[0].id, *endpoint);

    assert_eq!(ensure_network(&*hns, &bridge()).unwrap(), made, "again");
    assert_eq!(hns.take_changes(), []);
}

/// kube-proxy makes one for each backend of the cluster, and this is asked at each check and at each ADD.
#[test]
fn the_nodes_own_endpoint_is_found_without_a_look_at_all_endpoints() {
    let hns = hns();
    let network = ensure_network(&*hns, &bridge()).unwrap().id;
    let remote = |last: u8| Endpoint {
        host_compute_network: network,
        flags: tortie_hcn::schema::EndpointFlags::REMOTE_ENDPOINT,
        ip_configurations: vec![IpConfig { ip_address: format!("10.244.9.{last}"), ..Default::default() }],
        ..Default::default()
    };
    for last in 1..50 {
        hns.create_endpoint(&remote(last)).unwrap();
    }
    let reads = || {
        hns.take();
        ensure_network(&*hns, &bridge()).unwrap();
        WindowsWiring::new(hns.clone()).has_ipv6().unwrap();
        let is_read = |call: &&Call| matches!(call, Call::Query { kind: Kind::Endpoint, .. });
        hns.take().iter().filter(is_read).count()
    };
    assert!(reads() < 5);
    // That of an earlier agent has another identifier.
    let [own] = &node_endpoints(&*hns)[..] else { panic!("one") };
    hns.inner().restart(tortie_hns_emulator::Survives::Everything).unwrap();
    let detach = Modify::namespace_endpoint(RequestType::Remove, own.id);
    hns.modify_namespace(own.host_compute_namespace, &detach).unwrap();
    hns.delete_endpoint(own.id).unwrap();
    let earlier = Endpoint { id: Guid::ZERO, host_compute_namespace: Guid::ZERO, ..own.clone() };
    let earlier = hns.create_endpoint(&Endpoint { base: Default::default(), ..earlier }).unwrap();
    assert!(reads() < 8);
    assert_eq!(node_endpoints(&*hns)[0].id, earlier);
}

#[test]
fn the_document_that_creates_a_pod() {
    let hns = hns();
    ensure_network(&*hns, &bridge()).unwrap();
    let wiring = WindowsWiring::new(hns.clone());
    let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
    hns.take();
    let interface = wiring.connect(&pod).unwrap();
    let [address] = &interface.addresses[..] else { panic!("{interface:?}") };
    assert_eq!((address.address.to_string(), address.gateway), ("10.244.3.5/26".into(), GATEWAY.into()));
    let endpoint = hns.inner().endpoint(endpoint_id(CONTAINER)).unwrap();
    assert_eq!(endpoint.mac_address.parse(), Ok(interface.mac), "HNS has chosen it");
    let changes = hns.take_changes();
    let Call::Create { settings, .. } = &changes[0] else { panic!("{changes:?}") };
    let created = document(settings);
    assert_eq!(created["Routes"], json!([{"NextHop": "10.244.3.2", "DestinationPrefix": "0.0.0.0/0"}]));
    assert_eq!(created["MacAddress"], json!(null));
    let kinds: Vec<&str> = created["Policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|policy| policy["Type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["ACL", "ACL"], "closed, and no address of a tunnel");

    wiring.connect(&pod).unwrap();
    assert_eq!(hns.take_changes(), [], "again");
    wiring.check(&pod).unwrap();
}

/// A restart of HNS, another program or an interrupted start may leave it so.
#[test]
fn an_endpoint_of_the_node_that_differs_is_replaced() {
    let hns = hns();
    let made = ensure_network(&*hns, &bridge()).unwrap();
    let own = node_endpoints(&*hns).remove(0);
    let detach = Modify::namespace_endpoint(RequestType::Remove, own.id);
    hns.modify_namespace(own.host_compute_namespace, &detach).unwrap();
    hns.take();
    ensure_network(&*hns, &bridge()).unwrap();
    assert_eq!(hns.take_changes(), [Call::AttachToHost { endpoint: own.id }]);

    let detach = Modify::namespace_endpoint(RequestType::Remove, own.id);
    let own = node_endpoints(&*hns).remove(0);
    hns.modify_namespace(own.host_compute_namespace, &detach).unwrap();
    hns.delete_endpoint(own.id).unwrap();
    let mut other = Endpoint {
        name: NODE_ENDPOINT.into(),
        host_compute_network: made.id,
        ip_configurations: vec![IpConfig { ip_address: "10.244.3.9".into(), ..Default::default() }],
        ..Default::default()
    };
    other.base.schema_version = Some(SchemaVersion::V2);
    let other = hns.create_endpoint(&other).unwrap();
    ensure_network(&*hns, &bridge()).unwrap();
    let [own] = &node_endpoints(&*hns)[..] else { panic!("one endpoint of the node") };
    assert_ne!(own.id, other);
    assert_eq!(own.ip_configurations[0].ip_address, GATEWAY.to_string());
    assert_ne!(own.host_compute_namespace, Guid::ZERO);
}

#[test]
fn another_type_of_network_is_made_only_without_pods() {
    for (old, new) in [(spec(), bridge()), (bridge(), spec())] {
        let hns = hns();
        ensure_network(&*hns, &old).unwrap();
        let before = network(&*hns).id;
        let wiring = WindowsWiring::new(hns.clone());
        let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
        wiring.connect(&pod).unwrap();
        let error = ensure_network(&*hns, &new).unwrap_err();
        assert!(matches!(error, Error::NetworkDiffers { endpoints: 1, .. }), "{error}");
        assert!(error.to_string().contains("until then, its routes are frozen"), "{error}");
        assert_eq!(network(&*hns).id, before);
        wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
        ensure_network(&*hns, &new).unwrap();
        assert_eq!(network(&*hns).r#type, new.kind.mode());
    }
}

/// A node that had an overlay may own several blocks. The new network has the first one, from which IPAM gives addresses first.
#[test]
fn another_type_of_network_has_the_first_block() {
    let hns = hns();
    let other = "10.244.7.0/26".parse().unwrap();
    ensure_network(&*hns, &NetworkSpec { block: other, ..spec() }).unwrap();
    ensure_network_with(&*hns, &bridge(), &[other]).unwrap();
    assert_eq!(network(&*hns).subnets().next().unwrap().ip_address_prefix, "10.244.3.0/26");
    // A network of the same type keeps its block.
    ensure_network_with(&*hns, &NetworkSpec { block: other, ..bridge() }, &[bridge().block]).unwrap();
    assert_eq!(network(&*hns).subnets().next().unwrap().ip_address_prefix, "10.244.3.0/26");
}

#[test]
fn a_second_block_has_no_subnet() {
    let hns = hns();
    let other = "10.244.7.0/26".parse().unwrap();
    let made = ensure_network_with(&*hns, &bridge(), &[other]).unwrap();
    let [(block, why)] = &made.without_subnet[..] else { panic!("{made:?}") };
    assert_eq!(*block, other);
    assert!(why.contains("a network of type L2Bridge has one"), "{why}");
}

#[test]
fn flags_of_kube_proxy_have_no_source_vip() {
    let hns = hns();
    ensure_network(&*hns, &bridge()).unwrap();
    let flags = kube_proxy_flags(&network(&*hns), Version::new(15, 4), None).unwrap();
    assert_eq!(flags, ["--proxy-mode=kernelspace", "--network-name=Calico", "--enable-dsr=true"]);
}

/// The node beside an emulated HNS.
pub(crate) struct Bridged {
    pub(crate) hns: Arc<Recorder<Emulator>>,
    pub(crate) machine: Arc<EmulatedHost>,
    pub(crate) host: Host,
    pub(crate) dataplane: Stateful<WindowsDataplane>,
}

pub(crate) fn adapter(index: u32, name: &str, address: &str) -> Adapter {
    let addresses = vec![address.parse().unwrap()];
    Adapter {
        index,
        name: name.to_owned(),
        mac: Some([0, 0x15, 0x5d, 0, 0, 1]),
        mtu: 1500,
        is_up: true,
        addresses,
    }
}

impl Bridged {
    /// The adapter of the pods' gateway appears some time after the endpoint.
    pub(crate) fn new() -> Bridged {
        Bridged::on(adapter(4, "Ethernet", "172.16.0.3/24"))
    }

    pub(crate) fn on(adapter: Adapter) -> Bridged {
        let machine = Arc::new(EmulatedHost::new(vec![adapter], vec![]));
        let emulator = Emulator::new(Config::new(Config::SERVER_2022, NODE)).on_host(machine.clone());
        Bridged::started(Arc::new(Recorder::new(emulator)), machine)
    }

    fn started(hns: Arc<Recorder<Emulator>>, machine: Arc<EmulatedHost>) -> Bridged {
        let ip: Arc<dyn IpHelper> = machine.clone();
        let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
        let dataplane = WindowsDataplane::with_clock(hns.clone(), Box::new(Instant::now));
        let mut dataplane = dataplane.with_bridge(true).with_host(host.clone());
        dataplane.watch(Box::new(|| {}));
        Bridged { hns, machine, host, dataplane: Stateful::new(dataplane) }
    }

    /// Another agent on the same node.
    pub(crate) fn restarted(self) -> Bridged {
        Bridged::started(self.hns, self.machine)
    }

    pub(crate) fn connect_node(&self) {
        self.machine
            .change(|state| state.adapters.push(adapter(9, "vEthernet (Calico_ep)", "10.244.3.2/26")));
    }

    /// The routes to pods, with their next hops, and the number of their adapter.
    pub(crate) fn routes(&self) -> Vec<(String, String, u32)> {
        let routes = self.machine.routes().unwrap();
        let of_pods = routes.into_iter().filter(|route| route.metric > 8_000);
        let mut shown: Vec<_> = of_pods
            .map(|route| (route.destination.to_string(), route.next_hop.to_string(), route.interface))
            .collect();
        shown.sort();
        shown
    }
}

pub(crate) fn direct(destination: &str, router: &str) -> Delta {
    let target = RouteTarget::Direct { router: router.parse().unwrap() };
    Delta::Route(Route { destination: destination.parse().unwrap(), target })
}

pub(crate) fn refused(report: &Report) -> Vec<&str> {
    let refused = report.node.iter().filter(|condition| condition.reason == Reason::RouteRefused);
    refused.map(|condition| condition.message.as_str()).collect()
}

#[test]
fn the_node_forwards_and_has_routes_to_pods_of_other_nodes() {
    let mut node = Bridged::new();
    let deltas = [local_node(), own_block(), direct("10.244.1.0/26", "172.16.0.1")];
    let report = node.dataplane.apply(&deltas);
    assert_eq!(refused(&report), ["no adapter of the node has the address 10.244.3.2 yet"]);
    assert!(report.retry);
    // The switch has taken the adapter over, and its successor has another number.
    assert_eq!(node.routes(), [("10.244.1.0/26".into(), "172.16.0.1".into(), 104)]);

    node.connect_node();
    let report = node.dataplane.resync();
    assert_eq!(refused(&report), [""; 0]);
    assert_eq!(node.machine.change(|state| state.forwarding.clone()), [(9, false), (104, false)].into());

    // The node moves, and the block of a second one comes.
    node.dataplane.apply(&[direct("10.244.1.0/26", "172.16.0.7"), direct("10.244.5.0/26", "172.16.0.8")]);
    let expected = [
        ("10.244.1.0/26".to_owned(), "172.16.0.7".to_owned(), 104),
        ("10.244.5.0/26".to_owned(), "172.16.0.8".to_owned(), 104),
    ];
    assert_eq!(node.routes(), expected);

    // Somebody deletes one, and adds another one. The system notifies.
    node.machine.change(|state| {
        state.routes.retain(|route| route.destination.to_string() != "10.244.5.0/26");
        state.routes.push(IpRoute {
            interface: 104,
            destination: "10.9.0.0/16".parse().unwrap(),
            next_hop: "172.16.0.9".parse().unwrap(),
            metric: 8_501,
            is_own: false,
        });
    });
    node.dataplane.resync();
    assert_eq!(node.routes(), expected);

    let gone = Delta::RouteRemoved("10.244.5.0/26".parse().unwrap());
    node.dataplane.apply(&[gone]);
    assert_eq!(node.routes(), expected[..1]);
    assert!(network(&*node.hns).policies.iter().all(|policy| policy.r#type != "RemoteSubnetRoute"));
}

/// The node's block is another node's now, and the network has pods of the former one. They reach new blocks, and each other.
#[test]
fn a_network_that_differs_has_routes_to_new_blocks() {
    let mut node = Bridged::new();
    node.connect_node();
    node.dataplane.apply(&[local_node(), own_block()]);
    let pod = attachment(node.hns.create_namespace(&Default::default()).unwrap());
    WindowsWiring::new(node.hns.clone()).connect(&pod).unwrap();
    let own = Route { destination: "10.244.9.0/26".parse().unwrap(), target: RouteTarget::Local };
    let moved = direct("10.244.3.0/26", "172.16.0.9");
    let report = node.dataplane.apply(&[Delta::Route(own), moved]);
    assert!(report.node.iter().any(|condition| condition.reason == Reason::NetworkDiffers), "{report:?}");
    let report = node.dataplane.apply(&[direct("10.244.1.0/26", "172.16.0.1")]);
    assert!(report.node.iter().any(|condition| condition.reason == Reason::NetworkDiffers), "{report:?}");
    assert_eq!(refused(&report), [""; 0]);
    assert_eq!(node.routes(), [("10.244.1.0/26".into(), "172.16.0.1".into(), 104)]);
}

#[test]
fn a_route_that_needs_an_overlay_is_reported() {
    let mut node = Bridged::new();
    node.connect_node();
    let target = RouteTarget::Vxlan { node: "linux-1".into() };
    let route = Delta::Route(Route { destination: "10.244.1.0/26".parse().unwrap(), target });
    let report = node.dataplane.apply(&[local_node(), own_block(), route]);
    let [message] = &refused(&report)[..] else { panic!("{report:?}") };
    assert!(message.contains("10.244.1.0/26 of node linux-1: its pool has VXLAN"), "{message}");
    assert_eq!(node.routes(), []);
}

/// The node's own address is reached in the switch, as with Calico.
#[test]
fn pods_reach_the_node_by_a_route_of_the_endpoint() {
    let mut node = Bridged::new();
    node.connect_node();
    let wiring = WindowsWiring::new(node.hns.clone());
    node.dataplane.apply(&[local_node(), own_block(), Delta::Settings(Arc::new(Settings::default()))]);
    let pod = attachment(node.hns.create_namespace(&Default::default()).unwrap());
    wiring.connect(&pod).unwrap();
    let routes = |hns: &dyn Hcn| -> Vec<String> {
        let endpoint = hns.endpoint(endpoint_id(CONTAINER)).unwrap();
        let routes = endpoint.policies.iter().filter_map(|policy| policy.settings::<SdnRoute>().unwrap());
        routes.map(|route| route.destination_prefix).collect()
    };
    assert_eq!(routes(&*node.hns), [""; 0], "the wiring of another process knows no networks");
    node.dataplane.apply(&[allow_all(), endpoint(open_program())]);
    assert_eq!(routes(&*node.hns), ["172.16.0.3/32"]);
    node.hns.take();
    node.dataplane.resync();
    assert_eq!(node.hns.take_changes(), [], "again");
}
