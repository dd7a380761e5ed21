//! `tortie windows`: commands for a Windows node.

mod reconfigure;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tortie_cni::local;
use tortie_hcn::native::{NativeFirewall, NativeHcn, NativeIpHelper, windows_build};
use tortie_hcn::schema::Network;
use tortie_hcn::selftest::{self, HnsReport, NoTraffic};
use tortie_hcn::{Adapter, Hcn, HcnExt, IpHelper, IpRoute};
use tortie_windows::{Cleanup, NETWORK, SavedReport, clean_up};

use crate::node_name::NodeName;
use crate::output;

/// The longest time of one call of HNS: some questions have long documents.
const DEADLINE: Duration = Duration::from_secs(120);

/// The commands.
#[derive(clap::Subcommand)]
pub(crate) enum WindowsCommand {
    /// Print the network adapters, addresses and routes of this machine as JSON, as the agent sees them
    Adapters,
    /// Ask HNS of this machine what its documentation leaves open, and print the answers as JSON. It makes a network beside that of
    /// the agent, on the same virtual switch, with endpoints that belong to no container, and removes it
    Selftest {
        /// The physical adapter of the agent's network, by its name. The default is the name that the network lists
        #[arg(long)]
        adapter: Option<String>,
        /// Save the answers where the agent of this node reads them, and say what they mean for it
        #[arg(long)]
        save: bool,
        /// The file for the answers, if the agent has another one (--selftest-report)
        #[arg(long, value_name = "FILE", requires = "save", default_value_os_t = local::selftest_report())]
        selftest_report: PathBuf,
    },
    /// Replace this node's overlay network after a change of its VNI or first subnet: cordon the node, delete its pods, let the agent
    /// make the network anew, and uncordon it. It begins only if the agent reports NetworkDiffers. If it is interrupted, run it
    /// again. It runs on the node, beside the agent
    Reconfigure(reconfigure::Reconfigure),
    /// Remove the rules that the agent has added to the firewall of this machine, and its routes to pods, after the agent was removed
    Cleanup,
    /// Print the flags that kube-proxy needs on this node, one a line: the network, the source VIP, and whether it uses direct server
    /// return
    KubeProxy {
        /// The node's name, if it is not that of the machine
        #[arg(long)]
        node: Option<NodeName>,
    },
}

impl WindowsCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Adapters => adapters(),
            Self::Selftest { adapter, save, selftest_report } => {
                ask(adapter, save.then_some(&*selftest_report))
            }
            Self::Reconfigure(reconfigure) => reconfigure.run(),
            Self::Cleanup => cleanup(),
            Self::KubeProxy { node } => kube_proxy(node.as_ref().map(NodeName::as_str)),
        }
    }
}

/// Without the agent's network or the name of its adapter, making one could take another adapter over, and cost the node its
/// connections.
fn ask(adapter: Option<String>, file: Option<&Path>) -> anyhow::Result<ExitCode> {
    let hns = NativeHcn::load(DEADLINE)?;
    let network = network(&hns)?;
    let adapter = adapter.map_or_else(|| tortie_windows::adapter_of(&network), Ok)?;
    let build = windows_build();
    let report = HnsReport { build: build.clone(), ..selftest::run(&hns, &NoTraffic, Some(&adapter))? };
    output::line(&serde_json::to_string_pretty(&report)?);
    if let Some(file) = file {
        save(file, &report)?;
        let version = report.version.context("HNS tells no version")?;
        match report.proves_sets(version, build.as_deref()) {
            Ok(()) => output::error_line(&format!("saved in {}: with Auto, ACLs name sets", file.display())),
            Err(problem) => {
                output::error_line(&format!(
                    "saved in {}: with Auto, ACLs list addresses: {problem}",
                    file.display()
                ));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn save(file: &Path, report: &HnsReport) -> anyhow::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), local::make_folder).with_context(|| format!("the folder of {}", file.display()))?;
    SavedReport::save(file, report).with_context(|| file.display().to_string())
}

fn cleanup() -> anyhow::Result<ExitCode> {
    let hns = NativeHcn::load(DEADLINE).map_err(|error| error.to_string());
    let hcn = hns.as_ref().map(|hns| hns as &dyn Hcn).map_err(Clone::clone);
    let Cleanup { done, failed } = clean_up(&NativeFirewall, &NativeIpHelper, hcn);
    done.iter().for_each(|line| output::line(line));
    failed.iter().for_each(|line| output::error_line(line));
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn kube_proxy(node: Option<&str>) -> anyhow::Result<ExitCode> {
    let hns = NativeHcn::load(DEADLINE)?;
    let flags = tortie_windows::kube_proxy_flags(&network(&hns)?, hns.version()?, node)?;
    flags.iter().for_each(|flag| output::line(flag));
    Ok(ExitCode::SUCCESS)
}

/// The network of the agent.
fn network(hns: &NativeHcn) -> anyhow::Result<Network> {
    hns.network_by_name(NETWORK)?.with_context(|| {
        format!("there is no network {NETWORK}: run this on a node where the agent has made it")
    })
}

fn adapters() -> anyhow::Result<ExitCode> {
    let machine = NativeIpHelper;
    let adapters = machine.adapters()?.into_iter().map(|adapter| {
        let Adapter { index, name, mac, mtu, is_up, addresses } = adapter;
        let mac = mac.map(|bytes| tortie_api::net::MacAddress(bytes).to_string());
        json!({"index": index, "name": name, "mac": mac, "mtu": mtu, "isUp": is_up, "addresses": addresses})
    });
    let routes = machine.routes()?.into_iter().map(|route| {
        let IpRoute { interface, destination, next_hop, metric, is_own } = route;
        json!({"interface": interface, "destination": destination, "nextHop": next_hop, "metric": metric, "isOwn": is_own})
    });
    let shown = json!({"adapters": adapters.collect::<Vec<_>>(), "routes": routes.collect::<Vec<_>>()});
    output::line(&serde_json::to_string_pretty(&shown).context("the adapters")?);
    Ok(ExitCode::SUCCESS)
}
