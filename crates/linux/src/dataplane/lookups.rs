//! Combines many rules that match a peer, with or without protocol and port, into a few lookups.
//!
//! A lookup in a hash set costs the same for one rule and for ten thousand. The set's keys are the combinations that
//! the rules match: the addresses of their selectors, each with each protocol and port of its rule.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::FilterDenyAction;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Key, Set, SetSpec, Value};
use tortie_policy::program::{Member, PolicyId, SetId};

use super::dirty::ChangedSet;
use super::fold::fold;
use super::packet_test::{Conjunction, Keyed, PacketEnd, Test, Then};
use super::policies::{Line, Lines};
use super::sets::{Family, Part};

/// The maximum number of addresses, and of ports, of one rule that become keys.
const MAX_VALUES: usize = 64;

/// The sources of a program.
pub(super) struct Sources<'a> {
    /// The lines of a policy in the program's direction.
    pub lines: &'a dyn Fn(&PolicyId) -> &'a Lines,
    /// The number of members of a set.
    pub members: &'a dyn Fn(&SetId) -> usize,
    pub deny: FilterDenyAction,
    /// Whether rules count packets.
    pub counts: bool,
    /// The maximum number of rules of a tier that are evaluated one after another.
    pub in_a_row: usize,
    /// The maximum number of keys in the program's own sets. Rules that would need more are evaluated one after
    /// another.
    pub most_keys: usize,
}

/// A set whose keys are derived from other sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lookup {
    key: Keyed,
    sources: Vec<Source>,
    /// The number of keys when it was created.
    pub keys: usize,
    /// Whether each key counts packets.
    counts: bool,
}

/// The keys of one rule: each of its addresses with each tail.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    addresses: Addresses,
    /// The part of the key after the address: protocol and port, each padded to four bytes.
    tails: BTreeSet<Vec<u8>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Addresses {
    These(Vec<Key>),
    Of(SetId),
}

impl Lookup {
    /// The desired set.
    pub(super) fn set(&self, state: &NodeState) -> Set {
        let mut elements = BTreeMap::new();
        for source in &self.sources {
            for address in source.addresses(state, self.key.family) {
                elements.extend(source.keys(&address).map(|key| (key, Value::default())));
            }
        }
        Set { spec: self.spec(), elements }
    }

    /// The type of its elements.
    pub(super) fn spec(&self) -> SetSpec {
        SetSpec { counts: self.counts, ..self.key.spec() }
    }

    /// The keys that are added or removed with members of sets, each with whether it is wanted.
    pub(super) fn affected(
        &self,
        state: &NodeState,
        changed: &BTreeMap<SetId, ChangedSet>,
    ) -> BTreeMap<Key, bool> {
        let (mut keys, mut addresses) = (BTreeMap::new(), BTreeMap::new());
        for source in &self.sources {
            let Addresses::Of(id) = &source.addresses else { continue };
            let Some(ChangedSet::Members(members)) = changed.get(id) else { continue };
            for member in members {
                let Some(address) = single(member, self.key.family) else { continue };
                keys.extend(source.keys(&address).map(|key| (key, false)));
                addresses.insert(address, *member);
            }
        }
        if keys.is_empty() {
            return keys;
        }
        // Another rule may want a key of a member that has gone. There may be as many rules as changed sets.
        for source in &self.sources {
            for address in source.among(&addresses, state, self.key.family) {
                for key in source.keys(&address) {
                    keys.entry(key).and_modify(|is_wanted| *is_wanted = true);
                }
            }
        }
        keys
    }
}

/// The comments of those lines that match a key of a set with many combined rules.
pub(super) fn asking<'a>(
    lines: Vec<&'a Line>,
    sets: &BTreeMap<String, &SetId>,
    lookup: &Lookup,
    state: &'a NodeState,
) -> impl Fn(&Key) -> Vec<String> + use<'a> {
    let family = lookup.key.family;
    let of_set = |line: &'a Line| {
        let (key, source) = keys(&line.tests, sets)?;
        (key == lookup.key).then_some((source, &line.comment))
    };
    let all: Vec<_> = lines.into_iter().filter_map(of_set).collect();
    move |key| {
        let asking = all.iter().filter(|(source, _)| source.asks_for(key, family, state));
        asking.map(|(_, comment)| (*comment).clone()).collect()
    }
}

