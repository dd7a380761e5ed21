#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use redb::{ReadableDatabase, StorageBackend, WriteTransaction};
use serde_json::json;

use super::layout::LOG;
use super::*;

/// A disk that can be full, and on which a write can panic once.
#[derive(Debug, Clone)]
struct Disk(Arc<(InMemoryBackend, AtomicBool, AtomicBool)>);

impl Disk {
    fn check(&self) -> io::Result<()> {
        assert!(!self.0.2.swap(false, Ordering::SeqCst), "as redb on some damaged pages");
        let full = self.0.1.load(Ordering::SeqCst);
        if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.0.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.0.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.0.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.0.0.write(offset, data)
    }
}

fn on_a_disk() -> (Disk, Embedded) {
    let disk = Disk(Arc::new((InMemoryBackend::new(), AtomicBool::new(false), AtomicBool::new(false))));
    let file = File::new({
        let disk = disk.clone();
        move || Database::builder().create_with_backend(disk.clone()).map_err(failed)
    });
    (disk, Embedded::over_new(file.unwrap()).unwrap())
}

#[tokio::test]
async fn a_disk_that_was_full_ends_nothing() {
    let (disk, store) = on_a_disk();
    let key = |name: &str| Key::global(Kind::Namespace, name);
    let create = async |name: &str| store.create(&key(name), json!({"metadata": {"name": name}})).await;
    create("before").await.unwrap();
    let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(1)).await.unwrap();
    assert_eq!(events.next().await, Some(Ok(Event::Progress(Position(1)))));
    for round in 0..3 {
        disk.0.1.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            let refused = create("meanwhile").await;
            assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
        }
        disk.0.1.store(false, Ordering::SeqCst);
        let name = format!("after-{round}");
        create(&name).await.unwrap();
        let Some(Ok(Event::Put(event))) = events.next().await else { panic!("the watch goes on") };
        assert_eq!(event.key, key(&name));
        assert!(store.get(&key("before")).await.unwrap().is_some());
    }
    assert_eq!(store.list(Kind::Namespace).await.unwrap().items.len(), 4);
}

/// Whoever serves the store learns that it can write no more.
#[tokio::test]
async fn a_writer_that_panics_ends_the_store() {
    let (disk, store) = on_a_disk();
    let create = async |name: &str| store.create(&Key::global(Kind::Namespace, name), json!(0)).await;
    create("before").await.unwrap();
    let ended = store.writer_ended();
    assert!(ended.now_or_never().is_none());
    disk.0.2.store(true, Ordering::SeqCst);
    for name in ["panics", "later"] {
        assert!(matches!(create(name).await, Err(StoreError::Unavailable(_))));
    }
    let ended = tokio::time::timeout(std::time::Duration::from_secs(60), store.writer_ended()).await;
    assert!(ended.expect("it ends").to_string().contains("restart"));
}

/// A file with a damaged number of objects. redb itself opens it.
#[tokio::test]
async fn a_damaged_number_of_objects_hides_none() {
    const COUNT: u64 = 4_321;
    let folder = tempfile::tempdir().unwrap();
    let (path, saved) = (folder.path().join("s"), folder.path().join("saved"));
    Embedded::init(&path, None).unwrap();
    let store = Embedded::open(&path).unwrap();
    let write = |number| Write::Create(Key::global(Kind::Namespace, format!("n{number}")), json!(number));
    store.write_all((0..COUNT).map(write).collect()).await.unwrap();
    let closing = store.closing();
    drop(store);
    assert!(closing.wait(std::time::Duration::from_secs(60)));
    let mut bytes = std::fs::read(&path).unwrap();
    let places: Vec<usize> =
        (0..bytes.len() - 8).filter(|at| bytes[*at..at + 8] == COUNT.to_le_bytes()).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + 8].copy_from_slice(&5_u64.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    let database = Database::open(&path).unwrap();
    let backup = backup::read(&database.begin_read().unwrap(), &mut |_| Ok(()));
    assert!(backup.unwrap_err().to_string().contains("objects are missing"));
    drop(database);
    let found = Embedded::repair(&path, &saved).unwrap();
    assert_eq!((found.objects, found.is_complete), (COUNT, false));
    assert_eq!(Embedded::check(&saved).unwrap().objects, COUNT);
}

