//! `v1`: Namespace, Node, ServiceAccount, Pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;

use crate::Metadata;
use crate::calico::{EndpointPort, WorkloadEndpointPort};
use crate::fields::{address_of, list};
use crate::net::IpVersion;

/// A namespace; its labels become its pods' `pcns.` labels.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Namespace {
    /// Its name and labels.
    pub metadata: Metadata,
}

/// A service account; its labels become its pods' `pcsa.` labels.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ServiceAccount {
    /// Its name, namespace and labels.
    pub metadata: Metadata,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Node {
    /// Its name, labels, and Calico's data in annotations.
    pub metadata: Metadata,
    /// Its settings.
    #[serde(default)]
    pub spec: NodeSpec,
    /// What the kubelet and the cloud controller report about it.
    #[serde(default)]
    pub status: ObservedNode,
}

/// The settings of a node that Tortie reads.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSpec {
    /// Whether no new pods are scheduled there.
    #[serde(default)]
    pub unschedulable: bool,
    /// The networks of its pods, as text.
    #[serde(default, rename = "podCIDRs", deserialize_with = "list")]
    pub pod_cidrs: Vec<String>,
    /// The first one of them.
    #[serde(default, rename = "podCIDR")]
    pub pod_cidr: Option<String>,
    /// Its addresses in a Node of Calico, which etcd has. A Node of Kubernetes has them in its status.
    #[serde(default, deserialize_with = "list")]
    pub addresses: Vec<NodeAddress>,
}

/// The status of a node that Tortie reads.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct ObservedNode {
    /// Its addresses and names.
    #[serde(default, deserialize_with = "list")]
    pub addresses: Vec<NodeAddress>,
}

/// An address or a name of a node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NodeAddress {
    /// `InternalIP`, `ExternalIP`, `Hostname`, `InternalDNS`, `ExternalDNS`; in a Node of Calico also `CalicoNodeIP`.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// An address or a name.
    pub address: String,
}

impl NodeAddress {
    /// Whether it may be a name.
    fn may_be_a_name(&self) -> bool {
        ["Hostname", "InternalDNS", "ExternalDNS"].contains(&self.kind.as_str())
    }
}

impl Node {
    /// The annotation with the node's own address and prefix length.
    pub const ADDRESS: &str = "projectcalico.org/IPv4Address";
    /// The annotation with the node's own IPv6 address and prefix length.
    pub const ADDRESS_V6: &str = "projectcalico.org/IPv6Address";
    /// The annotation with what the agent has written to [`ADDRESS`](Self::ADDRESS) itself, so that it may replace that.
    pub const ANNOUNCED: &str = "tortie.io/announced-address";
    /// The annotation with what the agent has written to [`ADDRESS_V6`](Self::ADDRESS_V6) itself.
    pub const ANNOUNCED_V6: &str = "tortie.io/announced-address-v6";
    /// The annotation with the address of the node's VXLAN device.
    pub const VXLAN_ADDRESS: &str = "projectcalico.org/IPv4VXLANTunnelAddr";
    /// The annotation with the address of the node's IPIP device.
    pub const IPIP_ADDRESS: &str = "projectcalico.org/IPv4IPIPTunnelAddr";
    /// The annotation with the type of a Windows node's HNS network, if it is not an overlay.
    pub const HNS_NETWORK: &str = "tortie.io/hns-network";
    /// Its value for a network without encapsulation.
    pub const L2BRIDGE: &str = "L2Bridge";
    /// The annotation with the MAC address of the node's VXLAN device.
    pub const VXLAN_MAC: &str = "projectcalico.org/VXLANTunnelMACAddr";
    /// The annotation with the address of the node's IPv6 VXLAN device.
    pub const VXLAN_ADDRESS_V6: &str = "projectcalico.org/IPv6VXLANTunnelAddr";
    /// The annotation with the MAC address of the node's IPv6 VXLAN device.
    pub const VXLAN_MAC_V6: &str = "projectcalico.org/VXLANTunnelMACAddrV6";
    /// The annotation with the AS number of the node's BGP speaker.
    pub const AS_NUMBER: &str = "projectcalico.org/ASNumber";
    /// The annotation with labels, as JSON, that only Calico's programs and Tortie see. calicoctl writes it in a Kubernetes API.
    pub const LABELS: &str = "projectcalico.org/labels";
    /// The label with the node's operating system.
    pub const OS: &str = "kubernetes.io/os";
    /// The label with the node's zone.
    pub const ZONE: &str = "topology.kubernetes.io/zone";

