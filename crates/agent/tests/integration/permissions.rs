//! The permissions in `deploy/rbac.yaml`: those that an agent uses, and no others. Each one that is missing is noticed.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{FakeOs, NODE, current_report, fill, invocation, send, until};
use crate::kubernetes::{call, create_pod, create_pod_on, serving};
use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Value, json};
use tortie_agent::{BGP_KINDS, BGP_SERVICE_KINDS, Config, Platform};
use tortie_api::{Key, Kind};
use tortie_cni::Command;
use tortie_servers::permissions::{AuditLog, Permission, cluster_policies, role};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes, KubernetesConfig};
use tortie_store::{Change, Endpoints, Interest, Store};

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

/// The role without the permissions for the group that a cluster does not use.
fn granted(servers: &KubeApi, unused: CalicoGroup) -> BTreeSet<Permission> {
    let mut granted = servers.granted(&["clusterrole", "tortie-node"]).unwrap();
    granted.retain(|(group, ..)| group != unused.name());
    granted
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_uses_each_of_its_permissions_and_no_other() {
    uses_its_permissions(CalicoGroup::Crd, CalicoGroup::Native).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_native_group_an_agent_uses_each_of_its_permissions_and_no_other() {
    uses_its_permissions(CalicoGroup::Native, CalicoGroup::Crd).await;
}

/// A node's life: start, pods come and go, and the agent starts again.
async fn uses_its_permissions(group: CalicoGroup, unused: CalicoGroup) {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let audit = AuditLog::new(folder.path()).unwrap();
    let users = vec![("agent".to_owned(), Vec::new())];
    let options = KubeOptions { users, api_flags: audit.flags(), ..KubeOptions::default() };
    let servers = KubeApi::start(&options).unwrap();
    match group {
        CalicoGroup::Crd => servers.create_definitions().unwrap(),
        CalicoGroup::Native => servers.create_native_definitions().unwrap(),
    }
    let plurals = ["adminnetworkpolicies", "baselineadminnetworkpolicies", "clusternetworkpolicies"];
    let definitions = plurals.map(|plural| cluster_policies(plural, &["v1alpha1", "v1alpha2"])).concat();
    servers.apply(&definitions).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    servers.bind("agent", "tortie-node").unwrap();
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
    servers.apply(&LEFT_OVER.replace(CalicoGroup::Crd.api_version(), group.api_version())).unwrap();
    bed.call(call(&bed, Command::Add, ("c4", "p", &uid))).await.unwrap();
    bed.call(call(&bed, Command::Del, ("c4", "p", &uid))).await.unwrap();
    // The fake operating system has no tunnel.
    store
        .annotate_node(NODE, &[("projectcalico.org/IPv4VXLANTunnelAddr", Some("10.0.0.1".to_owned()))].into())
        .await
        .unwrap();
    let mut of_bgp = follow_bgp(&store).await;
    // An agent gives up an affinity when another node was faster.
    let affinity = admin.list(Kind::BlockAffinity).await.unwrap().items.remove(0).key;
    store.delete(&affinity, None).await.unwrap();
    let is_gone =
        |change: &Change| matches!(change, Change::Gone { key, .. } if key.kind == Kind::BlockAffinity);
    while !is_gone(&of_bgp.next().await.unwrap()) {}

    // A watch begins a moment after its list is complete, and only a stream that somebody reads sends requests.
    tokio::spawn(async move { while of_bgp.next().await.is_some() {} });
    let differences = audit.differences("agent", &granted(&servers, unused)).unwrap();
    assert_eq!(differences, Vec::<String>::new());
}

/// Follows what a BGP speaker follows, until it knows everything. A speaker itself would open port 179 of the machine.
async fn follow_bgp(store: &Kubernetes) -> BoxStream<'static, Change> {
    // An agent that serves Services reads their networks.
    let kinds = || BGP_KINDS.into_iter().chain(BGP_SERVICE_KINDS).chain([Kind::ServiceCidr]);
    let mut missing: BTreeSet<Kind> = kinds().collect();
    let mut changes = store.follow(kinds().map(Interest::all).collect());
    while !missing.is_empty() {
        match changes.next().await.unwrap() {
            Change::InSync(kind, _) => drop(missing.remove(&kind)),
            Change::Unavailable(kind, error) => panic!("{kind}: {error}"),
            Change::Put(_) | Change::Gone { .. } | Change::Progress(..) | Change::Restarted(_) => {}
        }
    }
    changes.boxed()
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
    let servers =
        KubeApi::start(&KubeOptions { users, definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    let admin = open(servers.kubeconfig()).await;
    fill(&admin).await;
    // A block for each node.
    let pool = json!({"metadata": {"name": "large"}, "spec": {"cidr": "10.1.0.0/16", "blockSize": 26, "vxlanMode": "Always"}});
    admin.create(&Key::global(Kind::IpPool, "large"), pool).await.unwrap();
    let all = granted(&servers, CalicoGroup::Native);
    let is_tried = |(group, resource, verb): &&Permission| {
        let exceptions = [
            // Used after a race with another node, or where Calico was interrupted.
            ("blockaffinities", "delete"),
            ("blockaffinities", "list"),
            ("ipamblocks", "delete"),
            ("ipamhandles", "update"),
            // Without it, an agent lists its report from time to time.
            ("nodereports", "watch"),
            // Used by BGP speakers only.
            ("blockaffinities", "watch"),
            ("bgpconfigurations", "list"),
            ("bgpconfigurations", "watch"),
            ("bgpfilters", "list"),
            ("bgpfilters", "watch"),
            ("bgppeers", "list"),
            ("bgppeers", "watch"),
            // Used by agents that serve Services only.
            ("servicecidrs", "list"),
            ("servicecidrs", "watch"),
        ];
        // These kinds have no definition here.
        !exceptions.contains(&(resource, verb)) && group != "policy.networking.k8s.io"
    };
    let missing: Vec<Option<&Permission>> = all.iter().filter(is_tried).map(Some).chain([None]).collect();
    let roles = missing.iter().enumerate().map(|(number, missing)| {
        role(&format!("u{number}"), all.iter().filter(|permission| Some(*permission) != *missing))
    });
    let roles: String = roles.collect();
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
