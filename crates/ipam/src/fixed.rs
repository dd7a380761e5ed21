//! Addresses that a pod requests itself (`AssignIP` in `libcalico-go/lib/ipam/ipam.go`). Reservations, limits of blocks and
//! the selectors of pools do not matter for them.

use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::{Block, is_virtual};
use tortie_api::{Key, Kind};
use tortie_store::{StoreError, Version};

use crate::access::to_value;
use crate::driver::Ipam;
use crate::error::{Holder, IpamError, RETRIES};
use crate::request::{Assignment, Family, Request};
use crate::settings::Settings;

impl Ipam {
    /// Allocates this address, and no other one. Its block is claimed if it does not exist; otherwise it belongs to the
    /// node, or the cluster allows borrowing. A repeated request gets the same answer. The family of the request does
    /// not matter.
    ///
    /// # Errors
    /// Somebody else has the address; it is in no enabled pool, or in a block that the node may not use; the handle has
    /// another address of the family; or the store failed. Releasing the handle frees whatever was allocated.
    pub async fn assign_address(&self, request: &Request, address: IpAddr) -> Result<Assignment, IpamError> {
        let mut counted = None;
        let assigned = self.assign_this(request, address, &mut counted).await;
        if let Some(block) = counted.filter(|_| assigned.is_err())
            && let Err(error) = self.records.settle(&request.handle, &block).await
        {
            tracing::debug!(%error, handle = request.handle, "the record of the handle counts an address too many");
        }
        assigned
    }

    /// Sets `counted` to the block of which the record of the handle counts the address.
    async fn assign_this(
        &self,
        request: &Request,
        address: IpAddr,
        counted: &mut Option<Key>,
    ) -> Result<Assignment, IpamError> {
        let net = IpNet::from(address);
        let family = Family::of(&net);
        let request = Request { family, ..request.clone() };
        let (_, block_size) = self.pool_of(address, request.intended_use).await?;
        let cidr = IpNet::new(address, block_size).map_or(net, |cidr| cidr.trunc());
        let settings = self.current_settings().await?;
        let key = Key::global(Kind::IpamBlock, cidr.to_string());
        let mut cache = self.side(family).cache.lock().await;
        for _ in 0..RETRIES {
            let known = self.find_of(&request).await?;
            if let Some(same) = known.iter().find(|known| known.address == address) {
                return Ok(*same);
            }
            if let Some(other) = known.first() {
                return Err(IpamError::HasAnother { handle: request.handle, has: other.address, address });
            }
            let Some((version, mut block)) = self.block_of_fixed(&key, cidr, &settings).await? else {
                continue;
            };
            settings.config.end_cooldowns(&mut block, Timestamp::now());
            self.may_use(&block, address, &settings)?;
            if let Some(attribute) = block.attribute_of(address) {
                return Err(IpamError::Taken { address, holder: Box::new(Holder(attribute.clone())) });
            }
            if self.count_handle(&request, 1, &key.name, counted.is_some()).await?.is_some() {
                continue;
            }
            *counted = Some(key.clone());
            if !block.assign_address(address, &request.handle, &request.owner) {
                let problem = format!("{address} is neither free nor allocated");
                return Err(IpamError::Damaged { key, problem });
            }
            match self.records.store.update(&key, to_value(&key, &block)?, &version).await {
                Ok(stored) => {
                    cache.keep_using(&self.node, stored.version, block);
                    return Ok(Assignment { address, block: cidr });
                }
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// The block, which is claimed if it does not exist. `None` if somebody else was faster.
    async fn block_of_fixed(
        &self,
        key: &Key,
        cidr: IpNet,
        settings: &Settings,
    ) -> Result<Option<(Version, Block)>, IpamError> {
        if let Some(known) = self.records.read_block(key).await? {
            return Ok(Some(known));
        }
        if self.windows {
            // The block becomes a subnet of the node's network.
            let prefix = format!("{}/", self.node);
            let affinities = self.records.store.list(Kind::BlockAffinity).await?.items;
            let of_family = |name: &str| {
                name.parse::<IpNet>()
                    .is_ok_and(|known| Family::of(&known) == Family::of(&cidr) && known != cidr)
            };
            let own = affinities.iter().filter_map(|stored| stored.key.name.strip_prefix(&prefix));
            let (blocks, limit) = (own.filter(|name| of_family(name)).count(), self.max_blocks(settings));
            if blocks >= usize::try_from(limit).unwrap_or(usize::MAX) {
                return Err(IpamError::Exhausted {
                    owner: self.in_words(),
                    blocks,
                    limit,
                    hint: "the requested address is in none of the Windows node's blocks; request one of them",
                    damaged: String::new(),
                });
            }
        }
        self.claim(cidr).await
    }

    /// Whether the node may have an address of this block.
    fn may_use(&self, block: &Block, address: IpAddr, settings: &Settings) -> Result<(), IpamError> {
        let problem = if block.belongs_to(&self.node) {
            return Ok(());
        } else if self.windows {
            "a Windows node cannot use another node's block"
        } else if block.is_of_windows() {
            "the addresses of a Windows node's block are only for that node"
        } else if block.owner().is_some_and(is_virtual) {
            "its addresses are for load balancers"
        } else if is_virtual(&self.node) && block.affinity.is_some() {
            "load balancers do not use blocks of nodes"
        } else if settings.config.strict_affinity {
            "with strict affinity, nodes do not use each other's blocks"
        } else {
            return Ok(());
        };
        let owner = block.affinity.as_deref().map_or("nobody", |owner| owner.trim_start_matches("host:"));
        Err(IpamError::OfAnother { address, block: block.cidr, owner: owner.to_owned(), problem })
    }
}
