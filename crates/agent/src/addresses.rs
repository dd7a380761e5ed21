//! Which addresses a pod needs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::net::IpVersion;
use tortie_api::{Key, support};
use tortie_cni::{AddressSource, Code, Failure, Invocation, NetworkConfig};
use tortie_dataplane::PodAddress;
use tortie_ipam::{Assignment, Holder, Ipam, IpamError, Request};
use tortie_store::Stored;

/// The annotation of a WorkloadEndpoint with the CNI network of its address, if the agent's IPAM does not know the address. There is no
/// handle that would name the network.
pub(crate) const NETWORK: &str = "tortie.io/cni-network";

/// The address of an assignment.
pub(crate) fn of_assignment(assignment: &Assignment) -> PodAddress {
    PodAddress { address: assignment.address, block: assignment.block }
}

/// The address of an endpoint, without its block.
pub(crate) fn alone(net: &IpNet) -> PodAddress {
    PodAddress { address: net.addr(), block: net.addr().into() }
}

/// The addresses of an endpoint, if it is of this container.
pub(crate) fn of_endpoint(endpoint: &Stored, container: &str) -> Vec<IpAddr> {
    let spec = &endpoint.value["spec"];
    let networks = spec["ipNetworks"].as_array().filter(|_| spec["containerID"] == container);
    let parse = |text: &str| text.parse::<IpNet>().map(|net| net.addr()).or_else(|_| text.parse()).ok();
    networks.into_iter().flatten().filter_map(|net| parse(net.as_str()?)).collect()
}

/// Whether a pod gets an address of a family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Assign {
    Always,
    /// If a pool of the family gives addresses to the pod.
    #[default]
    IfPool,
    Never,
}

/// The addresses that a pod requests, and the pools that they must be from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The addresses of the pod, at most one of each family; empty for any.
    pub(crate) addresses: Vec<IpAddr>,
    /// An address that no IPAM knows.
    pub(crate) outside: Option<Ipv4Addr>,
    pub(crate) ipv4: OfFamily,
    pub(crate) ipv6: OfFamily,
}

/// What a pod requests of a family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OfFamily {
    pub(crate) assign: Assign,
    /// Names or networks; empty for those that select the node and the namespace.
    pub(crate) pools: Vec<String>,
}

/// What a pod requests: by its annotations or those of its namespace, otherwise by the call and its configuration.
///
/// # Errors
/// The request is invalid or not supported.
pub(crate) fn wanted(
    call: &Invocation,
    source: AddressSource<'_>,
    pod: (&Key, &BTreeMap<String, String>),
    namespace: (&Key, &BTreeMap<String, String>),
) -> Result<Wanted, Failure> {
    refuse_features(&call.config)?;
    refuse_annotations(pod)?;
    refuse_annotations(namespace)?;
    if source != AddressSource::Pools {
        return refuse_requests(call, source, [pod, namespace]).map(|()| Wanted::default());
    }
    let of_config = check_config(&call.config)?;
    let requested = support::requested(pod.1, namespace.1);
    if let Some(IpAddr::V4(outside)) = requested.outside {
        let msg = format!("{} requests the address {outside} outside of IPAM", pod.0);
        if !allows_outside(&call.config) {
            let why = "this is off; set feature_control.ip_addrs_no_ipam in the CNI configuration, or use the annotation \
                       cni.projectcalico.org/ipAddrs";
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, why));
        }
        if !can_be_a_pods(outside) {
            return Err(Failure::new(
                Code::INVALID_CONFIG,
                msg,
                "no pod can have this address; request another one",
            ));
        }
        if let Some(address) = requested.addresses.first() {
            let why = "take one of the annotations out";
            return Err(Failure::new(Code::INVALID_CONFIG, format!("{msg}, and {address} of IPAM"), why));
        }
        return Ok(Wanted { outside: Some(outside), ..Wanted::default() });
    }
    let addresses = match requested.addresses {
        addresses if addresses.is_empty() => addresses_of_call(call)?,
        addresses => addresses,
    };
    let pools = |given: Option<Vec<String>>, mut of_config: OfFamily| {
        if let Some(pools) = given {
            // Whoever names pools wants an address of them.
            of_config = OfFamily { assign: Assign::Always, pools };
        }
        of_config
    };
    let (ipv4, ipv6) = (pools(requested.pools, of_config.0), pools(requested.pools_v6, of_config.1));
    Ok(Wanted { addresses, outside: None, ipv4, ipv6 })
}

/// Whether packets to the address can reach a pod. Those to others stay on their link or reach the host itself.
fn can_be_a_pods(address: Ipv4Addr) -> bool {
    let is_of_this_network = address.octets()[0] == 0; // RFC 791
    let is_reserved = address.octets()[0] >= 240; // RFC 1112, section 4
    !(is_of_this_network
        || is_reserved
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast())
}

