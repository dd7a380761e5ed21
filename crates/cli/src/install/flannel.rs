//! `tortie install --flannel`: what Tortie needs in a cluster whose nodes run flannel, and move to Tortie one by one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_deploy::{NETWORK_LABEL, NETWORK_LABEL_VALUE};
use tortie_flannel::{Backend, NetConf};
use tortie_store::kubernetes::Kubernetes;

use super::cluster::get;

/// The DaemonSet of flannel's manifest.
pub(super) const DAEMON_SET: &str = "kube-flannel-ds";
/// The key of its ConfigMap with the configuration.
const NET_CONF: &str = "net-conf.json";
/// The names of Tortie's pools.
const POOLS: [&str; 2] = ["flannel", "flannel-v6"];
/// The configuration: a file, or the ConfigMap of one of flannel's DaemonSets. `None`: there is none.
pub(super) async fn read(
    cluster: &Kubernetes,
    daemon_sets: impl Iterator<Item = &Value>,
    file: Option<&Path>,
) -> anyhow::Result<Option<(String, PathBuf)>> {
    if let Some(file) = file {
        return Ok(Some((read_file(file)?, file.to_owned())));
    }
    for (namespace, name) in daemon_sets.flat_map(config_maps) {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
        let map = get(cluster, &path).await.context("reading flannel's configuration")?;
        if let Some(text) = map.as_ref().and_then(|map| map["data"][NET_CONF].as_str()) {
            return Ok(Some((text.to_owned(), PathBuf::from(format!("ConfigMap {namespace}/{name}")))));
        }
    }
    Ok(None)
}

/// What is wrong without a configuration, with the remedy.
pub(super) fn no_configuration() -> anyhow::Error {
    anyhow::anyhow!(
        "the cluster has no DaemonSet {DAEMON_SET} whose ConfigMap has {NET_CONF}; name a copy of flannel's {NET_CONF} by \
         --flannel-config"
    )
}

