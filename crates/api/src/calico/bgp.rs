//! Calico's BGP kinds (`api/pkg/apis/projectcalico/v3/bgppeer.go`, `bgpconfig.go`, `bgpfilter.go`). They configure
//! the BGP speakers of nodes, Calico's and Tortie's.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_selector::Selector;

use super::Switch;
use crate::fields::{is_object_name, list, selector};
use crate::{FieldError, Metadata};

/// The maximum of the priority of a route.
const MAX_PRIORITY: u32 = i32::MAX as u32 - 1;

/// A BGP peer, and the nodes that connect to it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct BgpPeer {
    /// Its name.
    pub metadata: Metadata,
    /// Its content.
    #[serde(default)]
    pub spec: BgpPeerSpec,
}

/// The content of a peer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are Calico's")]
pub struct BgpPeerSpec {
    pub node: String,
    #[serde(deserialize_with = "selector")]
    pub node_selector: Option<Selector>,
    #[serde(rename = "peerIP")]
    pub peer_ip: Option<String>,
    #[serde(deserialize_with = "selector")]
    pub peer_selector: Option<Selector>,
    #[serde(deserialize_with = "selector")]
    pub local_workload_selector: Option<Selector>,
    pub as_number: Option<Value>,
    #[serde(rename = "localASNumber")]
    pub local_as_number: Option<Value>,
    pub keep_original_next_hop: Option<bool>,
    pub next_hop_mode: Option<String>,
    pub password: Option<BgpPassword>,
    pub source_address: Option<String>,
    pub max_restart_time: Option<String>,
    pub keepalive_time: Option<String>,
    #[serde(rename = "numAllowedLocalASNumbers")]
    pub num_allowed_local_as_numbers: Option<i32>,
    pub ttl_security: Option<u8>,
    pub reachable_by: Option<String>,
    #[serde(deserialize_with = "list")]
    pub filters: Vec<String>,
    pub reverse_peering: Option<String>,
}

/// The settings of BGP: `default` for all nodes, `node.NAME` for one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct BgpConfiguration {
    /// Its name.
    pub metadata: Metadata,
    /// The settings.
    #[serde(default)]
    pub spec: BgpConfigurationSpec,
}

/// The settings of BGP.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are Calico's")]
pub struct BgpConfigurationSpec {
    pub log_severity_screen: Option<String>,
    pub node_to_node_mesh_enabled: Option<bool>,
    pub as_number: Option<Value>,
    #[serde(rename = "serviceLoadBalancerIPs", deserialize_with = "list")]
    pub service_load_balancer_ips: Vec<ServiceBlock>,
    #[serde(rename = "serviceExternalIPs", deserialize_with = "list")]
    pub service_external_ips: Vec<ServiceBlock>,
    #[serde(rename = "serviceClusterIPs", deserialize_with = "list")]
    pub service_cluster_ips: Vec<ServiceBlock>,
    pub service_load_balancer_aggregation: Option<Switch>,
    #[serde(deserialize_with = "list")]
    pub communities: Vec<Community>,
    #[serde(deserialize_with = "list")]
    pub prefix_advertisements: Vec<PrefixAdvertisement>,
    pub listen_port: Option<u16>,
    pub node_mesh_password: Option<BgpPassword>,
    pub node_mesh_max_restart_time: Option<String>,
    pub bind_mode: Option<String>,
    #[serde(deserialize_with = "list")]
    pub ignored_interfaces: Vec<String>,
    #[serde(rename = "localWorkloadPeeringIPV4")]
    pub local_workload_peering_ip_v4: Option<String>,
    #[serde(rename = "localWorkloadPeeringIPV6")]
    pub local_workload_peering_ip_v6: Option<String>,
    pub program_cluster_routes: Option<String>,
    #[serde(rename = "ipv4NormalRoutePriority")]
    pub ipv4_normal_route_priority: Option<u32>,
    #[serde(rename = "ipv6NormalRoutePriority")]
    pub ipv6_normal_route_priority: Option<u32>,
}

impl BgpConfigurationSpec {
    /// The TCP port of BGP that has been assigned (RFC 4271).
    pub const PORT: u16 = 179;

