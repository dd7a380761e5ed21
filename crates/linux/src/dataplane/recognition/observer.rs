//! Reads from the kernel and the container runtime what tells whose an interface is, and watches it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::inotify;
use tortie_cni::results::{self, KeptResult};
use tortie_dataplane::{Condition, EndpointId, NodeState};
use tortie_kernel::route::{RouteSocket, RouteWatch};

use super::{Observed, Problem, Recognised, further_closed, prefix_of_node};
use crate::dataplane::PolicyOnly;
use crate::{Error, Result};

/// How long nothing is reported about a pod whose interface has vanished: when a pod ends, its interface goes before its object.
const ENDING: Duration = Duration::from_secs(30);
/// How often the watch of the results looks whether it can begin, and whether anybody listens.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The pods' interfaces as of the last look, and how to look again.
#[derive(Debug)]
pub(in crate::dataplane) struct Observer {
    config: PolicyOnly,
    socket: RouteSocket,
    recognised: Recognised,
    has_looked: bool,
    /// The results when they could last be read, and why they cannot be read now.
    results: Vec<KeptResult>,
    unreadable: Option<Error>,
    /// The pods whose interfaces have vanished, with the time.
    vanished: BTreeMap<EndpointId, Instant>,
    /// Whether something has changed since the last look.
    changed: Arc<AtomicBool>,
    routes_watch: Option<RouteWatch>,
    /// The watch of the results ends with this.
    results_watch: Option<Arc<()>>,
}

impl Observer {
    /// Opens a connection in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel refuses it, or a prefix of pods' interfaces is that of an interface of the node.
    pub(in crate::dataplane) fn open(config: PolicyOnly) -> Result<Self> {
        let mut socket = RouteSocket::open()?;
        let routes = socket.routes()?;
        if let Some((prefix, interface)) = prefix_of_node(&config.prefixes, socket.links()?, &routes) {
            return Err(Error::PrefixOfNode { prefix, interface });
        }
        Ok(Self {
            config,
            socket,
            recognised: Recognised::default(),
            has_looked: false,
            results: Vec::new(),
            unreadable: None,
            vanished: BTreeMap::new(),
            changed: Arc::new(AtomicBool::new(true)),
            routes_watch: None,
            results_watch: None,
        })
    }

    /// Calls `on_change` when links, routes or results of plugins have changed.
    pub(in crate::dataplane) fn watch(&mut self, on_change: Arc<dyn Fn() + Send + Sync>) {
        let changed = self.changed.clone();
        let note = move || {
            changed.store(true, Ordering::SeqCst);
            on_change();
        };
        let note = Arc::new(note);
        let of_routes = note.clone();
        self.routes_watch = RouteWatch::start(move || of_routes())
            .inspect_err(|error| tracing::error!(%error, "cannot watch links and routes; Tortie notices changes at the next resync"))
            .ok();
        let alive = Arc::new(());
        let (weak, folder) = (Arc::downgrade(&alive), self.config.results.clone());
        let begun = thread::Builder::new()
            .name("results-watch".to_owned())
            .spawn(move || watch_folder(&folder, &*note, &weak));
        match begun {
            Ok(_) => self.results_watch = Some(alive),
            Err(error) => {
                tracing::error!(%error, "cannot watch the results of CNI plugins; Tortie notices changes at the next resync")
            }
        }
    }

    /// Looks again, if anything has changed since the last look or `is_due`. Returns what was known before, if it differs now.
    ///
    /// Results that cannot be read change nothing: those that were read before count. If none were, the table of an earlier process
    /// stays (`has_table`). Without such a table, all interfaces to which routes lead are closed unless their names prove whose they are.
    pub(in crate::dataplane) fn look(
        &mut self,
        state: &NodeState,
        is_due: bool,
        has_table: bool,
        now: Instant,
    ) -> Result<Option<Recognised>> {
        if !self.changed.swap(false, Ordering::SeqCst) && !is_due && self.unreadable.is_none() {
            return Ok(None);
        }
        let observed =
            self.observe(state, has_table).inspect_err(|_| self.changed.store(true, Ordering::SeqCst))?;
        self.has_looked = true;
        let recognised = observed.recognise(&state.endpoints, &self.config);
        self.results = observed.results;
        self.vanished.retain(|id, _| recognised.problems.contains_key(id));
        for (id, problem) in &recognised.problems {
            let was_known = self.recognised.interfaces.contains_key(id);
            if was_known && matches!(problem, Problem::NoRoute { closed: None, .. }) {
                self.vanished.entry(id.clone()).or_insert(now);
            }
        }
        let before = std::mem::replace(&mut self.recognised, recognised);
        Ok((before != self.recognised).then_some(before))
    }

