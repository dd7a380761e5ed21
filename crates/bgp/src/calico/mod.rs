//! The configuration of a node's speaker from Calico's resources, as Calico's confd derives BIRD's
//! (`confd/pkg/backends/calico`, `node/filesystem/etc/calico/confd/templates`).
//!
//! What cannot be done is a [`Problem`]. A peer that could not be protected or filtered as its resource says gets no
//! session, or no routes.

mod forwarding;
mod peers;
mod policy;
mod selections;
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::calico::{
    BgpConfiguration, BgpConfigurationSpec, BgpFilter, BgpPassword, BgpPeer, IpPool, SecretKey,
};
use tortie_api::kubernetes::Node;

pub use self::forwarding::{Forwarding, NotForwarded, forwarding, goes_by_bgp};
pub use self::services::{Name, ServiceRoutes, ServiceSettings};

use crate::codec::Attributes;
use crate::rib::OwnRoute;
use crate::speaker::{Config, Password, PeerConfig};

/// The number of autonomous systems without one of their own.
const DEFAULT_AS: u32 = 64512;
const DEFAULT_PORT: u16 = BgpConfigurationSpec::PORT;
/// The annotations of a Node with what Calico keeps in its own Node (`libcalico-go/lib/backend/k8s/resources/node.go`).
const CLUSTER_ID: &str = "projectcalico.org/RouteReflectorClusterID";

/// The resources that a speaker depends on.
pub struct Resources<'a> {
    /// All nodes.
    pub nodes: &'a [Node],
    /// All BGPConfigurations.
    pub configurations: &'a [BgpConfiguration],
    /// All BGPPeers.
    pub peers: &'a [BgpPeer],
    /// All BGPFilters.
    pub filters: &'a [BgpFilter],
    /// All pools.
    pub pools: &'a [IpPool],
    /// The blocks of the node.
    pub blocks: &'a [IpNet],
    /// The blocks of all nodes that are in no pool, and whose they are.
    pub stray_blocks: &'a [(IpNet, String)],
    /// The addresses of the node's pods.
    pub pods: &'a [PodAddress],
    /// The addresses of Services that the node advertises one by one ([`ServiceRoutes::addresses`]).
    pub service_addresses: &'a BTreeSet<IpNet>,
    /// The value of a key of a Secret in the namespace of the agents.
    pub secret: &'a dyn Fn(&SecretKey) -> Result<Vec<u8>, NoSecret>,
}

/// An address of a pod on this node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodAddress {
    /// The address.
    pub address: IpAddr,
    /// The host end of the pod's link.
    pub interface: String,
}

/// Why a key of a Secret has no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoSecret {
    /// There is no such Secret or key, which a reference may allow. The text says what is missing.
    Absent(String),
    /// It is unknown whether there is one, and why.
    Unreadable(String),
}

/// Something that a resource asks for and that does not happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The resource.
    pub about: String,
    /// What is wrong, and the consequence.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.about, self.message)
    }
}

/// What the speaker of a node does.
#[derive(Debug)]
pub struct Derived {
    /// Its configuration; `None` if the node has no address, or is unknown.
    pub config: Option<Config>,
    /// The routes that it advertises: the node's blocks, addresses that its pods have of other nodes' blocks, networks and
    /// addresses of Services.
    pub own: BTreeMap<IpNet, OwnRoute>,
    /// The blocks for whose unused addresses the kernel drops packets. Blocks of one address are in use.
    pub blackholes: Vec<IpNet>,
    /// What does not happen.
    pub problems: Vec<Problem>,
}

/// A node, as BGP sees it.
#[derive(Debug)]
struct BgpNode<'a> {
    name: &'a str,
    labels: &'a BTreeMap<String, String>,
    ipv4: Option<Ipv4Addr>,
    ipv6: Option<Ipv6Addr>,
    as_number: u32,
    cluster_id: Option<&'a str>,
    port: u16,
    takes_plain_packets: bool,
}

impl BgpNode<'_> {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// Its address in the family of another.
    fn address_like(&self, other: IpAddr) -> Option<IpAddr> {
        self.addresses().find(|address| address.is_ipv4() == other.is_ipv4())
    }
}

/// The settings for all nodes, with those for one.
struct Settings<'a> {
    all: BgpConfigurationSpec,
    of_nodes: BTreeMap<&'a str, &'a BgpConfigurationSpec>,
}

