//! Pods are added, deleted, and added again; HNS fails in between.

use std::net::{IpAddr, Ipv4Addr};

use crate::dataplane::node::*;
use serde_json::json;
use tortie_api::calico::BgpFromPods;
use tortie_api::net::{Action, Direction, IpVersion, PortRange, Protocol};
use tortie_dataplane::{Delta, PodAddress, PodAttachment, PodWiring, Reason, Settings, WiringError};
use tortie_hcn::schema::{Acl, AclAction, Endpoint, Modify, Policy, ProviderAddress, RequestType, lenient};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind};
use tortie_hns_emulator::Config;
use tortie_policy::ALL_NODES;
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, Member, Rule, SetKind};
use tortie_windows::endpoint_id;

fn changes(node: &Node) -> Vec<&'static str> {
    node.hns.take_changes().iter().map(Call::name).collect()
}

fn tcp(from: &str, to_port: u16) -> Flow {
    Flow {
        source: from.parse().unwrap(),
        destination: POD.into(),
        protocol: Protocol::TCP,
        source_port: 40_000,
        destination_port: to_port,
        icmp: None,
    }
}

/// The node has got another address since the pod was made: its packets would have the old one.
#[test]
fn an_endpoint_with_an_earlier_address_of_the_node_is_made_anew() {
    let node = Node::usual();
    let pod = node.connect();
    let inner = std::sync::Arc::clone(&node.hns);
    node.hns.set_fault(move |call| match call {
        Call::Query { kind: Kind::Network, .. } => {
            Some(inner.inner().call(call).map(|document| document.replace("172.16.0.3", "172.16.0.33")))
        }
        _ => None,
    });
    let differs = node.wiring.check(&pod).unwrap_err().to_string();
    assert!(differs.contains("ProviderAddress 172.16.0.3, not 172.16.0.33"), "{differs}");
    node.wiring.connect(&pod).unwrap();
    node.wiring.check(&pod).unwrap();
    let provider =
        node.endpoint().policies.iter().find_map(|policy| policy.settings::<ProviderAddress>().unwrap());
    assert_eq!(provider.unwrap().provider_address, "172.16.0.33");
}

#[test]
fn the_document_that_creates_a_pod() {
    let node = Node::usual();
    let pod = attachment(node.namespace());
    node.hns.take();
    let interface = node.wiring.connect(&pod).unwrap();
    assert_eq!(interface.host_interface, "0123456789abcdef_Calico");
    assert_eq!(interface.mac.to_string(), "0e:2a:0a:f4:03:05");
    assert_eq!(network_of(&interface), ([10, 244, 3, 1].into(), 26));
    let made = node.hns.take_changes();
    let [
        Call::Create { kind: Kind::Endpoint, network, id, settings },
        Call::Modify { kind: Kind::Namespace, .. },
    ] = &made[..]
    else {
        panic!("{made:?}")
    };
    assert_eq!(*id, endpoint_id(CONTAINER));
    let block = |direction: &str| {
        json!({"Type": "ACL", "Settings": {"Id": "tortie/closed", "Protocols": "256", "Action": "Block",
            "Direction": direction, "RuleType": "Switch", "Priority": 65500}})
    };
    let document: serde_json::Value = serde_json::from_str(settings).unwrap();
    let expected = json!({
        "ID": id, "Name": "0123456789abcdef_Calico", "HostComputeNetwork": network,
        "Policies": [{"Type": "ProviderAddress", "Settings": {"ProviderAddress": "172.16.0.3"}},
            block("In"), block("Out")],
        "IpConfigurations": [{"IpAddress": "10.244.3.5"}],
        "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}],
        "MacAddress": "0E-2A-0A-F4-03-05",
        "SchemaVersion": {"Major": 2, "Minor": 0}
    });
    assert_eq!(document, expected);
    // The identifier must never change, because a later process finds the endpoint by it.
    assert_eq!(id.to_string(), "bb29c393-9872-5948-b6fe-55f88b207352");
}

