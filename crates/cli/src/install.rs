//! `tortie install`: prints the manifests of an installation, or applies them and waits until every node is ready.

pub(crate) mod cluster;
mod flannel;
mod preflight;
pub(crate) mod rollout;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::Value;
use tokio::time::Instant;
use tortie_agent::AddressMethod;
use tortie_deploy::{ChainedPlugins, DEFAULT_IMAGE, DEFAULT_POOL, Encapsulation, Values};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes};

use crate::output;
use cluster::{ClusterArguments, MANAGER, name_of, path_of};
use rollout::Rollout;

/// The interval of looks at the API server.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);
/// How long a definition may take until the API server serves its kind.
const DEFINITION_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Install {
    /// Print the manifests and change nothing
    #[arg(long)]
    dry_run: bool,
    /// The addresses of pods. By default, the pools that the cluster has; otherwise the pod network of kubeadm
    #[arg(long, value_name = "CIDR", value_parser = pool)]
    pool: Option<Ipv4Net>,
    /// The IPv6 addresses of pods, for pods of both families. By default, the IPv6 pools that the cluster has; otherwise the
    /// IPv6 pod network of kubeadm
    #[arg(long, value_name = "CIDR", value_parser = pool_v6)]
    pool_v6: Option<Ipv6Net>,
    /// Whether pods use their node's address outside of the cluster
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set, default_value_t = true)]
    nat_outgoing: bool,
    /// How packets of these pools travel between nodes: vxlan, vxlan-cross-subnet (VXLAN between nodes of different networks
    /// only), or none, which needs --bgp, --direct-routes or routes of your own
    #[arg(long, value_name = "NAME", value_parser = encapsulation, default_value = "vxlan")]
    encapsulation: Encapsulation,
    /// Run a BGP speaker on each Linux node, as BGPConfiguration, BGPPeer and BGPFilter say; without any of them, in a mesh
    #[arg(long)]
    bgp: bool,
    /// With --encapsulation none: nodes, which must be in one network, reach pods by way of each other's nodes (host-gw)
    #[arg(long, conflicts_with = "bgp")]
    direct_routes: bool,
    /// Only enforce policy: another CNI plugin, such as AWS VPC CNI, GKE's plugin, Azure CNI in transparent mode, or ptp, connects the
    /// pods of the cluster's Linux nodes
    #[arg(long, conflicts_with_all = [
        "pool", "pool_v6", "nat_outgoing", "encapsulation", "bgp", "direct_routes", "ip_autodetection_method",
        "ip6_autodetection_method", "cni_bin_dir", "cni_conf_dir", "cni_plugins",
    ])]
    policy_only: bool,
    /// Move nodes from flannel (vxlan or host-gw) to Tortie one by one: agents run on Linux nodes with the label
    /// tortie.io/network=tortie, and their pods keep the addresses of spec.podCIDRs. Reads flannel's configuration in the cluster
    #[arg(long, conflicts_with_all = [
        "pool", "pool_v6", "nat_outgoing", "encapsulation", "bgp", "direct_routes", "policy_only",
    ])]
    flannel: bool,
    /// With --flannel: a copy of flannel's net-conf.json, if no DaemonSet kube-flannel-ds has one
    #[arg(long, value_name = "FILE", requires = "flannel")]
    flannel_config: Option<PathBuf>,
    /// With --policy-only: the prefixes of the names of pods' interfaces, separated by commas; by default, eni,gke,azv,cali
    #[arg(long, value_name = "PREFIX", requires = "policy_only")]
    pod_interface_prefix: Option<String>,
    /// How Linux nodes find their own IPv4 address: kubernetes-internal-ip (what the kubelet reports), first-found,
    /// can-reach=HOST, interface=REGEX,…, skip-interface=REGEX,… or cidr=NETWORK,…
    #[arg(long, value_name = "METHOD")]
    ip_autodetection_method: Option<AddressMethod>,
    /// The same for their IPv6 address
    #[arg(long, value_name = "METHOD")]
    ip6_autodetection_method: Option<AddressMethod>,
    /// A Secret in the namespace tortie-system with passwords of BGP peers, which agents may read; can be repeated
    #[arg(long, value_name = "NAME", requires = "bgp", value_parser = object_name)]
    bgp_secret: Vec<String>,
    /// The image of agent and plugin
    #[arg(long, value_name = "NAME", default_value = DEFAULT_IMAGE)]
    image: String,
    /// When kubelets pull the image
    #[arg(long, value_name = "POLICY", value_parser = ["Always", "IfNotPresent", "Never"], default_value = "IfNotPresent")]
    pull_policy: String,
    /// What agents log, in the syntax of RUST_LOG
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
    /// Where each agent serves metrics to other machines, such as 0.0.0.0:9199
    #[arg(long, value_name = "ADDRESS")]
    metrics_address: Option<SocketAddr>,
    /// Serve Services on Linux nodes in the place of kube-proxy. Agents then need the address of the API server itself (--api-server).
    /// They leave Services to kube-proxy on each node where it runs or has left rules
    #[arg(long, requires = "api_server", conflicts_with = "policy_only")]
    services: bool,
    /// The API server for agents, if nodes cannot reach the Service `kubernetes` before Tortie runs
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    api_server: Option<(String, u16)>,
    /// Where the container runtime looks for plugins
    #[arg(long, value_name = "FOLDER", default_value = "/opt/cni/bin")]
    cni_bin_dir: String,
    /// Where the container runtime looks for network configurations
    #[arg(long, value_name = "FOLDER", default_value = "/etc/cni/net.d")]
    cni_conf_dir: String,
    /// The plugins that the container runtime calls after Tortie's, as a JSON list, such as
    /// [{"type": "bandwidth", "capabilities": {"bandwidth": true}}]
    #[arg(long, value_name = "JSON", default_value = "", hide_default_value = true)]
    cni_plugins: ChainedPlugins,
    /// Install although another network for pods is there, or the datastore is locked or of an unknown version of Calico
    #[arg(long)]
    force: bool,
    /// Do not wait until the nodes are ready
    #[arg(long)]
    no_wait: bool,
    /// How long to wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// Reads an encapsulation. All of Calico's are known, so that an unsupported one gets a reason.
