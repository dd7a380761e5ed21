//! What runs in pods: the agents of Linux nodes (ConfigMap and DaemonSet), the controllers, and the DaemonSet that cleans
//! nodes up.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::controllers::deployment;
use crate::template::{CONFIG_MAP, LABEL, Template};
use crate::{NAMESPACE, POOL_NAME, POOL_V6_NAME, Values};

/// The DaemonSet of the agents, their service account, and their label.
pub const DAEMON_SET: &str = "tortie-node";
/// The DaemonSet that removes Tortie from nodes.
pub const CLEANUP_SET: &str = "tortie-cleanup";
/// The role by which the first agent creates the pool.
const SETUP_ROLE: &str = "tortie-node-setup";
/// The role by which agents read the passwords of BGP peers.
const SECRETS_ROLE: &str = "tortie-node-bgp-secrets";

/// The port of the agent's health on the node's loopback address.
pub const HEALTH_PORT: u16 = 9198;

/// Where the folders of the node are in the containers.
const BIN_DIR: &str = "/host/opt/cni/bin";
const CONF_DIR: &str = "/host/etc/cni/net.d";

/// The objects, in the order in which they must be applied.
pub(crate) fn objects(values: &Values) -> Vec<Value> {
    let config = config_map(json!(values.environment()));
    let digest = Sha256::digest(config.to_string());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let template = Template::of(values, &digest);
    let mut objects = Vec::new();
    if !values.policy_only && !values.flannel {
        objects.extend([setup_role(), setup_binding()]);
    }
    if !values.bgp_secrets.is_empty() {
        objects.extend(secrets_role(json!(values.bgp_secrets)));
    }
    let mut agents =
        if values.policy_only { policy_only_daemon_set(&template) } else { daemon_set(&template) };
    if values.flannel {
        beside_flannel(&mut agents["spec"]["template"]["spec"]);
    }
    objects.extend([config, deployment(&template), agents]);
    objects
}

/// The label of nodes that run Tortie in a cluster with flannel.
pub const NETWORK_LABEL: &str = "tortie.io/network";
/// Its value.
pub const NETWORK_LABEL_VALUE: &str = "tortie";
/// Where flanneld writes its networks, which `tortie node cleanup --flannel` reads.
const FLANNEL_DIR: &str = "/run/flannel";

/// Agents run on nodes that have moved from flannel.
fn beside_flannel(spec: &mut Value) {
    spec["nodeSelector"][NETWORK_LABEL] = json!(NETWORK_LABEL_VALUE);
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.push(folder("flannel", FLANNEL_DIR));
    }
    if let Some(mounts) = spec["containers"][0]["volumeMounts"].as_array_mut() {
        mounts.push(json!({"name": "flannel", "mountPath": FLANNEL_DIR, "readOnly": true}));
    }
}

/// The environment variables of agents.
pub(crate) fn config_map(data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(CONFIG_MAP), "data": data})
}

/// Agents may read and follow the Secrets with these names, and no others.
pub(crate) fn secrets_role(names: Value) -> [Value; 2] {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": metadata(SECRETS_ROLE),
        "rules": [{
            "apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": ["get", "list", "watch"],
        }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": metadata(SECRETS_ROLE),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": SECRETS_ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": DAEMON_SET, "namespace": NAMESPACE}],
    });
    [role, binding]
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": NAMESPACE, "labels": {LABEL: DAEMON_SET}})
}

/// Agents may create the default pools, and no other ones: with server-side apply, the API server compares the name.
pub(crate) fn setup_role() -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": SETUP_ROLE},
        "rules": [{
            "apiGroups": ["crd.projectcalico.org", "projectcalico.org"], "resources": ["ippools"],
            "resourceNames": [POOL_NAME, POOL_V6_NAME], "verbs": ["create", "patch"],
        }],
    })
}

pub(crate) fn setup_binding() -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": SETUP_ROLE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": SETUP_ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": DAEMON_SET, "namespace": NAMESPACE}],
    })
}

/// What programs lock that change legacy tables of `iptables`, such as `tortie node cleanup --calico`.
const XTABLES_LOCK: &str = "/run/xtables.lock";

