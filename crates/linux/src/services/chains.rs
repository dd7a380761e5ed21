//! The rules of the table. Only node ports' place and new classes change them.

use std::collections::BTreeMap;

use tortie_api::net::Protocol;
use tortie_kernel::nftables::{BaseChain, Chain, ChainKind, Hook, Key, Reject, Rule};
use tortie_services::{Masquerading, NodePortPlace};

use super::affinity::{LEARNING, REMEMBERED};
use super::layout::{Kind, Place, SetId, SlotClass, digit};
use super::words::{WITH_PORTS, When, Words, any, of};
use crate::dataplane::nat::{DESTINATION_NAT, SOURCE_NAT};
use crate::dataplane::packet_test::PacketEnd;
use crate::dataplane::sets::Family;

/// Source ranges come before translation.
const BEFORE_TRANSLATION: i32 = DESTINATION_NAT - 10;
/// `NF_IP_PRI_FILTER`
const FILTER: i32 = 0;
const REJECT: &str = "send-refusal";

/// The chains without those of classes.
pub(super) fn fixed(
    masquerading: Masquerading,
    node_ports: &BTreeMap<Family, NodePortPlace>,
) -> BTreeMap<String, Chain> {
    let mut chains = Chains(BTreeMap::new());
    chains.base();
    for family in Family::ALL {
        let node = NodePorts { family, place: node_ports.get(&family) };
        chains.ranges(family);
        chains.translation(masquerading, &node);
        chains.refusal(&node);
        chains.learning(masquerading, &node);
        chains.source(masquerading, &node);
    }
    chains.0
}

/// The chain of a class. If a slot is missing, the packet is dropped.
pub(super) fn of_class(class: SlotClass) -> Chain {
    let translate = any().has_port().of(class.family).to_backend(class);
    Chain { base: None, rules: vec![any().reset_priority().rule(), translate, any().drop()] }
}

struct Chains(BTreeMap<String, Chain>);

/// Where node ports of a family are.
struct NodePorts<'a> {
    family: Family,
    place: Option<&'a NodePortPlace>,
}

impl NodePorts<'_> {
    /// A rule for packets to the addresses that accept node ports; none if there are none.
    ///
    /// The first packet's destination cannot be looked up in the routing tables any more. If all local addresses accept node
    /// ports, connections count that another table translates from such a port at an address that is not local.
    fn words(&self, when: When) -> Option<Words> {
        let family = self.family;
        let start = match when {
            When::Now => of(family),
            When::First => any(),
        };
        let local = |words: Words| match when {
            When::Now => words.is_local(PacketEnd::Destination),
            When::First => words,
        };
        Some(match self.place? {
            NodePortPlace::Primary(address) => {
                let address = (*address).filter(|address| !address.is_loopback())?;
                start.is_to(&Key::address(address), family, when)
            }
            NodePortPlace::AllLocal => local(start.is_no_loopback(family, when)),
            NodePortPlace::LocalIn(_) => {
                let set = SetId::new(Kind::NodeAddresses, family);
                local(start.is_no_loopback(family, when).is_in(set, when))
            }
        })
    }
}

impl Chains {
    fn add(&mut self, name: impl Into<String>, rules: Vec<Rule>) {
        self.0.insert(name.into(), Chain { base: None, rules });
    }

    fn add_base(&mut self, name: &str, kind: ChainKind, hook: Hook, priority: i32, rules: Vec<Rule>) {
        let base = Some(BaseChain { kind, hook, priority, drop: false });
        self.0.insert(name.to_owned(), Chain { base, rules });
    }

    fn base(&mut self) {
        let by_family = |start: &dyn Fn(Words) -> Words, chain: &str| -> Vec<Rule> {
            let rule = |family| start(of(family)).go_to(&format!("{chain}{}", digit(family)));
            Family::ALL.map(rule).to_vec()
        };
        let new = |words: Words| words.is_new();
        let is_translated = |words: Words| words.is_translated(true);
        let is_left = |words: Words| words.is_new().is_translated(false);
        for (name, hook) in [("ranges-prerouting", Hook::Prerouting), ("ranges-output", Hook::Output)] {
            let rules = by_family(&new, "ranges");
            self.add_base(name, ChainKind::Filter, hook, BEFORE_TRANSLATION, rules);
        }
        for (name, hook) in [("translate-prerouting", Hook::Prerouting), ("translate-output", Hook::Output)] {
            let rules = by_family(&|words| words, "translate");
            self.add_base(name, ChainKind::Nat, hook, DESTINATION_NAT, rules);
        }
        let hooks = [
            ("refuse-input", Hook::Input),
            ("refuse-forward", Hook::Forward),
            ("refuse-output", Hook::Output),
        ];
        let is_led = |words: Words| words.is_new().is_translated(true);
        for (name, hook) in hooks {
            let rules = [by_family(&is_left, "refuse"), by_family(&is_led, "learn")].concat();
            self.add_base(name, ChainKind::Filter, hook, FILTER, rules);
        }
        let rules = by_family(&is_translated, "source");
        self.add_base("source-postrouting", ChainKind::Nat, Hook::Postrouting, SOURCE_NAT, rules);
        let rules = vec![
            any().protocol(Protocol::TCP).reject(Reject::TcpReset),
            any().reject(Reject::PortUnreachable),
        ];
        self.add(REJECT, rules);
    }

