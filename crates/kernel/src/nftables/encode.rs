//! Encodes changes as messages (`linux/netfilter/nf_tables.h`, `linux/netfilter/nfnetlink.h`).

use super::codec::{ANONYMOUS, LIST_ELEM, put_counter, put_expr, put_value, put_verdict};
use super::key::Key;
use super::key_types;
use super::set::{Data, DataKind, Element, Set, SetSpec};
use super::table::{BaseChain, ChainKind, Rule};
use super::transaction::{Op, Transaction};
use crate::netlink::Request;
use crate::netlink::attribute::{MAX_LENGTH, put, put_nest, put_text, put_u32_be};

const CREATE: u16 = libc::NLM_F_CREATE as u16;
const APPEND: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_APPEND as u16;

/// `NFPROTO_INET`.
const INET: u8 = 1;
/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;

/// The maximum size of the elements in one message; this and one more element still fit in an attribute.
const ELEMENTS_ROOM: usize = MAX_LENGTH - 512;

/// The messages of a part of one change, with the index of the change.
#[derive(Debug)]
pub(super) struct Piece {
    /// The index of the change in the transaction.
    pub op: usize,
    /// The messages.
    pub requests: Vec<Request>,
}

impl Piece {
    /// Its size in bytes.
    pub(super) fn length(&self) -> usize {
        self.requests.iter().map(Request::length).sum()
    }
}

/// The messages of a transaction, in pieces at which it can be split. A chain's rules stay together, because
/// anonymous sets exist within one transaction only. Elements may be split; each message has at most `room` bytes.
/// The replacement of an element comes together with its removal.
pub(super) fn encode(transaction: &Transaction, room: usize) -> Vec<Piece> {
    let elements_room = ELEMENTS_ROOM.min(room / 2);
    let mut encoder = Encoder { table: &transaction.table, next_set_id: 1, elements_room };
    let mut pieces: Vec<Piece> = Vec::new();
    for (index, op) in transaction.ops.iter().enumerate() {
        let requests = encoder.op(op);
        match op {
            Op::AddElements(..) | Op::DeleteElements(..) => {
                let single = |request| Piece { op: index, requests: vec![request] };
                let mut singles = requests.into_iter().map(single).peekable();
                if replaces(op, index.checked_sub(1).and_then(|before| transaction.ops.get(before)))
                    && let (Some(removal), Some(first)) = (pieces.last_mut(), singles.peek())
                    && removal.length() + first.length() <= room
                {
                    removal.requests.extend(singles.next().into_iter().flat_map(|piece| piece.requests));
                }
                pieces.extend(singles);
            }
            _ => pieces.push(Piece { op: index, requests }),
        }
    }
    pieces
}

/// Whether a change adds elements to the set from which the previous change removed some.
fn replaces(op: &Op, before: Option<&Op>) -> bool {
    match (before, op) {
        (Some(Op::DeleteElements(one, ..)), Op::AddElements(other, ..)) => one == other,
        _ => false,
    }
}

/// The size of a rule in a chain of that name, with everything it needs.
pub fn rule_length(table: &str, chain: &str, rule: &Rule) -> usize {
    let mut encoder = Encoder { table, next_set_id: 1, elements_room: ELEMENTS_ROOM };
    encoder.set_rules(chain, std::slice::from_ref(rule)).iter().map(Request::length).sum()
}

/// The message that begins a transaction.
pub(super) fn begin() -> Request {
    batch(libc::NFNL_MSG_BATCH_BEGIN as u16)
}

/// The message that ends a transaction.
pub(super) fn end() -> Request {
    batch(libc::NFNL_MSG_BATCH_END as u16)
}

fn batch(kind: u16) -> Request {
    Request { kind, flags: 0, payload: header(0, SUBSYSTEM) }
}

/// `struct nfgenmsg`.
fn header(family: u8, resource: u16) -> Vec<u8> {
    let [high, low] = resource.to_be_bytes();
    vec![family, 0, high, low]
}

/// A message about an object of a table; also used for requests.
pub(super) fn message(kind: i32, flags: u16, fill: impl FnOnce(&mut Vec<u8>)) -> Request {
    let mut payload = header(INET, 0);
    fill(&mut payload);
    Request { kind: (SUBSYSTEM << 8) | kind as u16, flags, payload }
}