pub(crate) fn daemon_set(template: &Template) -> Value {
    let Template { image, pull_policy, cni_bin_dir, cni_conf_dir, config_digest } = template;
    let install = json!({
        "name": "install-plugin", "image": image, "imagePullPolicy": pull_policy,
        "args": ["node", "install-plugin", "--to", BIN_DIR],
        "securityContext": unprivileged(&[]),
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "volumeMounts": [{"name": "cni-bin", "mountPath": BIN_DIR}],
    });
    let agent = json!({
        "name": "agent", "image": image, "imagePullPolicy": pull_policy,
        "args": ["agent", "--cni-conf-dir", CONF_DIR, "--health-address", format!("127.0.0.1:{HEALTH_PORT}")],
        "env": [{"name": "NODENAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "envFrom": [{"configMapRef": {"name": CONFIG_MAP}}],
        // Netlink and nftables; port 179 of BGP; raw sockets; the namespaces of pods.
        "securityContext": unprivileged(&["NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SYS_ADMIN"]),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        // A new agent waits for the lock and the port of the earlier one, and answers no probe meanwhile.
        "startupProbe": probe("/healthz", 2, 60),
        "livenessProbe": probe("/healthz", 10, 6),
        "readinessProbe": probe("/readyz", 5, 2),
        "volumeMounts": [
            {"name": "run", "mountPath": "/run/tortie"},
            {"name": "lib", "mountPath": "/var/lib/tortie"},
            {"name": "cni-conf", "mountPath": CONF_DIR},
            {"name": "netns", "mountPath": "/run/netns", "mountPropagation": "HostToContainer"},
            {"name": "sysctl", "mountPath": "/host/proc/sys/net"},
            {"name": "xtables-lock", "mountPath": XTABLES_LOCK},
        ],
    });
    let mut spec = pod_spec();
    spec["serviceAccountName"] = json!(DAEMON_SET);
    spec["initContainers"] = json!([install]);
    spec["containers"] = json!([agent]);
    spec["volumes"] = json!([
        folder("run", "/run/tortie"),
        folder("lib", "/var/lib/tortie"),
        folder("cni-bin", cni_bin_dir),
        folder("cni-conf", cni_conf_dir),
        folder("netns", "/run/netns"),
        {"name": "sysctl", "hostPath": {"path": "/proc/sys/net", "type": "Directory"}},
        {"name": "xtables-lock", "hostPath": {"path": XTABLES_LOCK, "type": "FileOrCreate"}},
    ]);
    let labels = json!({LABEL: DAEMON_SET});
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": metadata(DAEMON_SET),
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": labels, "annotations": {"tortie.io/config-digest": config_digest}},
                "spec": spec,
            },
        },
    })
}

/// Where container runtimes keep the results of CNI plugins, in `results`. The runtime may create that folder later.
const CNI_CACHE_DIR: &str = "/var/lib/cni";

/// The DaemonSet of agents that only enforce policy: they install neither a plugin nor a configuration, and see what other plugins
/// have answered.
pub(crate) fn policy_only_daemon_set(template: &Template) -> Value {
    let mut set = daemon_set(template);
    let spec = &mut set["spec"]["template"]["spec"];
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("initContainers");
    }
    let needs = |entry: &Value| !["cni-bin", "cni-conf", "netns"].iter().any(|name| entry["name"] == *name);
    let agent = &mut spec["containers"][0];
    agent["args"] = json!(["agent", "--health-address", format!("127.0.0.1:{HEALTH_PORT}")]);
    agent["securityContext"] = unprivileged(&["NET_ADMIN", "NET_RAW"]);
    if let Some(mounts) = agent["volumeMounts"].as_array_mut() {
        mounts.retain(needs);
        mounts.push(json!({"name": "cni-cache", "mountPath": CNI_CACHE_DIR, "readOnly": true}));
    }
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.retain(needs);
        volumes.push(folder("cni-cache", CNI_CACHE_DIR));
    }
    set
}

/// What all of Tortie's pods on nodes have in common: they run on each Linux node, before its network is ready.
fn pod_spec() -> Value {
    json!({
        "hostNetwork": true,
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
    })
}

fn probe(path: &str, period: u32, failures: u32) -> Value {
    json!({
        "httpGet": {"host": "127.0.0.1", "path": path, "port": HEALTH_PORT},
        "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5,
    })
}

