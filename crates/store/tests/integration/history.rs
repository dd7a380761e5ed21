//! Stores that change their history: an older copy of the file, or the file of another store, is served for a while.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use jiff::Timestamp;
use proptest::prelude::*;
use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, TableError};
use serde_json::{Value, json};
use testkit::random::Random;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_store::conformance::Mirror;
use tortie_store::rpc::{Remote, serve_unix};
use tortie_store::{
    Change, Embedded, Event, Follow, Interest, NotInForce, Page, PageToken, Source, Store, StoreError,
    StoreId, Stored, Version, Watch, Write, follow, wait_in_force,
};

const OBJECTS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new("objects");
const LOG: TableDefinition<u64, (&str, &str, &str, &[u8])> = TableDefinition::new("log");
/// The latest revision in files of the first layouts.
const FORMER_LATEST: TableDefinition<(), u64> = TableDefinition::new("latest");

const KINDS: [Kind; 2] = [Kind::Namespace, Kind::Tier];

fn namespace(name: &str) -> Key {
    Key::global(Kind::Namespace, name)
}

fn all() -> Vec<Interest> {
    KINDS.map(Interest::all).to_vec()
}

async fn put(store: &dyn Store, key: &Key, value: Value) -> Stored {
    match store.get(key).await.unwrap() {
        Some(stored) => store.update(key, value, &stored.version).await.unwrap(),
        None => store.create(key, value).await.unwrap(),
    }
}

async fn objects(store: &dyn Store) -> BTreeMap<Key, Value> {
    let mut all = BTreeMap::new();
    for kind in KINDS {
        let items = store.list(kind).await.unwrap().items;
        all.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    all
}

/// Waits until nobody has the file open.
fn closed(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = Embedded::identity_of(path) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A service on a Unix socket, with a runtime of its own, so that its connections end with it.
struct Service {
    runtime: tokio::runtime::Runtime,
    file: PathBuf,
}

impl Service {
    fn start(file: &Path, socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, socket) = (runtime.unwrap(), socket.to_owned());
        let store = Arc::new(Embedded::open(file).unwrap());
        runtime.spawn(async move { serve_unix(store, &socket).await });
        Self { runtime, file: file.to_owned() }
    }

    fn stop(self) {
        self.runtime.shutdown_background();
        closed(&self.file);
    }
}

/// Files of stores, and the socket on which one of them is served.
struct Machine {
    folder: tempfile::TempDir,
    service: Option<Service>,
}

impl Machine {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), service: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn stop(&mut self) {
        if let Some(service) = self.service.take() {
            service.stop();
        }
    }

    /// Serves this file instead of the former one; returns an operator's client.
    async fn serve(&mut self, file: &str) -> Remote {
        self.stop();
        self.service = Some(Service::start(&self.path(file), &self.path("socket")));
        let operator = Remote::unix(&self.path("socket"));
        crate::common::answering(operator.clone()).await;
        operator
    }

    fn copy(&mut self, from: &str, to: &str) {
        self.stop();
        std::fs::copy(self.path(from), self.path(to)).unwrap();
    }

    /// An agent's client.
    fn agent(&self) -> Remote {
        Remote::unix(&self.path("socket")).remembering(&self.path("accepted")).unwrap()
    }
}

