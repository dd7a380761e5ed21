//! The rule of the node's firewall for VXLAN: the other nodes may send to UDP port 4789, and nobody else.
//!
//! The rule exists only while there are other nodes. Addresses in a row are one range, and a list that is longer than
//! [`MOST_PARTS`] becomes several rules. The calls are made on a thread of their own, because the firewall's service may be slow, or never
//! answer.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use tortie_dataplane::{Condition, Reason};
use tortie_hcn::{Firewall, FirewallError, FirewallRule, LocalRules};
use tracing::{info, warn};

use crate::VXLAN_PORT;

/// The rule's name. Further rules have a number behind it.
pub const VXLAN_RULE: &str = "Tortie VXLAN";

/// The most addresses and ranges of one rule. No source names the firewall's own limit.
const MOST_PARTS: usize = 1_000;
/// How long the firewall may take before that is reported.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the rules are compared: somebody may have changed them.
const EVERY: Duration = Duration::from_secs(300);
/// How often, while something is wrong.
const AGAIN: Duration = Duration::from_secs(30);
/// All profiles there are. The firewall may return these, or all bits.
const PROFILES: i32 = 7;
const UDP: i32 = 17;
const ANY_PROTOCOL: i32 = 256;
/// The program that receives VXLAN, as rules name it.
const KERNEL: &str = "System";

/// Keeps the rule.
pub struct VxlanRule {
    firewall: Arc<dyn Firewall>,
    state: Mutex<RuleState>,
    changed: Condvar,
}

#[derive(Default)]
struct RuleState {
    /// The addresses of the other nodes; `None`: not known yet.
    nodes: Option<BTreeSet<Ipv4Addr>>,
    changed: bool,
    problem: Option<String>,
    /// When the comparison began that is under way.
    since: Option<Instant>,
}

/// A change of the rules.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Set(FirewallRule),
    /// Rules of this name go, and then it is set.
    Replace(FirewallRule),
    /// So many rules of this name go.
    Remove(String, usize),
}

impl VxlanRule {
    /// The rule of this firewall. Nothing happens until [`watch`](Self::watch), or [`reconcile`](Self::reconcile).
    pub fn new(firewall: Arc<dyn Firewall>) -> VxlanRule {
        VxlanRule { firewall, state: Mutex::default(), changed: Condvar::new() }
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

    /// Tells the addresses of the other nodes.
    pub(crate) fn want(&self, nodes: BTreeSet<Ipv4Addr>) {
        let mut state = self.state();
        if state.nodes.as_ref() != Some(&nodes) {
            (state.nodes, state.changed) = (Some(nodes), true);
            self.changed.notify_all();
        }
    }

    /// Makes the firewall's rules as they should be. Returns what is wrong with them.
    pub fn reconcile(&self) -> Option<Condition> {
        let nodes = {
            let mut state = self.state();
            state.changed = false;
            let nodes = state.nodes.clone()?;
            state.since = Some(Instant::now());
            nodes
        };
        let problem = match self.try_to(&nodes) {
            Ok(problem) => problem,
            // Wine has none, and lets everything in.
            Err(FirewallError::None) => None,
            Err(error) => Some(remedy(&error)),
        };
        let mut state = self.state();
        if let Some(problem) = problem.as_ref().filter(|problem| state.problem.as_ref() != Some(problem)) {
            warn!(problem, "the node's firewall may drop packets of other nodes");
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
                "the Windows firewall has not answered for {} seconds, so the rule {VXLAN_RULE:?} may be missing or old: restart the \
                 service mpssvc, and then the agent if it stays so",
                late.as_secs()
            ),
            None => state.problem.clone()?,
        };
        Some(Condition::new(Reason::FirewallNotOpen, problem))
    }

    /// Removes the rules, for whoever removes Tortie. Returns whether there was one.
    ///
    /// # Errors
    /// The firewall cannot be read, or refuses it.
    pub fn remove(firewall: &dyn Firewall) -> Result<bool, FirewallError> {
        let rules = match firewall.rules() {
            Err(FirewallError::None) => Vec::new(),
            rules => rules?,
        };
        let ours: Vec<&FirewallRule> = rules.iter().filter(|rule| is_ours(&rule.name)).collect();
        ours.iter().try_for_each(|rule| firewall.remove(&rule.name))?;
        Ok(!ours.is_empty())
    }

    fn carry_out(&self, step: &Step, nodes: usize) -> Result<(), FirewallError> {
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
        info!(rule = VXLAN_RULE, nodes, "the firewall lets the other nodes' VXLAN in");
        Ok(())
    }