    /// The node with the labels of the annotation [`LABELS`](Self::LABELS). The node's own labels take precedence, and an annotation that
    /// is no mapping of texts does not count, as in Calico (`libcalico-go/lib/backend/k8s/resources/node.go`). Unlike there, it gives no labels
    /// of Kubernetes' own domains: a kubelet may write annotations of its Node, and not those labels.
    #[must_use]
    pub(crate) fn with_calicos_labels(mut self) -> Self {
        let text = self.metadata.annotations.get(Self::LABELS);
        let more = text.and_then(|text| serde_json::from_str::<BTreeMap<String, String>>(text).ok());
        let more = more.into_iter().flatten().filter(|(name, _)| !is_of_kubernetes(name));
        for (name, value) in more {
            self.metadata.labels.entry(name).or_insert(value);
        }
        self
    }

    /// The labels of a stored Node, also of one that cannot be read otherwise.
    #[must_use]
    pub fn labels_of(value: &Value) -> BTreeMap<String, String> {
        let metadata = &value["metadata"];
        let labels = BTreeMap::deserialize(&metadata["labels"]).unwrap_or_default();
        let annotation = metadata["annotations"][Self::LABELS].as_str();
        let annotations =
            annotation.map(|text| (Self::LABELS.to_owned(), text.to_owned())).into_iter().collect();
        let metadata = Metadata { labels, annotations, ..Metadata::default() };
        let node = Self { metadata, spec: NodeSpec::default(), status: ObservedNode::default() };
        node.with_calicos_labels().metadata.labels
    }

