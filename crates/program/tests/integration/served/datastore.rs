//! `tortie datastore`: copies between datastores.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd, KubeApi, KubeOptions};
use tortie_store::Store;

use crate::served::support::{Cluster, text_of};

const OBJECTS: &str = "apiVersion: projectcalico.org/v3
kind: Tier
metadata: {name: team}
spec: {order: 10}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: team.web, namespace: shop, labels: {a: b}}
spec: {tier: team, selector: app == 'web', types: [Ingress]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkSet
metadata: {name: office, annotations: {note: x}}
spec: {nets: [192.0.2.0/24]}
---
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: pods}
spec: {cidr: 10.0.0.0/16, vxlanMode: Always, natOutgoing: true}
";

/// A sequence number that is no exact floating-point number.
const SEQUENCE: u64 = 1_800_000_000_000_000_001;

fn records() -> Vec<(Key, Value)> {
    let block = json!({"cidr": "10.0.0.0/30", "affinity": "host:one", "allocations": [0, null, null, null],
        "unallocated": [1, 2, 3], "attributes": [{"handle_id": "h", "secondary": {"pod": "p"}}],
        "sequenceNumber": SEQUENCE, "sequenceNumberForAllocation": {"0": SEQUENCE - 1}, "deleted": false});
    vec![
        (Key::global(Kind::IpamBlock, "10.0.0.0/30"), block),
        (
            Key::global(Kind::BlockAffinity, "one/10.0.0.0/30"),
            json!({"state": "confirmed", "deleted": false}),
        ),
        (Key::global(Kind::IpamHandle, "h"), json!({"block": {"10.0.0.0/30": 1}, "deleted": false})),
        (
            Key::global(Kind::IpamConfig, "default"),
            json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 20}),
        ),
    ]
}

struct Ran {
    code: i32,
    text: String,
}

impl Ran {
    #[track_caller]
    fn expect(self, code: i32, expected: &str) -> Self {
        assert!(
            self.code == code && self.text.contains(expected),
            "{}, not {code} {expected:?}: {}",
            self.code,
            self.text
        );
        self
    }
}

async fn on(cluster: &Cluster, line: &str) -> Ran {
    let output = cluster.tortie(&line.split(' ').collect::<Vec<_>>()).output().await.unwrap();
    Ran { code: output.status.code().unwrap(), text: text_of(&output) }
}

async fn filled() -> Cluster {
    let cluster = Cluster::new().await;
    let file = cluster.file(OBJECTS).display().to_string();
    on(&cluster, &format!("apply -f {file}")).await.expect(0, "created");
    for (key, value) in records() {
        cluster.put(&key, value).await;
    }
    cluster.put_endpoint("shop", "one").await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_equal_and_can_be_made_again() {
    let (from, to) = (filled().await, Cluster::new().await);
    let file = format!("{}/export", from.folder());
    on(&from, &format!("datastore export -o {file}")).await.expect(2, "tortie datastore lock first");
    on(&from, "datastore lock").await.expect(0, "locked");
    on(&from, "datastore lock").await.expect(0, "already locked");
    on(&from, &format!("datastore export -o {file}")).await.expect(0, "ipamblocks");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "others cannot read the policies");
    on(&from, &format!("datastore compare -f {file}")).await.expect(0, "networkpolicies");

    on(&to, &format!("datastore compare -f {file}")).await.expect(1, "Tier team is missing");
    on(&to, &format!("datastore import -f {file}")).await.expect(0, "the datastore equals the export");
    let block = to.store.get(&Key::global(Kind::IpamBlock, "10.0.0.0/30")).await.unwrap().unwrap();
    assert_eq!(block.value, records()[0].1);
    on(&to, "datastore lock").await.expect(0, "already locked");

    // As after an interruption: a part is missing.
    to.store.delete(&Key::global(Kind::IpamHandle, "h"), None).await.unwrap();
    on(&to, &format!("datastore import -f {file}")).await.expect(0, "the datastore equals the export");
    on(&to, "label tier/team x=y").await.expect(0, "changed");
    on(&to, &format!("datastore compare -f {file}")).await.expect(1, "Tier team differs");
    on(&to, &format!("datastore import -f {file}")).await.expect(2, "Tier team exists and differs");
    on(&to, &format!("datastore import -f {file} --overwrite")).await.expect(0, "equals the export");
    on(&to, "annotate tier/team x=y").await.expect(0, "warning: the datastore is locked");
    on(&to, "annotate tier/team x-").await.expect(0, "changed");
    let open = to.file(
        "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: open}\nspec: {selector: all(), order: 1}\n",
    );
    on(&to, &format!("apply -f {}", open.display())).await.expect(0, "created");
    on(&to, &format!("datastore compare -f {file}"))
        .await
        .expect(1, "GlobalNetworkPolicy open was not exported");
    on(&to, &format!("datastore import -f {file}")).await.expect(2, "policy would mean something else");
    on(&to, &format!("datastore import -f {file} --keep-others")).await.expect(0, "equals the export");
    on(&to, "delete gnp open").await.expect(0, "deleted");
    on(&from, &format!("datastore export -o {file}")).await.expect(2, &file);
    on(&to, "datastore unlock").await.expect(0, "unlocked");
    on(&to, &format!("datastore compare -f {file}")).await.expect(0, "tiers");
}

