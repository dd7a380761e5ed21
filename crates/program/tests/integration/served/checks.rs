//! Nothing is accepted and then ignored: what apply and delete reject, and what they warn about.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use crate::served::support::{Cluster, text_of};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::Store;

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

impl Cluster {
    /// Applies an object; returns whether that succeeded, and the output.
    async fn applies(&self, object: &Value) -> (bool, String) {
        let file = self.file(&object.to_string());
        let output = self.tortie(&["apply", "-f", file.to_str().unwrap()]).output().await.unwrap();
        (output.status.success(), text_of(&output))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_without_effect_are_rejected_or_reported() {
    let cluster = Cluster::new().await;
    let felix = |name: &str, spec: Value| object("FelixConfiguration", name, spec);
    let table = [
        (
            felix("default", json!({"wireguardEnabled": true})),
            false,
            "m.yml:1: FelixConfiguration default: spec.wireguardEnabled: it has no effect",
        ),
        (
            felix("default", json!({"vxlanVNI": "abc"})),
            false,
            "m.yml:1: FelixConfiguration default: spec.vxlanVNI: \"abc\" is not",
        ),
        (felix("default", json!({"nosuchField": 1})), false, "spec.nosuchField: unknown field"),
        (felix("other", json!({})), false, "metadata.name: no node reads"),
        (
            felix("default", json!({"bpfEnabled": true})),
            true,
            "warning: m.yml:1: FelixConfiguration default: spec.bpfEnabled: it has no effect",
        ),
    ];
    let key = Key::global(Kind::FelixConfiguration, "default");
    for (object, good, expected) in table {
        let (succeeded, printed) = cluster.applies(&object).await;
        assert_eq!(succeeded, good, "{printed}");
        assert!(
            printed.replace(&format!("{}/", cluster.folder()), "").contains(expected),
            "{expected:?} in {printed}"
        );
        assert_eq!(cluster.store.get(&key).await.unwrap().is_some(), good, "{printed}");
    }
    // A value that requests what Tortie does anyway gets no finding.
    let (_, printed) = cluster
        .applies(&felix("default", json!({"vxlanVNI": 4096, "defaultEndpointToHostAction": "Drop"})))
        .await;
    assert!(!printed.contains("warning"), "{printed}");
}

fn node_of_both_families() -> Value {
    let annotations = json!({"projectcalico.org/IPv4Address": "192.0.2.11/24", "projectcalico.org/IPv6Address": "fd00:10::11/64"});
    json!({"metadata": {"name": "one", "annotations": annotations}})
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicting_pools_and_pools_in_use_are_not_changed() {
    let cluster = Cluster::new().await;
    cluster.put(&Key::global(Kind::Node, "one"), node_of_both_families()).await;
    let pool = |name: &str, cidr: &str, size: u8| {
        object("IPPool", name, json!({"cidr": cidr, "vxlanMode": "Always", "blockSize": size}))
    };
    let ipip = |name: &str| object("IPPool", name, json!({"cidr": "10.2.0.0/16", "ipipMode": "Always"}));
    let used = json!({"cidr": "10.0.0.0/26", "affinity": "host:one", "allocations": [0, null], "unallocated": [1],
        "attributes": [{"handle_id": "h", "secondary": {"namespace": "n", "pod": "p"}}]});
    let block = Key::global(Kind::IpamBlock, "10-0-0-0-26");
    let steps = [
        (pool("a", "10.0.0.0/16", 26), true, "created"),
        (
            pool("a", "10.0.0.0/17", 26),
            false,
            "spec.cidr: it cannot change; `tortie pool migrate a NEW` replaces the pool by one with the new settings. As none",
        ),
        (pool("a", "10.0.0.0/16", 28), false, "you can also delete it, which removes its blocks"),
        (
            pool("b", "10.0.128.0/17", 26),
            false,
            "spec.cidr: 10.0.128.0/17 and 10.0.0.0/16 of IPPool a overlap",
        ),
        (
            pool("b", "192.0.0.0/16", 26),
            false,
            "spec.cidr: 192.0.0.0/16 and 192.0.2.0/24, the network of node one, overlap",
        ),
        (
            pool("b", "fd00:10::/56", 122),
            false,
            "spec.cidr: fd00:10::/56 and fd00:10::/64, the network of node one, overlap",
        ),
        (pool("b", "10.1.0.0/16", 26), true, "created"),
        (ipip("c"), true, "created"),
    ];
    for (object, good, expected) in steps {
        let (succeeded, printed) = cluster.applies(&object).await;
        assert!(succeeded == good && printed.contains(expected), "{expected:?} in {printed}");
    }
    let windows = json!({"metadata": {"name": "win", "labels": {"kubernetes.io/os": "windows"}}});
    cluster.put(&Key::global(Kind::Node, "win"), windows).await;
    let (succeeded, printed) = cluster.applies(&ipip("c")).await;
    assert!(succeeded, "it is there already: {printed}");
    let other = object("IPPool", "d", json!({"cidr": "10.3.0.0/16", "ipipMode": "Always"}));
    let (succeeded, printed) = cluster.applies(&other).await;
    assert!(!succeeded && printed.contains("spec.ipipMode: node win runs Windows"), "{printed}");
    cluster.put(&block, used).await;
    for (object, good, expected) in [
        (
            pool("a", "10.0.0.0/17", 26),
            false,
            "spec.cidr: it cannot change while addresses of the pool are in use (1 address, the first of pod n/p)",
        ),
        (pool("a", "10.0.0.0/16", 28), false, "spec.blockSize: it cannot change"),
        (pool("a", "10.0.0.0/16", 28), false, "`tortie pool migrate a NEW`"),
        // 26 is the default.
        (object("IPPool", "a", json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always"})), true, "configured"),
        (pool("a", "10.0.0.0/16", 28), false, "spec.blockSize: it cannot change"),
        (
            object(
                "IPPool",
                "a",
                json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always", "allowedUses": ["Workload"]}),
            ),
            false,
            "spec.allowedUses: it cannot change",
        ),
        (
            object(
                "IPPool",
                "a",
                json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always", "blockSize": 26, "disabled": true}),
            ),
            true,
            "configured",
        ),
    ] {
        let (succeeded, printed) = cluster.applies(&object).await;
        assert!(succeeded == good && printed.contains(expected), "{expected:?} in {printed}");
    }
    let delete = async |name: &str| cluster.tortie(&["delete", "ippool", name]).output().await.unwrap();
    let refused = delete("a").await;
    assert!(
        !refused.status.success()
            && text_of(&refused).contains("has addresses in use (1 address, the first of pod n/p)"),
        "{}",
        text_of(&refused)
    );
    let deleted = text_of(&delete("b").await);
    for part in ["IPPool b deleted", "note: IPPool b is closed (disabled: true), and deleted in 10 s"] {
        assert!(deleted.contains(part), "{part:?} in {deleted}");
    }
    // A Windows node keeps its block when the pool is deleted.
    let of_windows = json!({"cidr": "10.0.0.0/26", "affinity": "host:win", "allocations": [0, null], "unallocated": [1],
        "attributes": [{"handle_id": "windows-reserved-ipam-handle", "secondary": {"note": "windows reserved"}}]});
    cluster.put(&block, of_windows).await;
    let (_, printed) = cluster.applies(&pool("a", "10.0.0.0/16", 28)).await;
    assert!(
        printed.contains("Windows nodes keep their blocks of the pool, also if it is deleted; `tortie pool migrate a NEW` says"),
        "{printed}"
    );
    cluster.store.delete(&block, None).await.unwrap();
    // A tunnel address of a node, which no pod can give back.
    let tunnel = json!({"cidr": "10.0.0.0/26", "affinity": "host:one", "allocations": [0, null], "unallocated": [1],
        "attributes": [{"handle_id": "vxlan-tunnel-addr-one", "secondary": {"node": "one", "type": "vxlanTunnelAddress"}}]});
    cluster.put(&block, tunnel).await;
    let refused = text_of(&delete("a").await);
    let expected =
        "(1 address, the first of node one): `tortie pool migrate a NEW` moves what has them to another pool";
    assert!(refused.contains(expected), "{refused}");
    cluster.store.delete(&block, None).await.unwrap();
    // Without Nodes, no agent can have read the pool.
    for node in ["one", "win"] {
        cluster.store.delete(&Key::global(Kind::Node, node), None).await.unwrap();
    }
    assert_eq!(text_of(&delete("a").await), "IPPool a deleted\n");
}

/// The block of a pod of the outer pool.
fn used_block() -> Value {
    json!({"cidr": "10.0.0.0/26", "affinity": "host:one", "allocations": [0], "unallocated": [],
        "attributes": [{"handle_id": "h", "secondary": {"namespace": "n", "pod": "p"}}]})
}

/// kubectl and Calico accept such pools. Only one of them is needed.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_inside_another_one_can_be_deleted_while_its_addresses_are_in_use() {
    let cluster = Cluster::new().await;
    for (name, cidr) in [("outer", "10.0.0.0/16"), ("inner", "10.0.0.0/24")] {
        let pool = object("IPPool", name, json!({"cidr": cidr, "vxlanMode": "Always"}));
        cluster.put(&Key::global(Kind::IpPool, name), pool).await;
    }
    let block = Key::global(Kind::IpamBlock, "10.0.0.0/26");
    cluster.put(&block, used_block()).await;
    let delete = async |names: &[&str]| {
        let arguments = [&["delete", "ippool"], names].concat();
        text_of(&cluster.tortie(&arguments).output().await.unwrap())
    };
    let refused = delete(&["inner", "outer"]).await;
    assert!(refused.contains("IPPool inner has addresses in use"), "{refused}");
    assert_eq!(delete(&["inner"]).await, "IPPool inner deleted\n");
    assert!(cluster.store.get(&block).await.unwrap().is_some());
    // A pool that was deleted keeps nothing for others.
    let mut ending = object("IPPool", "ending", json!({"cidr": "10.0.0.0/15", "vxlanMode": "Always"}));
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    cluster.put(&Key::global(Kind::IpPool, "ending"), ending).await;
    let refused = delete(&["outer"]).await;
    assert!(refused.contains("IPPool outer has addresses in use"), "{refused}");
}

/// An agent that has read the pool before it was closed gives an address while the command waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_gets_into_use_while_it_is_deleted_stays_open() {
    let cluster = Cluster::new().await;
    let key = Key::global(Kind::IpPool, "a");
    let pool = object("IPPool", "a", json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always"}));
    cluster.put(&key, pool).await;
    let mut command = cluster.tortie(&["delete", "ippool", "a"]);
    let deleting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let spec = async || cluster.store.get(&key).await.unwrap().unwrap().value["spec"].clone();
    let deadline = Instant::now() + Duration::from_secs(60);
    while spec().await["disabled"] != true {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.put(&Key::global(Kind::IpamBlock, "10.0.0.0/26"), used_block()).await;
    let ended = deleting.wait_with_output().await.unwrap();
    let printed = text_of(&ended);
    assert!(!ended.status.success() && printed.contains("has addresses in use (1 address"), "{printed}");
    assert!(printed.contains("it was not deleted"), "{printed}");
    assert_eq!(spec().await, json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always"}));
}

/// kubectl and Calico accept such pools. To disable one is the first step of every remedy.
/// The blocks stay as they are, so nothing changes that must not.
#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_may_leave_out_the_block_size_that_somebody_else_has_set() {
    let cluster = Cluster::new().await;
    let without = object("IPPool", "a", json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always"}));
    let mut stored = without.clone();
    stored["spec"]["blockSize"] = json!(28);
    stored["metadata"]["annotations"] =
        json!({"kubectl.kubernetes.io/last-applied-configuration": without.to_string()});
    cluster.put(&Key::global(Kind::IpPool, "a"), stored).await;
    let without =
        object("IPPool", "a", json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always", "natOutgoing": true}));
    let (succeeded, printed) = cluster.applies(&without).await;
    assert!(succeeded && printed.contains("configured"), "{printed}");
    let file = cluster.file(&without.to_string());
    let replaced = cluster.tortie(&["replace", "-f", file.to_str().unwrap()]).output().await.unwrap();
    let printed = text_of(&replaced);
    assert!(!replaced.status.success() && printed.contains("spec.blockSize: it cannot change"), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_overlaps_already_may_be_changed() {
    let cluster = Cluster::new().await;
    cluster.put(&Key::global(Kind::Node, "one"), node_of_both_families()).await;
    let pool = |name: &str, cidr: &str, more: Value| {
        let mut spec = json!({"cidr": cidr});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object("IPPool", name, spec)
    };
    let always = || json!({"vxlanMode": "Always"});
    let for_services = || json!({"allowedUses": ["LoadBalancer"]});
    for (name, cidr, more) in [
        ("whole", "10.0.0.0/16", always()),
        ("part", "10.0.128.0/17", always()),
        ("nodes", "192.0.2.0/25", always()),
        ("services", "192.0.2.128/25", for_services()),
    ] {
        cluster.put(&Key::global(Kind::IpPool, name), pool(name, cidr, more)).await;
    }
    let disabled = || json!({"vxlanMode": "Always", "disabled": true});
    for (object, good, expected) in [
        (pool("whole", "10.0.0.0/16", disabled()), true, "configured"),
        (pool("nodes", "192.0.2.0/25", disabled()), true, "configured"),
        (pool("whole", "10.0.0.0/15", disabled()), false, "of IPPool part overlap"),
        (pool("other", "10.0.0.0/20", disabled()), false, "of IPPool whole overlap"),
        // Only addresses of Services may be in the nodes' network.
        (pool("services", "192.0.2.128/25", always()), false, "the network of node one, overlap"),
    ] {
        let (succeeded, printed) = cluster.applies(&object).await;
        assert!(succeeded == good && printed.contains(expected), "{expected:?} in {printed}");
    }
    let patch = async |name: &str, disabled: bool| {
        let change = json!({"spec": {"disabled": disabled}}).to_string();
        let arguments = ["patch", "ippool", name, "--type", "merge", "-p", &change];
        let output = cluster.tortie(&arguments).output().await.unwrap();
        (output.status.success(), text_of(&output))
    };
    let (succeeded, printed) = patch("part", true).await;
    assert!(succeeded, "{printed}");
    // All three are disabled now, and would get new conflicts.
    for (name, expected) in [
        (
            "part",
            "spec.disabled: the pool must stay disabled: 10.0.128.0/17 and 10.0.0.0/16 of IPPool whole overlap",
        ),
        (
            "nodes",
            "spec.disabled: the pool must stay disabled: 192.0.2.0/25 and 192.0.2.0/24, the network of node one, overlap",
        ),
    ] {
        let (succeeded, printed) = patch(name, false).await;
        assert!(!succeeded && printed.contains(expected), "{expected:?} in {printed}");
    }
    let enabled = json!({"vxlanMode": "Always", "disabled": false});
    let (succeeded, printed) = cluster.applies(&pool("whole", "10.0.0.0/16", enabled)).await;
    assert!(!succeeded && printed.contains("of IPPool part overlap"), "{printed}");
    cluster.store.delete(&Key::global(Kind::IpPool, "whole"), None).await.unwrap();
    let (succeeded, printed) = patch("part", false).await;
    assert!(succeeded, "{printed}");
}

/// What Windows nodes with these annotations rule out.
#[tokio::test(flavor = "multi_thread")]
async fn what_windows_nodes_cannot_use_is_rejected() {
    let cluster = Cluster::new().await;
    let plain = |name: &str, more: Value| {
        let net = name.bytes().next().unwrap();
        let mut spec = json!({"cidr": format!("10.{net}.0.0/16")});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object("IPPool", name, spec)
    };
    let vni = |name: &str, vni: u32| object("FelixConfiguration", name, json!({"vxlanVNI": vni}));
    let on_linux = || json!({"nodeSelector": "kubernetes.io/os == 'linux'"});
    let starts = || json!({});
    let overlay = || json!({"projectcalico.org/IPv4VXLANTunnelAddr": "10.244.1.1"});
    let l2bridge = || json!({"tortie.io/hns-network": "L2Bridge"});
    let by_vxlan = "spec.vxlanMode: the Windows node w reaches other nodes by VXLAN only";
    let low = "spec.vxlanVNI: 100 is too low for node w, which runs Windows";
    for (annotations, object, good, expected) in [
        (starts(), plain("a", json!({})), true, "created"),
        (l2bridge(), plain("b", json!({})), true, "created"),
        (overlay(), plain("c", json!({})), false, by_vxlan),
        (overlay(), plain("c", json!({"nodeSelector": "kubernetes.io/os == 'windows'"})), false, by_vxlan),
        (overlay(), plain("c", on_linux()), true, "created"),
        (overlay(), plain("c", json!({})), false, by_vxlan),
        (overlay(), plain("d", json!({"disabled": true})), true, "created"),
        (overlay(), plain("d", json!({"disabled": false})), false, by_vxlan),
        (overlay(), plain("e", json!({"assignmentMode": "Manual"})), true, "created"),
        (overlay(), plain("f", json!({"allowedUses": ["LoadBalancer"]})), true, "created"),
        (overlay(), plain("g", json!({"cidr": "fd00:1::/64"})), true, "created"),
        (overlay(), plain("h", json!({"vxlanMode": "CrossSubnet"})), true, "created"),
        // It was so before.
        (overlay(), plain("a", json!({"natOutgoing": true})), true, "configured"),
        (l2bridge(), vni("default", 100), true, "created"),
        (overlay(), vni("default", 101), true, "configured"),
        (overlay(), vni("default", 5000), true, "configured"),
        (overlay(), vni("default", 100), false, low),
        (starts(), vni("default", 100), false, low),
        (overlay(), vni("node.other", 100), true, "created"),
    ] {
        let labels = json!({"kubernetes.io/os": "windows"});
        let node = json!({"metadata": {"name": "w", "labels": labels, "annotations": annotations}});
        cluster.put(&Key::global(Kind::Node, "w"), node).await;
        let (succeeded, printed) = cluster.applies(&object).await;
        assert!(succeeded == good && printed.contains(expected), "{annotations} {object}: {printed}");
    }
    // The mode that the manifest leaves out is one that somebody else has set, and stays.
    let open = r#"{"spec": {"vxlanMode": "Always", "disabled": null}}"#;
    let patched =
        cluster.tortie(&["patch", "ippool", "d", "--type", "merge", "-p", open]).output().await.unwrap();
    assert!(patched.status.success(), "{}", text_of(&patched));
    let d = plain("d", json!({"natOutgoing": true}));
    let (succeeded, printed) = cluster.applies(&d).await;
    assert!(succeeded, "{printed}");
    // A manifest that replaces the pool leaves nothing of it.
    let file = cluster.file(&d.to_string());
    let replaced = cluster.tortie(&["replace", "-f", file.to_str().unwrap()]).output().await.unwrap();
    assert!(!replaced.status.success() && text_of(&replaced).contains(by_vxlan), "{}", text_of(&replaced));
}

/// Calico stores a policy `x` of tier default as `default.x`: whoever applies or deletes the one means the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_of_tier_default_is_found_by_both_names() {
    let cluster = Cluster::new().await;
    let policy = |name: &str, tier: &str, order: u8| {
        object(
            "GlobalNetworkPolicy",
            name,
            json!({"tier": tier, "order": order, "selector": "all()", "types": ["Ingress"]}),
        )
    };
    let tier = object("Tier", "other", json!({"order": 5}));
    let steps = [
        (tier, "Tier other created\n"),
        (policy("default.x", "default", 1), "GlobalNetworkPolicy default.x created\n"),
        (policy("x", "default", 2), "GlobalNetworkPolicy default.x configured\n"),
        (policy("y", "default", 1), "GlobalNetworkPolicy y created\n"),
        (policy("default.y", "default", 2), "GlobalNetworkPolicy y configured\n"),
        // In another tier it is another policy.
        (policy("x", "other", 2), "GlobalNetworkPolicy x created\n"),
        // Where there are both, each is itself.
        (policy("default.x", "default", 3), "GlobalNetworkPolicy default.x configured\n"),
    ];
    for (object, expected) in steps {
        let (succeeded, printed) = cluster.applies(&object).await;
        assert!(succeeded && printed == expected, "{printed:?} is not {expected:?}");
    }
    let names = async || {
        let stored = cluster.store.list(Kind::GlobalNetworkPolicy).await.unwrap().items;
        stored.into_iter().map(|stored| stored.key.name).collect::<Vec<_>>()
    };
    assert_eq!(names().await, ["default.x", "x", "y"]);
    for (name, expected) in
        [("default.y", "GlobalNetworkPolicy y deleted\n"), ("x", "GlobalNetworkPolicy x deleted\n")]
    {
        let output = cluster.tortie(&["delete", "globalnetworkpolicy", name]).output().await.unwrap();
        assert_eq!(text_of(&output), expected);
    }
    // The preview reports what `apply` would do to the cluster.
    let file = cluster.file(&policy("x", "default", 9).to_string());
    let output = cluster.tortie(&["preview", "-f", file.to_str().unwrap()]).output().await.unwrap();
    assert!(output.status.success(), "{}", text_of(&output));
}

/// A folder in which nothing is read is a mistake, and not an empty cluster.
#[tokio::test(flavor = "multi_thread")]
async fn folders_without_manifests_are_rejected() {
    let cluster = Cluster::new().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("policy.txt"), "kind: NetworkPolicy").unwrap();
    std::fs::create_dir(folder.path().join("inside")).unwrap();
    let folder = folder.path().to_str().unwrap();
    for command in [&["policy", "lint"][..], &["matrix"], &["policy", "cost"], &["apply"]] {
        let output = cluster.tortie(&[command, &["-f", folder]].concat()).output().await.unwrap();
        assert!(!output.status.success(), "{command:?}");
        assert!(
            text_of(&output).contains("the folder has no manifests"),
            "{command:?}: {}",
            text_of(&output)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_will_not_be_connected_are_reported() {
    let cluster = Cluster::new().await;
    let pod = |namespace: &str, annotations: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": namespace, "annotations": annotations},
            "spec": {"containers": [{"name": "c"}]}})
    };
    cluster.put(&Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})).await;
    let (_, printed) = cluster.applies(&pod("nowhere", json!({}))).await;
    assert!(printed.contains("warning: Namespace nowhere does not exist"), "{printed}");
    let (_, printed) = cluster.applies(&pod("n", json!({"cni.projectcalico.org/ipAddrs": "[]"}))).await;
    assert!(
        printed.contains("metadata.annotations.cni.projectcalico.org/ipAddrs: it is not supported"),
        "{printed}"
    );
    assert!(!printed.contains("Namespace"), "{printed}");
}

async fn into(cluster: &Cluster, arguments: &[&str], output: Stdio) -> Output {
    let mut command = cluster.tortie(arguments);
    command.stdout(output).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().await.unwrap()
}

/// A failed write is an error, unless the reader has closed the pipe.
#[tokio::test(flavor = "multi_thread")]
async fn unwritable_output_gives_a_failing_exit_code() {
    let cluster = Cluster::new().await;
    for arguments in [&["get", "nodes"][..], &["--version"], &["explain", "--help"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = into(&cluster, arguments, full.into()).await;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let printed = text_of(&output);
        assert!(
            printed.contains("error: standard output: No space left on device"),
            "{arguments:?}: {printed}"
        );
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = into(&cluster, arguments, writer.into()).await;
        assert_eq!(
            (output.status.code(), crate::served::support::text_of(&output).as_str()),
            (Some(2), ""),
            "{arguments:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn get_prints_existing_objects_beside_errors_about_missing_ones() {
    let cluster = Cluster::new().await;
    let output = cluster.tortie(&["get", "node", "one", "nosuch", "another"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let printed = text_of(&output);
    for part in ["NAME", "one", "error: Node nosuch does not exist", "error: Node another does not exist"] {
        assert!(printed.contains(part), "{part:?} in {printed}");
    }
    let many: Vec<Value> =
        (0..9).map(|n| json!({"object": {"kind": "Pod", "namespace": "n", "name": format!("p{n}")}, "reason": "HnsUnavailable", "message": "HNS does not answer"})).collect();
    cluster.report(1, json!(many), 0).await;
    let output = cluster.tortie(&["get", "nodereports"]).output().await.unwrap();
    let printed = crate::served::support::text_of(&output);
    assert!(printed.contains("one: Pod n/p0: HnsUnavailable: HNS does not answer\n"), "{printed}");
    assert!(printed.contains("one: 6 more HnsUnavailable"), "{printed}");
    assert!(printed.lines().all(|line| line.len() < 100), "{printed}");
}

/// Nodes without a session learn no routes. A BGPPeer of the same manifests, or one that is stored, takes the place of the mesh.
#[tokio::test(flavor = "multi_thread")]
async fn a_mesh_that_is_off_without_peers_is_a_warning() {
    let cluster = Cluster::new().await;
    let settings = |mesh: bool| object("BGPConfiguration", "default", json!({"nodeToNodeMeshEnabled": mesh}));
    let peer = object("BGPPeer", "p", json!({"peerIP": "192.0.2.1", "asNumber": 64500}));
    let both = json!({"apiVersion": "v1", "kind": "List", "items": [peer, settings(false)]});
    for (case, manifest, is_warned) in [
        ("off, and no peer", settings(false), true),
        ("on", settings(true), false),
        ("off, with a peer", both, false),
        ("off, and a peer is stored", settings(false), false),
    ] {
        let (succeeded, printed) = cluster.applies(&manifest).await;
        assert!(succeeded, "{case}: {printed}");
        let warning =
            "warning: BGPConfiguration default: nodeToNodeMeshEnabled is false, and there is no BGPPeer";
        assert_eq!(printed.contains(warning), is_warned, "{case}: {printed}");
    }
}
