//! The sets and maps of the table: their names, the types of their keys, and the keys themselves.

use tortie_kernel::nftables::{DataKind, Field, Key, SetSpec};
use tortie_services::{FrontendAddress, FrontendKey};

use crate::dataplane::sets::Family;

/// Where frontends are: at addresses of Services, or at ports of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Address,
    Node,
}

impl Place {
    pub(super) const ALL: [Self; 2] = [Self::Address, Self::Node];

    fn prefix(self) -> &'static str {
        match self {
            Self::Address => "",
            Self::Node => "node-",
        }
    }
}

/// The backends that a frontend leads to, in slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum List {
    /// Those of all senders; of external frontends with the policy Local, those of pods and of the node itself.
    Common,
    /// Those of all other senders, of external frontends with the policy Local.
    Outside,
}

impl List {
    pub(super) const ALL: [Self; 2] = [Self::Common, Self::Outside];
}

/// The kind of a set or a map. What is written first comes first: slots before the classes that count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Frontend and slot → backend.
    Slots(Place, List),
    /// The addresses of frontends.
    Addresses,
    /// The clusterIPs in use.
    ClusterIps,
    /// The networks of clusterIPs.
    ServiceCidrs,
    /// The networks of the node's addresses that accept node ports.
    NodeAddresses,
    /// The networks of this node's pods.
    Pods,
    /// The address of a local backend, twice.
    Itself,
    /// The networks that pass, each behind the number of a list of networks.
    Allowed,
    /// Frontend → the number of its list of networks.
    Ranges,
    /// The frontends at clusterIPs.
    Internal(Place),
    /// The external frontends with the policy Cluster.
    External(Place),
    /// The external frontends with the policy Local.
    Local(Place),
    /// The frontends without any backend.
    Rejected(Place),
    /// Frontend → class, for all senders.
    Class(Place),
    /// Frontend with the policy Local → class, for pods and the node itself.
    ClassInside(Place),
    /// Frontend with the policy Local → class, for all other senders.
    ClassOutside(Place),
    /// Frontend with session affinity → its [unit](super::affinity), for all senders.
    Affinity(Place),
    /// Such a frontend with the policy Local → its unit, for pods and the node itself.
    AffinityInside(Place),
    /// Such a frontend with the policy Local → its unit, for all other senders.
    AffinityOutside(Place),
    /// A unit with the address, protocol and port of one of its backends → the token of the backend.
    Tokens,
    /// Token → the backend.
    TokenBackends,
}

/// A set or a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SetId {
    pub(super) kind: Kind,
    pub(super) family: Family,
}

/// The map from a class to its chain.
pub(super) const CLASSES: &str = "classes";
/// The protocols of Services.
pub(super) const PROTOCOLS: &str = "protocols";

impl SetId {
    pub(super) fn new(kind: Kind, family: Family) -> Self {
        Self { kind, family }
    }

    /// All of them.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let places = Place::ALL.into_iter().flat_map(|place| {
            let slots = List::ALL.map(|list| Kind::Slots(place, list));
            let others = [
                Kind::Internal(place),
                Kind::External(place),
                Kind::Local(place),
                Kind::Rejected(place),
                Kind::Class(place),
                Kind::ClassInside(place),
                Kind::ClassOutside(place),
                Kind::Affinity(place),
                Kind::AffinityInside(place),
                Kind::AffinityOutside(place),
            ];
            slots.into_iter().chain(others)
        });
        let kinds = places.chain([
            Kind::Addresses,
            Kind::ClusterIps,
            Kind::ServiceCidrs,
            Kind::NodeAddresses,
            Kind::Pods,
            Kind::Itself,
            Kind::Allowed,
            Kind::Ranges,
            Kind::Tokens,
            Kind::TokenBackends,
        ]);
        kinds.flat_map(|kind| Family::ALL.map(|family| Self { kind, family }))
    }

    pub(super) fn name(self) -> String {
        let (prefix, name) = match self.kind {
            Kind::Slots(place, List::Common) => (place.prefix(), "slots"),
            Kind::Slots(place, List::Outside) => (place.prefix(), "outside-slots"),
            Kind::Addresses => ("", "addresses"),
            Kind::ClusterIps => ("", "cluster-ips"),
            Kind::ServiceCidrs => ("", "service-cidrs"),
            Kind::NodeAddresses => ("", "node-addresses"),
            Kind::Pods => ("", "pods"),
            Kind::Itself => ("", "itself"),
            Kind::Allowed => ("", "allowed"),
            Kind::Ranges => ("", "ranges"),
            Kind::Internal(place) => (place.prefix(), "internal"),
            Kind::External(place) => (place.prefix(), "external"),
            Kind::Local(place) => (place.prefix(), "local"),
            Kind::Rejected(place) => (place.prefix(), "rejected"),
            Kind::Class(place) => (place.prefix(), "class"),
            Kind::ClassInside(place) => (place.prefix(), "inside-class"),
            Kind::ClassOutside(place) => (place.prefix(), "outside-class"),
            Kind::Affinity(place) => (place.prefix(), "affinity"),
            Kind::AffinityInside(place) => (place.prefix(), "inside-affinity"),
            Kind::AffinityOutside(place) => (place.prefix(), "outside-affinity"),
            Kind::Tokens => ("", "tokens"),
            Kind::TokenBackends => ("", "token-backends"),
        };
        format!("{prefix}{name}{}", digit(self.family))
    }

    pub(super) fn spec(self) -> SetSpec {
        let address = self.family.field();
        let frontend = |place| match place {
            Place::Address => vec![address, Field::Protocol, Field::Port],
            Place::Node => vec![Field::Protocol, Field::Port],
        };
        let socket = match self.family {
            Family::V4 => DataKind::Ipv4Port,
            Family::V6 => DataKind::Ipv6Port,
        };
        match self.kind {
            Kind::Slots(place, _) => SetSpec::map(&[frontend(place), vec![Field::Random]].concat(), socket),
            Kind::TokenBackends => SetSpec::map(&[Field::Priority], socket),
            Kind::Tokens => {
                SetSpec::map(&[vec![Field::Priority], frontend(Place::Address)].concat(), DataKind::Priority)
            }
            Kind::Addresses | Kind::ClusterIps => SetSpec::hash(&[address]),
            Kind::Pods | Kind::ServiceCidrs | Kind::NodeAddresses => SetSpec::interval(&[address]),
            Kind::Itself => SetSpec::hash(&[address, address]),
            Kind::Allowed => SetSpec::interval(&[Field::Priority, address]),
            Kind::Ranges => SetSpec::map(&frontend(Place::Address), DataKind::Priority),
            Kind::Internal(place) | Kind::External(place) | Kind::Local(place) | Kind::Rejected(place) => {
                SetSpec::hash(&frontend(place))
            }
            Kind::Class(place)
            | Kind::ClassInside(place)
            | Kind::ClassOutside(place)
            | Kind::Affinity(place)
            | Kind::AffinityInside(place)
            | Kind::AffinityOutside(place) => SetSpec::map(&frontend(place), DataKind::Priority),
        }
    }
}