/// The story of issue 42: the wrong file is served, and then the right one again.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_survives_an_older_copy_and_the_right_file_again() {
    let mut machine = Machine::new();
    Embedded::init(&machine.path("right"), None).unwrap();
    let operator = machine.serve("right").await;
    for name in ["deny-early", "later-deleted"] {
        put(&operator, &namespace(name), json!(1)).await;
    }
    machine.copy("right", "older");
    let operator = machine.serve("right").await;
    let mut mirror = Mirror::in_sync(&machine.agent(), &KINDS).await;
    let restarts = mirror.restarts;
    put(&operator, &namespace("deny-late"), json!(1)).await;
    operator.delete(&namespace("later-deleted"), None).await.unwrap();

    // A restart of the same file costs no listing.
    let operator = machine.serve("right").await;
    let last = put(&operator, &namespace("deny-early"), json!(2)).await;
    mirror.reach(&[(Kind::Namespace, last.position)].into_iter().collect()).await;
    assert_eq!(mirror.restarts, restarts);
    assert_eq!(mirror.objects, objects(&operator).await);

    let operator = machine.serve("older").await;
    mirror.reach(&operator.barrier(&KINDS).await.unwrap()).await;
    assert_eq!(mirror.objects, objects(&operator).await);
    assert!(mirror.objects.contains_key(&namespace("later-deleted")));
    assert!(mirror.restarts > restarts);
    // As many writes as the right file has, so that consecutive numbers would meet.
    for number in 0..5 {
        put(&operator, &namespace("of-the-copy"), json!(number)).await;
    }
    mirror.reach(&operator.barrier(&KINDS).await.unwrap()).await;

    let operator = machine.serve("right").await;
    let last = put(&operator, &namespace("deny-last"), json!(1)).await;
    mirror.reach(&[(Kind::Namespace, last.position)].into_iter().collect()).await;
    mirror.until(|mirror| mirror.in_sync.len() == KINDS.len()).await;
    mirror.reach(&operator.barrier(&KINDS).await.unwrap()).await;
    assert_eq!(mirror.objects, objects(&operator).await);
    assert!(!mirror.objects.contains_key(&namespace("of-the-copy")));
    machine.stop();
}

/// Listing an empty store would delete all policy.
#[tokio::test(flavor = "multi_thread")]
async fn another_store_is_refused_until_an_operator_accepts_it() {
    let mut machine = Machine::new();
    let first = Embedded::init(&machine.path("first"), None).unwrap();
    let second = Embedded::init(&machine.path("second"), None).unwrap();
    let operator = machine.serve("first").await;
    put(&operator, &namespace("deny"), json!(1)).await;
    let agent = machine.agent();
    let mut mirror = Mirror::in_sync(&agent, &KINDS).await;
    let known = mirror.objects.clone();
    assert_eq!(known.len(), 1);

    let operator = machine.serve("second").await;
    assert_eq!(objects(&operator).await, BTreeMap::new(), "an operator has accepted nothing");
    put(&operator, &namespace("other"), json!(1)).await;
    let refused = StoreError::OtherStore { expected: first, found: Some(second) };
    // A client that starts now has the file.
    for agent in [&agent, &machine.agent()] {
        assert_eq!(eventually(agent, &namespace("deny")).await, Err(refused.clone()));
        let created = agent.create(&namespace("from-the-agent"), json!(1)).await;
        assert_eq!(created.err(), Some(refused.clone()));
        assert_eq!(agent.barrier(&KINDS).await.err(), Some(refused.clone()));
    }
    assert!(refused.to_string().contains(&format!("--replace-with {first}")), "{refused}");
    let quiet = tokio::time::timeout(Duration::from_secs(3), mirror.until(|mirror| mirror.objects != known));
    assert!(quiet.await.is_err(), "{:?}", mirror.objects);

    machine.stop();
    Embedded::replace_identity(&machine.path("second"), first).unwrap();
    assert_eq!(Embedded::identity_of(&machine.path("second")).unwrap(), Some(first));
    let operator = machine.serve("second").await;
    let of_second = objects(&operator).await;
    assert!(of_second.contains_key(&namespace("other")) && !of_second.contains_key(&namespace("deny")));
    mirror.until(|mirror| mirror.objects == of_second).await;

    machine.stop();
    assert_eq!(Embedded::init(&machine.path("third"), Some(first)).unwrap(), first);
    machine.serve("third").await;
    mirror.until(|mirror| mirror.objects.is_empty()).await;
    machine.stop();
}

/// The answer of the service that is there now: the former one's connection may end first.
async fn eventually(remote: &Remote, key: &Key) -> Result<Option<Stored>, StoreError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match remote.get(key).await {
            Err(StoreError::Unavailable(problem)) => assert!(Instant::now() < deadline, "{problem}"),
            answer => return answer,
        }
    }
}

