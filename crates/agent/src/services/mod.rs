//! Services on this node: reads them from the cluster, and passes their changes to a dataplane on a thread of its own.
//!
//! The thread of policy never waits for them, nor the other way round.

mod health;
mod worker;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use ipnet::IpNet;
use tokio::sync::watch;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Condition, ServiceDataplane};
use tortie_services::{KINDS, NodePortAddresses};
use tortie_store::{Interest, Store};

use self::health::ServiceHealth;
use self::worker::Worker;
use crate::feed::{MAX_BATCH, batch};
use crate::health::Taken;
use crate::plane::InForce;
use crate::queue::{Asker, Batches, queue};
use crate::{AgentError, Extras, Platform};

/// How the agent serves Services.
#[derive(Clone)]
pub struct ServiceProxy {
    /// Where Services, their endpoints and the Node are read: never from copies, which a controller that has ended would keep as they were.
    pub store: Arc<dyn Store>,
    /// The addresses that accept node ports.
    pub node_ports: NodePortAddresses,
    /// The address at which the agent reaches the API server, if it is known. It must not be that of a Service, which nobody serves before the
    /// agent has read it.
    pub api_server: Option<IpAddr>,
}

/// Another program that serves Services on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux nodes serve Services"))]
pub(crate) enum OtherProxy {
    /// It answers. The text says what it is.
    Runs(String),
    /// It has ended, and has left this.
    HasLeft(String),
}

/// The parts of the system that serve Services.
pub(crate) struct ServiceSystem {
    pub(crate) dataplane: Box<dyn ServiceDataplane>,
    /// Looks for another program that serves Services; for what it has left only if told so.
    pub(crate) find_other: FindOther,
    /// An earlier agent has served Services here. To stop beside another program would leave them as they were then.
    pub(crate) was_serving: bool,
}

type FindOther = Box<dyn Fn(bool) -> Result<Option<OtherProxy>, String> + Send>;

/// Opens the system for Services, in the network namespace of the calling thread. If they are not wanted, the table of an earlier agent is
/// removed.
///
/// # Errors
/// The node cannot serve them, or the system refuses.
pub(crate) fn prepare(
    node: &str,
    platform: &Platform,
    extras: &Extras,
) -> Result<Option<ServiceSystem>, AgentError> {
    let refuse = |problem: &str| Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() });
    match (platform, &extras.services) {
        (_, Some(_)) if extras.policy_only.is_some() => refuse(
            "with --policy-only (TORTIE_POLICY_ONLY), the agent does not know the networks of pods, so it serves no Services: remove --services \
             (TORTIE_SERVICES), and let kube-proxy serve them",
        ),
        #[cfg(target_os = "linux")]
        (Platform::Linux, is_wanted) => on_linux(is_wanted.is_some()),
        (Platform::Windows { .. }, Some(_)) => refuse(
            "Windows nodes serve no Services yet: remove --services (TORTIE_SERVICES) there, and let kube-proxy serve them",
        ),
        (Platform::Other { .. }, Some(_)) => {
            refuse("it serves no Services; remove --services (TORTIE_SERVICES)")
        }
        (Platform::Windows { .. } | Platform::Other { .. }, None) => Ok(None),
    }
}

#[cfg(target_os = "linux")]
fn on_linux(is_wanted: bool) -> Result<Option<ServiceSystem>, AgentError> {
    use tortie_linux::services::{self, KubeProxy};

    let failed = |error| AgentError::system("the nftables table of Services", error);
    if !is_wanted {
        if services::remove().map_err(failed)? {
            tracing::info!("the agent serves no Services; the table of an earlier agent is removed");
        }
        return Ok(None);
    }
    let table = tortie_linux::ServiceTable::open(tortie_linux::ServicesConfig::default()).map_err(failed)?;
    let find_other = |with_leftovers: bool| {
        let found = match with_leftovers {
            true => KubeProxy::find().map_err(|error| error.to_string())?,
            false => KubeProxy::running(),
        };
        Ok(found.map(|found| match found {
            KubeProxy::Runs(mode) => OtherProxy::Runs(format!("kube-proxy in mode {mode}")),
            KubeProxy::HasLeft(what) => OtherProxy::HasLeft(what),
        }))
    };
    let was_serving = services::exists().map_err(failed)?;
    Ok(Some(ServiceSystem { dataplane: Box::new(table), find_other: Box::new(find_other), was_serving }))
}

/// The networks of the node's pods; none before they are known.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodNetworks(Arc<Mutex<Option<BTreeSet<IpNet>>>>);

impl PodNetworks {
    fn get(&self) -> Option<BTreeSet<IpNet>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets them. Returns true if they were others before.
    fn set(&self, networks: &BTreeSet<IpNet>) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = known.as_ref() != Some(networks);
        if is_new {
            *known = Some(networks.clone());
        }
        is_new
    }
}

/// Serves Services until the thread ends, which should never happen.
pub(crate) async fn run(
    node: String,
    proxy: ServiceProxy,
    system: ServiceSystem,
    in_force: watch::Receiver<Arc<InForce>>,
    conditions: watch::Sender<Vec<Condition>>,
    taken: Arc<watch::Sender<Taken>>,
) {
    let (batches, inbox) = queue();
    let pods = PodNetworks::default();
    let asker = batches.asker();
    let (health, healthy) = watch::channel(ServiceHealth::default());
    let worker = Worker::new(&node, &proxy, system, pods.clone(), conditions, health);
    let thread = std::thread::Builder::new().name("services".to_owned());
    if let Err(error) = thread.spawn(move || worker.run(&inbox)) {
        tracing::error!(%error, "cannot start the thread of Services");
        return;
    }
    tokio::select! {
        () = follow(&node, &*proxy.store, batches) => {}
        () = pass_pods(in_force, &pods, &asker) => {}
        () = health::serve(healthy, taken) => {}
    }
}

/// Passes objects to the thread until it ends.
async fn follow(node: &str, store: &dyn Store, batches: Batches) {
    let interests = KINDS.map(|kind| match kind {
        Kind::Node => Interest::in_object(&Key::global(Kind::Node, node)),
        kind => Interest::all(kind),
    });
    let mut changes = store.follow(interests.to_vec()).ready_chunks(MAX_BATCH);
    while batches.wait_for_room().await {
        match changes.next().await {
            Some(changes) => batches.send(batch(changes)),
            None => return,
        };
    }
}

/// Tells the thread which networks the node's pods have, until the thread of policy ends.
async fn pass_pods(mut in_force: watch::Receiver<Arc<InForce>>, pods: &PodNetworks, asker: &Asker) {
    loop {
        let now = in_force.borrow_and_update().clone();
        if !now.given.is_empty() && pods.set(&now.pod_networks) {
            asker.assigned();
        }
        if in_force.changed().await.is_err() {
            return;
        }
    }
}
