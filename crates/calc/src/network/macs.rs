//! The MAC addresses of nodes' VXLAN devices (policy decision 51).
//!
//! The kernel's forwarding table of a VXLAN device has one destination for each MAC address. Whoever may annotate a Node could take the
//! packets to another node by its MAC address. So an address that is derived from the name of a node is that node's, and another one
//! that several nodes have is nobody's.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::kubernetes::Node;
use tortie_api::net::{IpVersion, MacAddress};

use super::{claimed_mac, vtep_mac};

type Mac = (IpVersion, MacAddress);
type Names = BTreeMap<Mac, BTreeSet<String>>;

/// The nodes by MAC addresses of each family.
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
            let claimed = |node: &Node| (version, claimed_mac(name, node, version));
            let derived = |_: &Node| (version, vtep_mac(name, version));
            changed.extend(replace(&mut self.claimed, name, former.map(claimed), node.map(claimed)));
            changed.extend(replace(&mut self.derived, name, former.map(derived), node.map(derived)));
        }
        changed.iter().flat_map(|mac| self.claimed.get(mac)).flatten().cloned().collect()
    }

    /// Why a node cannot have its MAC address, if it cannot.
    pub(super) fn problem(&self, name: &str, node: &Node, version: IpVersion) -> Option<String> {
        let mac = claimed_mac(name, node, version);
        if mac == vtep_mac(name, version) {
            return None;
        }
        let of = |names: &Names| {
            let mut others = names.get(&(version, mac)).into_iter().flatten().filter(|other| *other != name);
            others.next().cloned()
        };
        let other = of(&self.derived).or_else(|| of(&self.claimed))?;
        Some(format!("its VXLAN MAC address {mac} is that of node {other}, too"))
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.claimed.is_empty() && self.derived.is_empty()
    }
}

/// Replaces the MAC address of a node. Returns what has changed.
fn replace(names: &mut Names, name: &str, before: Option<Mac>, after: Option<Mac>) -> Vec<Mac> {
    if before == after {
        return Vec::new();
    }
    if let Some(mac) = before
        && let Some(nodes) = names.get_mut(&mac)
    {
        nodes.remove(name);
        if nodes.is_empty() {
            names.remove(&mac);
        }
    }
    if let Some(mac) = after {
        names.entry(mac).or_default().insert(name.to_owned());
    }
    before.into_iter().chain(after).collect()
}
