//! `deploy/node-restriction.yaml` on a real API server: what the token of one node's agent may write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::Kind;
use tortie_cni::Command;
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Error, KubeApi, KubeOptions};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints as _, Store as _};

use crate::common::{FakeOs, NODE, TIMEOUT, fill, until};
use crate::kubernetes::{call, create_pod, serving};

const RESTRICTION: &str = include_str!("../../../../deploy/node-restriction.yaml");
const AGENT: &str = "system:serviceaccount:tortie-system:tortie-node";

/// kubectl reads what it patches, and agents need not.
const READING: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reading}
rules: [{apiGroups: [''], resources: [nodes/status, pods/status], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reading}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reading}
subjects: [{kind: ServiceAccount, name: tortie-node, namespace: tortie-system}]
";

/// An API server with two nodes, a pod on each, and the data of both.
fn cluster(group: CalicoGroup) -> Option<KubeApi> {
    if !can_run(&[Program::Kube]) {
        return None;
    }
    let servers = KubeApi::start(&KubeOptions::default()).unwrap();
    match group {
        CalicoGroup::Crd => servers.create_definitions().unwrap(),
        CalicoGroup::Native => servers.create_native_definitions().unwrap(),
    }
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    servers.apply(RESTRICTION).unwrap();
    servers.apply(READING).unwrap();
    for node in ["own", "other"] {
        let objects = [
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}),
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": node, "namespace": "default"},
                "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
            }),
            json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node}}),
            affinity(group, node, "10.0.0.0/26", "confirmed"),
            affinity(group, node, "10.0.1.0/26", "pendingDeletion"),
        ];
        servers.apply(&list(&objects)).unwrap();
    }
    let blocks = [
        ("10.0.0.0/30", Some("own"), &["own", "other"][..]),
        ("10.0.0.4/30", Some("other"), &["other", "own"]),
        ("10.0.0.8/30", None, &["other"]),
        ("10.0.0.12/30", Some("own"), &["own"]),
        ("10.0.0.16/30", Some("other"), &["RESTING", "WINDOWS"]),
        ("10.0.0.20/30", None, &[]),
    ];
    let blocks = blocks.map(|(network, owner, pods)| block(group, network, owner, pods));
    servers.apply(&list(&blocks)).unwrap();
    // The API server reads a new policy after a moment.
    let deadline = Instant::now() + TIMEOUT;
    while ask(
        &servers,
        &[
            "patch",
            "node",
            "other",
            "--subresource=status",
            "--type=merge",
            "-p",
            r#"{"metadata":{"annotations":{"x":"y"}}}"#,
        ],
    )
    .is_ok()
    {
        assert!(Instant::now() < deadline, "the policy is not in force");
        std::thread::sleep(Duration::from_millis(100));
    }
    Some(servers)
}

/// One manifest.
fn list(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}

fn named(text: &str) -> String {
    text.replace(['.', '/', ':'], "-")
}

fn affinity(group: CalicoGroup, node: &str, cidr: &str, state: &str) -> Value {
    let name = format!("{node}-{}", named(cidr));
    let deleted = if group == CalicoGroup::Crd { json!("false") } else { json!(false) };
    json!({
        "apiVersion": group.api_version(), "kind": "BlockAffinity", "metadata": {"name": name},
        "spec": {"node": node, "cidr": cidr, "state": state, "deleted": deleted, "type": "host"},
    })
}

/// A block whose first addresses belong to pods of these nodes.
fn block(group: CalicoGroup, cidr: &str, owner: Option<&str>, pods: &[&str]) -> Value {
    let attributes: Vec<Value> = pods
        .iter()
        .map(|node| match *node {
            "RESTING" => json!({"handle_id": "h-r", "secondary": {"node": "other"}, "releasedAt": "2026-01-01T00:00:00Z"}),
            "WINDOWS" => json!({"handle_id": "Windows-Reserved-IPAM-Handle"}),
            node => json!({
                "handle_id": format!("h-{node}"), "secondary": {"namespace": "default", "pod": node, "node": node},
            }),
        })
        .collect();
    let net: ipnet::IpNet = cidr.parse().unwrap();
    let size = 1 << (net.max_prefix_len() - net.prefix_len());
    let allocations: Vec<Value> =
        (0..size).map(|index| if index < pods.len() { json!(index) } else { Value::Null }).collect();
    let unallocated: Vec<usize> = (pods.len()..size).collect();
    let mut spec = json!({
        "cidr": cidr, "allocations": allocations, "attributes": attributes, "unallocated": unallocated,
        "strictAffinity": false, "deleted": false,
    });
    if let Some(owner) = owner {
        spec["affinity"] = json!(format!("host:{owner}"));
    }
    json!({"apiVersion": group.api_version(), "kind": "IPAMBlock", "metadata": {"name": named(cidr)}, "spec": spec})
}

