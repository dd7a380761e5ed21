//! The bytes of a legacy table: rules one after another, in which jumps are offsets.
//!
//! A built-in chain begins at its hook's entry and ends with its policy. Another chain begins with an entry that has the
//! target `ERROR` and the chain's name, and ends with a return. The table ends with an `ERROR`, too.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::LegacyFamily;
use crate::nftables::leftovers::{Marks, has_digest};
use crate::nftables::others::{Base, End, ForeignChain, ForeignTable, target_end};

/// `struct ipt_getinfo`: name, valid hooks, five entries, five underflows, the number of entries, their size.
pub(super) const INFO: usize = 84;
/// Where the entries begin in `struct ipt_get_entries`.
pub(super) const ENTRIES: usize = 40;
const HOOKS: usize = 5;
/// `struct xt_entry_match` and `struct xt_entry_target`: size, name and revision, before the data.
const HEAD: usize = 32;
const HEAD_NAME: Range<usize> = 2..31;
/// The alignment of everything (`XT_ALIGN`).
const ALIGNMENT: usize = 8;

/// The chains of the hooks, by number.
const BUILT_IN: [&str; HOOKS] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// Verdicts of the standard target: `-NF_DROP - 1`, `-NF_ACCEPT - 1`, `-NF_QUEUE - 1` and `XT_RETURN`.
const DROP: i32 = -1;
const ACCEPT: i32 = -2;
const QUEUE: i32 = -4;
const RETURN: i32 = -5;

/// A legacy table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Legacy {
    /// The program of the table.
    pub family: LegacyFamily,
    /// Its name.
    pub name: String,
    hooks: Vec<HookPlace>,
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

/// Where a hook enters the table, and where its policy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HookPlace {
    number: usize,
    entry: usize,
    policy: usize,
}

/// An entry: a rule, a chain's begin or its end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    place: Range<usize>,
    /// The chain that it belongs to; none for the end of the table.
    chain: Option<String>,
    is_rule: bool,
    rule: LegacyRule,
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegacyRule {
    /// Whether it has no condition.
    pub always: bool,
    /// The comments of its matches.
    pub comments: Vec<String>,
    /// What it does.
    pub then: Then,
}

/// What a rule does with a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Then {
    /// Continues with the next rule.
    Next,
    /// Accepts it.
    Accept,
    /// Drops it.
    Drop,
    /// Gives it to a program.
    Queue,
    /// Returns to the calling chain.
    Return,
    /// Continues in a chain.
    Chain {
        /// The chain.
        name: String,
        /// Whether it does not come back.
        goto: bool,
    },
    /// Another target of this name.
    Target(String),
}

/// What carries the marks of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Marked {
    /// A chain.
    Chain(String),
    /// A rule in this chain of others.
    Rule(String),
}

/// The parts of the bytes that differ between the families.
struct Sizes {
    /// The conditions of an entry (`struct ipt_ip`, `struct ip6t_ip6`), and the place of the flags in them.
    conditions: usize,
    flags: usize,
    goto: u8,
    /// The entry without matches and target.
    entry: usize,
}

impl Sizes {
    fn of(family: LegacyFamily) -> Self {
        match family {
            LegacyFamily::V4 => Self { conditions: 84, flags: 82, goto: 2, entry: 112 },
            LegacyFamily::V6 => Self { conditions: 136, flags: 131, goto: 4, entry: 168 },
        }
    }
}

