//! What a container runtime asks of plugins that declare a capability (`runtimeConfig`).

use std::net::IpAddr;

use serde::Deserialize;
use serde_json::Value;
use tortie_api::calico::WorkloadEndpointPort;
use tortie_api::kubernetes::Pod;
use tortie_api::net::{MacAddress, Protocol};
use tortie_api::support;
use tortie_cni::{Code, Failure, Invocation, NetworkConfig};

/// Rejects what a runtime asks of Tortie's plugin and does not get. The configuration that the agent writes declares no
/// capability, so only a configuration that somebody else wrote can ask for something.
///
/// # Errors
/// A member is not served, or differs from what the Pod has.
pub(crate) fn check(call: &Invocation, pod: &Pod, takes_mac: bool) -> Result<(), Failure> {
    if let (Some(mac), false) = (wanted_mac(call, pod)?, takes_mac) {
        let msg = format!("the pod shall have the MAC address {mac}, which this node cannot give it");
        return Err(Failure::new(Code::NOT_SUPPORTED, msg, "take the request out, or use a Linux node"));
    }
    let asked = match call.config.extra.get("runtimeConfig") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(asked)) => asked,
        Some(_) => return Err(Failure::new(Code::INVALID_CONFIG, "runtimeConfig is no object", "")),
    };
    for (name, value) in asked.iter().filter(|(_, value)| !is_empty(value)) {
        match name.as_str() {
            // `addresses`, `mac`, `bandwidth` and `dns` read these.
            "ips" | "mac" | "bandwidth" | "dns" => {}
            "portMappings" => check_port_mappings(value, &pod.endpoint_ports())?,
            _ => return Err(not_served(&call.config, name)),
        }
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn not_served(config: &NetworkConfig, name: &str) -> Failure {
    let msg =
        format!("network {} passes runtimeConfig.{name} to tortie-cni, which is not supported", config.name);
    let details = format!("Tortie does not know it; take the capability {name} out of the configuration");
    Failure::new(Code::NOT_SUPPORTED, msg, details)
}

/// An entry of `runtimeConfig.portMappings` (CNI's conventions for plugins).
#[derive(Debug, Deserialize)]
struct PortMapping {
    #[serde(rename = "hostport")]
    host_port: u16,
    #[serde(rename = "containerport")]
    container_port: u16,
    #[serde(default)]
    protocol: String,
    #[serde(default, rename = "hostip")]
    host_ip: String,
}

/// The same value whose members have names in small letters: containerd writes `HostPort`, others `hostPort`, and plugins in Go read
/// any case.
pub(crate) fn with_lowercase_names(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let lower = |(name, value): (&String, &Value)| (name.to_lowercase(), with_lowercase_names(value));
            members.iter().map(lower).collect()
        }
        Value::Array(list) => list.iter().map(with_lowercase_names).collect(),
        other => other.clone(),
    }
}

/// Nodes serve the `hostPort`s of the Pod. The runtime passes the same ones; others would not be served.
fn check_port_mappings(value: &Value, ports: &[WorkloadEndpointPort]) -> Result<(), Failure> {
    let mappings = Vec::<PortMapping>::deserialize(with_lowercase_names(value)).map_err(|error| {
        let msg = "runtimeConfig.portMappings is no list of mappings with hostPort and containerPort";
        Failure::new(Code::INVALID_CONFIG, msg, error.to_string())
    })?;
    // A runtime also passes ports without one of the node.
    for mapping in mappings.iter().filter(|mapping| mapping.host_port != 0) {
        if !ports.iter().any(|port| is_of(mapping, port)) {
            let PortMapping { host_port, container_port, protocol, host_ip } = mapping;
            let at = if host_ip.is_empty() { String::new() } else { format!(" at {host_ip}") };
            let msg = format!(
                "runtimeConfig.portMappings maps port {host_port}/{protocol}{at} to {container_port}, and the Pod has no such \
                 hostPort"
            );
            return Err(Failure::new(
                Code::NOT_SUPPORTED,
                msg,
                "write it into a container's ports in the Pod",
            ));
        }
    }
    Ok(())
}

