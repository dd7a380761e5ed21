//! What runs once in a cluster (`tortie controllers`): copies of Kubernetes' objects in etcd, what vanished nodes leave
//! behind, empty blocks that nodes do not need, automatic host endpoints, and addresses of Services of type LoadBalancer, as
//! Calico's kube-controllers do.
//!
//! Several processes may run; a Lease decides which one works. Its writes are conditional, so one that believes too long
//! that it leads does no harm. The controllers change only what they have created, and, as in Calico, the labels of Nodes and
//! endpoints, and IPAM's records of vanished nodes.

mod absence;
mod blocks;
mod calico_controllers;
mod copier;
mod copies;
mod decision;
mod default_objects;
mod election;
mod host_endpoints;
mod identities;
mod leader;
mod load_balancers;
mod lock;
mod nodes;
mod policies;
mod pool_blocks;
mod pool_deletion;
mod pool_migration;
mod pools;
mod reconciler;
mod synced;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_api::{Key, Kind};
use tortie_ipam::IpamError;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Endpoints, Interest, StorageForm, Store};

pub use blocks::Blocks;
pub use calico_controllers::{
    CalicoController, CalicoControllers, NAME as CALICO_CONTROLLERS, NAMESPACES, ready_controllers,
};
pub use copies::{KUBE_LABELS, node_copy};
pub use default_objects::is_default;
pub use election::{Claim, DEADLINE, Election, LEASE, PERIOD};
pub use nodes::Nodes;
pub use pool_blocks::{blocks_outside, networks_of_others};
pub use pool_deletion::{PoolDeletion, remove_pool};
pub use pool_migration::*;
pub use pools::{MIGRATION, Pools, delete_pool, release as release_pool};

use copier::Copier;
use host_endpoints::HostEndpoints;
use identities::Identities;
use reconciler::Stores;

/// The maximum time between two looks for vanished nodes.
const MAX_ROUND: Duration = Duration::from_secs(60);
/// How long a block must be empty before its node gives it up: Calico's `leakGracePeriod`.
const EMPTY_GRACE: Duration = Duration::from_secs(15 * 60);
/// The time between two looks at pools. A new pool has no finalizer, and a deleted one that is not in use stays, at most for so long.
const POOLS_ROUND: Duration = Duration::from_secs(5);
/// The time between two looks for objects without identity, which agents of earlier versions may still write.
const IDENTITIES_ROUND: Duration = Duration::from_secs(60 * 60);
/// The name of the Lease.
pub const LEASE_NAME: &str = "tortie-controllers";

/// What the controllers need.
#[derive(Clone)]
pub struct Config {
    /// The datastore of the agents.
    pub store: Arc<dyn Endpoints>,
    /// The Kubernetes API whose objects are copied to the datastore, if they are not there already.
    pub kubernetes: Option<Arc<dyn Endpoints>>,
    /// The name of this process, which must be unique.
    pub identity: String,
    /// The namespace of the Lease.
    pub namespace: String,
    /// How long a Node must be missing before what it leaves behind is removed.
    pub node_grace: Duration,
    /// True if Calico's kube-controllers may run: they then do what both would do.
    pub heeds_calico: bool,
}

impl Config {
    /// Has the Nodes, the Pods and the Lease.
    fn truth(&self) -> Arc<dyn Endpoints> {
        match &self.kubernetes {
            Some(kubernetes) => kubernetes.clone(),
            None => self.store.clone(),
        }
    }
}

/// Runs the controllers whenever this process leads, until the future is dropped.
pub async fn run(config: Config) {
    let lease = Key::namespaced(Kind::Lease, &config.namespace, LEASE_NAME);
    let election = Election::new(lease.clone(), &config.identity);
    let truth = config.truth();
    leader::run(&*truth, &lease, election, || work(&config)).await;
}

/// The work of the leader, which does not end.
async fn work(config: &Config) {
    // Once, however often the rest begins again.
    let defaults = lock::run(&*config.store, || async {
        default_objects::ensure(&*config.store).await;
        std::future::pending().await
    });
    let rest = async {
        if !config.heeds_calico {
            return work_beside(config, None).await;
        }
        let truth = config.truth();
        calico_controllers::run(&*config.store, &*truth, |calico| work_beside(config, calico)).await;
    };
    tokio::join!(defaults, rest);
}