/// The runtime has one worker, which a call that blocks would stop for ever.
#[test]
fn a_backup_that_nobody_takes_stops_nothing() {
    let (ended, is_ended) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(write_beside_a_stalled_backup());
        ended.send(()).unwrap();
        // What is left blocks, and is not waited for.
        runtime.shutdown_background();
    });
    is_ended.recv_timeout(std::time::Duration::from_secs(60)).expect("nothing waits for the backup");
}

async fn write_beside_a_stalled_backup() {
    let (disk, store) = on_a_disk();
    let key = |number: usize| Key::global(Kind::Namespace, format!("n{number}"));
    let value = json!("x".repeat(2 << 20));
    for number in 0..8 {
        store.create(&key(number), value.clone()).await.unwrap();
    }
    let mut backup = store.backup();
    backup.next().await.unwrap().unwrap();
    disk.0.1.store(true, Ordering::SeqCst);
    assert!(store.create(&key(8), value.clone()).await.is_err(), "the disk is full");
    disk.0.1.store(false, Ordering::SeqCst);
    assert!(store.get(&key(0)).await.unwrap().is_some());
    store.create(&key(9), json!(0)).await.unwrap();
    let latest = store.epoch().await.unwrap().unwrap().latest;
    assert_eq!(store.barrier(&[Kind::Namespace]).await.unwrap().of(Kind::Namespace), Some(latest));
    let parts: Vec<_> = backup.collect().await;
    let (last, before) = parts.split_last().unwrap();
    assert!(before.iter().all(Result::is_ok), "{:?}", before.iter().find(|part| part.is_err()));
    assert!(last.as_ref().is_err() || last.as_ref().is_ok_and(|part| part.is_last));
}

/// A record that is not JSON is an object that no reader understands; the others of its kind are not affected.
#[tokio::test]
async fn a_record_that_is_not_json_stays_alone() {
    let store = Embedded::in_memory().unwrap();
    let key = |name: &str| Key::global(Kind::Namespace, name);
    for name in ["damaged", "whole"] {
        store.create(&key(name), json!({"metadata": {"name": name}})).await.unwrap();
    }
    let damage = |transaction: &WriteTransaction| {
        let mut objects = transaction.open_table(OBJECTS).map_err(failed)?;
        let path = ("namespaces", "", "damaged");
        let record = records::object(path, 1, b"{\"metadata\":");
        objects.insert(path, record.as_slice()).map_err(failed)?;
        let mut log = transaction.open_table(LOG).map_err(failed)?;
        let record = records::logged(path, 1, b"{\"metadata\":");
        log.insert(1, ("namespaces", "", "damaged", record.as_slice())).map_err(failed)?;
        Ok(())
    };
    store.file.write(damage).unwrap();
    let text = json!("{\"metadata\":");
    let listed = store.list(Kind::Namespace).await.unwrap().items;
    assert_eq!(
        listed.iter().map(|it| &it.value).collect::<Vec<_>>(),
        [&text, &json!({"metadata": {"name": "whole"}})]
    );
    let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(0)).await.unwrap();
    for expected in [&text, &listed[1].value] {
        let Some(Ok(Event::Put(stored))) = events.next().await else { panic!("both are delivered") };
        assert_eq!(stored.value, *expected);
    }
    let repaired = json!({"metadata": {"name": "damaged"}});
    store.update(&key("damaged"), repaired.clone(), &listed[0].version).await.unwrap();
    assert_eq!(store.get(&key("damaged")).await.unwrap().unwrap().value, repaired);
}

