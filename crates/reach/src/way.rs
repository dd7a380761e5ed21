//! Ways of packets between two classes: by which family, between two nodes or inside one, and where policy is asked.

use std::fmt;

use serde::Serialize;
use tortie_api::net::{Direction, IpVersion};

/// Where a packet meets policy, in the order of its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Stop {
    /// The pod that sends it.
    Sender,
    /// The host endpoint by which it leaves the sender's node.
    SenderNode,
    /// The host endpoint by which it comes to the receiver's node; for packets of the node's own pods the node itself.
    ReceiverNode,
    /// The pod that receives it.
    Receiver,
}

impl Stop {
    /// All, in order.
    pub const ALL: [Self; 4] = [Self::Sender, Self::SenderNode, Self::ReceiverNode, Self::Receiver];

    /// Which way policy is asked there.
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            Self::Sender | Self::SenderNode => Direction::Egress,
            Self::ReceiverNode | Self::Receiver => Direction::Ingress,
        }
    }

    /// Whether host endpoints are asked there.
    #[must_use]
    pub fn is_host(self) -> bool {
        matches!(self, Self::SenderNode | Self::ReceiverNode)
    }

    /// Whose policies are asked there, and who is at the other end.
    pub(super) fn subject_and_peer<T>(self, from: T, to: T) -> (T, T) {
        match self.direction() {
            Direction::Egress => (from, to),
            Direction::Ingress => (to, from),
        }
    }

    /// Who sends, and who receives.
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

/// A stop of packets between nodes, or of packets that stay inside one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub(super) stop: Stop,
    pub(super) placement: Placement,
}

impl Spot {
    /// How many there are that differ: at pods it does not matter where the other end is.
    pub(super) const COUNT: usize = 6;

    /// Whether it is a host endpoint that a packet meets inside one node.
    pub(super) fn is_inside_node(self) -> bool {
        self.stop.is_host() && self.placement == Placement::Together
    }

    pub(super) fn number(self) -> usize {
        self.stop.number() + if self.is_inside_node() { 3 } else { 0 }
    }
}

/// Something for each [`Stop`].
pub(super) type ByStop<T> = [Option<T>; 4];

/// Where the two ends are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Placement {
    /// On different nodes, or one of them on none; where no host endpoint has a say, anywhere.
    Apart,
    /// On the same node.
    Together,
}

/// How packets go from one class to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Way {
    /// By which addresses.
    pub family: IpVersion,
    /// Between which nodes.
    pub placement: Placement,
}

impl Way {
    /// All that there are.
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
pub(super) const FAMILIES: [IpVersion; 2] = [IpVersion::V4, IpVersion::V6];

pub(super) fn family_number(family: IpVersion) -> usize {
    match family {
        IpVersion::V4 => 0,
        IpVersion::V6 => 1,
    }
}

/// Something for each [`Way`] that there is.
pub(super) type ByWay<T> = [Option<T>; 4];

/// Some of the ways between two classes, for a reader: no word about what makes no difference.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    /// One family only.
    pub family: Option<IpVersion>,
    /// Only pairs on different nodes, or only pairs on the same.
    pub placement: Option<Placement>,
}

impl Scope {
    /// Whether the way is one of these.
    #[must_use]
    pub fn holds(self, way: Way) -> bool {
        self.family.is_none_or(|family| family == way.family)
            && self.placement.is_none_or(|placement| placement == way.placement)
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

/// These ways among all that there are, in as few scopes as possible.
pub(super) fn scopes(ways: &[Way], among: &[Way]) -> Vec<Scope> {
    if ways.len() == among.len() {
        return vec![Scope::default()];
    }
    let placements = [Placement::Apart, Placement::Together];
    let of_family = FAMILIES.map(|family| Scope { family: Some(family), placement: None });
    let of_placement = placements.map(|placement| Scope { family: None, placement: Some(placement) });
    let single = |way: &Way| Scope { family: Some(way.family), placement: Some(way.placement) };
    let candidates = of_family.into_iter().chain(of_placement).chain(ways.iter().map(single));
    let mut left = ways.to_vec();
    let mut chosen = Vec::new();
    for scope in candidates {
        let mut held = among.iter().filter(|way| scope.holds(**way)).peekable();
        if held.peek().is_some() && held.all(|way| left.contains(way)) {
            left.retain(|way| !scope.holds(*way));
            chosen.push(scope);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_word_about_what_makes_no_difference() {
        let [v4, v4_inside, v6, v6_inside] = Way::ALL;
        for (ways, among, expected) in [
            (vec![v4], vec![v4], ""),
            (vec![v4, v6], vec![v4, v6], ""),
            (vec![v6], vec![v4, v6], "IPv6"),
            (vec![v4_inside], vec![v4, v4_inside], "on one node"),
            (vec![v4, v6], Way::ALL.to_vec(), "between nodes"),
            (vec![v4, v4_inside], Way::ALL.to_vec(), "IPv4"),
            (vec![v4, v4_inside, v6], Way::ALL.to_vec(), "IPv4, IPv6 between nodes"),
            (vec![v4, v6_inside], Way::ALL.to_vec(), "IPv4 between nodes, IPv6 on one node"),
        ] {
            let scopes: Vec<String> = scopes(&ways, &among).iter().map(ToString::to_string).collect();
            assert_eq!(scopes.join(", "), expected, "{ways:?} among {among:?}");
        }
    }
}
