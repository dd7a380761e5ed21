//! The emulated HNS for other clients than Tortie: the documents that they send, and the old interface.

use std::net::Ipv4Addr;
use std::sync::Arc;

use serde_json::{Value, json};
use tortie_hcn::{Call, Guid, HResult, Hcn, Kind};
use tortie_hns_emulator::{Config, Emulator, LibraryService};

pub(super) fn hns() -> LibraryService {
    LibraryService::new(Arc::new(Emulator::new(Config::as_hns(Config::NEWEST, Ipv4Addr::new(172, 16, 0, 3)))))
}

/// A request of the old interface: what it gives, or why not.
pub(super) fn old(hns: &LibraryService, method: &str, path: &str, request: &Value) -> Result<Value, String> {
    let request = if request.is_null() { String::new() } else { request.to_string() };
    let settings = json!({"Method": method, "Path": path, "Request": request}).to_string();
    let answer = hns.call(&Call::Emulator { name: "hns-call".to_owned(), settings }).unwrap();
    let mut answer: Value = serde_json::from_str(&answer).unwrap();
    match answer["Success"] == true {
        true => Ok(answer["Output"].take()),
        false => Err(answer["Error"].as_str().unwrap().to_owned()),
    }
}

fn create(hns: &LibraryService, kind: Kind, network: Guid, settings: &Value) -> Result<Guid, HResult> {
    let call = Call::Create { kind, network, id: Guid::ZERO, settings: settings.to_string() };
    let id = hns.call(&call).map_err(|failure| failure.code)?;
    Ok(serde_json::from_str(&id).unwrap())
}

pub(super) fn read(hns: &LibraryService, kind: Kind, id: Guid) -> Value {
    serde_json::from_str(&hns.call(&Call::Query { kind, id, query: String::new() }).unwrap()).unwrap()
}

fn overlay() -> Value {
    json!({"Name": "o", "Type": "Overlay", "Subnets": [{"AddressPrefix": "10.244.3.0/24", "GatewayAddress": "10.244.3.1",
        "Policies": [{"Type": "VSID", "VSID": 4096}]}], "NetworkAdapterName": "Ethernet"})
}

#[test]
fn both_interfaces_show_the_same_objects() {
    let hns = hns();
    let network = old(&hns, "POST", "/networks/", &overlay()).unwrap();
    let id: Guid = network["ID"].as_str().unwrap().parse().unwrap();
    let subnet = json!({"AddressPrefix": "10.244.3.0/24", "GatewayAddress": "10.244.3.1", "Policies": [{"Type": "VSID", "VSID": 4096}]});
    assert_eq!((&network["Subnets"], &network["ManagementIP"]), (&json!([subnet]), &json!("172.16.0.3")));
    let new = read(&hns, Kind::Network, id);
    assert_eq!(new["Ipams"][0]["Subnets"][0]["Policies"][0]["Settings"], json!({"IsolationId": 4096}));

    let endpoint = json!({"Name": "e", "VirtualNetworkName": "o", "IPAddress": "10.244.3.9", "MacAddress": "0E-2A-0A-F4-03-09",
        "GatewayAddress": "10.244.3.1", "DNSServerList": "10.96.0.10,10.96.0.11", "DNSSuffix": "a.b",
        "Policies": [{"Type": "OutBoundNAT", "ExceptionList": ["10.0.0.0/8"]}, {"Type": "PA", "PA": "172.16.0.3"},
            {"Type": "NAT", "Protocol": "TCP", "InternalPort": 80, "ExternalPort": 8080},
            {"Type": "ROUTE", "DestinationPrefix": "10.96.0.0/12", "NeedEncap": true}]});
    let made = old(&hns, "POST", "/endpoints", &endpoint).unwrap();
    for (name, value) in endpoint.as_object().unwrap() {
        if name != "Policies" {
            assert_eq!(made[name], *value, "{name}");
        }
    }
    let id: Guid = made["ID"].as_str().unwrap().parse().unwrap();
    let new = read(&hns, Kind::Endpoint, id);
    assert_eq!(new["Dns"], json!({"Search": ["a.b"], "ServerList": ["10.96.0.10", "10.96.0.11"]}));
    let policies = json!([{"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.0.0.0/8"]}},
        {"Type": "ProviderAddress", "Settings": {"ProviderAddress": "172.16.0.3"}},
        {"Type": "PortMapping", "Settings": {"Protocol": 6, "InternalPort": 80, "ExternalPort": 8080}},
        {"Type": "SDNRoute", "Settings": {"DestinationPrefix": "10.96.0.0/12", "NeedEncap": true}}]);
    assert_eq!(new["Policies"], policies);
    let listed = old(&hns, "GET", "/endpoints/", &Value::Null).unwrap();
    assert_eq!(listed, json!([made]));
    let one = format!("/endpoints/{id}");
    old(&hns, "POST", &format!("{one}/attach"), &json!({"SystemType": "Host", "CompartmentId": 1})).unwrap();
    assert_eq!(old(&hns, "GET", &one, &Value::Null).unwrap()["State"], 3);
    assert!(old(&hns, "POST", &format!("{one}/attach"), &json!({})).is_err(), "it is attached");
    old(&hns, "POST", &format!("{one}/detach"), &json!({"SystemType": "Host"})).unwrap();
    assert_eq!(hns.call(&Call::Enumerate { kind: Kind::Namespace, query: String::new() }).unwrap(), "[]");
    assert_eq!(
        old(&hns, "GET", &format!("/endpointstats/{id}"), &Value::Null).unwrap()["EndpointId"],
        json!(id)
    );
    old(&hns, "DELETE", &one, &Value::Null).unwrap();
    for (method, path) in [
        ("GET", one.as_str()),
        ("DELETE", one.as_str()),
        ("GET", "/nothing"),
        ("PUT", "/networks"),
        ("GET", "/networks/x"),
    ] {
        assert!(old(&hns, method, path, &Value::Null).is_err(), "{method} {path}");
    }
    let version = old(&hns, "GET", "/globals/version", &Value::Null).unwrap();
    assert_eq!(version, json!({"Major": 15, "Minor": 4}));
}

