//! The old interface of HNS (`HNSCall` of `vmcompute.dll`): methods and paths on the same objects, in documents of another
//! shape (hcsshim, `internal/hns`; SDN scripts, `hns.psm1`).

use std::sync::{Mutex, PoisonError};

use crate::config::Config;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tortie_hcn::schema::{Modify, RequestType};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind};

use crate::containers::{self, Containers};
use crate::counters::ENDPOINT_STATS;
use crate::policy_lists::{is_route, new_load_balancer, new_route, old_load_balancer, old_route};

/// Members by their old and new names.
type Renamed = &'static [(&'static str, &'static str)];

/// Policies of both interfaces: their types, and the members with other names. `VSID` is that of a subnet.
const POLICIES: [(&str, &str, Renamed); 7] = [
    ("OutBoundNAT", "OutBoundNAT", &[("ExceptionList", "Exceptions"), ("VIP", "VirtualIP")]),
    ("ROUTE", "SDNRoute", &[]),
    ("PA", "ProviderAddress", &[("PA", "ProviderAddress")]),
    ("NAT", "PortMapping", &[]),
    ("VSID", "VSID", &[("VSID", "IsolationId")]),
    ("VLAN", "VLAN", &[("VLAN", "IsolationId")]),
    ("ACL", "ACL", &[("Protocol", "Protocols"), ("LocalPort", "LocalPorts"), ("RemotePort", "RemotePorts")]),
];
/// Members of networks that only the old shape has.
const OF_OLD_NETWORKS: [&str; 6] =
    ["Subnets", "MacPools", "NetworkAdapterName", "DNSSuffix", "DNSServerList", "SourceMac"];
/// Members of endpoints that only the old shape has.
const OF_OLD_ENDPOINTS: [&str; 8] = [
    "VirtualNetwork",
    "VirtualNetworkName",
    "IPAddress",
    "GatewayAddress",
    "IPv6Address",
    "GatewayAddressV6",
    "DNSSuffix",
    "DNSServerList",
];
/// The members of an old endpoint for each family: address, length of the prefix, gateway; and the default route of the family.
const OLD_FAMILIES: [(&str, &str, &str, &str); 2] = [
    ("IPAddress", "PrefixLength", "GatewayAddress", "0.0.0.0/0"),
    ("IPv6Address", "IPv6PrefixLength", "GatewayAddressV6", "::/0"),
];

/// A request.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct V1Request {
    method: String,
    path: String,
    #[serde(default)]
    request: String,
}

/// What only this interface has: containers, and the MAC addresses of accelerated networks.
#[derive(Default)]
pub(crate) struct V1 {
    mac_addresses: Mutex<Vec<Value>>,
    pub(crate) containers: Containers,
}

impl V1 {
    /// The answer to a request: `Success` with `Output`, or `Error`.
    pub(crate) fn answer(&self, hns: &dyn Hcn, request: &V1Request) -> Value {
        match self.output(hns, request) {
            Ok(output) => json!({"Success": true, "Output": output}),
            Err(failure) => json!({"Success": false, "Error": failure.to_string()}),
        }
    }

