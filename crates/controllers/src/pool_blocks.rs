//! The blocks of a pool that is deleted: which of them no other pool has, and how their owners give up the empty ones.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use tortie_api::ipam::Block;
use tortie_api::support::Pool;
use tortie_api::{Key, Kind};
use tortie_ipam::{Given, IpamError, Records};
use tortie_store::Stored;

/// A block without addresses, or an affinity without a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EmptyBlock {
    cidr: IpNet,
    /// Those with an affinity to it.
    owners: BTreeSet<String>,
    /// That of the block as it was read. Each write increases it.
    sequence_number: Option<u64>,
}

/// The networks of the pools that stay: those that were not deleted, and are not among these.
#[must_use]
pub fn networks_of_others(pools: &[Stored], deleted: &[&Key]) -> Vec<IpNet> {
    let others = pools.iter().filter(|pool| !deleted.contains(&&pool.key));
    let read = others.filter_map(|pool| Pool::of(&pool.key, &pool.value));
    read.filter(|pool| !pool.is_terminating).map(|pool| pool.cidr).collect()
}

/// The blocks that none of these networks contains. Pools may overlap, and a block belongs to the pools that stay.
#[must_use]
pub fn blocks_outside(mut blocks: Vec<Stored>, nets: &[IpNet]) -> Vec<Stored> {
    blocks.retain(|block| {
        let cidr = block.value["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok());
        !cidr.is_some_and(|cidr| is_inside(&cidr, nets))
    });
    blocks
}

fn is_inside(cidr: &IpNet, nets: &[IpNet]) -> bool {
    nets.iter().any(|net| net.contains(cidr))
}

/// The empty blocks of a network, and the affinities of which there is no block, without those that one of the other networks
/// contains. Blocks of Windows nodes are subnets of the nodes' networks, so they are not among them.
pub(crate) fn empty_blocks(
    net: &IpNet,
    others: &[IpNet],
    blocks: &[Stored],
    affinities: &[Stored],
) -> Vec<EmptyBlock> {
    let is_of_net = |cidr: &IpNet| net.contains(cidr) && !is_inside(cidr, others);
    let (mut empty, mut kept) = (BTreeMap::new(), BTreeSet::new());
    for stored in blocks {
        let Ok(cidr) = stored.key.name.parse::<IpNet>() else { continue };
        match serde_json::from_value::<Block>(stored.value.clone()) {
            // Somebody was interrupted while deleting it.
            Ok(block) if block.deleted => {}
            Ok(block) if block.check().is_ok() && block.is_empty() && !block.is_of_windows() => {
                let owners = block.owner().map(str::to_owned).into_iter().collect();
                let sequence_number = Some(block.sequence_number);
                empty.insert(cidr, EmptyBlock { cidr, owners, sequence_number });
            }
            _ => drop(kept.insert(cidr)),
        }
    }
    for stored in affinities {
        if let Some((owner, cidr)) = stored.key.name.split_once('/')
            && let Ok(cidr) = cidr.parse::<IpNet>()
            && !kept.contains(&cidr)
        {
            let fresh = || EmptyBlock { cidr, owners: BTreeSet::new(), sequence_number: None };
            empty.entry(cidr).or_insert_with(fresh).owners.insert(owner.to_owned());
        }
    }
    empty.into_values().filter(|block| is_of_net(&block.cidr)).collect()
}

/// Takes empty blocks from their owners, and removes them. Returns false if one of them is in use, or no longer as it was read. One
/// with an affinity that cannot be read stays.
pub(crate) async fn give_up_blocks(records: &Records, blocks: &[EmptyBlock]) -> Result<bool, IpamError> {
    let mut are_gone = true;
    for EmptyBlock { cidr, owners, sequence_number } in blocks {
        match give_up_block(records, *cidr, owners, *sequence_number).await {
            // Agents write affinities, and one that nobody can read must not keep the pool for ever.
            Err(IpamError::Damaged { key, .. }) if key.kind == Kind::BlockAffinity => {}
            given => are_gone &= given?,
        }
    }
    Ok(are_gone)
}

/// Takes an empty block from its owners, and removes it. Returns false if it is in use, or has another sequence number.
pub(crate) async fn give_up_block(
    records: &Records,
    cidr: IpNet,
    owners: &BTreeSet<String>,
    sequence_number: Option<u64>,
) -> Result<bool, IpamError> {
    let mut is_free = true;
    for owner in owners {
        is_free &= records.give_up_block(owner, cidr, true, sequence_number).await? == Given::Up;
    }
    Ok(is_free && records.remove_unowned_block(cidr).await?)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tortie_store::Written;

    use super::*;

    fn stored(kind: Kind, name: &str, value: Value) -> Stored {
        Stored::new(Key::global(kind, name), value, Written::at(1))
    }

    fn block(cidr: &str, affinity: &str, allocations: &Value) -> Stored {
        let attributes = json!([{"handle_id": "h"}, {"handle_id": "windows-reserved-ipam-handle",
            "secondary": {"note": "windows reserved"}}]);
        let slots = allocations.as_array().unwrap().iter().enumerate();
        let unallocated: Vec<usize> =
            slots.filter(|(_, slot)| slot.is_null()).map(|(slot, _)| slot).collect();
        let value = json!({"cidr": cidr, "affinity": affinity, "allocations": allocations, "unallocated": unallocated,
            "attributes": attributes, "sequenceNumber": 7});
        stored(Kind::IpamBlock, cidr, value)
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn a_block_that_another_pool_contains_is_left_out() {
        let blocks = || {
            vec![block("10.1.0.0/30", "host:one", &json!([])), block("10.2.0.0/30", "host:one", &json!([]))]
        };
        for (others, expected) in [
            (&[][..], &["10.1.0.0/30", "10.2.0.0/30"][..]),
            (&[net("10.1.0.0/16")], &["10.2.0.0/30"]),
            (&[net("10.1.0.0/30")], &["10.2.0.0/30"]),
            // Only a part of the block.
            (&[net("10.1.0.0/31")], &["10.1.0.0/30", "10.2.0.0/30"]),
            (&[net("10.0.0.0/8"), net("fd00::/64")], &[]),
        ] {
            let left: Vec<String> =
                blocks_outside(blocks(), others).into_iter().map(|block| block.key.name).collect();
            assert_eq!(left, expected, "{others:?}");
        }
    }

    #[test]
    fn what_has_addresses_or_belongs_to_another_pool_or_to_windows_is_kept() {
        let (free, used, windows) =
            (json!([null, null, null, null]), json!([0, null, null, null]), json!([1, null, null, null]));
        let mut of_linux = block("10.1.0.0/30", "host:one", &free);
        let without_windows = |block: &mut Stored| block.value["attributes"] = json!([{"handle_id": "h"}]);
        without_windows(&mut of_linux);
        let mut in_use = block("10.1.0.4/30", "host:one", &used);
        without_windows(&mut in_use);
        let mut elsewhere = block("10.1.1.0/30", "host:one", &free);
        without_windows(&mut elsewhere);
        let mut damaged = block("10.1.0.12/30", "host:one", &free);
        damaged.value["allocations"] = json!("x");
        let blocks = [of_linux, in_use, block("10.1.0.8/30", "host:win", &windows), damaged, elsewhere];
        let affinities = [
            "one/10.1.0.0/30",
            "two/10.1.0.0/30",
            "one/10.1.0.4/30",
            "win/10.1.0.8/30",
            "one/10.1.0.12/30",
            "one/10.1.0.16/30",
            "one/10.1.1.4/30",
            "one/10.2.0.0/30",
        ];
        let affinities = affinities.map(|name| stored(Kind::BlockAffinity, name, json!({})));
        let found = empty_blocks(&net("10.1.0.0/16"), &[net("10.1.1.0/24")], &blocks, &affinities);
        let owners = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let expected = [
            EmptyBlock {
                cidr: net("10.1.0.0/30"),
                owners: owners(&["one", "two"]),
                sequence_number: Some(7),
            },
            EmptyBlock { cidr: net("10.1.0.16/30"), owners: owners(&["one"]), sequence_number: None },
        ];
        assert_eq!(found, expected);
    }
}
