//! Runs the BGP speaker of a node: its configuration comes from the datastore, and the routes that it learns go into the
//! tables of the system.
//!
//! The speaker ends without a word to its peers, which keep its routes for the restart time, and the kernel keeps the
//! learned ones. So a restart of the agent costs no packet (RFC 4724).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::{BoxStream, ReadyChunks};
use ipnet::IpNet;
use tokio::sync::{Notify, mpsc, watch};
use tortie_bgp::calico::{Derived, Forwarding, forwarding};
use tortie_bgp::fsm::State;
use tortie_bgp::rib::{Chosen, OwnRoute, RouteChange, Source, Why};
use tortie_bgp::speaker::{Config, PeerStatus, RouteEvent, Speaker, SpeakerStatus};
use tortie_dataplane::{Condition, LearnedRouteTable, Reason};
use tortie_store::{Change, Endpoints, Interest};
use tortie_windows::FirewallOpening;

use super::cluster::{self, Cluster};
use super::passwords::Passwords;
use super::reach::{self, CutOff, OutOfReach};
use super::{Asked, BgpQuestion, System, shown, why};
use crate::control::Outcome;

/// The interval at which the kernel's routes are compared, and sessions are looked at.
const LOOK: Duration = Duration::from_secs(10);
/// The shortest time between two comparisons because of changes of links and routes, which also its own writes are.
const PAUSE: Duration = Duration::from_millis(250);
/// How long the routes of an earlier process wait for those of the peers: Calico's restart time.
const RESTART: Duration = Duration::from_secs(120);
/// How long a session may be down before it is reported.
const DOWN: Duration = Duration::from_secs(30);
/// The maximum number of changes that are taken at once.
const BATCH: usize = 1_024;
/// The maximum number of routes that are named in conditions.
const MAX_NAMED: usize = 10;

/// Runs until the store ends. `conditions` receives what operators must know.
pub(crate) async fn run(
    store: Arc<dyn Endpoints>,
    node: String,
    system: System,
    conditions: watch::Sender<Vec<Condition>>,
    mut asked: mpsc::Receiver<Asked>,
) {
    let mut changes = store.follow(cluster::interests(&node)).ready_chunks(BATCH);
    let mut runner = Runner::new(&node, system, Passwords::new(store.secrets()));
    let mut services = None;
    let changed = runner.changed.clone();
    let mut settled = tokio::time::Instant::now();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            changes = changes.next() => {
                let Some(changes) = changes else { return };
                runner.take_changes(changes).await;
            }
            changes = next_of_services(&mut services) => {
                let Some(changes) = changes else { return };
                runner.take_changes(changes).await;
            }
            state = runner.passwords.next() => {
                if runner.passwords.take(state) {
                    runner.configure().await;
                }
            }
            event = next_event(&mut runner.running) => runner.take(event),
            _ = look.tick() => runner.look().await,
            // The kernel deletes routes by a link that goes down, and a next hop may have another router now.
            () = changed_after(&changed, settled) => {
                settled = tokio::time::Instant::now() + PAUSE;
                runner.is_due = true;
            }
            Some((question, answer)) = asked.recv() => {
                // Whoever asked may have gone.
                let _ = answer.send(runner.answer(question).await);
                continue;
            }
        }
        let wanted = runner.cluster.follows_services();
        if wanted != services.as_ref().map(|followed: &FollowedServices| followed.number) {
            let follow = || store.follow(cluster::SERVICE_KINDS.map(Interest::all).to_vec());
            services =
                wanted.map(|number| FollowedServices { number, changes: follow().ready_chunks(BATCH) });
        }
        runner.program().await;
        let now = runner.conditions();
        conditions.send_if_modified(|last| std::mem::replace(last, now.clone()) != now);
    }
}

/// Waits for a change of links or routes, and not before this time.
async fn changed_after(changed: &Notify, time: tokio::time::Instant) {
    tokio::time::sleep_until(time).await;
    changed.notified().await;
}

