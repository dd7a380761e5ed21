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
use crate::output;

/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);
/// The pause before a datastore is asked again that is out of reach.
const BUSY: Duration = Duration::from_millis(500);
/// When something must exist that others make: the lab starts its DNS when there is a Service.
const SOON: Duration = Duration::from_secs(5);
/// The time that the removal waits until the next object is gone. Kubernetes deletes a namespace in steps, some seconds after the request.
const REMOVAL: Duration = Duration::from_secs(60);
/// How long a new namespace may refuse pods: Kubernetes first makes its service account.
const NEW_NAMESPACE: Duration = Duration::from_secs(20);
/// The time that the datastore may be busy or out of reach.
const OUTAGE: Duration = Duration::from_secs(60);

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
            Ok(_) => {
                Self::found(store).await?.with_context(|| format!("namespace {NAMESPACE} is gone again"))
            }
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

    /// Finds the namespace of an earlier test, if one has left it.
    pub(super) async fn found(store: &'a dyn Store) -> anyhow::Result<Option<Self>> {
        let Some(existing) = read(store, &plan::namespace().0).await? else { return Ok(None) };
        if !is_of_test(&existing) {
            bail!(
                "namespace {NAMESPACE} was not created by a test (it has no label {LABEL}); nothing was deleted"
            );
        }
        let uid = existing.value["metadata"]["uid"].clone();
        Ok(Some(Self { store, uid, is_stopped: Cell::new(false) }))
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
                let pod = read(self.store, &plan::key(Kind::Pod, name)).await?;
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
            let service = read(self.store, &plan::key(Kind::Service, name)).await?;
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
            let exists = read(self.store, key).await?.is_some();
            if exists || Instant::now() > deadline {
                return Ok(exists);
            }
            sleep(PAUSE).await;
        }
    }

    /// Removes everything, and returns how many objects that were. The policy goes last, when all pods are disconnected. While the
    /// datastore is busy or out of reach, the removal waits: whoever gave up would leave pods without anybody to remove them.
    pub(super) async fn remove(&self) -> anyhow::Result<u64> {
        let mut removal =
            Removal { deleted: BTreeSet::new(), left: usize::MAX, deadline: Instant::now() + REMOVAL };
        loop {
            let (pause, given_up) = match self.remove_more(&mut removal).await {
                Ok(None) => break,
                Ok(Some(left)) => (PAUSE, anyhow::Error::msg(left)),
                Err(error) => match outage(&error) {
                    Some(pause) => (pause, error),
                    None => return Err(error),
                },
            };
            if Instant::now() > removal.deadline {
                return Err(given_up);
            }
            sleep(pause).await;
        }
        let objects = removal.deleted.iter().filter(|key| key.kind != Kind::Namespace);
        Ok(objects.count() as u64)
    }

    /// Deletes what can go now. Returns what is still there, or `None` if nothing is.
    async fn remove_more(&self, removal: &mut Removal) -> anyhow::Result<Option<String>> {
        let namespace = plan::namespace().0;
        let is_ours = |there: &Stored| there.value["metadata"]["uid"] == self.uid;
        if !self.store.get(&namespace).await?.as_ref().is_some_and(is_ours) {
            // It is gone, or it is another one of somebody else.
            return Ok(None);
        }
        let mut left = within(self.store, Kind::Pod, NAMESPACE).await?;
        for key in &left {
            self.delete(key, removal).await?;
        }
        left.extend(within(self.store, Kind::WorkloadEndpoint, NAMESPACE).await?);
        removal.note(left.len());
        let seconds = REMOVAL.as_secs();
        if let Some(first) = left.first() {
            return Ok(Some(format!(
                "{first} is still connected after {seconds} seconds: look at the agent of its node, then run `tortie connectivity cleanup`"
            )));
        }
        for kind in [Kind::Service, Kind::KubernetesNetworkPolicy] {
            for key in within(self.store, kind, NAMESPACE).await? {
                self.delete(&key, removal).await?;
            }
        }
        self.delete(&namespace, removal).await?;
        Ok(Some(format!("namespace {NAMESPACE} is deleted, but not gone after {seconds} seconds")))
    }

    /// Deletes an object, once.
    async fn delete(&self, key: &Key, removal: &mut Removal) -> anyhow::Result<()> {
        if removal.deleted.contains(key) {
            return Ok(());
        }
        match self.store.delete(key, None).await {
            Ok(_) => removal.deleted(key),
            Err(StoreError::NotFound(_)) => {}
            Err(error) => return Err(anyhow::Error::from(error).context(key.to_string())),
        }
        Ok(())
    }
}

