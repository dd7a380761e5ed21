//! The objects of the emulated HNS: what is accepted, and what is rejected with which code.

use std::net::Ipv4Addr;

use crate::documents::support::*;
use serde_json::{Value, json};
use tortie_hcn::schema::{
    DrMacAddress, Endpoint, HostRoute, Modify, Network, Policy, ProviderAddress, RequestType, lenient,
};
use tortie_hcn::{Call, Class, Guid, HResult, Hcn, HcnExt, Kind, Version};
use tortie_hns_emulator::{Config, Emulator};

#[test]
fn invalid_networks_are_rejected() {
    let subnet = "/Ipams/0/Subnets/0";
    let at = |path: &str| format!("{subnet}{path}");
    let cases = [
        (at("/Gateway"), Some(json!("10.244.3.1")), HResult::HCN_E_INVALID_JSON),
        ("/Flags".into(), Some(json!("many")), HResult::HCN_E_INVALID_JSON),
        ("/Type".into(), Some(json!("Flat")), HResult::HCN_E_INVALID_NETWORK_TYPE),
        (at("/IpAddressPrefix"), Some(json!("10.244.3.1/26")), HResult::HCN_E_INVALID_PREFIX),
        (at("/Routes"), None, HResult::HCN_E_INVALID_NETWORK),
        (
            at("/Routes/0"),
            Some(json!({"NextHop": "10.244.3.1", "DestinationPrefix": "10.0.0.0/8"})),
            HResult::HCN_E_INVALID_NETWORK,
        ),
        (at("/Routes/0"), Some(json!({"DestinationPrefix": "0.0.0.0/0"})), HResult::HCN_E_INVALID_IP),
        (
            at("/Routes/0"),
            Some(json!({"NextHop": "10.9.9.9", "DestinationPrefix": "0.0.0.0/0"})),
            HResult::HCN_E_INVALID_IP,
        ),
        (at("/Policies"), None, HResult::HCN_E_INVALID_POLICY),
        (at("/Policies/0/Settings/IsolationId"), Some(json!(4095)), HResult::HCN_E_INVALID_POLICY),
        (at("/Policies/0/Settings/IsolationId"), Some(json!(1 << 24)), HResult::HCN_E_INVALID_POLICY),
        ("/Ipams".into(), Some(json!([])), HResult::HCN_E_INVALID_NETWORK),
        ("/Policies/0".into(), Some(acl(1000)), HResult::HCN_E_INVALID_POLICY_TYPE),
    ];
    for (at, value, code) in cases {
        let hcn = emulator();
        let document = with(overlay("Calico"), &at, value);
        assert_eq!(create(&hcn, Kind::Network, Guid::ZERO, &document), Err(code), "{document}");
        assert_eq!(hcn.networks(), Ok(vec![]), "nothing is left of {document}");
    }
}

#[test]
fn a_lenient_hns_ignores_unknown_members() {
    let mut config = Config::new(Config::SERVER_2022, Ipv4Addr::LOCALHOST);
    config.strict = false;
    let hcn = Emulator::new(config);
    let document = with(overlay("Calico"), "/Gateway", Some(json!("10.244.3.1")));
    create(&hcn, Kind::Network, Guid::ZERO, &document).unwrap();
}

#[test]
fn overlays_report_their_provider_address_and_a_new_mac_each_time() {
    let hcn = emulator();
    let mut macs = Vec::new();
    for _ in 0..2 {
        let id = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
        let network = hcn.network_by_name("CALICO").unwrap().unwrap();
        assert_eq!(network.id, id);
        let provider: Vec<ProviderAddress> =
            network.policies.iter().filter_map(|policy| policy.settings().unwrap()).collect();
        assert_eq!(provider[0].provider_address, "172.16.0.3");
        macs.extend(network.policies.iter().filter_map(|p| p.settings::<DrMacAddress>().unwrap()));
        assert!(network.policies.iter().any(Policy::is::<HostRoute>));
        assert_eq!(
            create(&hcn, Kind::Network, Guid::ZERO, &overlay("calico")),
            Err(HResult::HCN_E_NETWORK_ALREADY_EXISTS)
        );
        hcn.delete_network(id).unwrap();
        assert!(hcn.network(id).unwrap_err().is_not_found());
    }
    assert_ne!(macs[0].address, macs[1].address);
}