pub(crate) fn encapsulation(text: &str) -> Result<Encapsulation, String> {
    match text {
        "vxlan" => Ok(Encapsulation::Vxlan),
        "vxlan-cross-subnet" => Ok(Encapsulation::VxlanCrossSubnet),
        "none" => Ok(Encapsulation::None),
        "ipip" => Err("Windows nodes have none; use vxlan, vxlan-cross-subnet or none. A pool with ipipMode that is there already keeps it".to_owned()),
        _ => Err("it is none of vxlan, vxlan-cross-subnet and none".to_owned()),
    }
}

/// Reads the network of a pool.
pub(crate) fn pool(text: &str) -> Result<Ipv4Net, String> {
    let pool: Ipv4Net = text.parse().map_err(|_| {
        "it is no IPv4 network such as 10.244.0.0/16; --pool-v6 takes an IPv6 network".to_owned()
    })?;
    tortie_deploy::check_pool(pool).map_err(|error| error.to_string())?;
    Ok(pool)
}

/// Reads the network of an IPv6 pool.
pub(crate) fn pool_v6(text: &str) -> Result<Ipv6Net, String> {
    let pool: Ipv6Net =
        text.parse().map_err(|_| "it is no IPv6 network such as fd00:10:244::/56".to_owned())?;
    tortie_deploy::check_pool(pool).map_err(|error| error.to_string())?;
    Ok(pool)
}

fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let (host, port) = text.rsplit_once(':').ok_or("the port is missing")?;
    let port = port.parse().map_err(|_| format!("{port:?} is no port"))?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port))
}

