//! The nodes that peers `nodes` of policies may select, with their labels and addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tortie_api::kubernetes::Node;
use tortie_policy::OwnLabels;
use tortie_selector::Selector;

use crate::slab::No;

/// A node as policies see it.
#[derive(PartialEq)]
pub(crate) struct SelectedNode {
    pub(crate) labels: OwnLabels,
    pub(crate) addresses: Box<[IpAddr]>,
    /// The problem with its addresses, if there is one.
    problem: Option<String>,
}

impl SelectedNode {
    fn new(node: &Node) -> Self {
        // A new node has no address for a moment. Nothing reaches it then, so there is nothing to report.
        let odd: Vec<String> = node.unusable_addresses().map(|text| format!("{text:?}")).collect();
        let problem = (!odd.is_empty()).then(|| {
            format!(
                "other machines reach no node by {}, and a policy in force has a peer `nodes` that selects this one: the rule does \
                 not match such addresses. Correct what the kubelet or the cloud controller writes to status.addresses",
                odd.join(", ")
            )
        });
        let addresses = node.addresses();
        Self { labels: node.metadata.labels.clone().into(), addresses: addresses.into(), problem }
    }
}

/// All nodes, and the sets of their addresses. Sets are few, so a changed node is compared with each of them.
#[derive(Default)]
pub(crate) struct Nodes {
    nodes: BTreeMap<String, SelectedNode>,
    sets: BTreeMap<No, Selector>,
}

impl Nodes {
    /// Replaces a node; returns the former one and whether anything has changed.
    pub(crate) fn replace(&mut self, name: &str, node: Option<&Node>) -> (Option<SelectedNode>, bool) {
        let new = node.map(SelectedNode::new);
        if self.nodes.get(name) == new.as_ref() {
            return (None, false);
        }
        let former = match new {
            Some(new) => self.nodes.insert(name.to_owned(), new),
            None => self.nodes.remove(name),
        };
        (former, true)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&SelectedNode> {
        self.nodes.get(name)
    }

    /// The sets that contain the addresses of a node.
    pub(crate) fn sets_of(&self, node: &SelectedNode) -> Vec<No> {
        let selecting = self.sets.iter().filter(|(_, selector)| selector.matches(&node.labels));
        selecting.map(|(no, _)| *no).collect()
    }

    /// Files a set; returns the addresses of each of its nodes.
    pub(crate) fn activate<'a>(
        &'a mut self,
        no: No,
        selector: &'a Selector,
    ) -> impl Iterator<Item = &'a [IpAddr]> {
        self.sets.insert(no, selector.clone());
        let selected = self.nodes.values().filter(|node| selector.matches(&node.labels));
        selected.map(|node| &*node.addresses)
    }

    pub(crate) fn deactivate(&mut self, no: No) {
        self.sets.remove(&no);
    }

    /// The selected nodes with addresses that are left out, and what is wrong.
    pub(crate) fn problems(&self) -> impl Iterator<Item = (&str, &str)> {
        let odd = self.nodes.iter().filter_map(|(name, node)| Some((name, node, node.problem.as_ref()?)));
        let selected =
            odd.filter(|(_, node, _)| self.sets.values().any(|selector| selector.matches(&node.labels)));
        selected.map(|(name, _, problem)| (name.as_str(), problem.as_str()))
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.sets.is_empty()
    }
}
