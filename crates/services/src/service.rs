//! A Service, as far as nodes translate it.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::kubernetes::{self, ServiceSpec};
use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{FieldError, Key};

use crate::address::{address, is_usable, network};
use crate::endpoints::{not_served, served_protocol};
use crate::problem::Problem;
use crate::state::TrafficPolicy;

/// The time of session affinity in seconds, if the Service does not say it.
const AFFINITY_DEFAULT: u32 = 10_800;
/// The longest one that the API accepts: a day.
const AFFINITY_MAX: u32 = 86_400;

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Translated {
    /// The time of its creation as text; times in this form sort by time.
    pub(crate) created: Option<String>,
    pub(crate) internal: TrafficPolicy,
    pub(crate) external: TrafficPolicy,
    /// The time in seconds for which the backend of a client is remembered.
    pub(crate) affinity: Option<u32>,
    /// The port of the health check of its load balancer.
    pub(crate) health_check_port: Option<u16>,
    pub(crate) ports: Vec<Port>,
    pub(crate) families: Vec<Family>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    pub(crate) number: u16,
    pub(crate) node_port: Option<u16>,
}

/// The addresses of a Service of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Family {
    pub(crate) family: IpVersion,
    pub(crate) cluster_ip: IpAddr,
    pub(crate) external_ips: Vec<IpAddr>,
    pub(crate) load_balancer_ips: Vec<IpAddr>,
    /// The networks that may use `load_balancer_ips`; all if absent.
    pub(crate) source_ranges: Option<Vec<IpNet>>,
}

/// Reads a Service: that which nodes translate, if they do, and the problems of its fields. A wrong word or time refuses the whole
/// Service, because each guess at its meaning would open or close something; a wrong address or port refuses that one.
pub(crate) fn read(
    key: &Key,
    service: &kubernetes::Service,
    value: &Value,
) -> (Option<Translated>, Vec<Problem>) {
    if !is_translated(service) {
        return (None, Vec::new());
    }
    let mut wrong = Vec::new();
    let read = translated(service, value, &mut wrong);
    let problems: Vec<Problem> =
        wrong.into_iter().map(|error: FieldError| Problem::new(key.clone(), error)).collect();
    match read {
        Ok(service) => (Some(service), problems),
        Err(error) => (None, problems.into_iter().chain([Problem::new(key.clone(), error)]).collect()),
    }
}

/// Headless Services, external names, and those of another proxy are not translated (`ShouldSkipService` in
/// `pkg/proxy/util/utils.go` of Kubernetes).
fn is_translated(service: &kubernetes::Service) -> bool {
    let spec = &service.spec;
    let first = spec.cluster_ip.as_ref().or(spec.cluster_ips.first()).map_or("", String::as_str);
    !service.metadata.labels.contains_key(kubernetes::Service::PROXY_NAME)
        && spec.service_type.as_deref() != Some("ExternalName")
        && !first.is_empty()
        && first != "None"
}

fn translated(
    service: &kubernetes::Service,
    value: &Value,
    wrong: &mut Vec<FieldError>,
) -> Result<Translated, FieldError> {
    let spec = &service.spec;
    let internal = traffic_policy("spec.internalTrafficPolicy", spec.internal_traffic_policy.as_deref())?;
    let external = traffic_policy("spec.externalTrafficPolicy", spec.external_traffic_policy.as_deref())?;
    let affinity = affinity(spec)?;
    let health_check_port = health_check_port(&value["spec"]["healthCheckNodePort"], wrong);
    let has_health_check =
        external == TrafficPolicy::Local && spec.service_type.as_deref() == Some("LoadBalancer");
    Ok(Translated {
        created: value["metadata"]["creationTimestamp"].as_str().map(str::to_owned),
        internal,
        external: if external_policy_counts(spec) { external } else { TrafficPolicy::Cluster },
        affinity,
        health_check_port: health_check_port.filter(|_| has_health_check),
        ports: ports(spec, wrong),
        families: families(service, wrong),
    })
}

fn traffic_policy(field: &str, text: Option<&str>) -> Result<TrafficPolicy, FieldError> {
    match text {
        None | Some("" | "Cluster") => Ok(TrafficPolicy::Cluster),
        Some("Local") => Ok(TrafficPolicy::Local),
        Some(other) => Err(FieldError::new(
            field,
            format!(
                "{other:?} is neither Cluster nor Local, so the Service is not served; write one of them"
            ),
        )),
    }
}

/// The policy is that of Services with external addresses only (`ExternallyAccessible` in `pkg/api/v1/service/util.go` of Kubernetes).
fn external_policy_counts(spec: &ServiceSpec) -> bool {
    match spec.service_type.as_deref() {
        Some("NodePort" | "LoadBalancer") => true,
        _ => !spec.external_ips.is_empty(),
    }
}

fn affinity(spec: &ServiceSpec) -> Result<Option<u32>, FieldError> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return Ok(None),
        Some("ClientIP") => {}
        Some(other) => {
            let problem = format!(
                "{other:?} is neither None nor ClientIP, so the Service is not served; write one of them"
            );
            return Err(FieldError::new("spec.sessionAffinity", problem));
        }
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    match config.and_then(|client| client.timeout_seconds).unwrap_or(AFFINITY_DEFAULT) {
        seconds @ 1..=AFFINITY_MAX => Ok(Some(seconds)),
        other => Err(FieldError::new(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            format!(
                "{other} is not in 1 to {AFFINITY_MAX}, so the Service is not served; write such a number"
            ),
        )),
    }
}