/// Only Tortie's own IPAM gives a requested address, or one of requested pools. Another IPAM plugin reads what the runtime
/// requests itself.
fn refuse_requests(
    call: &Invocation,
    source: AddressSource<'_>,
    annotated: [(&Key, &BTreeMap<String, String>); 2],
) -> Result<(), Failure> {
    let of_network = format!("ipam.type of network {} is {:?}", call.config.name, source.name());
    let why = "set ipam.type to calico-ipam, or take the request out";
    for (key, annotations) in annotated {
        let found = support::REQUESTS
            .into_iter()
            .find(|name| annotations.get(*name).is_some_and(|text| !text.is_empty()));
        if let Some(name) = found {
            let msg = format!("{key} has the annotation {name}, and {of_network}");
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, why));
        }
    }
    let requested = addresses_of_call(call).unwrap_or_default();
    match requested.first().filter(|_| source == AddressSource::System) {
        Some(address) => {
            let msg = format!("the runtime requests the address {address}, and {of_network}");
            Err(Failure::new(Code::NOT_SUPPORTED, msg, why))
        }
        None => Ok(()),
    }
}

/// An annotation that requests something unsupported must not be ignored, because the pod would get another address
/// than it needs.
fn refuse_annotations((key, annotations): (&Key, &BTreeMap<String, String>)) -> Result<(), Failure> {
    match support::refused_annotation(key.kind, annotations) {
        Some((name, why)) => {
            let msg = format!("{key} has the annotation {name}, which is not supported");
            Err(Failure::new(Code::NOT_SUPPORTED, msg, why))
        }
        None => Ok(()),
    }
}

/// The addresses that the runtime requests: by the capability `ips`, by `args`, or by `IP` in `CNI_ARGS`.
fn addresses_of_call(call: &Invocation) -> Result<Vec<IpAddr>, Failure> {
    let extra = &call.config.extra;
    let lists = [
        ("runtimeConfig.ips", extra.get("runtimeConfig").and_then(|config| config.get("ips"))),
        ("args.cni.ips", extra.get("args").and_then(|args| args.pointer("/cni/ips"))),
    ];
    for (name, value) in lists {
        let Some(value) = value.filter(|value| !value.is_null()) else { continue };
        let texts = texts_of(name, value)?;
        let addresses = texts.iter().map(|text| address(name, text)).collect::<Result<Vec<_>, _>>()?;
        if let Some(version) = IpVersion::ALL
            .into_iter()
            .find(|version| addresses.iter().filter(|one| IpVersion::of(one) == *version).count() > 1)
        {
            let msg = format!("{name} has several {version} addresses");
            return Err(Failure::new(Code::NOT_SUPPORTED, msg, "a pod has at most one of each family"));
        }
        if !addresses.is_empty() {
            return Ok(addresses);
        }
    }
    let text = call.args.get("IP").filter(|text| !text.is_empty());
    text.map(|text| address("IP in CNI_ARGS", text)).transpose().map(|address| address.into_iter().collect())
}

/// An address, with or without a prefix length.
fn address(name: &str, text: &str) -> Result<IpAddr, Failure> {
    let parsed = text.parse::<IpAddr>().ok().or_else(|| text.parse::<IpNet>().ok().map(|net| net.addr()));
    parsed.ok_or_else(|| Failure::new(Code::INVALID_CONFIG, format!("{name}: {text:?} is no address"), ""))
}

fn texts_of(name: &str, value: &Value) -> Result<Vec<String>, Failure> {
    Vec::deserialize(value).map_err(|error| {
        Failure::new(Code::INVALID_CONFIG, format!("{name} is no list of texts"), error.to_string())
    })
}

fn refuse<T>(config: &NetworkConfig, name: &str, text: &str, why: &str) -> Result<T, Failure> {
    let msg = format!("{name} of network {} is {text:?}, which is not supported", config.name);
    Err(Failure::new(Code::NOT_SUPPORTED, msg, why))
}

/// The feature of addresses that pods request and no IPAM knows.
const NO_IPAM: &str = "ip_addrs_no_ipam";

/// Whether pods of the network may have addresses that IPAM does not know.
pub(crate) fn allows_outside(config: &NetworkConfig) -> bool {
    config.extra.get("feature_control").is_some_and(|features| features[NO_IPAM] == true)
}

/// Rejects features that a network configuration switches on.
fn refuse_features(config: &NetworkConfig) -> Result<(), Failure> {
    for (name, value) in config.extra.get("feature_control").and_then(Value::as_object).into_iter().flatten()
    {
        if *value != Value::Bool(false) && !(name == NO_IPAM && *value == Value::Bool(true)) {
            let why = "Tortie has no floating addresses and knows no other features; take it out";
            return refuse(config, &format!("feature_control.{name}"), &value.to_string(), why);
        }
    }
    Ok(())
}

