//! `tortie datastore`: copies a datastore into another one, of any backend, while both are locked.

mod calico_file;
mod document;
mod export;
mod exported;
mod import;
mod nodes;
mod same;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use tortie_api::calico::ClusterInformation;
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind};
use tortie_dataplane::Reason;
use tortie_store::{Store, StoreError, Stored, stale};

use document::ExportFormat;

use crate::output;
use crate::store::{StoreArguments, list};

#[derive(Subcommand)]
pub(crate) enum DatastoreCommand {
    /// Lock the datastore: nodes keep what is in force, apply no changes, and add and remove no pods
    Lock(Lock),
    /// Unlock the datastore: nodes apply what has changed
    Unlock(Unlock),
    /// Write everything that Calico and Tortie keep in a locked datastore to a file
    Export(export::Export),
    /// Lock another datastore, put what was exported there, and compare. It can be repeated after an interruption
    Import(import::Import),
    /// Compare a datastore with what was exported
    Compare(import::Compare),
    /// As in calicoctl: lock, unlock, export and import
    #[command(subcommand, hide = true)]
    Migrate(MigrateCommand),
}

/// The subcommands of `calicoctl datastore migrate`.
#[derive(Subcommand)]
pub(crate) enum MigrateCommand {
    /// Lock the datastore, as tortie datastore lock
    Lock(Lock),
    /// Unlock the datastore, as tortie datastore unlock
    Unlock(Unlock),
    /// Write what a locked datastore has in the form of calicoctl
    Export(export::Export),
    /// Put what was exported into another datastore, as tortie datastore import
    Import(import::Import),
}

impl DatastoreCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        match self {
            Self::Lock(lock) => lock.run(),
            Self::Unlock(unlock) => unlock.run(),
            Self::Export(export) => export.run(ExportFormat::Tortie),
            Self::Import(import) => import.run(),
            Self::Compare(compare) => compare.run(),
            Self::Migrate(MigrateCommand::Lock(lock)) => lock.run(),
            Self::Migrate(MigrateCommand::Unlock(unlock)) => unlock.run(),
            // As in calicoctl, which imports nothing else.
            Self::Migrate(MigrateCommand::Export(export)) => export.run(ExportFormat::Calico),
            Self::Migrate(MigrateCommand::Import(import)) => import.run(),
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Lock {
    /// How many seconds to wait until the nodes have noticed the lock
    #[arg(long, value_name = "SECONDS", default_value_t = PATIENCE)]
    timeout: u64,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Unlock {
    #[command(flatten)]
    store: StoreArguments,
}

impl Lock {
    fn run(self) -> anyhow::Result<ExitCode> {
        let changed = crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            let changed = set_lock(&*store, true).await?;
            wait_for_nodes(&*store, Duration::from_secs(self.timeout)).await?;
            anyhow::Ok(changed)
        })?;
        output::line(if changed { "locked" } else { "already locked" });
        Ok(ExitCode::SUCCESS)
    }
}

impl Unlock {
    fn run(self) -> anyhow::Result<ExitCode> {
        let changed = crate::runtime()?
            .block_on(async { set_lock(&*self.store.open_to_change().await?, false).await })?;
        output::line(if changed { "unlocked" } else { "already unlocked" });
        Ok(ExitCode::SUCCESS)
    }
}

/// The attempts to write the lock if others write the same object.
const ATTEMPTS: usize = 10;

