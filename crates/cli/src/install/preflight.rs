//! What an installation depends on: the addresses of pods, and other networks for pods.

use std::net::Ipv4Addr;
use std::str::FromStr;

use anyhow::Context;
use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::Value;
use tortie_api::calico::ClusterInformation;
use tortie_deploy::{DAEMON_SET, NETWORK_LABEL, NETWORK_LABEL_VALUE};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes};

use super::cluster::{get, list};
use super::flannel;

/// DaemonSets of other networks for pods.
const OTHERS: [&str; 10] = [
    "antrea-agent",
    "aws-node",
    "calico-node",
    "canal",
    "cilium",
    "kube-flannel-ds",
    "kube-router",
    "ovnkube-node",
    "rke2-canal",
    "weave-net",
];

/// What the cluster has.
#[derive(Debug, Default)]
pub(super) struct Found {
    nodes: Vec<Value>,
    /// The group of Calico's kinds.
    pub(super) group: CalicoGroup,
    pub(super) pools: Vec<Value>,
    /// ClusterInformation `default`.
    information: Option<Value>,
    daemon_sets: Vec<Value>,
    /// The Service `kubernetes`.
    service: Option<Value>,
    /// The ConfigMap of kubeadm.
    kubeadm: Option<Value>,
}

impl Found {
    /// The DaemonSets of flannel.
    pub(super) fn flannel(&self) -> impl Iterator<Item = &Value> {
        self.daemon_sets.iter().filter(|set| set["metadata"]["name"] == flannel::DAEMON_SET)
    }

    /// The DaemonSet of Tortie's agents.
    fn agents(&self) -> Option<&Value> {
        self.daemon_sets.iter().find(|set| set["metadata"]["name"] == DAEMON_SET)
    }

    /// Whether flannel is gone, and agents of an installation with `--flannel` and its pools are there.
    pub(super) fn has_moved(&self) -> bool {
        let is_kept = self.agents().is_some_and(runs_on_labelled_nodes);
        is_kept && self.flannel().next().is_none() && !flannel::networks(&[], &self.pools).is_empty()
    }

    /// Whether a node runs Tortie in a cluster with flannel.
    pub(super) fn has_moved_nodes(&self) -> bool {
        self.nodes.iter().any(|node| node["metadata"]["labels"][NETWORK_LABEL] == NETWORK_LABEL_VALUE)
    }
}

pub(super) async fn read(cluster: &Kubernetes) -> anyhow::Result<Found> {
    let group = cluster.group().await?;
    let read = async {
        Ok::<_, tortie_store::kubernetes::ObjectError>(Found {
            nodes: list(cluster, "/api/v1/nodes").await?,
            group,
            pools: list(cluster, &format!("/apis/{group}/ippools")).await?,
            information: get(cluster, &format!("/apis/{group}/clusterinformations/default")).await?,
            daemon_sets: list(cluster, "/apis/apps/v1/daemonsets").await?,
            service: get(cluster, "/api/v1/namespaces/default/services/kubernetes").await?,
            kubeadm: get(cluster, "/api/v1/namespaces/kube-system/configmaps/kubeadm-config").await?,
        })
    };
    read.await.context("reading the cluster")
}

/// The pool, and what the operator should know.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) pool: Ipv4Net,
    /// The IPv6 pool, if pods get IPv6 addresses.
    pub(super) pool_v6: Option<Ipv6Net>,
    /// The pools in words.
    pub(super) described: String,
    pub(super) warnings: Vec<String>,
}

