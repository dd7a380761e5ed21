//! The attributes of a route, and how they are written.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::as_path::{AS_TRANS, AsPath};
use super::community::{Community, LargeCommunity};
use super::wire::with_u16_length;

/// Where a route comes from (RFC 4271 5.1.1); lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Origin {
    /// From within its autonomous system.
    #[default]
    Igp,
    /// By the Exterior Gateway Protocol.
    Egp,
    /// In another way.
    Incomplete,
}

impl Origin {
    /// The value on the wire.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Igp => 0,
            Self::Egp => 1,
            Self::Incomplete => 2,
        }
    }

    pub(super) fn from_number(number: u8) -> Option<Self> {
        [Self::Igp, Self::Egp, Self::Incomplete].into_iter().find(|origin| origin.number() == number)
    }
}

/// The next router of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NextHop {
    /// Its address.
    pub address: IpAddr,
    /// Its address on a link that both ends share (RFC 2545).
    pub link_local: Option<Ipv6Addr>,
}

impl From<IpAddr> for NextHop {
    fn from(address: IpAddr) -> Self {
        Self { address, link_local: None }
    }
}

/// Who aggregated a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Aggregator {
    /// The autonomous system.
    pub as_number: u32,
    /// The BGP identifier.
    pub identifier: Ipv4Addr,
}

/// An optional transitive attribute that Tortie does not know, which it passes on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnknownAttribute {
    /// Its type.
    pub kind: u8,
    /// Its value.
    pub value: Vec<u8>,
}

/// The attributes of a route.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are those of the standards")]
pub struct Attributes {
    pub next_hop: NextHop,
    pub origin: Origin,
    pub as_path: AsPath,
    pub med: Option<u32>,
    pub local_pref: Option<u32>,
    pub atomic_aggregate: bool,
    pub aggregator: Option<Aggregator>,
    pub communities: Vec<Community>,
    pub extended_communities: Vec<[u8; 8]>,
    pub large_communities: Vec<LargeCommunity>,
    pub originator_id: Option<Ipv4Addr>,
    pub cluster_list: Vec<Ipv4Addr>,
    pub unknown: Vec<UnknownAttribute>,
    /// The types of known attributes that a router on the way has passed on without knowing them (the partial bit).
    pub partial: BTreeSet<u8>,
}

impl Attributes {
    /// The attributes of a route with this next hop, everything else empty.
    #[must_use]
    pub fn new(next_hop: impl Into<NextHop>) -> Self {
        Self {
            next_hop: next_hop.into(),
            origin: Origin::Igp,
            as_path: AsPath::default(),
            med: None,
            local_pref: None,
            atomic_aggregate: false,
            aggregator: None,
            communities: Vec::new(),
            extended_communities: Vec::new(),
            large_communities: Vec::new(),
            originator_id: None,
            cluster_list: Vec::new(),
            unknown: Vec::new(),
            partial: BTreeSet::new(),
        }
    }
}

impl Attributes {
    /// About how many bytes they need in a message.
    pub(crate) fn weight(&self) -> usize {
        let unknown: usize = self.unknown.iter().map(|attribute| attribute.value.len() + 4).sum();
        let numbers = self.as_path.numbers().count() + self.communities.len() + self.cluster_list.len();
        64 + 4 * numbers + 8 * self.extended_communities.len() + 12 * self.large_communities.len() + unknown
    }
}

/// The types of attributes.
pub(super) mod kind {
    pub(crate) const ORIGIN: u8 = 1;
    pub(crate) const AS_PATH: u8 = 2;
    pub(crate) const NEXT_HOP: u8 = 3;
    pub(crate) const MED: u8 = 4;
    pub(crate) const LOCAL_PREF: u8 = 5;
    pub(crate) const ATOMIC_AGGREGATE: u8 = 6;
    pub(crate) const AGGREGATOR: u8 = 7;
    pub(crate) const COMMUNITIES: u8 = 8;
    pub(crate) const ORIGINATOR_ID: u8 = 9;
    pub(crate) const CLUSTER_LIST: u8 = 10;
    pub(crate) const MP_REACH: u8 = 14;
    pub(crate) const MP_UNREACH: u8 = 15;
    pub(crate) const EXTENDED_COMMUNITIES: u8 = 16;
    pub(crate) const AS4_PATH: u8 = 17;
    pub(crate) const AS4_AGGREGATOR: u8 = 18;
    pub(crate) const LARGE_COMMUNITIES: u8 = 32;
}

/// The flags of attributes.
pub(super) mod flag {
    pub(crate) const OPTIONAL: u8 = 0x80;
    pub(crate) const TRANSITIVE: u8 = 0x40;
    pub(crate) const PARTIAL: u8 = 0x20;
    pub(crate) const EXTENDED_LENGTH: u8 = 0x10;
}

