//! What speaks against a migration is said before anything changes.

use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_controllers::{MIGRATION, MigrationStep, WhichPods};
use tortie_store::Store;

use super::world::{OLD, Random, TUNNEL, World, pod_key, set_annotation};
use crate::common::{everything, put};

const HNS_NETWORK: &str = "tortie.io/hns-network";

/// Changes an object, or makes it.
pub(super) async fn change(world: &World, key: &Key, change: impl FnOnce(&mut Value)) {
    let mut value = world.inner.get(key).await.unwrap().map_or_else(
        || json!({"metadata": {"name": key.name, "namespace": key.namespace}}),
        |stored| stored.value,
    );
    change(&mut value);
    put(&*world.inner, key, value).await;
}

pub(super) async fn world() -> World {
    let mut world = World::with(&mut Random::new(5), 2, &[]).await;
    world.add_pod("one", "old-1", OLD, true).await;
    world.add_pod("two", "old-2", OLD, true).await;
    world
}

/// What it refuses; nothing has changed then.
async fn refused(
    world: &World,
    change: impl FnOnce(&mut tortie_controllers::MigrationRequest),
) -> Vec<String> {
    let before = everything(&*world.inner).await;
    let (mut migration, _) = world.migration(1000).await;
    change(&mut migration.request);
    let cluster = migration.observe().await.unwrap();
    if cluster.refusals.is_empty() {
        return Vec::new();
    }
    let step = migration.step(Duration::ZERO, Duration::MAX).await.unwrap().step;
    assert_eq!(step, MigrationStep::Refuse(cluster.refusals.clone()));
    assert_eq!(everything(&*world.inner).await, before, "nothing changes");
    cluster.refusals
}

pub(super) fn pool(name: &str) -> Key {
    Key::global(Kind::IpPool, name)
}

