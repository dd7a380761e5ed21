//! The keys and values of leases (`pkg/subnet/subnet.go` and `pkg/lease/lease.go` of flannel).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Map, Value, json};
use tortie_api::kubernetes::{FlannelBackend, FlannelLease};
use tortie_api::net::{MacAddress, overlap};

use crate::config::with_small_keys;

/// The subnets of a node: IPv4, and IPv6 if flannel has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subnets {
    /// The IPv4 subnet.
    pub v4: Ipv4Net,
    /// The IPv6 subnet.
    pub v6: Option<Ipv6Net>,
}

impl Subnets {
    /// The name of their key: `10.5.34.0-24`, or with IPv6 `10.5.34.0-24&fd00::-64`.
    #[must_use]
    pub fn key_name(&self) -> String {
        let v4 = format!("{}-{}", self.v4.addr(), self.v4.prefix_len());
        self.v6.map_or(v4.clone(), |v6| format!("{v4}&{}-{}", v6.addr(), v6.prefix_len()))
    }

    /// The subnets of a key.
    ///
    /// # Errors
    /// It is none of flannel's.
    pub fn of_key_name(name: &str) -> Result<Self, String> {
        Self::split(name, '&', '-').ok_or_else(|| "its name is no subnet such as 10.5.34.0-24".to_owned())
    }

    /// Whether they share an address with others.
    #[must_use]
    pub fn overlap(&self, others: &Self) -> bool {
        self.nets().any(|net| others.nets().any(|other| overlap(&net, &other)))
    }

    /// The subnets, IPv4 first.
    pub fn nets(&self) -> impl Iterator<Item = IpNet> + Clone {
        [Some(IpNet::V4(self.v4)), self.v6.map(IpNet::V6)].into_iter().flatten()
    }

    /// Subnets begin where their networks begin.
    fn split(text: &str, between: char, before_length: char) -> Option<Self> {
        let (v4, v6) = match text.split_once(between) {
            Some((v4, v6)) => (v4, Some(v6)),
            None => (text, None),
        };
        let net = |text: &str| {
            let (address, length) = text.split_once(before_length)?;
            let net = IpNet::new(address.parse().ok()?, length.parse().ok()?).ok()?;
            (net.trunc() == net).then_some(net)
        };
        let IpNet::V4(v4) = net(v4)? else { return None };
        let v6 = match v6.map(net) {
            None => None,
            Some(Some(IpNet::V6(v6))) => Some(v6),
            Some(_) => return None,
        };
        Some(Self { v4, v6 })
    }
}

impl fmt::Display for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nets: Vec<String> = self.nets().map(|net| net.to_string()).collect();
        f.write_str(&nets.join(","))
    }
}

impl FromStr for Subnets {
    type Err = String;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::split(text, ',', '/').ok_or_else(|| format!("{text} is no subnet such as 10.5.34.0/24"))
    }
}

/// What a node writes about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Its own address.
    pub public_ip: Ipv4Addr,
    /// Its own IPv6 address.
    pub public_ipv6: Option<Ipv6Addr>,
    /// The way to its pods.
    pub tunnel: Tunnel,
}

/// The way to a node's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tunnel {
    /// Not known yet: the network of a Windows node, which has the MAC address, is made from the subnet. Others read such a key as
    /// a reservation.
    Pending,
    /// The node itself.
    HostGw,
    /// VXLAN.
    Vxlan {
        /// The VXLAN network identifier.
        vni: u32,
        /// The MAC addresses of the node's VXLAN devices, IPv4 first.
        macs: [MacAddress; 2],
    },
}

impl Attributes {
    /// The value of the key, as flanneld writes it.
    #[must_use]
    pub fn value(&self) -> String {
        let Self { public_ip, public_ipv6, tunnel } = self;
        let mut value =
            json!({"PublicIP": public_ip.to_string(), "PublicIPv6": public_ipv6.map(|ip| ip.to_string())});
        match tunnel {
            Tunnel::Pending => {}
            Tunnel::HostGw => value["BackendType"] = json!("host-gw"),
            Tunnel::Vxlan { vni, macs: [mac, mac_v6] } => {
                value["BackendType"] = json!("vxlan");
                value["BackendData"] = json!({"VNI": vni, "VtepMAC": mac.to_string()});
                if public_ipv6.is_some() {
                    value["BackendV6Data"] = json!({"VNI": vni, "VtepMAC": mac_v6.to_string()});
                }
            }
        }
        value.to_string()
    }

    /// The leases that others read in the key of a node with these subnets.
    #[must_use]
    pub fn leases(&self, subnets: &Subnets) -> Vec<FlannelLease> {
        match self.tunnel {
            Tunnel::Pending => Vec::new(),
            Tunnel::HostGw | Tunnel::Vxlan { .. } => self.own(subnets),
        }
    }