    fn output(
        &self,
        hns: &dyn Hcn,
        V1Request { method, path, request }: &V1Request,
    ) -> Result<Value, Failure> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let document = || -> Result<Value, Failure> {
            serde_json::from_str(request)
                .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))
        };
        match (method.to_ascii_uppercase().as_str(), &parts[..]) {
            ("GET", ["globals", "version"]) => parse(&hns.call(&Call::Version)?),
            ("GET", ["accelnet"]) => Ok(self.mac_list()),
            ("POST", ["accelnet"]) => {
                let list = document()?["MacAddressList"].as_array().cloned().unwrap_or_default();
                *self.mac_addresses() = list;
                Ok(self.mac_list())
            }
            ("DELETE", ["accelnet"]) => {
                self.mac_addresses().clear();
                Ok(self.mac_list())
            }
            ("GET", ["endpointstats", id]) => {
                let settings = json!({"Id": guid(id)?}).to_string();
                parse(&hns.call(&Call::Emulator { name: ENDPOINT_STATS.to_owned(), settings })?)
            }
            ("POST", ["endpoints", id, "attach"]) => {
                let request = document()?;
                match container(&request) {
                    Some(container) => self.containers.attach(hns, container, guid(id)?)?,
                    None if is_of_node(&request) => containers::attach_to_node(hns, guid(id)?)?,
                    None => drop(containers::attach_to(hns, None, guid(id)?)?),
                }
                Ok(json!({"Success": true}))
            }
            ("POST", ["endpoints", id, "detach"]) => {
                match container(&document()?) {
                    Some(container) => self.containers.detach(hns, container, guid(id)?)?,
                    None => detach(hns, guid(id)?)?,
                }
                Ok(json!({"Success": true}))
            }
            ("POST", ["namespaces", id, action]) => {
                namespace_resource(hns, guid(id)?, action, &document()?)?;
                Ok(json!({"Success": true}))
            }
            (method, [objects, rest @ ..]) if rest.len() < 2 => {
                let id = rest.first().map(|id| guid(id)).transpose()?;
                let kind = match *objects {
                    "networks" => Kind::Network,
                    "endpoints" => Kind::Endpoint,
                    "namespaces" => Kind::Namespace,
                    "policylists" => policy_list_kind(hns, id),
                    _ => return Err(unknown(method, path)),
                };
                match (method, id) {
                    ("GET", None) if kind == Kind::LoadBalancer => {
                        let mut lists = self.list(hns, Kind::LoadBalancer)?;
                        lists.extend(self.list(hns, Kind::SdnRoute)?);
                        Ok(json!(lists))
                    }
                    ("GET", None) => self.list(hns, kind).map(Value::Array),
                    ("GET", Some(id)) => self.shown(hns, kind, id),
                    ("POST", None) => {
                        let document = document()?;
                        let is_route = kind == Kind::LoadBalancer && is_route(&document);
                        let kind = if is_route { Kind::SdnRoute } else { kind };
                        self.shown(hns, kind, create(hns, kind, document)?)
                    }
                    ("POST", Some(id)) if matches!(kind, Kind::Network | Kind::Endpoint) => {
                        update(hns, kind, id, document()?)?;
                        self.shown(hns, kind, id)
                    }
                    ("DELETE", Some(id)) => {
                        let before = self.shown(hns, kind, id)?;
                        hns.call(&Call::Delete { kind, id })?;
                        Ok(before)
                    }
                    _ => Err(unknown(method, path)),
                }
            }
            (method, _) => Err(unknown(method, path)),
        }
    }

    fn list(&self, hns: &dyn Hcn, kind: Kind) -> Result<Vec<Value>, Failure> {
        let ids: Vec<Guid> =
            serde_json::from_str(&hns.call(&Call::Enumerate { kind, query: String::new() })?)
                .map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))?;
        ids.into_iter().map(|id| self.shown(hns, kind, id)).collect()
    }

    fn shown(&self, hns: &dyn Hcn, kind: Kind, id: Guid) -> Result<Value, Failure> {
        let object = read(hns, kind, id)?;
        match kind {
            Kind::Network => return Ok(old_network(object)),
            Kind::Namespace => return Ok(old_namespace(&object)),
            Kind::LoadBalancer => return Ok(old_load_balancer(&object)),
            Kind::SdnRoute => return Ok(old_route(&object)),
            Kind::Endpoint | Kind::GuestNetworkService => {}
        }
        let namespace = object["HostComputeNamespace"].as_str().and_then(|id| guid(id).ok());
        let sharing = namespace.map(|namespace| self.containers.of(namespace)).unwrap_or_default();
        let mut endpoint = old_endpoint(hns, object);
        if !sharing.is_empty() {
            endpoint["SharedContainers"] = json!(sharing);
        }
        Ok(endpoint)
    }

    fn mac_list(&self) -> Value {
        json!({"MacAddressList": *self.mac_addresses()})
    }

    fn mac_addresses(&self) -> std::sync::MutexGuard<'_, Vec<Value>> {
        self.mac_addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(method: &str, path: &str) -> Failure {
    Failure::new(HResult::E_NOTIMPL, format!("{method} {path} is not emulated"))
}

