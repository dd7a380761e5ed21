//! Runs the conformance suite on every backend, and tests the guarantees of the embedded one.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Authority, Served, answering};
use futures::StreamExt;
use serde_json::json;
use tempfile::TempDir;
use tortie_api::kubernetes::implied_slices;
use tortie_api::{Key, Kind, Position};
use tortie_store::conformance::{self, Values};
use tortie_store::rpc::{Limits, Remote, serve_unix};
use tortie_store::{Embedded, Event, Interest, Source, Store, StoreError, Watch, Write, wait_for_slices};

fn all(kind: Kind) -> [Interest; 1] {
    [Interest::all(kind)]
}

/// The next event that is more than progress.
async fn next(watch: &mut Watch) -> Option<Result<Event, StoreError>> {
    loop {
        match watch.next().await {
            Some(Ok(Event::Progress(_))) => {}
            other => return other,
        }
    }
}

/// A store in a new file.
fn made(path: &Path) -> Embedded {
    Embedded::init(path, None).unwrap();
    Embedded::open(path).unwrap()
}

fn embedded() -> (Arc<Embedded>, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (Arc::new(made(&dir.path().join("store.redb"))), dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_conforms() {
    conformance::run(Values::Any, || async {
        Arc::new(made(&tempfile::tempdir().unwrap().keep().join("s"))) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn served_on_a_unix_socket_conforms() {
    conformance::run(Values::Any, || async {
        let dir = tempfile::tempdir().unwrap().keep();
        let store = Arc::new(made(&dir.join("s")));
        let socket = dir.join("socket");
        tokio::spawn({
            let socket = socket.clone();
            async move { serve_unix(store, &socket).await }
        });
        answering(Remote::unix(&socket)).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn served_with_mutual_tls_conforms() {
    conformance::run(Values::Any, || async {
        let served = Served::new(Limits::default()).await;
        let client = served.client(served.authority.operator());
        // It is served until the process ends.
        std::mem::forget(served);
        Arc::new(client) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_of_another_authority_is_refused() {
    let served = Served::new(Limits::default()).await;
    let mut distrusting = served.authority.operator();
    distrusting.authority = Authority::new().operator().authority;
    let distrusted = served.client(distrusting).list(Kind::Pod).await;
    assert!(matches!(distrusted, Err(StoreError::Unavailable(_))), "{distrusted:?}");

    // A certificate of the right authority is no certificate of the service.
    let mut other = served.authority.operator();
    other.authority = served.authority.server().authority;
    let address = crate::common::free_address();
    let certificates = other.into();
    let store = served.store.clone();
    tokio::spawn(tortie_store::rpc::serve_tls(store, address, certificates, Limits::default()));
    let client = Remote::tls(&address.to_string(), served.authority.operator()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let error = loop {
        match client.list(Kind::Pod).await {
            Err(StoreError::Unavailable(text)) if text.contains("refused") => {
                assert!(Instant::now() < deadline)
            }
            other => break other.expect_err("it is not the service"),
        }
        tokio::task::yield_now().await;
    };
    assert!(error.to_string().contains("certificate not valid for name"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_there_after_a_restart() {
    let (store, dir) = embedded();
    let key = Key::global(Kind::Namespace, "n");
    let before = store.epoch().await.unwrap().unwrap().begin;
    let written = store.create(&key, json!({"v": 1})).await.unwrap();
    drop(store);
    let path = dir.path().join("store.redb");
    let deadline = Instant::now() + Duration::from_secs(10);
    // The writer's thread closes the file after it has noticed that nobody uses the store any more.
    let again = loop {
        match Embedded::open(&path) {
            Ok(store) => break store,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    assert_eq!(again.get(&key).await.unwrap().unwrap(), written);
    let later = again.update(&key, json!({"v": 2}), &written.version).await.unwrap();
    assert!(later.position > written.position);
    let mut watch = again.watch(&all(Kind::Namespace), before).await.unwrap();
    assert_eq!(next(&mut watch).await, Some(Ok(Event::Put(written))));
    let epoch = again.epoch().await.unwrap().unwrap();
    assert!(epoch.begin > before && epoch.latest == later.position, "{epoch:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_from_before_the_log_says_so() {
    let (store, _dir) = embedded();
    let key = Key::global(Kind::Namespace, "n");
    let first = store.create(&key, json!(0)).await.unwrap().position;
    let mut position = first;
    let many: Vec<_> = (0..20_010)
        .map(|number| {
            let store = store.clone();
            async move { store.create(&Key::global(Kind::Node, format!("n{number}")), json!(number)).await }
        })
        .collect();
    for written in futures::future::join_all(many).await {
        position = position.max(written.unwrap().position);
    }
    let watch = |after| {
        let store = store.clone();
        async move { store.watch(&all(Kind::Namespace), Position(after)).await.err() }
    };
    assert_eq!(watch(first.0).await, Some(StoreError::Compacted(first)));
    assert_eq!(watch(position.0 - 19_000).await, None);
    let future = position.0 + 1;
    assert_eq!(
        watch(future).await,
        Some(StoreError::Compacted(Position(future))),
        "a position of another store"
    );
}

/// A watcher that lags behind reads from the log what the memory does not have any more, so a burst of writes ends no
/// watch. When the log does not have it either, the watch ends with an error: if it went on, its watcher would never know
/// what it has missed.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_has_lost_events_ends() {
    let many = |count: usize, length: usize| {
        let value = json!("x".repeat(length));
        let node = |number| Key::global(Kind::Node, format!("n{number}"));
        (0..count).map(|number| Write::Create(node(number), value.clone())).collect::<Vec<_>>()
    };
    for (name, writes, ends) in [
        ("few", many(1_000, 1), false),
        ("many", many(30_000, 1), false),
        ("few and large", many(100, 1 << 20), false),
        ("many and large", many(25_000, 2_000), true),
    ] {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let mut watch = store.watch(&all(Kind::Node), Position(0)).await.unwrap();
        let count = writes.len();
        store.write_all(writes).await.unwrap();
        let last = store.create(&Key::global(Kind::Node, "last"), json!(1)).await.unwrap();
        let mut positions = Vec::new();
        let end = loop {
            match tokio::time::timeout(Duration::from_secs(10), next(&mut watch)).await.unwrap().unwrap() {
                Ok(event) => positions.push(event.position()),
                Err(error) => break Some(error),
            }
            if positions.last() == Some(&last.position) {
                break None;
            }
        };
        let numbers = 1..=positions.len() as u64;
        assert!(positions.iter().copied().eq(numbers.map(Position)), "{name}: no gap, nothing twice");
        match ends {
            true => {
                assert_eq!(end, Some(StoreError::FellBehind), "{name}");
                assert!(watch.next().await.is_none(), "{name}: it ends");
            }
            false => assert_eq!((end, positions.len()), (None, count + 1), "{name}"),
        }
        if name == "few and large" {
            let again = store.watch(&all(Kind::Node), Position(0)).await;
            assert_eq!(again.err(), Some(StoreError::Compacted(Position(0))), "{name}: not in one piece");
            assert!(store.watch(&all(Kind::Node), Position(95)).await.is_ok());
            assert!(store.watch(&all(Kind::Pod), Position(0)).await.is_ok());
        }
        let mut again = store.watch(&all(Kind::Node), Position(last.position.0 - 1)).await.unwrap();
        assert_eq!(next(&mut again).await, Some(Ok(Event::Put(last))), "{name}");
    }
}

#[test]
fn a_file_that_is_no_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    std::fs::write(&path, "not a store, but a text of some length, which nobody should lose").unwrap();
    let error = Embedded::open(&path).err().unwrap().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("not a store"));
    let refused = |path: &Path| Embedded::open(path).err().unwrap().to_string();
    let absent = dir.path().join("absent");
    assert!(refused(&absent).contains("does not exist; `tortie store init`"), "{}", refused(&absent));
    assert!(!absent.exists(), "nothing is made");
    let empty = dir.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    assert!(refused(&empty).contains("the file is empty"), "{}", refused(&empty));
    assert_eq!(empty.metadata().unwrap().len(), 0);
    for path in [&path, &empty] {
        let error = Embedded::init(path, None).unwrap_err().to_string();
        assert!(error.contains("exists already"), "{error}");
    }
    let store = Embedded::init(&absent, None).unwrap();
    assert_eq!(Embedded::identity_of(&absent).unwrap(), Some(store));
    let names: BTreeSet<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["absent", "empty", "s"].map(Into::into).into(), "no unfinished file remains");
}

/// With paused time, the clock advances whenever nothing happens.
#[tokio::test(start_paused = true)]
async fn a_service_that_hangs_gives_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let mut silent = Vec::new();
        loop {
            silent.push(listener.accept().await.unwrap());
        }
    });
    let remote = Remote::unix(&path);
    let key = Key::global(Kind::Namespace, "n");
    let asked = tokio::time::timeout(Duration::from_secs(60), async {
        (
            remote.get(&key).await.map(drop),
            remote.create(&key, json!(0)).await.map(drop),
            remote.watch(&all(Kind::Pod), Position(0)).await.map(drop),
        )
    });
    let (got, created, watched) = asked.await.expect("an answer");
    for answer in [got, created, watched] {
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
    }
}

/// A watch that has lost its connection must not be mistaken for a watch without events.
#[tokio::test(start_paused = true)]
async fn a_watch_of_a_service_that_hangs_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (served, relayed) = (dir.path().join("served"), dir.path().join("relayed"));
    tokio::spawn({
        let (store, served) = (Embedded::in_memory().unwrap(), served.clone());
        async move { serve_unix(Arc::new(store), &served).await }
    });
    let listener = tokio::net::UnixListener::bind(&relayed).unwrap();
    let (freeze, frozen) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut far = tokio::net::UnixStream::connect(&served).await.unwrap();
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
            _ = frozen => std::future::pending().await,
        }
    });
    let mut watch = Remote::unix(&relayed).watch(&all(Kind::Pod), Position(0)).await.unwrap();
    freeze.send(()).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(60), next(&mut watch)).await.expect("an end");
    assert!(matches!(end, Some(Err(StoreError::Unavailable(_)))), "{end:?}");
}

/// The deadline of a call does not apply to a watch.
#[tokio::test(start_paused = true)]
async fn a_quiet_watch_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let store = Arc::new(Embedded::in_memory().unwrap());
    tokio::spawn({
        let (store, path) = (store.clone(), path.clone());
        async move { serve_unix(store, &path).await }
    });
    answering(Remote::unix(&path)).await;
    let remote = Remote::unix(&path);
    let mut watch = remote.watch(&all(Kind::Namespace), Position(0)).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(600), next(&mut watch)).await;
    assert!(ended.is_err(), "{ended:?}");
    let written = store.create(&Key::global(Kind::Namespace, "n"), json!(0)).await.unwrap();
    assert_eq!(next(&mut watch).await, Some(Ok(Event::Put(written))));
}

#[tokio::test]
async fn applying_again_keeps_what_the_cluster_added() {
    let store = Embedded::in_memory().unwrap();
    let pod = |label: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, labels: {{app: {label}}}}}\nspec: {{containers: [{{name: c}}]}}\n"
        );
        tortie_api::manifest::read("m.yml", &text).unwrap().remove(0)
    };
    let created = store.apply(&pod("a")).await.unwrap();
    assert!(matches!(created, tortie_store::Applied::Created(_)));
    let key = pod("a").key;
    let mut stored = store.get(&key).await.unwrap().unwrap();
    assert!(stored.value["metadata"]["creationTimestamp"].as_str().unwrap().ends_with('Z'));
    stored.value["spec"]["nodeName"] = json!("n");
    stored.value["status"] = json!({"phase": "Running"});
    let position = store.update(&key, stored.value.clone(), &stored.version).await.unwrap().position;

    let again = store.apply(&pod("a")).await.unwrap();
    assert_eq!(again, tortie_store::Applied::Unchanged(position));
    assert!(matches!(store.apply(&pod("b")).await.unwrap(), tortie_store::Applied::Configured(_)));
    let after = store.get(&key).await.unwrap().unwrap().value;
    assert_eq!(after["metadata"]["labels"]["app"], "b");
    stored.value["metadata"]["labels"]["app"] = json!("b");
    // The record of what was applied follows.
    let applied = after["metadata"]["annotations"].clone();
    let record = applied["kubectl.kubernetes.io/last-applied-configuration"].as_str().unwrap();
    let record: serde_json::Value = serde_json::from_str(record).unwrap();
    assert_eq!(record["metadata"]["labels"]["app"], "b");
    stored.value["metadata"]["annotations"] = applied;
    assert_eq!(after, stored.value);
}

