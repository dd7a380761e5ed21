//! Somebody else changes objects while a migration runs.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_controllers::{
    MIGRATION, MigratingCluster, MigratingPod, MigrationError, MigrationStep, MigrationTimes, forecast,
    next_step,
};
use tortie_store::{Permission, Store, StoreError};

use super::refusals::{begin, change, pool, record, world};
use super::times;
use super::world::{OLD, World, pod_key, set_annotation};
use crate::common::{everything, put, value};

const PATIENCE: Duration = Duration::from_secs(1);

fn node(name: &str) -> Key {
    Key::global(Kind::Node, name)
}

/// Carries out a step in a cluster that has changed since it was observed.
async fn after(
    world: &World,
    step: MigrationStep,
    key: &Key,
    changed: impl FnOnce(&mut Value),
) -> Result<(), MigrationError> {
    let migration = world.migration(1000).await.0;
    let cluster = migration.observe().await.unwrap();
    assert_eq!(cluster.refusals, [""; 0]);
    change(world, key, changed).await;
    migration.carry_out(cluster, step).await.map(drop)
}

fn cordon(node: &mut Value) {
    node["spec"]["unschedulable"] = json!(true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_somebody_cordons_meanwhile_stays_theirs() {
    let world = world().await;
    begin(&world).await;
    after(&world, MigrationStep::Cordon("one".into()), &node("one"), cordon).await.unwrap();
    assert!(value(&*world.inner, &node("one")).await["metadata"]["annotations"][MIGRATION].is_null());
    after(&world, MigrationStep::Cordon("two".into()), &node("one"), |_| {}).await.unwrap();
    let annotations = value(&*world.inner, &node("two")).await["metadata"]["annotations"].clone();
    let text = annotations[MIGRATION].as_str().unwrap();
    assert!(text.contains("\"cordoned\":true") && text.contains("2026-01-01T00:00:00Z"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_stops_if_somebody_has_begun_something_else() {
    let moves = |to: &'static str| move |it: &mut Value| set_annotation(it, MIGRATION, &record(to));
    let of_other = |it: &mut Value| set_annotation(it, MIGRATION, r#"{"pool": "first", "cordoned": true}"#);
    let disabled = |it: &mut Value| it["spec"]["disabled"] = json!(true);
    let enabled = |it: &mut Value| it["spec"]["disabled"] = json!(false);
    let forgotten = |it: &mut Value| it["metadata"]["annotations"] = json!({});
    let affinity = Key::global(Kind::BlockAffinity, "one/10.1.0.0/29");
    let block = Key::global(Kind::IpamBlock, "10.1.0.0/29");
    let (close, delete) = (MigrationStep::ClosePool, MigrationStep::DeletePool);
    type Change = Box<dyn FnOnce(&mut Value)>;
    let rows: [(bool, MigrationStep, Key, Change, &str); 8] = [
        (
            false,
            close.clone(),
            pool("old"),
            Box::new(moves("third")),
            "IPPool old moves to third since a moment ago",
        ),
        (false, close.clone(), pool("new"), Box::new(disabled), "IPPool new was closed or deleted meanwhile"),
        (false, close, pool("new"), Box::new(moves("third")), "IPPool new was closed or deleted meanwhile"),
        (
            true,
            MigrationStep::Cordon("one".into()),
            node("one"),
            Box::new(of_other),
            "Node one has the annotation tortie.io/pool-migration of a migration of IPPool first",
        ),
        (true, delete.clone(), pool("old"), Box::new(enabled), "it stays"),
        (true, delete.clone(), pool("old"), Box::new(forgotten), "it stays"),
        (true, delete.clone(), affinity, Box::new(|_| {}), "BlockAffinity one/10.1.0.0/29 is there again"),
        (true, delete, block, Box::new(|_| {}), "IPAMBlock 10.1.0.0/29 is there again"),
    ];
    for (has_begun, step, key, changed, expected) in rows {
        let world = World::with(&mut super::world::Random::new(5), 2, &[]).await;
        for name in ["one", "two"] {
            let records = tortie_ipam::Records::new(world.inner.clone());
            records.release_node(name).await.unwrap();
        }
        let (migration, _) = world.migration(1000).await;
        assert_eq!(
            migration.step(Duration::ZERO, Duration::MAX).await.unwrap().step,
            MigrationStep::CreatePool
        );
        if has_begun {
            begin(&world).await;
        }
        let before = everything(&*world.inner).await;
        let error = after(&world, step, &key, changed).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        let now = everything(&*world.inner).await;
        let differ: BTreeSet<_> = now.keys().filter(|key| now.get(key) != before.get(key)).collect();
        assert_eq!(differ, BTreeSet::from([&key]), "{expected}");
        assert!(before.keys().all(|key| now.contains_key(key)), "{expected}");
    }
}

/// A record from a migration that was abandoned says nothing about who has cordoned the node since.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_an_abandoned_migration_uncordon_nothing() {
    let mut world = world().await;
    let left = r#"{"pool": "old", "cordoned": true, "since": "2025-01-01T00:00:00Z"}"#;
    change(&world, &node("two"), |node| {
        cordon(node);
        set_annotation(node, MIGRATION, left);
    })
    .await;
    world.calm();
    let mut random = super::world::Random::new(1);
    let mut steps = Vec::new();
    while steps.last() != Some(&MigrationStep::DeletePool) {
        assert!(steps.len() < 200, "{steps:?}");
        steps.push(world.step(1000, &mut random).await.unwrap());
        world.pass_time().await;
        world.play(&mut random).await;
        assert_eq!(value(&*world.inner, &node("two")).await["spec"]["unschedulable"], true, "{steps:?}");
    }
    assert!(steps.contains(&MigrationStep::Forget("two".into())), "{steps:?}");
    world.assert_moved(0).await;
}

/// Pods that can run nowhere else would have no successors, and budgets would keep the others for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_cordoned_only_if_another_one_takes_its_pods() {
    let taint = json!([{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]);
    let not_ready = json!({"conditions": [{"type": "Ready", "status": "Unknown"}]});
    for (spec, status, takes) in [
        (json!({}), json!({}), true),
        (json!({"taints": taint}), json!({}), false),
        (json!({"unschedulable": true}), json!({}), false),
        (json!({}), not_ready, false),
    ] {
        let mut random = super::world::Random::new(5);
        let mut world = World::with(&mut random, 2, &[]).await;
        world.add_pod("one", "old-1", OLD, true).await;
        begin(&world).await;
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::CreatePool));
        change(&world, &node("two"), |node| {
            (node["spec"], node["status"]) = (spec.clone(), status.clone());
        })
        .await;
        let cluster = world.migration(1000).await.0.observe().await.unwrap();
        let step = next_step(&cluster, times(Duration::ZERO, Duration::MAX));
        match takes {
            true => assert_eq!(step, MigrationStep::Cordon("one".into())),
            false => assert!(matches!(&step, MigrationStep::Evict(node, _) if node == "one"), "{step:?}"),
        }
    }
    // The other node is lost after that.
    let mut world = world().await;
    let mut random = super::world::Random::new(5);
    begin(&world).await;
    assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::CreatePool));
    assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::Cordon("one".into())));
    for is_cordoned in [true, false] {
        change(&world, &node("one"), |node| node["spec"]["unschedulable"] = json!(is_cordoned)).await;
        let cluster = world.migration(1000).await.0.observe().await.unwrap();
        let hour = Duration::from_secs(3600);
        let MigrationStep::GiveUp(what) = next_step(&cluster, times(hour, hour)) else { panic!() };
        assert!(what.contains("pod n/old-1 of node one cannot be evicted"), "{what}");
        assert_eq!(what.contains("uncordon it (`kubectl uncordon one`)"), is_cordoned, "{what}");
    }
}

