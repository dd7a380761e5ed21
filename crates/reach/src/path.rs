//! Paths of packets between two classes: the address family, between two nodes or inside one, and the stops at which
//! policy is evaluated.

use std::fmt;

use serde::Serialize;
use tortie_api::net::{Direction, IpVersion};

/// A stop where a packet meets policy, in the order of its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stop {
    /// The sending pod.
    Sender,
    /// The host endpoint through which it leaves the sender's node.
    SenderNode,
    /// The host endpoint through which it enters the receiver's node; for packets from the node's own pods, the node
    /// itself.
    ReceiverNode,
    /// The receiving pod.
    Receiver,
}

impl Stop {
    /// All stops, in order.
    pub const ALL: [Self; 4] = [Self::Sender, Self::SenderNode, Self::ReceiverNode, Self::Receiver];

    /// The direction of the policy that applies there.
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            Self::Sender | Self::SenderNode => Direction::Egress,
            Self::ReceiverNode | Self::Receiver => Direction::Ingress,
        }
    }

    /// Whether host endpoints apply there.
    #[must_use]
    pub fn is_host(self) -> bool {
        matches!(self, Self::SenderNode | Self::ReceiverNode)
    }

    /// The end whose policies apply there, and the end opposite.
    pub(super) fn subject_and_peer<T>(self, from: T, to: T) -> (T, T) {
        match self.direction() {
            Direction::Egress => (from, to),
            Direction::Ingress => (to, from),
        }
    }

    /// The sender and the receiver.
    pub(super) fn sender_and_receiver<T>(self, subject: T, peer: T) -> (T, T) {
        self.subject_and_peer(subject, peer)
    }

    pub(super) fn number(self) -> usize {
        match self {
            Self::Sender => 0,
            Self::SenderNode => 1,
            Self::ReceiverNode => 2,
            Self::Receiver => 3,
        }
    }
}

/// A stop for packets between nodes, or for packets that stay inside one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub(super) stop: Stop,
    pub(super) placement: Placement,
}

impl Spot {
    /// The number of different spots: at pods, the other end's location does not matter.
    pub(super) const COUNT: usize = 6;

    /// Whether it is a host endpoint for packets inside one node.
    pub(super) fn is_inside_node(self) -> bool {
        self.stop.is_host() && self.placement == Placement::Together
    }

    pub(super) fn number(self) -> usize {
        self.stop.number() + if self.is_inside_node() { 3 } else { 0 }
    }
}

/// A value for each [`Stop`].
pub(super) type ByStop<T> = [Option<T>; 4];

/// The location of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Placement {
    /// On different nodes, or one of them on no node; if no host endpoint applies, anywhere.
    Apart,
    /// On the same node.
    Together,
}

/// The way of packets from one class to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path {
    /// The address family.
    pub family: IpVersion,
    /// The location of the two ends.
    pub placement: Placement,
}

impl Path {
    /// All ways.
    pub const ALL: [Self; 4] = [
        Self { family: IpVersion::V4, placement: Placement::Apart },
        Self { family: IpVersion::V4, placement: Placement::Together },
        Self { family: IpVersion::V6, placement: Placement::Apart },
        Self { family: IpVersion::V6, placement: Placement::Together },
    ];

    pub(super) fn number(self) -> usize {
        family_number(self.family) * 2 + usize::from(self.placement == Placement::Together)
    }
}

/// Both families, in the order of their [`family_number`]s.
pub(super) const FAMILIES: [IpVersion; 2] = IpVersion::ALL;

pub(super) fn family_number(family: IpVersion) -> usize {
    match family {
        IpVersion::V4 => 0,
        IpVersion::V6 => 1,
    }
}

/// A value for each [`Path`].
pub(super) type ByPath<T> = [Option<T>; 4];

/// A set of ways between two classes for readers. It names only properties that make a difference.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    /// Limits the set to one family.
    pub family: Option<IpVersion>,
    /// Limits the set to pairs on different nodes, or to pairs on the same node.
    pub placement: Option<Placement>,
}

impl Scope {
    /// Whether the set contains the way.
    #[must_use]
    pub fn holds(self, path: Path) -> bool {
        self.family.is_none_or(|family| family == path.family)
            && self.placement.is_none_or(|placement| placement == path.placement)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = self.family.map(|family| match family {
            IpVersion::V4 => "IPv4",
            IpVersion::V6 => "IPv6",
        });
        let placement = self.placement.map(|placement| match placement {
            Placement::Apart => "between nodes",
            Placement::Together => "on one node",
        });
        let words: Vec<&str> = family.into_iter().chain(placement).collect();
        f.write_str(&words.join(" "))
    }
}

/// Divides these ways, among all existing ways, into as few scopes as possible.
pub(super) fn scopes(paths: &[Path], among: &[Path]) -> Vec<Scope> {
    if paths.len() == among.len() {
        return vec![Scope::default()];
    }
    let placements = [Placement::Apart, Placement::Together];
    let of_family = FAMILIES.map(|family| Scope { family: Some(family), placement: None });
    let of_placement = placements.map(|placement| Scope { family: None, placement: Some(placement) });
    let single = |path: &Path| Scope { family: Some(path.family), placement: Some(path.placement) };
    let candidates = of_family.into_iter().chain(of_placement).chain(paths.iter().map(single));
    let mut left = paths.to_vec();
    let mut chosen = Vec::new();
    for scope in candidates {
        let mut held = among.iter().filter(|path| scope.holds(**path)).peekable();
        if held.peek().is_some() && held.all(|path| left.contains(path)) {
            left.retain(|path| !scope.holds(*path));
            chosen.push(scope);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_named_only_if_they_matter() {
        let [v4, v4_inside, v6, v6_inside] = Path::ALL;
        for (paths, among, expected) in [
            (vec![v4], vec![v4], ""),
            (vec![v4, v6], vec![v4, v6], ""),
            (vec![v6], vec![v4, v6], "IPv6"),
            (vec![v4_inside], vec![v4, v4_inside], "on one node"),
            (vec![v4, v6], Path::ALL.to_vec(), "between nodes"),
            (vec![v4, v4_inside], Path::ALL.to_vec(), "IPv4"),
            (vec![v4, v4_inside, v6], Path::ALL.to_vec(), "IPv4, IPv6 between nodes"),
            (vec![v4, v6_inside], Path::ALL.to_vec(), "IPv4 between nodes, IPv6 on one node"),
        ] {
            let scopes: Vec<String> = scopes(&paths, &among).iter().map(ToString::to_string).collect();
            assert_eq!(scopes.join(", "), expected, "{paths:?} among {among:?}");
        }
    }
}
