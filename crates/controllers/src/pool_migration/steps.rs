//! What to do next. Pure: an observed cluster in, a step out.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};
use tortie_api::Key;
use tortie_ipam::Release;

use super::observed::{MigratingCluster, MigratingNode, MigratingPod, NodeRecord};
use super::places::has_others;
use crate::pools::{MIGRATION, SETTLE};

/// A step of a migration.
#[derive(Debug, Clone, PartialEq)]
pub enum MigrationStep {
    /// It must not begin, or go on: it could not end, or it would do harm.
    Refuse(Vec<String>),
    /// Create the new pool.
    CreatePool,
    /// Disable the old pool and record where it moves, in one write.
    ClosePool,
    /// Let no more pods be scheduled on the node, and record it, in one write.
    Cordon(String),
    /// Remove the record of an earlier migration of the pool, which was abandoned, from the node. Who has cordoned the node since is
    /// unknown, so it stays as it is.
    Forget(String),
    /// Evict these pods of a node.
    Evict(String, Vec<MigratingPod>),
    /// Release these tunnel addresses of a node.
    ReleaseTunnels(String, Vec<(IpNet, Release)>),
    /// Record that they are released. The write makes the node's agent look for others.
    AskForTunnels(String, BTreeSet<IpAddr>),
    /// Remove the record of a node, and let pods be scheduled there again, in one write.
    Restore {
        /// The node.
        node: String,
        /// Whether the migration had cordoned it.
        uncordon: bool,
    },
    /// Release the addresses of a Service, so that the controllers give it others.
    MoveService(Key, Vec<(IpNet, Release)>),
    /// Remove these blocks, which have no addresses, and their affinities.
    RemoveBlocks(BTreeSet<IpNet>),
    /// Delete the old pool: nothing uses it. The migration ends with it.
    DeletePool,
    /// The old pool is deleted, and no node has a record of the migration any more.
    Done,
    /// Look again soon. It says for what.
    Wait(String),
    /// Nothing has changed for longer than the caller's patience. The next run continues.
    GiveUp(String),
}

impl MigrationStep {
    /// What follows if the step has been tried for longer than the caller's patience, and nothing is different.
    pub(super) fn without_effect(self) -> Self {
        let what = match &self {
            Self::Refuse(_)
            | Self::DeletePool
            | Self::Done
            | Self::Wait(_)
            | Self::GiveUp(_)
            | Self::Evict(..) => return self,
            Self::CreatePool => "the new pool is created, and does not exist then".to_owned(),
            Self::ClosePool => "the old pool is closed, and is not closed then".to_owned(),
            Self::Cordon(node) => format!("node {node} is cordoned, and can take pods then"),
            Self::Forget(node) | Self::Restore { node, .. } | Self::AskForTunnels(node, _) => {
                format!("the annotation {MIGRATION} of node {node} is written, and is as before then")
            }
            Self::ReleaseTunnels(node, _) => {
                format!("the tunnel address of node {node} is released, and is allocated then")
            }
            Self::MoveService(key, _) => {
                format!("the addresses of {key} are released, and are allocated then")
            }
            Self::RemoveBlocks(_) => "the blocks of the old pool are removed, and exist then".to_owned(),
        };
        Self::GiveUp(format!("{what}; somebody undoes it"))
    }
}

/// What whoever carries out a migration knows of times.
#[derive(Debug, Clone, Copy)]
pub struct MigrationTimes {
    /// The time by its clock.
    pub now: Timestamp,
    /// For how long it has seen the old pool closed. That needs no clock of somebody else.
    pub seen: Duration,
    /// How long nothing has changed.
    pub waited: Duration,
    /// How long it waits for a change.
    pub patience: Duration,
}

/// The next step.
#[must_use]
pub fn next_step(cluster: &MigratingCluster, times: MigrationTimes) -> MigrationStep {
    let step = step(cluster, times);
    if times.waited < times.patience {
        return step;
    }
    match step {
        MigrationStep::Wait(what) => MigrationStep::GiveUp(what),
        MigrationStep::Evict(node, pods) => {
            let problem = format!("{} of node {node} cannot be evicted", names(&pods));
            MigrationStep::GiveUp(with_way_out(cluster, &node, problem))
        }
        step => step,
    }
}

/// Whether agents may still use the old pool as they knew it. The clock of whoever closed it may be ahead.
fn settles(since: Timestamp, MigrationTimes { now, seen, .. }: MigrationTimes) -> bool {
    let settle = SignedDuration::try_from(SETTLE).unwrap_or(SignedDuration::ZERO);
    seen < SETTLE && now.duration_since(since) < settle
}

