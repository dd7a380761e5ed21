//! Translates the criteria of a policy rule to tests for nftables rules.
//!
//! An nftables rule is a conjunction. A policy rule contains alternatives: a selector's members are in several sets,
//! ports may be numbers or sets, and a negated port also matches packets without ports. So one policy rule becomes
//! several nftables rules, one for each combination of a family, a class of protocols, and alternatives. Together
//! they match the same packets.

use ipnet::IpNet;
use tortie_api::net::{IpVersion, PortRange, Protocol};
use tortie_policy::program::{EntityMatch, IcmpMatch, Rule, SetId};

use super::packet_test::{Conjunction, Keyed, PacketEnd, Test, port_ranges};
use super::sets::{Family, Part, Ranges, ranges};

/// The maximum number of nftables rules for one policy rule; beyond that the policy denies.
const MAX_ALTERNATIVES: usize = 256;

/// A rule with too many alternatives.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooManyAlternatives;

/// The conjunctions that together match what the rule matches. `exists` says whether an nftables set exists.
pub(super) fn conjunctions(
    rule: &Rule,
    exists: &dyn Fn(&str) -> bool,
) -> Result<Vec<Conjunction>, TooManyAlternatives> {
    let mut all = Vec::new();
    for family in families(rule) {
        for class in classes(rule) {
            let Some(groups) = groups(rule, family, &class, exists) else { continue };
            all.extend(product(&groups)?);
        }
    }
    if all.len() > MAX_ALTERNATIVES { Err(TooManyAlternatives) } else { Ok(all) }
}

/// Alternatives; at least one of them must hold.
type Group = Vec<Test>;

/// Every combination of one alternative from each group.
fn product(groups: &[Group]) -> Result<Vec<Conjunction>, TooManyAlternatives> {
    let mut all = vec![Vec::new()];
    for group in groups {
        if all.len() * group.len() > MAX_ALTERNATIVES {
            return Err(TooManyAlternatives);
        }
        let longer = |start: &Conjunction| {
            let start = start.clone();
            group
                .iter()
                .map(move |alternative| [start.as_slice(), std::slice::from_ref(alternative)].concat())
        };
        all = all.iter().flat_map(longer).collect();
    }
    Ok(all)
}

/// The families for which the rule needs separate conjunctions; `None` if the family does not matter.
fn families(rule: &Rule) -> Vec<Option<Family>> {
    let asks_addresses = |entity: &EntityMatch| {
        !entity.nets.is_empty() || !entity.not_nets.is_empty() || entity.set_ids().next().is_some()
    };
    match rule.ip_version {
        Some(IpVersion::V4) => vec![Some(Family::V4)],
        Some(IpVersion::V6) => vec![Some(Family::V6)],
        None if asks_addresses(&rule.source) || asks_addresses(&rule.destination) => {
            vec![Some(Family::V4), Some(Family::V6)]
        }
        None => vec![None],
    }
}

/// Protocols with the same testable fields.
#[derive(Debug, Clone)]
struct Class {
    /// It is one of these, if there are any.
    one_of: Vec<u8>,
    /// It is none of these.
    none_of: Vec<u8>,
    has_ports: bool,
    is_icmp: bool,
}

const WITH_PORTS: [u8; 3] = [Protocol::TCP.0, Protocol::UDP.0, Protocol::SCTP.0];
const ICMP: [u8; 2] = [Protocol::ICMP.0, Protocol::ICMPV6.0];