fn guid(text: &str) -> Result<Guid, Failure> {
    text.parse().map_err(|_| Failure::new(HResult::E_INVALIDARG, format!("{text} is no identifier")))
}

fn parse(text: &str) -> Result<Value, Failure> {
    serde_json::from_str(text).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))
}

fn read(hns: &dyn Hcn, kind: Kind, id: Guid) -> Result<Value, Failure> {
    parse(&hns.call(&Call::Query { kind, id, query: String::new() })?)
}

fn create(hns: &dyn Hcn, kind: Kind, document: Value) -> Result<Guid, Failure> {
    let network = match kind {
        Kind::Endpoint => network_of(hns, &document)?,
        _ => Guid::ZERO,
    };
    let settings = match kind {
        Kind::Network => new_network(document),
        Kind::Namespace => new_namespace(&document),
        Kind::LoadBalancer => new_load_balancer(&document)?,
        Kind::SdnRoute => new_route(&document)?,
        _ => new_endpoint(document),
    };
    let created =
        hns.call(&Call::Create { kind, network, id: Guid::ZERO, settings: settings.to_string() })?;
    guid(parse(&created)?.as_str().unwrap_or_default())
}

/// What a policy list is: a load balancer, unless it is a route.
fn policy_list_kind(hns: &dyn Hcn, id: Option<Guid>) -> Kind {
    let is_route = |id| read(hns, Kind::SdnRoute, id).is_ok();
    if id.is_some_and(is_route) { Kind::SdnRoute } else { Kind::LoadBalancer }
}

/// A namespace of the old interface (hcsshim, `internal/hns/namespace.go`): the default one is that of the node.
fn new_namespace(namespace: &Value) -> Value {
    let kind = if namespace["IsDefault"] == true { "HostDefault" } else { "Host" };
    json!({"Type": kind, "SchemaVersion": {"Major": 2, "Minor": 0}})
}

fn old_namespace(namespace: &Value) -> Value {
    let resources = namespace["Resources"].as_array().cloned().unwrap_or_default();
    json!({"ID": namespace["ID"], "IsDefault": namespace["Type"] == "HostDefault", "ResourceList": resources,
        "CompartmentId": namespace["NamespaceId"].as_u64().unwrap_or_default()})
}

/// Adds an endpoint to a namespace, or removes it.
fn namespace_resource(hns: &dyn Hcn, namespace: Guid, action: &str, resource: &Value) -> Result<(), Failure> {
    let request = match action.to_ascii_lowercase().as_str() {
        "addresource" => RequestType::Add,
        "removeresource" => RequestType::Remove,
        _ => return Err(unknown("POST", action)),
    };
    let endpoint = resource["Data"]["Id"].as_str().filter(|_| resource["Type"] == "Endpoint");
    let endpoint = guid(endpoint.unwrap_or_default())?;
    let request = Modify::namespace_endpoint(request, endpoint);
    hns.modify_namespace(namespace, &request).map_err(containers::failure)
}

/// Replaces the policies, which is what clients change.
fn update(hns: &dyn Hcn, kind: Kind, id: Guid, document: Value) -> Result<(), Failure> {
    let settings = if kind == Kind::Network { new_network(document) } else { new_endpoint(document) };
    let request = json!({"ResourceType": "Policy", "RequestType": "Update",
        "Settings": {"Policies": settings.get("Policies").cloned().unwrap_or(json!([]))}});
    hns.call(&Call::Modify { kind, id, settings: request.to_string() }).map(drop)
}