fn folder(name: &str, path: &str) -> Value {
    json!({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
}

/// Root with these capabilities only.
fn unprivileged(capabilities: &[&str]) -> Value {
    let mut context = json!({
        "runAsUser": 0, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    });
    if !capabilities.is_empty() {
        context["capabilities"]["add"] = json!(capabilities);
    }
    context
}

/// The DaemonSet that removes what Tortie leaves on nodes. Its pods are ready when their node is clean. With `for_calico`,
/// pods keep their network, and Calico must run on each node.
#[must_use]
pub fn cleanup(values: &Values, for_calico: bool) -> Value {
    let Values { image, pull_policy, cni_bin_dir, cni_conf_dir, .. } = values;
    let mut container = json!({
        "name": "cleanup", "image": image, "imagePullPolicy": pull_policy,
        "args": [
            "node", "cleanup", "--cni-conf-dir", CONF_DIR, "--cni-bin-dir", BIN_DIR, "--run-dir", "/host/run",
            "--lib-dir", "/host/var/lib",
        ],
        "securityContext": unprivileged(&["NET_ADMIN"]),
        "volumeMounts": [
            {"name": "run", "mountPath": "/host/run"},
            {"name": "lib", "mountPath": "/host/var/lib"},
            {"name": "cni-bin", "mountPath": BIN_DIR},
            {"name": "cni-conf", "mountPath": CONF_DIR},
        ],
    });
    // The folders of container runtimes, unless agents have left nothing there.
    let of_runtimes = [folder("cni-bin", cni_bin_dir), folder("cni-conf", cni_conf_dir)];
    let of_runtimes = of_runtimes.into_iter().filter(|_| !values.policy_only);
    if values.policy_only
        && let Some(mounts) = container["volumeMounts"].as_array_mut()
    {
        mounts.retain(|mount| mount["name"] != "cni-bin" && mount["name"] != "cni-conf");
    }
    if let Some(arguments) = container["args"].as_array_mut().filter(|_| for_calico) {
        arguments.push(json!("--for-calico"));
    }
    let mut spec = pod_spec();
    spec["automountServiceAccountToken"] = json!(false);
    let idle = json!({
        "name": "done", "image": image, "imagePullPolicy": pull_policy, "args": ["node", "idle"],
        "securityContext": unprivileged(&[]),
    });
    spec["initContainers"] = json!([container]);
    spec["containers"] = json!([idle]);
    let volumes = [folder("run", "/run"), folder("lib", "/var/lib")];
    spec["volumes"] = volumes.into_iter().chain(of_runtimes).collect();
    let labels = json!({LABEL: CLEANUP_SET});
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": CLEANUP_SET, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The agent needs no more than these privileges; a change of the list is a decision.
    #[test]
    fn containers_have_few_privileges() {
        let values = Values::default();
        let [.., agents] = &objects(&values)[..] else { panic!("no objects") };
        let spec = &agents["spec"]["template"]["spec"];
        let contexts = |spec: &Value| {
            let containers =
                spec["initContainers"].as_array().into_iter().chain(spec["containers"].as_array());
            containers.flatten().map(|container| container["securityContext"].clone()).collect::<Vec<_>>()
        };
        for context in
            contexts(spec).into_iter().chain(contexts(&cleanup(&values, false)["spec"]["template"]["spec"]))
        {
            assert_eq!(context["privileged"], Value::Null);
            assert_eq!(context["allowPrivilegeEscalation"], false);
            assert_eq!(context["readOnlyRootFilesystem"], true);
            assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
        }
        assert_eq!(spec["initContainers"][0]["securityContext"]["capabilities"]["add"], Value::Null);
        let added = |values: &Values| {
            let [.., agents] = &objects(values)[..] else { panic!("no objects") };
            agents["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
                .clone()
        };
        assert_eq!(sorted(&added(&values)), ["NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SYS_ADMIN"]);
        let policy_only = Values {
            policy_only: true,
            pod_interface_prefix: Some("eni,veth".to_owned()),
            ..Values::default()
        };
        assert_eq!(sorted(&added(&policy_only)), ["NET_ADMIN", "NET_RAW"]);
        let cleanup =
            &contexts(&cleanup(&values, false)["spec"]["template"]["spec"])[0]["capabilities"]["add"];
        assert_eq!(sorted(cleanup), ["NET_ADMIN"]);
    }

    fn sorted(names: &Value) -> Vec<&str> {
        let mut names: Vec<&str> = names.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Agents that only enforce policy get no folder of the container runtime but what plugins have answered, and create no pool.
    #[test]
    fn agents_for_policy_only_install_nothing() {
        let values = Values {
            policy_only: true,
            pod_interface_prefix: Some("eni,veth".to_owned()),
            ..Values::default()
        };
        let all = objects(&values);
        let kinds: Vec<_> = all.iter().map(|object| object["kind"].as_str().unwrap_or_default()).collect();
        assert_eq!(kinds, ["ConfigMap", "Deployment", "DaemonSet"]);
        let environment = json!({
            "TORTIE_STORE": "kubernetes", "RUST_LOG": "info", "TORTIE_POLICY_ONLY": "true",
            "TORTIE_POD_INTERFACE_PREFIX": "eni,veth",
        });
        assert_eq!(all[0]["data"], environment);
        let spec = &all[2]["spec"]["template"]["spec"];
        assert_eq!(spec["initContainers"], Value::Null);
        let names = |list: &Value| {
            let names = list.as_array().into_iter().flatten().filter_map(|it| it["name"].as_str());
            names.map(str::to_owned).collect::<Vec<_>>()
        };
        let expected = ["run", "lib", "sysctl", "xtables-lock", "cni-cache"];
        assert_eq!(names(&spec["volumes"]), expected);
        assert_eq!(names(&spec["containers"][0]["volumeMounts"]), expected);
        assert_eq!(spec["containers"][0]["volumeMounts"][4]["readOnly"], true);
        assert!(!spec.to_string().contains("--cni-conf-dir"));
        for (of, expected) in
            [(&values, vec!["run", "lib"]), (&Values::default(), vec!["run", "lib", "cni-bin", "cni-conf"])]
        {
            let spec = &cleanup(of, false)["spec"]["template"]["spec"];
            assert_eq!(names(&spec["volumes"]), expected);
            assert_eq!(names(&spec["initContainers"][0]["volumeMounts"]), expected);
        }
        let unwanted = crate::unwanted(&values);
        assert!(unwanted.contains(&setup_role()) && unwanted.contains(&setup_binding()));
    }

    /// Agents run where flannel does not, and have neither a pool of their own nor its permissions.
    #[test]
    fn agents_beside_flannel_run_on_labelled_nodes() {
        let values = Values {
            flannel: true,
            ip_autodetection_method: Some("first-found".to_owned()),
            ..Values::default()
        };
        let all = objects(&values);
        let [config, _, agents] = &all[all.len() - 3..] else { panic!("{all:?}") };
        let environment = json!({
            "TORTIE_STORE": "kubernetes", "RUST_LOG": "info", "TORTIE_FLANNEL": "true",
            "TORTIE_IP_AUTODETECTION_METHOD": "first-found",
        });
        assert_eq!(config["data"], environment);
        let spec = &agents["spec"]["template"]["spec"];
        let labels = json!({"kubernetes.io/os": "linux", NETWORK_LABEL: NETWORK_LABEL_VALUE});
        assert_eq!(spec["nodeSelector"], labels);
        assert!(spec["volumes"].to_string().contains(FLANNEL_DIR));
        assert!(spec["containers"][0]["volumeMounts"].to_string().contains(FLANNEL_DIR));
        let [.., others] = &objects(&Values::default())[..] else { panic!("no objects") };
        assert_eq!(others["spec"]["template"]["spec"]["nodeSelector"], json!({"kubernetes.io/os": "linux"}));
    }

    /// Without names, a rule would allow every Secret.
    #[test]
    fn agents_may_read_the_named_secrets_only() {
        let of_secrets = |values: &Values| {
            let rules = |object: &Value| object["rules"].as_array().cloned().unwrap_or_default();
            let all = objects(values).iter().flat_map(rules).collect::<Vec<_>>();
            all.into_iter().filter(|rule| rule["resources"] == json!(["secrets"])).collect::<Vec<_>>()
        };
        assert_eq!(of_secrets(&Values::default()), Vec::<Value>::new());
        let values = Values { bgp_secrets: vec!["one".to_owned(), "two".to_owned()], ..Values::default() };
        let [rule] = &of_secrets(&values)[..] else { panic!("{:?}", of_secrets(&values)) };
        assert_eq!(rule["resourceNames"], json!(["one", "two"]));
    }

    #[test]
    fn pods_are_replaced_when_the_configuration_changes() {
        let digest =
            |values: &Values| objects(values)[4]["spec"]["template"]["metadata"]["annotations"].clone();
        let other = Values { log_level: "debug".to_owned(), ..Values::default() };
        assert_eq!(digest(&Values::default()), digest(&Values::default()));
        assert_ne!(digest(&Values::default()), digest(&other));
    }
}