    /// Drops what a frontend does not accept from its source.
    fn ranges(&mut self, family: Family) {
        let check = format!("check-ranges{}", digit(family));
        let set = |kind| SetId::new(kind, family);
        let to_service = of(family).address(PacketEnd::Destination, set(Kind::Addresses), false);
        self.add(format!("ranges{}", digit(family)), vec![to_service.go_to(&check)]);
        let rules = vec![
            any().reset_priority().rule(),
            of(family).set_priority_by(set(Kind::Ranges), Place::Address, When::Now).rule(),
            any().has_no_priority().accept(),
            of(family).source_is_allowed(family).reset_priority().accept(),
            any().drop(),
        ];
        self.add(check, rules);
    }

    /// Finds the class of the frontend, and goes to its chain.
    fn translation(&mut self, masquerading: Masquerading, node: &NodePorts<'_>) {
        let family = node.family;
        let digit = digit(family);
        let set = |kind| SetId::new(kind, family);
        let to_service = of(family).address(PacketEnd::Destination, set(Kind::Addresses), false);
        let mut first = vec![to_service.jump(&format!("address{digit}"))];
        first.extend(node.words(When::Now).map(|words| words.go_to(&format!("node{digit}"))));
        self.add(format!("translate{digit}"), first);
        for (place, name) in [(Place::Address, "address"), (Place::Node, "node")] {
            let by_frontend = |kind: fn(Place) -> Kind| {
                of(family).set_priority_by(set(kind(place)), place, When::Now).rule()
            };
            // The backend that the client had, or any in the slots of the class.
            let choice = |affinity: fn(Place) -> Kind, class: fn(Place) -> Kind| {
                let reset = || any().reset_priority().rule();
                let remembered = any().by_priority(REMEMBERED);
                [reset(), by_frontend(affinity), remembered, reset(), by_frontend(class), any().go_to_class()]
            };
            let inside = format!("{name}-inside{digit}");
            let taken = format!("{name}-taken{digit}");
            let mut rules = choice(Kind::Affinity, Kind::Class).to_vec();
            if masquerading.knows_pods {
                let of_pod = of(family).address(PacketEnd::Source, set(Kind::Pods), false);
                rules.push(of_pod.go_to(&inside));
            }
            rules.push(any().is_local(PacketEnd::Source).go_to(&inside));
            rules.extend(choice(Kind::AffinityOutside, Kind::ClassOutside));
            rules.push(any().go_to(&taken));
            self.add(format!("{name}{digit}"), rules);
            let mut rules = choice(Kind::AffinityInside, Kind::ClassInside).to_vec();
            rules.push(any().go_to(&taken));
            self.add(inside, rules);
            // What a frontend takes and does not translate is no node port's, and no other program's. It is dropped here, because a backend
            // may have the frontend's own address and port, and such a connection does not count as translated.
            let groups = [Kind::Internal(place), Kind::External(place), Kind::Local(place)];
            let frontend = |kind| of(family).frontend(set(kind), place, When::Now);
            let mut rules = vec![frontend(Kind::Rejected(place)).to_itself(family)];
            rules.extend(groups.map(|group| frontend(group).drop()));
            self.add(taken, rules);
        }
    }

    /// Rejects new connections to Services without endpoints and to other ports of clusterIPs, and drops those to unused addresses.
    fn refusal(&mut self, node: &NodePorts<'_>) {
        let family = node.family;
        let digit = digit(family);
        let set = |kind| SetId::new(kind, family);
        let is_to = |kind| of(family).address(PacketEnd::Destination, set(kind), false);
        let mut first = vec![is_to(Kind::Addresses).jump(&format!("refuse-address{digit}"))];
        first.extend(node.words(When::Now).map(|words| words.jump(&format!("refuse-node{digit}"))));
        // An address of the node may be in such a network, too.
        let unused = is_to(Kind::ServiceCidrs).is_not_local(PacketEnd::Destination);
        first.extend([is_to(Kind::ClusterIps).go_to(REJECT), unused.drop()]);
        self.add(format!("refuse{digit}"), first);
        for (place, name) in [(Place::Address, "address"), (Place::Node, "node")] {
            let rejected = of(family).frontend(set(Kind::Rejected(place)), place, When::Now);
            self.add(format!("refuse-{name}{digit}"), vec![rejected.go_to(REJECT)]);
        }
    }

