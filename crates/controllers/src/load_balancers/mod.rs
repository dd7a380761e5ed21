//! Addresses of Services of type LoadBalancer, from IPPools with the use `LoadBalancer`, as Calico's kube-controllers give
//! them (`kube-controllers/pkg/controllers/loadbalancer` of Calico).
//!
//! An address is in IPAM before it is in the status of its Service, and leaves the status before it leaves IPAM. A crash
//! between two writes is repaired by the next look at the Service. [`steps`] says why two processes at once do no harm.

mod state;
mod status;
mod steps;
mod wanted;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use jiff::Timestamp;
use tokio::time::Instant;
use tortie_api::ipam::{Block, LOAD_BALANCERS};
use tortie_api::{Key, Kind};
use tortie_ipam::{Assignment, Family, Ipam, IpamError, Records, Release, Request, Use, service_owner};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Endpoints, Follow, Interest, StoreError};

pub(crate) use self::status::shown;

use self::state::{Held, State, assignments, handle_of};
use self::steps::{Step, next};
use self::wanted::{Missing, Service};
use crate::reconciler::{self, Side};

/// The maximum time between two looks at all Services and addresses.
const PERIOD: Duration = Duration::from_secs(60);
/// The time between two looks at Services that have changed. Somebody else may write the same status again and again.
const PACE: Duration = Duration::from_millis(50);
/// The maximum number of changes that are read before something is written.
const MAX_BATCH: usize = 4096;
/// The maximum number of steps for a Service in one look. Usually, these are: hide, release, assign, show.
const MAX_STEPS: usize = 8;
/// After so long, a round ends, and changes are read before the next one continues.
const MAX_ROUND: Duration = Duration::from_secs(1);
/// After so many failures in a row, a round ends, because the store is probably away.
const MAX_FAILURES: usize = 3;

/// Gives addresses until the future is dropped. The Services are in `truth`, everything else in `store`.
pub(crate) async fn run(store: Arc<dyn Endpoints>, truth: Arc<dyn Endpoints>) {
    let mut sources = truth.follow(state::SOURCES.map(Interest::all).to_vec());
    let mut settings = store.follow(state::SETTINGS.map(Interest::all).to_vec());
    let mut controller = LoadBalancers {
        ipam: Ipam::of_load_balancers(store.clone()),
        records: Records::new(store.clone()),
        store,
        truth,
        state: State::default(),
        full: BTreeMap::new(),
        last: None,
    };
    let mut backoff = Backoff::new(random_seed()).with_max(PERIOD);
    let (mut next_full, mut not_before) = (Instant::now(), Instant::now());
    loop {
        let next = match (controller.state.is_known(), controller.state.has_due()) {
            // Only a change can help.
            (false, _) => Instant::now() + PERIOD,
            (true, true) => not_before,
            (true, false) => next_full.max(not_before),
        };
        tokio::select! {
            Some(change) = sources.next() => controller.state.note(Side::Source, change),
            Some(change) = settings.next() => controller.state.note(Side::Target, change),
            () = tokio::time::sleep_until(next) => {}
        }
        controller.drain(&mut sources, &mut settings);
        let now = Instant::now();
        let is_full = now >= next_full;
        let is_due = is_full || controller.state.has_due();
        if now < not_before || !is_due || !controller.state.is_known() {
            continue;
        }
        match controller.round(is_full).await {
            Ok(()) => {
                backoff.succeeded();
                not_before = Instant::now() + PACE;
                if is_full {
                    next_full = Instant::now() + PERIOD;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "Services of type LoadBalancer cannot be looked at; the controllers retry");
                not_before = backoff.failed(Instant::now().into_std()).into();
            }
        }
    }
}

struct LoadBalancers {
    ipam: Ipam,
    records: Records,
    store: Arc<dyn Endpoints>,
    truth: Arc<dyn Endpoints>,
    state: State,
    /// The requests that found no address in this round: it would not find one for the next Service either.
    full: BTreeMap<(Family, Vec<String>, String), String>,
    /// The Service at which the last round ended early.
    last: Option<Key>,
}

impl LoadBalancers {
    fn drain(&mut self, sources: &mut Follow, settings: &mut Follow) {
        for _ in 0..MAX_BATCH {
            let next = |side, follow: &mut Follow| {
                let change: Option<Change> = follow.next().now_or_never().flatten();
                change.map(|change| (side, change))
            };
            match next(Side::Source, sources).or_else(|| next(Side::Target, settings)) {
                Some((side, change)) => self.state.note(side, change),
                None => return,
            }
        }
    }

