//! `tortie windows`: commands for a Windows node.

use std::process::ExitCode;

use anyhow::Context;
use serde_json::json;
use tortie_hcn::native::NativeIpHelper;
use tortie_hcn::{Adapter, IpHelper, IpRoute};

use crate::output;

/// The commands.
#[derive(clap::Subcommand)]
pub(crate) enum WindowsCommand {
    /// Print the network adapters, addresses and routes of this machine as JSON, as the agent sees them
    Adapters,
}

impl WindowsCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Adapters => adapters(),
        }
    }
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
