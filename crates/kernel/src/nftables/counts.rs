//! Rules and elements with their counts, read chain by chain and set by set.

use std::collections::BTreeMap;

use super::{Count, Key, LIST_ATTEMPTS, Nft, Rule, SetSpec, Value, decode, encode};
use crate::Result;
use crate::netlink::Reply;
use crate::netlink::attribute::put_text;

/// A rule in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedRule {
    /// The rule.
    pub rule: Rule,
    /// Its count, if it counts.
    pub count: Option<Count>,
}

/// The elements of a set in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CountedElements {
    /// The elements, by key.
    pub elements: BTreeMap<Key, Value>,
    /// Their counts by key, if they count.
    pub counts: BTreeMap<Key, Count>,
}

impl Nft {
    /// The rules of a chain in order; none if there is no such chain. Anonymous sets are not read: lookups in them
    /// become [`Expr::Other`](super::Expr::Other).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn counted_rules(&mut self, table: &str, chain: &str) -> Result<Vec<CountedRule>> {
        let replies = self.dump_if_there(libc::NFT_MSG_GETRULE, table, |to| {
            put_text(to, encode::NFTA_RULE_CHAIN, chain);
        })?;
        let rules = replies.iter().filter_map(|reply| {
            let data = decode::attributes(reply);
            // Old kernels also return the rules of other chains.
            let (of, rule) = decode::rule(data, &|_| None)?;
            (of == chain).then(|| CountedRule { rule, count: decode::rule_count(data) })
        });
        Ok(rules.collect())
    }

    /// The types of the sets of a table by name, without elements; none if there is no such table.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_specs(&mut self, table: &str) -> Result<BTreeMap<String, SetSpec>> {
        let replies = self.dump_if_there(libc::NFT_MSG_GETSET, table, |_| ())?;
        let sets = replies.iter().filter_map(|reply| decode::set(decode::attributes(reply)));
        Ok(sets.map(|(name, set)| (name, set.spec)).collect())
    }

    /// The elements of a set. The kernel may still be resizing a hash set that was just filled; it then lists some
    /// elements twice and omits as many others. So a list with duplicates is requested again.
    ///
    /// # Errors
    /// The kernel's refusal, or the set kept changing.
    pub fn counted_elements(&mut self, table: &str, set: &str, spec: &SetSpec) -> Result<CountedElements> {
        for _ in 0..LIST_ATTEMPTS {
            let replies = self.dump(libc::NFT_MSG_GETSETELEM, table, |to| {
                put_text(to, encode::NFTA_SET_ELEM_LIST_SET, set);
            })?;
            let listed = replies.iter().flat_map(|reply| decode::elements(decode::attributes(reply)));
            let listed: Vec<_> = listed.collect();
            let (count, counts) = (listed.len(), decode::counts(&listed));
            let elements = decode::join(spec, listed);
            if spec.interval || elements.len() == count {
                return Ok(CountedElements { elements, counts });
            }
        }
        Err(super::busy(format!("table {table}, set {set}")))
    }

    /// The elements of a map that rules change all the time. Some may be missing.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn listed_elements(&mut self, table: &str, set: &str) -> Result<BTreeMap<Key, Value>> {
        let replies = self.dump(libc::NFT_MSG_GETSETELEM, table, |to| {
            put_text(to, encode::NFTA_SET_ELEM_LIST_SET, set);
        })?;
        let listed = replies.iter().flat_map(|reply| decode::elements(decode::attributes(reply)));
        Ok(decode::join(&SetSpec::hash(&[]), listed.collect()))
    }

    /// Like [`dump`](Self::dump), but returns nothing for what does not exist.
    fn dump_if_there(
        &mut self,
        kind: i32,
        table: &str,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Vec<Reply>> {
        match self.dump(kind, table, fill) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(Vec::new()),
            replies => replies,
        }
    }
}
