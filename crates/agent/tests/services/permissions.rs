//! The permissions in `deploy/rbac.yaml`: those that an agent uses, and no others.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{FakeOs, NODE, fill, until};
use crate::kubernetes::{call, create_pod, serving};
use serde_json::{Value, json};
use tortie_api::Kind;
use tortie_cni::Command;
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints, Store};

const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
";

const BINDING: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: of-the-test}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tortie-node}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: agent}]
";

const LEFT_OVER: &str = "apiVersion: crd.projectcalico.org/v1
kind: IPAMHandle
metadata: {name: net.c4}
spec: {handleID: net.c4, block: {10.0.1.0/26: 1}, deleted: false}
---
apiVersion: crd.projectcalico.org/v1
kind: IPAMBlock
metadata: {name: 10-0-1-0-26}
spec: {cidr: 10.0.1.0/26, strictAffinity: false, allocations: [], unallocated: [], attributes: [], deleted: true}
";

/// The definition of a kind of cluster policies, without its schema.
fn definition(plural: &str) -> String {
    let kind = plural.replace("policies", "policy");
    format!(
        "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {plural}.policy.networking.k8s.io
  annotations: {{api-approved.kubernetes.io: unapproved}}
spec:
  group: policy.networking.k8s.io
  scope: Cluster
  names: {{kind: {kind}, plural: {plural}}}
  versions:
  - {{name: v1alpha1, served: true, storage: true, schema: {{openAPIV3Schema: {{type: object}}}}}}
  - {{name: v1alpha2, served: true, storage: false, schema: {{openAPIV3Schema: {{type: object}}}}}}
---
"
    )
}

/// Group, resource with subresource, verb.
type Permission = (String, String, String);

/// The permissions that requests of the agent needed, and those that were refused.
fn requested(log: &Path) -> (BTreeSet<Permission>, BTreeSet<Permission>) {
    let (mut used, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for line in std::fs::read_to_string(log).unwrap().lines() {
        // The last line may be incomplete.
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let object = &event["objectRef"];
        if event["user"]["username"] != "agent" || object.is_null() {
            continue;
        }
        let resource = match object["subresource"].as_str() {
            Some(part) => format!("{}/{part}", text(&object["resource"])),
            None => text(&object["resource"]),
        };
        let permission = (text(&object["apiGroup"]), resource, text(&event["verb"]));
        match event["responseStatus"]["code"].as_u64() {
            Some(403) => refused.insert(permission),
            _ => used.insert(permission),
        };
    }
    (used, refused)
}

/// The permissions of a role in the file.
fn granted(servers: &KubeApi, role: &str) -> BTreeSet<Permission> {
    let role = servers.kubectl(&["get", "clusterrole", role, "-o", "json"]).unwrap();
    let role: Value = serde_json::from_str(&role).unwrap();
    let words = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap() };
    let mut granted = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                let verbs = words(&rule["verbs"]).into_iter();
                granted.extend(verbs.map(|verb| (group.clone(), resource.clone(), verb)));
            }
        }
    }
    granted
}

/// A node's life: start, pods come and go, and the agent starts again.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_uses_each_of_its_permissions_and_no_other() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (policy, log) = (folder.path().join("policy.yaml"), folder.path().join("audit.log"));
    std::fs::write(&policy, AUDIT_POLICY).unwrap();
    let servers = KubeApi::start(&KubeOptions {
        users: vec![("agent".to_owned(), Vec::new())],
        api_flags: vec![
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", log.display()),
        ],
        ..KubeOptions::default()
    })
    .unwrap();
    servers.create_definitions().unwrap();
    let plurals = ["adminnetworkpolicies", "baselineadminnetworkpolicies", "clusternetworkpolicies"];
    let definitions = plurals.map(definition).concat();
    servers.apply(&definitions).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    let manifest = include_str!("../../../../deploy/rbac.yaml");
    servers.apply(manifest).unwrap();
    servers.apply(BINDING).unwrap();
    let open = async |path| Kubernetes::new(&KubernetesConfig::Kubeconfig(path)).await.unwrap();
    let admin = open(servers.kubeconfig()).await;
    fill(&admin).await;
    let store = Arc::new(open(servers.kubeconfig_of("agent")).await);

    // A Windows node reads Services, too.
    let os = FakeOs::default();
    os.lock().asks_for_services = true;
    let bed = serving(store.clone(), os).await;
    let uid = create_pod(&admin, "p", &json!({})).await;
    for container in ["c1", "c2"] {
        bed.call(call(&bed, Command::Add, (container, "p", &uid))).await.unwrap();
        bed.call(call(&bed, Command::Del, (container, "p", &uid))).await.unwrap();
    }
    bed.call(call(&bed, Command::Add, ("c3", "p", &uid))).await.unwrap();
    bed.agent.abort();
    let bed = serving(store.clone(), FakeOs::default()).await;
    bed.call(call(&bed, Command::Del, ("c3", "p", &uid))).await.unwrap();
    until("the node reports", || async { bed.report().await["endpoints"] == 0 }).await;
    // A handle of another block, which Calico has marked as deleted.
    servers.apply(LEFT_OVER).unwrap();
    bed.call(call(&bed, Command::Add, ("c4", "p", &uid))).await.unwrap();
    bed.call(call(&bed, Command::Del, ("c4", "p", &uid))).await.unwrap();
    // The fake operating system has no tunnel.
    store
        .annotate_node(NODE, &[("projectcalico.org/IPv4VXLANTunnelAddr", Some("10.0.0.1".to_owned()))].into())
        .await
        .unwrap();
    // An agent gives up an affinity when another node was faster.
    let affinity = admin.list(Kind::BlockAffinity).await.unwrap().items.remove(0).key;
    store.delete(&affinity, None).await.unwrap();

    let granted = granted(&servers, "tortie-node");
    let difference = |one: &BTreeSet<Permission>, other: &BTreeSet<Permission>| -> BTreeSet<Permission> {
        one.difference(other).cloned().collect()
    };
    // The last requests may not be in the log yet.
    let deadline = Instant::now() + Duration::from_secs(20);
    while !difference(&granted, &requested(&log).0).is_empty() && Instant::now() < deadline {
        tokio::task::yield_now().await;
    }
    let (used, refused) = requested(&log);
    assert_eq!(refused, BTreeSet::new());
    assert_eq!(difference(&granted, &used), BTreeSet::new(), "granted and not used");
    assert_eq!(difference(&used, &granted), BTreeSet::new(), "granted by another role");
}