    fn try_to(&self, nodes: &BTreeSet<Ipv4Addr>) -> Result<Option<String>, FirewallError> {
        let rules = self.firewall.rules()?;
        steps(&rules, nodes).iter().try_for_each(|step| self.carry_out(step, nodes.len()))?;
        if nodes.is_empty() {
            return Ok(None);
        }
        if let Some(blocking) = blocking(&rules, nodes) {
            return Ok(Some(format!(
                "the firewall's rule {blocking:?} blocks UDP {VXLAN_PORT} before any rule allows it: disable it, or restrict it"
            )));
        }
        let is_ours_needed = !is_open(&rules, nodes);
        Ok(match self.firewall.local_rules()? {
            LocalRules::AllBlocked => Some(format!(
                "the firewall blocks everything that comes in, whatever its rules: end that mode, or allow UDP {VXLAN_PORT}"
            )),
            LocalRules::GroupPolicy if is_ours_needed => Some(format!(
                "a group policy governs the firewall, and may ignore the rule {VXLAN_RULE:?}: let the policy allow UDP {VXLAN_PORT} \
                 from the nodes"
            )),
            LocalRules::GroupPolicy | LocalRules::Apply => None,
        })
    }

    fn state(&self) -> MutexGuard<'_, RuleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remedy(error: &FirewallError) -> String {
    format!(
        "{error}; the service mpssvc must run, and the agent must be an administrator; or allow UDP {VXLAN_PORT} from the other nodes by \
         a rule of your own"
    )
}

/// Whether a rule has a name of Tortie's.
fn is_ours(name: &str) -> bool {
    match name.strip_prefix(VXLAN_RULE) {
        Some("") => true,
        Some(rest) => rest.strip_prefix(' ').is_some_and(|number| number.parse::<usize>().is_ok()),
        None => false,
    }
}

