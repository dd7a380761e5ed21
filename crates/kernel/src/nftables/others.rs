//! The tables of others, as far as they matter: where packets enter them, and what may happen to the packets there.
//!
//! Only the ends of rules are read: verdicts, and expressions that end a packet's evaluation. The conditions before
//! them are ignored, so an end counts if any packet can reach it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::codec::{LIST_ELEM, verdict};
use super::decode::attributes;
use super::encode::*;
use super::verdict::Verdict;
use crate::netlink::attribute::{Attributes, put_text};
use crate::netlink::{Family, Refusal, Reply, Request, Socket};
use crate::{Error, Result};

/// The cost of reading a map in addition to its elements, in objects.
const MAP: usize = 10;
/// How often it is read again if it changes meanwhile.
const ATTEMPTS: usize = 3;

/// The foreign tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Others {
    /// Their tables.
    pub tables: BTreeMap<TableId, ForeignTable>,
    /// The number of objects that were read.
    pub objects: usize,
    /// Whether the limit was reached.
    pub cut_short: bool,
    /// The generation of the ruleset; `None` if it changed meanwhile.
    pub generation: Option<u32>,
}

/// A table's family (`NFPROTO_…`) and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TableId {
    /// `NFPROTO_…` of `linux/netfilter.h`.
    pub family: u8,
    /// Its name.
    pub name: String,
}

/// A table of somebody else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForeignTable {
    /// Whether it is dormant, so that no packet enters it.
    pub dormant: bool,
    /// Its chains, by name.
    pub chains: BTreeMap<String, ForeignChain>,
    /// The targets of the verdicts in its maps, by the name of the map.
    pub maps: BTreeMap<String, BTreeSet<End>>,
}

/// A chain of such a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForeignChain {
    /// Its hook, if it is a base chain.
    pub base: Option<Base>,
    /// The ends of its rules.
    pub ends: BTreeSet<End>,
    /// Whether a rule without a condition accepts or leaves the chain, so that later rules and the chain's policy are
    /// never evaluated.
    pub closed: bool,
}

/// The hook of a base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// `NF_INET_…`, or the equivalent of the family.
    pub hook: u32,
    /// A lower number comes first.
    pub priority: i32,
    /// Whether packets that reach the end are dropped.
    pub drop: bool,
    /// The interfaces that it is bound to, if any.
    pub devices: Vec<String>,
}

/// What a rule, or an element of a map, may do with a packet, except for accepting and returning.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Drops it.
    Drop,
    /// Rejects it.
    Reject,
    /// Passes it to a program, which may drop it.
    Queue,
    /// An unknown expression of this name.
    Unknown(String),
    /// Continues in a chain.
    Chain(String),
    /// Continues with the verdict of a map.
    Map(String),
}

impl Others {
    /// Reads the tables of all families in the calling thread's network namespace, except for Tortie's: the tables
    /// `own` of the family `inet`. Reads at most `most` tables, chains, rules and elements. Unknown expressions are
    /// no error.
    ///
    /// # Errors
    /// The kernel's refusal to list them.
    pub fn read(own: &[&str], most: usize) -> Result<Self> {
        let mut attempt = 1;
        loop {
            let mut reader = Reader { own, socket: Socket::open(Family::Netfilter)?, left: most };
            let mut others = Self::default();
            let before = generation(&mut reader.socket)?;
            let quiet = reader.read(&mut others.tables).map_err(refused)?;
            others.objects = most - reader.left;
            if reader.left == 0 {
                others.cut_short = true;
                reader.socket = Socket::open(Family::Netfilter)?;
            }
            let held_still = quiet && generation(&mut reader.socket)? == before;
            if held_still || attempt == ATTEMPTS {
                others.generation = held_still.then_some(before);
                return Ok(others);
            }
            attempt += 1;
        }
    }
}

/// The generation of the ruleset of the calling thread's network namespace. Each transaction that changes something
/// increments it.
///
/// # Errors
/// The kernel's refusal.
pub fn current_generation() -> Result<u32> {
    generation(&mut Socket::open(Family::Netfilter)?)
}

pub(super) fn generation(socket: &mut Socket) -> Result<u32> {
    /// `NFTA_GEN_ID`
    const ID: u16 = 1;
    let replies = socket.get(&request(libc::NFT_MSG_GETGEN, 0, |_| ())).map_err(refused)?;
    let number = replies.first().and_then(|reply| attributes(reply).u32_be(ID));
    number.ok_or_else(|| refused(std::io::Error::from_raw_os_error(libc::EBADMSG).into()))
}

