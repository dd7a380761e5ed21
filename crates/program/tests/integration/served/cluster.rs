//! `tortie cluster info` and `tortie cluster diags`.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use tar::Archive;
use tortie_api::{Key, Kind};

use crate::served::support::{Cluster, text_of};

async fn with_content() -> Cluster {
    let cluster = Cluster::new().await;
    let secret = json!({"name": "c", "env": [{"name": "PASSWORD", "value": "hunter2"}], "args": ["--token=hunter2"], "image": "i"});
    let metadata = json!({"name": "p", "namespace": "shop", "annotations": {
        "kubectl.kubernetes.io/last-applied-configuration": "hunter2", "projectcalico.org/kept": "yes"}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [secret], "nodeName": "one"}});
    cluster.put(&Key::namespaced(Kind::Pod, "shop", "p"), pod).await;
    let workload = json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "j", "namespace": "shop"},
        "spec": {"jobTemplate": {"spec": {"template": {"spec": {"initContainers": [secret]}}}}}});
    cluster.put(&Key::namespaced(Kind::CronJob, "shop", "j"), workload).await;
    let pool = json!({"apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "pods"},
        "spec": {"cidr": "10.0.0.0/16"}});
    cluster.put(&Key::global(Kind::IpPool, "pods"), pool).await;
    let block = json!({"cidr": "10.0.0.0/26", "allocations": [0, null, 0], "attributes": [{}]});
    cluster.put(&Key::global(Kind::IpamBlock, "10.0.0.0/26"), block).await;
    cluster.report(1, json!([]), 0).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn info_counts_what_is_there() {
    let cluster = with_content().await;
    let shown = cluster.tortie(&["cluster", "info"]).output().await.unwrap();
    let text = text_of(&shown);
    assert!(shown.status.success(), "{text}");
    for line in
        ["nodes       1 unknown", "pool        10.0.0.0/16: 2 addresses given", "pods: 1", "cronjobs: 1"]
    {
        assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
    }
    let document = cluster.tortie(&["cluster", "info", "-o", "json"]).output().await.unwrap();
    let document: Value = serde_json::from_slice(&document.stdout).unwrap();
    assert_eq!(
        (&document["objects"]["pods"], &document["pools"]["10.0.0.0/16"]),
        (&json!(1), &json!(2)),
        "{document}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn diags_have_all_objects_without_what_may_be_secret() {
    let cluster = with_content().await;
    let file = format!("{}/diags.tar.gz", cluster.folder());
    let run = || async { cluster.tortie(&["cluster", "diags", "-o", &file]).output().await.unwrap() };
    let written = run().await;
    assert!(written.status.success() && text_of(&written).contains("has 6 objects"), "{}", text_of(&written));
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);

    let mut archive = Archive::new(GzDecoder::new(std::fs::File::open(&file).unwrap()));
    let mut files: BTreeMap<String, Value> = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let (name, mut text) = (entry.path().unwrap().display().to_string(), String::new());
        entry.read_to_string(&mut text).unwrap();
        assert!(!text.contains("hunter2"), "{name}: {text}");
        files.insert(name, serde_json::from_str(&text).unwrap());
    }
    let names: Vec<&str> = files.keys().map(|name| name.trim_start_matches("tortie-diags/")).collect();
    let kinds = ["cronjobs", "ipamblocks", "ippools", "nodereports", "nodes", "pods"];
    let expected: Vec<String> = std::iter::once("info.json".to_owned())
        .chain(kinds.map(|kind| format!("objects/{kind}.json")))
        .collect();
    assert_eq!(names, expected);
    let pod = &files["tortie-diags/objects/pods.json"]["items"][0];
    assert_eq!(pod["spec"]["containers"][0], json!({"name": "c", "image": "i"}));
    assert_eq!(pod["metadata"]["annotations"], json!({"projectcalico.org/kept": "yes"}));

    let again = run().await;
    assert!(!again.status.success() && text_of(&again).contains("exists"), "{}", text_of(&again));
}
