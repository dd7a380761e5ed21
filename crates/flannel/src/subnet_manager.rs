//! The shell: takes subnets in etcd, keeps them, and follows the other nodes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::watch;
use tortie_api::kubernetes::FlannelLease;
use tortie_store::StoreError;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::etcd::{Condition, Entries, Entry, EntryChange, Etcd};

use crate::FlannelError;
use crate::config::NetConf;
use crate::granted::{Fate, Granted, fate};
use crate::lease::{Attributes, Subnets};
use crate::own_lease::{
    Acquisition, LeaseState, OwnLease, Previous, acquisition, has_ended, lease_state, overlapped, renewal,
};
use crate::ranges::Ranges;
use crate::view::View;

/// How long a lease lasts, as flanneld's.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How often the configuration is read again.
const CONFIG_INTERVAL: Duration = Duration::from_secs(60);

/// What flannel keeps in etcd.
#[derive(Clone)]
pub struct FlannelEtcd {
    etcd: Etcd,
    /// Begins with a slash, and ends without one.
    prefix: String,
    lasts: Duration,
    config_interval: Duration,
    /// The lease of a write whose result is not known.
    spare: Arc<Mutex<Option<Granted>>>,
}

/// The leases, as a node knows them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseSnapshot {
    /// Those of the node's pods.
    pub own: Vec<FlannelLease>,
    /// The node's address as the node's key has it. `None` if the node has written no key since it started.
    pub address: Option<Ipv4Addr>,
    /// Those of others, by key.
    pub others: BTreeMap<String, Vec<FlannelLease>>,
    /// The keys that cannot be read, with the reason and what is in force.
    pub problems: BTreeMap<String, String>,
    /// Why etcd cannot be read or written. What was known stays in force.
    pub unreachable: Option<String>,
    /// Why the node may give no addresses, with the remedy.
    pub lost: Option<String>,
    /// That flannel's configuration is not the one in force, with the remedy.
    pub config: Option<String>,
}

impl FlannelEtcd {
    /// What is below a prefix, such as `/coreos.com/network`.
    #[must_use]
    pub fn new(etcd: Etcd, prefix: &str) -> Self {
        let names = prefix.split('/').filter(|name| !name.is_empty());
        let prefix = names.fold(String::new(), |path, name| format!("{path}/{name}"));
        Self { etcd, prefix, lasts: DAY, config_interval: CONFIG_INTERVAL, spare: Arc::default() }
    }

    /// With leases that last so long, for tests.
    #[must_use]
    pub fn with_leases_of(self, lasts: Duration) -> Self {
        Self { lasts, ..self }
    }

    /// With a configuration that is read again so often, for tests.
    #[must_use]
    pub fn with_config_interval(self, config_interval: Duration) -> Self {
        Self { config_interval, ..self }
    }

    /// A lease for a key, and whether no earlier attempt has used it.
    async fn granted(&self) -> Result<(Granted, bool), StoreError> {
        let asked = now();
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(spare) = spare.filter(|spare| spare.is_usable(asked)) {
            return Ok((spare, false));
        }
        let lease = self.etcd.grant_lease(self.lasts).await?;
        Ok((Granted { lease, asked }, true))
    }

    /// Ends a lease that no key has, or keeps one for the next attempt.
    async fn settle(&self, granted: Granted, fate: Fate) {
        let is_kept = match fate {
            Fate::Used | Fate::Gone => false,
            Fate::Revoke => self.etcd.revoke_lease(granted.lease).await.is_err(),
            Fate::Keep => true,
        };
        if is_kept {
            *self.spare.lock().unwrap_or_else(PoisonError::into_inner) = Some(granted);
        }
    }

    /// The key of the configuration.
    #[must_use]
    pub fn config_key(&self) -> String {
        format!("{}/config", self.prefix)
    }

