//! Keeps the rules of the node's firewall that the agent needs: the senders of an [`Opening`] may send to its port, and nobody else.
//!
//! The rule exists only while there are senders. Addresses in a row are one range, and a long list becomes several rules. The calls are
//! made on a thread of their own, because the firewall's service may be slow, or never answer.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Reason};
use tortie_hcn::{Firewall, FirewallError, LocalRules};
use tracing::{info, warn};

use crate::firewall_rules::{Opening, Step, Wanted};

/// How long the firewall may take before that is reported.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the rules are compared: somebody may have changed them.
const EVERY: Duration = Duration::from_secs(300);
/// How often, while something is wrong.
const AGAIN: Duration = Duration::from_secs(30);
/// The program that receives VXLAN, as rules name it.
const KERNEL: &str = "System";

/// The openings of a node's firewall.
#[derive(Clone)]
pub struct FirewallOpenings {
    /// For VXLAN of the other nodes.
    pub vxlan: Arc<FirewallOpening>,
    /// For connections of BGP peers.
    pub bgp: Arc<FirewallOpening>,
}

impl FirewallOpenings {
    /// The openings of this firewall for an agent that is this program. Nothing happens until [`watch`](Self::watch).
    pub fn new(firewall: Arc<dyn Firewall>, program: &str) -> FirewallOpenings {
        let opening =
            |opening, program: &str| Arc::new(FirewallOpening::new(firewall.clone(), opening, program));
        FirewallOpenings { vxlan: opening(Opening::Vxlan, KERNEL), bgp: opening(Opening::Bgp, program) }
    }

    /// Keeps the rules until the process ends, each on a thread of its own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch(&self) -> io::Result<()> {
        self.vxlan.watch()?;
        self.bgp.watch()
    }
}

/// Keeps the rule of one opening.
pub struct FirewallOpening {
    firewall: Arc<dyn Firewall>,
    opening: Opening,
    /// The program that receives, as rules name it.
    program: String,
    state: Mutex<RuleState>,
    changed: Condvar,
}

#[derive(Default)]
struct RuleState {
    /// The port, and the addresses that may send to it; `None`: not known yet.
    admitted: Option<(u16, BTreeSet<IpAddr>)>,
    changed: bool,
    problem: Option<String>,
    /// When the comparison began that is under way.
    since: Option<Instant>,
}

impl FirewallOpening {
    fn new(firewall: Arc<dyn Firewall>, opening: Opening, program: &str) -> FirewallOpening {
        let (program, state, changed) = (program.to_owned(), Mutex::default(), Condvar::new());
        FirewallOpening { firewall, opening, program, state, changed }
    }

