//! The requirements for every backend: call [`run`] with a function that creates an empty store.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::{Key, Kind, Position, Positions};

use crate::{Change, Follow, Interest, Scope, Store, StoreError, Stored, Version, Write};

/// How long to wait for a change.
const TIMEOUT: Duration = Duration::from_secs(100);

/// Runs the whole suite, each part on a separate store.
///
/// # Panics
/// The backend does not meet a requirement.
pub async fn run<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    create_read_update_delete(&*make().await).await;
    keys_do_not_mix(&*make().await).await;
    values_come_back_whole(&*make().await).await;
    writes_in_order(&*make().await).await;
    compare_and_swap_loses_no_write(make().await).await;
    lists_come_in_pages(&*make().await).await;
    follow_delivers_objects_and_changes(&*make().await).await;
    follow_keeps_to_its_interests(&*make().await).await;
    a_barrier_is_reached(&*make().await).await;
    churn_ends_in_the_stored_state(make().await).await;
}

/// What a follower has received.
pub struct Mirror {
    changes: Follow,
    versions: BTreeMap<Key, Version>,
    /// The current objects.
    pub objects: BTreeMap<Key, Value>,
    /// The kinds of which everything is known.
    pub in_sync: BTreeSet<Kind>,
    /// The progress of each kind.
    pub positions: Positions,
    /// The kinds that cannot be read.
    pub unavailable: BTreeMap<Kind, StoreError>,
    /// The number of objects that were delivered.
    pub puts: usize,
    /// The number of times that a kind was listed again.
    pub restarts: usize,
}

impl Mirror {
    /// Begins to follow.
    #[must_use]
    pub fn new(store: &dyn Store, interests: Vec<Interest>) -> Self {
        Self {
            changes: store.follow(interests),
            versions: BTreeMap::new(),
            objects: BTreeMap::new(),
            in_sync: BTreeSet::new(),
            positions: Positions::default(),
            unavailable: BTreeMap::new(),
            puts: 0,
            restarts: 0,
        }
    }

    /// Follows all objects of these kinds until they are in sync.
    pub async fn in_sync(store: &dyn Store, kinds: &[Kind]) -> Self {
        let mut mirror = Self::new(store, kinds.iter().copied().map(Interest::all).collect());
        mirror.until(|mirror| kinds.iter().all(|kind| mirror.in_sync.contains(kind))).await;
        mirror
    }

    /// Receives changes until the condition holds.
    ///
    /// # Panics
    /// No change arrives in time.
    pub async fn until(&mut self, holds: impl Fn(&Self) -> bool) {
        while !holds(self) {
            let change = tokio::time::timeout(TIMEOUT, self.changes.next()).await;
            let state = || format!("{:?} {} {:?}", self.in_sync, self.positions, self.objects.keys());
            let change = change.unwrap_or_else(|_| panic!("no change in time; {}", state()));
            self.receive(change.expect("a follower never ends"));
        }
    }

    /// Receives changes until everything up to these positions has been delivered.
    pub async fn reach(&mut self, positions: &Positions) {
        self.until(|mirror| mirror.positions.reach(positions)).await;
    }

    fn receive(&mut self, change: Change) {
        match change {
            Change::Put(stored) => {
                self.puts += 1;
                let before = self.versions.insert(stored.key.clone(), stored.version.clone());
                assert_ne!(before, Some(stored.version), "{} is delivered twice", stored.key);
                self.objects.insert(stored.key, stored.value);
            }
            Change::Gone { key, .. } => {
                self.versions.remove(&key);
                assert!(self.objects.remove(&key).is_some(), "{key} was not delivered before");
            }
            Change::InSync(kind, position) => {
                self.positions.advance(kind, position);
                self.unavailable.remove(&kind);
                self.in_sync.insert(kind);
            }
            Change::Progress(kind, position) => {
                assert!(self.in_sync.contains(&kind), "progress of {} before it is in sync", kind.plural());
                self.positions.advance(kind, position);
            }
            Change::Restarted(kind) => {
                self.restarts += 1;
                self.in_sync.remove(&kind);
            }
            Change::Unavailable(kind, error) => drop(self.unavailable.insert(kind, error)),
        }
    }
}

