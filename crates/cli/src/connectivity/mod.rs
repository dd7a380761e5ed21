//! `tortie connectivity test`: deploys pods of its own, lets them check each other, says why something fails, and removes
//! everything.
//!
//! Each check is done by a client pod, which ends: its exit code says whether everything is as it should be, and the end
//! of its output (the termination message in its status) what is not. So nothing but the datastore is needed, neither exec
//! nor logs.

mod deployed;
mod path;
mod plan;
mod reasons;
mod report;
mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, ensure};
use indicatif::ProgressBar;
use jiff::Timestamp;
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::output::{self, Format};
use crate::store::StoreArguments;
use crate::{end_of_process, progress, snapshot};
use deployed::{Deployed, Ended};
use plan::{About, Addresses, From, Images, NAMESPACE, Node, PlannedCheck, To};
use report::CheckOutcome;
use wire::Probe;

/// The exit code that a shell uses for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;
/// How long a client may take beyond the time in which pods must run.
const PROBING: Duration = Duration::from_secs(30);
/// How long an interrupted test waits for the answer to its last request.
const LAST_REQUEST: Duration = Duration::from_secs(10);

#[derive(clap::Subcommand)]
pub(crate) enum ConnectivityCommand {
    /// Deploy pods into namespace tortie-connectivity-test, check them, and remove them. Without --store, in the lab
    Test(Box<ConnectivityTest>),
    /// Remove what an interrupted test has left
    Cleanup(ConnectivityCleanup),
    /// The servers of a test
    #[command(hide = true)]
    Serve { name: String },
    /// A client of a test
    #[command(hide = true)]
    Probe { probes: Vec<Probe> },
}

#[derive(clap::Args)]
pub(crate) struct ConnectivityTest {
    /// Test these nodes. By default, the first of each operating system by name
    #[arg(long, value_name = "NODE", value_delimiter = ',')]
    nodes: Vec<String>,
    /// How many nodes of each operating system are tested
    #[arg(long, value_name = "NUMBER", default_value_t = 2, conflicts_with = "nodes", value_parser = clap::value_parser!(u8).range(1..=3))]
    per_system: u8,
    /// The image of the pods, which must have this program as its entry point. By default that of this version of Tortie
    #[arg(long)]
    image: Option<String>,
    /// The image of pods on Windows nodes, if it is another one
    #[arg(long, value_name = "IMAGE")]
    windows_image: Option<String>,
    /// The maximum number of seconds until pods run
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1800))]
    timeout: u64,
    /// If policies are in another datastore than pods: calicoctl's configuration file for it. Reasons are looked for there
    #[arg(long, value_name = "FILE")]
    policy_config: Option<PathBuf>,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct ConnectivityCleanup {
    #[command(flatten)]
    store: StoreArguments,
}

impl ConnectivityCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        match self {
            Self::Test(test) => test.run(),
            Self::Cleanup(ConnectivityCleanup { store }) => crate::runtime()?.block_on(async {
                let store = store.open_to_change().await?;
                let Some(found) = Deployed::found(&*store).await? else {
                    output::line(&format!(
                        "there is nothing to delete: namespace {NAMESPACE} does not exist"
                    ));
                    return Ok(ExitCode::SUCCESS);
                };
                let removed = found.remove().await?;
                output::line(&format!(
                    "namespace {NAMESPACE} and {} deleted",
                    output::count(removed, "object")
                ));
                Ok(ExitCode::SUCCESS)
            }),
            Self::Serve { name } => crate::runtime()?.block_on(async {
                tokio::select! {
                    served = wire::serve(&name) => served?,
                    ended = end_of_process() => ended?,
                }
                Ok(ExitCode::SUCCESS)
            }),
            Self::Probe { probes } => crate::runtime()?.block_on(async {
                let failed = wire::run(&probes).await;
                output::data(&wire::printed(&failed));
                Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }),
        }
    }
}

