//! Rows as ACLs: lists of addresses and ports as HNS reads them, or the identifiers of sets.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::Arc;

use ipnet::Ipv4Net;
use tortie_hcn::schema::{Acl, AclDirection};
use tortie_policy::program::Lookup;

use super::any;
use super::numbers::{Addresses, Numbers, Ports};
use super::peers::Peers;
use super::rows::Row;

/// The most addresses or ports in one ACL (docs/hns.md, ACLs).
pub const CHUNK: usize = 4000;
/// The most addresses in one set: with as many that come, before others go, it has no more than an ACL.
const CHUNK_OF_SET: usize = CHUNK / 2;

/// What stands in a set without members (policy decision 25): an address that no packet has.
const NOBODY: &str = "240.0.0.0";

/// A set of addresses as HNS has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its identifier.
    pub id: String,
    /// What it is, for people.
    pub name: String,
    /// Its addresses.
    addresses: Addresses,
    /// The same, as HNS reads them.
    pub values: BTreeSet<String>,
}

/// The sets that have been asked for.
pub struct Sets<'a, L> {
    lookup: &'a L,
    made: RefCell<BTreeMap<String, Arc<[Set]>>>,
    /// Addresses as lists for ACLs: endpoints under the same policies have the same.
    lists: RefCell<HashMap<Addresses, Arc<[String]>>>,
}

impl<'a, L: Lookup> Sets<'a, L> {
    /// Sets with the members that `lookup` knows.
    pub fn new(lookup: &'a L) -> Self {
        Self { lookup, made: RefCell::default(), lists: RefCell::default() }
    }

    /// The peers as sets: one, or as many as it takes.
    fn of(&self, peers: &Peers) -> Arc<[Set]> {
        let id = peers.set_id();
        let mut made = self.made.borrow_mut();
        Arc::clone(made.entry(id.clone()).or_insert_with(|| sets(&id, peers, self.lookup)))
    }

    /// The addresses as lists for ACLs.
    fn lists(&self, addresses: &Addresses) -> Arc<[String]> {
        if let Some(lists) = self.lists.borrow().get(addresses) {
            return Arc::clone(lists);
        }
        let lists: Arc<[String]> = address_lists(addresses).into();
        self.lists.borrow_mut().insert(addresses.clone(), Arc::clone(&lists));
        lists
    }

    /// Those that were asked for and have one of these identifiers.
    pub fn named(&self, ids: &BTreeSet<String>) -> Vec<Set> {
        let made = self.made.borrow();
        made.values().flat_map(|sets| &**sets).filter(|set| ids.contains(&set.id)).cloned().collect()
    }
}

fn sets(id: &str, peers: &Peers, lookup: &impl Lookup) -> Arc<[Set]> {
    /// A name is for people; HNS need not keep more of it.
    const LONGEST_NAME: usize = 200;
    let nets = peers.addresses(lookup).to_nets();
    let mut name = peers.to_string();
    name.truncate(name.floor_char_boundary(LONGEST_NAME));
    // One of them stays, whatever becomes of the members.
    let chunks = if nets.is_empty() { vec![&[][..]] } else { nets.chunks(CHUNK_OF_SET).collect() };
    let set = |(number, nets): (usize, &[Ipv4Net])| {
        let values: BTreeSet<String> = nets.iter().map(text).collect();
        Set {
            id: if number == 0 { id.to_owned() } else { format!("{id}-{number}") },
            name: name.clone(),
            addresses: Addresses::of_nets(nets.iter().copied()),
            values: if values.is_empty() { [NOBODY.to_owned()].into() } else { values },
        }
    };
    chunks.into_iter().enumerate().map(set).collect()
}

/// How rows of one direction become the ACLs of an endpoint.
pub struct Speller<'a, L> {
    /// Which way packets go.
    pub direction: AclDirection,
    /// The endpoint's own addresses.
    pub own: &'a Addresses,
    /// The sets that may be named.
    pub sets: &'a Sets<'a, L>,
}

impl<L: Lookup> Speller<'_, L> {
    /// The ACLs of a row, without priorities. Where the row's peers have names, `spell_out` is asked, with the ACLs that
    /// name their sets, whether they must be spelled out.
    pub fn acls(&self, row: &Row, spell_out: &dyn Fn(&[Acl]) -> bool) -> Vec<Acl> {
        let peers = &row.remote.addresses;
        if peers.is_literal() {
            return self.spelled_out(row, peers.literal());
        }
        self.by_name(row)
            .filter(|acls| !spell_out(acls))
            .unwrap_or_else(|| self.spelled_out(row, &peers.addresses(self.sets.lookup)))
    }

    fn spelled_out(&self, row: &Row, peers: &Addresses) -> Vec<Acl> {
        let local = self.sets.lists(row.local.addresses.literal());
        let remote = self.sets.lists(peers);
        let pairs =
            local.iter().flat_map(|local| remote.iter().map(move |remote| (local.clone(), remote.clone())));
        self.with_ports(row, pairs.collect())
    }

    /// The ACLs that name the sets of the peers, such that they mean the same however HNS reads them. Two readings are
    /// known of a set in an ACL about packets to the endpoint (docs/hns.md, ACLs): Local is the endpoint and Remote its
    /// peer, as with addresses; or Local is the source and Remote the destination. Where the endpoint itself is not in
    /// the set, one ACL for each reading is right in its own and matches nothing in the other; where it is, one that
    /// names the set on both sides is right in both. Packets from the endpoint have their peer in Remote in both
    /// readings.
    ///
    /// `None` where the endpoint is in a set with some of its addresses only.
    fn by_name(&self, row: &Row) -> Option<Vec<Acl>> {
        if !row.local.addresses.is_all() {
            return None;
        }
        let mut pairs = Vec::new();
        for set in self.sets.of(&row.remote.addresses).iter() {
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

/// The network as HNS reads it; of a single address the address.
pub fn text(net: &Ipv4Net) -> String {
    if net.prefix_len() == 32 { net.addr().to_string() } else { net.to_string() }
}

fn address_lists(addresses: &Addresses) -> Vec<String> {
    lists(addresses, |addresses| addresses.to_nets().iter().map(text).collect())
}

/// The ports as lists for ACLs.
pub fn port_lists(ports: &Ports) -> Vec<String> {
    lists(ports, |ports| {
        let text = |(first, last): &(u32, u32)| {
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

/// Comma lists of at most [`CHUNK`] items. Everything is the one empty list; nothing has no list at all.
fn lists<const MAX: u32>(
    numbers: &Numbers<MAX>,
    items: impl FnOnce(&Numbers<MAX>) -> Vec<String>,
) -> Vec<String> {
    if numbers.is_all() {
        return vec![String::new()];
    }
    items(numbers).chunks(CHUNK).map(|chunk| chunk.join(",")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_and_everything_is_empty() {
        assert_eq!(address_lists(&Addresses::all()), [""]);
        assert_eq!(address_lists(&Addresses::all().not()), [""; 0]);
        let scattered = Addresses::from_ranges((0..8001).map(|i| (i * 2, i * 2)).collect());
        let lists = address_lists(&scattered);
        let lengths: Vec<usize> = lists.iter().map(|list| list.split(',').count()).collect();
        assert_eq!(lengths, [4000, 4000, 1]);
        assert!(lists[0].starts_with("0.0.0.0,0.0.0.2,"));
        let ports = Ports::from_ranges(vec![(80, 80), (8000, 8080), (0, 0)]);
        assert_eq!(port_lists(&ports), ["0,80,8000-8080"]);
    }
}
