//! A pod that fills the connection tracking of its node.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::Rng as _;
use tortie_api::net::Protocol;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::sysctl;
use tortie_policy::program::Flow;

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NAMESPACE, NODES};
use crate::process::wait_until;
use crate::wire::Wire;

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "tracking",
    attacker: "an unprivileged pod sends datagrams from and to very many ports, each of which is a flow of connection tracking, until four \
               fifths of the node's limit are in use",
    holds: "the node's report names the pod in ConnectionsNearLimit, and nobody without an attack",
    run,
};

const REASON: &str = "ConnectionsNearLimit";
/// How long the condition may take: agents look every ten seconds.
const BOUND: Duration = Duration::from_secs(60);
/// How long filling may take. Flows end after 30 seconds (`nf_conntrack_udp_timeout`).
const FILL: Duration = Duration::from_secs(25);

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::with_pods(&bounds.program, &[])?;
    let (node, pod) = (lab.netns_of_node(NODES[0])?, lab.netns_of_pod("attacker")?);
    let wire = Wire::of_pod(&pod, &node)?;
    let [IpAddr::V4(own)] = lab.addresses("attacker")?[..] else {
        anyhow::bail!("the pod has other addresses")
    };
    let mut outcome = Outcome::default();
    outcome.control(condition(&lab)?.is_none(), "the node reports it without an attack")?;
    while bounds.another_round() {
        let (first, begun) = (bounds.random.random(), Instant::now());
        let (mut sent, mut flows) = (0, 0);
        let limit = number(&node, "nf_conntrack_max")?;
        while flows < limit - limit / 8 && begun.elapsed() < FILL {
            for _ in 0..2_000 {
                send(&wire, own, first, sent)?;
                sent += 1;
            }
            flows = number(&node, "nf_conntrack_count")?;
        }
        outcome.attempts += u64::from(sent);
        outcome.control(
            flows >= limit - limit / 5,
            &format!("{sent} datagrams have made {flows} flows, of {limit} that are possible"),
        )?;
        // A few more, so that flows that end are replaced until the agent has looked.
        let named = wait_until(BOUND, || {
            for _ in 0..20_000 {
                send(&wire, own, first, sent)?;
                sent += 1;
            }
            Ok(condition(&lab)?.is_some())
        })?;
        let text = condition(&lab)?.unwrap_or_default();
        if !named || !text.contains(&format!("{NAMESPACE}/attacker")) {
            outcome.blame(format!("the node does not name the pod: {text:?}"));
        }
        outcome
            .notes
            .push(format!("{flows} flows of {limit} after {:.1} s: {text}", begun.elapsed().as_secs_f64()));
    }
    lab.down()?;
    Ok(outcome)
}

/// Sends the datagram of this number, which begins a flow.
fn send(wire: &Wire, own: Ipv4Addr, first: u32, number: u32) -> Result<()> {
    let number = first.wrapping_add(number);
    let [_, host, high, low] = number.to_be_bytes();
    let flow = Flow {
        source: own.into(),
        destination: Ipv4Addr::new(198, 18, 0, host).into(),
        protocol: Protocol::UDP,
        source_port: 40_000,
        destination_port: u16::from_be_bytes([high, low]).max(1),
        icmp: None,
    };
    wire.send_flow(&flow, number)
}

fn number(node: &NetNs, name: &str) -> Result<u64> {
    let text = node.run(|| sysctl::read(&format!("net/netfilter/{name}")))??;
    let number = text.trim().parse().context("connection tracking")?;
    ensure!(number < 2_000_000, "{name} is {number}: too many flows for an attack");
    Ok(number)
}

/// The message of the condition, if the node reports it.
fn condition(lab: &Lab) -> Result<Option<String>> {
    let conditions = lab.conditions(NODES[0])?;
    let of_tracking = conditions.iter().find(|condition| condition["reason"] == REASON);
    Ok(of_tracking.map(|condition| condition["message"].as_str().unwrap_or_default().to_owned()))
}
