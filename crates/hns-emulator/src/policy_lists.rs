//! Policy lists of the old interface of HNS: its form of load balancers, and of routes of several endpoints (hcsshim,
//! `internal/hns/hnspolicylist.go`).

use serde_json::{Value, json};
use tortie_hcn::{Failure, HResult};

/// A load balancer as a policy list.
pub(crate) fn old_load_balancer(balancer: &Value) -> Value {
    let flags = balancer["Flags"].as_u64().unwrap_or_default();
    let endpoints = balancer["HostComputeEndpoints"].as_array().into_iter().flatten();
    let references = endpoints.filter_map(Value::as_str).map(|id| format!("/endpoints/{id}"));
    let policies = balancer["PortMappings"].as_array().into_iter().flatten().map(|port| {
        json!({"Type": "ELB", "Protocol": port["Protocol"], "InternalPort": port["InternalPort"],
            "ExternalPort": port["ExternalPort"], "VIPs": balancer["FrontendVIPs"], "SourceVIP": balancer["SourceVIP"],
            "ILB": port["Flags"].as_u64().is_some_and(|flags| flags & 1 != 0), "IsDSR": flags & 1 != 0})
    });
    json!({"ID": balancer["ID"], "References": references.collect::<Vec<_>>(), "Policies": policies.collect::<Vec<_>>()})
}

/// Whether a policy list is about routes.
pub(crate) fn is_route(list: &Value) -> bool {
    list["Policies"]
        .as_array()
        .is_some_and(|policies| policies.iter().any(|policy| policy["Type"] == "ROUTE"))
}

/// Routes as a policy list.
pub(crate) fn old_route(route: &Value) -> Value {
    let endpoints = route["HostComputeEndpoints"].as_array().into_iter().flatten();
    let references = endpoints.filter_map(Value::as_str).map(|id| format!("/endpoints/{id}"));
    let policies = route["Routes"].as_array().into_iter().flatten().map(|route| {
        let mut policy = route.clone();
        policy["Type"] = json!("ROUTE");
        policy
    });
    json!({"ID": route["ID"], "References": references.collect::<Vec<_>>(), "Policies": policies.collect::<Vec<_>>()})
}

/// The routes that a policy list means.
pub(crate) fn new_route(list: &Value) -> Result<Value, Failure> {
    let policies = list["Policies"].as_array().map(Vec::as_slice).unwrap_or_default();
    if policies.iter().any(|policy| policy["Type"] != "ROUTE") {
        let error = "a policy list of routes and other policies is not emulated";
        return Err(Failure::new(HResult::E_NOTIMPL, error));
    }
    let routes = policies.iter().map(|policy| {
        let mut route = policy.clone();
        if let Some(members) = route.as_object_mut() {
            members.remove("Type");
        }
        route
    });
    let endpoints = list["References"].as_array().into_iter().flatten();
    let endpoints = endpoints.filter_map(|it| it.as_str()?.strip_prefix("/endpoints/"));
    Ok(json!({"HostComputeEndpoints": endpoints.collect::<Vec<_>>(), "Routes": routes.collect::<Vec<_>>()}))
}

/// The load balancer that a policy list means.
pub(crate) fn new_load_balancer(list: &Value) -> Result<Value, Failure> {
    let refused =
        |what: &str| Err(Failure::new(HResult::E_NOTIMPL, format!("a policy list {what} is not emulated")));
    let policies = list["Policies"].as_array().map(Vec::as_slice).unwrap_or_default();
    let [first, ..] = policies else { return refused("without policies") };
    if policies.iter().any(|policy| policy["Type"] != "ELB") {
        return refused("with another policy than ELB");
    }
    let is_same =
        |policy: &Value| ["VIPs", "SourceVIP", "IsDSR"].iter().all(|name| policy[name] == first[name]);
    if !policies.iter().all(is_same) {
        return refused("of several load balancers");
    }
    let endpoints = list["References"].as_array().into_iter().flatten();
    let endpoints = endpoints.filter_map(|it| it.as_str()?.strip_prefix("/endpoints/"));
    let ports = policies.iter().map(|policy| {
        json!({"Protocol": policy["Protocol"], "InternalPort": policy["InternalPort"],
            "ExternalPort": policy["ExternalPort"], "Flags": u8::from(policy["ILB"] == true)})
    });
    Ok(
        json!({"HostComputeEndpoints": endpoints.collect::<Vec<_>>(), "PortMappings": ports.collect::<Vec<_>>(),
        "FrontendVIPs": first["VIPs"], "SourceVIP": first["SourceVIP"].as_str().unwrap_or_default(),
        "Flags": u8::from(first["IsDSR"] == true)}),
    )
}