/// The new pool is planned with these fields.
async fn with_fields(world: &World, fields: Value) -> String {
    let found = refused(world, |request| {
        let spec = request.planned.as_mut().unwrap()["spec"].as_object_mut().unwrap();
        spec.extend(fields.as_object().unwrap().clone());
    });
    found.await.join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_that_do_not_fit_are_refused() {
    let world = world().await;
    let node = Key::global(Kind::Node, "one");
    change(&world, &node, |node| {
        set_annotation(node, "projectcalico.org/IPv4Address", "192.0.2.1/24");
        set_annotation(node, "projectcalico.org/IPv6Address", "fd00:10::11/64");
    })
    .await;
    change(&world, &pool("old"), |old| old["spec"]["natOutgoing"] = json!(true)).await;
    let service = Key::namespaced(Kind::Service, "n", "web");
    change(&world, &service, |service| service["spec"] = json!({"clusterIP": "10.96.0.9"})).await;
    let bgp = Key::global(Kind::BgpConfiguration, "default");
    change(&world, &bgp, |bgp| bgp["spec"] = json!({"serviceClusterIPs": [{"cidr": "10.97.0.0/16"}]})).await;
    assert_eq!(refused(&world, |_| {}).await, [""; 0]);
    for (fields, expected) in [
        (
            json!({"cidr": "10.1.0.0/25"}),
            "IPPool new: spec.cidr: 10.1.0.0/25 and 10.1.0.0/24 of IPPool old overlap",
        ),
        (json!({"cidr": "10.3.0.0/25"}), "of IPPool third overlap"),
        (json!({"cidr": "192.0.2.0/25"}), "the network of node one"),
        (json!({"cidr": "10.96.0.0/20"}), "contains the cluster IP 10.96.0.9 of Service n/web"),
        (json!({"cidr": "10.97.4.0/24"}), "overlaps 10.97.0.0/16, the network of Services"),
        (json!({"cidr": "fd00::/64", "blockSize": 122}), "addresses of the other family"),
        (json!({"cidr": "fd00:10::/56", "blockSize": 122}), "fd00:10::/64, the network of node one, overlap"),
        (json!({"cidr": "10.9.0.0/30", "blockSize": 30}), "spec.blockSize: the nodes need"),
        (json!({"cidr": "10.9.0.0/31", "blockSize": 32}), "10.9.0.0/31 has 2 free ones"),
        (json!({"disabled": true}), "IPPool new: spec.disabled"),
        (json!({"assignmentMode": "Manual"}), "IPPool new: spec.assignmentMode"),
        (json!({"allowedUses": ["Workload"]}), "IPPool new: spec.allowedUses: Tunnel"),
        (json!({"vxlanMode": "Never"}), "IPPool new: spec.vxlanMode: old encapsulates"),
        (json!({"natOutgoing": false}), "IPPool new: spec.natOutgoing: old hides its pods"),
        (
            json!({"disableBGPExport": true}),
            "IPPool new: spec.disableBGPExport: BGP peers know the routes of old",
        ),
        (json!({"ipipMode": "Always"}), "IPPool new cannot be read: spec.ipipMode: a pool has IPIP or VXLAN"),
        (
            json!({"nodeSelector": "zone == 'a'"}),
            "IPPool new: spec.nodeSelector: it does not select Nodes that old selects: one, two",
        ),
        (
            json!({"namespaceSelector": "team == 'a'"}),
            "spec.namespaceSelector: it does not select Namespaces that old selects: n",
        ),
    ] {
        let found = with_fields(&world, fields.clone()).await;
        assert!(found.contains(expected), "{fields}: {found:?}");
    }
    let names = |old: &str, new: &str| {
        let (old, new) = (old.to_owned(), new.to_owned());
        move |request: &mut tortie_controllers::MigrationRequest| {
            (request.old, request.new, request.planned) = (old, new, None);
        }
    };
    for (old, new, expected) in [
        ("old", "old", "cannot move to itself"),
        ("old", "absent", "IPPool absent does not exist; create it, or give its network (--cidr)"),
        ("absent", "third", "IPPool absent does not exist; if an earlier run has ended"),
    ] {
        let found = refused(&world, names(old, new)).await.join("\n");
        assert!(found.contains(expected), "{old} {new}: {found}");
    }
    // IPAM gives no address of a pool that stays only while it is in use.
    let time = json!("2026-11-27T00:00:00Z");
    change(&world, &pool("third"), |third| third["metadata"]["deletionTimestamp"] = time).await;
    let found = refused(&world, names("old", "third")).await.join("\n");
    assert!(found.contains("IPPool third was deleted, and stays only"), "{found}");
    // It moves elsewhere already.
    change(&world, &pool("old"), |old| set_annotation(old, MIGRATION, &record("third"))).await;
    let found = refused(&world, |_| {}).await.join("\n");
    assert!(found.contains("continue with `tortie pool migrate old third`"), "{found}");
    change(&world, &pool("old"), |old| set_annotation(old, MIGRATION, "yes")).await;
    let found = refused(&world, |_| {}).await.join("\n");
    assert!(found.contains("IPPool old cannot be read"), "{found}");
}

/// A node that may claim no block of the new pool would give its pods no address once the old pool is closed.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_must_be_able_to_claim_blocks_of_the_new_pool() {
    let config = Key::global(Kind::IpamConfig, "default");
    let limit = |count: usize| json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": count});
    let fixed = json!({"strict_affinity": true, "auto_allocate_blocks": false});
    for (settings, expected) in [
        (
            limit(1),
            "IPAMConfig default: maxBlocksPerHost: node one has 1 blocks, those of all pools, and needs 1 more of IPPool new",
        ),
        (limit(2), ""),
        (
            fixed.clone(),
            "IPAMConfig default: autoAllocateBlocks: it is false, and one has no block of IPPool new with room",
        ),
    ] {
        let world = world().await;
        put(&*world.inner, &config, settings.clone()).await;
        let found = refused(&world, |_| {}).await.join("\n");
        assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{settings}: {found}");
    }
    // The blocks of other pools count.
    let mut world = world().await;
    put(&*world.inner, &config, limit(2)).await;
    world.add_pod("two", "other", "third", true).await;
    let found = refused(&world, |_| {}).await;
    assert!(found.len() == 1 && found[0].contains("node two has 2 blocks"), "{found:?}");
}