/// A disk that hangs costs the memory of the requests that may wait, and the others are made later.
#[tokio::test]
async fn requests_beyond_the_limit_wait_for_room() {
    let store = Embedded::in_memory().unwrap();
    let (entered, is_held) = std::sync::mpsc::channel();
    let (open, gate) = std::sync::mpsc::channel::<()>();
    // A transaction of somebody else blocks the writer.
    let file = store.file.clone();
    thread::spawn(move || {
        file.write(|_| {
            entered.send(()).unwrap();
            let _ = gate.recv();
            Ok(())
        })
    });
    is_held.recv().unwrap();
    let count = 3 * MAX_WAITING;
    let creations = (0..count).map(|number| {
        let store = store.clone();
        let key = Key::global(Kind::Namespace, format!("n{number}"));
        tokio::spawn(async move { store.create(&key, json!(number)).await })
    });
    let creations: Vec<_> = creations.collect();
    while store.writer.capacity() > 0 {
        tokio::task::yield_now().await;
    }
    open.send(()).unwrap();
    for created in futures::future::join_all(creations).await {
        created.unwrap().unwrap();
    }
    assert_eq!(store.list(Kind::Namespace).await.unwrap().items.len(), count);
}

/// After an I/O error, the file is opened again by its name, which may be that of another file by then.
#[tokio::test]
async fn another_file_of_the_same_name_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let id = Embedded::init(&path("s"), None).unwrap();
    Embedded::init(&path("other"), None).unwrap();
    Embedded::init(&path("successor"), Some(id)).unwrap();
    let store = Embedded::open(&path("s")).unwrap();
    let key = |name: &str| Key::global(Kind::Namespace, name);
    store.create(&key("early"), json!(0)).await.unwrap();
    std::fs::copy(path("s"), path("older")).unwrap();
    store.create(&key("late"), json!(0)).await.unwrap();
    std::fs::hard_link(path("s"), path("right")).unwrap();
    // Its epoch is later than that of the right file.
    drop(Embedded::open(&path("successor")).unwrap());
    while Embedded::identity_of(&path("successor")).is_err() {
        tokio::task::yield_now().await;
    }
    for name in ["other", "successor", "older"] {
        std::fs::rename(path(name), path("s")).unwrap();
        let error = store.file.reopen().unwrap_err().to_string();
        assert!(error.contains("was replaced while it was served"), "{name}: {error}");
        let refused = store.create(&key("lost"), json!(0)).await;
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{name}: {refused:?}");
        assert!(store.list(Kind::Namespace).await.is_err(), "{name}");
    }
    std::fs::rename(path("right"), path("s")).unwrap();
    store.create(&key("again"), json!(0)).await.unwrap();
    assert_eq!(store.list(Kind::Namespace).await.unwrap().items.len(), 3);
}

#[test]
fn a_file_keeps_its_latest_epochs() {
    let file = File::new(|| Database::builder().create_with_backend(InMemoryBackend::new()).map_err(failed));
    let file = file.unwrap();
    file.write(|transaction| layout::make(transaction, StoreId::random())).unwrap();
    for number in 1..=300 {
        let begun = file.write(|transaction| layout::begin(transaction, |latest| latest + 10)).unwrap();
        assert_eq!(begun.begin, 10 * number);
    }
    let kept = file.read(|transaction| epochs::read(&transaction.open_table(layout::EPOCHS).unwrap()));
    let kept: Vec<Revision> = kept.unwrap().into_iter().map(|(begin, _)| begin).collect();
    assert_eq!(kept, (45..=300).map(|number| 10 * number).collect::<Vec<_>>());
    let standing = file.write(|transaction| layout::begin(transaction, |latest| latest));
    assert!(matches!(standing, Err(StoreError::Damaged(_))), "an epoch begins later than the former one");
}

