//! Which packets must pass, and which must not, whatever order and delay the nodes follow changes with.
//!
//! A node may have any of the values in force that are not known to be replaced everywhere: each policy, the color of each of its pods,
//! and the color that it takes the owner of an address for, independently. A packet is allowed or denied if all combinations agree.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::fault::Node;
use crate::known::{Known, Moment, Span};
use crate::rules::{self, Color, Direction, Protocol, Rule, Subject, subjects};
use crate::weather::Weather;

/// How long after a trouble packets may still get lost: connections of the node have to be made anew, and TCP waits before it sends again.
const GRACE: Moment = Moment::from_secs(5);

/// The number of a pod. No other pod of the run has it.
pub(crate) type PodId = u64;

/// A pod that runs.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) node: Node,
    /// Of IPv4, and on Linux nodes of IPv6.
    pub(crate) addresses: Vec<IpAddr>,
    /// As its own node knows it.
    pub(crate) color: Known<Color>,
    /// Its deletion begins.
    pub(crate) leaves: Option<Moment>,
}

/// The family of a packet's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl Pod {
    pub(crate) fn address(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| Family::of(*address) == family)
    }
}

/// What must become of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// It arrives.
    Allowed,
    /// It does not arrive.
    Denied,
    /// Both are right.
    Either,
}

/// A packet from a pod to another one, from its first sending to its arrival or to the time until which one waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) from: PodId,
    pub(crate) to: PodId,
    pub(crate) protocol: Protocol,
    pub(crate) family: Family,
    pub(crate) span: Span,
}

/// All that verdicts depend on, with its history.
#[derive(Debug, Clone)]
pub(crate) struct World {
    policies: BTreeMap<Subject, Known<Option<Rule>>>,
    pods: BTreeMap<PodId, Pod>,
    /// The color of the owner of an address, as other nodes know it. `None`: nobody has it.
    addresses: BTreeMap<IpAddr, Known<Option<Color>>>,
    nodes: Vec<Node>,
    pub(crate) weather: Weather,
}

/// The writes that are done at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Written {
    policies: BTreeMap<Subject, usize>,
    pods: BTreeMap<PodId, usize>,
    addresses: BTreeMap<IpAddr, usize>,
    /// The owners of addresses, which the datastore must have before these writes can be in force.
    pub(crate) owners: BTreeMap<IpAddr, Option<Color>>,
}

impl World {
    /// A world with that many nodes, and without policies and pods.
    pub(crate) fn new(nodes: usize) -> Self {
        Self {
            policies: subjects().map(|subject| (subject, Known::new(None))).collect(),
            pods: BTreeMap::new(),
            addresses: BTreeMap::new(),
            nodes: (0..nodes).collect(),
            weather: Weather::default(),
        }
    }

    pub(crate) fn policy(&mut self, subject: Subject) -> Option<&mut Known<Option<Rule>>> {
        self.policies.get_mut(&subject)
    }

    pub(crate) fn pod(&self, pod: PodId) -> Option<&Pod> {
        self.pods.get(&pod)
    }

    /// A pod runs, whose creation began at a moment. Its node has its policy in force.
    pub(crate) fn add(&mut self, id: PodId, node: Node, addresses: Vec<IpAddr>, color: Color, from: Moment) {
        for address in &addresses {
            let owner = self.addresses.entry(*address).or_insert_with(|| Known::new(None));
            owner.change(Some(color), from);
            owner.done();
        }
        self.pods.insert(id, Pod { node, addresses, color: Known::new(color), leaves: None });
    }

    /// The write of a pod's color begins.
    pub(crate) fn color(&mut self, id: PodId, color: Color, now: Moment) {
        if let Some(pod) = self.pods.get_mut(&id) {
            pod.color.change(color, now);
            self.owners_of(id).for_each(|owner| owner.change(Some(color), now));
        }
    }

    /// The deletion of a pod begins. Its addresses may soon be another pod's.
    pub(crate) fn leave(&mut self, id: PodId, now: Moment) {
        if let Some(pod) = self.pods.get_mut(&id) {
            pod.leaves = Some(now);
            self.owners_of(id).for_each(|owner| owner.change(None, now));
        }
    }

    /// The write of a pod's color, or its deletion, is done.
    pub(crate) fn done(&mut self, id: PodId) {
        if let Some(pod) = self.pods.get_mut(&id) {
            pod.color.done();
            self.owners_of(id).for_each(Known::done);
        }
    }

