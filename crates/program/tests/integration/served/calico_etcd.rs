//! Objects of Calico in a real etcd: what calicoctl has stored survives each command, and what is stored does not differ from its manifest.

use std::process::Command;

use serde_json::{Value, json};
use testkit::calico_client;
use tortie_servers::Etcd;
use tortie_servers::programs::{Program, can_run};

const KEY: &str = "/calico/resources/v3/projectcalico.org/nodes/worker";

/// A Node as calicoctl stores it, with everything that Calico's Node has.
fn stored() -> Value {
    json!({"apiVersion": "projectcalico.org/v3", "kind": "Node",
        "metadata": {"name": "worker", "uid": "f82edd38-0216-42fc-a55d-0abd71ea907d",
            "creationTimestamp": "2026-11-27T20:26:01Z", "labels": {"a": "b"}},
        "spec": {
            "addresses": [{"address": "192.0.2.5/24", "type": "CalicoNodeIP"}, {"address": "192.0.2.5", "type": "InternalIP"}],
            "bgp": {"asNumber": 64_513, "ipv4Address": "192.0.2.5/24", "ipv4IPIPTunnelAddr": "10.1.1.1",
                "routeReflectorClusterID": "1.0.0.1"},
            "interfaces": [{"name": "eth0", "addresses": ["192.0.2.5"]}],
            "ipv4VXLANTunnelAddr": "10.2.2.2", "orchRefs": [{"nodeName": "worker", "orchestrator": "k8s"}],
            "vxlanTunnelMACAddr": "66:00:00:00:00:01", "wireguard": {"interfaceIPv4Address": "10.3.3.3"}},
        "status": {"podCIDRs": ["10.9.0.0/24"], "wireguardPublicKey": "jlkVyQYooZYzI2wFfNhSZez5eWh44yfq1wKVjLvSXgY="}})
}

/// The Node in etcd, which Calico's client can update.
fn now(etcd: &Etcd) -> Value {
    let text = etcd.etcdctl(&["get", "--print-value-only", KEY]).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(calico_client::problems(KEY, &value), [""; 0]);
    value
}

fn tortie(etcd: &Etcd, line: &str) -> String {
    let store = format!("etcd:{}", etcd.endpoints()[0]);
    let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
        .args(line.split(' '))
        .args(["--store", &store])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn a_node_of_calico_keeps_everything_through_each_command() {
    if !can_run(&[Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    etcd.etcdctl(&["put", KEY, &stored().to_string()]).unwrap();

    // What each command changes, and nothing else.
    let file = folder.path().join("node.yaml");
    for line in ["apply", "replace"] {
        std::fs::write(&file, tortie(&etcd, "get node worker -o yaml")).unwrap();
        tortie(&etcd, &format!("{line} -f {}", file.display()));
        let mut after = now(&etcd);
        let metadata = after["metadata"].as_object_mut().unwrap();
        if let Some(Value::Object(mut annotations)) = metadata.remove("annotations") {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
            assert!(annotations.is_empty(), "{line}: {annotations:?}");
        }
        assert_eq!(after, stored(), "{line}");
    }
    etcd.etcdctl(&["put", KEY, &stored().to_string()]).unwrap();
    tortie(&etcd, "label node worker zone=x");
    tortie(&etcd, "annotate node worker note=y");
    let mut expected = stored();
    expected["metadata"]["labels"]["zone"] = json!("x");
    expected["metadata"]["annotations"] = json!({"note": "y"});
    assert_eq!(now(&etcd), expected);
    tortie(&etcd, r#"patch node worker -p {"metadata":{"labels":{"zone":null}}}"#);
    expected["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(now(&etcd), expected);

    // Calico's form of a manifest creates the same Node.
    let manifest = folder.path().join("calico.json");
    std::fs::write(&manifest, stored().to_string()).unwrap();
    etcd.etcdctl(&["del", KEY]).unwrap();
    tortie(&etcd, &format!("create -f {}", manifest.display()));
    let mut created = now(&etcd);
    for field in ["uid", "creationTimestamp"] {
        created["metadata"][field] = stored()["metadata"][field].clone();
    }
    assert_eq!(created["spec"], stored()["spec"]);
    assert_eq!(created["metadata"], stored()["metadata"]);
}

/// Calico 3.30 and 3.31 stored a policy under the names of its tier and its own, earlier versions did so in the tier `default`.
#[test]
fn a_policy_that_calico_has_stored_under_another_name_stays_one() {
    if !can_run(&[Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let resources = "/calico/resources/v3/projectcalico.org";
    let tier = folder.path().join("tier.json");
    let team = json!({"apiVersion": "projectcalico.org/v3", "kind": "Tier", "metadata": {"name": "team"}, "spec": {"order": 7}});
    std::fs::write(&tier, team.to_string()).unwrap();
    tortie(&etcd, &format!("apply -f {}", tier.display()));
    for (name, tier, annotated) in [("team.p", "team", true), ("default.q", "default", false)] {
        let key = format!("{resources}/globalnetworkpolicies/{name}");
        let mut value = json!({"apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy",
            "metadata": {"name": name, "uid": "f82edd38-0216-42fc-a55d-0abd71ea907d", "creationTimestamp": "2026-11-27T20:26:01Z"},
            "spec": {"tier": tier, "selector": "all()", "types": ["Ingress"]}});
        if annotated {
            value["metadata"]["name"] = json!("p");
            value["metadata"]["annotations"] = json!({"projectcalico.org/metadata": "{\"name\":\"p\"}"});
        }
        etcd.etcdctl(&["put", &key, &value.to_string()]).unwrap();
        let file = folder.path().join("policy.yaml");
        std::fs::write(&file, tortie(&etcd, &format!("get globalnetworkpolicy {name} -o yaml"))).unwrap();
        tortie(&etcd, &format!("apply -f {}", file.display()));
        tortie(&etcd, &format!("label globalnetworkpolicy {name} x=y"));
        let prefix = format!("{resources}/globalnetworkpolicies/");
        let keys = etcd.etcdctl(&["get", "--prefix", "--keys-only", &prefix]).unwrap();
        assert_eq!(keys.split_whitespace().collect::<Vec<_>>(), [key.as_str()], "one policy stays one");
        let text = etcd.etcdctl(&["get", "--print-value-only", &key]).unwrap();
        let stored: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(calico_client::problems(&key, &stored), [""; 0]);
        assert_eq!(stored["metadata"]["labels"]["x"], "y");
        etcd.etcdctl(&["del", &key]).unwrap();
    }
}

/// The stored object has defaults and other forms besides. They are no differences.
#[test]
fn a_created_object_does_not_differ_from_its_manifest() {
    if !can_run(&[Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.json");
    let policy = |order: f64| {
        let rule =
            json!({"action": "Allow", "protocol": "TCP", "destination": {"ports": ["80"]}, "source": {}});
        json!({"apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": {"name": "p"},
            "spec": {"order": order, "selector": "all()", "ingress": [rule]}})
    };
    std::fs::write(&file, policy(100.0).to_string()).unwrap();
    tortie(&etcd, &format!("create -f {}", file.display()));
    // It fails if anything differs.
    assert_eq!(tortie(&etcd, &format!("diff -f {}", file.display())), "");
    let planned = tortie(&etcd, &format!("apply --dry-run -f {}", file.display()));
    assert!(planned.contains("unchanged"), "{planned}");
    std::fs::write(&file, policy(101.0).to_string()).unwrap();
    let planned = tortie(&etcd, &format!("apply --dry-run -f {}", file.display()));
    assert!(planned.contains("configured"), "{planned}");
}
