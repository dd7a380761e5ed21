//! IPPools: their fields, and conflicts between pools.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::State::{Implemented, Rejected};
use super::Takes::{Bool, Integer, Text, Texts, Word};
use super::{Field, field};
use crate::calico::{EncapsulationMode, FelixConfiguration, IpPool};
use crate::kubernetes::Node;
use crate::net::overlap;
use crate::{FieldError, Key};

const NOT_CARRIED: &str = "with Never, the default, packets pass between nodes only by routes of BGP (agents with --bgp), by direct routes (agents with --direct-routes) or by those of \
     the nodes' network; otherwise use Always";
const AWS: &str = "Tortie does not configure cloud providers";

/// The fields of `spec`.
pub(super) const FIELDS: &[Field] = &[
    field("allowedUses", Texts, Implemented, &[]),
    field("assignmentMode", Word(&["Automatic", "Manual"]), Implemented, &[]),
    field("awsSubnetID", Text, Rejected(AWS), &[]),
    field("blockSize", Integer(20, 128), Implemented, &[]),
    field("cidr", Text, Implemented, &[]),
    field("disableBGPExport", Bool, Implemented, &[]),
    field("disabled", Bool, Implemented, &[]),
    field("ipipMode", Word(&["Never", "Always", "CrossSubnet"]), Implemented, &[]),
    field("namespaceSelector", Text, Implemented, &[]),
    field("natOutgoing", Bool, Implemented, &[]),
    field("nodeSelector", Text, Implemented, &[]),
    field("vxlanMode", Word(&["Never", "Always", "CrossSubnet"]), Implemented, &[]),
];

/// What a pool without encapsulation needs, whether that is explicit or by default.
#[must_use]
pub fn without_encapsulation(pool: &Value) -> Option<FieldError> {
    let disabled = pool.pointer("/spec/disabled").and_then(Value::as_bool) == Some(true);
    let never = !has_mode(pool, "vxlanMode") && !has_mode(pool, "ipipMode") && !disabled;
    let never = never && !is_for_load_balancers(pool);
    never.then(|| FieldError::new("spec.vxlanMode", NOT_CARRIED))
}

fn has_mode(pool: &Value, field: &str) -> bool {
    let mode = pool["spec"][field].as_str();
    mode.is_some_and(|mode| !["Never", ""].contains(&mode))
}

/// Whether a Node runs Windows.
#[must_use]
pub fn is_windows(node: &Value) -> bool {
    node["metadata"]["labels"][Node::OS] == "windows"
}

/// Whether the pool's addresses are for Services: no packet with such an address passes between nodes.
#[must_use]
pub fn is_for_load_balancers(pool: &Value) -> bool {
    let uses = pool.pointer("/spec/allowedUses").and_then(Value::as_array);
    uses.is_some_and(|uses| uses.iter().any(|each| each == "LoadBalancer"))
}

/// The parts of a pool that matter for conflicts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its addresses.
    pub cidr: IpNet,
    /// Whether they are for Services. Such addresses may be in the network of the nodes.
    pub is_for_load_balancers: bool,
    /// Whether packets between nodes may use IPIP.
    pub has_ipip: bool,
    /// Whether it was deleted, and stays until none of its addresses is in use.
    pub is_terminating: bool,
}

impl Pool {
    /// The pool in an object, as far as it can be read.
    #[must_use]
    pub fn of(key: &Key, value: &Value) -> Option<Self> {
        let cidr: IpNet = value.pointer("/spec/cidr")?.as_str()?.parse().ok()?;
        Some(Self {
            name: key.name.clone(),
            cidr: cidr.trunc(),
            is_for_load_balancers: is_for_load_balancers(value),
            has_ipip: has_mode(value, "ipipMode"),
            is_terminating: is_terminating(value),
        })
    }
}