    fn observe(&mut self, state: &NodeState, has_table: bool) -> Result<Observed> {
        // A result names an interface that exists, so the results come first.
        let folder = &self.config.results;
        let read = results::read(folder)
            .map_err(|source| Error::CniResults { folder: folder.display().to_string(), source });
        let results = match read {
            Ok(results) => {
                self.unreadable = None;
                results
            }
            Err(error) if has_table && !self.has_looked => return Err(error),
            Err(error) => {
                self.unreadable = Some(error);
                self.results.clone()
            }
        };
        // A route names a link that exists, so the links are read last.
        let (addresses, routes) = (self.socket.addresses()?, self.socket.routes()?);
        let own = state.node.iter().flat_map(|node| node.ends.values());
        let own: BTreeSet<IpAddr> = own.map(|end| end.address).collect();
        let adapters = addresses.iter().filter(|at| own.contains(&at.address)).map(|at| at.link).collect();
        Ok(Observed { adapters, ..Observed::new(self.socket.links()?, &routes, results) })
    }

    /// Why the results cannot be read.
    pub(in crate::dataplane) fn unreadable(&self) -> Option<&Error> {
        self.unreadable.as_ref()
    }

    /// Whether a look has succeeded.
    pub(in crate::dataplane) fn has_looked(&self) -> bool {
        self.has_looked
    }

    pub(in crate::dataplane) fn recognised(&self) -> &Recognised {
        &self.recognised
    }

    /// The conditions of pods without a known interface, and of those with several.
    pub(in crate::dataplane) fn conditions(&self, now: Instant) -> BTreeMap<EndpointId, Condition> {
        let is_ending = |id: &EndpointId| self.vanished.get(id).is_some_and(|since| now < *since + ENDING);
        let Recognised { interfaces, further, problems, .. } = &self.recognised;
        let unknown = problems.iter().filter(|(id, _)| !is_ending(id));
        let unknown = unknown.map(|(id, problem)| (id.clone(), problem.condition(&self.config.results)));
        let several = further
            .iter()
            .filter_map(|(id, further)| Some((id.clone(), further_closed(interfaces.get(id)?, further))));
        unknown.chain(several).collect()
    }
}

/// Watches a folder, which may not exist yet.
fn watch_folder(folder: &Path, note: &dyn Fn(), alive: &Weak<()>) {
    while alive.strong_count() > 0 {
        match begin(folder) {
            Some(watch) => {
                // Files may have come before the watch.
                note();
                while alive.strong_count() > 0 && read(&watch, note) {}
            }
            None => thread::sleep(LOOK_INTERVAL),
        }
    }
}

fn begin(folder: &Path) -> Option<OwnedFd> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).ok()?;
    let events = inotify::WatchFlags::CLOSE_WRITE
        | inotify::WatchFlags::DELETE
        | inotify::WatchFlags::MOVED_TO
        | inotify::WatchFlags::DELETE_SELF
        | inotify::WatchFlags::MOVE_SELF
        | inotify::WatchFlags::ONLYDIR;
    inotify::add_watch(&watch, folder, events).ok()?;
    Some(watch)
}

/// Waits a while for events. Returns whether the folder is still watched.
fn read(watch: &OwnedFd, note: &dyn Fn()) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK_INTERVAL.subsec_nanos()) };
    let mut polled = [PollFd::new(watch, PollFlags::IN)];
    if !matches!(poll(&mut polled, Some(&patience)), Ok(1..)) {
        return true;
    }
    let mut space = [std::mem::MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(watch, &mut space);
    let mut is_watched = true;
    while let Ok(event) = events.next() {
        is_watched &= !event.events().intersects(inotify::ReadFlags::IGNORED | inotify::ReadFlags::MOVE_SELF);
    }
    note();
    is_watched
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The folder may come later, and may be replaced.
    #[test]
    fn results_that_come_and_go_are_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("results");
        let (send, noted) = mpsc::channel();
        let alive = Arc::new(());
        let (weak, watched) = (Arc::downgrade(&alive), folder.clone());
        let watch =
            thread::spawn(move || watch_folder(&watched, &|| send.send(()).unwrap_or_default(), &weak));
        let is_noted = |what: &str| {
            assert!(noted.recv_timeout(Duration::from_secs(10)).is_ok(), "{what}");
            while noted.recv_timeout(2 * LOOK_INTERVAL).is_ok() {}
        };
        assert!(noted.recv_timeout(2 * LOOK_INTERVAL).is_err(), "there is no folder");
        for round in ["first", "second"] {
            std::fs::create_dir(&folder).unwrap();
            is_noted(round);
            std::fs::write(folder.join("one"), "x").unwrap();
            is_noted("a file");
            std::fs::write(folder.join("one"), "y").unwrap();
            is_noted("another content");
            std::fs::remove_file(folder.join("one")).unwrap();
            is_noted("the end of a file");
            std::fs::remove_dir(&folder).unwrap();
            is_noted("the end of the folder");
        }
        drop(alive);
        watch.join().unwrap();
    }
}