/// The size of the entries of a table.
pub(super) fn size_of_entries(info: &[u8; INFO]) -> usize {
    word(info, INFO - 4).unwrap_or(0)
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let four = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    usize::try_from(u32::from_ne_bytes(four)).ok()
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    let two = bytes.get(at..at.checked_add(2)?)?.try_into().ok()?;
    Some(usize::from(u16::from_ne_bytes(two)))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// What an entry says before jumps are resolved.
enum Target {
    Standard(i32),
    Named,
    /// The begin of a chain, or the end of the table.
    Error(String),
}

impl Legacy {
    /// Reads the kernel's description of a table.
    pub(crate) fn parse(family: LegacyFamily, info: &[u8; INFO], entries: &[u8]) -> Result<Self, String> {
        let broken = |at: usize| format!("its entry at byte {at} cannot be read");
        let sizes = Sizes::of(family);
        let valid = word(info, 32).unwrap_or(0);
        let hooks = (0..HOOKS).filter(|number| valid & (1 << number) != 0).map(|number| {
            let of = |first: usize| word(info, first + 4 * number).unwrap_or(0);
            HookPlace { number, entry: of(36), policy: of(56) }
        });
        let mut table = Self {
            family,
            name: text(&info[..32]),
            hooks: hooks.collect(),
            bytes: entries.to_vec(),
            entries: Vec::new(),
        };
        let (mut targets, mut at) = (Vec::new(), 0);
        while at < entries.len() {
            let length = half(entries, at + sizes.conditions + 6).filter(|length| *length >= sizes.entry);
            let place = at..at + length.ok_or_else(|| broken(at))?;
            let bytes = entries.get(place.clone()).ok_or_else(|| broken(at))?;
            let (rule, target) = read_entry(&sizes, bytes).ok_or_else(|| broken(at))?;
            targets.push(target);
            at = place.end;
            table.entries.push(Entry { place, chain: None, is_rule: true, rule });
        }
        table.name_chains(&targets);
        table.resolve(&sizes, &targets)?;
        Ok(table)
    }

    /// Finds the chain of each entry, and which entries are rules.
    fn name_chains(&mut self, targets: &[Target]) {
        let last = targets.len().saturating_sub(1);
        let mut chain = None;
        for (number, target) in targets.iter().enumerate() {
            let at = self.entries[number].place.start;
            let hook = self.hooks.iter().find(|hook| hook.entry == at);
            let begins = match target {
                Target::Error(_) if number == last => Some(None),
                Target::Error(name) => Some(Some(name.clone())),
                _ => hook.map(|hook| Some(BUILT_IN[hook.number].to_owned())),
            };
            let is_begin = matches!(target, Target::Error(_));
            chain = begins.unwrap_or(chain);
            let is_policy = self.hooks.iter().any(|hook| hook.policy == at);
            let ends = |next: &Target| matches!(next, Target::Error(_));
            let is_built_in = chain.as_ref().is_some_and(|name| BUILT_IN.contains(&name.as_str()));
            let is_end = is_policy || (!is_built_in && targets.get(number + 1).is_some_and(ends));
            self.entries[number].is_rule = !is_begin && !is_end;
            self.entries[number].chain.clone_from(&chain);
        }
    }

    /// Finds the chains that rules lead to.
    fn resolve(&mut self, sizes: &Sizes, targets: &[Target]) -> Result<(), String> {
        let mut begins = BTreeMap::new();
        for (entry, target) in self.entries.iter().zip(targets) {
            if let Target::Error(name) = target {
                begins.insert(entry.place.end, name.clone());
            }
        }
        for (entry, target) in self.entries.iter_mut().zip(targets) {
            let Target::Standard(verdict) = target else { continue };
            entry.rule.then = match *verdict {
                DROP => Then::Drop,
                ACCEPT => Then::Accept,
                QUEUE => Then::Queue,
                RETURN => Then::Return,
                jump => {
                    let jump = usize::try_from(jump).map_err(|_| format!("it has the verdict {jump}"))?;
                    let goto = self.bytes[entry.place.start + sizes.flags] & sizes.goto != 0;
                    match begins.get(&jump) {
                        _ if jump == entry.place.end && !goto => Then::Next,
                        Some(name) => Then::Chain { name: name.clone(), goto },
                        None => {
                            return Err(format!("a rule of it jumps to byte {jump}, where no chain begins"));
                        }
                    }
                }
            };
        }
        Ok(())
    }

    /// The number of entries.
    pub(super) fn entries(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    /// The number of rules.
    #[must_use]
    pub fn rules(&self) -> usize {
        self.entries.iter().filter(|entry| entry.is_rule).count()
    }

    /// What may happen to packets in its chains.
    #[must_use]
    pub fn ends(&self) -> ForeignTable {
        let mut table = ForeignTable::default();
        for entry in &self.entries {
            let Some(name) = &entry.chain else { continue };
            let chain = table.chains.entry(name.clone()).or_default();
            let hook = self.hooks.iter().find(|hook| BUILT_IN[hook.number] == name);
            if chain.base.is_none()
                && let Some(hook) = hook
            {
                let policy = self.entries.iter().find(|entry| entry.place.start == hook.policy);
                let drop = policy.is_some_and(|policy| policy.rule.then == Then::Drop);
                let (number, priority) = (hook.number as u32, priority(&self.name, hook.number));
                chain.base = Some(Base { hook: number, priority, drop, devices: Vec::new() });
            }
            if entry.is_rule && !chain.closed {
                take(chain, &entry.rule);
            }
        }
        table
    }

    /// What carries the marks.
    #[must_use]
    pub fn marked(&self, marks: Marks<'_>) -> Vec<Marked> {
        let mut chains = BTreeSet::new();
        let mut rules = Vec::new();
        for entry in &self.entries {
            match &entry.chain {
                Some(name) if name.starts_with(marks.chains) => {
                    chains.insert(name);
                }
                Some(name) if entry.is_rule && is_marked(&entry.rule, marks) => {
                    rules.push(Marked::Rule(name.clone()));
                }
                _ => {}
            }
        }
        rules.extend(chains.into_iter().map(|name| Marked::Chain(name.clone())));
        rules
    }

    /// Asks for everything that is asked of a table.
    pub(crate) fn read_any(&self) -> Result<(), String> {
        let marks = Marks { tables: &[], chains: "cali-", comments: "cali:" };
        let _ = (self.rules(), self.ends(), self.marked(marks));
        match self.without(marks)? {
            Some(changed) => drop(changed.encode(&[0; 32], self.entries(), 0)),
            None => drop(self.encode(&[0; 32], self.entries(), 0)),
        }
        Ok(())
    }

    /// The same table without what carries the marks; `None` if nothing does.
    pub(super) fn without(&self, marks: Marks<'_>) -> Result<Option<Self>, String> {
        let is_kept = |entry: &Entry| match &entry.chain {
            Some(name) if name.starts_with(marks.chains) => false,
            Some(_) => !(entry.is_rule && is_marked(&entry.rule, marks)),
            None => true,
        };
        if self.entries.iter().all(is_kept) {
            return Ok(None);
        }
        // Where each entry was, and where it is now, or the next one that is left.
        let (mut moved, mut bytes) = (BTreeMap::new(), Vec::new());
        for entry in &self.entries {
            moved.insert(entry.place.start, bytes.len());
            if is_kept(entry) {
                bytes.extend_from_slice(&self.bytes[entry.place.clone()]);
            }
        }
        moved.insert(self.bytes.len(), bytes.len());
        let to = |old: usize| {
            moved.get(&old).copied().ok_or_else(|| format!("nothing begins at byte {old} of it"))
        };
        let sizes = Sizes::of(self.family);
        for entry in self.entries.iter().filter(|entry| is_kept(entry)) {
            let begin = to(entry.place.start)?;
            let target = begin + half(&bytes, begin + sizes.conditions + 4).unwrap_or(0);
            let verdict =
                match &entry.rule.then {
                    Then::Next => begin + entry.place.len(),
                    Then::Chain { .. } => to(word(&bytes, target + HEAD)
                        .ok_or_else(|| "a jump of it cannot be read".to_owned())?)?,
                    _ => continue,
                };
            let verdict = i32::try_from(verdict).map_err(|error| error.to_string())?;
            bytes[target + HEAD..target + HEAD + 4].copy_from_slice(&verdict.to_ne_bytes());
        }
        let hooks: Result<Vec<_>, String> = self
            .hooks
            .iter()
            .map(|hook| Ok(HookPlace { entry: to(hook.entry)?, policy: to(hook.policy)?, ..*hook }))
            .collect();
        let changed = Self { hooks: hooks?, bytes, ..self.clone() };
        // Whatever is written must be understood again.
        let info = changed.info(self.entries.iter().filter(|entry| is_kept(entry)).count());
        Self::parse(self.family, &info, &changed.bytes).map(Some)
    }

    /// `struct ipt_getinfo`
    fn info(&self, entries: usize) -> [u8; INFO] {
        let mut info = [0; INFO];
        let name = self.name.as_bytes();
        info[..name.len().min(31)].copy_from_slice(&name[..name.len().min(31)]);
        let mut put =
            |at: usize, value: usize| info[at..at + 4].copy_from_slice(&(value as u32).to_ne_bytes());
        put(32, self.hooks.iter().fold(0, |valid, hook| valid | (1 << hook.number)));
        for hook in &self.hooks {
            put(36 + 4 * hook.number, hook.entry);
            put(56 + 4 * hook.number, hook.policy);
        }
        put(76, entries);
        put(80, self.bytes.len());
        info
    }

    /// `struct ipt_replace` for a table that had `before` entries, with the address for their counters.
    pub(super) fn encode(&self, name: &[u8; 32], before: u32, counters: usize) -> Vec<u8> {
        let info = self.info(self.entries.len());
        let mut message = name.to_vec();
        // Valid hooks; the number and the size of the entries; the hooks.
        message.extend_from_slice(&info[32..36]);
        message.extend_from_slice(&info[76..84]);
        message.extend_from_slice(&info[36..76]);
        message.extend_from_slice(&before.to_ne_bytes());
        message.extend_from_slice(&counters.to_ne_bytes());
        message.extend_from_slice(&self.bytes);
        message
    }
}

fn read_entry(sizes: &Sizes, bytes: &[u8]) -> Option<(LegacyRule, Target)> {
    let target_at = half(bytes, sizes.conditions + 4)?;
    let (mut at, mut comments, mut has_matches) = (sizes.entry, Vec::new(), false);
    while at < target_at {
        let (name, data, length) = part(bytes, at)?;
        if name == "comment" {
            comments.push(text(data));
        } else {
            has_matches = true;
        }
        at += length;
    }
    let (name, data, _) = part(bytes, target_at)?;
    let target = match name.as_str() {
        "" => Target::Standard(i32::from_ne_bytes(data.get(..4)?.try_into().ok()?)),
        "ERROR" => Target::Error(text(data)),
        _ => Target::Named,
    };
    let without_goto = |(at, byte): (usize, &u8)| if at == sizes.flags { *byte & !sizes.goto } else { *byte };
    let always =
        !has_matches && bytes[..sizes.conditions].iter().enumerate().map(without_goto).all(|byte| byte == 0);
    Some((LegacyRule { always, comments, then: Then::Target(name) }, target))
}

/// The name, the data and the length of a match or a target.
fn part(bytes: &[u8], at: usize) -> Option<(String, &[u8], usize)> {
    let length = half(bytes, at).filter(|length| *length >= HEAD && length.is_multiple_of(ALIGNMENT))?;
    let part = bytes.get(at..at + length)?;
    Some((text(&part[HEAD_NAME]), &part[HEAD..], length))
}

fn is_marked(rule: &LegacyRule, marks: Marks<'_>) -> bool {
    let leads_there = matches!(&rule.then, Then::Chain { name, .. } if name.starts_with(marks.chains));
    leads_there
        || rule.comments.iter().any(|comment| has_digest(comment.as_bytes(), marks.comments.as_bytes()))
}

/// Adds the next rule to what is known of a chain, as for those of nftables.
fn take(chain: &mut ForeignChain, rule: &LegacyRule) {
    let end = match &rule.then {
        Then::Next | Then::Accept | Then::Return => None,
        Then::Drop => Some(End::Drop),
        Then::Queue => Some(End::Queue),
        Then::Chain { name, .. } => Some(End::Chain(name.clone())),
        // The policy of a hook that is no rule, and targets.
        Then::Target(name) => target_end(name),
    };
    chain.ends.extend(end);
    let to_policy = matches!(rule.then, Then::Return | Then::Chain { goto: true, .. });
    let ends = to_policy || matches!(rule.then, Then::Accept | Then::Drop | Then::Queue);
    chain.closed |= rule.always && ends && !(to_policy && chain.base.is_some());
}

/// The priority of a table's hook (`enum nf_ip_hook_priorities`).
fn priority(table: &str, hook: usize) -> i32 {
    let is_source = matches!(hook, 1 | 4);
    match table {
        "raw" => -300,
        "mangle" => -150,
        "nat" if is_source => 100,
        "nat" => -100,
        "security" => 50,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::NetNs;

    #[test]
    fn a_table_that_is_too_large_is_not_read_and_its_size_is_named() {
        let namespace = NetNs::create().unwrap();
        for family in LegacyFamily::ALL {
            let read = |most| namespace.run(|| Legacy::read_at_most(family, "filter", most)).unwrap();
            let size = read(usize::MAX).unwrap().bytes.len();
            assert!(read(size).is_ok());
            let problem = read(size - 1).unwrap_err().to_string();
            assert!(problem.contains(&format!("it has {size} bytes")), "{problem}");
        }
    }

    /// The kernel is trusted, but not to have only what this code knows.
    #[test]
    fn no_bytes_of_a_table_cause_a_panic() {
        let namespace = NetNs::create().unwrap();
        let mut state = 1_u64;
        let mut below = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % limit
        };
        let marks = Marks { tables: &[], chains: "INPUT", comments: "cali:" };
        for family in LegacyFamily::ALL {
            let table = namespace.run(|| Legacy::read(family, "filter").unwrap()).unwrap();
            let info = table.info(table.entries.len());
            assert_eq!(Legacy::parse(family, &info, &table.bytes).as_ref(), Ok(&table));
            let mut read = 0;
            for _ in 0..50_000 {
                let (mut info, mut bytes) = (info, table.bytes.clone());
                for _ in 0..=below(3) {
                    let at = below(bytes.len());
                    bytes[at] = [0, 1, 2, 40, 112, 152, 255, below(256) as u8][below(8)];
                }
                if below(4) == 0 {
                    info[below(INFO)] = below(256) as u8;
                }
                bytes.truncate(if below(4) == 0 { below(bytes.len()) } else { bytes.len() });
                if let Ok(table) = Legacy::parse(family, &info, &bytes) {
                    read += 1;
                    let _ = (table.ends(), table.marked(marks), table.without(marks));
                }
            }
            assert!((1_000..49_000).contains(&read), "{read} tables were understood");
        }
    }
}