/// Decides which addresses pods get; or why Tortie cannot be installed.
pub(super) fn decide(
    found: &Found,
    (wanted, wanted_v6): (Option<Ipv4Net>, Option<Ipv6Net>),
    force: bool,
) -> Result<Decision, String> {
    check_others(found, force)?;
    if let Some(agents) = found.agents().filter(|agents| !force && runs_on_labelled_nodes(agents)) {
        return Err(format!(
            "DaemonSet {}/{DAEMON_SET} is of an installation with --flannel, whose pods have the addresses of their nodes' spec.podCIDRs; \
             use --flannel again, or remove it first (tortie uninstall)",
            agents["metadata"]["namespace"].as_str().unwrap_or_default()
        ));
    }
    if let Some(information) = found.information.as_ref().filter(|_| !force) {
        check_datastore(information)?;
    }
    let existing: Vec<Ipv4Net> = networks(&found.pools);
    let (pool, mut described) = match (wanted, existing.as_slice()) {
        (None, [first, ..]) => (*first, format!("the cluster's IPPools ({})", words(&existing))),
        (Some(wanted), [_, ..]) if !existing.contains(&wanted) => {
            return Err(format!(
                "--pool {wanted} would have no effect: the cluster has IPPools already ({}); add or change pools with \
                 tortie apply",
                words(&existing)
            ));
        }
        (Some(wanted), _) => (wanted, wanted.to_string()),
        (None, []) => match kubeadm_pool(found)? {
            Some(pool) => (pool, format!("{pool}, the pod network of kubeadm")),
            None => {
                return Err(format!(
                    "--pool is missing: the cluster has no IPPool, and kubeadm names no IPv4 pod network. Use the network \
                     that kube-controller-manager has as --cluster-cidr{}",
                    hint(found)
                ));
            }
        },
    };
    let pool_v6 = decide_v6(found, wanted_v6)?;
    if let Some(pool) = pool_v6 {
        described.push_str(&format!(" and {pool}"));
    }
    for (what, address) in addresses(found) {
        if pool.contains(&address) {
            return Err(format!(
                "the pool {pool} contains {address}, the address of {what}; choose another one with --pool"
            ));
        }
    }
    let all = if existing.is_empty() { vec![pool] } else { existing };
    let mut warnings: Vec<String> = pod_networks(found)
        .filter(|(_, network)| !all.iter().any(|pool| pool.contains(network)))
        .map(|(node, network)| {
            format!(
                "node {node} has the pod network {network}, which is not in {}; kube-proxy and the controller manager \
                 may be configured for another network",
                words(&all)
            )
        })
        .collect();
    let is_linux = |node: &&Value| node["metadata"]["labels"]["kubernetes.io/os"] == "linux";
    if !found.nodes.iter().any(|node| is_linux(&node)) {
        warnings.push("the cluster has no Linux node yet".to_owned());
    }
    Ok(Decision { pool, pool_v6, described, warnings })
}

/// What a cluster with flannel does not need; or why Tortie cannot be part of it.
pub(super) fn decide_flannel(found: &Found, objects: &[Value], force: bool) -> Result<Decision, String> {
    let without_flannel =
        found.daemon_sets.iter().filter(|set| set["metadata"]["name"] != flannel::DAEMON_SET);
    let others = Found { daemon_sets: without_flannel.cloned().collect(), ..Found::default() };
    check_others(&others, force)?;
    if let Some(information) = found.information.as_ref().filter(|_| !force) {
        check_datastore(information)?;
    }
    check_labels(found, force)?;
    found.flannel().filter(|_| !force).try_for_each(flannel::check_daemon_set)?;
    let networks: Vec<&str> = flannel::networks(objects, &found.pools).into_iter().collect();
    let described = format!("their node's spec.podCIDRs, in flannel's network ({})", networks.join(", "));
    Ok(Decision { pool: Ipv4Net::default(), pool_v6: None, described, warnings: Vec::new() })
}

/// Whether agents run only on nodes with the label, as `--flannel` installs them.
fn runs_on_labelled_nodes(agents: &Value) -> bool {
    agents["spec"]["template"]["spec"]["nodeSelector"][NETWORK_LABEL] == NETWORK_LABEL_VALUE
}

/// Refuses to take the agents away from nodes of an installation without `--flannel`: they would have no label.
fn check_labels(found: &Found, force: bool) -> Result<(), String> {
    let Some(agents) = found.agents().filter(|agents| !force && !runs_on_labelled_nodes(agents)) else {
        return Ok(());
    };
    let is_left = |node: &&Value| {
        let labels = &node["metadata"]["labels"];
        labels["kubernetes.io/os"] == "linux" && labels[NETWORK_LABEL] != NETWORK_LABEL_VALUE
    };
    let left = found.nodes.iter().filter(is_left).filter_map(|node| node["metadata"]["name"].as_str());
    let left: Vec<&str> = left.collect();
    match left.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "DaemonSet {}/{DAEMON_SET} runs without --flannel, and would go from nodes without the label {NETWORK_LABEL} ({}); label those \
             that run Tortie (kubectl label node NODE {NETWORK_LABEL}={NETWORK_LABEL_VALUE}), and use --force if flannel runs on the others",
            agents["metadata"]["namespace"].as_str().unwrap_or_default(),
            left.join(", ")
        )),
    }
}

