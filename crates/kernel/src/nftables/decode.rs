//! Decodes dumps to plain data.

use std::collections::BTreeMap;

use super::codec::{LIST_ELEM, count, expr, value, verdict};
use super::encode::*;
use super::key::{Field, Key};
use super::key_types;
use super::set::{Data, DataKind, Set, SetSpec, Value};
use super::table::{BaseChain, Chain, ChainKind, Count, Hook, Rule};
use crate::netlink::Reply;
use crate::netlink::attribute::Attributes;

/// The attributes after `struct nfgenmsg`.
pub(super) fn attributes(reply: &Reply) -> Attributes<'_> {
    Attributes(reply.payload.get(4..).unwrap_or_default())
}

/// The lower half of the ruleset's generation, which is in each object of a dump.
pub(super) fn generation(reply: &Reply) -> Option<u16> {
    Some(u16::from_be_bytes([*reply.payload.get(2)?, *reply.payload.get(3)?]))
}

/// A chain without its rules, and its name.
pub(super) fn chain(data: Attributes<'_>) -> Option<(String, Chain)> {
    let base = match data.get(NFTA_CHAIN_HOOK) {
        Some(hook) => Some(base_chain(data, Attributes(hook))?),
        None => None,
    };
    Some((data.text(NFTA_CHAIN_NAME)?, Chain { base, rules: Vec::new() }))
}

fn base_chain(data: Attributes<'_>, hook: Attributes<'_>) -> Option<BaseChain> {
    let hooks = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
    let number = hook.u32_be(NFTA_HOOK_HOOKNUM)?;
    Some(BaseChain {
        kind: if data.text(NFTA_CHAIN_TYPE)? == "nat" { ChainKind::Nat } else { ChainKind::Filter },
        hook: hooks.into_iter().find(|known| *known as u32 == number)?,
        priority: hook.u32_be(NFTA_HOOK_PRIORITY)?.cast_signed(),
        drop: data.u32_be(NFTA_CHAIN_POLICY)? == 0,
    })
}

/// A rule, and the name of its chain.
pub(super) fn rule(data: Attributes<'_>, inline: &dyn Fn(&str) -> Option<Set>) -> Option<(String, Rule)> {
    let list = data.nest(NFTA_RULE_EXPRESSIONS).filter(|(kind, _)| *kind == LIST_ELEM);
    let exprs = list.map(|(_, one)| expr(Attributes(one), inline)).collect();
    let comment = data.get(NFTA_RULE_USERDATA).and_then(comment).unwrap_or_default();
    Some((data.text(NFTA_RULE_CHAIN)?, Rule { exprs, comment }))
}

/// The comment in a rule's user data: (type, length, bytes) one after another, 0 is the comment.
fn comment(mut userdata: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = userdata {
        let (text, next) = rest.split_at_checked(usize::from(*length))?;
        if *kind == 0 {
            return Some(String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned());
        }
        userdata = next;
    }
    None
}

/// A set without its elements, and its name. For a set of an unknown kind, the key has no fields, so that it differs
/// from all of Tortie's sets.
pub(super) fn set(data: Attributes<'_>) -> Option<(String, Set)> {
    const NFT_SET_ANONYMOUS_OR_CONSTANT: u32 = 3;
    let flags = data.u32_be(NFTA_SET_FLAGS).unwrap_or(0); // the kernel leaves a 0 out
    let mut spec = SetSpec {
        key: fields(data.u32_be(NFTA_SET_KEY_TYPE)?).unwrap_or_default(),
        interval: flags & NFT_SET_INTERVAL != 0,
        data: match data.u32_be(NFTA_SET_DATA_TYPE) {
            Some(NFT_DATA_VERDICT) => Some(DataKind::Verdict),
            Some(kind) => {
                let is_of = |loaded: &DataKind| key_types::number(key_types::of_data(*loaded)) == kind;
                DataKind::LOADED.into_iter().find(is_of)
            }
            None => None,
        },
        counts: count(data.nest(NFTA_SET_EXPR)).is_some(),
        learned: match flags & NFT_SET_EVAL {
            0 => None,
            _ => data.nest(NFTA_SET_DESC).u32_be(NFTA_SET_DESC_SIZE),
        },
    };
    if flags & !NFT_SET_ANONYMOUS_OR_CONSTANT != set_flags(&spec) {
        spec.key.clear();
    }
    Some((data.text(NFTA_SET_NAME)?, Set { spec, elements: BTreeMap::new() }))
}

