//! What the tests share: a store that lies, fails or crashes, and helpers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_controllers::Config;
use tortie_store::{
    Change, Embedded, Endpoints, Follow, Interest, Page, PageToken, Store, StoreError, Stored, Version,
};

use crate::load_balancers::{Checks, shown_and_not_held};

/// How long a test waits for something that must happen.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A store that can be disturbed.
pub(crate) struct Disturbed {
    pub(crate) inner: Arc<Embedded>,
    /// The number of writes until it crashes: from then on, every request fails.
    writes_left: AtomicUsize,
    /// Objects that lists and watches do not have.
    hidden: Mutex<BTreeSet<Key>>,
    /// Checks the addresses of Services after each write of a block or Service.
    checks: Option<Arc<Checks>>,
}

impl Disturbed {
    pub(crate) fn new(inner: Arc<Embedded>) -> Self {
        Self { inner, writes_left: AtomicUsize::new(usize::MAX), hidden: Mutex::default(), checks: None }
    }

    pub(crate) fn checking(self, checks: Arc<Checks>) -> Self {
        Self { checks: Some(checks), ..self }
    }

    pub(crate) fn crashing_after(inner: Arc<Embedded>, writes: usize) -> Self {
        let disturbed = Self::new(inner);
        disturbed.writes_left.store(writes + 1, Ordering::Relaxed);
        disturbed
    }

    pub(crate) fn hide(&self, key: Key) {
        self.hidden.lock().unwrap().insert(key);
    }

    pub(crate) fn has_crashed(&self) -> bool {
        self.writes_left.load(Ordering::Relaxed) == 0
    }

    fn check(&self) -> Result<(), StoreError> {
        match self.has_crashed() {
            true => Err(StoreError::Unavailable("crashed".to_owned())),
            false => Ok(()),
        }
    }

    /// Counts a write.
    fn write(&self) -> Result<(), StoreError> {
        self.check()?;
        self.writes_left.fetch_sub(1, Ordering::Relaxed);
        self.check()
    }
}

#[async_trait]
impl Store for Disturbed {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.check()?;
        self.inner.get(key).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.check()?;
        let mut page = self.inner.list_page(interest, after).await?;
        let hidden = self.hidden.lock().unwrap().clone();
        page.items.retain(|item| !hidden.contains(&item.key));
        Ok(page)
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.write()?;
        self.inner.create(key, value).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.write()?;
        let Some(checks) =
            self.checks.as_ref().filter(|_| matches!(key.kind, Kind::Service | Kind::IpamBlock))
        else {
            return self.inner.update(key, value, expected).await;
        };
        let mut checks = checks.0.lock().await;
        let written = self.inner.update(key, value, expected).await;
        checks.0 += 1;
        checks.1.extend(shown_and_not_held(&*self.inner).await);
        written
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.write()?;
        self.inner.delete(key, expected).await
    }

    /// A hidden object looks as if it were gone.
    fn follow(&self, interests: Vec<Interest>) -> Follow {
        let hidden = self.hidden.lock().unwrap().clone();
        let changes = self.inner.follow(interests);
        let visible = changes.filter(move |change| {
            let is_hidden = matches!(change, Change::Put(stored) if hidden.contains(&stored.key));
            futures::future::ready(!is_hidden)
        });
        visible.boxed()
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.inner.barrier(kinds).await
    }
}

#[async_trait]
impl Endpoints for Disturbed {}

pub(crate) fn memory() -> Arc<Embedded> {
    Arc::new(Embedded::in_memory().unwrap())
}

/// Controllers that run until this is dropped.
pub(crate) struct Running(JoinHandle<()>);

impl Running {
    pub(crate) fn new(task: JoinHandle<()>) -> Self {
        Self(task)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) fn start(
    store: Arc<dyn Endpoints>,
    kubernetes: Option<Arc<dyn Endpoints>>,
    identity: &str,
) -> Running {
    start_in(store, kubernetes, identity, "tortie-system")
}

/// Controllers whose Lease is in this namespace.
pub(crate) fn start_in(
    store: Arc<dyn Endpoints>,
    kubernetes: Option<Arc<dyn Endpoints>>,
    identity: &str,
    namespace: &str,
) -> Running {
    let config = Config {
        store,
        kubernetes,
        identity: identity.to_owned(),
        namespace: namespace.to_owned(),
        node_grace: Duration::from_secs(4),
        heeds_calico: true,
    };
    Running::new(tokio::spawn(tortie_controllers::run(config)))
}

pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn put(store: &dyn Store, key: &Key, value: Value) -> Stored {
    match store.get(key).await.unwrap() {
        None => store.create(key, value).await.unwrap(),
        Some(before) => store.update(key, value, &before.version).await.unwrap(),
    }
}

pub(crate) async fn value(store: &dyn Store, key: &Key) -> Value {
    store.get(key).await.unwrap().map(|stored| stored.value).unwrap_or_default()
}

/// Everything that is stored, except for Leases.
pub(crate) async fn everything(store: &dyn Store) -> BTreeMap<Key, Value> {
    let mut all = BTreeMap::new();
    for kind in Kind::all().filter(|kind| *kind != Kind::Lease) {
        let items = store.list(kind).await.unwrap().items;
        all.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    all
}

pub(crate) fn global(kind: Kind, name: &str) -> Key {
    Key::global(kind, name)
}

pub(crate) fn namespaced(kind: Kind, name: &str) -> Key {
    Key::namespaced(kind, "n", name)
}

pub(crate) fn pod(name: &str, uid: &str, labels: &Value) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "n", "uid": uid, "labels": labels, "managedFields": [{}]},
        "spec": {"nodeName": "one", "serviceAccountName": "s", "containers": [
            {"name": "c", "image": "i", "env": [], "ports": [{"containerPort": 80, "name": "http"}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.5", "conditions": [{}]},
    })
}
