//! What a migration looks at.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tortie_api::calico::IpPool;
use tortie_api::ipam::{Attribute, Block};
use tortie_api::{Key, Kind, Resource};
use tortie_ipam::{Config, Release};
use tortie_store::Stored;

use super::taints::{Taint, Toleration};
use crate::pools::MIGRATION;

/// The annotations with a pod's addresses that agents write before the status has them. So can whoever may create pods.
const POD_IPS: [&str; 2] = ["cni.projectcalico.org/podIP", "cni.projectcalico.org/podIPs"];

/// What is recorded on the old pool, in the write that closes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolRecord {
    /// The name of the new pool.
    pub to: String,
    /// When the old pool was closed, by the clock of whoever did so. Agents may use a pool as they knew it for a moment longer.
    pub since: Timestamp,
    /// The uids of the pods that had come to a node and had no address then. They wait for something else. The times of pods are
    /// those of another clock.
    #[serde(default, rename = "withoutAddress", skip_serializing_if = "BTreeSet::is_empty")]
    pub without_address: BTreeSet<String>,
    /// What a newer program has recorded.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What is recorded on a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRecord {
    /// The name of the old pool.
    pub pool: String,
    /// When the old pool was closed, as in its [`PoolRecord`]: a record of another time is left from a migration that was abandoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Whether the migration has cordoned the node: nobody else had.
    #[serde(default)]
    pub cordoned: bool,
    /// The tunnel addresses that were released. This write makes the agent look for others.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub released_tunnels: BTreeSet<IpAddr>,
    /// What a newer program has recorded.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl NodeRecord {
    /// Whether it belongs to the migration with this record of the old pool. A pool that is gone has none, and was the last one.
    pub(super) fn is_of(&self, pool: Option<&PoolRecord>) -> bool {
        pool.is_none_or(|pool| self.since == Some(pool.since))
    }
}

/// What an operator asks for.
#[derive(Debug, Clone, Default)]
pub struct MigrationRequest {
    /// The name of the old pool.
    pub old: String,
    /// The name of the new pool.
    pub new: String,
    /// The new pool, if it is to be created unless it exists.
    pub planned: Option<Value>,
    /// Which pods may be evicted.
    pub pods: WhichPods,
}

/// Which pods may be evicted besides those that a controller starts again, and that lose nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WhichPods {
    /// Those that no controller starts again.
    pub unmanaged: bool,
    /// Those with data in volumes of type `emptyDir`, which end with the pod.
    pub with_empty_dir: bool,
}

/// A cluster whose pool is replaced.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MigratingCluster {
    /// Why the migration must not begin, or go on. Each names the object and the remedy.
    pub refusals: Vec<String>,
    /// The names of the old and the new pool.
    pub pools: (String, String),
    /// The old pool, while it exists.
    pub old: Option<OldPool>,
    /// Whether the new pool exists.
    pub has_new: bool,
    /// The nodes.
    pub nodes: BTreeMap<String, MigratingNode>,
    /// The pods that have come to a node and have no address yet, without those of which this was so when the old pool was closed.
    pub without_address: BTreeMap<Key, WaitingPod>,
    /// The Services with addresses of the old pool.
    pub services: BTreeMap<Key, MigratingService>,
    /// The other addresses of the old pool.
    pub left: Vec<LeftAddress>,
    /// Its blocks and affinities.
    pub blocks: BTreeMap<IpNet, OldBlock>,
}

