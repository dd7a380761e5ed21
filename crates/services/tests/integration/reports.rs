//! The problems of fields.

use serde_json::json;
use tortie_api::{Key, Kind};

use crate::setting::{problems, put, put_slice, service, services, slice};

/// Each part that has no effect is reported with its field.
#[test]
fn wrong_fields_are_reported() {
    for (spec, found, left) in [
        (json!({"externalTrafficPolicy": "local"}), "spec.externalTrafficPolicy: \"local\" is neither", 0),
        (json!({"internalTrafficPolicy": "Node"}), "spec.internalTrafficPolicy: \"Node\" is neither", 0),
        (json!({"sessionAffinity": "Cookie"}), "spec.sessionAffinity: \"Cookie\" is neither", 0),
        (
            json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}}),
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not in 1 to 86400",
            0,
        ),
        (
            json!({"externalIPs": ["198.51.100.256"]}),
            "spec.externalIPs[0]: \"198.51.100.256\" is no address",
            2,
        ),
        (
            json!({"externalIPs": ["127.0.0.1"]}),
            "spec.externalIPs[0]: 127.0.0.1 is no address that other machines",
            2,
        ),
        (
            json!({"loadBalancerSourceRanges": ["10.0.0.1"]}),
            "spec.loadBalancerSourceRanges[0]: \"10.0.0.1\" is no network",
            2,
        ),
        (
            json!({"ports": [{"port": 80, "protocol": "ICMP"}]}),
            "spec.ports[0].protocol: \"ICMP\" is not served",
            0,
        ),
        (json!({"ports": [{"port": 0}]}), "spec.ports[0].port: 0 is no port", 0),
        (json!({"ports": [{"port": 80}, {"port": 81}]}), "spec.ports[1].name: an earlier port", 1),
        (json!({"ports": [{"port": 80, "nodePort": 70000}]}), "nodePort", 0),
        (json!({"healthCheckNodePort": 70000}), "spec.healthCheckNodePort: 70000 is no port", 2),
    ] {
        let mut services = services();
        put(&mut services, "s", &service(spec.clone()));
        services.flush().unwrap();
        let problems = problems(&services);
        assert!(
            problems.len() == 1 && problems[0].starts_with("Service ns/s: ") && problems[0].contains(found),
            "{spec}: {problems:?}"
        );
        assert_eq!(services.state().frontends.len(), left, "{spec}");
        services.update(&Key::namespaced(Kind::Service, "ns", "s"), None);
        assert_eq!(services.problems().len(), 0);
    }
    for (slice, found) in [
        (
            slice(json!([{"addresses": ["10.0.0.300"]}])),
            "endpoints[0].addresses[0]: \"10.0.0.300\" is no IPv4 address",
        ),
        (
            slice(json!([{"addresses": ["fd00::1"]}])),
            "endpoints[0].addresses[0]: \"fd00::1\" is no IPv4 address",
        ),
        (
            slice(json!([{"addresses": ["169.254.169.254"]}])),
            "endpoints[0].addresses[0]: 169.254.169.254 is no address",
        ),
        (json!({"endpoints": []}), "addressType: is neither IPv4 nor IPv6"),
        (
            json!({"addressType": "IPv4", "endpoints": [], "ports": [{"name": "", "port": 1, "protocol": "ICMP"}]}),
            "ports[0].protocol: \"ICMP\" is not served",
        ),
    ] {
        let mut services = services();
        put_slice(&mut services, "s-1", &slice);
        let problems = problems(&services);
        assert!(problems.len() == 1 && problems[0].contains(found), "{slice}: {problems:?}");
    }
    let mut services = services();
    for (cidr, found) in [
        (
            json!({"spec": {"cidrs": ["10.96.0.0"]}}),
            "ServiceCIDR k: spec.cidrs[0]: \"10.96.0.0\" is no network",
        ),
        (json!({"spec": {"cidrs": "10.96.0.0/12"}}), "ServiceCIDR k: spec.cidrs: "),
    ] {
        services.update(&Key::global(Kind::ServiceCidr, "k"), Some(&cidr));
        let problems = problems(&services);
        assert!(problems.len() == 1 && problems[0].starts_with(found), "{cidr}: {problems:?}");
    }
}
