//! Which pairs of two classes are on one node, and which are not.

use std::collections::HashMap;

use super::classes::{Class, ClassKind, Sample};
use crate::oracle::Peer;

/// Which pairs of two classes there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// Pairs on different nodes; where the nodes do not matter, any pairs.
    pub(super) apart: bool,
    /// Pairs on the same node, where that matters.
    pub(super) together: bool,
}

/// The nodes of each class.
pub(super) struct Places {
    /// By class; empty where the nodes do not matter, as there are no host endpoints.
    nodes: Vec<NodeSet>,
}

/// Some nodes, by number, and whether two members are on one.
#[derive(Default)]
struct NodeSet {
    bits: Vec<u64>,
    twice: bool,
}

impl Places {
    pub(super) fn new(classes: &[Class], matter: bool) -> Self {
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut set = |class| {
            let mut set = NodeSet::default();
            for node in nodes_of(class) {
                let next = numbers.len();
                set.insert(*numbers.entry(node).or_insert(next));
            }
            set
        };
        let classes = classes.iter().filter(|_| matter);
        Self { nodes: classes.map(&mut set).collect() }
    }

    pub(super) fn ends(&self, (from, sender): (usize, &Class), (to, receiver): (usize, &Class)) -> Ends {
        let is_pair = |apart| pairs(sender, receiver, from == to, apart).next().is_some();
        let (Some(near), Some(far)) = (self.nodes.get(from), self.nodes.get(to)) else {
            return Ends { apart: is_pair(false), together: false };
        };
        // A node always reaches its own pods, and itself.
        let together =
            sender.kind != ClassKind::Nodes && if from == to { near.twice } else { near.meets(far) };
        Ends { apart: is_pair(true), together }
    }

    /// How many pairs are on one node.
    pub(super) fn pairs_together(&self, sender: &Class, receiver: &Class, same: bool) -> usize {
        let mut there: HashMap<&str, usize> = HashMap::new();
        for node in nodes_of(receiver) {
            *there.entry(node).or_default() += 1;
        }
        let others = |node| there.get(node).map_or(0, |count| count - usize::from(same));
        nodes_of(sender).map(others).sum()
    }
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
            *bits |= bit;
        }
    }

    fn meets(&self, other: &Self) -> bool {
        self.bits.iter().zip(&other.bits).any(|(one, other)| one & other != 0)
    }
}

/// One of each of the two classes: not the same one, and on different nodes if they are to be `apart`.
pub(super) fn pair(sender: &Class, receiver: &Class, same: bool, apart: bool) -> Option<(Peer, Peer)> {
    let (one, other) = pairs(sender, receiver, same, apart).next()?;
    Some((one.peer.clone(), other.peer.clone()))
}

/// Of those that stand for their classes; a node and its own pods are no pair where the node sends.
fn pairs<'a>(
    sender: &'a Class,
    receiver: &'a Class,
    same: bool,
    apart: bool,
) -> impl Iterator<Item = (&'a Sample, &'a Sample)> {
    let apart = apart || (sender.kind == ClassKind::Nodes && receiver.kind == ClassKind::Pods);
    let all = sender.samples.iter().flat_map(|one| receiver.samples.iter().map(move |other| (one, other)));
    all.filter(move |(one, other)| {
        let are_apart = one.node.is_empty() || one.node != other.node;
        (!same || one.peer != other.peer) && (!apart || are_apart)
    })
}
