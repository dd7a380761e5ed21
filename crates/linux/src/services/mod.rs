//! Services on Linux: makes `tortie_services::NodeServices` real in an nftables table of its own. No agent calls it yet.
//!
//! The table is not that of policy, because the kernel validates each table as a whole when a verdict changes in it. Everything that
//! comes and goes with Services is in sets and in maps to data, which are never validated.
//!
//! **Translation.** A map gives a frontend its class: the number of its backends. The chain of the class picks a slot at random, and a
//! second map has the backend of each frontend and slot. Three maps of classes decide who is led where: one for all senders, one for pods and
//! the node, and one for the others. The chain of a new class, and its entry in the map of classes, are made once and stay.
//!
//! **The class is in the priority of the packet** (`meta priority`, for traffic control), not in its mark, because other programs route by
//! marks, and Tortie's policy has some of their bits. It is 0 before each lookup, since a lookup without a result ends its rule and leaves the
//! priority of somebody else; and 0 when the chain of a class begins. The price: the first packet of a connection to an address of a Service, or
//! to one that accepts node ports, loses the priority that somebody gave it by `SO_PRIORITY` or by an earlier rule. (When it forwards an IPv4
//! packet, the kernel itself replaces the priority by that of its TOS field, after translation.)
//!
//! **The order** is that of kube-proxy: source ranges at -110, translation at -100, reject and drop at 0, the source at 100. The source needs
//! no mark: the rules look at the destination of the connection's first packet.
//!
//! **Changes** have three steps, see `edits`. A packet that reads a class before a change and a slot after it finds one. If it does
//! not, the chain of the class drops it. A packet that no chain of this table has translated, because the Service came after that, may be
//! rejected.

mod chains;
mod desired;
mod edits;
mod frontends;
mod layout;
mod ranges;
mod slots;
mod table;
mod words;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_services::{Masquerading, ServicePortId, ServicesDelta};

use self::desired::Desired;
use self::edits::{Edits, ServiceSteps};
use crate::quiescence::wait_for_packets;
use crate::{Error, Result};

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicesConfig {
    /// The name of the nftables table, which belongs to Tortie alone.
    pub table: String,
    /// The operator's choice about sources.
    pub masquerading: Masquerading,
    /// The maximum size of an nftables transaction in bytes. Larger changes are split.
    pub transaction_bytes: usize,
}

impl Default for ServicesConfig {
    fn default() -> Self {
        Self {
            table: "tortie-services".to_owned(),
            masquerading: Masquerading { all: false, knows_pods: true },
            transaction_bytes: usize::MAX,
        }
    }
}

/// Translates connections to Services in the network namespace in which it was opened.
#[derive(Debug)]
pub struct ServiceTable {
    config: ServicesConfig,
    nft: Nft,
    desired: Desired,
    /// Whether the kernel's table is as this process has left it, as far as known.
    is_known: bool,
    /// Whether the slots of an earlier process have been looked at.
    has_adopted: bool,
    /// Slots that no class counts since the last change.
    garbage: Vec<Op>,
    /// The time of the last change.
    switched: Instant,
}

impl ServiceTable {
    /// Opens a netlink connection in the calling thread's network namespace. Nothing is changed before the first
    /// [`apply`](Self::apply), which keeps everything that fits.
    ///
    /// # Errors
    /// The connection could not be opened; it needs CAP_NET_ADMIN in the namespace.
    pub fn open(config: ServicesConfig) -> Result<Self> {
        let mut nft = Nft::open()?;
        nft.limit_transactions(config.transaction_bytes);
        let desired = Desired::default();
        let (is_known, has_adopted, garbage) = (false, false, Vec::new());
        Ok(Self { config, nft, desired, is_known, has_adopted, garbage, switched: Instant::now() })
    }

    /// Puts changes in force. The first call has all Services: it replaces what an earlier process has left.
    ///
    /// # Errors
    /// The kernel refused the table. The changes are noted; the next call, or [`resync`](Self::resync), tries again.
    pub fn apply(&mut self, deltas: &[ServicesDelta]) -> Result<()> {
        let edits = self.desired.ingest(deltas);
        self.put(edits)
    }

    /// The addresses of this node's pods. Before the first call of [`apply`](Self::apply), they are only noted.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn set_pods(&mut self, addresses: BTreeSet<IpAddr>) -> Result<()> {
        let edits = self.desired.set_pods(addresses);
        if !self.has_adopted {
            return Ok(());
        }
        self.put(edits)
    }

    /// Reads the kernel's table, and repairs what differs.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn resync(&mut self) -> Result<()> {
        self.is_known = false;
        let compared = self.compare();
        compared.map_err(|failure| self.explain(failure))?;
        self.is_known = true;
        Ok(())
    }

    /// The ports of Services whose session affinity is not in force: their connections get any backend.
    pub fn without_affinity(&self) -> impl Iterator<Item = &Arc<ServicePortId>> {
        self.desired.with_affinity()
    }

    fn put(&mut self, edits: Edits) -> Result<()> {
        if !self.is_known {
            return self.resync();
        }
        if let Err(error) = self.put_steps(edits) {
            tracing::warn!(%error, "the kernel refused the change of Services; Tortie compares the whole table with the kernel's");
            return self.resync();
        }
        Ok(())
    }

    fn put_steps(&mut self, edits: Edits) -> tortie_kernel::Result<()> {
        let steps = self.steps(edits);
        if steps.prepare.is_empty() && steps.switch.is_empty() && steps.clear.is_empty() {
            return Ok(());
        }
        let mut prepare = std::mem::take(&mut self.garbage);
        if !prepare.is_empty() {
            wait_for_packets(self.switched);
        }
        prepare.extend(steps.prepare);
        self.commit(prepare)?;
        self.commit(steps.switch)?;
        self.switched = Instant::now();
        self.garbage = steps.clear;
        Ok(())
    }

    fn steps(&self, edits: Edits) -> ServiceSteps {
        let chains = edits.new_classes.iter().flat_map(|class| table::class_ops(*class));
        let chains: Vec<Op> = chains.collect();
        let rules = if edits.rules { self.rule_ops() } else { Vec::new() };
        let mut steps = edits.steps();
        steps.prepare.extend(chains);
        steps.switch.extend(rules);
        steps
    }

    fn rule_ops(&self) -> Vec<Op> {
        let chains = chains::fixed(self.config.masquerading, &self.desired.node_ports);
        chains.into_iter().map(|(name, chain)| Op::SetRules(name, chain.rules)).collect()
    }

    fn commit(&mut self, ops: Vec<Op>) -> tortie_kernel::Result<()> {
        if ops.is_empty() {
            return Ok(());
        }
        let encoded = self.nft.encode(Transaction { table: self.config.table.clone(), ops });
        if self.nft.fits(&encoded) {
            return self.nft.commit_encoded(encoded);
        }
        let transaction = Transaction { table: self.config.table.clone(), ops: encoded.ops().to_vec() };
        self.nft.commit_in_order(&transaction).map(drop)
    }

    /// Adds the table's name and the remedy to an error.
    fn explain(&mut self, failure: tortie_kernel::Error) -> Error {
        let missing = self.nft.lacking_for_services().unwrap_or_default();
        let modules: Vec<_> = missing.into_iter().map(|feature| feature.modules()).collect();
        let remedy = match modules.as_slice() {
            [] => "stop what else changes this table".to_owned(),
            modules => {
                format!("this kernel lacks {}: load them, or take a kernel that has them", modules.join(", "))
            }
        };
        Error::ServicesRefused { table: self.config.table.clone(), remedy, failure: Box::new(failure) }
    }
}