/// Whether an object was deleted, and stays until its finalizers are removed.
#[must_use]
pub fn is_terminating(value: &Value) -> bool {
    value.pointer("/metadata/deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// Whether a pool has [`IpPool::FINALIZER`].
#[must_use]
pub fn is_protected(pool: &Value) -> bool {
    let finalizers = pool.pointer("/metadata/finalizers").and_then(Value::as_array);
    finalizers.is_some_and(|all| all.iter().any(|each| each == IpPool::FINALIZER))
}

/// Adds [`IpPool::FINALIZER`] to a pool, or removes it.
pub fn set_protected(pool: &mut Value, protected: bool) {
    set_finalizer(pool, IpPool::FINALIZER, protected);
}

/// Adds a finalizer to an object, or removes it.
pub fn set_finalizer(object: &mut Value, finalizer: &str, present: bool) {
    let found = object.pointer("/metadata/finalizers").and_then(Value::as_array);
    let mut all: Vec<Value> = found.cloned().unwrap_or_default();
    if all.iter().any(|each| each == finalizer) == present {
        return;
    }
    all.retain(|each| each != finalizer);
    if present {
        all.push(Value::String(finalizer.to_owned()));
    }
    let Some(metadata) = object.pointer_mut("/metadata").and_then(Value::as_object_mut) else { return };
    match all.is_empty() {
        true => drop(metadata.remove("finalizers")),
        false => drop(metadata.insert("finalizers".to_owned(), Value::Array(all))),
    }
}

/// The networks of a node, at most one of each family, by its annotations.
#[must_use]
pub fn node_networks(node: &Value) -> Vec<IpNet> {
    let annotations = &node["metadata"]["annotations"];
    let texts = [Node::ADDRESS, Node::ADDRESS_V6].into_iter().filter_map(|name| annotations[name].as_str());
    let network = |text: &str| {
        let alone = || text.parse::<IpAddr>().ok().map(IpNet::from);
        text.parse::<IpNet>().ok().or_else(alone).map(|net| net.trunc())
    };
    texts.filter_map(network).collect()
}

/// A pool's conflict with the first other pool that shares addresses with it, without a remedy.
#[must_use]
pub fn conflicts<'a>(pool: &Pool, others: impl IntoIterator<Item = &'a Pool>) -> Option<String> {
    let other =
        others.into_iter().find(|other| other.name != pool.name && overlap(&other.cidr, &pool.cidr))?;
    Some(format!(
        "{} and {} of IPPool {} overlap: two pods could get one address",
        pool.cidr, other.cidr, other.name
    ))
}

/// A pool's conflict with nodes, which are given with their networks, without a remedy.
#[must_use]
pub fn overlapping_nodes<'a>(
    pool: &Pool,
    mut nodes: impl Iterator<Item = (&'a str, IpNet)>,
) -> Option<String> {
    let (node, net) = nodes.find(|(_, net)| !pool.is_for_load_balancers && overlap(net, &pool.cidr))?;
    Some(format!(
        "{} and {net}, the network of node {node}, overlap: packets to nodes would go to pods",
        pool.cidr
    ))
}

/// What keeps a pool with IPIP from a cluster with these Windows nodes. They cannot reach its pods, whoever uses the pool.
#[must_use]
pub fn ipip_beside_windows<'a>(
    pool: &Pool,
    mut windows_nodes: impl Iterator<Item = &'a str>,
) -> Option<String> {
    let node = windows_nodes.next().filter(|_| pool.has_ipip)?;
    Some(format!(
        "node {node} runs Windows, which has no IPIP, so its pods and those of this pool cannot reach each other; use vxlanMode: Always. \
         `tortie pool migrate` moves the pods of a pool in use to another one"
    ))
}

/// The addresses of the smallest block that Windows can use, as a power of two: it needs four of them itself.
pub const WINDOWS_BLOCK_BITS: u8 = 3;

/// How a Windows node exchanges packets of pods with other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowsNetwork {
    /// By VXLAN over IPv4 only.
    Overlay,
    /// Without encapsulation only.
    L2Bridge,
}

/// The parts of a Windows node that matter for pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowsNode {
    /// Its name.
    pub name: String,
    /// The type of its network; `None` while its agent has announced none.
    pub network: Option<WindowsNetwork>,
    labels: BTreeMap<String, String>,
}

impl WindowsNode {
    /// The node in an object; `None` if it does not run Windows.
    #[must_use]
    pub fn of(key: &Key, value: &Value) -> Option<Self> {
        if !is_windows(value) {
            return None;
        }
        let annotations = &value["metadata"]["annotations"];
        let network = if annotations[Node::HNS_NETWORK] == Node::L2BRIDGE {
            Some(WindowsNetwork::L2Bridge)
        } else {
            // The type of an overlay is not announced, but its tunnel is.
            annotations[Node::VXLAN_ADDRESS].is_string().then_some(WindowsNetwork::Overlay)
        };
        let labels = value["metadata"]["labels"].as_object().into_iter().flatten();
        let labels = labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
        Some(Self { name: key.name.clone(), network, labels: labels.collect() })
    }