/// The time in the record is that of another machine, which may be ahead.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_the_future_holds_nobody_for_long() {
    let world = world().await;
    begin(&world).await;
    world.migration(1000).await.0.step(Duration::ZERO, Duration::MAX).await.unwrap();
    let closed = Timestamp::now() + jiff::SignedDuration::from_hours(1);
    let record = json!({"to": "new", "since": closed.to_string()}).to_string();
    change(&world, &pool("old"), |old| set_annotation(old, MIGRATION, &record)).await;
    let cluster = world.migration(1000).await.0.observe().await.unwrap();
    let second = jiff::SignedDuration::from_secs(1);
    let cordon = MigrationStep::Cordon("one".into());
    for (now, seen, goes_on) in [
        (closed - second * 3600, 0, false),
        (closed - second * 3600, 9, false),
        (closed - second * 3600, 10, true),
        (closed, 0, false),
        (closed + second * 9, 0, false),
        (closed + second * 10, 0, true),
    ] {
        let times =
            MigrationTimes { now, seen: Duration::from_secs(seen), ..times(Duration::ZERO, Duration::MAX) };
        assert_eq!(next_step(&cluster, times) == cordon, goes_on, "{now} {seen}");
    }

    // It waits once, not before each step.
    let steps = Mutex::new(Vec::new());
    let note = async |step: &MigrationStep| {
        if matches!(step, MigrationStep::Evict(..)) {
            change(&world, &pool("old"), |old| old["metadata"]["annotations"] = json!({})).await;
        }
        steps.lock().unwrap().push(step.clone());
    };
    let started = Instant::now();
    let (end, _) = run(&world, Duration::from_secs(20), note).await;
    assert!(
        matches!(&end, MigrationStep::Refuse(why) if why[0].contains("was abandoned meanwhile")),
        "{end:?}"
    );
    assert!(started.elapsed() >= Duration::from_secs(10));
    let mut steps = steps.into_inner().unwrap();
    steps.retain(|step| !matches!(step, MigrationStep::Wait(what) if what.contains("agents notice")));
    assert!(matches!(&steps[..], [first, MigrationStep::Evict(..), _] if *first == cordon), "{steps:?}");
}