fn report(node: &str, positions: &Positions) -> Value {
    let status = json!({"os": "linux", "endpoints": 0, "positions": positions,
        "time": Timestamp::now().to_string(), "heartbeatSeconds": 60});
    json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node}, "status": status})
}

/// The report of an agent that has followed another history says nothing about this one.
#[tokio::test(flavor = "multi_thread")]
async fn a_report_about_another_history_is_never_in_force() {
    let mut machine = Machine::new();
    Embedded::init(&machine.path("right"), None).unwrap();
    let operator = machine.serve("right").await;
    put(&operator, &Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n"}})).await;
    let policy = put(&operator, &namespace("deny"), json!(1)).await.position;
    machine.copy("right", "older");
    let operator = machine.serve("older").await;
    let of_copy = operator.barrier(&[Kind::Namespace]).await.unwrap();
    assert!(of_copy.of(Kind::Namespace) > Some(policy));

    let operator = machine.serve("right").await;
    let at = |position| -> Positions { [(Kind::Namespace, position)].into_iter().collect() };
    let epoch = operator.epoch().await.unwrap().unwrap();
    let future = at(Position(epoch.latest.0 + 1_000_000_000));
    let key = Key::global(Kind::NodeReport, "n");
    for (positions, expected) in [
        (at(policy), false),
        (of_copy, false),
        (future, false),
        (at(Position(epoch.begin.0 - 1)), false),
        (at(epoch.begin), true),
        (operator.barrier(&[Kind::Namespace]).await.unwrap(), true),
    ] {
        put(&operator, &key, report("n", &positions)).await;
        let waited = wait_in_force(&operator, &at(policy), Duration::ZERO).await;
        assert_eq!(waited.is_ok(), expected, "{positions}: {waited:?}");
        assert!(expected || matches!(waited, Err(NotInForce::Late { .. })), "{waited:?}");
    }
    machine.stop();
}

/// What was waited for is perhaps not in the store that answers now.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_when_the_store_begins_another_epoch() {
    let mut machine = Machine::new();
    Embedded::init(&machine.path("right"), None).unwrap();
    let operator = machine.serve("right").await;
    put(&operator, &Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n"}})).await;
    machine.copy("right", "older");
    let operator = machine.serve("right").await;
    put(&operator, &Key::global(Kind::NodeReport, "n"), report("n", &Positions::default())).await;
    let policy = put(&operator, &namespace("deny"), json!(1)).await.position;
    let waiting = tokio::spawn({
        let operator = operator.clone();
        let positions = [(Kind::Namespace, policy)].into_iter().collect();
        async move { wait_in_force(&operator, &positions, Duration::from_secs(100)).await }
    });
    // It has asked for a report.
    let report_key = Key::global(Kind::NodeReport, "n");
    while operator.get(&report_key).await.unwrap().unwrap().value["metadata"]["annotations"].is_null() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let operator = machine.serve("older").await;
    let positions = operator.barrier(&[Kind::Namespace]).await.unwrap();
    put(&operator, &report_key, report("n", &positions)).await;
    let error = waiting.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("repeat the command"), "{error}");
    machine.stop();
}