/// The network of an endpoint to create: by its identifier, or by its name.
fn network_of(hns: &dyn Hcn, endpoint: &Value) -> Result<Guid, Failure> {
    if let Some(id) = endpoint["VirtualNetwork"].as_str().filter(|id| !id.is_empty()) {
        return guid(id);
    }
    let name = endpoint["VirtualNetworkName"].as_str().unwrap_or_default();
    let found = hns.network_by_name(name).ok().flatten().map(|network| network.id);
    found.ok_or_else(|| Failure::new(HResult::HCN_E_NETWORK_NOT_FOUND, format!("network {name:?}")))
}

/// The container that a request to attach names, if it is about one.
fn container(request: &Value) -> Option<&str> {
    let is_one = request["SystemType"].as_str().is_some_and(|kind| kind.eq_ignore_ascii_case("Container"));
    request["ContainerId"].as_str().filter(|id| is_one && !id.is_empty())
}

/// Whether a request to attach is about the node's own compartment (`HostAttach` of hcsshim).
fn is_of_node(request: &Value) -> bool {
    request["SystemType"].as_str().is_some_and(|kind| kind.eq_ignore_ascii_case("Host"))
}

/// Detaches the endpoint from the namespace that its attachment has made. The last one takes it along.
fn detach(hns: &dyn Hcn, endpoint: Guid) -> Result<(), Failure> {
    let namespace = containers::namespace_of(hns, endpoint)?;
    let namespace = namespace.ok_or_else(|| {
        Failure::new(HResult::ERROR_NOT_FOUND, format!("endpoint {endpoint} is not attached"))
    })?;
    let request = Modify::namespace_endpoint(RequestType::Remove, endpoint);
    hns.modify_namespace(namespace, &request).map_err(containers::failure)?;
    if hns.namespace(namespace).map_err(containers::failure)?.endpoints().next().is_some() {
        return Ok(());
    }
    hns.call(&Call::Delete { kind: Kind::Namespace, id: namespace }).map(drop)
}

/// A document in the new shape. HNS takes both, and a strict one only the new.
pub(crate) fn new_shape(text: &str, convert: fn(Value) -> Value, config: &Config) -> String {
    match serde_json::from_str(text) {
        Ok(document) if !config.strict => convert(document).to_string(),
        _ => text.to_owned(),
    }
}

/// The new shape of a network, if it has the old one.
pub(crate) fn new_network(mut document: Value) -> Value {
    let Some(members) = document.as_object_mut() else { return document };
    if !OF_OLD_NETWORKS.iter().any(|name| members.contains_key(*name)) {
        return document;
    }
    let mut policies = new_policies(members.remove("Policies"));
    if let Some(name) = members.remove("NetworkAdapterName") {
        policies.push(json!({"Type": "NetAdapterName", "Settings": {"NetworkAdapterName": name}}));
    }
    let subnets = items(members.remove("Subnets")).map(|mut subnet| {
        let policies = new_policies(subnet.get_mut("Policies").map(Value::take));
        let is_ipv6 = subnet["AddressPrefix"].as_str().is_some_and(|net| net.contains(':'));
        let everything = if is_ipv6 { "::/0" } else { "0.0.0.0/0" };
        json!({"IpAddressPrefix": subnet["AddressPrefix"], "Policies": policies,
            "Routes": [{"NextHop": subnet["GatewayAddress"], "DestinationPrefix": everything}]})
    });
    let subnets: Vec<Value> = subnets.collect();
    members.insert("Ipams".to_owned(), json!([{"Type": "Static", "Subnets": subnets}]));
    let ranges: Vec<Value> = items(members.remove("MacPools")).collect();
    members.insert("MacPool".to_owned(), json!({"Ranges": ranges}));
    members.insert("Policies".to_owned(), json!(policies));
    new_dns(members);
    members.remove("SourceMac");
    document
}

