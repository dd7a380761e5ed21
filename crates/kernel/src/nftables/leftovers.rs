//! Removes what a program has left in nftables, in its own tables and in tables that it shares with others, such as those
//! of `iptables`.

use std::collections::BTreeSet;
use std::fmt;

use super::decode::attributes;
use super::encode::*;
use super::others::{TableId, generation, refused, request, table_id};
use crate::netlink::attribute::{put, put_text, put_u32_be};
use crate::netlink::{Family, Refusal, Reply, Request, Socket};
use crate::{Error, Result};

/// How the objects of a program are recognised.
#[derive(Debug, Clone, Copy)]
pub struct Marks<'a> {
    /// The names of its own tables, of any family except for `inet`.
    pub tables: &'a [&'a str],
    /// The prefix of its chains in tables of others.
    pub chains: &'a str,
    /// The prefix of the comments at its rules in chains of others. A digest of 16 characters follows.
    pub comments: &'a str,
}

/// An object of the program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leftover {
    /// A rule in a chain of others: the table, the chain, and the rule's handle.
    Rule(TableId, String, u64),
    /// A chain in a table of others.
    Chain(TableId, String),
    /// A table with its content.
    Table(TableId),
}

/// What a program has left, and the generation of the ruleset in which it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// The objects, in the order in which they are removed.
    pub objects: Vec<Leftover>,
    generation: u32,
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(table, chain, _) => write!(f, "rule of chain {chain} in nftables table {table}"),
            Self::Chain(table, chain) => write!(f, "chain {chain} in nftables table {table}"),
            Self::Table(table) => write!(f, "nftables table {table}"),
        }
    }
}

impl Leftovers {
    /// Finds them in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel's refusal; `EINTR` if others change the ruleset all the time.
    pub fn find(marks: Marks<'_>) -> Result<Self> {
        const ATTEMPTS: usize = 20;
        let mut socket = Socket::open(Family::Netfilter)?;
        for _ in 0..ATTEMPTS {
            let before = generation(&mut socket)?;
            let objects = objects(&mut socket, marks).map_err(refused)?;
            if generation(&mut socket)? == before {
                return Ok(Self { objects: objects.into_iter().collect(), generation: before });
            }
        }
        Err(refused(std::io::Error::from_raw_os_error(libc::EINTR).into()))
    }

    /// Removes them, all or none. `ERESTART` if somebody has changed the ruleset since they were found.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn remove(&self) -> Result<()> {
        /// `NFNL_BATCH_GENID`
        const GENERATION: u16 = 1;
        let mut first = begin();
        put_u32_be(&mut first.payload, GENERATION, self.generation);
        let mut requests = vec![first];
        // Rules that lead to chains go before the chains.
        requests.extend(self.objects.iter().filter_map(emptied));
        requests.extend(self.objects.iter().filter_map(deleted));
        let Some(last) = requests.last_mut().filter(|_| !self.objects.is_empty()) else { return Ok(()) };
        // Silence must not count as success.
        last.flags |= libc::NLM_F_ACK as u16;
        requests.push(end());
        let failed = |refusal: Refusal| Error::refused("remove it", "what others left in nftables")(refusal);
        let mut socket = Socket::open(Family::Netfilter)?;
        let answers = socket.transaction(&requests).map_err(|error| failed(error.into()))?;
        let refusal = answers.iter().find(|(_, answer)| answer.is_err());
        match answers.is_empty() {
            true => Err(failed(std::io::Error::from_raw_os_error(libc::EBADMSG).into())),
            false if refusal.is_none() => Ok(()),
            false => answers.into_iter().try_for_each(|(_, answer)| answer).map_err(failed),
        }
    }
}

/// The message that removes the rules of a chain, or a rule of others' chain.
fn emptied(leftover: &Leftover) -> Option<Request> {
    let (id, chain, handle) = match leftover {
        Leftover::Rule(id, chain, handle) => (id, chain, Some(handle)),
        Leftover::Chain(id, chain) => (id, chain, None),
        Leftover::Table(_) => return None,
    };
    Some(request(libc::NFT_MSG_DELRULE, id.family, |to| {
        put_text(to, NFTA_TABLE, &id.name);
        put_text(to, NFTA_RULE_CHAIN, chain);
        if let Some(handle) = handle {
            put(to, RULE_HANDLE, &handle.to_be_bytes());
        }
    }))
}

/// The message that deletes a chain or a table.
fn deleted(leftover: &Leftover) -> Option<Request> {
    match leftover {
        Leftover::Rule(..) => None,
        Leftover::Chain(id, chain) => Some(request(libc::NFT_MSG_DELCHAIN, id.family, |to| {
            put_text(to, NFTA_TABLE, &id.name);
            put_text(to, NFTA_CHAIN_NAME, chain);
        })),
        Leftover::Table(id) => Some(request(libc::NFT_MSG_DELTABLE, id.family, |to| {
            put_text(to, NFTA_TABLE, &id.name);
        })),
    }
}

/// `NFTA_RULE_HANDLE`
const RULE_HANDLE: u16 = 3;
/// `NFPROTO_INET`: Tortie's family, in which no other program's table is deleted.
const INET: u8 = 1;

fn objects(socket: &mut Socket, marks: Marks<'_>) -> Result<BTreeSet<Leftover>, Refusal> {
    let mut found = BTreeSet::new();
    let is_own = |id: &TableId| id.family != INET && marks.tables.contains(&&*id.name);
    let tables = socket.dump(&request(libc::NFT_MSG_GETTABLE, 0, |_| ()))?;
    let (own, others): (Vec<TableId>, Vec<_>) = tables.iter().filter_map(table_id).partition(is_own);
    found.extend(own.into_iter().map(Leftover::Table));
    let chains = socket.dump(&request(libc::NFT_MSG_GETCHAIN, 0, |_| ()))?;
    for chain in &chains {
        if let (Some(id), Some(name)) = (table_id(chain), attributes(chain).text(NFTA_CHAIN_NAME))
            && name.starts_with(marks.chains)
            && !is_own(&id)
        {
            found.insert(Leftover::Chain(id, name));
        }
    }
    for id in others {
        let rules = socket.dump(&request(libc::NFT_MSG_GETRULE, id.family, |to| {
            put_text(to, NFTA_TABLE, &id.name);
        }))?;
        found.extend(rules.iter().filter_map(|rule| marked(rule, &id, marks)));
    }
    Ok(found)
}

/// The rule, if it is in a chain of others and leads to a chain of the program or has its comment.
fn marked(rule: &Reply, id: &TableId, marks: Marks<'_>) -> Option<Leftover> {
    let data = attributes(rule);
    let chain = data.text(NFTA_RULE_CHAIN).filter(|chain| !chain.starts_with(marks.chains))?;
    let handle = u64::from_be_bytes(data.get(RULE_HANDLE)?.try_into().ok()?);
    let leads_there = super::others::ForeignChain::of_rule(data).leads_to(marks.chains);
    let has_comment = || has_digest(&rule.payload, marks.comments.as_bytes());
    (leads_there || has_comment()).then(|| Leftover::Rule(id.clone(), chain, handle))
}

/// Whether the bytes contain the prefix, followed by 16 characters of a digest in URL-safe base64.
pub(crate) fn has_digest(bytes: &[u8], prefix: &[u8]) -> bool {
    const DIGEST: usize = 16;
    let is_of_digest = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    bytes
        .windows(prefix.len() + DIGEST)
        .any(|window| window.starts_with(prefix) && window.iter().skip(prefix.len()).all(is_of_digest))
}