impl Source {
    fn asks_for(&self, key: &Key, family: Family, state: &NodeState) -> bool {
        let Some((bytes, tail)) = key.bytes().split_at_checked(family.field().length()) else { return false };
        let has_address = || match &self.addresses {
            Addresses::These(keys) => keys.iter().any(|key| key.bytes() == bytes),
            Addresses::Of(id) => {
                let member = address(bytes).map(|address| Member::Net(address.into()));
                let members = state.sets.get(id).map(|(_, members)| members);
                member.zip(members).is_some_and(|(member, members)| members.contains(&member))
            }
        };
        self.tails.contains(tail) && has_address()
    }

    /// The number of keys.
    fn count(&self, members: &dyn Fn(&SetId) -> usize) -> usize {
        self.count_of_addresses(members) * self.tails.len()
    }

    fn count_of_addresses(&self, members: &dyn Fn(&SetId) -> usize) -> usize {
        match &self.addresses {
            Addresses::These(keys) => keys.len(),
            Addresses::Of(id) => members(id),
        }
    }

    fn addresses(&self, state: &NodeState, family: Family) -> Vec<Key> {
        match &self.addresses {
            Addresses::These(keys) => keys.clone(),
            Addresses::Of(id) => {
                let members = state.sets.get(id).into_iter().flat_map(|(_, members)| members.iter());
                members.filter_map(|member| single(member, family)).collect()
            }
        }
    }

    /// The keys with this address.
    fn keys(&self, address: &Key) -> impl Iterator<Item = Key> {
        self.tails.iter().filter_map(|tail| Key::new(&[address.bytes(), tail].concat()))
    }

    /// Those of the addresses that the rule has. It looks at the fewer ones: thousands of rules with few addresses each, and a set with
    /// very many that changes, would otherwise cost their product.
    fn among(&self, addresses: &BTreeMap<Key, Member>, state: &NodeState, family: Family) -> Vec<Key> {
        let count = self.count_of_addresses(&|id| state.sets.get(id).map_or(0, |(_, members)| members.len()));
        if count < addresses.len() {
            let own = self.addresses(state, family).into_iter();
            return own.filter(|address| addresses.contains_key(address)).collect();
        }
        let found = addresses.iter().filter(|(address, member)| self.has(address, member, state));
        found.map(|(address, _)| *address).collect()
    }

    fn has(&self, address: &Key, member: &Member, state: &NodeState) -> bool {
        match &self.addresses {
            Addresses::These(keys) => keys.contains(address),
            Addresses::Of(id) => state.sets.get(id).is_some_and(|(_, members)| members.contains(member)),
        }
    }
}

/// Replaces a run of lines with one action by sets and lines, if that needs fewer tests. `sets` are the sets that the
/// lines name, by nftables name. `prefix` is the prefix for the names of new sets, which may have `most_keys` keys in
/// total.
pub(super) fn look_up(
    run: &[Line],
    sets: &BTreeMap<String, &SetId>,
    prefix: &str,
    sources: &Sources<'_>,
    mut most_keys: usize,
) -> (Vec<(String, Lookup)>, Vec<Line>) {
    let Some(first) = run.first() else { return Default::default() };
    let all = run.iter().map(|line| (line.tests.clone(), vec![line.comment.clone()])).collect();
    let (mut keyed, mut others) = (BTreeMap::<Keyed, Vec<_>>::new(), Vec::new());
    for (tests, comments) in fold(all) {
        match keys(&tests, sets) {
            Some((key, source)) => keyed.entry(key).or_default().push((source, tests, comments)),
            None => others.push((tests, comments)),
        }
    }
    let mut lookups = Vec::new();
    for (number, (key, group)) in keyed.into_iter().enumerate() {
        let count: usize = group.iter().map(|(source, ..)| source.count(sources.members)).sum();
        let few = group.len() * 8 < sources.in_a_row;
        if few || count > most_keys {
            others.extend(group.into_iter().map(|(_, tests, comments)| (tests, comments)));
            continue;
        }
        most_keys -= count;
        // A different set gets a different name, so that it can exist beside the one that it replaces.
        let set = format!("{prefix}-{number}{}", if sources.counts { "c" } else { "" });
        let (mut of_all, mut comments) = (Vec::new(), Vec::new());
        for (source, _, its_comments) in group {
            of_all.push(source);
            comments.extend(its_comments);
        }
        let found = Test::Member { key, set: set.clone(), invert: false };
        others.push((vec![Test::Family(key.family), found], comments));
        lookups.push((set, Lookup { key, sources: of_all, keys: count, counts: sources.counts }));
    }
    let line = |(tests, comments): (Conjunction, Vec<String>)| {
        let comment = joined(&comments);
        Line { tests, comment, ..first.clone() }
    };
    (lookups, others.into_iter().map(line).collect())
}

