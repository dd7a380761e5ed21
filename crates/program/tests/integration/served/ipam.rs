//! `tortie ipam`.

use std::collections::BTreeMap;

use crate::served::support::{Cluster, text_of};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Request};
use tortie_store::Store;

impl Cluster {
    /// The exit code and the output of `tortie ipam`.
    async fn ipam(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.tortie(&[&["ipam"], arguments].concat()).output().await.unwrap();
        (output.status.code().unwrap(), text_of(&output))
    }

    async fn pool(&self) {
        let pool = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "pods", "uid": "u"},
            "spec": {"cidr": "10.0.0.0/28", "blockSize": 29, "vxlanMode": "Always"},
        });
        self.put(&Key::global(Kind::IpPool, "pods"), pool).await;
    }

    /// Gives an address to a pod on a node; without an endpoint, it is leaked.
    async fn assign(&self, node: &str, pod: &str, has_endpoint: bool) -> String {
        let owner = [
            ("node", node),
            ("namespace", "n"),
            ("pod", pod),
            ("timestamp", "2026-01-01 00:00:00 +0000 UTC"),
        ];
        let owner = owner.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let request = Request { handle: format!("net.{pod}"), owner, ..Request::default() };
        let ipam = Ipam::new(self.store.clone(), node, BTreeMap::new());
        let address = ipam.assign(&request).await.unwrap().address.to_string();
        if has_endpoint {
            let endpoint =
                json!({"spec": {"node": node, "pod": pod, "ipNetworks": [format!("{address}/32")]}});
            self.put(
                &Key::namespaced(Kind::WorkloadEndpoint, "n", format!("{node}-k8s-{pod}-eth0")),
                endpoint,
            )
            .await;
        }
        address
    }

    async fn names(&self, kind: Kind) -> Vec<String> {
        self.store.list(kind).await.unwrap().items.into_iter().map(|stored| stored.key.name).collect()
    }

    async fn config(&self) -> Value {
        self.store.get(&Key::global(Kind::IpamConfig, "default")).await.unwrap().unwrap().value
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn show_names_pools_blocks_and_owners() {
    let cluster = Cluster::new().await;
    cluster.pool().await;
    let address = cluster.assign("one", "p", true).await;
    let (code, shown) = cluster.ipam(&["show"]).await;
    assert_eq!((code, shown.lines().count()), (0, 2), "{shown}");
    assert!(shown.contains("IPPool     10.0.0.0/28   16      1 (6%)   15 (93%)   pods"), "{shown}");
    let (_, shown) = cluster.ipam(&["show", "--show-blocks"]).await;
    assert!(shown.lines().count() == 3 && shown.contains("Block ") && shown.contains("/29"), "{shown}");
    let (code, shown) = cluster.ipam(&["show", "--ip", &address]).await;
    assert_eq!(code, 0);
    for part in ["is in use", "of node one", "handle: net.p", "pod: p"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    for nobody in ["10.0.0.15", "192.0.2.1"] {
        let (code, shown) = cluster.ipam(&["show", "--ip", nobody]).await;
        assert_eq!(code, 1, "{shown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn check_finds_leaks_and_repairs_them() {
    let cluster = Cluster::new().await;
    cluster.pool().await;
    cluster.assign("one", "p", true).await;
    assert_eq!(cluster.ipam(&["check"]).await, (0, "every address is in order\n".to_owned()));
    let lost = cluster.assign("one", "lost", false).await;
    let gone = cluster.assign("gone", "q", false).await;
    let (code, found) = cluster.ipam(&["check"]).await;
    assert_eq!(code, 1);
    for part in [
        format!("leak: {lost}: pod n/lost, for which it was given at"),
        format!("leak: {gone}: pod n/q was on node gone, which does not exist"),
        "affinity: affinity gone/".to_owned(),
        "3 findings".to_owned(),
    ] {
        assert!(found.contains(&part), "{part} in {found}");
    }
    assert_eq!(cluster.names(Kind::IpamHandle).await.len(), 3, "nothing was repaired");
    let (code, fixed) = cluster.ipam(&["check", "--fix", "--grace", "1"]).await;
    assert_eq!(code, 0, "{fixed}");
    for part in [
        "looking again in 1 seconds".to_owned(),
        format!("repaired: leak: {lost}"),
        "3 findings repaired, 0 not, 0 left".to_owned(),
    ] {
        assert!(fixed.contains(&part), "{part} in {fixed}");
    }
    assert_eq!(cluster.names(Kind::IpamHandle).await, ["net.p"]);
    assert_eq!(cluster.ipam(&["check", "--fix"]).await.0, 0);
    // The grace period counts from the time at which the address was given.
    cluster.assign("one", "lost", false).await;
    assert_eq!(cluster.ipam(&["check", "--grace", "4000000000"]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn release_refuses_what_is_in_use() {
    let cluster = Cluster::new().await;
    cluster.pool().await;
    let used = cluster.assign("one", "p", true).await;
    let lost = cluster.assign("one", "lost", false).await;
    let (code, refused) = cluster.ipam(&["release", "--ip", &used]).await;
    assert!(code == 2 && refused.contains("pod n/p has"), "{code} {refused}");
    let (code, refused) = cluster.ipam(&["release", "--handle", "net.p"]).await;
    assert!(code == 2 && refused.contains("pod n/p has"), "{code} {refused}");
    let (code, refused) = cluster.ipam(&["release", "--node", "one"]).await;
    assert!(code == 2 && refused.contains("Node one exists"), "{code} {refused}");
    assert_eq!(cluster.names(Kind::IpamHandle).await.len(), 2);

    assert_eq!(cluster.ipam(&["release", "--ip", &lost]).await, (0, format!("released {lost}\n")));
    assert_eq!(cluster.ipam(&["release", "--ip", &lost]).await.0, 1);
    assert_eq!(cluster.ipam(&["release", "--ip", &used, "--force"]).await.0, 0);
    cluster.assign("one", "again", false).await;
    assert_eq!(cluster.ipam(&["release", "--handle", "net.again"]).await.0, 0);
    cluster.assign("gone", "q", true).await;
    let (code, refused) = cluster.ipam(&["release", "--node", "gone"]).await;
    assert!(code == 2 && refused.contains("gone-k8s-q-eth0 of node gone exists"), "{code} {refused}");
    let endpoint = Key::namespaced(Kind::WorkloadEndpoint, "n", "gone-k8s-q-eth0");
    cluster.store.delete(&endpoint, None).await.unwrap();
    let report = |time: Timestamp| {
        let status = json!({"os": "linux", "endpoints": 0, "positions": {}, "heartbeatSeconds": 60});
        let mut report =
            json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "gone"}});
        report["status"] = status;
        report["status"]["time"] = json!(time.to_string());
        report
    };
    let key = Key::global(Kind::NodeReport, "gone");
    cluster.put(&key, report(Timestamp::now())).await;
    let (code, refused) = cluster.ipam(&["release", "--node", "gone"]).await;
    assert!(code == 2 && refused.contains("has reported a moment ago"), "{code} {refused}");
    cluster.put(&key, json!({"metadata": {"name": "gone"}, "status": {}})).await;
    let (code, refused) = cluster.ipam(&["release", "--node", "gone"]).await;
    assert!(code == 2 && refused.contains("cannot be read"), "{code} {refused}");
    assert_eq!(cluster.ipam(&["release", "--node", "gone", "--force"]).await.0, 0);
    cluster.store.delete(&key, None).await.unwrap();
    cluster.assign("gone", "q", false).await;
    cluster.put(&key, report(Timestamp::now() - SignedDuration::from_mins(4))).await;
    let (code, released) = cluster.ipam(&["release", "--node", "gone"]).await;
    assert!(code == 0 && released.contains("released block"), "{released}");
    assert_eq!(cluster.names(Kind::IpamHandle).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn split_replaces_a_pool_by_smaller_ones() {
    let cluster = Cluster::new().await;
    cluster.pool().await;
    cluster.assign("one", "p", true).await;
    for (arguments, problem) in [
        (["split", "--cidr", "10.0.0.0/28", "3"], "no power of two"),
        (["split", "--cidr", "10.0.0.0/28", "4"], "smaller than one block"),
        (["split", "--cidr", "10.0.0.0/24", "2"], "no IPPool has"),
    ] {
        let (code, refused) = cluster.ipam(&arguments).await;
        assert!(code == 2 && refused.contains(problem), "{refused}");
    }
    let (code, split) = cluster.ipam(&["split", "--cidr", "10.0.0.0/28", "2"]).await;
    assert_eq!(code, 0, "{split}");
    assert_eq!(cluster.names(Kind::IpPool).await, ["split-pods-0", "split-pods-1"]);
    let pool = cluster.store.get(&Key::global(Kind::IpPool, "split-pods-1")).await.unwrap().unwrap().value;
    assert_eq!(pool["spec"], json!({"cidr": "10.0.0.8/29", "blockSize": 29, "vxlanMode": "Always"}));
    assert_eq!(pool["metadata"], json!({"name": "split-pods-1"}));
    assert_eq!(cluster.ipam(&["check"]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_changed_by_configure_and_apply() {
    let cluster = Cluster::new().await;
    let key = Key::global(Kind::IpamConfig, "default");
    cluster.put(&key, json!({"strict_affinity": true, "auto_allocate_blocks": true, "ofTheFuture": 1})).await;
    assert_eq!(cluster.ipam(&["configure", "--max-blocks-per-host", "4"]).await.0, 0);
    let config = cluster.config().await;
    assert_eq!((&config["maxBlocksPerHost"], &config["ofTheFuture"]), (&json!(4), &json!(1)));
    let (code, refused) = cluster.ipam(&["configure", "--strict-affinity", "false"]).await;
    assert!(code == 2 && refused.contains("needs strict affinity"), "{refused}");

    let apply = async |spec: Value| {
        let manifest = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPAMConfig", "metadata": {"name": "default"}, "spec": spec,
        });
        let file = cluster.file(&manifest.to_string());
        let output = cluster.tortie(&["apply", "-f", file.to_str().unwrap()]).output().await.unwrap();
        (output.status.code().unwrap(), text_of(&output))
    };
    assert_eq!(apply(json!({"strictAffinity": true, "ipCooldownSeconds": 30})).await.0, 0);
    let expected = json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 0,
        "ipCooldownSeconds": 30, "ofTheFuture": 1});
    assert_eq!(cluster.config().await, expected);
    let (_, again) = apply(json!({"strictAffinity": true, "ipCooldownSeconds": 30})).await;
    assert!(again.contains("unchanged"), "{again}");

    // A Windows node would get no address any more.
    let labels = json!({"kubernetes.io/os": "windows"});
    cluster.put(&Key::global(Kind::Node, "w"), json!({"metadata": {"name": "w", "labels": labels}})).await;
    let (code, refused) = cluster.ipam(&["configure", "--strict-affinity", "false"]).await;
    assert!(code == 2 && refused.contains("node w is a Windows node"), "{refused}");
    let (code, refused) = apply(json!({})).await;
    assert!(code != 0 && refused.contains("spec.strictAffinity: must be true, because w"), "{refused}");
    assert_eq!(cluster.config().await, expected);
}
