//! Services on Linux: makes `tortie_services::NodeServices` real in an nftables table of its own.
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

mod affinity;
mod chains;
mod desired;
mod edits;
mod flows;
mod frontends;
mod kube_proxy;
mod layout;
mod parameters;
mod ranges;
mod slots;
mod table;
mod words;

use std::collections::BTreeSet;
use std::time::Instant;

use ipnet::IpNet;
use tortie_dataplane::{ServiceDataplane, ServiceDataplaneError};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::nftables::{ChangeCallback, Nft, Op, Transaction, Watch};
use tortie_services::{Masquerading, ServicesDelta};

use self::desired::Desired;
use self::edits::{Edits, ServiceSteps};
use self::flows::StaleFlows;
pub use self::kube_proxy::KubeProxy;
use crate::error::tolerate_gone;
use crate::quiescence::wait_for_packets;
use crate::{Error, Result};

/// The name of the table.
pub(crate) const TABLE: &str = "tortie-services";

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
            table: TABLE.to_owned(),
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
    conntrack: Conntrack,
    desired: Desired,
    /// The frontends of UDP whose flows may lead to former backends.
    stale: StaleFlows,
    /// Whether the kernel's table is as this process has left it, as far as known.
    is_known: bool,
    /// Whether the slots of an earlier process have been looked at.
    has_adopted: bool,
    /// Slots that no class counts since the last change.
    garbage: Vec<Op>,
    /// The time of the last change.
    switched: Instant,
    /// Whether the kernel parameters have been set.
    has_parameters: bool,
    watch: Option<Watch>,
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
        let (desired, stale) = Default::default();
        let (is_known, has_adopted, has_parameters) = (false, false, false);
        let (garbage, watch) = (Vec::new(), None);
        let (conntrack, switched) = (Conntrack::open()?, Instant::now());
        Ok(Self {
            config,
            nft,
            conntrack,
            desired,
            stale,
            is_known,
            has_adopted,
            garbage,
            switched,
            has_parameters,
            watch,
        })
    }

    /// Puts changes in force, and the networks of this node's pods. The first call has all Services: it replaces what an earlier process
    /// has left.
    ///
    /// # Errors
    /// The kernel refused the table. The changes are noted; the next call, or [`resync`](Self::resync), tries again.
    pub fn apply(&mut self, deltas: &[ServicesDelta], pods: &BTreeSet<IpNet>) -> Result<()> {
        self.stale.note(&self.desired, deltas);
        let mut edits = self.desired.ingest(deltas);
        self.desired.set_pods(pods, &mut edits);
        self.put(edits)
    }

    /// Forgets flows of UDP to backends that do not serve any more, and clients of backends that have left.
    ///
    /// # Errors
    /// The kernel refused something. The next call tries again.
    pub fn clean_up(&mut self) -> Result<()> {
        let flows = self.forget_stale();
        self.forget_clients()?;
        flows
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
        if !self.has_parameters {
            // The kernel has them once a table tracks connections.
            parameters::ensure();
            self.has_parameters = true;
        }
        Ok(())
    }

    /// Forgets flows when no packet can begin one by the former table any more.
    fn forget_stale(&mut self) -> Result<()> {
        if self.stale.is_empty() {
            return Ok(());
        }
        wait_for_packets(self.switched);
        let forgotten = self.stale.forget(&self.desired, &mut self.conntrack)?;
        if forgotten > 0 {
            tracing::debug!(forgotten, "flows of UDP to former backends are forgotten");
        }
        Ok(())
    }

    /// Forgets the clients of backends that have left their pools, so that their next connections are remembered anew. Nobody is led there any
    /// more, also before.
    fn forget_clients(&mut self) -> Result<()> {
        if self.desired.left.is_empty() {
            return Ok(());
        }
        wait_for_packets(self.switched);
        let mut failed = None;
        for number in std::mem::take(&mut self.desired.left) {
            if let Err(error) = self.forget_clients_of(number) {
                self.desired.left.insert(number);
                failed = Some(error);
            }
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn forget_clients_of(&mut self, number: u32) -> tortie_kernel::Result<()> {
        let Some((unit, pool)) = self.desired.unit(number) else { return Ok(()) };
        let (table, map, spec) = (&self.config.table, unit.clients(), unit.clients_spec());
        for client in affinity::stale_clients(&self.nft.listed_elements(table, &map)?, &pool) {
            let op = Op::DeleteElements(map.clone(), spec.clone(), vec![client]);
            // Its time may be over, or somebody else has removed it.
            tolerate_gone(self.nft.commit(&Transaction { table: table.clone(), ops: vec![op] }))?;
        }
        Ok(())
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
        let garbage = std::mem::take(&mut self.garbage);
        if !garbage.is_empty() {
            wait_for_packets(self.switched);
            self.commit(garbage)?;
        }
        self.commit(steps.prepare)?;
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

impl ServiceDataplane for ServiceTable {
    fn apply(
        &mut self,
        deltas: &[ServicesDelta],
        pods: &BTreeSet<IpNet>,
    ) -> Result<(), ServiceDataplaneError> {
        Self::apply(self, deltas, pods).map_err(ServiceDataplaneError::new)
    }

    fn resync(&mut self) -> Result<(), ServiceDataplaneError> {
        Self::resync(self).map_err(ServiceDataplaneError::new)
    }

    fn clean_up(&mut self) -> Result<(), ServiceDataplaneError> {
        Self::clean_up(self).map_err(ServiceDataplaneError::new)
    }

    fn watch(&mut self, on_change: Box<dyn Fn() + Send>) -> Result<(), ServiceDataplaneError> {
        let watch = Watch::start(&self.config.table, self.nft.port(), ChangeCallback(on_change));
        self.watch = Some(watch.map_err(ServiceDataplaneError::new)?);
        Ok(())
    }
}

/// Returns true if an earlier process has left a table.
///
/// # Errors
/// The kernel does not list it.
pub fn exists() -> Result<bool> {
    Ok(Nft::open()?.flags(TABLE)?.is_some())
}

/// Removes the table of an earlier process, if there is one. Returns true if there was.
///
/// # Errors
/// The kernel refused it.
pub fn remove() -> Result<bool> {
    let mut nft = Nft::open()?;
    if nft.flags(TABLE)?.is_none() {
        return Ok(false);
    }
    nft.commit(&Transaction { table: TABLE.to_owned(), ops: vec![Op::DeleteTable] })?;
    Ok(true)
}