#[test]
fn connecting_again_changes_nothing() {
    let node = Node::usual();
    let pod = node.connect();
    node.hns.take();
    node.wiring.connect(&pod).unwrap();
    assert_eq!(changes(&node), [""; 0]);
    node.wiring.check(&pod).unwrap();
}

#[test]
fn disconnecting_again_succeeds() {
    let node = Node::usual();
    let pod = node.connect();
    for _ in 0..2 {
        node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
        assert!(node.hns.endpoint(endpoint_id(CONTAINER)).unwrap_err().is_not_found());
    }
    assert!(matches!(node.wiring.check(&pod), Err(WiringError::System { .. })));
    node.wiring.connect(&pod).unwrap();
    node.wiring.check(&pod).unwrap();
}

#[test]
fn the_runtime_may_delete_the_namespace_first() {
    let node = Node::usual();
    let pod = node.connect();
    node.hns.delete_namespace(pod.netns.parse().unwrap()).unwrap();
    node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    assert!(node.hns.endpoint(endpoint_id(CONTAINER)).unwrap_err().is_not_found());
}

#[test]
fn half_connected_pods_are_completed_or_recreated() {
    let node = Node::usual();
    let pod = node.connect();
    // Created, but not attached: the agent was killed in between.
    let detach = Modify::namespace_endpoint(RequestType::Remove, endpoint_id(CONTAINER));
    node.hns.modify_namespace(pod.netns.parse().unwrap(), &detach).unwrap();
    assert!(node.wiring.check(&pod).unwrap_err().to_string().contains("namespace"));
    node.hns.take();
    node.wiring.connect(&pod).unwrap();
    assert_eq!(changes(&node), ["modify"]);
    // In another namespace: the sandbox was recreated with the same id.
    let moved = PodAttachment { netns: node.namespace().to_string(), ..pod.clone() };
    node.wiring.connect(&moved).unwrap();
    node.wiring.check(&moved).unwrap();
    // With another address.
    let readdressed = PodAttachment { addresses: addresses([10, 244, 3, 9].into()), ..moved };
    assert!(node.wiring.check(&readdressed).unwrap_err().to_string().contains("10.244.3.9"));
    node.wiring.connect(&readdressed).unwrap();
    node.wiring.check(&readdressed).unwrap();
}

#[test]
fn a_failed_attach_leaves_no_endpoint() {
    let node = Node::usual();
    let pod = attachment(Guid::random());
    let error = node.wiring.connect(&pod).unwrap_err();
    assert!(error.to_string().contains("calico-demo/windows-server"), "{error}");
    assert!(node.hns.endpoint(endpoint_id(CONTAINER)).unwrap_err().is_not_found());
    let no_guid = PodAttachment { netns: "/run/netns/x".into(), ..pod };
    assert!(node.wiring.connect(&no_guid).unwrap_err().to_string().contains("CNI_NETNS"));
}

#[test]
fn a_stale_remote_endpoint_is_replaced_and_a_local_one_is_not() {
    // Server 2019 and 2022 give both the address.
    for accepts_taken_addresses in [true, false] {
        stale_endpoints(Node::new(Config {
            accepts_taken_addresses,
            ..Config::new(Config::SERVER_2022, NODE)
        }));
    }
}

fn stale_endpoints(node: Node) {
    let network = node.hns.network_by_name("Calico").unwrap().unwrap().id;
    let other = |flags: u32| -> Endpoint {
        let document = json!({"HostComputeNetwork": network, "Flags": flags,
            "IpConfigurations": [{"IpAddress": POD}], "MacAddress": "02-11-0a-f4-03-05"});
        lenient(&document.to_string()).unwrap()
    };
    let stale = node.hns.create_endpoint(&other(1)).unwrap();
    node.hns.take();
    let pod = node.connect();
    let endpoints = node.hns.endpoints_of_network(network).unwrap();
    assert_eq!(endpoints.iter().map(|it| it.id).collect::<Vec<_>>(), [endpoint_id(CONTAINER)]);
    // Meanwhile the pod would not be reached.
    let calls = node.hns.take_changes();
    let at = |is_it: &dyn Fn(&Call) -> bool| calls.iter().position(is_it).unwrap();
    let gone = at(&|call| matches!(call, Call::Delete { id, .. } if *id == stale));
    assert!(gone < at(&|call| matches!(call, Call::Create { kind: Kind::Endpoint, .. })), "{calls:?}");
    node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    let local = node.hns.create_endpoint(&other(0)).unwrap();
    let error = node.wiring.connect(&attachment(node.namespace())).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(
        source.contains("HCN_E_ADDR_INVALID_OR_RESERVED") && source.contains(&local.to_string()),
        "{source}"
    );
}