fn renamed(mut object: Value, name: &str) -> Value {
    object["metadata"]["name"] = json!(name);
    object
}

/// Asks as the agent of node `own`.
fn ask(servers: &KubeApi, arguments: &[&str]) -> Result<String, Error> {
    let mut all = arguments.to_vec();
    all.extend(["--as", AGENT, "--as-user-extra", "authentication.kubernetes.io/node-name=own"]);
    servers.kubectl(&all)
}

/// Replaces an object, or creates it.
fn write(servers: &KubeApi, verb: &str, object: &Value) -> Result<String, Error> {
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), object.to_string()).unwrap();
    ask(servers, &[verb, "-f", file.path().to_str().unwrap()])
}

/// The result must be as expected. A refusal comes from the policy.
fn expect(what: &str, result: Result<String, Error>, allowed: bool) {
    match result {
        Ok(_) => assert!(allowed, "{what} is allowed"),
        Err(error) => {
            let text = error.to_string();
            assert!(!allowed && text.contains("ValidatingAdmissionPolicy 'tortie-node'"), "{what}: {text}");
            assert!(text.contains("denied request: ") && !text.contains("expression"), "{what}: {text}");
        }
    }
}

#[test]
fn an_agent_changes_its_own_node_and_pods_only() {
    let Some(servers) = cluster(CalicoGroup::Crd) else { return };
    let patch = |kind: &str, name: &str, patch: &Value| {
        let patch = patch.to_string();
        ask(
            &servers,
            &["patch", kind, name, "-n", "default", "--subresource=status", "--type=merge", "-p", &patch],
        )
    };
    for (node, is_own) in [("own", true), ("other", false)] {
        for kind in ["node", "pod"] {
            let what = |field: &str| format!("{field} of the {kind} of {node}");
            let annotation = json!({"metadata": {"annotations": {"a": "b"}}});
            expect(&what("an annotation"), patch(kind, node, &annotation), is_own);
            let finalizer = json!({"metadata": {"finalizers": ["example.org/stay"]}});
            expect(&what("a finalizer"), patch(kind, node, &finalizer), false);
            let label = json!({"metadata": {"labels": {"app": "trusted"}}});
            expect(&what("a label"), patch(kind, node, &label), false);
            let labels =
                json!({"metadata": {"annotations": {"projectcalico.org/labels": "{\"app\":\"trusted\"}"}}});
            // Those of pods have no meaning.
            expect(&what("labels in an annotation"), patch(kind, node, &labels), is_own && kind == "pod");
            let status = match kind {
                "node" => json!({"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}}),
                _ => json!({"status": {"podIPs": [{"ip": "192.0.2.1"}], "podIP": "192.0.2.1"}}),
            };
            expect(&what("the status"), patch(kind, node, &status), false);
        }
        let report = json!({
            "apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node},
            "status": {"endpoints": 1},
        });
        expect(&format!("the report of {node}"), write(&servers, "replace", &report), is_own);
        servers.kubectl(&["delete", "nodereport", node]).unwrap();
        expect(&format!("a new report of {node}"), write(&servers, "create", &report), is_own);
    }
}

#[test]
fn an_agent_changes_the_addresses_of_its_own_pods_only() {
    changes_its_own_addresses(CalicoGroup::Crd);
}

#[test]
fn an_agent_changes_the_addresses_of_its_own_pods_only_in_the_native_group() {
    changes_its_own_addresses(CalicoGroup::Native);
}

fn changes_its_own_addresses(group: CalicoGroup) {
    let Some(servers) = cluster(group) else { return };
    let block = |cidr: &str, owner: Option<&str>, pods: &[&str]| block(group, cidr, owner, pods);
    let affinity = |node: &str, cidr: &str, state: &str| affinity(group, node, cidr, state);
    for (what, object, allowed) in [
        ("its own pod in its own block", block("10.0.0.12/30", Some("own"), &["own", "own"]), true),
        ("the release of its own pod", block("10.0.0.12/30", Some("own"), &[]), true),
        ("another node's pod in its own block", block("10.0.0.12/30", Some("own"), &["other"]), false),
        ("a borrowed address", block("10.0.0.4/30", Some("other"), &["other", "own", "own"]), true),
        ("the return of a borrowed address", block("10.0.0.4/30", Some("other"), &["other"]), true),
        ("the release of another node's pod", block("10.0.0.4/30", Some("other"), &["own"]), false),
        ("the release of a lender's pod", block("10.0.0.0/30", Some("own"), &["own"]), false),
        ("another node's block", block("10.0.0.4/30", Some("own"), &["other", "own"]), false),
        ("another node's block without its owner", block("10.0.0.4/30", None, &["other", "own"]), false),
        ("its own block for another node", block("10.0.0.0/30", Some("other"), &["own", "other"]), false),
        ("its own block without owner", block("10.0.0.0/30", None, &["own", "other"]), true),
        ("a block without owner", block("10.0.0.8/30", Some("own"), &["other"]), true),
        ("the end of another node's rest", block("10.0.0.16/30", Some("other"), &["WINDOWS"]), true),
        ("the mark of another's affinity", affinity("other", "10.0.0.0/26", "pendingDeletion"), true),
        ("the return of another's affinity", affinity("other", "10.0.0.0/26", "confirmed"), true),
        ("another's affinity as pending", affinity("other", "10.0.0.0/26", "pending"), false),
        ("its own affinity as pending", affinity("own", "10.0.0.0/26", "pending"), true),
    ] {
        expect(what, write(&servers, "replace", &object), allowed);
    }
    // The owners stay in the list of attributes.
    let two = block("10.0.0.4/30", Some("other"), &["other"]);
    let with = |path: &str, value: Value| {
        let mut changed = two.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed
    };
    for (what, object) in [
        ("another's address without its owner", with("/spec/allocations/0", Value::Null)),
        ("another's address twice", with("/spec/allocations/1", json!(0))),
        ("an owner that does not exist", with("/spec/allocations/1", json!(7))),
        ("fewer addresses", with("/spec/allocations", json!([0]))),
        ("another pod with the same handle", with("/spec/attributes/0/secondary/pod", json!("thief"))),
        ("another's block that is marked as deleted", with("/spec/deleted", json!(true))),
    ] {
        expect(what, write(&servers, "replace", &object), false);
    }
    let mut marked = affinity("other", "10.0.0.0/26", "pendingDeletion");
    marked["spec"]["type"] = json!("virtual");
    expect("another's affinity of another type", write(&servers, "replace", &marked), false);
    let mut other = affinity("other", "10.0.0.0/26", "confirmed");
    other["spec"]["node"] = json!("own");
    expect("the name of another's affinity for itself", write(&servers, "replace", &other), false);
    for (what, object, allowed) in [
        ("a block of its own", block("10.0.9.0/30", Some("own"), &[]), true),
        ("a block of its own with a pod of another", block("10.0.9.4/30", Some("own"), &["other"]), false),
        ("a block of another", block("10.0.9.8/30", Some("other"), &[]), false),
        ("another's block by another name", renamed(block("10.0.0.4/30", Some("own"), &[]), "evil"), false),
        (
            "the name of another's affinity",
            renamed(affinity("own", "10.0.9.64/26", "pending"), "other-10-0-9-64-26"),
            false,
        ),
        ("a block of IPv6", block("fd00:10:244::40/122", Some("own"), &["own"]), true),
        ("a block of a whole pool", block("10.3.0.0/16", Some("own"), &[]), false),
        ("a block of IPv6 that is too large", block("fd00:10:245::/115", Some("own"), &[]), false),
        ("a full block of 256 addresses", block("10.1.0.0/24", Some("own"), &["own"; 256]), true),
        (
            "a large block with a pod of another",
            block("10.2.0.0/20", Some("own"), &[&["own"; 4_000][..], &["other"]].concat()),
            false,
        ),
        ("an affinity of its own", affinity("own", "10.0.9.0/26", "pending"), true),
        ("an affinity of another", affinity("other", "10.0.9.0/26", "pending"), false),
    ] {
        expect(what, write(&servers, "create", &object), allowed);
    }
    for (kind, name, allowed) in [
        ("blockaffinity", "other-10-0-0-0-26", false),
        ("blockaffinity", "other-10-0-1-0-26", true),
        ("blockaffinity", "own-10-0-0-0-26", true),
        ("ipamblock", "10-0-0-4-30", false),
        ("ipamblock", "10-0-0-8-30", false),
        ("ipamblock", "10-0-0-16-30", true),
        ("ipamblock", "10-0-0-20-30", true),
        ("ipamblock", "10-0-0-12-30", true),
    ] {
        let kind = format!("{kind}.{}", group.name());
        expect(&format!("the deletion of {name}"), ask(&servers, &["delete", &kind, name]), allowed);
    }
}

/// The token of its pod is enough for a node's whole work, also to take an empty block from another node.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_the_token_of_its_pod_does_its_work_and_no_more() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    servers.apply(RESTRICTION).unwrap();
    let open = async |path| Kubernetes::new(&KubernetesConfig::Kubeconfig(path)).await.unwrap();
    let admin = open(servers.kubeconfig()).await;
    fill(&admin).await;
    let objects = [
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent", "namespace": "tortie-system"},
            "spec": {
                "nodeName": NODE, "serviceAccountName": "tortie-node", "containers": [{"name": "c", "image": "i"}],
            },
        }),
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}),
    ];
    servers.apply(&list(&objects)).unwrap();
    // Another node has all blocks of the pool.
    let cidrs = ["10.0.0.0/26", "10.0.0.64/26", "10.0.0.128/26", "10.0.0.192/26"];
    let of_other = cidrs.map(|cidr| {
        [
            affinity(CalicoGroup::Crd, "other", cidr, "confirmed"),
            block(CalicoGroup::Crd, cidr, Some("other"), &[]),
        ]
    });
    servers.apply(&list(of_other.as_flattened())).unwrap();

    let token = servers.kubectl(&[
        "create",
        "token",
        "tortie-node",
        "-n",
        "tortie-system",
        "--bound-object-kind=Pod",
        "--bound-object-name=agent",
    ]);
    let token = token.unwrap();
    let config = std::fs::read_to_string(servers.kubeconfig()).unwrap();
    let (before, _) = config.split_once("    token: ").unwrap();
    let (_, after) = config.split_once("contexts:").unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{before}    token: {}\ncontexts:{after}", token.trim())).unwrap();
    let store = Arc::new(open(file.path().to_owned()).await);
    let annotation = BTreeMap::from([("projectcalico.org/IPv4VXLANTunnelAddr", Some("10.0.0.1".to_owned()))]);
    until("the policy is in force", async || store.annotate_node("other", &annotation).await.is_err()).await;
    let refused = store.annotate_node("other", &annotation).await.unwrap_err().to_string();
    let expected = format!("the agent of node {NODE} may change its own Node only");
    assert!(refused.contains(&expected), "{refused}");
    store.annotate_node(NODE, &annotation).await.unwrap();

    let bed = serving(store.clone(), FakeOs::default()).await;
    let uid = create_pod(&admin, "p", &json!({})).await;
    for container in ["c1", "c2"] {
        bed.call(call(&bed, Command::Add, (container, "p", &uid))).await.unwrap().unwrap();
        bed.call(call(&bed, Command::Check, (container, "p", &uid))).await.unwrap();
        bed.call(call(&bed, Command::Del, (container, "p", &uid))).await.unwrap();
    }
    let owners = admin.list(Kind::IpamBlock).await.unwrap().items;
    let owners: Vec<&Value> = owners.iter().map(|stored| &stored.value["affinity"]).collect();
    assert_eq!(
        owners.iter().filter(|owner| ***owner == json!(format!("host:{NODE}"))).count(),
        1,
        "{owners:?}"
    );
    until("the node reports", || async { bed.current_report().await["endpoints"] == 0 }).await;
}
