//! Address families (RFC 4760). Tortie speaks unicast of IPv4 and IPv6.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// A family of routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4 unicast (AFI 1, SAFI 1).
    Ipv4,
    /// IPv6 unicast (AFI 2, SAFI 1).
    Ipv6,
}

/// The unicast subsequent address family.
const UNICAST: u8 = 1;

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    /// The family with these numbers, if Tortie speaks it.
    #[must_use]
    pub fn from_numbers(afi: u16, safi: u8) -> Option<Self> {
        match (afi, safi) {
            (1, UNICAST) => Some(Self::Ipv4),
            (2, UNICAST) => Some(Self::Ipv6),
            _ => None,
        }
    }

    /// The address family identifier.
    #[must_use]
    pub fn afi(self) -> u16 {
        match self {
            Self::Ipv4 => 1,
            Self::Ipv6 => 2,
        }
    }

    /// The subsequent address family identifier.
    #[must_use]
    pub fn safi(self) -> u8 {
        UNICAST
    }

    /// The family of a prefix.
    #[must_use]
    pub fn of(prefix: &IpNet) -> Self {
        if prefix.addr().is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    /// The family of an address.
    #[must_use]
    pub fn of_address(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    /// The length of an address in bits.
    #[must_use]
    pub fn bits(self) -> u8 {
        match self {
            Self::Ipv4 => 32,
            Self::Ipv6 => 128,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// A set of families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Families {
    ipv4: bool,
    ipv6: bool,
}

impl Families {
    /// Both families.
    pub const BOTH: Self = Self { ipv4: true, ipv6: true };

    /// Whether the family is in the set.
    #[must_use]
    pub fn contains(self, family: Family) -> bool {
        match family {
            Family::Ipv4 => self.ipv4,
            Family::Ipv6 => self.ipv6,
        }
    }

    /// Adds a family.
    pub fn insert(&mut self, family: Family) {
        match family {
            Family::Ipv4 => self.ipv4 = true,
            Family::Ipv6 => self.ipv6 = true,
        }
    }

    /// Removes a family, and says whether it was there.
    pub fn remove(&mut self, family: Family) -> bool {
        let was = self.contains(family);
        match family {
            Family::Ipv4 => self.ipv4 = false,
            Family::Ipv6 => self.ipv6 = false,
        }
        was
    }

    /// The families in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { ipv4: self.ipv4 && other.ipv4, ipv6: self.ipv6 && other.ipv6 }
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        !self.ipv4 && !self.ipv6
    }

    /// The families in it, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(move |family| self.contains(*family))
    }
}

impl FromIterator<Family> for Families {
    fn from_iter<T: IntoIterator<Item = Family>>(families: T) -> Self {
        let mut set = Self::default();
        families.into_iter().for_each(|family| set.insert(family));
        set
    }
}
