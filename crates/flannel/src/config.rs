//! flannel's configuration: `net-conf.json`, and the same document in etcd (`pkg/subnet/config.go` of flannel).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Deserialize;
use serde_json::Value;
use tortie_api::net::IpVersion;

/// What flanneld on Linux has without other values (`pkg/backend/vxlan`): its own VNI, and the kernel's port.
const DEFAULT_VNI: u32 = 1;
const KERNEL_PORT: u16 = 8472;

/// What Tortie uses of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConf {
    /// How packets travel between nodes.
    pub backend: Backend,
    /// The networks, at most one of each family, IPv4 first.
    pub networks: Vec<FlannelNetwork>,
}

/// How packets travel between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// `vxlan`.
    Vxlan {
        /// The VXLAN network identifier.
        vni: u32,
        /// The UDP port.
        port: u16,
    },
    /// `host-gw`: by way of the nodes.
    HostGw,
}

/// A network of flannel, which the nodes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlannelNetwork {
    /// The network.
    pub cidr: IpNet,
    subnet_len: u8,
    min: Option<IpAddr>,
    max: Option<IpAddr>,
}

/// The subnets that nodes can have: each from `min` to `max`, in addresses as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubnetRange {
    version: IpVersion,
    network: IpNet,
    len: u8,
    min: u128,
    max: u128,
}

impl NetConf {
    /// Reads the document.
    ///
    /// # Errors
    /// It is damaged, or is for something that Tortie does not know. The text names the field and the remedy.
    pub fn parse(text: &str) -> Result<Self, String> {
        let read =
            serde_json::from_str(text).map(with_small_keys).and_then(serde_json::from_value::<Document>);
        let read = read.map_err(|error| error.to_string())?;
        let is_vxlan = match read.backend.r#type.as_ref().map(|name| name.to_lowercase()).as_deref() {
            Some("vxlan") => true,
            Some("host-gw") => false,
            other => {
                let other = other.unwrap_or("udp");
                return Err(format!("the backend is {other}, and Tortie knows vxlan and host-gw"));
            }
        };
        if read.backend.direct_routing {
            return Err("DirectRouting is true, which Tortie's agents cannot see; set it to false, and restart flannel's pods first".to_owned());
        }
        let mut networks = Vec::new();
        if read.enable_ipv4 {
            networks.push(FlannelNetwork {
                cidr: read.network.ok_or("Network is missing")?.trunc().into(),
                subnet_len: read.subnet_len,
                min: read.subnet_min.filter(|min| !min.is_unspecified()).map(IpAddr::from),
                max: read.subnet_max.filter(|max| !max.is_unspecified()).map(IpAddr::from),
            });
        }
        if read.enable_ipv6 {
            networks.push(FlannelNetwork {
                cidr: read.ipv6_network.ok_or("IPv6Network is missing")?.trunc().into(),
                subnet_len: read.ipv6_subnet_len,
                min: read.ipv6_subnet_min.filter(|min| !min.is_unspecified()).map(IpAddr::from),
                max: read.ipv6_subnet_max.filter(|max| !max.is_unspecified()).map(IpAddr::from),
            });
        }
        if networks.is_empty() {
            return Err("it enables neither IPv4 nor IPv6".to_owned());
        }
        let port = read.backend.port.filter(|port| *port != 0).unwrap_or(KERNEL_PORT);
        let vxlan = Backend::Vxlan { vni: read.backend.vni.unwrap_or(DEFAULT_VNI), port };
        Ok(Self { backend: if is_vxlan { vxlan } else { Backend::HostGw }, networks })
    }
}

impl FlannelNetwork {
    /// The subnets that nodes can have, as flanneld without `--kube-subnet-mgr` computes them.
    ///
    /// # Errors
    /// The fields of the configuration contradict each other. The text names the field.
    pub fn range(&self) -> Result<SubnetRange, String> {
        let (version, prefix) = (IpVersion::of(&self.cidr.addr()), self.cidr.prefix_len());
        let width = self.cidr.max_prefix_len();
        let (field, usual, smallest) = match version {
            IpVersion::V4 => ("", 24, 28),
            IpVersion::V6 => ("IPv6", 64, 124),
        };
        let network = self.cidr;
        let len = match self.subnet_len {
            0 if prefix > smallest => {
                return Err(format!("{field}Network {network} is too small: /{smallest} is the smallest"));
            }
            0 if prefix + 2 <= usual => usual,
            0 => prefix + 2,
            len if len > width - 2 => {
                return Err(format!("{field}SubnetLen is {len}, and must be at most {}", width - 2));
            }
            len if len < prefix + 2 => {
                return Err(format!(
                    "{field}SubnetLen is {len}, and {field}Network {network} must have room for at least four subnets"
                ));
            }
            len => len,
        };
        let size = 1_u128 << (width - len);
        let end = |name: &str, given: Option<IpAddr>, default: u128| {
            let Some(given) = given else { return Ok(default) };
            let number = number(given);
            match (network.contains(&given), number.is_multiple_of(size)) {
                (false, _) => Err(format!("{field}Subnet{name} {given} is not in {field}Network {network}")),
                (true, false) => {
                    Err(format!("{field}Subnet{name} {given} does not begin a subnet of length {len}"))
                }
                (true, true) => Ok(number),
            }
        };
        let min = end("Min", self.min, number(network.network()) + size)?;
        let max = end("Max", self.max, number(network.broadcast()) - (size - 1))?;
        Ok(SubnetRange { version, network, len, min, max })
    }
}