#[tokio::test]
async fn an_incomplete_backup_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b");
    let part = |is_last| BackupPart { id: StoreId::random(), latest: 7, records: Vec::new(), is_last };
    for parts in [vec![], vec![part(false)]] {
        let written = write_backup(&path, |take| parts.into_iter().try_for_each(take));
        assert!(matches!(written, Err(StoreError::Unavailable(_))), "{written:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
    write_backup(&path, |take| [part(false), part(true)].into_iter().try_for_each(take)).unwrap();
    // Who has reached exactly this state goes on.
    let store = Embedded::open(&path).unwrap();
    for (after, is_known) in [(6, false), (7, true), (8, false)] {
        let watch = store.watch(&[Interest::all(Kind::Node)], Position(after)).await;
        assert_eq!(watch.is_ok(), is_known, "{after}");
    }
}

/// A failed transaction may have been committed, and its log may be damaged by then: watchers list again.
#[tokio::test]
async fn watches_end_if_the_events_of_a_failed_transaction_are_damaged() {
    let store = Embedded::in_memory().unwrap();
    let key = |name: &str| Key::global(Kind::Namespace, name);
    store.create(&key("before"), json!(0)).await.unwrap();
    let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(1)).await.unwrap();
    assert_eq!(events.next().await, Some(Ok(Event::Progress(Position(1)))));
    let untold = |transaction: &WriteTransaction| {
        let mut log = transaction.open_table(LOG).map_err(failed)?;
        log.insert(2, ("namespaces", "", "untold", &b"damaged"[..])).map_err(failed)?;
        transaction.open_table(LATEST).map_err(failed)?.insert((), 2).map_err(failed)?;
        Ok(())
    };
    store.file.write(untold).unwrap();
    store.create(&key("after"), json!(0)).await.unwrap();
    let end = tokio::time::timeout(std::time::Duration::from_secs(60), events.next()).await;
    assert_eq!(end.expect("the watch ends"), Some(Err(StoreError::FellBehind)));
    assert_eq!(store.barrier(&[Kind::Namespace]).await.unwrap().of(Kind::Namespace), Some(Position(3)));
    // Later watches and writes are not affected.
    let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(3)).await.unwrap();
    assert_eq!(events.next().await, Some(Ok(Event::Progress(Position(3)))));
    store.create(&key("later"), json!(0)).await.unwrap();
    assert!(matches!(events.next().await, Some(Ok(Event::Put(stored))) if stored.key == key("later")));
}

fn with_room(quota: u64, log: u64) -> Embedded {
    let create = || Database::builder().create_with_backend(InMemoryBackend::new()).map_err(failed);
    let file = File::new(create).unwrap();
    file.write(|transaction| layout::make(transaction, StoreId::random())).unwrap();
    Embedded::over(file, Arc::default(), Room { quota, log }, |latest| latest).unwrap()
}

fn of_size(bytes: usize) -> Value {
    json!("x".repeat(bytes))
}

