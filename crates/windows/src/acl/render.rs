//! Writes rows as ACLs: lists of addresses and ports in HNS's form, or the identifiers of sets.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::net::IpVersion;
use tortie_hcn::schema::{Acl, AclDirection};
use tortie_hcn::selftest::NOBODY;
use tortie_policy::program::Lookup;

use super::any;
use super::decision_rows::Row;
use super::peers::Peers;
use super::ranges::{Addresses, Number, Numbers, Ports};

/// The maximum number of addresses or ports in one ACL (docs/hns.md, ACLs).
pub(crate) const CHUNK: usize = 4000;
/// The maximum number of addresses in one set: together with as many new ones, before old ones are removed, it is no
/// larger than the limit of an ACL.
const CHUNK_OF_SET: usize = CHUNK / 2;

/// A set of addresses in HNS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Set {
    /// Its identifier.
    pub id: String,
    /// A description for users.
    pub name: String,
    /// Its addresses, all of one family.
    addresses: Addresses,
    /// The addresses in HNS's form.
    pub values: BTreeSet<String>,
}

/// Addresses of a family, and their lists for ACLs.
type Lists = HashMap<(IpVersion, Addresses), Arc<[String]>>;

/// The sets requested so far.
pub(crate) struct Sets<'a, L> {
    lookup: &'a L,
    made: RefCell<BTreeMap<String, Arc<[Set]>>>,
    /// Addresses as lists for ACLs, cached because endpoints with the same policies have the same lists.
    lists: RefCell<Lists>,
}

impl<'a, L: Lookup> Sets<'a, L> {
    /// Sets with the members from `lookup`.
    pub(crate) fn new(lookup: &'a L) -> Self {
        Self { lookup, made: RefCell::default(), lists: RefCell::default() }
    }

    /// The peers as sets: one, or as many as necessary.
    fn of(&self, peers: &Peers, family: IpVersion) -> Arc<[Set]> {
        let id = peers.set_id(family);
        let mut made = self.made.borrow_mut();
        Arc::clone(made.entry(id.clone()).or_insert_with(|| sets(&id, peers, family, self.lookup)))
    }

    /// The addresses as lists for ACLs.
    fn lists(&self, addresses: &Addresses, family: IpVersion) -> Arc<[String]> {
        let key = (family, addresses.clone());
        if let Some(lists) = self.lists.borrow().get(&key) {
            return Arc::clone(lists);
        }
        let lists: Arc<[String]> = address_lists(addresses, family).into();
        self.lists.borrow_mut().insert(key, Arc::clone(&lists));
        lists
    }

    /// The requested sets with these identifiers.
    pub(crate) fn named(&self, ids: &BTreeSet<String>) -> Vec<Set> {
        let made = self.made.borrow();
        made.values().flat_map(|sets| &**sets).filter(|set| ids.contains(&set.id)).cloned().collect()
    }
}

fn sets(id: &str, peers: &Peers, family: IpVersion, lookup: &impl Lookup) -> Arc<[Set]> {
    /// A name is for users; HNS need not store a longer one.
    const MAX_NAME_LENGTH: usize = 200;
    let nets = peers.addresses(family, lookup).to_nets(family);
    let mut name = peers.describe(family);
    name.truncate(name.floor_char_boundary(MAX_NAME_LENGTH));
    // One of them always exists, even without members.
    let chunks = if nets.is_empty() { vec![&[][..]] } else { nets.chunks(CHUNK_OF_SET).collect() };
    let set = |(number, nets): (usize, &[IpNet])| {
        let values: BTreeSet<String> = nets.iter().map(text).collect();
        Set {
            id: if number == 0 { id.to_owned() } else { format!("{id}-{number}") },
            name: name.clone(),
            addresses: Addresses::of_nets(family, nets.iter().copied()),
            values: if values.is_empty() { [NOBODY.to_owned()].into() } else { values },
        }
    };
    chunks.into_iter().enumerate().map(set).collect()
}

/// Converts rows of one direction to the ACLs of an endpoint.
pub(super) struct AclRenderer<'a, L> {
    /// The direction of the packets.
    pub direction: AclDirection,
    /// The family of the rows.
    pub family: IpVersion,
    /// The endpoint's own addresses of this family.
    pub own: &'a Addresses,
    /// Whether rows about everyone must name their family.
    pub names_family: bool,
    /// The sets that may be named.
    pub sets: &'a Sets<'a, L>,
}

