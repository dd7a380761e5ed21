//! `tortie pool migrate`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use async_trait::async_trait;
use clap::Subcommand;
use ipnet::IpNet;
use serde_json::Value;
use tortie_api::{Key, Kind, manifest};
use tortie_controllers::{
    MIGRATION, MigratingCluster, MigratingNode, MigrationError, MigrationProgress, MigrationRequest,
    MigrationStep, PoolMigration, WhichPods, forecast, pool_like,
};
use tortie_store::{Eviction, Evictions, Permission, Store, StoreError, is_locked};

use crate::output;
use crate::store::{Purpose, StoreArguments};

/// The pause before it looks again.
const PAUSE: Duration = Duration::from_secs(2);
/// The exit code if something is left to do, and the next run continues.
const NOT_YET: u8 = 1;
/// The exit code if it must not begin or go on.
const REFUSED: u8 = 2;

#[derive(Subcommand)]
pub(crate) enum PoolCommand {
    /// Replace a pool in use: close it, evict the pods with its addresses node by node, move tunnel addresses and Services, and
    /// delete it. If it is interrupted, run it again: it goes on where it was. It needs a Kubernetes API and one that runs Tortie's
    /// agents, which give the addresses of the new pool
    Migrate(Migrate),
}

#[derive(clap::Args)]
pub(crate) struct Migrate {
    /// The pool that is replaced
    old: String,
    /// The pool that replaces it. It exists, or --cidr says which network it gets
    new: String,
    /// Create the new pool with this network and the settings of the old one, unless it exists
    #[arg(long)]
    cidr: Option<IpNet>,
    /// The prefix length of the blocks of a new pool; by default that of the old one
    #[arg(long, value_name = "LENGTH", requires = "cidr")]
    block_size: Option<u8>,
    /// Print the steps, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Also evict pods that no controller starts again
    #[arg(long)]
    delete_unmanaged: bool,
    /// Also evict pods with volumes of type emptyDir, whose data is lost
    #[arg(long)]
    delete_emptydir_data: bool,
    /// After how many seconds without any change it gives up. What was done stays, and the next run continues
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    timeout: u64,
    #[command(flatten)]
    store: StoreArguments,
}

impl PoolCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Self::Migrate(migrate) = self;
        crate::runtime()?.block_on(migrate.run())
    }
}

/// For `--dry-run`, which evicts nothing.
struct NoEvictions;

#[async_trait]
impl Evictions for NoEvictions {
    async fn evict(&self, pod: &Key, _: &str) -> Result<Eviction, StoreError> {
        let problem = "this datastore has no evictions".to_owned();
        Err(StoreError::Invalid { key: pod.clone(), problem })
    }

    async fn missing_permissions(&self, _: &[Permission]) -> Result<Vec<Permission>, StoreError> {
        Ok(Vec::new())
    }
}