    /// The leases as the node itself knows them: the subnets are its own before it has a tunnel.
    #[must_use]
    pub fn own(&self, subnets: &Subnets) -> Vec<FlannelLease> {
        let addresses =
            [Some(IpAddr::V4(self.public_ip)), self.public_ipv6.map(IpAddr::V6)].into_iter().flatten();
        let backends = match self.tunnel {
            Tunnel::Pending => [FlannelBackend::Unreadable, FlannelBackend::Unreadable],
            Tunnel::HostGw => [FlannelBackend::HostGw, FlannelBackend::HostGw],
            Tunnel::Vxlan { vni, macs } => macs.map(|mac| FlannelBackend::Vxlan { vni, mac }),
        };
        let leases = subnets.nets().zip(addresses).zip(backends);
        leases.map(|((subnet, public_ip), backend)| FlannelLease { subnet, public_ip, backend }).collect()
    }
}

/// The node that a key belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its own address.
    pub public_ip: Ipv4Addr,
    /// The way to its pods, of each family. None if the subnet is only reserved: an administrator has done that, or the network of a
    /// Windows node is not made yet.
    pub leases: Vec<FlannelLease>,
}

impl Holder {
    /// Reads the value of a key.
    ///
    /// # Errors
    /// It is none of flannel's. The text names the field.
    pub fn of_value(subnets: &Subnets, value: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(value).map_err(|error| format!("it is no JSON: {error}"))?;
        let Value::Object(fields) = with_small_keys(value) else {
            return Err("it is no JSON object".to_owned());
        };
        let public_ip: Ipv4Addr = address(&fields, "PublicIP")?.ok_or("PublicIP is missing")?;
        let public_ipv6: Option<Ipv6Addr> = address(&fields, "PublicIPv6")?;
        let backend = fields.get("backendtype").and_then(Value::as_str).unwrap_or_default();
        if backend.is_empty() {
            return Ok(Self { public_ip, leases: Vec::new() });
        }
        let way = |data: &str| -> Result<FlannelBackend, String> {
            Ok(match backend {
                "host-gw" => FlannelBackend::HostGw,
                "vxlan" => {
                    let found = fields.get(&data.to_lowercase()).unwrap_or(&Value::Null);
                    let found = json!({"VNI": found["vni"], "VtepMAC": found["vtepmac"]}).to_string();
                    FlannelBackend::vxlan(&found).ok_or_else(|| {
                        format!("{data} has no VNI and no MAC address of a VXLAN device: {found}")
                    })?
                }
                other => FlannelBackend::Other(other.to_owned()),
            })
        };
        let mut leases = vec![FlannelLease {
            subnet: subnets.v4.into(),
            public_ip: public_ip.into(),
            backend: way("BackendData")?,
        }];
        if let Some(v6) = subnets.v6 {
            let public_ip = public_ipv6.ok_or("PublicIPv6 is missing, and the key has an IPv6 subnet")?;
            leases.push(FlannelLease {
                subnet: v6.into(),
                public_ip: public_ip.into(),
                backend: way("BackendV6Data")?,
            });
        }
        Ok(Self { public_ip, leases })
    }
}

