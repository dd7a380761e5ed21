//! The BGP speaker of a node. Windows nodes run one only with a network that takes packets without encapsulation.

mod cluster;
mod passwords;
mod reach;
mod runner;
mod shown;
mod why;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{Notify, oneshot};
use tortie_dataplane::LearnedRouteTable;
use tortie_windows::{FirewallOpening, Host};

pub use self::cluster::{KINDS, SERVICE_KINDS};
pub(crate) use self::runner::run;
use crate::control::Outcome;
use crate::{AgentError, Platform, WindowsNetwork};

/// A question of an operator.
pub(crate) enum BgpQuestion {
    Peers,
    Routes,
    Why(ipnet::IpNet),
}

/// A question, and where its answer goes.
pub(crate) type Asked = (BgpQuestion, oneshot::Sender<Outcome>);

/// The parts of the system that a speaker changes.
pub(crate) struct System {
    /// The routes.
    learned: Box<dyn LearnedRouteTable>,
    /// The firewall of a Windows node.
    firewall: Option<Arc<FirewallOpening>>,
    /// Notified when links or routes change.
    changed: Arc<Notify>,
    /// The file that says that a speaker has run since the node's start, if the node can tell.
    marker: Option<PathBuf>,
}

/// The name of the marker, in the folder of the agent's sockets, which the node's start empties.
#[cfg(target_os = "linux")]
const MARKER: &str = "bgp-speaker";

/// Opens the system for a speaker, in the network namespace of the calling thread. Without a speaker, what an earlier one has left is
/// removed.
///
/// # Errors
/// The node cannot run a speaker, or the system refuses.
pub(crate) fn prepare(
    node: &str,
    is_wanted: bool,
    platform: &Platform,
    #[cfg_attr(
        not(target_os = "linux"),
        expect(unused_variables, reason = "only Linux nodes have a marker")
    )]
    run_folder: Option<&Path>,
) -> Result<Option<System>, AgentError> {
    if let Platform::Windows { host, .. } = platform
        && let Some(firewall) = host.firewall().filter(|_| !is_wanted)
    {
        firewall.bgp.admit_nobody();
    }
    match platform {
        #[cfg(target_os = "linux")]
        Platform::Linux => on_linux(is_wanted, run_folder),
        Platform::Windows { host, network: WindowsNetwork::L2Bridge, .. } => on_windows(host, is_wanted),
        // An earlier agent may have had a network without encapsulation.
        Platform::Windows { host, network: WindowsNetwork::Overlay, .. } if !is_wanted => {
            let failed = |error| AgentError::system("the routes of an earlier agent", error);
            report_removed(tortie_windows::remove_node_routes(host.ip()).map_err(failed)?);
            Ok(None)
        }
        Platform::Windows { .. } => refuse(
            node,
            "a Windows node runs a BGP speaker with a network of type L2Bridge only; add --windows-network l2bridge \
             (TORTIE_WINDOWS_NETWORK), or remove --bgp (TORTIE_BGP)",
        ),
        Platform::Other { .. } if is_wanted => {
            refuse(node, "it runs no BGP speaker; remove --bgp (TORTIE_BGP)")
        }
        Platform::Other { .. } => Ok(None),
    }
}

fn refuse<T>(node: &str, problem: &str) -> Result<T, AgentError> {
    Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() })
}

#[cfg(target_os = "linux")]
fn on_linux(is_wanted: bool, run_folder: Option<&Path>) -> Result<Option<System>, AgentError> {
    let failed = |error| AgentError::system("the routes of BGP", error);
    let mut learned = tortie_linux::LearnedRoutes::open().map_err(failed)?;
    let marker = run_folder.map(|folder| folder.join(MARKER));
    if is_wanted {
        let changed = Arc::new(Notify::new());
        let notified = changed.clone();
        learned.watch(move || notified.notify_one());
        return Ok(Some(System { learned: Box::new(learned), firewall: None, changed, marker }));
    }
    report_removed(learned.remove_all().map_err(failed)?);
    if let Some(marker) = marker {
        match std::fs::remove_file(&marker) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(AgentError::system(format!("the file {}", marker.display()), error));
            }
            _ => {}
        }
    }
    Ok(None)
}

fn on_windows(host: &Host, is_wanted: bool) -> Result<Option<System>, AgentError> {
    let learned = tortie_windows::LearnedRoutes::new(host.clone());
    if is_wanted {
        let firewall = host.firewall().map(|firewall| firewall.bgp.clone());
        let changed = Arc::new(Notify::new());
        let notified = changed.clone();
        host.watch(Box::new(move || notified.notify_one()));
        return Ok(Some(System { learned: Box::new(learned), firewall, changed, marker: None }));
    }
    report_removed(learned.remove_all().map_err(|error| AgentError::system("the routes of BGP", error))?);
    Ok(None)
}

fn report_removed(removed: usize) {
    if removed > 0 {
        tracing::info!(removed, "the routes of an earlier agent, with BGP or another network, are removed");
    }
}

#[cfg(test)]
mod tests {
    use tortie_hcn::IpHelper;
    use tortie_hns_emulator::EmulatedHost;
    use tortie_windows::HostRoutes;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_change_of_a_windows_machine_reaches_the_speaker() {
        let machine = Arc::new(EmulatedHost::new(vec![], vec![]));
        let ip: Arc<dyn IpHelper> = machine.clone();
        let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
        let system = on_windows(&host, true).unwrap().unwrap();
        machine.change(|_| ());
        let notified = tokio::time::timeout(std::time::Duration::from_secs(60), system.changed.notified());
        notified.await.unwrap();
    }
}