    /// The node's own address.
    #[must_use]
    pub fn address(&self) -> Option<Ipv4Addr> {
        match self.own_address(IpVersion::V4)? {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// The node's own IPv6 address.
    #[must_use]
    pub fn address_v6(&self) -> Option<Ipv6Addr> {
        match self.own_address(IpVersion::V6)? {
            IpAddr::V6(address) => Some(address),
            IpAddr::V4(_) => None,
        }
    }

    /// The node's own address of a family.
    #[must_use]
    pub fn own_address(&self, version: IpVersion) -> Option<IpAddr> {
        self.annotated(version, [Self::ADDRESS, Self::ADDRESS_V6]).and_then(address_of)
    }

    /// The node's address of a family as its kubelet reports it (`InternalIP`).
    #[must_use]
    pub fn reported_address(&self, version: IpVersion) -> Option<IpAddr> {
        let internal = self.status.addresses.iter().filter(|listed| listed.kind == "InternalIP");
        internal.filter_map(|listed| address_of(&listed.address)).find(|it| IpVersion::of(it) == version)
    }

    /// The network of the node's own address. It consists of that address alone if nobody wrote its prefix length.
    #[must_use]
    pub fn own_network(&self, version: IpVersion) -> Option<IpNet> {
        let text = self.annotated(version, [Self::ADDRESS, Self::ADDRESS_V6])?;
        text.parse::<IpNet>().ok().or_else(|| address_of(text).map(IpNet::from)).map(|net| net.trunc())
    }

    /// Every address by which a peer `nodes` of a policy knows it, without duplicates: the IP addresses in its status, those of
    /// Calico's Node in etcd, and in annotations its own addresses, because a datastore without kubelets has only those, and
    /// those of its tunnels, because whatever listens on all addresses answers there, too.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let listed = self.listed_addresses().filter_map(|listed| address_of(&listed.address));
        let own = IpVersion::ALL.into_iter().filter_map(|version| self.own_address(version));
        let tunnels = IpVersion::ALL.into_iter().filter_map(|version| self.vxlan_address(version));
        let tunnels = tunnels.chain(self.ipip_address().map(IpAddr::V4));
        let all: BTreeSet<IpAddr> = listed.chain(own).chain(tunnels).filter_map(of_a_node).collect();
        all.into_iter().collect()
    }

    /// The listed addresses that are neither names nor addresses that a node can have.
    pub fn unusable_addresses(&self) -> impl Iterator<Item = &str> {
        let odd = self.listed_addresses().filter(|listed| !listed.may_be_a_name());
        let texts = odd.map(|listed| listed.address.as_str());
        texts.filter(|text| address_of(text).and_then(of_a_node).is_none())
    }

    fn listed_addresses(&self) -> impl Iterator<Item = &NodeAddress> {
        self.status.addresses.iter().chain(&self.spec.addresses)
    }

    /// The address of the node's VXLAN device of a family.
    #[must_use]
    pub fn vxlan_address(&self, version: IpVersion) -> Option<IpAddr> {
        self.annotated(version, [Self::VXLAN_ADDRESS, Self::VXLAN_ADDRESS_V6]).and_then(address_of)
    }

    /// The address of the node's IPIP device.
    #[must_use]
    pub fn ipip_address(&self) -> Option<Ipv4Addr> {
        match address_of(self.metadata.annotations.get(Self::IPIP_ADDRESS)?)? {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// The MAC address of the node's VXLAN device of a family as text.
    #[must_use]
    pub fn vxlan_mac(&self, version: IpVersion) -> Option<&str> {
        let name = if version == IpVersion::V4 { Self::VXLAN_MAC } else { Self::VXLAN_MAC_V6 };
        self.metadata.annotations.get(name).map(String::as_str)
    }

    /// Whether the node runs Windows.
    #[must_use]
    pub fn is_windows(&self) -> bool {
        self.metadata.labels.get(Self::OS).is_some_and(|os| os == "windows")
    }

    /// Whether packets of pods may come to the node without encapsulation. The overlay network of a Windows node takes none.
    #[must_use]
    pub fn takes_plain_packets(&self) -> bool {
        let network = self.metadata.annotations.get(Self::HNS_NETWORK);
        !self.is_windows() || network.is_some_and(|network| network == Self::L2BRIDGE)
    }

    /// The annotation of a family, given that of IPv4 and that of IPv6, if its address is of that family.
    fn annotated(&self, version: IpVersion, [ipv4, ipv6]: [&str; 2]) -> Option<&str> {
        let name = if version == IpVersion::V4 { ipv4 } else { ipv6 };
        let text = self.metadata.annotations.get(name)?;
        let is_of_family = address_of(text).is_some_and(|address| IpVersion::of(&address) == version);
        is_of_family.then_some(text)
    }
}

/// Whether a label is of a domain of Kubernetes.
fn is_of_kubernetes(label: &str) -> bool {
    let domain = label.split_once('/').map_or("", |(domain, _)| domain);
    ["kubernetes.io", "k8s.io"].iter().any(|own| domain == *own || domain.ends_with(&format!(".{own}")))
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Pod {
    /// Its name, namespace, labels and annotations.
    pub metadata: Metadata,
    /// The desired state.
    pub spec: PodSpec,
    /// The observed state.
    #[serde(default)]
    pub status: PodStatus,
}

/// The desired state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node that runs it, once it is scheduled.
    pub node_name: Option<String>,
    /// The labels that its node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Whether it uses its node's network; no policy for pods applies to such a pod (policy decision 1).
    pub host_network: bool,
    /// Its service account; `default` if absent.
    pub service_account_name: Option<String>,
    /// Its containers.
    #[serde(deserialize_with = "list")]
    pub containers: Vec<Container>,
    /// The containers that run before those, or beside them (native sidecars).
    #[serde(deserialize_with = "list")]
    pub init_containers: Vec<Container>,
}

/// A container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Container {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// The ports that it serves.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<ContainerPort>,
    /// `Always` makes an initContainer one that runs beside the others.
    #[serde(default, rename = "restartPolicy")]
    pub restart_policy: Option<String>,
}

/// A port that a container serves.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    /// Its name, for named ports.
    #[serde(default)]
    pub name: Option<String>,
    /// Its number.
    pub container_port: u16,
    /// Its protocol; TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// The port of the node that leads to it.
    #[serde(default)]
    pub host_port: Option<u16>,
    /// The address of the node that has that port; all addresses if absent or empty.
    #[serde(rename = "hostIP", default)]
    pub host_ip: Option<String>,
}

/// The observed state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Its address, once it has one.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<IpAddr>,
    /// Its addresses of both families, including that one.
    #[serde(rename = "podIPs", deserialize_with = "list")]
    pub pod_ips: Vec<PodIp>,
    /// `Pending`, `Running`, `Succeeded`, `Failed`.
    pub phase: Option<String>,
}

