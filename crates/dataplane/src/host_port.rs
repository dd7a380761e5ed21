//! Ports of the node that lead to pods (`hostPort`), and those that lead to no pod.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tortie_api::calico::WorkloadEndpointPort;
use tortie_api::net::Protocol;

use crate::Settings;

/// The port of kubelets (`kubelet --port`, `KubeletConfiguration`): whoever has it gets what the API server sends to the kubelet.
const KUBELET: u16 = 10250;

/// A port of the node that leads to a pod (`hostPort`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The node's address that has the port; `None` for all of them.
    pub address: Option<IpAddr>,
    /// The node's port.
    pub port: u16,
    /// The pod's port.
    pub pod_port: u16,
}

impl HostPort {
    /// The port of the node that leads to this port of a pod, if it has one. An address that is none can never be the node's, so such a
    /// port has no effect; the API server rejects it.
    #[must_use]
    pub fn of(port: &WorkloadEndpointPort) -> Option<Self> {
        let address = match port.host_ip.as_deref().map(str::parse::<IpAddr>) {
            Some(Ok(address)) => Some(address).filter(|address| !address.is_unspecified()),
            Some(Err(_)) => return None,
            None => None,
        };
        let protocol = Protocol::from_name(&port.port.protocol)?;
        Some(Self { protocol, address, port: port.host_port?, pod_port: port.port.port })
    }

    /// Whether only one pod of a node can have both, by the rule of the scheduler of Kubernetes (`HostPortInfo.CheckConflict`).
    #[must_use]
    pub fn conflicts(&self, other: &Self) -> bool {
        let at_one_address = match (self.address, other.address) {
            (Some(one), Some(another)) => one == another,
            (None, _) | (_, None) => true,
        };
        (self.protocol, self.port) == (other.protocol, other.port) && at_one_address
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.port, self.protocol)
    }
}

/// Why a port of the node leads to no pod (policy decision 52).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserved {
    Failsafe,
    Kubelet,
    Bgp,
    Vxlan,
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failsafe => {
                "it is in failsafeInboundHostPorts of FelixConfiguration, whose ports belong to the node itself; choose another \
                 hostPort, or remove it there, if no HostEndpoint needs it, and for one node only in node.NAME"
            }
            Self::Kubelet => "it belongs to the kubelet; choose another hostPort",
            Self::Bgp => "BGP speakers of nodes listen on it; choose another hostPort",
            Self::Vxlan => "nodes receive VXLAN packets on it; choose another hostPort",
        })
    }
}

impl Settings {
    /// The ports of the node that lead to no pod (policy decision 52).
    pub fn ports_of_the_node(&self) -> impl Iterator<Item = (Protocol, u16)> {
        self.reserved().into_keys()
    }

    /// Why this port of the node leads to no pod, with the remedy, if it leads to none.
    #[must_use]
    pub fn why_reserved(&self, port: &HostPort) -> Option<String> {
        self.reserved().get(&(port.protocol, port.port)).map(Reserved::to_string)
    }

    /// The ports for which no remedy in the settings exists take precedence.
    fn reserved(&self) -> BTreeMap<(Protocol, u16), Reserved> {
        let failsafes = self.failsafe_inbound.iter().filter(|failsafe| failsafe.protocol.has_ports());
        let failsafes = failsafes.map(|failsafe| ((failsafe.protocol, failsafe.port), Reserved::Failsafe));
        let bgp = self.bgp_ports.iter().map(|port| ((Protocol::TCP, *port), Reserved::Bgp));
        let vxlan = self.vxlan_ports.iter().map(|port| ((Protocol::UDP, *port), Reserved::Vxlan));
        failsafes.chain(bgp).chain(vxlan).chain([((Protocol::TCP, KUBELET), Reserved::Kubelet)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use tortie_api::calico::{EndpointPort, FailsafePort, FelixConfigurationSpec};
    use tortie_api::{Cidr, ProtocolName};

    use super::*;

    fn at(protocol: Protocol, port: u16, address: Option<&str>) -> HostPort {
        let address = address.map(|address| address.parse().unwrap());
        HostPort { protocol, address, port, pod_port: 80 }
    }

    #[test]
    fn a_port_of_the_node_has_an_address_or_stands_for_all() {
        let port = |host_port, host_ip: Option<&str>| WorkloadEndpointPort {
            port: EndpointPort { name: String::new(), protocol: "UDP".to_owned(), port: 80 },
            host_port,
            host_ip: host_ip.map(str::to_owned),
        };
        let found = |address| Some(at(Protocol::UDP, 5353, address));
        for (written, expected) in [
            (port(None, None), None),
            (port(Some(5353), None), found(None)),
            (port(Some(5353), Some("0.0.0.0")), found(None)),
            (port(Some(5353), Some("::")), found(None)),
            (port(Some(5353), Some("192.0.2.1")), found(Some("192.0.2.1"))),
            (port(Some(5353), Some("localhost")), None),
        ] {
            assert_eq!(HostPort::of(&written), expected, "{written:?}");
        }
    }

    #[test]
    fn two_ports_conflict_if_a_packet_could_go_to_both() {
        let one = at(Protocol::TCP, 8080, Some("192.0.2.1"));
        for (other, expected) in [
            (at(Protocol::TCP, 8080, Some("192.0.2.1")), true),
            (at(Protocol::TCP, 8080, None), true),
            (at(Protocol::TCP, 8080, Some("192.0.2.2")), false),
            (at(Protocol::UDP, 8080, None), false),
            (at(Protocol::TCP, 8081, None), false),
        ] {
            assert_eq!((one.conflicts(&other), other.conflicts(&one)), (expected, expected), "{other:?}");
        }
    }

    #[test]
    fn ports_of_the_nodes_own_programs_are_reserved() {
        let usual = Settings::default();
        let failsafe = FailsafePort {
            protocol: ProtocolName(Protocol::UDP),
            port: 22,
            net: Some(Cidr("192.0.2.0/24".parse().unwrap())),
        };
        let felix = FelixConfigurationSpec {
            failsafe_inbound_host_ports: Some(vec![failsafe]),
            vxlan_port: Some(4790),
            ..FelixConfigurationSpec::default()
        };
        let other = Settings::new(&felix, BTreeMap::new());
        for (protocol, port, by_default, by_setting) in [
            (Protocol::TCP, 22, Some("failsafeInboundHostPorts"), None),
            (Protocol::UDP, 22, None, Some("failsafeInboundHostPorts")),
            (Protocol::TCP, 6443, Some("failsafeInboundHostPorts"), None),
            (Protocol::TCP, 179, Some("BGP"), Some("BGP")),
            (Protocol::TCP, 10250, Some("kubelet"), Some("kubelet")),
            (Protocol::UDP, 4789, Some("VXLAN"), Some("VXLAN")),
            (Protocol::UDP, 4790, None, Some("VXLAN")),
            (Protocol::TCP, 4789, None, None),
            (Protocol::TCP, 8080, None, None),
        ] {
            for (settings, expected) in [(&usual, by_default), (&other, by_setting)] {
                let why = settings.why_reserved(&at(protocol, port, None));
                let is_so = match expected {
                    Some(part) => why.as_ref().is_some_and(|why| why.contains(part)),
                    None => why.is_none(),
                };
                assert!(is_so, "{port}/{protocol}: {why:?}");
            }
        }
    }
}