/// The new shape of an endpoint, if it has the old one.
pub(crate) fn new_endpoint(mut document: Value) -> Value {
    let Some(members) = document.as_object_mut() else { return document };
    let is_old = OF_OLD_ENDPOINTS.iter().any(|name| members.contains_key(*name));
    let is_flat = |policy: &Value| policy.get("Settings").is_none();
    let has_old_policies =
        members.get("Policies").and_then(Value::as_array).is_some_and(|all| all.iter().any(is_flat));
    if !is_old && !has_old_policies {
        return document;
    }
    let policies = new_policies(members.remove("Policies"));
    members.insert("Policies".to_owned(), json!(policies));
    let (mut addresses, mut routes) = (Vec::new(), Vec::new());
    for (address, length, gateway, everything) in OLD_FAMILIES {
        let length = members.remove(length).unwrap_or(json!(0));
        addresses.extend(
            members.remove(address).map(|address| json!({"IpAddress": address, "PrefixLength": length})),
        );
        routes.extend(
            members
                .remove(gateway)
                .map(|gateway| json!({"NextHop": gateway, "DestinationPrefix": everything})),
        );
    }
    if !addresses.is_empty() {
        members.insert("IpConfigurations".to_owned(), json!(addresses));
    }
    if !routes.is_empty() {
        members.insert("Routes".to_owned(), json!(routes));
    }
    if members.remove("IsRemoteEndpoint") == Some(json!(true)) {
        members.insert("Flags".to_owned(), json!(1));
    }
    new_dns(members);
    for name in ["VirtualNetwork", "VirtualNetworkName", "State", "SharedContainers"] {
        members.remove(name);
    }
    document
}

