//! What the agent lets in, the rules for it as they should be, and what rules of others mean for it. All of it is a function of the
//! firewall's rules.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use tortie_hcn::{Firewall, FirewallError, FirewallRule};

/// The most addresses and ranges of one rule. No source names the firewall's own limit.
const MOST_PARTS: usize = 1_000;
/// All profiles there are. The firewall may return these, or all bits.
const PROFILES: i32 = 7;
const TCP: i32 = 6;
const UDP: i32 = 17;
const ANY_PROTOCOL: i32 = 256;

/// What the agent lets in: packets to one port of one protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// VXLAN of the other nodes, which the kernel receives.
    Vxlan,
    /// Connections of BGP peers, which the agent accepts.
    Bgp,
}

impl Opening {
    /// All of them.
    pub const ALL: [Opening; 2] = [Opening::Vxlan, Opening::Bgp];

    /// The name of its rule. Further rules have a number behind it.
    pub fn rule(self) -> &'static str {
        match self {
            Opening::Vxlan => "Tortie VXLAN",
            Opening::Bgp => "Tortie BGP",
        }
    }

    /// Who sends, in messages.
    pub(crate) fn senders(self) -> &'static str {
        match self {
            Opening::Vxlan => "the other nodes",
            Opening::Bgp => "the BGP peers",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Opening::Vxlan => {
                "Packets of pods of other nodes. The agent of Tortie keeps this rule; `tortie windows cleanup` removes it."
            }
            Opening::Bgp => {
                "Connections of BGP peers. The agent of Tortie keeps this rule; `tortie windows cleanup` removes it."
            }
        }
    }

    /// The number and the name of its protocol.
    fn protocol(self) -> (i32, &'static str) {
        match self {
            Opening::Vxlan => (UDP, "UDP"),
            Opening::Bgp => (TCP, "TCP"),
        }
    }

    /// Whether a rule has a name of this opening.
    pub(crate) fn is_name(self, name: &str) -> bool {
        match name.strip_prefix(self.rule()) {
            Some("") => true,
            Some(rest) => rest.strip_prefix(' ').is_some_and(|number| number.parse::<usize>().is_ok()),
            None => false,
        }
    }

    /// Removes its rules, for whoever removes Tortie. Returns whether there was one.
    ///
    /// # Errors
    /// The firewall cannot be read, or refuses it.
    pub fn remove(self, firewall: &dyn Firewall) -> Result<bool, FirewallError> {
        let rules = match firewall.rules() {
            Err(FirewallError::None) => Vec::new(),
            rules => rules?,
        };
        let ours: Vec<&FirewallRule> = rules.iter().filter(|rule| self.is_name(&rule.name)).collect();
        ours.iter().try_for_each(|rule| firewall.remove(&rule.name))?;
        Ok(!ours.is_empty())
    }
}

/// A change of the rules.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Set(FirewallRule),
    /// Rules of this name go, and then it is set.
    Replace(FirewallRule),
    /// So many rules of this name go.
    Remove(String, usize),
}

/// An opening with its details.
pub(crate) struct Wanted<'a> {
    pub(crate) opening: Opening,
    /// The program that receives, as rules name it.
    pub(crate) program: &'a str,
    pub(crate) port: u16,
    /// The addresses that may send.
    pub(crate) senders: &'a BTreeSet<IpAddr>,
}