fn health_check_port(value: &Value, wrong: &mut Vec<FieldError>) -> Option<u16> {
    let port =
        if value.is_null() { Some(0) } else { value.as_u64().and_then(|port| u16::try_from(port).ok()) };
    if port.is_none() {
        let problem = format!("{value} is no port, so nothing answers there; write a number from 1 to 65535");
        wrong.push(FieldError::new("spec.healthCheckNodePort", problem));
    }
    port.filter(|port| *port > 0)
}

fn ports(spec: &ServiceSpec, wrong: &mut Vec<FieldError>) -> Vec<Port> {
    let mut ports: Vec<Port> = Vec::new();
    for (index, port) in spec.ports.iter().enumerate() {
        let mut report = |field: &str, problem: String| {
            wrong.push(FieldError::new(format!("spec.ports[{index}].{field}"), problem));
        };
        let name = port.name.clone().unwrap_or_default();
        let text = port.protocol.as_deref().unwrap_or("TCP");
        let Some(protocol) = served_protocol(text) else {
            report("protocol", not_served(text));
            continue;
        };
        if port.port == 0 {
            report("port", "0 is no port; write a number from 1 to 65535".to_owned());
        } else if ports.iter().any(|other| other.name == name && other.protocol == protocol) {
            report("name", format!("an earlier port of {text} is called {name:?}; write another name"));
        } else {
            let node_port = port.node_port.filter(|port| *port > 0);
            ports.push(Port { name, protocol, number: port.port, node_port });
        }
    }
    ports
}

/// The families of which the Service has an address of its own. Addresses of another family have no effect, as in kube-proxy.
fn families(service: &kubernetes::Service, wrong: &mut Vec<FieldError>) -> Vec<Family> {
    let spec = &service.spec;
    let one = spec.cluster_ip.iter().filter(|_| spec.cluster_ips.is_empty());
    let own: Vec<&str> = spec.cluster_ips.iter().chain(one).map(String::as_str).collect();
    let cluster_ips = addresses("spec.clusterIPs", own.into_iter().enumerate(), wrong);
    let external = spec.external_ips.iter().map(String::as_str);
    let external_ips = addresses("spec.externalIPs", external.enumerate(), wrong);
    // What must pass the load balancer is not taken at the nodes.
    let ingress = service.status.load_balancer.ingress.iter().enumerate();
    let taken = ingress.filter(|(_, ingress)| ingress.ip_mode.as_deref() != Some("Proxy"));
    let texts = taken.filter_map(|(index, ingress)| Some((index, ingress.ip.as_deref()?)));
    let texts = texts.filter(|(_, text)| !text.is_empty());
    let load_balancer_ips = addresses("status.loadBalancer.ingress", texts, wrong);
    let ranges = ranges(&spec.load_balancer_source_ranges, wrong);
    let of = |all: &[IpAddr], family| {
        all.iter().filter(|address| IpVersion::of(address) == family).copied().collect::<Vec<_>>()
    };
    let family = |family| {
        Some(Family {
            family,
            cluster_ip: *of(&cluster_ips, family).first()?,
            external_ips: of(&external_ips, family),
            load_balancer_ips: of(&load_balancer_ips, family),
            source_ranges: source_ranges(&ranges, family),
        })
    };
    IpVersion::ALL.into_iter().filter_map(family).collect()
}

fn addresses<'a>(
    field: &str,
    texts: impl Iterator<Item = (usize, &'a str)>,
    wrong: &mut Vec<FieldError>,
) -> Vec<IpAddr> {
    let mut read = Vec::new();
    for (index, text) in texts {
        let problem = match address(text) {
            Some(address) if is_usable(address) => {
                read.push(address);
                continue;
            }
            Some(address) => format!("{address} is no address that other machines reach; remove it"),
            None => format!("{text:?} is no address; write one, or remove it"),
        };
        wrong.push(FieldError::new(format!("{field}[{index}]"), problem));
    }
    read
}

/// The networks; `None` for one that cannot be read, which lets no packet pass.
fn ranges(texts: &[String], wrong: &mut Vec<FieldError>) -> Vec<Option<IpNet>> {
    let read = texts.iter().enumerate().map(|(index, text)| {
        let network = network(text);
        if network.is_none() {
            let problem =
                format!("{text:?} is no network, so no packet passes by it; write it as 192.0.2.0/24");
            wrong.push(FieldError::new(format!("spec.loadBalancerSourceRanges[{index}]"), problem));
        }
        network
    });
    read.collect()
}

/// The networks of a family that packets must come from. Without any of that family, or with one that has all addresses, there is no limit.
fn source_ranges(ranges: &[Option<IpNet>], family: IpVersion) -> Option<Vec<IpNet>> {
    let own = ranges.iter().flatten().filter(|network| IpVersion::of(&network.addr()) == family);
    let own: Vec<IpNet> = own.copied().collect();
    let has_unreadable = ranges.iter().any(Option::is_none);
    let is_open = own.iter().any(|network| network.prefix_len() == 0) || own.is_empty() && !has_unreadable;
    (!is_open).then_some(own)
}