    fn owners_of(&mut self, id: PodId) -> impl Iterator<Item = &mut Known<Option<Color>>> {
        let addresses = self.pods.get(&id).map(|pod| pod.addresses.as_slice()).unwrap_or_default();
        self.addresses.iter_mut().filter(|(address, _)| addresses.contains(address)).map(|(_, owner)| owner)
    }

    /// The pod no longer runs, and nobody asks about it any more.
    pub(crate) fn remove(&mut self, id: PodId) {
        self.pods.remove(&id);
    }

    /// The writes that are done now.
    pub(crate) fn written(&self) -> Written {
        let stored = |owner: &Known<Option<Color>>| owner.stored().copied().flatten();
        Written {
            policies: self.policies.iter().map(|(key, policy)| (*key, policy.written())).collect(),
            pods: self.pods.iter().map(|(key, pod)| (*key, pod.color.written())).collect(),
            addresses: self.addresses.iter().map(|(key, owner)| (*key, owner.written())).collect(),
            owners: self.addresses.iter().map(|(key, owner)| (*key, stored(owner))).collect(),
        }
    }

    /// Writes are in force on a node.
    pub(crate) fn settle(&mut self, node: Node, written: &Written, now: Moment) {
        for (key, policy) in &mut self.policies {
            policy.settle(node, written.policies.get(key).copied().unwrap_or_default(), now);
        }
        for (key, pod) in &mut self.pods {
            pod.color.settle(node, written.pods.get(key).copied().unwrap_or_default(), now);
        }
        for (key, owner) in &mut self.addresses {
            owner.settle(node, written.addresses.get(key).copied().unwrap_or_default(), now);
        }
    }

    /// True if nothing is pending on a node.
    pub(crate) fn is_settled(&self, node: Node) -> bool {
        self.policies.values().all(|policy| policy.is_settled(node))
            && self.pods.values().all(|pod| pod.color.is_settled(node))
            && self.addresses.values().all(|owner| owner.is_settled(node))
    }

    /// True if nothing is pending.
    pub(crate) fn is_settled_everywhere(&self) -> bool {
        self.nodes.iter().all(|node| self.is_settled(*node))
    }

    /// Forgets what counted only before a moment.
    pub(crate) fn forget(&mut self, before: Moment) {
        let nodes = &self.nodes;
        self.policies.values_mut().for_each(|policy| policy.forget(nodes, before));
        self.pods.values_mut().for_each(|pod| pod.color.forget(nodes, before));
        self.addresses.values_mut().for_each(|owner| owner.forget(nodes, before));
    }

    /// What must become of a packet.
    pub(crate) fn expected(&self, packet: Packet) -> Expected {
        let Packet { span, .. } = packet;
        let (Some(from), Some(to)) = (self.pods.get(&packet.from), self.pods.get(&packet.to)) else {
            return Expected::Either;
        };
        let sides = [(Direction::Egress, from, to), (Direction::Ingress, to, from)];
        let verdicts = sides.map(|(direction, own, other)| {
            let verdicts = self.verdicts(direction, own, other, packet);
            let open = self.weather.is_open(own.node, span);
            (open || verdicts.contains(&true), open || verdicts.contains(&false))
        });
        let [(egress, no_egress), (ingress, no_ingress)] = verdicts;
        let leaves = [from, to].iter().any(|pod| pod.leaves.is_some_and(|leaves| leaves <= span.until));
        // Troubles of some seconds ago may delay packets of now.
        let earlier = Span::new(span.from.saturating_sub(GRACE), span.until);
        match (egress && ingress, no_egress || no_ingress) {
            (false, _) => Expected::Denied,
            (true, true) => Expected::Either,
            (true, false) if leaves || self.weather.loses(from.node, to.node, earlier) => Expected::Either,
            (true, false) => Expected::Allowed,
        }
    }

    /// The verdicts that the node of a pod may have.
    fn verdicts(&self, direction: Direction, own: &Pod, other: &Pod, packet: Packet) -> Vec<bool> {
        let others: Vec<Option<Color>> =
            match other.address(packet.family).and_then(|address| self.addresses.get(&address)) {
                Some(owner) => owner.possible(own.node, packet.span).copied().collect(),
                None => vec![None],
            };
        let colors = own.color.possible(own.node, packet.span);
        let policies = colors.filter_map(|color| self.policies.get(&(direction, *color)));
        let rules = policies.flat_map(|policy| policy.possible(own.node, packet.span));
        rules
            .flat_map(|rule| others.iter().map(|other| rules::allows(rule.as_ref(), *other, packet.protocol)))
            .collect()
    }

