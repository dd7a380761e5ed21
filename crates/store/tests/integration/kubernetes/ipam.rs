//! IPAM's records on the real API server.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::can_run;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::conformance::Mirror;

use crate::kubernetes::{NEEDED, client, start};

/// Calico marks a record before it removes it, and may be killed in between. The record is gone from then on, and whoever
/// needs its name removes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_marked_as_deleted_is_gone() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions { definitions: true, ..KubeOptions::default() });
    a_marked_record_is_gone(&servers, json!("true")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_the_native_group_that_is_marked_as_deleted_is_gone() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    servers.create_native_definitions().unwrap();
    a_marked_record_is_gone(&servers, json!(true)).await;
}

/// The mark of an affinity differs between the groups.
async fn a_marked_record_is_gone(servers: &KubeApi, mark_of_affinity: Value) {
    let store = client(servers).await;
    let records = [
        (
            Key::global(Kind::IpamBlock, "10.0.0.0/30"),
            json!({"cidr": "10.0.0.0/30", "affinity": "host:n", "allocations": [null, null, null, null],
                "unallocated": [0, 1, 2, 3], "attributes": []}),
            ("ipamblock/10-0-0-0-30", json!(true)),
        ),
        (
            Key::global(Kind::BlockAffinity, "n/10.0.0.0/30"),
            json!({"state": "confirmed"}),
            ("blockaffinity/n-10-0-0-0-30", mark_of_affinity),
        ),
        (
            Key::global(Kind::IpamHandle, "net.C1"),
            json!({"block": {"10.0.0.0/30": 1}}),
            ("ipamhandle/net.c1", json!(true)),
        ),
    ];
    for (key, value, (object, mark)) in records {
        let mut mirror = Mirror::in_sync(&store, &[key.kind]).await;
        let created = store.create(&key, value.clone()).await.unwrap();
        mirror.until(|mirror| mirror.objects.contains_key(&key)).await;
        let patch = json!({"spec": {"deleted": mark}}).to_string();
        servers.kubectl(&["patch", object, "--type=merge", "-p", &patch]).unwrap();
        mirror.until(|mirror| mirror.objects.is_empty()).await;
        assert_eq!(store.list(key.kind).await.unwrap().items, [], "{key}");
        assert!(servers.kubectl(&["get", object]).is_ok(), "{key}: it is not removed yet");
        assert!(store.update(&key, value.clone(), &created.version).await.is_err(), "{key}");

        assert_eq!(store.get(&key).await, Ok(None), "{key}");
        let left = servers.kubectl(&["get", object]);
        assert!(left.is_err_and(|error| error.to_string().contains("not found")), "{key}: it is removed");
        let again = store.create(&key, value).await.unwrap();
        mirror.until(|mirror| mirror.objects.contains_key(&key)).await;
        assert_ne!(again.value, Value::Null);
    }
}
