//! The pairs of two classes that are on one node, and those that are not.

use std::collections::HashMap;

use super::class::{Class, ClassKind};
use tortie_oracle::Peer;

/// The locations of the pairs of two classes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// There are pairs on different nodes; if the nodes do not matter, any pairs.
    pub(super) apart: bool,
    /// There are pairs on the same node, and that matters.
    pub(super) together: bool,
}

/// The nodes of each class.
pub(super) struct Placements {
    nodes: Vec<NodeSet>,
    /// Whether nodes matter: only if there are host endpoints, or nodes that drop packets from their own pods to
    /// themselves.
    matter: bool,
}

/// A set of nodes, by number.
#[derive(Default)]
struct NodeSet {
    bits: Vec<u64>,
    count: usize,
    /// Whether two members are on the same node.
    twice: bool,
    /// Whether a member is on no node.
    elsewhere: bool,
}

impl Placements {
    pub(super) fn new(classes: &[Class], matter: bool) -> Self {
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut set = |class| {
            let mut set = NodeSet { elsewhere: has_others(class), ..NodeSet::default() };
            for node in nodes_of(class) {
                let next = numbers.len();
                set.insert(*numbers.entry(node).or_insert(next));
            }
            set
        };
        Self { nodes: classes.iter().map(&mut set).collect(), matter }
    }

    pub(super) fn ends(&self, (from, sender): (usize, &Class), to: usize) -> Ends {
        let (Some(near), Some(far)) = (self.nodes.get(from), self.nodes.get(to)) else {
            return Ends::default();
        };
        let same = from == to;
        let apart = match same {
            true => near.count > 1 || (near.elsewhere && sender.members.len() > 1),
            false => near.elsewhere || far.elsewhere || near.count > 1 || far.count > 1 || !near.meets(far),
        };
        // A node always reaches its own pods and itself.
        let probes = sender.kind == ClassKind::Nodes;
        let together = !probes && if same { near.twice } else { near.meets(far) };
        match self.matter {
            true => Ends { apart, together },
            false => Ends { apart: apart || together, together: false },
        }
    }

    /// The number of pairs on one node.
    pub(super) fn pairs_together(&self, sender: &Class, receiver: &Class, same: bool) -> usize {
        let mut there: HashMap<&str, usize> = HashMap::new();
        for node in nodes_of(receiver) {
            *there.entry(node).or_default() += 1;
        }
        let others = |node| there.get(node).map_or(0, |count| count - usize::from(same));
        nodes_of(sender).map(others).sum()
    }
}

/// Whether some members are on no node: outsiders, and pods without a node.
fn has_others(class: &Class) -> bool {
    class.nodes.is_empty() || class.nodes.iter().any(String::is_empty)
}

fn nodes_of(class: &Class) -> impl Iterator<Item = &str> {
    class.nodes.iter().map(String::as_str).filter(|node| !node.is_empty())
}

impl NodeSet {
    fn insert(&mut self, number: usize) {
        let (word, bit) = (number / 64, 1u64 << (number % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        if let Some(bits) = self.bits.get_mut(word) {
            self.twice |= *bits & bit != 0;
            self.count += usize::from(*bits & bit == 0);
            *bits |= bit;
        }
    }

    fn meets(&self, other: &Self) -> bool {
        self.bits.iter().zip(&other.bits).any(|(one, other)| one & other != 0)
    }
}

/// A pair of representatives of the two classes: not the same member, and on different nodes with `apart`. A node and
/// its own pods are not a pair if the node sends.
pub(super) fn pair(sender: &Class, receiver: &Class, same: bool, apart: bool) -> Option<(Peer, Peer)> {
    let apart = apart || (sender.kind == ClassKind::Nodes && receiver.kind == ClassKind::Pods);
    let mut pairs =
        sender.samples.iter().flat_map(|one| receiver.samples.iter().map(move |other| (one, other)));
    let (one, other) = pairs.find(|(one, other)| {
        let are_apart = || one.node.is_empty() || one.node != other.node;
        (!same || one.peer != other.peer) && (!apart || are_apart())
    })?;
    Some((one.peer.clone(), other.peer.clone()))
}