/// Sets `datastoreReady` of ClusterInformation `default`, as Calico does; returns whether that changed anything.
async fn set_lock(store: &dyn Store, lock: bool) -> anyhow::Result<bool> {
    let key = Key::global(Kind::ClusterInformation, ClusterInformation::NAME);
    for _ in 0..ATTEMPTS {
        let written = match store.get(&key).await? {
            None if !lock => return Ok(false),
            None => {
                let value = json!({"apiVersion": key.kind.api_version(), "kind": key.kind.name(),
                    "metadata": {"name": key.name}, "spec": {"datastoreReady": false}});
                store.create(&key, value).await
            }
            Some(stored) => {
                if ClusterInformation::is_locked(&stored.value) == lock {
                    return Ok(false);
                }
                let mut value = stored.value;
                set(&mut value, "spec", "datastoreReady", json!(!lock));
                store.update(&key, value, &stored.version).await
            }
        };
        match written {
            Ok(_) => return Ok(true),
            Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bail!("{key} changes all the time; try again")
}

/// How many seconds nodes may take to notice the lock.
const PATIENCE: u64 = 60;
/// A call of a container runtime that was under way when its node noticed the lock may still write for a moment.
const UNDER_WAY: Duration = Duration::from_secs(2);

/// Waits until all nodes that report have noticed the lock: before, they may still write.
async fn wait_for_nodes(store: &dyn Store, patience: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let now = jiff::Timestamp::now();
        let reports = list(store, Kind::NodeReport).await?;
        let is_late = |stored: &&Stored| {
            let Ok(report) = NodeReport::deserialize(&stored.value) else { return true };
            let knows =
                report.status.conditions.iter().any(|one| one.reason == Reason::DatastoreLocked.to_string());
            // A node that does not report does not write either, or nobody could tell.
            !knows && stale(&report.status, None, now).is_none()
        };
        let late: Vec<&str> = reports.iter().filter(is_late).map(|stored| stored.key.name.as_str()).collect();
        if late.is_empty() {
            if !reports.is_empty() {
                tokio::time::sleep(UNDER_WAY).await;
            }
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!(
                "the datastore is locked, but these nodes have not noticed it and may still write: {}; look at their agents, and \
                 run the command again",
                late.join(", ")
            );
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Sets a field of a part of the object, which is a mapping or absent.
fn set(object: &mut Value, part: &str, field: &str, value: Value) {
    let part = object.as_object_mut().map(|fields| fields.entry(part).or_insert(Value::Null));
    let Some(part) = part else { return };
    if part.is_null() {
        *part = json!({});
    }
    if let Some(fields) = part.as_object_mut() {
        fields.insert(field.to_owned(), value);
    }
}

/// Whose objects a kind has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Calico's and Tortie's, which are copied.
    Calico,
    /// Nodes belong to the cluster; only Calico's annotations are copied to the Kubernetes API.
    Node,
    /// Endpoints are annotations of pods in the Kubernetes API.
    Endpoint,
    /// The cluster's. A datastore that is not the Kubernetes API has copies.
    Cluster,
    /// What components say about themselves. It is not copied.
    Component,
}

fn owner(kind: Kind) -> Owner {
    match kind {
        Kind::Tier
        | Kind::Profile
        | Kind::NetworkSet
        | Kind::GlobalNetworkSet
        | Kind::NetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::StagedNetworkPolicy
        | Kind::StagedGlobalNetworkPolicy
        | Kind::StagedKubernetesNetworkPolicy
        | Kind::HostEndpoint
        | Kind::FelixConfiguration
        | Kind::KubeControllersConfiguration
        | Kind::BgpPeer
        | Kind::BgpConfiguration
        | Kind::BgpFilter
        | Kind::ClusterInformation
        | Kind::IpPool
        | Kind::IpReservation
        | Kind::IpamBlock
        | Kind::BlockAffinity
        | Kind::IpamHandle
        | Kind::IpamConfig => Owner::Calico,
        Kind::Node => Owner::Node,
        Kind::WorkloadEndpoint => Owner::Endpoint,
        Kind::Namespace
        | Kind::ServiceAccount
        | Kind::Pod
        | Kind::Service
        | Kind::EndpointSlice
        | Kind::KubernetesNetworkPolicy
        | Kind::ClusterNetworkPolicy
        | Kind::AdminNetworkPolicy
        | Kind::BaselineAdminNetworkPolicy => Owner::Cluster,
        Kind::CalicoNodeStatus | Kind::NodeReport | Kind::Lease | Kind::ServiceCidr => Owner::Component,
        // Their controllers are the Kubernetes API's, or a lab's. Their pods are copied.
        Kind::Deployment
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::DaemonSet
        | Kind::ReplicationController
        | Kind::Job
        | Kind::CronJob => Owner::Component,
    }
}

/// Whether an object is in a datastore of this form: the Kubernetes API derives profiles from Namespaces and ServiceAccounts.
fn is_kept(key: &Key, derives_from_kubernetes: bool) -> bool {
    let is_derived = key.kind == Kind::Profile
        && ["kns.", "ksa."].iter().any(|prefix| key.name.starts_with(prefix))
        && derives_from_kubernetes;
    match owner(key.kind) {
        Owner::Calico | Owner::Node | Owner::Endpoint => !is_derived,
        Owner::Cluster => !derives_from_kubernetes,
        Owner::Component => false,
    }
}
