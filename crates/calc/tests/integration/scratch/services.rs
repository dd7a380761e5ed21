//! The Services that pods may connect to, directly from the JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::net::Protocol;
use tortie_api::{Kind, Resource};
use tortie_dataplane::{Service, ServiceId, ServicePort};

use super::Objects;

pub(super) fn services(objects: &Objects) -> BTreeMap<ServiceId, Arc<Service>> {
    let readable = objects.iter().filter(|(key, value)| Resource::read(key, value).is_ok());
    let services = readable.filter(|(key, _)| key.kind == Kind::Service);
    let service = |(key, value): (&tortie_api::Key, &Value)| {
        let spec = &value["spec"];
        let mut own = texts(&spec["clusterIPs"]);
        if own.is_empty() {
            own.extend(spec["clusterIP"].as_str().map(str::to_owned));
        }
        let has_own = own.iter().any(|text| text.parse::<std::net::IpAddr>().is_ok());
        if spec["type"] == "ExternalName" || !has_own {
            return None;
        }
        let ingress = value["status"]["loadBalancer"]["ingress"].as_array().into_iter().flatten();
        let ingress = ingress.filter(|ingress| ingress["ipMode"] != "Proxy");
        let ingress = ingress.filter_map(|ingress| Some(ingress["ip"].as_str()?.to_owned()));
        let outer: Vec<String> = texts(&spec["externalIPs"]).into_iter().chain(ingress).collect();
        let ports = spec["ports"].as_array().into_iter().flatten();
        let port = |port: &Value| {
            Some(ServicePort {
                protocol: protocol(port)?,
                port: u16::try_from(port["port"].as_u64()?).unwrap(),
                backends: backends(objects, &key.namespace, &key.name, port),
            })
        };
        let cluster_ips = addresses(&own);
        (!cluster_ips.is_empty()).then(|| {
            let id = ServiceId { namespace: key.namespace.as_str().into(), name: key.name.as_str().into() };
            let ports = ports.filter_map(port).collect();
            (id, Arc::new(Service { cluster_ips, external_ips: addresses(&outer), ports }))
        })
    };
    services.filter_map(service).collect()
}

/// Every backend of a port, checked one by one; terminating ones count only if there are no others.
fn backends(objects: &Objects, namespace: &str, service: &str, port: &Value) -> Vec<(Ipv4Addr, u16)> {
    let (mut ready, mut ending) = (BTreeSet::new(), BTreeSet::new());
    let slices = objects.iter().filter(|(key, value)| {
        key.kind == Kind::EndpointSlice
            && key.namespace == namespace
            && Resource::read(key, value).is_ok()
            && value["metadata"]["labels"]["kubernetes.io/service-name"] == service
    });
    for (_, slice) in slices {
        for target in slice["ports"].as_array().into_iter().flatten() {
            let same_name =
                target["name"].as_str().unwrap_or_default() == port["name"].as_str().unwrap_or_default();
            if !same_name || protocol(target) != protocol(port) {
                continue;
            }
            let Some(number) = target["port"].as_u64().and_then(|number| u16::try_from(number).ok()) else {
                continue;
            };
            for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
                let conditions = &endpoint["conditions"];
                let is_ready = conditions["ready"].as_bool() != Some(false);
                let serves = conditions["serving"].as_bool().unwrap_or(is_ready);
                for address in addresses(&texts(&endpoint["addresses"])) {
                    if is_ready {
                        ready.insert((address, number));
                    } else if serves && conditions["terminating"] == true {
                        ending.insert((address, number));
                    }
                }
            }
        }
    }
    if ready.is_empty() { ending.into_iter().collect() } else { ready.into_iter().collect() }
}

fn protocol(port: &Value) -> Option<Protocol> {
    Protocol::from_name(port["protocol"].as_str().unwrap_or("TCP"))
}

fn texts(list: &Value) -> Vec<String> {
    let texts = list.as_array().into_iter().flatten();
    texts.filter_map(Value::as_str).map(str::to_owned).collect()
}

fn addresses(texts: &[String]) -> Vec<Ipv4Addr> {
    let addresses: BTreeSet<Ipv4Addr> = texts.iter().filter_map(|text| text.parse().ok()).collect();
    addresses.into_iter().collect()
}
