//! IPPools: their fields, and what several of them must not do together.

use ipnet::IpNet;

use super::State::{Implemented, Rejected, Reported};
use super::Takes::{Bool, Integer, Text, Texts, Word};
use super::{Field, field};

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