/// A node that has not noticed the lock may still write.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_waits_for_the_nodes() {
    let cluster = Cluster::new().await;
    cluster.report(1, json!([]), 0).await;
    on(&cluster, "datastore lock --timeout 1")
        .await
        .expect(2, "have not noticed it and may still write: one");
    let locked = json!([{"reason": "DatastoreLocked", "message": "it is locked"}]);
    cluster.report(1, locked, 0).await;
    on(&cluster, "datastore lock --timeout 1").await.expect(0, "already locked");
    let stale = json!({"os": "linux", "time": "2026-01-01T00:00:00Z", "heartbeatSeconds": 60, "positions": {}, "endpoints": 0, "conditions": []});
    let stale = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "two"}, "status": stale});
    cluster.put(&Key::global(Kind::NodeReport, "two"), stale).await;
    on(&cluster, "datastore lock --timeout 1").await.expect(0, "already locked");
}

/// Addresses of a datastore in use are not overwritten, whatever the options say.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_ipam_are_never_overwritten() {
    let (from, to) = (filled().await, Cluster::new().await);
    let file = format!("{}/export", from.folder());
    on(&from, &format!("datastore export --unlocked -o {file}")).await.expect(0, "ipamblocks");
    on(&to, &format!("datastore import -f {file}")).await.expect(0, "equals the export");
    let key = Key::global(Kind::IpamHandle, "h");
    to.put(&key, json!({"block": {"10.0.0.0/30": 2}, "deleted": false})).await;
    on(&to, &format!("datastore import --overwrite --keep-others -f {file}"))
        .await
        .expect(2, "would be given again");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_refuses_a_datastore_in_use_and_a_damaged_file() {
    let (from, to) = (filled().await, Cluster::new().await);
    let file = format!("{}/export", from.folder());
    on(&from, &format!("datastore export --unlocked -o {file}")).await.expect(0, "ipamblocks");
    to.put(&Key::global(Kind::IpamHandle, "other"), json!({"block": {"10.0.1.0/30": 1}, "deleted": false}))
        .await;
    on(&to, &format!("datastore import -f {file}")).await.expect(2, "IPAMHandle other");
    on(&to, "get clusterinformations -o name").await.expect(0, "");
    assert!(to.store.get(&Key::global(Kind::Tier, "team")).await.unwrap().is_none(), "nothing is written");

    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, &text[..text.len() - 20]).unwrap();
    on(&to, &format!("datastore import -f {file}")).await.expect(2, "export");
    on(&to, "datastore import -f /nonexistent").await.expect(2, "/nonexistent");
    on(&from, "datastore export --unlocked -o /nonexistent/file").await.expect(2, "/nonexistent/file");
}

fn tortie(store: &str, line: &str) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    let output = command.args(line.split(' ')).args(["--store", store]).output().unwrap();
    Ran { code: output.status.code().unwrap(), text: text_of(&output) }
}

const CLUSTER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Node
metadata: {name: one}
---
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: shop}
spec: {nodeName: one, containers: [{name: c, image: i}]}
";

/// The format of calicoctl, which is the way of Calico's own programs into a Kubernetes API.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_calicos_format_moves_a_cluster_to_a_kubernetes_api() {
    if !can_run(&[Program::Kube, Program::Etcd]) {
        return;
    }
    let from = filled().await;
    let file = format!("{}/calico", from.folder());
    let export = format!("datastore export --unlocked --format calico -o {file}");
    // A Node that does not say which one of Kubernetes it is.
    on(&from, &export).await.expect(2, "spec.orchRefs");
    assert!(!Path::new(&file).exists(), "a file that is not complete has no name");
    from.store.delete(&Key::global(Kind::Node, "one"), None).await.unwrap();
    let node = json!({"metadata": {"name": "etcd-one", "labels": {"rack": "7"},
        "annotations": {"projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/ASNumber": "64513"}},
        "spec": {"orchRefs": [{"orchestrator": "k8s", "nodeName": "one"}]}});
    from.put(&Key::global(Kind::Node, "etcd-one"), node).await;
    let copy =
        json!({"metadata": {"name": "knp.default.x", "namespace": "shop"}, "spec": {"selector": "all()"}});
    from.put(&Key::namespaced(Kind::NetworkPolicy, "shop", "knp.default.x"), copy).await;
    on(&from, &export).await.expect(0, "nodes");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("knp.default"), "controllers make this copy");

    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(CLUSTER).unwrap();
    let kubernetes = format!("kubernetes:{}", servers.kubeconfig().display());
    tortie(&kubernetes, &format!("datastore import -f {file}")).expect(0, "the datastore equals the export");
    tortie(&kubernetes, &format!("datastore compare -f {file}")).expect(0, "networkpolicies");
    let node = servers.kubectl(&["get", "node", "one", "-o", "jsonpath={.metadata.annotations}"]).unwrap();
    for expected in [
        r#""projectcalico.org/ASNumber":"64513""#,
        r#""projectcalico.org/IPv4Address":"192.0.2.1/24""#,
        r#""projectcalico.org/labels":"{\"rack\":\"7\"}""#,
    ] {
        assert!(node.contains(expected), "{expected}: {node}");
    }
    let written = tortie(&kubernetes, "get ipamblock 10.0.0.0/30 -o json");
    assert!(written.text.contains(&SEQUENCE.to_string()), "{}", written.text);
    servers.kubectl(&["annotate", "node", "one", "projectcalico.org/ASNumber-"]).unwrap();
    tortie(&kubernetes, &format!("datastore compare -f {file}")).expect(1, "Node one differs");
    std::fs::write(&file, std::fs::read_to_string(&file).unwrap().replacen("===\n", "", 1)).unwrap();
    tortie(&kubernetes, &format!("datastore import -f {file}"))
        .expect(2, "calicoctl datastore migrate export");
}