/// The old pool.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OldPool {
    /// Whether it gives no new addresses.
    pub is_disabled: bool,
    /// What is recorded on it.
    pub record: Option<PoolRecord>,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MigratingNode {
    /// Whether nobody has cordoned it.
    pub is_schedulable: bool,
    /// Whether it is ready.
    pub is_ready: bool,
    /// Whether it runs Windows.
    pub is_windows: bool,
    /// The taints that keep pods away.
    pub taints: Vec<Taint>,
    /// What this migration has recorded on it.
    pub record: Option<NodeRecord>,
    /// Whether it has a record of an earlier migration of the pool, which was abandoned.
    pub has_old_record: bool,
    /// Its pods with addresses of the old pool.
    pub pods: Vec<MigratingPod>,
    /// Its tunnel addresses of the old pool.
    pub tunnels: BTreeMap<IpAddr, TunnelAddress>,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigratingPod {
    /// Its key.
    pub key: Key,
    /// Its uid: another pod of the same name has another one.
    pub uid: String,
    /// Whether it is being deleted.
    pub is_ending: bool,
    /// The taints of nodes to which it may go nevertheless.
    pub tolerations: Vec<Toleration>,
    /// Why it must not be evicted, with the remedy.
    pub obstacle: Option<String>,
}

/// A pod without an address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WaitingPod {
    /// Its uid.
    pub uid: String,
    /// Why it gets none, with the remedy, if an annotation says so.
    pub obstacle: Option<String>,
}

/// Where a tunnel address of a node is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TunnelAddress {
    /// Its block and what was seen there, while IPAM has it.
    pub allocated: Option<(IpNet, Release)>,
    /// Whether the node announces it.
    pub is_announced: bool,
}

/// The addresses of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigratingService {
    /// What IPAM has, by block.
    pub allocated: Vec<(IpNet, Release)>,
    /// The addresses in its status.
    pub shown: Vec<IpAddr>,
    /// Why it would get no other address, with the remedy.
    pub obstacle: Option<String>,
}

/// An address that nothing of the migration releases: it waits for somebody else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftAddress {
    /// The address.
    pub address: IpAddr,
    /// The pod to which it was given.
    pub pod: Option<Key>,
    /// Whose it is, and what releases it.
    pub why: String,
}

/// A block of the old pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OldBlock {
    /// Nodes with an affinity to it.
    pub owners: BTreeSet<String>,
    /// How many addresses are allocated or rest.
    pub used: usize,
}

/// All objects that matter. Every list must be complete, and blocks listed first.
#[derive(Debug, Clone, Default)]
pub(super) struct Objects {
    pub(super) blocks: Vec<Stored>,
    pub(super) affinities: Vec<Stored>,
    pub(super) pools: Vec<Stored>,
    pub(super) nodes: Vec<Stored>,
    pub(super) namespaces: Vec<Stored>,
    pub(super) pods: Vec<Stored>,
    pub(super) services: Vec<Stored>,
    pub(super) bgp: Vec<Stored>,
    pub(super) reservations: Vec<Stored>,
    /// For how long addresses rest, and how many blocks a node may have.
    pub(super) config: Config,
}

/// A pool as it is stored, or planned.
pub(super) struct ReadPool {
    pub(super) name: String,
    pub(super) value: Value,
    pub(super) pool: IpPool,
}

impl Objects {
    /// A pool with this name; an error if it cannot be read.
    pub(super) fn pool(&self, name: &str) -> Option<Result<ReadPool, String>> {
        let stored = self.pools.iter().find(|stored| stored.key.name == name)?;
        Some(read_pool(name, &stored.value))
    }

    /// The blocks that can be read, without addresses whose rest is over, and damaged ones by name.
    pub(super) fn readable_blocks(&self, now: Timestamp) -> (Vec<Block>, Vec<String>) {
        let (mut blocks, mut damaged) = (Vec::new(), Vec::new());
        for stored in &self.blocks {
            match Block::deserialize(&stored.value) {
                Ok(mut block) if block.check().is_ok() => {
                    self.config.end_cooldowns(&mut block, now);
                    blocks.push(block);
                }
                _ => damaged.push(stored.key.name.clone()),
            }
        }
        (blocks, damaged)
    }
}

pub(super) fn read_pool(name: &str, value: &Value) -> Result<ReadPool, String> {
    match Resource::read(&Key::global(Kind::IpPool, name), value) {
        Ok(Resource::IpPool(pool)) => Ok(ReadPool { name: name.to_owned(), value: value.clone(), pool }),
        Ok(_) => Err(format!("IPPool {name} is no IPPool")),
        Err(errors) => {
            let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
            Err(format!("IPPool {name} cannot be read: {}; correct it", errors.join("; ")))
        }
    }
}