    /// The TCP ports on which the speaker of some node may listen, by the cluster's BGPConfigurations with their names. Port 179 is always
    /// one, because nodes without Tortie's speaker may have another one.
    #[must_use]
    pub fn listen_ports<'a>(all: impl Iterator<Item = (&'a str, &'a Self)>) -> BTreeSet<u16> {
        let of_nodes = all.filter(|(name, _)| *name == "default" || name.starts_with("node."));
        let ports = of_nodes.filter_map(|(_, spec)| spec.listen_port);
        ports.filter(|port| *port != 0).chain([Self::PORT]).collect()
    }
}

/// Rules for routes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct BgpFilter {
    /// Its name.
    pub metadata: Metadata,
    /// The rules.
    #[serde(default)]
    pub spec: BgpFilterSpec,
}

/// The rules of a filter.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are Calico's")]
pub struct BgpFilterSpec {
    #[serde(rename = "exportV4", deserialize_with = "list")]
    pub export_v4: Vec<BgpFilterRule>,
    #[serde(rename = "importV4", deserialize_with = "list")]
    pub import_v4: Vec<BgpFilterRule>,
    #[serde(rename = "exportV6", deserialize_with = "list")]
    pub export_v6: Vec<BgpFilterRule>,
    #[serde(rename = "importV6", deserialize_with = "list")]
    pub import_v6: Vec<BgpFilterRule>,
}

/// A rule of a filter.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are Calico's")]
pub struct BgpFilterRule {
    pub cidr: Option<String>,
    pub match_operator: Option<String>,
    pub prefix_length: Option<PrefixLength>,
    pub source: Option<String>,
    pub interface: Option<String>,
    pub peer_type: Option<String>,
    pub communities: Option<Communities>,
    #[serde(deserialize_with = "list")]
    pub as_path_prefix: Vec<u32>,
    pub priority: Option<u32>,
    pub action: String,
    #[serde(deserialize_with = "list")]
    pub operations: Vec<Operation>,
}

macro_rules! parts {
    ($($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $of:ty),+ $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(rename_all = "camelCase", default, deny_unknown_fields)]
        #[expect(missing_docs, reason = "the fields are Calico's")]
        pub struct $name { $($(#[$attribute])* pub $field: $of),+ }
    )*};
}

parts! {
    /// A secret with a password.
    BgpPassword { secret_key_ref: Option<SecretKey> }
    /// A key of a secret.
    SecretKey { key: String, name: String, optional: Option<bool> }
    /// Addresses of Services.
    ServiceBlock { cidr: Option<String> }
    /// A community with a name.
    Community { name: String, value: String }
    /// The lengths of prefixes.
    PrefixLength { min: Option<u8>, max: Option<u8> }
    /// Communities of a route.
    Communities { values: Vec<String> }
    /// A change of a route.
    Operation {
        add_community: Option<AddCommunity>,
        #[serde(rename = "prependASPath")]
        prepend_as_path: Option<PrependAsPath>,
        set_priority: Option<SetPriority>,
    }
    /// Adds a community.
    AddCommunity { value: String }
    /// Prepends numbers to the path.
    PrependAsPath { prefix: Vec<u32> }
    /// Sets the priority.
    SetPriority { value: u32 }
    /// The communities of a prefix.
    PrefixAdvertisement { cidr: String, communities: Vec<String> }
}

impl BgpPeer {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Problems::default();
        let spec = &self.spec;
        let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if !spec.node.is_empty() && !is_object_name(&spec.node) {
            problems.add("spec.node", format!("{:?} is no name of a node", spec.node));
        }
        for (index, filter) in spec.filters.iter().enumerate() {
            if !is_object_name(filter) {
                problems
                    .add(format!("spec.filters[{index}]"), format!("{filter:?} is no name of a BGPFilter"));
            }
        }
        as_number("spec.asNumber", spec.as_number.as_ref(), &mut problems);
        as_number("spec.localASNumber", spec.local_as_number.as_ref(), &mut problems);
        let peer = spec.peer_ip.as_deref().filter(|text| !text.is_empty());
        let address = peer.and_then(peer_address);
        if let Some(peer) = peer.filter(|_| address.is_none()) {
            problems.add(
                "spec.peerIP",
                format!("{peer:?} is no address; write ADDRESS, IPv4:PORT or [IPv6]:PORT"),
            );
        }
        if !spec.node.is_empty() && spec.node_selector.is_some() {
            problems.add("spec.nodeSelector", "may not stand beside node");
        }
        if spec.peer_selector.is_some() && peer.is_some() {
            problems.add("spec.peerSelector", "may not stand beside peerIP");
        }
        if spec.peer_selector.is_some() && spec.as_number.as_ref().is_some_and(|number| *number != 0) {
            problems.add("spec.asNumber", "may not stand beside peerSelector");
        }
        if spec.local_workload_selector.is_some() {
            if spec.as_number.as_ref().is_none_or(|number| *number == 0) {
                problems.add("spec.asNumber", "is required beside localWorkloadSelector");
            }
            if peer.is_some() || spec.peer_selector.is_some() {
                problems.add("spec.localWorkloadSelector", "may not stand beside peerIP and peerSelector");
            }
        }
        if spec.keep_original_next_hop == Some(true) && has(&spec.next_hop_mode) {
            problems.add("spec.nextHopMode", "may not stand beside keepOriginalNextHop");
        }
        if let Some(text) = spec.reachable_by.as_deref().filter(|text| !text.is_empty()) {
            match (text.parse::<IpAddr>(), address) {
                (Err(_), _) => problems.add("spec.reachableBy", format!("{text:?} is no address")),
                (Ok(by), Some(peer)) if by.is_ipv4() == peer.is_ipv4() => {}
                (Ok(_), _) => problems.add("spec.reachableBy", "needs a peerIP of the same family"),
            }
        }
        problems.result()
    }
}

