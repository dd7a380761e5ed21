//! The annotations of Pods and Namespaces by which Calico's CNI plugin is told about addresses and more
//! (`cni-plugin/pkg/k8s`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::State;
use crate::net::{IpVersion, MacAddress};
use crate::{FieldError, Kind};

const PREFIX: &str = "cni.projectcalico.org/";
const ADDRESSES: &str = "cni.projectcalico.org/ipAddrs";
const OUTSIDE: &str = "cni.projectcalico.org/ipAddrsNoIpam";
const MAC: &str = "cni.projectcalico.org/hwAddr";
const POOLS: &str = "cni.projectcalico.org/ipv4pools";
const POOLS_V6: &str = "cni.projectcalico.org/ipv6pools";

/// The annotations by which pods and namespaces request addresses of Tortie's IPAM.
pub const REQUESTS: [&str; 4] = [ADDRESSES, OUTSIDE, POOLS, POOLS_V6];

/// What a pod requests by annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requested {
    /// The addresses that the pod must have, at most one of each family; empty without such an annotation.
    pub addresses: Vec<IpAddr>,
    /// The address that the pod must have and that no IPAM knows.
    pub outside: Option<IpAddr>,
    /// The MAC address that its interface must have.
    pub mac: Option<MacAddress>,
    /// The names or networks of the pools that its IPv4 address must be from; `None` without such an annotation.
    pub pools: Option<Vec<String>>,
    /// The same for its IPv6 address.
    pub pools_v6: Option<Vec<String>>,
}

/// What a pod with these annotations requests. They must have passed [`refused_annotation`]. The pod's annotations win
/// over those of its namespace.
#[must_use]
pub fn requested(pod: &BTreeMap<String, String>, namespace: &BTreeMap<String, String>) -> Requested {
    let given =
        |of: &BTreeMap<String, String>, name: &str| of.get(name).filter(|text| !text.is_empty()).cloned();
    let addresses = given(pod, ADDRESSES).and_then(|text| fixed_addresses(&text).ok());
    let outside = given(pod, OUTSIDE).and_then(|text| address_outside(&text).ok());
    let pools = |name: &str, version| {
        let text = given(pod, name).or_else(|| given(namespace, name))?;
        pools_of(&text, version).ok()
    };
    Requested {
        addresses: addresses.unwrap_or_default(),
        outside,
        mac: given(pod, MAC).and_then(|text| MacAddress::of_pod(&text).ok()),
        pools: pools(POOLS, IpVersion::V4),
        pools_v6: pools(POOLS_V6, IpVersion::V6),
    }
}

/// The first annotation of a Pod or Namespace that requests something unsupported, or has an invalid value, with the
/// reason and the remedy.
#[must_use]
pub fn refused_annotation(kind: Kind, annotations: &BTreeMap<String, String>) -> Option<(&str, String)> {
    annotations.iter().find_map(|(name, text)| Some((name.as_str(), problem(kind, name, text)?)))
}

/// The same of a Pod or Namespace as it is stored, as a problem with the annotation.
#[must_use]
pub fn unsupported_annotation(kind: Kind, value: &Value) -> Option<FieldError> {
    let annotations = value.pointer("/metadata/annotations")?.as_object()?;
    let (name, why) = annotations
        .iter()
        .find_map(|(name, text)| Some((name, problem(kind, name, text.as_str().unwrap_or_default())?)))?;
    let problem = format!("it is not supported, and such pods are not connected: {why}");
    Some(FieldError::new(format!("metadata.annotations.{name}"), problem))
}

/// Why an annotation is rejected, if it is.
fn problem(kind: Kind, name: &str, text: &str) -> Option<String> {
    let always =
        |name: &str| ANNOTATIONS.iter().find(|known| known.0 == name).and_then(|known| rejected(known.2));
    if name.starts_with("qos.projectcalico.org/") {
        return always("qos.projectcalico.org/…");
    }
    match name.strip_prefix(PREFIX)? {
        // The CNI plugin itself writes these.
        "podIP" | "podIPs" | "containerID" => None,
        // To Calico, too, an empty text is none.
        "ipAddrs" | "ipAddrsNoIpam" | "hwAddr" | "ipv4pools" | "ipv6pools" if text.is_empty() => None,
        "ipAddrs" | "ipAddrsNoIpam" | "hwAddr" if kind == Kind::Namespace => {
            Some("each pod needs an address of its own; move it to a Pod".to_owned())
        }
        "ipAddrs" => fixed_addresses(text).err(),
        "ipAddrsNoIpam" => address_outside(text).err(),
        "hwAddr" => MacAddress::of_pod(text).err(),
        "ipv4pools" => pools_of(text, IpVersion::V4).err(),
        "ipv6pools" => pools_of(text, IpVersion::V6).err(),
        "floatingIPs" => match addresses_of(text) {
            Ok(_) => always(name),
            Err(problem) => Some(problem),
        },
        _ => always(name).or_else(|| Some("Tortie does not know it; take it out".to_owned())),
    }
}