/// One of a pod's addresses.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PodIp {
    /// The address.
    pub ip: IpAddr,
}

impl PodStatus {
    /// Every address that it has.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let others = self.pod_ips.iter().map(|each| each.ip).filter(|ip| Some(*ip) != self.pod_ip);
        self.pod_ip.into_iter().chain(others).collect()
    }
}

impl Pod {
    /// The service account that it runs under.
    #[must_use]
    pub fn service_account(&self) -> &str {
        self.spec.service_account_name.as_deref().filter(|name| !name.is_empty()).unwrap_or("default")
    }

    /// The ports of its containers and initContainers, whatever their restart policy, that have a name or a port of the
    /// node, as in Calico's conversion of pods (`libcalico-go/lib/backend/k8s/conversion/workload_endpoint_default.go`).
    #[must_use]
    pub fn endpoint_ports(&self) -> Vec<WorkloadEndpointPort> {
        ports_of(self.spec.containers.iter().chain(&self.spec.init_containers))
    }

    /// The ports of the node that are the pod's for as long as it runs. Those of an initContainer that ends before the others are not, as in
    /// the scheduler (`pkg/scheduler/util/utils.go`) and the kubelet.
    #[must_use]
    pub fn lasting_host_ports(&self) -> Vec<WorkloadEndpointPort> {
        let is_sidecar = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
        let sidecars = self.spec.init_containers.iter().filter(is_sidecar);
        let mut ports = ports_of(self.spec.containers.iter().chain(sidecars));
        ports.retain(|port| port.host_port.is_some());
        ports
    }

    /// Whether all of its containers have ended for good.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.status.phase.as_deref().is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase))
    }
}

/// The ports of containers that have a name or a port of the node.
fn ports_of<'a>(containers: impl Iterator<Item = &'a Container>) -> Vec<WorkloadEndpointPort> {
    let ports = containers.flat_map(|container| &container.ports).map(|port| WorkloadEndpointPort {
        port: EndpointPort {
            name: port.name.clone().unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            port: port.container_port,
        },
        host_port: port.host_port.filter(|port| *port > 0),
        host_ip: port.host_ip.clone().filter(|address| !address.is_empty()),
    });
    ports.filter(|port| !port.port.name.is_empty() || port.host_port.is_some()).collect()
}

