//! `tortie agent`, and `tortie agent log-level`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tortie_agent::control::{Ask, Outcome, ask};
use tortie_agent::{
    AdapterSelector, AddressMethod, AddressMethods, CniIpam, Config, DefaultPool, Extras, Host, HostRoutes,
    LogLevel, Platform, PolicyOnly, StaticRules, WindowsNetwork,
};
use tortie_cni::local;
use tortie_deploy::{ChainedPlugins, Encapsulation};
use tortie_hcn::IpHelper;

use crate::flannel_etcd::FlannelEtcdArguments;
#[cfg(unix)]
use crate::lab::lab;
use crate::node_name::NodeName;
use crate::output;
use crate::service_proxy::ServiceProxyArguments;
use crate::store::StoreArguments;

/// The deadline of one call of HNS: some calls take many seconds, and some never return (docs/hns.md, Calls).
const HCN_DEADLINE: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Agent {
    #[command(subcommand)]
    command: Option<AgentCommand>,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(clap::Subcommand)]
enum AgentCommand {
    /// Show or change what the agent of this node logs, until it restarts
    LogLevel(SetLogLevel),
}

#[derive(clap::Args)]
struct SetLogLevel {
    /// The new level: error, warn, info, debug, trace, or a list such as info,tortie_store=debug; by default, the level
    /// stays
    level: Option<String>,
    /// The socket of the agent; on Windows, its pipe
    #[arg(long, value_name = "PATH", default_value_os_t = local::control_address())]
    agent_socket: PathBuf,
}

