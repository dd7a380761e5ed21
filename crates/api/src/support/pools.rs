//! IPPools: their fields, and what several of them must not do together.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::State::{Implemented, Rejected, Reported};
use super::Takes::{Bool, Integer, Text, Texts, Word};
use super::{Field, field};
use crate::Key;
use crate::kubernetes::Node;

const IPIP: &str = "IPIP is not supported, as Windows nodes cannot carry it; use vxlanMode: Always";
const BGP: &str = "Tortie speaks no BGP, so nothing is exported in any case";
const AWS: &str = "Tortie does not talk to cloud providers";

/// The fields of `spec`.
pub(super) const FIELDS: &[Field] = &[
    field("allowedUses", Texts, Implemented, &[]),
    field("assignmentMode", Word(&["Automatic", "Manual"]), Implemented, &[]),
    field("awsSubnetID", Text, Rejected(AWS), &[]),
    field("blockSize", Integer(20, 128), Implemented, &[]),
    field("cidr", Text, Implemented, &[]),
    field("disableBGPExport", Bool, Reported(BGP), &["true", "false"]),
    field("disabled", Bool, Implemented, &[]),
    field("ipipMode", Word(&["Never", "Always", "CrossSubnet"]), Rejected(IPIP), &["Never"]),
    field("namespaceSelector", Text, Implemented, &[]),
    field("natOutgoing", Bool, Implemented, &[]),
    field("nodeSelector", Text, Implemented, &[]),
    field("vxlanMode", Word(&["Never", "Always", "CrossSubnet"]), Implemented, &[]),
];

/// A pool, as far as others are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its addresses.
    pub cidr: IpNet,
}

impl Pool {
    /// The pool that an object is, as far as it can be read.
    #[must_use]
    pub fn of(key: &Key, value: &Value) -> Option<Self> {
        let cidr: IpNet = value.pointer("/spec/cidr")?.as_str()?.parse().ok()?;
        Some(Self { name: key.name.clone(), cidr: cidr.trunc() })
    }
}

/// The network that a node is on, by its annotation.
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

/// What is wrong with a pool beside others: the name of the first other pool that has some of its addresses too.
#[must_use]
pub fn conflicts<'a>(pool: &Pool, others: impl IntoIterator<Item = &'a Pool>) -> Option<String> {
    let other =
        others.into_iter().find(|other| other.name != pool.name && overlap(&other.cidr, &pool.cidr))?;
    Some(format!(
        "{} and {} of IPPool {} overlap: two pods could get one address; choose another cidr",
        pool.cidr, other.cidr, other.name
    ))
}

/// What is wrong with a pool beside nodes, given with the networks that they are on.
#[must_use]
pub fn overlapping_nodes<'a>(
    pool: &Pool,
    mut nodes: impl Iterator<Item = (&'a str, IpNet)>,
) -> Option<String> {
    let (node, net) = nodes.find(|(_, net)| overlap(net, &pool.cidr))?;
    Some(format!(
        "{} and {net}, the network of node {node}, overlap: packets to nodes would go to pods; choose another cidr",
        pool.cidr
    ))
}
