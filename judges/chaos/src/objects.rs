//! Changes of the cluster's objects, and when they are in force everywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tortie_api::manifest::{self, Object};
use tortie_api::{Key, Kind};
use tortie_store::rpc::Remote;
use tortie_store::{Store, StoreError, wait_for_reports};

use crate::fault::{Change, Node, Place};
use crate::marks;
use crate::oracle::{PodId, Written};
use crate::rules::{self, Color, LABEL, NAMESPACE, Rule, Subject};
use crate::run::Run;
use crate::traffic::Traffic;

/// The kinds that verdicts depend on.
const KINDS: [Kind; 6] = [
    Kind::Namespace,
    Kind::Pod,
    Kind::WorkloadEndpoint,
    Kind::KubernetesNetworkPolicy,
    Kind::NetworkPolicy,
    Kind::GlobalNetworkPolicy,
];
/// How long one call of the datastore may take. It may stand still.
const CALL: Duration = Duration::from_secs(5);
/// The time before a call is repeated.
const AGAIN: Duration = Duration::from_millis(200);
/// How long one waits for reports before one looks again at what is written.
const REPORTS: Duration = Duration::from_secs(5);
/// For how long before now the history of values is kept.
const HISTORY: Duration = Duration::from_secs(120);

/// Writes objects, one after the other.
pub(crate) struct Objects {
    run: Arc<Run>,
    traffic: Arc<Traffic>,
    store: Remote,
    next_pod: AtomicU64,
    /// The pod of each place; one that does not run yet is not in the world.
    places: Mutex<BTreeMap<Place, PodId>>,
    /// Why the last attempt to see everything in force failed.
    late: Mutex<String>,
}

impl Objects {
    pub(crate) fn new(run: Arc<Run>, traffic: Arc<Traffic>) -> Arc<Self> {
        let store = run.lab.store();
        Arc::new(Self {
            run,
            traffic,
            store,
            next_pod: AtomicU64::new(1),
            places: Mutex::default(),
            late: Mutex::default(),
        })
    }

