//! Two candidates, on a clock that jumps to the next timer.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_controllers::LEASE_NAME;
use tortie_store::Store;

use crate::common::{Disturbed, global, memory, put, start, value};

fn lease() -> Key {
    Key::namespaced(Kind::Lease, "tortie-system", LEASE_NAME)
}

async fn holder(store: &dyn Store) -> Value {
    value(store, &lease()).await["spec"]["holderIdentity"].clone()
}

/// Waits on the test's clock.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..3000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what}");
}

#[tokio::test(start_paused = true)]
async fn another_process_takes_over_when_the_leader_ends_and_not_before() {
    let (kubernetes, store) = (memory(), memory());
    put(&*kubernetes, &global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
    let first = start(store.clone(), Some(kubernetes.clone()), "first");
    until("the first one leads", async || holder(&*kubernetes).await == "first").await;
    let second = start(store.clone(), Some(kubernetes.clone()), "second");
    for _ in 0..600 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(holder(&*kubernetes).await, "first");
    }
    drop(first);
    put(&*kubernetes, &global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})).await;
    until("the second one leads", async || holder(&*kubernetes).await == "second").await;
    until("it works", async || store.get(&global(Kind::Profile, "kns.n")).await.unwrap().is_some()).await;
    assert_eq!(value(&*kubernetes, &lease()).await["spec"]["leaseTransitions"], 1);
    drop(second);
}

/// A leader whose API server is gone does not write any more, and works again when the server is back.
#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_its_lease_stops() {
    let (kubernetes, store) = (memory(), memory());
    // The Lease is created and renewed five times. Then every request fails.
    let failing = Arc::new(Disturbed::crashing_after(kubernetes.clone(), 6));
    let running = start(store.clone(), Some(failing.clone()), "first");
    until("the leader has lost the API server", async || failing.has_crashed()).await;
    let second = start(store.clone(), Some(kubernetes.clone()), "second");
    until("the second one leads", async || holder(&*kubernetes).await == "second").await;
    // The first one still gets events of its watches, and must not act on them.
    drop(second);
    put(&*kubernetes, &global(Kind::Namespace, "late"), json!({"metadata": {"name": "late"}})).await;
    for _ in 0..300 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(store.get(&global(Kind::Profile, "kns.late")).await.unwrap(), None);
    }
    drop(running);
}
