//! `tortie version`, `tortie completion` and `tortie man`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap_complete::Shell;
use serde_json::json;
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::output::{self, Format};
use crate::store::{StoreArguments, list};

#[derive(clap::Args)]
pub(crate) struct Version {
    /// Only the version of this program
    #[arg(long)]
    client: bool,
    /// Show the versions again and again, with this time between them, such as 2s or 1m
    #[arg(long, value_name = "PERIOD", value_parser = period, conflicts_with = "client")]
    poll: Option<Duration>,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Completion {
    /// The shell
    shell: Shell,
}

#[derive(clap::Args)]
pub(crate) struct Man {
    /// The folder for the pages, such as /usr/local/share/man/man1
    folder: PathBuf,
}

impl Man {
    /// Writes a page for each command.
    pub(crate) fn run(self, command: clap::Command) -> anyhow::Result<ExitCode> {
        let shown = self.folder.display().to_string();
        std::fs::create_dir_all(&self.folder).with_context(|| shown.clone())?;
        clap_mangen::generate_to(command, &self.folder).with_context(|| shown.clone())?;
        output::line(&format!("the pages are in {shown}; man {shown}/tortie.1 shows the first one"));
        Ok(ExitCode::SUCCESS)
    }
}

/// A period of time: a number with one of the units s, m and h, as calicoctl takes it.
fn period(text: &str) -> Result<Duration, String> {
    let wrong = || "a number with a unit is expected, such as 2s or 1m".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let number: u64 = text.strip_suffix(unit).unwrap_or_default().parse().map_err(|_| wrong())?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return Err(wrong()),
    };
    number.checked_mul(seconds).filter(|seconds| *seconds > 0).map(Duration::from_secs).ok_or_else(wrong)
}

/// The versions in a cluster.
#[derive(Debug, Default)]
struct Versions {
    /// The nodes by the version of their agent.
    agents: BTreeMap<String, Vec<String>>,
    /// The version of Calico that has used the datastore.
    calico: Option<String>,
}

impl Version {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(period) = self.poll else { return self.show() };
        loop {
            // Whoever waits for an update of the cluster waits while it does not answer, too.
            if let Err(error) = self.show() {
                output::error(&format!("{error:#}"));
            }
            std::thread::sleep(period);
        }
    }

    fn show(&self) -> anyhow::Result<ExitCode> {
        let client = env!("CARGO_PKG_VERSION");
        if self.output == Format::Text {
            // Its own version is known without a cluster.
            output::line(&format!("client   {client}"));
        }
        let cluster = match self.client {
            true => None,
            false => Some(crate::runtime()?.block_on(async { read(&*self.store.open().await?).await })?),
        };
        if self.output == Format::Json {
            let cluster = cluster.map(|cluster| json!({"agents": cluster.agents, "calico": cluster.calico}));
            output::line(&serde_json::to_string_pretty(&json!({"client": client, "cluster": cluster}))?);
            return Ok(ExitCode::SUCCESS);
        }
        let Some(Versions { agents, calico }) = cluster else { return Ok(ExitCode::SUCCESS) };
        if agents.is_empty() {
            output::line("agents   no node has reported");
        }
        for (version, nodes) in agents {
            let version = if version.is_empty() { "unknown" } else { &version };
            output::line(&format!("agents   {version} on {}", nodes.join(", ")));
        }
        if let Some(calico) = calico {
            output::line(&format!("Calico   {calico} has used this datastore"));
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn read(store: &dyn Store) -> anyhow::Result<Versions> {
    let mut versions = Versions::default();
    for report in list(store, Kind::NodeReport).await? {
        // A report of another version may have another form.
        let version = serde_json::from_value::<NodeReport>(report.value).map(|report| report.status.version);
        versions.agents.entry(version.unwrap_or_default()).or_default().push(report.key.name);
    }
    let information = Key::global(Kind::ClusterInformation, "default");
    let information =
        list(store, Kind::ClusterInformation).await?.into_iter().find(|one| one.key == information);
    let calico =
        information.and_then(|one| Some(one.value.pointer("/spec/calicoVersion")?.as_str()?.to_owned()));
    versions.calico = calico.filter(|version| !version.is_empty());
    Ok(versions)
}

impl Completion {
    /// Prints the script for `command`.
    pub(crate) fn run(self, mut command: clap::Command) -> ExitCode {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "tortie", &mut script);
        output::text(&String::from_utf8_lossy(&script));
        ExitCode::SUCCESS
    }
}