#[test]
fn other_forms_of_members_are_understood_and_a_strict_hns_rejects_them() {
    let modern = json!({"Name": "n", "Type": "Overlay", "Flags": "EnableNonPersistent", "Policies": null, "Unknown": 1,
        "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.1.0.0/24", "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 5000}}],
            "Routes": [{"NextHop": "10.1.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    let hns = hns();
    let network = create(&hns, Kind::Network, Guid::ZERO, &modern).unwrap();
    assert_eq!(read(&hns, Kind::Network, network)["Flags"], 8);
    let strict =
        LibraryService::new(Arc::new(Emulator::new(Config::new(Config::NEWEST, Ipv4Addr::LOCALHOST))));
    for document in [modern, overlay()] {
        assert_eq!(create(&strict, Kind::Network, Guid::ZERO, &document), Err(HResult::HCN_E_INVALID_JSON));
    }
    // As azure-npm writes its first rules, and L4 proxies.
    let policies = json!([{"Type": "ACL", "Settings": {"Id": "x", "Action": "Allow", "Direction": "In", "Priority": 65499}},
        {"Type": "L4WFPPROXY", "Settings": {"InboundProxyPort": "80"}}, {"Type": "TierAcl", "Settings": {"Name": "t"}}]);
    let endpoint =
        create(&hns, Kind::Endpoint, network, &json!({"Policies": policies, "IpConfigurations": null}))
            .unwrap();
    let load_balancer = json!({"HostComputeEndpoints": [endpoint], "FrontendVIPs": ["10.96.0.1"],
        "PortMappings": [{"Protocol": "TCP", "InternalPort": 80, "ExternalPort": 80}]});
    let balancer = create(&hns, Kind::LoadBalancer, Guid::ZERO, &load_balancer).unwrap();
    assert_eq!(read(&hns, Kind::LoadBalancer, balancer)["PortMappings"][0]["Protocol"], 6);
    // hcsshim calls the list of routes Setting.
    let route = json!({"HostComputeEndpoints": [endpoint], "Setting": [{"DestinationPrefix": "169.254.169.254/24", "NextHop": "127.10.0.34"}]});
    let route = create(&hns, Kind::SdnRoute, Guid::ZERO, &route).unwrap();
    let shown = read(&hns, Kind::SdnRoute, route);
    assert_eq!((&shown["HostComputeEndpoints"], shown["Setting"].is_array()), (&json!([endpoint]), true));
    assert_eq!(
        create(&hns, Kind::SdnRoute, Guid::ZERO, &json!({"HostComputeEndpoints": [Guid::random()]})),
        Err(HResult::HCN_E_ENDPOINT_NOT_FOUND)
    );
    hns.call(&Call::Delete { kind: Kind::SdnRoute, id: route }).unwrap();
    assert_eq!(
        hns.call(&Call::Delete { kind: Kind::SdnRoute, id: route }).unwrap_err().code,
        HResult::ERROR_NOT_FOUND
    );
    // A network goes with its endpoints.
    hns.call(&Call::Delete { kind: Kind::Network, id: network }).unwrap();
    assert_eq!(hns.call(&Call::Enumerate { kind: Kind::Endpoint, query: String::new() }).unwrap(), "[]");
}

/// azure-npm sends back by Update what it has read.
#[test]
fn an_acl_that_was_read_can_be_sent_back() {
    let hns = hns();
    let network = json!({"Name": "n", "Type": "L2Bridge", "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.1.0.0/24",
        "Routes": [{"NextHop": "10.1.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    let network = create(&hns, Kind::Network, Guid::ZERO, &network).unwrap();
    let acl = json!({"Type": "ACL", "Settings": {"Id": "x", "Action": "Allow", "Direction": "In", "RuleType": "Host"}});
    let endpoint = create(&hns, Kind::Endpoint, network, &json!({"Policies": [acl]})).unwrap();
    let read = read(&hns, Kind::Endpoint, endpoint)["Policies"].take();
    assert_eq!(read, json!([acl]));
    let update = json!({"ResourceType": "Policy", "RequestType": "Update", "Settings": {"Policies": read}});
    hns.call(&Call::Modify { kind: Kind::Endpoint, id: endpoint, settings: update.to_string() }).unwrap();
}

/// A request to a running container, as hcsshim's `HotAttachEndpoint` sends it.
fn to_container(hns: &LibraryService, id: &str, request: &str, endpoint: Guid) -> Result<String, HResult> {
    let request = json!({"ResourceType": "Network", "RequestType": request, "Settings": endpoint});
    let settings = json!({"Id": id, "Request": request.to_string()}).to_string();
    let call = Call::Emulator { name: "modify-container".to_owned(), settings };
    hns.call(&call).map_err(|failure| failure.code)
}

#[test]
fn the_containers_of_a_pod_share_its_endpoint() {
    const NOT_FOUND: HResult = HResult(0xC037_010E);
    let hns = hns();
    let network = old(&hns, "POST", "/networks/", &overlay()).unwrap()["ID"].take();
    let endpoint = |name: &str| -> Guid {
        let document = json!({"Name": name, "VirtualNetwork": network});
        old(&hns, "POST", "/endpoints/", &document).unwrap()["ID"].as_str().unwrap().parse().unwrap()
    };
    let (first, second) = (endpoint("first"), endpoint("second"));
    let shared = |endpoint: Guid| {
        old(&hns, "GET", &format!("/endpoints/{endpoint}"), &Value::Null).unwrap()["SharedContainers"].take()
    };
    let namespaces = || {
        let all = hns.call(&Call::Enumerate { kind: Kind::Namespace, query: String::new() }).unwrap();
        serde_json::from_str::<Vec<Guid>>(&all).unwrap().len()
    };

    assert_eq!(to_container(&hns, "a", "Add", first), Err(NOT_FOUND), "it does not run");
    ["a", "b", "c"].iter().for_each(|id| hns.start_container(id));
    let open = |id: &str| {
        let settings = json!({"Id": id}).to_string();
        hns.call(&Call::Emulator { name: "open-container".to_owned(), settings })
            .map_err(|failure| failure.code)
    };
    assert_eq!((open("a"), open("d")), (Ok(String::new()), Err(NOT_FOUND)));
    assert_eq!(to_container(&hns, "a", "Update", first), Err(HResult::E_NOTIMPL));
    assert_eq!((shared(first), namespaces()), (Value::Null, 0));

    // Two containers share an endpoint, and each has it until it is detached.
    to_container(&hns, "a", "Add", first).unwrap();
    old(
        &hns,
        "POST",
        &format!("/endpoints/{first}/attach"),
        &json!({"SystemType": "Container", "ContainerId": "b"}),
    )
    .unwrap();
    assert_eq!((shared(first), namespaces()), (json!(["a", "b"]), 1));
    to_container(&hns, "c", "Add", second).unwrap();
    assert!(to_container(&hns, "c", "Add", first).is_err(), "it is in another pod");
    assert!(to_container(&hns, "c", "Remove", first).is_err(), "it is in another pod");
    to_container(&hns, "a", "Remove", first).unwrap();
    assert_eq!((shared(first), shared(second), namespaces()), (json!(["b"]), json!(["c"]), 2));

    // With the last container, the namespace goes. The endpoint stays.
    let detach = json!({"SystemType": "Container", "ContainerId": "b"});
    old(&hns, "POST", &format!("/endpoints/{first}/detach"), &detach).unwrap();
    assert_eq!((shared(first), namespaces()), (Value::Null, 1));

    // A container may have two endpoints, and takes them along.
    to_container(&hns, "c", "Add", first).unwrap();
    to_container(&hns, "c", "Remove", second).unwrap();
    assert_eq!((shared(first), shared(second), namespaces()), (json!(["c"]), Value::Null, 1));
    hns.stop_container("c").unwrap();
    assert_eq!((shared(first), namespaces()), (Value::Null, 0));
    assert_eq!(hns.stop_container("c").unwrap_err().code, NOT_FOUND);
}

/// kube-proxy asks for them before it starts, and hcsshim's old interface makes load balancers by them.
#[test]
fn policy_lists_are_load_balancers() {
    let hns = hns();
    assert_eq!(old(&hns, "GET", "/policylists/", &Value::Null).unwrap(), json!([]));
    let network = old(&hns, "POST", "/networks/", &overlay()).unwrap()["ID"].clone();
    let endpoint = json!({"VirtualNetwork": network, "IPAddress": "10.244.3.9"});
    let endpoint = old(&hns, "POST", "/endpoints/", &endpoint).unwrap()["ID"].clone();
    let policy = json!({"Type": "ELB", "Protocol": 6, "InternalPort": 8080, "ExternalPort": 80, "VIPs": ["10.96.0.1"],
        "SourceVIP": "10.244.3.2", "ILB": true, "IsDSR": true});
    let list =
        json!({"References": [format!("/endpoints/{}", endpoint.as_str().unwrap())], "Policies": [policy]});
    let made = old(&hns, "POST", "/policylists/", &list).unwrap();
    let id: Guid = made["ID"].as_str().unwrap().parse().unwrap();
    assert_eq!((&made["References"], &made["Policies"]), (&list["References"], &list["Policies"]));
    assert_eq!(old(&hns, "GET", "/policylists/", &Value::Null).unwrap(), json!([made]));
    let balancer = read(&hns, Kind::LoadBalancer, id);
    assert_eq!(balancer["HostComputeEndpoints"], json!([endpoint]));
    assert_eq!((&balancer["Flags"], &balancer["FrontendVIPs"]), (&json!(1), &json!(["10.96.0.1"])));
    let other = json!({"References": [], "Policies": [{"Type": "PROXY"}]});
    assert!(old(&hns, "POST", "/policylists/", &other).unwrap_err().contains("ELB"));
    let mixed = json!({"References": [], "Policies": [policy, {"Type": "ROUTE"}]});
    assert!(old(&hns, "POST", "/policylists/", &mixed).unwrap_err().contains("routes and other policies"));
    assert!(old(&hns, "POST", &format!("/policylists/{id}"), &list).unwrap_err().contains("not emulated"));
    old(&hns, "DELETE", &format!("/policylists/{id}"), &Value::Null).unwrap();
    assert_eq!(old(&hns, "GET", "/policylists/", &Value::Null).unwrap(), json!([]));
}

#[test]
fn mac_addresses_with_colons_are_shown_with_dashes() {
    let hns = hns();
    let network = create(&hns, Kind::Network, Guid::ZERO, &overlay()).unwrap();
    let document =
        json!({"IpConfigurations": [{"IpAddress": "10.244.3.2"}], "MacAddress": "a2:3a:c1:64:69:eb"});
    let id = create(&hns, Kind::Endpoint, network, &document).unwrap();
    assert_eq!(read(&hns, Kind::Endpoint, id)["MacAddress"], "a2-3a-c1-64-69-eb");
    // flannel adds, reads and removes routes with colons.
    let route = json!({"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": "10.244.1.0/24",
        "IsolationId": 4096, "ProviderAddress": "172.16.0.1", "DistributedRouterMacAddress": "66:00:00:00:00:01"}});
    for request in ["Add", "Remove", "Add"] {
        let request =
            json!({"ResourceType": "Policy", "RequestType": request, "Settings": {"Policies": [route]}});
        let call = Call::Modify { kind: Kind::Network, id: network, settings: request.to_string() };
        hns.call(&call).unwrap();
    }
    assert!(read(&hns, Kind::Network, network)["Policies"].as_array().unwrap().contains(&route));
}

/// What flannel's backend `host-gw` sends on Windows (`pkg/backend/hostgw/hostgw_windows.go`), and what it looks for in the answers.
#[test]
fn the_network_of_host_gw_has_an_address_and_an_endpoint_of_the_node() {
    let hns = hns();
    let subnet = json!({"AddressPrefix": "10.244.3.0/24", "GatewayAddress": "10.244.3.1"});
    let network =
        json!({"Name": "cbr0", "Type": "L2Bridge", "Subnets": [subnet], "DNSServerList": "10.96.0.10"});
    let network = old(&hns, "POST", "/networks/", &network).unwrap()["ID"].take();
    let shown = old(&hns, "GET", &format!("/networks/{}", network.as_str().unwrap()), &Value::Null).unwrap();
    assert_eq!(shown["ManagementIP"], "172.16.0.3");
    assert_eq!(shown["Subnets"][0]["AddressPrefix"], "10.244.3.0/24");
    assert_eq!(shown["Subnets"][0]["GatewayAddress"], "10.244.3.1");

    let attach = |name: &str, address: &str| {
        let document = json!({"Name": name, "IPAddress": address, "VirtualNetwork": network});
        let endpoint = old(&hns, "POST", "/endpoints/", &document).unwrap();
        assert_eq!(endpoint["IPAddress"], address);
        let endpoint: Guid = endpoint["ID"].as_str().unwrap().parse().unwrap();
        let request = json!({"SystemType": "Host", "CompartmentId": 1});
        let again = || old(&hns, "POST", &format!("/endpoints/{endpoint}/attach"), &request);
        again().unwrap();
        assert!(again().unwrap_err().contains("This endpoint is already attached to the switch."));
        endpoint
    };
    let endpoints = [attach("cbr0_ep", "10.244.3.2"), attach("other", "10.244.3.3")];
    let namespaces = || {
        let all = hns.call(&Call::Enumerate { kind: Kind::Namespace, query: String::new() }).unwrap();
        serde_json::from_str::<Vec<Guid>>(&all).unwrap()
    };
    let [own] = namespaces()[..] else { panic!("one compartment of the node") };
    let own = read(&hns, Kind::Namespace, own);
    assert_eq!((&own["NamespaceId"], &own["Type"]), (&json!(1), &json!("HostDefault")));
    for (endpoint, left) in endpoints.into_iter().zip([1, 0]) {
        let detach = json!({"SystemType": "Host"});
        old(&hns, "POST", &format!("/endpoints/{endpoint}/detach"), &detach).unwrap();
        assert_eq!(namespaces().len(), left, "the last one takes it along");
    }
}

/// The functions of the new interface beside those of objects, as the library calls them.
fn about(hns: &LibraryService, name: &str, id: Guid) -> Result<Value, HResult> {
    let call = Call::Emulator { name: name.to_owned(), settings: json!({ "Id": id }).to_string() };
    hns.call(&call).map(|text| serde_json::from_str(&text).unwrap()).map_err(|failure| failure.code)
}

#[test]
fn an_endpoint_tells_its_addresses_and_counters() {
    let hns = hns();
    let network = create(&hns, Kind::Network, Guid::ZERO, &overlay()).unwrap();
    let document = json!({"IpConfigurations": [{"IpAddress": "10.244.3.9"}]});
    let id = create(&hns, Kind::Endpoint, network, &document).unwrap();
    let addresses = json!([{"IpAddress": "10.244.3.9", "PrefixLength": 24}]);
    assert_eq!(about(&hns, "endpoint-addresses", id), Ok(addresses));
    // Without a switch, nothing is counted.
    let stats = json!({"EndpointId": id, "InstanceId": Guid::ZERO, "BytesReceived": 0, "BytesSent": 0, "PacketsReceived": 0,
        "PacketsSent": 0, "DroppedPacketsIncoming": 0, "DroppedPacketsOutgoing": 0});
    assert_eq!(about(&hns, "endpoint-stats", id), Ok(stats.clone()));
    assert_eq!(old(&hns, "GET", &format!("/endpointstats/{id}"), &Value::Null), Ok(stats));
    for name in ["endpoint-stats", "endpoint-addresses"] {
        assert_eq!(about(&hns, name, Guid::random()), Err(HResult::HCN_E_ENDPOINT_NOT_FOUND));
    }
    assert!(old(&hns, "GET", &format!("/endpointstats/{}", Guid::random()), &Value::Null).is_err());
}

#[test]
fn guest_network_services_are_kept_and_their_state_changes() {
    let hns = hns();
    let kind = Kind::GuestNetworkService;
    let machine = Guid::random();
    let document = json!({"Name": "g", "VirtualMachineId": machine, "MirrorHostNetworking": true, "Flags": 1,
        "SchemaVersion": {"Major": 2, "Minor": 0}});
    let id = create(&hns, kind, Guid::ZERO, &document).unwrap();
    let mut expected = document.clone();
    (expected["ID"], expected["State"]) = (json!(id), json!(1));
    assert_eq!(read(&hns, kind, id), expected);
    let named = json!({"Filter": json!({"Name": "G"}).to_string()}).to_string();
    let listed = hns.call(&Call::Enumerate { kind, query: named }).unwrap();
    assert_eq!(listed, json!([id]).to_string());

    let change = |settings: Value| {
        hns.call(&Call::Modify { kind, id, settings: settings.to_string() }).map_err(|failure| failure.code)
    };
    let state = |request: &str, state: &str| {
        change(json!({"ResourceType": "State", "RequestType": request, "Settings": {"State": state}}))
    };
    assert_eq!(state("Update", "Synchronized"), Ok(String::new()));
    assert_eq!(read(&hns, kind, id)["State"], 3);
    assert_eq!(state("Add", "Paused"), Err(HResult::HCN_E_REQUEST_UNSUPPORTED));
    assert_eq!(state("Update", "Asleep"), Err(HResult::HCN_E_INVALID_JSON));
    assert_eq!(change(json!({"RequestType": "Update"})), Err(HResult::HCN_E_INVALID_JSON));
    assert_eq!(read(&hns, kind, id)["State"], 3, "refused changes change nothing");

    let again = Call::Create { kind, network: Guid::ZERO, id, settings: "{}".to_owned() };
    assert_eq!(hns.call(&again).unwrap_err().code, HResult::ERROR_ALREADY_EXISTS);
    hns.call(&Call::Delete { kind, id }).unwrap();
    for call in [
        Call::Delete { kind, id },
        Call::Query { kind, id, query: String::new() },
        Call::Modify { kind, id, settings: "{}".to_owned() },
    ] {
        assert_eq!(hns.call(&call).unwrap_err().code, HResult::ERROR_NOT_FOUND);
    }
    let seen = Call::Emulator { name: "notifications".to_owned(), settings: json!({"Next": 0}).to_string() };
    let seen: Value = serde_json::from_str(&hns.call(&seen).unwrap()).unwrap();
    let types = seen["Notifications"].as_array().unwrap().iter().map(|it| it["Type"].as_u64().unwrap());
    assert_eq!(types.collect::<Vec<_>>(), [7, 0x11, 8]);
}

#[test]
fn guest_network_services_reserve_ports() {
    let hns = hns();
    let call = |name: &str, settings: Value| -> Result<Value, HResult> {
        let call = Call::Emulator { name: name.to_owned(), settings: settings.to_string() };
        let answer = hns.call(&call).map_err(|failure| failure.code)?;
        Ok(if answer.is_empty() { Value::Null } else { serde_json::from_str(&answer).unwrap() })
    };
    let reserve = |service: Guid, port: u16| {
        call("reserve-port", json!({"Service": service, "Protocol": 1, "Access": 1, "Port": port}))
    };
    let machine = Guid::random();
    let kind = Kind::GuestNetworkService;
    let one = create(&hns, kind, Guid::ZERO, &json!({"VirtualMachineId": machine})).unwrap();
    let other = create(&hns, kind, Guid::ZERO, &json!({})).unwrap();
    assert_eq!(reserve(Guid::random(), 80), Err(HResult::ERROR_NOT_FOUND));
    let port = reserve(one, 80).unwrap();
    assert_eq!((&port["StartingPort"], &port["EndingPort"]), (&json!(80), &json!(80)));
    assert_eq!(reserve(other, 80), Err(HResult::HCN_E_PORT_ALREADY_EXISTS));
    let range = call("reserve-ports", json!({"Service": other, "Count": 9})).unwrap();
    let entry = |machine: Guid, protocol: u32, starting: u16, ending: u16| json!({"TargetPartitionId": machine, "Protocol": protocol, "StartingPort": starting, "EndingPort": ending});
    let expected = json!([entry(machine, 1, 80, 80), entry(Guid::ZERO, 3, 49_152, 49_161)]);
    assert_eq!(call("port-reservations", json!({})), Ok(expected));
    let release = |handle: &Value| call("release-ports", json!({"Handle": handle["Handle"]}));
    hns.call(&Call::Delete { kind, id: other }).unwrap();
    assert_eq!(
        call("port-reservations", json!({})),
        Ok(json!([entry(machine, 1, 80, 80)])),
        "they end with their service"
    );
    assert_eq!(hns.open_reservations(), 2);
    release(&range).unwrap();
    release(&port).unwrap();
    assert_eq!(release(&port), Err(HResult::E_INVALIDARG));
    reserve(one, 80).unwrap();
    hns.disconnect();
    assert_eq!((hns.open_reservations(), call("port-reservations", json!({}))), (0, Ok(json!([]))));
}

#[test]
fn handles_of_the_service_are_counted() {
    let hns = hns();
    let call = |name: &str, settings: Value| {
        let call = Call::Emulator { name: name.to_owned(), settings: settings.to_string() };
        hns.call(&call).map_err(|failure| failure.code)
    };
    let handle: u64 = call("open-service", json!({})).unwrap().parse().unwrap();
    assert_eq!(hns.open_services(), 1);
    assert_eq!(call("close", json!({"Handle": handle})), Err(HResult::E_INVALIDARG), "it is of no object");
    call("close-service", json!({"Handle": handle})).unwrap();
    assert_eq!(call("close-service", json!({"Handle": handle})), Err(HResult::E_INVALIDARG));
    call("open-service", json!({})).unwrap();
    hns.disconnect();
    assert_eq!(hns.open_services(), 0, "handles do not outlive HNS");
}

#[test]
fn the_old_interface_has_members_of_its_own_for_ipv6() {
    let hns = hns();
    let network = json!({"Name": "b", "Type": "L2Bridge", "Subnets": [
        {"AddressPrefix": "10.1.0.0/24", "GatewayAddress": "10.1.0.1"}, {"AddressPrefix": "fd00:1::/64", "GatewayAddress": "fd00:1::1"}]});
    let network = old(&hns, "POST", "/networks/", &network).unwrap();
    assert_eq!(network["Subnets"][1]["GatewayAddress"], "fd00:1::1");
    let endpoint = json!({"Name": "e", "VirtualNetwork": network["ID"], "IPAddress": "10.1.0.9", "PrefixLength": 24,
        "GatewayAddress": "10.1.0.1", "IPv6Address": "fd00:1::9", "IPv6PrefixLength": 64, "GatewayAddressV6": "fd00:1::1"});
    let made = old(&hns, "POST", "/endpoints/", &endpoint).unwrap();
    for (name, value) in endpoint.as_object().unwrap() {
        assert_eq!(made[name], *value, "{name}");
    }
    let new = read(&hns, Kind::Endpoint, made["ID"].as_str().unwrap().parse().unwrap());
    assert_eq!(new["IpConfigurations"][1]["IpAddress"], "fd00:1::9");
    assert_eq!(new["Routes"][1], json!({"NextHop": "fd00:1::1", "DestinationPrefix": "::/0"}));
    let six = json!({"VirtualNetwork": network["ID"], "IPv6Address": "fd00:1::10"});
    let six = old(&hns, "POST", "/endpoints/", &six).unwrap();
    assert!(six.get("IPAddress").is_none() && six["IPv6Address"] == "fd00:1::10", "{six}");
}
