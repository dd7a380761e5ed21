//! The Helm chart, rendered by Helm, beside what `tortie install --dry-run` prints for the same choices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tortie_servers::programs::{Program, can_run};

use crate::served::support::text_of;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/tortie");
const NAMESPACE: &str = "tortie-system";
const DIGEST: &str = "tortie.io/config-digest";

/// Flags of `tortie install`, and the values of the chart that mean the same.
fn choices() -> Vec<(&'static [&'static str], Value)> {
    vec![
        (&[], json!({})),
        (
            &["--image", "r.example:5000/t:1", "--pull-policy", "Always"],
            json!({"image": "r.example:5000/t:1", "imagePullPolicy": "Always"}),
        ),
        (
            &["--cni-bin-dir", "/a/bin", "--cni-conf-dir", "/a/net.d"],
            json!({"cniBinDir": "/a/bin", "cniConfDir": "/a/net.d"}),
        ),
        (
            &["--pool", "10.9.0.0/16", "--nat-outgoing", "false", "--encapsulation", "vxlan-cross-subnet"],
            json!({"config": {
                "TORTIE_DEFAULT_POOL": "10.9.0.0/16", "TORTIE_DEFAULT_POOL_NAT": false,
                "TORTIE_DEFAULT_POOL_ENCAPSULATION": "vxlan-cross-subnet",
            }}),
        ),
        (
            &["--pool-v6", "fd00:9::/56", "--log-level", "debug", "--api-server", "api.example:6443"],
            json!({"config": {
                "TORTIE_DEFAULT_POOL_V6": "fd00:9::/56", "RUST_LOG": "debug",
                "KUBERNETES_SERVICE_HOST": "api.example", "KUBERNETES_SERVICE_PORT": 6443,
            }}),
        ),
        (
            &["--bgp", "--encapsulation", "none", "--bgp-secret", "one", "--bgp-secret", "two"],
            json!({"bgpSecrets": ["one", "two"], "config": {
                "TORTIE_BGP": true, "TORTIE_DEFAULT_POOL_ENCAPSULATION": "none",
            }}),
        ),
        (
            &["--direct-routes", "--encapsulation", "none", "--ip-autodetection-method", "interface=eth.*"],
            json!({"config": {
                "TORTIE_DIRECT_ROUTES": "true", "TORTIE_DEFAULT_POOL_ENCAPSULATION": "none",
                "TORTIE_IP_AUTODETECTION_METHOD": "interface=eth.*",
            }}),
        ),
        (
            &["--metrics-address", "0.0.0.0:9199", "--cni-plugins", PLUGINS],
            json!({"config": {"TORTIE_METRICS_ADDRESS": "0.0.0.0:9199", "TORTIE_CNI_PLUGINS": PLUGINS}}),
        ),
        (
            &["--services", "--api-server", "192.0.2.1:6443"],
            json!({"config": {
                "TORTIE_SERVICES": true, "KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": 6443,
            }}),
        ),
        (&["--policy-only"], json!({"policyOnly": true})),
        (
            &["--policy-only", "--pod-interface-prefix", "eni,veth"],
            json!({"policyOnly": true, "config": {"TORTIE_POD_INTERFACE_PREFIX": "eni,veth"}}),
        ),
    ]
}

/// Plugins that the container runtime calls after Tortie's, as `tortie install` writes them.
const PLUGINS: &str = r#"[{"capabilities":{"bandwidth":true},"type":"bandwidth"}]"#;

#[test]
fn the_chart_has_the_objects_of_an_installation_with_the_same_choices() {
    if !can_run(&[Program::Helm]) {
        return;
    }
    let mut digests = BTreeSet::new();
    for (flags, values) in choices() {
        let dry_run = succeeded(
            Command::new(env!("CARGO_BIN_EXE_tortie"))
                .args(["install", "--dry-run"])
                .args(flags)
                .output()
                .unwrap(),
        );
        let (installed, _) = objects(&dry_run);
        let (mut rendered, digest) = objects(&render(&values));
        // Helm creates the namespace (`--create-namespace`).
        let namespace = installed.get("Namespace  tortie-system").unwrap();
        assert!(rendered.insert("Namespace  tortie-system".to_owned(), namespace.clone()).is_none());
        let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&rendered), names(&installed), "{flags:?}");
        for (name, object) in &installed {
            assert_eq!(rendered[name], *object, "{flags:?}: {name}");
        }
        digests.insert(digest);
    }
    // Each other configuration replaces the pods. Image, folders and policyOnly alone are in the pods themselves.
    assert_eq!(digests.len(), 8);
}

/// An API server that does not have a kind refuses the whole chart.
#[test]
fn the_chart_restricts_nodes_where_the_api_server_can() {
    if !can_run(&[Program::Helm]) {
        return;
    }
    for (version, restricts) in [("1.29.9", false), ("1.30.0", true), ("v1.33.1-eks-1234", true)] {
        let rendered = render_for(version, &json!({}));
        assert_eq!(rendered.contains("kind: ValidatingAdmissionPolicy"), restricts, "{version}");
    }
}

/// Renders the chart as `helm install --create-namespace` would.
fn render(values: &Value) -> String {
    render_for("1.36.0", values)
}

/// The same for an API server of this version.
fn render_for(version: &str, values: &Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    std::fs::write(&file, values.to_string()).unwrap();
    let mut helm = Command::new(Program::Helm.find().unwrap());
    helm.args(["template", "tortie", CHART, "--namespace", NAMESPACE, "--include-crds"])
        .args(["--kube-version", version, "--values"])
        .arg(&file);
    succeeded(at_home(&mut helm, folder.path()).output().unwrap())
}

/// Helm with files of its own.
fn at_home<'a>(helm: &'a mut Command, folder: &Path) -> &'a mut Command {
    helm.env("HOME", folder).env_remove("KUBECONFIG")
}

fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    text_of(&output)
}

/// The objects by kind, namespace and name, without the digest of the configuration, which Helm computes in another way; and that
/// digest, which all pods must have.
fn objects(manifest: &str) -> (BTreeMap<String, Value>, String) {
    let mut digests = BTreeSet::new();
    let mut objects = BTreeMap::new();
    for mut object in tortie_api::from_yaml(manifest).unwrap() {
        if let Some(template) = object.pointer_mut("/spec/template") {
            let digest =
                template["metadata"]["annotations"].as_object_mut().and_then(|all| all.remove(DIGEST));
            digests.insert(digest.unwrap().as_str().unwrap().to_owned());
        }
        let of = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {} {}", object["kind"].as_str().unwrap(), of("namespace"), of("name"));
        assert!(objects.insert(name.clone(), object).is_none(), "{name} is there twice");
    }
    assert_eq!(digests.len(), 1, "{digests:?}");
    (objects, digests.pop_first().unwrap())
}