    /// Notes the backends of new connections to Services with session affinity.
    fn learning(&mut self, masquerading: Masquerading, node: &NodePorts<'_>) {
        let family = node.family;
        let digit = digit(family);
        let set = |kind| SetId::new(kind, family);
        let name = |protocol: Protocol| format!("learn{digit}-{}", protocol.to_string().to_lowercase());
        let first = WITH_PORTS.map(|protocol| any().protocol(protocol).go_to(&name(protocol)));
        self.add(format!("learn{digit}"), first.to_vec());
        for protocol in WITH_PORTS {
            let reset = || any().reset_priority().rule();
            let learn = |kind: fn(Place) -> Kind| {
                let at =
                    |words: Words, place| words.set_priority_by(set(kind(place)), place, When::First).rule();
                let mut rules =
                    vec![reset(), at(any().protocol(protocol), Place::Address), any().by_priority(LEARNING)];
                if let Some(words) = node.words(When::First) {
                    rules.extend([at(words.protocol(protocol), Place::Node), any().by_priority(LEARNING)]);
                }
                rules
            };
            let inside = format!("{}-inside", name(protocol));
            let mut rules = learn(Kind::Affinity);
            if masquerading.knows_pods {
                rules.push(of(family).address(PacketEnd::Source, set(Kind::Pods), false).go_to(&inside));
            }
            rules.push(any().is_local(PacketEnd::Source).go_to(&inside));
            rules.extend(learn(Kind::AffinityOutside));
            self.add(name(protocol), rules);
            self.add(inside, learn(Kind::AffinityInside));
        }
    }

    /// Gives translated packets an address of the node as their source where answers would take another way, or where the Service says so.
    fn source(&mut self, masquerading: Masquerading, node: &NodePorts<'_>) {
        let family = node.family;
        let digit = digit(family);
        let name = |protocol: Protocol| format!("source{digit}-{}", protocol.to_string().to_lowercase());
        let mut first = vec![of(family).is_itself(family).masquerade()];
        first.extend(WITH_PORTS.map(|protocol| any().protocol(protocol).go_to(&name(protocol))));
        self.add(format!("source{digit}"), first);
        for protocol in WITH_PORTS {
            let rules = Self::source_of(protocol, masquerading, node);
            self.add(name(protocol), rules);
        }
    }

    fn source_of(protocol: Protocol, masquerading: Masquerading, node: &NodePorts<'_>) -> Vec<Rule> {
        let family = node.family;
        let set = |kind| SetId::new(kind, family);
        let is_in = |words: Words, kind, place| words.frontend(set(kind), place, When::First);
        // `nft` knows the type of a connection's port only behind its protocol.
        let start = || any().protocol(protocol);
        let at = |kind| is_in(start(), kind, Place::Address);
        let external = Kind::External(Place::Address);
        let (local, internal) = (Kind::Local(Place::Address), Kind::Internal(Place::Address));
        let mut rules = vec![
            at(external).masquerade(),
            at(local).is_local(PacketEnd::Source).masquerade(),
            at(local).accept(),
        ];
        if masquerading.all {
            rules.push(at(internal).masquerade());
        } else if masquerading.knows_pods {
            let others = of(family).protocol(protocol).address(PacketEnd::Source, set(Kind::Pods), true);
            rules.push(is_in(others, internal, Place::Address).masquerade());
        }
        rules.push(at(internal).accept());
        if let Some(words) = node.words(When::First) {
            let at = |kind| is_in(words.clone().protocol(protocol), kind, Place::Node);
            rules.push(at(Kind::External(Place::Node)).masquerade());
            rules.push(at(Kind::Local(Place::Node)).is_local(PacketEnd::Source).masquerade());
        }
        rules
    }
}

#[cfg(test)]
mod tests {
    use tortie_kernel::nftables::rule_text;

    use super::super::layout::List;
    use super::*;

    #[test]
    fn a_chain_of_a_class_translates_to_a_random_slot() {
        let class = |place, list| SlotClass::of(Family::V4, place, list, 3).unwrap();
        let text = |class| rule_text(&of_class(class).rules[1]);
        assert_eq!(
            text(class(Place::Address, List::Common)),
            "meta l4proto @protocols meta nfproto ipv4 dnat to ip daddr . meta l4proto . th dport . numgen random mod 3 map @slots4"
        );
        assert_eq!(
            text(class(Place::Node, List::Outside)),
            "meta l4proto @protocols meta nfproto ipv4 dnat to meta l4proto . th dport . numgen random mod 3 map @node-outside-slots4"
        );
    }
}