    /// Whether the node gets addresses of such a pool while the pool is open. With an unknown network, it has no IPv6 yet.
    #[must_use]
    pub fn may_use(&self, pool: &IpPool) -> bool {
        let spec = &pool.spec;
        // HNS has no VXLAN over IPv6.
        let has_family = spec.cidr.addr().is_ipv4()
            || self.network == Some(WindowsNetwork::L2Bridge) && spec.vxlan_mode != EncapsulationMode::Always;
        has_family
            && !pool.has_ipip()
            && !pool.is_for_load_balancers()
            && spec.node_selector.as_ref().is_none_or(|selector| selector.matches(&self.labels))
    }
}

/// What keeps a pool without encapsulation from Windows nodes with overlay networks that may use it. A node whose network is not
/// known yet does not count.
#[must_use]
pub fn plain_beside_overlays(pool: &IpPool, nodes: &[WindowsNode]) -> Option<FieldError> {
    let is_overlay = |node: &&WindowsNode| node.network == Some(WindowsNetwork::Overlay);
    let node = nodes.iter().filter(is_overlay).find(|node| node.may_use(pool))?;
    let problem = format!(
        "the Windows node {} reaches other nodes by VXLAN only, because its network is an overlay; use Always or CrossSubnet, or a \
         nodeSelector without Windows nodes, such as kubernetes.io/os == 'linux'",
        node.name
    );
    (pool.encapsulation() == EncapsulationMode::Never).then(|| FieldError::new("spec.vxlanMode", problem))
}

/// What keeps a pool from Windows nodes that may use it.
#[must_use]
pub fn unfit_for_windows(pool: &IpPool, nodes: &[WindowsNode]) -> Vec<FieldError> {
    let users: Vec<&WindowsNode> = nodes.iter().filter(|node| node.may_use(pool)).collect();
    let longest = pool.spec.cidr.max_prefix_len() - WINDOWS_BLOCK_BITS;
    let small = users.first().filter(|_| pool.block_size() > longest).map(|node| {
        let problem = format!(
            "a block of /{} gives the Windows node {} no address; use at most {longest}",
            pool.block_size(),
            node.name
        );
        FieldError::new("spec.blockSize", problem)
    });
    let is_plain = |node: &&&WindowsNode| node.network == Some(WindowsNetwork::L2Bridge);
    let is_always = pool.spec.vxlan_mode == EncapsulationMode::Always;
    let encapsulated = users.iter().find(is_plain).filter(|_| is_always).map(|node| {
        let problem = format!(
            "the Windows node {} reaches other nodes without VXLAN only (its network is of type L2Bridge); use Never or CrossSubnet",
            node.name
        );
        FieldError::new("spec.vxlanMode", problem)
    });
    small.into_iter().chain(plain_beside_overlays(pool, nodes)).chain(encapsulated).collect()
}