    /// All values that an expectation depends on, for people.
    pub(crate) fn why(&self, packet: Packet) -> String {
        let (Some(from), Some(to)) = (self.pods.get(&packet.from), self.pods.get(&packet.to)) else {
            return "one of the pods is gone".to_owned();
        };
        let mut lines = Vec::new();
        for (direction, own, other) in [(Direction::Egress, from, to), (Direction::Ingress, to, from)] {
            let colors: Vec<Color> = own.color.possible(own.node, packet.span).copied().collect();
            for color in &colors {
                let Some(policy) = self.policies.get(&(direction, *color)) else { continue };
                let rules: Vec<String> =
                    policy.possible(own.node, packet.span).map(|rule| rules::shown(rule.as_ref())).collect();
                lines.push(format!(
                    "{} may be: {}",
                    rules::key((direction, *color)).name,
                    rules.join("; or ")
                ));
            }
            let Some(address) = other.address(packet.family) else { continue };
            let owner = self.addresses.get(&address);
            let owners = owner.into_iter().flat_map(|owner| owner.possible(own.node, packet.span));
            let owners: Vec<&str> = owners.map(|color| color.map_or("nobody", Color::name)).collect();
            lines.push(format!("{address} may belong to: {}", owners.join("; or ")));
        }
        lines.join("\n    ")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::weather::Trouble;

    const RED: Color = Color::Red;
    const BLUE: Color = Color::Blue;

    fn at(seconds: u64) -> Moment {
        Moment::from_secs(seconds)
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 244, 0, last])
    }

    /// A red pod 1 on node 0 and a blue pod 2 on node 1, both since the first second and known everywhere.
    fn world() -> World {
        let mut world = World::new(2);
        world.add(1, 0, vec![address(1)], RED, at(1));
        world.add(2, 1, vec![address(2)], BLUE, at(1));
        everywhere(&mut world, at(5));
        world
    }

    fn everywhere(world: &mut World, now: Moment) {
        let written = world.written();
        (0..2).for_each(|node| world.settle(node, &written, now));
    }

    fn only(color: Color) -> Option<Rule> {
        Some(Rule([(color, Protocol::Tcp)].into()))
    }

    fn expected(world: &World, from: PodId, to: PodId, seconds: u64) -> Expected {
        let span = Span::new(at(seconds), at(seconds + 1));
        world.expected(Packet { from, to, protocol: Protocol::Tcp, family: Family::V4, span })
    }

    fn policy(world: &mut World, direction: Direction, color: Color, rule: Option<Rule>, now: u64) {
        let policy = world.policy((direction, color)).unwrap();
        policy.change(rule, at(now));
        policy.done();
    }

    #[test]
    fn a_change_of_policy_is_uncertain_until_it_is_in_force() {
        let mut world = world();
        assert_eq!(expected(&world, 1, 2, 10), Expected::Allowed, "without policy");
        policy(&mut world, Direction::Ingress, BLUE, only(BLUE), 20);
        assert_eq!(expected(&world, 1, 2, 10), Expected::Allowed);
        assert_eq!(expected(&world, 1, 2, 20), Expected::Either);
        assert_eq!(expected(&world, 2, 1, 20), Expected::Allowed, "the other direction");
        everywhere(&mut world, at(30));
        assert_eq!(expected(&world, 1, 2, 29), Expected::Either);
        assert_eq!(expected(&world, 1, 2, 31), Expected::Denied);
        // Both denied before, and denied after it.
        policy(&mut world, Direction::Ingress, BLUE, Some(Rule([].into())), 40);
        assert_eq!(expected(&world, 1, 2, 41), Expected::Denied);
        let packet = Packet {
            from: 1,
            to: 2,
            protocol: Protocol::Tcp,
            family: Family::V4,
            span: Span::new(at(41), at(42)),
        };
        assert!(
            world.why(packet).contains("ingress-blue may be: blue/TCP; or nobody"),
            "{}",
            world.why(packet)
        );
    }

    #[test]
    fn a_packet_depends_on_its_two_nodes() {
        let mut world = world();
        policy(&mut world, Direction::Ingress, BLUE, only(BLUE), 20);
        world.settle(1, &world.written(), at(30));
        assert_eq!(expected(&world, 1, 2, 31), Expected::Denied, "node 1 judges it");
        policy(&mut world, Direction::Egress, BLUE, only(BLUE), 40);
        world.settle(0, &world.written(), at(50));
        assert_eq!(expected(&world, 2, 1, 51), Expected::Either, "node 1 may not know the second policy");
    }

    #[test]
    fn own_node_and_other_nodes_may_know_different_colors() {
        let mut world = world();
        policy(&mut world, Direction::Ingress, BLUE, only(RED), 10);
        policy(&mut world, Direction::Egress, RED, only(BLUE), 10);
        everywhere(&mut world, at(20));
        assert_eq!(expected(&world, 1, 2, 30), Expected::Allowed);
        world.color(1, BLUE, at(40));
        assert_eq!(expected(&world, 1, 2, 40), Expected::Either);
        everywhere(&mut world, at(41));
        assert!(!world.is_settled_everywhere(), "the write is not done");
        assert_eq!(expected(&world, 1, 2, 42), Expected::Either);
        world.done(1);
        everywhere(&mut world, at(43));
        assert!(world.is_settled_everywhere());
        assert_eq!(expected(&world, 1, 2, 44), Expected::Denied);
    }

    #[test]
    fn a_new_pod_may_count_as_nobody_or_as_the_one_that_had_its_address() {
        let mut world = world();
        policy(&mut world, Direction::Ingress, BLUE, only(RED), 10);
        everywhere(&mut world, at(20));
        world.leave(1, at(30));
        assert_eq!(expected(&world, 1, 2, 30), Expected::Either, "it may still run");
        world.done(1);
        world.remove(1);
        assert_eq!(expected(&world, 1, 2, 31), Expected::Either, "nobody asks about it");
        world.add(3, 0, vec![address(1)], BLUE, at(32));
        assert_eq!(expected(&world, 3, 2, 33), Expected::Either, "its address was that of a red pod");
        everywhere(&mut world, at(40));
        assert_eq!(expected(&world, 3, 2, 41), Expected::Denied);
        world.add(4, 0, vec![address(4)], BLUE, at(42));
        assert_eq!(expected(&world, 4, 2, 43), Expected::Denied, "nobody is denied, and so is blue");
        world.add(5, 0, vec![address(5)], RED, at(42));
        assert_eq!(expected(&world, 5, 2, 43), Expected::Either);
        assert_eq!(world.written().owners[&address(5)], Some(RED));
    }

    #[test]
    fn a_packet_has_the_address_of_its_family() {
        let mut world = world();
        let v6 = |last: u16| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]);
        policy(&mut world, Direction::Ingress, BLUE, only(RED), 10);
        everywhere(&mut world, at(20));
        world.add(6, 0, vec![address(6), v6(6)], RED, at(21));
        everywhere(&mut world, at(22));
        world.leave(6, at(23));
        world.done(6);
        // Another pod gets one of its addresses.
        world.add(7, 0, vec![address(7), v6(6)], BLUE, at(24));
        let to = |family| Packet {
            from: 7,
            to: 2,
            protocol: Protocol::Tcp,
            family,
            span: Span::new(at(30), at(31)),
        };
        assert_eq!(world.expected(to(Family::V4)), Expected::Denied);
        assert_eq!(world.expected(to(Family::V6)), Expected::Either, "its address was that of a red pod");
        assert!(world.why(to(Family::V6)).contains("fd00::6 may belong to: red; or nobody; or blue"));
    }

    #[test]
    fn troubles_excuse_losses_and_a_node_without_policy_only_its_own_side() {
        let mut world = world();
        policy(&mut world, Direction::Ingress, BLUE, only(BLUE), 10);
        policy(&mut world, Direction::Ingress, RED, only(BLUE), 10);
        everywhere(&mut world, at(20));
        let link = world.weather.begin(0, Trouble::NoLink, at(30));
        assert_eq!(expected(&world, 2, 1, 29), Expected::Either, "it may be on its way");
        assert_eq!(expected(&world, 2, 1, 28), Expected::Allowed);
        assert_eq!(expected(&world, 1, 2, 30), Expected::Denied, "a lost cable lets nothing pass");
        world.weather.end(link, at(40));
        assert_eq!(expected(&world, 2, 1, 45), Expected::Either);
        assert_eq!(expected(&world, 2, 1, 46), Expected::Allowed);
        world.weather.begin(0, Trouble::NoPolicy, at(50));
        assert_eq!(expected(&world, 1, 2, 51), Expected::Denied, "the node of pod 2 has its policy");
        world.weather.begin(1, Trouble::NoPolicy, at(60));
        assert_eq!(expected(&world, 1, 2, 61), Expected::Either);
    }

    #[test]
    fn what_is_forgotten_changes_no_verdict_of_later() {
        let mut world = world();
        for second in 10..20 {
            policy(&mut world, Direction::Ingress, BLUE, only(BLUE), second);
            everywhere(&mut world, at(second));
        }
        let before = expected(&world, 1, 2, 30);
        world.forget(at(25));
        assert_eq!((before, expected(&world, 1, 2, 30)), (Expected::Denied, Expected::Denied));
    }
}