/// The work that Calico's kube-controllers do not do.
async fn work_beside(config: &Config, calico: Option<CalicoControllers>) {
    let copies = async {
        match &config.kubernetes {
            Some(kubernetes) => copy(&**kubernetes, &*config.store, calico.clone()).await,
            None => std::future::pending().await,
        }
    };
    let is_left = |controller| CalicoControllers::run(calico.as_ref(), controller);
    let others = lock::run(&*config.store, || async {
        let store = &*config.store;
        let own = async {
            tokio::join!(identities(config), pools(config));
        };
        let is_left_nodes = is_left(CalicoController::Node);
        let of_nodes = async {
            tokio::join!(host_endpoints(store), blocks(config));
        };
        let addresses = load_balancers::run(config.store.clone(), config.truth());
        tokio::join!(
            own,
            nodes(config, is_left_nodes),
            unless(is_left_nodes, of_nodes),
            unless(is_left(CalicoController::LoadBalancer), addresses),
        );
    });
    // Copies are made while the datastore is locked, too: a cluster that changes to etcd needs them before its nodes apply
    // anything, and nothing else has them.
    tokio::join!(copies, others);
}

/// Does the work, or waits for ever if somebody else does it.
async fn unless(is_left: bool, work: impl Future<Output = ()>) {
    match is_left {
        true => std::future::pending().await,
        false => work.await,
    }
}

async fn copy(kubernetes: &dyn Store, store: &dyn Store, calico: Option<CalicoControllers>) {
    let sources = kubernetes.follow(copies::SOURCES.map(Interest::all).to_vec());
    let targets = store.follow(copier::followed().into_iter().map(Interest::all).collect());
    let stores = Stores { source: kubernetes, target: store };
    reconciler::run(Copier::new(store.storage_form(), calico), stores, sources, targets).await;
}

async fn host_endpoints(store: &dyn Store) {
    let targets = store.follow(host_endpoints::KINDS.map(Interest::all).to_vec());
    let sources = Box::pin(futures::stream::pending());
    let stores = Stores { source: store, target: store };
    reconciler::run(HostEndpoints::new(store.storage_form()), stores, sources, targets).await;
}

/// Only etcd keeps objects in a form that has identities, and leaves it to its clients to give them.
async fn identities(config: &Config) {
    if config.store.storage_form() == StorageForm::AsGiven {
        return std::future::pending().await;
    }
    let identities = Identities::new(config.store.clone());
    let periods = (IDENTITIES_ROUND, MAX_ROUND);
    rounds("objects without identity cannot be looked for", periods, identities, Identities::round).await;
}

/// Calico's controllers, if they run, know no NodeReports.
async fn nodes(config: &Config, only_reports: bool) {
    let mut nodes = Nodes::new(config.store.clone(), config.truth(), config.node_grace);
    if only_reports {
        nodes = nodes.only_reports();
    }
    let period = MAX_ROUND.min(config.node_grace / 4);
    rounds("vanished nodes cannot be looked for", (period, period), nodes, Nodes::round).await;
}

async fn blocks(config: &Config) {
    let blocks = Blocks::new(config.store.clone(), EMPTY_GRACE);
    rounds("empty blocks cannot be looked for", (MAX_ROUND, MAX_ROUND), blocks, Blocks::round).await;
}

/// Only a Kubernetes API has finalizers.
async fn pools(config: &Config) {
    if !config.store.derives_from_kubernetes() {
        return std::future::pending().await;
    }
    let pools = Pools::new(config.store.clone());
    rounds("deleted pools cannot be looked for", (POOLS_ROUND, MAX_ROUND), pools, Pools::round).await;
}

/// Runs rounds with this time between them, and at most the second one after failures. `problem` says what a failure means.
async fn rounds<T>(
    problem: &str,
    (period, longest): (Duration, Duration),
    mut subject: T,
    mut round: impl AsyncFnMut(&mut T, Instant) -> Result<(), IpamError>,
) {
    let mut backoff = Backoff::new(random_seed()).with_max(longest);
    loop {
        match round(&mut subject, Instant::now()).await {
            Ok(()) => {
                backoff.succeeded();
                tokio::time::sleep(period).await;
            }
            Err(error) => {
                tracing::warn!(%error, "{problem}; the controllers retry");
                backoff.wait().await;
            }
        }
    }
}