#[derive(clap::Args)]
struct Daemon {
    /// Run as the Windows service that this process was started for; the log is agent.log in %ProgramData%\tortie, and errors are in
    /// the event log, too
    #[cfg(windows)]
    #[arg(long)]
    service: bool,
    /// The name of this node
    #[arg(long, env = "NODENAME")]
    node: Option<NodeName>,
    #[command(flatten)]
    store: StoreArguments,
    /// The socket for the CNI plugin; on Windows, a named pipe
    #[arg(long, value_name = "PATH", default_value_os_t = local::agent_address())]
    cni_socket: PathBuf,
    /// The socket for operators; on Windows, a named pipe
    #[arg(long, value_name = "PATH", default_value_os_t = local::control_address())]
    control_socket: PathBuf,
    /// Where the CNI plugin stores deletions while the agent is down
    #[arg(long, value_name = "FOLDER", default_value_os_t = local::deletion_queue())]
    deletion_queue: PathBuf,
    /// Where the agent keeps which pods have policy
    #[arg(long, env = "TORTIE_SAVED_STATE", value_name = "FILE", default_value_os_t = local::saved_state())]
    saved_state: PathBuf,
    /// On a node that has no policy when its agent starts: close the pods that had policy, or leave all pods open, until the datastore
    /// answers
    #[arg(long, env = "TORTIE_UNTIL_DATASTORE", value_name = "ACTION", default_value = "close")]
    until_datastore: UntilDatastore,
    /// Where the agent keeps the identity of an embedded datastore: the first one that it reaches is accepted, and another one is
    /// refused. By default, store-identity beside the queue of deletions
    #[arg(long, value_name = "FILE")]
    store_identity: Option<PathBuf>,
    /// On a Windows node of a lab: the socket of its HNS
    #[cfg(unix)]
    #[arg(long, value_name = "PATH")]
    hcn_socket: Option<PathBuf>,
    /// On a Windows node: rules for every pod before policy, in the format of Calico's static-rules.json
    #[arg(long, value_name = "FILE")]
    #[cfg_attr(unix, arg(requires = "hcn_socket"))]
    static_rules: Option<PathBuf>,
    /// On a Windows node: the physical network adapter whose address the overlay's switch takes over: its name, IPv4 address or MAC
    /// address. By default, that with the node's address
    #[arg(long, env = "TORTIE_ADAPTER", value_name = "ADAPTER")]
    #[cfg_attr(unix, arg(requires = "hcn_socket"))]
    adapter: Option<AdapterSelector>,
    /// The report of `tortie windows selftest --save`: whether ACLs may name sets of addresses
    #[cfg(windows)]
    #[arg(long, env = "TORTIE_SELFTEST_REPORT", value_name = "FILE", default_value_os_t = local::selftest_report())]
    selftest_report: PathBuf,
    /// On a Windows node: the networks of the addresses of Services (service-cluster-ip-range of the API server)
    #[arg(long, env = "TORTIE_SERVICE_CIDR", value_name = "CIDR", value_delimiter = ',')]
    #[cfg_attr(unix, arg(requires = "hcn_socket"))]
    service_cidr: Vec<Ipv4Net>,
    /// On a Windows node: the type of the pods' network. An overlay takes and sends packets of pods in VXLAN only; l2bridge is for pools
    /// without encapsulation, with --direct-routes or with routes by other means
    #[arg(
        long,
        env = "TORTIE_WINDOWS_NETWORK",
        value_name = "TYPE",
        value_parser = windows_network,
        default_value = "overlay"
    )]
    #[cfg_attr(unix, arg(requires = "hcn_socket"))]
    windows_network: WindowsNetwork,
    /// The pool of addresses that this agent creates if the cluster has none
    #[arg(long, env = "TORTIE_DEFAULT_POOL", value_name = "CIDR", value_parser = crate::install::pool)]
    default_pool: Option<Ipv4Net>,
    /// The IPv6 pool that this agent creates if the cluster has none
    #[arg(long, env = "TORTIE_DEFAULT_POOL_V6", value_name = "CIDR", value_parser = crate::install::pool_v6)]
    default_pool_v6: Option<Ipv6Net>,
    /// Whether pods of these pools use their node's address outside of the cluster
    #[arg(long, env = "TORTIE_DEFAULT_POOL_NAT", value_name = "BOOL", action = clap::ArgAction::Set, default_value_t = true)]
    default_pool_nat: bool,
    /// How packets of these pools travel between nodes
    #[arg(
        long,
        env = "TORTIE_DEFAULT_POOL_ENCAPSULATION",
        value_name = "NAME",
        value_parser = crate::install::encapsulation,
        default_value = "vxlan"
    )]
    default_pool_encapsulation: Encapsulation,
    /// Where the container runtime looks for network configurations: the agent writes its own there when pods can be added
    #[arg(long, env = "TORTIE_CNI_CONF_DIR", value_name = "FOLDER")]
    cni_conf_dir: Option<PathBuf>,
    /// The plugins that the container runtime calls after Tortie's, as a JSON list, such as
    /// [{"type": "bandwidth", "capabilities": {"bandwidth": true}}]
    #[arg(
        long,
        env = "TORTIE_CNI_PLUGINS",
        value_name = "JSON",
        default_value = "",
        hide_default_value = true
    )]
    cni_plugins: ChainedPlugins,
    /// Where pods' addresses come from: the section ipam of the CNI configuration that the agent writes, such as
    /// {"type": "host-local"}. Without it, from IPPools
    #[arg(long, env = "TORTIE_CNI_IPAM", value_name = "JSON", default_value = "", hide_default_value = true)]
    cni_ipam: CniIpam,
    /// Run a BGP speaker, as BGPConfiguration, BGPPeer and BGPFilter say; without any of them, in a mesh of all nodes. On Windows nodes
    /// with --windows-network l2bridge
    #[arg(long, env = "TORTIE_BGP")]
    bgp: bool,
    /// Give pools without encapsulation routes by way of the nodes themselves, which must be in one network (host-gw). On Windows nodes
    /// with --windows-network l2bridge
    #[arg(long, env = "TORTIE_DIRECT_ROUTES", conflicts_with = "bgp")]
    direct_routes: bool,
    /// Take part in a cluster with flannel (backends vxlan and host-gw): pods have the addresses of spec.podCIDRs of their Node,
    /// and nodes announce themselves by flannel's annotations. A Windows node needs --windows-network l2bridge for host-gw
    #[arg(long, env = "TORTIE_FLANNEL", conflicts_with = "bgp")]
    flannel: bool,
    #[command(flatten)]
    flannel_etcd: FlannelEtcdArguments,
    /// Enforce policy on pods that another CNI plugin connects, such as AWS VPC CNI, GKE's plugin, Azure CNI, ptp, or win-bridge:
    /// no routes, no addresses, no CNI configuration. With the Kubernetes API as datastore
    #[arg(long, env = "TORTIE_POLICY_ONLY", conflicts_with_all = ["bgp", "direct_routes", "flannel", "windows_network"])]
    policy_only: bool,
    /// With --policy-only, on Linux nodes: the prefixes of the names of pods' interfaces. Interfaces with such a name that belong to no
    /// known pod are closed
    #[arg(
        long,
        env = "TORTIE_POD_INTERFACE_PREFIX",
        value_name = "PREFIX",
        value_delimiter = ',',
        requires = "policy_only",
        default_values = PolicyOnly::PREFIXES
    )]
    pod_interface_prefix: Vec<String>,
    /// With --policy-only: where the container runtime keeps the results of CNI plugins
    #[arg(
        long,
        env = "TORTIE_CNI_RESULTS",
        value_name = "FOLDER",
        requires = "policy_only",
        default_value = PolicyOnly::RESULTS
    )]
    cni_results: PathBuf,
    #[command(flatten)]
    services: ServiceProxyArguments,
    /// How to find the node's own IPv4 address: kubernetes-internal-ip (what the kubelet reports), first-found, can-reach=HOST,
    /// interface=REGEX,…, skip-interface=REGEX,… or cidr=NETWORK,…
    #[arg(
        long,
        env = "TORTIE_IP_AUTODETECTION_METHOD",
        value_name = "METHOD",
        default_value = "kubernetes-internal-ip"
    )]
    ip_autodetection_method: AddressMethod,
    /// The same for its IPv6 address
    #[arg(
        long,
        env = "TORTIE_IP6_AUTODETECTION_METHOD",
        value_name = "METHOD",
        default_value = "kubernetes-internal-ip"
    )]
    ip6_autodetection_method: AddressMethod,
    /// Where to serve /healthz, /readyz and /metrics, such as 127.0.0.1:9198
    #[arg(long, env = "TORTIE_HEALTH_ADDRESS", value_name = "ADDRESS")]
    health_address: Option<SocketAddr>,
    /// Where to serve /metrics, too, such as 0.0.0.0:9199
    #[arg(long, env = "TORTIE_METRICS_ADDRESS", value_name = "ADDRESS")]
    metrics_address: Option<SocketAddr>,
}