    /// The configuration, and the subnets that nodes can have.
    ///
    /// # Errors
    /// etcd cannot be read, or the configuration is missing or does not fit.
    pub async fn config(&self) -> Result<(NetConf, Ranges), FlannelError> {
        let key = self.config_key();
        let Some(entry) = self.etcd.entry(&key).await? else { return Err(FlannelError::NoConfig(key)) };
        let read = NetConf::parse(&entry.value).and_then(|conf| {
            let ranges = Ranges::new(&conf)?;
            Ok((conf, ranges))
        });
        read.map_err(|problem| FlannelError::Config { key, problem })
    }

    /// Takes subnets for a node: those that it has, or had, or free ones. If pods have addresses of those that it had, and somebody
    /// else has these now, the manager waits for them.
    ///
    /// # Errors
    /// etcd cannot be read or written, or no subnet is free.
    pub async fn acquire(
        &self,
        ranges: &Ranges,
        attributes: Attributes,
        previous: Option<Previous>,
    ) -> Result<SubnetManager, FlannelError> {
        let prefix = format!("{}/subnets/", self.prefix);
        let mut backoff = Backoff::new(random_seed());
        let mut view = View::new(prefix.clone(), *ranges);
        loop {
            let Entries { entries, revision } = self.etcd.entries(&prefix).await?;
            view.reset(entries);
            let acquired = acquisition(&view, ranges, &attributes, previous, random_seed())
                .map_err(|problem| FlannelError::Full { prefix: prefix.clone(), problem })?;
            let (Acquisition::Reuse(subnets) | Acquisition::Create(subnets) | Acquisition::Wait(subnets)) =
                acquired;
            let mut manager = SubnetManager {
                at: self.clone(),
                view,
                own_lease: OwnLease { subnets, attributes, written: None, replaced: false },
                is_written: false,
                has: None,
                as_of: revision,
                term: None,
                in_force: None,
                config: None,
                uses_ipv6: true,
            };
            if let Acquisition::Wait(_) = acquired {
                return Ok(manager);
            }
            if manager.write().await? {
                tracing::info!(key = manager.key(), "the node has this subnet of flannel");
                return Ok(manager);
            }
            // Somebody else was faster.
            SubnetManager { view, .. } = manager;
            backoff.wait().await;
        }
    }
}

/// A node with subnets.
pub struct SubnetManager {
    at: FlannelEtcd,
    view: View,
    own_lease: OwnLease,
    /// Whether the last write has certainly succeeded.
    is_written: bool,
    /// The address that was written last.
    has: Option<Ipv4Addr>,
    /// The view has all changes up to this revision.
    as_of: u64,
    /// When the lease of the key was asked for, and how long it lasts. A reservation has none.
    term: Option<(Instant, Duration)>,
    /// The configuration that the node follows.
    in_force: Option<NetConf>,
    /// That it is not flannel's any more, when last read.
    config: Option<String>,
    /// Whether pods have addresses of the IPv6 subnet.
    uses_ipv6: bool,
}

impl SubnetManager {
    /// Reports when flannel's configuration is another one than this. A node follows the one with which it has started, as flanneld does.
    #[must_use]
    pub fn with_config(self, in_force: NetConf) -> Self {
        Self { in_force: Some(in_force), ..self }
    }

    /// For a node whose pods have IPv4 addresses only. It takes an IPv6 subnet, too, if flannel has both families: a key without one lets
    /// flanneld panic on nodes that choose a subnet (`IP6Net.Overlaps` in `pkg/ip/ip6net.go`).
    #[must_use]
    pub fn with_ipv4_only(self) -> Self {
        Self { uses_ipv6: false, ..self }
    }

    /// The subnets.
    #[must_use]
    pub fn subnets(&self) -> Subnets {
        self.own_lease.subnets
    }

    /// The leases now.
    #[must_use]
    pub fn snapshot(&self) -> LeaseSnapshot {
        let OwnLease { subnets, attributes, .. } = &self.own_lease;
        let mut own = attributes.own(subnets);
        own.retain(|lease| self.uses_ipv6 || lease.subnet.addr().is_ipv4());
        LeaseSnapshot {
            own,
            address: self.has,
            others: self.view.others(subnets, attributes.public_ip),
            problems: self.view.problems(),
            unreachable: None,
            lost: self.lost(),
            config: self.config.clone(),
        }
    }