/// A network has an endpoint for each backend of the cluster. They are listed only where HNS accepts an address twice, and there
/// before each attempt.
#[test]
fn endpoints_are_listed_only_where_an_address_can_be_taken_twice() {
    let lists = |version| {
        let node = Node::new(Config::new(version, NODE));
        let attempts = std::sync::atomic::AtomicUsize::new(0);
        node.hns.set_fault(move |call| {
            let is_first = matches!(call, Call::Create { kind: Kind::Endpoint, .. })
                && attempts.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            is_first.then(|| Err(Failure::new(HResult::HCN_E_PORT_NOT_FOUND, "not yet")))
        });
        node.hns.take();
        node.connect();
        let is_list = |call: &&Call| matches!(call, Call::Enumerate { kind: Kind::Endpoint, .. });
        node.hns.take().iter().filter(is_list).count()
    };
    assert_eq!(lists(Config::SERVER_2022), lists(Config::NEWEST) + 2);
}

#[test]
fn an_unknown_state_is_not_absent() {
    let node = Node::usual();
    let pod = node.connect();
    for code in [HResult::RPC_S_SERVER_UNAVAILABLE, HResult::ERROR_TIMEOUT, HResult::HCN_E_POLICY_NOT_FOUND] {
        node.hns.set_fault(move |call| {
            matches!(call, Call::Query { kind: Kind::Endpoint, .. })
                .then(|| Err(Failure::new(code, "not today")))
        });
        node.hns.take();
        assert!(node.wiring.connect(&pod).is_err());
        assert!(node.wiring.disconnect(&pod.endpoint, CONTAINER).is_err());
        assert_eq!(changes(&node), [""; 0], "{code}: nothing is concluded from it");
    }
    node.hns.clear_fault();
    node.wiring.check(&pod).unwrap();
}

/// Another CNI plugin's endpoint has a name like Tortie's, an identifier of its own, and is open.
#[test]
fn pods_of_another_plugin_are_adopted() {
    let mut node = Node::usual();
    let network = node.hns.network_by_name("Calico").unwrap().unwrap().id;
    let document = json!({"Name": format!("{CONTAINER}_Calico"), "HostComputeNetwork": network,
        "IpConfigurations": [{"IpAddress": POD}], "MacAddress": "0E-2A-0a-f4-03-05"});
    let id = node.hns.create_endpoint(&lenient(&document.to_string()).unwrap()).unwrap();
    let pod = attachment(node.namespace());
    node.wiring.connect(&pod).unwrap();
    let count = || node.hns.endpoint(id).unwrap().policies.len();
    assert_eq!(count(), 2, "closed");
    node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    assert!(node.hns.endpoint(id).unwrap().policies.len() > 2);
    node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    assert!(node.hns.endpoint(id).unwrap_err().is_not_found());
}

fn only_web_from(net: &str) -> Rule {
    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.nets = vec![net.parse().unwrap()];
    rule.destination.ports = vec![PortRange::single(80)];
    rule
}

fn one_policy() -> EndpointProgram {
    let ingress = vec![tier("default", &["web"], EndOfTier::Deny)];
    EndpointProgram { ingress, ..open_program() }
}

