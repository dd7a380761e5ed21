//! The BGP speaker of a node. Windows nodes run one only with a network that takes packets without encapsulation.

mod cluster;
mod passwords;
mod runner;
mod shown;
mod why;

use std::sync::Arc;

use tokio::sync::oneshot;
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
}

/// Opens the system for a speaker. Without a speaker, what an earlier one has left is removed.
///
/// # Errors
/// The node cannot run a speaker, or the system refuses.
pub(crate) fn prepare(
    node: &str,
    is_wanted: bool,
    platform: &Platform,
) -> Result<Option<System>, AgentError> {
    if let Platform::Windows { host, .. } = platform
        && let Some(firewall) = host.firewall().filter(|_| !is_wanted)
    {
        firewall.bgp.admit_nobody();
    }
    match platform {
        #[cfg(target_os = "linux")]
        Platform::Linux => on_linux(is_wanted),
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
fn on_linux(is_wanted: bool) -> Result<Option<System>, AgentError> {
    let failed = |error| AgentError::system("the routes of BGP", error);
    let learned = tortie_linux::LearnedRoutes::open().map_err(failed)?;
    if is_wanted {
        return Ok(Some(System { learned: Box::new(learned), firewall: None }));
    }
    report_removed(learned.remove_all().map_err(failed)?);
    Ok(None)
}

fn on_windows(host: &Host, is_wanted: bool) -> Result<Option<System>, AgentError> {
    let learned = tortie_windows::LearnedRoutes::new(host.clone());
    if is_wanted {
        let firewall = host.firewall().map(|firewall| firewall.bgp.clone());
        return Ok(Some(System { learned: Box::new(learned), firewall }));
    }
    report_removed(learned.remove_all().map_err(|error| AgentError::system("the routes of BGP", error))?);
    Ok(None)
}

fn report_removed(removed: usize) {
    if removed > 0 {
        tracing::info!(removed, "the routes of an earlier agent, with BGP or another network, are removed");
    }
}