#[tokio::test]
async fn slices_that_services_imply_are_waited_for() {
    let (store, _dir) = embedded();
    let labels = json!({"app": "a"});
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "labels": labels},
        "spec": {"nodeName": "one", "containers": [{"name": "c"}]}, "status": {"phase": "Running", "podIP": "10.0.0.1"}});
    let service = json!({"metadata": {"name": "s", "namespace": "n"},
        "spec": {"selector": labels, "ports": [{"port": 80}]}});
    let objects =
        [(Key::namespaced(Kind::Pod, "n", "p"), pod), (Key::namespaced(Kind::Service, "n", "s"), service)];
    for (key, value) in &objects {
        store.create(key, value.clone()).await.unwrap();
    }
    let implied = implied_slices(objects.iter().map(|(key, value)| (key, value)));
    let [(key, slice)] = implied.into_iter().collect::<Vec<_>>().try_into().unwrap();

    // Nobody makes them: the wait ends in time.
    assert_eq!(wait_for_slices(&*store, Duration::ZERO).await.unwrap(), None);
    // An old one is not what is waited for.
    let mut old = slice.clone();
    old["endpoints"] = json!([]);
    let old = store.create(&key, old).await.unwrap();
    let short = wait_for_slices(&*store, Duration::from_millis(50)).await.unwrap();
    assert_eq!(short, Some(old.position));
    let waiting = wait_for_slices(&*store, Duration::from_secs(60));
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    let made = store.update(&key, slice, &old.version).await.unwrap();
    assert_eq!(waiting.await.unwrap(), Some(made.position));
}
