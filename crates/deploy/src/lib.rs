//! The manifests of an installation, from one source: `tortie install` applies [`objects`], and `cargo xtask manifests`
//! writes [`files`] to `deploy/`.
//!
//! `deploy/rbac.yaml`, `deploy/node-restriction.yaml`, `deploy/definitions.yaml` and `deploy/crds` are inputs. Tests of other crates compare them with what agents and types need.

mod chart;
mod cni;
mod controllers;
mod node;
mod template;
mod values;

use serde_json::{Value, json};
use tortie_api::{from_yaml, to_yaml};

pub use cni::{CNI_CONFIG_FILE, CNI_NETWORK, CNI_PLUGIN, ChainError, ChainedPlugins, cni_config};
pub use controllers::CONTROLLERS;
pub use node::{CLEANUP_SET, DAEMON_SET, HEALTH_PORT, NETWORK_LABEL, NETWORK_LABEL_VALUE, cleanup};
pub use template::CONFIG_MAP;
pub use values::{DEFAULT_IMAGE, DEFAULT_POOL, Encapsulation, PoolError, Values, check_pool};

/// The namespace of Tortie's own objects.
pub const NAMESPACE: &str = "tortie-system";
/// The name of the pool that the first agent creates if the cluster has none. Agents may create no other pool.
pub const POOL_NAME: &str = "default-ipv4-ippool";
/// The name of its IPv6 pool.
pub const POOL_V6_NAME: &str = "default-ipv6-ippool";

/// The kind that agents write in any mode.
const REPORTS: &str = "nodereports";
/// The namespace, service account and roles.
const RBAC: &str = include_str!("../../../deploy/rbac.yaml");

/// The limits of what the agent of one node may write.
const NODE_RESTRICTION: &str = include_str!("../../../deploy/node-restriction.yaml");
/// What keeps the definitions of kinds from being deleted.
const KEPT_DEFINITIONS: &str = include_str!("../../../deploy/definitions.yaml");
/// The kind of both, which API servers before Kubernetes 1.30 do not have.
pub const ADMISSION_POLICY: &str = "ValidatingAdmissionPolicy";

/// The name of the policy that keeps definitions.
pub const DEFINITION_POLICY: &str = "tortie-definitions";

/// A file of `deploy/crds`.
macro_rules! definition {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../deploy/crds/", $name)))
    };
}

/// The CustomResourceDefinitions, by file name.
const DEFINITIONS: &[(&str, &str)] = &[
    definition!("crd.projectcalico.org_bgpconfigurations.yaml"),
    definition!("crd.projectcalico.org_bgpfilters.yaml"),
    definition!("crd.projectcalico.org_bgppeers.yaml"),
    definition!("crd.projectcalico.org_blockaffinities.yaml"),
    definition!("crd.projectcalico.org_caliconodestatuses.yaml"),
    definition!("crd.projectcalico.org_clusterinformations.yaml"),
    definition!("crd.projectcalico.org_felixconfigurations.yaml"),
    definition!("crd.projectcalico.org_globalnetworkpolicies.yaml"),
    definition!("crd.projectcalico.org_globalnetworksets.yaml"),
    definition!("crd.projectcalico.org_hostendpoints.yaml"),
    definition!("crd.projectcalico.org_ipamblocks.yaml"),
    definition!("crd.projectcalico.org_ipamconfigs.yaml"),
    definition!("crd.projectcalico.org_ipamhandles.yaml"),
    definition!("crd.projectcalico.org_ippools.yaml"),
    definition!("crd.projectcalico.org_ipreservations.yaml"),
    definition!("crd.projectcalico.org_kubecontrollersconfigurations.yaml"),
    definition!("crd.projectcalico.org_networkpolicies.yaml"),
    definition!("crd.projectcalico.org_networksets.yaml"),
    definition!("crd.projectcalico.org_stagedglobalnetworkpolicies.yaml"),
    definition!("crd.projectcalico.org_stagedkubernetesnetworkpolicies.yaml"),
    definition!("crd.projectcalico.org_stagednetworkpolicies.yaml"),
    definition!("crd.projectcalico.org_tiers.yaml"),
    definition!("tortie.io_nodereports.yaml"),
];

/// A generated file, relative to `deploy/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its path.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// The first lines of each generated file.
const HEAD: &str = "# Generated from crates/deploy: cargo xtask manifests\n";

/// The CustomResourceDefinitions.
#[must_use]
pub fn definitions() -> Vec<Value> {
    DEFINITIONS.iter().flat_map(|(_, text)| parsed(text)).collect()
}

/// The namespace, the service accounts and the roles. Agents that only enforce policy (`policy_only`) write nothing but reports.
#[must_use]
pub fn permissions(policy_only: bool) -> Vec<Value> {
    let mut permissions = parsed(RBAC);
    let agents = permissions.iter_mut().find(|object| is_role_of_agents(object));
    if let Some(role) = agents.filter(|_| policy_only) {
        *role = reading(role);
    }
    permissions
}

fn is_role_of_agents(object: &Value) -> bool {
    object["kind"] == "ClusterRole" && object["metadata"]["name"] == DAEMON_SET
}

