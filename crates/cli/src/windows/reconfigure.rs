//! `tortie windows reconfigure`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tortie_agent::{AgentError, Reconfiguring};
use tortie_hcn::native::NativeHcn;
use tortie_windows::{Drain, ReconfigureStep};

use super::DEADLINE;
use crate::node_name::NodeName;
use crate::output;
use crate::store::StoreArguments;

/// The pause before it looks again.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(crate) struct Reconfigure {
    /// The name of this machine's Node
    #[arg(long)]
    node: NodeName,
    /// Delete no pods: somebody else drains the node, for example by kubectl drain, which respects PodDisruptionBudgets
    #[arg(long)]
    no_delete: bool,
    /// Delete also pods that nobody starts again, because no controller has made them
    #[arg(long, conflicts_with = "no_delete")]
    force: bool,
    /// After how many seconds it gives up waiting. The node stays cordoned then
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    timeout: u64,
    #[command(flatten)]
    store: StoreArguments,
}

impl Reconfigure {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        crate::runtime()?.block_on(self.replace())
    }

    async fn replace(self) -> anyhow::Result<ExitCode> {
        self.store.refuse_copies()?;
        let drain = match (self.no_delete, self.force) {
            (true, _) => Drain::ByOthers,
            (false, false) => Drain::OfControllers,
            (false, true) => Drain::All,
        };
        let store = self.store.open_to_change().await?;
        let hcn = Arc::new(NativeHcn::load(DEADLINE)?);
        let one = Reconfiguring { store, hcn, node: self.node.as_str().to_owned(), drain };
        let mut said = String::new();
        let on_step = |step: Result<&ReconfigureStep, &AgentError>| {
            let text = match step {
                Ok(step) => describe(self.node.as_str(), step),
                Err(error) => format!("trying again: {error}"),
            };
            // One line for each wait, however long it takes.
            if text != said {
                output::line(&text);
                said = text;
            }
        };
        Ok(match one.run(Duration::from_secs(self.timeout), PAUSE, on_step).await? {
            ReconfigureStep::NothingToDo | ReconfigureStep::Restore { .. } => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    }
}

fn describe(node: &str, step: &ReconfigureStep) -> String {
    match step {
        ReconfigureStep::NothingToDo => {
            format!("node {node}: the agent reports no difference; nothing to do")
        }
        ReconfigureStep::Cordon(_) => format!("node {node} is cordoned"),
        ReconfigureStep::DeletePods(pods) => format!("deleting {}", pods.join(", ")),
        ReconfigureStep::RemoveOthers { balancers, endpoints } => {
            format!(
                "removing {} load balancers and {} endpoints that belong to no pod of the node",
                balancers.len(),
                endpoints.len()
            )
        }
        ReconfigureStep::Wait(what) => format!("waiting: {what}"),
        ReconfigureStep::GiveUp { what, cordoned: true } => {
            format!("node {node} stays cordoned, and the next run continues; it has waited too long: {what}")
        }
        ReconfigureStep::GiveUp { what, cordoned: false } => {
            format!("node {node} is unchanged; it has waited too long: {what}")
        }
        ReconfigureStep::Refuse(why) => format!("node {node} is unchanged: {why}"),
        ReconfigureStep::Restore { schedulable: true } => {
            format!("the network is made anew; node {node} takes pods")
        }
        ReconfigureStep::Restore { schedulable: false } => {
            format!("the network is made anew; node {node} stays cordoned, as it was before")
        }
    }
}