#[test]
fn the_acls_of_the_demo() {
    let mut node = Node::usual();
    node.connect();
    let web = policy("web", vec![only_web_from("10.244.1.7/32")], vec![]);
    let report = node.apply(&[local_node(), own_block(), allow_all(), web, endpoint(one_policy())]);
    assert_eq!(report, Default::default());
    let mut acls: Vec<serde_json::Value> =
        node.acls().iter().map(|acl| serde_json::to_value(acl).unwrap()).collect();
    acls.sort_by_key(|acl| (acl["Direction"].to_string(), acl["Priority"].as_u64()));
    let switch = |id: &str, protocol: &str, action: &str, direction: &str, priority: u16| {
        json!({"Id": id, "Protocols": protocol, "Action": action, "Direction": direction,
            "RuleType": "Switch", "Priority": priority})
    };
    let host = |direction: &str| json!({"Id": "tortie/host", "Protocols": "256", "Action": "Allow", "Direction": direction, "RuleType": "Host"});
    let mut probe = switch("tortie/node", "256", "Allow", "In", 900);
    probe["RemoteAddresses"] = json!("10.244.3.1,172.16.0.3");
    let mut rule = switch("tortie/NetworkPolicy/calico-demo/web", "6", "Allow", "In", 1063);
    rule["RemoteAddresses"] = json!("10.244.1.7");
    rule["LocalPorts"] = json!("80");
    let mut vxlan = switch("tortie/no/VXLAN/from/pods", "17", "Block", "Out", 950);
    vxlan["RemotePorts"] = json!("4789");
    let expected = [
        host("In"),
        probe,
        rule,
        switch("tortie/closed", "256", "Block", "In", 65_500),
        host("Out"),
        vxlan,
        switch("tortie/no/IPIP/from/pods", "4", "Block", "Out", 950),
        switch("tortie/NetworkPolicy/calico-demo/allow-all", "256", "Allow", "Out", 1063),
        switch("tortie/closed", "256", "Block", "Out", 65_500),
    ];
    assert_eq!(acls, expected);
}

/// Policy decision 38. The settings open one protocol each, at once.
#[test]
fn pods_send_no_tunnels_unless_the_settings_allow_them() {
    let mut node = Node::usual();
    node.connect();
    node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    let to = |protocol, destination_port| Flow {
        source: POD.into(),
        destination: [192, 0, 2, 7].into(),
        protocol,
        source_port: 40_000,
        destination_port,
        icmp: None,
    };
    let flows = [to(Protocol::UDP, 4789), to(Protocol::IPIP, 0), to(Protocol::UDP, 4790)];
    for (vxlan, ipip) in [(false, false), (true, false), (false, true), (true, true)] {
        let settings =
            Settings { vxlan_from_workloads: vxlan, ipip_from_workloads: ipip, ..Settings::default() };
        node.apply(&[Delta::Settings(settings.into())]);
        let passes = flows.map(|flow| node.passes(Direction::Egress, &flow));
        assert_eq!(passes, [vxlan, ipip, true], "{vxlan} {ipip}");
    }
    // The port of Linux nodes is closed, too.
    for (port, passes) in [(4790, [false, false, false]), (4789, [false, false, true])] {
        node.apply(&[Delta::Settings(
            Settings { vxlan_ports: [4789, port].into(), ..Settings::default() }.into(),
        )]);
        assert_eq!(flows.map(|flow| node.passes(Direction::Egress, &flow)), passes, "{port}");
    }
}