/// Runs the migration; `meanwhile` changes the cluster after each step.
async fn run(
    world: &World,
    patience: Duration,
    meanwhile: impl AsyncFn(&MigrationStep),
) -> (MigrationStep, usize) {
    let (migration, _) = world.migration(1000).await;
    let pause = Duration::from_millis(20);
    let mut count = 0;
    let end = migration.run(patience, pause, |progress| {
        count += 1;
        let step = &progress.unwrap().step;
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(meanwhile(step)));
    });
    (end.await.unwrap(), count)
}

/// Somebody abandons it while it runs: the pool stays, and stays open.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_somebody_enables_meanwhile_stays() {
    for (is_forgotten, expected) in
        [(true, "the migration was abandoned meanwhile"), (false, "the pool was enabled after")]
    {
        let world = world().await;
        let enable = async |step: &MigrationStep| {
            if matches!(step, MigrationStep::Wait(_)) {
                change(&world, &pool("old"), |old| {
                    old["spec"]["disabled"] = json!(false);
                    if is_forgotten {
                        old["metadata"]["annotations"] = json!({});
                    }
                })
                .await;
            }
        };
        let (end, _) = run(&world, PATIENCE, enable).await;
        let MigrationStep::Refuse(why) = end else { panic!("{end:?}") };
        assert!(why.join("\n").contains(expected), "{why:?}");
        let old = world.inner.get(&pool("old")).await.unwrap().unwrap().value;
        assert_eq!(old["spec"]["disabled"], false);
    }
}

