//! The rule of the node's firewall for VXLAN: the other nodes may send to UDP port 4789, and nobody else.
//!
//! The rule exists only while it is needed: if an administrator has made one that lets all nodes in, the agent makes none. The calls
//! are made on a thread of their own, because the firewall's service may be slow.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ipnet::Ipv4Net;
use tortie_dataplane::{Condition, Reason};
use tortie_hcn::{Firewall, FirewallError, FirewallRule, LocalRules};
use tracing::{info, warn};

use crate::VXLAN_PORT;

/// The rule's name.
pub const VXLAN_RULE: &str = "Tortie VXLAN";

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
}

/// What to do about the rule.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Set(Box<FirewallRule>),
    Replace(Box<FirewallRule>),
    Remove,
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
            state.nodes.clone()?
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
        state.problem = problem;
        drop(state);
        self.condition()
    }

    /// What was wrong when last compared.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let problem = self.state().problem.clone()?;
        Some(Condition::new(Reason::FirewallNotOpen, problem))
    }

    /// Removes the rule, for whoever removes Tortie. Returns whether there was one.
    ///
    /// # Errors
    /// The firewall cannot be read, or refuses it.
    pub fn remove(firewall: &dyn Firewall) -> Result<bool, FirewallError> {
        let rules = match firewall.rules() {
            Err(FirewallError::None) => Vec::new(),
            rules => rules?,
        };
        let ours = rules.iter().filter(|rule| rule.name == VXLAN_RULE).count();
        (0..ours).try_for_each(|_| firewall.remove(VXLAN_RULE))?;
        Ok(ours > 0)
    }

    fn try_to(&self, nodes: &BTreeSet<Ipv4Addr>) -> Result<Option<String>, FirewallError> {
        let rules = self.firewall.rules()?;
        let made = step(&rules, nodes);
        match &made {
            Step::Nothing => {}
            Step::Set(rule) | Step::Replace(rule) => {
                if let Step::Replace(_) = made {
                    VxlanRule::remove(&*self.firewall)?;
                }
                self.firewall.set(rule)?;
                info!(rule = VXLAN_RULE, nodes = nodes.len(), "the firewall lets the other nodes' VXLAN in");
            }
            Step::Remove => {
                VxlanRule::remove(&*self.firewall)?;
                info!(rule = VXLAN_RULE, "the firewall's rule is not needed");
            }
        }
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

fn step(rules: &[FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> Step {
    let ours: Vec<&FirewallRule> = rules.iter().filter(|rule| rule.name == VXLAN_RULE).collect();
    // With an empty list of addresses, it would let everybody in. A rule of others may have conditions that are not read (a user, a
    // package, IPsec), so Tortie's is there whatever the others are.
    match &ours[..] {
        [] if nodes.is_empty() => Step::Nothing,
        _ if nodes.is_empty() => Step::Remove,
        [] => Step::Set(Box::new(wanted(nodes))),
        [rule] if is_as_wanted(rule, nodes) => Step::Nothing,
        [rule] if without_addresses(rule) == without_addresses(&wanted(nodes)) => {
            Step::Set(Box::new(wanted(nodes)))
        }
        // Not every member can be changed back, and the firewall changes one of several with the same name.
        _ => Step::Replace(Box::new(wanted(nodes))),
    }
}

fn wanted(nodes: &BTreeSet<Ipv4Addr>) -> FirewallRule {
    let addresses: Vec<String> = nodes.iter().map(Ipv4Addr::to_string).collect();
    let anything = || "*".to_owned();
    FirewallRule {
        name: VXLAN_RULE.to_owned(),
        description: "Packets of pods of other nodes. The agent of Tortie keeps this rule; `tortie windows cleanup` removes it.".to_owned(),
        is_enabled: true,
        is_inbound: true,
        allows: true,
        protocol: UDP,
        local_ports: VXLAN_PORT.to_string(),
        remote_ports: anything(),
        local_addresses: anything(),
        remote_addresses: addresses.join(","),
        application: String::new(),
        service: String::new(),
        interface_types: "All".to_owned(),
        profiles: FirewallRule::ALL_PROFILES,
    }
}

fn without_addresses(rule: &FirewallRule) -> FirewallRule {
    FirewallRule { remote_addresses: String::new(), profiles: rule.profiles & PROFILES, ..rule.clone() }
}

/// Whether the rule is ours as it should be. The firewall writes addresses in its own way.
fn is_as_wanted(rule: &FirewallRule, nodes: &BTreeSet<Ipv4Addr>) -> bool {
    let single = |part: &str| range(part).filter(|(from, to)| from == to).map(|(from, _)| from);
    let listed: Option<BTreeSet<Ipv4Addr>> = rule.remote_addresses.split(',').map(single).collect();
    without_addresses(rule) == without_addresses(&wanted(nodes)) && listed.as_ref() == Some(nodes)
}

/// Whether rules of others let VXLAN of all of these nodes in.
fn is_open(rules: &[FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> bool {
    let others =
        || rules.iter().filter(|rule| rule.name != VXLAN_RULE && rule.allows && is_for_all_of_vxlan(rule));
    nodes.iter().all(|node| others().any(|rule| covers(&rule.remote_addresses, *node)))
}

/// The name of a rule of others that blocks VXLAN of a node.
fn blocking<'a>(rules: &'a [FirewallRule], nodes: &BTreeSet<Ipv4Addr>) -> Option<&'a str> {
    let mut others = rules.iter().filter(|rule| rule.name != VXLAN_RULE && !rule.allows);
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