impl Migrate {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let purpose = if self.dry_run { Purpose::Read } else { Purpose::Change };
        let cluster = self.store.open_kubernetes(purpose).await?;
        let (store, evictions): (Arc<dyn Store>, Arc<dyn Evictions>) = match cluster {
            Some(cluster) => (cluster.clone(), cluster),
            None if self.dry_run => (self.store.open().await?, Arc::new(NoEvictions)),
            None => bail!(
                "pods are evicted by a Kubernetes API, and this datastore is none (etcd has copies of its Nodes and Pods); use \
                 --store kubernetes[:KUBECONFIG]. --dry-run prints the steps, which you can carry out by hand"
            ),
        };
        if is_locked(&*store).await? {
            bail!(
                "the datastore is locked, so agents give no addresses; end that first (`tortie datastore unlock`)"
            );
        }
        let request = MigrationRequest {
            old: self.old.clone(),
            new: self.new.clone(),
            planned: self.planned(&*store).await?,
            pods: WhichPods { unmanaged: self.delete_unmanaged, with_empty_dir: self.delete_emptydir_data },
        };
        let migration = PoolMigration { store, evictions, request };
        if self.dry_run {
            return self.foretell(&migration.observe().await?);
        }
        let mut said = String::new();
        let on_step = |step: Result<&MigrationProgress, &MigrationError>| {
            let text = match step {
                Ok(progress) => self.describe_progress(progress),
                Err(error) => format!("trying again: {error}"),
            };
            // One line for each wait, however long it takes.
            if text != said {
                output::line(&text);
                said = text;
            }
        };
        let ended = migration.run(Duration::from_secs(self.timeout), PAUSE, on_step).await;
        if !matches!(ended, Ok(MigrationStep::DeletePool | MigrationStep::Done)) {
            match migration.observe().await {
                Ok(cluster) => self.left_behind(&cluster).iter().for_each(|text| output::line(text)),
                Err(error) => output::line(&format!(
                    "what is left behind cannot be read ({error}); see `tortie get ippools,nodes` for the annotation {MIGRATION}"
                )),
            }
        }
        Ok(match ended? {
            MigrationStep::DeletePool | MigrationStep::Done => ExitCode::SUCCESS,
            MigrationStep::GiveUp(_) => ExitCode::from(NOT_YET),
            _ => ExitCode::from(REFUSED),
        })
    }

    /// The new pool, if `--cidr` asks for one.
    async fn planned(&self, store: &dyn Store) -> anyhow::Result<Option<Value>> {
        let Some(cidr) = self.cidr else { return Ok(None) };
        let pool = async |name: &str| store.get(&Key::global(Kind::IpPool, name)).await;
        let Some(old) = pool(&self.old).await? else { return Ok(None) };
        let planned = pool_like(&old.value, &self.new, cidr, self.block_size);
        if let Some(new) = pool(&self.new).await? {
            for field in ["cidr", "blockSize"] {
                let (has, wanted) = (&new.value["spec"][field], &planned["spec"][field]);
                if has != wanted && (field == "cidr" || self.block_size.is_some()) {
                    bail!(
                        "IPPool {} exists, and its spec.{field} is {has}, not {wanted}; leave --cidr out",
                        self.new
                    );
                }
            }
            return Ok(None);
        }
        let objects = manifest::read("the new pool", &planned.to_string()).map_err(|problems| {
            let texts: Vec<String> =
                problems.iter().map(|one| format!("{}: {}", one.field, one.problem)).collect();
            anyhow::anyhow!("IPPool {}: {}; nothing was changed", self.new, texts.join("; "))
        })?;
        crate::checks::refuse_fields(&objects)?;
        let object = objects.into_iter().next().context("the new pool cannot be read")?;
        Ok(Some(object.value))
    }

    /// Prints what would be done.
    fn foretell(&self, cluster: &MigratingCluster) -> anyhow::Result<ExitCode> {
        let steps = forecast(cluster);
        let mut code = ExitCode::SUCCESS;
        for step in &steps {
            output::line(&self.describe(step));
            match step {
                MigrationStep::Refuse(_) => return Ok(ExitCode::from(REFUSED)),
                MigrationStep::Wait(_) | MigrationStep::GiveUp(_) => code = ExitCode::from(NOT_YET),
                _ => {}
            }
        }
        output::line(&format!(
            "{} (dry run: nothing was changed)",
            output::count(steps.len() as u64, "step")
        ));
        Ok(code)
    }

    /// What stays as the migration has made it, until the next run.
    fn left_behind(&self, cluster: &MigratingCluster) -> Option<String> {
        let Self { old, new, .. } = self;
        let is_closed = cluster.old.as_ref().is_some_and(|old| {
            old.is_disabled && old.record.as_ref().is_some_and(|record| record.to == *new)
        });
        let is_ours = |node: &MigratingNode| node.record.as_ref().is_some_and(|record| record.cordoned);
        let cordoned: Vec<&str> =
            cluster.nodes.iter().filter(|(_, node)| is_ours(node)).map(|(name, _)| name.as_str()).collect();
        let mut left = Vec::new();
        if is_closed {
            left.push(format!("IPPool {old} stays closed"));
        }
        if !cordoned.is_empty() {
            left.push(format!("cordoned by the migration: {}", cordoned.join(", ")));
        }
        (!left.is_empty()).then(|| format!("{}. Run the command again to continue", left.join("; ")))
    }

    fn describe_progress(&self, progress: &MigrationProgress) -> String {
        let MigrationProgress { cluster, step, refused } = progress;
        let mut text = self.describe(step);
        if let MigrationStep::Evict(..) = step {
            let pods: usize = cluster.nodes.values().map(|node| node.pods.len()).sum();
            let nodes = cluster.nodes.values().filter(|node| !node.pods.is_empty()).count();
            text.push_str(&format!(
                " ({} on {} left)",
                output::count(pods as u64, "pod"),
                output::count(nodes as u64, "node")
            ));
        }
        for (pod, why) in refused {
            text.push_str(&format!("\n  {}/{} stays for now: {why}", pod.namespace, pod.name));
        }
        if let MigrationStep::Evict(node, _) = step
            && let Some(way_out) = cluster.way_out(node).filter(|_| !refused.is_empty())
        {
            text.push_str(&format!("\n  {way_out}"));
        }
        text
    }

    fn describe(&self, step: &MigrationStep) -> String {
        let Self { old, new, timeout, .. } = self;
        match step {
            MigrationStep::Refuse(why) => format!("refused:\n  {}", why.join("\n  ")),
            MigrationStep::CreatePool => format!("create IPPool {new}"),
            MigrationStep::ClosePool => {
                format!("close IPPool {old} (disabled: true): it gives no new addresses")
            }
            MigrationStep::Cordon(node) => format!("cordon node {node}"),
            MigrationStep::Forget(node) => format!(
                "remove the annotation of an earlier migration from node {node}; if that has cordoned it, uncordon it (`kubectl uncordon \
                 {node}`)"
            ),
            MigrationStep::Evict(node, pods) => {
                let names: Vec<String> =
                    pods.iter().map(|pod| format!("{}/{}", pod.key.namespace, pod.key.name)).collect();
                format!("evict from node {node}: {}", names.join(", "))
            }
            MigrationStep::ReleaseTunnels(node, addresses) => {
                let all: Vec<String> = addresses.iter().map(|(_, one)| one.address.to_string()).collect();
                format!("release the tunnel address of node {node}: {}", all.join(", "))
            }
            MigrationStep::AskForTunnels(node, _) => {
                format!("let the agent of node {node} take another tunnel address")
            }
            MigrationStep::Restore { node, uncordon: true } => format!("uncordon node {node}: it is done"),
            MigrationStep::Restore { node, uncordon: false } => format!("node {node} is done"),
            MigrationStep::MoveService(service, addresses) => {
                let all: Vec<String> = addresses.iter().map(|(_, one)| one.address.to_string()).collect();
                format!("release {} of {service}, which gets another address", all.join(", "))
            }
            MigrationStep::RemoveBlocks(blocks) => {
                format!("remove {} of IPPool {old}", output::count(blocks.len() as u64, "empty block"))
            }
            MigrationStep::DeletePool => format!("delete IPPool {old}: the migration to {new} is done"),
            MigrationStep::Done => format!("IPPool {old} is deleted: the migration to {new} is done"),
            MigrationStep::Wait(what) => format!("waiting: {what}"),
            MigrationStep::GiveUp(what) => {
                format!("nothing has changed for {timeout} s: {what}")
            }
        }
    }
}
