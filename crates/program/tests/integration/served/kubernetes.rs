//! Commands against a real Kubernetes API server, with the permissions of an operator in `deploy/rbac.yaml`.

use std::process::{Command, Output};

use serde_json::Value;
use tortie_api::Kind;
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};

use crate::served::support::text_of;

fn tortie(servers: &KubeApi, arguments: &[&str]) -> Output {
    let store = format!("kubernetes:{}", servers.kubeconfig_of("operator").display());
    Command::new(env!("CARGO_BIN_EXE_tortie")).args(arguments).args(["--store", &store]).output().unwrap()
}

/// The output of a command that succeeds.
fn done(servers: &KubeApi, arguments: &[&str]) -> String {
    let output = tortie(servers, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text_of(&output));
    String::from_utf8(output.stdout).unwrap()
}

const BINDING: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: of-the-test}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tortie-operator}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: operator}]
";

const CLUSTER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: demo}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: demo, labels: {app: client}}
spec: {nodeName: one, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: demo, labels: {app: server}}
spec: {nodeName: one, containers: [{name: c, image: i, ports: [{containerPort: 80, name: http}]}]}
";

const POLICY: &str = "
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: allow-client, namespace: demo}
spec:
  selector: app == 'server'
  types: [Ingress]
  ingress:
  - {action: Allow, protocol: TCP, source: {selector: app == 'client'}, destination: {ports: [http]}}
";

