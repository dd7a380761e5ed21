//! nftables without `nft`: tables as plain data, written and read over nfnetlink.
//!
//! A [`Table`] is the desired state. [`diff`] finds the necessary changes, [`Nft::commit`] makes them in one
//! transaction, and [`Nft::list`] reads the table back as the same data.

pub mod expr;

mod codec;
mod counts;
mod decode;
mod encode;
mod key;
mod key_types;
pub mod leftovers;
pub mod others;
pub mod probe;
mod set;
mod table;
mod text;
mod transaction;
mod verdict;
mod watch;

use std::collections::BTreeMap;

pub use counts::{CountedElements, CountedRule};
pub use expr::{CmpOp, CtKey, Expr, Header, MetaKey, NatFamily, Register, SetRef};
pub use key::{Field, Key};
pub use set::{Data, DataKind, Element, Set, SetSpec, Value};
pub use table::{BaseChain, Chain, ChainKind, Count, Hook, Rule, Table};
pub use text::{element_text, rule_text};
pub use transaction::{Op, Transaction, diff, diff_elements};
pub use transaction::{additions, alterations, changeable, changes, created, removals};
pub use verdict::{Reject, Verdict};
pub use watch::{ChangeCallback, Watch};

#[cfg(any(test, feature = "missing-modules"))]
pub use self::codec::unheard;
use self::encode::Piece;
pub use self::encode::rule_length;
use crate::netlink::attribute::put_text;
use crate::netlink::{Family, Reply, Request, Socket};
use crate::{Error, Result};

/// A netlink connection to the nftables of one network namespace: that of the thread that opened it.
#[derive(Debug)]
pub struct Nft {
    socket: Socket,
    /// The maximum size of a transaction in bytes.
    limit: usize,
    /// The number of transactions that the kernel has accepted.
    commits: u32,
}

/// Changes together with their messages, because the test whether they fit in a transaction needs the same encoding
/// as the transaction.
#[derive(Debug, Default)]
pub struct Encoded {
    transaction: Transaction,
    pieces: Vec<Piece>,
}

impl Encoded {
    /// The changes.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.transaction.ops
    }

    /// The size of the messages in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.pieces.iter().map(Piece::length).sum()
    }

    /// Splits the changes at this index into two transactions.
    #[must_use]
    pub fn split_at(self, index: usize) -> (Self, Self) {
        let Transaction { table, mut ops } = self.transaction;
        let later = ops.split_off(index.min(ops.len()));
        let (first, mut second): (Vec<_>, Vec<_>) =
            self.pieces.into_iter().partition(|piece| piece.op < index);
        second.iter_mut().for_each(|piece| piece.op -= index);
        let encoded = |ops, pieces| Self { transaction: Transaction { table: table.clone(), ops }, pieces };
        (encoded(ops, first), encoded(later, second))
    }
}

/// How often a table or a set is read again if it changes meanwhile.
const LIST_ATTEMPTS: usize = 20;

impl Nft {
    /// Opens a connection.
    ///
    /// # Errors
    /// The call that failed.
    pub fn open() -> Result<Self> {
        let socket = Socket::open(Family::Netfilter)?;
        let limit = socket.send_limit();
        Ok(Self { socket, limit, commits: 0 })
    }

    /// Limits transactions to this many bytes, and to the socket's buffer.
    pub fn limit_transactions(&mut self, bytes: usize) {
        self.limit = bytes.min(self.socket.send_limit());
    }