/// What keeps a VXLAN network identifier from a cluster with these Windows nodes. A network without encapsulation has none.
#[must_use]
pub fn low_vni_beside_windows(felix: &Value, nodes: &[WindowsNode]) -> Option<FieldError> {
    let lowest = FelixConfiguration::LOWEST_WINDOWS_VNI;
    let vni = felix["spec"]["vxlanVNI"].as_u64().filter(|vni| *vni < u64::from(lowest))?;
    let node = nodes.iter().find(|node| node.network != Some(WindowsNetwork::L2Bridge))?;
    let problem = format!(
        "{vni} is too low for node {}, which runs Windows: its agent would not start any more; use {lowest}, the default, or more",
        node.name
    );
    Some(FieldError::new("spec.vxlanVNI", problem))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Kind, Resource};

    const OVERLAY: Option<(&str, &str)> = Some((Node::VXLAN_ADDRESS, "10.9.0.1"));
    const L2BRIDGE: Option<(&str, &str)> = Some((Node::HNS_NETWORK, Node::L2BRIDGE));

    fn windows(announced: Option<(&str, &str)>) -> WindowsNode {
        let labels = json!({"kubernetes.io/os": "windows", "zone": "a"});
        let annotations: BTreeMap<&str, &str> = announced.into_iter().collect();
        let node = json!({"metadata": {"name": "w", "labels": labels, "annotations": annotations}});
        WindowsNode::of(&Key::global(Kind::Node, "w"), &node).unwrap()
    }

    fn pool(spec: &Value) -> IpPool {
        let key = Key::global(Kind::IpPool, "p");
        match Resource::read(&key, &json!({"metadata": {"name": "p"}, "spec": spec})) {
            Ok(Resource::IpPool(pool)) => pool,
            other => panic!("{spec}: {other:?}"),
        }
    }

    #[test]
    fn a_pool_is_unfit_for_windows_nodes_that_may_use_it_only() {
        let (v4, v6) = ("10.0.0.0/16", "fd00::/64");
        for (announced, spec, expected) in [
            (OVERLAY, json!({"cidr": v4, "vxlanMode": "Always"}), ""),
            (OVERLAY, json!({"cidr": v4, "vxlanMode": "CrossSubnet"}), ""),
            (
                OVERLAY,
                json!({"cidr": v4}),
                "spec.vxlanMode: the Windows node w reaches other nodes by VXLAN only",
            ),
            (OVERLAY, json!({"cidr": v4, "nodeSelector": "zone == 'b'"}), ""),
            (OVERLAY, json!({"cidr": v4, "nodeSelector": "zone == 'a'"}), "spec.vxlanMode"),
            (OVERLAY, json!({"cidr": v4, "allowedUses": ["LoadBalancer"]}), ""),
            (OVERLAY, json!({"cidr": v4, "ipipMode": "Always"}), ""),
            (
                OVERLAY,
                json!({"cidr": v4, "vxlanMode": "Always", "blockSize": 30}),
                "spec.blockSize: a block of /30",
            ),
            (L2BRIDGE, json!({"cidr": v4}), ""),
            (L2BRIDGE, json!({"cidr": v4, "vxlanMode": "CrossSubnet"}), ""),
            (L2BRIDGE, json!({"cidr": v4, "vxlanMode": "Always"}), "reaches other nodes without VXLAN only"),
            // Its agent has announced nothing yet.
            (None, json!({"cidr": v4}), ""),
            (None, json!({"cidr": v4, "vxlanMode": "Always"}), ""),
            (None, json!({"cidr": v4, "blockSize": 30}), "spec.blockSize: a block of /30"),
            // Overlays have no IPv6, and other networks have none in VXLAN.
            (OVERLAY, json!({"cidr": v6}), ""),
            (OVERLAY, json!({"cidr": v6, "vxlanMode": "Always", "blockSize": 126}), ""),
            (None, json!({"cidr": v6, "blockSize": 126}), ""),
            (L2BRIDGE, json!({"cidr": v6}), ""),
            (L2BRIDGE, json!({"cidr": v6, "blockSize": 126}), "spec.blockSize: a block of /126"),
            (L2BRIDGE, json!({"cidr": v6, "vxlanMode": "Always", "blockSize": 126}), ""),
        ] {
            let found = unfit_for_windows(&pool(&spec), &[windows(announced)]);
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            let found = found.join("\n");
            let is_expected = found.contains(expected) && found.is_empty() == expected.is_empty();
            assert!(is_expected, "{announced:?} {spec}: {found}");
        }
    }

    #[test]
    fn networks_of_both_families_are_read() {
        for (annotations, expected) in [
            (json!({}), ""),
            (json!({Node::ADDRESS: "192.0.2.1/24"}), "192.0.2.0/24"),
            (json!({Node::ADDRESS_V6: "fd00::1"}), "fd00::1/128"),
            (json!({Node::ADDRESS: "192.0.2.1", Node::ADDRESS_V6: "fd00::1/64"}), "192.0.2.1/32 fd00::/64"),
            (json!({Node::ADDRESS: "x", Node::ADDRESS_V6: 5}), ""),
        ] {
            let networks = node_networks(&json!({"metadata": {"annotations": annotations}}));
            let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
            assert_eq!(networks.join(" "), expected, "{annotations}");
        }
    }
}