    /// Keeps the subnets with these attributes, follows the other nodes, and publishes what it knows. What it knows stays in force
    /// while etcd is down. Ends only when the future is dropped.
    pub async fn run(
        mut self,
        mut attributes: watch::Receiver<Attributes>,
        publish: watch::Sender<Arc<LeaseSnapshot>>,
    ) {
        let mut backoff = Backoff::new(random_seed());
        loop {
            let Err(error) = self.follow(&mut attributes, &publish, &mut backoff).await;
            if matches!(error, StoreError::FellBehind | StoreError::Compacted(_)) {
                // What is known is old. A list helps.
                backoff.wait().await;
                continue;
            }
            let known = publish.borrow().unreachable.clone();
            if known.is_none() {
                tracing::warn!(%error, "cannot follow flannel's leases; what is known stays in force, and Tortie retries");
            }
            // Each attempt may fail in another way, and one is enough to know.
            let unreachable = Some(known.unwrap_or_else(|| error.to_string()));
            self.publish(&publish, unreachable);
            backoff.wait().await;
        }
    }

    async fn follow(
        &mut self,
        attributes: &mut watch::Receiver<Attributes>,
        publish: &watch::Sender<Arc<LeaseSnapshot>>,
        backoff: &mut Backoff,
    ) -> Result<Infallible, StoreError> {
        let prefix = self.view.prefix().to_owned();
        let Entries { entries, revision } = self.at.etcd.entries(&prefix).await?;
        self.view.reset(entries);
        self.as_of = revision;
        let mut changes = self.at.etcd.entry_changes(&prefix, revision).await?;
        let mut looks = tokio::time::interval(self.at.config_interval);
        loop {
            let wanted = *attributes.borrow_and_update();
            // Whoever can read may still not be able to write.
            let unreachable = publish.borrow().unreachable.clone();
            self.publish(publish, unreachable);
            self.settle(wanted).await?;
            self.publish(publish, None);
            let due = self.due();
            tokio::select! {
                changed = changes.next() => match changed {
                    Some(changed) => {
                        changed?.into_iter().for_each(|change| self.ingest(change));
                        backoff.succeeded();
                    }
                    None => return Err(StoreError::Unavailable("etcd ended the watch of flannel's leases".to_owned())),
                },
                () = until_changed(attributes) => {}
                () = until(due) => {}
                _ = looks.tick() => self.config = self.changed_config().await,
            }
        }
    }

    /// That flannel's configuration is not the one in force. What was known stays while etcd does not answer; the watch reports that.
    async fn changed_config(&self) -> Option<String> {
        let in_force = self.in_force.as_ref()?;
        let found = match self.at.config().await {
            Ok((found, _)) if found == *in_force => return None,
            Ok(_) => format!("flannel's configuration (key {}) has changed", self.at.config_key()),
            Err(FlannelError::Store(_)) => return self.config.clone(),
            Err(error) => error.to_string(),
        };
        let remedy = "the node follows the one with which its agent has started: restore it, or restart all daemons of flannel and the agents";
        Some(format!("{found}; {remedy}"))
    }

    fn ingest(&mut self, change: EntryChange) {
        let (EntryChange::Put(Entry { revision, .. }) | EntryChange::Deleted { revision, .. }) = change;
        self.as_of = self.as_of.max(revision);
        self.view.apply(change);
    }

    /// Writes the node's key if it is not as it should be, or is to be renewed.
    async fn settle(&mut self, wanted: Attributes) -> Result<(), StoreError> {
        let is_due = self.due().is_some_and(|due| due <= now());
        // A key of the former address of the node is the node's.
        let lease_state = match self.lease_state() {
            LeaseState::Held if self.is_written && !is_due && wanted == self.own_lease.attributes => {
                return Ok(());
            }
            LeaseState::Lost(_) => return Ok(()),
            lease_state => lease_state,
        };
        self.own_lease.attributes = wanted;
        if lease_state != LeaseState::Held {
            tracing::warn!(
                key = self.key(),
                ?lease_state,
                "flannel's lease of this node was changed; Tortie writes it again"
            );
        }
        if !self.write().await? {
            return Err(StoreError::FellBehind);
        }
        match lease_state {
            LeaseState::Rewritten => self.own_lease.replaced = true,
            LeaseState::Held if is_due => self.own_lease.replaced = false,
            _ => {}
        }
        Ok(())
    }

