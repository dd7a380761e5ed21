//! `tortie apply`, `get` and `delete` with a separate datastore.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tortie_api::{Key, Kind};
use tortie_servers::programs::{KUBE, Program, can_run};
use tortie_store::rpc::serve_unix;
use tortie_store::{Embedded, Store};

/// A datastore on a socket, and the command that uses it.
struct Datastore {
    runtime: Runtime,
    store: Arc<Embedded>,
    dir: TempDir,
}

/// The output of the command.
struct Output {
    ok: bool,
    code: i32,
    out: String,
    err: String,
}

impl Datastore {
    fn new() -> Self {
        let runtime = Runtime::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (store, socket) = (Arc::new(Embedded::in_memory().unwrap()), dir.path().join("socket"));
        runtime.spawn({
            let (store, socket) = (store.clone(), socket.clone());
            async move { serve_unix(store, &socket).await }
        });
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < deadline, "the datastore does not answer");
            std::thread::yield_now();
        }
        Self { runtime, store, dir }
    }

    fn run(&self, arguments: &[&str], input: &str) -> Output {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tortie"))
            .args(arguments)
            .env("TORTIE_STORE", format!("unix:{}", self.dir.path().join("socket").display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Output {
            ok: output.status.success(),
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    fn apply(&self, manifest: &str) -> Output {
        self.run(&["apply", "-f", "-"], manifest)
    }

    fn names(&self, kind: Kind) -> Vec<String> {
        let listed = self.runtime.block_on(self.store.list(kind)).unwrap().items;
        listed.into_iter().map(|stored| stored.key.name).collect()
    }
}

fn object(kind: &str, name: &str, spec: &str) -> String {
    format!("---\napiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

#[test]
fn a_policy_needs_its_tier_and_a_tier_outlives_its_policies() {
    let datastore = Datastore::new();
    let policy = object("GlobalNetworkPolicy", "ops.p", "{tier: ops, selector: all()}");
    let refused = datastore.apply(&policy);
    assert!(!refused.ok && refused.err.contains("spec.tier: tier ops does not exist"), "{}", refused.err);
    assert!(datastore.names(Kind::GlobalNetworkPolicy).is_empty());

    let both = datastore.apply(&(policy + &object("Tier", "ops", "{order: 5}")));
    assert!(both.ok, "{}", both.err);
    let refused = datastore.run(&["delete", "tier", "ops"], "");
    assert!(!refused.ok && refused.err.contains("still has GlobalNetworkPolicy ops.p"), "{}", refused.err);
    assert_eq!(datastore.names(Kind::Tier), ["ops"]);
    assert!(datastore.run(&["delete", "gnp", "ops.p"], "").ok);
    assert!(datastore.run(&["delete", "tier", "ops"], "").ok);
    assert!(datastore.names(Kind::Tier).is_empty());
}

#[test]
fn objects_that_the_cluster_writes_cannot_be_applied() {
    let datastore = Datastore::new();
    let endpoint =
        object("WorkloadEndpoint", "n-k8s-p-eth0", "{node: 'n'}").replace("name:", "namespace: d, name:");
    let refused = datastore.apply(&(endpoint + &object("Tier", "ops", "{}")));
    assert!(!refused.ok && refused.err.contains("is written by the node's agent"), "{}", refused.err);
    assert!(datastore.names(Kind::Tier).is_empty(), "nothing of a refused manifest is applied");
    for kind in ["wep", "block", "affinity", "handle", "report"] {
        let refused = datastore.run(&["delete", kind, "x"], "");
        assert!(!refused.ok && refused.err.contains("is written by"), "{kind}: {}", refused.err);
    }
}

#[test]
fn a_list_is_applied_and_missing_objects_are_named() {
    let datastore = Datastore::new();
    let list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: a}}\n- {apiVersion: v1, kind: Namespace, metadata: {name: b}}\n";
    assert!(datastore.apply(list).ok);
    assert_eq!(datastore.names(Kind::Namespace), ["a", "b"]);
    let listed = datastore.run(&["get", "ns", "-o", "json"], "");
    assert!(datastore.run(&["apply", "-f", "-"], &listed.out).out.contains("Namespace b unchanged"));
    for command in ["get", "delete"] {
        let missing = datastore.run(&[command, "networkpolicy", "x"], "");
        assert!(!missing.ok && missing.err.contains("a Kubernetes policy is a knp"), "{}", missing.err);
    }
}

/// The policies of a namespace are deleted after its endpoints, not before.
#[test]
fn deleting_a_namespace_keeps_its_policies_until_pods_are_gone() {
    let datastore = Datastore::new();
    let policy = object("NetworkPolicy", "p", "{types: [Ingress]}").replace("name:", "namespace: d, name:");
    let namespace = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: d}\n";
    assert!(datastore.apply(&(policy + namespace)).ok);
    let endpoint = Key::namespaced(Kind::WorkloadEndpoint, "d", "n-k8s-p-eth0");
    let create = datastore.store.create(&endpoint, json!({"metadata": {"name": "x"}, "spec": {}}));
    datastore.runtime.block_on(create).unwrap();
    let pod = Key::namespaced(Kind::Pod, "d", "p");
    datastore.runtime.block_on(datastore.store.create(&pod, json!({"metadata": {"name": "p"}}))).unwrap();

    std::thread::scope(|scope| {
        let deletion = scope.spawn(|| datastore.run(&["delete", "ns", "d"], ""));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !datastore.names(Kind::Pod).is_empty() {
            assert!(Instant::now() < deadline, "the pod is not deleted");
            std::thread::yield_now();
        }
        // What the node does after the pod is deleted.
        assert_eq!(datastore.names(Kind::NetworkPolicy), ["p"]);
        datastore.runtime.block_on(datastore.store.delete(&endpoint, None)).unwrap();
        let printed = deletion.join().unwrap();
        assert!(printed.ok, "{}", printed.err);
    });
    assert!(datastore.names(Kind::NetworkPolicy).is_empty() && datastore.names(Kind::Namespace).is_empty());
}

/// The verdict includes what a node reports about a pod or policy (policy decision 29).
#[test]
fn explain_shows_what_nodes_report() {
    let datastore = Datastore::new();
    let pod = |name: &str, address: &str| {
        let value = json!({
            "metadata": {"name": name, "namespace": "d"}, "spec": {"containers": [], "nodeName": "n"}, "status": {"podIP": address},
        });
        (Key::namespaced(Kind::Pod, "d", name), value)
    };
    let condition = |pod: &str| json!({"object": {"kind": "Pod", "namespace": "d", "name": pod}, "reason": "RuleNotExpressible", "message": "it is narrowed"});
    let report = json!({
        "apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "n"},
        "status": {"os": "windows", "endpoints": 2, "conditions": [condition("b"), condition("other")]},
    });
    let namespace = (Key::global(Kind::Namespace, "d"), json!({"metadata": {"name": "d"}}));
    let report = (Key::global(Kind::NodeReport, "n"), report);
    for (key, value) in [pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), namespace, report] {
        datastore.runtime.block_on(datastore.store.create(&key, value)).unwrap();
    }
    let printed = datastore.run(&["explain", "d/a", "d/b"], "");
    assert!(printed.ok, "{}{}", printed.out, printed.err);
    assert!(
        printed.out.contains("node n reports: Pod d/b: RuleNotExpressible: it is narrowed"),
        "{}",
        printed.out
    );
    assert!(!printed.out.contains("d/other"), "{}", printed.out);
}

/// Whatever the order of the manifests, objects are applied after those that they name, and policies before pods.
#[test]
fn objects_are_applied_in_dependency_order() {
    let datastore = Datastore::new();
    let manifests = "\
{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: 'n'}, spec: {containers: [{name: c}]}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: s, namespace: 'n'}, addressType: IPv4}
---
{apiVersion: v1, kind: Service, metadata: {name: s, namespace: 'n'}, spec: {ports: [{port: 80}]}}
---
{apiVersion: projectcalico.org/v3, kind: HostEndpoint, metadata: {name: h}, spec: {node: a, interfaceName: eth0}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: k, namespace: 'n'}, spec: {podSelector: {}}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: ops.g}, spec: {tier: ops}}
---
{apiVersion: projectcalico.org/v3, kind: Profile, metadata: {name: f}, spec: {}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkSet, metadata: {name: t}, spec: {nets: []}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: a, namespace: 'n'}}
---
{apiVersion: projectcalico.org/v3, kind: Tier, metadata: {name: ops}, spec: {}}
---
{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {name: i}, spec: {cidr: 10.0.0.0/16}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: 'n'}}
";
    let output = datastore.apply(manifests);
    assert!(output.ok, "{}", output.err);
    let kinds =
        |out: &str| out.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>();
    let mut order = vec![
        "Namespace",
        "IPPool",
        "Tier",
        "ServiceAccount",
        "GlobalNetworkSet",
        "Profile",
        "KubernetesNetworkPolicy",
        "GlobalNetworkPolicy",
        "HostEndpoint",
        "Service",
        "EndpointSlice",
        "Pod",
    ];
    assert_eq!(kinds(&output.out), order, "{}", output.out);
    // Deletion is tried with the manifests in the order in which they were applied.
    let mut manifests: Vec<&str> = manifests.trim_end().rsplit("---\n").skip(1).collect();
    manifests.iter_mut().for_each(|manifest| *manifest = manifest.trim_end());
    let deleted = datastore.run(&["delete", "-f", "-"], &manifests.join("\n---\n"));
    assert!(deleted.ok, "{}", deleted.err);
    order.remove(0);
    let mut found = kinds(&deleted.out);
    found.reverse();
    // Two objects of one rank keep the given order.
    assert_eq!(found, order, "{}", deleted.out);
}

