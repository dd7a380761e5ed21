//! Empty blocks (`kube-controllers/pkg/controllers/node/ipam.go` of Calico): a node that has several gives up those that
//! were empty for a grace period, and keeps at least one of each family. Load balancers keep none.
//!
//! Blocks of Windows nodes stay, because they are subnets of the node's network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_api::Kind;
use tortie_api::ipam::{Block, is_virtual};
use tortie_ipam::{Given, IpamError, Records};
use tortie_store::Store;

/// Looks for empty blocks.
pub struct Blocks {
    store: Arc<dyn Store>,
    records: Records,
    grace: Duration,
    /// The blocks that were empty in the last round: their sequence number, which each write increases, and since when
    /// they have had it.
    empty: BTreeMap<IpNet, (u64, Instant)>,
}

impl Blocks {
    /// Blocks of this datastore are given up after the grace period.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, grace: Duration) -> Self {
        Self { records: Records::new(store.clone()), store, grace, empty: BTreeMap::new() }
    }

    /// Looks for empty blocks, and takes those from their nodes that have not changed for the grace period.
    ///
    /// # Errors
    /// The list is incomplete, so nothing was given up; or the store failed, and the next round continues.
    pub async fn round(&mut self, now: Instant) -> Result<(), IpamError> {
        for (node, cidr, sequence_number) in self.overdue(now).await? {
            // Whoever has taken an address meanwhile has changed the number.
            let given = self.records.give_up_block(&node, cidr, true, Some(sequence_number)).await?;
            if given == Given::Up {
                self.empty.remove(&cidr);
                tracing::info!(node, block = %cidr, "the empty block was given up");
            }
        }
        Ok(())
    }

    /// The nodes and blocks that are overdue, with their sequence numbers.
    async fn overdue(&mut self, now: Instant) -> Result<Vec<(String, IpNet, u64)>, IpamError> {
        let config = self.records.config().await?;
        let mut of_nodes: BTreeMap<(String, bool), Vec<(Block, bool)>> = BTreeMap::new();
        let mut empty = BTreeMap::new();
        for stored in self.store.list(Kind::IpamBlock).await?.items {
            let Ok(mut block) = serde_json::from_value::<Block>(stored.value) else { continue };
            let Some(node) = block.owner().map(str::to_owned) else { continue };
            if block.deleted || block.check().is_err() || block.is_of_windows() {
                continue;
            }
            config.end_cooldowns(&mut block, jiff::Timestamp::now());
            let mut is_overdue = false;
            if block.is_empty() {
                let number = block.sequence_number;
                let known = self.empty.get(&block.cidr).filter(|(known, _)| *known == number);
                let since = known.map_or(now, |(_, since)| *since);
                is_overdue = now.saturating_duration_since(since) >= self.grace;
                empty.insert(block.cidr, (number, since));
            }
            of_nodes.entry((node, block.cidr.addr().is_ipv4())).or_default().push((block, is_overdue));
        }
        self.empty = empty;
        let mut overdue = Vec::new();
        for ((node, _), mut blocks) in of_nodes {
            if !is_virtual(&node) && blocks.iter().all(|(_, is_overdue)| *is_overdue) {
                // One stays.
                blocks.remove(0);
            }
            let given_up = blocks.into_iter().filter(|(_, is_overdue)| *is_overdue);
            overdue.extend(given_up.map(|(block, _)| (node.clone(), block.cidr, block.sequence_number)));
        }
        Ok(overdue)
    }
}
