//! The requirements for every backend: call [`run`] with a function that creates an empty store.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use crate::{Event, Store, StoreError, Stored, Watch, Write};

/// Runs the whole suite, each part on a separate store.
///
/// # Panics
/// The backend does not meet a requirement.
pub async fn run<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    create_read_update_delete(&*make().await).await;
    keys_do_not_mix(&*make().await).await;
    values_come_back_whole(&*make().await).await;
    watch_misses_nothing(&*make().await).await;
    watch_resumes(&*make().await).await;
    writes_in_order(&*make().await).await;
    compare_and_swap_loses_no_write(make().await).await;
}

fn pod(name: &str) -> Key {
    Key::namespaced(Kind::Pod, "n", name)
}

async fn create_read_update_delete(store: &dyn Store) {
    let key = pod("a");
    assert_eq!(store.get(&key).await, Ok(None));
    assert_eq!(store.update(&key, json!({}), 1).await, Err(StoreError::NotFound(key.clone())));
    assert_eq!(store.delete(&key, None).await, Err(StoreError::NotFound(key.clone())));

    let first = store.create(&key, json!({"v": 1})).await.expect("create");
    assert_eq!(store.get(&key).await, Ok(Some(first.clone())));
    assert_eq!(store.create(&key, json!({"v": 2})).await, Err(StoreError::AlreadyExists(key.clone())));

    let second = store.update(&key, json!({"v": 2}), first.revision).await.expect("update");
    assert!(second.revision > first.revision);
    assert_eq!(
        store.update(&key, json!({"v": 3}), first.revision).await,
        Err(StoreError::Conflict(key.clone()))
    );
    assert_eq!(store.delete(&key, Some(first.revision)).await, Err(StoreError::Conflict(key.clone())));
    assert_eq!(store.get(&key).await, Ok(Some(second.clone())), "a refused write changes nothing");

    let deleted = store.delete(&key, Some(second.revision)).await.expect("delete");
    assert!(deleted > second.revision);
    assert_eq!(store.get(&key).await, Ok(None));
    let third = store.create(&key, json!({"v": 4})).await.expect("create again");
    assert!(third.revision > deleted);
    assert_eq!(store.update(&key, json!({}), second.revision).await, Err(StoreError::Conflict(key)));
}

/// Names with a common prefix, one name in two namespaces and of two kinds, names with slashes.
async fn keys_do_not_mix(store: &dyn Store) {
    let mut keys = vec![
        pod("a"),
        pod("ab"),
        Key::namespaced(Kind::Pod, "na", "a"),
        Key::global(Kind::Namespace, "a"),
        Key::global(Kind::BlockAffinity, "node-1/10.0.0.0/26"),
        Key::global(Kind::IpamBlock, "10.0.0.0/26"),
        Key::namespaced(Kind::NetworkPolicy, "n", "a"),
        Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "a"),
    ];
    for key in &keys {
        store.create(key, json!({"is": key.to_string()})).await.expect("create");
    }
    for key in &keys {
        let found = store.get(key).await.expect("get").expect("is there");
        assert_eq!(found.value["is"], key.to_string());
    }
    let pods = store.list(Kind::Pod).await.expect("list").items;
    keys.retain(|key| key.kind == Kind::Pod);
    keys.sort();
    assert_eq!(pods.into_iter().map(|stored| stored.key).collect::<Vec<_>>(), keys);
    assert_eq!(store.list(Kind::Node).await.expect("list").items, []);
}

async fn values_come_back_whole(store: &dyn Store) {
    let value = json!({
        "text": "ä\u{0}\u{1F408}\"\\\n", "big": 1_800_000_000_000_000_123_u64, "negative": i64::MIN, "float": 1.5,
        "nested": [[], {}, null, {"unknown": {"kept": true}}],
    });
    let written = store.create(&pod("a"), value.clone()).await.expect("create");
    assert_eq!(written.value, value);
    assert_eq!(store.get(&pod("a")).await.expect("get").expect("is there").value, value);
    assert_eq!(store.list(Kind::Pod).await.expect("list").items[0].value, value);
}

async fn next(watch: &mut Watch) -> Event {
    let event = tokio::time::timeout(Duration::from_secs(10), watch.next()).await;
    event.expect("an event within ten seconds").expect("the watch goes on").expect("an event")
}