/// Policy decision 48. A node that joins is closed at once, and the setting opens all.
#[test]
fn pods_do_not_connect_to_the_bgp_speakers_of_nodes() {
    let mut node = Node::usual();
    node.connect();
    let nodes = |addresses: &[[u8; 4]]| -> Vec<Member> {
        addresses.iter().map(|address| Member::Net(IpAddr::from(*address).into())).collect()
    };
    let members = nodes(&[[192, 0, 2, 1]]).into_iter().collect();
    let all = Delta::SetCreated(ALL_NODES.clone(), SetKind::Nets, members);
    node.apply(&[local_node(), own_block(), allow_all(), all, endpoint(open_program())]);
    let to = |protocol, destination: [u8; 4], destination_port| Flow {
        source: POD.into(),
        destination: destination.into(),
        protocol,
        source_port: 40_000,
        destination_port,
        icmp: None,
    };
    let flows = [
        to(Protocol::TCP, [192, 0, 2, 1], 179),
        to(Protocol::TCP, [192, 0, 2, 7], 179),
        to(Protocol::TCP, [192, 0, 2, 7], 1790),
        to(Protocol::TCP, [192, 0, 2, 1], 80),
        to(Protocol::UDP, [192, 0, 2, 1], 179),
    ];
    let passes = |node: &Node| flows.map(|flow| node.passes(Direction::Egress, &flow));
    assert_eq!(passes(&node), [false, true, true, true, true]);

    let added = nodes(&[[192, 0, 2, 7]]);
    node.apply(&[Delta::SetChanged { id: ALL_NODES.clone(), added, removed: Vec::new() }]);
    assert_eq!(passes(&node), [false, false, true, true, true]);
    let ports = Settings { bgp_ports: [179, 1790].into(), ..Settings::default() };
    node.apply(&[Delta::Settings(ports.clone().into())]);
    assert_eq!(passes(&node), [false, false, false, true, true]);
    node.apply(&[Delta::Settings(Settings { bgp_from_pods: BgpFromPods::Allow, ..ports }.into())]);
    assert_eq!(passes(&node), [true; 5]);
}

#[test]
fn a_change_sends_only_differences() {
    let mut node = Node::usual();
    node.connect();
    let nets: Vec<Rule> = (0..40).map(|i| only_web_from(&format!("10.1.{i}.0/24"))).collect();
    let web = policy("web", nets.clone(), vec![]);
    node.apply(&[local_node(), own_block(), allow_all(), web, endpoint(one_policy())]);
    let before = node.acls().len();
    node.hns.take();
    node.apply(&[policy("web", [nets.clone(), vec![only_web_from("10.9.0.0/16")]].concat(), vec![])]);
    let sent = node.hns.take_changes();
    let [Call::Modify { settings, .. }] = &sent[..] else { panic!("{sent:?}") };
    let request: Modify = lenient(settings).unwrap();
    assert_eq!(request.request_type, RequestType::Add);
    assert_eq!(request.settings["Policies"].as_array().unwrap().len(), 1);
    assert_eq!(node.acls().len(), before + 1);
    // In another order the rules mean the same, and nothing is sent.
    let turned = nets.iter().rev().cloned().chain([only_web_from("10.9.0.0/16")]).collect();
    node.apply(&[policy("web", turned, vec![])]);
    assert_eq!(changes(&node), [""; 0]);
    // Another pod's policy does not concern this one.
    node.hns.take();
    node.apply(&[policy("other", vec![Rule::all(Action::Deny)], vec![])]);
    assert_eq!(node.hns.take(), []);
}

#[test]
fn a_negated_protocol_needs_few_acls() {
    let mut node = Node::usual();
    node.connect();
    let mut not_tcp = Rule { not_protocol: Some(Protocol::TCP), ..Rule::all(Action::Deny) };
    not_tcp.source.not_nets = vec!["10.0.0.0/8".parse().unwrap()];
    let web = policy("web", vec![not_tcp, Rule::all(Action::Allow)], vec![]);
    node.apply(&[local_node(), own_block(), allow_all(), web, endpoint(one_policy())]);
    assert!(node.acls().len() < 12, "{}", node.acls().len());
    assert!(node.passes(Direction::Ingress, &tcp("192.168.1.1", 80)));
    let udp = Flow { protocol: Protocol::UDP, ..tcp("192.168.1.1", 80) };
    assert!(!node.passes(Direction::Ingress, &udp));
    assert!(node.passes(Direction::Ingress, &Flow { source: [10, 1, 1, 1].into(), ..udp }));
}

