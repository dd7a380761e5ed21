//! Damaged files of the embedded store: what is served is what was stored, or nothing, or an object that cannot be read.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use proptest::prelude::*;
use redb::{Database, ReadableTable, TableDefinition};
use serde_json::{Value, json};
use testkit::random::Random;
use tortie_api::{Key, Kind, Position};
use tortie_store::rpc::{Limits, Remote, controllers_subject, node_subject, serve_unix};
use tortie_store::{Embedded, Event, Interest, Source, Store, StoreError, Write};

use crate::common::{Served, answering};

const OBJECTS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new("objects");
const LOG: TableDefinition<u64, (&str, &str, &str, &[u8])> = TableDefinition::new("log");

fn policy(name: &str) -> Key {
    Key::namespaced(Kind::NetworkPolicy, "n", name)
}

async fn objects(store: &dyn Store) -> Result<BTreeMap<Key, Value>, StoreError> {
    let mut all = BTreeMap::new();
    for kind in Kind::all() {
        let items = store.list(kind).await?.items;
        all.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    Ok(all)
}

fn closed(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = Embedded::identity_of(path) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A closed file in which objects were created, updated and deleted, and what it has.
async fn file(path: &Path) -> BTreeMap<Key, Value> {
    Embedded::init(path, None).unwrap();
    let store = Embedded::open(path).unwrap();
    for number in 0..60_usize {
        let key = policy(&format!("p{number}"));
        let value = |text: &str| json!({"action": text, "padding": "x".repeat(number * number)});
        let created = store.create(&key, value("Pass")).await.unwrap();
        if number.is_multiple_of(2) {
            store.update(&key, value("Deny"), &created.version).await.unwrap();
        }
        if number.is_multiple_of(7) {
            store.delete(&key, None).await.unwrap();
        }
        store.create(&Key::global(Kind::Node, format!("n{number}")), json!(number)).await.unwrap();
    }
    let all = objects(&store).await.unwrap();
    drop(store);
    closed(path);
    all
}

/// A change that no store makes.
#[derive(Debug, Clone)]
enum Damage {
    /// One bit.
    Bit(prop::sample::Index, u8),
    /// Random bytes.
    Bytes(prop::sample::Index, Vec<u8>),
    /// A page without content.
    Page(prop::sample::Index),
    /// Two pages in each other's place.
    Swap(prop::sample::Index, prop::sample::Index),
    /// The end is missing.
    End(prop::sample::Index),
    /// A bit of the header.
    Header(prop::sample::Index, u8),
}

fn damages() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        4 => (at(), 0_u8..8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        4 => (at(), proptest::collection::vec(any::<u8>(), 1..600)).prop_map(|(at, bytes)| Damage::Bytes(at, bytes)),
        2 => at().prop_map(Damage::Page),
        2 => (at(), at()).prop_map(|(one, other)| Damage::Swap(one, other)),
        1 => at().prop_map(Damage::End),
        2 => (at(), 0_u8..8).prop_map(|(at, bit)| Damage::Header(at, bit)),
    ]
}

const PAGE: usize = 4_096;

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>, used: &[usize]) {
        // Most pages of a file are unused; damage there shows nothing.
        let page = |at: &prop::sample::Index| used[at.index(used.len())] * PAGE;
        match self {
            Self::Bit(at, bit) => {
                let place = page(at) + at.index(PAGE);
                bytes[place] ^= 1 << bit;
            }
            Self::Bytes(at, new) => {
                let place = page(at) + at.index(PAGE - new.len());
                bytes[place..place + new.len()].copy_from_slice(new);
            }
            Self::Page(at) => bytes[page(at)..page(at) + PAGE].fill(0),
            Self::Swap(one, other) => {
                let (one, other) = (page(one), page(other));
                let kept = bytes[one..one + PAGE].to_vec();
                bytes.copy_within(other..other + PAGE, one);
                bytes[other..other + PAGE].copy_from_slice(&kept);
            }
            Self::End(at) => bytes.truncate(at.index(bytes.len())),
            Self::Header(at, bit) => bytes[at.index(320)] ^= 1 << bit,
        }
    }
}