#[test]
fn commands_work_on_a_kubernetes_api() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let users = vec![("operator".to_owned(), Vec::new())];
    let servers = KubeApi::start(&KubeOptions { users, ..KubeOptions::default() }).unwrap();
    servers.apply(include_str!("../../../../../deploy/rbac.yaml")).unwrap();
    servers.apply(BINDING).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (cluster, policy) = (file("cluster.yml", CLUSTER), file("policy.yml", POLICY));
    servers.kubectl(&["create", "-f", &cluster]).unwrap();

    let absent = tortie(&servers, &["apply", "-f", &policy]);
    assert!(!absent.status.success());
    assert!(text_of(&absent).contains("the store does not have networkpolicies"), "{}", text_of(&absent));
    servers.create_definitions().unwrap();
    assert!(done(&servers, &["apply", "-f", &policy]).contains("allow-client created"));
    assert!(done(&servers, &["apply", "-f", &policy]).contains("allow-client unchanged"));
    assert!(done(&servers, &["get", "networkpolicies"]).contains("allow-client"));
    let seen = servers.kubectl(&["get", "networkpolicies.crd.projectcalico.org", "-n", "demo"]).unwrap();
    assert!(seen.contains("allow-client"), "{seen}");

    let policy_is = |expected: &str| {
        let template = "jsonpath={.metadata.labels.team} {.spec.order} {.spec.ingress[0].action}";
        assert_eq!(
            done(&servers, &["get", "networkpolicy/allow-client", "-n", "demo", "-o", template]),
            expected
        );
    };
    policy_is("  Allow");
    let object = ["networkpolicy/allow-client", "-n", "demo"];
    for (verb, change) in [("label", &["team=a"][..]), ("patch", &["-p", "{spec: {order: 7}}"])] {
        let printed = done(&servers, &[&[verb], &object[..], change].concat());
        assert_eq!(printed, "NetworkPolicy demo/allow-client changed\n");
    }
    policy_is("a 7 Allow");
    assert!(done(&servers, &["replace", "-f", &policy]).contains("allow-client replaced"));
    policy_is("  Allow");
    // What others have set survives `apply`, and a manifest from before their change is a conflict.
    assert!(done(&servers, &["apply", "-f", &policy]).contains("allow-client unchanged"));
    let read = file("read.yml", &done(&servers, &["get", object[0], "-n", "demo", "-o", "yaml"]));
    for change in [&["label", "team=a"][..], &["patch", "-p", "{spec: {order: 7}}"]] {
        done(&servers, &[&change[..1], &object[..], &change[1..]].concat());
    }
    assert!(done(&servers, &["apply", "-f", &policy]).contains("allow-client unchanged"));
    policy_is("a 7 Allow");
    for verb in ["apply", "replace"] {
        let conflict = text_of(&tortie(&servers, &[verb, "-f", &read]));
        assert!(conflict.contains("conflict: metadata.resourceVersion is"), "{verb}: {conflict}");
    }
    done(&servers, &["replace", "-f", &policy]);
    let admin = format!("kubernetes:{}", servers.kubeconfig().display());
    let as_admin = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        text_of(&command.args(arguments).args(["--store", &admin]).output().unwrap())
    };
    // A script for calicoctl, which refuses this, must not remove a machine.
    servers.apply("apiVersion: v1\nkind: Node\nmetadata: {name: one}\n").unwrap();
    let refused = as_admin(&["delete", "node", "one"]);
    assert!(refused.contains("run kubectl delete node one. Nothing was changed"), "{refused}");
    assert!(servers.kubectl(&["get", "node", "one"]).is_ok());
    let read = file("namespace.yml", &as_admin(&["get", "namespace", "demo", "-o", "yaml"]));
    assert!(as_admin(&["apply", "-f", &read]).contains("Namespace demo"));
    assert_eq!(as_admin(&["label", "namespace/demo", "team=a"]), "Namespace demo changed\n");
    for verb in ["apply", "replace"] {
        let conflict = as_admin(&[verb, "-f", &read]);
        assert!(conflict.contains("conflict: metadata.resourceVersion is"), "{verb}: {conflict}");
    }
    let read = file("namespace.yml", &as_admin(&["get", "namespace", "demo", "-o", "yaml", "--export"]));
    for verb in ["apply", "replace"] {
        let done = as_admin(&[verb, "-f", &read]);
        assert!(done.contains("Namespace demo ") && !done.contains("error"), "{verb}: {done}");
    }
    let label = |word: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        command.args(["label", "pod/client", word, "-n", "demo", "--overwrite", "--store", &admin]);
        text_of(&command.output().unwrap())
    };
    assert_eq!(label("app=other"), "Pod demo/client changed\n");
    let labels = ["get", "pod", "client", "-n", "demo", "-o", "jsonpath={.metadata.labels}"];
    assert_eq!(servers.kubectl(&labels).unwrap(), r#"{"app":"other"}"#);
    assert_eq!(label("app=client"), "Pod demo/client changed\n");

    deleted_pools_are_left_to_the_controllers(&servers, &file);
    for kind in Kind::all() {
        let output = tortie(&servers, &["get", kind.plural()]);
        assert!(output.status.success(), "{}: {}", kind.plural(), text_of(&output));
    }
    let forbidden = tortie(&servers, &["delete", "-f", &cluster]);
    assert!(
        !forbidden.status.success() && text_of(&forbidden).contains("cannot delete"),
        "{}",
        text_of(&forbidden)
    );

    for (pod, address) in [("client", "10.0.0.1"), ("server", "10.0.0.2")] {
        let patch = format!(r#"{{"status":{{"podIPs":[{{"ip":"{address}"}}]}}}}"#);
        servers
            .kubectl(&[
                "patch",
                "pod",
                pod,
                "-n",
                "demo",
                "--subresource=status",
                "--type=merge",
                "-p",
                &patch,
            ])
            .unwrap();
    }
    let endpoints = done(&servers, &["get", "workloadendpoints", "-o", "json"]);
    let endpoints: Value = serde_json::from_str(&endpoints).unwrap();
    assert_eq!(endpoints["items"][1]["spec"]["pod"], "server");
    let explain = |from: &str, port: &str| {
        let output = tortie(&servers, &["explain", from, "demo/server", "--port", port]);
        (output.status.code(), text_of(&output))
    };
    let (allowed, text) = explain("demo/client", "80");
    assert!(allowed == Some(0) && text.contains("allow-client"), "{text}");
    let (denied, text) = explain("demo/client", "81");
    assert!(denied == Some(1), "{text}");

    let refused = tortie(&servers, &["delete", "workloadendpoint", "-n", "demo", "one-k8s-server-eth0"]);
    assert!(
        !refused.status.success() && text_of(&refused).contains("is written by"),
        "{}",
        text_of(&refused)
    );
    assert!(done(&servers, &["delete", "-f", &policy]).contains("allow-client deleted"));
    assert_eq!(explain("demo/client", "81").0, Some(0));
}

/// The finalizer of the controllers decides when they go.
fn deleted_pools_are_left_to_the_controllers(servers: &KubeApi, file: &dyn Fn(&str, &str) -> String) {
    let pool = |name: &str, net: u8| {
        format!(
            "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {{name: {name}, labels: {{app: pools}}, finalizers: \
             [projectcalico.org/ippool-finalizer]}}\nspec: {{cidr: 10.{net}.0.0/16, vxlanMode: Always}}\n"
        )
    };
    servers.apply(&[pool("left", 1), pool("deleted", 2), pool("pruned", 3)].join("---\n")).unwrap();
    let left = file("left.yml", &done(servers, &["get", "ippool", "left", "-o", "yaml", "--export"]));
    let ending = "is being deleted, and gives no more addresses: `tortie controllers` remove it";
    for (name, arguments) in [
        ("deleted", &["delete", "ippool", "deleted"][..]),
        ("pruned", &["apply", "-f", &left, "--prune", "-l", "app=pools"]),
    ] {
        let printed = done(servers, arguments);
        assert!(printed.contains(&format!("IPPool {name} {ending}")), "{printed}");
        let path = "jsonpath={.metadata.deletionTimestamp}";
        let object = format!("ippools.crd.projectcalico.org/{name}");
        assert!(!servers.kubectl(&["get", &object, "-o", path]).unwrap().is_empty(), "{name} is not deleted");
    }
    for name in ["left", "deleted", "pruned"] {
        let object = format!("ippools.crd.projectcalico.org/{name}");
        let patch = r#"{"metadata":{"finalizers":null}}"#;
        servers.kubectl(&["patch", &object, "--type=merge", "-p", patch]).unwrap();
    }
    done(servers, &["delete", "ippool", "left"]);
}
