//! A real Kubernetes API.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use serde_json::Value;
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions, Proxy};

const NEEDED: [Program; 1] = [Program::Kube];

const NODE: &str = "
apiVersion: v1
kind: Node
metadata: {name: primary}
status:
  allocatable: {cpu: '4', memory: 8Gi, pods: '110'}
  capacity: {cpu: '4', memory: 8Gi, pods: '110'}
  conditions: [{type: Ready, status: 'True'}]
";
const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  tolerations: [{operator: Exists}]
  containers: [{name: web, image: none}]
";

fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what}");
    }
}

#[test]
fn the_api_server_answers_each_user_and_survives_kills() {
    if !can_run(&NEEDED) {
        return;
    }
    let agents = vec!["tortie:agents".to_owned()];
    let options = KubeOptions { users: vec![("tortie:agent".to_owned(), agents)], ..KubeOptions::default() };
    let kube = KubeApi::start(&options).unwrap();
    assert_eq!(kube.kubectl(&["get", "--raw=/readyz"]).unwrap(), "ok");
    let version: Value = serde_json::from_str(&kube.kubectl(&["version", "-o", "json"]).unwrap()).unwrap();
    assert_eq!(version["serverVersion"]["gitVersion"], "v1.36.1");
    assert_eq!(version["serverVersion"]["minor"], "36");

    // RBAC allows a user what a role of its group allows, and nothing else.
    let error = kube.kubectl_as("tortie:agent", &["get", "namespaces"]).unwrap_err().to_string();
    assert!(error.contains("Forbidden") && error.contains("tortie:agent"), "{error}");
    kube.kubectl(&["create", "clusterrole", "reader", "--verb=list", "--resource=namespaces"]).unwrap();
    kube.kubectl(&[
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=reader",
        "--group=tortie:agents",
    ])
    .unwrap();
    eventually("the role is in force", || kube.kubectl_as("tortie:agent", &["get", "ns"]).is_ok());
    assert!(kube.kubectl_as("tortie:agent", &["get", "pods"]).is_err());
    let who = |user: &str| {
        kube.kubectl_as(user, &["auth", "whoami", "-o", "jsonpath={.status.userInfo.username}"]).unwrap()
    };
    assert_eq!((who("admin"), who("tortie:agent")), ("admin".to_owned(), "tortie:agent".to_owned()));

    // Without controllers, a pod needs no service account.
    kube.apply(POD).unwrap();

    // The data outlive both servers.
    kube.api().kill().unwrap();
    assert!(kube.kubectl(&["get", "ns", "--request-timeout=2s"]).is_err(), "a killed API server answers");
    kube.api().restart().unwrap();
    kube.etcd().members()[0].restart().unwrap();
    eventually("the pod is there", || kube.kubectl(&["get", "pod", "web"]).is_ok());
}

#[test]
fn clients_authenticate_by_certificates_and_through_a_proxy() {
    if !can_run(&NEEDED) {
        return;
    }
    let kube = KubeApi::start(&KubeOptions::default()).unwrap();
    let get = |identity: &tortie_servers::Identity| {
        let server = format!("--server={}", kube.url());
        let authority = format!("--certificate-authority={}", kube.authority().certificate().display());
        let certificate = format!("--client-certificate={}", identity.certificate.display());
        let key = format!("--client-key={}", identity.key.display());
        // An empty kubeconfig: no token takes part.
        let arguments = ["--kubeconfig=/dev/null", &server, &authority, &certificate, &key, "get", "ns"];
        kube.kubectl(&arguments)
    };
    let masters = ["system:masters"];
    get(&kube.authority().client("operator", &masters).unwrap()).unwrap();
    let error = get(&kube.authority().client("nobody", &[]).unwrap()).unwrap_err().to_string();
    assert!(error.contains("Forbidden") && error.contains("nobody"), "{error}");
    assert!(get(&kube.authority().expired_client("operator", &masters).unwrap()).is_err());

    let proxy = Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, kube.port()))).unwrap();
    let kubeconfig = kube.kubeconfig_at("admin", proxy.address().port()).unwrap();
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    kube.kubectl(&[&kubeconfig, "get", "ns"]).unwrap();
    assert!(proxy.accepted() > 0);
    proxy.pause();
    assert!(kube.kubectl(&[&kubeconfig, "get", "ns", "--request-timeout=1s"]).is_err());
}