/// An export of another cluster is applied without what only that cluster can use.
#[test]
fn metadata_of_another_cluster_is_not_stored() {
    let datastore = Datastore::new();
    let exported = "\
apiVersion: v1
kind: List
items:
- apiVersion: crd.projectcalico.org/v1
  kind: GlobalNetworkPolicy
  metadata:
    name: default.p
    uid: theirs
    resourceVersion: '7'
    generation: 2
    creationTimestamp: '2020-01-01T00:00:00Z'
    managedFields: [{manager: m}]
    annotations: {projectcalico.org/metadata: '{\"labels\":{\"team\":\"a\"}}'}
  spec: {tier: default, selector: all()}
";
    let printed = datastore.apply(exported);
    assert!(
        printed.ok && printed.out == "GlobalNetworkPolicy default.p created\n",
        "{}{}",
        printed.out,
        printed.err
    );
    let stored =
        datastore.runtime.block_on(datastore.store.list(Kind::GlobalNetworkPolicy)).unwrap().items.remove(0);
    assert_eq!(stored.value["apiVersion"], "projectcalico.org/v3");
    let metadata = stored.value["metadata"].as_object().unwrap();
    let fields: Vec<&str> = metadata.keys().map(String::as_str).collect();
    assert_eq!(fields, ["annotations", "creationTimestamp", "labels", "name", "uid"]);
    assert!(metadata["uid"] != "theirs" && metadata["creationTimestamp"] != "2020-01-01T00:00:00Z");
    let conflict = datastore.apply(exported);
    assert!(
        !conflict.ok && conflict.err.contains("conflict: metadata.resourceVersion is 7"),
        "{}",
        conflict.err
    );
    let exported = &exported.replace("    resourceVersion: '7'\n", "");
    assert_eq!(datastore.apply(exported).out, "GlobalNetworkPolicy default.p unchanged\n");

    let wrong = datastore.apply(&exported.replace("selector", "selectr"));
    assert_eq!((wrong.code, wrong.out.as_str()), (2, ""), "{}", wrong.err);
    assert!(wrong.err.contains("-:13: GlobalNetworkPolicy default.p: spec.selectr"), "{}", wrong.err);
}

