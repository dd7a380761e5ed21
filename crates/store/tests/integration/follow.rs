//! Followers of a source with faults: connections break, histories are lost, and kinds are absent. Time is paused, so
//! that it advances whenever nothing happens.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt, stream};
use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::{Key, Kind, Position, Positions};
use tortie_store::conformance::Mirror;
use tortie_store::{
    Change, Embedded, Event, Follow, Interest, Page, PageToken, Source, Store, StoreError, Stored, Version,
    Watch, follow,
};

const KINDS: [Kind; 3] = [Kind::Namespace, Kind::Node, Kind::Tier];

/// What happens to a call.
#[derive(Debug, Clone)]
enum Fault {
    None,
    /// It fails.
    Fails(StoreError),
    /// A watch delivers this number of events, and then the error.
    Breaks(usize, StoreError),
}

/// An embedded store behind faults.
#[derive(Clone)]
struct Faulty {
    store: Embedded,
    /// The faults of the next lists and watches; afterwards everything works.
    faults: Arc<Mutex<Vec<Fault>>>,
    /// The kinds that cannot be read.
    unreadable: Arc<Mutex<BTreeMap<Kind, StoreError>>>,
    /// The number of watches that were requested.
    watches: Arc<AtomicUsize>,
    /// Called before each page and watch.
    meanwhile: Arc<Mutex<Vec<Churn>>>,
}

/// A write by somebody else.
#[derive(Debug, Clone)]
struct Churn {
    kind: Kind,
    name: u8,
    /// `None` deletes.
    value: Option<u8>,
}

impl Faulty {
    fn new() -> Self {
        Self {
            store: Embedded::in_memory().unwrap(),
            faults: Arc::default(),
            unreadable: Arc::default(),
            watches: Arc::default(),
            meanwhile: Arc::default(),
        }
    }

    async fn put(&self, key: &Key, value: Value) -> Stored {
        let (store, key) = (self.store.clone(), key.clone());
        in_real_time(async move {
            match store.get(&key).await.unwrap() {
                Some(stored) => store.update(&key, value, &stored.version).await.unwrap(),
                None => store.create(&key, value).await.unwrap(),
            }
        })
        .await
    }

    async fn delete(&self, key: &Key) {
        let (store, key) = (self.store.clone(), key.clone());
        in_real_time(async move { drop(store.delete(&key, None).await) }).await;
    }

    async fn write(&self, churn: Churn) {
        let key = Key::global(churn.kind, format!("o{}", churn.name));
        match churn.value {
            Some(value) => drop(self.put(&key, json!(value)).await),
            None => self.delete(&key).await,
        }
    }

    async fn something_happens(&self) {
        let next = self.meanwhile.lock().unwrap().pop();
        if let Some(churn) = next {
            self.write(churn).await;
        }
    }

    fn fault(&self) -> Fault {
        self.faults.lock().unwrap().pop().unwrap_or(Fault::None)
    }

    fn forbid(&self, kind: Kind, error: Option<StoreError>) {
        let mut unreadable = self.unreadable.lock().unwrap();
        match error {
            Some(error) => drop(unreadable.insert(kind, error)),
            None => drop(unreadable.remove(&kind)),
        }
    }

    /// Breaks the open watches.
    async fn break_watches(&self) {
        self.put(&Key::global(Kind::IpPool, "break"), json!(self.watches.load(Ordering::SeqCst))).await;
    }

    async fn stored(&self) -> BTreeMap<Key, Value> {
        let mut all = BTreeMap::new();
        for kind in KINDS {
            let items = self.store.list(kind).await.unwrap().items;
            all.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
        }
        all
    }
}

#[async_trait]
impl Store for Faulty {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.store.get(key).await
    }

    /// Pages of two objects, so that something happens between them.
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.something_happens().await;
        if let Some(error) = self.unreadable.lock().unwrap().get(&interest.kind) {
            return Err(error.clone());
        }
        if let Fault::Fails(error) | Fault::Breaks(_, error) = self.fault() {
            return Err(error);
        }
        let page = self.store.list_page(interest, None).await?;
        let mut items: Vec<Stored> = page.items;
        if let Some(PageToken(after)) = after {
            items.retain(|stored| stored.key.name > after);
        }
        let next = items.get(1).filter(|_| items.len() > 2).map(|stored| PageToken(stored.key.name.clone()));
        items.truncate(2);
        Ok(Page { items, next, ..page })
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.store.create(key, value).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.store.update(key, value, expected).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.store.delete(key, expected).await
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        follow(&Arc::new(self.clone()), interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.store.barrier(kinds).await
    }
}

