//! Session affinity: the backend of a client's last connection.
//!
//! A unit is a pool of a port of a Service with session affinity. Its map has the token of the backend of each client, which rules put in when a
//! new connection has been translated (at priority 0), and which goes when no connection has come for the Service's time. Tokens stand for
//! backends, because `nft` 1.0.6 cannot load rules that put an IPv6 address with a port into a map. All frontends of the port share the unit
//! of a pool. Where a frontend leads clients to another pool of the port than another frontend does, the backend may be another one; kube-proxy
//! would take one that is in both.
//!
//! If a backend leaves the pool, connections do not go there any more, because its token leads nowhere; its clients are removed from the map some time
//! later. A unit and its chains come before frontends lead to it, and go after that.
//!
//! A process finds the numbers and the tokens of an earlier one again, because both are digests. If two things have one digest, the table is made
//! anew: whoever may choose names could otherwise lead clients of another Service to his pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tortie_api::net::Protocol;
use tortie_kernel::nftables::{
    Chain, Data, DataKind, Element, Field, Key, Op, Set, SetSpec, Table, Value, Verdict,
};
use tortie_services::{Backend, ServicePortId};

use super::frontends::{Pool, TableEntry};
use super::layout::{Kind, SetId};
use super::words::{any, of};
use crate::dataplane::sets::{Family, digest_number};

/// The map from a unit to the chain that looks for the client's backend.
pub(super) const REMEMBERED: &str = "remembered";
/// The map from a unit to the chain that notes the client's backend.
pub(super) const LEARNING: &str = "learning";
/// The most clients of a unit. More of them get backends without memory.
const MOST_CLIENTS: u32 = 65_536;

/// A unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unit {
    /// The priority that stands for it.
    pub(super) number: u32,
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    /// The time after which a client is forgotten.
    pub(super) seconds: u32,
}

/// The number of a unit. It depends on the port and the pool alone, so that the map of an earlier process is found again; unless two have one
/// digest. Returns true with it if they have.
pub(super) fn number(id: &ServicePortId, pool: Pool, is_taken: impl Fn(u32) -> bool) -> (u32, bool) {
    let ServicePortId { service, port, protocol, family } = id;
    let first = digest_number(&format!("{service} {port} {protocol} {family:?} {pool:?}")).max(1);
    let mut number = first;
    while is_taken(number) {
        number = number.wrapping_add(1).max(1);
    }
    (number, number != first)
}

impl Unit {
    /// The map of its clients.
    pub(super) fn clients(&self) -> String {
        format!("clients{}-{:08x}", self.digit(), self.number)
    }

    pub(super) fn clients_spec(&self) -> SetSpec {
        SetSpec::learned(&[self.family.field()], DataKind::Priority, MOST_CLIENTS)
    }

    fn digit(&self) -> char {
        super::layout::digit(self.family)
    }

    fn chains(&self) -> [(String, Chain); 2] {
        let tokens = SetId::new(Kind::Tokens, self.family);
        let remembered = vec![
            any().reset_priority().rule(),
            of(self.family).set_priority_by_source(self.clients(), self.family).rule(),
            of(self.family).protocol(self.protocol).to_backend_of_token(self.family),
        ];
        let learning = vec![
            of(self.family).set_priority_to_token(tokens).rule(),
            any().has_priority(self.number).accept(),
            of(self.family).learn(self.clients(), self.family, self.seconds),
            any().reset_priority().rule(),
        ];
        let chain = |rules| Chain { base: None, rules };
        let name = |kind: &str| format!("{kind}{}-{:08x}", self.digit(), self.number);
        [(name("remembered"), chain(remembered)), (name("learn"), chain(learning))]
    }

