//! What daemons of flannel announce by annotations of their Nodes (`pkg/subnet/kube` of flannel).

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::json;

use super::Node;
use crate::net::{IpVersion, MacAddress};

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
    /// By VXLAN, with data that cannot be read.
    Unreadable,
    /// By a backend that Tortie does not know.
    Other(String),
}

/// The network of a node's pods of a family, and the way there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlannelLease {
    /// The network (`Node.spec.podCIDRs`).
    pub subnet: IpNet,
    /// The node's own address of the family.
    pub public_ip: IpAddr,
    /// The way.
    pub backend: FlannelBackend,
}

/// The JSON of the annotations [`Node::FLANNEL_DATA`] of the backend `vxlan`.
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
    /// The annotations of each family with the JSON that belongs to the backend.
    pub const FLANNEL_DATA: OfFamilies =
        OfFamilies("flannel.alpha.coreos.com/backend-data", "flannel.alpha.coreos.com/backend-v6-data");
    /// The annotations of each family with the address to announce instead of the node's own.
    pub const FLANNEL_OVERWRITE: OfFamilies = OfFamilies(
        "flannel.alpha.coreos.com/public-ip-overwrite",
        "flannel.alpha.coreos.com/public-ipv6-overwrite",
    );
    /// The annotations of each family with the node's own address.
    pub const FLANNEL_ADDRESS: OfFamilies =
        OfFamilies("flannel.alpha.coreos.com/public-ip", "flannel.alpha.coreos.com/public-ipv6");

    /// The network of its pods of a family, as the cluster's controller manager has allocated it.
    #[must_use]
    pub fn pod_cidr(&self, version: IpVersion) -> Option<IpNet> {
        let listed = self.spec.pod_cidrs.iter().map(String::as_str);
        let nets = listed.chain(self.spec.pod_cidr.as_deref()).filter_map(|text| text.parse::<IpNet>().ok());
        nets.map(|net| net.trunc()).find(|net| IpVersion::of(&net.addr()) == version)
    }

    /// The node as if it had announced these leases, at most one of each family, and nothing else of flannel. Its pods have their
    /// networks only.
    #[must_use]
    pub fn with_flannel_leases(mut self, leases: &[FlannelLease]) -> Self {
        let annotations = &mut self.metadata.annotations;
        for version in IpVersion::ALL {
            annotations.remove(Self::FLANNEL_ADDRESS.of(version));
            annotations.remove(Self::FLANNEL_DATA.of(version));
        }
        annotations.remove(Self::FLANNEL_MANAGED);
        annotations.remove(Self::FLANNEL_BACKEND);
        self.spec.pod_cidr = None;
        self.spec.pod_cidrs = leases.iter().map(|lease| lease.subnet.to_string()).collect();
        for FlannelLease { subnet: _, public_ip, backend } in leases {
            let (version, (name, data)) = (IpVersion::of(public_ip), backend.announced());
            let mut put = |key: &str, value: String| drop(annotations.insert(key.to_owned(), value));
            put(Self::FLANNEL_MANAGED, "true".to_owned());
            put(Self::FLANNEL_BACKEND, name.to_owned());
            put(Self::FLANNEL_DATA.of(version), data);
            put(Self::FLANNEL_ADDRESS.of(version), public_ip.to_string());
        }
        self
    }

    /// What the node's daemon of flannel has announced of a family, if its pods have a network and it has announced one.
    #[must_use]
    pub fn flannel_lease(&self, version: IpVersion) -> Option<FlannelLease> {
        let annotation = |name: &str| self.metadata.annotations.get(name).map(String::as_str);
        let subnet = self.pod_cidr(version)?;
        if annotation(Self::FLANNEL_MANAGED) != Some("true") {
            return None;
        }
        let public_ip: IpAddr = annotation(Self::FLANNEL_ADDRESS.of(version))?.parse().ok()?;
        if IpVersion::of(&public_ip) != version || !FlannelLease::is_of_a_node(public_ip) {
            return None;
        }
        let data = Self::FLANNEL_DATA.of(version);
        let backend = match annotation(Self::FLANNEL_BACKEND)? {
            "host-gw" => FlannelBackend::HostGw,
            "vxlan" => annotation(data).and_then(FlannelBackend::vxlan).unwrap_or(FlannelBackend::Unreadable),
            other => FlannelBackend::Other(other.to_owned()),
        };
        Some(FlannelLease { subnet, public_ip, backend })
    }
}

/// The annotation of IPv4 and that of IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfFamilies(&'static str, &'static str);

impl OfFamilies {
    /// The annotation of a family.
    #[must_use]
    pub const fn of(self, version: IpVersion) -> &'static str {
        match version {
            IpVersion::V4 => self.0,
            IpVersion::V6 => self.1,
        }
    }
}