struct Encoder<'a> {
    table: &'a str,
    /// Ids identify sets within one transaction only.
    next_set_id: u32,
    /// The maximum size of the elements in a message.
    elements_room: usize,
}

impl Encoder<'_> {
    fn op(&mut self, op: &Op) -> Vec<Request> {
        match op {
            Op::AddTable(flags) => {
                vec![
                    self.message(libc::NFT_MSG_NEWTABLE, CREATE, |to| {
                        put_u32_be(to, NFTA_TABLE_FLAGS, *flags)
                    }),
                ]
            }
            Op::DeleteTable => vec![self.message(libc::NFT_MSG_DELTABLE, 0, |_| ())],
            Op::AddChain(name, base) => vec![self.message(libc::NFT_MSG_NEWCHAIN, CREATE, |to| {
                put_text(to, NFTA_CHAIN_NAME, name);
                if let Some(base) = base {
                    put_base(to, base);
                }
            })],
            Op::DeleteChain(name) => {
                vec![self.message(libc::NFT_MSG_DELCHAIN, 0, |to| put_text(to, NFTA_CHAIN_NAME, name))]
            }
            Op::SetRules(chain, rules) => self.set_rules(chain, rules),
            Op::AddSet(name, spec) => {
                let id = self.set_id();
                vec![self.new_set(name, spec, id, 0)]
            }
            Op::DeleteSet(name) => {
                vec![self.message(libc::NFT_MSG_DELSET, 0, |to| put_text(to, NFTA_SET_NAME, name))]
            }
            Op::AddElements(name, spec, elements) => {
                self.elements(libc::NFT_MSG_NEWSETELEM, CREATE, name, None, spec, elements)
            }
            Op::DeleteElements(name, spec, elements) => {
                self.elements(libc::NFT_MSG_DELSETELEM, 0, name, None, spec, elements)
            }
        }
    }

    fn message(&self, kind: i32, flags: u16, fill: impl FnOnce(&mut Vec<u8>)) -> Request {
        message(kind, flags, |to| {
            put_text(to, NFTA_TABLE, self.table);
            fill(to);
        })
    }

    fn set_rules(&mut self, chain: &str, rules: &[Rule]) -> Vec<Request> {
        let flush = self.message(libc::NFT_MSG_DELRULE, 0, |to| put_text(to, NFTA_RULE_CHAIN, chain));
        let mut requests = vec![flush];
        for rule in rules {
            let mut list = Vec::new();
            for expr in &rule.exprs {
                put_expr(&mut list, expr, &mut |set| {
                    let (id, messages) = self.inline_set(set);
                    requests.extend(messages);
                    id
                });
            }
            requests.push(self.message(libc::NFT_MSG_NEWRULE, APPEND, |to| {
                put_text(to, NFTA_RULE_CHAIN, chain);
                put_nest(to, NFTA_RULE_EXPRESSIONS, |to| to.extend(list));
                if !rule.comment.is_empty() {
                    put(to, NFTA_RULE_USERDATA, &comment(&rule.comment));
                }
            }));
        }
        requests
    }

    /// The messages that create an anonymous set, which precede its rule.
    fn inline_set(&mut self, set: &Set) -> (u32, Vec<Request>) {
        const NFT_SET_ANONYMOUS: u32 = 1;
        const NFT_SET_CONSTANT: u32 = 2;
        let id = self.set_id();
        let elements: Vec<_> =
            set.elements.iter().map(|(key, value)| Element { key: *key, value: value.clone() }).collect();
        let mut requests = vec![self.new_set(ANONYMOUS, &set.spec, id, NFT_SET_ANONYMOUS | NFT_SET_CONSTANT)];
        let added =
            self.elements(libc::NFT_MSG_NEWSETELEM, CREATE, ANONYMOUS, Some(id), &set.spec, &elements);
        requests.extend(added);
        (id, requests)
    }

    fn set_id(&mut self) -> u32 {
        self.next_set_id += 1;
        self.next_set_id - 1
    }

    fn new_set(&self, name: &str, spec: &SetSpec, id: u32, flags: u32) -> Request {
        self.message(libc::NFT_MSG_NEWSET, CREATE, |to| {
            put_text(to, NFTA_SET_NAME, name);
            put_u32_be(to, NFTA_SET_FLAGS, flags | set_flags(spec));
            put_u32_be(to, NFTA_SET_KEY_TYPE, key_types::number(&spec.key));
            put_u32_be(to, NFTA_SET_KEY_LEN, key_types::length(&spec.key) as u32);
            match spec.data {
                None => {}
                Some(DataKind::Verdict) => put_u32_be(to, NFTA_SET_DATA_TYPE, NFT_DATA_VERDICT),
                Some(kind) => {
                    let fields = key_types::of_data(kind);
                    put_u32_be(to, NFTA_SET_DATA_TYPE, key_types::number(fields));
                    put_u32_be(to, NFTA_SET_DATA_LEN, key_types::length(fields) as u32);
                }
            }
            put_u32_be(to, NFTA_SET_ID, id);
            if let Some(most) = spec.learned {
                put_nest(to, NFTA_SET_DESC, |to| put_u32_be(to, NFTA_SET_DESC_SIZE, most));
            }
            if spec.counts {
                put_nest(to, NFTA_SET_EXPR, put_counter);
            }
            put(to, NFTA_SET_USERDATA, &key_types::user_data(spec));
            if set_flags(spec) & NFT_SET_CONCAT != 0 {
                put_nest(to, NFTA_SET_DESC, |to| {
                    put_nest(to, NFTA_SET_DESC_CONCAT, |to| put_fields(to, spec))
                });
            }
        })
    }

    /// The messages with elements, as many as necessary to keep each attribute below its limit.
    fn elements(
        &self,
        kind: i32,
        flags: u16,
        name: &str,
        id: Option<u32>,
        spec: &SetSpec,
        elements: &[Element],
    ) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut list = Vec::new();
        for (index, element) in elements.iter().enumerate() {
            put_element(&mut list, spec, element);
            if list.len() < self.elements_room && index + 1 < elements.len() {
                continue;
            }
            requests.push(self.message(kind, flags, |to| {
                put_text(to, NFTA_SET_ELEM_LIST_SET, name);
                if let Some(id) = id {
                    put_u32_be(to, NFTA_SET_ELEM_LIST_SET_ID, id);
                }
                put_nest(to, NFTA_SET_ELEM_LIST_ELEMENTS, |to| to.append(&mut list));
            }));
        }
        requests
    }
}