    /// The connection's port id.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.socket.port()
    }

    /// The number of accepted transactions of this connection. Each has created a generation of the ruleset.
    pub fn commits(&self) -> u32 {
        self.commits
    }

    /// The number of bytes of messages that fit in one transaction.
    #[must_use]
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(BATCH_ENDS)
    }

    /// Encodes changes for [`commit_encoded`](Self::commit_encoded).
    #[must_use]
    pub fn encode(&self, transaction: Transaction) -> Encoded {
        let pieces = encode::encode(&transaction, self.room());
        Encoded { transaction, pieces }
    }

    /// Whether the changes fit in one transaction.
    #[must_use]
    pub fn fits(&self, encoded: &Encoded) -> bool {
        encoded.length() <= self.room()
    }

    /// The messages of a transaction, including its first and last message. The last change requests an answer.
    #[must_use]
    pub fn messages(&self, transaction: &Transaction) -> Vec<Request> {
        let pieces = encode::encode(transaction, self.room());
        let mut requests: Vec<_> = pieces.into_iter().flat_map(|piece| piece.requests).collect();
        requests.iter_mut().next_back().into_iter().for_each(|last| last.flags |= libc::NLM_F_ACK as u16);
        [vec![encode::begin()], requests, vec![encode::end()]].concat()
    }

    /// Makes all of the changes or none.
    ///
    /// # Errors
    /// The refused chain or set, and why; `EMSGSIZE` and the largest change if they do not fit in one transaction.
    pub fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let pieces = encode::encode(transaction, self.room());
        self.commit_pieces(transaction, pieces)
    }

    /// Makes all of the encoded changes or none.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_encoded(&mut self, encoded: Encoded) -> Result<()> {
        self.commit_pieces(&encoded.transaction, encoded.pieces)
    }

    fn commit_pieces(&mut self, transaction: &Transaction, pieces: Vec<Piece>) -> Result<()> {
        if pieces.iter().map(Piece::length).sum::<usize>() > self.room() {
            return Err(too_large(transaction, pieces.iter().max_by_key(|piece| piece.length())));
        }
        let requests = |piece: Piece| piece.requests.into_iter().map(move |request| (piece.op, request));
        self.send(transaction, pieces.into_iter().flat_map(requests).collect())
    }

    /// Makes the changes in order, in as many transactions as necessary, and returns their number. The rules of a
    /// chain are set at once; elements are added and removed separately. Packets meet every intermediate state, which
    /// must be suitable for that. After a failure, earlier transactions stay.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); a change that fits in no transaction is rejected before anything is done.
    pub fn commit_in_order(&mut self, transaction: &Transaction) -> Result<usize> {
        let pieces = encode::encode(transaction, self.room());
        if let Some(piece) = pieces.iter().find(|piece| piece.length() > self.room()) {
            return Err(too_large(transaction, Some(piece)));
        }
        let (mut batch, mut size, mut transactions) = (Vec::new(), 0, 0);
        for piece in pieces {
            let length = piece.length();
            if size + length > self.room() {
                self.send(transaction, std::mem::take(&mut batch))?;
                (size, transactions) = (0, transactions + 1);
            }
            size += length;
            batch.extend(piece.requests.into_iter().map(|request| (piece.op, request)));
        }
        self.send(transaction, batch)?;
        Ok(transactions + 1)
    }

    /// Sends one batch of messages, each with the index of its change.
    fn send(&mut self, transaction: &Transaction, batch: Vec<(usize, Request)>) -> Result<()> {
        let (ops, mut requests): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        // The last change requests an answer, so that silence does not count as success. Linux before 6.10 does not
        // answer the message that ends the batch.
        let Some(last) = requests.last_mut() else { return Ok(()) };
        last.flags |= libc::NLM_F_ACK as u16;
        requests.insert(0, encode::begin());
        requests.push(encode::end());
        let table = &transaction.table;
        let failed = |error| Error::refused("take the transaction", format!("table {table}"))(error);
        let answers = self.socket.transaction(&requests).map_err(failed)?;
        let answered = !answers.is_empty();
        for (index, answer) in answers {
            let Err(refusal) = answer else { continue };
            let op =
                index.checked_sub(1).and_then(|index| ops.get(index)).and_then(|op| transaction.ops.get(*op));
            return Err(match op {
                Some(op) => Error::Transaction { table: table.clone(), op: Box::new(op.clone()), refusal },
                None => Error::refused("take the transaction", format!("table {table}"))(refusal),
            });
        }
        if !answered {
            return Err(failed(std::io::Error::other("it did not answer")));
        }
        self.commits = self.commits.wrapping_add(1);
        tracing::debug!(table, messages = ops.len(), "an nftables transaction is in force");
        Ok(())
    }

    /// Reads a table with its content; `None` if there is none of that name.
    ///
    /// # Errors
    /// The kernel's refusal, or the table kept changing.
    pub fn list(&mut self, table: &str) -> Result<Option<Table>> {
        let mut last = None;
        for _ in 0..LIST_ATTEMPTS {
            let before = self.table(table)?;
            let Some(header) = before else { return Ok(None) };
            let listed = match self.content(table, header.flags) {
                // Others changed their tables repeatedly, within each of the dump's attempts.
                Err(error) if error.errno() == Some(libc::EINTR) => continue,
                listed => listed,
            };
            // The generation is that of all tables. If others change theirs all the time, it says nothing about this
            // table; but two equal readings do.
            if self.table(table)? == Some(header) || (listed.is_ok() && listed.as_ref().ok() == last.as_ref())
            {
                return listed.map(Some);
            }
            last = listed.ok();
        }
        Err(busy(format!("table {table}")))
    }

    /// Whether this connection may change the table: nobody owns it, or it does not exist.
    ///
    /// # Errors
    /// [`Error::TableOwned`] if another connection owns it; the kernel's refusal to list it.
    pub fn check_owner(&mut self, table: &str) -> Result<()> {
        match self.table(table)?.and_then(|header| header.owner) {
            Some(owner) if owner != self.socket.port() => {
                Err(Error::TableOwned { table: table.to_owned(), owner })
            }
            _ => Ok(()),
        }
    }

    /// Whether nobody else can change the table: this connection owns it.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn is_guarded(&mut self, table: &str) -> Result<bool> {
        let header = self.table(table)?;
        let is_own = |it: TableHeader| it.flags & Table::OWNER != 0 && it.owner == Some(self.socket.port());
        Ok(header.is_some_and(is_own))
    }

    /// The flags of a table; `None` if there is none of that name.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn flags(&mut self, table: &str) -> Result<Option<u32>> {
        Ok(self.table(table)?.map(|header| header.flags))
    }

    fn table(&mut self, name: &str) -> Result<Option<TableHeader>> {
        let tables = self.dump(libc::NFT_MSG_GETTABLE, name, |_| ())?;
        let table = tables.iter().find(|table| {
            let data = decode::attributes(table);
            data.text(encode::NFTA_TABLE).as_deref() == Some(name)
        });
        Ok(table.map(|reply| {
            let data = decode::attributes(reply);
            TableHeader {
                flags: data.u32_be(encode::NFTA_TABLE_FLAGS).unwrap_or(0),
                owner: data.u32_be(encode::NFTA_TABLE_OWNER),
                generation: decode::generation(reply),
            }
        }))
    }

    fn content(&mut self, table: &str, flags: u32) -> Result<Table> {
        let mut sets = BTreeMap::new();
        for reply in self.dump(libc::NFT_MSG_GETSET, table, |_| ())? {
            let Some((name, mut set)) = decode::set(decode::attributes(&reply)) else { continue };
            if set.spec.learned.is_none() {
                set.elements = self.counted_elements(table, &name, &set.spec)?.elements;
            }
            sets.insert(name, set);
        }
        let (anonymous, sets) =
            sets.into_iter().partition(|(name, _)| name.starts_with(codec::ANONYMOUS_PREFIX));
        let anonymous: BTreeMap<String, Set> = anonymous;

        let chains = self.dump(libc::NFT_MSG_GETCHAIN, table, |_| ())?;
        let mut chains: BTreeMap<_, _> =
            chains.iter().filter_map(|reply| decode::chain(decode::attributes(reply))).collect();
        let inline = |name: &str| anonymous.get(name).cloned();
        for reply in self.dump(libc::NFT_MSG_GETRULE, table, |_| ())? {
            let Some((chain, rule)) = decode::rule(decode::attributes(&reply), &inline) else { continue };
            if let Some(chain) = chains.get_mut(&chain) {
                chain.rules.push(rule);
            }
        }
        Ok(Table { flags, chains, sets })
    }

    /// The objects of a kind in a table. For some kinds, the kernel also returns those of other tables.
    fn dump(&mut self, kind: i32, table: &str, fill: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<Reply>> {
        let request = encode::message(kind, 0, |to| {
            put_text(to, encode::NFTA_TABLE, table);
            fill(to);
        });
        let replies =
            self.socket.dump(&request).map_err(Error::refused("list it", format!("table {table}")))?;
        let is_ours =
            |reply: &Reply| decode::attributes(reply).text(encode::NFTA_TABLE).as_deref() == Some(table);
        Ok(replies.into_iter().filter(is_ours).collect())
    }
}