impl FlannelBackend {
    /// The backend `vxlan` with this data, if it can be read.
    #[must_use]
    pub fn vxlan(json: &str) -> Option<Self> {
        let VxlanData { vni, mac } = serde_json::from_str(json).ok()?;
        let mac: MacAddress = mac.parse().ok()?;
        let is_of_one = mac.0[0] & 1 == 0 && mac.0 != [0; 6];
        is_of_one.then_some(Self::Vxlan { vni, mac })
    }

    /// Its name and its data, as daemons of flannel announce them.
    fn announced(&self) -> (&str, String) {
        match self {
            Self::HostGw => ("host-gw", "null".to_owned()),
            Self::Vxlan { vni, mac } => {
                ("vxlan", json!({"VNI": vni, "VtepMAC": mac.to_string()}).to_string())
            }
            Self::Unreadable => ("vxlan", String::new()),
            Self::Other(name) => (name, "null".to_owned()),
        }
    }
}

impl FlannelLease {
    /// Whether a node can have the address.
    #[must_use]
    pub fn is_of_a_node(address: IpAddr) -> bool {
        let is_broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
        !address.is_loopback() && !address.is_unspecified() && !address.is_multicast() && !is_broadcast
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_needs_a_network_an_address_and_a_backend() {
        let lease = |spec: serde_json::Value, annotations: serde_json::Value| {
            let metadata = json!({"name": "n", "annotations": annotations});
            serde_json::from_value::<Node>(json!({"metadata": metadata, "spec": spec}))
                .unwrap()
                .flannel_lease(IpVersion::V4)
        };
        let announced = |backend: &str, data: &str| {
            json!({
                Node::FLANNEL_MANAGED: "true", Node::FLANNEL_ADDRESS.of(IpVersion::V4): "192.0.2.7",
                Node::FLANNEL_BACKEND: backend, Node::FLANNEL_DATA.of(IpVersion::V4): data,
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
                    Node::FLANNEL_MANAGED: "true", Node::FLANNEL_BACKEND: "host-gw",
                    Node::FLANNEL_ADDRESS.of(IpVersion::V4): "127.0.0.1",
                }),
                None,
            ),
        ] {
            let lease = lease(spec.clone(), annotations.clone());
            let expected = backend.map(|backend| FlannelLease {
                subnet: "10.244.3.0/24".parse().unwrap(),
                public_ip: "192.0.2.7".parse().unwrap(),
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
            assert_eq!(lease.backend, FlannelBackend::Unreadable, "{damaged}");
        }
    }

    #[test]
    fn each_family_has_annotations_of_its_own() {
        let [v4, v6] = [IpVersion::V4, IpVersion::V6];
        let data = |mac: &str| format!(r#"{{"VNI":4096,"VtepMAC":"{mac}"}}"#);
        let (mac, mac_v6) = ("12:c6:65:89:b4:e3", "12:c6:65:89:b4:e6");
        let lease = |cidrs: &[&str], address_v6: &str, version| {
            let annotations = json!({
                Node::FLANNEL_MANAGED: "true", Node::FLANNEL_BACKEND: "vxlan",
                Node::FLANNEL_ADDRESS.of(v4): "192.0.2.7", Node::FLANNEL_DATA.of(v4): data(mac),
                Node::FLANNEL_ADDRESS.of(v6): address_v6, Node::FLANNEL_DATA.of(v6): data(mac_v6),
            });
            let value =
                json!({"metadata": {"name": "n", "annotations": annotations}, "spec": {"podCIDRs": cidrs}});
            let node: Node = serde_json::from_value(value).unwrap();
            let FlannelLease { subnet, public_ip, backend } = node.flannel_lease(version)?;
            let FlannelBackend::Vxlan { vni: 4096, mac } = backend else { panic!("{backend:?}") };
            Some(format!("{subnet} {public_ip} {mac}"))
        };
        let both = ["10.244.3.0/24", "fd00:3::/64"];
        let of_v4 = format!("10.244.3.0/24 192.0.2.7 {mac}");
        let of_v6 = format!("fd00:3::/64 2001:db8::7 {mac_v6}");
        for (cidrs, address_v6, expected, expected_v6) in [
            (&both[..], "2001:db8::7", Some(&of_v4), Some(&of_v6)),
            (&both[..1], "2001:db8::7", Some(&of_v4), None),
            (&both[1..], "2001:db8::7", None, Some(&of_v6)),
            (&both, "192.0.2.7", Some(&of_v4), None),
            (&both, "::1", Some(&of_v4), None),
            (&both, "", Some(&of_v4), None),
        ] {
            assert_eq!(lease(cidrs, address_v6, v4).as_ref(), expected, "{cidrs:?} {address_v6}");
            assert_eq!(lease(cidrs, address_v6, v6).as_ref(), expected_v6, "{cidrs:?} {address_v6}");
        }
    }
}
