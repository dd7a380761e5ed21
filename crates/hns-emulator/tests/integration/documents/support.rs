//! Documents as clients send them.
#![allow(dead_code, reason = "each test uses its part")]

use std::net::Ipv4Addr;

use serde_json::{Value, json};
use tortie_hcn::{Call, Guid, HResult, Hcn, Kind};
use tortie_hns_emulator::{Config, Emulator};

pub(crate) fn emulator() -> Emulator {
    Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(172, 16, 0, 3)))
}

pub(crate) fn overlay(name: &str) -> Value {
    json!({"Name": name, "Type": "Overlay", "Policies": [{"Type": "HostRoute", "Settings": {}}],
        "Ipams": [{"Type": "Static", "Subnets": [{"IpAddressPrefix": "10.244.3.0/26",
            "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 4096}}],
            "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]}]}],
        "SchemaVersion": {"Major": 2, "Minor": 0}})
}

pub(crate) fn endpoint(address: &str) -> Value {
    json!({"Name": "abc_Calico", "IpConfigurations": [{"IpAddress": address}],
        "MacAddress": "0E-2A-0a-f4-03-07",
        "Routes": [{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]})
}

pub(crate) fn acl(priority: u16) -> Value {
    json!({"Type": "ACL", "Settings": {"Id": "x", "Protocols": "256", "Action": "Block", "Direction": "In",
        "RuleType": "Switch", "Priority": priority}})
}

pub(crate) fn create(hcn: &Emulator, kind: Kind, network: Guid, document: &Value) -> Result<Guid, HResult> {
    let call = Call::Create { kind, network, id: Guid::ZERO, settings: document.to_string() };
    hcn.call(&call).map(|id| serde_json::from_str(&id).unwrap()).map_err(|failure| failure.code)
}

pub(crate) fn modify(hcn: &Emulator, kind: Kind, id: Guid, document: &Value) -> Result<(), HResult> {
    let call = Call::Modify { kind, id, settings: document.to_string() };
    hcn.call(&call).map(drop).map_err(|failure| failure.code)
}

pub(crate) fn policies(
    hcn: &Emulator,
    kind: Kind,
    id: Guid,
    request: &str,
    policies: Value,
) -> Result<(), HResult> {
    let request =
        json!({"RequestType": request, "ResourceType": "Policy", "Settings": {"Policies": policies}});
    modify(hcn, kind, id, &request)
}

/// The document with the value at a JSON pointer replaced or removed.
pub(crate) fn with(mut document: Value, at: &str, value: Option<Value>) -> Value {
    if let (Some(place), Some(value)) = (document.pointer_mut(at), &value) {
        *place = value.clone();
        return document;
    }
    let (parent, key) = at.rsplit_once('/').unwrap();
    let parent = document.pointer_mut(parent).unwrap();
    match value {
        Some(value) => parent[key] = value,
        None => drop(parent.as_object_mut().unwrap().remove(key)),
    }
    document
}

pub(crate) fn set(id: &str, policy_type: &str, values: &str) -> Value {
    json!({"Type": "SetPolicy", "Settings": {"Id": id, "Name": id, "PolicyType": policy_type, "Values": values}})
}

/// An ACL with another priority and other settings.
pub(crate) fn acl_with(priority: u16, members: Value) -> Value {
    let mut acl = acl(priority);
    acl["Settings"].as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    acl
}

/// An HNS with a network and an endpoint.
pub(crate) struct Node {
    pub hns: Emulator,
    pub network: Guid,
    pub endpoint: Guid,
}

impl Node {
    pub(crate) fn new(config: Config) -> Node {
        let hns = Emulator::new(config);
        let network = create(&hns, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
        let endpoint = create(&hns, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
        Node { hns, network, endpoint }
    }

    pub(crate) fn sets(&self, request: &str, sets: Value) -> Result<(), HResult> {
        policies(&self.hns, Kind::Network, self.network, request, sets)
    }

    pub(crate) fn acls(&self, request: &str, acls: Value) -> Result<(), HResult> {
        policies(&self.hns, Kind::Endpoint, self.endpoint, request, acls)
    }
}

pub(crate) fn config() -> Config {
    Config::new(Config::NEWEST, Ipv4Addr::new(172, 16, 0, 3))
}