#[test]
fn remote_subnet_routes() {
    let hcn = emulator();
    let id = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let route = |prefix: &str, provider: &str| {
        json!([{"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": prefix, "IsolationId": 4096,
            "ProviderAddress": provider, "DistributedRouterMacAddress": "66-00-00-00-00-01"}}])
    };
    let (a, b) = (route("10.244.1.0/26", "172.16.0.1"), route("10.244.1.0/26", "172.16.0.2"));
    let change = |request, what: &Value| policies(&hcn, Kind::Network, id, request, what.clone());
    assert_eq!(change("Add", &a), Ok(()));
    assert_eq!(change("Add", &a), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));
    assert_eq!(change("Add", &b), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS), "one route for a prefix");
    assert_eq!(change("Remove", &b), Err(HResult::HCN_E_POLICY_NOT_FOUND), "named whole");
    assert_eq!(change("Remove", &a), Ok(()));
    assert_eq!(change("Add", &b), Ok(()));
    let wrong = with(a, "/0/Settings/DistributedRouterMacAddress", Some(json!("66:00:00:00:00:01")));
    assert_eq!(change("Add", &wrong), Err(HResult::HCN_E_INVALID_POLICY));
}

#[test]
fn invalid_endpoints_are_rejected() {
    let cases = [
        ("/MacAddress", Some(json!("0E:2A:0a:f4:03:07")), HResult::HCN_E_INVALID_ENDPOINT),
        ("/HostComputeNamespace", Some(json!(Guid::random())), HResult::HCN_E_INVALID_ENDPOINT),
        ("/HostComputeNetwork", Some(json!(Guid::random())), HResult::HCN_E_INVALID_JSON_REFERENCE),
        ("/HostComputeNetwork", Some(json!("{x}")), HResult::HCN_E_INVALID_JSON),
        ("/NetworkCompartmentID", Some(json!(1)), HResult::HCN_E_INVALID_JSON),
        ("/IpConfigurations/0/IpAddress", Some(json!("10.245.0.1")), HResult::HCN_E_INVALID_IP),
        ("/IpConfigurations/0/IpAddress", Some(json!("fe80::1")), HResult::HCN_E_INVALID_IP),
        ("/IpConfigurations/0/IpAddress", Some(json!("10.244.3.1")), HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
        (
            "/IpConfigurations/0/IpAddress",
            Some(json!("10.244.3.63")),
            HResult::HCN_E_ADDR_INVALID_OR_RESERVED,
        ),
        ("/IpConfigurations/0/IpAddress", Some(json!("10.244.3.9")), HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
        ("/Policies", Some(json!([acl(0)])), HResult::HCN_E_INVALID_POLICY),
        ("/Policies", Some(json!([acl(65_501)])), HResult::HCN_E_INVALID_POLICY),
        ("/Policies", Some(json!([with(acl(9), "/Settings/Action", None)])), HResult::HCN_E_INVALID_POLICY),
        (
            "/Policies",
            Some(json!([with(acl(9), "/Settings/Action", Some(json!("Pass")))])),
            HResult::HCN_E_INVALID_POLICY,
        ),
        (
            "/Policies",
            Some(json!([with(acl(9), "/Settings/RuleType", Some(json!("Host")))])),
            HResult::HCN_E_INVALID_POLICY,
        ),
        (
            "/Policies",
            Some(json!([with(acl(9), "/Settings/RemoteAddresses", Some(json!("some-set")))])),
            HResult::HCN_E_INVALID_POLICY,
        ),
        (
            "/Policies",
            Some(json!([{"Type": "HostRoute", "Settings": {}}])),
            HResult::HCN_E_INVALID_POLICY_TYPE,
        ),
        (
            "/Policies",
            Some(json!([{"Type": "InterfaceParameters", "Settings": {"Mtu": 1400}},
            {"Type": "InterfaceParameters", "Settings": {"Mtu": 1450}}])),
            HResult::HCN_INTERFACEPARAMETERS_ALREADY_APPLIED,
        ),
    ];
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    create(&hcn, Kind::Endpoint, network, &endpoint("10.244.3.9")).unwrap();
    for (at, value, code) in cases {
        let document = with(endpoint("10.244.3.7"), at, value);
        assert_eq!(create(&hcn, Kind::Endpoint, network, &document), Err(code), "{document}");
    }
    assert_eq!(hcn.endpoints_of_network(network).unwrap().len(), 1);
    let nowhere = create(&hcn, Kind::Endpoint, Guid::random(), &endpoint("10.244.3.7"));
    assert_eq!(nowhere, Err(HResult::HCN_E_NETWORK_NOT_FOUND));
}

#[test]
fn endpoint_policies_are_added_removed_and_replaced() {
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let id = create(&hcn, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
    let change = |request, what: &[Value]| policies(&hcn, Kind::Endpoint, id, request, json!(what));
    let count = || hcn.endpoint(id).unwrap().policies.len();
    assert_eq!(change("Add", &[acl(1), acl(2)]), Ok(()));
    assert_eq!(change("Add", &[acl(3), acl(1)]), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));
    assert_eq!(count(), 2, "a refused request changes nothing");
    assert_eq!(change("Remove", &[acl(1), acl(9)]), Err(HResult::HCN_E_POLICY_NOT_FOUND));
    assert_eq!(count(), 2);
    assert_eq!(change("Remove", &[acl(1)]), Ok(()));
    assert_eq!(count(), 1);
    assert_eq!(change("Update", &[acl(5), acl(6), acl(7)]), Ok(()));
    assert_eq!(count(), 3);
    assert_eq!(change("Refresh", &[]), Err(HResult::HCN_E_REQUEST_UNSUPPORTED));
    let port = json!({"RequestType": "Add", "ResourceType": "Port", "Settings": {}});
    assert_eq!(modify(&hcn, Kind::Endpoint, id, &port), Err(HResult::HCN_E_REQUEST_UNSUPPORTED));
}

#[test]
fn attach_and_detach() {
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let id = create(&hcn, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
    // As containerd writes it.
    let namespace =
        create(&hcn, Kind::Namespace, Guid::ZERO, &json!({"SchemaVersion": {"Major": 0, "Minor": 0}}))
            .unwrap();
    let add = Modify::namespace_endpoint(RequestType::Add, id);
    let code = |result: Result<(), tortie_hcn::Error>| match result.unwrap_err() {
        tortie_hcn::Error::Call { failure, .. } => failure.code,
        other => panic!("{other}"),
    };
    hcn.modify_namespace(namespace, &add).unwrap();
    assert_eq!(hcn.endpoint(id).unwrap().host_compute_namespace, namespace);
    assert_eq!(hcn.endpoint(id).unwrap().base.state, Some(3));
    assert_eq!(hcn.namespace(namespace).unwrap().endpoints().collect::<Vec<_>>(), [id]);
    assert_eq!(code(hcn.modify_namespace(namespace, &add)), HResult::HCN_E_ENDPOINT_NAMESPACE_ALREADY_EXISTS);

    let remove = Modify::namespace_endpoint(RequestType::Remove, id);
    hcn.modify_namespace(namespace, &remove).unwrap();
    assert_eq!(hcn.modify_namespace(namespace, &remove).unwrap_err().class(), Class::NotFound);
    assert_eq!(hcn.endpoint(id).unwrap().base.state, Some(4));

    hcn.modify_namespace(namespace, &add).unwrap();
    hcn.delete_namespace(namespace).unwrap();
    assert!(hcn.endpoint(id).unwrap().host_compute_namespace.is_zero(), "the endpoint stays without it");
    assert_eq!(code(hcn.modify_namespace(namespace, &add)), HResult::ERROR_NOT_FOUND);
    assert_eq!(
        code(hcn.delete_network(network)),
        HResult::HCN_E_ENTITY_HAS_REFERENCES,
        "a network with endpoints"
    );
    hcn.delete_endpoint(id).unwrap();
    assert_eq!(hcn.delete_endpoint(id).unwrap_err().class(), Class::NotFound);
}

#[test]
fn deleting_an_attached_endpoint_detaches_it() {
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let id = create(&hcn, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
    let namespace = create(&hcn, Kind::Namespace, Guid::ZERO, &json!({})).unwrap();
    hcn.modify_namespace(namespace, &Modify::namespace_endpoint(RequestType::Add, id)).unwrap();
    hcn.delete_endpoint(id).unwrap();
    assert_eq!(hcn.namespace(namespace).unwrap().resources, []);
}

#[test]
fn filters_and_identifiers_in_any_case() {
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let other = with(overlay("Other"), "/Type", Some(json!("L2Bridge")));
    let other = create(&hcn, Kind::Network, Guid::ZERO, &with(other, "/Policies", None)).unwrap();
    let a = create(&hcn, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
    let b = create(&hcn, Kind::Endpoint, other, &endpoint("10.244.3.7")).unwrap();
    let upper = network.to_string().to_uppercase();
    let cases = [
        (json!({}), vec![a, b]),
        (json!({"VirtualNetwork": upper}), vec![a]),
        (json!({"HostComputeNetwork": other}), vec![b]),
        (json!({"ID": a.to_string().to_uppercase()}), vec![a]),
        (json!({"Name": "ABC_calico", "ID": b}), vec![b]),
        (json!({"State": 1}), vec![a, b]),
        (json!({"State": 3}), vec![]),
        (json!({"Nonsense": 3}), vec![]),
    ];
    for (filter, mut expected) in cases {
        let query = json!({"SchemaVersion": {"Major": 2, "Minor": 0}, "Filter": filter.to_string()});
        let call = Call::Enumerate { kind: Kind::Endpoint, query: query.to_string() };
        let found: Vec<Guid> = serde_json::from_str(&hcn.call(&call).unwrap()).unwrap();
        expected.sort();
        assert_eq!(found, expected, "{filter}");
    }
    let unquoted =
        Call::Enumerate { kind: Kind::Network, query: json!({"Filter": {"Name": "x"}}).to_string() };
    assert_eq!(hcn.call(&unquoted).unwrap_err().code, HResult::HCN_E_INVALID_JSON, "a filter is a string");
}

#[test]
fn zero_values_are_omitted_from_answers() {
    let hcn = emulator();
    let nat = with(with(overlay("nat"), "/Type", Some(json!("NAT"))), "/Policies", None);
    let nat = create(&hcn, Kind::Network, Guid::ZERO, &nat).unwrap();
    let query = Call::Query { kind: Kind::Network, id: nat, query: String::new() };
    let answer: Value = serde_json::from_str(&hcn.call(&query).unwrap()).unwrap();
    assert_eq!(answer.get("Type"), None);
    assert_eq!(answer.get("Flags"), None);

    let allow = with(acl(1), "/Settings/Action", Some(json!("Allow")));
    let document = with(endpoint("10.244.3.7"), "/Policies", Some(json!([allow])));
    let id = create(&hcn, Kind::Endpoint, nat, &document).unwrap();
    let query = Call::Query { kind: Kind::Endpoint, id, query: String::new() };
    let answer: Value = serde_json::from_str(&hcn.call(&query).unwrap()).unwrap();
    let settings = json!({"Id": "x", "Protocols": "256", "RuleType": "Switch", "Priority": 1});
    assert_eq!(answer["Policies"][0]["Settings"], settings);
    assert_eq!(answer["IpConfigurations"][0]["PrefixLength"], 26, "the subnet's");
}

#[test]
fn clients_choose_identifiers_and_each_is_unique() {
    let hcn = emulator();
    let id = Guid::random();
    let network = Network { id, ..lenient(&overlay("Calico").to_string()).unwrap() };
    assert_eq!(hcn.create_network(&network), Ok(id));
    let again =
        Endpoint { id, host_compute_network: id, ..lenient(&endpoint("10.244.3.7").to_string()).unwrap() };
    assert_eq!(hcn.create_endpoint(&again).unwrap_err().class(), Class::AlreadyExists);
    let chosen = Endpoint { id: Guid::ZERO, ..again };
    assert!(!hcn.create_endpoint(&chosen).unwrap().is_zero());
    assert_eq!(hcn.version(), Ok(Version::new(13, 2)));
    let nonsense = Call::Emulator { name: "dance".into(), settings: String::new() };
    assert_eq!(hcn.call(&nonsense).unwrap_err().code, HResult::E_NOTIMPL);
}

#[test]
fn a_port_of_the_node_leads_to_one_endpoint() {
    let hcn = emulator();
    let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
    let mapped = |address: &str, port: u16| {
        let mapping = json!({"Protocol": 17, "InternalPort": 53, "ExternalPort": port});
        let policies = json!([{"Type": "PortMapping", "Settings": mapping}]);
        with(endpoint(address), "/Policies", Some(policies))
    };
    let one = create(&hcn, Kind::Endpoint, network, &mapped("10.244.3.7", 5353)).unwrap();
    let second = |port| create(&hcn, Kind::Endpoint, network, &mapped("10.244.3.8", port));
    assert_eq!(second(5353), Err(HResult::HCN_E_PORT_ALREADY_EXISTS));
    let two = second(5354).unwrap();
    let add = json!({"Policies": mapped("10.244.3.8", 5353)["Policies"]});
    let request = json!({"ResourceType": "Policy", "RequestType": "Add", "Settings": add});
    let modify = |id| hcn.call(&Call::Modify { kind: Kind::Endpoint, id, settings: request.to_string() });
    assert_eq!(modify(two).unwrap_err().code, HResult::HCN_E_PORT_ALREADY_EXISTS);
    hcn.delete_endpoint(one).unwrap();
    modify(two).unwrap();
}

/// Other clients of HNS use them.
#[test]
fn policies_without_effect_are_stored_unless_the_emulator_is_strict() {
    for strict in [true, false] {
        let config = Config::new(Config::NEWEST, Ipv4Addr::LOCALHOST);
        let hcn = Emulator::new(Config { strict, ..config });
        let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
        for kind in ["L4WFPPROXY", "TierAcl"] {
            let policies = json!([{"Type": kind, "Settings": {"Any": "thing"}}]);
            let document = with(endpoint("10.244.3.7"), "/Policies", Some(policies));
            match create(&hcn, Kind::Endpoint, network, &document) {
                Ok(id) => {
                    assert!(!strict, "{kind}");
                    let stored = hcn.endpoint(id).unwrap().policies;
                    assert_eq!(
                        (stored[0].r#type.as_str(), &stored[0].settings["Any"]),
                        (kind, &json!("thing"))
                    );
                    hcn.delete_endpoint(id).unwrap();
                }
                Err(code) => assert!(strict, "{kind}: {code}"),
            }
        }
    }
}

#[test]
fn a_load_balancer_is_replaced_as_a_whole_where_hns_can() {
    for version in [Config::SERVER_2022, Config::NEWEST] {
        let hcn = Emulator::new(Config::new(version, Ipv4Addr::LOCALHOST));
        let ports = |external: u16| json!([{"Protocol": 6, "InternalPort": 80, "ExternalPort": external, "DistributionType": 0}]);
        let balancer = |vip: &str, external: u16| json!({"FrontendVIPs": [vip], "PortMappings": ports(external), "SchemaVersion": {"Major": 2, "Minor": 0}});
        let one = create(&hcn, Kind::LoadBalancer, Guid::ZERO, &balancer("10.96.0.1", 80)).unwrap();
        create(&hcn, Kind::LoadBalancer, Guid::ZERO, &balancer("10.96.0.2", 80)).unwrap();
        let modify = |id: Guid, document: Value| {
            hcn.call(&Call::Modify { kind: Kind::LoadBalancer, id, settings: document.to_string() })
                .map_err(|failure| failure.code)
        };
        if version != Config::NEWEST {
            assert_eq!(modify(one, balancer("10.96.0.1", 81)), Err(HResult::E_NOTIMPL));
            continue;
        }
        assert_eq!(modify(one, balancer("10.96.0.1", 80)), Ok(String::new()), "as it was");
        assert_eq!(modify(one, balancer("10.96.0.1", 81)), Ok(String::new()));
        assert_eq!(hcn.load_balancer(one).unwrap().port_mappings[0].external_port, 81);
        assert_eq!(modify(one, balancer("10.96.0.2", 80)), Err(HResult::HCN_E_PORT_ALREADY_EXISTS));
        assert_eq!(
            hcn.load_balancer(one).unwrap().frontend_vips,
            ["10.96.0.1"],
            "a refused change has no effect"
        );
        assert_eq!(modify(Guid::random(), balancer("10.96.0.3", 80)), Err(HResult::ERROR_NOT_FOUND));
    }
}

#[test]
fn subnets_come_and_go_while_they_are_unused() {
    let node = Node::new(Config::new(Config::SERVER_2022, Ipv4Addr::LOCALHOST));
    let subnets = |node: &Node, request: &str, subnets: Value| {
        let settings = json!({"Subnets": subnets});
        let request = json!({"RequestType": request, "ResourceType": "Subnet", "Settings": settings});
        modify(&node.hns, Kind::Network, node.network, &request)
    };
    let subnet = |net: &str, gateway: &str| {
        json!([{"IpAddressPrefix": net,
            "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 4096}}],
            "Routes": [{"NextHop": gateway, "DestinationPrefix": "0.0.0.0/0"}]}])
    };
    for (net, gateway, code) in [
        ("10.244.3.0/27", "10.244.3.1", HResult::HCN_E_INVALID_SUBNET),
        ("10.244.0.0/16", "10.244.0.1", HResult::HCN_E_INVALID_SUBNET),
        ("10.245.0.0/26", "10.246.0.1", HResult::HCN_E_INVALID_IP),
    ] {
        assert_eq!(subnets(&node, "Add", subnet(net, gateway)), Err(code), "{net}");
    }
    subnets(&node, "Add", subnet("10.245.0.0/26", "10.245.0.1")).unwrap();
    let endpoint = create(&node.hns, Kind::Endpoint, node.network, &endpoint("10.245.0.7")).unwrap();
    let network = node.hns.network(node.network).unwrap();
    let second = json!([{"ID": network.subnets().nth(1).unwrap().id}]);
    assert_eq!(subnets(&node, "Remove", second.clone()), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
    assert_eq!(node.hns.network(node.network).unwrap().subnets().count(), 2, "a refusal changes nothing");
    node.hns.delete_endpoint(endpoint).unwrap();
    subnets(&node, "Remove", second.clone()).unwrap();
    assert_eq!(subnets(&node, "Remove", second), Err(HResult::HCN_E_SUBNET_NOT_FOUND));

    let old = Node::new(Config::new(Config::SERVER_2019, Ipv4Addr::LOCALHOST));
    let refused = subnets(&old, "Add", subnet("10.245.0.0/26", "10.245.0.1"));
    assert_eq!(refused, Err(HResult::HCN_E_REQUEST_UNSUPPORTED));
}