impl<'a> Settings<'a> {
    fn new(configurations: &'a [BgpConfiguration]) -> Self {
        let named =
            |name: &str| configurations.iter().find(|c| c.metadata.name == name).map(|c| c.spec.clone());
        let of_node = |c: &'a BgpConfiguration| Some((c.metadata.name.strip_prefix("node.")?, &c.spec));
        let of_nodes = configurations.iter().filter_map(of_node).collect();
        Self { all: named("default").unwrap_or_default(), of_nodes }
    }

    fn port(&self, node: &str) -> u16 {
        let own = self.of_nodes.get(node).and_then(|spec| spec.listen_port);
        // In Calico, 0 counts as absent.
        let given = |port: Option<u16>| port.filter(|port| *port > 0);
        given(own).or(given(self.all.listen_port)).unwrap_or(DEFAULT_PORT)
    }

    fn binds_to_node(&self, node: &str) -> bool {
        let own = self.of_nodes.get(node).and_then(|spec| spec.bind_mode.as_deref());
        own.or(self.all.bind_mode.as_deref()) == Some("NodeIP")
    }
}

/// Derives the configuration of a node.
#[must_use]
pub fn derive(node: &str, resources: &Resources<'_>) -> Derived {
    let settings = Settings::new(resources.configurations);
    let mut problems = Vec::new();
    let default_as = settings.all.as_number.as_ref().and_then(as_number).unwrap_or(DEFAULT_AS);
    let members: Vec<BgpNode<'_>> =
        resources.nodes.iter().map(|node| member(node, default_as, &settings, &mut problems)).collect();
    let own = advertised(node, resources, &settings.all);
    let has_room = |block: &&IpNet| block.prefix_len() < block.max_prefix_len();
    let blackholes: Vec<IpNet> = resources.blocks.iter().filter(has_room).copied().collect();
    let Some(me) = members.iter().find(|member| member.name == node) else {
        return Derived { config: None, own, blackholes, problems };
    };
    let Some(identifier) = identifier(me) else {
        let message = "it has no address for BGP, so it has no sessions".to_owned();
        problems.push(Problem { about: format!("Node {node}"), message });
        return Derived { config: None, own, blackholes, problems };
    };
    let bind: Vec<IpAddr> = if settings.binds_to_node(node) {
        me.addresses().collect()
    } else {
        vec![IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)]
    };
    let mut derivation = peers::Derivation::new(me, &members, identifier, resources, &settings);
    derivation.explicit();
    derivation.mesh();
    let (peers, found) = derivation.finish();
    problems.extend(found);
    let has_mesh = settings.all.node_to_node_mesh_enabled != Some(false);
    problems.extend(selections::without_session(me, &members, has_mesh, &peers));
    problems.extend(selections::of_peers(me, &members, resources.peers));
    let listen = bind.into_iter().map(|address| SocketAddr::new(address, me.port)).collect();
    Derived { config: Some(Config { identifier, listen, peers }), own, blackholes, problems }
}

fn member<'a>(
    node: &'a Node,
    default_as: u32,
    settings: &Settings<'_>,
    problems: &mut Vec<Problem>,
) -> BgpNode<'a> {
    let metadata = &node.metadata;
    let annotation =
        |name: &str| metadata.annotations.get(name).map(String::as_str).filter(|text| !text.is_empty());
    let number = annotation(Node::AS_NUMBER).map(|text| as_number(&Value::from(text)));
    if number == Some(None) {
        let message = format!("its annotation {} is no AS number, and counts as absent", Node::AS_NUMBER);
        problems.push(Problem { about: format!("Node {}", metadata.name), message });
    }
    BgpNode {
        name: &metadata.name,
        labels: &metadata.labels,
        ipv4: node.address(),
        ipv6: node.address_v6(),
        as_number: number.flatten().unwrap_or(default_as),
        cluster_id: annotation(CLUSTER_ID),
        port: settings.port(&metadata.name),
        takes_plain_packets: node.takes_plain_packets(),
    }
}

/// The router id: the IPv4 address, or, as in Calico without one, a hash of the name.
fn identifier(me: &BgpNode<'_>) -> Option<Ipv4Addr> {
    me.ipv4.or_else(|| {
        me.ipv6?;
        // FNV-1a. The highest bit is clear, so that it is no multicast address, and it is never zero.
        let hash = me
            .name
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        Some(Ipv4Addr::from(hash & 0x7fff_ffff | 1))
    })
}