/// Refuses other networks for pods.
fn check_others(found: &Found, force: bool) -> Result<(), String> {
    let mut other = found.daemon_sets.iter().filter_map(|one| {
        let name = one["metadata"]["name"].as_str()?;
        OTHERS
            .contains(&name)
            .then(|| format!("{}/{name}", one["metadata"]["namespace"].as_str().unwrap_or_default()))
    });
    let only_policy = found.daemon_sets.iter().find(|one| is_policy_only(one));
    if let Some(one) = only_policy.filter(|_| !force) {
        return Err(format!(
            "DaemonSet {}/{DAEMON_SET} is of an installation that only enforces policy, beside the plugin that connects the pods; use \
             --policy-only again, or remove it first (tortie uninstall)",
            one["metadata"]["namespace"].as_str().unwrap_or_default()
        ));
    }
    match other.find(|_| !force) {
        Some(other) => Err(format!(
            "DaemonSet {other} provides the pods' network; remove it first, or use --force to install Tortie beside it"
        )),
        None => Ok(()),
    }
}

/// Whether it has the agents of an installation that only enforces policy: they install no plugin.
fn is_policy_only(daemon_set: &Value) -> bool {
    daemon_set["metadata"]["name"] == DAEMON_SET
        && daemon_set["spec"]["template"]["spec"]["initContainers"].as_array().is_none_or(Vec::is_empty)
}

/// DaemonSets that connect no pods and enforce policy: GKE's Dataplane V2, and Azure's agent.
const POLICY_AGENTS: [&str; 2] = ["anetd", "azure-npm"];

/// What another CNI plugin does not need; or why Tortie cannot enforce policy beside it.
pub(super) fn decide_policy_only(found: &Found, force: bool) -> Result<Decision, String> {
    let sets = || {
        found.daemon_sets.iter().filter_map(|one| {
            let namespace = one["metadata"]["namespace"].as_str().unwrap_or_default();
            Some((one, namespace, one["metadata"]["name"].as_str()?))
        })
    };
    for (one, namespace, name) in sets().filter(|_| !force) {
        match name {
            DAEMON_SET if !is_policy_only(one) => {
                return Err(format!(
                    "DaemonSet {namespace}/{name} is of an installation whose plugin connects the pods; remove it first (tortie uninstall), and \
                     let the other plugin connect the pods again"
                ));
            }
            "kube-flannel-ds" => {
                return Err(format!(
                    "DaemonSet {namespace}/{name} connects pods by a bridge, where Tortie enforces no policy; install Tortie without \
                     --policy-only, with --flannel, or use --force"
                ));
            }
            "aws-node" => {}
            _ if OTHERS.contains(&name) || POLICY_AGENTS.contains(&name) => {
                return Err(format!(
                    "DaemonSet {namespace}/{name} enforces policy itself; remove it first, or use --force to install Tortie beside it"
                ));
            }
            _ => {}
        }
    }
    if let Some(information) = found.information.as_ref().filter(|_| !force) {
        check_datastore(information)?;
    }
    let mut warnings = Vec::new();
    let pools: Vec<&str> = found.pools.iter().filter_map(|pool| pool["metadata"]["name"].as_str()).collect();
    if !pools.is_empty() {
        warnings.push(format!(
            "the cluster has IPPools ({}), which have no effect on nodes whose agents only enforce policy",
            pools.join(", ")
        ));
    }
    let (pool, pool_v6) = (Ipv4Net::default(), None);
    Ok(Decision { pool, pool_v6, described: "another CNI plugin".to_owned(), warnings })
}

/// Decides which IPv6 addresses pods get, if any.
fn decide_v6(found: &Found, wanted: Option<Ipv6Net>) -> Result<Option<Ipv6Net>, String> {
    let existing: Vec<Ipv6Net> = networks(&found.pools);
    match (wanted, existing.as_slice()) {
        (Some(wanted), [_, ..]) if !existing.contains(&wanted) => Err(format!(
            "--pool-v6 {wanted} would have no effect: the cluster has IPv6 IPPools already ({}); add or change pools with tortie \
             apply",
            words(&existing)
        )),
        (Some(wanted), _) => Ok(Some(wanted)),
        (None, [first, ..]) => Ok(Some(*first)),
        (None, []) => {
            match kubeadm_networks(found)?.into_iter().find_map(|text| text.parse::<Ipv6Net>().ok()) {
                Some(pool) => super::pool_v6(&pool.to_string()).map(Some),
                None => Ok(None),
            }
        }
    }
}

