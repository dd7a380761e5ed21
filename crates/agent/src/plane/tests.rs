//! Tests of the dataplane's thread.

use std::sync::mpsc;

use serde_json::{Value, json};
use tortie_api::Position;
use tortie_dataplane::{Delta, NodeState, ShowError, Shown};

use super::*;
use crate::queue::bounded;

/// A dataplane whose calls of `apply` wait for a token.
struct Stuck {
    entered: mpsc::Sender<()>,
    tokens: mpsc::Receiver<()>,
}

impl Dataplane for Stuck {
    fn apply(&mut self, _: &NodeState, _: &[Delta]) -> Report {
        let _ = self.entered.send(());
        let _ = self.tokens.recv();
        Report::default()
    }

    fn resync(&mut self, _: &NodeState) -> Report {
        Report::default()
    }

    fn show(&mut self, _: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        Err(ShowError::NoEndpoint(endpoint.to_string()))
    }
}

fn at(position: u64) -> Positions {
    [(Kind::Namespace, Position(position))].into_iter().collect()
}

fn batch(position: u64, name: &str, value: Option<Value>) -> Batch {
    let changes = [(Key::global(Kind::Namespace, name), value)].into();
    Batch { changes, positions: at(position), ..Batch::default() }
}

/// Updates that nobody takes cost no more memory than the objects, and the position waits for them.
#[tokio::test]
async fn a_stuck_dataplane_does_not_fill_the_memory() {
    const LIMIT: usize = 1 << 20;
    let (batches, inbox) = bounded(LIMIT);
    let (entered, is_stuck) = mpsc::channel();
    let (open, tokens) = mpsc::channel();
    let waiting = inbox.waiting_of();
    let mut in_force = start_with(
        Watched::new("node"),
        AssignedPods::default(),
        Box::new(Stuck { entered, tokens }),
        (None, None),
        inbox,
    )
    .unwrap();
    batches.send(batch(1, "first", Some(json!({"metadata": {"name": "first"}}))));
    is_stuck.recv().unwrap();

    let large = || Some(json!({"metadata": {"name": "large", "annotations": {"a": "x".repeat(80_000)}}}));
    for position in 2..=3_001 {
        assert!(batches.wait_for_room().await);
        batches.send(batch(position, "large", large()));
    }
    let (objects, bytes) = waiting();
    assert!(objects == 1 && bytes < 100_000, "{objects} objects, {bytes} bytes");

    let mut position = 3_001;
    while futures::FutureExt::now_or_never(batches.wait_for_room()).is_some() {
        position += 1;
        batches.send(batch(position, &format!("n{position}"), large()));
    }
    let (objects, bytes) = waiting();
    assert!((LIMIT..LIMIT + 100_000).contains(&bytes), "{objects} objects, {bytes} bytes");
    assert!(in_force.borrow().given.is_empty(), "nothing counts as given before it is in force");

    (0..2).for_each(|_| open.send(()).unwrap());
    assert!(batches.wait_for_room().await);
    let now = in_force.wait_for(|now| now.given == at(position)).await.unwrap();
    assert_eq!(now.positions, at(position));
}

/// Half a cluster may allow too much.
#[tokio::test]
async fn nothing_is_applied_before_the_last_part_of_the_snapshot() {
    let (batches, inbox) = bounded(1 << 20);
    let (entered, applied) = mpsc::channel();
    let (open, tokens) = mpsc::channel();
    drop(open);
    let waiting = inbox.waiting_of();
    let mut in_force = start_with(
        Watched::new("node"),
        AssignedPods::default(),
        Box::new(Stuck { entered, tokens }),
        (None, None),
        inbox,
    )
    .unwrap();
    let named = |name: &str| Some(json!({"metadata": {"name": name}}));
    for position in 1..=100 {
        let part = batch(position, &format!("n{position}"), named("n"));
        batches.send(Batch { more_follows: true, ..part });
        while waiting().0 > 0 {
            tokio::task::yield_now().await;
        }
    }
    assert!(applied.try_recv().is_err() && in_force.borrow().given.is_empty());
    // What cannot be read is known before.
    let refused = StoreError::Forbidden("no".to_owned());
    let absent = StoreError::KindAbsent(Kind::Tier);
    let unavailable = [(Kind::Tier, Some(absent)), (Kind::NetworkPolicy, Some(refused.clone()))].into();
    batches.send(Batch { unavailable, more_follows: true, ..Batch::default() });
    let now = in_force.wait_for(|now| !now.blocking().is_empty()).await.unwrap().clone();
    assert_eq!(now.blocking(), [forbidden(Kind::NetworkPolicy, &refused)]);
    let unavailable = [(Kind::NetworkPolicy, None), (Kind::Tier, None)].into();
    batches.send(Batch { unavailable, more_follows: true, ..Batch::default() });
    in_force.wait_for(|now| now.blocking().is_empty()).await.unwrap();
    batches.send(Batch { positions: at(101), ..Batch::default() });
    in_force.wait_for(|now| now.given.reach(&at(101)) && !now.given.is_empty()).await.unwrap();
    assert_eq!(applied.try_iter().count(), 1);
}

