//! The oracle judges packets directly from the resources, and explains the verdicts.
//!
//! Compiled programs are tested against [`evaluate`], and `tortie explain` prints its answers. It is naive on
//! purpose: it has no index, no sets, and does not convert one kind of policy to another. With the compiled path it
//! shares the parsing of resources (with the API's own defaults: the directions of a policy, the reasons why a rule
//! is not understood, a slice's backends) and the selector evaluator. Both have tests of their own.

mod calico;
mod cluster;
mod endpoint;
pub mod enforced;
mod hosts;
mod judge;
mod kubernetes;
mod order;
mod packet;
mod path;
mod peers;
mod profiles;
mod queries;
mod services;
mod snapshot;
mod subnet;
mod trace;
mod world;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tortie_api::net::{Direction, IpVersion, Protocol};

use endpoint::JudgedEndpoint;
use order::Tier;
use packet::Packet;
use path::{Hop, PacketPath};
pub use peers::{Peer, QuestionError, family_of};
pub use profiles::SeenProfile;
pub use queries::{SeenHost, SeenNode, SeenPod, SeenPolicy, Subject, shown_labels};
pub use services::{
    SERVICE_RULES, ServiceClient, ServiceCluster, ServiceJudgement, ServiceOutcome, ServicePacket, Visit,
    judge_service, service_health,
};
pub use snapshot::{Snapshot, Stored};
pub use subnet::Subnet;
pub use trace::{
    Answer, DecidedBy, Mismatch, PolicyName, PolicyTrace, RuleTrace, Table, TierOutcome, TierTrace, Trace,
    Verdict,
};
use world::World;

/// The question whether a packet that begins a flow passes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Question {
    /// The sender.
    pub from: Peer,
    /// The receiver.
    pub to: Peer,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its source port; 0 if the protocol has none.
    pub source_port: u16,
    /// Its destination port; 0 if the protocol has none.
    pub destination_port: u16,
    /// Its ICMP type and code, if it is ICMP or ICMPv6.
    pub icmp: Option<(u8, u8)>,
    /// The address and port that the sender used, if a Service translates them to `to` and `destination_port`. Only
    /// host endpoints see it, and only before the translation (policy decisions 5, 16).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<(IpAddr, u16)>,
    /// The node that translates `via`, if it is an address of this node (a node port or a host port). Otherwise the first node on the way
    /// translates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_node: Option<String>,
}

/// Judges one packet. For many packets over the same resources, create one [`Oracle`].
///
/// # Errors
/// The question names a pod or node that does not exist, or one without a suitable address.
pub fn evaluate(snapshot: &Snapshot, question: &Question) -> Result<Answer, QuestionError> {
    Oracle::new(snapshot).evaluate(question)
}

/// The resources, with the data that every packet needs parsed once.
pub struct Oracle<'a> {
    snapshot: &'a Snapshot,
    world: World,
    tiers: Vec<Tier<'a>>,
}

impl<'a> Oracle<'a> {
    /// Creates an oracle over these resources.
    #[must_use]
    pub fn new(snapshot: &'a Snapshot) -> Self {
        Self { snapshot, world: World::new(snapshot), tiers: order::tiers(snapshot) }
    }

    /// Judges one packet.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn evaluate(&self, question: &Question) -> Result<Answer, QuestionError> {
        Ok(self.judge_path(question, peers::resolve(&self.world, question, None)?))
    }

    /// Judges a packet of one family. ([`Oracle::evaluate`] takes IPv4 if both ends have it.)
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn evaluate_by(&self, question: &Question, family: IpVersion) -> Result<Answer, QuestionError> {
        Ok(self.judge_path(question, peers::resolve(&self.world, question, Some(family))?))
    }

    fn judge_path(&self, question: &Question, path: PacketPath<'_>) -> Answer {
        let packet = Packet::new(&self.world, path.source, path.destination, question);
        let mut answer = Answer {
            verdict: Verdict::Allow,
            source: path.source,
            destination: path.destination,
            notes: path.notes,
            egress: None,
            ingress: None,
            hosts: Vec::new(),
        };
        // Every hop must allow the packet (policy decision 5).
        for hop in &path.hops {
            match hop {
                Hop::Pod(pod, direction, source) => {
                    let packet = packet.with_source(*source);
                    let to_own_node = path.hops.iter().any(|hop| matches!(hop, Hop::OwnNode(_)));
                    let built_in = match direction {
                        Direction::Egress => self.built_in(pod, to_own_node, &packet),
                        Direction::Ingress => None,
                    };
                    if built_in.as_ref().is_some_and(|trace| trace.verdict == Verdict::Allow) {
                        answer.egress = built_in;
                        return answer;
                    }
                    let before = built_in
                        .or_else(|| self.before_policy(pod, *direction, &packet, false, &mut answer.notes));
                    let trace =
                        before.unwrap_or_else(|| self.judge(&JudgedEndpoint::pod(pod), *direction, &packet));
                    answer.verdict = answer.verdict.and(trace.verdict);
                    match direction {
                        Direction::Egress => answer.egress = Some(trace),
                        Direction::Ingress => answer.ingress = Some(trace),
                    }
                }
                Hop::Probed(pod) => {
                    let before =
                        self.before_policy(pod, Direction::Ingress, &packet, true, &mut answer.notes);
                    let verdict = before.as_ref().map_or(Verdict::Allow, |trace| trace.verdict);
                    if verdict == Verdict::Deny {
                        answer
                            .notes
                            .push(format!("static rules of {}'s node come before its probes", pod.identity));
                    }
                    answer.verdict = answer.verdict.and(verdict);
                    answer.ingress = before;
                }
                Hop::Host(hop) => {
                    let packet = packet.with_source(hop.source);
                    for trace in self.judge_host(hop, &packet, &mut answer.notes) {
                        answer.verdict = answer.verdict.and(trace.verdict);
                        answer.hosts.push(trace);
                    }
                }
                Hop::OwnNode(node) => {
                    let trace = self.to_own_node(node);
                    answer.verdict = answer.verdict.and(trace.verdict);
                    answer.hosts.push(trace);
                }
            }
        }
        answer
    }
}