pub(super) fn refused(refusal: Refusal) -> Error {
    Error::refused("list them", "the nftables tables of others")(refusal)
}

/// A request about objects of a family.
pub(super) fn request(kind: i32, family: u8, fill: impl FnOnce(&mut Vec<u8>)) -> Request {
    let Request { kind, flags, mut payload } = message(kind, 0, fill);
    payload[0] = family;
    Request { kind, flags, payload }
}

struct Reader<'a> {
    own: &'a [&'a str],
    socket: Socket,
    /// The number of objects that may still be read.
    left: usize,
}

impl Reader<'_> {
    /// Returns whether they were unchanged meanwhile. Ends early if `left` is 0.
    fn read(&mut self, tables: &mut BTreeMap<TableId, ForeignTable>) -> Result<bool, Refusal> {
        let mut quiet = self.tables(tables)?;
        if self.left > 0 {
            quiet &= self.chains(tables)?;
        }
        for (id, table) in tables.iter_mut().filter(|(_, table)| table.is_entered()) {
            if self.left > 0 {
                quiet &= self.rules(id, table)?;
            }
            let ends = table.chains.values().flat_map(|chain| &chain.ends);
            let maps: BTreeSet<_> = ends.filter_map(End::map).map(str::to_owned).collect();
            for map in maps {
                self.left = self.left.saturating_sub(MAP);
                if self.left > 0 {
                    quiet &= self.elements(id, map, table)?;
                }
            }
        }
        Ok(quiet)
    }

    fn tables(&mut self, tables: &mut BTreeMap<TableId, ForeignTable>) -> Result<bool, Refusal> {
        /// `NFT_TABLE_F_DORMANT`
        const DORMANT: u32 = 1;
        let (own, left) = (self.own, &mut self.left);
        self.socket.stream(&request(libc::NFT_MSG_GETTABLE, 0, |_| ()), &mut |reply| {
            if let Some(id) = table_id(&reply)
                && !(id.family == INET && own.contains(&&*id.name))
            {
                let flags = attributes(&reply).u32_be(NFTA_TABLE_FLAGS).unwrap_or(0);
                tables.insert(id, ForeignTable { dormant: flags & DORMANT != 0, ..ForeignTable::default() });
                *left -= 1;
            }
            *left > 0
        })
    }

    fn chains(&mut self, tables: &mut BTreeMap<TableId, ForeignTable>) -> Result<bool, Refusal> {
        // The kernel lists those of all tables in any case.
        let left = &mut self.left;
        self.socket.stream(&request(libc::NFT_MSG_GETCHAIN, 0, |_| ()), &mut |reply| {
            let data = attributes(&reply);
            if let Some(name) = data.text(NFTA_CHAIN_NAME)
                && let Some(table) = table_id(&reply).and_then(|id| tables.get_mut(&id))
            {
                let base = if table.dormant { None } else { base(data) };
                table.chains.insert(name, ForeignChain { base, ..ForeignChain::default() });
                *left -= 1;
            }
            *left > 0
        })
    }

    fn rules(&mut self, id: &TableId, table: &mut ForeignTable) -> Result<bool, Refusal> {
        let left = &mut self.left;
        let request = request(libc::NFT_MSG_GETRULE, id.family, |to| put_text(to, NFTA_TABLE, &id.name));
        self.socket.stream(&request, &mut |reply| {
            let data = attributes(&reply);
            let chain = data.text(NFTA_RULE_CHAIN).and_then(|name| table.chains.get_mut(&name));
            if let Some(chain) = chain.filter(|chain| !chain.closed) {
                chain.take(data);
            }
            *left -= 1;
            *left > 0
        })
    }

    fn elements(&mut self, id: &TableId, map: String, table: &mut ForeignTable) -> Result<bool, Refusal> {
        let left = &mut self.left;
        let request = request(libc::NFT_MSG_GETSETELEM, id.family, |to| {
            put_text(to, NFTA_TABLE, &id.name);
            put_text(to, NFTA_SET_ELEM_LIST_SET, &map);
        });
        let ends = table.maps.entry(map).or_default();
        let listed = self.socket.stream(&request, &mut |reply| {
            let list = attributes(&reply).nest(NFTA_SET_ELEM_LIST_ELEMENTS);
            for (_, element) in list.filter(|(kind, _)| *kind == LIST_ELEM) {
                ends.extend(end(Attributes(element).nest(NFTA_SET_ELEM_DATA)));
                *left = left.saturating_sub(1);
            }
            *left > 0
        });
        match listed {
            // It has disappeared with its rule.
            Err(refusal) if refusal.source.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            listed => listed,
        }
    }
}