/// The next report of the speaker; `None` if it has ended. Without a speaker, there never is one.
async fn next_event(running: &mut Option<Running>) -> Option<RouteEvent> {
    match running {
        Some(running) => running.events.recv().await,
        None => std::future::pending().await,
    }
}

/// An event, and those that are there already.
fn with_ready(event: RouteEvent, events: &mut mpsc::UnboundedReceiver<RouteEvent>) -> Vec<RouteEvent> {
    let mut all = vec![event];
    while all.len() < BATCH
        && let Ok(next) = events.try_recv()
    {
        all.push(next);
    }
    all
}

/// Services and EndpointSlices, while the speaker must know them.
struct FollowedServices {
    /// What [`Cluster::follows_services`] was.
    number: u32,
    changes: ReadyChunks<BoxStream<'static, Change>>,
}

/// The next changes of Services; `None` if the store has ended. While nobody follows them, there never are any.
async fn next_of_services(services: &mut Option<FollowedServices>) -> Option<Vec<Change>> {
    match services {
        Some(services) => services.changes.next().await,
        None => std::future::pending().await,
    }
}

/// A running speaker.
struct Running {
    speaker: Speaker,
    events: mpsc::UnboundedReceiver<RouteEvent>,
    /// The configuration that it has.
    config: Config,
    /// The routes that it advertises.
    own: BTreeMap<IpNet, OwnRoute>,
}

struct Runner {
    cluster: Cluster,
    passwords: Passwords,
    running: Option<Running>,
    /// `None` only while a thread uses it.
    learned: Option<Box<dyn LearnedRouteTable>>,
    /// The firewall of a Windows node.
    firewall: Option<Arc<FirewallOpening>>,
    changed: Arc<Notify>,
    marker: Option<PathBuf>,
    /// Whether the last speaker has told its peers to remove its routes, and none has run since.
    has_taken_leave: bool,
    /// What the speaker has chosen.
    chosen: BTreeMap<IpNet, Vec<Chosen>>,
    /// The next hops of routes, and whether the node has a route to them, as the speaker has been told.
    next_hops: BTreeMap<IpAddr, Option<bool>>,
    /// True once the speaker has the routes that its peers had at its start.
    is_complete: bool,
    /// The blocks of other nodes without a route.
    out_of_reach: OutOfReach,
    /// Since when each peer has no session.
    down: BTreeMap<SocketAddr, (Instant, Option<String>)>,
    /// Why a part of the configuration is not in force.
    of_settings: Vec<String>,
    /// The addresses and peers that the speaker leaves out, and why.
    left_out: Vec<String>,
    /// Why the speaker does not run as configured.
    of_speaker: Option<String>,
    /// Why routes are not in the kernel.
    of_routes: Vec<String>,
    /// Whether the kernel's routes must be compared.
    is_due: bool,
}

impl Runner {
    fn new(node: &str, system: System, passwords: Passwords) -> Self {
        let System { learned, firewall, changed, marker } = system;
        Self {
            cluster: Cluster::new(node),
            passwords,
            running: None,
            learned: Some(learned),
            firewall,
            changed,
            marker,
            has_taken_leave: false,
            chosen: BTreeMap::new(),
            next_hops: BTreeMap::new(),
            is_complete: false,
            out_of_reach: OutOfReach::default(),
            down: BTreeMap::new(),
            of_settings: Vec::new(),
            left_out: Vec::new(),
            of_speaker: None,
            of_routes: Vec::new(),
            is_due: false,
        }
    }

    async fn take_changes(&mut self, changes: Vec<Change>) {
        let changed = changes.into_iter().fold(false, |changed, one| self.cluster.apply(one) | changed);
        if changed {
            self.configure().await;
        }
    }