/// A file of the first layout, which had consecutive revisions, no epochs and no identity.
fn old_layout(path: &Path, objects: &[(&str, u64, Value)]) {
    let database = Database::create(path).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut table = transaction.open_table(OBJECTS).unwrap();
        let mut log = transaction.open_table(LOG).unwrap();
        let mut latest = transaction.open_table(FORMER_LATEST).unwrap();
        for (name, revision, value) in objects {
            let json = value.to_string();
            let record = [&revision.to_be_bytes()[..], json.as_bytes()].concat();
            table.insert(("namespaces", "", *name), record.as_slice()).unwrap();
            log.insert(*revision, ("namespaces", "", *name, json.as_bytes())).unwrap();
            latest.insert((), *revision).unwrap();
        }
    }
    transaction.commit().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_the_first_layout_is_upgraded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let values = [("a", 1, json!({"v": 1})), ("b", 2, json!({"v": 2}))];
    old_layout(&path, &values);
    assert_eq!(Embedded::identity_of(&path).unwrap(), None);
    let store = Embedded::open(&path).unwrap();
    let listed = store.list(Kind::Namespace).await.unwrap();
    for ((name, revision, value), stored) in values.iter().zip(&listed.items) {
        assert_eq!((&stored.key, &stored.value), (&namespace(name), value));
        assert_eq!(stored.version, Version::new(&revision.to_string()));
    }
    assert_eq!(listed.items.len(), 2);
    // Nobody knows whether an old position is one of this history.
    for position in [0, 1, 2, 3] {
        let watch = store.watch(&[Interest::all(Kind::Namespace)], Position(position)).await;
        assert_eq!(watch.err(), Some(StoreError::Compacted(Position(position))));
    }
    assert!(listed.position > Position(1_000_000_000_000), "the clock counts: {}", listed.position);
    let mut watch = store.watch(&[Interest::all(Kind::Namespace)], listed.position).await.unwrap();
    let updated = store.update(&namespace("a"), json!(3), &listed.items[0].version).await.unwrap();
    loop {
        match watch.next().await.unwrap().unwrap() {
            Event::Progress(_) => {}
            event => break assert_eq!(event, Event::Put(updated)),
        }
    }
    drop((watch, store));
    closed(&path);
    let id = Embedded::identity_of(&path).unwrap().unwrap();
    drop(Embedded::open(&path).unwrap());
    closed(&path);
    assert_eq!(Embedded::identity_of(&path).unwrap(), Some(id), "once");
    barred(&path);
}

/// A version without layouts cannot open the file: it opened these tables, in this order, before it wrote anything.
fn barred(path: &Path) {
    let database = Database::create(path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(OBJECTS).unwrap();
    transaction.open_table(LOG).unwrap();
    assert!(matches!(transaction.open_table(FORMER_LATEST), Err(TableError::TableTypeMismatch { .. })));
}

/// Makes a closed file one of layout 1.
fn to_layout_one(path: &Path) {
    let database = Database::open(path).unwrap();
    let transaction = database.begin_write().unwrap();
    let now: TableDefinition<(), u64> = TableDefinition::new("revision");
    let barred: TableDefinition<(), &str> = TableDefinition::new("latest");
    let meta: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
    let latest = transaction.open_table(now).unwrap().get(()).unwrap().unwrap().value();
    transaction.delete_table(now).unwrap();
    transaction.delete_table(barred).unwrap();
    transaction.open_table(FORMER_LATEST).unwrap().insert((), latest).unwrap();
    transaction.open_table(meta).unwrap().insert("layout", &[1][..]).unwrap();
    transaction.commit().unwrap();
}

/// Files of layout 1 differ in one table. Their followers go on, and all that is done with closed files works.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_layout_one_is_upgraded() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let id = Embedded::init(&path("s"), None).unwrap();
    barred(&path("s"));
    let store = Embedded::open(&path("s")).unwrap();
    let stored = put(&store, &namespace("a"), json!(1)).await;
    drop(store);
    closed(&path("s"));
    to_layout_one(&path("s"));
    assert_eq!(Embedded::identity_of(&path("s")).unwrap(), Some(id));
    assert_eq!(Embedded::check(&path("s")).unwrap().objects, 1);
    assert_eq!(Embedded::copy(&path("s"), &path("copy")).unwrap().objects, 1);
    assert_eq!(Embedded::repair(&path("s"), &path("saved")).unwrap().objects, 1);
    for name in ["copy", "saved"] {
        barred(&path(name));
    }
    for name in ["s", "copy"] {
        let store = Embedded::open(&path(name)).unwrap();
        assert_eq!(store.get(&namespace("a")).await.unwrap().as_ref().map(|it| &it.value), Some(&json!(1)));
        drop(store.watch(&[Interest::all(Kind::Namespace)], stored.position).await.unwrap());
        drop(store);
        closed(&path(name));
        barred(&path(name));
    }
}