impl ConnectivityTest {
    fn run(self) -> anyhow::Result<ExitCode> {
        let images = self.images()?;
        crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            let policies = match &self.policy_config {
                Some(file) => StoreArguments::of_config(file).open().await?,
                None => store.clone(),
            };
            let nodes = store.list(Kind::Node).await?.items;
            let nodes =
                plan::choose(&nodes, &self.nodes, self.per_system.into()).map_err(anyhow::Error::msg)?;
            ensure!(!nodes.is_empty(), "the cluster has no node");
            let deployed = Deployed::create(&*store).await?;
            let spinner = progress::spinner("pods start");
            // From here on, everything is removed, however the test ends.
            let mut test = pin!(self.test(&deployed, (&*policies, &spinner), &nodes, &images));
            let tested = tokio::select! {
                tested = &mut test => Some(tested),
                ended = end_of_process() => {
                    deployed.stop();
                    // An object whose creation has been sent must exist before the removal looks for it.
                    let _ = tokio::time::timeout(LAST_REQUEST, test).await;
                    ended.err().map(|error| Err(error.into()))
                }
            };
            spinner.set_message("everything is removed");
            let removed = deployed.remove().await;
            spinner.finish_and_clear();
            let Some(tested) = tested else {
                removed?;
                output::error_line("interrupted; everything that was deployed is removed");
                return Ok(ExitCode::from(INTERRUPTED));
            };
            if tested.is_err()
                && let Err(error) = &removed
            {
                output::error_line(&format!("{error:#}"));
            }
            let (outcomes, skipped) = tested?;
            match self.output {
                Format::Text => report::print(&nodes, &outcomes, &skipped),
                Format::Json => {
                    let document = report::document(&nodes, &outcomes, &skipped);
                    output::line(&serde_json::to_string_pretty(&document)?);
                }
            }
            removed?;
            let good = outcomes.iter().all(|outcome| outcome.failed.is_none());
            Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }

    fn images(&self) -> anyhow::Result<Images> {
        if let Some(lab) = self.store.lab() {
            ensure!(
                self.image.is_none() && self.windows_image.is_none(),
                "--image has no effect in the lab, which runs no images; remove it"
            );
            let image = lab.image().to_owned();
            return Ok(Images { linux: image.clone(), windows: image });
        }
        if !self.store.is_kubernetes() {
            bail!(
                "pods run in the lab or in Kubernetes; use --store kubernetes, also if Tortie's datastore is etcd"
            );
        }
        let linux = self.image.clone().unwrap_or_else(|| tortie_deploy::DEFAULT_IMAGE.to_owned());
        let windows = self.windows_image.clone().unwrap_or_else(|| linux.clone());
        Ok(Images { linux, windows })
    }

    /// Deploys, checks, and finds reasons. Returns what was checked, and what could not be.
    async fn test(
        &self,
        deployed: &Deployed<'_>,
        (policies, spinner): (&dyn Store, &ProgressBar),
        nodes: &[Node],
        images: &Images,
    ) -> anyhow::Result<(Vec<CheckOutcome>, Vec<String>)> {
        let patience = Duration::from_secs(self.timeout);
        let (addresses, not_running) = deploy(deployed, nodes, images, patience).await?;
        let checks = plan::checks(nodes, &addresses);
        spinner.set_message(format!("pods check {}", output::count(checks.len() as u64, "path")));
        let mut outcomes = check(deployed, nodes, images, &checks, patience, &not_running).await?;
        not_proven(&mut outcomes);
        let mut skipped = Vec::new();
        if !addresses.has_dns {
            skipped.push(format!("DNS: the cluster has no Service {}", reasons::DNS));
        }
        if outcomes.iter().any(|outcome| outcome.failed.is_some()) {
            find_reasons(policies, nodes, &mut outcomes).await?;
        }
        Ok((outcomes, skipped))
    }
}

/// Deploys the policy, the Services and the servers. Returns the addresses, and why servers do not run.
async fn deploy(
    deployed: &Deployed<'_>,
    nodes: &[Node],
    images: &Images,
    patience: Duration,
) -> anyhow::Result<(Addresses, BTreeMap<String, String>)> {
    // Before the pods, so that no server is ever open.
    deployed.add(plan::policy()).await?;
    for os in plan::systems(nodes) {
        deployed.add(plan::service_object(os)).await?;
    }
    let mut names = Vec::new();
    for node in 0..nodes.len() {
        deployed.add(plan::server_pod(nodes, node, images)).await?;
        names.push(plan::server(node));
    }
    let mut addresses = Addresses::default();
    let started = deployed.wait_for_servers(&names, patience).await?;
    let mut not_running = BTreeMap::new();
    for (node, name) in names.into_iter().enumerate() {
        match started.get(&name) {
            Some(Ok(address)) => drop(addresses.servers.insert(node, *address)),
            Some(Err(why)) => drop(not_running.insert(name, why.clone())),
            None => {}
        }
    }
    for os in plan::systems(nodes) {
        let address = deployed.service_address(&plan::service(os), patience).await?;
        addresses.services.extend(address.map(|address| (os, address)));
    }
    let (namespace, name) = reasons::DNS.split_once('/').unwrap_or_default();
    addresses.has_dns = deployed.exists(&Key::namespaced(Kind::Service, namespace, name)).await?;
    Ok((addresses, not_running))
}