/// An API server with Debian's etcd, which is older than Kubernetes expects, refuses the one and times out on the other.
#[test]
fn lists_are_streamed_and_watches_need_no_version() {
    if !can_run(&NEEDED) {
        return;
    }
    let kube = KubeApi::start(&KubeOptions::default()).unwrap();
    // The last write is to another kind.
    kube.kubectl(&["create", "configmap", "a"]).unwrap();
    let watch = |query: &str| {
        let path = format!("/api/v1/namespaces?watch=1&timeoutSeconds=2&allowWatchBookmarks=1&{query}");
        kube.kubectl(&["get", &format!("--raw={path}")]).unwrap()
    };
    assert!(watch("resourceVersion=").contains("\"name\":\"default\""));
    let streamed = watch("sendInitialEvents=true&resourceVersionMatch=NotOlderThan");
    assert!(streamed.contains("k8s.io/initial-events-end"), "{streamed}");
}

#[test]
fn a_watch_from_before_a_compaction_is_gone() {
    if !can_run(&[Program::Etcdctl, Program::Kube]) {
        return;
    }
    let kube = KubeApi::start(&KubeOptions::default()).unwrap();
    let watch = |version: &str| {
        let path = format!("/api/v1/namespaces?watch=1&timeoutSeconds=1&resourceVersion={version}");
        kube.kubectl(&["get", &format!("--raw={path}")]).unwrap_or_else(|error| error.to_string())
    };
    let list: Value =
        serde_json::from_str(&kube.kubectl(&["get", "--raw=/api/v1/namespaces"]).unwrap()).unwrap();
    let first = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    kube.kubectl(&["create", "namespace", "a"]).unwrap();
    assert!(watch(&first).contains("\"name\":\"a\""));
    // The API server keeps recent changes in memory, so it must start again as well.
    kube.etcd().compact().unwrap();
    kube.api().restart().unwrap();
    let answer = watch(&first);
    assert!(answer.contains("Expired") || answer.contains("too old resource version"), "{answer}");
}

#[test]
fn controllers_and_scheduler_work() {
    if !can_run(&NEEDED) {
        return;
    }
    let options = KubeOptions { controllers: true, scheduler: true, ..KubeOptions::default() };
    let kube = KubeApi::start(&options).unwrap();
    kube.apply(NODE).unwrap();
    kube.apply(POD).unwrap();
    eventually("the pod is bound to the node", || {
        kube.kubectl(&["get", "pod", "web", "-o", "jsonpath={.spec.nodeName}"])
            .is_ok_and(|node| node == "primary")
    });
    // The controller manager publishes the authority's certificate in each namespace, and deletes namespaces.
    kube.kubectl(&["create", "namespace", "other"]).unwrap();
    eventually("a service account", || kube.kubectl(&["get", "-n", "other", "sa", "default"]).is_ok());
    kube.kubectl(&["delete", "namespace", "other", "--timeout=60s"]).unwrap();
    for server in [kube.controllers().unwrap(), kube.scheduler().unwrap()] {
        server.restart().unwrap();
    }
}

/// An API server with definitions serves them at once, and those without them do not.
#[test]
fn definitions_are_there_from_the_start() {
    if !can_run(&NEEDED) {
        return;
    }
    let with = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let pools = with.kubectl(&["get", "ippools.crd.projectcalico.org", "-o", "name"]).unwrap();
    assert_eq!(pools, "");
    with.apply("{apiVersion: crd.projectcalico.org/v1, kind: IPPool, metadata: {name: p}, spec: {cidr: 10.0.0.0/24}}")
        .unwrap();
    let again = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let pools = again.kubectl(&["get", "ippools.crd.projectcalico.org", "-o", "name"]).unwrap();
    assert_eq!(pools, "", "each API server has its own data");
    let without = KubeApi::start(&KubeOptions::default()).unwrap();
    assert!(without.kubectl(&["get", "ippools.crd.projectcalico.org"]).is_err());
}