    fn verdicts(&self) -> [(&'static str, Element); 2] {
        let [(remembered, _), (learning, _)] = self.chains();
        let key = Key::number(self.number);
        [
            (REMEMBERED, Element::verdict(key, Verdict::Jump(remembered))),
            (LEARNING, Element::verdict(key, Verdict::Goto(learning))),
        ]
    }

    /// The changes that make it.
    pub(super) fn creation(&self) -> Vec<Op> {
        let mut ops = vec![Op::AddSet(self.clients(), self.clients_spec())];
        for (name, chain) in self.chains() {
            ops.extend([Op::AddChain(name.clone(), None), Op::SetRules(name, chain.rules)]);
        }
        ops.extend(
            self.verdicts()
                .map(|(map, element)| Op::AddElements(map.to_owned(), verdicts_spec(), vec![element])),
        );
        ops
    }

    /// The changes that give it its time after another one. Its clients are forgotten if theirs would be longer.
    pub(super) fn alteration(&self, former: &Self) -> Vec<Op> {
        if self.seconds < former.seconds {
            return [former.detachment(), former.removal(), self.creation()].concat();
        }
        self.chains().into_iter().map(|(name, chain)| Op::SetRules(name, chain.rules)).collect()
    }

    /// The changes after which nothing leads to it.
    pub(super) fn detachment(&self) -> Vec<Op> {
        let remove = |(map, element): (&str, Element)| {
            Op::DeleteElements(map.to_owned(), verdicts_spec(), vec![element])
        };
        self.verdicts().map(remove).to_vec()
    }

    /// The changes that remove it afterwards.
    pub(super) fn removal(&self) -> Vec<Op> {
        let names = self.chains().map(|(name, _)| name);
        let mut ops: Vec<Op> = names.iter().map(|name| Op::SetRules(name.clone(), Vec::new())).collect();
        ops.extend(names.into_iter().map(Op::DeleteChain));
        ops.push(Op::DeleteSet(self.clients()));
        ops
    }
}

/// Adds the units to the table.
pub(super) fn add_to<'a>(table: &mut Table, units: impl Iterator<Item = &'a Unit>) {
    let empty = |spec| Set { spec, elements: BTreeMap::new() };
    for map in [REMEMBERED, LEARNING] {
        table.sets.insert(map.to_owned(), empty(verdicts_spec()));
    }
    for unit in units {
        table.sets.insert(unit.clients(), empty(unit.clients_spec()));
        table.chains.extend(unit.chains());
        for (map, Element { key, value }) in unit.verdicts() {
            if let Some(set) = table.sets.get_mut(map) {
                set.elements.insert(key, value);
            }
        }
    }
}

fn verdicts_spec() -> SetSpec {
    SetSpec::verdict_map(&[Field::Priority])
}

/// The tokens of the backends of units.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    of: BTreeMap<(u32, SocketAddr), u32>,
    taken: BTreeSet<u32>,
    /// Two backends have had one digest, so that their tokens depend on the order in which they came.
    pub(super) is_ambiguous: bool,
}

impl Tokens {
    /// The token of a backend of a unit. No other backend has it. It depends on both alone, unless two have one digest.
    pub(super) fn of(&mut self, unit: u32, socket: SocketAddr) -> u32 {
        if let Some(token) = self.of.get(&(unit, socket)) {
            return *token;
        }
        let mut token = digest_number(&format!("{unit} {socket}")).max(1);
        while !self.taken.insert(token) {
            self.is_ambiguous = true;
            token = token.wrapping_add(1).max(1);
        }
        self.of.insert((unit, socket), token);
        token
    }

    /// The token of a backend, if it has one.
    pub(super) fn known(&self, unit: u32, socket: SocketAddr) -> Option<u32> {
        self.of.get(&(unit, socket)).copied()
    }

    /// Forgets the token of a backend that has left its unit.
    pub(super) fn remove(&mut self, unit: u32, socket: SocketAddr) {
        if let Some(token) = self.of.remove(&(unit, socket)) {
            self.taken.remove(&token);
        }
    }
}

/// The elements of a backend of a unit with its token.
pub(super) fn token_entries(
    unit: u32,
    backend: &Backend,
    protocol: Protocol,
    token: u32,
) -> Option<[TableEntry; 2]> {
    let family = Family::of(backend.address);
    let at = |kind, key| (SetId::new(kind, family), key);
    let socket = Key::address_port(backend.address, protocol.0, backend.port);
    let value = |data| Value::new(None, Some(data));
    Some([
        (at(Kind::Tokens, Key::number(unit).and(socket.bytes())?), value(Data::Number(token))),
        (at(Kind::TokenBackends, Key::number(token)), value(Data::Socket(backend.socket()))),
    ])
}

/// The clients of a unit whose backend is not in its pool any more.
pub(super) fn stale_clients(elements: &BTreeMap<Key, Value>, pool: &BTreeSet<u32>) -> Vec<Element> {
    let is_stale = |value: &Value| match value.data() {
        Some(Data::Number(token)) => !pool.contains(token),
        _ => true,
    };
    elements.iter().filter(|(_, value)| is_stale(value)).map(|(key, _)| Element::key(*key)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_digest_differ_and_say_so() {
        let socket = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
        let mut tokens = Tokens::default();
        let one = tokens.of(7, socket(1));
        assert_eq!((tokens.of(7, socket(1)), tokens.is_ambiguous), (one, false));
        // Another backend that would have the same token.
        let other = digest_number(&format!("7 {}", socket(2))).max(1);
        tokens.taken.insert(other);
        assert_eq!((tokens.of(7, socket(2)), tokens.is_ambiguous), (other + 1, true));
        // It keeps its token when the first one has gone.
        tokens.taken.remove(&other);
        assert_eq!(tokens.of(7, socket(2)), other + 1);
        tokens.remove(7, socket(2));
        assert_eq!(tokens.known(7, socket(2)), None);
        assert_eq!(tokens.of(7, socket(2)), other);
    }
}