fn joined(comments: &[String]) -> String {
    match comments {
        [one] => one.clone(),
        many => format!("{} rules, such as {}", many.len(), many.first().map_or("", String::as_str)),
    }
}

/// The keys of a line that matches single addresses of one side and, optionally, one or several protocols and
/// destination ports.
fn keys(tests: &[Test], sets: &BTreeMap<String, &SetId>) -> Option<(Keyed, Source)> {
    let (mut family, mut protocols, mut ports, mut peer) = (None, None, None, None);
    for test in tests {
        match test {
            Test::Family(of) => family = Some(*of),
            Test::Protocol { numbers, invert: false } => protocols = Some(numbers.clone()),
            Test::Port { side: PacketEnd::Destination, ranges, invert: false } => {
                ports = Some(ranges.keys(MAX_VALUES)?);
            }
            Test::Address { side, ranges, invert: false, .. } if peer.is_none() => {
                peer = Some((*side, Addresses::These(ranges.keys(MAX_VALUES)?)));
            }
            Test::Member { key: Keyed { side, then: Then::Nothing, .. }, set, invert: false }
                if peer.is_none() =>
            {
                peer = Some((*side, Addresses::Of((*sets.get(set)?).clone())));
            }
            _ => return None,
        }
    }
    let (side, addresses) = peer?;
    let then = match (&protocols, &ports) {
        (_, Some(_)) => Then::Port(PacketEnd::Destination),
        (Some(_), None) => Then::Protocol,
        (None, None) => Then::Nothing,
    };
    Some((Keyed { side, family: family?, then }, Source { addresses, tails: tails(protocols, ports)? }))
}

/// The nftables names of sets of single addresses.
pub(super) fn address_sets<'a>(ids: impl Iterator<Item = &'a SetId>) -> BTreeMap<String, &'a SetId> {
    let names = |id| [Family::V4, Family::V6].map(|family| (Part::Addresses(family).name(id), id));
    ids.flat_map(names).collect()
}

/// Every protocol with every port.
fn tails(protocols: Option<Vec<u8>>, ports: Option<Vec<Key>>) -> Option<BTreeSet<Vec<u8>>> {
    let Some(protocols) = protocols else { return ports.is_none().then(|| BTreeSet::from([Vec::new()])) };
    let mut tails = BTreeSet::new();
    for protocol in protocols {
        let head = [protocol, 0, 0, 0];
        match &ports {
            None => drop(tails.insert(head.to_vec())),
            Some(ports) => tails.extend(ports.iter().map(|port| [&head[..], port.bytes(), &[0, 0]].concat())),
        }
    }
    Some(tails)
}