fn step(cluster: &MigratingCluster, times: MigrationTimes) -> MigrationStep {
    // Exhaustive, so that nothing observed is forgotten.
    let MigratingCluster { refusals, pools: _, old, has_new, nodes, without_address, services, left, blocks } =
        cluster;
    if !refusals.is_empty() {
        return MigrationStep::Refuse(refusals.clone());
    }
    let Some(old) = old else {
        let recorded = nodes.iter().find_map(|(name, node)| Some((name, node.record.as_ref()?)));
        return recorded.map_or(MigrationStep::Done, |(name, record)| restore(name, record));
    };
    if !has_new {
        return MigrationStep::CreatePool;
    }
    // A pool that has a record and is open, or that moves elsewhere, is refused: somebody wants it to stay.
    let Some(closed) = &old.record else { return MigrationStep::ClosePool };
    if settles(closed.since, times) {
        return MigrationStep::Wait("agents notice within seconds that the old pool is closed".to_owned());
    }
    if let Some((name, _)) = nodes.iter().find(|(_, node)| node.has_old_record) {
        return MigrationStep::Forget(name.clone());
    }
    // A node that was begun is finished first, so that only one node is cordoned at a time.
    let mut in_order: Vec<(&String, &MigratingNode)> = nodes.iter().collect();
    in_order.sort_by_key(|(_, node)| node.record.is_none());
    let next = in_order.into_iter().find_map(|(name, node)| Some((node, of_node(cluster, name, node)?)));
    if let Some((node, step)) = next {
        // Pods that were evicted run again before the next node loses its own; if they get no addresses, no more are evicted.
        let begins = node.record.is_none() && !node.pods.is_empty();
        let with_reason = || without_address.iter().find(|(_, pod)| pod.obstacle.is_some());
        let waiting = with_reason().or_else(|| without_address.first_key_value());
        if let Some((key, pod)) = waiting.filter(|_| begins) {
            let remedy = pod.obstacle.as_deref().unwrap_or("if that lasts, look at its events");
            return MigrationStep::Wait(format!(
                "{} of the pods that were started since have no address yet, such as {key}; {remedy}",
                without_address.len()
            ));
        }
        return step;
    }
    if let Some(waiting) = services.iter().find(|(_, service)| service.allocated.is_empty()) {
        let shown: Vec<String> = waiting.1.shown.iter().map(ToString::to_string).collect();
        return MigrationStep::Wait(format!(
            "{} still shows {}; `tortie controllers` give it another address within a minute",
            waiting.0,
            shown.join(", ")
        ));
    }
    // One after another: an address that is moved costs the Service's clients their connections.
    if let Some((key, service)) = services.iter().find(|(_, service)| service.obstacle.is_none()) {
        return MigrationStep::MoveService(key.clone(), service.allocated.clone());
    }
    if let Some(obstacle) = services.values().find_map(|service| service.obstacle.clone()) {
        return MigrationStep::Wait(obstacle);
    }
    if !left.is_empty() {
        let all: Vec<&str> = left.iter().map(|left| left.why.as_str()).collect();
        return MigrationStep::Wait(all.join("; "));
    }
    if !blocks.is_empty() {
        return MigrationStep::RemoveBlocks(blocks.keys().copied().collect());
    }
    MigrationStep::DeletePool
}

/// The next step of a node; `None` if it has none.
fn of_node(cluster: &MigratingCluster, name: &String, node: &MigratingNode) -> Option<MigrationStep> {
    let MigratingNode {
        is_schedulable,
        is_ready: _,
        is_windows: _,
        taints: _,
        record,
        has_old_record: _,
        pods,
        tunnels,
    } = node;
    if !pods.is_empty() {
        let left = pods.iter().filter(|pod| !pod.is_ending);
        let (kept, movable): (Vec<_>, Vec<_>) = left.cloned().partition(|pod| pod.obstacle.is_some());
        let obstacle = kept.into_iter().find_map(|pod| pod.obstacle);
        if let Some(obstacle) = obstacle.filter(|_| movable.is_empty()) {
            return Some(MigrationStep::Wait(obstacle));
        }
        // If somebody has uncordoned it meanwhile, that is respected: the closed pool gives no address anyway.
        let may_cordon = *is_schedulable && !record.as_ref().is_some_and(|record| record.cordoned);
        // Pods whose budgets need them elsewhere would wait for ever if no other node took them.
        if may_cordon && has_others(cluster, name, node) {
            return Some(MigrationStep::Cordon(name.clone()));
        }
        return Some(match movable.is_empty() {
            true => MigrationStep::Wait(format!("{} of node {name} end", names(pods))),
            false => MigrationStep::Evict(name.clone(), movable),
        });
    }
    let allocated: Vec<(IpNet, Release)> =
        tunnels.values().filter_map(|tunnel| tunnel.allocated.clone()).collect();
    if !allocated.is_empty() {
        return Some(MigrationStep::ReleaseTunnels(name.clone(), allocated));
    }
    let announced: BTreeSet<IpAddr> = tunnels.keys().copied().collect();
    if let Some(address) = announced.first() {
        let asked = record.as_ref().map(|record| &record.released_tunnels);
        return Some(match asked.is_some_and(|asked| announced.is_subset(asked)) {
            false => MigrationStep::AskForTunnels(name.clone(), announced),
            true => MigrationStep::Wait(format!(
                "node {name} still announces the tunnel address {address}; its agent takes another one, so check that it runs"
            )),
        });
    }
    record.as_ref().map(|record| restore(name, record))
}

/// A problem of a node's pods, with what helps if the migration has cordoned the node.
fn with_way_out(cluster: &MigratingCluster, node: &str, problem: String) -> String {
    match cluster.way_out(node) {
        Some(way_out) => format!("{problem}; {way_out}"),
        None => problem,
    }
}

fn restore(node: &str, record: &NodeRecord) -> MigrationStep {
    MigrationStep::Restore { node: node.to_owned(), uncordon: record.cordoned }
}

/// The pods, in words.
fn names(pods: &[MigratingPod]) -> String {
    let names: Vec<String> =
        pods.iter().map(|pod| format!("{}/{}", pod.key.namespace, pod.key.name)).collect();
    format!("{} {}", if names.len() == 1 { "pod" } else { "pods" }, names.join(", "))
}
