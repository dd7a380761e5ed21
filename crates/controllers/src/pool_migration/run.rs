//! Observes, carries out one step, and returns it. It keeps nothing between two steps.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tortie_api::support::is_terminating;
use tortie_api::{Key, Kind};
use tortie_ipam::{Fix, IpamError, Records, Release};
use tortie_store::{Eviction, Evictions, Store, StoreError, Stored};

use super::observed::{
    MigratingCluster, MigratingPod, MigrationRequest, NodeRecord, Objects, OldPool, PoolRecord, other_pool,
    record,
};
use super::permissions;
use super::read::read;
use super::steps::{MigrationStep, MigrationTimes, next_step};
use crate::pool_blocks::give_up_block;
use crate::pools::{MIGRATION, delete_pool};

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
    /// Somebody has changed an object so that the migration must not go on.
    #[error("{0}")]
    Record(String),
    /// The old pool is in use again.
    #[error("{0}")]
    InUse(String),
}

impl MigrationError {
    /// Whether trying again cannot help.
    fn is_final(&self) -> bool {
        let store = match self {
            Self::Store(error) | Self::Ipam(IpamError::Store(error)) => error,
            Self::Record(_) => return true,
            Self::Ipam(_) | Self::InUse(_) => return false,
        };
        matches!(store, StoreError::Forbidden(_) | StoreError::KindAbsent(_))
    }
}

