//! Routes of the adapter that a virtual switch takes over.
//!
//! Making the first network moves the adapter's addresses to an adapter of the switch, and the system forgets routes of the
//! former, such as that of the cloud's metadata service (docs/hns.md, Networks). So they are kept before, in a file, too,
//! and added again afterwards. That needs no datastore: its connection may depend on these very routes.

use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use tortie_dataplane::{Condition, Reason};
use tortie_hcn::{Adapter, IpHelper, IpRoute};
use tracing::{info, warn};

use crate::adapter::usable;
use crate::node_routes::is_of_agent;

/// How long complete routes are watched. Later, a missing one was removed by somebody who may.
const WATCHED: Duration = Duration::from_secs(600);
/// How often the routes are compared while some are missing, and afterwards.
const MISSING_EVERY: Duration = Duration::from_secs(1);
const COMPLETE_EVERY: Duration = Duration::from_secs(10);
/// How long missing routes are added. Then somebody has to decide whether they are still right.
const ADDED: Duration = Duration::from_secs(3_600);

/// The routes of an adapter before a switch took it over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    /// The adapter's name.
    adapter: String,
    /// Its addresses; the adapter that has one of them afterwards gets the routes.
    addresses: Vec<Ipv4Net>,
    routes: Vec<KeptRoute>,
}

/// A route, without the number of its adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct KeptRoute {
    destination: IpNet,
    next_hop: IpAddr,
    metric: u32,
}

/// What is missing.
#[derive(Debug, PartialEq, Eq)]
enum Missing {
    /// No adapter has the addresses again.
    Addresses,
    /// These routes.
    Routes(Vec<IpRoute>),
}

/// Keeps the routes of the adapter of the overlay network.
pub struct HostRoutes {
    ip: Arc<dyn IpHelper>,
    file: Option<PathBuf>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    kept: Option<Kept>,
    /// When they were first compared.
    compared: Option<Instant>,
    /// When the routes were first complete.
    complete: Option<Instant>,
    problem: Option<String>,
    notified: bool,
}

impl HostRoutes {
    /// The routes that an earlier process has kept in the file, if it did.
    pub fn new(ip: Arc<dyn IpHelper>, file: Option<PathBuf>) -> HostRoutes {
        let kept = file.as_deref().and_then(|file| match read(file) {
            Ok(kept) => kept,
            Err(error) => {
                warn!(file = %file.display(), %error, "the routes of the adapter cannot be read; compare them by hand");
                None
            }
        });
        let state = Mutex::new(State { kept, ..State::default() });
        HostRoutes { ip, file, state, changed: Condvar::new() }
    }

    /// Restores and watches the routes until the process ends, on a thread of its own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch(self: &Arc<Self>) -> io::Result<()> {
        let own = Arc::downgrade(self);
        self.ip.watch(Box::new(move || {
            if let Some(own) = own.upgrade() {
                own.state().notified = true;
                own.changed.notify_all();
            }
        }));
        let own = Arc::clone(self);
        std::thread::Builder::new().name("adapter-routes".into()).spawn(move || own.run()).map(drop)
    }

    fn run(&self) {
        loop {
            let interval = match self.restore(Instant::now()) {
                Some(_) => MISSING_EVERY,
                None => COMPLETE_EVERY,
            };
            let mut state = self.state();
            if !std::mem::take(&mut state.notified) {
                let waited = self.changed.wait_timeout(state, interval);
                waited.unwrap_or_else(PoisonError::into_inner).0.notified = false;
            }
        }
    }

    /// Keeps the routes of an adapter, and those that it had before and that are not back yet. Returns why that is not possible;
    /// then nothing may happen to it.
    pub(crate) fn keep(&self, adapter: &Adapter) -> Result<(), String> {
        let all = self.ip.routes().map_err(|error| error.to_string())?;
        let mut kept = kept(adapter, &all);
        if let State { kept: Some(earlier), complete: None, .. } = &*self.state() {
            kept.add(earlier);
        }
        if let Some(file) = &self.file {
            write(file, &kept).map_err(|error| {
                format!("the routes of {} cannot be kept in {}: {error}", adapter.name, file.display())
            })?;
        }
        info!(adapter = adapter.name, routes = kept.routes.len(), "the adapter's routes are kept");
        *self.state() = State { kept: Some(kept), notified: true, ..State::default() };
        self.changed.notify_all();
        Ok(())
    }

    /// Adds the routes that are missing. Returns what is still missing.
    pub fn restore(&self, now: Instant) -> Option<Condition> {
        let mut state = self.state();
        let kept = state.kept.as_ref()?;
        if state.complete.is_some_and(|since| now >= since + WATCHED) {
            if let Some(Err(error)) = self.file.as_deref().map(fs::remove_file) {
                warn!(%error, "the file with the adapter's routes stays");
            }
            *state = State::default();
            return None;
        }
        let is_late = now >= state.compared.unwrap_or(now) + ADDED && state.complete.is_none();
        let result = self.add_missing(kept, is_late);
        if let Err(problem) = &result
            && state.problem.as_ref() != Some(problem)
        {
            warn!(problem, "the adapter's routes are not complete");
        }
        state.problem = result.err();
        state.compared.get_or_insert(now);
        if state.problem.is_none() {
            state.complete.get_or_insert(now);
        }
        drop(state);
        self.condition()
    }

    /// What was missing when last compared.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let problem = self.state().problem.clone()?;
        Some(Condition::new(Reason::HostRouteMissing, problem))
    }

    /// Adds what is missing, unless it is too late for that. Returns what is still missing.
    fn add_missing(&self, kept: &Kept, is_late: bool) -> Result<(), String> {
        let read = || Ok::<_, tortie_hcn::IpHelperError>((self.ip.adapters()?, self.ip.routes()?));
        let (adapters, routes) = read().map_err(|error| error.to_string())?;
        let routes = match missing(kept, &adapters, &routes) {
            Missing::Routes(routes) => routes,
            Missing::Addresses => {
                return Err(format!(
                    "no adapter has the addresses of {} again: {:?}",
                    kept.adapter, kept.addresses
                ));
            }
        };
        let mut refused = Vec::new();
        for route in routes {
            let IpRoute { destination, next_hop, .. } = &route;
            let name = || format!("the route to {destination} by {next_hop} of {}", kept.adapter);
            if is_late {
                refused.push(format!("{} is not back, and is no longer tried: {}", name(), self.remedy()));
                continue;
            }
            match self.ip.add_route(&route) {
                Ok(()) => info!(%destination, %next_hop, "the adapter's route is back"),
                Err(error) => refused.push(format!("{}: {error}", name())),
            }
        }
        if refused.is_empty() { Ok(()) } else { Err(refused.join("; ")) }
    }

    fn remedy(&self) -> String {
        let file =
            self.file.as_deref().map_or_else(String::new, |file| format!("delete {} and ", file.display()));
        format!("add it, or {file}restart the agent")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Adds what an earlier snapshot of the same adapter has besides.
    fn add(&mut self, earlier: &Kept) {
        let is_same = |own: &Ipv4Net| earlier.addresses.iter().any(|it| it.addr() == own.addr());
        if !self.addresses.iter().any(is_same) {
            return;
        }
        let is_known = |route: &&KeptRoute| {
            self.routes
                .iter()
                .any(|own| (own.destination, own.next_hop) == (route.destination, route.next_hop))
        };
        let more: Vec<KeptRoute> = earlier.routes.iter().filter(|route| !is_known(route)).cloned().collect();
        self.routes.extend(more);
    }
}

