//! An agent that must not read a kind, and one whose port for probes is taken.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use crate::common::{Bed, FakeOs, cluster, condition, config, endpoint_id, fill, until};
use crate::kubernetes::{call, create_pod, serving};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tortie_agent::{AddressMethods, Extras, Platform, PolicyOnly};
use tortie_api::{Key, Kind};
use tortie_cni::{Code, Command};
use tortie_dataplane::{Reason, Report};
use tortie_servers::permissions::{Permission, role};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

/// A policy that an agent cannot read could isolate a pod. So the agent changes nothing on the node and adds no pod, and
/// says why, until it may read the kind.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_may_not_list_policies_applies_nothing() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let users = vec![("agent".to_owned(), Vec::new())];
    let servers =
        KubeApi::start(&KubeOptions { users, definitions: true, ..KubeOptions::default() }).unwrap();
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    let all = servers.granted(&["clusterrole", "tortie-node"]).unwrap();
    let grant = |is_granted: &dyn Fn(&Permission) -> bool| {
        servers.apply(&role("agent", all.iter().filter(|permission| is_granted(permission)))).unwrap();
    };
    grant(&|_| true);
    let open = async |path| Kubernetes::new(&KubernetesConfig::Kubeconfig(path)).await.unwrap();
    let admin = open(servers.kubeconfig()).await;
    fill(&admin).await;
    let store = Arc::new(open(servers.kubeconfig_of("agent")).await);
    let deny = Key::namespaced(Kind::NetworkPolicy, "n", "deny");
    let policy = json!({"metadata": {"name": "deny", "namespace": "n"}, "spec": {"selector": "all()", "types": ["Ingress"]}});
    admin.create(&deny, policy).await.unwrap();
    let bed = serving(store.clone(), FakeOs::default()).await;
    let uid = create_pod(&admin, "p", &json!({})).await;
    bed.call(call(&bed, Command::Add, ("c1", "p", &uid))).await.unwrap();
    let os = bed.os.clone();
    let before = os.lock().state.clone();
    assert!(before.endpoints.contains_key(&endpoint_id("p")));
    bed.agent.abort();
    drop(bed);

    // Another agent starts without the permission.
    let batches = os.lock().batches.len();
    grant(&|(group, resource, verb)| {
        !(group == "crd.projectcalico.org" && resource == "networkpolicies" && verb == "list")
    });
    until("the permission is gone", || async { store.list(Kind::NetworkPolicy).await.is_err() }).await;
    let bed = serving(store.clone(), os.clone()).await;
    let other = create_pod(&admin, "q", &json!({})).await;
    let failure = bed.call(call(&bed, Command::Add, ("c2", "q", &other))).await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    let status = bed.call(call(&bed, Command::Status, ("", "", ""))).await.unwrap_err();
    let reported = async || {
        let conditions = bed.report().await["conditions"].as_array().cloned().unwrap_or_default();
        let forbidden = conditions.into_iter().find(|condition| condition["reason"] == "KindForbidden");
        forbidden.map(|condition| condition["message"].as_str().unwrap_or_default().to_owned())
    };
    until("the report names the kind", || async { reported().await.is_some() }).await;
    for text in [failure.to_string(), status.to_string(), reported().await.unwrap()] {
        for part in ["NetworkPolicy", "cannot list resource \"networkpolicies\"", "ClusterRole tortie-node"] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert_eq!(os.lock().batches.len(), batches, "nothing is applied");
    assert_eq!(os.lock().state, before, "the pod that runs keeps its policy");
    // Pods may go.
    bed.call(call(&bed, Command::Del, ("c2", "q", &other))).await.unwrap();

    grant(&|_| true);
    let added = || async { bed.call(call(&bed, Command::Add, ("c3", "q", &other))).await.is_ok() };
    until("the pod is added", added).await;
    let expected: BTreeSet<_> = ["p", "q"].map(endpoint_id).into();
    let endpoints = || os.lock().state.endpoints.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(endpoints(), expected);
    assert!(os.lock().state.endpoints.values().all(|endpoint| !endpoint.program.ingress.is_empty()));
    until("the condition ends", || async { reported().await.is_none() }).await;
}

/// Only machines with interfaces can be asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_method_for_addresses_is_refused_where_it_has_no_effect() {
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os) };
    let address_methods =
        AddressMethods { ipv6: "first-found".parse().unwrap(), ..AddressMethods::default() };
    let extras = Extras { address_methods, ..Extras::default() };
    let refused = tortie_agent::run_with(config(dir.path(), store, platform), extras).await.unwrap_err();
    assert!(refused.to_string().contains("remove --ip-autodetection-method"), "{refused}");
}