#[tokio::test]
async fn a_full_store_takes_only_what_needs_no_more_room() {
    // A quota that has no exact hundredth.
    let store = with_room(10_001, 1 << 20);
    let key = |name: &str| Key::global(Kind::Namespace, name);
    let mut versions = Vec::new();
    for name in ["a", "b", "c", "d"] {
        versions.push(store.create(&key(name), of_size(2_000)).await.unwrap().version);
    }
    let problem = match store.create(&key("e"), of_size(2_000)).await {
        Err(StoreError::Full { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    assert!(problem.contains("the store is full") && problem.contains("--quota"), "{problem}");
    assert_eq!(store.get(&key("e")).await, Ok(None));
    // The share of a client is smaller than the store.
    let small = vec![Write::Create(key("small"), of_size(100))];
    let refused = store.write_within(small.clone(), 80).await;
    assert!(matches!(&refused, Err(Stopped { error: StoreError::Full { .. }, .. })), "{refused:?}");
    store.write_within(small, 100).await.unwrap();

    // Updates that are not larger, and deletions.
    let same = Write::Update(key("a"), of_size(2_000), versions[0].clone());
    let [written] = &store.write_within(vec![same], 1).await.unwrap()[..] else { panic!("one write") };
    // A little more: a report, a lease, or a mark of a block that is given up.
    store.create(&key("rest"), of_size(1_600)).await.unwrap();
    assert!(store.used() > 9_700, "{}", store.used());
    let reports = store.update(&key("a"), of_size(2_500), &written.version).await.unwrap();
    assert!(store.used() > 10_000, "{}", store.used());
    // Small steps can be many, so other clients have less.
    let step = Write::Update(key("a"), of_size(2_501), reports.version.clone());
    let refused = store.write_within(vec![step], 80).await;
    assert!(matches!(&refused, Err(Stopped { error: StoreError::Full { .. }, .. })), "{refused:?}");
    let written = store.update(&key("a"), of_size(2_000), &reports.version).await.unwrap();
    let larger = store.update(&key("a"), of_size(4_000), &written.version).await;
    assert!(matches!(larger, Err(StoreError::Full { .. })), "{larger:?}");
    store.delete(&key("b"), None).await.unwrap();
    store.update(&key("a"), of_size(3_500), &written.version).await.unwrap();
}

/// Creations, updates and deletions of any size, refused ones among them.
#[tokio::test]
async fn the_used_room_is_what_is_in_the_file() {
    let store = with_room(60_000, 20_000);
    let mut state = testkit::random::first_number();
    // Knuth's MMIX.
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for _ in 0..500 {
        let key = Key::global(Kind::Namespace, format!("n{}", random() % 20));
        let value = of_size((random() % 8_000) as usize);
        let write = match (store.get(&key).await.unwrap(), random() % 3) {
            (None, _) => Write::Create(key, value),
            (Some(_), 0) => Write::Delete(key, None),
            (Some(stored), _) => Write::Update(key, value, stored.version),
        };
        let _ = store.write_all(vec![write]).await;
        let found = store.file.read(Usage::read).unwrap();
        assert_eq!(store.used(), found.objects);
        assert!(found.objects <= 63_000 && found.log <= 20_000, "{found:?}");
    }
    assert!(store.used() > 40_000, "it was nearly full");
}

#[tokio::test]
async fn a_log_that_is_too_large_loses_its_oldest_writes() {
    let store = with_room(1 << 30, 10_000);
    let key = |number| Key::global(Kind::Namespace, format!("n{number}"));
    for number in 0..20 {
        store.create(&key(number), of_size(1_000)).await.unwrap();
    }
    let all = [Interest::all(Kind::Namespace)];
    let resume = async |after| {
        let mut events = store.watch(&all, Position(after)).await?;
        events.next().await.unwrap()
    };
    assert_eq!(resume(5).await, Err(StoreError::Compacted(Position(5))));
    let Ok(Event::Put(next)) = resume(15).await else { panic!("it resumes") };
    assert_eq!(next.key, key(15));
    // A write that is larger than the log is in it.
    let last = store.create(&key(99), of_size(50_000)).await.unwrap().position.0;
    assert!(matches!(resume(last - 1).await, Ok(Event::Put(put)) if put.key == key(99)));
    assert!(matches!(resume(last - 2).await, Err(StoreError::Compacted(_))));
}

#[tokio::test]
async fn a_file_with_too_much_room_is_made_smaller_at_the_next_start() {
    const OBJECT: usize = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    Embedded::init(&path, None).unwrap();
    let size = || path.metadata().unwrap().len();
    let key = |number| Key::global(Kind::Namespace, format!("n{number}"));
    let open = || {
        let (file, served) = files::served(&path).unwrap();
        let room = Room { log: 1 << 20, ..Room::default() };
        Embedded::over(file, served, room, |latest| latest + 1).unwrap()
    };
    let close = |store: Embedded| {
        let closing = store.closing();
        drop(store);
        assert!(closing.wait(std::time::Duration::from_secs(60)));
    };
    let store = open();
    for number in 0..60 {
        store.create(&key(number), of_size(OBJECT)).await.unwrap();
    }
    // The last one keeps the end of the file.
    for number in 0..59 {
        store.delete(&key(number), None).await.unwrap();
    }
    close(store);
    let before = size();
    assert!(before > 60 << 20, "{before}");
    let store = open();
    let found = store.list(Kind::Namespace).await.unwrap().items;
    assert_eq!(
        found.iter().map(|stored| (&stored.key, &stored.value)).collect::<Vec<_>>(),
        [(&key(59), &of_size(OBJECT))]
    );
    close(store);
    assert!(size() < 36 << 20, "{before} {}", size());
}
