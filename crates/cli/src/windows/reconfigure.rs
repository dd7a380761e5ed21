//! `tortie windows reconfigure`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_agent::Reconfiguring;
use tortie_hcn::native::NativeHcn;
use tortie_windows::ReconfigureStep;

use super::DEADLINE;
use crate::output;
use crate::store::StoreArguments;

/// The pause before it looks again.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(crate) struct Reconfigure {
    /// The name of this machine's Node
    #[arg(long)]
    node: String,
    /// Delete no pods: somebody else drains the node, for example by kubectl drain, which respects PodDisruptionBudgets
    #[arg(long)]
    no_delete: bool,
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
        let one = Reconfiguring {
            store: self.store.open().await?,
            hcn: Arc::new(NativeHcn::load(DEADLINE)?),
            node: self.node.clone(),
            deletes_pods: !self.no_delete,
        };
        let (started, patience) = (Instant::now(), Duration::from_secs(self.timeout));
        let mut said = String::new();
        loop {
            let step = one.step(started.elapsed(), patience).await?;
            let text = describe(&self.node, &step);
            // One line for each wait, however long it takes.
            if text != said {
                output::line(&text);
                said = text;
            }
            match step {
                ReconfigureStep::NothingToDo | ReconfigureStep::Restore { .. } => {
                    return Ok(ExitCode::SUCCESS);
                }
                ReconfigureStep::GiveUp(_) => return Ok(ExitCode::FAILURE),
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
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
                "removing {} load balancers and {} endpoints of kube-proxy",
                balancers.len(),
                endpoints.len()
            )
        }
        ReconfigureStep::Wait(what) => format!("waiting: {what}"),
        ReconfigureStep::GiveUp(what) => {
            format!("node {node} stays cordoned, and the next run continues; it has waited too long: {what}")
        }
        ReconfigureStep::Restore { schedulable: true } => {
            format!("the network is made anew; node {node} takes pods")
        }
        ReconfigureStep::Restore { schedulable: false } => {
            format!("the network is made anew; node {node} stays cordoned, as it was before")
        }
    }
}
