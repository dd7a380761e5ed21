//! Addresses of Services of type LoadBalancer, from IPPools with the use `LoadBalancer`, as Calico's kube-controllers give
//! them (`kube-controllers/pkg/controllers/loadbalancer` of Calico).
//!
//! An address is in IPAM before it is in the status of its Service, and leaves the status before it leaves IPAM. So no
//! address is shown by two Services, and a crash between two writes is repaired by the next look at the Service.

mod state;
mod status;
mod wanted;

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use ipnet::IpNet;
use jiff::Timestamp;
use tokio::time::Instant;
use tortie_api::ipam::{Block, LOAD_BALANCERS};
use tortie_api::{Key, Kind};
use tortie_ipam::{
    Assignment, Family, Ipam, IpamError, Records, Release, Request, Use, service_handle, service_owner,
};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Endpoints, Follow, Interest, StoreError, Stored};

use self::state::State;
use self::status::{Report, shown};
use self::wanted::{Missing, Plan, Service, Wanted};
use crate::reconciler::{self, Side};

/// The maximum time between two looks at all Services and addresses.
const PERIOD: Duration = Duration::from_secs(60);
/// The maximum number of changes that are read before something is written.
const MAX_BATCH: usize = 4096;

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
    };
    let mut backoff = Backoff::new(random_seed()).with_max(PERIOD);
    let mut next_look = Instant::now();
    loop {
        tokio::select! {
            Some(change) = sources.next() => controller.state.note(Side::Source, change),
            Some(change) = settings.next() => controller.state.note(Side::Target, change),
            () = tokio::time::sleep_until(next_look) => {}
        }
        controller.drain(&mut sources, &mut settings);
        if !controller.state.is_known() {
            next_look = next_look.max(Instant::now() + Duration::from_secs(1));
            continue;
        }
        let is_full = Instant::now() >= next_look;
        match controller.round(is_full).await {
            Ok(()) => {
                backoff.succeeded();
                if is_full {
                    next_look = Instant::now() + PERIOD;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "not every Service of type LoadBalancer could be looked at; the controllers retry");
                next_look = backoff.failed(Instant::now().into_std()).into();
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

    /// Looks at the Services that have changed; at all of them, and at all addresses, in a full round.
    async fn round(&mut self, is_full: bool) -> Result<(), IpamError> {
        if is_full || !self.state.has_listed() {
            let held = self.held().await?;
            self.state.set_held(held);
        }
        let mut failure = None;
        for key in self.state.take_due() {
            if let Err(error) = self.reconcile(&key).await {
                // A change of the Service is on its way, which makes it due.
                if !matches!(&error, IpamError::Store(StoreError::Conflict(conflict)) if *conflict == key) {
                    self.state.retry(key);
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The handles of addresses of Services, each with its Service.
    async fn held(&self) -> Result<Vec<(String, Key)>, IpamError> {
        let mut held = Vec::new();
        for stored in self.store.list(Kind::IpamBlock).await?.items {
            let Ok(block) = serde_json::from_value::<Block>(stored.value) else { continue };
            if block.owner() != Some(LOAD_BALANCERS) || block.check().is_err() {
                continue;
            }
            for (_, attribute) in block.allocated() {
                let owner = |name: &str| attribute.owner.as_ref()?.get(name);
                if let (Some(handle), Some(namespace), Some(name)) =
                    (&attribute.handle_id, owner("namespace"), owner("service"))
                {
                    held.push((handle.clone(), Key::namespaced(Kind::Service, namespace, name)));
                }
            }
        }
        Ok(held)
    }

    /// Brings the addresses of a Service and its status to what they should be.
    async fn reconcile(&mut self, key: &Key) -> Result<(), IpamError> {
        let stored = self.truth.get(key).await?;
        let service = match &stored {
            Some(stored) => match Service::of(&stored.value) {
                Ok(service) => Some(service),
                Err(error) => {
                    tracing::error!(object = %key, error, "the Service cannot be read; its addresses stay as they are");
                    return Ok(());
                }
            },
            None => None,
        };
        let handle = service.as_ref().map(|service| service_handle(&key.namespace, &key.name, service.uid()));
        self.release_former(key, handle.as_deref()).await?;
        match (stored, service, handle) {
            (Some(stored), Some(service), Some(handle)) => self.assign(&stored, &service, &handle).await,
            _ => Ok(()),
        }
    }

    /// Releases the addresses of Services of this name that do not exist any more.
    async fn release_former(&mut self, key: &Key, handle: Option<&str>) -> Result<(), IpamError> {
        for former in self.state.held_by(key) {
            if Some(&*former) == handle {
                continue;
            }
            if handle.is_none() && reconciler::is_empty(&*self.truth).await? {
                return Err(reconciler::no_namespace().into());
            }
            let released = self.ipam.release(&former).await?;
            self.state.forget(&former);
            tracing::info!(service = %key, ?released, "the Service is gone; its addresses are free");
        }
        Ok(())
    }

    async fn assign(&mut self, stored: &Stored, service: &Service, handle: &str) -> Result<(), IpamError> {
        let key = &stored.key;
        let Some(assign_ips) = self.state.assign_ips() else { return Ok(()) };
        let is_held = self.state.is_held(handle);
        let wanted = match service.wanted(assign_ips) {
            Ok(Wanted::Nothing) if !is_held => return Ok(()),
            // Without a pool for them, Services are somebody else's business.
            Ok(Wanted::OneOf(_) | Wanted::These(_)) if self.state.pools().is_empty() => return Ok(()),
            Ok(wanted) => wanted,
            Err(problem) => {
                let report = Report { addresses: None, removed: &[], problem: Some(&problem) };
                return self.report(stored, report).await;
            }
        };
        let known = self.ipam.releases(handle).await?;
        let assignment = |(block, one): &(IpNet, Release)| Assignment { address: one.address, block: *block };
        let has: Vec<Assignment> = known.iter().map(assignment).collect();
        let Plan { release, assign } = wanted.plan(&has, &shown(&stored.value), self.state.pools());
        if !release.is_empty() {
            let removed: Vec<_> = release.iter().map(|one| one.address).collect();
            self.report(stored, Report { addresses: None, removed: &removed, problem: None }).await?;
            let releases = known.into_iter().filter(|known| release.contains(&assignment(known)));
            self.release(key, releases.collect()).await?;
        }
        let mut problem = None;
        for missing in assign {
            match self.assign_one(key, handle, missing).await {
                Ok(assignment) => {
                    tracing::info!(service = %key, address = %assignment.address, "the Service has an address");
                }
                Err(IpamError::Store(error)) => return Err(error.into()),
                Err(error @ IpamError::Contended(_)) => return Err(error),
                Err(error) => drop(problem.get_or_insert(error.to_string())),
            }
        }
        let has = self.ipam.find(handle).await?;
        if has.is_empty() {
            self.state.forget(handle);
        } else {
            self.state.hold(handle, key);
        }
        // A write of the status has changed the version.
        let now = if release.is_empty() { Some(stored.clone()) } else { self.truth.get(key).await? };
        let Some(stored) = now else { return Ok(()) };
        if wanted == Wanted::Nothing {
            return self.report(&stored, Report { addresses: None, removed: &[], problem: None }).await;
        }
        let problem = problem.or_else(|| service.unused_address(&has));
        let addresses: Vec<_> = has.iter().map(|one| one.address).collect();
        let report = Report { addresses: Some(&addresses), removed: &[], problem: problem.as_deref() };
        self.report(&stored, report).await
    }

    async fn release(&self, key: &Key, releases: Vec<(IpNet, Release)>) -> Result<(), IpamError> {
        for (block, one) in releases {
            match self.records.release_addresses(block, std::slice::from_ref(&one)).await {
                Ok(_) => {
                    tracing::info!(service = %key, address = %one.address, "the Service does not have the address any more");
                }
                // Another process of the controllers has changed it; the next look goes on.
                Err(IpamError::Changed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn assign_one(&self, key: &Key, handle: &str, missing: Missing) -> Result<Assignment, IpamError> {
        let Some(namespace_labels) = self.state.namespace(&key.namespace) else {
            return Err(IpamError::NoPool(format!("{key}, whose Namespace is not known")));
        };
        let time = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string();
        let request = Request {
            handle: handle.to_owned(),
            owner: service_owner(&key.namespace, &key.name, time),
            intended_use: Use::LoadBalancer,
            namespace_labels,
            family: Family::V4,
            pools: Vec::new(),
        };
        match missing {
            Missing::This(address) => self.ipam.assign_address(&request, address).await,
            Missing::Any(family, pools) => self.ipam.assign(&Request { family, pools, ..request }).await,
        }
    }

    async fn report(&self, stored: &Stored, report: Report<'_>) -> Result<(), IpamError> {
        let Some(status) = report.status(&stored.value, Timestamp::now()) else { return Ok(()) };
        if let Some(problem) = report.problem {
            tracing::warn!(service = %stored.key, problem, "the Service lacks an address that it asks for");
        }
        Ok(self.truth.set_service_status(stored, status).await?)
    }
}
