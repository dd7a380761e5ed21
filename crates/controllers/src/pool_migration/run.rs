//! Observes, carries out one step, and returns it. It keeps nothing between two steps.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tortie_api::{Key, Kind};
use tortie_ipam::{Fix, IpamError, Records, Release};
use tortie_store::{Eviction, Evictions, Store, StoreError, Stored};

use super::observed::{
    MIGRATION, MigratingCluster, MigratingPod, MigrationRequest, NodeRecord, Objects, PoolRecord, record,
};
use super::read::read;
use super::steps::{MigrationStep, next_step};

/// A migration.
pub struct PoolMigration {
    /// The datastore, with the right to change pools, Nodes and IPAM's records.
    pub store: Arc<dyn Store>,
    /// Evicts pods.
    pub evictions: Arc<dyn Evictions>,
    /// What the operator asks for.
    pub request: MigrationRequest,
}

/// A step, and what did not happen.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationProgress {
    /// The cluster before the step.
    pub cluster: MigratingCluster,
    /// The step.
    pub step: MigrationStep,
    /// The pods whose eviction was refused, each with the reason.
    pub refused: Vec<(Key, String)>,
}

/// Why a step failed. The next run observes anew.
#[derive(Debug, Error)]
pub enum MigrationError {
    /// The datastore.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// IPAM.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// The record of an object is not as it should be.
    #[error("{0}")]
    Record(String),
}

impl MigrationError {
    /// Whether trying again cannot help.
    fn is_final(&self) -> bool {
        let store = match self {
            Self::Store(error) | Self::Ipam(IpamError::Store(error)) => error,
            Self::Ipam(_) | Self::Record(_) => return false,
        };
        matches!(store, StoreError::Forbidden(_) | StoreError::KindAbsent(_))
    }
}