    /// Keeps the rule until the process ends, on a thread of its own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch(self: &Arc<Self>) -> io::Result<()> {
        let own = Arc::clone(self);
        std::thread::Builder::new().name("firewall".into()).spawn(move || own.run()).map(drop)
    }

    fn run(&self) {
        loop {
            let interval = if self.reconcile().is_some() { AGAIN } else { EVERY };
            let state = self.state();
            if !state.changed {
                drop(self.changed.wait_timeout(state, interval));
            }
        }
    }

    /// Lets these addresses in, to this port, and nobody else. Until the first call, the rules stay as an earlier process has left them.
    pub fn admit(&self, port: u16, senders: BTreeSet<IpAddr>) {
        let admitted = Some((port, senders));
        let mut state = self.state();
        if state.admitted != admitted {
            (state.admitted, state.changed) = (admitted, true);
            self.changed.notify_all();
        }
    }

    /// Lets nobody in.
    pub fn admit_nobody(&self) {
        self.admit(0, BTreeSet::new());
    }

    /// Makes the firewall's rules as they should be. Returns what is wrong with them.
    pub fn reconcile(&self) -> Option<Condition> {
        let (port, senders) = {
            let mut state = self.state();
            state.changed = false;
            let admitted = state.admitted.clone()?;
            state.since = Some(Instant::now());
            admitted
        };
        let wanted = Wanted { opening: self.opening, program: &self.program, port, senders: &senders };
        let problem = match self.try_to(&wanted) {
            Ok(problem) => problem,
            // Wine has none, and lets everything in.
            Err(FirewallError::None) => None,
            Err(error) => Some(remedy(&error, &wanted)),
        };
        let mut state = self.state();
        if let Some(problem) = problem.as_ref().filter(|problem| state.problem.as_ref() != Some(problem)) {
            warn!(problem, rule = self.opening.rule(), "the node's firewall is not as it should be");
        }
        (state.problem, state.since) = (problem, None);
        drop(state);
        self.condition(Instant::now())
    }

    /// What was wrong when last compared; or that a comparison does not end.
    pub(crate) fn condition(&self, now: Instant) -> Option<Condition> {
        let state = self.state();
        let late =
            state.since.map(|since| now.saturating_duration_since(since)).filter(|late| *late >= PATIENCE);
        let problem = match late {
            Some(late) => format!(
                "the Windows firewall has not answered for {} seconds, so the rule {:?} may be missing or old: restart the service \
                 mpssvc, and then the agent if it stays so",
                late.as_secs(),
                self.opening.rule()
            ),
            None => state.problem.clone()?,
        };
        Some(Condition::new(Reason::FirewallNotOpen, problem))
    }

    fn carry_out(&self, step: &Step, wanted: &Wanted<'_>) -> Result<(), FirewallError> {
        match step {
            Step::Set(rule) => self.firewall.set(rule)?,
            Step::Replace(rule) => {
                let rules = self.firewall.rules()?;
                let same = rules.iter().filter(|other| other.name == rule.name);
                same.map(|other| &*other.name).try_for_each(|name| self.firewall.remove(name))?;
                self.firewall.set(rule)?;
            }
            Step::Remove(name, count) => {
                (0..*count).try_for_each(|_| self.firewall.remove(name))?;
                info!(rule = name, "the firewall's rule is not needed");
                return Ok(());
            }
        }
        let (rule, port) = (self.opening.rule(), wanted.shown_port());
        info!(rule, port, senders = wanted.senders.len(), "the firewall lets {} in", self.opening.senders());
        Ok(())
    }

    fn try_to(&self, wanted: &Wanted<'_>) -> Result<Option<String>, FirewallError> {
        let rules = self.firewall.rules()?;
        wanted.steps(&rules).iter().try_for_each(|step| self.carry_out(step, wanted))?;
        if wanted.senders.is_empty() {
            return Ok(None);
        }
        let port = wanted.shown_port();
        if let Some(blocking) = wanted.blocking(&rules) {
            return Ok(Some(format!(
                "the firewall's rule {blocking:?} blocks {port} before any rule allows it: disable it, or restrict it"
            )));
        }
        let is_ours_needed = !wanted.is_open(&rules);
        let (rule, senders) = (self.opening.rule(), self.opening.senders());
        Ok(match self.firewall.local_rules()? {
            LocalRules::AllBlocked => Some(format!(
                "the firewall blocks everything that comes in, whatever its rules: end that mode, or allow {port}"
            )),
            LocalRules::GroupPolicy if is_ours_needed => Some(format!(
                "a group policy governs the firewall, and may ignore the rule {rule:?}: let the policy allow {port} from {senders}"
            )),
            LocalRules::GroupPolicy | LocalRules::Apply => None,
        })
    }

    fn state(&self) -> MutexGuard<'_, RuleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remedy(error: &FirewallError, wanted: &Wanted<'_>) -> String {
    const SERVICE: &str = "the service mpssvc must run, and the agent must be an administrator";
    let (rule, senders) = (wanted.opening.rule(), wanted.opening.senders());
    match wanted.senders.is_empty() {
        true => format!("{error}; {SERVICE}; until then, a rule {rule:?} may be left that nobody needs"),
        false => format!(
            "{error}; {SERVICE}; or allow {} from {senders} by a rule of your own",
            wanted.shown_port()
        ),
    }
}