impl Install {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        if self.dry_run {
            let pool = self.pool.map_or_else(|| pool(DEFAULT_POOL), Ok).map_err(anyhow::Error::msg)?;
            let mut objects = tortie_deploy::objects(&self.values(pool, self.pool_v6));
            if self.flannel {
                let file = self.flannel_config.as_deref();
                let file = file.context("--dry-run asks no cluster, so --flannel needs --flannel-config")?;
                let api_version = CalicoGroup::Crd.to_string();
                let of_flannel = flannel::objects(&flannel::read_file(file)?, file, &api_version);
                objects.extend(of_flannel.map_err(anyhow::Error::msg)?);
            }
            output::text(&tortie_deploy::documents(&objects));
            return Ok(ExitCode::SUCCESS);
        }
        crate::runtime()?.block_on(self.install())
    }

    fn values(&self, pool: Ipv4Net, pool_v6: Option<Ipv6Net>) -> Values {
        Values {
            image: self.image.clone(),
            pull_policy: self.pull_policy.clone(),
            pool,
            pool_v6,
            nat_outgoing: self.nat_outgoing,
            encapsulation: self.encapsulation,
            bgp: self.bgp,
            direct_routes: self.direct_routes,
            policy_only: self.policy_only,
            flannel: self.flannel,
            pod_interface_prefix: self.pod_interface_prefix.clone(),
            ip_autodetection_method: self.ip_autodetection_method.as_ref().map(ToString::to_string),
            ip6_autodetection_method: self.ip6_autodetection_method.as_ref().map(ToString::to_string),
            bgp_secrets: self.bgp_secret.clone(),
            log_level: self.log_level.clone(),
            metrics_address: self.metrics_address,
            services: self.services,
            api_server: self.api_server.clone(),
            cni_bin_dir: self.cni_bin_dir.clone(),
            cni_conf_dir: self.cni_conf_dir.clone(),
            cni_plugins: self.cni_plugins.clone(),
        }
    }

    async fn install(self) -> anyhow::Result<ExitCode> {
        let cluster = self.cluster.open().await?;
        let found = preflight::read(&cluster).await?;
        let of_flannel = if self.flannel { self.of_flannel(&cluster, &found).await? } else { Vec::new() };
        let decision = match (self.policy_only, self.flannel) {
            (true, _) => preflight::decide_policy_only(&found, self.force),
            (_, true) => preflight::decide_flannel(&found, &of_flannel, self.force),
            _ => preflight::decide(&found, (self.pool, self.pool_v6), self.force),
        };
        let decision = decision.map_err(anyhow::Error::msg)?;
        for warning in &decision.warnings {
            output::error_line(&format!("warning: {warning}"));
        }
        output::line(&format!("pods get addresses of {}", decision.described));
        let has_routes = self.policy_only || self.flannel || self.bgp || self.direct_routes;
        if self.encapsulation == Encapsulation::None && !has_routes {
            output::error_line(
                "warning: without encapsulation, --bgp and --direct-routes, pods of different nodes reach each other only by routes of your own",
            );
        }
        let values = self.values(decision.pool, decision.pool_v6);
        let restricts_nodes = cluster::has_admission_policies(&cluster).await?;
        if !restricts_nodes {
            output::error_line(
                "warning: this API server has no ValidatingAdmissionPolicy (Kubernetes 1.30 has), so the agent of one node can change the Nodes, \
                 pods, addresses and reports of all nodes",
            );
        }
        for object in tortie_deploy::objects(&values) {
            if !restricts_nodes && cluster::is_admission_policy(&object) {
                continue;
            }
            if found.group == CalicoGroup::Native && object["spec"]["group"] == CalicoGroup::Crd.name() {
                // With these definitions, Calico would use that group after its next start, and find it empty.
                output::line(&format!("{} skipped: Calico uses {}", name_of(&object), found.group));
                continue;
            }
            apply(&cluster, &object).await?;
        }
        for object in &of_flannel {
            apply(&cluster, object).await?;
        }
        // What an earlier installation with other values has allowed.
        for object in tortie_deploy::unwanted(&values) {
            if cluster.delete_path(&path_of(&object)?).await? {
                output::line(&format!("{} deleted", name_of(&object)));
            }
        }
        if self.flannel {
            output::line(&flannel::next_steps());
        }
        if self.no_wait || self.flannel && !found.has_moved_nodes() {
            return Ok(ExitCode::SUCCESS);
        }
        wait(&cluster, Duration::from_secs(self.timeout)).await
    }
}

