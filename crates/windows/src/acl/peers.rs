//! Addresses of peers, part of them by the names of sets whose members come and go.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use tortie_api::net::Protocol;
use tortie_hcn::Guid;
use tortie_policy::program::{Lookup, Member, SetId};

use super::numbers::Addresses;

/// What the identifiers of our sets begin with. Those of others on the same network are left alone.
pub const OUR_SETS: &str = "tortie-";

/// The space of our sets' identifiers.
const SPACE: Guid = Guid::from_bytes(*b"tortie-sets\0\0\0\0\0");

/// A set of addresses whose members come and go.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Named {
    /// The addresses of a set of networks.
    Nets(SetId),
    /// The addresses that a set has with this port (policy decision 25).
    Port(SetId, Protocol, u16),
}

/// Addresses that a rule names: spelled out, or by the name of a set.
#[derive(Debug, Clone)]
pub enum Term {
    /// These.
    Literal(Addresses),
    /// Those that the set has at the time.
    Named(Named),
}

/// Addresses that lie in all of some networks and sets, and in none of others. What holds of them whatever the members of
/// the sets are can be asked without knowing these.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peers {
    literal: Addresses,
    within: Arc<BTreeSet<Named>>,
    without: Arc<BTreeSet<Named>>,
}

impl Named {
    /// The members.
    pub fn addresses(&self, lookup: &impl Lookup) -> Addresses {
        let (Self::Nets(id) | Self::Port(id, ..)) = self;
        let nets = lookup.set(id).into_iter().flatten().filter_map(|member| match (self, member) {
            (Self::Nets(_), Member::Net(IpNet::V4(net))) => Some(*net),
            (
                Self::Port(_, protocol, port),
                Member::AddressPort { address: IpAddr::V4(address), protocol: its, port: its_port },
            ) if (protocol, port) == (its, its_port) => Some(Ipv4Net::from(*address)),
            _ => None,
        });
        Addresses::of_nets(nets)
    }
}

impl Term {
    /// A set by its name, or what it has now.
    pub fn of(named: Named, by_name: bool, lookup: &impl Lookup) -> Self {
        if by_name { Self::Named(named) } else { Self::Literal(named.addresses(lookup)) }
    }
}

impl Peers {
    /// Every address.
    pub fn all() -> Self {
        Addresses::all().into()
    }

    /// Whether every address is among them, whatever the members of the sets.
    pub fn is_all(&self) -> bool {
        self.literal.is_all() && self.is_literal()
    }

    /// Whether none is, whatever the members of the sets.
    pub fn is_empty(&self) -> bool {
        self.literal.is_empty() || !self.within.is_disjoint(&self.without)
    }

    /// Whether no set is named.
    pub fn is_literal(&self) -> bool {
        self.within.is_empty() && self.without.is_empty()
    }

    /// What is spelled out of them: all of them, where no set is named.
    pub fn literal(&self) -> &Addresses {
        &self.literal
    }

    /// What is in both.
    pub fn and(&self, other: &Self) -> Self {
        let joined = |mine: &Arc<BTreeSet<Named>>, theirs: &Arc<BTreeSet<Named>>| {
            if theirs.is_subset(mine) { mine.clone() } else { Arc::new(&**mine | &**theirs) }
        };
        Self {
            literal: self.literal.and(&other.literal),
            within: joined(&self.within, &other.within),
            without: joined(&self.without, &other.without),
        }
    }

    /// Those of them that the term has.
    pub fn among(mut self, term: &Term) -> Self {
        match term {
            Term::Literal(addresses) => self.literal = self.literal.and(addresses),
            Term::Named(named) => drop(Arc::make_mut(&mut self.within).insert(named.clone())),
        }
        self
    }

    /// Those of them that the term does not have.
    pub fn except(mut self, term: &Term) -> Self {
        match term {
            Term::Literal(addresses) => self.literal = self.literal.and(&addresses.not()),
            Term::Named(named) => drop(Arc::make_mut(&mut self.without).insert(named.clone())),
        }
        self
    }

    /// Whether the others surely have all of them.
    pub fn is_within(&self, other: &Self) -> bool {
        self.literal.is_within(&other.literal)
            && other.within.is_subset(&self.within)
            && other.without.is_subset(&self.without)
    }

    /// The addresses, as the sets are now.
    pub fn addresses(&self, lookup: &impl Lookup) -> Addresses {
        let within = self.within.iter().map(|named| named.addresses(lookup));
        let without = self.without.iter().map(|named| named.addresses(lookup).not());
        within.chain(without).fold(self.literal.clone(), |all, addresses| all.and(&addresses))
    }

    /// The identifier of the SetPolicy that has them: the same for the same words, whatever the members.
    pub fn set_id(&self) -> String {
        let id = Guid::derived(
            SPACE,
            &format!("{:?} {:?} {:?}", self.literal.ranges(), self.within, self.without),
        );
        let id: String = id.to_string().chars().filter(char::is_ascii_hexdigit).take(16).collect();
        format!("{OUR_SETS}{}", id.to_ascii_lowercase())
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

impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.literal.is_all() {
            let nets: Vec<String> = self.literal.to_nets().iter().map(Ipv4Net::to_string).collect();
            parts.push(nets.join(","));
        }
        parts.extend(self.within.iter().map(Named::to_string));
        parts.extend(self.without.iter().map(|named| format!("not {named}")));
        f.write_str(&parts.join(" and "))
    }
}
