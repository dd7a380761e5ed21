//! Routes of the adapter that a virtual switch takes over.
//!
//! Making the first network moves the adapter's addresses to an adapter of the switch, and the system forgets routes of the
//! former, such as that of the cloud's metadata service (docs/hns.md, Networks). So they are kept before, in a file, too,
//! and added again afterwards. That needs no datastore: its connection may depend on these very routes.
//!
//! HNS may also forget the network, or somebody may remove it, and the switch goes without the agent's knowledge. So the routes stay
//! kept while the network exists, as they were at the last check, and are added once the next network is there.

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

use crate::adapter::{is_virtual, usable};
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
    /// Whether the time has passed in which missing routes are added. From then on, a missing one was removed by somebody who may.
    #[serde(default)]
    is_settled: bool,
}

/// A route, without the number of its adapter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

/// What the machine lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gap {
    Addresses,
    Routes,
}

/// Why the routes are not complete. Without a gap, nothing is known.
#[derive(Debug)]
struct Incomplete {
    gap: Option<Gap>,
    problem: String,
}

/// For what the routes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeepFor {
    /// A network is made. If the routes were complete with an earlier one, that has gone without the agent's doing.
    Creation,
    /// A network that is there is deleted.
    Deletion,
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
    /// Whether the network is there, so that its switch has taken the adapter over. Before, nothing can be missing.
    taken_over: bool,
    /// What is missing, and since when.
    missing: Option<(Gap, Instant)>,
    /// Since when the routes have been complete.
    complete: Option<Instant>,
    problem: Option<String>,
    notified: bool,
}

impl State {
    /// What has been missing for so long that nothing is added any more.
    fn late(&self, now: Instant) -> Option<Gap> {
        self.missing.filter(|(_, since)| now >= *since + ADDED).map(|(gap, _)| gap)
    }