fn put_base(to: &mut Vec<u8>, base: &BaseChain) {
    put_nest(to, NFTA_CHAIN_HOOK, |to| {
        put_u32_be(to, NFTA_HOOK_HOOKNUM, base.hook as u32);
        put_u32_be(to, NFTA_HOOK_PRIORITY, base.priority.cast_unsigned());
    });
    put_u32_be(to, NFTA_CHAIN_POLICY, u32::from(!base.drop));
    let kind = match base.kind {
        ChainKind::Filter => "filter",
        ChainKind::Nat => "nat",
    };
    put_text(to, NFTA_CHAIN_TYPE, kind);
}

/// A comment in `nft`'s form: type, length, text with its NUL (`NFTNL_UDATA_RULE_COMMENT` of libnftnl).
fn comment(text: &str) -> Vec<u8> {
    let text = &text[..text.floor_char_boundary(Rule::MAX_COMMENT_LENGTH)];
    [&[0, text.len() as u8 + 1], text.as_bytes(), &[0]].concat()
}

pub(super) fn set_flags(spec: &SetSpec) -> u32 {
    let interval = if spec.interval { NFT_SET_INTERVAL } else { 0 };
    let concat = if spec.interval && spec.key.len() > 1 { NFT_SET_CONCAT } else { 0 };
    let map = if spec.data.is_some() { NFT_SET_MAP } else { 0 };
    let learned = if spec.learned.is_some() { NFT_SET_TIMEOUT | NFT_SET_EVAL } else { 0 };
    interval | concat | map | learned
}

fn put_fields(to: &mut Vec<u8>, spec: &SetSpec) {
    for field in &spec.key {
        put_nest(to, LIST_ELEM, |to| put_u32_be(to, NFTA_SET_FIELD_LEN, field.length() as u32));
    }
}

