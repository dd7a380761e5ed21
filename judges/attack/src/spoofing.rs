//! Packets whose source is not the sender's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use testkit::frames;
use tortie_api::net::Protocol;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{RouteSocket, Vxlan};
use tortie_kernel::sysctl;

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NODES};
use crate::process::wait_until;
use crate::wire::{self, Ear, Wire, datagram, flow};

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "spoofing",
    attacker: "a pod with NET_RAW sends packets from any source, in both families, and packets in VXLAN, IPIP and IPv6; a machine beside \
               the nodes sends plain packets from addresses of a node's own pods. The kernel's own check of sources is off",
    holds: "none of them arrives at a pod or a node, and none from the pod leaves its node",
    run,
};

/// How many packets of each class a round has.
const PACKETS: usize = 60;
/// How long an allowed packet may take, with the repetitions that finding neighbours needs.
const PATIENCE: Duration = Duration::from_secs(10);
/// After the last allowed packet has arrived, nothing that was sent before it is under way on another processor for longer.
const UNDER_WAY: Duration = Duration::from_millis(100);
/// The hardware addresses of the nodes and of the lab on the underlay.
const NODE_MACS: [[u8; 6]; 2] = [[2, 0, 192, 0, 2, 11], [2, 0, 192, 0, 2, 12]];

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::with_pods(&bounds.program, &["--ipv6"])?;
    let mut outcome = Outcome::default();
    let mut stage = Stage::new(&lab)?;
    while bounds.another_round() {
        stage.judge(&mut bounds.random, &mut outcome)?;
    }
    prove(&lab, &mut stage, &mut bounds.random, &mut outcome)?;
    // The agent that has come back guards again.
    stage.judge(&mut bounds.random, &mut outcome)?;
    lab.down()?;
    Ok(outcome)
}

/// Packets of each class arrive while nothing guards the node.
fn prove(lab: &Lab, stage: &mut Stage, random: &mut StdRng, outcome: &mut Outcome) -> Result<()> {
    let shots = stage.shots(random);
    let arrived = lab.without_guard(NODES[0], || {
        stage.fire(&shots)?;
        std::thread::sleep(UNDER_WAY * 5);
        stage.heard()
    })?;
    let classes: BTreeSet<&str> = shots.iter().map(|shot| shot.class).collect();
    for class in classes {
        let of_class: Vec<&Shot> = shots.iter().filter(|shot| shot.class == class).collect();
        let count = of_class.iter().filter(|shot| arrived.contains_key(&shot.tag)).count();
        outcome
            .notes
            .push(format!("without the table, {count} of {} packets arrive: {class}", of_class.len()));
        outcome.control(count > 0, &format!("no packet arrives without the table: {class}"))?;
    }
    Ok(())
}

/// A packet of an attacker.
#[derive(Debug)]
struct Shot {
    tag: u32,
    class: &'static str,
    /// By the pod, not by the machine beside the nodes.
    by_pod: bool,
    frame: Vec<u8>,
    what: String,
}