#[test]
fn ten_thousand_addresses_are_three_acls() {
    let mut node = Node::usual();
    node.connect();
    let mut rule = only_web_from("0.0.0.0/0");
    // Every second address, so that nothing can be merged.
    rule.source.nets = (0..10_000_u32)
        .map(|i| ipnet::IpNet::from(std::net::IpAddr::from((0x0b00_0000 + 2 * i).to_be_bytes())))
        .collect();
    node.apply(&[
        local_node(),
        own_block(),
        allow_all(),
        policy("web", vec![rule], vec![]),
        endpoint(one_policy()),
    ]);
    let web: Vec<Acl> = node.acls().into_iter().filter(|acl| acl.id.ends_with("/web")).collect();
    let counts: Vec<usize> = web.iter().map(|acl| acl.remote_addresses.split(',').count()).collect();
    assert_eq!(counts, [4000, 4000, 2000]);
    assert!(node.passes(Direction::Ingress, &tcp("11.0.0.2", 80)));
    assert!(!node.passes(Direction::Ingress, &tcp("11.0.0.3", 80)));
}

#[test]
fn thousands_of_alternating_rules_are_rendered() {
    let mut node = Node::usual();
    node.connect();
    let peer = |i: u32| std::net::IpAddr::from((0x0b00_0000 + i).to_be_bytes());
    let rules = (0..5000_u32).map(|i| {
        let mut rule = Rule::all(if i % 2 == 0 { Action::Allow } else { Action::Deny });
        rule.source.nets = vec![ipnet::IpNet::from(peer(i))];
        rule
    });
    let many = policy("web", rules.collect(), vec![]);
    let report = node.apply(&[local_node(), own_block(), allow_all(), many, endpoint(one_policy())]);
    assert_eq!(report, Default::default());
    assert!(node.passes(Direction::Ingress, &tcp("11.0.19.134", 0)), "rule 4998");
    assert!(!node.passes(Direction::Ingress, &tcp("11.0.19.135", 0)), "rule 4999");
}

#[test]
fn foreign_acls_are_kept_and_a_build_without_removal_gets_the_whole_list() {
    let mut node = Node::usual();
    node.connect();
    let id = endpoint_id(CONTAINER);
    let mut theirs = node.acls().remove(0);
    (theirs.id, theirs.priority, theirs.action) = ("somebody".into(), 100, AclAction::Allow);
    theirs.remote_addresses = "10.77.0.1".into();
    node.hns.modify_endpoint(id, &Modify::policies(RequestType::Add, vec![Policy::of(&theirs)])).unwrap();
    let deltas = [local_node(), own_block(), allow_all(), endpoint(open_program())];
    node.apply(&deltas);
    // Accepted silently, and not done (docs/hns.md, Changes).
    node.hns.set_fault(|call| {
        let removes =
            matches!(call, Call::Modify { settings, .. } if settings.contains(r#""RequestType":"Remove""#));
        removes.then(|| Ok(String::new()))
    });
    node.hns.take();
    let report = node.apply(&[endpoint(EndpointProgram::default())]);
    assert!(!report.retry && report.node.is_empty(), "{report:?}");
    let sent = node.hns.take_changes();
    assert!(
        matches!(&sent[..], [Call::Modify { .. }, Call::Modify { settings, .. }] if settings.contains("Update"))
    );
    let endpoint = node.hns.endpoint(id).unwrap();
    assert!(
        endpoint.policies.iter().any(Policy::is::<ProviderAddress>),
        "Update replaces all: the others were sent along"
    );
    let acls = node.acls();
    assert!(acls.contains(&theirs));
    assert!(!acls.iter().any(|acl| acl.id.ends_with("allow-all")));
}

#[test]
fn a_pod_missing_in_hns_is_reported_and_retried() {
    let mut node = Node::usual();
    let report = node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    assert!(report.retry);
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::EndpointMissing);
    node.connect();
    let report = node.apply(&[]);
    assert_eq!(report, Default::default());
    let peer = Flow { source: [10, 9, 9, 9].into(), ..tcp("10.9.9.9", 80) };
    assert!(node.passes(Direction::Ingress, &peer));
    node.hns.set_fault(|_| Some(Err(Failure::new(HResult::RPC_S_SERVER_UNAVAILABLE, "gone"))));
    let report = node.dataplane.resync();
    assert!(report.retry);
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::HnsUnavailable);
    assert_eq!(report.node[0].reason, Reason::HnsUnavailable);
    node.hns.clear_fault();
    assert_eq!(node.apply(&[Delta::VtepRemoved("nobody".into(), IpVersion::V4)]), Default::default());
}