/// The fields of a type number: six bits each, the first field in the highest bits.
fn fields(mut number: u32) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while number != 0 {
        fields.insert(0, Field::ALL.into_iter().find(|field| *field as u32 == number & 0x3f)?);
        number >>= 6;
    }
    Some(fields)
}

/// One end of a range, or a whole element, as listed by the kernel.
pub(super) struct Listed {
    key: Key,
    closes: bool,
    value: Value,
    count: Option<Count>,
}

/// The elements in one message, without those that cannot be decoded, which Tortie did not write.
pub(super) fn elements(data: Attributes<'_>) -> Vec<Listed> {
    let list = data.nest(NFTA_SET_ELEM_LIST_ELEMENTS).filter(|(kind, _)| *kind == LIST_ELEM);
    list.filter_map(|(_, element)| listed(Attributes(element))).collect()
}

fn listed(data: Attributes<'_>) -> Option<Listed> {
    let end = match value(data, NFTA_SET_ELEM_KEY_END) {
        Some(end) => Some(Key::new(end)?),
        None => None,
    };
    Some(Listed {
        key: Key::new(value(data, NFTA_SET_ELEM_KEY)?)?,
        closes: data.u32_be(NFTA_SET_ELEM_FLAGS).unwrap_or(0) & NFT_SET_ELEM_INTERVAL_END != 0,
        value: Value::new(end, element_data(data)),
        count: count(data.nest(NFTA_SET_ELEM_EXPR)),
    })
}

/// The count of each element by key; for ranges, by the first key.
pub(super) fn counts(listed: &[Listed]) -> BTreeMap<Key, Count> {
    listed.iter().filter_map(|element| Some((element.key, element.count?))).collect()
}

/// The count of a rule's first counter.
pub(super) fn rule_count(data: Attributes<'_>) -> Option<Count> {
    let mut list = data.nest(NFTA_RULE_EXPRESSIONS).filter(|(kind, _)| *kind == LIST_ELEM);
    list.find_map(|(_, one)| count(Attributes(one)))
}

fn element_data(data: Attributes<'_>) -> Option<Data> {
    let loaded = || {
        let bytes = value(data, NFTA_SET_ELEM_DATA)?;
        let number = || Some(Data::Number(u32::from_ne_bytes(bytes.try_into().ok()?)));
        let address = || Some(Data::Ipv6(<[u8; 16]>::try_from(bytes).ok()?.into()));
        number().or_else(address).or_else(|| key_types::read_socket(bytes).map(Data::Socket))
    };
    verdict(data.nest(NFTA_SET_ELEM_DATA)).map(Data::Verdict).or_else(loaded)
}

/// The elements of a set from everything that was listed, in any order and with duplicates.
pub(super) fn join(spec: &SetSpec, mut listed: Vec<Listed>) -> BTreeMap<Key, Value> {
    if !spec.interval || spec.key.len() > 1 {
        return listed.into_iter().map(|element| (element.key, element.value)).collect();
    }
    // Where one range ends and the next begins, the end sorts first.
    listed.sort_by_key(|element| (element.key, !element.closes));
    let mut ranges = BTreeMap::new();
    let mut open: Option<Listed> = None;
    for element in listed {
        if let Some(begin) = open.take() {
            if begin.key == element.key {
                open = Some(begin);
                continue;
            }
            let end = element.key.previous();
            ranges.insert(begin.key, Value::new(end, begin.value.data().cloned()));
        }
        if !element.closes {
            open = Some(element);
        }
    }
    if let Some(begin) = open {
        ranges.insert(begin.key, Value::new(Some(begin.key.last()), begin.value.data().cloned()));
    }
    ranges
}
