//! What daemons of flannel announce by annotations of their Nodes (`pkg/subnet/kube` of flannel).

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::Deserialize;

use super::Node;
use crate::net::MacAddress;

/// How packets reach the pods of a node with flannel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlannelBackend {
    /// By way of the node itself.
    HostGw,
    /// By VXLAN. The tunnel's address is the first one of the pods' network.
    Vxlan {
        /// The VXLAN network identifier.
        vni: u32,
        /// The MAC address of the node's VXLAN device.
        mac: MacAddress,
    },
    /// By a backend that Tortie does not know, or by VXLAN with data that cannot be read.
    Other(String),
}

/// The network of a node's pods, and the way there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlannelLease {
    /// The network (`Node.spec.podCIDR`).
    pub subnet: Ipv4Net,
    /// The node's own address.
    pub public_ip: Ipv4Addr,
    /// The way.
    pub backend: FlannelBackend,
}

/// The JSON of the annotation [`Node::FLANNEL_DATA`] of the backend `vxlan`.
#[derive(Deserialize)]
struct VxlanData {
    #[serde(rename = "VNI")]
    vni: u32,
    #[serde(rename = "VtepMAC")]
    mac: String,
}

impl Node {
    /// The annotation with `true`, if a daemon of flannel has announced the node.
    pub const FLANNEL_MANAGED: &str = "flannel.alpha.coreos.com/kube-subnet-manager";
    /// The annotation with the name of the backend.
    pub const FLANNEL_BACKEND: &str = "flannel.alpha.coreos.com/backend-type";
    /// The annotation with the JSON that belongs to the backend.
    pub const FLANNEL_DATA: &str = "flannel.alpha.coreos.com/backend-data";
    /// The annotation with the address to announce instead of the node's own.
    pub const FLANNEL_OVERWRITE: &str = "flannel.alpha.coreos.com/public-ip-overwrite";
    /// The annotations of IPv6, which Tortie does not announce.
    pub const FLANNEL_V6: [&str; 2] =
        ["flannel.alpha.coreos.com/backend-v6-data", "flannel.alpha.coreos.com/public-ipv6"];
    /// The annotation with the node's own address.
    pub const FLANNEL_ADDRESS: &str = "flannel.alpha.coreos.com/public-ip";

    /// The IPv4 network of its pods, as the cluster's controller manager has allocated it.
    #[must_use]
    pub fn pod_cidr(&self) -> Option<Ipv4Net> {
        let listed = self.spec.pod_cidrs.iter().map(String::as_str);
        let single = self.spec.pod_cidr.as_deref();
        listed.chain(single).find_map(|text| text.parse::<Ipv4Net>().ok()).map(|net| net.trunc())
    }

    /// What the node's daemon of flannel has announced, if its pods have a network and it has announced one.
    #[must_use]
    pub fn flannel_lease(&self) -> Option<FlannelLease> {
        let annotation = |name: &str| self.metadata.annotations.get(name).map(String::as_str);
        let subnet = self.pod_cidr()?;
        if annotation(Self::FLANNEL_MANAGED) != Some("true") {
            return None;
        }
        let public_ip: Ipv4Addr = annotation(Self::FLANNEL_ADDRESS)?.parse().ok()?;
        if public_ip.is_loopback()
            || public_ip.is_unspecified()
            || public_ip.is_multicast()
            || public_ip.is_broadcast()
        {
            return None;
        }
        let backend = match annotation(Self::FLANNEL_BACKEND)? {
            "host-gw" => FlannelBackend::HostGw,
            "vxlan" => annotation(Self::FLANNEL_DATA).and_then(vxlan).unwrap_or_else(|| {
                FlannelBackend::Other(format!("vxlan without valid data in {}", Self::FLANNEL_DATA))
            }),
            other => FlannelBackend::Other(other.to_owned()),
        };
        Some(FlannelLease { subnet, public_ip, backend })
    }
}

fn vxlan(json: &str) -> Option<FlannelBackend> {
    let VxlanData { vni, mac } = serde_json::from_str(json).ok()?;
    let mac: MacAddress = mac.parse().ok()?;
    let is_of_one = mac.0[0] & 1 == 0 && mac.0 != [0; 6];
    is_of_one.then_some(FlannelBackend::Vxlan { vni, mac })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_lease_needs_a_network_an_address_and_a_backend() {
        let lease = |spec: serde_json::Value, annotations: serde_json::Value| {
            let metadata = json!({"name": "n", "annotations": annotations});
            serde_json::from_value::<Node>(json!({"metadata": metadata, "spec": spec}))
                .unwrap()
                .flannel_lease()
        };
        let announced = |backend: &str, data: &str| {
            json!({
                Node::FLANNEL_MANAGED: "true", Node::FLANNEL_ADDRESS: "192.0.2.7",
                Node::FLANNEL_BACKEND: backend, Node::FLANNEL_DATA: data,
            })
        };
        let spec = json!({"podCIDR": "10.244.3.0/24"});
        let vxlan = r#"{"VNI":4096,"VtepMAC":"12:c6:65:89:b4:e3"}"#;
        let mac = "12:c6:65:89:b4:e3".parse().unwrap();
        for (spec, annotations, backend) in [
            (spec.clone(), announced("vxlan", vxlan), Some(FlannelBackend::Vxlan { vni: 4096, mac })),
            (spec.clone(), announced("host-gw", "null"), Some(FlannelBackend::HostGw)),
            (spec.clone(), announced("udp", "null"), Some(FlannelBackend::Other("udp".to_owned()))),
            (
                json!({"podCIDRs": ["fd00::/64", "10.244.3.0/24"]}),
                announced("host-gw", "null"),
                Some(FlannelBackend::HostGw),
            ),
            (json!({}), announced("host-gw", "null"), None),
            (json!({"podCIDR": "fd00::/64"}), announced("host-gw", "null"), None),
            (spec.clone(), json!({}), None),
            (spec.clone(), json!({Node::FLANNEL_MANAGED: "true"}), None),
            (
                spec.clone(),
                json!({
                    Node::FLANNEL_MANAGED: "true", Node::FLANNEL_BACKEND: "host-gw", Node::FLANNEL_ADDRESS: "127.0.0.1",
                }),
                None,
            ),
        ] {
            let lease = lease(spec.clone(), annotations.clone());
            let expected = backend.map(|backend| FlannelLease {
                subnet: "10.244.3.0/24".parse().unwrap(),
                public_ip: Ipv4Addr::new(192, 0, 2, 7),
                backend,
            });
            assert_eq!(lease, expected, "{spec} {annotations}");
        }
        for damaged in [
            "",
            "null",
            "{}",
            r#"{"VNI":-1,"VtepMAC":"12:c6:65:89:b4:e3"}"#,
            r#"{"VNI":1,"VtepMAC":"x"}"#,
            r#"{"VNI":1,"VtepMAC":"01:00:5e:00:00:01"}"#,
        ] {
            let lease = lease(spec.clone(), announced("vxlan", damaged)).unwrap();
            assert!(
                matches!(lease.backend, FlannelBackend::Other(why) if why.contains("backend-data")),
                "{damaged}"
            );
        }
    }
}