pub(super) fn read_file(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// The ConfigMaps of a DaemonSet's pods.
fn config_maps(set: &Value) -> Vec<(String, String)> {
    let namespace = set["metadata"]["namespace"].as_str().unwrap_or_default();
    let volumes = set["spec"]["template"]["spec"]["volumes"].as_array().into_iter().flatten();
    let names = volumes.filter_map(|volume| volume["configMap"]["name"].as_str());
    names.map(|name| (namespace.to_owned(), name.to_owned())).collect()
}

/// The objects by which Tortie's agents speak to flannel's daemons: pools for its networks, and the properties of its VXLAN.
pub(super) fn objects(text: &str, source: &Path, api_version: &str) -> Result<Vec<Value>, String> {
    let of_source = |problem: String| format!("flannel's configuration ({}): {problem}", source.display());
    let conf = NetConf::parse(text).map_err(of_source)?;
    let mode = if conf.backend == Backend::HostGw { "Never" } else { "Always" };
    let pools = conf.networks.iter().map(|network| {
        let name = if network.cidr.addr().is_ipv4() { POOLS[0] } else { POOLS[1] };
        json!({
            "apiVersion": api_version, "kind": "IPPool", "metadata": {"name": name},
            "spec": {
                "cidr": network.cidr, "vxlanMode": mode, "ipipMode": "Never", "natOutgoing": true, "assignmentMode": "Manual",
            },
        })
    });
    let mut objects: Vec<Value> = pools.collect();
    if let Backend::Vxlan { vni, port } = conf.backend {
        objects.push(json!({
            "apiVersion": api_version, "kind": "FelixConfiguration", "metadata": {"name": "default"},
            "spec": {"vxlanVNI": vni, "vxlanPort": port},
        }));
    }
    Ok(objects)
}

/// The pools that an earlier installation or somebody else has created for flannel's networks.
fn kept_pools(existing: &[Value]) -> impl Iterator<Item = &Value> {
    existing.iter().filter(|pool| pool["spec"]["assignmentMode"] == "Manual")
}

fn cidr(pool: &Value) -> Option<IpNet> {
    pool["spec"]["cidr"].as_str()?.parse().ok()
}

/// The networks of flannel: those of the pools that are created, and that the cluster has.
pub(super) fn networks<'a>(objects: &'a [Value], existing: &'a [Value]) -> BTreeSet<&'a str> {
    let pools = objects.iter().filter(|object| object["kind"] == "IPPool").chain(kept_pools(existing));
    pools.filter_map(|pool| pool["spec"]["cidr"].as_str()).collect()
}

/// The objects without the pools that the cluster has under another name; or why they do not fit its pools, with the remedy.
pub(super) fn fit_pools(objects: &[Value], existing: &[Value]) -> Result<Vec<Value>, String> {
    let mut fitting = Vec::new();
    for object in objects {
        let own = cidr(object).filter(|_| object["kind"] == "IPPool");
        let overlaps = |other: &&Value| {
            let net = cidr(other).zip(own).filter(|(net, own)| net.contains(own) || own.contains(net));
            other["metadata"]["name"] != object["metadata"]["name"] && net.is_some()
        };
        let others: Vec<&Value> = existing.iter().filter(overlaps).collect();
        let is_same = |other: &&Value| {
            let mode = |pool: &Value| pool["spec"]["vxlanMode"].as_str().unwrap_or("Never").to_owned();
            let is_manual = other["spec"]["assignmentMode"] == "Manual";
            cidr(other) == own && is_manual && mode(other) == mode(object)
        };
        match others.as_slice() {
            [] => fitting.push(object.clone()),
            [other] if is_same(other) => {}
            [other, ..] => {
                return Err(format!(
                    "IPPool {} ({}) overlaps flannel's network {}, and is not as agents need it ({}); once no node of Tortie uses it, \
                     delete it (tortie delete ippool)",
                    other["metadata"]["name"].as_str().unwrap_or_default(),
                    other["spec"]["cidr"].as_str().unwrap_or_default(),
                    object["spec"]["cidr"].as_str().unwrap_or_default(),
                    format_args!(
                        "vxlanMode {}, assignmentMode Manual",
                        object["spec"]["vxlanMode"].as_str().unwrap_or_default()
                    ),
                ));
            }
        }
    }
    Ok(fitting)
}

/// Why flannel's daemon would run on nodes of Tortie, too, with the command that prevents it.
pub(super) fn check_daemon_set(set: &Value) -> Result<(), String> {
    let required = &set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let mut terms = required["nodeSelectorTerms"].as_array().cloned().unwrap_or_default();
    let excludes = |expression: &Value| {
        let operator = expression["operator"].as_str();
        let values = expression["values"].as_array().into_iter().flatten();
        expression["key"] == NETWORK_LABEL
            && (operator == Some("DoesNotExist")
                || operator == Some("NotIn") && values.into_iter().any(|value| value == NETWORK_LABEL_VALUE))
    };
    let is_fine =
        |term: &Value| term["matchExpressions"].as_array().is_some_and(|all| all.iter().any(excludes));
    if !terms.is_empty() && terms.iter().all(is_fine) {
        return Ok(());
    }
    if terms.is_empty() {
        terms.push(json!({}));
    }
    // A node must match one of the terms.
    for term in &mut terms {
        let mut expressions = term["matchExpressions"].as_array().cloned().unwrap_or_default();
        expressions.push(json!({"key": NETWORK_LABEL, "operator": "NotIn", "values": [NETWORK_LABEL_VALUE]}));
        term["matchExpressions"] = json!(expressions);
    }
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    let patch = json!({"spec": {"template": {"spec": {"affinity": affinity}}}});
    let text = |field: &str| set["metadata"][field].as_str().unwrap_or_default();
    Err(format!(
        "flannel's DaemonSet would run beside Tortie's agents on nodes with the label {NETWORK_LABEL}={NETWORK_LABEL_VALUE}; keep it off \
         them first:\nkubectl -n {} patch daemonset {} --type merge -p '{patch}'",
        text("namespace"),
        text("name")
    ))
}

/// What the operator does next.
pub(super) fn next_steps() -> String {
    format!(
        "Nodes keep flannel until they have the label {NETWORK_LABEL}={NETWORK_LABEL_VALUE}. To move one:\n  \
         kubectl drain NODE --ignore-daemonsets --delete-emptydir-data\n  \
         kubectl label node NODE {NETWORK_LABEL}={NETWORK_LABEL_VALUE}\n  \
         kubectl -n kube-flannel wait --for=delete pod -l app=flannel --field-selector spec.nodeName=NODE --timeout=120s\n  \
         kubectl -n tortie-system exec POD -- /tortie node cleanup --flannel --cni-conf-dir /host/etc/cni/net.d\n  \
         kubectl uncordon NODE\n\
         POD is Tortie's agent there. Pods of DaemonSets without hostNetwork stay after a drain: delete them before the cleanup"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &Value) -> Result<Vec<String>, String> {
        let objects = objects(&text.to_string(), Path::new("net-conf.json"), "crd.projectcalico.org/v1")?;
        let words = objects.iter().map(|object| match object["kind"].as_str() {
            Some("IPPool") => {
                let spec = &object["spec"];
                assert_eq!((&spec["assignmentMode"], &spec["natOutgoing"]), (&json!("Manual"), &json!(true)));
                let name = &object["metadata"]["name"];
                format!("{name} {} {}", spec["cidr"], spec["vxlanMode"]).replace('"', "")
            }
            _ => format!("{}", object["spec"]),
        });
        Ok(words.collect())
    }

    #[test]
    fn pools_and_vxlan_are_those_of_flannel() {
        let (vxlan, host_gw) = (json!({"Type": "vxlan"}), json!({"Type": "host-gw"}));
        let v4 = "10.244.0.0/16";
        for (conf, expected) in [
            (
                json!({"Network": v4, "EnableNFTables": false, "Backend": vxlan}),
                Ok(&["flannel 10.244.0.0/16 Always", r#"{"vxlanPort":8472,"vxlanVNI":1}"#][..]),
            ),
            (
                json!({"Network": v4, "Backend": {"Type": "vxlan", "VNI": 4096, "Port": 4789}}),
                Ok(&["flannel 10.244.0.0/16 Always", r#"{"vxlanPort":4789,"vxlanVNI":4096}"#]),
            ),
            // flannel ignores the case of keys and of the type.
            (
                json!({"network": v4, "backend": {"type": "VXLAN", "vni": 7, "PORT": 9}}),
                Ok(&["flannel 10.244.0.0/16 Always", r#"{"vxlanPort":9,"vxlanVNI":7}"#]),
            ),
            (
                json!({"Network": v4, "backend": {"type": "vxlan", "directRouting": true}}),
                Err("DirectRouting"),
            ),
            (json!({"Network": v4, "enableIPv6": true, "backend": host_gw}), Err("IPv6Network is missing")),
            (json!({"Network": v4, "Backend": host_gw}), Ok(&["flannel 10.244.0.0/16 Never"])),
            (
                json!({"Network": v4, "EnableIPv6": true, "IPv6Network": "fd00:244::/48", "Backend": host_gw}),
                Ok(&["flannel 10.244.0.0/16 Never", "flannel-v6 fd00:244::/48 Never"]),
            ),
            (
                json!({"EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fd00:244::/48", "Backend": host_gw}),
                Ok(&["flannel-v6 fd00:244::/48 Never"]),
            ),
            (json!({"Network": v4}), Err("the backend is udp")),
            (json!({"Network": v4, "Backend": {"Type": "wireguard"}}), Err("the backend is wireguard")),
            (
                json!({"Network": v4, "Backend": {"Type": "vxlan", "DirectRouting": true}}),
                Err("DirectRouting"),
            ),
            (json!({"Backend": vxlan}), Err("Network is missing")),
            (json!({"Network": v4, "EnableIPv6": true, "Backend": vxlan}), Err("IPv6Network is missing")),
            (json!({"Network": v4, "EnableIPv4": false, "Backend": vxlan}), Err("neither IPv4 nor IPv6")),
            (json!({"Network": "x", "Backend": vxlan}), Err("net-conf.json")),
        ] {
            match (planned(&conf), expected) {
                (Ok(planned), Ok(expected)) => assert_eq!(planned, expected, "{conf}"),
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                (planned, _) => panic!("{conf}: {planned:?}"),
            }
        }
    }

    /// A pool under another name stays, if it is as agents need it.
    #[test]
    fn pools_of_others_must_not_overlap() {
        let conf = json!({"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}});
        let objects = objects(&conf.to_string(), Path::new("f"), "v").unwrap();
        let pool = |name: &str, cidr: &str| json!({"metadata": {"name": name}, "spec": {"cidr": cidr, "vxlanMode": "Always"}});
        let manual = |mut pool: Value, mode: &str| {
            pool["spec"]["assignmentMode"] = json!("Manual");
            pool["spec"]["vxlanMode"] = json!(mode);
            pool
        };
        let same = || pool("pods", "10.244.0.0/16");
        for (existing, applied) in [
            (vec![], Some(2)),
            (vec![pool("other", "10.1.0.0/16"), pool("flannel", "10.244.0.0/16")], Some(2)),
            (vec![manual(same(), "Always")], Some(1)),
            (vec![manual(same(), "Never")], None),
            (vec![same()], None),
            (vec![manual(same(), "Always"), pool("part", "10.244.3.0/24")], None),
            (vec![manual(pool("part", "10.244.3.0/24"), "Always")], None),
            (vec![pool("all", "10.0.0.0/8")], None),
        ] {
            let fitting = fit_pools(&objects, &existing);
            assert_eq!(fitting.as_ref().ok().map(Vec::len), applied, "{existing:?}: {fitting:?}");
        }
        assert_eq!(networks(&objects, &[same()]), BTreeSet::from(["10.244.0.0/16"]));
        let kept = [manual(pool("flannel", "10.7.0.0/16"), "Always"), same()];
        assert_eq!(networks(&[], &kept), BTreeSet::from(["10.7.0.0/16"]));
    }

    #[test]
    fn flannel_must_be_kept_off_nodes_of_tortie() {
        let set = |terms: Value| {
            let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
            json!({"metadata": {"namespace": "kube-flannel", "name": DAEMON_SET},
                "spec": {"template": {"spec": {"affinity": affinity}}}})
        };
        let linux = json!({"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]});
        let not_ours = json!({"key": NETWORK_LABEL, "operator": "NotIn", "values": [NETWORK_LABEL_VALUE]});
        let none = json!({"key": NETWORK_LABEL, "operator": "DoesNotExist"});
        let other = json!({"key": NETWORK_LABEL, "operator": "NotIn", "values": ["other"]});
        for (terms, fits) in [
            (json!([{"matchExpressions": [linux, not_ours]}]), true),
            (json!([{"matchExpressions": [none]}]), true),
            (json!([{"matchExpressions": [linux]}, {"matchExpressions": [not_ours]}]), false),
            (json!([{"matchExpressions": [other]}]), false),
            (json!([{"matchFields": []}]), false),
            (Value::Null, false),
        ] {
            let refused = check_daemon_set(&set(terms.clone())).err();
            assert_eq!(refused.is_none(), fits, "{terms}: {refused:?}");
            let Some(refused) = refused else { continue };
            let patch = refused.split("-p '").nth(1).unwrap().trim_end_matches('\'');
            let patch: Value = serde_json::from_str(patch).unwrap();
            let patched = json!({"metadata": {}, "spec": patch["spec"]});
            assert_eq!(check_daemon_set(&patched), Ok(()), "{patch}");
            assert!(!terms.to_string().contains("linux") || patch.to_string().contains("linux"), "{patch}");
        }
    }
}