/// The classes for which the rule needs separate conjunctions.
fn classes(rule: &Rule) -> Vec<Class> {
    let has_ports = |protocol: u8| WITH_PORTS.contains(&protocol);
    let asks_ports = [&rule.source, &rule.destination].into_iter().any(|entity| {
        !(entity.ports.is_empty()
            && entity.port_sets.is_empty()
            && entity.not_ports.is_empty()
            && entity.not_port_sets.is_empty())
    });
    let asks_icmp = rule.icmp.is_some() || rule.not_icmp.is_some();
    let class = |one_of: &[u8], none_of: &[u8]| Class {
        one_of: one_of.to_vec(),
        none_of: none_of.to_vec(),
        has_ports: one_of.first().is_some_and(|protocol| has_ports(*protocol)),
        is_icmp: one_of.first().is_some_and(|protocol| ICMP.contains(protocol)),
    };
    let mut classes = match rule.protocol {
        Some(Protocol(protocol)) => vec![class(&[protocol], &[])],
        None => {
            let exclusive = [(asks_ports, &WITH_PORTS[..]), (asks_icmp, &ICMP[..])];
            let exclusive = exclusive.into_iter().filter_map(|(asks, protocols)| asks.then_some(protocols));
            let mut classes: Vec<_> = exclusive.clone().map(|protocols| class(protocols, &[])).collect();
            classes.push(class(&[], &exclusive.flatten().copied().collect::<Vec<_>>()));
            classes
        }
    };
    if let Some(Protocol(unwanted)) = rule.not_protocol {
        classes.retain_mut(|class| {
            let any = class.one_of.is_empty();
            class.one_of.retain(|protocol| *protocol != unwanted);
            if any && !class.none_of.contains(&unwanted) {
                class.none_of.push(unwanted);
            }
            any || !class.one_of.is_empty()
        });
    }
    classes
}

/// The tests for packets of this family and class; `None` if nothing can match.
fn groups(
    rule: &Rule,
    family: Option<Family>,
    class: &Class,
    exists: &dyn Fn(&str) -> bool,
) -> Option<Vec<Group>> {
    let mut tests = TestGroups { groups: Vec::new(), family, has_ports: class.has_ports, exists };
    if let Some(family) = family {
        tests.all(Test::Family(family));
    }
    tests.protocols(&class.one_of, false);
    tests.protocols(&class.none_of, true);
    // Exhaustive, here and below, because a forgotten criterion would open something.
    // `families` and `classes` read the rest.
    let Rule { action: _, ip_version: _, protocol: _, not_protocol: _, icmp, not_icmp, source, destination } =
        rule;
    tests.icmp(*icmp, *not_icmp, class)?;
    tests.entity(source, PacketEnd::Source)?;
    tests.entity(destination, PacketEnd::Destination)?;
    Some(tests.groups)
}

/// The tests so far.
struct TestGroups<'a> {
    groups: Vec<Group>,
    family: Option<Family>,
    has_ports: bool,
    exists: &'a dyn Fn(&str) -> bool,
}