/// The pool stays open for whoever could not go on then.
#[tokio::test(flavor = "multi_thread")]
async fn all_permissions_are_checked_before_anything_is_changed() {
    for (verb, kind, subresource, expected) in [
        ("create", Kind::Pod, Some("eviction"), "must not create pods/eviction;"),
        ("list", Kind::Pod, None, "must not list pods;"),
        ("update", Kind::Node, None, "must not update nodes;"),
        ("create", Kind::IpPool, None, "must not create ippools;"),
        ("update", Kind::IpPool, None, "must not update ippools;"),
        ("delete", Kind::IpPool, None, "must not delete ippools;"),
        ("update", Kind::IpamBlock, None, "must not update ipamblocks;"),
        ("delete", Kind::BlockAffinity, None, "must not delete blockaffinities;"),
        ("delete", Kind::IpamHandle, None, "must not delete ipamhandles;"),
    ] {
        let mut world = world().await;
        world.forbidden = Some(Permission { kind, subresource, verb });
        let before = everything(&*world.inner).await;
        let (migration, _) = world.migration(1000).await;
        let ended = migration.run(Duration::from_secs(60), Duration::from_millis(20), |_| {}).await;
        let Err(MigrationError::Store(StoreError::Forbidden(problem))) = ended else {
            panic!("{verb} {kind:?}: {ended:?}")
        };
        assert!(problem.contains(expected) && problem.contains("tortie-pool-migration"), "{problem}");
        assert_eq!(everything(&*world.inner).await, before, "{verb} {kind:?}");
    }
}

/// Without a pause, it would fill the API server with writes for ever.
#[tokio::test(flavor = "multi_thread")]
async fn it_gives_up_a_step_that_somebody_undoes() {
    let world = world().await;
    begin(&world).await;
    let undo = async |step: &MigrationStep| {
        if let MigrationStep::Cordon(name) = step {
            change(&world, &node(name), |node| {
                node["spec"]["unschedulable"] = json!(false);
                node["metadata"]["annotations"].as_object_mut().unwrap().remove(MIGRATION);
            })
            .await;
        }
    };
    let started = Instant::now();
    let ended = tokio::time::timeout(Duration::from_secs(20), run(&world, PATIENCE, undo)).await;
    let (end, count) = ended.expect("it does not end");
    assert!(
        matches!(&end, MigrationStep::GiveUp(what) if what.contains("node one is cordoned, and can take pods then")),
        "{end:?}"
    );
    assert!(started.elapsed() >= Duration::from_secs(1) && count < 60, "{count}");
}

/// The next step in a cluster with this pod.
async fn next(world: &World, uid: &str, more: Value, status: Value) -> MigrationStep {
    let mut pod = json!({
        "metadata": {"name": "new", "namespace": "n", "uid": uid},
        "spec": {"nodeName": "two"}, "status": status,
    });
    for (part, fields) in more.as_object().unwrap() {
        pod[part].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    put(&*world.inner, &pod_key("new"), pod).await;
    let cluster = world.migration(1000).await.0.observe().await.unwrap();
    next_step(&cluster, times(Duration::ZERO, Duration::MAX))
}

/// Pods that were evicted may find no address, for instance because the CNI configuration names the closed pool. Then no further
/// node loses its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_begun_when_the_pods_that_were_started_since_have_addresses() {
    let mut world = world().await;
    let mut random = super::world::Random::new(1);
    assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::CreatePool));
    begin(&world).await;
    change(&world, &pool("old"), |old| {
        let mut known: Value = serde_json::from_str(&record("new")).unwrap();
        known["withoutAddress"] = json!(["before"]);
        set_annotation(old, MIGRATION, &known.to_string());
    })
    .await;
    let waits = |step: &MigrationStep| matches!(step, MigrationStep::Wait(what) if what.contains("1 of the pods") && what.contains("n/new"));
    assert!(waits(&next(&world, "since", json!({}), json!({})).await));
    for (uid, more, status) in [
        ("since", json!({}), json!({"podIP": "10.2.0.9"})),
        ("since", json!({}), json!({"phase": "Failed"})),
        ("since", json!({"spec": {"hostNetwork": true}}), json!({})),
        ("since", json!({"spec": {"nodeName": null}}), json!({})),
        ("since", json!({"metadata": {"deletionTimestamp": "2026-02-01T00:00:00Z"}}), json!({})),
        ("before", json!({}), json!({})),
    ] {
        let step = next(&world, uid, more.clone(), status.clone()).await;
        assert_eq!(step, MigrationStep::Cordon("one".into()), "{uid} {more} {status}");
    }
    // A node that was begun is finished.
    next(&world, "since", json!({}), json!({"podIP": "10.2.0.9"})).await;
    assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::Cordon("one".into())));
    let step = next(&world, "since", json!({}), json!({})).await;
    assert!(matches!(&step, MigrationStep::Evict(node, _) if node == "one"), "{step:?}");
}

