//! The EndpointSlices that Kubernetes' controller creates from Services and pods, for manifests and for the lab,
//! which have no such controller.
//!
//! Source of the rules: `k8s.io/endpointslice`, `utils.go` and `reconciler.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{EndpointSlice, IntOrString};
use crate::fields::list;
use crate::net::IpVersion;
use crate::resource::typed;
use crate::{FieldError, Key, Kind, stand_in};

/// The label that names the owner of a slice.
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Its value for the slices created here.
const BY_TORTIE: &str = "tortie.io";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LenientServiceSpec {
    selector: Option<BTreeMap<String, String>>,
    #[serde(rename = "type")]
    service_type: Option<String>,
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs", deserialize_with = "list")]
    cluster_ips: Vec<String>,
    #[serde(deserialize_with = "list")]
    ip_families: Vec<String>,
    ip_family_policy: Option<String>,
    publish_not_ready_addresses: Option<bool>,
    #[serde(deserialize_with = "list")]
    ports: Vec<LenientServicePort>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LenientServicePort {
    name: Option<String>,
    protocol: Option<String>,
    port: u16,
    target_port: Option<IntOrString>,
    app_protocol: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LenientPod {
    metadata: PodMetadata,
    spec: LenientPodSpec,
    status: LenientPodStatus,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodMetadata {
    labels: Option<BTreeMap<String, String>>,
    deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LenientPodSpec {
    node_name: Option<String>,
    #[serde(deserialize_with = "list")]
    containers: Vec<LenientContainer>,
    #[serde(deserialize_with = "list")]
    init_containers: Vec<LenientContainer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LenientContainer {
    restart_policy: Option<String>,
    #[serde(default, deserialize_with = "list")]
    ports: Vec<LenientContainerPort>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LenientContainerPort {
    name: Option<String>,
    protocol: Option<String>,
    container_port: u16,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LenientPodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<IpAddr>,
    #[serde(rename = "podIPs", deserialize_with = "list")]
    pod_ips: Vec<super::PodIp>,
    #[serde(deserialize_with = "list")]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    what: String,
    status: String,
}

/// A port of a slice.
type ImpliedPort = BTreeMap<&'static str, Value>;

/// The problem of a Service's field that slices depend on.
pub(crate) fn check_service(service: &Value) -> Option<FieldError> {
    let error = typed::<LenientServiceSpec>(service.get("spec")?).err()?;
    Some(FieldError::new(format!("spec.{}", error.path).trim_end_matches('.'), error.problem))
}

/// Whether [`implied_slices`] created the slice.
#[must_use]
pub fn is_implied(slice: &Value) -> bool {
    slice["metadata"]["labels"][MANAGED_BY] == BY_TORTIE
}

/// The slices of all Services that have no slices of somebody else. Considers Services, pods and slices among the
/// objects, but not slices that this function created.
#[must_use]
pub fn implied_slices<'a>(objects: impl Iterator<Item = (&'a Key, &'a Value)>) -> BTreeMap<Key, Value> {
    let (mut services, mut pods) = (Vec::new(), BTreeMap::<&str, Vec<(&str, LenientPod)>>::new());
    let (mut made, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for (key, value) in objects {
        match key.kind {
            Kind::Service => services.extend(spec_of(value).map(|spec| (key, spec))),
            Kind::Pod => {
                let pod = LenientPod::deserialize(value).ok().filter(LenientPod::is_backend);
                pods.entry(&key.namespace).or_default().extend(pod.map(|pod| (key.name.as_str(), pod)));
            }
            Kind::EndpointSlice if !is_implied(value) => {
                let service = value["metadata"]["labels"][EndpointSlice::SERVICE].as_str();
                made.extend(service.map(|service| (key.namespace.clone(), service.to_owned())));
                taken.insert(key.clone());
            }
            _ => {}
        }
    }
    let mut slices = BTreeMap::new();
    for (key, spec) in services {
        if made.contains(&(key.namespace.clone(), key.name.clone())) {
            continue;
        }
        let pods = pods.get(key.namespace.as_str()).map_or(&[][..], Vec::as_slice);
        for family in spec.families(pods) {
            for (ports, endpoints) in spec.endpoints(pods, family) {
                let slice =
                    free_name(key, family, |slice| taken.contains(slice) || slices.contains_key(slice));
                let value = slice_of(key, &slice, family, &ports, endpoints);
                slices.insert(slice, value);
            }
        }
    }
    slices
}

/// The spec of a Service that gets slices: one with a selector.
fn spec_of(value: &Value) -> Option<LenientServiceSpec> {
    let spec = LenientServiceSpec::deserialize(value.get("spec")?).ok()?;
    let selects = spec.selector.as_ref().is_some_and(|selector| !selector.is_empty());
    (selects && spec.service_type.as_deref() != Some("ExternalName")).then_some(spec)
}

fn free_name(service: &Key, family: IpVersion, is_taken: impl Fn(&Key) -> bool) -> Key {
    let family = if family == IpVersion::V4 { "ipv4" } else { "ipv6" };
    let mut number = 1;
    loop {
        let suffix = if number == 1 { String::new() } else { format!("-{number}") };
        let name = format!("{}-{family}{suffix}", service.name);
        let key = Key::namespaced(Kind::EndpointSlice, &service.namespace, name);
        if !is_taken(&key) {
            return key;
        }
        number += 1;
    }
}

fn slice_of(
    service: &Key,
    key: &Key,
    family: IpVersion,
    ports: &[ImpliedPort],
    endpoints: Vec<Value>,
) -> Value {
    json!({
        "apiVersion": Kind::EndpointSlice.api_version(), "kind": Kind::EndpointSlice.name(),
        "metadata": {
            "name": key.name, "namespace": key.namespace,
            "labels": {(EndpointSlice::SERVICE): service.name, (MANAGED_BY): BY_TORTIE},
        },
        "addressType": if family == IpVersion::V4 { "IPv4" } else { "IPv6" },
        "endpoints": endpoints,
        "ports": ports,
    })
}

impl LenientServiceSpec {
    /// The address families of the Service: those that it names, otherwise those of its addresses, otherwise the
    /// first one of its pods, or both if its family policy asks for both.
    fn families(&self, pods: &[(&str, LenientPod)]) -> BTreeSet<IpVersion> {
        let named: BTreeSet<IpVersion> =
            self.ip_families.iter().filter_map(|name| family_named(name)).collect();
        if !named.is_empty() {
            return named;
        }
        let own = self.cluster_ips.iter().chain(&self.cluster_ip).filter_map(|text| text.parse().ok());
        // One that stands for a missing address says nothing about the family.
        let own: BTreeSet<IpVersion> =
            own.filter(|address| !stand_in::is_stand_in(address)).map(family_of).collect();
        if !own.is_empty() {
            return own;
        }
        let dual = self.ip_family_policy.as_deref().is_some_and(|policy| policy != "SingleStack");
        let addresses = pods.iter().filter(|(_, pod)| self.selects(pod)).map(|(_, pod)| pod.addresses());
        let count = if dual { usize::MAX } else { 1 };
        addresses.flat_map(|addresses| addresses.into_iter().take(count)).map(family_of).collect()
    }

    /// The backends of a family, grouped by target ports: a named target port may be another number in each pod.
    fn endpoints(
        &self,
        pods: &[(&str, LenientPod)],
        family: IpVersion,
    ) -> Vec<(Vec<ImpliedPort>, Vec<Value>)> {
        let mut all: Vec<(Vec<ImpliedPort>, Vec<Value>)> = Vec::new();
        for (name, pod) in pods.iter().filter(|(_, pod)| self.selects(pod)) {
            let addresses = pod.addresses().into_iter().filter(|address| family_of(*address) == family);
            let Some(address) = addresses.into_iter().next() else { continue };
            let ports: Vec<ImpliedPort> = self.ports.iter().filter_map(|port| port.of(pod)).collect();
            let endpoint = self.endpoint(name, pod, address);
            match all.iter_mut().find(|(known, _)| *known == ports) {
                Some((_, endpoints)) => endpoints.push(endpoint),
                None => all.push((ports, vec![endpoint])),
            }
        }
        all
    }

    fn endpoint(&self, name: &str, pod: &LenientPod, address: IpAddr) -> Value {
        let (ready, ends) = (pod.is_ready(), pod.metadata.deletion_timestamp.is_some());
        let published = self.publish_not_ready_addresses == Some(true);
        json!({
            "addresses": [address],
            "conditions": {"ready": published || (ready && !ends), "serving": ready, "terminating": ends},
            "nodeName": pod.spec.node_name,
            "targetRef": {"kind": "Pod", "name": name},
        })
    }

    fn selects(&self, pod: &LenientPod) -> bool {
        let labels = pod.metadata.labels.as_ref();
        let bears =
            |(name, value): (&String, &String)| labels.is_some_and(|labels| labels.get(name) == Some(value));
        self.selector.iter().flatten().all(bears)
    }
}

impl LenientServicePort {
    /// The target of the port at a pod; `None` if the pod has no port of that name.
    fn of(&self, pod: &LenientPod) -> Option<ImpliedPort> {
        let protocol = self.protocol.as_deref().unwrap_or("TCP");
        let number = match &self.target_port {
            None | Some(IntOrString::Number(0)) => self.port,
            Some(IntOrString::Number(number)) => *number,
            Some(IntOrString::Name(name)) => pod.port_named(name, protocol)?,
        };
        let name = self.name.as_deref().unwrap_or_default();
        let mut port: ImpliedPort =
            [("name", json!(name)), ("protocol", json!(protocol)), ("port", json!(number))].into();
        port.extend(self.app_protocol.as_ref().map(|protocol| ("appProtocol", json!(protocol))));
        Some(port)
    }
}

impl LenientPod {
    /// Whether it can be a backend: it has not ended, and it has an address.
    fn is_backend(&self) -> bool {
        !matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed")) && !self.addresses().is_empty()
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let others =
            self.status.pod_ips.iter().map(|each| each.ip).filter(|ip| Some(*ip) != self.status.pod_ip);
        self.status.pod_ip.into_iter().chain(others).collect()
    }

    /// Whether it is ready; without conditions, no probe has run.
    fn is_ready(&self) -> bool {
        let is = |condition: &Condition| condition.what == "Ready" && condition.status == "True";
        self.status.conditions.is_empty() || self.status.conditions.iter().any(is)
    }

    fn port_named(&self, name: &str, protocol: &str) -> Option<u16> {
        // Init containers that keep running are sidecars.
        let sidecars = self
            .spec
            .init_containers
            .iter()
            .filter(|container| container.restart_policy.as_deref() == Some("Always"));
        let mut ports = self.spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports);
        let is_it = |port: &&LenientContainerPort| {
            port.name.as_deref() == Some(name) && port.protocol.as_deref().unwrap_or("TCP") == protocol
        };
        ports.find(is_it).map(|port| port.container_port)
    }
}

fn family_named(name: &str) -> Option<IpVersion> {
    match name {
        "IPv4" => Some(IpVersion::V4),
        "IPv6" => Some(IpVersion::V6),
        _ => None,
    }
}

fn family_of(address: IpAddr) -> IpVersion {
    if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 }
}