impl TestGroups<'_> {
    /// Adds a test that must hold.
    fn all(&mut self, test: Test) {
        self.groups.push(vec![test]);
    }

    /// Adds alternatives of which one must hold; `None` if there are none.
    fn any(&mut self, alternatives: Group) -> Option<()> {
        if alternatives.is_empty() {
            return None;
        }
        self.groups.push(alternatives);
        Some(())
    }

    /// The value must be in one of the ranges (in none, if `invert`); `None` if that is impossible.
    fn ranges(&mut self, ranges: Ranges, invert: bool, test: impl FnOnce(Ranges) -> Test) -> Option<()> {
        match ranges.always() {
            Some(always) => (always != invert).then_some(()),
            None => {
                self.all(test(ranges));
                Some(())
            }
        }
    }

    fn protocols(&mut self, numbers: &[u8], invert: bool) {
        if !numbers.is_empty() {
            let mut numbers = numbers.to_vec();
            numbers.sort_unstable();
            self.all(Test::Protocol { numbers, invert });
        }
    }

    fn icmp(&mut self, wanted: Option<IcmpMatch>, unwanted: Option<IcmpMatch>, class: &Class) -> Option<()> {
        let asks_nothing = |icmp: &IcmpMatch| icmp.icmp_type.is_none() && icmp.icmp_code.is_none();
        if let Some(wanted) = wanted {
            class.is_icmp.then_some(())?;
            if !asks_nothing(&wanted) {
                self.all(Test::Icmp { icmp: wanted, invert: false });
            }
        }
        if let Some(unwanted) = unwanted.filter(|_| class.is_icmp) {
            // Without type and code, every ICMP packet is excluded.
            (!asks_nothing(&unwanted)).then_some(())?;
            self.all(Test::Icmp { icmp: unwanted, invert: true });
        }
        Some(())
    }

    fn entity(&mut self, entity: &EntityMatch, side: PacketEnd) -> Option<()> {
        let EntityMatch { nets, not_nets, sets, not_sets, ports, port_sets, not_ports, not_port_sets } =
            entity;
        if let Some(family) = self.family {
            self.nets(nets, not_nets, side, family)?;
            self.sets(sets, not_sets, side, family)?;
        }
        if !ports.is_empty() || !port_sets.is_empty() {
            self.has_ports.then_some(())?;
            self.ports(ports, port_sets, side)?;
        }
        if self.has_ports {
            self.ranges(numbers(not_ports), true, |ranges| Test::Port { side, ranges, invert: true })?;
            let Some(family) = self.family else { return Some(()) };
            for set in self.existing(not_port_sets, Part::AddressPorts(family)) {
                self.all(Test::Member { key: Keyed::address_port(side, family), set, invert: true });
            }
        }
        Some(())
    }

    /// The port must be one of some numbers, or its combination with the address must be in one of some sets.
    fn ports(&mut self, ports: &[PortRange], port_sets: &[SetId], side: PacketEnd) -> Option<()> {
        let ranges = numbers(ports);
        let mut alternatives = Vec::new();
        match ranges.always() {
            Some(true) => return Some(()),
            Some(false) => {}
            None => alternatives.push(Test::Port { side, ranges, invert: false }),
        }
        if let Some(family) = self.family {
            let sets = self.existing(port_sets, Part::AddressPorts(family));
            let key = Keyed::address_port(side, family);
            let member = |set| Test::Member { key, set, invert: false };
            alternatives.extend(sets.into_iter().map(member));
        }
        self.any(alternatives)
    }

    fn nets(&mut self, nets: &[IpNet], not_nets: &[IpNet], side: PacketEnd, family: Family) -> Option<()> {
        let of_family =
            |nets: &[IpNet]| ranges(nets.iter().copied().filter(|net| Family::of(net.addr()) == family));
        let lies_in = |invert| move |ranges| Test::Address { side, family, ranges, invert };
        if !nets.is_empty() {
            self.ranges(of_family(nets), false, lies_in(false))?;
        }
        self.ranges(of_family(not_nets), true, lies_in(true))
    }

    fn sets(&mut self, sets: &[SetId], not_sets: &[SetId], side: PacketEnd, family: Family) -> Option<()> {
        let key = Keyed::address(side, family);
        let member = |invert| move |set| Test::Member { key, set, invert };
        for id in sets {
            self.any(self.parts(id, family).into_iter().map(member(false)).collect())?;
        }
        for id in not_sets {
            self.parts(id, family).into_iter().map(member(true)).for_each(|test| self.all(test));
        }
        Some(())
    }

    /// The nftables sets that together contain the addresses of a set.
    fn parts(&self, id: &SetId, family: Family) -> Vec<String> {
        let parts = [Part::Addresses(family), Part::Nets(family)].into_iter();
        parts.map(|part| part.name(id)).filter(|name| (self.exists)(name)).collect()
    }

    /// The existing nftables sets among those parts.
    fn existing(&self, ids: &[SetId], part: Part) -> Vec<String> {
        ids.iter().map(|id| part.name(id)).filter(|name| (self.exists)(name)).collect()
    }
}

fn numbers(ports: &[PortRange]) -> Ranges {
    port_ranges(ports.iter().filter(|range| range.first <= range.last).map(|range| (range.first, range.last)))
}

#[cfg(test)]
mod tests {
    use tortie_api::net::Action;

    use super::*;

    #[test]
    fn a_rule_excludes_the_ports_of_each_name() {
        let ids = ["s:one", "s:other"].map(SetId::new);
        let names = ids.clone().map(|id| Part::AddressPorts(Family::V4).name(&id));
        for is_source in [false, true] {
            let unwanted = EntityMatch { not_port_sets: ids.to_vec(), ..EntityMatch::default() };
            let (ip_version, protocol) = (Some(IpVersion::V4), Some(Protocol::TCP));
            let mut rule = Rule { ip_version, protocol, ..Rule::all(Action::Allow) };
            *(if is_source { &mut rule.source } else { &mut rule.destination }) = unwanted;
            let all = conjunctions(&rule, &|_| true).unwrap();
            let [tests] = all.as_slice() else { panic!("{all:?}") };
            let excluded = tests.iter().filter_map(|test| match test {
                Test::Member { set, invert: true, .. } => Some(set.as_str()),
                _ => None,
            });
            assert_eq!(excluded.collect::<Vec<_>>(), names, "source: {is_source}");
        }
    }
}