impl Install {
    /// The objects that a cluster with flannel needs.
    async fn of_flannel(&self, cluster: &Kubernetes, found: &preflight::Found) -> anyhow::Result<Vec<Value>> {
        let file = self.flannel_config.as_deref();
        let Some((text, source)) = flannel::read(cluster, found.flannel(), file).await? else {
            if found.has_moved() {
                output::line("flannel is gone; its IPPools and the FelixConfiguration stay as they are");
                return Ok(Vec::new());
            }
            return Err(flannel::no_configuration());
        };
        let objects =
            flannel::objects(&text, &source, &found.group.to_string()).map_err(anyhow::Error::msg)?;
        flannel::fit_pools(&objects, &found.pools).map_err(anyhow::Error::msg)
    }
}

/// A name of a Secret. An empty one would stand for all of them in a Role.
fn object_name(text: &str) -> Result<String, String> {
    let is_fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(c);
    match !text.is_empty() && text.len() <= 253 && text.chars().all(is_fine) {
        true => Ok(text.to_owned()),
        false => Err("a name has small letters, digits, dots and dashes".to_owned()),
    }
}

/// Applies an object and prints the result.
async fn apply(cluster: &Kubernetes, object: &Value) -> anyhow::Result<()> {
    let (path, name) = (path_of(object)?, name_of(object));
    let before = cluster::get(cluster, &path).await?;
    let is_definition = object["kind"] == "CustomResourceDefinition";
    if let Some(before) = before.as_ref().filter(|_| is_definition)
        && !cluster::is_managed(before)
    {
        output::line(&format!("{name} kept, because somebody else has created it"));
        return Ok(());
    }
    let after = cluster.apply_path(&path, MANAGER, object).await.with_context(|| name.clone())?;
    let outcome = match before {
        None => "created",
        Some(before) if desired(&before) == desired(&after) => "unchanged",
        Some(_) => "configured",
    };
    output::line(&format!("{name} {outcome}"));
    if is_definition {
        wait_until_served(cluster, &path, &name).await?;
    }
    Ok(())
}

/// The object without what the API server and controllers write, at any time.
fn desired(object: &Value) -> Value {
    let mut object = object.clone();
    object["status"].take();
    for name in ["resourceVersion", "managedFields"] {
        object["metadata"][name].take();
    }
    object
}

/// Agents must not start before the API server serves the kinds.
async fn wait_until_served(cluster: &Kubernetes, path: &str, name: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + DEFINITION_TIMEOUT;
    loop {
        let definition = cluster.get_path(path).await?;
        let conditions = definition["status"]["conditions"].as_array();
        let is_true = |kind: &str| {
            conditions.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["status"] == "True"))
        };
        if is_true("Established") {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the API server does not serve {name}: {}", definition["status"]["conditions"]);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Waits until the agent of each node is ready, and prints progress. In the end, says what is missing.
async fn wait(cluster: &Kubernetes, timeout: Duration) -> anyhow::Result<ExitCode> {
    let deadline = Instant::now() + timeout;
    let mut shown = String::new();
    loop {
        let rollout = Rollout::read(cluster, tortie_deploy::DAEMON_SET).await?;
        let progress = rollout.progress();
        if progress != shown {
            output::line(&progress);
            shown = progress;
        }
        if rollout.is_complete() {
            output::line("Tortie is ready; tortie status shows more");
            return Ok(ExitCode::SUCCESS);
        }
        if Instant::now() >= deadline {
            output::error_line(&format!("after {} s, this is missing:", timeout.as_secs()));
            for problem in rollout.missing() {
                output::error_line(&format!("  {problem}"));
            }
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_with_their_port() {
        let read = |text: &str| host_and_port(text).ok();
        assert_eq!(read("192.0.2.1:6443"), Some(("192.0.2.1".to_owned(), 6443)));
        assert_eq!(read("[fd00::1]:6443"), Some(("fd00::1".to_owned(), 6443)));
        assert_eq!(read("api.example"), None);
        assert_eq!(read("api.example:meow"), None);
    }
}