/// The issue's test: of 120 files that were damaged after a clean end, 45 served other data.
#[test]
fn a_damaged_file_never_serves_other_data() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let stored = runtime.block_on(file(&path));
    let whole = std::fs::read(&path).unwrap();
    let used: Vec<usize> = (0..whole.len() / PAGE)
        .filter(|page| whole[page * PAGE..(page + 1) * PAGE].iter().any(|byte| *byte != 0))
        .collect();
    let (refused, served, saved) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let case = |damage: Damage| {
        let path = folder.path().join("damaged");
        let mut bytes = whole.clone();
        damage.apply(&mut bytes, &used);
        std::fs::write(&path, &bytes).unwrap();
        let is_stored = |(key, value): (&Key, &Value)| stored.get(key) == Some(value);
        match Embedded::open(&path) {
            Err(error) => {
                refused.set(refused.get() + 1);
                prop_assert!(error.to_string().contains("damaged"), "it is named: {error}");
                prop_assert!(std::fs::read(&path).unwrap() == bytes, "it is left alone");
                let new = folder.path().join("saved");
                if Embedded::repair(&path, &new).is_ok() {
                    let store = Embedded::open(&new).unwrap();
                    let all = runtime.block_on(objects(&store)).unwrap();
                    prop_assert!(all.iter().all(is_stored), "other data were saved");
                    saved.set(saved.get() + usize::from(all.len() > stored.len() / 2));
                    std::fs::remove_file(&new).unwrap();
                }
            }
            Ok(store) => {
                served.set(served.get() + 1);
                prop_assert!(runtime.block_on(objects(&store)).unwrap() == stored, "other data are served");
                drop(store);
                closed(&path);
            }
        }
        Ok(())
    };
    Random::cases(150).run(&damages(), case).unwrap();
    let counts = (refused.get(), served.get(), saved.get());
    println!("refused, served, saved by repair: {counts:?}");
    assert!(counts.0 > 50 && counts.1 > 5 && counts.2 > 20, "{counts:?}");
}

/// Changes the record of an object in a closed file, as no page of redb shows.
fn change_record(path: &Path, name: &str, change: impl Fn(&mut Vec<u8>)) {
    let database = Database::open(path).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut objects = transaction.open_table(OBJECTS).unwrap();
        let plural = Kind::NetworkPolicy.plural();
        let mut record = objects.get((plural, "n", name)).unwrap().unwrap().value().to_vec();
        change(&mut record);
        objects.insert((plural, "n", name), record.as_slice()).unwrap();
    }
    transaction.commit().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_an_object_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let stored = file(&path).await;
    let whole = Embedded::check(&path).unwrap();
    assert_eq!((whole.objects, whole.damaged.len()), (stored.len() as u64, 0));
    // "Deny" becomes "Pass", and another record is cut off.
    change_record(&path, "p2", |record| {
        let place = record.windows(4).position(|window| window == b"Deny").unwrap();
        record[place..place + 4].copy_from_slice(b"Pass");
    });
    change_record(&path, "p4", |record| record.truncate(3));
    let plural = Kind::NetworkPolicy.plural();
    let found = Embedded::check(&path).unwrap();
    assert_eq!(found.damaged, ["p2", "p4"].map(|name| format!("{plural} n/{name}")));

    let store = Embedded::open(&path).unwrap();
    let mut expected = stored.clone();
    let listed = objects(&store).await.unwrap();
    for name in ["p2", "p4"] {
        let got = store.get(&policy(name)).await.unwrap().unwrap();
        assert!(got.value.is_string() && listed[&got.key] == got.value, "{got:?}");
        assert_eq!(got.position, Position(0));
        expected.insert(got.key, got.value);
    }
    assert_eq!(listed, expected, "the others are whole");
    // Somebody applies one again, and deletes the other.
    let damaged = store.get(&policy("p2")).await.unwrap().unwrap();
    store.update(&damaged.key, stored[&damaged.key].clone(), &damaged.version).await.unwrap();
    store.delete(&policy("p4"), None).await.unwrap();
    expected = stored;
    expected.remove(&policy("p4"));
    assert_eq!(objects(&store).await.unwrap(), expected);
}

/// What is lost is named, and whoever follows the store learns that it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_repaired_file_has_the_whole_records_and_another_history() {
    let folder = tempfile::tempdir().unwrap();
    let (path, saved) = (folder.path().join("s"), folder.path().join("saved"));
    let mut stored = file(&path).await;
    let store = Embedded::open(&path).unwrap();
    let id = store.id();
    let latest = store.epoch().await.unwrap().unwrap().latest;
    drop(store);
    closed(&path);
    change_record(&path, "p2", |record| record[20] ^= 1);
    let found = Embedded::repair(&path, &saved).unwrap();
    stored.remove(&policy("p2"));
    assert_eq!((Some(found.id), found.objects, found.lost_without_names), (id, stored.len() as u64, 0));
    assert!(found.is_complete);
    assert_eq!(found.lost, [format!("{} n/p2", Kind::NetworkPolicy.plural())]);
    let error = Embedded::repair(&path, &saved).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    let store = Embedded::open(&saved).unwrap();
    assert_eq!(objects(&store).await.unwrap(), stored);
    let newest = store.list(Kind::Node).await.unwrap().items.iter().map(|stored| stored.position).max();
    for after in [latest, newest.unwrap()] {
        let watch = store.watch(&[Interest::all(Kind::NetworkPolicy)], after).await;
        assert_eq!(watch.err(), Some(StoreError::Compacted(after)));
    }
}