/// `apply` removes what its last manifest had, and keeps what others have set. `replace` keeps nothing.
#[test]
fn what_others_set_survives_apply_and_not_replace() {
    let datastore = Datastore::new();
    let policy = |labels: &str, spec: &str| {
        object("GlobalNetworkPolicy", "p", spec).replace("name: p", &format!("name: p, labels: {{{labels}}}"))
    };
    let first = policy("app: a, team: x", "{selector: all(), order: 5, types: [Ingress]}");
    assert_eq!(datastore.apply(&first).out, "GlobalNetworkPolicy p created\n");
    for change in [
        &["label", "gnp/p", "cost=7"][..],
        &["patch", "gnp/p", "-p", "{spec: {doNotTrack: true, applyOnForward: true}}"],
    ] {
        assert!(datastore.run(change, "").ok);
    }
    let last = policy("app: b", "{selector: all(), types: [Ingress]}");
    let template = "jsonpath={.metadata.labels} {.spec}";
    let stored = || datastore.run(&["get", "gnp", "p", "-o", template], "").out;
    let expected = r#"{"app":"b","cost":"7"} {"applyOnForward":true,"doNotTrack":true,"selector":"all()","types":["Ingress"]}"#;

    let differences = datastore.run(&["diff", "-f", "-", "--no-verdicts"], &last);
    assert!(
        differences.out.contains("-  order: 5") && !differences.out.contains("-  doNotTrack"),
        "{}",
        differences.out
    );
    assert!(!differences.out.contains("last-applied"), "{}", differences.out);
    let planned = datastore.run(&["apply", "-f", "-", "--dry-run"], &last);
    assert_eq!(planned.out, "GlobalNetworkPolicy p configured (dry run)\n");
    assert_eq!(datastore.apply(&last).out, "GlobalNetworkPolicy p configured\n");
    assert_eq!(stored(), expected);
    assert_eq!(datastore.apply(&last).out, "GlobalNetworkPolicy p unchanged\n");
    assert_eq!(datastore.run(&["diff", "-f", "-"], &last).code, 0);

    let planned = datastore.run(&["replace", "-f", "-", "--dry-run"], &last);
    assert_eq!(planned.out, "GlobalNetworkPolicy p replaced (dry run)\n");
    assert_eq!(datastore.run(&["replace", "-f", "-"], &last).out, "GlobalNetworkPolicy p replaced\n");
    assert_eq!(stored(), r#"{"app":"b"} {"selector":"all()","types":["Ingress"]}"#);

    // An object without a record of its manifest: calicoctl's apply replaces the spec.
    assert!(
        datastore
            .run(&["patch", "gnp/p", "-p", "{metadata: {labels: {cost: '7'}}, spec: {order: 5}}"], "")
            .ok
    );
    assert_eq!(datastore.apply(&last).out, "GlobalNetworkPolicy p configured\n");
    assert_eq!(stored(), r#"{"app":"b","cost":"7"} {"selector":"all()","types":["Ingress"]}"#);
}

/// A manifest that was read before somebody else's change does not undo that change.
#[test]
fn an_outdated_manifest_is_a_conflict() {
    let datastore = Datastore::new();
    let both = object("GlobalNetworkPolicy", "p", "{selector: all()}") + &object("Tier", "t", "{order: 5}");
    assert!(datastore.apply(&both).ok);
    let read = datastore.run(&["get", "gnp", "p", "-o", "yaml"], "").out;
    let edited = read.replace("selector: \"all()\"", "selector: app == 'b'");
    assert!(edited != read && read.contains("resourceVersion: "), "{read}");
    assert!(datastore.run(&["label", "gnp/p", "team=x"], "").ok);

    let edited_tier = object("Tier", "t", "{order: 6}");
    for command in ["apply", "replace", "diff"] {
        let conflict = datastore.run(&[command, "-f", "-"], &(edited.clone() + &edited_tier));
        let remedy = "remove metadata.resourceVersion and metadata.uid from the manifest";
        assert!(!conflict.ok && conflict.err.contains("nothing was changed"), "{command}: {}", conflict.err);
        assert!(conflict.err.contains("conflict: metadata.resourceVersion") && conflict.err.contains(remedy));
    }
    let order = datastore.run(&["get", "tier", "t", "-o", "jsonpath={.spec.order}"], "").out;
    assert_eq!(order, "5", "nothing of the manifests is applied");
    // The object was deleted and made again.
    let other = read.lines().filter(|line| !line.contains("resourceVersion")).collect::<Vec<_>>().join("\n");
    assert!(
        datastore.run(&["delete", "gnp", "p"], "").ok
            && datastore.run(&["create", "-f", "-"], &both.replace("t}", "u}")).ok
    );
    let conflict = datastore.apply(&other);
    assert!(!conflict.ok && conflict.err.contains("conflict: metadata.uid"), "{}", conflict.err);

    // Without a change of others, what was read and edited is applied, and what was read is unchanged.
    let read = datastore.run(&["get", "gnp", "p", "-o", "json"], "").out;
    let edited = read.replace("all()", "app == 'b'");
    assert_eq!(datastore.run(&["replace", "-f", "-"], &edited).out, "GlobalNetworkPolicy p replaced\n");
}

/// `-k` runs what builds kustomizations, if it is there.
#[test]
fn kustomizations_are_built_by_kubectl_or_kustomize() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let datastore = Datastore::new();
    let at = |name: &str| datastore.dir.path().join(name);
    let set = object("GlobalNetworkSet", "s", "{nets: [192.0.2.0/24]}");
    std::fs::create_dir_all(at("base")).unwrap();
    std::fs::write(at("base/set.yaml"), set).unwrap();
    std::fs::write(at("base/kustomization.yaml"), "namePrefix: built-\nresources: [set.yaml]\n").unwrap();
    let base = at("base").display().to_string();
    let run = |command: &str, path: &str| {
        let store = format!("unix:{}", at("socket").display());
        let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
            .args([command, "-k", &base])
            .env("PATH", path)
            .env("TORTIE_STORE", store)
            .output()
            .unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), text)
    };
    let (code, text) = run("apply", "");
    assert!(
        code == 2 && text.contains("neither is in PATH; install one, or pipe manifests to -f -"),
        "{text}"
    );

    // Each of the two programs.
    let kube = KUBE.binary("kube").unwrap().display().to_string();
    for (program, words) in [("kubectl", "kubectl \"$@\""), ("kustomize", "kubectl kustomize \"$2\"")] {
        let folder = at(program);
        std::fs::create_dir_all(&folder).unwrap();
        let script = folder.join(program);
        testkit::executables::write_script(&script, &format!("#!/bin/sh\nexec {kube} {words}\n"));
        let path = folder.display().to_string();
        for (command, expected) in [
            ("apply", "GlobalNetworkSet built-s created"),
            ("diff", ""),
            ("validate", "1 object in 1 file: 0 errors"),
            ("convert", "name: built-s"),
            ("delete", "GlobalNetworkSet built-s deleted"),
        ] {
            let (code, text) = run(command, &path);
            assert!(code == 0 && text.contains(expected), "{program}, {command}: {text}");
        }
    }
    std::fs::write(at("base/kustomization.yaml"), "resources: [absent.yaml]\n").unwrap();
    let (code, text) = run("apply", &at("kubectl").display().to_string());
    assert!(code == 2 && text.contains("absent.yaml") && text.contains("kubectl kustomize failed"), "{text}");
}