impl SubnetRange {
    /// Whether a node can have the subnet.
    #[must_use]
    pub fn contains(&self, subnet: &IpNet) -> bool {
        let first = number(subnet.network());
        IpVersion::of(&subnet.addr()) == self.version
            && subnet.prefix_len() == self.len
            && (self.min..=self.max).contains(&first)
    }

    /// Whether the subnet is one of the network, of the length that all have: outside of `min` to `max` there may be some of former
    /// times.
    ///
    /// # Errors
    /// It is none. The text has the network and the length.
    pub(crate) fn fit(&self, subnet: &IpNet) -> Result<(), String> {
        if self.network.contains(subnet) && subnet.prefix_len() == self.len {
            return Ok(());
        }
        Err(format!("{subnet} is no subnet of flannel's network {} with length {}", self.network, self.len))
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.version == IpVersion::V6
    }

    /// The subnets that overlap none of these networks, in ascending order. What lies in a taken network is skipped at once, however much
    /// that is.
    pub fn free<'a>(&'a self, taken: &'a BTreeSet<IpNet>) -> impl Iterator<Item = IpNet> + 'a {
        let mut next = Some(self.min);
        std::iter::from_fn(move || {
            loop {
                let subnet = self.subnet(next.filter(|first| *first <= self.max)?)?;
                let overlap = |taken: &&IpNet| taken.contains(&subnet) || subnet.contains(*taken);
                let taken = taken.iter().filter(overlap).map(|taken| number(taken.broadcast())).max();
                next = number(subnet.broadcast()).max(taken.unwrap_or_default()).checked_add(1);
                if taken.is_none() {
                    return Some(subnet);
                }
            }
        })
    }