    /// Records a comparison.
    fn compared(&mut self, result: Result<(), Incomplete>, now: Instant) {
        match result {
            Ok(()) => {
                (self.missing, self.problem) = (None, None);
                if self.taken_over {
                    self.complete.get_or_insert(now);
                }
            }
            Err(Incomplete { gap, problem }) => {
                if let Some(gap) = gap {
                    self.complete = None;
                    self.missing = self.missing.filter(|(known, _)| *known == gap).or(Some((gap, now)));
                }
                self.problem = Some(problem);
            }
        }
    }
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
            let now = Instant::now();
            let is_complete = self.restore(now).is_none();
            let mut state = self.state();
            let interval = match is_complete || state.late(now).is_some() {
                true => COMPLETE_EVERY,
                false => MISSING_EVERY,
            };
            if !std::mem::take(&mut state.notified) {
                let waited = self.changed.wait_timeout(state, interval);
                waited.unwrap_or_else(PoisonError::into_inner).0.notified = false;
            }
        }
    }

    /// Keeps the routes of an adapter, and those that it had before and that are not back yet. Returns why that is not possible;
    /// then nothing may happen to it.
    pub(crate) fn keep(&self, adapter: &Adapter, keep_for: KeepFor) -> Result<(), String> {
        let all = self.ip.routes().map_err(|error| error.to_string())?;
        let mut kept = kept(adapter, &all);
        if let State { kept: Some(earlier), complete, .. } = &*self.state() {
            match (earlier.is_settled || complete.is_some(), keep_for) {
                (false, _) => kept.add(earlier, |_| true),
                (true, KeepFor::Creation) => {
                    // They may be old. What leads there now is newer.
                    let is_new = |destination: &IpNet| {
                        let mut own = all.iter().filter(|route| route.interface == adapter.index);
                        !own.any(|route| route.destination == *destination)
                    };
                    kept.add(earlier, is_new);
                }
                (true, KeepFor::Deletion) => {}
            }
        }
        self.save(&kept).map_err(|problem| format!("the routes of {} {problem}", adapter.name))?;
        info!(adapter = adapter.name, routes = kept.routes.len(), "the adapter's routes are kept");
        *self.state() = State { kept: Some(kept), notified: true, ..State::default() };
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the network is there. Once the routes have been complete for a while, those of `carrier` now are the ones to keep:
    /// the adapter of the network's switch, if it is known.
    pub(crate) fn network_is_there(&self, carrier: Option<&Adapter>) {
        {
            let mut state = self.state();
            if state.kept.as_ref().is_some_and(|kept| !kept.is_settled) {
                if !state.taken_over {
                    (state.taken_over, state.notified) = (true, true);
                    self.changed.notify_all();
                }
                return;
            }
        }
        // While a switch goes, its addresses are on the physical adapter, without the routes.
        let Some(carrier) = carrier.filter(|adapter| is_virtual(&adapter.name)) else { return };
        let Ok(routes) = self.ip.routes() else { return };
        let fresh = Kept { is_settled: true, ..kept(carrier, &routes) };
        let mut state = self.state();
        if state.kept.as_ref() == Some(&fresh) || fresh.addresses.is_empty() {
            return;
        }
        if let Err(problem) = self.save(&fresh) {
            warn!(problem, "the routes of the adapter of the network are known to this process only");
        }
        *state = State { kept: Some(fresh), ..State::default() };
    }

    fn save(&self, kept: &Kept) -> Result<(), String> {
        let Some(file) = &self.file else { return Ok(()) };
        write(file, kept).map_err(|error| format!("cannot be kept in {}: {error}", file.display()))
    }

    /// Adds the routes that are missing. Returns what is still missing.
    pub fn restore(&self, now: Instant) -> Option<Condition> {
        let mut state = self.state();
        let kept = state.kept.as_ref().filter(|kept| !kept.is_settled)?;
        if state.complete.is_some_and(|since| now >= since + WATCHED) {
            let settled = Kept { is_settled: true, ..kept.clone() };
            if let Err(problem) = self.save(&settled) {
                warn!(problem, "the next agent watches the adapter's routes once more");
            }
            *state = State { kept: Some(settled), ..State::default() };
            return None;
        }
        let result = self.add_missing(kept, state.late(now));
        if let Err(Incomplete { problem, .. }) = &result
            && state.problem.as_ref() != Some(problem)
        {
            warn!(problem, "the adapter's routes are not complete");
        }
        state.compared(result, now);
        drop(state);
        self.condition()
    }

    /// What was missing when last compared.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let problem = self.state().problem.clone()?;
        Some(Condition::new(Reason::HostRouteMissing, problem))
    }

    /// Adds what is missing, unless it is too late for that. Returns what is still missing.
    fn add_missing(&self, kept: &Kept, late: Option<Gap>) -> Result<(), Incomplete> {
        let read = || Ok::<_, tortie_hcn::IpHelperError>((self.ip.adapters()?, self.ip.routes()?));
        let unknown = |error: tortie_hcn::IpHelperError| Incomplete { gap: None, problem: error.to_string() };
        let (adapters, routes) = read().map_err(unknown)?;
        let routes = match missing(kept, &adapters, &routes) {
            Missing::Routes(routes) => routes,
            Missing::Addresses => {
                let Kept { adapter, addresses, .. } = kept;
                let remedy = match late {
                    Some(Gap::Addresses) => {
                        format!(
                            "; if it has other ones for good, add its routes by hand, and {}",
                            self.restart()
                        )
                    }
                    _ => String::new(),
                };
                let problem =
                    format!("no adapter has the addresses of {adapter} again: {addresses:?}{remedy}");
                return Err(Incomplete { gap: Some(Gap::Addresses), problem });
            }
        };
        let mut refused = Vec::new();
        for route in routes {
            let IpRoute { destination, next_hop, .. } = &route;
            let name = || format!("the route to {destination} by {next_hop} of {}", kept.adapter);
            if late == Some(Gap::Routes) {
                let remedy = self.restart();
                refused.push(format!("{} is not back, and is no longer tried: add it, or {remedy}", name()));
                continue;
            }
            match self.ip.add_route(&route) {
                Ok(()) => info!(%destination, %next_hop, "the adapter's route is back"),
                Err(error) => refused.push(format!("{}: {error}", name())),
            }
        }
        match refused.is_empty() {
            true => Ok(()),
            false => Err(Incomplete { gap: Some(Gap::Routes), problem: refused.join("; ") }),
        }
    }

    /// How somebody makes the agent forget the routes.
    fn restart(&self) -> String {
        let file =
            self.file.as_deref().map_or_else(String::new, |file| format!("delete {} and ", file.display()));
        format!("{file}restart the agent")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Adds what an earlier snapshot of the same adapter has besides, to such destinations.
    fn add(&mut self, earlier: &Kept, is_wanted: impl Fn(&IpNet) -> bool) {
        let is_same = |own: &Ipv4Net| earlier.addresses.iter().any(|it| it.addr() == own.addr());
        if !self.addresses.iter().any(is_same) {
            return;
        }
        let is_known = |route: &&KeptRoute| {
            self.routes
                .iter()
                .any(|own| (own.destination, own.next_hop) == (route.destination, route.next_hop))
        };
        let more = earlier.routes.iter().filter(|route| is_wanted(&route.destination) && !is_known(route));
        let more: Vec<KeptRoute> = more.cloned().collect();
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
    let bare = |IpRoute { interface: _, destination, next_hop, metric, is_own: _ }: &IpRoute| KeptRoute {
        destination: *destination,
        next_hop: *next_hop,
        metric: *metric,
    };
    let mut routes: Vec<KeptRoute> = of_adapter.map(bare).collect();
    routes.sort();
    Kept { adapter: adapter.name.clone(), addresses: usable(adapter).collect(), routes, is_settled: false }
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
