//! WorkloadEndpoint: a pod's interface, as created by the CNI plugin (`libcalico-go/lib/names/workloadendpoint.go` of
//! Calico).

use serde::{Deserialize, Serialize};

use crate::Metadata;

/// A pod's interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadEndpoint {
    /// `projectcalico.org/v3`.
    pub api_version: String,
    /// `WorkloadEndpoint`.
    pub kind: String,
    /// Its name comes from [`WorkloadEndpoint::name_for`]; its labels are the pod's.
    pub metadata: Metadata,
    /// The interface.
    pub spec: WorkloadEndpointSpec,
}

/// The properties of a pod's interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadEndpointSpec {
    /// `k8s`.
    pub orchestrator: String,
    /// The node that runs the pod.
    pub node: String,
    /// The sandbox.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The pod's name.
    pub pod: String,
    /// The interface inside the pod.
    pub endpoint: String,
    /// The pod's service account.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service_account_name: String,
    /// The pod's addresses, each with `/32` or `/128`.
    pub ip_networks: Vec<ipnet::IpNet>,
    /// The profiles, in order: `kns.<namespace>` and `ksa.<namespace>.<service account>`.
    pub profiles: Vec<String>,
    /// The host end of the link.
    pub interface_name: String,
    /// The MAC address of the pod's interface.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// The named ports of the pod's containers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<WorkloadEndpointPort>,
}

/// A named port of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointPort {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// Its protocol, by name.
    pub protocol: String,
    /// Its number.
    pub port: u16,
}

/// A port of a workload endpoint: it has a name, or the node has a port for it, or both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadEndpointPort {
    /// Name, protocol and number; the name may be empty.
    #[serde(flatten)]
    pub port: EndpointPort,
    /// The port of the node that leads to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_port: Option<u16>,
    /// The address of the node that has that port, as text; all addresses if absent.
    #[serde(rename = "hostIP", default, skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<String>,
}

impl WorkloadEndpoint {
    /// The annotation of an endpoint that is derived from a Pod whose kubelet has not reported its addresses: they come from an annotation,
    /// which whoever may change the pod can write. Exports leave it out.
    pub const UNREPORTED: &str = "tortie.io/unreportedAddresses";

    /// Whether only an annotation of the pod names the addresses.
    #[must_use]
    pub fn is_unreported(&self) -> bool {
        self.metadata.annotations.contains_key(Self::UNREPORTED)
    }

    /// `<node>-k8s-<pod>-<interface>`, with each dash inside a part doubled.
    #[must_use]
    pub fn name_for(node: &str, pod: &str, interface: &str) -> String {
        [node, "k8s", pod, interface].map(|part| part.replace('-', "--")).join("-")
    }

    /// The profiles of a pod of this namespace and service account.
    #[must_use]
    pub fn profiles_for(namespace: &str, service_account: &str) -> Vec<String> {
        vec![format!("kns.{namespace}"), format!("ksa.{namespace}.{service_account}")]
    }
}