    /// Creates the namespace, and a pod for each place.
    pub(crate) async fn begin(self: &Arc<Self>, colors: &[Color]) -> Result<()> {
        self.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})).await;
        if self.run.lab.shape.datastore != crate::fault::Datastore::Kubernetes {
            self.apply(&json!({
                "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": NAMESPACE},
            }))
            .await;
        }
        self.reserve_most().await?;
        for (place, color) in colors.iter().enumerate() {
            self.create(place, *color).await?;
        }
        Ok(())
    }

    /// Leaves eight addresses of each block, so that pods get the addresses of others soon.
    async fn reserve_most(&self) -> Result<()> {
        let blocks = self.insist(|| self.store.list(Kind::IpamBlock)).await?;
        let networks = blocks.items.iter().filter_map(|block| {
            let (address, _) = block.key.name.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let part = |(offset, bits): (u8, u8)| match address {
                IpAddr::V4(first) => {
                    format!("{}/{}", Ipv4Addr::from(u32::from(first) + u32::from(offset)), 32 - bits)
                }
                IpAddr::V6(first) => {
                    format!("{}/{}", Ipv6Addr::from(u128::from(first) + u128::from(offset)), 128 - bits)
                }
            };
            Some([(8, 3), (16, 4), (32, 5)].map(part))
        });
        let networks: Vec<String> = networks.flatten().collect();
        if networks.is_empty() {
            bail!("no node has a block of 64 addresses");
        }
        self.apply(&json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPReservation", "metadata": {"name": "most"},
            "spec": {"reservedCIDRs": networks},
        }))
        .await;
        Ok(())
    }

    /// Carries out a change.
    pub(crate) async fn change(self: &Arc<Self>, change: &Change) -> Result<()> {
        self.run.tell(change);
        match change {
            Change::Policy(subject, rule) => self.set_policy(*subject, rule.clone()).await,
            Change::Label(place, color) => self.set_color(*place, *color).await,
            Change::Replace(place, color) => {
                // A pod that has not started yet is left alone: whether it runs is not known.
                if let Some(id) = self.running(*place) {
                    self.delete(id).await;
                    self.create(*place, *color).await?;
                }
                Ok(())
            }
        }
    }

    /// True if a pod runs in each place.
    pub(crate) fn all_run(&self) -> bool {
        (0..self.run.lab.shape.places()).all(|place| self.running(place).is_some())
    }

    /// The places whose pods do not run.
    pub(crate) fn missing(&self) -> Vec<Place> {
        (0..self.run.lab.shape.places()).filter(|place| self.running(*place).is_none()).collect()
    }

    /// Why the last attempt to see everything in force failed.
    pub(crate) fn late(&self) -> String {
        lock(&self.late).clone()
    }

    fn running(&self, place: Place) -> Option<PodId> {
        let id = *lock(&self.places).get(&place)?;
        self.run.world().pod(id).map(|_| id)
    }

    async fn set_policy(&self, subject: Subject, rule: Option<Rule>) -> Result<()> {
        {
            let now = self.run.now();
            let mut world = self.run.world();
            let policy = world.policy(subject).context("there is no such subject")?;
            if policy.latest() == Some(&rule) {
                return Ok(());
            }
            policy.change(rule.clone(), now);
        }
        match &rule {
            Some(rule) => self.apply(&rules::manifest(subject, rule)).await,
            None => {
                self.insist_gone(&rules::key(subject)).await;
                self.mark(rules::key(subject).kind).await;
            }
        }
        if let Some(policy) = self.run.world().policy(subject) {
            policy.done();
        }
        Ok(())
    }

    async fn set_color(&self, place: Place, color: Color) -> Result<()> {
        let Some(id) = self.running(place) else { return Ok(()) };
        let now = self.run.now();
        self.run.world().color(id, color, now);
        let key = pod_key(id);
        loop {
            let Some(mut stored) = self.insist(|| self.store.get(&key)).await? else {
                bail!("{key} is gone, and nobody has deleted it");
            };
            stored.value["metadata"]["labels"][LABEL] = json!(color.name());
            match timeout(CALL, self.store.update(&key, stored.value, &stored.version)).await {
                Ok(Ok(_)) => break,
                _ => sleep(AGAIN).await,
            }
        }
        self.run.world().done(id);
        Ok(())
    }

    async fn delete(&self, id: PodId) {
        let now = self.run.now();
        self.run.world().leave(id, now);
        self.traffic.close(id);
        self.insist_gone(&pod_key(id)).await;
        let mut world = self.run.world();
        world.done(id);
        world.remove(id);
    }

    /// Creates a pod, and lets it take part as soon as it runs.
    async fn create(self: &Arc<Self>, place: Place, color: Color) -> Result<()> {
        let id = self.next_pod.fetch_add(1, Ordering::Relaxed);
        lock(&self.places).insert(place, id);
        let (node, begun) = (self.run.lab.shape.node_of(place), self.run.now());
        let key = pod_key(id);
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": key.name, "namespace": NAMESPACE, "labels": {LABEL: color.name()}},
            "spec": {
                "nodeName": self.run.lab.shape.name(node), "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "judge", "image": "none"}],
            },
        });
        self.apply(&pod).await;
        let this = Arc::clone(self);
        tokio::spawn(async move {
            this.runs(&key).await;
            let opened = this.run.lab.netns_of_pod(&key.name).and_then(|netns| this.traffic.open(id, netns));
            match opened {
                Ok(addresses) => {
                    this.run.tell(format!(
                        "{} runs in place {place} at {addresses:?}, {}",
                        key.name,
                        color.name()
                    ));
                    this.run.world().add(id, node, addresses, color, begun);
                }
                Err(error) => this.run.blame(format!("the judge cannot open {key}: {error:#}")),
            }
        });
        Ok(())
    }

    async fn runs(&self, key: &Key) {
        loop {
            if let Ok(Ok(Some(stored))) = timeout(CALL, self.store.get(key)).await
                && stored.value["status"]["phase"] == "Running"
            {
                return;
            }
            sleep(AGAIN).await;
        }
    }

    /// Applies a manifest, as often as it takes.
    async fn apply(&self, value: &Value) {
        let objects: Vec<Object> = match manifest::read("chaos", &value.to_string()) {
            Ok(objects) => objects,
            Err(problems) => return self.run.blame(format!("the judge's manifest {value}: {problems:?}")),
        };
        for object in &objects {
            loop {
                match timeout(CALL, self.store.apply(object)).await {
                    Ok(Ok(_)) => break,
                    Ok(Err(error)) if !is_passing(&error) => {
                        return self.run.blame(format!("{} is refused: {error}", object.key));
                    }
                    _ => sleep(AGAIN).await,
                }
            }
        }
    }

    /// Makes a position of which everybody who reaches it knows the deletions of a kind until now.
    async fn mark(&self, kind: Kind) {
        if let Some(mark) = marks::mark(self.run.lab.shape.datastore, kind, self.run.now()) {
            self.apply(&mark).await;
        }
    }

    async fn insist_gone(&self, key: &Key) {
        loop {
            match timeout(CALL, self.store.delete(key, None)).await {
                Ok(Ok(_) | Err(StoreError::NotFound(_))) => return,
                _ => sleep(AGAIN).await,
            }
        }
    }

    async fn insist<T, F: Future<Output = Result<T, StoreError>>>(&self, call: impl Fn() -> F) -> Result<T> {
        loop {
            match timeout(CALL, call()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) if !is_passing(&error) => return Err(error.into()),
                _ => sleep(AGAIN).await,
            }
        }
    }

    /// Settles what is in force on a node, until the run ends.
    pub(crate) async fn settle(self: Arc<Self>, node: Node) {
        loop {
            sleep(AGAIN).await;
            let (written, now) = (self.run.world().written(), self.run.now());
            if self.run.world().is_settled(node) {
                continue;
            }
            match timeout(REPORTS * 3, self.in_force(node, &written)).await {
                Ok(Ok(())) => {
                    let mut world = self.run.world();
                    world.settle(node, &written, self.run.now());
                    world.forget(now.saturating_sub(HISTORY));
                }
                Ok(Err(error)) => *lock(&self.late) = format!("{error:#}"),
                Err(_) => *lock(&self.late) = "the datastore does not answer".to_owned(),
            }
        }
    }

    /// Waits a while until writes are in force on a node.
    async fn in_force(&self, node: Node, written: &Written) -> Result<()> {
        // An agent copies the labels of a pod, and an address stays its pod's until CNI DEL, both after the write of the Pod.
        let endpoints = self.store.list(Kind::WorkloadEndpoint).await?;
        let mut owners: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
        for stored in &endpoints.items {
            let color = stored.value["metadata"]["labels"][LABEL].as_str().unwrap_or_default();
            for network in stored.value["spec"]["ipNetworks"].as_array().into_iter().flatten() {
                let address = network.as_str().and_then(|text| text.split('/').next()?.parse().ok());
                owners
                    .entry(address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
                    .or_default()
                    .push(color.to_owned());
            }
        }
        for (address, owner) in &written.owners {
            let expected: Vec<String> = owner.iter().map(|color| color.name().to_owned()).collect();
            let stored = owners.remove(address).unwrap_or_default();
            if stored != expected {
                bail!("{address} belongs to {stored:?} in the datastore, and not yet to {expected:?}");
            }
        }
        for kind in [Kind::WorkloadEndpoint, Kind::Pod] {
            self.mark(kind).await;
        }
        let positions = self.store.barrier(&KINDS).await?;
        let nodes: BTreeSet<String> = [self.run.lab.shape.name(node)].into();
        wait_for_reports(&self.store, Some(&nodes), &positions, REPORTS, |_| true).await?;
        Ok(())
    }

    /// Waits until a node has in force what is stored now, as an agent that has read the whole cluster tells.
    pub(crate) async fn node_follows(&self, node: Node) {
        let nodes: BTreeSet<String> = [self.run.lab.shape.name(node)].into();
        loop {
            let mark = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkSet",
                "metadata": {"name": format!("mark-{node}"), "labels": {"at": format!("{}", self.run.now().as_millis())}},
                "spec": {"nets": ["203.0.113.0/24"]},
            });
            self.apply(&mark).await;
            let follows = async {
                let positions = self.store.barrier(&[Kind::GlobalNetworkSet]).await?;
                wait_for_reports(&self.store, Some(&nodes), &positions, REPORTS, |_| true).await?;
                anyhow::Ok(())
            };
            if let Ok(Ok(())) = timeout(REPORTS * 3, follows).await {
                return;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if the call may succeed later.
fn is_passing(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Unavailable(_)
            | StoreError::Conflict(_)
            | StoreError::FellBehind
            | StoreError::NotFound(_)
    )
}

fn pod_key(id: PodId) -> Key {
    Key::namespaced(Kind::Pod, NAMESPACE, format!("pod-{id}"))
}
