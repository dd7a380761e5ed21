//! A migration in clusters made at random, by somebody who is killed after each write, with a player for kubelets, schedulers,
//! agents and controllers.

mod others;
mod refusals;
mod world;

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use tortie_api::Kind;
use tortie_controllers::{MIGRATION, MigrationStep, MigrationTimes, forecast, next_step};
use tortie_store::Store;

use world::{OLD, Random, World};

const FOREVER: Duration = Duration::from_secs(3600);

/// What somebody knows who has just begun to look, except for how long nothing has changed.
fn times(waited: Duration, patience: Duration) -> MigrationTimes {
    MigrationTimes { now: jiff::Timestamp::now(), seen: Duration::ZERO, waited, patience }
}

/// What must hold after each write, whoever was killed.
async fn check(world: &World, seed: u64) {
    let nodes = world.inner.list(Kind::Node).await.unwrap().items;
    let is_cordoned = |node: &Value| node["spec"]["unschedulable"] == true;
    let begun: Vec<_> = nodes
        .iter()
        .filter(|node| {
            let record = node.value["metadata"]["annotations"][MIGRATION].as_str();
            record.is_some_and(|record| record.contains("\"cordoned\":true"))
        })
        .collect();
    assert!(begun.len() <= 1, "seed {seed}: one node at a time: {begun:?}");
    for node in &nodes {
        let by_migration = begun.iter().any(|one| one.key == node.key);
        let closed = world.closed.contains(&node.key.name);
        assert_eq!(is_cordoned(&node.value), closed || by_migration, "seed {seed}: {}", node.key);
        assert!(!(closed && by_migration), "seed {seed}: somebody else has cordoned {}", node.key);
    }
    let had_open = world.closed.len() < nodes.len();
    assert!(
        !had_open || nodes.iter().any(|node| !is_cordoned(&node.value)),
        "seed {seed}: no node takes pods"
    );
    if !world.has_old().await {
        assert_eq!(world.addresses_in_old().await, [""; 0], "seed {seed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_move_although_whoever_moves_them_is_killed_all_the_time() {
    let mut seen = BTreeSet::new();
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let mut world = World::new(&mut random).await;
        let (mut steps, mut kinds) = (0, BTreeSet::new());
        loop {
            steps += 1;
            assert!(steps < 2000, "seed {seed}: it does not end: {kinds:?}");
            // Sometimes it is killed by its first, second or third write.
            let writes = if random.one_of(2) { random.below(3) } else { 1000 };
            let step = world.step(writes, &mut random).await;
            check(&world, seed).await;
            match step {
                None => drop(kinds.insert("killed")),
                Some(MigrationStep::DeletePool) => break,
                // It was killed after the deletion, and there is nothing left to see.
                Some(MigrationStep::Refuse(why)) => {
                    assert!(
                        why[0].contains("an earlier run has ended") && !world.has_old().await,
                        "seed {seed}: {why:?}"
                    );
                    break;
                }
                Some(MigrationStep::Done | MigrationStep::GiveUp(_) | MigrationStep::Forget(_)) => {
                    panic!("seed {seed}: {step:?}")
                }
                Some(MigrationStep::CreatePool) => drop(kinds.insert("create")),
                Some(MigrationStep::ClosePool) => drop(kinds.insert("close")),
                Some(MigrationStep::Cordon(_)) => drop(kinds.insert("cordon")),
                Some(MigrationStep::Evict(..)) => drop(kinds.insert("evict")),
                Some(MigrationStep::ReleaseTunnels(..)) => drop(kinds.insert("release tunnels")),
                Some(MigrationStep::AskForTunnels(..)) => drop(kinds.insert("ask")),
                Some(MigrationStep::Restore { .. }) => drop(kinds.insert("restore")),
                Some(MigrationStep::MoveService(..)) => drop(kinds.insert("service")),
                Some(MigrationStep::RemoveBlocks(_)) => drop(kinds.insert("blocks")),
                Some(MigrationStep::Wait(_)) => drop(kinds.insert("wait")),
            }
            world.pass_time().await;
            world.play(&mut random).await;
        }
        world.settle().await;
        world.assert_moved(seed).await;
        seen.extend(kinds);
    }
    let all = [
        "ask",
        "blocks",
        "close",
        "cordon",
        "create",
        "evict",
        "killed",
        "release tunnels",
        "restore",
        "service",
        "wait",
    ];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), all, "each step must have occurred");
}

/// `--dry-run` says what happens.
#[tokio::test(flavor = "multi_thread")]
async fn the_forecast_is_what_happens_in_a_calm_cluster() {
    for seed in 100..120 {
        let mut random = Random::new(seed);
        let mut world = World::new(&mut random).await;
        world.calm();
        let cluster = world.migration(1000).await.0.observe().await.unwrap();
        let expected: Vec<String> = forecast(&cluster).iter().map(name).collect();
        let mut found = Vec::new();
        loop {
            let step = world.step(1000, &mut random).await.unwrap();
            if !matches!(step, MigrationStep::Wait(_)) {
                found.push(name(&step));
            }
            if step == MigrationStep::DeletePool {
                break;
            }
            world.pass_time().await;
            world.play(&mut random).await;
        }
        assert_eq!(found, expected, "seed {seed}");
    }
}

/// The step with its object; what it has seen there may differ.
fn name(step: &MigrationStep) -> String {
    match step {
        MigrationStep::Evict(node, pods) => format!("evict {node} {}", pods.len()),
        MigrationStep::ReleaseTunnels(node, _) => format!("release {node}"),
        MigrationStep::MoveService(key, _) => format!("move {key}"),
        MigrationStep::RemoveBlocks(blocks) => format!("remove {}", blocks.len()),
        step => format!("{step:?}"),
    }
}

/// A pod that was not evicted, an agent that is down: the operator is told, and the next run goes on.
#[tokio::test(flavor = "multi_thread")]
async fn it_gives_up_when_nothing_changes_and_says_why() {
    let mut random = Random::new(7);
    let mut world = World::with(&mut random, 2, &[]).await;
    world.add_pod("one", "old-stuck", OLD, false).await;
    for expected in ["create", "close", "agents notice"] {
        let step = world.step(1000, &mut random).await;
        let is_it = match &step {
            Some(MigrationStep::CreatePool) => expected == "create",
            Some(MigrationStep::ClosePool) => expected == "close",
            // An agent may have read the pools just before.
            Some(MigrationStep::Wait(what)) => what.contains(expected),
            _ => false,
        };
        assert!(is_it, "{expected}: {step:?}");
    }
    let mut last = None;
    for _ in 0..6 {
        last = world.step(1000, &mut random).await;
        world.pass_time().await;
    }
    assert!(
        matches!(&last, Some(MigrationStep::Wait(what)) if what.contains("pod n/old-stuck of node one end")),
        "{last:?}"
    );
    let cluster = world.migration(1000).await.0.observe().await.unwrap();
    let given_up = next_step(&cluster, times(FOREVER, FOREVER));
    assert!(matches!(&given_up, MigrationStep::GiveUp(what) if what.contains("n/old-stuck")), "{given_up:?}");
    let cordoned = world.inner.get(&tortie_api::Key::global(Kind::Node, "one")).await.unwrap().unwrap().value;
    assert_eq!(cordoned["spec"]["unschedulable"], true);
}
