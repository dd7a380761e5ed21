//! What led to a verdict.

use super::way::Stop;
use tortie_oracle::{Answer, DecidedBy, Table, Trace, Verdict};

/// A verdict, and what decided.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    /// Whether packets pass.
    pub verdict: Verdict,
    /// What decided, in the order of the way: what drops them, or everybody who lets them pass.
    pub by: Vec<Reason>,
}

/// What decided at one stop.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reason {
    /// Where.
    pub stop: Stop,
    /// What.
    pub decider: Decider,
}

impl Why {
    /// What led to an answer of the oracle.
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
            // The direction of a reply is the other one, and so is that between a pod and its node: what the pod sends
            // comes into its node.
            let is_here =
                |trace: &&Trace| (trace.direction == stop.direction()) != (trace.reply != trace.at_pod);
            let here = at(stop).iter().filter(is_here);
            let (verdict, decider) = Decider::of(&here.cloned().collect::<Vec<_>>())?;
            (verdict == answer.verdict).then_some(Reason { stop, decider })
        };
        Self { verdict: answer.verdict, by: Stop::ALL.into_iter().filter_map(reason).collect() }
    }
}

/// What decided, and in which table of a host endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decider {
    /// The rule, or whatever it was.
    pub by: DecidedBy,
    /// The table; [`Table::Normal`] at pods.
    pub table: Table,
    /// Whether it is about the reply.
    pub reply: bool,
}

impl Decider {
    /// What of the traces of one stop counts: what denies, or else what allowed last.
    pub(super) fn of(traces: &[Trace]) -> Option<(Verdict, Self)> {
        let denies = traces.iter().find(|trace| trace.verdict == Verdict::Deny);
        let silent = |by: &DecidedBy| matches!(by, DecidedBy::Nobody | DecidedBy::EndpointToHost { .. });
        let allows = traces.iter().rfind(|trace| !silent(&trace.decided_by));
        let trace = denies.or(allows)?;
        let Trace { verdict, table, reply, .. } = *trace;
        Some((verdict, Self { by: trace.decided_by.clone(), table, reply }))
    }
}