#[async_trait]
impl Source for Faulty {
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        self.store.groups(interests)
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        self.watches.fetch_add(1, Ordering::SeqCst);
        self.something_happens().await;
        {
            let unreadable = self.unreadable.lock().unwrap();
            if let Some(error) = interests.iter().find_map(|interest| unreadable.get(&interest.kind)) {
                return Err(error.clone());
            }
        }
        let fault = self.fault();
        if let Fault::Fails(error) = fault {
            return Err(error);
        }
        let with_end = interests.iter().cloned().chain([Interest::all(Kind::IpPool)]).collect::<Vec<_>>();
        let events = self.store.watch(&with_end, after).await?;
        let is_end = |event: &Result<Event, StoreError>| matches!(event, Ok(Event::Put(Stored { key, .. })) if key.kind == Kind::IpPool);
        // Ends from before this watch do not concern it.
        let begun = self.store.barrier(&[Kind::IpPool]).await?.of(Kind::IpPool).unwrap_or_default();
        let events = events.filter(move |event| {
            let is_old = is_end(event) && event.as_ref().is_ok_and(|event| event.position() <= begun);
            futures::future::ready(!is_old)
        });
        let events = events.map(move |event| match is_end(&event) {
            true => Err(StoreError::Unavailable("it was broken".to_owned())),
            false => event,
        });
        Ok(match fault {
            Fault::Breaks(count, error) => events.take(count).chain(stream::iter([Err(error)])).boxed(),
            _ => events.boxed(),
        })
    }
}

/// The store writes on a thread of its own. Time must not advance meanwhile, which only a blocking task prevents.
async fn in_real_time<T: Send + 'static>(write: impl Future<Output = T> + Send + 'static) -> T {
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || runtime.block_on(write)).await.unwrap()
}

fn namespace(name: &str) -> Key {
    Key::global(Kind::Namespace, name)
}

fn all() -> Vec<Interest> {
    KINDS.map(Interest::all).to_vec()
}

fn lost() -> StoreError {
    StoreError::Unavailable("the connection is lost".to_owned())
}

fn errors() -> impl Strategy<Value = StoreError> {
    prop_oneof![
        Just(lost()),
        Just(StoreError::FellBehind),
        Just(StoreError::Compacted(Position(1))),
        Just(StoreError::Throttled(Duration::from_secs(3))),
    ]
}

fn faults() -> impl Strategy<Value = Vec<Fault>> {
    let fault = prop_oneof![
        1 => Just(Fault::None),
        2 => errors().prop_map(Fault::Fails),
        3 => (0_usize..6, errors()).prop_map(|(count, error)| Fault::Breaks(count, error)),
    ];
    proptest::collection::vec(fault, 0..12)
}

fn churn(count: usize) -> impl Strategy<Value = Vec<Churn>> {
    let one =
        (proptest::sample::select(KINDS.to_vec()), 0_u8..8, proptest::option::weighted(0.7, any::<u8>()));
    proptest::collection::vec(one.prop_map(|(kind, name, value)| Churn { kind, name, value }), 0..count)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Whatever fails, and whatever is written meanwhile, a follower ends with what is stored, and receives nothing
    /// twice (which `Mirror` checks).
    #[test]
    fn a_follower_ends_with_the_stored_state(
        before in churn(20), meanwhile in churn(30), after in churn(20), faults in faults(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let source = Faulty::new();
            for churn in before {
                source.write(churn).await;
            }
            *source.meanwhile.lock().unwrap() = meanwhile;
            *source.faults.lock().unwrap() = faults;
            let mut mirror = Mirror::new(&source, all());
            for churn in after {
                source.write(churn).await;
            }
            mirror.until(|mirror| mirror.in_sync.len() == KINDS.len()).await;
            while source.meanwhile.lock().unwrap().len() + source.faults.lock().unwrap().len() > 0 {
                source.break_watches().await;
                let watches = source.watches.load(Ordering::SeqCst);
                mirror.until(|mirror| {
                    mirror.in_sync.len() == KINDS.len() && source.watches.load(Ordering::SeqCst) > watches
                }).await;
            }
            let barrier = source.barrier(&KINDS).await.unwrap();
            mirror.reach(&barrier).await;
            prop_assert_eq!(mirror.objects, source.stored().await);
            Ok(())
        })?;
    }
}