/// The role without writing, except for reports.
fn reading(role: &Value) -> Value {
    let mut role = role.clone();
    let rules = role["rules"].as_array_mut().into_iter().flatten();
    for rule in rules.filter(|rule| rule["resources"] != json!([REPORTS])) {
        if let Some(verbs) = rule["verbs"].as_array_mut() {
            verbs.retain(|verb| ["get", "list", "watch"].iter().any(|reads| verb == reads));
        }
    }
    if let Some(rules) = role["rules"].as_array_mut() {
        rules.retain(|rule| rule["verbs"].as_array().is_some_and(|verbs| !verbs.is_empty()));
    }
    role
}

/// All objects of an installation, in the order in which they must be applied.
#[must_use]
pub fn objects(values: &Values) -> Vec<Value> {
    let mut objects = permissions(values.policy_only);
    objects.extend(parsed(NODE_RESTRICTION));
    objects.extend(definitions());
    objects.extend(node::objects(values));
    // Last: `kubectl delete -f` deletes in this order, and must not delete the definitions.
    objects.extend(parsed(KEPT_DEFINITIONS));
    objects
}

/// Objects of installations with other values, which this one must not have: they allow something.
#[must_use]
pub fn unwanted(values: &Values) -> Vec<Value> {
    let mut unwanted = Vec::new();
    if values.bgp_secrets.is_empty() {
        unwanted.extend(node::secrets_role(Value::Null));
    }
    if values.policy_only || values.flannel {
        unwanted.extend([node::setup_role(), node::setup_binding()]);
    }
    unwanted
}

/// The objects as one manifest.
#[must_use]
pub fn manifest(values: &Values) -> String {
    documents(&objects(values))
}

/// The generated files.
#[must_use]
pub fn files() -> Vec<File> {
    let values = Values::default();
    let file = |path: &str, text: String| File { path: path.to_owned(), text: format!("{HEAD}{text}") };
    let mut files = vec![
        file("tortie.yaml", manifest(&values)),
        file("node.yaml", documents(&node::objects(&values))),
        file("kustomization.yaml", kustomization()),
    ];
    files.extend(chart::files().into_iter().map(|(path, text)| file(&format!("helm/tortie/{path}"), text)));
    files
}

fn kustomization() -> String {
    let crds = DEFINITIONS.iter().map(|(name, _)| format!("crds/{name}"));
    let resources: Vec<String> = ["rbac.yaml", "node-restriction.yaml"]
        .into_iter()
        .map(str::to_owned)
        .chain(crds)
        .chain(["node.yaml", "definitions.yaml"].map(str::to_owned))
        .collect();
    to_yaml(&json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources,
    }))
}

/// The objects as documents of one manifest.
#[must_use]
pub fn documents(objects: &[Value]) -> String {
    objects.iter().map(to_yaml).collect::<Vec<_>>().join("---\n")
}

/// The documents of a file of this repository. A test shows that each can be read.
fn parsed(text: &str) -> Vec<Value> {
    from_yaml(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inputs_are_complete_and_can_be_read() {
        for (name, text) in DEFINITIONS {
            assert_eq!(from_yaml(text).unwrap().len(), 1, "{name}");
        }
        for text in [RBAC, NODE_RESTRICTION, KEPT_DEFINITIONS] {
            assert_eq!(from_yaml(text).unwrap().len(), text.split("\n---\n").count());
        }
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, DEFINITIONS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }

    #[test]
    fn agents_that_only_enforce_policy_write_nothing_but_reports() {
        let [all, reduced] = [false, true].map(|policy_only| {
            let role = permissions(policy_only).into_iter().find(is_role_of_agents).unwrap();
            let mut permissions = std::collections::BTreeSet::new();
            for rule in role["rules"].as_array().unwrap() {
                let words =
                    |name: &str| -> Vec<String> { serde_json::from_value(rule[name].clone()).unwrap() };
                for resource in words("resources") {
                    permissions.extend(words("verbs").into_iter().map(|verb| (resource.clone(), verb)));
                }
            }
            permissions
        });
        let of_reports = |(resource, _): &&(String, String)| resource == "nodereports";
        let reads = |(_, verb): &&(String, String)| ["get", "list", "watch"].contains(&&**verb);
        assert_eq!(reduced, all.iter().filter(|it| of_reports(it) || reads(it)).cloned().collect());
        assert!(
            all.len() > reduced.len() && reduced.contains(&("nodereports".to_owned(), "update".to_owned()))
        );
    }

    #[test]
    fn the_manifest_is_the_objects() {
        let values = Values { image: "registry.example:5000/tortie:1".to_owned(), ..Values::default() };
        assert_eq!(from_yaml(&manifest(&values)).unwrap(), objects(&values));
        assert!(manifest(&values).contains("registry.example:5000/tortie:1"));
    }

    /// `cargo xtask manifests` rewrites the files, by this test.
    #[test]
    fn generated_files_are_up_to_date() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let rewrite = std::env::var_os("UPDATE_MANIFESTS").is_some();
        if rewrite {
            // No file of an earlier version stays.
            std::fs::remove_dir_all(folder.join("helm")).unwrap();
        }
        for File { path, text } in files() {
            let file = folder.join(&path);
            if rewrite {
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(&file, &text).unwrap();
            }
            let found = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(found == text, "deploy/{path} is not up to date: cargo xtask manifests");
        }
    }
}
