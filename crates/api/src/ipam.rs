//! IPAM blocks as they are stored: the addresses of a block and their owners. Pure: time is an argument.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;

/// The owner of the blocks for addresses of Services of type LoadBalancer (`virtual:load-balancer` in Calico).
pub const LOAD_BALANCERS: &str = "virtual:load-balancer";
/// The beginning of owners that are no nodes. No node has such a name, because of the colon.
const VIRTUAL: &str = "virtual:";
/// The handle of the addresses that Windows reserves; no handle object exists for it.
const WINDOWS_HANDLE: &str = "windows-reserved-ipam-handle";
/// Blocks have at most 2 to this power addresses. Pools have blocks of at most 2 to the power of 12.
const LARGEST_BLOCK_BITS: u8 = 16;
/// Number of addresses that Windows reserves at the beginning of a block: network, gateway, host endpoint.
const WINDOWS_RESERVED_FIRST: usize = 3;
/// Number of addresses that Windows reserves at the end: broadcast.
const WINDOWS_RESERVED_LAST: usize = 1;

/// A block as it is stored (`libcalico-go/lib/backend/model/block.go`). Unknown fields are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Its addresses.
    pub cidr: IpNet,
    /// `host:<node>`, `virtual:<owner>`, or absent if nobody owns the block.
    #[serde(default)]
    pub affinity: Option<String>,
    /// When the node claimed it, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity_claim_time: Option<String>,
    /// For each address, the index of the attribute that it is allocated to.
    pub allocations: Vec<Option<usize>>,
    /// The free addresses, by offset. They are taken from the head and returned at the tail, so that an address rests
    /// as long as possible before it is reused.
    pub unallocated: Vec<usize>,
    /// The owners of addresses. In etcd, Calico writes null into a block without addresses.
    #[serde(deserialize_with = "or_empty")]
    pub attributes: Vec<Attribute>,
    /// Increases with each write of the block; starts with the wall clock in nanoseconds.
    #[serde(rename = "sequenceNumber", default)]
    pub sequence_number: u64,
    /// The block's sequence number before the write that allocated the address, by offset.
    #[serde(rename = "sequenceNumberForAllocation", default, deserialize_with = "or_empty")]
    pub sequence_number_for_allocation: BTreeMap<String, u64>,
    /// Whether it is being deleted.
    #[serde(default)]
    pub deleted: bool,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The owner of an address.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Attribute {
    /// The handle by which it is released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle_id: Option<String>,
    /// Pod, namespace, node and so on.
    #[serde(rename = "secondary", default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<BTreeMap<String, String>>,
    /// When its addresses were released, RFC 3339. They rest, and belong to nobody.
    #[serde(rename = "releasedAt", default, skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A problem with a stored block.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("block {cidr}: {problem}")]
pub struct BlockError {
    /// The block.
    pub cidr: IpNet,
    /// The problem.
    pub problem: String,
}

/// A list or map; null means that it is empty.
fn or_empty<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

impl Block {
    /// A new block of an owner: a node's name, or [`LOAD_BALANCERS`]. A Windows node reserves four addresses of a
    /// block, of either family. The block must be one that [`Block::size_of`] accepts; any other one has no addresses.
    #[must_use]
    pub fn new(cidr: IpNet, owner: &str, windows: bool, now_nanos: u64, now_rfc3339: String) -> Self {
        let size = Self::size_of(&cidr).unwrap_or_default();
        let mut block = Self {
            cidr,
            affinity: Some(if is_virtual(owner) { owner.to_owned() } else { format!("host:{owner}") }),
            affinity_claim_time: Some(now_rfc3339),
            allocations: vec![None; size],
            unallocated: (0..size).collect(),
            attributes: Vec::new(),
            sequence_number: now_nanos,
            sequence_number_for_allocation: BTreeMap::new(),
            deleted: false,
            extra: Map::new(),
        };
        if windows {
            block.keep_back_for_windows(size);
        }
        block
    }

    /// The number of addresses of a network; `None` if there are too many for a block.
    #[must_use]
    pub fn size_of(cidr: &IpNet) -> Option<usize> {
        let bits = cidr.max_prefix_len() - cidr.prefix_len();
        (bits <= LARGEST_BLOCK_BITS).then(|| 1 << bits)
    }

    fn keep_back_for_windows(&mut self, size: usize) {
        self.attributes.push(Attribute {
            handle_id: Some(WINDOWS_HANDLE.to_owned()),
            owner: Some(BTreeMap::from([("note".to_owned(), "windows host rsvd".to_owned())])),
            ..Attribute::default()
        });
        let kept = |offset: usize| offset < WINDOWS_RESERVED_FIRST || offset + WINDOWS_RESERVED_LAST >= size;
        for offset in (0..size).filter(|offset| kept(*offset)) {
            self.allocations[offset] = Some(0);
        }
        self.unallocated.retain(|offset| !kept(*offset));
    }

    /// Checks that the stored numbers are consistent. Inconsistent blocks are never written.
    ///
    /// # Errors
    /// The inconsistency.
    pub fn check(&self) -> Result<(), BlockError> {
        let wrong = |problem: String| Err(BlockError { cidr: self.cidr, problem });
        let Some(size) = Self::size_of(&self.cidr) else {
            return wrong("it has more than 65536 addresses".to_owned());
        };
        if self.cidr != self.cidr.trunc() {
            return wrong(format!(
                "its address has bits after its prefix; it should be {}",
                self.cidr.trunc()
            ));
        }
        if self.allocations.len() != size {
            return wrong(format!("{} allocations for {size} addresses", self.allocations.len()));
        }
        let mut free = vec![false; size];
        for offset in &self.unallocated {
            match free.get_mut(*offset) {
                None => return wrong(format!("the free offset {offset} lies outside")),
                Some(true) => return wrong(format!("the offset {offset} is free twice")),
                Some(seen) => *seen = true,
            }
        }
        for (offset, (allocation, free)) in self.allocations.iter().zip(free).enumerate() {
            match allocation {
                Some(_) if free => return wrong(format!("the offset {offset} is both free and allocated")),
                Some(index) if *index >= self.attributes.len() => {
                    return wrong(format!(
                        "the offset {offset} is allocated to attribute {index}, which does not exist"
                    ));
                }
                None if !free => return wrong(format!("the offset {offset} is neither free nor allocated")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Allocates the next free address that is not reserved, if there is one.
    pub fn assign(
        &mut self,
        handle: &str,
        owner: &BTreeMap<String, String>,
        reserved: &[IpNet],
    ) -> Option<IpAddr> {
        let position = self.next_free(reserved)?;
        Some(self.allocate(position, handle, owner))
    }

    /// Whether an address is free and not reserved.
    #[must_use]
    pub fn has_room(&self, reserved: &[IpNet]) -> bool {
        self.next_free(reserved).is_some()
    }

    /// Allocates this address, reserved or not. Returns whether it was free.
    pub fn assign_address(
        &mut self,
        address: IpAddr,
        handle: &str,
        owner: &BTreeMap<String, String>,
    ) -> bool {
        let position = self.unallocated.iter().position(|offset| self.address(*offset) == address);
        position.is_some_and(|position| self.allocate(position, handle, owner) == address)
    }

    /// The position of the next free address among the free ones.
    fn next_free(&self, reserved: &[IpNet]) -> Option<usize> {
        let free = |offset: &usize| {
            let address = self.address(*offset);
            !reserved.iter().any(|net| net.contains(&address))
        };
        self.unallocated.iter().position(free)
    }

    fn allocate(&mut self, position: usize, handle: &str, owner: &BTreeMap<String, String>) -> IpAddr {
        let offset = self.unallocated.remove(position);
        let attribute = Attribute {
            handle_id: Some(handle.to_owned()),
            owner: Some(owner.clone()),
            ..Attribute::default()
        };
        self.allocations[offset] = Some(self.index_of(attribute));
        self.sequence_number_for_allocation.insert(offset.to_string(), self.sequence_number);
        self.sequence_number = self.sequence_number.wrapping_add(1);
        self.address(offset)
    }

    fn index_of(&mut self, attribute: Attribute) -> usize {
        self.attributes.iter().position(|known| *known == attribute).unwrap_or_else(|| {
            self.attributes.push(attribute);
            self.attributes.len() - 1
        })
    }

    /// Releases every address of a handle, and returns them. With a time (RFC 3339), they rest from then on.
    pub fn release(&mut self, handle: &str, resting_since: Option<&str>) -> Vec<IpAddr> {
        let released: Vec<usize> = self.offsets_of(handle).collect();
        self.release_offsets(released, resting_since)
    }

    /// Releases some addresses, and returns those that were allocated and did not rest.
    pub fn release_addresses(&mut self, addresses: &[IpAddr], resting_since: Option<&str>) -> Vec<IpAddr> {
        let allocated: Vec<IpAddr> = self.allocated().map(|(address, _)| address).collect();
        let is_released = |offset: &usize| {
            let address = self.address(*offset);
            addresses.contains(&address) && allocated.contains(&address)
        };
        let released = (0..self.allocations.len()).filter(is_released).collect();
        self.release_offsets(released, resting_since)
    }

    fn release_offsets(&mut self, released: Vec<usize>, resting_since: Option<&str>) -> Vec<IpAddr> {
        if released.is_empty() {
            return Vec::new();
        }
        let resting = resting_since.map(|time| {
            self.index_of(Attribute { released_at: Some(time.to_owned()), ..Attribute::default() })
        });
        for offset in &released {
            self.allocations[*offset] = resting;
            if resting.is_none() {
                self.free(*offset);
            }
        }
        self.forget_unused_attributes();
        self.sequence_number = self.sequence_number.wrapping_add(1);
        released.into_iter().map(|offset| self.address(offset)).collect()
    }

    fn free(&mut self, offset: usize) {
        self.allocations[offset] = None;
        self.unallocated.push(offset);
        self.sequence_number_for_allocation.remove(&offset.to_string());
    }

    /// Frees the addresses whose rest is over, judged by the time of their release. This is no write of its own.
    pub fn end_cooldowns(&mut self, is_over: impl Fn(&str) -> bool) {
        let over: Vec<usize> = (0..self.allocations.len())
            .filter(|offset| {
                let attribute = self.allocations[*offset].and_then(|index| self.attributes.get(index));
                attribute.and_then(|attribute| attribute.released_at.as_deref()).is_some_and(&is_over)
            })
            .collect();
        if !over.is_empty() {
            over.into_iter().for_each(|offset| self.free(offset));
            self.forget_unused_attributes();
        }
    }

    /// Whether nobody has an address, and none rests. Those that Windows reserves do not count.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let mut used = self.allocations.iter().flatten().filter_map(|index| self.attributes.get(*index));
        used.all(Attribute::is_windows)
    }

    /// Whether a Windows node has created the block: its addresses are only for that node.
    #[must_use]
    pub fn is_of_windows(&self) -> bool {
        self.attributes.iter().any(Attribute::is_windows)
    }

    /// The sequence number of the allocation of an address, if Calico or Tortie stored one.
    #[must_use]
    pub fn sequence_of(&self, address: IpAddr) -> Option<u64> {
        let offset = self.offset(address)?;
        self.sequence_number_for_allocation.get(&offset.to_string()).copied()
    }

    /// Gives an address the sequence number of an allocation in this write. The number is at least the time, so it is higher
    /// than those of earlier writes of any block, which begin with the time of the block's creation.
    pub fn renew(&mut self, address: IpAddr, now_nanos: u64) {
        if let Some(offset) = self.offset(address) {
            self.sequence_number = self.sequence_number.max(now_nanos);
            self.sequence_number_for_allocation.insert(offset.to_string(), self.sequence_number);
            self.sequence_number = self.sequence_number.wrapping_add(1);
        }
    }

    /// Counts a write that changes nothing else, so that a concurrent one fails.
    pub fn bump(&mut self) {
        self.sequence_number = self.sequence_number.wrapping_add(1);
    }

    /// The addresses of a handle.
    pub fn addresses_of(&self, handle: &str) -> impl Iterator<Item = IpAddr> {
        self.offsets_of(handle).map(|offset| self.address(offset))
    }

    /// Every allocated address with its attribute, without those that Windows reserves and those that rest.
    pub fn allocated(&self) -> impl Iterator<Item = (IpAddr, &Attribute)> {
        self.allocations.iter().enumerate().filter_map(|(offset, index)| {
            let attribute = self.attributes.get((*index)?)?;
            (!attribute.is_windows() && attribute.released_at.is_none())
                .then(|| (self.address(offset), attribute))
        })
    }

    /// The attribute of an address that is not free: its owner, Windows, or its rest.
    #[must_use]
    pub fn attribute_of(&self, address: IpAddr) -> Option<&Attribute> {
        self.attributes.get(self.allocations[self.offset(address)?]?)
    }

    /// Whether this owner, a node's name or [`LOAD_BALANCERS`], owns the block.
    #[must_use]
    pub fn belongs_to(&self, owner: &str) -> bool {
        self.owner() == Some(owner)
    }

    /// The owner of the block: a node's name, or for example [`LOAD_BALANCERS`].
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.node().or_else(|| self.affinity.as_deref().filter(|affinity| is_virtual(affinity)))
    }

    /// The node that owns the block.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.affinity.as_deref().and_then(|affinity| affinity.strip_prefix("host:"))
    }

    fn offsets_of(&self, handle: &str) -> impl Iterator<Item = usize> {
        let indices: Vec<usize> = (0..self.attributes.len())
            .filter(|index| self.attributes[*index].handle_id.as_deref() == Some(handle))
            .collect();
        let of_handle = move |index: &Option<usize>| index.is_some_and(|index| indices.contains(&index));
        self.allocations
            .iter()
            .enumerate()
            .filter(move |(_, index)| of_handle(index))
            .map(|(offset, _)| offset)
    }

    fn forget_unused_attributes(&mut self) {
        let mut kept = Vec::new();
        let mut moved = vec![None; self.attributes.len()];
        for index in self.allocations.iter_mut().flatten() {
            let new = *moved[*index].get_or_insert_with(|| {
                kept.push(self.attributes[*index].clone());
                kept.len() - 1
            });
            *index = new;
        }
        self.attributes = kept;
    }

    fn offset(&self, address: IpAddr) -> Option<usize> {
        (0..self.allocations.len()).find(|offset| self.address(*offset) == address)
    }

    fn address(&self, offset: usize) -> IpAddr {
        // A block has at most 2^16 addresses, so the offset fits.
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        match self.cidr.network() {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits().wrapping_add(offset)).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits().wrapping_add(offset.into())).into(),
        }
    }
}

/// Whether an owner of blocks is not a node.
#[must_use]
pub fn is_virtual(owner: &str) -> bool {
    owner.starts_with(VIRTUAL)
}

impl Attribute {
    /// Whether Windows reserves the address.
    #[must_use]
    pub fn is_windows(&self) -> bool {
        self.handle_id.as_deref().is_some_and(|handle| handle.eq_ignore_ascii_case(WINDOWS_HANDLE))
    }
}