impl BgpConfiguration {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Problems::default();
        let spec = &self.spec;
        as_number("spec.asNumber", spec.as_number.as_ref(), &mut problems);
        for (field, blocks) in [
            ("serviceLoadBalancerIPs", &spec.service_load_balancer_ips),
            ("serviceExternalIPs", &spec.service_external_ips),
            ("serviceClusterIPs", &spec.service_cluster_ips),
        ] {
            for (index, block) in blocks.iter().enumerate() {
                let cidr = block.cidr.as_deref().filter(|cidr| !cidr.is_empty());
                if let Some(cidr) = cidr.filter(|cidr| network(cidr).is_none()) {
                    problems.add(format!("spec.{field}[{index}].cidr"), not_a_network(cidr));
                }
            }
        }
        self.communities(&mut problems);
        for (index, name) in spec.ignored_interfaces.iter().enumerate() {
            if name.is_empty() || !is_interface(name) {
                let problem = format!("{name:?} is no name of an interface");
                problems.add(format!("spec.ignoredInterfaces[{index}]"), problem);
            }
        }
        for (field, text, is_v4) in [
            ("localWorkloadPeeringIPV4", &spec.local_workload_peering_ip_v4, true),
            ("localWorkloadPeeringIPV6", &spec.local_workload_peering_ip_v6, false),
        ] {
            let Some(text) = text.as_deref().filter(|text| !text.is_empty()) else { continue };
            let family = text.parse::<IpAddr>().ok().map(|address| address.to_canonical().is_ipv4());
            if family != Some(is_v4) {
                let family = if is_v4 { "IPv4" } else { "IPv6" };
                problems.add(format!("spec.{field}"), format!("{text:?} is no {family} address"));
            }
        }
        for (field, priority) in [
            ("ipv4NormalRoutePriority", spec.ipv4_normal_route_priority),
            ("ipv6NormalRoutePriority", spec.ipv6_normal_route_priority),
        ] {
            self::priority(&format!("spec.{field}"), priority, &mut problems);
        }
        if self.metadata.name != "default" {
            self.only_for_all(&mut problems);
        }
        problems.result()
    }

    /// Fields that have no meaning for one node.
    fn only_for_all(&self, problems: &mut Problems) {
        let spec = &self.spec;
        for (field, is_set) in [
            ("nodeToNodeMeshEnabled", spec.node_to_node_mesh_enabled.is_some()),
            ("asNumber", spec.as_number.is_some()),
            ("serviceLoadBalancerIPs", !spec.service_load_balancer_ips.is_empty()),
            ("serviceExternalIPs", !spec.service_external_ips.is_empty()),
            ("serviceClusterIPs", !spec.service_cluster_ips.is_empty()),
            ("nodeMeshPassword", spec.node_mesh_password.is_some()),
            ("nodeMeshMaxRestartTime", spec.node_mesh_max_restart_time.is_some()),
        ] {
            if is_set {
                problems.add(format!("spec.{field}"), "is for the object default only");
            }
        }
    }

    fn communities(&self, problems: &mut Problems) {
        let spec = &self.spec;
        for (index, Community { name, value }) in spec.communities.iter().enumerate() {
            let path = format!("spec.communities[{index}]");
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
            if name.is_empty() || !name.bytes().all(is_name) {
                problems.add(format!("{path}.name"), format!("{name:?} is no name of a community"));
            }
            if !is_community(value) {
                problems.add(format!("{path}.value"), not_a_community(value));
            }
        }
        if !spec.communities.is_empty() && spec.prefix_advertisements.is_empty() {
            problems.add("spec.communities", "are used by no prefixAdvertisements");
        }
        for (index, PrefixAdvertisement { cidr, communities }) in
            spec.prefix_advertisements.iter().enumerate()
        {
            let path = format!("spec.prefixAdvertisements[{index}]");
            if network(cidr).is_none() {
                problems.add(format!("{path}.cidr"), not_a_network(cidr));
            }
            if communities.is_empty() {
                problems.add(format!("{path}.communities"), "is missing");
            }
            let is_known = |name: &&String| spec.communities.iter().any(|known| known.name == **name);
            for name in communities.iter().filter(|name| !is_community(name) && !is_known(name)) {
                let problem =
                    format!("{name:?} is neither a community nor the name of one in spec.communities");
                problems.add(format!("{path}.communities"), problem);
            }
        }
    }
}

