//! Works while this process holds the Lease.

use std::time::Instant;

use tokio::time::{sleep, sleep_until, timeout};
use tortie_api::Key;
use tortie_store::{Store, StoreError};

use crate::election::{Claim, DEADLINE, Election, PERIOD};

/// Claims the Lease again and again, and does the work while this process holds it. The work is dropped when the Lease is
/// lost or cannot be renewed.
pub(crate) async fn run<F: Future<Output = ()>>(
    store: &dyn Store,
    lease: &Key,
    mut election: Election,
    work: impl Fn() -> F,
) {
    loop {
        claim(store, lease, &mut election).await;
        let Some(mut until) = election.leads_until().filter(|until| *until > now()) else {
            sleep(PERIOD).await;
            continue;
        };
        tracing::info!(%lease, "this process leads");
        let work = work();
        tokio::pin!(work);
        while until > now() {
            let renewal = async {
                sleep(PERIOD).await;
                claim(store, lease, &mut election).await;
            };
            tokio::select! {
                () = &mut work => {}
                () = sleep_until(until.into()) => break,
                () = renewal => {}
            }
            match election.leads_until() {
                Some(renewed) => until = renewed,
                None => break,
            }
        }
        tracing::warn!(%lease, "this process does not lead any more");
    }
}

/// The time of the runtime's clock.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// One attempt. What it knows of a Lease that cannot be reached stays as it is.
async fn claim(store: &dyn Store, lease: &Key, election: &mut Election) {
    let attempt = async {
        let began = now();
        let stored = store.get(lease).await?;
        let time = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
        match election.claim(stored.as_ref(), began, &time) {
            Claim::Wait => return Ok(()),
            Claim::Create(value) => drop(store.create(lease, value).await?),
            Claim::Update(value, version) => drop(store.update(lease, value, &version).await?),
        }
        election.renewed(began);
        Ok(())
    };
    match timeout(DEADLINE, attempt).await {
        // Another candidate was faster.
        Ok(Ok(()) | Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_))) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the Lease cannot be claimed; the controllers retry"),
        Err(_) => tracing::warn!(%lease, "claiming the Lease takes too long; the controllers retry"),
    }
}