    /// Gives the speaker what the datastore asks for. What is in force stays while that is not known.
    async fn configure(&mut self) {
        if !self.cluster.is_usable() {
            return;
        }
        let named = RefCell::new(BTreeSet::new());
        let Derived { config, own, blackholes: _, problems } = self.cluster.derived(&|key| {
            named.borrow_mut().insert(key.name.clone());
            self.passwords.get(key)
        });
        self.passwords.follow(named.into_inner());
        if self.passwords.are_awaited() {
            return;
        }
        self.of_settings = problems.iter().map(ToString::to_string).collect();
        if let Some(config) = config {
            match self.apply(usable(config), own).await {
                Ok(left_out) => {
                    self.of_speaker = None;
                    self.left_out = left_out.iter().map(ToString::to_string).collect();
                }
                Err(error) => {
                    tracing::error!(%error, "the BGP speaker does not run as configured; Tortie retries");
                    self.of_speaker = Some(error.to_string());
                }
            }
        }
        self.open_firewall();
        // Pools and settings decide which routes belong into the kernel.
        for prefix in self.chosen.keys().copied().collect::<Vec<_>>() {
            self.forward(prefix);
        }
        self.is_due = true;
    }

    /// Lets the speaker's peers in, and nobody without a speaker. One that does not run as configured may listen at some of its
    /// addresses.
    fn open_firewall(&self) {
        let Some(firewall) = &self.firewall else { return };
        let config = self.running.as_ref().map(|running| &running.config);
        match config.and_then(|config| Some((config.listen.first()?.port(), &config.peers))) {
            Some((port, peers)) => firewall.admit(port, peers.keys().map(SocketAddr::ip).collect()),
            None => firewall.admit_nobody(),
        }
    }

    async fn apply(
        &mut self,
        config: Config,
        own: BTreeMap<IpNet, OwnRoute>,
    ) -> Result<Vec<tortie_bgp::speaker::Error>, tortie_bgp::speaker::Error> {
        let is_other = |running: &Running| running.config.identifier != config.identifier;
        if let Some(old) = self.running.take_if(|running| is_other(running)) {
            old.speaker.shut_down("the BGP identifier of the node changes").await?;
            self.has_taken_leave = true;
        }
        let Some(running) = &mut self.running else {
            return self.start(config, own).await;
        };
        let mut applied = Ok(Vec::new());
        if running.config != config || !self.left_out.is_empty() || self.of_speaker.is_some() {
            // After an error, the rest is in force, and the next look tries again.
            running.config = config.clone();
            applied = running.speaker.apply(config).await;
        }
        let gone: Vec<IpNet> =
            running.own.keys().filter(|prefix| !own.contains_key(prefix)).copied().collect();
        let new = own.iter().filter(|(prefix, route)| running.own.get(prefix) != Some(route));
        let new: Vec<(IpNet, OwnRoute)> = new.map(|(prefix, route)| (*prefix, route.clone())).collect();
        running.speaker.advertise(new).await?;
        running.speaker.withdraw(gone).await?;
        running.own = own;
        applied
    }

