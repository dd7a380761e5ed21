//! The two groups of the API in which Calico can keep its kinds.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::can_run;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::conformance::{Mirror, sample};
use tortie_store::kubernetes::CalicoGroup;
use tortie_store::{Store, StoreError};

use crate::kubernetes::{NEEDED, at, client, conforms, eventually, start, tier};

/// The definition of Calico's tiers in the native group, as if by Calico's API server.
const TIERS: &str = "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: tiers.projectcalico.org}
spec:
  group: projectcalico.org
  scope: Cluster
  names: {kind: Tier, plural: tiers}
  versions:
  - {name: v3, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
";

#[tokio::test(flavor = "multi_thread")]
async fn the_native_group_conforms() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    servers.create_native_definitions().unwrap();
    assert_eq!(client(&servers).await.group().await, Ok(CalicoGroup::Native));
    conforms(&servers).await;
}

/// Calico's choice at each state of the cluster. Where it would overlook objects, Tortie refuses to choose.
#[tokio::test(flavor = "multi_thread")]
async fn the_group_is_the_one_that_calico_uses() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    assert_eq!(store.group().await, Ok(CalicoGroup::Crd), "nothing is installed");
    assert_eq!(store.get(&tier("t")).await, Err(StoreError::KindAbsent(Kind::Tier)));
    servers.create_native_definitions().unwrap();
    eventually("create", async || store.create(&tier("t"), sample(&tier("t"), 1)).await).await;
    assert_eq!(store.group().await, Ok(CalicoGroup::Native));
    let seen = servers.kubectl(&["get", "tiers.projectcalico.org", "t", "-o", "name"]).unwrap();
    assert_eq!(seen.trim(), "tier.projectcalico.org/t");
    let mut mirror = Mirror::in_sync(&store, &[Kind::Tier]).await;

    // The definitions of the other group are installed beside: who runs goes on, who starts does not guess.
    crd_definitions(&servers);
    assert!(store.get(&tier("t")).await.unwrap().is_some());
    let refused = client(&servers).await;
    for named in
        ["projectcalico.org/v3 has tiers", "crd.projectcalico.org/v1", "delete the", "--calico-group"]
    {
        let results = [refused.get(&tier("t")).await.map(drop), refused.list(Kind::IpPool).await.map(drop)];
        for result in results {
            let Err(StoreError::Unavailable(text)) = &result else { panic!("{result:?}") };
            assert!(text.contains(named), "{text}");
        }
    }
    assert!(refused.list(Kind::Node).await.is_ok(), "other kinds are readable");
    let chosen = client(&servers).await.with_group(CalicoGroup::Crd);
    chosen.create(&tier("u"), sample(&tier("u"), 2)).await.unwrap();
    let text = refused.get(&tier("t")).await.unwrap_err().to_string();
    assert!(text.contains("crd.projectcalico.org/v1 has tiers"), "{text}");

    // Without objects, the native group does not count, as if it were served from the other one.
    store.delete(&tier("t"), None).await.unwrap();
    mirror.until(|mirror| mirror.objects.is_empty()).await;
    eventually("the choice", async || refused.get(&tier("u")).await).await.unwrap();
    assert_eq!(refused.group().await, Ok(CalicoGroup::Crd));

    // Without its definitions, whoever uses it changes to the other group.
    servers.kubectl(&["delete", "crd", "tiers.projectcalico.org", "ipamblocks.projectcalico.org"]).unwrap();
    let later = client(&servers).await.create(&tier("v"), sample(&tier("v"), 3)).await.unwrap();
    mirror.reach(&at(&later)).await;
    assert_eq!(mirror.objects.keys().collect::<Vec<_>>(), [&tier("u"), &tier("v")]);
    assert_eq!(store.group().await, Ok(CalicoGroup::Crd));
}

/// Creates the definitions of `deploy/crds` that do not exist yet.
fn crd_definitions(servers: &KubeApi) {
    // One exists already, that of Tortie's own kind.
    let refused = servers.create_definitions();
    assert!(refused.is_err_and(|error| error.to_string().contains("already exists")));
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
}

/// Calico's API server serves the native group from another place: from the other group, or from etcd.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_blocks_is_served_from_elsewhere() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    servers.apply(TIERS).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    let text = eventually("the group", async || match store.get(&tier("t")).await {
        Err(StoreError::Unavailable(text)) => Ok(text),
        other => Err(StoreError::Damaged(format!("{other:?}"))),
    })
    .await;
    for part in ["projectcalico.org/v3", "without ipamblocks", "another datastore", "--store etcd:"] {
        assert!(text.contains(part), "{text}");
    }
    servers.apply("{apiVersion: projectcalico.org/v3, kind: Tier, metadata: {name: x}}").unwrap();
    servers.create_definitions().unwrap();
    eventually("create", async || store.create(&tier("t"), sample(&tier("t"), 1)).await).await;
    assert_eq!(store.group().await, Ok(CalicoGroup::Crd));
}