impl<L: Lookup> AclRenderer<'_, L> {
    /// The ACLs of a row, without priorities. If the row's peers can be named, `spell_out` gets the ACLs with set
    /// names and returns whether addresses must be listed instead.
    pub(super) fn acls(&self, row: &Row, spell_out: &dyn Fn(&[Acl]) -> bool) -> Vec<Acl> {
        let peers = &row.remote.addresses;
        if peers.is_literal() {
            return self.spelled_out(row, peers.literal());
        }
        self.by_name(row)
            .filter(|acls| !spell_out(acls))
            .unwrap_or_else(|| self.spelled_out(row, &peers.addresses(self.family, self.sets.lookup)))
    }

    fn spelled_out(&self, row: &Row, peers: &Addresses) -> Vec<Acl> {
        let local = row.local.addresses.literal();
        // An ACL without addresses concerns both families.
        let must_name = self.names_family && peers.is_all();
        let local = if local.is_all() && must_name { self.own } else { local };
        let local = self.sets.lists(local, self.family);
        let remote = self.sets.lists(peers, self.family);
        let pairs =
            local.iter().flat_map(|local| remote.iter().map(move |remote| (local.clone(), remote.clone())));
        self.with_ports(row, pairs.collect())
    }

    /// The ACLs that name the sets of the peers, with the same meaning in each interpretation of HNS. Two
    /// interpretations are known for a set in an ACL about packets to the endpoint (docs/hns.md, ACLs): Local is the
    /// endpoint and Remote its peer, as with addresses; or Local is the source and Remote the destination. If the
    /// endpoint is not in the set, there is one ACL for each interpretation, which matches nothing in the other one.
    /// If it is, one ACL names the set on both sides and is right in both. For packets from the endpoint, the peer is
    /// in Remote in both interpretations.
    ///
    /// `None` if only some of the endpoint's addresses are in a set.
    fn by_name(&self, row: &Row) -> Option<Vec<Acl>> {
        if !row.local.addresses.is_all() {
            return None;
        }
        let mut pairs = Vec::new();
        for set in self.sets.of(&row.remote.addresses, self.family).iter() {
            let (nobody, id) = (String::new, || set.id.clone());
            match (&self.direction, self.own.and(&set.addresses)) {
                (AclDirection::In, own) if own.is_empty() => {
                    pairs.extend([(nobody(), id()), (id(), nobody())])
                }
                (AclDirection::In, own) if own == *self.own => pairs.push((id(), id())),
                (AclDirection::In, _) => return None,
                _ => pairs.push((nobody(), id())),
            }
        }
        Some(self.with_ports(row, pairs))
    }

    /// An ACL for each pair of local and remote addresses, and each pair of ports.
    fn with_ports(&self, row: &Row, addresses: Vec<(String, String)>) -> Vec<Acl> {
        let (local_ports, remote_ports) = (port_lists(&row.local.ports), port_lists(&row.remote.ports));
        let mut acls = Vec::new();
        for (local_addresses, remote_addresses) in addresses {
            for local_ports in &local_ports {
                for remote_ports in &remote_ports {
                    acls.push(Acl {
                        protocols: row.protocol.to_string(),
                        local_addresses: local_addresses.clone(),
                        remote_addresses: remote_addresses.clone(),
                        local_ports: local_ports.clone(),
                        remote_ports: remote_ports.clone(),
                        ..any(row.action.clone(), self.direction.clone(), 0, &row.origin)
                    });
                }
            }
        }
        acls
    }
}

/// The network in HNS's form; for a single address, the address.
pub(crate) fn text(net: &IpNet) -> String {
    if net.prefix_len() == net.max_prefix_len() { net.addr().to_string() } else { net.to_string() }
}

fn address_lists(addresses: &Addresses, family: IpVersion) -> Vec<String> {
    lists(addresses, |addresses| addresses.to_nets(family).iter().map(text).collect())
}

/// The ports as lists for ACLs.
pub(crate) fn port_lists(ports: &Ports) -> Vec<String> {
    lists(ports, |ports| {
        let text = |(first, last): &(u16, u16)| {
            let mut text = first.to_string();
            if first != last {
                // Writing to a string does not fail.
                let _ = write!(text, "-{last}");
            }
            text
        };
        ports.ranges().iter().map(text).collect()
    })
}

/// Comma-separated lists of at most [`CHUNK`] items. Everything is one empty list; nothing is no list.
fn lists<N: Number>(numbers: &Numbers<N>, items: impl FnOnce(&Numbers<N>) -> Vec<String>) -> Vec<String> {
    if numbers.is_all() {
        return vec![String::new()];
    }
    items(numbers).chunks(CHUNK).map(|chunk| chunk.join(",")).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    #[test]
    fn long_lists_are_split_and_all_addresses_are_an_empty_list() {
        let family = IpVersion::V4;
        assert_eq!(address_lists(&Addresses::all(), family), [""]);
        assert_eq!(address_lists(&Addresses::all().not(), family), [""; 0]);
        let scattered = Addresses::of(family, (0..8001_u32).map(|i| IpAddr::V4(Ipv4Addr::from(i * 2))));
        let lists = address_lists(&scattered, family);
        let lengths: Vec<usize> = lists.iter().map(|list| list.split(',').count()).collect();
        assert_eq!(lengths, [4000, 4000, 1]);
        assert!(lists[0].starts_with("0.0.0.0,0.0.0.2,"));
        let ports = Ports::from_ranges(vec![(80, 80), (8000, 8080), (0, 0)]);
        assert_eq!(port_lists(&ports), ["0,80,8000-8080"]);
    }
}