/// A user of Calico with etcd moves to the Kubernetes API, and back.
#[tokio::test(flavor = "multi_thread")]
async fn real_datastores_are_copied_there_and_back() {
    if !can_run(&[Program::Kube, Program::Etcd]) {
        return;
    }
    let from = filled().await;
    let folder = from.folder();
    let node = json!({"metadata": {"name": "one", "labels": {"a": "b"},
        "annotations": {"projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/IPv4VXLANTunnelAddr": "10.0.0.1"}}});
    from.put(&Key::global(Kind::Node, "one"), node).await;
    let gone = json!({"node": "one", "orchestrator": "k8s", "pod": "gone", "endpoint": "eth0", "ipNetworks": ["10.0.0.9/32"]});
    let gone = json!({"metadata": {"name": "one-k8s-gone-eth0", "namespace": "shop"}, "spec": gone});
    from.put(&Key::namespaced(Kind::WorkloadEndpoint, "shop", "one-k8s-gone-eth0"), gone).await;
    on(&from, &format!("datastore export --unlocked -o {folder}/1")).await.expect(0, "nodes");

    let etcd = Etcd::start().unwrap();
    let etcd_store = format!("etcd:{}", etcd.endpoints().join(","));
    tortie(&etcd_store, &format!("datastore import -f {folder}/1"))
        .expect(0, "the datastore equals the export");
    tortie(&etcd_store, &format!("datastore export -o {folder}/2")).expect(0, "blockaffinities");

    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(CLUSTER).unwrap();
    let kubernetes = format!("kubernetes:{}", servers.kubeconfig().display());
    let ran = tortie(&kubernetes, &format!("datastore import -f {folder}/2"))
        .expect(0, "the datastore equals the export");
    assert!(ran.text.contains("shop/one-k8s-gone-eth0 is left out"), "{}", ran.text);
    let annotations = |object: &[&str]| {
        let arguments = [&["get"], object, &["-o", "jsonpath={.metadata.annotations}"]].concat();
        servers.kubectl(&arguments).unwrap()
    };
    assert!(annotations(&["node", "one"]).contains(r#""projectcalico.org/IPv4VXLANTunnelAddr":"10.0.0.1""#));
    assert!(
        annotations(&["pod", "p", "-n", "shop"]).contains(r#""cni.projectcalico.org/podIP":"10.0.0.1/32""#)
    );
    let block =
        servers.kubectl(&["get", "ipamblocks", "-o", "jsonpath={.items[0].spec.sequenceNumber}"]).unwrap();
    assert_eq!(block, SEQUENCE.to_string());
    tortie(&kubernetes, &format!("datastore import -f {folder}/2"))
        .expect(0, "the datastore equals the export");

    tortie(&kubernetes, &format!("datastore export -o {folder}/3")).expect(0, "workloadendpoints");
    assert!(!std::fs::read_to_string(Path::new(&folder).join("3")).unwrap().contains("\"kind\":\"Pod\""));
    let other = Etcd::start().unwrap();
    let other_store = format!("etcd:{}", other.endpoints().join(","));
    tortie(&other_store, &format!("datastore import -f {folder}/3"))
        .expect(0, "the datastore equals the export");
    let written = tortie(&other_store, "get ipamblock 10.0.0.0/30 -o json");
    assert!(written.text.contains(&SEQUENCE.to_string()), "{}", written.text);
    for store in [&kubernetes, &other_store] {
        tortie(store, "datastore unlock").expect(0, "unlocked");
    }
}