/// What to keep of an adapter: the routes that the system does not make by itself.
fn kept(adapter: &Adapter, routes: &[IpRoute]) -> Kept {
    let is_made = |route: &&IpRoute| {
        let net = route.destination;
        let is_subnet =
            adapter.addresses.iter().any(|own| own.trunc() == net || IpNet::from(own.addr()) == net);
        let is_everybody = match net.addr() {
            IpAddr::V4(address) => address.is_multicast() || address == Ipv4Addr::BROADCAST,
            IpAddr::V6(address) => address.is_multicast() || address.is_unicast_link_local(),
        };
        // The agent makes its own routes again.
        route.is_own
            || is_of_agent(route.metric)
            || is_everybody
            || (is_subnet && route.next_hop.is_unspecified())
    };
    let of_adapter = routes.iter().filter(|route| route.interface == adapter.index && !is_made(route));
    Kept {
        adapter: adapter.name.clone(),
        addresses: usable(adapter).collect(),
        routes: of_adapter
            .map(|IpRoute { interface: _, destination, next_hop, metric, is_own: _ }| KeptRoute {
                destination: *destination,
                next_hop: *next_hop,
                metric: *metric,
            })
            .collect(),
    }
}

/// Compares the machine with what was kept. A route of any adapter to the same next hop counts.
fn missing(kept: &Kept, adapters: &[Adapter], routes: &[IpRoute]) -> Missing {
    let has_address = |adapter: &&Adapter| {
        usable(adapter).any(|own| kept.addresses.iter().any(|it| it.addr() == own.addr()))
    };
    let Some(carrier) = adapters.iter().find(has_address) else { return Missing::Addresses };
    let is_there = |wanted: &&KeptRoute| {
        let is_same = |route: &IpRoute| {
            (route.destination, route.next_hop) == (wanted.destination, wanted.next_hop)
                && (!wanted.next_hop.is_unspecified() || route.interface == carrier.index)
        };
        routes.iter().any(is_same)
    };
    let gone = kept.routes.iter().filter(|wanted| !is_there(wanted));
    // Those on the link first: a next hop may depend on one.
    let (on_link, others): (Vec<&KeptRoute>, Vec<_>) =
        gone.partition(|route| route.next_hop.is_unspecified());
    let back = |route: &KeptRoute| IpRoute {
        interface: carrier.index,
        destination: route.destination,
        next_hop: route.next_hop,
        metric: route.metric,
        is_own: false,
    };
    Missing::Routes(on_link.into_iter().chain(others).map(back).collect())
}

fn read(file: &Path) -> io::Result<Option<Kept>> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the file completely, or not at all.
fn write(file: &Path, kept: &Kept) -> io::Result<()> {
    let unfinished = file.with_extension("unfinished");
    let mut writer = fs::File::create(&unfinished)?;
    writer.write_all(&serde_json::to_vec_pretty(kept)?)?;
    writer.sync_all()?;
    fs::rename(unfinished, file)
}