/// The wires of the attackers, the ears of everybody else, and who has which address.
struct Stage {
    pod: Wire,
    outside: Wire,
    ears: Vec<(&'static str, Ear)>,
    attacker: Pair,
    neighbour: Pair,
    remote: Pair,
    nodes: [Pair; 2],
    /// The VXLAN links of the nodes.
    vxlan: [([u8; 6], Vxlan); 2],
    next: u32,
}

/// An address of each family.
#[derive(Debug, Clone, Copy)]
struct Pair(Ipv4Addr, Ipv6Addr);

impl Pair {
    fn of(self, v4: bool) -> IpAddr {
        if v4 { self.0.into() } else { self.1.into() }
    }
}

impl Stage {
    fn new(lab: &Lab) -> Result<Self> {
        let nodes = [lab.netns_of_node(NODES[0])?, lab.netns_of_node(NODES[1])?];
        let pods = ["attacker", "neighbour", "remote"].map(|name| lab.netns_of_pod(name));
        let [attacker, neighbour, remote] = pods;
        let (attacker, neighbour, remote) = (attacker?, neighbour?, remote?);
        nodes[0].run(check_no_sources)??;
        let ears = vec![
            ("the attacker's own interface", Ear::frames(&attacker, "eth0")?),
            ("the pod of its node", Ear::frames(&neighbour, "eth0")?),
            ("the pod of the other node", Ear::frames(&remote, "eth0")?),
            ("its node", Ear::datagrams(&nodes[0])?),
            ("the other node", Ear::datagrams(&nodes[1])?),
            ("the cable of the other node", Ear::frames(&nodes[1], "eth0")?),
        ];
        let own = |last: u8| {
            Pair(Ipv4Addr::new(192, 0, 2, last), Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, last.into()))
        };
        Ok(Self {
            pod: Wire::of_pod(&attacker, &nodes[0])?,
            outside: Wire::open(&lab.netns_between()?, "underlay", NODE_MACS[0])?,
            ears,
            attacker: pair(lab, "attacker")?,
            neighbour: pair(lab, "neighbour")?,
            remote: pair(lab, "remote")?,
            nodes: [own(11), own(12)],
            vxlan: [vxlan(&nodes[0])?, vxlan(&nodes[1])?],
            next: 0,
        })
    }