impl Wanted<'_> {
    /// The port, in messages.
    pub(crate) fn shown_port(&self) -> String {
        format!("{} {}", self.opening.protocol().1, self.port)
    }

    /// The changes that make the rules as they should be. Senders that other rules get than before are in both meanwhile.
    pub(crate) fn steps(&self, rules: &[FirewallRule]) -> Vec<Step> {
        let wanted = self.rules();
        let changes = wanted.iter().filter_map(|rule| step(rules, rule));
        let mut changes: Vec<Step> = changes.collect();
        let parts = |rules: &mut dyn Iterator<Item = &FirewallRule>| -> usize {
            rules.map(|rule| rule.remote_addresses.split(',').count()).sum()
        };
        let is_ours = |name: &str| self.opening.is_name(name);
        // A longer list moves senders to later rules, and a shorter one to earlier rules: they get there first.
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

    /// The rules. Without any sender, there is none: with an empty list of addresses, it would let everybody in.
    fn rules(&self) -> Vec<FirewallRule> {
        let parts: Vec<String> = ranges(self.senders)
            .into_iter()
            .map(|(from, to)| if from == to { from.to_string() } else { format!("{from}-{to}") })
            .collect();
        let name = self.opening.rule();
        let anything = || "*".to_owned();
        let rule = |(index, parts): (usize, &[String])| FirewallRule {
            name: if index == 0 { name.to_owned() } else { format!("{name} {}", index + 1) },
            description: self.opening.description().to_owned(),
            is_enabled: true,
            is_inbound: true,
            allows: true,
            protocol: self.opening.protocol().0,
            local_ports: self.port.to_string(),
            remote_ports: anything(),
            local_addresses: anything(),
            remote_addresses: parts.join(","),
            application: String::new(),
            service: String::new(),
            interface_types: "All".to_owned(),
            profiles: FirewallRule::ALL_PROFILES,
        };
        parts.chunks(MOST_PARTS).enumerate().map(rule).collect()
    }

    /// Whether rules of others let all of the senders in.
    pub(crate) fn is_open(&self, rules: &[FirewallRule]) -> bool {
        let others =
            || rules.iter().filter(|rule| !self.is_ours(rule) && rule.allows && self.is_about_all(rule));
        self.senders.iter().all(|sender| others().any(|rule| covers(&rule.remote_addresses, *sender)))
    }

    /// The name of a rule of others that blocks a sender.
    pub(crate) fn blocking<'a>(&self, rules: &'a [FirewallRule]) -> Option<&'a str> {
        let mut others = rules.iter().filter(|rule| !self.is_ours(rule) && !rule.allows);
        // What a word such as `LocalSubnet` means is not known, so it may be a sender.
        let is_from_sender = |rule: &FirewallRule| {
            let has_word = rule.remote_addresses.split(',').any(|part| range(part).is_none());
            has_word || self.senders.iter().any(|sender| covers(&rule.remote_addresses, *sender))
        };
        others.find(|rule| self.is_about(rule) && is_from_sender(rule)).map(|rule| &*rule.name)
    }

    fn is_ours(&self, rule: &FirewallRule) -> bool {
        self.opening.is_name(&rule.name)
    }

    /// Whether a rule in force is about packets to the port, of some profile, adapter or sender.
    fn is_about(&self, rule: &FirewallRule) -> bool {
        let is_for_program = rule.application.is_empty() || names(&rule.application, self.program);
        let is_for_service = matches!(&*rule.service, "" | "*");
        let is_for_port = match rule.protocol {
            ANY_PROTOCOL => true,
            protocol => protocol == self.opening.protocol().0 && has_port(&rule.local_ports, self.port),
        };
        rule.is_enabled && rule.is_inbound && is_for_program && is_for_service && is_for_port
    }

    /// Whether it is about all of them.
    fn is_about_all(&self, rule: &FirewallRule) -> bool {
        self.is_about(rule)
            && matches!(&*rule.remote_ports, "" | "*")
            && matches!(&*rule.local_addresses, "" | "*")
            && matches!(&*rule.interface_types, "" | "All")
            && rule.profiles & PROFILES == PROFILES
    }
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

fn without_addresses(rule: &FirewallRule) -> FirewallRule {
    FirewallRule { remote_addresses: String::new(), profiles: rule.profiles & PROFILES, ..rule.clone() }
}

/// Whether the rule is as it should be. The firewall writes addresses in its own way.
fn is_as_wanted(rule: &FirewallRule, wanted: &FirewallRule) -> bool {
    let listed = |rule: &FirewallRule| -> Option<BTreeSet<(IpAddr, IpAddr)>> {
        rule.remote_addresses.split(',').map(range).collect()
    };
    without_addresses(rule) == without_addresses(wanted)
        && listed(rule).is_some()
        && listed(rule) == listed(wanted)
}

/// Whether the path of a rule names the program. The values of variables such as `%ProgramFiles%` are not known, so only what follows
/// them counts.
fn names(path: &str, program: &str) -> bool {
    let (path, program) = (path.to_lowercase(), program.to_lowercase());
    match path.rsplit_once('%') {
        None => path == program,
        Some((_, rest)) => program.ends_with(rest),
    }
}

fn has_port(ports: &str, port: u16) -> bool {
    ports.split(',').any(|part| match part.trim().split_once('-') {
        Some((from, to)) => {
            from.parse().is_ok_and(|from: u16| from <= port) && to.parse().is_ok_and(|to: u16| to >= port)
        }
        None => part.trim() == "*" || part.trim().parse() == Ok(port),
    })
}

fn covers(addresses: &str, sender: IpAddr) -> bool {
    addresses.split(',').any(|part| {
        matches!(part.trim(), "" | "*") || range(part).is_some_and(|(from, to)| (from..=to).contains(&sender))
    })
}

/// The addresses, with those in a row as one range.
fn ranges(addresses: &BTreeSet<IpAddr>) -> Vec<(IpAddr, IpAddr)> {
    let mut ranges: Vec<(IpAddr, IpAddr)> = Vec::new();
    for address in addresses {
        match ranges.last_mut() {
            Some((_, last)) if next(*last) == Some(*address) => *last = *address,
            _ => ranges.push((*address, *address)),
        }
    }
    ranges
}

/// The next address of the family.
fn next(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => Some(Ipv4Addr::from(u32::from(v4).checked_add(1)?).into()),
        IpAddr::V6(v6) => Some(Ipv6Addr::from(u128::from(v6).checked_add(1)?).into()),
    }
}

/// The first and last address of a part of a list: an address, a network with the length of its prefix or its mask, or a range.
/// Words such as `LocalSubnet` have none.
fn range(part: &str) -> Option<(IpAddr, IpAddr)> {
    let part = part.trim();
    if let Some((from, to)) = part.split_once('-') {
        let (from, to): (IpAddr, IpAddr) = (from.parse().ok()?, to.parse().ok()?);
        return (from.is_ipv4() == to.is_ipv4()).then_some((from, to));
    }
    let net = match part.split_once('/') {
        None => IpNet::from(part.parse::<IpAddr>().ok()?),
        Some((address, mask)) => match mask.parse() {
            Ok(mask) => IpNet::with_netmask(address.parse().ok()?, mask).ok()?,
            Err(_) => part.parse().ok()?,
        },
    };
    Some((net.network(), net.broadcast()))
}