async fn watch_misses_nothing(store: &dyn Store) {
    store.create(&pod("before"), json!(1)).await.expect("create");
    let listing = store.list(Kind::Pod).await.expect("list");
    assert_eq!(listing.items.len(), 1);
    // Written after the list and before the watch, so the watch must deliver it.
    let between = store.create(&pod("between"), json!(2)).await.expect("create");
    let mut watch = store.watch(&[Kind::Pod, Kind::Namespace], listing.revision).await.expect("watch");
    let other = store.create(&Key::global(Kind::Node, "unasked"), json!(3)).await.expect("create");
    let namespace = store.create(&Key::global(Kind::Namespace, "n"), json!(4)).await.expect("create");
    let updated = store.update(&pod("between"), json!(5), between.revision).await.expect("update");
    let deleted = store.delete(&pod("before"), None).await.expect("delete");
    assert!(other.revision < deleted);
    for expected in [
        Event::Put(between),
        Event::Put(namespace),
        Event::Put(updated),
        Event::Deleted { key: pod("before"), revision: deleted },
    ] {
        assert_eq!(next(&mut watch).await, expected);
    }
}

async fn watch_resumes(store: &dyn Store) {
    let revision = store.list(Kind::Pod).await.expect("list").revision;
    let mut all = store.watch(&[Kind::Pod], revision).await.expect("watch");
    let mut told = Vec::new();
    for number in 0..20 {
        let written = store.create(&pod(&format!("p{number}")), Value::from(number)).await.expect("create");
        told.push(Event::Put(written));
    }
    for expected in &told {
        assert_eq!(next(&mut all).await, *expected);
    }
    for start in [0, 7, 19] {
        let mut watch = store.watch(&[Kind::Pod], told[start].revision()).await.expect("watch");
        for expected in &told[start + 1..] {
            assert_eq!(next(&mut watch).await, *expected);
        }
    }
}

/// Several writes at once happen in order, and a rejected write ends them.
async fn writes_in_order(store: &dyn Store) {
    let before = store.create(&pod("a"), json!(1)).await.expect("create");
    let mut watch = store.watch(&[Kind::Pod], before.revision).await.expect("watch");
    let writes = vec![
        Write::Create(pod("b"), json!(2)),
        Write::Update(pod("a"), json!(3), before.revision),
        Write::Delete(pod("b"), None),
        Write::Create(pod("b"), json!(4)),
    ];
    let done = store.write_all(writes).await.expect("write");
    assert_eq!(done.len(), 4);
    assert!(done.is_sorted_by(|one, next| one < next), "{done:?}");
    for expected in [
        Event::Put(Stored { key: pod("b"), value: json!(2), revision: done[0] }),
        Event::Put(Stored { key: pod("a"), value: json!(3), revision: done[1] }),
        Event::Deleted { key: pod("b"), revision: done[2] },
        Event::Put(Stored { key: pod("b"), value: json!(4), revision: done[3] }),
    ] {
        assert_eq!(next(&mut watch).await, expected);
    }
    assert_eq!(store.write_all(Vec::new()).await, Ok(Vec::new()));

    let refusals = [
        (Write::Create(pod("a"), json!(0)), StoreError::AlreadyExists(pod("a"))),
        (Write::Update(pod("a"), json!(0), before.revision), StoreError::Conflict(pod("a"))),
        (Write::Delete(pod("a"), Some(before.revision)), StoreError::Conflict(pod("a"))),
        (Write::Delete(pod("x"), None), StoreError::NotFound(pod("x"))),
    ];
    for (number, (refused, error)) in refusals.into_iter().enumerate() {
        let (first, last) = (pod(&format!("first{number}")), pod(&format!("last{number}")));
        let writes =
            vec![Write::Create(first.clone(), json!(5)), refused, Write::Create(last.clone(), json!(6))];
        let stopped = store.write_all(writes).await.expect_err("one of them is refused");
        assert_eq!(stopped.error, error);
        let first = store.get(&first).await.expect("get").expect("what was before the refusal is done");
        assert_eq!(stopped.done, [first.revision]);
        assert_eq!(store.get(&last).await, Ok(None), "what was after it was not tried");
    }
}

/// Many writers increment one number.
async fn compare_and_swap_loses_no_write(store: Arc<dyn Store>) {
    store.create(&pod("sum"), json!(0)).await.expect("create");
    let add = |store: Arc<dyn Store>| async move {
        for _ in 0..10 {
            loop {
                let current = store.get(&pod("sum")).await.expect("get").expect("is there");
                let sum = current.value.as_u64().expect("a number") + 1;
                match store.update(&pod("sum"), json!(sum), current.revision).await {
                    Ok(_) => break,
                    Err(StoreError::Conflict(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    };
    let writers: Vec<_> = (0..8).map(|_| tokio::spawn(add(store.clone()))).collect();
    for writer in writers {
        writer.await.expect("the writer ends");
    }
    assert_eq!(store.get(&pod("sum")).await.expect("get").expect("is there").value, json!(80));
}