/// Nobody knows which object a damaged record of the log is about.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_of_the_log_ends_watches() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    Embedded::init(&path, None).unwrap();
    let store = Embedded::open(&path).unwrap();
    let mut positions = vec![store.epoch().await.unwrap().unwrap().begin];
    for name in ["a", "b", "c"] {
        positions.push(store.create(&policy(name), json!(name)).await.unwrap().position);
    }
    drop(store);
    closed(&path);
    let database = Database::open(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    let key = (Kind::NetworkPolicy.plural(), "n", "b");
    transaction
        .open_table(LOG)
        .unwrap()
        .insert(positions[2].0, (key.0, key.1, key.2, &b"\0\0\0\0"[..]))
        .unwrap();
    transaction.commit().unwrap();
    drop(database);
    let store = Embedded::open(&path).unwrap();
    let interests = [Interest::all(Kind::NetworkPolicy)];
    for (after, is_lost) in
        [(positions[0], true), (positions[1], true), (positions[2], false), (positions[3], false)]
    {
        let watch = store.watch(&interests, after).await;
        assert_eq!(watch.err(), is_lost.then_some(StoreError::Compacted(after)));
    }
    let mut watch = store.watch(&interests, positions[2]).await.unwrap();
    let event = watch.next().await.unwrap().unwrap();
    assert!(matches!(event, Event::Put(stored) if stored.key == policy("c")));
}

/// A backup is one moment, also while somebody writes, and a store.
#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_a_served_store_is_one_moment() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let id = Embedded::init(&path("s"), None).unwrap();
    let store = Arc::new(Embedded::open(&path("s")).unwrap());
    let socket = path("socket");
    tokio::spawn({
        let (store, socket) = (store.clone(), socket.clone());
        async move { serve_unix(store, &socket).await }
    });
    answering(Remote::unix(&socket)).await;
    // Pairs of objects that are always written together; several parts of a backup.
    let text = "x".repeat(20_000);
    let pair = |round: u64| {
        (0..40).flat_map(move |number| {
            ["a", "b"]
                .map(|half| (Key::namespaced(Kind::NetworkPolicy, half, format!("p{number}")), json!(round)))
        })
    };
    let padded = |round: &Value| json!({"round": round, "padding": text});
    let creations = pair(0).map(|(key, round)| Write::Create(key, padded(&round))).collect();
    let mut versions = store.write_all(creations).await.unwrap();
    let writing = tokio::spawn({
        let (store, text) = (store.clone(), text.clone());
        async move {
            for round in 1.. {
                let updates = pair(round).zip(&versions).map(|((key, round), written)| {
                    Write::Update(key, json!({"round": round, "padding": text}), written.version.clone())
                });
                versions = store.write_all(updates.collect()).await.unwrap();
            }
        }
    });
    let operator = Remote::unix(&socket);
    for name in ["first", "second"] {
        let made = operator.backup(&path(name)).await.unwrap();
        assert_eq!((made.id, made.objects, made.damaged.len()), (Some(id), 80, 0));
    }
    writing.abort();
    let error = operator.backup(&path("first")).await.unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    let mut rounds = Vec::new();
    for name in ["first", "second"] {
        assert_eq!(Embedded::check(&path(name)).unwrap().id, Some(id));
        let restored = path(&format!("restored-{name}"));
        Embedded::copy(&path(name), &restored).unwrap();
        assert!(Embedded::copy(&path(name), &restored).is_err(), "nothing is replaced");
        let backup = Embedded::open(&restored).unwrap();
        let all = objects(&backup).await.unwrap();
        let of_one: Vec<&Value> = all.values().map(|value| &value["round"]).collect();
        assert!(of_one.iter().all(|round| *round == of_one[0]), "{of_one:?}");
        rounds.push(of_one[0].as_u64().unwrap());
        // Whoever has reached more than the backup has lists again.
        let later = store.epoch().await.unwrap().unwrap().latest;
        let watch = backup.watch(&[Interest::all(Kind::Pod)], later).await;
        assert_eq!(watch.err(), Some(StoreError::Compacted(later)));
    }
    assert!(rounds[0] <= rounds[1], "{rounds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_operators_back_up() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::new(Limits::default()).await;
    let operator = served.client(served.authority.operator());
    operator.create(&policy("p"), json!(1)).await.unwrap();
    for subject in [node_subject("one"), controllers_subject()] {
        let client = served.client(served.authority.issue(subject));
        let refused = client.backup(&folder.path().join("b")).await;
        assert!(matches!(refused, Err(StoreError::Forbidden(_))), "{refused:?}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert_eq!(operator.backup(&folder.path().join("b")).await.unwrap().objects, 1);
}
