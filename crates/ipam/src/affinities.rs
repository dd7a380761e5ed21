//! How a node gives up a block: affinity `pendingDeletion`, the block, and then the affinity is deleted
//! (`libcalico-go/lib/ipam/ipam_block_reader_writer.go`).

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_store::{StoreError, Version};

use crate::access::{Records, to_value};
use crate::error::{IpamError, RETRIES};
use crate::records::{Affinity, AffinityState};

/// The result of giving up a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// It does not belong to the node any more.
    Up,
    /// It has addresses, and was to be given up only without any.
    InUse,
    /// It is not as the caller has seen it.
    Changed,
}

impl Records {
    /// Takes a block from its node. A block with addresses stays without owner; an empty one is deleted. With
    /// `only_empty`, a block with addresses stays with its node. With a sequence number, a block with another one does,
    /// too.
    ///
    /// # Errors
    /// The store failed, or the block cannot be read. A retry continues.
    pub async fn give_up_block(
        &self,
        node: &str,
        cidr: IpNet,
        only_empty: bool,
        sequence_number: Option<u64>,
    ) -> Result<Given, IpamError> {
        let affinity_key = Key::global(Kind::BlockAffinity, format!("{node}/{cidr}"));
        let block_key = Key::global(Kind::IpamBlock, cidr.to_string());
        let config = self.config().await?;
        for _ in 0..RETRIES {
            let affinity = self.read::<Affinity>(&affinity_key).await?;
            let mut block = self.read_block(&block_key).await?;
            if let Some((_, block)) = &mut block {
                config.end_cooldowns(block, Timestamp::now());
            }
            let refusal = match &block {
                Some((_, block)) if !block.belongs_to(node) => None,
                Some((_, block)) if sequence_number.is_some_and(|number| number != block.sequence_number) => {
                    Some(Given::Changed)
                }
                Some((_, block)) if only_empty && !block.is_empty() => Some(Given::InUse),
                _ => None,
            };
            if let Some(refusal) = refusal {
                return self.keep_block(&affinity_key, affinity).await.map(|()| refusal);
            }
            let affinity = match affinity {
                Some(affinity) => {
                    match self.set_state(&affinity_key, affinity, AffinityState::PendingDeletion).await? {
                        Some(version) => Some(version),
                        None => continue,
                    }
                }
                None => None,
            };
            if let Some((version, block)) = block.filter(|(_, block)| block.belongs_to(node))
                && !self.disown(&block_key, &version, block).await?
            {
                continue;
            }
            match affinity {
                None => return Ok(Given::Up),
                Some(version) => match self.store.delete(&affinity_key, Some(&version)).await {
                    // After a conflict, the node claims the block again.
                    Ok(_) | Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => return Ok(Given::Up),
                    Err(error) => return Err(error.into()),
                },
            }
        }
        Err(IpamError::Contended(affinity_key))
    }

    /// Deletes a block that belongs to nobody and has no addresses. Returns whether it is gone.
    ///
    /// # Errors
    /// The store failed, or the block cannot be read. A retry continues.
    pub async fn remove_unowned_block(&self, cidr: IpNet) -> Result<bool, IpamError> {
        let key = Key::global(Kind::IpamBlock, cidr.to_string());
        let config = self.config().await?;
        for _ in 0..RETRIES {
            let Some((version, mut block)) = self.read_block(&key).await? else { return Ok(true) };
            config.end_cooldowns(&mut block, Timestamp::now());
            if block.owner().is_some() || !block.is_empty() {
                return Ok(false);
            }
            if self.disown(&key, &version, block).await? {
                return Ok(true);
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Deletes an empty block, or removes the owner of another one. Returns whether nobody was faster.
    async fn disown(&self, key: &Key, version: &Version, mut block: Block) -> Result<bool, IpamError> {
        let written = if block.is_empty() {
            self.store.delete(key, Some(version)).await.map(|_| ())
        } else {
            (block.affinity, block.affinity_claim_time) = (None, None);
            block.bump();
            self.store.update(key, to_value(key, &block)?, version).await.map(|_| ())
        };
        match written {
            Ok(()) => Ok(true),
            Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes back the mark of an earlier attempt: the block stays with its node.
    async fn keep_block(&self, key: &Key, affinity: Option<(Version, Affinity)>) -> Result<(), IpamError> {
        if let Some(affinity) = affinity.filter(|(_, one)| one.state == AffinityState::PendingDeletion) {
            // If somebody else has changed it meanwhile, the node or the next release decides.
            self.set_state(key, affinity, AffinityState::Confirmed).await?;
        }
        Ok(())
    }

    /// Writes the state of an affinity; `None` if somebody else was faster.
    async fn set_state(
        &self,
        key: &Key,
        (version, affinity): (Version, Affinity),
        state: AffinityState,
    ) -> Result<Option<Version>, IpamError> {
        let value = to_value(key, &Affinity { state, ..affinity })?;
        match self.store.update(key, value, &version).await {
            Ok(stored) => Ok(Some(stored.version)),
            Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