fn pod(name: &str) -> Key {
    Key::namespaced(Kind::Pod, "n", name)
}

fn at(kind: Kind, position: Position) -> Positions {
    [(kind, position)].into_iter().collect()
}

async fn create_read_update_delete(store: &dyn Store) {
    let key = pod("a");
    let no_version = Version::new("1");
    assert_eq!(store.get(&key).await, Ok(None));
    assert_eq!(store.update(&key, json!({}), &no_version).await, Err(StoreError::NotFound(key.clone())));
    assert_eq!(store.delete(&key, None).await, Err(StoreError::NotFound(key.clone())));

    let first = store.create(&key, json!({"v": 1})).await.expect("create");
    assert_eq!(store.get(&key).await, Ok(Some(first.clone())));
    assert_eq!(store.create(&key, json!({"v": 2})).await, Err(StoreError::AlreadyExists(key.clone())));

    let second = store.update(&key, json!({"v": 2}), &first.version).await.expect("update");
    assert!(second.position > first.position);
    assert_ne!(second.version, first.version);
    assert_eq!(
        store.update(&key, json!({"v": 3}), &first.version).await,
        Err(StoreError::Conflict(key.clone()))
    );
    let strange = Version::new("not-a-version");
    assert_eq!(store.update(&key, json!({}), &strange).await, Err(StoreError::Conflict(key.clone())));
    assert_eq!(store.delete(&key, Some(&first.version)).await, Err(StoreError::Conflict(key.clone())));
    assert_eq!(store.get(&key).await, Ok(Some(second.clone())), "a rejected write changes nothing");

    let deleted = store.delete(&key, Some(&second.version)).await.expect("delete");
    assert!(deleted > second.position);
    assert_eq!(store.get(&key).await, Ok(None));
    let third = store.create(&key, json!({"v": 4})).await.expect("create again");
    assert!(third.position > deleted);
    assert_eq!(store.update(&key, json!({}), &second.version).await, Err(StoreError::Conflict(key)));
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

/// Several writes at once happen in order, and a rejected write ends them.
async fn writes_in_order(store: &dyn Store) {
    let before = store.create(&pod("a"), json!(1)).await.expect("create");
    let mut mirror = Mirror::in_sync(store, &[Kind::Pod]).await;
    let writes = vec![
        Write::Create(pod("b"), json!(2)),
        Write::Update(pod("a"), json!(3), before.version.clone()),
        Write::Delete(pod("b"), None),
        Write::Create(pod("b"), json!(4)),
    ];
    let done = store.write_all(writes).await.expect("write");
    assert_eq!(done.len(), 4);
    mirror.reach(&at(Kind::Pod, done[3].position)).await;
    assert_eq!(mirror.objects, [(pod("a"), json!(3)), (pod("b"), json!(4))].into());
    let current = store.get(&pod("b")).await.expect("get").expect("is there");
    assert_eq!((&current.version, current.position), (&done[3].version, done[3].position));
    assert_eq!(store.write_all(Vec::new()).await, Ok(Vec::new()));

    let refusals = [
        (Write::Create(pod("a"), json!(0)), StoreError::AlreadyExists(pod("a"))),
        (Write::Update(pod("a"), json!(0), before.version.clone()), StoreError::Conflict(pod("a"))),
        (Write::Delete(pod("a"), Some(before.version.clone())), StoreError::Conflict(pod("a"))),
        (Write::Delete(pod("x"), None), StoreError::NotFound(pod("x"))),
    ];
    for (number, (refused, error)) in refusals.into_iter().enumerate() {
        let (first, last) = (pod(&format!("first{number}")), pod(&format!("last{number}")));
        let writes =
            vec![Write::Create(first.clone(), json!(5)), refused, Write::Create(last.clone(), json!(6))];
        let stopped = store.write_all(writes).await.expect_err("one of them is rejected");
        assert_eq!(stopped.error, error);
        let first =
            store.get(&first).await.expect("get").expect("what was before the rejected write is done");
        let versions: Vec<_> = stopped.done.into_iter().map(|written| written.version).collect();
        assert_eq!(versions, [first.version]);
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
                match store.update(&pod("sum"), json!(sum), &current.version).await {
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

/// More objects than a page has: each one is in exactly one page, whatever the scope.
async fn lists_come_in_pages(store: &dyn Store) {
    const COUNT: usize = 2_345;
    let node = |number: usize| if number.is_multiple_of(2) { "even" } else { "odd" };
    let key = |number: usize| Key::namespaced(Kind::Pod, format!("n{}", number % 3), format!("p{number}"));
    let value = |number: usize| json!({"spec": {"nodeName": node(number)}});
    let writes: Vec<_> = (0..COUNT).map(|number| Write::Create(key(number), value(number))).collect();
    let last = store.write_all(writes).await.expect("write").pop().expect("a result");
    let scopes: [(Scope, &dyn Fn(usize) -> bool); 4] = [
        (Scope::All, &|_| true),
        (Scope::Node("even".to_owned()), &|number| number.is_multiple_of(2)),
        (Scope::Namespace("n1".to_owned()), &|number| number % 3 == 1),
        (Scope::Name("n1".to_owned(), "p1".to_owned()), &|number| number == 1),
    ];
    for (scope, is_in) in scopes {
        let interest = Interest { kind: Kind::Pod, scope };
        let (mut keys, mut next, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = store.list_page(&interest, next).await.expect("list");
            assert!(page.position >= last.position, "{interest:?}");
            keys.extend(page.items.into_iter().map(|stored| stored.key));
            pages += 1;
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        let mut expected: Vec<Key> = (0..COUNT).filter(|number| is_in(*number)).map(key).collect();
        expected.sort();
        assert_eq!(keys, expected, "{interest:?}");
        assert!(interest.scope != Scope::All || pages > 1, "the test needs more than {COUNT} objects");
    }
}

async fn follow_delivers_objects_and_changes(store: &dyn Store) {
    let before = store.create(&pod("before"), json!(1)).await.expect("create");
    let kinds = [Kind::Pod, Kind::Namespace];
    let mut mirror = Mirror::in_sync(store, &kinds).await;
    assert_eq!(mirror.objects, [(pod("before"), json!(1))].into());
    mirror.reach(&at(Kind::Pod, before.position)).await;

    store.create(&Key::global(Kind::Node, "unwanted"), json!(3)).await.expect("create");
    let namespace = Key::global(Kind::Namespace, "n");
    let created = store.create(&namespace, json!(4)).await.expect("create");
    let updated = store.update(&pod("before"), json!(5), &before.version).await.expect("update");
    let mut positions = at(Kind::Pod, updated.position);
    positions.advance(Kind::Namespace, created.position);
    mirror.reach(&positions).await;
    assert_eq!(mirror.objects, [(pod("before"), json!(5)), (namespace.clone(), json!(4))].into());

    let deleted = store.delete(&pod("before"), None).await.expect("delete");
    mirror.reach(&at(Kind::Pod, deleted)).await;
    assert_eq!(mirror.objects, [(namespace, json!(4))].into());
    let again = store.create(&pod("before"), json!(6)).await.expect("create");
    mirror.reach(&at(Kind::Pod, again.position)).await;
    assert_eq!(mirror.objects[&pod("before")], json!(6));
}

/// An object that leaves an interest is gone for its followers, and comes back when it returns.
async fn follow_keeps_to_its_interests(store: &dyn Store) {
    let on = |node: &str, label: u32| json!({"spec": {"nodeName": node}, "label": label});
    let of_one = store.create(&pod("p"), on("one", 1)).await.expect("create");
    store.create(&pod("q"), on("two", 1)).await.expect("create");
    let mut node = Mirror::new(store, vec![Interest::of_node(Kind::Pod, "one")]);
    let mut name = Mirror::new(store, vec![Interest::in_object(&pod("q"))]);
    for mirror in [&mut node, &mut name] {
        mirror.until(|mirror| mirror.in_sync.contains(&Kind::Pod)).await;
    }
    assert_eq!(node.objects, [(pod("p"), on("one", 1))].into());
    assert_eq!(name.objects, [(pod("q"), on("two", 1))].into());

    let moved = store.update(&pod("p"), on("two", 2), &of_one.version).await.expect("update");
    node.reach(&at(Kind::Pod, moved.position)).await;
    assert_eq!(node.objects, BTreeMap::new());
    let back = store.update(&pod("p"), on("one", 3), &moved.version).await.expect("update");
    let other = store.create(&pod("r"), on("two", 1)).await.expect("create");
    node.reach(&at(Kind::Pod, back.position.max(other.position))).await;
    assert_eq!(node.objects, [(pod("p"), on("one", 3))].into());
    let gone = store.delete(&pod("q"), None).await.expect("delete");
    name.reach(&at(Kind::Pod, gone)).await;
    assert_eq!(name.objects, BTreeMap::new());
}

/// Whoever reaches a barrier has everything that was stored before it, and reaches it without further writes.
async fn a_barrier_is_reached(store: &dyn Store) {
    let kinds = [Kind::Tier, Kind::Pod, Kind::Node];
    let mut mirror = Mirror::in_sync(store, &kinds).await;
    mirror.reach(&store.barrier(&kinds).await.expect("a barrier in an empty store")).await;
    for number in 0..20 {
        let key = match number % 3 {
            0 => Key::global(Kind::Tier, format!("t{number}")),
            1 => pod(&format!("p{number}")),
            // A kind that nobody follows.
            _ => Key::global(Kind::IpPool, format!("p{number}")),
        };
        let written = store.create(&key, json!(number)).await.expect("create");
        let barrier = store.barrier(&kinds).await.expect("a barrier");
        assert!(barrier.reach(&at(key.kind, written.position)), "{barrier} does not contain {key}");
        mirror.reach(&barrier).await;
        assert_eq!(mirror.objects.contains_key(&key), key.kind != Kind::IpPool);
    }
}

/// Objects come and go while a follower begins and goes on: in the end it has what is stored.
async fn churn_ends_in_the_stored_state(store: Arc<dyn Store>) {
    const OBJECTS: usize = 1_000;
    const WRITERS: usize = 4;
    let kind = |number: usize| if number.is_multiple_of(2) { Kind::Pod } else { Kind::NetworkSet };
    let key = move |number: usize| Key::namespaced(kind(number), "n", format!("o{number}"));
    let churn = move |store: Arc<dyn Store>, writer: usize| async move {
        for number in (writer..OBJECTS).step_by(WRITERS) {
            let created = store.create(&key(number), json!(0)).await.expect("create");
            // An earlier object of the same writer, so that no write is a conflict.
            let earlier = key(number.checked_sub(number % 7 / 2 * WRITERS).unwrap_or(number));
            match number % 5 {
                0 => drop(store.update(&key(number), json!(1), &created.version).await.expect("update")),
                1 => drop(store.delete(&key(number), None).await.expect("delete")),
                2 => {
                    if let Ok(Some(Stored { version, .. })) = store.get(&earlier).await {
                        let _ = store.update(&earlier, json!({"by": number}), &version).await;
                    }
                }
                _ => {}
            }
        }
    };
    let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(churn(store.clone(), writer))).collect();
    let kinds = [Kind::Pod, Kind::NetworkSet];
    let mut early = Mirror::in_sync(&*store, &kinds).await;
    for writer in writers {
        writer.await.expect("the writer ends");
    }
    let barrier = store.barrier(&kinds).await.expect("a barrier");
    early.reach(&barrier).await;
    let late = Mirror::in_sync(&*store, &kinds).await;
    let mut stored = BTreeMap::new();
    for kind in kinds {
        let items = store.list(kind).await.expect("list").items;
        stored.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    assert!(stored.len() > OBJECTS / 2);
    assert!(early.objects == stored, "the early follower");
    assert!(late.objects == stored, "the late follower");
}