/// IPAM gives no address that is reserved.
#[tokio::test(flavor = "multi_thread")]
async fn reserved_addresses_are_no_room() {
    let mut world = world().await;
    world.add_pod("one", "old-3", OLD, true).await;
    let key = Key::global(Kind::IpReservation, "r");
    for (reserved, fields, expected) in [
        (json!(["10.2.0.0/24"]), json!({}), ""),
        (json!(["10.2.0.0/24", "10.2.1.0/24"]), json!({}), "has 0 free ones outside of IPReservations"),
        (json!(["10.0.0.0/8", "10.2.1.0/24"]), json!({}), "has 0 free ones outside of IPReservations"),
        // All blocks but one, of which one address.
        (
            json!(["10.2.0.0/29"]),
            json!({"cidr": "10.2.0.0/28"}),
            "need 2 more blocks of /29, and 10.2.0.0/28 has 1",
        ),
        (
            json!(["10.2.0.1/32", "10.2.0.2/31"]),
            json!({"cidr": "10.2.0.0/30", "blockSize": 30}),
            "has 1 free ones",
        ),
        (json!(["10.2.0.8/30", "10.2.0.12/31"]), json!({"cidr": "10.2.0.0/28"}), "need 3 more blocks of /29"),
    ] {
        let reservation = json!({"metadata": {"name": "r"}, "spec": {"reservedCIDRs": reserved}});
        put(&*world.inner, &key, reservation.clone()).await;
        let found = with_fields(&world, fields).await;
        assert!(
            found.contains(expected) && found.is_empty() == expected.is_empty(),
            "{reservation}: {found}"
        );
    }
    put(&*world.inner, &key, json!({"metadata": {"name": "r"}, "spec": {"reservedCIDRs": "all"}})).await;
    let found = refused(&world, |_| {}).await.join("\n");
    assert!(found.contains("IPReservation r cannot be read"), "{found}");
}