/// The address in its usual form, if other machines can reach a node by it. IPv4 addresses that are written as IPv6 addresses
/// are IPv4 addresses. `240.0.0.0/4` is reserved; `explain` invents addresses there.
fn of_a_node(address: IpAddr) -> Option<IpAddr> {
    let address = address.to_canonical();
    let is_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.octets()[0] == 0 || v4.octets()[0] >= 240,
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.is_unspecified(),
    };
    (!is_local && !address.is_loopback() && !address.is_multicast()).then_some(address)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Key, Kind, Resource};

    #[test]
    fn labels_of_calicos_annotation_count_unless_the_node_has_them() {
        let own = json!({"zone": "a", "os": "linux"});
        for (text, expected) in [
            (
                r#"{"node-restriction.kubernetes.io/a":"b","kubernetes.io/os":"c","x.k8s.io/d":"e"}"#,
                own.clone(),
            ),
            (r#"{"zone":"b","rack":"1"}"#, json!({"zone": "a", "os": "linux", "rack": "1"})),
            ("{}", own.clone()),
            ("{", own.clone()),
            (r#"{"rack":1}"#, own.clone()),
            ("[]", own.clone()),
        ] {
            let value =
                json!({"metadata": {"name": "n", "labels": own, "annotations": {Node::LABELS: text}}});
            let Ok(Resource::Node(node)) = Resource::read(&Key::global(Kind::Node, "n"), &value) else {
                panic!("{value} is a Node");
            };
            assert_eq!(json!(node.metadata.labels), expected, "{text}");
        }
    }

    /// Names are left out, what no node can have is named, and each address occurs once.
    #[test]
    fn a_node_has_the_addresses_of_its_status_of_calicos_node_and_of_its_annotations() {
        let status = json!([
            {"type": "InternalIP", "address": "192.0.2.1"}, {"type": "ExternalIP", "address": "203.0.113.1"},
            {"type": "InternalIP", "address": "2001:db8::1"}, {"type": "Hostname", "address": "n1"},
            {"type": "InternalDNS", "address": "n1.example"}, {"type": "ExternalIP", "address": "192.0.2.300"},
        ]);
        let annotations = json!({Node::ADDRESS: "192.0.2.1/24", Node::ADDRESS_V6: "2001:db8::2/64"});
        let other =
            "::ffff:192.0.2.7 0.0.0.0 :: 127.0.0.1 ::1 169.254.169.254 fe80::1 224.0.0.1 ff02::1 240.0.0.1";
        let other: Vec<&str> = other.split(' ').collect();
        // The first is an IPv4 address of the node.
        let local = &other[1..];
        let listed: Vec<Value> =
            other.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
        let both = ["192.0.2.1", "203.0.113.1", "2001:db8::1", "2001:db8::2"];
        let table = [
            (json!({"metadata": {"name": "n"}}), &[][..], &[][..]),
            (json!({"metadata": {"name": "n"}, "status": {"addresses": null}}), &[], &[]),
            (
                json!({"metadata": {"name": "n", "annotations": annotations}, "status": {"addresses": status}}),
                &both,
                &["192.0.2.300"],
            ),
            (
                json!({"metadata": {"name": "n"}, "spec": {"addresses": [{"address": "192.0.2.7/24"}, {"address": "odd"}]}}),
                &["192.0.2.7"],
                &["odd"],
            ),
            (
                json!({"metadata": {"name": "n", "annotations": {
                    Node::VXLAN_ADDRESS: "10.244.1.0", Node::VXLAN_ADDRESS_V6: "fd00::1"}}}),
                &["10.244.1.0", "fd00::1"],
                &[],
            ),
            (json!({"metadata": {"name": "n"}, "status": {"addresses": listed}}), &["192.0.2.7"], local),
        ];
        for (value, expected, odd) in table {
            let Ok(Resource::Node(node)) = Resource::read(&Key::global(Kind::Node, "n"), &value) else {
                panic!("{value}")
            };
            let expected: Vec<IpAddr> = expected.iter().map(|address| address.parse().unwrap()).collect();
            assert_eq!(node.addresses(), expected, "{value}");
            assert_eq!(node.unusable_addresses().collect::<Vec<_>>(), odd, "{value}");
        }
    }
}
