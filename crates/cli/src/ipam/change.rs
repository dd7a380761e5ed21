//! `tortie ipam release`, `split` and `configure`.

use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;
use tortie_api::kubernetes::Node;
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Records, Release as OneRelease};
use tortie_store::{Interest, Store, StoreError, Stored, stale};

use super::{show, snapshot};
use crate::output;
use crate::store::{StoreArguments, list};

#[derive(clap::Args)]
pub(crate) struct Release {
    /// The address
    #[arg(long, value_name = "ADDRESS", required_unless_present_any = ["handle", "node"], conflicts_with_all = ["handle", "node"])]
    ip: Option<IpAddr>,
    /// The handle
    #[arg(long, conflicts_with = "node")]
    handle: Option<String>,
    /// The node, which must be gone
    #[arg(long)]
    node: Option<String>,
    /// Release an address although a pod has it, or what a node has although its agent or pods were there a moment ago
    #[arg(long, conflicts_with = "handle")]
    force: bool,
    #[command(flatten)]
    store: StoreArguments,
}

impl Release {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let store = self.store.open_to_change().await?;
        let released = if let Some(node) = &self.node {
            if store.get(&Key::global(Kind::Node, node)).await?.is_some() {
                bail!("Node {node} exists, and its pods use its addresses; delete the Node first");
            }
            if let Some(sign) = sign_of_life(&*store, node).await?.filter(|_| !self.force) {
                bail!(
                    "{sign}: its pods may use its addresses; switch node {node} off, or say --force if it is"
                );
            }
            let cleared = Records::new(store.clone()).release_node(node).await?;
            cleared.blocks.iter().for_each(|block| output::line(&format!("released block {block}")));
            cleared.addresses
        } else if let Some(handle) = &self.handle {
            let snapshot = snapshot(&*store).await?;
            let blocks = show::blocks(&snapshot);
            let mut addresses = blocks.iter().flat_map(|block| block.addresses_of(handle));
            if let Some((address, pod)) =
                addresses.find_map(|it| Some((it, pod_with(&snapshot.endpoints, it)?)))
            {
                bail!("pod {pod} has {address} of this handle; delete the pod");
            }
            Ipam::new(store.clone(), "", std::collections::BTreeMap::new()).release(handle).await?
        } else {
            let address = self.ip.context("--ip is missing")?;
            self.release_address(store.clone(), address).await?
        };
        released.iter().for_each(|address| output::line(&format!("released {address}")));
        if released.is_empty() {
            output::line("no address was released");
            return Ok(ExitCode::FAILURE);
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn release_address(
        &self,
        store: std::sync::Arc<dyn Store>,
        address: IpAddr,
    ) -> anyhow::Result<Vec<IpAddr>> {
        let snapshot = snapshot(&*store).await?;
        if let Some(pod) = pod_with(&snapshot.endpoints, address).filter(|_| !self.force) {
            bail!("pod {pod} has {address}; delete the pod, or say --force if it does not exist any more");
        }
        let blocks = show::blocks(&snapshot);
        let Some(block) = blocks.iter().find(|block| block.cidr.contains(&address)) else {
            return Ok(Vec::new());
        };
        let Some((_, attribute)) = block.allocated().find(|(one, _)| *one == address) else {
            return Ok(Vec::new());
        };
        let release = OneRelease {
            address,
            handle: attribute.handle_id.clone(),
            sequence_number: block.sequence_of(address),
        };
        Ok(Records::new(store).release_addresses(block.cidr, &[release]).await?)
    }
}

/// Why a node without a Node may still run, if it may.
async fn sign_of_life(store: &dyn Store, node: &str) -> anyhow::Result<Option<String>> {
    let report = match store.get(&Key::global(Kind::NodeReport, node)).await {
        Err(StoreError::KindAbsent(_)) => None,
        report => report?,
    };
    match report.map(|report| NodeReport::deserialize(report.value)) {
        Some(Ok(report)) if stale(&report.status, None, Timestamp::now()).is_none() => {
            return Ok(Some(format!("the agent of node {node} has reported a moment ago")));
        }
        Some(Err(error)) => return Ok(Some(format!("the report of node {node} cannot be read ({error})"))),
        Some(Ok(_)) | None => {}
    }
    // A datastore may list the endpoints of all nodes.
    let endpoints = store.list_all(&Interest::of_node(Kind::WorkloadEndpoint, node)).await?.items;
    let endpoint = endpoints.into_iter().find(|endpoint| endpoint.value["spec"]["node"] == node);
    Ok(endpoint.map(|endpoint| format!("{} of node {node} exists", endpoint.key)))
}

/// The pod with an address.
fn pod_with(endpoints: &[Stored], address: IpAddr) -> Option<String> {
    let has = |endpoint: &&Stored| {
        let networks = endpoint.value["spec"]["ipNetworks"].as_array();
        networks.into_iter().flatten().filter_map(|net| net.as_str()).any(|net| {
            net.parse::<IpNet>().map(|net| net.addr()).or_else(|_| net.parse::<IpAddr>()).ok()
                == Some(address)
        })
    };
    let endpoint = endpoints.iter().find(has)?;
    Some(format!("{}/{}", endpoint.key.namespace, endpoint.value["spec"]["pod"].as_str().unwrap_or("?")))
}

#[derive(clap::Args)]
pub(crate) struct Split {
    /// The number of new pools: a power of two
    number: u32,
    /// The addresses of the pool
    #[arg(long)]
    cidr: IpNet,
    #[command(flatten)]
    store: StoreArguments,
}

impl Split {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let store = self.store.open_to_change().await?;
        let pools = list(&*store, Kind::IpPool).await?;
        let cidr = self.cidr.to_string();
        let pool = pools.iter().find(|pool| pool.value["spec"]["cidr"] == *cidr);
        let pool = pool.with_context(|| format!("no IPPool has the addresses {cidr}"))?;
        let parts = parts(self.cidr, self.number, pool.value["spec"]["blockSize"].as_u64())?;
        // The new pools exist before the old one is deleted: addresses in use keep their routes. Blocks are the same in
        // both, so no address is given twice.
        for (number, part) in parts.iter().enumerate() {
            let name = format!("split-{}-{number}", pool.key.name);
            let mut value = pool.value.clone();
            value["spec"]["cidr"] = json!(part);
            if let Some(metadata) = value["metadata"].as_object_mut() {
                metadata.retain(|field, _| ["labels", "annotations"].contains(&field.as_str()));
                metadata.insert("name".to_owned(), json!(name));
            }
            let key = Key::global(Kind::IpPool, name);
            match store.create(&key, value).await {
                Ok(_) => output::line(&format!("{key} has {part}")),
                // An earlier attempt was interrupted.
                Err(StoreError::AlreadyExists(_)) => same_pool(&*store, &key, part).await?,
                Err(error) => return Err(error.into()),
            }
        }
        tortie_controllers::delete_pool(&*store, &pool.key, Some(&pool.version)).await?;
        output::line(&format!("{} deleted", pool.key));
        Ok(ExitCode::SUCCESS)
    }
}