    /// Looks at the Services that have changed; at all of them, and at all addresses, in a full round. A Service that fails
    /// does not keep the others waiting, and is tried again.
    async fn round(&mut self, is_full: bool) -> Result<(), IpamError> {
        if is_full {
            let held = self.held().await?;
            self.state.set_held(held);
        }
        self.full.clear();
        let (started, mut has_namespaces) = (Instant::now(), None);
        let (mut failure, mut in_a_row) = (None, 0);
        let mut due = self.state.take_due(self.last.take().as_ref()).into_iter();
        for key in due.by_ref() {
            if !self.state.needs_a_look(&key, Timestamp::now()) {
                continue;
            }
            match self.reconcile(&key, &mut has_namespaces).await {
                Ok(()) => in_a_row = 0,
                // A change of the Service is on its way, which makes it due.
                Err(IpamError::Store(StoreError::Conflict(conflict) | StoreError::NotFound(conflict)))
                    if conflict == key => {}
                // Trying again does not help; the next full round looks at it.
                Err(error @ (IpamError::Damaged { .. } | IpamError::Store(StoreError::Invalid { .. }))) => {
                    tracing::error!(service = %key, %error, "the Service and its addresses stay as they are");
                }
                Err(error) => {
                    tracing::warn!(service = %key, %error, "the Service could not be looked at; the controllers retry");
                    self.state.retry([key.clone()]);
                    failure = failure.or(Some(error));
                    in_a_row += 1;
                }
            }
            if in_a_row >= MAX_FAILURES || started.elapsed() >= MAX_ROUND {
                self.last = Some(key);
                break;
            }
        }
        self.state.retry(due);
        failure.map_or(Ok(()), Err)
    }

    /// The addresses of Services, by Service and handle.
    async fn held(&self) -> Result<BTreeMap<Key, BTreeMap<String, Held>>, IpamError> {
        let mut held: BTreeMap<Key, BTreeMap<String, Held>> = BTreeMap::new();
        for stored in self.store.list(Kind::IpamBlock).await?.items {
            let Ok(block) = serde_json::from_value::<Block>(stored.value) else { continue };
            if block.owner().is_some_and(|owner| owner != LOAD_BALANCERS) || block.check().is_err() {
                continue;
            }
            for (address, attribute) in block.allocated() {
                let owner = |name: &str| attribute.owner.as_ref()?.get(name);
                if let (Some(handle), Some(namespace), Some(name)) =
                    (&attribute.handle_id, owner("namespace"), owner("service"))
                {
                    let sequence_number = block.sequence_of(address);
                    let one = Release { address, handle: Some(handle.clone()), sequence_number };
                    let key = Key::namespaced(Kind::Service, namespace, name);
                    held.entry(key).or_default().entry(handle.clone()).or_default().push((block.cidr, one));
                }
            }
        }
        Ok(held)
    }

    /// Brings the addresses of a Service and its status to what they should be.
    async fn reconcile(&mut self, key: &Key, has_namespaces: &mut Option<bool>) -> Result<(), IpamError> {
        let mut tried: Option<Result<(), String>> = None;
        let mut former = Ok(());
        let mut handle = self.state.handle(key);
        for number in 0..MAX_STEPS {
            // The addresses are read before the Service: see `steps`.
            let held = match &handle {
                Some(handle) => self.ipam.releases(handle).await?,
                None => Held::new(),
            };
            let stored = self.truth.get(key).await?;
            let service = stored.as_ref().map(|stored| Service::of(&stored.value)).transpose();
            let service = service.map_err(|problem| IpamError::Damaged { key: key.clone(), problem })?;
            let now = service.as_ref().map(|service| handle_of(key, service));
            if number == 0 {
                former = self.release_former(key, now.as_deref(), has_namespaces).await;
            }
            let (Some(stored), Some(service), Some(current)) = (stored, service, &now) else { return former };
            if now != handle {
                handle = now;
                continue;
            }
            let has = assignments(&held);
            self.state.hold(key, current, held.clone());
            let rules = self.state.rules(key, Timestamp::now());
            let outcome = tried.as_ref().map(|tried| tried.as_ref().copied().map_err(String::as_str));
            match next(&stored.value, &service, &has, rules, outcome) {
                Step::Nothing => return former,
                Step::Hide(status) => self.truth.set_service_status(&stored, status).await?,
                Step::Release(which) => {
                    let is_one = |one: &Release| which.iter().any(|it| it.address == one.address);
                    self.release(key, held.into_iter().filter(|(_, one)| is_one(one)).collect()).await?;
                    self.retry_waiting();
                }
                Step::Assign(missing) => tried = Some(self.assign(key, current, missing).await?),
                Step::Show { status, new, problem } => {
                    let mut has_all = true;
                    for one in new {
                        // Another process may have released it.
                        has_all &= self.ipam.renew(current, one).await?;
                    }
                    if !has_all {
                        continue;
                    }
                    self.truth.set_service_status(&stored, status).await?;
                    if let Some(problem) = problem {
                        tracing::warn!(service = %key, problem, "the Service does not have the addresses that it asks for");
                    }
                    // Another process may have released one at the same time: the next step hides it then.
                }
            }
        }
        tracing::warn!(service = %key, "the addresses of the Service change all the time; the controllers look at it again");
        self.state.retry([key.clone()]);
        former
    }