impl BgpFilter {
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Problems::default();
        let spec = &self.spec;
        for (field, rules, is_v4) in [
            ("exportV4", &spec.export_v4, true),
            ("importV4", &spec.import_v4, true),
            ("exportV6", &spec.export_v6, false),
            ("importV6", &spec.import_v6, false),
        ] {
            for (index, rule) in rules.iter().enumerate() {
                rule.validate(&format!("spec.{field}[{index}]"), is_v4, &mut problems);
            }
        }
        problems.result()
    }
}

impl BgpFilterRule {
    fn validate(&self, path: &str, is_v4: bool, problems: &mut Problems) {
        let empty = |text: &str| text.is_empty();
        word(&format!("{path}.action"), Some(&self.action), &["Accept", "Reject"], problems);
        if empty(&self.action) {
            problems.add(format!("{path}.action"), "is missing");
        }
        let optional = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let operator = optional(&self.match_operator);
        word(
            &format!("{path}.matchOperator"),
            operator.as_ref(),
            &["Equal", "NotEqual", "In", "NotIn"],
            problems,
        );
        word(&format!("{path}.source"), optional(&self.source).as_ref(), &["RemotePeers"], problems);
        word(&format!("{path}.peerType"), optional(&self.peer_type).as_ref(), &["eBGP", "iBGP"], problems);
        let cidr = optional(&self.cidr);
        if cidr.is_some() != operator.is_some() {
            problems.add(path, "cidr and matchOperator go together");
        }
        if let Some(cidr) = &cidr
            && network(cidr).is_none_or(|network| network.addr().is_ipv4() != is_v4)
        {
            let family = if is_v4 { "IPv4" } else { "IPv6" };
            problems.add(format!("{path}.cidr"), format!("{cidr:?} is no {family} network"));
        }
        if let Some(PrefixLength { min, max }) = &self.prefix_length {
            let longest = if is_v4 { 32 } else { 128 };
            if cidr.is_none() {
                problems.add(format!("{path}.prefixLength"), "needs cidr");
            }
            for length in [min, max].into_iter().flatten().filter(|length| **length > longest) {
                let problem = format!("{length} is longer than {longest}");
                problems.add(format!("{path}.prefixLength"), problem);
            }
        }
        if let Some(name) = optional(&self.interface).filter(|name| !is_interface(name)) {
            problems.add(format!("{path}.interface"), format!("{name:?} is no name of an interface"));
        }
        if let Some(Communities { values }) = &self.communities {
            if values.len() != 1 {
                problems.add(format!("{path}.communities.values"), "needs exactly one community");
            }
            for value in values.iter().filter(|value| !is_community(value)) {
                problems.add(format!("{path}.communities.values"), not_a_community(value));
            }
        }
        priority(&format!("{path}.priority"), self.priority, problems);
        if !self.operations.is_empty() && self.action != "Accept" {
            problems.add(format!("{path}.operations"), "need action: Accept");
        }
        for (index, operation) in self.operations.iter().enumerate() {
            operation.validate(&format!("{path}.operations[{index}]"), problems);
        }
    }
}