fn put_element(to: &mut Vec<u8>, spec: &SetSpec, element: &Element) {
    let put_one = |to: &mut Vec<u8>, key: &Key, closes: bool, last: Option<&Key>| {
        put_nest(to, LIST_ELEM, |to| {
            put_value(to, NFTA_SET_ELEM_KEY, key.bytes());
            if let Some(last) = last {
                put_value(to, NFTA_SET_ELEM_KEY_END, last.bytes());
            }
            if closes {
                put_u32_be(to, NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END);
                return;
            }
            match element.value.data() {
                None => {}
                Some(Data::Verdict(verdict)) => put_verdict(to, NFTA_SET_ELEM_DATA, verdict),
                Some(Data::Number(number)) => put_value(to, NFTA_SET_ELEM_DATA, &number.to_ne_bytes()),
                Some(Data::Ipv6(address)) => put_value(to, NFTA_SET_ELEM_DATA, &address.octets()),
                Some(Data::Socket(socket)) => {
                    put_value(to, NFTA_SET_ELEM_DATA, &key_types::socket(*socket));
                }
            }
        });
    };
    let last = element.value.end();
    if spec.interval && spec.key.len() > 1 {
        return put_one(to, &element.key, false, Some(last.unwrap_or(&element.key)));
    }
    put_one(to, &element.key, false, None);
    // A range is an element at its beginning and one after its end; there is none after the last possible key.
    if spec.interval
        && let Some(behind) = last.unwrap_or(&element.key).next()
    {
        put_one(to, &behind, true, None);
    }
}

// The numbers of `enum nft_table_attributes` and similar enumerations. The name of the table is 1 everywhere.
pub(super) const NFTA_TABLE: u16 = 1;
pub(super) const NFTA_TABLE_FLAGS: u16 = 2;
pub(super) const NFTA_TABLE_OWNER: u16 = 7;
pub(super) const NFTA_CHAIN_NAME: u16 = 3;
pub(super) const NFTA_CHAIN_HOOK: u16 = 4;
pub(super) const NFTA_CHAIN_POLICY: u16 = 5;
pub(super) const NFTA_CHAIN_TYPE: u16 = 7;
pub(super) const NFTA_HOOK_HOOKNUM: u16 = 1;
pub(super) const NFTA_HOOK_PRIORITY: u16 = 2;
pub(super) const NFTA_RULE_CHAIN: u16 = 2;
pub(super) const NFTA_RULE_EXPRESSIONS: u16 = 4;
pub(super) const NFTA_RULE_USERDATA: u16 = 7;
pub(super) const NFTA_SET_NAME: u16 = 2;
pub(super) const NFTA_SET_FLAGS: u16 = 3;
pub(super) const NFTA_SET_KEY_TYPE: u16 = 4;
pub(super) const NFTA_SET_KEY_LEN: u16 = 5;
pub(super) const NFTA_SET_DATA_TYPE: u16 = 6;
pub(super) const NFTA_SET_DATA_LEN: u16 = 7;
pub(super) const NFTA_SET_DESC: u16 = 9;
pub(super) const NFTA_SET_ID: u16 = 10;
pub(super) const NFTA_SET_USERDATA: u16 = 13;
/// The expression of which every new element gets a copy (Linux 5.7 for sets that no rule fills).
pub(super) const NFTA_SET_EXPR: u16 = 17;
pub(super) const NFTA_SET_DESC_SIZE: u16 = 1;
pub(super) const NFTA_SET_DESC_CONCAT: u16 = 2;
pub(super) const NFTA_SET_FIELD_LEN: u16 = 1;
pub(super) const NFTA_SET_ELEM_LIST_SET: u16 = 2;
pub(super) const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
pub(super) const NFTA_SET_ELEM_LIST_SET_ID: u16 = 4;
pub(super) const NFTA_SET_ELEM_KEY: u16 = 1;
pub(super) const NFTA_SET_ELEM_DATA: u16 = 2;
pub(super) const NFTA_SET_ELEM_FLAGS: u16 = 3;
pub(super) const NFTA_SET_ELEM_EXPR: u16 = 7;
pub(super) const NFTA_SET_ELEM_KEY_END: u16 = 10;
pub(super) const NFT_SET_INTERVAL: u32 = 4;
pub(super) const NFT_SET_MAP: u32 = 8;
pub(super) const NFT_SET_TIMEOUT: u32 = 0x10;
pub(super) const NFT_SET_EVAL: u32 = 0x20;
pub(super) const NFT_SET_CONCAT: u32 = 0x80;
pub(super) const NFT_SET_ELEM_INTERVAL_END: u32 = 1;
pub(super) const NFT_DATA_VERDICT: u32 = 0xffff_ff00;
