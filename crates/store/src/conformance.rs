//! The requirements for every backend: call [`run`] with a function that returns an empty store.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::{Key, Kind, Position, Positions};

use crate::{
    Change, Follow, Interest, PageToken, Scope, Store, StoreError, Stored, Unfinished, Version, Write,
};

/// How long to wait for a change.
const TIMEOUT: Duration = Duration::from_secs(100);

/// The values that a backend stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Any JSON.
    Any,
    /// Only valid objects, and it adds fields to them.
    Valid,
}

/// Runs the whole suite. `make` is called for each part, and returns a store without objects, except for namespaces.
///
/// # Panics
/// The backend does not meet a requirement.
pub async fn run<F: Future<Output = Arc<dyn Store>>>(values: Values, make: impl Fn() -> F) {
    let store = make().await;
    // The API server of Kubernetes treats these kinds differently when they are updated or deleted.
    let in_namespace = |kind| Key::namespaced(kind, "n", "x");
    namespaces(&*store, &["n"]).await;
    for kind in [Kind::NetworkSet, Kind::ServiceAccount, Kind::Service, Kind::Pod] {
        create_read_update_delete(&*store, &in_namespace(kind)).await;
    }
    create_read_update_delete(&*store, &tier("t")).await;
    keys_do_not_mix(&*make().await).await;
    if values == Values::Any {
        values_come_back_whole(&*make().await).await;
    }
    writes_in_order(&*make().await).await;
    the_last_write_is_last(&*make().await).await;
    compare_and_swap_loses_no_write(make().await).await;
    lists_come_in_pages(make().await).await;
    follow_delivers_objects_and_changes(&*make().await).await;
    follow_keeps_to_its_interests(&*make().await).await;
    a_barrier_is_reached(&*make().await).await;
    churn_ends_in_the_stored_state(make().await).await;
}