/// Starts the clients, and waits until they have ended.
async fn check(
    deployed: &Deployed<'_>,
    nodes: &[Node],
    images: &Images,
    checks: &[PlannedCheck],
    patience: Duration,
    not_running: &BTreeMap<String, String>,
) -> anyhow::Result<Vec<CheckOutcome>> {
    let mut of_client: BTreeMap<From, Vec<(&PlannedCheck, &Probe)>> = BTreeMap::new();
    for check in checks {
        if let Some(probe) = &check.probe {
            of_client.entry(check.from).or_default().push((check, probe));
        }
    }
    let mut names = Vec::new();
    for (from, probes) in &of_client {
        let probes: Vec<&Probe> = probes.iter().map(|(_, probe)| *probe).collect();
        if let Some(pod) = plan::client_pod(nodes, *from, &probes, images) {
            deployed.add(pod).await?;
            names.push(from.pod());
        }
    }
    let ended = deployed.wait_for_clients(&names, patience, PROBING).await?;
    let mut results: BTreeMap<(From, About, To), Option<String>> = BTreeMap::new();
    for (from, probes) in &of_client {
        let name = from.pod();
        let unknown = |why: &str| vec![Some(format!("{name} {why}")); probes.len()];
        let found = match ended.get(&name) {
            Some(Ended::Succeeded) => vec![None; probes.len()],
            Some(Ended::Failed(text)) => wire::read_printed(text, probes.len())
                .unwrap_or_else(|| unknown(&format!("ended without results: {}", last_line(text)))),
            Some(Ended::Not(why)) => unknown(why),
            None => unknown("was not started"),
        };
        for ((check, _), failed) in probes.iter().zip(found) {
            results.insert((check.from, check.about, check.to), failed);
        }
    }
    let outcome = |check: &PlannedCheck| {
        let failed = match results.remove(&(check.from, check.about, check.to)) {
            Some(failed) => failed,
            None => Some(match check.to {
                To::Server(node) => {
                    let name = plan::server(node);
                    not_running
                        .get(&name)
                        .map_or_else(|| format!("{name} has no address"), |why| format!("{name} {why}"))
                }
                To::Service(os) => reasons::no_address(os),
            }),
        };
        CheckOutcome { check: check.clone(), failed }
    };
    let mut outcome = outcome;
    Ok(checks.iter().map(&mut outcome).collect())
}

fn last_line(text: &str) -> &str {
    text.lines().next_back().unwrap_or("it printed nothing")
}

/// That a port does not answer proves nothing where the allowed port does not answer either.
fn not_proven(outcomes: &mut [CheckOutcome]) {
    let place = |outcome: &CheckOutcome| (outcome.check.from, outcome.check.to);
    let allowed = outcomes.iter().filter(|outcome| outcome.check.about == About::Allowed);
    let broken: Vec<_> = allowed.filter(|outcome| outcome.failed.is_some()).map(place).collect();
    for outcome in outcomes {
        if outcome.check.about == About::Denied
            && outcome.failed.is_none()
            && broken.contains(&place(outcome))
        {
            outcome.failed = Some(wire::NOT_PROVEN.to_owned());
        }
    }
}

/// Replaces symptoms by reasons, as the policies and reports in this datastore give them.
async fn find_reasons(
    store: &dyn Store,
    nodes: &[Node],
    outcomes: &mut [CheckOutcome],
) -> anyhow::Result<()> {
    // The clients have ended, and an ended pod has no verdicts any more.
    let snapshot = snapshot::of_open(store, |stored| {
        if stored.key.kind == Kind::Pod && stored.key.namespace == NAMESPACE {
            stored.value["status"]["phase"] = "Running".into();
        }
    });
    let known = reasons::Known { snapshot: &snapshot.await?, nodes, now: Timestamp::now() };
    let all = outcomes.to_vec();
    for outcome in outcomes.iter_mut() {
        if outcome.check.probe.is_some()
            && outcome.failed.as_deref().is_some_and(|why| why != wire::NOT_PROVEN)
        {
            outcome.failed = Some(known.reason(outcome, &all));
        }
    }
    Ok(())
}