/// A kind that is absent or forbidden disables nothing else, and comes when it appears. What is known of a kind stays
/// when it cannot be read any more: a policy must not disappear with a permission.
#[tokio::test(start_paused = true)]
async fn a_kind_that_cannot_be_read_disables_nothing_else() {
    for error in [StoreError::KindAbsent(Kind::Namespace), StoreError::Forbidden("no".to_owned())] {
        let source = Faulty::new();
        source.put(&namespace("hidden"), json!(1)).await;
        let tier = source.put(&Key::global(Kind::Tier, "t"), json!(1)).await;
        source.forbid(Kind::Namespace, Some(error.clone()));
        let mut mirror = Mirror::new(&source, all());
        mirror.until(|mirror| mirror.in_sync.len() == 2 && !mirror.unavailable.is_empty()).await;
        assert_eq!(mirror.unavailable, [(Kind::Namespace, error.clone())].into());
        assert_eq!(mirror.objects, [(tier.key.clone(), json!(1))].into());
        let changed = source.put(&tier.key, json!(2)).await;
        mirror.reach(&[(Kind::Tier, changed.position)].into_iter().collect()).await;
        assert_eq!(mirror.objects[&tier.key], json!(2));

        source.forbid(Kind::Namespace, None);
        mirror.until(|mirror| mirror.in_sync.contains(&Kind::Namespace)).await;
        assert_eq!(mirror.objects, source.stored().await);
        assert_eq!(mirror.unavailable, BTreeMap::new());

        source.forbid(Kind::Namespace, Some(error.clone()));
        source.break_watches().await;
        mirror.until(|mirror| mirror.unavailable.contains_key(&Kind::Namespace)).await;
        assert_eq!(mirror.objects, source.stored().await, "what is known stays");
        let changed = source.put(&tier.key, json!(3)).await;
        source.delete(&namespace("hidden")).await;
        mirror.reach(&[(Kind::Tier, changed.position)].into_iter().collect()).await;
        assert!(mirror.objects.contains_key(&namespace("hidden")));
        source.forbid(Kind::Namespace, None);
        mirror.until(|mirror| mirror.unavailable.is_empty()).await;
        assert_eq!(mirror.objects, source.stored().await, "deletions that nobody saw are noticed");
    }
}

/// The next listing lacks the object, so nobody would notice later that it is gone.
#[tokio::test(start_paused = true)]
async fn a_deletion_before_the_end_of_a_watch_is_not_lost() {
    let source = Faulty::new();
    for name in ["goes", "stays"] {
        source.put(&namespace(name), json!(0)).await;
    }
    // The first three are for the lists.
    *source.faults.lock().unwrap() =
        vec![Fault::Breaks(2, StoreError::FellBehind), Fault::None, Fault::None, Fault::None];
    let mut mirror = Mirror::new(&source, all());
    mirror.until(|mirror| mirror.in_sync.len() == KINDS.len()).await;
    source.delete(&namespace("goes")).await;
    mirror.until(|mirror| mirror.restarts > 0).await;
    assert_eq!(mirror.objects, [(namespace("stays"), json!(0))].into());
}

/// After a lost connection, nothing is listed again, and nothing that is known is delivered again.
#[tokio::test(start_paused = true)]
async fn a_lost_connection_costs_no_list() {
    let source = Faulty::new();
    for number in 0..50 {
        source.put(&namespace(&format!("n{number}")), json!(number)).await;
    }
    let mut mirror = Mirror::new(&source, all());
    mirror.until(|mirror| mirror.in_sync.len() == KINDS.len()).await;
    source.forbid(Kind::Namespace, None);
    source.break_watches().await;
    let last = source.put(&namespace("last"), json!(1)).await;
    mirror.reach(&[(Kind::Namespace, last.position)].into_iter().collect()).await;
    assert_eq!((mirror.puts, mirror.restarts), (51, 0));

    // After a lost history, only differences are delivered.
    source.faults.lock().unwrap().push(Fault::Fails(StoreError::Compacted(Position(1))));
    source.delete(&namespace("n7")).await;
    source.break_watches().await;
    mirror.until(|mirror| mirror.restarts == KINDS.len() && mirror.in_sync.len() == KINDS.len()).await;
    assert_eq!((mirror.puts, mirror.objects.len()), (51, 50));
}

/// Agents that all list everything again at once, and fall behind again, would never come to an end.
#[tokio::test(start_paused = true)]
async fn a_follower_that_loses_its_watch_again_and_again_waits_longer() {
    let source = Faulty::new();
    source.put(&namespace("stays"), json!(0)).await;
    let forever = vec![Fault::Breaks(1, StoreError::FellBehind); 10_000];
    let none = vec![Fault::None; KINDS.len()];
    let mut faults = Vec::new();
    for fault in forever {
        faults.push(fault);
        faults.extend(none.clone());
    }
    *source.faults.lock().unwrap() = faults;
    let mut changes = source.follow(all());
    let follows =
        async { while changes.next().await.is_some_and(|change| !matches!(change, Change::Gone { .. })) {} };
    assert!(tokio::time::timeout(Duration::from_secs(60), follows).await.is_err(), "it goes on");
    let watches = source.watches.load(Ordering::SeqCst);
    assert!((10..40).contains(&watches), "{watches} watches in a minute");
}