/// A datastore may be locked because it is filled, so half of its objects may be missing.
#[tokio::test]
async fn nothing_is_applied_while_the_datastore_is_locked() {
    let (batches, inbox) = bounded(1 << 20);
    let (entered, applied) = mpsc::channel();
    let (open, tokens) = mpsc::channel();
    drop(open);
    let waiting = inbox.waiting_of();
    let mut in_force = start_with(
        Watched::new("node"),
        AssignedPods::default(),
        Box::new(Stuck { entered, tokens }),
        (None, None),
        inbox,
    )
    .unwrap();
    let lock = |position, ready: bool| {
        let key = Key::global(Kind::ClusterInformation, "default");
        let changes = [(key, Some(json!({"spec": {"datastoreReady": ready}})))].into();
        Batch { changes, positions: at(position), ..Batch::default() }
    };
    let taken = async || {
        while waiting().0 > 0 {
            tokio::task::yield_now().await;
        }
    };
    for round in [0, 10] {
        batches.send(lock(round + 1, false));
        let now = in_force.wait_for(|now| now.lock.is_some()).await.unwrap().clone();
        assert_eq!(now.blocking().len(), 1, "{:?}", now.blocking());
        let before = now.given.clone();
        batches.send(batch(round + 2, "first", Some(json!({"metadata": {"name": "first"}}))));
        taken().await;
        batches.send(Batch { positions: at(round + 3), ..Batch::default() });
        taken().await;
        assert_eq!((applied.try_iter().count(), &in_force.borrow().given), (0, &before));
        batches.send(lock(round + 4, true));
        let now = in_force.wait_for(|now| now.given == at(round + 4)).await.unwrap().clone();
        assert_eq!((now.blocking(), now.positions.clone()), (vec![], at(round + 4)));
        assert_eq!(applied.try_iter().count(), 1, "all changes at once");
    }
}

/// What is in force of a restored datastore, and of a kind that cannot be read.
#[tokio::test]
async fn positions_follow_the_history_that_there_is() {
    let (batches, inbox) = bounded(1 << 20);
    let (entered, _is_stuck) = mpsc::channel();
    let (open, tokens) = mpsc::channel();
    let mut in_force = start_with(
        Watched::new("node"),
        AssignedPods::default(),
        Box::new(Stuck { entered, tokens }),
        (None, None),
        inbox,
    )
    .unwrap();
    drop(open);
    batches.send(batch(5_000, "first", None));
    in_force.wait_for(|now| now.given == at(5_000)).await.unwrap();
    batches.send(Batch { restarted: [Kind::Namespace].into(), ..batch(3_000, "second", None) });
    let now = in_force.wait_for(|now| now.given == at(3_000)).await.unwrap().clone();
    assert!(!now.given.reach(&at(3_001)));

    let error = StoreError::KindAbsent(Kind::Tier);
    batches.send(Batch { unavailable: [(Kind::Tier, Some(error))].into(), ..Batch::default() });
    let now = in_force.wait_for(|now| now.given.of(Kind::Tier).is_some()).await.unwrap().clone();
    assert!(!now.given.reach(&[(Kind::Tier, Position(1))].into_iter().collect()));
    assert!(now.given.reach(&at(3_000)));
}

#[test]
fn comparisons_leave_time_for_changes() {
    let now = Instant::now();
    let seconds = Duration::from_secs;
    for (took, retry, expected) in [
        (Duration::ZERO, None, RESYNC_INTERVAL),
        (seconds(2), None, seconds(38)),
        (seconds(2), Some(Duration::from_millis(100)), seconds(2)),
        (seconds(2), Some(seconds(30)), seconds(30)),
    ] {
        assert_eq!(
            next_comparison(now, took, retry.map(|delay| now + delay)),
            now + expected,
            "{took:?}, {retry:?}"
        );
    }
}
