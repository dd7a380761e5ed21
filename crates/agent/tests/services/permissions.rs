//! The permissions in `deploy/rbac.yaml`: those that an agent uses, and no others. Each one that is missing is noticed.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{FakeOs, NODE, current_report, fill, invocation, send, until};
use crate::kubernetes::{call, create_pod, create_pod_on, serving};
use futures::StreamExt;
use serde_json::{Value, json};
use tortie_agent::{Config, Platform};
use tortie_api::{Key, Kind};
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
    until("the node reports", || async { bed.current_report().await["endpoints"] == 0 }).await;
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

/// How many agents run at the same time.
const AT_ONCE: usize = 6;
/// How long an agent may take for a step that is not refused.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a test waits for what must not happen.
const SHORT: Duration = Duration::from_secs(3);

/// Each user has all permissions of an agent except for one. Its agent says which one is missing, or does not serve.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_notices_each_missing_permission() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let users = (0..90).map(|number| (format!("u{number}"), Vec::new())).collect();
    let servers = KubeApi::start(&KubeOptions { users, ..KubeOptions::default() }).unwrap();
    servers.create_definitions().unwrap();
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    let admin = open(servers.kubeconfig()).await;
    fill(&admin).await;
    // A block for each node.
    let pool = json!({"metadata": {"name": "large"}, "spec": {"cidr": "10.1.0.0/16", "blockSize": 26, "vxlanMode": "Always"}});
    admin.create(&Key::global(Kind::IpPool, "large"), pool).await.unwrap();
    let all = granted(&servers, "tortie-node");
    let is_tried = |(group, resource, verb): &&Permission| {
        let exceptions = [
            // Used after a race with another node, or where Calico was interrupted.
            ("blockaffinities", "delete"),
            ("blockaffinities", "list"),
            ("ipamblocks", "delete"),
            ("ipamhandles", "update"),
            // Without it, an agent lists its report from time to time.
            ("nodereports", "watch"),
        ];
        // These kinds have no definition here.
        !exceptions.contains(&(resource, verb)) && group != "policy.networking.k8s.io"
    };
    let missing: Vec<Option<&Permission>> = all.iter().filter(is_tried).map(Some).chain([None]).collect();
    let roles: String =
        missing.iter().enumerate().map(|(number, missing)| role(number, &all, *missing)).collect();
    servers.apply(&roles).unwrap();
    let (servers, admin, missing) = (&servers, &admin, &missing);
    let outcomes = futures::stream::iter(missing.iter().enumerate()).map(|(number, missing)| async move {
        let store = Arc::new(open(servers.kubeconfig_of(&format!("u{number}"))).await);
        (missing, life(admin, store, &format!("of-{number}"), *missing).await)
    });
    let outcomes: Vec<_> = outcomes.buffer_unordered(AT_ONCE).collect().await;
    for (missing, outcome) in outcomes {
        let Some((_, resource, verb)) = missing else {
            assert_eq!(outcome, Ok(()), "with all permissions");
            continue;
        };
        let problem = outcome.expect_err(&format!("{verb} {resource} is not needed"));
        // What a report cannot say is in the agent's log.
        if resource == "nodereports" || (resource.as_str(), verb.as_str()) == ("nodes", "get") {
            continue;
        }
        let resource = resource.split('/').next().unwrap();
        let expected = format!("cannot {verb} resource \"{resource}");
        assert!(problem.contains(&expected), "{resource} {verb}: {problem}");
    }
}

/// A role with all of these permissions but one, bound to a user.
fn role(number: usize, all: &BTreeSet<Permission>, missing: Option<&Permission>) -> String {
    let rules = all.iter().filter(|permission| Some(*permission) != missing);
    let rules: Vec<Value> = rules
        .map(
            |(group, resource, verb)| json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]}),
        )
        .collect();
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: u{number}}}
rules: {}
---
{}---
",
        Value::Array(rules),
        BINDING
            .replace("of-the-test", &format!("u{number}"))
            .replace("tortie-node", &format!("u{number}"))
            .replace("name: agent", &format!("name: u{number}"))
    )
}

/// The life of a node whose agent lacks a permission; the first problem.
async fn life(
    admin: &Kubernetes,
    store: Arc<Kubernetes>,
    node: &str,
    missing: Option<&Permission>,
) -> Result<(), String> {
    admin.create(&Key::global(Kind::Node, node), json!({})).await.unwrap();
    let (dir, os) = (tempfile::tempdir().unwrap(), FakeOs::default());
    os.lock().asks_for_services = true;
    let socket = dir.path().join("agent.sock");
    let config = Config {
        node: node.to_owned(),
        store: store.clone(),
        platform: Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) },
        cni_socket: socket.clone(),
        control_socket: dir.path().join("control.sock"),
        deletion_queue: dir.path().join("queue"),
    };
    let agent = AbortOnDrop(tokio::spawn(tortie_agent::run(config)));
    let is = |verb: &str, resource: &str| missing.is_some_and(|(_, of, what)| of == resource && what == verb);
    let patience = |short: bool| if short { SHORT } else { PATIENCE };
    let serves = async || UnixStream::connect(&socket).is_ok().then_some(());
    in_time(patience(is("get", "nodes")), serves).await.ok_or("the agent does not serve")?;
    let reports = missing.is_none_or(|(_, resource, _)| resource != "nodereports");
    if missing.is_some_and(|(_, resource, verb)| {
        ["list", "watch"].contains(&verb.as_str())
            && !["ipamhandles", "ipreservations", "nodereports"].contains(&resource.as_str())
    }) {
        let condition = async || {
            let conditions = report(admin, node).await["conditions"].as_array().cloned()?;
            let forbidden = conditions.iter().find(|condition| condition["reason"] == "KindForbidden");
            forbidden.map(|condition| condition["message"].to_string())
        };
        return Err(in_time(PATIENCE, condition).await.ok_or("no condition")?.replace("\\\"", "\""));
    }
    let uid = create_pod_on(admin, node, node, &json!({})).await;
    let invocation = |command| invocation(dir.path(), command, (node, node, &uid));
    let ask = async |command| {
        let (socket, call) = (socket.clone(), invocation(command));
        tokio::task::spawn_blocking(move || send(&socket, &call))
            .await
            .unwrap()
            .map_err(|failure| failure.to_string())
    };
    ask(Command::Add).await?;
    let endpoints = async |count: u64| {
        let reported = async || (current_report(admin, node).await["endpoints"] == count).then_some(());
        in_time(patience(!reports), reported).await.ok_or("the report is not current".to_owned())
    };
    endpoints(1).await?;
    ask(Command::Del).await?;
    endpoints(0).await?;
    let annotations = [("projectcalico.org/IPv4VXLANTunnelAddr", Some("10.0.0.1".to_owned()))].into();
    store.annotate_node(node, &annotations).await.map_err(|error| error.to_string())?;
    drop(agent);
    Ok(())
}

async fn open(kubeconfig: std::path::PathBuf) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(kubeconfig)).await.unwrap()
}

async fn report(admin: &Kubernetes, node: &str) -> Value {
    let stored = admin.get(&Key::global(Kind::NodeReport, node)).await.unwrap();
    stored.map(|stored| stored.value["status"].clone()).unwrap_or_default()
}

/// The first result in this time.
async fn in_time<T>(patience: Duration, mut attempt: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        if let Some(result) = attempt().await {
            return Some(result);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    None
}

struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
