//! Whether the agent works, for probes: `/healthz` and `/readyz`.
//!
//! `/healthz` fails if only a restart can help. `/readyz` fails while ADD would fail for something on this node that policy or pods need.
//! Neither depends on other nodes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tortie_dataplane::Reason;

use crate::plane::InForce;

/// The maximum duration of one call of the dataplane. The largest clusters of the benchmarks take seconds.
const MAX_BUSY: Duration = Duration::from_secs(300);

/// The addresses for probes and metrics that cannot be served now, with the reasons.
pub(crate) type Taken = BTreeMap<SocketAddr, String>;

/// How far the start of the agent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Stage {
    /// The datastore does not answer yet, or has no Node for the agent.
    FindNode,
    /// Somebody has locked the datastore, so the agent waits. It counts as ready: a rollout must reach all nodes before
    /// the datastore that they change to is unlocked.
    Locked,
    /// The node gets its tunnel.
    PrepareNode,
    /// The agent reads the cluster for the first time.
    ReadCluster,
    /// The sockets exist, and the container runtime has its configuration.
    Serve,
}

/// The stage of the agent's start.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    stage: AtomicU8,
    /// Whether pods are closed because the node had no policy.
    has_closed: Option<Arc<AtomicBool>>,
    /// The cause of a long wait at the agent's start, if it is known.
    awaited: Mutex<Option<String>>,
}

impl Progress {
    pub(crate) fn new(has_closed: Option<Arc<AtomicBool>>) -> Self {
        Self { has_closed, ..Self::default() }
    }

    pub(crate) fn reach(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// Takes note of what the agent has waited for at its start for long.
    pub(crate) fn wait_for(&self, problem: &str) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem.to_owned());
    }

    fn awaited(&self) -> Option<String> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether pods are closed until the agent knows the cluster.
    pub(crate) fn has_closed(&self) -> bool {
        self.has_closed.as_ref().is_some_and(|has_closed| has_closed.load(Ordering::Relaxed))
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Relaxed) {
            0 => Stage::FindNode,
            1 => Stage::Locked,
            2 => Stage::PrepareNode,
            3 => Stage::ReadCluster,
            _ => Stage::Serve,
        }
    }
}

/// Why the agent is not healthy. The agent ends by itself when a part of it ends, so only a call that never returns
/// remains.
pub(crate) fn health(busy: Option<Duration>) -> Result<(), String> {
    match busy {
        Some(busy) if busy > MAX_BUSY => {
            Err(format!("the dataplane has been in one call for {} seconds", busy.as_secs()))
        }
        _ => Ok(()),
    }
}

/// Why the agent is not ready.
pub(crate) fn readiness(progress: &Progress, now: &InForce) -> Result<(), String> {
    let stage = progress.stage();
    if stage < Stage::Serve && now.given.is_empty() && progress.has_closed() {
        return Err("the node had no policy, so pods are closed until the agent knows the cluster; its log says what it waits for".to_owned());
    }
    match stage {
        Stage::FindNode => {
            let awaited = progress.awaited();
            return Err(awaited.unwrap_or_else(|| "the agent waits for the datastore and for its Node".to_owned()));
        }
        Stage::Locked => return Ok(()),
        Stage::PrepareNode => return Err("the agent prepares the node's tunnel; with --flannel-etcd, it may wait for flannel's etcd, which its log says".to_owned()),
        Stage::ReadCluster if now.given.is_empty() => {
            let blocking = now.blocking();
            return Err(match blocking.is_empty() {
                true => "the agent reads the cluster for the first time".to_owned(),
                false => format!("no policy is applied: {}", blocking.join("; ")),
            });
        }
        Stage::ReadCluster | Stage::Serve => {}
    }
    let failures: Vec<String> =
        now.report.node_failures().map(|one| format!("{}: {one}", one.reason)).collect();
    if !failures.is_empty() {
        return Err(format!("not in force on this node: {}", failures.join("; ")));
    }
    if stage < Stage::Serve {
        return Err("the agent does not serve the CNI plugin yet, or cannot write its configuration, which the node's report says".to_owned());
    }
    // Without its subnet, the node has no addresses for new pods. Other nodes that are out of reach do not count: a rollout must go on where
    // only they are.
    let lost = now.unsupported.iter().find(|one| one.reason == Reason::SubnetLost);
    lost.map_or(Ok(()), |lost| Err(lost.message.clone()))
}

#[cfg(test)]
mod tests {
    use tortie_api::{Key, Kind, Position};
    use tortie_dataplane::Condition;

