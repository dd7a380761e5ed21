//! `tortie ipam check`.

use std::process::ExitCode;
use std::time::Duration;

use jiff::Timestamp;
use tortie_ipam::{Finding, IpamError, Records, check};
use tortie_store::{Store, StoreError};

use super::snapshot;
use crate::output;
use crate::store::StoreArguments;

/// Calico's default (`leakGracePeriod`).
const GRACE: i64 = 15 * 60;

#[derive(clap::Args)]
pub(crate) struct Check {
    /// Repair what is safe to repair, and report each repair
    #[arg(long)]
    fix: bool,
    /// How many seconds ago an address must have been given to a pod that is missing; --fix looks twice at this interval
    #[arg(long, value_name = "SECONDS", default_value_t = GRACE, value_parser = clap::value_parser!(i64).range(0..))]
    grace: i64,
    #[command(flatten)]
    store: StoreArguments,
}

impl Check {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let store = match self.fix {
            true => self.store.open_to_change().await?,
            false => self.store.open().await?,
        };
        let findings = self.findings(&*store).await?;
        for finding in &findings {
            let can_fix = if finding.fix.is_some() && !self.fix { " (--fix repairs it)" } else { "" };
            output::line(&format!("{finding}{can_fix}"));
        }
        if findings.is_empty() {
            output::line("every address is in order");
            return Ok(ExitCode::SUCCESS);
        }
        if !self.fix {
            output::line(&output::count(findings.len() as u64, "finding"));
            return Ok(ExitCode::FAILURE);
        }
        // A pod that was deleted a moment ago may still run on a node that does not answer, and what is being changed
        // looks wrong for a moment.
        if self.grace > 0 && findings.iter().any(|finding| finding.fix.is_some()) {
            output::line(&format!("looking again in {} seconds", self.grace));
            tokio::time::sleep(Duration::from_secs(self.grace.unsigned_abs())).await;
        }
        let again = self.findings(&*store).await?;
        let records = Records::new(store.clone());
        let (mut fixed, mut failed) = (0_u64, 0_u64);
        for finding in findings.iter().filter(|finding| again.contains(finding)) {
            match repair(&records, finding).await? {
                None => {}
                Some(Ok(())) => fixed += 1,
                Some(Err(error)) => {
                    failed += 1;
                    output::line(&format!("not repaired: {}: {error}", finding.about));
                }
            }
        }
        let left = self.findings(&*store).await?.len() as u64;
        output::line(&format!("{} repaired, {failed} not, {left} left", output::count(fixed, "finding")));
        Ok(if left == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    async fn findings(&self, store: &dyn Store) -> Result<Vec<Finding>, StoreError> {
        Ok(check(&snapshot(store).await?, Timestamp::now(), self.grace))
    }
}

/// Repairs a finding, and reports it. `None` if nothing is to be done.
async fn repair(records: &Records, finding: &Finding) -> Result<Option<Result<(), IpamError>>, IpamError> {
    let Some(fix) = &finding.fix else { return Ok(None) };
    match records.repair(fix).await {
        Ok(true) => {
            output::line(&format!("repaired: {}: {}", finding.kind, finding.about));
            Ok(Some(Ok(())))
        }
        Ok(false) => Ok(None),
        // The datastore cannot be reached, or denies it: the others would fail, too.
        Err(error @ IpamError::Store(_)) => Err(error),
        Err(error) => Ok(Some(Err(error))),
    }
}