/// The progress of a removal.
struct Removal {
    /// The objects whose deletion was accepted.
    deleted: BTreeSet<Key>,
    /// The number of pods and endpoints that were still there.
    left: usize,
    /// When it is given up, unless something goes until then.
    deadline: Instant,
}

impl Removal {
    fn deleted(&mut self, key: &Key) {
        self.deleted.insert(key.clone());
        self.deadline = Instant::now() + REMOVAL;
    }

    fn note(&mut self, left: usize) {
        if left < self.left {
            self.deadline = Instant::now() + REMOVAL;
        }
        self.left = left;
    }
}

/// Reads an object; again, while the datastore is busy or out of reach.
async fn read(store: &dyn Store, key: &Key) -> anyhow::Result<Option<Stored>> {
    let deadline = Instant::now() + OUTAGE;
    let mut is_told = false;
    loop {
        let error = match store.get(key).await {
            Ok(found) => return Ok(found),
            Err(error) => anyhow::Error::from(error),
        };
        match outage(&error) {
            Some(pause) if Instant::now() < deadline => {
                if !std::mem::replace(&mut is_told, true) {
                    output::error_line(&format!("{error}; Tortie retries for {} s", OUTAGE.as_secs()));
                }
                sleep(pause).await;
            }
            _ => return Err(error),
        }
    }
}

/// The time until the next attempt, if the datastore is busy or out of reach.
fn outage(error: &anyhow::Error) -> Option<Duration> {
    match error.downcast_ref()? {
        StoreError::Throttled(time) => Some(*time),
        StoreError::Unavailable(_) => Some(BUSY),
        _ => None,
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use tortie_api::{Position, Positions};
    use tortie_store::{Embedded, Follow, Interest, Page, PageToken, Version};

    use super::*;

    /// A datastore that fails the first time that it is asked for something, as a busy API server may.
    struct Busy {
        store: Embedded,
        asked: Mutex<BTreeSet<String>>,
    }

    impl Busy {
        fn request(&self, what: String) -> Result<(), StoreError> {
            match self.asked.lock().unwrap().insert(what) {
                true => Err(StoreError::Throttled(Duration::from_millis(1))),
                false => Ok(()),
            }
        }
    }

    #[async_trait]
    impl Store for Busy {
        async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
            self.request(format!("get {key}"))?;
            self.store.get(key).await
        }

        async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
            self.request(format!("list {}", interest.kind.plural()))?;
            self.store.list_page(interest, after).await
        }

        async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
            self.store.create(key, value).await
        }

        async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
            self.store.update(key, value, expected).await
        }

        async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
            self.request(format!("delete {key}"))?;
            self.store.delete(key, expected).await
        }

        fn follow(&self, interests: Vec<Interest>) -> Follow {
            self.store.follow(interests)
        }

        async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
            self.store.barrier(kinds).await
        }
    }

    /// A removal that gave up at the first error left the namespace with all that is in it.
    #[tokio::test]
    async fn a_busy_datastore_leaves_nothing_behind() {
        let busy = Busy { store: Embedded::in_memory().unwrap(), asked: Mutex::default() };
        let deployed = Deployed::create(&busy).await.unwrap();
        let names = ["server-1", "server-2"];
        for name in names {
            let metadata = serde_json::json!({"name": name, "namespace": NAMESPACE});
            deployed
                .add((plan::key(Kind::Pod, name), serde_json::json!({"metadata": metadata})))
                .await
                .unwrap();
        }
        assert!(read(&busy, &plan::key(Kind::Pod, names[0])).await.unwrap().is_some());
        assert_eq!(deployed.remove().await.unwrap(), 2);
        assert_eq!(busy.store.get(&plan::namespace().0).await.unwrap(), None);
        for name in names {
            assert_eq!(busy.store.get(&plan::key(Kind::Pod, name)).await.unwrap(), None);
        }
    }
}
