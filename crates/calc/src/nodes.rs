//! The sets of the addresses of nodes, which peers `nodes` of policies select by the nodes' labels.

use std::collections::BTreeMap;

use tortie_api::kubernetes::Node;
use tortie_selector::Selector;

use crate::slab::No;

/// The selectors of these sets. They are few, so a changed node is compared with each of them.
#[derive(Default)]
pub(crate) struct NodeSets(BTreeMap<No, Selector>);

impl NodeSets {
    pub(crate) fn insert(&mut self, no: No, selector: Selector) {
        self.0.insert(no, selector);
    }

    pub(crate) fn remove(&mut self, no: No) {
        self.0.remove(&no);
    }

    /// The sets that contain the addresses of a node.
    pub(crate) fn of(&self, node: &Node) -> Vec<No> {
        let selecting = self.0.iter().filter(|(_, selector)| selector.matches(&node.metadata.labels));
        selecting.map(|(no, _)| *no).collect()
    }

    #[cfg(test)]
    pub(crate) fn numbers(&self) -> impl Iterator<Item = No> {
        self.0.keys().copied()
    }
}

/// The problem of a node that a policy selects, if it lists addresses that are left out of the set. A new node has no address for
/// a moment. Nothing reaches it then, so there is nothing to report.
pub(crate) fn problem(node: &Node) -> Option<String> {
    let odd: Vec<String> = node.unusable_addresses().map(|text| format!("{text:?}")).collect();
    (!odd.is_empty()).then(|| {
        format!(
            "other machines reach no node by {}, and a policy in force has a peer `nodes` that selects this one: the rule does not \
             match such addresses. Correct what the kubelet or the cloud controller writes to status.addresses",
            odd.join(", ")
        )
    })
}
