//! The BGP speaker of a node. Only Linux nodes run one.

#[cfg(target_os = "linux")]
mod cluster;
#[cfg(target_os = "linux")]
mod passwords;
#[cfg(target_os = "linux")]
mod runner;
#[cfg(target_os = "linux")]
mod shown;
#[cfg(target_os = "linux")]
mod why;

use tokio::sync::oneshot;

use crate::control::Outcome;
use crate::{AgentError, Platform};

#[cfg(target_os = "linux")]
pub use self::cluster::{KINDS, SERVICE_KINDS};
#[cfg(target_os = "linux")]
pub(crate) use self::runner::run;
#[cfg(target_os = "linux")]
use tortie_linux::LearnedRoutes;

/// A question of an operator.
pub(crate) enum BgpQuestion {
    Peers,
    Routes,
    Why(
        #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nobody there answers"))]
        ipnet::IpNet,
    ),
}

/// A question, and where its answer goes.
pub(crate) type Asked = (BgpQuestion, oneshot::Sender<Outcome>);

/// Opens the kernel's routes for a speaker. Without a speaker, routes that an earlier one has left are removed.
///
/// # Errors
/// The node cannot run a speaker, or the kernel refuses.
#[cfg(target_os = "linux")]
pub(crate) fn prepare(
    node: &str,
    is_wanted: bool,
    platform: &Platform,
) -> Result<Option<LearnedRoutes>, AgentError> {
    let Platform::Linux = platform else { return refuse(node, is_wanted).map(|()| None) };
    let failed = |error| AgentError::system("the routes of BGP", error);
    let learned = LearnedRoutes::open().map_err(failed)?;
    if is_wanted {
        return Ok(Some(learned));
    }
    let removed = learned.remove_all().map_err(failed)?;
    if removed > 0 {
        tracing::info!(removed, "this agent runs no BGP speaker; the routes of an earlier one are removed");
    }
    Ok(None)
}

/// What never exists where there is no speaker.
#[cfg(not(target_os = "linux"))]
pub(crate) enum LearnedRoutes {}

#[cfg(not(target_os = "linux"))]
pub(crate) fn prepare(
    node: &str,
    is_wanted: bool,
    _: &Platform,
) -> Result<Option<LearnedRoutes>, AgentError> {
    refuse(node, is_wanted).map(|()| None)
}

#[cfg(not(target_os = "linux"))]
pub(crate) async fn run(
    _: std::sync::Arc<dyn tortie_store::Endpoints>,
    _: String,
    learned: LearnedRoutes,
    _: tokio::sync::watch::Sender<Vec<tortie_dataplane::Condition>>,
    _: tokio::sync::mpsc::Receiver<Asked>,
) {
    match learned {}
}

fn refuse(node: &str, is_wanted: bool) -> Result<(), AgentError> {
    match is_wanted {
        true => Err(AgentError::Node {
            node: node.to_owned(),
            problem: "only Linux nodes run a BGP speaker; remove --bgp (TORTIE_BGP)".to_owned(),
        }),
        false => Ok(()),
    }
}