/// The changes that make the rules as they should be. Nodes that other rules get than before are in both meanwhile.
fn steps(rules: &[FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> Vec<Step> {
    let wanted = wanted(nodes);
    let changes = wanted.iter().filter_map(|rule| step(rules, rule));
    let mut changes: Vec<Step> = changes.collect();
    let parts = |rules: &mut dyn Iterator<Item = &FirewallRule>| -> usize {
        rules.map(|rule| rule.remote_addresses.split(',').count()).sum()
    };
    // A longer list moves nodes to later rules, and a shorter one to earlier rules: they get there first.
    if parts(&mut wanted.iter()) >= parts(&mut rules.iter().filter(|rule| is_ours(&rule.name))) {
        changes.reverse();
    }
    let is_wanted = |name: &str| wanted.iter().any(|rule| rule.name == name);
    let gone = rules.iter().map(|rule| &*rule.name).filter(|name| is_ours(name) && !is_wanted(name));
    let gone: BTreeSet<&str> = gone.collect();
    let count = |name: &str| rules.iter().filter(|rule| rule.name == name).count();
    changes.extend(gone.into_iter().map(|name| Step::Remove(name.to_owned(), count(name))));
    changes
}

/// The change that gives the rule of that name these members.
fn step(rules: &[FirewallRule], wanted: &FirewallRule) -> Option<Step> {
    let same: Vec<&FirewallRule> = rules.iter().filter(|rule| rule.name == wanted.name).collect();
    // A rule of others may have conditions that are not read (a user, a package, IPsec), so Tortie's is there whatever the others
    // are.
    match &same[..] {
        [] => Some(Step::Set(wanted.clone())),
        [rule] if is_as_wanted(rule, wanted) => None,
        [rule] if without_addresses(rule) == without_addresses(wanted) => Some(Step::Set(wanted.clone())),
        // Not every member can be changed back, and the firewall changes one of several with the same name.
        _ => Some(Step::Replace(wanted.clone())),
    }
}

/// The rules for these nodes. Without any, there is none: with an empty list of addresses, it would let everybody in.
fn wanted(nodes: &BTreeSet<Ipv4Addr>) -> Vec<FirewallRule> {
    let parts: Vec<String> = ranges(nodes)
        .into_iter()
        .map(|(from, to)| if from == to { from.to_string() } else { format!("{from}-{to}") })
        .collect();
    let anything = || "*".to_owned();
    let rule = |(index, parts): (usize, &[String])| {
        FirewallRule {
        name: if index == 0 { VXLAN_RULE.to_owned() } else { format!("{VXLAN_RULE} {}", index + 1) },
        description: "Packets of pods of other nodes. The agent of Tortie keeps this rule; `tortie windows cleanup` removes it.".to_owned(),
        is_enabled: true,
        is_inbound: true,
        allows: true,
        protocol: UDP,
        local_ports: VXLAN_PORT.to_string(),
        remote_ports: anything(),
        local_addresses: anything(),
        remote_addresses: parts.join(","),
        application: String::new(),
        service: String::new(),
        interface_types: "All".to_owned(),
        profiles: FirewallRule::ALL_PROFILES,
    }
    };
    parts.chunks(MOST_PARTS).enumerate().map(rule).collect()
}

/// The addresses, with those in a row as one range.
fn ranges(nodes: &BTreeSet<Ipv4Addr>) -> Vec<(Ipv4Addr, Ipv4Addr)> {
    let mut ranges: Vec<(Ipv4Addr, Ipv4Addr)> = Vec::new();
    for node in nodes {
        match ranges.last_mut() {
            Some((_, last)) if u32::from(*last).checked_add(1) == Some(u32::from(*node)) => *last = *node,
            _ => ranges.push((*node, *node)),
        }
    }
    ranges
}

fn without_addresses(rule: &FirewallRule) -> FirewallRule {
    FirewallRule { remote_addresses: String::new(), profiles: rule.profiles & PROFILES, ..rule.clone() }
}

/// Whether the rule is as it should be. The firewall writes addresses in its own way.
fn is_as_wanted(rule: &FirewallRule, wanted: &FirewallRule) -> bool {
    let listed = |rule: &FirewallRule| -> Option<BTreeSet<(Ipv4Addr, Ipv4Addr)>> {
        rule.remote_addresses.split(',').map(range).collect()
    };
    without_addresses(rule) == without_addresses(wanted)
        && listed(rule).is_some()
        && listed(rule) == listed(wanted)
}

/// Whether rules of others let VXLAN of all of these nodes in.
fn is_open(rules: &[FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> bool {
    let others =
        || rules.iter().filter(|rule| !is_ours(&rule.name) && rule.allows && is_for_all_of_vxlan(rule));
    nodes.iter().all(|node| others().any(|rule| covers(&rule.remote_addresses, *node)))
}

/// The name of a rule of others that blocks VXLAN of a node.
fn blocking<'a>(rules: &'a [FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> Option<&'a str> {
    let mut others = rules.iter().filter(|rule| !is_ours(&rule.name) && !rule.allows);
    // What a word such as `LocalSubnet` means is not known, so it may be a node.
    let is_from_node = |rule: &FirewallRule| {
        let has_word = rule.remote_addresses.split(',').any(|part| range(part).is_none());
        has_word || nodes.iter().any(|node| covers(&rule.remote_addresses, *node))
    };
    others.find(|rule| is_about_vxlan(rule) && is_from_node(rule)).map(|rule| &*rule.name)
}

/// Whether a rule in force is about packets to the port, of some profile, adapter or sender.
fn is_about_vxlan(rule: &FirewallRule) -> bool {
    let is_for_kernel = rule.application.is_empty() || rule.application.eq_ignore_ascii_case(KERNEL);
    let is_for_service = matches!(&*rule.service, "" | "*");
    rule.is_enabled
        && rule.is_inbound
        && is_for_kernel
        && is_for_service
        && match rule.protocol {
            UDP => has_port(&rule.local_ports),
            ANY_PROTOCOL => true,
            _ => false,
        }
}

/// Whether it is about all of them.
fn is_for_all_of_vxlan(rule: &FirewallRule) -> bool {
    is_about_vxlan(rule)
        && matches!(&*rule.remote_ports, "" | "*")
        && matches!(&*rule.local_addresses, "" | "*")
        && matches!(&*rule.interface_types, "" | "All")
        && rule.profiles & PROFILES == PROFILES
}

fn has_port(ports: &str) -> bool {
    ports.split(',').any(|part| match part.trim().split_once('-') {
        Some((from, to)) => {
            from.parse().is_ok_and(|from: u16| from <= VXLAN_PORT)
                && to.parse().is_ok_and(|to: u16| to >= VXLAN_PORT)
        }
        None => part.trim() == "*" || part.trim().parse() == Ok(VXLAN_PORT),
    })
}

fn covers(addresses: &str, node: Ipv4Addr) -> bool {
    addresses.split(',').any(|part| {
        matches!(part.trim(), "" | "*") || range(part).is_some_and(|(from, to)| (from..=to).contains(&node))
    })
}

/// The first and last address of a part of a list: an address, a network with the length of its prefix or its mask, or a range.
/// Words such as `LocalSubnet` have none.
fn range(part: &str) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let part = part.trim();
    if let Some((from, to)) = part.split_once('-') {
        return Some((from.parse().ok()?, to.parse().ok()?));
    }
    let net = match part.split_once('/') {
        None => Ipv4Net::from(part.parse::<Ipv4Addr>().ok()?),
        Some((address, mask)) if mask.contains('.') => {
            Ipv4Net::with_netmask(address.parse().ok()?, mask.parse().ok()?).ok()?
        }
        Some(_) => part.parse().ok()?,
    };
    Some((net.network(), net.broadcast()))
}