fn is_of(mapping: &PortMapping, port: &WorkloadEndpointPort) -> bool {
    let protocol = |name: &str| match name {
        "" => Some(Protocol::TCP),
        name => Protocol::from_name(name),
    };
    // A runtime may write any of these for all addresses.
    let address = |text: &str| text.parse::<IpAddr>().ok().filter(|address| !address.is_unspecified());
    port.host_port == Some(mapping.host_port)
        && port.port.port == mapping.container_port
        && protocol(&mapping.protocol).is_some_and(|one| protocol(&port.port.protocol) == Some(one))
        && address(&mapping.host_ip) == address(port.host_ip.as_deref().unwrap_or_default())
}

/// The MAC address that the pod's interface shall have: the runtime's request, otherwise that of the Pod's annotation.
pub(crate) fn wanted_mac(call: &Invocation, pod: &Pod) -> Result<Option<MacAddress>, Failure> {
    let annotated = || support::requested(&pod.metadata.annotations, &Default::default()).mac;
    Ok(mac(call)?.or_else(annotated))
}

/// The MAC address that the runtime requests: by the capability `mac`, by `args`, or by `MAC` in `CNI_ARGS`.
pub(crate) fn mac(call: &Invocation) -> Result<Option<MacAddress>, Failure> {
    let extra = &call.config.extra;
    let of_config = [
        ("runtimeConfig.mac", extra.get("runtimeConfig").and_then(|config| config.get("mac"))),
        ("args.cni.mac", extra.get("args").and_then(|args| args.pointer("/cni/mac"))),
    ];
    let of_config = of_config.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let of_args = call.args.get("MAC").map(|text| ("MAC in CNI_ARGS", Value::from(text.as_str())));
    let mut asked = of_config.map(|(name, value)| (name, value.clone())).chain(of_args);
    let Some((name, value)) = asked.find(|(_, value)| !is_empty(value)) else { return Ok(None) };
    let text = value.as_str().ok_or_else(|| format!("{value} is no text"));
    let read = text.and_then(MacAddress::of_pod);
    read.map(Some).map_err(|why| Failure::new(Code::INVALID_CONFIG, format!("{name}: {why}"), ""))
}

