//! IPPools: their fields, and conflicts between pools.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::State::{Implemented, Rejected};
use super::Takes::{Bool, Integer, Text, Texts, Word};
use super::{Field, field};
use crate::calico::IpPool;
use crate::kubernetes::Node;
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
    if is_protected(pool) == protected {
        return;
    }
    let finalizers = pool.pointer("/metadata/finalizers").and_then(Value::as_array);
    let mut all: Vec<Value> = finalizers.cloned().unwrap_or_default();
    all.retain(|each| each != IpPool::FINALIZER);
    if protected {
        all.push(Value::String(IpPool::FINALIZER.to_owned()));
    }
    let Some(metadata) = pool.pointer_mut("/metadata").and_then(Value::as_object_mut) else { return };
    match all.is_empty() {
        true => drop(metadata.remove("finalizers")),
        false => drop(metadata.insert("finalizers".to_owned(), Value::Array(all))),
    }
}

/// The network of a node, by its annotation.
#[must_use]
pub fn node_network(node: &Value) -> Option<IpNet> {
    let annotations = node.pointer("/metadata/annotations")?;
    let text = annotations.get(Node::ADDRESS)?.as_str()?;
    let alone = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse::<IpNet>().ok().or_else(alone).map(|net| net.trunc())
}

fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(other) || other.contains(one)
}

/// A pool's conflict with other pools: the name of the first other pool that shares addresses with it.
#[must_use]
pub fn conflicts<'a>(pool: &Pool, others: impl IntoIterator<Item = &'a Pool>) -> Option<String> {
    let other =
        others.into_iter().find(|other| other.name != pool.name && overlap(&other.cidr, &pool.cidr))?;
    Some(format!(
        "{} and {} of IPPool {} overlap: two pods could get one address; choose another cidr",
        pool.cidr, other.cidr, other.name
    ))
}

/// A pool's conflict with nodes, which are given with their networks.
#[must_use]
pub fn overlapping_nodes<'a>(
    pool: &Pool,
    mut nodes: impl Iterator<Item = (&'a str, IpNet)>,
) -> Option<String> {
    let (node, net) = nodes.find(|(_, net)| !pool.is_for_load_balancers && overlap(net, &pool.cidr))?;
    Some(format!(
        "{} and {net}, the network of node {node}, overlap: packets to nodes would go to pods; choose another cidr",
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