/// The label of nodes to which load balancers should not send packets: they advertise no Services.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// The prefixes that the node advertises.
fn advertised(
    node: &str,
    resources: &Resources<'_>,
    all: &BgpConfigurationSpec,
) -> BTreeMap<IpNet, OwnRoute> {
    let route = |prefix: IpNet, interface: Option<&str>| {
        let priority = if prefix.addr().is_ipv4() {
            all.ipv4_normal_route_priority
        } else {
            all.ipv6_normal_route_priority
        };
        let here = OwnRoute::here();
        let attributes = Attributes {
            local_pref: Some(policy::normal_preference(priority)),
            ..Attributes::clone(&here.attributes)
        };
        (prefix, OwnRoute { attributes: Arc::new(attributes), interface: interface.map(Arc::from) })
    };
    let mut own: BTreeMap<IpNet, OwnRoute> =
        resources.blocks.iter().map(|block| route(*block, None)).collect();
    own.extend(borrowed(resources).map(|pod| route(IpNet::from(pod.address), Some(&pod.interface))));
    let is_excluded = |it: &&Node| it.metadata.name == node && it.metadata.labels.contains_key(EXCLUDED);
    if !resources.nodes.iter().any(|it| is_excluded(&it)) {
        let networks = ServiceSettings::new(all).advertised_networks();
        let addresses = resources.service_addresses.iter().copied();
        own.extend(networks.into_iter().chain(addresses).map(|prefix| route(prefix, None)));
    }
    own
}

/// The addresses of pods that are in a pool, and in no block of the node: packets must not go to the node with the block.
fn borrowed<'a>(resources: &'a Resources<'a>) -> impl Iterator<Item = &'a PodAddress> {
    let is_in_pool =
        |pod: &&PodAddress| resources.pools.iter().any(|pool| pool.spec.cidr.contains(&pod.address));
    let is_in_block = |pod: &&PodAddress| resources.blocks.iter().any(|block| block.contains(&pod.address));
    resources.pods.iter().filter(is_in_pool).filter(move |pod| !is_in_block(pod))
}

/// `64512`, `"64512"` or `"1.10"`; zero counts as absent.
fn as_number(value: &Value) -> Option<u32> {
    let number = match value {
        Value::String(text) => match text.split_once('.') {
            Some((high, low)) => {
                u32::from(high.parse::<u16>().ok()?) << 16 | u32::from(low.parse::<u16>().ok()?)
            }
            None => text.parse().ok()?,
        },
        other => u32::try_from(other.as_u64()?).ok()?,
    };
    (number > 0).then_some(number)
}

/// A time in Go's form, such as `2m30s`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|at| *at > 0)?;
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 0.001,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?;
        total = total.checked_add(part)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(total)
}

/// The longest password: the limit of Linux for TCP MD5 signatures (`TCP_MD5SIG_MAXKEYLEN`).
const MAX_PASSWORD: usize = 80;

/// The password that a field refers to. `Err` if there should be one.
fn password(
    field: &str,
    reference: Option<&BgpPassword>,
    resources: &Resources<'_>,
) -> Result<Option<Password>, String> {
    let Some(key) = reference.and_then(|password| password.secret_key_ref.as_ref()) else { return Ok(None) };
    let problem = match (resources.secret)(key) {
        Ok(value) => match usable_password(value) {
            Ok(password) => return Ok(Some(password)),
            Err(problem) => format!("key {} of the Secret {} {problem}", key.key, key.name),
        },
        Err(NoSecret::Absent(_)) if key.optional == Some(true) => return Ok(None),
        Err(NoSecret::Absent(problem) | NoSecret::Unreadable(problem)) => problem,
    };
    Err(format!("{field}.secretKeyRef: {problem}, so there is no session"))
}

/// A password that both ends can have. A line end, which `echo` adds, is part of no password: BIRD's configuration could not
/// hold it.
fn usable_password(value: Vec<u8>) -> Result<Password, String> {
    let text = String::from_utf8(value).map_err(|_| "is no text; write another password".to_owned())?;
    match text.len() {
        0 => return Err("is empty; write a password".to_owned()),
        length if length > MAX_PASSWORD => {
            return Err(format!("has {length} bytes; TCP MD5 signatures allow {MAX_PASSWORD}"));
        }
        _ => {}
    }
    if text.chars().any(char::is_control) {
        return Err("has a line end or another control character; write it without (printf instead of echo)"
            .to_owned());
    }
    Ok(Password(text))
}

/// The peers of a speaker.
type Peers = BTreeMap<SocketAddr, PeerConfig>;
