//! The steps of a migration in which everything goes well, for `--dry-run`.

use std::time::Duration;

use jiff::Timestamp;

use super::observed::{MigratingCluster, NodeRecord, OldPool, PoolRecord};
use super::steps::{MigrationStep, MigrationTimes, next_step};

/// More steps than any cluster needs: each node has four, each Service one.
const MOST_STEPS: usize = 100_000;

/// So late that nothing needs to settle.
const LATE: MigrationTimes = MigrationTimes {
    now: Timestamp::MAX,
    seen: Duration::MAX,
    waited: Duration::ZERO,
    patience: Duration::MAX,
};

/// The steps from here to the end, or to the first one that waits for somebody else.
#[must_use]
pub fn forecast(cluster: &MigratingCluster) -> Vec<MigrationStep> {
    let (mut cluster, mut steps) = (cluster.clone(), Vec::new());
    // They end without this migration.
    cluster.nodes.values_mut().for_each(|node| node.pods.retain(|pod| !pod.is_ending));
    cluster.without_address.clear();
    while steps.len() < MOST_STEPS {
        let step = next_step(&cluster, LATE);
        let is_last = matches!(
            step,
            MigrationStep::Refuse(_)
                | MigrationStep::Wait(_)
                | MigrationStep::GiveUp(_)
                | MigrationStep::DeletePool
                | MigrationStep::Done
        );
        after(&mut cluster, &step);
        steps.push(step);
        if is_last {
            break;
        }
    }
    steps
}

/// The cluster after a step whose effect has come.
fn after(cluster: &mut MigratingCluster, step: &MigrationStep) {
    let (old, new) = cluster.pools.clone();
    match step {
        MigrationStep::CreatePool => cluster.has_new = true,
        MigrationStep::ClosePool => {
            let (extra, without_address) = Default::default();
            let record = PoolRecord { to: new, since: Timestamp::MIN, without_address, extra };
            cluster.old = Some(OldPool { is_disabled: true, record: Some(record) });
        }
        MigrationStep::Cordon(name) => {
            if let Some(node) = cluster.nodes.get_mut(name) {
                node.is_schedulable = false;
                node.record
                    .get_or_insert_with(|| NodeRecord { pool: old, ..NodeRecord::default() })
                    .cordoned = true;
            }
        }
        MigrationStep::Forget(name) => {
            if let Some(node) = cluster.nodes.get_mut(name) {
                node.has_old_record = false;
            }
        }
        MigrationStep::Evict(name, pods) => {
            if let Some(node) = cluster.nodes.get_mut(name) {
                // The others are in the way, and the migration waits for them.
                node.pods.retain(|pod| !pods.iter().any(|evicted| evicted.key == pod.key));
            }
            let is_gone = |pod: &Option<tortie_api::Key>| {
                pod.as_ref().is_some_and(|key| pods.iter().any(|pod| pod.key == *key))
            };
            cluster.left.retain(|left| !is_gone(&left.pod));
        }
        MigrationStep::ReleaseTunnels(name, _) => {
            if let Some(node) = cluster.nodes.get_mut(name) {
                node.tunnels.values_mut().for_each(|tunnel| tunnel.allocated = None);
                node.tunnels.retain(|_, tunnel| tunnel.is_announced);
            }
        }
        MigrationStep::AskForTunnels(name, _) => {
            if let Some(node) = cluster.nodes.get_mut(name) {
                node.tunnels.clear();
                node.record.get_or_insert_with(|| NodeRecord { pool: old, ..NodeRecord::default() });
            }
        }
        MigrationStep::Restore { node, uncordon } => {
            if let Some(node) = cluster.nodes.get_mut(node) {
                node.record = None;
                node.is_schedulable |= *uncordon;
            }
        }
        MigrationStep::MoveService(key, _) => drop(cluster.services.remove(key)),
        MigrationStep::RemoveBlocks(_) => cluster.blocks.clear(),
        MigrationStep::DeletePool => cluster.old = None,
        MigrationStep::Refuse(_)
        | MigrationStep::Done
        | MigrationStep::Wait(_)
        | MigrationStep::GiveUp(_) => {}
    }
}