    /// Lets Services that lack an address try again, because one was released.
    fn retry_waiting(&mut self) {
        self.full.clear();
        self.state.look_at_waiting();
    }

    /// Releases the addresses of Services of this name that do not exist any more.
    async fn release_former(
        &mut self,
        key: &Key,
        handle: Option<&str>,
        has_namespaces: &mut Option<bool>,
    ) -> Result<(), IpamError> {
        let mut outcome = Ok(());
        for (former, held) in self.state.former(key, handle) {
            if handle.is_none() {
                // A Kubernetes API that has lost its data has no Services.
                if has_namespaces.is_none() {
                    *has_namespaces = Some(!reconciler::is_empty(&*self.truth).await?);
                }
                if *has_namespaces == Some(false) {
                    tracing::warn!(service = %key, "the Kubernetes API has no Namespace, so it may have lost its data; addresses stay until it has one");
                    return outcome;
                }
            }
            let addresses: Vec<_> = held.iter().map(|(_, one)| one.address).collect();
            match self.ipam.release_with(&former, &addresses).await {
                Ok(released) => {
                    self.state.hold(key, &former, Held::new());
                    if !released.is_empty() {
                        tracing::info!(service = %key, ?released, "the Service that had these addresses is gone; they are free");
                        self.retry_waiting();
                    }
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }

    async fn release(&self, key: &Key, which: Held) -> Result<(), IpamError> {
        for (block, one) in which {
            match self.records.release_addresses(block, std::slice::from_ref(&one)).await {
                Ok(released) if released.is_empty() => {}
                Ok(_) => {
                    tracing::info!(service = %key, address = %one.address, "the Service does not have the address any more");
                }
                // Another process of the controllers has changed it.
                Err(IpamError::Changed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Assigns what is missing. The inner error says why something is still missing.
    async fn assign(
        &mut self,
        key: &Key,
        handle: &str,
        missing: Vec<Missing>,
    ) -> Result<Result<(), String>, IpamError> {
        let mut outcome = Ok(());
        for one in missing {
            match self.assign_one(key, handle, one).await {
                Ok(Ok(assignment)) => {
                    tracing::info!(service = %key, address = %assignment.address, "the Service has an address");
                }
                Ok(Err(problem)) => outcome = outcome.and(Err(problem)),
                Err(error @ (IpamError::Store(_) | IpamError::Contended(_))) => return Err(error),
                Err(error) => outcome = outcome.and(Err(error.to_string())),
            }
        }
        // Nothing is missing, or it is said what is.
        Ok(outcome)
    }

    async fn assign_one(
        &mut self,
        key: &Key,
        handle: &str,
        missing: Missing,
    ) -> Result<Result<Assignment, String>, IpamError> {
        let time = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string();
        let request = Request {
            handle: handle.to_owned(),
            owner: service_owner(&key.namespace, &key.name, time),
            intended_use: Use::LoadBalancer,
            namespace_labels: self.state.namespace(&key.namespace),
            family: Family::V4,
            pools: Vec::new(),
        };
        match missing {
            Missing::This(address) => self.ipam.assign_address(&request, address).await.map(Ok),
            Missing::Any(family, pools) => {
                let which = (family, pools.clone(), key.namespace.clone());
                if let Some(problem) = self.full.get(&which) {
                    return Ok(Err(problem.clone()));
                }
                let assigned = self.ipam.assign(&Request { family, pools, ..request }).await;
                if let Err(error @ (IpamError::Exhausted { .. } | IpamError::NoPool(_))) = &assigned {
                    self.full.insert(which, error.to_string());
                }
                assigned.map(Ok)
            }
        }
    }
}