/// The address in the bytes of a key.
fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// The address of a member, if it is a single address of this family.
fn single(member: &Member, family: Family) -> Option<Key> {
    match member {
        Member::Net(IpNet::V4(net)) if family == Family::V4 && net.prefix_len() == 32 => {
            Some(Key::address(net.addr().into()))
        }
        Member::Net(IpNet::V6(net)) if family == Family::V6 && net.prefix_len() == 128 => {
            Some(Key::address(net.addr().into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tortie_policy::program::SetKind;

    use super::super::packet_test::port_ranges;
    use super::super::sets::ranges;
    use super::*;

    fn net(last: u8) -> Member {
        Member::Net(IpNet::from(IpAddr::from([10, 0, 0, last])))
    }

    fn key(last: u8) -> Key {
        Key::address(IpAddr::from([10, 0, 0, last]))
    }

    /// A lookup by the addresses of two sets and of a rule, and sets with these members.
    fn lookup(members: [&[u8]; 2]) -> (Lookup, NodeState) {
        let source = |addresses| Source { addresses, tails: BTreeSet::from([Vec::new()]) };
        let of = |name: &str| source(Addresses::Of(SetId::new(name)));
        let sources = vec![of("one"), of("two"), source(Addresses::These(vec![key(9)]))];
        let key = Keyed::address(PacketEnd::Source, Family::V4);
        let sets = ["one", "two"].into_iter().zip(members).map(|(name, members)| {
            let members: BTreeSet<Member> = members.iter().copied().map(net).collect();
            (SetId::new(name), (SetKind::Nets, members.into()))
        });
        let state = NodeState { sets: sets.collect(), ..NodeState::default() };
        (Lookup { key, sources, keys: 0, counts: false }, state)
    }

    /// A key that a member had stays while another rule or set wants it.
    #[test]
    fn a_key_goes_with_the_last_rule_that_wants_it() {
        for (after, changed, expected) in [
            ([&[1][..], &[]], vec![("one", 1)], vec![(1, true)]),
            ([&[], &[]], vec![("one", 1)], vec![(1, false)]),
            ([&[], &[1]], vec![("one", 1)], vec![(1, true)]),
            ([&[], &[1]], vec![("one", 1), ("two", 1)], vec![(1, true)]),
            ([&[], &[]], vec![("one", 1), ("two", 1)], vec![(1, false)]),
            ([&[], &[2]], vec![("one", 1), ("two", 2)], vec![(1, false), (2, true)]),
            ([&[], &[]], vec![("two", 9)], vec![(9, true)]),
            ([&[1], &[1]], vec![("three", 1)], vec![]),
        ] {
            let (lookup, state) = lookup(after);
            let mut sets: BTreeMap<SetId, ChangedSet> = BTreeMap::new();
            for (name, last) in &changed {
                sets.insert(SetId::new(*name), ChangedSet::Members([net(*last)].into()));
            }
            let expected: BTreeMap<Key, bool> =
                expected.into_iter().map(|(last, is_wanted)| (key(last), is_wanted)).collect();
            assert_eq!(lookup.affected(&state, &sets), expected, "{after:?} after {changed:?}");
        }
        let (lookup, state) = lookup([&[], &[]]);
        let whole = BTreeMap::from([(SetId::new("one"), ChangedSet::Whole)]);
        assert_eq!(lookup.affected(&state, &whole), BTreeMap::new(), "its program is rendered again");
    }

    /// A user of one namespace stores thousands of policies, and a set with very many addresses. Their product takes minutes.
    #[test]
    fn many_rules_and_many_changed_members_do_not_cost_their_product() {
        const RULES: u32 = 3_000;
        const MEMBERS: u32 = 60_000;
        let address = |number: u32| IpAddr::from((0x0a00_0000 + number).to_be_bytes());
        let source = |addresses| Source { addresses, tails: BTreeSet::from([Vec::new()]) };
        let of_rules = (0..RULES).map(|number| SetId::new(format!("set-{number}")));
        let mut state = NodeState::default();
        for (number, id) in (0..).zip(of_rules) {
            let members: BTreeSet<Member> = [Member::Net(address(number).into())].into();
            state.sets.insert(id, (SetKind::Nets, members.into()));
        }
        let mut sources: Vec<Source> =
            state.sets.keys().map(|id| source(Addresses::Of(id.clone()))).collect();
        sources.push(source(Addresses::Of(SetId::new("large"))));
        let key = Keyed::address(PacketEnd::Source, Family::V4);
        let lookup = Lookup { key, sources, keys: 0, counts: false };
        // All members of the large set have gone.
        let members = (0..MEMBERS).map(|number| Member::Net(address(number).into())).collect();
        let changed = BTreeMap::from([(SetId::new("large"), ChangedSet::Members(members))]);
        let begun = std::time::Instant::now();
        let affected = lookup.affected(&state, &changed);
        assert_eq!(affected.len(), MEMBERS as usize);
        assert_eq!(affected.values().filter(|is_wanted| **is_wanted).count(), RULES as usize);
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }

    /// Whatever follows the address in the key.
    #[test]
    fn a_lookup_compares_the_side_that_its_rules_are_about() {
        let protocol = || Test::Protocol { numbers: vec![6], invert: false };
        let ports = || Test::Port {
            side: PacketEnd::Destination,
            ranges: port_ranges([(80, 80)].into_iter()),
            invert: false,
        };
        for side in [PacketEnd::Source, PacketEnd::Destination] {
            for (more, then) in [
                (vec![], Then::Nothing),
                (vec![protocol()], Then::Protocol),
                (vec![protocol(), ports()], Then::Port(PacketEnd::Destination)),
            ] {
                let family = Family::V4;
                let ranges = ranges([IpNet::from(IpAddr::from([10, 0, 0, 1]))]);
                let address = Test::Address { side, family, ranges, invert: false };
                let tests = [vec![Test::Family(family), address], more].concat();
                let (key, _) = keys(&tests, &BTreeMap::new()).unwrap();
                assert_eq!(key, Keyed { side, family, then });
            }
        }
    }
}
