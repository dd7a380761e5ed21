//! Requests of the PowerShell module `hns.psm1` (microsoft/SDN, `Kubernetes/windows`), in the order in which scripts for clusters send
//! them: a network, the node's own endpoint, pods, remote endpoints, load balancers, routes and namespaces, and everything back.

use serde_json::{Value, json};
use tortie_hcn::{Guid, Kind};
use tortie_hns_emulator::LibraryService;

use crate::documents::others::{hns, old, read};

fn post(hns: &LibraryService, path: &str, document: &Value) -> Value {
    old(hns, "POST", path, document).unwrap()
}

fn id(object: &Value) -> String {
    object["ID"].as_str().unwrap().to_owned()
}

/// `New-HnsNetwork -Type L2Bridge -AddressPrefix … -Gateway … -Name … -AdapterName …`
fn network(hns: &LibraryService) -> String {
    let document = json!({"Type": "L2Bridge", "Name": "cbr0", "NetworkAdapterName": "Ethernet",
        "Subnets": [{"AddressPrefix": "10.244.3.0/24", "GatewayAddress": "10.244.3.1", "Policies": []}]});
    id(&post(hns, "/networks", &document))
}

#[test]
fn the_nodes_own_endpoint_is_attached_and_detached() {
    let hns = hns();
    let network = network(&hns);
    assert_eq!(old(&hns, "GET", "/networks", &Value::Null).unwrap()[0]["Name"], "cbr0");
    // New-HnsEndpoint, with members that have no value left out, and Attach-HnsHostEndpoint -CompartmentID 1
    let document = json!({"VirtualNetwork": network, "Policies": [], "Flags": 0, "Name": "cbr0_ep",
        "IPAddress": "10.244.3.2", "GatewayAddress": "0.0.0.0"});
    let endpoint = id(&post(&hns, "/endpoints", &document));
    let to_host = json!({"SystemType": "Host", "CompartmentId": 1});
    post(&hns, &format!("/endpoints/{endpoint}/attach"), &to_host);
    let again = old(&hns, "POST", &format!("/endpoints/{endpoint}/attach"), &to_host).unwrap_err();
    assert!(again.contains("already attached to the switch"), "{again}");
    post(&hns, &format!("/endpoints/{endpoint}/detach"), &json!({"SystemType": "Host"}));
    post(&hns, &format!("/endpoints/{endpoint}/attach"), &to_host);
    old(&hns, "DELETE", &format!("/endpoints/{endpoint}"), &Value::Null).unwrap();
    old(&hns, "DELETE", &format!("/networks/{network}"), &Value::Null).unwrap();
    assert_eq!(old(&hns, "GET", "/networks", &Value::Null).unwrap(), json!([]));
}

#[test]
fn pods_have_translation_routes_and_load_balancers() {
    let hns = hns();
    let network = network(&hns);
    // New-HnsEndpoint -EnableOutboundNat -OutboundNatExceptions … -RoutePolicies … -InboundNatPolicy …
    let policies = json!([{"Type": "OutBoundNAT", "ExceptionList": ["10.244.0.0/16", "10.96.0.0/12"]},
        {"Type": "ROUTE", "DestinationPrefix": "10.96.0.0/12", "NeedEncap": true},
        {"InternalPort": "80", "ExternalPort": "8080", "Type": "NAT"}]);
    let document =
        json!({"VirtualNetwork": network, "Policies": policies, "Flags": 0, "IPAddress": "10.244.3.9"});
    let pod = post(&hns, "/endpoints", &document);
    let types: Vec<&Value> =
        pod["Policies"].as_array().unwrap().iter().map(|policy| &policy["Type"]).collect();
    assert_eq!(types, ["OutBoundNAT", "ROUTE", "NAT"]);
    // New-HnsRemoteEndpoint
    let remote = json!({"VirtualNetwork": network, "Policies": [], "Flags": 0, "IPAddress": "10.244.1.9",
        "MacAddress": "66-00-00-00-00-01", "IsRemoteEndpoint": true});
    let remote = post(&hns, "/endpoints", &remote);
    assert_eq!(remote["IsRemoteEndpoint"], true);

    // New-HnsLoadBalancer -DSR, and New-HnsRoute -EncapEnabled
    let references = json!([format!("/endpoints/{}", id(&pod)), format!("/endpoints/{}", id(&remote))]);
    let balancer = json!({"Type": "ELB", "InternalPort": 8080, "ExternalPort": 80, "Protocol": 6,
        "VIPs": ["10.96.0.100"], "IsDSR": true});
    let balancer = post(&hns, "/policylists", &json!({"References": references, "Policies": [balancer]}));
    let route = json!({"Type": "ROUTE", "DestinationPrefix": "10.96.0.0/12", "NeedEncap": true});
    let list = json!({"References": [references[0]], "Policies": [route]});
    let route = post(&hns, "/policylists", &list);
    assert_eq!((&route["References"], &route["Policies"]), (&list["References"], &list["Policies"]));
    let of_new = read(&hns, Kind::SdnRoute, id(&route).parse::<Guid>().unwrap());
    assert_eq!(of_new["HostComputeEndpoints"], json!([id(&pod)]));
    let lists = old(&hns, "GET", "/policylists", &Value::Null).unwrap();
    assert_eq!(lists, json!([balancer, route]));

    // Remove-HnsPolicyList, and the rest of a script that cleans up
    for (path, objects) in [("policylists", [&balancer, &route]), ("endpoints", [&pod, &remote])] {
        for object in objects {
            old(&hns, "DELETE", &format!("/{path}/{}", id(object)), &Value::Null).unwrap();
        }
        assert_eq!(old(&hns, "GET", &format!("/{path}"), &Value::Null).unwrap(), json!([]), "{path}");
    }
}

#[test]
fn namespaces_get_and_lose_endpoints() {
    let hns = hns();
    let network = network(&hns);
    let document = json!({"VirtualNetwork": network, "Policies": [], "Flags": 0, "IPAddress": "10.244.3.9"});
    let endpoint = id(&post(&hns, "/endpoints", &document));
    // New-HnsNamespace -Endpoints …, and Update-HnsNamespace -EndpointsToRemove …
    let namespace = post(&hns, "/namespaces", &json!({"IsDefault": false}));
    assert_eq!(namespace["IsDefault"], false);
    let path = format!("/namespaces/{}", id(&namespace));
    let resource = json!({"Type": "Endpoint", "Data": {"Id": endpoint}});
    post(&hns, &format!("{path}/addResource"), &resource);
    let shown = old(&hns, "GET", &path, &Value::Null).unwrap();
    assert_eq!(shown["ResourceList"][0]["Data"]["Id"], json!(endpoint));
    assert!(old(&hns, "POST", &format!("{path}/refresh"), &resource).is_err());
    let nobody = json!({"Type": "Container", "Data": {"Id": "c"}});
    assert!(old(&hns, "POST", &format!("{path}/addResource"), &nobody).is_err());
    post(&hns, &format!("{path}/removeResource"), &resource);
    assert_eq!(old(&hns, "GET", &path, &Value::Null).unwrap()["ResourceList"], json!([]));
    old(&hns, "DELETE", &path, &Value::Null).unwrap();
    assert_eq!(old(&hns, "GET", "/namespaces", &Value::Null).unwrap(), json!([]));
}