/// The labels of an object.
pub(super) fn labels(object: &Stored) -> BTreeMap<String, String> {
    let labels = object.value["metadata"]["labels"].as_object().into_iter().flatten();
    labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

/// A record of an object, by its annotation. An error names the object.
pub(super) fn record<T: for<'de> Deserialize<'de>>(object: &Value, key: &str) -> Result<Option<T>, String> {
    let Some(text) = object["metadata"]["annotations"][MIGRATION].as_str() else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|error| {
        format!("the annotation {MIGRATION} of {key} cannot be read ({error}); correct or remove it")
    })
}

/// The problem of a node that has a record of another pool.
pub(super) fn other_pool(node: &str, pool: &str) -> String {
    format!(
        "Node {node} has the annotation {MIGRATION} of a migration of IPPool {pool}; end that first (`tortie pool migrate {pool} NEW`). If \
         it was abandoned, uncordon the node if the annotation says \"cordoned\":true, and remove the annotation"
    )
}

/// The pod to which IPAM has given an address.
pub(super) fn pod_of(attribute: &Attribute) -> Option<Key> {
    let owner = attribute.owner.as_ref()?;
    Some(Key::namespaced(Kind::Pod, owner.get("namespace")?, owner.get("pod")?))
}

/// The pods to which IPAM has given addresses.
pub(super) type Given = BTreeMap<IpAddr, Key>;

/// The pods to which IPAM has given the addresses of blocks.
pub(super) fn given(blocks: &[Block]) -> Given {
    let allocated = blocks.iter().flat_map(Block::allocated);
    allocated.filter_map(|(address, attribute)| Some((address, pod_of(attribute)?))).collect()
}

/// The addresses in texts such as `10.0.0.1` and `10.0.0.1/32`.
fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> BTreeSet<IpAddr> {
    texts.filter_map(|text| text.split('/').next()?.trim().parse().ok()).collect()
}

/// The addresses of a pod in its status.
fn reported(pod: &Value) -> BTreeSet<IpAddr> {
    let ips = pod["status"]["podIPs"].as_array().into_iter().flatten().filter_map(|one| one["ip"].as_str());
    addresses(ips.chain(pod["status"]["podIP"].as_str()))
}

/// The addresses of a pod in its annotations.
fn annotated(pod: &Value) -> BTreeSet<IpAddr> {
    let annotations = &pod["metadata"]["annotations"];
    let texts = POD_IPS.iter().filter_map(|name| annotations[*name].as_str());
    addresses(texts.flat_map(|text| text.split(',')))
}

/// Whether the pod has an address, as its status or an annotation says.
pub(super) fn has_address(pod: &Value) -> bool {
    !reported(pod).is_empty() || !annotated(pod).is_empty()
}

/// Whether the pod has ended, so that nothing of it runs.
pub(super) fn has_ended(pod: &Value) -> bool {
    ["Succeeded", "Failed"].map(Value::from).contains(&pod["status"]["phase"])
}

/// Whether the pod is neither ending nor has ended.
pub(super) fn is_kept(pod: &Stored) -> bool {
    pod.value["metadata"]["deletionTimestamp"].is_null() && !has_ended(&pod.value)
}

/// Whether the pod runs with an address of this network: by its status, or by an annotation if IPAM has given it the address.
pub(super) fn is_in(pod: &Stored, net: IpNet, given: &Given) -> bool {
    let Stored { key, value, .. } = pod;
    let mut announced = annotated(value);
    announced.retain(|address| given.get(address) == Some(key));
    let mut addresses = reported(value).into_iter().chain(announced);
    value["spec"]["hostNetwork"] != true
        && !has_ended(value)
        && addresses.any(|address| net.contains(&address))
}

/// The uid of an object; empty if it has none.
pub(super) fn uid(object: &Stored) -> String {
    object.value["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}