/// The MTU of the pod's interface in the configuration (`mtu`), in bytes; 0 and none mean that of the overlay, as in Calico.
pub(crate) fn mtu(config: &NetworkConfig) -> Result<Option<u32>, Failure> {
    /// IPv4 needs this much; the kernel takes no more.
    const POSSIBLE: std::ops::RangeInclusive<u64> = 68..=65_535;
    let mtu = match config.extra.get("mtu") {
        None | Some(Value::Null) => return Ok(None),
        Some(mtu) => mtu.as_u64(),
    };
    match mtu {
        Some(0) => Ok(None),
        Some(mtu) if POSSIBLE.contains(&mtu) => Ok(u32::try_from(mtu).ok()),
        _ => {
            let msg = format!("mtu of network {} must be a number from 68 to 65535", config.name);
            Err(Failure::new(Code::INVALID_CONFIG, msg, "without it, pods have the MTU of the overlay"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_mtu_is_read_or_rejected() {
        for (value, expected) in [
            (json!(null), Ok(None)),
            (json!(0), Ok(None)),
            (json!(1400), Ok(Some(1400))),
            (json!(65_536), Err(())),
            (json!(-1), Err(())),
            (json!("1400"), Err(())),
        ] {
            let config = json!({"cniVersion": "1.0.0", "name": "n", "mtu": value});
            let read = mtu(&serde_json::from_value(config).unwrap()).map_err(|_| ());
            assert_eq!(read, expected, "{value}");
        }
    }

    fn call(config: Value, args: &[(&str, &str)]) -> Invocation {
        let mut whole = json!({"cniVersion": "1.0.0", "name": "n"});
        whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        Invocation {
            command: tortie_cni::Command::Add,
            container_id: "c".to_owned(),
            netns: String::new(),
            interface: "eth0".to_owned(),
            args: args.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            config: serde_json::from_value(whole).unwrap(),
            delegated: Vec::new(),
        }
    }

    fn pod(annotations: Value) -> Pod {
        let ports = json!([
            {"containerPort": 80, "hostPort": 8080},
            {"containerPort": 53, "hostPort": 5353, "protocol": "UDP", "hostIP": "192.0.2.1"},
            {"containerPort": 443}
        ]);
        let value = json!({"metadata": {"name": "p", "namespace": "n", "annotations": annotations},
            "spec": {"containers": [{"name": "c", "ports": ports}]}});
        let key = tortie_api::Key::namespaced(tortie_api::Kind::Pod, "n", "p");
        match tortie_api::Resource::read(&key, &value).unwrap() {
            tortie_api::Resource::Pod(pod) => pod,
            _ => unreachable!(),
        }
    }

    #[test]
    fn what_a_runtime_asks_is_served_or_rejected_by_name() {
        let checked = |asked: &Value, takes_mac| {
            let call = call(json!({"runtimeConfig": asked}), &[]);
            check(&call, &pod(json!({})), takes_mac).map_err(|failure| failure.to_string())
        };
        let mapped = |mapping: Value| json!({"portMappings": [mapping]});
        for served in [
            json!(null),
            json!({}),
            json!({"portMappings": [], "dns": {"servers": ["10.96.0.10"]}, "mac": "", "ips": ["10.0.0.1"]}),
            json!({"mac": "0a:00:00:00:00:01"}),
            mapped(json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""})),
            mapped(json!({"hostPort": 8080, "containerPort": 80, "hostIP": "0.0.0.0"})),
            mapped(json!({"hostPort": 5353, "containerPort": 53, "protocol": "udp", "hostIP": "192.0.2.1"})),
            mapped(json!({"hostPort": 0, "containerPort": 443, "protocol": "tcp"})),
            mapped(json!({"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""})),
        ] {
            assert_eq!(checked(&served, true), Ok(()), "{served}");
        }
        for (asked, takes_mac, named) in [
            (json!({"mac": "01:00:00:00:00:01"}), true, "runtimeConfig.mac"),
            (json!({"mac": "ee:ee:ee:ee:ee:ee"}), true, "the other end of the pod's link"),
            (json!({"mac": 1}), true, "no text"),
            (json!({"mac": "0a:00:00:00:00:01"}), false, "use a Linux node"),
            (json!({"other": 1}), true, "runtimeConfig.other"),
            (json!([1]), true, "no object"),
            (json!({"portMappings": {"a": 1}}), true, "no list of mappings"),
            (mapped(json!({"hostPort": 80})), true, "no list of mappings"),
            (mapped(json!({"hostPort": 8081, "containerPort": 80})), true, "maps port 8081/"),
            (mapped(json!({"hostPort": 8080, "containerPort": 81})), true, "maps port 8080/"),
            (
                mapped(json!({"hostPort": 8080, "containerPort": 80, "protocol": "udp"})),
                true,
                "maps port 8080/udp",
            ),
            (
                mapped(json!({"hostPort": 8080, "containerPort": 80, "hostIP": "192.0.2.1"})),
                true,
                "at 192.0.2.1",
            ),
            (
                mapped(json!({"hostPort": 5353, "containerPort": 53, "protocol": "udp"})),
                true,
                "maps port 5353/udp",
            ),
            (mapped(json!({"hostPort": 443, "containerPort": 443})), true, "maps port 443/"),
        ] {
            let problem = checked(&asked, takes_mac).unwrap_err();
            assert!(problem.contains(named), "{asked}: {problem}");
        }
    }

    #[test]
    fn the_runtimes_mac_address_wins_over_the_pods() {
        let annotated = pod(json!({"cni.projectcalico.org/hwAddr": "0a:00:00:00:00:09"}));
        let args = [("MAC", "0a:00:00:00:00:03")];
        let of_args = json!({"args": {"cni": {"mac": "0a:00:00:00:00:02"}}});
        let of_runtime =
            json!({"runtimeConfig": {"mac": "0a:00:00:00:00:01"}, "args": {"cni": {"mac": "x"}}});
        for (call, expected) in [
            (call(of_runtime, &args), 1),
            (call(of_args, &args), 2),
            (call(json!({}), &args), 3),
            (call(json!({}), &[]), 9),
        ] {
            assert_eq!(
                wanted_mac(&call, &annotated).unwrap(),
                Some(MacAddress([0x0a, 0, 0, 0, 0, expected]))
            );
        }
        assert_eq!(wanted_mac(&call(json!({}), &[]), &pod(json!({}))).unwrap(), None);
        // A Windows node refuses the annotation, too.
        assert!(check(&call(json!({}), &[]), &annotated, false).is_err());
    }
}