/// HNS chooses the address of an endpoint without one. IPAM refuses some of its choices.
#[test]
fn hns_chooses_the_address_of_a_pod() {
    let node = Node::usual();
    let choose =
        |refused: &[Ipv4Addr]| node.wiring.choose_address(&pod_id(), CONTAINER, refused).unwrap().unwrap();
    let at = |last: u8| Ipv4Addr::new(10, 244, 3, last);
    assert_eq!((choose(&[]), choose(&[])), (at(2), at(2)), "asked again, the same");
    assert_eq!(choose(&[at(2)]), at(3));
    assert_eq!(choose(&[at(2), at(3)]), at(4));
    let network = node.hns.network_by_name("Calico").unwrap().unwrap().id;
    assert_eq!(
        node.hns.endpoints_of_network(network).unwrap().len(),
        1,
        "nothing is left of the refused ones"
    );
    // It is closed from the beginning, and gets the MAC address that belongs to the address.
    assert!(node.acls().iter().all(|acl| acl.action == AclAction::Block) && !node.acls().is_empty());
    let pod = PodAttachment { addresses: addresses(at(4)), ..attachment(node.namespace()) };
    let interface = node.wiring.connect(&pod).unwrap();
    assert_eq!(network_of(&interface), (TUNNEL, 26));
    assert_eq!(node.endpoint().mac_address.to_lowercase(), "0e-2a-0a-f4-03-04");
    node.wiring.check(&pod).unwrap();
    node.wiring.disconnect(&pod.endpoint, CONTAINER).unwrap();
    assert!(node.hns.endpoints_of_network(network).unwrap().is_empty());
}

/// The network gets the block's subnet before the endpoint, and the pod that subnet's gateway.
#[test]
fn a_pod_of_a_new_block_gets_its_subnet() {
    let node = Node::usual();
    let of = |block: &str, address: &str| PodAttachment {
        addresses: vec![PodAddress::ipv4(address.parse().unwrap(), block.parse().unwrap())],
        ..attachment(node.namespace())
    };
    let interface = node.wiring.connect(&of("10.9.0.0/28", "10.9.0.4")).unwrap();
    assert_eq!(network_of(&interface), (Ipv4Addr::new(10, 9, 0, 1), 28));
    assert_eq!(node.endpoint().routes[0].next_hop, "10.9.0.1");
    assert_eq!(
        changes(&node).iter().filter(|name| **name == "create").count(),
        3,
        "network, namespace, endpoint"
    );
    // A block that overlaps a subnet cannot have one.
    let error = node.wiring.connect(&of("10.9.0.0/24", "10.9.0.77")).unwrap_err();
    assert!(error.to_string().contains("overlaps"), "{error}");

    let old = Node::new(Config::new(Config::SERVER_2019, NODE));
    let pod = PodAttachment { netns: old.namespace().to_string(), ..of("10.9.0.0/28", "10.9.0.4") };
    let error = old.wiring.connect(&pod).unwrap_err();
    assert!(error.to_string().contains("10.9.0.0/28, and networks of HNS 9.3 have one"), "{error}");
}

/// An address of the node's usual block.
fn addresses(address: Ipv4Addr) -> Vec<PodAddress> {
    vec![PodAddress::ipv4(address, "10.244.3.0/26".parse().unwrap())]
}

/// The gateway and the prefix length of the only address.
fn network_of(interface: &tortie_dataplane::PodInterface) -> (Ipv4Addr, u8) {
    let [own] = interface.addresses[..] else { panic!("{interface:?}") };
    let std::net::IpAddr::V4(gateway) = own.gateway else { panic!("{interface:?}") };
    (gateway, own.address.prefix_len())
}