fn new_dns(members: &mut Map<String, Value>) {
    let (suffix, servers) = (members.remove("DNSSuffix"), members.remove("DNSServerList"));
    let words = |list: Option<Value>| -> Vec<String> {
        let list = list.and_then(|list| list.as_str().map(str::to_owned)).unwrap_or_default();
        list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let (search, servers) = (words(suffix), words(servers));
    if !search.is_empty() || !servers.is_empty() {
        members.insert("Dns".to_owned(), json!({"Search": search, "ServerList": servers}));
    }
}

fn items(list: Option<Value>) -> impl Iterator<Item = Value> {
    match list {
        Some(Value::Array(items)) => items.into_iter(),
        _ => Vec::new().into_iter(),
    }
}

fn new_policies(policies: Option<Value>) -> Vec<Value> {
    items(policies).map(new_policy).collect()
}

/// The new shape of a policy. One without a counterpart keeps its members.
fn new_policy(policy: Value) -> Value {
    let Value::Object(mut members) = policy else { return policy };
    if members.contains_key("Settings") {
        return Value::Object(members);
    }
    let r#type = members.remove("Type").unwrap_or_default();
    let known =
        POLICIES.iter().find(|(old, ..)| r#type.as_str().is_some_and(|it| it.eq_ignore_ascii_case(old)));
    let Some((_, new, renamed)) = known else { return json!({"Type": r#type, "Settings": members}) };
    for (old, new) in *renamed {
        if let Some(value) = members.remove(*old) {
            members.insert((*new).to_owned(), value);
        }
    }
    match *new {
        "PortMapping" => {
            let number =
                match members.get("Protocol").and_then(Value::as_str).map(str::to_ascii_uppercase).as_deref()
                {
                    Some("TCP") => Some(6),
                    Some("UDP") => Some(17),
                    _ => None,
                };
            members.extend(number.map(|number| ("Protocol".to_owned(), json!(number))));
        }
        "ACL" => {
            for name in ["Protocols", "LocalPorts", "RemotePorts"] {
                let number = members.get(name).and_then(Value::as_u64);
                members.extend(number.map(|number| (name.to_owned(), json!(number.to_string()))));
            }
        }
        _ => {}
    }
    json!({"Type": new, "Settings": members})
}

/// The old shape of a policy: its members beside its type.
fn old_policy(mut policy: Value) -> Value {
    let known = POLICIES.iter().find(|(_, new, _)| policy["Type"] == *new);
    let mut members = policy["Settings"].as_object().cloned().unwrap_or_default();
    let r#type = match known {
        Some((old, _, renamed)) => {
            for (old, new) in *renamed {
                if let Some(value) = members.remove(*new) {
                    members.insert((*old).to_owned(), value);
                }
            }
            json!(old)
        }
        None => policy["Type"].take(),
    };
    members.insert("Type".to_owned(), r#type);
    Value::Object(members)
}

fn old_policies(policies: &Value) -> Vec<Value> {
    items(Some(policies.clone())).map(old_policy).collect()
}

fn old_network(network: Value) -> Value {
    let subnets = items(network.get("Ipams").cloned()).flat_map(|ipam| items(ipam.get("Subnets").cloned()));
    let subnets = subnets.map(|subnet| {
        json!({"AddressPrefix": subnet["IpAddressPrefix"], "GatewayAddress": subnet["Routes"][0]["NextHop"],
            "Policies": old_policies(&subnet["Policies"])})
    });
    let of = |r#type: &str, member: &str| {
        let policies = network["Policies"].as_array().into_iter().flatten();
        let mut found = policies.filter(|policy| policy["Type"] == r#type);
        found.next().map_or(json!(""), |policy| policy["Settings"][member].clone())
    };
    json!({"ID": network["ID"], "Name": network["Name"], "Type": network.get("Type").cloned().unwrap_or(json!("NAT")),
        "Policies": old_policies(&network["Policies"]), "MacPools": network["MacPool"].get("Ranges").cloned().unwrap_or(json!([])),
        "Subnets": subnets.collect::<Vec<_>>(), "ManagementIP": of("ProviderAddress", "ProviderAddress"),
        "NetworkAdapterName": of("NetAdapterName", "NetworkAdapterName")})
}

fn old_endpoint(hns: &dyn Hcn, endpoint: Value) -> Value {
    let network = endpoint["HostComputeNetwork"].as_str().and_then(|id| guid(id).ok());
    let name =
        network.and_then(|id| read(hns, Kind::Network, id).ok()).map(|network| network["Name"].clone());
    let words = |list: &Value| {
        let words = list.as_array().into_iter().flatten().filter_map(Value::as_str);
        words.collect::<Vec<_>>().join(",")
    };
    let mut old = json!({"ID": endpoint["ID"], "Name": endpoint["Name"], "VirtualNetwork": endpoint["HostComputeNetwork"],
        "VirtualNetworkName": name, "Policies": old_policies(&endpoint["Policies"]), "MacAddress": endpoint["MacAddress"],
        "DNSSuffix": words(&endpoint["Dns"]["Search"]),
        "DNSServerList": words(&endpoint["Dns"]["ServerList"]), "State": endpoint["State"],
        "IsRemoteEndpoint": endpoint["Flags"].as_u64().is_some_and(|flags| flags & 1 != 0)});
    for (address, length, gateway, _) in OLD_FAMILIES {
        let of_family =
            |text: &Value| text.as_str().is_some_and(|text| text.contains(':') == (address == "IPv6Address"));
        let find = |list: &Value, member: &str| {
            let mut items = items(Some(list.clone()));
            items.find(|item| of_family(&item[member])).unwrap_or_default()
        };
        let own = find(&endpoint["IpConfigurations"], "IpAddress");
        (old[address], old[length]) = (own["IpAddress"].clone(), own["PrefixLength"].clone());
        old[gateway] = find(&endpoint["Routes"], "NextHop")["NextHop"].clone();
    }
    if let Some(members) = old.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    old
}
