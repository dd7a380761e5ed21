//! `tortie ipam`: what the addresses of a cluster are used for, and repairs.

mod change;
mod check;
mod show;

pub(crate) use change::windows_node;

use std::process::ExitCode;

use clap::Subcommand;
use tortie_api::Kind;
use tortie_ipam::Snapshot;
use tortie_store::{Store, StoreError};

use crate::store::list;

#[derive(Subcommand)]
pub(crate) enum IpamCommand {
    /// Show how many addresses are used, or who has one
    Show(show::ShowAddresses),
    /// Find leaked, duplicate and unknown addresses, and affinities of missing nodes; exits with 1 if it finds any
    Check(check::Check),
    /// Release an address, the addresses of a handle, or everything of a node that is gone
    Release(change::Release),
    /// Split a pool into smaller ones; its addresses in use stay
    Split(change::Split),
    /// Change the IPAM settings of the cluster
    Configure(change::Configure),
}

impl IpamCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        crate::runtime()?.block_on(async {
            match self {
                Self::Show(show) => show.run().await,
                Self::Check(check) => check.run().await,
                Self::Release(release) => release.run().await,
                Self::Split(split) => split.run().await,
                Self::Configure(configure) => configure.run().await,
            }
        })
    }
}

/// Everything that concerns addresses. An error if a list is not complete.
async fn snapshot(store: &dyn Store) -> Result<Snapshot, StoreError> {
    // Blocks come first: an address that is given meanwhile is not taken for a leak.
    Ok(Snapshot {
        blocks: store.list(Kind::IpamBlock).await?.items,
        handles: store.list(Kind::IpamHandle).await?.items,
        affinities: store.list(Kind::BlockAffinity).await?.items,
        pools: store.list(Kind::IpPool).await?.items,
        endpoints: store.list(Kind::WorkloadEndpoint).await?.items,
        pods: list(store, Kind::Pod).await?,
        nodes: store.list(Kind::Node).await?.items,
        services: list(store, Kind::Service).await?,
    })
}