impl Operation {
    fn validate(&self, path: &str, problems: &mut Problems) {
        let set = [self.add_community.is_some(), self.prepend_as_path.is_some(), self.set_priority.is_some()];
        if set.into_iter().filter(|is_set| *is_set).count() != 1 {
            problems.add(path, "needs exactly one of addCommunity, prependASPath and setPriority");
        }
        if let Some(AddCommunity { value }) =
            self.add_community.as_ref().filter(|it| !is_community(&it.value))
        {
            problems.add(format!("{path}.addCommunity.value"), not_a_community(value));
        }
        if self.prepend_as_path.as_ref().is_some_and(|it| !(1..=10).contains(&it.prefix.len())) {
            problems.add(format!("{path}.prependASPath.prefix"), "needs one to ten numbers");
        }
        let value = self.set_priority.as_ref().map(|it| it.value);
        priority(&format!("{path}.setPriority.value"), value, problems);
    }
}

/// Problems with fields.
#[derive(Default)]
struct Problems(Vec<FieldError>);

impl Problems {
    fn add(&mut self, path: impl Into<String>, problem: impl Into<String>) {
        self.0.push(FieldError::new(path, problem));
    }

    fn result(self) -> Result<(), Vec<FieldError>> {
        if self.0.is_empty() { Ok(()) } else { Err(self.0) }
    }
}

/// `64512`, `"64512"`, or `"1.10"` with 16 bits on both sides.
fn as_number(path: &str, number: Option<&Value>, problems: &mut Problems) {
    let good = match number {
        None => true,
        Some(Value::String(text)) => match text.split_once('.') {
            Some((high, low)) => high.parse::<u16>().is_ok() && low.parse::<u16>().is_ok(),
            None => text.parse::<u32>().is_ok(),
        },
        Some(number) => number.as_u64().is_some_and(|number| number <= u64::from(u32::MAX)),
    };
    if !good {
        problems.add(path, "is no AS number: a number up to 4294967295, or two numbers with a dot");
    }
}

/// An address, with a port from 1 on.
fn peer_address(text: &str) -> Option<IpAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    let address: SocketAddr = text.parse().ok()?;
    (address.port() > 0).then(|| address.ip())
}

/// A network without bits behind its prefix.
fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().filter(|network: &IpNet| network.trunc() == *network)
}

fn not_a_network(text: &str) -> String {
    format!("{text:?} is no network without bits behind its prefix")
}

fn is_interface(name: &str) -> bool {
    name.len() <= 15 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.*-".contains(&byte))
}

/// `aa:nn` of 16 bits each, or `aa:nn:mm` of 32 bits each.
fn is_community(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    match parts.len() {
        2 => parts.iter().all(|part| part.parse::<u16>().is_ok()),
        3 => parts.iter().all(|part| part.parse::<u32>().is_ok()),
        _ => false,
    }
}

fn not_a_community(text: &str) -> String {
    format!("{text:?} is no community: AA:NN of 16 bits each, or AA:NN:MM of 32 bits each")
}

fn priority(path: &str, priority: Option<u32>, problems: &mut Problems) {
    if priority.is_some_and(|priority| !(1..=MAX_PRIORITY).contains(&priority)) {
        problems.add(path, format!("is not between 1 and {MAX_PRIORITY}"));
    }
}

fn word(path: &str, text: Option<&String>, words: &[&str], problems: &mut Problems) {
    if let Some(text) = text.filter(|text| !words.contains(&text.as_str())) {
        problems.add(path, format!("{text:?} is none of {}", words.join(", ")));
    }
}