/// The networks of a family that pools have.
fn networks<N: FromStr>(pools: &[Value]) -> Vec<N> {
    pools.iter().filter_map(|pool| pool["spec"]["cidr"].as_str()?.parse().ok()).collect()
}

/// Agents wait while the datastore is locked, and may misread objects of another version of Calico.
fn check_datastore(information: &Value) -> Result<(), String> {
    if ClusterInformation::is_locked(information) {
        return Err("the datastore is locked (datastoreReady of ClusterInformation default is false), as calicoctl does while it \
             migrates one, so agents would only wait; unlock it first (tortie datastore unlock), or use --force"
            .to_owned());
    }
    match ClusterInformation::unknown_version(information) {
        None => Ok(()),
        Some(version) => Err(format!(
            "Calico {version} used this cluster (calicoVersion of ClusterInformation default), and Tortie knows v3.30 to v3.32; \
             bring Calico to one of these versions first, or use --force"
        )),
    }
}

fn words<N: ToString>(networks: &[N]) -> String {
    networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The pod network that kubeadm was told.
fn kubeadm_pool(found: &Found) -> Result<Option<Ipv4Net>, String> {
    match kubeadm_networks(found)?.into_iter().find_map(|text| text.parse::<Ipv4Net>().ok()) {
        None => Ok(None),
        Some(pool) => super::pool(&pool.to_string()).map(Some),
    }
}

/// The pod networks that kubeadm was told, of both families.
fn kubeadm_networks(found: &Found) -> Result<Vec<String>, String> {
    let Some(text) = found.kubeadm.as_ref().and_then(|map| map["data"]["ClusterConfiguration"].as_str())
    else {
        return Ok(Vec::new());
    };
    let documents = tortie_api::from_yaml(text);
    let documents =
        documents.map_err(|problem| format!("ConfigMap kube-system/kubeadm-config: {problem}"))?;
    let networks = documents.first().and_then(|document| document["networking"]["podSubnet"].as_str());
    Ok(networks.unwrap_or_default().split(',').map(|text| text.trim().to_owned()).collect())
}

/// The pod networks of nodes.
fn pod_networks(found: &Found) -> impl Iterator<Item = (String, Ipv4Net)> {
    found.nodes.iter().filter_map(|node| {
        let network = node["spec"]["podCIDR"].as_str()?.parse().ok()?;
        Some((node["metadata"]["name"].as_str()?.to_owned(), network))
    })
}

fn hint(found: &Found) -> String {
    pod_networks(found)
        .next()
        .map_or_else(String::new, |(node, network)| format!("; {network} of node {node} is a part of it"))
}

/// Addresses that pods must not have.
fn addresses(found: &Found) -> impl Iterator<Item = (String, Ipv4Addr)> {
    let service = found.service.iter().filter_map(|service| {
        Some((
            "the Service default/kubernetes".to_owned(),
            service["spec"]["clusterIP"].as_str()?.parse().ok()?,
        ))
    });
    let nodes = found.nodes.iter().flat_map(|node| {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let addresses = node["status"]["addresses"].as_array().into_iter().flatten();
        addresses
            .filter_map(move |one| Some((format!("node {name}"), one["address"].as_str()?.parse().ok()?)))
    });
    service.chain(nodes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, pods: &str) -> Value {
        json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux"}}, "spec": {"podCIDR": pods},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        })
    }

    fn kubeadm(networks: &str) -> Option<Value> {
        let text = format!("kind: ClusterConfiguration\nnetworking:\n  podSubnet: {networks}\n");
        Some(json!({"data": {"ClusterConfiguration": text}}))
    }

    fn set(name: &str) -> Value {
        json!({"metadata": {"namespace": "kube-system", "name": name}})
    }

    fn information(version: &str, ready: bool) -> Option<Value> {
        Some(json!({"spec": {"calicoVersion": version, "datastoreReady": ready}}))
    }

    #[test]
    fn pools_come_from_the_operator_the_cluster_or_kubeadm() {
        let net = |text: &str| text.parse::<Ipv4Net>().unwrap();
        let pools = vec![json!({"spec": {"cidr": "10.1.0.0/16"}})];
        let one = || Found { nodes: vec![node("one", "10.244.0.0/24")], ..Found::default() };
        for (found, wanted, expected) in [
            (Found { kubeadm: kubeadm("10.244.0.0/16"), ..one() }, None, Ok("10.244.0.0/16")),
            (Found { kubeadm: kubeadm("fd00::/56,10.244.0.0/16"), ..one() }, None, Ok("10.244.0.0/16")),
            (Found { kubeadm: kubeadm("fd00::/56"), ..one() }, None, Err("--pool is missing")),
            (one(), None, Err("10.244.0.0/24 of node one is a part of it")),
            (one(), Some("10.244.0.0/16"), Ok("10.244.0.0/16")),
            (Found { pools: pools.clone(), ..one() }, None, Ok("10.1.0.0/16")),
            (Found { pools: pools.clone(), ..one() }, Some("10.1.0.0/16"), Ok("10.1.0.0/16")),
            (Found { pools, ..one() }, Some("10.2.0.0/16"), Err("would have no effect")),
            (one(), Some("192.0.2.0/24"), Err("the address of node one")),
            (
                Found { service: Some(json!({"spec": {"clusterIP": "10.96.0.1"}})), ..one() },
                Some("10.96.0.0/12"),
                Err("the address of the Service"),
            ),
            (
                Found { daemon_sets: vec![set("calico-node")], ..one() },
                Some("10.244.0.0/16"),
                Err("calico-node provides"),
            ),
            (
                Found { information: information("v3.29.3", true), ..one() },
                Some("10.244.0.0/16"),
                Err("Calico v3.29.3 used this cluster"),
            ),
            (
                Found { information: information("v3.31.0", false), ..one() },
                Some("10.244.0.0/16"),
                Err("the datastore is locked"),
            ),
            (
                Found { information: information("v3.31.0", true), ..one() },
                Some("10.244.0.0/16"),
                Ok("10.244.0.0/16"),
            ),
            (
                Found { daemon_sets: vec![set("kube-proxy")], ..one() },
                Some("10.244.0.0/16"),
                Ok("10.244.0.0/16"),
            ),
        ] {
            let decision = decide(&found, (wanted.map(net), None), false);
            match (&decision, expected) {
                (Ok(decision), Ok(expected)) => assert_eq!(decision.pool, net(expected), "{found:?}"),
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                _ => panic!("{found:?} {wanted:?}: {decision:?}"),
            }
        }
        let information = information("v3.29.3", false);
        let beside = Found { daemon_sets: vec![set("calico-node")], information, ..one() };
        assert!(decide(&beside, (Some(net("10.244.0.0/16")), None), true).is_ok());
    }

    #[test]
    fn policy_only_needs_a_plugin_that_routes_and_enforces_no_policy() {
        let mut own = set(DAEMON_SET);
        let only_policy =
            Found { daemon_sets: vec![own.clone()], kubeadm: kubeadm("10.244.0.0/16"), ..Found::default() };
        let refused = decide(&only_policy, (None, None), false).unwrap_err();
        assert!(refused.contains("use --policy-only again"), "{refused}");
        assert!(decide(&only_policy, (None, None), true).is_ok());
        let plugin =
            Found { daemon_sets: vec![set("aws-node"), set("kube-proxy"), own.clone()], ..Found::default() };
        assert_eq!(decide_policy_only(&plugin, false).unwrap().warnings, Vec::<String>::new());
        own["spec"]["template"]["spec"]["initContainers"] = json!([{}]);
        for (daemon_set, problem) in [
            (own, "tortie uninstall"),
            (set("kube-flannel-ds"), "connects pods by a bridge"),
            (set("calico-node"), "enforces policy itself"),
            (set("cilium"), "enforces policy itself"),
            (set("anetd"), "enforces policy itself"),
            (set("azure-npm"), "enforces policy itself"),
        ] {
            let found = Found { daemon_sets: vec![daemon_set], ..Found::default() };
            let refused = decide_policy_only(&found, false).unwrap_err();
            assert!(refused.contains(problem), "{refused}");
            assert!(decide_policy_only(&found, true).is_ok());
        }
        let locked = Found { information: information("v3.31.0", false), ..Found::default() };
        assert!(decide_policy_only(&locked, false).unwrap_err().contains("the datastore is locked"));
        let pools = vec![json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.1.0.0/16"}})];
        let warnings = decide_policy_only(&Found { pools, ..Found::default() }, false).unwrap().warnings;
        assert!(warnings[0].contains("IPPools (default)"), "{warnings:?}");
    }

    /// Agents of one installation would read addresses of another kind, or go from nodes without the label.
    #[test]
    fn an_installation_keeps_its_kind_beside_flannel() {
        let mut agents = set(DAEMON_SET);
        agents["spec"]["template"]["spec"]["initContainers"] = json!([{}]);
        let mut with_flannel = agents.clone();
        with_flannel["spec"]["template"]["spec"]["nodeSelector"] =
            json!({NETWORK_LABEL: NETWORK_LABEL_VALUE});
        let spec = json!({"cidr": "10.244.0.0/16", "assignmentMode": "Manual"});
        let pools = vec![json!({"metadata": {"name": "flannel"}, "spec": spec})];
        let labelled = || {
            let mut node = node("one", "10.244.0.0/24");
            node["metadata"]["labels"][NETWORK_LABEL] = json!(NETWORK_LABEL_VALUE);
            node
        };
        let of = |agents: &Value, nodes: Vec<Value>| Found {
            daemon_sets: vec![agents.clone()],
            pools: pools.clone(),
            nodes,
            ..Found::default()
        };
        let refused = decide(&of(&with_flannel, vec![]), (None, None), false).unwrap_err();
        assert!(refused.contains("use --flannel again"), "{refused}");
        assert!(decide(&of(&with_flannel, vec![]), (None, None), true).is_ok());
        assert!(decide(&of(&agents, vec![]), (None, None), false).is_ok());
        let decided = decide_flannel(&of(&with_flannel, vec![labelled()]), &[], false).unwrap();
        assert!(decided.described.contains("10.244.0.0/16"), "{decided:?}");
        assert!(decide_flannel(&of(&agents, vec![labelled()]), &[], false).is_ok());
        let unlabelled = of(&agents, vec![labelled(), node("two", "10.244.1.0/24")]);
        let refused = decide_flannel(&unlabelled, &[], false).unwrap_err();
        assert!(refused.contains("(two)") && refused.contains("kubectl label node"), "{refused}");
        assert!(decide_flannel(&unlabelled, &[], true).is_ok());
    }

    #[test]
    fn ipv6_pools_come_from_the_operator_the_cluster_or_kubeadm() {
        let existing = vec![json!({"spec": {"cidr": "10.1.0.0/16"}}), json!({"spec": {"cidr": "fd01::/56"}})];
        let existing = || Found { pools: existing.clone(), ..Found::default() };
        let both = || Found { kubeadm: kubeadm("10.244.0.0/16,fd02::/56"), ..Found::default() };
        for (found, wanted, expected) in [
            (Found { kubeadm: kubeadm("10.244.0.0/16"), ..Found::default() }, None, Ok(None)),
            (both(), None, Ok(Some("fd02::/56"))),
            (both(), Some("fd03::/56"), Ok(Some("fd03::/56"))),
            (existing(), None, Ok(Some("fd01::/56"))),
            (existing(), Some("fd01::/56"), Ok(Some("fd01::/56"))),
            (existing(), Some("fd03::/56"), Err("--pool-v6 fd03::/56 would have no effect")),
            (
                Found { kubeadm: kubeadm("10.244.0.0/16,fe80::/64"), ..Found::default() },
                None,
                Err("no pod can have"),
            ),
        ] {
            let wanted = wanted.map(|text: &str| text.parse().unwrap());
            let decision = decide(&found, (None, wanted), false);
            match (decision, expected) {
                (Ok(decision), Ok(expected)) => {
                    assert_eq!(decision.pool_v6, expected.map(|text| text.parse().unwrap()), "{found:?}");
                    assert_eq!(decision.described.contains(" and fd"), expected.is_some(), "{decision:?}");
                }
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                (decision, _) => panic!("{found:?}: {decision:?}"),
            }
        }
    }

    #[test]
    fn a_pool_that_does_not_fit_the_nodes_is_a_warning() {
        let found = Found { nodes: vec![node("one", "10.244.0.0/24")], ..Found::default() };
        let warnings =
            |pool: &str| decide(&found, (Some(pool.parse().unwrap()), None), false).unwrap().warnings;
        assert_eq!(warnings("10.244.0.0/16"), Vec::<String>::new());
        assert!(warnings("10.1.0.0/16")[0].contains("node one has the pod network 10.244.0.0/24"));
        let empty = decide(&Found::default(), (Some("10.1.0.0/16".parse().unwrap()), None), false).unwrap();
        assert!(empty.warnings[0].contains("no Linux node"));
    }
}