async fn same_pool(store: &dyn Store, key: &Key, cidr: &IpNet) -> anyhow::Result<()> {
    let stored = store.get(key).await?;
    if stored.is_some_and(|stored| stored.value["spec"]["cidr"] == cidr.to_string()) {
        return Ok(());
    }
    bail!("{key} exists and has other addresses than {cidr}; rename the pool that is to be split")
}

/// The networks of the new pools.
fn parts(cidr: IpNet, number: u32, block_size: Option<u64>) -> anyhow::Result<Vec<IpNet>> {
    if number < 2 || !number.is_power_of_two() {
        bail!("{number} is no power of two above 1");
    }
    let prefix = u64::from(cidr.prefix_len()) + u64::from(number.trailing_zeros());
    let block_size = block_size.unwrap_or(if cidr.addr().is_ipv4() { 26 } else { 122 });
    if prefix > block_size {
        bail!(
            "{number} pools of {cidr} would be smaller than one block (/{block_size}); split it into fewer"
        );
    }
    Ok(cidr.subnets(u8::try_from(prefix)?)?.collect())
}

#[derive(clap::Args)]
pub(crate) struct Configure {
    /// Whether the addresses of a block are only for its node; Windows nodes need true
    #[arg(long, alias = "strictaffinity", value_name = "BOOL", required_unless_present_any = ["max_blocks_per_host", "cooldown"])]
    strict_affinity: Option<bool>,
    /// The maximum number of blocks of a node for each family; 0 means 20
    #[arg(long, value_name = "NUMBER")]
    max_blocks_per_host: Option<u32>,
    /// For how many seconds nobody gets an address after its release
    #[arg(long, alias = "ip-cooldown-seconds", value_name = "SECONDS")]
    cooldown: Option<u32>,
    #[command(flatten)]
    store: StoreArguments,
}

impl Configure {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let store = self.store.open_to_change().await?;
        let nodes = store.list(Kind::Node).await?.items;
        let key = Key::global(Kind::IpamConfig, "default");
        loop {
            let stored = store.get(&key).await?;
            let mut config = Records::new(store.clone()).config().await?;
            config.strict_affinity = self.strict_affinity.unwrap_or(config.strict_affinity);
            config.max_blocks_per_host = self.max_blocks_per_host.unwrap_or(config.max_blocks_per_host);
            config.ip_cooldown_seconds = self.cooldown.map_or(config.ip_cooldown_seconds, i64::from);
            if let Some(problem) = config.problem() {
                bail!("{problem}; nothing was changed");
            }
            if let Some(node) = windows_node(&nodes).filter(|_| !config.strict_affinity) {
                bail!("node {node} is a Windows node and needs --strict-affinity true; nothing was changed");
            }
            let value = serde_json::to_value(&config)?;
            let written = match &stored {
                None => store.create(&key, value).await,
                Some(stored) => store.update(&key, value, &stored.version).await,
            };
            match written {
                Ok(_) => break,
                Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        output::line(&format!("{key} configured"));
        Ok(ExitCode::SUCCESS)
    }
}

/// The first Windows node.
pub(crate) fn windows_node(nodes: &[Stored]) -> Option<&str> {
    let is_windows = |node: &&Stored| node.value["metadata"]["labels"][Node::OS] == "windows";
    nodes.iter().find(is_windows).map(|node| &*node.key.name)
}