/// The action on a node without policy, until the datastore answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum UntilDatastore {
    Close,
    Open,
}

impl Agent {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Some(AgentCommand::LogLevel(set)) => set.run(),
            #[cfg(windows)]
            None if self.daemon.service => self.daemon.run_as_service(),
            None => {
                self.daemon.check()?;
                let log_level = crate::changeable_log("info");
                self.daemon.run(log_level, crate::signals::end())?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

impl SetLogLevel {
    fn run(self) -> anyhow::Result<ExitCode> {
        let answer = ask(&self.agent_socket, Ask::LogLevel { new: self.level })?;
        match answer.outcome {
            Outcome::LogLevel(level) => output::line(&format!("node {}: {level}", answer.node)),
            Outcome::Failed(problem) => bail!("node {}: {problem}", answer.node),
            Outcome::Shown(_) | Outcome::BgpPeers(_) | Outcome::BgpRoutes(_) | Outcome::BgpWhy(_) => {
                bail!("node {}: the agent answers another question", answer.node)
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Daemon {
    /// Fails without the options that clap cannot demand, because subcommands do without them.
    fn check(&self) -> anyhow::Result<&NodeName> {
        self.node.as_ref().context("--node is missing: see tortie agent --help")
    }

    /// Runs until somebody wants its end.
    fn run(self, log_level: LogLevel, end: impl Future<Output = std::io::Result<()>>) -> anyhow::Result<()> {
        let node = self.check()?;
        node.log_change();
        let node = node.as_str().to_owned();
        crate::runtime()?.block_on(async {
            tokio::select! {
                result = self.work(node, log_level) => result,
                ended = end => {
                    ended?;
                    tracing::info!("stopping; policy stays in force");
                    Ok(())
                }
            }
        })
    }

    async fn work(self, node: String, log_level: LogLevel) -> anyhow::Result<()> {
        let platform = self.platform()?;
        let mut extras = self.extras(log_level)?;
        // Credentials of the datastore may be missing, or take long.
        let begun = tortie_agent::begin(&node, &self.cni_socket, &platform, &extras).await?;
        extras.flannel_etcd = self.flannel_etcd.open()?;
        let beside = || self.deletion_queue.with_file_name("store-identity");
        let store_identity = self.store_identity.clone().unwrap_or_else(beside);
        let store = self.store.open_remembering(&store_identity).await?;
        extras.services = self.services.open(&self.store, &store).await?;
        let config = Config {
            node,
            store,
            platform,
            cni_socket: self.cni_socket,
            control_socket: self.control_socket,
            deletion_queue: self.deletion_queue,
        };
        tortie_agent::run_from(begun, config, extras).await.context("the agent stopped")
    }

    /// The file for the node's state. A file of an earlier agent goes if nobody keeps it up to date.
    fn saved_state(&self) -> anyhow::Result<Option<PathBuf>> {
        let path = &self.saved_state;
        match self.until_datastore {
            UntilDatastore::Close => Ok(Some(path.clone())),
            UntilDatastore::Open => match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(error).with_context(|| format!("removing {}", path.display()))
                }
                _ => Ok(None),
            },
        }
    }

    /// Everything but flannel's datastore, and that of Services.
    fn extras(&self, log_level: LogLevel) -> anyhow::Result<Extras> {
        let (nat_outgoing, encapsulation) = (self.default_pool_nat, self.default_pool_encapsulation);
        let of_ipv6 = self.default_pool_v6.map(IpNet::V6);
        let default_pools = self.default_pool.map(IpNet::V4).into_iter().chain(of_ipv6);
        let default_pools = default_pools.map(|cidr| DefaultPool { cidr, nat_outgoing, encapsulation });
        let policy_only =
            || PolicyOnly { prefixes: self.pod_interface_prefix.clone(), results: self.cni_results.clone() };
        Ok(Extras {
            default_pools: default_pools.collect(),
            cni_conf_dir: self.cni_conf_dir.clone(),
            cni_plugins: self.cni_plugins.clone(),
            cni_ipam: self.cni_ipam.clone(),
            health_address: self.health_address,
            metrics_address: self.metrics_address,
            bgp: self.bgp,
            direct_routes: self.direct_routes,
            flannel: self.flannel,
            flannel_etcd: None,
            policy_only: self.policy_only.then(policy_only),
            services: None,
            address_methods: AddressMethods {
                ipv4: self.ip_autodetection_method.clone(),
                ipv6: self.ip6_autodetection_method.clone(),
            },
            saved_state: self.saved_state()?,
            log_level: Some(log_level),
        })
    }
}

impl Daemon {
    #[cfg(unix)]
    fn platform(&self) -> anyhow::Result<Platform> {
        use tortie_hcn::{Address, RemoteHcn};
        Ok(match &self.hcn_socket {
            None => Platform::Linux,
            Some(socket) => Platform::Windows {
                hcn: Arc::new(RemoteHcn::new(Address::Unix(socket.clone()), HCN_DEADLINE)),
                static_rules: self.static_rules()?,
                host: host(machine(self.windows_network), self.adapter.clone(), None)?,
                services: self.service_cidr.clone(),
                network: self.windows_network,
            },
        })
    }

    #[cfg(windows)]
    fn platform(&self) -> anyhow::Result<Platform> {
        let hcn = Arc::new(tortie_hcn::native::NativeHcn::load(HCN_DEADLINE)?);
        Ok(Platform::Windows {
            hcn,
            static_rules: self.static_rules()?,
            host: self.host()?,
            services: self.service_cidr.clone(),
            network: self.windows_network,
        })
    }

    /// This machine. The routes that an earlier process has kept are watched from now on: the datastore may be behind them.
    #[cfg(windows)]
    fn host(&self) -> anyhow::Result<Host> {
        let folder = local::state_folder();
        local::make_folder(&folder).with_context(|| folder.display().to_string())?;
        let ip = Arc::new(tortie_hcn::native::NativeIpHelper);
        let host = host(ip, self.adapter.clone(), Some(folder.join("adapter-routes.json")))?;
        let program = std::env::current_exe().context("the path of this program")?;
        let firewall = Arc::new(tortie_hcn::native::NativeFirewall);
        let firewall = tortie_windows::FirewallOpenings::new(firewall, &program.display().to_string());
        firewall.watch().context("watching the firewall")?;
        let build = tortie_hcn::native::windows_build();
        let selftest = tortie_agent::SavedReport::new(self.selftest_report.clone(), build);
        Ok(host.with_firewall(firewall).with_selftest(selftest))
    }

    /// Runs until the service manager wants its end.
    #[cfg(windows)]
    fn run_as_service(self) -> anyhow::Result<ExitCode> {
        use tortie_hcn::native::EventKind;
        use tracing_subscriber::fmt::writer::MakeWriterExt as _;

        let folder = local::state_folder();
        local::make_folder(&folder).with_context(|| folder.display().to_string())?;
        let log = folder.join("agent.log");
        let file = crate::log_file::LogFile::open(&log).with_context(|| log.display().to_string())?;
        let opened = tortie_hcn::native::EventLog::open("tortie").map(Arc::new);
        let events = opened.as_ref().ok().cloned();
        let place = std::sync::Mutex::new(file).and(crate::event_log::Errors(events.clone()));
        let place = tracing_subscriber::fmt::writer::BoxMakeWriter::new(place);
        let log_level = crate::changeable_log_to("info", place, false);
        let stopped = Arc::new(tokio::sync::Notify::new());
        let stop = stopped.clone();
        let work = move || {
            let ended = async move {
                stopped.notified().await;
                Ok(())
            };
            let report =
                |text| opened.as_ref().ok().map_or(Ok(()), |log| log.report(EventKind::Information, text));
            let started = report("Tortie's agent starts");
            if let Some(error) = opened.as_ref().err().or(started.as_ref().err()) {
                tracing::warn!(%error, "the event log takes no events; this file has everything");
            }
            let result = self.run(log_level, ended);
            let _ = report("Tortie's agent has ended; policy stays in force");
            result.inspect_err(|error| tracing::error!("{}", crate::with_causes(error))).is_ok()
        };
        tortie_hcn::native::run_service(work, move || stop.notify_one())
            .context("running as a service, which only the service manager can start")?;
        Ok(ExitCode::SUCCESS)
    }

    fn static_rules(&self) -> anyhow::Result<StaticRules> {
        self.static_rules.as_deref().map_or(Ok(StaticRules::default()), static_rules)
    }
}

pub(crate) fn windows_network(name: &str) -> Result<WindowsNetwork, String> {
    match name {
        "overlay" => Ok(WindowsNetwork::Overlay),
        "l2bridge" => Ok(WindowsNetwork::L2Bridge),
        _ => Err("it is overlay or l2bridge".to_owned()),
    }
}

/// The machine under an emulated HNS. Of an overlay, nothing needs to be known.
#[cfg(unix)]
fn machine(network: WindowsNetwork) -> Arc<dyn IpHelper> {
    match (network, lab()) {
        (WindowsNetwork::L2Bridge, Some(lab)) => lab.machine(),
        _ => Arc::new(tortie_hcn::NoIpHelper),
    }
}

fn host(
    ip: Arc<dyn IpHelper>,
    adapter: Option<AdapterSelector>,
    file: Option<PathBuf>,
) -> anyhow::Result<Host> {
    let routes = Arc::new(HostRoutes::new(ip.clone(), file));
    routes.watch().context("watching the routes of the adapter")?;
    Ok(Host::new(ip, adapter, routes))
}

/// Reads the operator's file. An invalid file keeps the agent from starting; what is in force stays in force.
fn static_rules(file: &Path) -> anyhow::Result<StaticRules> {
    let read = || format!("static rules {}", file.display());
    let text = std::fs::read_to_string(file).with_context(read)?;
    StaticRules::parse(&text).with_context(read)
}