    /// Writes the node's key, unless it has changed since it was read. Returns whether it is written.
    async fn write(&mut self) -> Result<bool, StoreError> {
        self.is_written = false;
        let (key, value) = (self.key(), self.own_lease.attributes.value());
        let prefix = self.view.prefix().to_owned();
        let (condition, has_lease) = match self.view.of(&self.own_lease.subnets) {
            Some(seen) => (Condition::At(seen.revision), seen.has_lease),
            None => (Condition::Absent { prefix: &prefix, since: self.as_of }, true),
        };
        let granted = match has_lease {
            true => Some(self.at.granted().await?),
            // An administrator has reserved the subnets, for ever.
            false => None,
        };
        let lease = granted.map(|(granted, _)| granted.lease);
        let written = self.at.etcd.put_if(&key, &value, lease, condition).await;
        if let Some((granted, is_fresh)) = granted {
            self.at.settle(granted, fate(&written, is_fresh)).await;
        }
        let Some(revision) = written? else { return Ok(false) };
        self.own_lease.written = Some(revision);
        self.is_written = true;
        self.term = granted.map(|(granted, _)| (granted.asked, granted.lease.lasts));
        self.has = Some(self.own_lease.attributes.public_ip);
        self.view.apply(EntryChange::Put(Entry { key, value, revision, has_lease }));
        Ok(true)
    }

    fn lease_state(&self) -> LeaseState {
        lease_state(&self.view, &self.own_lease)
    }

    /// When the key is to be written again.
    fn due(&self) -> Option<Instant> {
        let (asked, lasts) = self.term?;
        renewal(&self.lease_state(), asked, lasts)
    }

    /// Why the node may give no addresses, with the remedy.
    fn lost(&self) -> Option<String> {
        let has_ended = self.term.is_some_and(|(asked, lasts)| has_ended(asked, lasts, now()));
        let other_has_it = |by: String| {
            (
                by,
                "drain the node, and restart its agent, which takes another subnet; or stop the other one, and delete its key",
            )
        };
        let (problem, remedy) = match self.lease_state() {
            LeaseState::Lost(by) => other_has_it(by),
            LeaseState::Gone => {
                ("it is gone".to_owned(), "the agent writes it again as soon as etcd can be reached")
            }
            LeaseState::Held | LeaseState::Rewritten if has_ended => (
                "it could not be renewed, and may have ended".to_owned(),
                "the agent renews it as soon as etcd can be reached",
            ),
            LeaseState::Held | LeaseState::Rewritten => {
                other_has_it(overlapped(&self.view, &self.own_lease)?)
            }
        };
        Some(format!(
            "flannel's lease {} of this node is lost: {problem}; until the node has it again, its pods get no addresses: {remedy}",
            self.key()
        ))
    }

    fn publish(&self, publish: &watch::Sender<Arc<LeaseSnapshot>>, unreachable: Option<String>) {
        let snapshot = LeaseSnapshot { unreachable, ..self.snapshot() };
        publish.send_if_modified(|known| {
            if let Some(lost) = snapshot.lost.as_ref().filter(|lost| known.lost.as_ref() != Some(*lost)) {
                tracing::error!("{lost}");
            }
            let differs = **known != snapshot;
            if differs {
                *known = Arc::new(snapshot);
            }
            differs
        });
    }

    fn key(&self) -> String {
        self.view.key(&self.own_lease.subnets)
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Nobody changes the attributes of a node whose agent ends.
async fn until_changed(attributes: &mut watch::Receiver<Attributes>) {
    if attributes.changed().await.is_err() {
        std::future::pending().await
    }
}
