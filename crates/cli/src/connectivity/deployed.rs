//! What the test has deployed: it is created, watched, and removed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError, Stored, identify};

use super::plan::{self, LABEL, NAMESPACE};
use crate::delete::within;

/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// When something must exist that others make: the lab starts its DNS when there is a Service.
const SOON: Duration = Duration::from_secs(5);
/// How long the removal may take.
const REMOVAL: Duration = Duration::from_secs(60);
/// How long a new namespace may refuse pods: Kubernetes first makes its service account.
const NEW_NAMESPACE: Duration = Duration::from_secs(20);

/// A namespace that a test created, with everything in it.
pub(super) struct Deployed<'a> {
    pub(super) store: &'a dyn Store,
    /// Another namespace of the same name has another one.
    uid: Value,
    /// Whether nothing more may be created.
    is_stopped: Cell<bool>,
}

/// What became of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    Succeeded,
    /// The end of its output.
    Failed(String),
    /// It has not ended, for this reason.
    Not(String),
}

impl<'a> Deployed<'a> {
    /// Creates the namespace.
    pub(super) async fn create(store: &'a dyn Store) -> anyhow::Result<Self> {
        let (key, mut value) = plan::namespace();
        identify(&mut value);
        match store.create(&key, value).await {
            // The API server gives it another uid than the one that was sent.
            Ok(_) => Self::found(store).await,
            Err(StoreError::AlreadyExists(_)) => {
                let existing = store.get(&key).await?;
                match existing.is_some_and(|existing| is_of_test(&existing)) {
                    true => bail!(
                        "namespace {NAMESPACE} exists: another test runs, or has left it; `tortie connectivity cleanup` removes it"
                    ),
                    false => bail!(
                        "namespace {NAMESPACE} exists and was not created by a test, so the test leaves it alone; rename or delete it"
                    ),
                }
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What another test has left.
    pub(super) async fn found(store: &'a dyn Store) -> anyhow::Result<Self> {
        let existing = store.get(&plan::namespace().0).await?;
        let existing = existing.with_context(|| format!("namespace {NAMESPACE} does not exist"))?;
        if !is_of_test(&existing) {
            bail!(
                "namespace {NAMESPACE} was not created by a test (it has no label {LABEL}); nothing was deleted"
            );
        }
        Ok(Self { store, uid: existing.value["metadata"]["uid"].clone(), is_stopped: Cell::new(false) })
    }

    /// Ends the test: from now on nothing is created, and nothing is waited for.
    pub(super) fn stop(&self) {
        self.is_stopped.set(true);
    }

    fn ensure_not_stopped(&self) -> anyhow::Result<()> {
        ensure!(!self.is_stopped.get(), "the test was interrupted");
        Ok(())
    }

    /// Creates an object.
    pub(super) async fn add(&self, (key, mut value): (Key, Value)) -> anyhow::Result<()> {
        identify(&mut value);
        let deadline = Instant::now() + NEW_NAMESPACE;
        loop {
            self.ensure_not_stopped()?;
            match self.store.create(&key, value.clone()).await {
                Ok(_) => return Ok(()),
                Err(StoreError::Forbidden(why))
                    if why.to_string().contains("serviceaccount") && Instant::now() < deadline =>
                {
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(anyhow::Error::from(error).context(key.to_string())),
            }
        }
    }

    /// Waits until servers run. Returns the address of each, or why it does not run.
    pub(super) async fn wait_for_servers(
        &self,
        names: &[String],
        patience: Duration,
    ) -> anyhow::Result<BTreeMap<String, Result<IpAddr, String>>> {
        let look = |pod: &Value| {
            let address = pod["status"]["podIP"].as_str().and_then(|text| text.parse().ok());
            match (pod["status"]["phase"].as_str(), address) {
                (Some("Running"), Some(address)) => Some(address),
                _ => None,
            }
        };
        let found = self.wait_for(names, Instant::now() + patience, look).await?;
        let why =
            |pod: Value| format!("does not run after {} seconds: {}", patience.as_secs(), waiting(&pod));
        Ok(found.into_iter().map(|(name, found)| (name, found.map_err(why))).collect())
    }

    /// Waits until clients have ended.
    pub(super) async fn wait_for_clients(
        &self,
        names: &[String],
        patience: Duration,
        probing: Duration,
    ) -> anyhow::Result<BTreeMap<String, Ended>> {
        let look = |pod: &Value| match pod["status"]["phase"].as_str() {
            Some("Succeeded") => Some(Ended::Succeeded),
            Some("Failed") => {
                let terminated = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
                Some(Ended::Failed(terminated["message"].as_str().unwrap_or_default().to_owned()))
            }
            _ => None,
        };
        let started = Instant::now();
        let mut found = self
            .wait_for(names, started + patience, |pod| match look(pod) {
                None if pod["status"]["phase"] == "Running" => Some(None),
                ended => ended.map(Some),
            })
            .await?;
        // Those that run get the time that probes need.
        let running: Vec<String> = found
            .iter()
            .filter(|(_, found)| matches!(found, Ok(None)))
            .map(|(name, _)| name.clone())
            .collect();
        let ended = self.wait_for(&running, Instant::now() + probing, look).await?;
        for (name, ended) in ended {
            found.insert(name, ended.map(Some));
        }
        let seconds = patience.as_secs();
        let of = |found: Result<Option<Ended>, Value>| match found {
            Ok(Some(ended)) => ended,
            Ok(None) => Ended::Not("has not ended".to_owned()),
            Err(pod) if pod["status"]["phase"] == "Running" => Ended::Not("has not ended in time".to_owned()),
            Err(pod) => Ended::Not(format!("does not run after {seconds} seconds: {}", waiting(&pod))),
        };
        Ok(found.into_iter().map(|(name, found)| (name, of(found))).collect())
    }

    /// Waits until `look` says something of each of these pods; returns that, or the pod.
    async fn wait_for<T>(
        &self,
        names: &[String],
        deadline: Instant,
        look: impl Fn(&Value) -> Option<T>,
    ) -> anyhow::Result<BTreeMap<String, Result<T, Value>>> {
        let mut results = BTreeMap::new();
        loop {
            self.ensure_not_stopped()?;
            for name in names {
                if matches!(results.get(name), Some(Ok(_))) {
                    continue;
                }
                let pod = self.store.get(&plan::key(Kind::Pod, name)).await?;
                let pod = pod.map_or(Value::Null, |stored| stored.value);
                results.insert(name.clone(), look(&pod).ok_or(pod));
            }
            if results.values().all(Result::is_ok) || Instant::now() > deadline {
                return Ok(results);
            }
            sleep(PAUSE).await;
        }
    }

    /// The address of a Service, as soon as it has one.
    pub(super) async fn service_address(
        &self,
        name: &str,
        patience: Duration,
    ) -> anyhow::Result<Option<IpAddr>> {
        let deadline = Instant::now() + patience;
        loop {
            self.ensure_not_stopped()?;
            let service = self.store.get(&plan::key(Kind::Service, name)).await?;
            let address = service.and_then(|service| {
                service.value["spec"]["clusterIP"].as_str().and_then(|text| text.parse().ok())
            });
            if address.is_some() || Instant::now() > deadline {
                return Ok(address);
            }
            sleep(PAUSE).await;
        }
    }

    /// Whether an object exists, or appears soon.
    pub(super) async fn exists(&self, key: &Key) -> anyhow::Result<bool> {
        let deadline = Instant::now() + SOON;
        loop {
            self.ensure_not_stopped()?;
            let exists = self.store.get(key).await?.is_some();
            if exists || Instant::now() > deadline {
                return Ok(exists);
            }
            sleep(PAUSE).await;
        }
    }

    /// Removes everything, and returns how many objects that were. The policy goes last, when all pods are disconnected.
    pub(super) async fn remove(&self) -> anyhow::Result<u64> {
        let namespace = plan::namespace().0;
        match self.store.get(&namespace).await? {
            Some(existing) if existing.value["metadata"]["uid"] == self.uid => {}
            // Somebody else has deleted it.
            _ => return Ok(0),
        }
        let mut removed = 0;
        let mut deleted = BTreeSet::new();
        let deadline = Instant::now() + REMOVAL;
        loop {
            let mut left = within(self.store, Kind::Pod, NAMESPACE).await?;
            for key in &left {
                if deleted.insert(key.clone()) {
                    removed += self.delete(key).await?;
                }
            }
            left.extend(within(self.store, Kind::WorkloadEndpoint, NAMESPACE).await?);
            match left.first() {
                None => break,
                Some(first) if Instant::now() > deadline => bail!(
                    "{first} is still connected after {} seconds: look at the agent of its node, then run `tortie connectivity cleanup`",
                    REMOVAL.as_secs()
                ),
                Some(_) => sleep(PAUSE).await,
            }
        }
        for kind in [Kind::Service, Kind::KubernetesNetworkPolicy] {
            for key in within(self.store, kind, NAMESPACE).await? {
                removed += self.delete(&key).await?;
            }
        }
        self.delete(&namespace).await?;
        while self.store.get(&namespace).await?.is_some_and(|left| left.value["metadata"]["uid"] == self.uid)
        {
            if Instant::now() > deadline {
                bail!("namespace {NAMESPACE} is deleted, but not gone after {} seconds", REMOVAL.as_secs());
            }
            sleep(PAUSE).await;
        }
        Ok(removed)
    }

    async fn delete(&self, key: &Key) -> anyhow::Result<u64> {
        match self.store.delete(key, None).await {
            Ok(_) => Ok(1),
            Err(StoreError::NotFound(_)) => Ok(0),
            Err(error) => Err(anyhow::Error::from(error).context(key.to_string())),
        }
    }
}

fn is_of_test(namespace: &Stored) -> bool {
    namespace.value["metadata"]["labels"][LABEL] == "true"
}

/// Why a pod does not run, as its status says.
fn waiting(pod: &Value) -> &str {
    let status = &pod["status"];
    let waiting = &status["containerStatuses"][0]["state"]["waiting"];
    let scheduled = status["conditions"].as_array().into_iter().flatten();
    let not_scheduled =
        scheduled.filter(|one| one["status"] == "False").find_map(|one| one["message"].as_str());
    let words = [&waiting["message"], &status["message"], &waiting["reason"]].map(|value| value.as_str());
    let said = words.into_iter().flatten().find(|words| !words.is_empty());
    said.or(not_scheduled).unwrap_or(if pod.is_null() { "it is gone" } else { "its node has not started it" })
}
