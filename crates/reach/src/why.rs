//! Explains a verdict.

use super::path::Stop;
use tortie_oracle::{Answer, DecidedBy, Table, Trace, Verdict};

/// A verdict with its deciders.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    /// Whether packets pass.
    pub verdict: Verdict,
    /// The deciders, in the order of the path: the one that drops the packets, or all that allow them.
    pub by: Vec<Reason>,
}

/// The decider at one stop.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reason {
    /// The stop.
    pub stop: Stop,
    /// The decider.
    pub decider: Decider,
}

impl Why {
    /// The explanation of an answer of the oracle.
    #[must_use]
    pub fn of(answer: &Answer) -> Self {
        let at = |stop: Stop| -> &[Trace] {
            match stop {
                Stop::Sender => answer.egress.as_slice(),
                Stop::Receiver => answer.ingress.as_slice(),
                Stop::SenderNode | Stop::ReceiverNode => &answer.hosts,
            }
        };
        let reason = |stop: Stop| {
            // The direction is reversed for a reply, and also between a pod and its node, because packets from the
            // pod enter its node.
            let is_here =
                |trace: &&Trace| (trace.direction == stop.direction()) != (trace.reply != trace.at_pod);
            let here = at(stop).iter().filter(is_here);
            let (verdict, decider) = Decider::of(&here.cloned().collect::<Vec<_>>())?;
            (verdict == answer.verdict).then_some(Reason { stop, decider })
        };
        Self { verdict: answer.verdict, by: Stop::ALL.into_iter().filter_map(reason).collect() }
    }
}

/// The decider, and its table of a host endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decider {
    /// The rule or other decider.
    pub by: DecidedBy,
    /// The table; [`Table::Normal`] at pods.
    pub table: Table,
    /// Whether it decided about the reply.
    pub reply: bool,
}

impl Decider {
    /// The decisive trace of one stop: the first that denies, otherwise the last that allows.
    pub(super) fn of(traces: &[Trace]) -> Option<(Verdict, Self)> {
        let denies = traces.iter().find(|trace| trace.verdict == Verdict::Deny);
        let silent = |by: &DecidedBy| matches!(by, DecidedBy::Nobody | DecidedBy::EndpointToHost { .. });
        let allows = traces.iter().rfind(|trace| !silent(&trace.decided_by));
        let trace = denies.or(allows)?;
        let Trace { verdict, table, reply, .. } = *trace;
        Some((verdict, Self { by: trace.decided_by.clone(), table, reply }))
    }
}
