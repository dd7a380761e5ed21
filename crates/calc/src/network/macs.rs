//! The MAC addresses of nodes' VXLAN devices (policy decision 51).
//!
//! The kernel's forwarding table of a VXLAN device has one destination for each MAC address. Whoever may annotate a Node could take the
//! packets to another node by its MAC address. So an address that is derived from the name of a node is that node's, and another one
//! that several nodes have is nobody's. Nodes with the same own address take no packets from each other: a machine that got another name
//! leaves such a Node behind.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::kubernetes::Node;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_dataplane::Vtep;

use super::{vtep, vtep_mac};

type Mac = (IpVersion, MacAddress);
/// The nodes with a MAC address, with their own addresses.
type Names = BTreeMap<Mac, BTreeMap<String, IpAddr>>;

/// The nodes with a tunnel end, by MAC addresses of each family.
#[derive(Default)]
pub(super) struct Macs {
    /// By that which a node has, or says that it has.
    claimed: Names,
    /// By that which is derived from its name.
    derived: Names,
}

impl Macs {
    /// Replaces the addresses of a node. Returns the nodes that must be judged again.
    pub(super) fn update(
        &mut self,
        name: &str,
        former: Option<&Node>,
        node: Option<&Node>,
    ) -> BTreeSet<String> {
        let mut changed = BTreeSet::new();
        for version in IpVersion::ALL {
            let end = |node: &Node| vtep(name, node, version);
            let (before, after) = (former.and_then(end), node.and_then(end));
            let claimed = |end: &Vtep| ((version, end.mac), end.parent);
            let derived = |end: &Vtep| ((version, vtep_mac(name, version)), end.parent);
            let ends = [&before, &after];
            let [of_before, of_after] = ends.map(|end| end.as_ref().map(claimed));
            changed.extend(replace(&mut self.claimed, name, of_before, of_after));
            let [of_before, of_after] = ends.map(|end| end.as_ref().map(derived));
            changed.extend(replace(&mut self.derived, name, of_before, of_after));
        }
        changed.iter().flat_map(|mac| self.claimed.get(mac)).flatten().map(|(name, _)| name.clone()).collect()
    }

    /// Why a node cannot have its MAC address, with the remedy, if it cannot.
    pub(super) fn problem(&self, name: &str, node: &Node, version: IpVersion) -> Option<String> {
        let Vtep { mac, parent, .. } = vtep(name, node, version)?;
        if mac == vtep_mac(name, version) {
            return None;
        }
        let of = |names: &Names| {
            let mut nodes = names.get(&(version, mac)).into_iter().flatten();
            nodes.find(|(other, own)| *other != name && **own != parent).map(|(other, _)| other.clone())
        };
        let other = of(&self.derived).or_else(|| of(&self.claimed))?;
        Some(format!(
            "its VXLAN MAC address {mac} is that of node {other}, too; give each machine its own /etc/machine-id and each node its own \
             name, restart flanneld or Tortie's agent there, and delete the Nodes whose machines are gone"
        ))
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.claimed.is_empty() && self.derived.is_empty()
    }
}

/// Replaces the MAC address and the own address of a node. Returns the MAC addresses that are concerned.
fn replace(
    names: &mut Names,
    name: &str,
    before: Option<(Mac, IpAddr)>,
    after: Option<(Mac, IpAddr)>,
) -> Vec<Mac> {
    if before == after {
        return Vec::new();
    }
    if let Some((mac, _)) = before
        && let Some(nodes) = names.get_mut(&mac)
    {
        nodes.remove(name);
        if nodes.is_empty() {
            names.remove(&mac);
        }
    }
    if let Some((mac, own)) = after {
        names.entry(mac).or_default().insert(name.to_owned(), own);
    }
    before.into_iter().chain(after).map(|(mac, _)| mac).collect()
}