/// The address in a field, which only a node can have.
fn address<A: FromStr + Into<IpAddr> + Copy>(
    fields: &Map<String, Value>,
    name: &str,
) -> Result<Option<A>, String> {
    let text = match fields.get(&name.to_lowercase()) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text,
        Some(other) => return Err(format!("{name} is {other}, and no address")),
    };
    let read: Option<A> = text.parse().ok().filter(|read: &A| FlannelLease::is_of_a_node((*read).into()));
    read.map(Some).ok_or_else(|| format!("{name} is {text}, which is no address of a node"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: [MacAddress; 2] = [MacAddress([0x66, 1, 2, 3, 4, 5]), MacAddress([0x66, 1, 2, 3, 4, 6])];

    #[test]
    fn keys_are_those_of_flanneld() {
        for (name, shown) in [
            ("10.5.34.0-24", "10.5.34.0/24"),
            ("10.5.34.0-24&fd00:1::-64", "10.5.34.0/24,fd00:1::/64"),
            ("10.5.0.4-30&fd00::4-126", "10.5.0.4/30,fd00::4/126"),
        ] {
            let subnets = Subnets::of_key_name(name).unwrap();
            assert_eq!((subnets.key_name().as_str(), subnets.to_string().as_str()), (name, shown));
            assert_eq!(shown.parse(), Ok(subnets));
        }
        for name in [
            "",
            "config",
            "10.5.34.0",
            "10.5.34.0/24",
            "10.5.34.7-24",
            "10.5.34.0-33",
            "fd00::-64",
            "10.5.34.0-24&",
            "10.5.34.0-24&10.6.0.0-24",
            "fd00::-64&10.5.34.0-24",
            "10.5.34.0-24&fd00::1-64",
            "10.5.34.0-24/x",
        ] {
            assert!(Subnets::of_key_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn subnets_overlap_if_one_family_does() {
        let of = |name: &str| Subnets::of_key_name(name).unwrap();
        for (one, other, expected) in [
            ("10.5.34.0-24", "10.5.34.0-24", true),
            ("10.5.34.0-24", "10.5.35.0-24", false),
            ("10.5.32.0-20", "10.5.35.0-24", true),
            ("10.5.34.0-24&fd00:1::-64", "10.5.35.0-24&fd00:1::-64", true),
            ("10.5.34.0-24&fd00:1::-64", "10.5.35.0-24&fd00:2::-64", false),
            ("10.5.34.0-24&fd00:1::-64", "10.5.34.0-24", true),
        ] {
            assert_eq!(of(one).overlap(&of(other)), expected, "{one} {other}");
            assert_eq!(of(other).overlap(&of(one)), expected, "{one} {other}");
        }
    }

    /// The texts are those of flanneld 0.27 but for the order of fields.
    #[test]
    fn values_are_those_of_flanneld() {
        let (public_ip, public_ipv6) = ("192.0.2.7".parse().unwrap(), Some("2001:db8::7".parse().unwrap()));
        let vxlan = Tunnel::Vxlan { vni: 1, macs: MACS };
        let (v4, both) = ("10.5.34.0-24", "10.5.34.0-24&fd00:1::-64");
        let data = r#"{"VNI":1,"VtepMAC":"66:01:02:03:04:05"}"#;
        let data_v6 = r#"{"VNI":1,"VtepMAC":"66:01:02:03:04:06"}"#;
        for (tunnel, public_ipv6, name, text) in [
            (Tunnel::Pending, None, v4, r#"{"PublicIP":"192.0.2.7","PublicIPv6":null}"#.to_owned()),
            (
                Tunnel::HostGw,
                None,
                v4,
                r#"{"PublicIP":"192.0.2.7","PublicIPv6":null,"BackendType":"host-gw"}"#.to_owned(),
            ),
            (
                vxlan,
                None,
                v4,
                format!(
                    r#"{{"PublicIP":"192.0.2.7","PublicIPv6":null,"BackendType":"vxlan","BackendData":{data}}}"#
                ),
            ),
            (
                vxlan,
                public_ipv6,
                both,
                format!(
                    r#"{{"PublicIP":"192.0.2.7","PublicIPv6":"2001:db8::7","BackendType":"vxlan","BackendData":{data},"BackendV6Data":{data_v6}}}"#
                ),
            ),
        ] {
            let attributes = Attributes { public_ip, public_ipv6, tunnel };
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!(json(&attributes.value()), json(&text));
            let subnets = Subnets::of_key_name(name).unwrap();
            let read = Holder::of_value(&subnets, &text).unwrap();
            assert_eq!(read, Holder { public_ip, leases: attributes.leases(&subnets) });
            let is_pending = tunnel == Tunnel::Pending;
            assert_eq!(read.leases.len(), if is_pending { 0 } else { subnets.nets().count() });
            // flannel ignores the case of names.
            assert_eq!(Holder::of_value(&subnets, &text.replace("PublicIP", "publicip")), Ok(read));
        }
    }

    #[test]
    fn a_value_that_is_damaged_names_the_field() {
        let (v4, both) = ("10.5.34.0-24", "10.5.34.0-24&fd00:1::-64");
        for (name, value, expected) in [
            (v4, json!("text"), Err("no JSON object")),
            (v4, json!({}), Err("PublicIP is missing")),
            (v4, json!({"PublicIP": 7}), Err("PublicIP is 7")),
            (v4, json!({"PublicIP": "127.0.0.1"}), Err("PublicIP is 127.0.0.1")),
            (v4, json!({"PublicIP": "192.0.2.7"}), Ok(vec![])),
            (
                v4,
                json!({"PublicIP": "192.0.2.7", "BackendType": "udp"}),
                Ok(vec![FlannelBackend::Other("udp".to_owned())]),
            ),
            (v4, json!({"PublicIP": "192.0.2.7", "BackendType": "vxlan"}), Err("BackendData has no VNI")),
            (
                v4,
                json!({"PublicIP": "192.0.2.7", "BackendType": "vxlan", "BackendData": {"VNI": 1, "VtepMAC": ""}}),
                Err("BackendData has no VNI"),
            ),
            (both, json!({"PublicIP": "192.0.2.7", "BackendType": "host-gw"}), Err("PublicIPv6 is missing")),
        ] {
            let read = Holder::of_value(&Subnets::of_key_name(name).unwrap(), &value.to_string());
            let read =
                read.map(|holder| holder.leases.into_iter().map(|lease| lease.backend).collect::<Vec<_>>());
            match (read, expected) {
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                (read, expected) => assert_eq!(read, expected.map_err(str::to_owned), "{value}"),
            }
        }
        assert!(Holder::of_value(&Subnets::of_key_name(v4).unwrap(), "{").unwrap_err().contains("no JSON"));
    }
}