/// Objects of the native group as Calico writes them: Tortie reads them in the form of Calico's API, or of etcd for IPAM's
/// records, and writes them as they were.
#[tokio::test(flavor = "multi_thread")]
async fn native_objects_of_calico_are_written_as_they_were() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    servers.create_native_definitions().unwrap();
    let store = client(&servers).await;
    let native = |kind: &str, metadata: &Value, spec: &Value| json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": metadata, "spec": spec});
    let metadata = |name: &str| json!({"name": name, "labels": {"a": "b"}, "annotations": {"note": "x", "projectcalico.org/own": "y"}});
    let named = |name: &str| json!({"name": name});
    let claimed = "2024-05-06T07:08:09Z";
    let big = 1_800_000_000_000_000_123_u64;
    let tier = json!({"order": 1.5, "defaultAction": "Pass", "new": {"number": big}});
    let policy = json!({"tier": "default", "order": 7, "selector": "all()", "types": ["Ingress"]});
    let block = json!({"cidr": "10.0.0.0/30", "affinity": "host:node-a", "affinityClaimTime": claimed,
        "allocations": [null, 0, null, null], "unallocated": [0, 2, 3], "strictAffinity": false, "deleted": false,
        "attributes": [{"handle_id": "Calico.ABC", "secondary": {"node": "node-a"}}],
        "sequenceNumber": big, "sequenceNumberForAllocation": {"1": big - 1}});
    let mut block_in_etcd = block.clone();
    block_in_etcd["affinity_claim_time"] = block_in_etcd["affinityClaimTime"].take();
    block_in_etcd.as_object_mut().unwrap().remove("affinityClaimTime");
    let labels = json!({"projectcalico.org/affinity-type": "host", "projectcalico.org/ip-version": "4",
        "projectcalico.org/hostname-hash": "PY3TQE2E3XMTETLM2MJO3UITKPFB27YUJ4T4E5XGPEJON3SM4QAA"});
    let affinity = json!({"state": "confirmed", "node": "node-a", "cidr": "10.0.0.0/30", "deleted": false, "type": "host"});
    let handle = json!({"handleID": "Calico.ABC", "block": {"10.0.0.0/30": 1}, "deleted": false});
    let config = json!({"strictAffinity": true, "autoAllocateBlocks": true, "maxBlocksPerHost": 3});
    let table = [
        (tier_key(), native("Tier", &metadata("t"), &tier), native("Tier", &metadata("t"), &tier)),
        (
            Key::global(Kind::GlobalNetworkPolicy, "p"),
            native("GlobalNetworkPolicy", &metadata("p"), &policy),
            native("GlobalNetworkPolicy", &metadata("p"), &policy),
        ),
        (
            Key::global(Kind::IpamBlock, "10.0.0.0/30"),
            native("IPAMBlock", &named("10-0-0-0-30"), &block),
            block_in_etcd,
        ),
        (
            Key::global(Kind::BlockAffinity, "node-a/10.0.0.0/30"),
            native("BlockAffinity", &json!({"name": "node-a-10-0-0-0-30", "labels": labels}), &affinity),
            json!({"state": "confirmed", "deleted": false, "type": "host"}),
        ),
        (
            Key::global(Kind::IpamHandle, "Calico.ABC"),
            native("IPAMHandle", &named("calico.abc"), &handle),
            json!({"block": {"10.0.0.0/30": 1}, "deleted": false}),
        ),
        (
            Key::global(Kind::IpamConfig, "default"),
            native("IPAMConfiguration", &named("default"), &config),
            json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 3}),
        ),
    ];
    for (key, object, mut expected) in table {
        let kind = object["kind"].as_str().unwrap().to_lowercase();
        let target = format!("{kind}.v3.projectcalico.org/{}", object["metadata"]["name"].as_str().unwrap());
        let stored = || -> Value {
            serde_json::from_str(&servers.kubectl(&["get", &target, "-o", "json"]).unwrap()).unwrap()
        };
        servers.apply(&object.to_string()).unwrap();
        let before = stored();
        let read = store.get(&key).await.unwrap().unwrap();
        if expected.get("metadata").is_some() {
            for field in ["annotations", "creationTimestamp", "generation", "uid"] {
                expected["metadata"][field] = before["metadata"][field].clone();
            }
        }
        assert_eq!(read.value, expected, "{key}");
        let written = store.update(&key, read.value.clone(), &read.version).await.unwrap();
        assert_eq!(written.value, read.value, "{key}");
        assert_eq!(stored()["spec"], before["spec"], "{key}");
        assert_eq!(store.list(key.kind).await.unwrap().items, [written]);
        store.delete(&key, None).await.unwrap();
        let again = store.create(&key, read.value).await.unwrap();
        assert_eq!(store.get(&key).await, Ok(Some(again)));
        let after = stored();
        for field in ["/spec", "/metadata/labels", "/metadata/name"] {
            assert_eq!(after.pointer(field), before.pointer(field), "{key}");
        }
    }
}

fn tier_key() -> Key {
    tier("t")
}