/// The API server gives pods the times of its own clock.
#[tokio::test(flavor = "multi_thread")]
async fn the_clocks_of_operator_and_server_may_differ() {
    for minutes in [-5, 5] {
        let mut world = world().await;
        let mut random = super::world::Random::new(1);
        let waiting = |uid: &str| {
            let created = Timestamp::now() + jiff::SignedDuration::from_mins(minutes);
            let metadata =
                json!({"name": uid, "namespace": "n", "uid": uid, "creationTimestamp": created.to_string()});
            json!({"metadata": metadata, "spec": {"nodeName": "two"}})
        };
        put(&*world.inner, &pod_key("before"), waiting("before")).await;
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::CreatePool));
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::ClosePool));
        world.pass_time().await;
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::Cordon("one".into())));
        let step = world.step(1000, &mut random).await;
        assert!(matches!(&step, Some(MigrationStep::Evict(node, _)) if node == "one"), "{step:?}");
        world.settle().await;
        put(&*world.inner, &pod_key("successor"), waiting("successor")).await;
        let mut steps = Vec::new();
        while !matches!(steps.last(), Some(MigrationStep::Wait(what)) if what.contains("such as Pod n/successor"))
        {
            assert!(steps.len() < 20, "the successor is not waited for: {steps:?}");
            steps.push(world.step(1000, &mut random).await.unwrap());
            world.settle().await;
        }
        let begins = |step: &MigrationStep| matches!(step, MigrationStep::Cordon(node) | MigrationStep::Evict(node, _) if node == "two");
        assert!(!steps.iter().any(begins), "{minutes}: {steps:?}");
        change(&world, &pod_key("successor"), |pod| pod["status"] = json!({"podIP": "10.2.0.200"})).await;
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::Cordon("two".into())));
    }
}