    /// Starts a speaker. After a shutdown of the previous one, its peers have removed its routes, so it does not count as restarted,
    /// also if the first attempts fail.
    async fn start(
        &mut self,
        config: Config,
        own: BTreeMap<IpNet, OwnRoute>,
    ) -> Result<Vec<tortie_bgp::speaker::Error>, tortie_bgp::speaker::Error> {
        let Some(learned) = &mut self.learned else { return Ok(Vec::new()) };
        learned.restart();
        self.chosen.clear();
        self.next_hops.clear();
        self.is_complete = false;
        self.out_of_reach = OutOfReach::default();
        // A node whose peers tell it no routes forwards packets all the time, too.
        let has_run = self.marker.as_ref().is_some_and(|marker| marker.exists());
        let mut has_forwarded = || {
            has_run
                || learned.exist().unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot read the routes of the kernel; the BGP speaker waits for its peers");
                    true
                })
        };
        let restarted = !self.has_taken_leave && has_forwarded();
        let waiting = restarted.then_some(RESTART);
        let (speaker, events, left_out) = Speaker::start_asking(config.clone(), waiting).await?;
        speaker.advertise(own.clone()).await?;
        if let Some(marker) = &self.marker
            && let Err(error) = std::fs::write(marker, "")
        {
            let marker = marker.display();
            tracing::warn!(%error, "cannot write {marker}; after a restart, peers forget this node's routes for a moment");
        }
        tracing::info!(identifier = %config.identifier, peers = config.peers.len(), restarted, "the BGP speaker runs");
        self.has_taken_leave = false;
        self.running = Some(Running { speaker, events, config, own });
        Ok(left_out)
    }

    /// Takes a report of the speaker, and those that are there already.
    fn take(&mut self, event: Option<RouteEvent>) {
        let Some(event) = event else {
            tracing::error!("the BGP speaker has ended; Tortie starts it again");
            self.running = None;
            self.open_firewall();
            return;
        };
        let events = match &mut self.running {
            Some(running) => with_ready(event, &mut running.events),
            None => vec![event],
        };
        for event in events {
            match event {
                RouteEvent::Changed(changes) => {
                    for RouteChange { prefix, routes } in changes {
                        match routes.is_empty() {
                            true => drop(self.chosen.remove(&prefix)),
                            false => drop(self.chosen.insert(prefix, routes)),
                        }
                        self.forward(prefix);
                    }
                }
                RouteEvent::Complete => {
                    self.is_complete = true;
                    self.learned.iter_mut().for_each(|learned| learned.complete());
                }
                RouteEvent::UnknownNextHops(unknown) => {
                    self.next_hops.extend(unknown.into_iter().map(|next_hop| (next_hop, None)));
                }
            }
        }
        self.is_due = true;
    }

    /// Decides whether the kernel gets a route to a prefix.
    fn forward(&mut self, prefix: IpNet) {
        let next_hops = match self.forwarding(prefix) {
            Forwarding::Via(next_hops) => next_hops,
            Forwarding::Nothing(_) => BTreeSet::new(),
        };
        if let Some(learned) = &mut self.learned {
            learned.set(prefix, next_hops);
        }
    }

    fn forwarding(&self, prefix: IpNet) -> Forwarding {
        let routes = self.chosen.get(&prefix).cloned().unwrap_or_default();
        let change = RouteChange { prefix, routes };
        forwarding(&change, &self.cluster.pools(), &self.cluster.settings())
    }

    /// Looks at what nobody reports: sessions, and routes that somebody else has changed.
    async fn look(&mut self) {
        self.is_due = true;
        if self.running.is_none() || self.of_speaker.is_some() || !self.left_out.is_empty() {
            self.configure().await;
        }
        let Some(running) = &self.running else { return };
        // Whoever announces ever new next hops fills no memory.
        for next_hop in running.speaker.forget_unused_costs().await.unwrap_or_default() {
            self.next_hops.remove(&next_hop);
        }
        let Ok(status) = running.speaker.status().await else { return };
        let mut down = BTreeMap::new();
        for peer in status.peers.iter().filter(|peer| peer.state != State::Established) {
            let since = self.down.get(&peer.address).map_or_else(Instant::now, |(since, _)| *since);
            down.insert(peer.address, (since, peer.last_error.clone()));
        }
        self.down = down;
        self.look_for_blocks(&status.peers, Instant::now()).await;
    }

    /// Looks which blocks of other nodes have no route. Nothing tells it: a block may come without a change of routes. While the speaker
    /// waits for its peers, the kernel has the routes of the one before.
    async fn look_for_blocks(&mut self, peers: &[PeerStatus], now: Instant) {
        if !self.is_complete || !self.cluster.is_usable() {
            return;
        }
        let mut unrouted = reach::unrouted(&self.cluster, &self.chosen);
        if !unrouted.is_empty() {
            let blocks: Vec<IpNet> = unrouted.keys().copied().collect();
            // A router may know the routes, and be the default router of the node instead of telling them.
            let routers = peers.iter().filter(|peer| peer.state == State::Established);
            let routers = routers.map(|peer| peer.address.ip());
            let routers = routers.filter(|address| !self.cluster.is_node(*address)).collect();
            match self.in_kernel(move |learned| learned.led_by_others(&blocks, &routers)).await {
                Some(Ok(led)) => unrouted.retain(|block, _| !led.contains(block)),
                Some(Err(error)) => {
                    tracing::error!(%error, "cannot look for the routes of others; Tortie retries");
                    return;
                }
                None => return,
            }
        }
        let nodes = self.out_of_reach.due(&unrouted, now);
        let more = nodes.len().saturating_sub(reach::MOST_NODES);
        let mut named = Vec::new();
        for (node, blocks) in nodes.into_iter().take(reach::MOST_NODES) {
            let Some((first, running)) = blocks.first().zip(self.running.as_ref()) else { continue };
            // A speaker that has ended is noticed by its reports.
            let found = running.speaker.why(*first).await.ok().flatten();
            // The most specific network around the block, if it is another one, says nothing about the block.
            let found = found.filter(|(prefix, _)| prefix == first).map(|(_, why)| why);
            let peer = |source| match source {
                Source::Own => "this node".to_owned(),
                Source::Peer(id) => peers
                    .iter()
                    .find(|peer| peer.id == id)
                    .map_or_else(|| "a former peer".to_owned(), |peer| format!("peer {}", peer.address)),
            };
            let why = reach::reason(first, found.as_ref(), !running.config.peers.is_empty(), peer);
            named.push(CutOff { node, blocks, why });
        }
        self.out_of_reach.set(named, more);
    }

    /// Makes the kernel's routes as they should be, and tells the speaker which next hops cannot be reached.
    async fn program(&mut self) {
        if !std::mem::take(&mut self.is_due) {
            return;
        }
        let watched = self.next_hops.keys().copied().collect();
        let applied = match self.in_kernel(move |learned| learned.apply(&watched)).await {
            None => return,
            Some(Ok(applied)) => applied,
            Some(Err(error)) => {
                tracing::error!(%error, "cannot compare the routes of the kernel; Tortie retries");
                self.of_routes = vec![error.to_string()];
                return;
            }
        };
        for problem in applied.problems.iter().filter(|problem| !self.of_routes.contains(problem)) {
            tracing::warn!("{problem}");
        }
        self.of_routes = applied.problems;
        let mut costs = Vec::new();
        for (next_hop, told) in &mut self.next_hops {
            let is_reachable = !applied.unreachable.contains(next_hop);
            if *told != Some(is_reachable) {
                if told.is_some() || !is_reachable {
                    tracing::info!(%next_hop, is_reachable, "the way to a BGP next hop has changed, or there is none");
                }
                *told = Some(is_reachable);
                costs.push((*next_hop, is_reachable.then_some(0)));
            }
        }
        if let Some(running) = &self.running
            && !costs.is_empty()
        {
            // A speaker that has ended is noticed by its reports.
            let _ = running.speaker.set_costs(costs).await;
        }
    }

    /// The next hops to which the node has no route.
    fn unreachable(&self) -> impl Iterator<Item = &IpAddr> {
        self.next_hops.iter().filter(|(_, told)| **told == Some(false)).map(|(next_hop, _)| next_hop)
    }

    /// Uses the kernel's routes on a thread that may wait. `None` only after a panic.
    async fn in_kernel<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut dyn LearnedRouteTable) -> T + Send + 'static,
    ) -> Option<T> {
        let mut learned = self.learned.take()?;
        let done = tokio::task::spawn_blocking(move || {
            let result = work(&mut *learned);
            (learned, result)
        });
        match done.await {
            Ok((learned, result)) => {
                self.learned = Some(learned);
                Some(result)
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    fn conditions(&self) -> Vec<Condition> {
        let unknown = self.cluster.problems().into_iter().chain(self.passwords.problems());
        let settings = unknown.chain(self.of_settings.iter().cloned()).chain(self.left_out.iter().cloned());
        let mut conditions: Vec<Condition> =
            settings.map(|problem| Condition::new(Reason::BgpSettingNotInForce, problem)).collect();
        if let Some(problem) = &self.of_speaker {
            conditions.push(Condition::new(Reason::RouteRefused, format!("the BGP speaker: {problem}")));
        }
        // Without the duration: a condition that changes all the time would be written all the time.
        for (address, (_, last_error)) in self.down.iter().filter(|(_, (since, _))| since.elapsed() >= DOWN) {
            let why = last_error.as_ref().map_or_else(
                || {
                    "the peer has not answered; look whether it runs, and whether TCP port 179 is open"
                        .to_owned()
                },
                |error| format!("the last session ended: {error}"),
            );
            conditions.push(match self.cluster.not_ready_at(address.ip()) {
                // Its Node says so, and the other nodes are as connected as before.
                Some(node) => Condition::new(
                    Reason::NetworkPartNotInForce,
                    format!("no BGP session with {address}: node {node} is not ready"),
                ),
                None => {
                    Condition::new(Reason::BgpSessionDown, format!("no BGP session with {address}: {why}"))
                }
            });
        }
        conditions.extend(self.out_of_reach.conditions());
        let next_hops = self.unreachable().map(|next_hop| {
            format!(
                "the node has no route to the BGP next hop {next_hop}, so routes by way of it are not used"
            )
        });
        let routes = self.of_routes.iter().cloned().chain(next_hops).take(MAX_NAMED);
        conditions.extend(routes.map(|problem| Condition::new(Reason::BgpRouteNotInForce, problem)));
        conditions
    }

    async fn answer(&mut self, question: BgpQuestion) -> Outcome {
        let Some(running) = &self.running else {
            let why = self.of_speaker.clone().or_else(|| self.of_settings.first().cloned());
            let why = why.unwrap_or_else(|| "it does not know the cluster yet".to_owned());
            return Outcome::Failed(format!("the BGP speaker does not run: {why}"));
        };
        let status = match running.speaker.status().await {
            Ok(status) => status,
            Err(error) => return Outcome::Failed(error.to_string()),
        };
        match question {
            BgpQuestion::Peers => Outcome::BgpPeers(shown::peers(&status, &running.config)),
            BgpQuestion::Routes => match running.speaker.routes().await {
                Ok(routes) => Outcome::BgpRoutes(shown::routes(routes, &status)),
                Err(error) => Outcome::Failed(error.to_string()),
            },
            BgpQuestion::Why(network) => match running.speaker.why(network).await {
                Ok(Some((prefix, found))) => self.explain(prefix, found, &status).await,
                Ok(None) => Outcome::BgpWhy(None),
                Err(error) => Outcome::Failed(error.to_string()),
            },
        }
    }

    async fn explain(&mut self, prefix: IpNet, found: Why, status: &SpeakerStatus) -> Outcome {
        let kernel = match self.in_kernel(move |learned| learned.routes_to(&prefix)).await {
            Some(Ok(kernel)) => kernel,
            Some(Err(error)) => return Outcome::Failed(error.to_string()),
            None => return Outcome::Failed("the kernel's routes cannot be read".to_owned()),
        };
        let is_unreachable = |next_hop: &IpAddr| self.next_hops.get(next_hop) == Some(&Some(false));
        let forwarding = self.forwarding(prefix);
        let kernel = why::in_kernel(&prefix, &forwarding, &kernel, is_unreachable, self.of_routes.iter());
        Outcome::BgpWhy(Some(why::shown(prefix, found, &shown::addresses(status), kernel)))
    }
}

/// The configuration without what this system cannot do: addresses of IPv6, if it is switched off.
fn usable(mut config: Config) -> Config {
    if cfg!(target_os = "linux") && !std::path::Path::new("/proc/net/if_inet6").exists() {
        config.listen.retain(SocketAddr::is_ipv4);
    }
    config
}

#[cfg(test)]
mod tests;