impl PoolMigration {
    /// Carries out steps to the end, which it returns. `on_step` gets each step before the next one, and each error after which it
    /// tries again. It gives up when nothing has changed for `patience`. Before, it looks whether it has all permissions, so that none
    /// is missed in the middle.
    ///
    /// # Errors
    /// A permission is missing, or the last error when patience has ended.
    pub async fn run(
        &self,
        patience: Duration,
        pause: Duration,
        mut on_step: impl FnMut(Result<&MigrationProgress, &MigrationError>),
    ) -> Result<MigrationStep, MigrationError> {
        let (mut changed, mut last, mut was_closed) = (Instant::now(), None, false);
        let (mut first_seen, mut has_permissions) = (None, false);
        loop {
            let observed = async {
                if !has_permissions {
                    self.expect_permissions().await?;
                }
                self.observe().await
            };
            let observed = observed.await;
            has_permissions |= observed.is_ok();
            let stepped = match observed {
                Ok(cluster) => {
                    let waited = changed.elapsed();
                    let seen = seen(&mut first_seen, &cluster, Instant::now());
                    let times = MigrationTimes { now: Timestamp::now(), seen, waited, patience };
                    let step = next_step(&cluster, times);
                    let step = match was_closed && step == MigrationStep::ClosePool {
                        true => self.abandoned(),
                        false => step,
                    };
                    let is_stuck = last.as_ref() == Some(&step) && waited >= patience;
                    self.carry_out(cluster, if is_stuck { step.without_effect() } else { step }).await
                }
                Err(error) => Err(error),
            };
            match stepped {
                Ok(progress) => {
                    on_step(Ok(&progress));
                    let is_closed = |old: &OldPool| old.record.is_some();
                    was_closed |= progress.step == MigrationStep::ClosePool
                        || progress.cluster.old.as_ref().is_some_and(is_closed);
                    let MigrationProgress { step, .. } = progress;
                    match &step {
                        MigrationStep::Refuse(_)
                        | MigrationStep::DeletePool
                        | MigrationStep::Done
                        | MigrationStep::GiveUp(_) => return Ok(step),
                        MigrationStep::Evict(..) | MigrationStep::Wait(_) => tokio::time::sleep(pause).await,
                        // It has had no effect, or somebody undoes it.
                        step if last.as_ref() == Some(step) => tokio::time::sleep(pause).await,
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

    /// An error if a permission is missing that any of the steps needs.
    async fn expect_permissions(&self) -> Result<(), MigrationError> {
        let missing = self.evictions.missing_permissions(&permissions::needed(&self.request)).await?;
        permissions::problem(&missing).map_or(Ok(()), |problem| Err(StoreError::Forbidden(problem).into()))
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

    /// Carries out the next step, and returns it, for somebody who knows nothing of those before.
    ///
    /// # Errors
    /// The datastore. What was done stays; the next call observes it.
    pub async fn step(
        &self,
        waited: Duration,
        patience: Duration,
    ) -> Result<MigrationProgress, MigrationError> {
        let cluster = self.observe().await?;
        let times = MigrationTimes { now: Timestamp::now(), seen: Duration::ZERO, waited, patience };
        let step = next_step(&cluster, times);
        self.carry_out(cluster, step).await
    }

    /// The answer if somebody has removed the record of the pool that this process has closed.
    fn abandoned(&self) -> MigrationStep {
        let MigrationRequest { old, .. } = &self.request;
        MigrationStep::Refuse(vec![format!(
            "IPPool {old}: the migration was abandoned meanwhile: the annotation {MIGRATION} is gone; start the command again to begin anew"
        )])
    }

    /// Carries out a step for a cluster as it was observed. What is not as it was then makes the step do nothing, or fail.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub async fn carry_out(
        &self,
        cluster: MigratingCluster,
        step: MigrationStep,
    ) -> Result<MigrationProgress, MigrationError> {
        let mut refused = Vec::new();
        let record = cluster.old.as_ref().and_then(|old| old.record.as_ref());
        match &step {
            MigrationStep::Refuse(_)
            | MigrationStep::Done
            | MigrationStep::Wait(_)
            | MigrationStep::GiveUp(_) => {}
            MigrationStep::CreatePool => self.create_pool().await?,
            MigrationStep::ClosePool => self.close_pool(&cluster).await?,
            MigrationStep::Cordon(node) => {
                let note = |known| Some(NodeRecord { cordoned: true, ..known });
                self.mark(node, record, note, Some(false)).await?;
            }
            MigrationStep::Forget(node) => self.mark(node, record, |_| None, None).await?,
            MigrationStep::Evict(_, pods) => refused = self.evict(pods).await?,
            MigrationStep::ReleaseTunnels(_, releases) | MigrationStep::MoveService(_, releases) => {
                self.release(releases).await?;
            }
            MigrationStep::AskForTunnels(node, addresses) => {
                let note = |mut record: NodeRecord| {
                    record.released_tunnels.extend(addresses);
                    Some(record)
                };
                self.mark(node, record, note, None).await?;
            }
            MigrationStep::Restore { node, uncordon } => {
                self.mark(node, record, |_| None, uncordon.then_some(true)).await?;
            }
            MigrationStep::RemoveBlocks(blocks) => self.remove_blocks(&cluster, blocks).await?,
            MigrationStep::DeletePool => self.delete_pool(record).await?,
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

    /// Closes the old pool, unless somebody has begun something else with one of the two since they were checked.
    async fn close_pool(&self, cluster: &MigratingCluster) -> Result<(), MigrationError> {
        let MigrationRequest { old, new, .. } = &self.request;
        let read = async |name: &str| {
            let key = Key::global(Kind::IpPool, name);
            self.store.get(&key).await?.ok_or(StoreError::NotFound(key))
        };
        let target = read(new).await?;
        let of_target: Option<PoolRecord> =
            record(&target.value, &target.key.to_string()).map_err(MigrationError::Record)?;
        if target.value["spec"]["disabled"] == true || is_terminating(&target.value) || of_target.is_some() {
            let problem = format!(
                "IPPool {new} was closed or deleted meanwhile, so it cannot replace {old}; see its annotation {MIGRATION}"
            );
            return Err(MigrationError::Record(problem));
        }
        let Stored { key, mut value, version, .. } = read(old).await?;
        if let Some(PoolRecord { to, .. }) =
            record(&value, &key.to_string()).map_err(MigrationError::Record)?
        {
            let problem = format!("IPPool {old} moves to {to} since a moment ago; run this command again");
            return Err(MigrationError::Record(problem));
        }
        let without_address = cluster.without_address.values().map(|pod| pod.uid.clone()).collect();
        let closed =
            PoolRecord { to: new.clone(), since: Timestamp::now(), without_address, extra: Map::new() };
        set(&mut value, &["metadata", "annotations", MIGRATION], Some(json!(to_text(&closed)?)));
        set(&mut value, &["spec", "disabled"], Some(json!(true)));
        self.store.update(&key, value, &version).await?;
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

    /// Changes record and cordon of a node in one write. A Node that has changed since is read again by the next step. One that
    /// somebody has cordoned meanwhile is not cordoned again: it is theirs.
    async fn mark(
        &self,
        node: &str,
        of_pool: Option<&PoolRecord>,
        change: impl FnOnce(NodeRecord) -> Option<NodeRecord>,
        schedulable: Option<bool>,
    ) -> Result<(), MigrationError> {
        let key = Key::global(Kind::Node, node);
        let Stored { mut value, version, .. } =
            self.store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let known: Option<NodeRecord> = record(&value, &key.to_string()).map_err(MigrationError::Record)?;
        let pool = &self.request.old;
        if let Some(other) = known.as_ref().filter(|known| known.pool != *pool) {
            return Err(MigrationError::Record(other_pool(node, &other.pool)));
        }
        if schedulable == Some(false) && value["spec"]["unschedulable"] == true {
            return Ok(());
        }
        let since = of_pool.map(|record| record.since);
        let fresh = || NodeRecord { pool: pool.clone(), since, ..NodeRecord::default() };
        let known = known.filter(|known| known.is_of(of_pool));
        let new = change(known.unwrap_or_else(fresh)).map(|record| to_text(&record)).transpose()?;
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
            give_up_block(&records, *cidr, &block.owners, None).await?;
        }
        Ok(())
    }

    /// Deletes the old pool, if it still is closed and empty. Before, records of handles lose its blocks: whoever is killed between
    /// the release of an address and the write of its handle leaves such a record.
    async fn delete_pool(&self, seen: Option<&PoolRecord>) -> Result<(), MigrationError> {
        let key = Key::global(Kind::IpPool, &self.request.old);
        let Some(Stored { value, version, .. }) = self.store.get(&key).await? else { return Ok(()) };
        let known: Option<PoolRecord> = record(&value, &key.to_string()).map_err(MigrationError::Record)?;
        if value["spec"]["disabled"] != true || known.as_ref() != seen {
            let problem =
                format!("{key} was enabled, or its annotation {MIGRATION} was changed, meanwhile; it stays");
            return Err(MigrationError::Record(problem));
        }
        if let Some(cidr) = value["spec"]["cidr"].as_str().and_then(|text| text.parse::<IpNet>().ok()) {
            self.forget_blocks(cidr).await?;
            self.expect_no_blocks(&key, cidr).await?;
        }
        delete_pool(&*self.store, &key, Some(&version)).await?;
        Ok(())
    }

    /// Removes blocks of this network from records of handles.
    async fn forget_blocks(&self, cidr: IpNet) -> Result<(), MigrationError> {
        let records = Records::new(self.store.clone());
        for Stored { key, value, .. } in self.store.list(Kind::IpamHandle).await?.items {
            let blocks = value["block"].as_object().into_iter().flatten();
            for block in blocks.filter_map(|(block, _)| block.parse::<IpNet>().ok()) {
                if cidr.contains(&block) {
                    records.repair(&Fix::Forget(key.name.clone(), block)).await?;
                }
            }
        }
        Ok(())
    }

    /// An error if there is a block in this network, or an affinity to one: somebody has claimed it since it was observed.
    async fn expect_no_blocks(&self, pool: &Key, cidr: IpNet) -> Result<(), MigrationError> {
        for kind in [Kind::BlockAffinity, Kind::IpamBlock] {
            for Stored { key, .. } in self.store.list(kind).await?.items {
                let name = match kind {
                    Kind::BlockAffinity => key.name.split_once('/').map_or("", |(_, net)| net),
                    _ => key.name.as_str(),
                };
                if name.parse::<IpNet>().is_ok_and(|net| cidr.contains(&net)) {
                    return Err(MigrationError::InUse(format!(
                        "{key} is there again, so {pool} stays for now"
                    )));
                }
            }
        }
        Ok(())
    }
}

/// For how long this process has seen the record that the old pool has now. `first` is which record that was, and when it came.
fn seen(first: &mut Option<(Timestamp, Instant)>, cluster: &MigratingCluster, now: Instant) -> Duration {
    let record = cluster.old.as_ref().and_then(|old| old.record.as_ref());
    *first = record.map(|record| match *first {
        Some((since, at)) if since == record.since => (since, at),
        _ => (record.since, now),
    });
    first.map_or(Duration::ZERO, |(_, at)| now.saturating_duration_since(at))
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
