//! Addresses of peers, partly by the names of sets with changing members.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::net::{IpVersion, Protocol};
use tortie_hcn::Guid;
use tortie_policy::program::{Lookup, Member, SetId};

use super::ranges::Addresses;

/// The prefix of the identifiers of Tortie's sets. Other sets on the same network are left alone.
pub(crate) const OUR_SETS: &str = "tortie-";

/// The GUID namespace of Tortie's set identifiers.
const SPACE: Guid = Guid::from_bytes(*b"tortie-sets\0\0\0\0\0");

/// A set of addresses with changing members.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Named {
    /// The addresses of a set of networks.
    Nets(SetId),
    /// The addresses of a set with this port (policy decision 25).
    Port(SetId, Protocol, u16),
}

/// Addresses in a rule: listed, or by the name of a set.
#[derive(Debug, Clone)]
pub(crate) enum Term {
    /// These addresses.
    Literal(Addresses),
    /// The current members of the set.
    Named(Named),
}

/// The intersection of some networks and sets of one family, without others. Properties that hold for any members of the sets can
/// be checked without knowing the members.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Peers {
    literal: Addresses,
    within: Arc<BTreeSet<Named>>,
    without: Arc<BTreeSet<Named>>,
}

impl Named {
    /// The members of one family.
    pub(crate) fn addresses(&self, family: IpVersion, lookup: &impl Lookup) -> Addresses {
        let (Self::Nets(id) | Self::Port(id, ..)) = self;
        let nets = lookup.set(id).into_iter().flatten().filter_map(|member| match (self, member) {
            (Self::Nets(_), Member::Net(net)) => Some(*net),
            (
                Self::Port(_, protocol, port),
                Member::AddressPort { address, protocol: its, port: its_port },
            ) if (protocol, port) == (its, its_port) => Some(IpNet::from(*address)),
            _ => None,
        });
        Addresses::of_nets(family, nets)
    }
}

impl Peers {
    /// Every address.
    pub(crate) fn all() -> Self {
        Addresses::all().into()
    }

    /// Whether it contains every address, whatever the members of the sets.
    pub(crate) fn is_all(&self) -> bool {
        self.literal.is_all() && self.is_literal()
    }

    /// Whether it is empty, whatever the members of the sets.
    pub(crate) fn is_empty(&self) -> bool {
        self.literal.is_empty() || !self.within.is_disjoint(&self.without)
    }

    /// Whether it names no set.
    pub(crate) fn is_literal(&self) -> bool {
        self.within.is_empty() && self.without.is_empty()
    }

    /// The listed addresses: all of them, if no set is named.
    pub(crate) fn literal(&self) -> &Addresses {
        &self.literal
    }

    /// The intersection of both.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let joined = |mine: &Arc<BTreeSet<Named>>, theirs: &Arc<BTreeSet<Named>>| {
            if theirs.is_subset(mine) { mine.clone() } else { Arc::new(&**mine | &**theirs) }
        };
        Self {
            literal: self.literal.and(&other.literal),
            within: joined(&self.within, &other.within),
            without: joined(&self.without, &other.without),
        }
    }

    /// The part that is in the term.
    pub(crate) fn among(mut self, term: &Term) -> Self {
        match term {
            Term::Literal(addresses) => self.literal = self.literal.and(addresses),
            Term::Named(named) => drop(Arc::make_mut(&mut self.within).insert(named.clone())),
        }
        self
    }

    /// The part that is not in the term.
    pub(crate) fn except(mut self, term: &Term) -> Self {
        match term {
            Term::Literal(addresses) => self.literal = self.literal.and(&addresses.not()),
            Term::Named(named) => drop(Arc::make_mut(&mut self.without).insert(named.clone())),
        }
        self
    }

    /// Whether it is certainly a subset of the other.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.literal.is_within(&other.literal)
            && other.within.is_subset(&self.within)
            && other.without.is_subset(&self.without)
    }

    /// The addresses with the current members of the sets.
    pub(crate) fn addresses(&self, family: IpVersion, lookup: &impl Lookup) -> Addresses {
        let within = self.within.iter().map(|named| named.addresses(family, lookup));
        let without = self.without.iter().map(|named| named.addresses(family, lookup).not());
        within.chain(without).fold(self.literal.clone(), |all, addresses| all.and(&addresses))
    }

    /// The identifier of the SetPolicy for it, which depends on the family and the formula, and not on the members.
    pub(crate) fn set_id(&self, family: IpVersion) -> String {
        let id = Guid::derived(
            SPACE,
            &format!("{family:?} {:?} {:?} {:?}", self.literal.ranges(), self.within, self.without),
        );
        let id: String = id.to_string().chars().filter(char::is_ascii_hexdigit).take(16).collect();
        format!("{OUR_SETS}{}", id.to_ascii_lowercase())
    }
}

impl Peers {
    /// A description for users.
    pub(crate) fn describe(&self, family: IpVersion) -> String {
        let mut parts = Vec::new();
        if !self.literal.is_all() {
            let nets: Vec<String> = self.literal.to_nets(family).iter().map(IpNet::to_string).collect();
            parts.push(nets.join(","));
        }
        parts.extend(self.within.iter().map(Named::to_string));
        parts.extend(self.without.iter().map(|named| format!("not {named}")));
        parts.join(" and ")
    }
}

impl From<Addresses> for Peers {
    fn from(literal: Addresses) -> Self {
        Self { literal, within: Arc::default(), without: Arc::default() }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nets(id) => write!(f, "{id}"),
            Self::Port(id, protocol, port) => write!(f, "{id} {protocol}/{port}"),
        }
    }
}
