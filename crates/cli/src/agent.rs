//! `tortie agent`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tortie_agent::{Config, Platform, StaticRules};
use tortie_hcn::{Address, RemoteHcn};

use crate::store::StoreArguments;

/// How long one call of HNS may take: some take many seconds, and some never end (docs/hns.md, Calls).
const HCN_DEADLINE: Duration = Duration::from_secs(30);

/// Where operators ask the agent of this node, where nothing else is said.
pub(crate) const CONTROL_SOCKET: &str = "/run/tortie/control.sock";

#[derive(clap::Args)]
pub(crate) struct Agent {
    /// The name of this node
    #[arg(long, env = "NODENAME")]
    node: String,
    #[command(flatten)]
    store: StoreArguments,
    /// Where the CNI plugin finds the agent
    #[arg(long, value_name = "PATH", default_value = "/run/tortie/agent.sock")]
    cni_socket: PathBuf,
    /// Where operators ask the agent
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET)]
    control_socket: PathBuf,
    /// Where the CNI plugin leaves deletions while the agent is away
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/tortie/cni-deletions")]
    deletion_queue: PathBuf,
    /// A Windows node: where its HNS is reached
    #[arg(long, value_name = "PATH")]
    hcn_socket: Option<PathBuf>,
    /// A Windows node: rules that every pod has before policy, as in Calico's static-rules.json
    #[arg(long, value_name = "FILE", requires = "hcn_socket")]
    static_rules: Option<PathBuf>,
}

impl Agent {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("info");
        crate::runtime()?.block_on(async {
            let platform = match self.hcn_socket {
                None => Platform::Linux,
                Some(socket) => Platform::Windows {
                    hcn: Arc::new(RemoteHcn::new(Address::Unix(socket), HCN_DEADLINE)),
                    static_rules: self.static_rules.as_deref().map_or(Ok(StaticRules::default()), static_rules)?,
                },
            };
            let config = Config {
                node: self.node,
                store: self.store.open()?,
                platform,
                cni_socket: self.cni_socket,
                control_socket: self.control_socket,
                deletion_queue: self.deletion_queue,
            };
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::select! {
                result = tortie_agent::run(config) => result.context("the agent stopped").map(|()| ExitCode::SUCCESS),
                _ = terminate.recv() => {
                    tracing::info!("told to end; what is in force stays in force");
                    Ok(ExitCode::SUCCESS)
                }
            }
        })
    }
}

/// Reads the operator's file. One that is wrong keeps the agent from starting: what is in force stays so.
fn static_rules(file: &Path) -> anyhow::Result<StaticRules> {
    let read = || format!("static rules {}", file.display());
    let text = std::fs::read_to_string(file).with_context(read)?;
    StaticRules::parse(&text).with_context(read)
}