/// Pods in the middle of a migration, made by somebody who may do nothing but create pods.
#[tokio::test(flavor = "multi_thread")]
async fn annotations_of_pods_stop_nothing() {
    for (annotation, text) in [
        ("cni.projectcalico.org/podIP", "10.1.0.200/32"),
        ("cni.projectcalico.org/podIPs", "10.1.0.200/32"),
        ("cni.projectcalico.org/ipv4pools", r#"["old"]"#),
        ("cni.projectcalico.org/ipAddrs", r#"["10.1.0.200"]"#),
    ] {
        for has_node in [true, false] {
            let mut world = world().await;
            world.calm();
            let mut random = super::world::Random::new(1);
            let mut steps = Vec::new();
            while steps.last() != Some(&MigrationStep::DeletePool) {
                let step = world.step(1000, &mut random).await.unwrap();
                assert!(!matches!(step, MigrationStep::Refuse(_)), "{annotation}: {step:?}");
                if matches!(&step, MigrationStep::Cordon(node) if node == "one") {
                    let mut pod =
                        json!({"metadata": {"name": "mine", "namespace": "n", "uid": "mine"}, "spec": {}});
                    if has_node {
                        pod["spec"]["nodeName"] = json!("two");
                    }
                    set_annotation(&mut pod, annotation, text);
                    put(&*world.inner, &pod_key("mine"), pod).await;
                }
                if let MigrationStep::Wait(what) = &step
                    && what.contains("Pod n/mine")
                {
                    assert!(
                        has_node && what.contains(&format!("Pod n/mine ({annotation}); change them")),
                        "{what}"
                    );
                    world.inner.delete(&pod_key("mine"), None).await.unwrap();
                }
                steps.push(step);
                assert!(steps.len() < 200, "{annotation}: {steps:?}");
                world.pass_time().await;
                world.play(&mut random).await;
            }
            world.assert_moved(0).await;
        }
    }
}

/// What must not be moved is left alone, and named, until somebody has mended it.
#[tokio::test(flavor = "multi_thread")]
async fn what_must_not_be_moved_any_more_is_waited_for() {
    let pinned = |it: &mut Value| set_annotation(it, "cni.projectcalico.org/ipv4pools", r#"["old"]"#);
    let unmanaged = |it: &mut Value| it["metadata"]["ownerReferences"] = json!([]);
    let with_data = |it: &mut Value| it["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    type Change = fn(&mut Value);
    let namespace = Key::global(Kind::Namespace, "n");
    for (key, changed, expected) in [
        (pod_key("old-1"), pinned as Change, "Pod n/old-1 (cni.projectcalico.org/ipv4pools); change them"),
        (namespace, pinned, "Namespace n (cni.projectcalico.org/ipv4pools); change them"),
        (pod_key("old-1"), unmanaged, "no controller starts these pods again: n/old-1; delete them"),
        (pod_key("old-1"), with_data, "volumes of type emptyDir: n/old-1; use --delete-emptydir-data"),
    ] {
        let mut world = world().await;
        world.calm();
        let mut random = super::world::Random::new(1);
        let before = value(&*world.inner, &key).await;
        begin(&world).await;
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::CreatePool));
        assert_eq!(world.step(1000, &mut random).await, Some(MigrationStep::Cordon("one".into())));
        change(&world, &key, changed).await;
        let cluster = world.migration(1000).await.0.observe().await.unwrap();
        assert_forecast_waits_after_evictions(cluster, expected);
        for _ in 0..3 {
            let step = world.step(1000, &mut random).await;
            assert!(matches!(&step, Some(MigrationStep::Wait(what)) if what.contains(expected)), "{step:?}");
            world.play(&mut random).await;
        }
        put(&*world.inner, &key, before).await;
        let step = world.step(1000, &mut random).await;
        assert!(matches!(&step, Some(MigrationStep::Evict(node, _)) if node == "one"), "{step:?}");
    }
}

/// The other pods of the node leave it, and the one with the obstacle does not, in the forecast either.
fn assert_forecast_waits_after_evictions(mut cluster: MigratingCluster, expected: &str) {
    let node = cluster.nodes.get_mut("one").unwrap();
    let free = MigratingPod { key: pod_key("free"), obstacle: None, ..node.pods[0].clone() };
    node.pods.push(free);
    let steps = forecast(&cluster);
    let [.., MigrationStep::Evict(node, pods), MigrationStep::Wait(what)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert!(node == "one" && pods.len() == 1 && what.contains(expected), "{steps:?}");
}

/// It would have none otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_asks_for_the_closed_pool_keeps_its_address() {
    let mut random = super::world::Random::new(5);
    let mut world = World::of_services(&mut random, 1, &[]).await;
    let [pinned, free] = ["a", "b"].map(|name| Key::namespaced(Kind::Service, "n", name));
    for key in [&pinned, &free] {
        let metadata = json!({"name": key.name, "namespace": "n", "uid": key.name});
        put(&*world.inner, key, json!({"metadata": metadata, "spec": {"type": "LoadBalancer"}})).await;
        world.serve(key).await;
    }
    world.calm();
    let mut steps = Vec::new();
    let is_over = |step: &MigrationStep| matches!(step, MigrationStep::Wait(what) if what.contains("Service n/a (projectcalico.org/ipv4pools)"));
    while !steps.last().is_some_and(is_over) {
        let step = world.step(1000, &mut random).await.unwrap();
        if step == MigrationStep::ClosePool {
            let text = r#"["old"]"#;
            change(&world, &pinned, |it| set_annotation(it, "projectcalico.org/ipv4pools", text)).await;
        }
        if let MigrationStep::MoveService(key, _) = &step {
            world.serve(key).await;
        }
        steps.push(step);
        assert!(steps.len() < 50, "{steps:?}");
        world.pass_time().await;
    }
    let moves = |key: &Key, step: &MigrationStep| matches!(step, MigrationStep::MoveService(moved, _) if moved == key);
    assert!(steps.iter().any(|step| moves(&free, step)), "{steps:?}");
    assert!(!steps.iter().any(|step| moves(&pinned, step)), "{steps:?}");
    change(&world, &pinned, |it| it["metadata"]["annotations"] = json!({})).await;
    let step = world.step(1000, &mut random).await.unwrap();
    assert!(moves(&pinned, &step), "{step:?}");
}