impl PoolMigration {
    /// Carries out steps to the end, which it returns. `on_step` gets each step before the next one, and each error after which it
    /// tries again. It gives up when nothing has changed for `patience`.
    ///
    /// # Errors
    /// A permission is missing, or the last error when patience has ended.
    pub async fn run(
        &self,
        patience: Duration,
        pause: Duration,
        mut on_step: impl FnMut(Result<&MigrationProgress, &MigrationError>),
    ) -> Result<MigrationStep, MigrationError> {
        let (mut changed, mut last) = (Instant::now(), None);
        loop {
            match self.step(changed.elapsed(), patience).await {
                Ok(progress) => {
                    on_step(Ok(&progress));
                    let MigrationProgress { step, .. } = progress;
                    match &step {
                        MigrationStep::Refuse(_)
                        | MigrationStep::DeletePool
                        | MigrationStep::Done
                        | MigrationStep::GiveUp(_) => return Ok(step),
                        MigrationStep::Evict(..) | MigrationStep::Wait(_) => tokio::time::sleep(pause).await,
                        _ => {}
                    }
                    if last.as_ref() != Some(&step) {
                        (changed, last) = (Instant::now(), Some(step));
                    }
                }
                Err(error) if error.is_final() || changed.elapsed() >= patience => return Err(error),
                Err(error) => {
                    on_step(Err(&error));
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// What the cluster is like now.
    ///
    /// # Errors
    /// The datastore.
    pub async fn observe(&self) -> Result<MigratingCluster, MigrationError> {
        let list = async |kind| self.store.list(kind).await.map(|listing| listing.items);
        let optional = async |kind| match list(kind).await {
            Err(StoreError::KindAbsent(_)) => Ok(Vec::new()),
            listed => listed,
        };
        let objects = Objects {
            blocks: list(Kind::IpamBlock).await?,
            affinities: list(Kind::BlockAffinity).await?,
            pools: list(Kind::IpPool).await?,
            nodes: list(Kind::Node).await?,
            namespaces: list(Kind::Namespace).await?,
            pods: list(Kind::Pod).await?,
            services: list(Kind::Service).await?,
            bgp: optional(Kind::BgpConfiguration).await?,
            reservations: optional(Kind::IpReservation).await?,
            config: Records::new(self.store.clone()).config().await?,
        };
        Ok(read(&objects, &self.request, Timestamp::now()))
    }

    /// Carries out the next step, and returns it.
    ///
    /// # Errors
    /// The datastore. What was done stays; the next call observes it.
    pub async fn step(
        &self,
        waited: Duration,
        patience: Duration,
    ) -> Result<MigrationProgress, MigrationError> {
        let cluster = self.observe().await?;
        let step = next_step(&cluster, Timestamp::now(), waited, patience);
        let mut refused = Vec::new();
        match &step {
            MigrationStep::Refuse(_)
            | MigrationStep::Done
            | MigrationStep::Wait(_)
            | MigrationStep::GiveUp(_) => {}
            MigrationStep::CreatePool => self.create_pool().await?,
            MigrationStep::ClosePool => self.close_pool().await?,
            MigrationStep::Cordon(node) => {
                self.mark(node, |record| Some(NodeRecord { cordoned: true, ..record }), Some(false)).await?;
            }
            MigrationStep::Evict(_, pods) => refused = self.evict(pods).await?,
            MigrationStep::ReleaseTunnels(_, releases) | MigrationStep::MoveService(_, releases) => {
                self.release(releases).await?;
            }
            MigrationStep::AskForTunnels(node, addresses) => {
                let note = |mut record: NodeRecord| {
                    record.released_tunnels.extend(addresses);
                    Some(record)
                };
                self.mark(node, note, None).await?;
            }
            MigrationStep::Restore { node, uncordon } => {
                self.mark(node, |_| None, uncordon.then_some(true)).await?;
            }
            MigrationStep::RemoveBlocks(blocks) => self.remove_blocks(&cluster, blocks).await?,
            MigrationStep::DeletePool => self.delete_pool().await?,
        }
        Ok(MigrationProgress { cluster, step, refused })
    }

    async fn create_pool(&self) -> Result<(), MigrationError> {
        let Some(planned) = &self.request.planned else { return Ok(()) };
        match self.store.create(&Key::global(Kind::IpPool, &self.request.new), planned.clone()).await {
            Ok(_) | Err(StoreError::AlreadyExists(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    async fn close_pool(&self) -> Result<(), MigrationError> {
        let key = Key::global(Kind::IpPool, &self.request.old);
        let stored = self.store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let mut value = stored.value;
        let known: Option<PoolRecord> = record(&value, &key.to_string()).map_err(MigrationError::Record)?;
        let extra = known.map(|known| known.extra).unwrap_or_default();
        let new = PoolRecord { to: self.request.new.clone(), since: Timestamp::now(), extra };
        let text = to_text(&new)?;
        set(&mut value, &["metadata", "annotations", MIGRATION], Some(json!(text)));
        set(&mut value, &["spec", "disabled"], Some(json!(true)));
        self.store.update(&key, value, &stored.version).await?;
        Ok(())
    }

    /// Evicts pods; returns those whose eviction was refused.
    async fn evict(&self, pods: &[MigratingPod]) -> Result<Vec<(Key, String)>, MigrationError> {
        let mut refused = Vec::new();
        for pod in pods {
            match self.evictions.evict(&pod.key, &pod.uid).await? {
                Eviction::Begun => {}
                Eviction::Refused(why) => refused.push((pod.key.clone(), why)),
            }
        }
        Ok(refused)
    }

    /// Releases what still is as it was seen.
    async fn release(&self, releases: &[(IpNet, Release)]) -> Result<(), MigrationError> {
        let records = Records::new(self.store.clone());
        for (block, release) in releases {
            match records.release_addresses(*block, std::slice::from_ref(release)).await {
                Ok(_) | Err(IpamError::Changed { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Changes record and cordon of a node in one write. A Node that has changed since is read again by the next step.
    async fn mark(
        &self,
        node: &str,
        change: impl FnOnce(NodeRecord) -> Option<NodeRecord>,
        schedulable: Option<bool>,
    ) -> Result<(), MigrationError> {
        let key = Key::global(Kind::Node, node);
        let Stored { mut value, version, .. } =
            self.store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let known: Option<NodeRecord> = record(&value, &key.to_string()).map_err(MigrationError::Record)?;
        let known = known.filter(|known| known.pool == self.request.old);
        let old = || NodeRecord { pool: self.request.old.clone(), ..NodeRecord::default() };
        let new = change(known.unwrap_or_else(old)).map(|record| to_text(&record)).transpose()?;
        set(&mut value, &["metadata", "annotations", MIGRATION], new.map(Value::String));
        if let Some(schedulable) = schedulable {
            set(&mut value, &["spec", "unschedulable"], (!schedulable).then_some(json!(true)));
        }
        match self.store.update(&key, value, &version).await {
            Ok(_) | Err(StoreError::Conflict(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes empty blocks with the affinities of nodes. One that has addresses again stays.
    async fn remove_blocks(
        &self,
        cluster: &MigratingCluster,
        blocks: &BTreeSet<IpNet>,
    ) -> Result<(), MigrationError> {
        let records = Records::new(self.store.clone());
        for (cidr, block) in cluster.blocks.iter().filter(|(cidr, _)| blocks.contains(cidr)) {
            for owner in &block.owners {
                records.give_up_block(owner, *cidr, true, None).await?;
            }
            records.remove_unowned_block(*cidr).await?;
        }
        Ok(())
    }

    /// Deletes the old pool, if it still is closed. Before, records of handles lose its blocks: whoever is killed between the
    /// release of an address and the write of its handle leaves such a record.
    async fn delete_pool(&self) -> Result<(), MigrationError> {
        let key = Key::global(Kind::IpPool, &self.request.old);
        let Some(Stored { value, version, .. }) = self.store.get(&key).await? else { return Ok(()) };
        if value["spec"]["disabled"] != true {
            return Err(MigrationError::Record(format!("{key} was enabled meanwhile; it stays")));
        }
        let records = Records::new(self.store.clone());
        if let Some(cidr) = value["spec"]["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok()) {
            for Stored { key, value, .. } in self.store.list(Kind::IpamHandle).await?.items {
                let blocks = value["block"].as_object().into_iter().flatten();
                for block in blocks.filter_map(|(block, _)| block.parse::<IpNet>().ok()) {
                    if cidr.contains(&block) {
                        records.repair(&Fix::Forget(key.name.clone(), block)).await?;
                    }
                }
            }
        }
        match self.store.delete(&key, Some(&version)).await {
            Ok(_) | Err(StoreError::NotFound(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn to_text(record: &impl serde::Serialize) -> Result<String, MigrationError> {
    serde_json::to_string(record).map_err(|error| MigrationError::Record(error.to_string()))
}

/// Sets a field, or removes it.
fn set(object: &mut Value, path: &[&str], new: Option<Value>) {
    let Some((field, above)) = path.split_last() else { return };
    let mut parent = object;
    for name in above {
        if !parent.is_object() {
            *parent = Value::Object(Map::new());
        }
        parent = &mut parent[*name];
    }
    match (new, parent.as_object_mut()) {
        (Some(new), Some(fields)) => drop(fields.insert((*field).to_owned(), new)),
        (Some(new), None) => *parent = json!({ *field: new }),
        (None, Some(fields)) => drop(fields.remove(*field)),
        (None, None) => {}
    }
}

/// A pool with the settings of another one and this network.
#[must_use]
pub fn pool_like(old: &Value, name: &str, cidr: IpNet, block_size: Option<u8>) -> Value {
    let mut spec = old["spec"].clone();
    if let Some(fields) = spec.as_object_mut() {
        fields.remove("disabled");
        fields.insert("cidr".to_owned(), json!(cidr));
        if let Some(size) = block_size {
            fields.insert("blockSize".to_owned(), json!(size));
        }
    }
    json!({"apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name}, "spec": spec})
}