    /// The subnet that begins with the address of this number.
    fn subnet(&self, first: u128) -> Option<IpNet> {
        let address = match self.version {
            IpVersion::V4 => Ipv4Addr::from_bits(u32::try_from(first).ok()?).into(),
            IpVersion::V6 => Ipv6Addr::from_bits(first).into(),
        };
        IpNet::new(address, self.len).ok()
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The document, with keys in small letters, because flannel ignores their case.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
struct Document {
    network: Option<Ipv4Net>,
    #[serde(rename = "ipv6network")]
    ipv6_network: Option<Ipv6Net>,
    #[serde(rename = "enableipv4", default = "yes")]
    enable_ipv4: bool,
    #[serde(rename = "enableipv6", default)]
    enable_ipv6: bool,
    #[serde(rename = "subnetlen", default)]
    subnet_len: u8,
    #[serde(rename = "subnetmin")]
    subnet_min: Option<Ipv4Addr>,
    #[serde(rename = "subnetmax")]
    subnet_max: Option<Ipv4Addr>,
    #[serde(rename = "ipv6subnetlen", default)]
    ipv6_subnet_len: u8,
    #[serde(rename = "ipv6subnetmin")]
    ipv6_subnet_min: Option<Ipv6Addr>,
    #[serde(rename = "ipv6subnetmax")]
    ipv6_subnet_max: Option<Ipv6Addr>,
    #[serde(default)]
    backend: BackendDocument,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BackendDocument {
    r#type: Option<String>,
    vni: Option<u32>,
    port: Option<u16>,
    #[serde(rename = "directrouting")]
    direct_routing: bool,
}

/// The same document with keys in small letters.
pub(crate) fn with_small_keys(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            map.into_iter().map(|(key, value)| (key.to_lowercase(), with_small_keys(value))).collect()
        }
        other => other,
    }
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The subnets of each network: first, last, and how many there are, up to a limit.
    fn ranges(document: &Value) -> Result<Vec<String>, String> {
        let conf = NetConf::parse(&document.to_string())?;
        let ranges = conf.networks.iter().map(|network| {
            let range = network.range()?;
            let subnets: Vec<IpNet> = range.free(&BTreeSet::new()).take(1_000).collect();
            assert!(subnets.iter().all(|subnet| range.contains(subnet)));
            let ends = subnets.first().zip(subnets.last());
            Ok(ends.map_or("none".to_owned(), |(first, last)| format!("{first} {last} {}", subnets.len())))
        });
        ranges.collect()
    }

    /// A key of somebody else, whose network has more subnets than anybody can count, must not keep an agent from its start.
    #[test]
    fn what_lies_in_a_taken_network_is_skipped_at_once() {
        let conf = json!({"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00::/8", "Backend": {"Type": "host-gw"}});
        let conf = NetConf::parse(&conf.to_string()).unwrap();
        let [v4, v6] = [0, 1].map(|index| conf.networks[index].range().unwrap());
        for (range, taken, expected) in [
            (&v6, &["fd00::/8"][..], &[][..]),
            (&v6, &["fd00::/9"], &["fd80::/64", "fd80:0:0:1::/64"]),
            (
                &v6,
                &["fd00::/9", "fd80::/65", "fd80:0:0:1:8000::/65"],
                &["fd80:0:0:2::/64", "fd80:0:0:3::/64"],
            ),
            (&v4, &["fd00::/8", "10.5.0.0/17"], &["10.5.128.0/24", "10.5.129.0/24"]),
            (&v4, &["10.5.1.0/24", "10.5.3.128/32"], &["10.5.2.0/24", "10.5.4.0/24"]),
            (&v4, &["0.0.0.0/0"], &[]),
        ] {
            let nets = taken.iter().map(|net| net.parse().unwrap()).collect();
            let free: Vec<String> = range.free(&nets).take(2).map(|net| net.to_string()).collect();
            assert_eq!(free, expected, "{taken:?}");
        }
    }

    /// The rules of `CheckNetworkConfig`.
    #[test]
    fn the_subnets_are_those_of_flanneld() {
        let vxlan = json!({"Type": "vxlan"});
        let conf = |fields: Value| {
            let mut conf = json!({"Network": "10.5.0.0/16", "Backend": vxlan});
            conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            conf
        };
        let dual = |fields: Value| {
            let mut dual = conf(json!({"EnableIPv6": true, "IPv6Network": "fd00::/48"}));
            dual.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            dual
        };
        for (document, expected) in [
            (conf(json!({})), Ok(&["10.5.1.0/24 10.5.255.0/24 255"][..])),
            (conf(json!({"Network": "10.5.7.7/16"})), Ok(&["10.5.1.0/24 10.5.255.0/24 255"])),
            (conf(json!({"Network": "10.5.0.0/23"})), Ok(&["10.5.0.128/25 10.5.1.128/25 3"])),
            (conf(json!({"Network": "10.5.0.0/28"})), Ok(&["10.5.0.4/30 10.5.0.12/30 3"])),
            (conf(json!({"Network": "10.5.0.0/29"})), Err("Network 10.5.0.0/29 is too small")),
            (conf(json!({"subnetlen": 20})), Ok(&["10.5.16.0/20 10.5.240.0/20 15"])),
            (conf(json!({"SubnetLen": 17})), Err("SubnetLen is 17")),
            (conf(json!({"SubnetLen": 31})), Err("SubnetLen is 31")),
            (
                conf(json!({"SubnetMin": "10.5.10.0", "SubnetMax": "10.5.12.0"})),
                Ok(&["10.5.10.0/24 10.5.12.0/24 3"]),
            ),
            (conf(json!({"SubnetMin": "10.5.12.0", "SubnetMax": "10.5.10.0"})), Ok(&["none"])),
            (conf(json!({"SubnetMin": "10.6.0.0"})), Err("SubnetMin 10.6.0.0 is not in Network")),
            (conf(json!({"SubnetMax": "10.5.10.1"})), Err("SubnetMax 10.5.10.1 does not begin a subnet")),
            (
                dual(json!({})),
                Ok(&["10.5.1.0/24 10.5.255.0/24 255", "fd00:0:0:1::/64 fd00:0:0:3e8::/64 1000"]),
            ),
            (
                dual(json!({"IPv6SubnetLen": 50})),
                Ok(&["10.5.1.0/24 10.5.255.0/24 255", "fd00:0:0:4000::/50 fd00:0:0:c000::/50 3"]),
            ),
            (dual(json!({"IPv6SubnetLen": 127})), Err("IPv6SubnetLen is 127")),
            (dual(json!({"IPv6SubnetMin": "fd01::"})), Err("IPv6SubnetMin fd01:: is not in IPv6Network")),
            (
                dual(json!({"IPv6Network": "::/0", "IPv6SubnetLen": 2})),
                Ok(&["10.5.1.0/24 10.5.255.0/24 255", "4000::/2 c000::/2 3"]),
            ),
            (
                dual(json!({"Network": "0.0.0.0/0", "SubnetLen": 2, "EnableIPv6": false})),
                Ok(&["64.0.0.0/2 192.0.0.0/2 3"]),
            ),
        ] {
            match (ranges(&document), expected) {
                (Ok(ranges), Ok(expected)) => assert_eq!(ranges, expected, "{document}"),
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                (ranges, _) => panic!("{document}: {ranges:?}"),
            }
        }
    }
}