/// Reads an object in each way in which an answer is read.
pub(super) fn read_any(reply: &Reply) -> Option<Base> {
    let data = attributes(reply);
    let _ = (ForeignChain::of_rule(data).leads_to("cali"), table_id(reply));
    for (_, element) in data.nest(NFTA_SET_ELEM_LIST_ELEMENTS).filter(|(kind, _)| *kind == LIST_ELEM) {
        let _ = end(Attributes(element).nest(NFTA_SET_ELEM_DATA));
    }
    base(data)
}

pub(super) fn table_id(reply: &Reply) -> Option<TableId> {
    Some(TableId { family: *reply.payload.first()?, name: attributes(reply).text(NFTA_TABLE)? })
}

fn base(chain: Attributes<'_>) -> Option<Base> {
    /// `NFTA_HOOK_DEV`, `NFTA_HOOK_DEVS`, `NFTA_DEVICE_NAME`
    const DEVICE: u16 = 3;
    const DEVICES: u16 = 4;
    const NAME: u16 = 1;
    let hook = Attributes(chain.get(NFTA_CHAIN_HOOK)?);
    let listed = hook.nest(DEVICES).filter(|(kind, _)| *kind == NAME);
    let listed = listed.map(|(_, name)| String::from_utf8_lossy(name).trim_end_matches('\0').to_owned());
    let mut devices: Vec<_> = listed.chain(hook.text(DEVICE)).collect();
    devices.sort();
    devices.dedup();
    Some(Base {
        hook: hook.u32_be(NFTA_HOOK_HOOKNUM)?,
        priority: hook.u32_be(NFTA_HOOK_PRIORITY)?.cast_signed(),
        drop: chain.u32_be(NFTA_CHAIN_POLICY) == Some(0),
        devices,
    })
}