/// Pools inside or around the old one, and migrations that somebody else has begun.
#[tokio::test(flavor = "multi_thread")]
async fn other_pools_and_migrations_in_the_way_are_refused() {
    let with_cidr = |cidr: &'static str| move |it: &mut Value| it["spec"] = json!({"cidr": cidr});
    let moves = |to: &'static str| move |it: &mut Value| set_annotation(it, MIGRATION, &record(to));
    let enabled = |it: &mut Value| set_annotation(it, MIGRATION, &record("new"));
    let of_other = |it: &mut Value| set_annotation(it, MIGRATION, r#"{"pool": "first", "cordoned": true}"#);
    let node = Key::global(Kind::Node, "one");
    type Change = Box<dyn FnOnce(&mut Value)>;
    let rows: [(Key, Change, &str, &str); 6] = [
        (
            pool("part"),
            Box::new(with_cidr("10.1.0.128/25")),
            "new",
            "IPPool old: spec.cidr: 10.1.0.0/24 and 10.1.0.128/25 of IPPool part overlap",
        ),
        (pool("whole"), Box::new(with_cidr("10.0.0.0/15")), "new", "10.0.0.0/15 of IPPool whole overlap"),
        (
            pool("old"),
            Box::new(enabled),
            "new",
            "IPPool old: spec.disabled: the pool was enabled after its migration to new had begun",
        ),
        (pool("third"), Box::new(moves("old")), "new", "IPPool third moves to old, which would be closed"),
        (pool("third"), Box::new(moves("fourth")), "third", "IPPool third moves to fourth itself"),
        (
            node,
            Box::new(of_other),
            "new",
            "Node one has the annotation tortie.io/pool-migration of a migration of IPPool first",
        ),
    ];
    for (key, changed, new, expected) in rows {
        let world = world().await;
        assert_eq!(refused(&world, |_| {}).await, [""; 0]);
        change(&world, &key, changed).await;
        let found = refused(&world, |request| request.new = new.to_owned()).await.join("\n");
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

/// The record of a pool that moves, closed long ago.
pub(super) fn record(to: &str) -> String {
    json!({"to": to, "since": "2026-01-01T00:00:00Z"}).to_string()
}

/// The old pool is closed and recorded.
pub(super) async fn begin(world: &World) {
    change(world, &pool("old"), |old| {
        set_annotation(old, MIGRATION, &record("new"));
        old["spec"]["disabled"] = json!(true);
    })
    .await;
}

/// When it has begun, what a pod that ends needs is in use already, by its successor.
#[tokio::test(flavor = "multi_thread")]
async fn the_room_of_pods_that_end_is_not_counted_twice() {
    let world = world().await;
    begin(&world).await;
    for pod in ["old-1", "old-2"] {
        let found = with_fields(&world, json!({"cidr": "10.9.0.0/31", "blockSize": 32})).await;
        assert!(found.contains("10.9.0.0/31 has 2 free ones"), "{pod}: {found}");
        change(&world, &pod_key(pod), |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")
        })
        .await;
    }
    let found = with_fields(&world, json!({"cidr": "10.9.0.0/31", "blockSize": 32})).await;
    assert_eq!(found, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_nodes_keep_their_blocks() {
    let world = world().await;
    let node = Key::global(Kind::Node, "two");
    change(&world, &node, |node| node["metadata"]["labels"]["kubernetes.io/os"] = json!("windows")).await;
    change(&world, &node, |node| set_annotation(node, TUNNEL, "10.9.0.1")).await;
    let found = refused(&world, |_| {}).await;
    assert_eq!(found.len(), 1, "{found:?}");
    for part in ["Windows nodes have blocks of IPPool old", "are made: two.", "`tortie windows reconfigure`"]
    {
        assert!(found[0].contains(part), "{part}: {found:?}");
    }
    // Without a block of the old pool, the node is in no way, but must be able to use the new one.
    let records = tortie_ipam::Records::new(world.inner.clone());
    records.release_node("two").await.unwrap();
    world.inner.delete(&pod_key("old-2"), None).await.unwrap();
    assert_eq!(refused(&world, |_| {}).await, [""; 0]);
    for (fields, expected) in [
        (
            json!({"blockSize": 30}),
            "IPPool new: spec.blockSize: a block of /30 gives the Windows node two no address",
        ),
        (
            json!({"vxlanMode": "Never"}),
            "IPPool new: spec.vxlanMode: the Windows node two reaches other nodes by VXLAN only",
        ),
    ] {
        let found = with_fields(&world, fields.clone()).await;
        assert!(found.contains(expected), "{fields}: {found}");
    }
    // With a network without encapsulation, it is the other way round.
    change(&world, &pool("old"), |old| old["spec"]["vxlanMode"] = json!("Never")).await;
    change(&world, &node, |node| set_annotation(node, HNS_NETWORK, "L2Bridge")).await;
    assert_eq!(with_fields(&world, json!({"vxlanMode": "Never"})).await, "");
    let found = with_fields(&world, json!({"vxlanMode": "Always"})).await;
    assert!(found.contains("the Windows node two reaches other nodes without VXLAN only"), "{found}");
}

/// A cluster with the Windows node `two`, and an old pool with these settings. Its network is not that of other objects.
async fn beside_windows(spec: Value) -> World {
    let world = World::with(&mut Random::new(5), 1, &[]).await;
    change(&world, &pool("old"), |old| old["spec"] = spec).await;
    change(&world, &Key::global(Kind::Node, "two"), |node| {
        node["metadata"]["labels"] = json!({"kubernetes.io/os": "windows"});
        node["spec"] = json!({});
    })
    .await;
    world
}

/// Windows nodes with an overlay have no IPv6, and those without have none in VXLAN.
#[tokio::test(flavor = "multi_thread")]
async fn windows_nodes_do_not_matter_for_pools_of_which_they_get_no_address() {
    let node = Key::global(Kind::Node, "two");
    for (annotation, text, mode, fields, expected) in [
        (TUNNEL, "10.9.0.1", "Never", json!({}), ""),
        (TUNNEL, "10.9.0.1", "Never", json!({"nodeSelector": "kubernetes.io/os == 'linux'"}), ""),
        (TUNNEL, "10.9.0.1", "Always", json!({"blockSize": 126}), ""),
        (HNS_NETWORK, "L2Bridge", "Always", json!({}), ""),
        (HNS_NETWORK, "L2Bridge", "Never", json!({}), ""),
        (
            HNS_NETWORK,
            "L2Bridge",
            "Never",
            json!({"blockSize": 126}),
            "spec.blockSize: a block of /126 gives the Windows node two no address",
        ),
        (
            HNS_NETWORK,
            "L2Bridge",
            "Never",
            json!({"nodeSelector": "kubernetes.io/os == 'linux'"}),
            "spec.nodeSelector: it does not select Nodes that old selects: two",
        ),
    ] {
        let world = beside_windows(json!({"cidr": "fd00:1::/64", "vxlanMode": mode})).await;
        change(&world, &node, |node| set_annotation(node, annotation, text)).await;
        let mut all = json!({"cidr": "fd00:2::/64"});
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let found = with_fields(&world, all).await;
        let is_expected = found.contains(expected) && found.is_empty() == expected.is_empty();
        assert!(is_expected, "{annotation} {mode} {fields}: {found}");
    }
}

/// Its kubelet comes before its agent, which announces the type of its network.
#[tokio::test(flavor = "multi_thread")]
async fn a_windows_node_that_comes_is_judged_when_it_has_announced_its_network() {
    let node = Key::global(Kind::Node, "two");
    let by_vxlan = "the Windows node two reaches other nodes by VXLAN only";
    for (announced, fields, expected) in [
        (None, json!({}), ""),
        (None, json!({"blockSize": 30}), ""),
        (None, json!({"nodeSelector": "kubernetes.io/os == 'linux'"}), ""),
        (Some((HNS_NETWORK, "L2Bridge")), json!({}), ""),
        (Some((TUNNEL, "10.9.0.1")), json!({}), by_vxlan),
        (Some((TUNNEL, "10.9.0.1")), json!({"blockSize": 30}), "spec.blockSize: a block of /30"),
    ] {
        let world = beside_windows(json!({"cidr": "10.7.0.0/24", "vxlanMode": "Never"})).await;
        begin(&world).await;
        if let Some((annotation, text)) = announced {
            change(&world, &node, |node| set_annotation(node, annotation, text)).await;
        }
        let found = with_fields(&world, fields.clone()).await;
        let is_expected = found.contains(expected) && found.is_empty() == expected.is_empty();
        assert!(is_expected, "{announced:?} {fields}: {found}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_would_be_lost_or_come_back_wrong_are_refused() {
    let no_owner = |pod: &mut Value| pod["metadata"]["ownerReferences"] = json!([]);
    let with_data = |pod: &mut Value| pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let mirror = |pod: &mut Value| set_annotation(pod, "kubernetes.io/config.mirror", "hash");
    let by_name =
        |pod: &mut Value| set_annotation(pod, "cni.projectcalico.org/ipv4pools", r#"["third", "old"]"#);
    let by_net =
        |pod: &mut Value| set_annotation(pod, "cni.projectcalico.org/ipv4pools", r#"["10.1.0.0/24"]"#);
    let by_address =
        |pod: &mut Value| set_annotation(pod, "cni.projectcalico.org/ipAddrs", r#"["10.1.0.9"]"#);
    let of_third = |pod: &mut Value| set_annotation(pod, "cni.projectcalico.org/ipv4pools", r#"["third"]"#);
    type Change = fn(&mut Value);
    let all = WhichPods { unmanaged: true, with_empty_dir: true };
    for (changed, expected, allowed) in [
        (
            no_owner as Change,
            "no controller starts these pods again: n/old-1; delete them, or use --delete-unmanaged",
            true,
        ),
        (with_data, "volumes of type emptyDir: n/old-1; use --delete-emptydir-data", true),
        (mirror, "static pods have addresses of the pool, and an eviction does not end them: n/old-1", false),
        (by_name, "Pod n/old-1 (cni.projectcalico.org/ipv4pools)", false),
        (by_net, "Pod n/old-1 (cni.projectcalico.org/ipv4pools)", false),
        (by_address, "Pod n/old-1 (cni.projectcalico.org/ipAddrs)", false),
        (of_third, "", true),
    ] {
        let world = world().await;
        change(&world, &pod_key("old-1"), changed).await;
        let found = refused(&world, |_| {}).await.join("\n");
        assert!(found.contains(expected) && (found.is_empty() == expected.is_empty()), "{expected}: {found}");
        let found = refused(&world, |request| request.pods = all).await;
        assert_eq!(found.is_empty(), allowed, "{expected}: {found:?}");
        // One that ends is in nobody's way.
        change(&world, &pod_key("old-1"), |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")
        })
        .await;
        assert_eq!(refused(&world, |_| {}).await, [""; 0], "{expected}");
    }
    let world = world().await;
    change(&world, &Key::global(Kind::Namespace, "n"), by_name).await;
    let service = Key::namespaced(Kind::Service, "n", "web");
    change(&world, &service, |it| set_annotation(it, "projectcalico.org/loadBalancerIPs", r#"["10.1.0.4"]"#))
        .await;
    let found = refused(&world, |_| {}).await.join("\n");
    for part in
        ["Namespace n (cni.projectcalico.org/ipv4pools)", "Service n/web (projectcalico.org/loadBalancerIPs)"]
    {
        assert!(found.contains(part), "{part}: {found}");
    }
}

/// An address that nobody releases stays in the way, and it is said whose it is.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_that_are_left_are_named() {
    let mut world = world().await;
    for pod in ["old-1", "old-2"] {
        world.inner.delete(&pod_key(pod), None).await.unwrap();
    }
    let mut last = None;
    for _ in 0..40 {
        last = world.migration(1000).await.0.step(Duration::ZERO, Duration::MAX).await.ok();
        world.pass_time().await;
        for node in world.nodes().await {
            world.look(&node).await;
        }
    }
    let Some(MigrationStep::Wait(what)) = last.map(|progress| progress.step) else {
        panic!("it does not wait")
    };
    assert!(
        what.contains("the node of Pod n/old-1, which is gone, releases 10.1.0.")
            && what.contains("`tortie ipam check --fix`"),
        "{what}"
    );
    assert!(world.has_old().await);
}