/// A store of a later version is not touched, and another database is not taken for a store.
#[test]
fn foreign_databases_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (other, newer) = (folder.path().join("other"), folder.path().join("newer"));
    let table: TableDefinition<u64, u64> = TableDefinition::new("something");
    let database = Database::create(&other).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(table).unwrap();
    transaction.commit().unwrap();
    drop(database);
    Embedded::init(&newer, None).unwrap();
    let meta: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
    let database = Database::open(&newer).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(meta).unwrap().insert("layout", &[77][..]).unwrap();
    transaction.commit().unwrap();
    drop(database);
    for (path, expected) in [(&other, "no store of Tortie"), (&newer, "layout 77")] {
        for error in [
            Embedded::open(path).err().unwrap(),
            Embedded::replace_identity(path, StoreId::random()).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains(expected) && text.contains(&path.display().to_string()), "{text}");
        }
        closed_database(path);
    }
}

/// Nothing was added to it.
fn closed_database(path: &Path) {
    let database = Database::open(path).unwrap();
    let transaction = database.begin_read().unwrap();
    let epochs: TableDefinition<u64, u64> = TableDefinition::new("epochs");
    assert!(transaction.open_table(epochs).map_or(0, |epochs| epochs.len().unwrap()) == 0);
}

/// A step of a random history.
#[derive(Debug, Clone)]
enum Step {
    /// Writes an object, or deletes it.
    Write(Kind, u8, Option<u8>),
    /// The follower has everything before the next step.
    Settle,
    /// The service restarts with its file.
    Restart,
    /// The service restarts, and its file is copied meanwhile.
    Copy,
    /// The service restarts with another one of the files.
    Switch(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write =
        (proptest::sample::select(KINDS.to_vec()), 0_u8..5, proptest::option::weighted(0.7, any::<u8>()));
    let step = prop_oneof![
        6 => write.prop_map(|(kind, name, value)| Step::Write(kind, name, value)),
        3 => Just(Step::Settle),
        1 => Just(Step::Restart),
        2 => Just(Step::Copy),
        3 => (0_usize..4).prop_map(Step::Switch),
    ];
    proptest::collection::vec(step, 1..25)
}

/// A source whose store changes.
#[derive(Clone)]
struct Switched {
    current: Arc<Mutex<Option<Embedded>>>,
    /// Counts the changes, which end watches.
    changes: tokio::sync::watch::Sender<usize>,
}

impl Switched {
    fn store(&self) -> Result<Embedded, StoreError> {
        let none = || StoreError::Unavailable("nothing is served".to_owned());
        self.current.lock().unwrap().clone().ok_or_else(none)
    }

    fn change(&self, store: Option<Embedded>) {
        *self.current.lock().unwrap() = store;
        self.changes.send_modify(|count| *count += 1);
    }
}

#[async_trait]
impl Store for Switched {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.store()?.get(key).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.store()?.list_page(interest, after).await
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.store()?.create(key, value).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.store()?.update(key, value, expected).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.store()?.delete(key, expected).await
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        follow(&Arc::new(self.clone()), interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.store()?.barrier(kinds).await
    }
}

#[async_trait]
impl Source for Switched {
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        vec![interests]
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        let mut changes = self.changes.subscribe();
        changes.mark_unchanged();
        let events = self.store()?.watch(interests, after).await?;
        Ok(events.take_until(async move { drop(changes.changed().await) }).boxed())
    }
}

/// What a follower in another task has received.
#[derive(Default)]
struct Received {
    objects: BTreeMap<Key, Value>,
    positions: Positions,
}

async fn receive(mut changes: Follow, received: Arc<Mutex<Received>>) {
    while let Some(change) = changes.next().await {
        let mut received = received.lock().unwrap();
        match change {
            Change::Put(stored) => drop(received.objects.insert(stored.key, stored.value)),
            Change::Gone { key, .. } => drop(received.objects.remove(&key)),
            Change::InSync(kind, position) | Change::Progress(kind, position) => {
                received.positions.advance(kind, position);
            }
            Change::Restarted(kind) => received.positions.reset(kind),
            Change::Unavailable(..) => {}
        }
    }
}

/// A random history: the files, and which of them is served.
struct History {
    folder: tempfile::TempDir,
    files: usize,
    served: usize,
    source: Switched,
    received: Arc<Mutex<Received>>,
}