    use super::*;
    use crate::unsupported::Unsupported;

    #[test]
    fn an_agent_is_ready_when_everything_is_in_force_and_served() {
        let read = InForce {
            given: [(Kind::Pod, Position(1))].into_iter().collect(),
            positions: [(Kind::Pod, Position(1))].into_iter().collect(),
            ..InForce::default()
        };
        let mut failed = read.clone();
        failed.report.node.push(Condition::new(Reason::PolicyNotInForce, "the kernel rejects it"));
        let mut informed = read.clone();
        informed.report.node.push(Condition::new(Reason::CalicoLeftover, "a chain"));
        // The node reaches no other node.
        let mut cut_off = read.clone();
        for reason in [Reason::RouteRefused, Reason::BlockUnreachable] {
            let (object, message) = (Key::global(Kind::Node, "n"), format!("{reason} of 10.5.2.0-24"));
            cut_off.unsupported.push(Unsupported { object, reason, message });
        }
        for reason in [Reason::ForeignVxlanLink, Reason::RouteTaken, Reason::VxlanPortNotSupported] {
            cut_off.report.node.push(Condition::new(reason, "a message"));
        }
        let mut lost = cut_off.clone();
        let (object, message) = (Key::global(Kind::Node, "n"), "the subnet 10.5.2.0-24 is lost".to_owned());
        lost.unsupported.push(Unsupported { object, reason: Reason::SubnetLost, message });
        let refused = tortie_store::StoreError::Forbidden("may not list tiers".to_owned());
        let blocked = InForce { unavailable: [(Kind::Tier, refused)].into(), ..InForce::default() };
        for (stage, now, expected) in [
            (Stage::ReadCluster, &blocked, "cannot read objects of kind Tier"),
            (Stage::FindNode, &InForce::default(), "waits for the datastore"),
            (Stage::PrepareNode, &InForce::default(), "prepares the node's tunnel"),
            (Stage::ReadCluster, &InForce::default(), "reads the cluster"),
            (Stage::ReadCluster, &failed, "PolicyNotInForce: the kernel rejects it"),
            (Stage::ReadCluster, &read, "does not serve"),
            (Stage::Serve, &failed, "PolicyNotInForce"),
            (Stage::Serve, &cut_off, ""),
            (Stage::Serve, &lost, "the subnet 10.5.2.0-24 is lost"),
            (Stage::Serve, &informed, ""),
            (Stage::Serve, &read, ""),
        ] {
            let progress = Progress::default();
            progress.reach(stage);
            let problem = readiness(&progress, now).err().unwrap_or_default();
            assert!(
                problem.contains(expected) && problem.is_empty() == expected.is_empty(),
                "{stage:?}: {problem}"
            );
        }
    }

    /// A rollout must not go on while it closes pods, also if the datastore is locked.
    #[test]
    fn an_agent_that_has_closed_pods_is_not_ready() {
        let has_closed = Arc::new(AtomicBool::new(false));
        let progress = Progress::new(Some(has_closed.clone()));
        progress.reach(Stage::Locked);
        assert_eq!(readiness(&progress, &InForce::default()), Ok(()));
        has_closed.store(true, Ordering::Relaxed);
        assert!(readiness(&progress, &InForce::default()).unwrap_err().contains("the node had no policy"));
        let given = [(Kind::Pod, Position(1))].into_iter().collect();
        progress.reach(Stage::Serve);
        assert_eq!(readiness(&progress, &InForce { given, ..InForce::default() }), Ok(()));
    }

    #[test]
    fn a_probe_learns_that_there_is_no_node() {
        let progress = Progress::default();
        progress.wait_for("Node PRIMARY does not exist");
        let problem = readiness(&progress, &InForce::default()).unwrap_err();
        assert!(problem.contains("Node PRIMARY"), "{problem}");
        progress.reach(Stage::PrepareNode);
        assert!(!readiness(&progress, &InForce::default()).unwrap_err().contains("PRIMARY"));
    }

    #[test]
    fn stages_are_kept() {
        let progress = Progress::default();
        for stage in [Stage::FindNode, Stage::PrepareNode, Stage::ReadCluster, Stage::Serve] {
            progress.reach(stage);
            assert_eq!(progress.stage(), stage);
        }
    }

    #[test]
    fn a_call_that_does_not_return_is_not_healthy() {
        assert_eq!(health(None), Ok(()));
        assert_eq!(health(Some(Duration::from_secs(299))), Ok(()));
        assert!(health(Some(Duration::from_secs(301))).unwrap_err().contains("301 seconds"));
    }
}