/// Reads objects in each way in which answers are read, and writes them as text, as for operators.
pub(crate) fn read_any(replies: &[Reply]) {
    let data = |reply| decode::attributes(reply);
    let sets: BTreeMap<String, Set> = replies.iter().filter_map(|reply| decode::set(data(reply))).collect();
    for reply in replies {
        let _ = (decode::generation(reply), decode::chain(data(reply)), others::read_any(reply));
        if let Some((_, rule)) = decode::rule(data(reply), &|name| sets.get(name).cloned()) {
            let _ = (decode::rule_count(data(reply)), rule_text(&rule), rule_length("t", "c", &rule));
        }
    }
    // In an answer, all elements are of one set.
    for Set { spec, .. } in sets.values().take(2) {
        let listed: Vec<_> = replies.iter().flat_map(|reply| decode::elements(data(reply))).collect();
        let _ = decode::counts(&listed);
        for (key, value) in decode::join(spec, listed) {
            let _ = element_text(&spec.key, &key, &value);
        }
    }
}

/// The kernel's data about a table itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TableHeader {
    flags: u32,
    /// The port id of the socket that owns it.
    owner: Option<u32>,
    /// The generation of the whole ruleset.
    generation: Option<u16>,
}

fn too_large(transaction: &Transaction, piece: Option<&Piece>) -> Error {
    let refusal = std::io::Error::from_raw_os_error(libc::EMSGSIZE);
    let table = transaction.table.clone();
    match piece.and_then(|piece| transaction.ops.get(piece.op)) {
        Some(op) => Error::Transaction { table, op: Box::new(op.clone()), refusal: refusal.into() },
        None => Error::refused("take the transaction", format!("table {table}"))(refusal),
    }
}

fn busy(object: String) -> Error {
    Error::refused("hold still while it is listed", object)(std::io::Error::from_raw_os_error(libc::EBUSY))
}

/// The size of the messages that begin and end a batch, in bytes.
const BATCH_ENDS: usize = 64;