const WELL_KNOWN: u8 = flag::TRANSITIVE;
const OPTIONAL: u8 = flag::OPTIONAL;
const TRANSITIVE: u8 = flag::OPTIONAL | flag::TRANSITIVE;

/// Writes one attribute.
pub(super) fn attribute(out: &mut Vec<u8>, flags: u8, kind: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let mut value = Vec::new();
    write(&mut value);
    match u8::try_from(value.len()) {
        Ok(length) => out.extend([flags, kind, length]),
        Err(_) => {
            out.extend([flags | flag::EXTENDED_LENGTH, kind]);
            with_u16_length(out, |out| out.extend(&value));
            return;
        }
    }
    out.extend(value);
}

/// Writes all attributes except for the prefixes and for next hops in MP_REACH_NLRI, in the order of their types.
pub(super) fn encode(attributes: &Attributes, classic_next_hop: bool, four_octet: bool, out: &mut Vec<u8>) {
    let Attributes {
        next_hop,
        origin,
        as_path,
        med,
        local_pref,
        atomic_aggregate,
        aggregator,
        communities,
        extended_communities,
        large_communities,
        originator_id,
        cluster_list,
        unknown,
        partial,
    } = attributes;
    let transitive = |kind: u8| if partial.contains(&kind) { TRANSITIVE | flag::PARTIAL } else { TRANSITIVE };
    attribute(out, WELL_KNOWN, kind::ORIGIN, |out| out.push(origin.number()));
    attribute(out, WELL_KNOWN, kind::AS_PATH, |out| as_path.encode(four_octet, out));
    if classic_next_hop && let IpAddr::V4(address) = next_hop.address {
        attribute(out, WELL_KNOWN, kind::NEXT_HOP, |out| out.extend(address.octets()));
    }
    if let Some(med) = med {
        attribute(out, OPTIONAL, kind::MED, |out| out.extend(med.to_be_bytes()));
    }
    if let Some(preference) = local_pref {
        attribute(out, WELL_KNOWN, kind::LOCAL_PREF, |out| out.extend(preference.to_be_bytes()));
    }
    if *atomic_aggregate {
        attribute(out, WELL_KNOWN, kind::ATOMIC_AGGREGATE, |_| {});
    }
    if let Some(aggregator) = aggregator {
        encode_aggregator(*aggregator, transitive(kind::AGGREGATOR), four_octet, out);
    }
    if !communities.is_empty() {
        attribute(out, transitive(kind::COMMUNITIES), kind::COMMUNITIES, |out| {
            communities.iter().for_each(|community| out.extend(community.0.to_be_bytes()));
        });
    }
    if let Some(originator) = originator_id {
        attribute(out, OPTIONAL, kind::ORIGINATOR_ID, |out| out.extend(originator.octets()));
    }
    if !cluster_list.is_empty() {
        attribute(out, OPTIONAL, kind::CLUSTER_LIST, |out| {
            cluster_list.iter().for_each(|cluster| out.extend(cluster.octets()));
        });
    }
    if !extended_communities.is_empty() {
        attribute(out, transitive(kind::EXTENDED_COMMUNITIES), kind::EXTENDED_COMMUNITIES, |out| {
            extended_communities.iter().for_each(|community| out.extend(community));
        });
    }
    if !four_octet && as_path.needs_four_octets() {
        let path = as_path.without_confederations();
        attribute(out, TRANSITIVE, kind::AS4_PATH, |out| path.encode(true, out));
    }
    if !large_communities.is_empty() {
        attribute(out, transitive(kind::LARGE_COMMUNITIES), kind::LARGE_COMMUNITIES, |out| {
            for number in large_communities.iter().flat_map(|c| [c.0, c.1, c.2]) {
                out.extend(number.to_be_bytes());
            }
        });
    }
    for UnknownAttribute { kind, value } in unknown {
        attribute(out, TRANSITIVE | flag::PARTIAL, *kind, |out| out.extend(value));
    }
}

fn encode_aggregator(aggregator: Aggregator, flags: u8, four_octet: bool, out: &mut Vec<u8>) {
    let Aggregator { as_number, identifier } = aggregator;
    let four = |out: &mut Vec<u8>| {
        out.extend(as_number.to_be_bytes());
        out.extend(identifier.octets());
    };
    if four_octet {
        return attribute(out, flags, kind::AGGREGATOR, four);
    }
    let two = u16::try_from(as_number);
    attribute(out, flags, kind::AGGREGATOR, |out| {
        out.extend(two.unwrap_or(AS_TRANS).to_be_bytes());
        out.extend(identifier.octets());
    });
    if two.is_err() {
        attribute(out, flags, kind::AS4_AGGREGATOR, four);
    }
}
