//! Neighbour solicitations of a pod with forged sources.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rand::Rng as _;
use rand::rngs::StdRng;
use testkit::frames;
use tortie_kernel::namespace::NetNs;

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NODES};
use crate::process::{output, wait_until};
use crate::wire::{Ear, Wire};

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "neighbours",
    attacker: "a pod with NET_RAW sends IPv6 neighbour solicitations to its node, for the addresses of the pod's gateway and of the node, \
               from sources of the link and from others that are not its own",
    holds: "none of them makes an entry in the node's table of neighbours",
    run,
};

/// Sources of a round. The kernel's table has 1,024 entries for the whole machine, of which a broken guard would cost these.
const SOLICITATIONS: usize = 300;
/// Those without a guard, which fill a part of that table for a moment.
const CONTROLS: usize = 50;
const PATIENCE: Duration = Duration::from_secs(10);
const UNDER_WAY: Duration = Duration::from_millis(300);

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::with_pods(&bounds.program, &["--ipv6"])?;
    let (node, pod) = (lab.netns_of_node(NODES[0])?, lab.netns_of_pod("attacker")?);
    let wire = Wire::of_pod(&pod, &node)?;
    let own = lab.addresses("attacker")?.into_iter().find_map(|address| match address {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    });
    let own = own.context("the pod has no IPv6 address")?;
    let targets = targets(wire.to);
    let mut outcome = Outcome::default();
    let ear = Ear::frames(&pod, "eth0")?;
    let answers = || {
        wait_until(PATIENCE, || {
            wire.send(&solicitation(own, targets[0], wire.to))?;
            std::thread::sleep(UNDER_WAY);
            Ok(ear.received()?.iter().any(|frame| is_advertisement(frame, own)))
        })
    };
    while bounds.another_round() {
        // The node answers nothing for a second or two after the interface came up, while it looks whether others have its address.
        outcome.control(answers()?, "the node does not answer the pod's own solicitation")?;
        let forged = round(&node, &wire, &targets, SOLICITATIONS, &mut bounds.random, &mut outcome)?;
        outcome.control(answers()?, "the node does not answer the pod's own solicitation any more")?;
        std::thread::sleep(UNDER_WAY);
        let entries = neighbours(&node)?;
        for source in forged.iter().filter(|source| entries.contains(source)) {
            outcome.blame(format!("the node has an entry for {source}"));
        }
    }
    let unguarded = lab.without_guard(NODES[0], || {
        let forged = round(&node, &wire, &targets, CONTROLS, &mut bounds.random, &mut Outcome::default())?;
        std::thread::sleep(UNDER_WAY);
        let entries = neighbours(&node)?;
        Ok(forged.intersection(&entries).count())
    })?;
    outcome.notes.push(format!("without the table, {unguarded} of {CONTROLS} solicitations make entries"));
    outcome.control(unguarded > 0, "a forged solicitation makes no entry without the table, either")?;
    lab.down()?;
    Ok(outcome)
}

/// Sends solicitations from forged sources, which it returns.
fn round(
    node: &NetNs,
    wire: &Wire,
    targets: &[Ipv6Addr],
    count: usize,
    random: &mut StdRng,
    outcome: &mut Outcome,
) -> Result<BTreeSet<IpAddr>> {
    let before = neighbours(node)?;
    let mut forged = BTreeSet::new();
    for number in 0..count {
        let source: u128 = match random.random_range(0..3) {
            // Of the link, and of the pool, and any.
            0 => (0xfe80 << 112) | u128::from(random.random::<u64>()),
            1 => (0xfd65 << 112) | u128::from(random.random::<u32>()),
            _ => (2 << 124) | (random.random::<u128>() >> 4),
        };
        let source = Ipv6Addr::from_bits(source);
        if before.contains(&source.into()) {
            continue;
        }
        for target in targets {
            wire.send(&solicitation(source, *target, wire.to))?;
            outcome.attempts += 1;
        }
        forged.insert(source.into());
        if number % 100 == 99 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(forged)
}

/// The addresses that the node answers for: the pod's gateway, which has the address of its hardware address (RFC 4291, appendix A), and the
/// node's own.
fn targets(gateway: [u8; 6]) -> [Ipv6Addr; 2] {
    let [a, b, c, d, e, f] = gateway;
    let gateway = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    [gateway.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 11)]
}

/// The neighbours of a node.
fn neighbours(node: &NetNs) -> Result<BTreeSet<IpAddr>> {
    let mut command = Command::new("ip");
    let text = output(node.enter_on_spawn(command.args(["-6", "neighbour", "show"]))?)?;
    Ok(text.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect())
}

/// A solicitation with the sender's hardware address (RFC 4861, 4.3), to the node's hardware address.
fn solicitation(source: Ipv6Addr, target: Ipv6Addr, to: [u8; 6]) -> Vec<u8> {
    let mut message = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), &[1, 1, 2, 0, 0, 0, 0, 9]].concat();
    let length = u8::try_from(message.len()).unwrap_or_default();
    let pseudo = [&source.octets()[..], &target.octets(), &[0, 0, 0, length, 0, 0, 0, 58]].concat();
    let sum = frames::checksum(&[&pseudo[..], &message].concat());
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = [&[0x60, 0, 0, 0, 0, length, 58, 255][..], &source.octets(), &target.octets()].concat();
    [&to[..], &[2, 0, 0, 0, 0, 9], &0x86dd_u16.to_be_bytes(), &header, &message].concat()
}

/// True for an advertisement to the address.
fn is_advertisement(frame: &[u8], to: Ipv6Addr) -> bool {
    frame.len() > 54 && frame[12..14] == [0x86, 0xdd] && frame[38..54] == to.octets() && frame[54] == 136
}