/// Reads the settings of Tortie's IPAM for IPv4 and for IPv6, and rejects those that it does not implement. By default, as in
/// Calico, pods need an IPv4 address. They get an IPv6 address if a pool gives one.
///
/// # Errors
/// The first such setting.
fn check_config(config: &NetworkConfig) -> Result<(OfFamily, OfFamily), Failure> {
    let mut ipv4 = OfFamily { assign: Assign::Always, ..OfFamily::default() };
    let mut ipv6 = OfFamily::default();
    let section = match config.extra.get("ipam") {
        None | Some(Value::Null) => return Ok((ipv4, ipv6)),
        Some(Value::Object(section)) => section,
        Some(_) => return Err(Failure::new(Code::INVALID_CONFIG, "ipam is no object", "")),
    };
    for (name, value) in section {
        // Calico writes these as texts.
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        match (name.as_str(), text.as_str()) {
            ("type", "calico-ipam" | "tortie") => {}
            ("assign_ipv4", "true") => ipv4.assign = Assign::Always,
            ("assign_ipv4", "false") => ipv4.assign = Assign::Never,
            ("assign_ipv6", "true") => ipv6.assign = Assign::Always,
            ("assign_ipv6", "false") => ipv6.assign = Assign::Never,
            ("ipv4_pools", _) => ipv4.pools = texts_of("ipam.ipv4_pools", value)?,
            ("ipv6_pools", _) => ipv6.pools = texts_of("ipam.ipv6_pools", value)?,
            ("assign_ipv4" | "assign_ipv6", _) => {
                return refuse(config, &format!("ipam.{name}"), &text, "it is \"true\" or \"false\"");
            }
            _ => {
                return refuse(
                    config,
                    &format!("ipam.{name}"),
                    &text,
                    "Tortie does not know it; take it out",
                );
            }
        }
    }
    if ipv4.assign == Assign::Never {
        // A pod needs an address.
        match ipv6.assign {
            Assign::Never => {
                let why = "a pod needs an address; set one of them to \"true\"";
                return refuse(config, "ipam.assign_ipv4 and ipam.assign_ipv6", "false", why);
            }
            Assign::Always | Assign::IfPool => ipv6.assign = Assign::Always,
        }
    }
    Ok((ipv4, ipv6))
}

/// Allocates the address of a pod.
pub(crate) async fn assign(
    ipam: &Ipam,
    call: &Invocation,
    request: &Request,
    wanted: Option<IpAddr>,
) -> Result<Assignment, Failure> {
    let assigned = match wanted {
        None => ipam.assign(request).await,
        Some(address) => match ipam.assign_address(request, address).await {
            Err(IpamError::Taken { holder, .. }) if is_replaced(call, request, &holder) => {
                let old = holder.0.handle_id.unwrap_or_default();
                tracing::info!(%address, old, new = request.handle, "the pod has a new sandbox, which takes its address over");
                match ipam.release(&old).await {
                    Ok(_) => ipam.assign_address(request, address).await,
                    Err(error) => Err(error),
                }
            }
            assigned => assigned,
        },
    };
    assigned.map_err(|error| no_address(&error))
}

/// Allocates an address if the node's blocks have one.
pub(crate) async fn assign_if_room(ipam: &Ipam, request: &Request) -> Result<Option<Assignment>, Failure> {
    match ipam.assign(request).await {
        Ok(one) => Ok(Some(one)),
        Err(error @ IpamError::Exhausted { .. }) => {
            tracing::warn!(%error, handle = request.handle, "the pod gets no IPv6 address; larger blocks need another pool");
            Ok(None)
        }
        Err(error) => Err(no_address(&error)),
    }
}

pub(crate) fn no_address(error: &IpamError) -> Failure {
    Failure::new(Code::IPAM, "no address for the pod", error.to_string())
}

/// Whether an address belongs to an earlier sandbox of the same pod and interface on this node. A runtime creates the next
/// sandbox when it has stopped the one before.
fn is_replaced(call: &Invocation, request: &Request, holder: &Holder) -> bool {
    let is_same = |name: &str| holder.get(name) == request.owner.get(name).map(String::as_str);
    let of_sandbox =
        holder.0.handle_id.as_deref().and_then(|handle| attachment_of(&call.config.name, handle));
    ["node", "namespace", "pod"].into_iter().all(is_same)
        && of_sandbox.is_some_and(|(container, interface)| {
            container != call.container_id && interface == call.interface
        })
}

/// The interface of pods that have one.
pub(crate) const USUAL_INTERFACE: &str = "eth0";

/// The handle of the attachment's address.
pub(crate) fn handle(call: &Invocation) -> String {
    handle_of(&call.config.name, &call.container_id, &call.interface)
}

/// `<network>.<container>`, Calico's form of handles. A container may have more interfaces in one network: the handles of
/// those besides the usual one end with the interface's name.
pub(crate) fn handle_of(network: &str, container: &str, interface: &str) -> String {
    match interface {
        USUAL_INTERFACE => format!("{network}.{container}"),
        other => format!("{network}.{container}.{other}"),
    }
}

/// The container and the interface of a handle of this network.
pub(crate) fn attachment_of<'a>(network: &str, handle: &'a str) -> Option<(&'a str, &'a str)> {
    let attachment = handle.strip_prefix(network)?.strip_prefix('.')?;
    Some(attachment.split_once('.').unwrap_or((attachment, USUAL_INTERFACE)))
}