pub(super) fn digit(family: Family) -> char {
    match family {
        Family::V4 => '4',
        Family::V6 => '6',
    }
}

/// The number of slots of a frontend's list: a priority that no packet has to a Service otherwise. Each class has a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotClass {
    pub(super) family: Family,
    pub(super) place: Place,
    pub(super) list: List,
    /// At least 1. No Service has more backends than that.
    pub(super) slots: u16,
}

impl SlotClass {
    /// The class of a list with so many backends; none without any. Backends beyond the highest number get no connections.
    pub(super) fn of(family: Family, place: Place, list: List, backends: usize) -> Option<Self> {
        let slots = backends.min(usize::from(u16::MAX)) as u16;
        (slots > 0).then_some(Self { family, place, list, slots })
    }

    /// The priority that stands for it: the list, then the number of slots.
    pub(super) fn number(self) -> u32 {
        let list = 1
            + u32::from(self.family == Family::V6)
            + 2 * u32::from(self.place == Place::Node)
            + 4 * u32::from(self.list == List::Outside);
        list << 16 | u32::from(self.slots)
    }

    /// The class of a priority.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        let list = (number >> 16).checked_sub(1).filter(|list| *list < 8)?;
        let family = Family::ALL[usize::from(list & 1 != 0)];
        let place = Place::ALL[usize::from(list & 2 != 0)];
        Self::of(family, place, List::ALL[usize::from(list & 4 != 0)], (number & 0xffff) as usize)
    }

    pub(super) fn chain(self) -> String {
        let list = match self.list {
            List::Common => "to",
            List::Outside => "outside-to",
        };
        format!("{}{list}{}-{}", self.place.prefix(), digit(self.family), self.slots)
    }
}

/// The place and the family of a frontend.
pub(super) fn place(key: &FrontendKey) -> (Place, Family) {
    match key.address {
        FrontendAddress::Address(address) => (Place::Address, Family::of(address)),
        FrontendAddress::NodePort(version) => (Place::Node, family(version)),
    }
}

pub(super) fn family(version: tortie_api::net::IpVersion) -> Family {
    match version {
        tortie_api::net::IpVersion::V4 => Family::V4,
        tortie_api::net::IpVersion::V6 => Family::V6,
    }
}

/// The key of a frontend.
pub(super) fn frontend_key(key: &FrontendKey) -> Key {
    match key.address {
        FrontendAddress::Address(address) => Key::address_port(address, key.protocol.0, key.port),
        FrontendAddress::NodePort(_) => Key::protocol_port(key.protocol.0, key.port),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_and_numbers_differ() {
        let ids: Vec<_> = SetId::all().collect();
        let names: BTreeSet<_> = ids.iter().map(|id| id.name()).collect();
        assert_eq!(names.len(), ids.len());
        let mut chains = BTreeSet::new();
        for family in Family::ALL {
            for place in Place::ALL {
                for list in List::ALL {
                    let class = SlotClass::of(family, place, list, 3).unwrap();
                    assert_eq!(SlotClass::from_number(class.number()), Some(class));
                    chains.insert(class.chain());
                }
            }
        }
        assert_eq!(chains.len(), 8);
        for number in [0, 3, 0x1_0000, 0x9_0001, u32::MAX] {
            assert_eq!(SlotClass::from_number(number), None, "{number:x}");
        }
        assert_eq!(SlotClass::of(Family::V4, Place::Node, List::Common, 0), None);
    }
}