    fn tag(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Sends packets of all classes between allowed ones.
    fn judge(&mut self, random: &mut StdRng, outcome: &mut Outcome) -> Result<()> {
        // Neighbours are found, and nothing of before is under way.
        self.allowed(outcome)?;
        self.heard()?;
        let shots = self.shots(random);
        self.fire(&shots)?;
        let mut arrived = self.allowed(outcome)?;
        std::thread::sleep(UNDER_WAY);
        arrived.extend(self.heard()?);
        outcome.attempts += shots.len() as u64;
        for shot in &shots {
            if let Some(place) = arrived.get(&shot.tag) {
                outcome.blame(format!("{} arrives at {place}: {}", shot.class, shot.what));
            }
        }
        Ok(())
    }

    fn fire(&self, shots: &[Shot]) -> Result<()> {
        for (number, shot) in shots.iter().enumerate() {
            let wire = if shot.by_pod { &self.pod } else { &self.outside };
            wire.send(&shot.frame)?;
            if number % 100 == 99 {
                // Fewer than the kernel's queue holds (`net.core.netdev_max_backlog`, 1000).
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// What has arrived since the last call, and where.
    fn heard(&self) -> Result<BTreeMap<u32, &'static str>> {
        let mut heard = BTreeMap::new();
        for (place, ear) in &self.ears {
            heard.extend(ear.tags()?.into_iter().map(|tag| (tag, *place)));
        }
        Ok(heard)
    }

    /// Sends packets from the attackers' own addresses to all places until they arrive; returns all that has arrived.
    fn allowed(&mut self, outcome: &mut Outcome) -> Result<BTreeMap<u32, &'static str>> {
        let lab = Pair(Ipv4Addr::new(192, 0, 2, 1), Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 1));
        let mut controls = Vec::new();
        for v4 in [true, false] {
            let own = self.attacker.of(v4);
            for to in [self.neighbour, self.remote, self.nodes[0], self.nodes[1]] {
                controls.push((true, datagram(own, to.of(v4)), self.tag()));
            }
            for to in [self.attacker, self.neighbour, self.nodes[0]] {
                controls.push((false, datagram(lab.of(v4), to.of(v4)), self.tag()));
            }
        }
        let mut arrived = BTreeMap::new();
        let all = wait_until(PATIENCE, || {
            for (by_pod, flow, tag) in &controls {
                if !arrived.contains_key(tag) {
                    let wire = if *by_pod { &self.pod } else { &self.outside };
                    wire.send_flow(flow, *tag)?;
                }
            }
            std::thread::sleep(Duration::from_millis(20));
            arrived.extend(self.heard()?);
            Ok(controls.iter().all(|(_, _, tag)| arrived.contains_key(tag)))
        })?;
        let missing = controls.iter().find(|(_, _, tag)| !arrived.contains_key(tag));
        outcome.control(all, &format!("an allowed packet does not arrive: {missing:?}"))?;
        outcome.controls += controls.len() as u64 - 1;
        Ok(arrived)
    }

    fn shots(&mut self, random: &mut StdRng) -> Vec<Shot> {
        let mut shots = Vec::new();
        for _ in 0..PACKETS {
            for v4 in [true, false] {
                shots.push(self.of_pod(random, v4));
                shots.push(self.of_machine(random, v4));
            }
            shots.extend([self.in_vxlan(random), self.in_ipip(random), self.in_ipv6(random)]);
        }
        shots
    }

    fn of_pod(&mut self, random: &mut StdRng, v4: bool) -> Shot {
        let (own, tag) = (self.attacker.of(v4), self.tag());
        let to = *pick(random, &[self.neighbour, self.remote, self.nodes[0], self.nodes[1]]);
        let source = loop {
            let source = self.source(random, v4);
            if source != own {
                break source;
            }
        };
        let mut protocols = vec![Protocol::UDP];
        // The ear of a node hears datagrams only.
        if [self.neighbour.0, self.remote.0].contains(&to.0) {
            protocols.extend([Protocol::TCP, if v4 { Protocol::ICMP } else { Protocol::ICMPV6 }]);
        }
        let flow = flow(*pick(random, &protocols), source, to.of(v4));
        let class = if v4 { "IPv4 from a pod" } else { "IPv6 from a pod" };
        let frame = frames::frame(&flow, self.pod.to, tag);
        Shot { tag, class, by_pod: true, frame, what: format!("{flow:?}") }
    }

    fn of_machine(&mut self, random: &mut StdRng, v4: bool) -> Shot {
        let tag = self.tag();
        let (source, to) = *pick(random, &[(self.attacker, self.neighbour), (self.neighbour, self.attacker)]);
        let to = *pick(random, &[to, self.nodes[0]]);
        let flow = datagram(source.of(v4), to.of(v4));
        let class = if v4 { "IPv4 from outside" } else { "IPv6 from outside" };
        let frame = frames::frame(&flow, self.outside.to, tag);
        Shot { tag, class, by_pod: false, frame, what: format!("{flow:?}") }
    }

    /// A packet to a pod of either node, as the other node would send it into the overlay.
    fn in_vxlan(&mut self, random: &mut StdRng) -> Shot {
        let tag = self.tag();
        let node = random.random_range(0..2);
        let to = [self.neighbour, self.remote][node].of(true);
        let inner = datagram(self.source(random, true), to);
        let (mac, settings) = &self.vxlan[node];
        let inner_frame = frames::frame(&inner, *mac, tag);
        let (source, router) = (self.outer_source(random), self.nodes[node].of(true));
        let frame = wire::in_vxlan(source, router, settings.vni, &inner_frame, self.pod.to);
        Shot {
            tag,
            class: "VXLAN from a pod",
            by_pod: true,
            frame,
            what: format!("{source} > {router}: {inner:?}"),
        }
    }

    fn in_ipip(&mut self, random: &mut StdRng) -> Shot {
        let tag = self.tag();
        let inner = datagram(self.source(random, true), self.remote.of(true));
        let packet = frames::frame(&inner, self.pod.to, tag);
        let (source, router) = (self.outer_source(random), self.nodes[1].of(true));
        let frame = wire::in_ip(source, router, 4, &packet[14..], self.pod.to);
        Shot {
            tag,
            class: "IPIP from a pod",
            by_pod: true,
            frame,
            what: format!("{source} > {router}: {inner:?}"),
        }
    }

    /// An IPv4 packet in an IPv6 packet (RFC 2473).
    fn in_ipv6(&mut self, random: &mut StdRng) -> Shot {
        let tag = self.tag();
        let inner = datagram(self.source(random, true), self.remote.of(true));
        let packet = frames::frame(&inner, self.pod.to, tag);
        let (source, router) = (self.attacker.of(false), self.nodes[1].of(false));
        let frame = wire::in_ip(source, router, 4, &packet[14..], self.pod.to);
        Shot {
            tag,
            class: "IPv4 in IPv6",
            by_pod: true,
            frame,
            what: format!("{source} > {router}: {inner:?}"),
        }
    }

    /// A source of a tunnel's packet: the attacker's own, which only a guard against tunnels holds back, or a node's.
    fn outer_source(&self, random: &mut StdRng) -> IpAddr {
        *pick(random, &[self.attacker.of(true), self.attacker.of(true), self.nodes[1].of(true)])
    }

    /// A source that is somebody's or nobody's.
    fn source(&self, random: &mut StdRng, v4: bool) -> IpAddr {
        let somebody = [self.attacker, self.neighbour, self.remote, self.nodes[0], self.nodes[1]];
        let choice = random.random_range(0..10);
        match (choice, v4) {
            (0..5, _) => pick(random, &somebody).of(v4),
            // Of the attacker's block, of a Service, of nobody, and addresses with a meaning of their own.
            (5, true) => near(self.attacker.0, random).into(),
            (6, true) => Ipv4Addr::new(10, 96, 0, random.random()).into(),
            (7, true) => {
                (*pick(random, &[[127, 0, 0, 1], [0; 4], [255; 4], [224, 0, 0, 1], [169, 254, 1, 1]])).into()
            }
            (_, true) => random.random::<[u8; 4]>().into(),
            (5, false) => Ipv6Addr::from_bits(self.attacker.1.to_bits() ^ random.random_range(1..64)).into(),
            (6, false) => (*pick(
                random,
                &[
                    Ipv6Addr::LOCALHOST,
                    Ipv6Addr::UNSPECIFIED,
                    "fe80::1234".parse().unwrap_or(Ipv6Addr::LOCALHOST),
                ],
            ))
            .into(),
            (_, false) => Ipv6Addr::from_bits((0x2 << 124) | (random.random::<u128>() >> 4)).into(),
        }
    }
}

/// Another address of the block.
fn near(address: Ipv4Addr, random: &mut StdRng) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() ^ random.random_range(1..64))
}