/// Only agents with a dataplane of their own can take part in flannel.
#[tokio::test(flavor = "multi_thread")]
async fn flannel_is_refused_where_it_has_no_effect() {
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os) };
    let extras = Extras { flannel: true, ..Extras::default() };
    let refused = tortie_agent::run_with(config(dir.path(), store, platform), extras).await.unwrap_err();
    assert!(refused.to_string().contains("remove --flannel"), "{refused}");
}

/// Only agents with a dataplane of their own recognise the pods of other CNI plugins.
#[tokio::test(flavor = "multi_thread")]
async fn policy_only_is_refused_where_it_has_no_effect() {
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os) };
    let results = dir.path().to_owned();
    let extras =
        Extras { policy_only: Some(PolicyOnly { prefixes: Vec::new(), results }), ..Extras::default() };
    let refused = tortie_agent::run_with(config(dir.path(), store, platform), extras).await.unwrap_err();
    assert!(refused.to_string().contains("remove --policy-only"), "{refused}");
}

/// The port of the agent's probes is used by another program for a while.
#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_does_not_end_the_agent() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) };
    let extras = Extras { health_address: Some(address), ..Extras::default() };
    let config = config(dir.path(), store.clone(), platform);
    let agent = tokio::spawn(tortie_agent::run_with(config, extras));
    let bed = Bed { store, os, dir, agent };
    let reported = async || {
        let conditions = bed.report().await["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|condition| {
            let message = condition["message"].as_str().unwrap_or_default();
            condition["reason"] == "AddressTaken" && message.contains(&address.to_string())
        })
    };
    until("the report says it", || async { reported().await }).await;
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    drop(taken);
    until("the agent is ready", || async { ready(address).await }).await;
    until("the condition ends", || async { !reported().await }).await;
    assert!(!bed.agent.is_finished());
    bed.agent.abort();
}

/// A node on which policy is not in force is not ready, and says why.
#[tokio::test(flavor = "multi_thread")]
async fn readyz_tells_what_is_not_in_force() {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) };
    let extras = Extras { health_address: Some(free), ..Extras::default() };
    let agent = tokio::spawn(tortie_agent::run_with(config(dir.path(), store.clone(), platform), extras));
    let bed = Bed { store, os, dir, agent };
    until("the agent is ready", || async { ready(free).await }).await;
    let failing =
        Report { node: vec![condition(Reason::PolicyNotInForce)], retry: true, ..Report::default() };
    bed.os.lock().report = failing;
    (bed.os.lock().disturbed.as_ref().expect("the agent wants to know"))();
    until("it is not ready", || async {
        let answer = asked(free, "/readyz").await;
        answer.starts_with("HTTP/1.1 503") && answer.contains("the test says PolicyNotInForce")
    })
    .await;
    let healthy = asked(free, "/healthz").await;
    assert!(healthy.starts_with("HTTP/1.1 200"), "a restart of the agent would not help: {healthy}");
    bed.os.lock().report = Report::default();
    until("it is ready again", || async { ready(free).await }).await;
    bed.agent.abort();
}

/// Any process of the machine may connect. The kubelet would restart an agent that does not answer within a second.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_of_others_keep_no_probe_out() {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let (store, os, dir) = (cluster().await, FakeOs::default(), tempfile::tempdir().unwrap());
    let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) };
    let extras = Extras { health_address: Some(free), ..Extras::default() };
    let agent = tokio::spawn(tortie_agent::run_with(config(dir.path(), store.clone(), platform), extras));
    until("the agent is ready", || async { ready(free).await }).await;
    let flood = tokio::spawn(async move {
        let mut held = std::collections::VecDeque::new();
        loop {
            held.extend(tokio::net::TcpStream::connect(free).await.ok());
            if held.len() > 600 {
                held.pop_front();
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        }
    });
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    for number in 0..20 {
        let limit = std::time::Duration::from_secs(5);
        let answer = tokio::time::timeout(limit, asked(free, "/healthz")).await.unwrap_or_default();
        assert!(answer.starts_with("HTTP/1.1 200"), "{number}: {answer}");
    }
    flood.abort();
    agent.abort();
}

/// Whether `/readyz` succeeds.
async fn ready(address: SocketAddr) -> bool {
    asked(address, "/readyz").await.starts_with("HTTP/1.1 200")
}

/// The answer to a request; empty without one.
async fn asked(address: SocketAddr, path: &str) -> String {
    let mut answer = String::new();
    let Ok(mut stream) = tokio::net::TcpStream::connect(address).await else { return answer };
    let request = format!("GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n");
    match stream.write_all(request.as_bytes()).await {
        Ok(()) => drop(stream.read_to_string(&mut answer).await),
        Err(_) => return answer,
    }
    answer
}
