//! `tortie ipam show`.

use std::net::IpAddr;
use std::process::ExitCode;

use ipnet::IpNet;
use serde::Deserialize;
use tortie_api::ipam::Block;
use tortie_ipam::Snapshot;

use super::snapshot;
use crate::output;
use crate::store::StoreArguments;

#[derive(clap::Args)]
pub(crate) struct ShowAddresses {
    /// Also show the blocks of each pool
    #[arg(long, conflicts_with = "ip")]
    show_blocks: bool,
    /// Show who has this address; exits with 1 if nobody has it
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<IpAddr>,
    #[command(flatten)]
    store: StoreArguments,
}

impl ShowAddresses {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let store = self.store.open().await?;
        let snapshot = snapshot(&*store).await?;
        let blocks = blocks(&snapshot);
        if let Some(address) = self.ip {
            return Ok(show_address(&blocks, address));
        }
        let mut rows =
            vec![["GROUPING", "CIDR", "TOTAL", "IN USE", "FREE", "NAME"].map(str::to_owned).to_vec()];
        for stored in &snapshot.pools {
            let Some(cidr) =
                stored.value["spec"]["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok())
            else {
                continue;
            };
            let inside: Vec<&Block> = blocks.iter().filter(|block| cidr.contains(&block.cidr)).collect();
            let used: u128 = inside.iter().map(|block| used(block)).sum();
            rows.push(row("IPPool", &cidr, used, &stored.key.name));
            for block in inside.into_iter().filter(|_| self.show_blocks) {
                rows.push(row("Block", &block.cidr, self::used(block), block.node().unwrap_or("-")));
            }
        }
        output::columns(&rows);
        Ok(ExitCode::SUCCESS)
    }
}

/// The readable blocks, in order.
pub(super) fn blocks(snapshot: &Snapshot) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for stored in &snapshot.blocks {
        match Block::deserialize(&stored.value) {
            Ok(block) if block.check().is_ok() => blocks.push(block),
            _ => output::error_line(&format!(
                "warning: {} cannot be read; see `tortie ipam check`",
                stored.key
            )),
        }
    }
    blocks.sort_by_key(|block| block.cidr);
    blocks
}

/// The number of addresses that are not free, with those that Windows reserves and those that rest.
fn used(block: &Block) -> u128 {
    block.allocations.iter().flatten().count() as u128
}

fn row(grouping: &str, cidr: &IpNet, used: u128, name: &str) -> Vec<String> {
    let bits = u32::from(cidr.max_prefix_len() - cidr.prefix_len());
    let total = 1_u128.checked_shl(bits).unwrap_or(u128::MAX);
    let percent = |part: u128| part.saturating_mul(100) / total.max(1);
    let free = total.saturating_sub(used);
    vec![
        grouping.to_owned(),
        cidr.to_string(),
        total.to_string(),
        format!("{used} ({}%)", percent(used)),
        format!("{free} ({}%)", percent(free)),
        name.to_owned(),
    ]
}

fn show_address(blocks: &[Block], address: IpAddr) -> ExitCode {
    let block = blocks.iter().find(|block| block.cidr.contains(&address));
    let Some(block) = block else {
        output::line(&format!("{address} is in no block"));
        return ExitCode::FAILURE;
    };
    let node = block.node().map_or_else(|| "of no node".to_owned(), |node| format!("of node {node}"));
    let Some((_, attribute)) = block.allocated().find(|(one, _)| *one == address) else {
        output::line(&format!("{address} belongs to nobody; its block {} is {node}", block.cidr));
        return ExitCode::FAILURE;
    };
    output::line(&format!("{address} is in use; its block {} is {node}", block.cidr));
    output::line(&format!("handle: {}", attribute.handle_id.as_deref().unwrap_or("-")));
    for (name, value) in attribute.owner.iter().flatten() {
        output::line(&format!("{name}: {value}"));
    }
    if let Some(number) = block.sequence_of(address) {
        output::line(&format!("sequence number: {number}"));
    }
    ExitCode::SUCCESS
}