impl History {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Embedded::init(&folder.path().join("0"), None).unwrap();
        let store = Embedded::open(&folder.path().join("0")).unwrap();
        let (changes, _) = tokio::sync::watch::channel(0);
        let source = Switched { current: Arc::new(Mutex::new(Some(store))), changes };
        let received = Arc::<Mutex<Received>>::default();
        tokio::spawn(receive(source.follow(all()), received.clone()));
        Self { folder, files: 1, served: 0, source, received }
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.path().join(number.to_string())
    }

    async fn close(&self) {
        self.source.change(None);
        let path = self.path(self.served);
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = Embedded::identity_of(&path) {
            assert!(Instant::now() < deadline, "{error}");
            // The follower's task ends its watch.
            tokio::task::yield_now().await;
        }
    }

    fn open(&mut self, number: usize) {
        self.served = number;
        self.source.change(Some(Embedded::open(&self.path(number)).unwrap()));
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Write(kind, name, value) => {
                let key = Key::global(kind, format!("o{name}"));
                let store = self.source.store().unwrap();
                in_real_time(async move {
                    match value {
                        Some(value) => drop(put(&store, &key, json!(value)).await),
                        None => drop(store.delete(&key, None).await),
                    }
                })
                .await;
            }
            Step::Settle => self.settle().await,
            Step::Restart => {
                self.close().await;
                self.open(self.served);
            }
            Step::Copy => {
                self.close().await;
                std::fs::copy(self.path(self.served), self.path(self.files)).unwrap();
                self.files += 1;
                self.open(self.served);
            }
            Step::Switch(number) => {
                self.close().await;
                self.open(number % self.files);
            }
        }
    }

    /// Waits until the follower has reached what is stored, and compares.
    async fn settle(&self) {
        let store = self.source.store().unwrap();
        let barrier = store.barrier(&KINDS).await.unwrap();
        let reached = async {
            while !self.received.lock().unwrap().positions.reach(&barrier) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(600), reached)
            .await
            .expect("the follower reaches the barrier");
        let stored = objects(&store).await;
        assert_eq!(self.received.lock().unwrap().objects, stored);
    }
}

/// Time is paused in these tests, and must not advance while the store's own thread writes.
async fn in_real_time<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(work)).await.unwrap()
}

/// Whatever is served meanwhile, a follower has exactly the objects of the file that is served, once it has reached its
/// barrier.
#[test]
fn a_follower_ends_with_the_objects_of_the_served_file() {
    let (switches, settled) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let case = |steps: Vec<Step>| {
        let count = |is: fn(&Step) -> bool| steps.iter().filter(|step| is(step)).count();
        switches.set(switches.get() + count(|step| matches!(step, Step::Switch(number) if *number > 0)));
        settled.set(settled.get() + count(|step| matches!(step, Step::Settle)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let mut history = History::new();
            for step in steps {
                history.take(step).await;
            }
            history.settle().await;
        });
        Ok(())
    };
    Random::cases(60).run(&steps(), case).unwrap();
    assert!(
        switches.get() > 20 && settled.get() > 20,
        "{} switches, {} settled",
        switches.get(),
        settled.get()
    );
}

/// Versions of one history are none of another, so no writer overwrites what it has not read.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_of_another_history_is_a_conflict() {
    let mut machine = Machine::new();
    Embedded::init(&machine.path("right"), None).unwrap();
    let operator = machine.serve("right").await;
    put(&operator, &namespace("n"), json!(0)).await;
    machine.copy("right", "older");
    let mut versions = Vec::new();
    for (file, value) in [("right", 1), ("older", 2)] {
        let operator = machine.serve(file).await;
        versions.push(put(&operator, &namespace("n"), json!(value)).await.version);
    }
    assert_ne!(versions[0], versions[1]);
    let operator = machine.serve("older").await;
    let write = |version: &Version| vec![Write::Update(namespace("n"), json!(3), version.clone())];
    let refused = operator.write_all(write(&versions[0])).await.unwrap_err();
    assert_eq!(refused.error, StoreError::Conflict(namespace("n")));
    operator.write_all(write(&versions[1])).await.unwrap();
    machine.stop();
}