fn rejected(state: State) -> Option<String> {
    match state {
        State::Rejected(why) => Some(why.to_owned()),
        State::Implemented | State::Reported(_) => None,
    }
}

/// The addresses of `ipAddrs`.
fn fixed_addresses(text: &str) -> Result<Vec<IpAddr>, String> {
    let addresses = addresses_of(text)?;
    for version in IpVersion::ALL {
        let count = addresses.iter().filter(|address| IpVersion::of(address) == version).count();
        if count > 1 {
            return Err(format!("it has {count} {version} addresses; a pod has at most one"));
        }
    }
    if addresses.is_empty() {
        return Err("it has no address; take the annotation out".to_owned());
    }
    Ok(addresses)
}

/// The address of `ipAddrsNoIpam`.
fn address_outside(text: &str) -> Result<IpAddr, String> {
    match addresses_of(text)?[..] {
        [address @ IpAddr::V4(_)] => Ok(address),
        _ => Err("outside of IPAM, a pod has exactly one IPv4 address".to_owned()),
    }
}

fn addresses_of(text: &str) -> Result<Vec<IpAddr>, String> {
    let parse = |text: &String| text.parse().map_err(|_| format!("{text:?} is no address"));
    list_of(text)?.iter().map(parse).collect()
}

/// The pools of `ipv4pools` or `ipv6pools`: names or networks.
fn pools_of(text: &str, version: IpVersion) -> Result<Vec<String>, String> {
    let pools = list_of(text)?;
    let is_other =
        |pool: &&String| pool.parse::<IpNet>().is_ok_and(|net| IpVersion::of(&net.addr()) != version);
    match pools.iter().find(is_other) {
        Some(other) => Err(format!("{other} is no {version} pool; use the annotation of the other family")),
        None => Ok(pools),
    }
}

fn list_of(text: &str) -> Result<Vec<String>, String> {
    let list = serde_json::from_str::<Vec<String>>(text);
    list.map_err(|error| format!("it is no list of texts in JSON such as [\"10.0.0.5\"] ({error})"))
}

/// The known annotations, with what they take and what Tortie does with them, for docs/fields.md.
pub const ANNOTATIONS: &[(&str, &str, State)] = &[
    (
        ADDRESSES,
        "on Pods: a JSON list of one address of each family, or of one family only",
        State::Implemented,
    ),
    (
        OUTSIDE,
        "on Pods: a JSON list of one IPv4 address that no IPAM knows; off, as in Calico, unless the CNI configuration has `feature_control.ip_addrs_no_ipam`",
        State::Implemented,
    ),
    (POOLS, "on Pods and Namespaces: a JSON list of names or networks of IPPools", State::Implemented),
    (
        POOLS_V6,
        "on Pods and Namespaces: a JSON list of names or networks of IPv6 IPPools",
        State::Implemented,
    ),
    (
        "cni.projectcalico.org/floatingIPs",
        "a JSON list of addresses",
        State::Rejected(
            "floating addresses (feature_control.floating_ips) are off, as they are in Calico by default, and Tortie has none; use a Service",
        ),
    ),
    (MAC, "on Pods of Linux nodes: the MAC address of the pod's interface", State::Implemented),
    (
        "cni.projectcalico.org/allowedSourcePrefixes",
        "a JSON list of networks",
        State::Rejected("a pod's packets always need its own address; take it out"),
    ),
    (
        "qos.projectcalico.org/…",
        "a number or quantity",
        State::Rejected("limits of bandwidth, packets and connections are not supported; take it out"),
    ),
];