/// The end that a verdict leads to.
fn end(data: Attributes<'_>) -> Option<End> {
    /// `NFTA_DATA_VERDICT`
    const VERDICT: u16 = 2;
    data.get(VERDICT)?;
    match verdict(data) {
        Some(Verdict::Accept | Verdict::Continue | Verdict::Return) => None,
        Some(Verdict::Drop) => Some(End::Drop),
        Some(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(End::Chain(chain)),
        None => Some(End::Unknown("verdict".to_owned())),
    }
}

impl End {
    fn map(&self) -> Option<&str> {
        match self {
            Self::Map(name) => Some(name),
            _ => None,
        }
    }
}

impl ForeignTable {
    fn is_entered(&self) -> bool {
        self.chains.values().any(|chain| chain.base.is_some())
    }
}

impl ForeignChain {
    /// A chain with one rule.
    pub(super) fn of_rule(rule: Attributes<'_>) -> Self {
        let mut chain = Self::default();
        chain.take(rule);
        chain
    }

    /// Whether a rule continues in a chain whose name begins so.
    pub(super) fn leads_to(&self, prefix: &str) -> bool {
        self.ends.iter().any(|end| matches!(end, End::Chain(chain) if chain.starts_with(prefix)))
    }

    /// Adds the next rule.
    fn take(&mut self, rule: Attributes<'_>) {
        // `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`, and the numbers of the verdict in `immediate` and `lookup`.
        const NAME: u16 = 1;
        const DATA: u16 = 2;
        const VERDICT_REGISTER: Option<u32> = Some(0);
        let mut always = true;
        for (_, expr) in rule.nest(NFTA_RULE_EXPRESSIONS).filter(|(kind, _)| *kind == LIST_ELEM) {
            let name = Attributes(expr).text(NAME).unwrap_or_default();
            let data = Attributes(expr).nest(DATA);
            match name.as_str() {
                "immediate" if data.u32_be(1) == VERDICT_REGISTER => {
                    let verdict = verdict(data.nest(2));
                    self.ends.extend(end(data.nest(2)));
                    let goes_on = matches!(verdict, None | Some(Verdict::Continue | Verdict::Jump(_)));
                    // In a base chain, a return leads to the policy.
                    let to_policy = matches!(verdict, Some(Verdict::Return | Verdict::Goto(_)));
                    self.closed |= always && !goes_on && !(to_policy && self.base.is_some());
                }
                "lookup" if data.u32_be(3) == VERDICT_REGISTER => {
                    self.ends.extend(data.text(1).map(End::Map));
                }
                "reject" => drop(self.ends.insert(End::Reject)),
                "queue" => drop(self.ends.insert(End::Queue)),
                "target" => self.ends.extend(target_end(&data.text(1).unwrap_or_default())),
                name if HARMLESS.split(' ').any(|known| known == name) => {}
                name => drop(self.ends.insert(End::Unknown(name.to_owned()))),
            }
            always &= matches!(name.as_str(), "counter" | "log" | "notrack");
        }
    }
}

/// The effect of an `iptables` target.
pub(crate) fn target_end(name: &str) -> Option<End> {
    match name {
        "REJECT" => Some(End::Reject),
        "NFQUEUE" => Some(End::Queue),
        name if HARMLESS_TARGETS.split(' ').any(|known| known == name) => None,
        name => Some(End::Unknown(name.to_owned())),
    }
}

/// Expressions that do not end a packet's evaluation.
const HARMLESS: &str = "bitwise byteorder cmp connlimit counter ct dup dynset exthdr fib flow_offload hash immediate inner \
    last limit log lookup masq match meta nat notrack numgen objref osf payload quota range redir rt \
    secmark socket tproxy tunnel xfrm";

/// Targets that do not end a packet's evaluation.
const HARMLESS_TARGETS: &str = "AUDIT CHECKSUM CLASSIFY CONNMARK CONNSECMARK CT DNAT DSCP ECN HL HMARK IDLETIMER LED LOG MARK \
    MASQUERADE NETMAP NFLOG NOTRACK RATEEST REDIRECT SECMARK SET SNAT TCPMSS TEE TOS TPROXY TTL";

/// In the form of `nft`.
impl fmt::Display for TableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.escape_debug();
        match self.family {
            INET => write!(f, "inet {name}"),
            2 => write!(f, "ip {name}"),
            3 => write!(f, "arp {name}"),
            5 => write!(f, "netdev {name}"),
            7 => write!(f, "bridge {name}"),
            10 => write!(f, "ip6 {name}"),
            other => write!(f, "{other} {name}"),
        }
    }
}

impl TableId {
    /// The name of a hook of its family.
    pub fn hook(&self, number: u32) -> &'static str {
        let names: &[&str] = match self.family {
            3 => &["input", "output", "forward"],
            5 => &["ingress", "egress"],
            _ => &["prerouting", "input", "forward", "output", "postrouting", "ingress"],
        };
        names.get(number as usize).copied().unwrap_or("unknown")
    }
}

/// `NFPROTO_INET`
const INET: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::NetNs;
    use crate::nftables::{self, Expr, Nft, diff};

    #[test]
    fn only_the_requested_number_is_read() {
        let rule =
            nftables::Rule { exprs: vec![Expr::Counter, Expr::Verdict(Verdict::Drop)], ..Default::default() };
        let chain = nftables::Chain { base: None, rules: vec![rule; 100] };
        let base = nftables::BaseChain {
            kind: nftables::ChainKind::Filter,
            hook: nftables::Hook::Forward,
            priority: 0,
            drop: false,
        };
        let base = nftables::Chain { base: Some(base), ..chain.clone() };
        let chains = [("a".to_owned(), base), ("b".to_owned(), chain)].into();
        let table = nftables::Table { chains, ..Default::default() };
        let read = |own: &str, most| {
            let transaction = diff("fw", &table, None);
            let read = || {
                Nft::open().unwrap().commit(&transaction).unwrap();
                Others::read(&[own], most).unwrap()
            };
            NetNs::create().unwrap().run(read).unwrap()
        };
        let whole = read("tortie", 1_000);
        let fw = &whole.tables[&TableId { family: INET, name: "fw".to_owned() }];
        assert_eq!(fw.chains["b"].ends, BTreeSet::from([End::Drop]));
        assert!(fw.chains["b"].closed && !whole.cut_short && whole.generation.is_some());
        for most in [1, 2, 3, 4, 102, 203] {
            assert!(read("tortie", most).cut_short, "{most}");
        }
        assert!(!read("tortie", 204).cut_short);
        assert_eq!(read("fw", 1).tables, BTreeMap::new(), "ours is not looked at");
    }
}