fn pick<'a, T>(random: &mut StdRng, of: &'a [T]) -> &'a T {
    of.choose(random).unwrap_or(&of[0])
}

fn pair(lab: &Lab, pod: &str) -> Result<Pair> {
    let (mut v4, mut v6) = (None, None);
    for address in lab.addresses(pod)? {
        match address {
            IpAddr::V4(address) => v4 = Some(address),
            IpAddr::V6(address) => v6 = Some(address),
        }
    }
    Ok(Pair(v4.context("no IPv4 address")?, v6.context("no IPv6 address")?))
}

/// The hardware address and the settings of a node's VXLAN link.
fn vxlan(node: &NetNs) -> Result<([u8; 6], Vxlan)> {
    let link = node.run(|| RouteSocket::open()?.link("vxlan.calico"))??.context("no VXLAN link")?;
    Ok((link.mac.context("no address")?.0, link.vxlan.context("no settings")?))
}

/// Turns the kernel's own check of sources off, as other software of a node may do.
fn check_no_sources() -> Result<()> {
    let names = RouteSocket::open()?.links()?.into_iter().map(|link| link.name);
    for name in names.chain(["all".to_owned(), "default".to_owned()]) {
        sysctl::ensure(&format!("net/ipv4/conf/{name}/rp_filter"), "0")?;
    }
    Ok(())
}
