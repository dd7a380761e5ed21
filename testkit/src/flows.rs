//! Converts random packets to flows that a kernel can be asked about.

use std::collections::BTreeSet;

use tortie_api::net::Protocol;
use tortie_oracle::{Answer, Oracle, Peer, Question};
use tortie_policy::program::Flow;

use crate::clusters::Sent;

/// The packets as flows that leave their sender. None is the answer to another one, because it would pass.
#[must_use]
pub fn beginnings(packets: &[Sent]) -> Vec<Flow> {
    let mut answers = BTreeSet::new();
    let mut begins = |flow: &Flow| {
        let Flow { source, destination, protocol, source_port, destination_port, .. } = *flow;
        if source == destination
            || answers.contains(&(protocol, source, source_port, destination, destination_port))
        {
            return false;
        }
        answers.insert((protocol, destination, destination_port, source, source_port));
        true
    };
    packets.iter().map(beginning).filter(|flow| begins(flow)).collect()
}

/// The oracle's verdict on a flow.
///
/// # Panics
/// If the flow has addresses of two families.
#[must_use]
#[expect(clippy::expect_used, reason = "of tests: their flows have two addresses of one family")]
pub fn judged(oracle: &Oracle<'_>, flow: &Flow) -> Answer {
    let question = Question {
        from: Peer::Address(flow.source),
        to: Peer::Address(flow.destination),
        protocol: flow.protocol,
        source_port: flow.source_port,
        destination_port: flow.destination_port,
        icmp: flow.icmp,
        via: None,
        by_node: None,
    };
    oracle.evaluate(&question).expect("a flow between addresses can be judged")
}

/// The command that explains the verdict, for the cluster in `cluster.yml`.
#[must_use]
pub fn explain(flow: &Flow) -> String {
    let port = match flow.icmp {
        Some((kind, _)) => format!("icmp/{kind}"),
        None => format!("{}/{}", flow.protocol.to_string().to_lowercase(), flow.destination_port),
    };
    format!("tortie explain -f cluster.yml {} {} --port {port}", flow.source, flow.destination)
}

/// ICMP has the family of its addresses and is a request: a reply without a request belongs to no flow, and is
/// dropped whatever policy says.
fn beginning(packet: &Sent) -> Flow {
    let v4 = packet.source.is_ipv4();
    let icmp = packet.icmp.map(|(kind, code)| match (v4, kind) {
        (true, 13 | 128) => (13, code),
        (true, _) => (8, code),
        (false, _) => (128, code),
    });
    let protocol = match icmp {
        Some(_) if v4 => Protocol::ICMP,
        Some(_) => Protocol::ICMPV6,
        None => packet.protocol,
    };
    let Sent { source, destination, source_port, destination_port, .. } = *packet;
    Flow { source, destination, protocol, source_port, destination_port, icmp }
}