/// A small valid object with a number.
#[must_use]
pub fn sample(key: &Key, number: u64) -> Value {
    let metadata = match key.namespace.as_str() {
        "" => json!({"name": key.name, "labels": {"number": number.to_string()}}),
        namespace => {
            json!({"name": key.name, "namespace": namespace, "labels": {"number": number.to_string()}})
        }
    };
    match key.kind {
        Kind::Pod => json!({
            "metadata": metadata,
            "spec": {"nodeName": "one", "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "i"}]},
        }),
        Kind::Service => json!({"metadata": metadata, "spec": {"ports": [{"port": 1}]}}),
        Kind::Tier => json!({"metadata": metadata, "spec": {"order": number}}),
        Kind::IpPool => json!({"metadata": metadata, "spec": {"cidr": "10.0.0.0/16"}}),
        Kind::KubernetesNetworkPolicy => json!({"metadata": metadata, "spec": {"podSelector": {}}}),
        _ => json!({"metadata": metadata}),
    }
}

/// The number of a sample.
#[must_use]
pub fn number_of(sample: &Value) -> Option<u64> {
    sample["metadata"]["labels"]["number"].as_str()?.parse().ok()
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
    /// Whether versions may be delivered again, as after the restore of an older backup.
    pub may_repeat: bool,
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
            may_repeat: false,
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

    /// The numbers of the samples among the objects.
    #[must_use]
    pub fn numbers(&self) -> BTreeMap<Key, u64> {
        self.objects.iter().filter_map(|(key, value)| Some((key.clone(), number_of(value)?))).collect()
    }

    fn receive(&mut self, change: Change) {
        match change {
            Change::Put(stored) => {
                self.puts += 1;
                let before = self.versions.insert(stored.key.clone(), stored.version.clone());
                let repeated = before == Some(stored.version);
                assert!(!repeated || self.may_repeat, "{} is delivered twice", stored.key);
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

fn tier(name: &str) -> Key {
    Key::global(Kind::Tier, name)
}

fn at(kind: Kind, position: Position) -> Positions {
    [(kind, position)].into_iter().collect()
}

async fn create(store: &dyn Store, key: &Key, number: u64) -> Stored {
    store.create(key, sample(key, number)).await.expect("create")
}

/// Creates namespaces that do not exist yet.
async fn namespaces(store: &dyn Store, names: &[&str]) {
    for name in names {
        let key = Key::global(Kind::Namespace, *name);
        match store.create(&key, sample(&key, 0)).await {
            Ok(_) | Err(StoreError::AlreadyExists(_)) => {}
            Err(error) => panic!("{key}: {error}"),
        }
    }
}

async fn create_read_update_delete(store: &dyn Store, key: &Key) {
    let value = |number| sample(key, number);
    assert_eq!(store.get(key).await, Ok(None));
    let missing = || Err(StoreError::NotFound(key.clone()));
    assert_eq!(store.update(key, value(0), &Version::new("1")).await.map(drop), missing());
    assert_eq!(store.delete(key, None).await.map(drop), missing());
    assert_eq!(store.delete(key, Some(&Version::new("1"))).await.map(drop), missing());

    let mut mirror = Mirror::new(store, vec![Interest::in_object(key)]);
    let first = create(store, key, 1).await;
    assert_eq!(number_of(&first.value), Some(1));
    assert_eq!(store.get(key).await, Ok(Some(first.clone())));
    assert_eq!(store.create(key, value(2)).await, Err(StoreError::AlreadyExists(key.clone())));
    let second = store.update(key, value(2), &first.version).await.expect("update");
    assert!(second.position > first.position);
    assert_ne!(second.version, first.version);
    let conflict = || Err(StoreError::Conflict(key.clone()));
    for version in [&first.version, &Version::new("not-a-version")] {
        assert_eq!(store.update(key, value(3), version).await.map(drop), conflict());
        assert_eq!(store.delete(key, Some(version)).await.map(drop), conflict());
    }
    assert_eq!(store.get(key).await, Ok(Some(second.clone())), "a rejected write changes nothing");
    mirror.reach(&at(key.kind, second.position)).await;
    assert_eq!(mirror.numbers(), [(key.clone(), 2)].into());

    let deleted = store.delete(key, Some(&second.version)).await.expect("delete");
    assert!(deleted > second.position, "{key}");
    mirror.reach(&at(key.kind, deleted)).await;
    assert!(mirror.objects.is_empty());
    assert_eq!(store.get(key).await, Ok(None));
    let third = create(store, key, 3).await;
    assert!(third.position > deleted);
    assert_eq!(store.update(key, value(4), &second.version).await.map(drop), conflict());
    mirror.reach(&at(key.kind, third.position)).await;
    assert_eq!(mirror.numbers(), [(key.clone(), 3)].into());
    let deleted = store.delete(key, None).await.expect("delete");
    mirror.reach(&at(key.kind, deleted)).await;
    assert!(mirror.objects.is_empty());
}

/// Names with a common prefix, one name in two namespaces and of two kinds, names with slashes.
async fn keys_do_not_mix(store: &dyn Store) {
    namespaces(store, &["n", "na"]).await;
    let mut keys = vec![
        pod("a"),
        pod("ab"),
        Key::namespaced(Kind::Pod, "na", "a"),
        tier("a"),
        Key::namespaced(Kind::NetworkSet, "n", "a"),
        Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "a"),
    ];
    for (number, key) in (0..).zip(&keys) {
        create(store, key, number).await;
    }
    let records = [
        (
            Key::global(Kind::BlockAffinity, "node-1/10.0.0.0/26"),
            json!({"state": "confirmed", "deleted": "false"}),
        ),
        (
            Key::global(Kind::IpamBlock, "10.0.0.0/26"),
            json!({"cidr": "10.0.0.0/26", "allocations": [], "unallocated": [], "attributes": [], "strictAffinity": false}),
        ),
    ];
    for (key, record) in &records {
        store.create(key, record.clone()).await.expect("create");
        assert_eq!(store.list(key.kind).await.expect("list").items.len(), 1);
        assert!(store.get(key).await.expect("get").is_some(), "{key}");
    }
    let of_services = Key::global(Kind::BlockAffinity, "virtual:load-balancer/10.1.0.0/26");
    store.create(&of_services, json!({"state": "pending", "deleted": false})).await.expect("create");
    let affinities = store.list(Kind::BlockAffinity).await.expect("list").items;
    let mut keys_of_affinities: Vec<&Key> = affinities.iter().map(|stored| &stored.key).collect();
    keys_of_affinities.sort();
    assert_eq!(keys_of_affinities, [&records[0].0, &of_services]);
    let found = store.get(&of_services).await.expect("get").expect("is there");
    assert_eq!(found.value["state"], "pending");
    for (number, key) in (0..).zip(&keys) {
        let found = store.get(key).await.expect("get").expect("is there");
        assert_eq!(number_of(&found.value), Some(number), "{key}");
    }
    let pods = store.list(Kind::Pod).await.expect("list").items;
    keys.retain(|key| key.kind == Kind::Pod);
    keys.sort();
    assert_eq!(pods.into_iter().map(|stored| stored.key).collect::<Vec<_>>(), keys);
    assert_eq!(store.list(Kind::Node).await.expect("list").items, []);
    let block = json!({"cidr": "fd00:10::40/122", "allocations": [], "unallocated": [], "attributes": [], "strictAffinity": false});
    store.create(&Key::global(Kind::IpamBlock, "fd00:10::40/122"), block).await.expect("create");
    for kind in [Kind::Pod, Kind::Tier, Kind::BlockAffinity, Kind::IpamBlock, Kind::Node] {
        let listed = store.list(kind).await.expect("list").items.into_iter().map(|stored| stored.key);
        let mut found = store.keys(kind).await.expect("keys");
        found.sort();
        assert_eq!(found, listed.collect::<Vec<_>>(), "{kind:?}");
    }
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
    let creation = |name: &str, number| Write::Create(tier(name), sample(&tier(name), number));
    let update =
        |name: &str, version: &Version| Write::Update(tier(name), sample(&tier(name), 3), version.clone());
    let before = create(store, &tier("a"), 1).await;
    let mut mirror = Mirror::in_sync(store, &[Kind::Tier]).await;
    let writes = vec![
        creation("b", 2),
        update("a", &before.version),
        Write::Delete(tier("b"), None),
        creation("b", 4),
    ];
    let done = store.write_all(writes).await.expect("write");
    assert_eq!(done.len(), 4);
    mirror.reach(&at(Kind::Tier, done[3].position)).await;
    assert_eq!(mirror.numbers(), [(tier("a"), 3), (tier("b"), 4)].into());
    let current = store.get(&tier("b")).await.expect("get").expect("is there");
    assert_eq!((&current.version, current.position), (&done[3].version, done[3].position));
    assert_eq!(store.write_all(Vec::new()).await, Ok(Vec::new()));

    let refusals = [
        (creation("a", 0), StoreError::AlreadyExists(tier("a"))),
        (update("a", &before.version), StoreError::Conflict(tier("a"))),
        (Write::Delete(tier("a"), Some(before.version.clone())), StoreError::Conflict(tier("a"))),
        (Write::Delete(tier("x"), None), StoreError::NotFound(tier("x"))),
    ];
    for (number, (refused, error)) in refusals.into_iter().enumerate() {
        let (first, last) = (format!("first{number}"), format!("last{number}"));
        let writes = vec![creation(&first, 5), refused, creation(&last, 6)];
        let stopped = store.write_all(writes).await.expect_err("one of them is rejected");
        assert_eq!(stopped.error, error);
        let first = store.get(&tier(&first)).await.expect("get");
        let first = first.expect("what was before the rejected write is done");
        let versions: Vec<_> = stopped.done.into_iter().map(|written| written.version).collect();
        assert_eq!(versions, [first.version]);
        assert_eq!(store.get(&tier(&last)).await, Ok(None), "what was after it was not tried");
    }
}

/// The last write happens if all writes before it succeed.
async fn the_last_write_is_last(store: &dyn Store) {
    let creation = |name: &str, number| Write::Create(tier(name), sample(&tier(name), number));
    let before = create(store, &tier("last"), 0).await;
    let update = || Write::Update(tier("last"), sample(&tier("last"), 1), before.version.clone());
    create(store, &tier("n7"), 0).await;
    let creations = |from: u64| (from..from + 30).map(|n| creation(&format!("n{n}"), n)).collect::<Vec<_>>();
    let refused = store.write_before(creations(0), update()).await.expect_err("one exists");
    assert_eq!(refused.error, StoreError::AlreadyExists(tier("n7")));
    assert!((1..=30).contains(&refused.tried), "{refused:?}");
    for n in refused.tried..30 {
        assert_eq!(store.get(&tier(&format!("n{n}"))).await, Ok(None), "n{n} was not tried");
    }
    let current = store.get(&tier("last")).await.expect("get").expect("is there");
    assert_eq!(current.version, before.version, "the last write was not tried");
    let written = store.write_before(creations(100), update()).await.expect("write");
    let current = store.get(&tier("last")).await.expect("get").expect("is there");
    assert_eq!((current.version, current.position), (written.version, written.position));
    let names: Vec<_> = store.list(Kind::Tier).await.expect("list").items;
    assert_eq!(
        names.iter().filter(|tier| tier.key.name.starts_with("n1") && tier.key.name.len() == 4).count(),
        30
    );
    assert!(matches!(
        store.write_before(creations(200), update()).await,
        Err(Unfinished { tried: 30, error: StoreError::Conflict(_) })
    ));
    assert!(store.write_before(Vec::new(), creation("alone", 1)).await.is_ok());
}

/// Many writers increment one number.
async fn compare_and_swap_loses_no_write(store: Arc<dyn Store>) {
    create(&*store, &tier("sum"), 0).await;
    let add = |store: Arc<dyn Store>| async move {
        let key = tier("sum");
        for _ in 0..10 {
            loop {
                let current = store.get(&key).await.expect("get").expect("is there");
                let sum = number_of(&current.value).expect("a number") + 1;
                match store.update(&key, sample(&key, sum), &current.version).await {
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
    let sum = store.get(&tier("sum")).await.expect("get").expect("is there");
    assert_eq!(number_of(&sum.value), Some(80));
}

/// More objects than a page has: each one is in exactly one page, whatever the scope.
async fn lists_come_in_pages(store: Arc<dyn Store>) {
    const COUNT: usize = 2_345;
    const WRITERS: usize = 8;
    namespaces(&*store, &["n0", "n1", "n2"]).await;
    let key = |number: usize| Key::namespaced(Kind::Pod, format!("n{}", number % 3), format!("p{number}"));
    let fill = move |store: Arc<dyn Store>, writer: usize| async move {
        let mut last = Position::default();
        for number in (writer..COUNT).step_by(WRITERS) {
            let mut pod = sample(&key(number), 0);
            pod["spec"]["nodeName"] = json!(if number.is_multiple_of(2) { "even" } else { "odd" });
            last = store.create(&key(number), pod).await.expect("create").position;
        }
        last
    };
    let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(fill(store.clone(), writer))).collect();
    let mut last = Position::default();
    for writer in writers {
        last = last.max(writer.await.expect("the writer ends"));
    }
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
            assert!(page.position >= last, "{interest:?}");
            keys.extend(page.items.into_iter().map(|stored| stored.key));
            pages += 1;
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        keys.sort();
        let mut expected: Vec<Key> = (0..COUNT).filter(|number| is_in(*number)).map(key).collect();
        expected.sort();
        assert!(keys == expected, "{interest:?}: {} objects", keys.len());
        assert!(interest.scope != Scope::All || pages > 1, "the test needs more than {COUNT} objects");
    }
    let bad = store.list_page(&Interest::all(Kind::Pod), Some(PageToken("x".to_owned()))).await;
    assert!(matches!(bad, Err(StoreError::Unavailable(_))), "{bad:?}");
}

async fn follow_delivers_objects_and_changes(store: &dyn Store) {
    namespaces(store, &["n"]).await;
    let set = Key::namespaced(Kind::NetworkSet, "n", "s");
    let before = create(store, &set, 1).await;
    let kinds = [Kind::NetworkSet, Kind::Tier];
    let mut mirror = Mirror::in_sync(store, &kinds).await;
    assert_eq!(mirror.objects, [(set.clone(), before.value.clone())].into());
    mirror.reach(&at(set.kind, before.position)).await;

    create(store, &pod("unwanted"), 3).await;
    let created = create(store, &tier("t"), 4).await;
    let updated = store.update(&set, sample(&set, 5), &before.version).await.expect("update");
    let mut positions = at(set.kind, updated.position);
    positions.advance(Kind::Tier, created.position);
    mirror.reach(&positions).await;
    assert_eq!(mirror.objects, [(set.clone(), updated.value), (tier("t"), created.value)].into());

    let deleted = store.delete(&set, None).await.expect("delete");
    mirror.reach(&at(set.kind, deleted)).await;
    assert_eq!(mirror.numbers(), [(tier("t"), 4)].into());
    let again = create(store, &set, 6).await;
    mirror.reach(&at(set.kind, again.position)).await;
    assert_eq!(mirror.objects[&set], again.value);
}

/// An object that leaves an interest is gone for its followers, and comes back when it returns. (The node of a pod does
/// not change; that of a host endpoint does.)
async fn follow_keeps_to_its_interests(store: &dyn Store) {
    let host = |name: &str| Key::global(Kind::HostEndpoint, name);
    let on = |node: &str| json!({"metadata": {}, "spec": {"node": node, "interfaceName": "eth0"}});
    let of_one = store.create(&host("h"), on("one")).await.expect("create");
    store.create(&host("i"), on("two")).await.expect("create");
    let mut node = Mirror::new(store, vec![Interest::of_node(Kind::HostEndpoint, "one")]);
    let mut name = Mirror::new(store, vec![Interest::in_object(&host("i"))]);
    for mirror in [&mut node, &mut name] {
        mirror.until(|mirror| mirror.in_sync.contains(&Kind::HostEndpoint)).await;
    }
    let names = |mirror: &Mirror| mirror.objects.keys().map(|key| key.name.clone()).collect::<Vec<_>>();
    assert_eq!((names(&node), names(&name)), (vec!["h".to_owned()], vec!["i".to_owned()]));

    let moved = store.update(&host("h"), on("two"), &of_one.version).await.expect("update");
    node.reach(&at(Kind::HostEndpoint, moved.position)).await;
    assert!(node.objects.is_empty());
    let back = store.update(&host("h"), on("one"), &moved.version).await.expect("update");
    let other = store.create(&host("j"), on("two")).await.expect("create");
    node.reach(&at(Kind::HostEndpoint, back.position.max(other.position))).await;
    assert_eq!(names(&node), ["h"]);
    let gone = store.delete(&host("i"), None).await.expect("delete");
    name.reach(&at(Kind::HostEndpoint, gone)).await;
    assert!(name.objects.is_empty());
}

/// Whoever reaches a barrier has everything that was stored before it, and reaches it without further writes.
async fn a_barrier_is_reached(store: &dyn Store) {
    namespaces(store, &["n"]).await;
    let kinds = [Kind::Tier, Kind::Pod, Kind::Node];
    let mut mirror = Mirror::in_sync(store, &kinds).await;
    mirror.reach(&store.barrier(&kinds).await.expect("a barrier in an empty store")).await;
    // Newer objects come first in lists.
    for number in (0..20).rev() {
        let key = match number % 3 {
            0 => tier(&format!("t{number:02}")),
            1 => pod(&format!("p{number:02}")),
            // A kind that nobody follows.
            _ => Key::namespaced(Kind::NetworkSet, "n", format!("s{number:02}")),
        };
        let written = create(store, &key, number).await;
        let barrier = store.barrier(&kinds).await.expect("a barrier");
        let is_followed = kinds.contains(&key.kind);
        assert!(
            !is_followed || barrier.reach(&at(key.kind, written.position)),
            "{barrier} does not contain {key}"
        );
        mirror.reach(&barrier).await;
        assert_eq!(mirror.objects.contains_key(&key), is_followed, "{key}");
    }
    for key in mirror.objects.keys().cloned().collect::<Vec<_>>() {
        let deleted = store.delete(&key, None).await.expect("delete");
        mirror.reach(&at(key.kind, deleted)).await;
        mirror.until(|mirror| !mirror.objects.contains_key(&key)).await;
    }
}

/// Objects come and go while a follower begins and goes on: in the end it has what is stored.
async fn churn_ends_in_the_stored_state(store: Arc<dyn Store>) {
    const OBJECTS: usize = 1_000;
    const WRITERS: usize = 4;
    namespaces(&*store, &["n"]).await;
    let kind = |number: usize| if number.is_multiple_of(2) { Kind::Pod } else { Kind::NetworkSet };
    let key = move |number: usize| Key::namespaced(kind(number), "n", format!("o{number}"));
    let churn = move |store: Arc<dyn Store>, writer: usize| async move {
        for number in (writer..OBJECTS).step_by(WRITERS) {
            let this = key(number);
            let created = create(&*store, &this, 0).await;
            // An earlier object of the same writer, so that no write is a conflict.
            let earlier = key(number.checked_sub(number % 7 / 2 * WRITERS).unwrap_or(number));
            match number % 5 {
                0 => drop(store.update(&this, sample(&this, 1), &created.version).await.expect("update")),
                1 => drop(store.delete(&this, None).await.expect("delete")),
                2 => {
                    if let Ok(Some(Stored { version, .. })) = store.get(&earlier).await {
                        let _ = store.update(&earlier, sample(&earlier, 2), &version).await;
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
    let mut late = Mirror::in_sync(&*store, &kinds).await;
    let mut stored = BTreeMap::new();
    for kind in kinds {
        let items = store.list(kind).await.expect("list").items;
        stored.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    assert!(stored.len() > OBJECTS / 2);
    // A barrier does not contain deletions, so the last ones may still be on their way.
    early.until(|early| early.objects == stored).await;
    late.until(|late| late.objects == stored).await;
}
